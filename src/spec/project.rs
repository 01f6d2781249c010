//! Reading `cuda-agent.yaml`, the project file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cuda_agent_protocol::manifest::{bytes, describe};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::check::{self, Absent};
use super::document::{Document, Place};
use super::error::{Problem, SpecErrors, did_you_mean, list};
use super::{LOCAL, deserialize, shape, units};
use crate::name::is_name;

/// How URLs of stores begin; the last three are remote.
const STORES: [&str; 5] = ["file", "memory", "s3", "gs", "az"];

/// What a project file says. Paths are as written: relative to the file's folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Project {
    /// URL of the store.
    pub store: Option<String>,
    /// The server of a remote store, where it isn't the cloud's own.
    pub endpoint: Option<String>,
    /// The region of a remote store.
    pub region: Option<String>,
    /// Whether a remote store may be one that can't keep two writers apart.
    pub single_writer: bool,
    /// Whether nothing is written to a remote store.
    pub read_only: bool,
    /// How many bytes of a remote store are kept here.
    #[serde(deserialize_with = "size")]
    pub local_max: Option<u64>,
    /// The pipeline that commands use where none is named.
    pub pipeline: Option<PathBuf>,
    /// Folders with stage kinds of the project.
    pub stages: Vec<PathBuf>,
    /// The Python interpreter for stages.
    pub python: Option<PathBuf>,
    /// The folder for everything local; `.cuda-agent` where it isn't given.
    pub work: Option<PathBuf>,
    /// Executors beside the local one, by name.
    pub executors: BTreeMap<String, Executor>,
    /// The executor of stages that name none.
    pub executor: Option<String>,
}

/// Machines that execute stages for this project.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Executor {
    /// How stages get there.
    #[serde(deserialize_with = "kind")]
    pub kind: ExecutorKind,
    /// What its machines measure on.
    pub device: DeviceNames,
    /// What one of its machines has.
    pub resources: Limits,
    /// How long a stage waits for a machine, as it is written.
    wait: Option<Value>,
}

impl Executor {
    /// How long a stage waits for a machine; for ever where it isn't given.
    pub fn wait(&self) -> Option<Duration> {
        self.wait.as_ref().and_then(Value::as_str).and_then(units::duration)
    }
}

/// How stages get to an executor's machines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExecutorKind {
    /// By the shared store: workers look for them there.
    #[default]
    Workers,
    /// None that this version knows; the file is refused.
    Unknown(String),
}

/// The kinds of executors that a file can name.
const KINDS: [&str; 1] = ["workers"];

/// Models of devices, as the machines report them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeviceNames {
    /// The GPUs' model.
    pub gpu: Option<String>,
    /// The GPUs' driver.
    pub driver: Option<String>,
    /// The CPU's model.
    pub cpu: Option<String>,
}

/// What a machine has; what isn't given is not checked before a stage gets there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// CPU cores.
    pub cpu: Option<u32>,
    /// Bytes of memory.
    #[serde(deserialize_with = "size")]
    pub memory: Option<u64>,
    /// GPUs.
    pub gpu: Option<u32>,
}

/// Reads a project file; `file` is what errors call it. An empty file is a project that says nothing.
pub fn parse_project(text: &str, file: &Path) -> Result<Project, SpecErrors> {
    let document = Document::new(file.display().to_string(), text);
    if document.tree().is_ok_and(|root| root.is_null()) {
        return Ok(Project::default());
    }
    let checked = check::check(&document, 0, &shape::PROJECT, Absent::Nothing);
    let mut problems = checked.problems;
    let project = deserialize::read::<Project>(&checked.root).unwrap_or_else(|mistake| {
        problems.push(mistake.problem(0));
        Project::default()
    });
    problems.extend(store_problems(&project));
    problems.extend(executor_problems(&project));
    if problems.is_empty() { Ok(project) } else { Err(SpecErrors::new(&[document], problems)) }
}

