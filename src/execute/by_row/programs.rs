//! What feeds: the running programs of a stage, each of which gets one row after another.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cuda_agent_protocol::{Event, ResourceGrant, RowInput};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use tokio::sync::{mpsc, watch};

use super::suspects::Suspects;
use super::todo::Todo;
use crate::execute::attempt;
use crate::execute::failure::Failure;
use crate::execute::job::Job;
use crate::execute::launch::{Channels, EVENTS, Exit, Stop};
use crate::key::row_seed;
use crate::rows::InputRows;

/// A program, by the order in which programs of an attempt were started.
pub type ProgramId = u32;
/// An event of a program; a line of its events that is none is an `Err`.
pub type ProgramEvent = (ProgramId, Result<Event, String>);

/// A running program.
pub struct Worker {
    /// Its own folder.
    pub folder: PathBuf,
    /// What it may use.
    pub grant: ResourceGrant,
    rows: Option<mpsc::Sender<RowInput>>,
    in_flight: Vec<(usize, Instant)>,
    stop: watch::Sender<Stop>,
    /// Whether it was given one row and nothing else.
    pub is_alone: bool,
    answered: u64,
    /// When it last answered, or started.
    heard_at: Instant,
    /// Whether it was killed for a row that took too long.
    pub is_overdue: bool,
}

impl Worker {
    /// Rows that it has and has not answered.
    pub fn unanswered(&self) -> Vec<usize> {
        self.in_flight.iter().map(|(row, _)| *row).collect()
    }

    /// Takes notice of an answer; `false` where it was not given that row.
    pub fn answer(&mut self, row: Option<usize>) -> bool {
        let Some(place) = self.in_flight.iter().position(|(in_flight, _)| Some(*in_flight) == row) else {
            return false;
        };
        self.in_flight.remove(place);
        self.answered += 1;
        self.heard_at = Instant::now();
        true
    }

    fn stop(&self, stop: Stop) {
        // One that is gone ends by itself.
        let _ = self.stop.send(stop);
    }

    fn takes_longer_than(&self, limit: Duration) -> bool {
        // A row that waits behind others has not been taking long.
        let begun = |since: &Instant| (*since).max(self.heard_at);
        self.in_flight.iter().any(|(_, since)| begun(since).elapsed() > limit)
    }
}

/// The running programs of one attempt.
pub struct Programs {
    folder: PathBuf,
    /// How many rows a program may have unanswered.
    window: usize,
    workers: BTreeMap<ProgramId, Worker>,
    /// Completes with a program that has ended.
    pub ends: FuturesUnordered<BoxFuture<'static, (ProgramId, Exit)>>,
    events: mpsc::Sender<ProgramEvent>,
    /// What all of them report. Events of a program come before its end.
    pub heard: mpsc::Receiver<ProgramEvent>,
    started: ProgramId,
}

impl Programs {
    /// None yet; each will have a folder below `folder`.
    pub fn new(folder: PathBuf, window: usize) -> Self {
        let (events, heard) = mpsc::channel(EVENTS);
        let ends = FuturesUnordered::new();
        Self { folder, window, workers: BTreeMap::new(), ends, events, heard, started: 0 }
    }

    /// How many run.
    pub fn count(&self) -> usize {
        self.workers.len()
    }

    /// How many rows a program may have unanswered.
    pub fn window(&self) -> usize {
        self.window
    }

    /// Those that run, the oldest first.
    pub fn ids(&self) -> Vec<ProgramId> {
        self.workers.keys().copied().collect()
    }

    /// One that runs.
    pub fn get_mut(&mut self, id: ProgramId) -> Option<&mut Worker> {
        self.workers.get_mut(&id)
    }

    /// Takes out one that has ended.
    pub fn remove(&mut self, id: ProgramId) -> Option<Worker> {
        self.workers.remove(&id)
    }

