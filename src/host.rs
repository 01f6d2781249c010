//! What this machine has: cores, memory, GPUs, the device that measurements belong to, the Python that programs use.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;

use cuda_agent_protocol::manifest::{Determinism, Manifest, Toolchain};
use cuda_agent_protocol::{Device, ResourceGrant};
use serde::{Deserialize, Serialize};

use crate::spec::{self, Stage};

/// A machine, as the engine sees it. Tests make one up.
#[derive(Debug)]
pub struct Host {
    /// CPU cores to give out.
    pub cpus: u32,
    /// Bytes of memory to give out.
    pub memory: u64,
    /// GPUs to give out, all of one model.
    pub gpus: Vec<Gpu>,
    /// GPUs that are not given out since they are of another model than the first.
    pub ignored_gpus: usize,
    /// The CPU's model, which times measured on it belong to.
    pub cpu_model: String,
    /// The interpreter that `python` stands for in a manifest.
    pub python: PathBuf,
    /// Where answers that take long are kept.
    pub cache: PathBuf,
    /// Executors of the project beside this machine, by name.
    pub executors: BTreeMap<String, spec::Executor>,
    /// The executor of stages that name none; this machine where it isn't given.
    pub executor: Option<String>,
    /// Whether this machine executes all stages itself, though their keys are as their executors make them.
    pub is_alone: bool,
    versions: Mutex<Option<Versions>>,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its UUID: numbers mean another GPU to each tool and in each container, this never does.
    pub id: String,
    /// As the driver names it.
    pub model: String,
    /// The driver's version.
    pub driver: String,
}

/// Versions of Python and its packages, and the sign that they are still true.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Versions {
    interpreter: PathBuf,
    stamps: BTreeMap<PathBuf, u128>,
    python: String,
    packages: BTreeMap<String, String>,
}

/// Why versions could not be told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolchainError {
    /// No interpreter.
    #[error("{python} cannot be started: {message}")]
    NoPython {
        /// What was tried.
        python: String,
        /// What the system said.
        message: String,
    },
    /// A package that a stage kind needs.
    #[error("the Python package `{package}` is not installed for {python}")]
    NoPackage {
        /// The package.
        package: String,
        /// The interpreter.
        python: String,
    },
}

