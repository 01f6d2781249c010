//! What the store keeps besides blobs: records, run manifests, tags.

use std::collections::BTreeMap;
use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::state::{RunState, StageState};
use crate::artifact::Artifact;
use crate::digest::Digest;
use crate::interpreter::Interpreter;
use crate::key::{Preimage, SCHEMA};
use crate::name::is_name;

/// What a stage made, filed under its key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// 1.
    pub schema: u32,
    /// The key, which the pre-image digests to.
    pub key: Digest,
    /// The stage kind.
    pub kind: String,
    /// Random; tells our own write from a rival's.
    pub nonce: String,
    /// Everything that counted.
    pub preimage: Preimage,
    /// For by-row stages: what row results are filed under.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Digest>,
    /// By port.
    pub outputs: BTreeMap<String, Box<Artifact>>,
    /// Seconds since 1970.
    pub created_at: f64,
    /// The run that made it, or that accepted it.
    pub run: String,
    /// The key under which it was made, where somebody said that it stands for this one too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted_from: Option<Digest>,
    /// The Python that its program was run with, where it was; no key says this of every kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interpreter: Option<Interpreter>,
    /// Seconds that the program took.
    pub duration_s: f64,
    /// For by-row stages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<RowCounts>,
    /// The last value of each metric that the program sent.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
}

/// Which record it is, of all that were ever written under a key.
#[derive(Clone, Copy, Debug)]
pub struct RecordId<'a> {
    /// The key.
    pub key: &'a Digest,
    /// The record's random text.
    pub nonce: &'a str,
}

/// What a run needs of a record to reuse what the stage made. Its pre-image is compared as text and not taken apart, which
/// is most of the work of reading a record.
#[derive(Debug)]
pub struct Brief {
    key: Digest,
    nonce: String,
    /// By port.
    pub outputs: BTreeMap<String, Box<Artifact>>,
    /// For by-row stages.
    pub rows: Option<RowCounts>,
    /// All that is stored, and where in it the pre-image is.
    bytes: Bytes,
    preimage: Range<usize>,
}

impl Brief {
    /// Reads what is stored of a key; `None` where it is damaged, or of something else.
    pub(super) fn of_key(bytes: Bytes, key: &Digest) -> Option<Self> {
        #[derive(Deserialize)]
        struct Stored<'a> {
            key: Digest,
            nonce: String,
            #[serde(borrow)]
            preimage: &'a RawValue,
            outputs: BTreeMap<String, Box<Artifact>>,
            rows: Option<RowCounts>,
        }
        let Stored { key: found, nonce, preimage, outputs, rows } = serde_json::from_slice(&bytes).ok()?;
        let start = preimage.get().as_ptr() as usize - bytes.as_ptr() as usize;
        let preimage = start..start + preimage.get().len();
        // Without a check, damage in what isn't read here would not be seen.
        let is_whole = || Record::passes_check(&bytes).unwrap_or_else(|| Record::from_bytes(&bytes).is_some());
        let is_sound = found == *key && is_whole() && are_named(&outputs);
        is_sound.then_some(Self { key: found, nonce, outputs, rows, bytes, preimage })
    }

    /// Which record it is.
    pub fn id(&self) -> RecordId<'_> {
        RecordId { key: &self.key, nonce: &self.nonce }
    }

    /// Whether its pre-image is this one, whose canonical bytes these are.
    pub fn is_of(&self, preimage: &Preimage, bytes: &[u8]) -> bool {
        let text = &self.bytes[self.preimage.clone()];
        // What another version wrote may be the same in other words.
        bytes == text || serde_json::from_slice::<Preimage>(text).is_ok_and(|found| found == *preimage)
    }

    /// All of it, which is known to be whole; `None` where it has something that is not as it should be.
    pub fn record(&self) -> Option<Record> {
        serde_json::from_slice(&self.bytes).ok()
    }
}

/// Whether outputs have such names as a manifest may declare: they become names of files, and whoever can write to the store
/// can write any.
fn are_named(outputs: &BTreeMap<String, Box<Artifact>>) -> bool {
    outputs.keys().all(|port| is_name(port))
}

/// What comes before the digest of a stored record, which is its last member.
const CHECK: &str = ",\"check\":\"";

