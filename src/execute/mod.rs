//! Running a plan: the loop that asks the scheduler what may start, starts it, and takes notice of what ends.
//!
//! The scheduler decides and starts nothing; stages run as tasks of their own and talk to the loop by messages, so the
//! state of a run has one owner and needs no lock.

pub mod attempt;
pub mod by_row;
pub mod checkpoint;
pub mod launch;
pub mod log;
mod program;
pub mod publish;
pub mod secrets;
pub mod stage;
pub mod supervise;
mod work;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuda_agent_protocol::ResourceGrant;
use cuda_agent_protocol::manifest::Resources;
use futures::future::LocalBoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::Folders;
use crate::artifact::ArtifactError;
use crate::catalog::{Catalog, Kind};
use crate::digest::Digest;
use crate::event::{RunEvent, RunOutcome, StageOutcome, Subscriber};
use crate::host::Host;
use crate::key::MissReason;
use crate::plan::{Found, Outputs, PlanError, Planner, Resolved, StagePlan, Verdict};
use crate::rows::index::RowError;
use crate::schedule::{self, Pools, Scheduler, State, Step};
use crate::spec::{Pipeline, Retry, Source, Stage};
use crate::store::lease::{Claimant, Holder, Lease};
use crate::store::{Record, RowCounts, RunManifest, StageEntry, Store, StoreError};
use launch::{GRACE, Launcher, Stop};
use log::Log;
use secrets::{SecretError, Secrets};
pub use work::oldest_live;

/// How many lines of a failed stage's log are shown.
const LOG_TAIL: usize = 20;
/// How often it is said how far the reading of large inputs has come.
const READING: Duration = Duration::from_secs(5);
/// How often a run says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(20);

/// Why a stage failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What went wrong.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// Whether trying again is useless.
    pub permanent: bool,
    /// Whether it was interrupted.
    pub cancelled: bool,
    /// A blob that the stage reads is gone from the store, or damaged.
    pub lost: Option<Digest>,
    /// Nothing is wrong, but other runs are making this: the leases to wait for before looking again.
    pub others: Option<Vec<String>>,
}

impl Failure {
    /// One that may pass when tried again.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, permanent: false, cancelled: false, lost: None, others: None }
    }

    /// One that will not.
    pub fn permanent(message: impl Into<String>) -> Self {
        Self { permanent: true, ..Self::new(message) }
    }

    /// The machine or the store is at fault.
    pub fn environment(message: impl Into<String>) -> Self {
        Self::new(message)
    }

    /// The run was interrupted.
    pub fn cancelled() -> Self {
        Self { cancelled: true, permanent: true, ..Self::new("interrupted") }
    }

    /// Others are making this; it is to be looked up again when one of these leases is free.
    pub fn made_by_others(leases: Vec<String>) -> Self {
        Self { others: Some(leases), ..Self::new("other runs are making this") }
    }

    /// The store no longer has a blob that the stage reads.
    pub fn lost(blob: Digest) -> Self {
        let message = format!("the store no longer has what this stage reads (blob {blob})");
        Self { lost: Some(blob), permanent: true, ..Self::new(message) }
    }

    /// Adds what to do about it.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self { hint: error.hint.clone(), ..Self::new(error.to_string()) }
    }
}

impl From<ArtifactError> for Failure {
    fn from(error: ArtifactError) -> Self {
        Self::new(error.to_string())
    }
}

impl From<RowError> for Failure {
    fn from(error: RowError) -> Self {
        Self::new(error.to_string())
    }
}

/// What every job of a run shares.
pub struct Context {
    /// The run.
    pub run: String,
    /// What is run.
    pub pipeline: Arc<Pipeline>,
    /// Where results go.
    pub store: Store,
    /// Local folders.
    pub folders: Folders,
    /// What `python` stands for.
    pub python: PathBuf,
    /// What CUDA calls each GPU of the pool.
    pub gpus: Vec<String>,
    /// Starts programs.
    pub launcher: Arc<dyn Launcher>,
    /// This run, as it asks for leases.
    pub claimant: Claimant,
    /// How many programs a by-row stage may have side by side where its kind does not say.
    pub programs: u32,
    /// Which rows a refresh does again; all where it does not say.
    pub sample: Option<Sample>,
    /// What by-row stages came to in earlier attempts, by index.
    pub passes: Mutex<HashMap<usize, Pass>>,
    /// What this run's refreshes file their results under, by base key: a refresh does not begin anew with each attempt, nor
    /// with another stage that has the same rows.
    pub refreshes: Mutex<HashMap<Digest, u32>>,
}

/// What a by-row stage has come to in a run before it is tried again: it failed, or had to wait for others.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// Rows that it did.
    pub executed: u64,
    /// What its programs measured.
    pub metrics: BTreeMap<String, f64>,
}

/// One attempt at one stage.
pub struct Job {
    /// Shared.
    pub context: Arc<Context>,
    /// Index of the stage.
    pub index: usize,
    /// Its kind, but for `run`.
    pub kind: Option<Arc<Kind>>,
    /// Files of a `run` stage.
    pub command_files: Vec<(String, PathBuf)>,
    /// Its key and inputs.
    pub resolved: Resolved,
    /// Why it runs.
    pub reasons: Vec<MissReason>,
    /// The generation of an unusable record.
    pub generation: u32,
    /// From 1.
    pub attempt: u32,
    /// What its first program may use; a by-row stage takes it and gives each program's back itself.
    pub grant: Option<ResourceGrant>,
    /// What further programs may use.
    pub grants: mpsc::UnboundedReceiver<ResourceGrant>,
    /// Name and value.
    pub secrets: Vec<(String, String)>,
    /// A secret that it names and that could not be read: no program of it can start.
    pub missing_secret: Option<SecretError>,
    /// What it prints.
    pub log: Arc<Mutex<Log>>,
    /// Whether to go on.
    pub stop: watch::Receiver<Stop>,
    /// Whether other stages wait for what this one's further programs have.
    pub wanted: watch::Receiver<bool>,
    /// What it has claimed, so that other runs do not make it too.
    pub leases: Vec<Lease>,
    /// Of a stage that has checkpoints.
    pub state: checkpoint::State,
    said: u32,
    progressed: Option<Instant>,
    messages: mpsc::UnboundedSender<Message>,
}

