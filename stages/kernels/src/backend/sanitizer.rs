//! A pass under compute-sanitizer: accesses out of bounds, races in shared memory and misused barriers that leave no mark
//! in the results.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::{Sanitized, Sanitizer, Watched};
use crate::compile::Built;
use crate::fault::{EvaluatorError, Fault, FaultKind};
use crate::reference::{Layout, Reference};
use crate::runner::gpu::GpuRunners;

/// The tools, and what a finding of theirs is.
const TOOLS: [(&str, FaultKind); 3] =
    [("memcheck", FaultKind::OutOfBounds), ("racecheck", FaultKind::Race), ("synccheck", FaultKind::Deadlock)];

/// Instrumented kernels are up to a hundred times as slow, and the tool itself starts in seconds.
const SLOWER: u32 = 100;

/// compute-sanitizer, as it was found, for some GPUs.
pub struct ComputeSanitizer<'a> {
    program: PathBuf,
    gpus: &'a [GpuRunners],
}

impl<'a> ComputeSanitizer<'a> {
    /// Looks for it; otherwise why it can't be used.
    pub fn find(gpus: &'a [GpuRunners]) -> Result<Self, String> {
        match find() {
            Some(program) => Ok(Self { program, gpus }),
            None => Err("compute-sanitizer is not installed; it comes with the CUDA toolkit".into()),
        }
    }
}

impl Sanitizer for ComputeSanitizer<'_> {
    /// Runs it once below each tool.
    fn watch(&self, card: usize, reference: &mut Reference, watched: &Watched) -> Result<Sanitized, EvaluatorError> {
        let layout = match reference.begin(watched.task, watched.seed, watched.built.scratch_bytes, 1)? {
            Ok(layout) => layout,
            Err(error) => return Ok(Sanitized::NotRun(error.message)),
        };
        let mut clean = Vec::new();
        for (tool, kind) in TOOLS {
            if let Err(error) = reference.draw(0, 0, 0, false)? {
                return Ok(Sanitized::NotRun(error.message));
            }
            let log = tempfile::NamedTempFile::new()
                .map_err(|error| EvaluatorError::new(format!("no temporary file: {error}")))?;
            let words = [
                self.program.display().to_string(),
                "--tool".into(),
                tool.into(),
                "--log-file".into(),
                log.path().display().to_string(),
            ];
            let run = run_below(&self.gpus[card], &words, watched.built, &layout, watched.limit * SLOWER);
            let text = std::fs::read_to_string(log.path()).unwrap_or_default();
            match (findings(&text), run) {
                (Some(message), _) => {
                    return Ok(Sanitized::Fault(Fault {
                        kind,
                        message: format!("{tool}: {message}"),
                        line: line(&text),
                    }));
                }
                (None, Ok(Ok(())))
                    if text.contains("ERROR SUMMARY: 0 errors") || text.contains("RACECHECK SUMMARY: 0 hazards") =>
                {
                    clean.push(tool)
                }
                (None, Ok(Err(fault))) => return Ok(Sanitized::NotRun(format!("{tool}: {}", fault.message))),
                (None, Err(error)) => {
                    return Ok(Sanitized::NotRun(format!("{tool}: {}", last_line(&text).unwrap_or(error.message))));
                }
                (None, Ok(Ok(()))) => {
                    return Ok(Sanitized::NotRun(format!(
                        "{tool}: {}",
                        last_line(&text).unwrap_or_else(|| "it said nothing".into())
                    )));
                }
            }
        }
        Ok(Sanitized::Clean(clean))
    }
}

/// Runs a candidate once in a process of its own below a tool, on the first set.
fn run_below(
    runners: &GpuRunners,
    tool: &[String],
    built: &Built,
    layout: &Layout,
    limit: Duration,
) -> Result<Result<(), Fault>, EvaluatorError> {
    let handle = layout.arena.handle()?;
    let mut runner = runners.start_below(tool)?;
    runner.open(handle, layout.arena.bytes)?;
    let run = match runner.load(built, limit)? {
        Ok(()) => runner.run(&layout.sets[0], limit)?,
        Err(fault) => Err(fault),
    };
    // The tool writes its findings when the process ends.
    runner.finish(limit);
    Ok(run)
}

fn find() -> Option<PathBuf> {
    let known = ["/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer"];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join("compute-sanitizer"));
    on_path.chain(known.map(PathBuf::from)).find(|program| {
        program.is_file() && Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
    })
}

/// The first finding of a log: `Invalid __global__ write of size 4 bytes`, at which place.
fn findings(log: &str) -> Option<String> {
    let lines: Vec<&str> = log.lines().map(|line| line.trim_start_matches('=').trim()).collect();
    let starts = |line: &&str| {
        ["Invalid ", "Misaligned ", "Error: Race reported", "Error: Potential", "Barrier error", "Program hit"]
            .iter()
            .any(|start| line.starts_with(start))
    };
    let first = lines.iter().position(starts)?;
    // An error that a call returned is an effect of one that was found, or the machine's.
    if lines[first].starts_with("Program hit") {
        return None;
    }
    let place = lines[first + 1..]
        .iter()
        .take_while(|line| !line.is_empty())
        .find(|line| line.starts_with("at ") || line.starts_with("by thread"));
    Some(place.map_or_else(|| lines[first].to_owned(), |place| format!("{} {place}", lines[first])))
}

/// The candidate's line: `in candidate.cu:12`.
fn line(log: &str) -> Option<u32> {
    let (_, after) = log.split_once("candidate.cu:")?;
    after.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok()
}

fn last_line(log: &str) -> Option<String> {
    log.lines().rev().map(|line| line.trim_start_matches('=').trim()).find(|line| !line.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at relu+0x90 in candidate.cu:7
=========     by thread (24,0,0) in block (39,0,0)
=========     Access at 0x7f0 is out of bounds
=========
========= ERROR SUMMARY: 1 error
";

    #[test]
    fn a_finding_is_told_with_its_place() {
        assert_eq!(findings(LOG).unwrap(), "Invalid __global__ write of size 4 bytes at relu+0x90 in candidate.cu:7");
        assert_eq!(line(LOG), Some(7));
    }

    #[test]
    fn a_clean_log_holds_none() {
        assert_eq!(findings("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"), None);
        assert_eq!(findings("========= Error: Device not supported\n"), None);
    }
}
