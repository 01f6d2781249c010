//! A worker: takes stages that leaders announce in a shared store, and executes them with what this machine has.
//!
//! Each stage is a run of its own, of a pipeline with this one stage, by the same engine as any other: it claims the key or
//! parts of the rows by leases, writes heartbeats, shares checkpoints, publishes, and writes the record last. So a worker that
//! dies leaves what any killed run leaves, and another worker goes on from there.
//!
//! A worker makes only what was asked for: it computes the key anew, with its own binary, device, versions and environment,
//! and leaves the work, saying why, where the key is another one.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuda_agent_protocol::ResourceGrant;
use cuda_agent_protocol::manifest::Resources;
use futures::future::LocalBoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;

use crate::Folders;
use crate::catalog::Catalog;
use crate::digest::Digest;
use crate::event::{RunEvent, RunOutcome, Subscriber};
use crate::execute::executor::item::{Progress, SCHEMA, WorkFailure, WorkItem, WorkerReport};
use crate::execute::launch::Launcher;
use crate::execute::secrets::Secrets;
use crate::execute::{Engine, Failure, Report};
use crate::host::Host;
use crate::key::{self, ProgramIdentity};
use crate::plan::{Planner, StagePlan, Verdict};
use crate::schedule::Pools;
use crate::store::lease::{self, Holder, Observer};
use crate::store::work::WorkName;
use crate::store::{Store, StoreError};

/// How often a worker reports itself.
const HEARTBEAT: Duration = Duration::from_secs(20);
/// How long what could not be executed is left alone.
const AGAIN: Duration = Duration::from_secs(5);
/// Reports that are older than this are removed, by their own clock: their worker was killed.
const OLD_REPORT_S: f64 = 24.0 * 3600.0;

/// Gets lines for people.
pub type Notice<'n> = &'n (dyn Fn(&str) + Sync);

/// What a worker has to work with.
pub struct Worker<'a> {
    /// The executor whose work it takes.
    pub executor: String,
    /// The stage kinds of this binary and project.
    pub catalog: &'a Catalog,
    /// The store that leaders share.
    pub store: Store,
    /// This machine.
    pub host: &'a Host,
    /// Local folders.
    pub folders: Folders,
    /// Starts programs; a fake in tests.
    pub launcher: Arc<dyn Launcher>,
    /// The most CPU cores to use.
    pub jobs: Option<u32>,
    /// Ends the worker when it has had nothing to do for so long.
    pub idle: Option<Duration>,
    /// The binary's version, for people.
    pub version: String,
}

/// What a worker did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Attempts that made a result.
    pub executed: u32,
    /// Attempts that failed.
    pub failed: u32,
}

/// How work on an announced attempt ended.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// The record is there.
    Made,
    /// It failed, and the leader was told.
    Failed(String),
    /// This machine cannot make this result.
    Left(String),
    /// Somebody else makes it, or has made it; or the store is away. It is looked at again.
    NotNow,
}

/// What the loop waits for.
enum Turn {
    /// What is announced.
    Looked(Result<Announced, StoreError>),
    /// An attempt ended.
    Ended(WorkName, ResourceGrant, Outcome),
    /// The worker's report is due.
    Reported,
    /// It was written besides.
    Nothing,
}

/// What is announced to the workers of an executor.
struct Announced {
    /// All of it.
    names: HashSet<WorkName>,
    /// What is worth a try now, with what it says; a text says why it cannot be read.
    found: Vec<(WorkName, Result<WorkItem, String>)>,
}

/// An announced attempt, with what was granted to it and who hears of it.
struct Task<'t> {
    name: &'t WorkName,
    item: &'t WorkItem,
    grant: &'t ResourceGrant,
    notice: Notice<'t>,
    progress: &'t AllProgress,
}

/// How far stages are, by key.
type AllProgress = Mutex<BTreeMap<Digest, Progress>>;

type Turns<'w> = FuturesUnordered<LocalBoxFuture<'w, Turn>>;

