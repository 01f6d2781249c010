//! YAML text becomes a [`Pipeline`], a [`Manifest`] or a [`Project`], or all of its mistakes at once.
//!
//! Nothing here touches a disk: texts are passed in. serde_yaml reads a file that is right; it stops at the first
//! mistake and keeps no positions, so a file that is wrong is read again by a span-preserving parser ([`tree`]),
//! which gathers every mistake of structure ([`shape`]) and of meaning ([`resolve`]) with line, column and hint.

#[cfg(test)]
mod agreement;
mod document;
mod error;
mod manifest;
mod project;
mod raw;
mod resolve;
mod schema;
mod shape;
#[cfg(test)]
mod tests;
mod tree;
pub mod types;
mod units;

use std::collections::HashSet;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use cuda_agent_protocol::Manifest;

pub use document::Location;
pub use error::{SpecError, SpecErrors};
pub use manifest::parse_manifest;
pub use project::{Project, parse_project};
pub use schema::schema;
pub use types::{Command, Pipeline, Retry, SecretSource, Source, Stage};

use document::{Broken, Document, Place};
use error::Problem;
use resolve::Files;

/// The stage kinds that a pipeline may use.
pub trait Catalog {
    /// The kind of that name.
    fn get(&self, name: &str) -> Option<Arc<Manifest>>;
    /// The names of all kinds, for suggestions.
    fn names(&self) -> Vec<String>;
}

/// Reads an included file; the path is already joined with the folder of the file that includes it.
pub type Include<'a> = &'a dyn Fn(&Path) -> io::Result<String>;

/// The nearest of `candidates` to `word`, for "did you mean"; `None` where none is near.
pub fn suggest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    error::nearest(word, candidates)
}

/// Reads and resolves a pipeline.
///
/// `file` is what errors call it, `folder` is where its relative paths start. `overrides` are `name=value` for
/// parameters of the pipeline and `stage.parameter=value` for those of a stage, given on the command line.
pub fn parse_pipeline(
    text: &str,
    file: &Path,
    folder: &Path,
    catalog: &dyn Catalog,
    overrides: &[(String, String)],
    include: Include,
) -> Result<Pipeline, SpecErrors> {
    let main = Document::new(file.display().to_string(), text);
    if let Some(raw) = read(&main) {
        let mut files = Files { documents: vec![Arc::clone(&main)], raws: vec![raw], broken: Broken::default() };
        let mut loader =
            Loader { include, seen: HashSet::from([tidy(&folder.join(file_name(file)))]), problems: Vec::new() };
        loader.fast(&mut files, 0, folder);
        if loader.problems.is_empty() {
            let (pipeline, _, problems) = resolve::resolve(files, folder, catalog, overrides);
            if problems.is_empty() {
                return Ok(pipeline);
            }
        }
    }
    Err(explain(main, file, folder, catalog, overrides, include))
}

/// Reads the files again with positions, and gathers everything that is wrong.
fn explain(
    main: Arc<Document>,
    file: &Path,
    folder: &Path,
    catalog: &dyn Catalog,
    overrides: &[(String, String)],
    include: Include,
) -> SpecErrors {
    let mut loader =
        Loader { include, seen: HashSet::from([tidy(&folder.join(file_name(file)))]), problems: Vec::new() };
    let mut files = Files { documents: Vec::new(), raws: Vec::new(), broken: Broken::default() };
    loader.careful(&mut files, Arc::clone(&main), folder);
    let mut problems = loader.problems;
    let (_, documents, more) = resolve::resolve(files, folder, catalog, overrides);
    problems.extend(more);
    if problems.is_empty() {
        problems.extend(documents.iter().enumerate().filter_map(|(index, document)| disagreement(document, index)));
    }
    if problems.is_empty() {
        problems.push(Problem::new(Place::root(0), "the file can't be read"));
    }
    SpecErrors::new(&documents, problems)
}

/// Only serde_yaml found a mistake: rare, since the two are held together, but no mistake is lost.
fn disagreement(document: &Document, index: usize) -> Option<Problem> {
    document.tree().ok()?;
    let error = serde_yaml::from_str::<raw::Pipeline>(&document.text).err()?;
    let at = error.location().map_or(0, |location| location.index());
    Some(Problem::new(Place::root(index), format!("YAML: {error}")).at(at..at))
}

/// The quick reading; `None` where something is wrong. What aliases stand for must fit into memory, which serde_yaml does not
/// see to.
fn read(document: &Document) -> Option<raw::Pipeline> {
    let text = &document.text;
    let may_repeat = text.contains('&') && text.contains('*');
    (!may_repeat || document.tree().is_ok()).then(|| serde_yaml::from_str(text).ok())?
}

fn file_name(file: &Path) -> &Path {
    file.file_name().map_or(file, Path::new)
}

/// Brings in included files, by either reading.
struct Loader<'a> {
    include: Include<'a>,
    seen: HashSet<PathBuf>,
    problems: Vec<Problem>,
}

impl Loader<'_> {
    fn fast(&mut self, files: &mut Files, index: usize, folder: &Path) {
        let includes = files.raws[index].include.clone().unwrap_or_default();
        for (item, raw::Text(path)) in includes.into_iter().enumerate() {
            let Some((document, folder)) = self.load(files, index, item, &path, folder) else { continue };
            match read(&document) {
                Some(raw) if raw.name.is_none() => {
                    files.documents.push(document);
                    files.raws.push(raw);
                    self.fast(files, files.raws.len() - 1, &folder);
                }
                _ => self.problems.push(Problem::new(Place::root(index), "an included file is wrong")),
            }
        }
    }

    fn careful(&mut self, files: &mut Files, document: Arc<Document>, folder: &Path) {
        let index = files.documents.len();
        let record = if index == 0 { &shape::PIPELINE } else { &shape::INCLUDED };
        let reading = shape::read(&document, index, record);
        let raw: raw::Pipeline = serde_json::from_value(reading.value).unwrap_or_default();
        self.problems.extend(reading.problems);
        files.broken.extend(reading.broken);
        files.documents.push(document);
        let includes = raw.include.clone().unwrap_or_default();
        files.raws.push(raw);
        for (item, raw::Text(path)) in includes.into_iter().enumerate() {
            match self.load(files, index, item, &path, folder) {
                Some((document, folder)) => self.careful(files, document, &folder),
                None => files.broken.add(Place::root(index).key("include").index(item)),
            }
        }
    }

    /// The included file and its folder.
    fn load(
        &mut self,
        files: &Files,
        index: usize,
        item: usize,
        path: &str,
        folder: &Path,
    ) -> Option<(Arc<Document>, PathBuf)> {
        let place = Place::root(index).key("include").index(item);
        let full = tidy(&folder.join(path));
        if !self.seen.insert(full.clone()) {
            let problem = Problem::new(place, format!("`{path}` is included already"));
            self.problems.push(problem.hint("each file can be included once"));
            return None;
        }
        match (self.include)(&full) {
            Ok(text) => {
                let shown = tidy(&Path::new(&files.documents[index].file).parent().unwrap_or(Path::new("")).join(path));
                let folder = full.parent().unwrap_or(folder).to_owned();
                Some((Document::new(shown.display().to_string(), text), folder))
            }
            Err(error) => {
                self.problems.push(Problem::new(place, format!("`{path}` can't be read: {error}")));
                None
            }
        }
    }
}

/// The path without `.` and without `..` behind a name.
fn tidy(path: &Path) -> PathBuf {
    let mut tidied = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if tidied.file_name().is_some() => drop(tidied.pop()),
            other => tidied.push(other),
        }
    }
    tidied
}
