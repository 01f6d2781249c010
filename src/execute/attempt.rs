//! One program's folder: its inputs, its program, its request, its environment.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cuda_agent_protocol::request::InputFile;
use cuda_agent_protocol::{
    ByRowRequest, ColumnType, InputRequest, OutputRequest, PROTOCOL_VERSION, PortType, Request, ResourceGrant,
};

use super::failure::Failure;
use super::files::set_mode;
use super::folders::{OUTPUTS, REQUEST, TEMPORARY};
use super::job::Job;
use super::launch::{Launch, Stop};
use super::program;
use crate::artifact::tree::{Entry, Walk};
use crate::artifact::{Artifact, ArtifactError, column, layout};
use crate::digest::Digest;
use crate::event::RunEvent;
use crate::off_loop;
use crate::plan::inputs::Input;
use crate::store::Store;

/// Variables that programs see without declaring them: where the machine keeps its tools and drivers. None of them
/// says what to compute.
const PLUMBING: [&str; 9] = [
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "SSL_CERT_FILE",
    "NCCL_SOCKET_IFNAME",
    "http_proxy",
    "https_proxy",
    "no_proxy",
];

/// What text looks like and what time it is, the same everywhere: a time zone or a language of the machine would be in
/// results and in no key. A stage that needs another declares it.
const CANONICAL: [(&str, &str); 2] = [("LANG", "C.UTF-8"), ("TZ", "UTC")];

/// NVLink multicast can take the GPUs of a whole host out of service, so it is off unless a stage's `env:` says otherwise.
const SAFE: [(&str, &str); 3] =
    [("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")];

/// What is smaller is copied at once, and not step by step.
const SMALL: u64 = 1 << 20;
/// How much is copied before it is looked whether anybody still waits for it.
const COPY_STEP: u64 = 16 << 20;

/// A program's folder, ready to start it.
pub struct Attempt {
    /// Where the program starts, with its inputs, its request and room for its outputs.
    pub folder: PathBuf,
    /// The program, its arguments and its environment.
    pub launch: Launch,
}

/// Makes the folder of a program and fills it. `rows` is how many rows a by-row stage has to do. Inputs may be large: an
/// interrupted run does not wait for them.
pub async fn prepare(
    job: &Job,
    folder: &Path,
    grant: &ResourceGrant,
    rows: Option<u64>,
    deadline_unix_s: Option<f64>,
) -> Result<Attempt, Failure> {
    if let Some(error) = &job.secrets.missing {
        return Err(error.clone().into());
    }
    if rows.is_none() {
        job.context.spare.take(folder);
    }
    let filled = async {
        for name in [OUTPUTS, TEMPORARY] {
            let folder = folder.join(name);
            fs::create_dir_all(&folder).map_err(ArtifactError::io(&folder))?;
        }
        let state_dir = job.state_folder();
        if job.stage().command.is_none() {
            fs::create_dir_all(&state_dir).map_err(ArtifactError::io(&state_dir))?;
        }
        let request = Request {
            protocol: PROTOCOL_VERSION,
            stage: job.stage().name.clone(),
            kind: job.stage().kind.name.clone(),
            params: job.stage().params.clone().into_iter().collect(),
            seed: job.seed(),
            inputs: place_inputs(job, folder).await?,
            outputs: job
                .stage()
                .kind
                .outputs
                .iter()
                .map(|(port, output)| (port.clone(), output_request(port, output)))
                .collect(),
            by_row: rows.zip(job.stage().kind.by_row.as_ref()).map(|(total, by_row)| ByRowRequest {
                port: by_row.port.clone(),
                columns: job.stage().kind.inputs[&by_row.port].columns.keys().cloned().collect(),
                window: by_row.window_of(grant.cpu),
                total,
            }),
            resources: grant.clone(),
            device: job.resolved.preimage.device.clone(),
            deadline_unix_s,
            state_dir,
        };
        let path = folder.join(REQUEST);
        let text = serde_json::to_vec(&request).expect("requests are plain data");
        overwrite(&path, &text).map_err(ArtifactError::io(&path))?;
        let program = program::place(job, folder)?;
        let environment = environment(job, folder, grant, &program.search);
        let stage = job.stage().name.clone();
        Ok(Attempt {
            folder: folder.to_owned(),
            launch: Launch { stage, command: program.words, environment, folder: folder.to_owned() },
        })
    };
    let mut stop = job.stop.clone();
    tokio::select! {
        biased;
        _ = stop.wait_for(|stop| *stop != Stop::Go) => Err(Failure::Cancelled),
        prepared = filled => prepared,
    }
}

