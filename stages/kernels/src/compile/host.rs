//! The CPU device's compiler: g++, with the embedded header and runtime (`cpu/`).
//!
//! A candidate becomes two programs: `memory`, with AddressSanitizer and the check of alignment, and `race`, whose accesses
//! call the race detector. The runtime is compiled once for each identity (compiler, flags, embedded files) and kept;
//! for each candidate only its own source is compiled.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use object::{Object, ObjectSection, ObjectSymbol, SymbolFlags};

use super::diagnostics::{MOST, cut};
use super::names::{demangle, line_of_word};
use super::process::{self, Ended, Limits};
use super::rewrite::rewrite;
use super::{Artifact, Built, CompileFailure, Diagnostic, Launch, audit, without_header};
use crate::candidate::{Candidate, Format};
use crate::fault::EvaluatorError;
use crate::kept;

/// What the candidate's file is called in the compiler's messages and in debug information.
pub const SOURCE_NAME: &str = "candidate.cu";

const RUNTIME_FLAGS: &[&str] = &["-std=c++17", "-O2", "-g1", "-fno-pie", "-w"];
/// `-O1` compiles fast and keeps lines; what C++ leaves undefined and CUDA's compiler does not exploit is defined.
/// DWARF 4, because `addr2line` takes files of version 5 for one another.
const CANDIDATE_FLAGS: &[&str] = &[
    "-std=c++17",
    "-O1",
    "-g1",
    "-gdwarf-4",
    "-fno-pie",
    "-w",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fno-finite-loops",
    "-fno-delete-null-pointer-checks",
    "-ffp-contract=off",
    "-fmax-errors=20",
    "-fno-diagnostics-show-caret",
    "-fdiagnostics-color=never",
    "-ftrack-macro-expansion=0",
];

macro_rules! embedded {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_str!(concat!("../../cpu/", $path)))),*]
    };
}

/// Every file of `cpu/`.
const FILES: &[(&str, &str)] = embedded![
    "abi.h",
    "include/cuda.h",
    "include/cuda_bf16.h",
    "include/cuda_bf16.hpp",
    "include/cuda_cpu.h",
    "include/cuda_cpu/atomics.h",
    "include/cuda_cpu/half.h",
    "include/cuda_cpu/host.h",
    "include/cuda_cpu/launch_limits.h",
    "include/cuda_cpu/math.h",
    "include/cuda_cpu/task.h",
    "include/cuda_cpu/threads.h",
    "include/cuda_cpu/vectors.h",
    "include/cuda_fp16.h",
    "include/cuda_fp16.hpp",
    "include/cuda_runtime.h",
    "include/cuda_runtime_api.h",
    "include/device_atomic_functions.h",
    "include/device_functions.h",
    "include/device_launch_parameters.h",
    "include/driver_types.h",
    "include/math_constants.h",
    "include/math_functions.h",
    "include/sm_30_intrinsics.h",
    "include/vector_functions.h",
    "include/vector_types.h",
    "runtime/fault.cpp",
    "runtime/fibers.cpp",
    "runtime/main.cpp",
    "runtime/memory.cpp",
    "runtime/race.cpp",
    "runtime/runtime.h",
];

/// One of the two programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flavour {
    Memory,
    Race,
}

impl Flavour {
    const ALL: [Self; 2] = [Self::Memory, Self::Race];

    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Race => "race",
        }
    }

    fn candidate_flags(self) -> &'static [&'static str] {
        match self {
            Self::Memory => &["-fsanitize=address,alignment", "-fno-sanitize-recover=all"],
            Self::Race => &["-fsanitize=thread", "-fno-omit-frame-pointer"],
        }
    }

    /// The race detector takes the place of ThreadSanitizer's library, which is therefore not linked.
    fn link_flags(self) -> &'static [&'static str] {
        match self {
            Self::Memory => &["-no-pie", "-fsanitize=address"],
            Self::Race => &["-no-pie"],
        }
    }

    fn runtime_flags(self) -> &'static [&'static str] {
        match self {
            Self::Memory => &["-DCUDA_CPU_ASAN"],
            Self::Race => &["-DCUDA_CPU_RACE"],
        }
    }

    fn runtime_sources(self) -> impl Iterator<Item = &'static str> {
        let ours = move |path: &&str| path.ends_with(".cpp") && (self == Self::Race || *path != "runtime/race.cpp");
        FILES.iter().map(|(path, _)| *path).filter(ours)
    }
}

