//! Which stages have a result, and which have to be executed.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use futures::future::LocalBoxFuture;
use futures::stream::FuturesUnordered;
use tokio::sync::mpsc;

use super::Run;
use super::active::Active;
use super::job_end::{JobEnd, Upload};
use crate::event::RunEvent;
use crate::execute::failure::{Explanation, Failure};
use crate::execute::stage_id::StageId;
use crate::plan::{Found, Outputs, PlanError, Planner, StagePlan, Verdict};
use crate::spec::Source;
use crate::store::StageState;

/// Lookups of a run: those that were made at its beginning, those that go on, and those that were made again.
pub struct Lookups<'e> {
    /// Resolves inputs, computes keys, asks the store.
    pub planner: Arc<Planner<'e>>,
    /// Those that go on.
    pub running: FuturesUnordered<LocalBoxFuture<'e, (StageId, Result<StagePlan, PlanError>)>>,
    /// What was there when the run began.
    found: HashMap<usize, Found>,
    /// Stages whose result was gone, so that they were looked up once more.
    pub redone: BTreeSet<StageId>,
    /// How often stages were looked up again without anything to wait for.
    pub repeated: HashMap<StageId, u32>,
}

impl<'e> Lookups<'e> {
    /// None yet.
    pub fn new(planner: Planner<'e>) -> Self {
        Self {
            planner: Arc::new(planner),
            running: FuturesUnordered::new(),
            found: HashMap::new(),
            redone: BTreeSet::new(),
            repeated: HashMap::new(),
        }
    }
}

impl<'e, 'a> Run<'e, 'a> {
    /// What is there already is found at once, and not by the loop. An interrupt meanwhile is for the loop.
    pub(super) async fn find_hits(&mut self, interrupts: &mut mpsc::UnboundedReceiver<()>) -> Result<(), PlanError> {
        let planner = self.lookups.planner.clone();
        tokio::select! {
            biased;
            Some(()) = interrupts.recv() => {
                self.interrupt();
                return Ok(());
            }
            begun = planner.begin() => drop(begun?),
        }
        let is_halted = || !interrupts.is_empty();
        self.lookups.found = planner.hits(&self.engine.order, &self.engine.selected, &is_halted).await?;
        Ok(())
    }

    /// Looks a stage up whose producers are done: at once, or beside others where that takes requests or reads files.
    pub(super) async fn look_up(&mut self, id: StageId) -> Result<(), PlanError> {
        if let Some(found) = self.lookups.found.remove(&id.0) {
            self.reuse(id, found);
            return Ok(());
        }
        let is_outside = |source: &Source| matches!(source, Source::Path(_) | Source::Url { .. });
        if !self.engine.store.has_remote() && !self.stage(id).inputs.values().flatten().any(is_outside) {
            let outputs = &self.outputs;
            let plan = self.lookups.planner.stage(id.0, |producer| outputs[producer].as_ref()).await;
            return self.looked_up(id, plan);
        }
        let before = crate::plan::producers(self.stage(id));
        let outputs: HashMap<usize, Outputs> =
            before.into_iter().filter_map(|producer| Some((producer, self.outputs[producer].clone()?))).collect();
        let planner = self.lookups.planner.clone();
        self.lookups.running.push(Box::pin(async move {
            let known = |producer: usize| outputs.get(&producer);
            let plan = planner.stage_or_local(id.0, known).await;
            (id, plan)
        }));
        Ok(())
    }

    /// Takes notice of a lookup. Only errors of the store end the run.
    pub(super) fn looked_up(&mut self, id: StageId, plan: Result<StagePlan, PlanError>) -> Result<(), PlanError> {
        if !self.goes_on() {
            return Ok(());
        }
        let plan = match plan {
            Ok(plan) => plan,
            Err(error @ (PlanError::Store(_) | PlanError::Rows(_))) => return Err(error),
            Err(error) => {
                let hint = error.hint();
                self.fail(id, Failure::Permanent(Explanation { message: error.to_string(), hint }));
                return Ok(());
            }
        };
        let StagePlan { resolved: Some(resolved), verdict } = plan else {
            unreachable!("the scheduler looks only at stages whose producers are done")
        };
        match verdict {
            Verdict::Hit { record, generation } => {
                let is_shared = self.engine.store.is_shared(record.id(), generation);
                self.reuse(id, Found::new(&resolved, record.rows, record.outputs, is_shared));
            }
            Verdict::Miss { reasons, generation } => self.queue(id, Active::new(resolved, reasons, generation)),
            Verdict::Pending { .. } => unreachable!("a resolved stage is not pending"),
        }
        Ok(())
    }

    /// Queues a stage that has no result, unless it can never run here or another stage is making the same.
    fn queue(&mut self, id: StageId, active: Active) {
        let stage = self.stage(id);
        if let Some(failure) = self.executors.of(self.engine.host, stage).lack(stage) {
            self.active.insert(id, active);
            self.fail(id, failure);
            return;
        }
        if let Some(maker) = self.in_flight.maker(&active.resolved.key) {
            self.in_flight.park(id, maker);
            self.scheduler.park(id.0);
            return;
        }
        self.in_flight.add(active.resolved.key, id);
        self.active.insert(id, active);
        self.scheduler.queue(id.0);
    }

    /// Takes a result that the store has.
    fn reuse(&mut self, id: StageId, found: Found) {
        self.record.set_outcome(id, Some((found.key, found.base)), StageState::Hit, None);
        self.record.set_rows(id, found.rows);
        self.report.hits += 1;
        self.emit(RunEvent::StageHit { stage: self.stage(id).name.clone(), rows: found.rows });
        if !found.is_shared {
            // Found on this machine only, or not known to be whole in the shared store. It is a job, so that the run does
            // not end before.
            let store = self.engine.store.clone();
            self.jobs.spawn(async move {
                let offered = match store.nearby().newest(&found.key).await {
                    Ok((generation, Some(record))) => store.offer(record, generation).await.map(|_| ()),
                    other => other.map(|_| ()),
                };
                JobEnd::Uploaded(Upload::Result, offered)
            });
        }
        self.done(id, found.outputs);
    }
}
