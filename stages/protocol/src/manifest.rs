//! A stage kind's manifest: the contract of its program, written in `stage.yaml`.
//!
//! These are plain types; `cuda_agent_engine::spec` reads them from YAML with positions for its errors.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::types::{ColumnType, PortType};

/// A stage kind: what it takes, what it makes, and how to start it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// `group/name`.
    pub name: String,
    /// Semantic version. Of a built-in kind it is the program's identity while its sources match their lock.
    pub version: String,
    /// One sentence.
    pub summary: String,
    /// Input ports in the order of their declaration.
    #[serde(default)]
    pub inputs: BTreeMap<String, InputPort>,
    /// Output ports.
    pub outputs: BTreeMap<String, OutputPort>,
    /// Parameters.
    #[serde(default)]
    pub params: BTreeMap<String, Param>,
    /// What one program needs.
    #[serde(default)]
    pub resources: Resources,
    /// Environment variables that the program sees and that count in its key.
    #[serde(default)]
    pub env: Vec<String>,
    /// Versions that count in the key.
    #[serde(default)]
    pub toolchain: Toolchain,
    /// How far two runs of the same key agree.
    #[serde(default)]
    pub determinism: Determinism,
    /// Set where rows are independent.
    #[serde(default)]
    pub by_row: Option<ByRow>,
    /// Whether the program tells of checkpoints that the same work can be gone on from elsewhere. A kind with a parameter
    /// that continues has them without saying so.
    #[serde(default)]
    pub checkpoints: bool,
    /// The command: `python` stands for the project's interpreter, `cuda-agent` for this binary; other words are
    /// taken as they are, files relative to the manifest's folder.
    pub run: Vec<String>,
    /// Files (or folders) relative to the manifest that make up the program, for its digest. The manifest itself
    /// always counts.
    #[serde(default)]
    pub sources: Vec<String>,
    /// Files among or beside them that change results on one kind of device alone.
    #[serde(default)]
    pub device_sources: PerDevice<Vec<String>>,
    /// Of a built-in kind, versions in the place of `version` for results on a kind of device.
    #[serde(default)]
    pub device_versions: PerDevice<Option<String>>,
}

/// One value for stages without GPUs and one for stages with GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PerDevice<T> {
    /// Of stages without GPUs.
    pub cpu: T,
    /// Of stages with at least one.
    pub gpu: T,
}

impl<T> PerDevice<T> {
    /// The one for a stage with so many GPUs.
    pub fn with_gpus(&self, gpus: u32) -> &T {
        if gpus == 0 { &self.cpu } else { &self.gpu }
    }
}

impl Manifest {
    /// The parameter that says how far the work goes.
    pub fn continued(&self) -> Option<&str> {
        self.params.iter().find(|(_, param)| param.continues).map(|(name, _)| name.as_str())
    }

    /// Whether its checkpoints are shared.
    pub fn has_checkpoints(&self) -> bool {
        self.checkpoints || self.continued().is_some()
    }
}

/// An input port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputPort {
    /// What it takes.
    #[serde(rename = "type")]
    pub port_type: PortType,
    /// The columns that the program reads; all of them where empty. Only these count in the key.
    #[serde(default)]
    pub columns: BTreeMap<String, ColumnType>,
    /// Whether the stage runs without it.
    #[serde(default)]
    pub optional: bool,
    /// Whether it takes several outputs (`stage[*].output`, or a YAML list).
    #[serde(default)]
    pub list: bool,
    /// For people.
    #[serde(default)]
    pub doc: String,
}

/// An output port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputPort {
    /// What it makes.
    #[serde(rename = "type")]
    pub port_type: PortType,
    /// Columns of a table. The published table has exactly these, in the order in which the program wrote them
    /// (in this order where it wrote JSON lines); empty: whatever it wrote.
    #[serde(default)]
    pub columns: Vec<OutputColumn>,
    /// For people.
    #[serde(default)]
    pub doc: String,
}

/// A column of an output table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputColumn {
    /// Its name.
    pub name: String,
    /// Its type.
    #[serde(rename = "type")]
    pub column_type: ColumnType,
    /// Whether it holds measurements, which may differ when the stage is run again.
    #[serde(default)]
    pub measured: bool,
    /// For people.
    #[serde(default)]
    pub doc: String,
}