/// A g++ that was found, and what the CPU device needs beside it.
#[derive(Clone, Debug)]
pub struct HostToolchain {
    compiler: PathBuf,
    version: String,
    runtimes: PathBuf,
    /// The folder of the runtime, once it is known to be whole.
    runtime: Arc<Mutex<Option<PathBuf>>>,
}

impl HostToolchain {
    /// Finds the compiler: `$CXX`, or `g++`. `runtimes` is a folder that keeps the compiled runtime.
    pub fn find(runtimes: &Path) -> Result<Self, EvaluatorError> {
        let compiler = std::env::var_os("CXX").filter(|name| !name.is_empty()).unwrap_or_else(|| "g++".into());
        let output = Command::new(&compiler).arg("--version").stderr(Stdio::null()).output();
        let version =
            output.ok().filter(|output| output.status.success()).and_then(|output| first_line(&output.stdout));
        let version = version.ok_or_else(|| {
            EvaluatorError::new(format!(
                "the CPU device needs a C++ compiler, and `{}` does not run",
                compiler.display()
            ))
            .with_hint(
                "install g++ 12 or newer with its sanitizers (Debian and Ubuntu: `apt-get install g++`), or set CXX",
            )
        })?;
        Ok(Self { compiler: compiler.into(), version, runtimes: runtimes.to_owned(), runtime: Arc::default() })
    }

    /// The first line of what the compiler says of itself.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// All that decides what a candidate becomes, but for the candidate and its header.
    pub fn identity(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for (path, content) in FILES {
            hasher.update(path.as_bytes()).update(&[0]).update(content.as_bytes()).update(&[0]);
        }
        for flags in [RUNTIME_FLAGS, CANDIDATE_FLAGS] {
            hasher.update(flags.join(" ").as_bytes()).update(&[0]);
        }
        for flavour in Flavour::ALL {
            for flags in [flavour.candidate_flags(), flavour.link_flags(), flavour.runtime_flags()] {
                hasher.update(flags.join(" ").as_bytes()).update(&[0]);
            }
        }
        format!("{} {} {}", self.version, std::env::consts::ARCH, hasher.finalize().to_hex())
    }

    /// Compiles a candidate into two programs in `folder`, which exists and is empty. `header` is the text of `task.h`.
    pub fn build(
        &self,
        candidate: &Candidate,
        header: &str,
        folder: &Path,
    ) -> Result<Result<Built, CompileFailure>, EvaluatorError> {
        let begun = Instant::now();
        let runtime = self.runtime()?;
        write(&folder.join("task.h"), header)?;
        write(&folder.join(SOURCE_NAME), &translation_unit(candidate))?;
        let [memory, race] = self.build_both(candidate, &runtime, folder);
        if let Some(failure) = [memory?, race?].into_iter().find_map(Result::err) {
            return Ok(Err(in_plain_words(without_moved_columns(failure, &candidate.source), &candidate.source)));
        }
        let memory = folder.join(Flavour::Memory.name());
        let declared = Declared::read(&memory)?;
        let faults = declared.faults(candidate);
        if !faults.is_empty() {
            return Ok(Err(CompileFailure::Source(without_header(faults, &candidate.source))));
        }
        Ok(Ok(Built {
            artifact: Artifact::Host { memory, race: folder.join(Flavour::Race.name()) },
            launches: declared.launches.into_iter().map(|(_, launch)| launch).collect(),
            scratch_bytes: declared.scratch_bytes,
            resources: Vec::new(),
            compiler: self.version.clone(),
            seconds: begun.elapsed().as_secs_f64(),
        }))
    }

    fn build_both(
        &self,
        candidate: &Candidate,
        runtime: &Path,
        folder: &Path,
    ) -> [Result<Result<(), CompileFailure>, EvaluatorError>; 2] {
        std::thread::scope(|scope| {
            let race = scope.spawn(|| self.build_one(Flavour::Race, candidate, runtime, folder));
            let memory = self.build_one(Flavour::Memory, candidate, runtime, folder);
            let race = race.join().unwrap_or_else(|_| Err(EvaluatorError::new("a thread that compiles panicked")));
            [memory, race]
        })
    }

