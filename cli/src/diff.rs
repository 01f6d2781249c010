//! `cuda-agent diff`: what two runs did differently, and what came of it.

use std::collections::{BTreeMap, BTreeSet};

use clap::Args;
use cuda_agent_engine::artifact::{Artifact, ColumnInfo};
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::execute::seconds_of;
use cuda_agent_engine::key::{InputIdentity, MissReason, difference};
use cuda_agent_engine::store::{Record, RowCounts, RunManifest, StageEntry, StageState, Store, StoreError};
use cuda_agent_protocol::PortType;
use futures::{StreamExt, TryStreamExt};
use serde::Serialize;
use serde_json::Value;

use crate::progress::because;
use crate::project::Project;
use crate::runs::{outcome, pipeline_name, run_by_word};
use crate::text::when;
use crate::{CliError, Exit, print, print_json};

/// Records and lists of files that are read at once.
const SIDE_BY_SIDE: usize = 16;
/// How many names of files are shown.
const FILES: usize = 10;
/// How many names of columns are shown.
const COLUMNS: usize = 8;

/// Options of `diff`.
#[derive(Args)]
pub struct Options {
    /// A run: its id, the beginning or end of it, or `last`, `last~1`…
    #[arg(value_name = "RUN")]
    a: String,
    /// Another one
    #[arg(value_name = "RUN")]
    b: String,
}

/// Compares two runs.
pub async fn diff(project: &Project, options: Options) -> Result<Exit, CliError> {
    if !project.common.params.is_empty() {
        return Err(
            CliError::usage("`-p` does not choose a run").with_hint("name it by its id; `cuda-agent runs` lists them")
        );
    }
    let store = project.existing_store()?;
    let pipeline = match [&options.a, &options.b].iter().any(|word| word.starts_with("last")) {
        true => pipeline_name(project)?,
        false => None,
    };
    let a = run_by_word(&store, pipeline.as_deref(), &options.a).await?;
    let b = run_by_word(&store, pipeline.as_deref(), &options.b).await?;
    let comparison = compare(&store, &a, &b).await?;
    match project.common.json {
        true => print_json(&comparison),
        false => print(&comparison.in_words()),
    }
    Ok(Exit::Done)
}

/// Two things, the one of the first run and the one of the second.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair<T> {
    a: T,
    b: T,
}

impl<T> Pair<T> {
    fn new(a: T, b: T) -> Self {
        Self { a, b }
    }
}

/// All of it, as data.
#[derive(Debug, Serialize)]
struct Comparison {
    runs: Pair<RunSide>,
    params: BTreeMap<String, Pair<Option<Value>>>,
    /// Stages that only one run had.
    only: Pair<Vec<String>>,
    /// How many had the same key in both.
    same_key: usize,
    /// Those that had not, or that came out otherwise.
    stages: Vec<StageDifference>,
}

#[derive(Debug, Serialize)]
struct RunSide {
    run: String,
    pipeline: String,
    outcome: &'static str,
    started_at: f64,
    ended_at: Option<f64>,
}

#[derive(Debug, Serialize)]
struct StageDifference {
    stage: String,
    key: Pair<Option<Digest>>,
    outcome: Pair<StageState>,
    /// Why it failed, or what was set aside to accept it.
    message: Pair<Option<String>>,
    /// A result that was there once, and is no more.
    record_gone: Pair<bool>,
    /// What counts in the keys; absent where a record is.
    reasons: Option<Vec<MissReason>>,
    #[serde(flatten)]
    results: Option<Results>,
}

/// What two records say.
#[derive(Debug, Serialize)]
struct Results {
    outputs: BTreeMap<String, OutputDifference>,
    rows: Option<Pair<Option<RowCounts>>>,
    metrics: BTreeMap<String, Pair<Option<f64>>>,
    duration_s: Pair<f64>,
}

/// How one output differs.
#[derive(Debug, Serialize)]
#[serde(tag = "difference", rename_all = "snake_case")]
pub enum OutputDifference {
    SameResult,
    OnlyA,
    OnlyB,
    /// A table in one, a tree in the other.
    Type {
        types: Pair<PortType>,
    },
    Table {
        rows: Pair<u64>,
        columns: Names,
    },
    Tree {
        files: Names,
    },
    /// A tree whose list of files is gone from the store.
    FilesGone,
}

/// Names of columns or files.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Names {
    added: Vec<String>,
    removed: Vec<String>,
    changed: Vec<String>,
    /// Those of the changed ones that hold measurements.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    measured: Vec<String>,
}

