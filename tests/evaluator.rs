//! The evaluator on the CPU device, as people meet it: the command `check`, and its stages through the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use cuda_agent_kernels::candidate::Format;
use cuda_agent_kernels::verdict::{Outcome, Verdict};
use serde_json::{Value, json};

use crate::programs::eventually;
use crate::support::kernels::{Candidate, Corpus, rows, run, sandbox, text, write_candidates, write_strings};
use crate::support::{Sandbox, repository};

const TASK: &str = "import torch
from torch import nn

size = 1000


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)


def get_inputs():
    return [torch.randn(size)]


def get_init_inputs():
    return []
";

/// A sandbox with a task, and candidates of the corpus beside it.
fn with_candidates(names: &[&str]) -> Sandbox {
    let sandbox = sandbox();
    sandbox.write("model.py", TASK);
    for name in names {
        sandbox.write(Path::new(name).file_name().unwrap().to_str().unwrap(), &text(name));
    }
    sandbox
}

fn check(sandbox: &Sandbox, arguments: &[&str]) -> Output {
    sandbox.output(&[&["check"], arguments].concat())
}

/// What is printed for people, after the exit status; numbers and seeds differ between machines.
fn told(sandbox: &Sandbox, arguments: &[&str]) -> String {
    let output = check(sandbox, arguments);
    let status = output.status.code().unwrap();
    let texts = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let python = &sandbox.variables[0].1;
    let text = texts.concat().replace(python.as_str(), "[python]");
    let words = |line: &str| {
        let seed = |word: &str| word.len() == 16 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        line.split(' ').map(|word| if seed(word) { "[seed]" } else { word }).collect::<Vec<_>>().join(" ")
    };
    // A busy machine takes its time, and the command says so.
    let lines = text.lines().filter(|line| !line.starts_with("still judging after"));
    let text = lines.map(words).collect::<Vec<_>>().join("\n");
    format!("$ cuda-agent check {}\n{}\nexit status {status}\n\n", arguments.join(" "), sandbox.stable(&text))
}

/// The verdict of one check, and its exit status.
fn verdict(sandbox: &Sandbox, arguments: &[&str]) -> (Verdict, i32) {
    let output = check(sandbox, &[arguments, &["--json"]].concat());
    let verdict = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (verdict, output.status.code().unwrap())
}

/// Checks each candidate with the same inputs.
fn told_of_each(names: &[&str]) -> String {
    let sandbox = with_candidates(names);
    let files = names.iter().map(|name| name.rsplit('/').next().unwrap());
    let all = files.map(|file| told(&sandbox, &[file, "--task", "model.py", "--device", "cpu", "--seed", "2a"]));
    all.collect()
}

#[test]
fn a_wrong_result_is_told_with_its_worst_element() {
    let names =
        ["right/relu.cu", "nasty/constant.cu", "nasty/first_half.cu", "nasty/not_a_number.cu", "nasty/zeros.cu"];
    insta::assert_snapshot!(told_of_each(&names));
}

#[test]
fn a_fault_is_told_with_its_line_and_thread() {
    let names = ["nasty/past_the_end.cu", "nasty/trap.cu", "nasty/writes_input.cu", "nasty/host_returns_error.cu"];
    insta::assert_snapshot!(told_of_each(&names));
}

#[test]
fn what_does_not_compile_is_told_at_its_line() {
    let names = ["nasty/syntax_error.cu", "nasty/wrong_parameters.cu", "nasty/inline_assembly.cu"];
    insta::assert_snapshot!(told_of_each(&names));
}

#[test]
fn a_hang_ends_at_its_limit() {
    let sandbox = with_candidates(&["nasty/host_loops.cu"]);
    let arguments = ["host_loops.cu", "--task", "model.py", "--device", "cpu", "--time-limit", "0.5"];
    let (verdict, status) = verdict(&sandbox, &arguments);
    assert_eq!((verdict.outcome, status), (Outcome::Timeout, 1));
    assert_eq!(verdict.message, "it did not end within 0.5 s");
}