    fn build_one(
        &self,
        flavour: Flavour,
        candidate: &Candidate,
        runtime: &Path,
        folder: &Path,
    ) -> Result<Result<(), CompileFailure>, EvaluatorError> {
        let object = folder.join(format!("{}.candidate.o", flavour.name()));
        let mut compile = self.command();
        compile.args(CANDIDATE_FLAGS).args(flavour.candidate_flags());
        compile.arg("-I").arg(runtime.join("include")).arg("-I").arg(folder);
        compile.args(["-x", "c++", "-c", SOURCE_NAME, "-o"]).arg(&object);
        let mut link = self.command();
        link.args(flavour.link_flags()).arg(&object).arg(runtime.join(format!("{}.o", flavour.name())));
        link.arg("-o").arg(folder.join(flavour.name()));
        for command in [compile, link] {
            if let Err(failure) = judge(process::run(command, folder, &Limits::default())?) {
                return Ok(Err(failure));
            }
        }
        let faults = refusals(&object, candidate)?;
        let _ = fs::remove_file(&object);
        Ok(if faults.is_empty() { Ok(()) } else { Err(CompileFailure::Source(faults)) })
    }

    fn command(&self) -> Command {
        process::limited(&self.compiler, &Limits::default())
    }

    /// The folder of the embedded files and the compiled runtime; made where it is missing. It gets its name when it is
    /// whole, so that two processes may make it at once.
    fn runtime(&self) -> Result<PathBuf, EvaluatorError> {
        let mut known = self.runtime.lock().expect("no panics while it is held");
        if let Some(folder) = known.as_ref() {
            return Ok(folder.clone());
        }
        let name = blake3::hash(self.identity().as_bytes()).to_hex();
        let folder = self.runtimes.join(format!("cpu-{}", &name[..32]));
        if !is_whole(&folder) {
            self.make_runtime(&folder)?;
        }
        Ok(known.insert(folder).clone())
    }

    fn make_runtime(&self, folder: &Path) -> Result<(), EvaluatorError> {
        fs::create_dir_all(&self.runtimes).map_err(|error| cannot("make", &self.runtimes, &error))?;
        let made = tempfile::Builder::new().prefix("cpu-").tempdir_in(&self.runtimes);
        let made = made.map_err(|error| cannot("write into", &self.runtimes, &error))?;
        unpack(made.path())?;
        for flavour in Flavour::ALL {
            self.compile_runtime(flavour, made.path())?;
            let object = made.path().join(format!("{}.o", flavour.name()));
            let digest = digest_of(&object).map_err(|error| cannot("read", &object, &error))?;
            write(&object.with_extension("digest"), &digest)?;
        }
        kept::put(folder, made, is_whole).map_err(|error| cannot("name", folder, &error))
    }

    fn compile_runtime(&self, flavour: Flavour, folder: &Path) -> Result<(), EvaluatorError> {
        let mut command = self.command();
        command.args(RUNTIME_FLAGS).args(flavour.runtime_flags()).args(flavour.runtime_sources());
        command.args(["-r", "-nostdlib", "-o"]).arg(format!("{}.o", flavour.name()));
        match process::run(command, folder, &Limits::default())? {
            Ended::Well(_) => Ok(()),
            Ended::Badly(messages) => {
                let first = messages.lines().find(|line| line.contains("error")).unwrap_or(&messages).to_owned();
                Err(EvaluatorError::new(format!(
                    "`{}` cannot compile the CPU device's runtime: {first}",
                    self.compiler.display()
                ))
                .with_hint("the CPU device is made for g++ 12 or newer on x86-64 or AArch64 Linux"))
            }
            Ended::Limit(reason) => Err(EvaluatorError::new(format!("compiling the CPU device's runtime: {reason}"))),
        }
    }
}

/// Whether a runtime's folder has every file as it was written.
fn is_whole(folder: &Path) -> bool {
    let object_is_whole = |flavour: Flavour| {
        let object = folder.join(format!("{}.o", flavour.name()));
        digest_of(&object)
            .ok()
            .is_some_and(|digest| kept::holds(folder, &[(&format!("{}.digest", flavour.name()), &digest)]))
    };
    kept::holds(folder, FILES) && Flavour::ALL.into_iter().all(object_is_whole)
}

fn digest_of(file: &Path) -> io::Result<String> {
    Ok(blake3::hash(&fs::read(file)?).to_hex().to_string())
}

