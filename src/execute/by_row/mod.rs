//! Executing a by-row stage: only rows without a result are done, each program is fed one row after another, and every
//! answer is kept as it comes. Several engines share the rows of a stage: each claims parts of them by leases.
//!
//! A row whose program died or took too long is suspect: it is tried once more alone in a program. If that dies too, the row
//! is condemned, but rejected only once a program has answered some row that is known to be good: a machine that
//! lost its GPU kills programs on every row, and must not fill the store with rejections. What the program itself
//! reports as `failed` is never kept.

mod answers;
mod claims;
mod driver;
mod programs;
mod suspects;
mod todo;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use cuda_agent_protocol::{RowResult, RowStatus};

use super::failure::{Explanation, Failure};
use super::job::Job;
use super::{attempt, commit};
use crate::artifact::ArtifactError;
use crate::digest::Digest;
use crate::event::RunEvent;
use crate::rows::assembly::{Results, check_columns};
use crate::rows::index::RowError;
use crate::rows::{InputRows, RowIndex, SegmentSchema, journal, segment};
use crate::store::{Record, RowCounts, Store};
use claims::{Claims, Filing, Wanted};
use driver::Driver;

/// Bytes of waiting answers from which on they are published.
const FLUSH_BYTES: usize = 4 * 1024 * 1024;

/// Executes a by-row stage.
pub async fn execute(job: &mut Job, folder: &Path) -> Result<Record, Failure> {
    let started = Instant::now();
    let rows = read_rows(job, folder).await?;
    let schema = Arc::new(SegmentSchema::new(&job.stage().kind));
    check_columns(&rows.schema, &schema).map_err(|error| {
        Failure::permanent(error.to_string())
            .with_hint("give that column of the input another name, or leave it out of the table")
    })?;
    let base = job.resolved.base.expect("by-row stages have a base key");
    let cache = job.context.folders.cache.join("rows").join(base.to_string());
    let filing = Filing { base, cache, state: job.state_folder() };
    let distinct = rows.digests.iter().collect::<HashSet<_>>().len() as u64;
    let failed = execute_missing(job, &rows, &schema, &filing, folder, distinct).await?;
    let (results, lost) = results(job, &rows, &schema, &filing).await?;
    if lost > failed {
        // They are looked for again, and done once more.
        let message = format!("{} row results are gone from the store", lost - failed);
        return Err(Failure::LookUpAgain(Vec::new(), Explanation::new(message))
            .with_hint("run again: those rows will be executed once more"));
    }
    // What this run did in earlier attempts, or before it had to wait for others, was done in this run, too.
    let pass = job.pass();
    let mut rejections = results.rejections();
    rejections.sort_by_cached_key(|(digest, _)| rows.position(digest));
    let counts = RowCounts {
        total: rows.digests.len() as u64,
        executed: pass.executed + failed,
        reused: distinct.saturating_sub(pass.executed + failed),
        rejected: rejections.len() as u64,
        failed,
    };
    report_rejections(job, &rows, &rejections);
    refuse_rejections(job, &rows, &rejections)?;
    let made = folder.to_owned();
    let assembling = move || results.write(&rows.path, &rows.digests, &schema, &made);
    tokio::task::spawn_blocking(assembling).await.expect("assembling does not panic")?;
    let outputs = commit::publish_outputs(job, folder, false).await?;
    if let Some(record) = same_as_before(job, &outputs, &counts).await {
        return Ok(record);
    }
    commit::write_record(job, outputs, started.elapsed(), Some(counts), pass.metrics).await
}

