//! What a run would do: for each stage hit, miss with its reasons, or pending. `run` uses the same code, so the two
//! cannot disagree.

pub mod graph;
pub mod history;
pub mod inputs;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::PathBuf;

use cuda_agent_protocol::Manifest;
use cuda_agent_protocol::manifest::Determinism;
use serde_json::{Value, json};

use crate::Folders;
use crate::artifact::{Artifact, ArtifactError};
use crate::catalog::{self, Catalog};
use crate::digest::Digest;
use crate::host::{Host, ToolchainError};
use crate::interpreter::{self, Interpreter};
use crate::key::{self, InputIdentity, MissReason, Preimage, ProgramIdentity};
use crate::rows::index::RowError;
use crate::spec::{Command, Pipeline, Source, Stage};
use crate::store::ahead::Look;
use crate::store::{CONCURRENT, Hint, Record, RowCounts, Store, StoreError};
use history::History;
use inputs::{FileCache, Hurry, Input};

/// From so many stages on, looking them up is shared among threads.
const WORTH_THREADS: usize = 64;

/// Outputs of a stage by port, once they are known.
pub type Outputs = BTreeMap<String, Artifact>;

/// Why a stage cannot be planned at all.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// An input from outside.
    #[error("{location}: stage `{stage}`, input `{port}`: {message}")]
    Input {
        /// `file:line:column` of the stage.
        location: String,
        /// The stage.
        stage: String,
        /// The port.
        port: String,
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },
    /// What the program stands on.
    #[error("stage `{stage}`: {error}")]
    Toolchain {
        /// The stage.
        stage: String,
        /// What is wrong.
        error: ToolchainError,
    },
    /// A file of the program.
    #[error("{location}: stage `{stage}`: {error}")]
    Program {
        /// `file:line:column` of the stage.
        location: String,
        /// The stage.
        stage: String,
        /// What is wrong.
        error: ArtifactError,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Rows in the store.
    #[error(transparent)]
    Rows(#[from] RowError),
}

impl PlanError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Input { hint, .. } => Some(hint.clone()).filter(|hint| !hint.is_empty()),
            Self::Toolchain { error: ToolchainError::NoPython { .. }, .. } => {
                Some("`make venv` makes .venv; or name an interpreter with `python:` in cuda-agent.yaml or CUDA_AGENT_PYTHON".into())
            }
            Self::Toolchain { error: ToolchainError::NoPackage { package, .. }, .. } => {
                Some(format!(
                    "`make venv` makes .venv with all packages; or install it (`pip install {package}`), or name another \
                     interpreter with `python:` in cuda-agent.yaml or CUDA_AGENT_PYTHON"
                ))
            }
            Self::Store(error) => error.hint.clone(),
            _ => None,
        }
    }

    /// Whether the pipeline file is at fault (and not the machine).
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Input { .. } | Self::Program { .. })
    }
}

/// A stage whose inputs are known.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// Its key.
    pub key: Digest,
    /// For by-row stages: what row results are filed under.
    pub base: Option<Digest>,
    /// Everything that counted.
    pub preimage: Preimage,
    /// By port.
    pub inputs: BTreeMap<String, Vec<Input>>,
}

/// What a run would do with a stage.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Nothing.
    Hit {
        /// What is in the store.
        record: Box<Record>,
        /// Its generation.
        generation: u32,
    },
    /// Execute it.
    Miss {
        /// Why.
        reasons: Vec<MissReason>,
        /// The generation of a record that cannot be used, or 0.
        generation: u32,
    },
    /// Execute it where an input changes.
    Pending {
        /// Stages that have to run first.
        waits: Vec<usize>,
    },
}

/// A stage in a plan.
#[derive(Clone, Debug)]
pub struct StagePlan {
    /// Known where the inputs are.
    pub resolved: Option<Resolved>,
    /// What would be done.
    pub verdict: Verdict,
}

/// A stage that the store has, as a run needs it: what a plan holds besides is as large as the pipeline.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its key.
    pub key: Digest,
    /// For by-row stages: what row results are filed under.
    pub base: Option<Digest>,
    /// For by-row stages: how its rows were come by.
    pub rows: Option<RowCounts>,
    /// What it made.
    pub outputs: Outputs,
    /// Whether others have it too, or need not.
    pub is_shared: bool,
}

