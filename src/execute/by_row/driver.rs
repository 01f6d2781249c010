//! Does the rows of a by-row stage that have no result: [`Todo`] claims them, [`Programs`] are fed one row after another,
//! [`Suspects`] are rows whose programs died, and [`Answers`] are kept as they come.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use cuda_agent_protocol::{Event, ResourceGrant, RowResult};
use futures::stream::StreamExt;

use super::answers::Answers;
use super::claims::Claims;
use super::programs::{ProgramId, Programs, Worker};
use super::suspects::{Death, Suspects};
use super::todo::Todo;
use crate::digest::Digest;
use crate::execute::failure::{Explanation, Failure};
use crate::execute::job::Job;
use crate::execute::launch::{Exit, Stop};
use crate::execute::report::Message;
use crate::execute::{events, exit, supervise};
use crate::rows::{InputRows, SegmentSchema};

/// Rows are claimed ahead for so long, by the pace so far.
const AHEAD: Duration = Duration::from_secs(5);
/// How often clocks are looked at.
const TICK: Duration = Duration::from_millis(200);
/// How many rows a message names.
const NAMED: usize = 3;

/// Executes rows with as many programs as the scheduler grants.
pub struct Driver<'a> {
    job: &'a mut Job,
    rows: &'a InputRows,
    schema: &'a SegmentSchema,
    todo: Todo<'a>,
    programs: Programs,
    suspects: Suspects,
    answers: Answers<'a>,
    metrics: BTreeMap<String, f64>,
    deadline: Option<Deadline>,
}