/// Does the rows that have no result; how many of them failed from outside causes, and were allowed to.
async fn execute_missing(
    job: &mut Job,
    rows: &InputRows,
    schema: &SegmentSchema,
    filing: &Filing,
    folder: &Path,
    distinct: u64,
) -> Result<u64, Failure> {
    let store = job.context.store.clone();
    adopt_orphans(&store, filing, schema).await?;
    let index = match (RowIndex::load(&store, &filing.base, &filing.cache).await, store.without_remote()) {
        (Err(_), Some(nearby)) => RowIndex::load(&nearby, &filing.base, &filing.cache).await?,
        (index, _) => index?,
    };
    let wanted = wanted(job, &filing.base, &index);
    let mut seen = HashSet::new();
    let mut is_missing = |row: &Digest| seen.insert(*row) && !wanted.is_there(&index, row);
    let todo: Vec<usize> = (0..rows.digests.len()).filter(|row| is_missing(&rows.digests[*row])).collect();
    let total = todo.len() as u64;
    let counts = RowCounts { total: rows.digests.len() as u64, executed: total, ..RowCounts::default() };
    job.emit(RunEvent::StageStarted {
        stage: job.stage().name.clone(),
        attempt: job.attempt,
        reasons: job.reasons.clone(),
        rows: Some(RowCounts { reused: distinct - total, ..counts }),
    });
    if todo.is_empty() {
        return Ok(0);
    }
    let claims = Claims::new(filing.clone(), wanted, index, todo, &rows.digests, &job.context.run);
    let driver = Driver::new(job, rows, schema, (filing.base, wanted.epoch), (claims, total), folder.to_owned())?;
    let (done, outcome) = driver.run().await?;
    job.update_pass(|pass| {
        pass.executed += done.executed;
        pass.metrics.extend(done.metrics);
    });
    outcome?;
    refuse_failed_rows(job, rows, &done.failed)?;
    if !done.foreign.is_empty() {
        job.message("info", "others are doing the remaining rows; waiting for them");
        return Err(Failure::made_by_others(done.foreign));
    }
    Ok(done.failed.len() as u64)
}

/// Which results count as there. A refresh does every row again, once, and its results win over those that were there.
fn wanted(job: &Job, base: &Digest, index: &RowIndex) -> Wanted {
    let mut refreshes = job.context.refreshes.lock().expect("no panic happens under this lock");
    let refresh = job.is_refresh();
    let epoch = match refresh {
        true => *refreshes.entry(*base).or_insert(index.epoch() + 1),
        false => index.epoch(),
    };
    Wanted { epoch, refresh, sample: job.context.sample }
}

/// The results of a stage's rows, and how many distinct rows have none.
async fn results(
    job: &Job,
    rows: &InputRows,
    schema: &SegmentSchema,
    filing: &Filing,
) -> Result<(Results, u64), RowError> {
    let mut store = job.context.store.clone();
    let mut index = match (RowIndex::load(&store, &filing.base, &filing.cache).await, store.without_remote()) {
        // All that is needed is here by now, should the remote tier be away.
        (Err(_), Some(nearby)) => {
            store = nearby;
            RowIndex::load(&store, &filing.base, &filing.cache).await?
        }
        (index, _) => index?,
    };
    let mut results = Results::load(&store, &filing.base, &index, &rows.digests, schema).await?;
    if results.misled {
        let _ = std::fs::remove_file(&filing.cache);
        index = RowIndex::load(&store, &filing.base, &filing.cache).await?;
        results = Results::load(&store, &filing.base, &index, &rows.digests, schema).await?;
    }
    let lost = results.missing(&rows.digests).into_iter().collect::<HashSet<_>>().len() as u64;
    Ok((results, lost))
}

/// The record that is there, where another try of rows that had failed brought nothing new.
async fn same_as_before(job: &Job, outputs: &crate::plan::Outputs, counts: &RowCounts) -> Option<Record> {
    if counts.failed == 0 || job.generation == 0 || job.is_refresh() {
        return None;
    }
    let (generation, record) = job.context.store.newest(&job.resolved.key).await.ok()?;
    let is_same = |record: &Record| {
        let failed = record.rows.map(|rows| rows.failed);
        generation == job.generation && record.outputs == *outputs && failed == Some(counts.failed)
    };
    record.filter(is_same)
}

