//! The command line as a person sees it: snapshots of what it prints, and its exit statuses.

use crate::support::{Sandbox, repository};

const PIPELINE: &str = "name: demo
params: { word: hello }
stages:
  words: { uses: run, run: 'echo ${params.word} > outputs/out', outputs: { out: tree } }
  twice: { uses: run, inputs: { x: words.out }, run: 'cat inputs/x inputs/x > outputs/out; echo printed', outputs: { out: tree } }
  table: { uses: run, run: \"echo '{\\\"n\\\": 1, \\\"t\\\": \\\"x\\\"}' > outputs/t.jsonl\", outputs: { t: { type: table, columns: { n: int64, t: utf8 } } } }
";

fn demo() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("p.yaml", PIPELINE);
    sandbox
}

#[test]
fn a_first_session() {
    let sandbox = demo();
    let output = sandbox.output(&["run", "p.yaml", "--jobs", "1"]);
    assert!(output.status.success());
    insta::assert_snapshot!("run", sandbox.stable(&String::from_utf8_lossy(&output.stderr)));
    insta::assert_snapshot!("made", sandbox.stable(&String::from_utf8_lossy(&output.stdout)));
    insta::assert_snapshot!("plan_hit", sandbox.good(&["plan"]));
    insta::assert_snapshot!("plan_changed", sandbox.good(&["plan", "-p", "word=bye"]));
    insta::assert_snapshot!("status", sandbox.stable(&sandbox.good(&["status"])));
    insta::assert_snapshot!("show_table", sandbox.stable(&sandbox.good(&["show", "table"])));
    insta::assert_snapshot!("show_tree", sandbox.stable(&sandbox.good(&["show", "twice.out"])));
    insta::assert_snapshot!("log", sandbox.good(&["log", "twice"]));
    insta::assert_snapshot!("explain", sandbox.stable(&sandbox.good(&["explain", "twice"])));
    insta::assert_snapshot!("graph", sandbox.good(&["graph"]));
    insta::assert_snapshot!("runs", sandbox.stable(&sandbox.good(&["runs"])));
    insta::assert_snapshot!("help", sandbox.good(&["--help"]));
    sandbox.good(&["export", "twice.out", "here"]);
    assert_eq!(std::fs::read_to_string(sandbox.path("here/out")).unwrap(), "hello\nhello\n");
    sandbox.good(&["tag", "twice.out", "texts@v1"]);
    sandbox.good(&["export", "texts@v1", "there"]);
}

#[test]
fn mistakes_are_told_with_a_hint_and_change_nothing() {
    let sandbox = demo();
    let mut told = String::new();
    sandbox.write("wrong.yaml", &PIPELINE.replace("uses: run, run: 'echo", "uses: ops/crwal, run: 'echo"));
    sandbox
        .write("unknown.yaml", &PIPELINE.replace("inputs: { x: words.out }", "inputs: { x: { path: nowhere.txt } }"));
    for arguments in [
        &["run", "nowhere.yaml"][..],
        &["run", "wrong.yaml"],
        &["run", "unknown.yaml"],
        &["run"],
        &["run", "p.yaml", "twcie"],
        &["run", "p.yaml", "-p", "wrod=x"],
        &["run", "p.yaml", "-p", "word"],
        &["run", "p.yaml", "--refresh", "tabel"],
        &["show", "table", "--pipeline", "p.yaml"],
        &["show", "tabel", "--pipeline", "p.yaml"],
        &["export", "what@ever", "x"],
        &["stages", "ops/fliter"],
        &["status"],
        &["log", "table"],
    ] {
        told.push_str(&format!("$ cuda-agent {}\n{}\n\n", arguments.join(" "), sandbox.bad(2, arguments)));
    }
    insta::assert_snapshot!(told);
    let records = sandbox.path(".cuda-agent/v1/records");
    assert!(!records.exists(), "nothing was made");
}

#[test]
fn a_failing_stage_shows_the_end_of_its_log() {
    let sandbox = demo();
    let failing = "echo one; echo two >&2; exit 4";
    sandbox.write("p.yaml", &PIPELINE.replace("cat inputs/x inputs/x > outputs/out; echo printed", failing));
    insta::assert_snapshot!(sandbox.bad(1, &["run", "p.yaml", "--jobs", "1"]));
}

