//! `plan`, `explain` and `graph`: what would be done, and why.

use std::collections::{BTreeMap, BTreeSet};

use clap::{Args, ValueEnum};
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::execute::secrets::Secrets;
use cuda_agent_engine::key::{InputIdentity, MissReason, Preimage, ProgramIdentity};
use cuda_agent_engine::plan::graph::Graph;
use cuda_agent_engine::plan::{Planner, StagePlan, Verdict};
use cuda_agent_engine::schedule;
use cuda_agent_engine::spec::Pipeline;
use cuda_agent_engine::store::RowCounts;
use serde_json::{Value, json};

use crate::progress::because;
use crate::project::Project;
use crate::run::{Chosen, named_stages};
use crate::{CliError, Exit, print, print_json, secrets};

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
    let Chosen { ahead, pipeline, graph, selected, refresh, .. } =
        Chosen::read(project, &options.targets, &options.refresh)?;
    let (store, host) = (project.existing_store()?.with(ahead), project.host());
    let planner = Planner::new(&pipeline, &project.catalog, &store, &host, &project.folders, &refresh);
    let plans = planned(&planner, &graph, &selected).await?;
    let known: Vec<(usize, &StagePlan)> =
        graph.order().iter().filter_map(|index| Some((*index, plans[*index].as_ref()?))).collect();
    let todo = rows_to_do(&planner, &known).await?;
    let values = Secrets::read(&pipeline);
    let lacks = secrets::lacks(&planner, &values, &plans).await?;
    let fresh = without_result(&planner, &known).await?;
    if project.common.json {
        let stage = |(index, plan): &(usize, &StagePlan)| {
            let mut value = as_json(&pipeline, *index, plan);
            if matches!(plan.verdict, Verdict::Pending { .. }) {
                value["never_run"] = json!(fresh.contains(index));
            }
            if let Some(lack) = lacks.iter().find(|lack| lack.stage == pipeline.stages[*index].name) {
                value["missing_secret"] = json!({ "secret": lack.error.name, "message": lack.error.message });
            }
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
        let other = made_otherwise(&planner, *index, plan).unwrap_or_default();
        let why = format!("{}{rows}{other}", reasons(&pipeline, &plan.verdict, fresh.contains(index)));
        text.push_str(format!("{:<width$}  {word:<7}  {why}", pipeline.stages[*index].name).trim_end());
        text.push('\n');
    }
    let [hits, misses, pending] = counts;
    text.push_str(&format!("\n{misses} to run, {pending} pending, {hits} up to date\n"));
    lacks.iter().for_each(|lack| text.push_str(&format!("warning: {}\n", lack.in_words())));
    print(&text);
    Ok(Exit::Done)
}

/// That a result was made with another Python than it would be made with now. It is still up to date: its key does not
/// say which, unless its kind declares a toolchain.
fn made_otherwise(planner: &Planner<'_>, index: usize, plan: &StagePlan) -> Option<String> {
    let Verdict::Hit { record, .. } = &plan.verdict else { return None };
    let (then, now) = planner.other_interpreter(&planner.pipeline.stages[index], record)?;
    let now = now.map_or_else(|| "there is none".to_owned(), |now| format!("it would be {now}"));
    Some(format!("made with {then}; now {now}"))
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

/// Stages that wait for others and have no result that they could come back to.
async fn without_result(planner: &Planner<'_>, plans: &[(usize, &StagePlan)]) -> Result<BTreeSet<usize>, CliError> {
    let mut fresh = BTreeSet::new();
    for (index, plan) in plans {
        let waits = matches!(plan.verdict, Verdict::Pending { .. });
        if waits && !planner.has_result(&planner.pipeline.stages[*index]).await? {
            fresh.insert(*index);
        }
    }
    Ok(fresh)
}

fn reasons(pipeline: &Pipeline, verdict: &Verdict, is_fresh: bool) -> String {
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
            match is_fresh {
                true => format!("never run; waits for {shown}"),
                false => format!("waits for {shown}; up to date if that comes out unchanged"),
            }
        }
    }
}

