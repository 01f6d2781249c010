//! Executing a by-row stage: only rows without a result are done, each program is fed one row after another, and every
//! answer is kept as it comes. Several engines share the rows of a stage: each claims parts of them by leases.
//!
//! A row whose program died or took too long is suspect: it is tried once more alone in a program. If that dies too, the row
//! is condemned, but rejected only once a program has answered some row that is known to be good: a machine that
//! lost its GPU kills programs on every row, and must not fill the store with rejections. What the program itself
//! reports as `failed` is never kept.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, RecordBatch};
use arrow::compute::concat_batches;
use cuda_agent_protocol::{Event, ResourceGrant, RowInput, RowResult, RowStatus};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::sync::mpsc;

use super::launch::{Channels, EVENTS, Exit, Stop};
use super::{Failure, Job, Message, Pass, attempt, stage};
use crate::artifact::{json, table};
use crate::digest::Digest;
use crate::event::RunEvent;
use crate::key::row_seed;
use crate::rows::assembly::Results;
use crate::rows::index::Place;
use crate::rows::journal::{self, Journal};
use crate::rows::{RowIndex, SegmentSchema, segment};
use crate::store::lease::{self, Asked, Lease};
use crate::store::{Record, RowCounts, SegmentName};

/// Answers are published when so many bytes of them are waiting…
const FLUSH_BYTES: usize = 4 * 1024 * 1024;
/// …or after so long.
const FLUSH_AFTER: Duration = Duration::from_secs(60);
/// Rows are claimed in so many parts, by their digests, so that several engines can share a stage.
const PARTS: u8 = 64;
/// So many parts are asked for at a time.
const CLAIMS: usize = 8;
/// Rows are claimed ahead for so long, by the pace so far.
const AHEAD: Duration = Duration::from_secs(5);
/// Programs that die one after another without any row being answered: then it is not the rows.
const DEATHS: u32 = 3;

/// The rows of a stage's input.
struct Rows {
    input: RecordBatch,
    /// Digest of each row in order.
    digests: Vec<Digest>,
    /// The declared columns, ready for JSON.
    columns: Vec<(String, ArrayRef)>,
}

