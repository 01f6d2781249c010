//! `launch` candidates: nvcc makes a shared library, and an audit of its symbols says whether it may be loaded.
//!
//! What the audit covers: every function of another library that the candidate's host code refers to is on a written list,
//! and there is no managed memory. What it doesn't: machine instructions that the candidate writes itself (`asm("syscall")`);
//! those are the runner's sandbox's business.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use object::{Object, ObjectSection, ObjectSymbol};

use super::names::{demangle, line_of_word};
use super::process::{self, Ended, Limits};
use super::{Artifact, Built, CompileFailure, Diagnostic, diagnostics, resources};
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
}

impl Nvcc {
    /// Asks both compilers for their versions.
    pub fn new(program: &Path, runtime: &Path) -> Result<Self, EvaluatorError> {
        let [program, runtime] = [program, runtime].map(Path::to_path_buf);
        let nvcc = version(&program, "--version")?;
        // Its last line names the very build: `Build cuda_13.0.r13.0/compiler.36424714_0`.
        let build = nvcc.lines().rev().find(|line| !line.is_empty()).unwrap_or_default().trim_start_matches("Build ");
        let host = version(Path::new("g++"), "-dumpfullversion")?;
        let version = format!("nvcc {build}, g++ {}", host.trim());
        Ok(Self { program, runtime, version })
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
        written.map_err(|error| EvaluatorError::new(format!("{}: {error}", folder.display())))?;
        let log = match process::run(self.command(job.architecture, limits), folder, limits)? {
            Ended::Well(log) => log,
            Ended::Limit(message) => return Ok(Err(CompileFailure::Limit(message))),
            Ended::Badly(log) => return Ok(Err(CompileFailure::Source(explained(&log, job)))),
        };
        let library = folder.join(LIBRARY);
        let bytes =
            std::fs::read(&library).map_err(|error| EvaluatorError::new(format!("{}: {error}", library.display())))?;
        let scratch_bytes = match audit(&bytes, job) {
            Ok(scratch_bytes) => scratch_bytes,
            Err(faults) => return Ok(Err(CompileFailure::Source(faults))),
        };
        Ok(Ok(Built {
            artifact: Artifact::Library(library),
            launches: Vec::new(),
            scratch_bytes,
            resources: resources::resources(&log),
            compiler: self.version.clone(),
            seconds: start.elapsed().as_secs_f64(),
        }))
    }

    fn command(&self, architecture: &str, limits: &Limits) -> Command {
        let mut command = process::limited(&self.program, limits);
        command.args(Self::options(architecture)).arg("-I.");
        // The runtime is named by its full path, since the wheels lack the name that -lcudart looks for; a library that
        // knows where it is can be loaded without LD_LIBRARY_PATH.
        let runtime = self.runtime.display();
        command.args(["-Xlinker", &runtime.to_string()]);
        if let Some(folder) = self.runtime.parent() {
            command.args(["-Xlinker", "-rpath", "-Xlinker", &folder.display().to_string()]);
        }
        command.args([diagnostics::SOURCE_NAME, "-o", LIBRARY]);
        command
    }
}

const LIBRARY: &str = "candidate.so";

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
fn audit(library: &[u8], job: &Job) -> Result<u64, Vec<Diagnostic>> {
    let nowhere = |message: String| vec![Diagnostic { line: None, column: None, message }];
    let file = object::File::parse(library).map_err(|error| nowhere(format!("the library: {error}")))?;
    let defined =
        |wanted: &str| file.dynamic_symbols().find(|symbol| symbol.is_definition() && symbol.name() == Ok(wanted));
    if defined("launch").is_none() {
        return Err(nowhere(format!("there is no function launch: {}", job.prototype())));
    }
    let undefined = file.dynamic_symbols().filter(|symbol| symbol.is_undefined());
    let mut faults: Vec<Diagnostic> =
        undefined.filter_map(|symbol| symbol.name().ok().and_then(|name| refusal(name, job.source))).collect();
    if !faults.is_empty() {
        faults.sort_by(|one, other| (one.line, &one.message).cmp(&(other.line, &other.message)));
        faults.dedup();
        faults.truncate(diagnostics::MOST);
        return Err(faults);
    }
    let scratch = defined("task_scratch_bytes").and_then(|symbol| {
        let section = file.section_by_index(symbol.section_index()?).ok()?;
        section.data_range(symbol.address(), 8).ok()??.try_into().ok()
    });
    Ok(scratch.map_or(0, u64::from_le_bytes))
}