/// Records by key; a key without one had one that is gone.
type Records = BTreeMap<Digest, Record>;

async fn compare(store: &Store, a: &RunManifest, b: &RunManifest) -> Result<Comparison, StoreError> {
    let only = |one: &RunManifest, other: &RunManifest| {
        one.stages.keys().filter(|stage| !other.stages.contains_key(*stage)).cloned().collect()
    };
    let both = a.stages.iter().filter_map(|(stage, entry)| Some((stage, entry, b.stages.get(stage)?)));
    let (same, different): (Vec<_>, Vec<_>) = both.partition(|(_, a, b)| is_same(a, b));
    let keys: BTreeSet<Digest> = different
        .iter()
        .flat_map(|(_, a, b)| [*a, *b])
        .filter(|entry| entry.outcome.has_result())
        .filter_map(|entry| entry.key)
        .collect();
    let records = load(store, keys).await?;
    let made = made_in(b, &records);
    let stages = different.into_iter().map(|(stage, a, b)| compare_stage(store, &records, &made, stage, a, b));
    let stages = futures::stream::iter(stages.collect::<Vec<_>>()).buffered(SIDE_BY_SIDE).try_collect().await?;
    Ok(Comparison {
        runs: Pair::new(side(a), side(b)),
        params: changed(&a.params, &b.params),
        only: Pair::new(only(a, b), only(b, a)),
        same_key: same.len(),
        stages,
    })
}

/// The same key, and a result in both or in none.
fn is_same(a: &StageEntry, b: &StageEntry) -> bool {
    a.key == b.key && a.outcome.has_result() == b.outcome.has_result()
}

async fn load(store: &Store, keys: BTreeSet<Digest>) -> Result<Records, StoreError> {
    let read = futures::stream::iter(keys)
        .map(|key| async move { Ok::<_, StoreError>(store.record(&key).await?.map(|(_, record)| (key, record))) });
    let found: Vec<Option<(Digest, Record)>> = read.buffer_unordered(SIDE_BY_SIDE).try_collect().await?;
    Ok(found.into_iter().flatten().collect())
}

fn side(run: &RunManifest) -> RunSide {
    RunSide {
        run: run.run.clone(),
        pipeline: run.pipeline.clone(),
        outcome: outcome(run),
        started_at: run.started_at,
        ended_at: run.ended_at,
    }
}

/// What differs of two maps.
fn changed<V: Clone + PartialEq>(
    a: &BTreeMap<String, V>,
    b: &BTreeMap<String, V>,
) -> BTreeMap<String, Pair<Option<V>>> {
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let pairs = names.into_iter().map(|name| (name.clone(), Pair::new(a.get(name).cloned(), b.get(name).cloned())));
    pairs.filter(|(_, pair)| pair.a != pair.b).collect()
}

/// Outputs of a run's stages, as far as their records were read, under their names.
fn made_in<'r>(run: &RunManifest, records: &'r Records) -> Vec<(String, &'r Artifact)> {
    let stages = run.stages.iter().filter_map(|(stage, entry)| Some((stage, records.get(&entry.key?)?)));
    stages
        .flat_map(|(stage, record)| {
            record.outputs.iter().map(move |(port, artifact)| (format!("{stage}.{port}"), &**artifact))
        })
        .collect()
}

async fn compare_stage(
    store: &Store,
    records: &Records,
    made: &[(String, &Artifact)],
    stage: &str,
    a: &StageEntry,
    b: &StageEntry,
) -> Result<StageDifference, StoreError> {
    let record = |entry: &StageEntry| entry.key.and_then(|key| records.get(&key));
    let is_gone = |entry: &StageEntry| entry.outcome.has_result() && record(entry).is_none();
    let mut difference = StageDifference {
        stage: stage.to_owned(),
        key: Pair::new(a.key, b.key),
        outcome: Pair::new(a.outcome, b.outcome),
        message: Pair::new(a.message.clone(), b.message.clone()),
        record_gone: Pair::new(is_gone(a), is_gone(b)),
        reasons: None,
        results: None,
    };
    if let (Some(a), Some(b)) = (record(a), record(b)) {
        difference.reasons = Some(reasons(a, b, made));
        difference.results = Some(results(store, a, b).await?);
    }
    Ok(difference)
}

/// What the keys differ in. The pipeline file may have other wires by now, so what feeds a port is found by its content.
fn reasons(a: &Record, b: &Record, made: &[(String, &Artifact)]) -> Vec<MissReason> {
    let inputs = b.preimage.inputs.iter();
    let producers = inputs.filter_map(|(port, identity)| Some((port.clone(), producer(identity, made)?))).collect();
    difference(&a.preimage, &b.preimage, &producers)
}

