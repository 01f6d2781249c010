//! Leases: who is making what, so that two engines do not make it twice.
//!
//! They only avoid double work; what counts is the record, which is created once. A lease names its holder's run, and lives
//! as long as that run's manifest is renewed: nothing is renewed for a lease itself. A dead one is passed by, by creating
//! the next number, which only one can do.
//!
//! The holder of number `n` is the only one as long as the numbers below it are there and dead, so nobody removes a number
//! that another one follows, and whoever created a number looks whether the one before is still there. Inside a run a
//! lease belongs to one stage: two stages of a run exclude each other as two runs do.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
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
    pub fn is_gone(&self) -> bool {
        let Some((held_at, pid, began)) = &self.process else { return false };
        place().is_some_and(|place| place == *held_at) && has_ended(started(*pid), || exists(*pid), *began)
    }

    /// What is left of a lease that was passed by: a step on the way to the next number, held by no run.
    fn nobody() -> Self {
        Self { run: "nobody".into(), host: String::new(), process: None }
    }
}

/// Whether the process that began then is gone, by when the one with its number started. `/proc` may hide the processes of
/// other users (`hidepid`), so one that it does not show may live.
fn has_ended(started: Option<u64>, exists: impl FnOnce() -> bool, began: u64) -> bool {
    started.map_or_else(|| !exists(), |started| started != began)
}

/// Whether there is a process with this number, whoever's it is.
fn exists(pid: u32) -> bool {
    i32::try_from(pid).is_ok_and(|pid| kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH))
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

/// A run, as it asks for leases.
#[derive(Debug)]
pub struct Claimant {
    /// The run, as other runs see it.
    pub holder: Holder,
    /// What it has seen of other runs.
    pub observer: Observer,
    /// What its stages hold, or are asking for.
    held: Held,
}

type Held = Arc<Mutex<HashSet<String>>>;

impl Claimant {
    /// A run that holds nothing yet.
    pub fn new(holder: Holder) -> Self {
        Self { holder, observer: Observer::default(), held: Held::default() }
    }

    /// Reserves a name for one stage; `None` where another stage of this run has it.
    fn reserve(&self, name: &str) -> Option<Reserved> {
        let fresh = self.held.lock().expect("no panic happens under this lock").insert(name.to_owned());
        fresh.then(|| Reserved { name: name.to_owned(), held: self.held.clone() })
    }
}

/// A name that one stage of a run has to itself, until this is dropped.
#[derive(Debug)]
struct Reserved {
    name: String,
    held: Held,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.held.lock().expect("no panic happens under this lock").remove(&self.name);
    }
}

/// A lease that is held.
#[derive(Debug)]
pub struct Lease {
    reserved: Reserved,
    number: u32,
    /// What the object says.
    body: Bytes,
    /// What the numbers before say that were passed by, from 1.
    passed: Vec<Bytes>,
}

impl Lease {
    /// Whether its last holder died: there may be something of theirs to take over.
    pub fn is_inherited(&self) -> bool {
        !self.passed.is_empty()
    }
}

/// What came of asking for a lease.
#[derive(Debug)]
pub enum Asked {
    /// It is ours.
    Granted(Lease),
    /// Somebody has it who lives: another run, or another stage of this one.
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
    pub fn mark_dead(&self, runs: impl IntoIterator<Item = String>) {
        self.dead.lock().expect("no panic happens under this lock").extend(runs);
    }

    fn is_marked_dead(&self, run: &str) -> bool {
        self.dead.lock().expect("no panic happens under this lock").contains(run)
    }

