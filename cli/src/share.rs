//! `push` and `pull`: results between this machine and the shared store, without running anything.

use std::collections::{BTreeMap, BTreeSet};

use clap::Args;
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::plan::graph::Graph;
use cuda_agent_engine::plan::{StagePlan, Verdict};
use cuda_agent_engine::schedule;
use cuda_agent_engine::store::{Record, RunManifest, Store};
use futures::{StreamExt, TryStreamExt};
use serde_json::json;

use crate::artifacts::{find, split_tag};
use crate::plan::plans;
use crate::project::{self, Project};
use crate::{CliError, Exit, print, print_json};

/// Results that are on their way at the same time; each may be many objects.
const RESULTS: usize = 8;

/// Options of `push`.
#[derive(Args)]
pub struct PushOptions {
    /// `STAGE` or `STAGE.output` [default: everything that the pipeline's newest run found or made]
    what: Vec<String>,
    /// Everything that any run on this machine found or made
    #[arg(long, conflicts_with = "what")]
    all: bool,
}

/// Options of `pull`.
#[derive(Args)]
pub struct PullOptions {
    /// `STAGE` or `NAME@TAG` [default: everything that a run of the pipeline would find]
    what: Vec<String>,
}

/// Shares results of this machine.
pub async fn push(project: &Project, options: PushOptions) -> Result<Exit, CliError> {
    let store = project.shared_store().await?;
    require_remote(&store)?;
    project.refuse_read_only(&store)?;
    let nearby = store.nearby();
    let (keys, runs) = match options.what.is_empty() {
        true => of_runs(project, &nearby, options.all).await?,
        false => {
            let mut keys = BTreeSet::new();
            for what in &options.what {
                keys.insert(find(project, &nearby, what).await?.key);
            }
            (keys, Vec::new())
        }
    };
    let total = keys.len();
    // The manifests go first: gc knows by them what is about to come.
    for run in &runs {
        store.put_run(run).await?;
    }
    let (from, to) = (&nearby, &store);
    let pushing = keys.into_iter().map(|key| async move { push_one(to, from, key).await });
    let ends: Vec<Pushed> = futures::stream::iter(pushing).buffer_unordered(RESULTS).try_collect().await?;
    store.write_known();
    let count = |end: Pushed| ends.iter().filter(|other| **other == end).count();
    let (objects, bytes) = store.traffic().sent;
    let (troubles, refused) = (store.take_warnings(), store.unshared().into_values().next());
    if project.common.json {
        print_json(&json!({
            "store": store.url(), "results": total, "pushed": count(Pushed::Now), "there": count(Pushed::Before),
            "gone": count(Pushed::Gone), "failed": count(Pushed::Failed), "objects": objects, "bytes": bytes,
            "runs": runs.len(),
        }));
    } else {
        let mut text = format!(
            "{} of {total} results pushed to {} ({objects} objects, {}); {} were there",
            count(Pushed::Now),
            store.url(),
            schedule::bytes(bytes),
            count(Pushed::Before),
        );
        if count(Pushed::Gone) > 0 {
            text.push_str(&format!("; {} are no longer on this machine", count(Pushed::Gone)));
        }
        if count(Pushed::Failed) > 0 {
            text.push_str(&format!("; {} failed", count(Pushed::Failed)));
        }
        print(&format!("{text}\n"));
    }
    const AGAIN: &str = "run `cuda-agent push` again: it continues where it stopped";
    match (refused, troubles.into_iter().next()) {
        (Some(error), _) => {
            Err(CliError::environment(error.to_string()).with_hint(project::after_mending(&error, AGAIN)))
        }
        (None, Some(trouble)) => Err(CliError::environment(trouble).with_hint(AGAIN)),
        (None, None) => Ok(Exit::Done),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pushed {
    Now,
    Before,
    Gone,
    /// It is on this machine only, as before.
    Failed,
}

async fn push_one(store: &Store, nearby: &Store, key: Digest) -> Result<Pushed, CliError> {
    let (_, Some(ours)) = nearby.newest(&key).await? else { return Ok(Pushed::Gone) };
    let (generation, Some(record)) = store.newest(&key).await? else { return Ok(Pushed::Gone) };
    let there = record.nonce != ours.nonce || store.is_shared(record.id(), generation);
    let made = record.nonce.clone();
    let shared = store.offer(record, generation).await?;
    if store.unshared().contains_key(&key) {
        return Ok(Pushed::Failed);
    }
    Ok(if there || shared.nonce != made { Pushed::Before } else { Pushed::Now })
}

/// What the newest run of the pipeline found or made, or all runs; with their manifests.
async fn of_runs(
    project: &Project,
    nearby: &Store,
    all: bool,
) -> Result<(BTreeSet<Digest>, Vec<RunManifest>), CliError> {
    let name = match (all, project.default_pipeline()) {
        (false, Ok(file)) => Some(project.pipeline(&file)?.name),
        _ => None,
    };
    let (mut keys, mut runs) = (BTreeSet::new(), Vec::new());
    for id in nearby.runs().await? {
        let Ok(Some(run)) = nearby.run(&id).await else { continue };
        if name.as_ref().is_some_and(|name| *name != run.pipeline) {
            continue;
        }
        let made = run.stages.values().filter(|entry| entry.outcome.has_result());
        keys.extend(made.filter_map(|entry| entry.key));
        runs.push(run);
        if !all {
            break;
        }
    }
    if runs.is_empty() {
        return Err(
            CliError::usage("no run on this machine has made anything to push").with_hint("`cuda-agent run` first")
        );
    }
    Ok((keys, runs))
}

/// Copies results to this machine, so that `run --offline` finds them.
pub async fn pull(project: &Project, options: PullOptions) -> Result<Exit, CliError> {
    let store = project.store()?;
    require_remote(&store)?;
    let mut records: BTreeMap<String, Record> = BTreeMap::new();
    let mut absent = Vec::new();
    let (tags, stages): (Vec<&String>, Vec<&String>) = options.what.iter().partition(|what| split_tag(what).is_some());
    for tag in tags {
        let key = find(project, &store, tag).await?.key;
        if let Some((_, record)) = store.record(&key).await? {
            records.insert(tag.clone(), record);
        }
    }
    if options.what.is_empty() || !stages.is_empty() {
        for (stage, record) in planned(project, &stages).await? {
            match record {
                Some(record) => drop(records.insert(stage, record)),
                None => absent.push(stage),
            }
        }
    }
    let total = records.len();
    let pulling = records.into_iter().map(|(what, record)| {
        let store = &store;
        async move {
            let lost = store.pull(&record).await?.is_some();
            if lost {
                // The next run looks at it again instead of trusting what is known of it.
                store.distrust(&record.key).await?;
            }
            Ok::<_, CliError>(lost.then_some(what))
        }
    });
    let lost: Vec<_> = futures::stream::iter(pulling).buffer_unordered(RESULTS).try_collect().await?;
    let lost: Vec<String> = lost.into_iter().flatten().collect();
    store.write_known();
    let (objects, bytes) = store.traffic().received;
    if project.common.json {
        print_json(&json!({
            "store": store.url(), "results": total, "lost": lost, "absent": absent, "objects": objects, "bytes": bytes,
        }));
    } else {
        print(&format!(
            "{} results pulled from {} ({objects} objects, {})\n",
            total - lost.len(),
            store.url(),
            schedule::bytes(bytes)
        ));
        if !absent.is_empty() {
            print(&format!("not there: {}\n", absent.join(", ")));
        }
    }
    if !lost.is_empty() {
        return Err(CliError::environment(format!("missing or damaged in {}: {}", store.url(), lost.join(", ")))
            .with_hint("`cuda-agent run` makes them again"));
    }
    project.evict(&store).await?;
    Ok(Exit::Done)
}

/// What a run of the pipeline would find, by stage; `None` for what it would have to make.
async fn planned(project: &Project, stages: &[&String]) -> Result<Vec<(String, Option<Record>)>, CliError> {
    let pipeline = project.pipeline(&project.default_pipeline()?)?;
    let graph = Graph::new(&pipeline);
    let patterns: Vec<String> = stages.iter().map(|stage| (*stage).clone()).collect();
    let selected = graph.select(&pipeline, &patterns)?;
    let plans = plans(project, &pipeline, &graph, &selected, &BTreeSet::new()).await?;
    let found = plans.into_iter().enumerate().filter_map(|(index, plan)| {
        let name = &pipeline.stages[index].name;
        let asked =
            stages.is_empty() || stages.iter().any(|stage| *stage == name || **stage == pipeline.stages[index].base);
        let plan = plan.filter(|_| asked)?;
        Some((
            name.clone(),
            match plan {
                StagePlan { verdict: Verdict::Hit { record, .. }, .. } => Some(*record),
                _ => None,
            },
        ))
    });
    Ok(found.collect())
}

fn require_remote(store: &Store) -> Result<(), CliError> {
    if store.is_offline() {
        return Err(CliError::usage("offline nothing is shared or fetched").with_hint("leave out --offline"));
    }
    match store.has_remote() {
        true => Ok(()),
        false => Err(CliError::usage(format!("{} is not shared", store.url()))
            .with_hint("name a shared store with --store s3://bucket/folder, or `store:` in cuda-agent.yaml")),
    }
}
