//! Compile workers: child processes that run NVRTC, because a source can crash it or keep it busy for ever.
//!
//! A worker reads JSON lines on its standard input and answers each with one line on a private copy of its standard output,
//! so that whatever NVRTC prints goes elsewhere. The first line sets it up. It ends when its input ends, and by an alarm
//! when a request takes much longer than its parent would wait: a parent that died can't kill it.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::nvrtc::{Nvrtc, Outcome};
use super::process::{self, Limits};
use super::toolkit;
use crate::fault::EvaluatorError;

/// A worker is replaced after this many sources, in case the compiler keeps some memory of each.
const SOURCES_A_WORKER: u32 = 2000;

/// How long a worker may take to open the compiler: the first one reads 100 MB from the disk.
const START: Duration = Duration::from_secs(60);

const OUT_OF_MEMORY: &str = "the compiler ran out of memory";

/// What a worker is told first.
#[derive(Debug, Serialize, Deserialize)]
struct Setup {
    library: PathBuf,
    builtins: PathBuf,
    /// The longest that a source may take, in seconds, after which the worker's alarm ends it.
    alarm_seconds: u32,
}

/// What it answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ready {
    /// It can work.
    Ready {
        /// NVRTC's version.
        version: String,
    },
    /// It can't.
    Unusable {
        /// Why.
        message: String,
    },
}

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
pub fn worker_main() -> std::io::Result<()> {
    let mut answers = private_output()?;
    // What was printed before, by a test's harness say, may not have ended its line.
    answers.write_all(b"\n")?;
    let mut requests = std::io::stdin().lock().lines();
    let Some(setup) = requests.next() else { return Ok(()) };
    let setup: Setup = serde_json::from_str(&setup?)?;
    let opened = Nvrtc::open(&toolkit::Nvrtc { library: setup.library, builtins: setup.builtins });
    let nvrtc = match opened {
        Ok(nvrtc) => {
            say(&mut answers, &Ready::Ready { version: nvrtc.version() })?;
            nvrtc
        }
        Err(message) => return say(&mut answers, &Ready::Unusable { message }),
    };
    for request in requests {
        nix::unistd::alarm::set(setup.alarm_seconds);
        let answer = serve(&nvrtc, &serde_json::from_str(&request?)?);
        nix::unistd::alarm::cancel();
        say(&mut answers, &answer)?;
    }
    Ok(())
}

/// Keeps the standard output for answers, and sends what else is printed to the standard error.
fn private_output() -> std::io::Result<std::fs::File> {
    let answers = std::io::stdout().as_fd().try_clone_to_owned()?;
    nix::unistd::dup2_stdout(std::io::stderr())?;
    Ok(answers.into())
}

fn say(answers: &mut std::fs::File, message: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    answers.write_all(&line)
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
    /// This program itself, as `kernels compile-worker`.
    pub fn of_this_program() -> Result<Self, EvaluatorError> {
        let program = std::env::current_exe();
        let program = program.map_err(|error| EvaluatorError::new(format!("this program's own file: {error}")))?;
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
            let reply = self.ask_one(worker, request);
            if !matches!(reply, Reply::Crashed(_)) {
                return Ok(reply);
            }
        }
        Ok(self.ask_one(Worker::start(&self.pool.command, nvrtc, &self.pool.limits)?, request))
    }

    fn ask_one(&self, mut worker: Worker, request: &Request) -> Reply {
        let reply = worker.ask(request, self.pool.limits.time);
        let reusable = matches!(reply, Reply::Answered(Answer::Compiled(_) | Answer::Rejected(_), _));
        if reusable && worker.sources < SOURCES_A_WORKER {
            self.pool.idle().push(worker);
        }
        reply
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
    child: Child,
    requests: ChildStdin,
    answers: Receiver<String>,
    version: String,
    sources: u32,
}

impl Worker {
    fn start(command: &WorkerCommand, nvrtc: &toolkit::Nvrtc, limits: &Limits) -> Result<Self, EvaluatorError> {
        let spawned = spawn(command, limits);
        let mut worker = spawned.map_err(|error| unusable(&format!("{}: {error}", command.program.display())))?;
        let setup = Setup {
            library: nvrtc.library.clone(),
            builtins: nvrtc.builtins.clone(),
            alarm_seconds: u32::try_from(limits.time.as_secs()).unwrap_or(u32::MAX / 2) + 10,
        };
        let _ = worker.send(&setup);
        match worker.until_ready() {
            Some(Ready::Ready { version }) => {
                worker.version = version;
                Ok(worker)
            }
            Some(Ready::Unusable { message }) => Err(unusable(&message)),
            None => Err(unusable("it ended before it was ready")),
        }
    }

    /// Anything that the program prints before it becomes a worker is passed over.
    fn until_ready(&self) -> Option<Ready> {
        loop {
            let line = self.answers.recv_timeout(START).ok()?;
            if let Ok(ready) = serde_json::from_str(&line) {
                return Some(ready);
            }
        }
    }

    fn send(&mut self, message: &impl Serialize) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.requests.write_all(&line)
    }

    fn ask(&mut self, request: &Request, time: Duration) -> Reply {
        self.sources += 1;
        if self.send(request).is_err() {
            return Reply::Crashed(self.last_words());
        }
        match self.answers.recv_timeout(time).map(|line| serde_json::from_str(&line)) {
            Ok(Ok(answer)) => Reply::Answered(answer, self.version.clone()),
            Ok(Err(error)) => Reply::Crashed(format!("the compile worker's answer is not understood: {error}")),
            Err(RecvTimeoutError::Timeout) => {
                Reply::TimedOut(format!("the compiler took more than {} s", time.as_secs()))
            }
            Err(RecvTimeoutError::Disconnected) => Reply::Crashed(self.last_words()),
        }
    }

    fn last_words(&mut self) -> String {
        match self.child.wait() {
            Ok(status) => format!("the compiler crashed ({status})"),
            Err(error) => format!("the compiler is gone ({error})"),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        process::kill(&mut self.child);
    }
}

fn spawn(worker: &WorkerCommand, limits: &Limits) -> std::io::Result<Worker> {
    let mut command = process::limited(&worker.program, limits);
    // NVRTC looks for included files in the current folder as well.
    command.args(&worker.arguments).envs(worker.variables.iter().cloned()).current_dir(Path::new("/"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let missing = || std::io::Error::other("a pipe is missing");
    let requests = child.stdin.take().ok_or_else(missing)?;
    let output = BufReader::new(child.stdout.take().ok_or_else(missing)?);
    let (sender, answers) = channel();
    std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    Ok(Worker { child, requests, answers, version: String::new(), sources: 0 })
}

fn unusable(message: &str) -> EvaluatorError {
    EvaluatorError::new(format!("the compile worker can't be used: {message}"))
}
