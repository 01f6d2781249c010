//! The local journal of a by-row stage: every answer is appended before it is counted, so that a killed engine loses no
//! finished row.
//!
//! A live engine holds an advisory lock on its journal. A later run takes the journals that nobody holds, publishes
//! what they have, and removes them.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cuda_agent_protocol::RowResult;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::artifact::ArtifactError;
use crate::digest::Digest;

/// A journal that this engine writes.
pub struct Journal {
    path: PathBuf,
    file: Flock<File>,
}

/// A journal that a dead engine left, held so that no other one takes it.
pub struct Orphan {
    /// What its results are filed under.
    pub epoch: u32,
    journal: Journal,
}

impl Journal {
    /// Starts a journal in the state folder of a base key, for results that go to `store` with this epoch.
    pub fn create(state: &Path, store: &str, epoch: u32, run: &str) -> Result<Self, ArtifactError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(state).map_err(ArtifactError::io(state))?;
        let name = format!("{}{epoch:08}-{run}-{}.jsonl", prefix(store), NEXT.fetch_add(1, Ordering::Relaxed));
        // Locked under a name that nobody looks for: without its lock it would be taken for a dead engine's.
        let (fresh, path) = (state.join(format!(".{name}")), state.join(name));
        let file = OpenOptions::new().create_new(true).append(true).open(&fresh).map_err(ArtifactError::io(&fresh))?;
        let file = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, error)| ArtifactError::io(&fresh)(error.into()))?;
        fs::rename(&fresh, &path).map_err(ArtifactError::io(&path))?;
        Ok(Self { path, file })
    }

    /// Keeps an answer. One write call, so that a kill leaves a whole line or none but the last.
    pub fn append(&mut self, result: &RowResult) -> Result<(), ArtifactError> {
        let mut line = serde_json::to_vec(result).expect("answers are plain data");
        line.push(b'\n');
        self.file.write_all(&line).map_err(ArtifactError::io(&self.path))
    }

    /// Empties the journal: what it held is published.
    pub fn clear(&mut self) -> Result<(), ArtifactError> {
        self.file.set_len(0).map_err(ArtifactError::io(&self.path))
    }

    /// Removes the journal: its rows are published.
    pub fn remove(self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// What a journal's name starts with: another store must not get its rows.
fn prefix(store: &str) -> String {
    format!("rows-{}-", &Digest::of_bytes(store.as_bytes()).to_string()[..8])
}

/// Waits until nobody else on this machine takes orphans over, and keeps others from it while the result lives: whoever gets
/// the rows of a dead engine must see all that it had finished. `None` where there is no such folder.
pub async fn adopting(state: &Path) -> Option<Flock<File>> {
    let mut folder = File::open(state).ok()?;
    loop {
        match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
            Ok(held) => return Some(held),
            Err((back, Errno::EWOULDBLOCK)) => folder = back,
            // No locks on folders here: then two may publish the same.
            Err(_) => return None,
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Journals that dead engines left for this store.
pub fn orphans(state: &Path, store: &str) -> Vec<Orphan> {
    let Ok(items) = fs::read_dir(state) else { return Vec::new() };
    let mut found = Vec::new();
    for path in items.filter_map(|item| item.ok().map(|item| item.path())) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(rest) = name.strip_prefix(&prefix(store)).filter(|rest| rest.ends_with(".jsonl")) else { continue };
        let Some(epoch) = rest.get(..8).and_then(|epoch| epoch.parse().ok()) else { continue };
        let Ok(file) = OpenOptions::new().read(true).append(true).open(&path) else { continue };
        // Held: its engine lives.
        let Ok(file) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { continue };
        found.push(Orphan { epoch, journal: Journal { path, file } });
    }
    found
}

impl Orphan {
    /// Its answers, in batches of about `bytes` bytes. A line that is not an answer is left out: the last one may be torn, and
    /// a damaged one must not cost those after it.
    pub fn batches(&self, bytes: usize) -> impl Iterator<Item = Vec<RowResult>> {
        let mut file: &File = &self.journal.file;
        let _ = file.rewind();
        let mut lines = BufReader::new(file).split(b'\n');
        std::iter::from_fn(move || {
            let (mut batch, mut size) = (Vec::new(), 0);
            while size < bytes {
                let Some(Ok(line)) = lines.next() else { break };
                size += line.len();
                batch.extend(serde_json::from_slice::<RowResult>(&line).ok());
            }
            (size > 0).then_some(batch)
        })
    }

    /// Removes it: its answers are published.
    pub fn remove(self) {
        self.journal.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_agent_protocol::RowStatus;
    use std::collections::BTreeMap;

    fn result(row: &str) -> RowResult {
        RowResult { row: row.into(), status: RowStatus::Done, reason: None, detail: None, outputs: BTreeMap::new() }
    }

    fn answers(orphan: &Orphan) -> Vec<RowResult> {
        orphan.batches(usize::MAX).flatten().collect()
    }

    fn append(path: &Path, bytes: &[u8]) {
        OpenOptions::new().append(true).open(path).unwrap().write_all(bytes).unwrap();
    }

    #[test]
    fn only_orphans_are_taken_and_a_torn_line_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path(), "file:///a", 3, "r1").unwrap();
        journal.append(&result("0")).unwrap();
        journal.clear().unwrap();
        journal.append(&result("a")).unwrap();
        journal.append(&result("b")).unwrap();
        assert!(orphans(folder.path(), "file:///a").is_empty(), "a held journal belongs to a live engine");
        let path = journal.path.clone();
        drop(journal);
        append(&path, b"{\"row\":\"c\",\"sta");
        assert!(orphans(folder.path(), "memory://").is_empty(), "they belong to another store");
        let mut left = orphans(folder.path(), "file:///a");
        let orphan = left.pop().unwrap();
        assert_eq!((orphan.epoch, answers(&orphan)), (3, vec![result("a"), result("b")]));
        orphan.remove();
        assert!(orphans(folder.path(), "file:///a").is_empty());
    }

    #[tokio::test]
    async fn orphans_are_taken_over_by_one_at_a_time() {
        use futures::FutureExt;
        let folder = tempfile::tempdir().unwrap();
        let held = adopting(folder.path()).await;
        assert!(held.is_some());
        assert!(adopting(folder.path()).now_or_never().is_none(), "the second one waits");
        drop(held);
        assert!(adopting(folder.path()).await.is_some());
        assert!(adopting(&folder.path().join("none")).await.is_none(), "there is nothing to take over");
    }

    #[test]
    fn a_damaged_line_costs_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path(), "file:///a", 0, "r").unwrap();
        journal.append(&result("a")).unwrap();
        append(&journal.path, b"{\"row\":\"\xff\xfe\"}\n\n{}\n");
        journal.append(&result("b")).unwrap();
        drop(journal);
        let orphan = orphans(folder.path(), "file:///a").pop().unwrap();
        assert_eq!(answers(&orphan), [result("a"), result("b")]);
    }

    #[test]
    fn a_long_journal_is_read_in_batches() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path(), "file:///a", 0, "r").unwrap();
        let rows: Vec<RowResult> = (0..100).map(|row| result(&row.to_string())).collect();
        rows.iter().for_each(|row| journal.append(row).unwrap());
        drop(journal);
        let orphan = orphans(folder.path(), "file:///a").pop().unwrap();
        assert!(orphan.batches(200).all(|batch| batch.len() < 10));
        assert_eq!(orphan.batches(200).flatten().collect::<Vec<_>>(), rows);
    }

    /// While one thread looks for orphans without end, others begin journals, write and die: every answer is taken over.
    #[test]
    fn a_journal_that_is_being_made_is_nobodys_orphan() {
        use std::sync::atomic::AtomicBool;
        const JOURNALS: usize = 300;
        let folder = tempfile::tempdir().unwrap();
        let over = AtomicBool::new(false);
        let taken = std::thread::scope(|scope| {
            let adopter = scope.spawn(|| {
                let mut taken = 0;
                loop {
                    let last = over.load(Ordering::SeqCst);
                    for orphan in orphans(folder.path(), "file:///a") {
                        taken += answers(&orphan).len();
                        orphan.remove();
                    }
                    if last {
                        return taken;
                    }
                }
            });
            for number in 0..JOURNALS {
                let mut journal = Journal::create(folder.path(), "file:///a", 0, "r").unwrap();
                journal.append(&result(&number.to_string())).unwrap();
            }
            over.store(true, Ordering::SeqCst);
            adopter.join().unwrap()
        });
        assert_eq!(taken, JOURNALS);
    }
}
