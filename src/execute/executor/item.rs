//! What a leader and its workers write for each other. Every member that is read has to be there, and a higher `schema`
//! is left to later versions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cuda_agent_protocol::Manifest;
use cuda_agent_protocol::manifest::Resources;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::artifact::Artifact;
use crate::catalog::Catalog;
use crate::digest::Digest;
use crate::execute::failure::{Explanation, Failure};
use crate::execute::job::Job;
use crate::host::Gpu;
use crate::key::Preimage;
use crate::spec::{Command, Location, Pipeline, Retry, SecretSource, Source, Stage};
use crate::store::RunManifest;
use crate::store::lease::Holder;

/// The version of these formats.
pub const SCHEMA: u32 = 1;

/// An attempt at a stage, with everything that a worker needs for it, inputs by digest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkItem {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The run that wants the result, as others see whether it lives.
    pub leader: Holder,
    /// The pipeline's name.
    pub pipeline: String,
    /// The key of the result.
    pub key: Digest,
    /// The generation of an unusable record, or 0.
    pub generation: u32,
    /// Whether it is to be executed whatever the store has.
    pub refresh: bool,
    /// What the key is made of, so that a worker can say why its own would differ.
    pub preimage: Preimage,
    /// By port.
    pub inputs: BTreeMap<String, Vec<Artifact>>,
    /// The stage, as far as it is not in the kind.
    pub stage: WorkStage,
    /// Where secrets of the stage come from. Their values are in no store.
    pub secrets: BTreeMap<String, SecretSource>,
}

/// A stage of a work item.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkStage {
    /// Its name.
    pub name: String,
    /// The manifest of a command, which no catalog has.
    pub manifest: Option<Manifest>,
    /// The command.
    pub command: Option<Command>,
    /// Every parameter of the kind.
    pub params: BTreeMap<String, Value>,
    /// What one program needs.
    pub resources: Resources,
    /// Seconds after which it is ended.
    pub timeout_s: Option<f64>,
    /// Extra environment.
    pub env: BTreeMap<String, String>,
    /// Names of secrets.
    pub secrets: Vec<String>,
    /// How many rows may fail.
    pub allow_failed_rows: u64,
    /// How many rows may be rejected.
    pub max_rejected: Option<u64>,
}

impl WorkItem {
    /// Of an attempt that is to be announced.
    pub fn of(job: &Job) -> Self {
        let (stage, sources) = (job.stage(), &job.context.pipeline.secrets);
        let inputs = job.resolved.inputs.iter();
        let artifacts = |inputs: &Vec<crate::plan::inputs::Input>| inputs.iter().map(|i| i.artifact.clone()).collect();
        Self {
            schema: SCHEMA,
            leader: job.context.claimant.holder.clone(),
            pipeline: job.context.pipeline.name.clone(),
            key: job.resolved.key,
            generation: job.generation,
            refresh: job.is_refresh(),
            preimage: job.resolved.preimage.clone(),
            inputs: inputs.map(|(port, inputs)| (port.clone(), artifacts(inputs))).collect(),
            stage: WorkStage {
                name: stage.name.clone(),
                manifest: stage.command.is_some().then(|| (*stage.kind).clone()),
                command: stage.command.clone(),
                params: stage.params.clone(),
                resources: stage.resources.clone(),
                timeout_s: stage.timeout.map(|timeout| timeout.as_secs_f64()),
                env: stage.env.clone(),
                secrets: stage.secrets.clone(),
                allow_failed_rows: stage.allow_failed_rows,
                max_rejected: stage.max_rejected,
            },
            secrets: stage.secrets.iter().filter_map(|name| Some((name.clone(), sources.get(name)?.clone()))).collect(),
        }
    }

    /// Reads what a leader wrote; an error says why it cannot be used.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(bytes).map_err(|error| format!("it is damaged: {error}"))?;
        match value["schema"].as_u64() {
            Some(schema) if schema > SCHEMA.into() => {
                Err(format!("a newer version of cuda-agent wrote it (schema {schema})"))
            }
            _ => serde_json::from_value(value).map_err(|error| format!("it cannot be read: {error}")),
        }
    }

    /// A pipeline of this stage alone; an error says what this binary lacks. Another attempt is for the leader to start, so
    /// that another machine may get it.
    pub fn pipeline(&self, catalog: &Catalog, folder: &Path) -> Result<Pipeline, String> {
        let stage = &self.stage;
        let kind = match &stage.manifest {
            Some(manifest) => Arc::new(manifest.clone()),
            None => {
                let kind = catalog.kind(&self.preimage.kind);
                kind.ok_or_else(|| format!("there is no stage kind `{}` here", self.preimage.kind))?.manifest.clone()
            }
        };
        let stored = |artifacts: &Vec<Artifact>| {
            artifacts.iter().map(|artifact| Source::Stored(Box::new(artifact.clone()))).collect::<Vec<_>>()
        };
        if let Some(port) = self.inputs.keys().find(|port| !kind.inputs.contains_key(*port)) {
            return Err(format!("the stage kind `{}` has no input `{port}` here", kind.name));
        }
        let inputs = self.inputs.iter().map(|(port, artifacts)| (port.clone(), stored(artifacts)));
        let stage = Stage {
            name: stage.name.clone(),
            base: stage.name.clone(),
            matrix: BTreeMap::new(),
            kind,
            command: stage.command.clone(),
            command_params: BTreeSet::new(),
            params: stage.params.clone(),
            inputs: inputs.collect(),
            resources: stage.resources.clone(),
            executor: None,
            retry: Retry::default(),
            timeout: stage.timeout_s.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
            tags: Vec::new(),
            env: stage.env.clone(),
            secrets: stage.secrets.clone(),
            allow_failed_rows: stage.allow_failed_rows,
            max_rejected: stage.max_rejected,
            location: Location::unknown(),
        };
        Ok(Pipeline {
            // Runs of workers are no runs of the pipeline: `gc` and `status` count those.
            name: RunManifest::name_of_worker(&self.pipeline),
            params: BTreeMap::new(),
            secrets: self.secrets.clone(),
            stages: vec![stage],
            folder: folder.to_owned(),
        })
    }
}

