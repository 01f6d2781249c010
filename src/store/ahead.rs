//! Looking up ahead: while a long pipeline is still being read, another thread looks up what the last run of this machine
//! had. Whoever then knows a stage's key often finds its record here, read a moment ago.
//!
//! Nothing depends on it: a key that is not here is looked up as ever, each look is used at most once, and none after
//! [`Ends`], since what lies here grows old.

use std::collections::HashMap;
use std::fmt::{self, Formatter};
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::local::{LocalView, Look};
use super::record::Brief;
use super::state::StageState;
use super::{LAYOUT, Store, StoreError};
use crate::digest::Digest;

/// The most looks that are kept: each takes a few kilobytes.
const MOST: usize = 16_384;

/// Where the look of a key stands.
enum Slot {
    Todo,
    /// Somebody is at it, or has had it.
    Taken,
    Done(Box<Look<Brief>>),
}

/// Looks of the keys of a run.
#[derive(Default)]
pub struct Ahead {
    looks: OnceLock<HashMap<Digest, Mutex<Slot>>>,
    /// Nothing more is looked up.
    is_called_off: AtomicBool,
    /// Nothing more is taken either.
    has_ended: AtomicBool,
}

impl Ahead {
    /// Begins to look up what the newest run in a folder had; `None` where that can't be of use.
    pub fn begin(store: &Store) -> Option<Arc<Self>> {
        let folder = store.folder().filter(|_| !store.has_remote())?.join(LAYOUT).join("runs");
        let view = store.local_view()?;
        let ahead = Arc::new(Self::default());
        let (shared, name) = (ahead.clone(), "look-ahead".to_owned());
        let work = move || {
            if let Some(run) = newest(&folder) {
                let _ = shared.look_up(&view, &run);
            }
        };
        std::thread::Builder::new().name(name).spawn(work).ok()?;
        Some(ahead)
    }

    fn look_up(&self, view: &LocalView, run: &std::path::Path) -> Result<(), StoreError> {
        let keys = std::fs::read(run).ok().and_then(|manifest| keys(&manifest)).unwrap_or_default();
        let slots = self.looks.get_or_init(|| keys.iter().map(|key| (*key, Mutex::new(Slot::Todo))).collect());
        for key in &keys {
            let slot = &slots[key];
            if self.is_called_off.load(Ordering::Relaxed) {
                break;
            }
            if matches!(std::mem::replace(&mut *lock(slot), Slot::Taken), Slot::Todo) {
                let look = view.look_up(key)?;
                *lock(slot) = Slot::Done(Box::new(look));
            }
        }
        Ok(())
    }

    /// The look of a key, where it is there; whoever gets none looks for themselves.
    pub fn take(&self, key: &Digest) -> Option<Look<Brief>> {
        let slot = self.looks.get()?.get(key)?;
        if self.has_ended.load(Ordering::Relaxed) {
            return None;
        }
        match std::mem::replace(&mut *lock(slot), Slot::Taken) {
            Slot::Done(look) => Some(*look),
            Slot::Todo | Slot::Taken => None,
        }
    }

    /// Looks up nothing more from now on, and ends when the result is dropped. Whoever begins to look everything up keeps
    /// all cores busy, and would come upon each key just when this is at it.
    pub fn ends_with_this(&self) -> Ends<'_> {
        self.is_called_off.store(true, Ordering::Relaxed);
        Ends(self)
    }
}

impl Store {
    /// What a key has on this machine, at once. A look that was made ahead is used up.
    pub fn look_up_at_once(&self, view: &LocalView, key: &Digest) -> Result<Look<Brief>, StoreError> {
        match self.ahead().and_then(|ahead| ahead.take(key)) {
            Some(look) => Ok(look),
            None => view.look_up(key),
        }
    }
}

/// At its end, whatever was not taken by then is never used.
pub struct Ends<'a>(&'a Ahead);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::Relaxed);
        self.0.looks.get().into_iter().flatten().for_each(|(_, slot)| *lock(slot) = Slot::Taken);
    }
}

fn lock(slot: &Mutex<Slot>) -> std::sync::MutexGuard<'_, Slot> {
    slot.lock().expect("no panic happens under this lock")
}

/// The manifest of the newest run in a folder: their names start with the time.
fn newest(runs: &std::path::Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(runs).ok()?.filter_map(|item| Some(item.ok()?.path()));
    files.filter(|file| !file.to_string_lossy().contains('#')).max()
}

/// What a run had results of, in the order of its pipeline, as the next run will ask.
fn keys(manifest: &[u8]) -> Option<Vec<Digest>> {
    #[derive(Deserialize)]
    struct Run {
        #[serde(deserialize_with = "values")]
        stages: Vec<Stage>,
    }
    #[derive(Deserialize)]
    struct Stage {
        place: Option<u32>,
        key: Option<Digest>,
        outcome: StageState,
    }
    let run: Run = serde_json::from_slice(manifest).ok()?;
    let stages = run.stages.into_iter().filter(|stage| stage.outcome.has_result());
    let mut keys: Vec<(Option<u32>, Digest)> = stages.filter_map(|stage| Some((stage.place, stage.key?))).collect();
    keys.sort_unstable();
    keys.dedup_by_key(|(_, key)| *key);
    Some(keys.into_iter().map(|(_, key)| key).take(MOST).collect())
}

