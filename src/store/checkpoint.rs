//! Checkpoints of stages that are being made: what another machine goes on from.
//!
//! A checkpoint is a folder of files, told of by a program and complete by then. Its list lies at
//! `v1/checkpoints/<base key>/<order>-<digest of the list>`, and each file is a blob, sent piece by piece from where it
//! lies and fetched to where it belongs: neither memory nor the local tier holds it. Like a record, a list is written when
//! its blobs are there. It stays as long as a record or a kept run has its base key.

use std::path::{Path as FilePath, PathBuf};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};

use super::tier::Tier;
use super::{Doubt, LAYOUT, Store, StoreError, blob_name, gc, grace};
use crate::artifact::tree::{self, is_harmless};
use crate::digest::Digest;
use crate::off_loop;

/// So many of a base key stay: where the newest is damaged, there is another.
const KEEP: usize = 2;
/// Files that go up or come down at the same time.
const FILES: usize = 4;

/// How the names of folders start that hold a checkpoint while it is fetched.
pub const PARTIAL: &str = ".partial-";

/// What is stored of a checkpoint besides its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// 1.
    pub schema: u32,
    /// How far it goes.
    pub order: u64,
    /// Where it lies in the state folder.
    pub path: String,
    /// The run that made it.
    pub run: String,
    /// Its files, sorted by path.
    pub files: Vec<CheckpointFile>,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointFile {
    /// In the checkpoint's folder.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Its digest, which names the blob.
    pub blob: Digest,
}

/// The name of a checkpoint's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointName {
    /// How far it goes.
    pub order: u64,
    /// Digest of the list's bytes.
    pub digest: Digest,
}

impl CheckpointName {
    /// Reads `0000000012-<digest>`.
    pub fn parse(text: &str) -> Option<Self> {
        let (order, digest) = text.split_once('-')?;
        Some(Self { order: order.parse().ok()?, digest: digest.parse().ok()? })
    }

    /// Where the list of a base key's checkpoint lies.
    pub fn of(&self, base: &Digest) -> String {
        format!("{}/{:010}-{}", folder(base), self.order, self.digest)
    }
}

fn folder(base: &Digest) -> String {
    format!("{LAYOUT}/checkpoints/{base}")
}

impl Checkpoint {
    /// Bytes of all files.
    pub fn size(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }

    /// Whoever can write to the store can write anything, and the paths become files.
    fn is_sound(&self) -> bool {
        let plain = |path: &str| !path.is_empty() && is_harmless(path);
        plain(&self.path)
            && self.files.iter().all(|file| plain(&file.path))
            && self.files.windows(2).all(|pair| pair[0].path < pair[1].path)
    }

    /// Reads a list; `None` where it is gone or damaged.
    pub(super) async fn read(tier: &Tier, base: &Digest, name: &CheckpointName) -> Result<Option<Self>, StoreError> {
        let path = name.of(base);
        let mut doubt = Doubt::default();
        loop {
            let Some(bytes) = tier.read(&path).await? else { return Ok(None) };
            let found = Digest::of_bytes(&bytes);
            if found == name.digest {
                let list = gc::parse::<Self>(tier, &path, &bytes)?;
                return Ok(list.filter(|list| list.is_sound() && list.order == name.order));
            }
            if doubt.is_damaged(tier.url(), &path, found)? {
                return Ok(None);
            }
        }
    }
}

impl Store {
    /// The tier that checkpoints are shared through; `None` where nothing may be written now.
    fn shared(&self) -> Option<&Tier> {
        match self.remote() {
            Some(_) => self.writable().map(|remote| &remote.tier),
            None => (!self.is_offline()).then_some(&self.local),
        }
    }

