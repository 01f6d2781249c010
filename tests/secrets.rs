//! A secret's value is found nowhere.

use std::path::Path;

use crate::support::Sandbox;

const VALUE: &str = "s3cr3t-value-42";

/// Every file below a folder that holds the value or the first half of it.
fn leaks(folder: &Path, found: &mut Vec<String>) {
    for item in std::fs::read_dir(folder).unwrap() {
        let path = item.unwrap().path();
        if path.is_dir() {
            leaks(&path, found);
            continue;
        }
        let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
        if text.contains("s3cr3t") {
            found.push(path.display().to_string());
        }
    }
}

fn sandbox(command: &str) -> Sandbox {
    let mut sandbox = Sandbox::new();
    sandbox.variables.push(("LAB_TOKEN".into(), VALUE.into()));
    sandbox.write(
        "p.yaml",
        &format!(
            "name: p\nsecrets: {{ TOKEN: {{ env: LAB_TOKEN }} }}\nstages:\n  a:\n    uses: run\n    secrets: [TOKEN]\n    \
             run: {command:?}\n    outputs: {{ out: tree }}\n"
        ),
    );
    sandbox
}

#[test]
fn a_program_sees_it_and_nobody_else_does() {
    // Printed whole and in two pieces, sent as an event and as an error message.
    let command = r#"test -n "$TOKEN"; echo "$TOKEN"; printf '%s-' "$${TOKEN%%-*}"; sleep 0.2; echo "$${TOKEN#*-}";
        printf '{"event":"log","level":"info","message":"the token is %s"}\n' "$TOKEN" >&$CUDA_AGENT_EVENTS_FD;
        echo ok > outputs/out"#;
    let sandbox = sandbox(command);
    let output = sandbox.output(&["run", "p.yaml"]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains("the token is [secret]") && !printed.contains("s3cr3t"), "{printed}");
    let log = sandbox.good(&["log", "a"]);
    assert!(log.starts_with("[secret]\n[secret]\n"), "{log}");
    let mut found = Vec::new();
    leaks(&sandbox.path(".cuda-agent"), &mut found);
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_failure_tells_it_neither() {
    let command = r#"printf '{"kind":"input","message":"bad token %s"}' "$TOKEN" > error.json; exit 1"#;
    let sandbox = sandbox(command);
    let error = sandbox.bad(1, &["run", "p.yaml"]);
    assert!(error.contains("bad token [secret]") && !error.contains("s3cr3t"), "{error}");
    let mut found = Vec::new();
    // The folder of a failed attempt stays on this machine; nothing else may have it.
    leaks(&sandbox.path(".cuda-agent/v1"), &mut found);
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn an_output_with_it_is_not_published() {
    for command in [
        r#"echo "x $TOKEN y" > outputs/out"#,
        r#"mkdir outputs/out; head -c 100000 /dev/zero > outputs/out/big; echo "$TOKEN" >> outputs/out/big"#,
    ] {
        let sandbox = sandbox(command);
        let error = sandbox.bad(1, &["run", "p.yaml"]);
        assert!(error.contains("output `out` contains the value of a secret"), "{error}");
        let mut found = Vec::new();
        leaks(&sandbox.path(".cuda-agent/v1"), &mut found);
        assert!(found.is_empty(), "{found:?}");
    }
}

#[test]
fn a_missing_secret_is_told_before_anything_runs() {
    let mut sandbox = sandbox("true");
    sandbox.variables.clear();
    insta::assert_snapshot!("secret_missing_plan", sandbox.good(&["plan", "p.yaml"]));
    insta::assert_snapshot!("secret_missing_run", sandbox.bad(3, &["run", "p.yaml"]));
    assert!(!sandbox.path(".cuda-agent/v1").exists(), "nothing was begun");
    sandbox.variables.push(("LAB_TOKEN".into(), String::new()));
    insta::assert_snapshot!("secret_empty", sandbox.bad(3, &["run", "p.yaml"]));
    let file = "secrets: { TOKEN: { file: token.txt } }";
    let text = std::fs::read_to_string(sandbox.path("p.yaml")).unwrap();
    sandbox.write("p.yaml", &text.replace("secrets: { TOKEN: { env: LAB_TOKEN } }", file));
    insta::assert_snapshot!("secret_no_file", sandbox.bad(3, &["run", "p.yaml"]));
}

/// Three stages, of which the second needs a secret.
const CHAIN: &str = "name: p
secrets: { TOKEN: { env: LAB_TOKEN } }
stages:
  before: { uses: run, run: 'echo 1 > outputs/o', outputs: { o: tree } }
  secret: { uses: run, secrets: [TOKEN], inputs: { i: before.o }, run: 'test -n \"$TOKEN\"; cat inputs/i > outputs/o', outputs: { o: tree } }
  after: { uses: run, inputs: { i: secret.o }, run: 'cat inputs/i > outputs/o', outputs: { o: tree } }
";

#[test]
fn a_stage_that_is_up_to_date_needs_no_secret() {
    let mut sandbox = sandbox("true");
    sandbox.write("p.yaml", CHAIN);
    sandbox.good(&["run", "p.yaml"]);
    sandbox.variables.clear();
    for arguments in [&["run", "p.yaml"][..], &["run", "p.yaml", "after"], &["run", "p.yaml", "--offline"], &["plan"]] {
        let output = sandbox.output(arguments);
        assert!(output.status.success() && !String::from_utf8_lossy(&output.stderr).contains("TOKEN"), "{output:?}");
    }
    sandbox.good(&["verify", "before", "after"]);
    assert!(sandbox.bad(3, &["verify", "secret"]).contains("LAB_TOKEN is not set"));
    // Nor does one that only might have to run: its input comes out unchanged.
    sandbox.write("p.yaml", &CHAIN.replace("'echo 1 >", "'echo  1 >"));
    let output = sandbox.output(&["run", "p.yaml"]);
    assert!(output.status.success(), "{output:?}");
    let warned = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(warned.contains("stage `secret` fails without it if it has to run"), "{warned}");
    // Where it does have to run, it alone fails, and says why.
    sandbox.write("p.yaml", &CHAIN.replace("'echo 1 >", "'echo 2 >"));
    let failed = sandbox.bad(1, &["run", "p.yaml"]);
    insta::assert_snapshot!("secret_missing_late", failed);
    // What doesn't lead to it runs.
    sandbox.good(&["run", "p.yaml", "before"]);
    // One that has never run is refused before what comes before it is executed.
    sandbox.write("p.yaml", &CHAIN.replace("name: p", "name: q").replace("'echo 1 >", "'echo 3 >"));
    assert!(sandbox.bad(3, &["run", "p.yaml"]).contains("stage `secret` cannot run without it"));
}

#[test]
fn a_stage_whose_rows_are_all_recorded_needs_no_secret() {
    let mut sandbox = sandbox("true");
    sandbox.write_squares("test -n \"$TOKEN\" || exit 7").write("cuda-agent.yaml", "stages: [kinds]\n");
    let pipeline = |ids: &str, other: i32| {
        format!(
            "name: p\nsecrets: {{ TOKEN: {{ env: LAB_TOKEN }} }}\nstages:\n  source: {{ uses: run, run: 'for i in {ids}; do echo \
             \"{{\\\"id\\\": $i, \\\"other\\\": {other}}}\"; done > outputs/rows.jsonl', outputs: {{ rows: {{ type: table, \
             columns: {{ id: int64, other: int64 }} }} }} }}\n  squares: {{ uses: my/square, secrets: [TOKEN], inputs: {{ rows: \
             source.rows }} }}\n"
        )
    };
    sandbox.write("p.yaml", &pipeline("1 2 3", 1));
    sandbox.good(&["run", "p.yaml"]);
    sandbox.variables.clear();
    // Another table of rows that are all known: a result of its own, without a program.
    sandbox.write("p.yaml", &pipeline("3 1", 2));
    let output = sandbox.output(&["run", "p.yaml"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && told.contains("(0 rows executed, 2 reused)"), "{told}");
    assert_eq!(sandbox.good(&["show", "squares"]).matches("square  ").count(), 3, "a column and two rows");
    sandbox.write("p.yaml", &pipeline("3 1 4", 2));
    let failed = sandbox.bad(1, &["run", "p.yaml"]);
    assert!(
        failed.contains("squares: failed: secret `TOKEN`: the environment variable LAB_TOKEN is not set"),
        "{failed}"
    );
}

#[test]
fn a_rotated_secret_reruns_nothing() {
    let mut sandbox = sandbox("echo ok > outputs/out");
    assert_eq!(sandbox.executed(&["p.yaml"]), ["a"]);
    sandbox.variables[0].1 = "another-value".into();
    assert_eq!(sandbox.executed(&["p.yaml"]), [""; 0]);
}

#[test]
fn no_event_carries_it_in_any_field() {
    let command = r#"for event in '"progress","done":1,"unit":' '"metric","value":1,"name":' '"log","message":"x","level":'; do
        echo "{\"event\":$event\"$TOKEN\"}" >&3; done; echo ok > outputs/out"#;
    let sandbox = sandbox(command);
    let output = sandbox.output(&["run", "p.yaml", "--json"]);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && printed.contains("[secret]") && !printed.contains("s3cr3t"), "{printed}");
    let mut found = Vec::new();
    leaks(&sandbox.path(".cuda-agent"), &mut found);
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_table_with_it_is_not_published_and_its_error_does_not_tell_it() {
    for (column, told) in [("t: utf8", "contains the value of a secret"), ("t: int64", "[secret]")] {
        let sandbox = sandbox(r#"echo "{\"t\": \"$TOKEN\"}" > outputs/out.jsonl"#);
        let text = std::fs::read_to_string(sandbox.path("p.yaml")).unwrap();
        sandbox
            .write("p.yaml", &text.replace("out: tree", &format!("out: {{ type: table, columns: {{ {column} }} }}")));
        let error = sandbox.bad(1, &["run", "p.yaml"]);
        assert!(error.contains(told) && !error.contains("s3cr3t"), "{error}");
        let mut found = Vec::new();
        leaks(&sandbox.path(".cuda-agent"), &mut found);
        assert!(found.is_empty(), "not in the attempt's folder either: {found:?}");
    }
}
