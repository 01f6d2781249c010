//! Folders of finished attempts that can serve another one.
//!
//! ext4 takes a third of a millisecond to make a folder while files are being removed, and an attempt has three of them.
//! Most attempts leave theirs as they found them, since publishing moves their outputs away. Such a folder is given to the
//! next attempt by one rename.

use std::fs::{self, DirEntry};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::folders::{OUTPUTS, REQUEST, TEMPORARY};

/// The folders of a run that nobody works in.
#[derive(Debug, Default)]
pub struct SpareFolders(Mutex<Vec<PathBuf>>);

impl SpareFolders {
    /// Makes a spare folder the one at `folder`, if there is one. Otherwise the attempt makes its own.
    pub fn take(&self, folder: &Path) {
        let mut spare = self.0.lock().expect("no panic happens under this lock");
        // A stage that is executed once more in a run has the folder it had.
        if let Some(own) = spare.iter().position(|path| path == folder) {
            spare.swap_remove(own);
        } else if let Some(path) = spare.pop() {
            // Where it can't be moved it stays until the run ends.
            let _ = fs::rename(path, folder);
        }
    }

    /// Keeps the folder of a finished attempt for another one; `false` where the program has left something in it.
    pub fn give(&self, folder: &Path) -> bool {
        let is_good = is_as_made(folder).unwrap_or(false);
        if is_good {
            self.0.lock().expect("no panic happens under this lock").push(folder.to_owned());
        }
        is_good
    }
}

/// Whether a folder holds what the engine makes for every program and nothing else, with the permissions that it gave.
fn is_as_made(folder: &Path) -> io::Result<bool> {
    let mode = match folder.parent() {
        Some(above) => fs::metadata(above)?.permissions().mode(),
        None => return Ok(false),
    };
    let is_empty_folder = |item: &DirEntry| -> io::Result<bool> {
        let metadata = item.metadata()?;
        let is_plain = metadata.is_dir() && metadata.permissions().mode() == mode;
        Ok(is_plain && fs::read_dir(item.path())?.next().is_none())
    };
    // The request is written over: what is reached by another name too must not be.
    let is_plain_file = |item: &DirEntry| -> io::Result<bool> {
        let metadata = item.metadata()?;
        Ok(metadata.is_file() && metadata.nlink() == 1)
    };
    if fs::symlink_metadata(folder)?.permissions().mode() != mode {
        return Ok(false);
    }
    for item in fs::read_dir(folder)? {
        let item = item?;
        let is_known = match item.file_name().to_str() {
            Some(OUTPUTS | TEMPORARY) => is_empty_folder(&item)?,
            Some(REQUEST) => is_plain_file(&item)?,
            _ => false,
        };
        if !is_known {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run's folder with an attempt as it is after its outputs were published.
    fn finished(name: &str) -> (tempfile::TempDir, PathBuf) {
        let run = tempfile::tempdir().unwrap();
        fs::set_permissions(run.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let folder = run.path().join(name);
        for made in [folder.clone(), folder.join(OUTPUTS), folder.join(TEMPORARY)] {
            fs::create_dir(&made).unwrap();
            fs::set_permissions(&made, fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::write(folder.join(REQUEST), "{}").unwrap();
        (run, folder)
    }

    #[test]
    fn the_next_attempt_gets_the_folder_by_a_rename() {
        let (run, folder) = finished("first");
        let made = fs::metadata(&folder).unwrap().ino();
        let spare = SpareFolders::default();
        assert!(spare.give(&folder));
        let next = run.path().join("next");
        spare.take(&next);
        assert_eq!(fs::metadata(&next).unwrap().ino(), made);
        assert!(!folder.exists());
        let third = run.path().join("third");
        spare.take(&third);
        assert!(!third.exists(), "a folder serves one attempt at a time");
    }

    #[test]
    fn a_stage_that_is_executed_again_has_its_own_folder_and_nobody_else_has() {
        let (run, folder) = finished("first");
        let spare = SpareFolders::default();
        assert!(spare.give(&folder));
        spare.take(&folder);
        spare.take(&run.path().join("other"));
        assert!(folder.exists() && !run.path().join("other").exists());
    }

    #[test]
    fn a_folder_that_somebody_works_in_is_not_replaced() {
        let (run, folder) = finished("first");
        let spare = SpareFolders::default();
        assert!(spare.give(&folder));
        let busy = run.path().join("busy");
        fs::create_dir(&busy).unwrap();
        fs::write(busy.join("result"), "1").unwrap();
        spare.take(&busy);
        assert_eq!(fs::read_to_string(busy.join("result")).unwrap(), "1");
    }

    #[test]
    fn what_a_program_has_changed_serves_nobody() {
        type Change = fn(&Path);
        let changes: [(&str, Change); 7] = [
            ("a file of its own", |folder| fs::write(folder.join("notes"), "").unwrap()),
            ("an output that nobody declared", |folder| fs::write(folder.join(OUTPUTS).join("more"), "").unwrap()),
            ("a temporary file", |folder| fs::write(folder.join(TEMPORARY).join("cache"), "").unwrap()),
            ("permissions", |folder| {
                fs::set_permissions(folder.join(TEMPORARY), fs::Permissions::from_mode(0o700)).unwrap();
            }),
            ("a link in place of a folder", |folder| {
                fs::remove_dir(folder.join(OUTPUTS)).unwrap();
                std::os::unix::fs::symlink("/tmp", folder.join(OUTPUTS)).unwrap();
            }),
            ("a link in place of the request", |folder| {
                fs::remove_file(folder.join(REQUEST)).unwrap();
                std::os::unix::fs::symlink("/dev/null", folder.join(REQUEST)).unwrap();
            }),
            ("another name of the request", |folder| {
                fs::hard_link(folder.join(REQUEST), folder.parent().unwrap().join("name")).unwrap();
            }),
        ];
        for (what, change) in changes {
            let (run, folder) = finished("first");
            change(&folder);
            let spare = SpareFolders::default();
            assert!(!spare.give(&folder), "{what} would reach the next program");
            spare.take(&run.path().join("next"));
            assert!(!run.path().join("next").exists());
        }
    }
}
