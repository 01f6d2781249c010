//! A child process that answers lines by lines, within a time limit.
//!
//! The child leads a process group of its own and dies with this process. What it prints on standard error is drained
//! all the time, so that a flood cannot stop it, and the end of it is kept for messages.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Group, describe, within};

/// How much of standard error is kept at least.
const KEPT: usize = 64 * 1024;

/// An answer longer than this is no answer.
const LONGEST_LINE: usize = 64 * 1024 * 1024;

/// How long a child that closed its end may take to end by itself.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The limit passed. The process has been killed.
    Timeout,
    /// The process ended, was killed by a signal, or closed its end.
    Exited {
        /// As a message would say it: `exit status 1`, `signal 11 (SIGSEGV)`.
        how: String,
        /// The end of what it printed on standard error.
        stderr: String,
    },
}

/// What comes of listening for a while.
pub enum Heard {
    /// A line.
    Line(String),
    /// None yet.
    Nothing,
    /// There will be none: the child closed its end, or does not end its line.
    End,
}

/// A running child.
#[derive(Debug)]
pub struct Process {
    group: Group,
    input: File,
    output: File,
    pending: Vec<u8>,
    /// So much of what is pending holds no end of a line.
    searched: usize,
    stderr: Arc<Mutex<Vec<u8>>>,
    drain: JoinHandle<()>,
}

