//! The runner of the GPU: a child process that holds a CUDA context and launches candidates.
//!
//! Of a candidate it gets machine code and a program of launches, fills and copies: no host code of a candidate ever runs
//! here, and the context serves one candidate after another until a fault spoils it.
//! Expected outputs never reach this process; buffers lie in the arena, which the reference made and judges.

mod activity;
mod poison;
mod replay;
mod server;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use server::main;

use super::{Arguments, Spans};
use crate::child::process::{Ended, Process};
use crate::compile::{Artifact, Built};
use crate::fault::{EvaluatorError, Fault, FaultKind};
use crate::program::Program;
use crate::reference::Purpose;

/// What the parent asks; each is answered once.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
enum Ask {
    /// Map the arena; the one before is unmapped.
    Open { ipc_handle: String, bytes: u64 },
    /// Load a candidate; the one before is unloaded.
    Load { artifact: Artifact, program: Program },
    /// Run its program once and wait.
    Run { arguments: Spans },
    /// Run it once behind a flush of the L2 cache, between two events.
    Time { arguments: Spans },
    /// Run it once with cold caches while CUPTI, which is in that library, looks on.
    Activity { arguments: Spans, cupti: PathBuf },
}

/// What the child answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// It holds a context.
    Ready { device: String },
    /// Done; milliseconds of GPU time where that was asked and could be had.
    Done { ms: Option<f64> },
    /// The candidate's fault.
    Fault(Fault),
    /// The machine's.
    Error(String),
}

/// How to start runners of one GPU.
#[derive(Clone, Debug)]
pub struct GpuRunners {
    /// This program.
    pub executable: PathBuf,
    /// The GPU's UUID, or its index.
    pub gpu: String,
    /// CUPTI's library, where there is one.
    pub cupti: Option<PathBuf>,
}

/// A child with a context.
pub struct GpuRunner {
    process: Process,
    cupti: Option<PathBuf>,
    /// The arena that it has mapped.
    arena: Option<(String, u64)>,
}

/// Making a context takes 0.1 s on an idle machine, and many times that when dozens are made at once.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The word for a runner that copies each argument into an allocation of exactly its size.
pub(super) const PRIVATE: &str = "--private";

/// The word for a runner that sleeps while it waits for the GPU.
pub(super) const SLEEPS: &str = "--sleeps";

impl GpuRunners {
    /// Starts a child and waits until it holds a context.
    pub fn start(&self, purpose: Purpose) -> Result<GpuRunner, EvaluatorError> {
        let mut command = Command::new(&self.executable);
        command.args(["kernels", "runner"]).args((purpose == Purpose::Checks).then_some(SLEEPS));
        self.start_as(command)
    }

    /// The same below a tool that watches it, whose own words come first. Its tensors are allocations of their own there:
    /// in the arena a write beside one would hit another, which no tool can see.
    pub fn start_below(&self, tool: &[String]) -> Result<GpuRunner, EvaluatorError> {
        let (program, arguments) = tool.split_first().expect("a tool has a name");
        let mut command = Command::new(program);
        command.args(arguments).arg(&self.executable).args(["kernels", "runner", PRIVATE]);
        self.start_as(command)
    }

    fn start_as(&self, mut command: Command) -> Result<GpuRunner, EvaluatorError> {
        command.env_clear().env("CUDA_VISIBLE_DEVICES", &self.gpu);
        command.envs(SAFE_ENVIRONMENT);
        for name in ["LD_LIBRARY_PATH", "PATH", "TMPDIR"] {
            command.envs(std::env::var_os(name).map(|value| (name, value)));
        }
        let process = Process::start(&mut command)
            .map_err(|error| EvaluatorError::new(format!("{}: {error}", self.executable.display())))?;
        let mut runner = GpuRunner { process, cupti: self.cupti.clone(), arena: None };
        let line = runner.process.line(START_LIMIT).map_err(|ended| EvaluatorError::new(lost("a runner", &ended)))?;
        match serde_json::from_str(&line) {
            Ok(Answer::Ready { .. }) => Ok(runner),
            Ok(Answer::Error(message)) => Err(EvaluatorError::new(message)),
            _ => Err(EvaluatorError::new(format!("a runner started with `{line}`"))),
        }
    }
}

