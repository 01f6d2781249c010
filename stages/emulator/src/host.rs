//! The CPU device's compiler: g++, with the embedded header and runtime (`cpu/`).
//!
//! A candidate becomes two programs: `memory`, with AddressSanitizer and the check of alignment, and `race`, whose accesses
//! call the race detector. The runtime is compiled once for each identity (compiler, flags, embedded files) and kept;
//! for each candidate only its own source is compiled.
//!
//! A candidate must not reach or switch off what watches it. The headers call everything of the device's own by a name that
//! is drawn anew for each build ([`OwnName`]); both programs come from one preprocessed text, which `guard` has read; what
//! the object needs and what it defines is audited; and the runtime's C++ functions are local to it, so that nothing that a
//! candidate defines takes their place.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use addr2line::Context;
use addr2line::gimli::{self, EndianSlice, LittleEndian, SectionId};
use cuda_agent_sandbox::candidate::{Candidate, Format};
use cuda_agent_sandbox::diagnostic::{CompileFailure, DeclaredLaunch, Diagnostic, without_header};
use cuda_agent_sandbox::fault::EvaluatorError;
use cuda_agent_sandbox::names::{demangle, line_of_word};
use cuda_agent_sandbox::process::{self, Ended, Limits};
use cuda_agent_sandbox::{audit, guard, kept};
use object::{Object, ObjectSection, ObjectSymbol, SymbolFlags};

use crate::SOURCE_NAME;
use crate::host_messages::{in_plain_words, judge};
use crate::own_name::{EMBEDDED_NAME, OwnName};
use crate::rewrite::rewrite;

const RUNTIME_FLAGS: &[&str] = &["-std=c++17", "-O2", "-g1", "-fno-pie", "-w"];
/// `-O1` compiles fast and keeps lines; what C++ leaves undefined and CUDA's compiler does not exploit is defined.
const CANDIDATE_FLAGS: &[&str] = &[
    "-std=c++17",
    "-O1",
    "-g1",
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
    ($($path:literal $(from $file:literal)?),* $(,)?) => {
        &[$(embedded!(@one $path $($file)?)),*]
    };
    (@one $path:literal) => { ($path, include_str!(concat!("../cpu/", $path))) };
    (@one $path:literal $file:literal) => { ($path, include_str!($file)) };
}

