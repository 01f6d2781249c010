//! Trees: a file or a folder, as a list of files with digests.
//!
//! Small files are packed into shared blobs, since stores answer per object: a folder of 2,000 small files is a few
//! objects, not 2,000. Packing never shows in the logical digest.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::ArtifactError;
use crate::digest::{Digest, context};

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

/// The logical digest of a tree.
pub fn digest(entries: &[Entry]) -> Digest {
    let mut summary = Summary::default();
    entries.iter().for_each(|entry| summary.add(entry));
    summary.finish().digest
}

/// Bytes of all files together.
pub fn size(entries: &[Entry]) -> u64 {
    entries.iter().map(|entry| entry.size).fold(0, u64::saturating_add)
}

/// What a tree's entries come to, added one by one in their order, so that no list of them is needed.
pub struct Summary {
    rows: JsonList,
    list: JsonList,
    size: u64,
}

/// See [`Summary`].
pub struct Summarized {
    /// The logical digest.
    pub digest: Digest,
    /// Bytes of all files together.
    pub size: u64,
    /// Digest of the blob that lists the files.
    pub blob: Digest,
}

impl Default for Summary {
    fn default() -> Self {
        Self { rows: JsonList::new(Digest::hasher(context::TREE)), list: JsonList::new(blake3::Hasher::new()), size: 0 }
    }
}

impl Summary {
    /// Adds the next entry.
    pub fn add(&mut self, entry: &Entry) {
        // A row has only text, numbers and flags, so that its plain JSON is the canonical one.
        self.rows.add(&(&entry.path, entry.executable, entry.size, entry.digest));
        self.list.add(entry);
        self.size = self.size.saturating_add(entry.size);
    }

    /// The end.
    pub fn finish(self) -> Summarized {
        Summarized { digest: self.rows.finish(), size: self.size, blob: self.list.finish() }
    }
}

/// The digest of a list as JSON, of which one item at a time is held.
struct JsonList {
    hasher: blake3::Hasher,
    item: Vec<u8>,
    before: u8,
}

impl JsonList {
    fn new(hasher: blake3::Hasher) -> Self {
        Self { hasher, item: Vec::new(), before: b'[' }
    }

    fn add(&mut self, item: &impl Serialize) {
        self.item.clear();
        self.item.push(std::mem::replace(&mut self.before, b','));
        serde_json::to_writer(&mut self.item, item).expect("entries are plain data");
        self.hasher.update(&self.item);
    }

    fn finish(mut self) -> Digest {
        let end: &[u8] = if self.before == b'[' { b"[]" } else { b"]" };
        self.hasher.update(end);
        Digest::finish(&self.hasher)
    }
}

/// Lists the files of a tree, sorted by path. A link is followed where it stays inside the tree.
pub fn list(root: &Path) -> Result<Vec<(String, PathBuf)>, ArtifactError> {
    Walk::new(root)?.collect()
}

/// Deeper folders are not looked into: a link to a folder above would never end.
const DEEPEST: usize = 200;

/// The files of a tree, sorted by path: only the folders that lead to the next file are held.
pub struct Walk {
    root: PathBuf,
    single: bool,
    levels: Vec<Level>,
}

struct Level {
    folder: PathBuf,
    /// Of its files, as they are named in the tree.
    prefix: String,
    items: std::vec::IntoIter<Item>,
}

struct Item {
    /// As paths are sorted: a folder's name ends with `/`.
    name: String,
    /// Where a link leads to.
    target: Option<PathBuf>,
}

impl Walk {
    /// Begins at a file or folder.
    pub fn new(root: &Path) -> Result<Self, ArtifactError> {
        let real = root.canonicalize().map_err(ArtifactError::io(root))?;
        let kind = fs::metadata(&real).map_err(ArtifactError::io(&real))?.file_type();
        let mut walk = Self { root: real.clone(), single: kind.is_file(), levels: Vec::new() };
        if let Some(what) = special_kind(kind) {
            return Err(ArtifactError::unreadable(root, what, ONLY_FILES));
        }
        if kind.is_dir() {
            walk.enter(real, String::new())?;
        }
        Ok(walk)
    }

