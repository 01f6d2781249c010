//! Keeping the local tier small: what the remote tier has too goes, the longest unused first.
//!
//! Nothing that is only local is ever evicted. What is read again is read through, so an eviction under a live run costs
//! time and nothing else; what such a run uses is spared all the same.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use futures::stream::{self, StreamExt, TryStreamExt};

use super::gc::What;
use super::remote_tier::Remote;
use super::{CONCURRENT, LAYOUT, Store, StoreError, grace};

/// A use is noted once in so long, so a file may have been used so much later than it seems.
const NOTED: Duration = Duration::from_secs(3600);
/// What an unfinished copy is left behind as is removed when it is so old.
const LEFT_BEHIND: Duration = Duration::from_secs(86_400);
/// No eviction asks the remote tier about more objects: they are asked about in the order in which they would go, so what is
/// local only is asked about each time.
const MOST_LOOKS: usize = 4096;

/// What an eviction came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Bytes of blobs and row segments that were local.
    pub before: u64,
    /// How many went.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A file of the local tier.
struct File {
    name: String,
    size: u64,
    used: SystemTime,
}

impl Store {
    /// Where blobs and row segments of the local tier are larger than `limit` together, removes as many as make it a tenth
    /// smaller than that, as far as the remote tier has them too and were not used after `since`: when the oldest run that goes on on this
    /// machine began. It walks through the whole local tier once, so it is for the end of a run.
    pub async fn evict(&self, limit: u64, since: SystemTime) -> Result<Evicted, StoreError> {
        let (Some(remote), Some(folder)) = (self.remote(), self.folder()) else { return Ok(Evicted::default()) };
        let root = folder.to_owned();
        let walk = tokio::task::spawn_blocking(move || walk(&root)).await.expect("walking does not panic");
        let mut files = walk.map_err(|error| self.local.error("list", LAYOUT, error))?;
        let mut evicted = Evicted { before: files.iter().map(|file| file.size).sum(), ..Evicted::default() };
        if evicted.before <= limit {
            return Ok(evicted);
        }
        let unused = since.checked_sub(NOTED).unwrap_or(SystemTime::UNIX_EPOCH);
        files.retain(|file| file.used < unused);
        files.sort_unstable_by(|a, b| a.used.cmp(&b.used).then_with(|| a.name.cmp(&b.name)));
        let goal = limit - limit / 10;
        let mut looks = 0;
        for files in files.chunks(CONCURRENT) {
            let trusted: Vec<bool> = files.iter().map(|file| is_known_and_fresh(remote, &file.name)).collect();
            looks += trusted.iter().filter(|trusted| !**trusted).count();
            let asking = files
                .iter()
                .zip(trusted)
                .map(|(file, trusted)| async move { Ok::<_, StoreError>(trusted || is_remote(remote, file).await?) });
            let far_too = stream::iter(asking).buffered(CONCURRENT).try_collect::<Vec<bool>>().await?;
            for (file, _) in files.iter().zip(far_too).filter(|(_, far_too)| *far_too) {
                if evicted.before - evicted.bytes <= goal {
                    return Ok(evicted);
                }
                self.local.delete(&file.name).await?;
                evicted.objects += 1;
                evicted.bytes += file.size;
            }
            if looks >= MOST_LOOKS {
                break;
            }
        }
        Ok(evicted)
    }
}

/// Whether it is so little time since an object was seen that gc cannot have taken it.
fn is_known_and_fresh(remote: &Remote, name: &str) -> bool {
    let fresh = 0.0..grace().as_secs_f64() / 2.0;
    remote.seen(name).zip(remote.known_clock()).is_some_and(|(seen, now)| fresh.contains(&(now - seen)))
}

async fn is_remote(remote: &Remote, file: &File) -> Result<bool, StoreError> {
    match remote.tier.head(&file.name).await? {
        Some(meta) if meta.size == file.size => {
            remote.add_known(&file.name);
            Ok(true)
        }
        // One of the two is damaged, and nobody knows which.
        Some(_) => Ok(false),
        None => {
            remote.forget(&file.name);
            Ok(false)
        }
    }
}

/// Blobs and row segments of a folder.
fn walk(root: &Path) -> std::io::Result<Vec<File>> {
    let mut files = Vec::new();
    for kind in ["blobs", "rows"] {
        for folder in items(&root.join(LAYOUT).join(kind))? {
            let above = format!("{LAYOUT}/{kind}/{}", folder.file_name().to_string_lossy());
            for item in items(&folder.path())? {
                let name = format!("{above}/{}", item.file_name().to_string_lossy());
                // One that is gone by now is no file of ours.
                let Ok(metadata) = item.metadata() else { continue };
                let used = metadata.modified()?;
                if name.contains('#') && used.elapsed().is_ok_and(|age| age > LEFT_BEHIND) {
                    let _ = fs::remove_file(item.path());
                } else if What::of(&name).is_some() {
                    files.push(File { name, size: metadata.len(), used });
                }
            }
        }
    }
    Ok(files)
}

