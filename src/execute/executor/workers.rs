//! An executor whose machines look for work in the store: a stage is announced there, and its record appears.
//!
//! Who makes a result is decided by the leases that engines have anyway, so an announcement may be lost, stale or seen by
//! many. It is withdrawn when the attempt ends; one whose run is dead is removed by whichever worker sees it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use cuda_agent_protocol::manifest::Resources;
use futures::future::BoxFuture;
use tokio::sync::Semaphore;

use super::Executor;
use super::item::{Progress, WorkFailure, WorkItem, WorkerReport};
use crate::artifact::ArtifactError;
use crate::event::RunEvent;
use crate::execute::attempt;
use crate::execute::failure::Failure;
use crate::execute::folders::file_name;
use crate::execute::job::Job;
use crate::execute::launch::Stop;
use crate::execute::publish::publish_input;
use crate::key::ProgramIdentity;
use crate::schedule::Pools;
use crate::spec::{self, Stage};
use crate::store::work::WorkName;
use crate::store::{Again, Record, StoreError, lease};

/// So many attempts are announced at a time: each one costs requests while it waits.
const ANNOUNCED: usize = 64;
/// How often it is looked whether anybody is there.
const ROLL_CALL: Duration = Duration::from_secs(20);
/// Files that no record names yet are garbage after a day: those of a stage that waits are written again.
const RENEWAL: Duration = Duration::from_secs(6 * 3600);

/// Processes elsewhere that share this store (`cuda-agent worker`).
pub struct Workers {
    name: String,
    wait: Option<Duration>,
    limits: spec::Limits,
    room: Semaphore,
}

impl Workers {
    /// The workers of this executor.
    pub fn new(name: &str, of: &spec::Executor) -> Self {
        let room = Semaphore::new(ANNOUNCED);
        Self { name: name.to_owned(), wait: of.wait(), limits: of.resources.clone(), room }
    }

    async fn announced(&self, job: &mut Job) -> Result<Record, Failure> {
        let store = job.context.store.clone();
        if store.is_read_only() || store.is_offline() {
            let message =
                format!("executor `{}` shares work through the store, which is not written to now", self.name);
            return Err(Failure::permanent(message).with_hint("leave out --read-only and --offline"));
        }
        let _room = self.room.acquire().await.expect("it is never closed");
        if job.stage().kind.by_row.is_some() {
            let (stage, attempt, reasons) = (job.stage().name.clone(), job.attempt, job.reasons.clone());
            job.emit(RunEvent::StageStarted { stage, attempt, reasons, rows: None });
        }
        share_inputs(job).await?;
        let name = WorkName { key: job.resolved.key, run: job.context.run.clone(), attempt: job.attempt };
        self.announce(job, &name).await?;
        let outcome = self.watch(job, &name).await;
        // One that cannot be withdrawn is removed by a worker, when this run has ended.
        let _ = store.end_work(&self.name, &name).await;
        outcome
    }

    async fn announce(&self, job: &Job, name: &WorkName) -> Result<(), StoreError> {
        let item = serde_json::to_vec(&WorkItem::of(job)).expect("a work item is plain data");
        job.context.store.put_work(&self.name, name, item.into()).await
    }

    /// Waits for the record, or for a failure.
    async fn watch(&self, job: &mut Job, name: &WorkName) -> Result<Record, Failure> {
        let store = job.context.store.clone();
        let (mut seen, mut renewed) = (Seen::default(), Instant::now());
        loop {
            tokio::time::sleep(store.lease_poll_interval()).await;
            store.forget_absence(&name.key);
            // A store that is away for a while changes nothing.
            if let Ok((generation, Some(record))) = store.newest(&name.key).await
                && generation > job.generation
                && record.preimage == job.resolved.preimage
            {
                copy_log(job, &record.run).await;
                return Ok(record);
            }
            if let Ok(Some(bytes)) = store.work_failure(&self.name, name).await
                && let Ok(failure) = serde_json::from_slice::<WorkFailure>(&bytes)
            {
                copy_log(job, &failure.run).await;
                return Err(failure.failure());
            }
            if renewed.elapsed() > RENEWAL && share_inputs(job).await.is_ok() {
                renewed = Instant::now();
            }
            if let Ok(Some(by)) = store.leased_by(&lease::of_key(&name.key), &job.context.claimant.observer).await
                && seen.holders.insert(by.run.clone())
            {
                job.message("info", format!("run {} on {} executes it", by.run, by.host));
            }
            self.call_the_roll(job, name, &mut seen).await?;
        }
    }

