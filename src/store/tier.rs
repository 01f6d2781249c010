//! One place that holds objects by name, and does not know what they mean.
//!
//! Small reads and writes of a folder go past the object-store layer, since most stages read and write a few small files.

use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::sync::Semaphore;

use super::files::move_into_place;
use super::folder::Folder;
use super::{StoreError, remote};

/// How many MiB of files on their way are held in memory.
pub(super) const ROOM: usize = 256;
/// Files below this are written at once: another thread's wake-up would take longer.
const SMALL: usize = 64 << 10;
/// How often something is tried that the layer below does not try again, as a body that broke off…
const TRIES: u32 = 10;
/// …and for how long.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a listing tells of an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Meta {
    /// Relative to the prefix that was listed.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Seconds since 1970, by the server's clock.
    pub modified: f64,
}

/// Tries of one request.
pub(super) struct Tries {
    begun: Instant,
    count: u32,
}

impl Tries {
    pub fn new() -> Self {
        Self { begun: Instant::now(), count: 1 }
    }

    /// Whether to try once more, after a moment.
    pub async fn again_after(&mut self, error: &object_store::Error) -> bool {
        matches!(error, object_store::Error::Generic { .. }) && !remote::is_given_up(error) && self.again().await
    }

    async fn again(&mut self) -> bool {
        let again = self.count < TRIES && self.begun.elapsed() < PATIENCE;
        if again {
            tokio::time::sleep(Duration::from_millis(10) * self.count.pow(2)).await;
            self.count += 1;
        }
        again
    }
}

/// A tier. Cloning shares it.
#[derive(Clone)]
pub struct Tier {
    pub(super) backend: Arc<dyn ObjectStore>,
    folder: Option<Folder>,
    url: String,
    single_writer: bool,
    /// One permit is one of `ROOM`.
    pub(super) room: Arc<Semaphore>,
}

impl Tier {
    /// Opens a folder, and makes it where it does not exist.
    pub fn folder_at(path: &FilePath) -> Result<Self, StoreError> {
        let folder = Folder::open(path)?;
        let backend = LocalFileSystem::new_with_prefix(folder.path());
        let backend = backend.map_err(|error| StoreError::of(folder.url(), "open", "", &error))?;
        Ok(Self { folder: Some(folder.clone()), ..Self::over(Arc::new(backend), folder.url()) })
    }

    /// One that ends with the process.
    pub fn memory() -> Self {
        Self::over(Arc::new(InMemory::new()), "memory://")
    }

    /// Any object store.
    pub fn over(backend: Arc<dyn ObjectStore>, url: &str) -> Self {
        Self { backend, folder: None, url: url.into(), single_writer: false, room: Arc::new(Semaphore::new(ROOM)) }
    }

    /// For servers without create-if-absent: the only writer looks first, and then writes.
    pub fn for_single_writer(self) -> Self {
        Self { single_writer: true, ..self }
    }

    /// The root, as a URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The folder of a tier that is one.
    pub fn folder(&self) -> Option<&Folder> {
        self.folder.as_ref()
    }

    /// An error about an object here.
    pub fn error(&self, action: &'static str, name: &str, message: impl ToString) -> StoreError {
        StoreError::new(&self.url, action, name, message.to_string())
    }

    pub(super) fn failed(&self, action: &'static str, name: &str, error: object_store::Error) -> StoreError {
        StoreError::of(&self.url, action, name, &error)
    }

    /// What the operating system said of a file beside an object here.
    pub(super) fn file_error(
        &self,
        action: &'static str,
        name: &str,
        file: &FilePath,
        error: &std::io::Error,
    ) -> StoreError {
        StoreError::of_io(&self.url, action, name, error).at(file)
    }

