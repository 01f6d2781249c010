//! Folders of files that are made once and kept. A full disk, or a copy of the cache, may have left less of one: whoever
//! opens it looks whether it is whole.

use std::path::Path;

/// What to do where none can be made.
pub const UNWRITABLE: &str =
    "work in a folder that can be written: .cuda-agent is made in the project's, or in the current one";

/// Whether a folder has these files with these texts.
pub fn holds(folder: &Path, files: &[(&str, &str)]) -> bool {
    files.iter().all(|(name, text)| std::fs::read(folder.join(name)).is_ok_and(|found| found == text.as_bytes()))
}

/// Gives a folder its name. What stands there is kept if it is whole: another process may have been faster.
pub fn put(folder: &Path, made: tempfile::TempDir, is_whole: impl Fn(&Path) -> bool) -> std::io::Result<()> {
    if folder.is_dir() && !is_whole(folder) {
        // Aside first: taking it apart where it stands would break whoever opens it meanwhile.
        let aside = made.path().join("replaced");
        std::fs::rename(folder, &aside)?;
        std::fs::remove_dir_all(&aside)?;
    }
    match std::fs::rename(made.path(), folder) {
        Ok(()) => drop(made.keep()),
        Err(_) if is_whole(folder) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}
