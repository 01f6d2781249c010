//! The programs of a by-row stage: each is fed one row after another, and every answer is kept as it comes.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cuda_agent_protocol::{Event, ResourceGrant, RowInput, RowResult, RowStatus};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;

use super::claims::Claims;
use super::{FLUSH_BYTES, latest};
use crate::digest::Digest;
use crate::execute::launch::{Channels, EVENTS, Exit, Stop};
use crate::execute::{Failure, Job, Message, attempt, log, stage, supervise};
use crate::key::row_seed;
use crate::rows::index::Place;
use crate::rows::journal::Journal;
use crate::rows::{InputRows, RowOutcome, SegmentSchema, segment};

/// Answers are published at least so often.
const FLUSH_AFTER: Duration = Duration::from_secs(60);
/// Rows are claimed ahead for so long, by the pace so far.
const AHEAD: Duration = Duration::from_secs(5);
/// Programs that die one after another without any row being answered: then it is not the rows.
const DEATHS: u32 = 3;
/// How many rows a message names.
const NAMED: usize = 3;

/// A running program.
struct Worker {
    folder: PathBuf,
    grant: ResourceGrant,
    rows: Option<mpsc::Sender<RowInput>>,
    in_flight: Vec<(usize, Instant)>,
    stop: tokio::sync::watch::Sender<Stop>,
    alone: bool,
    answered: u64,
    /// When it last answered, or started.
    heard_at: Instant,
    overdue: bool,
}

/// What runs of a stage's programs.
pub struct Driver<'a> {
    job: &'a mut Job,
    rows: &'a InputRows,
    schema: &'a SegmentSchema,
    base: Digest,
    epoch: u32,
    folder: PathBuf,
    claims: Claims,
    by_digest: HashMap<String, usize>,
    todo: VecDeque<usize>,
    /// How many rows a program may have unanswered.
    window: usize,
    suspects: VecDeque<usize>,
    suspected: HashSet<usize>,
    /// Rows that killed a program twice.
    condemned: Vec<RowResult>,
    /// A row that a program has done; it is tried again before anything is rejected.
    control: Option<usize>,
    control_sought: bool,
    control_runs: bool,
    control_passed: bool,
    total: u64,
    answered: u64,
    failed: Vec<RowResult>,
    waiting: Vec<RowResult>,
    waiting_bytes: usize,
    flushed_at: Instant,
    begun: Instant,
    journal: Option<Journal>,
    metrics: BTreeMap<String, f64>,
    workers: BTreeMap<u32, Worker>,
    running: FuturesUnordered<BoxFuture<'static, (u32, Exit)>>,
    events: mpsc::Sender<(u32, Result<Event, String>)>,
    heard: mpsc::Receiver<(u32, Result<Event, String>)>,
    started: u32,
    deaths: u32,
    deadline: Option<tokio::time::Instant>,
    deadline_unix_s: Option<f64>,
}

/// What a driver leaves.
pub struct Done {
    /// Rows that a program did.
    pub executed: u64,
    /// Rows that failed from outside causes.
    pub failed: Vec<RowResult>,
    /// What the programs measured.
    pub metrics: BTreeMap<String, f64>,
    /// Leases of parts that others do.
    pub foreign: Vec<String>,
}

impl<'a> Driver<'a> {
    /// For `total` rows that `claims` divides.
    pub fn new(
        job: &'a mut Job,
        rows: &'a InputRows,
        schema: &'a SegmentSchema,
        (base, epoch): (Digest, u32),
        (claims, total): (Claims, u64),
        folder: PathBuf,
    ) -> Result<Self, Failure> {
        let (events, heard) = mpsc::channel(EVENTS);
        let journal = Journal::create(&job.state_folder(), job.context.store.url(), epoch, &job.context.run)?;
        let timeout = job.stage().timeout;
        let cores = job.grant.as_ref().map_or(1, |grant| grant.cpu);
        let window = job.stage().kind.by_row.as_ref().map_or(1, |by_row| by_row.window_of(cores) as usize);
        Ok(Self {
            by_digest: HashMap::new(),
            total,
            deadline: timeout.map(|timeout| tokio::time::Instant::now() + timeout),
            deadline_unix_s: timeout.map(stage::unix_deadline),
            job,
            rows,
            schema,
            base,
            epoch,
            folder,
            claims,
            todo: VecDeque::new(),
            window,
            suspects: VecDeque::new(),
            suspected: HashSet::new(),
            condemned: Vec::new(),
            control: None,
            control_sought: false,
            control_runs: false,
            control_passed: false,
            answered: 0,
            failed: Vec::new(),
            waiting: Vec::new(),
            waiting_bytes: 0,
            flushed_at: Instant::now(),
            begun: Instant::now(),
            journal: Some(journal),
            metrics: BTreeMap::new(),
            workers: BTreeMap::new(),
            running: FuturesUnordered::new(),
            events,
            heard,
            started: 0,
            deaths: 0,
        })
    }