    /// The file of an object.
    pub fn path_of(&self, name: &str) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.path_of(name))
    }

    /// Reads a whole object; `None` where there is none.
    pub async fn read(&self, name: &str) -> Result<Option<Bytes>, StoreError> {
        if let Some(folder) = &self.folder {
            return folder.read(name);
        }
        let path = Path::from(name);
        let mut tries = Tries::new();
        loop {
            let body = match self.backend.get_opts(&path, GetOptions::default()).await {
                Ok(result) => result.bytes().await,
                Err(object_store::Error::NotFound { .. }) => return Ok(None),
                // Of an answer that says so the body may break off, too.
                Err(error) if tries.again_after(&error).await => continue,
                Err(error) => return Err(self.failed("read", name, error)),
            };
            match body {
                Ok(bytes) => return Ok(Some(bytes)),
                // The body broke off; the request itself had its retries below us.
                Err(error) if tries.again_after(&error).await => {}
                Err(error) => return Err(self.failed("read", name, error)),
            }
        }
    }

    /// Reads part of an object.
    pub async fn read_range(&self, name: &str, offset: u64, length: u64) -> Result<Bytes, StoreError> {
        if let Some(folder) = &self.folder {
            return folder.read_range(name, offset, length);
        }
        let path = Path::from(name);
        let mut tries = Tries::new();
        loop {
            match self.backend.get_range(&path, offset..offset + length).await {
                Ok(bytes) if bytes.len() as u64 == length => return Ok(bytes),
                Ok(_) if tries.again().await => {}
                Ok(bytes) => return Err(self.error("read", name, format!("{} of {length} bytes came", bytes.len()))),
                Err(error @ object_store::Error::NotFound { .. }) => return Err(self.failed("read", name, error)),
                Err(error) if tries.again_after(&error).await => {}
                Err(error) => return Err(self.failed("read", name, error)),
            }
        }
    }

    /// Size and time of an object, `None` where there is none.
    pub async fn head(&self, name: &str) -> Result<Option<Meta>, StoreError> {
        match self.backend.head(&Path::from(name)).await {
            Ok(meta) => Ok(Some(Meta { name: name.into(), size: meta.size, modified: seconds(&meta) })),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed("look at", name, error)),
        }
    }

    /// The size of an object, `None` where there is none.
    pub async fn size_of(&self, name: &str) -> Result<Option<u64>, StoreError> {
        match &self.folder {
            Some(folder) => folder.size_of(name),
            None => Ok(self.head(name).await?.map(|meta| meta.size)),
        }
    }

    /// Creates an object; `false` where the name is taken. A retried success can look like a conflict, so whoever
    /// needs to know who won compares what is there with what was written.
    pub async fn create(&self, name: &str, bytes: impl Into<Bytes>) -> Result<bool, StoreError> {
        if self.single_writer {
            if self.head(name).await?.is_some() {
                return Ok(false);
            }
            return self.overwrite(name, bytes).await.map(|()| true);
        }
        self.create_for_real(name, bytes).await
    }

    /// Creates an object, also where the server is said not to know how: for finding out.
    pub async fn create_for_real(&self, name: &str, bytes: impl Into<Bytes>) -> Result<bool, StoreError> {
        let bytes: Bytes = bytes.into();
        if let Some(folder) = self.folder.as_ref().filter(|_| bytes.len() < SMALL) {
            return folder.create(name, &bytes);
        }
        let payload = PutPayload::from_bytes(bytes);
        let mut tries = Tries::new();
        loop {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            match self.backend.put_opts(&Path::from(name), payload.clone(), options).await {
                Ok(_) => return Ok(true),
                Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {
                    return Ok(false);
                }
                // The connection broke: below us nobody knows that to ask again is no harm.
                Err(error) if self.folder.is_none() && tries.again_after(&error).await => {}
                Err(error) => return Err(self.failed("write", name, error)),
            }
        }
    }

    /// Writes an object, whether or not it was there.
    pub async fn overwrite(&self, name: &str, bytes: impl Into<Bytes>) -> Result<(), StoreError> {
        let bytes: Bytes = bytes.into();
        if let Some(folder) = self.folder.as_ref().filter(|_| bytes.len() < SMALL) {
            return folder.overwrite(name, &bytes);
        }
        let payload = PutPayload::from_bytes(bytes);
        let mut tries = Tries::new();
        loop {
            match self.backend.put(&Path::from(name), payload.clone()).await {
                Ok(_) => return Ok(()),
                // Servers answer so while two write at once, whatever they were asked.
                Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. })
                    if tries.again().await => {}
                Err(error) => return Err(self.failed("write", name, error)),
            }
        }
    }

    /// Objects below a prefix, sorted by name; names are relative to the prefix.
    pub async fn list(&self, prefix: &str) -> Result<Vec<Meta>, StoreError> {
        if self.path_of(prefix).is_some_and(|folder| !folder.exists()) {
            return Ok(Vec::new());
        }
        let root = Path::from(prefix);
        let mut tries = Tries::new();
        let listing = loop {
            match self.backend.list(Some(&root)).try_collect::<Vec<_>>().await {
                Ok(listing) => break listing,
                // The body broke off, which is not retried below us as requests are.
                Err(error) if tries.again_after(&error).await => {}
                Err(error) => return Err(self.failed("list", prefix, error)),
            }
        };
        let mut found: Vec<Meta> = listing
            .into_iter()
            .filter_map(|meta| {
                let parts: Vec<_> = meta.location.prefix_match(&root)?.map(|part| decoded(part.as_ref())).collect();
                Some(Meta { name: parts.join("/"), size: meta.size, modified: seconds(&meta) })
            })
            .collect();
        found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Removes an object, if it is there.
    pub async fn delete(&self, name: &str) -> Result<(), StoreError> {
        if let Some(folder) = &self.folder {
            return folder.delete(name);
        }
        match self.backend.delete(&Path::from(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed("remove", name, error)),
        }
    }

    /// Removes many objects, in as few requests as the server allows; how many were removed or gone already.
    pub async fn delete_all(&self, names: Vec<String>) -> Result<u64, StoreError> {
        let paths = futures::stream::iter(names.into_iter().map(|name| Ok(Path::from(name)))).boxed();
        let mut ends = self.backend.delete_stream(paths);
        let mut count = 0;
        while let Some(end) = ends.next().await {
            match end {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => count += 1,
                Err(error) => return Err(self.failed("remove", "several objects", error)),
            }
        }
        Ok(count)
    }

    /// Writes a file as an object. Into a folder it is moved where it can be, so it must not be used afterwards.
    pub async fn put_file(&self, name: &str, file: &FilePath) -> Result<(), StoreError> {
        let fail = |error: std::io::Error| self.file_error("write", name, file, &error);
        let Some(target) = self.path_of(name) else {
            return self.overwrite(name, std::fs::read(file).map_err(fail)?).await;
        };
        let from = file.to_owned();
        let moved = tokio::task::spawn_blocking(move || move_into_place(&from, &target)).await;
        moved.expect("moving a file does not panic").map_err(fail)
    }
}

/// A part of a listed name as it was when the object was written, so that it finds the object again: the object-store
/// layer writes unusual characters as `%5B`.
fn decoded(part: &str) -> String {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let [first, after @ ..] = rest {
        let code = after.get(..2).filter(|digits| *first == b'%' && digits.iter().all(u8::is_ascii_hexdigit));
        let code = code.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8(bytes).unwrap_or_else(|_| part.to_owned())
}

fn seconds(meta: &ObjectMeta) -> f64 {
    meta.last_modified.timestamp_millis() as f64 / 1e3
}
