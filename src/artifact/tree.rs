//! Trees: a file or a folder, as a list of files with digests.
//!
//! Small files are packed into shared blobs, since stores answer per object: a folder of 2,000 small files is a few
//! objects, not 2,000. Packing never shows in the logical digest.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ArtifactError;
use crate::digest::{Digest, context};
use crate::key::canonical;

/// Files smaller than this are packed.
pub const PACK_BELOW: u64 = 64 * 1024;
/// No pack grows beyond this.
pub const PACK_LIMIT: u64 = 8 * 1024 * 1024;

/// One file of a tree. Folders exist only as parts of paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Relative, with `/`; empty where the tree is a single file.
    pub path: String,
    /// Whether its owner may execute it.
    pub executable: bool,
    /// Bytes.
    pub size: u64,
    /// Digest of its bytes.
    pub digest: Digest,
    /// The blob that holds it.
    pub blob: Digest,
    /// Where in the blob.
    pub offset: u64,
}

/// A tree on disk, ready to be published.
#[derive(Debug)]
pub struct Scan {
    /// Sorted by path; `blob` and `offset` are final.
    pub entries: Vec<Entry>,
    /// Files that are blobs of their own.
    pub files: Vec<(Digest, PathBuf)>,
    /// Packs of small files.
    pub packs: Vec<(Digest, Vec<u8>)>,
}

/// The logical digest of a tree.
pub fn digest(entries: &[Entry]) -> Digest {
    let rows: Vec<_> = entries.iter().map(|e| (&e.path, e.executable, e.size, e.digest)).collect();
    let value = serde_json::to_value(rows).expect("entries are plain data");
    Digest::keyed(context::TREE, &canonical::to_bytes(&value))
}

/// Bytes of all files together.
pub fn size(entries: &[Entry]) -> u64 {
    entries.iter().map(|entry| entry.size).sum()
}

/// Lists the files of a tree, sorted by path. A link is followed where it stays inside the tree.
pub fn list(root: &Path) -> Result<Vec<(String, PathBuf)>, ArtifactError> {
    let real = root.canonicalize().map_err(ArtifactError::io(root))?;
    let mut files = Vec::new();
    if real.is_file() {
        files.push((String::new(), real));
    } else {
        walk(&real, &real, String::new(), &mut files)?;
    }
    files.sort_unstable();
    Ok(files)
}

fn walk(root: &Path, folder: &Path, prefix: String, files: &mut Vec<(String, PathBuf)>) -> Result<(), ArtifactError> {
    if prefix.matches('/').count() > 200 {
        let message = "folders are nested more than 200 deep; is there a link to a folder above?";
        return Err(ArtifactError::malformed(folder)(message));
    }
    for item in fs::read_dir(folder).map_err(ArtifactError::io(folder))? {
        let item = item.map_err(ArtifactError::io(folder))?;
        let path = item.path();
        let name = item.file_name().into_string().map_err(|name| {
            ArtifactError::malformed(folder)(format!("the file name {name:?} is not UTF-8, which no store can hold"))
        })?;
        let relative = format!("{prefix}{name}");
        let real = if item.file_type().map_err(ArtifactError::io(&path))?.is_symlink() {
            let real = path.canonicalize().map_err(ArtifactError::io(&path))?;
            if !real.starts_with(root) {
                return Err(ArtifactError::malformed(&path)("the link leaves the tree; copy what it points to"));
            }
            real
        } else {
            path
        };
        let kind = fs::metadata(&real).map_err(ArtifactError::io(&real))?;
        if kind.is_dir() {
            walk(root, &real, format!("{relative}/"), files)?;
        } else if kind.is_file() {
            files.push((relative, real));
        } else {
            return Err(ArtifactError::malformed(&real)("neither a file nor a folder"));
        }
    }
    Ok(())
}

/// Reads a tree and decides how it will be stored.
pub fn scan(root: &Path) -> Result<Scan, ArtifactError> {
    let mut scan = Scan { entries: Vec::new(), files: Vec::new(), packs: Vec::new() };
    let mut pack: Vec<u8> = Vec::new();
    let mut packed: Vec<usize> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for (path, real) in list(root)? {
        let metadata = fs::metadata(&real).map_err(ArtifactError::io(&real))?;
        let executable = metadata.permissions().mode() & 0o100 != 0;
        let mut entry =
            Entry { path, executable, size: metadata.len(), digest: Digest([0; 32]), blob: Digest([0; 32]), offset: 0 };
        if metadata.len() < PACK_BELOW {
            let bytes = fs::read(&real).map_err(ArtifactError::io(&real))?;
            if (pack.len() + bytes.len()) as u64 > PACK_LIMIT {
                close_pack(&mut scan, &mut pack, &mut packed);
            }
            entry.size = bytes.len() as u64;
            entry.digest = Digest::of_bytes(&bytes);
            entry.offset = pack.len() as u64;
            pack.extend(bytes);
            packed.push(scan.entries.len());
        } else {
            entry.digest = Digest::of_file(&real).map_err(ArtifactError::io(&real))?;
            entry.blob = entry.digest;
            // Twice the same content, perhaps through a link, is one blob.
            if seen.insert(entry.digest) {
                scan.files.push((entry.digest, real));
            }
        }
        scan.entries.push(entry);
    }
    close_pack(&mut scan, &mut pack, &mut packed);
    Ok(scan)
}