#[test]
fn a_byte_order_mark_is_no_part_of_a_file() {
    let sandbox = with_candidates(&[]);
    sandbox.write("marked.py", &format!("\u{feff}{TASK}"));
    sandbox.write("marked.cu", &format!("\u{feff}{}", text("right/relu.cu")));
    assert_eq!(verdict(&sandbox, &["marked.cu", "--task", "marked.py", "--device", "cpu"]).1, 0);
}

#[test]
fn mistakes_in_the_task_are_told_with_its_line() {
    let sandbox = with_candidates(&["right/relu.cu"]);
    let mut all = String::new();
    for (name, from, to) in [
        ("model_less.py", "class Model", "class Modell"),
        ("unclosed.py", "torch.relu(x)", "torch.relu(x"),
        ("misspelt.py", "torch.relu(x)", "torch.rellu(x)"),
        ("random.py", "torch.relu(x)", "torch.rand_like(x)"),
        ("counting.py", "torch.relu(x)", "x[x > 0]"),
        ("ending.py", "torch.relu(x)", "__import__('os')._exit(3)"),
    ] {
        sandbox.write(name, &TASK.replace(from, to));
        all.push_str(&told(&sandbox, &["relu.cu", "--task", name, "--device", "cpu"]));
    }
    for set in ["sise=3", "size=2.5"] {
        all.push_str(&told(&sandbox, &["relu.cu", "--task", "model.py", "--device", "cpu", "--set", set]));
    }
    all.push_str(&told(&sandbox, &["--header", "--task", "unclosed.py", "--device", "cpu"]));
    insta::assert_snapshot!(all);
}

#[test]
fn a_reader_that_went_away_is_no_panic() {
    let sandbox = with_candidates(&["right/relu.cu"]);
    let arguments = ["check", "relu.cu", "--task", "model.py", "--device", "cpu", "--set", "size", "--json"];
    let mut command = sandbox.command(&arguments);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command.stdout(writer).stderr(std::process::Stdio::piped()).output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(2), ""));
}

#[test]
fn mistakes_of_usage_are_told_before_anything_starts() {
    let mut sandbox = with_candidates(&["right/relu.cu"]);
    std::fs::write(sandbox.path("binary.cu"), b"\xff\xfe").unwrap();
    // Whatever needs the interpreter shows it.
    sandbox.variables[0].1 = "/usr/bin/false".into();
    let mut all = String::new();
    for arguments in [
        &["relu.cu"][..],
        &["--task", "model.py"],
        &["relu.cu", "--task", "nowhere.py"],
        &["nowhere.cu", "--task", "model.py"],
        &["binary.cu", "--task", "model.py"],
        &["relu.cu", "--task", "model.py", "--set", "size"],
        &["relu.cu", "--task", "model.py", "--set", "size=1", "--set", "size=2"],
        &["relu.cu", "--task", "model.py", "--baselines", "none,eager"],
        &["relu.cu", "--task", "model.py", "--set", "size=big"],
        &["relu.cu", "--task", "model.py", "--time-limit", "0"],
        &["relu.cu", "--task", "model.py", "--seed", "seven"],
        &["relu.cu", "--task", "model.py", "--device", "cuda"],
        &["relu.cu", "--task", "model.py", "--device", "cuda", "--json"],
        &["relu.cu", "--task", "model.py"],
    ] {
        all.push_str(&told(&sandbox, arguments));
    }
    sandbox.variables.push(("CXX".into(), "nonexistent".into()));
    all.push_str(&told(&sandbox, &["relu.cu", "--task", "model.py"]));
    insta::assert_snapshot!(all);
}

