//! What an attempt has of its stage's state folder; `checkpoint.rs` says what is done with it.

use std::fs::File;
use std::time::Instant;

use tokio::task::JoinHandle;

use crate::store::Checkpoint;

/// What an attempt has of its stage's state.
#[derive(Default)]
pub struct CheckpointState {
    /// The folder that values of the parameter share, while this attempt has it.
    pub(super) folder: Option<File>,
    /// Reported by the program and not sent yet.
    pub(super) offered: Option<Offer>,
    pub(super) sending: Option<JoinHandle<Result<Option<Checkpoint>, String>>>,
    pub(super) sent_at: Option<Instant>,
}

/// A checkpoint that a program reported.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    pub(super) path: String,
    pub(super) order: u64,
}

impl CheckpointState {
    /// Whether the attempt has the folder that values share.
    pub fn is_shared(&self) -> bool {
        self.folder.is_some()
    }
}
