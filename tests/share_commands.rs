//! `diff` and `accept`, as a person sees them.

use serde_json::Value;

use crate::support::Sandbox;

const PIPELINE: &str = "name: demo
params: { last: Bergen, word: hello }
stages:
  cities:
    uses: run
    run: |
      for city in Oslo Gdansk ${params.last}; do echo \"{\\\"city\\\": \\\"$city\\\", \\\"seen\\\": 1}\"; done > outputs/cities.jsonl
    outputs: { cities: { type: table, columns: { city: utf8, seen: int64 } } }
  measured: { uses: my/measure, inputs: { cities: cities.cities } }
  folder:
    uses: run
    run: |
      mkdir outputs/d; echo ${params.word} > outputs/d/a; echo b > outputs/d/${params.word}
      echo \"{\\\"event\\\": \\\"metric\\\", \\\"name\\\": \\\"length\\\", \\\"value\\\": $(echo ${params.word} | wc -c)}\" >&3
    outputs: { d: tree }
  count: { uses: run, inputs: { d: folder.d }, run: 'ls inputs/d | wc -l > outputs/n', outputs: { n: tree } }
  twice: { uses: run, inputs: { n: count.n }, run: 'cat inputs/n inputs/n > outputs/n', outputs: { n: tree } }
";

const MANIFEST: &str = "name: my/measure
version: 1.0.0
summary: How long each city's name is.
inputs:
  cities: { type: table, columns: { city: utf8 } }
outputs:
  rows: { type: table, columns: [{ name: letters, type: int64 }, { name: ms, type: float64, measured: true }] }
by_row: { port: cities, window: 4 }
run: [python, measure.py]
sources: [measure.py]
";

const PROGRAM: &str = r#"import time
import cuda_agent_stage as stage


def work(program):
    for row in program.rows():
        program.answer(row, {"rows": [{"letters": len(row["columns"]["city"]), "ms": time.time()}]})


stage.main(work)
"#;

fn demo() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("cuda-agent.yaml", "stages: [kinds]\npython: python3\npipeline: p.yaml\n");
    sandbox.write("kinds/measure/stage.yaml", MANIFEST).write("kinds/measure/measure.py", PROGRAM);
    sandbox.write("p.yaml", PIPELINE);
    sandbox
}

/// Changes a file in a way that cannot matter, and keeps what it was.
fn edit(sandbox: &Sandbox, file: &str, old: &str, new: &str) {
    let text = std::fs::read_to_string(sandbox.path(file)).unwrap();
    assert!(text.contains(old), "{file} has no `{old}`");
    sandbox.write(file, &text.replace(old, new));
}

/// A text without what varies.
fn told(sandbox: &Sandbox, text: &str) -> String {
    sandbox.stable(text)
}

