//! The stage kinds that pipelines can name: built in, or folders with a `stage.yaml`.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, LazyLock};

use cuda_agent_protocol::Manifest;
use cuda_agent_protocol::manifest::PerDevice;

use crate::artifact::{ArtifactError, tree};
use crate::digest::Digest;
use crate::key::ProgramIdentity;
use crate::spec::{self, SpecErrors};

/// A stage kind and its program.
#[derive(Clone, Debug)]
pub struct Kind {
    /// Its contract.
    pub manifest: Arc<Manifest>,
    /// What identifies its program, for stages without GPUs and with GPUs.
    pub identity: PerDevice<ProgramIdentity>,
    /// Files of the program that may be executed.
    pub executable: BTreeSet<String>,
    /// Its files.
    pub program: ProgramFiles,
    /// Where its manifest is, for people.
    pub origin: String,
}

impl Kind {
    /// What runs where a stage has so many GPUs, and which of its files may be executed.
    pub fn program_on(&self, gpus: u32) -> (ProgramIdentity, BTreeSet<String>) {
        let identity = self.identity.with_gpus(gpus).clone();
        let executable = match &identity {
            ProgramIdentity::Files(files) => {
                self.executable.iter().filter(|name| files.contains_key(*name)).cloned().collect()
            }
            _ => self.executable.clone(),
        };
        (identity, executable)
    }
}

/// The files of a program. They are put into a folder of their own before it starts, so that a file that was not
/// declared cannot be used.
#[derive(Clone, Debug)]
pub enum ProgramFiles {
    /// None: the binary itself, or a command of the pipeline.
    None,
    /// In the binary.
    Embedded {
        /// Path and content.
        files: &'static [(&'static str, &'static [u8])],
        /// The manifest's folder.
        folder: String,
    },
    /// On disk: relative path and place.
    Disk {
        /// Path in the program's folder and where the file is.
        files: Vec<(String, PathBuf)>,
        /// The manifest's folder.
        folder: String,
    },
}

/// The kinds that a pipeline can name.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    kinds: BTreeMap<String, Entry>,
    /// Executors of the project, beside the local one.
    executors: Vec<String>,
}

/// A kind, loaded when it is first asked for: most commands need few of those that are built in.
#[derive(Clone, Debug)]
struct Entry {
    origin: String,
    kind: Arc<LazyLock<Arc<Kind>, Load>>,
}

type Load = Box<dyn FnOnce() -> Arc<Kind> + Send>;

impl spec::Catalog for Catalog {
    fn get(&self, name: &str) -> Option<Arc<Manifest>> {
        self.kind(name).map(|kind| kind.manifest.clone())
    }

    fn names(&self) -> Vec<String> {
        self.kinds.keys().cloned().collect()
    }

    fn executors(&self) -> Vec<String> {
        std::iter::once(spec::LOCAL.to_owned()).chain(self.executors.iter().cloned()).collect()
    }
}

/// Why a stage kind could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// Its manifest is wrong.
    #[error("{}", .0.render(false))]
    Manifest(SpecErrors),
    /// A file that it needs.
    #[error(transparent)]
    File(#[from] ArtifactError),
    /// Two kinds of one name.
    #[error("two stage kinds are named `{name}`: {first} and {second}")]
    Duplicate {
        /// The name.
        name: String,
        /// Where one is.
        first: String,
        /// Where the other is.
        second: String,
    },
    /// A folder without kinds.
    #[error("{0}: no stage.yaml in this folder or in the folders below it")]
    Empty(String),
}

impl Catalog {
    /// Adds a built-in kind, whose manifest is read when it is first asked for.
    ///
    /// # Panics
    /// When it is asked for and its manifest is wrong or has another name: that is a mistake in this program.
    pub fn add_builtin(
        &mut self,
        name: &str,
        manifest: &'static str,
        origin: String,
        identity: impl FnOnce() -> PerDevice<ProgramIdentity> + Send + 'static,
        program: ProgramFiles,
    ) -> Result<(), CatalogError> {
        let (expected, place) = (name.to_owned(), origin.clone());
        let load = move || {
            let manifest = spec::parse_manifest(manifest, Path::new(&place));
            let manifest = manifest.unwrap_or_else(|errors| panic!("a built-in kind:\n{}", errors.render(false)));
            assert_eq!(manifest.name, expected, "{place}: the name of a built-in kind");
            let (manifest, executable) = (Arc::new(manifest), BTreeSet::new());
            Arc::new(Kind { manifest, identity: identity(), executable, program, origin: place })
        };
        self.add_entry(name.to_owned(), Entry { origin, kind: Arc::new(LazyLock::new(Box::new(load))) })
    }