fn refusal(symbol: &str, source: &str) -> Option<Diagnostic> {
    if symbol.is_empty() || is_allowed(symbol) {
        return None;
    }
    let name = called(symbol);
    let message = match reason(symbol) {
        Some(reason) => format!("{name} is refused: {reason}"),
        None => format!("{name} is refused: it is not among the functions that a launch candidate may call"),
    };
    let word = name.trim_start_matches("std::");
    Some(Diagnostic { line: line_of_word(source, word), column: None, message })
}

/// As the source has it: a managed variable by its keyword, and everything of a standard class by the class.
fn called(symbol: &str) -> String {
    let name = demangle(symbol);
    match name.strip_prefix("std::").and_then(|rest| rest.split("::").next()) {
        Some(class) => format!("std::{}", class.trim_start_matches("basic_").trim_end_matches("<…>")),
        None if symbol == "__cudaRegisterManagedVar" => "__managed__".to_owned(),
        None => name,
    }
}

/// Why a symbol is refused: parts of names, and the reason for any that has one of them.
const REASONS: [(&str, &str); 6] = [
    ("Managed cudaMemPrefetch cudaMemAdvise", "managed memory can take a whole host's GPUs out of service"),
    ("Multicast", "NVLink multicast can take a whole host's GPUs out of service"),
    ("Ipc cudaMemPool cudaMemExport cudaMemImport cudaImport", "memory is not shared with other processes"),
    ("cudaMalloc cudaFree cudaHost", "memory comes from TASK_SCRATCH(bytes)"),
    (
        "cudaStreamCreate cudaStreamBegin cudaGraph cudaEvent cudaLaunchHostFunc cudaStreamAddCallback",
        "all work goes on the stream that launch is given",
    ),
    ("cudaGetDriverEntryPoint dlopen dlsym dlmopen", "functions are called by their names"),
];

/// What of C and C++ reaches out of the program, likewise.
const REACHES_OUT: &str = "system popen fork clone exec posix_spawn socket connect ptrace syscall open pthread_ thread filesystem \
    fstream filebuf condition_variable mutex random_device future";

fn reason(symbol: &str) -> Option<&'static str> {
    let known = REASONS.iter().find(|(parts, _)| has_part(symbol, parts)).map(|(_, reason)| *reason);
    let reaches_out = || "a launch candidate starts kernels and does nothing else on the host";
    known.or_else(|| has_part(symbol, REACHES_OUT).then(reaches_out))
}

fn has_part(symbol: &str, parts: &str) -> bool {
    parts.split_whitespace().any(|part| symbol.contains(part))
}

/// The whole list. The names of C and CUDA are exact; C++'s standard library is let in by its prefix, less what reaches out.
fn is_allowed(symbol: &str) -> bool {
    let listed = |list: &str| list.split_whitespace().any(|name| name == symbol);
    let standard =
        || STANDARD.split_whitespace().any(|prefix| symbol.starts_with(prefix)) && !has_part(symbol, REACHES_OUT);
    listed(TOOLCHAIN) || listed(C) || listed(RUNTIME) || is_mathematics(symbol) || standard()
}

/// Prefixes of mangled names: what is in `std`, streams and strings by their short names, `new` and `delete`.
const STANDARD: &str = "_ZSt _ZNSt _ZNKSt _ZNSo _ZNSs _ZTISt _ZTVSt _ZTTSt _ZTVN10__cxxabiv1 _Znw _Zna _Zdl _Zda";