/// Every file of `cpu/`, and what it has in common with GPUs.
const FILES: &[(&str, &str)] = embedded![
    "abi.h",
    "include/cuda.h",
    "include/cuda_bf16.h",
    "include/cuda_bf16.hpp",
    "include/cuda_cpu.h",
    "include/cuda_cpu/atomics.h",
    "include/cuda_cpu/half.h",
    "include/cuda_cpu/host.h",
    "include/cuda_cpu/launch_limits.h" from "../../sandbox/src/launch_limits.h",
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
    "runtime/seal.cpp",
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

/// What became of a candidate that compiles.
#[derive(Clone, Debug, PartialEq)]
pub struct Programs {
    /// Built with AddressSanitizer.
    pub memory: PathBuf,
    /// Built to find races.
    pub race: PathBuf,
    /// What the candidate declares, in the order of its source; empty where its host function starts things.
    pub launches: Vec<DeclaredLaunch>,
    /// Scratch memory that it asks for, in bytes.
    pub scratch_bytes: u64,
    /// The compiler and its version.
    pub compiler: String,
    /// Seconds that compiling took.
    pub seconds: f64,
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
    ) -> Result<Result<Programs, CompileFailure>, EvaluatorError> {
        let begun = Instant::now();
        let own = OwnName::draw()?;
        let work = Work { candidate, own: &own, runtime: self.runtime()?, folder };
        for (path, content) in FILES.iter().filter(|(path, _)| !path.starts_with("runtime/")) {
            write_with_folder(&folder.join(own.given_to(path)), &own.given_to(content))?;
        }
        write(&folder.join("task.h"), &own.given_to(header))?;
        write(&folder.join(SOURCE_NAME), &translation_unit(candidate, &own))?;
        if let Err(failure) = self.build_both(&work)? {
            let failure = own.taken_from_all(without_moved_columns(failure, &candidate.source));
            return Ok(Err(in_plain_words(failure, &candidate.source)));
        }
        let memory = folder.join(Flavour::Memory.name());
        let declared = Declared::read(&memory, &own)?;
        let faults = declared.faults(candidate);
        if !faults.is_empty() {
            return Ok(Err(CompileFailure::Source(without_header(faults, &candidate.source))));
        }
        Ok(Ok(Programs {
            memory,
            race: folder.join(Flavour::Race.name()),
            launches: declared.launches(),
            scratch_bytes: declared.scratch_bytes,
            compiler: self.version.clone(),
            seconds: begun.elapsed().as_secs_f64(),
        }))
    }

    fn build_both(&self, work: &Work) -> Result<Result<(), CompileFailure>, EvaluatorError> {
        if let Err(failure) = self.preprocess(work)? {
            return Ok(Err(failure));
        }
        let [memory, race] = std::thread::scope(|scope| {
            let race = scope.spawn(|| self.build_one(Flavour::Race, work));
            let memory = self.build_one(Flavour::Memory, work);
            let race = race.join().unwrap_or_else(|_| Err(EvaluatorError::new("a thread that compiles panicked")));
            [memory, race]
        });
        Ok(memory?.and(race?))
    }

    /// Without the options of either program, so that the source can't tell them apart.
    fn preprocess(&self, work: &Work) -> Result<Result<(), CompileFailure>, EvaluatorError> {
        let mut command = self.reading(work);
        command.args(["-x", "c++", "-E", SOURCE_NAME, "-o", PREPROCESSED]);
        if let Err(failure) = judge(process::run(command, work.folder, &Limits::default())?) {
            return Ok(Err(failure));
        }
        let path = work.folder.join(PREPROCESSED);
        let text = fs::read(&path).map_err(|error| cannot("read", &path, &error))?;
        let text = String::from_utf8_lossy(&text);
        let begins = work.own.begins();
        let rest = text.split_once(begins.as_str()).map_or(&*text, |(_, rest)| rest);
        Ok(guard::check(rest, SOURCE_NAME, work.own.as_str()))
    }

    /// A command that reads the candidate's source, but for what to do with it.
    fn reading(&self, work: &Work) -> Command {
        let mut command = self.command();
        command.args(CANDIDATE_FLAGS).arg("-I").arg(work.folder.join("include")).arg("-I").arg(work.folder);
        command
    }

    fn build_one(&self, flavour: Flavour, work: &Work) -> Result<Result<(), CompileFailure>, EvaluatorError> {
        let object = work.folder.join(format!("{}.candidate.o", flavour.name()));
        let mut compile = self.command();
        compile.args(CANDIDATE_FLAGS).args(flavour.candidate_flags());
        compile.args(["-x", "c++-cpp-output", "-c", PREPROCESSED, "-o"]).arg(&object);
        if let Err(failure) = judge(process::run(compile, work.folder, &Limits::default())?) {
            return Ok(Err(self.explained(failure, flavour, work)?));
        }
        let runtime = work.runtime.join(format!("{}.o", flavour.name()));
        let faults = refusals(&object, &runtime, work)?;
        if !faults.is_empty() {
            return Ok(Err(CompileFailure::Source(faults)));
        }
        let mut link = self.command();
        link.args(flavour.link_flags()).args(work.own.definitions()).arg(&object).arg(runtime);
        link.arg("-o").arg(work.folder.join(flavour.name()));
        let linked = judge(process::run(link, work.folder, &Limits::default())?);
        let _ = fs::remove_file(&object);
        Ok(linked)
    }

    /// The same failure in the source itself: columns of a preprocessed text are others.
    fn explained(
        &self,
        failure: CompileFailure,
        flavour: Flavour,
        work: &Work,
    ) -> Result<CompileFailure, EvaluatorError> {
        if matches!(failure, CompileFailure::Limit(_)) {
            return Ok(failure);
        }
        let mut command = self.reading(work);
        command.args(flavour.candidate_flags()).args(["-x", "c++", "-fsyntax-only", SOURCE_NAME]);
        let again = judge(process::run(command, work.folder, &Limits::default())?);
        Ok(again.err().filter(|failure| !matches!(failure, CompileFailure::Limit(_))).unwrap_or(failure))
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

    /// Makes the runtime where it is missing. Whoever compiles next is told what is wrong with it.
    pub fn make_runtime_ready(&self) {
        let _ = self.runtime();
    }

    fn make_runtime(&self, folder: &Path) -> Result<(), EvaluatorError> {
        fs::create_dir_all(&self.runtimes).map_err(|error| cannot("make", &self.runtimes, &error))?;
        let made = tempfile::Builder::new().prefix("cpu-").tempdir_in(&self.runtimes);
        let made = made.map_err(|error| cannot("write into", &self.runtimes, &error))?;
        unpack(made.path())?;
        std::thread::scope(|scope| {
            let folder = made.path();
            let compile = |flavour| scope.spawn(move || self.compile_runtime(flavour, folder));
            let threads = Flavour::ALL.map(compile);
            let panicked = |_| Err(EvaluatorError::new("a thread that compiles panicked"));
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(panicked))
        })?;
        for flavour in Flavour::ALL {
            let object = made.path().join(format!("{}.o", flavour.name()));
            let digest = digest_of(&object).map_err(|error| cannot("read", &object, &error))?;
            write(&object.with_extension("digest"), &digest)?;
        }
        kept::put(folder, made, is_whole).map_err(|error| cannot("name", folder, &error))
    }

    /// Its C++ functions are made local: a candidate's template of the same name would take their place otherwise. For that
    /// no section may belong to a group of which the linker keeps the first.
    fn compile_runtime(&self, flavour: Flavour, folder: &Path) -> Result<(), EvaluatorError> {
        let object = format!("{}.o", flavour.name());
        let mut compile = self.command();
        compile.args(RUNTIME_FLAGS).args(flavour.runtime_flags()).args(flavour.runtime_sources());
        compile.args(["-r", "-nostdlib", "-Wl,--force-group-allocation", "-o", &object]);
        self.runtime_step(compile, folder)?;
        let mut localize = process::limited(Path::new("objcopy"), &Limits::default());
        localize.args(["--wildcard", "--localize-symbol=_Z*", &object]);
        self.runtime_step(localize, folder)
    }

    fn runtime_step(&self, command: Command, folder: &Path) -> Result<(), EvaluatorError> {
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

/// One build.
struct Work<'a> {
    candidate: &'a Candidate,
    own: &'a OwnName,
    runtime: PathBuf,
    folder: &'a Path,
}

/// The preprocessed candidate.
const PREPROCESSED: &str = "candidate.ii";

/// What the candidate's own object needs that it may not call, and what it defines that is the device's or the C library's.
fn refusals(object: &Path, runtime: &Path, work: &Work) -> Result<Vec<Diagnostic>, EvaluatorError> {
    let [object_bytes, runtime_bytes] =
        [object, runtime].map(|path| fs::read(path).map_err(|error| cannot("read", path, &error)));
    let (object_bytes, runtime_bytes) = (object_bytes?, runtime_bytes?);
    let broken = |error| EvaluatorError::new(format!("{}: {error}", object.display()));
    let file = object::File::parse(object_bytes.as_slice()).map_err(broken)?;
    let runtime = object::File::parse(runtime_bytes.as_slice()).map_err(broken)?;
    let taken: HashSet<&str> =
        runtime.symbols().filter(|symbol| symbol.is_global()).filter_map(|symbol| symbol.name().ok()).collect();
    let source = work.candidate.source.as_str();
    let defines = file.symbols().filter(|symbol| symbol.is_definition() && symbol.is_global());
    let defined = defines
        .filter_map(|symbol| symbol.name().ok())
        .filter(|name| taken.contains(name) || (name.starts_with("__") && !name.starts_with("__odr_asan")));
    let mut faults: Vec<Diagnostic> = defined
        .map(|name| {
            let message = format!("{} is refused: the CPU device has this name itself", demangle(name));
            Diagnostic { line: line_of_word(source, &demangle(name)), column: None, message }
        })
        .collect();
    let needed = file.symbols().filter(|symbol| symbol.is_undefined());
    let needed = needed.filter_map(|symbol| symbol.name().ok()).filter(|name| !work.own.is_of_abi(name));
    faults.extend(audit::refusals(needed, work.candidate.format, source));
    Ok(faults)
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
    FILES.iter().try_for_each(|(path, content)| write_with_folder(&folder.join(path), content))
}

fn write_with_folder(path: &Path, content: &str) -> Result<(), EvaluatorError> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(|error| cannot("make", parent, &error))?;
    write(path, content)
}