#[test]
fn a_seed_draws_the_same_inputs_again() {
    let sandbox = with_candidates(&["nasty/copy.cu"]);
    let arguments = ["copy.cu", "--task", "model.py", "--device", "cpu"];
    let (first, status) = verdict(&sandbox, &arguments);
    assert_eq!((first.outcome, status), (Outcome::Wrong, 1));
    let worst = first.failure.as_ref().unwrap().judgement.outputs[0].worst.as_ref().unwrap();
    let number = |number: &Option<serde_json::Number>| number.as_ref().unwrap().as_f64().unwrap();
    assert_eq!(number(&worst.expected), 0.0, "a negative input that was copied");
    assert!(number(&worst.got) < 0.0 && number(&worst.error) > number(&worst.allowed));
    let (again, _) = verdict(&sandbox, &[&arguments[..], &["--seed", &first.seed]].concat());
    assert_eq!((&again.failure, &again.seed), (&first.failure, &first.seed));
    let (other, _) = verdict(&sandbox, &[&arguments[..], &["--seed", "2a"]].concat());
    assert_ne!(other.failure, first.failure);
}

/// Factors in float16 have as many digits as those in TF32, and too few for `strict`.
#[test]
fn the_policy_decides_what_is_precise_enough() {
    let sandbox = with_candidates(&["nasty/half_products.cu", "tasks/matmul.py"]);
    let size = ["--set", "rows=70", "--set", "depth=50", "--set", "columns=67", "--device", "cpu"];
    let judged = |policy: &str| {
        let arguments = [&["half_products.cu", "--task", "matmul.py", "--policy", policy], &size[..]].concat();
        verdict(&sandbox, &arguments).1
    };
    assert_eq!(["strict", "tf32", "paper"].map(judged), [1, 0, 0]);
}

#[test]
fn a_launch_candidate_is_known_by_its_source() {
    let sandbox = with_candidates(&["right/swish.cu", "tasks/swish.py"]);
    let size = ["--set", "rows=37", "--set", "columns=211", "--device", "cpu", "--inputs", "2"];
    let (verdict, status) = verdict(&sandbox, &[&["swish.cu", "--task", "swish.py"], &size[..]].concat());
    assert_eq!((verdict.outcome, verdict.format, status), (Outcome::Correct, Format::Launch, 0));
    assert_eq!((verdict.inputs, verdict.reward, verdict.accuracy.len()), (2, Some(1.0), 1));
}

/// What policies are shown as right: judged with fewer rows, and so fewer threads, with the contract that the evaluator states.
/// (In full size the evaluator takes minutes on a CPU.)
#[test]
fn the_examples_of_the_prompts_are_right() {
    let prompts = repository().join("stages/agent/prompts");
    let read = |name: String| std::fs::read_to_string(prompts.join(name)).unwrap();
    let of_kind = [
        ("example", (1024, 9), vec![4_194_304]),
        ("normalization", (512, 2), vec![12_288]),
        ("softmax", (64, 1), vec![65_536]),
        ("reduction", (64, 1), vec![65_536]),
        ("scratch", (64, 1), vec![262_144, 196_608]),
    ];
    let candidate = |(kind, (rows, fewer), threads): (&str, (u64, u64), Vec<u64>)| {
        let (task, answer) = (read(format!("{kind}_task.py")), read(format!("{kind}_answer.md")));
        let source = answer.trim().strip_prefix("```cuda\n").unwrap().strip_suffix("```").unwrap();
        let smaller = |source: String, threads: u64| {
            assert!(source.matches(&threads.to_string()).count() >= 2, "{kind}: its bound and its grid");
            source.replace(&threads.to_string(), &(threads / rows * fewer).to_string())
        };
        let source = threads.into_iter().fold(source.to_owned(), smaller);
        let contract = with_fewer_rows(&read(format!("{kind}_contract.h")), rows, fewer);
        Candidate {
            id: kind.into(),
            code: task.replacen(&format!("randn({rows}, "), &format!("randn({fewer}, "), 1),
            source: source + &asserted(&contract),
            format: "kernel".into(),
            expected: vec!["correct".into()],
        }
    };
    let candidates = of_kind.map(candidate);
    let sandbox = with_table(&candidates, "60");
    run(&sandbox, "p.yaml").unwrap();
    assert_eq!(surprises(&candidates, &rows(&sandbox, "verdicts")), [""; 0]);

    let without_words =
        |text: &str| text.replace("TASK_TABLE ", "").replace("constexpr ", "").replace("}\n\n#", "}\n#");
    sandbox.write("model.py", &candidates[0].code);
    let header = without_words(&told(&sandbox, &["--task", "model.py", "--device", "cpu", "--header"]));
    let contract = with_fewer_rows(&read("example_contract.h".into()), 1024, 9);
    assert!(header.contains(without_words(&contract).trim()), "{header}");
}