/// What is wrong with where artifacts live. A URL with an `@` may hold a password; it is left to whoever opens it, who
/// shows it without.
fn store_problems(project: &Project) -> Vec<Problem> {
    let problem = |field: &str, message: String| Problem::new(Place::root(0).key(field), message);
    let mut problems = Vec::new();
    let shown = |url: &&String| !url.contains('@');
    let store = project.store.as_ref();
    let scheme = store.and_then(|store| store.split_once("://")).map(|(scheme, _)| scheme);
    match (store.filter(shown), scheme) {
        (Some(store), None) => problems.push(
            problem("store", format!("`{store}` is no URL"))
                .hint("stores look like `file:///folder`, `s3://bucket/folder`, `gs://bucket/folder` or `memory://`"),
        ),
        (Some(_), Some(scheme)) if !STORES.contains(&scheme) => {
            let hint = did_you_mean(scheme, STORES);
            let hint = hint.unwrap_or_else(|| "stores are file://, memory://, s3://, gs:// and az://".to_owned());
            problems.push(problem("store", format!("`{scheme}://` is not a kind of store")).hint(hint));
        }
        _ => {}
    }
    if let Some(endpoint) = project.endpoint.as_ref().filter(shown) {
        let host = endpoint.strip_prefix("https://").or_else(|| endpoint.strip_prefix("http://"));
        if host.is_none_or(|host| host.is_empty() || host.starts_with('/')) {
            let problem = problem("endpoint", format!("`{endpoint}` is no address of a server"));
            problems.push(problem.hint("write it as `https://host` or `http://host:port`"));
        }
    }
    if let Some(region) = &project.region
        && (region.is_empty() || !region.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'))
    {
        let problem = problem("region", format!("`{region}` is no region"));
        problems.push(problem.hint("regions look like `eu-central-1`"));
    }
    if matches!(scheme, Some("file" | "memory")) {
        let given = [
            ("endpoint", project.endpoint.is_some()),
            ("region", project.region.is_some()),
            ("single_writer", project.single_writer),
            ("read_only", project.read_only),
            ("local_max", project.local_max.is_some()),
        ];
        for (field, _) in given.iter().filter(|(_, given)| *given) {
            let problem = problem(field, format!("`{field}` is for remote stores"));
            problems.push(problem.hint("leave it out, or let `store` be s3://, gs:// or az://"));
        }
    }
    problems
}

/// What is wrong with the executors.
fn executor_problems(project: &Project) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (name, executor) in &project.executors {
        let place = || Place::root(0).key("executors").key(name);
        if !is_name(name) || name == LOCAL {
            let hint = "names have letters, digits, `_` and `-`; `local` is this machine's own";
            problems
                .push(Problem::new(place().name(), format!("`{name}` can't be the name of an executor")).hint(hint));
        }
        if let ExecutorKind::Unknown(kind) = &executor.kind {
            let hint = did_you_mean(kind, KINDS).unwrap_or_else(|| format!("kinds of executors: {}", list(KINDS)));
            problems.push(Problem::new(place().key("kind"), format!("unknown kind of executor `{kind}`")).hint(hint));
        }
        if let (Some(wait), None) = (&executor.wait, executor.wait()) {
            let problem =
                Problem::new(place().key("wait"), format!("`wait` must be a duration, not {}", describe(wait)));
            problems.push(problem.hint("durations look like `30s`, `2h` or `1h30m`; units are ms, s, m, h and d"));
        }
        let device = &executor.device;
        let lack = match (&device.gpu, &device.driver) {
            (Some(_), None) => Some(("device", "`device` has a `gpu` and no `driver`")),
            (None, Some(_)) => Some(("device", "`device` has a `driver` and no `gpu`")),
            (None, None) if executor.resources.gpu.is_some_and(|gpus| gpus > 0) => {
                Some(("resources", "machines with GPUs need a `device` with `gpu` and `driver`"))
            }
            _ => None,
        };
        if let Some((field, message)) = lack {
            let hint = "times belong to a model and a driver: `device: { gpu: \"NVIDIA H200\", driver: \"580.65.06\" }`, as \
                        nvidia-smi and `cuda-agent worker --list` show them";
            problems.push(Problem::new(place().key(field), message).hint(hint));
        }
    }
    let known = || std::iter::once(LOCAL).chain(project.executors.keys().map(String::as_str));
    if let Some(name) = project.executor.as_ref().filter(|name| !known().any(|known| known == name.as_str())) {
        let hint =
            did_you_mean(name, known()).unwrap_or_else(|| format!("executors of the project: {}", list(known())));
        problems.push(Problem::new(Place::root(0).key("executor"), format!("unknown executor `{name}`")).hint(hint));
    }
    problems
}

/// The kind of an executor; which ones there are is checked with the rest.
fn kind<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ExecutorKind, D::Error> {
    let kind = String::deserialize(deserializer)?;
    Ok(if kind == "workers" { ExecutorKind::Workers } else { ExecutorKind::Unknown(kind) })
}

/// A number of bytes, or text such as `100GB`.
fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let size = value.as_u64().or_else(|| value.as_str().and_then(bytes::parse));
    size.map(Some).ok_or_else(|| D::Error::custom(format!("{value} is not a size such as 100GB")))
}