impl Host {
    /// Looks at the real machine. `python` is the project's choice; otherwise a virtual environment in use, one in the
    /// folder, or the `python3` on the PATH.
    pub fn detect(python: Option<&Path>, cache: &Path) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let (gpus, ignored_gpus) = of_one_model(gpus());
        let python = python.map_or_else(find_python, Path::to_owned);
        Self {
            cpus,
            memory: memory_limit(),
            gpus,
            ignored_gpus,
            cpu_model: cpu_model(),
            python: located(&python, &std::env::var_os("PATH").unwrap_or_default()),
            cache: cache.to_owned(),
            executors: BTreeMap::new(),
            executor: None,
            is_alone: false,
            versions: Mutex::new(None),
        }
    }

    /// A made-up machine without GPUs.
    pub fn fake(cpus: u32, cpu_model: &str) -> Self {
        Self {
            cpus,
            memory: 1 << 40,
            gpus: Vec::new(),
            ignored_gpus: 0,
            cpu_model: cpu_model.to_owned(),
            python: "python3".into(),
            cache: std::env::temp_dir(),
            executors: BTreeMap::new(),
            executor: None,
            is_alone: false,
            versions: Mutex::new(None),
        }
    }

    /// The same, with the project's other executors, and the one for stages that name none.
    pub fn with_executors(self, executors: BTreeMap<String, spec::Executor>, executor: Option<String>) -> Self {
        Self { executors, executor, ..self }
    }

    /// The same, executing everything itself.
    pub fn alone(self) -> Self {
        Self { is_alone: true, ..self }
    }

    /// The device that a program with `gpus` GPUs measures on.
    pub fn device(&self, gpus: u32) -> Device {
        match self.gpus.first() {
            Some(gpu) if gpus > 0 => Device::Cuda { model: gpu.model.clone(), driver: gpu.driver.clone() },
            // What was measured on a CPU is no answer to who asks for a GPU.
            None if gpus > 0 => Device::Cuda { model: "none".into(), driver: "none".into() },
            _ => Device::Cpu { model: self.cpu_model.clone() },
        }
    }

    /// The executor of a stage and its name; `None` where that is this machine.
    pub fn executor_of(&self, stage: &Stage) -> Option<(&str, &spec::Executor)> {
        let name = stage.executor.as_ref().or(self.executor.as_ref())?;
        self.executors.get_key_value(name).map(|(name, executor)| (name.as_str(), executor))
    }

    /// The device that a stage measures on, wherever it is executed; the executor's name where that declares none.
    pub fn device_of(&self, stage: &Stage) -> Result<Device, String> {
        let gpus = stage.resources.gpu;
        let Some((name, executor)) = self.executor_of(stage) else { return Ok(self.device(gpus)) };
        let spec::DeviceNames { gpu, driver, cpu } = executor.device.clone();
        match gpu.zip(driver).filter(|_| gpus > 0) {
            Some((model, driver)) => Ok(Device::Cuda { model, driver }),
            None if gpus > 0 => Ok(Device::Cuda { model: "none".into(), driver: "none".into() }),
            None => cpu.map(|model| Device::Cpu { model }).ok_or_else(|| name.to_owned()),
        }
    }

    /// Whether this machine could make the result of a stage itself, whichever executor it has.
    pub fn stands_in_for(&self, stage: &Stage) -> bool {
        let gpus = stage.resources.gpu;
        let measured = stage.kind.determinism == Determinism::Measured;
        self.executor_of(stage).is_none()
            || gpus as usize <= self.gpus.len() && (!measured || self.device_of(stage) == Ok(self.device(gpus)))
    }

    /// The part of this machine that was granted to a stage. It knows no other executors.
    pub fn part(&self, grant: &ResourceGrant) -> Self {
        let gpus = grant.gpus.iter().filter_map(|gpu| self.gpus.get(*gpu as usize).cloned());
        Self {
            cpus: grant.cpu,
            memory: grant.memory_bytes,
            gpus: gpus.collect(),
            ignored_gpus: 0,
            cpu_model: self.cpu_model.clone(),
            python: self.python.clone(),
            cache: self.cache.clone(),
            executors: BTreeMap::new(),
            executor: None,
            is_alone: false,
            versions: Mutex::new(self.versions.lock().expect("no panic happens under this lock").clone()),
        }
    }

    /// Versions that count in the key of a kind.
    pub fn toolchain(&self, manifest: &Manifest) -> Result<BTreeMap<String, String>, ToolchainError> {
        let Toolchain { python: Some(packages), python_if_installed } = &manifest.toolchain else {
            return Ok(BTreeMap::new());
        };
        let mut held = self.versions.lock().expect("no panic happens under this lock");
        if held.is_none() {
            *held = Some(self.read_versions()?);
        }
        let versions = held.as_ref().expect("just filled");
        let mut toolchain = BTreeMap::from([("python".to_owned(), versions.python.clone())]);
        for package in packages {
            let version = versions.packages.get(&normalized(package)).ok_or_else(|| ToolchainError::NoPackage {
                package: package.clone(),
                python: self.python.display().to_string(),
            })?;
            toolchain.insert(package.clone(), version.clone());
        }
        let version = |package: &String| Some((package.clone(), versions.packages.get(&normalized(package))?.clone()));
        toolchain.extend(python_if_installed.iter().filter_map(version));
        Ok(toolchain)
    }

    /// Asking the interpreter takes a tenth of a second, so its answer is kept until a folder of packages changes.
    fn read_versions(&self) -> Result<Versions, ToolchainError> {
        let file = self.cache.join("interpreter.json");
        let kept: Option<Versions> = std::fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if let Some(kept) = kept
            && kept.interpreter == self.python
            // Without a stamp of the interpreter itself, nothing would tell that it was replaced.
            && kept.stamps.contains_key(&self.python)
            && kept.stamps.iter().all(|(path, stamp)| modified(path) == Some(*stamp))
        {
            return Ok(kept);
        }
        let versions = self.ask_python()?;
        // Only the cache itself is made: a command that just looks leaves no `.cuda-agent` behind.
        let _ = std::fs::create_dir(&self.cache);
        let _ = std::fs::write(&file, serde_json::to_vec(&versions).expect("versions are plain data"));
        Ok(versions)
    }

    fn ask_python(&self) -> Result<Versions, ToolchainError> {
        const QUESTION: &str = "import json, platform, sys, importlib.metadata as m\n\
            print(json.dumps([platform.python_version(), [p for p in sys.path if p], \
            [[d.metadata['Name'], d.version or ''] for d in m.distributions() if d.metadata['Name']]]))";
        let no_python =
            |message: String| ToolchainError::NoPython { python: self.python.display().to_string(), message };
        let output = std::process::Command::new(&self.python)
            .args(["-I", "-c", QUESTION])
            .output()
            .map_err(|error| no_python(error.to_string()))?;
        if !output.status.success() {
            return Err(no_python(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        let (python, path, found): (String, Vec<PathBuf>, Vec<(String, String)>) =
            serde_json::from_slice(&output.stdout).map_err(|error| no_python(error.to_string()))?;
        let mut stamps: BTreeMap<PathBuf, u128> =
            path.into_iter().filter_map(|path| modified(&path).map(|stamp| (path, stamp))).collect();
        if let Some(stamp) = modified(&self.python) {
            stamps.insert(self.python.clone(), stamp);
        }
        let mut packages = BTreeMap::new();
        for (name, version) in found {
            // A package may be installed in several places of the path: the first one is what Python imports.
            packages.entry(normalized(&name)).or_insert(version);
        }
        Ok(Versions { interpreter: self.python.clone(), stamps, python, packages })
    }
}

pub(crate) fn modified(path: &Path) -> Option<u128> {
    let modified = std::fs::metadata(path).ok()?.modified().ok()?;
    Some(modified.duration_since(std::time::UNIX_EPOCH).ok()?.as_nanos())
}

/// Package names compare as PyPI compares them.
fn normalized(package: &str) -> String {
    package.to_lowercase().replace(['_', '.'], "-")
}

fn find_python() -> PathBuf {
    let in_use = std::env::var_os("VIRTUAL_ENV").map(|folder| PathBuf::from(folder).join("bin/python"));
    let beside = std::env::current_dir().map(|folder| folder.join(".venv/bin/python")).ok();
    let found = in_use.into_iter().chain(beside).find(|python| python.is_file());
    found.unwrap_or_else(|| "python3".into())
}

/// Whether a program is named by its bare name, to be found on the PATH.
pub fn is_bare(program: &Path) -> bool {
    let mut components = program.components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
}

/// Where a program is: programs start in folders of their own, and what was learned of an interpreter is kept under
/// its path. Links are left as they are, since a virtual environment's interpreter is one. A bare name that is nowhere
/// on `search` stays, so that starting it tells what is wrong.
pub(crate) fn located(program: &Path, search: &OsStr) -> PathBuf {
    let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
    if !is_bare(program) {
        return absolute(program.to_owned());
    }
    let executable = |path: &PathBuf| {
        std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    let found = std::env::split_paths(search).map(|folder| absolute(folder.join(program))).find(executable);
    found.unwrap_or_else(|| program.to_owned())
}

/// What `/proc/meminfo` says, or less where a control group allows less.
fn memory_limit() -> u64 {
    let total = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .map_or(u64::MAX, |kib| kib * 1024);
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|text| text.trim().parse().ok());
    group.map_or(total, |limit: u64| limit.min(total))
}

fn cpu_model() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = text.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    named.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, model)| model.trim().to_owned())
}