/// What is kept of a hit while others are looked up.
pub trait Hit: Sized + Send + Sync {
    /// `None` where it is no hit.
    fn of(plan: StagePlan, store: &Store) -> Option<Self>;
    /// What it made.
    fn made(&self) -> Option<&Outputs>;
}

impl Hit for StagePlan {
    fn of(plan: StagePlan, _: &Store) -> Option<Self> {
        matches!(plan.verdict, Verdict::Hit { .. }).then_some(plan)
    }

    fn made(&self) -> Option<&Outputs> {
        self.outputs()
    }
}

impl Hit for Found {
    fn of(plan: StagePlan, store: &Store) -> Option<Self> {
        let StagePlan { resolved: Some(resolved), verdict: Verdict::Hit { record, generation } } = plan else {
            return None;
        };
        let is_shared = store.is_shared(&record, generation);
        let (key, base, rows) = (resolved.key, resolved.base, record.rows);
        Some(Self { key, base, rows, outputs: record.outputs, is_shared })
    }

    fn made(&self) -> Option<&Outputs> {
        Some(&self.outputs)
    }
}

impl StagePlan {
    /// What a hit made.
    pub fn outputs(&self) -> Option<&Outputs> {
        match &self.verdict {
            Verdict::Hit { record, .. } => Some(&record.outputs),
            _ => None,
        }
    }
}

/// The stages that feed a stage.
pub fn producers(stage: &Stage) -> Vec<usize> {
    #[cfg(test)]
    tests::WIRES_READ.with(|count| count.set(count.get() + 1));
    let sources = stage.inputs.values().flatten();
    sources
        .filter_map(|source| match source {
            Source::Stage { stage, .. } => Some(*stage),
            _ => None,
        })
        .collect()
}

/// Everything that planning looks at.
pub struct Planner<'a> {
    /// What is planned.
    pub pipeline: &'a Pipeline,
    /// The kinds.
    pub catalog: &'a Catalog,
    /// Where results are.
    pub store: &'a Store,
    /// The machine that will run it.
    pub host: &'a Host,
    /// Local folders.
    pub folders: &'a Folders,
    /// Stages to run whatever the store has.
    pub refresh: &'a BTreeSet<usize>,
    files: FileCache,
    history: tokio::sync::OnceCell<History>,
    hint: tokio::sync::OnceCell<Hint>,
}

impl<'a> Planner<'a> {
    /// A planner.
    pub fn new(
        pipeline: &'a Pipeline,
        catalog: &'a Catalog,
        store: &'a Store,
        host: &'a Host,
        folders: &'a Folders,
        refresh: &'a BTreeSet<usize>,
    ) -> Self {
        let files = FileCache::load(&folders.cache.join("files.json"));
        Self {
            pipeline,
            catalog,
            store,
            host,
            folders,
            refresh,
            files,
            history: Default::default(),
            hint: Default::default(),
        }
    }

    /// Plans the selected stages, producers first.
    pub async fn plan(&self, order: &[usize], selected: &[bool]) -> Result<Vec<Option<StagePlan>>, PlanError> {
        self.begin().await?;
        let mut found: HashMap<usize, StagePlan> = self.hits(order, selected, &|| false).await?;
        let mut plans: Vec<Option<StagePlan>> = self.pipeline.stages.iter().map(|_| None).collect();
        for &stage in order.iter().filter(|stage| selected[**stage]) {
            if let Some(hit) = found.remove(&stage) {
                plans[stage] = Some(hit);
                continue;
            }
            let known = |producer: usize| match &plans[producer] {
                Some(plan) => plan.outputs(),
                None => None,
            };
            let plan = self.stage(stage, known).await?;
            plans[stage] = Some(plan);
        }
        self.files.save();
        Ok(plans)
    }

    /// Catches up with a store that is shared: what was replaced, and what the last run like this one found, which is
    /// fetched at once instead of stage by stage.
    pub async fn begin(&self) -> Result<&Hint, StoreError> {
        let begun = self.hint.get_or_try_init(|| async {
            let hint = self.store.begin(&self.pipeline.name, &self.params_digest()).await?;
            self.store.prefetch(hint.stages.values().copied().collect()).await?;
            Ok(hint)
        });
        begun.await
    }

