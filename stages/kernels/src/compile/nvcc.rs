//! `launch` candidates: nvcc makes machine code and an object of the host code, which is linked to the recorder; what it
//! starts is recorded, and only the machine code and the recording go to the GPU.
//!
//! `audit` refuses early, with a line, what the recorder has no function for. Registers and the like are read from the machine code that ptxas left in a folder of
//! intermediate files: what nvcc says has the words of both front ends and of g++ around those of ptxas.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection, ObjectSymbol};

use super::headers::Headers;
use super::prepared::Prepared;
use super::process::{self, Ended, Limits};
use super::recorder::{self, GpuFacts, MachineCode, Recorder, Subject};
use super::resources::Spills;
use super::{Artifact, Built, CompileFailure, Diagnostic, KernelResources, audit, diagnostics, resources};
use crate::candidate::Format;
use crate::fault::EvaluatorError;
use crate::header::parameter_list;
use crate::task::{TaskSpec, Tensor};

/// nvcc, g++ and what the host code is linked to.
#[derive(Clone, Debug)]
pub struct Nvcc {
    /// The driver.
    pub program: PathBuf,
    /// Its version and the host compiler's.
    pub version: String,
    /// CUDA's headers; its own folder may have them in part.
    pub headers: Headers,
    /// The stand-in of CUDA's runtime.
    pub recorder: Recorder,
    /// g++'s major version.
    host_major: u32,
    /// Where what is prepared for each architecture is kept.
    folders: PathBuf,
    /// Tells one set of headers from another.
    headers_identity: String,
    prepared: Arc<Mutex<HashMap<String, Use>>>,
}

/// How far preparing for an architecture has come.
#[derive(Debug)]
enum Use {
    /// So many sources were compiled without.
    Before(u32),
    /// A thread is at it.
    Making,
    /// It is there, or can't be had.
    Known(Option<Arc<Prepared>>),
}

/// Preparing takes as long as a few sources: whoever compiles fewer goes without.
const WORTH_PREPARING: u32 = 3;

/// Headers that nvcc includes by itself and hardly a candidate needs: C++'s special functions with all that they are made
/// of, textures and surfaces. They take a third of the time of all passes. Taken as included already, they are left out
/// at first; what doesn't compile so is compiled with all headers, and only that counts as an error.
pub const SKIPPED: [&str; 3] =
    ["-D_GLIBCXX_BITS_SPECFUN_H=1", "-D__TEXTURE_INDIRECT_FUNCTIONS_H__", "-D__SURFACE_INDIRECT_FUNCTIONS_H__"];

/// From this version on g++ can set what a source leaves undefined to zero.
const ZEROING: u32 = 12;

