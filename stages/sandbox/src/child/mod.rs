//! Child processes: started by one thread that never ends, each the leader of a process group that ends with it.
//!
//! Children ask the kernel to be killed when their parent dies, and by parent it means the *thread* that started them: a
//! child that a short-lived thread started would be killed when that thread is done.

pub mod answers;
pub mod process;
pub mod walls;

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, getpid, getppid};

/// Between two looks at something that is waited for.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// A child and its process group. Both are killed when this goes, and when this process dies the child is.
#[derive(Debug)]
pub struct Group {
    leader: Child,
    end: Option<ExitStatus>,
}

impl Group {
    /// Starts `command`.
    pub fn start(command: &mut Command) -> std::io::Result<Self> {
        die_with_parent(command.process_group(0));
        Ok(Self { leader: spawn(command)?, end: None })
    }

    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.leader.id()
    }

    /// Whether the child is known to be gone.
    pub fn is_gone(&self) -> bool {
        self.end.is_some()
    }

    /// How the child ended by itself; `None` where it lives on after `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        within(limit, || self.ended())
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        // Looked at without reaping it: a group can be killed safely only while its leader's number is taken.
        let look = || waitid(Id::Pid(self.pid()), WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT);
        let is_alive = !self.is_gone() && matches!(look(), Ok(WaitStatus::StillAlive));
        (!is_alive).then(|| self.kill())
    }

    /// Kills what lives of the group, and waits until the child is gone.
    pub fn kill(&mut self) -> ExitStatus {
        if let Some(status) = self.end {
            return status;
        }
        let _ = killpg(self.pid(), Signal::SIGKILL);
        // It may have gone over to another group.
        let _ = self.leader.kill();
        let status = self.leader.wait().unwrap_or_else(|_| ExitStatus::from_raw(Signal::SIGKILL as i32));
        *self.end.insert(status)
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.leader.id().cast_signed())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Looks again and again, ever more slowly, until there is something or the time is up.
pub fn within<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    let mut pause = Duration::from_millis(1);
    loop {
        let seen = look();
        if seen.is_some() || Instant::now() >= end {
            return seen;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// `exit status 3`, or the signal by name.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => match Signal::try_from(signal) {
            Ok(name) => format!("signal {signal} ({})", name.as_str()),
            Err(_) => format!("signal {signal}"),
        },
        (None, None) => "an unknown end".to_owned(),
    }
}

/// Bounds what a command may take; it leaves no core dump either.
#[expect(unsafe_code, reason = "limits belong to the child alone, so they are set between fork and exec")]
pub fn limit<const COUNT: usize>(command: &mut Command, limits: [(Resource, u64); COUNT]) {
    let prepare = move || {
        setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
        limits.iter().try_for_each(|(resource, most)| Ok(setrlimit(*resource, *most, *most)?))
    };
    // SAFETY: the closure makes system calls only: it allocates nothing and takes no lock.
    unsafe { command.pre_exec(prepare) };
}

#[expect(unsafe_code, reason = "a process can ask this for itself only, so it does between fork and exec")]
fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let prepare = move || {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have died before the line above.
        if getppid() == parent { Ok(()) } else { Err(Errno::ESRCH.into()) }
    };
    // SAFETY: the closure makes system calls only: it allocates nothing and takes no lock.
    unsafe { command.pre_exec(prepare) };
}

type Job = (Command, SyncSender<(Command, std::io::Result<Child>)>);

/// As `command.spawn()` does.
fn spawn(command: &mut Command) -> std::io::Result<Child> {
    let (answer, answered) = sync_channel(1);
    let gone = |_| std::io::Error::other("the thread that starts processes is gone");
    // The thread needs a command of its own; the caller gets it back.
    let owned = std::mem::replace(command, Command::new(""));
    spawner().send((owned, answer)).map_err(|_| gone(()))?;
    let (owned, child) = answered.recv().map_err(|_| gone(()))?;
    *command = owned;
    child
}

fn spawner() -> &'static Sender<Job> {
    static SPAWNER: OnceLock<Sender<Job>> = OnceLock::new();
    SPAWNER.get_or_init(|| {
        let (jobs, waiting) = channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, answer) in waiting {
                let child = command.spawn();
                // The caller waits for it.
                let _ = answer.send((command, child));
            }
        });
        jobs
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_child_outlives_the_thread_that_asked_for_it() {
        let start = || Group::start(&mut shell("sleep 0.2; exit 3")).unwrap();
        let mut group = std::thread::spawn(start).join().unwrap();
        assert_eq!(describe(group.wait(Duration::from_secs(10)).unwrap()), "exit status 3");
    }

    #[test]
    fn the_group_ends_with_its_leader() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut command = shell("sleep 1000 & exit 0");
        let mut group = Group::start(command.stdout(writer)).unwrap();
        drop(command);
        assert!(group.wait(Duration::from_secs(10)).unwrap().success());
        // The pipe ends when nobody holds it any more.
        assert_eq!(std::io::Read::read(&mut reader, &mut [0]).unwrap(), 0);
    }

    #[test]
    #[expect(unsafe_code, reason = "it joins the group between fork and exec")]
    fn a_leader_that_left_its_group_is_killed_too() {
        let ours = nix::unistd::getpgrp();
        let mut command = shell("sleep 30");
        // SAFETY: setpgid is a system call that allocates nothing and takes no lock.
        unsafe { command.pre_exec(move || Ok(nix::unistd::setpgid(Pid::from_raw(0), ours)?)) };
        let mut group = Group::start(&mut command).unwrap();
        assert_eq!(describe(group.kill()), "signal 9 (SIGKILL)");
    }
}
