//! Where artifacts live: blobs, records, row segments, run manifests, tags and logs.
//!
//! A store is one tier (a folder), or two: a near folder in front of a far object store that several people share. Then
//! the far one is the truth, and what is near follows it. The layout is in `ARCHITECTURE.md`. Readers trust only records:
//! whatever no record names is invisible, so a writer may die at any instant. Names are created once; only the manifest
//! of a run in progress, tags, hints and leases are overwritten.

pub mod ahead;
pub mod audit;
pub mod checkpoint;
pub mod evict;
pub mod far;
pub mod gc;
pub mod known;
pub mod lease;
pub mod record;
pub mod remote;
pub mod share;
pub mod tier;

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt};
use object_store::ObjectStore;

use crate::artifact::{Artifact, tree};
use crate::digest::Digest;
use crate::name::{TAG_PARTS, is_tag_part};
use ahead::{Ahead, Look};
pub use checkpoint::{Checkpoint, CheckpointName};
use far::Far;
pub use far::Hint;
pub use record::{Commit, Record, RowCounts, RunManifest, SegmentName, StageEntry, Tag};
use tier::Tier;

/// The version of the layout; the first part of every name.
pub const LAYOUT: &str = "v1";
/// How the names of gc's reports of what it deleted start, below `v1/gc`.
pub const DELETED: &str = "deleted-";
/// How long gc waits between finding garbage and deleting it, unless it is told that nobody else is there. A writer
/// counts on a blob that is there only while it is younger than half of that.
pub const GRACE: Duration = Duration::from_secs(24 * 3600);
/// Requests of one kind that are on their way at the same time: enough to hide the latency of a far server.
pub const CONCURRENT: usize = 64;
/// How often a conflict is asked about that names nobody, as S3 answers while two writers race.
const CONFLICTS: u32 = 8;

/// Why the store could not do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("store {url}: {}{message}", self.about())]
pub struct StoreError {
    /// The store.
    pub url: String,
    /// `read`, `write`, `list`…
    pub action: &'static str,
    /// What it was about.
    pub name: String,
    /// What the system said.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl StoreError {
    fn about(&self) -> String {
        if self.name.is_empty() { String::new() } else { format!("{} {}: ", self.action, self.name) }
    }

    /// An error.
    pub fn new(url: &str, action: &'static str, name: &str, message: impl Into<String>) -> Self {
        let message: String = message.into();
        let full = message.contains("No space left") || message.contains("quota exceeded");
        let hint =
            full.then(|| "make room on the disk, or lower `local_max:` in cuda-agent.yaml; then run again".into());
        Self { url: url.into(), action, name: name.into(), message, hint }
    }

    /// What the object-store layer said.
    pub fn of(url: &str, action: &'static str, name: &str, error: &object_store::Error) -> Self {
        if !remote::is_remote(url) {
            return Self::new(url, action, name, error.to_string());
        }
        let told = remote::explain(error);
        Self { hint: told.hint, ..Self::new(url, action, name, told.message) }
    }
}

/// A store. Cloning shares it.
#[derive(Clone)]
pub struct Store {
    near: Tier,
    far: Option<Arc<Far>>,
    /// Of the far tier, also while it is not used.
    url: String,
    offline: bool,
    /// Only what needs no request: what is near and, where there is a far tier, known to be there too.
    quick: bool,
    /// What was looked up already; used while it is quick.
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

/// Tells an object that is damaged from a wire that is: damaged is what reads wrong in the same way again and again. What
/// is damaged is removed for everybody, so twice is not enough: one byte of two that is wrong is often the same.
#[derive(Default)]
pub(crate) struct Doubt {
    last: Option<Digest>,
    same: u32,
    reads: u32,
}

impl Doubt {
    /// Whether an object that was read wrong, as these bytes, is damaged; otherwise it is to be read once more.
    pub fn is_damaged(&mut self, tier: &Tier, name: &str, read: Digest) -> Result<bool, StoreError> {
        const OFTEN: u32 = 12;
        const SURE: u32 = 4;
        self.reads += 1;
        self.same = if self.last.replace(read) == Some(read) { self.same + 1 } else { 1 };
        if self.same == SURE {
            return Ok(true);
        }
        match self.reads < OFTEN {
            true => Ok(false),
            false => {
                let error = tier.error("read", name, "it is different, and wrong, each time it is read");
                Err(StoreError {
                    hint: Some("look at the network, a proxy, or the memory of this machine".into()),
                    ..error
                })
            }
        }
    }
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

