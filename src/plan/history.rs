//! What earlier runs of a pipeline recorded, for the reasons of misses.

use std::collections::BTreeMap;

use serde_json::Value;

use futures::StreamExt;

use super::Resolved;
use crate::digest::Digest;
use crate::key::{ChangedParam, MissReason, difference};
use crate::spec::Stage;
use crate::store::{Hint, StageState, Store, StoreError};

/// How many runs of a pipeline are looked at.
const RUNS: usize = 20;
/// How many runs of all pipelines are opened to find them.
const LOOK: usize = 200;

/// What the newest runs of a pipeline recorded.
#[derive(Debug, Default)]
pub struct History {
    /// By stage, newest first: run, key, outcome.
    stages: BTreeMap<String, Vec<(String, Digest, StageState)>>,
    /// By run.
    params: BTreeMap<String, BTreeMap<String, Value>>,
}

impl History {
    /// Reads the newest runs of a pipeline.
    pub async fn load(store: &Store, pipeline: &str) -> Result<Self, StoreError> {
        let mut history = Self::default();
        let mut found = 0;
        // A manifest that cannot be read costs a reason, not the run.
        let mut runs = store.manifests(LOOK).await?;
        while let Some(run) = runs.next().await {
            if run.pipeline != pipeline {
                continue;
            }
            let id = run.run;
            for (stage, entry) in run.stages {
                if let Some(key) = entry.key {
                    history.stages.entry(stage).or_default().push((id.clone(), key, entry.outcome));
                }
            }
            history.params.insert(id, run.params);
            found += 1;
            if found == RUNS {
                break;
            }
        }
        Ok(history)
    }

    /// Where this machine has no runs of the pipeline: what the last run anywhere found.
    pub fn or_hint(mut self, hint: Hint) -> Self {
        if self.stages.is_empty() {
            let entries =
                hint.stages.into_iter().map(|(stage, key)| (stage, vec![(hint.run.clone(), key, StageState::Done)]));
            self.stages = entries.collect();
        }
        self
    }

    /// Keys under which a stage had a result, newest first, each with a run that names it.
    pub fn results(&self, stage: &str) -> impl Iterator<Item = (&str, Digest)> {
        let entries = self.stages.get(stage).into_iter().flatten();
        entries.filter(|(_, _, outcome)| outcome.has_result()).map(|(run, key, _)| (run.as_str(), *key))
    }

    /// The pipeline's parameters in a run, where that is known here.
    pub fn params(&self, run: &str) -> Option<&BTreeMap<String, Value>> {
        self.params.get(run)
    }

    /// Why a stage without a record has to run; `params` are the pipeline's now.
    pub async fn explain(
        &self,
        store: &Store,
        stage: &Stage,
        params: &BTreeMap<String, Value>,
        resolved: &Resolved,
        producers: &BTreeMap<String, String>,
    ) -> Result<Vec<MissReason>, StoreError> {
        let Some(entries) = self.stages.get(&stage.name) else { return Ok(vec![MissReason::NeverRun]) };
        let same = entries.iter().find(|(_, key, _)| *key == resolved.key);
        if let Some((run, _, outcome)) = same {
            match outcome {
                StageState::Failed => return Ok(vec![MissReason::FailedBefore { run: run.clone() }]),
                outcome if outcome.has_result() => return Ok(vec![MissReason::RecordEvicted]),
                _ => {}
            }
        }
        for (run, key, _) in entries {
            if let Some((_, record)) = store.record(key).await? {
                let mut reasons = difference(&record.preimage, &resolved.preimage, producers);
                self.name_params(&mut reasons, run, stage, params);
                return Ok(reasons);
            }
        }
        Ok(vec![MissReason::NeverRun])
    }

    /// Says of a changed command which of the parameters in it are not what they were in a run.
    fn name_params(&self, reasons: &mut [MissReason], run: &str, stage: &Stage, params: &BTreeMap<String, Value>) {
        let Some(then) = self.params(run) else { return };
        for reason in reasons {
            let MissReason::CommandChanged { params: named, .. } = reason else { continue };
            let names = stage.command_params.iter().filter(|name| then.get(*name) != params.get(*name));
            let changed = |name: &String| ChangedParam {
                name: name.clone(),
                old: then.get(name).cloned(),
                new: params.get(name).cloned(),
            };
            named.extend(names.map(changed));
        }
    }
}