    fn enter(&mut self, folder: PathBuf, prefix: String) -> Result<(), ArtifactError> {
        if self.levels.len() > DEEPEST {
            let message = "folders are nested more than 200 deep; is there a link to a folder above?";
            return Err(ArtifactError::malformed(&folder)(message));
        }
        let mut items = Vec::new();
        for item in fs::read_dir(&folder).map_err(ArtifactError::io(&folder))? {
            items.push(self.item(&folder, &item.map_err(ArtifactError::io(&folder))?)?);
        }
        // With the `/`, folders come where their files' paths do.
        items.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        self.levels.push(Level { folder, prefix, items: items.into_iter() });
        Ok(())
    }

    fn item(&self, folder: &Path, item: &fs::DirEntry) -> Result<Item, ArtifactError> {
        let mut name = item.file_name().into_string().map_err(|name| {
            ArtifactError::malformed(folder)(format!("the file name {name:?} is not UTF-8, which no store can hold"))
        })?;
        let path = item.path();
        let mut kind = item.file_type().map_err(ArtifactError::io(&path))?;
        let mut target = None;
        if kind.is_symlink() {
            let real = self.followed(&path)?;
            kind = fs::metadata(&real).map_err(ArtifactError::io(&real))?.file_type();
            target = Some(real);
        }
        if let Some(what) = special_kind(kind) {
            return Err(ArtifactError::unreadable(&path, what, ONLY_FILES));
        }
        if kind.is_dir() {
            name.push('/');
        }
        Ok(Item { name, target })
    }

    fn followed(&self, link: &Path) -> Result<PathBuf, ArtifactError> {
        match link.canonicalize() {
            Ok(real) if real.starts_with(&self.root) => Ok(real),
            Ok(_) => Err(ArtifactError::unreadable(link, "the link leaves the tree", "copy what it points to")),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(ArtifactError::unreadable(link, dangling(link), "remove it, or make what it points to"))
            }
            Err(error) => Err(ArtifactError::io(link)(error)),
        }
    }

    fn step(&mut self) -> Result<Option<(String, PathBuf)>, ArtifactError> {
        if std::mem::take(&mut self.single) {
            return Ok(Some((String::new(), self.root.clone())));
        }
        while let Some(level) = self.levels.last_mut() {
            let Some(Item { name, target }) = level.items.next() else {
                self.levels.pop();
                continue;
            };
            let real = target.unwrap_or_else(|| level.folder.join(&name));
            let path = format!("{}{name}", level.prefix);
            if !name.ends_with('/') {
                return Ok(Some((path, real)));
            }
            self.enter(real, path)?;
        }
        Ok(None)
    }
}

impl Iterator for Walk {
    type Item = Result<(String, PathBuf), ArtifactError>;

    fn next(&mut self) -> Option<Self::Item> {
        let step = self.step().transpose();
        if matches!(step, Some(Err(_))) {
            self.levels.clear();
        }
        step
    }
}

/// What a link that leads nowhere is.
pub fn dangling(link: &Path) -> String {
    let target = fs::read_link(link).map(|target| target.display().to_string()).unwrap_or_default();
    format!("it is a link to {target}, which does not exist")
}

/// Advice on what [`special_kind`] finds.
pub const ONLY_FILES: &str = "only files and folders can be read";

/// What something is that is neither a file nor a folder, so that it cannot be read: reading a FIFO would wait for ever.
pub fn special_kind(kind: fs::FileType) -> Option<&'static str> {
    use std::os::unix::fs::FileTypeExt;
    match kind {
        kind if kind.is_file() || kind.is_dir() || kind.is_symlink() => None,
        kind if kind.is_fifo() => Some("it is a FIFO (a named pipe)"),
        kind if kind.is_socket() => Some("it is a socket"),
        _ => Some("it is a device"),
    }
}

/// The same with the advice, in one line.
pub fn special(kind: fs::FileType) -> Option<String> {
    special_kind(kind).map(|what| format!("{what}; {ONLY_FILES}"))
}