/// The candidate between the header and what registers its host function.
fn translation_unit(candidate: &Candidate, own: &OwnName) -> String {
    let (before, after) = match candidate.format {
        Format::Kernel => ("", ""),
        Format::Launch => (
            "#define CUDA_CPU_FORMAT_LAUNCH\n",
            "#line 1 \"after the candidate\"\n#include \"task.h\"\nCUDA_CPU_HOST_LAUNCH\n",
        ),
    };
    let source = rewrite(&candidate.source, own.as_str());
    let before = own.given_to(&format!("{before}#include \"cuda_cpu.h\"\n"));
    format!("{before}{}#line 1 \"{SOURCE_NAME}\"\n{source}\n{}", own.begins(), own.given_to(after))
}

/// Columns of lines that `rewrite` changed are not the candidate's.
fn without_moved_columns(mut failure: CompileFailure, source: &str) -> CompileFailure {
    let rewritten = rewrite(source, EMBEDDED_NAME);
    let moved = |line: u32| source.lines().nth(line as usize - 1) != rewritten.lines().nth(line as usize - 1);
    let diagnostics = match &mut failure {
        CompileFailure::Source(diagnostics) => diagnostics.as_mut_slice(),
        CompileFailure::Unsupported(diagnostic) => std::slice::from_mut(diagnostic),
        CompileFailure::Fault(_) | CompileFailure::Limit(_) => &mut [],
    };
    for diagnostic in diagnostics {
        diagnostic.column = diagnostic.column.filter(|_| !diagnostic.line.is_some_and(|line| line > 0 && moved(line)));
    }
    failure
}

