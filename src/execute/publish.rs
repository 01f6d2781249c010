//! From what a program left in its folder to artifacts in the store.

use std::path::Path;

use arrow::array::Array;
use cuda_agent_protocol::manifest::OutputPort;
use cuda_agent_protocol::{ColumnType, PortType};

use super::log::Redactor;
use crate::artifact::column::{canonical, encode};
use crate::artifact::table::TableInfo;
use crate::artifact::tree::{self, Scan};
use crate::artifact::{Artifact, ArtifactError, ColumnInfo, table};
use crate::digest::Digest;
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

enum Prepared {
    Table { artifact: Artifact },
    Tree { artifact: Artifact, scan: Scan },
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
    let wrong = |error| PublishError::Output { port: port.to_owned(), error };
    refuse_links(path).map_err(wrong)?;
    // Small outputs are not worth another thread's wake-up, and most are small.
    let prepared = if is_small(path) {
        prepare(declared, columns_closed, path)
    } else {
        let (declared, path) = (declared.clone(), path.to_owned());
        let work = tokio::task::spawn_blocking(move || prepare(&declared, columns_closed, &path));
        work.await.expect("digesting does not panic")
    };
    match prepared.map_err(wrong)? {
        Prepared::Table { artifact } => {
            if !secrets.is_idle() && table_has_secret(path, secrets).map_err(wrong)? {
                return Err(PublishError::Secret { port: port.to_owned() });
            }
            store.put_blob_file(&artifact.blob, path, again).await?;
            Ok(artifact)
        }
        Prepared::Tree { artifact, scan } => {
            if !secrets.is_idle() && tree_has_secret(&scan, secrets).map_err(wrong)? {
                return Err(PublishError::Secret { port: port.to_owned() });
            }
            for (digest, bytes) in scan.packs {
                store.put_blob(&digest, bytes.into(), again).await?;
            }
            for (digest, file) in &scan.files {
                store.put_blob_file(digest, file, again).await?;
            }
            store.put_blob(&artifact.blob, tree::to_blob(&scan.entries).into(), again).await?;
            Ok(artifact)
        }
    }
}

/// An output that is a link out of the attempt's folder points to somebody's own files, and publishing moves files.
fn refuse_links(path: &Path) -> Result<(), ArtifactError> {
    let lines = path.with_extension("jsonl");
    for path in [path, &lines] {
        if !path.is_symlink() {
            continue;
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

fn prepare(declared: &OutputPort, columns_closed: bool, path: &Path) -> Result<Prepared, ArtifactError> {
    if !declared.port_type.is_table() {
        if !path.exists() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            return Err(ArtifactError::Contract(format!("the program did not make outputs/{name}")));
        }
        let scan = tree::scan(path)?;
        let mut parts: Vec<Digest> = scan.entries.iter().map(|entry| entry.blob).collect();
        parts.sort_unstable();
        parts.dedup();
        if parts.len() > MOST_PARTS {
            parts.clear();
        }
        let artifact = Artifact {
            port_type: declared.port_type,
            digest: tree::digest(&scan.entries),
            size: tree::size(&scan.entries),
            blob: Digest::of_bytes(&tree::to_blob(&scan.entries)),
            parts,
            rows: None,
            columns: Vec::new(),
        };
        return Ok(Prepared::Tree { artifact, scan });
    }
    table::adopt(path, &declared.columns)?;
    let mut info = table::inspect(path)?;
    check_columns(declared, columns_closed, &info)?;
    mark_measured(declared, &mut info.columns);
    let blob = Digest::of_file(path).map_err(ArtifactError::io(path))?;
    let size = std::fs::metadata(path).map_err(ArtifactError::io(path))?.len();
    Ok(Prepared::Table { artifact: of_table(declared.port_type, info, blob, size) })
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

fn tree_has_secret(scan: &Scan, secrets: &Redactor) -> Result<bool, ArtifactError> {
    if scan.packs.iter().any(|(_, bytes)| secrets.finds(bytes))
        || scan.entries.iter().any(|entry| secrets.finds(entry.path.as_bytes()))
    {
        return Ok(true);
    }
    for (_, path) in &scan.files {
        if secrets.finds(&std::fs::read(path).map_err(ArtifactError::io(path))?) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Parquet is compressed, so the values are looked at.
fn table_has_secret(path: &Path, secrets: &Redactor) -> Result<bool, ArtifactError> {
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
