//! Episodes through the engine on the CPU device, with real verdicts; and the judge that training asks.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cuda_agent_agent::policy::Role;
use cuda_agent_agent::trajectory::{self, Ending, Trajectory};
use cuda_agent_kernels::evaluator::{Device, Evaluator, Settings, Setup, VERDICT_LANES};
use cuda_agent_kernels::judge::{Admission, Judge, Rules};
use cuda_agent_kernels::reference::STEP_LIMIT;
use cuda_agent_kernels::verdict::Outcome;
use serde_json::{Value, json};

use crate::support::Sandbox;
use crate::support::kernels::{python, run, sandbox, write_strings};

fn task(call: &str) -> String {
    format!(
        "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n    def forward(self, x):\n        return \
         {call}\n\n\ndef get_inputs():\n    return [torch.randn(37, 211)]\n\n\ndef get_init_inputs():\n    return []\n"
    )
}

const PIPELINE: &str = "name: p
stages:
  episodes:
    uses: agent/rollout
    inputs: { tasks: { path: tasks.parquet } }
    resources: { cpu: 2 }
    with: { samples: 3, form: repair, turns: 2, time_limit_s: 60, screen: false }
";

fn with_tasks(pipeline: &str, tasks: &[&str]) -> Sandbox {
    let sandbox = sandbox();
    let tasks: Vec<String> = tasks.iter().map(|call| task(call)).collect();
    write_strings(&sandbox.path("tasks.parquet"), &[("code", tasks.iter().map(String::as_str).collect())]);
    sandbox.write("p.yaml", pipeline);
    sandbox
}

fn trajectories(sandbox: &Sandbox) -> Vec<Trajectory> {
    sandbox.good(&["export", "episodes", "exported", "--force"]);
    let trajectories = trajectory::read(&sandbox.path("exported/trajectories.parquet")).unwrap();
    std::fs::remove_dir_all(sandbox.path("exported")).unwrap();
    trajectories
}

#[test]
fn episodes_are_run_judged_kept_and_shown() {
    let pipeline = PIPELINE.replace("samples: 3", "samples: 8");
    let sandbox = with_tasks(&pipeline, &["torch.tanh(x)", "torch.cumsum(x, dim=1)"]);
    let counts = run(&sandbox, "p.yaml").expect("there is something to do");
    assert_eq!((counts.total, counts.executed, counts.rejected, counts.failed), (2, 2, 0, 0));
    let episodes = trajectories(&sandbox);
    assert_eq!(
        episodes.iter().map(|episode| episode.sample).collect::<Vec<_>>(),
        (0..8).chain(0..8).collect::<Vec<_>>()
    );
    for episode in &episodes {
        let is_known = episode.code.contains("tanh");
        assert_eq!(episode.reward, Some(if is_known { 1.0 } else { -1.0 }), "{}", episode.code);
        assert_eq!(episode.finish_reason, Ending::Complete);
        let outcome = episode.last_verdict().unwrap().outcome.clone();
        assert_eq!(outcome.as_deref(), Some(if is_known { "correct" } else { "wrong" }));
        let answers = episode.turns.iter().filter(|turn| turn.role == Role::Assistant).count();
        assert!(if is_known { (1..=2).contains(&answers) } else { answers == 2 });
        assert_eq!(episode.tokens.as_ref().unwrap().ids.len(), episode.reward_at.unwrap() + 1);
    }
    // What a first answer forgot is told, and mended.
    let forgot = episodes.iter().find(|episode| episode.code.contains("tanh") && episode.turns.len() == 4).unwrap();
    assert_eq!(forgot.turns[1].outcome.as_deref(), Some("unwritten"));
    assert!(forgot.turns[2].text.contains("hold what was there before the run"), "{}", forgot.turns[2].text);

    assert_eq!(run(&sandbox, "p.yaml"), None, "a second run executes nothing");
    let shown = sandbox.good(&["show", "episodes.trajectories", "-n", "1"]);
    for expected in ["sample 0 of task", "by scripted: reward 1", "=> correct", "── assistant [", "which --full shows"]
    {
        assert!(shown.contains(expected), "no `{expected}` in\n{shown}");
    }
    let rows: Value = serde_json::from_str(&sandbox.good(&["show", "episodes.trajectories", "--json"])).unwrap();
    assert_eq!(rows["trajectories"]["head"][0]["form"], "repair");
}

#[test]
fn tasks_that_teach_nothing_are_rejected_with_the_reason() {
    let pipeline = PIPELINE.replace("screen: false", "screen: true").replace("samples: 3", "samples: 1");
    let sandbox = with_tasks(&pipeline, &["torch.relu(x)", "torch.zeros_like(x) + 1", "x.undefined()"]);
    let counts = run(&sandbox, "p.yaml").expect("there is something to do");
    assert_eq!((counts.total, counts.executed, counts.rejected), (3, 3, 2));
    let rejected = sandbox.good(&["show", "episodes", "--rejected"]);
    assert!(rejected.contains("undefined"), "{rejected}");
    assert_eq!(trajectories(&sandbox).len(), 1);
}

