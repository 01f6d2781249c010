//! What a program reports while it runs.

use std::collections::BTreeMap;

use cuda_agent_protocol::{Event, RowStatus};

use super::checkpoint;
use super::job::Job;
use crate::event::RunEvent;

/// Passes on an event of a program, but for answers to rows.
pub fn handle(job: &mut Job, event: Result<Event, String>, metrics: &mut BTreeMap<String, f64>) {
    let stage = job.stage().name.clone();
    match event {
        Ok(Event::Progress { done, total, unit }) => {
            let unit = job.redact(&unit);
            job.reporter.progress(done, total, &unit);
        }
        Ok(Event::Metric { name, step, value }) => {
            let name = job.redact(&name);
            metrics.insert(name.clone(), value);
            job.emit(RunEvent::Metric { stage, name, step, value });
        }
        Ok(Event::Log { level, message }) => {
            let (level, message) = (job.redact(&level), job.redact(&message));
            job.log.lock().expect("no panic happens under this lock").note(&format!("{level}: {message}"));
            job.message(&level, message);
        }
        Ok(Event::Checkpoint { path, order }) => checkpoint::offer(job, path, order),
        Ok(Event::Row(row)) => {
            let message = format!("it answered a row ({}), but it is not by-row", status(row.status));
            job.message("warning", message);
        }
        Err(error) => {
            let message = format!("a line of its events is not an event: {}", job.redact(&error));
            job.message("warning", message);
        }
    }
}

fn status(status: RowStatus) -> &'static str {
    match status {
        RowStatus::Done => "done",
        RowStatus::Rejected => "rejected",
        RowStatus::Failed => "failed",
    }
}
