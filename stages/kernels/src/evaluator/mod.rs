//! Tasks and candidates in, verdicts out: many at once, over every GPU that it was given.
//!
//! Each card has lanes, which check results side by side, and one lane for the clock, which runs alone. A fault of a
//! candidate costs one verdict; a fault of the machine costs one more try.

mod assets;
mod baselines;
mod clock;
mod lane;
mod pool;
mod random;
mod sanitize;
mod verify;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use self::baselines::Wanted;
use self::clock::{Timed, Timing};
use self::lane::{Lane, Source};
use self::pool::Pool;
use self::sanitize::Sanitized;
use self::verify::{Check, Checked};
use crate::candidate::Candidate;
use crate::compile::host::HostToolchain;
use crate::compile::toolkit::Toolkit;
use crate::compile::{Artifact, Built, CompileFailure, Compiler, Diagnostic, Target};
use crate::fault::{EvaluatorError, Fault, FaultKind};
use crate::gate::{Gate, Shared};
use crate::profile::trials::Interval;
use crate::reference::{Answered, Described, ReferenceServer, Task, TaskError};
use crate::reward::{Cost, Judgement, Scheme, reward};
use crate::runner::gpu::GpuRunners;
use crate::verdict::{Compiled, Failure, Outcome, SCHEMA, Seconds, Verdict};

pub use self::baselines::Baseline;
pub use self::random::secret;

/// Where candidates run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU device: right or wrong, no times.
    Cpu,
    /// These GPUs, by UUID or index.
    Cuda(Vec<String>),
}

/// What an evaluator is made from.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Where candidates run.
    pub device: Device,
    /// This program, which is started again as runner and compiler.
    pub executable: PathBuf,
    /// An interpreter with torch.
    pub python: PathBuf,
    /// For compiled candidates and unpacked files.
    pub cache: PathBuf,
    /// CPU cores to use.
    pub cores: usize,
    /// Of one step of a task: building it, compiling it, screening it.
    pub step_limit: Duration,
}

/// How candidates are judged.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Inputs to check, each twice.
    pub inputs: u32,
    /// Of one run of a candidate.
    pub limit: Duration,
    /// Baselines to time beside a correct candidate; empty takes no times.
    pub baselines: Vec<String>,
    /// At most so many trials.
    pub max_trials: u32,
    /// Whether correct candidates also run under compute-sanitizer.
    pub sanitizer: bool,
    /// What a verdict is worth.
    pub reward: Scheme,
}

/// The evaluator. Its methods can be called from many threads.
pub struct Evaluator {
    compiler: Compiler,
    cards: Vec<Card>,
    described: Mutex<HashMap<String, DescribedOnce>>,
    is_gpu: bool,
}

/// A description that is made once, whoever asks first.
type DescribedOnce = Arc<Mutex<Option<Result<Arc<Described>, TaskError>>>>;

/// A GPU, or the CPU.
struct Card {
    gate: Gate,
    lanes: Pool<Lane>,
    clock: Mutex<Lane>,
    /// Candidates that are being judged here.
    busy: AtomicUsize,
}

/// More lanes than this on one card only wait for each other.
const MAX_LANES: usize = 6;

/// Descriptions kept; each is a few kilobytes.
const MAX_DESCRIBED: usize = 10_000;

/// Tries of the machine, not of the candidate.
const TRIES: u32 = 2;

