//! From what a program left in its folder to artifacts in the store.

use std::path::{Path, PathBuf};

use arrow::array::Array;
use cuda_agent_protocol::manifest::OutputPort;
use cuda_agent_protocol::{ColumnType, PortType};

use super::failure::Failure;
use super::log::Redactor;
use crate::artifact::column::{canonical, encode};
use crate::artifact::table::TableInfo;
use crate::artifact::tree::{self, Entry, Pack, Scan, Walk};
use crate::artifact::{Artifact, ArtifactError, ColumnInfo, table};
use crate::digest::Digest;
use crate::off_loop;
use crate::plan::inputs::of_table;
use crate::store::{Again, Store, StoreError};

/// Trees in more blobs than this do not list them in their record.
const MOST_PARTS: usize = 64;

/// Why an output could not be published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// What the program wrote is wrong.
    #[error("output `{port}`: {error}")]
    Output {
        /// The port.
        port: String,
        /// What is wrong.
        error: ArtifactError,
    },
    /// A secret would have been published.
    #[error("output `{port}` contains the value of a secret, so nothing was published")]
    Secret {
        /// The port.
        port: String,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Checks an output and stores it. The file at `path` is used up. `columns` are what the table must have, where they
/// are not simply what the port declares (a by-row table has its input's columns too).
pub async fn publish(
    store: &Store,
    port: &str,
    declared: &OutputPort,
    columns_closed: bool,
    path: &Path,
    secrets: &Redactor,
    again: Again,
) -> Result<Artifact, PublishError> {
    let attempt =
        path.parent().and_then(Path::parent).and_then(|folder| folder.canonicalize().ok()).unwrap_or_default();
    let wrong = |error: ArtifactError| PublishError::Output { port: port.to_owned(), error: error.below(&attempt) };
    refuse_links(path).map_err(wrong)?;
    let secret = || PublishError::Secret { port: port.to_owned() };
    if !declared.port_type.is_table() {
        if !path.exists() {
            return Err(wrong(missing(path)));
        }
        if !secrets.is_idle()
            && unless_small(path, (path.to_owned(), secrets.clone()), tree_has_secret).await.map_err(wrong)?
        {
            return Err(secret());
        }
        return store_tree(store, declared.port_type, path, again).await.map_err(|error| match error {
            TreeError::Artifact(error) => wrong(error),
            TreeError::Store(error) => error.into(),
        });
    }
    let about = (declared.clone(), columns_closed, path.to_owned());
    let artifact = unless_small(path, about, |(declared, closed, path)| prepare_table(&declared, closed, &path)).await;
    let artifact = artifact.map_err(wrong)?;
    if !secrets.is_idle()
        && unless_small(path, (path.to_owned(), secrets.clone()), table_has_secret).await.map_err(wrong)?
    {
        return Err(secret());
    }
    store.put_blob_file(&artifact.blob, path, again).await?;
    Ok(artifact)
}

/// Stores a copy of an input under the blobs that its artifact names; `false` where the copy is something else by now. What
/// is at `path` is used up.
pub async fn publish_input(store: &Store, artifact: &Artifact, path: &Path) -> Result<bool, Failure> {
    if artifact.rows.is_some() {
        let bytes = unless_small(path, path.to_owned(), |path| Digest::of_file(&path)).await;
        if bytes.map_err(ArtifactError::io(path))? != artifact.blob {
            return Ok(false);
        }
        store.put_blob_file(&artifact.blob, path, Again::No).await?;
        return Ok(true);
    }
    match store_tree(store, artifact.port_type, path, Again::No).await {
        Ok(stored) => Ok(stored.digest == artifact.digest && stored.blob == artifact.blob),
        Err(TreeError::Artifact(error)) => Err(error.into()),
        Err(TreeError::Store(error)) => Err(error.into()),
    }
}

/// Does something with what is at `path`, on another thread where that is not small: small outputs are not worth another
/// thread's wake-up, and most are small.
async fn unless_small<A: Send + 'static, T: Send + 'static>(
    path: &Path,
    about: A,
    work: impl FnOnce(A) -> T + Send + 'static,
) -> T {
    if is_small(path) { work(about) } else { off_loop(move || work(about)).await }
}

enum TreeError {
    Artifact(ArtifactError),
    Store(StoreError),
}

/// Stores a tree, one pack after another, so that no more than one is in memory.
async fn store_tree(store: &Store, port_type: PortType, path: &Path, again: Again) -> Result<Artifact, TreeError> {
    let small = is_small(path);
    let mut scan = Scan::new(path).map_err(TreeError::Artifact)?;
    let (mut entries, mut packs) = (Vec::new(), Vec::new());
    loop {
        let pack = if small {
            scan.next_pack()
        } else {
            let (back, pack) = off_loop(move || {
                let pack = scan.next_pack();
                (scan, pack)
            })
            .await;
            scan = back;
            pack
        };
        let pack = pack.map_err(TreeError::Artifact)?;
        entries.extend(scan.take_entries());
        let Some(Pack { digest, bytes }) = pack else { break };
        store.put_blob(&digest, bytes.into(), again).await.map_err(TreeError::Store)?;
        packs.push(digest);
    }
    for (digest, file) in &scan.files {
        store.put_blob_file(digest, file, again).await.map_err(TreeError::Store)?;
    }
    let list = tree::to_blob(&entries);
    let artifact = tree_artifact(port_type, &entries, &list, packs, &scan.files);
    store.put_blob(&artifact.blob, list.into(), again).await.map_err(TreeError::Store)?;
    Ok(artifact)
}

fn tree_artifact(
    port_type: PortType,
    entries: &[Entry],
    list: &[u8],
    packs: Vec<Digest>,
    files: &[(Digest, PathBuf)],
) -> Artifact {
    let mut parts = packs;
    parts.extend(files.iter().map(|(digest, _)| *digest));
    parts.sort_unstable();
    parts.dedup();
    if parts.len() > MOST_PARTS {
        parts.clear();
    }
    Artifact {
        port_type,
        digest: tree::digest(entries),
        size: tree::size(entries),
        blob: Digest::of_bytes(list),
        parts,
        rows: None,
        columns: Vec::new(),
    }
}

/// What to say where a program did not make an output.
fn missing(path: &Path) -> ArtifactError {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    ArtifactError::Contract(format!("the program did not make outputs/{name}"))
}

/// An output that is a link out of the attempt's folder points to somebody's own files, and publishing moves files. Reading a
/// FIFO would wait for ever.
fn refuse_links(path: &Path) -> Result<(), ArtifactError> {
    let lines = path.with_extension("jsonl");
    for path in [path, &lines] {
        if let Some(special) = std::fs::metadata(path).ok().and_then(|metadata| tree::special(metadata.file_type())) {
            return Err(ArtifactError::Contract(special));
        }
        if !path.is_symlink() {
            continue;
        }
        if !path.exists() {
            return Err(ArtifactError::Contract(format!("{}; write the output itself", tree::dangling(path))));
        }
        let attempt = path.parent().and_then(Path::parent).unwrap_or(path);
        let real = path.canonicalize().map_err(ArtifactError::io(path))?;
        let attempt = attempt.canonicalize().map_err(ArtifactError::io(path))?;
        if !real.starts_with(&attempt) {
            return Err(ArtifactError::Contract(format!(
                "it is a link to {}, outside the attempt's folder; copy what it points to",
                real.display()
            )));
        }
    }
    Ok(())
}

fn is_small(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() < 1 << 16)
}