/// A server of chat completions that answers every request with one kernel, and counts.
fn server() -> (String, Arc<AtomicUsize>) {
    const ANSWER: &str = "```cuda\n#include \"task.h\"\n__global__ void f(const float* x, float* out) {\n    long long i = \
        blockIdx.x * 256LL + threadIdx.x;\n    if (i < task::out_size) out[i] = fmaxf(x[i], 0.0f);\n}\n\
        TASK_LAUNCH(f, (task::out_size + 255) / 256, 256);\n```";
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, calls) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counted = calls.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let counted = counted.clone();
            std::thread::spawn(move || {
                let (mut reader, mut stream) = (BufReader::new(stream.try_clone().unwrap()), stream);
                loop {
                    let (mut length, mut line) = (0, String::new());
                    while reader.read_line(&mut line).unwrap_or(0) > 2 {
                        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
                            length = value.trim().parse().unwrap();
                        }
                        line.clear();
                    }
                    let mut body = vec![0; length];
                    if length == 0 || reader.read_exact(&mut body).is_err() {
                        return;
                    }
                    counted.fetch_add(1, Ordering::SeqCst);
                    let message = json!({ "content": ANSWER });
                    let answer = json!({ "choices": [{ "message": message, "finish_reason": "stop" }] }).to_string();
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", answer.len());
                    stream.write_all((head + &answer).as_bytes()).unwrap();
                }
            });
        }
    });
    (format!("http://{address}/v1"), calls)
}

#[test]
fn a_served_policy_is_called_once_for_each_episode() {
    let pipeline = PIPELINE
        .replace(
            "stages:",
            "secrets:\n  LLM_ENDPOINT: { env: LLM_ENDPOINT }\n  LLM_API_KEY: { env: LLM_API_KEY }\nstages:",
        )
        .replace("    with:", "    secrets: [LLM_ENDPOINT, LLM_API_KEY]\n    with:")
        .replace("form: repair, turns: 2", "form: single, api: openai, model: stub, prefill: false");
    let mut sandbox = with_tasks(&pipeline, &["torch.relu(x)", "torch.abs(x)"]);
    let (address, calls) = server();
    sandbox.variables.push(("LLM_ENDPOINT".into(), address));
    sandbox.variables.push(("LLM_API_KEY".into(), "no-key-needed".into()));
    run(&sandbox, "p.yaml").expect("there is something to do");
    assert_eq!(calls.load(Ordering::SeqCst), 6);
    let episodes = trajectories(&sandbox);
    for episode in &episodes {
        assert_eq!(episode.reward, Some(if episode.code.contains("relu") { 1.0 } else { -1.0 }));
        assert_eq!((&episode.tokens, episode.policy_model.as_str()), (&None, "stub"));
    }
    // The recording answers, whatever the endpoint says.
    for variable in sandbox.variables.iter_mut().filter(|(name, _)| name == "LLM_ENDPOINT") {
        variable.1 = "replay-only".into();
    }
    assert_eq!(run(&sandbox, "p.yaml"), None);
    assert_eq!((calls.load(Ordering::SeqCst), trajectories(&sandbox).len()), (6, 6));
    let failed = sandbox.bad(1, &["run", "p.yaml", "-p", "episodes.samples=4"]);
    assert!(failed.contains("no recorded episodes"), "{failed}");
}

fn judge(journal: &Path) -> Judge {
    let cache = journal.parent().unwrap().join("cache");
    let setup = Setup {
        device: Device::Cpu,
        executable: PathBuf::from(env!("CARGO_BIN_EXE_cuda-agent")),
        python: python(),
        cache,
        cores: 2,
        lanes: VERDICT_LANES,
        compiles: false,
        step_limit: STEP_LIMIT,
    };
    let settings = Settings { limit: Duration::from_secs(60), ..Rules::strict().settings };
    Judge::new(Evaluator::new(&setup).unwrap(), Rules { settings, ..Rules::strict() }, journal).unwrap()
}

#[test]
fn the_judge_gives_real_verdicts_and_is_asked_once() {
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("verdicts.jsonl");
    let kernel = |value: &str| {
        format!(
            "#include \"task.h\"\n__global__ void f(const float* x, float* out) {{\n    long long i = blockIdx.x * 256LL + \
             threadIdx.x;\n    if (i < task::out_size) out[i] = {value};\n}}\nTASK_LAUNCH(f, (task::out_size + 255) / 256, \
             256);\n"
        )
    };
    let sources = [kernel("fabsf(x[i])"), kernel("x[i]"), kernel("sigmoid(x[i])")];
    let expected = [(Outcome::Correct, 1.0), (Outcome::Wrong, -1.0), (Outcome::CompileError, -1.0)];
    let answers = |judge: &Judge| {
        let task = judge.task(&task("torch.abs(x)"));
        let Admission::Admitted(contract) = judge.admit(&task).unwrap() else { panic!("a sound task is refused") };
        assert!(contract.header.contains("constexpr long long out_size = 7807;"), "{}", contract.header);
        assert_eq!(contract.parameters, "const float* x, float* out");
        let ask = &|source: &str| judge.ask(&task, source, true).unwrap();
        std::thread::scope(|scope| {
            // Twice each, at the same time.
            let asked = sources.iter().chain(&sources);
            let threads: Vec<_> = asked.map(|source| scope.spawn(move || ask(source))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let first = judge(&journal);
    for (judged, (outcome, reward)) in answers(&first).iter().zip(expected.iter().chain(&expected)) {
        assert_eq!((judged.outcome, judged.reward), (*outcome, Some(*reward)), "{}", judged.report);
    }
    let compile_error = &answers(&first)[2];
    assert!(
        compile_error.report.contains("sigmoid") && !compile_error.report.contains("reward"),
        "{}",
        compile_error.report
    );
    drop(first);
    let lines = std::fs::read_to_string(&journal).unwrap();
    assert_eq!(lines.lines().count(), 4, "one task and three verdicts:\n{lines}");
    answers(&judge(&journal));
    assert_eq!(std::fs::read_to_string(&journal).unwrap(), lines, "nothing was asked again");
}