/// A worker while it works.
struct Working<'w> {
    worker: &'w Worker<'w>,
    notice: Notice<'w>,
    report: WorkerReport,
    all: Pools,
    free: Pools,
    turns: Turns<'w>,
    /// Interrupts what is executed.
    running: HashMap<WorkName, (String, mpsc::UnboundedSender<()>)>,
    /// What this machine cannot make, or has failed at.
    over: HashSet<WorkName>,
    /// What could not be executed for now, and when it is looked at again.
    later: HashMap<WorkName, Instant>,
    observer: Arc<Observer>,
    progress: Arc<AllProgress>,
    done: Done,
    idle_since: Instant,
    is_stopping: bool,
}

impl<'a> Worker<'a> {
    /// Works until it is interrupted, or idle for long enough. `notice` gets lines for people.
    pub async fn run(
        &self,
        notice: Notice<'_>,
        mut interrupts: mpsc::UnboundedReceiver<()>,
    ) -> Result<Done, StoreError> {
        let mut working = Working::new(self, notice);
        self.remove_old_reports().await?;
        working.turns.push(Box::pin(async { Turn::Reported }));
        working.look(Duration::ZERO);
        while !working.is_over() {
            tokio::select! {
                biased;
                Some(()) = interrupts.recv() => working.interrupt(),
                Some(turn) = working.turns.next() => working.take(turn),
            }
        }
        let _ = self.store.remove_worker(&self.executor, &working.report.holder.run).await;
        Ok(working.done)
    }

    async fn remove_old_reports(&self) -> Result<(), StoreError> {
        for (id, bytes) in self.store.workers(&self.executor).await? {
            let report = WorkerReport::read(&bytes);
            let is_old = |report: &WorkerReport| crate::now() - report.heartbeat_at > OLD_REPORT_S;
            if report.is_none_or(|report| report.holder.is_gone() || is_old(&report)) {
                self.store.remove_worker(&self.executor, &id).await?;
            }
        }
        Ok(())
    }

    /// Announcements that are worth a try now. What a dead leader left is removed.
    async fn announcements(&self, known: HashSet<WorkName>, observer: Arc<Observer>) -> Result<Announced, StoreError> {
        let (names, mut found) = (self.store.work(&self.executor).await?, Vec::new());
        for name in names.iter().filter(|name| !known.contains(*name)) {
            let Some(bytes) = self.store.work_item(&self.executor, name).await? else { continue };
            let item = WorkItem::read(&bytes);
            if let Ok(item) = &item {
                if !self.store.is_alive(&item.leader, &observer).await? {
                    self.store.end_work(&self.executor, name).await?;
                    continue;
                }
                if self.store.work_failure(&self.executor, name).await?.is_some()
                    || self.store.leased_by(&lease::of_key(&item.key), &observer).await?.is_some()
                {
                    continue;
                }
            }
            found.push((name.clone(), item));
        }
        Ok(Announced { names: names.into_iter().collect(), found })
    }

    /// Executes an announced attempt.
    async fn execute(&self, task: &Task<'_>, interrupts: mpsc::UnboundedReceiver<()>) -> Outcome {
        let files = self.folders.cache.join("work").join(format!("{}-{}", task.name, crate::nonce()));
        let outcome = self.execute_in(&files, task, interrupts).await;
        let _ = std::fs::remove_dir_all(&files);
        outcome
    }

