//! From a candidate's source to something that can run: on CPU cores, in parallel, cached by content.
//!
//! Each device has a compiler of its own, [`cuda`] and [`cpu`]; what was compiled is kept for both by `Builds`.
//!
//! | format | for the GPU | for the CPU device |
//! |---|---|---|
//! | `kernel` | NVRTC in a worker process (`worker`, `nvrtc`), declarations read by `cubin` | g++ (`host`) |
//! | `launch` | nvcc; what its host code starts is recorded (`nvcc`, `recorder`) | g++ (`host`) |
//!
//! Invariant: no compiler runs in this process, and none runs longer or takes more memory than its limits say.

pub mod audit;
mod cache;
pub mod cpu;
pub mod cubin;
pub mod cuda;
pub mod diagnostics;
mod guard;
pub mod headers;
pub mod host;
mod host_messages;
mod names;
pub mod nvcc;
pub mod nvrtc;
mod own_name;
mod prepared;
pub mod process;
pub mod recorder;
mod resources;
pub mod rewrite;
pub mod tokens;
pub mod toolkit;
pub mod worker;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::fault::{EvaluatorError, Fault};
use crate::kept;
use crate::program::Program;

use cache::{Cache, Flights, Key};
use process::Limits;
use worker::{Pool, WorkerCommand};

pub use cache::Outcome;
pub use worker::worker_main;

/// What a compiler says of one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnostic {
    /// In the candidate's source, counted from one; `None` where the compiler names none.
    pub line: Option<u32>,
    /// Likewise.
    pub column: Option<u32>,
    /// One line.
    pub message: String,
}

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

/// One launch that a `kernel` candidate declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredLaunch {
    /// The kernel's symbol in the module.
    pub symbol: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: u32,
    /// How many parameters the kernel takes: the task's tensors, and perhaps the scratch buffer.
    pub arguments: u32,
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

/// Why there is nothing to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CompileFailure {
    /// The source is wrong.
    Source(Vec<Diagnostic>),
    /// The source needs what the device does not offer (inline PTX on the CPU device, say).
    Unsupported(Diagnostic),
    /// It compiles, but its host code ended badly when what it starts was recorded.
    Fault(Fault),
    /// The compiler took too long, or too much memory.
    Limit(String),
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

/// Without `task.h` nothing that a candidate names is known; that is said first.
fn without_header(mut found: Vec<Diagnostic>, source: &str) -> Vec<Diagnostic> {
    if !source.contains("task.h") {
        found.insert(0, Diagnostic { line: Some(1), column: None, message: "task.h is not included".to_owned() });
        found.truncate(diagnostics::MOST);
    }
    found
}

fn about(path: &Path, error: &std::io::Error) -> EvaluatorError {
    EvaluatorError::new(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests;
