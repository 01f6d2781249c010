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

use std::convert::Infallible;
use std::ffi::CString;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, killpg, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{ForkResult, Pid, execvp, fork, pipe, read, setsid, write};

/// The hidden command of the binary that runs [`main`].
pub const COMMAND: &str = "supervise";
/// Exit status where the program could not be started.
pub const CANNOT_START: i32 = 127;
/// Exit status of a probe where namespaces cannot be had.
const NO_NAMESPACES: i32 = 3;

/// The descriptor on which a program finds its events: one digit, since `sh` redirects to no other.
pub const EVENTS: RawFd = 3;

/// `supervise probe`, or `supervise (namespaces|plain) CONTROL_FD EVENTS_FD PROGRAM [ARGUMENT…]`.
pub fn main(arguments: &[String]) -> i32 {
    match arguments {
        [mode] if mode == "probe" => i32::from(!namespaces_work()) * NO_NAMESPACES,
        [mode, control, events, program @ ..] => match (control.parse(), events.parse()) {
            (Ok(control), Ok(events)) => {
                let program = Program { events, words: program };
                supervise(control, mode == "namespaces", &program).unwrap_or_else(|error| {
                    report(&format!("the program could not be supervised: {error}"));
                    CANNOT_START
                })
            }
            _ => 2,
        },
        _ => 2,
    }
}

/// What to start.
struct Program<'a> {
    events: RawFd,
    words: &'a [String],
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

fn supervise(control: RawFd, namespaces: bool, program: &Program) -> nix::Result<i32> {
    let control = adopt(control);
    fcntl(&control, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    prctl::set_child_subreaper(true)?;
    let watched = watched_signals();
    let mut before = SigSet::empty();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&watched), Some(&mut before))?;
    let signals = SignalFd::with_flags(&watched, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    if namespaces {
        enter_namespaces()?;
    }
    let (status_in, status_out) = pipe()?;
    let child = match fork_process()? {
        ForkResult::Child => {
            drop((control, status_in, signals));
            if namespaces { init(&before, &status_out, program) } else { start(&before, program) }
        }
        ForkResult::Parent { child } => child,
    };
    drop(status_out);
    let status = watch(&control, &signals, child, namespaces)?;
    sweep();
    let status = if namespaces { read_status(&status_in).unwrap_or(status) } else { status };
    Ok(pass_on(status))
}

fn watched_signals() -> SigSet {
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    set.add(Signal::SIGTERM);
    set
}

/// How a process ended, in one number: an exit code, or 1000 and a signal. `None` for one that has only stopped.
fn number(status: i32) -> Option<i32> {
    use nix::libc::{WEXITSTATUS, WIFEXITED, WIFSIGNALED, WTERMSIG};
    match status {
        status if WIFEXITED(status) => Some(WEXITSTATUS(status)),
        status if WIFSIGNALED(status) => Some(1000 + WTERMSIG(status)),
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
                    return Ok(1000 + Signal::SIGKILL as i32);
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
fn init(mask: &SigSet, status: &OwnedFd, program: &Program) -> ! {
    let outcome = || -> nix::Result<Infallible> {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        mount_proc()?;
        let signals = watched_signals();
        let child = match fork_process()? {
            ForkResult::Child => start(mask, program),
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
fn start(mask: &SigSet, program: &Program) -> ! {
    let outcome = || -> Result<Infallible, String> {
        let fail = |error: Errno| error.desc().to_owned();
        prctl::set_pdeathsig(Signal::SIGKILL).map_err(fail)?;
        setsid().map_err(fail)?;
        restore_broken_pipe();
        sigprocmask(SigmaskHow::SIG_SETMASK, Some(mask), None).map_err(fail)?;
        place_events(program.events).map_err(fail)?;
        let words: Result<Vec<CString>, _> = program.words.iter().map(|word| CString::new(word.as_str())).collect();
        let words = words.map_err(|_| "a word of the command has a NUL byte".to_owned())?;
        let first = words.first().ok_or("the command is empty")?;
        execvp(first, &words).map_err(fail)
    };
    let Err(error) = outcome();
    report(&format!("{}: {error}", program.words.first().map_or("", String::as_str)));
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
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{message}");
}

fn read_status(pipe: &OwnedFd) -> Option<i32> {
    let mut bytes = [0u8; 4];
    (read(pipe, &mut bytes) == Ok(4)).then(|| i32::from_le_bytes(bytes))
}

/// Ends as the program ended: where a signal killed it, by the same signal.
fn pass_on(status: i32) -> i32 {
    if status < 1000 {
        return status;
    }
    // No second core dump of a process that did nothing wrong.
    let _ = prctl::set_dumpable(false);
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None);
    die_by(status - 1000);
    128 + status - 1000
}

#[expect(unsafe_code, reason = "fork is safe here: this process has one thread")]
fn fork_process() -> nix::Result<ForkResult> {
    // SAFETY: the supervisor never starts a thread, so the child may run any code.
    unsafe { fork() }
}

#[expect(unsafe_code, reason = "the engine opened this descriptor for this process alone")]
fn adopt(descriptor: RawFd) -> OwnedFd {
    // SAFETY: the number comes from the engine, which left the descriptor open for us; nobody else here uses it.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

#[expect(unsafe_code, reason = "a descriptor known by its number; whatever had the new number is not ours any more")]
fn place_events(events: RawFd) -> nix::Result<()> {
    if events == EVENTS {
        return Ok(());
    }
    // SAFETY: both are numbers to the system, and this process becomes another program right after.
    let moved = unsafe { nix::libc::dup2(events, EVENTS) };
    Errno::result(moved)?;
    // SAFETY: the old number is of no more use.
    Errno::result(unsafe { nix::libc::close(events) }).map(drop)
}

#[expect(unsafe_code, reason = "std ignores SIGPIPE, and an ignored signal is inherited by programs")]
fn restore_broken_pipe() {
    // SAFETY: the default action is no handler.
    let _ = unsafe { nix::sys::signal::signal(Signal::SIGPIPE, nix::sys::signal::SigHandler::SigDfl) };
}

#[expect(unsafe_code, reason = "nix knows no real-time signals")]
fn die_by(signal: i32) {
    // SAFETY: the default action is no handler, and raising a signal touches no memory. A number that is no signal is refused.
    unsafe {
        nix::libc::signal(signal, nix::libc::SIG_DFL);
        nix::libc::raise(signal);
    }
}

/// Without the parent's buffers and destructors.
#[expect(unsafe_code, reason = "std has no exit without destructors")]
fn exit_now(code: i32) -> ! {
    // SAFETY: `_exit` only ends the process.
    unsafe { nix::libc::_exit(code) }
}