async fn read_rows(job: &Job, folder: &Path) -> Result<InputRows, Failure> {
    let by_row = job.stage().kind.by_row.as_ref().expect("only by-row stages come here");
    let input = &job.resolved.inputs[&by_row.port][0];
    std::fs::create_dir_all(folder).map_err(ArtifactError::io(folder))?;
    let path = folder.join("rows.parquet");
    attempt::place(&job.context.store, input, &path).await?;
    let names: Vec<String> = job.stage().kind.inputs[&by_row.port].columns.keys().cloned().collect();
    let read = tokio::task::spawn_blocking(move || InputRows::read(&path, &names));
    Ok(read.await.expect("reading a table does not panic")?)
}

/// Publishes what engines that were killed had finished.
async fn adopt_orphans(store: &Store, filing: &Filing, schema: &SegmentSchema) -> Result<(), RowError> {
    let _alone = journal::adopting(&filing.state).await;
    for orphan in journal::orphans(&filing.state, store.url()) {
        for answers in orphan.batches(FLUSH_BYTES) {
            let kept: Vec<RowResult> = latest(answers.into_iter().filter(|answer| schema.check(answer).is_ok()));
            if !kept.is_empty() {
                store.put_segment(&filing.base, orphan.epoch, segment::encode(&schema.batch(&kept)?)?).await?;
            }
        }
        orphan.remove();
    }
    Ok(())
}

/// One answer a row.
fn latest(results: impl Iterator<Item = RowResult>) -> Vec<RowResult> {
    let by_row: BTreeMap<String, RowResult> = results.map(|result| (result.row.clone(), result)).collect();
    by_row.into_values().filter(|result| result.status != RowStatus::Failed).collect()
}

fn name_rejection(rows: &InputRows, (digest, why): &(Digest, String)) -> String {
    format!("{} is rejected: {why}", rows.named_by(&digest.to_string()))
}

/// Which rows are at fault, and why: in the log, and the first few as messages.
fn report_rejections(job: &mut Job, rows: &InputRows, rejections: &[(Digest, String)]) {
    const LOGGED: usize = 1000;
    const SHOWN: usize = 3;
    for (number, rejection) in rejections.iter().take(LOGGED).enumerate() {
        let message = job.redact(&name_rejection(rows, rejection));
        job.log.lock().expect("no panic happens under this lock").note(&message);
        if number < SHOWN {
            job.message("warning", message);
        }
    }
    if rejections.len() > SHOWN {
        let stage = job.stage().name.clone();
        let more = rejections.len() - SHOWN;
        job.message("warning", format!("and {more} more: cuda-agent show '{stage}' --rejected"));
    }
}

fn refuse_rejections(job: &Job, rows: &InputRows, rejections: &[(Digest, String)]) -> Result<(), Failure> {
    let Some(most) = job.stage().max_rejected.filter(|most| rejections.len() as u64 > *most) else { return Ok(()) };
    let first = name_rejection(rows, &rejections[0]);
    let message = format!("{} rows are rejected, and `max_rejected` is {most} ({first})", rejections.len());
    let stage = &job.stage().name;
    Err(Failure::permanent(message).with_hint(format!(
        "`cuda-agent show '{stage}' --rejected` lists them; mend the rows or the program, or raise `max_rejected:`"
    )))
}

fn refuse_failed_rows(job: &Job, rows: &InputRows, failed: &[RowResult]) -> Result<(), Failure> {
    if failed.len() as u64 <= job.stage().allow_failed_rows {
        return Ok(());
    }
    let first = failed.first().map(|result| {
        let reason = result.reason.clone().unwrap_or_else(|| "no reason given".into());
        let why = result.detail.as_ref().map_or(reason.clone(), |detail| format!("{reason}: {detail}"));
        format!("{}: {why}", rows.named_by(&result.row))
    });
    let message = format!("{} rows failed from outside causes ({})", failed.len(), first.unwrap_or_default());
    Err(Failure::retryable(message).with_hint(
        "run again to try just these rows; `allow_failed_rows:` lets the stage pass without some of its rows",
    ))
}
