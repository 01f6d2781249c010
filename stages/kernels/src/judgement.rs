//! What the reference finds: results that are right or wrong, and tasks that cannot be worked with. Verdicts hold all of it,
//! so its words are those of stored rows.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};
use serde_json::Number;

/// Why a task cannot be worked with. Says nothing of candidates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct TaskError {
    /// What stands in the way.
    pub kind: TaskErrorKind,
    /// One line.
    pub message: String,
    /// What to do about it.
    #[serde(default)]
    pub hint: Option<String>,
    /// The line in the task's file.
    #[serde(default)]
    pub line: Option<u32>,
}

impl TaskError {
    /// Whether only more memory would help.
    pub fn is_memory(&self) -> bool {
        self.kind == TaskErrorKind::Memory
    }

    /// Whether it may come of what else the machine does.
    pub fn is_worth_another_try(&self) -> bool {
        self.is_memory() || self.kind == TaskErrorKind::Ended
    }
}

/// What stands in the way of working with a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskErrorKind {
    /// Its own code is wrong.
    Task,
    /// It does not fit the formats of candidates.
    Unsupported,
    /// It needs more memory than there is.
    Memory,
    /// Its process ended.
    Ended,
    /// The reference's fault.
    Internal,
}

/// What the judge found after a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judgement {
    /// By output.
    pub outputs: Vec<OutputJudgement>,
    /// Inputs, parameters and buffers that were written to.
    pub inputs_changed: Vec<String>,
    /// Bytes beside tensors that were written to.
    pub red_zones: Vec<RedZone>,
}

/// Of one output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputJudgement {
    /// Its name.
    pub name: String,
    /// Whether it is right.
    pub pass: bool,
    /// Why it is not.
    pub reason: Option<Defect>,
    /// Elements beyond the tolerance.
    pub mismatched: u64,
    /// Elements.
    pub total: u64,
    /// The worst element.
    pub worst: Option<Worst>,
    /// Elements that are infinite or no number where the reference is finite.
    pub nonfinite: u64,
    /// Elements that hold what was there before; known when both patterns ran.
    pub unwritten: Option<u64>,
    /// The first of them.
    #[serde(default)]
    pub first_unwritten: Option<Vec<u64>>,
    /// Root mean square of the error.
    #[serde(default)]
    pub error_rms: Option<f64>,
    /// Eager's own, against float64.
    #[serde(default)]
    pub reference_error_rms: Option<f64>,
    /// What it may be.
    #[serde(default)]
    pub allowed_rms: Option<f64>,
    /// The part that is furthest beyond what is allowed, where one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
}

/// A part of an output that is held to bounds of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Which dimension; without, a block of 1,024 elements in a row.
    pub dimension: Option<u32>,
    /// The index there, or which block.
    pub index: u64,
    /// How many times what is allowed; `None` where it is no finite number.
    pub times: Option<f64>,
}

/// The element that is furthest out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worst {
    /// Where.
    pub index: Vec<u64>,
    /// The reference's value; `null` where it is no finite number.
    pub expected: Option<Number>,
    /// The same in words, where the number doesn't say it: `inf`, `-inf`, `nan`, `true`, `false`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_text: Option<String>,
    /// The candidate's.
    pub got: Option<Number>,
    /// The same in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub got_text: Option<String>,
    /// Their difference; `null` for booleans.
    pub error: Option<Number>,
    /// What it may be.
    pub allowed: Option<Number>,
}

/// A write beside a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedZone {
    /// The tensor.
    pub near: String,
    /// On which side of it.
    pub side: Side,
    /// Bytes between the tensor and the first changed byte.
    pub offset: u64,
}

/// Why an output is not right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Defect {
    /// Elements beyond the tolerance.
    Values,
    /// Elements that are infinite or no number where the reference is finite.
    Nonfinite,
    /// All of it is zero.
    Zeros,
    /// Elements that hold what was there before.
    Unwritten,
}

/// On which side of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// At lower addresses.
    Before,
    /// At higher addresses.
    After,
}

impl Display for Side {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Before => "before",
            Self::After => "after",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `python/refusal.py`, `judge.py` and `arena.py` write these words, and stored verdicts hold them.
    #[test]
    fn words_are_those_of_the_reference_and_of_stored_verdicts() {
        use TaskErrorKind as Kind;
        let kinds = [Kind::Task, Kind::Unsupported, Kind::Memory, Kind::Ended, Kind::Internal];
        let reasons = [Defect::Values, Defect::Nonfinite, Defect::Zeros, Defect::Unwritten];
        let sides = [Side::Before, Side::After];
        let written = serde_json::to_string(&(kinds, reasons, sides)).unwrap();
        assert_eq!(
            written,
            r#"[["task","unsupported","memory","ended","internal"],["values","nonfinite","zeros","unwritten"],["before","after"]]"#
        );
        let read: ([Kind; 5], [Defect; 4], [Side; 2]) = serde_json::from_str(&written).unwrap();
        assert_eq!(read, (kinds, reasons, sides));
        assert!(sides.iter().all(|side| serde_json::json!(side) == side.to_string()));
    }
}
