//! Where candidates run. All that differs between devices is behind [`Backend`]: compiling, loading and running a
//! candidate, whether times can be taken, tools that watch a run, and limits. The rest of the evaluator names no device.
//!
//! A backend has cards, counted from 0: each GPU is one, and the CPU is one. For each lane of a card it makes a [`Runner`],
//! the candidates' side of that lane.

mod cpu;
mod cuda;
mod sanitizer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::candidate::Candidate;
use crate::compile::{Built, Outcome};
use crate::fault::{EvaluatorError, Fault, FaultKind};
use crate::gate::{First, Shared, TimedOut};
use crate::reference::{Arena, Described, Purpose, Reference, Task};
use crate::runner::Arguments;

use self::cpu::CpuBackend;
use self::cuda::CudaBackend;

/// The longest that a run which was cut short waits for others: they end within their own limits.
const CUT_SHORT_PATIENCE: Duration = Duration::from_secs(600);

/// Where candidates run, as a command or a stage is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU device: right or wrong, no times.
    Cpu,
    /// These GPUs, by UUID or index.
    Cuda(Vec<String>),
}

/// What can be said of a device before anything of it is started.
pub struct Usual {
    /// Of one run of a candidate, where nobody says otherwise.
    pub run_limit: Duration,
    /// What to tell who waits long for a verdict.
    pub slow: Option<&'static str>,
}

/// What a backend is made from.
pub struct Parts<'a> {
    /// This program, which is started again as runner and compiler.
    pub executable: &'a Path,
    /// An interpreter with torch; CUDA's compilers may lie beside it.
    pub python: &'a Path,
    /// For compiled candidates and unpacked files.
    pub cache: &'a Path,
    /// How many compilers may run at a time.
    pub cores: usize,
}

impl Device {
    /// The backend of this device.
    pub fn backend(&self, parts: &Parts) -> Result<Arc<dyn Backend>, EvaluatorError> {
        Ok(match self {
            Self::Cpu => Arc::new(CpuBackend::new(parts)?),
            Self::Cuda(gpus) => Arc::new(CudaBackend::new(gpus.clone(), parts)?),
        })
    }

    /// What can be said of it before it is started.
    pub fn usual(&self) -> &'static Usual {
        match self {
            Self::Cpu => &cpu::USUAL,
            Self::Cuda(_) => &cuda::USUAL,
        }
    }

    /// The same without the first `taken` GPUs.
    pub fn without_first(self, taken: usize) -> Self {
        match self {
            Self::Cpu => Self::Cpu,
            Self::Cuda(gpus) => Self::Cuda(gpus.into_iter().skip(taken).collect()),
        }
    }
}

/// A device's side of the evaluator.
pub trait Backend: Send + Sync {
    /// The GPU of each card, as the reference is started on it; `None` for the CPU. There is at least one.
    fn cards(&self) -> Vec<Option<&str>>;

    /// The most lanes of a card that check side by side, where the caller would have at most `wanted` on a GPU.
    fn most_lanes(&self, wanted: usize) -> usize;

    /// Makes what all candidates share, where that is not here yet. Called while the reference imports torch.
    fn make_ready(&self);

    /// Compiles a candidate for a task, unless that was done before.
    fn compile(&self, candidate: &Candidate, described: &Described) -> Result<Outcome, EvaluatorError>;

    /// The candidates' side of a lane; processes start when they are needed.
    fn runner(&self, card: usize, purpose: Purpose) -> Box<dyn Runner>;

    /// What times are taken with on a card; `None` where the device has no clock.
    fn clock(&self, card: usize) -> Option<Clock>;

    /// A tool that watches a candidate run, or why there is none.
    fn sanitizer(&self) -> Result<Box<dyn Sanitizer + '_>, String>;

    /// Waits until a run that was cut short beside others can be repeated.
    fn wait_to_repeat<'a>(&self, shared: &'a Shared<'a>) -> Repeat<'a>;