fn close_pack(scan: &mut Scan, pack: &mut Vec<u8>, packed: &mut Vec<usize>) {
    if packed.is_empty() {
        return;
    }
    let digest = Digest::of_bytes(pack);
    packed.drain(..).for_each(|index| scan.entries[index].blob = digest);
    scan.packs.push((digest, std::mem::take(pack)));
}

/// The blob that lists a tree's files.
pub fn to_blob(entries: &[Entry]) -> Vec<u8> {
    serde_json::to_vec(entries).expect("entries are plain data")
}

/// Reads a list of files. A path that would leave the folder is refused: the list may come from anybody's store.
pub fn from_blob(bytes: &[u8]) -> Result<Vec<Entry>, ArtifactError> {
    let entries: Vec<Entry> =
        serde_json::from_slice(bytes).map_err(|error| ArtifactError::Contract(format!("tree: {error}")))?;
    let harmless = |path: &str| {
        path.is_empty() || path.split('/').all(|part| !matches!(part, "" | "." | "..")) && !path.contains('\0')
    };
    match entries.iter().find(|entry| !harmless(&entry.path)) {
        Some(entry) => Err(ArtifactError::Contract(format!("tree: the path {:?} leaves the folder", entry.path))),
        None => Ok(entries),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn make(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (path, bytes) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        folder
    }

    #[test]
    fn packs_hold_what_they_say() {
        let big = vec![7u8; PACK_BELOW as usize];
        let folder = make(&[("b/x", b"hello"), ("a", b"world"), ("big", &big), ("empty", b"")]);
        let scan = scan(folder.path()).unwrap();
        let paths: Vec<&str> = scan.entries.iter().map(|e| e.path.as_str()).collect();
        assert_eq!(paths, ["a", "b/x", "big", "empty"]);
        assert_eq!((scan.files.len(), scan.packs.len()), (1, 1));
        for entry in scan.entries.iter().filter(|e| e.size < PACK_BELOW) {
            let (_, pack) = scan.packs.iter().find(|(digest, _)| *digest == entry.blob).unwrap();
            let bytes = &pack[entry.offset as usize..(entry.offset + entry.size) as usize];
            assert_eq!(Digest::of_bytes(bytes), entry.digest);
        }
    }

    #[test]
    fn identity_is_paths_content_and_the_executable_bit() {
        let base = digest(&scan(make(&[("a", b"1"), ("b", b"2")]).path()).unwrap().entries);
        assert_eq!(digest(&scan(make(&[("b", b"2"), ("a", b"1")]).path()).unwrap().entries), base);
        assert_ne!(digest(&scan(make(&[("a", b"2"), ("b", b"1")]).path()).unwrap().entries), base);
        let folder = make(&[("a", b"1"), ("b", b"2")]);
        fs::set_permissions(folder.path().join("a"), fs::Permissions::from_mode(0o755)).unwrap();
        assert_ne!(digest(&scan(folder.path()).unwrap().entries), base);
    }

    #[test]
    fn a_single_file_is_a_tree() {
        let folder = make(&[("a", b"1")]);
        let entries = scan(&folder.path().join("a")).unwrap().entries;
        assert_eq!((entries.len(), entries[0].path.as_str()), (1, ""));
    }

    #[test]
    fn links_are_followed_inside_and_refused_outside() {
        let folder = make(&[("a/x", b"1")]);
        std::os::unix::fs::symlink("a/x", folder.path().join("link")).unwrap();
        assert_eq!(scan(folder.path()).unwrap().entries.len(), 2);
        std::os::unix::fs::symlink("/etc/hostname", folder.path().join("out")).unwrap();
        assert!(scan(folder.path()).unwrap_err().to_string().contains("leaves the tree"));
    }

    #[test]
    fn a_link_to_a_folder_above_ends() {
        let folder = make(&[("a/x", b"1")]);
        std::os::unix::fs::symlink("..", folder.path().join("a/up")).unwrap();
        assert!(scan(folder.path()).is_err());
    }

    #[test]
    fn paths_that_leave_are_refused() {
        for path in ["../x", "/x", "a/../../x", "a//x", "a/\0"] {
            let entry = Entry {
                path: path.into(),
                executable: false,
                size: 0,
                digest: Digest([0; 32]),
                blob: Digest([0; 32]),
                offset: 0,
            };
            assert!(from_blob(&to_blob(&[entry])).is_err(), "{path}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn a_list_of_files_reads_back(names in prop::collection::btree_set("[a-z]{1,8}(/[a-z]{1,8})?x", 0..12)) {
            let files: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), name.as_bytes())).collect();
            let Ok(scan) = std::panic::catch_unwind(|| scan(make(&files).path()).unwrap()) else { return Ok(()) };
            prop_assert_eq!(from_blob(&to_blob(&scan.entries)).unwrap(), scan.entries);
        }
    }
}