    /// Does the rows; what came of it, and how it ended. Whatever happened, the rows that are done stay done: where they
    /// cannot be published, the journal keeps them.
    pub async fn run(mut self) -> Result<(Done, Result<(), Failure>), Failure> {
        let outcome = self.drive().await;
        self.dismiss().await;
        self.flush().await?;
        let (foreign, held) = self.claims.end();
        self.job.leases.extend(held);
        if let Some(journal) = self.journal.take() {
            journal.remove();
        }
        let executed = self.answered - self.failed.len() as u64;
        Ok((Done { executed, failed: self.failed, metrics: self.metrics, foreign }, outcome))
    }

    fn row_timeout(&self) -> Option<Duration> {
        // More seconds than a duration holds are no limit.
        Duration::try_from_secs_f64(self.job.stage().kind.by_row.as_ref()?.row_timeout_s?).ok()
    }

    /// Runs until every row is answered, or something is wrong with more than a row.
    async fn drive(&mut self) -> Result<(), Failure> {
        self.claim().await;
        if !self.has_work() {
            // Other runs do all of it.
            return Ok(());
        }
        let grant = self.job.grant.take().expect("a stage starts with a grant");
        self.ask_for_more();
        self.start(grant).await?;
        let mut tick = tokio::time::interval(Duration::from_millis(200));
        let mut grants_open = true;
        while !self.workers.is_empty() {
            tokio::select! {
                // Programs that talk without end must not be able to put off clock and Ctrl-C.
                biased;
                _ = self.job.stop.changed() => self.stop_all(),
                _ = tick.tick() => self.look_at_clock().await?,
                Some((worker, exit)) = self.running.next() => self.ended(worker, exit).await?,
                Some((worker, event)) = self.heard.recv() => self.hear(worker, event)?,
                grant = self.job.grants.recv(), if grants_open => match grant {
                    Some(grant) if self.has_work() => self.start(grant).await?,
                    Some(grant) => self.job.send(Message::GiveBack(grant)),
                    None => grants_open = false,
                },
            }
            if !self.claims.is_over() && self.todo.len() < self.enough() / 2 {
                self.claim().await;
                self.workers.keys().copied().collect::<Vec<_>>().into_iter().for_each(|worker| self.feed(worker));
            }
        }
        if *self.job.stop.borrow() != Stop::Go {
            return Err(Failure::cancelled());
        }
        for row in std::mem::take(&mut self.condemned) {
            self.keep(row)?;
        }
        Ok(())
    }

    fn has_work(&self) -> bool {
        !self.todo.is_empty() || !self.suspects.is_empty() || !self.claims.is_over()
    }

    /// How many rows to have at hand: for every program that could run some, and what the pace so far would need.
    fn enough(&self) -> usize {
        let pace = self.answered as f64 / self.begun.elapsed().as_secs_f64().max(0.1);
        let programs = self.workers.len().max(1);
        (self.window * programs * 2).max((pace * AHEAD.as_secs_f64()) as usize)
    }

    /// Claims more rows, so that nobody else does them too.
    async fn claim(&mut self) {
        let context = self.job.context.clone();
        let count = self.enough().saturating_sub(self.todo.len());
        let claimed = self.claims.claim(&context, &self.rows.digests, self.schema, count).await;
        self.total -= claimed.done as u64;
        self.by_digest.extend(claimed.rows.iter().map(|row| (self.rows.digests[*row].to_string(), *row)));
        self.todo.extend(claimed.rows);
    }

    /// How many more programs could be of use.
    fn ask_for_more(&self) {
        let workers = self.job.stage().kind.by_row.as_ref().map_or(0, |by_row| by_row.workers);
        // Programs that need no core are not limited by the cores there are.
        let limit = if workers == 0 { self.job.context.programs } else { workers };
        let rows = self.todo.len() + self.claims.left();
        let useful = (rows / self.window).max(1).min(limit.max(1) as usize) as u32;
        self.job.send(Message::Widen(self.job.index, useful.saturating_sub(1)));
    }

