//! Whatever a program can see is in its stage's key, or the same for every program: real programs and real edits.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Int8Array, Int64Array, RecordBatch, StringArray};
use cuda_agent_engine::artifact::table;

use crate::programs::eventually;
use crate::support::{Sandbox, write_ids};

/// A kind `my/NAME` with one text output, made by `work.sh`.
fn write_kind(sandbox: &Sandbox, name: &str, rest: &str, script: &str) {
    let manifest =
        format!("name: my/{name}\nversion: 1.0.0\nsummary: Works.\noutputs: {{ out: {{ type: tree }} }}\n{rest}\n");
    sandbox.write(&format!("kinds/{name}/stage.yaml"), &manifest);
    sandbox.write(&format!("kinds/{name}/work.sh"), script);
    sandbox.write("cuda-agent.yaml", "stages: [kinds]\n");
}

/// A stage `s` that takes a file as a table.
fn write_reader(sandbox: &Sandbox, script: &str, file: &str) {
    let rest = "inputs: { rows: { type: table } }\nrun: [sh, work.sh]\nsources: [work.sh]";
    write_kind(sandbox, "reader", rest, script);
    let stage = format!("uses: my/reader\n    inputs: {{ rows: {{ path: {file} }} }}");
    sandbox.write("p.yaml", &format!("name: p\nstages:\n  s:\n    {stage}\n"));
}

fn make_executable(path: &Path, executable: bool) {
    let mode = if executable { 0o755 } else { 0o644 };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn write_table(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    table::write(path, &batch.schema(), &[batch]).unwrap();
}

fn error_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs, and does something once the stage `first` has started, which then ends.
fn run_and_meanwhile(sandbox: &Sandbox, arguments: &[&str], meanwhile: impl FnOnce()) -> Output {
    let mut command = sandbox.command(arguments);
    let run = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the first stage starts", || sandbox.path("started").exists());
    meanwhile();
    sandbox.write("go", "");
    let output = run.wait_with_output().unwrap();
    let _ = std::fs::remove_file(sandbox.path("started"));
    let _ = std::fs::remove_file(sandbox.path("go"));
    output
}

/// What a stage's text output says.
fn text(sandbox: &Sandbox, stage: &str) -> String {
    let target = sandbox.path("exported");
    let _ = std::fs::remove_dir_all(&target);
    sandbox.good(&["export", &format!("{stage}.out"), target.to_str().unwrap(), "--pipeline", "p.yaml"]);
    std::fs::read_to_string(target.join("out")).unwrap()
}

/// The command of a stage that waits to be let go.
fn waiting(sandbox: &Sandbox) -> String {
    let folder = sandbox.folder.path().display();
    format!("touch {folder}/started; until [ -e {folder}/go ]; do sleep 0.01; done; echo first > outputs/out")
}

#[test]
fn a_program_edited_during_a_run_is_never_filed_under_its_old_key() {
    let sandbox = Sandbox::new();
    let script = |text: &str| format!("cat inputs/first > outputs/out; echo {text} >> outputs/out\n");
    let rest = "inputs: { first: { type: tree } }\nrun: [sh, work.sh]\nsources: [work.sh]";
    write_kind(&sandbox, "second", rest, &script("old"));
    let first = format!("first:\n    uses: run\n    run: {:?}\n    outputs: {{ out: tree }}\n", waiting(&sandbox));
    let second = "second:\n    uses: my/second\n    inputs: { first: first.out }\n";
    sandbox.write("p.yaml", &format!("name: p\nstages:\n  {first}  {second}"));

    let output = run_and_meanwhile(&sandbox, &["run", "p.yaml"], || {
        sandbox.write("kinds/second/work.sh", &script("new"));
    });
    assert_eq!(output.status.code(), Some(1), "{}", error_of(&output));
    insta::assert_snapshot!("edited_program", sandbox.stable(failure(&error_of(&output))));

    sandbox.write("kinds/second/work.sh", &script("old"));
    assert!(sandbox.good(&["plan", "p.yaml"]).contains("second  miss"), "nothing was filed");
    sandbox.good(&["run", "p.yaml"]);
    assert_eq!(text(&sandbox, "second"), "first\nold\n");
    // What was unpacked before stays what it is, so an edit no longer matters.
    sandbox.write("go", "");
    sandbox.good(&["run", "p.yaml", "--refresh", "second"]);
    assert_eq!(text(&sandbox, "second"), "first\nold\n");
}

#[test]
fn a_file_of_a_command_edited_during_a_run_is_never_filed_under_its_old_key() {
    let sandbox = Sandbox::new();
    let first = format!("first:\n    uses: run\n    run: {:?}\n    outputs: {{ out: tree }}\n", waiting(&sandbox));
    let stage = |name: &str, files: &str| {
        let run = format!("run: sh lib/{name}.sh\n    files: [{files}]\n    outputs: {{ out: tree }}");
        format!("  {name}:\n    uses: run\n    {run}\n")
    };
    let stages = format!("{}{}", stage("edited", "lib/edited.sh"), stage("grown", "lib"));
    sandbox.write("p.yaml", &format!("name: p\nstages:\n  {first}{stages}"));
    sandbox.write("lib/edited.sh", "echo old > outputs/out\n").write("lib/grown.sh", "ls lib > outputs/out\n");

    let output = run_and_meanwhile(&sandbox, &["run", "p.yaml", "--jobs", "1"], || {
        sandbox.write("lib/edited.sh", "echo new > outputs/out\n").write("lib/more.sh", "");
    });
    let error = error_of(&output);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("`lib/edited.sh` was edited") && error.contains("`lib/more.sh` was edited"), "{error}");
    std::fs::remove_file(sandbox.path("lib/more.sh")).unwrap();
    sandbox.write("lib/edited.sh", "echo old > outputs/out\n").write("go", "");
    sandbox.good(&["run", "p.yaml"]);
    assert_eq!(text(&sandbox, "edited"), "old\n");
}