fn producer(identity: &InputIdentity, made: &[(String, &Artifact)]) -> Option<String> {
    let is = |artifact: &Artifact| match identity {
        InputIdentity::Tree { digest } => artifact.rows.is_none() && artifact.digest == *digest,
        InputIdentity::Table { rows, columns, .. } => {
            artifact.rows == Some(*rows)
                && columns.iter().all(|(name, (_, digest))| {
                    artifact.columns.iter().any(|column| column.name == *name && column.digest == *digest)
                })
        }
        InputIdentity::List { .. } | InputIdentity::Rows { .. } => false,
    };
    match identity {
        InputIdentity::List { items } => {
            let names: BTreeSet<String> = items.iter().filter_map(|item| producer(item, made)).collect();
            Some(names.into_iter().collect::<Vec<_>>().join(", "))
        }
        _ => made.iter().find(|(_, artifact)| is(artifact)).map(|(name, _)| name.clone()),
    }
}

/// How the outputs of two records differ, by port.
pub async fn outputs(store: &Store, a: &Record, b: &Record) -> Result<BTreeMap<String, OutputDifference>, StoreError> {
    let ports: BTreeSet<&String> = a.outputs.keys().chain(b.outputs.keys()).collect();
    let mut outputs = BTreeMap::new();
    for port in ports {
        let found = match (a.outputs.get(port), b.outputs.get(port)) {
            (Some(a), Some(b)) => compare_output(store, a, b).await?,
            (Some(_), None) => OutputDifference::OnlyA,
            _ => OutputDifference::OnlyB,
        };
        outputs.insert(port.clone(), found);
    }
    Ok(outputs)
}

async fn results(store: &Store, a: &Record, b: &Record) -> Result<Results, StoreError> {
    Ok(Results {
        outputs: outputs(store, a, b).await?,
        rows: Some(Pair::new(a.rows, b.rows)).filter(|rows| rows.a != rows.b),
        metrics: changed(&a.metrics, &b.metrics),
        duration_s: Pair::new(a.duration_s, b.duration_s),
    })
}

async fn compare_output(store: &Store, a: &Artifact, b: &Artifact) -> Result<OutputDifference, StoreError> {
    Ok(match (a.rows, b.rows) {
        (Some(_), None) | (None, Some(_)) => OutputDifference::Type { types: Pair::new(a.port_type, b.port_type) },
        _ if a.digest == b.digest => OutputDifference::SameResult,
        (Some(a_rows), Some(b_rows)) => OutputDifference::Table {
            rows: Pair::new(a_rows, b_rows),
            columns: compare_columns(&a.columns, &b.columns),
        },
        (None, None) => match (store.tree_entries(a).await?, store.tree_entries(b).await?) {
            (Some(a), Some(b)) => {
                let files = |entries: Vec<cuda_agent_engine::artifact::tree::Entry>| {
                    entries.into_iter().map(|entry| (entry.path, (entry.executable, entry.digest))).collect()
                };
                OutputDifference::Tree { files: names(&files(a), &files(b)) }
            }
            _ => OutputDifference::FilesGone,
        },
    })
}

fn compare_columns(a: &[ColumnInfo], b: &[ColumnInfo]) -> Names {
    let columns = |columns: &[ColumnInfo]| {
        columns.iter().map(|column| (column.name.clone(), (column.column_type.clone(), column.digest))).collect()
    };
    let mut names = names(&columns(a), &columns(b));
    let is_measured = |name: &&String| b.iter().any(|column| column.name == **name && column.measured);
    names.measured = names.changed.iter().filter(is_measured).cloned().collect();
    names
}

fn names<V: Clone + PartialEq>(a: &BTreeMap<String, V>, b: &BTreeMap<String, V>) -> Names {
    let mut names = Names::default();
    for (name, pair) in changed(a, b) {
        match pair {
            Pair { a: Some(_), b: Some(_) } => names.changed.push(name),
            Pair { a: Some(_), b: None } => names.removed.push(name),
            _ => names.added.push(name),
        }
    }
    names
}

