//! What this machine has: cores, memory, GPUs, the device that measurements belong to, the Python that programs use.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use cuda_agent_protocol::Device;
use cuda_agent_protocol::manifest::{Manifest, Toolchain};
use serde::{Deserialize, Serialize};

/// A machine, as the engine sees it. Tests make one up.
#[derive(Debug)]
pub struct Host {
    /// CPU cores to give out.
    pub cpus: u32,
    /// Bytes of memory to give out.
    pub memory: u64,
    /// GPUs to give out.
    pub gpus: Vec<Gpu>,
    /// The CPU's model, which times measured on it belong to.
    pub cpu_model: String,
    /// The interpreter that `python` stands for in a manifest.
    pub python: PathBuf,
    /// Where answers that take long are kept.
    pub cache: PathBuf,
    versions: Mutex<Option<Versions>>,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
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
        Self {
            cpus,
            memory: memory_limit(),
            gpus: gpus(),
            cpu_model: cpu_model(),
            python: python.map_or_else(find_python, Path::to_owned),
            cache: cache.to_owned(),
            versions: Mutex::new(None),
        }
    }

    /// A made-up machine without GPUs.
    pub fn fake(cpus: u32, cpu_model: &str) -> Self {
        Self {
            cpus,
            memory: 1 << 40,
            gpus: Vec::new(),
            cpu_model: cpu_model.to_owned(),
            python: "python3".into(),
            cache: std::env::temp_dir(),
            versions: Mutex::new(None),
        }
    }

    /// The device that a program with so many GPUs measures on.
    pub fn device(&self, gpus: u32) -> Device {
        match self.gpus.first() {
            Some(gpu) if gpus > 0 => Device::Cuda { model: gpu.model.clone(), driver: gpu.driver.clone() },
            _ => Device::Cpu { model: self.cpu_model.clone() },
        }
    }

    /// Versions that count in the key of a kind.
    pub fn toolchain(&self, manifest: &Manifest) -> Result<BTreeMap<String, String>, ToolchainError> {
        let Toolchain { python: Some(packages) } = &manifest.toolchain else { return Ok(BTreeMap::new()) };
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
        Ok(toolchain)
    }

    /// Asking the interpreter takes a tenth of a second, so its answer is kept until a folder of packages changes.
    fn read_versions(&self) -> Result<Versions, ToolchainError> {
        let file = self.cache.join("python.json");
        let kept: Option<Versions> = std::fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if let Some(kept) = kept
            && kept.interpreter == self.python
            && !kept.stamps.is_empty()
            && kept.stamps.iter().all(|(path, stamp)| modified(path) == Some(*stamp))
        {
            return Ok(kept);
        }
        let versions = self.ask_python()?;
        let _ = std::fs::create_dir_all(&self.cache);
        let _ = std::fs::write(&file, serde_json::to_vec(&versions).expect("versions are plain data"));
        Ok(versions)
    }

    fn ask_python(&self) -> Result<Versions, ToolchainError> {
        const QUESTION: &str = "import json, platform, sys, importlib.metadata as m\n\
            print(json.dumps([platform.python_version(), [p for p in sys.path if p], \
            {d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name']}]))";
        let no_python =
            |message: String| ToolchainError::NoPython { python: self.python.display().to_string(), message };
        let output = std::process::Command::new(&self.python)
            .args(["-I", "-c", QUESTION])
            .output()
            .map_err(|error| no_python(error.to_string()))?;
        if !output.status.success() {
            return Err(no_python(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        let (python, path, packages): (String, Vec<PathBuf>, BTreeMap<String, String>) =
            serde_json::from_slice(&output.stdout).map_err(|error| no_python(error.to_string()))?;
        let mut stamps: BTreeMap<PathBuf, u128> =
            path.into_iter().filter_map(|path| modified(&path).map(|stamp| (path, stamp))).collect();
        if let Some(stamp) = modified(&self.python) {
            stamps.insert(self.python.clone(), stamp);
        }
        let packages = packages.into_iter().map(|(name, version)| (normalized(&name), version)).collect();
        Ok(Versions { interpreter: self.python.clone(), stamps, python, packages })
    }
}

fn modified(path: &Path) -> Option<u128> {
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

/// Asks the driver's own tool; a machine without it has no GPUs for us.
fn gpus() -> Vec<Gpu> {
    if !Path::new("/proc/driver/nvidia/version").exists() && !Path::new("/dev/nvidiactl").exists() {
        return Vec::new();
    }
    let query = ["--query-gpu=name,driver_version", "--format=csv,noheader"];
    let Ok(output) = std::process::Command::new("nvidia-smi").args(query).output() else { return Vec::new() };
    if !output.status.success() {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let parsed = text.lines().filter_map(|line| line.rsplit_once(','));
    parsed.map(|(model, driver)| Gpu { model: model.trim().to_owned(), driver: driver.trim().to_owned() }).collect()
}
