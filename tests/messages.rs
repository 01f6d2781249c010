//! What the commands say where something is not as it should be, and where nothing is wrong but it could look so.

use crate::shared::machine;
use crate::support::Sandbox;
use crate::support::s3::S3Server;

const ONE: &str = "name: one
params: { x: 5.0 }
stages:
  zeta: { uses: run, run: 'echo ${params.x} > outputs/o', outputs: { o: tree } }
  alpha: { uses: run, inputs: { i: zeta.o }, run: 'cat inputs/i > outputs/o; echo printed', outputs: { o: tree } }
  mid: { uses: run, inputs: { i: alpha.o }, run: 'cat inputs/i > outputs/o', outputs: { o: tree } }
";

const TWO: &str = "name: two
stages:
  alpha: { uses: run, run: 'echo of two; echo 2 > outputs/o', outputs: { o: tree } }
";

fn two_pipelines() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("one.yaml", ONE).write("two.yaml", TWO);
    sandbox
}

fn said(sandbox: &Sandbox, arguments: &[&str]) -> String {
    let output = sandbox.output(arguments);
    let text = |bytes: &[u8]| sandbox.stable(&String::from_utf8_lossy(bytes));
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    format!("$ cuda-agent {}\n{out}\n{err}\nexit {}\n", arguments.join(" "), output.status.code().unwrap_or(-1))
}

#[test]
fn a_pipeline_that_is_named_is_the_one_that_is_told_of() {
    let sandbox = two_pipelines();
    sandbox.good(&["run", "one.yaml"]);
    assert!(sandbox.bad(2, &["status", "--pipeline", "two.yaml"]).contains("there is no run `last` of pipeline `two`"));
    assert!(sandbox.good(&["runs", "--pipeline", "two.yaml"]).contains("no run of pipeline `two` is recorded in"));
    sandbox.good(&["run", "two.yaml"]);
    assert!(sandbox.good(&["status", "--pipeline", "one.yaml"]).contains(" of one: done"));
    assert_eq!(sandbox.good(&["runs", "--pipeline", "one.yaml"]).lines().count(), 1);
    assert_eq!(sandbox.good(&["log", "alpha"]), "of two\n", "the newest");
    assert_eq!(sandbox.good(&["log", "alpha", "--pipeline", "one.yaml"]), "printed\n");
    assert_eq!(sandbox.good(&["log", "alpha", "--run", "last", "--pipeline", "one.yaml"]), "printed\n");
}

#[test]
fn status_is_in_the_order_of_the_pipeline_with_times() {
    let sandbox = two_pipelines();
    sandbox.good(&["run", "one.yaml"]);
    sandbox.good(&["run", "one.yaml", "-p", "x=6.0", "zeta"]);
    let all: Vec<String> =
        [&["status"][..], &["status", "last~1"], &["status", "last~2"], &["runs", "--pin", "last~1"]]
            .iter()
            .map(|arguments| said(&sandbox, arguments))
            .collect();
    insta::assert_snapshot!("status_times", all.join("\n"));
}

#[test]
fn what_printed_nothing_is_told_so() {
    let sandbox = two_pipelines();
    sandbox.good(&["run", "one.yaml"]);
    let all: Vec<String> = [&["log", "zeta"][..], &["log", "zeta", "--json"], &["log", "zta"], &["log", "nothing"]]
        .iter()
        .map(|arguments| said(&sandbox, arguments))
        .collect();
    let all: Vec<String> = all.iter().map(|text| hide_runs(text)).collect();
    insta::assert_snapshot!("log_nothing", all.join("\n"));
}

