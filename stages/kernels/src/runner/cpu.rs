//! Runs a candidate on the CPU device: its own program in a process of its own, told what to run over a pipe.
//!
//! The process has an empty environment, a process group, limits, and two pipes beside its standard streams; what it prints
//! goes nowhere (standard output) or into a bounded buffer (standard error), so that no output is taken for an answer.
//! It dies with the thread that started it. Covered: memory by watching what it holds (AddressSanitizer reserves terabytes
//! of addresses, so that no limit on addresses can work), processor time, files, core dumps. Not covered: a candidate with
//! host code (`launch`) can read what this user can read, and answer `done` without having run; the answer is judged by the
//! outputs alone.

use std::fs;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::Deserialize;

use crate::compile::host::source_line;
use crate::fault::{EvaluatorError, Fault, FaultKind};
use crate::spawn::spawn;

/// Where the program finds its pipes.
const IN_FD: RawFd = 3;
const OUT_FD: RawFd = 4;
/// How the program ends after a `cuda-cpu:` line, after a report of AddressSanitizer, and when its caller is wrong.
const EXIT_FAULT: i32 = 86;
const EXIT_SANITIZER: i32 = 99;
const EXIT_PROTOCOL: i32 = 2;

const KEPT_OUTPUT: usize = 64 << 10;
const LONGEST_ANSWER: usize = 4096;
const GLANCE: Duration = Duration::from_millis(20);
const START_LIMIT: Duration = Duration::from_secs(10);

/// What a program may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuLimits {
    /// Memory of its own, in bytes; the arena does not count.
    pub memory_bytes: u64,
    /// Processor time over its whole life, in seconds.
    pub processor_seconds: u64,
}

impl Default for CpuLimits {
    fn default() -> Self {
        Self { memory_bytes: 8 << 30, processor_seconds: 3600 }
    }
}

/// A place in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// From its beginning, in bytes.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
}

/// What a run took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunReport {
    /// Wall time of all launches, in milliseconds.
    pub ms: f64,
}

/// A candidate's program that waits for its next run. After a fault it is gone.
#[derive(Debug)]
pub struct CpuRunner {
    program: PathBuf,
    child: Child,
    requests: PipeWriter,
    answers: PipeReader,
    errors: ChildStderr,
    unread: Vec<u8>,
    printed: Vec<u8>,
    limits: CpuLimits,
}

/// What ends a wait for an answer.
enum Heard {
    Line(String),
    /// The program closed its pipe: it has ended or is about to.
    End,
    TooLate,
    TooLarge,
}

impl CpuRunner {
    /// Starts `program` on the arena; a candidate can fail even here, in what runs before `main`.
    pub fn start(
        program: &Path,
        arena: &Path,
        arena_bytes: u64,
        limits: CpuLimits,
    ) -> Result<Result<Self, Fault>, EvaluatorError> {
        let cannot = |error: io::Error| EvaluatorError::new(format!("cannot start {}: {error}", program.display()));
        let (child_requests, requests) = io::pipe().map_err(cannot)?;
        let (answers, child_answers) = io::pipe().map_err(cannot)?;
        let mut command = Command::new(program);
        command.arg(arena).arg(arena_bytes.to_string()).arg(IN_FD.to_string()).arg(OUT_FD.to_string());
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        confine(&mut command, [child_requests.as_raw_fd(), child_answers.as_raw_fd()], limits);
        let mut child = spawn(&mut command).map_err(cannot)?;
        drop((child_requests, child_answers));
        let errors = child.stderr.take().ok_or_else(|| EvaluatorError::new("the program has no standard error"))?;
        let (unread, printed) = (Vec::new(), Vec::new());
        let mut runner =
            Self { program: program.to_owned(), child, requests, answers, errors, unread, printed, limits };
        runner.never_block()?;
        Ok(match runner.answer(START_LIMIT)? {
            Ok(line) if line.starts_with("ready ") => Ok(runner),
            Ok(line) => Err(strange_answer(&line)),
            Err(fault) => Err(fault),
        })
    }

    /// Runs all launches once, in an order drawn from `order_seed`. After a fault the program is gone.
    pub fn run(
        &mut self,
        order_seed: u64,
        arguments: &[Span],
        scratch: Span,
        limit: Duration,
    ) -> Result<Result<RunReport, Fault>, EvaluatorError> {
        let spans = arguments.iter().chain([&scratch]).map(|span| format!(" {}:{}", span.offset, span.bytes));
        let request = format!("run {order_seed}{}\n", spans.collect::<String>());
        // A program that has ended does not read; its end is heard below.
        let _ = self.requests.write_all(request.as_bytes());
        Ok(self.answer(limit)?.and_then(|line| report(&line)))
    }

