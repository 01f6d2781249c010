//! Blobs: the bytes of results, by their digest.

use std::path::Path as FilePath;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};

use super::files::{self, unique_neighbour};
use super::local::tree_entries;
use super::policy::Sharing;
use super::remote_tier::Remote;
use super::{Again, CONCURRENT, Doubt, Store, StoreError, blob_name};
use crate::artifact::{Artifact, tree};
use crate::digest::Digest;

impl Store {
    /// Whether a blob is there.
    pub async fn has_blob(&self, digest: &Digest) -> Result<bool, StoreError> {
        Ok(self.blob_size(digest).await?.is_some())
    }

    /// The size of a blob, wherever it is.
    async fn blob_size(&self, digest: &Digest) -> Result<Option<u64>, StoreError> {
        let name = blob_name(digest);
        if let Some(size) = self.local.size_of(&name).await? {
            return Ok(Some(size));
        }
        let Some(remote) = self.remote() else { return Ok(None) };
        let meta = remote.tier.head(&name).await?;
        if let Some(meta) = &meta {
            remote.add_written(&name, meta.modified);
        }
        Ok(meta.map(|meta| meta.size))
    }

    /// Stores bytes under their digest: locally, and remotely when the record is committed.
    pub async fn put_blob(&self, digest: &Digest, bytes: Bytes, again: Again) -> Result<(), StoreError> {
        let name = blob_name(digest);
        if again == Again::No && self.local.size_of(&name).await? == Some(bytes.len() as u64) && self.make_young(&name)
        {
            return Ok(());
        }
        self.local.overwrite(&name, bytes).await
    }

    /// Stores a file under its digest. The file is moved where it can be, so it must not be used afterwards.
    pub async fn put_blob_file(&self, digest: &Digest, file: &FilePath, again: Again) -> Result<(), StoreError> {
        let name = blob_name(digest);
        let fail = |error: std::io::Error| self.local.file_error("write", &name, file, &error);
        let length = std::fs::metadata(file).map_err(fail)?.len();
        if again == Again::No && self.local.size_of(&name).await? == Some(length) && self.make_young(&name) {
            return Ok(());
        }
        self.local.put_file(&name, file).await
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

    /// Reads an object that its digest names: from here, else from the remote tier, and then it is kept here.
    pub(super) async fn read_checked(&self, name: &str, digest: &Digest) -> Result<Option<Bytes>, StoreError> {
        let is_good = |bytes: &Bytes| Digest::of_bytes(bytes) == *digest;
        if let Some(bytes) = self.local.read(name).await? {
            if is_good(&bytes) {
                return Ok(Some(bytes));
            }
            self.local.delete(name).await?;
        }
        let bytes = self.read_remote(name, is_good).await?;
        if let Some(bytes) = &bytes {
            self.keep_locally(name, bytes.clone()).await;
        }
        Ok(bytes)
    }

    /// Keeps a copy of what was read. Where it cannot be kept, on a full disk, it is read again next time.
    pub(super) async fn keep_locally(&self, name: &str, bytes: Bytes) {
        if let (Err(error), Some(remote)) = (self.local.overwrite(name, bytes).await, self.remote()) {
            remote.warn(format!("what is read from the shared store is not kept on this machine: {}", error.message));
        }
    }

    /// Reads a remote object. One that is damaged is removed, so that nobody mistakes it for a good one.
    async fn read_remote(&self, name: &str, is_good: impl Fn(&Bytes) -> bool) -> Result<Option<Bytes>, StoreError> {
        let Some(remote) = self.remote() else { return Ok(None) };
        let mut doubt = Doubt::default();
        loop {
            let Some(bytes) = remote.tier.read(name).await? else {
                remote.forget(name);
                return Ok(None);
            };
            if is_good(&bytes) {
                remote.add_known(name);
                remote.count_down(bytes.len() as u64);
                return Ok(Some(bytes));
            }
            if doubt.is_damaged(remote.tier.url(), name, Digest::of_bytes(&bytes))? {
                self.condemn(remote, name).await;
                return Ok(None);
            }
        }
    }

    async fn condemn(&self, remote: &Remote, name: &str) {
        remote.forget(name);
        let removed = match remote.is_read_only() {
            true => "it stays, since nothing is written there".to_owned(),
            false => match remote.tier.delete(name).await {
                Ok(()) => "it was removed".to_owned(),
                Err(error) => format!("it could not be removed: {error}"),
            },
        };
        remote.warn(format!("{}: {name} was damaged; {removed}", remote.tier.url()));
    }

    /// Copies a blob to a file and checks it on the way; `false` where it is missing or damaged.
    pub async fn fetch_blob(&self, digest: &Digest, target: &FilePath) -> Result<bool, StoreError> {
        let name = blob_name(digest);
        if let Some(found) = self.local.download(&name, target).await? {
            if found == *digest {
                self.touch(&name);
                return Ok(true);
            }
            self.local.delete(&name).await?;
        }
        if !self.bring(digest).await? {
            return Ok(false);
        }
        Ok(self.local.download(&name, target).await? == Some(*digest))
    }

    /// Copies a remote blob to the local tier; `false` where it is missing or damaged.
    pub async fn bring(&self, digest: &Digest) -> Result<bool, StoreError> {
        let name = blob_name(digest);
        let Some(remote) = self.remote() else { return Ok(false) };
        let Some(path) = self.local.path_of(&name) else { return Ok(self.get_blob(digest).await?.is_some()) };
        let fail = |error: std::io::Error| StoreError::of_io(self.local.url(), "write", &name, &error);
        std::fs::create_dir_all(path.parent().expect("blobs lie in a folder")).map_err(fail)?;
        let partial = unique_neighbour(&path);
        let mut doubt = Doubt::default();
        loop {
            let found = remote.tier.download(&name, &partial).await;
            if let Ok(Some(found)) = &found
                && found == digest
            {
                remote.count_down(std::fs::metadata(&partial).map_or(0, |metadata| metadata.len()));
                std::fs::rename(&partial, &path).map_err(fail)?;
                remote.add_known(&name);
                return Ok(true);
            }
            let _ = std::fs::remove_file(&partial);
            let Some(found) = found? else {
                remote.forget(&name);
                return Ok(false);
            };
            if doubt.is_damaged(remote.tier.url(), &name, found)? {
                self.condemn(remote, &name).await;
                return Ok(false);
            }
        }
    }

    /// Notes the use of a local object, so that it is not among the first to be evicted. Once an hour is often enough.
    fn touch(&self, name: &str) {
        const OFTEN: Duration = Duration::from_secs(3600);
        if matches!(self.sharing, Sharing::None) {
            return;
        }
        let Some(path) = self.local.path_of(name) else { return };
        let old = |path: &FilePath| {
            std::fs::metadata(path)?.modified().map(|time| time.elapsed().is_ok_and(|age| age > OFTEN))
        };
        if old(&path).unwrap_or(false) {
            let _ = files::touch(&path);
        }
    }

    /// A blob that is used again must not be among those that gc is about to collect; `false` where it cannot be helped, so
    /// that it is written again. How old it is now does not count: the folder may be another machine's, with a clock of its
    /// own.
    fn make_young(&self, name: &str) -> bool {
        self.local.path_of(name).is_none_or(|path| files::touch(&path).is_ok())
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
            match (self.local.size_of(&blob_name(&blob)).await?, self.remote()) {
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
        let wrong = |error: String| self.local.error("read", &artifact.blob.to_string(), error);
        tree_entries(artifact, &bytes).map(Some).map_err(wrong)
    }
}
