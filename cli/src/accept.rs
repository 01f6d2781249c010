//! `cuda-agent accept`: takes the result that a stage had for the one that it would make now, where what changed cannot
//! change it: a comment in a program, a parameter that only says more, a patch release of a library.
//!
//! Everything is looked at before anything is written. What an accepted stage hands on is known, so the stages after it
//! can be looked at in the same breath.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use clap::Args;
use cuda_agent_engine::artifact::table::TableInfo;
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::execute::publish::{check_columns, mark_measured};
use cuda_agent_engine::key::{InputIdentity, MissReason, Preimage, difference};
use cuda_agent_engine::plan::graph::Graph;
use cuda_agent_engine::plan::history::History;
use cuda_agent_engine::plan::{Outputs, Planner, Resolved, StagePlan, Verdict, base_key};
use cuda_agent_engine::rows::SegmentSchema;
use cuda_agent_engine::spec::{Pipeline, Stage};
use cuda_agent_engine::store::{
    Record, RowCounts, RunManifest, RunState, SegmentName, StageEntry, StageState, Store, StoreError,
};
use cuda_agent_protocol::Device;
use futures::{StreamExt, TryStreamExt};
use serde_json::{Value, json};

use crate::progress::because;
use crate::project::Project;
use crate::run::named_stages;
use crate::{CliError, Exit, print, print_json};

/// Segments that are copied at once.
const SIDE_BY_SIDE: usize = 8;

/// Options of `accept`.
#[derive(Args)]
pub struct Options {
    /// A pipeline file, then stages
    #[arg(value_name = "PIPELINE | STAGE")]
    targets: Vec<String>,
    /// Every stage that would run and has an earlier result
    #[arg(long)]
    all: bool,
    /// Say what would be accepted, and write nothing
    #[arg(long)]
    dry_run: bool,
}

/// Accepts earlier results.
pub async fn accept(project: &Project, options: Options) -> Result<Exit, CliError> {
    let (file, names) = project.targets(&options.targets)?;
    let pipeline = project.pipeline(&file)?;
    let wanted = wanted(&pipeline, &names, options.all)?;
    let graph = Graph::new(&pipeline);
    let selected = graph.ancestors(wanted.iter().copied());
    // What is not there cannot be accepted, so nothing is made for it.
    let (store, host) = (project.existing_store()?, project.host());
    let refresh = BTreeSet::new();
    let planner = Planner::new(&pipeline, &project.catalog, &store, &host, &project.folders, &refresh);
    if let Some(error) = CliError::all(planner.problems(&selected)) {
        return Err(error);
    }
    let hint = planner.begin().await?.clone();
    let history = History::load(&store.nearby(), &pipeline.name).await?.or_hint(hint);
    let standing = pipeline.stages.iter().map(|_| Standing::Open).collect();
    let mut review =
        Review { planner: &planner, graph: &graph, history, wanted, all: options.all, standing, left: Vec::new() };
    let order: Vec<usize> = graph.order().iter().copied().filter(|stage| selected[*stage]).collect();
    for stage in &order {
        review.look(*stage).await?;
    }
    planner.save();
    let run = match options.dry_run || review.accepted(&order).next().is_none() {
        true => None,
        false => {
            project.require_writable(&store).await?;
            Some(file_under_new_keys(&store, &pipeline, &review, &order).await?)
        }
    };
    report(project, &pipeline, &review, &order, run.as_deref());
    project.require_shared(&store)?;
    Ok(Exit::Done)
}

fn wanted(pipeline: &Pipeline, names: &[String], all: bool) -> Result<BTreeSet<usize>, CliError> {
    match (names.is_empty(), all) {
        (false, true) => Err(CliError::usage("`--all` and names of stages exclude each other")),
        (true, true) => Ok((0..pipeline.stages.len()).collect()),
        (true, false) => Err(CliError::usage("name the stages whose results stand as they are")
            .with_hint("`cuda-agent plan` says which would run, and why; `--all` accepts every one it can")),
        (false, false) => named_stages(pipeline, names),
    }
}

/// How a stage stands.
enum Standing {
    /// Its result is in the store.
    Hit { key: Digest, outputs: Outputs },
    /// An earlier result is taken for it.
    Accepted(Box<Acceptance>),
    /// It would run, so that stages after it wait.
    Open,
}

