//! Inputs from outside: files and folders, downloads, and artifacts named by a tag.
//!
//! Digests of files are kept with the files' stamps, so that planning reads no large file twice. A file that was
//! modified within two seconds of being read is read again next time, however late that is: clocks of file systems
//! are coarse, so its stamp might be that of a change which came after it was read.
//!
//! What is large is listed and read on threads of its own, one file after another: a run must hear who interrupts it, and a
//! folder must not have to fit into memory.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cuda_agent_protocol::PortType;
use serde::{Deserialize, Serialize};

use super::input_error::InputError;
use crate::artifact::table::TableInfo;
use crate::artifact::tree::{Scan, Summary, Walk};
use crate::artifact::{Artifact, ArtifactError, table, tree};
use crate::digest::{Digest, DigestError};
use crate::off_loop;
use crate::store::Store;
use crate::store::files::{Partial, replace_file};

/// Whoever has no time reads no more than this.
const AT_HAND: Size = Size { files: 256, bytes: 4 << 20 };

/// An input that is known.
#[derive(Clone, Debug)]
pub struct Input {
    /// What it is.
    pub artifact: Artifact,
    /// Where it is, if not in the store.
    pub outside: Option<Outside>,
}

/// A file or folder that is not the store's.
#[derive(Clone, Debug, PartialEq)]
pub struct Outside {
    /// Where.
    pub path: PathBuf,
    /// Its files' stamps when it was digested.
    pub stamps: Stamps,
}

/// How much a file or folder is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Files.
    pub files: u64,
    /// Bytes of them all.
    pub bytes: u64,
}

impl Size {
    fn is_within(&self, most: &Self) -> bool {
        self.files <= most.files && self.bytes <= most.bytes
    }
}

/// What changes when a file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    modified_ns: i128,
    changed_ns: i128,
}