impl Job {
    /// The stage.
    pub fn stage(&self) -> &Stage {
        &self.context.pipeline.stages[self.index]
    }

    /// The stage's seed: its parameter of that name.
    pub fn seed(&self) -> i64 {
        self.stage().params.get("seed").and_then(serde_json::Value::as_i64).unwrap_or(0)
    }

    /// Where this attempt works. Folders are few and flat, since making one costs a third of a millisecond on ext4.
    pub fn attempt_folder(&self) -> PathBuf {
        attempt_folder(&self.context, self.stage(), self.attempt)
    }

    /// Where checkpoints and journals are: by base key where there is one, so that other rows find it too, and so do other
    /// values of a parameter that continues, but for those that run at the same time.
    pub fn state_folder(&self) -> PathBuf {
        let shares = self.stage().kind.by_row.is_some() || self.state.is_shared();
        let key = self.resolved.base.filter(|_| shares).unwrap_or(self.resolved.key);
        self.context.folders.state.join(key.to_string())
    }

    /// Values that must show nowhere.
    pub fn secret_values(&self) -> Vec<String> {
        self.secrets.iter().map(|(_, value)| value.clone()).collect()
    }

    /// A number that no other job of this process has.
    pub fn unique(&self) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Gives back what it had claimed.
    pub async fn give_back_leases(&mut self) {
        for lease in std::mem::take(&mut self.leases) {
            // One that cannot be given back ends with the run.
            let _ = self.context.store.give_back(lease).await;
        }
    }

    /// Whether it runs again although the store has its result.
    pub fn is_refresh(&self) -> bool {
        self.reasons.contains(&MissReason::Refresh)
    }

    /// A text without secrets.
    pub fn redact(&self, text: &str) -> String {
        self.log.lock().expect("no panic happens under this lock").redact(text)
    }

    fn without_secrets(&self, failure: Failure) -> Failure {
        let message = self.redact(&failure.message);
        let hint = failure.hint.as_deref().map(|hint| self.redact(hint));
        Failure { message, hint, ..failure }
    }

    /// Passes on a message, up to a number that people may read.
    pub fn say(&mut self, level: String, message: String) {
        const MOST: u32 = 1000;
        self.said += 1;
        let stage = self.stage().name.clone();
        if self.said < MOST {
            self.tell(RunEvent::Message { stage, level, message });
        } else if self.said == MOST {
            let message = format!("that were {MOST} messages; the rest is in its log alone");
            self.tell(RunEvent::Message { stage, level: "warning".into(), message });
        }
    }

    /// Passes on progress, but not more often than anybody looks.
    pub fn progress(&mut self, done: u64, total: Option<u64>, unit: &str) {
        const OFTEN: Duration = Duration::from_millis(100);
        let is_last = total == Some(done);
        if !is_last && self.progressed.is_some_and(|last| last.elapsed() < OFTEN) {
            return;
        }
        self.progressed = Some(Instant::now());
        let stage = self.stage().name.clone();
        self.tell(RunEvent::StageProgress { stage, done, total, unit: unit.to_owned() });
    }

    /// Tells subscribers.
    pub fn tell(&self, event: RunEvent) {
        self.send(Message::Event(event));
    }

    fn send(&self, message: Message) {
        // The loop outlives its jobs, but for an interrupted run.
        let _ = self.messages.send(message);
    }
}

fn attempt_folder(context: &Context, stage: &Stage, attempt: u32) -> PathBuf {
    let again = if attempt > 1 { format!("~{attempt}") } else { String::new() };
    context.folders.work.join(&context.run).join(format!("{}{again}", file_name(&stage.name)))
}

/// Where the log of a stage is while it runs.
pub fn live_log(folders: &Folders, run: &str, stage: &str) -> PathBuf {
    folders.work.join(run).join(format!("{}.log", file_name(stage)))
}

/// A stage's name as a file name: a cell's name may hold anything.
pub fn file_name(stage: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.,=[]".contains(c);
    if stage.chars().all(plain) && stage.len() < 100 {
        return stage.to_owned();
    }
    let kept: String = stage.chars().filter(|c| plain(*c)).take(60).collect();
    format!("{kept}-{}", &Digest::of_bytes(stage.as_bytes()).to_string()[..12])
}

/// Stands for the stage of a job that only waited.
const NO_STAGE: usize = usize::MAX;
/// How long an interrupted run waits for what cannot be interrupted.
const GRACE_OF_KILL: Duration = Duration::from_secs(2);

async fn until(instant: Option<tokio::time::Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

/// What jobs tell the loop.
pub enum Message {
    /// For subscribers.
    Event(RunEvent),
    /// A program has ended.
    GiveBack(ResourceGrant),
    /// A by-row stage could use more programs.
    Widen(usize, u32),
    /// The wait before another try is over.
    Again(usize),
    /// What other runs were making is there, or nobody makes it any more.
    LookAgain(usize, Digest),
}

/// What a run needs.
pub struct Engine<'a> {
    /// What to run.
    pub pipeline: Arc<Pipeline>,
    /// Stage kinds.
    pub catalog: &'a Catalog,
    /// Where results go.
    pub store: Store,
    /// The machine.
    pub host: &'a Host,
    /// Local folders.
    pub folders: Folders,
    /// Starts programs.
    pub launcher: Arc<dyn Launcher>,
    /// Which stages take part.
    pub selected: Vec<bool>,
    /// Producers before consumers.
    pub order: Vec<usize>,
    /// Stages to run whatever the store has.
    pub refresh: BTreeSet<usize>,
    /// What stages may see as environment variables and nobody else may see.
    pub secrets: Secrets,
    /// The most CPU cores to use.
    pub jobs: Option<u32>,
    /// Of the rows of a refreshed by-row stage, do only some again.
    pub sample: Option<Sample>,
}

