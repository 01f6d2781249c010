//! Where artifacts live: blobs, records, row segments, run manifests, tags and logs over an object store.
//!
//! The layout is in `ARCHITECTURE.md`. Readers trust only records: whatever no record names is invisible, so a writer
//! may die at any instant. Names are created once; only the manifest of a run in progress is overwritten, by its owner.
//! Reads on a `file://` store go past the object-store layer, since a no-op run reads one small file a stage.

pub mod record;

use std::io::Read;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};

use crate::artifact::{Artifact, tree};
use crate::digest::Digest;
pub use record::{Commit, Record, RowCounts, RunManifest, SegmentName, StageEntry, Tag};

/// The version of the layout; the first part of every name.
const LAYOUT: &str = "v1";

/// Why the store could not do something.
#[derive(Debug, thiserror::Error)]
#[error("store {url}: {action} {name}: {message}")]
pub struct StoreError {
    /// The store.
    pub url: String,
    /// `read`, `write`, `list`…
    pub action: &'static str,
    /// What it was about.
    pub name: String,
    /// What the system said.
    pub message: String,
}

/// A store. Cloning shares it.
#[derive(Clone)]
pub struct Store {
    backend: Arc<dyn ObjectStore>,
    folder: Option<PathBuf>,
    url: String,
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
    /// Opens a store by URL: `file:///folder`, a plain path, or `memory://`.
    pub fn open(url: &str) -> Result<Self, StoreError> {
        let refuse = |message: String| StoreError { url: url.into(), action: "open", name: String::new(), message };
        if let Some((scheme, rest)) = url.split_once("://") {
            return match scheme {
                "file" => Self::open_folder(FilePath::new(rest)),
                "memory" => Ok(Self::memory()),
                other => Err(refuse(format!("`{other}://` is not a kind of store here (file://, memory://)"))),
            };
        }
        Self::open_folder(FilePath::new(url))
    }

    /// Opens a folder, and makes it where it does not exist.
    pub fn open_folder(folder: &FilePath) -> Result<Self, StoreError> {
        let url = format!("file://{}", folder.display());
        let fail = |message: String| StoreError { url: url.clone(), action: "open", name: String::new(), message };
        std::fs::create_dir_all(folder).map_err(|error| fail(error.to_string()))?;
        let folder = folder.canonicalize().map_err(|error| fail(error.to_string()))?;
        let backend = LocalFileSystem::new_with_prefix(&folder).map_err(|error| fail(error.to_string()))?;
        Ok(Self { backend: Arc::new(backend), url: format!("file://{}", folder.display()), folder: Some(folder) })
    }

    /// A store that ends with the process.
    pub fn memory() -> Self {
        Self { backend: Arc::new(InMemory::new()), folder: None, url: "memory://".into() }
    }

    /// Any object store, for tests of other backends.
    pub fn over(backend: Arc<dyn ObjectStore>, url: &str) -> Self {
        Self { backend, folder: None, url: url.into() }
    }

    /// The root, as a URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The folder of a `file://` store.
    pub fn folder(&self) -> Option<&FilePath> {
        self.folder.as_deref()
    }

    fn error(&self, action: &'static str, name: &str, message: impl ToString) -> StoreError {
        StoreError { url: self.url.clone(), action, name: name.into(), message: message.to_string() }
    }

