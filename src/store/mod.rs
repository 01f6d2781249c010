//! Where artifacts live: blobs, records, row segments, run manifests, tags and logs.
//!
//! A store is one tier (a folder), or two: a local folder in front of a remote object store that several people share. Then
//! the remote one is the truth, and what is local follows it. The layout is in `ARCHITECTURE.md`. Readers trust only records:
//! whatever no record names is invisible, so a writer may die at any instant. Names are created once; only the manifest
//! of a run in progress, tags, hints and leases are overwritten.

pub mod ahead;
pub mod audit;
mod blobs;
pub mod checkpoint;
mod doubt;
mod error;
pub mod evict;
pub mod files;
pub mod folder;
pub mod gc;
mod known;
pub mod lease;
pub mod local;
pub mod policy;
pub mod record;
mod records;
pub mod remote;
pub mod remote_tier;
mod runs;
pub mod share;
mod state;
pub mod tier;
mod transfer;
pub mod work;

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;

use crate::digest::Digest;
use ahead::Ahead;
pub use checkpoint::{Checkpoint, CheckpointName};
use doubt::Doubt;
pub use error::{ErrorKind, StoreError};
use policy::Sharing;
pub use record::{Commit, Record, RecordId, RowCounts, RunManifest, SegmentName, StageEntry, Tag};
pub use remote_tier::Hint;
use remote_tier::Remote;
pub use state::{RunState, StageState};
use tier::Tier;

/// The version of the layout; the first part of every name.
pub const LAYOUT: &str = "v1";
/// How the names of gc's reports of what it deleted start, below `v1/gc`.
pub const DELETED: &str = "deleted-";
/// How long gc waits between finding garbage and deleting it, unless it is told that nobody else is there. A writer
/// counts on a blob that is there only while it is younger than half of that.
pub const GRACE: Duration = Duration::from_secs(24 * 3600);
/// Requests of one kind that are on their way at the same time: enough to hide the latency of a remote server.
pub const CONCURRENT: usize = 64;
/// How often a conflict is asked about that names nobody, as S3 answers while two writers race.
const CONFLICTS: u32 = 8;

/// A store. Cloning shares it.
#[derive(Clone)]
pub struct Store {
    local: Tier,
    sharing: Sharing,
    /// Of the remote tier, also while it is not used.
    url: String,
    /// What was looked up already, for the first view that looks.
    ahead: Option<Arc<Ahead>>,
}

/// Whether a blob that is there already is written once more: where one was found missing or damaged, others of the same
/// size may be damaged too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// A blob that is there is not written.
    No,
    /// It is.
    Yes,
}

impl Store {
    /// Opens a store of one tier by URL: `file:///folder`, a plain path, or `memory://`.
    pub fn open(url: &str) -> Result<Self, StoreError> {
        // What is no store may still have a password in it.
        let refuse = |message: String| StoreError::new(&remote::redacted(url), "open", "", message);
        if let Some((scheme, rest)) = url.split_once("://") {
            return match scheme {
                "file" => Self::open_folder(FilePath::new(rest)),
                "memory" => Ok(Self::memory()),
                other => {
                    let known = ["file", "s3", "gs", "az", "memory"].contains(&other.to_lowercase().as_str());
                    Err(StoreError {
                        hint: known.then(|| format!("write `{}://`", other.to_lowercase())),
                        ..refuse(format!(
                            "`{other}://` is not a kind of store here (file://, s3://, gs://, az://, memory://)"
                        ))
                    })
                }
            };
        }
        match mistyped(url) {
            Some((scheme, rest)) => Err(StoreError {
                hint: Some(format!("write `{}://{}`", scheme.to_lowercase(), rest.trim_start_matches('/'))),
                ..refuse("it is neither a URL nor a path".into())
            }),
            None if url.is_empty() => Err(refuse("its address is empty".into())),
            None => Self::open_folder(FilePath::new(url)),
        }
    }

    /// Whether an address is neither a URL nor a path that anybody means.
    pub fn is_mistyped(url: &str) -> bool {
        url.is_empty() || !url.contains("://") && mistyped(url).is_some()
    }

    /// Opens a folder, and makes it where it does not exist.
    pub fn open_folder(folder: &FilePath) -> Result<Self, StoreError> {
        Tier::folder_at(folder).map(Self::of_tier)
    }