    /// Starts one, of a stage that has `total` rows to do. Where it cannot be started, what it was to use is given back.
    pub async fn start(
        &mut self,
        job: &Job,
        grant: ResourceGrant,
        total: u64,
        deadline_unix_s: Option<f64>,
    ) -> Result<ProgramId, Failure> {
        let id = self.started;
        self.started += 1;
        let folder = self.folder.join(format!("program-{id}"));
        let prepared = match attempt::prepare(job, &folder, &grant, Some(total), deadline_unix_s).await {
            Ok(prepared) => prepared,
            Err(failure) => {
                job.give_back(grant);
                return Err(failure);
            }
        };
        let (rows, fed) = mpsc::channel(self.window.max(1));
        let (stop, stopped) = watch::channel(Stop::Go);
        let (events, heard) = mpsc::channel(EVENTS);
        let channels = Channels { events, rows: Some(fed), log: job.log.clone(), stop: stopped };
        let running = job.context.launcher.launch(prepared.launch, channels);
        self.ends.push(ended(id, running, heard, self.events.clone()).boxed());
        let worker = Worker {
            folder,
            grant,
            rows: Some(rows),
            in_flight: Vec::new(),
            stop,
            is_alone: false,
            answered: 0,
            heard_at: Instant::now(),
            is_overdue: false,
        };
        self.workers.insert(id, worker);
        Ok(id)
    }

    /// Gives a program what it can take; without more to do, the end of its input. Where others `want` what it has, it gets
    /// nothing more, unless it is the oldest, which goes on alone.
    pub fn feed(
        &mut self,
        id: ProgramId,
        (seed, is_wanted): (i64, bool),
        input: &InputRows,
        todo: &mut Todo,
        suspects: &mut Suspects,
    ) {
        let window = self.window;
        let is_spare = is_wanted && self.workers.keys().next() != Some(&id);
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let Some(sender) = worker.rows.clone() else { return };
        if worker.in_flight.is_empty() {
            worker.is_alone = false;
        }
        if is_spare && worker.answered > 0 {
            if worker.in_flight.is_empty() {
                worker.rows = None;
            }
            return;
        }
        while !worker.is_alone && worker.in_flight.len() < window {
            let row = match todo.next() {
                Some(row) => row,
                None if worker.in_flight.is_empty() => match suspects.next() {
                    Some(row) => {
                        worker.is_alone = true;
                        row
                    }
                    None => break,
                },
                None => break,
            };
            let digest = input.digests[row];
            let values =
                RowInput { row: digest.to_string(), seed: row_seed(seed, &digest), columns: input.values(row) };
            worker.in_flight.push((row, Instant::now()));
            // The channel holds a whole window, so this never waits; a program that is gone ends by itself.
            let _ = sender.try_send(values);
        }
        if worker.in_flight.is_empty() && !todo.may_grow() {
            worker.rows = None;
        }
    }

    /// Stops all of them.
    pub fn stop(&self, stop: Stop) {
        self.workers.values().for_each(|worker| worker.stop(stop));
    }

    /// Kills those that have been at a row for longer than `limit`.
    pub fn kill_overdue(&mut self, limit: Duration) {
        for worker in self.workers.values_mut() {
            if !worker.is_overdue && worker.takes_longer_than(limit) {
                worker.is_overdue = true;
                worker.stop(Stop::Kill);
            }
        }
    }

    /// Kills what still runs, and waits a moment for it: a GPU is not free while its last program dies. What they had.
    pub async fn dismiss(&mut self) -> Vec<ResourceGrant> {
        use futures::StreamExt;
        self.stop(Stop::Kill);
        self.heard.close();
        let all = async { while self.ends.next().await.is_some() {} };
        let _ = tokio::time::timeout(Duration::from_secs(2), all).await;
        self.ends.clear();
        std::mem::take(&mut self.workers).into_values().map(|worker| worker.grant).collect()
    }
}

/// The end of a program, after the last of its events was passed on: no answer is lost when it dies.
fn ended(
    id: ProgramId,
    running: BoxFuture<'static, Exit>,
    mut heard: mpsc::Receiver<Result<Event, String>>,
    all: mpsc::Sender<ProgramEvent>,
) -> impl Future<Output = (ProgramId, Exit)> + Send + 'static {
    let running = async move {
        let forward = async {
            while let Some(event) = heard.recv().await {
                if all.send((id, event)).await.is_err() {
                    break;
                }
            }
        };
        // The program's end closes its channel, so the forwarding ends too.
        let (exit, ()) = futures::join!(running, forward);
        (id, exit)
    };
    // A task of its own: it must go on while this one is busy, and it dies with this one.
    let mut task = tokio::task::JoinSet::new();
    task.spawn(running);
    async move {
        match task.join_next().await {
            Some(Ok(ended)) => ended,
            _ => (id, Exit::NotStarted("its task was ended".into())),
        }
    }
}