/// A pack of small files.
#[derive(Debug)]
pub struct Pack {
    /// Of its bytes.
    pub digest: Digest,
    /// At most [`PACK_LIMIT`].
    pub bytes: Vec<u8>,
}

/// Reads a tree on disk and decides how it will be stored: one pack after another, so that no more of it is held.
pub struct Scan {
    walk: Walk,
    pack: Vec<u8>,
    /// Entries from the first one on that is in the open pack.
    entries: Vec<Entry>,
    /// Those of them that are in the open pack.
    packed: Vec<usize>,
    /// Entries whose blob is known.
    settled: Vec<Entry>,
    seen: HashSet<Digest>,
    /// Files that are blobs of their own, once each. Nothing may move them before the end: a link may lead to them.
    pub files: Vec<(Digest, PathBuf)>,
    read: Arc<AtomicU64>,
}

impl Scan {
    /// Begins at a file or folder.
    pub fn new(root: &Path) -> Result<Self, ArtifactError> {
        Self::counting(root, Arc::default())
    }

    /// The same; `read` counts the bytes that were read.
    pub fn counting(root: &Path, read: Arc<AtomicU64>) -> Result<Self, ArtifactError> {
        Ok(Self {
            walk: Walk::new(root)?,
            pack: Vec::new(),
            entries: Vec::new(),
            packed: Vec::new(),
            settled: Vec::new(),
            seen: HashSet::new(),
            files: Vec::new(),
            read,
        })
    }

    /// Reads on until a pack is full; `None` at the end.
    pub fn next_pack(&mut self) -> Result<Option<Pack>, ArtifactError> {
        while let Some(file) = self.walk.next() {
            if let Some(pack) = self.add(file?)? {
                return Ok(Some(pack));
            }
        }
        Ok(self.close_pack())
    }

    /// Entries whose `blob` and `offset` are final, sorted by path, that were not taken before; after the last pack, all that
    /// are left.
    pub fn take_entries(&mut self) -> Vec<Entry> {
        if self.packed.is_empty() {
            self.settled.append(&mut self.entries);
        }
        std::mem::take(&mut self.settled)
    }

    /// A pack that is full without this file.
    fn add(&mut self, (path, real): (String, PathBuf)) -> Result<Option<Pack>, ArtifactError> {
        let metadata = fs::metadata(&real).map_err(ArtifactError::io(&real))?;
        let executable = metadata.permissions().mode() & 0o100 != 0;
        let mut entry =
            Entry { path, executable, size: metadata.len(), digest: Digest([0; 32]), blob: Digest([0; 32]), offset: 0 };
        let mut full = None;
        if metadata.len() < PACK_BELOW {
            let bytes = fs::read(&real).map_err(ArtifactError::io(&real))?;
            if (self.pack.len() + bytes.len()) as u64 > PACK_LIMIT {
                full = self.close_pack();
            }
            entry.size = bytes.len() as u64;
            entry.digest = Digest::of_bytes(&bytes);
            entry.offset = self.pack.len() as u64;
            self.pack.extend(bytes);
            self.packed.push(self.entries.len());
            self.read.fetch_add(entry.size, Ordering::Relaxed);
        } else {
            entry.digest = Digest::of_file_counted(&real, &self.read).map_err(ArtifactError::io(&real))?;
            entry.blob = entry.digest;
            // Twice the same content, perhaps through a link, is one blob.
            if self.seen.insert(entry.digest) {
                self.files.push((entry.digest, real));
            }
        }
        self.entries.push(entry);
        Ok(full)
    }

    fn close_pack(&mut self) -> Option<Pack> {
        if self.packed.is_empty() {
            return None;
        }
        let bytes = std::mem::take(&mut self.pack);
        let digest = Digest::of_bytes(&bytes);
        self.packed.drain(..).for_each(|index| self.entries[index].blob = digest);
        self.settled.append(&mut self.entries);
        Some(Pack { digest, bytes })
    }
}