impl Standing {
    fn outputs(&self) -> Option<&Outputs> {
        match self {
            Self::Hit { outputs, .. } => Some(outputs),
            Self::Accepted(acceptance) => Some(&acceptance.outputs),
            Self::Open => None,
        }
    }
}

/// An earlier result that is taken for one of now.
struct Acceptance {
    resolved: Resolved,
    /// The generation of a record that cannot be used, or 0.
    generation: u32,
    earlier: Record,
    /// The run that made it, and the parameters that had different values in it.
    run: String,
    other_params: BTreeMap<String, Value>,
    /// The earlier one's, as a stage of now would have recorded them.
    outputs: Outputs,
    /// What is set aside.
    reasons: Vec<MissReason>,
    /// For a by-row stage whose rows are filed elsewhere now.
    rows: Option<Rows>,
}

impl Acceptance {
    fn in_words(&self) -> String {
        let params: Vec<String> = self.other_params.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let params = match params.is_empty() {
            true => String::new(),
            false => format!(" with {}", params.join(", ")),
        };
        format!("as in run {}{params}, although {}", self.run, because(&self.reasons))
    }
}

/// Row results that are needed under another base key.
struct Rows {
    from: Digest,
    to: Digest,
    segments: Vec<SegmentName>,
}

/// Finds out what can be accepted.
struct Review<'a> {
    planner: &'a Planner<'a>,
    graph: &'a Graph,
    history: History,
    wanted: BTreeSet<usize>,
    all: bool,
    standing: Vec<Standing>,
    /// What `--all` cannot accept; the messages say why and name no stage.
    left: Vec<(usize, CliError)>,
}

