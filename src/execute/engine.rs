//! What a run needs, and what it came to. `run/` is what happens between.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::executor::Executors;
use super::failure::{Explanation, Failure};
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
    /// Whether a stage waits where another run makes its result; else the attempt ends with that.
    pub waits: bool,
}

/// What a run came to.
#[derive(Debug)]
pub struct Report {
    /// The run's id.
    pub run: String,
    /// How it ended.
    pub outcome: RunOutcome,
    /// Outputs of every stage that is done.
    pub outputs: StageOutputs,
    /// Stages that were executed, in the order in which they ended.
    pub executed: Vec<String>,
    /// Stages that were in the store.
    pub hits: usize,
    /// Stages that failed, with why.
    pub failed: BTreeMap<String, Explanation>,
    /// The same for programs.
    pub failures: BTreeMap<String, Failure>,
    /// As it was recorded last.
    pub manifest: Option<RunManifest>,
}

/// Outputs of the stages of a pipeline that are done. They are found by name, since a run of ten thousand stages is asked for
/// few of them.
#[derive(Debug)]
pub struct StageOutputs {
    pipeline: Arc<Pipeline>,
    by_stage: Vec<Option<Outputs>>,
}

impl StageOutputs {
    /// `by_stage` has the outputs of each stage of the pipeline, in its order.
    pub(super) fn new(pipeline: Arc<Pipeline>, by_stage: Vec<Option<Outputs>>) -> Self {
        Self { pipeline, by_stage }
    }

    /// What a stage made, by its place in the pipeline; `None` where it is not done.
    pub fn of(&self, stage: usize) -> Option<&Outputs> {
        self.by_stage.get(stage)?.as_ref()
    }

    /// What a stage made, by its name; `None` where it is not done.
    pub fn get(&self, name: &str) -> Option<&Outputs> {
        self.of(self.pipeline.stages.iter().position(|stage| stage.name == name)?)
    }
}

impl std::ops::Index<&str> for StageOutputs {
    type Output = Outputs;

    /// What a stage made, which is done.
    fn index(&self, name: &str) -> &Outputs {
        self.get(name).unwrap_or_else(|| panic!("stage `{name}` is not done"))
    }
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

    /// The executors of this run.
    pub fn executors(&self) -> Executors {
        Executors::new(self.host, self.pools(), self.jobs)
    }

    /// A scheduler of the selected stages.
    pub fn scheduler(&self, executors: &Executors) -> Scheduler {
        let producers: Vec<Vec<usize>> = self.pipeline.stages.iter().map(crate::plan::producers).collect();
        let needs = self.pipeline.stages.iter().map(|stage| executors.of(self.host, stage).need(stage)).collect();
        Scheduler::new(&producers, &self.selected, needs, self.pools())
    }

    /// A stage of the pipeline.
    pub fn stage(&self, id: StageId) -> &Stage {
        &self.pipeline.stages[id.0]
    }
}