impl Nvcc {
    /// Asks both compilers for their versions. `headers_identity` tells one set of headers from another; `cache` keeps
    /// what is compiled once.
    pub fn new(program: &Path, headers: Headers, headers_identity: &str, cache: &Path) -> Result<Self, EvaluatorError> {
        let program = program.to_path_buf();
        let nvcc = version(&program, "--version")?;
        // Its last line names the very build: `Build cuda_13.0.r13.0/compiler.36424714_0`.
        let build = nvcc.lines().rev().find(|line| !line.is_empty()).unwrap_or_default().trim_start_matches("Build ");
        let host = version(Path::new("g++"), "-dumpfullversion")?;
        let host = host.trim();
        let recorder = Recorder::new(headers.clone(), host, headers_identity, cache);
        let host_major = host.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0);
        let version = format!("nvcc {build}, g++ {host}");
        let (folders, headers_identity) = (cache.join("prepared"), headers_identity.to_owned());
        Ok(Self {
            program,
            version,
            headers,
            recorder,
            host_major,
            folders,
            headers_identity,
            prepared: Arc::default(),
        })
    }

    /// Options that decide what is built, in one line.
    pub fn options(&self, architecture: &str) -> Vec<String> {
        let architecture = format!("-arch={architecture}");
        let fixed = ["-c", "-O1", "-std=c++17", &architecture, "-Xptxas", "-v", "-w"];
        // What lies between the members of a structure goes to a kernel, too: it must be the same in each recording.
        let zeroing = ["-Xcompiler", "-ftrivial-auto-var-init=zero"].into_iter().filter(|_| self.host_major >= ZEROING);
        fixed.into_iter().chain(zeroing).chain(["-include", "task.h"]).map(str::to_owned).collect()
    }

    /// Builds a candidate in a folder and records what it starts.
    pub fn build(
        &self,
        job: &Job,
        folder: &Path,
        limits: &Limits,
    ) -> Result<Result<Built, CompileFailure>, EvaluatorError> {
        let start = Instant::now();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text);
        let written = write(diagnostics::SOURCE_NAME, job.source).and_then(|()| write("task.h", job.task_header));
        let written = written.and_then(|()| std::fs::create_dir(folder.join(KEPT)));
        written.map_err(|error| EvaluatorError::new(format!("{}: {error}", folder.display())))?;
        match self.compile(job, folder, limits)? {
            Ended::Well(_) => {}
            Ended::Limit(message) => return Ok(Err(CompileFailure::Limit(message))),
            Ended::Badly(log) => {
                let failure = CompileFailure::Source(explained(&log, job));
                return self.headers.missing_in(&log).map_or(Ok(Err(failure)), Err);
            }
        }
        let scratch_bytes = match look_at(&read(&folder.join(OBJECT))?, job) {
            Ok(scratch_bytes) => scratch_bytes,
            Err(faults) => return Ok(Err(CompileFailure::Source(faults))),
        };
        if let Err(failure) = self.recorder.link(OBJECT, PROGRAM, folder, limits)? {
            return Ok(Err(failure));
        }
        let made = folder.join(KEPT).join(format!("candidate.{}.cubin", job.architecture));
        let module = match MachineCode::read(&read(&made)?) {
            Ok(module) => module,
            Err(message) => return Ok(Err(CompileFailure::Source(vec![nowhere(message)]))),
        };
        let tensors = job.spec.read().chain(&job.spec.outputs).map(Tensor::bytes);
        let subject = Subject {
            source: job.source,
            program: &folder.join(PROGRAM),
            arguments: tensors.chain([scratch_bytes]).collect(),
            facts: job.facts,
            module: &module,
        };
        let program = match recorder::record(&subject)? {
            Ok(program) => program,
            Err(failure) => return Ok(Err(failure)),
        };
        let resources = match self.resources(folder, job.architecture, limits)? {
            Ok(resources) => resources,
            Err(message) => return Ok(Err(CompileFailure::Limit(message))),
        };
        let cubin = folder.join("candidate.cubin");
        let moved = std::fs::rename(&made, &cubin);
        moved.map_err(|error| EvaluatorError::new(format!("{}: {error}", made.display())))?;
        Ok(Ok(Built {
            artifact: Artifact::Cubin(cubin),
            program,
            scratch_bytes,
            resources,
            compiler: self.version.clone(),
            seconds: start.elapsed().as_secs_f64(),
        }))
    }

    fn compile(&self, job: &Job, folder: &Path, limits: &Limits) -> Result<Ended, EvaluatorError> {
        let quick = match self.prepared(job.architecture, limits) {
            Some(prepared) => prepared.compile(folder, limits)?,
            None => process::run(self.quick(job.architecture, limits), folder, limits)?,
        };
        match quick {
            Ended::Badly(_) => process::run(self.command(job.architecture, limits), folder, limits),
            ended => Ok(ended),
        }
    }

    fn quick(&self, architecture: &str, limits: &Limits) -> Command {
        let mut quick = self.command(architecture, limits);
        quick.args(SKIPPED);
        quick
    }

    /// What is prepared, where there is something and it is not just being made.
    fn prepared(&self, architecture: &str, limits: &Limits) -> Option<Arc<Prepared>> {
        let known = || self.prepared.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let folder = || self.folder_of(architecture);
        let now = match known().entry(architecture.to_owned()).or_insert(Use::Before(0)) {
            Use::Known(prepared) => return prepared.clone(),
            Use::Making => return None,
            now @ Use::Before(0) => match Prepared::open(&folder(), limits) {
                Some(prepared) => {
                    let prepared = Some(Arc::new(prepared));
                    *now = Use::Known(prepared.clone());
                    return prepared;
                }
                None => {
                    *now = Use::Before(1);
                    return None;
                }
            },
            Use::Before(count) if *count < WORTH_PREPARING => {
                *count += 1;
                return None;
            }
            now => std::mem::replace(now, Use::Making),
        };
        debug_assert!(matches!(now, Use::Before(_)));
        let made = match Prepared::make(&folder(), limits, || self.quick(architecture, limits)) {
            Ok(prepared) => Some(Arc::new(prepared)),
            // The stage's log has it; nothing is decided otherwise.
            Err(why) => {
                let why = why.lines().next().unwrap_or_default();
                eprintln!(
                    "launch candidates take twice as long: nvcc's steps can't be prepared for {architecture}: {why}"
                );
                None
            }
        };
        known().insert(architecture.to_owned(), Use::Known(made.clone()));
        made
    }

    #[cfg(test)]
    pub(super) fn forget_prepared(&self) {
        self.prepared.lock().unwrap().clear();
    }

    fn folder_of(&self, architecture: &str) -> PathBuf {
        let mut hasher = blake3::Hasher::new();
        let folders = self.headers.folders().iter().map(|folder| folder.display().to_string());
        let parts = [self.version.clone(), self.headers_identity.clone(), Prepared::identity().to_owned()];
        for part in parts.into_iter().chain(self.options(architecture)).chain(folders).chain(SKIPPED.map(str::to_owned))
        {
            hasher.update(part.as_bytes()).update(&[0]);
        }
        self.folders.join(&hasher.finalize().to_hex()[..32])
    }

    fn command(&self, architecture: &str, limits: &Limits) -> Command {
        let mut command = process::limited(&self.program, limits);
        command.args(self.options(architecture)).arg("-I.");
        // It looks in the folder of its own toolkit after these.
        command.args(self.headers.folders().iter().flat_map(|folder| [OsStr::new("-I"), folder.as_os_str()]));
        command.args(["--keep", "--keep-dir", KEPT, diagnostics::SOURCE_NAME, "-o", OBJECT]);
        command
    }

    /// Of each kernel; or by which limit it can't be said. ptxas is run once more, by itself, where a kernel has a stack,
    /// to hear how much of it are spilled registers.
    fn resources(
        &self,
        folder: &Path,
        architecture: &str,
        limits: &Limits,
    ) -> Result<Result<Vec<KernelResources>, String>, EvaluatorError> {
        let kept = folder.join(KEPT);
        let cubin = kept.join(format!("candidate.{architecture}.cubin"));
        let bytes = read(&cubin)?;
        let file = ElfFile64::<Endianness>::parse(bytes.as_slice());
        let file = file.map_err(|error| EvaluatorError::new(format!("{}: {error}", cubin.display())))?;
        let described =
            |spills: Spills| resources::of_module(&file, &spills).into_iter().map(|(_, kernel)| kernel).collect();
        let kernels: Vec<KernelResources> = described(Spills::new());
        if kernels.iter().all(|kernel| kernel.local_bytes == 0) {
            return Ok(Ok(kernels));
        }
        let mut command = process::limited(&self.program.with_file_name("ptxas"), limits);
        command.args(["-v", &format!("-arch={architecture}"), "candidate.ptx", "-o", "again.cubin"]);
        Ok(match process::run(command, &kept, limits)? {
            Ended::Well(log) => Ok(described(resources::spills(resources::said_by_ptxas(&log)))),
            Ended::Limit(message) => Err(message),
            Ended::Badly(_) => Ok(kernels),
        })
    }
}

