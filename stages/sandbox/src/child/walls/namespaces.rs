//! The namespaces that all candidates of an evaluator enter: a network with nothing in it, not even loopback, IPC and a
//! host name of their own.
//!
//! They are made once, by a short-lived child, and kept open. To make them for each program would take 30 to 50 ms of the
//! kernel's time each.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, getegid, geteuid};

/// Open namespaces, in the order in which they have to be entered: a user namespace, if any, gives the right to the others.
#[derive(Debug, Default)]
pub struct Namespaces(pub Vec<OwnedFd>);

/// Those of this process; none where the system allows none.
pub fn namespaces() -> &'static Namespaces {
    static NAMESPACES: OnceLock<Namespaces> = OnceLock::new();
    NAMESPACES.get_or_init(|| make().unwrap_or_default())
}

const PLAIN: u8 = b'p';
const WITH_USER: u8 = b'u';

#[expect(unsafe_code, reason = "namespaces are made by a process of one thread, so that this one stays where it is")]
fn make() -> io::Result<Namespaces> {
    let (mut made, mut says_made) = io::pipe()?;
    let (mut done, says_done) = io::pipe()?;
    let (user, group) = (geteuid(), getegid());
    let files = [
        (c"/proc/self/setgroups", "deny".to_owned()),
        (c"/proc/self/uid_map", format!("{user} {user} 1")),
        (c"/proc/self/gid_map", format!("{group} {group} 1")),
    ];
    // SAFETY: the child makes system calls only, on memory that is there already, and ends without leaving this function.
    match unsafe { fork() }? {
        ForkResult::Child => {
            let kind = enter_new(&files);
            let _ = says_made.write(&[kind]);
            drop(says_done);
            let _ = done.read(&mut [0]);
            // SAFETY: it ends the process and runs no handlers.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            drop((says_made, done));
            let mut kind = [0];
            let read = made.read(&mut kind);
            let names: &[&str] = match kind[0] {
                PLAIN => &["ipc", "uts", "net"],
                WITH_USER => &["user", "ipc", "uts", "net"],
                _ => &[],
            };
            let open = |name: &&str| File::open(format!("/proc/{child}/ns/{name}")).map(OwnedFd::from);
            let opened = names.iter().map(open).collect::<io::Result<Vec<_>>>();
            drop(says_done);
            waitpid(child, None)?;
            read?;
            opened.map(Namespaces)
        }
    }
}

/// Allocates nothing.
fn enter_new(files: &[(&std::ffi::CStr, String)]) -> u8 {
    let wanted = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    if unshare(wanted).is_ok() {
        return PLAIN;
    }
    if unshare(wanted | CloneFlags::CLONE_NEWUSER).is_err() {
        return 0;
    }
    let written = files.iter().all(|(path, text)| super::entry::write_to(path, text.as_bytes()));
    if written { WITH_USER } else { 0 }
}
