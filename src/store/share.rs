//! From the local tier to the remote one: blobs and row segments first, then the record that names them.

use std::collections::BTreeSet;

use futures::{StreamExt, TryStreamExt};

use super::records::{commit_in, remove_others};
use super::remote_tier::{Hint, Remote};
use super::{
    CONCURRENT, Commit, LAYOUT, Record, SegmentName, Store, StoreError, blob_name, grace, record_name, segment_name,
    shared_name,
};
use crate::artifact::Artifact;
use crate::digest::Digest;

/// Files that go up or come down at the same time; each may be in pieces itself.
const FILES: usize = 16;

/// What a hint is filed under.
fn hint_name(pipeline: &str, params: &Digest) -> String {
    format!("{LAYOUT}/hints/{pipeline}/{params}")
}

impl Store {
    /// Shares a record with all that it names as this generation, or adopts the remote one that is there already.
    pub(super) async fn share(&self, record: Record, generation: u32) -> Result<Commit, StoreError> {
        let remote = self.remote().expect("only stores of two tiers share");
        // A replacement was made because something was missing or damaged; what is there is not trusted.
        self.share_blobs(remote, &record, generation > 1).await?;
        if let Some(base) = &record.base {
            self.share_segments(base).await?;
        }
        let commit = commit_in(&remote.tier, Some(remote), record, generation - 1).await?;
        let key = commit.record.key;
        remote.set_absent(&key, false);
        self.local.overwrite(&record_name(&key, commit.generation), commit.record.to_bytes()).await?;
        remove_others(&self.local, &key, commit.generation).await?;
        if commit.ours || self.confirm(&commit.record).await? {
            remote.add_known(&shared_name(commit.record.id(), commit.generation));
        }
        Ok(commit)
    }

    /// Shares a record that was found locally, unless it is shared: a few at a time, since a run may find thousands.
    pub async fn offer(&self, record: Record, generation: u32) -> Result<Record, StoreError> {
        let Some(remote) = self.remote().filter(|_| !self.is_shared(record.id(), generation)) else {
            return Ok(record);
        };
        let _one = remote.offers.acquire().await.expect("it is never closed");
        if remote.is_found(&record.key) {
            // It is there; its blobs should be, too.
            if !self.confirm(&record).await? {
                self.share_blobs(remote, &record, false).await?;
            }
            remote.add_known(&shared_name(record.id(), generation));
            return Ok(record);
        }
        // Generations of another store mean nothing in this one.
        let after = if remote.is_pending(&record.key) { generation - 1 } else { 0 };
        self.commit(record, after).await.map(|commit| commit.record)
    }

    /// Sees to it that others find an artifact that no record names.
    pub async fn share_artifact(&self, artifact: &Artifact) -> Result<(), StoreError> {
        match self.writable() {
            Some(remote) => self.share_blobs_of(remote, [artifact], false).await,
            None => Ok(()),
        }
    }

    /// Sees to it that others find a file that no record names.
    pub async fn share_file(&self, blob: &Digest) -> Result<(), StoreError> {
        match self.writable() {
            Some(remote) => self.share_blob(remote, blob, false).await,
            None => Ok(()),
        }
    }

    async fn share_blobs(&self, remote: &Remote, record: &Record, again: bool) -> Result<(), StoreError> {
        self.share_blobs_of(remote, record.outputs.values().map(Box::as_ref), again).await
    }

    async fn share_blobs_of(
        &self,
        remote: &Remote,
        artifacts: impl IntoIterator<Item = &Artifact>,
        again: bool,
    ) -> Result<(), StoreError> {
        let mut blobs = Vec::new();
        for artifact in artifacts {
            let found = self.blobs_of(artifact).await?;
            let gone = || self.local.error("share", &artifact.blob.to_string(), "the list of a tree's files is gone");
            blobs.extend(found.ok_or_else(gone)?);
        }
        blobs.sort_unstable();
        blobs.dedup();
        let sending = blobs.into_iter().map(|blob| async move { self.share_blob(remote, &blob, again).await });
        futures::stream::iter(sending).buffer_unordered(FILES).try_collect::<Vec<()>>().await?;
        Ok(())
    }

