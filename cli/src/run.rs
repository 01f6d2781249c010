//! `cuda-agent run`.

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use cuda_agent_engine::event::{Recorder, RunEvent, RunOutcome, Subscriber};
use cuda_agent_engine::execute::launch::LocalLauncher;
use cuda_agent_engine::execute::secrets::Secrets;
use cuda_agent_engine::execute::{Engine, Report};
use cuda_agent_engine::plan::graph::Graph;
use cuda_agent_engine::schedule;
use cuda_agent_engine::spec::Pipeline;
use cuda_agent_engine::store::Store;
use cuda_agent_engine::store::ahead::Ahead;
use tokio::sync::mpsc;

use crate::progress::{Bars, JsonLines, Lines};
use crate::project::Project;
use crate::waiting::Voice;
use crate::{CliError, Exit, note, secrets};

/// Options of `run`.
#[derive(Args)]
pub struct Options {
    /// A pipeline file, then stages: `name`, `tag:name`, `name+` for what comes after it too
    #[arg(value_name = "PIPELINE | STAGE")]
    targets: Vec<String>,
    /// Execute a stage whatever the store has (can be repeated)
    #[arg(long, value_name = "STAGE")]
    refresh: Vec<String>,
    /// Maximum number of CPU cores to use
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    jobs: Option<u32>,
}

/// Which stages of a pipeline are meant by names, all cells of a matrix together.
pub fn named_stages(pipeline: &Pipeline, names: &[String]) -> Result<BTreeSet<usize>, CliError> {
    let mut found = BTreeSet::new();
    for name in names {
        let stages = pipeline.stages.iter().enumerate();
        let matching: Vec<usize> =
            stages.filter(|(_, stage)| stage.name == *name || stage.base == *name).map(|(index, _)| index).collect();
        if matching.is_empty() {
            let error = CliError::usage(format!("there is no stage `{name}` in pipeline `{}`", pipeline.name));
            let near = cuda_agent_engine::spec::suggest(name, pipeline.stages.iter().map(|stage| stage.base.as_str()));
            return Err(match near {
                Some(near) => error.with_hint(format!("did you mean `{near}`?")),
                None => error,
            });
        }
        found.extend(matching);
    }
    Ok(found)
}

/// What a command line asks for: a pipeline, and stages of it.
pub struct Chosen {
    /// The pipeline's file.
    pub file: PathBuf,
    /// A look at what the last run had, begun before the file is read.
    pub ahead: Option<Arc<Ahead>>,
    /// The pipeline.
    pub pipeline: Pipeline,
    /// Its stages and what they need of each other.
    pub graph: Graph,
    /// Which stages take part, by place.
    pub selected: Vec<bool>,
    /// Those to execute whatever the store has.
    pub refresh: BTreeSet<usize>,
}

impl Chosen {
    /// Reads what `targets` name, and of it the stages that `refresh` names.
    pub fn read(project: &Project, targets: &[String], refresh: &[String]) -> Result<Self, CliError> {
        let (file, patterns) = project.targets(targets)?;
        let ahead = project.look_ahead(&file);
        let pipeline = project.pipeline(&file)?;
        let graph = Graph::new(&pipeline);
        let selected = graph.select(&pipeline, &patterns)?;
        let refresh = named_stages(&pipeline, refresh)?;
        Ok(Self { file, ahead, pipeline, graph, selected, refresh })
    }
}

/// Runs a pipeline.
pub async fn run(project: &Project, options: Options) -> Result<Exit, CliError> {
    let Chosen { file, ahead, pipeline, graph, selected, refresh } =
        Chosen::read(project, &options.targets, &options.refresh)?;
    let values = Secrets::read(&pipeline);
    let (store, host) = (project.shared_store().await?.with(ahead), project.host());
    project.remember(&file);
    let engine = Engine {
        order: graph.order().to_vec(),
        pipeline: Arc::new(pipeline),
        catalog: &project.catalog,
        store: store.clone(),
        host: &host,
        folders: absolute(project)?,
        launcher: Arc::new(LocalLauncher::this_binary()),
        selected,
        refresh,
        secrets: values,
        jobs: options.jobs,
        sample: None,
        waits: true,
    };
    if let Some(error) = CliError::all(engine.planner().problems(&engine.selected)) {
        return Err(error);
    }
    look_for_secrets(&engine).await?;
    let mut recorder = LazyRecorder { store: store.clone(), kept: Vec::new(), out: None };
    let mut printer: Box<dyn Subscriber> = match (project.common.json, std::io::stderr().is_terminal()) {
        (true, _) => {
            project.waiting.voice.replace(Voice::Json);
            Box::new(JsonLines)
        }
        (false, true) => {
            let bars = Bars::new(project.common.colored());
            project.waiting.voice.replace(Voice::Bars(bars.all.clone()));
            Box::new(bars)
        }
        (false, false) => Box::new(Lines::new()),
    };
    let interrupts = interrupts();
    let report = {
        let mut subscribers: [&mut dyn Subscriber; 2] = [&mut *printer, &mut recorder];
        engine.run(&mut subscribers, interrupts).await?
    };
    drop(printer);
    if recorder.out.take().is_some() {
        store.share_log(&report.run, "events.jsonl").await?;
    }
    if let Err(error) = project.evict(&store).await {
        super::note(&format!("warning: nothing was evicted from this machine: {}", error.message));
    }
    if !project.common.json {
        say_what_is_there(&engine.pipeline, &graph, &store, &report);
    }
    project.require_shared(&store)?;
    let exit = match report.outcome {
        RunOutcome::Done => Exit::Done,
        RunOutcome::Failed => Exit::Failed,
        RunOutcome::Interrupted => Exit::Interrupted,
    };
    // The process ends: to free what ten thousand stages are made of, piece by piece, takes a tenth of a run that finds
    // everything.
    std::mem::forget((engine, graph, report));
    Ok(exit)
}