    /// Leaves what this run found or made to the next one like it.
    pub async fn leave_hint(
        &self,
        run: &str,
        stages: impl Iterator<Item = (String, Digest)>,
    ) -> Result<(), StoreError> {
        let Some(hint) = self.hint.get() else { return Ok(()) };
        let known: HashSet<&String> = self.pipeline.stages.iter().map(|stage| &stage.name).collect();
        let mut all: BTreeMap<String, Digest> = hint.stages.clone();
        all.retain(|name, _| known.contains(name));
        all.extend(stages);
        if all == hint.stages {
            return Ok(());
        }
        self.store.put_hint(&self.pipeline.name, &self.params_digest(), &Hint { run: run.into(), stages: all }).await
    }

    fn params_digest(&self) -> Digest {
        let params = serde_json::to_value(&self.pipeline.params).expect("parameters are plain data");
        Digest::of_bytes(&key::canonical::to_bytes(&params))
    }

    /// What the store has already: a run that finds everything does little else. Whatever needs no far store is looked up
    /// on all cores, and the rest level by level, many at once. Stages that are not found, or cannot be planned, are left
    /// to whoever looks at them one by one, and so is everything once `is_halted` says so.
    pub async fn hits<H: Hit>(
        &self,
        order: &[usize],
        selected: &[bool],
        is_halted: &(dyn Fn() -> bool + Sync),
    ) -> Result<HashMap<usize, H>, PlanError> {
        let mut found: HashMap<usize, H> = HashMap::new();
        let is_far = self.store.far().is_some();
        let chosen: Vec<usize> = order.iter().copied().filter(|index| selected[*index]).collect();
        let _end = self.store.ahead().map(|ahead| ahead.ends_with_this());
        if self.store.folder().is_none() || (!is_far && chosen.len() < WORTH_THREADS) {
            return Ok(found);
        }
        let trusted = self.store.trusted();
        let mut levels = Levels::new(self.pipeline, &chosen);
        let mut ready = levels.first(&chosen);
        let mut missed = Vec::new();
        while !ready.is_empty() && !is_halted() {
            let hits = self.hits_on_threads(&trusted, &ready, &found, is_halted);
            let next = levels.after(hits.iter().map(|(stage, _)| *stage));
            found.extend(hits);
            missed.extend(ready.into_iter().filter(|stage| !found.contains_key(stage)));
            ready = next;
        }
        let mut ready = if is_far { missed } else { Vec::new() };
        while !ready.is_empty() && !is_halted() {
            let hits = self.hits_at_once(ready, &found).await;
            ready = levels.after(hits.iter().map(|(stage, _)| *stage));
            found.extend(hits);
        }
        Ok(found)
    }

    fn hits_on_threads<H: Hit>(
        &self,
        store: &Store,
        ready: &[usize],
        found: &HashMap<usize, H>,
        is_halted: &(dyn Fn() -> bool + Sync),
    ) -> Vec<(usize, H)> {
        let look = |index: &usize| {
            if is_halted() {
                return None;
            }
            let plan = self.stage_in(store, *index, |producer| found.get(&producer).and_then(H::made));
            let plan = futures::executor::block_on(plan).ok()?;
            Some((*index, H::of(plan, self.store)?))
        };
        if ready.len() < WORTH_THREADS {
            return ready.iter().filter_map(look).collect();
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        std::thread::scope(|scope| {
            let parts = ready.chunks(ready.len().div_ceil(threads));
            let threads: Vec<_> =
                parts.map(|part| scope.spawn(move || part.iter().filter_map(look).collect::<Vec<_>>())).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("looking up does not panic")).collect()
        })
    }

    async fn hits_at_once<H: Hit>(&self, ready: Vec<usize>, found: &HashMap<usize, H>) -> Vec<(usize, H)> {
        let looks = ready.into_iter().map(|index| async move {
            let plan = self.stage(index, |producer| found.get(&producer).and_then(H::made)).await.ok()?;
            Some((index, H::of(plan, self.store)?))
        });
        use futures::StreamExt;
        futures::stream::iter(looks).buffer_unordered(CONCURRENT).filter_map(std::future::ready).collect().await
    }

    /// Keeps what was learned of files outside.
    pub fn save(&self) {
        self.files.save();
    }

    /// Files outside that are being read at this moment, with bytes done and bytes in all.
    pub fn reading(&self) -> Vec<(PathBuf, u64, u64)> {
        self.files.reading()
    }