impl Record {
    /// What is stored: JSON, with the digest of what comes before it as the last member. A record has no name by which
    /// its bytes could be checked, as blobs have.
    pub fn to_bytes(&self) -> Bytes {
        let mut text = serde_json::to_string(self).expect("records are plain data");
        text.pop();
        let check = Digest::of_bytes(text.as_bytes());
        format!("{text}{CHECK}{check}\"}}").into()
    }

    /// Reads the record of a key; `None` where it is damaged, or of something else.
    pub(super) fn of_key(bytes: &[u8], key: &Digest) -> Option<Self> {
        Self::from_bytes(bytes).filter(|record| record.key == *key && record.is_sound())
    }

    /// Which record it is.
    pub fn id(&self) -> RecordId<'_> {
        RecordId { key: &self.key, nonce: &self.nonce }
    }

    /// Whether its outputs have such names as a manifest may declare.
    pub fn is_sound(&self) -> bool {
        are_named(&self.outputs)
    }

    /// Whether its pre-image digests to its key.
    pub fn is_of_its_key(&self) -> bool {
        // A later version may count what this one doesn't read.
        self.preimage.schema > SCHEMA || self.preimage.key() == self.key
    }

    /// Reads what is stored; `None` where that is damaged.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok().filter(|_| Self::is_whole(bytes))
    }

    /// Whether what is stored is what was written, as far as its digest tells; older records have none.
    pub fn is_whole(bytes: &[u8]) -> bool {
        Self::passes_check(bytes) != Some(false)
    }

    /// Whether its digest says that it is what was written; `None` where it has none.
    fn passes_check(bytes: &[u8]) -> Option<bool> {
        let Some(at) = bytes.len().checked_sub(CHECK.len() + 64 + 2) else { return Some(false) };
        let (text, check) = bytes.split_at(at);
        let check = check.strip_prefix(CHECK.as_bytes())?;
        Some(check.starts_with(Digest::of_bytes(text).to_string().as_bytes()))
    }
}

/// How a by-row stage came by its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowCounts {
    /// Input rows.
    pub total: u64,
    /// Distinct rows that a program did in this run.
    pub executed: u64,
    /// Distinct rows that were in the store.
    pub reused: u64,
    /// Distinct rows that are at fault themselves.
    pub rejected: u64,
    /// Distinct rows that failed from outside causes and were allowed to.
    #[serde(default)]
    pub failed: u64,
}

/// How a commit ended.
#[derive(Clone, Debug)]
pub struct Commit {
    /// The generation that counts.
    pub generation: u32,
    /// Its record: ours, or the winner's.
    pub record: Record,
    /// Whether it is ours.
    pub ours: bool,
}

/// A run, as the store remembers it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunManifest {
    /// 1.
    pub schema: u32,
    /// Starts with the time, so that names sort by it.
    pub run: String,
    /// The pipeline's name.
    pub pipeline: String,
    /// Seconds since 1970.
    pub started_at: f64,
    /// The last sign of life.
    pub heartbeat_at: f64,
    /// Absent while it goes on, or when it was killed.
    pub ended_at: Option<f64>,
    /// How it ended, or that it goes on.
    pub outcome: RunState,
    /// Parameters of the pipeline.
    pub params: BTreeMap<String, Value>,
    /// By stage.
    pub stages: BTreeMap<String, StageEntry>,
}

/// A stage in a run's manifest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageEntry {
    /// Its place among the stages of the pipeline, producers before consumers; absent in older manifests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<u32>,
    /// Seconds that it took, attempts and waiting for another try included; absent where it was not executed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_s: Option<f64>,
    /// Of a by-row stage with a result: how that came by its rows when it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<RowCounts>,
    /// Absent where it never became known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Digest>,
    /// For by-row stages: what row results are filed under.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Digest>,
    /// How it ended, or that it did not.
    pub outcome: StageState,
    /// Why it failed, or what was set aside to accept it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// What follows the pipeline's name in that of a worker's run. No pipeline has a dot in its name.
const OF_WORKER: &str = ".worker";

impl RunManifest {
    /// The name of a worker's run of a stage of this pipeline, which is no run of the pipeline.
    pub fn name_of_worker(pipeline: &str) -> String {
        format!("{pipeline}{OF_WORKER}")
    }

