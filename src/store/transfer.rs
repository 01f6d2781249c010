//! Files to and from a tier: large ones in pieces, several at once, with their digest made on the way.

use std::io::{Read, Write};
use std::path::Path as FilePath;
use std::pin::pin;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutPayload};
use tokio::sync::{SemaphorePermit, mpsc};

use super::StoreError;
use super::files::{copy_checked, is_absent};
use super::tier::{ROOM, Tier, Tries};
use crate::digest::Digest;

/// Larger files go up and come down in pieces of this size, several at once.
const PIECE: u64 = 8 << 20;
/// Pieces of one file on their way at the same time.
const PIECES: usize = 8;
/// Pieces that wait between the disk and the wire.
const AHEAD: usize = 2;
/// Files are read, written and digested in steps that stay in a processor's cache. Larger writes would also make Linux look
/// for large free pages, which can take longer than the copying.
const STEP: usize = 128 << 10;
/// S3 takes no more parts than 10,000 an object.
const MOST_PARTS: u64 = 9_000;

impl Tier {
    /// Sends a file, which stays as it is; `false` where it does not have the digest that it must have, and then nothing
    /// was written.
    pub async fn upload(&self, name: &str, file: &FilePath, digest: Option<&Digest>) -> Result<bool, StoreError> {
        let fail = |error: std::io::Error| self.file_error("write", name, file, &error);
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
        let fail = |error: std::io::Error| self.file_error("copy", name, target, &error);
        if let Some(source) = self.path_of(name) {
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
