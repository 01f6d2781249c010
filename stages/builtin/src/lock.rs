//! What a built-in kind is made of, and whether that is what its version was given for.
//!
//! A kind's **sources** are its manifest, the files and folders that the manifest's `sources:` names, for a Python
//! kind the protocol's Python twin, and for a Rust kind the packages that its crate's `[dependencies]` and the
//! protocol's reach in `Cargo.lock`. Tests, what only they use (snapshots, clients) and bytecode in a named folder do not
//! count: an edit of a test misses nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The lock, beside the kinds' folders.
pub const LOCK_FILE: &str = "stages.lock";

/// The protocol's crate, from the root of the workspace: every Rust program is built on it.
pub(crate) const PROTOCOL: &str = "stages/protocol";

/// Digests of a kind's sources by path from the root of the workspace.
pub type Sources = BTreeMap<String, String>;

/// What `stages.lock` holds of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Locked {
    /// The version that was given for these sources.
    pub version: String,
    /// The sources.
    pub sources: Sources,
}

/// `stages.lock`, by kind.
pub type Lock = BTreeMap<String, Locked>;

/// A kind as it lies on the disk.
#[derive(Debug)]
pub struct Kind {
    /// Of the manifest: `ops/publish`.
    pub name: String,
    /// Of the manifest.
    pub version: String,
    /// The folder's name.
    pub folder: String,
    /// The folder from the root of the workspace.
    pub path: String,
    /// Whether its program is part of the binary.
    pub rust: bool,
    /// The files to put on the disk before a Python program starts, by path from the root of the workspace.
    pub files: BTreeMap<String, PathBuf>,
    /// The digests that make up its identity.
    pub sources: Sources,
}

impl Kind {
    /// Whether the lock was made for these sources and this version.
    pub fn is_locked(&self, lock: &Lock) -> bool {
        lock.get(&self.name).is_some_and(|locked| locked.version == self.version && locked.sources == self.sources)
    }
}

/// Reads every kind of the crate in `home` (`stages/ops`, say), ordered by folder.
pub fn read_kinds(home: &Path) -> Result<Vec<Kind>, String> {
    let mut folders = Vec::new();
    for entry in list(home)? {
        if entry.join("stage.yaml").is_file() {
            folders.push(entry);
        }
    }
    folders.iter().map(|folder| read_kind(home, folder)).collect()
}