    /// Names the executors that stages may choose, beside the local one.
    pub fn set_executors(&mut self, names: impl IntoIterator<Item = String>) {
        self.executors = names.into_iter().collect();
    }

    /// Adds a kind.
    pub fn add(&mut self, kind: Kind) -> Result<(), CatalogError> {
        let (name, origin) = (kind.manifest.name.clone(), kind.origin.clone());
        let load: Load = Box::new(move || Arc::new(kind));
        self.add_entry(name, Entry { origin, kind: Arc::new(LazyLock::new(load)) })
    }

    fn add_entry(&mut self, name: String, entry: Entry) -> Result<(), CatalogError> {
        if let Some(other) = self.kinds.get(&name) {
            return Err(CatalogError::Duplicate { name, first: other.origin.clone(), second: entry.origin });
        }
        self.kinds.insert(name, entry);
        Ok(())
    }

    /// Adds every kind in a folder: the folder itself, or folders up to two levels below it.
    pub fn add_folder(&mut self, folder: &Path) -> Result<(), CatalogError> {
        let manifests = find_manifests(folder, 2)?;
        if manifests.is_empty() {
            return Err(CatalogError::Empty(folder.display().to_string()));
        }
        for manifest in manifests {
            let kind = load_folder(&manifest)?;
            self.add(kind)?;
        }
        Ok(())
    }

    /// A kind by name.
    pub fn kind(&self, name: &str) -> Option<&Arc<Kind>> {
        self.kinds.get(name).map(|entry| &**entry.kind)
    }

    /// Every kind, by name.
    pub fn kinds(&self) -> impl Iterator<Item = &Arc<Kind>> {
        self.kinds.values().map(|entry| &**entry.kind)
    }
}

fn find_manifests(folder: &Path, depth: usize) -> Result<Vec<PathBuf>, ArtifactError> {
    let own = folder.join("stage.yaml");
    if own.is_file() {
        return Ok(vec![own]);
    }
    let mut found = Vec::new();
    let mut items: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(ArtifactError::io(folder))?
        .filter_map(|item| item.ok().map(|item| item.path()))
        .filter(|path| path.is_dir())
        .collect();
    items.sort_unstable();
    for item in items.into_iter().filter(|_| depth > 0) {
        found.extend(find_manifests(&item, depth - 1)?);
    }
    Ok(found)
}

fn load_folder(path: &Path) -> Result<Kind, CatalogError> {
    let text = std::fs::read_to_string(path).map_err(ArtifactError::io(path))?;
    let manifest = spec::parse_manifest(&text, path).map_err(CatalogError::Manifest)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut files = BTreeMap::from([("stage.yaml".to_owned(), path.to_owned())]);
    let mut add = |sources: &[String]| -> Result<BTreeSet<PathBuf>, ArtifactError> {
        let listed: Vec<_> = sources.iter().map(|source| source_files(folder, source)).collect::<Result<_, _>>()?;
        let real = listed.iter().flatten().map(|(_, real)| real.clone()).collect();
        files.extend(listed.into_iter().flatten());
        Ok(real)
    };
    add(&manifest.sources)?;
    let own = &manifest.device_sources;
    let own = PerDevice { cpu: add(&own.cpu)?, gpu: add(&own.gpu)? };
    let (files, folder) = rooted(files.into_iter().collect());
    let (digests, executable) = (digests(&files)?, executables(&files)?);
    let without = |elsewhere: &BTreeSet<PathBuf>| {
        let counted = files.iter().filter(|(_, real)| !elsewhere.contains(real));
        ProgramIdentity::Files(counted.map(|(name, _)| (name.clone(), digests[name])).collect())
    };
    let identity = PerDevice { cpu: without(&own.gpu), gpu: without(&own.cpu) };
    let program = ProgramFiles::Disk { files, folder };
    Ok(Kind { manifest: Arc::new(manifest), identity, executable, program, origin: path.display().to_string() })
}

