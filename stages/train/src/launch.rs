//! From the binary `cuda-agent`, which doesn't link libtorch, to the program that does.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use cuda_agent_protocol::ProgramError;

/// The program's name.
pub const PROGRAM: &str = "cuda-agent-train";

/// `cuda_agent_kernels::PROGRAM_VARIABLE`, which this crate sees in the program alone.
const EVALUATOR_VARIABLE: &str = "CUDA_AGENT_EVALUATOR";

/// Where the program is: beside this one, or on the PATH.
pub fn find() -> Option<PathBuf> {
    let beside = env::current_exe().ok().map(|path| path.with_file_name(PROGRAM));
    let on_path = env::var_os("PATH").map(|paths| env::split_paths(&paths).collect::<Vec<_>>()).unwrap_or_default();
    let candidates = beside.into_iter().chain(on_path.into_iter().map(|folder| folder.join(PROGRAM)));
    candidates.into_iter().find(|path| path.is_file())
}

/// The error where it is nowhere.
pub fn missing() -> ProgramError {
    ProgramError::environment(format!("{PROGRAM} is neither beside {} nor on the PATH", this_program()))
        .with_hint("`make train-tools` builds it; it links the torch of the project's Python")
}

fn this_program() -> String {
    env::current_exe().map_or_else(|_| "this program".into(), |path| path.display().to_string())
}

/// A command that starts it, with the torch of `python` where there is one: elsewhere than where it was built, that is
/// how it finds libtorch.
pub fn command(program: &Path, python: Option<&Path>) -> Command {
    let mut command = Command::new(program);
    let libraries = python.map(torch_libraries).unwrap_or_default();
    if !libraries.is_empty() {
        let inherited = env::var_os("LD_LIBRARY_PATH").map(|paths| env::split_paths(&paths).collect::<Vec<_>>());
        let all = libraries.into_iter().chain(inherited.unwrap_or_default());
        command.env("LD_LIBRARY_PATH", env::join_paths(all).unwrap_or_default());
    }
    command
}

/// The folders of torch's libraries and of CUDA's wheels beside it, by the interpreter's own account.
fn torch_libraries(python: &Path) -> Vec<PathBuf> {
    const QUESTION: &str =
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')";
    let answer = Command::new(python).args(["-I", "-c", QUESTION]).output();
    let text = answer.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default();
    if text.is_empty() {
        return Vec::new();
    }
    let torch = PathBuf::from(text);
    let wheels = torch.parent().map(|packages| packages.join("nvidia"));
    let wheels = wheels.and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let mut libraries: Vec<PathBuf> = wheels.map(|wheel| wheel.path().join("lib")).filter(|lib| lib.is_dir()).collect();
    libraries.sort();
    libraries.insert(0, torch.join("lib"));
    libraries
}

/// Becomes the program, which runs the stage kind `kind` in this folder.
pub(crate) fn become_stage(kind: &str) -> u8 {
    let Some(program) = find() else { return report(&missing()) };
    let python = env::var_os("CUDA_AGENT_PYTHON").map(PathBuf::from);
    let mut command = command(&program, python.as_deref());
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

    #[test]
    fn a_python_without_torch_adds_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(torch_libraries(&folder.path().join("no-such-python")), [] as [PathBuf; 0]);
    }
}