fn prepare_table(declared: &OutputPort, columns_closed: bool, path: &Path) -> Result<Artifact, ArtifactError> {
    table::adopt(path, &declared.columns)?;
    let mut info = table::inspect(path)?;
    check_columns(declared, columns_closed, &info)?;
    mark_measured(declared, &mut info.columns);
    let blob = Digest::of_file(path).map_err(ArtifactError::io(path))?;
    let size = std::fs::metadata(path).map_err(ArtifactError::io(path))?.len();
    Ok(of_table(declared.port_type, info, blob, size))
}

/// Whether a table has the columns that its port declares, and no others where they are closed.
pub fn check_columns(declared: &OutputPort, columns_closed: bool, info: &TableInfo) -> Result<(), ArtifactError> {
    let mut wanted: Vec<(&str, &ColumnType)> =
        declared.columns.iter().map(|column| (column.name.as_str(), &column.column_type)).collect();
    let closed = columns_closed && !wanted.is_empty();
    if declared.port_type == PortType::Tasks && wanted.iter().all(|(name, _)| *name != "code") {
        wanted.push(("code", &ColumnType::Utf8));
    }
    table::check(info, &wanted, closed)
}

/// Notes which columns the port declares to hold measurements.
pub fn mark_measured(declared: &OutputPort, columns: &mut [ColumnInfo]) {
    for column in columns {
        column.measured = declared.columns.iter().any(|declared| declared.name == column.name && declared.measured);
    }
}

/// All of it is looked through before anything is stored.
fn tree_has_secret((path, secrets): (PathBuf, Redactor)) -> Result<bool, ArtifactError> {
    for file in Walk::new(&path)? {
        let (name, real) = file?;
        if secrets.finds(name.as_bytes()) || secrets.finds_in(&real).map_err(ArtifactError::io(&real))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Parquet is compressed, so the values are looked at.
fn table_has_secret((path, secrets): (PathBuf, Redactor)) -> Result<bool, ArtifactError> {
    let path = &path;
    let (schema, batches) = table::read(path)?;
    if secrets.finds(format!("{schema:?}").as_bytes()) {
        return Ok(true);
    }
    let mut bytes = Vec::new();
    for column in batches.iter().flat_map(|batch| batch.columns()) {
        let column = canonical(column).map_err(ArtifactError::malformed(path))?;
        for row in 0..column.len() {
            bytes.clear();
            encode(&column, row, &mut bytes);
            if secrets.finds(&bytes) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
