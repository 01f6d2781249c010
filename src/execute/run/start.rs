//! How an attempt at a stage begins.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use cuda_agent_protocol::ResourceGrant;
use tokio::sync::mpsc;

use super::Run;
use super::job_end::JobEnd;
use crate::event::RunEvent;
use crate::execute::checkpoint_state::CheckpointState;
use crate::execute::executor::Executor;
use crate::execute::folders::live_log;
use crate::execute::job::{Grants, Job};
use crate::execute::log::Log;
use crate::execute::report::Reporter;
use crate::execute::stage_id::StageId;

impl Run<'_, '_> {
    /// Starts an attempt at a stage as a job of its own.
    pub(super) fn start(&mut self, id: StageId, grant: ResourceGrant) {
        let job = self.job(id, grant);
        // A by-row stage has started when it is known how many rows there are to do.
        if job.stage().kind.by_row.is_none() {
            let (stage, attempt, reasons) = (job.stage().name.clone(), job.attempt, job.reasons.clone());
            self.emit(RunEvent::StageStarted { stage, attempt, reasons, rows: None });
        }
        let executor = self.executors.of(self.engine.host, job.stage()).clone();
        self.jobs.spawn(run(job, executor));
    }

    fn job(&mut self, id: StageId, grant: ResourceGrant) -> Job {
        let stage = self.stage(id);
        let secrets = self.engine.secrets.of(stage);
        let values: Vec<String> = secrets.values.iter().map(|(_, value)| value.clone()).collect();
        let log_file = live_log(&self.context.folders, &self.context.run, &stage.name);
        let (widen, further) = mpsc::unbounded_channel();
        let active = self.active.get_mut(&id).expect("a started stage is active");
        active.attempt += 1;
        active.started = Instant::now();
        active.widen = Some(widen);
        let log = active.log.get_or_insert_with(|| Arc::new(Mutex::new(Log::create(&log_file, &values))));
        Job {
            context: self.context.clone(),
            id,
            kind: self.engine.catalog.kind(&stage.kind.name).cloned(),
            command_files: self.lookups.planner.command_files(stage).unwrap_or_default(),
            resolved: active.resolved.clone(),
            reasons: active.reasons.clone(),
            generation: active.generation,
            attempt: active.attempt,
            grants: Grants { first: Some(grant), further, wanted: self.signals.wanted.subscribe() },
            secrets,
            log: log.clone(),
            stop: self.signals.stop.subscribe(),
            leases: Vec::new(),
            checkpoints: CheckpointState::default(),
            reporter: Reporter::new(stage.name.clone(), self.messages.clone()),
        }
    }
}

async fn run(mut job: Job, executor: Arc<dyn Executor>) -> JobEnd {
    let outcome = executor.execute(&mut job).await;
    job.give_back_leases().await;
    job.give_back_unused_grants();
    JobEnd::Attempt(job.id, outcome.map(Box::new))
}
