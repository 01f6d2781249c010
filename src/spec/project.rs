//! Reading `cuda-agent.yaml`, the project file.

use std::path::{Path, PathBuf};

use cuda_agent_protocol::manifest::bytes;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::check::{self, Absent};
use super::document::{Document, Place};
use super::error::{Problem, SpecErrors, did_you_mean};
use super::{deserialize, shape};

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

/// A number of bytes, or text such as `100GB`.
fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let size = value.as_u64().or_else(|| value.as_str().and_then(bytes::parse));
    size.map(Some).ok_or_else(|| D::Error::custom(format!("{value} is not a size such as 100GB")))
}
