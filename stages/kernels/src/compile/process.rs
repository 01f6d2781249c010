//! Running a compiler within limits: time, memory, the size of what it writes. Its whole process group ends with it.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

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
    /// By itself or by a signal, with what it wrote to its standard output and error.
    Exited(ExitStatus, String),
    /// It was killed when its time was up.
    TimedOut,
}

/// A command that will start in a group of its own, under the limits on memory and files, and with nothing of this process's
/// environment but the path: a source can include `/proc/self/environ`.
#[expect(unsafe_code, reason = "limits are set between fork and exec")]
pub fn limited(program: &Path, limits: &Limits) -> Command {
    let memory = limits.memory_bytes;
    let mut command = Command::new(program);
    command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path))).process_group(0);
    // SAFETY: setrlimit is async-signal-safe and the closure allocates nothing.
    unsafe {
        command.pre_exec(move || {
            setrlimit(Resource::RLIMIT_AS, memory, memory)?;
            setrlimit(Resource::RLIMIT_FSIZE, LARGEST_FILE_BYTES, LARGEST_FILE_BYTES)?;
            setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
            Ok(())
        });
    }
    command
}

/// Runs a [`limited`] command to its end, without standard input.
pub fn run(mut command: Command, time: Duration) -> std::io::Result<Ended> {
    let mut log = tempfile::tempfile()?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
    let mut child = command.spawn()?;
    match wait(&mut child, time)? {
        Some(status) => Ok(Ended::Exited(status, read(&mut log)?)),
        None => Ok(Ended::TimedOut),
    }
}

/// Ends a child that leads its group, and all of the group.
pub fn kill(child: &mut Child) {
    let _ = killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL);
    let _ = child.wait();
}

fn wait(child: &mut Child, time: Duration) -> std::io::Result<Option<ExitStatus>> {
    let end = Instant::now() + time;
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            kill(child);
            return Ok(None);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn read(log: &mut File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    log.rewind()?;
    log.take(LONGEST_LOG_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limits: &Limits) -> Ended {
        let mut command = limited(Path::new("/bin/sh"), limits);
        command.args(["-c", script]);
        run(command, limits.time).unwrap()
    }

    #[test]
    fn time_is_limited_for_the_whole_group() {
        let limits = Limits { time: Duration::from_millis(200), ..Limits::default() };
        let start = Instant::now();
        assert!(matches!(shell("sleep 60 & sleep 60", &limits), Ended::TimedOut));
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn memory_is_limited() {
        let limits = Limits { memory_bytes: 64 << 20, ..Limits::default() };
        let Ended::Exited(status, _) = shell("head -c 200000000 /dev/zero | tail", &limits) else {
            panic!("timed out")
        };
        assert!(!status.success());
    }

    #[test]
    fn only_the_path_is_handed_on() {
        let Ended::Exited(_, log) =
            shell("env | cut -d= -f1 | sort | grep -v -e PWD -e SHLVL -e '^_$'", &Limits::default())
        else {
            panic!("timed out")
        };
        assert_eq!(log, "PATH\n");
    }
}