#[test]
fn a_store_that_cannot_be_used_is_told() {
    let sandbox = demo();
    sandbox.write("file", "");
    insta::assert_snapshot!(sandbox.bad(3, &["run", "p.yaml", "--store", "file/below"]));
    insta::assert_snapshot!(sandbox.bad(3, &["run", "p.yaml", "--store", "ftp://x"]));
}

#[test]
fn everything_speaks_json() {
    let sandbox = demo();
    let events = sandbox.good(&["run", "p.yaml", "--json"]);
    let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(events.lines().map(parse).any(|event| event["event"] == "run_finished" && event["executed"] == 3));
    for arguments in [
        &["plan"][..],
        &["explain", "twice"],
        &["status"],
        &["runs"],
        &["log", "twice"],
        &["show", "table"],
        &["export", "table", "x"],
        &["tag", "table.t", "t@v1"],
        &["stages"],
        &["stages", "ops/publish"],
        &["schema"],
        &["graph"],
    ] {
        let mut all = arguments.to_vec();
        all.push("--json");
        parse(&sandbox.good(&all));
    }
    let output = sandbox.output(&["run", "nowhere.yaml", "--json"]);
    let error = parse(&String::from_utf8(output.stdout).unwrap());
    assert!(error["error"]["message"].as_str().unwrap().starts_with("nowhere.yaml"));
}

#[test]
fn a_store_in_memory_leaves_no_store() {
    let sandbox = demo();
    sandbox.good(&["run", "p.yaml", "--store", "memory://"]);
    assert!(!sandbox.path(".cuda-agent/v1").exists());
}

/// Commands that only look.
const LOOKING: [&[&str]; 8] = [
    &["status"],
    &["runs"],
    &["log", "words"],
    &["show", "words", "--pipeline", "p.yaml"],
    &["show", "x@v1"],
    &["export", "words", "out", "--pipeline", "p.yaml"],
    &["plan", "p.yaml"],
    &["explain", "p.yaml", "words"],
];

#[test]
fn looking_makes_no_default_store() {
    let sandbox = demo();
    // What is learned of an input from outside is kept too, and that is not worth a folder either.
    sandbox.write("in.txt", "text").write(
        "p.yaml",
        &PIPELINE.replace("words: { uses: run,", "words: { uses: run, inputs: { i: { path: in.txt } },"),
    );
    for arguments in LOOKING {
        let output = sandbox.output(arguments);
        assert_ne!(output.status.code(), Some(3), "{arguments:?}: {output:?}");
        assert!(!sandbox.path(".cuda-agent").exists(), "{arguments:?} made a store");
    }
    assert!(sandbox.good(&["plan", "p.yaml"]).contains("0 up to date"));
    for told in [sandbox.stable(&sandbox.good(&["runs"])), sandbox.bad(2, &["status"])] {
        assert!(told.contains("no run is recorded in file://[folder]/.cuda-agent"), "{told}");
    }
    sandbox.good(&["run", "p.yaml"]);
    assert!(sandbox.good(&["plan"]).contains("3 up to date"));
    assert!(sandbox.path(".cuda-agent/cache/files.json").exists(), "what a run learned of files is kept");
}

#[test]
fn a_store_that_is_named_and_not_there_is_told() {
    let sandbox = demo();
    let typo = format!("file://{}", sandbox.path("typo").display());
    for arguments in LOOKING {
        for store in ["typo", &typo] {
            let mut all = arguments.to_vec();
            all.extend(["--store", store]);
            let told = sandbox.bad(3, &all);
            let wanted = format!("there is no store at {}", sandbox.stable(store));
            assert!(told.contains(&wanted) && told.contains("hint: "), "{told}");
        }
    }
    sandbox.write("cuda-agent.yaml", &format!("store: {typo}\n"));
    assert!(sandbox.bad(3, &["status"]).contains("there is no store at file://[folder]/typo"));
    assert!(!sandbox.path("typo").exists() && !sandbox.path(".cuda-agent").exists());
    // A run makes it, and then it can be looked at.
    sandbox.good(&["run", "p.yaml"]);
    sandbox.good(&["status", "--store", &typo]);
    assert_eq!(sandbox.bad(2, &["status", "--store", "memory://"]).matches("memory://").count(), 1);
}

