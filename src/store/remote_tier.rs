//! The remote tier: the store that is shared, what is known of it, and what went wrong with it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tokio::sync::{OnceCell, Semaphore};

use super::known::Known;
use super::tier::Tier;
use super::{DELETED, LAYOUT, StoreError, gc};
use crate::digest::Digest;

/// Results that are offered to the remote tier at the same time.
const OFFERS: usize = 8;

/// The shared store behind a local tier.
pub struct Remote {
    /// Its objects.
    pub tier: Tier,
    state: Mutex<State>,
    /// What the store was when what is known was learned: its id, and the last report of gc.
    seen: PathBuf,
    /// Keys whose local record is to replace the remote one, for what could not be done at once.
    pending: PathBuf,
    read_only: bool,
    id: OnceCell<String>,
    clock: OnceCell<Clock>,
    caught_up: OnceCell<()>,
    /// So many results are offered at a time.
    pub(super) offers: Semaphore,
}

struct State {
    known: Known,
    /// The highest announced generation of keys whose result was replaced.
    replaced: HashMap<Digest, u32>,
    /// Keys that were looked for in vain; for a run, that stays so until it looks again.
    absent: HashSet<Digest>,
    /// Keys whose record is local only, and why.
    unshared: BTreeMap<Digest, StoreError>,
    /// Keys whose local record is to replace the remote one.
    pending: BTreeSet<Digest>,
    /// Keys whose record was found remotely by this process.
    found: HashSet<Digest>,
    /// What users have not been told yet.
    warnings: Vec<String>,
    /// Objects and bytes that went up.
    sent: (u64, u64),
    /// Objects and bytes that came down.
    received: (u64, u64),
}

/// The server's clock.
struct Clock {
    server: f64,
    /// Not later than the server's answer, so that nothing ever seems younger than it is.
    asked_at: Instant,
}

impl Clock {
    fn now(&self) -> f64 {
        self.server + self.asked_at.elapsed().as_secs_f64()
    }
}

/// What the last run of a pipeline that ended well found or made: where to look first, and never more than that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hint {
    /// The run.
    pub run: String,
    /// By stage.
    pub stages: BTreeMap<String, Digest>,
}

