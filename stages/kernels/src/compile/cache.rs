//! What was compiled before, by content.
//!
//! `<folder>/<first two letters>/<key>.json` says what became of a source; the files it speaks of lie beside it as
//! `<key>.<what>`. Files come first and the JSON last, each written elsewhere and renamed, so a JSON file that is there is
//! whole; it names the BLAKE3 of each file, so a file that isn't is found out and built again. Failures are kept like
//! successes, except those that say more of the machine than of the source. The least recently used entries go when the
//! folder outgrows its limit.

use std::collections::HashMap;
use std::fs::{File, FileTimes};
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::{Artifact, Built, CompileFailure};
use crate::fault::FaultKind;

/// What became of a source.
pub type Outcome = Result<Built, CompileFailure>;

/// Raised when entries of before can't be used any more. 3: registers and shared memory come from the machine code. 4: what
/// is started is a program.
const SCHEMA: u32 = 4;

/// What was used this recently isn't removed: somebody may be about to run it.
const IN_USE: Duration = Duration::from_secs(600);

/// A folder of results.
#[derive(Debug)]
pub struct Cache {
    folder: PathBuf,
    limit_bytes: u64,
    /// Written since the folder was last looked through.
    written_bytes: AtomicU64,
}

/// One entry's JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    schema: u32,
    outcome: Stored,
    checksums: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Stored {
    Built(Built),
    Failed(CompileFailure),
}

/// A result's name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key(String);

impl Key {
    /// From everything that decides what is built. Each part is preceded by its length, so that no two lists of parts are
    /// the same bytes.
    pub fn of(parts: &[&str]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&SCHEMA.to_le_bytes());
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        Self(hasher.finalize().to_hex()[..40].to_owned())
    }
}

impl Cache {
    /// Opens a folder, which is made if it isn't there.
    pub fn open(folder: &Path, limit_bytes: u64) -> std::io::Result<Self> {
        // A relative path would mean another folder to a process that runs elsewhere.
        let folder = std::path::absolute(folder)?;
        std::fs::create_dir_all(folder.join("tmp"))?;
        let cache = Self { folder, limit_bytes, written_bytes: AtomicU64::new(0) };
        cache.prune();
        Ok(cache)
    }

    /// A folder to build in, on the same disk.
    pub fn workshop(&self) -> std::io::Result<tempfile::TempDir> {
        tempfile::Builder::new().prefix("build-").tempdir_in(self.folder.join("tmp"))
    }

    /// What is known of a key. An entry that is damaged counts as unknown.
    pub fn get(&self, key: &Key) -> Option<Outcome> {
        let path = self.path(key, "json");
        let entry: Entry = serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?;
        if entry.schema != SCHEMA {
            return None;
        }
        let outcome = match entry.outcome {
            Stored::Failed(failure) => Err(failure),
            Stored::Built(mut built) => {
                built.artifact = built.artifact.each(|what, _| self.path(key, what));
                if checksums(&built.artifact).ok()? != entry.checksums {
                    return None;
                }
                Ok(built)
            }
        };
        touch(&path);
        Some(outcome)
    }

    /// Keeps an outcome and takes its files into the folder; the outcome that comes back names them there.
    pub fn put(&self, key: &Key, outcome: Outcome) -> std::io::Result<Outcome> {
        let says_more_of_the_machine = |failure: &CompileFailure| match failure {
            CompileFailure::Limit(_) => true,
            CompileFailure::Fault(fault) => fault.kind == FaultKind::Timeout,
            CompileFailure::Source(_) | CompileFailure::Unsupported(_) => false,
        };
        if outcome.as_ref().is_err_and(says_more_of_the_machine) {
            return Ok(outcome);
        }
        std::fs::create_dir_all(self.shard(key))?;
        let (outcome, stored, checksums) = match outcome {
            Err(failure) => (Err(failure.clone()), Stored::Failed(failure), Vec::new()),
            Ok(built) => {
                let built = self.take(key, built)?;
                (Ok(built.clone()), Stored::Built(built.clone()), checksums(&built.artifact)?)
            }
        };
        let text = serde_json::to_vec(&Entry { schema: SCHEMA, outcome: stored, checksums })?;
        let mut file = tempfile::NamedTempFile::new_in(self.folder.join("tmp"))?;
        std::io::Write::write_all(&mut file, &text)?;
        file.persist(self.path(key, "json"))?;
        self.count(&outcome, text.len() as u64);
        Ok(outcome)
    }

    fn take(&self, key: &Key, mut built: Built) -> std::io::Result<Built> {
        let taken = built.artifact.each(|what, _| self.path(key, what));
        for (from, to) in built.artifact.files().into_iter().zip(taken.files()) {
            std::fs::rename(from.1, to.1)?;
        }
        built.artifact = taken;
        Ok(built)
    }

    fn count(&self, outcome: &Outcome, bytes: u64) {
        let files = outcome.as_ref().map_or(Vec::new(), |built| built.artifact.files());
        let bytes = bytes + files.iter().map(|(_, path)| path.metadata().map_or(0, |data| data.len())).sum::<u64>();
        let written = self.written_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if written > self.limit_bytes / 10 {
            self.written_bytes.store(0, Ordering::Relaxed);
            self.prune();
        }
    }