fn items(folder: &Path) -> std::io::Result<impl Iterator<Item = fs::DirEntry>> {
    let items = match fs::read_dir(folder) {
        Err(error) if super::files::is_absent(&error) => None,
        items => Some(items?),
    };
    Ok(items.into_iter().flatten().filter_map(Result::ok))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;
    use crate::store::tier::Tier;
    use crate::store::{Again, blob_name};

    const DAY: Duration = Duration::from_secs(86_400);

    struct Machine {
        folder: tempfile::TempDir,
        store: Store,
    }

    impl Machine {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let local = Tier::folder_at(&folder.path().join("local")).unwrap();
            let store = Store::tiered(local, Tier::memory(), &folder.path().join("cache"));
            Self { folder, store }
        }

        /// A local blob of 100 bytes that was used so many days ago.
        async fn blob(&self, content: u8, days: u32) -> Digest {
            let digest = Digest::of_bytes(&[content; 100]);
            self.store.put_blob(&digest, vec![content; 100].into(), Again::No).await.unwrap();
            self.used(&blob_name(&digest), days);
            digest
        }

        async fn remote(&self, blob: &Digest) {
            let bytes = self.store.local().read(&blob_name(blob)).await.unwrap().unwrap();
            self.store.truth().overwrite(&blob_name(blob), bytes).await.unwrap();
        }

        fn used(&self, name: &str, days: u32) {
            let file = fs::File::options().append(true).open(self.folder.path().join("local").join(name)).unwrap();
            file.set_modified(SystemTime::now() - DAY * days).unwrap();
        }

        async fn is_near(&self, blob: &Digest) -> bool {
            self.store.local().size_of(&blob_name(blob)).await.unwrap().is_some()
        }

        async fn evict(&self, limit: u64) -> Evicted {
            self.store.evict(limit, SystemTime::now()).await.unwrap()
        }
    }

    #[tokio::test]
    async fn the_longest_unused_goes_first_and_what_is_near_only_never() {
        let machine = Machine::new();
        let mut blobs = Vec::new();
        for age in 1..=5 {
            blobs.push(machine.blob(age, age.into()).await);
        }
        let [new, middle, only_near, old, oldest] = blobs[..] else { unreachable!() };
        for blob in [&new, &middle, &old, &oldest] {
            machine.remote(blob).await;
        }
        assert_eq!(machine.evict(500).await, Evicted { before: 500, objects: 0, bytes: 0 }, "it is within the limit");
        assert_eq!(machine.evict(499).await, Evicted { before: 500, objects: 1, bytes: 100 });
        assert!(!machine.is_near(&oldest).await);
        assert_eq!(machine.evict(300).await, Evicted { before: 400, objects: 2, bytes: 200 }, "down to 270, then done");
        assert!(machine.is_near(&only_near).await && machine.is_near(&new).await);
        assert!(!machine.is_near(&old).await && !machine.is_near(&middle).await);
        assert_eq!(machine.evict(0).await.objects, 1);
        assert!(machine.is_near(&only_near).await && !machine.is_near(&new).await);
        assert_eq!(machine.store.get_blob(&old).await.unwrap().unwrap(), vec![4; 100], "it is read through");
    }

    #[tokio::test]
    async fn what_a_live_run_may_use_stays() {
        let machine = Machine::new();
        let (before, during) = (machine.blob(1, 3).await, machine.blob(2, 1).await);
        machine.remote(&before).await;
        machine.remote(&during).await;
        let evicted = machine.store.evict(0, SystemTime::now() - DAY * 2).await.unwrap();
        assert_eq!(evicted.objects, 1);
        assert!(!machine.is_near(&before).await && machine.is_near(&during).await);
    }

    #[tokio::test]
    async fn what_was_seen_long_ago_is_asked_about() {
        let machine = Machine::new();
        let blob = machine.blob(1, 3).await;
        let remote = machine.store.remote().unwrap();
        remote.add_known(&blob_name(&blob));
        remote.tier.overwrite(&blob_name(&blob), &b"torn"[..]).await.unwrap();
        remote.forget(&blob_name(&blob));
        assert_eq!(machine.evict(0).await.objects, 0, "the remote one is not the same");
        remote.tier.delete(&blob_name(&blob)).await.unwrap();
        assert_eq!(machine.evict(0).await.objects, 0, "gc took the remote one");
        machine.remote(&blob).await;
        assert_eq!(machine.evict(0).await.objects, 1);
        assert!(remote.knows(&blob_name(&blob)));
    }

    #[tokio::test]
    async fn rows_go_and_foreign_files_and_unfinished_copies_are_told_apart() {
        let machine = Machine::new();
        let base = Digest([7; 32]);
        let segment = machine.store.put_segment(&base, 0, vec![1; 50].into()).await.unwrap();
        let name = crate::store::segment_name(&base, &segment);
        machine.used(&name, 2);
        let local = machine.folder.path().join("local");
        for (name, days) in [("v1/rows/note.txt/x", 9), ("v1/blobs/ab/x#1", 9), ("v1/blobs/ab/x#2", 0)] {
            fs::create_dir_all(local.join(name).parent().unwrap()).unwrap();
            fs::write(local.join(name), "12345").unwrap();
            machine.used(name, days);
        }
        assert_eq!(machine.evict(10).await, Evicted { before: 50, objects: 1, bytes: 50 });
        assert!(!local.join(&name).exists() && local.join("v1/rows/note.txt/x").exists());
        assert!(!local.join("v1/blobs/ab/x#1").exists() && local.join("v1/blobs/ab/x#2").exists());
        assert_eq!(machine.store.segment(&base, &segment).await.unwrap().unwrap(), vec![1; 50]);
    }

    #[tokio::test]
    async fn one_tier_alone_is_the_truth() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open_folder(folder.path()).unwrap();
        let digest = Digest::of_bytes(b"x");
        store.put_blob(&digest, b"x"[..].into(), Again::No).await.unwrap();
        assert_eq!(store.evict(0, SystemTime::now()).await.unwrap(), Evicted::default());
        assert!(store.has_blob(&digest).await.unwrap());
    }
}
