//! `plan`, `explain` and `graph`: what would be done, and why.

use std::collections::{BTreeMap, BTreeSet};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::progress::because;
use super::project::Project;
use super::run::named_stages;
use super::{CliError, Exit, print, print_json};
use crate::key::MissReason;
use crate::plan::graph::Graph;
use crate::plan::{Planner, StagePlan, Verdict};
use crate::schedule;
use crate::spec::Pipeline;

/// Options of `plan`.
#[derive(Args)]
pub struct Options {
    /// A pipeline file, then stages
    #[arg(value_name = "PIPELINE | STAGE")]
    targets: Vec<String>,
    /// Plan as `run --refresh` would
    #[arg(long, value_name = "STAGE")]
    refresh: Vec<String>,
}

/// Options of `explain`.
#[derive(Args)]
pub struct ExplainOptions {
    /// A pipeline file, then the stage
    #[arg(value_name = "PIPELINE | STAGE", required = true)]
    targets: Vec<String>,
}

/// Options of `graph`.
#[derive(Args)]
pub struct GraphOptions {
    /// A pipeline file
    #[arg(value_name = "PIPELINE")]
    targets: Vec<String>,
    /// The language of the drawing
    #[arg(long, value_enum, default_value_t = Format::Mermaid)]
    format: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Dot,
    Mermaid,
}

/// Plans the selected stages against a store that is only looked at.
pub async fn plans(
    project: &Project,
    pipeline: &Pipeline,
    graph: &Graph,
    selected: &[bool],
    refresh: &BTreeSet<usize>,
) -> Result<Vec<Option<StagePlan>>, CliError> {
    let (store, host) = (project.existing_store()?, project.host());
    let planner = Planner::new(pipeline, &project.catalog, &store, &host, &project.folders, refresh);
    planned(&planner, graph, selected).await
}

async fn planned(planner: &Planner<'_>, graph: &Graph, selected: &[bool]) -> Result<Vec<Option<StagePlan>>, CliError> {
    if let Some(error) = CliError::all(planner.problems(selected)) {
        return Err(error);
    }
    Ok(planner.plan(graph.order(), selected).await?)
}

/// Says what `run` would do.
pub async fn plan(project: &Project, options: Options) -> Result<Exit, CliError> {
    let (file, patterns) = project.targets(&options.targets)?;
    let pipeline = project.pipeline(&file)?;
    let graph = Graph::new(&pipeline);
    let selected = graph.select(&pipeline, &patterns)?;
    let refresh = named_stages(&pipeline, &options.refresh)?;
    let (store, host) = (project.existing_store()?, project.host());
    let planner = Planner::new(&pipeline, &project.catalog, &store, &host, &project.folders, &refresh);
    let plans = planned(&planner, &graph, &selected).await?;
    let known: Vec<(usize, &StagePlan)> =
        graph.order().iter().filter_map(|index| Some((*index, plans[*index].as_ref()?))).collect();
    let todo = rows_to_do(&planner, &known).await?;
    if project.common.json {
        let stage = |(index, plan): &(usize, &StagePlan)| {
            let mut value = as_json(&pipeline, *index, plan);
            if let Some((todo, all)) = todo.get(index) {
                value["rows"] = json!({ "to_do": todo, "total": all });
            }
            value
        };
        let stages: Vec<Value> = known.iter().map(stage).collect();
        print_json(&json!({ "pipeline": pipeline.name, "stages": stages }));
        return Ok(Exit::Done);
    }
    let width = known.iter().map(|(index, _)| pipeline.stages[*index].name.len()).max().unwrap_or(0).min(40);
    let mut text = String::new();
    let mut counts = [0usize; 3];
    for (index, plan) in &known {
        let (place, word) = match &plan.verdict {
            Verdict::Hit { .. } => (0, "hit"),
            Verdict::Miss { .. } => (1, "miss"),
            Verdict::Pending { .. } => (2, "pending"),
        };
        counts[place] += 1;
        let rows = todo.get(index).map(|(todo, all)| format!(" ({todo} of {all} rows to do)")).unwrap_or_default();
        let why = format!("{}{rows}", reasons(&pipeline, &plan.verdict));
        text.push_str(format!("{:<width$}  {word:<7}  {why}", pipeline.stages[*index].name).trim_end());
        text.push('\n');
    }
    let [hits, misses, pending] = counts;
    text.push_str(&format!("\n{misses} to run, {pending} pending, {hits} up to date\n"));
    print(&text);
    Ok(Exit::Done)
}

