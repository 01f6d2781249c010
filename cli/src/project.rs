//! Where a command works: the project file, the store, the stage kinds, the pipeline.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cuda_agent_engine::Folders;
use cuda_agent_engine::catalog::Catalog;
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::execute::oldest_live;
use cuda_agent_engine::host::{self, Host};
use cuda_agent_engine::spec::{self, Pipeline};
use cuda_agent_engine::store::ahead::Ahead;
use cuda_agent_engine::store::remote::{self, RemoteOptions};
use cuda_agent_engine::store::share::Probe;
use cuda_agent_engine::store::tier::Tier;
use cuda_agent_engine::store::{LAYOUT, Store, StoreError};

use crate::waiting::Waiting;
use crate::{Builtins, CliError, Common, Machine};

/// The name of a project file.
const PROJECT_FILE: &str = "cuda-agent.yaml";
/// How much of a shared store is kept here where `local_max:` does not say.
const LOCAL_MAX: u64 = 100_000_000_000;
/// The folder of what is local.
const LOCAL: &str = ".cuda-agent";

/// What a command has to work with.
pub struct Project {
    /// Options of every command.
    pub common: Common,
    /// Local folders.
    pub folders: Folders,
    /// Stage kinds.
    pub catalog: Catalog,
    /// Whether the shared store answers.
    pub waiting: Waiting,
    root: PathBuf,
    settings: spec::Project,
    folder: PathBuf,
}

impl Project {
    /// Finds the project file here or above, and loads the stage kinds.
    pub fn open(common: &Common, builtins: &Builtins) -> Result<Self, CliError> {
        let here =
            std::env::current_dir().map_err(|error| CliError::environment(format!("current folder: {error}")))?;
        let found = here.ancestors().map(|folder| folder.join(PROJECT_FILE)).find(|file| file.is_file());
        let settings = match &found {
            Some(file) => spec::parse_project(&read(file)?, &shown(file, &here))?,
            None => spec::Project::default(),
        };
        let folder = found.as_deref().and_then(Path::parent).unwrap_or(&here).to_owned();
        let root = folder.join(settings.work.clone().unwrap_or_else(|| LOCAL.into()));
        let folders = Folders { work: root.join("work"), state: root.join("state"), cache: root.join("cache") };
        let mut catalog = Catalog::default();
        (builtins.add)(&mut catalog)?;
        for stages in &settings.stages {
            let path = folder.join(stages);
            if !path.is_dir() {
                return Err(CliError::usage(format!("{}: there is no such folder", path.display()))
                    .with_hint("`stages:` of cuda-agent.yaml names it; paths there start at the folder of that file"));
            }
            catalog.add_folder(&path)?;
        }
        catalog.set_executors(settings.executors.keys().cloned());
        let waiting = Waiting::default();
        Ok(Self { common: common.clone(), folders, catalog, waiting, root, settings, folder })
    }

    fn store_url(&self) -> Option<&str> {
        self.common.store.as_deref().or(self.settings.store.as_deref())
    }

    /// What the shared store is called, as far as that can be said without a password.
    pub fn store_name(&self) -> String {
        let url = self.store_url().filter(|url| remote::is_remote(url));
        url.and_then(|url| remote::shown(url).ok()).unwrap_or_else(|| "the store".to_owned())
    }

    /// The store. Opening a folder makes it, so commands that only look call [`Project::existing_store`].
    pub fn store(&self) -> Result<Store, CliError> {
        self.make_root()?;
        Ok(match self.store_url() {
            Some(url) if remote::is_remote(url) => self.two_tiers(url)?,
            Some(url) => Store::open(url)?,
            None => Store::open_folder(&self.root)?,
        })
    }