/// Writes a file over the one that a folder has from an earlier attempt. It is cut afterwards and not emptied before: ext4
/// sends what replaces an emptied file to the disk at once.
fn overwrite(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = fs::File::options().write(true).create(true).truncate(false).open(path)?;
    file.write_all(bytes)?;
    file.set_len(bytes.len() as u64)
}

fn output_request(port: &str, output: &cuda_agent_protocol::manifest::OutputPort) -> OutputRequest {
    OutputRequest {
        port_type: output.port_type,
        path: output_path(port, output.port_type),
        columns: output.columns.iter().map(|c| (c.name.clone(), c.column_type.clone())).collect(),
    }
}

/// Where a program puts an output, below its folder.
pub fn output_path(port: &str, port_type: PortType) -> PathBuf {
    Path::new(OUTPUTS).join(artifact_name(port, port_type))
}

/// The file or folder name of an artifact at a port.
pub fn artifact_name(port: &str, port_type: PortType) -> String {
    if port_type.is_table() { format!("{port}.parquet") } else { port.to_owned() }
}

async fn place_inputs(job: &Job, folder: &Path) -> Result<BTreeMap<String, InputRequest>, Failure> {
    let mut requests = BTreeMap::new();
    let by_row = job.stage().kind.by_row.as_ref().map(|by_row| by_row.port.as_str());
    for (port, inputs) in job.resolved.inputs.iter().filter(|(port, _)| Some(port.as_str()) != by_row) {
        let declared = &job.stage().kind.inputs[port];
        let mut files = Vec::new();
        for (number, input) in inputs.iter().enumerate() {
            let name = if declared.list { format!("{port}/{number}") } else { port.clone() };
            // What a command gets by a tag is known only now.
            let port_type = if job.stage().command.is_some() { input.artifact.port_type } else { declared.port_type };
            let path = Path::new("inputs").join(artifact_name(&name, port_type));
            let target = folder.join(&path);
            let above = target.parent().expect("inputs lie in a folder");
            fs::create_dir_all(above).map_err(ArtifactError::io(above))?;
            place_shown(job, input, &target).await?;
            if input.artifact.rows.is_some() {
                canonicalize(&target, &declared.columns).await?;
            }
            files.push(InputFile {
                port_type: input.artifact.port_type,
                path,
                digest: visible_digest(&input.artifact, &declared.columns).to_string(),
                rows: input.artifact.rows,
            });
        }
        let request = if declared.list { InputRequest::List(files) } else { InputRequest::One(files.remove(0)) };
        requests.insert(port.clone(), request);
    }
    Ok(requests)
}

/// Brings a table into the layout that programs get; a large one off the loop.
async fn canonicalize(path: &Path, declared: &BTreeMap<String, ColumnType>) -> Result<(), ArtifactError> {
    if fs::metadata(path).map_err(ArtifactError::io(path))?.len() < SMALL {
        return layout::canonicalize(path, declared);
    }
    let (path, declared) = (path.to_owned(), declared.clone());
    off_loop(move || layout::canonicalize(&path, &declared)).await
}

/// The digest of what a program sees of an input: columns that its port does not declare are in no key.
fn visible_digest(artifact: &Artifact, declared: &BTreeMap<String, ColumnType>) -> Digest {
    let Some(rows) = artifact.rows.filter(|_| !declared.is_empty()) else { return artifact.digest };
    let columns = artifact.columns.iter().filter(|column| declared.contains_key(&column.name));
    let columns: Vec<_> = columns.map(|c| (c.name.clone(), c.column_type.clone(), c.digest)).collect();
    column::table_digest(rows, &columns)
}

/// Places an input. While that takes long, it shows how far it is.
async fn place_shown(job: &Job, input: &Input, target: &Path) -> Result<(), Failure> {
    const OFTEN: Duration = Duration::from_secs(1);
    let copied = Copied::default();
    let _ended = copied.clone().ended_on_drop();
    let total = input.outside.as_ref().map_or(input.artifact.size, |outside| outside.size().bytes);
    let mut placing = pin!(place_counted(&job.context.store, input, target, &copied));
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + OFTEN, OFTEN);
    loop {
        tokio::select! {
            placed = &mut placing => return placed,
            _ = ticks.tick() => {
                let (done, total) = (copied.bytes() >> 20, Some(total >> 20));
                let (stage, unit) = (job.stage().name.clone(), "MiB of inputs copied".to_owned());
                job.emit(RunEvent::StageProgress { stage, done, total, unit });
            }
        }
    }
}