    async fn execute_in(&self, files: &Path, task: &Task<'_>, interrupts: mpsc::UnboundedReceiver<()>) -> Outcome {
        let Task { name, item, grant, notice, progress } = *task;
        match self.place_files(item, files).await {
            Ok(true) => {}
            Ok(false) => return Outcome::Left("a file of its command is not in the store".into()),
            Err(_) => return Outcome::NotNow,
        }
        let pipeline = match item.pipeline(self.catalog, files) {
            Ok(pipeline) => pipeline,
            Err(lack) => return Outcome::Left(lack),
        };
        let (host, refresh) = (self.host.part(grant), BTreeSet::from_iter(item.refresh.then_some(0)));
        self.store.forget_absence(&item.key);
        match self.store.newest(&item.key).await {
            Ok((generation, Some(_))) if generation > item.generation => return Outcome::NotNow,
            Ok(_) => {}
            Err(_) => return Outcome::NotNow,
        }
        let planner = Planner::new(&pipeline, self.catalog, &self.store, &host, &self.folders, &refresh);
        match planner.stage(0, |_| None).await {
            Ok(plan) => {
                if let Some(outcome) = refused(item, &plan) {
                    return outcome;
                }
            }
            Err(crate::plan::PlanError::Store(_) | crate::plan::PlanError::Rows(_)) => return Outcome::NotNow,
            Err(error) => return Outcome::Left(error.to_string()),
        }
        drop(planner);
        let secrets = Secrets::read(&pipeline);
        if let Some(lack) = secrets.missing(&pipeline.stages[0]) {
            return Outcome::Left(lack.to_string());
        }
        // Rows are shared with others, who may die: whoever waits for them goes on with what they leave.
        let waits = pipeline.stages[0].kind.by_row.is_some();
        let engine = Engine {
            pipeline: Arc::new(pipeline),
            catalog: self.catalog,
            store: self.store.clone(),
            host: &host,
            folders: self.folders.clone(),
            launcher: self.launcher.clone(),
            selected: vec![true],
            order: vec![0],
            refresh,
            secrets,
            jobs: None,
            sample: None,
            waits,
        };
        let mut lines = Messages { notice, key: item.key, progress };
        let mut subscribers: [&mut dyn Subscriber; 1] = [&mut lines];
        match engine.run(&mut subscribers, interrupts).await {
            Ok(report) => self.conclude(name, item, report).await,
            Err(_) => Outcome::NotNow,
        }
    }

    /// Tells the leader of a failure. Of a result it hears by the record.
    async fn conclude(&self, name: &WorkName, item: &WorkItem, mut report: Report) -> Outcome {
        if report.outcome == RunOutcome::Done {
            return Outcome::Made;
        }
        let failure = report.failures.remove(&item.stage.name).unwrap_or(Failure::Cancelled);
        let Some(failure) = WorkFailure::of(&report.run, failure) else { return Outcome::NotNow };
        let bytes = serde_json::to_vec(&failure).expect("a failure is plain data");
        match self.store.put_work_failure(&self.executor, name, bytes.into()).await {
            Ok(()) => Outcome::Failed(failure.message),
            Err(_) => Outcome::NotNow,
        }
    }

    /// Puts the files of a command where its stage looks for them; `false` where one is gone.
    async fn place_files(&self, item: &WorkItem, folder: &Path) -> Result<bool, StoreError> {
        let ProgramIdentity::Command { files, .. } = &item.preimage.program else { return Ok(true) };
        for (name, digest) in files {
            let is_below = Path::new(name).components().all(|part| matches!(part, std::path::Component::Normal(_)));
            let path: PathBuf = folder.join(name);
            let made = path.parent().is_some_and(|above| std::fs::create_dir_all(above).is_ok());
            if !is_below || !made || !self.store.fetch_blob(digest, &path).await? {
                return Ok(false);
            }
            let mode = if item.preimage.executable.contains(name) { 0o755 } else { 0o644 };
            let _ = std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode));
        }
        Ok(true)
    }
}

/// Why this machine does not execute an attempt, if so: its result would be another one, or is there.
fn refused(item: &WorkItem, plan: &StagePlan) -> Option<Outcome> {
    let resolved = plan.resolved.as_ref()?;
    if resolved.key != item.key {
        let differences = key::difference(&item.preimage, &resolved.preimage, &BTreeMap::new());
        let differences: Vec<String> = differences.iter().map(ToString::to_string).collect();
        let why = if differences.is_empty() { "its key".to_owned() } else { differences.join("; ") };
        return Some(Outcome::Left(format!("this machine would make another result (asked for → here): {why}")));
    }
    matches!(plan.verdict, Verdict::Hit { .. }).then_some(Outcome::NotNow)
}