/// The host code, compiled.
const OBJECT: &str = "candidate.o";

/// The same, linked to the recorder.
const PROGRAM: &str = "record";

/// The folder of intermediate files.
const KEPT: &str = "kept";

/// What is to be built.
pub struct Job<'a> {
    /// The candidate's source.
    pub source: &'a str,
    /// `task.h`.
    pub task_header: &'a str,
    /// `sm_90`.
    pub architecture: &'a str,
    /// The task.
    pub spec: &'a TaskSpec,
    /// The GPU, for what the candidate may ask about it.
    pub facts: &'a GpuFacts,
}

impl Job<'_> {
    fn prototype(&self) -> String {
        let parameters = parameter_list(self.spec);
        format!("extern \"C\" cudaError_t launch({parameters}, void* scratch, cudaStream_t stream)")
    }
}

fn version(program: &Path, option: &str) -> Result<String, EvaluatorError> {
    let output = Command::new(program).arg(option).output();
    let output = output.map_err(|error| {
        EvaluatorError::new(format!("{}: {error}", program.display())).with_hint("launch candidates need nvcc and g++")
    })?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Where `launch` itself doesn't fit its declaration, what the compiler says of it is no help.
fn explained(log: &str, job: &Job) -> Vec<Diagnostic> {
    let mut found = diagnostics::diagnostics(log, job.source);
    for error in &mut found {
        let misfit = error.message.contains("\"launch\" has \"C\" linkage")
            || error.message.contains("cannot overload functions distinguished by return type alone");
        if misfit {
            error.message = format!("launch must be {}", job.prototype());
        }
    }
    found
}

fn nowhere(message: String) -> Diagnostic {
    Diagnostic { line: None, column: None, message }
}

fn read(path: &Path) -> Result<Vec<u8>, EvaluatorError> {
    std::fs::read(path).map_err(|error| EvaluatorError::new(format!("{}: {error}", path.display())))
}

/// Looks at the object: the symbols it needs, the function it must have, the scratch memory it asks for.
fn look_at(object: &[u8], job: &Job) -> Result<u64, Vec<Diagnostic>> {
    let file = object::File::parse(object).map_err(|error| vec![nowhere(format!("the object: {error}"))])?;
    let defined = |wanted: &str| {
        file.symbols().find(|symbol| symbol.is_global() && symbol.is_definition() && symbol.name() == Ok(wanted))
    };
    if defined("launch").is_none() {
        return Err(vec![nowhere(format!("there is no function launch: {}", job.prototype()))]);
    }
    let undefined = file.symbols().filter(|symbol| symbol.is_undefined());
    let faults = audit::refusals(undefined.filter_map(|symbol| symbol.name().ok()), Format::Launch, job.source);
    if !faults.is_empty() {
        return Err(faults);
    }
    let scratch = defined("task_scratch_bytes").and_then(|symbol| {
        let section = file.section_by_index(symbol.section_index()?).ok()?;
        section.data_range(symbol.address(), 8).ok()??.try_into().ok()
    });
    Ok(scratch.map_or(0, u64::from_le_bytes))
}