impl Comparison {
    fn in_words(&self) -> String {
        let mut text = self.runs_in_words();
        let mut head = Table::default();
        for (name, pair) in &self.params {
            let shown = |value: &Option<Value>| value.as_ref().map_or_else(|| "absent".to_owned(), Value::to_string);
            head.add(&format!("param {name}"), format!("{} → {}", shown(&pair.a), shown(&pair.b)));
        }
        for (run, stages) in [("a", &self.only.a), ("b", &self.only.b)] {
            if !stages.is_empty() {
                head.add(&format!("only in {run}"), stages.join(", "));
            }
        }
        if !head.lines.is_empty() {
            text.push_str(&format!("\n{}", head.in_words("")));
        }
        for stage in &self.stages {
            text.push_str(&format!("\n{}", stage.in_words()));
        }
        let only = self.only.a.len() + self.only.b.len();
        let only = if only > 0 { format!(", {only} in one run only") } else { String::new() };
        text.push_str(&format!(
            "\nstages: {} with the same key, {} different{only}\n",
            self.same_key,
            self.stages.len()
        ));
        text
    }

    fn runs_in_words(&self) -> String {
        let width = self.runs.a.pipeline.len().max(self.runs.b.pipeline.len());
        let line = |name: &str, run: &RunSide| {
            let took = run.ended_at.map(|ended| format!("  {}", seconds_of(ended - run.started_at)));
            let (when, took) = (when(run.started_at), took.unwrap_or_default());
            format!("{name}  {}  {:<width$}  {when}  {:<11}{took}\n", run.run, run.pipeline, run.outcome)
        };
        format!("{}{}", line("a", &self.runs.a), line("b", &self.runs.b))
    }
}

impl StageDifference {
    fn in_words(&self) -> String {
        let mut table = Table::default();
        if self.outcome.a != self.outcome.b && self.results.is_none() {
            let ended = |outcome: StageState, message: &Option<String>| match message {
                Some(message) => format!("{outcome} ({message})"),
                None => outcome.to_string(),
            };
            let [a, b] = [ended(self.outcome.a, &self.message.a), ended(self.outcome.b, &self.message.b)];
            table.add("outcome", format!("{a} → {b}"));
        }
        if let Some(results) = &self.results {
            results.add_to(&mut table);
        }
        let why = match (&self.reasons, &self.record_gone) {
            (Some(reasons), _) => because(reasons),
            (None, Pair { a: true, b: true }) => "the records of both are gone from the store".into(),
            (None, Pair { a: true, b: false }) => "the record of a is gone from the store".into(),
            (None, Pair { a: false, b: true }) => "the record of b is gone from the store".into(),
            _ => self.without_result(),
        };
        format!("{}: {why}\n{}", self.stage, table.in_words("  "))
    }

    fn without_result(&self) -> String {
        let none = match [self.outcome.a, self.outcome.b].map(StageState::has_result) {
            [true, _] => "no result in b",
            [_, true] => "no result in a",
            _ => "no result in either run",
        };
        match self.key.a == self.key.b {
            true => format!("the same key, but {none}"),
            false => none.into(),
        }
    }
}

impl Results {
    fn add_to(&self, table: &mut Table) {
        for (port, difference) in &self.outputs {
            let lines = difference.in_words();
            let mut labels = std::iter::once(port.as_str()).chain(std::iter::repeat(""));
            lines.into_iter().for_each(|line| table.add(labels.next().unwrap_or_default(), line));
        }
        if let Some(rows) = &self.rows {
            table.add("by row", rows_in_words(rows));
        }
        for (name, pair) in &self.metrics {
            let shown = |value: Option<f64>| value.map_or_else(|| "absent".to_owned(), |value| value.to_string());
            table.add(&format!("metric {name}"), format!("{} → {}", shown(pair.a), shown(pair.b)));
        }
        table.add("took", format!("{:.3} s → {:.3} s", self.duration_s.a, self.duration_s.b));
    }
}

impl OutputDifference {
    /// Whether nothing differs but the values of columns that hold measurements.
    pub fn only_measurements(&self) -> bool {
        match self {
            Self::SameResult => true,
            Self::Table { rows, columns } => {
                let whole = columns.added.is_empty() && columns.removed.is_empty();
                rows.a == rows.b && whole && columns.changed == columns.measured
            }
            _ => false,
        }
    }

    /// What differs, a line each.
    pub fn in_words(&self) -> Vec<String> {
        match self {
            Self::SameResult => vec!["same result".into()],
            Self::OnlyA => vec!["only in a".into()],
            Self::OnlyB => vec!["only in b".into()],
            Self::Type { types } => vec![format!("{} → {}", types.a, types.b)],
            Self::FilesGone => vec!["differs; its files are gone from the store".into()],
            Self::Table { rows, columns } => {
                let rows = match rows.a == rows.b {
                    true => format!("{} rows", rows.a),
                    false => format!("rows {} → {}", rows.a, rows.b),
                };
                std::iter::once(rows).chain(columns.in_words("columns", COLUMNS)).collect()
            }
            Self::Tree { files } => files.in_words("files", FILES),
        }
    }
}

