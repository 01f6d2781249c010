//! How runs and their stages stand, as manifests of runs say it.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

/// How a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// It goes on, or was killed: its heartbeat says which.
    Running,
    /// Everything selected is there.
    Done,
    /// A stage failed, or what leads to one.
    Failed,
    /// Somebody ended it.
    Interrupted,
    /// Nothing was run: earlier results were taken for what stages would give now.
    Accepted,
    /// A word of a version that came after this one.
    #[serde(other)]
    Other,
}

impl RunState {
    /// The word in manifests and on screens.
    pub fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Interrupted => "interrupted",
            Self::Accepted => "accepted",
            Self::Other => "other",
        }
    }
}

/// How a stage stands in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageState {
    /// Its result was in the store.
    Hit,
    /// It was executed.
    Done,
    /// An earlier result was taken for it.
    Accepted,
    /// It gave no result.
    Failed,
    /// Something before it failed.
    Skipped,
    /// The run was ended meanwhile.
    Cancelled,
    /// Its turn never came.
    #[default]
    Waiting,
    /// It is being executed.
    Running,
    /// A word of a version that came after this one.
    #[serde(other)]
    Other,
}

impl StageState {
    /// The word in manifests and on screens.
    pub fn word(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Done => "done",
            Self::Accepted => "accepted",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
            Self::Cancelled => "cancelled",
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Other => "other",
        }
    }

    /// Whether there is a result under the stage's key.
    pub fn has_result(self) -> bool {
        matches!(self, Self::Hit | Self::Done | Self::Accepted)
    }
}

impl Display for RunState {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.pad(self.word())
    }
}

impl Display for StageState {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.pad(self.word())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Manifests of earlier versions hold these words.
    #[test]
    fn words_are_those_of_manifests() {
        use {RunState as R, StageState as S};
        let runs = [R::Running, R::Done, R::Failed, R::Interrupted, R::Accepted];
        let stages = [S::Hit, S::Done, S::Accepted, S::Failed, S::Skipped, S::Cancelled, S::Waiting, S::Running];
        let written = serde_json::to_string(&(runs, stages)).unwrap();
        assert_eq!(
            written,
            r#"[["running","done","failed","interrupted","accepted"],["hit","done","accepted","failed","skipped","cancelled","waiting","running"]]"#
        );
        assert_eq!(serde_json::from_str::<([RunState; 5], [StageState; 8])>(&written).unwrap(), (runs, stages));
        assert!(runs.iter().all(|state| serde_json::json!(state) == state.word()));
        assert!(stages.iter().all(|state| serde_json::json!(state) == state.word()));
    }

    #[test]
    fn a_word_of_a_later_version_makes_no_manifest_unreadable() {
        let read = serde_json::from_str::<(RunState, StageState)>(r#"["resting", "lent"]"#).unwrap();
        assert_eq!(read, (RunState::Other, StageState::Other));
        assert!(!read.1.has_result());
    }
}
