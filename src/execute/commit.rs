//! What a successful attempt leaves in the store: its outputs, then the record that names them.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::failure::Failure;
use super::job::Job;
use super::launch::Stop;
use super::log::Redactor;
use super::publish::{PublishError, publish};
use super::{attempt, program};
use crate::interpreter;
use crate::plan::Outputs;
use crate::store::{Again, Record, RowCounts};

/// Publishes every output that the program left in its folder.
pub async fn publish_outputs(job: &Job, folder: &Path, closed: bool) -> Result<Outputs, Failure> {
    program::check(job)?;
    for (port, inputs) in &job.resolved.inputs {
        for input in inputs {
            if input.is_unchanged().await {
                continue;
            }
            let path = input.outside.as_ref().map(|outside| outside.path.display().to_string()).unwrap_or_default();
            return Err(Failure::retryable(format!(
                "input `{port}` changed while the stage ran ({path}), so nothing was published"
            ))
            .with_hint("run again once nobody writes to it"));
        }
    }
    let mut outputs = Outputs::new();
    for (port, declared) in &job.stage().kind.outputs {
        let path = folder.join(attempt::output_path(port, declared.port_type));
        let redactor = Redactor::new(&job.secret_values());
        // Where something was missing or damaged, or is made again on demand, what is there is not trusted.
        let again = if job.generation > 0 { Again::Yes } else { Again::No };
        let artifact = publish(&job.context.store, port, declared, closed, &path, &redactor, again).await;
        let artifact = artifact.map_err(|error| match error {
            PublishError::Store(error) => Failure::from(error),
            other => Failure::retryable(other.to_string()),
        })?;
        outputs.insert(port.clone(), Box::new(artifact));
    }
    Ok(outputs)
}

/// Writes the record. Where another run was faster, its outputs are taken.
pub async fn write_record(
    job: &Job,
    outputs: Outputs,
    duration: Duration,
    rows: Option<RowCounts>,
    metrics: BTreeMap<String, f64>,
) -> Result<Record, Failure> {
    if *job.stop.borrow() == Stop::Kill {
        return Err(Failure::Cancelled);
    }
    let record = Record {
        schema: 1,
        key: job.resolved.key,
        kind: job.stage().kind.name.clone(),
        nonce: crate::nonce(),
        preimage: job.resolved.preimage.clone(),
        base: job.resolved.base,
        outputs,
        created_at: crate::now(),
        run: job.context.run.clone(),
        accepted_from: None,
        interpreter: interpreter::of_stage(job.stage(), &job.command_files, &job.context.python),
        duration_s: (duration.as_secs_f64() * 1e3).round() / 1e3,
        rows,
        metrics,
    };
    Ok(job.context.store.commit(record, job.generation).await?.record)
}
