//! What the end of a program means: success, or why it failed.

use std::path::Path;
use std::time::Duration;

use cuda_agent_protocol::ProgramError;

use super::durations::seconds;
use super::failure::{Explanation, Failure};
use super::job::Job;
use super::launch::Exit;
use super::supervise;
use crate::spec::Command;

/// The deadline in programs' requests, in seconds since 1970, for a program that starts now.
pub fn unix_deadline(timeout: Duration) -> f64 {
    crate::now() + timeout.as_secs_f64()
}

/// What a stage fails with when its time is up.
pub fn timed_out(limit: Duration) -> Failure {
    Failure::retryable(format!("timed out after {}", seconds(limit)))
        .with_hint("raise `timeout:` of the stage, or look at its log for what it was doing")
}

/// Success, or the failure that the program explained or that its exit tells.
pub fn check(job: &Job, folder: &Path, exit: &Exit) -> Result<(), Failure> {
    if *exit == Exit::Success {
        return Ok(());
    }
    if !job.goes_on() {
        return Err(Failure::Cancelled);
    }
    if let Some(error) = explained(folder) {
        return Err(error);
    }
    let failure = Failure::retryable(described(exit));
    Err(match undeclared_file(job) {
        Some(file) => failure.with_hint(format!(
            "a command sees only the files that it declares; if it needs `{file}`, add `files: [{file}]` to the stage"
        )),
        None => failure,
    })
}

/// A word of a command that is a file beside the pipeline, but not one that was declared.
fn undeclared_file(job: &Job) -> Option<String> {
    let text = match job.stage().command.as_ref()? {
        Command::Shell(text) => text.clone(),
        Command::Words(words) => words.join(" "),
    };
    let words = text.split(|c: char| c.is_whitespace() || "'\"<>;|&()".contains(c)).filter(|word| !word.is_empty());
    let declared =
        |word: &str| job.command_files.iter().any(|(name, _)| name == word || name.starts_with(&format!("{word}/")));
    let folder = &job.context.pipeline.folder;
    words
        .filter(|word| !word.starts_with(['/', '-', '.']) && !declared(word))
        .find(|word| folder.join(word).exists())
        .map(str::to_owned)
}

/// What a program left in `error.json`.
pub fn explained(folder: &Path) -> Option<Failure> {
    const LONGEST: u64 = 1 << 20;
    let file = folder.join("error.json");
    // A FIFO in its place would be read for ever.
    let is_plain = std::fs::metadata(&file).is_ok_and(|metadata| metadata.is_file() && metadata.len() <= LONGEST);
    let error: ProgramError = is_plain.then(|| serde_json::from_slice(&std::fs::read(&file).ok()?).ok())??;
    let is_permanent = error.is_permanent();
    let explanation = Explanation { message: error.message, hint: error.hint };
    Some(if is_permanent { Failure::Permanent(explanation) } else { Failure::Retryable(explanation) })
}

/// An exit in words.
pub fn described(exit: &Exit) -> String {
    match exit {
        Exit::Success => "ended well".into(),
        Exit::Code(supervise::CANNOT_START) => "the command could not be started (exit status 127)".into(),
        Exit::Code(code) => format!("exit status {code}"),
        Exit::Signal(number) => match nix::sys::signal::Signal::try_from(*number) {
            Ok(nix::sys::signal::Signal::SIGKILL) => "killed by SIGKILL (out of memory?)".into(),
            Ok(signal) => format!("killed by {signal}"),
            Err(_) => format!("killed by signal {number}"),
        },
        Exit::NotStarted(message) => format!("could not be started: {message}"),
    }
}
