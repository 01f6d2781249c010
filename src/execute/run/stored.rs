//! What a run sends to the store beside results: logs, its manifest, and what could not be shared earlier.

use super::Run;
use super::job_end::{JobEnd, Upload};
use crate::event::RunOutcome;
use crate::execute::folders::{file_name, live_log};
use crate::execute::stage_id::StageId;
use crate::execute::work;
use crate::store::{RunState, StoreError};

impl Run<'_, '_> {
    /// Keeps what a stage printed, unless it printed nothing.
    pub(super) async fn keep_log(&mut self, id: StageId, succeeded: bool) {
        let stage = self.stage(id);
        let Some(log) = self.active.get(&id).and_then(|active| active.log.clone()) else { return };
        let is_empty = {
            let mut log = log.lock().expect("no panic happens under this lock");
            log.flush();
            log.is_empty()
        };
        let file = live_log(&self.context.folders, &self.context.run, &stage.name);
        let bytes = std::fs::read(&file).unwrap_or_default();
        let _ = std::fs::remove_file(&file);
        if is_empty && succeeded {
            return;
        }
        let name = format!("{}.log", file_name(&stage.name));
        if let Err(error) = self.engine.store.nearby().put_log(&self.context.run, &name, bytes.into()).await {
            self.warn(&stage.name, format!("its log could not be kept: {error}"));
        }
        let (store, run) = (self.engine.store.clone(), self.context.run.clone());
        self.upload(Upload::Log, async move { store.share_log(&run, &name).await });
    }

    /// What takes requests to a shared store and nothing waits for is a job of its own: an interrupt must not wait for it.
    fn upload(&mut self, what: Upload, work: impl Future<Output = Result<(), StoreError>> + Send + 'static) {
        if self.engine.store.has_remote() {
            self.jobs.spawn(async move { JobEnd::Uploaded(what, work.await) });
        }
    }

    /// Before the first program: the manifest is in the store before anything else is written (gc reads it), and this
    /// run's work folder is marked as alive.
    pub(super) async fn record_once(&mut self) -> Result<(), StoreError> {
        if self.record.is_recorded() {
            return Ok(());
        }
        let work = &self.context.folders.work;
        self.context.claimant.observer.mark_dead(work::dead(work));
        self.record.claim_folder(work);
        self.record.write(&self.engine.store, RunState::Running).await
    }

    /// Records that the run goes on. A store that is away for a moment costs a heartbeat, not the run.
    pub(super) async fn heartbeat(&mut self) {
        let (store, manifest) = (self.engine.store.clone(), self.record.heartbeat().clone());
        if store.has_remote() {
            self.upload(Upload::Heartbeat, async move { store.put_run(&manifest).await });
        } else if let Err(error) = store.put_run(&manifest).await {
            self.warn("run", error.to_string());
        }
    }

    /// Tries once more to share what could not be shared when it was made, and leaves a hint to the next run.
    pub(super) async fn share_the_rest(&mut self) {
        let store = &self.engine.store;
        if !store.has_remote() {
            return;
        }
        if self.report.outcome != RunOutcome::Interrupted {
            store.share_the_rest().await;
        }
        if self.report.outcome == RunOutcome::Done && store.unshared().is_empty() {
            let stages: Vec<_> =
                self.record.entries().filter_map(|(name, entry)| Some((name.clone(), entry.key?))).collect();
            if let Err(error) = self.lookups.planner.leave_hint(&self.context.run, stages.into_iter()).await {
                store.warn(error.to_string());
            }
        }
        store.write_known();
        self.report_store_warnings();
    }
}
