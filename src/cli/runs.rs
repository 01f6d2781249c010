//! `status`, `runs` and `log`: what runs recorded.

use clap::Args;
use futures::StreamExt;
use serde_json::json;

use super::project::Project;
use super::{CliError, Exit, print, print_json};
use crate::digest::Digest;
use crate::execute::{file_name, live_log};
use crate::store::record::has_result;
use crate::store::{RunManifest, Store, gc};

/// Options of `status`.
#[derive(Args)]
pub struct StatusOptions {
    /// A run's id [default: the newest]
    run: Option<String>,
}

/// Options of `runs`.
#[derive(Args)]
pub struct RunsOptions {
    /// Show at most so many
    #[arg(long, short = 'n', default_value_t = 20)]
    limit: usize,
    /// Keep what this run used and made, whatever `gc` is told to keep
    #[arg(long, value_name = "RUN", conflicts_with = "unpin")]
    pin: Option<String>,
    /// Take the pin of a run away
    #[arg(long, value_name = "RUN")]
    unpin: Option<String>,
}

/// Options of `log`.
#[derive(Args)]
pub struct LogOptions {
    /// The stage
    stage: String,
    /// A run's id [default: the newest that has a log of the stage]
    #[arg(long)]
    run: Option<String>,
}

/// Seconds without a sign of life after which a run counts as dead.
const SILENT: f64 = 120.0;

/// How a run ended, or that it seems to be dead.
pub fn outcome(run: &RunManifest) -> String {
    if run.ended_at.is_none() && crate::now() - run.heartbeat_at > SILENT {
        return "killed".into();
    }
    run.outcome.clone()
}

async fn run_named(store: &Store, name: Option<&str>) -> Result<RunManifest, CliError> {
    let Some(name) = name else {
        let own = store.own().await?;
        let ids = own.runs().await?;
        let id = ids.first().ok_or_else(|| no_run(store))?;
        return own.run(id).await?.ok_or_else(|| gone(id));
    };
    let ids = store.runs().await?;
    // Runs of one day begin alike, so the end of an id will do as well.
    let matching: Vec<&String> = ids.iter().filter(|id| id.starts_with(name) || id.ends_with(name)).collect();
    match matching.as_slice() {
        [id] => store.run(id).await?.ok_or_else(|| gone(id)),
        [] => Err(CliError::usage(format!("there is no run `{name}`")).with_hint("`cuda-agent runs` lists them")),
        several => {
            let shown: Vec<&str> = several.iter().take(3).map(|id| id.as_str()).collect();
            let more = if several.len() > shown.len() { ", …" } else { "" };
            Err(CliError::usage(format!("`{name}` begins or ends {} runs", several.len()))
                .with_hint(format!("give more of one: {}{more}", shown.join(", "))))
        }
    }
}

fn no_run(store: &Store) -> CliError {
    CliError::usage(format!("no run is recorded in {}", store.url())).with_hint("`cuda-agent run` makes one")
}

fn gone(run: &str) -> CliError {
    CliError::environment(format!("the manifest of run {run} is gone"))
}

/// A run by its id, by as much of its beginning or end as no other has, or as `last`, `last~1`… of a pipeline (of all,
/// where none is known).
pub async fn run_by_word(store: &Store, pipeline: Option<&str>, word: &str) -> Result<RunManifest, CliError> {
    let Some(back) = steps_back(word) else { return run_named(store, Some(word)).await };
    let store = store.own().await?;
    let mut found = 0;
    let mut runs = store.manifests(usize::MAX).await?;
    while let Some(run) = runs.next().await {
        if pipeline.is_some_and(|pipeline| pipeline != run.pipeline) {
            continue;
        }
        if found == back {
            return Ok(run);
        }
        found += 1;
    }
    let of = pipeline.map(|pipeline| format!(" of pipeline `{pipeline}`")).unwrap_or_default();
    Err(CliError::usage(format!("there is no run `{word}`{of}: {found} are recorded in {}", store.url()))
        .with_hint("`cuda-agent runs` lists them"))
}

/// `last` is 0, `last~2` is 2.
fn steps_back(word: &str) -> Option<usize> {
    match word.strip_prefix("last")? {
        "" => Some(0),
        back => back.strip_prefix('~')?.parse().ok(),
    }
}

/// How a run stands.
pub async fn status(project: &Project, options: StatusOptions) -> Result<Exit, CliError> {
    let store = project.existing_store()?;
    let run = run_named(&store, options.run.as_deref()).await?;
    if project.common.json {
        print_json(&run);
        return Ok(Exit::Done);
    }
    let mut text = format!("run {} of {}: {}\n", run.run, run.pipeline, outcome(&run));
    let width = run.stages.keys().map(String::len).max().unwrap_or(0).min(40);
    for (stage, entry) in &run.stages {
        let message = entry.message.as_deref().unwrap_or_default();
        text.push_str(format!("  {stage:<width$}  {:<9}  {message}", entry.outcome).trim_end());
        text.push('\n');
    }
    print(&text);
    Ok(Exit::Done)
}

