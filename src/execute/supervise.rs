//! The small process between the engine and a program: it ends everything the program started, whatever happens.
//!
//! Claims, each with a test in `tests/`:
//! - when the engine goes, even by `kill -9`, the pipe from it closes, and the program and all its descendants die;
//! - when the program ends, descendants that it left behind die, those in sessions of their own too;
//! - the program's exit status or signal is passed on as it was.
//!
//! Where the system allows, the program runs in PID and mount namespaces of its own (with its own `/proc`, which GPU
//! drivers insist on), and the kernel does the killing. Elsewhere this process is a subreaper and looks for
//! descendants itself; then a `kill -9` of *this* process alone leaves grandchildren behind. That is not covered.
//!
//! Supervisors are forked by one server an engine (`supervise serve`): starting this binary anew takes longer than all that
//! a supervisor does. The server keeps nothing of theirs, so its end ends none of them, and the engine starts another.

use std::convert::Infallible;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::prctl;
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, kill, killpg, signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg};
use nix::unistd::{ForkResult, Pid, execvp, fork, pipe2, read, setpgid, setsid, write};

/// The hidden command of the binary that runs [`main`].
pub const COMMAND: &str = "supervise";
/// Exit status where the program could not be started.
pub const CANNOT_START: i32 = 127;
/// Exit status of a probe where namespaces cannot be had.
const NO_NAMESPACES: i32 = 3;
/// How a process ended, in one number: its exit code, or this and a signal.
const SIGNALS: i32 = 1000;

/// The descriptor on which a program finds its events: one digit, since `sh` redirects to no other.
pub const EVENTS: RawFd = 3;

/// `supervise probe`, or `supervise serve` with a socket as standard input.
pub fn main(arguments: &[String]) -> i32 {
    match arguments {
        [mode] if mode == "probe" => i32::from(!namespaces_work()) * NO_NAMESPACES,
        [mode] if mode == "serve" => serve().map_or_else(|error| error as i32, |()| 0),
        _ => 2,
    }
}

/// What to start.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// Whether it runs without namespaces of its own, even where they can be had.
    pub plain: bool,
    /// Where it runs.
    pub folder: CString,
    /// Its whole environment, `NAME=VALUE` each.
    pub environment: Vec<CString>,
    /// Program and arguments.
    pub words: Vec<CString>,
}

/// What goes between the engine and a supervisor, the supervisor's ends.
pub struct Ends {
    /// Reading: a byte asks the program to end, and the end of the pipe kills it.
    pub control: OwnedFd,
    /// Where the program writes its events.
    pub events: OwnedFd,
    /// Its standard input.
    pub input: OwnedFd,
    /// Its standard output and standard error.
    pub output: OwnedFd,
    /// Where the supervisor writes how the program ended: four bytes, little endian (see [`ended`]).
    pub status: OwnedFd,
}

/// How many descriptors come with a request: what to start, and [`Ends`].
const DESCRIPTORS: usize = 6;