/// A parameter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Param {
    /// Its type.
    #[serde(rename = "type")]
    pub param_type: ParamType,
    /// The value where the pipeline gives none; a parameter without a default must be given.
    #[serde(default)]
    pub default: Option<Value>,
    /// Smallest number allowed.
    #[serde(default)]
    pub min: Option<f64>,
    /// Largest number allowed.
    #[serde(default)]
    pub max: Option<f64>,
    /// Allowed values (of the list's items, for a list).
    #[serde(default)]
    pub choices: Vec<Value>,
    /// How far the work goes: a result with a smaller value is the beginning of one with a larger. Values share a state
    /// folder and its checkpoints, so raising it goes on where the last one ended.
    #[serde(default)]
    pub continues: bool,
    /// For people.
    #[serde(default)]
    pub doc: String,
}

/// The type of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParamType {
    /// A whole number.
    Integer,
    /// A number; a whole one is taken as such.
    Number,
    /// Text.
    String,
    /// True or false.
    Boolean,
    /// A list of anything.
    List,
    /// A mapping with text keys.
    Map,
}

impl ParamType {
    /// The name used in YAML.
    pub fn name(self) -> &'static str {
        match self {
            Self::Integer => "integer",
            Self::Number => "number",
            Self::String => "string",
            Self::Boolean => "boolean",
            Self::List => "list",
            Self::Map => "map",
        }
    }

    /// Whether `value` is of this type.
    pub fn accepts(self, value: &Value) -> bool {
        match self {
            Self::Integer => value.is_i64() || value.is_u64(),
            Self::Number => value.is_number(),
            Self::String => value.is_string(),
            Self::Boolean => value.is_boolean(),
            Self::List => value.is_array(),
            Self::Map => value.is_object(),
        }
    }
}

impl Param {
    /// Why `value` is not allowed here, or `None` where it is.
    pub fn refuse(&self, value: &Value) -> Option<String> {
        if !self.param_type.accepts(value) {
            return Some(format!("expected {}, got {}", with_article(self.param_type.name()), describe(value)));
        }
        if let Some(number) = value.as_f64() {
            if let Some(min) = self.min.filter(|min| number < *min) {
                return Some(format!("must be at least {min}, got {value}"));
            }
            if let Some(max) = self.max.filter(|max| number > *max) {
                return Some(format!("must be at most {max}, got {value}"));
            }
        }
        let items: Vec<&Value> = match value {
            Value::Array(items) => items.iter().collect(),
            other => vec![other],
        };
        let stranger = items.into_iter().find(|item| !self.choices.is_empty() && !self.choices.contains(item))?;
        let choices: Vec<String> = self.choices.iter().map(Value::to_string).collect();
        Some(format!("must be one of {}, got {stranger}", choices.join(", ")))
    }
}

fn with_article(noun: &str) -> String {
    format!("{} {noun}", if noun.starts_with('i') { "an" } else { "a" })
}

/// A value as an error message names it.
pub fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(_) => format!("the boolean {value}"),
        Value::Number(number) if number.is_f64() => format!("the number {value}"),
        Value::Number(_) => format!("the integer {value}"),
        Value::String(_) => format!("the string {value}"),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a map".to_owned(),
    }
}

/// What one program of the kind needs; a pipeline may override it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Resources {
    /// CPU cores; [`Resources::ALL_CORES`] for the whole machine's.
    pub cpu: u32,
    /// Bytes of memory, for scheduling; `4GiB` in YAML.
    #[serde(deserialize_with = "bytes::read")]
    pub memory: u64,
    /// Whole GPUs.
    pub gpu: u32,
}

impl Resources {
    /// `cpu: all` of a pipeline: every core of the machine, or, with GPUs, as many as come to that many GPUs.
    pub const ALL_CORES: u32 = u32::MAX;

