//! One attempt at one stage: prepare, run its program (or programs, by row), publish, record.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use cuda_agent_protocol::{Event, ProgramError, RowStatus};
use tokio::sync::mpsc;

use super::launch::{Channels, EVENTS, Exit, Stop};
use super::publish::{PublishError, publish};
use super::{Failure, Job, attempt, by_row, checkpoint, program};
use crate::event::RunEvent;
use crate::interpreter;
use crate::plan::Outputs;
use crate::spec::Command;
use crate::store::lease::{self, Asked};
use crate::store::{Again, Record, RowCounts};

/// Executes a stage and publishes its outputs.
pub async fn execute(job: &mut Job) -> Result<Record, Failure> {
    let folder = job.attempt_folder();
    let outcome = match job.stage().kind.by_row.is_some() {
        true => by_row::execute(job, &folder).await,
        false => whole(job, &folder).await,
    };
    let outcome = outcome.map_err(|failure| job.without_secrets(failure));
    // What a program was about to publish may hold its secrets.
    if outcome.is_err() && !job.secrets.is_empty() {
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

/// Claims the making of a stage's result. Where another run has it, or has just made it, the stage is looked up again later.
async fn claim(job: &mut Job) -> Result<(), Failure> {
    let (name, context) = (lease::of_key(&job.resolved.key), job.context.clone());
    match context.store.lease(&name, &context.claimant).await {
        Ok(Asked::Granted(lease)) => job.leases.push(lease),
        Ok(Asked::Taken(by)) => {
            job.say("info".into(), format!("run {} on {} is making this; waiting for it", by.run, by.host));
            return Err(Failure::made_by_others(vec![name]));
        }
        // Leases only avoid double work.
        Err(_) => return Ok(()),
    }
    if let Some(far) = context.store.far() {
        far.set_absent(&job.resolved.key, false);
    }
    match context.store.newest(&job.resolved.key).await {
        Ok((generation, Some(_))) if generation > job.generation => Err(Failure::made_by_others(Vec::new())),
        _ => Ok(()),
    }
}

async fn whole(job: &mut Job, folder: &Path) -> Result<Record, Failure> {
    claim(job).await?;
    checkpoint::begin(job).await;
    let started = Instant::now();
    let grant = job.grant.clone().expect("a stage starts with a grant");
    let deadline = job.stage().timeout;
    let attempt = attempt::prepare(job, folder, &grant, None, deadline.map(unix_deadline)).await?;
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
                return Err(timed_out(deadline.unwrap_or_default()));
            }
            exit = &mut running => break exit,
            Some(event) = heard.recv() => notice(job, event, &mut metrics),
        }
    };
    while let Ok(event) = heard.try_recv() {
        notice(job, event, &mut metrics);
    }
    let checked = check_exit(job, folder, &exit);
    // Also where it failed: what it reached is not lost. Nobody who interrupts a run waits for that.
    if *job.stop.borrow() == Stop::Go {
        checkpoint::end(job, checked.is_ok()).await;
    }
    checked?;
    let outputs = publish_outputs(job, folder, true).await?;
    let record = record(job, outputs, started.elapsed(), None, metrics).await?;
    checkpoint::forget(job).await;
    Ok(record)
}

/// A deadline as programs are told it.
pub fn unix_deadline(timeout: Duration) -> f64 {
    crate::now() + timeout.as_secs_f64()
}

/// What a stage fails with when its time is up.
pub fn timed_out(limit: Duration) -> Failure {
    Failure::new(format!("timed out after {}", super::seconds(limit)))
        .with_hint("raise `timeout:` of the stage, or look at its log for what it was doing")
}

