//! One place that holds objects by name, and does not know what they mean.
//!
//! Small reads and writes of a folder go past the object-store layer, since most stages read and write a few small files.

use std::io::{Read, Write};
use std::path::{Path as FilePath, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};

use super::{StoreError, remote};
use crate::digest::Digest;

/// Larger files go up and come down in pieces of this size, several at once.
const PIECE: u64 = 8 << 20;
/// Pieces of one file on their way at the same time.
const PIECES: usize = 8;
/// Pieces that wait between the disk and the wire.
const AHEAD: usize = 2;
/// How many MiB of files on their way are held in memory.
const ROOM: usize = 256;
/// Files are read, written and digested in steps that stay in a processor's cache. Larger writes would also make Linux look
/// for large free pages, which can take longer than the copying.
const STEP: usize = 128 << 10;
/// Files below this are written at once: another thread's wake-up would take longer.
const SMALL: usize = 64 << 10;
/// S3 takes no more parts than 10,000 an object.
const MOST_PARTS: u64 = 9_000;
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
struct Tries {
    begun: Instant,
    count: u32,
}

impl Tries {
    fn new() -> Self {
        Self { begun: Instant::now(), count: 1 }
    }

    /// Whether to try once more, after a moment.
    async fn again_after(&mut self, error: &object_store::Error) -> bool {
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
    backend: Arc<dyn ObjectStore>,
    folder: Option<PathBuf>,
    url: String,
    single_writer: bool,
    /// One permit is one of `ROOM`.
    room: Arc<Semaphore>,
}

impl Tier {
    /// Opens a folder, and makes it where it does not exist.
    pub fn folder_at(folder: &FilePath) -> Result<Self, StoreError> {
        let url = format!("file://{}", folder.display());
        let fail = |message: String| StoreError::new(&url, "open", "", message);
        std::fs::create_dir_all(folder).map_err(|error| fail(error.to_string()))?;
        let folder = folder.canonicalize().map_err(|error| fail(error.to_string()))?;
        let backend = LocalFileSystem::new_with_prefix(&folder).map_err(|error| fail(error.to_string()))?;
        let url = format!("file://{}", folder.display());
        Ok(Self { folder: Some(folder), ..Self::over(Arc::new(backend), &url) })
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

    /// The folder of a local tier.
    pub fn folder(&self) -> Option<&FilePath> {
        self.folder.as_deref()
    }

    /// An error about an object here.
    pub fn error(&self, action: &'static str, name: &str, message: impl ToString) -> StoreError {
        StoreError::new(&self.url, action, name, message.to_string())
    }

    fn failed(&self, action: &'static str, name: &str, error: object_store::Error) -> StoreError {
        StoreError::of(&self.url, action, name, &error)
    }

    /// The file of an object. The object-store layer writes unusual characters of names as `%5B`, and so must we.
    pub fn local(&self, name: &str) -> Option<PathBuf> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/_-.".contains(&byte);
        // It also writes `..` as `%2E%2E`, which is a name and leads nowhere.
        let stays = |part: &str| !matches!(part, "" | "." | "..");
        self.folder.as_ref().map(|folder| match name.bytes().all(plain) && name.split('/').all(stays) {
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
        if let Some(path) = self.local(name) {
            use std::os::unix::fs::FileExt;
            let mut bytes = vec![0; length as usize];
            let file = std::fs::File::open(&path).map_err(|error| self.error("read", name, error))?;
            file.read_exact_at(&mut bytes, offset).map_err(|error| self.error("read", name, error))?;
            return Ok(bytes.into());
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
        let Some(path) = self.local(name) else { return Ok(self.head(name).await?.map(|meta| meta.size)) };
        match std::fs::metadata(&path) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(self.error("look at", name, error)),
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
        if let Some(path) = self.local(name).filter(|_| bytes.len() < SMALL) {
            return create_file(&path, &bytes).map_err(|error| self.error("write", name, error));
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
        if let Some(path) = self.local(name).filter(|_| bytes.len() < SMALL) {
            return replace_file(&path, &bytes).map_err(|error| self.error("write", name, error));
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
        if self.local(prefix).is_some_and(|folder| !folder.exists()) {
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
        if let Some(path) = self.local(name) {
            return match std::fs::remove_file(&path) {
                Err(error) if !is_absent(&error) => Err(self.error("remove", name, error)),
                _ => Ok(()),
            };
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
        let fail = |error: std::io::Error| self.error("write", name, format!("{}: {error}", file.display()));
        let Some(target) = self.local(name) else {
            return self.overwrite(name, std::fs::read(file).map_err(fail)?).await;
        };
        let from = file.to_owned();
        let moved = tokio::task::spawn_blocking(move || move_into_place(&from, &target)).await;
        moved.expect("moving a file does not panic").map_err(fail)
    }

    /// Sends a file, which stays as it is; `false` where it does not have the digest that it must have, and then nothing
    /// was written.
    pub async fn upload(&self, name: &str, file: &FilePath, digest: Option<&Digest>) -> Result<bool, StoreError> {
        let fail = |error: std::io::Error| self.error("write", name, format!("{}: {error}", file.display()));
        let length = std::fs::metadata(file).map_err(fail)?.len();
        let _room = self.room(length).await;
        if length > PIECE {
            let mut tries = Tries::new();
            loop {
                match self.upload_pieces(name, file, length, digest).await {
                    Ok(is_good) => return Ok(is_good),
                    // The connection broke where below us nobody asks again.
                    Err(Unsent::Store(error)) if tries.again_after(&error).await => {}
                    Err(Unsent::Store(error)) => return Err(self.failed("write", name, error)),
                    Err(Unsent::File(error)) => return Err(fail(error)),
                }
            }
        }
        let from = file.to_owned();
        let read = tokio::task::spawn_blocking(move || {
            let bytes = std::fs::read(from)?;
            Ok((Digest::of_bytes(&bytes), bytes))
        });
        let (found, bytes) = read.await.expect("reading does not panic").map_err(fail)?;
        if digest.is_some_and(|digest| *digest != found) {
            return Ok(false);
        }
        self.overwrite(name, bytes).await.map(|()| true)
    }

    /// Waits until so large a file may be on its way.
    async fn room(&self, length: u64) -> SemaphorePermit<'_> {
        let held = length.min(piece_size(length) * (PIECES + AHEAD) as u64);
        let permits = (held >> 20) + 1;
        self.room.acquire_many(permits.min(ROOM as u64) as u32).await.expect("it is never closed")
    }

    /// Nobody sees the object before its last step, so the digest is made on the way.
    async fn upload_pieces(
        &self,
        name: &str,
        file: &FilePath,
        length: u64,
        digest: Option<&Digest>,
    ) -> Result<bool, Unsent> {
        let source = std::fs::File::open(file)?;
        let mut upload = self.backend.put_multipart(&Path::from(name)).await?;
        let (sender, receiver) = mpsc::channel(AHEAD);
        let reading = tokio::task::spawn_blocking(move || read_pieces(source, length, &sender));
        let pieces = futures::stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
        let sending = pieces.map(|piece| upload.put_part(PutPayload::from_bytes(piece)));
        let sent = sending.buffer_unordered(PIECES).try_collect::<Vec<()>>().await.map_err(Unsent::from);
        // Where sending failed, the channel is closed and reading ends too.
        let read = reading.await.expect("reading does not panic").map_err(Unsent::from);
        match sent.and(read) {
            Ok(found) if digest.is_none_or(|digest| *digest == found) => {
                upload.complete().await?;
                Ok(true)
            }
            ended => {
                // What was sent costs room until it is given up; a lifecycle rule does it where we cannot.
                let _ = upload.abort().await;
                ended.map(|_| false)
            }
        }
    }

    /// Copies an object to a file and says what the copy's digest is; `None` where there is none. A copy that fails may leave
    /// part of a file.
    pub async fn download(&self, name: &str, target: &FilePath) -> Result<Option<Digest>, StoreError> {
        let fail = |error: std::io::Error| self.error("copy", name, format!("{}: {error}", target.display()));
        if let Some(source) = self.local(name) {
            let to = target.to_owned();
            let copied = tokio::task::spawn_blocking(move || copy_checked(&source, &to)).await;
            return match copied.expect("copying a file does not panic") {
                Ok(found) => Ok(Some(found)),
                Err(error) if is_absent(&error) => Ok(None),
                Err(error) => Err(fail(error)),
            };
        }
        // The first piece tells how many there are.
        let path = Path::from(name);
        let first = GetOptions { range: Some(GetRange::Bounded(0..PIECE)), ..GetOptions::default() };
        let (size, first, _room) = match self.backend.get_opts(&path, first).await {
            Ok(result) => {
                let (size, room) = (result.meta.size, self.room(result.meta.size).await);
                (size, result.bytes().await.ok(), room)
            }
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            // An empty object has no range.
            Err(_) => match self.read(name).await? {
                Some(bytes) => (bytes.len() as u64, Some(bytes), self.room(0).await),
                None => return Ok(None),
            },
        };
        let first = match first {
            Some(bytes) if bytes.len() as u64 == size.min(PIECE) => bytes,
            _ => self.read_range(name, 0, size.min(PIECE)).await?,
        };
        if size <= PIECE {
            std::fs::write(target, &first).map_err(fail)?;
            return Ok(Some(Digest::of_bytes(&first)));
        }
        // What has come is written and digested while the rest comes.
        let file = std::fs::File::create(target).map_err(fail)?;
        let (sender, receiver) = mpsc::channel(AHEAD);
        let writing = tokio::task::spawn_blocking(move || write_pieces(file, receiver));
        let rest = (1..size.div_ceil(PIECE)).map(|piece| piece * PIECE);
        let rest = rest.map(|offset| self.read_range(name, offset, PIECE.min(size - offset)));
        let first = futures::stream::once(async { Ok(first) });
        let mut pieces = pin!(first.chain(futures::stream::iter(rest).buffered(PIECES)));
        let read = async {
            while let Some(piece) = pieces.try_next().await? {
                // Where writing failed, it says so itself.
                if sender.send(piece).await.is_err() {
                    break;
                }
            }
            Ok(())
        };
        let read = read.await;
        drop(sender);
        let written = writing.await.expect("writing does not panic").map_err(fail);
        read.and(written).map(Some)
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

/// Why a file did not go up.
enum Unsent {
    Store(object_store::Error),
    File(std::io::Error),
}

impl From<object_store::Error> for Unsent {
    fn from(error: object_store::Error) -> Self {
        Self::Store(error)
    }
}

impl From<std::io::Error> for Unsent {
    fn from(error: std::io::Error) -> Self {
        Self::File(error)
    }
}

fn seconds(meta: &ObjectMeta) -> f64 {
    meta.last_modified.timestamp_millis() as f64 / 1e3
}

/// How large the parts of an upload are.
fn piece_size(length: u64) -> u64 {
    PIECE.max(length.div_ceil(MOST_PARTS))
}

/// Sends the pieces of a file one after another, and says what the digest of all is.
fn read_pieces(mut file: std::fs::File, length: u64, sender: &mpsc::Sender<Bytes>) -> std::io::Result<Digest> {
    let piece = piece_size(length);
    let mut hasher = blake3::Hasher::new();
    let mut left = length;
    while left > 0 {
        let mut bytes = vec![0; piece.min(left) as usize];
        for step in bytes.chunks_mut(STEP) {
            file.read_exact(step)?;
            hasher.update(step);
        }
        left -= bytes.len() as u64;
        if sender.blocking_send(bytes.into()).is_err() {
            break;
        }
    }
    Ok(Digest::finish(&hasher))
}

/// Writes the pieces of a file one after another, and says what the digest of all is.
fn write_pieces(mut file: std::fs::File, mut receiver: mpsc::Receiver<Bytes>) -> std::io::Result<Digest> {
    let mut hasher = blake3::Hasher::new();
    while let Some(bytes) = receiver.blocking_recv() {
        for step in bytes.chunks(STEP) {
            file.write_all(step)?;
            hasher.update(step);
        }
    }
    Ok(Digest::finish(&hasher))
}

/// Writes a file beside where it shall be, under a name that no listing takes for an object.
fn write_neighbour(path: &FilePath, bytes: &[u8]) -> std::io::Result<PathBuf> {
    let partial = unique_neighbour(path);
    let written = match std::fs::write(&partial, bytes) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            std::fs::create_dir_all(path.parent().expect("objects lie in a folder"))?;
            std::fs::write(&partial, bytes)
        }
        written => written,
    };
    if written.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    written.map(|()| partial)
}

/// Makes a file, whole or not at all; `false` where there is one.
fn create_file(path: &FilePath, bytes: &[u8]) -> std::io::Result<bool> {
    let partial = write_neighbour(path, bytes)?;
    let linked = std::fs::hard_link(&partial, path);
    let _ = std::fs::remove_file(&partial);
    match linked {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes a file, whole or not at all, whether or not there is one.
fn replace_file(path: &FilePath, bytes: &[u8]) -> std::io::Result<()> {
    let partial = write_neighbour(path, bytes)?;
    let renamed = std::fs::rename(&partial, path);
    if renamed.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    renamed
}

/// Reads a file; most are small, and those take one read and no look at their size.
fn read_file(path: &FilePath) -> std::io::Result<Vec<u8>> {
    const FIRST: usize = 16 * 1024;
    let mut file = std::fs::File::open(path)?;
    // On the stack: a fresh buffer of this size for each of ten thousand records is mostly page faults.
    let mut first = [0; FIRST];
    let count = file.read(&mut first)?;
    let mut bytes = first[..count].to_vec();
    if count == FIRST {
        file.read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

/// Whether nothing is there, rather than something wrong.
pub fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

/// Moves a file to its place; where it has another name somewhere, or lies on another disk, copies it under a temporary
/// name first, so that a reader sees all of it or nothing.
pub fn move_into_place(from: &FilePath, to: &FilePath) -> std::io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    std::fs::create_dir_all(to.parent().expect("objects lie in a folder"))?;
    let metadata = std::fs::symlink_metadata(from)?;
    // A file with a second name can be changed through it; a blob must not be.
    if metadata.is_file() && metadata.nlink() == 1 {
        // As old as it is here, not as its program says: gc goes by that, by the clock of the file system.
        touch(from)?;
        if std::fs::rename(from, to).is_ok() {
            return Ok(());
        }
    }
    let partial = unique_neighbour(to);
    let copied = std::fs::copy(from, &partial).and_then(|_| std::fs::rename(&partial, to));
    if copied.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    copied
}

/// Makes a file as old as now.
pub fn touch(path: &FilePath) -> std::io::Result<()> {
    use nix::sys::stat::{UtimensatFlags, utimensat};
    use nix::sys::time::TimeSpec;
    let flags = UtimensatFlags::FollowSymlink;
    Ok(utimensat(nix::fcntl::AT_FDCWD, path, &TimeSpec::UTIME_OMIT, &TimeSpec::UTIME_NOW, flags)?)
}

/// A name beside `path` that no listing takes for an object: the object-store layer hides names with `#`.
pub fn unique_neighbour(path: &FilePath) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.as_os_str().to_owned();
    name.push(format!("#{}{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    name.into()
}

/// Copies (or reflinks) a file and says what its digest is. A large one is digested by a second thread meanwhile.
fn copy_checked(from: &FilePath, to: &FilePath) -> std::io::Result<Digest> {
    if std::fs::metadata(from)?.len() < PIECE {
        std::fs::copy(from, to)?;
        return Digest::of_file(to);
    }
    std::thread::scope(|scope| {
        let digest = scope.spawn(|| Digest::of_file(from));
        std::fs::copy(from, to)?;
        digest.join().expect("digesting does not panic")
    })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    /// Bytes of which no two pieces are alike.
    fn bytes(length: u64) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        blake3::Hasher::new().finalize_xof().fill(&mut bytes);
        bytes
    }

    #[tokio::test]
    async fn files_go_up_and_come_down_with_their_digest() {
        let folder = tempfile::tempdir().unwrap();
        let tiers = [Tier::memory(), Tier::folder_at(&folder.path().join("tier")).unwrap()];
        let (file, copy) = (folder.path().join("file"), folder.path().join("copy"));
        for (tier, length) in tiers.iter().flat_map(|tier| [0, 5, PIECE, PIECE + 1, 11 * PIECE + 7].map(|n| (tier, n)))
        {
            let bytes = bytes(length);
            std::fs::write(&file, &bytes).unwrap();
            let digest = Digest::of_bytes(&bytes);
            let name = format!("v1/blobs/{length}");
            assert!(!tier.upload(&name, &file, Some(&Digest::of_bytes(b"another"))).await.unwrap());
            assert_eq!(tier.download(&name, &copy).await.unwrap(), None, "what has another digest is not written");
            assert!(tier.upload(&name, &file, Some(&digest)).await.unwrap());
            assert_eq!(tier.download(&name, &copy).await.unwrap(), Some(digest));
            assert!(std::fs::read(&copy).unwrap() == bytes, "{length} bytes in {}", tier.url());
        }
    }

    #[tokio::test]
    async fn files_wait_until_there_is_room() {
        let tier = Tier::memory();
        let small = tier.room(5).await;
        assert!(tier.room(u64::MAX >> 8).now_or_never().is_none(), "the largest takes all there is");
        let large = [tier.room(1 << 30).await, tier.room(1 << 30).await, tier.room(1 << 30).await];
        assert!(tier.room(1 << 30).now_or_never().is_none());
        drop((small, large));
        assert!(tier.room(u64::MAX >> 8).now_or_never().is_some());
    }
}