/// What the candidate's own object needs that it may not call.
fn refusals(object: &Path, candidate: &Candidate) -> Result<Vec<Diagnostic>, EvaluatorError> {
    let bytes = fs::read(object).map_err(|error| cannot("read", object, &error))?;
    let file = object::File::parse(bytes.as_slice());
    let file = file.map_err(|error| EvaluatorError::new(format!("{}: {error}", object.display())))?;
    let needed = file.symbols().filter(|symbol| symbol.is_undefined());
    Ok(audit::refusals(needed.filter_map(|symbol| symbol.name().ok()), candidate.format, &candidate.source))
}

fn first_line(bytes: &[u8]) -> Option<String> {
    String::from_utf8_lossy(bytes).lines().next().map(str::to_owned)
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> EvaluatorError {
    EvaluatorError::new(format!("cannot {what} {}: {error}", path.display()))
}

fn write(path: &Path, content: &str) -> Result<(), EvaluatorError> {
    fs::write(path, content).map_err(|error| cannot("write", path, &error))
}

fn unpack(folder: &Path) -> Result<(), EvaluatorError> {
    for (path, content) in FILES {
        let path = folder.join(path);
        let parent = path.parent().unwrap_or(folder);
        fs::create_dir_all(parent).map_err(|error| cannot("make", parent, &error))?;
        write(&path, content)?;
    }
    Ok(())
}

/// The candidate between the header and what registers its host function.
fn translation_unit(candidate: &Candidate) -> String {
    let (before, after) = match candidate.format {
        Format::Kernel => ("", ""),
        Format::Launch => (
            "#define CUDA_CPU_FORMAT_LAUNCH\n",
            "#line 1 \"after the candidate\"\n#include \"task.h\"\nCUDA_CPU_HOST_LAUNCH\n",
        ),
    };
    let source = rewrite(&candidate.source);
    format!("{before}#include \"cuda_cpu.h\"\n#line 1 \"{SOURCE_NAME}\"\n{source}\n{after}")
}

/// Columns of lines that `rewrite` changed are not the candidate's.
fn without_moved_columns(mut failure: CompileFailure, source: &str) -> CompileFailure {
    let rewritten = rewrite(source);
    let moved = |line: u32| source.lines().nth(line as usize - 1) != rewritten.lines().nth(line as usize - 1);
    let diagnostics = match &mut failure {
        CompileFailure::Source(diagnostics) => diagnostics.as_mut_slice(),
        CompileFailure::Unsupported(diagnostic) => std::slice::from_mut(diagnostic),
        CompileFailure::Limit(_) => &mut [],
    };
    for diagnostic in diagnostics {
        diagnostic.column = diagnostic.column.filter(|_| !diagnostic.line.is_some_and(|line| line > 0 && moved(line)));
    }
    failure
}

/// The words of the GPU's path where g++ speaks of the header's workings.
fn in_plain_words(failure: CompileFailure, source: &str) -> CompileFailure {
    let CompileFailure::Source(mut found) = failure else { return failure };
    for error in &mut found {
        let line = error.line.and_then(|line| source.lines().nth(line.checked_sub(1)? as usize)).unwrap_or_default();
        let of_a_macro = line.contains("TASK_LAUNCH") || line.contains("TASK_SCRATCH");
        if error.message.contains("redefinition of") && error.message.contains(" task_launch_") {
            "each TASK_LAUNCH needs a line of its own".clone_into(&mut error.message);
        } else if of_a_macro && error.message == "expected unqualified-id before string constant" {
            "this must stand at file scope: is a closing brace missing before it?".clone_into(&mut error.message);
        } else if error.message.starts_with("launch must be ") {
            error.line = line_of_word(source, "launch");
        }
    }
    CompileFailure::Source(without_header(found, source))
}

/// What a compiler's end says of the candidate.
fn judge(ended: Ended) -> Result<(), CompileFailure> {
    match ended {
        Ended::Well(_) => Ok(()),
        Ended::Limit(reason) => Err(CompileFailure::Limit(reason)),
        Ended::Badly(messages) => Err(failure(&messages)),
    }
}

/// Errors at the candidate's lines. One that names what only the CPU device lacks makes the candidate unsupported.
fn failure(messages: &str) -> CompileFailure {
    let mut diagnostics = diagnostics(messages);
    for diagnostic in &mut diagnostics {
        if let Some(refusal) = unknown_name(&diagnostic.message).and_then(audit::refusal_of_cuda) {
            diagnostic.message = refusal;
        } else if let Some(missing) = missing_on_this_device(&diagnostic.message) {
            let message = format!("the CPU device does not support {missing}");
            return CompileFailure::Unsupported(Diagnostic { message, ..diagnostic.clone() });
        }
    }
    let mut told = HashSet::new();
    // A second error of one line mostly comes of the first.
    diagnostics.retain(|diagnostic| told.insert(diagnostic.line));
    diagnostics.truncate(MOST);
    diagnostics.iter_mut().for_each(|diagnostic| diagnostic.message = cut(&diagnostic.message));
    if diagnostics.is_empty() {
        let message = cut(messages.lines().next().unwrap_or("g++ failed without a message"));
        diagnostics.push(Diagnostic { line: None, column: None, message });
    }
    CompileFailure::Source(diagnostics)
}

/// Where a message stands.
struct Place {
    line: u32,
    column: Option<u32>,
}

/// Errors in the order in which g++ found them. One inside a header is put where the candidate brought it in.
fn diagnostics(messages: &str) -> Vec<Diagnostic> {
    let mut found: Vec<Diagnostic> = Vec::new();
    let mut brought_in: Option<Place> = None;
    for line in messages.lines() {
        let own = place(line);
        if let Some((_, message)) = line.split_once("error: ") {
            let inherited = brought_in.take();
            let place = own.or(inherited);
            let (line, column) = place.map_or((None, None), |place| (Some(place.line), place.column));
            let message = message.trim().trim_start_matches("static assertion failed: ").to_owned();
            found.push(Diagnostic { line, column, message });
        } else if let Some(undefined) = line.split_once("undefined reference to ") {
            let line = own.map(|place| place.line);
            found.push(Diagnostic { line, column: None, message: format!("undefined reference to {}", undefined.1) });
        } else if own.is_some() && (line.contains("required from") || line.starts_with("In file included from")) {
            brought_in = own;
        } else if let (Some(own), Some(last)) = (own, found.last_mut().filter(|last| last.line.is_none())) {
            (last.line, last.column) = (Some(own.line), own.column);
        }
    }
    // What stands nowhere in the candidate comes of one mistake: the host function is missing or takes something else.
    let mut nowhere = 0;
    found.retain(|diagnostic| {
        nowhere += usize::from(diagnostic.line.is_none());
        diagnostic.line.is_some() || nowhere == 1
    });
    found
}

/// The first place in the candidate that a message names.
fn place(line: &str) -> Option<Place> {
    let at = line.find(SOURCE_NAME)? + SOURCE_NAME.len();
    let mut numbers = line[at..].strip_prefix(':')?.split(|c: char| !c.is_ascii_digit());
    Some(Place { line: numbers.next()?.parse().ok()?, column: numbers.next().and_then(|column| column.parse().ok()) })
}

/// What an error lacks, if it is CUDA's and not the candidate's.
fn missing_on_this_device(message: &str) -> Option<String> {
    if let Some((_, what)) = message.split_once("cuda-cpu-unsupported: ") {
        return Some(what.trim_end_matches('"').to_owned());
    }
    if let Some(header) = message.strip_suffix(": No such file or directory") {
        return belongs_to_cuda(header).then(|| format!("the header {header}"));
    }
    let name = unknown_name(message)?;
    let lacks =
        belongs_to_cuda(name) || ["__tsan_", "__atomic_", "__ubsan_"].iter().any(|prefix| name.starts_with(prefix));
    lacks.then(|| format!("`{name}`"))
}

/// The name that a message is about because nothing has it.
fn unknown_name(message: &str) -> Option<&str> {
    let unknown = [
        "was not declared",
        "does not name a type",
        "has not been declared",
        "undefined reference",
        "is not a member of",
    ];
    if !unknown.iter().any(|phrase| message.contains(phrase)) {
        return None;
    }
    message.split(['‘', '\'', '`']).nth(1)?.split(['’', '\'', '(']).next()
}

/// Whether a name or a header looks like CUDA's own.
fn belongs_to_cuda(name: &str) -> bool {
    const PREFIXES: &[&str] = &[
        "cuda",
        "cub",
        "curand",
        "cufft",
        "cusparse",
        "cusolver",
        "cudnn",
        "cutlass",
        "cute/",
        "cooperative_groups",
        "cg",
        "thrust",
        "nvcuda",
        "nv/",
        "nvrtc",
        "mma",
        "wmma",
        "tex1D",
        "tex2D",
        "tex3D",
        "texture",
        "surf",
        "atomic",
        "__nv_",
        "crt/",
        "sm_",
        "cp_async",
    ];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || is_intrinsic(name)
}

/// `__vadd4`, `__hcmadd`: two underscores and a small letter, as CUDA's intrinsics and few candidates have them.
fn is_intrinsic(name: &str) -> bool {
    name.strip_prefix("__").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase()))
}