/// Some of many things, chosen by their digests: the same ones for the same seed, wherever and whenever.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// From 0 to 1.
    pub share: f64,
    /// Another seed chooses others.
    pub seed: u64,
}

impl Sample {
    /// Whether a thing is among them.
    pub fn has(&self, digest: &Digest) -> bool {
        let mixed = Digest::of_bytes(&[&self.seed.to_le_bytes()[..], &digest.0].concat());
        let first = u64::from_le_bytes(*mixed.0.first_chunk().expect("digests have 32 bytes"));
        (first as f64) < self.share * 2f64.powi(64)
    }
}

/// What a run came to.
#[derive(Debug)]
pub struct Report {
    /// Its id.
    pub run: String,
    /// How it ended.
    pub outcome: RunOutcome,
    /// Outputs of every stage that is done.
    pub outputs: BTreeMap<String, Outputs>,
    /// Stages that were executed, in the order in which they ended.
    pub executed: Vec<String>,
    /// Stages that were in the store.
    pub hits: usize,
    /// Stages that failed, with why.
    pub failed: BTreeMap<String, Failure>,
    /// As it was recorded last.
    pub manifest: Option<RunManifest>,
}

struct Active {
    resolved: Resolved,
    reasons: Vec<MissReason>,
    generation: u32,
    attempt: u32,
    started: Instant,
    widen: Option<mpsc::UnboundedSender<ResourceGrant>>,
    log: Option<Arc<Mutex<Log>>>,
}

/// A key, and for by-row stages the base key.
type Ids = (Digest, Option<Digest>);
type JobEnd = (usize, Result<Record, Failure>);
type Looked = (usize, Result<StagePlan, PlanError>);

/// What is being made, and by which stage.
#[derive(Default)]
struct InFlight {
    makers: HashMap<Digest, usize>,
    keys: HashMap<usize, Digest>,
}

impl InFlight {
    fn maker(&self, key: &Digest) -> Option<usize> {
        self.makers.get(key).copied()
    }

    fn add(&mut self, key: Digest, stage: usize) {
        self.makers.insert(key, stage);
        self.keys.insert(stage, key);
    }

    fn remove(&mut self, stage: usize) {
        if let Some(key) = self.keys.remove(&stage) {
            self.makers.remove(&key);
        }
    }
}

struct Run<'e, 'a> {
    engine: &'e Engine<'a>,
    planner: Arc<Planner<'e>>,
    looks: FuturesUnordered<LocalBoxFuture<'e, Looked>>,
    context: Arc<Context>,
    scheduler: Scheduler,
    outputs: Vec<Option<Outputs>>,
    found: HashMap<usize, Found>,
    active: HashMap<usize, Active>,
    in_flight: InFlight,
    /// Stages whose result was gone, so that they were looked up once more.
    redone: BTreeSet<usize>,
    looked_again: HashMap<usize, u32>,
    parked: HashMap<usize, Vec<usize>>,
    jobs: JoinSet<JobEnd>,
    messages: mpsc::UnboundedSender<Message>,
    inbox: mpsc::UnboundedReceiver<Message>,
    stop: watch::Sender<Stop>,
    wanted: watch::Sender<bool>,
    kill_at: Option<tokio::time::Instant>,
    manifest: RunManifest,
    /// Where each stage comes in the order of the pipeline.
    places: Vec<u32>,
    recorded: bool,
    alive: Option<work::Alive>,
    kept: BTreeSet<String>,
    subscribers: &'e mut [&'e mut dyn Subscriber],
    report: Report,
    started: Instant,
}

impl Engine<'_> {
    /// Runs the selected stages. `interrupted` completes when the user wants it to end, and once more when they insist.
    pub async fn run<'e>(
        &'e self,
        subscribers: &'e mut [&'e mut dyn Subscriber],
        interrupts: mpsc::UnboundedReceiver<()>,
    ) -> Result<Report, PlanError> {
        let run_id = crate::run_id();
        let context = Arc::new(Context {
            run: run_id.clone(),
            pipeline: self.pipeline.clone(),
            store: self.store.clone(),
            folders: self.folders.clone(),
            python: self.host.python.clone(),
            gpus: self.host.gpus.iter().map(|gpu| gpu.id.clone()).collect(),
            launcher: self.launcher.clone(),
            claimant: Claimant::new(Holder::this(&run_id)),
            programs: self.pools().cpus.max(self.host.gpus.len() as u32),
            sample: self.sample,
            passes: Mutex::default(),
            refreshes: Mutex::default(),
        });
        let planner = Arc::new(self.planner());
        let (messages, inbox) = mpsc::unbounded_channel();
        let now = crate::now();
        let manifest = RunManifest {
            schema: 1,
            run: run_id.clone(),
            pipeline: self.pipeline.name.clone(),
            started_at: now,
            heartbeat_at: now,
            ended_at: None,
            outcome: "running".into(),
            params: self.pipeline.params.clone(),
            stages: BTreeMap::new(),
        };
        let report = Report {
            run: run_id,
            outcome: RunOutcome::Done,
            outputs: BTreeMap::new(),
            executed: Vec::new(),
            hits: 0,
            failed: BTreeMap::new(),
            manifest: None,
        };
        let run = Run {
            engine: self,
            planner,
            looks: FuturesUnordered::new(),
            context,
            scheduler: self.scheduler(),
            outputs: vec![None; self.pipeline.stages.len()],
            found: HashMap::new(),
            active: HashMap::new(),
            in_flight: InFlight::default(),
            redone: BTreeSet::new(),
            looked_again: HashMap::new(),
            parked: HashMap::new(),
            jobs: JoinSet::new(),
            messages,
            inbox,
            stop: watch::Sender::new(Stop::Go),
            wanted: watch::Sender::new(false),
            kill_at: None,
            manifest,
            places: places(&self.order),
            recorded: false,
            alive: None,
            kept: BTreeSet::new(),
            subscribers,
            report,
            started: Instant::now(),
        };
        run.go(interrupts).await
    }

    /// The planner that this run asks.
    pub fn planner(&self) -> Planner<'_> {
        Planner::new(&self.pipeline, self.catalog, &self.store, self.host, &self.folders, &self.refresh)
    }

    /// The pools of this run.
    pub fn pools(&self) -> Pools {
        Pools {
            cpus: self.jobs.unwrap_or(self.host.cpus),
            memory: self.host.memory,
            gpus: (0..self.host.gpus.len() as u32).collect(),
        }
    }

    fn scheduler(&self) -> Scheduler {
        let producers: Vec<Vec<usize>> = self.pipeline.stages.iter().map(crate::plan::producers).collect();
        let needs = self.pipeline.stages.iter().map(|stage| self.need(stage)).collect();
        Scheduler::new(&producers, &self.selected, needs, self.pools())
    }

    /// What a program of a stage needs. `--jobs 1` means one after another, not that wide stages cannot run.
    fn need(&self, stage: &Stage) -> Resources {
        let pools = self.pools();
        let need = stage.resources.clone().on(pools.cpus, pools.gpus.len());
        Resources { cpu: need.cpu.min(self.jobs.unwrap_or(u32::MAX)), ..need }
    }
}