/// Reads the lock; an absent file is an empty lock.
pub fn read_lock(home: &Path) -> Result<Lock, String> {
    let path = home.join(LOCK_FILE);
    match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| format!("{}: {error}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Lock::new()),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// How a kind differs from the lock, a line for each source; nothing where it does not.
pub fn explain(kind: &Kind, lock: &Lock) -> Option<String> {
    if kind.is_locked(lock) {
        return None;
    }
    let Some(locked) = lock.get(&kind.name) else {
        return Some(format!("{} {} is new\n", kind.name, kind.version));
    };
    let mut text = format!("{} {} (locked: {})\n", kind.name, kind.version, locked.version);
    let names: BTreeSet<&String> = kind.sources.keys().chain(locked.sources.keys()).collect();
    for name in names {
        let change = match (locked.sources.get(name), kind.sources.get(name)) {
            (Some(old), Some(new)) if old == new => continue,
            (Some(_), Some(_)) => "changed",
            (None, _) => "added",
            (_, None) => "removed",
        };
        text += &format!("  {change} {name}\n");
    }
    Some(text)
}

/// The lock for `kinds`, or what stands against it: changed sources under a version that was not raised, unless
/// someone vouches for the results.
pub fn relock(kinds: &[Kind], old: &Lock, same_results: bool) -> Result<Lock, String> {
    let stale = |kind: &&Kind| {
        let locked = old.get(&kind.name);
        locked.is_some_and(|locked| locked.sources != kind.sources && !is_newer(&kind.version, &locked.version))
    };
    let refused: String = kinds.iter().filter(stale).filter_map(|kind| explain(kind, old)).collect();
    if !refused.is_empty() && !same_results {
        return Err(refused);
    }
    let lock = |kind: &Kind| Locked { version: kind.version.clone(), sources: kind.sources.clone() };
    Ok(kinds.iter().map(|kind| (kind.name.clone(), lock(kind))).collect())
}

/// What a test tells whoever changed sources of the crate in `home` and did not lock them, if anything.
pub fn outdated(home: &Path) -> Result<Option<String>, String> {
    let (lock, kinds) = (read_lock(home)?, read_kinds(home)?);
    let changed = kinds.iter().filter_map(|kind| explain(kind, &lock));
    let gone = lock.keys().filter(|name| kinds.iter().all(|kind| kind.name != **name));
    let text: String = changed.chain(gone.map(|name| format!("{name} is gone\n"))).collect();
    Ok((!text.is_empty()).then(|| {
        format!(
            "{} is out of date:\n{text}\
             Results that were made with the old sources stay valid only where they would come out the same:\n  \
             where they may differ, raise `version:` in the stage.yaml and run  make relock\n  \
             where they cannot (a comment, a message), run  make relock SAME_RESULTS=1",
            home.join(LOCK_FILE).display()
        )
    }))
}

/// The crates with kinds: folders of `stages`, ordered.
pub fn homes(stages: &Path) -> Result<Vec<PathBuf>, String> {
    let mut homes = Vec::new();
    for folder in list(stages)?.into_iter().filter(|folder| folder.join("Cargo.toml").is_file()) {
        if folder.join(LOCK_FILE).is_file() || !read_kinds(&folder)?.is_empty() {
            homes.push(folder);
        }
    }
    Ok(homes)
}

/// Whether `version` comes after `old`: going back would take results of other sources for these.
fn is_newer(version: &str, old: &str) -> bool {
    let parts = |text: &str| -> Option<Vec<u64>> { text.split('.').map(|part| part.parse().ok()).collect() };
    parts(version).is_some() && parts(version) > parts(old)
}

fn read_kind(home: &Path, folder: &Path) -> Result<Kind, String> {
    let root = workspace(home);
    let manifest_path = folder.join("stage.yaml");
    let text = read_text(&manifest_path)?;
    let head = ManifestHead::read(&text).map_err(|error| format!("{}: {error}", manifest_path.display()))?;
    let mut files = BTreeMap::new();
    let mut add = |path: &Path| -> Result<(), String> {
        files.insert(from_root(&root, path)?, path.to_owned());
        Ok(())
    };
    add(&manifest_path)?;
    for source in &head.sources {
        for file in files_below(&clean(&folder.join(source)))? {
            add(&file)?;
        }
    }
    if !head.rust {
        add(&root.join(PROTOCOL).join("python/cuda_agent_stage.py"))?;
    }
    let mut sources = Sources::new();
    for (name, path) in &files {
        let bytes = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        sources.insert(name.clone(), blake3::hash(&bytes).to_hex().to_string());
    }
    if head.rust {
        let cargo_lock = read_text(&root.join("Cargo.lock"))?;
        for package in [home.to_owned(), root.join(PROTOCOL)] {
            sources.extend(shipped_packages(&root, &package, &cargo_lock)?);
        }
    }
    let path = from_root(&root, folder)?;
    let folder = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Kind { name: head.name, version: head.version, folder, path, rust: head.rust, files, sources })
}

/// The few fields of a manifest that the lock is about.
#[derive(Debug, Default, PartialEq, Eq)]
struct ManifestHead {
    name: String,
    version: String,
    sources: Vec<String>,
    rust: bool,
}

impl ManifestHead {
    /// Reads them line by line. This is no YAML parser (the engine has one): it takes plain scalars and plain lists
    /// at the top level, and refuses anything else there, so that it can't misread what it accepts.
    fn read(text: &str) -> Result<Self, String> {
        let mut fields: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        let mut open = None;
        for line in text.lines() {
            let wanted = |name: &&str| ["name", "version", "sources", "run"].contains(name);
            if let Some((name, rest)) = line.split_once(':').filter(|(name, _)| wanted(name)) {
                fields.insert(name, inline_items(rest)?);
                open = rest.trim().is_empty().then_some(name);
            } else if let (Some(name), Some(item)) = (open, line.trim_start().strip_prefix("- ")) {
                fields.entry(name).or_default().push(plain(item)?);
            } else if !line.trim().is_empty() && !line.trim_start().starts_with('#') {
                open = None;
            }
        }
        let one = |name: &str| match fields.get(name).map(Vec::as_slice) {
            Some([value]) => Ok(value.clone()),
            _ => Err(format!("`{name}:` must be a plain value on its own line")),
        };
        let run = fields.get("run").and_then(|words| words.first().cloned());
        Ok(Self {
            name: one("name")?,
            version: one("version")?,
            rust: run.ok_or("`run:` must be a plain list")? == "cuda-agent",
            sources: fields.remove("sources").unwrap_or_default(),
        })
    }
}

fn inline_items(rest: &str) -> Result<Vec<String>, String> {
    let rest = rest.trim();
    match rest.strip_prefix('[').map(|list| list.strip_suffix(']')) {
        None if rest.is_empty() => Ok(Vec::new()),
        None => Ok(vec![plain(rest)?]),
        Some(None) => Err(format!("`{rest}`: a list in brackets must end on its line")),
        Some(Some(list)) => list.split(',').map(plain).collect(),
    }
}

fn plain(text: &str) -> Result<String, String> {
    let text = text.trim();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    if text.is_empty() || !text.chars().all(is_plain) {
        return Err(format!("`{text}`: only letters, digits and ._-/ are read here, without quotes or comments"));
    }
    Ok(text.to_owned())
}

/// A file, or the files below a folder that make up a program.
fn files_below(path: &Path) -> Result<Vec<PathBuf>, String> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in list(path)? {
        let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !(is_test(&name) || name.starts_with('.') || name == "__pycache__" || name.ends_with(".pyc")) {
            files.extend(files_below(&entry)?);
        }
    }
    Ok(files)
}