impl Review<'_> {
    /// Looks at a stage whose producers were looked at.
    async fn look(&mut self, index: usize) -> Result<(), CliError> {
        let plan = self.planner.stage(index, |producer| self.standing[producer].outputs()).await?;
        let standing = match plan {
            StagePlan { resolved: Some(resolved), verdict: Verdict::Hit { record, .. } } => {
                self.refuse_what_is_up_to_date(index)?;
                Ok(Standing::Hit { key: resolved.key, outputs: record.outputs })
            }
            _ if !self.wanted.contains(&index) => Ok(Standing::Open),
            StagePlan { resolved: Some(resolved), verdict: Verdict::Miss { generation, .. } } => {
                let acceptance = self.consider(index, resolved, generation).await;
                acceptance.map(|acceptance| Standing::Accepted(Box::new(acceptance)))
            }
            _ => Err(self.waits(index)),
        };
        self.standing[index] = match standing {
            Ok(standing) => standing,
            Err(refusal) if self.all && refusal.exit == Exit::Usage => {
                self.left.push((index, refusal));
                Standing::Open
            }
            Err(refusal) if refusal.exit == Exit::Usage => {
                let message = format!("`{}` cannot be accepted: {}", self.stage(index).name, refusal.message);
                return Err(CliError { message, ..refusal });
            }
            Err(error) => return Err(error),
        };
        Ok(())
    }

    fn stage(&self, index: usize) -> &Stage {
        &self.planner.pipeline.stages[index]
    }

    fn accepted<'s>(&'s self, order: &'s [usize]) -> impl Iterator<Item = (usize, &'s Acceptance)> {
        order.iter().filter_map(|index| match &self.standing[*index] {
            Standing::Accepted(acceptance) => Some((*index, &**acceptance)),
            _ => None,
        })
    }

    /// A stage that was named though nothing is to be done for it. One that is up to date only because of what is
    /// accepted before it is no mistake: `plan` cannot have known.
    fn refuse_what_is_up_to_date(&self, index: usize) -> Result<(), CliError> {
        let above = self.graph.ancestors([index]);
        let follows =
            (0..above.len()).any(|other| above[other] && matches!(self.standing[other], Standing::Accepted(_)));
        if self.all || follows || !self.wanted.contains(&index) {
            return Ok(());
        }
        Err(CliError::usage(format!("`{}` is up to date already", self.stage(index).name))
            .with_hint("`cuda-agent plan` says which stages would run"))
    }

    fn waits(&self, index: usize) -> CliError {
        let above = self.graph.ancestors([index]);
        let order = self.graph.order().iter().copied();
        let open: Vec<usize> = order
            .filter(|other| above[*other] && *other != index && matches!(self.standing[*other], Standing::Open))
            .collect();
        let words = |stages: &[usize]| stages.iter().map(|stage| self.word(*stage)).collect::<Vec<_>>().join(" ");
        let names: Vec<String> = open.iter().map(|stage| format!("`{}`", self.stage(*stage).name)).collect();
        let mut together = open.clone();
        together.push(index);
        CliError::usage(format!("it waits for {}", names.join(", "))).with_hint(format!(
            "accept them together (`cuda-agent accept {}`), or `cuda-agent run {}` first",
            words(&together),
            words(&open)
        ))
    }

    /// A stage's name as a word of a shell's command.
    fn word(&self, index: usize) -> String {
        let name = &self.stage(index).name;
        if name.contains(['[', ' ', '*']) { format!("'{name}'") } else { name.clone() }
    }

    /// Whether an earlier result can be taken for what a stage would make.
    async fn consider(&self, index: usize, resolved: Resolved, generation: u32) -> Result<Acceptance, CliError> {
        let stage = self.stage(index);
        let refuse =
            |why: String| CliError::usage(why).with_hint(format!("`cuda-agent run {}` makes it", self.word(index)));
        let Some((run, earlier)) = self.nearest(stage, &resolved.preimage).await? else {
            return Err(refuse("it has no earlier result".into()));
        };
        let reasons = difference(&earlier.preimage, &resolved.preimage, &self.planner.producers(stage));
        if let Some(why) = other_kind_or_device(&earlier.preimage, &resolved.preimage) {
            return Err(refuse(why));
        }
        let failed = earlier.rows.map_or(0, |rows| rows.failed);
        if failed > stage.allow_failed_rows {
            return Err(refuse(format!("{failed} rows of its result of run {run} had failed")));
        }
        let outputs = as_declared(stage, &earlier).map_err(&refuse)?;
        for (port, artifact) in &outputs {
            if self.planner.store.missing_blob(artifact).await?.is_some() {
                return Err(refuse(format!("output `{port}` of run {run} is gone from the store, or damaged")));
            }
        }
        let rows = self.rows(stage, &resolved, &earlier).await?.map_err(&refuse)?;
        let other_params = self.other_params(&run);
        Ok(Acceptance { resolved, generation, earlier, run, other_params, outputs, reasons, rows })
    }

    /// The earlier result that differs least: of a run with the same parameters, if there is one, and of several the
    /// newest. The newest alone might have been made with other parameters, which a changed command would not tell.
    async fn nearest(&self, stage: &Stage, now: &Preimage) -> Result<Option<(String, Record)>, CliError> {
        let mut records: BTreeMap<Digest, Option<Record>> = BTreeMap::new();
        let mut nearest: Option<((bool, usize, usize), &str, Digest)> = None;
        for (run, key) in self.history.results(&stage.name) {
            if let Entry::Vacant(unread) = records.entry(key) {
                unread.insert(self.planner.store.record(&key).await?.map(|(_, record)| record));
            }
            let Some(record) = &records[&key] else { continue };
            let reasons = difference(&record.preimage, now, &BTreeMap::new()).len();
            let distance = (record.kind != now.kind, self.other_params(run).len(), reasons);
            if nearest.is_none_or(|(least, ..)| distance < least) {
                nearest = Some((distance, run, key));
            }
        }
        let taken = nearest.and_then(|(_, run, key)| Some((run.to_owned(), records.remove(&key)??)));
        Ok(taken)
    }

    /// Parameters of the pipeline that were others in a run, as they were then.
    fn other_params(&self, run: &str) -> BTreeMap<String, Value> {
        let Some(then) = self.history.params(run) else { return BTreeMap::new() };
        let now = &self.planner.pipeline.params;
        let names: BTreeSet<&String> = then.keys().chain(now.keys()).collect();
        let differ = names.into_iter().filter(|name| then.get(*name) != now.get(*name));
        differ.map(|name| (name.clone(), then.get(name).cloned().unwrap_or_default())).collect()
    }

    /// The row results that have to come along, `None` where they are in their place; or why they would not be found.
    async fn rows(
        &self,
        stage: &Stage,
        resolved: &Resolved,
        earlier: &Record,
    ) -> Result<Result<Option<Rows>, String>, CliError> {
        let (Some(by_row), Some(to)) = (&stage.kind.by_row, resolved.base) else { return Ok(Ok(None)) };
        let Some(counts) = earlier.rows else { return Ok(Err("it was not made by row".into())) };
        // Under the columns that it reads now. Had it read others, its rows would have other digests, and this base key
        // would be nobody's.
        let from = base_key(&stage.kind, &earlier.preimage).expect("a by-row kind has base keys");
        if from == to {
            return Ok(Ok(None));
        }
        let store = self.planner.store;
        let segments = store.segments(&from).await?;
        if segments.is_empty() && counts.executed + counts.reused > 0 {
            let columns = &stage.kind.inputs[&by_row.port].columns;
            let columns: Vec<String> = columns.iter().map(|(name, column)| format!("{name}: {column}")).collect();
            return Ok(Err(format!(
                "there are no row results for the columns that it reads now ({}): it read others, or they are gone",
                columns.join(", ")
            )));
        }
        // All segments of a base key have the columns of one program.
        for segment in &segments {
            let Some(bytes) = store.segment(&from, segment).await? else { continue };
            return Ok(match SegmentSchema::new(&stage.kind).fits(bytes) {
                Ok(true) => Ok(Some(Rows { from, to, segments })),
                Ok(false) => Err("the columns of its outputs changed, so its row results do not fit".into()),
                Err(error) => Err(error.to_string()),
            });
        }
        Ok(Ok(None))
    }
}