    fn shard(&self, key: &Key) -> PathBuf {
        self.folder.join(&key.0[..2])
    }

    fn path(&self, key: &Key, what: &str) -> PathBuf {
        self.shard(key).join(format!("{}.{what}", key.0))
    }

    /// Removes what was used longest ago until the rest fits, and what builds left that never ended.
    fn prune(&self) {
        let now = SystemTime::now();
        let mut entries = self.entries();
        let mut bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
        entries.sort_by_key(|entry| entry.used);
        let old = entries.iter().filter(|entry| now.duration_since(entry.used).is_ok_and(|age| age > IN_USE));
        for entry in old {
            if bytes <= self.limit_bytes {
                break;
            }
            entry.files.iter().for_each(|file| drop(std::fs::remove_file(file)));
            bytes -= entry.bytes;
        }
        for path in children(&self.folder.join("tmp")) {
            let is_old = modified(&path).is_some_and(|time| now.duration_since(time).is_ok_and(|age| age > 6 * IN_USE));
            if is_old && std::fs::remove_dir_all(&path).is_err() {
                let _ = std::fs::remove_file(&path);
            }
        }
    }

    fn entries(&self) -> Vec<Used> {
        let mut entries: HashMap<PathBuf, Used> = HashMap::new();
        let shards = children(&self.folder).into_iter().filter(|path| !path.ends_with("tmp"));
        for file in shards.flat_map(|shard| children(&shard)) {
            let Ok(data) = file.metadata() else { continue };
            let used = data.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let entry = entries.entry(file.with_extension("")).or_insert(Used { files: Vec::new(), bytes: 0, used });
            entry.bytes += data.len();
            entry.used = entry.used.max(used);
            // The JSON goes first: files without it are nobody's.
            let position = if file.extension().is_some_and(|what| what == "json") { 0 } else { entry.files.len() };
            entry.files.insert(position, file);
        }
        entries.into_values().collect()
    }
}

/// An entry as the disk has it.
struct Used {
    files: Vec<PathBuf>,
    bytes: u64,
    used: SystemTime,
}

fn children(folder: &Path) -> Vec<PathBuf> {
    folder.read_dir().map(|entries| entries.flatten().map(|entry| entry.path()).collect()).unwrap_or_default()
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().ok()?.modified().ok()
}

fn touch(path: &Path) {
    let times = FileTimes::new().set_modified(SystemTime::now());
    if let Ok(file) = File::options().write(true).open(path) {
        let _ = file.set_times(times);
    }
}

fn checksums(artifact: &Artifact) -> std::io::Result<Vec<String>> {
    let checksum = |path: &Path| Ok(blake3::hash(&std::fs::read(path)?).to_hex().to_string());
    artifact.files().into_iter().map(|(_, path)| checksum(path)).collect()
}

/// Work that several threads ask for at once is done by the first; the others wait for its result.
#[derive(Debug)]
pub struct Flights<K, V> {
    under_way: Mutex<HashMap<K, Arc<Flight<V>>>>,
}

#[derive(Debug)]
struct Flight<V> {
    landed: Mutex<Option<V>>,
    news: Condvar,
}

impl<K, V> Default for Flights<K, V> {
    /// Nothing under way.
    fn default() -> Self {
        Self { under_way: Mutex::new(HashMap::new()) }
    }
}

impl<K: Clone + Eq + Hash, V: Clone> Flights<K, V> {
    /// Does the work, or waits for whoever is doing it. `lost` is the result where that thread panicked.
    pub fn join(&self, key: &K, work: impl FnOnce() -> V, lost: V) -> V {
        let (flight, is_first) = self.board(key);
        if is_first {
            // Lands even when the work panics, so that nobody waits for ever.
            let landing = Landing { flights: self, key, flight: &flight, result: lost };
            return landing.land(work());
        }
        let landed = flight.landed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let landed = flight.news.wait_while(landed, |landed| landed.is_none());
        landed.unwrap_or_else(|poisoned| poisoned.into_inner()).clone().unwrap_or(lost)
    }

    fn board(&self, key: &K) -> (Arc<Flight<V>>, bool) {
        let mut under_way = self.under_way.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(flight) = under_way.get(key) {
            return (Arc::clone(flight), false);
        }
        let flight = Arc::new(Flight { landed: Mutex::new(None), news: Condvar::new() });
        under_way.insert(key.clone(), Arc::clone(&flight));
        (flight, true)
    }
}

struct Landing<'a, K: Clone + Eq + Hash, V: Clone> {
    flights: &'a Flights<K, V>,
    key: &'a K,
    flight: &'a Flight<V>,
    result: V,
}

impl<K: Clone + Eq + Hash, V: Clone> Landing<'_, K, V> {
    fn land(mut self, result: V) -> V {
        self.result = result.clone();
        result
    }
}

