//! The compiler for the CPU device: g++, which makes two programs of a candidate of either format.

use std::path::Path;

use cuda_agent_emulator::{HostToolchain, Programs};

use super::cache::Key;
use super::process::Limits;
use super::worker::WorkerCommand;
use super::{Artifact, Builds, Built, Outcome};
use crate::candidate::Candidate;
use crate::fault::EvaluatorError;
use crate::header::task_header;
use crate::program::Program;
use crate::task::TaskSpec;

/// Compiles candidates for the CPU device: any number of threads may ask at once.
pub struct CpuCompiler {
    host: HostToolchain,
    builds: Builds,
}

impl CpuCompiler {
    /// With a compiler, a folder for results, and how many compilers may run at a time.
    pub fn new(host: HostToolchain, cache: &Path, workers: usize) -> Result<Self, EvaluatorError> {
        // The command is for NVRTC's workers: nothing here starts one.
        let builds = Builds::open(cache, WorkerCommand::of_this_program()?, Limits::default(), workers)?;
        Ok(Self { host, builds })
    }

    /// Makes what all candidates share, where it is missing.
    pub fn make_runtime_ready(&self) {
        self.host.make_runtime_ready();
    }

    /// Compiles a candidate, unless that was done before.
    pub fn compile(&self, candidate: &Candidate, spec: &TaskSpec) -> Result<Outcome, EvaluatorError> {
        let header = task_header(spec);
        let format = format!("{:?}", candidate.format);
        let key = Key::of(&["cpu", &format, &self.host.identity(), &header, &candidate.source]);
        self.builds.once(&key, |_, folder| Ok(self.host.build(candidate, &header, folder)?.map(Built::from)))
    }
}

impl From<Programs> for Built {
    fn from(programs: Programs) -> Self {
        let Programs { memory, race, launches, scratch_bytes, compiler, seconds } = programs;
        Self {
            artifact: Artifact::Host { memory, race },
            program: Program::declared(&launches),
            scratch_bytes,
            resources: Vec::new(),
            compiler,
            seconds,
        }
    }
}