/// Asks a server to start a program. The text travels in a file, since a message has a largest size.
///
/// # Errors
/// `EPIPE` or `ECONNRESET`: the server has ended.
pub fn request(socket: BorrowedFd, program: &Program, ends: &Ends) -> std::io::Result<()> {
    let mut text = File::from(memfd_create(c"program", MFdFlags::MFD_CLOEXEC)?);
    text.write_all(&program.to_bytes())?;
    std::io::Seek::rewind(&mut text)?;
    let Ends { control, events, input, output, status } = ends;
    let descriptors: [RawFd; DESCRIPTORS] = [
        text.as_raw_fd(),
        control.as_raw_fd(),
        events.as_raw_fd(),
        input.as_raw_fd(),
        output.as_raw_fd(),
        status.as_raw_fd(),
    ];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    sendmsg::<UnixAddr>(socket.as_raw_fd(), &[IoSlice::new(b"P")], &rights, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

impl Program {
    /// Texts that end in NUL bytes: `plain` or an empty one, the folder, how many variables, variables, words.
    fn to_bytes(&self) -> Vec<u8> {
        let count = CString::new(self.environment.len().to_string()).expect("digits");
        let first = [if self.plain { c"plain" } else { c"" }, &self.folder, &count];
        let rest = self.environment.iter().chain(&self.words).map(CString::as_c_str);
        first.into_iter().chain(rest).flat_map(CStr::to_bytes_with_nul).copied().collect()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let texts =
            bytes.split_inclusive(|byte| *byte == 0).map(|text| Some(CStr::from_bytes_with_nul(text).ok()?.into()));
        let mut texts = texts.collect::<Option<Vec<CString>>>()?.into_iter();
        let plain = !texts.next()?.is_empty();
        let folder = texts.next()?;
        let count = texts.next()?.to_str().ok()?.parse().ok()?;
        let environment: Vec<CString> = texts.by_ref().take(count).collect();
        (environment.len() == count).then(|| Self { plain, folder, environment, words: texts.collect() })
    }
}

/// Starts a supervisor for each request, until the engine is gone.
fn serve() -> nix::Result<()> {
    // No folder is kept busy, and no child waits to be reaped.
    let _ = nix::unistd::chdir(c"/");
    set_action(Signal::SIGCHLD, SigHandler::SigIgn);
    let socket = std::io::stdin();
    let mut namespaces = None;
    loop {
        let (program, ends) = match receive(socket.as_fd()) {
            Ok(Some(received)) => received,
            Ok(None) => return Ok(()),
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error),
        };
        // Asked for by the first program that may have them.
        let namespaces = !program.plain && *namespaces.get_or_insert_with(|| try_apart(namespaces_work));
        match fork_process() {
            Ok(ForkResult::Child) => exit_now(become_supervisor(&program, ends, namespaces)),
            Ok(ForkResult::Parent { .. }) => {}
            // Where there are as many processes as there may be, the next program may start all the same.
            Err(error) => {
                let _ = write(&ends.output, format!("no process could be made: {}\n", error.desc()).as_bytes());
                let _ = write(&ends.status, &CANNOT_START.to_le_bytes());
            }
        }
    }
}

/// Whether something works, tried in a process of its own.
fn try_apart(works: impl Fn() -> bool) -> bool {
    set_action(Signal::SIGCHLD, SigHandler::SigDfl);
    let worked = match fork_process() {
        Ok(ForkResult::Child) => exit_now(i32::from(!works())),
        Ok(ForkResult::Parent { child }) => matches!(reap(child, 0), Ok(Some((_, Some(0))))),
        Err(_) => false,
    };
    set_action(Signal::SIGCHLD, SigHandler::SigIgn);
    worked
}

/// The next request; `None` where there will be none.
fn receive(socket: BorrowedFd) -> nix::Result<Option<(Program, Ends)>> {
    let mut byte = [0u8; 1];
    let mut space = nix::cmsg_space!([RawFd; DESCRIPTORS]);
    let mut into = [IoSliceMut::new(&mut byte)];
    let message = recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut into, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut descriptors = Vec::with_capacity(DESCRIPTORS);
    for rights in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(received) = rights {
            descriptors.extend(received.into_iter().map(adopt));
        }
    }
    let Ok([text, control, events, input, output, status]) = <[OwnedFd; DESCRIPTORS]>::try_from(descriptors) else {
        return Ok(None);
    };
    let mut bytes = Vec::new();
    File::from(text).read_to_end(&mut bytes).map_err(|_| Errno::EIO)?;
    let program = Program::from_bytes(&bytes).ok_or(Errno::EINVAL)?;
    Ok(Some((program, Ends { control, events, input, output, status })))
}

/// One supervisor, from its start to its end.
fn become_supervisor(program: &Program, ends: Ends, namespaces: bool) -> i32 {
    let Ends { control, events, input, output, status } = ends;
    set_action(Signal::SIGCHLD, SigHandler::SigDfl);
    let begun = || -> nix::Result<()> {
        // Ctrl-C is for the engine, which ends its programs in its own way.
        setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
        place(&input, 0)?;
        place(&output, 1)?;
        place(&output, 2)?;
        drop((input, output));
        set_environment(&program.environment);
        nix::unistd::chdir(program.folder.as_c_str())
    };
    let ended = begun().and_then(|()| supervise(control, events, namespaces, program)).unwrap_or_else(|error| {
        report(&format!("the program could not be supervised: {error}"));
        CANNOT_START
    });
    // Last of all: the engine then waits for nothing but the ends of the pipes.
    let _ = write(&status, &ended.to_le_bytes());
    0
}

