//! What follows the end of a job: a result, another attempt, a wait for other runs, or a failure.

use std::time::Duration;

use super::Run;
use super::active::Active;
use super::job_end::JobEnd;
use crate::digest::Digest;
use crate::event::{RunEvent, StageOutcome};
use crate::execute::failure::{Explanation, Failure};
use crate::execute::folders::attempt_folder;
use crate::execute::stage_id::StageId;
use crate::execute::work;
use crate::plan::{Outputs, PlanError};
use crate::schedule::State;
use crate::spec::Retry;
use crate::store::{Record, StageState, StoreError};

/// How many lines of a failed stage's log are shown.
const LOG_TAIL: usize = 20;

impl Run<'_, '_> {
    /// Takes notice of a job that ended.
    pub(super) async fn job_ended(&mut self, end: JobEnd) -> Result<(), PlanError> {
        match end {
            JobEnd::Attempt(id, outcome) => return self.attempt_ended(id, outcome).await,
            JobEnd::WaitStopped(id) => return self.attempt_ended(id, Err(Failure::Cancelled)).await,
            JobEnd::RetryDue(id) => self.scheduler.queue(id.0),
            JobEnd::LookUpDue(id, key) => {
                self.engine.store.forget_absence(&key);
                // It may have been looked up meanwhile, for another reason.
                if self.scheduler.state(id.0) == State::Waiting {
                    self.scheduler.unpark(id.0);
                }
            }
            JobEnd::Uploaded(_, Ok(())) => {}
            JobEnd::Uploaded(upload, Err(error)) => {
                if self.record.reported.insert(upload) {
                    self.warn("store", upload.warning(&error));
                }
            }
        }
        Ok(())
    }

    async fn attempt_ended(&mut self, id: StageId, outcome: Result<Box<Record>, Failure>) -> Result<(), PlanError> {
        // A stage that only waited for other runs is not active.
        let Some(active) = self.active.get(&id) else { return Ok(()) };
        let failure = match outcome {
            Ok(record) => {
                let duration_s = active.started.elapsed().as_secs_f64();
                self.succeed(id, *record, duration_s).await;
                return Ok(());
            }
            Err(failure) => failure,
        };
        let failure = match failure {
            Failure::LookUpAgain(..) if !self.goes_on() => Failure::Cancelled,
            failure @ Failure::LookUpAgain(..) if !self.engine.waits => failure,
            Failure::LookUpAgain(leases, _) if self.may_look_up_again(id, &leases) => {
                self.wait_for_others(id, leases);
                return Ok(());
            }
            Failure::InputLost(blob, _) if self.goes_on() && self.redo_producer(id, &blob).await? => return Ok(()),
            failure => failure,
        };
        let Some(active) = self.active.get_mut(&id) else { return Ok(()) };
        active.widen = None;
        let attempt = active.attempt;
        let retry = &self.stage(id).retry;
        if failure.may_pass() && attempt <= retry.attempts && self.goes_on() {
            let (stage, wait) = (self.stage(id).name.clone(), backoff(retry, attempt));
            let message = failure.explanation().message;
            self.emit(RunEvent::StageRetry { stage, message, wait_s: wait.as_secs_f64() });
            self.wait_and_retry(id, wait);
            return Ok(());
        }
        self.keep_log(id, false).await;
        self.fail(id, failure);
        Ok(())
    }

    async fn succeed(&mut self, id: StageId, record: Record, duration_s: f64) {
        self.keep_log(id, true).await;
        let Some(active) = self.active.remove(&id) else { return };
        let stage = self.stage(id);
        self.record.set_outcome(id, Some(active.keys()), StageState::Done, None);
        self.record.set_work(id, duration_s, record.rows);
        self.report.executed.push(stage.name.clone());
        for attempt in 1..active.attempt {
            let folder = attempt_folder(&self.context.folders, &self.context.run, &stage.name, attempt);
            let _ = std::fs::remove_dir_all(folder);
        }
        let (stage, outcome) = (stage.name.clone(), StageOutcome::Done);
        self.emit(RunEvent::StageFinished { stage, outcome, duration_s, rows: record.rows });
        self.done(id, record.outputs);
    }

