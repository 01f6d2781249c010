//! The stage kind `agent/report`: tables of trajectories in, an evaluation of their policies out.
//!
//! [`episodes`] reads the tables, [`figures`] computes with [`statistics`], [`text`] and [`page`] write for people. The stage
//! asks no policy and no evaluator: `agent/rollout` on held-out tasks is the evaluation, and this is its account.

mod episodes;
mod figures;
mod page;
mod statistics;
mod text;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use cuda_agent_protocol::request::InputFile;
use cuda_agent_protocol::{Event, InputRequest, Program, ProgramError, Request};
use serde::Deserialize;
use serde_json::Value;

use self::episodes::{Columns, Episodes};
use self::figures::{ALL, Figures, Settings};
use crate::episode::Score;

/// The subset of tasks with room for a faster kernel.
const HEADROOM: &str = "headroom";

#[derive(Clone, Debug, Deserialize)]
struct Params {
    names: Vec<String>,
    title: String,
    group: String,
    subsets: Vec<String>,
    headroom_column: String,
    headroom: f64,
    k: Vec<usize>,
    score: Score,
    resamples: usize,
    seed: i64,
}

/// Runs the stage.
pub fn main() -> u8 {
    Program::main(|program| {
        let request = program.request.clone();
        let params = Value::Object(request.params.clone());
        let params: Params = serde_json::from_value(params).map_err(|error| mistake(error.to_string()))?;
        let (columns, settings) = params.settings()?;
        let tables = tables(&request)?;
        if !params.names.is_empty() && params.names.len() != tables.len() {
            let (names, tables) = (params.names.len(), tables.len());
            return Err(mistake(format!("names: {names} names for {tables} tables of trajectories")));
        }
        let mut episodes = Episodes::default();
        for (number, table) in tables.iter().enumerate() {
            let name = params.names.get(number).map(String::as_str);
            episodes.read(&table.path, name, &columns, params.score)?;
        }
        episodes.check()?;
        if episodes.episodes.is_empty() {
            return Err(ProgramError::input("the tables have no episodes"));
        }
        let figures = Figures::of(&episodes, &settings);
        write(program, &request, &params.title, &figures, &settings)
    })
}

fn mistake(message: String) -> ProgramError {
    ProgramError { kind: "params".into(), message, hint: None }
}

impl Params {
    fn settings(&self) -> Result<(Columns, Settings), ProgramError> {
        let mut k = self.k.clone();
        k.sort_unstable();
        k.dedup();
        if k.first().is_none_or(|least| *least == 0) {
            return Err(mistake("k: expected one or more whole numbers from 1 on".to_owned()));
        }
        if let Some(name) = self.subsets.iter().find(|name| [ALL, HEADROOM].contains(&name.as_str())) {
            return Err(mistake(format!("subsets: `{name}` is a name of the report's own")));
        }
        let mut subsets = self.subsets.clone();
        let headroom = (!self.headroom_column.is_empty()).then_some(self.headroom);
        if headroom.is_some() {
            subsets.push(HEADROOM.to_owned());
        }
        let columns = Columns {
            group: self.group.clone(),
            subsets: self.subsets.clone(),
            headroom: (self.headroom_column.clone(), self.headroom),
        };
        let settings = Settings { k, resamples: self.resamples, seed: self.seed as u64, subsets, headroom };
        Ok((columns, settings))
    }
}

fn tables(request: &Request) -> Result<&[InputFile], ProgramError> {
    match request.inputs.get("trajectories") {
        Some(InputRequest::List(files)) if !files.is_empty() => Ok(files),
        _ => Err(ProgramError::input("the stage was given no table of trajectories")),
    }
}

fn write(
    program: &mut Program,
    request: &Request,
    title: &str,
    figures: &Figures,
    settings: &Settings,
) -> Result<(), ProgramError> {
    let first = figures.policies[0].as_str();
    write_rows(&request.outputs["metrics"].path, figures.figures.iter().map(|figure| figure.row(None)))?;
    write_rows(&request.outputs["differences"].path, figures.differences.iter().map(|it| it.row(Some(first))))?;
    write_rows(&request.outputs["outcomes"].path, figures.outcomes.iter().map(figures::Outcome::row))?;
    let text = text::markdown(title, figures, settings);
    let folder = &request.outputs["report"].path;
    let failed = |error: std::io::Error| ProgramError::environment(format!("{}: {error}", folder.display()));
    fs::create_dir_all(folder).map_err(failed)?;
    fs::write(folder.join("README.md"), &text).map_err(failed)?;
    fs::write(folder.join("index.html"), page::html(title, figures, settings)).map_err(failed)?;
    for figure in figures.figures.iter().filter(|it| it.place.group == ALL && it.place.subset == ALL) {
        let sampling = episodes::sampling(figure.place.greedy);
        let name = format!("{}/{sampling}/{}", figure.policy, figure.place.metric.word());
        program.send(&Event::Metric { name, step: None, value: figure.estimate.value });
    }
    // The stage's log has the report too, for those who read along.
    println!("{text}");
    Ok(())
}

/// Writes a table output as JSON lines beside the Parquet path.
fn write_rows(path: &Path, rows: impl Iterator<Item = Value>) -> Result<(), ProgramError> {
    let path = path.with_extension("jsonl");
    let failed = |error: std::io::Error| ProgramError::environment(format!("{}: {error}", path.display()));
    let mut file = BufWriter::new(File::create(&path).map_err(failed)?);
    rows.into_iter().try_for_each(|row| writeln!(file, "{row}")).map_err(failed)?;
    file.flush().map_err(failed)
}

#[cfg(test)]
mod tests;