/// How much was copied, and whether somebody still wants it.
#[derive(Clone, Default)]
struct Copied {
    bytes: Arc<AtomicU64>,
    ended: Arc<AtomicBool>,
}

/// Ends the copying when nobody waits for it any more: it goes on in threads that nobody can stop.
struct EndOnDrop(Copied);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
    }
}

impl Copied {
    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn ended_on_drop(self) -> EndOnDrop {
        EndOnDrop(self)
    }

    /// Counts, and says whether to go on.
    fn add(&self, bytes: u64) -> std::io::Result<()> {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        match self.ended.load(Ordering::Relaxed) {
            true => Err(std::io::Error::other("nobody waits for the copy any more")),
            false => Ok(()),
        }
    }
}

/// Copies an input to where the program finds it: a copy, so that the program cannot change the original.
pub async fn place(store: &Store, input: &Input, target: &Path) -> Result<(), Failure> {
    place_counted(store, input, target, &Copied::default()).await
}

async fn place_counted(store: &Store, input: &Input, target: &Path, copied: &Copied) -> Result<(), Failure> {
    if let Some(outside) = &input.outside {
        let (from, target, copied) = (outside.path.clone(), target.to_owned(), copied.clone());
        // A small file is copied sooner than another thread wakes up.
        return Ok(match outside.size().bytes < SMALL && outside.size().files <= 1 {
            true => copy_outside(&from, &target, &copied),
            false => off_loop(move || copy_outside(&from, &target, &copied)).await,
        }?);
    }
    let artifact = &input.artifact;
    let gone = |blob: Digest| Failure::input_lost(blob).with_hint("run again: what made it will be executed once more");
    if artifact.rows.is_some() {
        let there = store.fetch_blob(&artifact.blob, target).await?;
        return if there { Ok(set_mode(target, false)?) } else { Err(gone(artifact.blob)) };
    }
    let entries = store.tree_entries(artifact).await?.ok_or_else(|| gone(artifact.blob))?;
    if let Some(lost) = store.bring_all(entries.iter().map(|entry| entry.blob)).await? {
        return Err(gone(lost));
    }
    let mut rest = entries.as_slice();
    let mut held: Option<(Digest, bytes::Bytes)> = None;
    while let Some(first) = rest.first() {
        if !first.is_packed() {
            let path = below(target, first);
            make_above(&path)?;
            if !store.fetch_blob(&first.blob, &path).await? {
                return Err(gone(first.blob));
            }
            set_mode(&path, first.executable)?;
            copied.bytes.fetch_add(first.size, Ordering::Relaxed);
            rest = &rest[1..];
            continue;
        }
        // Files of one pack come one after another, but for large ones between them, so the pack is kept.
        let count = rest.iter().take_while(|entry| entry.is_packed() && entry.blob == first.blob).count();
        let (packed, after) = rest.split_at(count);
        let pack = match held.take().filter(|(digest, _)| *digest == first.blob) {
            Some((_, pack)) => pack,
            None => store.get_pack(&first.blob).await?.ok_or_else(|| gone(first.blob))?,
        };
        held = Some((first.blob, pack.clone()));
        let unpacked = match packed {
            [one] => unpack(std::slice::from_ref(one), &pack, target, copied),
            many => {
                let (many, target, copied) = (many.to_vec(), target.to_owned(), copied.clone());
                off_loop(move || unpack(&many, &pack, &target, &copied)).await
            }
        };
        if !unpacked? {
            return Err(gone(first.blob));
        }
        rest = after;
    }
    make_above(target)?;
    if !target.exists() {
        fs::create_dir_all(target).map_err(ArtifactError::io(target))?;
    }
    Ok(())
}

/// Where a file of a tree goes.
fn below(target: &Path, entry: &Entry) -> PathBuf {
    if entry.path.is_empty() { target.to_owned() } else { target.join(&entry.path) }
}

fn make_above(path: &Path) -> Result<(), ArtifactError> {
    let above = path.parent().expect("a target has a folder");
    fs::create_dir_all(above).map_err(ArtifactError::io(above))
}

