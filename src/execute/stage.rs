//! One attempt at one stage: chooses how it is executed, and clears up after it.

use std::path::Path;

use super::attempt::output_path;
use super::failure::Failure;
use super::folders::TEMPORARY;
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
        clear(job, &folder, &record.outputs);
        // The state folder goes too, unless the program left a checkpoint in it.
        if job.stage().command.is_none() {
            let _ = std::fs::remove_dir(job.state_folder());
        }
    }
    outcome
}

/// Gives the folder of a finished attempt to the next one. One that can't serve stays until the run ends if it holds no copies
/// of inputs, no temporary files and no large outputs: ext4 looks for a place for a new file ever longer while others are
/// being removed, so a pipeline of many small stages is twice as fast when it removes at its end.
fn clear(job: &Job, folder: &Path, outputs: &Outputs) {
    const SMALL: u64 = 64 * 1024;
    // Small files were not moved but copied, several into one blob.
    for (port, declared) in &job.stage().kind.outputs {
        let _ = std::fs::remove_file(folder.join(output_path(port, declared.port_type)));
    }
    let is_empty = |name: &str| std::fs::read_dir(folder.join(name)).map_or(true, |mut items| items.next().is_none());
    let can_wait =
        || outputs.values().map(|output| output.size).sum::<u64>() < SMALL && is_empty("inputs") && is_empty(TEMPORARY);
    if !job.context.spare.give(folder) && !can_wait() {
        let _ = std::fs::remove_dir_all(folder);
    }
}
