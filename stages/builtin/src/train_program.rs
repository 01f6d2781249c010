//! `cuda-agent-train`, the program that links libtorch: where it is, and how it is started. `cuda-agent` doesn't link it, and
//! starts it for the kinds that train, and to sample from a model.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The program's name.
pub const PROGRAM: &str = "cuda-agent-train";

/// The variable that names the Python of a stage, whose torch the program uses.
const PYTHON_VARIABLE: &str = "CUDA_AGENT_PYTHON";

/// Where the program is: beside this one, or on the PATH.
pub fn find() -> Option<PathBuf> {
    let beside = env::current_exe().ok().and_then(|own| Some(own.parent()?.to_owned()));
    let path = env::var_os("PATH").unwrap_or_default();
    find_in(beside.into_iter().chain(env::split_paths(&path)))
}

/// The program in the first of these folders that has it.
pub fn find_in(mut folders: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    folders.find_map(|folder| Some(folder.join(PROGRAM)).filter(|program| program.is_file()))
}

/// A command that starts it, with the torch of the stage's Python: elsewhere than where it was built, that is how it finds
/// libtorch.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    let python = env::var_os(PYTHON_VARIABLE).map(PathBuf::from);
    let libraries = python.as_deref().map(torch_libraries).unwrap_or_default();
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
    if text.is_empty() { Vec::new() } else { libraries_of(Path::new(&text)) }
}

/// The same for torch's folder.
fn libraries_of(torch: &Path) -> Vec<PathBuf> {
    let wheels = torch.parent().map(|packages| packages.join("nvidia"));
    let wheels = wheels.and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let mut libraries: Vec<PathBuf> = wheels.map(|wheel| wheel.path().join("lib")).filter(|lib| lib.is_dir()).collect();
    libraries.sort();
    libraries.insert(0, torch.join("lib"));
    libraries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_are_those_of_torch_and_of_the_wheels_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        for each in ["torch/lib", "nvidia/nccl/lib", "nvidia/cu13/lib", "nvidia/without"] {
            fs::create_dir_all(folder.path().join(each)).unwrap();
        }
        let expected = ["torch/lib", "nvidia/cu13/lib", "nvidia/nccl/lib"].map(|each| folder.path().join(each));
        assert_eq!(libraries_of(&folder.path().join("torch")), expected);
    }

    #[test]
    fn a_python_without_torch_adds_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(torch_libraries(&folder.path().join("no-such-python")).is_empty());
    }
}