    fn of_tier(near: Tier) -> Self {
        Self { url: near.url().to_owned(), near, far: None, offline: false, quick: false, ahead: None }
    }

    /// A near folder in front of a far store; what is known of the latter is kept in `cache`.
    pub fn tiered(near: Tier, far: Tier, cache: &FilePath) -> Self {
        Self::over_far(near, Far::new(far, cache, false))
    }

    /// The same, but nothing is written to the far store.
    pub fn read_only(near: Tier, far: Tier, cache: &FilePath) -> Self {
        Self::over_far(near, Far::new(far, cache, true))
    }

    /// A view of a store that a run can write to without anybody seeing it: what is written stays in `folder`.
    pub fn sketch(&self, folder: &FilePath) -> Result<Self, StoreError> {
        let near = Tier::folder_at(folder)?;
        // Where nothing is shared, what was made here is only here.
        let below = if self.writable().is_some() { self.truth() } else { &self.near };
        Ok(Self::read_only(near, below.clone(), &folder.join("cache")))
    }

    /// Lends a near copy of a blob to another store on the same disk, so that it need not be fetched again.
    pub fn lend(&self, digest: &Digest, to: &Self) {
        let name = blob_name(digest);
        if let (Some(from), Some(to)) = (self.near.local(&name), to.near.local(&name)) {
            let _ = to.parent().map(std::fs::create_dir_all);
            let _ = std::fs::hard_link(from, to);
        }
    }

    fn over_far(near: Tier, far: Far) -> Self {
        Self {
            near,
            url: far.tier.url().to_owned(),
            far: Some(Arc::new(far)),
            offline: false,
            quick: false,
            ahead: None,
        }
    }

    /// The near tier of a store whose far one, of this URL, is not to be asked.
    pub fn offline(near: Tier, url: &str) -> Self {
        Self { near, far: None, url: url.into(), offline: true, quick: false, ahead: None }
    }

    /// This store as far as it is on this machine.
    pub fn nearby(&self) -> Self {
        Self { far: None, ..self.clone() }
    }

    /// This store as far as it answers without a request: for looking up, on any thread.
    pub fn trusted(&self) -> Self {
        Self { quick: true, ..self.clone() }
    }

    /// This store, with what was looked up in it ahead.
    pub fn with(self, ahead: Option<Arc<Ahead>>) -> Self {
        Self { ahead, ..self }
    }

    /// What was looked up ahead.
    pub fn ahead(&self) -> Option<&Arc<Ahead>> {
        self.ahead.as_ref()
    }

    /// Whether only what needs no request is asked for.
    pub fn is_quick(&self) -> bool {
        self.quick
    }

    /// The root, as a URL: of the far tier where there is one.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The folder of a store that is one, or of the near tier.
    pub fn folder(&self) -> Option<&FilePath> {
        self.near.folder()
    }

    /// Whether the far tier is not to be asked.
    pub fn is_offline(&self) -> bool {
        self.offline
    }

    /// The near tier.
    pub fn near(&self) -> &Tier {
        &self.near
    }

    /// The far tier.
    pub fn far(&self) -> Option<&Arc<Far>> {
        self.far.as_ref()
    }

    /// The tier that counts: the far one where there is one.
    pub fn truth(&self) -> &Tier {
        self.far.as_ref().map_or(&self.near, |far| &far.tier)
    }

    /// Whether a blob is there.
    pub async fn has_blob(&self, digest: &Digest) -> Result<bool, StoreError> {
        Ok(self.blob_size(digest).await?.is_some())
    }

    /// The size of a blob, wherever it is.
    async fn blob_size(&self, digest: &Digest) -> Result<Option<u64>, StoreError> {
        let name = blob_name(digest);
        if let Some(size) = self.near.size_of(&name).await? {
            return Ok(Some(size));
        }
        let Some(far) = &self.far else { return Ok(None) };
        let meta = far.tier.head(&name).await?;
        if let Some(meta) = &meta {
            far.add_written(&name, meta.modified);
        }
        Ok(meta.map(|meta| meta.size))
    }

    /// Stores bytes under their digest: near, and far when the record is committed.
    pub async fn put_blob(&self, digest: &Digest, bytes: Bytes, again: Again) -> Result<(), StoreError> {
        let name = blob_name(digest);
        if again == Again::No && self.near.size_of(&name).await? == Some(bytes.len() as u64) && self.make_young(&name) {
            return Ok(());
        }
        self.near.overwrite(&name, bytes).await
    }