    /// Begins to look up what the last run here had, while its pipeline is read: worth it where that takes long. Nothing is
    /// made for it.
    pub fn look_ahead(&self, pipeline: &Path) -> Option<Arc<Ahead>> {
        const LONG: u64 = 64 * 1024;
        std::fs::metadata(pipeline).ok().filter(|metadata| metadata.len() >= LONG)?;
        let folder = match self.store_url() {
            Some(url) => store_folder(url)?,
            None => &self.root,
        };
        folder.join(LAYOUT).join("runs").is_dir().then(|| self.existing_store().ok())?.and_then(|s| Ahead::begin(&s))
    }

    /// Makes the local folder, which git ignores from then on: it holds nothing to commit.
    fn make_root(&self) -> Result<(), CliError> {
        if self.root.exists() {
            return Ok(());
        }
        let made = std::fs::create_dir_all(&self.root).and_then(|()| {
            std::fs::write(self.root.join(".gitignore"), "# Made by cuda-agent: results and caches.\n*\n")
        });
        made.map_err(|error| {
            CliError::environment(format!("{}: {error}", self.root.display()))
                .with_hint("results and caches go there; `work:` in cuda-agent.yaml names another folder")
        })
    }

    /// A shared store with this machine's folder in front of it.
    fn two_tiers(&self, url: &str) -> Result<Store, CliError> {
        self.make_root()?;
        let options = RemoteOptions {
            endpoint: self.settings.endpoint.clone(),
            region: self.settings.region.clone(),
            single_writer: self.settings.single_writer,
            pulse: self.waiting.pulse.clone(),
        };
        let local = Tier::folder_at(&self.root)?;
        if self.common.offline {
            // Without credentials, too.
            return Ok(Store::offline(local, &remote::shown(url)?));
        }
        let opened = remote::open(url, &options)?;
        let remote = Tier::over(opened.backend, &opened.url);
        let remote = if options.single_writer { remote.for_single_writer() } else { remote };
        Ok(match self.common.read_only || self.settings.read_only {
            true => Store::read_only(local, remote, &self.folders.cache),
            false => Store::tiered(local, remote, &self.folders.cache),
        })
    }

    /// The store, for commands that write. A shared one is asked at its first use whether it keeps what is there: two writers
    /// could both believe they won where it does not.
    pub async fn shared_store(&self) -> Result<Store, CliError> {
        let store = self.store()?;
        self.require_writable(&store).await?;
        Ok(store)
    }

    /// What was made here is shared, or it is said that it is not.
    pub fn require_shared(&self, store: &Store) -> Result<(), CliError> {
        let unshared = store.unshared();
        let Some(why) = unshared.values().next() else { return Ok(()) };
        Err(CliError::environment(format!("{} results are on this machine only: {why}", unshared.len()))
            .with_hint(after_mending(why, "the next run shares them, and so does `cuda-agent push`")))
    }

    /// For commands that are about writing to the store.
    pub fn refuse_read_only(&self, store: &Store) -> Result<(), CliError> {
        match store.is_read_only() {
            true => Err(CliError::usage("this writes to the shared store, which is to be read only")
                .with_hint("leave out --read-only, or `read_only:` in cuda-agent.yaml")),
            false => Ok(()),
        }
    }

    /// A shared store is asked at its first use whether it keeps what is there.
    pub async fn require_writable(&self, store: &Store) -> Result<(), CliError> {
        const TRUSTED: Duration = Duration::from_secs(7 * 24 * 3600);
        if !store.shares_results() {
            return Ok(());
        }
        // Others' credentials may allow less.
        let who = remote::who();
        let name = Digest::of_bytes(format!("{}\n{who}", store.url()).as_bytes()).to_string();
        let mark = self.folders.cache.join(format!("probed-{}", &name[..8]));
        let probed = std::fs::metadata(&mark).and_then(|metadata| metadata.modified());
        let is_recent = probed.is_ok_and(|time| time.elapsed().is_ok_and(|age| age < TRUSTED));
        // Another store at the same address is another server, perhaps.
        let is_same = is_recent && std::fs::read_to_string(&mark).ok().as_deref() == store.remote_id().await?;
        if self.settings.single_writer || is_same {
            return Ok(());
        }
        match store.probe().await {
            Ok(Probe::Keeps) => {
                let _ = std::fs::create_dir_all(&self.folders.cache);
                let _ = std::fs::write(&mark, store.remote_id().await?.unwrap_or_default());
                Ok(())
            }
            Ok(Probe::Overwrites) => Err(overwrites(store.url())),
            Err(error) => Err(not_writable(error)),
        }
    }