/// Executes a by-row stage.
pub async fn execute(job: &mut Job, folder: &Path) -> Result<Record, Failure> {
    let started = Instant::now();
    let rows = read_rows(job, folder).await?;
    let schema = SegmentSchema::new(&job.stage().kind);
    let base = job.resolved.base.expect("by-row stages have a base key");
    let cache = job.context.folders.cache.join("rows").join(base.to_string());
    let store = job.context.store.clone();
    adopt_orphans(job, &schema, &base).await?;
    let index = match RowIndex::load(&store, &base, &cache).await {
        // A shared store that is away costs double work at worst.
        Err(_) if store.far().is_some() => RowIndex::load(&store.nearby(), &base, &cache).await?,
        index => index?,
    };
    // A refresh does every row again, and its results win over those that are there.
    let refresh = job.is_refresh();
    let before = job.context.passes.lock().expect("no panic happens under this lock").get(&job.index).cloned();
    let before = before.unwrap_or_default();
    let epoch = before.epoch.unwrap_or(index.epoch() + u32::from(refresh));
    let is_old = |place: Place| index.segments[place.segment as usize].epoch < epoch;
    let is_sampled = |row: &Digest| job.context.sample.is_none_or(|sample| sample.has(row));
    let todo = missing(&rows.digests, |row| {
        index.find(row).is_some_and(|place| !(refresh && is_old(place) && is_sampled(row)))
    });
    let distinct = rows.digests.iter().collect::<HashSet<_>>().len() as u64;
    let mut counts =
        RowCounts { total: rows.digests.len() as u64, reused: distinct - todo.len() as u64, ..RowCounts::default() };
    job.tell(RunEvent::StageStarted {
        stage: job.stage().name.clone(),
        attempt: job.attempt,
        reasons: job.reasons.clone(),
        rows: Some(RowCounts { executed: todo.len() as u64, ..counts }),
    });
    let mut metrics = BTreeMap::new();
    if !todo.is_empty() {
        let control = rows.digests.iter().position(|row| index.find(row).is_some());
        let mut driver = Driver::new(job, &rows, &schema, (base, epoch), todo, control, folder.to_owned())?;
        driver.seen = index.segments;
        let outcome = driver.drive().await;
        driver.dismiss().await;
        // Whatever happened, the rows that are done stay done. Where they cannot be published, the journal keeps them.
        driver.flush().await?;
        (counts.executed, counts.failed) = (driver.answered, driver.failed.len() as u64);
        metrics = std::mem::take(&mut driver.metrics);
        let (failed, journal) = (std::mem::take(&mut driver.failed), driver.journal.take());
        let foreign = std::mem::take(&mut driver.foreign);
        let held = std::mem::take(&mut driver.held);
        drop(driver);
        job.leases.extend(held.into_values().map(|(lease, _)| lease));
        if let Some(journal) = journal {
            journal.remove();
        }
        outcome?;
        refuse_failed_rows(job, &failed)?;
        if !foreign.is_empty() {
            let executed = before.executed + counts.executed;
            let pass =
                Pass { epoch: Some(epoch), executed, metrics: before.metrics.into_iter().chain(metrics).collect() };
            job.context.passes.lock().expect("no panic happens under this lock").insert(job.index, pass);
            job.say("info".into(), "other runs are doing the remaining rows; waiting for them".into());
            return Err(Failure::made_by_others(foreign));
        }
    }
    // What this machine did before it had to wait for others was done in this run, too.
    counts.executed += before.executed;
    counts.reused = counts.reused.saturating_sub(before.executed);
    let metrics = before.metrics.into_iter().chain(metrics).collect();
    let mut store = store;
    let mut index = match RowIndex::load(&store, &base, &cache).await {
        Ok(index) => index,
        // All that is needed is near by now, should the far store be away.
        Err(_) if store.far().is_some() => {
            store = store.nearby();
            RowIndex::load(&store, &base, &cache).await?
        }
        Err(error) => return Err(error.into()),
    };
    let mut results = Results::load(&store, &base, &index, &rows.digests, &schema).await?;
    if results.misled {
        let _ = std::fs::remove_file(&cache);
        index = RowIndex::load(&store, &base, &cache).await?;
        results = Results::load(&store, &base, &index, &rows.digests, &schema).await?;
    }
    let lost = results.missing(&rows.digests).into_iter().collect::<HashSet<_>>().len() as u64;
    if lost > counts.failed {
        // They are looked for again, and done once more.
        let message = format!("{} row results are gone from the store", lost - counts.failed);
        return Err(Failure { others: Some(Vec::new()), ..Failure::new(message) }
            .with_hint("run again: those rows will be executed once more"));
    }
    let rejections = results.rejections();
    counts.rejected = rejections.len() as u64;
    tell_rejections(job, &rows.digests, &rejections);
    for (port, batch) in results.assemble(&rows.input, &rows.digests, &schema)? {
        let path = folder.join("outputs").join(format!("{port}.parquet"));
        std::fs::create_dir_all(folder.join("outputs")).map_err(crate::artifact::ArtifactError::io(folder))?;
        table::write(&path, &batch.schema(), &[batch])?;
    }
    let outputs = stage::publish_outputs(job, folder, false).await?;
    stage::record(job, outputs, started.elapsed(), Some(counts), metrics).await
}

/// Rows without a result, each once, in the order of the table.
fn missing(digests: &[Digest], found: impl Fn(&Digest) -> bool) -> VecDeque<usize> {
    let mut seen = HashSet::new();
    (0..digests.len()).filter(|row| seen.insert(digests[*row]) && !found(&digests[*row])).collect()
}

async fn read_rows(job: &Job, folder: &Path) -> Result<Rows, Failure> {
    let by_row = job.stage().kind.by_row.as_ref().expect("only by-row stages come here");
    let input = &job.resolved.inputs[&by_row.port][0];
    std::fs::create_dir_all(folder).map_err(crate::artifact::ArtifactError::io(folder))?;
    let path = folder.join("rows.parquet");
    attempt::place(&job.context.store, input, &path).await?;
    let names: Vec<String> = job.stage().kind.inputs[&by_row.port].columns.keys().cloned().collect();
    let read = tokio::task::spawn_blocking(move || {
        let (schema, batches) = table::read(&path)?;
        let input = concat_batches(&schema, &batches).map_err(crate::artifact::ArtifactError::malformed(&path))?;
        let digests = table::batch_digests(&input, &names)?;
        let columns = table::columns_of(&input, &names)?;
        Ok(Rows { input, digests, columns })
    });
    read.await.expect("reading a table does not panic").map_err(|error: crate::artifact::ArtifactError| error.into())
}

