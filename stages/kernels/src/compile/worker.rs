//! Compile workers: child processes that run NVRTC, because a source can crash it or keep it busy for ever.
//!
//! A worker reads JSON lines on its standard input and answers each with one line on a private copy of its standard output,
//! so that whatever NVRTC prints goes elsewhere. The first line sets it up: where NVRTC is; the answer is its version, or why
//! it can't be used.

use std::io::BufRead;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use nix::sys::signal::{SigHandler, Signal, signal};
use serde::{Deserialize, Serialize};

use super::nvrtc::{Nvrtc, Outcome};
use super::process::{Limits, limited, took_too_long};
use super::toolkit;
use crate::child::answers::Answers;
use crate::child::process::{Ended, Process};
use crate::fault::EvaluatorError;

/// A worker is replaced after this many sources, in case the compiler keeps some memory of each.
const SOURCES_A_WORKER: u32 = 2000;

/// How long a worker may take to open the compiler: the first one reads 100 MB from the disk.
const START: Duration = Duration::from_secs(60);

const OUT_OF_MEMORY: &str = "the compiler ran out of memory";

/// One source to compile.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// CUDA C++.
    pub source: String,
    /// Name and text of each header that is no file.
    pub headers: Vec<(String, String)>,
    /// NVRTC's.
    pub options: Vec<String>,
    /// Where machine code is written.
    pub output: PathBuf,
}

/// What became of a source.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The output is written; this is the log.
    Compiled(String),
    /// The source is wrong; this is the log.
    Rejected(String),
    /// The compiler ran out of memory or broke: says nothing of the source.
    Broken(String),
    /// The worker could not do its part.
    Failed(String),
}

/// The compile worker's program: `cuda-agent kernels compile-worker`.
#[expect(unsafe_code, reason = "what a signal does is a matter of the whole process")]
pub fn worker_main() -> std::io::Result<()> {
    // With a precompiled header NVRTC's memory is a file, which may not become larger than a file may: it shall hear of
    // that as an error, and the source is compiled without.
    // SAFETY: no handler is set, and nothing here waits for this signal.
    unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) }?;
    let mut answers = Answers::open()?;
    let mut requests = std::io::stdin().lock().lines();
    let Some(files) = requests.next() else { return Ok(()) };
    let opened = Nvrtc::open(&serde_json::from_str(&files?)?);
    answers.say(&opened.as_ref().map(Nvrtc::version))?;
    let Ok(nvrtc) = opened else { return Ok(()) };
    for request in requests {
        answers.say(&serve(&nvrtc, &serde_json::from_str(&request?)?))?;
    }
    Ok(())
}

fn serve(nvrtc: &Nvrtc, request: &Request) -> Answer {
    match nvrtc.compile(&request.source, &request.headers, &request.options) {
        Outcome::Compiled { cubin, log } => match std::fs::write(&request.output, cubin) {
            Ok(()) => Answer::Compiled(log),
            Err(error) => Answer::Failed(format!("{}: {error}", request.output.display())),
        },
        Outcome::Rejected { log } if log.contains(": out of memory") => Answer::Broken(OUT_OF_MEMORY.to_owned()),
        Outcome::Rejected { log } => Answer::Rejected(log),
        Outcome::OutOfMemory => Answer::Broken(OUT_OF_MEMORY.to_owned()),
        // An internal error comes with an unusual source; the others mean that the installation is wrong.
        Outcome::Broken { code: 11, .. } => Answer::Broken("the compiler broke (internal error)".to_owned()),
        Outcome::Broken { code, log } => Answer::Failed(format!("NVRTC failed with code {code}: {}", log.trim())),
    }
}

/// How a worker is started.
#[derive(Clone, Debug)]
pub struct WorkerCommand {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Variables of its environment, which holds nothing else but the path.
    pub variables: Vec<(String, String)>,
}

impl WorkerCommand {
    /// The evaluator's own program, as `kernels compile-worker`.
    pub fn of_this_program() -> Result<Self, EvaluatorError> {
        let program = crate::own_program()?;
        let arguments = ["kernels", "compile-worker"].map(str::to_owned).to_vec();
        Ok(Self { program, arguments, variables: Vec::new() })
    }
}

/// What became of a request.
#[derive(Debug)]
pub enum Reply {
    /// The worker's answer, and the compiler's version.
    Answered(Answer, String),
    /// There is none: the worker was killed because it took too long.
    TimedOut(String),
    /// There is none: the worker ended.
    Crashed(String),
}