impl Remote {
    /// A remote tier; what is known of it is kept in `cache`.
    pub fn new(tier: Tier, cache: &Path, read_only: bool) -> Self {
        let name = &Digest::of_bytes(tier.url().as_bytes()).to_string()[..8];
        let pending = cache.join(format!("known-{name}.pending"));
        let listed = std::fs::read(&pending).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let state = State {
            known: Known::load(&cache.join(format!("known-{name}"))),
            replaced: HashMap::new(),
            absent: HashSet::new(),
            unshared: BTreeMap::new(),
            pending: listed.unwrap_or_default(),
            found: HashSet::new(),
            warnings: Vec::new(),
            sent: (0, 0),
            received: (0, 0),
        };
        Self {
            tier,
            state: Mutex::new(state),
            seen: cache.join(format!("known-{name}.seen")),
            pending,
            read_only,
            id: OnceCell::new(),
            clock: OnceCell::new(),
            caught_up: OnceCell::new(),
            offers: Semaphore::new(OFFERS),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic happens under this lock")
    }

    /// Whether it is only read: results stay on this machine, and that is as it should be.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The id that the store was given by whoever came first, empty where nobody has written there yet. A store at the same
    /// address with another one is another store: emptied, made anew, or on another server.
    pub async fn id(&self) -> Result<&str, StoreError> {
        if let Some(id) = self.id.get() {
            return Ok(id);
        }
        match self.tier.read(&self.id_name()).await? {
            Some(id) => Ok(self.id.get_or_init(|| async { String::from_utf8_lossy(&id).into_owned() }).await),
            None => Ok(""),
        }
    }

    /// The same for commands that write: who comes first gives the id. Whoever only looks leaves nothing behind.
    pub async fn make_id(&self) -> Result<&str, StoreError> {
        if self.id().await?.is_empty() && !self.read_only {
            self.tier.create(&self.id_name(), crate::nonce()).await?;
        }
        self.id().await
    }

    fn id_name(&self) -> String {
        format!("{LAYOUT}/store-id")
    }

    /// What time it is for the server, in seconds since 1970: gc counts by it, and this machine's clock may be days away from
    /// it. The server is asked once, by writing.
    pub async fn clock(&self) -> Result<f64, StoreError> {
        let asked = self.clock.get_or_try_init(|| async {
            let asked_at = Instant::now();
            Ok(Clock { server: gc::clock(&self.tier).await?, asked_at })
        });
        asked.await.map(Clock::now)
    }

    /// The same, where the server was asked already.
    pub fn known_clock(&self) -> Option<f64> {
        self.clock.get().map(Clock::now)
    }

    /// Two listings tell what has changed behind what is known: results that were replaced, and deletions by gc. Once a
    /// process.
    pub async fn catch_up(&self) -> Result<(), StoreError> {
        self.caught_up.get_or_try_init(|| self.look_behind()).await.map(|_| ())
    }

    async fn look_behind(&self) -> Result<(), StoreError> {
        let (replaced, deleted) = (format!("{LAYOUT}/replaced"), format!("{LAYOUT}/gc"));
        let lists = futures::future::try_join(self.tier.list(&replaced), self.tier.list(&deleted));
        let (id, (replaced, gc)) = futures::future::try_join(self.id(), lists).await?;
        let mut state = self.state();
        for meta in replaced {
            let Some((key, generation)) = meta.name.split_once('-') else { continue };
            let (Ok(key), Ok(generation)) = (key.parse(), generation.parse::<u32>()) else { continue };
            let highest = state.replaced.entry(key).or_default();
            *highest = generation.max(*highest);
        }
        let last = gc.into_iter().map(|meta| meta.name).rfind(|name| name.starts_with(DELETED));
        let now = format!("{id} {}", last.unwrap_or_default());
        let before = std::fs::read_to_string(&self.seen).unwrap_or_default();
        if before != now {
            state.known.clear();
            if before.split(' ').next() != Some(id) {
                state.pending.clear();
                let _ = std::fs::remove_file(&self.pending);
            }
            let _ = std::fs::create_dir_all(self.seen.parent().unwrap_or(Path::new(".")));
            let _ = std::fs::write(&self.seen, now);
        }
        Ok(())
    }

    /// The generation that a key's result was replaced by, or 0.
    pub fn replaced(&self, key: &Digest) -> u32 {
        self.state().replaced.get(key).copied().unwrap_or(0)
    }

    /// Announces that a result is about to be replaced, so that nobody trusts a copy of the old one.
    pub async fn announce(&self, key: &Digest, generation: u32) -> Result<(), StoreError> {
        self.tier.overwrite(&format!("{LAYOUT}/replaced/{key}-{generation:08}"), &b"{}"[..]).await?;
        self.state().replaced.insert(*key, generation);
        Ok(())
    }

    /// When an object was last known to be there.
    pub fn seen(&self, name: &str) -> Option<f64> {
        self.state().known.seen(name)
    }

    /// Whether an object is known to be there.
    pub fn knows(&self, name: &str) -> bool {
        self.seen(name).is_some()
    }

    /// Notes that an object is there, of an age that is not known.
    pub fn add_known(&self, name: &str) {
        self.state().known.add(name, None);
    }

    /// Notes that an object was written then, by the server's clock.
    pub fn add_written(&self, name: &str, modified: f64) {
        self.state().known.add(name, Some(modified));
    }

    /// Notes that an object is not there.
    pub fn forget(&self, name: &str) {
        self.state().known.remove(name);
    }

    /// Keeps what was learned.
    pub fn write_known(&self) {
        self.state().known.write();
    }

    /// Whether a key was looked for in vain.
    pub fn is_absent(&self, key: &Digest) -> bool {
        self.state().absent.contains(key)
    }

    /// Notes that a key has no record, or has one now.
    pub fn set_absent(&self, key: &Digest, absent: bool) {
        let mut state = self.state();
        match absent {
            true => state.absent.insert(*key),
            false => state.absent.remove(key),
        };
    }

    /// Notes that a key's record was found remotely.
    pub fn set_found(&self, key: &Digest) {
        self.state().found.insert(*key);
    }

    /// Whether a key's record was found remotely.
    pub fn is_found(&self, key: &Digest) -> bool {
        self.state().found.contains(key)
    }

    /// Whether a key's local record was made to replace the remote one, which could not be done yet.
    pub fn is_pending(&self, key: &Digest) -> bool {
        self.state().pending.contains(key)
    }

    /// Notes that a local record is to replace the remote one, or has done so. Without the file, the remote one would win.
    fn set_pending(&self, state: &mut State, key: &Digest, pending: bool) {
        let changed = match pending {
            true => state.pending.insert(*key),
            false => state.pending.remove(key),
        };
        if changed {
            let bytes = serde_json::to_vec(&state.pending).expect("digests are plain data");
            let _ = std::fs::create_dir_all(self.pending.parent().unwrap_or(Path::new(".")));
            let _ = std::fs::write(&self.pending, bytes);
        }
    }

    /// Notes that a result is local only.
    pub fn set_unshared(&self, key: &Digest, error: &StoreError) {
        let mut state = self.state();
        self.set_pending(&mut state, key, true);
        if state.unshared.is_empty() {
            state.warnings.push(format!("results stay on this machine for now: {error}"));
        }
        state.unshared.insert(*key, error.clone());
    }

    /// Notes that a result is shared.
    pub fn set_shared(&self, key: &Digest) {
        let mut state = self.state();
        state.unshared.remove(key);
        self.set_pending(&mut state, key, false);
    }

    /// Keys whose record is local only, and why.
    pub fn unshared(&self) -> BTreeMap<Digest, StoreError> {
        self.state().unshared.clone()
    }

    /// Notes something that users should hear of; the same thing is told once.
    pub fn warn(&self, message: String) {
        let mut state = self.state();
        if !state.warnings.contains(&message) {
            state.warnings.push(message);
        }
    }

    /// Counts an object that went up.
    pub fn count_up(&self, bytes: u64) {
        let mut state = self.state();
        state.sent = (state.sent.0 + 1, state.sent.1 + bytes);
    }

    /// How many objects and bytes went up.
    pub fn sent(&self) -> (u64, u64) {
        self.state().sent
    }

    /// Counts an object that came down.
    pub fn count_down(&self, bytes: u64) {
        let mut state = self.state();
        state.received = (state.received.0 + 1, state.received.1 + bytes);
    }

    /// How many objects and bytes came down.
    pub fn received(&self) -> (u64, u64) {
        self.state().received
    }

    /// What users have not been told yet.
    pub fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.state().warnings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn whoever_only_looks_writes_nothing() {
        let cache = tempfile::tempdir().unwrap();
        let remote = Remote::new(Tier::memory(), cache.path(), false);
        remote.catch_up().await.unwrap();
        assert_eq!(remote.id().await.unwrap(), "");
        assert_eq!(remote.tier.list("").await.unwrap(), []);
        let id = remote.make_id().await.unwrap().to_owned();
        assert_eq!(remote.id().await.unwrap(), id);
        let another = Remote::new(remote.tier.clone(), cache.path(), false);
        assert_eq!((another.make_id().await.unwrap(), id.len()), (id.as_str(), 32), "who comes first gives it");
        let reader = Remote::new(Tier::memory(), cache.path(), true);
        assert_eq!(reader.make_id().await.unwrap(), "");
        assert_eq!(reader.tier.list("").await.unwrap(), []);
    }
}
