//! Training stages as several processes, on the CPU: what a machine with several GPUs does but for NCCL.
#![cfg(feature = "torch")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cuda_agent_train::checkpoint::read_tensors;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

/// Of metrics, the difference between several processes and one, relative to the metric where that is above 1.
const TOLERANCE: f64 = 1e-5;

const PROGRAM: &str = env!("CARGO_BIN_EXE_cuda-agent-train");

fn engine(folder: &Path, words: &[&str]) -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let mut command = Command::new(Path::new(PROGRAM).with_file_name("cuda-agent"));
    let pipeline = root.join("pipelines/train-tiny.yaml");
    command.args(words).args(["--pipeline".as_ref(), pipeline.as_os_str()]).current_dir(folder);
    let output = command.env("CUDA_AGENT_PYTHON", root.join(".venv/bin/python")).output().unwrap();
    assert!(output.status.success(), "{words:?}\n{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Tasks, a model whose answers are worth something and not all of them the same, and episodes. Made once.
fn inputs() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let make = || {
        let folder = tempfile::tempdir().unwrap();
        engine(folder.path(), &["run", "warmup", "-p", "warmup.steps=20"]);
        for output in ["warmup.model", "questions.tasks", "warmup.trajectories"] {
            engine(folder.path(), &["export", output, output]);
        }
        folder
    };
    FOLDER.get_or_init(make).path()
}

/// Where an exported output is: its folder, or the one file in it.
fn exported(output: &str) -> PathBuf {
    let path = inputs().join(output);
    let tables: Vec<PathBuf> =
        std::fs::read_dir(&path).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    tables.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "parquet")).unwrap_or(path)
}

/// A stage's program in a folder of its own, with the parameters that the engine would fill in and `given` over them.
struct Stage {
    folder: tempfile::TempDir,
    kind: &'static str,
}

impl Stage {
    fn new(kind: &'static str, processes: u32, given: &Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let described: Value = serde_json::from_slice(&engine(inputs(), &["stages", kind, "--json"])).unwrap();
        let manifest = &described["manifest"];
        let object = |value: &Value| value.as_object().unwrap().clone();
        let mut params: Map<String, Value> =
            object(&manifest["params"]).into_iter().map(|(name, param)| (name, param["default"].clone())).collect();
        params.extend(object(given));
        params.insert("processes".into(), processes.into());
        params.insert("precision".into(), "fp32".into());
        let file = |port: &str, output: &str, of: &str| match manifest["inputs"].get(port) {
            Some(_) => vec![(port.to_owned(), json!({"type": of, "path": exported(output), "digest": output}))],
            None => Vec::new(),
        };
        let inputs: Map<String, Value> = [
            file("model", "warmup.model", "model"),
            file("tasks", "questions.tasks", "tasks"),
            file("trajectories", "warmup.trajectories", "trajectories"),
        ]
        .concat()
        .into_iter()
        .collect();
        let outputs: Map<String, Value> = object(&manifest["outputs"])
            .into_iter()
            .map(|(port, output)| (port.clone(), json!({"type": output["type"], "path": format!("outputs/{port}")})))
            .collect();
        let request = json!({
            "protocol": 1, "stage": "trained", "kind": kind, "params": params, "seed": 7, "by_row": null, "device": null,
            "inputs": inputs, "outputs": outputs, "resources": {"cpu": 1, "memory_bytes": 0, "gpus": []},
            "deadline_unix_s": null, "state_dir": folder.path().join("state"),
        });
        std::fs::create_dir_all(folder.path().join("outputs")).unwrap();
        std::fs::create_dir_all(folder.path().join("state")).unwrap();
        std::fs::write(folder.path().join("request.json"), request.to_string()).unwrap();
        Self { folder, kind }
    }

    /// Other parameters for the next start, with the state folder as it is.
    fn goes_on(&self, given: &Value) {
        let path = self.folder.path().join("request.json");
        let mut request: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for (name, value) in given.as_object().unwrap() {
            request["params"][name] = value.clone();
        }
        std::fs::remove_dir_all(self.folder.path().join("outputs")).unwrap();
        std::fs::create_dir_all(self.folder.path().join("outputs")).unwrap();
        std::fs::write(&path, request.to_string()).unwrap();
    }

    fn start(&self) -> Running {
        let mut command = Command::new(PROGRAM);
        command.args(["stage", self.kind]).current_dir(self.folder.path()).stdin(Stdio::null()).stderr(Stdio::null());
        command.env("CUDA_AGENT_REQUEST", "request.json").env("CUDA_VISIBLE_DEVICES", "");
        Running(command.spawn().unwrap())
    }

    fn run(self) -> Self {
        let status = self.start().0.wait().unwrap();
        assert!(status.success(), "{}", self.error());
        self
    }