    /// Stores a file under its digest. The file is moved where it can be, so it must not be used afterwards.
    pub async fn put_blob_file(&self, digest: &Digest, file: &FilePath, again: Again) -> Result<(), StoreError> {
        let name = blob_name(digest);
        let fail = |error: std::io::Error| self.near.error("write", &name, format!("{}: {error}", file.display()));
        let length = std::fs::metadata(file).map_err(fail)?.len();
        if again == Again::No && self.near.size_of(&name).await? == Some(length) && self.make_young(&name) {
            return Ok(());
        }
        self.near.put_file(&name, file).await
    }

    /// Reads a blob and checks it. `None` where it is missing; a damaged one is set aside and counts as missing, so that
    /// the next run makes it again.
    pub async fn get_blob(&self, digest: &Digest) -> Result<Option<Bytes>, StoreError> {
        self.read_checked(&blob_name(digest), digest).await
    }

    /// Reads a pack of small files and checks it, as [`Self::get_blob`] does. What is larger than any pack is none, and is not
    /// read into memory.
    pub async fn get_pack(&self, digest: &Digest) -> Result<Option<Bytes>, StoreError> {
        match self.blob_size(digest).await? {
            Some(size) if size <= tree::PACK_LIMIT => self.get_blob(digest).await,
            _ => Ok(None),
        }
    }

    /// Reads an object that its digest names: near, else far, and then it is kept near.
    async fn read_checked(&self, name: &str, digest: &Digest) -> Result<Option<Bytes>, StoreError> {
        let is_good = |bytes: &Bytes| Digest::of_bytes(bytes) == *digest;
        if let Some(bytes) = self.near.read(name).await? {
            if is_good(&bytes) {
                return Ok(Some(bytes));
            }
            self.near.delete(name).await?;
        }
        let bytes = self.read_far(name, is_good).await?;
        if let Some(bytes) = &bytes {
            self.keep_near(name, bytes.clone()).await;
        }
        Ok(bytes)
    }

    /// Keeps a copy of what was read. Where it cannot be kept, on a full disk, it is read again next time.
    async fn keep_near(&self, name: &str, bytes: Bytes) {
        if let (Err(error), Some(far)) = (self.near.overwrite(name, bytes).await, &self.far) {
            far.trouble(format!("what is read from the shared store is not kept on this machine: {}", error.message));
        }
    }

    /// Reads a far object. One that is damaged is removed, so that nobody mistakes it for a good one.
    async fn read_far(&self, name: &str, is_good: impl Fn(&Bytes) -> bool) -> Result<Option<Bytes>, StoreError> {
        let Some(far) = &self.far else { return Ok(None) };
        let mut doubt = Doubt::default();
        loop {
            let Some(bytes) = far.tier.read(name).await? else {
                far.forget(name);
                return Ok(None);
            };
            if is_good(&bytes) {
                far.add_known(name);
                far.count_down(bytes.len() as u64);
                return Ok(Some(bytes));
            }
            if doubt.is_damaged(&far.tier, name, Digest::of_bytes(&bytes))? {
                self.condemn(far, name).await;
                return Ok(None);
            }
        }
    }

    async fn condemn(&self, far: &Far, name: &str) {
        far.forget(name);
        let removed = match far.is_read_only() {
            true => "it stays, since nothing is written there".to_owned(),
            false => match far.tier.delete(name).await {
                Ok(()) => "it was removed".to_owned(),
                Err(error) => format!("it could not be removed: {error}"),
            },
        };
        far.trouble(format!("{}: {name} was damaged; {removed}", far.tier.url()));
    }

    /// Copies a blob to a file and checks it on the way; `false` where it is missing or damaged.
    pub async fn fetch_blob(&self, digest: &Digest, target: &FilePath) -> Result<bool, StoreError> {
        let name = blob_name(digest);
        if let Some(found) = self.near.download(&name, target).await? {
            if found == *digest {
                self.touch(&name);
                return Ok(true);
            }
            self.near.delete(&name).await?;
        }
        if !self.bring(digest).await? {
            return Ok(false);
        }
        Ok(self.near.download(&name, target).await? == Some(*digest))
    }

