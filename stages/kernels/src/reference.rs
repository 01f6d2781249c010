//! The trusted process: torch, the task, its inputs and expected outputs. This is the client; the process is
//! `python/reference.py`, whose header lists the messages.
//!
//! One [`ReferenceServer`] imports torch once and forks a worker for each connection.

mod ahead;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::baseline::Baseline;
use crate::child::process::{Ended, Process};
use crate::child::within;
use crate::compile::recorder::GpuFacts;
use crate::fault::EvaluatorError;
use crate::judgement::{Judgement, TaskError, TaskErrorKind};
use crate::runner::gpu::SAFE_ENVIRONMENT;
use crate::runner::{Arguments, Spans};
use crate::task::TaskSpec;

pub use self::ahead::DrawAhead;

/// Which answers count as right. The same precision is given to the candidate and to the baselines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// Against float64: the error may be a stated multiple of eager's own; no TF32 anywhere.
    Strict,
    /// The same with TF32 allowed in eager and baselines.
    Tf32,
    /// The paper's: absolute and relative tolerance of 1e-2 against eager.
    Paper,
}

/// How the reference model is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// The paper's workspace: eval mode.
    CudaAgent,
    /// KernelBench's: train mode.
    #[value(name = "kernelbench")]
    #[serde(rename = "kernelbench")]
    KernelBench,
}

/// A task, as every request names it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Python source.
    pub code: String,
    /// What messages call it.
    pub name: String,
    /// Module constants to override.
    pub set: Map<String, Value>,
    /// The setting of the model.
    pub protocol: Protocol,
    /// The yardstick.
    pub policy: Policy,
}

impl Task {
    /// Digest of everything that makes it what it is; the name does not.
    pub fn digest(&self) -> String {
        // Sorted: the order in which constants were named makes no other task.
        let set: BTreeMap<&String, &Value> = self.set.iter().collect();
        let identity = json!([self.code, set, self.protocol, self.policy]);
        let digest = blake3::derive_key("cuda-agent task v1", identity.to_string().as_bytes());
        blake3::Hash::from_bytes(digest).to_hex().to_string()
    }
}

/// What the reference says of a task.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Described {
    /// The contract with candidates.
    pub spec: TaskSpec,
    /// A rough time of one eager forward; sets limits, nothing else.
    pub eager_ms: f64,
    /// Where it ran.
    pub device: DeviceInfo,
    /// Of a GPU: what its driver says of it.
    #[serde(default)]
    pub gpu: Option<GpuFacts>,
    /// Inputs that are the same in every draw.
    #[serde(default)]
    pub fixed_inputs: Vec<String>,
    /// About how much of the GPU's memory screening it takes at its peak; 0 on a CPU.
    #[serde(default)]
    pub working_bytes: u64,
}

/// The device that a reference computes on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// As the driver names it; `cpu` for the CPU device.
    pub name: String,
    /// Of a GPU: `[9, 0]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<[u32; 2]>,
    /// Of a GPU: all of its memory. It makes no other device, so verdicts don't have it.
    #[serde(default, skip_serializing)]
    pub memory_bytes: Option<u64>,
}

/// The arena, as a runner opens it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Arena {
    /// A file, on the CPU device.
    #[serde(default)]
    pub path: Option<PathBuf>,
    /// A CUDA IPC handle in hexadecimal, on a GPU.
    #[serde(default)]
    pub ipc_handle: Option<String>,
    /// Its size.
    pub bytes: u64,
}

impl Arena {
    /// Its file; an error where it lies on a GPU.
    pub fn file(&self) -> Result<&Path, EvaluatorError> {
        self.path.as_deref().ok_or_else(|| EvaluatorError::new("the reference's arena is no file"))
    }

    /// The handle by which a process maps it; an error where it is a file.
    pub fn handle(&self) -> Result<&str, EvaluatorError> {
        self.ipc_handle.as_deref().ok_or_else(|| EvaluatorError::new("the reference's arena is no GPU memory"))
    }
}

/// One set of arguments in the arena.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Set {
    arguments: Spans,
    scratch: [u64; 2],
}

/// Where a candidate's arguments lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The block of memory.
    pub arena: Arena,
    /// Sets of arguments at different addresses.
    pub sets: Vec<Arguments>,
}

/// What warming a baseline up gave.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Prepared {
    /// Seconds that it took.
    pub seconds: f64,
    /// Compiled code, to be given to a later `prepare`.
    #[serde(default)]
    pub cache: Option<String>,
    /// Why there is none.
    #[serde(default)]
    pub error: Option<String>,
}

/// Where workers come from.
pub struct ReferenceServer {
    /// Held for its life.
    _process: Process,
    /// Its standard input, over which it is given connections.
    control: UnixStream,
    /// The version of torch.
    pub torch: String,
    step_limit: Duration,
}