    fn never_block(&self) -> Result<(), EvaluatorError> {
        for pipe in [self.answers.as_fd(), self.errors.as_fd()] {
            let set = fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
            set.map_err(|error| EvaluatorError::new(format!("cannot prepare a pipe: {error}")))?;
        }
        Ok(())
    }

    /// The next line, or what became of the program instead.
    fn answer(&mut self, limit: Duration) -> Result<Result<String, Fault>, EvaluatorError> {
        let fault = match self.listen(Instant::now() + limit)? {
            Heard::Line(line) => return Ok(Ok(line)),
            Heard::End => return self.autopsy().map(Err),
            Heard::TooLate => plain(FaultKind::Timeout, format!("it did not end within {:.1} s", limit.as_secs_f64())),
            Heard::TooLarge => {
                let most = self.limits.memory_bytes >> 20;
                plain(FaultKind::Crash, format!("it used more than {most} MiB of memory"))
            }
        };
        self.kill();
        Ok(Err(fault))
    }

    fn listen(&mut self, end: Instant) -> Result<Heard, EvaluatorError> {
        loop {
            if let Some(length) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line = self.unread.drain(..=length).collect::<Vec<_>>();
                return Ok(Heard::Line(String::from_utf8_lossy(&line).trim_end().to_owned()));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Heard::TooLate);
            }
            if self.held_bytes() > self.limits.memory_bytes {
                return Ok(Heard::TooLarge);
            }
            self.wait_for_output(left.min(GLANCE))?;
            if self.read_answers() || self.unread.len() > LONGEST_ANSWER {
                return Ok(Heard::End);
            }
            self.read_errors();
        }
    }

    fn wait_for_output(&self, limit: Duration) -> Result<(), EvaluatorError> {
        let mut pipes =
            [PollFd::new(self.answers.as_fd(), PollFlags::POLLIN), PollFd::new(self.errors.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(limit.max(Duration::from_millis(1))).unwrap_or(PollTimeout::MAX);
        match poll(&mut pipes, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(EvaluatorError::new(format!("cannot wait for the program: {error}"))),
        }
    }

    /// Whether the pipe has ended.
    fn read_answers(&mut self) -> bool {
        let mut buffer = [0; LONGEST_ANSWER];
        match self.answers.read(&mut buffer) {
            Ok(0) => true,
            Ok(length) => {
                self.unread.extend_from_slice(&buffer[..length]);
                false
            }
            Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
    }

    /// Keeps the end of what is printed, where a fault's line is.
    fn read_errors(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        match self.errors.read(&mut buffer) {
            Ok(0) => false,
            Ok(length) => {
                self.printed.extend_from_slice(&buffer[..length]);
                let extra = self.printed.len().saturating_sub(KEPT_OUTPUT);
                self.printed.drain(..extra);
                true
            }
            Err(_) => false,
        }
    }

    /// Memory of the program's own: resident and not shared.
    fn held_bytes(&self) -> u64 {
        let statistics = fs::read_to_string(format!("/proc/{}/statm", self.child.id())).unwrap_or_default();
        let mut pages = statistics.split(' ').skip(1).map(|number| number.parse::<u64>().unwrap_or(0));
        let (resident, shared) = (pages.next().unwrap_or(0), pages.next().unwrap_or(0));
        resident.saturating_sub(shared) * 4096
    }

    /// What a program that has ended, or closed its pipe, died of.
    fn autopsy(&mut self) -> Result<Fault, EvaluatorError> {
        let status = self.last_status();
        while self.read_errors() {}
        let printed = String::from_utf8_lossy(&self.printed).into_owned();
        if status.and_then(|status| status.code()) == Some(EXIT_PROTOCOL)
            && let Some((_, reason)) = printed.split_once("cuda-cpu protocol: ")
        {
            return Err(EvaluatorError::new(format!("the CPU device's program: {}", reason.trim_end())));
        }
        Ok(explain(&self.program, status, &printed))
    }

    /// The status of a program that ends by itself; one that only closed its pipe is ended.
    fn last_status(&mut self) -> Option<ExitStatus> {
        let patience = Instant::now() + Duration::from_secs(1);
        while Instant::now() < patience {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            self.read_errors();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.kill();
        None
    }

    fn kill(&mut self) {
        let _ = killpg(Pid::from_raw(self.child.id() as i32), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

impl Drop for CpuRunner {
    fn drop(&mut self) {
        self.kill();
    }
}

#[expect(unsafe_code, reason = "limits and pipes belong to the child alone, so they are set between fork and exec")]
fn confine(command: &mut Command, pipes: [RawFd; 2], limits: CpuLimits) {
    let confine = move || {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
        setrlimit(Resource::RLIMIT_FSIZE, 0, 0)?;
        setrlimit(Resource::RLIMIT_NPROC, 0, 0)?;
        setrlimit(Resource::RLIMIT_CPU, limits.processor_seconds, limits.processor_seconds)?;
        place_pipes(pipes)
    };
    // SAFETY: the closure makes system calls only: it allocates nothing and takes no lock.
    unsafe { command.pre_exec(confine) };
}

/// First to numbers out of the way, since either pipe may have the number that the other is to get.
#[expect(unsafe_code, reason = "after fork, descriptors are plain numbers")]
fn place_pipes(pipes: [RawFd; 2]) -> io::Result<()> {
    let check = |result| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
    // SAFETY: F_DUPFD_CLOEXEC and dup2 are given numbers of open descriptors and touch no memory of ours.
    unsafe {
        let requests = check(libc::fcntl(pipes[0], libc::F_DUPFD_CLOEXEC, 16))?;
        let answers = check(libc::fcntl(pipes[1], libc::F_DUPFD_CLOEXEC, 16))?;
        check(libc::dup2(requests, IN_FD))?;
        check(libc::dup2(answers, OUT_FD))?;
    }
    Ok(())
}

fn plain(kind: FaultKind, message: impl Into<String>) -> Fault {
    Fault { kind, message: message.into(), line: None }
}

fn strange_answer(line: &str) -> Fault {
    let start = line.chars().take(60).collect::<String>();
    plain(FaultKind::Crash, format!("it wrote into the evaluator's pipe: {start:?}"))
}

/// `done {"ms": 1.5}`.
fn report(line: &str) -> Result<RunReport, Fault> {
    #[derive(Deserialize)]
    struct Done {
        ms: f64,
    }
    let done = line.strip_prefix("done ").and_then(|json| serde_json::from_str::<Done>(json).ok());
    done.map(|done| RunReport { ms: done.ms }).ok_or_else(|| strange_answer(line))
}

/// The `cuda-cpu:` line of a program that ended with a fault.
#[derive(Deserialize)]
struct Said {
    kind: FaultKind,
    message: String,
    line: u32,
    code: u64,
    other_code: u64,
}

impl Said {
    fn fault(self, program: &Path) -> Fault {
        let line = if self.line != 0 { Some(self.line) } else { line_of(program, self.code) };
        let other = line_of(program, self.other_code).map(|line| format!(" (there: line {line})"));
        Fault { kind: self.kind, message: self.message + &other.unwrap_or_default(), line }
    }
}

fn line_of(program: &Path, address: u64) -> Option<u32> {
    if address == 0 { None } else { source_line(program, address) }
}

fn explain(program: &Path, status: Option<ExitStatus>, printed: &str) -> Fault {
    let Some(status) = status else { return plain(FaultKind::Crash, "it closed the evaluator's pipe") };
    match (status.code(), status.signal()) {
        (Some(EXIT_FAULT), _) => {
            said(program, printed).unwrap_or_else(|| plain(FaultKind::Crash, "it ended with code 86"))
        }
        (Some(EXIT_SANITIZER), _) => sanitizer_fault(printed),
        (Some(code), _) => plain(FaultKind::Crash, format!("it ended its process with code {code}")),
        (None, Some(signal)) if signal == Signal::SIGXCPU as i32 => {
            plain(FaultKind::Timeout, "it used up its processor time")
        }
        (None, signal) => plain(FaultKind::Crash, format!("signal {} ended it", signal.unwrap_or(0))),
    }
}

fn said(program: &Path, printed: &str) -> Option<Fault> {
    let line = printed.lines().rev().find_map(|line| line.strip_prefix("cuda-cpu: "))?;
    Some(serde_json::from_str::<Said>(line).ok()?.fault(program))
}

/// A report that AddressSanitizer printed itself, because it is about no access (a double free, say).
fn sanitizer_fault(printed: &str) -> Fault {
    let what = printed.lines().find_map(|line| line.split_once("ERROR: AddressSanitizer: "));
    let what = what.map_or("an error", |(_, what)| what.split(" on ").next().unwrap_or(what));
    plain(FaultKind::OutOfBounds, format!("AddressSanitizer found: {what}"))
}

#[cfg(test)]
#[path = "cpu_test.rs"]
mod tests;