/// The blob that lists a tree's files.
pub fn to_blob(entries: &[Entry]) -> Vec<u8> {
    serde_json::to_vec(entries).expect("entries are plain data")
}

/// Reads a list of files. It may come from anybody's store, so whatever [`Scan`] would not have written is refused: a path
/// that leaves the folder, one that comes twice, a place outside its blob.
pub fn from_blob(bytes: &[u8]) -> Result<Vec<Entry>, ArtifactError> {
    let entries: Vec<Entry> =
        serde_json::from_slice(bytes).map_err(|error| ArtifactError::Contract(format!("tree: {error}")))?;
    let refuse = |message: String| Err(ArtifactError::Contract(format!("tree: {message}")));
    if let Some(entry) = entries.iter().find(|entry| !is_harmless(&entry.path)) {
        return refuse(format!("the path {:?} leaves the folder", entry.path));
    }
    if entries.len() > 1 && entries[0].path.is_empty() {
        return refuse("a single file has others beside it".into());
    }
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].path >= pair[1].path) {
        return refuse(format!("the path {:?} is out of order", pair[1].path));
    }
    match entries.iter().find(|entry| !entry.is_in_its_blob()) {
        Some(entry) => refuse(format!("{:?} lies outside its blob", entry.path)),
        None => Ok(entries),
    }
}

/// Whether a path stays in its folder: names of parts, with `/` between them.
pub fn is_harmless(path: &str) -> bool {
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    (path.is_empty() || path.split('/').all(plain)) && !path.contains('\0')
}

impl Entry {
    /// Whether it is in a pack with others.
    pub fn is_packed(&self) -> bool {
        self.size < PACK_BELOW
    }

    fn is_in_its_blob(&self) -> bool {
        match self.is_packed() {
            true => self.offset.checked_add(self.size).is_some_and(|end| end <= PACK_LIMIT),
            false => self.offset == 0 && self.blob == self.digest,
        }
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
        let scanned = scan(folder.path()).unwrap();
        let paths: Vec<&str> = scanned.entries.iter().map(|e| e.path.as_str()).collect();
        assert_eq!(paths, ["a", "b/x", "big", "empty"]);
        assert_eq!((scanned.files, scanned.packs.len()), (1, 1));
        hold_what_they_say(&scanned);
    }

    fn hold_what_they_say(scanned: &Scanned) {
        for entry in scanned.entries.iter().filter(|e| e.is_packed()) {
            let pack = scanned.packs.iter().find(|pack| pack.digest == entry.blob).unwrap();
            let bytes = &pack.bytes[entry.offset as usize..(entry.offset + entry.size) as usize];
            assert_eq!(Digest::of_bytes(bytes), entry.digest);
        }
    }

