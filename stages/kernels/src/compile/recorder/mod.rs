//! The host code of a `launch` candidate becomes data: it runs in processes that are thrown away, hold no GPU and know no
//! real address, linked to a stand-in of CUDA's runtime (`recorder/`) that notes what it starts.
//!
//! That is done when the candidate is compiled, three times with everything at other made-up addresses (`layout`). What
//! the processes write is an untrusted claim (`recording`); where the recordings agree but for addresses they are one
//! program (`relocate`), which the runner replays. So no host code of a candidate can know which of its runs is timed, or
//! reach whoever times it. A recording that was forged starts nothing that the candidate could not have started.
//!
//! Each recording is a first call: what host code remembers from call to call (`static`) is as it was in the beginning. The
//! stand-in calls it some more times and compares, so that host code whose later calls start other work is refused.

mod layout;
mod machine_code;
mod recording;
mod relocate;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::resource::Resource;
use serde::{Deserialize, Serialize};

use self::layout::{Layout, Order};
use self::recording::{Noted, Recording};
use self::relocate::{Misfit, TIMES};
use super::headers::Headers;
use super::names::line_of_word;
use super::process::{self, Ended, Limits};
use super::{CompileFailure, Diagnostic};
use crate::child::walls::{self, Walls};
use crate::child::{Group, describe};
use crate::fault::{EvaluatorError, Fault, FaultKind};
use crate::kept;
use crate::program::Program;
use crate::random::{Choices, secret};

pub use self::machine_code::MachineCode;

/// What a candidate may ask about the GPU that it will run on, as its driver says it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GpuFacts {
    /// As the driver names it.
    pub name: String,
    /// All of its memory.
    pub memory_bytes: u64,
    /// The CUDA version that the driver offers: 13000.
    pub driver: i32,
    /// Attributes by their number (`CUdevice_attribute`); 0 where the driver knows none.
    pub attributes: Vec<i32>,
}

impl GpuFacts {
    /// Some figures of an H100, for where candidates are compiled and no GPU is at hand: `doctor` and tests.
    pub fn of_an_h100() -> Self {
        let mut attributes = vec![0; 150];
        let known = [
            (1, 1024),
            (2, 1024),
            (3, 1024),
            (4, 64),
            (5, i32::MAX),
            (6, 65_535),
            (7, 65_535),
            (8, 48 << 10),
            (9, 64 << 10),
            (10, 32),
            (11, i32::MAX),
            (12, 64 << 10),
            (13, 1_980_000),
            (14, 512),
            (16, 132),
            (31, 1),
            (38, 50 << 20),
            (39, 2048),
            (75, 9),
            (76, 0),
            (81, 228 << 10),
            (82, 64 << 10),
            (95, 1),
            (97, 227 << 10),
            (106, 32),
            (108, 31_250 << 10),
            (111, 1024),
            (120, 1),
        ];
        known.into_iter().for_each(|(number, value)| attributes[number] = value);
        Self { name: "NVIDIA H100 80GB HBM3".into(), memory_bytes: 80 << 30, driver: 13_000, attributes }
    }
}

macro_rules! embedded {
    ($($name:literal),*) => {
        &[$(($name, include_str!(concat!("../../../recorder/", $name)))),*]
    };
}

/// Every file of `recorder/`.
const FILES: &[(&str, &str)] = embedded!["recorder.h", "recorder.cpp", "launches.cpp", "queries.cpp"];

const FLAGS: [&str; 3] = ["-std=c++17", "-O1", "-w"];

/// The stand-in, compiled.
const OBJECT: &str = "recorder.o";

/// How a recorder is linked: without any library to be found when it starts, where this machine has what that takes.
const LINKING: &str = "linking";
const STATIC: &str = "-static";

/// Processor time of one recording, in seconds: there is no GPU to wait for.
const SECONDS: u64 = 2;

/// Wall-clock time of one, on a machine where many compilers run.
const PATIENCE: Duration = Duration::from_secs(20);