    /// What can be told before anything starts: files that are not there, and a toolchain that is not.
    pub fn problems(&self, selected: &[bool]) -> Vec<PlanError> {
        let stages = self.pipeline.stages.iter().zip(selected).filter(|(_, chosen)| **chosen);
        let (mut problems, mut lacks) = (Vec::new(), Lacks::default());
        for (stage, _) in stages {
            for (port, source) in stage.inputs.iter().flat_map(|(port, all)| all.iter().map(move |one| (port, one))) {
                if let Source::Path(path) = source
                    && let Some(problem) = inputs::unusable(path)
                {
                    problems.push(Self::input_error(stage, port, &problem));
                }
            }
            if let Err(error) = self.host.toolchain(&stage.kind) {
                lacks.add(stage, error);
            }
            if stage.command.is_some()
                && let Err(error) = self.command_files(stage)
            {
                let (location, stage) = (stage.location.to_string(), stage.name.clone());
                problems.push(PlanError::Program { location, stage, error });
            }
        }
        problems.extend(lacks.told());
        problems
    }

    /// `message` may go on with `; ` and a hint.
    fn input_error(stage: &Stage, port: &str, message: &str) -> PlanError {
        let (message, hint) = message.split_once("; ").unwrap_or((message, ""));
        PlanError::Input {
            location: stage.location.to_string(),
            stage: stage.name.clone(),
            port: port.to_owned(),
            message: message.to_owned(),
            hint: hint.to_owned(),
        }
    }