/// How an attempt failed on a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkFailure {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The worker's run, which has the log.
    pub run: String,
    /// Its machine.
    pub host: String,
    /// What follows from it.
    pub reason: FailureReason,
    /// What went wrong.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// What follows from a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureReason {
    /// Another attempt may succeed.
    Retryable,
    /// None would.
    Permanent,
    /// An input is gone from the store: this blob of it.
    InputLost(Digest),
}

impl WorkFailure {
    /// Of a run of a worker; `None` for what is no failure of the stage.
    pub fn of(run: &str, failure: Failure) -> Option<Self> {
        let reason = match &failure {
            Failure::Retryable(_) => FailureReason::Retryable,
            Failure::Permanent(_) => FailureReason::Permanent,
            Failure::InputLost(blob, _) => FailureReason::InputLost(*blob),
            Failure::Cancelled | Failure::LookUpAgain(..) => return None,
        };
        let (host, Explanation { message, hint }) = (Holder::this(run).host, failure.explanation());
        Some(Self { schema: SCHEMA, run: run.to_owned(), host, reason, message, hint })
    }

    /// The same for the leader.
    pub fn failure(self) -> Failure {
        let explanation = Explanation { message: format!("{} (on {})", self.message, self.host), hint: self.hint };
        match self.reason {
            FailureReason::Retryable => Failure::Retryable(explanation),
            FailureReason::Permanent => Failure::Permanent(explanation),
            FailureReason::InputLost(blob) => Failure::InputLost(blob, explanation),
        }
    }
}

/// A worker, as it reports itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Its process; the run's name is the worker's own.
    pub holder: Holder,
    /// The binary's version.
    pub version: String,
    /// CPU cores to give out.
    pub cpus: u32,
    /// Bytes of memory to give out.
    pub memory: u64,
    /// The CPU's model.
    pub cpu_model: String,
    /// Its GPUs.
    pub gpus: Vec<Gpu>,
    /// Seconds since 1970.
    pub started_at: f64,
    /// The last sign of life.
    pub heartbeat_at: f64,
    /// Stages that it executes.
    pub busy: Vec<String>,
    /// Keys that it leaves to others, and why.
    pub left: BTreeMap<Digest, String>,
    /// How far stages are that it executes, by key, where they say so.
    #[serde(default)]
    pub progress: BTreeMap<Digest, Progress>,
}

/// How far a stage is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Units done.
    pub done: u64,
    /// Units in all.
    pub total: Option<u64>,
    /// What a unit is.
    pub unit: String,
}

impl WorkerReport {
    /// Reads a report; `None` where it is damaged, or of a later version.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice::<Self>(bytes).ok().filter(|report| report.schema <= SCHEMA)
    }

    /// Its devices in words.
    pub fn device(&self) -> String {
        match self.gpus.first() {
            Some(gpu) => format!("{} × {} (driver {})", self.gpus.len(), gpu.model, gpu.driver),
            None => format!("no GPU, {}", self.cpu_model),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_reaches_the_leader_with_what_follows_from_it() {
        let lost = Failure::input_lost(Digest([7; 32]));
        for (failure, may_pass) in
            [(Failure::retryable("a").with_hint("b"), true), (Failure::permanent("a"), false), (lost, false)]
        {
            let told = WorkFailure::of("run", failure.clone()).unwrap();
            let read: WorkFailure = serde_json::from_slice(&serde_json::to_vec(&told).unwrap()).unwrap();
            let there = read.failure();
            assert_eq!(std::mem::discriminant(&there), std::mem::discriminant(&failure));
            assert_eq!(there.may_pass(), may_pass);
            assert_eq!(there.clone().explanation().hint, failure.clone().explanation().hint);
            assert!(there.explanation().message.starts_with(&failure.explanation().message));
        }
        assert_eq!(WorkFailure::of("run", Failure::Cancelled), None);
        assert_eq!(WorkFailure::of("run", Failure::made_by_others(Vec::new())), None);
    }

    #[test]
    fn what_cannot_be_read_says_why() {
        assert!(WorkItem::read(b"{").unwrap_err().starts_with("it is damaged: "));
        assert!(WorkItem::read(b"{\"schema\": 1}").unwrap_err().starts_with("it cannot be read: "));
        assert_eq!(
            WorkItem::read(b"{\"schema\": 2}").unwrap_err(),
            "a newer version of cuda-agent wrote it (schema 2)"
        );
    }
}