impl Names {
    fn in_words(&self, what: &str, most: usize) -> Vec<String> {
        let mut left = most;
        let mut lines = Vec::new();
        for (names, how) in [(&self.added, "added"), (&self.removed, "removed"), (&self.changed, "changed")] {
            if names.is_empty() {
                continue;
            }
            let shown: Vec<String> = names.iter().take(left).map(|name| self.shown(name)).collect();
            left -= shown.len();
            let more = match names.len() - shown.len() {
                0 => String::new(),
                more if shown.is_empty() => more.to_string(),
                more => format!(" and {more} more"),
            };
            lines.push(format!("{what} {how}: {}{more}", shown.join(", ")));
        }
        lines
    }

    fn shown(&self, name: &str) -> String {
        match name {
            "" => "(the file itself)".into(),
            name if self.measured.iter().any(|measured| measured == name) => format!("{name} (measured)"),
            name => name.to_owned(),
        }
    }
}

fn rows_in_words(rows: &Pair<Option<RowCounts>>) -> String {
    let (Some(a), Some(b)) = (rows.a, rows.b) else {
        return if rows.a.is_some() { "only in a".into() } else { "only in b".into() };
    };
    let counts = [
        ("rows", a.total, b.total),
        ("executed", a.executed, b.executed),
        ("reused", a.reused, b.reused),
        ("rejected", a.rejected, b.rejected),
        ("failed", a.failed, b.failed),
    ];
    let differ = counts.iter().filter(|(_, a, b)| a != b);
    differ.map(|(name, a, b)| format!("{name} {a} → {b}")).collect::<Vec<_>>().join(", ")
}

/// Labels and what belongs to them, aligned.
#[derive(Default)]
struct Table {
    lines: Vec<(String, String)>,
}

impl Table {
    fn add(&mut self, label: &str, text: String) {
        self.lines.push((label.to_owned(), text));
    }

    fn in_words(&self, indent: &str) -> String {
        let width = self.lines.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0).min(32);
        self.lines.iter().map(|(label, text)| format!("{indent}{label:<width$}  {text}\n")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn names_are_shown_up_to_a_number() {
        let names = Names {
            added: some(&["a", "b", "c"]),
            removed: some(&["d", "e"]),
            changed: some(&["", "ms"]),
            measured: some(&["ms"]),
        };
        assert_eq!(
            names.in_words("files", 10),
            ["files added: a, b, c", "files removed: d, e", "files changed: (the file itself), ms (measured)"]
        );
        assert_eq!(
            names.in_words("files", 4),
            ["files added: a, b, c", "files removed: d and 1 more", "files changed: 2"]
        );
    }

    #[test]
    fn a_producer_is_found_by_content() {
        let column = |name: &str, digest: u8| ColumnInfo {
            name: name.into(),
            column_type: "int64".into(),
            digest: Digest([digest; 32]),
            measured: false,
        };
        let artifact = |rows: Option<u64>, columns: Vec<ColumnInfo>| Artifact {
            port_type: if rows.is_some() { PortType::Table } else { PortType::Tree },
            digest: Digest([9; 32]),
            size: 1,
            blob: Digest([0; 32]),
            parts: Vec::new(),
            rows,
            columns,
        };
        let (table, tree) = (artifact(Some(2), vec![column("x", 1), column("y", 2)]), artifact(None, Vec::new()));
        let made = [("s.table".to_owned(), &table), ("t.tree".to_owned(), &tree)];
        let reads = |name: &str, digest: u8| InputIdentity::Table {
            rows: 2,
            columns: BTreeMap::from([(name.to_owned(), ("int64".to_owned(), Digest([digest; 32])))]),
            order: vec![name.to_owned()],
        };
        assert_eq!(producer(&reads("y", 2), &made).as_deref(), Some("s.table"));
        assert_eq!(producer(&reads("y", 3), &made), None);
        let items = vec![InputIdentity::Tree { digest: Digest([9; 32]) }, reads("x", 1)];
        assert_eq!(producer(&InputIdentity::List { items }, &made).as_deref(), Some("s.table, t.tree"));
        assert_eq!(producer(&InputIdentity::Tree { digest: Digest([8; 32]) }, &made), None);
    }
}