/// Importing torch takes 3 s on a warm disk and most of a minute on a cold one.
const START_LIMIT: Duration = Duration::from_secs(180);

/// Where nobody says: building a model, compiling it, drawing inputs.
pub const STEP_LIMIT: Duration = Duration::from_secs(600);

/// The driver takes a worker's GPU memory back before the worker is gone.
const END_LIMIT: Duration = Duration::from_secs(10);

/// What runs a forward at most.
const ASK_LIMIT: Duration = Duration::from_secs(120);

impl ReferenceServer {
    /// Starts `script` (reference.py, with its modules beside it) under `python`, for `cpu` or for one GPU. With `compiles`
    /// it imports a GPU's compiler before it is ready, once for all workers.
    pub fn start(python: &Path, script: &Path, gpu: Option<&str>, compiles: bool) -> Result<Self, EvaluatorError> {
        let mut command = Command::new(python);
        command.arg(script).args(["--device", if gpu.is_some() { "cuda:0" } else { "cpu" }]);
        command.args((gpu.is_some() && compiles).then_some("--compiler"));
        command.envs(SAFE_ENVIRONMENT).env("CUDA_VISIBLE_DEVICES", gpu.unwrap_or_default());
        let hint = "`make venv` makes an environment with torch; CUDA_AGENT_PYTHON names its interpreter";
        let fail = |message: String| EvaluatorError::new(message).with_hint(hint);
        let (control, mut process) = start_over_socket(command)
            .map_err(|error| fail(format!("the reference could not be started: {}: {error}", python.display())))?;
        let line = process.line(START_LIMIT).map_err(|ended| match ended {
            Ended::Timeout => fail(format!("the reference was not ready within {} s", START_LIMIT.as_secs())),
            Ended::Exited { how, stderr } => {
                let last = stderr.lines().last().unwrap_or("it printed nothing");
                fail(format!("the reference ({}) ended with {how}: {last}", python.display()))
            }
        })?;
        let ready: Value = serde_json::from_str(&line).unwrap_or_default();
        match ready["torch"].as_str() {
            Some(torch) => Ok(Self { _process: process, control, torch: torch.to_owned(), step_limit: STEP_LIMIT }),
            None => Err(fail(format!("the reference started with `{line}`"))),
        }
    }

    /// Sets how long building a task, compiling it or screening it may take.
    pub fn with_step_limit(mut self, limit: Duration) -> Self {
        self.step_limit = limit;
        self
    }

    /// Gives the server the far end of a connection.
    fn give(&self, theirs: &UnixStream, purpose: Purpose) -> std::io::Result<()> {
        let word: &[u8] = match purpose {
            Purpose::Checks => b"c",
            Purpose::Times => b"t",
        };
        let (byte, descriptors) = ([IoSlice::new(word)], [theirs.as_raw_fd()]);
        let message = [ControlMessage::ScmRights(&descriptors)];
        sendmsg::<()>(self.control.as_raw_fd(), &byte, &message, MsgFlags::empty(), None)?;
        Ok(())
    }

    /// Forks a worker.
    pub fn connect(&self, purpose: Purpose) -> Result<Reference, EvaluatorError> {
        let io = |error: std::io::Error| EvaluatorError::new(format!("no worker of the reference: {error}"));
        let (stream, theirs) = UnixStream::pair().map_err(io)?;
        self.give(&theirs, purpose).map_err(io)?;
        drop(theirs);
        let reader = BufReader::new(stream.try_clone().map_err(io)?);
        let mut reference = Reference { stream, reader, process: None, usable: true, step_limit: self.step_limit };
        let hello: Value = reference.read(START_LIMIT)?;
        reference.process = hello["hello"]["pid"].as_i64().and_then(|id| i32::try_from(id).ok());
        Ok(reference)
    }
}

/// What a lane's processes are for, which decides how they wait for the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Checks: asleep, since a wait takes a core otherwise, and compilers have too few.
    Checks,
    /// Times: awake, since they hold the card.
    Times,
}

/// Starts a program whose standard input is a socket.
fn start_over_socket(mut command: Command) -> std::io::Result<(UnixStream, Process)> {
    let (control, theirs) = UnixStream::pair()?;
    let (output, printed) = std::io::pipe()?;
    command.stdin(OwnedFd::from(theirs)).stdout(printed);
    let process = Process::start_over(&mut command, control.try_clone()?.into(), output.into())?;
    Ok((control, process))
}

/// One worker.
pub struct Reference {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
    process: Option<i32>,
    usable: bool,
    step_limit: Duration,
}

/// The answer to a request: the task may be at fault, or the machine.
pub type Answered<T> = Result<Result<T, TaskError>, EvaluatorError>;

