//! Runs a candidate on the CPU device: its own program in a process of its own, told what to run over a pipe.
//!
//! The process is [behind walls](cuda_agent_sandbox::child::walls): it has an empty environment, can read its own file and its libraries,
//! and has the arena and two pipes beside its standard streams; what it prints goes nowhere (standard output) or into a
//! bounded buffer (standard error), so that no output is taken for an answer. Memory is limited by watching what it holds
//! (AddressSanitizer reserves terabytes of addresses, so that no limit on addresses can work). Calls that reach out of the
//! program are refused when it is compiled, too. Not covered: one with host code (`launch`) can answer `done` without having
//! run; the answer is judged by the outputs alone.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use cuda_agent_sandbox::child::process::{Heard, Process};
use cuda_agent_sandbox::child::walls::{self, Walls};
use cuda_agent_sandbox::fault::{EvaluatorError, Fault, FaultKind};
use nix::sys::resource::Resource;
use nix::sys::signal::Signal;
use serde::Deserialize;

use crate::host::source_line;

/// How the program ends after a `cuda-cpu:` line, after a report of AddressSanitizer, and when its caller is wrong.
const EXIT_FAULT: i32 = 86;
const EXIT_SANITIZER: i32 = 99;
const EXIT_PROTOCOL: i32 = 2;

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
    process: Process,
    limits: CpuLimits,
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
        let arena_file = File::options().read(true).write(true).open(arena);
        let arena_file = arena_file
            .map_err(|error| EvaluatorError::new(format!("the arena {} can't be opened: {error}", arena.display())))?;
        let (child_requests, requests) = io::pipe().map_err(cannot)?;
        let (answers, child_answers) = io::pipe().map_err(cannot)?;
        let mut walls = Walls::new().limiting(Resource::RLIMIT_CPU, limits.processor_seconds);
        let arguments = [
            walls.passing(arena_file).to_string(),
            arena_bytes.to_string(),
            walls.passing(child_requests).to_string(),
            walls.passing(child_answers).to_string(),
        ];
        let mut command = walls.command(program, &arguments).map_err(cannot)?;
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let process = Process::start_over(&mut command, requests.into(), answers.into()).map_err(cannot)?;
        // With it go our copies of the program's ends.
        drop(command);
        let mut runner = Self { program: program.to_owned(), process, limits };
        Ok(match runner.answer(START_LIMIT) {
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
        if let Heard::Line(line) = self.process.hear(Instant::now()) {
            self.process.kill();
            return Ok(Err(strange_answer(&line)));
        }
        let spans = arguments.iter().chain([&scratch]).map(|span| format!(" {}:{}", span.offset, span.bytes));
        let request = format!("run {order_seed}{}", spans.collect::<String>());
        // A program that has ended does not read; its end is heard below.
        let _ = self.process.send(&request);
        Ok(self.answer(limit).and_then(|line| report(&line)))
    }

    /// The next line, or what became of the program instead.
    fn answer(&mut self, limit: Duration) -> Result<String, Fault> {
        let end = Instant::now() + limit;
        let fault = loop {
            if self.held_bytes() > self.limits.memory_bytes {
                let most = self.limits.memory_bytes >> 20;
                break plain(FaultKind::Crash, format!("it used more than {most} MiB of memory"));
            }
            match self.process.hear(end.min(Instant::now() + GLANCE)) {
                Heard::Line(line) => return Ok(line),
                Heard::End => return Err(self.autopsy()),
                Heard::Nothing if Instant::now() >= end => {
                    let seconds = limit.as_secs_f64();
                    break plain(FaultKind::Timeout, format!("it did not end within {seconds:.1} s"));
                }
                Heard::Nothing => {}
            }
        };
        self.process.kill();
        Err(fault)
    }

    /// Memory of the program's own: resident and not shared.
    fn held_bytes(&self) -> u64 {
        let statistics = fs::read_to_string(format!("/proc/{}/statm", self.process.id())).unwrap_or_default();
        let mut pages = statistics.split(' ').skip(1).map(|number| number.parse::<u64>().unwrap_or(0));
        let (resident, shared) = (pages.next().unwrap_or(0), pages.next().unwrap_or(0));
        resident.saturating_sub(shared) * 4096
    }

    /// What a program that has ended, or closed its pipe, died of.
    fn autopsy(&mut self) -> Fault {
        let status = self.process.last_status();
        let printed = self.process.printed();
        if status.and_then(|status| status.code()) == Some(EXIT_PROTOCOL)
            && let Some((_, reason)) = printed.split_once("cuda-cpu protocol: ")
        {
            // What the program takes for the task was registered by the candidate's own code.
            let reason = reason.lines().next().unwrap_or_default();
            return plain(FaultKind::Crash, format!("it broke the CPU device's program: {reason}"));
        }
        explain(&self.program, status, &printed)
    }
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
    let done = done.filter(|done| done.ms.is_finite() && done.ms >= 0.0);
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
        (None, Some(signal)) if signal == Signal::SIGSYS as i32 => plain(FaultKind::Crash, walls::REFUSED_CALL),
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
#[path = "runner_test.rs"]
mod tests;

#[cfg(test)]
#[path = "runner_walls_test.rs"]
mod walls_tests;