fn as_json(pipeline: &Pipeline, index: usize, plan: &StagePlan) -> Value {
    let stage = &pipeline.stages[index];
    let key = plan.resolved.as_ref().map(|resolved| resolved.key);
    let mut value = json!({ "stage": stage.name, "kind": stage.kind.name, "key": key });
    match &plan.verdict {
        Verdict::Hit { record, .. } => {
            value["verdict"] = "hit".into();
            if let Some(interpreter) = &record.interpreter {
                value["interpreter"] = json!(interpreter);
            }
        }
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
    let (store, host, refresh) = (project.existing_store()?, project.host(), BTreeSet::new());
    let planner = Planner::new(&pipeline, &project.catalog, &store, &host, &project.folders, &refresh);
    let plans = planned(&planner, &graph, &selected).await?;
    let known: Vec<(usize, &StagePlan)> =
        wanted.iter().filter_map(|index| Some((*index, plans[*index].as_ref()?))).collect();
    let fresh = without_result(&planner, &known).await?;
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
        text.push_str(&described(&pipeline, index, plan, fresh.contains(&index)));
        values.push(value);
    }
    if project.common.json {
        print_json(&values)
    } else {
        print(&text)
    }
    Ok(Exit::Done)
}

fn described(pipeline: &Pipeline, index: usize, plan: &StagePlan, is_fresh: bool) -> String {
    let stage = &pipeline.stages[index];
    let word = match &plan.verdict {
        Verdict::Hit { .. } => "up to date".to_owned(),
        Verdict::Miss { .. } => format!("would run: {}", reasons(pipeline, &plan.verdict, is_fresh)),
        Verdict::Pending { .. } => reasons(pipeline, &plan.verdict, is_fresh),
    };
    let mut text = format!("{} ({}, {})\n  {word}\n", stage.name, stage.kind.name, stage.location);
    let preimage = plan.resolved.as_ref().map(|resolved| &resolved.preimage);
    if let Some(resolved) = &plan.resolved {
        text.push_str(&format!("  key      {}\n", resolved.key));
        if let Some(base) = resolved.base.filter(|base| *base != resolved.key) {
            let what = if stage.kind.by_row.is_some() { "rows of " } else { "state of" };
            text.push_str(&format!("  {what} {base}\n"));
        }
    }
    if let Some(preimage) = preimage {
        text.push_str(&what_counts(preimage));
    }
    for (port, sources) in &stage.inputs {
        let names: Vec<String> = sources.iter().map(|source| source_name(pipeline, source)).collect();
        text.push_str(&format!("  input    {port} ← {}\n", names.join(", ")));
        let identity = preimage.and_then(|preimage| preimage.inputs.get(port));
        identity.iter().for_each(|identity| identified(identity, &mut text));
    }
    if let Verdict::Hit { record, .. } = &plan.verdict {
        if let Some(rows) = record.rows {
            let RowCounts { total, executed, reused, rejected, .. } = rows;
            let list = format!(" (cuda-agent show '{}' --rejected)", stage.name);
            let list = if rejected > 0 { list } else { String::new() };
            text.push_str(&format!(
                "  rows     {total}: {executed} executed, {reused} reused, {rejected} rejected{list}\n"
            ));
        }
        for (port, artifact) in &record.outputs {
            let rows = artifact.rows.map(|rows| format!("{rows} rows, ")).unwrap_or_default();
            let size = schedule::bytes(artifact.size);
            text.push_str(&format!(
                "  output   {port}: {}, {rows}{size}, {}\n",
                artifact.port_type,
                artifact.digest.short()
            ));
        }
        if let Some(interpreter) = &record.interpreter {
            text.push_str(&format!("  made with {interpreter}\n"));
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

/// What counts in a key besides inputs.
fn what_counts(preimage: &Preimage) -> String {
    let mut text = String::new();
    let mut line = |label: &str, value: String| text.push_str(&format!("  {label:<8} {value}\n"));
    let file = |path: &String, digest: &Digest| {
        let executable = if preimage.executable.contains(path) { ", executable" } else { "" };
        format!("{path} {}{executable}", digest.short())
    };
    match &preimage.program {
        ProgramIdentity::Version(version) => line("program", format!("version {version}")),
        ProgramIdentity::Files(files) => {
            files.iter().for_each(|(path, digest)| line("program", file(path, digest)));
        }
        ProgramIdentity::Command { command, files } => {
            line("command", command_text(command));
            files.iter().for_each(|(path, digest)| line("file", file(path, digest)));
        }
    }
    preimage.params.iter().for_each(|(name, value)| line("param", format!("{name} = {value}")));
    for (name, value) in &preimage.env {
        line("env", value.as_ref().map_or_else(|| format!("{name} is not set"), |value| format!("{name} = {value}")));
    }
    preimage.secrets.iter().for_each(|name| line("secret", format!("{name} (its name counts, its value does not)")));
    preimage.toolchain.iter().for_each(|(name, version)| line("version", format!("{name} {version}")));
    if let Some(device) = &preimage.device {
        line("device", serde_json::to_string(device).expect("plain data"));
    }
    for (port, declared) in preimage.outputs.iter().filter_map(Value::as_object).flatten() {
        line("declares", format!("{port}: {}", declared_output(declared)));
    }
    text
}

/// A command's text, further lines below the first, or its words as they are written in a pipeline.
fn command_text(command: &Value) -> String {
    match command {
        Value::String(text) => text.trim_end().replace('\n', "\n           "),
        words => words.to_string(),
    }
}

/// `table (n int64, t utf8)` of what a pre-image has: the type, then name and type of each column.
fn declared_output(declared: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let columns = declared[1].as_array().into_iter().flatten();
    let columns: Vec<String> = columns.map(|column| format!("{} {}", text(&column[0]), text(&column[1]))).collect();
    match columns.is_empty() {
        true => text(&declared[0]),
        false => format!("{} ({})", text(&declared[0]), columns.join(", ")),
    }
}

/// What of an input counts, with its digests.
fn identified(identity: &InputIdentity, text: &mut String) {
    match identity {
        InputIdentity::Tree { digest } => text.push_str(&format!("             tree {}\n", digest.short())),
        InputIdentity::Table { rows, columns, order } => {
            text.push_str(&format!("             table, {rows} rows\n"));
            for (name, (column_type, digest)) in order.iter().filter_map(|name| columns.get_key_value(name)) {
                text.push_str(&format!("             column {name} {column_type} {}\n", digest.short()));
            }
        }
        InputIdentity::List { items } => items.iter().for_each(|item| identified(item, text)),
        InputIdentity::Rows { .. } => {}
    }
}

fn source_name(pipeline: &Pipeline, source: &cuda_agent_engine::spec::Source) -> String {
    use cuda_agent_engine::spec::Source;
    match source {
        Source::Stage { stage, output } => format!("{}.{output}", pipeline.stages[*stage].name),
        Source::Path(path) => path.display().to_string(),
        Source::Url { url, .. } => url.clone(),
        Source::Artifact { name, tag } => format!("{name}@{tag}"),
        Source::Stored(artifact) => format!("artifact {}", artifact.digest.short()),
    }
}

/// Draws the pipeline.
pub fn graph(project: &Project, options: GraphOptions) -> Result<Exit, CliError> {
    let (file, stages) = project.targets(&options.targets)?;
    let pipeline = project.pipeline(&file)?;
    if let Some(word) = stages.first() {
        return Err(CliError::usage(format!("`{word}` is not a pipeline file"))
            .with_hint("`graph` draws a whole pipeline; a pipeline file ends in .yaml or .yml"));
    }
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
