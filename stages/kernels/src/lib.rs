//! The evaluator: a task (a PyTorch reference) and a candidate (CUDA source) in, a verdict out.
//!
//! Data flows one way: `task` and `candidate` → `compile` → `reference` and `runner` → `profile` → `verdict` → `reward`.

pub mod candidate;
mod catalog;
pub mod check;
mod child;
#[cfg(test)]
mod claims_test;
pub mod compile;
pub mod doctor;
pub mod evaluator;
pub mod fault;
pub mod gate;
pub mod header;
pub mod judge;
mod kept;
pub mod profile;
pub mod program;
pub mod reference;
pub mod reward;
pub mod runner;
pub mod stage;
pub mod task;
pub mod verdict;

pub use catalog::builtin;

/// The word that starts a child of the evaluator instead of the command line.
pub const COMMAND: &str = "kernels";

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