/// The lines of an error that say why, and what to do.
fn failure(error: &str) -> &str {
    error.split_once("error: ").map_or(error, |(_, rest)| rest)
}

#[test]
fn a_number_is_published_as_it_was_written_or_not_at_all() {
    let sandbox = Sandbox::new();
    let lines = |value: &str| {
        let command =
            format!("echo '{{\"n\": 1}}' > outputs/rows.jsonl; echo '{{\"n\": {value}}}' >> outputs/rows.jsonl");
        let outputs = "outputs: { rows: { type: table, columns: { n: int64 } } }";
        sandbox
            .write("p.yaml", &format!("name: p\nstages:\n  s:\n    uses: run\n    run: {command:?}\n    {outputs}\n"));
    };
    for value in ["1.5", "\"7\"", "18446744073709551616"] {
        lines(value);
        let error = error_of(&sandbox.output(&["run", "p.yaml"]));
        assert!(error.contains("rows.jsonl:2: ") && error.contains(value), "{error}");
    }
    lines("9007199254740993");
    sandbox.good(&["run", "p.yaml"]);
    assert!(sandbox.good(&["show", "s.rows", "--pipeline", "p.yaml"]).contains("9007199254740993"));
}

#[test]
fn an_answer_to_a_row_is_kept_as_it_was_given_or_not_at_all() {
    let sandbox = Sandbox::new();
    let pipeline = "name: p\nstages:\n  s:\n    uses: my/square\n    inputs: { rows: { path: ids.parquet } }\n";
    sandbox.write("p.yaml", pipeline).write("cuda-agent.yaml", "stages: [kinds]\n").write_squares("");
    write_ids(&sandbox.path("ids.parquet"), &[2], "x");
    let script = std::fs::read_to_string(sandbox.path("kinds/square/square.sh")).unwrap();
    for answer in ["1.5", "\"4\"", "18446744073709551616"] {
        sandbox.write(
            "kinds/square/square.sh",
            &script.replace("\"square\":%s", &format!("\"square\":{answer}")).replace("$((id * id))", ""),
        );
        let error = error_of(&sandbox.output(&["run", "p.yaml"]));
        assert!(error.contains("s: failed: ") && error.contains(answer), "{error}");
    }
}

#[test]
fn the_order_of_columns_counts() {
    let sandbox = Sandbox::new();
    write_reader(&sandbox, "echo ok > outputs/out\n", "rows.parquet");
    let numbers = || Arc::new(Int64Array::from(vec![1, 2])) as ArrayRef;
    let texts = || Arc::new(StringArray::from(vec!["x", "y"])) as ArrayRef;
    write_table(&sandbox.path("rows.parquet"), vec![("a", numbers()), ("b", texts())]);
    sandbox.good(&["run", "p.yaml"]);
    write_table(&sandbox.path("rows.parquet"), vec![("b", texts()), ("a", numbers())]);
    let plan = sandbox.good(&["plan", "p.yaml"]);
    assert!(plan.contains("miss") && plan.contains("the order of its columns"), "{plan}");
}

#[test]
fn programs_see_the_types_that_count_whatever_the_file_has() {
    let sandbox = Sandbox::new();
    let seen = sandbox.path("seen.parquet");
    let script = format!("cp inputs/rows.parquet {}; echo ok > outputs/out\n", seen.display());
    write_reader(&sandbox, &script, "rows.parquet");
    write_table(&sandbox.path("rows.parquet"), vec![("n", Arc::new(Int8Array::from(vec![100, 100])))]);
    sandbox.good(&["run", "p.yaml"]);
    let (schema, batches) = table::read(&seen).unwrap();
    assert_eq!(schema.field(0).data_type(), &arrow::datatypes::DataType::Int64);
    assert_eq!(batches[0].column(0).len(), 2);
    write_table(&sandbox.path("rows.parquet"), vec![("n", Arc::new(Int64Array::from(vec![100, 100])))]);
    assert!(sandbox.good(&["plan", "p.yaml"]).contains("hit"), "it would see the very same");
}