/// Lists runs.
pub async fn runs(project: &Project, options: RunsOptions) -> Result<Exit, CliError> {
    let store = project.existing_store()?;
    if options.pin.is_some() || options.unpin.is_some() {
        project.refuse_read_only(&store)?;
        return pin(project, &store, &options).await;
    }
    let mut lines = String::new();
    let mut values = Vec::new();
    let mut listed = store.manifests(options.limit).await?;
    while let Some(run) = listed.next().await {
        let id = run.run.clone();
        let count = |word: &str| run.stages.values().filter(|entry| entry.outcome == word).count();
        let took = run.ended_at.map_or(crate::now(), |end| end) - run.started_at;
        let took = crate::execute::seconds(std::time::Duration::from_secs_f64(took.max(0.0)));
        let accepted = Some(count("accepted")).filter(|accepted| *accepted > 0);
        let accepted = accepted.map(|accepted| format!(", {accepted} accepted")).unwrap_or_default();
        lines.push_str(&format!(
            "{id}  {:<16}  {:<11}  {took:>8}  {} executed, {} up to date, {} failed{accepted}\n",
            run.pipeline,
            outcome(&run),
            count("done"),
            count("hit"),
            count("failed")
        ));
        values.push(json!({
            "run": id, "pipeline": run.pipeline, "outcome": outcome(&run), "started_at": run.started_at,
            "ended_at": run.ended_at, "executed": count("done"), "hits": count("hit"), "failed": count("failed"),
            "accepted": count("accepted"),
        }));
    }
    if project.common.json {
        print_json(&values);
    } else if lines.is_empty() {
        print(&format!("no run is recorded in {}\n", store.url()));
    } else {
        print(&lines);
    }
    Ok(Exit::Done)
}

/// Pins a run, or takes its pin away.
async fn pin(project: &Project, store: &Store, options: &RunsOptions) -> Result<Exit, CliError> {
    let run = run_named(store, options.pin.as_deref().or(options.unpin.as_deref())).await?.run;
    let pinned = options.pin.is_some();
    match pinned {
        true => gc::pin(store.truth(), &run).await?,
        false => gc::unpin(store.truth(), &run).await?,
    }
    if project.common.json {
        print_json(&json!({ "run": run, "pinned": pinned }));
    } else {
        print(&format!("run {run} is {}pinned\n", if pinned { "" } else { "no longer " }));
    }
    Ok(Exit::Done)
}

/// Prints what a stage printed.
pub async fn log(project: &Project, options: LogOptions) -> Result<Exit, CliError> {
    if !project.common.params.is_empty() {
        return Err(
            CliError::usage("`-p` does not choose a log").with_hint("`--run ID` does; `cuda-agent runs` lists them")
        );
    }
    let store = project.existing_store()?;
    let name = format!("{}.log", file_name(&options.stage));
    let of = match &options.run {
        Some(run) => Some(run_named(&store, Some(run)).await?.run),
        None => None,
    };
    // What was printed here comes first.
    for store in [store.nearby(), store.clone()] {
        let ids = match &of {
            Some(run) => vec![run.clone()],
            None => store.runs().await?.into_iter().take(200).collect(),
        };
        let (store, name) = (&store, &name);
        let reading = ids.into_iter().map(|id| async move { (store.log(&id, name).await, id) });
        let mut reading = std::pin::pin!(futures::stream::iter(reading).buffered(16));
        while let Some((bytes, id)) = reading.next().await {
            // A stage that runs now has its log on this machine.
            let live = live_log(&project.folders, &id, &options.stage);
            let Some(bytes) = bytes?.map(|bytes| bytes.to_vec()).or_else(|| std::fs::read(live).ok()) else { continue };
            let text = String::from_utf8_lossy(&bytes);
            if project.common.json {
                print_json(&json!({ "run": id, "stage": options.stage, "log": text }));
            } else {
                print(&text);
            }
            return Ok(Exit::Done);
        }
    }
    Err(CliError::usage(format!("no log of stage `{}` is kept", options.stage))
        .with_hint("a stage that succeeded without printing leaves none; `cuda-agent status` lists stages"))
}

/// The newest record of a stage that a run used or made, with the run's id.
pub async fn newest_key(store: &Store, pipeline: Option<&str>, stage: &str) -> Result<Option<Digest>, CliError> {
    let has_far = store.far().is_some();
    // What was made here comes first; where nothing was, somebody else may have.
    for store in [store.nearby(), store.clone()] {
        let mut runs = store.manifests(200).await?;
        while let Some(run) = runs.next().await {
            if pipeline.is_some_and(|pipeline| pipeline != run.pipeline) {
                continue;
            }
            let entry = run.stages.get(stage).filter(|entry| has_result(&entry.outcome));
            if let Some(key) = entry.and_then(|entry| entry.key) {
                return Ok(Some(key));
            }
        }
        if store.far().is_none() && !has_far {
            break;
        }
    }
    Ok(None)
}
