//! Inputs from outside: files and folders, downloads, and artifacts named by a tag.
//!
//! Digests of files are kept with the file's stamp, so that planning reads no large file twice. A file that was
//! modified within two seconds of being read is read again next time, however late that is: clocks of file systems
//! are coarse, so its stamp might be that of a change which came after it was read.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use cuda_agent_protocol::PortType;
use serde::{Deserialize, Serialize};

use crate::artifact::table::TableInfo;
use crate::artifact::{Artifact, ArtifactError, table, tree};
use crate::digest::Digest;
use crate::store::Store;

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
    pub stamps: Vec<(String, Stamp)>,
}

/// What changes when a file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
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

impl Input {
    /// One that the store has.
    pub fn stored(artifact: Artifact) -> Self {
        Self { artifact, outside: None }
    }

    /// Whether a file outside is still what it was.
    pub fn is_unchanged(&self) -> bool {
        let Some(outside) = &self.outside else { return true };
        stamps(&outside.path).is_ok_and(|stamps| stamps == outside.stamps)
    }
}

fn stamps(path: &Path) -> Result<Vec<(String, Stamp)>, ArtifactError> {
    let files = tree::list(path)?.into_iter();
    files.map(|(name, real)| Ok((name, Stamp::of(&real).map_err(ArtifactError::io(&real))?))).collect()
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Kept {
    stamps: Vec<(String, Stamp)>,
    artifact: Artifact,
    /// When the files began to be read, in nanoseconds since 1970.
    digested_at: i128,
}

impl Kept {
    /// Whether the files must be what was digested, now that they have these stamps: those of that time, and so much
    /// older than the reading that no later change can have left them as they are.
    fn is_certain(&self, stamps: &[(String, Stamp)]) -> bool {
        const COARSE: i128 = 2_000_000_000;
        let settled = |stamp: &Stamp| stamp.changed_ns.max(stamp.modified_ns) + COARSE < self.digested_at;
        self.stamps == stamps && stamps.iter().all(|(_, stamp)| settled(stamp))
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
}

impl FileCache {
    /// Reads what earlier runs learned; an unreadable cache is an empty one.
    pub fn load(path: &Path) -> Self {
        let kept = std::fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        Self { path: path.to_owned(), kept: Mutex::new((kept, false)) }
    }

    /// Writes it back, where anything is new.
    pub fn save(&self) {
        let held = self.kept.lock().expect("no panic happens under this lock");
        if !held.1 {
            return;
        }
        let partial = self.path.with_extension(format!("{}", std::process::id()));
        let bytes = serde_json::to_vec(&held.0).expect("stamps are plain data");
        // Only the cache itself is made: a command that just looks leaves no `.cuda-agent` behind.
        let _ = self.path.parent().map(std::fs::create_dir);
        let written = std::fs::write(&partial, bytes);
        let _ = written.and_then(|()| std::fs::rename(&partial, &self.path));
    }

    /// A file or folder as an input; errors are `message; hint`.
    pub fn input(&self, path: &Path, port_type: PortType) -> Result<Input, String> {
        if !path.exists() {
            return Err(absent(path));
        }
        let digested_at = now_ns();
        let stamps = stamps(path).map_err(|error| error.to_string())?;
        let mut held = self.kept.lock().expect("no panic happens under this lock");
        let known = held.0.get(path);
        let kept = known.filter(|kept| kept.artifact.port_type == port_type && kept.is_certain(&stamps));
        let artifact = match kept {
            Some(kept) => kept.artifact.clone(),
            None => {
                let artifact = digest_outside(path, port_type).map_err(|error| error.to_string())?;
                let kept = Kept { stamps: stamps.clone(), artifact: artifact.clone(), digested_at };
                held.0.insert(path.to_owned(), kept);
                held.1 = true;
                artifact
            }
        };
        Ok(Input { artifact, outside: Some(Outside { path: path.to_owned(), stamps }) })
    }
}

/// What to say of a path that is not there.
pub fn absent(path: &Path) -> String {
    format!("{} does not exist; paths start at the pipeline file's folder", path.display())
}

fn digest_outside(path: &Path, port_type: PortType) -> Result<Artifact, ArtifactError> {
    if port_type.is_table() {
        let bytes = Digest::of_file(path).map_err(ArtifactError::io(path))?;
        let size = std::fs::metadata(path).map_err(ArtifactError::io(path))?.len();
        return Ok(of_table(port_type, table::inspect(path)?, bytes, size));
    }
    let scan = tree::scan(path)?;
    let digest = tree::digest(&scan.entries);
    let size = tree::size(&scan.entries);
    let blob = Digest::of_bytes(&tree::to_blob(&scan.entries));
    Ok(Artifact { port_type, digest, size, blob, parts: Vec::new(), rows: None, columns: Vec::new() })
}

/// A table as an artifact.
pub fn of_table(port_type: PortType, info: TableInfo, blob: Digest, size: u64) -> Artifact {
    let TableInfo { digest, rows, columns } = info;
    Artifact { port_type, digest, size, blob, parts: Vec::new(), rows: Some(rows), columns }
}

/// Fetches `{url, digest}` once; the digest of the bytes names the cached file.
pub async fn download(url: &str, digest: &str, port_type: PortType, cache: &Path) -> Result<Input, String> {
    let wanted: Digest = digest.parse().map_err(|error| format!("{error}; `b3sum FILE` prints one"))?;
    let path = cache.join("downloads").join(wanted.to_string());
    if Digest::of_file(&path).ok() != Some(wanted) {
        let bytes = fetch(url).await?;
        let found = Digest::of_bytes(&bytes);
        if found != wanted {
            return Err(format!("{url} has the digest {found}, the pipeline says {wanted}; check which one you want"));
        }
        let partial = path.with_extension(format!("{}", std::process::id()));
        let folder = std::fs::create_dir_all(cache.join("downloads"));
        let written = folder.and_then(|()| std::fs::write(&partial, bytes));
        written
            .and_then(|()| std::fs::rename(&partial, &path))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let artifact = digest_outside(&path, port_type).map_err(|error| error.to_string())?;
    let stamps = stamps(&path).map_err(|error| error.to_string())?;
    Ok(Input { artifact, outside: Some(Outside { path, stamps }) })
}

/// `https://`, `http://` and `file://`; which bytes come is checked by their digest.
async fn fetch(url: &str) -> Result<Vec<u8>, String> {
    let fail = |error: object_store::Error| match error {
        object_store::Error::NotFound { .. } => format!("{url} is not there; check the address"),
        other => format!("{url}: {other}"),
    };
    let parsed =
        url::Url::parse(url).map_err(|error| format!("{url}: {error}; it should be an https:// or file:// URL"))?;
    let (store, path) = object_store::parse_url_opts(&parsed, [("allow_http", "true")])
        .map_err(|_| format!("{url} cannot be fetched; https://, http:// and file:// URLs can"))?;
    let result = object_store::ObjectStoreExt::get(&*store, &path).await.map_err(fail)?;
    result.bytes().await.map(|bytes| bytes.to_vec()).map_err(fail)
}

/// An artifact by name and tag.
pub async fn tagged(store: &Store, name: &str, tag: &str) -> Result<Input, String> {
    let error = |error: crate::store::StoreError| error.to_string();
    let Some(target) = store.tag(name, tag).await.map_err(error)? else {
        return Err(format!("nothing is tagged {name}@{tag} in {}; `cuda-agent tag` names an output", store.url()));
    };
    let record = store.record(&target.key).await.map_err(error)?.map(|(_, record)| record);
    let artifact = record.and_then(|record| record.outputs.get(&target.output).cloned());
    let gone = || {
        let url = store.url();
        format!(
            "what {name}@{tag} names is gone from {url}, or damaged; make it again, and tag it with `cuda-agent tag`"
        )
    };
    let artifact = artifact.ok_or_else(gone)?;
    match store.missing_blob(&artifact).await.map_err(error)? {
        Some(_) => Err(gone()),
        None => Ok(Input::stored(artifact)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i128 = 1_000_000_000;

    fn stamp(modified_s: i128, changed_s: i128) -> Vec<(String, Stamp)> {
        let stamp = Stamp { inode: 1, size: 1, modified_ns: modified_s * SECOND, changed_ns: changed_s * SECOND };
        vec![("f".to_owned(), stamp)]
    }

    fn artifact(text: &str) -> Artifact {
        let digest = Digest::of_bytes(text.as_bytes());
        let (parts, columns) = (Vec::new(), Vec::new());
        Artifact { port_type: PortType::Tree, digest, size: 1, blob: digest, parts, rows: None, columns }
    }

    /// All these times are long ago: when the digest is asked for again does not count, only when it was taken.
    #[test]
    fn a_digest_taken_right_after_a_change_is_never_trusted() {
        let certain = |stamps: &Vec<(String, Stamp)>, digested_s: i128| {
            let kept = Kept { stamps: stamps.clone(), artifact: artifact("x"), digested_at: digested_s * SECOND };
            kept.is_certain(stamps)
        };
        assert!(!certain(&stamp(100, 100), 101), "another change in the same tick would not show");
        assert!(!certain(&stamp(100, 100), 102));
        assert!(certain(&stamp(100, 100), 103));
        assert!(!certain(&stamp(50, 100), 101), "the time of modification can be set back, that of change cannot");
        assert!(!certain(&stamp(200, 100), 103), "nor is one in the future certain");
        let mut two = stamp(10, 10);
        two.extend(stamp(100, 100));
        assert!(!certain(&two, 101), "every file counts");
    }

    #[test]
    fn a_kept_digest_is_used_where_it_is_certain() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f");
        std::fs::write(&file, "real").unwrap();
        let stamps = stamps(&file).unwrap();
        let changed = stamps[0].1.changed_ns;
        let answer = |digested_at: i128| {
            let cache = FileCache::load(&folder.path().join("cache/files.json"));
            let kept = Kept { stamps: stamps.clone(), artifact: artifact("kept"), digested_at };
            cache.kept.lock().unwrap().0.insert(file.clone(), kept);
            cache.input(&file, PortType::Tree).unwrap().artifact.digest
        };
        let kept = artifact("kept").digest;
        assert_eq!(answer(changed + 3 * SECOND), kept);
        assert_ne!(answer(changed + SECOND), kept);
    }

    #[test]
    fn the_cache_is_written_only_where_its_folder_can_be_made() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f");
        std::fs::write(&file, "text").unwrap();
        let saved = |path: &Path| {
            let cache = FileCache::load(path);
            cache.input(&file, PortType::Tree).unwrap();
            cache.save();
            path.exists()
        };
        assert!(saved(&folder.path().join("cache/files.json")));
        let kept = FileCache::load(&folder.path().join("cache/files.json"));
        assert!(kept.kept.lock().unwrap().0.contains_key(&file));
        assert!(!saved(&folder.path().join("none/cache/files.json")));
        assert!(!folder.path().join("none").exists());
    }
}
