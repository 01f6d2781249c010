//! The far tier: the store that is shared, what is known of it, and what went wrong with it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use super::known::Known;
use super::tier::Tier;
use super::{LAYOUT, StoreError};
use crate::digest::Digest;

/// The shared store behind a near tier.
pub struct Far {
    /// Its objects.
    pub tier: Tier,
    state: Mutex<State>,
    seen_gc: std::path::PathBuf,
    read_only: bool,
}

struct State {
    known: Known,
    /// The highest announced generation of keys whose result was replaced.
    replaced: HashMap<Digest, u32>,
    /// Keys that were looked for in vain; for a run, that stays so until it looks again.
    absent: HashSet<Digest>,
    /// Keys whose record is near only, and why.
    unshared: BTreeMap<Digest, String>,
    /// What users have not been told yet.
    troubles: Vec<String>,
    /// Objects and bytes that went up.
    sent: (u64, u64),
    /// Objects and bytes that came down.
    received: (u64, u64),
}

/// What the last run of a pipeline that ended well found or made: where to look first, and never more than that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hint {
    /// The run.
    pub run: String,
    /// By stage.
    pub stages: BTreeMap<String, Digest>,
}

impl Far {
    /// A far tier; what is known of it is kept in `cache`.
    pub fn new(tier: Tier, cache: &Path, read_only: bool) -> Self {
        let name = &Digest::of_bytes(tier.url().as_bytes()).to_string()[..8];
        let state = State {
            known: Known::load(&cache.join(format!("known-{name}"))),
            replaced: HashMap::new(),
            absent: HashSet::new(),
            unshared: BTreeMap::new(),
            troubles: Vec::new(),
            sent: (0, 0),
            received: (0, 0),
        };
        Self { tier, state: Mutex::new(state), seen_gc: cache.join(format!("known-{name}.gc")), read_only }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic happens under this lock")
    }

    /// Whether it is only read: results stay on this machine, and that is as it should be.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Two listings tell what has changed behind what is known: results that were replaced, and deletions by gc.
    pub async fn catch_up(&self) -> Result<(), StoreError> {
        let (replaced, deleted) = (format!("{LAYOUT}/replaced"), format!("{LAYOUT}/gc"));
        let (replaced, gc) = futures::try_join!(self.tier.list(&replaced), self.tier.list(&deleted))?;
        let mut state = self.state();
        state.absent.clear();
        for meta in replaced {
            let Some((key, generation)) = meta.name.split_once('-') else { continue };
            let (Ok(key), Ok(generation)) = (key.parse(), generation.parse::<u32>()) else { continue };
            let highest = state.replaced.entry(key).or_default();
            *highest = generation.max(*highest);
        }
        let last = gc.into_iter().map(|meta| meta.name).rfind(|name| name.starts_with(super::DELETED));
        let last = last.unwrap_or_default();
        if std::fs::read_to_string(&self.seen_gc).unwrap_or_default() != last {
            state.known.clear();
            let _ = std::fs::create_dir_all(self.seen_gc.parent().unwrap_or(Path::new(".")));
            let _ = std::fs::write(&self.seen_gc, last);
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

    /// Notes that an object is there.
    pub fn add_known(&self, name: &str) {
        self.state().known.add(name);
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

    /// Notes that a result is near only.
    pub fn set_unshared(&self, key: &Digest, error: &StoreError) {
        let mut state = self.state();
        if state.unshared.is_empty() {
            state.troubles.push(format!("results stay on this machine for now: {error}"));
        }
        state.unshared.insert(*key, error.to_string());
    }

    /// Notes that a result is shared.
    pub fn set_shared(&self, key: &Digest) {
        self.state().unshared.remove(key);
    }

    /// Keys whose record is near only, and why.
    pub fn unshared(&self) -> BTreeMap<Digest, String> {
        self.state().unshared.clone()
    }

    /// Notes something that users should hear of; the same thing is told once.
    pub fn trouble(&self, message: String) {
        let mut state = self.state();
        if !state.troubles.contains(&message) {
            state.troubles.push(message);
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
    pub fn take_troubles(&self) -> Vec<String> {
        std::mem::take(&mut self.state().troubles)
    }
}