    /// The file of an object. The object-store layer writes unusual characters of names as `%5B`, and so must we.
    fn local(&self, name: &str) -> Option<PathBuf> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/_-.".contains(&byte);
        self.folder.as_ref().map(|folder| match name.bytes().all(plain) {
            true => folder.join(name),
            false => folder.join(Path::from(name).as_ref()),
        })
    }

    /// Reads a whole object; `None` where there is none.
    pub async fn read(&self, name: &str) -> Result<Option<Bytes>, StoreError> {
        if let Some(path) = self.local(name) {
            return match read_file(&path) {
                Ok(bytes) => Ok(Some(bytes.into())),
                Err(error) if is_absent(&error) => Ok(None),
                Err(error) => Err(self.error("read", name, error)),
            };
        }
        match self.backend.get_opts(&Path::from(name), GetOptions::default()).await {
            Ok(result) => Ok(Some(result.bytes().await.map_err(|error| self.error("read", name, error))?)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.error("read", name, error)),
        }
    }

    /// Reads part of an object.
    pub async fn read_range(&self, name: &str, offset: u64, length: u64) -> Result<Bytes, StoreError> {
        if let Some(path) = self.local(name) {
            use std::os::unix::fs::FileExt;
            let mut bytes = vec![0; length as usize];
            let file = std::fs::File::open(&path).map_err(|error| self.error("read", name, error))?;
            file.read_exact_at(&mut bytes, offset).map_err(|error| self.error("read", name, error))?;
            return Ok(bytes.into());
        }
        let range = offset..offset + length;
        self.backend.get_range(&Path::from(name), range).await.map_err(|error| self.error("read", name, error))
    }

    /// The size of an object, `None` where there is none.
    pub async fn size_of(&self, name: &str) -> Result<Option<u64>, StoreError> {
        if let Some(path) = self.local(name) {
            return match std::fs::metadata(&path) {
                Ok(metadata) => Ok(Some(metadata.len())),
                Err(error) if is_absent(&error) => Ok(None),
                Err(error) => Err(self.error("look at", name, error)),
            };
        }
        match self.backend.head(&Path::from(name)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.error("look at", name, error)),
        }
    }

    /// Creates an object; `false` where the name is taken. A retried success can look like a conflict, so whoever
    /// needs to know who won compares what is there with what was written.
    pub async fn create(&self, name: &str, bytes: impl Into<Bytes>) -> Result<bool, StoreError> {
        let payload = PutPayload::from_bytes(bytes.into());
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match self.backend.put_opts(&Path::from(name), payload, options).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => Ok(false),
            Err(error) => Err(self.error("write", name, error)),
        }
    }

    /// Writes an object, whether or not it was there.
    pub async fn overwrite(&self, name: &str, bytes: impl Into<Bytes>) -> Result<(), StoreError> {
        let payload = PutPayload::from_bytes(bytes.into());
        let put = self.backend.put(&Path::from(name), payload).await;
        put.map(|_| ()).map_err(|error| self.error("write", name, error))
    }

    /// Names and sizes below a prefix, sorted; names are relative to the prefix.
    pub async fn list(&self, prefix: &str) -> Result<Vec<(String, u64)>, StoreError> {
        let root = Path::from(prefix);
        let listing = self.backend.list(Some(&root)).try_collect::<Vec<_>>().await;
        let mut names: Vec<(String, u64)> = listing
            .map_err(|error| self.error("list", prefix, error))?
            .into_iter()
            .filter_map(|meta| {
                let name: Vec<_> = meta.location.prefix_match(&root)?.map(|part| part.as_ref().to_owned()).collect();
                Some((name.join("/"), meta.size))
            })
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Whether a blob is there.
    pub async fn has_blob(&self, digest: &Digest) -> Result<bool, StoreError> {
        Ok(self.size_of(&blob_name(digest)).await?.is_some())
    }

    /// Stores bytes under their digest.
    pub async fn put_blob(&self, digest: &Digest, bytes: Bytes, again: Again) -> Result<(), StoreError> {
        let name = blob_name(digest);
        if again == Again::No && self.size_of(&name).await? == Some(bytes.len() as u64) {
            return Ok(());
        }
        self.overwrite(&name, bytes).await
    }

    /// Stores a file under its digest. The file is moved where it can be, so it must not be used afterwards.
    pub async fn put_blob_file(&self, digest: &Digest, file: &FilePath, again: Again) -> Result<(), StoreError> {
        let name = blob_name(digest);
        let fail = |error: std::io::Error| self.error("write", &name, format!("{}: {error}", file.display()));
        let length = std::fs::metadata(file).map_err(fail)?.len();
        if again == Again::No && self.size_of(&name).await? == Some(length) {
            return Ok(());
        }
        let Some(target) = self.local(&name) else {
            let bytes = tokio::fs::read(file).await.map_err(fail)?;
            return self.overwrite(&name, bytes).await;
        };
        let (from, to) = (file.to_owned(), target);
        let moved = tokio::task::spawn_blocking(move || move_into_place(&from, &to)).await;
        moved.expect("moving a file does not panic").map_err(fail)
    }

    /// Reads a blob and checks it. `None` where it is missing; a damaged one is set aside and counts as missing, so that
    /// the next run makes it again.
    pub async fn get_blob(&self, digest: &Digest) -> Result<Option<Bytes>, StoreError> {
        let name = blob_name(digest);
        let Some(bytes) = self.read(&name).await? else { return Ok(None) };
        if Digest::of_bytes(&bytes) == *digest {
            return Ok(Some(bytes));
        }
        self.delete(&name).await?;
        Ok(None)
    }

    /// Removes an object: a probe, or one that is damaged, so that nobody mistakes it for a good one.
    pub async fn delete(&self, name: &str) -> Result<(), StoreError> {
        match self.backend.delete(&Path::from(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.error("remove", name, error)),
        }
    }

    /// Copies a blob to a file and checks it on the way; `false` where it is missing or damaged.
    pub async fn fetch_blob(&self, digest: &Digest, target: &FilePath) -> Result<bool, StoreError> {
        let name = blob_name(digest);
        let fail = |error: std::io::Error| self.error("copy", &name, format!("{}: {error}", target.display()));
        if let Some(source) = self.local(&name) {
            let to = target.to_owned();
            let copied = tokio::task::spawn_blocking(move || copy_checked(&source, &to)).await;
            let found = match copied.expect("copying a file does not panic") {
                Ok(found) => found,
                Err(error) if is_absent(&error) => return Ok(false),
                Err(error) => return Err(fail(error)),
            };
            if found != *digest {
                self.delete(&name).await?;
            }
            return Ok(found == *digest);
        }
        let Some(bytes) = self.get_blob(digest).await? else { return Ok(false) };
        tokio::fs::write(target, bytes).await.map_err(fail)?;
        Ok(true)
    }

    /// Whether every blob of an artifact is there; the first that is not, otherwise.
    pub async fn missing_blob(&self, artifact: &Artifact) -> Result<Option<Digest>, StoreError> {
        let Some(size) = self.size_of(&blob_name(&artifact.blob)).await? else { return Ok(Some(artifact.blob)) };
        if artifact.rows.is_some() {
            return Ok((size != artifact.size).then_some(artifact.blob));
        }
        for part in &artifact.parts {
            if !self.has_blob(part).await? {
                return Ok(Some(*part));
            }
        }
        if !artifact.parts.is_empty() {
            return Ok(None);
        }
        let Some(entries) = self.tree_entries(artifact).await? else { return Ok(Some(artifact.blob)) };
        let mut last = None;
        for entry in entries {
            if last != Some(entry.blob) && !self.has_blob(&entry.blob).await? {
                return Ok(Some(entry.blob));
            }
            last = Some(entry.blob);
        }
        Ok(None)
    }

    /// The files of a tree; `None` where the list is missing or damaged.
    pub async fn tree_entries(&self, artifact: &Artifact) -> Result<Option<Vec<tree::Entry>>, StoreError> {
        let Some(bytes) = self.get_blob(&artifact.blob).await? else { return Ok(None) };
        let entries = tree::from_blob(&bytes).map_err(|error| self.error("read", &artifact.blob.to_string(), error))?;
        Ok(Some(entries))
    }

    /// The newest record of a key.
    pub async fn record(&self, key: &Digest) -> Result<Option<(u32, Record)>, StoreError> {
        let (generation, record) = self.newest(key).await?;
        Ok(record.map(|record| (generation, record)))
    }

    /// The newest generation of a key (0 where there is none), and its record, unless that is damaged. Generations have no
    /// holes, so the first absent one ends the search; only where gc has removed the first is there a listing.
    pub async fn newest(&self, key: &Digest) -> Result<(u32, Option<Record>), StoreError> {
        let mut newest = None;
        let mut generation = 1;
        while let Some(bytes) = self.read(&record_name(key, generation)).await? {
            newest = Some((generation, bytes));
            generation += 1;
        }
        if newest.is_none() && self.folder.as_ref().is_none_or(|f| f.join(format!("{LAYOUT}/records/{key}")).exists()) {
            let names = self.list(&format!("{LAYOUT}/records/{key}")).await?;
            let highest = names.iter().filter_map(|(name, _)| name.parse::<u32>().ok()).max();
            if let Some(highest) = highest {
                newest = self.read(&record_name(key, highest)).await?.map(|bytes| (highest, bytes));
            }
        }
        let Some((generation, bytes)) = newest else { return Ok((0, None)) };
        // A damaged record is no record: the stage runs again and writes the next generation.
        let record = serde_json::from_slice::<Record>(&bytes).ok().filter(|record| record.key == *key);
        Ok((generation, record))
    }

    /// Publishes a record as the generation after `after`. Whoever loses the race gets the winner's record.
    pub async fn commit(&self, record: Record, after: u32) -> Result<Commit, StoreError> {
        let bytes = Bytes::from(serde_json::to_vec(&record).expect("records are plain data"));
        let mut generation = after + 1;
        loop {
            let name = record_name(&record.key, generation);
            if self.create(&name, bytes.clone()).await? {
                return Ok(Commit { generation, record, ours: true });
            }
            let Some(there) = self.read(&name).await? else { continue };
            match serde_json::from_slice::<Record>(&there) {
                Ok(other) if other.key == record.key => {
                    let ours = other.nonce == record.nonce;
                    return Ok(Commit { generation, record: other, ours });
                }
                // Damaged: it can never be read again, so go past it.
                _ => generation += 1,
            }
        }
    }

    /// Row segments of a base key, those that win first.
    pub async fn segments(&self, base: &Digest) -> Result<Vec<SegmentName>, StoreError> {
        let folder = format!("{LAYOUT}/rows/{base}");
        if let Some(path) = self.local(&folder)
            && !path.exists()
        {
            return Ok(Vec::new());
        }
        let names = self.list(&folder).await?;
        let mut segments: Vec<SegmentName> =
            names.iter().filter_map(|(name, _)| SegmentName::parse(name.strip_suffix(".parquet")?)).collect();
        segments.sort_unstable();
        Ok(segments)
    }

    /// Reads a row segment and checks it; `None` where it is gone or damaged.
    pub async fn segment(&self, base: &Digest, segment: &SegmentName) -> Result<Option<Bytes>, StoreError> {
        let name = format!("{LAYOUT}/rows/{base}/{segment}.parquet");
        let Some(bytes) = self.read(&name).await? else { return Ok(None) };
        if Digest::of_bytes(&bytes) == segment.digest {
            return Ok(Some(bytes));
        }
        self.delete(&name).await?;
        Ok(None)
    }

    /// Publishes a row segment.
    pub async fn put_segment(&self, base: &Digest, epoch: u32, bytes: Bytes) -> Result<SegmentName, StoreError> {
        let segment = SegmentName { epoch, digest: Digest::of_bytes(&bytes) };
        self.create(&format!("{LAYOUT}/rows/{base}/{segment}.parquet"), bytes).await?;
        Ok(segment)
    }

    /// Writes a run's manifest.
    pub async fn put_run(&self, run: &RunManifest) -> Result<(), StoreError> {
        let bytes = serde_json::to_vec(run).expect("run manifests are plain data");
        self.overwrite(&format!("{LAYOUT}/runs/{}", run.run), bytes).await
    }

    /// A run's manifest.
    pub async fn run(&self, id: &str) -> Result<Option<RunManifest>, StoreError> {
        let name = format!("{LAYOUT}/runs/{id}");
        let Some(bytes) = self.read(&name).await? else { return Ok(None) };
        serde_json::from_slice(&bytes).map(Some).map_err(|error| self.error("read", &name, error))
    }

    /// Run ids, newest first: ids start with the time.
    pub async fn runs(&self) -> Result<Vec<String>, StoreError> {
        let mut names: Vec<String> =
            self.list(&format!("{LAYOUT}/runs")).await?.into_iter().map(|(name, _)| name).collect();
        names.retain(|name| !name.contains('#'));
        names.reverse();
        Ok(names)
    }

    /// Keeps what a stage printed.
    pub async fn put_log(&self, run: &str, name: &str, bytes: Bytes) -> Result<(), StoreError> {
        self.overwrite(&format!("{LAYOUT}/logs/{run}/{name}"), bytes).await
    }

    /// What a stage printed in a run.
    pub async fn log(&self, run: &str, name: &str) -> Result<Option<Bytes>, StoreError> {
        self.read(&format!("{LAYOUT}/logs/{run}/{name}")).await
    }

    /// Names a record's output.
    pub async fn put_tag(&self, name: &str, tag: &str, target: &Tag) -> Result<(), StoreError> {
        let bytes = serde_json::to_vec(target).expect("tags are plain data");
        self.overwrite(&format!("{LAYOUT}/tags/{name}/{tag}"), bytes).await
    }

    /// What a tag names.
    pub async fn tag(&self, name: &str, tag: &str) -> Result<Option<Tag>, StoreError> {
        let name = format!("{LAYOUT}/tags/{name}/{tag}");
        let Some(bytes) = self.read(&name).await? else { return Ok(None) };
        serde_json::from_slice(&bytes).map(Some).map_err(|error| self.error("read", &name, error))
    }
}

