//! `cuda-agent check`: one candidate, one verdict.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::{ArgMatches, Args, FromArgMatches, ValueEnum};
use serde_json::{Map, Value, json};

use cuda_agent_cli::{Machine, note, print};
use cuda_agent_kernels::baseline::Baseline;
use cuda_agent_kernels::candidate::{Candidate, Format, without_byte_order_mark};
use cuda_agent_kernels::evaluator::{Device, Evaluator, Settings, Setup, compiles, secret};
use cuda_agent_kernels::fault::EvaluatorError;
use cuda_agent_kernels::header::task_header;
use cuda_agent_kernels::judgement::TaskError;
use cuda_agent_kernels::reference::{Policy, Protocol, STEP_LIMIT, Task};
use cuda_agent_kernels::reward::Scheme;
use cuda_agent_kernels::verdict::{Outcome, Verdict};

/// Of one step of a task, where somebody waits for it and nothing is tuned.
const IMPATIENT_STEP_LIMIT: Duration = Duration::from_secs(120);

/// Judge a CUDA kernel against a PyTorch model: right or wrong, and how much faster
#[derive(Args, Debug)]
#[command(after_help = "Exit status: 0 correct, 1 not, 2 bad usage or task, 3 the machine can't judge it.\n\
    A candidate is device code with TASK_LAUNCH lines (format `kernel`), or device code with a host function \
    `launch` (format `launch`). docs/kernels.md tells all. `--header` prints what \"task.h\" holds for a task.")]
