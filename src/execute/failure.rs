//! Why an attempt at a stage gave no result, and what follows from that.

use crate::artifact::ArtifactError;
use crate::digest::Digest;
use crate::rows::index::RowError;
use crate::store::StoreError;

/// Why an attempt gave no result. What the run does next depends on the reason alone, never on the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// May pass on another attempt, of which `retry:` of the stage says how many there are.
    Retryable(Explanation),
    /// Another attempt would fail in the same way.
    Permanent(Explanation),
    /// The run was interrupted.
    Cancelled,
    /// The store no longer has a blob that the stage reads, or has a damaged one: the stage that made it is executed once
    /// more, where there is one.
    InputLost(Digest, Explanation),
    /// Nothing failed: the stage is to be looked up again, as soon as one of these leases is free; at once where there are
    /// none. The explanation is for a stage that was looked up too often.
    LookUpAgain(Vec<String>, Explanation),
}

/// An error, as reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// What went wrong.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Explanation {
    /// One without a hint.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }
}

impl Failure {
    /// One that may pass on another attempt.
    pub fn retryable(message: impl Into<String>) -> Self {
        Self::Retryable(Explanation::new(message))
    }

    /// One that another attempt does not mend.
    pub fn permanent(message: impl Into<String>) -> Self {
        Self::Permanent(Explanation::new(message))
    }

    /// Other runs make the stage's result; it is looked up again when one of their leases is free.
    pub fn made_by_others(leases: Vec<String>) -> Self {
        Self::LookUpAgain(leases, Explanation::new("other runs are making this"))
    }

    /// The store no longer has a blob that the stage reads.
    pub fn input_lost(blob: Digest) -> Self {
        let message = format!("the store no longer has what this stage reads (blob {blob})");
        Self::InputLost(blob, Explanation::new(message))
    }

    /// Adds what to do about it.
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        let hint = Some(hint.into());
        self.map(|explanation| Explanation { hint, ..explanation })
    }

    /// The same reason, explained in another way.
    pub fn map(self, change: impl FnOnce(Explanation) -> Explanation) -> Self {
        match self {
            Self::Retryable(explanation) => Self::Retryable(change(explanation)),
            Self::Permanent(explanation) => Self::Permanent(change(explanation)),
            Self::Cancelled => Self::Cancelled,
            Self::InputLost(blob, explanation) => Self::InputLost(blob, change(explanation)),
            Self::LookUpAgain(leases, explanation) => Self::LookUpAgain(leases, change(explanation)),
        }
    }

    /// Whether another attempt is worth its time.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Retryable(_) | Self::LookUpAgain(..))
    }

    /// What is reported of it.
    pub fn explanation(self) -> Explanation {
        match self {
            Self::Cancelled => Explanation::new("interrupted"),
            Self::Retryable(explanation)
            | Self::Permanent(explanation)
            | Self::InputLost(_, explanation)
            | Self::LookUpAgain(_, explanation) => explanation,
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Retryable(Explanation { message: error.to_string(), hint: error.hint })
    }
}

impl From<ArtifactError> for Failure {
    fn from(error: ArtifactError) -> Self {
        Self::retryable(error.to_string())
    }
}

impl From<RowError> for Failure {
    fn from(error: RowError) -> Self {
        Self::retryable(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_stays_whatever_is_said_of_it() {
        let blob = Digest([7; 32]);
        let all = [
            (Failure::retryable("a"), true),
            (Failure::permanent("a"), false),
            (Failure::Cancelled, false),
            (Failure::input_lost(blob), false),
            (Failure::made_by_others(vec!["lease".into()]), true),
        ];
        for (failure, may_pass) in all {
            assert_eq!(failure.may_pass(), may_pass, "{failure:?}");
            let explained = failure.clone().with_hint("b").map(|why| Explanation { message: "c".into(), ..why });
            assert_eq!(std::mem::discriminant(&explained), std::mem::discriminant(&failure));
            let (message, hint) = if failure == Failure::Cancelled { ("interrupted", None) } else { ("c", Some("b")) };
            let expected = Explanation { message: message.into(), hint: hint.map(str::to_owned) };
            assert_eq!(explained.explanation(), expected);
        }
    }
}
