//! `verify`: runs stages again, unseen by anybody, and compares what comes out with what the store has.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::sync::Arc;

use clap::Args;
use cuda_agent_engine::event::Subscriber;
use cuda_agent_engine::execute::launch::LocalLauncher;
use cuda_agent_engine::execute::secrets::Secrets;
use cuda_agent_engine::execute::{Engine, Sample};
use cuda_agent_engine::host::Host;
use cuda_agent_engine::plan::graph::Graph;
use cuda_agent_engine::plan::{StagePlan, Verdict};
use cuda_agent_engine::spec::Pipeline;
use cuda_agent_engine::store::{Record, Store};
use cuda_agent_protocol::manifest::Determinism;
use serde::Serialize;

use crate::diff::{self, OutputDifference};
use crate::plan::plans;
use crate::progress::{Bars, Lines};
use crate::project::Project;
use crate::run::{absolute, interrupts, named_stages};
use crate::waiting::Voice;
use crate::{CliError, Exit, print, print_json};

/// What to run again.
#[derive(Args)]
pub struct Again {
    /// Stages to run again [default: a sample of those that have a result]
    stages: Vec<String>,
    /// How much to run again: of the stages where none are named, and of the rows of a by-row stage
    #[arg(long, value_name = "PERCENT", default_value = "10", value_parser = percent)]
    sample: f64,
    /// Choose others for the sample
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Maximum number of CPU cores to use
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    jobs: Option<u32>,
}

fn percent(text: &str) -> Result<f64, String> {
    let number: f64 = text.trim_end_matches('%').parse().map_err(|_| format!("`{text}` is not a number"))?;
    match number > 0.0 && number <= 100.0 {
        true => Ok(number / 100.0),
        false => Err("more than 0, at most 100".into()),
    }
}

/// What came of running a stage again.
#[derive(Serialize)]
struct Verified {
    stage: String,
    /// `same`, `measurements differ`, `differs` or `failed`.
    verdict: &'static str,
    rows_again: Option<u64>,
    message: Option<String>,
    outputs: BTreeMap<String, OutputDifference>,
}

/// Runs stages again and compares.
pub async fn run_again(project: &Project, options: Again) -> Result<Exit, CliError> {
    let sample = Sample { share: options.sample, seed: options.seed };
    let file = project.default_pipeline()?;
    let pipeline = project.pipeline(&file)?;
    let graph = Graph::new(&pipeline);
    let store = project.existing_store()?;
    let everything = vec![true; pipeline.stages.len()];
    let plans = plans(project, &pipeline, &graph, &everything, &BTreeSet::new()).await?;
    let host = project.host();
    let chosen = choose(&pipeline, &host, &plans, &options.stages, sample)?;
    let mut selected = graph.ancestors(chosen.iter().copied());
    chosen.iter().for_each(|stage| selected[*stage] = true);
    let folders = absolute(project)?;
    let scratch = folders.cache.join(format!("verify-{}", cuda_agent_engine::nonce()));
    let sketch = store.sketch(&scratch)?;
    lend_inputs(&store, &sketch, &plans, &chosen);
    let before: BTreeMap<usize, Record> =
        chosen.iter().filter_map(|stage| Some((*stage, hit(&plans, *stage)?.clone()))).collect();
    let secrets = Secrets::read(&pipeline);
    if let Some(error) = chosen.iter().find_map(|stage| secrets.missing(&pipeline.stages[*stage])) {
        let hint = format!("{}; or name stages that need no secret", error.hint);
        return Err(CliError::environment(error.to_string()).with_hint(hint));
    }
    // Nobody else sees this store, so all of it happens here.
    let host = host.alone();
    let engine = Engine {
        order: graph.order().to_vec(),
        pipeline: Arc::new(pipeline),
        catalog: &project.catalog,
        store: sketch.clone(),
        host: &host,
        folders: cuda_agent_engine::Folders { state: scratch.join("state"), ..folders },
        launcher: Arc::new(LocalLauncher::this_binary()),
        selected,
        refresh: chosen.clone(),
        secrets,
        jobs: options.jobs,
        sample: Some(sample),
        waits: true,
    };
    let mut printer: Box<dyn Subscriber> = match (project.common.json, std::io::stderr().is_terminal()) {
        (true, _) => Box::new(Vec::new()),
        (false, true) => {
            let bars = Bars::new(project.common.colored());
            project.waiting.voice.replace(Voice::Bars(bars.all.clone()));
            Box::new(bars)
        }
        (false, false) => Box::new(Lines::new()),
    };
    let report = {
        let mut subscribers: [&mut dyn Subscriber; 1] = [&mut *printer];
        engine.run(&mut subscribers, interrupts()).await
    };
    drop(printer);
    let mut verified = Vec::new();
    if let Ok(report) = &report {
        for (stage, record) in before {
            let name = engine.pipeline.stages[stage].name.clone();
            let failure = report.failed.get(&name).map(|failure| failure.message.clone());
            verified.push(compare(&sketch, &engine.pipeline, stage, &record, failure).await?);
        }
    }
    let _ = std::fs::remove_dir_all(&scratch);
    report?;
    say(project, &verified);
    let good = verified.iter().all(|stage| matches!(stage.verdict, "same" | "measurements differ"));
    Ok(if good { Exit::Done } else { Exit::Failed })
}

