//! The CPU device: candidates are programs for the host, which say right or wrong and are never timed.

use std::path::Path;
use std::time::{Duration, Instant};

use cuda_agent_emulator::{CpuLimits, CpuRunner, HostToolchain, Span};

use super::{Backend, CUT_SHORT_PATIENCE, Clock, Parts, Ran, Repeat, Runner, Sanitizer, Timed, Turn, Usual};
use crate::candidate::Candidate;
use crate::compile::cpu::CpuCompiler;
use crate::compile::{Artifact, Built, Outcome};
use crate::fault::{EvaluatorError, Fault};
use crate::gate::Shared;
use crate::reference::{Arena, Described, Purpose};
use crate::runner::Arguments;

/// What can be said of it before it is started.
pub const USUAL: Usual = Usual {
    run_limit: Duration::from_secs(60),
    slow: Some(
        "the CPU device takes minutes for inputs of full size; `--set NAME=VALUE` makes them smaller, `--inputs 1` checks \
         fewer",
    ),
};

/// The cores are the limit, up to here.
const MOST_LANES: usize = 64;

/// The CPU as one card.
pub struct CpuBackend {
    compiler: CpuCompiler,
}

impl CpuBackend {
    /// With the machine's g++.
    pub fn new(parts: &Parts) -> Result<Self, EvaluatorError> {
        let host = HostToolchain::find(&parts.cache.join("runtimes"))?;
        Ok(Self { compiler: CpuCompiler::new(host, &parts.cache.join("compiled"), parts.cores)? })
    }
}

impl Backend for CpuBackend {
    fn cards(&self) -> Vec<Option<&str>> {
        vec![None]
    }

    fn most_lanes(&self, _wanted: usize) -> usize {
        MOST_LANES
    }

    fn make_ready(&self) {
        self.compiler.make_runtime_ready();
    }

    fn compile(&self, candidate: &Candidate, described: &Described) -> Result<Outcome, EvaluatorError> {
        self.compiler.compile(candidate, &described.spec)
    }

    fn runner(&self, _card: usize, _purpose: Purpose) -> Box<dyn Runner> {
        Box::new(Programs::default())
    }

    fn clock(&self, _card: usize) -> Option<Clock> {
        None
    }

    fn sanitizer(&self) -> Result<Box<dyn Sanitizer + '_>, String> {
        Err("the CPU device has AddressSanitizer and a race detector of its own".into())
    }

    fn wait_to_repeat<'a>(&self, shared: &'a Shared<'a>) -> Repeat<'a> {
        Repeat { _timed_out: shared.after_timeout(CUT_SHORT_PATIENCE), _first: None }
    }

    fn examine(&self, _card: usize) -> Result<(), String> {
        Ok(())
    }
}

/// The candidate's own two programs, once they are started.
#[derive(Default)]
struct Programs {
    started: Option<Started>,
}

struct Started {
    /// With AddressSanitizer.
    memory: CpuRunner,
    /// With the race detector.
    race: CpuRunner,
}

impl Started {
    fn new(memory: &Path, race: &Path, arena: &Arena) -> Result<Result<Self, Fault>, EvaluatorError> {
        let path = arena.file()?;
        let start = |program| CpuRunner::start(program, path, arena.bytes, CpuLimits::default());
        Ok(match (start(memory)?, start(race)?) {
            (Ok(memory), Ok(race)) => Ok(Self { memory, race }),
            (Err(fault), _) | (_, Err(fault)) => Err(fault),
        })
    }
}

impl Runner for Programs {
    fn load(&mut self, built: &Built, arena: &Arena, _limit: Duration) -> Result<Result<(), Fault>, EvaluatorError> {
        let Artifact::Host { memory, race } = &built.artifact else {
            return Err(EvaluatorError::new("this candidate was not compiled for the CPU device"));
        };
        Ok(Started::new(memory, race, arena)?.map(|started| self.started = Some(started)))
    }

    fn run(&mut self, arguments: &Arguments, turn: &Turn) -> Result<Ran, EvaluatorError> {
        let Started { memory, race } = self.started.as_mut().expect("a candidate was loaded");
        // The second pattern runs in the program that finds races, in another order of threads.
        let program = if turn.pattern == 0 { memory } else { race };
        let span = |[offset, bytes]: [u64; 2]| Span { offset, bytes };
        let tensors: Vec<Span> = arguments.tensors.iter().copied().map(span).collect();
        let start = Instant::now();
        let run = program.run(turn.order, &tensors, span(arguments.scratch), turn.limit)?;
        Ok(Ran::new(run.map(drop), turn.shared.is_some_and(|shared| shared.had_company(start))))
    }

    fn timed(&mut self) -> Result<&mut dyn Timed, EvaluatorError> {
        Err(EvaluatorError::new("the CPU device has no clock"))
    }

    /// The candidate's own code ran in these processes.
    fn tidy(&mut self) {
        self.discard();
    }

    fn discard(&mut self) {
        self.started = None;
    }
}
