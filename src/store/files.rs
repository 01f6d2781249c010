//! Plain files: written whole or not at all, read in as few steps as can be.

use std::io::Read;
use std::path::{Path as FilePath, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::digest::Digest;

/// Larger files are digested by a thread of their own while they are copied.
const LARGE: u64 = 8 << 20;

/// A file that is being written beside where it shall be, under a name that no listing takes for an object. It is removed
/// unless it is put there.
pub struct Partial<'a> {
    target: &'a FilePath,
    path: PathBuf,
}

impl<'a> Partial<'a> {
    /// For a file that shall be at `target`; nothing is written yet.
    pub fn beside(target: &'a FilePath) -> Self {
        Self { target, path: unique_neighbour(target) }
    }

    /// Where to write.
    pub fn path(&self) -> &FilePath {
        &self.path
    }

    /// Writes it, in a folder that is made where there is none.
    fn write(&self, bytes: &[u8]) -> std::io::Result<()> {
        match std::fs::write(&self.path, bytes) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                std::fs::create_dir_all(self.target.parent().expect("objects lie in a folder"))?;
                std::fs::write(&self.path, bytes)
            }
            written => written,
        }
    }

    /// Gives it its name, whether or not there is a file of that name.
    pub fn put(mut self) -> std::io::Result<()> {
        std::fs::rename(&self.path, self.target)?;
        // There is nothing left to remove.
        self.path = PathBuf::new();
        Ok(())
    }
}

impl Drop for Partial<'_> {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Makes a file, whole or not at all; `false` where there is one.
pub(super) fn create_file(path: &FilePath, bytes: &[u8]) -> std::io::Result<bool> {
    let partial = Partial::beside(path);
    partial.write(bytes)?;
    match std::fs::hard_link(partial.path(), path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes a file, whole or not at all, whether or not there is one.
pub fn replace_file(path: &FilePath, bytes: &[u8]) -> std::io::Result<()> {
    let partial = Partial::beside(path);
    partial.write(bytes)?;
    partial.put()
}

/// Reads a file; most are small, and those take one read and no look at their size.
pub(super) fn read_file(mut file: std::fs::File) -> std::io::Result<Vec<u8>> {
    const FIRST: usize = 4 * 1024;
    // On the stack: a fresh buffer of this size for each of ten thousand records is mostly page faults.
    let mut first = [0; FIRST];
    let count = file.read(&mut first)?;
    let mut bytes = first[..count].to_vec();
    if count == FIRST {
        file.read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

/// Whether nothing is there, rather than something wrong.
pub fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

/// Moves a file to its place; where it has another name somewhere, or lies on another disk, copies it under a temporary
/// name first, so that a reader sees all of it or nothing.
pub fn move_into_place(from: &FilePath, to: &FilePath) -> std::io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    std::fs::create_dir_all(to.parent().expect("objects lie in a folder"))?;
    let metadata = std::fs::symlink_metadata(from)?;
    // A file with a second name can be changed through it; a blob must not be.
    if metadata.is_file() && metadata.nlink() == 1 {
        // As old as it is here, not as its program says: gc goes by that, by the clock of the file system.
        touch(from)?;
        if std::fs::rename(from, to).is_ok() {
            return Ok(());
        }
    }
    let partial = Partial::beside(to);
    std::fs::copy(from, partial.path())?;
    partial.put()
}

/// Makes a file as old as now.
pub fn touch(path: &FilePath) -> std::io::Result<()> {
    use nix::sys::stat::{UtimensatFlags, utimensat};
    use nix::sys::time::TimeSpec;
    let flags = UtimensatFlags::FollowSymlink;
    Ok(utimensat(nix::fcntl::AT_FDCWD, path, &TimeSpec::UTIME_OMIT, &TimeSpec::UTIME_NOW, flags)?)
}

/// A name beside `path` that no listing takes for an object: the object-store layer hides names with `#`.
pub fn unique_neighbour(path: &FilePath) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.as_os_str().to_owned();
    name.push(format!("#{}{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    name.into()
}

/// Copies (or reflinks) a file and says what its digest is. A large one is digested by a second thread meanwhile.
pub(super) fn copy_checked(from: &FilePath, to: &FilePath) -> std::io::Result<Digest> {
    if std::fs::metadata(from)?.len() < LARGE {
        std::fs::copy(from, to)?;
        return Digest::of_file(to);
    }
    std::thread::scope(|scope| {
        let digest = scope.spawn(|| Digest::of_file(from));
        std::fs::copy(from, to)?;
        digest.join().expect("digesting does not panic")
    })
}