    /// Copies a far blob to the near tier; `false` where it is missing or damaged.
    pub async fn bring(&self, digest: &Digest) -> Result<bool, StoreError> {
        let name = blob_name(digest);
        let Some(far) = &self.far else { return Ok(false) };
        let Some(path) = self.near.local(&name) else { return Ok(self.get_blob(digest).await?.is_some()) };
        let fail = |error: std::io::Error| self.near.error("write", &name, error);
        std::fs::create_dir_all(path.parent().expect("blobs lie in a folder")).map_err(fail)?;
        let partial = tier::unique_neighbour(&path);
        let mut doubt = Doubt::default();
        loop {
            let found = far.tier.download(&name, &partial).await;
            if let Ok(Some(found)) = &found
                && found == digest
            {
                far.count_down(std::fs::metadata(&partial).map_or(0, |metadata| metadata.len()));
                std::fs::rename(&partial, &path).map_err(fail)?;
                far.add_known(&name);
                return Ok(true);
            }
            let _ = std::fs::remove_file(&partial);
            let Some(found) = found? else {
                far.forget(&name);
                return Ok(false);
            };
            if doubt.is_damaged(&far.tier, &name, found)? {
                self.condemn(far, &name).await;
                return Ok(false);
            }
        }
    }

    /// Notes the use of a near object, so that it is not among the first to be evicted. Once an hour is often enough.
    fn touch(&self, name: &str) {
        const OFTEN: Duration = Duration::from_secs(3600);
        if self.far.is_none() && !self.offline {
            return;
        }
        let Some(path) = self.near.local(name) else { return };
        let old = |path: &FilePath| {
            std::fs::metadata(path)?.modified().map(|time| time.elapsed().is_ok_and(|age| age > OFTEN))
        };
        if old(&path).unwrap_or(false) {
            let _ = tier::touch(&path);
        }
    }

    /// A blob that is used again must not be among those that gc is about to collect; `false` where it cannot be helped, so
    /// that it is written again. How old it is now does not count: the folder may be another machine's, with a clock of its
    /// own.
    fn make_young(&self, name: &str) -> bool {
        self.near.local(name).is_none_or(|path| tier::touch(&path).is_ok())
    }

    /// Whether every blob of an artifact is there; the first that is not, otherwise.
    pub async fn missing_blob(&self, artifact: &Artifact) -> Result<Option<Digest>, StoreError> {
        if artifact.rows.is_some() {
            let size = self.blob_size(&artifact.blob).await?;
            return Ok((size != Some(artifact.size)).then_some(artifact.blob));
        }
        let Some(blobs) = self.blobs_of(artifact).await? else { return Ok(Some(artifact.blob)) };
        let mut unsure = Vec::new();
        for blob in blobs {
            match (self.near.size_of(&blob_name(&blob)).await?, &self.far) {
                (Some(_), _) => {}
                (None, Some(_)) => unsure.push(blob),
                (None, None) => return Ok(Some(blob)),
            }
        }
        let looks = unsure.into_iter().map(|blob| async move { Ok((blob, self.has_blob(&blob).await?)) });
        let mut looks = futures::stream::iter(looks).buffered(CONCURRENT);
        while let Some((blob, there)) = looks.try_next().await? {
            if !there {
                return Ok(Some(blob));
            }
        }
        Ok(None)
    }

    /// The blobs of an artifact, each once; `None` where the list of a tree's files is missing or damaged.
    pub async fn blobs_of(&self, artifact: &Artifact) -> Result<Option<Vec<Digest>>, StoreError> {
        let mut blobs = vec![artifact.blob];
        blobs.extend(&artifact.parts);
        if artifact.rows.is_none() && artifact.parts.is_empty() {
            let Some(entries) = self.tree_entries(artifact).await? else { return Ok(None) };
            blobs.extend(entries.iter().map(|entry| entry.blob));
        }
        blobs.sort_unstable();
        blobs.dedup();
        Ok(Some(blobs))
    }

    /// The files of a tree; `None` where the list is missing or damaged.
    pub async fn tree_entries(&self, artifact: &Artifact) -> Result<Option<Vec<tree::Entry>>, StoreError> {
        let Some(bytes) = self.get_blob(&artifact.blob).await? else { return Ok(None) };
        let wrong = |error: &dyn std::fmt::Display| self.near.error("read", &artifact.blob.to_string(), error);
        let entries = tree::from_blob(&bytes).map_err(|error| wrong(&error))?;
        match tree::digest(&entries) == artifact.digest {
            true => Ok(Some(entries)),
            false => Err(wrong(&"the list of a tree's files is not that of the tree")),
        }
    }

    /// The newest record of a key.
    pub async fn record(&self, key: &Digest) -> Result<Option<(u32, Record)>, StoreError> {
        let (generation, record) = self.newest(key).await?;
        // Where a stage is looked up, its pre-image is compared; who comes by the key alone has nothing to compare.
        Ok(record.filter(Record::is_of_its_key).map(|record| (generation, record)))
    }

