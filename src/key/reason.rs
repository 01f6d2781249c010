//! Why a stage is not in the store: the difference of two pre-images, typed.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::{InputIdentity, Preimage, ProgramIdentity};

/// Why a stage has to run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum MissReason {
    /// No run of this stage is known.
    NeverRun,
    /// The last attempt with this key failed.
    FailedBefore {
        /// In this run.
        run: String,
    },
    /// It was asked for.
    Refresh,
    /// The same key was recorded once, and the record is gone.
    RecordEvicted,
    /// The record is there, but a blob that it names is not, or is damaged.
    BlobMissing {
        /// The output.
        output: String,
    },
    /// The record lacks rows that failed from outside causes.
    RowsFailed {
        /// How many.
        count: u64,
    },
    /// More rows are rejected than the stage allows now.
    RowsRejected {
        /// How many.
        count: u64,
        /// How many may be.
        most: u64,
    },
    /// The stage is of another kind now.
    KindChanged {
        /// Before.
        old: String,
        /// Now.
        new: String,
    },
    /// A parameter has another value; `None` where it was or is absent.
    ParamChanged {
        /// The parameter.
        name: String,
        /// Before.
        old: Option<Value>,
        /// Now.
        new: Option<Value>,
    },
    /// An input has another content.
    InputChanged {
        /// The port.
        port: String,
        /// What made it: `stage.output`, or a path; empty where that is not known.
        by: String,
        /// Columns that changed, where it is a table.
        columns: Vec<String>,
    },
    /// The program has other files, or another version.
    ProgramChanged {
        /// The files, or `version old → new`.
        files: Vec<String>,
    },
    /// The command of a `run` stage.
    CommandChanged {
        /// Before.
        old: Value,
        /// Now.
        new: Value,
    },
    /// The declared outputs of a `run` stage.
    OutputsChanged,
    /// An environment variable that counts.
    EnvironmentChanged {
        /// The variable.
        name: String,
        /// Before.
        old: Option<String>,
        /// Now.
        new: Option<String>,
    },
    /// A version that counts.
    ToolchainChanged {
        /// The package.
        name: String,
        /// Before.
        old: Option<String>,
        /// Now.
        new: Option<String>,
    },
    /// The set of secrets.
    SecretsChanged,
    /// Measured on another device.
    DeviceChanged {
        /// Before.
        old: Value,
        /// Now.
        new: Value,
    },
}

/// Every difference between the pre-image of the last result and the one of now. `producers` names what feeds each
/// port.
pub fn difference(old: &Preimage, new: &Preimage, producers: &BTreeMap<String, String>) -> Vec<MissReason> {
    if old.kind != new.kind {
        return vec![MissReason::KindChanged { old: old.kind.clone(), new: new.kind.clone() }];
    }
    let mut reasons = program_difference(&old.program, &new.program);
    for (name, old, new) in changed(&old.params, &new.params) {
        reasons.push(MissReason::ParamChanged { name, old: old.cloned(), new: new.cloned() });
    }
    for (port, old, new) in changed(&old.inputs, &new.inputs) {
        let by = producers.get(&port).cloned().unwrap_or_default();
        reasons.push(MissReason::InputChanged { columns: changed_columns(old, new), port, by });
    }
    if old.outputs != new.outputs {
        reasons.push(MissReason::OutputsChanged);
    }
    for (name, old, new) in changed(&old.env, &new.env) {
        reasons.push(MissReason::EnvironmentChanged { name, old: old.cloned().flatten(), new: new.cloned().flatten() });
    }
    for (name, old, new) in changed(&old.toolchain, &new.toolchain) {
        reasons.push(MissReason::ToolchainChanged { name, old: old.cloned(), new: new.cloned() });
    }
    if old.secrets != new.secrets {
        reasons.push(MissReason::SecretsChanged);
    }
    if old.device != new.device {
        let plain = |device| serde_json::to_value(device).expect("a device is plain data");
        reasons.push(MissReason::DeviceChanged { old: plain(&old.device), new: plain(&new.device) });
    }
    reasons
}

fn changed<'a, V: PartialEq>(
    old: &'a BTreeMap<String, V>,
    new: &'a BTreeMap<String, V>,
) -> Vec<(String, Option<&'a V>, Option<&'a V>)> {
    let mut names: Vec<&String> = old.keys().chain(new.keys()).collect();
    names.sort_unstable();
    names.dedup();
    names
        .into_iter()
        .map(|name| (name.clone(), old.get(name), new.get(name)))
        .filter(|(_, old, new)| old != new)
        .collect()
}

fn changed_columns(old: Option<&InputIdentity>, new: Option<&InputIdentity>) -> Vec<String> {
    match (old, new) {
        (Some(InputIdentity::Table { columns: old, .. }), Some(InputIdentity::Table { columns: new, .. })) => {
            changed(old, new).into_iter().map(|(name, ..)| name).collect()
        }
        _ => Vec::new(),
    }
}