impl Evaluator {
    /// Starts the trusted processes.
    pub fn new(setup: &Setup) -> Result<Self, EvaluatorError> {
        let script = assets::unpack(&setup.cache)?;
        let gpus: Vec<Option<&str>> = match &setup.device {
            Device::Cpu => vec![None],
            Device::Cuda(gpus) => gpus.iter().map(|gpu| Some(gpu.as_str())).collect(),
        };
        if gpus.is_empty() {
            return Err(
                EvaluatorError::new("no GPU was found").with_hint("--device cpu judges correctness without one")
            );
        }
        let lanes = (setup.cores / gpus.len()).clamp(1, if setup.device == Device::Cpu { 64 } else { MAX_LANES });
        let toolkit = Toolkit::find_beside(&setup.python);
        let preload: Vec<PathBuf> = toolkit.runtime().map(Path::to_owned).into_iter().collect();
        let compiler = compiler(setup, toolkit)?;
        let servers: Vec<_> = std::thread::scope(|scope| {
            let script = script.as_path();
            let start = |gpu| {
                scope.spawn(move || {
                    Ok(ReferenceServer::start(&setup.python, script, gpu)?.with_step_limit(setup.step_limit))
                })
            };
            let threads: Vec<_> = gpus.iter().copied().map(start).collect();
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
        });
        let cards = gpus.iter().zip(servers).map(|(gpu, server)| Ok(Card::new(*gpu, server?, lanes, setup, &preload)));
        Ok(Self {
            cards: cards.collect::<Result<_, EvaluatorError>>()?,
            compiler,
            described: Mutex::default(),
            is_gpu: setup.device != Device::Cpu,
        })
    }

    /// How many candidates it is worth giving it at once.
    pub fn width(&self) -> usize {
        // Twice the lanes: while one candidate is checked, the next compiles.
        2 * self.cards.iter().map(|card| card.lanes.size()).sum::<usize>()
    }

    /// The contract between a task and its candidates.
    pub fn describe(&self, task: &Task) -> Result<Result<Arc<Described>, TaskError>, EvaluatorError> {
        self.describe_on(self.least_busy(), task)
    }

    /// Judges a candidate. The inputs follow from `seed`, which must be secret while the candidate is made.
    pub fn evaluate(
        &self,
        task: &Task,
        candidate: &Candidate,
        seed: u64,
        settings: &Settings,
    ) -> Result<Verdict, EvaluatorError> {
        let card = self.least_busy();
        card.busy.fetch_add(1, Ordering::Relaxed);
        let mut result = self.evaluate_on(card, task, candidate, seed, settings);
        for _ in 1..TRIES {
            if result.is_err() {
                result = self.evaluate_on(card, task, candidate, seed, settings);
            }
        }
        card.busy.fetch_sub(1, Ordering::Relaxed);
        result
    }

    /// Times baselines of a task, in random order; `trials` forwards of each.
    pub fn baselines(&self, task: &Task, names: &[String], trials: u32, seed: u64) -> Answered<Vec<Baseline>> {
        let card = self.least_busy();
        let mut lane = card.clock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let wanted = Wanted { task, names, trials, seed, is_gpu: self.is_gpu };
        let answered = baselines::time(&mut lane, &card.gate, &wanted);
        if answered.is_err() {
            lane.reset();
        }
        answered
    }

    /// Which answers without the work the task's policy would let through.
    pub fn screen(&self, task: &Task, seed: u64) -> Answered<Value> {
        let card = self.least_busy();
        let mut lane = card.lanes.take();
        let _shared = card.gate.share();
        let answered = baselines::screen(&mut lane, &Wanted { task, names: &[], trials: 0, seed, is_gpu: self.is_gpu });
        if answered.is_err() {
            lane.reset();
        }
        answered
    }

    fn least_busy(&self) -> &Card {
        self.cards.iter().min_by_key(|card| card.busy.load(Ordering::Relaxed)).expect("there is a card")
    }

    fn describe_on(&self, card: &Card, task: &Task) -> Result<Result<Arc<Described>, TaskError>, EvaluatorError> {
        let once = {
            let mut described = self.described.lock().expect("no panics while it is held");
            if described.len() >= MAX_DESCRIBED {
                described.clear();
            }
            described.entry(task.digest()).or_default().clone()
        };
        let mut once = once.lock().expect("no panics while it is held");
        if let Some(known) = &*once {
            return Ok(known.clone());
        }
        let mut lane = card.lanes.take();
        let _shared = card.gate.share();
        let described = lane.reference()?.describe(task)?.and_then(varied).map(Arc::new);
        // Memory may be short for a moment only.
        if !matches!(&described, Err(error) if error.kind == "memory") {
            *once = Some(described.clone());
        }
        Ok(described)
    }