    /// Uploads a blob, unless it is there and young: an old one might be about to be collected.
    async fn share_blob(&self, remote: &Remote, blob: &Digest, again: bool) -> Result<(), StoreError> {
        let name = blob_name(blob);
        let now = remote.clock().await?;
        let young = |time: f64| (now - time).abs() < grace().as_secs_f64() / 2.0;
        if !again {
            if remote.seen(&name).is_some_and(young) {
                return Ok(());
            }
            let here = self.local.size_of(&name).await?;
            if let Some(meta) = remote.tier.head(&name).await?
                && young(meta.modified)
                && here.is_none_or(|size| size == meta.size)
            {
                remote.add_written(&name, meta.modified);
                return Ok(());
            }
        }
        if self.local.size_of(&name).await?.is_none() && !self.bring(blob).await? {
            return Err(self.local.error("share", &name, "it is gone from both tiers"));
        }
        match self.local.path_of(&name) {
            Some(path) => {
                if !remote.tier.upload(&name, &path, Some(blob)).await? {
                    self.local.delete(&name).await?;
                    return Err(self.local.error("share", &name, "it is damaged, so it was removed; run again"));
                }
                remote.count_up(std::fs::metadata(&path).map_or(0, |metadata| metadata.len()));
            }
            None => {
                let bytes = self.local.read(&name).await?.unwrap_or_default();
                remote.count_up(bytes.len() as u64);
                remote.tier.overwrite(&name, bytes).await?;
            }
        }
        remote.add_written(&name, now);
        Ok(())
    }

    /// Uploads the row segments of a base key that are local only.
    pub async fn share_segments(&self, base: &Digest) -> Result<(), StoreError> {
        let Some(remote) = self.writable() else { return Ok(()) };
        let folder = format!("{LAYOUT}/rows/{base}");
        let local = self.local.list(&folder).await?;
        if local.iter().all(|meta| remote.knows(&format!("{folder}/{}", meta.name))) {
            return Ok(());
        }
        let there: Vec<String> = remote.tier.list(&folder).await?.into_iter().map(|meta| meta.name).collect();
        for meta in local.into_iter().filter(|meta| !there.contains(&meta.name)) {
            let name = format!("{folder}/{}", meta.name);
            let Some(bytes) = self.local.read(&name).await? else { continue };
            let segment = meta.name.strip_suffix(".parquet").and_then(SegmentName::parse);
            if segment.is_none_or(|segment| segment.digest != Digest::of_bytes(&bytes)) {
                // Damaged: whoever needs its rows finds that out.
                continue;
            }
            remote.count_up(bytes.len() as u64);
            let now = remote.clock().await?;
            remote.tier.overwrite(&name, bytes).await?;
            remote.add_written(&name, now);
        }
        there.iter().for_each(|name| remote.add_known(&format!("{folder}/{name}")));
        Ok(())
    }