impl Process {
    /// Starts `command` and talks with it over its standard input and output.
    pub fn start(command: &mut Command) -> std::io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut group = Group::start(command)?;
        let (input, output) = (group.leader.stdin.take().expect("piped"), group.leader.stdout.take().expect("piped"));
        Ok(Self::of(group, input.into(), output.into()))
    }

    /// The same over other pipes, whose far ends `command` holds.
    pub fn start_over(command: &mut Command, input: OwnedFd, output: OwnedFd) -> std::io::Result<Self> {
        Ok(Self::of(Group::start(command.stderr(Stdio::piped()))?, input, output))
    }

    fn of(mut group: Group, input: OwnedFd, output: OwnedFd) -> Self {
        let stderr = Arc::new(Mutex::new(Vec::new()));
        let drain = drain(group.leader.stderr.take().expect("piped"), stderr.clone());
        Self { group, input: input.into(), output: output.into(), pending: Vec::new(), searched: 0, stderr, drain }
    }

    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.group.id()
    }

    /// Whether the child can still answer.
    pub fn is_alive(&self) -> bool {
        !self.group.is_gone()
    }

    /// Sends a line and waits for the answer. After an error the process is gone.
    pub fn ask(&mut self, line: &str, limit: Duration) -> Result<String, Ended> {
        self.send(line).map_err(|_| self.exited())?;
        self.line(limit)
    }

    /// Sends a line. It blocks while the child does not read, so the child must have answered what was sent before.
    pub fn send(&mut self, line: &str) -> std::io::Result<()> {
        self.input.write_all(format!("{line}\n").as_bytes())
    }

    /// Waits for the next line; the process is killed at the limit.
    pub fn line(&mut self, limit: Duration) -> Result<String, Ended> {
        match self.hear(Instant::now() + limit) {
            Heard::Line(line) => Ok(line),
            Heard::Nothing => {
                self.kill();
                Err(Ended::Timeout)
            }
            Heard::End => Err(self.exited()),
        }
    }

    /// Listens until there is a line, but no longer than `deadline`.
    pub fn hear(&mut self, deadline: Instant) -> Heard {
        loop {
            if let Some(line) = self.pending_line() {
                return Heard::Line(line);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if self.is_readable(left) && !self.read() {
                return Heard::End;
            }
            // A line that trickles in would never be late otherwise.
            if left.is_zero() {
                return self.pending_line().map_or(Heard::Nothing, Heard::Line);
            }
        }
    }

    fn pending_line(&mut self) -> Option<String> {
        let Some(end) = self.pending[self.searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = self.pending.len();
            return None;
        };
        let line: Vec<u8> = self.pending.drain(..=self.searched + end).collect();
        self.searched = 0;
        Some(String::from_utf8_lossy(&line[..line.len() - 1]).into_owned())
    }

    fn is_readable(&self, limit: Duration) -> bool {
        let timeout = PollTimeout::try_from(limit + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        poll(&mut [PollFd::new(self.output.as_fd(), PollFlags::POLLIN)], timeout).is_ok_and(|ready| ready > 0)
    }

    /// Whether more can come.
    fn read(&mut self) -> bool {
        let mut buffer = [0u8; 16 * 1024];
        let count = self.output.read(&mut buffer).unwrap_or(0);
        self.pending.extend_from_slice(&buffer[..count]);
        count > 0 && self.pending.len() <= LONGEST_LINE
    }

    fn exited(&mut self) -> Ended {
        let status = self.last_status().unwrap_or_else(|| self.kill());
        Ended::Exited { how: describe(status), stderr: self.printed() }
    }

    /// How a child whose end was heard ended by itself. One that lives on is of no more use: it is killed.
    pub fn last_status(&mut self) -> Option<ExitStatus> {
        let status = self.group.wait(PATIENCE);
        self.kill();
        status
    }

    /// The end of what a child that is gone printed on standard error.
    pub fn printed(&self) -> String {
        // A grandchild in a session of its own could hold the pipe open for ever.
        within(Duration::from_millis(500), || self.drain.is_finished().then_some(()));
        String::from_utf8_lossy(&self.stderr.lock().expect("no panics while it is held")).into_owned()
    }

    /// Closes the child's input and waits until it has ended by itself; it is killed at the limit.
    pub fn finish(self, limit: Duration) -> Option<ExitStatus> {
        let Self { mut group, input, .. } = self;
        drop(input);
        group.wait(limit)
    }

    /// Kills the child and everything in its group, and waits until it is gone.
    pub fn kill(&mut self) -> ExitStatus {
        self.group.kill()
    }
}

fn drain(mut pipe: impl Read + Send + 'static, kept: Arc<Mutex<Vec<u8>>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = [0u8; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut buffer) {
            let mut kept = kept.lock().expect("no panics while it is held");
            kept.extend_from_slice(&buffer[..count]);
            if kept.len() > 2 * KEPT {
                let cut = kept.len() - KEPT;
                kept.drain(..cut);
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use nix::unistd::Pid;

    use super::*;

    fn shell(script: &str) -> Process {
        Process::start(Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn lines_are_answered_one_by_one() {
        let mut process = shell("while read line; do echo \"<$line>\"; done");
        assert_eq!(process.ask("one", Duration::from_secs(5)).unwrap(), "<one>");
        assert_eq!(process.ask("two", Duration::from_secs(5)).unwrap(), "<two>");
    }

    #[test]
    fn a_hanging_child_and_its_own_children_are_killed_at_the_limit() {
        let mut process = shell("read line; sleep 1000 & echo $!; read line; wait");
        let grandchild: i32 = process.ask("", Duration::from_secs(5)).unwrap().parse().unwrap();
        assert_eq!(process.ask("", Duration::from_millis(100)), Err(Ended::Timeout));
        assert!(!process.is_alive());
        let gone = || nix::sys::signal::kill(Pid::from_raw(grandchild), None).is_err() || is_zombie(grandchild);
        assert!((0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            gone()
        }));
    }

    fn is_zombie(id: i32) -> bool {
        std::fs::read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| stat.contains(") Z"))
    }

    #[test]
    fn a_line_that_trickles_in_is_late() {
        let mut process = shell("while :; do printf x; sleep 0.001; done");
        assert_eq!(process.line(Duration::from_millis(100)), Err(Ended::Timeout));
    }

    #[test]
    fn a_child_that_closes_its_end_and_lives_on_is_killed() {
        let mut process = shell("exec >&-; sleep 1000");
        let Err(Ended::Exited { how, .. }) = process.line(Duration::from_secs(10)) else { panic!("it answered") };
        assert_eq!(how, "signal 9 (SIGKILL)");
    }

    #[test]
    fn the_end_of_a_child_says_how_and_what_it_printed() {
        let mut process = shell("read line; yes x | head -c 1000000 >&2; echo last words >&2; kill -SEGV $$");
        let Err(Ended::Exited { how, stderr }) = process.ask("", Duration::from_secs(10)) else {
            panic!("it answered")
        };
        assert_eq!(how, "signal 11 (SIGSEGV)");
        assert!(stderr.ends_with("last words\n") && stderr.len() <= 2 * KEPT + 4096);
    }
}