fn hit(plans: &[Option<StagePlan>], stage: usize) -> Option<&Record> {
    match plans.get(stage)?.as_ref()? {
        StagePlan { verdict: Verdict::Hit { record, .. }, .. } => Some(record),
        _ => None,
    }
}

/// The named stages, which must have a result; else a sample of those that have one, and at least one.
fn choose(
    pipeline: &Pipeline,
    host: &Host,
    plans: &[Option<StagePlan>],
    stages: &[String],
    sample: Sample,
) -> Result<BTreeSet<usize>, CliError> {
    if !stages.is_empty() {
        let named = named_stages(pipeline, stages)?;
        if let Some(stage) = named.iter().map(|stage| &pipeline.stages[*stage]).find(|stage| !host.stands_in_for(stage))
        {
            let executor = host.executor_of(stage).map_or("local", |(name, _)| name);
            let message = format!("`{}` is executed by `{executor}`, and this machine has not its device", stage.name);
            return Err(CliError::usage(message).with_hint("verify it on one of that executor's machines"));
        }
        return match named.iter().find(|stage| hit(plans, **stage).is_none()) {
            Some(stage) => {
                let name = &pipeline.stages[*stage].name;
                Err(CliError::usage(format!("`{name}` has no result to compare with"))
                    .with_hint(format!("`cuda-agent run {name}` makes it")))
            }
            None => Ok(named),
        };
    }
    let here = (0..plans.len()).filter(|stage| host.stands_in_for(&pipeline.stages[*stage]));
    let made: Vec<(usize, &Record)> = here.filter_map(|stage| Some((stage, hit(plans, stage)?))).collect();
    let sampled = made.iter().filter(|(_, record)| sample.has(&record.key)).map(|(stage, _)| *stage);
    let sampled: BTreeSet<usize> = sampled.collect();
    match (sampled.is_empty(), made.iter().min_by_key(|(_, record)| record.key)) {
        (true, Some((stage, _))) => Ok(BTreeSet::from([*stage])),
        (true, None) => Err(CliError::usage(format!("no stage of `{}` has a result yet", pipeline.name))
            .with_hint("`cuda-agent run` makes them")),
        (false, _) => Ok(sampled),
    }
}

fn lend_inputs(store: &Store, sketch: &Store, plans: &[Option<StagePlan>], chosen: &BTreeSet<usize>) {
    let resolved = chosen.iter().filter_map(|stage| plans[*stage].as_ref()?.resolved.as_ref());
    for input in resolved.flat_map(|resolved| resolved.inputs.values().flatten()) {
        store.lend(&input.artifact.blob, sketch);
        input.artifact.parts.iter().for_each(|part| store.lend(part, sketch));
    }
}

async fn compare(
    sketch: &Store,
    pipeline: &Pipeline,
    stage: usize,
    before: &Record,
    failure: Option<String>,
) -> Result<Verified, CliError> {
    let stage = &pipeline.stages[stage];
    let after = sketch.nearby().record(&before.key).await?.map(|(_, record)| record);
    let Some(after) = after.filter(|_| failure.is_none()) else {
        let message = Some(failure.unwrap_or_else(|| "it was not run to its end".into()));
        let (verdict, outputs) = ("failed", BTreeMap::new());
        return Ok(Verified { stage: stage.name.clone(), verdict, rows_again: None, message, outputs });
    };
    let outputs = diff::outputs(sketch, before, &after).await?;
    // What a kind measures may differ; everything else must be the same.
    let is_free = stage.kind.determinism != Determinism::Exact;
    let may_differ = |output: &OutputDifference| {
        output.only_measurements() || is_free && matches!(output, OutputDifference::Tree { .. })
    };
    let verdict = if outputs.values().all(|output| matches!(output, OutputDifference::SameResult)) {
        "same"
    } else if outputs.values().all(may_differ) {
        "measurements differ"
    } else {
        "differs"
    };
    let rows_again = after.rows.map(|rows| rows.executed);
    Ok(Verified { stage: stage.name.clone(), verdict, rows_again, message: None, outputs })
}

fn say(project: &Project, verified: &[Verified]) {
    if project.common.json {
        return print_json(&verified);
    }
    let mut text = String::new();
    for stage in verified {
        let rows = stage.rows_again.map(|rows| format!(" ({rows} rows again)")).unwrap_or_default();
        text.push_str(&format!("{}: {}{rows}\n", stage.stage, stage.verdict));
        stage.message.iter().for_each(|message| text.push_str(&format!("  {message}\n")));
        let different = stage.outputs.iter().filter(|(_, output)| !matches!(output, OutputDifference::SameResult));
        for (port, output) in different {
            output.in_words().iter().for_each(|line| text.push_str(&format!("  {port}: {line}\n")));
        }
    }
    print(&text);
}