    /// Plans one stage; `known` tells the outputs of stages that are done.
    pub async fn stage<'k>(
        &self,
        index: usize,
        known: impl Fn(usize) -> Option<&'k Outputs>,
    ) -> Result<StagePlan, PlanError> {
        self.stage_in(self.store, index, known).await
    }

    /// Plans one stage by what is on this machine alone.
    pub async fn stage_nearby<'k>(
        &self,
        index: usize,
        known: impl Fn(usize) -> Option<&'k Outputs>,
    ) -> Result<StagePlan, PlanError> {
        self.stage_in(&self.store.nearby(), index, known).await
    }

    async fn stage_in<'k>(
        &self,
        store: &Store,
        index: usize,
        known: impl Fn(usize) -> Option<&'k Outputs>,
    ) -> Result<StagePlan, PlanError> {
        let stage = &self.pipeline.stages[index];
        let sources = stage.inputs.values().flatten();
        let mut waits: Vec<usize> = sources
            .filter_map(|source| match source {
                Source::Stage { stage, .. } => known(*stage).is_none().then_some(*stage),
                _ => None,
            })
            .collect();
        waits.sort_unstable();
        waits.dedup();
        if !waits.is_empty() {
            return Ok(StagePlan { resolved: None, verdict: Verdict::Pending { waits } });
        }
        let resolved = self.resolve(store, stage, known).await?;
        let verdict = self.look_up(store, index, stage, &resolved).await?;
        Ok(StagePlan { resolved: Some(resolved), verdict })
    }

    /// Of a by-row stage: rows that a run would do, and distinct rows in all. `None` where the table is not at hand.
    pub async fn rows_to_do(&self, stage: &Stage, resolved: &Resolved) -> Result<Option<(u64, u64)>, PlanError> {
        let (Some(by_row), Some(base)) = (&stage.kind.by_row, resolved.base) else { return Ok(None) };
        let input = &resolved.inputs[&by_row.port][0];
        let stored = || Some(self.store.folder()?.join(crate::store::blob_name(&input.artifact.blob)));
        let Some(path) = input.outside.as_ref().map(|outside| outside.path.clone()).or_else(stored) else {
            return Ok(None);
        };
        let columns: Vec<String> = stage.kind.inputs[&by_row.port].columns.keys().cloned().collect();
        let Ok(digests) = crate::artifact::table::row_digests(&path, &columns) else { return Ok(None) };
        let cache = self.folders.cache.join("rows").join(base.to_string());
        let index = crate::rows::RowIndex::load(self.store, &base, &cache).await?;
        let distinct: BTreeSet<&Digest> = digests.iter().collect();
        let todo = distinct.iter().filter(|row| index.find(row).is_none()).count();
        Ok(Some((todo as u64, distinct.len() as u64)))
    }

    async fn look_up(
        &self,
        store: &Store,
        index: usize,
        stage: &Stage,
        resolved: &Resolved,
    ) -> Result<Verdict, PlanError> {
        let mut reasons = Vec::new();
        let Look { generation, record } = store.look(&resolved.key).await?;
        // A record of something else that lies under this key is damaged, or somebody's trick.
        if let Some((record, missing)) = record.filter(|(record, _)| record.preimage == resolved.preimage) {
            let rows = record.rows.unwrap_or_default();
            match missing {
                Some(output) => reasons.push(MissReason::BlobMissing { output }),
                // A stage may pass without them, but each run tries them again.
                None if rows.failed > 0 => reasons.push(MissReason::RowsFailed { count: rows.failed }),
                None if stage.max_rejected.is_some_and(|most| rows.rejected > most) => {
                    let most = stage.max_rejected.unwrap_or_default();
                    reasons.push(MissReason::RowsRejected { count: rows.rejected, most });
                }
                None if self.refresh.contains(&index) => {}
                None => return Ok(Verdict::Hit { record: Box::new(record), generation }),
            }
        }
        if self.refresh.contains(&index) {
            reasons.insert(0, MissReason::Refresh);
        }
        if reasons.is_empty() && !store.is_quick() {
            reasons = self.explain(stage, resolved).await?;
        }
        Ok(Verdict::Miss { reasons, generation })
    }

    /// Why there is no record: what changed since the stage's last one.
    async fn explain(&self, stage: &Stage, resolved: &Resolved) -> Result<Vec<MissReason>, PlanError> {
        let (history, producers) = (self.history().await?, self.producers(stage));
        Ok(history.explain(&self.store.nearby(), stage, &self.pipeline.params, resolved, &producers).await?)
    }

    /// Of a shared store, one's own runs tell more than those of others, and are local.
    async fn history(&self) -> Result<&History, PlanError> {
        let history = self.history.get_or_try_init(|| async {
            let hint = self.hint.get().cloned().unwrap_or_default();
            History::load(&self.store.nearby(), &self.pipeline.name).await.map(|history| history.or_hint(hint))
        });
        history.await.map_err(PlanError::from)
    }

    /// Whether a recent run of the pipeline found or made a result of a stage, whatever its key was.
    pub async fn has_result(&self, stage: &Stage) -> Result<bool, PlanError> {
        Ok(self.history().await?.results(&stage.name).next().is_some())
    }

    /// What feeds each port, in words.
    pub fn producers(&self, stage: &Stage) -> BTreeMap<String, String> {
        let named = |source: &Source| match source {
            Source::Stage { stage, output } => format!("{}.{output}", self.pipeline.stages[*stage].name),
            Source::Path(path) => path.display().to_string(),
            Source::Url { url, .. } => url.clone(),
            Source::Artifact { name, tag } => format!("{name}@{tag}"),
        };
        let ports = stage.inputs.iter();
        ports.map(|(port, sources)| (port.clone(), sources.iter().map(named).collect::<Vec<_>>().join(", "))).collect()
    }

    async fn resolve<'k>(
        &self,
        store: &Store,
        stage: &Stage,
        known: impl Fn(usize) -> Option<&'k Outputs>,
    ) -> Result<Resolved, PlanError> {
        let mut inputs = BTreeMap::new();
        for (port, sources) in &stage.inputs {
            let mut resolved = Vec::with_capacity(sources.len());
            for source in sources {
                let input = match source {
                    Source::Stage { stage: producer, output } => {
                        let outputs = known(*producer).expect("pending stages are not resolved");
                        outputs.get(output).cloned().map(Input::stored).ok_or_else(|| {
                            let name = &self.pipeline.stages[*producer].name;
                            format!(
                                "the record of `{name}` has no output `{output}`; run it again with --refresh {name}"
                            )
                        })
                    }
                    Source::Path(path) => {
                        let hurry = if store.is_quick() { Hurry::Yes } else { Hurry::No };
                        self.files.input(path, stage.kind.inputs[port].port_type, hurry).await
                    }
                    // These may need requests; whoever has time for them looks again.
                    Source::Url { .. } | Source::Artifact { .. } if store.is_quick() => Err("not near".to_owned()),
                    Source::Url { url, digest } => {
                        let port_type = stage.kind.inputs[port].port_type;
                        inputs::download(&self.files, url, digest, port_type, &self.folders.cache).await
                    }
                    Source::Artifact { name, tag } => inputs::tagged(self.store, name, tag).await,
                };
                let input = input.and_then(|input| self.fits(stage, port, input));
                resolved.push(input.map_err(|message| Self::input_error(stage, port, &message))?);
            }
            inputs.insert(port.clone(), resolved);
        }
        let preimage = self.preimage(stage, &inputs)?;
        Ok(Resolved { key: preimage.key(), base: base_key(&stage.kind, &preimage), preimage, inputs })
    }

    /// Whether a table has the columns that the port reads.
    fn fits(&self, stage: &Stage, port: &str, input: Input) -> Result<Input, String> {
        let declared = &stage.kind.inputs[port];
        // A command takes what a tag names, whatever that is: nobody can know before it is looked up.
        let open = stage.command.is_some() && matches!(stage.inputs[port][..], [Source::Artifact { .. }]);
        if !open && declared.port_type.is_table() != input.artifact.rows.is_some() {
            let is = if input.artifact.rows.is_some() { "a table" } else { "a file or folder, not a Parquet table" };
            return Err(format!("expected {}, but this is {is}", declared.port_type));
        }
        for (name, column) in &declared.columns {
            match input.artifact.columns.iter().find(|c| c.name == *name) {
                Some(found) if found.column_type == column.to_string() || found.column_type == "null" => {}
                Some(found) => return Err(format!("column `{name}` is {}, expected {column}", found.column_type)),
                None => {
                    let has: Vec<&str> = input.artifact.columns.iter().map(|c| c.name.as_str()).collect();
                    return Err(format!("column `{name}` ({column}) is missing; it has {}", has.join(", ")));
                }
            }
        }
        Ok(input)
    }

    fn preimage(&self, stage: &Stage, inputs: &BTreeMap<String, Vec<Input>>) -> Result<Preimage, PlanError> {
        let manifest = &stage.kind;
        let identities = inputs.iter().map(|(port, inputs)| {
            let declared = &manifest.inputs[port];
            let by_row = manifest.by_row.as_ref().is_some_and(|by_row| by_row.port == *port);
            let one = |input: &Input| match by_row {
                // The other columns are joined back, so they count for the stage, though not for its rows.
                true => input.artifact.identity([].iter()),
                false => input.artifact.identity(declared.columns.keys().collect::<Vec<_>>().into_iter()),
            };
            let identity = match (declared.list, inputs.as_slice()) {
                (false, [input]) => one(input),
                (_, many) => InputIdentity::List { items: many.iter().map(one).collect() },
            };
            (port.clone(), identity)
        });
        let mut env: BTreeMap<String, Option<String>> =
            manifest.env.iter().map(|name| (name.clone(), std::env::var(name).ok())).collect();
        env.extend(stage.env.iter().map(|(name, value)| (name.clone(), Some(value.clone()))));
        let toolchain =
            self.host.toolchain(manifest).map_err(|error| PlanError::Toolchain { stage: stage.name.clone(), error })?;
        let measured = manifest.determinism == Determinism::Measured;
        let (program, executable) = self.program(stage)?;
        let preimage = Preimage {
            schema: key::SCHEMA,
            kind: manifest.name.clone(),
            program,
            executable,
            params: stage.params.clone(),
            inputs: identities.collect(),
            outputs: stage.command.is_some().then(|| declared_outputs(stage)),
            env,
            secrets: stage.secrets.clone(),
            toolchain,
            device: measured.then(|| self.host.device(stage.resources.gpu)),
            rows_of: None,
        };
        Ok(preimage.versioned())
    }

    /// What runs, and which of its files may be executed.
    fn program(&self, stage: &Stage) -> Result<(ProgramIdentity, BTreeSet<String>), PlanError> {
        let Some(command) = &stage.command else {
            let kind = self.catalog.kind(&stage.kind.name).expect("the spec names only known kinds");
            return Ok((kind.identity.clone(), kind.executable.clone()));
        };
        let command = match command {
            Command::Shell(text) => Value::from(text.as_str()),
            Command::Words(words) => json!(words),
        };
        let files =
            self.command_files(stage).and_then(|files| Ok((catalog::digests(&files)?, catalog::executables(&files)?)));
        let (files, executable) = files.map_err(|error| PlanError::Program {
            location: stage.location.to_string(),
            stage: stage.name.clone(),
            error,
        })?;
        Ok((ProgramIdentity::Command { command, files }, executable))
    }

    /// What a result was made with and would not be made with now, where its key does not tell.
    pub fn other_interpreter(&self, stage: &Stage, record: &Record) -> Option<(Interpreter, Option<Interpreter>)> {
        let then = record.interpreter.clone()?;
        let files = self.command_files(stage).unwrap_or_default();
        let now = interpreter::of_stage(stage, &files, &self.host.python);
        (now.as_ref() != Some(&then)).then_some((then, now))
    }

    /// Files that a `uses: run` stage declares, by path relative to the pipeline's folder.
    pub fn command_files(&self, stage: &Stage) -> Result<Vec<(String, std::path::PathBuf)>, ArtifactError> {
        let mut files = Vec::new();
        for source in &stage.kind.sources {
            files.extend(catalog::source_files(&self.pipeline.folder, source)?);
        }
        Ok(files)
    }
}