/// What to say of a source or file that is not there.
const NO_SOURCE: &str = "declared under `sources:` or `files:`, but it does not exist";

/// Files of one declared source, by path relative to `folder` (which may start with `..`).
pub fn source_files(folder: &Path, source: &str) -> Result<Vec<(String, PathBuf)>, ArtifactError> {
    let source = &without_detours(source.trim_end_matches('/'));
    if !folder.join(source).exists() {
        let path = folder.join(source);
        return Err(ArtifactError::Malformed { path: path.display().to_string(), message: NO_SOURCE.into() });
    }
    let files = tree::list(&folder.join(source))?.into_iter();
    let named =
        files.map(|(path, real)| (if path.is_empty() { source.to_owned() } else { format!("{source}/{path}") }, real));
    Ok(named.filter(|(path, _)| !path.contains("__pycache__") && !path.ends_with(".pyc")).collect())
}

/// Digests of files by path.
pub fn digests(files: &[(String, PathBuf)]) -> Result<BTreeMap<String, Digest>, ArtifactError> {
    files
        .iter()
        .map(|(path, real)| Ok((path.clone(), Digest::of_file(real).map_err(ArtifactError::io(real))?)))
        .collect()
}

/// Names of files that their owner may execute.
pub fn executables(files: &[(String, PathBuf)]) -> Result<BTreeSet<String>, ArtifactError> {
    let mut executable = BTreeSet::new();
    for (path, real) in files {
        let metadata = std::fs::metadata(real).map_err(ArtifactError::io(real))?;
        if metadata.permissions().mode() & 0o100 != 0 {
            executable.insert(path.clone());
        }
    }
    Ok(executable)
}