/// Two kinds never share results, and what was measured belongs to its device; a driver is a version like others.
fn other_kind_or_device(earlier: &Preimage, now: &Preimage) -> Option<String> {
    if earlier.kind != now.kind {
        return Some(format!("it was of another kind ({})", earlier.kind));
    }
    let model = |device: &Option<Device>| match device {
        None => "no device".to_owned(),
        Some(Device::Cpu { model }) => format!("the CPU {model}"),
        Some(Device::Cuda { model, .. }) => format!("the GPU {model}"),
    };
    let (before, after) = (model(&earlier.device), model(&now.device));
    (before != after).then(|| format!("it was measured on {before}, and here is {after}"))
}

/// An earlier result's outputs, or why they are not what the stage declares now.
fn as_declared(stage: &Stage, earlier: &Record) -> Result<Outputs, String> {
    let declared = &stage.kind.outputs;
    if let Some(port) = declared.keys().find(|port| !earlier.outputs.contains_key(*port)) {
        return Err(format!("its earlier result has no output `{port}`"));
    }
    let mut outputs = earlier.outputs.clone();
    for (port, artifact) in &mut outputs {
        let Some(declared) = declared.get(port) else {
            return Err(format!("output `{port}` of its earlier result is not declared any more"));
        };
        if artifact.port_type != declared.port_type {
            return Err(format!("output `{port}` was {}, and is {} now", artifact.port_type, declared.port_type));
        }
        if let Some(rows) = artifact.rows {
            // A by-row table has its input's columns first, and those are no business of the kind's.
            let inherited = inherited(stage, &earlier.preimage);
            let mut columns = artifact.columns.clone();
            columns.retain(|column| !inherited.contains(&column.name));
            let info = TableInfo { digest: artifact.digest, rows, columns };
            check_columns(declared, true, &info).map_err(|error| format!("output `{port}`: {error}"))?;
            mark_measured(declared, &mut artifact.columns);
        }
    }
    Ok(outputs)
}

fn inherited<'a>(stage: &Stage, preimage: &'a Preimage) -> BTreeSet<&'a String> {
    let port = stage.kind.by_row.as_ref().and_then(|by_row| preimage.inputs.get(&by_row.port));
    match port {
        Some(InputIdentity::Table { columns, .. }) => columns.keys().collect(),
        _ => BTreeSet::new(),
    }
}

