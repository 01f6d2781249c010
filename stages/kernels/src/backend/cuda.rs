//! GPUs: candidates are machine code that runners replay, checked side by side and timed alone.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::sanitizer::ComputeSanitizer;
use super::{Backend, CUT_SHORT_PATIENCE, Clock, Parts, Ran, Repeat, Runner, Sanitizer, Timed, Turn, Usual};
use crate::candidate::Candidate;
use crate::compile::cuda::{CudaCompiler, GpuTarget};
use crate::compile::toolkit::Toolkit;
use crate::compile::{Built, Outcome};
use crate::fault::{EvaluatorError, Fault};
use crate::gate::{First, Shared};
use crate::reference::{Arena, Described, Purpose};
use crate::runner::Arguments;
use crate::runner::gpu::{GpuRunner, GpuRunners};

/// What can be said of it before it is started.
pub const USUAL: Usual = Usual { run_limit: Duration::from_secs(5), slow: None };

/// While one clock runs, the next ones prepare.
const CLOCKS: usize = 3;

/// Of a candidate's first run where others work meanwhile: a kernel that hangs keeps the card from everybody else, and an
/// H200's driver bears that for 5 s before it takes the context down the hard way.
const FIRST_BESIDE: Duration = Duration::from_secs(1);

/// A later run may be late because somebody's first one is being taken down.
const LATER_BESIDE: Duration = Duration::from_secs(10);

/// Loading compiles nothing, but the first use of a context reads the driver's own code from the disk.
const LEAST_TO_LOAD: Duration = Duration::from_secs(30);

/// Some GPUs.
pub struct CudaBackend {
    compiler: CudaCompiler,
    /// Of each GPU, how its runners are started.
    gpus: Vec<GpuRunners>,
}

impl CudaBackend {
    /// These GPUs, by UUID or index, with the compilers that lie beside the interpreter or elsewhere.
    pub fn new(gpus: Vec<String>, parts: &Parts) -> Result<Self, EvaluatorError> {
        if gpus.is_empty() {
            return Err(
                EvaluatorError::new("no GPU was found").with_hint("--device cpu judges correctness without one")
            );
        }
        let toolkit = Toolkit::find_beside(parts.python);
        let cupti = toolkit.cupti().map(Path::to_owned);
        let executable = parts.executable.to_owned();
        let runners = |gpu| GpuRunners { executable: executable.clone(), gpu, cupti: cupti.clone() };
        let gpus = gpus.into_iter().map(runners).collect();
        Ok(Self { compiler: CudaCompiler::new(toolkit, &parts.cache.join("compiled"), parts.cores)?, gpus })
    }
}

impl Backend for CudaBackend {
    fn cards(&self) -> Vec<Option<&str>> {
        self.gpus.iter().map(|runners| Some(runners.gpu.as_str())).collect()
    }

    fn most_lanes(&self, wanted: usize) -> usize {
        wanted
    }

    fn make_ready(&self) {}

    fn compile(&self, candidate: &Candidate, described: &Described) -> Result<Outcome, EvaluatorError> {
        self.compiler.compile(candidate, &described.spec, &target(described)?)
    }

    fn runner(&self, card: usize, purpose: Purpose) -> Box<dyn Runner> {
        Box::new(OnGpu { runners: self.gpus[card].clone(), purpose, runner: None })
    }

    fn clock(&self, card: usize) -> Option<Clock> {
        let file = PathBuf::from(format!("/tmp/cuda-agent-clock-{}", self.gpus[card].gpu));
        Some(Clock { lanes: CLOCKS, file })
    }

    fn sanitizer(&self) -> Result<Box<dyn Sanitizer + '_>, String> {
        Ok(Box::new(ComputeSanitizer::find(&self.gpus)?))
    }

    /// One after another, and nobody's first run beside it.
    fn wait_to_repeat<'a>(&self, shared: &'a Shared<'a>) -> Repeat<'a> {
        let first = shared.first();
        Repeat { _timed_out: shared.after_timeout(CUT_SHORT_PATIENCE), _first: Some(first) }
    }

    /// A card on which no context can be made is out of service. A faulting kernel can do that to one, until it is reset.
    fn examine(&self, card: usize) -> Result<(), String> {
        let runners = &self.gpus[card];
        let started = runners.start(Purpose::Checks);
        started.map(drop).map_err(|error| format!("GPU {} is out of service: {error}", runners.gpu))
    }
}

fn target(described: &Described) -> Result<GpuTarget, EvaluatorError> {
    let [major, minor] =
        described.device.compute_capability.ok_or_else(|| EvaluatorError::new("the reference has no GPU"))?;
    let facts = described.gpu.clone();
    let facts =
        facts.map(Arc::new).ok_or_else(|| EvaluatorError::new("the reference doesn't say what its GPU can do"))?;
    Ok(GpuTarget { architecture: format!("sm_{major}{minor}"), facts })
}

/// A lane's process with a context. It is started when it is first needed and again after a fault.
struct OnGpu {
    runners: GpuRunners,
    purpose: Purpose,
    runner: Option<GpuRunner>,
}

impl OnGpu {
    fn usable(&mut self) -> Result<&mut GpuRunner, EvaluatorError> {
        if !self.runner.as_ref().is_some_and(GpuRunner::is_usable) {
            self.runner = Some(self.runners.start(self.purpose)?);
        }
        Ok(self.runner.as_mut().expect("it was just made"))
    }
}

impl Runner for OnGpu {
    fn load(&mut self, built: &Built, arena: &Arena, limit: Duration) -> Result<Result<(), Fault>, EvaluatorError> {
        let handle = arena.handle()?;
        let runner = self.usable()?;
        runner.open(handle, arena.bytes)?;
        runner.load(built, limit.max(LEAST_TO_LOAD))
    }

    fn run(&mut self, arguments: &Arguments, turn: &Turn) -> Result<Ran, EvaluatorError> {
        let runner = self.runner.as_mut().expect("a candidate was loaded");
        // Held until the process of one that faults is gone.
        let first = turn.shared.filter(|_| turn.is_first).map(Shared::first);
        let had_company = turn.shared.is_some() && !first.as_ref().is_some_and(First::is_alone);
        let limit = match (had_company, turn.is_first) {
            (false, _) => turn.limit,
            (true, true) => turn.limit.min(FIRST_BESIDE),
            (true, false) => turn.limit.max(LATER_BESIDE),
        };
        Ok(Ran::new(runner.run(arguments, limit)?, had_company))
    }

    fn timed(&mut self) -> Result<&mut dyn Timed, EvaluatorError> {
        match &mut self.runner {
            Some(runner) => Ok(runner),
            None => Err(EvaluatorError::new("no candidate was loaded")),
        }
    }

    /// Only device code ran; the next load unloads it.
    fn tidy(&mut self) {}

    fn discard(&mut self) {
        self.runner = None;
    }
}

impl Timed for GpuRunner {
    fn time(&mut self, arguments: &Arguments, limit: Duration) -> Result<Result<f64, Fault>, EvaluatorError> {
        Self::time(self, arguments, limit)
    }

    fn activity(
        &mut self,
        arguments: &Arguments,
        limit: Duration,
    ) -> Result<Result<Option<f64>, Fault>, EvaluatorError> {
        Self::activity(self, arguments, limit)
    }
}
