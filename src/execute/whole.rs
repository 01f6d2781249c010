//! Executing a stage that one program makes as a whole: claim it, prepare, run the program, publish, record.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::failure::Failure;
use super::job::Job;
use super::launch::{Channels, EVENTS};
use super::{attempt, checkpoint, commit, events, exit};
use crate::store::Record;
use crate::store::lease::{self, Asked};

/// Claims the making of a stage's result. Where another run has it, or has just made it, the stage is looked up again later.
async fn claim(job: &mut Job) -> Result<(), Failure> {
    let (name, context) = (lease::of_key(&job.resolved.key), job.context.clone());
    match context.store.lease(&name, &context.claimant).await {
        Ok(Asked::Granted(lease)) => job.leases.push(lease),
        Ok(Asked::Taken(by)) => {
            job.message("info", format!("run {} on {} is making this; waiting for it", by.run, by.host));
            return Err(Failure::made_by_others(vec![name]));
        }
        // Leases only avoid double work.
        Err(_) => return Ok(()),
    }
    context.store.forget_absence(&job.resolved.key);
    match context.store.newest(&job.resolved.key).await {
        Ok((generation, Some(_))) if generation > job.generation => Err(Failure::made_by_others(Vec::new())),
        _ => Ok(()),
    }
}

/// Executes a stage whose program makes its outputs at once.
pub async fn execute(job: &mut Job, folder: &Path) -> Result<Record, Failure> {
    claim(job).await?;
    checkpoint::begin(job).await;
    let started = Instant::now();
    let grant = job.grants.first.clone().expect("a stage starts with a grant");
    let deadline = job.stage().timeout;
    let attempt = attempt::prepare(job, folder, &grant, None, deadline.map(exit::unix_deadline)).await?;
    let (events, mut heard) = mpsc::channel(EVENTS);
    let channels = Channels { events, rows: None, log: job.log.clone(), stop: job.stop.clone() };
    let mut running = job.context.launcher.launch(attempt.launch, channels);
    let mut metrics = BTreeMap::new();
    let timeout = tokio::time::sleep(deadline.unwrap_or(Duration::from_secs(u32::MAX.into())));
    tokio::pin!(timeout);
    let exit = loop {
        tokio::select! {
            // A program that talks without end must not be able to put off its own.
            biased;
            () = &mut timeout => {
                drop(running);
                return Err(exit::timed_out(deadline.unwrap_or_default()));
            }
            exit = &mut running => break exit,
            Some(event) = heard.recv() => events::handle(job, event, &mut metrics),
        }
    };
    while let Ok(event) = heard.try_recv() {
        events::handle(job, event, &mut metrics);
    }
    let checked = exit::check(job, folder, &exit);
    // Also where it failed: what it reached is not lost. Nobody who interrupts a run waits for that.
    if job.goes_on() {
        checkpoint::end(job, checked.is_ok()).await;
    }
    checked?;
    let outputs = commit::publish_outputs(job, folder, true).await?;
    let record = commit::write_record(job, outputs, started.elapsed(), None, metrics).await?;
    checkpoint::forget(job).await;
    Ok(record)
}