    /// Stores the checkpoint in the folder `path` of `state`, and forgets older ones of the base key. The folder must stay as
    /// it is meanwhile. `None` where nothing can be shared now.
    pub async fn put_checkpoint(
        &self,
        base: &Digest,
        order: u64,
        (state, path): (&FilePath, &str),
        run: &str,
    ) -> Result<Option<Checkpoint>, StoreError> {
        let Some(tier) = self.shared() else { return Ok(None) };
        let root = state.join(path);
        let fail = |error: String| tier.error("share", path, error);
        let scanned = off_loop(move || scan(&root)).await.map_err(fail)?;
        let files: Vec<CheckpointFile> = scanned.iter().map(|(file, _)| file.clone()).collect();
        let sending = scanned.into_iter().map(|(file, source)| async move { self.send(tier, &file, &source).await });
        futures::stream::iter(sending).buffer_unordered(FILES).try_collect::<Vec<()>>().await?;
        let checkpoint = Checkpoint { schema: 1, order, path: path.to_owned(), run: run.to_owned(), files };
        let bytes = Bytes::from(serde_json::to_vec(&checkpoint).expect("checkpoints are plain data"));
        let name = CheckpointName { order, digest: Digest::of_bytes(&bytes) };
        tier.overwrite(&name.of(base), bytes).await?;
        // Those of a longer run are somebody else's; whose order is ours was made again.
        let older = self.checkpoints(base).await?.into_iter().filter(|other| other.order <= order && *other != name);
        for old in older.skip(KEEP - 1) {
            tier.delete(&old.of(base)).await?;
        }
        Ok(Some(checkpoint))
    }

    /// Removes the lists of a base key; their files go with the next gc.
    pub async fn forget_checkpoints(&self, base: &Digest) -> Result<(), StoreError> {
        let Some(tier) = self.shared() else { return Ok(()) };
        for name in self.checkpoints(base).await? {
            tier.delete(&name.of(base)).await?;
        }
        Ok(())
    }

    /// Sends a file, unless it is there and young: an old one might be about to be collected.
    async fn send(&self, tier: &Tier, file: &CheckpointFile, source: &FilePath) -> Result<(), StoreError> {
        let name = blob_name(&file.blob);
        if let Some(meta) = tier.head(&name).await? {
            let now = match self.remote() {
                Some(remote) => remote.clock().await?,
                None => crate::now(),
            };
            if meta.size == file.size && (now - meta.modified).abs() < grace().as_secs_f64() / 2.0 {
                return Ok(());
            }
        }
        if !tier.upload(&name, source, Some(&file.blob)).await? {
            return Err(tier.error("share", &file.path, "it was changed after it was told of"));
        }
        if let Some(remote) = self.remote() {
            remote.count_up(file.size);
        }
        Ok(())
    }

    /// The checkpoints of a base key, those that go furthest first.
    pub async fn checkpoints(&self, base: &Digest) -> Result<Vec<CheckpointName>, StoreError> {
        let listed = self.truth().list(&folder(base)).await?;
        let mut names: Vec<_> = listed.iter().filter_map(|meta| CheckpointName::parse(&meta.name)).collect();
        names.sort_unstable_by(|a, b| b.cmp(a));
        Ok(names)
    }

    /// Fetches the checkpoint that goes furthest, but beyond `above` and to `most` at most, to its place in `state`. What is
    /// missing or damaged is passed over. The folder is there whole or not at all.
    pub async fn fetch_checkpoint(
        &self,
        base: &Digest,
        above: Option<u64>,
        most: u64,
        state: &FilePath,
    ) -> Result<Option<Checkpoint>, StoreError> {
        if self.is_offline() {
            return Ok(None);
        }
        for name in self.checkpoints(base).await? {
            if name.order > most || above.is_some_and(|above| name.order <= above) {
                continue;
            }
            let Some(checkpoint) = Checkpoint::read(self.truth(), base, &name).await? else { continue };
            if self.place(&checkpoint, state).await? {
                return Ok(Some(checkpoint));
            }
        }
        Ok(None)
    }

    /// Fetches a checkpoint's files; `false` where one of them is missing or damaged.
    async fn place(&self, checkpoint: &Checkpoint, state: &FilePath) -> Result<bool, StoreError> {
        let tier = self.truth();
        let target = state.join(&checkpoint.path);
        if target.exists() {
            return Ok(true);
        }
        let partial = state.join(format!("{PARTIAL}{}", crate::nonce()));
        let fetching = checkpoint.files.clone().into_iter().map(|file| {
            let to = partial.join(&file.path);
            async move { self.fetch(tier, &file, &to).await }
        });
        let fetched = futures::stream::iter(fetching).buffer_unordered(FILES).try_collect::<Vec<bool>>().await;
        let is_whole = fetched.as_ref().is_ok_and(|all| all.iter().all(|there| *there));
        if is_whole {
            let above = target.parent().expect("a checkpoint lies in the state folder");
            let moved = std::fs::create_dir_all(above).and_then(|()| std::fs::rename(&partial, &target));
            moved.map_err(|error| tier.error("copy", &target.display().to_string(), error))?;
        } else {
            let _ = std::fs::remove_dir_all(&partial);
        }
        fetched.map(|_| is_whole)
    }

