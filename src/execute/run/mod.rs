//! A run: the loop that asks the scheduler what may start, starts it, and takes notice of what ends.
//!
//! The scheduler decides and starts nothing; stages run as jobs (tasks of their own) and talk to the loop by messages, so
//! the state of a run has one owner and needs no lock. The other files add to [`Run`]: `lookup.rs` what the store is asked,
//! `start.rs` how an attempt begins, `ended.rs` what follows its end, `stored.rs` what goes to the store beside results.

mod active;
mod ended;
mod job_end;
mod lookup;
mod record;
mod start;
mod stored;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::stream::StreamExt;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::engine::{Engine, Report, StageOutputs};
use super::executor::Executors;
use super::job::Context;
use super::launch::{GRACE, Stop};
use super::report::Message;
use super::spare::SpareFolders;
use super::stage_id::StageId;
use crate::event::{RunEvent, RunOutcome, Subscriber};
use crate::plan::{Outputs, PlanError};
use crate::schedule::{self, Scheduler, State, Step};
use crate::spec::Stage;
use crate::store::StageState;
use crate::store::lease::{Claimant, Holder};
use active::{Active, InFlight};
use job_end::JobEnd;
use lookup::Lookups;
use record::RunRecord;

/// How often it is reported how far the reading of large inputs has come.
const READING: Duration = Duration::from_secs(5);
/// How often a run records that it goes on.
const HEARTBEAT: Duration = Duration::from_secs(20);
/// How long an interrupted run waits for what cannot be interrupted.
const GRACE_OF_KILL: Duration = Duration::from_secs(2);

/// A run while it goes on.
struct Run<'e, 'a> {
    engine: &'e Engine<'a>,
    executors: Executors,
    context: Arc<Context>,
    scheduler: Scheduler,
    lookups: Lookups<'e>,
    /// Of the stages that are done.
    outputs: Vec<Option<Outputs>>,
    active: HashMap<StageId, Active>,
    in_flight: InFlight,
    jobs: JoinSet<JobEnd>,
    messages: mpsc::UnboundedSender<Message>,
    inbox: mpsc::UnboundedReceiver<Message>,
    signals: Signals,
    record: RunRecord,
    subscribers: &'e mut [&'e mut dyn Subscriber],
    report: Report,
    started: Instant,
}

/// What the loop signals to all jobs.
struct Signals {
    /// Whether to go on.
    stop: watch::Sender<Stop>,
    /// Whether stages wait for resources.
    wanted: watch::Sender<bool>,
    /// When an interrupted run ends whatever still runs.
    kill_at: Option<tokio::time::Instant>,
}

impl Engine<'_> {
    /// Runs the selected stages. `interrupts` gets a message when the user wants it to end, and one more when they insist.
    pub async fn run<'e>(
        &'e self,
        subscribers: &'e mut [&'e mut dyn Subscriber],
        interrupts: mpsc::UnboundedReceiver<()>,
    ) -> Result<Report, PlanError> {
        let run = crate::run_id();
        let (messages, inbox) = mpsc::unbounded_channel();
        let report = Report {
            run: run.clone(),
            outcome: RunOutcome::Done,
            outputs: StageOutputs::new(self.pipeline.clone(), Vec::new()),
            executed: Vec::new(),
            hits: 0,
            failed: BTreeMap::new(),
            failures: BTreeMap::new(),
            manifest: None,
        };
        let executors = self.executors();
        let run = Run {
            engine: self,
            context: Arc::new(self.context(&run)),
            scheduler: self.scheduler(&executors),
            executors,
            lookups: Lookups::new(self.planner()),
            outputs: vec![None; self.pipeline.stages.len()],
            active: HashMap::new(),
            in_flight: InFlight::default(),
            jobs: JoinSet::new(),
            messages,
            inbox,
            signals: Signals { stop: watch::Sender::new(Stop::Go), wanted: watch::Sender::new(false), kill_at: None },
            record: RunRecord::new(self, run),
            subscribers,
            report,
            started: Instant::now(),
        };
        run.execute(interrupts).await
    }

    fn context(&self, run: &str) -> Context {
        Context {
            run: run.to_owned(),
            pipeline: self.pipeline.clone(),
            store: self.store.clone(),
            folders: self.folders.clone(),
            python: self.host.python.clone(),
            gpus: self.host.gpus.iter().map(|gpu| gpu.id.clone()).collect(),
            launcher: self.launcher.clone(),
            claimant: Claimant::new(Holder::this(run)),
            programs: self.pools().cpus.max(self.host.gpus.len() as u32),
            sample: self.sample,
            passes: Mutex::default(),
            refreshes: Mutex::default(),
            spare: SpareFolders::default(),
        }
    }
}