#[test]
fn cells_that_look_alike_have_their_own_results() {
    let sandbox = Sandbox::new();
    let matrix = "matrix: { x: ['1,y=2', 1], y: [3, '2,y=3'] }";
    let stage = "uses: run\n    run: echo '${matrix.x} and ${matrix.y}' > outputs/out\n    outputs: { out: tree }";
    sandbox.write("p.yaml", &format!("name: p\nstages:\n  m:\n    {matrix}\n    {stage}\n"));
    sandbox.good(&["run", "p.yaml"]);
    let show = |cell: &str| text(&sandbox, &format!("m[{cell}]"));
    assert_eq!(show("x=1%2Cy%3D2,y=3"), "1,y=2 and 3\n");
    assert_eq!(show("x=1,y=2%2Cy%3D3"), "1 and 2,y=3\n");
}

#[test]
fn a_program_that_writes_beside_its_source_changes_no_other_result() {
    let sandbox = Sandbox::new();
    let script = "folder=$(dirname \"$0\")\n\
        if grep -q '\"mode\":\"write\"' request.json; then rm -f \"$folder/helper.sh\"; echo 'echo bad' > \"$folder/helper.sh\"; fi\n\
        if grep -q '\"mode\":\"add\"' request.json; then echo x > \"$folder/extra.sh\"; fi\n\
        sh \"$folder/helper.sh\" > outputs/out\n";
    let rest = "params: { mode: { type: string } }\nrun: [sh, work.sh]\nsources: [work.sh, helper.sh]";
    write_kind(&sandbox, "work", rest, script);
    sandbox.write("kinds/work/helper.sh", "echo good\n");
    let stage = |mode: &str| format!("name: p\nstages:\n  s:\n    uses: my/work\n    with: {{ mode: {mode} }}\n");
    for (mode, file) in [("write", "helper.sh"), ("add", "extra.sh")] {
        sandbox.write("p.yaml", &stage(mode));
        let error = sandbox.bad(1, &["run", "p.yaml"]);
        assert!(error.contains(&format!("`{file}` in the folder of the program's own source was written")), "{error}");
        sandbox.write("p.yaml", &stage(&format!("after_{mode}")));
        sandbox.good(&["run", "p.yaml"]);
        assert_eq!(text(&sandbox, "s"), "good\n");
    }
}

#[test]
fn a_stage_whose_rows_are_all_there_needs_no_program_on_this_machine() {
    let sandbox = Sandbox::new();
    sandbox.write("cuda-agent.yaml", "stages: [kinds]\n").write_squares(":");
    sandbox.write("p.yaml", "name: p\nstages: { s: { uses: my/square, inputs: { rows: { path: ids.parquet } } } }\n");
    write_ids(&sandbox.path("ids.parquet"), &[1, 2, 3], "x");
    sandbox.good(&["run", "p.yaml"]);
    write_ids(&sandbox.path("ids.parquet"), &[1, 2], "x");
    let programs = sandbox.path(".cuda-agent/cache/programs");
    std::fs::remove_dir_all(&programs).unwrap();
    sandbox.good(&["run", "p.yaml"]);
    assert!(!programs.exists());
}

#[test]
fn whether_a_file_may_be_executed_counts_and_is_kept() {
    let sandbox = Sandbox::new();
    write_kind(&sandbox, "work", "run: [work.sh]\nsources: [work.sh]", "#!/bin/sh\necho kind > outputs/out\n");
    let command = "uses: run\n    run: ./c.sh\n    files: [c.sh]\n    outputs: { out: tree }";
    sandbox.write("p.yaml", &format!("name: p\nstages:\n  k: {{ uses: my/work }}\n  c:\n    {command}\n"));
    sandbox.write("c.sh", "#!/bin/sh\necho command > outputs/out\nstat -c %a c.sh >> outputs/out\n");
    let error = sandbox.bad(1, &["run", "p.yaml", "k"]);
    assert!(error.contains("`work.sh` is a file of the program, but not executable"), "{error}");
    make_executable(&sandbox.path("kinds/work/work.sh"), true);
    std::fs::set_permissions(sandbox.path("c.sh"), std::fs::Permissions::from_mode(0o700)).unwrap();
    sandbox.good(&["run", "p.yaml"]);
    let show = |stage: &str| text(&sandbox, stage);
    assert_eq!((show("k").as_str(), show("c").as_str()), ("kind\n", "command\n755\n"));
    make_executable(&sandbox.path("kinds/work/work.sh"), false);
    make_executable(&sandbox.path("c.sh"), false);
    insta::assert_snapshot!("executable", sandbox.stable(&sandbox.good(&["plan", "p.yaml"])));
}