impl<K: Clone + Eq + Hash, V: Clone> Drop for Landing<'_, K, V> {
    fn drop(&mut self) {
        *self.flight.landed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(self.result.clone());
        self.flights.under_way.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(self.key);
        self.flight.news.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::compile::Diagnostic;

    fn built(workshop: &Path, text: &str) -> Built {
        let path = workshop.join("candidate.cubin");
        std::fs::write(&path, text).unwrap();
        Built {
            artifact: Artifact::Cubin(path),
            program: crate::program::Program::default(),
            scratch_bytes: 7,
            resources: Vec::new(),
            compiler: "a compiler".to_owned(),
            seconds: 0.5,
        }
    }

    fn store(cache: &Cache, key: &Key, text: &str) -> PathBuf {
        let workshop = cache.workshop().unwrap();
        let outcome = cache.put(key, Ok(built(workshop.path(), text))).unwrap().unwrap();
        outcome.artifact.files()[0].1.to_path_buf()
    }

    #[test]
    fn what_is_put_is_got() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 1 << 20).unwrap();
        let key = Key::of(&["a", "b"]);
        assert_eq!(cache.get(&key), None);
        let path = store(&cache, &key, "code");
        let got = Cache::open(folder.path(), 1 << 20).unwrap().get(&key).unwrap().unwrap();
        assert_eq!((got.scratch_bytes, got.artifact), (7, Artifact::Cubin(path.clone())));
        assert_eq!(std::fs::read_to_string(path).unwrap(), "code");
    }

    #[test]
    fn failures_are_kept_and_limits_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 1 << 20).unwrap();
        let diagnostic = Diagnostic { line: Some(1), column: None, message: "no".to_owned() };
        let kept = [CompileFailure::Source(vec![diagnostic.clone()]), CompileFailure::Unsupported(diagnostic)];
        for (number, failure) in kept.into_iter().enumerate() {
            let key = Key::of(&[&number.to_string()]);
            cache.put(&key, Err(failure.clone())).unwrap().unwrap_err();
            assert_eq!(cache.get(&key), Some(Err(failure)));
        }
        let key = Key::of(&["limit"]);
        cache.put(&key, Err(CompileFailure::Limit("slow".to_owned()))).unwrap().unwrap_err();
        assert_eq!(cache.get(&key), None);
    }

    #[test]
    fn damage_counts_as_unknown() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 1 << 20).unwrap();
        let key = Key::of(&["k"]);
        let damages: [fn(&Path); 4] = [
            |path| std::fs::write(path, "cod").unwrap(),
            |path| std::fs::remove_file(path).unwrap(),
            |path| std::fs::write(path.with_extension("json"), "{\"schema\":2,").unwrap(),
            |path| std::fs::write(path.with_extension("json"), "").unwrap(),
        ];
        for damage in damages {
            let path = store(&cache, &key, "code");
            assert!(cache.get(&key).is_some());
            damage(&path);
            assert_eq!(cache.get(&key), None);
        }
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 1 << 20).unwrap();
        let keys = ["old", "used", "new"].map(|name| Key::of(&[name]));
        let hour = Duration::from_secs(3600);
        for (age, key) in [3, 2, 1].into_iter().zip(&keys) {
            let path = store(&cache, key, &"x".repeat(1000));
            for file in [path.clone(), path.with_extension("json")] {
                let time = FileTimes::new().set_modified(SystemTime::now() - age * hour);
                File::options().write(true).open(file).unwrap().set_times(time).unwrap();
            }
        }
        assert!(cache.get(&keys[0]).is_some(), "which makes it the most recently used");
        let _ = Cache::open(folder.path(), 3000).unwrap();
        let known = keys.each_ref().map(|key| cache.get(key).is_some());
        assert_eq!(known, [true, false, true]);
        let _ = Cache::open(folder.path(), 0).unwrap();
        assert!(cache.get(&keys[0]).is_some(), "what was just used stays whatever the limit");
    }

    #[test]
    fn keys_tell_parts_apart() {
        assert_ne!(Key::of(&["ab", "c"]), Key::of(&["a", "bc"]));
        assert_ne!(Key::of(&["a"]), Key::of(&["a", ""]));
    }

    #[test]
    fn one_thread_works_for_all() {
        let flights = Flights::default();
        let worked = AtomicUsize::new(0);
        let work = || {
            std::thread::sleep(Duration::from_millis(200));
            worked.fetch_add(1, Ordering::SeqCst) + 1
        };
        let results: Vec<usize> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| flights.join(&"key", work, 0))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(results, [1; 8]);
        assert_eq!(flights.join(&"key", work, 0), 2, "nothing is remembered");
    }

    #[test]
    fn nobody_waits_for_a_thread_that_panicked() {
        let flights: Flights<&str, i32> = Flights::default();
        let worked = std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                flights.join(
                    &"key",
                    || {
                        std::thread::sleep(Duration::from_millis(200));
                        panic!("on purpose")
                    },
                    -1,
                )
            });
            std::thread::sleep(Duration::from_millis(50));
            let second = flights.join(&"key", || 1, -1);
            assert!(first.join().is_err());
            second
        });
        assert_eq!(worked, -1);
    }
}