/// Writes the files of a pack; `false` where it does not have what the tree's list says.
fn unpack(entries: &[Entry], pack: &[u8], target: &Path, copied: &Copied) -> Result<bool, ArtifactError> {
    for entry in entries {
        let (path, end) = (below(target, entry), entry.offset.saturating_add(entry.size));
        let bytes = pack.get(entry.offset as usize..end as usize);
        let Some(bytes) = bytes.filter(|bytes| Digest::of_bytes(bytes) == entry.digest) else { return Ok(false) };
        make_above(&path)?;
        fs::write(&path, bytes).map_err(ArtifactError::io(&path))?;
        set_mode(&path, entry.executable)?;
        copied.add(entry.size).map_err(ArtifactError::io(&path))?;
    }
    Ok(true)
}

fn copy_outside(from: &Path, target: &Path, copied: &Copied) -> Result<(), ArtifactError> {
    for file in Walk::new(from)? {
        let (name, real) = file?;
        let path = if name.is_empty() { target.to_owned() } else { target.join(name) };
        make_above(&path)?;
        copy_file(&real, &path, copied).map_err(ArtifactError::io(&real))?;
        let mode = fs::metadata(&real).map_err(ArtifactError::io(&real))?.permissions().mode();
        set_mode(&path, mode & 0o100 != 0)?;
    }
    if !target.exists() {
        fs::create_dir_all(target).map_err(ArtifactError::io(target))?;
    }
    Ok(())
}

/// Copies a file in steps.
fn copy_file(from: &Path, to: &Path, copied: &Copied) -> std::io::Result<()> {
    let length = fs::metadata(from)?.len();
    if length < SMALL {
        fs::copy(from, to)?;
        return copied.add(length);
    }
    let source = fs::File::open(from)?;
    let target = fs::File::create(to)?;
    target.set_permissions(source.metadata()?.permissions())?;
    // Within the kernel, which shares the blocks where the file system can; `io::copy` of a part does that.
    let mut source = source;
    let mut target = target;
    loop {
        let count = std::io::copy(&mut (&mut source).take(COPY_STEP), &mut target)?;
        copied.add(count)?;
        if count == 0 {
            return Ok(());
        }
    }
}

fn environment(job: &Job, folder: &Path, grant: &ResourceGrant, search: &[PathBuf]) -> BTreeMap<String, String> {
    let mut environment: BTreeMap<String, String> = BTreeMap::new();
    environment.extend(CANONICAL.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    let from_engine = |name: &str| std::env::var(name).ok();
    for name in PLUMBING.iter().copied().chain(job.stage().kind.env.iter().map(String::as_str)) {
        environment.extend(from_engine(name).map(|value| (name.to_owned(), value)));
    }
    let mut set = |name: &str, value: String| environment.insert(name.to_owned(), value);
    SAFE.iter().for_each(|(name, value)| drop(set(name, (*value).to_owned())));
    if !job.stage().kind.env.iter().any(|name| name == "HOME") {
        set("HOME", folder.join(TEMPORARY).display().to_string());
    }
    set("TMPDIR", folder.join(TEMPORARY).display().to_string());
    set("CUDA_AGENT_REQUEST", folder.join(REQUEST).display().to_string());
    set("OMP_NUM_THREADS", grant.cpu.max(1).to_string());
    // Threads that wait for each other sleep: where cores have other work too, those that spin take them from the one that
    // they wait for (a small model's training on two busy cores: 68 s spinning, 32 s so; 24 and 27 s on idle ones).
    set("OMP_WAIT_POLICY", "passive".to_owned());
    set("CUDA_AGENT_PYTHON", job.context.python.display().to_string());
    set("PYTHONUNBUFFERED", "1".to_owned());
    // Bytecode goes beside no source, which may be read-only, or counts for a key. Torch's takes ten seconds to make.
    let bytecode = from_engine("PYTHONPYCACHEPREFIX");
    set(
        "PYTHONPYCACHEPREFIX",
        bytecode.unwrap_or_else(|| job.context.folders.cache.join("pycache").display().to_string()),
    );
    // Strings hash the same in every run, so that sets have one order.
    set("PYTHONHASHSEED", "0".to_owned());
    if !search.is_empty() {
        let search: Vec<String> = search.iter().map(|folder| folder.display().to_string()).collect();
        set("PYTHONPATH", search.join(":"));
    }
    let gpus: Vec<&str> =
        grant.gpus.iter().filter_map(|gpu| Some(job.context.gpus.get(*gpu as usize)?.as_str())).collect();
    set("CUDA_VISIBLE_DEVICES", gpus.join(","));
    environment.extend(job.stage().env.clone());
    environment.extend(job.secrets.values.iter().cloned());
    environment
}