/// Which stages come next when others are found: each wire is followed once, however long the pipeline is.
struct Levels {
    /// Producers that are not found, by stage.
    missing: HashMap<usize, usize>,
    consumers: HashMap<usize, Vec<usize>>,
}

impl Levels {
    fn new(pipeline: &Pipeline, chosen: &[usize]) -> Self {
        let mut levels = Self { missing: HashMap::with_capacity(chosen.len()), consumers: HashMap::new() };
        for stage in chosen {
            let mut before = producers(&pipeline.stages[*stage]);
            before.sort_unstable();
            before.dedup();
            levels.missing.insert(*stage, before.len());
            before.into_iter().for_each(|producer| levels.consumers.entry(producer).or_default().push(*stage));
        }
        levels
    }

    /// Those that wait for nothing, in this order.
    fn first(&self, chosen: &[usize]) -> Vec<usize> {
        chosen.iter().copied().filter(|stage| self.missing[stage] == 0).collect()
    }

    /// Those that wait for nothing any more, now that these are found.
    fn after(&mut self, found: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut free = Vec::new();
        for consumer in found.flat_map(|stage| self.consumers.remove(&stage).unwrap_or_default()) {
            let missing = self.missing.get_mut(&consumer).expect("every consumer was counted");
            *missing -= 1;
            if *missing == 0 {
                free.push(consumer);
            }
        }
        free
    }
}