/// Multicast can put a whole host's GPUs out of service; one connection makes contexts several times cheaper.
pub(crate) const SAFE_ENVIRONMENT: [(&str, &str); 5] = [
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    ("CUDA_MODULE_LOADING", "LAZY"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
];

impl GpuRunner {
    /// Maps the arena, unless it is mapped already.
    pub fn open(&mut self, ipc_handle: &str, bytes: u64) -> Result<(), EvaluatorError> {
        let arena = (ipc_handle.to_owned(), bytes);
        if self.arena.as_ref() == Some(&arena) {
            return Ok(());
        }
        self.arena = None;
        let ask = Ask::Open { ipc_handle: arena.0.clone(), bytes };
        match self.ask(&ask, START_LIMIT)? {
            Ok(_) => self.arena = Some(arena),
            Err(fault) => {
                return Err(EvaluatorError::new(format!("a runner could not map the arena: {}", fault.message)));
            }
        }
        Ok(())
    }

    /// Loads a candidate.
    pub fn load(&mut self, built: &Built, limit: Duration) -> Result<Result<(), Fault>, EvaluatorError> {
        let ask = Ask::Load { artifact: built.artifact.clone(), program: built.program.clone() };
        Ok(self.ask(&ask, limit)?.map(drop))
    }

    /// Launches once and waits for the end.
    pub fn run(&mut self, arguments: &Arguments, limit: Duration) -> Result<Result<(), Fault>, EvaluatorError> {
        Ok(self.ask(&Ask::Run { arguments: arguments.spans() }, limit)?.map(drop))
    }

    /// Milliseconds of GPU time of one run with cold caches.
    pub fn time(&mut self, arguments: &Arguments, limit: Duration) -> Result<Result<f64, Fault>, EvaluatorError> {
        match self.ask(&Ask::Time { arguments: arguments.spans() }, limit)? {
            Ok(Some(ms)) => Ok(Ok(ms)),
            Ok(None) => Err(EvaluatorError::new("a runner answered without a time")),
            Err(fault) => Ok(Err(fault)),
        }
    }

    /// Summed milliseconds of everything that the GPU does for one run with cold caches. `None` where CUPTI is missing, or
    /// did not see all of it; it runs in any case.
    pub fn activity(
        &mut self,
        arguments: &Arguments,
        limit: Duration,
    ) -> Result<Result<Option<f64>, Fault>, EvaluatorError> {
        let Some(cupti) = self.cupti.clone() else { return Ok(self.run(arguments, limit)?.map(|()| None)) };
        // The first use of CUPTI in a process takes most of a second.
        let limit = limit.max(Duration::from_secs(30));
        self.ask(&Ask::Activity { arguments: arguments.spans(), cupti }, limit)
    }

    /// Whether it can serve another candidate.
    pub fn is_usable(&self) -> bool {
        self.process.is_alive()
    }

    /// Lets it end by itself.
    pub fn finish(self, limit: Duration) {
        let _ = self.process.finish(limit);
    }

    fn ask(&mut self, ask: &Ask, limit: Duration) -> Result<Result<Option<f64>, Fault>, EvaluatorError> {
        let line = serde_json::to_string(ask).expect("plain data");
        let answer = self.process.ask(&line, limit);
        self.heard(answer, limit)
    }

    fn heard(
        &mut self,
        answer: Result<String, Ended>,
        limit: Duration,
    ) -> Result<Result<Option<f64>, Fault>, EvaluatorError> {
        let line = match answer {
            Ok(line) => line,
            Err(ended) => return Ok(Err(self.died(&ended, limit))),
        };
        match serde_json::from_str(&line) {
            Ok(Answer::Done { ms }) => Ok(Ok(ms)),
            Ok(Answer::Fault(fault)) => {
                // After a fault in a kernel every later call in that context fails too.
                if fault.kind != FaultKind::Launch {
                    self.process.kill();
                }
                Ok(Err(fault))
            }
            Ok(Answer::Error(message)) => {
                self.process.kill();
                Err(EvaluatorError::new(message))
            }
            Ok(Answer::Ready { .. }) | Err(_) => {
                self.process.kill();
                let line: String = line.chars().take(200).collect();
                Err(EvaluatorError::new(format!("a runner answered `{line}`")))
            }
        }
    }

    fn died(&mut self, ended: &Ended, limit: Duration) -> Fault {
        let kind = match ended {
            Ended::Timeout => FaultKind::Timeout,
            Ended::Exited { .. } => FaultKind::Crash,
        };
        let message = match ended {
            Ended::Timeout => format!("it did not end within {:.1} s and was killed", limit.as_secs_f64()),
            Ended::Exited { .. } => lost("its process", ended),
        };
        Fault { kind, message, line: None }
    }
}

fn lost(who: &str, ended: &Ended) -> String {
    match ended {
        Ended::Timeout => format!("{who} did not answer in time"),
        Ended::Exited { how, stderr } => {
            let last = stderr.lines().rev().find(|line| !line.trim().is_empty());
            format!("{who} ended with {how}{}", last.map(|line| format!(": {line}")).unwrap_or_default())
        }
    }
}