    /// The newest generation of a key (0 where there is none), and its record, unless that is damaged.
    pub async fn newest(&self, key: &Digest) -> Result<(u32, Option<Record>), StoreError> {
        let near = newest_in(&self.near, key, None).await?;
        let Some(far) = &self.far else { return Ok(near) };
        let is_known = |record: &Record| near.0 >= far.replaced(key) && far.knows(&shared_name(record, near.0));
        if self.quick {
            return Ok(if near.1.as_ref().is_some_and(is_known) { near } else { (0, None) });
        }
        far.catch_up().await?;
        if near.1.as_ref().is_some_and(is_known) || far.is_absent(key) {
            return Ok(near);
        }
        // A folder that is only read may have had replacements without any announcement.
        let announced = far.tier.folder().is_none().then(|| far.replaced(key));
        let there = newest_in(&far.tier, key, announced).await?;
        match &there {
            // What is here alone is shared later.
            (0, _) => {
                far.set_absent(key, true);
                return Ok(near);
            }
            // What was made here to replace it, but could not yet, goes before it; and what is damaged there may be good here.
            (generation, found) if near.1.is_some() && near.0 >= *generation => {
                let own = near.0 > *generation && (far.is_pending(key) || far.is_read_only());
                if own || found.is_none() {
                    return Ok(near);
                }
            }
            _ => {}
        }
        if let (generation, Some(record)) = &there {
            far.set_found(key);
            self.keep_near(&record_name(key, *generation), record.to_bytes()).await;
            remove_others(&self.near, key, *generation).await?;
        }
        Ok(there)
    }

    /// What a key has, and whether its blobs are there.
    pub async fn look(&self, key: &Digest) -> Result<Look, StoreError> {
        if let Some(look) = self.ahead.as_ref().filter(|_| self.quick).and_then(|ahead| ahead.take(key)) {
            return Ok(look);
        }
        let (generation, record) = self.newest(key).await?;
        let Some(record) = record else { return Ok(Look { generation, record: None }) };
        let mut missing = None;
        // What is known to be shared is shared with all its blobs.
        for (port, artifact) in record.outputs.iter().filter(|_| !self.is_trusted(&record, generation)) {
            if self.missing_blob(artifact).await?.is_some() {
                missing = Some(port.clone());
                break;
            }
        }
        Ok(Look { generation, record: Some((record, missing)) })
    }

    /// Whether a record that was found need not be shared: it is known to be, or there is nobody to share it with.
    pub fn is_shared(&self, record: &Record, generation: u32) -> bool {
        self.writable().is_none() || self.is_trusted(record, generation)
    }

    /// A blob of a key's record is missing or damaged: it is looked at again before anybody trusts it.
    pub async fn distrust(&self, key: &Digest) -> Result<(), StoreError> {
        let Some(far) = &self.far else { return Ok(()) };
        if let (generation, Some(record)) = newest_in(&self.near, key, None).await? {
            far.forget(&shared_name(&record, generation));
        }
        Ok(())
    }

    /// Makes every machine forget what it knows of the shared store, as after a gc.
    pub async fn distrust_all(&self) -> Result<(), StoreError> {
        let Some(far) = self.writable() else { return Ok(()) };
        far.tier.overwrite(&format!("{LAYOUT}/gc/{DELETED}{}", crate::run_id()), &b"{}"[..]).await
    }

    /// The far tier, where results go there.
    fn writable(&self) -> Option<&Arc<Far>> {
        self.far.as_ref().filter(|far| !far.is_read_only())
    }

    /// Whether a record is known to be far, with all its blobs.
    pub fn is_trusted(&self, record: &Record, generation: u32) -> bool {
        self.far.as_ref().is_some_and(|far| far.knows(&shared_name(record, generation)))
    }

    /// Publishes a record as the generation after `after`. Whoever loses the race gets the winner's record. Where the far
    /// tier cannot be written, the record stays near, and [`Far::unshared`] has it.
    pub async fn commit(&self, record: Record, after: u32) -> Result<Commit, StoreError> {
        let Some(far) = self.writable() else { return commit_in(&self.near, None, record, after).await };
        match self.share(record.clone(), after + 1).await {
            Ok(commit) => {
                far.set_shared(&record.key);
                Ok(commit)
            }
            Err(error) => {
                far.set_unshared(&record.key, &error);
                self.near.overwrite(&record_name(&record.key, after + 1), record.to_bytes()).await?;
                Ok(Commit { generation: after + 1, record, ours: true })
            }
        }
    }

