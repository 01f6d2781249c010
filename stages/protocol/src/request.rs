//! What the engine asks of a program: `request.json`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::types::{ColumnType, PortType};

/// A request. Paths are relative to the working directory, but for `state_dir`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// [`crate::PROTOCOL_VERSION`].
    pub protocol: u32,
    /// The stage's name, for messages.
    pub stage: String,
    /// The stage kind.
    pub kind: String,
    /// Every parameter of the kind.
    pub params: Map<String, Value>,
    /// The parameter `seed` where the kind has one, else 0.
    pub seed: i64,
    /// By port; the by-row port is absent.
    pub inputs: BTreeMap<String, InputRequest>,
    /// By port.
    pub outputs: BTreeMap<String, OutputRequest>,
    /// Set for by-row kinds.
    pub by_row: Option<ByRowRequest>,
    /// What this program may use.
    pub resources: ResourceGrant,
    /// What measurements are filed under; a program that finds another device must refuse.
    pub device: Option<Device>,
    /// When the engine will kill the program, seconds since 1970.
    pub deadline_unix_s: Option<f64>,
    /// A folder that outlives attempts, for checkpoints.
    pub state_dir: PathBuf,
}

/// Where an input is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputRequest {
    /// Several, for a list port.
    #[serde(rename = "list")]
    List(Vec<InputFile>),
    /// One.
    #[serde(untagged)]
    One(InputFile),
}

/// One input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InputFile {
    /// Its type.
    #[serde(rename = "type")]
    pub port_type: PortType,
    /// A file or folder.
    pub path: PathBuf,
    /// Its logical digest.
    pub digest: String,
    /// Rows of a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
}

/// Where an output goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputRequest {
    /// Its type.
    #[serde(rename = "type")]
    pub port_type: PortType,
    /// A file or folder to make; a table may be `.jsonl` instead of `.parquet`.
    pub path: PathBuf,
    /// Declared columns of a table, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<(String, ColumnType)>,
}

/// How rows will come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByRowRequest {
    /// The input port whose rows come on standard input.
    pub port: String,
    /// The columns that come.
    pub columns: Vec<String>,
    /// How many rows may be unanswered.
    pub window: u32,
    /// How many rows the stage has to do, over all of its programs.
    pub total: u64,
}

/// A row on standard input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowInput {
    /// Its digest, to be named in the answer.
    pub row: String,
    /// Derived from the stage's seed and the digest, never from position.
    pub seed: i64,
    /// The declared columns.
    pub columns: Map<String, Value>,
}

/// What a program may use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceGrant {
    /// CPU cores.
    pub cpu: u32,
    /// Bytes of memory; 0 where nothing was reserved.
    pub memory_bytes: u64,
    /// Indices of whole GPUs; `CUDA_VISIBLE_DEVICES` is set to them.
    pub gpus: Vec<u32>,
}

/// The device that measurements belong to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Device {
    /// Timed on a CPU of this model.
    Cpu {
        /// As `/proc/cpuinfo` names it.
        model: String,
    },
    /// Timed on a GPU.
    Cuda {
        /// As the driver names it.
        model: String,
        /// The driver's version.
        driver: String,
    },
}
