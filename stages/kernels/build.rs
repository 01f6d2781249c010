//! Embeds the kinds' manifests and identities, and the reference's Python.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    cuda_agent_builtin::build_script();
    let crate_folder = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let folders = [crate_folder.join("python"), crate_folder.join("../torch_runtime")];
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("python.rs");
    fs::write(out, python(&folders)).expect("OUT_DIR can be written");
}

/// `PYTHON`: name and text of each module; tests stay behind.
fn python(folders: &[PathBuf]) -> String {
    let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).expect("the reference's sources are there"));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    paths.sort();
    let mut text = String::from("/// The reference's modules.\nstatic PYTHON: &[(&str, &str)] = &[\n");
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".py") && !name.starts_with("test_") && name != "reference_client.py" && name != "gpu_gate.py"
        {
            writeln!(text, "    ({name:?}, include_str!({path:?})),").expect("strings take any text");
        }
    }
    text + "];\n"
}
