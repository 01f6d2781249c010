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

/// A journal that this engine writes.
pub struct Journal {
    path: PathBuf,
    file: Flock<File>,
}

impl Journal {
    /// Starts a journal in the state folder of a base key.
    pub fn create(state: &Path, run: &str) -> Result<Self, ArtifactError> {
        fs::create_dir_all(state).map_err(ArtifactError::io(state))?;
        let path = (0..)
            .map(|number| state.join(format!("rows-{run}-{number}.jsonl")))
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

/// Journals that dead engines left: their answers, and the held files to be removed once those are published.
pub fn orphans(state: &Path) -> Vec<(Vec<RowResult>, Journal)> {
    let Ok(items) = fs::read_dir(state) else { return Vec::new() };
    let mut found = Vec::new();
    for path in items.filter_map(|item| item.ok().map(|item| item.path())) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !(name.starts_with("rows-") && name.ends_with(".jsonl")) {
            continue;
        }
        let Ok(file) = OpenOptions::new().read(true).append(true).open(&path) else { continue };
        // Held: its engine lives.
        let Ok(file) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { continue };
        found.push((read(&path), Journal { path, file }));
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
        let mut journal = Journal::create(folder.path(), "r1").unwrap();
        journal.append(&result("a")).unwrap();
        journal.append(&result("b")).unwrap();
        assert!(orphans(folder.path()).is_empty(), "a held journal belongs to a live engine");
        let path = journal.path.clone();
        drop(journal);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"row\":\"c\",\"sta").unwrap();
        let mut left = orphans(folder.path());
        let (results, held) = left.pop().unwrap();
        assert_eq!(results, [result("a"), result("b")]);
        held.remove();
        assert!(orphans(folder.path()).is_empty());
    }
}