/// Whether a file or folder of this name serves tests alone, in Rust or in Python: no result can come from it, so an
/// edit of it must not change what a kind is.
fn is_test(name: &str) -> bool {
    // The last one is the client through which Python tests talk to a server that the engine drives.
    const NAMES: [&str; 5] = ["tests", "tests.rs", "snapshots", "conftest.py", "reference_client.py"];
    NAMES.contains(&name)
        || name.ends_with("_test.rs")
        || name.ends_with(".snap")
        || (name.starts_with("test_") && name.ends_with(".py"))
}

fn list(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let complain = |error: std::io::Error| format!("{}: {error}", folder.display());
    let entries = fs::read_dir(folder).map_err(complain)?;
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| Ok(entry.map_err(complain)?.path())).collect::<Result<_, String>>()?;
    paths.sort();
    Ok(paths)
}

fn read_text(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// The root of the workspace, of which the crate in `home` is at `stages/<name>`.
pub(crate) fn workspace(home: &Path) -> PathBuf {
    clean(&home.join("../.."))
}

/// Resolves `..` in the text of a path, so that one file has one name.
fn clean(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                clean.pop();
            }
            Component::CurDir => {}
            other => clean.push(other),
        }
    }
    clean
}

fn from_root(root: &Path, path: &Path) -> Result<String, String> {
    let relative = path.strip_prefix(root).map_err(|_| format!("{}: outside the workspace", path.display()))?;
    Ok(relative.to_string_lossy().replace('\\', "/"))
}