impl<'e, 'a> Run<'e, 'a> {
    fn stage(&self, id: StageId) -> &'e Stage {
        &self.engine.pipeline.stages[id.0]
    }

    fn emit(&mut self, event: RunEvent) {
        self.subscribers.iter_mut().for_each(|subscriber| subscriber.notice(&event));
    }

    fn warn(&mut self, about: &str, message: String) {
        self.emit(RunEvent::Message { stage: about.into(), level: "warning".into(), message });
    }

    fn goes_on(&self) -> bool {
        *self.signals.stop.borrow() == Stop::Go
    }

    async fn execute(mut self, mut interrupts: mpsc::UnboundedReceiver<()>) -> Result<Report, PlanError> {
        self.emit(RunEvent::RunStarted {
            run: self.context.run.clone(),
            pipeline: self.engine.pipeline.name.clone(),
            stages: self.engine.selected.iter().filter(|chosen| **chosen).count(),
            store: self.engine.store.url().to_owned(),
        });
        let outcome = match self.find_hits(&mut interrupts).await {
            Ok(()) => self.event_loop(&mut interrupts).await,
            Err(error) => Err(error),
        };
        self.lookups.planner.save();
        // An error of planning or of the store ends the run, but not without a word in its manifest.
        self.report.outcome = match (&outcome, *self.signals.stop.borrow()) {
            (_, Stop::Terminate | Stop::Kill) => RunOutcome::Interrupted,
            (Err(_), _) => RunOutcome::Failed,
            (Ok(()), Stop::Go) if self.report.failed.is_empty() => RunOutcome::Done,
            (Ok(()), Stop::Go) => RunOutcome::Failed,
        };
        // One that blocks ends with the process.
        let _ = tokio::time::timeout(GRACE_OF_KILL, self.jobs.shutdown()).await;
        self.share_the_rest().await;
        self.report.outputs = StageOutputs::new(self.engine.pipeline.clone(), std::mem::take(&mut self.outputs));
        // What could not even be planned leaves no trace.
        if outcome.is_ok() || self.record.is_recorded() {
            self.close().await?;
        }
        outcome?;
        Ok(Report { manifest: Some(self.record.into_manifest()), ..self.report })
    }

    async fn event_loop(&mut self, interrupts: &mut mpsc::UnboundedReceiver<()>) -> Result<(), PlanError> {
        let mut heartbeat = tokio::time::interval(HEARTBEAT);
        heartbeat.tick().await;
        let mut reading = tokio::time::interval(READING);
        loop {
            while let Some(step) = self.scheduler.next_step() {
                self.take_step(step).await?;
                // Ctrl-C must be heard even while ten thousand stages are looked up.
                if interrupts.try_recv().is_ok() {
                    self.interrupt();
                }
            }
            let is_short = self.scheduler.is_short();
            self.signals.wanted.send_if_modified(|wanted| std::mem::replace(wanted, is_short) != is_short);
            if self.jobs.is_empty() && (!self.goes_on() || self.scheduler.is_done()) {
                break;
            }
            let busy = !self.jobs.is_empty() || !self.lookups.running.is_empty();
            assert!(busy, "a stage waits for what nobody will give back");
            tokio::select! {
                // The stop signal comes before messages, so that a job that sends many cannot delay it.
                biased;
                Some(()) = interrupts.recv() => self.interrupt(),
                () = until(self.signals.kill_at), if self.signals.kill_at.is_some() => {
                    self.jobs.abort_all();
                    break;
                }
                Some(ended) = self.jobs.join_next() => {
                    let end = ended.expect("jobs do not panic");
                    self.receive_all();
                    self.job_ended(end).await?;
                    self.report_store_warnings();
                }
                Some((id, plan)) = self.lookups.running.next() => {
                    self.report_store_warnings();
                    self.looked_up(id, plan)?;
                }
                _ = reading.tick() => self.report_reading(),
                _ = heartbeat.tick() => {
                    self.heartbeat().await;
                    self.report_store_warnings();
                }
                Some(message) = self.inbox.recv() => self.receive(message),
            }
        }
        self.receive_all();
        Ok(())
    }

    async fn take_step(&mut self, step: Step) -> Result<(), PlanError> {
        match step {
            Step::Look(index) => self.look_up(StageId(index)).await,
            Step::Start(index, grant) => {
                let id = StageId(index);
                // Where the run is killed, gc must know what it had begun: rows that are done are kept.
                let keys = self.active.get(&id).map(Active::keys);
                self.record.set_outcome(id, keys, StageState::Running, None);
                self.record_once().await?;
                self.start(id, grant);
                Ok(())
            }
            Step::Widen(index, grant) => {
                let widen = self.active.get(&StageId(index)).and_then(|active| active.widen.as_ref());
                let refused = match widen {
                    Some(widen) => widen.send(grant).err().map(|error| error.0),
                    None => Some(grant),
                };
                if let Some(grant) = refused {
                    self.scheduler.give_back(&grant);
                }
                Ok(())
            }
        }
    }

    fn receive_all(&mut self) {
        while let Ok(message) = self.inbox.try_recv() {
            self.receive(message);
        }
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Event(event) => self.emit(event),
            Message::GiveBack(grant) => self.scheduler.give_back(&grant),
            Message::Widen(id, more) => self.scheduler.widen(id.0, more),
        }
    }

    fn interrupt(&mut self) {
        let stop = if self.goes_on() { Stop::Terminate } else { Stop::Kill };
        let patience = if stop == Stop::Kill { GRACE_OF_KILL } else { GRACE + GRACE_OF_KILL };
        self.signals.kill_at = Some(tokio::time::Instant::now() + patience);
        self.signals.stop.send_replace(stop);
        self.scheduler.close();
    }

    /// Shows how far the reading of large inputs is. A store that does not answer is reported by whoever owns its pulse.
    fn report_reading(&mut self) {
        const LARGE: u64 = 256 << 20;
        let reading = self.lookups.planner.reading().into_iter();
        let large = reading.filter(|(_, done, total)| *done > 0 && *total >= LARGE);
        for (path, done, total) in large.collect::<Vec<_>>() {
            let (done, total) = (schedule::bytes(done), schedule::bytes(total));
            let message = format!("reading {} for its digest: {done} of {total}", path.display());
            self.emit(RunEvent::Message { stage: "inputs".into(), level: "info".into(), message });
        }
    }

    /// Shows what went wrong with the shared store without a stage failing of it.
    fn report_store_warnings(&mut self) {
        for message in self.engine.store.take_warnings() {
            self.warn("store", message);
        }
    }

    /// Ends the run: its manifest is complete, its work folder goes.
    async fn close(&mut self) -> Result<(), PlanError> {
        self.record.close(&self.engine.selected);
        let mut recorded = self.record.write(&self.engine.store, self.report.outcome.into()).await;
        if let Err(error) = &recorded
            && self.report.executed.is_empty()
        {
            // A run that made nothing needs no store that can be written to.
            self.warn("run", format!("the run is not recorded: {error}"));
            recorded = Ok(());
        }
        self.record.release_folder(&self.context.folders.work);
        let count = self.engine.pipeline.stages.len();
        let skipped = (0..count).filter(|index| self.scheduler.state(*index) == State::Skipped).count();
        self.emit(RunEvent::RunFinished {
            outcome: self.report.outcome,
            duration_s: self.started.elapsed().as_secs_f64(),
            hits: self.report.hits,
            executed: self.report.executed.len(),
            failed: self.report.failed.len(),
            skipped,
        });
        Ok(recorded?)
    }
}

async fn until(instant: Option<tokio::time::Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}
