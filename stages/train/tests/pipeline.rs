//! Every training stage through the engine: `pipelines/train-tiny.yaml`, on the CPU, with real verdicts.
#![cfg(feature = "torch")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The engine, beside the training program as users have them.
fn engine() -> PathBuf {
    let beside = Path::new(env!("CARGO_BIN_EXE_cuda-agent-train")).with_file_name("cuda-agent");
    assert!(beside.is_file(), "{} is missing: `make test-train` builds it", beside.display());
    beside
}

/// A thread for each program: the models are too small for more.
fn command(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(engine());
    let one: &[&str] = if words[0] == "run" { &["--jobs", "1"] } else { &[] };
    command.args(words).args(one).current_dir(folder).env("CUDA_AGENT_PYTHON", root().join(".venv/bin/python"));
    command
}

fn run(folder: &Path, words: &[&str]) -> String {
    let output: Output = command(folder, words).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    assert!(output.status.success(), "{words:?}\n{text}");
    text
}

fn pipeline() -> String {
    root().join("pipelines/train-tiny.yaml").display().to_string()
}

/// The digest of an output, by the engine's account.
fn digest(folder: &Path, output: &str) -> String {
    digest_in(folder, output, &[])
}

fn digest_in(folder: &Path, output: &str, options: &[&str]) -> String {
    let text = run(folder, &[&["show", output, "--pipeline", &pipeline(), "--json"], options].concat());
    let shown: serde_json::Value = serde_json::from_str(&text).unwrap();
    let port = output.rsplit('.').next().unwrap();
    shown[port]["digest"].as_str().unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// The mean reward of each step of `warmup`.
fn rewards(folder: &Path) -> Vec<f64> {
    run(folder, &["export", "warmup.report", "report", "--pipeline", &pipeline()]);
    let text = std::fs::read_to_string(folder.join("report/report/metrics.jsonl"));
    let text = text.or_else(|_| std::fs::read_to_string(folder.join("report/metrics.jsonl"))).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.map(|line| line["data"]["critic/score/mean"].as_f64().unwrap()).collect()
}

/// Whether one is there whole: its folder, and the file under another name that it is written to, come before it.
fn has_a_checkpoint(folder: &Path) -> bool {
    let inside = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().collect::<Vec<_>>();
    let files = inside(folder).into_iter().flat_map(|base| inside(&base.path()));
    files.into_iter().any(|file| !file.file_name().to_string_lossy().contains('#'))
}

#[test]
fn every_stage_runs_is_cached_and_a_killed_run_reaches_the_same_model() {
    let whole = tempfile::tempdir().unwrap();
    let text = run(whole.path(), &["run", &pipeline()]);
    assert!(text.contains("8 executed"), "{text}");
    let again = run(whole.path(), &["run", &pipeline()]);
    assert!(again.contains("0 executed, 8 up to date"), "{again}");
    let episode = run(whole.path(), &["show", "rollout.trajectories", "--pipeline", &pipeline()]);
    assert!(episode.contains("sample 0 of task") && episode.contains("── assistant"), "{episode}");

    // No answer is worth anything at first.
    let rewards = rewards(whole.path());
    assert!(rewards[0] < 0.1 && rewards[rewards.len() - 1] > 0.3, "{rewards:?}");

    // Killed on the way, with everything that it started, at moments that nobody chose.
    let killed = tempfile::tempdir().unwrap();
    let kills: u64 = std::env::var("CUDA_AGENT_KILLS").map_or(3, |text| text.parse().expect("a number"));
    let mut random = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos();
    for _ in 0..kills {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let milliseconds = 1500 + u64::from(random >> 8) % 4500;
        let mut command = command(killed.path(), &["run", &pipeline(), "policy"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
        println!("killed after {milliseconds} ms");
        // Whatever is published of a model is all of it.
        run(killed.path(), &["verify"]);
    }
    run(killed.path(), &["run", &pipeline(), "policy"]);
    for output in ["warmup.model", "tuned.model", "critic.critic", "policy.model", "policy.critic"] {
        assert_eq!(digest(whole.path(), output), digest(killed.path(), output), "{output}");
    }

    // More steps go on from the checkpoint, and come to what they come to from the beginning.
    let more = ["run", &pipeline(), "policy", "-p", "policy.steps=7"];
    let said = run(whole.path(), &more);
    assert!(said.contains("goes on after step 5"), "{said}");
    std::fs::remove_dir_all(killed.path().join(".cuda-agent/state")).unwrap();
    let said = run(killed.path(), &more);
    assert!(!said.contains("goes on after"), "{said}");
    for output in ["policy.model", "policy.critic"] {
        assert_eq!(digest(whole.path(), output), digest(killed.path(), output), "{output}");
    }

    // RFT goes on where a machine that was lost had come to, through a store that both have.
    let (lost, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let shared = whole.path().join(".cuda-agent");
    let store = format!("file://{}", shared.display());
    let pipeline = pipeline();
    let tuned = ["run", &pipeline, "tuned", "-p", "tuned.epochs=60", "-p", "tuned.checkpoint_every=1"];
    let elsewhere = [&tuned[..], &["--store", &store]].concat();
    let mut command = command(lost.path(), &elsewhere);
    command.env("CUDA_AGENT_CHECKPOINT_EVERY_S", "0").stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    while !has_a_checkpoint(&shared.join("v1/checkpoints")) {
        assert!(child.try_wait().unwrap().is_none(), "no checkpoint was shared");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let said = run(other.path(), &elsewhere);
    assert!(said.contains("goes on from the checkpoint"), "{said}");
    run(killed.path(), &tuned);
    assert_eq!(digest_in(other.path(), "tuned.model", &["--store", &store]), digest(killed.path(), "tuned.model"));
}
