//! `launch` candidates: nvcc makes a shared library, and an audit of its symbols says whether it may be loaded.
//!
//! `audit` says what it covers. Registers and the like are read from the machine code that ptxas left in a folder of
//! intermediate files: what nvcc says has the words of both front ends and of g++ around those of ptxas.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection, ObjectSymbol};

use super::headers::Headers;
use super::process::{self, Ended, Limits};
use super::resources::Spills;
use super::{Artifact, Built, CompileFailure, Diagnostic, KernelResources, audit, diagnostics, resources};
use crate::candidate::Format;
use crate::fault::EvaluatorError;
use crate::header::parameter_list;
use crate::task::TaskSpec;

/// nvcc and what it links against.
#[derive(Clone, Debug)]
pub struct Nvcc {
    /// The driver.
    pub program: PathBuf,
    /// `libcudart.so.13`.
    pub runtime: PathBuf,
    /// Its version and the host compiler's.
    pub version: String,
    /// CUDA's headers; its own folder may have them in part.
    pub headers: Headers,
}

impl Nvcc {
    /// Asks both compilers for their versions.
    pub fn new(program: &Path, runtime: &Path, headers: Headers) -> Result<Self, EvaluatorError> {
        let [program, runtime] = [program, runtime].map(Path::to_path_buf);
        let nvcc = version(&program, "--version")?;
        // Its last line names the very build: `Build cuda_13.0.r13.0/compiler.36424714_0`.
        let build = nvcc.lines().rev().find(|line| !line.is_empty()).unwrap_or_default().trim_start_matches("Build ");
        let host = version(Path::new("g++"), "-dumpfullversion")?;
        let version = format!("nvcc {build}, g++ {}", host.trim());
        Ok(Self { program, runtime, version, headers })
    }

    /// Options that decide what is built, in one line.
    pub fn options(architecture: &str) -> Vec<String> {
        let architecture = format!("-arch={architecture}");
        let fixed = ["-shared", "-O3", "-std=c++17", &architecture, "-Xcompiler", "-fPIC", "-Xptxas", "-v", "-w"];
        fixed.iter().chain(&["-cudart", "none", "-include", "task.h"]).map(|option| (*option).to_owned()).collect()
    }

    /// Builds a candidate in a folder.
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
        match process::run(self.command(job.architecture, limits), folder, limits)? {
            Ended::Well(_) => {}
            Ended::Limit(message) => return Ok(Err(CompileFailure::Limit(message))),
            Ended::Badly(log) => {
                let failure = CompileFailure::Source(explained(&log, job));
                return self.headers.missing_in(&log).map_or(Ok(Err(failure)), Err);
            }
        }
        let library = folder.join(LIBRARY);
        let bytes =
            std::fs::read(&library).map_err(|error| EvaluatorError::new(format!("{}: {error}", library.display())))?;
        let scratch_bytes = match look_at(&bytes, job) {
            Ok(scratch_bytes) => scratch_bytes,
            Err(faults) => return Ok(Err(CompileFailure::Source(faults))),
        };
        let resources = match self.resources(folder, job.architecture, limits)? {
            Ok(resources) => resources,
            Err(message) => return Ok(Err(CompileFailure::Limit(message))),
        };
        // They take more room than the library.
        let _ = std::fs::remove_dir_all(folder.join(KEPT));
        Ok(Ok(Built {
            artifact: Artifact::Library(library),
            launches: Vec::new(),
            scratch_bytes,
            resources,
            compiler: self.version.clone(),
            seconds: start.elapsed().as_secs_f64(),
        }))
    }

    fn command(&self, architecture: &str, limits: &Limits) -> Command {
        let mut command = process::limited(&self.program, limits);
        command.args(Self::options(architecture)).arg("-I.");
        // It looks in the folder of its own toolkit after these.
        command.args(self.headers.folders().iter().flat_map(|folder| [OsStr::new("-I"), folder.as_os_str()]));
        // The runtime is named by its full path, since the wheels lack the name that -lcudart looks for; a library that
        // knows where it is can be loaded without LD_LIBRARY_PATH.
        let runtime = self.runtime.display();
        command.args(["-Xlinker", &runtime.to_string()]);
        if let Some(folder) = self.runtime.parent() {
            command.args(["-Xlinker", "-rpath", "-Xlinker", &folder.display().to_string()]);
        }
        command.args(["--keep", "--keep-dir", KEPT, diagnostics::SOURCE_NAME, "-o", LIBRARY]);
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
        let bytes = std::fs::read(&cubin);
        let bytes = bytes.map_err(|error| EvaluatorError::new(format!("{}: {error}", cubin.display())))?;
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

const LIBRARY: &str = "candidate.so";

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

/// Looks at the finished library: the symbols it needs, the function it must have, the scratch memory it asks for.
fn look_at(library: &[u8], job: &Job) -> Result<u64, Vec<Diagnostic>> {
    let nowhere = |message: String| vec![Diagnostic { line: None, column: None, message }];
    let file = object::File::parse(library).map_err(|error| nowhere(format!("the library: {error}")))?;
    let defined =
        |wanted: &str| file.dynamic_symbols().find(|symbol| symbol.is_definition() && symbol.name() == Ok(wanted));
    if defined("launch").is_none() {
        return Err(nowhere(format!("there is no function launch: {}", job.prototype())));
    }
    let undefined = file.dynamic_symbols().filter(|symbol| symbol.is_undefined());
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