/// What a program declares, read out of its file: nothing of it runs for that.
struct Declared {
    /// With their lines.
    launches: Vec<(u32, Launch)>,
    scratch_bytes: u64,
    /// The symbols of the plain `__global__` functions.
    kernels: Vec<String>,
}

impl Declared {
    fn read(program: &Path) -> Result<Self, EvaluatorError> {
        let bytes = fs::read(program).map_err(|error| cannot("read", program, &error))?;
        let broken = |error| EvaluatorError::new(format!("{} is no program: {error}", program.display()));
        let file = object::File::parse(bytes.as_slice()).map_err(broken)?;
        let section = |name| file.section_by_name(name).and_then(|section| section.data().ok()).unwrap_or_default();
        let mut launches = section("cuda_agent_launches").chunks_exact(RECORD_BYTES).map(launch).collect::<Vec<_>>();
        launches.sort_by_key(|(line, _)| *line);
        let scratch = section("cuda_agent_scratch").first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let kernels = file.symbols().filter(is_kernel).filter_map(|symbol| symbol.name().ok().map(str::to_owned));
        Ok(Self { launches, scratch_bytes: scratch, kernels: kernels.collect() })
    }

    fn faults(&self, candidate: &Candidate) -> Vec<Diagnostic> {
        if candidate.format == Format::Kernel && self.launches.is_empty() {
            let line = line_of_word(&candidate.source, "__global__");
            let message = "nothing is launched: add TASK_LAUNCH(kernel, grid, block) at file scope".to_owned();
            return vec![Diagnostic { line, column: None, message }];
        }
        self.launches.iter().filter_map(|(line, launch)| self.fault(*line, &launch.symbol)).collect()
    }