/// A contract with another first size of each tensor.
fn with_fewer_rows(contract: &str, rows: u64, fewer: u64) -> String {
    let line = |line: &str| match line.split_once("_size = ") {
        Some((name, size)) => {
            let size: u64 = size.trim_end_matches(';').parse().unwrap();
            format!("{name}_size = {};\n", size / rows * fewer)
        }
        None => {
            let shape = line.replacen(&format!("{{{rows}, "), &format!("{{{fewer}, "), 1);
            shape.replacen(&format!("[{rows}, "), &format!("[{fewer}, "), 1) + "\n"
        }
    };
    contract.lines().map(line).collect()
}

/// What a contract says, as assertions for the compiler.
fn asserted(contract: &str) -> String {
    let constants = contract.lines().filter_map(|line| line.strip_prefix("constexpr ")?.split_once(" = "));
    let of = |(name, value): (&str, &str)| {
        let name = name.rsplit(' ').next().unwrap();
        let value = value.trim_end_matches(';');
        match (name.strip_suffix("[]"), value.strip_prefix('{')) {
            (Some(name), Some(items)) => {
                let items = items.trim_end_matches('}').split(", ").enumerate();
                items.map(|(place, item)| format!("static_assert(task::{name}[{place}] == {item});\n")).collect()
            }
            _ => format!("static_assert(task::{name} == {value});\n"),
        }
    };
    constants.map(of).collect()
}

#[test]
fn the_header_is_printed_with_the_sizes_that_were_set() {
    let sandbox = with_candidates(&[]);
    let header = sandbox.good(&["check", "--header", "--task", "model.py", "--device", "cpu", "--set", "size=77"]);
    for line in ["constexpr long long x_size = 77;", "constexpr int size = 77;", "#define TASK_ARGUMENTS x, out"] {
        assert!(header.lines().any(|other| other == line), "{line} is not in\n{header}");
    }
}

#[test]
fn a_killed_check_leaves_no_process() {
    let sandbox = with_candidates(&["nasty/endless_loop.cu"]);
    let arguments = ["check", "endless_loop.cu", "--task", "model.py", "--device", "cpu"];
    let mut check = sandbox.command(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually_runs(&sandbox);
    check.kill().unwrap();
    check.wait().unwrap();
    eventually("its processes die", || processes(&sandbox).is_empty());
}

/// Processes that have to do with a sandbox: by their program, or by what they were told.
fn processes(sandbox: &Sandbox) -> Vec<PathBuf> {
    let folder = sandbox.folder.path().canonicalize().unwrap().display().to_string();
    let all = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok).map(|item| item.path());
    let concerned = |process: &PathBuf| {
        let words = std::fs::read(process.join("cmdline")).unwrap_or_default();
        program(process).starts_with(&folder) || String::from_utf8_lossy(&words).contains(&folder)
    };
    // A zombie has neither.
    all.filter(concerned).collect()
}

fn program(process: &Path) -> PathBuf {
    std::fs::read_link(process.join("exe")).unwrap_or_default()
}

/// Waits until a candidate's own program runs.
fn eventually_runs(sandbox: &Sandbox) {
    let folder = sandbox.folder.path().canonicalize().unwrap();
    eventually("a candidate runs", || processes(sandbox).iter().any(|process| program(process).starts_with(&folder)));
}

