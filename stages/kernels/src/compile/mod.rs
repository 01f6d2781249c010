//! From a candidate's source to something that can run: on CPU cores, in parallel, cached by content.
//!
//! Each device has a compiler of its own, [`cuda`] and [`cpu`]; what was compiled is kept for both by `Builds`.
//!
//! | format | for the GPU | for the CPU device |
//! |---|---|---|
//! | `kernel` | NVRTC in a worker process (`worker`, `nvrtc`), declarations read by `cubin` | g++ (the emulator) |
//! | `launch` | nvcc; what its host code starts is recorded (`nvcc`, `recorder`) | g++ (the emulator) |
//!
//! Invariant: no compiler runs in this process, and none runs longer or takes more memory than its limits say.

mod cache;
pub mod cpu;
pub mod cubin;
pub mod cuda;
pub mod diagnostics;
pub mod headers;
pub mod nvcc;
pub mod nvrtc;
mod prepared;
pub mod recorder;
mod resources;
pub mod toolkit;
pub mod worker;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::fault::EvaluatorError;
use crate::kept;
use crate::program::Program;

use cache::{Cache, Flights, Key};
use process::Limits;
use worker::{Pool, WorkerCommand};

pub use cache::Outcome;
pub use cuda_agent_sandbox::diagnostic::{CompileFailure, DeclaredLaunch, Diagnostic, MOST, cut, without_header};
pub use cuda_agent_sandbox::{audit, guard, names, process, tokens};
pub use worker::worker_main;

/// What one kernel takes of a multiprocessor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelResources {
    /// The kernel's name, demangled.
    pub kernel: String,
    /// Registers a thread.
    pub registers: u32,
    /// Static shared memory a block, in bytes.
    pub shared_bytes: u32,
    /// Local memory (stack frame) a thread, in bytes.
    pub local_bytes: u32,
    /// Bytes of spilled registers that are stored.
    pub spill_store_bytes: u32,
    /// Bytes of spilled registers that are loaded.
    pub spill_load_bytes: u32,
}

/// Something that can run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Built {
    /// The files.
    pub artifact: Artifact,
    /// What it starts. On the CPU device its own programs do that: this only says what they declare.
    pub program: Program,
    /// Scratch memory that it asks for, in bytes.
    pub scratch_bytes: u64,
    /// Per kernel; empty for the CPU device.
    pub resources: Vec<KernelResources>,
    /// The compiler and its version.
    pub compiler: String,
    /// Seconds that compiling took, when it was done.
    pub seconds: f64,
}

/// The files of something that can run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Artifact {
    /// Machine code for the GPU.
    Cubin(PathBuf),
    /// Programs for the CPU device.
    Host {
        /// Built with AddressSanitizer.
        memory: PathBuf,
        /// Built to find races.
        race: PathBuf,
    },
}

impl Artifact {
    /// Each file with what it is.
    pub fn files(&self) -> Vec<(&'static str, &Path)> {
        match self {
            Self::Cubin(path) => vec![("cubin", path)],
            Self::Host { memory, race } => vec![("memory", memory), ("race", race)],
        }
    }

    /// The same with other paths.
    pub fn each(&self, path_of: impl Fn(&str, &Path) -> PathBuf) -> Self {
        match self {
            Self::Cubin(path) => Self::Cubin(path_of("cubin", path)),
            Self::Host { memory, race } => {
                Self::Host { memory: path_of("memory", memory), race: path_of("race", race) }
            }
        }
    }
}

/// Bytes that the cache may take.
const CACHE_BYTES: u64 = 4 << 30;

/// What the compilers of every device share: what was compiled before, one build of a content at a time, and turns, of
/// which there are as many as compilers may run at once.
struct Builds {
    cache: Cache,
    flights: Flights<Key, Result<Outcome, EvaluatorError>>,
    pool: Pool,
}

impl Builds {
    /// Results are kept in `cache`; `command` starts a worker, and `workers` compilers may run at a time.
    fn open(cache: &Path, command: WorkerCommand, limits: Limits, workers: usize) -> Result<Self, EvaluatorError> {
        let opened = Cache::open(cache, CACHE_BYTES).map_err(|error| about(cache, &error))?;
        Ok(Self { cache: opened, flights: Flights::default(), pool: Pool::new(command, limits, workers) })
    }

    /// What is known of a key, or else what `build` makes in a folder that it is given, in its turn.
    fn once(
        &self,
        key: &Key,
        build: impl FnOnce(&worker::Turn, &Path) -> Result<Outcome, EvaluatorError>,
    ) -> Result<Outcome, EvaluatorError> {
        let work = || match self.cache.get(key) {
            Some(outcome) => Ok(outcome),
            None => self.build(key, build),
        };
        self.flights.join(key, work, Err(EvaluatorError::new("compiling failed in another thread")))
    }

    fn build(
        &self,
        key: &Key,
        build: impl FnOnce(&worker::Turn, &Path) -> Result<Outcome, EvaluatorError>,
    ) -> Result<Outcome, EvaluatorError> {
        let turn = self.pool.turn();
        let broken = |error: std::io::Error| {
            EvaluatorError::new(format!("the compile cache: {error}")).with_hint(kept::UNWRITABLE)
        };
        let workshop = self.cache.workshop().map_err(broken)?;
        let outcome = build(&turn, workshop.path())?;
        self.cache.put(key, outcome).map_err(broken)
    }
}

fn about(path: &Path, error: &std::io::Error) -> EvaluatorError {
    EvaluatorError::new(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests;
