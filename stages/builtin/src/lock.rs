//! What a built-in kind is made of, and whether that is what its version was given for.
//!
//! A kind's **sources** are its manifest, the files and folders that the manifest's `sources:` names, for a Python
//! kind the protocol's Python twin, and for a Rust kind the packages that its crate's `[dependencies]` and the
//! protocol's reach in `Cargo.lock`. Tests, what only they use (snapshots, clients) and bytecode in a named folder do not
//! count: an edit of a test misses nothing.
//!
//! Sources that the manifest lists below `device_sources:` count on one kind of device alone, and a version below
//! `device_versions:` stands for that device's results alone: with `cpu: 1.3.1` results on GPUs stay those of `version: 1.3.0`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::device::{DeviceKind, PerDevice};
use crate::manifest_head::{ManifestHead, without_device_versions};

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
    /// The sources, whatever device they are for.
    pub sources: Sources,
    /// What of these and of the version is one kind of device's alone.
    #[serde(flatten)]
    pub own: DeviceOwn,
}

/// What differs between kinds of devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceOwn {
    /// Sources that change results on this kind of device alone, by path.
    #[serde(default, skip_serializing_if = "is_default")]
    pub device_sources: PerDevice<BTreeSet<String>>,
    /// Versions in the place of the kind's.
    #[serde(default, skip_serializing_if = "is_default")]
    pub device_versions: PerDevice<Option<String>>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Locked {
    /// The version that stands for results on a kind of device.
    pub fn version_on(&self, device: DeviceKind) -> &str {
        self.own.device_versions.on(device).as_ref().unwrap_or(&self.version)
    }

    /// The sources that can change results there.
    pub fn sources_on(&self, device: DeviceKind) -> Sources {
        let elsewhere = self.own.device_sources.on(device.other());
        let counts = |(path, _): &(&String, &String)| !elsewhere.contains(*path);
        self.sources.iter().filter(counts).map(|(path, digest)| (path.clone(), digest.clone())).collect()
    }
}

/// `stages.lock`, by kind.
pub type Lock = BTreeMap<String, Locked>;

/// A kind as it lies on the disk.
#[derive(Debug)]
pub struct Kind {
    /// Of the manifest: `ops/publish`.
    pub name: String,
    /// The folder's name.
    pub folder: String,
    /// The folder from the root of the workspace.
    pub path: String,
    /// Whether its program is part of the binary.
    pub rust: bool,
    /// The files to put on the disk before a Python program starts, by path from the root of the workspace.
    pub files: BTreeMap<String, PathBuf>,
    /// What the lock is to hold of it: its version and the digests that make up its identity.
    pub current: Locked,
}

impl Kind {
    /// Whether the lock was made for this version and these sources, as far as they matter on a kind of device.
    pub fn is_locked_on(&self, device: DeviceKind, lock: &Lock) -> bool {
        lock.get(&self.name).is_some_and(|locked| {
            locked.version_on(device) == self.current.version_on(device)
                && locked.sources_on(device) == self.current.sources_on(device)
        })
    }