    /// Row segments of a base key, those that win first.
    pub async fn segments(&self, base: &Digest) -> Result<Vec<SegmentName>, StoreError> {
        let folder = format!("{LAYOUT}/rows/{base}");
        let mut names = self.near.list(&folder).await?;
        if let Some(far) = &self.far {
            let there = far.tier.list(&folder).await?;
            there.iter().for_each(|meta| far.add_known(&format!("{folder}/{}", meta.name)));
            names.extend(there);
        }
        let mut segments: Vec<SegmentName> =
            names.iter().filter_map(|meta| SegmentName::parse(meta.name.strip_suffix(".parquet")?)).collect();
        segments.sort_unstable();
        segments.dedup();
        Ok(segments)
    }

    /// Reads a row segment and checks it; `None` where it is gone or damaged.
    pub async fn segment(&self, base: &Digest, segment: &SegmentName) -> Result<Option<Bytes>, StoreError> {
        self.read_checked(&segment_name(base, segment), &segment.digest).await
    }

    /// Publishes a row segment. Where the far tier cannot be written, it stays near until the stage's record is shared.
    pub async fn put_segment(&self, base: &Digest, epoch: u32, bytes: Bytes) -> Result<SegmentName, StoreError> {
        let segment = SegmentName { epoch, digest: Digest::of_bytes(&bytes) };
        let name = segment_name(base, &segment);
        self.near.create(&name, bytes.clone()).await?;
        if let Some(far) = self.writable() {
            match far.tier.overwrite(&name, bytes).await {
                // How old it is counts only for gc, which asks the server.
                Ok(()) => far.add_known(&name),
                Err(error) => far.trouble(format!("finished rows stay on this machine for now: {error}")),
            }
        }
        Ok(segment)
    }

    /// Writes a run's manifest.
    pub async fn put_run(&self, run: &RunManifest) -> Result<(), StoreError> {
        let name = format!("{LAYOUT}/runs/{}", run.run);
        let bytes = Bytes::from(serde_json::to_vec(run).expect("run manifests are plain data"));
        self.near.overwrite(&name, bytes.clone()).await?;
        self.also_far(&name, bytes).await;
        Ok(())
    }

    /// Writes far what is near already; where that fails, users are told, and nothing else.
    async fn also_far(&self, name: &str, bytes: Bytes) {
        if let Some(far) = self.writable()
            && let Err(error) = far.tier.overwrite(name, bytes).await
        {
            far.trouble(error.to_string());
        }
    }

    /// A run's manifest.
    pub async fn run(&self, id: &str) -> Result<Option<RunManifest>, StoreError> {
        let name = format!("{LAYOUT}/runs/{id}");
        let parse = |bytes: Option<Bytes>| -> Result<Option<RunManifest>, StoreError> {
            let Some(bytes) = bytes else { return Ok(None) };
            let run: RunManifest =
                serde_json::from_slice(&bytes).map_err(|error| self.near.error("read", &name, error))?;
            match run.run == id {
                true => Ok(Some(run)),
                false => Err(self.near.error("read", &name, format!("it is the manifest of {:?}", run.run))),
            }
        };
        let near = parse(self.near.read(&name).await?)?;
        match &self.far {
            // One that still goes on may go on elsewhere.
            Some(far) if near.as_ref().is_none_or(|run| run.ended_at.is_none()) => {
                Ok(parse(far.tier.read(&name).await?)?.or(near))
            }
            _ => Ok(near),
        }
    }

    /// Removes what this machine kept of runs that gc deleted from the shared store.
    pub async fn forget_runs(&self, runs: &[String]) -> Result<(), StoreError> {
        if self.far.is_some() {
            self.near.delete_all(runs.iter().map(|run| format!("{LAYOUT}/runs/{run}")).collect()).await?;
        }
        Ok(())
    }

    /// Run ids, newest first: ids start with the time.
    pub async fn runs(&self) -> Result<Vec<String>, StoreError> {
        let folder = format!("{LAYOUT}/runs");
        let mut found = self.near.list(&folder).await?;
        if let Some(far) = &self.far {
            found.extend(far.tier.list(&folder).await?);
        }
        let mut names: Vec<String> = found.into_iter().map(|meta| meta.name).collect();
        names.retain(|name| !name.contains('#'));
        names.sort_unstable_by(|a, b| b.cmp(a));
        names.dedup();
        Ok(names)
    }