/// Asks the driver's own tool (`CUDA_AGENT_NVIDIA_SMI` says where it is); a machine without it has no GPUs for us. Of what it lists, the engine may use what
/// whoever started it allows (a batch system says so in CUDA_VISIBLE_DEVICES).
fn gpus() -> Vec<Gpu> {
    let tool = std::env::var_os("CUDA_AGENT_NVIDIA_SMI");
    let has_driver = || ["/proc/driver/nvidia/version", "/dev/nvidiactl"].iter().any(|path| Path::new(path).exists());
    if tool.is_none() && !has_driver() {
        return Vec::new();
    }
    let tool = tool.unwrap_or_else(|| "nvidia-smi".into());
    let query = ["--query-gpu=uuid,name,driver_version", "--format=csv,noheader"];
    let Ok(output) = std::process::Command::new(tool).args(query).output() else { return Vec::new() };
    if !output.status.success() {
        return Vec::new();
    }
    let allowed = std::env::var_os("CUDA_VISIBLE_DEVICES");
    visible(listed(&String::from_utf8_lossy(&output.stdout)), allowed.map(|list| list.to_string_lossy().into_owned()))
}

/// The GPUs of a listing, one a line: UUID, name, driver version.
fn listed(listing: &str) -> Vec<Gpu> {
    let lines = listing.lines().filter_map(|line| {
        let (id, rest) = line.split_once(',')?;
        let (model, driver) = rest.rsplit_once(',')?;
        let [id, model, driver] = [id, model, driver].map(|field| field.trim().to_owned());
        id.starts_with("GPU-").then_some(Gpu { id, model, driver })
    });
    lines.collect()
}