    /// Whether a change of sources on a kind of device has no newer version there.
    fn is_stale_on(&self, device: DeviceKind, lock: &Lock) -> bool {
        lock.get(&self.name).is_some_and(|locked| {
            locked.sources_on(device) != self.current.sources_on(device)
                && !is_newer(self.current.version_on(device), locked.version_on(device))
        })
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
    if lock.get(&kind.name) == Some(&kind.current) {
        return None;
    }
    let Some(locked) = lock.get(&kind.name) else {
        return Some(format!("{} {} is new\n", kind.name, kind.current.version));
    };
    let mut text = format!("{} {} (locked: {})\n", kind.name, versions(&kind.current), versions(locked));
    let (old, new) = (&locked.sources, &kind.current.sources);
    let names: BTreeSet<&String> = new.keys().chain(old.keys()).collect();
    for name in names {
        let change = match (old.get(name), new.get(name)) {
            (Some(old), Some(new)) if old == new => continue,
            (Some(_), Some(_)) => "changed",
            (None, _) => "added",
            (_, None) => "removed",
        };
        let owner = |device: &DeviceKind| kind.current.own.device_sources.on(*device).contains(name);
        let only = DeviceKind::ALL.into_iter().find(owner).map(|device| format!(" (on {} alone)", device.word()));
        text += &format!("  {change} {name}{}\n", only.unwrap_or_default());
    }
    Some(text)
}

/// A version, with those of devices that have another.
fn versions(locked: &Locked) -> String {
    let own = |device: DeviceKind| {
        locked.own.device_versions.on(device).as_ref().map(|version| format!(", {}: {version}", device.word()))
    };
    DeviceKind::ALL.into_iter().filter_map(own).fold(locked.version.clone(), |text, own| text + &own)
}

/// The lock for `kinds`, or what stands against it: changed sources under a version that was not raised, unless
/// someone vouches for the results.
pub fn relock(kinds: &[Kind], old: &Lock, same_results: bool) -> Result<Lock, String> {
    let stale = |kind: &&Kind| DeviceKind::ALL.into_iter().any(|device| kind.is_stale_on(device, old));
    let refused: String = kinds.iter().filter(stale).filter_map(|kind| explain(kind, old)).collect();
    if !refused.is_empty() && !same_results {
        return Err(refused);
    }
    Ok(kinds.iter().map(|kind| (kind.name.clone(), kind.current.clone())).collect())
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
             where they may differ, raise `version:` in the stage.yaml (on one device alone, `device_versions:`) and run  make relock\n  \
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
    files.insert(from_root(&root, &manifest_path)?, manifest_path.clone());
    let mut add = |sources: &[String]| -> Result<BTreeSet<String>, String> {
        let mut names = BTreeSet::new();
        for source in sources {
            for file in files_below(&clean(&folder.join(source)))? {
                let name = from_root(&root, &file)?;
                names.insert(name.clone());
                files.insert(name, file);
            }
        }
        Ok(names)
    };
    add(&head.sources)?;
    let device_sources = PerDevice { cpu: add(&head.device_sources.cpu)?, gpu: add(&head.device_sources.gpu)? };
    if let Some(both) = device_sources.cpu.intersection(&device_sources.gpu).next() {
        return Err(format!("{}: {both} can't be one device's alone twice", folder.join("stage.yaml").display()));
    }
    if !head.rust {
        let twin = root.join(PROTOCOL).join("python/cuda_agent_stage.py");
        files.insert(from_root(&root, &twin)?, twin);
    }
    let mut sources = Sources::new();
    for (name, path) in &files {
        let mut bytes = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        if *path == manifest_path {
            // They are compared by themselves, and that of one device is nothing to the other.
            bytes = without_device_versions(&text).into_bytes();
        }
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
    let own = DeviceOwn { device_sources, device_versions: head.device_versions };
    let current = Locked { version: head.version, sources, own };
    Ok(Kind { name: head.name, folder, path, rust: head.rust, files, current })
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
        let current = Locked { version: version.to_owned(), sources, own: DeviceOwn::default() };
        Kind { name, folder, path, rust: false, files: BTreeMap::new(), current }
    }

    #[test]
    fn a_locked_kind_is_its_version_until_a_source_changes() {
        let lock = relock(&[kind("1.0.0", "aa")], &Lock::new(), false).unwrap();
        assert!(kind("1.0.0", "aa").is_locked_on(DeviceKind::Gpu, &lock));
        assert!(!kind("1.0.0", "bb").is_locked_on(DeviceKind::Gpu, &lock));
        assert!(!kind("1.1.0", "aa").is_locked_on(DeviceKind::Gpu, &lock));
        let text = explain(&kind("1.0.0", "bb"), &lock).unwrap();
        assert_eq!(text, "ops/x 1.0.0 (locked: 1.0.0)\n  changed stages/ops/x/x.py\n");
    }

    #[test]
    fn changed_sources_need_a_newer_version_or_someone_who_vouches() {
        let lock = relock(&[kind("1.9.0", "aa")], &Lock::new(), false).unwrap();
        assert!(relock(&[kind("1.9.0", "bb")], &lock, false).unwrap_err().contains("stages/ops/x/x.py"));
        assert!(relock(&[kind("1.8.0", "bb")], &lock, false).is_err(), "an older version");
        let raised = relock(&[kind("1.10.0", "bb")], &lock, false).unwrap();
        assert!(kind("1.10.0", "bb").is_locked_on(DeviceKind::Gpu, &raised));
        let vouched = relock(&[kind("1.9.0", "bb")], &lock, true).unwrap();
        assert!(kind("1.9.0", "bb").is_locked_on(DeviceKind::Gpu, &vouched));
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
            write_below(folder.path(), name, "");
        }
        let files = files_below(folder.path()).unwrap();
        assert_eq!(files, ["a.py", "attest.rs", "b/c.json"].map(|name| folder.path().join(name)));
    }

