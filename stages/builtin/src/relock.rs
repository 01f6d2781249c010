//! `make relock`: one command over the locks of every crate with kinds.

use std::fs;
use std::path::{Path, PathBuf};

use crate::lock::{self, Lock};

/// Writes each crate's lock below `stages` anew and says what changed. Refuses changed sources under a version that
/// was not raised, unless `same_results` vouches that they make the same results; then nothing is written at all.
pub fn relock(stages: &Path, same_results: bool) -> Result<String, String> {
    let mut locks = Vec::new();
    let mut refused = String::new();
    for home in lock::homes(stages)? {
        match renewed(&home, same_results)? {
            Ok(renewal) => locks.push((home.join(lock::LOCK_FILE), renewal)),
            Err(kinds) => refused += &kinds,
        }
    }
    if !refused.is_empty() {
        return Err(format!(
            "sources changed, versions did not:\n{refused}\
             Raise `version:` in the stage.yaml; or, where the results cannot differ: make relock SAME_RESULTS=1"
        ));
    }
    locks.iter().map(|(path, renewal)| write(stages, path, renewal)).collect()
}

/// A lock that is to replace another.
struct Renewal {
    lock: Lock,
    is_current: bool,
    changes: String,
}

fn renewed(home: &Path, same_results: bool) -> Result<Result<Renewal, String>, String> {
    let (old, kinds) = (lock::read_lock(home)?, lock::read_kinds(home)?);
    let changes = kinds.iter().filter_map(|kind| lock::explain(kind, &old)).collect();
    let new = lock::relock(&kinds, &old, same_results);
    Ok(new.map(|lock| Renewal { is_current: lock == old, lock, changes }))
}

fn write(stages: &Path, path: &PathBuf, renewal: &Renewal) -> Result<String, String> {
    let name = path.strip_prefix(stages).unwrap_or(path).display();
    if renewal.is_current {
        return Ok(format!("{name} is current\n"));
    }
    let text = serde_json::to_string_pretty(&renewal.lock).map_err(|error| error.to_string())? + "\n";
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(format!("{}{name} is written\n", renewal.changes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two crates with a kind each, and one without.
    fn stages() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let stages = folder.path().join("stages");
        for path in ["stages/a/k/k.py", "stages/b/k/k.py", "stages/protocol/python/cuda_agent_stage.py"] {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        for name in ["a", "b", "protocol"] {
            fs::write(stages.join(name).join("Cargo.toml"), "").unwrap();
        }
        for name in ["a", "b"] {
            let manifest = format!("name: {name}/k\nversion: 1.0.0\nrun: [python, k.py]\nsources: [k.py]\n");
            fs::write(stages.join(name).join("k/stage.yaml"), manifest).unwrap();
        }
        folder
    }

    #[test]
    fn one_command_locks_every_crate_with_kinds() {
        let folder = stages();
        let stages = folder.path().join("stages");
        let said = relock(&stages, false).unwrap();
        assert_eq!(said, "a/k 1.0.0 is new\na/stages.lock is written\nb/k 1.0.0 is new\nb/stages.lock is written\n");
        assert_eq!(relock(&stages, false).unwrap(), "a/stages.lock is current\nb/stages.lock is current\n");
        assert_eq!(lock::outdated(&stages.join("b")).unwrap(), None);
        assert!(!stages.join("protocol/stages.lock").exists());
    }

    #[test]
    fn one_refused_kind_leaves_every_lock_as_it_was() {
        let folder = stages();
        let stages = folder.path().join("stages");
        relock(&stages, false).unwrap();
        fs::write(stages.join("b/k/k.py"), "# edited").unwrap();
        let raised = fs::read_to_string(stages.join("a/k/stage.yaml")).unwrap().replace("1.0.0", "1.1.0");
        fs::write(stages.join("a/k/stage.yaml"), raised).unwrap();
        let refusal = relock(&stages, false).unwrap_err();
        assert!(refusal.contains("changed stages/b/k/k.py") && !refusal.contains("a/k"), "{refusal}");
        assert!(lock::outdated(&stages.join("a")).unwrap().unwrap().contains("a/k 1.1.0 (locked: 1.0.0)"));
        assert!(relock(&stages, true).unwrap().contains("b/stages.lock is written"));
        assert_eq!(lock::outdated(&stages.join("a")).unwrap(), None);
    }

    #[test]
    fn a_kind_that_is_gone_is_out_of_date_until_it_is_locked_away() {
        let folder = stages();
        let stages = folder.path().join("stages");
        relock(&stages, false).unwrap();
        fs::remove_dir_all(stages.join("a/k")).unwrap();
        assert!(lock::outdated(&stages.join("a")).unwrap().unwrap().contains("a/k is gone"));
        relock(&stages, false).unwrap();
        assert_eq!(lock::outdated(&stages.join("a")).unwrap(), None);
    }
}
