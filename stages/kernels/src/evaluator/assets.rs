//! The reference's Python, which travels inside the binary.

use std::path::{Path, PathBuf};

use crate::fault::EvaluatorError;
use crate::kept;

include!(concat!(env!("OUT_DIR"), "/python.rs"));

/// Writes the files to a folder below `cache` that is named by their digest, and returns the path of reference.py.
pub fn unpack(cache: &Path) -> Result<PathBuf, EvaluatorError> {
    let mut hasher = blake3::Hasher::new_derive_key("cuda-agent reference files v1");
    for (name, text) in PYTHON {
        hasher.update(name.as_bytes()).update(&[0]).update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    let folder = cache.join("python").join(&hasher.finalize().to_hex()[..16]);
    let script = folder.join("reference.py");
    if !is_whole(&folder) {
        write(&folder).map_err(|error| {
            EvaluatorError::new(format!("{}: {error}", folder.display())).with_hint(kept::UNWRITABLE)
        })?;
    }
    Ok(script)
}

fn is_whole(folder: &Path) -> bool {
    kept::holds(folder, PYTHON)
}

fn write(folder: &Path) -> std::io::Result<()> {
    let parent = folder.parent().expect("it has one");
    std::fs::create_dir_all(parent)?;
    let partial = tempfile::tempdir_in(parent)?;
    for (name, text) in PYTHON {
        std::fs::write(partial.path().join(name), text)?;
    }
    kept::put(folder, partial, is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_folder_is_put_right() {
        let cache = tempfile::tempdir().unwrap();
        let script = unpack(cache.path()).unwrap();
        let judge = script.with_file_name("judge.py");
        let text = std::fs::read(&judge).unwrap();
        for damage in
            [|path: &Path| std::fs::write(path, "").unwrap(), |path: &Path| std::fs::remove_file(path).unwrap()]
        {
            damage(&judge);
            assert_eq!(unpack(cache.path()).unwrap(), script);
            assert_eq!(std::fs::read(&judge).unwrap(), text);
        }
        assert_eq!(std::fs::read_dir(cache.path().join("python")).unwrap().count(), 1);
    }
}
