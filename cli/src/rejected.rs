//! `cuda-agent show STAGE --rejected`: the rows that a by-row stage leaves out of its tables, and why.
//!
//! They are the rows of the input that the stage has now, so this works for a stage that failed because of them, too.

use std::collections::BTreeSet;
use std::path::Path;

use cuda_agent_engine::execute::attempt;
use cuda_agent_engine::plan::graph::Graph;
use cuda_agent_engine::plan::{Resolved, StagePlan};
use cuda_agent_engine::rows::assembly::Results;
use cuda_agent_engine::rows::{InputRows, RowIndex, SegmentSchema};
use cuda_agent_engine::spec::Stage;
use cuda_agent_engine::store::Store;
use serde_json::{Map, Value, json};

use crate::artifacts::not_made;
use crate::plan::plans;
use crate::project::Project;
use crate::text::cell_text;
use crate::{CliError, Exit, print, print_json};

/// A row that is left out.
struct Rejection {
    row: usize,
    values: Map<String, Value>,
    why: String,
}

/// Lists the rejected rows of a stage, the first `count` of them unless all are wanted as JSON.
pub async fn show(project: &Project, store: &Store, name: &str, count: usize, full: bool) -> Result<Exit, CliError> {
    let pipeline = project.pipeline(&project.default_pipeline()?)?;
    let Some(index) = pipeline.stages.iter().position(|stage| stage.name == name) else {
        return Err(not_made(Some(&pipeline), name));
    };
    let stage = &pipeline.stages[index];
    if stage.kind.by_row.is_none() {
        return Err(CliError::usage(format!("`{name}` is not by-row, so it rejects no rows")));
    }
    let graph = Graph::new(&pipeline);
    let mut selected = graph.ancestors([index]);
    selected[index] = true;
    let plans = plans(project, &pipeline, &graph, &selected, &BTreeSet::new()).await?;
    let Some(StagePlan { resolved: Some(resolved), .. }) = &plans[index] else {
        return Err(CliError::usage(format!("the input of `{name}` is not made yet"))
            .with_hint(format!("`cuda-agent run {name}` makes it")));
    };
    // A copy, as a program would get it.
    let copy = project.folders.cache.join(format!("rejected-{}.parquet", cuda_agent_engine::nonce()));
    std::fs::create_dir_all(&project.folders.cache)
        .map_err(|error| CliError::environment(format!("{}: {error}", project.folders.cache.display())))?;
    let found = find(project, store, stage, resolved, &copy).await;
    let _ = std::fs::remove_file(&copy);
    let (total, rejections) = found?;
    if project.common.json {
        let rows = rejections.iter().map(|one| json!({ "row": one.row, "values": one.values, "why": one.why }));
        print_json(&rows.collect::<Vec<_>>());
    } else {
        print(&in_words(name, total, &rejections, count, full));
    }
    Ok(Exit::Done)
}

/// How many distinct rows there are, and the rejected ones in the order of the table.
async fn find(
    project: &Project,
    store: &Store,
    stage: &Stage,
    resolved: &Resolved,
    copy: &Path,
) -> Result<(usize, Vec<Rejection>), CliError> {
    let by_row = stage.kind.by_row.as_ref().expect("only by-row stages come here");
    let base = resolved.base.expect("by-row stages have a base key");
    let input = &resolved.inputs[&by_row.port][0];
    let failed = |error: &dyn std::fmt::Display| CliError::environment(error.to_string());
    attempt::place(store, input, copy).await?;
    let names: Vec<String> = stage.kind.inputs[&by_row.port].columns.keys().cloned().collect();
    let rows = InputRows::read(copy, &names).map_err(|error| failed(&error))?;
    let cache = project.folders.cache.join("rows").join(base.to_string());
    let index = RowIndex::load(store, &base, &cache).await.map_err(|error| failed(&error))?;
    let schema = SegmentSchema::new(&stage.kind);
    let results = Results::load(store, &base, &index, &rows.digests, &schema).await.map_err(|error| failed(&error))?;
    let rejection = |(digest, why)| {
        let row = rows.position(&digest)?;
        Some(Rejection { row, values: rows.values(row), why })
    };
    let mut rejections: Vec<Rejection> = results.rejections().into_iter().filter_map(rejection).collect();
    rejections.sort_unstable_by_key(|rejection| rejection.row);
    Ok((rows.digests.iter().collect::<BTreeSet<_>>().len(), rejections))
}

fn in_words(name: &str, total: usize, rejections: &[Rejection], count: usize, full: bool) -> String {
    let mut text = format!("{name}: {} of {total} rows are rejected\n", rejections.len());
    for rejection in rejections.iter().take(count) {
        text.push_str(&format!("row {}: {}\n", rejection.row, rejection.why));
        for (name, value) in &rejection.values {
            text.push_str(&format!("  {name:<28} {}\n", cell_text(value, full)));
        }
    }
    if rejections.len() > count {
        let more = rejections.len() - count;
        text.push_str(&format!("and {more} more: `--rows {}` shows all, `--json` too\n", rejections.len()));
    }
    text
}
