//! The compilers for GPUs: NVRTC in worker processes for `kernel` candidates, nvcc and the recorder for `launch` ones.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::cache::Key;
use super::process::Limits;
use super::recorder::GpuFacts;
use super::toolkit::Toolkit;
use super::without_header;
use super::worker::{Answer, Reply, Request, Turn, WorkerCommand};
use super::{Artifact, Builds, Built, CompileFailure, Outcome, about, cubin, diagnostics, headers, nvcc, nvrtc};
use crate::candidate::{Candidate, Format};
use crate::fault::EvaluatorError;
use crate::header::task_header;
use crate::program::Program;
use crate::task::TaskSpec;

/// The GPU to compile for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GpuTarget {
    /// Its architecture, as compilers call it: `sm_90`.
    pub architecture: String,
    /// What host code may ask about it.
    pub facts: Arc<GpuFacts>,
}

/// Compiles candidates for GPUs: any number of threads may ask at once.
pub struct CudaCompiler {
    toolkit: Toolkit,
    builds: Builds,
    nvrtc_identity: OnceLock<Result<String, EvaluatorError>>,
    nvcc: OnceLock<Result<nvcc::Nvcc, EvaluatorError>>,
    /// For what is compiled once.
    folder: PathBuf,
}

impl CudaCompiler {
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
        if let Ok(files) = toolkit.nvrtc() {
            let folder = nvrtc::search_path(cache, files).map_err(|error| about(cache, &error))?;
            command.variables.push(("LD_LIBRARY_PATH".to_owned(), folder.display().to_string()));
        }
        Ok(Self {
            toolkit,
            builds: Builds::open(cache, command, limits, workers)?,
            nvrtc_identity: OnceLock::new(),
            nvcc: OnceLock::new(),
            folder: std::path::absolute(cache).map_err(|error| about(cache, &error))?,
        })
    }

    /// Compiles a candidate, unless that was done before.
    pub fn compile(
        &self,
        candidate: &Candidate,
        spec: &TaskSpec,
        target: &GpuTarget,
    ) -> Result<Outcome, EvaluatorError> {
        let header = task_header(spec);
        let key = self.key(candidate, &header, target)?;
        let work = Work { source: &candidate.source, spec, header: &header };
        self.builds.once(&key, |turn, folder| match candidate.format {
            Format::Launch => self.launch(&work, target, folder),
            Format::Kernel => self.kernel(&work, target, turn, folder),
        })
    }

    fn key(&self, candidate: &Candidate, header: &str, target: &GpuTarget) -> Result<Key, EvaluatorError> {
        let (source, architecture) = (candidate.source.as_str(), &target.architecture);
        Ok(match candidate.format {
            Format::Launch => {
                let nvcc = self.nvcc()?;
                let options = nvcc.options(architecture).join(" ") + &nvcc::SKIPPED.join(" ");
                let facts = serde_json::to_string(target.facts.as_ref()).expect("plain data");
                Key::of(&["launch", &nvcc.version, &options, nvcc.recorder.identity(), &facts, header, source])
            }
            Format::Kernel => {
                let options = nvrtc::options(architecture).join(" ");
                let headers = nvrtc::headers(header).into_iter().map(|(name, text)| format!("{name}\0{text}\0"));
                Key::of(&["kernel", &self.nvrtc_identity()?, &options, &headers.collect::<String>(), source])
            }
        })
    }

    fn launch(&self, work: &Work, target: &GpuTarget, folder: &Path) -> Result<Outcome, EvaluatorError> {
        let GpuTarget { architecture, facts } = target;
        let job = nvcc::Job { source: work.source, task_header: work.header, architecture, spec: work.spec, facts };
        self.nvcc()?.build(&job, folder, self.builds.pool.limits())
    }

    fn kernel(&self, work: &Work, target: &GpuTarget, turn: &Turn, folder: &Path) -> Result<Outcome, EvaluatorError> {
        let start = Instant::now();
        let source = work.source;
        let output = folder.join("candidate.cubin");
        let request = Request {
            source: source.to_owned(),
            headers: nvrtc::headers(work.header),
            options: self.nvrtc_options(&target.architecture)?,
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

    pub(super) fn nvcc(&self) -> Result<&nvcc::Nvcc, EvaluatorError> {
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

/// One build.
struct Work<'a> {
    source: &'a str,
    spec: &'a TaskSpec,
    header: &'a str,
}