impl<'w> Working<'w> {
    fn new(worker: &'w Worker<'w>, notice: Notice<'w>) -> Self {
        let (host, now) = (worker.host, crate::now());
        let all = Pools {
            cpus: worker.jobs.unwrap_or(host.cpus).min(host.cpus),
            memory: host.memory,
            gpus: (0..host.gpus.len() as u32).collect(),
        };
        let report = WorkerReport {
            schema: SCHEMA,
            holder: Holder::this(&crate::run_id()),
            version: worker.version.clone(),
            cpus: all.cpus,
            memory: all.memory,
            cpu_model: host.cpu_model.clone(),
            gpus: host.gpus.clone(),
            started_at: now,
            heartbeat_at: now,
            busy: Vec::new(),
            left: BTreeMap::new(),
            progress: BTreeMap::new(),
        };
        Self {
            worker,
            notice,
            report,
            free: all.clone(),
            all,
            turns: FuturesUnordered::new(),
            running: HashMap::new(),
            over: HashSet::new(),
            later: HashMap::new(),
            observer: Arc::default(),
            progress: Arc::default(),
            done: Done::default(),
            idle_since: Instant::now(),
            is_stopping: false,
        }
    }

    fn is_over(&self) -> bool {
        let is_idle = || self.worker.idle.is_some_and(|idle| self.idle_since.elapsed() >= idle);
        self.running.is_empty() && (self.is_stopping || is_idle())
    }

    /// Ends what is executed, and takes nothing more.
    fn interrupt(&mut self) {
        self.is_stopping = true;
        for (_, interrupt) in self.running.values() {
            let _ = interrupt.send(());
        }
    }

    fn reported(&mut self) -> bytes::Bytes {
        self.report.heartbeat_at = crate::now();
        self.report.progress = self.progress.lock().expect("no panic happens under this lock").clone();
        self.report.busy = self.running.values().map(|(stage, _)| stage.clone()).collect();
        serde_json::to_vec(&self.report).expect("a report is plain data").into()
    }

    /// Looks for announcements, after a while.
    fn look(&mut self, after: Duration) {
        let now = Instant::now();
        let later = self.later.iter().filter(|(_, due)| **due > now).map(|(name, _)| name);
        let known = self.running.keys().chain(&self.over).chain(later).cloned().collect();
        let (worker, observer) = (self.worker, self.observer.clone());
        self.turns.push(Box::pin(async move {
            tokio::time::sleep(after).await;
            Turn::Looked(worker.announcements(known, observer).await)
        }));
    }

    /// Writes the report: at once where there is something new in it.
    fn write_report(&mut self, after: Duration) {
        let bytes = self.reported();
        let (worker, id) = (self.worker, self.report.holder.run.clone());
        self.turns.push(Box::pin(async move {
            // A store that is away for a while costs a sign of life.
            let _ = worker.store.put_worker(&worker.executor, &id, bytes).await;
            tokio::time::sleep(after).await;
            Turn::Reported
        }));
    }

    fn take(&mut self, turn: Turn) {
        match turn {
            Turn::Reported => self.write_report(HEARTBEAT),
            Turn::Nothing => {}
            Turn::Ended(name, grant, outcome) => self.ended(name, &grant, outcome),
            Turn::Looked(found) => {
                match found {
                    Ok(announced) => {
                        self.forget_all_but(&announced.names);
                        let found = announced.found.into_iter().filter(|_| !self.is_stopping);
                        found.collect::<Vec<_>>().into_iter().for_each(|(name, item)| self.consider(name, item));
                    }
                    Err(error) => (self.notice)(&format!("warning: {error}")),
                }
                self.look(self.worker.store.lease_poll_interval());
            }
        }
    }

