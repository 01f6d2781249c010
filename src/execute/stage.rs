//! One attempt at one stage: chooses how it is executed, and clears up after it.

use std::path::Path;

use super::failure::Failure;
use super::job::Job;
use super::{by_row, whole};
use crate::plan::Outputs;
use crate::store::Record;

/// Executes a stage and publishes its outputs.
pub async fn execute(job: &mut Job) -> Result<Record, Failure> {
    let folder = job.attempt_folder();
    let outcome = match job.stage().kind.by_row.is_some() {
        true => by_row::execute(job, &folder).await,
        false => whole::execute(job, &folder).await,
    };
    let outcome = outcome.map_err(|failure| job.without_secrets(failure));
    // What a program was about to publish may hold its secrets.
    if outcome.is_err() && !job.secrets.values.is_empty() {
        let _ = std::fs::remove_dir_all(&folder);
    }
    // The folder of a failure is kept to be looked at; the next run clears it.
    if let Ok(record) = &outcome {
        if !can_wait(&folder, &record.outputs) {
            let _ = std::fs::remove_dir_all(&folder);
        }
        // The state folder goes too, unless the program left a checkpoint in it.
        if job.stage().command.is_none() {
            let _ = std::fs::remove_dir(job.state_folder());
        }
    }
    outcome
}

/// Whether a finished attempt's folder may stay until the run ends: it holds no copies of inputs, no temporary files and
/// no large outputs. ext4 looks for a place for a new file ever longer while others are being deleted, so a pipeline of
/// many small stages is twice as fast when it deletes at its end.
fn can_wait(folder: &Path, outputs: &Outputs) -> bool {
    const SMALL: u64 = 64 * 1024;
    let empty = |name: &str| std::fs::read_dir(folder.join(name)).map_or(true, |mut items| items.next().is_none());
    outputs.values().map(|output| output.size).sum::<u64>() < SMALL && empty("inputs") && empty("tmp")
}
