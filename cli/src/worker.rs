//! `cuda-agent worker`.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use cuda_agent_engine::execute::executor::item::WorkerReport;
use cuda_agent_engine::execute::launch::LocalLauncher;
use cuda_agent_engine::execute::seconds;
use cuda_agent_engine::host::Host;
use cuda_agent_engine::spec;
use cuda_agent_engine::store::Store;
use cuda_agent_engine::worker::Worker;
use serde_json::json;

use crate::project::Project;
use crate::run::{absolute, interrupts};
use crate::{CliError, Exit, note, print, print_json};

/// Options of `worker`.
#[derive(Args)]
pub struct Options {
    /// An executor of cuda-agent.yaml [default: the only one]
    executor: Option<String>,
    /// Say which workers there are, and execute nothing
    #[arg(long)]
    list: bool,
    /// End when there was nothing to do for so long, such as 10m [default: never]
    #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "list")]
    idle: Option<Duration>,
    /// Maximum number of CPU cores to use
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "list")]
    jobs: Option<u32>,
}

fn duration(text: &str) -> Result<Duration, String> {
    spec::duration(text).ok_or_else(|| "durations look like 30s, 10m or 1h30m".to_owned())
}

/// Works for an executor, or lists its workers.
pub async fn worker(project: &Project, options: Options) -> Result<Exit, CliError> {
    let host = project.host();
    if options.list {
        return list(project, &host, options.executor).await;
    }
    let executor = named(&host, options.executor)?;
    let store = project.shared_store().await?;
    project.refuse_read_only(&store)?;
    if project.common.offline {
        return Err(CliError::usage("a worker takes its work from the shared store").with_hint("leave out --offline"));
    }
    let worker = Worker {
        executor,
        catalog: &project.catalog,
        store: store.clone(),
        host: &host,
        folders: absolute(project)?,
        launcher: Arc::new(LocalLauncher::this_binary()),
        jobs: options.jobs,
        idle: options.idle,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let as_json = project.common.json;
    let notice = |line: &str| if as_json { print(&format!("{}\n", json!({ "message": line }))) } else { note(line) };
    let gpus = match host.gpus.first() {
        Some(gpu) => format!("{} × {} (driver {})", host.gpus.len(), gpu.model, gpu.driver),
        None => "no GPU".to_owned(),
    };
    notice(&format!("worker of executor `{}` at {}: {} cores, {gpus}", worker.executor, store.url(), host.cpus));
    let done = worker.run(&notice, interrupts()).await?;
    if let Err(error) = project.evict(&store).await {
        note(&format!("warning: nothing was evicted from this machine: {}", error.message));
    }
    notice(&format!("worker ended: {} executed, {} failed", done.executed, done.failed));
    project.require_shared(&store)?;
    Ok(Exit::Done)
}

/// The executor that is meant.
fn named(host: &Host, name: Option<String>) -> Result<String, CliError> {
    let known: Vec<&String> = host.executors.keys().collect();
    let hint = "declare it: `executors: { gpu: { kind: workers, device: { gpu: \"NVIDIA H200\", driver: \"580.65.06\" } } }` in \
                cuda-agent.yaml";
    match (name, known.as_slice()) {
        (Some(name), _) if host.executors.contains_key(&name) => Ok(name),
        (Some(name), _) => {
            let near = spec::suggest(&name, known.iter().map(|known| known.as_str()));
            let error = CliError::usage(format!("there is no executor `{name}`"));
            Err(error.with_hint(near.map_or_else(|| hint.to_owned(), |near| format!("did you mean `{near}`?"))))
        }
        (None, [one]) => Ok((*one).clone()),
        (None, []) => Err(CliError::usage("the project has no executor that workers could work for").with_hint(hint)),
        (None, several) => {
            let names: Vec<&str> = several.iter().map(|name| name.as_str()).collect();
            Err(CliError::usage("the project has several executors")
                .with_hint(format!("name one: {}", names.join(", "))))
        }
    }
}

async fn list(project: &Project, host: &Host, name: Option<String>) -> Result<Exit, CliError> {
    let names = match name {
        Some(name) => vec![named(host, Some(name))?],
        None => host.executors.keys().cloned().collect(),
    };
    if names.is_empty() {
        named(host, None)?;
    }
    let store = project.existing_store()?;
    let mut found = Vec::new();
    for name in names {
        found.extend(reports(&store, &name).await?.into_iter().map(|report| (name.clone(), report)));
    }
    if project.common.json {
        let value = |(executor, report): &(String, WorkerReport)| json!({ "executor": executor, "worker": report });
        print_json(&found.iter().map(value).collect::<Vec<_>>());
        return Ok(Exit::Done);
    }
    if found.is_empty() {
        note(&format!("no worker reports itself at {}", store.url()));
    }
    for (executor, report) in &found {
        print(&line(executor, report));
    }
    Ok(Exit::Done)
}

async fn reports(store: &Store, executor: &str) -> Result<Vec<WorkerReport>, CliError> {
    let reports = store.workers(executor).await?;
    let reports = reports.iter().filter_map(|(_, bytes)| WorkerReport::read(bytes));
    Ok(reports.filter(|report| !report.holder.is_gone()).collect())
}

fn line(executor: &str, report: &WorkerReport) -> String {
    let age = Duration::from_secs_f64((cuda_agent_engine::now() - report.heartbeat_at).max(0.0).round());
    let busy = if report.busy.is_empty() { "idle".to_owned() } else { format!("executes {}", report.busy.join(", ")) };
    let (host, device) = (&report.holder.host, report.device());
    let mut text = format!(
        "{executor}  {host}  {} cores, {device}, version {}: {busy}; last heard of {} ago\n",
        report.cpus,
        report.version,
        seconds(age)
    );
    report.left.values().for_each(|why| text.push_str(&format!("    left: {why}\n")));
    text
}
