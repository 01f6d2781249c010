//! What a run needs, and what it came to. `run/` is what happens between.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cuda_agent_protocol::manifest::Resources;

use super::failure::Explanation;
use super::launch::Launcher;
use super::sample::Sample;
use super::secrets::Secrets;
use super::stage_id::StageId;
use crate::Folders;
use crate::catalog::Catalog;
use crate::event::RunOutcome;
use crate::host::Host;
use crate::plan::{Outputs, Planner};
use crate::schedule::{Pools, Scheduler};
use crate::spec::{Pipeline, Stage};
use crate::store::{RunManifest, Store};

/// What a run needs.
pub struct Engine<'a> {
    /// The pipeline, resolved.
    pub pipeline: Arc<Pipeline>,
    /// The stage kinds that the pipeline may use.
    pub catalog: &'a Catalog,
    /// Where results are looked up, and where they are written.
    pub store: Store,
    /// The machine whose cores, memory and GPUs are granted.
    pub host: &'a Host,
    /// Work, state and cache folders of this machine.
    pub folders: Folders,
    /// Starts programs; a fake in tests.
    pub launcher: Arc<dyn Launcher>,
    /// Which stages take part.
    pub selected: Vec<bool>,
    /// The stages, producers before consumers.
    pub order: Vec<usize>,
    /// Stages to run whatever the store has.
    pub refresh: BTreeSet<usize>,
    /// Values that stages get as environment variables, and that appear in no log, message or output.
    pub secrets: Secrets,
    /// The most CPU cores to use.
    pub jobs: Option<u32>,
    /// Of the rows of a refreshed by-row stage, do only some again.
    pub sample: Option<Sample>,
}

/// What a run came to.
#[derive(Debug)]
pub struct Report {
    /// The run's id.
    pub run: String,
    /// How it ended.
    pub outcome: RunOutcome,
    /// Outputs of every stage that is done.
    pub outputs: BTreeMap<String, Outputs>,
    /// Stages that were executed, in the order in which they ended.
    pub executed: Vec<String>,
    /// Stages that were in the store.
    pub hits: usize,
    /// Stages that failed, with why.
    pub failed: BTreeMap<String, Explanation>,
    /// As it was recorded last.
    pub manifest: Option<RunManifest>,
}

impl Engine<'_> {
    /// The planner that this run asks.
    pub fn planner(&self) -> Planner<'_> {
        Planner::new(&self.pipeline, self.catalog, &self.store, self.host, &self.folders, &self.refresh)
    }

    /// The pools of this run.
    pub fn pools(&self) -> Pools {
        Pools {
            cpus: self.jobs.unwrap_or(self.host.cpus),
            memory: self.host.memory,
            gpus: (0..self.host.gpus.len() as u32).collect(),
        }
    }

    /// A scheduler of the selected stages.
    pub fn scheduler(&self) -> Scheduler {
        let producers: Vec<Vec<usize>> = self.pipeline.stages.iter().map(crate::plan::producers).collect();
        let needs = self.pipeline.stages.iter().map(|stage| self.need(stage)).collect();
        Scheduler::new(&producers, &self.selected, needs, self.pools())
    }

    /// What a program of a stage needs. `--jobs 1` means one after another, not that wide stages cannot run.
    pub fn need(&self, stage: &Stage) -> Resources {
        let pools = self.pools();
        let need = stage.resources.clone().on(pools.cpus, pools.gpus.len());
        Resources { cpu: need.cpu.min(self.jobs.unwrap_or(u32::MAX)), ..need }
    }

    /// A stage of the pipeline.
    pub fn stage(&self, id: StageId) -> &Stage {
        &self.pipeline.stages[id.0]
    }
}