    fn evaluate_on(
        &self,
        card: &Card,
        task: &Task,
        candidate: &Candidate,
        seed: u64,
        settings: &Settings,
    ) -> Result<Verdict, EvaluatorError> {
        let mut draft = Draft::new(task, candidate, seed);
        let described = match self.describe_on(card, task)? {
            Ok(described) => described,
            Err(error) => return Ok(draft.task_error(error)),
        };
        draft.verdict.device = Some(described.device.clone());
        let start = Instant::now();
        let compiled = self.compiler.compile(candidate, &described.spec, &target(&described))?;
        draft.verdict.seconds.compile = start.elapsed().as_secs_f64();
        let built = match compiled {
            Ok(built) => built,
            Err(failure) => return Ok(draft.not_compiled(failure).finish(&settings.reward, &Cost::default())),
        };
        draft.verdict.compiled = Some(Compiled::from(&built));
        let checked = self.check(card, task, &built, &mut draft.verdict.seconds, seed, settings)?;
        let mut is_right = draft.checked(checked, settings.inputs);
        if is_right && settings.sanitizer {
            is_right = draft.sanitized(self.sanitize(card, task, &built, seed, settings)?);
        }
        if is_right && !settings.baselines.is_empty() && described.device.is_gpu() {
            self.time(card, task, &described, &built, &mut draft, seed, settings)?;
        }
        Ok(draft.finish(&settings.reward, &Cost::of(&built, &candidate.source)))
    }

    fn check(
        &self,
        card: &Card,
        task: &Task,
        built: &Built,
        seconds: &mut Seconds,
        seed: u64,
        settings: &Settings,
    ) -> Result<Checked, EvaluatorError> {
        let mut lane = card.lanes.take();
        let start = Instant::now();
        let check_beside = |lane: &mut Lane, shared: &Shared| {
            let check = Check { task, built, seed, inputs: settings.inputs, limit: settings.limit, shared };
            let checked = verify::check(lane, &check);
            tidy(lane, built, checked.is_err());
            checked
        };
        let mut checked = check_beside(&mut lane, &card.gate.share());
        // A program of the CPU device cannot be given more time: it runs again when the others are done.
        if !self.is_gpu && matches!(&checked, Ok(Checked::Fault(fault, _)) if fault.kind == FaultKind::Timeout) {
            let shared = card.gate.share();
            let _late = shared.be_late();
            checked = check_beside(&mut lane, &shared);
        }
        seconds.verify = start.elapsed().as_secs_f64();
        checked
    }

    fn sanitize(
        &self,
        card: &Card,
        task: &Task,
        built: &Built,
        seed: u64,
        settings: &Settings,
    ) -> Result<Sanitized, EvaluatorError> {
        if !self.is_gpu {
            return Ok(Sanitized::NotRun("the CPU device has AddressSanitizer and a race detector of its own".into()));
        }
        let mut lane = card.lanes.take();
        let _shared = card.gate.share();
        let sanitized = sanitize::sanitize(&mut lane, task, built, seed, settings.limit);
        if sanitized.is_err() {
            lane.reset();
        }
        sanitized
    }

    #[expect(clippy::too_many_arguments, reason = "each is one of the parts that a time is made of")]
    fn time(
        &self,
        card: &Card,
        task: &Task,
        described: &Described,
        built: &Built,
        draft: &mut Draft,
        seed: u64,
        settings: &Settings,
    ) -> Result<(), EvaluatorError> {
        let start = Instant::now();
        let mut lane = card.clock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Settings { baselines, max_trials, limit, .. } = settings;
        let timing = Timing { task, described, built, seed, baselines, max_trials: *max_trials, limit: *limit };
        let timed = clock::time(&mut lane, &card.gate, &timing);
        tidy(&mut lane, built, timed.is_err());
        draft.verdict.seconds.profile = start.elapsed().as_secs_f64();
        draft.timed(timed?);
        Ok(())
    }
}

