//! Leases: who is making what, so that two engines do not make it twice.
//!
//! They only avoid double work; what counts is the record, which is created once. A lease names its holder's run, and lives
//! as long as that run's manifest is renewed: nothing is renewed for a lease itself. A dead one is passed by, by creating
//! the next number, which only one can do.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{CONFLICTS, LAYOUT, Store, StoreError};
use crate::digest::Digest;

/// A run whose manifest has not changed for so long, by the observer's own clock, is dead.
const TTL: Duration = Duration::from_secs(90);

/// Who holds a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The run.
    pub run: String,
    /// The machine, for people.
    pub host: String,
    /// This boot of the machine and its namespace of processes, the process, and when that started: on the same machine, a
    /// holder that was killed is known to be gone at once.
    pub process: Option<(String, u32, u64)>,
}

impl Holder {
    /// This process.
    pub fn this(run: &str) -> Self {
        let pid = std::process::id();
        let host = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned());
        let process = place().zip(started(pid)).map(|(place, started)| (place, pid, started));
        Self { run: run.into(), host: host.unwrap_or_default(), process }
    }

    /// Whether it is a process of this machine that is gone.
    fn is_gone(&self) -> bool {
        let Some((held_at, pid, began)) = &self.process else { return false };
        place().is_some_and(|place| place == *held_at) && started(*pid) != Some(*began)
    }
}

/// This boot and this namespace of processes.
fn place() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), namespace.display()))
}

