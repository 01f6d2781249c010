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
    /// Keys say more than they did when the last result was made, so it cannot be known to be what would come out now.
    KeyVersionChanged {
        /// Before.
        old: u32,
        /// Now.
        new: u32,
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
        /// Whether its columns, else the same, come in another order.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        reordered: bool,
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
        /// Parameters of the pipeline that are in it and changed.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        params: Vec<ChangedParam>,
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

/// A parameter of the pipeline with another value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChangedParam {
    /// Its name.
    pub name: String,
    /// Before.
    pub old: Option<Value>,
    /// Now.
    pub new: Option<Value>,
}

/// Every difference between the pre-image of the last result and the one of now. `producers` names what feeds each
/// port.
pub fn difference(old: &Preimage, new: &Preimage, producers: &BTreeMap<String, String>) -> Vec<MissReason> {
    if old.kind != new.kind {
        return vec![MissReason::KindChanged { old: old.kind.clone(), new: new.kind.clone() }];
    }
    let mut reasons = Vec::new();
    if old.schema != new.schema {
        reasons.push(MissReason::KeyVersionChanged { old: old.schema, new: new.schema });
    }
    reasons.extend(program_difference(old, new));
    for (name, old, new) in changed(&old.params, &new.params) {
        reasons.push(MissReason::ParamChanged { name, old: old.cloned(), new: new.cloned() });
    }
    for (port, old, new) in changed(&old.inputs, &new.inputs) {
        let (columns, reordered) = changed_columns(old, new);
        if columns.is_empty() && is_same_but_for_version(old, new) {
            continue;
        }
        let by = producers.get(&port).cloned().unwrap_or_default();
        reasons.push(MissReason::InputChanged { columns, reordered, port, by });
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

/// Columns of a table that are not what they were; where there are none, whether they come in another order.
fn changed_columns(old: Option<&InputIdentity>, new: Option<&InputIdentity>) -> (Vec<String>, bool) {
    use InputIdentity::Table;
    let (Some(Table { columns: old, order: before, .. }), Some(Table { columns: new, order: after, .. })) = (old, new)
    else {
        return (Vec::new(), false);
    };
    let columns: Vec<String> = changed(old, new).into_iter().map(|(name, ..)| name).collect();
    let reordered = columns.is_empty() && !before.is_empty() && before != after;
    (columns, reordered)
}

/// Whether one of two inputs only lacks what version 1 of keys did not say: the order of columns.
fn is_same_but_for_version(old: Option<&InputIdentity>, new: Option<&InputIdentity>) -> bool {
    fn unordered(input: &InputIdentity) -> InputIdentity {
        match input {
            InputIdentity::Table { rows, columns, .. } => {
                InputIdentity::Table { rows: *rows, columns: columns.clone(), order: Vec::new() }
            }
            InputIdentity::List { items } => InputIdentity::List { items: items.iter().map(unordered).collect() },
            other => other.clone(),
        }
    }
    let (Some(old), Some(new)) = (old, new) else { return false };
    unordered(old) == *old && unordered(new) == *old
}

fn program_difference(old: &Preimage, new: &Preimage) -> Vec<MissReason> {
    use ProgramIdentity::{Command, Files, Version};
    let mut reasons = Vec::new();
    if let (Command { command: old, .. }, Command { command: new, .. }) = (&old.program, &new.program)
        && old != new
    {
        reasons.push(MissReason::CommandChanged { old: old.clone(), new: new.clone(), params: Vec::new() });
    }
    let mut files: Vec<String> = match (&old.program, &new.program) {
        (Files(old) | Command { files: old, .. }, Files(new) | Command { files: new, .. }) => {
            changed(old, new).into_iter().map(|(path, ..)| path).collect()
        }
        (Version(old), Version(new)) if old == new => Vec::new(),
        (Version(old), Version(new)) => vec![format!("version {old} → {new}")],
        (Version(old), _) => vec![format!("version {old} → changed sources")],
        (_, Version(new)) => vec![format!("changed sources → version {new}")],
    };
    if old.schema == new.schema {
        let bits = old.executable.symmetric_difference(&new.executable).filter(|path| !files.contains(path));
        let said = bits.map(|path| match new.executable.contains(path) {
            true => format!("{path} (may be executed now)"),
            false => format!("{path} (may no longer be executed)"),
        });
        files.extend(said.collect::<Vec<String>>());
    }
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
            Self::KeyVersionChanged { old, new } => {
                write!(f, "its key is of version {new} now, its last result was made under version {old}")
            }
            Self::KindChanged { old, new } => write!(f, "kind {old} → {new}"),
            Self::ParamChanged { name, old, new } => write!(f, "param {name}: {} → {}", shown(old), shown(new)),
            Self::InputChanged { port, by, columns, reordered } => {
                let from = Some(format!("from {by}")).filter(|_| !by.is_empty());
                let columns = Some(format!("columns {}", few(columns))).filter(|_| !columns.is_empty());
                let order = Some("the order of its columns".to_owned()).filter(|_| *reordered);
                let details: Vec<String> = from.into_iter().chain(columns).chain(order).collect();
                match details.is_empty() {
                    true => write!(f, "input {port} changed"),
                    false => write!(f, "input {port} changed ({})", details.join("; ")),
                }
            }
            Self::ProgramChanged { files } => write!(f, "program changed: {}", few(files)),
            Self::CommandChanged { old, new, params } if params.is_empty() => match changed_words(old, new) {
                Some((old, new)) => write!(f, "its command changed: {old} → {new}"),
                None => f.write_str("its command changed (the same words, written differently)"),
            },
            Self::CommandChanged { params, .. } => {
                let one = |param: &ChangedParam| {
                    format!("param {}: {} → {}", param.name, shown(&param.old), shown(&param.new))
                };
                let params: Vec<String> = params.iter().map(one).collect();
                write!(f, "its command changed ({})", params.join(", "))
            }
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
    short(value.as_ref().map_or_else(|| "absent".to_owned(), Value::to_string))
}

fn short(text: String) -> String {
    if text.chars().count() <= 60 { text } else { text.chars().take(57).chain("...".chars()).collect() }
}

/// What is between the words that two commands begin and end with alike; `None` where only white space differs.
fn changed_words(old: &Value, new: &Value) -> Option<(String, String)> {
    let words = |command: &Value| -> Vec<String> {
        match command {
            Value::String(text) => text.split_whitespace().map(str::to_owned).collect(),
            Value::Array(words) => words.iter().map(|word| word.as_str().unwrap_or_default().to_owned()).collect(),
            other => vec![other.to_string()],
        }
    };
    let (old, new) = (words(old), words(new));
    if old == new {
        return None;
    }
    let start = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
    let rest = old[start..].iter().rev().zip(new[start..].iter().rev());
    let end = rest.take_while(|(old, new)| old == new).count();
    let middle = |words: &[String]| match words[start..words.len() - end].join(" ") {
        text if text.is_empty() => "nothing".to_owned(),
        text => short(text),
    };
    Some((middle(&old), middle(&new)))
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
    match (value["model"].as_str(), value["driver"].as_str()) {
        (Some(model), Some(driver)) => format!("{model} (driver {driver})"),
        (Some(model), None) => model.to_owned(),
        (None, _) => "none".to_owned(),
    }
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
        assert_eq!(
            told(|p| p.executable.extend(["work.sh".to_owned()])),
            "program changed: work.sh (may be executed now)"
        );
    }

    #[test]
    fn a_changed_command_says_which_words_or_parameters_changed() {
        let said = |old: Value, new: Value, params: Vec<ChangedParam>| {
            MissReason::CommandChanged { old, new, params }.to_string()
        };
        let plain = |old, new| said(json!(old), json!(new), Vec::new());
        assert_eq!(plain("work --rate 5.0 in", "work --rate 6 in"), "its command changed: 5.0 → 6");
        assert_eq!(plain("work in", "work -v in"), "its command changed: nothing → -v");
        assert_eq!(plain("a  b", "a b"), "its command changed (the same words, written differently)");
        let words = said(json!(["work", "5.0"]), json!(["work", "6"]), Vec::new());
        assert_eq!(words, "its command changed: 5.0 → 6");
        let rate = ChangedParam { name: "rate".into(), old: Some(json!(5.0)), new: Some(json!(6)) };
        let named = said(json!("work 5.0"), json!("work 6"), vec![rate]);
        assert_eq!(named, "its command changed (param rate: 5.0 → 6)");
    }

    fn table(order: &[&str]) -> InputIdentity {
        let columns = ["a", "b"].map(|name| (name.to_owned(), ("int64".to_owned(), Digest([1; 32]))));
        InputIdentity::Table {
            rows: 1,
            columns: columns.into(),
            order: order.iter().map(|n| (*n).to_owned()).collect(),
        }
    }

    #[test]
    fn another_order_of_columns_is_a_reason_and_an_unknown_one_is_the_versions() {
        let said = |old: (u32, &[&str]), new: (u32, &[&str])| {
            let of = |(schema, order): (u32, &[&str])| {
                let mut preimage = Preimage { schema, ..sample() };
                preimage.inputs.insert("rows".into(), table(order));
                preimage
            };
            let reasons = difference(&of(old), &of(new), &BTreeMap::new());
            reasons.iter().map(MissReason::to_string).collect::<Vec<_>>().join("; ")
        };
        let (ab, ba): (&[&str], &[&str]) = (&["a", "b"], &["b", "a"]);
        assert_eq!(said((2, ab), (2, ba)), "input rows changed (the order of its columns)");
        assert_eq!(said((1, &[]), (2, ba)), "its key is of version 2 now, its last result was made under version 1");
    }
}