/// How a program ended, as its supervisor wrote it: an exit code or a signal.
pub fn ended(status: [u8; 4]) -> Result<i32, i32> {
    match i32::from_le_bytes(status) {
        code if code < SIGNALS => Ok(code),
        signal => Err(signal - SIGNALS),
    }
}

/// Tries it in a child, since a process cannot leave a namespace again.
fn namespaces_work() -> bool {
    let enter = || -> nix::Result<()> {
        enter_namespaces()?;
        match fork_process()? {
            ForkResult::Child => {
                let mounted = mount_proc().is_ok();
                exit_now(i32::from(!mounted))
            }
            ForkResult::Parent { child } => match reap(child, 0)? {
                Some((_, Some(0))) => Ok(()),
                _ => Err(Errno::EPERM),
            },
        }
    };
    enter().is_ok()
}

fn enter_namespaces() -> nix::Result<()> {
    unshare(CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS)?;
    // Mounts made below must not show outside.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
}

fn mount_proc() -> nix::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>)
}

fn supervise(control: OwnedFd, events: OwnedFd, namespaces: bool, program: &Program) -> nix::Result<i32> {
    prctl::set_child_subreaper(true)?;
    let watched = watched_signals();
    let mut before = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&watched), Some(&mut before))?;
    let signals = SignalFd::with_flags(&watched, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    if namespaces {
        enter_namespaces()?;
    }
    let (status_in, status_out) = pipe2(OFlag::O_CLOEXEC)?;
    let child = match fork_process()? {
        ForkResult::Child => {
            drop((control, status_in, signals));
            if namespaces { init(&before, &status_out, &events, program) } else { start(&before, &events, program) }
        }
        ForkResult::Parent { child } => child,
    };
    drop((status_out, events));
    let status = watch(&control, &signals, child, namespaces)?;
    sweep();
    Ok(if namespaces { read_status(&status_in).unwrap_or(status) } else { status })
}

fn watched_signals() -> SigSet {
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    set.add(Signal::SIGTERM);
    set
}

/// How a process ended, in one number (see [`SIGNALS`]). `None` for one that has only stopped.
fn number(status: i32) -> Option<i32> {
    use nix::libc::{WEXITSTATUS, WIFEXITED, WIFSIGNALED, WTERMSIG};
    match status {
        status if WIFEXITED(status) => Some(WEXITSTATUS(status)),
        status if WIFSIGNALED(status) => Some(SIGNALS + WTERMSIG(status)),
        _ => None,
    }
}

/// The status of one of these children; `None` where the flags say not to wait for one.
#[expect(
    unsafe_code,
    reason = "nix knows no real-time signals: its waitpid reaps such a child and then returns EINVAL"
)]
fn reap(children: Pid, flags: i32) -> nix::Result<Option<(Pid, Option<i32>)>> {
    let mut status = 0;
    // SAFETY: the pointer is to a local variable, which the call only writes.
    let pid = Errno::result(unsafe { nix::libc::waitpid(children.as_raw(), &mut status, flags) })?;
    Ok((pid != 0).then(|| (Pid::from_raw(pid), number(status))))
}

/// Reaps whatever has ended, and says how `child` did if it is among them. Where there are no children any more, `child`
/// is gone too, and whoever waits for it must not wait for ever.
fn reap_until(child: Pid) -> Option<i32> {
    const ANY: Pid = Pid::from_raw(-1);
    loop {
        match reap(ANY, nix::libc::WNOHANG) {
            Ok(None) => return None,
            Ok(Some((pid, Some(number)))) if pid == child => return Some(number),
            Ok(Some(_)) | Err(Errno::EINTR) => {}
            Err(_) => return Some(CANNOT_START),
        }
    }
}

