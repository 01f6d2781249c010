//! The local journal of a by-row stage: every answer is appended before it is counted, so that a killed engine loses no
//! finished row.
//!
//! A live engine holds an advisory lock on its journal. A later run takes the journals that nobody holds, publishes
//! what they have, and removes them.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use cuda_agent_protocol::RowResult;
use nix::fcntl::{Flock, FlockArg};

use crate::artifact::ArtifactError;
use crate::digest::Digest;

/// A journal that this engine writes.
pub struct Journal {
    path: PathBuf,
    file: Flock<File>,
}

impl Journal {
    /// Starts a journal in the state folder of a base key, for results that go to `store` with this epoch.
    pub fn create(state: &Path, store: &str, epoch: u32, run: &str) -> Result<Self, ArtifactError> {
        fs::create_dir_all(state).map_err(ArtifactError::io(state))?;
        let path = (0..)
            .map(|number| state.join(format!("{}{epoch:08}-{run}-{number}.jsonl", prefix(store))))
            .find(|path| !path.exists())
            .expect("numbers do not end");
        let file = OpenOptions::new().create_new(true).append(true).open(&path).map_err(ArtifactError::io(&path))?;
        let file = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, error)| ArtifactError::io(&path)(error.into()))?;
        Ok(Self { path, file })
    }

    /// Keeps an answer. One write call, so that a kill leaves a whole line or none but the last.
    pub fn append(&mut self, result: &RowResult) -> Result<(), ArtifactError> {
        let mut line = serde_json::to_vec(result).expect("answers are plain data");
        line.push(b'\n');
        self.file.write_all(&line).map_err(ArtifactError::io(&self.path))
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

/// Journals that dead engines left for this store: epoch, answers, and the held file to be removed once those are published.
pub fn orphans(state: &Path, store: &str) -> Vec<(u32, Vec<RowResult>, Journal)> {
    let Ok(items) = fs::read_dir(state) else { return Vec::new() };
    let mut found = Vec::new();
    for path in items.filter_map(|item| item.ok().map(|item| item.path())) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(rest) = name.strip_prefix(&prefix(store)).filter(|rest| rest.ends_with(".jsonl")) else { continue };
        let Some(epoch) = rest.get(..8).and_then(|epoch| epoch.parse().ok()) else { continue };
        let Ok(file) = OpenOptions::new().read(true).append(true).open(&path) else { continue };
        // Held: its engine lives.
        let Ok(file) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { continue };
        found.push((epoch, read(&path), Journal { path, file }));
    }
    found
}

/// Whole lines only: the last one may be torn.
fn read(path: &Path) -> Vec<RowResult> {
    let Ok(file) = File::open(path) else { return Vec::new() };
    let lines = BufReader::new(file).lines().map_while(Result::ok);
    lines.filter_map(|line| serde_json::from_str(&line).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_agent_protocol::RowStatus;
    use std::collections::BTreeMap;

    fn result(row: &str) -> RowResult {
        RowResult { row: row.into(), status: RowStatus::Done, reason: None, detail: None, outputs: BTreeMap::new() }
    }

    #[test]
    fn only_orphans_are_taken_and_a_torn_line_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(folder.path(), "file:///a", 3, "r1").unwrap();
        journal.append(&result("a")).unwrap();
        journal.append(&result("b")).unwrap();
        assert!(orphans(folder.path(), "file:///a").is_empty(), "a held journal belongs to a live engine");
        let path = journal.path.clone();
        drop(journal);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"row\":\"c\",\"sta").unwrap();
        assert!(orphans(folder.path(), "memory://").is_empty(), "they belong to another store");
        let mut left = orphans(folder.path(), "file:///a");
        let (epoch, results, held) = left.pop().unwrap();
        assert_eq!((epoch, results), (3, vec![result("a"), result("b")]));
        held.remove();
        assert!(orphans(folder.path(), "file:///a").is_empty());
    }
}