    #[test]
    fn no_more_than_a_pack_is_held() {
        let small = vec![1u8; PACK_BELOW as usize - 1];
        let big = vec![7u8; PACK_BELOW as usize];
        let per_pack = PACK_LIMIT as usize / small.len();
        let names: Vec<String> = (0..2 * per_pack + 3).map(|number| format!("{number:04}")).collect();
        let mut files: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &small[..])).collect();
        // One that is a blob of its own, amid those of the first pack, and one at the end.
        files.extend([("0001-big", &big[..]), ("z", &big[..])]);
        let folder = make(&files);
        let mut scan = Scan::new(folder.path()).unwrap();
        let (mut taken, mut packs) = (Vec::new(), Vec::new());
        while let Some(pack) = scan.next_pack().unwrap() {
            assert!(pack.bytes.len() as u64 <= PACK_LIMIT);
            assert!(scan.pack.len() < PACK_BELOW as usize && scan.entries.len() <= 1, "only the file that had no room");
            packs.push(pack);
            taken.push(scan.take_entries());
        }
        assert_eq!(taken.iter().map(Vec::len).collect::<Vec<_>>(), [per_pack + 1, per_pack, 4]);
        assert_eq!(scan.take_entries(), []);
        assert_eq!(scan.files.len(), 1);
        let scanned = Scanned { entries: taken.concat(), files: 1, packs };
        assert!(scanned.entries.is_sorted_by(|a, b| a.path < b.path));
        hold_what_they_say(&scanned);
        assert_eq!(from_blob(&to_blob(&scanned.entries)).unwrap(), scanned.entries);
    }

    /// The formats of stored trees: a change here makes every result that read one unfindable.
    #[test]
    fn a_summary_is_that_of_the_whole_list() {
        let whole = |entries: &[Entry]| {
            let rows: Vec<_> = entries.iter().map(|e| (&e.path, e.executable, e.size, e.digest)).collect();
            let value = serde_json::to_value(rows).unwrap();
            let digest = Digest::keyed(context::TREE, &crate::key::canonical::to_bytes(&value));
            (digest, Digest::of_bytes(&to_blob(entries)))
        };
        let entries = scan(make(&[("a\"é\n", b"1"), ("b/c", b"")]).path()).unwrap().entries;
        for count in 0..=entries.len() {
            let mut summary = Summary::default();
            entries[..count].iter().for_each(|entry| summary.add(entry));
            let summary = summary.finish();
            assert_eq!((summary.digest, summary.blob), whole(&entries[..count]));
        }
    }

    #[test]
    fn files_come_in_the_order_of_their_paths() {
        let folder = make(&[("a/x", b""), ("a-b", b""), ("a.b", b""), ("ab", b""), ("a/-", b""), ("b", b"")]);
        let paths: Vec<String> = list(folder.path()).unwrap().into_iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["a-b", "a.b", "a/-", "a/x", "ab", "b"]);
    }

    #[test]
    fn what_is_no_file_is_named() {
        let folder = make(&[("a", b"")]);
        nix::unistd::mkfifo(&folder.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        for root in [folder.path().to_owned(), folder.path().join("fifo")] {
            let error = list(&root).unwrap_err().to_string();
            assert!(
                error.ends_with("fifo: it is a FIFO (a named pipe); only files and folders can be read"),
                "{error}"
            );
        }
        let folder = make(&[("a", b"")]);
        std::os::unix::fs::symlink("gone", folder.path().join("link")).unwrap();
        let error = list(folder.path()).unwrap_err().to_string();
        assert!(error.contains("link: it is a link to gone, which does not exist"), "{error}");
    }

    #[derive(Debug)]
    struct Scanned {
        entries: Vec<Entry>,
        files: usize,
        packs: Vec<Pack>,
    }

    fn scan(root: &Path) -> Result<Scanned, ArtifactError> {
        let mut scan = Scan::new(root)?;
        let (mut packs, mut entries) = (Vec::new(), Vec::new());
        while let Some(pack) = scan.next_pack()? {
            packs.push(pack);
            entries.extend(scan.take_entries());
        }
        entries.extend(scan.take_entries());
        Ok(Scanned { entries, files: scan.files.len(), packs })
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
            assert!(from_blob(&to_blob(&[entry(path)])).is_err(), "{path}");
        }
    }

    fn entry(path: &str) -> Entry {
        let zero = Digest([0; 32]);
        Entry { path: path.into(), executable: false, size: 0, digest: zero, blob: zero, offset: 0 }
    }

    #[test]
    fn what_no_scan_writes_is_refused() {
        let refused = |entries: &[Entry]| from_blob(&to_blob(entries)).unwrap_err().to_string();
        assert!(refused(&[entry("a"), entry("a")]).contains("out of order"));
        assert!(refused(&[entry(""), entry("a")]).contains("beside it"));
        let outside = "lies outside its blob";
        assert!(refused(&[Entry { offset: u64::MAX, size: 1, ..entry("a") }]).contains(outside));
        assert!(refused(&[Entry { offset: PACK_LIMIT, size: 1, ..entry("a") }]).contains(outside));
        assert!(refused(&[Entry { size: PACK_BELOW, offset: 1, ..entry("a") }]).contains(outside));
        let another = Entry { size: PACK_BELOW, blob: Digest([1; 32]), ..entry("a") };
        assert!(refused(&[another]).contains(outside));
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
