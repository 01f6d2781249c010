//! The program's side of the protocol, for programs written in Rust.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::FromRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};

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

    /// The same with up to `width` rows in work at once, each in a thread. Answers are sent as they come. The first error
    /// ends it: rows that are in work then are answered still, later ones are left.
    pub fn each_row_at_once(
        &mut self,
        width: usize,
        work: impl Fn(RowInput) -> Result<RowResult, ProgramError> + Sync,
    ) -> Result<(), ProgramError> {
        let program = Mutex::new(self);
        spread(BufReader::new(std::io::stdin()).lines(), width, |line| {
            let line = line.map_err(|error| ProgramError::environment(format!("standard input: {error}")))?;
            let row = serde_json::from_str(&line).map_err(|error| ProgramError::input(format!("row: {error}")))?;
            let result = work(row)?;
            program.lock().expect("no panics while it is held").send(&Event::Row(result));
            Ok(())
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

/// Does `work` for each of `items`, for `width` of them at once, until there are no more or the first error.
fn spread<T: Send + 'static, E: Send>(
    items: impl Iterator<Item = T> + Send + 'static,
    width: usize,
    work: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let width = width.max(1);
    // The engine sends no more rows than it has a window for, so reading ahead is bounded.
    let (send, taken) = mpsc::channel();
    let sender = send.clone();
    // It may outlive this call: reading cannot be interrupted.
    std::thread::spawn(move || {
        items.map(Some).chain((0..width).map(|_| None)).for_each(|item| drop(sender.send(item)));
    });
    let (taken, failed) = (Mutex::new(taken), AtomicBool::new(false));
    let take = || {
        let item = taken.lock().expect("no panics while it is held").recv().ok().flatten();
        item.filter(|_| !failed.load(Ordering::Relaxed))
    };
    let worker = || {
        std::iter::from_fn(take).try_for_each(&work).inspect_err(|_| {
            failed.store(true, Ordering::Relaxed);
            (0..width).for_each(|_| drop(send.send(None)));
        })
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..width).map(|_| scope.spawn(worker)).collect();
        // All of them, whichever failed.
        let ends: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        ends.into_iter().try_for_each(|end| end.expect("a row's work does not panic"))
    })
}

#[expect(unsafe_code, reason = "adopting the descriptor that the engine opened for this process")]
fn events_file() -> Option<File> {
    let descriptor: i32 = std::env::var("CUDA_AGENT_EVENTS_FD").ok()?.parse().ok()?;
    // SAFETY: the engine opened this descriptor for this process alone, and `open` is called once.
    (descriptor > 2).then(|| unsafe { File::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_done_and_several_at_once() {
        let (sum, meeting) = (Mutex::new(0), std::sync::Barrier::new(3));
        let done: Result<(), ()> = spread(1..=30, 3, |number| {
            // Nobody gets past it before three are there.
            meeting.wait();
            *sum.lock().unwrap() += number;
            Ok(())
        });
        assert_eq!((done, sum.into_inner().unwrap()), (Ok(()), 465));
    }

    #[test]
    fn the_first_error_ends_it_though_more_may_come() {
        let (send, rows) = mpsc::channel();
        (0..100).for_each(|row| send.send(row).unwrap());
        let (done, meeting) = (Mutex::new(Vec::new()), std::sync::Barrier::new(2));
        // `send` stays open: whoever reads it waits for ever.
        let end = spread(rows.into_iter(), 2, |row| {
            if row < 2 {
                meeting.wait();
            }
            if row == 0 {
                return Err("the card is lost");
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
            done.lock().unwrap().push(row);
            Ok(())
        });
        let done = done.into_inner().unwrap();
        assert_eq!(end, Err("the card is lost"));
        assert!(done.contains(&1) && done.len() < 100, "what was begun is finished, the rest is left: {done:?}");
        drop(send);
    }
}
