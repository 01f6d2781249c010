//! From a candidate's source to something that can run: on CPU cores, in parallel, cached by content.
//!
//! | format | for the GPU | for the CPU device |
//! |---|---|---|
//! | `kernel` | NVRTC in a worker process (`worker`, `nvrtc`), declarations read by `cubin` | g++ (`host`) |
//! | `launch` | nvcc; what its host code starts is recorded (`nvcc`, `recorder`) | g++ (`host`) |
//!
//! Invariant: no compiler runs in this process, and none runs longer or takes more memory than its limits say.

pub mod audit;
mod cache;
pub mod cubin;
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
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::candidate::{Candidate, Format};
use crate::fault::{EvaluatorError, Fault};
use crate::header::task_header;
use crate::kept;
use crate::program::Program;
use crate::task::TaskSpec;

use cache::{Cache, Flights, Key, Outcome};
use host::HostToolchain;
use process::Limits;
use recorder::GpuFacts;
use toolkit::Toolkit;
use worker::{Answer, Pool, Reply, Request, WorkerCommand};

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

/// What to compile for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A GPU of an architecture: `sm_90`.
    Gpu {
        /// As compilers call it.
        architecture: String,
        /// What host code may ask about it.
        facts: Arc<GpuFacts>,
    },
    /// The CPU device.
    Cpu,
}

/// Bytes that the cache may take.
const CACHE_BYTES: u64 = 4 << 30;

/// Compiles candidates: any number of threads may ask at once.
pub struct Compiler {
    toolkit: Toolkit,
    cache: Cache,
    pool: Pool,
    host: Option<Arc<HostToolchain>>,
    flights: Flights<Key, Result<Outcome, EvaluatorError>>,
    nvrtc_identity: OnceLock<Result<String, EvaluatorError>>,
    nvcc: OnceLock<Result<nvcc::Nvcc, EvaluatorError>>,
    /// For what is compiled once.
    folder: PathBuf,
}

impl Compiler {
    /// With the compilers of a toolkit, a folder for results, and how many compilers may run at a time.
    pub fn new(toolkit: Toolkit, cache: &Path, workers: usize) -> Result<Self, EvaluatorError> {
        Self::with_worker(toolkit, cache, workers, WorkerCommand::of_this_program()?, Limits::default())
    }

    /// The same with another program for workers, and other limits.
    pub fn with_worker(
        toolkit: Toolkit,
        cache: &Path,
        workers: usize,
        mut command: WorkerCommand,
        limits: Limits,
    ) -> Result<Self, EvaluatorError> {
        let opened = Cache::open(cache, CACHE_BYTES).map_err(|error| about(cache, &error))?;
        if let Ok(files) = toolkit.nvrtc() {
            let folder = nvrtc::search_path(cache, files).map_err(|error| about(cache, &error))?;
            command.variables.push(("LD_LIBRARY_PATH".to_owned(), folder.display().to_string()));
        }
        Ok(Self {
            toolkit,
            cache: opened,
            pool: Pool::new(command, limits, workers),
            host: None,
            flights: Flights::default(),
            nvrtc_identity: OnceLock::new(),
            nvcc: OnceLock::new(),
            folder: std::path::absolute(cache).map_err(|error| about(cache, &error))?,
        })
    }

    /// Lets it compile for the CPU device.
    pub fn with_host(mut self, host: Arc<HostToolchain>) -> Self {
        self.host = Some(host);
        self
    }

    /// Compiles a candidate, unless that was done before.
    pub fn compile(&self, candidate: &Candidate, spec: &TaskSpec, target: &Target) -> Result<Outcome, EvaluatorError> {
        let header = task_header(spec);
        let key = self.key(candidate, &header, target)?;
        let work = || match self.cache.get(&key) {
            Some(outcome) => Ok(outcome),
            None => self.build(&Work { candidate, spec, header: &header, target, key: &key }),
        };
        self.flights.join(&key, work, Err(EvaluatorError::new("compiling failed in another thread")))
    }

    fn key(&self, candidate: &Candidate, header: &str, target: &Target) -> Result<Key, EvaluatorError> {
        let source = candidate.source.as_str();
        match (target, candidate.format) {
            (Target::Cpu, format) => {
                Ok(Key::of(&["cpu", &format!("{format:?}"), &self.host()?.identity(), header, source]))
            }
            (Target::Gpu { architecture, facts }, Format::Launch) => {
                let nvcc = self.nvcc()?;
                let options = nvcc.options(architecture).join(" ") + &nvcc::SKIPPED.join(" ");
                let facts = serde_json::to_string(facts.as_ref()).expect("plain data");
                Ok(Key::of(&["launch", &nvcc.version, &options, nvcc.recorder.identity(), &facts, header, source]))
            }
            (Target::Gpu { architecture, .. }, Format::Kernel) => {
                let options = nvrtc::options(architecture).join(" ");
                let headers = nvrtc::headers(header).into_iter().map(|(name, text)| format!("{name}\0{text}\0"));
                Ok(Key::of(&["kernel", &self.nvrtc_identity()?, &options, &headers.collect::<String>(), source]))
            }
        }
    }