    fn fault(&self, line: u32, name: &str) -> Option<Diagnostic> {
        let found = self.kernels.iter().any(|symbol| symbol == name || demangle(symbol) == name);
        let message =
            format!("TASK_LAUNCH({name}): there is no such kernel: it must be a plain, non-static __global__ function");
        (!found).then_some(Diagnostic { line: Some(line), column: None, message })
    }
}

/// `__global__` is the protected visibility on this device (`cuda_cpu.h`), which functions of one file alone can't have.
fn is_kernel<'a>(symbol: &impl ObjectSymbol<'a>) -> bool {
    let SymbolFlags::Elf { st_other, .. } = symbol.flags() else { return false };
    symbol.is_definition() && symbol.is_global() && st_other & 3 == object::elf::STV_PROTECTED
}

/// `cuda_cpu_record` of `abi.h`: a name of 64 bytes and ten numbers.
const RECORD_BYTES: usize = 64 + 10 * 4;

/// A launch and its line, which is the record's place among the others.
fn launch(record: &[u8]) -> (u32, Launch) {
    let (name, numbers) = record.split_at(64);
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut numbers =
        numbers.chunks_exact(4).map(|bytes| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte)));
    let mut next = || numbers.next().unwrap_or_default();
    let launch = Launch {
        symbol: String::from_utf8_lossy(name).into_owned(),
        grid: [next(), next(), next()],
        block: [next(), next(), next()],
        shared_bytes: next(),
        arguments: next(),
    };
    (next(), launch)
}

/// The line of the candidate that a program's instruction comes from; `None` without binutils' `addr2line`.
pub fn source_line(program: &Path, address: u64) -> Option<u32> {
    let arguments = [OsStr::new("-i"), OsStr::new("-e"), program.as_os_str()];
    let output =
        Command::new("addr2line").args(arguments).arg(format!("{address:#x}")).stderr(Stdio::null()).output().ok()?;
    // Innermost first: the first line in the candidate is the place that called into a header.
    String::from_utf8_lossy(&output.stdout).lines().find_map(place).map(|place| place.line)
}

#[cfg(test)]
#[path = "host_test.rs"]
pub(crate) mod tests;