    /// A store that ends with the process.
    pub fn memory() -> Self {
        Self::of_tier(Tier::memory())
    }

    /// Any object store.
    pub fn over(backend: Arc<dyn ObjectStore>, url: &str) -> Self {
        Self::of_tier(Tier::over(backend, url))
    }

    fn of_tier(local: Tier) -> Self {
        Self { url: local.url().to_owned(), local, sharing: Sharing::None, ahead: None }
    }

    /// A local folder in front of a remote store; what is known of the latter is kept in `cache`.
    pub fn tiered(local: Tier, remote: Tier, cache: &FilePath) -> Self {
        Self::over_remote(local, Remote::new(remote, cache, false))
    }

    /// The same, but nothing is written to the remote store.
    pub fn read_only(local: Tier, remote: Tier, cache: &FilePath) -> Self {
        Self::over_remote(local, Remote::new(remote, cache, true))
    }

    /// A view of a store that a run can write to without anybody seeing it: what is written stays in `folder`.
    pub fn sketch(&self, folder: &FilePath) -> Result<Self, StoreError> {
        let local = Tier::folder_at(folder)?;
        // Where nothing is shared, what was made here is only here.
        let below = if self.writable().is_some() { self.truth() } else { &self.local };
        Ok(Self::read_only(local, below.clone(), &folder.join("cache")))
    }

    /// Lends a local copy of a blob to another store on the same disk, so that it need not be fetched again.
    pub fn lend(&self, digest: &Digest, to: &Self) {
        let name = blob_name(digest);
        if let (Some(from), Some(to)) = (self.local.path_of(&name), to.local.path_of(&name)) {
            let _ = to.parent().map(std::fs::create_dir_all);
            let _ = std::fs::hard_link(from, to);
        }
    }

    fn over_remote(local: Tier, remote: Remote) -> Self {
        let url = remote.tier.url().to_owned();
        Self { local, url, sharing: Sharing::With(Arc::new(remote)), ahead: None }
    }

    /// The local tier of a store whose remote one, of this URL, is not to be asked.
    pub fn offline(local: Tier, url: &str) -> Self {
        Self { local, sharing: Sharing::Offline, url: url.into(), ahead: None }
    }

    /// This store, with what was looked up in it ahead.
    pub fn with(self, ahead: Option<Arc<Ahead>>) -> Self {
        Self { ahead, ..self }
    }

    /// What was looked up ahead.
    pub fn ahead(&self) -> Option<&Arc<Ahead>> {
        self.ahead.as_ref()
    }

    /// The root, as a URL: of the remote tier where there is one.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The folder of a store that is one, or of the local tier.
    pub fn folder(&self) -> Option<&FilePath> {
        self.local.folder().map(folder::Folder::path)
    }

    /// The local tier.
    pub fn local(&self) -> &Tier {
        &self.local
    }
}

/// The scheme and the rest of a URL with one slash too few: `s3:/bucket` would be a folder of that name.
fn mistyped(url: &str) -> Option<(&str, &str)> {
    let is_word = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    url.split_once(":/").filter(|(scheme, _)| is_word(scheme))
}

/// The name of a blob.
pub fn blob_name(digest: &Digest) -> String {
    let digest = digest.to_string();
    format!("{LAYOUT}/blobs/{}/{digest}", &digest[..2])
}

/// The name of a record.
pub fn record_name(key: &Digest, generation: u32) -> String {
    format!("{LAYOUT}/records/{key}/{generation:08}")
}

/// What a record is known by where it is shared: another one in its place is not.
pub fn shared_name(record: RecordId<'_>, generation: u32) -> String {
    format!("{}#{}", record_name(record.key, generation), record.nonce)
}

/// The name of a row segment.
pub fn segment_name(base: &Digest, segment: &SegmentName) -> String {
    format!("{LAYOUT}/rows/{base}/{segment}.parquet")
}

/// How long gc waits; tests shorten it.
pub fn grace() -> Duration {
    let seconds = std::env::var("CUDA_AGENT_GC_GRACE_S").ok().and_then(|text| text.parse().ok());
    seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()).unwrap_or(GRACE)
}