/// Waits until the child ends. The engine's pipe says when to end it: a byte asks politely, the end of the pipe means
/// that the engine is gone.
fn watch(control: &OwnedFd, signals: &SignalFd, child: Pid, namespaces: bool) -> nix::Result<i32> {
    loop {
        let mut polled =
            [PollFd::new(signals.as_fd(), PollFlags::POLLIN), PollFd::new(control.as_fd(), PollFlags::POLLIN)];
        match poll(&mut polled, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            other => other?,
        };
        let from_engine = polled[1].revents().is_some_and(|events| !events.is_empty());
        while let Ok(Some(signal)) = signals.read_signal() {
            if signal.ssi_signo == Signal::SIGTERM as u32 {
                terminate(child, namespaces);
            }
        }
        if from_engine {
            let mut byte = [0u8; 1];
            match read(control, &mut byte) {
                Ok(0) | Err(_) => {
                    let _ = kill(child, Signal::SIGKILL);
                    // The sweep reaps the child with all others, so there is nothing left to wait for.
                    sweep();
                    return Ok(SIGNALS + Signal::SIGKILL as i32);
                }
                Ok(_) => terminate(child, namespaces),
            }
        }
        if let Some(number) = reap_until(child) {
            return Ok(number);
        }
    }
}

/// Asks the program to end: through init where there is one, since nobody else sees into its namespace.
fn terminate(child: Pid, namespaces: bool) {
    let _ = if namespaces { kill(child, Signal::SIGTERM) } else { killpg(child, Signal::SIGTERM) };
}

/// Process 1 of the program's namespace: starts it, reaps orphans, and ends with it; then the kernel kills the rest.
fn init(mask: &SigSet, status: &OwnedFd, events: &OwnedFd, program: &Program) -> ! {
    let outcome = || -> nix::Result<Infallible> {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        mount_proc()?;
        let signals = watched_signals();
        let child = match fork_process()? {
            ForkResult::Child => start(mask, events, program),
            ForkResult::Parent { child } => child,
        };
        loop {
            if signals.wait()? == Signal::SIGTERM {
                let _ = killpg(child, Signal::SIGTERM);
            }
            if let Some(number) = reap_until(child) {
                let _ = write(status, &number.to_le_bytes());
                exit_now(0);
            }
        }
    };
    let Err(error) = outcome();
    report(&format!("the program could not be started: {error}"));
    exit_now(CANNOT_START)
}

/// Becomes the program, in a session of its own.
fn start(mask: &SigSet, events: &OwnedFd, program: &Program) -> ! {
    let outcome = || -> Result<Infallible, String> {
        let fail = |error: Errno| error.desc().to_owned();
        prctl::set_pdeathsig(Signal::SIGKILL).map_err(fail)?;
        setsid().map_err(fail)?;
        // std ignores it, and an ignored signal is inherited by programs.
        set_action(Signal::SIGPIPE, SigHandler::SigDfl);
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(mask), None).map_err(fail)?;
        place(events, EVENTS).map_err(fail)?;
        let first = program.words.first().ok_or("the command is empty")?;
        execvp(first, &program.words).map_err(fail)
    };
    let Err(error) = outcome();
    let first = program.words.first().map(|word| word.to_string_lossy());
    report(&format!("{}: {error}", first.unwrap_or_default()));
    exit_now(CANNOT_START)
}