/// A path whose `..` all come first: `lib/../../x.py` would name a file outside of where it is copied to.
fn without_detours(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match (part, parts.last()) {
            ("..", Some(last)) if !matches!(*last, "" | "." | "..") => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

/// Sources may lie above the manifest (`../shared/x.py`): moves the root up far enough that no path starts with
/// `..`, and says where the manifest's folder is below it.
fn rooted(files: Vec<(String, PathBuf)>) -> (Vec<(String, PathBuf)>, String) {
    let ups = |path: &str| Path::new(path).components().take_while(|part| *part == Component::ParentDir).count();
    let depth = files.iter().map(|(path, _)| ups(path)).max().unwrap_or(0);
    if depth == 0 {
        return (files, String::new());
    }
    // Names of the folders above are this machine's own; they must not show in identities. A made-up name must not be
    // that of a real folder, whose files would then lie where the kind's own do.
    let is_taken = |name: &str| files.iter().any(|(path, _)| path.split('/').any(|part| part == name));
    let made_up = |number: usize| {
        let mut name = format!("folder{number}");
        while is_taken(&name) {
            name.push('_');
        }
        name
    };
    let folder: Vec<String> = (0..depth).map(|level| made_up(depth - level)).collect();
    let place = |path: &str| {
        let up = ups(path);
        let kept: Vec<&str> = folder[..depth - up].iter().map(String::as_str).collect();
        let rest: PathBuf = Path::new(path).components().skip(up).collect();
        let prefix = if kept.is_empty() { String::new() } else { format!("{}/", kept.join("/")) };
        format!("{prefix}{}", rest.display())
    };
    let placed = files.iter().map(|(path, real)| (place(path), real.clone())).collect();
    (placed, folder.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_above_the_manifest_keep_their_relation() {
        let files = ["stage.yaml", "main.py", "../shared/x.py", "../../y.py"];
        let files = files.iter().map(|path| ((*path).to_owned(), PathBuf::from(path))).collect();
        let (files, folder) = rooted(files);
        let paths: Vec<&str> = files.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(folder, "folder2/folder1");
        assert_eq!(paths, ["folder2/folder1/stage.yaml", "folder2/folder1/main.py", "folder2/shared/x.py", "y.py"]);
    }

    fn names(folder: &Path) -> BTreeMap<String, String> {
        let kind = load_folder(&folder.join("stage.yaml")).unwrap();
        let ProgramFiles::Disk { files, .. } = kind.program else { panic!("a folder's files are on disk") };
        files.into_iter().map(|(name, real)| (name, std::fs::read_to_string(real).unwrap())).collect()
    }

    fn kind(folder: &Path, sources: &str, files: &[(&str, &str)]) {
        let manifest = format!(
            "name: x/y\nversion: 1.0.0\nsummary: x\noutputs: {{ out: {{ type: tree }} }}\nrun: [x]\nsources: {sources}\n"
        );
        for (path, text) in files.iter().chain([&("own/stage.yaml", manifest.as_str())]) {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    /// A file of one device's alone counts, and is there, for stages on that device.
    #[test]
    fn an_edit_of_one_devices_file_changes_what_runs_there() {
        let folder = tempfile::tempdir().unwrap();
        let lists = "[../src]\ndevice_sources: { cpu: [../src/emulator], gpu: [../src/clock.py] }";
        let files = [("src/all.py", ""), ("src/emulator/a.py", ""), ("src/clock.py", "")];
        kind(folder.path(), lists, &files);
        let programs = || {
            let kind = load_folder(&folder.path().join("own/stage.yaml")).unwrap();
            [0, 1].map(|gpus| kind.program_on(gpus))
        };
        let [cpu, gpu] = programs();
        let names = |(program, _): &(ProgramIdentity, BTreeSet<String>)| match program {
            ProgramIdentity::Files(files) => files.keys().cloned().collect::<Vec<_>>().join(" "),
            other => panic!("{other:?}"),
        };
        assert_eq!(names(&cpu), "folder1/stage.yaml src/all.py src/emulator/a.py");
        assert_eq!(names(&gpu), "folder1/stage.yaml src/all.py src/clock.py");
        let changed_by = |path: &str| {
            let path = folder.path().join(path);
            std::fs::write(&path, "edited").unwrap();
            let changed = programs();
            std::fs::write(&path, "").unwrap();
            [changed[0] != cpu, changed[1] != gpu]
        };
        assert_eq!(changed_by("src/emulator/a.py"), [true, false]);
        assert_eq!(changed_by("src/clock.py"), [false, true]);
        assert_eq!(changed_by("src/all.py"), [true, true]);
        let emulator = folder.path().join("src/emulator/a.py");
        std::fs::set_permissions(emulator, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!([programs()[0] != cpu, programs()[1] != gpu], [true, false]);
    }

    #[test]
    fn a_real_folder_with_a_made_up_name_takes_no_place_of_the_kinds_own() {
        let folder = tempfile::tempdir().unwrap();
        let files = [("own/helper.py", "own"), ("folder1/helper.py", "other"), ("folder1_/x.py", "x")];
        kind(folder.path(), "[helper.py, ../folder1/helper.py, ../folder1_/x.py]", &files);
        let names = names(&folder.path().join("own"));
        assert_eq!(names["folder1__/helper.py"], "own");
        assert_eq!(names["folder1/helper.py"], "other");
        assert_eq!(names.len(), 4);
    }

    #[test]
    fn a_detour_through_a_folder_leads_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        kind(
            folder.path(),
            "[lib/../../above.py, lib/../x.py]",
            &[("above.py", "above"), ("own/x.py", "x"), ("own/lib/z", "")],
        );
        let names: Vec<String> = names(&folder.path().join("own")).into_keys().collect();
        assert_eq!(names, ["above.py", "folder1/stage.yaml", "folder1/x.py"]);
        for path in ["x", "./x", "../x", "../../a/b", "a/b/", ""] {
            assert_eq!(without_detours(path), path, "left as it is, since names count in keys");
        }
    }

    #[test]
    fn the_executable_bit_of_a_source_is_known() {
        let folder = tempfile::tempdir().unwrap();
        kind(folder.path(), "[a.sh, b.sh]", &[("own/a.sh", ""), ("own/b.sh", "")]);
        let path = folder.path().join("own/b.sh");
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o744)).unwrap();
        let kind = load_folder(&folder.path().join("own/stage.yaml")).unwrap();
        assert_eq!(kind.executable, BTreeSet::from(["b.sh".to_owned()]));
    }
}