/// Writes what was accepted, and the run that says so; its id.
async fn file_under_new_keys(
    store: &Store,
    pipeline: &Pipeline,
    review: &Review<'_>,
    order: &[usize],
) -> Result<String, CliError> {
    let mut manifest = RunManifest {
        schema: 1,
        run: cuda_agent_engine::run_id(),
        pipeline: pipeline.name.clone(),
        started_at: cuda_agent_engine::now(),
        heartbeat_at: cuda_agent_engine::now(),
        ended_at: None,
        outcome: RunState::Running,
        params: pipeline.params.clone(),
        stages: BTreeMap::new(),
    };
    for index in order {
        // Until the new record is there, the earlier key holds on to the blobs.
        let (key, outcome) = match &review.standing[*index] {
            Standing::Hit { key, .. } => (Some(*key), StageState::Hit),
            Standing::Accepted(acceptance) => (Some(acceptance.earlier.key), StageState::Waiting),
            Standing::Open => (None, StageState::Waiting),
        };
        enter(&mut manifest, &pipeline.stages[*index], key, None, outcome, None);
    }
    store.put_run(&manifest).await?;
    let mut outcome = Ok(());
    for (index, acceptance) in review.accepted(order) {
        let stage = &pipeline.stages[index];
        outcome = commit(store, &manifest.run, stage, acceptance).await;
        if outcome.is_err() {
            break;
        }
        let set_aside = Some(because(&acceptance.reasons));
        enter(
            &mut manifest,
            stage,
            Some(acceptance.resolved.key),
            acceptance.resolved.base,
            StageState::Accepted,
            set_aside,
        );
        manifest.heartbeat_at = cuda_agent_engine::now();
        store.put_run(&manifest).await?;
    }
    manifest.heartbeat_at = cuda_agent_engine::now();
    manifest.ended_at = Some(manifest.heartbeat_at);
    manifest.outcome = if outcome.is_ok() { RunState::Accepted } else { RunState::Failed };
    store.put_run(&manifest).await?;
    outcome.map(|()| manifest.run)
}

fn enter(
    manifest: &mut RunManifest,
    stage: &Stage,
    key: Option<Digest>,
    base: Option<Digest>,
    outcome: StageState,
    message: Option<String>,
) {
    let place = manifest.stages.get(&stage.name).map_or(Some(manifest.stages.len() as u32), |entry| entry.place);
    let entry = StageEntry { key, base, outcome, message, place, ..StageEntry::default() };
    manifest.stages.insert(stage.name.clone(), entry);
}

/// Row results first, then the record: whoever sees that finds its rows.
async fn commit(store: &Store, run: &str, stage: &Stage, acceptance: &Acceptance) -> Result<(), CliError> {
    if let Some(rows) = &acceptance.rows {
        bring_along(store, rows).await?;
    }
    let earlier = &acceptance.earlier;
    let record = Record {
        schema: 1,
        key: acceptance.resolved.key,
        kind: earlier.kind.clone(),
        nonce: cuda_agent_engine::nonce(),
        preimage: acceptance.resolved.preimage.clone(),
        base: acceptance.resolved.base,
        outputs: acceptance.outputs.clone(),
        created_at: cuda_agent_engine::now(),
        run: run.to_owned(),
        accepted_from: Some(earlier.key),
        interpreter: earlier.interpreter.clone(),
        duration_s: earlier.duration_s,
        rows: earlier.rows.filter(|_| stage.kind.by_row.is_some()).map(|rows| RowCounts {
            executed: 0,
            reused: rows.executed + rows.reused,
            ..rows
        }),
        metrics: earlier.metrics.clone(),
    };
    let committed = store.commit(record, acceptance.generation).await?;
    match committed.ours {
        true => Ok(()),
        false => {
            Err(CliError::environment(format!("run {} has made `{}` meanwhile", committed.record.run, stage.name))
                .with_hint("its result counts; `cuda-agent plan` says what is left"))
        }
    }
}

async fn bring_along(store: &Store, rows: &Rows) -> Result<(), StoreError> {
    let there = store.segments(&rows.to).await?;
    let missing = rows.segments.iter().filter(|segment| !there.contains(segment));
    let copies = futures::stream::iter(missing).map(|segment| async move {
        // One that is gone or damaged costs its rows, which are then done again.
        if let Some(bytes) = store.segment(&rows.from, segment).await? {
            store.put_segment(&rows.to, segment.epoch, bytes).await?;
        }
        Ok(())
    });
    copies.buffer_unordered(SIDE_BY_SIDE).try_collect().await
}