/// The names in a Cargo.toml's `[dependencies]`: what is shipped. Build and test dependencies change no result.
fn direct_dependencies(cargo_toml: &str) -> Vec<String> {
    let lines = cargo_toml.lines().skip_while(|line| line.trim() != "[dependencies]").skip(1);
    let section = lines.take_while(|line| !line.starts_with('['));
    let names = section.filter_map(|line| line.split(['.', '=', ' ']).next());
    names.filter(|name| !name.is_empty() && !name.starts_with('#')).map(str::to_owned).collect()
}

/// The registry packages that the crate in `home` ships, with those of the stage crates that it links.
fn shipped_packages(root: &Path, home: &Path, cargo_lock: &str) -> Result<Sources, String> {
    let cargo_toml = read_text(&home.join("Cargo.toml"))?;
    let direct = direct_dependencies(&cargo_toml);
    let mut sources = locked_packages(cargo_lock, &versioned(&cargo_toml, cargo_lock, &direct))?;
    for name in direct.iter().filter_map(|name| name.strip_prefix("cuda-agent-")) {
        // What embeds kinds is no source of their results.
        let linked = root.join("stages").join(name);
        if name != "builtin" && linked.is_dir() && linked != home {
            sources.extend(shipped_packages(root, &linked, cargo_lock)?);
        }
    }
    Ok(sources)
}

/// A package of which Cargo.lock has several versions is told apart there by the version that the crate's own entry names.
fn versioned(cargo_toml: &str, cargo_lock: &str, direct: &[String]) -> Vec<String> {
    let own = cargo_toml.lines().find_map(|line| line.strip_prefix("name = ")).unwrap_or_default().trim_matches('"');
    let packages = cargo_lock.split("[[package]]").skip(1).map(Package::read);
    let entries: Vec<&str> = packages.filter(|package| package.name == own).flat_map(|it| it.dependencies).collect();
    let of = |name: &String| entries.iter().find(|entry| entry.split(' ').next() == Some(name));
    direct.iter().map(|name| of(name).map_or_else(|| name.clone(), |entry| (*entry).to_owned())).collect()
}

/// The registry packages that `direct` reach in a Cargo.lock: `Cargo.lock: name version` → checksum. Packages of the
/// workspace have none and count by their files; what a package lists there is what some feature of it may use, so
/// the set may be too large, never too small.
fn locked_packages(cargo_lock: &str, direct: &[String]) -> Result<Sources, String> {
    let packages: Vec<Package> = cargo_lock.split("[[package]]").skip(1).map(Package::read).collect();
    let mut waiting: Vec<&str> = direct.iter().map(String::as_str).collect();
    let mut seen = BTreeSet::new();
    let mut sources = Sources::new();
    while let Some(wanted) = waiting.pop() {
        let (name, version) = wanted.split_once(' ').unwrap_or((wanted, ""));
        let fits = |package: &&Package| package.name == name && (version.is_empty() || package.version == version);
        let package = packages.iter().find(fits).ok_or_else(|| format!("Cargo.lock has no `{wanted}`"))?;
        if !seen.insert((package.name, package.version)) {
            continue;
        }
        // A workspace package's entry mixes in what only its tests use; what it ships is in `direct` already.
        if let Some(checksum) = package.checksum {
            sources.insert(format!("Cargo.lock: {} {}", package.name, package.version), checksum.to_owned());
            waiting.extend(&package.dependencies);
        }
    }
    Ok(sources)
}

#[derive(Default)]
struct Package<'a> {
    name: &'a str,
    version: &'a str,
    checksum: Option<&'a str>,
    dependencies: Vec<&'a str>,
}

