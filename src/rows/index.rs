//! Which rows a base key has results for, and in which segment.
//!
//! One listing finds the segments; the digests of each are read once and kept in a local file, so that looking up a
//! million rows reads 32 MB and no Parquet.
//!
//! The file: the magic, then per segment its epoch (little-endian `u32`), its digest (32 bytes), a count (`u32`), and so many
//! digests. What it says is checked against the segments when they are read. It is only
//! ever appended to, and a torn end is cut off when it is read.

use std::collections::HashMap;
use std::fs;
use std::hash::{BuildHasherDefault, Hasher};
use std::io::Write;
use std::path::Path;

use futures::{StreamExt, TryStreamExt};

use crate::artifact::ArtifactError;
use crate::digest::Digest;
use crate::rows::segment;
use crate::store::{SegmentName, Store, StoreError};

const MAGIC: &[u8; 8] = b"CAROWS2\n";
/// Segments that are fetched at the same time.
const AHEAD: usize = 16;

/// Where a row's result is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index into [`RowIndex::segments`].
    pub segment: u32,
    /// Row of that segment.
    pub row: u32,
}

/// The rows of one base key.
#[derive(Debug, Default)]
pub struct RowIndex {
    /// Names of the segments; of two results for a row the earlier segment wins.
    pub segments: Vec<SegmentName>,
    places: HashMap<Digest, Place, BuildHasherDefault<Prefix>>,
}

/// Digests are random already: their first bytes are hash enough.
#[derive(Default)]
struct Prefix(u64);

impl Hasher for Prefix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk::<8>() {
            self.0 = u64::from_le_bytes(*first);
        }
    }

    fn write_usize(&mut self, _: usize) {}
}

/// Why rows could not be looked up.
#[derive(Debug, thiserror::Error)]
pub enum RowError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A segment.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
}

impl RowIndex {
    /// Lists the segments of a base key and reads the digests of those that `cache` does not know.
    pub async fn load(store: &Store, base: &Digest, cache: &Path) -> Result<Self, RowError> {
        let listed = store.segments(base).await?;
        if listed.is_empty() {
            return Ok(Self::default());
        }
        let (mut known, whole) = read_cache(cache);
        let unseen: Vec<SegmentName> = listed.iter().filter(|name| !known.contains_key(*name)).copied().collect();
        let reading = unseen.into_iter().map(|name| async move {
            // A segment that cannot be read counts as absent: its rows are done again.
            let Some(bytes) = store.segment(base, &name).await? else { return Ok(None) };
            Ok::<_, RowError>(segment::digests(bytes).ok().map(|digests| (name, digests)))
        });
        let fresh = futures::stream::iter(reading).buffered(AHEAD).try_collect::<Vec<_>>().await?;
        let fresh: Vec<_> = fresh.into_iter().flatten().collect();
        append_cache(cache, &fresh, whole);
        known.extend(fresh);
        Ok(Self::build(listed.into_iter().filter_map(|name| known.remove(&name).map(|rows| (name, rows))).collect()))
    }

    fn build(segments: Vec<(SegmentName, Vec<Digest>)>) -> Self {
        let rows = segments.iter().map(|(_, rows)| rows.len()).sum();
        let mut places = HashMap::with_capacity_and_hasher(rows, BuildHasherDefault::default());
        for (index, (_, digests)) in segments.iter().enumerate() {
            for (row, digest) in digests.iter().enumerate() {
                places.entry(*digest).or_insert(Place { segment: index as u32, row: row as u32 });
            }
        }
        Self { segments: segments.into_iter().map(|(name, _)| name).collect(), places }
    }

    /// Where a row's result is, `None` where it has none.
    pub fn find(&self, row: &Digest) -> Option<Place> {
        self.places.get(row).copied()
    }

    /// The highest epoch of any segment.
    pub fn epoch(&self) -> u32 {
        self.segments.iter().map(|segment| segment.epoch).max().unwrap_or(0)
    }

    /// How many rows have a result.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}

/// What the file holds, and how many of its bytes are whole.
fn read_cache(path: &Path) -> (HashMap<SegmentName, Vec<Digest>>, u64) {
    let mut known = HashMap::new();
    let Ok(bytes) = fs::read(path) else { return (known, 0) };
    let Some(mut rest) = bytes.strip_prefix(MAGIC) else { return (known, 0) };
    while let Some((epoch, after)) = rest.split_first_chunk::<4>() {
        let Some((name, after)) = after.split_first_chunk::<32>() else { break };
        let Some((count, after)) = after.split_first_chunk::<4>() else { break };
        let length = u32::from_le_bytes(*count) as usize * 32;
        let Some((digests, after)) = after.split_at_checked(length) else { break };
        let digests = digests.chunks_exact(32).map(|d| Digest(d.try_into().expect("32 bytes"))).collect();
        known.insert(SegmentName { epoch: u32::from_le_bytes(*epoch), digest: Digest(*name) }, digests);
        rest = after;
    }
    (known, (bytes.len() - rest.len()) as u64)
}

/// The cache is a help: where it cannot be written, the next lookup is slow, and that is all.
fn append_cache(path: &Path, fresh: &[(SegmentName, Vec<Digest>)], whole: u64) {
    if fresh.is_empty() {
        return;
    }
    let mut bytes = Vec::new();
    if whole == 0 {
        bytes.extend(MAGIC);
    }
    for (name, digests) in fresh {
        bytes.extend(name.epoch.to_le_bytes());
        bytes.extend(name.digest.0);
        bytes.extend((digests.len() as u32).to_le_bytes());
        digests.iter().for_each(|digest| bytes.extend(digest.0));
    }
    let written = || -> std::io::Result<()> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        let mut file = fs::OpenOptions::new().create(true).append(true).open(path)?;
        file.set_len(whole)?;
        file.write_all(&bytes)
    };
    let _ = written();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(n: u32) -> Digest {
        Digest::of_bytes(&n.to_le_bytes())
    }