/// Before a program starts that must fail later: what is certain to lack a secret is refused, what may lack one is told.
async fn look_for_secrets(engine: &Engine<'_>) -> Result<(), CliError> {
    let mut selected = engine.pipeline.stages.iter().zip(&engine.selected).filter(|(_, selected)| **selected);
    if !selected.any(|(stage, _)| engine.secrets.missing(stage).is_some()) {
        return Ok(());
    }
    let planner = engine.planner();
    let plans = planner.plan(&engine.order, &engine.selected).await?;
    let lacks = secrets::lacks(&planner, &engine.secrets, &plans).await?;
    secrets::refuse(&lacks)?;
    lacks.iter().for_each(|lack| note(&format!("warning: {}", lack.in_words())));
    Ok(())
}

/// Programs are told absolute paths.
pub fn absolute(project: &Project) -> Result<cuda_agent_engine::Folders, CliError> {
    let root = project.folders.work.parent().expect("the work folder lies in the local folder");
    cuda_agent_engine::Folders::below(root)
        .map_err(|error| CliError::environment(format!("{}: {error}", root.display())))
}

/// Ctrl-C, SIGTERM and SIGHUP (a lost terminal or ssh session): the first asks for an end, the second insists. Who
/// insisted does not wait long for a store that is away: it is as after a kill, of which nothing is lost.
///
/// A thread of their own hears them, since the loop may be looking thousands of stages up.
pub fn interrupts() -> mpsc::UnboundedReceiver<()> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let listening = std::thread::Builder::new().name("signals".into()).spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        if let Ok(runtime) = runtime {
            let _ = runtime.block_on(listen(&sender));
        }
    });
    // Without it signals do what they do to any process.
    drop(listening);
    receiver
}

async fn listen(sender: &mpsc::UnboundedSender<()>) -> std::io::Result<()> {
    const AT_MOST: Duration = Duration::from_secs(5);
    use tokio::signal::unix::{Signal, SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = if is_ignored(SignalKind::hangup()) { None } else { Some(signal(SignalKind::hangup())?) };
    let lost = async |hangup: &mut Option<Signal>| match hangup {
        Some(hangup) => hangup.recv().await,
        None => std::future::pending().await,
    };
    for count in 1.. {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = lost(&mut hangup) => {}
        }
        let _ = sender.send(());
        if count == 2 {
            tokio::spawn(async {
                tokio::time::sleep(AT_MOST).await;
                std::process::exit(Exit::Interrupted as i32);
            });
        }
    }
    Ok(())
}

/// Whether this process was started with a signal ignored, as `nohup` does: then it stays so.
fn is_ignored(kind: tokio::signal::unix::SignalKind) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (kind.as_raw_value() - 1) & 1 == 1
}

/// Records events into the store's logs from the first one on that is worth it: a run that finds everything leaves no
/// file.
struct LazyRecorder {
    store: Store,
    kept: Vec<RunEvent>,
    out: Option<Recorder<std::fs::File>>,
}

impl Subscriber for LazyRecorder {
    fn notice(&mut self, event: &RunEvent) {
        if let Some(out) = &mut self.out {
            return out.notice(event);
        }
        match event {
            RunEvent::RunStarted { .. } => self.kept.push(event.clone()),
            RunEvent::StageHit { .. } | RunEvent::RunFinished { .. } => {}
            _ => {
                let run = self.kept.iter().find_map(|event| match event {
                    RunEvent::RunStarted { run, .. } => Some(run.clone()),
                    _ => None,
                });
                let Some((folder, run)) = self.store.folder().zip(run) else { return };
                self.out = Recorder::create(&folder.join("v1/logs").join(run).join("events.jsonl")).ok();
                if let Some(out) = &mut self.out {
                    self.kept.drain(..).for_each(|event| out.notice(&event));
                    out.notice(event);
                }
            }
        }
    }
}

/// What a run made is shown where it is not more than this.
const MOST_SHOWN: usize = 8;

/// After a run: what its last stages made, where it is, and what to try next.
fn say_what_is_there(pipeline: &Pipeline, graph: &Graph, store: &Store, report: &Report) {
    if report.outcome != RunOutcome::Done {
        return;
    }
    let ends = (0..pipeline.stages.len()).filter(|stage| graph.consumers(*stage).is_empty());
    let made = ends.filter_map(|stage| Some((&pipeline.stages[stage].name, report.outputs.of(stage)?)));
    let ends: Vec<_> = made.take(MOST_SHOWN + 1).collect();
    if ends.is_empty() || ends.len() > MOST_SHOWN {
        return;
    }
    let place = match store.is_private() {
        true => format!("on this machine only, in {}", store.local().url()),
        false => format!("in {}", store.url()),
    };
    let mut text = format!("\nMade, {place}:\n");
    let mut example = None;
    for (stage, outputs) in &ends {
        for (port, artifact) in *outputs {
            let name = format!("{stage}.{port}");
            let size = schedule::bytes(artifact.size);
            let what = match artifact.rows {
                Some(rows) => format!("{rows} rows, {size}"),
                None => size,
            };
            text.push_str(&format!("  {name:<28} {:<12} {what}\n", artifact.port_type.name()));
            example.get_or_insert(name);
        }
    }
    if let Some(name) = example {
        let stage = name.split_once('.').map_or(name.as_str(), |(stage, _)| stage);
        text.push_str(&format!(
            "\nTry next:\n  cuda-agent show {name}\n  cuda-agent export {stage} FOLDER\n  cuda-agent explain {stage}\n"
        ));
    }
    super::print(&text);
}