fn program_difference(old: &ProgramIdentity, new: &ProgramIdentity) -> Vec<MissReason> {
    use ProgramIdentity::{Command, Files, Version};
    if old == new {
        return Vec::new();
    }
    let mut reasons = Vec::new();
    if let (Command { command: old, .. }, Command { command: new, .. }) = (old, new)
        && old != new
    {
        reasons.push(MissReason::CommandChanged { old: old.clone(), new: new.clone() });
    }
    let files = match (old, new) {
        (Files(old) | Command { files: old, .. }, Files(new) | Command { files: new, .. }) => {
            changed(old, new).into_iter().map(|(path, ..)| path).collect()
        }
        (Version(old), Version(new)) => vec![format!("version {old} → {new}")],
        (Version(old), _) => vec![format!("version {old} → changed sources")],
        (_, Version(new)) => vec![format!("changed sources → version {new}")],
    };
    if !files.is_empty() {
        reasons.push(MissReason::ProgramChanged { files });
    }
    reasons
}

impl fmt::Display for MissReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeverRun => f.write_str("never run"),
            Self::FailedBefore { run } => write!(f, "failed in run {run}"),
            Self::Refresh => f.write_str("refresh asked for"),
            Self::RecordEvicted => f.write_str("its record is gone from the store"),
            Self::BlobMissing { output } => write!(f, "output `{output}` is missing from the store or damaged"),
            Self::RowsFailed { count } => write!(f, "{count} of its rows failed last time"),
            Self::RowsRejected { count, most } => write!(f, "{count} of its rows are rejected, more than {most}"),
            Self::KindChanged { old, new } => write!(f, "kind {old} → {new}"),
            Self::ParamChanged { name, old, new } => write!(f, "param {name}: {} → {}", shown(old), shown(new)),
            Self::InputChanged { port, by, columns } => {
                let from = Some(format!("from {by}")).filter(|_| !by.is_empty());
                let columns = Some(format!("columns {}", few(columns))).filter(|_| !columns.is_empty());
                let details: Vec<String> = from.into_iter().chain(columns).collect();
                match details.is_empty() {
                    true => write!(f, "input {port} changed"),
                    false => write!(f, "input {port} changed ({})", details.join("; ")),
                }
            }
            Self::ProgramChanged { files } => write!(f, "program changed: {}", few(files)),
            Self::CommandChanged { .. } => f.write_str("its command changed"),
            Self::OutputsChanged => f.write_str("its declared outputs changed"),
            Self::EnvironmentChanged { name, old, new } => {
                write!(f, "environment {name}: {} → {}", absent(old), absent(new))
            }
            Self::ToolchainChanged { name, old, new } => write!(f, "{name} {} → {}", absent(old), absent(new)),
            Self::SecretsChanged => f.write_str("its secrets changed"),
            Self::DeviceChanged { old, new } => write!(f, "device {} → {}", device(old), device(new)),
        }
    }
}

fn shown(value: &Option<Value>) -> String {
    let text = value.as_ref().map_or_else(|| "absent".to_owned(), Value::to_string);
    if text.chars().count() <= 60 { text } else { text.chars().take(57).chain("...".chars()).collect() }
}

fn absent(value: &Option<String>) -> &str {
    value.as_deref().unwrap_or("absent")
}

fn few(names: &[String]) -> String {
    match names {
        [a, b, c, rest @ ..] if !rest.is_empty() => format!("{a}, {b}, {c} and {} more", rest.len()),
        names => names.join(", "),
    }
}

fn device(value: &Value) -> String {
    value["model"].as_str().map_or_else(|| "none".to_owned(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::super::tests::sample;
    use super::*;
    use crate::digest::Digest;
    use cuda_agent_protocol::Device;
    use serde_json::json;

    fn told(change: impl FnOnce(&mut Preimage)) -> String {
        let (old, mut new) = (sample(), sample());
        change(&mut new);
        let producers = BTreeMap::from([("rows".to_owned(), "measured.rows".to_owned())]);
        let reasons = difference(&old, &new, &producers);
        reasons.iter().map(MissReason::to_string).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn each_field_has_its_reason() {
        assert_eq!(told(|_| {}), "");
        assert_eq!(told(|p| p.kind = "x".into()), "kind ops/filter → x");
        assert_eq!(told(|p| drop(p.params.insert("limit".into(), json!(4)))), "param limit: 3 → 4");
        assert_eq!(told(|p| drop(p.params.remove("name"))), "param name: \"x\" → absent");
        let other = InputIdentity::Tree { digest: Digest([8; 32]) };
        assert_eq!(told(|p| drop(p.inputs.insert("rows".into(), other))), "input rows changed (from measured.rows)");
        let version = ProgramIdentity::Version("1.1.0".into());
        assert_eq!(told(|p| p.program = version), "program changed: version 1.0.0 → 1.1.0");
        assert_eq!(told(|p| drop(p.toolchain.insert("python".into(), "3.12.3".into()))), "python 3.11.7 → 3.12.3");
        assert_eq!(told(|p| p.device = Some(Device::Cpu { model: "X".into() })), "device none → X");
        assert_eq!(told(|p| drop(p.env.insert("A".into(), Some("1".into())))), "environment A: absent → 1");
    }
}