    /// Passes on what workers say of this stage, and says that there are none.
    async fn call_the_roll(&self, job: &mut Job, name: &WorkName, seen: &mut Seen) -> Result<(), Failure> {
        if seen.called.is_some_and(|last| last.elapsed() < ROLL_CALL) {
            return Ok(());
        }
        // A worker removed it while this run was silent for so long that it counted as dead: a laptop that slept.
        if seen.called.replace(Instant::now()).is_some()
            && let Ok(None) = job.context.store.work_item(&self.name, name).await
        {
            let _ = self.announce(job, name).await;
        }
        let Ok(workers) = living(job, &self.name).await else { return Ok(()) };
        for worker in &workers {
            if let Some(why) = worker.left.get(&name.key)
                && seen.refusals.insert((worker.holder.run.clone(), why.clone()))
            {
                job.message("warning", format!("the worker on {} leaves it: {why}", worker.holder.host));
            }
        }
        // Several share the rows of a stage, and each of them counts those that it knows to be done.
        let furthest = workers.iter().filter_map(|worker| worker.progress.get(&name.key)).max_by_key(|one| one.done);
        if let Some(Progress { done, total, unit }) = furthest.filter(|one| Some(one.done) > seen.done).cloned() {
            seen.done = Some(done);
            job.emit(RunEvent::StageProgress { stage: job.stage().name.clone(), done, total, unit });
        }
        if workers.iter().any(|worker| !worker.left.contains_key(&name.key)) {
            (seen.alone_since, seen.is_told) = (None, false);
            return Ok(());
        }
        let since = *seen.alone_since.get_or_insert_with(Instant::now);
        let hint = format!("start one that shares this store: `cuda-agent worker {}`", self.name);
        if self.wait.is_some_and(|wait| since.elapsed() >= wait) {
            let message = format!("no worker of executor `{}` takes it", self.name);
            return Err(Failure::permanent(message).with_hint(hint));
        }
        if !std::mem::replace(&mut seen.is_told, true) {
            job.message("info", format!("no worker of executor `{}` takes it yet; {hint}", self.name));
        }
        Ok(())
    }
}

/// What was seen and said while an attempt waits.
#[derive(Default)]
struct Seen {
    holders: BTreeSet<String>,
    refusals: BTreeSet<(String, String)>,
    done: Option<u64>,
    called: Option<Instant>,
    alone_since: Option<Instant>,
    is_told: bool,
}

/// Reports of workers that live, as far as it can be seen from here.
async fn living(job: &Job, executor: &str) -> Result<Vec<WorkerReport>, StoreError> {
    let reports = job.context.store.workers(executor).await?;
    let reports = reports.iter().filter_map(|(_, bytes)| WorkerReport::read(bytes));
    let lives = |report: &WorkerReport| {
        let observer = &job.context.claimant.observer;
        !report.holder.is_gone() && !observer.is_silent(&report.holder.run, report.heartbeat_at)
    };
    Ok(reports.filter(lives).collect())
}

/// Sees to it that workers find what the stage reads: files of this machine, too.
async fn share_inputs(job: &Job) -> Result<(), Failure> {
    let store = &job.context.store;
    for (port, inputs) in &job.resolved.inputs {
        for (number, input) in inputs.iter().enumerate() {
            if input.outside.is_some() {
                let copy = job.attempt_folder().join("shared").join(format!("{port}-{number}"));
                let above = copy.parent().expect("a copy has a folder");
                std::fs::create_dir_all(above).map_err(ArtifactError::io(above))?;
                attempt::place(store, input, &copy).await?;
                if !publish_input(store, &input.artifact, &copy).await? {
                    let message = format!("input `{port}` changed after it was read, so the stage was not announced");
                    return Err(Failure::retryable(message).with_hint("run again once nobody writes to it"));
                }
            }
            store.share_artifact(&input.artifact).await?;
        }
    }
    let ProgramIdentity::Command { files, .. } = &job.resolved.preimage.program else { return Ok(()) };
    for (name, real) in &job.command_files {
        let bytes = std::fs::read(real).map_err(ArtifactError::io(real))?;
        let digest = crate::digest::Digest::of_bytes(&bytes);
        if files.get(name) != Some(&digest) {
            let message = format!("`{name}` was edited after the run had read it, so the stage was not announced");
            return Err(Failure::permanent(message).with_hint("run again"));
        }
        store.put_blob(&digest, bytes.into(), Again::No).await?;
        store.share_file(&digest).await?;
    }
    Ok(())
}

/// What a worker's program printed is this run's log of the stage, too.
async fn copy_log(job: &Job, run: &str) {
    let name = format!("{}.log", file_name(&job.stage().name));
    if let Ok(Some(bytes)) = job.context.store.log(run, &name).await {
        let mut log = job.log.lock().expect("no panic happens under this lock");
        log.write(&bytes);
    }
}

impl Executor for Workers {
    /// Workers know what their machines can do side by side.
    fn need(&self, _: &Stage) -> Resources {
        Resources { cpu: 0, memory: 0, gpu: 0 }
    }

    fn lack(&self, stage: &Stage) -> Option<Failure> {
        let need = stage.resources.clone();
        let most = Pools {
            cpus: self.limits.cpu.unwrap_or(u32::MAX),
            memory: self.limits.memory.unwrap_or(u64::MAX),
            gpus: (0..self.limits.gpu.unwrap_or(need.gpu)).collect(),
        };
        let lack = most.lack(&need.on(most.cpus, most.gpus.len()))?;
        let hint = format!(
            "lower `resources:` of the stage, or raise those of executor `{}` in cuda-agent.yaml where its machines have more",
            self.name
        );
        Some(Failure::permanent(format!("needs {lack} on executor `{}`", self.name)).with_hint(hint))
    }

    fn execute<'j>(&'j self, job: &'j mut Job) -> BoxFuture<'j, Result<Record, Failure>> {
        Box::pin(async move {
            let (mut stop, store) = (job.stop.clone(), job.context.store.clone());
            let name = WorkName { key: job.resolved.key, run: job.context.run.clone(), attempt: job.attempt };
            let folder = job.attempt_folder();
            let outcome = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop != Stop::Go) => Err(Failure::Cancelled),
                outcome = self.announced(job) => outcome,
            };
            if outcome == Err(Failure::Cancelled) {
                let _ = store.end_work(&self.name, &name).await;
            }
            let _ = std::fs::remove_dir_all(folder);
            outcome.map_err(|failure| job.without_secrets(failure))
        })
    }
}
