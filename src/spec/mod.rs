//! YAML text becomes a [`Pipeline`], a [`Manifest`] or a [`Project`], or all of its mistakes at once.
//!
//! Nothing here touches a disk: texts are passed in. A text is parsed into nodes with positions ([`tree`]); they are
//! [`check`]ed against a table of what may stand where ([`shape`]), which gathers every mistake of structure; what is
//! left of them is [`deserialize`]d; and a pipeline is resolved ([`resolve`]), which gathers every mistake of meaning.

mod check;
mod deserialize;
mod document;
mod error;
mod manifest;
mod project;
#[cfg(test)]
mod properties;
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
pub use project::{DeviceNames, Executor, ExecutorKind, Limits, Project, parse_project};
pub use schema::schema;
pub use types::{Command, Pipeline, Retry, SecretSource, Source, Stage};
pub use units::duration;

use check::Absent;
use document::{Document, Place};
use error::Problem;
use resolve::Files;

/// The stage kinds that a pipeline may use.
pub trait Catalog {
    /// The kind of that name.
    fn get(&self, name: &str) -> Option<Arc<Manifest>>;
    /// The names of all kinds, for suggestions.
    fn names(&self) -> Vec<String>;
    /// The names of the executors that a stage may choose.
    fn executors(&self) -> Vec<String> {
        vec![LOCAL.to_owned()]
    }
}

/// The executor that every project has: this machine.
pub const LOCAL: &str = "local";

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
    let document = Document::new(file.display().to_string(), text);
    let mut loader = Loader {
        include,
        seen: HashSet::from([tidy(&folder.join(file_name(file)))]),
        files: Files::default(),
        problems: Vec::new(),
    };
    loader.add(document, folder);
    let mut problems = loader.problems;
    let (pipeline, documents, more) = resolve::resolve(loader.files, folder, catalog, overrides);
    problems.extend(more);
    if problems.is_empty() { Ok(pipeline) } else { Err(SpecErrors::new(&documents, problems)) }
}

fn file_name(file: &Path) -> &Path {
    file.file_name().map_or(file, Path::new)
}

/// Reads a pipeline's file and those that it includes.
struct Loader<'a> {
    include: Include<'a>,
    seen: HashSet<PathBuf>,
    files: Files,
    problems: Vec<Problem>,
}

impl Loader<'_> {
    fn add(&mut self, document: Arc<Document>, folder: &Path) {
        let index = self.files.documents.len();
        let record = if index == 0 { &shape::PIPELINE } else { &shape::INCLUDED };
        let checked = check::check(&document, index, record, Absent::Nothing);
        self.problems.extend(checked.problems);
        self.files.broken.extend(checked.broken);
        let raw = deserialize::read(&checked.root).unwrap_or_else(|mistake| {
            self.problems.push(mistake.problem(index));
            raw::Pipeline::default()
        });
        let includes = raw.include.clone().unwrap_or_default();
        self.files.documents.push(document);
        self.files.raws.push(raw);
        for (item, path) in includes.into_iter().enumerate() {
            match self.load(index, item, &path, folder) {
                Some((document, folder)) => self.add(document, &folder),
                None => self.files.broken.add(Place::root(index).key("include").index(item)),
            }
        }
    }

    /// The included file and its folder.
    fn load(&mut self, index: usize, item: usize, path: &str, folder: &Path) -> Option<(Arc<Document>, PathBuf)> {
        let place = Place::root(index).key("include").index(item);
        let full = tidy(&folder.join(path));
        if !self.seen.insert(full.clone()) {
            let problem = Problem::new(place, format!("`{path}` is included already"));
            self.problems.push(problem.hint("each file can be included once"));
            return None;
        }
        match (self.include)(&full) {
            Ok(text) => {
                let shown =
                    tidy(&Path::new(&self.files.documents[index].file).parent().unwrap_or(Path::new("")).join(path));
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
