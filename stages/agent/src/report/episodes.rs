//! Tables of trajectories as what an evaluation needs of them: which task, by whom, and what came of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type};
use cuda_agent_protocol::ProgramError;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::episode::Score;
use crate::trajectory::{self, Ending, Trajectory, Turn};

type Result<T> = std::result::Result<T, ProgramError>;

/// What came of an episode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Standing {
    /// Nothing is known of it: it was broken off, or its answer could not be judged.
    Unknown,
    /// Its answer is not correct.
    Failed,
    /// Its answer is correct.
    Correct {
        /// How many times faster than eager, where it was timed.
        eager: Option<f64>,
        /// How many times faster than torch.compile.
        compile: Option<f64>,
    },
}

/// One episode.
#[derive(Clone, Debug, PartialEq)]
pub struct Episode {
    /// The task's digest.
    pub task: String,
    /// The policy's name in the report.
    pub policy: String,
    /// Whether it was sampled at temperature 0.
    pub greedy: bool,
    /// Which of the episodes with its task.
    pub sample: u32,
    /// The outcome of the answer that counts, in the evaluator's word.
    pub outcome: String,
    /// What it is worth here.
    pub standing: Standing,
}

/// What the table says of a task itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Its group; null is none.
    pub group: Option<String>,
    /// For each subset whether it belongs there.
    pub subsets: Vec<bool>,
}

/// Columns of the tasks that the report goes by.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    /// Groups; empty is none.
    pub group: String,
    /// Booleans.
    pub subsets: Vec<String>,
    /// Headroom, and the least of it that makes the subset; empty is none.
    pub headroom: (String, f64),
}

/// Episodes of all tables, and their tasks by digest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Episodes {
    /// In the order of the tables.
    pub episodes: Vec<Episode>,
    /// Facts by task.
    pub tasks: BTreeMap<String, Facts>,
}

impl Episodes {
    /// Adds a table's; `name` is what its policy is called.
    pub fn read(&mut self, path: &Path, name: Option<&str>, columns: &Columns, score: Score) -> Result<()> {
        let wrong = |what: String| ProgramError::input(format!("{}: {what}", path.display()));
        let trajectories = trajectory::read(path).map_err(|error| wrong(error.to_string()))?;
        let facts = facts(path, columns)?;
        for (trajectory, facts) in trajectories.into_iter().zip(facts) {
            let task = trajectory.task_digest.clone();
            if let Some(known) = self.tasks.get(&task)
                && *known != facts
            {
                let task: String = task.chars().take(8).collect();
                return Err(wrong(format!("task {task} has other values in the columns of the task than elsewhere")));
            }
            self.tasks.insert(task, facts);
            self.episodes.push(episode(&trajectory, name, score));
        }
        Ok(())
    }

    /// Refuses what would be counted twice, or mixed.
    pub fn check(&self) -> Result<()> {
        let mut seen: BTreeMap<(&str, bool, &str, u32), ()> = BTreeMap::new();
        for Episode { task, policy, greedy, sample, .. } in &self.episodes {
            if seen.insert((policy, *greedy, task, *sample), ()).is_some() {
                let sampling = sampling(*greedy);
                let short: String = task.chars().take(8).collect();
                return Err(ProgramError::input(format!(
                    "{policy} has two {sampling} episodes {sample} of task {short}"
                ))
                .with_hint("give tables of different policies, temperatures or seeds different `names`"));
            }
        }
        Ok(())
    }
}

/// The word for a way of sampling.
pub fn sampling(greedy: bool) -> &'static str {
    if greedy { "greedy" } else { "sampled" }
}

fn episode(trajectory: &Trajectory, name: Option<&str>, score: Score) -> Episode {
    let policy = name.map_or_else(|| default_name(trajectory), str::to_owned);
    let (outcome, standing) = outcome(trajectory, score);
    let greedy = trajectory.temperature == 0.0;
    Episode { task: trajectory.task_digest.clone(), policy, greedy, sample: trajectory.sample, outcome, standing }
}