    fn write_below(folder: &Path, path: &str, text: &str) {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn an_edit_of_one_program_changes_one_kind() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| write_below(folder.path(), path, text);
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
            let changed = read()
                .into_iter()
                .filter(|kind| !kind.is_locked_on(DeviceKind::Gpu, &lock))
                .map(|kind| kind.folder)
                .collect();
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

    /// An edit of what one device alone uses leaves results on the other as they are.
    #[test]
    fn an_edit_of_one_devices_sources_changes_that_device() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| write_below(folder.path(), path, text);
        write("stages/protocol/python/cuda_agent_stage.py", "");
        write("stages/ops/Cargo.toml", "");
        for path in ["src/lib.py", "src/emulator/a.py", "clock.py"] {
            write(&format!("stages/ops/{path}"), "");
        }
        let manifest = |versions: &str| {
            let head = "name: ops/a\nversion: 1.0.0\nrun: [python, x.py]\nsources: [../src]\n";
            let own = "device_sources:\n  cpu: [../src/emulator]\n  gpu: [../clock.py]\n";
            write("stages/ops/a/stage.yaml", &format!("{head}{own}{versions}"));
        };
        manifest("");
        let read = || read_kinds(&folder.path().join("stages/ops")).unwrap();
        let lock = relock(&read(), &Lock::new(), false).unwrap();
        let changed_by = |path: &str| -> Vec<&str> {
            write(path, "# edited");
            let changed = DeviceKind::ALL.into_iter().filter(|device| !read()[0].is_locked_on(*device, &lock));
            let changed = changed.map(DeviceKind::word).collect();
            write(path, "");
            changed
        };
        assert_eq!(changed_by("stages/ops/src/emulator/a.py"), ["cpu"]);
        assert_eq!(changed_by("stages/ops/clock.py"), ["gpu"]);
        assert_eq!(changed_by("stages/ops/src/lib.py"), ["cpu", "gpu"]);

        write("stages/ops/src/emulator/a.py", "# other results");
        let refused = relock(&read(), &lock, false).unwrap_err();
        assert_eq!(refused, "ops/a 1.0.0 (locked: 1.0.0)\n  changed stages/ops/src/emulator/a.py (on cpu alone)\n");
        manifest("device_versions:\n  cpu: 1.0.1\n");
        assert!(read()[0].is_locked_on(DeviceKind::Gpu, &lock), "another version of the other device");
        let raised = relock(&read(), &lock, false).unwrap();
        assert_eq!(DeviceKind::ALL.map(|device| raised["ops/a"].version_on(device)), ["1.0.1", "1.0.0"]);
        assert!(DeviceKind::ALL.into_iter().all(|device| read()[0].is_locked_on(device, &raised)));
        let text = serde_json::to_string(&raised).unwrap();
        assert_eq!(serde_json::from_str::<Lock>(&text).unwrap(), raised);
    }
}