    /// What the engine would report.
    fn error(&self) -> Value {
        let text = std::fs::read(self.folder.path().join("error.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Metrics by name and step, without what depends on the clock, and on what was in the sampler's batch at the same time.
    fn metrics(&self) -> BTreeMap<String, f64> {
        let is_of_the_run =
            |name: &str| ["timing_s/", "perf/t", "training/"].iter().all(|start| !name.starts_with(start));
        self.all_metrics().into_iter().filter(|(name, _)| is_of_the_run(name)).collect()
    }

    fn all_metrics(&self) -> BTreeMap<String, f64> {
        let text = std::fs::read_to_string(self.folder.path().join("outputs/metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let of_line = |line: Value| {
            let name = format!("{} {}", line["name"].as_str().unwrap(), line["step"]);
            (name, line["value"].as_f64().unwrap())
        };
        lines.map(of_line).collect()
    }

    fn tensors(&self, output: &str) -> BTreeMap<String, Tensor> {
        let path = self.folder.path().join("outputs").join(output).join("model.safetensors");
        read_tensors(&path).unwrap().0.into_iter().collect()
    }

    fn checkpoints(&self) -> usize {
        let folder = std::fs::read_dir(self.folder.path().join("state/checkpoints"));
        let names = folder.into_iter().flatten().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with("step-")).count()
    }
}

/// A stage's program. A test that fails leaves none behind.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

fn apart(one: &BTreeMap<String, f64>, other: &BTreeMap<String, f64>) -> (f64, String) {
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    let each = one.iter().map(|(name, value)| ((value - other[name]).abs() / value.abs().max(1.0), name.clone()));
    each.fold((0.0, String::new()), |most, next| if next.0 > most.0 { next } else { most })
}

fn apart_in_weights(one: &BTreeMap<String, Tensor>, other: &BTreeMap<String, Tensor>) -> f64 {
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    let number = |tensor: Tensor| f64::try_from(tensor.to_kind(Kind::Double)).unwrap();
    let most = |tensor: &Tensor| number(tensor.abs().max());
    one.iter().map(|(name, tensor)| most(&(tensor - &other[name])) / most(tensor).max(1e-3)).fold(0.0, f64::max)
}

fn rft() -> Value {
    json!({"reward_above": -1, "drop_truncated": false, "batch": 16, "epochs": 1, "learning_rate": 0.0001, "checkpoint_every": 2})
}

fn critic() -> Value {
    json!({"lambda": 0.95, "batch": 16, "epochs": 1, "learning_rate": 0.0001, "checkpoint_every": 4})
}

fn ppo() -> Value {
    json!({
        "judge": "expected", "steps": 4, "alarms": false, "tasks_per_step": 8, "samples": 4, "max_tokens": 5,
        "mini_batch": 12, "actor_learning_rate": 0.0001, "critic_learning_rate": 0.0003, "sampler_slots": 16,
        "sampler_capacity": 64, "checkpoint_every": 1,
    })
}

#[test]
fn several_processes_come_to_what_one_comes_to() {
    let kinds: [(_, _, _, &[u32]); 3] = [
        ("train/rft", rft(), "model", &[3]),
        ("train/critic-pretrain", critic(), "critic", &[2]),
        ("train/ppo", ppo(), "model", &[2, 3]),
    ];
    for (kind, given, output, sizes) in kinds {
        let one = Stage::new(kind, 0, &given).run();
        let moves = one.metrics().iter().any(|(name, value)| name.contains("grad_norm") && *value > 1e-3);
        assert!(moves, "{kind}: nothing is learned, so nothing could be apart");
        for processes in sizes {
            let several = Stage::new(kind, *processes, &given).run();
            let (most, name) = apart(&one.metrics(), &several.metrics());
            let weights = apart_in_weights(&one.tensors(output), &several.tensors(output));
            println!("{kind}, {processes} processes: {most:.1e} ({name}), weights {weights:.1e}");
            assert!(most < TOLERANCE, "{kind}, {processes} processes: {name} is {most:e} apart");
            assert!(weights < 1e-4, "{kind}, {processes} processes: weights are {weights:e} apart");
        }
    }
}

/// A step's episodes are made while the step before is learned from: the first step's are those of a run without, later ones are
/// of the policy before the update. A run that ends after two steps is the beginning of one of four, to the bit.
#[test]
fn episodes_ahead_are_of_the_policy_before() {
    let given = |steps: u64, overlap: bool| {
        let mut given = ppo();
        given["steps"] = steps.into();
        given["overlap"] = overlap.into();
        given
    };
    let whole = Stage::new("train/ppo", 1, &given(4, true)).run();
    let plain = Stage::new("train/ppo", 1, &given(1, false)).run();
    let one = Stage::new("train/ppo", 1, &given(1, true)).run();
    assert_eq!(one.tensors("model"), plain.tensors("model"), "the first step has nothing that was made ahead");
    let differs = Stage::new("train/ppo", 1, &given(4, false)).run();
    assert_ne!(whole.tensors("model"), differs.tensors("model"), "later ones have");

    let again = Stage::new("train/ppo", 1, &given(4, true)).run();
    assert_eq!(whole.tensors("model"), again.tensors("model"), "however the two sides of a step take turns");

    let divided = Stage::new("train/ppo", 1, &given(2, true)).run();
    divided.goes_on(&given(4, true));
    let divided = divided.run();
    assert_eq!(whole.tensors("model"), divided.tensors("model"));
}

/// What the trainer computes of a step's tokens is what the sampler computed, to the bit, step by step.
#[test]
fn an_exact_run_has_no_difference_of_probabilities() {
    let differences = |is_exact: bool| {
        let mut given = ppo();
        given["exact"] = is_exact.into();
        let run = Stage::new("train/ppo", 1, &given).run();
        let is_difference = |name: &str| name.starts_with("training/rollout_probs_diff_max");
        let all = run.all_metrics().into_iter().filter(|(name, _)| is_difference(name));
        all.map(|(_, value)| value).collect::<Vec<f64>>()
    };
    let (exact, plain) = (differences(true), differences(false));
    assert!(exact.len() > 1 && exact.iter().all(|difference| *difference == 0.0), "{exact:?}");
    assert!(plain.iter().any(|difference| *difference > 0.0), "it would be 0 anyway");
}

#[test]
fn episodes_ahead_want_one_process() {
    let mut given = ppo();
    given["overlap"] = true.into();
    let stage = Stage::new("train/ppo", 2, &given);
    assert!(!stage.start().0.wait().unwrap().success());
    assert_eq!(stage.error()["hint"], "set processes: 1, or overlap: false");
}

/// Waits for something, a minute at most.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The processes that a process has started, as the kernel lists them.
fn children(of: &Running) -> Vec<i32> {
    let path = format!("/proc/{0}/task/{0}/children", of.0.id());
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn is_gone(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie of somebody else's is no process any more.
    stat.is_empty() || stat.contains(") Z ")
}

/// A run that goes on for long, with the processes that it has started and at least one checkpoint.
fn under_way(processes: u32) -> (Stage, Running, Vec<i32>) {
    let long =
        json!({"reward_above": -1, "drop_truncated": false, "batch": 16, "epochs": 100000, "checkpoint_every": 1});
    let stage = Stage::new("train/rft", processes, &long);
    let mut child = stage.start();
    until("a first checkpoint", || {
        assert!(child.0.try_wait().unwrap().is_none(), "{}", stage.error());
        (stage.checkpoints() > 0).then_some(())
    });
    let others = children(&child);
    assert_eq!(others.len() as u32, processes - 1);
    (stage, child, others)
}

fn ended(child: &mut Running) -> ExitStatus {
    until("the stage ends", || child.0.try_wait().unwrap())
}

#[test]
fn a_process_that_is_killed_ends_the_stage_with_its_reason_and_nothing_is_left() {
    let (stage, mut child, others) = under_way(3);
    kill(Pid::from_raw(others[1]), Signal::SIGKILL).unwrap();
    assert_eq!(ended(&mut child).code(), Some(1));
    let error = stage.error();
    assert_eq!(error["message"], "process 3 of 3 ended unexpectedly: signal: 9 (SIGKILL)", "{error}");
    assert!(others.iter().all(|pid| is_gone(*pid)));

    // And the other way round.
    let (_stage, mut child, others) = under_way(2);
    child.0.kill().unwrap();
    ended(&mut child);
    until("the other process ends", || others.iter().all(|pid| is_gone(*pid)).then_some(()));
}

#[test]
fn an_error_of_all_processes_is_reported_once_and_as_it_is() {
    let stage = Stage::new("train/rft", 2, &json!({"reward_above": 1000}));
    assert_eq!(stage.start().0.wait().unwrap().code(), Some(1));
    let error = stage.error();
    assert_eq!(error["kind"], "input", "{error}");
    assert!(error["message"].as_str().unwrap().contains("no trajectory is left to train on"), "{error}");
}

#[test]
fn a_killed_run_of_two_processes_reaches_the_same_bits() {
    let whole = Stage::new("train/ppo", 2, &ppo()).run();
    let killed = Stage::new("train/ppo", 2, &ppo());
    let mut child = killed.start();
    until("a checkpoint", || (killed.checkpoints() > 0).then_some(()));
    child.0.kill().unwrap();
    ended(&mut child);
    let path = |step: u64| killed.folder.path().join(format!("state/checkpoints/step-{step:08}"));
    assert!(!path(4).exists(), "it was killed too late to show anything");
    let killed = killed.run();
    for output in ["model", "critic"] {
        let (one, other) = (whole.tensors(output), killed.tensors(output));
        assert!(one.iter().all(|(name, tensor)| tensor.equal(&other[name])), "{output}");
    }
    assert_eq!(whole.metrics(), killed.metrics());
}