fn in_shared_memory() -> BTreeSet<String> {
    let items = std::fs::read_dir("/dev/shm").unwrap().filter_map(Result::ok);
    items.map(|item| item.file_name().to_string_lossy().into_owned()).collect()
}

const PIPELINE: &str = "name: p
stages:
  verdicts:
    uses: kernels/evaluate
    inputs: { candidates: { path: candidates.parquet } }
    with: { timing: false, time_limit_s: LIMIT }
";

fn with_table(candidates: &[Candidate], limit: &str) -> Sandbox {
    let sandbox = sandbox();
    sandbox.write("p.yaml", &PIPELINE.replace("LIMIT", limit));
    write_candidates(&sandbox.path("candidates.parquet"), candidates);
    sandbox
}

/// Candidates whose outcome is none of those that are right for them.
fn surprises(candidates: &[Candidate], rows: &[serde_json::Map<String, Value>]) -> Vec<String> {
    let by_id: BTreeMap<&str, &serde_json::Map<String, Value>> =
        rows.iter().map(|row| (row["id"].as_str().unwrap(), row)).collect();
    assert_eq!(by_id.len(), candidates.len(), "one row for each");
    let wrong = candidates.iter().filter_map(|candidate| {
        let row = by_id[candidate.id.as_str()];
        let outcome = row["outcome"].as_str().unwrap_or_default();
        let is_right = candidate.expected.iter().any(|expected| expected == outcome);
        (!is_right).then(|| format!("{}: {outcome} ({}), not {:?}", candidate.id, row["message"], candidate.expected))
    });
    wrong.collect()
}

#[test]
fn the_corpus_is_judged_as_it_should_be_and_once() {
    let mut candidates = Corpus::read().candidates();
    let sandbox = with_table(&candidates, "5");
    let total = candidates.len() as u64;
    let counts = run(&sandbox, "p.yaml").unwrap();
    assert_eq!((counts.total, counts.executed, counts.rejected, counts.failed), (total, total, 0, 0));
    let judged = rows(&sandbox, "verdicts");
    assert_eq!(surprises(&candidates, &judged), [""; 0]);
    judged.iter().for_each(agrees_with_itself);

    assert_eq!(run(&sandbox, "p.yaml"), None, "a second run has nothing to do");
    candidates.reverse();
    write_candidates(&sandbox.path("candidates.parquet"), &candidates);
    let counts = run(&sandbox, "p.yaml").unwrap();
    assert_eq!((counts.executed, counts.reused), (0, total));
    for comment in 0..3 {
        let mut more = candidates[0].clone();
        more.id = format!("more/{comment}");
        more.source += &format!("// {comment}\n");
        candidates.push(more);
    }
    write_candidates(&sandbox.path("candidates.parquet"), &candidates);
    let counts = run(&sandbox, "p.yaml").unwrap();
    assert_eq!((counts.executed, counts.reused), (3, total));
    assert_eq!(surprises(&candidates, &rows(&sandbox, "verdicts")), [""; 0]);
}

/// The columns are parts of the verdict.
fn agrees_with_itself(row: &serde_json::Map<String, Value>) {
    let verdict: Verdict = serde_json::from_str(row["verdict"].as_str().unwrap()).unwrap();
    assert_eq!(row["outcome"], verdict.outcome.word());
    assert_eq!(row["message"], verdict.message);
    let (correct, reward) = match verdict.outcome {
        Outcome::Correct => (Some(true), Some(1.0)),
        Outcome::Unsupported | Outcome::TaskError => (None, None),
        _ => (Some(false), Some(-1.0)),
    };
    assert_eq!((row["correct"].as_bool(), row["reward"].as_f64()), (correct, reward), "{}", row["id"]);
    assert!(row["candidate_ms"].is_null() && row["trials"].is_null(), "the CPU device takes no times");
}