struct Options {
    /// The candidate: CUDA C++
    #[arg(required_unless_present = "header", value_name = "FILE")]
    candidate: Option<PathBuf>,
    /// The task: a Python file with class Model, get_inputs() and get_init_inputs()
    #[arg(long, value_name = "MODEL.PY")]
    task: PathBuf,
    /// Print the task's "task.h" and judge nothing
    #[arg(long)]
    header: bool,
    /// How to read the candidate [default: `kernel` where it has a TASK_LAUNCH, else `launch`]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Where to run it; the CPU device says right or wrong, but takes no times [default: cuda where there is a GPU]
    #[arg(long, value_enum)]
    device: Option<DeviceName>,
    /// Which precision counts as right, for the candidate and for the baselines
    #[arg(long, value_enum, default_value_t = Policy::Strict)]
    policy: Policy,
    /// How the reference model is set up: cuda-agent in eval mode, kernelbench in train mode
    #[arg(long, value_enum, default_value_t = Protocol::CudaAgent)]
    protocol: Protocol,
    /// Override a constant of the task's file, for another size
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// Inputs to check, each twice
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    inputs: u32,
    /// Repeat the inputs of an earlier verdict
    #[arg(long, value_name = "HEX", value_parser = seed)]
    seed: Option<u64>,
    /// What to time beside the candidate: eager, compile, autotune; `none` takes no times
    #[arg(long, value_delimiter = ',', default_value = "eager,compile", value_name = "LIST")]
    baselines: Vec<Beside>,
    /// At most so many trials
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(10..=100))]
    max_trials: u32,
    /// Run a correct candidate under compute-sanitizer too: out-of-bounds accesses and races that results don't show
    #[arg(long)]
    sanitizer: bool,
    /// Seconds that one run of the candidate may take [default: 5 on a GPU, 60 on the CPU device]
    #[arg(long, value_name = "SECONDS")]
    time_limit: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceName {
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Beside {
    Eager,
    Compile,
    Autotune,
    None,
}

impl Beside {
    fn baseline(self) -> Option<Baseline> {
        match self {
            Self::Eager => Some(Baseline::Eager),
            Self::Compile => Some(Baseline::Compile),
            Self::Autotune => Some(Baseline::Autotune),
            Self::None => None,
        }
    }
}

/// The command's definition.
pub fn command() -> clap::Command {
    Options::augment_args(clap::Command::new("check"))
}

/// Why there is no verdict: the exit status, what is wrong, and what to do about it.
struct Refused {
    exit: u8,
    message: String,
    hint: Option<String>,
}

impl Refused {
    fn usage(message: impl Into<String>) -> Self {
        Self { exit: 2, message: message.into(), hint: None }
    }
}

impl From<EvaluatorError> for Refused {
    fn from(error: EvaluatorError) -> Self {
        Self { exit: 3, message: error.message, hint: error.hint }
    }
}

/// Runs the command and returns its exit status.
pub fn main(matches: &ArgMatches, machine: &Machine) -> u8 {
    let options = Options::from_arg_matches(matches).expect("clap checked them against the same definition");
    match run(&options, machine) {
        Ok(exit) => exit,
        Err(refused) if machine.json => {
            let error = json!({ "error": { "message": refused.message, "hint": refused.hint } });
            print(&format!("{error}\n"));
            refused.exit
        }
        Err(refused) => {
            note(&format!("error: {}", refused.message));
            if let Some(hint) = refused.hint {
                note(&format!("  hint: {hint}"));
            }
            refused.exit
        }
    }
}

fn run(options: &Options, machine: &Machine) -> Result<u8, Refused> {
    let task = task(options)?;
    let candidate = options.candidate.as_deref().map(|path| candidate(path, options.format)).transpose()?;
    let device = device(options, machine)?;
    let settings = settings(options, &device)?;
    let setup = Setup {
        device: device.clone(),
        executable: std::env::current_exe()
            .map_err(|error| Refused::usage(format!("this program cannot be found: {error}")))?,
        python: machine.python.clone(),
        cache: machine.cache.join("kernels"),
        // One candidate needs one lane.
        cores: 1,
        lanes: 1,
        compiles: compiles(&settings.baselines),
        step_limit: if options.baselines.contains(&Beside::Autotune) { STEP_LIMIT } else { IMPATIENT_STEP_LIMIT },
    };
    let evaluator = Evaluator::new(&setup)?;
    if options.header {
        return header(&evaluator, &task);
    }
    let candidate = candidate.expect("clap demands it without --header");
    let seed = options.seed.map_or_else(secret, Ok)?;
    let verdict = {
        let _signs = SignsOfLife::begin(&device, note);
        evaluator.evaluate(&task, &candidate, seed, &settings)?
    };
    report(&verdict, &task, &candidate, machine);
    Ok(exit(&verdict))
}

/// Says on standard error that judging goes on, from a thread of its own, until it is dropped.
struct SignsOfLife {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl SignsOfLife {
    /// Before the first word.
    const FIRST: Duration = Duration::from_secs(10);
    /// Between words.
    const THEN: Duration = Duration::from_secs(30);

    fn begin(device: &Device, note: fn(&str)) -> Self {
        let (stop, stopped) = mpsc::channel::<()>();
        let slow = device.usual().slow;
        let thread = std::thread::spawn(move || {
            let started = Instant::now();
            let mut wait = Self::FIRST;
            while stopped.recv_timeout(wait) == Err(mpsc::RecvTimeoutError::Timeout) {
                note(&still_judging(started.elapsed(), slow, wait == Self::FIRST));
                wait = Self::THEN;
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for SignsOfLife {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// The first time it is told with what makes the wait shorter, if anything does.
fn still_judging(elapsed: Duration, slow: Option<&str>, is_first: bool) -> String {
    let so_far = format!("still judging after {} s", elapsed.as_secs());
    match slow.filter(|_| is_first) {
        Some(slow) => format!("{so_far}: {slow}"),
        None => so_far,
    }
}

fn seed(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u64::from_str_radix(digits, 16).map_err(|_| "a seed is a hexadecimal number of at most 16 digits".to_owned())
}

fn exit(verdict: &Verdict) -> u8 {
    match verdict.outcome {
        Outcome::Correct => 0,
        Outcome::TaskError => 2,
        Outcome::Unsupported => 3,
        _ => 1,
    }
}

fn report(verdict: &Verdict, task: &Task, candidate: &Candidate, machine: &Machine) {
    if machine.json {
        let json = serde_json::to_string_pretty(verdict).expect("plain data");
        return print(&format!("{json}\n"));
    }
    let model = verdict.device.as_ref().map(|device| format!(" on {}", device.name)).unwrap_or_default();
    let subject = if verdict.outcome == Outcome::TaskError { &task.name } else { &candidate.name };
    let mut text = format!("{subject}{model}\n{verdict}");
    if verdict.is_correct() && verdict.performance.is_none() {
        text += "  no times were taken\n";
    }
    if verdict.inputs > 0 {
        let (inputs, seed) = (verdict.inputs, &verdict.seed);
        text += &format!("  inputs     {inputs} of seed {seed} (`--seed` draws them again)\n");
    }
    print(&text);
}

fn header(evaluator: &Evaluator, task: &Task) -> Result<u8, Refused> {
    match evaluator.describe(task)? {
        Ok(described) => {
            print(&task_header(&described.spec));
            Ok(0)
        }
        Err(TaskError { line: Some(line), message, .. }) => {
            Err(Refused::usage(format!("the task, line {line}: {message}")))
        }
        Err(error) => Err(Refused { exit: 2, message: error.message, hint: error.hint }),
    }
}

fn read(path: &Path) -> Result<String, Refused> {
    let bytes = std::fs::read(path).map_err(|error| Refused::usage(format!("{}: {error}", path.display())))?;
    let text = String::from_utf8(bytes).map_err(|_| Refused::usage(format!("{} is no UTF-8 text", path.display())))?;
    Ok(without_byte_order_mark(&text))
}

fn task(options: &Options) -> Result<Task, Refused> {
    let mut set = Map::new();
    for assignment in &options.set {
        let (name, value) = assignment.split_once('=').ok_or_else(|| Refused {
            hint: Some("--set batch=16".into()),
            ..Refused::usage(format!("`--set {assignment}` has no `=`"))
        })?;
        let value: Value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
        if !(value.is_number() || value.is_boolean()) {
            return Err(Refused::usage(format!("`--set {assignment}`: {value} is neither a number nor true or false")));
        }
        if set.insert(name.to_owned(), value).is_some() {
            return Err(Refused::usage(format!("`--set {name}` is given twice")));
        }
    }
    let name = options.task.display().to_string();
    Ok(Task { code: read(&options.task)?, name, set, protocol: options.protocol, policy: options.policy })
}

fn candidate(path: &Path, format: Option<Format>) -> Result<Candidate, Refused> {
    let source = read(path)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Candidate { format: format.unwrap_or_else(|| Format::of(&source)), source, name })
}

fn device(options: &Options, machine: &Machine) -> Result<Device, Refused> {
    match (options.device, machine.gpus.first()) {
        (Some(DeviceName::Cpu), _) => Ok(Device::Cpu),
        (_, Some(gpu)) => Ok(Device::Cuda(vec![gpu.clone()])),
        (Some(DeviceName::Cuda), None) => Err(Refused {
            exit: 3,
            message: "no GPU was found on this machine".into(),
            hint: Some("--device cpu judges correctness without one".into()),
        }),
        (None, None) => {
            if !options.header {
                note("no GPU: judged on the CPU device, right or wrong, without times");
            }
            Ok(Device::Cpu)
        }
    }
}

fn settings(options: &Options, device: &Device) -> Result<Settings, Refused> {
    let seconds = options.time_limit.unwrap_or(device.usual().run_limit.as_secs_f64());
    let limit = Duration::try_from_secs_f64(seconds).ok().filter(|limit| !limit.is_zero());
    let baselines = match options.baselines.contains(&Beside::None) {
        true if options.baselines.len() > 1 => {
            return Err(Refused::usage("`--baselines none` takes no times: it goes with no other baseline"));
        }
        true => Vec::new(),
        false => options.baselines.iter().filter_map(|beside| beside.baseline()).collect(),
    };
    Ok(Settings {
        inputs: options.inputs,
        limit: limit.ok_or_else(|| Refused::usage(format!("`--time-limit {seconds}` is no time to run in")))?,
        baselines,
        max_trials: options.max_trials,
        reward: Scheme::Milestone,
        sanitizer: options.sanitizer,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_told_with_what_makes_it_shorter() {
        let told = |seconds, device: &Device, is_first| {
            still_judging(Duration::from_secs(seconds), device.usual().slow, is_first)
        };
        let gpu = Device::Cuda(vec!["0".into()]);
        assert_eq!(
            told(10, &Device::Cpu, true),
            "still judging after 10 s: the CPU device takes minutes for inputs of full size; `--set NAME=VALUE` makes them \
             smaller, `--inputs 1` checks fewer"
        );
        assert_eq!(
            [told(40, &Device::Cpu, false), told(10, &gpu, true)],
            ["still judging after 40 s", "still judging after 10 s"]
        );
    }

    #[test]
    fn signs_of_life_end_with_what_they_are_about() {
        let started = Instant::now();
        drop(SignsOfLife::begin(&Device::Cpu, |_| {}));
        assert!(started.elapsed() < SignsOfLife::FIRST);
    }
}