fn default_name(trajectory: &Trajectory) -> String {
    let digest: String = trajectory.policy_digest.iter().flat_map(|digest| digest.chars().take(8)).collect();
    [trajectory.policy_model.as_str(), &digest].join(" ").trim().to_owned()
}

fn outcome(trajectory: &Trajectory, score: Score) -> (String, Standing) {
    if trajectory.finish_reason == Ending::Aborted {
        return ("aborted".to_owned(), Standing::Unknown);
    }
    let is_correct = |turn: &&Turn| turn.outcome.as_deref() == Some("correct");
    let best = trajectory.turns.iter().filter(is_correct).max_by(|one, other| speed(one).total_cmp(&speed(other)));
    let turn = match score {
        Score::Best => best.or_else(|| trajectory.last_verdict()),
        Score::Last => trajectory.last_verdict(),
    };
    let Some(turn) = turn else { return ("unjudged".to_owned(), Standing::Unknown) };
    let standing = match turn.reward {
        _ if is_correct(&turn) => Standing::Correct { eager: turn.speedup_eager, compile: turn.speedup_compile },
        Some(_) => Standing::Failed,
        None => Standing::Unknown,
    };
    (turn.outcome.clone().unwrap_or_default(), standing)
}

/// What correct answers are ordered by: the speed-up over torch.compile, without one over eager; an answer that was not
/// timed is the worst.
fn speed(turn: &Turn) -> f64 {
    turn.speedup_compile.or(turn.speedup_eager).unwrap_or(0.0)
}

/// The facts of each row.
fn facts(path: &Path, columns: &Columns) -> Result<Vec<Facts>> {
    let broken = |error: &dyn std::fmt::Display| ProgramError::input(format!("{}: {error}", path.display()));
    let file = File::open(path).map_err(|error| broken(&error))?;
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| broken(&error))?;
    let wanted: Vec<&str> = [&columns.group, &columns.headroom.0]
        .into_iter()
        .chain(&columns.subsets)
        .map(String::as_str)
        .filter(|name| !name.is_empty())
        .collect();
    let there: Vec<String> = builder.schema().fields().iter().map(|field| field.name().clone()).collect();
    if let Some(missing) = wanted.iter().find(|name| !there.iter().any(|other| other == **name)) {
        return Err(broken(&format!("the trajectories have no column `{missing}`")).with_hint(
            "tasks keep their columns through agent/rollout; ops/split makes group, reduces and difficulty",
        ));
    }
    let rows = builder.metadata().file_metadata().num_rows() as usize;
    if wanted.is_empty() {
        return Ok(vec![Facts::default(); rows]);
    }
    let mask = ProjectionMask::columns(builder.parquet_schema(), wanted.iter().copied());
    let reader = builder.with_projection(mask).build().map_err(|error| broken(&error))?;
    let mut facts = Vec::with_capacity(rows);
    for batch in reader {
        let batch = batch.map_err(|error| broken(&error))?;
        let column = |name: &str, kind: DataType| -> Result<Option<ArrayRef>> {
            let Some(column) = batch.column_by_name(name) else { return Ok(None) };
            cast(column, &kind).map(Some).map_err(|error| broken(&format!("column `{name}`: {error}")))
        };
        let group = column(&columns.group, DataType::Utf8)?;
        let headroom = column(&columns.headroom.0, DataType::Float64)?;
        let subsets = columns.subsets.iter().map(|name| column(name, DataType::Boolean));
        let subsets: Vec<ArrayRef> = subsets.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        for row in 0..batch.num_rows() {
            let group = group.as_ref().filter(|column| column.is_valid(row));
            let mut belongs: Vec<bool> =
                subsets.iter().map(|column| column.is_valid(row) && column.as_boolean().value(row)).collect();
            if let Some(column) = &headroom {
                let least = columns.headroom.1;
                belongs.push(column.is_valid(row) && column.as_primitive::<Float64Type>().value(row) >= least);
            }
            let group = group.map(|column| column.as_string::<i32>().value(row).to_owned());
            facts.push(Facts { group, subsets: belongs });
        }
    }
    Ok(facts)
}