/// For by-row stages that would run: rows to do, and rows in all.
async fn rows_to_do(
    planner: &Planner<'_>,
    plans: &[(usize, &StagePlan)],
) -> Result<BTreeMap<usize, (u64, u64)>, CliError> {
    let mut rows = BTreeMap::new();
    for (index, plan) in plans {
        let (Some(resolved), Verdict::Miss { reasons, .. }) = (&plan.resolved, &plan.verdict) else { continue };
        if reasons.contains(&MissReason::Refresh) {
            continue;
        }
        rows.extend(
            planner.rows_to_do(&planner.pipeline.stages[*index], resolved).await?.map(|counts| (*index, counts)),
        );
    }
    Ok(rows)
}

fn reasons(pipeline: &Pipeline, verdict: &Verdict) -> String {
    match verdict {
        Verdict::Hit { .. } => String::new(),
        Verdict::Miss { reasons, .. } => because(reasons),
        Verdict::Pending { waits } => {
            let names: Vec<&str> = waits.iter().map(|index| pipeline.stages[*index].name.as_str()).collect();
            let shown = if names.len() > 3 {
                format!("{} and {} more", names[..3].join(", "), names.len() - 3)
            } else {
                names.join(", ")
            };
            format!("waits for {shown}; up to date if that comes out unchanged")
        }
    }
}

fn as_json(pipeline: &Pipeline, index: usize, plan: &StagePlan) -> Value {
    let stage = &pipeline.stages[index];
    let key = plan.resolved.as_ref().map(|resolved| resolved.key);
    let mut value = json!({ "stage": stage.name, "kind": stage.kind.name, "key": key });
    match &plan.verdict {
        Verdict::Hit { .. } => value["verdict"] = "hit".into(),
        Verdict::Miss { reasons, .. } => {
            value["verdict"] = "miss".into();
            value["reasons"] = serde_json::to_value(reasons).expect("reasons are plain data");
        }
        Verdict::Pending { waits } => {
            value["verdict"] = "pending".into();
            let waits: Vec<&str> = waits.iter().map(|index| pipeline.stages[*index].name.as_str()).collect();
            value["waits_for"] = json!(waits);
        }
    }
    value
}

/// Tells everything about one stage.
pub async fn explain(project: &Project, options: ExplainOptions) -> Result<Exit, CliError> {
    let (file, names) = project.targets(&options.targets)?;
    let pipeline = project.pipeline(&file)?;
    if names.is_empty() {
        return Err(CliError::usage("name a stage to explain").with_hint("`cuda-agent plan` lists them"));
    }
    let graph = Graph::new(&pipeline);
    let wanted = named_stages(&pipeline, &names)?;
    let selected = graph.ancestors(wanted.iter().copied());
    let selected: Vec<bool> = selected.iter().enumerate().map(|(i, above)| *above || wanted.contains(&i)).collect();
    let plans = plans(project, &pipeline, &graph, &selected, &BTreeSet::new()).await?;
    let mut values = Vec::new();
    let mut text = String::new();
    for index in wanted {
        let plan = plans[index].as_ref().expect("a selected stage is planned");
        let mut value = as_json(&pipeline, index, plan);
        if let Some(resolved) = &plan.resolved {
            value["preimage"] = serde_json::to_value(&resolved.preimage).expect("pre-images are plain data");
            value["base_key"] = json!(resolved.base);
        }
        if let Verdict::Hit { record, .. } = &plan.verdict {
            value["record"] = json!({
                "run": record.run, "accepted_from": record.accepted_from, "created_at": record.created_at,
                "duration_s": record.duration_s,
                "rows": record.rows, "metrics": record.metrics, "outputs": record.outputs,
            });
        }
        text.push_str(&described(&pipeline, index, plan));
        values.push(value);
    }
    if project.common.json {
        print_json(&values)
    } else {
        print(&text)
    }
    Ok(Exit::Done)
}

