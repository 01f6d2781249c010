//! The command line: one file per command. The exit status is decided in [`main`] alone.

mod accept;
mod artifacts;
mod diff;
mod doctor;
mod error;
mod gc;
mod inspect;
mod kinds;
mod output;
mod plan;
mod progress;
mod project;
mod rejected;
mod reproduce;
mod run;
mod runs;
mod secrets;
mod share;
mod text;
mod verify;
mod waiting;
mod worker;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;

use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use cuda_agent_engine::catalog::{Catalog, CatalogError};

pub use error::{CliError, Exit};
use output::print_json;
pub use output::{note, print};

use cuda_agent_protocol::PortType;

/// What the binary brings: stage kinds, and the programs that are part of it.
pub struct Builtins {
    /// Adds the built-in kinds.
    pub add: fn(&mut Catalog) -> Result<(), CatalogError>,
    /// Runs a built-in program, `None` where there is none of that name.
    pub program: fn(&str) -> Option<u8>,
    /// Commands that belong to stages, not to the engine.
    pub commands: &'static [StageCommand],
    /// What stages add to `doctor`.
    pub findings: fn(&Machine) -> Vec<Finding>,
    /// How `show` prints rows that a stage crate knows how to read.
    pub views: &'static [RowView],
}

/// How a row of a table of some type reads.
pub struct RowView {
    /// Tables of this type.
    pub port_type: PortType,
    /// A row as text, whole lines; the flag is whether every line is wanted.
    pub text: fn(&serde_json::Map<String, serde_json::Value>, bool) -> String,
}

/// What a stage crate found on this machine, as `doctor` shows it.
pub struct Finding {
    /// What was looked at, in a word or two.
    pub name: &'static str,
    /// Whether it is as it should be.
    pub is_good: bool,
    /// What was found.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// A command that a stage crate brings.
pub struct StageCommand {
    /// Its definition.
    pub command: fn() -> clap::Command,
    /// Runs it and gives the exit status.
    pub run: fn(&ArgMatches, &Machine) -> u8,
}

/// What a stage crate's command is told of the machine and the project.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The interpreter that `python` stands for.
    pub python: PathBuf,
    /// GPUs by UUID.
    pub gpus: Vec<String>,
    /// CPU cores.
    pub cores: usize,
    /// A folder for what can be made again.
    pub cache: PathBuf,
    /// Whether JSON is wanted.
    pub json: bool,
}

/// The first line of the help.
const ABOUT: &str = "A declarative pipeline engine, and the CUDA Agent system as pipelines of cached stages";

#[derive(Parser)]
#[command(name = "cuda-agent", version, about = ABOUT, disable_help_subcommand = true, max_term_width = 100)]
#[command(
    after_help = "Exit status: 0 done, 1 a stage failed, 2 bad usage or pipeline, 3 store or machine, 130 interrupted."
)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// The pipeline file [default: `pipeline:` of cuda-agent.yaml, else the last one that ran here]
    #[arg(long, global = true, value_name = "FILE")]
    pipeline: Option<PathBuf>,
    /// Where artifacts live: a folder, or s3://, gs://, az:// [default: `store:` of cuda-agent.yaml, else .cuda-agent]
    #[arg(long, global = true, value_name = "URL")]
    store: Option<String>,
    /// Set a parameter of the pipeline, or `stage.parameter`
    #[arg(short, long = "param", global = true, value_name = "NAME=VALUE")]
    params: Vec<String>,
    /// Do not ask the shared store: work with what is on this machine
    #[arg(long, global = true)]
    offline: bool,
    /// Read from the shared store, but keep results on this machine
    #[arg(long, global = true, conflicts_with = "offline")]
    read_only: bool,
    /// Machine-readable output
    #[arg(long, global = true)]
    json: bool,
    /// When to use colours and bars
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    color: Color,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Color {
    Auto,
    Always,
    Never,
}

impl Common {
    fn colored(&self) -> bool {
        match self.color {
            Color::Auto => std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
            Color::Always => true,
            Color::Never => false,
        }
    }
}