/// The values of a map, whatever their names.
fn values<'de, T: Deserialize<'de>, D: Deserializer<'de>>(map: D) -> Result<Vec<T>, D::Error> {
    struct Values<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Values<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
            f.write_str("a map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<T>, A::Error> {
            let mut values = Vec::new();
            while let Some((IgnoredAny, value)) = map.next_entry()? {
                values.push(value);
            }
            Ok(values)
        }
    }

    map.deserialize_map(Values(PhantomData))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::store::{Again, Record};
    use serde_json::{Value, json};

    /// A record of a table that is one blob.
    pub fn record(name: &str, blob: Digest) -> Record {
        let preimage = json!({
            "schema": 1, "kind": name, "program": { "version": "1" }, "params": {}, "inputs": {}, "env": {},
            "secrets": [], "toolchain": {},
        });
        let table = json!({
            "type": "table", "digest": blob, "blob": blob, "size": 1, "rows": 1, "columns": [], "files": null,
        });
        let read = |key: Digest| {
            serde_json::from_value::<Record>(json!({
                "schema": 1, "key": key, "kind": name, "nonce": "n", "preimage": preimage, "outputs": { "out": table },
                "created_at": 0.0, "run": "r", "duration_s": 0.0,
            }))
        };
        let key = read(blob).unwrap().preimage.key();
        read(key).unwrap()
    }

    /// What a manifest says of a stage.
    fn entry(place: u32, record: &Record, outcome: &str) -> Value {
        json!({ "place": place, "key": record.key, "outcome": outcome })
    }

    /// A store with a run that had the results of two keys, and the blob of the first alone.
    async fn store(folder: &std::path::Path) -> (Store, [Record; 2]) {
        let store = Store::open_folder(folder).unwrap();
        let blob = Digest::of_bytes(b"x");
        store.put_blob(&blob, b"x".to_vec().into(), Again::No).await.unwrap();
        let records = [record("a", blob), record("b", Digest::of_bytes(b"gone"))];
        for record in &records {
            store.commit(record.clone(), 0).await.unwrap();
        }
        let [a, b] = &records;
        let stages =
            json!({ "x": entry(1, a, "hit"), "y": entry(0, b, "done"), "z": entry(2, &record("c", blob), "failed") });
        for (name, stages) in [("1", json!({})), ("2", stages)] {
            let run = json!({
                "schema": 1, "run": name, "pipeline": "p", "started_at": 0.0, "heartbeat_at": 0.0, "ended_at": 0.0,
                "outcome": "done", "params": {}, "stages": stages,
            });
            store.put_run(&serde_json::from_value(run).unwrap()).await.unwrap();
        }
        (store, records)
    }

    /// Begins, and waits until everything was looked up.
    fn begun(store: &Store) -> Arc<Ahead> {
        let ahead = Ahead::begin(store).unwrap();
        let is_done = |slot: &Mutex<Slot>| matches!(*lock(slot), Slot::Done(_));
        while !ahead.looks.get().is_some_and(|looks| looks.values().all(is_done)) {
            std::thread::yield_now();
        }
        ahead
    }

    #[tokio::test]
    async fn what_the_newest_run_had_is_looked_up_once() {
        let folder = tempfile::tempdir().unwrap();
        let (store, [a, b]) = store(folder.path()).await;
        let ahead = begun(&store);
        assert_eq!(ahead.looks.get().unwrap().len(), 2, "what failed has no result");
        let look = ahead.take(&a.key).unwrap();
        let full = |look: Look<Brief>| look.record.map(|(brief, missing)| (brief.record().unwrap(), missing));
        assert_eq!((look.generation, full(look)), (1, Some((a.clone(), None))));
        assert!(ahead.take(&a.key).is_none(), "whoever looks again wants to know how it is by then");
        let look = ahead.take(&b.key).unwrap();
        assert_eq!(full(look), Some((b, Some("out".into()))), "its blob is gone");
        assert!(ahead.take(&Digest::of_bytes(b"?")).is_none());
    }

    #[tokio::test]
    async fn only_who_looks_everything_up_gets_it_and_nobody_after_that() {
        let folder = tempfile::tempdir().unwrap();
        let (store, [a, _]) = store(folder.path()).await;
        let with = store.clone().with(Some(begun(&store)));
        store.local().delete(&crate::store::record_name(&a.key, 1)).await.unwrap();
        assert!(with.look_up(&a.key).await.unwrap().record.is_none(), "a single look is of now");
        assert!(with.look_up_at_once(&with.local_view().unwrap(), &a.key).unwrap().record.is_some());
        let with = store.clone().with(Some(begun(&store)));
        drop(with.ahead().unwrap().ends_with_this());
        assert!(with.look_up_at_once(&with.local_view().unwrap(), &a.key).unwrap().record.is_none());
    }

    #[test]
    fn keys_come_in_the_order_of_the_pipeline() {
        let [a, b] = [record("a", Digest([1; 32])), record("b", Digest([2; 32]))];
        let text = |stages: Value| json!({ "run": "r", "stages": stages }).to_string();
        let manifest = text(
            json!({ "q\"1": entry(1, &a, "hit"), "q\"0": entry(0, &b, "accepted"), "w": { "outcome": "waiting" } }),
        );
        assert_eq!(keys(manifest.as_bytes()), Some(vec![b.key, a.key]));
        assert_eq!(keys(b"{"), None);
    }
}