    /// Makes room on this machine: what is in the shared store too need not all be kept here.
    pub async fn evict(&self, store: &Store) -> Result<(), CliError> {
        // Where nothing went or came, nothing has grown.
        if store.traffic().is_none() {
            return Ok(());
        }
        store.write_known();
        let limit = self.settings.local_max.unwrap_or(LOCAL_MAX);
        let since = oldest_live(&self.folders.work).unwrap_or_else(SystemTime::now);
        store.evict(limit, since).await?;
        Ok(())
    }

    /// The store, for commands that only look: nothing is made. One that somebody named must be there; the default one
    /// is empty before the first run.
    pub fn existing_store(&self) -> Result<Store, CliError> {
        if let Some(url) = self.store_url() {
            return match store_folder(url) {
                None if remote::is_remote(url) => self.two_tiers(url),
                Some(folder) if !folder.exists() && !Store::is_mistyped(url) => {
                    Err(CliError::environment(format!("there is no store at {url}"))
                        .with_hint("check the address; `cuda-agent run` makes a store where there is none"))
                }
                _ => Ok(Store::open(url)?),
            };
        }
        if self.root.exists() {
            return Ok(Store::open_folder(&self.root)?);
        }
        let url = format!("file://{}", self.root.display());
        Ok(Store::over(Arc::new(object_store::memory::InMemory::new()), &url))
    }

    /// This machine.
    pub fn host(&self) -> Host {
        let python = std::env::var_os("CUDA_AGENT_PYTHON").map(PathBuf::from);
        // A bare name in the project file is looked for on the PATH; other paths start at the file's folder.
        let configured = |python: &PathBuf| match host::is_bare(python) {
            true => python.clone(),
            false => self.folder.join(python),
        };
        let python = python.or_else(|| self.settings.python.as_ref().map(configured));
        let host = Host::detect(python.as_deref(), &self.folders.cache);
        host.with_executors(self.settings.executors.clone(), self.settings.executor.clone())
    }

    /// The same, as a stage crate's command is told.
    pub fn machine(&self) -> Machine {
        let host = self.host();
        Machine {
            python: host.python,
            gpus: host.gpus.into_iter().map(|gpu| gpu.id).collect(),
            cores: host.cpus as usize,
            cache: self.folders.cache.clone(),
            json: self.common.json,
        }
    }

    /// Splits `run [PIPELINE] [STAGE…]`: the first word is a pipeline where it is a file, or looks like one.
    pub fn targets(&self, words: &[String]) -> Result<(PathBuf, Vec<String>), CliError> {
        if let Some(file) = &self.common.pipeline {
            return Ok((file.clone(), words.to_vec()));
        }
        if let Some((first, rest)) = words.split_first()
            && (first.ends_with(".yaml") || first.ends_with(".yml"))
        {
            return Ok((first.into(), rest.to_vec()));
        }
        Ok((self.default_pipeline()?, words.to_vec()))
    }

    /// The pipeline where none is named.
    pub fn default_pipeline(&self) -> Result<PathBuf, CliError> {
        if let Some(file) = self.common.pipeline.clone() {
            return Ok(file);
        }
        if let Some(file) = &self.settings.pipeline {
            let file = self.folder.join(file);
            return match file.exists() {
                true => Ok(file),
                false => Err(CliError::usage(format!("{}: there is no such file", file.display()))
                    .with_hint("`pipeline:` of cuda-agent.yaml names it; its path starts at the folder of that file")),
            };
        }
        let last = std::fs::read_to_string(self.last_file()).ok().map(PathBuf::from);
        last.filter(|file| file.is_file()).ok_or_else(|| {
            CliError::usage("no pipeline is named").with_hint(
                "name one (`cuda-agent run pipelines/quickstart.yaml`), or set `pipeline:` in cuda-agent.yaml",
            )
        })
    }