#[test]
fn doctor_looks_at_everything() {
    let sandbox = demo();
    let output = sandbox.output(&["doctor", "--json"]);
    let checks: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> = checks.iter().filter_map(|check| check["check"].as_str()).collect();
    for name in ["machine", "gpu", "nvcc", "nvrtc headers", "nvcc headers", "c++", "python", "processes", "store"] {
        assert!(names.contains(&name), "{names:?}");
    }
}

/// `data/pipeline.schema.json` is what editors are pointed to. `UPDATE_SCHEMA=1` writes it.
#[test]
fn the_schema_in_data_is_current() {
    let schema = demo().good(&["schema"]);
    let file = repository().join("data/pipeline.schema.json");
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&file, &schema).unwrap();
    }
    let kept = std::fs::read_to_string(&file).unwrap();
    assert!(kept == schema, "run `UPDATE_SCHEMA=1 cargo test --test integration schema` and commit the file");
}

#[test]
fn parameters_choose_a_result() {
    let sandbox = demo();
    sandbox.good(&["run", "p.yaml"]);
    sandbox.good(&["run", "p.yaml", "-p", "word=bye"]);
    sandbox.good(&["export", "words", "newest"]);
    sandbox.good(&["export", "words", "older", "-p", "word=hello"]);
    assert_eq!(std::fs::read_to_string(sandbox.path("newest/out")).unwrap(), "bye\n");
    assert_eq!(std::fs::read_to_string(sandbox.path("older/out")).unwrap(), "hello\n");
    let error = sandbox.bad(2, &["export", "words", "none", "-p", "word=else"]);
    assert!(error.contains("was not made with these parameters"), "{error}");
}

#[test]
fn a_tagged_table_feeds_a_command() {
    let sandbox = demo();
    sandbox.good(&["run", "p.yaml"]);
    sandbox.good(&["tag", "table.t", "rows@v1"]);
    sandbox.write(
        "q.yaml",
        "name: q\nstages:\n  use: { uses: run, inputs: { w: { artifact: rows@v1 } }, run: 'test -f inputs/w.parquet; echo ok > \
         outputs/o', outputs: { o: tree } }\n",
    );
    sandbox.good(&["run", "q.yaml"]);
}

#[test]
fn a_file_that_was_not_declared_is_hinted_at() {
    let sandbox = demo();
    sandbox.write("scripts/a.sh", "echo").write(
        "q.yaml",
        "name: q\nstages: { a: { uses: run, run: 'sh scripts/a.sh > outputs/o', outputs: { o: tree } } }\n",
    );
    let error = sandbox.bad(1, &["run", "q.yaml"]);
    assert!(error.contains("add `files: [scripts/a.sh]` to the stage"), "{error}");
}

#[test]
fn a_reports_readme_is_shown_below_its_files_and_a_trees_is_not() {
    let sandbox = demo();
    sandbox.write(
        "q.yaml",
        "name: q\nstages:\n  a:\n    uses: run\n    run: |\n      for port in r t; do mkdir outputs/$port; echo page > outputs/$port/index.html; \
         echo '# Seven of nine' > outputs/$port/README.md; done\n    outputs: { r: report, t: tree }\n",
    );
    sandbox.good(&["run", "q.yaml"]);
    let shown = sandbox.good(&["show", "a.r", "--pipeline", "q.yaml"]);
    assert!(shown.contains("index.html") && shown.ends_with("\n\n# Seven of nine\n"), "{shown}");
    assert!(!sandbox.good(&["show", "a.t", "--pipeline", "q.yaml"]).contains("Seven"));
    let json: serde_json::Value =
        serde_json::from_str(&sandbox.good(&["show", "a.r", "--pipeline", "q.yaml", "--json"])).unwrap();
    assert_eq!(json["r"]["readme"], "# Seven of nine\n");
}
