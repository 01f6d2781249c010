//! What a pipeline file says, resolved: parameters substituted, matrices expanded, kinds and wires checked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cuda_agent_protocol::Manifest;
use cuda_agent_protocol::manifest::Resources;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::document::Location;
use crate::artifact::Artifact;

/// A pipeline that is ready to be planned.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// Its name; runs are filed under it.
    pub name: String,
    /// Parameters after overrides.
    pub params: BTreeMap<String, Value>,
    /// Where secrets come from.
    pub secrets: BTreeMap<String, SecretSource>,
    /// Stages in the order of the file, matrices expanded; every `Source::Stage` index is valid and there is no
    /// cycle. Stages whose `when:` is false are left out.
    pub stages: Vec<Stage>,
    /// The folder of the pipeline file: relative paths start there.
    pub folder: PathBuf,
}

/// Where the value of a secret is found at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SecretSource {
    /// An environment variable of the engine.
    Environment(String),
    /// A file, whose trailing line end is dropped.
    File(PathBuf),
}

/// One stage, or one cell of a stage's matrix.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Unique: `train`, or `train[lr=0.1,size=small]` for a cell.
    pub name: String,
    /// The name in the file.
    pub base: String,
    /// The cell, empty where there is no matrix.
    pub matrix: BTreeMap<String, Value>,
    /// Its kind. For `uses: run` a manifest made from the stage itself (name `run`), with its ports; its `sources` are
    /// the stage's `files`, copied beside the command under the same relative path and part of its program digest.
    pub kind: Arc<Manifest>,
    /// What to run, for `uses: run`.
    pub command: Option<Command>,
    /// Parameters of the pipeline that stand in the command.
    pub command_params: BTreeSet<String>,
    /// Every parameter of the kind, defaults filled in. Empty for `run`.
    pub params: BTreeMap<String, Value>,
    /// By port. A port that takes one has one source; optional ports may be absent.
    pub inputs: BTreeMap<String, Vec<Source>>,
    /// The kind's, overridden by the stage's.
    pub resources: Resources,
    /// The executor that it names; the project's default where it names none.
    pub executor: Option<String>,
    /// How often and how fast to try again.
    pub retry: Retry,
    /// Kill after this.
    pub timeout: Option<Duration>,
    /// For selection (`tag:NAME`).
    pub tags: Vec<String>,
    /// Extra environment, part of the key.
    pub env: BTreeMap<String, String>,
    /// Names out of `Pipeline::secrets`; the program sees each as an environment variable of that name.
    pub secrets: Vec<String>,
    /// How many rows of a by-row stage may fail without failing the stage.
    pub allow_failed_rows: u64,
    /// More rejected rows than this fail a by-row stage; any number may be where it is absent.
    pub max_rejected: Option<u64>,
    /// `file:line:column` of the stage, for messages: found out when it is shown.
    pub location: Location,
}

/// The command of a `uses: run` stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// `run: "text"`: given to `sh -euc`.
    Shell(String),
    /// `run: [word, …]`.
    Words(Vec<String>),
}

/// Where an input comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `stage.output`.
    Stage {
        /// Index into `Pipeline::stages`.
        stage: usize,
        /// Port of that stage.
        output: String,
    },
    /// `{path: …}`, absolute or relative to the pipeline's folder, already joined with it.
    Path(PathBuf),
    /// `{url: …, digest: …}`.
    Url {
        /// `https://…`, `file://…` or a store's.
        url: String,
        /// BLAKE3 of the bytes.
        digest: String,
    },
    /// `{artifact: name@tag}`.
    Artifact {
        /// Name.
        name: String,
        /// Tag.
        tag: String,
    },
    /// An artifact of the store. No file says this: it is how a worker gets the inputs of a stage.
    Stored(Box<Artifact>),
}

/// `retry: 2` or `retry: {attempts: 2, backoff: 1s, max_backoff: 1m}`: `attempts` counts the tries after the first, and is
/// 1 in a mapping that doesn't say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Tries after the first.
    pub attempts: u32,
    /// Wait before the second try; doubled for each further one.
    pub backoff: Duration,
    /// Longest wait.
    pub max_backoff: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { attempts: 0, backoff: Duration::from_secs(1), max_backoff: Duration::from_secs(60) }
    }
}
