//! A folder with objects. What it has is at hand, so nothing here waits for anybody, and any thread may ask.
//!
//! Its files are those of the object-store layer's `LocalFileSystem`, which writes and lists the large and the many.

use std::io;
use std::path::{Path as FilePath, PathBuf};

use bytes::Bytes;
use object_store::path::Path;

use super::StoreError;
use super::files::{create_file, is_absent, read_file, replace_file};

/// Characters of names that are written as they are.
const PLAIN: [bool; 256] = {
    let (mut plain, mut byte) = ([false; 256], 0);
    while byte < 256 {
        plain[byte] = (byte as u8).is_ascii_alphanumeric() || matches!(byte as u8, b'_' | b'-' | b'.');
        byte += 1;
    }
    plain
};

/// Whether a name is that of its file. `..` is written as `%2E%2E`, which leads nowhere.
fn stays(name: &[u8]) -> bool {
    let mut begin = 0;
    let is_part = |part: &[u8]| !matches!(part, b"" | b"." | b"..");
    for (at, byte) in name.iter().enumerate() {
        if *byte == b'/' {
            if !is_part(&name[begin..at]) {
                return false;
            }
            begin = at + 1;
        } else if !PLAIN[usize::from(*byte)] {
            return false;
        }
    }
    is_part(&name[begin..])
}

/// A folder with objects.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    url: String,
}

impl Folder {
    /// Opens a folder, and makes it where it does not exist.
    pub fn open(path: &FilePath) -> Result<Self, StoreError> {
        let url = format!("file://{}", path.display());
        let fail = |error: io::Error| StoreError::of_io(&url, "open", "", &error);
        std::fs::create_dir_all(path).map_err(fail)?;
        let path = path.canonicalize().map_err(fail)?;
        Ok(Self { url: format!("file://{}", path.display()), path })
    }

    /// Where it lies.
    pub fn path(&self) -> &FilePath {
        &self.path
    }

    /// The same as a URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// An error about an object here.
    pub fn error(&self, action: &'static str, name: &str, message: impl ToString) -> StoreError {
        StoreError::new(&self.url, action, name, message.to_string())
    }

    fn failed(&self, action: &'static str, name: &str, error: &io::Error) -> StoreError {
        StoreError::of_io(&self.url, action, name, error)
    }

    /// The file of an object. The object-store layer writes unusual characters of names as `%5B`, and so must we.
    pub fn path_of(&self, name: &str) -> PathBuf {
        match stays(name.as_bytes()) {
            true => self.path.join(name),
            false => self.path.join(Path::from(name).as_ref()),
        }
    }

    /// Reads a whole object; `None` where there is none.
    pub fn read(&self, name: &str) -> Result<Option<Bytes>, StoreError> {
        match read_file(&self.path_of(name)) {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(self.failed("read", name, &error)),
        }
    }

    /// Reads part of an object.
    pub fn read_range(&self, name: &str, offset: u64, length: u64) -> Result<Bytes, StoreError> {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; length as usize];
        let file = std::fs::File::open(self.path_of(name));
        let read = file.and_then(|file| file.read_exact_at(&mut bytes, offset));
        read.map_err(|error| self.failed("read", name, &error))?;
        Ok(bytes.into())
    }

    /// The size of an object, `None` where there is none.
    pub fn size_of(&self, name: &str) -> Result<Option<u64>, StoreError> {
        match std::fs::metadata(self.path_of(name)) {
            Ok(metadata) => Ok(Some(metadata.len())),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(self.failed("look at", name, &error)),
        }
    }

    /// The names of what lies right below a prefix, in no order.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>, StoreError> {
        let items = match std::fs::read_dir(self.path_of(prefix)) {
            Ok(items) => items,
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            Err(error) => return Err(self.failed("list", prefix, &error)),
        };
        let name =
            |item: io::Result<std::fs::DirEntry>| item.map(|item| item.file_name().to_string_lossy().into_owned());
        items.map(name).collect::<io::Result<_>>().map_err(|error| self.failed("list", prefix, &error))
    }

    /// Creates a small object; `false` where the name is taken.
    pub fn create(&self, name: &str, bytes: &[u8]) -> Result<bool, StoreError> {
        create_file(&self.path_of(name), bytes).map_err(|error| self.failed("write", name, &error))
    }

    /// Writes a small object, whether or not it was there.
    pub fn overwrite(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        replace_file(&self.path_of(name), bytes).map_err(|error| self.failed("write", name, &error))
    }

    /// Removes an object, if it is there.
    pub fn delete(&self, name: &str) -> Result<(), StoreError> {
        match std::fs::remove_file(self.path_of(name)) {
            Err(error) if !is_absent(&error) => Err(self.failed("remove", name, &error)),
            _ => Ok(()),
        }
    }
}
