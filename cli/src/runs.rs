//! `status`, `runs` and `log`: what runs recorded.

use clap::Args;
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::execute::{file_name, live_log};
use cuda_agent_engine::store::{RowCounts, RunManifest, StageState, Store, gc};
use futures::StreamExt;
use serde_json::json;

use crate::project::Project;
use crate::text::when;
use crate::{CliError, Exit, note, print, print_json};

/// Options of `status`.
#[derive(Args)]
pub struct StatusOptions {
    /// A run's id, the beginning or end of one, `last`, `last~1`… [default: the newest]
    run: Option<String>,
}

/// Options of `runs`.
#[derive(Args)]
pub struct RunsOptions {
    /// Maximum number of runs listed
    #[arg(long, short = 'n', default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
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
    /// A run's id, `last`, `last~1`… [default: the newest that has a log of the stage]
    #[arg(long)]
    run: Option<String>,
}

/// Seconds without a sign of life after which a run counts as dead.
const SILENT: f64 = 120.0;

/// How a run ended, or that it seems to be dead.
pub fn outcome(run: &RunManifest) -> &'static str {
    if run.ended_at.is_none() && cuda_agent_engine::now() - run.heartbeat_at > SILENT {
        return "killed";
    }
    run.outcome.word()
}

async fn run_named(store: &Store, name: Option<&str>) -> Result<RunManifest, CliError> {
    let Some(name) = name else {
        let own = store.own().await?;
        let ids = own.runs().await?;
        let id = ids.first().ok_or_else(|| no_run(store))?;
        let newest = own.run(id).await?.ok_or_else(|| gone(id))?;
        if !newest.is_of_worker() {
            return Ok(newest);
        }
        // What a worker does for somebody else's run is not what is meant, unless there is nothing else.
        let mut runs = own.manifests(SEARCHED).await?.filter(|run| std::future::ready(!run.is_of_worker()));
        return Ok(runs.next().await.unwrap_or(newest));
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

/// The pipeline whose runs `last` counts: all of them where none is named and none ran here.
pub fn pipeline_name(project: &Project) -> Result<Option<String>, CliError> {
    match project.default_pipeline() {
        Ok(file) => Ok(Some(project.pipeline(&file)?.name)),
        Err(_) => Ok(None),
    }
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
    let run = match options.run.as_deref() {
        Some(word) => chosen(project, &store, word).await?,
        None => match asked_pipeline(project)? {
            Some(name) => run_by_word(&store, Some(&name), "last").await?,
            None => run_named(&store, None).await?,
        },
    };
    match project.common.json {
        true => print_json(&run),
        false => print(&in_words(&run)),
    }
    Ok(Exit::Done)
}

fn in_words(run: &RunManifest) -> String {
    let (how, began) = (outcome(run), when(run.started_at));
    let took = run.ended_at.map(|end| format!(" in {}", span(end - run.started_at))).unwrap_or_default();
    let mut text = format!("run {} of {}: {how}{took}, began {began}\n", run.run, run.pipeline);
    let width = run.stages.keys().map(String::len).max().unwrap_or(0).min(40);
    for (stage, entry) in run.in_order() {
        let took = entry.duration_s.map(span).unwrap_or_default();
        let rows = entry.rows.as_ref().map(|rows| counted(rows, entry.outcome == StageState::Hit)).unwrap_or_default();
        let notes: Vec<&str> = [rows.as_str(), entry.message.as_deref().unwrap_or_default()]
            .into_iter()
            .filter(|note| !note.is_empty())
            .collect();
        text.push_str(format!("  {stage:<width$}  {:<9}  {took:>8}  {}", entry.outcome, notes.join("; ")).trim_end());
        text.push('\n');
    }
    text
}

fn span(seconds: f64) -> String {
    cuda_agent_engine::execute::seconds_of(seconds)
}

/// Of a result that was there, only what still holds.
fn counted(rows: &RowCounts, is_hit: bool) -> String {
    let RowCounts { total, executed, reused, rejected, failed } = rows;
    let mut text = format!("{total} rows");
    if !is_hit {
        text.push_str(&format!(": {executed} executed, {reused} reused"));
    }
    for (count, what) in [(rejected, "rejected"), (failed, "failed")] {
        if *count > 0 {
            text.push_str(&format!(", {count} {what}"));
        }
    }
    text
}

/// A run by a word of the command line. `last` and `last~1` count runs of the pipeline that a command without `--pipeline`
/// works on.
async fn chosen(project: &Project, store: &Store, word: &str) -> Result<RunManifest, CliError> {
    let pipeline = match steps_back(word) {
        Some(_) => pipeline_name(project)?,
        None => None,
    };
    run_by_word(store, pipeline.as_deref(), word).await
}

/// The name of the pipeline that `--pipeline` asks for.
fn asked_pipeline(project: &Project) -> Result<Option<String>, CliError> {
    let file = project.common.pipeline.as_deref();
    file.map(|file| project.pipeline(file).map(|pipeline| pipeline.name)).transpose()
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
    let asked = asked_pipeline(project)?;
    let limit = options.limit as usize;
    let most = if asked.is_some() { usize::MAX } else { limit };
    let is_asked = |run: &RunManifest| asked.as_ref().is_none_or(|name| *name == run.pipeline);
    let listed = store.manifests(most).await?.filter(|run| std::future::ready(is_asked(run)));
    let mut listed = std::pin::pin!(listed.take(limit));
    while let Some(run) = listed.next().await {
        let id = run.run.clone();
        let count = |state: StageState| run.stages.values().filter(|entry| entry.outcome == state).count();
        let took = run.ended_at.map_or(cuda_agent_engine::now(), |end| end) - run.started_at;
        let took = cuda_agent_engine::execute::seconds_of(took);
        let accepted = Some(count(StageState::Accepted)).filter(|accepted| *accepted > 0);
        let accepted = accepted.map(|accepted| format!(", {accepted} accepted")).unwrap_or_default();
        let rejected: u64 = run.stages.values().filter_map(|entry| entry.rows).map(|rows| rows.rejected).sum();
        let rejected_rows = if rejected > 0 { format!(", {rejected} rows rejected") } else { String::new() };
        lines.push_str(&format!(
            "{id}  {:<16}  {:<11}  {took:>8}  {} executed, {} up to date, {} failed{accepted}{rejected_rows}\n",
            run.pipeline,
            outcome(&run),
            count(StageState::Done),
            count(StageState::Hit),
            count(StageState::Failed)
        ));
        values.push(json!({
            "run": id, "pipeline": run.pipeline, "outcome": outcome(&run), "started_at": run.started_at,
            "ended_at": run.ended_at, "executed": count(StageState::Done), "hits": count(StageState::Hit), "failed": count(StageState::Failed),
            "accepted": count(StageState::Accepted), "rejected_rows": rejected,
        }));
    }
    if project.common.json {
        print_json(&values);
    } else if lines.is_empty() {
        let of = asked.map(|name| format!(" of pipeline `{name}`")).unwrap_or_default();
        print(&format!("no run{of} is recorded in {}\n", store.url()));
    } else {
        print(&lines);
    }
    Ok(Exit::Done)
}

/// Pins a run, or takes its pin away.
async fn pin(project: &Project, store: &Store, options: &RunsOptions) -> Result<Exit, CliError> {
    let word = options.pin.as_deref().or(options.unpin.as_deref()).unwrap_or("last");
    let run = chosen(project, store, word).await?.run;
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
    let wanted = Wanted {
        run: match &options.run {
            Some(word) => Some(chosen(project, &store, word).await?.run),
            None => None,
        },
        pipeline: asked_pipeline(project)?,
        stage: &options.stage,
    };
    // What was printed here comes first.
    for store in [store.nearby(), store.clone()] {
        if let Some((run, text)) = find_log(project, &store, &wanted).await? {
            match project.common.json {
                true => print_json(&json!({ "run": run, "stage": options.stage, "log": text })),
                false => print(&text),
            }
            return Ok(Exit::Done);
        }
    }
    let Some(run) = run_with(&store, &wanted).await? else { return Err(no_log(project, &store, &wanted)) };
    match project.common.json {
        true => print_json(&json!({ "run": run.run, "stage": options.stage, "log": "" })),
        false => note(&why_no_log(&run, &options.stage)),
    }
    Ok(Exit::Done)
}

/// Which log is asked for.
struct Wanted<'a> {
    run: Option<String>,
    pipeline: Option<String>,
    stage: &'a str,
}

/// How many runs are searched for a stage.
const SEARCHED: usize = 200;

/// The newest log that is wanted, with the run's id.
async fn find_log(project: &Project, store: &Store, wanted: &Wanted<'_>) -> Result<Option<(String, String)>, CliError> {
    let name = format!("{}.log", file_name(wanted.stage));
    let ids = match (&wanted.run, &wanted.pipeline) {
        (Some(run), _) => vec![run.clone()],
        (None, None) => store.runs().await?.into_iter().take(SEARCHED).collect(),
        (None, Some(pipeline)) => {
            let runs = store.manifests(usize::MAX).await?;
            let of_it = runs.filter(|run| std::future::ready(run.pipeline == *pipeline)).take(SEARCHED);
            of_it.map(|run| run.run).collect().await
        }
    };
    let name = &name;
    let reading = ids.into_iter().map(|id| async move { (store.log(&id, name).await, id) });
    let mut reading = std::pin::pin!(futures::stream::iter(reading).buffered(16));
    while let Some((bytes, id)) = reading.next().await {
        // A stage that runs now has its log on this machine.
        let live = live_log(&project.folders, &id, wanted.stage);
        if let Some(bytes) = bytes?.map(|bytes| bytes.to_vec()).or_else(|| std::fs::read(live).ok()) {
            return Ok(Some((id, String::from_utf8_lossy(&bytes).into_owned())));
        }
    }
    Ok(None)
}

/// The newest run that is wanted and has the stage.
async fn run_with(store: &Store, wanted: &Wanted<'_>) -> Result<Option<RunManifest>, CliError> {
    if let Some(id) = &wanted.run {
        return Ok(store.run(id).await?.filter(|run| run.stages.contains_key(wanted.stage)));
    }
    let own = store.own().await?;
    let mut runs = own.manifests(SEARCHED).await?;
    while let Some(run) = runs.next().await {
        let is_asked = wanted.pipeline.as_ref().is_none_or(|name| *name == run.pipeline);
        if is_asked && run.stages.contains_key(wanted.stage) {
            return Ok(Some(run));
        }
    }
    Ok(None)
}

/// Why a run has a stage and no log of it.
fn why_no_log(run: &RunManifest, stage: &str) -> String {
    let entry = run.stages.get(stage);
    let what = match entry.map(|entry| entry.outcome).unwrap_or_default() {
        StageState::Done | StageState::Failed => "printed nothing".to_owned(),
        StageState::Hit => "was up to date, so nothing was executed".to_owned(),
        StageState::Running => "has printed nothing so far".to_owned(),
        other => format!("was not executed ({other})"),
    };
    format!("stage `{stage}` {what} in run {}", run.run)
}

fn no_log(project: &Project, store: &Store, wanted: &Wanted<'_>) -> CliError {
    let of = match (&wanted.run, &wanted.pipeline) {
        (Some(run), _) => format!("run {run} has"),
        (None, Some(pipeline)) => format!("no run of pipeline `{pipeline}` in {} has", store.url()),
        (None, None) => format!("no run in {} has", store.url()),
    };
    let error = CliError::usage(format!("{of} a stage `{}`", wanted.stage));
    let pipeline = project.default_pipeline().and_then(|file| project.pipeline(&file)).ok();
    let names = pipeline.iter().flat_map(|pipeline| &pipeline.stages).map(|stage| stage.name.as_str());
    match cuda_agent_engine::spec::suggest(wanted.stage, names) {
        Some(near) if near != wanted.stage => error.with_hint(format!("did you mean `{near}`?")),
        Some(_) => error.with_hint("`cuda-agent run` executes it"),
        None => error.with_hint("`cuda-agent status` lists the stages of a run"),
    }
}

/// The newest record of a stage that a run used or made, with the run's id.
pub async fn newest_key(store: &Store, pipeline: Option<&str>, stage: &str) -> Result<Option<Digest>, CliError> {
    let has_remote = store.has_remote();
    // What was made here comes first; where nothing was, somebody else may have.
    for store in [store.nearby(), store.clone()] {
        let mut runs = store.manifests(200).await?;
        while let Some(run) = runs.next().await {
            if pipeline.is_some_and(|pipeline| pipeline != run.pipeline) {
                continue;
            }
            let entry = run.stages.get(stage).filter(|entry| entry.outcome.has_result());
            if let Some(key) = entry.and_then(|entry| entry.key) {
                return Ok(Some(key));
            }
        }
        if !has_remote {
            break;
        }
    }
    Ok(None)
}