    /// After something failed on a card: why it can't be used any more, if so.
    fn examine(&self, card: usize) -> Result<(), String>;

    /// Whether it can take times.
    fn takes_times(&self) -> bool {
        self.clock(0).is_some()
    }
}

/// What times are taken with on a card.
pub struct Clock {
    /// The most lanes for clocks: they run one after another, and prepare meanwhile.
    pub lanes: usize,
    /// The file that clocks of other processes lock, too.
    pub file: PathBuf,
}

/// Held while a run is repeated that was cut short beside others.
pub struct Repeat<'a> {
    // In the order in which they have to go.
    _timed_out: TimedOut<'a>,
    _first: Option<First<'a>>,
}

/// The candidates' side of a lane: it holds one candidate at a time, in a process or two.
pub trait Runner: Send {
    /// Brings a candidate into a process that has the arena mapped.
    fn load(&mut self, built: &Built, arena: &Arena, limit: Duration) -> Result<Result<(), Fault>, EvaluatorError>;

    /// Runs the loaded candidate once.
    fn run(&mut self, arguments: &Arguments, turn: &Turn) -> Result<Ran, EvaluatorError>;

    /// The loaded candidate, to be timed; an error where the device has no clock.
    fn timed(&mut self) -> Result<&mut dyn Timed, EvaluatorError>;

    /// Leaves nothing of this candidate for the next one.
    fn tidy(&mut self);

    /// Ends the candidate's process.
    fn discard(&mut self);
}

/// Which run of a candidate this is.
pub struct Turn<'a> {
    /// The poison that outputs were filled with: 0, then 1.
    pub pattern: u8,
    /// Whether this candidate never ran before.
    pub is_first: bool,
    /// The order of threads follows from it, where a device can choose that.
    pub order: u64,
    /// Of one run with nobody beside it.
    pub limit: Duration,
    /// Who else uses the card, if others may.
    pub shared: Option<&'a Shared<'a>>,
}

/// How a run ended.
pub enum Ran {
    /// Without a fault. Whether it is right is another question.
    Well,
    /// With a fault.
    Badly(Fault),
    /// It was cut short beside others, which says nothing yet.
    CutShort,
}

impl Ran {
    /// Whether a time-out is the candidate's own is known only where nobody else worked.
    fn new(run: Result<(), Fault>, had_company: bool) -> Self {
        match run {
            Ok(()) => Self::Well,
            Err(fault) if fault.kind == FaultKind::Timeout && had_company => Self::CutShort,
            Err(fault) => Self::Badly(fault),
        }
    }
}

/// What is timed beside the baselines: a candidate, as its runner runs it.
pub trait Timed {
    /// Milliseconds of GPU time of one run with cold caches.
    fn time(&mut self, arguments: &Arguments, limit: Duration) -> Result<Result<f64, Fault>, EvaluatorError>;

    /// Summed milliseconds of all that the GPU does for one run, where that can be had. It runs in any case.
    fn activity(
        &mut self,
        arguments: &Arguments,
        limit: Duration,
    ) -> Result<Result<Option<f64>, Fault>, EvaluatorError>;
}

/// A tool that watches candidates run.
pub trait Sanitizer {
    /// Runs a candidate below it, on the inputs of one seed.
    fn watch(&self, card: usize, reference: &mut Reference, watched: &Watched) -> Result<Sanitized, EvaluatorError>;
}

/// What a sanitizer watches.
pub struct Watched<'a> {
    /// The task.
    pub task: &'a Task,
    /// The candidate.
    pub built: &'a Built,
    /// Draws the inputs.
    pub seed: u64,
    /// Of one run that nothing watches.
    pub limit: Duration,
}

/// What came of watching.
pub enum Sanitized {
    /// Nothing was found by these tools.
    Clean(Vec<&'static str>),
    /// A tool found something.
    Fault(Fault),
    /// It could not run here, for this reason. Says nothing of the candidate.
    NotRun(String),
}