/// What the machine lacks: one problem is one error, however many stages meet it.
#[derive(Default)]
struct Lacks<'a> {
    met: Vec<(ToolchainError, Vec<&'a str>)>,
}

impl<'a> Lacks<'a> {
    fn add(&mut self, stage: &'a Stage, error: ToolchainError) {
        match self.met.iter_mut().find(|(met, _)| *met == error) {
            Some((_, stages)) => stages.push(&stage.name),
            None => self.met.push((error, vec![&stage.name])),
        }
    }

    fn told(self) -> impl Iterator<Item = PlanError> {
        const SHOWN: usize = 20;
        self.met.into_iter().map(|(error, stages)| {
            let mut stage = stages[..stages.len().min(SHOWN)].join("`, `");
            if stages.len() > SHOWN {
                stage.push_str(&format!("`, `… {} more", stages.len() - SHOWN));
            }
            PlanError::Toolchain { stage, error }
        })
    }
}

/// What row results of a by-row kind are filed under, or checkpoints of a kind that has them: the key without the parameter
/// that continues, all of it where none does.
pub fn base_key(kind: &Manifest, preimage: &Preimage) -> Option<Digest> {
    let mut base = preimage.clone();
    let Some(by_row) = &kind.by_row else {
        kind.continued().map(|name| base.params.remove(name));
        return kind.has_checkpoints().then(|| base.versioned().key());
    };
    let columns = &kind.inputs[&by_row.port].columns;
    let columns = columns.iter().map(|(name, column)| (name.clone(), column.to_string())).collect();
    base.inputs.insert(by_row.port.clone(), InputIdentity::Rows { columns });
    base.rows_of = Some(by_row.port.clone());
    Some(base.versioned().key())
}

fn declared_outputs(stage: &Stage) -> Value {
    let port = |port: &cuda_agent_protocol::manifest::OutputPort| {
        let columns: Vec<Value> = port.columns.iter().map(|c| json!([c.name, c.column_type])).collect();
        json!([port.port_type, columns])
    };
    stage
        .kind
        .outputs
        .iter()
        .map(|(name, output)| (name.clone(), port(output)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

#[cfg(test)]
mod tests;