fn described(pipeline: &Pipeline, index: usize, plan: &StagePlan) -> String {
    let stage = &pipeline.stages[index];
    let word = match &plan.verdict {
        Verdict::Hit { .. } => "up to date".to_owned(),
        Verdict::Miss { .. } => format!("would run: {}", reasons(pipeline, &plan.verdict)),
        Verdict::Pending { .. } => reasons(pipeline, &plan.verdict),
    };
    let mut text = format!("{} ({}, {})\n  {word}\n", stage.name, stage.kind.name, stage.location);
    if let Some(resolved) = &plan.resolved {
        text.push_str(&format!("  key      {}\n", resolved.key));
        if let Some(base) = resolved.base {
            text.push_str(&format!("  rows of  {base}\n"));
        }
        let preimage = &resolved.preimage;
        let program = serde_json::to_value(&preimage.program).expect("plain data");
        text.push_str(&format!("  program  {program}\n"));
        for (name, value) in &preimage.params {
            text.push_str(&format!("  param    {name} = {value}\n"));
        }
        for (name, version) in &preimage.toolchain {
            text.push_str(&format!("  version  {name} {version}\n"));
        }
        if let Some(device) = &preimage.device {
            text.push_str(&format!("  device   {}\n", serde_json::to_string(device).expect("plain data")));
        }
    }
    for (port, sources) in &stage.inputs {
        let names: Vec<String> = sources.iter().map(|source| source_name(pipeline, source)).collect();
        text.push_str(&format!("  input    {port} ← {}\n", names.join(", ")));
    }
    if let Verdict::Hit { record, .. } = &plan.verdict {
        for (port, artifact) in &record.outputs {
            let rows = artifact.rows.map(|rows| format!("{rows} rows, ")).unwrap_or_default();
            let size = schedule::bytes(artifact.size);
            text.push_str(&format!(
                "  output   {port}: {}, {rows}{size}, {}\n",
                artifact.port_type,
                artifact.digest.short()
            ));
        }
        text.push_str(&match record.accepted_from {
            None => format!("  made by  run {} in {} s\n", record.run, record.duration_s),
            Some(key) => {
                format!("  accepted from {} by run {}, made in {} s\n", key.short(), record.run, record.duration_s)
            }
        });
    }
    text
}

fn source_name(pipeline: &Pipeline, source: &crate::spec::Source) -> String {
    use crate::spec::Source;
    match source {
        Source::Stage { stage, output } => format!("{}.{output}", pipeline.stages[*stage].name),
        Source::Path(path) => path.display().to_string(),
        Source::Url { url, .. } => url.clone(),
        Source::Artifact { name, tag } => format!("{name}@{tag}"),
    }
}

/// Draws the pipeline.
pub fn graph(project: &Project, options: GraphOptions) -> Result<Exit, CliError> {
    let (file, _) = project.targets(&options.targets)?;
    let pipeline = project.pipeline(&file)?;
    let graph = Graph::new(&pipeline);
    if project.common.json {
        let wires = (0..pipeline.stages.len()).flat_map(|stage| {
            let name = pipeline.stages[stage].name.clone();
            let pipeline = &pipeline;
            graph.wires_into(stage).map(move |(from, wire)| {
                json!({ "from": pipeline.stages[from].name, "output": wire.output, "to": name, "input": wire.input })
            })
        });
        let wires: Vec<Value> = wires.collect();
        let stages: Vec<Value> =
            pipeline.stages.iter().map(|stage| json!({ "stage": stage.name, "kind": stage.kind.name })).collect();
        print_json(&json!({ "pipeline": pipeline.name, "stages": stages, "wires": wires }));
        return Ok(Exit::Done);
    }
    print(&match options.format {
        Format::Dot => graph.to_dot(&pipeline),
        Format::Mermaid => graph.to_mermaid(&pipeline),
    });
    Ok(Exit::Done)
}