/// Passes on what a program says, but for answers to rows.
pub fn notice(job: &mut Job, event: Result<Event, String>, metrics: &mut BTreeMap<String, f64>) {
    let stage = job.stage().name.clone();
    match event {
        Ok(Event::Progress { done, total, unit }) => {
            let unit = job.redact(&unit);
            job.progress(done, total, &unit);
        }
        Ok(Event::Metric { name, step, value }) => {
            let name = job.redact(&name);
            metrics.insert(name.clone(), value);
            job.tell(RunEvent::Metric { stage, name, step, value });
        }
        Ok(Event::Log { level, message }) => {
            let (level, message) = (job.redact(&level), job.redact(&message));
            job.log.lock().expect("no panic happens under this lock").note(&format!("{level}: {message}"));
            job.say(level, message);
        }
        Ok(Event::Checkpoint { path, order }) => checkpoint::told(job, path, order),
        Ok(Event::Row(row)) => {
            let message = format!("it answered a row ({}), but it is not by-row", status(row.status));
            job.say("warning".into(), message);
        }
        Err(error) => {
            let message = format!("a line of its events is not an event: {}", job.redact(&error));
            job.say("warning".into(), message);
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

/// Success, or the failure that the program explained or that its exit tells.
pub fn check_exit(job: &Job, folder: &Path, exit: &Exit) -> Result<(), Failure> {
    if *exit == Exit::Success {
        return Ok(());
    }
    if *job.stop.borrow() != Stop::Go {
        return Err(Failure::cancelled());
    }
    if let Some(error) = explained(folder) {
        return Err(error);
    }
    let failure = Failure::new(described(exit));
    Err(match undeclared_file(job) {
        Some(file) => failure.with_hint(format!(
            "a command sees only the files that it declares; if it needs `{file}`, add `files: [{file}]` to the stage"
        )),
        None => failure,
    })
}

/// A word of a command that is a file beside the pipeline, but not one that was declared.
fn undeclared_file(job: &Job) -> Option<String> {
    let text = match job.stage().command.as_ref()? {
        Command::Shell(text) => text.clone(),
        Command::Words(words) => words.join(" "),
    };
    let words = text.split(|c: char| c.is_whitespace() || "'\"<>;|&()".contains(c)).filter(|word| !word.is_empty());
    let declared =
        |word: &str| job.command_files.iter().any(|(name, _)| name == word || name.starts_with(&format!("{word}/")));
    let folder = &job.context.pipeline.folder;
    words
        .filter(|word| !word.starts_with(['/', '-', '.']) && !declared(word))
        .find(|word| folder.join(word).exists())
        .map(str::to_owned)
}

/// What a program left in `error.json`.
pub fn explained(folder: &Path) -> Option<Failure> {
    const LONGEST: u64 = 1 << 20;
    let file = folder.join("error.json");
    // A FIFO in its place would be read for ever.
    let is_plain = std::fs::metadata(&file).is_ok_and(|metadata| metadata.is_file() && metadata.len() <= LONGEST);
    let error: ProgramError = is_plain.then(|| serde_json::from_slice(&std::fs::read(&file).ok()?).ok())??;
    Some(Failure { permanent: error.is_permanent(), hint: error.hint, ..Failure::new(error.message) })
}

/// An exit in words.
pub fn described(exit: &Exit) -> String {
    match exit {
        Exit::Success => "ended well".into(),
        Exit::Code(super::supervise::CANNOT_START) => "the command could not be started (exit status 127)".into(),
        Exit::Code(code) => format!("exit status {code}"),
        Exit::Signal(number) => match nix::sys::signal::Signal::try_from(*number) {
            Ok(nix::sys::signal::Signal::SIGKILL) => "killed by SIGKILL (out of memory?)".into(),
            Ok(signal) => format!("killed by {signal}"),
            Err(_) => format!("killed by signal {number}"),
        },
        Exit::NotStarted(message) => format!("could not be started: {message}"),
    }
}

/// Publishes every output that the program left in its folder.
pub async fn publish_outputs(job: &Job, folder: &Path, closed: bool) -> Result<Outputs, Failure> {
    program::check(job)?;
    for (port, inputs) in &job.resolved.inputs {
        for input in inputs {
            if input.is_unchanged().await {
                continue;
            }
            let path = input.outside.as_ref().map(|outside| outside.path.display().to_string()).unwrap_or_default();
            return Err(Failure::new(format!(
                "input `{port}` changed while the stage ran ({path}), so nothing was published"
            ))
            .with_hint("run again once nobody writes to it"));
        }
    }
    let mut outputs = Outputs::new();
    for (port, declared) in &job.stage().kind.outputs {
        let path = folder.join("outputs").join(attempt::artifact_name(port, declared.port_type));
        let redactor = super::log::Redactor::new(&job.secret_values());
        // Where something was missing or damaged, or is made again on demand, what is there is not trusted.
        let again = if job.generation > 0 { Again::Yes } else { Again::No };
        let artifact = publish(&job.context.store, port, declared, closed, &path, &redactor, again).await;
        outputs.insert(
            port.clone(),
            artifact.map_err(|error| match error {
                PublishError::Store(error) => Failure::from(error),
                other => Failure::new(other.to_string()),
            })?,
        );
    }
    Ok(outputs)
}

/// Writes the record. Where another run was faster, its outputs are taken.
pub async fn record(
    job: &Job,
    outputs: Outputs,
    duration: Duration,
    rows: Option<RowCounts>,
    metrics: BTreeMap<String, f64>,
) -> Result<Record, Failure> {
    if *job.stop.borrow() == Stop::Kill {
        return Err(Failure::cancelled());
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