/// A batch in which every sixth row hangs, crashes or writes where it must not, on tasks that differ in a comment:
/// each row is judged, and four sources compile.
fn batch() -> Vec<Candidate> {
    let corpus = Corpus::read();
    let bad = ["nasty/endless_loop", "nasty/trap", "nasty/past_the_end"].map(|id| corpus.pick(id));
    let good = [corpus.pick("right/relu"), corpus.pick("nasty/copy")];
    let one = |index: usize| {
        let mut candidate = if index % 6 == 5 { bad[index / 6 % 3].clone() } else { good[index % 2].clone() };
        candidate.code += &format!("# {index}\n");
        candidate.id = format!("{index} {}", candidate.id);
        candidate
    };
    (0..60).map(one).collect()
}

#[test]
fn nothing_is_lost_or_left_where_many_candidates_misbehave() {
    let candidates = batch();
    let mut table = candidates.clone();
    table.push(Candidate { id: "unreadable".into(), format: "ptx".into(), ..candidates[0].clone() });
    let sandbox = with_table(&table, "2");
    let before = in_shared_memory();
    let counts = run(&sandbox, "p.yaml").unwrap();
    assert_eq!((counts.total, counts.executed, counts.rejected, counts.failed), (61, 61, 1, 0));
    let mut judged = rows(&sandbox, "verdicts");
    judged.retain(|row| row["id"] != "unreadable");
    assert_eq!(surprises(&candidates, &judged), [""; 0]);
    eventually("its processes die", || processes(&sandbox).is_empty());
    assert_eq!(in_shared_memory().difference(&before).collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn a_killed_engine_leaves_no_candidate_and_loses_no_verdict() {
    let candidates: Vec<Candidate> = batch().into_iter().take(12).collect();
    for plain in [false, true] {
        let mut sandbox = with_table(&candidates, "3");
        if plain {
            sandbox.variables.push(("CUDA_AGENT_NO_NAMESPACES".into(), "1".into()));
        }
        let before = in_shared_memory();
        let mut engine = sandbox.command(&["run", "p.yaml"]).stderr(Stdio::null()).spawn().unwrap();
        eventually_runs(&sandbox);
        engine.kill().unwrap();
        engine.wait().unwrap();
        eventually("its processes die", || processes(&sandbox).is_empty());
        assert_eq!(in_shared_memory().difference(&before).collect::<Vec<_>>(), [""; 0]);
        let counts = run(&sandbox, "p.yaml").unwrap();
        assert_eq!((counts.executed + counts.reused, counts.failed), (12, 0));
        assert_eq!(surprises(&candidates, &rows(&sandbox, "verdicts")), [""; 0]);
    }
}

#[test]
fn a_device_that_was_not_given_fails_the_stage_with_a_hint() {
    let sandbox = with_table(&batch()[..1], "5");
    sandbox.write("cuda.yaml", &PIPELINE.replace("timing: false, time_limit_s: LIMIT", "device: cuda"));
    let error = sandbox.bad(1, &["run", "cuda.yaml"]);
    assert!(error.contains("device: cuda, but the stage was given no GPU"), "{error}");
    assert!(error.contains("resources: {gpu: 1}"), "{error}");
}

#[test]
fn a_card_that_is_out_of_service_ends_the_stage_and_takes_no_further_row() {
    let (sandbox, relu) = (sandbox(), Corpus::read().pick("right/relu"));
    let names = ["timing", "compile", "sanitizer"].map(|name| (name.to_owned(), false.into()));
    let mut params: serde_json::Map<String, Value> = names.into_iter().collect();
    params.extend(
        json!({ "device": "auto", "policy": "strict", "protocol": "cuda-agent", "reward": "milestone",
        "inputs": 5, "max_trials": 1, "time_limit_s": 5.0, "set": {} })
        .as_object()
        .unwrap()
        .clone(),
    );
    let request = json!({
        "protocol": 1, "stage": "s", "kind": "kernels/evaluate", "params": params, "seed": 0,
        "inputs": {}, "outputs": { "verdicts": { "type": "table", "path": "outputs/verdicts.parquet" } },
        "by_row": { "port": "candidates", "columns": ["code", "source", "format"], "window": 8, "total": 40 },
        "resources": { "cpu": 2, "memory_bytes": 0, "gpus": [0] },
        "device": null, "deadline_unix_s": null, "state_dir": sandbox.path("state"),
    });
    sandbox.write("request.json", &request.to_string());
    let mut command = sandbox.command(&["stage", "kernels/evaluate"]);
    // There is no such card, which is how a lost one looks to a process that starts.
    command.env("CUDA_AGENT_REQUEST", sandbox.path("request.json")).env("CUDA_VISIBLE_DEVICES", "9999");
    let mut stage = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut rows = stage.stdin.take().unwrap();
    for number in 0..8 {
        let columns = json!({ "code": relu.code, "source": relu.source, "format": "kernel" });
        writeln!(rows, "{}", json!({ "row": number.to_string(), "seed": number, "columns": columns })).unwrap();
    }
    // Its input stays open: it has to end by itself.
    assert_eq!(stage.wait().unwrap().code(), Some(1));
    let error: Value = serde_json::from_slice(&std::fs::read(sandbox.path("error.json")).unwrap()).unwrap();
    assert_eq!(error["kind"], "environment");
    assert!(error["message"].as_str().unwrap().starts_with("GPU 9999 is out of service: "), "{error}");
    drop(rows);
}

#[test]
fn profiles_tell_times_work_and_degenerate_answers() {
    let sandbox = sandbox();
    let softmax = "torch.softmax(x.reshape(10, 100), dim=1)";
    let tasks = [
        ("relu", TASK.to_owned()),
        ("softmax", TASK.replace("torch.relu(x)", softmax)),
        // Probabilities add up to one, whatever they are.
        ("ones", TASK.replace("torch.relu(x)", &format!("{softmax}.sum(dim=1)"))),
        ("broken", TASK.replace("torch.relu(x)", "torch.rellu(x)")),
        ("endless", TASK.replace("return torch.relu(x)", "while True: pass")),
    ];
    let (ids, codes) = tasks.iter().map(|(id, code)| (*id, code.as_str())).unzip();
    write_strings(&sandbox.path("tasks.parquet"), &[("id", ids), ("code", codes)]);
    sandbox.write(
        "p.yaml",
        "name: p\nstages:\n  profiles: { uses: kernels/profile, inputs: { tasks: { path: tasks.parquet } }, with: { compile: false, trials: 6, time_limit_s: 10 } }\n",
    );
    let counts = run(&sandbox, "p.yaml").unwrap();
    assert_eq!((counts.executed, counts.rejected, counts.failed), (5, 0, 0));
    let rows = rows(&sandbox, "profiles");
    let row = |id: &str| rows.iter().find(|row| row["id"] == id).unwrap();
    for id in ["relu", "softmax", "ones"] {
        let [low, middle, high] = ["profile_eager_low_ms", "profile_eager_ms", "profile_eager_high_ms"]
            .map(|name| row(id)[name].as_f64().unwrap());
        assert!(0.0 < low && low <= middle && middle <= high, "{id}: {low} {middle} {high}");
        assert!(row(id)["profile_error_kind"].is_null() && row(id)["profile_compile_ms"].is_null());
    }
    assert_eq!((&row("relu")["bytes"], &row("relu")["flops"]), (&8000.into(), &1000.into()));
    let degenerate =
        |id: &str| row(id)["degenerate"].as_array().unwrap().iter().filter_map(Value::as_str).collect::<Vec<_>>();
    assert_eq!(degenerate("relu"), [""; 0]);
    assert_eq!(degenerate("ones"), ["ones", "mean", "stale", "without:x", "constant"]);
    assert_eq!(row("endless")["profile_error"], "the task was not done with a step (`task`) within 10 s");
    assert_eq!([&row("broken")["profile_error_kind"], &row("endless")["profile_error_kind"]], ["task"; 2]);
    assert_eq!(row("broken")["profile_error"], "line 9: AttributeError: module 'torch' has no attribute 'rellu'");
}
