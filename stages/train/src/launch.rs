//! From the binary `cuda-agent`, which doesn't link libtorch, to the program that does.

use std::os::unix::process::CommandExt;
use std::{env, fs};

use cuda_agent_builtin::train_program::{self, PROGRAM};
use cuda_agent_protocol::ProgramError;

/// `cuda_agent_kernels::PROGRAM_VARIABLE`, which this crate sees in the program alone.
const EVALUATOR_VARIABLE: &str = "CUDA_AGENT_EVALUATOR";

/// The error where it is nowhere.
pub fn missing() -> ProgramError {
    ProgramError::environment(format!("{PROGRAM} is neither beside {} nor on the PATH", this_program()))
        .with_hint("`make train-tools` builds it; it links the torch of the project's Python")
}

fn this_program() -> String {
    env::current_exe().map_or_else(|_| "this program".into(), |path| path.display().to_string())
}

/// Becomes the program, which runs the stage kind `kind` in this folder.
pub(crate) fn become_stage(kind: &str) -> u8 {
    let Some(program) = train_program::find() else { return report(&missing()) };
    let mut command = train_program::command(&program);
    // It judges candidates, in processes that are started with few variables: without the path to libtorch they would not start.
    if let Ok(own) = env::current_exe() {
        command.env(EVALUATOR_VARIABLE, own);
    }
    let error = command.args(["stage", kind]).exec();
    report(&ProgramError::environment(format!("{}: {error}", program.display())))
}

fn report(error: &ProgramError) -> u8 {
    eprintln!("error: {error}");
    let text = serde_json::to_vec(error).expect("errors are plain data");
    if let Err(cause) = fs::write("error.json", text) {
        eprintln!("error.json: {cause}");
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_the_command_that_builds_it() {
        let error = missing();
        assert_eq!(error.kind, "environment");
        assert!(error.hint.unwrap().contains("make train-tools"));
    }

    #[cfg(feature = "torch")]
    #[test]
    fn the_evaluator_reads_the_variable_that_is_set() {
        assert_eq!(EVALUATOR_VARIABLE, cuda_agent_kernels::PROGRAM_VARIABLE);
    }
}
