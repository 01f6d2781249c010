//! Work folders of runs: who is alive, and whose can go.
//!
//! A run holds a lock on a file in its folder. What a dead run left (a killed engine's attempts, a failed attempt kept to be
//! looked at) is removed when the next run starts its first program.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::time::SystemTime;

use nix::fcntl::{Flock, FlockArg};

/// No stage's name starts with a dot.
const MARK: &str = ".alive";

/// The lock of a live run.
pub type Alive = Flock<File>;

/// Marks a run's folder as alive, and removes the folders of dead runs.
pub fn claim(work: &Path, run: &str) -> Option<Alive> {
    // Made under another name, so that nobody sees it before it is locked.
    let fresh = work.join(format!(".{run}"));
    fs::create_dir_all(&fresh).ok()?;
    let alive = lock(&File::create(fresh.join(MARK)).ok()?)?;
    fs::rename(&fresh, work.join(run)).ok()?;
    let others = fs::read_dir(work).ok().into_iter().flatten().filter_map(Result::ok);
    for other in others.filter(|other| other.file_name().to_str() != Some(run)) {
        let mark = File::open(other.path().join(MARK));
        // A folder without a mark was made by hand; one with a dot is being made right now.
        let is_fresh = other.file_name().to_string_lossy().starts_with('.');
        if !is_fresh && mark.is_ok_and(|mark| lock(&mark).is_some()) {
            let _ = fs::remove_dir_all(other.path());
        }
    }
    Some(alive)
}

/// Runs of this machine that are dead: they left a folder that nobody holds.
pub fn dead(work: &Path) -> Vec<String> {
    let folders = fs::read_dir(work).ok().into_iter().flatten().filter_map(Result::ok);
    let free = |folder: &fs::DirEntry| {
        let mark = File::open(folder.path().join(MARK));
        mark.is_ok_and(|mark| Flock::lock(mark, FlockArg::LockSharedNonblock).is_ok())
    };
    let names = folders.filter(free).filter_map(|folder| folder.file_name().into_string().ok());
    names.filter(|name| !name.starts_with('.')).collect()
}

/// When the oldest of the runs that go on on this machine began.
pub fn oldest_live(work: &Path) -> Option<SystemTime> {
    let folders = fs::read_dir(work).ok().into_iter().flatten().filter_map(Result::ok);
    let marks = folders.filter_map(|folder| File::open(folder.path().join(MARK)).ok());
    // Whoever lives has the lock, and the mark is as old as the run.
    let live = marks.filter(|mark| {
        let free = mark.try_clone().is_ok_and(|mark| Flock::lock(mark, FlockArg::LockSharedNonblock).is_ok());
        !free
    });
    live.filter_map(|mark| mark.metadata().ok()?.modified().ok()).min()
}

fn lock(file: &File) -> Option<Alive> {
    Flock::lock(file.try_clone().ok()?, FlockArg::LockExclusiveNonblock).ok()
}

/// Ends a run: its folder goes, but for the attempts that `keep` names (and the mark, so that the next run finds them).
pub fn release(alive: Alive, work: &Path, run: &str, keep: &BTreeSet<String>) {
    let folder = work.join(run);
    if keep.is_empty() {
        let _ = fs::remove_dir_all(&folder);
    } else {
        for item in fs::read_dir(&folder).ok().into_iter().flatten().filter_map(Result::ok) {
            let name = item.file_name().to_string_lossy().into_owned();
            if name != MARK && !keep.contains(&name) {
                let _ = fs::remove_dir_all(item.path());
            }
        }
    }
    drop(alive);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dead_are_those_whose_mark_is_free() {
        let work = tempfile::tempdir().unwrap();
        let alive = claim(work.path(), "lives").unwrap();
        fs::create_dir(work.path().join("by-hand")).unwrap();
        fs::create_dir(work.path().join("killed")).unwrap();
        File::create(work.path().join("killed").join(MARK)).unwrap();
        assert_eq!(dead(work.path()), ["killed"]);
        drop(alive);
        assert_eq!(dead(work.path()).len(), 2);
    }

    #[test]
    fn the_oldest_live_run_is_found_by_its_lock() {
        let work = tempfile::tempdir().unwrap();
        assert_eq!(oldest_live(&work.path().join("nowhere")), None);
        let age = |run: &str, seconds| {
            let mark = File::options().append(true).open(work.path().join(run).join(MARK)).unwrap();
            let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            mark.set_modified(time).unwrap();
            Some(time)
        };
        let runs = ["dead", "old", "new"].map(|run| claim(work.path(), run).unwrap());
        age("dead", 1);
        let (old, new) = (age("old", 2), age("new", 3));
        let [dead, first, second] = runs;
        drop(dead);
        assert_eq!(oldest_live(work.path()), old);
        drop(first);
        assert_eq!(oldest_live(work.path()), new);
        drop(second);
        assert_eq!(oldest_live(work.path()), None);
    }

    #[test]
    fn the_folders_of_dead_runs_go_and_those_of_live_ones_stay() {
        let work = tempfile::tempdir().unwrap();
        let live = claim(work.path(), "live").unwrap();
        let dead = claim(work.path(), "dead").unwrap();
        fs::write(work.path().join("dead/left"), "").unwrap();
        drop(dead);
        let next = claim(work.path(), "next").unwrap();
        assert!(!work.path().join("dead").exists());
        assert!(work.path().join("live").exists());
        release(next, work.path(), "next", &BTreeSet::new());
        assert!(!work.path().join("next").exists());
        fs::create_dir(work.path().join("live/failed")).unwrap();
        fs::create_dir(work.path().join("live/done")).unwrap();
        release(live, work.path(), "live", &BTreeSet::from(["failed".to_owned()]));
        assert!(work.path().join("live/failed").exists(), "a failed attempt stays to be looked at");
        assert!(!work.path().join("live/done").exists());
        drop(claim(work.path(), "last"));
        assert!(!work.path().join("live").exists(), "until the next run");
    }
}