/// A bounded number of workers, started when they are needed and reused.
#[derive(Debug)]
pub struct Pool {
    command: WorkerCommand,
    limits: Limits,
    free: Mutex<usize>,
    freed: Condvar,
    idle: Mutex<Vec<Worker>>,
}

impl Pool {
    /// At most `size` compilers run at a time, of whatever kind.
    pub fn new(command: WorkerCommand, limits: Limits, size: usize) -> Self {
        Self { command, limits, free: Mutex::new(size.max(1)), freed: Condvar::new(), idle: Mutex::new(Vec::new()) }
    }

    /// The limits of one compiler.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Waits for a turn.
    pub fn turn(&self) -> Turn<'_> {
        let free = self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let waited = self.freed.wait_while(free, |free| *free == 0);
        *waited.unwrap_or_else(|poisoned| poisoned.into_inner()) -= 1;
        Turn { pool: self }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Worker>> {
        self.idle.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The right to run one compiler.
#[derive(Debug)]
pub struct Turn<'a> {
    pool: &'a Pool,
}

impl Turn<'_> {
    /// Compiles a source in a worker. Where a worker crashes, a fresh one tries again: the first may have died before.
    pub fn ask(&self, nvrtc: &toolkit::Nvrtc, request: &Request) -> Result<Reply, EvaluatorError> {
        let waiting = self.pool.idle().pop();
        if let Some(worker) = waiting {
            let reply = self.ask_one(worker, request)?;
            if !matches!(reply, Reply::Crashed(_)) {
                return Ok(reply);
            }
        }
        self.ask_one(Worker::start(&self.pool.command, nvrtc, &self.pool.limits)?, request)
    }

    fn ask_one(&self, mut worker: Worker, request: &Request) -> Result<Reply, EvaluatorError> {
        let reply = worker.ask(request, &self.pool.limits)?;
        let reusable = matches!(reply, Reply::Answered(Answer::Compiled(_) | Answer::Rejected(_), _));
        if reusable && worker.sources < SOURCES_A_WORKER {
            self.pool.idle().push(worker);
        }
        Ok(reply)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.pool.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) += 1;
        self.pool.freed.notify_one();
    }
}

/// One child. It is killed when it goes.
#[derive(Debug)]
struct Worker {
    process: Process,
    version: String,
    sources: u32,
}

impl Worker {
    fn start(worker: &WorkerCommand, nvrtc: &toolkit::Nvrtc, limits: &Limits) -> Result<Self, EvaluatorError> {
        let mut command = limited(&worker.program, limits);
        // NVRTC looks for included files in the current folder as well.
        command.args(&worker.arguments).envs(worker.variables.iter().cloned()).current_dir("/");
        let process = Process::start(&mut command);
        let mut process = process.map_err(|error| unusable(&format!("{}: {error}", worker.program.display())))?;
        let version = version(&mut process, &line(nvrtc)?)?;
        Ok(Self { process, version, sources: 0 })
    }

    fn ask(&mut self, request: &Request, limits: &Limits) -> Result<Reply, EvaluatorError> {
        self.sources += 1;
        Ok(match self.process.ask(&line(request)?, limits.time) {
            Ok(answer) => match serde_json::from_str(&answer) {
                Ok(answer) => Reply::Answered(answer, self.version.clone()),
                Err(error) => Reply::Crashed(format!("the compile worker's answer is not understood: {error}")),
            },
            Err(Ended::Timeout) => Reply::TimedOut(took_too_long(limits)),
            Err(Ended::Exited { how, .. }) => Reply::Crashed(format!("the compiler crashed ({how})")),
        })
    }
}

/// What a worker says when it is ready. Anything that the program prints before it becomes a worker is passed over.
fn version(process: &mut Process, files: &str) -> Result<String, EvaluatorError> {
    let mut said = process.ask(files, START);
    loop {
        let line = said.map_err(|_| unusable("it ended before it was ready"))?;
        if let Ok(opened) = serde_json::from_str::<Result<String, String>>(&line) {
            return opened.map_err(|message| unusable(&message));
        }
        said = process.line(START);
    }
}

fn line(message: &impl Serialize) -> Result<String, EvaluatorError> {
    serde_json::to_string(message).map_err(|error| unusable(&error.to_string()))
}

fn unusable(message: &str) -> EvaluatorError {
    EvaluatorError::new(format!("the compile worker can't be used: {message}"))
}