/// Address space of one.
const MEMORY_BYTES: u64 = 2 << 30;

/// More is no recording; the stand-in stops before.
const MOST_BYTES: u64 = 17 << 20;

/// The stand-in of CUDA's runtime, compiled once for each identity and kept.
#[derive(Clone, Debug)]
pub struct Recorder {
    headers: Headers,
    /// Compiler, flags, files and headers.
    identity: String,
    folders: PathBuf,
    /// Its folder, once it is known to be whole.
    folder: Arc<Mutex<Option<PathBuf>>>,
}

/// A candidate's host code, and what is known of the rest.
pub struct Subject<'a> {
    /// For lines.
    pub source: &'a str,
    /// Its linked program.
    pub program: &'a Path,
    /// Bytes of the tensors in the order of the arguments, the scratch buffer's last.
    pub arguments: Vec<u64>,
    /// Of the GPU.
    pub facts: &'a GpuFacts,
    /// The kernels that it can launch.
    pub module: &'a MachineCode,
}

impl Recorder {
    /// `compiler` tells one g++ from another, `headers_identity` one set of headers; `cache` keeps what is compiled.
    pub fn new(headers: Headers, compiler: &str, headers_identity: &str, cache: &Path) -> Self {
        let mut hasher = blake3::Hasher::new();
        for (name, text) in FILES {
            hasher.update(name.as_bytes()).update(&[0]).update(text.as_bytes()).update(&[0]);
        }
        for part in [compiler, headers_identity, std::env::consts::ARCH].iter().chain(&FLAGS) {
            hasher.update(part.as_bytes()).update(&[0]);
        }
        let identity = hasher.finalize().to_hex().to_string();
        Self { headers, identity, folders: cache.join("recorder"), folder: Arc::default() }
    }

    /// All that decides how a candidate's host code is recorded, but for the candidate.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Links a candidate's object in a folder.
    pub fn link(
        &self,
        object: &str,
        program: &str,
        folder: &Path,
        limits: &Limits,
    ) -> Result<Result<(), CompileFailure>, EvaluatorError> {
        let own = self.folder()?;
        let linking = std::fs::read_to_string(own.join(LINKING)).unwrap_or_default();
        let mut command = process::limited(Path::new("g++"), limits);
        command.args(linking.split_whitespace()).arg(object).arg(own.join(OBJECT)).args(["-o", program]);
        Ok(match process::run(command, folder, limits)? {
            Ended::Well(_) => Ok(()),
            Ended::Limit(why) => Err(CompileFailure::Limit(why)),
            Ended::Badly(log) => {
                let said = |what: &str| log.lines().find_map(|line| Some(&line[line.find(what)?..]));
                let said = said("multiple definition of").or_else(|| said("undefined reference to"));
                let message = said.and_then(|said| said.split(';').next()).unwrap_or("it can't be linked").to_owned();
                Err(CompileFailure::Source(vec![Diagnostic { line: None, column: None, message }]))
            }
        })
    }

    /// The folder of the compiled stand-in; made where it is missing.
    fn folder(&self) -> Result<PathBuf, EvaluatorError> {
        let mut known = self.folder.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(folder) = known.as_ref() {
            return Ok(folder.clone());
        }
        let folder = self.folders.join(&self.identity[..32]);
        if !is_whole(&folder) {
            self.make(&folder)?;
        }
        Ok(known.insert(folder).clone())
    }