#[test]
fn a_file_of_a_command_replaces_nothing_of_the_engines() {
    let sandbox = Sandbox::new();
    let stage =
        "uses: run\n    run: cat request.json > outputs/out\n    files: [request.json]\n    outputs: { out: tree }";
    sandbox.write("p.yaml", &format!("name: p\nstages:\n  s:\n    {stage}\n")).write("request.json", "mine");
    let error = sandbox.bad(1, &["run", "p.yaml"]);
    assert!(error.contains("`request.json` would replace one that the engine makes"), "{error}");
}

#[test]
fn the_time_zone_and_the_language_of_a_machine_reach_no_program() {
    let mut sandbox = Sandbox::new();
    sandbox.variables = [("TZ", "Asia/Tokyo"), ("LANG", "tr_TR.UTF-8"), ("LC_ALL", "tr_TR.UTF-8")]
        .map(|(k, v)| (k.into(), v.into()))
        .into();
    let command = "echo $(date -d @0 +%H) $TZ $LANG $(printenv LC_ALL || echo none) > outputs/out";
    let stage = |env: &str| format!("    uses: run\n    run: {command:?}\n    outputs: {{ out: tree }}\n{env}");
    let declared = "    env: { TZ: JST-9, LC_ALL: C }\n";
    sandbox.write("p.yaml", &format!("name: p\nstages:\n  plain:\n{}  declared:\n{}", stage(""), stage(declared)));
    sandbox.good(&["run", "p.yaml"]);
    let show = |stage: &str| text(&sandbox, stage);
    assert_eq!(show("plain"), "00 UTC C.UTF-8 none\n");
    assert_eq!(show("declared"), "09 JST-9 C.UTF-8 C\n");
}

#[test]
fn a_result_says_which_python_made_it() {
    let mut sandbox = Sandbox::new();
    let python = |folder: &str, version: &str| {
        let text = format!(
            "#!/bin/sh\nif [ \"$1\" = -V ]; then echo Python {version}; else echo {version} > outputs/out; fi\n"
        );
        sandbox.write(&format!("{folder}/python3"), &text);
        make_executable(&sandbox.path(&format!("{folder}/python3")), true);
        let path = std::env::var("PATH").unwrap();
        format!("{}:{path}", sandbox.path(folder).canonicalize().unwrap().display())
    };
    let (old, new) = (python("old", "3.11.7"), python("new", "3.12.1"));
    sandbox.write("p.yaml", "name: p\nstages:\n  s: { uses: run, run: python3 work.py, outputs: { out: tree } }\n");
    sandbox.variables = vec![("PATH".into(), old)];
    sandbox.good(&["run", "p.yaml"]);
    assert_eq!(sandbox.good(&["plan", "p.yaml"]), "s  hit\n\n0 to run, 0 pending, 1 up to date\n");
    let explained = sandbox.good(&["explain", "p.yaml", "s"]);
    assert!(explained.contains("made with Python 3.11.7 ("), "{explained}");
    sandbox.variables = vec![("PATH".into(), new)];
    insta::assert_snapshot!("other_python", sandbox.stable(&sandbox.good(&["plan", "p.yaml"])));
}

#[test]
fn a_table_input_that_is_no_parquet_file_says_what_it_must_be() {
    let sandbox = Sandbox::new();
    sandbox.write("rows.csv", "a,b\n1,2\n").write("rows.jsonl", "{\"a\": 1}\n").write("folder/part.parquet", "");
    let told = ["rows.csv", "rows.jsonl", "folder"].map(|file| {
        write_reader(&sandbox, "echo ok > outputs/out\n", file);
        sandbox.bad(2, &["plan", "p.yaml"])
    });
    insta::assert_snapshot!("no_parquet", told.join("\n"));
}

#[test]
fn a_changed_parameter_in_a_command_is_named() {
    let sandbox = Sandbox::new();
    let stage = "uses: run\n    run: echo ${params.rate} ${params.name} > outputs/out\n    outputs: { out: tree }";
    sandbox
        .write("p.yaml", &format!("name: p\nparams: {{ rate: 5.0, name: x, other: 1 }}\nstages:\n  s:\n    {stage}\n"));
    sandbox.good(&["run", "p.yaml"]);
    let plan = sandbox.good(&["plan", "p.yaml", "-p", "rate=6", "-p", "other=2"]);
    insta::assert_snapshot!("changed_param", plan);
    sandbox.write("p.yaml", &std::fs::read_to_string(sandbox.path("p.yaml")).unwrap().replace("echo", "printf"));
    insta::assert_snapshot!("changed_command", sandbox.good(&["plan", "p.yaml"]));
}
