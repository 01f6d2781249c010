//! What a run would do: for each stage hit, miss with its reasons, or pending. `run` uses the same code, so the two
//! cannot disagree.

pub mod graph;
pub mod history;
mod hits;
mod input_error;
pub mod inputs;
mod resolve;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::PathBuf;

use crate::Folders;
use crate::artifact::{Artifact, ArtifactError};
use crate::catalog::{self, Catalog};
use crate::digest::Digest;
use crate::host::{Host, ToolchainError};
use crate::interpreter::{self, Interpreter};
use crate::key::{self, MissReason, Preimage};
use crate::rows::index::RowError;
use crate::spec::{Pipeline, Source, Stage};
use crate::store::local::Look;
use crate::store::{Hint, Record, RowCounts, Store, StoreError};
use history::History;
pub use hits::Hit;
pub use input_error::InputError;
use inputs::{FileCache, Input};
pub use resolve::base_key;

/// Outputs of a stage by port, once they are known.
///
/// In boxes, since the smallest map has room for eleven: with artifacts themselves it takes 2 KB for one output.
pub type Outputs = BTreeMap<String, Box<Artifact>>;

/// Why a stage cannot be planned at all.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// An input from outside.
    #[error("{location}: stage `{stage}`, input `{port}`: {error}")]
    Input {
        /// `file:line:column` of the stage.
        location: String,
        /// The stage.
        stage: String,
        /// The port.
        port: String,
        /// What is wrong with it.
        error: InputError,
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
    /// What it measures on is not known.
    #[error("{location}: stage `{stage}` measures on a CPU, and executor `{executor}` declares none")]
    Device {
        /// `file:line:column` of the stage.
        location: String,
        /// The stage.
        stage: String,
        /// Its executor.
        executor: String,
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
            Self::Input { error, .. } => error.hint.clone(),
            Self::Toolchain { error: ToolchainError::NoPython { .. }, .. } => {
                Some("`make venv` makes .venv; or name an interpreter with `python:` in cuda-agent.yaml or CUDA_AGENT_PYTHON".into())
            }
            Self::Toolchain { error: ToolchainError::NoPackage { package, .. }, .. } => {
                Some(format!(
                    "`make venv` makes .venv with all packages; or install it (`pip install {package}`), or name another \
                     interpreter with `python:` in cuda-agent.yaml or CUDA_AGENT_PYTHON"
                ))
            }
            Self::Device { executor, .. } => Some(format!(
                "add `device: {{ cpu: \"…\" }}` to executor `{executor}` in cuda-agent.yaml; `cuda-agent worker --list` shows \
                 the models of its machines"
            )),
            Self::Store(error) => error.hint.clone(),
            _ => None,
        }
    }

    /// Whether the pipeline file is at fault (and not the machine).
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Input { .. } | Self::Program { .. } | Self::Device { .. })
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

impl Found {
    /// What a record has of a stage.
    pub fn new(resolved: &Resolved, rows: Option<RowCounts>, outputs: Outputs, is_shared: bool) -> Self {
        Self { key: resolved.key, base: resolved.base, rows, outputs, is_shared }
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

/// Why a record of the same pre-image is no hit, with the number of its rows and an output whose blobs are missing.
fn lack(stage: &Stage, rows: Option<RowCounts>, missing: Option<String>) -> Option<MissReason> {
    let rows = rows.unwrap_or_default();
    match missing {
        Some(output) => Some(MissReason::BlobMissing { output }),
        // A stage may pass without them, but each run tries them again.
        None if rows.failed > 0 => Some(MissReason::RowsFailed { count: rows.failed }),
        None if stage.max_rejected.is_some_and(|most| rows.rejected > most) => {
            let most = stage.max_rejected.unwrap_or_default();
            Some(MissReason::RowsRejected { count: rows.rejected, most })
        }
        None => None,
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
                    problems.push(Self::input_error(stage, port, problem));
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

    fn input_error(stage: &Stage, port: &str, error: InputError) -> PlanError {
        let (location, stage) = (stage.location.to_string(), stage.name.clone());
        PlanError::Input { location, stage, port: port.to_owned(), error }
    }

    /// Plans one stage; `known` tells the outputs of stages that are done.
    pub async fn stage<'k>(
        &self,
        index: usize,
        known: impl Fn(usize) -> Option<&'k Outputs>,
    ) -> Result<StagePlan, PlanError> {
        self.stage_in(self.store, index, known).await
    }

    /// The same, by what is on this machine alone should the remote tier be away.
    pub async fn stage_or_local<'k>(
        &self,
        index: usize,
        known: impl Fn(usize) -> Option<&'k Outputs> + Copy,
    ) -> Result<StagePlan, PlanError> {
        match self.stage(index, known).await {
            Err(PlanError::Store(error)) => match self.store.without_remote() {
                Some(nearby) => {
                    self.store.warn(format!("looked up on this machine only: {}", error.message));
                    self.stage_in(&nearby, index, known).await
                }
                None => Err(PlanError::Store(error)),
            },
            plan => plan,
        }
    }

    async fn stage_in<'k>(
        &self,
        store: &Store,
        index: usize,
        known: impl Fn(usize) -> Option<&'k Outputs>,
    ) -> Result<StagePlan, PlanError> {
        let stage = &self.pipeline.stages[index];
        let waits = waits(stage, &known);
        if !waits.is_empty() {
            return Ok(StagePlan { resolved: None, verdict: Verdict::Pending { waits } });
        }
        let resolved = self.resolve(stage, known).await?;
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
        let (mut reasons, generation) = match self.hit(index, stage, resolved, store.look_up(&resolved.key).await?) {
            Ok(hit) => return Ok(hit),
            Err(miss) => miss,
        };
        if self.refresh.contains(&index) {
            reasons.insert(0, MissReason::Refresh);
        }
        if reasons.is_empty() {
            reasons = self.explain(stage, resolved).await?;
        }
        Ok(Verdict::Miss { reasons, generation })
    }

    /// The hit that a look comes to; else why it is none, as far as the look tells, and the newest generation.
    fn hit(
        &self,
        index: usize,
        stage: &Stage,
        resolved: &Resolved,
        look: Look,
    ) -> Result<Verdict, (Vec<MissReason>, u32)> {
        let Look { generation, record } = look;
        // A record of something else that lies under this key is damaged, or somebody's trick.
        let Some((record, missing)) = record.filter(|(record, _)| record.preimage == resolved.preimage) else {
            return Err((Vec::new(), generation));
        };
        match lack(stage, record.rows, missing) {
            None if !self.refresh.contains(&index) => Ok(Verdict::Hit { record: Box::new(record), generation }),
            reason => Err((reason.into_iter().collect(), generation)),
        }
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
            Source::Stored(artifact) => format!("artifact {}", artifact.digest.short()),
        };
        let ports = stage.inputs.iter();
        ports.map(|(port, sources)| (port.clone(), sources.iter().map(named).collect::<Vec<_>>().join(", "))).collect()
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

/// The producers of a stage's inputs that aren't done.
fn waits<'k>(stage: &Stage, known: &impl Fn(usize) -> Option<&'k Outputs>) -> Vec<usize> {
    let sources = stage.inputs.values().flatten();
    let mut waits: Vec<usize> = sources
        .filter_map(|source| match source {
            Source::Stage { stage, .. } => known(*stage).is_none().then_some(*stage),
            _ => None,
        })
        .collect();
    waits.sort_unstable();
    waits.dedup();
    waits
}

#[cfg(test)]
mod tests;