    fn make(&self, folder: &Path) -> Result<(), EvaluatorError> {
        let broken = |error: std::io::Error| EvaluatorError::new(format!("{}: {error}", folder.display()));
        std::fs::create_dir_all(&self.folders).map_err(broken)?;
        let made = tempfile::Builder::new().prefix("recorder-").tempdir_in(&self.folders).map_err(broken)?;
        for (name, text) in FILES {
            std::fs::write(made.path().join(name), text).map_err(broken)?;
        }
        let mut compile = self.command();
        compile.args(FILES.iter().map(|(name, _)| name).filter(|name| name.ends_with(".cpp")));
        compile.args(["-r", "-nostdlib", "-o", OBJECT]);
        self.step(compile, made.path())?;
        let probe = "extern \"C\" int task_run(void* const*, void*) { return 0; }\n";
        std::fs::write(made.path().join("probe.cpp"), probe).map_err(broken)?;
        let mut link = self.command();
        link.args(["probe.cpp", OBJECT, STATIC, "-o", "probe"]);
        let linking = if self.step(link, made.path()).is_ok() { STATIC } else { "" };
        std::fs::write(made.path().join(LINKING), linking).map_err(broken)?;
        for name in ["probe.cpp", "probe"] {
            let _ = std::fs::remove_file(made.path().join(name));
        }
        let digest = digest_of(&made.path().join(OBJECT)).map_err(broken)?;
        std::fs::write(made.path().join("digest"), digest).map_err(broken)?;
        kept::put(folder, made, is_whole).map_err(broken)
    }

    fn command(&self) -> Command {
        let mut command = process::limited(Path::new("g++"), &Limits::default());
        command.args(FLAGS);
        for folder in self.headers.folders() {
            command.arg("-I").arg(folder);
        }
        command
    }

    fn step(&self, command: Command, folder: &Path) -> Result<(), EvaluatorError> {
        let why = match process::run(command, folder, &Limits::default())? {
            Ended::Well(_) => return Ok(()),
            Ended::Badly(log) => {
                if let Some(missing) = self.headers.missing_in(&log) {
                    return Err(missing);
                }
                log.lines().find(|line| line.contains("error")).unwrap_or(&log).to_owned()
            }
            Ended::Limit(why) => why,
        };
        Err(EvaluatorError::new(format!("the recorder of launch candidates can't be compiled: {why}")))
    }
}

fn digest_of(file: &Path) -> std::io::Result<String> {
    Ok(blake3::hash(&std::fs::read(file)?).to_hex().to_string())
}

fn is_whole(folder: &Path) -> bool {
    let digest = digest_of(&folder.join(OBJECT)).unwrap_or_default();
    kept::holds(folder, FILES) && kept::holds(folder, &[("digest", &digest)]) && folder.join(LINKING).is_file()
}

/// What a candidate starts.
pub fn record(subject: &Subject) -> Result<Result<Program, CompileFailure>, EvaluatorError> {
    let mut choices = Choices(secret()?);
    let mut draw = |order| Layout::draw(&subject.arguments, subject.module, order, &mut choices);
    let (Some(first), Some(second), Some(third)) =
        (draw(Order::Forwards), draw(Order::Backwards), draw(Order::Shuffled))
    else {
        return Err(EvaluatorError::new(
            "the task's tensors, or the candidate's variables, are too many to be recorded",
        ));
    };
    let layouts = [first, second, third];
    let mut all: Vec<Vec<Noted>> = Vec::with_capacity(TIMES);
    for layout in &layouts {
        match subject.run(layout)? {
            Ok(noted) => all.push(noted),
            Err(failure) => return Ok(Err(failure)),
        }
    }
    let united = relocate::unite([&all[0], &all[1], &all[2]], &layouts, subject.module);
    let why = match united {
        Ok(program) => return Ok(Ok(program)),
        Err(Misfit::Differs) => match subject.run(&layouts[0])? {
            Ok(again) if again == all[0] => {
                "what it starts depends on where the tensors lie, by more than their addresses"
            }
            _ => "it does not start the same work each time",
        }
        .to_owned(),
        Err(Misfit::Outside(what)) => format!("{what} leaves the tensor or the variable that it begins in"),
        Err(Misfit::Odd) => "what it starts is nothing that can be recorded".to_owned(),
    };
    Ok(Err(subject.refused("launch", &why)))
}

