//! How a candidate's run can end badly. A fault is the candidate's; what the machine does wrong is an
//! [`EvaluatorError`].

use serde::{Deserialize, Serialize};

/// What went wrong while a candidate ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Its kind.
    pub kind: FaultKind,
    /// One line: what, and where as far as it is known.
    pub message: String,
    /// The line in the candidate's source, counted from one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
}

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// It did not end within its limit.
    Timeout,
    /// It ended its process, or the GPU reported an error that is none of the others.
    Crash,
    /// It read or wrote where it must not.
    OutOfBounds,
    /// Two threads used one place, at least one of them writing, and nothing ordered them.
    Race,
    /// Threads wait for threads that never come.
    Deadlock,
    /// An access whose address is no multiple of its size.
    Misaligned,
    /// A launch was refused: too many threads, too much shared memory.
    Launch,
    /// It uses something that this device does not offer. Not a verdict on the candidate.
    Unsupported,
}

/// The evaluator itself could not do its work; says nothing of the candidate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct EvaluatorError {
    /// What went wrong.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl EvaluatorError {
    /// An error without a hint.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }

    /// Adds what to do about it.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}