    /// Whether a run, or a worker, has shown the same sign of life for too long.
    pub fn is_silent(&self, run: &str, heartbeat_at: f64) -> bool {
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

/// The name of the lease on some rows of a base key, whatever epoch they are done for: a refresh and a run that lacks the
/// same rows must not do them side by side. (The 0 was an epoch once; engines of then are excluded, too.)
pub fn of_rows(base: &Digest, bucket: u8) -> String {
    format!("{base}-0-{bucket:02}")
}

fn object(name: &str, number: u32) -> String {
    format!("{LAYOUT}/leases/{name}.{number}")
}

impl Store {
    /// Asks for a lease.
    pub async fn lease(&self, name: &str, claimant: &Claimant) -> Result<Asked, StoreError> {
        if self.is_read_only() {
            return Err(self.truth().error("lease", name, "the store is only read"));
        }
        let Some(reserved) = claimant.reserve(name) else { return Ok(Asked::Taken(claimant.holder.clone())) };
        let body = Bytes::from(serde_json::to_vec(&claimant.holder).expect("holders are plain data"));
        let (mut passed, mut conflicts) = (Vec::new(), 0);
        loop {
            let number = passed.len() as u32 + 1;
            if self.truth().create(&object(name, number), body.clone()).await? {
                let before = match number {
                    1 => None,
                    number => self.truth().read(&object(name, number - 1)).await?,
                };
                if before.as_ref() == passed.last() {
                    return Ok(Asked::Granted(Lease { reserved, number, body, passed }));
                }
                // The number before was given back meanwhile, and somebody may have begun again at 1.
                self.truth().delete(&object(name, number)).await?;
            } else {
                match self.holder_of(name, number).await? {
                    // A retried success, or what an earlier attempt of this same run could not give back.
                    Some((_, there)) if there == claimant.holder => {
                        return Ok(Asked::Granted(Lease { reserved, number, body, passed }));
                    }
                    Some((_, there)) if !self.is_dead(&there, &claimant.observer).await? => {
                        return Ok(Asked::Taken(there));
                    }
                    Some((bytes, _)) => {
                        passed.push(bytes);
                        continue;
                    }
                    None => {}
                }
            }
            // Given up just now; or the server reports a conflict with nothing.
            if conflicts == CONFLICTS {
                return Err(self.truth().error("lease", name, "the server reports a conflict with nothing"));
            }
            tokio::time::sleep(Duration::from_millis(20 << conflicts)).await;
            conflicts += 1;
            passed.clear();
        }
    }

    /// Who holds a lease and lives.
    pub async fn leased_by(&self, name: &str, observer: &Observer) -> Result<Option<Holder>, StoreError> {
        let mut number = 1;
        while let Some((_, there)) = self.holder_of(name, number).await? {
            if !self.is_dead(&there, observer).await? {
                return Ok(Some(there));
            }
            number += 1;
        }
        Ok(None)
    }

    /// Gives a lease back, and removes those that it passed by. What is somebody else's by now, since this run was silent for
    /// so long that it counted as dead, stays as it is.
    pub async fn give_back(&self, lease: Lease) -> Result<(), StoreError> {
        let (truth, name) = (self.truth(), &lease.reserved.name);
        let (own, next) = (object(name, lease.number), object(name, lease.number + 1));
        let (there, next) = futures::try_join!(truth.read(&own), truth.read(&next))?;
        if there != Some(lease.body) {
            return Ok(());
        }
        let nobody = Bytes::from(serde_json::to_vec(&Holder::nobody()).expect("holders are plain data"));
        if next.is_some() {
            return truth.overwrite(&own, nobody).await;
        }
        for (number, passed) in (1..).zip(lease.passed) {
            let name = object(name, number);
            if truth.read(&name).await?.is_some_and(|there| there == passed || there == nobody) {
                truth.delete(&name).await?;
            }
        }
        truth.delete(&own).await
    }

    /// Whether a run goes on, as far as it can be seen from here.
    pub async fn is_alive(&self, run: &Holder, observer: &Observer) -> Result<bool, StoreError> {
        Ok(!self.is_dead(run, observer).await?)
    }

    async fn holder_of(&self, name: &str, number: u32) -> Result<Option<(Bytes, Holder)>, StoreError> {
        let name = object(name, number);
        let Some(bytes) = self.truth().read(&name).await? else { return Ok(None) };
        match serde_json::from_slice(&bytes) {
            Ok(holder) => Ok(Some((bytes, holder))),
            Err(_) => {
                // Torn or foreign: nobody can hold it.
                self.truth().delete(&name).await?;
                Ok(None)
            }
        }
    }

    async fn is_dead(&self, holder: &Holder, observer: &Observer) -> Result<bool, StoreError> {
        if holder.is_gone() || observer.is_marked_dead(&holder.run) {
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
    use crate::store::{RunManifest, RunState};

    async fn run(store: &Store, id: &str, ended_at: Option<f64>) {
        let run = RunManifest {
            schema: 1,
            run: id.into(),
            pipeline: "p".into(),
            started_at: 0.0,
            heartbeat_at: 1.0,
            ended_at,
            outcome: RunState::Running,
            params: Default::default(),
            stages: Default::default(),
        };
        store.put_run(&run).await.unwrap();
    }

    fn elsewhere(run: &str) -> Holder {
        Holder { run: run.into(), host: "elsewhere".into(), process: Some(("another boot".into(), 1, 1)) }
    }

    fn claimant(run: &str) -> Claimant {
        Claimant::new(elsewhere(run))
    }

    async fn granted(store: &Store, name: &str, claimant: &Claimant) -> Lease {
        match store.lease(name, claimant).await.unwrap() {
            Asked::Granted(lease) => lease,
            Asked::Taken(by) => panic!("{} has it", by.run),
        }
    }

    async fn taken(store: &Store, name: &str, claimant: &Claimant) -> String {
        match store.lease(name, claimant).await.unwrap() {
            Asked::Granted(_) => panic!("nobody had it"),
            Asked::Taken(by) => by.run,
        }
    }

    async fn left(store: &Store) -> Vec<String> {
        store.local().list("v1/leases").await.unwrap().into_iter().map(|meta| meta.name).collect()
    }

    #[tokio::test]
    async fn one_of_many_gets_it() {
        let (store, a, b) = (Store::memory(), claimant("a"), claimant("b"));
        run(&store, "a", None).await;
        run(&store, "b", None).await;
        let lease = granted(&store, "x", &a).await;
        assert!(!lease.is_inherited());
        assert_eq!(taken(&store, "x", &b).await, "a");
        store.give_back(lease).await.unwrap();
        granted(&store, "x", &b).await;
    }

    #[tokio::test]
    async fn two_stages_of_a_run_exclude_each_other() {
        let (store, a) = (Store::memory(), claimant("a"));
        run(&store, "a", None).await;
        let lease = granted(&store, "x", &a).await;
        assert_eq!(taken(&store, "x", &a).await, "a", "another stage of the run asks");
        // A job that was ended, or a store that was away: nobody in the run has it any more, and the object is still there.
        drop(lease);
        let lease = granted(&store, "x", &a).await;
        store.give_back(lease).await.unwrap();
        assert_eq!(left(&store).await, [""; 0]);
    }

    #[tokio::test]
    async fn a_dead_holder_is_passed_by() {
        let (store, b) = (Store::memory(), claimant("b"));
        // Its run has ended, was never recorded, or its process is gone from this machine.
        run(&store, "ended", Some(2.0)).await;
        run(&store, "killed", None).await;
        let mut gone = Holder::this("killed");
        gone.process.as_mut().unwrap().2 += 1;
        run(&store, "before the reboot", None).await;
        b.observer.mark_dead(["before the reboot".to_owned()]);
        for dead in [elsewhere("ended"), elsewhere("unrecorded"), elsewhere("before the reboot"), gone] {
            let name = dead.run.clone();
            granted(&store, &name, &Claimant::new(dead)).await;
            assert_eq!(store.leased_by(&name, &b.observer).await.unwrap(), None);
            run(&store, "b", None).await;
            let lease = granted(&store, &name, &b).await;
            assert!(lease.is_inherited());
            assert_eq!(store.leased_by(&name, &b.observer).await.unwrap(), Some(elsewhere("b")));
            store.give_back(lease).await.unwrap();
        }
        assert_eq!(left(&store).await, [""; 0], "nothing is left behind");
    }

    #[tokio::test]
    async fn a_holder_that_was_passed_by_takes_nothing_away() {
        let (store, silent, second, third) =
            (Store::memory(), claimant("silent"), claimant("second"), claimant("third"));
        for name in ["silent", "second", "third"] {
            run(&store, name, None).await;
        }
        let late = granted(&store, "x", &silent).await;
        second.observer.mark_dead(["silent".to_owned()]);
        let lease = granted(&store, "x", &second).await;
        // It was only stopped, and goes on: to `third`, who did not see its silence, too.
        store.give_back(late).await.unwrap();
        assert_eq!(taken(&store, "x", &third).await, "second");
        store.give_back(lease).await.unwrap();
        assert_eq!(left(&store).await, [""; 0]);

        // Where its number is somebody else's by now, that stays.
        let late = granted(&store, "x", &silent).await;
        let lease = granted(&store, "x", &second).await;
        store.give_back(lease).await.unwrap();
        let lease = granted(&store, "x", &third).await;
        store.give_back(late).await.unwrap();
        assert_eq!(taken(&store, "x", &second).await, "third");
        store.give_back(lease).await.unwrap();
        assert_eq!(left(&store).await, [""; 0]);
    }

    /// Whoever saw a dead number, and creates the next one after both were removed, must not have it beside a new first one.
    #[tokio::test]
    async fn many_that_pass_by_the_dead_hold_it_one_after_another() {
        use std::sync::atomic::{AtomicU32, Ordering};
        let (store, holders) = (Store::memory(), Arc::new(AtomicU32::new(0)));
        run(&store, "ended", Some(2.0)).await;
        let mut tasks = tokio::task::JoinSet::new();
        for number in 0..8 {
            let (store, holders, name) = (store.clone(), holders.clone(), format!("run-{number}"));
            run(&store, &name, None).await;
            tasks.spawn(async move {
                let claimant = claimant(&name);
                for round in 0..40 {
                    if round % 4 == 0 {
                        // One that dies at once.
                        let _ = store.lease("x", &Claimant::new(elsewhere("ended"))).await;
                    }
                    let Ok(Asked::Granted(lease)) = store.lease("x", &claimant).await else { continue };
                    assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two hold it");
                    tokio::task::yield_now().await;
                    holders.fetch_sub(1, Ordering::SeqCst);
                    store.give_back(lease).await.unwrap();
                }
            });
        }
        while let Some(task) = tasks.join_next().await {
            task.unwrap();
        }
    }

    #[tokio::test]
    async fn what_no_engine_wrote_holds_nothing() {
        let (store, a) = (Store::memory(), claimant("a"));
        run(&store, "a", None).await;
        store.local().create("v1/leases/x.1", Bytes::from_static(b"{\"run\":")).await.unwrap();
        let lease = granted(&store, "x", &a).await;
        store.give_back(lease).await.unwrap();
        assert_eq!(left(&store).await, [""; 0]);
    }

    /// Engines of other versions must ask for the same names.
    #[test]
    fn the_names_of_leases_stay() {
        let digest = Digest([10; 32]);
        assert_eq!(of_key(&digest), "0a".repeat(32));
        assert_eq!(of_rows(&digest, 7), format!("{}-0-07", "0a".repeat(32)));
    }

    #[test]
    fn a_process_is_known_by_its_boot_its_namespace_and_its_start() {
        let place = place().unwrap();
        let (boot, namespace) = place.split_once(' ').unwrap();
        assert!(boot.len() == 36 && namespace.starts_with("pid:["), "{place}");
        let own = started(std::process::id());
        assert!(own.is_some() && own != started(1));
    }

    #[test]
    fn a_process_that_proc_does_not_show_may_live() {
        assert!(has_ended(Some(2), || unreachable!(), 1), "another one has its number now");
        assert!(!has_ended(Some(1), || unreachable!(), 1));
        assert!(!has_ended(None, || true, 1), "hidden");
        assert!(has_ended(None, || false, 1));
        assert!(exists(std::process::id()) && exists(1) && !exists(u32::MAX) && !exists(i32::MAX as u32));
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