    /// Whether all that a record names is in the remote tier.
    async fn confirm(&self, record: &Record) -> Result<bool, StoreError> {
        let Some(remote) = self.remote() else { return Ok(true) };
        for artifact in record.outputs.values() {
            // Where the tree's list is not even here, its record is of no use without it.
            let Some(blobs) = self.blobs_of(artifact).await? else { return Ok(false) };
            let unknown: Vec<String> = blobs.iter().map(blob_name).filter(|name| !remote.knows(name)).collect();
            let looks = unknown.clone().into_iter().map(|name| async move { remote.tier.head(&name).await });
            let found = futures::stream::iter(looks).buffered(CONCURRENT).try_collect::<Vec<_>>().await?;
            for (name, meta) in unknown.iter().zip(&found) {
                meta.iter().for_each(|meta| remote.add_written(name, meta.modified));
            }
            if found.iter().any(Option::is_none) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Looks up many keys at once, so that a plan that asks for one after another finds them here.
    pub async fn prefetch(&self, keys: Vec<Digest>) -> Result<(), StoreError> {
        let Some(remote) = self.remote() else { return Ok(()) };
        let looks = keys.into_iter().map(|key| async move {
            if let (generation, Some(record)) = self.newest(&key).await?
                && !self.is_trusted(record.id(), generation)
                && remote.is_found(&key)
                && self.confirm(&record).await?
            {
                remote.add_known(&shared_name(record.id(), generation));
            }
            Ok::<(), StoreError>(())
        });
        futures::stream::iter(looks).buffer_unordered(CONCURRENT).try_collect::<Vec<()>>().await?;
        Ok(())
    }

    /// Notices what changed in the remote tier, and what the last run of this pipeline with these parameters found there.
    pub async fn begin(&self, pipeline: &str, params: &Digest) -> Result<Hint, StoreError> {
        let Some(remote) = self.remote() else { return Ok(Hint::default()) };
        let name = hint_name(pipeline, params);
        let (hint, ()) = futures::try_join!(remote.tier.read(&name), remote.catch_up())?;
        Ok(hint.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default())
    }

    /// Leaves a hint for the next run.
    pub async fn put_hint(&self, pipeline: &str, params: &Digest, hint: &Hint) -> Result<(), StoreError> {
        let Some(remote) = self.writable() else { return Ok(()) };
        let bytes = serde_json::to_vec(hint).expect("hints are plain data");
        remote.tier.overwrite(&hint_name(pipeline, params), bytes).await
    }

    /// Copies a record with all that it names to the local tier; the first blob that is missing or damaged, otherwise.
    pub async fn pull(&self, record: &Record) -> Result<Option<Digest>, StoreError> {
        for artifact in record.outputs.values() {
            let Some(blobs) = self.blobs_of(artifact).await? else { return Ok(Some(artifact.blob)) };
            if let Some(lost) = self.bring_all(blobs).await? {
                return Ok(Some(lost));
            }
        }
        if let Some(base) = &record.base {
            let segments = self.segments(base).await?;
            let bringing = segments.into_iter().map(|segment| async move { self.bring_segment(base, &segment).await });
            futures::stream::iter(bringing).buffered(FILES).try_collect::<Vec<()>>().await?;
        }
        Ok(None)
    }

    /// Copies blobs to the local tier that are not there, several at once; the first that is missing or damaged, otherwise.
    pub async fn bring_all(&self, blobs: impl IntoIterator<Item = Digest>) -> Result<Option<Digest>, StoreError> {
        if !self.has_remote() {
            return Ok(None);
        }
        // Several files can be in one blob.
        let blobs: BTreeSet<Digest> = blobs.into_iter().collect();
        let bringing = blobs.into_iter().map(|blob| async move {
            let there = self.local.size_of(&blob_name(&blob)).await?.is_some() || self.bring(&blob).await?;
            Ok::<_, StoreError>((!there).then_some(blob))
        });
        let lost = futures::stream::iter(bringing).buffered(FILES).try_collect::<Vec<_>>().await?;
        Ok(lost.into_iter().flatten().next())
    }

    async fn bring_segment(&self, base: &Digest, segment: &SegmentName) -> Result<(), StoreError> {
        if self.local.size_of(&segment_name(base, segment)).await?.is_none() {
            self.segment(base, segment).await?;
        }
        Ok(())
    }

    /// Finds out whether the remote tier refuses to create what is there already. Two writers could both believe they won
    /// where it does not.
    pub async fn probe(&self) -> Result<Probe, StoreError> {
        const OFTEN: u32 = 5;
        let tier = self.truth();
        for _ in 0..OFTEN {
            let name = format!("{LAYOUT}/leases/probe-{}", crate::nonce());
            // A retried success looks like a conflict, which is no harm here: what is there decides.
            tier.create_for_real(&name, &b"first"[..]).await?;
            let before = tier.read(&name).await;
            let second = tier.create_for_real(&name, &b"second"[..]).await;
            let after = tier.read(&name).await;
            let _ = tier.delete(&name).await;
            match (before?.as_deref(), second?, after?.as_deref()) {
                (Some(b"first"), false, Some(b"first")) => return Ok(Probe::Keeps),
                (Some(b"first"), true, _) | (Some(b"first"), _, Some(b"second")) => return Ok(Probe::Overwrites),
                // It reported a conflict where nothing was, or something is wrong with the wire.
                _ => {}
            }
        }
        Err(tier.error("probe", LAYOUT, "what is written is not what is read"))
    }
}

/// What a server does with create-if-absent where the object is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// It refuses, as it must.
    Keeps,
    /// It ignores the condition.
    Overwrites,
}