/// Publishes what engines that were killed had finished.
async fn adopt_orphans(job: &Job, schema: &SegmentSchema, base: &Digest) -> Result<(), Failure> {
    let store = &job.context.store;
    for (epoch, results, journal) in journal::orphans(&job.state_folder(), store.url()) {
        let kept: Vec<RowResult> = latest(results.into_iter().filter(|result| schema.check(result).is_ok()));
        if !kept.is_empty() {
            store.put_segment(base, epoch, segment::encode(&schema.batch(&kept)?)?).await?;
        }
        journal.remove();
    }
    Ok(())
}

/// One answer a row.
fn latest(results: impl Iterator<Item = RowResult>) -> Vec<RowResult> {
    let by_row: BTreeMap<String, RowResult> = results.map(|result| (result.row.clone(), result)).collect();
    by_row.into_values().filter(|result| result.status != RowStatus::Failed).collect()
}

/// Which rows are at fault, and why: all of them in the log, the first few for whoever watches.
fn tell_rejections(job: &mut Job, digests: &[Digest], rejections: &[(Digest, String)]) {
    const SHOWN: usize = 3;
    for (number, (digest, why)) in rejections.iter().enumerate() {
        let row = digests.iter().position(|row| row == digest).unwrap_or_default();
        let message = job.redact(&format!("row {row} of the input ({}) is rejected: {why}", digest.short()));
        job.log.lock().expect("no panic happens under this lock").note(&message);
        if number < SHOWN {
            job.say("warning".into(), message);
        }
    }
    if rejections.len() > SHOWN {
        let stage = job.stage().name.clone();
        let more = rejections.len() - SHOWN;
        job.say("warning".into(), format!("and {more} more; cuda-agent log '{stage}' has them all"));
    }
}

fn refuse_failed_rows(job: &Job, failed: &[RowResult]) -> Result<(), Failure> {
    if failed.len() as u64 <= job.stage().allow_failed_rows {
        return Ok(());
    }
    let first = failed.first().map(|result| {
        let reason = result.reason.clone().unwrap_or_else(|| "no reason given".into());
        result.detail.as_ref().map_or(reason.clone(), |detail| format!("{reason}: {detail}"))
    });
    let message = format!("{} rows failed from outside causes ({})", failed.len(), first.unwrap_or_default());
    Err(Failure::new(message).with_hint(
        "run again to try just these rows; `allow_failed_rows:` lets the stage pass without some of its rows",
    ))
}

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
struct Driver<'a> {
    job: &'a mut Job,
    rows: &'a Rows,
    schema: &'a SegmentSchema,
    base: Digest,
    epoch: u32,
    folder: PathBuf,
    by_digest: HashMap<String, usize>,
    todo: VecDeque<usize>,
    /// How many rows a program may have unanswered.
    window: usize,
    /// Rows that nobody was asked about yet, by part.
    unclaimed: VecDeque<(u8, Vec<usize>)>,
    /// What is claimed, with how many of its rows are not answered.
    held: BTreeMap<u8, (Lease, usize)>,
    /// Leases of parts that other runs do.
    foreign: Vec<String>,
    /// Segments whose rows were done when the parts were made.
    seen: Vec<SegmentName>,
    suspects: VecDeque<usize>,
    suspected: HashSet<usize>,
    /// Rows that killed a program twice.
    condemned: Vec<RowResult>,
    /// A row that a program has done before; it is tried again before anything is rejected.
    control: Option<usize>,
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

