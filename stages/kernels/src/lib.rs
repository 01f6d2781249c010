//! The evaluator: a task (a PyTorch reference) and a candidate (CUDA source) in, a verdict out.
//!
//! Data flows one way: `task` and `candidate` → `compile` → `reference` and `runner` → `profile` → `verdict` → `reward`.

pub mod backend;
pub mod baseline;
mod catalog;
#[cfg(test)]
mod claims_test;
pub mod compile;
pub mod evaluator;
pub mod gate;
pub mod header;
pub mod judge;
pub mod judgement;
pub mod profile;
pub mod program;
mod random;
pub mod reference;
pub mod reward;
pub mod runner;
pub mod stage;
pub mod task;
pub mod verdict;

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

pub use catalog::builtin;
pub use cuda_agent_sandbox::{candidate, fault};
use cuda_agent_sandbox::{child, kept};
use fault::EvaluatorError;

/// The word that starts a child of the evaluator instead of the command line.
pub const COMMAND: &str = "kernels";

/// The variable that names the program to start children from, where this one is not fit: one that links more than they need
/// starts slowly, and not at all in an environment that was cleared.
pub const PROGRAM_VARIABLE: &str = "CUDA_AGENT_EVALUATOR";

/// The program that children of the evaluator are: this one, unless [`PROGRAM_VARIABLE`] names another.
pub(crate) fn own_program() -> Result<PathBuf, EvaluatorError> {
    program_named(std::env::var_os(PROGRAM_VARIABLE), std::env::current_exe())
}

fn program_named(named: Option<OsString>, own: io::Result<PathBuf>) -> Result<PathBuf, EvaluatorError> {
    match named.filter(|name| !name.is_empty()) {
        Some(named) => Ok(named.into()),
        None => own.map_err(|error| EvaluatorError::new(format!("this program's own file: {error}"))),
    }
}

/// Runs a child of the evaluator: `runner` holds a GPU's context, `compile-worker` holds NVRTC.
pub fn child(word: &str) -> u8 {
    match word {
        "runner" => runner::gpu::main(),
        "compile-worker" => u8::from(compile::worker::worker_main().is_err()),
        _ => {
            eprintln!("error: `{COMMAND} {word}` is no part of the evaluator");
            2
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_this_program_unless_another_is_named() {
        let own = || Ok(PathBuf::from("/bin/own"));
        assert_eq!(program_named(None, own()).unwrap(), PathBuf::from("/bin/own"));
        assert_eq!(program_named(Some("".into()), own()).unwrap(), PathBuf::from("/bin/own"));
        assert_eq!(program_named(Some("/bin/other".into()), own()).unwrap(), PathBuf::from("/bin/other"));
        let error = program_named(None, Err(io::Error::from(io::ErrorKind::NotFound))).unwrap_err();
        assert_eq!(error.message, "this program's own file: entity not found");
    }
}
