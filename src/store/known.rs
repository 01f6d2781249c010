//! What this machine knows to be in the remote tier, so that what was shared once is not asked about again.
//!
//! The file: the magic, then entries of 16 bytes of the digest of an object's name and 4 of the time it was written
//! in seconds, little-endian. The last entry counts. It is only ever appended to, a torn end is cut off, and it can be deleted
//! at any time: then objects are asked about once more.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::files::replace_file;
use crate::digest::Digest;

const MAGIC: &[u8; 8] = b"CAKNOWN1";
const ENTRY: usize = 20;
/// In place of a time: it is there, but nobody knows since when.
const OLD: u32 = 1;
/// So many entries wait before they are written.
const BATCH: usize = 256;

type Name = [u8; 16];

/// What is known of one remote tier.
#[derive(Debug)]
pub struct Known {
    path: PathBuf,
    names: HashMap<Name, u32>,
    unwritten: Vec<u8>,
}

impl Known {
    /// Reads what earlier processes learned.
    pub fn load(path: &Path) -> Self {
        let mut known = Self { path: path.to_owned(), names: HashMap::new(), unwritten: Vec::new() };
        let bytes = fs::read(path).unwrap_or_default();
        if !bytes.is_empty() && !bytes.starts_with(MAGIC) {
            let _ = fs::remove_file(path);
        }
        if let Some(entries) = bytes.strip_prefix(MAGIC) {
            let count = entries.len() / ENTRY;
            for entry in entries.chunks_exact(ENTRY) {
                let (name, time) = entry.split_at(16);
                let name = name.try_into().expect("16 bytes");
                known.names.insert(name, u32::from_le_bytes(time.try_into().expect("4 bytes")));
            }
            if count > 2 * known.names.len() + BATCH {
                known.shorten();
            }
        }
        known
    }

    /// When an object that is there was written, in seconds since 1970, or long ago where that is not known.
    pub fn seen(&self, name: &str) -> Option<f64> {
        self.names.get(&short(name)).map(|time| f64::from(*time))
    }

    /// Notes that an object is there, and when it was written, where that is known. What is known already, with as late a
    /// time, is not written again.
    pub fn add(&mut self, name: &str, written: Option<f64>) {
        let time = written.map_or(OLD, |time| (time as u32).max(OLD));
        if self.names.get(&short(name)).is_none_or(|known| *known < time) {
            self.enter(name, time);
        }
    }

    /// Notes that an object is not there, or cannot be trusted. Where it was believed to be there, whatever else is known
    /// may be as wrong, like the record that names it: all of it is forgotten.
    pub fn remove(&mut self, name: &str) {
        if self.seen(name).is_some() {
            self.clear();
        }
    }

    fn enter(&mut self, name: &str, time: u32) {
        let name = short(name);
        self.names.insert(name, time);
        self.unwritten.extend(name);
        self.unwritten.extend(time.to_le_bytes());
        if self.unwritten.len() >= BATCH * ENTRY {
            self.write();
        }
    }

    /// Writes the file anew without what was overtaken. An entry that another process adds meanwhile may be lost, which
    /// costs a question.
    fn shorten(&self) {
        let mut bytes = MAGIC.to_vec();
        for (name, time) in &self.names {
            bytes.extend(name);
            bytes.extend(time.to_le_bytes());
        }
        let _ = replace_file(&self.path, &bytes);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.names.clear();
        self.unwritten.clear();
        let _ = fs::remove_file(&self.path);
    }

    /// Keeps what was learned; it is a help, so where it cannot be written, that is all.
    pub fn write(&mut self) {
        if self.unwritten.is_empty() {
            return;
        }
        let unwritten = std::mem::take(&mut self.unwritten);
        let written = || -> std::io::Result<()> {
            fs::create_dir_all(self.path.parent().unwrap_or(Path::new(".")))?;
            let mut file = fs::OpenOptions::new().create(true).append(true).open(&self.path)?;
            let length = file.metadata()?.len();
            if length < MAGIC.len() as u64 {
                file.set_len(0)?;
                file.write_all(&[MAGIC, unwritten.as_slice()].concat())
            } else {
                let torn = (length - MAGIC.len() as u64) % ENTRY as u64;
                if torn != 0 {
                    file.set_len(length - torn)?;
                }
                // One write, so that two processes do not mix their entries.
                file.write_all(&unwritten)
            }
        };
        let _ = written();
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        self.write();
    }
}

fn short(name: &str) -> Name {
    let digest = Digest::of_bytes(name.as_bytes());
    *digest.0.first_chunk().expect("digests have 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_outlives_the_process_and_torn_ends_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cache/known");
        let mut known = Known::load(&path);
        known.add("v1/a", Some(1e9));
        known.add("v1/b", None);
        assert_eq!((known.seen("v1/a"), known.seen("v1/b")), (Some(1e9), Some(1.0)));
        known.add("v1/a", None);
        assert_eq!(known.seen("v1/a"), Some(1e9), "a time is not forgotten");
        known.remove("v1/c");
        drop(known);
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"torn").unwrap();
        let mut known = Known::load(&path);
        assert!(known.seen("v1/a").is_some() && known.seen("v1/c").is_none());
        known.add("v1/c", None);
        drop(known);
        let mut known = Known::load(&path);
        assert!(known.seen("v1/a").is_some() && known.seen("v1/c").is_some());
        known.remove("v1/c");
        drop(known);
        let known = Known::load(&path);
        assert!(known.seen("v1/a").is_none() && known.seen("v1/c").is_none(), "what named it cannot be trusted either");
        fs::write(&path, "something else").unwrap();
        assert!(Known::load(&path).seen("v1/a").is_none());
    }

    #[test]
    fn what_was_overtaken_is_left_out_in_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("known");
        let mut known = Known::load(&path);
        (0..2000).for_each(|round| known.add("v1/a", Some(1e9 + f64::from(round))));
        drop(known);
        let long = fs::metadata(&path).unwrap().len();
        assert_eq!(Known::load(&path).seen("v1/a"), Some(1e9 + 1999.0));
        assert!(fs::metadata(&path).unwrap().len() < long / 100);
    }
}