    /// With the number of cores in place of `all`, on a machine with so many cores and GPUs.
    pub fn on(self, cores: u32, gpus: usize) -> Self {
        if self.cpu != Self::ALL_CORES {
            return self;
        }
        let programs = (gpus as u32).checked_div(self.gpu).unwrap_or(1).max(1);
        Self { cpu: (cores / programs).max(1), ..self }
    }
}

impl Default for Resources {
    fn default() -> Self {
        Self { cpu: 1, memory: 0, gpu: 0 }
    }
}

/// Versions that count in a key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Toolchain {
    /// Python distributions; the interpreter's own version joins them. Absent: no Python at all.
    pub python: Option<Vec<String>>,
    /// Python distributions that count where they are installed: a system may have the same another way.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub python_if_installed: Vec<String>,
}

/// How far two runs of one key agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Determinism {
    /// The same bytes.
    #[default]
    Exact,
    /// Measurements belong to a device and vary; the device is in the key.
    Measured,
    /// A sample: another run is as good, but not the same.
    Sampled,
}

/// How a by-row kind reads its rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ByRow {
    /// The input whose rows are independent; the columns that it declares are what the program receives.
    pub port: String,
    /// How many rows one program may have unanswered.
    #[serde(default = "one")]
    pub window: u32,
    /// How many for each CPU core that a program is given, where that is more; 0: `window` alone counts.
    #[serde(default)]
    pub window_per_core: u32,
    /// How many programs may run side by side; 0: as many as resources allow.
    #[serde(default)]
    pub workers: u32,
    /// Seconds one row may take before the engine kills the program; none by default.
    #[serde(default)]
    pub row_timeout_s: Option<f64>,
}

impl ByRow {
    /// How many rows a program with so many cores may have unanswered.
    pub fn window_of(&self, cores: u32) -> u32 {
        self.window.max(self.window_per_core.saturating_mul(cores)).max(1)
    }
}

fn one() -> u32 {
    1
}

/// Reading sizes such as `4GiB`.
pub mod bytes {
    use serde::{Deserializer, de};

    /// A number of bytes, or text with a unit (`KB MB GB TB KiB MiB GiB TiB`).
    pub fn parse(text: &str) -> Option<u64> {
        let text = text.trim();
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let number: f64 = text[..split].parse().ok()?;
        let unit = match text[split..].trim() {
            "" | "B" => 1.0,
            "KB" => 1e3,
            "MB" => 1e6,
            "GB" => 1e9,
            "TB" => 1e12,
            "KiB" => 1024.0,
            "MiB" => 1024.0 * 1024.0,
            "GiB" => 1024.0 * 1024.0 * 1024.0,
            "TiB" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
            _ => return None,
        };
        Some((number * unit) as u64)
    }

    pub(super) fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = u64;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("a size such as 4GiB")
            }
            fn visit_u64<E: de::Error>(self, value: u64) -> Result<u64, E> {
                Ok(value)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<u64, E> {
                parse(text).ok_or_else(|| E::custom(format!("`{text}` is not a size such as 4GiB")))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_cores_are_a_gpus_part_of_them() {
        let need = |gpu| Resources { cpu: Resources::ALL_CORES, memory: 0, gpu };
        let cores = |gpu, cores, gpus| need(gpu).on(cores, gpus).cpu;
        assert_eq!(
            [cores(0, 16, 0), cores(0, 16, 8), cores(1, 16, 1), cores(1, 32, 2), cores(2, 32, 2)],
            [16, 16, 16, 16, 32]
        );
        // More GPUs than cores, and a GPU where there is none: the stage's own needs are looked at elsewhere.
        assert_eq!([cores(1, 4, 8), cores(1, 4, 0)], [1, 4]);
        assert_eq!(Resources { cpu: 3, memory: 0, gpu: 1 }.on(16, 4).cpu, 3);
    }

    #[test]
    fn a_window_grows_with_the_cores() {
        let by_row = |window, window_per_core| ByRow {
            port: "rows".to_owned(),
            window,
            window_per_core,
            workers: 0,
            row_timeout_s: None,
        };
        assert_eq!([by_row(1, 0).window_of(16), by_row(1, 2).window_of(16), by_row(64, 2).window_of(16)], [1, 32, 64]);
        assert_eq!(by_row(0, 0).window_of(1), 1);
    }
}