    /// Waits as a job, so that the run does not end meanwhile.
    fn wait_and_retry(&mut self, id: StageId, wait: Duration) {
        let mut stop = self.signals.stop.subscribe();
        self.jobs.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(wait) => JobEnd::RetryDue(id),
                _ = stop.changed() => JobEnd::WaitStopped(id),
            }
        });
    }

    /// Waiting for others takes as long as it takes; looking up again at once should help the first time.
    fn may_look_up_again(&mut self, id: StageId, leases: &[String]) -> bool {
        const OFTEN: u32 = 3;
        let times = self.lookups.repeated.entry(id).or_default();
        *times += u32::from(leases.is_empty());
        *times <= OFTEN
    }

    /// Other runs are making what this stage would: it is looked up again when one of them has ended its part. Waits as a
    /// job, so that the run does not end meanwhile.
    fn wait_for_others(&mut self, id: StageId, leases: Vec<String>) {
        self.in_flight.remove(id);
        let Some(active) = self.active.remove(&id) else { return };
        let key = active.resolved.key;
        self.scheduler.park(id.0);
        let (context, mut stop) = (self.context.clone(), self.signals.stop.subscribe());
        let interval = context.store.lease_poll_interval();
        self.jobs.spawn(async move {
            let free = async {
                'free: while !leases.is_empty() {
                    tokio::time::sleep(interval).await;
                    context.claimant.observer.mark_dead(work::dead(&context.folders.work));
                    for lease in &leases {
                        // While the store is away nobody can be seen to end.
                        if let Ok(None) = context.store.leased_by(lease, &context.claimant.observer).await {
                            break 'free;
                        }
                    }
                }
            };
            tokio::select! {
                () = free => JobEnd::LookUpDue(id, key),
                _ = stop.changed() => JobEnd::WaitStopped(id),
            }
        });
    }

    /// Makes what a stage reads once more, where another stage made it and it is gone; once a run.
    async fn redo_producer(&mut self, id: StageId, blob: &Digest) -> Result<bool, StoreError> {
        let Some(producer) = self.maker_of(id, blob).await else { return Ok(false) };
        let is_done = self.scheduler.state(producer.0) == State::Done;
        if is_done && !self.lookups.redone.insert(producer) {
            return Ok(false);
        }
        let name = self.stage(producer).name.clone();
        if let Some(key) = self.record.key(producer) {
            self.engine.store.distrust(&key).await?;
        }
        if is_done {
            let message = format!("what it made is gone from the store (blob {}); making it again", blob.short());
            self.warn(&name, message);
        }
        self.in_flight.remove(id);
        self.active.remove(&id);
        self.scheduler.redo(producer.0, id.0);
        Ok(true)
    }

    /// The stage before this one that made a blob.
    async fn maker_of(&self, id: StageId, blob: &Digest) -> Option<StageId> {
        let mut maker = None;
        for producer in crate::plan::producers(self.stage(id)) {
            for artifact in self.outputs[producer].iter().flat_map(|outputs| outputs.values()) {
                let blobs = self.engine.store.blobs_of(artifact).await.ok().flatten();
                // Where not even a tree's list is there, its blob is the one that is missed.
                if blobs.unwrap_or_else(|| vec![artifact.blob]).contains(blob) {
                    maker = Some(StageId(producer));
                }
            }
        }
        maker
    }

    /// A stage has its outputs: what waits for it may go on.
    pub(super) fn done(&mut self, id: StageId, outputs: Outputs) {
        self.outputs[id.0] = Some(outputs);
        self.scheduler.finish(id.0, true);
        self.release_parked(id);
    }

    fn release_parked(&mut self, id: StageId) {
        self.in_flight.remove(id);
        for parked in self.in_flight.release(id) {
            self.scheduler.unpark(parked.0);
        }
    }

    /// A stage has failed for good, or was interrupted.
    pub(super) fn fail(&mut self, id: StageId, failure: Failure) {
        let name = self.stage(id).name.clone();
        let active = self.active.remove(&id);
        let duration_s = active.as_ref().map_or(0.0, |active| active.started.elapsed().as_secs_f64());
        let is_cancelled = failure == Failure::Cancelled;
        let outcome = match is_cancelled {
            true => {
                self.record.set_outcome(id, active.as_ref().map(Active::keys), StageState::Cancelled, None);
                StageOutcome::Cancelled
            }
            false => {
                self.report.failures.insert(name.clone(), failure.clone());
                self.failed(id, active, failure.explanation(), duration_s)
            }
        };
        self.emit(RunEvent::StageFinished { stage: name.clone(), outcome, duration_s, rows: None });
        for skipped in self.scheduler.finish(id.0, false).into_iter().map(StageId) {
            if is_cancelled {
                // Nothing failed; it would have come next.
                continue;
            }
            self.record.set_outcome(skipped, None, StageState::Skipped, None);
            let (stage, outcome) = (self.stage(skipped).name.clone(), StageOutcome::Skipped { because: name.clone() });
            self.emit(RunEvent::StageFinished { stage, outcome, duration_s: 0.0, rows: None });
        }
        self.release_parked(id);
    }

    /// Records a failure; what users read of it.
    fn failed(&mut self, id: StageId, active: Option<Active>, why: Explanation, duration_s: f64) -> StageOutcome {
        let name = self.stage(id).name.clone();
        let folder = active
            .as_ref()
            .filter(|active| active.attempt > 0)
            .map(|active| attempt_folder(&self.context.folders, &self.context.run, &name, active.attempt));
        if let Some(folder) = &folder {
            self.record.keep_folder(folder);
        }
        self.record.set_outcome(id, active.as_ref().map(Active::keys), StageState::Failed, Some(why.message.clone()));
        self.record.set_work(id, duration_s, None);
        let log = active.and_then(|active| active.log);
        let log_tail = log.map(|log| log.lock().expect("no panic happens under this lock").last_lines(LOG_TAIL));
        let outcome = StageOutcome::Failed {
            message: why.message.clone(),
            hint: why.hint.clone(),
            log_tail: log_tail.unwrap_or_default(),
            folder: folder.filter(|folder| folder.is_dir()),
        };
        self.report.failed.insert(name, why);
        outcome
    }
}

fn backoff(retry: &Retry, attempt: u32) -> Duration {
    retry.backoff.saturating_mul(1 << attempt.saturating_sub(1).min(20)).min(retry.max_backoff)
}