/// Kills and reaps every descendant: as subreaper, whatever lost its parent is a child of this process.
fn sweep() {
    for _ in 0..1000 {
        let descendants = descendants();
        for pid in &descendants {
            let _ = kill(*pid, Signal::SIGKILL);
        }
        while matches!(reap(Pid::from_raw(-1), nix::libc::WNOHANG), Ok(Some(_))) {}
        if descendants.is_empty() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn descendants() -> Vec<Pid> {
    let own = std::process::id() as i32;
    let Ok(children) = std::fs::read_to_string(format!("/proc/{own}/task/{own}/children")) else { return scan(own) };
    // The common case: nothing is left, and nothing more is read.
    if children.trim().is_empty() { Vec::new() } else { scan(own) }
}

fn scan(own: i32) -> Vec<Pid> {
    let Ok(items) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = items.filter_map(|item| item.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let parents: Vec<(i32, i32)> = pids.filter_map(|pid| Some((pid, parent_of(pid)?))).collect();
    let mut found = vec![own];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        found.extend(parents.iter().filter(|(_, above)| *above == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    found[1..].iter().map(|pid| Pid::from_raw(*pid)).collect()
}

/// The parent of a process that is not a zombie.
fn parent_of(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name is in brackets and may hold anything.
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    let state = fields.next()?;
    (state != "Z").then(|| fields.next()?.parse().ok()).flatten()
}

/// Into the program's log; where nobody reads that any more, `eprintln` would panic.
fn report(message: &str) {
    let _ = std::io::stderr().write_all(format!("{message}\n").as_bytes());
}

fn read_status(pipe: &OwnedFd) -> Option<i32> {
    let mut bytes = [0u8; 4];
    (read(pipe, &mut bytes) == Ok(4)).then(|| i32::from_le_bytes(bytes))
}

#[expect(unsafe_code, reason = "fork is safe here: this process has one thread")]
fn fork_process() -> nix::Result<ForkResult> {
    // SAFETY: the supervisor never starts a thread, so the child may run any code.
    unsafe { fork() }
}

#[expect(unsafe_code, reason = "the message brought this descriptor to this process alone")]
fn adopt(descriptor: RawFd) -> OwnedFd {
    // SAFETY: the system has just opened it for us; nobody else here uses it.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

/// Makes a descriptor known by that number, to programs that are started too; whatever had the number is not ours any more.
#[expect(unsafe_code, reason = "a descriptor known by its number")]
fn place(descriptor: &OwnedFd, number: RawFd) -> nix::Result<()> {
    if descriptor.as_raw_fd() == number {
        return fcntl(descriptor, FcntlArg::F_SETFD(FdFlag::empty())).map(drop);
    }
    // SAFETY: both are numbers to the system. Nobody here owns the new one: the first three are std's, which never closes
    // them, and the events' is taken by a process that becomes another program right after.
    Errno::result(unsafe { nix::libc::dup2(descriptor.as_raw_fd(), number) }).map(drop)
}

#[expect(unsafe_code, reason = "a process of one thread, whose environment nobody reads meanwhile")]
fn set_environment(variables: &[CString]) {
    // SAFETY: the system keeps the texts themselves, and the program lives as long as this process.
    unsafe {
        nix::libc::clearenv();
        for variable in variables {
            nix::libc::putenv(variable.as_ptr().cast_mut());
        }
    }
}

#[expect(unsafe_code, reason = "signals' actions are set by a call that could name a handler")]
fn set_action(which: Signal, action: SigHandler) {
    // SAFETY: ignoring a signal and its default action are no handlers.
    let _ = unsafe { signal(which, action) };
}

/// Without the parent's buffers and destructors.
#[expect(unsafe_code, reason = "std has no exit without destructors")]
fn exit_now(code: i32) -> ! {
    // SAFETY: `_exit` only ends the process.
    unsafe { nix::libc::_exit(code) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text() -> impl Strategy<Value = CString> {
        proptest::collection::vec(1u8.., 0..20).prop_map(|bytes| CString::new(bytes).expect("no NUL byte"))
    }

    fn texts() -> impl Strategy<Value = Vec<CString>> {
        proptest::collection::vec(text(), 0..6)
    }

    proptest! {
        #[test]
        fn a_request_arrives_as_it_was_sent(plain in any::<bool>(), folder in text(), environment in texts(), words in texts()) {
            let program = Program { plain, folder, environment, words };
            prop_assert_eq!(Program::from_bytes(&program.to_bytes()), Some(program));
        }

        #[test]
        fn a_request_cut_short_is_none_or_another(bytes in proptest::collection::vec(0u8..3, 0..30)) {
            let _ = Program::from_bytes(&bytes);
        }
    }

    #[test]
    fn exits_and_signals_are_told_apart() {
        assert_eq!(
            [0, 127, 255, SIGNALS + 9].map(|number| ended(number.to_le_bytes())),
            [Ok(0), Ok(127), Ok(255), Err(9)]
        );
    }
}