/// What compilers and their start-up code refer to by themselves.
const TOOLCHAIN: &str = "__gmon_start__ _ITM_deregisterTMCloneTable _ITM_registerTMCloneTable __cxa_finalize __cxa_atexit \
    __cxa_guard_acquire __cxa_guard_release __cxa_guard_abort __cxa_allocate_exception __cxa_free_exception __cxa_throw \
    __cxa_begin_catch __cxa_end_catch __cxa_rethrow __cxa_pure_virtual __cxa_throw_bad_array_new_length __cxa_bad_cast \
    __gxx_personality_v0 _Unwind_Resume __stack_chk_fail __assert_fail \
    __cudaRegisterFatBinary __cudaRegisterFatBinaryEnd __cudaUnregisterFatBinary __cudaRegisterFunction __cudaRegisterVar \
    __cudaPushCallConfiguration __cudaPopCallConfiguration __cudaGetKernel __cudaLaunchKernel __cudaInitModule";

const C: &str = "memcpy memset memmove memcmp __memcpy_chk __memset_chk __memmove_chk strlen strcmp strncmp strcpy strncpy \
    malloc calloc realloc free aligned_alloc posix_memalign abort qsort bsearch rand srand rand_r \
    printf puts putchar snprintf sprintf fprintf fwrite fputs fputc fflush stdout stderr vsnprintf \
    __printf_chk __fprintf_chk __snprintf_chk __sprintf_chk";

const RUNTIME: &str = "cudaGetLastError cudaPeekAtLastError cudaGetErrorString cudaGetErrorName \
    cudaLaunchKernel cudaLaunchKernelExC cudaLaunchCooperativeKernel \
    cudaMemsetAsync cudaMemset2DAsync cudaMemset3DAsync cudaMemcpyAsync cudaMemcpy2DAsync cudaMemcpy3DAsync \
    cudaMemcpyToSymbolAsync cudaMemcpyFromSymbolAsync cudaGetSymbolAddress cudaGetSymbolSize \
    cudaFuncSetAttribute cudaFuncGetAttributes cudaFuncSetCacheConfig \
    cudaOccupancyMaxActiveBlocksPerMultiprocessor cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags \
    cudaOccupancyMaxActiveClusters cudaOccupancyMaxPotentialClusterSize cudaOccupancyAvailableDynamicSMemPerBlock \
    cudaGetDevice cudaGetDeviceProperties cudaGetDeviceProperties_v2 cudaDeviceGetAttribute \
    cudaDeviceSynchronize cudaStreamSynchronize cudaDriverGetVersion cudaRuntimeGetVersion";

/// libm: a function's name, perhaps with `f` or `l` for its type.
fn is_mathematics(symbol: &str) -> bool {
    const FUNCTIONS: &str = "acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 expm1 fabs \
        fdim floor fma fmax fmin fmod frexp hypot ilogb ldexp lgamma llrint llround log log10 log1p log2 logb lrint lround \
        modf nan nearbyint nextafter pow remainder remquo rint round scalbn sin sincos sinh sqrt tan tanh tgamma trunc";
    let listed = |name: &str| FUNCTIONS.split_whitespace().any(|function| function == name);
    listed(symbol) || symbol.strip_suffix(['f', 'l']).is_some_and(listed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_lets_in_what_launching_needs() {
        for symbol in ["cudaLaunchKernel", "memcpy", "sqrtf", "fma", "_ZSt20__throw_length_errorPKc", "_Znwm"] {
            assert!(is_allowed(symbol), "{symbol}");
        }
        for symbol in [
            "cudaMallocManaged",
            "__cudaRegisterManagedVar",
            "cuMulticastCreate",
            "cudaIpcOpenMemHandle",
            "system",
            "fork",
            "execve",
            "dlopen",
            "socket",
            "ptrace",
            "getenv",
            "_ZNSt6thread15_M_start_threadE",
            "cudaMalloc",
        ] {
            assert!(!is_allowed(symbol), "{symbol}");
        }
    }

    #[test]
    fn a_refusal_names_the_symbol_its_line_and_the_reason() {
        let refused = refusal("cudaMallocManaged", "int a;\n  cudaMallocManaged(&p, 4);\n").unwrap();
        assert_eq!(refused.line, Some(2));
        assert_eq!(
            refused.message,
            "cudaMallocManaged is refused: managed memory can take a whole host's GPUs out of service"
        );
        assert_eq!(refusal("__cudaRegisterManagedVar", "__managed__ int a;").unwrap().line, Some(1));
        assert!(refusal("getenv", "").unwrap().message.contains("not among"));
    }
}
