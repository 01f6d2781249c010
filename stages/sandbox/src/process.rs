//! Running a compiler within limits: time, memory, the size of what it writes.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::resource::Resource;
use nix::sys::statvfs::statvfs;

use crate::child::{Group, describe, limit};
use crate::fault::EvaluatorError;

/// What one compiler may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Wall-clock time.
    pub time: Duration,
    /// Address space of each process, in bytes.
    pub memory_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { time: Duration::from_secs(60), memory_bytes: 4 << 30 }
    }
}

/// Larger files no compiler needs to write here.
const LARGEST_FILE_BYTES: u64 = 512 << 20;

/// More of a log is not read.
const LONGEST_LOG_BYTES: u64 = 1 << 20;

/// How a compiler ended.
#[derive(Debug)]
pub enum Ended {
    /// Well, with what it wrote to its standard output and error.
    Well(String),
    /// With errors in the source, likewise.
    Badly(String),
    /// By a limit, which says nothing of the source, with what happened.
    Limit(String),
}

/// A command under the limits on memory and files, and with nothing of this process's environment but the path: a source can
/// include `/proc/self/environ`.
pub fn limited(program: &Path, limits: &Limits) -> Command {
    let mut command = Command::new(program);
    command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    let (memory, file) = (Resource::RLIMIT_AS, Resource::RLIMIT_FSIZE);
    limit(&mut command, [(memory, limits.memory_bytes), (file, LARGEST_FILE_BYTES)]);
    command
}

/// Runs a [`limited`] command in a folder, to its end, without standard input.
pub fn run(mut command: Command, folder: &Path, limits: &Limits) -> Result<Ended, EvaluatorError> {
    command.current_dir(folder).env("TMPDIR", folder);
    let ended = end(&mut command, limits.time);
    let ended = ended
        .map_err(|error| EvaluatorError::new(format!("cannot run {}: {error}", command.get_program().display())))?;
    let Some((status, log)) = ended else { return Ok(Ended::Limit(took_too_long(limits))) };
    if !status.success() && log.contains(DISK_IS_FULL) && is_full(folder) {
        let hint = "make room; `cuda-agent gc` says what the store holds";
        return Err(EvaluatorError::new(format!("{}: {DISK_IS_FULL}", folder.display())).with_hint(hint));
    }
    let broken = log.lines().find(|line| BROKEN.iter().any(|sign| line.contains(sign)));
    Ok(match broken {
        _ if status.success() => Ended::Well(log),
        None if status.code().is_some() => Ended::Badly(log),
        line => {
            let (how, line) = (describe(status), line.unwrap_or("it said nothing of it").trim());
            Ended::Limit(format!("the compiler broke, perhaps for lack of memory ({how}): {line}"))
        }
    })
}

/// What `strerror` says.
const DISK_IS_FULL: &str = "No space left on device";

/// A compiler that needs more than this for one candidate is at its other limit.
const LITTLE_SPACE_BYTES: u64 = 64 << 20;

/// A source can make a compiler say that the disk is full.
fn is_full(folder: &Path) -> bool {
    statvfs(folder).is_ok_and(|disk| disk.blocks_available() * disk.fragment_size() < LITTLE_SPACE_BYTES)
}

fn end(command: &mut Command, time: Duration) -> std::io::Result<Option<(ExitStatus, String)>> {
    let mut log = tempfile::tempfile()?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
    let status = Group::start(command)?.wait(time);
    status.map(|status| Ok((status, read(&mut log)?))).transpose()
}

/// What is said of a compiler whose time was up.
pub fn took_too_long(limits: &Limits) -> String {
    format!("the compiler took more than {} s", limits.time.as_secs())
}

/// What compilers and their parts say when memory ends or a part dies.
const BROKEN: [&str; 6] = [
    "died due to signal",
    "Killed signal",
    "internal compiler error",
    "out of memory",
    "memory exhausted",
    "instance of 'std::bad_alloc'",
];

fn read(log: &mut File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    log.rewind()?;
    log.take(LONGEST_LOG_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn shell(script: &str, limits: &Limits) -> Ended {
        let mut command = limited(Path::new("/bin/sh"), limits);
        command.args(["-c", script]);
        run(command, Path::new("/tmp"), limits).unwrap()
    }

    #[test]
    fn time_is_limited_for_the_whole_group() {
        let limits = Limits { time: Duration::from_millis(200), ..Limits::default() };
        let start = Instant::now();
        assert!(
            matches!(shell("sleep 60 & sleep 60", &limits), Ended::Limit(why) if why.contains("took more than 0 s"))
        );
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn memory_is_limited() {
        let limits = Limits { memory_bytes: 64 << 20, ..Limits::default() };
        let ended = shell("head -c 200000000 /dev/zero | tail", &limits);
        assert!(matches!(&ended, Ended::Limit(why) if why.contains("lack of memory (exit status 1)")), "{ended:?}");
    }

    #[test]
    fn a_compiler_that_breaks_says_nothing_of_the_machine() {
        let script =
            "echo 'g++: internal compiler error: Segmentation fault signal terminated program cc1plus'; exit 4";
        let ended = shell(script, &Limits::default());
        assert!(matches!(&ended, Ended::Limit(why) if why.contains("the compiler broke")), "{ended:?}");
    }

    #[test]
    fn errors_in_the_source_are_none_of_the_limits() {
        let ended = shell("echo \"error: 'bad_alloc' is not a member of 'std'\" >&2; exit 1", &Limits::default());
        assert!(matches!(&ended, Ended::Badly(log) if log.starts_with("error: ")), "{ended:?}");
    }

    #[test]
    fn only_the_path_is_handed_on() {
        let ended = shell("env | cut -d= -f1 | sort | grep -v -e PWD -e SHLVL -e '^_$'", &Limits::default());
        assert!(matches!(&ended, Ended::Well(log) if log == "PATH\nTMPDIR\n"), "{ended:?}");
    }
}