impl Reference {
    /// Loads a task and describes it.
    pub fn describe(&mut self, task: &Task) -> Answered<Described> {
        let mut request = json!({ "do": "task" });
        let fields = serde_json::to_value(task).expect("plain data");
        request.as_object_mut().expect("it is one").extend(fields.as_object().expect("it is one").clone());
        self.step(&request)
    }

    /// The forward as elementary steps, in which `$0`, `$1`, … are the arguments; empty where it has none.
    pub fn steps(&mut self, task: &Task) -> Answered<Vec<String>> {
        #[derive(Deserialize)]
        struct Steps {
            lines: Vec<String>,
        }
        let mut request = json!({ "do": "steps" });
        let fields = serde_json::to_value(task).expect("plain data");
        request.as_object_mut().expect("it is one").extend(fields.as_object().expect("it is one").clone());
        let steps: Result<Steps, TaskError> = self.step(&request)?;
        Ok(steps.map(|steps| steps.lines))
    }

    /// Torch may have so many bytes of the GPU's memory from now on, or all of them.
    pub fn limit_memory(&mut self, bytes: Option<u64>) -> Answered<()> {
        Ok(self.ask::<Value>(&json!({ "do": "limit", "bytes": bytes }), ASK_LIMIT)?.map(drop))
    }

    /// Lays out sets of arguments.
    pub fn begin(&mut self, task: &Task, seed: u64, scratch: u64, sets: u32) -> Answered<Layout> {
        #[derive(Deserialize)]
        struct Begun {
            arena: Arena,
            sets: Vec<Set>,
        }
        let seed = format!("{seed:016x}");
        let request = json!({ "do": "begin", "task": task, "seed": seed, "scratch_bytes": scratch, "sets": sets });
        let begun: Result<Begun, TaskError> = self.step(&request)?;
        let arguments = |set: Set| Arguments { tensors: set.arguments, scratch: set.scratch };
        Ok(begun.map(|begun| Layout { arena: begun.arena, sets: begun.sets.into_iter().map(arguments).collect() }))
    }

    /// Draws inputs for a trial and fills a set.
    pub fn draw(&mut self, set: usize, trial: u32, pattern: u8, again: bool) -> Answered<()> {
        let request = json!({ "do": "draw", "set": set, "trial": trial, "pattern": pattern, "again": again });
        Ok(self.step::<Value>(&request)?.map(drop))
    }

    /// The same for a program that was found right: the next judgement is quick where all is well.
    pub fn draw_quickly(&mut self, set: usize, trial: u32, pattern: u8) -> Answered<()> {
        let request = json!({ "do": "draw", "set": set, "trial": trial, "pattern": pattern, "quick": true });
        Ok(self.step::<Value>(&request)?.map(drop))
    }

    /// Compares what a run left in a set.
    pub fn judge(&mut self, set: usize) -> Answered<Judgement> {
        self.ask(&json!({ "do": "judge", "set": set }), ASK_LIMIT)
    }

    /// Warms a baseline up, for a task that no sets were laid out for.
    pub fn prepare_task(&mut self, task: &Task, which: Baseline) -> Answered<Prepared> {
        self.step(&json!({ "do": "prepare", "task": task, "which": which, "cache": null }))
    }

    /// Warms a baseline up, from a cache where there is one.
    pub fn prepare(&mut self, which: Baseline, cache: Option<&str>) -> Answered<Prepared> {
        self.step(&json!({ "do": "prepare", "which": which, "cache": cache }))
    }

    /// Times one forward of each of these baselines, one after another, in milliseconds.
    pub fn time(&mut self, which: &[Baseline], set: usize) -> Answered<Vec<f64>> {
        #[derive(Deserialize)]
        struct Timed {
            ms: Vec<f64>,
        }
        let timed: Result<Timed, _> = self.ask(&json!({ "do": "time", "which": which, "set": set }), ASK_LIMIT)?;
        Ok(timed.map(|timed| timed.ms))
    }

    /// Times baselines of a task that were prepared: the milliseconds of so many forwards of each, each trial on inputs of
    /// its own.
    pub fn times(
        &mut self,
        task: &Task,
        names: &[Baseline],
        trials: u32,
        seed: u64,
    ) -> Answered<BTreeMap<Baseline, Vec<f64>>> {
        #[derive(Deserialize)]
        struct Timed {
            ms: BTreeMap<Baseline, Vec<f64>>,
        }
        let seed = format!("{seed:016x}");
        let request = json!({ "do": "times", "task": task, "which": names, "trials": trials, "seed": seed });
        let timed: Result<Timed, _> = self.step(&request)?;
        Ok(timed.map(|timed| timed.ms))
    }