/// The name of a blob.
pub fn blob_name(digest: &Digest) -> String {
    let digest = digest.to_string();
    format!("{LAYOUT}/blobs/{}/{digest}", &digest[..2])
}

fn record_name(key: &Digest, generation: u32) -> String {
    format!("{LAYOUT}/records/{key}/{generation:08}")
}

/// Reads a file; most are small, and those take one read and no look at their size.
fn read_file(path: &FilePath) -> std::io::Result<Vec<u8>> {
    const SMALL: usize = 16 * 1024;
    let mut file = std::fs::File::open(path)?;
    let mut bytes = vec![0; SMALL];
    let count = file.read(&mut bytes)?;
    bytes.truncate(count);
    if count == SMALL {
        file.read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

/// Moves a file to its place; where it has another name somewhere, or lies on another disk, copies it under a temporary
/// name first, so that a reader sees all of it or nothing.
fn move_into_place(from: &FilePath, to: &FilePath) -> std::io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    std::fs::create_dir_all(to.parent().expect("blobs lie in a folder"))?;
    let metadata = std::fs::symlink_metadata(from)?;
    // A file with a second name can be changed through it; a blob must not be.
    if metadata.is_file() && metadata.nlink() == 1 && std::fs::rename(from, to).is_ok() {
        return Ok(());
    }
    let partial = unique_neighbour(to);
    let copied = std::fs::copy(from, &partial).and_then(|_| std::fs::rename(&partial, to));
    if copied.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    copied
}

/// A name beside `path` that no listing takes for an object: the object-store layer hides names with `#`.
fn unique_neighbour(path: &FilePath) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.as_os_str().to_owned();
    name.push(format!("#{}{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    name.into()
}

/// Copies (or reflinks) a file and says what the copy's digest is.
fn copy_checked(from: &FilePath, to: &FilePath) -> std::io::Result<Digest> {
    std::fs::copy(from, to)?;
    Digest::of_file(to)
}
