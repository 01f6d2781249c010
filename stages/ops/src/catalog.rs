//! The list of this crate's stage kinds.
//!
//! The build script reads the kinds' folders and embeds manifests, programs and digests; the list here says which
//! kinds there are. A test fails on a folder that the list forgets, and on sources that `stages.lock` does not know.

use cuda_agent_builtin::{Builtin, Embedded, Group, OnDevice, PerDevice};

use crate::publish;

/// The kinds: a folder of this crate, and the function where the program is Rust. To add a kind, make its folder and
/// add a line.
const OPS: Group = Group {
    name: "ops",
    programs: &[
        ("crawl", None),
        ("rates", None),
        ("synthesize", None),
        ("requests", None),
        ("generate", None),
        ("resize", None),
        ("measure", None),
        ("filter", None),
        ("screen", None),
        ("split", None),
        ("publish", Some(publish::main)),
        ("report", None),
    ],
    embedded: EMBEDDED,
};

include!(concat!(env!("OUT_DIR"), "/kinds.rs"));

/// Every built-in kind of this crate.
pub fn builtin() -> Vec<Builtin> {
    OPS.builtin()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use cuda_agent_builtin::Entry;

    use super::*;

    #[test]
    fn lock_is_current() {
        let problems = OPS.problems(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    #[test]
    fn a_python_kind_brings_its_files_and_a_rust_kind_none() {
        for (kind, embedded) in builtin().iter().zip(OPS.programs.iter().map(|(folder, _)| OPS.embedded(folder))) {
            let Entry::Files { files, folder } = kind.entry else {
                assert!(embedded.files.is_empty(), "{}", kind.name);
                continue;
            };
            let names: Vec<&str> = files.iter().map(|(name, _)| *name).collect();
            assert!(names.contains(&"stages/protocol/python/cuda_agent_stage.py"), "{}", kind.name);
            let own = |name: &&str| name.starts_with(folder) && name.ends_with(".py");
            assert!(names.iter().any(own), "{}", kind.name);
        }
    }
}