    /// Whether a worker executed a stage for another run.
    pub fn is_of_worker(&self) -> bool {
        self.pipeline.ends_with(OF_WORKER)
    }

    /// Its stages, producers before consumers where that is known, else by name.
    pub fn in_order(&self) -> Vec<(&String, &StageEntry)> {
        let mut stages: Vec<_> = self.stages.iter().collect();
        stages.sort_by_key(|(_, entry)| entry.place);
        stages
    }
}

/// The name of a row segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentName {
    /// Raised by a refresh, so that its results win over older ones.
    pub epoch: u32,
    /// Digest of the file's bytes.
    pub digest: Digest,
}

impl SegmentName {
    /// Reads `00000000-<digest>`.
    pub fn parse(text: &str) -> Option<Self> {
        let (epoch, digest) = text.split_once('-')?;
        Some(Self { epoch: epoch.parse().ok()?, digest: digest.parse().ok()? })
    }
}

impl std::fmt::Display for SegmentName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:08}-{}", self.epoch, self.digest)
    }
}

/// What wins comes first: the highest epoch, and in it the smallest digest.
impl Ord for SegmentName {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.epoch.cmp(&self.epoch).then(self.digest.cmp(&other.digest))
    }
}

impl PartialOrd for SegmentName {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// What a tag names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tag {
    /// The record.
    pub key: Digest,
    /// Its output.
    pub output: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_with_any_other_bit_is_damaged_or_the_same() {
        let preimage: Preimage = serde_json::from_value(serde_json::json!({
            "schema": 1, "kind": "k", "program": { "version": "1" }, "params": {}, "inputs": {}, "env": {}, "secrets": [],
            "toolchain": {},
        }))
        .unwrap();
        let record = Record {
            schema: 1,
            key: preimage.key(),
            kind: "k".into(),
            nonce: "n".into(),
            preimage,
            base: None,
            outputs: BTreeMap::new(),
            created_at: 0.0,
            run: "r".into(),
            accepted_from: None,
            interpreter: None,
            duration_s: 0.0,
            rows: None,
            metrics: BTreeMap::new(),
        };
        let bytes = record.to_bytes();
        assert_eq!(Record::from_bytes(&bytes), Some(record.clone()));
        for (place, bit) in (0..bytes.len()).flat_map(|place| (0..8).map(move |bit| (place, bit))) {
            let mut other = bytes.to_vec();
            other[place] ^= 1 << bit;
            assert!(Record::from_bytes(&other).is_none_or(|read| read == record), "bit {bit} of byte {place}");
        }
        let unchecked = serde_json::to_vec(&record).unwrap();
        assert_eq!(Record::from_bytes(&unchecked), Some(record.clone()));
        // Of another pre-image than its key says.
        let mut other = record.clone();
        other.preimage.params.insert("n".into(), 1.into());
        assert!(record.is_of_its_key() && !other.is_of_its_key());
        let brief = |bytes: &[u8]| Brief::of_key(Bytes::copy_from_slice(bytes), &record.key);
        let read = brief(&bytes).unwrap();
        assert_eq!((read.outputs.clone(), read.rows, read.record()), (BTreeMap::new(), None, Some(record.clone())));
        let is_of = |brief: Brief, preimage: &Preimage| brief.is_of(preimage, &preimage.to_bytes());
        assert!(!is_of(read, &other.preimage) && is_of(brief(&bytes).unwrap(), &record.preimage));
        assert!(!is_of(brief(&other.to_bytes()).unwrap(), &record.preimage));
        // In other words: with white space, and members in another order.
        let spaced = serde_json::to_vec_pretty(&record).unwrap();
        let mut turned = serde_json::to_value(&record).unwrap();
        turned["preimage"] = crate::key::canonical::tests::reversed(&turned["preimage"]);
        for bytes in [spaced, serde_json::to_vec(&turned).unwrap()] {
            assert!(is_of(brief(&bytes).unwrap(), &record.preimage));
        }
        assert!(Brief::of_key(bytes.clone(), &Digest::of_bytes(b"other")).is_none());
        for bytes in [bytes.to_vec(), unchecked] {
            for place in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[place] ^= 1;
                assert!(brief(&damaged).is_none_or(|read| read.record().is_some()), "byte {place}");
            }
        }
    }
}
