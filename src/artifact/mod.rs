//! What stages make: tables and trees, their logical digests, and the way into and out of the store's blobs.

pub mod column;
mod decode;
pub mod json;
pub mod layout;
pub mod table;
pub mod tree;

use cuda_agent_protocol::PortType;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::key::InputIdentity;

/// A published output, as a record names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// Its type.
    #[serde(rename = "type")]
    pub port_type: PortType,
    /// Its logical digest.
    pub digest: Digest,
    /// Bytes: of the Parquet file, or of a tree's files together.
    pub size: u64,
    /// The Parquet file, or the tree's list of files.
    pub blob: Digest,
    /// The blobs that hold a tree's files, where they are few enough to list here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Digest>,
    /// Rows of a table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// Columns of a table, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<ColumnInfo>,
}

/// A column of a published table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnInfo {
    /// Its name.
    pub name: String,
    /// Its type, as digests name it.
    #[serde(rename = "type")]
    pub column_type: String,
    /// Digest of its values in row order.
    pub digest: Digest,
    /// Whether it holds measurements.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub measured: bool,
}

impl Artifact {
    /// What identifies it to a port that reads these columns (all of them where none are named).
    pub fn identity<'a>(&self, declared: impl ExactSizeIterator<Item = &'a String> + Clone) -> InputIdentity {
        let Some(rows) = self.rows else { return InputIdentity::Tree { digest: self.digest } };
        let counts = |name: &String| declared.len() == 0 || declared.clone().any(|declared| declared == name);
        let columns = || self.columns.iter().filter(|column| counts(&column.name));
        InputIdentity::Table {
            rows,
            columns: columns()
                .map(|column| (column.name.clone(), (column.column_type.clone(), column.digest)))
                .collect(),
            order: columns().map(|column| column.name.clone()).collect(),
        }
    }
}

/// Why an artifact could not be read or made.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// The file system refused.
    #[error("{path}: {source}")]
    Io {
        /// Where.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A Parquet or JSON file that cannot be read.
    #[error("{path}: {message}")]
    Malformed {
        /// Where, with a line where there is one.
        path: String,
        /// What is wrong.
        message: String,
    },
    /// Something in a tree that cannot be read for what it is.
    #[error("{path}: {what}; {hint}")]
    Unreadable {
        /// Where.
        path: String,
        /// What it is.
        what: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// A table that is no Parquet file.
    #[error("{path} is not a Parquet file, but {found}")]
    NotParquet {
        /// Where.
        path: String,
        /// What it is instead.
        found: String,
    },
    /// Content that does not fit what the port declares.
    #[error("{0}")]
    Contract(String),
}

impl ArtifactError {
    /// What lies there cannot be read.
    fn unreadable(path: &std::path::Path, what: impl Into<String>, hint: &'static str) -> Self {
        Self::Unreadable { path: path.display().to_string(), what: what.into(), hint }
    }

    /// An IO error with its place.
    pub fn io(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.display().to_string(), source }
    }

    /// The same error, its place told from a folder on where it lies in that.
    pub fn below(mut self, folder: &std::path::Path) -> Self {
        if let Self::Io { path, .. } | Self::Malformed { path, .. } | Self::Unreadable { path, .. } = &mut self
            && let Ok(short) = std::path::Path::new(path.as_str()).strip_prefix(folder)
        {
            *path = short.display().to_string();
        }
        self
    }

    /// A malformed file with its place.
    pub fn malformed<E: std::fmt::Display>(path: &std::path::Path) -> impl FnOnce(E) -> Self + '_ {
        move |message| Self::Malformed { path: path.display().to_string(), message: message.to_string() }
    }
}