/// What a program declares, read out of its file: nothing of it runs for that.
struct Declared {
    /// With their lines.
    launches: Vec<(u32, DeclaredLaunch)>,
    scratch_bytes: u64,
    /// The symbols of the plain `__global__` functions.
    kernels: Vec<String>,
}

impl Declared {
    fn read(program: &Path, own: &OwnName) -> Result<Self, EvaluatorError> {
        let bytes = fs::read(program).map_err(|error| cannot("read", program, &error))?;
        let broken = |error| EvaluatorError::new(format!("{} is no program: {error}", program.display()));
        let file = object::File::parse(bytes.as_slice()).map_err(broken)?;
        let section = |name: &str| {
            file.section_by_name(&own.given_to(name)).and_then(|section| section.data().ok()).unwrap_or_default()
        };
        let mut launches = section("cuda_cpu_launches").chunks_exact(RECORD_BYTES).map(launch).collect::<Vec<_>>();
        launches.sort_by_key(|(line, _)| *line);
        let scratch = section("cuda_cpu_scratch").first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let kernels = file.symbols().filter(is_kernel).filter_map(|symbol| symbol.name().ok().map(str::to_owned));
        Ok(Self { launches, scratch_bytes: scratch, kernels: kernels.collect() })
    }

    fn launches(&self) -> Vec<DeclaredLaunch> {
        self.launches.iter().map(|(_, launch)| launch.clone()).collect()
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
fn launch(record: &[u8]) -> (u32, DeclaredLaunch) {
    let (name, numbers) = record.split_at(64);
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut numbers =
        numbers.chunks_exact(4).map(|bytes| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte)));
    let mut next = || numbers.next().unwrap_or_default();
    let launch = DeclaredLaunch {
        symbol: String::from_utf8_lossy(name).into_owned(),
        grid: [next(), next(), next()],
        block: [next(), next(), next()],
        shared_bytes: next(),
        arguments: next(),
    };
    (next(), launch)
}

/// The line of the candidate that a program's instruction comes from.
pub fn source_line(program: &Path, address: u64) -> Option<u32> {
    let bytes = fs::read(program).ok()?;
    let file = object::File::parse(bytes.as_slice()).ok()?;
    let section = |id: SectionId| file.section_by_name(id.name()).and_then(|section| section.data().ok());
    let read = |id| Ok::<_, gimli::Error>(EndianSlice::new(section(id).unwrap_or_default(), LittleEndian));
    let context = Context::from_dwarf(gimli::Dwarf::load(read).ok()?).ok()?;
    let mut frames = context.find_frames(address).skip_all_loads().ok()?;
    // Innermost first: the first line in the candidate is the place that called into a header.
    while let Some(frame) = frames.next().ok()? {
        let is_own = |file: &str| Path::new(file).file_name().is_some_and(|name| name == SOURCE_NAME);
        let location = frame.location.filter(|location| location.file.is_some_and(is_own));
        if let Some(line) = location.and_then(|location| location.line) {
            return Some(line);
        }
    }
    None
}

#[cfg(test)]
#[path = "host_test.rs"]
pub(crate) mod tests;