    /// Manifests of at most so many runs, newest first, a few of them fetched ahead. One that cannot be read is left out.
    pub async fn manifests(&self, most: usize) -> Result<impl Stream<Item = RunManifest>, StoreError> {
        const AHEAD: usize = 16;
        let ids = self.runs().await?.into_iter().take(most);
        let reading = ids.map(move |id| async move { self.run(&id).await.ok().flatten() });
        Ok(Box::pin(futures::stream::iter(reading).buffered(AHEAD).filter_map(std::future::ready)))
    }

    /// This machine's part of the store, where it has any runs: what somebody did here is what they mean by "the last run".
    pub async fn own(&self) -> Result<Self, StoreError> {
        let nearby = self.nearby();
        Ok(if nearby.runs().await?.is_empty() { self.clone() } else { nearby })
    }

    /// Keeps what a stage printed.
    pub async fn put_log(&self, run: &str, name: &str, bytes: Bytes) -> Result<(), StoreError> {
        let name = format!("{LAYOUT}/logs/{run}/{name}");
        self.near.overwrite(&name, bytes.clone()).await?;
        self.also_far(&name, bytes).await;
        Ok(())
    }

    /// Shares a log that was written to the near tier directly.
    pub async fn share_log(&self, run: &str, name: &str) -> Result<(), StoreError> {
        let name = format!("{LAYOUT}/logs/{run}/{name}");
        if self.far.is_some()
            && let Some(bytes) = self.near.read(&name).await?
        {
            self.also_far(&name, bytes).await;
        }
        Ok(())
    }

    /// What a stage printed in a run.
    pub async fn log(&self, run: &str, name: &str) -> Result<Option<Bytes>, StoreError> {
        self.read(&format!("{LAYOUT}/logs/{run}/{name}")).await
    }

    /// Reads an object that is not checked by a digest: near, else far.
    pub async fn read(&self, name: &str) -> Result<Option<Bytes>, StoreError> {
        match (self.near.read(name).await?, &self.far) {
            (None, Some(far)) => far.tier.read(name).await,
            (near, _) => Ok(near),
        }
    }

    /// Names a record's output. What is named must be shared.
    pub async fn put_tag(&self, name: &str, tag: &str, target: &Tag) -> Result<(), StoreError> {
        if self.offline || self.far.is_some() && self.writable().is_none() {
            let error =
                self.near.error("tag", &format!("{name}@{tag}"), "tags are for everybody, and nothing is shared now");
            return Err(StoreError { hint: Some("tag it without --offline and --read-only".into()), ..error });
        }
        let name = self.tag_name(name, tag)?;
        let bytes = Bytes::from(serde_json::to_vec(target).expect("tags are plain data"));
        if let Some(far) = &self.far {
            far.tier.overwrite(&name, bytes.clone()).await?;
        }
        self.near.overwrite(&name, bytes).await
    }

    /// Where a tag lies; one that would lie elsewhere is refused.
    fn tag_name(&self, name: &str, tag: &str) -> Result<String, StoreError> {
        if is_tag_part(name) && is_tag_part(tag) {
            return Ok(format!("{LAYOUT}/tags/{name}/{tag}"));
        }
        let error = self.near.error("tag", &format!("{name}@{tag}"), "that is no NAME@TAG");
        Err(StoreError { hint: Some(TAG_PARTS.into()), ..error })
    }