impl<'a> Driver<'a> {
    fn new(
        job: &'a mut Job,
        rows: &'a Rows,
        schema: &'a SegmentSchema,
        (base, epoch): (Digest, u32),
        todo: VecDeque<usize>,
        control: Option<usize>,
        folder: PathBuf,
    ) -> Result<Self, Failure> {
        let (events, heard) = mpsc::channel(EVENTS);
        let journal = Journal::create(&job.state_folder(), job.context.store.url(), epoch, &job.context.run)?;
        let timeout = job.stage().timeout;
        let cores = job.grant.as_ref().map_or(1, |grant| grant.cpu);
        let window = job.stage().kind.by_row.as_ref().map_or(1, |by_row| by_row.window_of(cores) as usize);
        let mut parts: BTreeMap<u8, Vec<usize>> = BTreeMap::new();
        todo.iter().for_each(|row| parts.entry(part(&rows.digests[*row])).or_default().push(*row));
        let mut unclaimed: VecDeque<(u8, Vec<usize>)> = parts.into_iter().collect();
        // Runs that begin together begin at different parts.
        let run = Digest::of_bytes(job.context.run.as_bytes());
        let first = unclaimed.len() * usize::from(run.0[0]) / 256;
        unclaimed.rotate_left(first);
        Ok(Self {
            by_digest: todo.iter().chain(&control).map(|row| (rows.digests[*row].to_string(), *row)).collect(),
            total: todo.len() as u64,
            deadline: timeout.map(|timeout| tokio::time::Instant::now() + timeout),
            deadline_unix_s: timeout.map(stage::unix_deadline),
            job,
            rows,
            schema,
            base,
            epoch,
            folder,
            todo: VecDeque::new(),
            window,
            unclaimed,
            held: BTreeMap::new(),
            foreign: Vec::new(),
            seen: Vec::new(),
            suspects: VecDeque::new(),
            suspected: HashSet::new(),
            condemned: Vec::new(),
            control,
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

    fn row_timeout(&self) -> Option<Duration> {
        self.job.stage().kind.by_row.as_ref()?.row_timeout_s.map(Duration::from_secs_f64)
    }

    /// Runs until every row is answered, or something is wrong with more than a row.
    async fn drive(&mut self) -> Result<(), Failure> {
        self.claim().await?;
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
            if !self.unclaimed.is_empty() && self.todo.len() < self.enough() / 2 {
                self.claim().await?;
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
        !self.todo.is_empty() || !self.suspects.is_empty() || !self.unclaimed.is_empty()
    }

    /// How many rows to have at hand: for every program that could run some, and what the pace so far would need.
    fn enough(&self) -> usize {
        let pace = self.answered as f64 / self.begun.elapsed().as_secs_f64().max(0.1);
        let programs = self.workers.len().max(1);
        (self.window * programs * 2).max((pace * AHEAD.as_secs_f64()) as usize)
    }

    /// Claims more rows, so that no other run does them too. Parts that others have are left to them.
    async fn claim(&mut self) -> Result<(), Failure> {
        let context = self.job.context.clone();
        let store = &context.store;
        let mut claimed = Vec::new();
        let rows_of = |parts: &[(u8, Vec<usize>)]| parts.iter().map(|(_, rows)| rows.len()).sum::<usize>();
        while self.todo.len() + rows_of(&claimed) < self.enough() && !self.unclaimed.is_empty() {
            let mut parts = Vec::new();
            while self.todo.len() + rows_of(&claimed) + rows_of(&parts) < self.enough() && parts.len() < CLAIMS {
                let Some(part) = self.unclaimed.pop_front() else { break };
                parts.push(part);
            }
            let names: Vec<String> =
                parts.iter().map(|(part, _)| lease::of_rows(&self.base, self.epoch, *part)).collect();
            let asking = names.iter().map(|name| store.lease(name, &context.holder, &context.observer));
            let answers = futures::future::join_all(asking).await;
            for ((part, name), answer) in parts.into_iter().zip(names).zip(answers) {
                match answer {
                    Ok(Asked::Granted(lease)) => {
                        self.held.insert(part.0, (lease, part.1.len()));
                        claimed.push(part);
                    }
                    Ok(Asked::Taken(_)) => self.foreign.push(name),
                    // Leases only avoid double work.
                    Err(_) => claimed.push(part),
                }
            }
        }
        self.leave_out_done(&mut claimed).await?;
        self.todo.extend(claimed.into_iter().flat_map(|(_, rows)| rows));
        Ok(())
    }

    /// What others have done since the parts were made need not be done again.
    async fn leave_out_done(&mut self, claimed: &mut [(u8, Vec<usize>)]) -> Result<(), Failure> {
        let context = self.job.context.clone();
        // A store that is away costs double work at worst.
        let Ok(there) = context.store.segments(&self.base).await else { return Ok(()) };
        if there == self.seen {
            return Ok(());
        }
        let cache = context.folders.cache.join("rows").join(self.base.to_string());
        let Ok(index) = RowIndex::load(&context.store, &self.base, &cache).await else { return Ok(()) };
        let epoch = self.epoch;
        let is_done =
            |row: &Digest| index.find(row).is_some_and(|place| index.segments[place.segment as usize].epoch >= epoch);
        for (part, rows) in claimed {
            let before = rows.len();
            rows.retain(|row| !is_done(&self.rows.digests[*row]));
            let done = before - rows.len();
            self.total -= done as u64;
            if let Some((_, left)) = self.held.get_mut(part) {
                *left -= done;
            }
        }
        self.seen = there;
        Ok(())
    }

    /// Gives back the parts whose rows are all published.
    async fn give_back_parts(&mut self) {
        let over: Vec<u8> = self.held.iter().filter(|(_, (_, left))| *left == 0).map(|(part, _)| *part).collect();
        for part in over {
            if let Some((lease, _)) = self.held.remove(&part) {
                let _ = self.job.context.store.give_back(&lease).await;
            }
        }
    }

    /// How many more programs could be of use.
    fn ask_for_more(&self) {
        let limit = self.job.stage().kind.by_row.as_ref().map_or(0, |by_row| by_row.workers);
        let limit = if limit == 0 { u32::MAX } else { limit };
        let rows = self.todo.len() + self.unclaimed.iter().map(|(_, rows)| rows.len()).sum::<usize>();
        let useful = (rows / self.window).max(1).min(limit as usize) as u32;
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
            let columns = self.rows.columns.iter().map(|(name, array)| (name.clone(), json::value_at(array, row)));
            let input =
                RowInput { row: digest.to_string(), seed: row_seed(stage_seed, &digest), columns: columns.collect() };
            worker.in_flight.push((row, Instant::now()));
            // The channel holds a whole window, so this never waits; a program that is gone ends by itself.
            let _ = sender.try_send(input);
        }
        // More may be claimed.
        if worker.in_flight.is_empty() && self.unclaimed.is_empty() {
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
            return Err(Failure::new(format!("the program answered a row that it was not given: {}", result.row)));
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
        self.schema.check(&result).map_err(|error| Failure::permanent(error.to_string()))?;
        self.answered += 1;
        let part = result.row.parse::<Digest>().ok().map(|row| part(&row));
        if let Some((_, left)) = part.and_then(|part| self.held.get_mut(&part)) {
            *left = left.saturating_sub(1);
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
        let redactor = super::log::Redactor::new(&self.job.secret_values());
        if redactor.finds(text.as_bytes()) {
            return Err(Failure::permanent(format!("row {}: its answer contains the value of a secret", result.row)));
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
            judged = self.judge(&worker, &exit);
        }
        if judged.is_ok() {
            let _ = std::fs::remove_dir_all(&worker.folder);
            if !stopping && !self.has_work() && self.workers.is_empty() {
                judged = self.ask_control();
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
    fn ask_control(&mut self) -> Result<(), Failure> {
        if self.condemned.is_empty() || self.control_runs {
            return Ok(());
        }
        let Some(control) = self.control else {
            let rows = self.condemned.len();
            let why = self.condemned[0].detail.clone().unwrap_or_default();
            let message = format!("the program died on each of the {rows} rows that it was given ({why})");
            return Err(Failure::new(message).with_hint(
                "no row was done, so the machine or the program may be at fault: nothing is rejected, and the next run tries again",
            ));
        };
        self.control_runs = true;
        self.suspects.push_back(control);
        Ok(())
    }

    /// A program ended that should not have: is it a row's doing?
    fn judge(&mut self, worker: &Worker, exit: &Exit) -> Result<(), Failure> {
        if let Some(failure) = stage::explained(&worker.folder) {
            return Err(failure);
        }
        if *exit == Exit::Success {
            return Err(Failure::permanent(format!(
                "the program ended well, but left {} rows unanswered",
                worker.in_flight.len()
            )));
        }
        if matches!(exit, Exit::NotStarted(_) | Exit::Code(super::supervise::CANNOT_START)) {
            return Err(Failure::new(stage::described(exit)));
        }
        if self.control_runs && !self.control_passed {
            let message = format!("programs now die on rows that they did before: {}", stage::described(exit));
            return Err(Failure::new(message).with_hint("is a GPU lost, or the memory full? Nothing was rejected"));
        }
        self.deaths += 1;
        let never_worked = self.control.is_none() && self.deaths > DEATHS + self.workers.len() as u32;
        if never_worked || (worker.in_flight.is_empty() && self.deaths >= DEATHS) {
            let message = format!("{} programs died one after another: {}", self.deaths, stage::described(exit));
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
        self.unclaimed.clear();
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
            self.seen.push(segment);
            self.seen.sort_unstable();
            self.waiting.clear();
            self.waiting_bytes = 0;
        }
        self.give_back_parts().await;
        Ok(())
    }
}

/// The part that a row is claimed with.
fn part(row: &Digest) -> u8 {
    row.0[0] / (u8::MAX / PARTS + 1)
}