    async fn start(&mut self, grant: ResourceGrant) -> Result<(), Failure> {
        let id = self.started;
        self.started += 1;
        let folder = self.folder.join(format!("program-{id}"));
        let prepared = attempt::prepare(self.job, &folder, &grant, Some(self.total), self.deadline_unix_s).await;
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(failure) => {
                self.job.send(Message::GiveBack(grant));
                return Err(failure);
            }
        };
        let (rows, fed) = mpsc::channel(self.window.max(1));
        let (stop, stopped) = tokio::sync::watch::channel(Stop::Go);
        let (events, mut heard) = mpsc::channel(EVENTS);
        let all = self.events.clone();
        let channels = Channels { events, rows: Some(fed), log: self.job.log.clone(), stop: stopped };
        let running = self.job.context.launcher.launch(prepared.launch, channels);
        // Events of a program come before its end, so that no answer is lost when it dies.
        let running = async move {
            let forward = async {
                while let Some(event) = heard.recv().await {
                    if all.send((id, event)).await.is_err() {
                        break;
                    }
                }
            };
            // The program's end closes its channel, so the forwarding ends too, with the last of its events passed on.
            let (exit, ()) = futures::join!(running, forward);
            (id, exit)
        };
        // A task of its own: it must go on while this one is busy, and it dies with this one.
        let mut task = tokio::task::JoinSet::new();
        task.spawn(running);
        let ended = async move {
            match task.join_next().await {
                Some(Ok(ended)) => ended,
                _ => (id, Exit::NotStarted("its task was ended".into())),
            }
        };
        self.running.push(ended.boxed());
        let worker = Worker {
            folder,
            grant,
            rows: Some(rows),
            in_flight: Vec::new(),
            stop,
            alone: false,
            answered: 0,
            heard_at: Instant::now(),
            overdue: false,
        };
        self.workers.insert(id, worker);
        self.feed(id);
        Ok(())
    }

    /// Gives a program what it can take; without more to do, the end of its input.
    fn feed(&mut self, id: u32) {
        let window = self.window;
        let stage_seed = self.job.seed();
        let spare = *self.job.wanted.borrow() && self.workers.keys().next() != Some(&id);
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let Some(sender) = worker.rows.clone() else { return };
        if worker.in_flight.is_empty() {
            worker.alone = false;
        }
        // Another stage waits for what this program has, and the oldest program goes on alone.
        if spare && worker.answered > 0 {
            if worker.in_flight.is_empty() {
                worker.rows = None;
            }
            return;
        }
        while !worker.alone && worker.in_flight.len() < window {
            let row = match self.todo.pop_front() {
                Some(row) => row,
                None if worker.in_flight.is_empty() => match self.suspects.pop_front() {
                    Some(row) => {
                        worker.alone = true;
                        row
                    }
                    None => break,
                },
                None => break,
            };
            let digest = self.rows.digests[row];
            let seed = row_seed(stage_seed, &digest);
            let input = RowInput { row: digest.to_string(), seed, columns: self.rows.values(row) };
            worker.in_flight.push((row, Instant::now()));
            // The channel holds a whole window, so this never waits; a program that is gone ends by itself.
            let _ = sender.try_send(input);
        }
        // More may be claimed.
        if worker.in_flight.is_empty() && self.claims.is_over() {
            worker.rows = None;
        }
    }

    fn hear(&mut self, id: u32, event: Result<Event, String>) -> Result<(), Failure> {
        let result = match event {
            Ok(Event::Row(result)) => result,
            // Perhaps an answer that nobody will ever get: better to say so than to wait for it.
            Err(error) => {
                let message = format!("a line of its events is not an event: {error}");
                return Err(
                    Failure::permanent(message).with_hint("each answer to a row is one JSON object on one line")
                );
            }
            other => {
                stage::notice(self.job, other, &mut self.metrics);
                return Ok(());
            }
        };
        let Some(worker) = self.workers.get_mut(&id) else { return Ok(()) };
        let row = self.by_digest.get(&result.row).copied();
        let place = worker.in_flight.iter().position(|(in_flight, _)| Some(*in_flight) == row);
        let Some(place) = place else {
            let row = self.rows.named_by(&result.row);
            return Err(Failure::new(format!("the program answered a row that it was not given: {row}")));
        };
        worker.in_flight.remove(place);
        worker.answered += 1;
        worker.heard_at = Instant::now();
        self.deaths = 0;
        if self.control_runs && row == self.control {
            self.control_passed = true;
        } else {
            if result.status == RowStatus::Done {
                self.control = row;
            }
            self.keep(result)?;
        }
        self.feed(id);
        Ok(())
    }

    /// Takes an answer: into the journal first.
    fn keep(&mut self, mut result: RowResult) -> Result<(), Failure> {
        if !self.job.secrets.is_empty() {
            result = self.without_secrets(result)?;
        }
        let wrong = |error| Failure::permanent(format!("{}: {error}", self.rows.named_by(&result.row)));
        self.schema.check(&result).map_err(wrong)?;
        self.answered += 1;
        if let Ok(row) = result.row.parse() {
            self.claims.answered(&row);
        }
        if result.status == RowStatus::Failed {
            self.failed.push(result);
        } else {
            if let Some(journal) = &mut self.journal {
                journal.append(&result)?;
            }
            self.waiting_bytes += serde_json::to_vec(&result.outputs).map_or(0, |bytes| bytes.len());
            self.waiting.push(result);
        }
        self.job.progress(self.answered, Some(self.total), "rows");
        Ok(())
    }

    fn without_secrets(&self, result: RowResult) -> Result<RowResult, Failure> {
        let text = serde_json::to_string(&result).expect("answers are plain data");
        let redactor = log::Redactor::new(&self.job.secret_values());
        if redactor.finds(text.as_bytes()) {
            let row = self.rows.named_by(&result.row);
            return Err(Failure::permanent(format!("{row}: its answer contains the value of a secret")));
        }
        Ok(result)
    }

    async fn ended(&mut self, id: u32, exit: Exit) -> Result<(), Failure> {
        while let Ok((worker, event)) = self.heard.try_recv() {
            self.hear(worker, event)?;
        }
        let Some(worker) = self.workers.remove(&id) else { return Ok(()) };
        let grant = worker.grant.clone();
        let stopping = *self.job.stop.borrow() != Stop::Go;
        let mut judged = Ok(());
        if !stopping && (exit != Exit::Success || !worker.in_flight.is_empty()) {
            judged = self.judge(&worker, &exit).await;
        }
        if judged.is_ok() {
            let _ = std::fs::remove_dir_all(&worker.folder);
            if !stopping && !self.has_work() && self.workers.is_empty() {
                judged = self.ask_control().await;
            }
        }
        let spare = *self.job.wanted.borrow() && !self.workers.is_empty();
        if judged.is_ok() && !stopping && !spare && self.has_work() {
            return self.start(grant).await;
        }
        self.job.send(Message::GiveBack(grant));
        judged
    }

    /// Before rows are rejected for killing programs: does a program still do a row that it did before?
    async fn ask_control(&mut self) -> Result<(), Failure> {
        if self.condemned.is_empty() || self.control_runs {
            return Ok(());
        }
        self.seek_control().await;
        let Some(control) = self.control else {
            let rows = self.condemned.len();
            let why = self.condemned[0].detail.clone().unwrap_or_default();
            let first = self.rows.named_by(&self.condemned[0].row);
            let message = format!("the program died on each of the {rows} rows that it was given ({first}: {why})");
            return Err(Failure::new(message).with_hint(
                "no row was done, so the machine or the program may be at fault: nothing is rejected, and the next run tries again",
            ));
        };
        self.control_runs = true;
        self.suspects.push_back(control);
        Ok(())
    }

    /// Looks for a row that was done in an earlier run, once. One that was rejected proves nothing, and may itself have
    /// been rejected for killing its program.
    async fn seek_control(&mut self) {
        if self.control.is_some() || std::mem::replace(&mut self.control_sought, true) {
            return;
        }
        let store = self.job.context.store.clone();
        let mut outcomes: HashMap<u32, Vec<RowOutcome>> = HashMap::new();
        for (row, digest) in self.rows.digests.iter().enumerate() {
            let Some(Place { segment, row: place }) = self.claims.index().find(digest) else { continue };
            if self.suspected.contains(&row) {
                continue;
            }
            if let std::collections::hash_map::Entry::Vacant(entry) = outcomes.entry(segment) {
                let name = self.claims.index().segments[segment as usize];
                let bytes = store.segment(&self.base, &name).await.ok().flatten();
                let batches = bytes.and_then(|bytes| segment::decode(bytes).ok()).unwrap_or_default();
                entry.insert(batches.iter().flat_map(segment::outcomes).collect());
            }
            if outcomes[&segment].get(place as usize) == Some(&RowOutcome::Done) {
                self.by_digest.insert(digest.to_string(), row);
                self.control = Some(row);
                return;
            }
        }
    }

    /// The rows that a program had, by numbers and values.
    fn named(&self, worker: &Worker) -> String {
        let named = worker.in_flight.iter().take(NAMED).map(|(row, _)| self.rows.named(*row));
        let more = worker.in_flight.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}", named.collect::<Vec<_>>().join(", "))
    }

    /// A program ended that should not have: is it a row's doing?
    async fn judge(&mut self, worker: &Worker, exit: &Exit) -> Result<(), Failure> {
        if let Some(failure) = stage::explained(&worker.folder) {
            if worker.in_flight.is_empty() {
                return Err(failure);
            }
            let message = format!("{} (it had {})", failure.message, self.named(worker));
            return Err(Failure { message, ..failure });
        }
        if *exit == Exit::Success {
            let count = worker.in_flight.len();
            return Err(Failure::permanent(format!(
                "the program ended well, but left {count} rows unanswered: {}",
                self.named(worker)
            )));
        }
        if matches!(exit, Exit::NotStarted(_) | Exit::Code(supervise::CANNOT_START)) {
            return Err(Failure::new(stage::described(exit)));
        }
        if self.control_runs && !self.control_passed {
            let died = stage::described(exit);
            let message = format!("programs now die on rows that they did before: {died} ({})", self.named(worker));
            return Err(Failure::new(message).with_hint("is a GPU lost, or the memory full? Nothing was rejected"));
        }
        self.deaths += 1;
        self.seek_control().await;
        let never_worked = self.control.is_none() && self.deaths > DEATHS + self.workers.len() as u32;
        if never_worked || (worker.in_flight.is_empty() && self.deaths >= DEATHS) {
            let mut message = format!("{} programs died one after another: {}", self.deaths, stage::described(exit));
            if !worker.in_flight.is_empty() {
                message.push_str(&format!(" (the last one had {})", self.named(worker)));
            }
            return Err(Failure::new(message));
        }
        let reason = if worker.overdue { "timeout" } else { "crash" };
        for (row, _) in &worker.in_flight {
            let again = !self.suspected.insert(*row);
            if again && worker.alone {
                let detail = if worker.overdue { "it took too long, twice".to_owned() } else { stage::described(exit) };
                self.condemned.push(RowResult {
                    row: self.rows.digests[*row].to_string(),
                    status: RowStatus::Rejected,
                    reason: Some(reason.into()),
                    detail: Some(detail),
                    outputs: BTreeMap::new(),
                });
            } else {
                self.suspects.push_back(*row);
            }
        }
        Ok(())
    }

    async fn look_at_clock(&mut self) -> Result<(), Failure> {
        if self.waiting_bytes >= FLUSH_BYTES || self.flushed_at.elapsed() >= FLUSH_AFTER {
            self.flush().await?;
        }
        if self.deadline.is_some_and(|deadline| tokio::time::Instant::now() >= deadline) {
            for worker in self.workers.values() {
                let _ = worker.stop.send(Stop::Kill);
            }
            return Err(stage::timed_out(self.job.stage().timeout.unwrap_or_default()));
        }
        let Some(limit) = self.row_timeout() else { return Ok(()) };
        for worker in self.workers.values_mut() {
            // A row that waits behind others has not been taking long.
            let begun = |since: &Instant| (*since).max(worker.heard_at);
            if worker.in_flight.iter().any(|(_, since)| begun(since).elapsed() > limit) && !worker.overdue {
                worker.overdue = true;
                let _ = worker.stop.send(Stop::Kill);
            }
        }
        Ok(())
    }

    fn stop_all(&mut self) {
        let stop = *self.job.stop.borrow_and_update();
        self.todo.clear();
        self.claims.stop();
        self.suspects.clear();
        for worker in self.workers.values_mut() {
            let _ = worker.stop.send(stop);
        }
    }

    /// Ends what still runs after a failure, and waits a moment for it: a GPU is not free while its last program dies.
    async fn dismiss(&mut self) {
        for worker in self.workers.values() {
            let _ = worker.stop.send(Stop::Kill);
        }
        self.heard.close();
        let all = async { while self.running.next().await.is_some() {} };
        let _ = tokio::time::timeout(Duration::from_secs(2), all).await;
        self.running.clear();
        for worker in std::mem::take(&mut self.workers).into_values() {
            self.job.send(Message::GiveBack(worker.grant));
        }
    }

    /// Publishes the answers that wait.
    async fn flush(&mut self) -> Result<(), Failure> {
        self.flushed_at = Instant::now();
        if !self.waiting.is_empty() {
            let results = latest(self.waiting.iter().cloned());
            let bytes = segment::encode(&self.schema.batch(&results)?)?;
            let segment = self.job.context.store.put_segment(&self.base, self.epoch, bytes).await?;
            self.claims.published(segment);
            self.waiting.clear();
            self.waiting_bytes = 0;
            if let Some(journal) = &mut self.journal {
                journal.clear()?;
            }
        }
        let store = &self.job.context.store;
        // One that cannot be given back ends with the run.
        futures::future::join_all(self.claims.finished().into_iter().map(|lease| store.give_back(lease))).await;
        Ok(())
    }
}
