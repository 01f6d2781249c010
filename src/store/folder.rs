//! A folder with objects. What it has is at hand, so nothing here waits for anybody, and any thread may ask.
//!
//! Its files are those of the object-store layer's `LocalFileSystem`, which writes and lists the large and the many.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::Mode;
use object_store::path::Path;

use super::files::{create_file, is_absent, read_file, replace_file};
use super::{LAYOUT, StoreError, blob_name, record_name};
use crate::digest::Digest;

/// Whether a name is that of its file. `..` is written as `%2E%2E`, which is a name and leads nowhere.
fn stays(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    name.split('/').all(|part| !matches!(part, "" | "." | "..") && part.bytes().all(plain))
}

/// A folder with objects.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    url: String,
    /// For who asks for very many objects.
    held: Option<Arc<Held>>,
}

/// The folders of records and of blobs, opened: what digests name is looked up from there.
#[derive(Debug)]
struct Held {
    records: OwnedFd,
    blobs: OwnedFd,
}

impl Held {
    /// `None` where one of them does not exist.
    fn open(store: &FilePath) -> Option<Self> {
        let open = |name: &str| {
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            nix::fcntl::open(&store.join(LAYOUT).join(name), flags, Mode::empty()).ok()
        };
        Some(Self { records: open("records")?, blobs: open("blobs")? })
    }

    fn record(&self, key: &Digest, generation: u32) -> io::Result<File> {
        // KEY/GENERATION, as `record_name` writes it.
        let mut name = [0; 64 + 1 + 10 + 1];
        hex::encode_to_slice(key.0, &mut name[..64]).expect("a digest has 32 bytes");
        write!(&mut name[64..], "/{generation:08}").expect("an integer of 32 bits has up to ten digits");
        let name = CStr::from_bytes_until_nul(&name).expect("it is longer than what is in it");
        Ok(nix::fcntl::openat(&self.records, name, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?.into())
    }

    fn blob_size(&self, digest: &Digest) -> io::Result<u64> {
        // The first two digits, `/`, and all of them, as `blob_name` writes it.
        let mut name = [0; 2 + 1 + 64 + 1];
        hex::encode_to_slice(digest.0, &mut name[3..67]).expect("a digest has 32 bytes");
        name.copy_within(3..5, 0);
        name[2] = b'/';
        let name = CStr::from_bytes_until_nul(&name).expect("it is longer than what is in it");
        Ok(nix::sys::stat::fstatat(&self.blobs, name, AtFlags::empty())?.st_size as u64)
    }
}

impl Folder {
    /// Opens a folder, and makes it where it does not exist.
    pub fn open(path: &FilePath) -> Result<Self, StoreError> {
        let url = format!("file://{}", path.display());
        let fail = |error: io::Error| StoreError::of_io(&url, "open", "", &error);
        std::fs::create_dir_all(path).map_err(fail)?;
        let path = path.canonicalize().map_err(fail)?;
        Ok(Self { url: format!("file://{}", path.display()), path, held: None })
    }

    /// The same for a while, in which nobody puts another folder in its place.
    pub fn held(mut self) -> Self {
        self.held = Held::open(&self.path).map(Arc::new);
        self
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
        match stays(name) {
            true => self.path.join(name),
            false => self.path.join(Path::from(name).as_ref()),
        }
    }

    /// Reads a whole object; `None` where there is none.
    pub fn read(&self, name: &str) -> Result<Option<Bytes>, StoreError> {
        self.whole(File::open(self.path_of(name)), || name.to_owned())
    }

    /// Reads the record of a generation of a key; `None` where there is none.
    pub fn read_record(&self, key: &Digest, generation: u32) -> Result<Option<Bytes>, StoreError> {
        match &self.held {
            Some(held) => self.whole(held.record(key, generation), || record_name(key, generation)),
            None => self.read(&record_name(key, generation)),
        }
    }

    fn whole(&self, file: io::Result<File>, name: impl Fn() -> String) -> Result<Option<Bytes>, StoreError> {
        match file.and_then(read_file) {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(self.failed("read", &name(), &error)),
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
        self.length(std::fs::metadata(self.path_of(name)).map(|metadata| metadata.len()), || name.to_owned())
    }

    /// The size of a blob, `None` where there is none.
    pub fn blob_size(&self, digest: &Digest) -> Result<Option<u64>, StoreError> {
        match &self.held {
            Some(held) => self.length(held.blob_size(digest), || blob_name(digest)),
            None => self.size_of(&blob_name(digest)),
        }
    }

    fn length(&self, length: io::Result<u64>, name: impl Fn() -> String) -> Result<Option<u64>, StoreError> {
        match length {
            Ok(length) => Ok(Some(length)),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(self.failed("look at", &name(), &error)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_the_folder() {
        let parent = tempfile::tempdir().unwrap();
        std::fs::write(parent.path().join("outside"), "no").unwrap();
        let folder = Folder::open(&parent.path().join("store")).unwrap();
        for name in ["v1/a.b/c-d_e", "v1/m[lr=0.1]", "v1/.hidden", "v1/x..y"] {
            assert!(folder.create(name, name.as_bytes()).unwrap());
            assert_eq!(folder.read(name).unwrap(), Some(Bytes::from(name)));
            assert_eq!(folder.size_of(name).unwrap(), Some(name.len() as u64));
        }
        for name in ["v1/none", "v1/a.b/c-d_e/f", "../outside", "v1/../../outside"] {
            assert_eq!((folder.read(name).unwrap(), folder.size_of(name).unwrap()), (None, None), "{name}");
        }
    }

    #[test]
    fn a_held_folder_has_the_same_objects() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Folder::open(parent.path()).unwrap();
        assert!(folder.clone().held().held.is_none(), "there is nothing to hold yet");
        let digest = Digest::of_bytes(b"one");
        for generation in [1, 12_345_678, u32::MAX] {
            assert!(folder.create(&record_name(&digest, generation), b"record").unwrap());
        }
        assert!(folder.create(&blob_name(&digest), b"three").unwrap());
        let held = folder.clone().held();
        assert!(held.held.is_some());
        let other = Digest::of_bytes(b"other");
        for folder in [&folder, &held] {
            for generation in [1, 12_345_678, u32::MAX] {
                assert_eq!(folder.read_record(&digest, generation).unwrap(), Some(Bytes::from("record")));
            }
            assert_eq!((folder.read_record(&digest, 2).unwrap(), folder.read_record(&other, 1).unwrap()), (None, None));
            assert_eq!((folder.blob_size(&digest).unwrap(), folder.blob_size(&other).unwrap()), (Some(5), None));
        }
    }
}
