//! Walls around a program that runs a candidate's machine code.
//!
//! ```text
//! Walls::new().limiting(…)             what the program may have
//!      .passing(descriptor)            what is open for it
//!      .command(program, arguments)    a `Command` that puts itself behind the walls and becomes the program
//! ```
//!
//! Each wall stands for itself, and one that a system does not allow leaves the others standing: [`probe`] says which do, and
//! `cuda-agent doctor` tells. None of them makes a verdict fail.
//!
//! | wall | what it keeps out | where |
//! |---|---|---|
//! | a user of its own without rights | other processes' signals and files that not everybody may read, for root too | root |
//! | capabilities, no new privileges | all that root may | everywhere |
//! | namespaces (network, IPC, host name) | every network, loopback too; shared memory of System V | root with CAP_SYS_ADMIN, or user namespaces |
//! | Landlock | files: only the program, its libraries and `/proc/self/maps` can be read, none written; TCP, abstract sockets, signals to others | Linux 5.13; TCP 6.7, the last two 6.12 |
//! | seccomp | every system call that is not listed in `seccomp.rs`: sockets, processes, programs, ptrace, mounts, io_uring … | everywhere |
//! | limits | files' sizes, processes, open files, core dumps, and what the caller limits | everywhere |
//!
//! All this happens between fork and exec of a process with many threads, where nothing may allocate or take a lock. So
//! whatever needs memory is made before the fork ([`entry::Entry`]), and the rest is system calls. A program that is started
//! first (as `cuda-agent kernels …`) would be free of that rule, and costs milliseconds for each candidate.
//!
//! The namespaces are made once for each evaluator (`namespaces.rs`), since a network namespace takes tens of milliseconds to
//! go, and all candidates enter the same. There is no PID namespace: it needs a process between, and whoever can make no
//! process has nobody in it.

mod entry;
mod landlock;
mod libraries;
mod namespaces;
mod seccomp;

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::resource::Resource;

use entry::Entry;
pub use entry::Held;

/// What a program behind walls may have. Beside that it can read its own file and its shared libraries, and use the
/// descriptors 0, 1 and 2 of the command.
#[derive(Debug, Default)]
pub struct Walls {
    limits: Vec<(Resource, u64)>,
    passed: Vec<OwnedFd>,
}

impl Walls {
    /// Nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// A limit, beside those on files' sizes (0 bytes, unless it is given here), processes, open files and core dumps.
    pub fn limiting(mut self, resource: Resource, most: u64) -> Self {
        self.limits.push((resource, most));
        self
    }

    /// Hands an open descriptor over. The program has it under the number that this gives.
    pub fn passing(&mut self, descriptor: impl Into<OwnedFd>) -> RawFd {
        let descriptor = descriptor.into();
        let number = descriptor.as_raw_fd();
        self.passed.push(descriptor);
        number
    }

    /// A command that becomes `program` behind the walls, with these arguments and an empty environment, in `/`. It can be
    /// started once. Standard streams may be set on it, and nothing else that happens between fork and exec: this is the last
    /// that does.
    ///
    /// Fails where the program can't be read or an argument has a zero byte.
    pub fn command<A: AsRef<OsStr>>(self, program: &Path, arguments: &[A]) -> io::Result<Command> {
        let name = program.file_name().unwrap_or(program.as_os_str());
        let words = [name].into_iter().chain(arguments.iter().map(AsRef::as_ref));
        let words = words.map(|word| CString::new(word.as_bytes())).collect::<Result<Vec<_>, _>>()?;
        let libraries = libraries::of(program)?;
        let readable = libraries.readable.iter().map(PathBuf::as_path);
        let landlock = landlock::ruleset(program, libraries.loader.as_deref(), readable);
        let entry = Entry::into(program, words, self.passed, self.limits, landlock)?;
        let mut command = Command::new(program);
        command.env_clear().current_dir("/");
        enter(&mut command, entry);
        Ok(command)
    }
}

/// Which walls this system allows, tried in a process of its own.
pub fn probe() -> io::Result<Held> {
    let mut command = Command::new("/");
    enter(&mut command, Entry::to_nowhere(landlock::ruleset(Path::new("/dev/null"), None, std::iter::empty()))?);
    // Not by the thread that starts programs: this one lives until the process has ended.
    let status = command.status()?;
    status.code().map(Held::from_exit_code).ok_or_else(|| io::Error::other(super::describe(status)))
}

/// What is said of a program that was killed for a system call.
pub const REFUSED_CALL: &str = "it made a system call that is refused";

#[expect(unsafe_code, reason = "a process puts itself behind walls, between fork and exec")]
fn enter(command: &mut Command, mut entry: Entry) {
    // SAFETY: `pass` makes system calls only: it allocates nothing and takes no lock.
    unsafe { command.pre_exec(move || entry.pass()) };
}

#[cfg(test)]
#[path = "walls_test.rs"]
mod tests;