    /// Fetches a file and checks it; `false` where it is missing or damaged.
    async fn fetch(&self, tier: &Tier, file: &CheckpointFile, to: &FilePath) -> Result<bool, StoreError> {
        let name = blob_name(&file.blob);
        let above = to.parent().expect("a file lies in a folder");
        std::fs::create_dir_all(above).map_err(|error| tier.error("copy", &name, error))?;
        let mut doubt = Doubt::default();
        loop {
            match tier.download(&name, to).await? {
                Some(found) if found == file.blob => break,
                Some(found) if doubt.is_damaged(tier.url(), &name, found)? => return Ok(false),
                Some(_) => {}
                None => return Ok(false),
            }
        }
        if let Some(remote) = self.remote() {
            remote.count_down(file.size);
        }
        Ok(true)
    }
}

/// The files of a checkpoint with where they lie.
fn scan(root: &FilePath) -> Result<Vec<(CheckpointFile, PathBuf)>, String> {
    let listed = tree::list(root).map_err(|error| error.to_string())?;
    let mut files = Vec::with_capacity(listed.len());
    for (path, real) in listed {
        let fail = |error: std::io::Error| format!("{}: {error}", real.display());
        let size = std::fs::metadata(&real).map_err(fail)?.len();
        let blob = Digest::of_file(&real).map_err(fail)?;
        files.push((CheckpointFile { path, size, blob }, real));
    }
    files.sort_unstable_by(|a, b| a.0.path.cmp(&b.0.path));
    match files.is_empty() {
        true => Err("it is empty".to_owned()),
        false => Ok(files),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::store::{RunManifest, RunState, StageEntry, StageState};

    const BASE: Digest = Digest([3; 32]);

    fn make(state: &FilePath, step: u64, text: &str) -> String {
        let path = format!("checkpoints/step-{step:08}");
        fs::create_dir_all(state.join(&path).join("a")).unwrap();
        fs::write(state.join(&path).join("a/weights"), text.repeat(1000)).unwrap();
        fs::write(state.join(&path).join("step.json"), step.to_string()).unwrap();
        path
    }

    async fn put(store: &Store, state: &FilePath, step: u64, text: &str) {
        let path = make(state, step, text);
        let put = store.put_checkpoint(&BASE, step, (state, &path), "run").await.unwrap().unwrap();
        assert_eq!((put.order, put.files.len()), (step, 2));
    }

    #[tokio::test]
    async fn the_one_that_goes_furthest_within_bounds_is_fetched_and_old_ones_are_forgotten() {
        let (store, here, there) = (Store::memory(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for step in [2, 4, 6] {
            put(&store, here.path(), step, &format!("weights {step}")).await;
        }
        let orders: Vec<u64> = store.checkpoints(&BASE).await.unwrap().iter().map(|name| name.order).collect();
        assert_eq!(orders, [6, 4]);
        let fetch = async |above, most| {
            let found = store.fetch_checkpoint(&BASE, above, most, there.path()).await.unwrap();
            found.map(|found| found.order)
        };
        assert_eq!(fetch(None, 3).await, None, "that of step 2 is gone");
        assert_eq!(fetch(Some(6), 9).await, None, "what is here goes as far");
        assert_eq!(fetch(Some(1), 5).await, Some(4));
        assert_eq!(fetch(None, 9).await, Some(6));
        let text = fs::read_to_string(there.path().join("checkpoints/step-00000006/a/weights")).unwrap();
        assert_eq!(text, "weights 6".repeat(1000));
        // A shorter run leaves a longer one's alone.
        put(&store, here.path(), 3, "weights 3").await;
        let orders: Vec<u64> = store.checkpoints(&BASE).await.unwrap().iter().map(|name| name.order).collect();
        assert_eq!(orders, [6, 4, 3]);
    }

    #[tokio::test]
    async fn a_damaged_one_is_passed_over_and_leaves_nothing() {
        let (store, here, there) = (Store::memory(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        put(&store, here.path(), 1, "one").await;
        put(&store, here.path(), 2, "two").await;
        let blob = blob_name(&Digest::of_bytes("two".repeat(1000).as_bytes()));
        store.truth().overwrite(&blob, "tow".repeat(1000)).await.unwrap();
        let found = store.fetch_checkpoint(&BASE, None, 9, there.path()).await.unwrap().unwrap();
        assert_eq!(found.order, 1);
        store.truth().delete(&blob_name(&Digest::of_bytes("one".repeat(1000).as_bytes()))).await.unwrap();
        let other = tempfile::tempdir().unwrap();
        assert_eq!(store.fetch_checkpoint(&BASE, None, 9, other.path()).await.unwrap(), None);
        assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_list_of_somebody_else_cannot_write_elsewhere() {
        let (store, there) = (Store::memory(), tempfile::tempdir().unwrap());
        for (path, file) in [("../x", "a"), ("x", "../../a"), ("/x", "a"), ("x", "/a"), ("", "a"), ("x", "")] {
            let files = vec![CheckpointFile { path: file.into(), size: 1, blob: Digest([1; 32]) }];
            let list = Checkpoint { schema: 1, order: 5, path: path.into(), run: "r".into(), files };
            let bytes = serde_json::to_vec(&list).unwrap();
            let name = CheckpointName { order: 5, digest: Digest::of_bytes(&bytes) };
            store.truth().overwrite(&name.of(&BASE), bytes).await.unwrap();
            assert_eq!(Checkpoint::read(store.truth(), &BASE, &name).await.unwrap(), None, "{path:?} {file:?}");
        }
        assert_eq!(store.fetch_checkpoint(&BASE, None, 9, there.path()).await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_file_that_changes_after_it_was_told_of_is_not_shared() {
        let (store, here) = (Store::memory(), tempfile::tempdir().unwrap());
        let path = make(here.path(), 1, "one");
        let file = CheckpointFile { path: "a/weights".into(), size: 3000, blob: Digest([9; 32]) };
        let source = here.path().join(path).join("a/weights");
        let error = store.send(store.truth(), &file, &source).await.unwrap_err();
        assert!(error.to_string().contains("changed after it was told of"), "{error}");
        assert_eq!(store.truth().head(&blob_name(&file.blob)).await.unwrap().map(|meta| meta.size), None);
    }

    /// Its base key is in the manifest of a run that is kept; without, it is garbage with its files.
    #[tokio::test]
    async fn gc_keeps_it_as_long_as_its_base_key_is_known() {
        let (store, here) = (Store::memory(), tempfile::tempdir().unwrap());
        put(&store, here.path(), 1, "one").await;
        let entry = StageEntry { base: Some(BASE), outcome: StageState::Failed, ..StageEntry::default() };
        let run = RunManifest {
            schema: 1,
            run: "20260131T235959.123Z-abcdef".into(),
            pipeline: "p".into(),
            started_at: 1.0,
            heartbeat_at: 1.0,
            ended_at: Some(2.0),
            outcome: RunState::Failed,
            params: BTreeMap::new(),
            stages: BTreeMap::from([("train".to_owned(), entry)]),
        };
        store.put_run(&run).await.unwrap();
        let policy = gc::Policy { now_alone: true, grace: Duration::ZERO, ..gc::Policy::default() };
        gc::sweep(store.truth(), &policy).await.unwrap();
        let there = tempfile::tempdir().unwrap();
        assert!(store.fetch_checkpoint(&BASE, None, 9, there.path()).await.unwrap().is_some());
        let policy = gc::Policy { keep_last: 0, ..policy };
        gc::sweep(store.truth(), &policy).await.unwrap();
        assert_eq!(store.checkpoints(&BASE).await.unwrap(), []);
        assert_eq!(store.truth().list(&format!("{LAYOUT}/blobs")).await.unwrap().len(), 0);
    }

    #[test]
    fn names_read_back() {
        let name = CheckpointName { order: 12, digest: Digest([7; 32]) };
        let text = name.of(&BASE);
        assert_eq!(CheckpointName::parse(text.rsplit_once('/').unwrap().1), Some(name));
        assert_eq!(gc::What::of(&text), Some(gc::What::Checkpoint(BASE, name)));
        assert_eq!(gc::What::of(&text.replace("0000000012", "12")), None);
    }
}