    fn last_file(&self) -> PathBuf {
        self.folders.cache.join("last-pipeline")
    }

    /// Remembers a pipeline for commands that name none.
    pub fn remember(&self, file: &Path) {
        if let Ok(file) = file.canonicalize() {
            let _ = std::fs::create_dir_all(&self.folders.cache);
            let _ = std::fs::write(self.last_file(), file.display().to_string());
        }
    }

    /// Reads a pipeline, or tells all that is wrong with it.
    pub fn pipeline(&self, file: &Path) -> Result<Pipeline, CliError> {
        let overrides = self.common.params.iter().map(|text| {
            let (name, value) = text
                .split_once('=')
                .ok_or_else(|| CliError::usage(format!("`-p {text}` has no `=`")).with_hint("write `-p name=value`"))?;
            Ok((name.to_owned(), value.to_owned()))
        });
        let overrides = overrides.collect::<Result<Vec<_>, CliError>>()?;
        let text = read(file)?;
        let folder = match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let folder =
            folder.canonicalize().map_err(|error| CliError::usage(format!("{}: {error}", folder.display())))?;
        let include = |path: &Path| std::fs::read_to_string(path);
        Ok(spec::parse_pipeline(&text, file, &folder, &self.catalog, &overrides, &include)?)
    }
}

/// Why a server that ignores conditions is refused.
pub fn overwrites(url: &str) -> CliError {
    CliError::environment(format!(
        "{url}: this server overwrites an object that should only be created where there is none (it ignores \
         If-None-Match), so two people who share it could undo each other's results"
    ))
    .with_hint(
        "use a server that keeps it (AWS S3, MinIO, Ceph, SeaweedFS, R2 do); or, if only one run at a time ever writes there, \
         set `single_writer: true` in cuda-agent.yaml",
    )
}

/// What to do about an error of the shared store, and what will be done when that is mended.
pub fn after_mending(error: &StoreError, then: &str) -> String {
    match &error.hint {
        Some(hint) => format!("{hint}; then {then}"),
        None => then.to_owned(),
    }
}

/// Why a store that can only be read is not written to.
fn not_writable(error: StoreError) -> CliError {
    let hint = error.hint.clone().unwrap_or_default();
    let hint = format!(
        "{hint}; `run --read-only` reads from it and keeps results on this machine, `run --offline` uses no shared store"
    );
    CliError::environment(format!("{} cannot be written to: {}", error.url, error.message))
        .with_hint(hint.trim_start_matches("; ").to_owned())
}

/// The folder that the URL of a store names, where it names one.
fn store_folder(url: &str) -> Option<&Path> {
    match url.split_once("://") {
        Some(("file", path)) => Some(Path::new(path)),
        Some(_) => None,
        None => Some(Path::new(url)),
    }
}

fn read(file: &Path) -> Result<String, CliError> {
    std::fs::read_to_string(file).map_err(|error| {
        let told = CliError::usage(format!("{}: {error}", file.display()));
        match error.kind() {
            std::io::ErrorKind::NotFound => told.with_hint("check the path; paths start at the current folder"),
            std::io::ErrorKind::IsADirectory => CliError::usage(format!("{} is a folder, not a file", file.display()))
                .with_hint("name a pipeline file in it"),
            std::io::ErrorKind::InvalidData => CliError::usage(format!("{} is not UTF-8 text", file.display()))
                .with_hint("pipelines and project files are YAML, as text"),
            _ => told,
        }
    })
}

/// A path as short as it can be said.
fn shown(file: &Path, here: &Path) -> PathBuf {
    file.strip_prefix(here).unwrap_or(file).to_owned()
}
