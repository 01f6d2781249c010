//! Reading `cuda-agent.yaml`, the project file.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::document::{Document, Place};
use super::error::{Problem, SpecErrors};
use super::shape;

/// What a project file says. Paths are as written: relative to the file's folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Project {
    /// URL of the shared store.
    pub store: Option<String>,
    /// The server of the store, where it is not the cloud's own.
    pub endpoint: Option<String>,
    /// The region of the store.
    pub region: Option<String>,
    /// Only one run at a time ever writes to the store, so a server without create-if-absent will do.
    pub single_writer: bool,
    /// Nothing is written to the store.
    pub read_only: bool,
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
    let reading = shape::read(&document, 0, &shape::PROJECT);
    let mut problems = reading.problems;
    let project = serde_json::from_value::<Project>(reading.value).unwrap_or_else(|error| {
        problems.push(Problem::new(Place::root(0), format!("the project can't be read: {error}")));
        Project::default()
    });
    if let Some(store) = project.store.as_ref().filter(|store| !store.contains("://")) {
        let problem = Problem::new(Place::root(0).key("store"), format!("`{store}` is no URL"));
        problems.push(problem.hint("stores look like `s3://bucket/folder`, `file:///folder` or `memory://`"));
    }
    if problems.is_empty() { Ok(project) } else { Err(SpecErrors::new(&[document], problems)) }
}