/// The one place where a candidate's host code is started: behind walls, without a GPU, bounded in memory, time and output.
fn start(program: &Path) -> std::io::Result<Command> {
    let limits = [
        (Resource::RLIMIT_AS, MEMORY_BYTES),
        (Resource::RLIMIT_CPU, SECONDS),
        (Resource::RLIMIT_FSIZE, MOST_BYTES),
        (Resource::RLIMIT_NOFILE, 16),
    ];
    let walls = limits.into_iter().fold(Walls::new(), |walls, (resource, most)| walls.limiting(resource, most));
    walls.command(program, &[] as &[&str])
}

impl Subject<'_> {
    /// One recording, in a process of its own.
    fn run(&self, layout: &Layout) -> Result<Result<Vec<Noted>, CompileFailure>, EvaluatorError> {
        let broken = |error: std::io::Error| EvaluatorError::new(format!("{}: {error}", self.program.display()));
        let (written, errors, status) = self.process(layout).map_err(broken)?;
        let crash = |kind, message: String| CompileFailure::Fault(Fault { kind, message, line: None });
        let Some(status) = status.filter(|status| status.signal() != Some(libc::SIGKILL)) else {
            let message = format!("launch did not end within {SECONDS} s of processor time");
            return Ok(Err(crash(FaultKind::Timeout, message)));
        };
        Ok(match recording::read(&written, self.module) {
            Some(Recording::Returned(0, noted)) => Ok(noted),
            Some(Recording::Returned(code, _)) => {
                Err(crash(FaultKind::Launch, format!("launch returned cudaError_t {code}")))
            }
            Some(Recording::Refused(name, why)) => Err(self.refused(&name, &why)),
            None => Err(crash(FaultKind::Crash, ended(status, &errors))),
        })
    }

    fn process(&self, layout: &Layout) -> std::io::Result<(Vec<u8>, String, Option<ExitStatus>)> {
        let folder = self.program.parent().unwrap_or(Path::new("."));
        let [mut told, mut written, mut errors] =
            [tempfile::tempfile_in(folder)?, tempfile::tempfile_in(folder)?, tempfile::tempfile_in(folder)?];
        told.write_all(layout.told(self.module).as_bytes())?;
        told.write_all(self.told_of_the_gpu().as_bytes())?;
        told.rewind()?;
        let mut command = start(self.program)?;
        command.stdin(told).stdout(written.try_clone()?).stderr(errors.try_clone()?);
        let status = Group::start(&mut command)?.wait(PATIENCE);
        Ok((read(&mut written)?, String::from_utf8_lossy(&read(&mut errors)?).into_owned(), status))
    }

    fn told_of_the_gpu(&self) -> String {
        let GpuFacts { name, memory_bytes, driver, attributes } = self.facts;
        let attributes: Vec<String> = attributes.iter().map(i32::to_string).collect();
        let name: String = name.chars().filter(|character| !character.is_control()).collect();
        let (count, attributes) = (attributes.len(), attributes.join(" "));
        format!("attributes {count} {attributes}\nmemory {memory_bytes} driver {driver} name {name}\n")
    }

    fn refused(&self, name: &str, why: &str) -> CompileFailure {
        let line = line_of_word(self.source, name);
        CompileFailure::Source(vec![Diagnostic { line, column: None, message: format!("{name} is refused: {why}") }])
    }
}

fn ended(status: ExitStatus, errors: &str) -> String {
    let last = errors.lines().rev().map(str::trim).find(|line| !line.is_empty());
    let last = last.map(|line| line.chars().filter(|letter| !letter.is_control()).take(200).collect::<String>());
    let said = last.map(|line| format!(": {line}")).unwrap_or_default();
    if status.signal() == Some(libc::SIGSYS) {
        return format!("launch was ended: {}{said}", walls::REFUSED_CALL);
    }
    match status.success() {
        true => format!("launch ended its process, or wrote what is no recording{said}"),
        false => format!("launch ended with {}{said}", describe(status)),
    }
}

/// What a child left in a file, without more than it may have written.
fn read(file: &mut File) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}