fn report(project: &Project, pipeline: &Pipeline, review: &Review<'_>, order: &[usize], run: Option<&str>) {
    let named = |index: &usize| review.wanted.contains(index) && !review.all;
    let hits: Vec<usize> = order
        .iter()
        .copied()
        .filter(|index| named(index) && matches!(review.standing[*index], Standing::Hit { .. }))
        .collect();
    if project.common.json {
        let name = |index: usize| pipeline.stages[index].name.as_str();
        let accepted = review.accepted(order).map(|(index, acceptance)| as_json(name(index), acceptance));
        let left = review
            .left
            .iter()
            .map(|(index, refusal)| json!({ "stage": name(*index), "message": refusal.message, "hint": refusal.hint }));
        print_json(&json!({
            "run": run, "pipeline": pipeline.name, "accepted": accepted.collect::<Vec<_>>(),
            "up_to_date": hits.into_iter().map(name).collect::<Vec<_>>(), "left": left.collect::<Vec<_>>(),
        }));
        return;
    }
    print(&in_words(pipeline, review, order, &hits, run));
}

fn as_json(stage: &str, acceptance: &Acceptance) -> Value {
    json!({
        "stage": stage, "key": acceptance.resolved.key, "accepted_from": acceptance.earlier.key, "from_run": acceptance.run,
        "other_params": acceptance.other_params,
        "reasons": acceptance.reasons, "outputs": acceptance.outputs,
        "row_segments": acceptance.rows.as_ref().map(|rows| rows.segments.len()),
    })
}

fn in_words(pipeline: &Pipeline, review: &Review<'_>, order: &[usize], hits: &[usize], run: Option<&str>) -> String {
    let mut lines: BTreeMap<usize, (&str, String)> = BTreeMap::new();
    for (index, acceptance) in review.accepted(order) {
        lines.insert(index, ("accepted", acceptance.in_words()));
    }
    lines.extend(hits.iter().map(|index| (*index, ("hit", "given what is accepted before it".to_owned()))));
    lines.extend(review.left.iter().map(|(index, refusal)| (*index, ("left", refusal.message.clone()))));
    let width = lines.keys().map(|index| pipeline.stages[*index].name.len()).max().unwrap_or(0).min(40);
    let mut text = String::new();
    for index in order {
        let Some((word, why)) = lines.get(index) else { continue };
        text.push_str(&format!("{:<width$}  {word:<8}  {why}\n", pipeline.stages[*index].name));
    }
    if !text.is_empty() {
        text.push('\n');
    }
    match (review.accepted(order).count(), run) {
        (0, _) => text.push_str("nothing to accept\n"),
        (count, Some(run)) => text.push_str(&format!("{count} accepted, in run {run}\n")),
        (count, None) => text.push_str(&format!("{count} would be accepted\n")),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_agent_engine::key::ProgramIdentity;

    fn preimage(kind: &str, device: Option<Device>) -> Preimage {
        Preimage {
            schema: cuda_agent_engine::key::SCHEMA,
            kind: kind.into(),
            program: ProgramIdentity::Version("1.0.0".into()),
            executable: Default::default(),
            params: BTreeMap::new(),
            inputs: BTreeMap::new(),
            outputs: None,
            env: BTreeMap::new(),
            secrets: Vec::new(),
            toolchain: BTreeMap::new(),
            device,
            rows_of: None,
        }
    }

    #[test]
    fn what_was_measured_belongs_to_its_device() {
        let cpu = |model: &str| Some(Device::Cpu { model: model.into() });
        let gpu = |model: &str, driver: &str| Some(Device::Cuda { model: model.into(), driver: driver.into() });
        let why = |before: Option<Device>, after: Option<Device>| {
            other_kind_or_device(&preimage("k", before), &preimage("k", after))
        };
        assert_eq!(why(None, None), None);
        assert_eq!(why(cpu("X"), cpu("X")), None);
        assert_eq!(why(gpu("G", "1"), gpu("G", "2")), None, "a driver is a version like others");
        let told = why(cpu("X"), gpu("G", "1")).unwrap();
        assert_eq!(told, "it was measured on the CPU X, and here is the GPU G");
        assert!(why(cpu("X"), cpu("Y")).is_some() && why(gpu("G", "1"), gpu("H", "1")).is_some());
        assert!(why(None, cpu("X")).is_some(), "nobody knows what it was made on");
    }

    #[test]
    fn kinds_share_nothing() {
        let told = other_kind_or_device(&preimage("a", None), &preimage("b", None)).unwrap();
        assert_eq!(told, "it was of another kind (a)");
    }
}
