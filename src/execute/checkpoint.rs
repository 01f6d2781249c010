//! What a stage that has checkpoints goes on from: its state folder, and checkpoints in the store.
//!
//! Values of a parameter that continues share one state folder, by the base key. One attempt at a time has it; another one
//! that runs beside it works in a folder of its own and starts from the store or from nothing. Where no parameter continues,
//! the base key is the key: the same work alone has the folder, as with any stage. Checkpoints that a program reports
//! are sent while it goes on, at most one every few minutes and the last one at its end, so that a machine that is lost
//! takes only those minutes with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::checkpoint_state::Offer;
use super::job::Job;
use super::launch::Stop;
use crate::artifact::tree::is_harmless;
use crate::schedule;
use crate::store::Checkpoint;
use crate::store::checkpoint::PARTIAL;

/// The least time from one checkpoint that is sent to the next, in seconds; the environment variable names another.
const EVERY_S: u64 = 300;
const EVERY: &str = "CUDA_AGENT_CHECKPOINT_EVERY_S";
/// In the state folder, the order of the last checkpoint that was reported or fetched.
const NEWEST: &str = ".newest-checkpoint";
/// In the state folder, how the names of folders start that hold a checkpoint while it is sent.
const SENDING: &str = ".sending-";

/// Locks the state folder that values share, unless another attempt has it, and fetches a later checkpoint of the store.
pub async fn begin(job: &mut Job) {
    let (Some(base), Some(most)) = (job.resolved.base, most(job)) else { return };
    let folder = job.context.folders.state.join(base.to_string());
    let opened = fs::create_dir_all(&folder).and_then(|()| File::open(&folder));
    match opened.ok().filter(|file| file.try_lock().is_ok()) {
        Some(locked) => {
            job.checkpoints.folder = Some(locked);
            sweep(&folder);
        }
        // The same work is on its way in that folder, or folders can't be locked: nothing may be put into it.
        None if base == job.resolved.key => return,
        // One of its own is safe.
        None => {
            let message = "a stage that differs in how far it goes is at work here; this one does not go on from it";
            job.message("info", message);
        }
    }
    if !shares(job) {
        return;
    }
    let state = job.state_folder();
    if let Err(error) = fs::create_dir_all(&state) {
        return job.message("warning", format!("{}: {error}", state.display()));
    }
    let here = newest(&state);
    // What is here goes further than wanted: an earlier one may be among what is here.
    if here.is_some_and(|here| here >= most) {
        return;
    }
    let mut stop = job.stop.clone();
    let store = job.context.store.clone();
    let fetched = tokio::select! {
        biased;
        _ = stop.wait_for(|stop| *stop != Stop::Go) => return,
        fetched = store.fetch_checkpoint(&base, here, most, &state) => fetched,
    };
    match fetched {
        Ok(None) => {}
        Ok(Some(checkpoint)) => {
            note(&state, checkpoint.order);
            let size = schedule::bytes(checkpoint.size());
            let (order, run) = (checkpoint.order, checkpoint.run);
            job.message("info", format!("goes on from the checkpoint {order} of run {run} ({size})"));
        }
        Err(error) => job.message("warning", format!("checkpoints of other machines can't be had: {error}")),
    }
}

/// Notes a checkpoint that the program reported, and sends it where it is time to.
pub fn offer(job: &mut Job, path: String, order: u64) {
    let wrong = |why: String| format!("a checkpoint that it told of is not shared: {why}");
    if most(job).is_none() {
        let kind = &job.stage().kind.name;
        return job.message("warning", wrong(format!("{kind} does not say `checkpoints: true`")));
    }
    if path.is_empty() || !is_harmless(&path) || !job.state_folder().join(&path).is_dir() {
        return job.message("warning", wrong(format!("{path:?} is no folder in the state folder")));
    }
    note(&job.state_folder(), order);
    job.checkpoints.offered = Some(Offer { path, order });
    if job.checkpoints.sending.as_ref().is_some_and(JoinHandle::is_finished) {
        // Its end is looked at with the last one.
        job.checkpoints.sending = None;
    }
    let due = job.checkpoints.sent_at.is_none_or(|at| at.elapsed() >= every());
    if due && job.checkpoints.sending.is_none() {
        send(job);
    }
}

/// Whether nobody goes on from its checkpoints once it has a result, since only the same work could.
fn ends_with_the_result(job: &Job) -> bool {
    job.resolved.base == Some(job.resolved.key) && most(job).is_some()
}

/// Sends the checkpoint that was reported last, once nothing writes to it any more, unless the stage `succeeded` and its
/// result makes it useless. An error is a warning only: the result does not need it.
pub async fn end(job: &mut Job, succeeded: bool) {
    if let Some(sending) = job.checkpoints.sending.take() {
        report(job, sending.await);
    }
    if job.checkpoints.offered.is_some() && !(succeeded && ends_with_the_result(job)) {
        send(job);
        if let Some(sending) = job.checkpoints.sending.take() {
            report(job, sending.await);
        }
    }
}