fn compiler(setup: &Setup, toolkit: Toolkit) -> Result<Compiler, EvaluatorError> {
    let compiler = Compiler::new(toolkit, &setup.cache.join("compiled"), setup.cores)?;
    Ok(match setup.device {
        Device::Cpu => compiler.with_host(Arc::new(HostToolchain::find(&setup.cache.join("runtimes"))?)),
        Device::Cuda(_) => compiler,
    })
}

/// A lane must not carry anything from one candidate to the next.
fn tidy(lane: &mut Lane, built: &Built, lost: bool) {
    match &built.artifact {
        _ if lost => lane.reset(),
        // Only device code ran; the next load unloads it.
        Artifact::Cubin(_) => {}
        Artifact::Library(_) | Artifact::Host { .. } => lane.discard_runner(),
    }
}

/// Where every draw gives the same inputs, an answer could be remembered from one run to the next.
fn varied(described: Described) -> Result<Described, TaskError> {
    let fixed = &described.fixed_inputs;
    if fixed.is_empty() || fixed.len() < described.spec.inputs.len() {
        return Ok(described);
    }
    Err(TaskError {
        kind: "unsupported".into(),
        message: format!("every draw of get_inputs() gives the same values ({})", fixed.join(", ")),
        hint: Some("draw the inputs at random, so that no answer can be remembered".into()),
        line: None,
    })
}

impl From<&Built> for Compiled {
    fn from(built: &Built) -> Self {
        Self { compiler: built.compiler.clone(), kernels: built.resources.clone(), seconds: built.seconds }
    }
}

fn target(described: &Described) -> Target {
    match described.device.compute_capability {
        Some([major, minor]) => Target::Gpu { architecture: format!("sm_{major}{minor}") },
        None => Target::Cpu,
    }
}

impl Card {
    fn new(gpu: Option<&str>, server: ReferenceServer, lanes: usize, setup: &Setup, preload: &[PathBuf]) -> Self {
        let (executable, preload) = (setup.executable.clone(), preload.to_vec());
        let runners = gpu.map(|gpu| GpuRunners { executable, gpu: gpu.to_owned(), preload });
        let source = Arc::new(Source { server, runners });
        let file = gpu.map(|gpu| PathBuf::from(format!("/tmp/cuda-agent-clock-{gpu}")));
        Self {
            gate: Gate::new(file.as_deref()),
            lanes: Pool::new((0..lanes).map(|_| Lane::new(source.clone()))),
            clock: Mutex::new(Lane::new(source)),
            busy: AtomicUsize::new(0),
        }
    }
}

fn in_one_line(diagnostic: &Diagnostic) -> String {
    at_line(diagnostic.line, &diagnostic.message)
}

fn at_line(line: Option<u32>, message: &str) -> String {
    line.map_or_else(|| message.to_owned(), |line| format!("line {line}: {message}"))
}

/// A verdict in the making.
struct Draft {
    verdict: Verdict,
}

impl Draft {
    fn new(task: &Task, candidate: &Candidate, seed: u64) -> Self {
        Self {
            verdict: Verdict {
                schema: SCHEMA,
                outcome: Outcome::Correct,
                message: String::new(),
                task: task.digest(),
                candidate: candidate.digest(),
                format: candidate.format,
                device: None,
                policy: task.policy,
                protocol: task.protocol,
                inputs: 0,
                seed: format!("{seed:016x}"),
                compiled: None,
                diagnostics: Vec::new(),
                fault: None,
                failure: None,
                accuracy: Vec::new(),
                task_error: None,
                sanitizer: None,
                performance: None,
                reward: None,
                seconds: Seconds::default(),
            },
        }
    }