/// When the stage's time is up, by two clocks.
#[derive(Clone, Copy)]
struct Deadline {
    at: tokio::time::Instant,
    unix_s: f64,
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
        let deadline = |timeout: Duration| Deadline {
            at: tokio::time::Instant::now() + timeout,
            unix_s: exit::unix_deadline(timeout),
        };
        let cores = job.grants.first.as_ref().map_or(1, |grant| grant.cpu);
        let window = job.stage().kind.by_row.as_ref().map_or(1, |by_row| by_row.window_of(cores) as usize);
        Ok(Self {
            todo: Todo::new(rows, claims, total),
            programs: Programs::new(folder, window),
            suspects: Suspects::new(),
            answers: Answers::new(job, rows, schema, (base, epoch))?,
            metrics: BTreeMap::new(),
            deadline: job.stage().timeout.map(deadline),
            job,
            rows,
            schema,
        })
    }

    /// Does the rows; what came of it, and how it ended. Whatever happened, the rows that are done stay done: where they
    /// cannot be published, the journal keeps them.
    pub async fn run(mut self) -> Result<(Done, Result<(), Failure>), Failure> {
        let outcome = self.drive().await;
        for grant in self.programs.dismiss().await {
            self.job.give_back(grant);
        }
        self.publish().await?;
        let (foreign, held) = self.todo.claims.end();
        self.job.leases.extend(held);
        let (executed, failed) = self.answers.end();
        Ok((Done { executed, failed, metrics: self.metrics, foreign }, outcome))
    }

    /// Runs until every row is answered, or something is wrong with more than a row.
    async fn drive(&mut self) -> Result<(), Failure> {
        self.claim().await;
        if !self.has_work() {
            // Other runs do all of it.
            return Ok(());
        }
        let grant = self.job.grants.first.take().expect("a stage starts with a grant");
        self.ask_for_programs();
        self.start(grant).await?;
        let mut tick = tokio::time::interval(TICK);
        let mut may_get_more = true;
        while self.programs.count() > 0 {
            tokio::select! {
                // Clock and Ctrl-C come before events, so that programs that report without end cannot delay them.
                biased;
                _ = self.job.stop.changed() => self.stop(),
                _ = tick.tick() => self.check_clocks().await?,
                Some((id, exit)) = self.programs.ends.next() => self.program_ended(id, exit).await?,
                Some((id, event)) = self.programs.heard.recv() => self.receive(id, event)?,
                grant = self.job.grants.further.recv(), if may_get_more => match grant {
                    Some(grant) if self.has_work() => self.start(grant).await?,
                    Some(grant) => self.job.give_back(grant),
                    None => may_get_more = false,
                },
            }
            if self.todo.is_low(self.enough()) {
                self.claim().await;
                self.programs.ids().into_iter().for_each(|id| self.feed(id));
            }
        }
        if !self.job.goes_on() {
            return Err(Failure::Cancelled);
        }
        self.suspects.take_condemned().into_iter().try_for_each(|row| self.keep(row))
    }

    fn has_work(&self) -> bool {
        !self.todo.is_over() || !self.suspects.is_empty()
    }

    /// How many rows to have at hand: for every program that could run some, and what the pace so far would need.
    fn enough(&self) -> usize {
        let programs = self.programs.count().max(1);
        (self.programs.window() * programs * 2).max((self.answers.pace() * AHEAD.as_secs_f64()) as usize)
    }

    async fn claim(&mut self) {
        let (context, enough) = (self.job.context.clone(), self.enough());
        self.todo.claim(&context, self.schema, enough).await;
    }

    /// Asks the scheduler for as many more programs as could be of use.
    fn ask_for_programs(&self) {
        let workers = self.job.stage().kind.by_row.as_ref().map_or(0, |by_row| by_row.workers);
        // Programs that need no core are not limited by the cores there are.
        let limit = if workers == 0 { self.job.context.programs } else { workers };
        let useful = (self.todo.left() / self.programs.window()).max(1).min(limit.max(1) as usize) as u32;
        self.job.reporter.send(Message::Widen(self.job.id, useful.saturating_sub(1)));
    }

    async fn start(&mut self, grant: ResourceGrant) -> Result<(), Failure> {
        let unix_s = self.deadline.map(|deadline| deadline.unix_s);
        let id = self.programs.start(self.job, grant, self.todo.total(), unix_s).await?;
        self.feed(id);
        Ok(())
    }

    fn feed(&mut self, id: ProgramId) {
        let for_all = (self.job.seed(), *self.job.grants.wanted.borrow());
        self.programs.feed(id, for_all, self.rows, &mut self.todo, &mut self.suspects);
    }

    fn receive(&mut self, id: ProgramId, event: Result<Event, String>) -> Result<(), Failure> {
        let result = match event {
            Ok(Event::Row(result)) => result,
            // It may have been an answer, which would then be waited for without end.
            Err(error) => {
                let message = format!("a line of its events is not an event: {error}");
                return Err(
                    Failure::permanent(message).with_hint("each answer to a row is one JSON object on one line")
                );
            }
            other => {
                events::handle(self.job, other, &mut self.metrics);
                return Ok(());
            }
        };
        let Some(worker) = self.programs.get_mut(id) else { return Ok(()) };
        let row = self.todo.row(&result.row);
        if !worker.answer(row) {
            let row = self.rows.named_by(&result.row);
            return Err(Failure::retryable(format!("the program answered a row that it was not given: {row}")));
        }
        if !self.suspects.answered(row, result.status) {
            self.keep(result)?;
        }
        self.feed(id);
        Ok(())
    }

    fn keep(&mut self, result: RowResult) -> Result<(), Failure> {
        let row = result.row.parse();
        self.answers.keep(self.job, result)?;
        if let Ok(row) = row {
            self.todo.claims.answered(&row);
        }
        self.job.reporter.progress(self.answers.count(), Some(self.todo.total()), "rows");
        Ok(())
    }

    async fn publish(&mut self) -> Result<(), Failure> {
        self.answers.publish(&self.job.context.store, &mut self.todo.claims).await
    }

    /// What a program had is given to the next one, or back.
    async fn program_ended(&mut self, id: ProgramId, exit: Exit) -> Result<(), Failure> {
        while let Ok((id, event)) = self.programs.heard.try_recv() {
            self.receive(id, event)?;
        }
        let Some(worker) = self.programs.remove(id) else { return Ok(()) };
        let goes_on = self.job.goes_on();
        let mut outcome = match goes_on && (exit != Exit::Success || !worker.unanswered().is_empty()) {
            true => self.investigate(&worker, &exit).await,
            false => Ok(()),
        };
        if outcome.is_ok() {
            let _ = std::fs::remove_dir_all(&worker.folder);
            if goes_on && !self.has_work() && self.programs.count() == 0 {
                outcome = self.try_control().await;
            }
        }
        let is_spare = *self.job.grants.wanted.borrow() && self.programs.count() > 0;
        if outcome.is_ok() && goes_on && !is_spare && self.has_work() {
            return self.start(worker.grant).await;
        }
        self.job.give_back(worker.grant);
        outcome
    }

    /// Before rows are rejected for killing programs: does a program still do a row that it did before?
    async fn try_control(&mut self) -> Result<(), Failure> {
        if self.suspects.undecided().is_empty() {
            return Ok(());
        }
        self.seek_control().await;
        if self.suspects.try_control() {
            return Ok(());
        }
        let condemned = self.suspects.undecided();
        let why = condemned[0].detail.clone().unwrap_or_default();
        let (rows, first) = (condemned.len(), self.rows.named_by(&condemned[0].row));
        let message = format!("the program died on each of the {rows} rows that it was given ({first}: {why})");
        Err(Failure::retryable(message).with_hint(
            "no row was done, so the machine or the program may be at fault: nothing is rejected, and the next run tries again",
        ))
    }

    async fn seek_control(&mut self) {
        let store = &self.job.context.store;
        let published = self.todo.claims.index();
        if let Some(row) = self.suspects.seek_control(store, &self.answers.base, self.rows, published).await {
            self.todo.expect(row);
        }
    }

    /// Rows by numbers and values.
    fn named(&self, rows: &[usize]) -> String {
        let named = rows.iter().take(NAMED).map(|row| self.rows.named(*row));
        let more = rows.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}", named.collect::<Vec<_>>().join(", "))
    }

    /// A program ended that should not have: is it a row's doing?
    async fn investigate(&mut self, worker: &Worker, ended: &Exit) -> Result<(), Failure> {
        let unanswered = worker.unanswered();
        let named = self.named(&unanswered);
        if let Some(failure) = exit::explained(&worker.folder) {
            if unanswered.is_empty() {
                return Err(failure);
            }
            let with_rows = |message: String| format!("{message} (it had {named})");
            return Err(failure.map(|why| Explanation { message: with_rows(why.message), ..why }));
        }
        if *ended == Exit::Success {
            let count = unanswered.len();
            return Err(Failure::permanent(format!(
                "the program ended well, but left {count} rows unanswered: {named}"
            )));
        }
        let died = exit::described(ended);
        if matches!(ended, Exit::NotStarted(_) | Exit::Code(supervise::CANNOT_START)) {
            return Err(Failure::retryable(died));
        }
        if self.suspects.has_control_failed() {
            let message = format!("programs now die on rows that they did before: {died} ({named})");
            return Err(
                Failure::retryable(message).with_hint("is a GPU lost, or the memory full? Nothing was rejected")
            );
        }
        self.suspects.count_death();
        self.seek_control().await;
        if let Some(deaths) = self.suspects.deaths_beyond_rows(!unanswered.is_empty(), self.programs.count()) {
            let last = if unanswered.is_empty() { String::new() } else { format!(" (the last one had {named})") };
            return Err(Failure::retryable(format!("{deaths} programs died one after another: {died}{last}")));
        }
        let (was_alone, was_overdue) = (worker.is_alone, worker.is_overdue);
        self.suspects.accuse(&Death { unanswered: &unanswered, was_alone, was_overdue, exit: died }, self.rows);
        Ok(())
    }

    async fn check_clocks(&mut self) -> Result<(), Failure> {
        if self.answers.are_due() {
            self.publish().await?;
        }
        if self.deadline.is_some_and(|deadline| tokio::time::Instant::now() >= deadline.at) {
            self.programs.stop(Stop::Kill);
            return Err(exit::timed_out(self.job.stage().timeout.unwrap_or_default()));
        }
        if let Some(limit) = self.row_timeout() {
            self.programs.kill_overdue(limit);
        }
        Ok(())
    }

    fn row_timeout(&self) -> Option<Duration> {
        // More seconds than a duration holds are no limit.
        Duration::try_from_secs_f64(self.job.stage().kind.by_row.as_ref()?.row_timeout_s?).ok()
    }

    fn stop(&mut self) {
        let stop = *self.job.stop.borrow_and_update();
        self.todo.stop();
        self.suspects.stop();
        self.programs.stop(stop);
    }
}
