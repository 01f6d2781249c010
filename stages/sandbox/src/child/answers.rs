//! The child's side: answers, a line each, on what was its standard output.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;

use serde::Serialize;

/// A private copy of the standard output.
pub struct Answers(File);

impl Answers {
    /// Keeps the standard output for answers. What else is printed, by a kernel's `printf` or by a compiler, is lost.
    pub fn open() -> std::io::Result<Self> {
        let answers = std::io::stdout().as_fd().try_clone_to_owned()?;
        nix::unistd::dup2_stdout(OpenOptions::new().write(true).open("/dev/null")?)?;
        Ok(Self(answers.into()))
    }

    /// Gives an answer.
    pub fn say(&mut self, answer: &impl Serialize) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        self.0.write_all(&line)
    }
}