    /// Frees the memory of tasks that are kept for speed.
    pub fn forget(&mut self) -> Answered<()> {
        Ok(self.ask::<Value>(&json!({ "do": "forget" }), ASK_LIMIT)?.map(drop))
    }

    /// Summed time of the GPU's kernels in one forward of a baseline, in milliseconds, and how many there are.
    pub fn kernels(&mut self, task: &Task, which: Baseline) -> Answered<KernelTime> {
        self.ask(&json!({ "do": "kernels", "task": task, "which": which }), ASK_LIMIT)
    }

    /// One step of finding out which degenerate answers the task would let through; the last one gives the answer.
    pub fn screen_step(&mut self, task: &Task) -> Answered<Option<Value>> {
        let report: Result<Value, TaskError> = self.step(&json!({ "do": "screen", "task": task, "steps": true }))?;
        Ok(report.map(|report| report.get("passes").is_some().then_some(report)))
    }

    /// Frees the sets.
    pub fn end(&mut self) -> Answered<()> {
        Ok(self.ask::<Value>(&json!({ "do": "end" }), ASK_LIMIT)?.map(drop))
    }

    /// Whether it can be asked again.
    pub fn is_usable(&self) -> bool {
        // Whatever can be read before anything is asked is the worker's end.
        let mut silent = [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)];
        self.usable && poll(&mut silent, PollTimeout::ZERO) == Ok(0)
    }

    /// What mostly runs the task's own code: where it takes too long, the task is to blame and not the machine.
    fn step<T: DeserializeOwned>(&mut self, request: &Value) -> Answered<T> {
        let (start, limit) = (Instant::now(), self.step_limit);
        match self.ask(request, limit) {
            Err(_) if start.elapsed() >= limit => {
                let message =
                    format!("the task was not done with a step (`{}`) within {} s", what(request), limit.as_secs_f64());
                Ok(Err(TaskError { kind: TaskErrorKind::Task, message, hint: None, line: None }))
            }
            answered => answered,
        }
    }

    fn ask<T: DeserializeOwned>(&mut self, request: &Value, limit: Duration) -> Answered<T> {
        let mut line = request.to_string();
        line.push('\n');
        if let Err(error) = self.stream.write_all(line.as_bytes()) {
            return Err(self.lost(&format!("{error}")));
        }
        let mut reply: Value = self.read(limit)?;
        if let Some(error) = reply.get_mut("error") {
            let error: TaskError = serde_json::from_value(error.take())
                .map_err(|error| EvaluatorError::new(format!("the reference's error cannot be read: {error}")))?;
            return match error.kind {
                TaskErrorKind::Internal => Err(self.lost(&error.message)),
                TaskErrorKind::Ended => {
                    self.usable = false;
                    let message = format!("{}, in the step `{}`", error.message, what(request));
                    Ok(Err(TaskError { message, ..error }))
                }
                _ => Ok(Err(error)),
            };
        }
        let ok = reply.get_mut("ok").map(Value::take).unwrap_or_default();
        serde_json::from_value(ok)
            .map(Ok)
            .map_err(|error| EvaluatorError::new(format!("the reference's answer cannot be read: {error}")))
    }

    fn read(&mut self, limit: Duration) -> Result<Value, EvaluatorError> {
        let deadline = Instant::now() + limit;
        let mut line = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            // Cannot fail: the duration is not zero.
            let _ = self.reader.get_ref().set_read_timeout(Some(left));
            match self.reader.read_until(b'\n', &mut line) {
                Ok(_) if line.last() == Some(&b'\n') => break,
                Ok(_) => return Err(self.lost("it ended")),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && Instant::now() >= deadline => {
                    return Err(self.lost(&format!("no answer within {} s", limit.as_secs())));
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(self.lost(&error.to_string())),
            }
        }
        serde_json::from_slice(&line).map_err(|error| self.lost(&format!("an answer that is no JSON: {error}")))
    }

    fn lost(&mut self, why: &str) -> EvaluatorError {
        self.usable = false;
        self.kill();
        EvaluatorError::new(format!("a worker of the reference was lost: {why}"))
    }

    /// Ends the worker. Its memory is there again when it is gone, and reaped by its own parent.
    fn kill(&mut self) {
        let Some(id) = self.process.take().map(Pid::from_raw) else { return };
        let _ = kill(id, Signal::SIGKILL);
        let _ = within(END_LIMIT, || kill(id, None).err());
    }
}

fn what(request: &Value) -> &str {
    request["do"].as_str().unwrap_or_default()
}

impl Drop for Reference {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Summed kernel time of one forward.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct KernelTime {
    /// Milliseconds.
    pub kernel_ms: f64,
    /// How many kernels ran.
    pub kernels: u64,
}
