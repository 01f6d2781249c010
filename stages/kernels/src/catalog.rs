//! The list of this crate's stage kinds; `cuda_agent_builtin` has the machinery.

use cuda_agent_builtin::{Builtin, Embedded, Group};

use crate::stage::{evaluate, profile};

/// The kinds: a folder of this crate, and its program. To add a kind, make its folder and add a line.
const KERNELS: Group = Group {
    name: "kernels",
    programs: &[("evaluate", Some(evaluate::main)), ("profile", Some(profile::main))],
    embedded: EMBEDDED,
};

include!(concat!(env!("OUT_DIR"), "/kinds.rs"));

/// Every built-in kind of this crate.
pub fn builtin() -> Vec<Builtin> {
    KERNELS.builtin()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn home() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR"))
    }

    #[test]
    fn lock_is_current() {
        let problems = KERNELS.problems(home()).unwrap();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    /// The Rust code embeds files of other folders, so one that is missing under `sources:` would change verdicts
    /// without changing a key.
    #[test]
    fn every_folder_that_programs_are_made_of_is_a_source() {
        const NO_SOURCES: [&str; 4] = ["tests", "corpus", "examples", "benches"];
        let sources = KERNELS.embedded("evaluate").sources;
        let linked = ["kernels", "emulator", "sandbox"].map(|name| home().join("..").join(name));
        let entries = linked.iter().flat_map(|home| std::fs::read_dir(home).unwrap());
        for path in entries.map(|entry| entry.unwrap().path()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !path.join("stage.yaml").exists() && !NO_SOURCES.contains(&name.as_str()) {
                let package = path.parent().unwrap().file_name().unwrap().to_string_lossy();
                let prefix = format!("stages/{package}/{name}/");
                let is_source = sources.iter().any(|(source, _)| source.starts_with(&prefix));
                assert!(is_source, "{prefix} belongs under `sources:` of evaluate/stage.yaml, or is no source");
            }
        }
    }
}
