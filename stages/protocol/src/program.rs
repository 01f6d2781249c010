//! The program's side of the protocol, for programs written in Rust.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::FromRawFd;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::event::{Event, RowResult};
use crate::request::{Request, RowInput};

/// Why a program failed, for the person who runs the pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ProgramError {
    /// `input` and `params` (another try is useless), `device`, `environment` or `internal`.
    pub kind: String,
    /// What went wrong.
    pub message: String,
    /// What to do about it.
    #[serde(default)]
    pub hint: Option<String>,
}

impl ProgramError {
    /// An error whose cause lies in an input.
    pub fn input(message: impl Into<String>) -> Self {
        Self { kind: "input".into(), message: message.into(), hint: None }
    }

    /// An error of the machine: a disk, a missing tool.
    pub fn environment(message: impl Into<String>) -> Self {
        Self { kind: "environment".into(), message: message.into(), hint: None }
    }

    /// Adds what to do about it.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Whether trying again is useless.
    pub fn is_permanent(&self) -> bool {
        matches!(self.kind.as_str(), "input" | "params" | "device")
    }
}

/// A running program: its request, and the way back.
pub struct Program {
    /// What is to be done.
    pub request: Request,
    events: Option<File>,
}

impl Program {
    /// Reads the request that the engine left, in the working directory.
    pub fn open() -> Result<Self, ProgramError> {
        let path = std::env::var("CUDA_AGENT_REQUEST").map_err(|_| {
            ProgramError::environment("CUDA_AGENT_REQUEST is not set")
                .with_hint("a stage's program is started by `cuda-agent run`, not by hand")
        })?;
        let text = std::fs::read(&path).map_err(|error| ProgramError::environment(format!("{path}: {error}")))?;
        let request: Request =
            serde_json::from_slice(&text).map_err(|error| ProgramError::environment(format!("{path}: {error}")))?;
        if request.protocol != crate::PROTOCOL_VERSION {
            let (theirs, ours) = (request.protocol, crate::PROTOCOL_VERSION);
            return Err(ProgramError::environment(format!("protocol {theirs}, but this program speaks {ours}")));
        }
        Ok(Self { request, events: events_file() })
    }

    /// Sends an event. A lost reader is no reason to fail: the engine is gone, and so will be this program.
    pub fn send(&mut self, event: &Event) {
        if let Some(file) = &mut self.events {
            let mut line = serde_json::to_vec(event).expect("events are plain data");
            line.push(b'\n');
            let _ = file.write_all(&line);
        }
    }

    /// Calls `work` for each row on standard input and sends its answers.
    pub fn each_row(&mut self, mut work: impl FnMut(&Request, RowInput) -> RowResult) -> Result<(), ProgramError> {
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|error| ProgramError::environment(format!("standard input: {error}")))?;
            let row = serde_json::from_str(&line).map_err(|error| ProgramError::input(format!("row: {error}")))?;
            let result = work(&self.request, row);
            self.send(&Event::Row(result));
        }
        Ok(())
    }

    /// The same with up to `width` rows in work at once, each in a thread. Answers are sent as they come.
    pub fn each_row_at_once(
        &mut self,
        width: usize,
        work: impl Fn(RowInput) -> RowResult + Sync,
    ) -> Result<(), ProgramError> {
        let (lines, program) = (Mutex::new(BufReader::new(std::io::stdin()).lines()), Mutex::new(self));
        let take = || lines.lock().expect("no panics while it is held").next();
        let worker = || -> Result<(), ProgramError> {
            while let Some(line) = take() {
                let line = line.map_err(|error| ProgramError::environment(format!("standard input: {error}")))?;
                let row = serde_json::from_str(&line).map_err(|error| ProgramError::input(format!("row: {error}")))?;
                let result = work(row);
                program.lock().expect("no panics while it is held").send(&Event::Row(result));
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..width.max(1)).map(|_| scope.spawn(worker)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().expect("a row's work does not panic"))
        })
    }

    /// Runs a program's body and turns its outcome into an exit status and `error.json`.
    pub fn main(body: impl FnOnce(&mut Program) -> Result<(), ProgramError>) -> u8 {
        let Err(error) = Program::open().and_then(|mut program| body(&mut program)) else { return 0 };
        eprintln!("error: {error}");
        let text = serde_json::to_vec(&error).expect("errors are plain data");
        if let Err(cause) = std::fs::write("error.json", text) {
            eprintln!("error.json: {cause}");
        }
        1
    }
}

#[expect(unsafe_code, reason = "adopting the descriptor that the engine opened for this process")]
fn events_file() -> Option<File> {
    let descriptor: i32 = std::env::var("CUDA_AGENT_EVENTS_FD").ok()?.parse().ok()?;
    // SAFETY: the engine opened this descriptor for this process alone, and `open` is called once.
    (descriptor > 2).then(|| unsafe { File::from_raw_fd(descriptor) })
}
