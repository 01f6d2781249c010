//! How the jobs of a run end.

use crate::digest::Digest;
use crate::execute::failure::Failure;
use crate::execute::stage_id::StageId;
use crate::store::{Record, StoreError};

/// How a job ended: an attempt at a stage, a wait, or an upload. The run does not end before its jobs.
pub enum JobEnd {
    /// An attempt at a stage.
    Attempt(StageId, Result<Box<Record>, Failure>),
    /// The wait before another attempt is over.
    RetryDue(StageId),
    /// What other runs were making is there, or nobody makes it any more: the stage with this key is to be looked up again.
    LookUpDue(StageId, Digest),
    /// The run was interrupted while a stage waited.
    WaitStopped(StageId),
    /// What no stage waits for was sent to the shared store, or was not.
    Uploaded(Upload, Result<(), StoreError>),
}

/// What is sent to the shared store while no stage waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Upload {
    /// A result that was found on this machine.
    Result,
    /// What a stage printed.
    Log,
    /// That the run goes on.
    Heartbeat,
}

impl Upload {
    /// What users read where it failed.
    pub fn warning(self, error: &StoreError) -> String {
        match self {
            Self::Result => format!("a result of this machine could not be shared: {error}"),
            Self::Log => format!("a log could not be shared: {error}"),
            Self::Heartbeat => format!("the run could not record that it goes on: {error}"),
        }
    }
}