    /// What was withdrawn is of no interest any more.
    fn forget_all_but(&mut self, announced: &HashSet<WorkName>) {
        self.over.retain(|name| announced.contains(name));
        self.later.retain(|name, _| announced.contains(name));
        self.report.left.retain(|key, _| announced.iter().any(|name| name.key == *key));
    }

    fn consider(&mut self, name: WorkName, item: Result<WorkItem, String>) {
        let item = match item {
            Ok(item) => item,
            Err(why) => return self.leave(name, "work", why),
        };
        // Two leaders may want the same.
        if self.running.keys().any(|running| running.key == name.key) {
            return;
        }
        let need = item.stage.resources.clone().on(self.all.cpus, self.all.gpus.len());
        if let Some(lack) = self.all.lack(&need) {
            return self.leave(name, &item.stage.name, format!("needs {lack}"));
        }
        if !self.free.fit(&need) {
            return;
        }
        let kind = self.worker.catalog.kind(&item.preimage.kind);
        let by_row = item.stage.manifest.is_none() && kind.is_some_and(|kind| kind.manifest.by_row.is_some());
        let wanted = match by_row {
            // Its programs may use whatever is free.
            true => Resources { cpu: self.free.cpus, memory: self.free.memory, gpu: self.free.gpus.len() as u32 },
            false => need,
        };
        let grant = self.free.take(&wanted).expect("it fits");
        (self.notice)(&format!("{} ({}, run {}): started", item.stage.name, item.pipeline, name.run));
        let (interrupt, interrupts) = mpsc::unbounded_channel();
        self.running.insert(name.clone(), (item.stage.name.clone(), interrupt));
        let (worker, notice, progress) = (self.worker, self.notice, self.progress.clone());
        self.turns.push(Box::pin(async move {
            let task = Task { name: &name, item: &item, grant: &grant, notice, progress: &progress };
            let outcome = worker.execute(&task, interrupts).await;
            Turn::Ended(name, grant, outcome)
        }));
    }

    fn ended(&mut self, name: WorkName, grant: &ResourceGrant, outcome: Outcome) {
        self.free.put(grant);
        self.progress.lock().expect("no panic happens under this lock").remove(&name.key);
        self.idle_since = Instant::now();
        let stage = self.running.remove(&name).map(|(stage, _)| stage).unwrap_or_default();
        match outcome {
            Outcome::Made => {
                self.done.executed += 1;
                (self.notice)(&format!("{stage}: done"));
            }
            Outcome::Failed(why) => {
                self.done.failed += 1;
                (self.notice)(&format!("{stage}: failed: {why}"));
                self.over.insert(name);
            }
            Outcome::Left(why) => self.leave(name, &stage, why),
            Outcome::NotNow => drop(self.later.insert(name, Instant::now() + AGAIN)),
        }
    }

    /// Leaves work to others, and says so in the report.
    fn leave(&mut self, name: WorkName, stage: &str, why: String) {
        (self.notice)(&format!("{stage}: left to others: {why}"));
        self.report.left.insert(name.key, why);
        self.over.insert(name);
        let bytes = self.reported();
        let (worker, id) = (self.worker, self.report.holder.run.clone());
        self.turns.push(Box::pin(async move {
            let _ = worker.store.put_worker(&worker.executor, &id, bytes).await;
            Turn::Nothing
        }));
    }
}

/// Passes on what is heard of a run.
struct Messages<'n> {
    notice: Notice<'n>,
    key: Digest,
    progress: &'n AllProgress,
}

impl Subscriber for Messages<'_> {
    fn notice(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Message { stage, level, message } if level != "debug" => {
                (self.notice)(&format!("{stage}: {level}: {message}"));
            }
            RunEvent::StageProgress { done, total, unit, .. } => {
                let progress = Progress { done: *done, total: *total, unit: unit.clone() };
                self.progress.lock().expect("no panic happens under this lock").insert(self.key, progress);
            }
            _ => {}
        }
    }
}