impl<'a> Package<'a> {
    fn read(text: &'a str) -> Self {
        let mut package = Self::default();
        for line in text.lines() {
            match line.split_once(" = ") {
                Some(("name", value)) => package.name = value.trim_matches('"'),
                Some(("version", value)) => package.version = value.trim_matches('"'),
                Some(("checksum", value)) => package.checksum = Some(value.trim_matches('"')),
                Some(_) => {}
                None => {
                    let item = line.trim().strip_prefix('"').and_then(|line| line.strip_suffix("\","));
                    package.dependencies.extend(item);
                }
            }
        }
        package
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(version: &str, digest: &str) -> Kind {
        let sources = Sources::from([("stages/ops/x/x.py".to_owned(), digest.to_owned())]);
        let [name, folder, path] = ["ops/x", "x", "stages/ops/x"].map(str::to_owned);
        Kind { name, version: version.to_owned(), folder, path, rust: false, files: BTreeMap::new(), sources }
    }

    #[test]
    fn a_manifest_is_read_in_either_list_style() {
        let block = "name: ops/x\nversion: 1.2.0\nsummary: run\nrun: [python, x.py]\nsources:\n  # why\n  - x.py\n  - ../python\n";
        let flow = "name: ops/x\nversion: 1.2.0\nrun:\n- python\n- x.py\nsources: [x.py, ../python]\n";
        let head = ManifestHead::read(block).unwrap();
        assert_eq!(head.sources, ["x.py", "../python"]);
        assert_eq!(head, ManifestHead::read(flow).unwrap());
        assert!(!head.rust);
    }

    #[test]
    fn what_could_be_misread_is_refused() {
        for text in ["sources: [\"x.py\"]", "sources: [x.py", "sources: &a", "sources:\n  - {a: b}"] {
            let text = format!("name: ops/x\nversion: 1.2.0\nrun: [python, x.py]\n{text}\n");
            assert!(ManifestHead::read(&text).is_err(), "{text}");
        }
        assert!(ManifestHead::read("name: ops/x\nrun: [python]\n").is_err(), "no version");
    }

    #[test]
    fn a_locked_kind_is_its_version_until_a_source_changes() {
        let lock = relock(&[kind("1.0.0", "aa")], &Lock::new(), false).unwrap();
        assert!(kind("1.0.0", "aa").is_locked(&lock));
        assert!(!kind("1.0.0", "bb").is_locked(&lock));
        assert!(!kind("1.1.0", "aa").is_locked(&lock));
        let text = explain(&kind("1.0.0", "bb"), &lock).unwrap();
        assert_eq!(text, "ops/x 1.0.0 (locked: 1.0.0)\n  changed stages/ops/x/x.py\n");
    }

    #[test]
    fn changed_sources_need_a_newer_version_or_someone_who_vouches() {
        let lock = relock(&[kind("1.9.0", "aa")], &Lock::new(), false).unwrap();
        assert!(relock(&[kind("1.9.0", "bb")], &lock, false).unwrap_err().contains("stages/ops/x/x.py"));
        assert!(relock(&[kind("1.8.0", "bb")], &lock, false).is_err(), "an older version");
        let raised = relock(&[kind("1.10.0", "bb")], &lock, false).unwrap();
        assert!(kind("1.10.0", "bb").is_locked(&raised));
        let vouched = relock(&[kind("1.9.0", "bb")], &lock, true).unwrap();
        assert!(kind("1.9.0", "bb").is_locked(&vouched));
    }

    #[test]
    fn only_shipped_dependencies_are_followed() {
        let toml = "[package]\nname = \"x\"\n\n[dependencies]\n# why\na.workspace = true\nlocal = { path = \"l\" }\n\n[dev-dependencies]\nz = \"1\"\n";
        assert_eq!(direct_dependencies(toml), ["a", "local"]);
        let cargo_lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"c1\"\ndependencies = [\n \"b 2.0.0\",\n]\n\n\
                          [[package]]\nname = \"b\"\nversion = \"1.0.0\"\nchecksum = \"c2\"\n\n[[package]]\nname = \"b\"\nversion = \"2.0.0\"\nchecksum = \"c3\"\n\n\
                          [[package]]\nname = \"local\"\nversion = \"0.1.0\"\ndependencies = [\n \"z\",\n]\n\n[[package]]\nname = \"z\"\nversion = \"1.0.0\"\nchecksum = \"c4\"\n";
        let packages = locked_packages(cargo_lock, &direct_dependencies(toml)).unwrap();
        let expected = [("Cargo.lock: a 1.0.0", "c1"), ("Cargo.lock: b 2.0.0", "c3")];
        assert_eq!(packages, expected.map(|(name, sum)| (name.to_owned(), sum.to_owned())).into());
        assert!(locked_packages(cargo_lock, &["gone".to_owned()]).is_err());
    }

    #[test]
    fn of_two_versions_the_crates_own_counts() {
        let lock = "[[package]]\nname = \"b\"\nversion = \"1.0.0\"\nchecksum = \"one\"\n\n[[package]]\nname = \"b\"\n\
            version = \"2.0.0\"\nchecksum = \"two\"\n\n[[package]]\nname = \"x\"\nversion = \"0.1.0\"\n\
            dependencies = [\n \"b 2.0.0\",\n]\n";
        let direct = versioned("[package]\nname = \"x\"\n", lock, &["b".to_owned()]);
        let packages = locked_packages(lock, &direct).unwrap();
        assert_eq!(packages, Sources::from([("Cargo.lock: b 2.0.0".to_owned(), "two".to_owned())]));
    }

    #[test]
    fn tests_and_bytecode_are_no_sources() {
        let folder = tempfile::tempdir().unwrap();
        let tests = ["test_a.py", "conftest.py", "reference_client.py", "tests/e.py", "b/tests.rs", "b/f_test.rs"];
        let others = [".hidden", "b/__pycache__/d.pyc", "b/snapshots/g.snap", "h.snap"];
        for name in tests.into_iter().chain(others).chain(["a.py", "attest.rs", "b/c.json"]) {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let files = files_below(folder.path()).unwrap();
        assert_eq!(files, ["a.py", "attest.rs", "b/c.json"].map(|name| folder.path().join(name)));
    }

    #[test]
    fn an_edit_of_one_program_changes_one_kind() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("stages/ops/Cargo.toml", "[dependencies]\n");
        write("stages/protocol/Cargo.toml", "[dependencies]\n");
        write("stages/protocol/python/cuda_agent_stage.py", "");
        write("stages/protocol/src/lib.rs", "");
        write("Cargo.lock", "");
        write("stages/ops/python/shared.py", "");
        for name in ["a", "b"] {
            let manifest = "version: 1.0.0\nrun: [python, x.py]\nsources: [x.py, ../python/shared.py]\n";
            write(&format!("stages/ops/{name}/stage.yaml"), &format!("name: ops/{name}\n{manifest}"));
            write(&format!("stages/ops/{name}/x.py"), "");
        }
        let manifest = "name: ops/c\nversion: 1.0.0\nrun: [cuda-agent]\nsources: [../src, ../../protocol/src]\n";
        write("stages/ops/c/stage.yaml", manifest);
        write("stages/ops/src/lib.rs", "");

        let read = || read_kinds(&folder.path().join("stages/ops")).unwrap();
        let lock = relock(&read(), &Lock::new(), false).unwrap();
        let changed_by = |path: &str| -> Vec<String> {
            write(path, "# edited");
            let changed = read().into_iter().filter(|kind| !kind.is_locked(&lock)).map(|kind| kind.folder).collect();
            write(path, "");
            changed
        };
        assert_eq!(changed_by("stages/ops/a/x.py"), ["a"]);
        assert_eq!(changed_by("stages/ops/a/test_x.py"), [""; 0]);
        assert_eq!(changed_by("stages/ops/python/shared.py"), ["a", "b"]);
        assert_eq!(changed_by("stages/protocol/python/cuda_agent_stage.py"), ["a", "b"]);
        assert_eq!(changed_by("stages/ops/src/lib.rs"), ["c"]);
        for path in ["tests.rs", "lib_test.rs", "snapshots/lib.snap"] {
            assert_eq!(changed_by(&format!("stages/ops/src/{path}")), [""; 0], "{path}");
        }
        assert_eq!(changed_by("stages/protocol/src/lib.rs"), ["c"]);
    }
}