/// Run ids in JSON.
fn hide_runs(text: &str) -> String {
    let line = |line: &str| match line.split_once("\"run\": ") {
        Some((before, _)) => format!("{before}\"run\": [run]"),
        None => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_plan_knows_what_never_ran() {
    let sandbox = two_pipelines();
    let fresh = said(&sandbox, &["plan", "one.yaml"]);
    sandbox.good(&["run", "one.yaml", "alpha"]);
    let later = said(&sandbox, &["plan", "one.yaml", "--refresh", "zeta"]);
    insta::assert_snapshot!("plan_never_run", format!("{fresh}\n{later}"));
}

#[test]
fn a_tag_that_moves_says_from_where() {
    let sandbox = two_pipelines();
    sandbox.good(&["run", "one.yaml"]);
    let first = said(&sandbox, &["tag", "alpha.o", "text@v1"]);
    let same = said(&sandbox, &["tag", "alpha.o", "text@v1"]);
    sandbox.good(&["run", "one.yaml", "-p", "x=6.0"]);
    let moved = said(&sandbox, &["tag", "alpha.o", "text@v1"]);
    insta::assert_snapshot!("tag_moves", hide_digests(&[first, same, moved].join("\n")));
}

/// Digests within brackets.
fn hide_digests(text: &str) -> String {
    let is_digest = |part: &str| part.len() == 12 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parts = text.split_inclusive(['(', ')', ' ', '\n', ',']);
    let shown = parts.map(|part| {
        let core = part.trim_end_matches(['(', ')', ' ', '\n', ',']);
        if is_digest(core) { part.replace(core, "[digest]") } else { part.to_owned() }
    });
    shown.collect()
}

#[test]
fn a_failed_stage_names_the_folder_that_is_kept() {
    let sandbox = two_pipelines();
    sandbox.write("two.yaml", &TWO.replace("echo 2 > outputs/o", "echo half > outputs/o; exit 3"));
    let failed = said(&sandbox, &["run", "two.yaml"]);
    let line = failed.lines().find(|line| line.contains("its folder, until the next run: ")).expect("it is named");
    let folder = line.split_once(": ").unwrap().1.trim();
    assert!(folder.starts_with(".cuda-agent/work/") && folder.ends_with("/alpha"), "{line}");
    let run = sandbox.good(&["runs", "-n", "1"]);
    let kept = sandbox.path(".cuda-agent/work").join(run.split(' ').next().unwrap()).join("alpha");
    assert_eq!(std::fs::read_to_string(kept.join("outputs/o")).unwrap(), "half\n");
    let events = sandbox.output(&["run", "two.yaml", "--json"]).stdout;
    assert!(String::from_utf8_lossy(&events).contains("\"folder\":\"/"), "programs are told, too");
}

#[test]
fn explain_shows_all_that_counts() {
    let mut sandbox = Sandbox::new();
    sandbox.variables.push(("LAB_TOKEN".into(), "a-secret-value".into()));
    sandbox.write("in.txt", "text").write("work.sh", "cat inputs/i\n").write(
        "p.yaml",
        "name: p
secrets: { TOKEN: { env: LAB_TOKEN } }
stages:
  rows: { uses: run, run: \"echo '{\\\"n\\\": 1}' > outputs/t.jsonl\", outputs: { t: { type: table, columns: { n: int64 } } } }
  a:
    uses: run
    inputs: { i: { path: in.txt }, t: rows.t }
    files: [work.sh]
    env: { LEVEL: '3' }
    secrets: [TOKEN]
    run: |
      sh work.sh > outputs/o
      echo done
    outputs: { o: tree }
",
    );
    sandbox.good(&["run", "p.yaml"]);
    let told = hide_digests(&said(&sandbox, &["explain", "p.yaml", "a"]));
    insta::assert_snapshot!("explain_all", told);
    assert!(!told.contains("a-secret-value"));
    // Without the store's record it says as much.
    insta::assert_snapshot!(
        "explain_miss",
        hide_digests(&said(&sandbox, &["explain", "p.yaml", "rows", "--store", "memory://"]))
    );
}

#[test]
fn git_ignores_what_a_run_makes() {
    let sandbox = two_pipelines();
    sandbox.good(&["run", "one.yaml"]);
    let rules = std::fs::read_to_string(sandbox.path(".cuda-agent/.gitignore")).unwrap();
    assert!(rules.lines().any(|line| line == "*"), "{rules}");
    let git = |arguments: &[&str]| {
        let mut git = std::process::Command::new("git");
        git.args(arguments).current_dir(sandbox.folder.path()).env("GIT_CONFIG_GLOBAL", "/dev/null");
        git.output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    // Where there is no git, the rules above must do.
    if git(&["init", "-q"]).is_ok() {
        assert_eq!(git(&["status", "--short"]).unwrap(), "?? one.yaml\n?? two.yaml\n");
    }
    // Whoever wants it committed says so once.
    std::fs::remove_file(sandbox.path(".cuda-agent/.gitignore")).unwrap();
    sandbox.good(&["run", "two.yaml"]);
    assert!(!sandbox.path(".cuda-agent/.gitignore").exists());
}

#[test]
fn gc_says_what_only_its_age_keeps_and_forgets_the_runs_that_it_deleted() {
    let sandbox = two_pipelines();
    for x in ["1.5", "2.5"] {
        sandbox.good(&["run", "one.yaml", "-p", &format!("x={x}")]);
    }
    let policy = ["--keep-last", "1", "--older-than", "0d"];
    let looked = sandbox.good(&[&["gc"][..], &policy].concat());
    let told: Vec<&str> = looked.lines().filter(|line| line.starts_with("Kept for now: ")).collect();
    assert!(
        told.len() == 1 && told[0].contains(" that no kept run needs, but that are younger than a day."),
        "{looked}"
    );
    sandbox.good(&[&["gc", "--delete", "--now"][..], &policy].concat());
    assert_eq!(sandbox.good(&["runs"]).lines().count(), 1);
    assert!(!sandbox.good(&[&["gc"][..], &policy].concat()).contains("Kept for now"));

    let bucket = S3Server::seaweed().bucket();
    let shared = machine(&bucket);
    shared.write("one.yaml", ONE);
    for x in ["1.5", "2.5"] {
        shared.good(&["run", "one.yaml", "-p", &format!("x={x}")]);
    }
    shared.good(&[&["gc", "--delete", "--now"][..], &policy].concat());
    assert_eq!(shared.good(&["runs"]).lines().count(), 1, "nor is it listed on this machine");
}

#[test]
fn who_may_only_read_is_told_that_nothing_was_pushed() {
    let bucket = S3Server::seaweed().bucket();
    let mut sandbox = machine(&bucket);
    sandbox.write("one.yaml", ONE);
    // The store was found to be writable with other credentials.
    sandbox.good(&["run", "one.yaml", "zeta"]);
    sandbox.good(&["run", "one.yaml", "--offline"]);
    sandbox.variables = bucket.for_reader().env;
    let refused = said(&sandbox, &["push", "--pipeline", "one.yaml"]);
    let run = said(&sandbox, &["run", "one.yaml", "-p", "x=7.0"]);
    // The same where the credentials lost their right to write since the last probe.
    forget_who(&sandbox);
    let pushed = said(&sandbox, &["push", "--pipeline", "one.yaml"]);
    let ran = said(&sandbox, &["run", "one.yaml", "-p", "x=7.0", "zeta"]);
    let text = [refused, run, pushed, ran].join("\n").replace(&bucket.name, "bucket");
    insta::assert_snapshot!("push_read_only", hide_objects(&text));
}

/// Makes the last probe of the store count for the credentials of now.
fn forget_who(sandbox: &Sandbox) {
    let cache = sandbox.path(".cuda-agent/cache");
    let files = std::fs::read_dir(&cache).unwrap().map(|item| item.unwrap().path());
    let marks: Vec<_> = files.filter(|path| path.to_string_lossy().contains("/probed-")).collect();
    assert_eq!(marks.len(), 1, "{marks:?}");
    let who = [
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AWS_ROLE_ARN",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "SERVICE_ACCOUNT",
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_CLIENT_ID",
    ];
    let value = |name: &str| {
        let set = sandbox.variables.iter().find(|(variable, _)| variable == name).map(|(_, value)| value.clone());
        set.or_else(|| std::env::var(name).ok()).unwrap_or_default()
    };
    let who: Vec<String> = who.iter().map(|name| value(name)).collect();
    let text = std::fs::read_to_string(sandbox.path("cuda-agent.yaml")).unwrap();
    let url = text.lines().find_map(|line| line.strip_prefix("store: ")).unwrap();
    let name = cuda_agent_engine::digest::Digest::of_bytes(format!("{url}\n{}", who.join("\n")).as_bytes()).to_string();
    std::fs::rename(&marks[0], cache.join(format!("probed-{}", &name[..8]))).unwrap();
}

/// Without names of objects: which one is refused first is a matter of digests.
fn hide_objects(text: &str) -> String {
    let line = |line: &str| match line.split_once("v1/") {
        Some((before, rest)) => {
            let after = rest.split_once(": ").map_or("", |(_, after)| after);
            format!("{before}[object]: {after}")
        }
        None => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn what_is_on_this_machine_is_shown_without_the_server() {
    let bucket = S3Server::seaweed().bucket();
    let mut sandbox = machine(&bucket);
    sandbox.write("one.yaml", ONE);
    sandbox.good(&["run", "one.yaml"]);
    sandbox.variables = bucket.at("http://127.0.0.1:1").env;
    let started = std::time::Instant::now();
    for arguments in
        [&["show", "mid"][..], &["export", "mid", "out"], &["log", "alpha"], &["status"], &["runs", "-n", "1"]]
    {
        assert!(
            started.elapsed() < std::time::Duration::from_secs(5),
            "{arguments:?} comes after a command that waited"
        );
        sandbox.output(arguments);
    }
    assert!(sandbox.good(&["show", "mid"]).starts_with("o: tree"));
}

#[test]
fn doctor_wants_torch_only_where_the_pipeline_does() {
    let sandbox = two_pipelines();
    sandbox.write("bin/python3", "#!/bin/sh\n[ \"$1\" = --version ] && echo Python 3.12.0 || exit 1\n");
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(sandbox.path("bin/python3"), std::fs::Permissions::from_mode(0o755)).unwrap();
    sandbox.write("cuda-agent.yaml", "python: bin/python3\npipeline: one.yaml\n");
    let torch = |output: &std::process::Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().find(|line| line.contains(" torch ")).unwrap_or_default().to_owned()
    };
    let plain = sandbox.output(&["doctor"]);
    assert_eq!(plain.status.code(), Some(0), "{plain:?}");
    assert!(torch(&plain).starts_with("– torch"), "{plain:?}");
    assert!(torch(&plain).ends_with("only `check` and the kinds ops/* and kernels/* need them"), "{plain:?}");
    sandbox.write("one.yaml", "name: one\nstages: { crawled: { uses: ops/crawl } }\n");
    let needed = sandbox.output(&["doctor"]);
    assert_eq!(needed.status.code(), Some(3));
    assert!(torch(&needed).ends_with("stage `crawled` (ops/crawl) needs them"), "{needed:?}");
}

#[test]
fn a_command_of_a_kind_is_words() {
    let sandbox = two_pipelines();
    let manifest = |run: &str| {
        format!("name: my/kind\nversion: 1.0.0\nsummary: A kind.\noutputs: {{ o: {{ type: tree }} }}\nrun: {run}\n")
    };
    sandbox.write("cuda-agent.yaml", "stages: [kinds]\n");
    let mut told = String::new();
    for run in ["python p.py", "\"python 'my file.py' | tee log\"", "python"] {
        sandbox.write("kinds/kind/stage.yaml", &manifest(run));
        told.push_str(&said(&sandbox, &["plan", "one.yaml"]));
    }
    insta::assert_snapshot!("kind_command", told);
}

/// Wrong on purpose, as somebody in a hurry would have it.
#[test]
fn ordinary_mistakes_are_told_what_to_do() {
    let sandbox = two_pipelines();
    sandbox.good(&["run", "one.yaml"]);
    sandbox.good(&["tag", "mid.o", "text@v1"]);
    sandbox.write("folder.yaml/x", "").write("kinds/x", "");
    std::fs::write(sandbox.path("binary.yaml"), [0x80, 0xff, 0x00]).unwrap();
    let mut all: Vec<String> = [
        &["run", "."][..],
        &["run", "pipelines/one"],
        &["plan", "folder.yaml"],
        &["plan", "binary.yaml"],
        &["graph", "alpha"],
        &["export", "mid", "one.yaml"],
        &["export", "text@v2", "out"],
        &["show", "other@main"],
        &["runs", "-n", "0"],
        &["plan", "--store", "s3:/bucket/folder"],
        &["run", "--store", "s3:/bucket/folder"],
        &["run", "--store", "S3://bucket/folder"],
        &["run", "--store", ""],
    ]
    .iter()
    .map(|arguments| said(&sandbox, arguments))
    .collect();
    for settings in ["stages: [nowhere]", "pipeline: missing.yaml"] {
        sandbox.write("cuda-agent.yaml", settings);
        all.push(format!("# {settings}\n{}", said(&sandbox, &["plan"])));
    }
    insta::assert_snapshot!("ordinary_mistakes", all.join("\n"));
    assert!(!sandbox.path("s3:").exists(), "no folder of that name is made");
}