impl<'e, 'a> Run<'e, 'a> {
    fn stage(&self, index: usize) -> &'e Stage {
        &self.engine.pipeline.stages[index]
    }

    fn tell(&mut self, event: RunEvent) {
        self.subscribers.iter_mut().for_each(|subscriber| subscriber.notice(&event));
    }

    async fn go(mut self, mut interrupts: mpsc::UnboundedReceiver<()>) -> Result<Report, PlanError> {
        self.tell(RunEvent::RunStarted {
            run: self.context.run.clone(),
            pipeline: self.engine.pipeline.name.clone(),
            stages: self.engine.selected.iter().filter(|chosen| **chosen).count(),
            store: self.engine.store.url().to_owned(),
        });
        let outcome = match self.find_hits(&mut interrupts).await {
            Ok(()) => self.steps(&mut interrupts).await,
            Err(error) => Err(error),
        };
        self.planner.save();
        // An error of planning or of the store ends the run, but not without a word in its manifest.
        self.report.outcome = match (&outcome, *self.stop.borrow()) {
            (_, Stop::Terminate | Stop::Kill) => RunOutcome::Interrupted,
            (Err(_), _) => RunOutcome::Failed,
            (Ok(()), Stop::Go) if self.report.failed.is_empty() => RunOutcome::Done,
            (Ok(()), Stop::Go) => RunOutcome::Failed,
        };
        // One that blocks ends with the process.
        let _ = tokio::time::timeout(GRACE_OF_KILL, self.jobs.shutdown()).await;
        self.share_the_rest().await;
        let outputs = std::mem::take(&mut self.outputs).into_iter().enumerate();
        self.report.outputs =
            outputs.filter_map(|(index, outputs)| Some((self.stage(index).name.clone(), outputs?))).collect();
        // What could not even be planned leaves no trace.
        if outcome.is_ok() || self.recorded {
            self.end().await?;
        }
        outcome?;
        Ok(Report { manifest: Some(self.manifest), ..self.report })
    }

    /// What is there already is found at once, and not by the loop. Whoever interrupts meanwhile is heard by the loop next.
    async fn find_hits(&mut self, interrupts: &mut mpsc::UnboundedReceiver<()>) -> Result<(), PlanError> {
        let planner = self.planner.clone();
        tokio::select! {
            biased;
            Some(()) = interrupts.recv() => {
                self.interrupt();
                return Ok(());
            }
            begun = planner.begin() => drop(begun?),
        }
        let is_halted = || !interrupts.is_empty();
        self.found = self.planner.hits(&self.engine.order, &self.engine.selected, &is_halted).await?;
        Ok(())
    }

    async fn steps(&mut self, interrupts: &mut mpsc::UnboundedReceiver<()>) -> Result<(), PlanError> {
        let mut heartbeat = tokio::time::interval(HEARTBEAT);
        heartbeat.tick().await;
        let mut reading = tokio::time::interval(READING);
        loop {
            while let Some(step) = self.scheduler.next_step() {
                self.take(step).await?;
                // Ctrl-C must be heard even while ten thousand stages are looked up.
                if interrupts.try_recv().is_ok() {
                    self.interrupt();
                }
            }
            self.wanted.send_if_modified(|wanted| std::mem::replace(wanted, self.scheduler.is_short()) != *wanted);
            let stopping = *self.stop.borrow() != Stop::Go;
            if self.jobs.is_empty() && (stopping || self.scheduler.is_done()) {
                break;
            }
            let busy = !self.jobs.is_empty() || !self.looks.is_empty();
            assert!(busy, "a stage waits for what nobody will give back");
            tokio::select! {
                // Whoever talks much must not drown who wants to stop.
                biased;
                Some(()) = interrupts.recv() => self.interrupt(),
                () = until(self.kill_at), if self.kill_at.is_some() => {
                    self.jobs.abort_all();
                    break;
                }
                Some(ended) = self.jobs.join_next() => {
                    let (index, outcome) = ended.expect("jobs do not panic");
                    self.drain();
                    self.finish(index, outcome).await?;
                    self.tell_troubles();
                }
                Some((index, plan)) = self.looks.next() => {
                    self.tell_troubles();
                    self.judge(index, plan)?;
                }
                _ = reading.tick() => self.say_what_is_read(),
                _ = heartbeat.tick() => {
                    self.sign_of_life().await;
                    self.tell_troubles();
                }
                Some(message) = self.inbox.recv() => self.hear(message),
            }
        }
        self.drain();
        Ok(())
    }

    fn drain(&mut self) {
        while let Ok(message) = self.inbox.try_recv() {
            self.hear(message);
        }
    }

    fn interrupt(&mut self) {
        let stop = if *self.stop.borrow() == Stop::Go { Stop::Terminate } else { Stop::Kill };
        let patience = if stop == Stop::Kill { GRACE_OF_KILL } else { GRACE + GRACE_OF_KILL };
        self.kill_at = Some(tokio::time::Instant::now() + patience);
        self.stop.send_replace(stop);
        self.scheduler.close();
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Event(event) => self.tell(event),
            Message::GiveBack(grant) => self.scheduler.give_back(&grant),
            Message::Widen(index, more) => self.scheduler.widen(index, more),
            Message::Again(index) => self.scheduler.queue(index),
            Message::LookAgain(index, key) => {
                if let Some(far) = self.engine.store.far() {
                    far.set_absent(&key, false);
                }
                // It may have been looked at meanwhile, for another reason.
                if self.scheduler.state(index) == State::Waiting {
                    self.scheduler.unpark(index);
                }
            }
        }
    }

    /// People should know what is waited for. A store that does not answer is spoken of by whoever owns its pulse.
    fn say_what_is_read(&mut self) {
        const WORTH_A_WORD: u64 = 256 << 20;
        let large = self.planner.reading().into_iter().filter(|(_, done, total)| *done > 0 && *total >= WORTH_A_WORD);
        for (path, done, total) in large.collect::<Vec<_>>() {
            let (done, total) = (schedule::bytes(done), schedule::bytes(total));
            let message = format!("reading {} for its digest: {done} of {total}", path.display());
            self.tell(RunEvent::Message { stage: "inputs".into(), level: "info".into(), message });
        }
    }

    /// What the far store had to say that no stage failed of.
    fn tell_troubles(&mut self) {
        for message in self.engine.store.far().map(|far| far.take_troubles()).unwrap_or_default() {
            self.tell(RunEvent::Message { stage: "store".into(), level: "warning".into(), message });
        }
    }

    async fn take(&mut self, step: Step) -> Result<(), PlanError> {
        match step {
            Step::Look(index) => self.look(index).await,
            Step::Start(index, grant) => {
                // Where the run is killed, gc must know what it had begun: rows that are done are kept.
                let ids = self.active.get(&index).map(|active| active.ids());
                self.enter(index, ids, "running", None);
                self.record_once().await?;
                self.start(index, grant);
                Ok(())
            }
            Step::Widen(index, grant) => {
                let widen = self.active.get(&index).and_then(|active| active.widen.as_ref());
                if let Some(grant) = widen.map_or(Some(grant.clone()), |widen| widen.send(grant).err().map(|e| e.0)) {
                    self.scheduler.give_back(&grant);
                }
                Ok(())
            }
        }
    }

    async fn look(&mut self, index: usize) -> Result<(), PlanError> {
        if let Some(found) = self.found.remove(&index) {
            self.hit(index, found);
            return Ok(());
        }
        let is_outside = |source: &Source| matches!(source, Source::Path(_) | Source::Url { .. });
        if self.engine.store.far().is_none() && !self.stage(index).inputs.values().flatten().any(is_outside) {
            let outputs = &self.outputs;
            let plan = self.planner.stage(index, |producer| outputs[producer].as_ref()).await;
            return self.judge(index, plan);
        }
        // Each look is a request or more, or reads files, and many stages may be waiting for one.
        let before = crate::plan::producers(self.stage(index));
        let outputs: HashMap<usize, Outputs> =
            before.into_iter().filter_map(|producer| Some((producer, self.outputs[producer].clone()?))).collect();
        let planner = self.planner.clone();
        self.looks.push(Box::pin(async move {
            let known = |producer: usize| outputs.get(&producer);
            let plan = match planner.stage(index, known).await {
                Err(PlanError::Store(error)) if planner.store.far().is_some() => {
                    // A shared store that is away costs double work at worst; the run goes on with what is here.
                    let far = planner.store.far().expect("just seen");
                    far.trouble(format!("looked up on this machine only: {}", error.message));
                    planner.stage_nearby(index, known).await
                }
                plan => plan,
            };
            (index, plan)
        }));
        Ok(())
    }

    fn judge(&mut self, index: usize, plan: Result<StagePlan, PlanError>) -> Result<(), PlanError> {
        if *self.stop.borrow() != Stop::Go {
            return Ok(());
        }
        let plan = match plan {
            Ok(plan) => plan,
            Err(error @ (PlanError::Store(_) | PlanError::Rows(_))) => return Err(error),
            Err(error) => {
                let failure = Failure { hint: error.hint(), ..Failure::permanent(error.to_string()) };
                self.fail(index, failure);
                return Ok(());
            }
        };
        let StagePlan { resolved: Some(resolved), verdict } = plan else {
            unreachable!("the scheduler looks only at stages whose producers are done")
        };
        match verdict {
            Verdict::Hit { record, generation } => {
                let is_shared = self.engine.store.is_shared(&record, generation);
                let (key, base, rows) = (resolved.key, resolved.base, record.rows);
                self.hit(index, Found { key, base, rows, outputs: record.outputs, is_shared });
            }
            Verdict::Miss { reasons, generation } => {
                if let Some(lack) = self.engine.pools().lack(&self.engine.need(self.stage(index))) {
                    let failure = Failure::permanent(format!("needs {lack}"))
                        .with_hint("lower `resources:` of the stage, or run on a larger machine");
                    self.active.insert(index, Active::new(resolved, reasons, generation));
                    self.fail(index, failure);
                    return Ok(());
                }
                if let Some(maker) = self.in_flight.maker(&resolved.key) {
                    // The same thing is being made: wait for it and look again.
                    self.parked.entry(maker).or_default().push(index);
                    self.scheduler.park(index);
                    return Ok(());
                }
                self.in_flight.add(resolved.key, index);
                self.active.insert(index, Active::new(resolved, reasons, generation));
                self.scheduler.queue(index);
            }
            Verdict::Pending { .. } => unreachable!("a resolved stage is not pending"),
        }
        Ok(())
    }

    fn hit(&mut self, index: usize, found: Found) {
        self.enter(index, Some((found.key, found.base)), "hit", None);
        self.enter_rows(index, found.rows);
        self.report.hits += 1;
        self.tell(RunEvent::StageHit { stage: self.stage(index).name.clone(), rows: found.rows });
        if !found.is_shared {
            // Found on this machine only, or not known to be whole in the shared store. It is a job, so that the run does
            // not end before.
            let store = self.engine.store.clone();
            self.jobs.spawn(async move {
                let offered = match store.nearby().newest(&found.key).await {
                    Ok((generation, Some(record))) => store.offer(record, generation).await.map(|_| ()),
                    other => other.map(|_| ()),
                };
                (NO_STAGE, offered.map_err(Failure::from).and(Err(Failure::cancelled())))
            });
        }
        self.done(index, found.outputs);
    }

    fn start(&mut self, index: usize, grant: ResourceGrant) {
        let stage = self.stage(index);
        let secrets = self.engine.secrets.of(stage);
        let values: Vec<String> = secrets.iter().map(|(_, value)| value.clone()).collect();
        let log_file = live_log(&self.context.folders, &self.context.run, &stage.name);
        let active = self.active.get_mut(&index).expect("a started stage is active");
        active.attempt += 1;
        active.started = Instant::now();
        let log = active.log.get_or_insert_with(|| Arc::new(Mutex::new(Log::create(&log_file, &values))));
        let log = log.clone();
        let (widen, grants) = mpsc::unbounded_channel();
        active.widen = Some(widen);
        let mut job = Job {
            context: self.context.clone(),
            index,
            kind: self.engine.catalog.kind(&stage.kind.name).cloned(),
            command_files: self.planner.command_files(stage).unwrap_or_default(),
            resolved: active.resolved.clone(),
            reasons: active.reasons.clone(),
            generation: active.generation,
            attempt: active.attempt,
            grant: Some(grant),
            grants,
            secrets,
            missing_secret: self.engine.secrets.missing(stage).cloned(),
            log,
            stop: self.stop.subscribe(),
            wanted: self.wanted.subscribe(),
            leases: Vec::new(),
            state: checkpoint::State::default(),
            said: 0,
            progressed: None,
            messages: self.messages.clone(),
        };
        if stage.kind.by_row.is_none() {
            let (attempt, reasons) = (active.attempt, active.reasons.clone());
            self.tell(RunEvent::StageStarted { stage: stage.name.clone(), attempt, reasons, rows: None });
        }
        self.jobs.spawn(async move {
            let outcome = stage::execute(&mut job).await;
            job.give_back_leases().await;
            if let Some(grant) = job.grant.take() {
                job.send(Message::GiveBack(grant));
            }
            job.grants.close();
            while let Ok(grant) = job.grants.try_recv() {
                job.send(Message::GiveBack(grant));
            }
            (job.index, outcome)
        });
    }

    async fn finish(&mut self, index: usize, outcome: Result<Record, Failure>) -> Result<(), PlanError> {
        // Waiting for another try is a job too, but no stage's.
        if !self.active.contains_key(&index) {
            return Ok(());
        }
        let going_on = *self.stop.borrow() == Stop::Go;
        match &outcome {
            Err(Failure { others: Some(leases), .. }) if going_on && self.may_look_again(index, leases) => {
                self.wait_for_others(index, leases.clone());
                return Ok(());
            }
            Err(Failure { lost: Some(blob), .. }) if going_on && self.redo_producer(index, blob).await? => {
                return Ok(());
            }
            _ => {}
        }
        let outcome = outcome.map_err(|failure| match failure.others {
            Some(_) if !going_on => Failure::cancelled(),
            _ => failure,
        });
        let Some(active) = self.active.get_mut(&index) else { return Ok(()) };
        let stage = &self.engine.pipeline.stages[index];
        active.widen = None;
        match outcome {
            Ok(record) => {
                let duration_s = active.started.elapsed().as_secs_f64();
                let (ids, attempts) = (active.ids(), active.attempt);
                self.keep_log(index, true).await;
                self.enter(index, Some(ids), "done", None);
                self.enter_work(index, duration_s, record.rows);
                self.report.executed.push(stage.name.clone());
                for attempt in 1..attempts {
                    let _ = std::fs::remove_dir_all(attempt_folder(&self.context, stage, attempt));
                }
                let finished = StageOutcome::Done;
                self.tell(RunEvent::StageFinished {
                    stage: stage.name.clone(),
                    outcome: finished,
                    duration_s,
                    rows: record.rows,
                });
                self.active.remove(&index);
                self.done(index, record.outputs);
            }
            Err(failure) => {
                let (attempt, again) = (active.attempt, active.attempt <= stage.retry.attempts);
                if again && !failure.permanent && *self.stop.borrow() == Stop::Go {
                    let wait = backoff(&stage.retry, attempt);
                    let message = failure.message;
                    self.tell(RunEvent::StageRetry { stage: stage.name.clone(), message, wait_s: wait.as_secs_f64() });
                    self.wait_and_try_again(index, wait);
                    return Ok(());
                }
                self.keep_log(index, false).await;
                self.fail(index, failure);
            }
        }
        Ok(())
    }

    fn wait_and_try_again(&mut self, index: usize, wait: Duration) {
        let (messages, mut stop) = (self.messages.clone(), self.stop.subscribe());
        // As a job, so that the run does not end meanwhile.
        self.jobs.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(wait) => {
                    let _ = messages.send(Message::Again(index));
                    (NO_STAGE, Err(Failure::cancelled()))
                }
                _ = stop.changed() => (index, Err(Failure::cancelled())),
            }
        });
    }

    /// Waiting for others takes as long as it takes; looking again at once should help the first time.
    fn may_look_again(&mut self, index: usize, leases: &[String]) -> bool {
        const OFTEN: u32 = 3;
        let times = self.looked_again.entry(index).or_default();
        *times += u32::from(leases.is_empty());
        *times <= OFTEN
    }

    /// Makes what a stage reads once more, where another stage made it and it is gone; once a run.
    async fn redo_producer(&mut self, index: usize, blob: &Digest) -> Result<bool, StoreError> {
        let store = self.engine.store.clone();
        let mut maker = None;
        for producer in crate::plan::producers(self.stage(index)) {
            for artifact in self.outputs[producer].iter().flat_map(|outputs| outputs.values()) {
                // Where not even a tree's list is there, its blob is the one that is missed.
                let blobs = store.blobs_of(artifact).await.ok().flatten().unwrap_or_else(|| vec![artifact.blob]);
                if blobs.contains(blob) {
                    maker = Some(producer);
                }
            }
        }
        let Some(producer) = maker else { return Ok(false) };
        let is_done = self.scheduler.state(producer) == State::Done;
        if is_done && !self.redone.insert(producer) {
            return Ok(false);
        }
        let name = self.stage(producer).name.clone();
        if let Some(key) = self.manifest.stages.get(&name).and_then(|entry| entry.key) {
            store.distrust(&key).await?;
        }
        if is_done {
            let message = format!("what it made is gone from the store (blob {}); making it again", blob.short());
            self.tell(RunEvent::Message { stage: name, level: "warning".into(), message });
        }
        self.in_flight.remove(index);
        self.active.remove(&index);
        self.scheduler.redo(producer, index);
        Ok(true)
    }

    /// Other runs are making what this stage would: look again when one of them has ended its part.
    fn wait_for_others(&mut self, index: usize, leases: Vec<String>) {
        self.in_flight.remove(index);
        let Some(active) = self.active.remove(&index) else { return };
        let key = active.resolved.key;
        self.scheduler.park(index);
        let (context, messages, mut stop) = (self.context.clone(), self.messages.clone(), self.stop.subscribe());
        let patience = match context.store.far() {
            Some(_) => Duration::from_secs(2),
            None => Duration::from_millis(200),
        };
        // As a job, so that the run does not end meanwhile.
        self.jobs.spawn(async move {
            let free = async {
                'free: while !leases.is_empty() {
                    tokio::time::sleep(patience).await;
                    context.claimant.observer.bury(work::dead(&context.folders.work));
                    for lease in &leases {
                        // While the store is away nobody can be seen to end.
                        if let Ok(None) = context.store.leased_by(lease, &context.claimant.observer).await {
                            break 'free;
                        }
                    }
                }
            };
            tokio::select! {
                () = free => {
                    let _ = messages.send(Message::LookAgain(index, key));
                    (NO_STAGE, Err(Failure::cancelled()))
                }
                _ = stop.changed() => (index, Err(Failure::cancelled())),
            }
        });
    }

    fn done(&mut self, index: usize, outputs: Outputs) {
        self.outputs[index] = Some(outputs);
        self.scheduler.finish(index, true);
        self.release_parked(index);
    }

    fn release_parked(&mut self, index: usize) {
        self.in_flight.remove(index);
        for parked in self.parked.remove(&index).unwrap_or_default() {
            self.scheduler.unpark(parked);
        }
    }

    fn fail(&mut self, index: usize, failure: Failure) {
        let cancelled = failure.cancelled;
        let stage = self.stage(index);
        let active = self.active.remove(&index);
        let ids = active.as_ref().map(Active::ids);
        let duration_s = active.as_ref().map_or(0.0, |active| active.started.elapsed().as_secs_f64());
        let attempted = active.as_ref().filter(|active| !failure.cancelled && active.attempt > 0);
        let folder = attempted.map(|active| attempt_folder(&self.context, stage, active.attempt));
        if let Some(folder) = &folder {
            self.kept.extend(folder.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
        let log = active.and_then(|active| active.log);
        let log_tail = log.map(|log| log.lock().expect("no panic happens under this lock").last_lines(LOG_TAIL));
        let outcome = if failure.cancelled {
            self.enter(index, ids, "cancelled", None);
            StageOutcome::Cancelled
        } else {
            self.enter(index, ids, "failed", Some(failure.message.clone()));
            self.enter_work(index, duration_s, None);
            StageOutcome::Failed {
                message: failure.message.clone(),
                hint: failure.hint.clone(),
                log_tail: log_tail.unwrap_or_default(),
                folder: folder.filter(|folder| folder.is_dir()),
            }
        };
        self.tell(RunEvent::StageFinished { stage: stage.name.clone(), outcome, duration_s, rows: None });
        if !failure.cancelled {
            self.report.failed.insert(stage.name.clone(), failure);
        }
        for skipped in self.scheduler.finish(index, false) {
            if cancelled {
                // Nothing failed; it would have come next.
                continue;
            }
            self.enter(skipped, None, "skipped", None);
            let name = self.stage(skipped).name.clone();
            let outcome = StageOutcome::Skipped { because: stage.name.clone() };
            self.tell(RunEvent::StageFinished { stage: name, outcome, duration_s: 0.0, rows: None });
        }
        self.release_parked(index);
    }

    /// Keeps what a stage printed, unless it printed nothing.
    async fn keep_log(&mut self, index: usize, succeeded: bool) {
        let stage = self.stage(index);
        let Some(log) = self.active.get(&index).and_then(|active| active.log.clone()) else { return };
        let empty = {
            let mut log = log.lock().expect("no panic happens under this lock");
            log.flush();
            log.is_empty()
        };
        let file = live_log(&self.context.folders, &self.context.run, &stage.name);
        let bytes = std::fs::read(&file).unwrap_or_default();
        let _ = std::fs::remove_file(&file);
        if empty && succeeded {
            return;
        }
        let name = format!("{}.log", file_name(&stage.name));
        if let Err(error) = self.engine.store.nearby().put_log(&self.context.run, &name, bytes.into()).await {
            let message = format!("its log could not be kept: {error}");
            self.tell(RunEvent::Message { stage: stage.name.clone(), level: "warning".into(), message });
        }
        let (store, run) = (self.engine.store.clone(), self.context.run.clone());
        self.in_background(async move { store.share_log(&run, &name).await.map_err(Failure::from) });
    }

    /// What takes requests to a far store and nothing waits for is a job of its own: the loop must hear who interrupts it.
    fn in_background(&mut self, work: impl Future<Output = Result<(), Failure>> + Send + 'static) {
        if self.engine.store.far().is_some() {
            self.jobs.spawn(async move { (NO_STAGE, work.await.and(Err(Failure::cancelled()))) });
        }
    }

    fn enter(&mut self, index: usize, ids: Option<Ids>, outcome: &str, message: Option<String>) {
        let (key, base) = (ids.map(|(key, _)| key), ids.and_then(|(_, base)| base));
        let place = Some(self.places[index]);
        let entry = StageEntry { key, base, outcome: outcome.into(), message, place, ..StageEntry::default() };
        self.manifest.stages.insert(self.stage(index).name.clone(), entry);
    }

    /// What is said of the rows of a stage that was just entered.
    fn enter_rows(&mut self, index: usize, rows: Option<RowCounts>) {
        if let Some(entry) = self.manifest.stages.get_mut(&self.stage(index).name) {
            entry.rows = rows;
        }
    }

    /// How long a stage that was just entered took, and how it came by its rows.
    fn enter_work(&mut self, index: usize, duration_s: f64, rows: Option<RowCounts>) {
        if let Some(entry) = self.manifest.stages.get_mut(&self.stage(index).name) {
            (entry.duration_s, entry.rows) = (Some((duration_s * 1e3).round() / 1e3), rows);
        }
    }

    /// Before the first program: the manifest is in the store before anything else is written (gc reads it), and this
    /// run's work folder is marked as alive.
    async fn record_once(&mut self) -> Result<(), StoreError> {
        if self.recorded {
            return Ok(());
        }
        self.context.claimant.observer.bury(work::dead(&self.context.folders.work));
        self.alive = work::claim(&self.context.folders.work, &self.context.run);
        self.record_run("running").await
    }

    /// A store that is away for a moment costs a sign of life, not the run.
    async fn sign_of_life(&mut self) {
        self.manifest.heartbeat_at = crate::now();
        self.recorded = true;
        let (store, manifest) = (self.engine.store.clone(), self.manifest.clone());
        if store.far().is_some() {
            self.in_background(async move { store.put_run(&manifest).await.map_err(Failure::from) });
        } else if let Err(error) = store.put_run(&manifest).await {
            let (stage, level) = (String::from("run"), String::from("warning"));
            self.tell(RunEvent::Message { stage, level, message: error.to_string() });
        }
    }

    async fn record_run(&mut self, outcome: &str) -> Result<(), StoreError> {
        self.manifest.heartbeat_at = crate::now();
        self.manifest.outcome = outcome.into();
        self.recorded = true;
        self.engine.store.put_run(&self.manifest).await
    }

    /// Tries once more to share what could not be shared when it was made, and leaves a hint to the next run.
    async fn share_the_rest(&mut self) {
        let store = &self.engine.store;
        let Some(far) = store.far() else { return };
        if self.report.outcome != RunOutcome::Interrupted {
            for key in far.unshared().into_keys() {
                if let Ok((generation, Some(record))) = store.nearby().newest(&key).await {
                    let _ = store.offer(record, generation).await;
                }
                // The same would be said of the others.
                if far.unshared().contains_key(&key) {
                    break;
                }
            }
        }
        if self.report.outcome == RunOutcome::Done && far.unshared().is_empty() {
            let entries = self.manifest.stages.iter();
            let stages: Vec<_> = entries.filter_map(|(name, entry)| Some((name.clone(), entry.key?))).collect();
            if let Err(error) = self.planner.leave_hint(&self.context.run, stages.into_iter()).await {
                far.trouble(error.to_string());
            }
        }
        far.write_known();
        self.tell_troubles();
    }

    async fn end(&mut self) -> Result<(), StoreError> {
        let count = self.engine.pipeline.stages.len();
        for index in (0..count).filter(|index| self.engine.selected[*index]) {
            let name = &self.stage(index).name;
            match self.manifest.stages.get_mut(name) {
                None => self.enter(index, None, "waiting", None),
                // It was ended before it could say anything.
                Some(entry) if entry.outcome == "running" => entry.outcome = "cancelled".into(),
                Some(_) => {}
            }
        }
        self.manifest.ended_at = Some(crate::now());
        let mut recorded = self.record_run(self.report.outcome.name()).await;
        if let Err(error) = &recorded
            && self.report.executed.is_empty()
        {
            // A run that made nothing needs no store that can be written to.
            let (stage, level) = (String::from("run"), String::from("warning"));
            self.tell(RunEvent::Message { stage, level, message: format!("the run is not recorded: {error}") });
            recorded = Ok(());
        }
        if let Some(alive) = self.alive.take() {
            work::release(alive, &self.context.folders.work, &self.context.run, &self.kept);
        }
        let skipped = (0..count).filter(|index| self.scheduler.state(*index) == State::Skipped).count();
        self.tell(RunEvent::RunFinished {
            outcome: self.report.outcome,
            duration_s: self.started.elapsed().as_secs_f64(),
            hits: self.report.hits,
            executed: self.report.executed.len(),
            failed: self.report.failed.len(),
            skipped,
        });
        recorded
    }
}

impl Active {
    fn ids(&self) -> Ids {
        (self.resolved.key, self.resolved.base)
    }

    fn new(resolved: Resolved, reasons: Vec<MissReason>, generation: u32) -> Self {
        Self { resolved, reasons, generation, attempt: 0, started: Instant::now(), widen: None, log: None }
    }
}

/// The place of each stage in an order.
fn places(order: &[usize]) -> Vec<u32> {
    let mut places = vec![0; order.len()];
    (0u32..).zip(order).for_each(|(place, index)| places[*index] = place);
    places
}

fn backoff(retry: &Retry, attempt: u32) -> Duration {
    retry.backoff.saturating_mul(1 << attempt.saturating_sub(1).min(20)).min(retry.max_backoff)
}

/// Seconds for people, whatever somebody wrote into a manifest: more than a duration holds are the most that it holds.
pub fn seconds_of(count: f64) -> String {
    seconds(Duration::try_from_secs_f64(count.max(0.0)).unwrap_or(Duration::MAX))
}

/// A time for people.
pub fn seconds(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    match seconds {
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_seconds_can_be_told() {
        assert_eq!([seconds_of(1.5), seconds_of(-3.0), seconds_of(f64::NAN)], ["1.5 s", "0.0 s", "0.0 s"]);
        assert!(seconds_of(1e300).ends_with(" h") && seconds_of(f64::INFINITY).ends_with(" h"));
    }
}
