//! What publishes: answers go into the journal as they come, and into the store some at a time.

use std::time::{Duration, Instant};

use cuda_agent_protocol::{RowResult, RowStatus};

use super::claims::Claims;
use super::{FLUSH_BYTES, latest};
use crate::digest::Digest;
use crate::execute::failure::Failure;
use crate::execute::job::Job;
use crate::execute::log::Redactor;
use crate::rows::journal::Journal;
use crate::rows::{InputRows, SegmentSchema, segment};
use crate::store::Store;

/// Answers are published at least so often.
const FLUSH_AFTER: Duration = Duration::from_secs(60);

/// Answers of programs.
pub struct Answers<'a> {
    input: &'a InputRows,
    schema: &'a SegmentSchema,
    /// The base key, under which they are filed.
    pub base: Digest,
    epoch: u32,
    journal: Option<Journal>,
    answered: u64,
    failed: Vec<RowResult>,
    waiting: Vec<RowResult>,
    waiting_bytes: usize,
    begun_at: Instant,
    published_at: Instant,
}

impl<'a> Answers<'a> {
    /// For rows of the input, filed under a base key and an epoch.
    pub fn new(
        job: &Job,
        input: &'a InputRows,
        schema: &'a SegmentSchema,
        (base, epoch): (Digest, u32),
    ) -> Result<Self, Failure> {
        let journal = Journal::create(&job.state_folder(), job.context.store.url(), epoch, &job.context.run)?;
        let now = Instant::now();
        Ok(Self {
            input,
            schema,
            base,
            epoch,
            journal: Some(journal),
            answered: 0,
            failed: Vec::new(),
            waiting: Vec::new(),
            waiting_bytes: 0,
            begun_at: now,
            published_at: now,
        })
    }

    /// Answers a second so far.
    pub fn pace(&self) -> f64 {
        self.answered as f64 / self.begun_at.elapsed().as_secs_f64().max(0.1)
    }

    /// How many rows are answered.
    pub fn count(&self) -> u64 {
        self.answered
    }

    /// Takes an answer: into the journal first. One that is not as the stage's kind says is refused.
    pub fn keep(&mut self, job: &Job, mut result: RowResult) -> Result<(), Failure> {
        if !job.secrets.values.is_empty() {
            result = self.without_secrets(job, result)?;
        }
        let wrong = |error| Failure::permanent(format!("{}: {error}", self.input.named_by(&result.row)));
        self.schema.check(&result).map_err(wrong)?;
        self.answered += 1;
        if result.status == RowStatus::Failed {
            self.failed.push(result);
            return Ok(());
        }
        if let Some(journal) = &mut self.journal {
            journal.append(&result)?;
        }
        self.waiting_bytes += serde_json::to_vec(&result.outputs).map_or(0, |bytes| bytes.len());
        self.waiting.push(result);
        Ok(())
    }

    fn without_secrets(&self, job: &Job, result: RowResult) -> Result<RowResult, Failure> {
        let text = serde_json::to_string(&result).expect("answers are plain data");
        let redactor = Redactor::new(&job.secret_values());
        if redactor.finds(text.as_bytes()) {
            let row = self.input.named_by(&result.row);
            return Err(Failure::permanent(format!("{row}: its answer contains the value of a secret")));
        }
        Ok(result)
    }

    /// Whether so many answers wait, or for so long, that they should be published.
    pub fn are_due(&self) -> bool {
        self.waiting_bytes >= FLUSH_BYTES || self.published_at.elapsed() >= FLUSH_AFTER
    }

    /// Publishes the answers that wait, then gives back the parts that are done with.
    pub async fn publish(&mut self, store: &Store, claims: &mut Claims) -> Result<(), Failure> {
        self.published_at = Instant::now();
        if !self.waiting.is_empty() {
            let results = latest(self.waiting.iter().cloned());
            let bytes = segment::encode(&self.schema.batch(&results)?)?;
            claims.published(store.put_segment(&self.base, self.epoch, bytes).await?);
            self.waiting.clear();
            self.waiting_bytes = 0;
            if let Some(journal) = &mut self.journal {
                journal.clear()?;
            }
        }
        // One that cannot be given back ends with the run.
        futures::future::join_all(claims.finished().into_iter().map(|lease| store.give_back(lease))).await;
        Ok(())
    }

    /// Once all are published: how many rows programs did, and those that failed from outside causes.
    pub fn end(mut self) -> (u64, Vec<RowResult>) {
        if let Some(journal) = self.journal.take() {
            journal.remove();
        }
        (self.answered - self.failed.len() as u64, self.failed)
    }
}