impl Stamp {
    fn of(path: &Path) -> std::io::Result<Self> {
        let metadata = std::fs::metadata(path)?;
        let nanoseconds = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        Ok(Self {
            inode: metadata.ino(),
            size: metadata.size(),
            modified_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

/// The stamps of all files together: what changes when any of them does, or its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamps {
    /// Of names and stamps, in the order of names.
    digest: Digest,
    /// How much it is.
    size: Size,
    /// The latest change of any file, in nanoseconds since 1970.
    newest_ns: i128,
}

impl Stamps {
    /// `None` where there is more than `most`.
    fn of(path: &Path, most: Option<&Size>) -> Result<Option<Self>, ArtifactError> {
        let mut all = Builder::default();
        for file in Walk::new(path)? {
            let (name, real) = file?;
            all.add(&name, &Stamp::of(&real).map_err(ArtifactError::io(&real))?);
            if most.is_some_and(|most| !all.size.is_within(most)) {
                return Ok(None);
            }
        }
        Ok(Some(all.finish()))
    }
}

struct Builder {
    hasher: blake3::Hasher,
    size: Size,
    newest_ns: i128,
}

impl Default for Builder {
    fn default() -> Self {
        Self { hasher: blake3::Hasher::new(), size: Size::default(), newest_ns: i128::MIN }
    }
}

impl Builder {
    fn add(&mut self, name: &str, stamp: &Stamp) {
        let Stamp { inode, size, modified_ns, changed_ns } = *stamp;
        self.hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        self.hasher.update(&inode.to_le_bytes()).update(&size.to_le_bytes());
        self.hasher.update(&modified_ns.to_le_bytes()).update(&changed_ns.to_le_bytes());
        self.size = Size { files: self.size.files + 1, bytes: self.size.bytes.saturating_add(size) };
        self.newest_ns = self.newest_ns.max(modified_ns).max(changed_ns);
    }

    fn finish(self) -> Stamps {
        Stamps { digest: Digest::finish(&self.hasher), size: self.size, newest_ns: self.newest_ns }
    }
}

impl Input {
    /// One that the store has.
    pub fn stored(artifact: Artifact) -> Self {
        Self { artifact, outside: None }
    }

    /// Whether a file outside is still what it was.
    pub async fn is_unchanged(&self) -> bool {
        let Some(Outside { path, stamps }) = self.outside.clone() else { return true };
        off_loop(move || Stamps::of(&path, None)).await.is_ok_and(|now| now == Some(stamps))
    }
}

impl Outside {
    /// How much it is.
    pub fn size(&self) -> Size {
        self.stamps.size
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Kept {
    stamps: Stamps,
    artifact: Artifact,
    /// When the files began to be read, in nanoseconds since 1970.
    digested_at: i128,
}

impl Kept {
    /// Whether the files must be what was digested, now that they have these stamps: those of that time, and so much
    /// older than the reading that no later change can have left them as they are.
    fn is_certain(&self, stamps: &Stamps) -> bool {
        const COARSE: i128 = 2_000_000_000;
        self.stamps == *stamps && stamps.newest_ns.saturating_add(COARSE) < self.digested_at
    }
}

fn now_ns() -> i128 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as i128)
}

/// Digests of files and folders by path.
pub struct FileCache {
    path: PathBuf,
    kept: Mutex<(HashMap<PathBuf, Kept>, bool)>,
    /// What is being read. Whoever wants the same waits for it instead of reading it too.
    reading: Mutex<HashMap<PathBuf, Arc<Reading>>>,
}

/// A file or folder that is being read.
#[derive(Default)]
struct Reading {
    turn: tokio::sync::Mutex<()>,
    total: AtomicU64,
    done: Arc<AtomicU64>,
}

impl FileCache {
    /// Reads what earlier runs learned; an unreadable cache is an empty one.
    pub fn load(path: &Path) -> Self {
        let kept = std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        Self { path: path.to_owned(), kept: Mutex::new((kept, false)), reading: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, (HashMap<PathBuf, Kept>, bool)> {
        self.kept.lock().expect("no panic happens under this lock")
    }

    /// Writes it back, where anything is new.
    pub fn save(&self) {
        let held = self.kept();
        if !held.1 {
            return;
        }
        let bytes = serde_json::to_vec(&held.0).expect("stamps are plain data");
        // Only the cache itself is made: a command that just looks leaves no `.cuda-agent` behind.
        let _ = self.path.parent().map(std::fs::create_dir);
        if self.path.parent().is_some_and(Path::is_dir) {
            let _ = replace_file(&self.path, &bytes);
        }
    }

    /// A file or folder as an input.
    pub async fn input(&self, path: &Path, port_type: PortType) -> Result<Input, InputError> {
        if let Some(problem) = unusable(path) {
            return Err(problem);
        }
        let reading =
            self.reading.lock().expect("no panic happens under this lock").entry(path.into()).or_default().clone();
        let _turn = reading.turn.lock().await;
        let digested_at = now_ns();
        let stamps = {
            let path = path.to_owned();
            off_loop(move || Stamps::of(&path, None)).await
        };
        let stamps = stamps.map_err(|error| with_hint(path, &error))?.expect("it may be as large as it is");
        if let Some(artifact) = self.certain(path, port_type, &stamps) {
            return Ok(Input { artifact, outside: Some(Outside { path: path.to_owned(), stamps }) });
        }
        reading.done.store(0, Ordering::Relaxed);
        reading.total.store(stamps.size.bytes, Ordering::Relaxed);
        let artifact = {
            let (path, done) = (path.to_owned(), reading.done.clone());
            off_loop(move || digest_outside(&path, port_type, done)).await
        };
        reading.total.store(0, Ordering::Relaxed);
        let artifact = artifact.map_err(|error| with_hint(path, &error))?;
        Ok(self.keep(path, stamps, artifact, digested_at))
    }

    /// The same where that takes no more than a moment.
    pub fn input_at_once(&self, path: &Path, port_type: PortType) -> Result<Input, InputError> {
        if let Some(problem) = unusable(path) {
            return Err(problem);
        }
        let digested_at = now_ns();
        let stamps = Stamps::of(path, Some(&AT_HAND)).map_err(|error| with_hint(path, &error))?;
        let stamps = stamps.ok_or_else(|| "it takes time to read".to_owned())?;
        if let Some(artifact) = self.certain(path, port_type, &stamps) {
            return Ok(Input { artifact, outside: Some(Outside { path: path.to_owned(), stamps }) });
        }
        let artifact = digest_outside(path, port_type, Arc::default()).map_err(|error| with_hint(path, &error))?;
        Ok(self.keep(path, stamps, artifact, digested_at))
    }

    fn certain(&self, path: &Path, port_type: PortType, stamps: &Stamps) -> Option<Artifact> {
        let held = self.kept();
        let known = held.0.get(path).filter(|kept| kept.artifact.port_type == port_type && kept.is_certain(stamps));
        known.map(|kept| kept.artifact.clone())
    }

    fn keep(&self, path: &Path, stamps: Stamps, artifact: Artifact, digested_at: i128) -> Input {
        let mut held = self.kept();
        held.0.insert(path.to_owned(), Kept { stamps, artifact: artifact.clone(), digested_at });
        held.1 = true;
        Input { artifact, outside: Some(Outside { path: path.to_owned(), stamps }) }
    }

    /// What is being read at this moment, with bytes done and bytes in all.
    pub fn reading(&self) -> Vec<(PathBuf, u64, u64)> {
        let reading = self.reading.lock().expect("no panic happens under this lock");
        let now = |(path, reading): (&PathBuf, &Arc<Reading>)| {
            let total = reading.total.load(Ordering::Relaxed);
            (path.clone(), reading.done.load(Ordering::Relaxed).min(total), total)
        };
        reading.iter().map(now).filter(|(_, _, total)| *total > 0).collect()
    }
}

/// Why a path cannot be an input.
pub fn unusable(path: &Path) -> Option<InputError> {
    let shown = path.display();
    let message = match std::fs::metadata(path) {
        Ok(metadata) => {
            let what = tree::special_kind(metadata.file_type());
            return what.map(|what| InputError::new(format!("{shown}: {what}"), tree::ONLY_FILES));
        }
        Err(_) if path.is_symlink() => format!("{shown}: {}", tree::dangling(path)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => format!("{shown} does not exist"),
        Err(error) => format!("{shown}: {error}"),
    };
    Some(InputError::new(message, "paths start at the pipeline file's folder"))
}

/// An error, with what a table input must be, and how to make one.
fn with_hint(path: &Path, error: &ArtifactError) -> InputError {
    let message = error.to_string();
    let found = match error {
        ArtifactError::NotParquet { found, .. } => found,
        ArtifactError::Unreadable { path, what, hint } => return InputError::new(format!("{path}: {what}"), *hint),
        _ => return message.into(),
    };
    let from = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let to = Path::new(&from).with_extension("parquet").display().to_string();
    let read = match found.as_str() {
        "CSV" => format!("pyarrow.csv.read_csv('{from}')"),
        "tab-separated text" => {
            format!("pyarrow.csv.read_csv('{from}', parse_options=pyarrow.csv.ParseOptions(delimiter='\\t'))")
        }
        "JSON" => format!("pyarrow.json.read_json('{from}')"),
        "an Arrow file" => format!("pyarrow.feather.read_table('{from}')"),
        _ => return InputError::new(message, "a table input is one Parquet file"),
    };
    let module = read.split('.').nth(1).unwrap_or_default();
    let hint = format!(
        "a table input is one Parquet file, which pyarrow makes of it: python -c \"import pyarrow.{module}, \
         pyarrow.parquet; pyarrow.parquet.write_table({read}, '{to}')\""
    );
    InputError::new(message, hint)
}

fn digest_outside(path: &Path, port_type: PortType, done: Arc<AtomicU64>) -> Result<Artifact, ArtifactError> {
    if port_type.is_table() {
        let info = table::inspect(path)?;
        let bytes = Digest::of_file_counted(path, &done).map_err(ArtifactError::io(path))?;
        let size = std::fs::metadata(path).map_err(ArtifactError::io(path))?.len();
        return Ok(of_table(port_type, info, bytes, size));
    }
    let mut scan = Scan::counting(path, done)?;
    let mut summary = Summary::default();
    while scan.next_pack()?.is_some() {
        scan.take_entries().iter().for_each(|entry| summary.add(entry));
    }
    scan.take_entries().iter().for_each(|entry| summary.add(entry));
    let tree::Summarized { digest, size, blob } = summary.finish();
    Ok(Artifact { port_type, digest, size, blob, parts: Vec::new(), rows: None, columns: Vec::new() })
}

/// A table as an artifact.
pub fn of_table(port_type: PortType, info: TableInfo, blob: Digest, size: u64) -> Artifact {
    let TableInfo { digest, rows, columns } = info;
    Artifact { port_type, digest, size, blob, parts: Vec::new(), rows: Some(rows), columns }
}

/// Fetches `{url, digest}` once; the digest of the bytes names the cached file.
pub async fn download(
    files: &FileCache,
    url: &str,
    digest: &str,
    port_type: PortType,
    cache: &Path,
) -> Result<Input, InputError> {
    let wanted: Digest =
        digest.parse().map_err(|error: DigestError| InputError::new(error.to_string(), "`b3sum FILE` prints one"))?;
    let path = cache.join("downloads").join(wanted.to_string());
    let kept = path.clone();
    if off_loop(move || Digest::of_file(&kept)).await.ok() != Some(wanted) {
        let fail = |error: std::io::Error| format!("{}: {error}", path.display());
        std::fs::create_dir_all(cache.join("downloads")).map_err(fail)?;
        let partial = Partial::beside(&path);
        match fetch(url, partial.path()).await? {
            found if found == wanted => partial.put().map_err(fail)?,
            found => {
                let message = format!("{url} has the digest {found}, the pipeline says {wanted}");
                return Err(InputError::new(message, "check which one you want"));
            }
        }
    }
    files.input(&path, port_type).await
}

/// `https://`, `http://` and `file://`, into a file, as it comes; the digest says which bytes came.
async fn fetch(url: &str, target: &Path) -> Result<Digest, InputError> {
    use futures::TryStreamExt;
    use std::io::Write;
    let fail = |error: object_store::Error| match error {
        object_store::Error::NotFound { .. } => InputError::new(format!("{url} is not there"), "check the address"),
        other => format!("{url}: {other}").into(),
    };
    let parsed = url::Url::parse(url)
        .map_err(|error| InputError::new(format!("{url}: {error}"), "it should be an https:// or file:// URL"))?;
    let (store, path) = object_store::parse_url_opts(&parsed, [("allow_http", "true")])
        .map_err(|_| InputError::new(format!("{url} cannot be fetched"), "https://, http:// and file:// URLs can"))?;
    let mut pieces = object_store::ObjectStoreExt::get(&*store, &path).await.map_err(fail)?.into_stream();
    let write = |error: std::io::Error| format!("{}: {error}", target.display());
    let mut file = std::fs::File::create(target).map_err(write)?;
    let mut hasher = blake3::Hasher::new();
    while let Some(piece) = pieces.try_next().await.map_err(fail)? {
        hasher.update(&piece);
        file.write_all(&piece).map_err(write)?;
    }
    Ok(Digest::finish(&hasher))
}

/// An artifact by name and tag.
pub async fn tagged(store: &Store, name: &str, tag: &str) -> Result<Input, InputError> {
    let error = |error: crate::store::StoreError| error.to_string();
    let Some(target) = store.tag(name, tag).await.map_err(error)? else {
        let message = format!("nothing is tagged {name}@{tag} in {}", store.url());
        return Err(InputError::new(message, "`cuda-agent tag` names an output"));
    };
    let record = store.record(&target.key).await.map_err(error)?.map(|(_, record)| record);
    let artifact = record.and_then(|record| record.outputs.get(&target.output).cloned());
    let gone = || {
        let message = format!("what {name}@{tag} names is gone from {}, or damaged", store.url());
        InputError::new(message, "make it again, and tag it with `cuda-agent tag`")
    };
    let artifact = artifact.ok_or_else(gone)?;
    match store.missing_blob(&artifact).await.map_err(error)? {
        Some(_) => Err(gone()),
        None => Ok(Input::stored(*artifact)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i128 = 1_000_000_000;

    fn stamp(modified_s: i128, changed_s: i128) -> Stamp {
        Stamp { inode: 1, size: 1, modified_ns: modified_s * SECOND, changed_ns: changed_s * SECOND }
    }

    fn named(files: &[(&str, Stamp)]) -> Stamps {
        let mut all = Builder::default();
        files.iter().for_each(|(name, stamp)| all.add(name, stamp));
        all.finish()
    }

    fn stamps(of: &[Stamp]) -> Stamps {
        named(&of.iter().map(|stamp| ("f", *stamp)).collect::<Vec<_>>())
    }

    fn artifact(text: &str) -> Artifact {
        let digest = Digest::of_bytes(text.as_bytes());
        let (parts, columns) = (Vec::new(), Vec::new());
        Artifact { port_type: PortType::Tree, digest, size: 1, blob: digest, parts, rows: None, columns }
    }

    /// All these times are long ago: when the digest is asked for again does not count, only when it was taken.
    #[test]
    fn a_digest_taken_right_after_a_change_is_never_trusted() {
        let certain = |of: &[Stamp], digested_s: i128| {
            let kept = Kept { stamps: stamps(of), artifact: artifact("x"), digested_at: digested_s * SECOND };
            kept.is_certain(&stamps(of))
        };
        assert!(!certain(&[stamp(100, 100)], 101), "another change in the same tick would not show");
        assert!(!certain(&[stamp(100, 100)], 102));
        assert!(certain(&[stamp(100, 100)], 103));
        assert!(!certain(&[stamp(50, 100)], 101), "the time of modification can be set back, that of change cannot");
        assert!(!certain(&[stamp(200, 100)], 103), "nor is one in the future certain");
        assert!(!certain(&[stamp(10, 10), stamp(100, 100)], 101), "every file counts");
        assert!(certain(&[], 101), "an empty folder has no file that could have changed");
    }

    #[test]
    fn any_other_stamp_or_name_is_a_change() {
        let base = [("a", stamp(1, 1)), ("b", stamp(2, 2))];
        let others = [
            [("a", stamp(1, 1)), ("b", stamp(2, 3))],
            [("a", stamp(1, 1)), ("b", Stamp { inode: 7, ..stamp(2, 2) })],
            [("a", stamp(1, 1)), ("b", Stamp { size: 7, ..stamp(2, 2) })],
            [("a", stamp(1, 1)), ("c", stamp(2, 2))],
            [("a", stamp(2, 2)), ("b", stamp(1, 1))],
        ];
        assert!(others.iter().all(|other| named(other) != named(&base)));
        assert_eq!(named(&base), named(&base));
    }

    #[test]
    fn a_kept_digest_is_used_where_it_is_certain() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f");
        std::fs::write(&file, "real").unwrap();
        let stamps = Stamps::of(&file, None).unwrap().unwrap();
        let changed = stamps.newest_ns;
        let answer = |digested_at: i128| {
            let cache = FileCache::load(&folder.path().join("cache/files.json"));
            let kept = Kept { stamps, artifact: artifact("kept"), digested_at };
            cache.kept().0.insert(file.clone(), kept);
            cache.input_at_once(&file, PortType::Tree).unwrap().artifact.digest
        };
        let kept = artifact("kept").digest;
        assert_eq!(answer(changed + 3 * SECOND), kept);
        assert_ne!(answer(changed + SECOND), kept);
    }

    #[tokio::test]
    async fn a_changed_file_is_found_out() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f");
        std::fs::write(&file, "text").unwrap();
        let cache = FileCache::load(&folder.path().join("cache/files.json"));
        let input = cache.input(&file, PortType::Tree).await.unwrap();
        assert!(input.is_unchanged().await);
        std::fs::write(&file, "other").unwrap();
        assert!(!input.is_unchanged().await);
        assert!(Input::stored(artifact("x")).is_unchanged().await, "the store's are not looked at");
    }

    #[test]
    fn stamps_are_as_fine_as_the_file_system() {
        let folder = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(folder.path().join("f")).unwrap();
        file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(100, 7)).unwrap();
        let stamp = Stamp::of(&folder.path().join("f")).unwrap();
        assert_eq!((stamp.modified_ns, stamp.size), (100 * SECOND + 7, 0));
        assert!(stamp.changed_ns <= now_ns() && now_ns() - stamp.changed_ns < 3600 * SECOND, "{stamp:?}");
    }

    #[test]
    fn what_is_being_read_is_told_with_its_bytes() {
        let cache = FileCache::load(Path::new("none"));
        let reading = |done: u64, total: u64| {
            Arc::new(Reading { done: Arc::new(done.into()), total: total.into(), ..Reading::default() })
        };
        let all = [("over", reading(5, 0)), ("begun", reading(0, 10)), ("grows", reading(12, 10))];
        *cache.reading.lock().unwrap() = all.map(|(path, reading)| (path.into(), reading)).into();
        let mut told = cache.reading();
        told.sort();
        assert_eq!(told, [("begun".into(), 0, 10), ("grows".into(), 10, 10)]);
    }

    #[test]
    fn the_cache_is_written_only_where_its_folder_can_be_made() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f");
        std::fs::write(&file, "text").unwrap();
        let saved = |path: &Path| {
            let cache = FileCache::load(path);
            cache.input_at_once(&file, PortType::Tree).unwrap();
            cache.save();
            path.exists()
        };
        assert!(saved(&folder.path().join("cache/files.json")));
        let kept = FileCache::load(&folder.path().join("cache/files.json"));
        assert!(kept.kept().0.contains_key(&file));
        assert!(!saved(&folder.path().join("none/cache/files.json")));
        assert!(!folder.path().join("none").exists());
    }

    #[tokio::test]
    async fn what_is_large_is_read_only_by_whoever_has_time() {
        let folder = tempfile::tempdir().unwrap();
        let large = folder.path().join("large");
        std::fs::File::create(&large).unwrap().set_len(AT_HAND.bytes + 1).unwrap();
        let cache = FileCache::load(&folder.path().join("cache/files.json"));
        assert!(cache.input_at_once(&large, PortType::Tree).is_err());
        let read = cache.input(&large, PortType::Tree).await.unwrap();
        assert_eq!(read.outside.unwrap().size(), Size { files: 1, bytes: AT_HAND.bytes + 1 });
        assert_eq!(cache.reading(), []);
    }

    fn whole(InputError { message, hint }: &InputError) -> String {
        hint.iter().fold(message.clone(), |text, hint| format!("{text}; {hint}"))
    }

    #[test]
    fn what_is_no_table_is_told_with_the_command_that_makes_one() {
        let told = |found: &str| {
            let error = ArtifactError::NotParquet { path: "in/rows.txt".into(), found: found.into() };
            whole(&with_hint(Path::new("in/rows.txt"), &error))
        };
        let readers = [
            ("CSV", "import pyarrow.csv, ", "pyarrow.csv.read_csv('rows.txt'), 'rows.parquet'"),
            (
                "tab-separated text",
                "import pyarrow.csv, ",
                "pyarrow.csv.ParseOptions(delimiter='\\t')), 'rows.parquet'",
            ),
            ("JSON", "import pyarrow.json, ", "pyarrow.json.read_json('rows.txt'), 'rows.parquet'"),
            ("an Arrow file", "import pyarrow.feather, ", "pyarrow.feather.read_table('rows.txt'), 'rows.parquet'"),
        ];
        for (found, import, read) in readers {
            let told = told(found);
            assert!(told.contains(import) && told.contains(read), "{told}");
        }
        assert_eq!(told("empty"), "in/rows.txt is not a Parquet file, but empty; a table input is one Parquet file");
    }

    #[test]
    fn what_cannot_be_an_input_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink("gone", path("link")).unwrap();
        std::fs::write(path("file"), "").unwrap();
        let told = ["fifo", "link", "nowhere", "file/below", "file"].map(|name| {
            let told = unusable(&path(name)).map(|error| whole(&error)).unwrap_or_default();
            told.replace(&folder.path().display().to_string(), "[folder]")
        });
        insta::assert_snapshot!(told.join("\n"));
    }
}
