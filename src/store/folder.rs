//! A folder with objects. What it has is at hand, so nothing here waits for anybody, and any thread may ask.
//!
//! Its files are those of the object-store layer's `LocalFileSystem`, which writes and lists the large and the many.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::Mode;
use object_store::path::Path;

use super::StoreError;
use super::files::{create_file, is_absent, read_file, replace_file};

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
    /// The folder itself, for who asks for very many objects: each name is then looked up from here.
    opened: Option<Arc<OwnedFd>>,
}

impl Folder {
    /// Opens a folder, and makes it where it does not exist.
    pub fn open(path: &FilePath) -> Result<Self, StoreError> {
        let url = format!("file://{}", path.display());
        let fail = |error: io::Error| StoreError::of_io(&url, "open", "", &error);
        std::fs::create_dir_all(path).map_err(fail)?;
        let path = path.canonicalize().map_err(fail)?;
        Ok(Self { url: format!("file://{}", path.display()), path, opened: None })
    }

    /// The same for a while, in which nobody puts another folder in its place.
    pub fn held(mut self) -> Self {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        self.opened = nix::fcntl::open(&self.path, flags, Mode::empty()).ok().map(Arc::new);
        self
    }

    /// The folder to look a name up from, where that is held and the name is that of its file.
    fn holding(&self, name: &str) -> Option<&OwnedFd> {
        self.opened.as_deref().filter(|_| stays(name))
    }

    fn open_file(&self, name: &str) -> io::Result<File> {
        match self.holding(name) {
            Some(folder) => {
                let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
                Ok(nix::fcntl::openat(folder, name, flags, Mode::empty())?.into())
            }
            None => File::open(self.path_of(name)),
        }
    }

    fn length(&self, name: &str) -> io::Result<u64> {
        match self.holding(name) {
            Some(folder) => Ok(nix::sys::stat::fstatat(folder, name, AtFlags::empty())?.st_size as u64),
            None => Ok(std::fs::metadata(self.path_of(name))?.len()),
        }
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
        match self.open_file(name).and_then(read_file) {
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
        match self.length(name) {
            Ok(length) => Ok(Some(length)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_folder_has_the_same_objects() {
        let parent = tempfile::tempdir().unwrap();
        std::fs::write(parent.path().join("outside"), "no").unwrap();
        let folder = Folder::open(&parent.path().join("store")).unwrap();
        for name in ["v1/a.b/c-d_e", "v1/m[lr=0.1]", "v1/.hidden", "v1/x..y"] {
            assert!(folder.create(name, name.as_bytes()).unwrap());
        }
        let held = folder.clone().held();
        assert!(held.opened.is_some());
        for folder in [&folder, &held] {
            for name in ["v1/a.b/c-d_e", "v1/m[lr=0.1]", "v1/.hidden", "v1/x..y"] {
                assert_eq!(folder.read(name).unwrap(), Some(Bytes::from(name)));
                assert_eq!(folder.size_of(name).unwrap(), Some(name.len() as u64));
            }
            for name in ["v1/none", "v1/a.b/c-d_e/f", "../outside", "v1/../../outside"] {
                assert_eq!((folder.read(name).unwrap(), folder.size_of(name).unwrap()), (None, None), "{name}");
            }
        }
    }
}