#[derive(Subcommand)]
enum Command {
    /// Execute what is not in the store yet
    Run(run::Options),
    /// Say what `run` would do, and why
    Plan(plan::Options),
    /// Tell everything about one stage: key, inputs, why it would run
    Explain(plan::ExplainOptions),
    /// Take the result that a stage had for the one it would make now
    Accept(accept::Options),
    /// How the last run stands
    Status(runs::StatusOptions),
    /// List runs
    Runs(runs::RunsOptions),
    /// Compare two runs: parameters, reasons, results
    Diff(diff::Options),
    /// What a stage printed
    Log(runs::LogOptions),
    /// Look into what a stage made: schema, counts, first rows, files
    Show(inspect::Options),
    /// Copy what a stage made, or a tagged artifact, to a folder
    Export(artifacts::ExportOptions),
    /// Share results of this machine that are not in the shared store yet
    Push(share::PushOptions),
    /// Copy results from the shared store, so that `run --offline` finds them
    Pull(share::PullOptions),
    /// Give an output a name: `tag dataset.samples ops@v1`
    Tag(artifacts::TagOptions),
    /// Delete what no run that is kept needs; says what would go, unless it is told to delete
    Gc(gc::Options),
    /// Run stages again, unseen by anybody, and compare; or compare what the store holds with its digests
    Verify(verify::Options),
    /// Execute stages that runs on other machines announce in the shared store
    Worker(worker::Options),
    /// List stage kinds, or describe one
    Stages(kinds::Options),
    /// Print the JSON Schema of pipeline files, for editors
    Schema,
    /// Draw the pipeline
    Graph(plan::GraphOptions),
    /// Check this machine and the store
    Doctor,
    /// Run a program that is part of this binary (the engine does this)
    #[command(hide = true)]
    Stage {
        /// The stage kind.
        kind: String,
    },
}

/// Parses the arguments, runs the command, and decides the exit status.
pub fn main(arguments: Vec<OsString>, builtins: &Builtins) -> u8 {
    let definition = Cli::command().subcommands(builtins.commands.iter().map(|command| (command.command)()));
    let parsed = definition.try_get_matches_from(arguments).and_then(|matches| parse(&matches, builtins));
    let invocation = match parsed {
        Ok(invocation) => invocation,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage as u8 } else { Exit::Done as u8 };
        }
    };
    let (common, outcome) = match invocation {
        Invocation::Engine(cli) => (cli.common.clone(), dispatch(*cli, builtins).map(|exit| exit as u8)),
        Invocation::Stage(common, command, matches) => {
            let project = project::Project::open(&common, builtins);
            (common, project.map(|project| (command.run)(&matches, &project.machine())))
        }
    };
    output::status(outcome.unwrap_or_else(|error| error.report(common.json, common.colored()) as u8))
}

/// What was asked for.
enum Invocation {
    /// One of the engine's commands.
    Engine(Box<Cli>),
    /// One of a stage crate's.
    Stage(Common, &'static StageCommand, ArgMatches),
}

fn parse(matches: &ArgMatches, builtins: &Builtins) -> Result<Invocation, clap::Error> {
    let (name, below) = matches.subcommand().expect("clap demands a command");
    match builtins.commands.iter().find(|command| (command.command)().get_name() == name) {
        Some(command) => Ok(Invocation::Stage(Common::from_arg_matches(matches)?, command, below.clone())),
        None => Ok(Invocation::Engine(Box::new(Cli::from_arg_matches(matches)?))),
    }
}

fn dispatch(cli: Cli, builtins: &Builtins) -> Result<Exit, CliError> {
    if let Command::Stage { kind } = &cli.command {
        let unknown = || CliError::usage(format!("`{kind}` is not a program of this binary"));
        let status = (builtins.program)(kind).ok_or_else(unknown)?;
        std::process::exit(status.into());
    }
    let project = project::Project::open(&cli.common, builtins)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| CliError::environment(format!("no runtime: {error}")))?;
    let command = async {
        match cli.command {
            Command::Run(options) => run::run(&project, options).await,
            Command::Plan(options) => plan::plan(&project, options).await,
            Command::Explain(options) => plan::explain(&project, options).await,
            Command::Accept(options) => accept::accept(&project, options).await,
            Command::Status(options) => runs::status(&project, options).await,
            Command::Runs(options) => runs::runs(&project, options).await,
            Command::Diff(options) => diff::diff(&project, options).await,
            Command::Log(options) => runs::log(&project, options).await,
            Command::Show(options) => inspect::show(&project, options, builtins.views).await,
            Command::Export(options) => artifacts::export(&project, options).await,
            Command::Push(options) => share::push(&project, options).await,
            Command::Pull(options) => share::pull(&project, options).await,
            Command::Tag(options) => artifacts::tag(&project, options).await,
            Command::Gc(options) => gc::gc(&project, options).await,
            Command::Verify(options) => verify::verify(&project, options).await,
            Command::Worker(options) => worker::worker(&project, options).await,
            Command::Stages(options) => kinds::stages(&project, options),
            Command::Schema => kinds::schema(&project),
            Command::Graph(options) => plan::graph(&project, options),
            Command::Doctor => doctor::doctor(&project, builtins.findings).await,
            Command::Stage { .. } => unreachable!("handled above"),
        }
    };
    let store = project.store_name();
    let outcome = runtime.block_on(async {
        tokio::select! {
            outcome = command => outcome,
            never = project.waiting.watch(&store) => match never {},
        }
    });
    // A thread that still copies something must not hold up the end.
    runtime.shutdown_background();
    outcome
}