/// Deletes the checkpoints that the result has made useless. Where that fails, gc deletes them later.
pub async fn forget(job: &mut Job) {
    if !ends_with_the_result(job) || !shares(job) {
        return;
    }
    if let Err(error) = job.context.store.forget_checkpoints(&job.resolved.key).await {
        job.message("debug", format!("its checkpoints stay in the store: {error}"));
    }
}

/// Removes what an engine that was killed left half sent or half fetched.
fn sweep(state: &Path) {
    for item in fs::read_dir(state).into_iter().flatten().flatten() {
        let name = item.file_name();
        if name.to_str().is_some_and(|name| name.starts_with(SENDING) || name.starts_with(PARTIAL)) {
            let _ = fs::remove_dir_all(item.path());
        }
    }
}

fn report(job: &mut Job, ended: Result<Result<Option<Checkpoint>, String>, tokio::task::JoinError>) {
    match ended {
        Ok(Ok(None)) => {}
        Ok(Ok(Some(checkpoint))) => {
            let size = schedule::bytes(checkpoint.size());
            job.message("debug", format!("shared the checkpoint {} ({size})", checkpoint.order));
        }
        Ok(Err(message)) => job.message("warning", format!("a checkpoint stays on this machine: {message}")),
        Err(error) => job.message("warning", format!("a checkpoint stays on this machine: {error}")),
    }
}

/// Starts to send what was offered.
fn send(job: &mut Job) {
    let Some(Offer { path, order }) = job.checkpoints.offered.take() else { return };
    let (Some(base), true) = (job.resolved.base, shares(job)) else { return };
    let state = job.state_folder();
    let (store, run) = (job.context.store.clone(), job.context.run.clone());
    job.checkpoints.sent_at = Some(Instant::now());
    // The program may remove it while it is sent.
    let held = state.join(format!("{SENDING}{}", crate::nonce()));
    job.checkpoints.sending = Some(tokio::spawn(async move {
        let from = state.join(&path);
        let to = held.join(&path);
        let linked = crate::off_loop(move || link_all(&from, &to)).await;
        let sent = match linked {
            Ok(()) => store.put_checkpoint(&base, order, (&held, &path), &run).await.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let _ = fs::remove_dir_all(&held);
        sent
    }));
}

/// The same files under another name.
fn link_all(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for item in fs::read_dir(from)? {
        let item = item?;
        let target: PathBuf = to.join(item.file_name());
        match item.file_type()?.is_dir() {
            true => link_all(&item.path(), &target)?,
            false => fs::hard_link(item.path(), target)?,
        }
    }
    Ok(())
}

/// How far a checkpoint may go that the stage goes on from, where its kind has any. Those of the same work all do.
fn most(job: &Job) -> Option<u64> {
    let stage = job.stage();
    match stage.kind.continued() {
        Some(name) => stage.params.get(name)?.as_u64(),
        None => stage.kind.has_checkpoints().then_some(u64::MAX),
    }
}

/// Whether checkpoints go to the store: not where it lies in the same folder as they do.
fn shares(job: &Job) -> bool {
    let own = job.context.folders.state.parent();
    let is_own = |folder: &Path| own.is_some_and(|own| folder.starts_with(own));
    job.context.store.has_remote() || !job.context.store.folder().is_some_and(is_own)
}

fn every() -> Duration {
    let given = std::env::var(EVERY).ok().and_then(|text| text.parse().ok());
    Duration::from_secs(given.unwrap_or(EVERY_S))
}

fn newest(state: &Path) -> Option<u64> {
    fs::read_to_string(state.join(NEWEST)).ok()?.trim().parse().ok()
}

/// Notes how far the checkpoints in the state folder go; where that fails, one is fetched that is not needed.
fn note(state: &Path, order: u64) {
    let highest = newest(state).map_or(order, |before| before.max(order));
    let _ = fs::write(state.join(NEWEST), highest.to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_keep_what_the_program_removes() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::create_dir_all(from.join("a")).unwrap();
        fs::write(from.join("a/weights"), "w").unwrap();
        link_all(&from, &to).unwrap();
        fs::remove_dir_all(&from).unwrap();
        assert_eq!(fs::read_to_string(to.join("a/weights")).unwrap(), "w");
        assert!(link_all(&from, &folder.path().join("again")).is_err(), "one that is gone is no checkpoint");
    }

    #[test]
    fn the_note_of_the_newest_never_goes_back() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(newest(folder.path()), None);
        for (order, highest) in [(3, 3), (2, 3), (5, 5)] {
            note(folder.path(), order);
            assert_eq!(newest(folder.path()), Some(highest));
        }
    }
}