fn json(sandbox: &Sandbox, arguments: &[&str]) -> Value {
    let text = sandbox.good(&[arguments, &["--json"]].concat());
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Run ids, newest first.
fn runs(sandbox: &Sandbox) -> Vec<String> {
    let runs = json(sandbox, &["runs"]);
    runs.as_array().unwrap().iter().map(|run| run["run"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn diff_tells_what_changed_and_what_came_of_it() {
    let sandbox = demo();
    sandbox.good(&["run"]);
    sandbox.good(&["run", "-p", "last=Tromso", "-p", "word=bye", "measured", "count"]);
    insta::assert_snapshot!("diff", told(&sandbox, &sandbox.good(&["diff", "last~1", "last"])));
    let same = told(&sandbox, &sandbox.good(&["diff", "last", "last"]));
    assert!(same.ends_with("\nstages: 4 with the same key, 0 different"), "{same}");

    let value = json(&sandbox, &["diff", "last~1", "last"]);
    let ids = runs(&sandbox);
    assert_eq!(
        (&value["runs"]["a"]["run"], &value["runs"]["b"]["run"]),
        (&ids[1].clone().into(), &ids[0].clone().into())
    );
    assert_eq!(value["params"]["last"], serde_json::json!({ "a": "Bergen", "b": "Tromso" }));
    assert_eq!(value["only"], serde_json::json!({ "a": ["twice"], "b": [] }));
    let stages = value["stages"].as_array().unwrap();
    let stage = |name: &str| stages.iter().find(|stage| stage["stage"] == name).unwrap();
    assert_eq!(stage("count")["reasons"][0]["by"], "folder.d");
    assert_eq!(stage("count")["outputs"]["n"]["difference"], "same_result");
    let columns = &stage("measured")["outputs"]["rows"]["columns"];
    assert_eq!(columns["changed"], serde_json::json!(["city", "ms"]));
    assert_eq!(columns["measured"], serde_json::json!(["ms"]));
    assert_eq!(stage("measured")["rows"]["b"]["reused"], 2);
    assert_eq!(stage("folder")["metrics"]["length"], serde_json::json!({ "a": 6.0, "b": 4.0 }));
}

#[test]
fn diff_says_what_failed_and_what_is_gone() {
    let sandbox = demo();
    sandbox.good(&["run", "count"]);
    edit(&sandbox, "p.yaml", "wc -l > outputs/n", "wc -l > outputs/n; exit 1");
    sandbox.bad(1, &["run", "count"]);
    insta::assert_snapshot!("diff_failed", told(&sandbox, &sandbox.good(&["diff", "last~1", "last"])));

    let key = json(&sandbox, &["status", &runs(&sandbox)[1]])["stages"]["count"]["key"].as_str().unwrap().to_owned();
    edit(&sandbox, "p.yaml", "outputs/n; exit 1", "outputs/n; true");
    sandbox.good(&["run", "count"]);
    std::fs::remove_dir_all(sandbox.path(".cuda-agent/v1/records").join(key)).unwrap();
    let told = sandbox.good(&["diff", "last~2", "last"]);
    assert!(told.contains("\ncount: the record of a is gone from the store\n"), "{told}");
    assert_eq!(json(&sandbox, &["diff", "last~2", "last"])["stages"][0]["record_gone"]["a"], true);
}

#[test]
fn runs_are_named_by_as_much_as_is_needed() {
    let sandbox = demo();
    sandbox.write(
        "q.yaml",
        "name: other\nstages: { a: { uses: run, run: 'echo 1 > outputs/o', outputs: { o: tree } } }\n",
    );
    sandbox.good(&["run", "folder"]);
    sandbox.good(&["run", "q.yaml"]);
    sandbox.good(&["run", "folder", "-p", "word=bye"]);
    let ids = runs(&sandbox);
    let (new, old) = (&ids[0], &ids[2]);
    let pair = |arguments: &[&str]| {
        let value = json(&sandbox, arguments);
        ["a", "b"].map(|run| value["runs"][run]["run"].as_str().unwrap().to_owned())
    };
    let expected = [old.clone(), new.clone()];
    assert_eq!(pair(&["diff", "last~1", "last"]), expected, "of the project's pipeline");
    assert_eq!(pair(&["diff", old, &new[..new.len() - 1]]), expected, "by the beginning");
    assert_eq!(pair(&["diff", &old[old.len() - 6..], &new[new.len() - 6..]]), expected, "by the end");
    assert_eq!(pair(&["diff", "last", "last", "--pipeline", "q.yaml"]), [ids[1].clone(), ids[1].clone()]);

    let error = |arguments: &[&str]| sandbox.bad(2, arguments);
    let year = &new[..2];
    let told = [
        error(&["diff", "nothing", "last"]),
        error(&["diff", "last~2", "last"]),
        error(&["diff", "last", "last", "-p", "word=x"]),
    ];
    insta::assert_snapshot!("diff_wrong", told.join("\n"));
    let ambiguous = error(&["diff", year, "last"]);
    assert!(
        ambiguous.starts_with(&format!("error: `{year}` begins or ends 3 runs\nhint: give more of one: [run], ")),
        "{ambiguous}"
    );
    assert!(error(&["status", year]).starts_with(&format!("error: `{year}` begins or ends 3 runs")));
}

#[test]
fn an_accepted_result_stands_for_the_one_of_now() {
    let sandbox = demo();
    sandbox.good(&["run"]);
    edit(&sandbox, "p.yaml", "cat inputs/n inputs/n", "cat  inputs/n inputs/n");
    edit(&sandbox, "p.yaml", "'ls inputs/d", "'ls  inputs/d");
    edit(&sandbox, "kinds/measure/measure.py", "import time", "import time  # as ever");
    let before = runs(&sandbox);
    insta::assert_snapshot!("accept_dry", told(&sandbox, &sandbox.good(&["accept", "--all", "--dry-run"])));
    assert_eq!(runs(&sandbox), before, "a dry run writes nothing");
    assert!(sandbox.good(&["plan"]).contains("2 to run, 1 pending"));

    // Named in any order; producers are looked at first.
    insta::assert_snapshot!("accept", told(&sandbox, &sandbox.good(&["accept", "twice", "measured", "count"])));
    insta::assert_snapshot!("accept_plan", sandbox.good(&["plan"]));
    insta::assert_snapshot!("accept_runs", told(&sandbox, sandbox.good(&["runs", "-n", "1"]).trim_end()));
    insta::assert_snapshot!("accept_status", told(&sandbox, &sandbox.good(&["status"])));
    let explained = sandbox.stable(&sandbox.good(&["explain", "twice"]));
    assert!(explained.contains("  accepted from [digest] by run [run], made in [number] s"), "{explained}");
    let shown = sandbox.stable(&sandbox.good(&["show", "twice"]));
    assert!(shown.ends_with("\naccepted from [digest]"), "{shown}");

    let old = json(&sandbox, &["status", &before[0]]);
    let new = json(&sandbox, &["explain", "twice"]);
    assert_eq!(new[0]["record"]["accepted_from"], old["stages"]["twice"]["key"]);
    assert_eq!(json(&sandbox, &["show", "twice"])["n"]["accepted_from"], old["stages"]["twice"]["key"]);
    assert_eq!(sandbox.executed(&["p.yaml"]), [""; 0]);
    // An accepted result can be accepted again, and its key is where that came from.
    edit(&sandbox, "p.yaml", "cat  inputs/n", "cat   inputs/n");
    let accepted = json(&sandbox, &["accept", "twice"]);
    assert_eq!(accepted["accepted"][0]["accepted_from"], new[0]["key"]);
    assert_eq!(accepted["accepted"][0]["reasons"][0]["reason"], "command_changed");
    assert_eq!(runs(&sandbox)[0], accepted["run"].as_str().unwrap());
}

/// The newest result of `folder` is one of another word, and its changed command alone would not tell.
#[test]
fn the_result_of_the_same_parameters_is_accepted() {
    let sandbox = demo();
    sandbox.good(&["run", "folder"]);
    let first = runs(&sandbox).remove(0);
    sandbox.good(&["run", "folder", "-p", "word=bye"]);
    let second = runs(&sandbox).remove(0);
    edit(&sandbox, "p.yaml", "echo b >", "echo  b >");
    let accepted = json(&sandbox, &["accept", "folder"]);
    assert_eq!(accepted["accepted"][0]["from_run"], first);
    sandbox.good(&["export", "folder", "out"]);
    assert!(sandbox.path("out/hello").exists(), "the word of now");
    // Where no run had these parameters, it is said which ones that run had.
    let told = sandbox.good(&["accept", "folder", "-p", "word=else"]);
    assert!(told.contains(" with word=\"hello\", although its command changed"), "{told}");
    let told = sandbox.good(&["accept", "folder", "-p", "word=bye"]);
    assert!(told.contains(&format!("as in run {second}, although its command changed")), "{told}");
}

#[test]
fn what_follows_an_accepted_stage_may_be_named_too() {
    let sandbox = demo();
    sandbox.good(&["run", "count"]);
    edit(&sandbox, "p.yaml", "echo b >", "echo  b >");
    assert!(sandbox.good(&["plan", "count"]).contains("pending"));
    let told = told(&sandbox, &sandbox.good(&["accept", "folder", "count"]));
    insta::assert_snapshot!("accept_follows", told);
    assert!(sandbox.good(&["plan", "count"]).contains("0 to run, 0 pending, 2 up to date"));
}

#[test]
fn all_leaves_what_it_cannot_accept() {
    let sandbox = demo();
    sandbox.good(&["run", "count"]);
    edit(&sandbox, "p.yaml", "echo b >", "echo  b >");
    insta::assert_snapshot!("accept_all", told(&sandbox, &sandbox.good(&["accept", "--all"])));
    let value = json(&sandbox, &["accept", "--all"]);
    assert_eq!(value["run"], Value::Null);
    assert_eq!(value["left"].as_array().unwrap().len(), 3);
    let told = sandbox.good(&["accept", "--all"]);
    assert!(told.ends_with("nothing to accept\n"), "{told}");
}

#[test]
fn rows_come_along() {
    let sandbox = demo();
    sandbox.good(&["run", "measured"]);
    edit(&sandbox, "kinds/measure/measure.py", "import time", "import time  # as ever");
    sandbox.good(&["accept", "measured"]);
    let record = &json(&sandbox, &["explain", "measured"])[0]["record"];
    let rows = serde_json::json!({ "total": 3, "executed": 0, "reused": 3, "rejected": 0, "failed": 0 });
    assert_eq!(record["rows"], rows);
    // The new row alone is done, so the other results were found under the new base key.
    edit(&sandbox, "p.yaml", "Oslo Gdansk", "Oslo Gdansk Lviv");
    let plan = sandbox.good(&["plan", "measured"]);
    assert!(plan.contains("cities    miss"), "{plan}");
    let output = sandbox.output(&["run", "measured"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && told.contains("(1 rows executed, 3 reused)"), "{told}");
    // Another table of the same rows needs none of them copied.
    edit(&sandbox, "p.yaml", "\\\"seen\\\": 1", "\\\"seen\\\": 2");
    sandbox.good(&["run", "cities"]);
    let accepted = json(&sandbox, &["accept", "measured"]);
    assert_eq!(accepted["accepted"][0]["row_segments"], Value::Null);
}

#[test]
fn rows_that_would_not_fit_are_refused() {
    let program = "import time  # as ever";
    let changes: [(&str, &str, &str); 3] = [
        ("columns: { city: utf8 }", "columns: { city: utf8, seen: int64 }", "no row results for the columns"),
        ("{ name: letters, type: int64 }", "{ name: letters, type: float64 }", "column `letters` is int64"),
        (", { name: ms, type: float64, measured: true }", "", "column `ms` is not declared"),
    ];
    for (old, new, why) in changes {
        let sandbox = demo();
        sandbox.good(&["run", "measured"]);
        edit(&sandbox, "kinds/measure/stage.yaml", old, new);
        edit(&sandbox, "kinds/measure/measure.py", "import time", program);
        let before = runs(&sandbox);
        let error = sandbox.bad(2, &["accept", "measured"]);
        assert!(error.contains(why) && error.contains("hint: `cuda-agent run measured` makes it"), "{error}");
        assert_eq!(runs(&sandbox), before, "nothing was changed");
    }
    // The order of its outputs' columns is that of the row results.
    let sandbox = demo();
    sandbox.good(&["run", "measured"]);
    let (letters, ms) = ("{ name: letters, type: int64 }", "{ name: ms, type: float64, measured: true }");
    edit(&sandbox, "kinds/measure/stage.yaml", &format!("{letters}, {ms}"), &format!("{ms}, {letters}"));
    let error = sandbox.bad(2, &["accept", "measured"]);
    assert!(error.contains("so its row results do not fit"), "{error}");
    // Row results that are gone are no results.
    std::fs::remove_dir_all(sandbox.path(".cuda-agent/v1/rows")).unwrap();
    assert!(sandbox.bad(2, &["accept", "measured"]).contains("no row results for the columns"));
}

#[test]
fn a_column_that_is_called_measured_now_is_so_in_the_accepted_result() {
    let sandbox = demo();
    sandbox.good(&["run", "measured"]);
    edit(
        &sandbox,
        "kinds/measure/stage.yaml",
        "{ name: letters, type: int64 }",
        "{ name: letters, type: int64, measured: true }",
    );
    sandbox.good(&["accept", "measured"]);
    assert_eq!(sandbox.good(&["show", "measured"]).matches("(measured)").count(), 2);
}

#[test]
fn what_cannot_be_accepted_is_told_with_a_hint() {
    let sandbox = demo();
    sandbox.good(&["run", "folder", "count"]);
    let mut told = String::new();
    let mut refused = |arguments: &[&str]| {
        told.push_str(&format!("$ cuda-agent {}\n{}\n\n", arguments.join(" "), sandbox.bad(2, arguments)));
    };
    refused(&["accept"]);
    refused(&["accept", "--all", "folder"]);
    refused(&["accept", "foldre"]);
    refused(&["accept", "folder"]);
    refused(&["accept", "cities"]);
    edit(&sandbox, "p.yaml", "echo b >", "echo  b >");
    edit(&sandbox, "p.yaml", "'ls inputs/d", "'ls  inputs/d");
    refused(&["accept", "count"]);
    refused(&["accept", "twice"]);
    edit(&sandbox, "p.yaml", "outputs: { d: tree }", "outputs: { d: tree, e: tree }");
    refused(&["accept", "folder"]);
    edit(&sandbox, "p.yaml", "outputs: { d: tree, e: tree }", "outputs: { d: { type: table, columns: { x: int64 } } }");
    edit(&sandbox, "p.yaml", "inputs: { d: folder.d }, run", "inputs: { d: cities.cities }, run");
    refused(&["accept", "folder"]);
    edit(&sandbox, "p.yaml", "outputs: { d: { type: table, columns: { x: int64 } } }", "outputs: { d: tree }");
    edit(&sandbox, "p.yaml", "inputs: { d: cities.cities }, run", "inputs: { d: folder.d }, run");
    for entry in std::fs::read_dir(sandbox.path(".cuda-agent/v1/blobs")).unwrap() {
        std::fs::remove_dir_all(entry.unwrap().path()).unwrap();
    }
    refused(&["accept", "folder"]);
    insta::assert_snapshot!("accept_refused", told);
    assert_eq!(runs(&sandbox).len(), 1, "nothing was changed");
}

#[test]
fn without_a_store_none_is_made() {
    let sandbox = demo();
    assert!(sandbox.bad(2, &["accept", "folder"]).contains("it has no earlier result"));
    assert!(sandbox.bad(2, &["diff", "last", "last"]).contains("0 are recorded"));
    assert!(!sandbox.path(".cuda-agent").exists());
}