/// When a process started, in ticks since boot.
fn started(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything.
    let (_, rest) = text.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// A lease that is held.
#[derive(Debug)]
pub struct Lease {
    name: String,
    number: u32,
}

/// What came of asking for a lease.
#[derive(Debug)]
pub enum Asked {
    /// It is ours.
    Granted(Lease),
    /// Somebody has it who lives.
    Taken(Holder),
}

/// What an observer has seen of other runs.
#[derive(Debug, Default)]
pub struct Observer {
    /// By run: the last sign of life, and since when it is the last.
    seen: Mutex<HashMap<String, (u64, Instant)>>,
    /// Runs that are known to be dead.
    dead: Mutex<HashSet<String>>,
}

impl Observer {
    /// Notes runs that are dead, as those of this machine can be told by their work folders: also those before its last
    /// reboot, and those of other containers.
    pub fn bury(&self, runs: impl IntoIterator<Item = String>) {
        self.dead.lock().expect("no panic happens under this lock").extend(runs);
    }

    fn is_buried(&self, run: &str) -> bool {
        self.dead.lock().expect("no panic happens under this lock").contains(run)
    }

    /// Whether a run has shown the same sign of life for too long.
    fn is_silent(&self, run: &str, heartbeat_at: f64) -> bool {
        let sign = heartbeat_at.to_bits();
        let mut seen = self.seen.lock().expect("no panic happens under this lock");
        let last = seen.entry(run.to_owned()).or_insert_with(|| (sign, Instant::now()));
        if last.0 != sign {
            *last = (sign, Instant::now());
        }
        last.1.elapsed() > TTL
    }
}

/// The name of the lease on making the result of a key.
pub fn of_key(key: &Digest) -> String {
    key.to_string()
}

/// The name of the lease on some rows of a base key.
pub fn of_rows(base: &Digest, epoch: u32, bucket: u8) -> String {
    format!("{base}-{epoch}-{bucket:02}")
}

fn object(name: &str, number: u32) -> String {
    format!("{LAYOUT}/leases/{name}.{number}")
}

impl Store {
    /// Asks for a lease.
    pub async fn lease(&self, name: &str, holder: &Holder, observer: &Observer) -> Result<Asked, StoreError> {
        let body = serde_json::to_vec(holder).expect("holders are plain data");
        if self.far().is_some_and(|far| far.is_read_only()) {
            return Err(self.truth().error("lease", name, "the store is only read"));
        }
        let (mut number, mut conflicts) = (1, 0);
        loop {
            if self.truth().create(&object(name, number), body.clone()).await? {
                return Ok(Asked::Granted(Lease { name: name.into(), number }));
            }
            match self.holder_of(name, number).await? {
                // A retried success, or an earlier attempt of this same run.
                Some(there) if there == *holder => return Ok(Asked::Granted(Lease { name: name.into(), number })),
                Some(there) if !self.is_dead(&there, observer).await? => return Ok(Asked::Taken(there)),
                Some(_) => number += 1,
                // Given up just now; or the server reports a conflict with nothing.
                None if conflicts == CONFLICTS => {
                    return Err(self.truth().error("lease", name, "the server reports a conflict with nothing"));
                }
                None => {
                    tokio::time::sleep(Duration::from_millis(20 << conflicts)).await;
                    conflicts += 1;
                }
            }
        }
    }

    /// Who holds a lease and lives.
    pub async fn leased_by(&self, name: &str, observer: &Observer) -> Result<Option<Holder>, StoreError> {
        let mut number = 1;
        while let Some(there) = self.holder_of(name, number).await? {
            if !self.is_dead(&there, observer).await? {
                return Ok(Some(there));
            }
            number += 1;
        }
        Ok(None)
    }

    /// Gives a lease back, and takes away those that it passed by.
    pub async fn give_back(&self, lease: &Lease) -> Result<(), StoreError> {
        for number in 1..=lease.number {
            self.truth().delete(&object(&lease.name, number)).await?;
        }
        Ok(())
    }

    async fn holder_of(&self, name: &str, number: u32) -> Result<Option<Holder>, StoreError> {
        let name = object(name, number);
        let Some(bytes) = self.truth().read(&name).await? else { return Ok(None) };
        match serde_json::from_slice(&bytes) {
            Ok(holder) => Ok(Some(holder)),
            Err(_) => {
                // Torn or foreign: nobody can hold it.
                self.truth().delete(&name).await?;
                Ok(None)
            }
        }
    }

    async fn is_dead(&self, holder: &Holder, observer: &Observer) -> Result<bool, StoreError> {
        if holder.is_gone() || observer.is_buried(&holder.run) {
            return Ok(true);
        }
        let bytes = self.truth().read(&format!("{LAYOUT}/runs/{}", holder.run)).await?;
        // A manifest is there before a run's first lease.
        let Some(run) = bytes.and_then(|bytes| serde_json::from_slice::<super::RunManifest>(&bytes).ok()) else {
            return Ok(true);
        };
        Ok(run.ended_at.is_some() || observer.is_silent(&run.run, run.heartbeat_at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::RunManifest;

    async fn run(store: &Store, id: &str, ended_at: Option<f64>) {
        let run = RunManifest {
            schema: 1,
            run: id.into(),
            pipeline: "p".into(),
            started_at: 0.0,
            heartbeat_at: 1.0,
            ended_at,
            outcome: "running".into(),
            params: Default::default(),
            stages: Default::default(),
        };
        store.put_run(&run).await.unwrap();
    }

    fn elsewhere(run: &str) -> Holder {
        Holder { run: run.into(), host: "elsewhere".into(), process: Some(("another boot".into(), 1, 1)) }
    }

    #[tokio::test]
    async fn one_of_many_gets_it() {
        let (store, observer) = (Store::memory(), Observer::default());
        run(&store, "a", None).await;
        run(&store, "b", None).await;
        let Asked::Granted(lease) = store.lease("x", &elsewhere("a"), &observer).await.unwrap() else { panic!() };
        let Asked::Taken(by) = store.lease("x", &elsewhere("b"), &observer).await.unwrap() else { panic!() };
        assert_eq!(by.run, "a");
        assert!(matches!(store.lease("x", &elsewhere("a"), &observer).await.unwrap(), Asked::Granted(_)), "its own");
        store.give_back(&lease).await.unwrap();
        assert!(matches!(store.lease("x", &elsewhere("b"), &observer).await.unwrap(), Asked::Granted(_)));
    }

    #[tokio::test]
    async fn a_dead_holder_is_passed_by() {
        let (store, observer) = (Store::memory(), Observer::default());
        // Its run has ended, was never recorded, or its process is gone from this machine.
        run(&store, "ended", Some(2.0)).await;
        run(&store, "killed", None).await;
        let mut gone = Holder::this("killed");
        gone.process.as_mut().unwrap().2 += 1;
        run(&store, "before the reboot", None).await;
        observer.bury(["before the reboot".to_owned()]);
        for dead in [elsewhere("ended"), elsewhere("unrecorded"), elsewhere("before the reboot"), gone] {
            assert!(matches!(store.lease(&dead.run, &dead, &observer).await.unwrap(), Asked::Granted(_)));
            assert_eq!(store.leased_by(&dead.run, &observer).await.unwrap(), None);
            run(&store, "b", None).await;
            let Asked::Granted(lease) = store.lease(&dead.run, &elsewhere("b"), &observer).await.unwrap() else {
                panic!("{dead:?}")
            };
            assert_eq!(store.leased_by(&dead.run, &observer).await.unwrap(), Some(elsewhere("b")));
            store.give_back(&lease).await.unwrap();
        }
        assert!(store.near().list("v1/leases").await.unwrap().is_empty(), "nothing is left behind");
    }

    #[tokio::test]
    async fn silence_is_measured_by_the_observers_own_clock() {
        let observer = Observer::default();
        assert!(!observer.is_silent("a", 1.0), "however old it says it is");
        observer.seen.lock().unwrap().get_mut("a").unwrap().1 -= TTL + Duration::from_secs(1);
        assert!(observer.is_silent("a", 1.0));
        assert!(!observer.is_silent("a", 0.5), "any change is a sign of life, also back in time");
    }
}
