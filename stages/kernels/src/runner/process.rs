//! A child process that answers lines by lines, within a time limit.
//!
//! The child leads a process group of its own and dies with this process. What it prints on standard error is drained
//! all the time, so that a flood cannot stop it, and the end of it is kept for messages.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::spawn::spawn;

/// How much of standard error is kept.
const KEPT: usize = 16 * 1024;

/// An answer longer than this is no answer.
const LONGEST_LINE: usize = 64 * 1024 * 1024;

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

/// A running child.
pub struct Process {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
    pending: Vec<u8>,
    stderr: Arc<Mutex<Vec<u8>>>,
    drain: Option<JoinHandle<()>>,
    ended: bool,
}

impl Process {
    /// Starts `command` with pipes.
    pub fn start(command: &mut Command) -> std::io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        die_with_parent(command);
        let mut child = spawn(command)?;
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let stderr = Arc::new(Mutex::new(Vec::new()));
        let drain = drain(child.stderr.take().expect("piped"), stderr.clone());
        Ok(Self { child, input, output, pending: Vec::new(), stderr, drain: Some(drain), ended: false })
    }

    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether the child can still answer.
    pub fn is_alive(&self) -> bool {
        !self.ended
    }

    /// Sends a line and waits for the answer. After an error the process is gone.
    pub fn ask(&mut self, line: &str, limit: Duration) -> Result<String, Ended> {
        self.send(line)?;
        self.line(limit)
    }

    /// The same, but at the limit `late` is called, and then the answer has as much time again, `least` at the least.
    pub fn ask_twice<Guard>(
        &mut self,
        line: &str,
        limit: Duration,
        least: Duration,
        late: impl FnOnce() -> Guard,
    ) -> Result<String, Ended> {
        self.send(line)?;
        if let Some(line) = self.line_until(Instant::now() + limit)? {
            return Ok(line);
        }
        let _guard = late();
        self.line(limit.max(least))
    }

    fn send(&mut self, line: &str) -> Result<(), Ended> {
        // A child that does not read cannot block us for long: lines are far shorter than a pipe's buffer.
        let sent = self.input.write_all(line.as_bytes()).and_then(|()| self.input.write_all(b"\n"));
        if sent.and_then(|()| self.input.flush()).is_err() {
            return Err(self.exited());
        }
        Ok(())
    }

    /// Waits for the next line; the process is killed at the limit.
    pub fn line(&mut self, limit: Duration) -> Result<String, Ended> {
        match self.line_until(Instant::now() + limit)? {
            Some(line) => Ok(line),
            None => {
                self.kill();
                Err(Ended::Timeout)
            }
        }
    }

    fn line_until(&mut self, deadline: Instant) -> Result<Option<String>, Ended> {
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                return Ok(Some(String::from_utf8_lossy(&line[..end]).into_owned()));
            }
            if !self.readable(deadline) {
                return Ok(None);
            }
            let mut buffer = [0u8; 16 * 1024];
            match self.output.read(&mut buffer) {
                Ok(0) | Err(_) => return Err(self.exited()),
                Ok(count) => self.pending.extend_from_slice(&buffer[..count]),
            }
            if self.pending.len() > LONGEST_LINE {
                return Err(self.exited());
            }
        }
    }

    fn readable(&self, deadline: Instant) -> bool {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            let mut descriptors = [PollFd::new(self.output.as_fd(), PollFlags::POLLIN)];
            match poll(&mut descriptors, timeout) {
                Ok(0) if left.is_zero() => return false,
                Ok(0) | Err(nix::errno::Errno::EINTR) => {}
                Ok(_) => return true,
                Err(_) => return false,
            }
        }
    }

    fn exited(&mut self) -> Ended {
        // It may have closed its end and live on; whatever it is about, it is of no more use.
        let status = self.wait_briefly().unwrap_or_else(|| self.kill());
        self.ended = true;
        Ended::Exited { how: describe(status), stderr: self.stderr_text() }
    }

    fn wait_briefly(&mut self) -> Option<ExitStatus> {
        for _ in 0..50 {
            if let Ok(Some(status)) = self.child.try_wait() {
                let _ = killpg(Pid::from_raw(self.child.id() as i32), Signal::SIGKILL);
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        None
    }

    fn stderr_text(&mut self) -> String {
        if let Some(drain) = self.drain.take() {
            // A grandchild in a session of its own could hold the pipe open for ever.
            let deadline = Instant::now() + Duration::from_millis(500);
            while !drain.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        String::from_utf8_lossy(&self.stderr.lock().expect("no panics while it is held")).into_owned()
    }

    /// Closes the child's input and waits until it has ended by itself; it is killed at the limit.
    pub fn finish(mut self, limit: Duration) -> Option<ExitStatus> {
        let (reader, writer) = std::io::pipe().ok()?;
        drop(reader);
        // Dropping the real input is what the child sees as the end.
        drop(std::mem::replace(&mut self.input, std::process::ChildStdin::from(std::os::fd::OwnedFd::from(writer))));
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }

    /// Kills the child and everything in its group, and waits until it is gone.
    pub fn kill(&mut self) -> ExitStatus {
        self.ended = true;
        let _ = killpg(Pid::from_raw(self.child.id() as i32), Signal::SIGKILL);
        let _ = self.child.kill();
        self.child.wait().unwrap_or_else(|_| ExitStatus::from_raw(9))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
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

#[expect(unsafe_code, reason = "a child's preparation runs between fork and exec")]
fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: prctl and getppid are async-signal-safe and touch no memory of ours.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have died before the line above.
            if libc::getppid() as u32 != parent {
                return Err(std::io::Error::other("the parent is gone"));
            }
            Ok(())
        });
    }
}

#[cfg(test)]
mod tests {
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
    fn the_end_of_a_child_says_how_and_what_it_printed() {
        let mut process = shell("read line; yes x | head -c 1000000 >&2; echo last words >&2; kill -SEGV $$");
        let Err(Ended::Exited { how, stderr }) = process.ask("", Duration::from_secs(10)) else {
            panic!("it answered")
        };
        assert_eq!(how, "signal 11 (SIGSEGV)");
        assert!(stderr.ends_with("last words\n") && stderr.len() <= 2 * KEPT + 4096);
    }
}
