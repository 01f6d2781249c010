//! A reference's worker and a runner that share an arena.

use std::sync::Arc;
use std::time::Duration;

use super::pool::Ready;
use crate::compile::{Artifact, Built};
use crate::fault::{EvaluatorError, Fault};
use crate::reference::{Arena, Layout, Purpose, Reference, ReferenceServer};
use crate::runner::cpu::{CpuLimits, CpuRunner};
use crate::runner::gpu::{GpuRunner, GpuRunners};

/// Where a lane's two processes come from.
pub struct Source {
    /// The trusted side.
    pub server: ReferenceServer,
    /// The candidates' side on a GPU.
    pub runners: Option<GpuRunners>,
}

/// One lane. Both processes start when they are first needed and again after a fault.
pub struct Lane {
    // In the order in which they have to go: a worker is reaped by the server.
    runner: Option<Runner>,
    reference: Option<Reference>,
    source: Arc<Source>,
    purpose: Purpose,
}

impl Ready for Lane {
    /// As many tasks as a worker of the reference keeps (`TASKS_KEPT` in reference.py).
    const KEPT: usize = 16;

    fn has_forgotten(&self) -> bool {
        !self.reference.as_ref().is_some_and(Reference::is_usable)
    }
}

/// The process, or processes, that hold a candidate.
pub enum Runner {
    /// On a GPU.
    Gpu(GpuRunner),
    /// On the CPU device: the candidate's own programs.
    Cpu {
        /// With AddressSanitizer.
        memory: CpuRunner,
        /// With the race detector.
        race: CpuRunner,
    },
}

impl Lane {
    /// A lane without processes yet.
    pub fn new(source: Arc<Source>, purpose: Purpose) -> Self {
        Self { source, purpose, reference: None, runner: None }
    }

    /// The trusted side.
    pub fn reference(&mut self) -> Result<&mut Reference, EvaluatorError> {
        if !self.reference.as_ref().is_some_and(Reference::is_usable) {
            // A runner that maps the lost worker's arena would keep that memory alive.
            self.discard_runner();
            self.reference = Some(self.source.server.connect(self.purpose)?);
        }
        Ok(self.reference.as_mut().expect("it was just made"))
    }

    /// The candidate's side; there after [`Lane::load`].
    pub fn runner(&mut self) -> &mut Runner {
        self.runner.as_mut().expect("a candidate was loaded")
    }

    /// Both sides of a lane on a GPU, once a candidate was loaded.
    pub fn sides(&mut self) -> Result<(&mut Reference, &mut GpuRunner), EvaluatorError> {
        match (&mut self.reference, &mut self.runner) {
            (Some(reference), Some(Runner::Gpu(runner))) => Ok((reference, runner)),
            (_, Some(Runner::Cpu { .. })) => Err(EvaluatorError::new("the CPU device has no clock")),
            _ => Err(EvaluatorError::new("no candidate was loaded")),
        }
    }

    /// Brings a candidate into a runner that has the arena mapped.
    pub fn load(&mut self, built: &Built, arena: &Arena, limit: Duration) -> Result<Result<(), Fault>, EvaluatorError> {
        match &built.artifact {
            Artifact::Host { memory, race } => self.load_programs(memory, race, arena),
            _ => self.load_on_gpu(built, arena, limit),
        }
    }

    fn load_programs(
        &mut self,
        memory: &std::path::Path,
        race: &std::path::Path,
        arena: &Arena,
    ) -> Result<Result<(), Fault>, EvaluatorError> {
        let path = arena.path.as_deref().ok_or_else(|| EvaluatorError::new("the reference's arena is no file"))?;
        let start = |program| CpuRunner::start(program, path, arena.bytes, CpuLimits::default());
        let (memory, race) = match (start(memory)?, start(race)?) {
            (Ok(memory), Ok(race)) => (memory, race),
            (Err(fault), _) | (_, Err(fault)) => return Ok(Err(fault)),
        };
        self.runner = Some(Runner::Cpu { memory, race });
        Ok(Ok(()))
    }

    fn load_on_gpu(
        &mut self,
        built: &Built,
        arena: &Arena,
        limit: Duration,
    ) -> Result<Result<(), Fault>, EvaluatorError> {
        // Loading compiles nothing, but the first use of a context reads the driver's own code from the disk.
        let limit = limit.max(Duration::from_secs(30));
        let handle =
            arena.ipc_handle.as_deref().ok_or_else(|| EvaluatorError::new("the reference's arena is no GPU memory"))?;
        let runner = self.gpu_runner()?;
        runner.open(handle, arena.bytes)?;
        runner.load(built, limit)
    }

    fn gpu_runner(&mut self) -> Result<&mut GpuRunner, EvaluatorError> {
        if !matches!(&self.runner, Some(Runner::Gpu(runner)) if runner.is_usable()) {
            let runners =
                self.source.runners.as_ref().ok_or_else(|| EvaluatorError::new("no GPU was given to this lane"))?;
            self.runner = Some(Runner::Gpu(runners.start(self.purpose)?));
        }
        match self.runner.as_mut() {
            Some(Runner::Gpu(runner)) => Ok(runner),
            _ => unreachable!("it was just made"),
        }
    }

    /// Runs a candidate once in a process of its own below a tool, on the first set.
    pub fn run_below(
        &self,
        tool: &[String],
        built: &Built,
        layout: &Layout,
        limit: Duration,
    ) -> Result<Result<(), Fault>, EvaluatorError> {
        let runners =
            self.source.runners.as_ref().ok_or_else(|| EvaluatorError::new("no GPU was given to this lane"))?;
        let handle = layout
            .arena
            .ipc_handle
            .as_deref()
            .ok_or_else(|| EvaluatorError::new("the reference's arena is no GPU memory"))?;
        let mut runner = runners.start_below(tool)?;
        runner.open(handle, layout.arena.bytes)?;
        let run = match runner.load(built, limit)? {
            Ok(()) => runner.run(&layout.sets[0], limit)?,
            Err(fault) => Err(fault),
        };
        // The tool writes its findings when the process ends.
        runner.finish(limit);
        Ok(run)
    }

    /// Ends the candidate's process: its own code ran in it, or it is of no more use.
    pub fn discard_runner(&mut self) {
        self.runner = None;
    }

    /// Resets it unless what was done in it went well.
    pub fn keep_if(&mut self, is_well: bool) {
        if !is_well {
            self.reset();
        }
    }

    /// Ends both processes, after an error whose cause could be either.
    pub fn reset(&mut self) {
        self.runner = None;
        self.reference = None;
    }
}