/// The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, read as CUDA reads it: numbers, or beginnings of UUIDs
/// that fit one GPU, up to the first entry that fits none. An empty list leaves none.
fn visible(gpus: Vec<Gpu>, allowed: Option<String>) -> Vec<Gpu> {
    let Some(allowed) = allowed else { return gpus };
    let find = |entry: &str| {
        if let Ok(index) = entry.parse::<usize>() {
            return gpus.get(index);
        }
        let mut fitting = gpus.iter().filter(|gpu| entry.starts_with("GPU-") && gpu.id.starts_with(entry));
        fitting.next().filter(|_| fitting.next().is_none())
    };
    let mut left: Vec<Gpu> = Vec::new();
    for gpu in allowed.split(',').map_while(|entry| find(entry.trim())) {
        // One named twice is still one.
        if !left.contains(gpu) {
            left.push(gpu.clone());
        }
    }
    left
}

/// The GPUs of the first one's model, and how many others there are. Times are kept under the model that they were
/// measured on, and a program gets whichever GPU is free, so only equal ones may be given out.
fn of_one_model(gpus: Vec<Gpu>) -> (Vec<Gpu>, usize) {
    let Some(model) = gpus.first().map(|gpu| gpu.model.clone()) else { return (gpus, 0) };
    let (equal, others): (Vec<Gpu>, Vec<Gpu>) = gpus.into_iter().partition(|gpu| gpu.model == model);
    (equal, others.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const LISTING: &str = "GPU-1a2b0000-0000-0000-0000-000000000001, NVIDIA H200, 550.54.15\n\
        GPU-1a2c0000-0000-0000-0000-000000000002, NVIDIA RTX 6000 Ada, 48GB, 550.54.15\n\
        GPU-ffff0000-0000-0000-0000-000000000003, NVIDIA H200, 550.54.15\n";

    fn names(gpus: &[Gpu]) -> Vec<&str> {
        gpus.iter().map(|gpu| &gpu.id[4..8]).collect()
    }

    #[test]
    fn a_listing_is_read() {
        let gpus = listed(LISTING);
        assert_eq!(names(&gpus), ["1a2b", "1a2c", "ffff"]);
        assert_eq!(gpus[0].id, "GPU-1a2b0000-0000-0000-0000-000000000001");
        assert_eq!((gpus[0].model.as_str(), gpus[0].driver.as_str()), ("NVIDIA H200", "550.54.15"));
        assert_eq!(gpus[1].model, "NVIDIA RTX 6000 Ada, 48GB");
        assert!(listed("No devices were found\n").is_empty());
        assert!(listed("").is_empty());
    }

    #[test]
    fn only_gpus_that_the_engine_may_use_are_given_out() {
        let left = |allowed: &str| -> String { names(&visible(listed(LISTING), Some(allowed.into()))).join(" ") };
        assert_eq!(visible(listed(LISTING), None), listed(LISTING));
        assert_eq!(left(""), "");
        assert_eq!(left("NoDevFiles"), "");
        assert_eq!(left("2,0"), "ffff 1a2b");
        assert_eq!(left(" 1 , GPU-f"), "1a2c ffff");
        assert_eq!(left("1,1,2"), "1a2c ffff");
        // What fits nothing, or more than one, ends the list.
        assert_eq!(left("0,-1,2"), "1a2b");
        assert_eq!(left("0,7,2"), "1a2b");
        assert_eq!(left("GPU-1a2,0"), "");
        assert_eq!(left("GPU-1a2c,0"), "1a2c 1a2b");
    }

    #[test]
    fn gpus_of_another_model_than_the_first_are_ignored() {
        let (equal, ignored) = of_one_model(listed(LISTING));
        assert_eq!((names(&equal), ignored), (vec!["1a2b", "ffff"], 1));
        // The model measured on is that of the first one that may be used.
        let (equal, ignored) = of_one_model(visible(listed(LISTING), Some("1,2,0".into())));
        assert_eq!((names(&equal), ignored), (vec!["1a2c"], 2));
        let host = Host { gpus: equal, ..Host::fake(1, "cpu") };
        assert!(matches!(host.device(1), Device::Cuda { model, .. } if model.contains("RTX 6000")));
        assert_eq!(of_one_model(Vec::new()), (Vec::new(), 0));
    }

    /// A folder with an interpreter that says it is of this version, and is as old as that.
    fn interpreter(folder: &Path, version: u64) -> PathBuf {
        let python = folder.join("python3");
        std::fs::create_dir_all(folder).unwrap();
        let answer =
            format!("#!/bin/sh\necho '[\"{version}\", [], [[\"torch\", \"{version}\"], [\"Torch\", \"0\"]]]'\n");
        // Another process writes it: a file that this one had open for writing might still be so in a child that
        // another test is starting, and could not be executed.
        let write = "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\"";
        let written = std::process::Command::new("sh").args(["-c", write]).arg(&python).arg(answer).status().unwrap();
        assert!(written.success());
        let age = std::time::UNIX_EPOCH + std::time::Duration::from_secs(version);
        std::fs::File::open(&python).unwrap().set_modified(age).unwrap();
        python
    }

    #[test]
    fn an_interpreter_is_found_on_the_path_and_its_links_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let real = interpreter(&folder.path().join("real"), 3);
        let (plain, venv) = (folder.path().join("plain"), folder.path().join("venv"));
        for made in [&plain, &venv] {
            std::fs::create_dir(made).unwrap();
        }
        // What cannot be executed is passed over, as the shell does.
        std::fs::write(plain.join("python3"), "").unwrap();
        symlink(&real, venv.join("python3")).unwrap();
        let search = std::env::join_paths([&plain, &venv, &folder.path().join("real")]).unwrap();
        let bare = Path::new("python3");
        assert_eq!(located(bare, &search), venv.join("python3"));
        assert_eq!(located(bare, plain.as_os_str()), bare);
        assert_eq!(located(&real, &search), real);
        assert!(located(Path::new("./python3"), &search).is_absolute());
        assert!(is_bare(bare) && !is_bare(Path::new("./python3")) && !is_bare(&real));
    }

    #[test]
    fn kept_versions_are_those_of_the_interpreter_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let manifest: Manifest = serde_json::from_value(serde_json::json!({
            "name": "x/y", "version": "1", "summary": "", "outputs": {}, "run": ["python"],
            "toolchain": { "python": ["torch"], "python_if_installed": ["nvcc"] },
        }))
        .unwrap();
        let version = |python: &Path| {
            let search = python.parent().unwrap().as_os_str();
            let python = located(Path::new("python3"), search);
            let host = Host { python, cache: folder.path().join("cache"), ..Host::fake(1, "cpu") };
            let toolchain = host.toolchain(&manifest).unwrap();
            assert_eq!(toolchain.keys().collect::<Vec<_>>(), ["python", "torch"], "nvcc is not installed there");
            toolchain["torch"].clone()
        };
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        let (old, new) = (interpreter(&old, 1), interpreter(&new, 2));
        assert_eq!(version(&old), "1");
        assert_eq!(version(&new), "2", "another PATH is another interpreter");
        interpreter(new.parent().unwrap(), 3);
        assert_eq!(version(&new), "3", "the interpreter was replaced");
        assert!(folder.path().join("cache/interpreter.json").exists());
    }

    #[test]
    fn asking_makes_no_folders_above_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let python = interpreter(&folder.path().join("bin"), 1);
        let cache = folder.path().join("none/cache");
        let host = Host { python, cache, ..Host::fake(1, "cpu") };
        assert_eq!(host.read_versions().unwrap().python, "1");
        assert!(!folder.path().join("none").exists());
    }
}
