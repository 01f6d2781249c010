//! A crate's list of kinds, with what the engine needs to plan and start them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::device::PerDevice;
use crate::lock;

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
    /// What stands for its program in a key, with GPUs and without.
    pub identity: PerDevice<Identity>,
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

/// A kind's folder as the build script found it.
#[derive(Debug)]
pub struct Embedded {
    /// Of the manifest.
    pub name: &'static str,
    /// The folder's name.
    pub folder: &'static str,
    /// The folder from the root of the workspace.
    pub path: &'static str,
    /// Whether the manifest's `run:` starts this binary.
    pub rust: bool,
    /// The manifest: YAML.
    pub manifest: &'static str,
    /// What to unpack for a Python program.
    pub files: &'static [(&'static str, &'static [u8])],
    /// What identifies the program on each kind of device.
    pub identity: PerDevice<OnDevice>,
}

/// What identifies a program on a kind of device.
#[derive(Clone, Copy, Debug)]
pub struct OnDevice {
    /// Of the manifest.
    pub version: &'static str,
    /// Whether the lock knows this version with these sources.
    pub locked: bool,
    /// Digests of the sources, by path.
    pub sources: &'static [(&'static str, &'static str)],
}

/// The kinds of one crate.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// The crate's folder below `stages/`, with which its kinds' names begin.
    pub name: &'static str,
    /// Each kind's folder, and the function where the program is Rust.
    pub programs: &'static [(&'static str, Option<Main>)],
    /// What the build script wrote.
    pub embedded: &'static [Embedded],
}

impl Group {
    /// The kinds, in the order of the list.
    pub fn builtin(&self) -> Vec<Builtin> {
        self.programs.iter().map(|(folder, main)| self.embedded(folder).builtin(*main)).collect()
    }

    /// What a person forgot, a line for each: for a test of the crate in `folder`, so that a kind can't be left out of
    /// the list, or change while its version stays.
    pub fn problems(&self, folder: &Path) -> Result<Vec<String>, String> {
        let mut problems = self.unlisted();
        problems.extend(self.embedded.iter().filter_map(|embedded| self.misnamed(embedded)));
        problems.extend(lock::outdated(folder)?);
        Ok(problems)
    }

    /// What the build script found in a folder of the list.
    pub fn embedded(&self, folder: &str) -> &'static Embedded {
        let found = self.embedded.iter().find(|embedded| embedded.folder == folder);
        found.unwrap_or_else(|| panic!("stages/{}/{folder}/stage.yaml was not there at the build", self.name))
    }

    fn unlisted(&self) -> Vec<String> {
        let listed: BTreeSet<&str> = self.programs.iter().map(|(folder, _)| *folder).collect();
        let found: BTreeSet<&str> = self.embedded.iter().map(|embedded| embedded.folder).collect();
        let missing = listed.symmetric_difference(&found);
        missing
            .map(|folder| format!("`{folder}` is a folder with a stage.yaml, or in the crate's list, not both"))
            .collect()
    }

    fn misnamed(&self, embedded: &Embedded) -> Option<String> {
        let right = format!("{}/{}", self.name, embedded.folder);
        if embedded.name != right {
            return Some(format!("{}: a kind in this folder is called {right}", embedded.name));
        }
        let (_, main) = self.programs.iter().find(|(folder, _)| *folder == embedded.folder)?;
        (main.is_some() != embedded.rust).then(|| format!("{right}: `run: [cuda-agent, …]` goes with a function"))
    }
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
            identity: PerDevice::of(|device| self.identity.on(device).identity()),
        }
    }
}

impl OnDevice {
    fn identity(&self) -> Identity {
        if self.locked {
            return Identity::Version(self.version.to_owned());
        }
        Identity::Sources(self.sources.iter().map(|(path, digest)| (path.to_string(), digest.to_string())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Embedded = Embedded {
        name: "x/a",
        folder: "a",
        path: "stages/x/a",
        rust: false,
        manifest: "",
        files: &[("stages/x/a/a.py", b"")],
        identity: PerDevice { cpu: LOCKED, gpu: LOCKED },
    };

    const LOCKED: OnDevice = OnDevice { version: "1.0.0", locked: true, sources: &[("stages/x/a/a.py", "aa")] };

    fn group(programs: &'static [(&'static str, Option<Main>)], embedded: &'static [Embedded]) -> Group {
        Group { name: "x", programs, embedded }
    }

    fn problems(group: Group) -> Vec<String> {
        group.problems(tempfile::tempdir().unwrap().path()).unwrap()
    }

    #[test]
    fn a_locked_kind_is_its_version_and_any_other_its_sources() {
        const EDITED: PerDevice<OnDevice> = PerDevice { cpu: OnDevice { locked: false, ..LOCKED }, gpu: LOCKED };
        static KINDS: [Embedded; 2] = [A, Embedded { folder: "b", identity: EDITED, ..A }];
        let kinds = group(&[("a", None), ("b", None)], &KINDS).builtin();
        let locked = Identity::Version("1.0.0".to_owned());
        assert_eq!((&kinds[0].identity.cpu, &kinds[0].identity.gpu), (&locked, &locked));
        let sources = BTreeMap::from([("stages/x/a/a.py".to_owned(), "aa".to_owned())]);
        assert_eq!((&kinds[1].identity.cpu, &kinds[1].identity.gpu), (&Identity::Sources(sources), &locked));
        assert!(matches!(kinds[0].entry, Entry::Files { folder: "stages/x/a", .. }));
    }

    #[test]
    fn a_list_that_agrees_with_the_folders_has_no_problems() {
        assert_eq!(problems(group(&[("a", None)], &[A])), [""; 0]);
    }

    #[test]
    fn a_forgotten_folder_and_a_folder_that_is_gone_are_told() {
        assert!(problems(group(&[], &[A]))[0].starts_with("`a` is a folder"));
        assert!(problems(group(&[("a", None)], &[]))[0].starts_with("`a` is a folder"));
    }

    #[test]
    fn a_wrong_name_and_a_wrong_entry_are_told() {
        let other = group(&[("b", None)], const { &[Embedded { folder: "b", ..A }] });
        assert_eq!(problems(other), ["x/a: a kind in this folder is called x/b"]);
        let rust = group(&[("a", Some(|| 0))], &[A]);
        assert_eq!(problems(rust), ["x/a: `run: [cuda-agent, …]` goes with a function"]);
    }
}