    /// Every tag, as `name@tag`.
    pub async fn tags(&self) -> Result<Vec<String>, StoreError> {
        let found = self.truth().list(&format!("{LAYOUT}/tags")).await?;
        let mut names: Vec<String> = found
            .iter()
            .filter_map(|meta| meta.name.split_once('/'))
            .map(|(name, tag)| format!("{name}@{tag}"))
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    /// What a tag names.
    pub async fn tag(&self, name: &str, tag: &str) -> Result<Option<Tag>, StoreError> {
        let name = self.tag_name(name, tag)?;
        let Some(bytes) = self.truth().read(&name).await? else { return Ok(None) };
        if self.far.is_some() {
            self.keep_near(&name, bytes.clone()).await;
        }
        serde_json::from_slice(&bytes).map(Some).map_err(|error| self.near.error("read", &name, error))
    }
}

/// The scheme and the rest of a URL with one slash too few: `s3:/bucket` would be a folder of that name.
fn mistyped(url: &str) -> Option<(&str, &str)> {
    let is_word = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    url.split_once(":/").filter(|(scheme, _)| is_word(scheme))
}

/// The newest generation of a key in a tier. Generations have no holes, so the first absent one ends the search; only where
/// the first asked for is missing is there a listing: gc deletes from the lowest up, and one that was announced may never
/// have come. In a far tier replacements are announced, so there one question is enough.
async fn newest_in(tier: &Tier, key: &Digest, announced: Option<u32>) -> Result<(u32, Option<Record>), StoreError> {
    let mut newest = None;
    let mut generation = announced.unwrap_or(1).max(1);
    while let Some(record) = read_record(tier, key, generation).await? {
        newest = Some((generation, record));
        generation += 1;
        if announced.is_some() {
            break;
        }
    }
    // A damaged record is no record: the stage runs again and writes the next generation.
    if let Some(newest) = newest {
        return Ok(newest);
    }
    let folder = format!("{LAYOUT}/records/{key}");
    let may_have_others = match (announced, tier.local(&folder)) {
        (Some(announced), _) => announced > 1,
        (None, Some(folder)) => folder.exists(),
        (None, None) => true,
    };
    if may_have_others {
        let names = tier.list(&folder).await?;
        let highest = names.iter().filter_map(|meta| meta.name.parse::<u32>().ok()).max();
        if let Some(highest) = highest {
            newest = read_record(tier, key, highest).await?.map(|record| (highest, record));
        }
    }
    Ok(newest.unwrap_or((0, None)))
}

/// Reads a record: `None` where there is none, and none in it where what is there is damaged.
async fn read_record(tier: &Tier, key: &Digest, generation: u32) -> Result<Option<Option<Record>>, StoreError> {
    let name = record_name(key, generation);
    let mut doubt = Doubt::default();
    loop {
        let Some(bytes) = tier.read(&name).await? else { return Ok(None) };
        let record = Record::from_bytes(&bytes).filter(|record| record.key == *key && record.is_sound());
        if record.is_some() || doubt.is_damaged(tier, &name, Digest::of_bytes(&bytes))? {
            return Ok(Some(record));
        }
    }
}

/// Removes what a near tier holds of a key besides a generation.
async fn remove_others(tier: &Tier, key: &Digest, generation: u32) -> Result<(), StoreError> {
    let folder = format!("{LAYOUT}/records/{key}");
    for meta in tier.list(&folder).await? {
        if meta.name.parse::<u32>().is_ok_and(|other| other != generation) {
            tier.delete(&format!("{folder}/{}", meta.name)).await?;
        }
    }
    Ok(())
}

/// Publishes a record in a tier as the generation after `after`; whoever loses the race gets the winner's record. In a far
/// tier, replacements are announced before they come.
async fn commit_in(tier: &Tier, far: Option<&Far>, record: Record, after: u32) -> Result<Commit, StoreError> {
    let bytes = record.to_bytes();
    let mut generation = after + 1;
    let mut conflicts = 0;
    loop {
        if let Some(far) = far
            && generation > 1
            && far.replaced(&record.key) < generation
        {
            far.announce(&record.key, generation).await?;
        }
        let name = record_name(&record.key, generation);
        if tier.create(&name, bytes.clone()).await? {
            return Ok(Commit { generation, record, ours: true });
        }
        match read_record(tier, &record.key, generation).await? {
            Some(Some(other)) => {
                let ours = other.nonce == record.nonce;
                return Ok(Commit { generation, record: other, ours });
            }
            // Damaged: it can never be read again, so go past it.
            Some(None) => generation += 1,
            None if conflicts == CONFLICTS => {
                return Err(tier.error(
                    "write",
                    &name,
                    "the server reports a conflict with an object that is not there",
                ));
            }
            None => {
                tokio::time::sleep(Duration::from_millis(20 << conflicts)).await;
                conflicts += 1;
            }
        }
    }
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
pub fn shared_name(record: &Record, generation: u32) -> String {
    format!("{}#{}", record_name(&record.key, generation), record.nonce)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_reads_wrong_in_the_same_way_is_damaged_and_what_differs_is_the_wire() {
        let store = Store::memory();
        let reads = |contents: &[u8]| {
            let mut doubt = Doubt::default();
            let mut looks =
                contents.iter().map(|content| doubt.is_damaged(&store.near, "it", Digest::of_bytes(&[*content])));
            looks.find(|look| !matches!(look, Ok(false))).map(|look| look.map_err(|error| error.to_string()))
        };
        assert_eq!(reads(&[1, 1, 1, 1]), Some(Ok(true)));
        assert_eq!(reads(&[1, 1, 1, 2, 2, 1, 1, 1]), None, "a byte of two that is wrong is often the same");
        let error = reads(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]).unwrap().unwrap_err();
        assert!(error.contains("it is different, and wrong, each time it is read"), "{error}");
    }
}
