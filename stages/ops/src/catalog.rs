//! The list of built-in stage kinds, with what the engine needs to plan and start them.
//!
//! The build script reads the kinds' folders and embeds manifests, programs and digests; the list here says which
//! kinds there are. A test fails on a folder that the list forgets, and another on sources that `stages.lock` does
//! not know.

use std::collections::BTreeMap;

use crate::publish;

/// A built-in stage kind.
#[derive(Clone, Debug)]
pub struct Builtin {
    /// `group/name`, as in its manifest.
    pub name: &'static str,
    /// The manifest: YAML.
    pub manifest: &'static str,
    /// Where the manifest stands in the repository, for messages.
    pub manifest_path: String,
    /// How it starts.
    pub entry: Entry,
    /// What stands for its program in a key.
    pub identity: Identity,
}

/// A Rust program: it runs in the current folder and returns its exit status.
pub type Main = fn() -> u8;

/// How a built-in program is started.
#[derive(Clone, Copy, Debug)]
pub enum Entry {
    /// A function of this binary: `cuda-agent stage NAME` calls it and exits with what it returns.
    Rust(Main),
    /// Files to unpack before the manifest's `run:` is started.
    Files {
        /// Their paths from a common root, and their contents. The manifest, the protocol's Python twin and every
        /// shared helper are among them, at their places in the repository; Python programs import them by bare name,
        /// so each folder with a Python file belongs on the module path.
        files: &'static [(&'static str, &'static [u8])],
        /// The manifest's folder below that root: words of `run:` that name files are relative to it.
        folder: &'static str,
    },
}

/// What identifies a built-in program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Its sources are the ones that this version was given for.
    Version(String),
    /// They are not (someone is working on them): the digest of each source, by path.
    Sources(BTreeMap<String, String>),
}

/// The kinds: a folder of this crate, and the function where the program is Rust. To add a kind, make its folder and
/// add a line.
const KINDS: &[(&str, Option<Main>)] =
    &[("crawl", None), ("synthesize", None), ("measure", None), ("filter", None), ("publish", Some(publish::main))];

/// What the build script writes of a folder.
pub(crate) struct Embedded {
    pub(crate) name: &'static str,
    pub(crate) folder: &'static str,
    pub(crate) path: &'static str,
    pub(crate) version: &'static str,
    pub(crate) manifest: &'static str,
    pub(crate) locked: bool,
    pub(crate) files: &'static [(&'static str, &'static [u8])],
    pub(crate) sources: &'static [(&'static str, &'static str)],
}

include!(concat!(env!("OUT_DIR"), "/kinds.rs"));

/// Every built-in kind of this crate.
pub fn builtin() -> Vec<Builtin> {
    KINDS.iter().map(|(folder, main)| embedded(folder).builtin(*main)).collect()
}

fn embedded(folder: &str) -> &'static Embedded {
    let found = EMBEDDED.iter().find(|embedded| embedded.folder == folder);
    found.unwrap_or_else(|| panic!("stages/ops/{folder}/stage.yaml was not there when this crate was built"))
}

impl Embedded {
    fn builtin(&'static self, main: Option<Main>) -> Builtin {
        Builtin {
            name: self.name,
            manifest: self.manifest,
            manifest_path: format!("{}/stage.yaml", self.path),
            entry: match main {
                Some(main) => Entry::Rust(main),
                None => Entry::Files { files: self.files, folder: self.path },
            },
            identity: self.identity(),
        }
    }

    fn identity(&self) -> Identity {
        if self.locked {
            return Identity::Version(self.version.to_owned());
        }
        Identity::Sources(self.sources.iter().map(|(path, digest)| (path.to_string(), digest.to_string())).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::lock;

    fn ops() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR"))
    }

    #[test]
    fn no_folder_is_forgotten() {
        let listed: BTreeSet<&str> = KINDS.iter().map(|(folder, _)| *folder).collect();
        let found: BTreeSet<&str> = EMBEDDED.iter().map(|embedded| embedded.folder).collect();
        assert_eq!(listed, found, "the list in catalog.rs (left) and the folders with a stage.yaml (right)");
    }

    #[test]
    fn a_kind_is_named_after_its_folder_and_started_by_what_it_declares() {
        for kind in lock::read_kinds(ops()).unwrap() {
            assert_eq!(kind.name, format!("ops/{}", kind.folder));
            let entry = KINDS.iter().find(|(folder, _)| *folder == kind.folder).map(|(_, main)| main.is_some());
            assert_eq!(entry, Some(kind.rust), "{}: `run: [cuda-agent, …]` goes with a function", kind.name);
        }
    }

    #[test]
    fn a_python_kind_brings_its_files_and_a_rust_kind_none() {
        for kind in builtin() {
            match kind.entry {
                Entry::Rust(_) => assert!(embedded(&kind.name["ops/".len()..]).files.is_empty()),
                Entry::Files { files, folder } => {
                    let names: Vec<&str> = files.iter().map(|(name, _)| *name).collect();
                    assert!(names.contains(&"stages/protocol/python/cuda_agent_stage.py"), "{}", kind.name);
                    assert!(
                        names.iter().any(|name| name.starts_with(folder) && name.ends_with(".py")),
                        "{}",
                        kind.name
                    );
                }
            }
        }
    }

    #[test]
    fn lock_is_current() {
        let lock = lock::read_lock(ops()).unwrap();
        let kinds = lock::read_kinds(ops()).unwrap();
        let problems: Vec<String> = kinds.iter().filter_map(|kind| lock::explain(kind, &lock)).collect();
        let gone = lock.keys().filter(|name| kinds.iter().all(|kind| kind.name != **name));
        let problems: Vec<String> = problems.into_iter().chain(gone.map(|name| format!("{name} is gone\n"))).collect();
        assert!(
            problems.is_empty(),
            "stages/ops/stages.lock is out of date:\n{}\
             Results that were made with the old sources stay valid only where they would come out the same:\n  \
             where they may differ, raise `version:` in the stage.yaml and run  make relock\n  \
             where they cannot (a comment, a message), run  make relock SAME_RESULTS=1",
            problems.concat()
        );
    }
}