    /// Adds what it is worth.
    fn finish(mut self, scheme: &Scheme, cost: &Cost) -> Verdict {
        let side = |name: &str| {
            let compared = self.verdict.performance.as_ref()?.baselines.get(name)?;
            Some(Interval { estimate: compared.speedup, low: compared.low, high: compared.high })
        };
        let judgement = match self.verdict.outcome {
            Outcome::Correct => Judgement::Correct { eager: side("eager"), compile: side("compile") },
            outcome if outcome.is_verdict() => Judgement::Incorrect,
            _ => Judgement::Unjudged,
        };
        self.verdict.reward = reward(scheme, &judgement, cost);
        self.verdict
    }

    fn task_error(mut self, error: TaskError) -> Verdict {
        self.set_task_error(error);
        self.verdict
    }

    fn set_task_error(&mut self, error: TaskError) {
        self.verdict.outcome = Outcome::TaskError;
        self.verdict.message = match error.line {
            Some(line) => format!("the task, line {line}: {}", error.message),
            None => error.message.clone(),
        };
        self.verdict.task_error = Some(error);
    }

    fn not_compiled(mut self, failure: CompileFailure) -> Self {
        let (outcome, diagnostics, message) = match failure {
            CompileFailure::Source(diagnostics) => {
                let first = diagnostics.first().map(in_one_line).unwrap_or_default();
                (Outcome::CompileError, diagnostics, first)
            }
            CompileFailure::Unsupported(diagnostic) => {
                let message = in_one_line(&diagnostic);
                (Outcome::Unsupported, vec![diagnostic], message)
            }
            CompileFailure::Limit(message) => (Outcome::CompileError, Vec::new(), message),
        };
        (self.verdict.outcome, self.verdict.diagnostics, self.verdict.message) = (outcome, diagnostics, message);
        self
    }

    /// Takes in what checking found; whether it is right so far.
    fn checked(&mut self, checked: Checked, inputs: u32) -> bool {
        match checked {
            Checked::Right(accuracy) => {
                self.verdict.message = "every check passed".into();
                self.verdict.inputs = inputs;
                self.verdict.accuracy = accuracy;
                return true;
            }
            Checked::Fault(fault, input) => {
                self.verdict.inputs = input;
                self.set_fault(fault);
            }
            Checked::Wrong(failure) => {
                self.verdict.inputs = failure.input;
                self.set_failure(failure);
            }
            Checked::Task(error) => self.set_task_error(error),
        }
        false
    }

    /// Takes in what the tools found; whether it is right so far.
    fn sanitized(&mut self, sanitized: Sanitized) -> bool {
        match sanitized {
            Sanitized::Clean(tools) => self.verdict.sanitizer = Some(format!("nothing found by {}", tools.join(", "))),
            Sanitized::NotRun(why) => self.verdict.sanitizer = Some(format!("not run: {why}")),
            Sanitized::Fault(fault) => {
                // The tools see the first input alone.
                self.verdict.inputs = 1;
                self.set_fault(fault);
                return false;
            }
        }
        true
    }

    fn set_fault(&mut self, fault: Fault) {
        self.verdict.outcome = fault.kind.into();
        self.verdict.message = at_line(fault.line, &fault.message);
        self.verdict.fault = Some(fault);
    }

    fn set_failure(&mut self, failure: Failure) {
        self.verdict.outcome = verify::outcome(&failure.judgement);
        self.verdict.message = verify::summary(&failure);
        self.verdict.failure = Some(failure);
    }

    fn timed(&mut self, timed: Timed) {
        match timed {
            Timed::Done(performance) => self.verdict.performance = Some(performance),
            Timed::Fault(fault) => self.set_fault(fault),
            Timed::Wrong(failure) => self.set_failure(failure),
            Timed::Task(error) => self.set_task_error(error),
        }
    }
}