    fn build(&self, work: &Work) -> Result<Outcome, EvaluatorError> {
        let turn = self.pool.turn();
        let broken = |error: std::io::Error| {
            EvaluatorError::new(format!("the compile cache: {error}")).with_hint(kept::UNWRITABLE)
        };
        let workshop = self.cache.workshop().map_err(broken)?;
        let outcome = match (work.target, work.candidate.format) {
            (Target::Cpu, _) => self.host()?.build(work.candidate, work.header, workshop.path())?,
            (Target::Gpu { architecture, facts }, Format::Launch) => {
                self.launch(work, (architecture, facts), workshop.path())?
            }
            (Target::Gpu { architecture, .. }, Format::Kernel) => {
                self.kernel(work, architecture, &turn, workshop.path())?
            }
        };
        self.cache.put(work.key, outcome).map_err(broken)
    }

    fn launch(
        &self,
        work: &Work,
        (architecture, facts): (&str, &GpuFacts),
        folder: &Path,
    ) -> Result<Outcome, EvaluatorError> {
        let source = work.candidate.source.as_str();
        let job = nvcc::Job { source, task_header: work.header, architecture, spec: work.spec, facts };
        self.nvcc()?.build(&job, folder, self.pool.limits())
    }

    fn kernel(
        &self,
        work: &Work,
        architecture: &str,
        turn: &worker::Turn,
        folder: &Path,
    ) -> Result<Outcome, EvaluatorError> {
        let start = Instant::now();
        let source = work.candidate.source.as_str();
        let output = folder.join("candidate.cubin");
        let request = Request {
            source: source.to_owned(),
            headers: nvrtc::headers(work.header),
            options: self.nvrtc_options(architecture)?,
            output: output.clone(),
        };
        let (log, version) = match turn.ask(self.toolkit.nvrtc()?, &request)? {
            Reply::Answered(Answer::Compiled(log), version) => (log, version),
            Reply::Answered(Answer::Rejected(log), _) => {
                if let Some(fault) = self.toolkit.headers()?.missing_in(&log) {
                    return Err(fault);
                }
                return Ok(Err(CompileFailure::Source(without_header(diagnostics::diagnostics(&log, source), source))));
            }
            Reply::Answered(Answer::Broken(reason), _) | Reply::TimedOut(reason) | Reply::Crashed(reason) => {
                return Ok(Err(CompileFailure::Limit(reason)));
            }
            Reply::Answered(Answer::Failed(reason), _) => return Err(EvaluatorError::new(reason)),
        };
        let cubin = std::fs::read(&output).map_err(|error| about(&output, &error))?;
        let tensors = u32::try_from(work.spec.read().count() + work.spec.outputs.len()).unwrap_or(u32::MAX - 1);
        let declared = match cubin::declared(&cubin, &log, source, tensors) {
            Ok(declared) => declared,
            Err(faults) => return Ok(Err(CompileFailure::Source(faults))),
        };
        Ok(Ok(Built {
            artifact: Artifact::Cubin(output),
            program: Program::declared(&declared.launches),
            scratch_bytes: declared.scratch_bytes,
            resources: declared.resources,
            compiler: format!("NVRTC {version}"),
            seconds: start.elapsed().as_secs_f64(),
        }))
    }

    fn nvrtc_options(&self, architecture: &str) -> Result<Vec<String>, EvaluatorError> {
        let mut options = nvrtc::options(architecture);
        options.extend(self.toolkit.headers()?.folders().iter().map(|folder| format!("-I{}", folder.display())));
        Ok(options)
    }

    fn host(&self) -> Result<&HostToolchain, EvaluatorError> {
        self.host.as_deref().ok_or_else(|| EvaluatorError::new("there is no compiler for the CPU device"))
    }

    fn nvcc(&self) -> Result<&nvcc::Nvcc, EvaluatorError> {
        let found = self.nvcc.get_or_init(|| {
            let headers = self.toolkit.headers()?;
            nvcc::Nvcc::new(self.toolkit.nvcc()?, headers.clone(), &headers_identity(headers)?, &self.folder)
        });
        found.as_ref().map_err(Clone::clone)
    }

    /// The library's own content: NVRTC has no way to tell its patch release.
    fn nvrtc_identity(&self) -> Result<String, EvaluatorError> {
        let identify = || {
            let mut hasher = blake3::Hasher::new();
            let library = &self.toolkit.nvrtc()?.library;
            hasher.update_mmap(library).map_err(|error| about(library, &error))?;
            hasher.update(headers_identity(self.toolkit.headers()?)?.as_bytes());
            Ok(hasher.finalize().to_hex().to_string())
        };
        self.nvrtc_identity.get_or_init(identify).clone()
    }
}

/// What tells two sets of headers apart: the files that each of their parts is known by.
pub(crate) fn headers_identity(headers: &headers::Headers) -> Result<String, EvaluatorError> {
    let mut hasher = blake3::Hasher::new();
    for (file, path) in headers.telling() {
        hasher.update(file.as_bytes()).update(&[0]);
        if let Some(path) = path {
            hasher.update_mmap(&path).map_err(|error| about(&path, &error))?;
        }
        hasher.update(&[0]);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Without `task.h` nothing that a candidate names is known; that is said first.
fn without_header(mut found: Vec<Diagnostic>, source: &str) -> Vec<Diagnostic> {
    if !source.contains("task.h") {
        found.insert(0, Diagnostic { line: Some(1), column: None, message: "task.h is not included".to_owned() });
        found.truncate(diagnostics::MOST);
    }
    found
}

/// One build.
struct Work<'a> {
    candidate: &'a Candidate,
    spec: &'a TaskSpec,
    header: &'a str,
    target: &'a Target,
    key: &'a Key,
}

fn about(path: &Path, error: &std::io::Error) -> EvaluatorError {
    EvaluatorError::new(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests;
