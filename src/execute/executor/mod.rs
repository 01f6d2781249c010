//! Where an attempt at a stage is executed: on this machine, or by others. What an executor's machines have counts in
//! pools, in keys (`Host::device_of`) and in the check whether a stage can run at all.

pub mod item;
mod workers;

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_agent_protocol::manifest::Resources;
use futures::future::BoxFuture;

use super::failure::Failure;
use super::job::Job;
use super::stage;
use crate::host::Host;
use crate::schedule::Pools;
use crate::spec::{self, ExecutorKind, Stage};
use crate::store::Record;
use workers::Workers;

/// Executes attempts at stages.
pub trait Executor: Send + Sync {
    /// What an attempt takes from this machine's pools while it goes on.
    fn need(&self, stage: &Stage) -> Resources;
    /// Why none of its machines can ever execute a stage, if that is so.
    fn lack(&self, stage: &Stage) -> Option<Failure>;
    /// Executes an attempt: when it ends well the store has the record, which was written last.
    fn execute<'j>(&'j self, job: &'j mut Job) -> BoxFuture<'j, Result<Record, Failure>>;
}

/// This machine.
struct Local {
    pools: Pools,
    jobs: Option<u32>,
}

impl Executor for Local {
    /// `--jobs 1` means one after another, not that wide stages cannot run.
    fn need(&self, stage: &Stage) -> Resources {
        let need = stage.resources.clone().on(self.pools.cpus, self.pools.gpus.len());
        Resources { cpu: need.cpu.min(self.jobs.unwrap_or(u32::MAX)), ..need }
    }

    fn lack(&self, stage: &Stage) -> Option<Failure> {
        let lack = self.pools.lack(&self.need(stage))?;
        let hint = "lower `resources:` of the stage, or run on a larger machine";
        Some(Failure::permanent(format!("needs {lack}")).with_hint(hint))
    }

    fn execute<'j>(&'j self, job: &'j mut Job) -> BoxFuture<'j, Result<Record, Failure>> {
        Box::pin(stage::execute(job))
    }
}

/// The executors that the stages of a run choose from.
pub struct Executors {
    local: Arc<dyn Executor>,
    named: BTreeMap<String, Arc<dyn Executor>>,
}

impl Executors {
    /// Those that a machine knows. `pools` and `jobs` are what its own programs may use.
    pub fn new(host: &Host, pools: Pools, jobs: Option<u32>) -> Self {
        let named = host.executors.iter().filter_map(|(name, of)| Some((name.clone(), remote(name, of)?)));
        Self { local: Arc::new(Local { pools, jobs }), named: named.collect() }
    }

    /// The one that executes a stage.
    pub fn of(&self, host: &Host, stage: &Stage) -> &Arc<dyn Executor> {
        let remote = host.executor_of(stage).filter(|_| !host.is_alone).and_then(|(name, _)| self.named.get(name));
        remote.unwrap_or(&self.local)
    }
}

/// The implementation for each kind of executor.
fn remote(name: &str, of: &spec::Executor) -> Option<Arc<dyn Executor>> {
    match &of.kind {
        ExecutorKind::Workers => Some(Arc::new(Workers::new(name, of))),
        // Such a project file is refused.
        ExecutorKind::Unknown(_) => None,
    }
}
