//! The evaluator's corpus, tables of candidates, and what became of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use cuda_agent_engine::artifact::{json, table};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::Sandbox;

/// `corpus.json`, as far as the CPU device needs it.
#[derive(Deserialize)]
pub struct Corpus {
    tasks: Vec<Twins>,
    nasty: Vec<Nasty>,
}

#[derive(Deserialize)]
struct Twins {
    name: String,
    format: String,
    small: Map<String, Value>,
    wrong: Expected,
}

#[derive(Deserialize)]
struct Expected {
    cpu: Vec<String>,
}

#[derive(Deserialize)]
struct Nasty {
    name: String,
    task: String,
    format: String,
    cpu: Vec<String>,
}

/// A row of a table of candidates, and the outcomes that are right for it.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// What messages call it.
    pub id: String,
    /// The task's file.
    pub code: String,
    /// CUDA C++.
    pub source: String,
    /// `kernel` or `launch`.
    pub format: String,
    /// Any of these will do.
    pub expected: Vec<String>,
}

impl Corpus {
    pub fn read() -> Self {
        serde_json::from_str(&text("corpus.json")).unwrap()
    }

    /// Every candidate, with tasks of a size for the CPU device.
    pub fn candidates(&self) -> Vec<Candidate> {
        let twins = self.tasks.iter().flat_map(|task| {
            let one =
                |folder: &str, expected: &[String]| self.candidate(folder, &task.name, task, &task.format, expected);
            [one("right", &["correct".to_owned()]), one("wrong", &task.wrong.cpu)]
        });
        let nasty = self
            .nasty
            .iter()
            .map(|nasty| self.candidate("nasty", &nasty.name, self.task(&nasty.task), &nasty.format, &nasty.cpu));
        twins.chain(nasty).collect()
    }

    /// One of them, by folder and name: `nasty/trap`.
    pub fn pick(&self, id: &str) -> Candidate {
        self.candidates().into_iter().find(|candidate| candidate.id == id).unwrap_or_else(|| panic!("no {id}"))
    }

    fn task(&self, name: &str) -> &Twins {
        self.tasks.iter().find(|task| task.name == name).unwrap()
    }

    fn candidate(&self, folder: &str, name: &str, task: &Twins, format: &str, expected: &[String]) -> Candidate {
        Candidate {
            id: format!("{folder}/{name}"),
            code: small(&text(&format!("tasks/{}.py", task.name)), &task.small),
            source: text(&format!("{folder}/{name}.cu")),
            format: format.to_owned(),
            expected: expected.to_vec(),
        }
    }
}

/// A file of the corpus.
pub fn text(name: &str) -> String {
    let path = super::repository().join("stages/kernels/corpus").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A task with other values of its constants: one stage has one parameter `set`, and each task its own sizes.
fn small(code: &str, constants: &Map<String, Value>) -> String {
    let mut left: Vec<&String> = constants.keys().collect();
    let lines: Vec<String> = code
        .lines()
        .map(|line| match line.split_once(" = ").and_then(|(name, _)| constants.get_key_value(name)) {
            Some((name, value)) => {
                left.retain(|other| *other != name);
                format!("{name} = {value}")
            }
            None => line.to_owned(),
        })
        .collect();
    assert!(left.is_empty(), "the task does not assign {left:?}");
    lines.join("\n") + "\n"
}

/// A sandbox whose stages have torch and see no GPU. The CPU device's runtime, which is named by what it is made from, is
/// made once for all.
pub fn sandbox() -> Sandbox {
    let mut sandbox = Sandbox::new();
    let runtimes = Path::new(env!("CARGO_TARGET_TMPDIR")).join("runtimes");
    std::fs::create_dir_all(&runtimes).unwrap();
    let cache = sandbox.path(".cuda-agent/cache/kernels");
    std::fs::create_dir_all(&cache).unwrap();
    std::os::unix::fs::symlink(runtimes, cache.join("runtimes")).unwrap();
    sandbox.variables.push(("CUDA_AGENT_PYTHON".into(), python().display().to_string()));
    sandbox.variables.push(("CUDA_VISIBLE_DEVICES".into(), String::new()));
    sandbox
}

pub fn python() -> PathBuf {
    let made = super::repository().join(".venv/bin/python");
    let python = std::env::var_os("CUDA_AGENT_PYTHON").map_or(made, PathBuf::from);
    assert!(python.exists(), "{}: `make venv` makes an environment with torch", python.display());
    python
}

/// Writes candidates as a Parquet file.
pub fn write_candidates(path: &Path, candidates: &[Candidate]) {
    let column = |of: fn(&Candidate) -> &str| candidates.iter().map(of).collect::<Vec<_>>();
    write_strings(
        path,
        &[
            ("id", column(|candidate| &candidate.id)),
            ("code", column(|candidate| &candidate.code)),
            ("source", column(|candidate| &candidate.source)),
            ("format", column(|candidate| &candidate.format)),
        ],
    );
}

/// Writes columns of text as a Parquet file.
pub fn write_strings(path: &Path, columns: &[(&str, Vec<&str>)]) {
    let arrays = columns.iter().map(|(name, values)| (*name, Arc::new(StringArray::from(values.clone())) as ArrayRef));
    let batch = RecordBatch::try_from_iter(arrays).unwrap();
    table::write(path, &batch.schema(), &[batch]).unwrap();
}

/// The rows of a stage's table.
pub fn rows(sandbox: &Sandbox, stage: &str) -> Vec<Map<String, Value>> {
    sandbox.good(&["export", stage, "exported", "--force"]);
    let folder = std::fs::read_dir(sandbox.path("exported")).unwrap();
    let path = folder.map(|item| item.unwrap().path()).next().expect("one file");
    let rows = table::read(&path).unwrap().1.iter().flat_map(json::rows).collect();
    std::fs::remove_dir_all(sandbox.path("exported")).unwrap();
    rows
}

/// What a run says of a stage's rows.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct Counts {
    pub total: u64,
    pub executed: u64,
    pub reused: u64,
    pub rejected: u64,
    pub failed: u64,
}

/// Runs a pipeline that has one stage by row; `None` where nothing had to be done.
pub fn run(sandbox: &Sandbox, pipeline: &str) -> Option<Counts> {
    let events = sandbox.good(&["run", pipeline, "--json"]);
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut finished = events.filter(|event| event["event"] == "stage_finished");
    finished.find_map(|event| serde_json::from_value(event["rows"].clone()).ok())
}