    fn name(epoch: u32, n: u32) -> SegmentName {
        SegmentName { epoch, digest: digest(n) }
    }

    #[test]
    fn the_highest_epoch_wins_and_then_the_smallest_name() {
        let mut names = [name(0, 1), name(0, 2), name(1, 3)];
        names.sort_unstable();
        assert_eq!(names[0], name(1, 3));
        assert!(names[1].digest < names[2].digest);
        assert_eq!(SegmentName::parse(&name(7, 1).to_string()), Some(name(7, 1)));
    }

    #[test]
    fn the_first_segment_wins() {
        let index = RowIndex::build(vec![(name(0, 1), vec![digest(7)]), (name(0, 2), vec![digest(8), digest(7)])]);
        assert_eq!(index.find(&digest(7)), Some(Place { segment: 0, row: 0 }));
        assert_eq!(index.find(&digest(8)), Some(Place { segment: 1, row: 0 }));
        assert_eq!((index.find(&digest(9)), index.len()), (None, 2));
        assert!(!index.is_empty() && RowIndex::default().is_empty());
    }

    #[test]
    fn the_highest_epoch_is_that_of_any_segment() {
        assert_eq!(RowIndex::default().epoch(), 0);
        let segments = [name(2, 1), name(5, 2), name(3, 3)].map(|name| (name, Vec::new()));
        assert_eq!(RowIndex::build(segments.into()).epoch(), 5);
    }

    /// Nothing but time would tell that all rows have one hash.
    #[test]
    fn a_digest_is_hashed_by_its_first_bytes() {
        use std::hash::BuildHasher;
        let row = digest(7);
        let first = u64::from_le_bytes(row.0[..8].try_into().unwrap());
        assert_eq!(BuildHasherDefault::<Prefix>::default().hash_one(row), first);
    }

    #[tokio::test]
    async fn a_segment_is_read_once() {
        use cuda_agent_protocol::{RowResult, RowStatus};
        let manifest = serde_json::json!({
            "name": "lab/rows", "version": "1.0.0", "summary": "Works on rows.", "run": ["x"], "outputs": {},
        });
        let schema = segment::SegmentSchema::new(&serde_json::from_value(manifest).unwrap());
        let (folder, store, base) = (tempfile::tempdir().unwrap(), Store::memory(), Digest([9; 32]));
        let cache = folder.path().join("index");
        let outputs = Default::default();
        let row = digest(7).to_string();
        let result = RowResult { row, status: RowStatus::Done, reason: None, detail: None, outputs };
        let bytes = segment::encode(&schema.batch(&[result]).unwrap()).unwrap();
        let name = store.put_segment(&base, 0, bytes).await.unwrap();
        let foreign = store.put_segment(&base, 0, b"no segment".as_slice().into()).await.unwrap();
        let index = RowIndex::load(&store, &base, &cache).await.unwrap();
        assert_eq!((index.segments.as_slice(), index.len()), ([name].as_slice(), 1), "but for {foreign}");
        // What the cache says is believed until the rows themselves are read.
        fs::write(&cache, []).unwrap();
        append_cache(&cache, &[(name, vec![digest(8)])], 0);
        let index = RowIndex::load(&store, &base, &cache).await.unwrap();
        assert_eq!((index.find(&digest(7)), index.find(&digest(8)).map(|place| place.row)), (None, Some(0)));
    }

    #[test]
    fn a_torn_cache_is_cut_and_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows/index");
        append_cache(&path, &[(name(0, 1), vec![digest(2), digest(3)])], 0);
        let (known, whole) = read_cache(&path);
        assert_eq!(known[&name(0, 1)], [digest(2), digest(3)]);
        let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&[1; 50]).unwrap();
        assert_eq!(read_cache(&path).1, whole);
        append_cache(&path, &[(name(1, 4), vec![])], whole);
        assert_eq!(read_cache(&path).0.len(), 2);
        fs::write(&path, b"something else").unwrap();
        assert_eq!(read_cache(&path).1, 0);
    }
}
