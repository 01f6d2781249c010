//! The objects of the layout, by their names.

use std::fmt::{self, Display, Formatter};

use futures::stream::{self, StreamExt, TryStreamExt};
use serde::Serialize;

use super::CLOCK;
use crate::digest::Digest;
use crate::store::tier::{Meta, Tier};
use crate::store::work::WorkName;
use crate::store::{CONCURRENT, CheckpointName, LAYOUT, SegmentName, StoreError, blob_name, record_name, segment_name};

/// What objects are counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Manifests of runs.
    Runs,
    /// Records of results.
    Records,
    /// Their bytes.
    Blobs,
    /// Segments of row results.
    Rows,
    /// What runs printed.
    Logs,
    /// Hints, leases, announcements, workers' reports.
    Other,
}

impl Display for Class {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Self::Runs => "runs",
            Self::Records => "records",
            Self::Blobs => "blobs",
            Self::Rows => "rows",
            Self::Logs => "logs",
            Self::Other => "other",
        })
    }
}

/// A number of objects and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sum {
    /// How many.
    pub objects: u64,
    /// How large together.
    pub bytes: u64,
}

impl Sum {
    /// Counts one more.
    pub fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
    }
}

/// What an object is, by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// A run's manifest.
    Run(String),
    /// A generation of a key.
    Record(Digest, u32),
    /// A blob.
    Blob(Digest),
    /// A row segment of a base key.
    Rows(Digest, SegmentName),
    /// A checkpoint of a base key.
    Checkpoint(Digest, CheckpointName),
    /// Of a run.
    Log(String),
    /// Of a pipeline.
    Hint(String),
    /// Announces a generation of a key.
    Replaced(Digest, u32),
    /// On a key or a base key, or a probe.
    Lease(Option<Digest>),
    /// A run's announcement to workers, or how an attempt of one failed.
    Work(String),
    /// A worker's report.
    Worker,
    /// Left behind while asking for the time.
    Clock,
}

impl What {
    /// What an object of this name is; `None` where the name is not of the layout.
    pub fn of(name: &str) -> Option<Self> {
        let (folder, rest) = name.strip_prefix(LAYOUT)?.strip_prefix('/')?.split_once('/')?;
        let what = match folder {
            "blobs" => Self::Blob(rest.split_once('/')?.1.parse().ok()?),
            "records" => {
                let (key, generation) = rest.split_once('/')?;
                Self::Record(key.parse().ok()?, generation.parse().ok()?)
            }
            "rows" => {
                let (base, segment) = rest.split_once('/')?;
                Self::Rows(base.parse().ok()?, SegmentName::parse(segment.strip_suffix(".parquet")?)?)
            }
            "checkpoints" => {
                let (base, checkpoint) = rest.split_once('/')?;
                Self::Checkpoint(base.parse().ok()?, CheckpointName::parse(checkpoint)?)
            }
            "runs" => Self::Run(rest.to_owned()),
            "logs" => Self::Log(rest.split_once('/')?.0.to_owned()),
            "hints" => {
                let (pipeline, params) = rest.rsplit_once('/')?;
                params.parse::<Digest>().ok()?;
                Self::Hint(pipeline.to_owned())
            }
            "replaced" => {
                let (key, generation) = rest.split_once('-')?;
                Self::Replaced(key.parse().ok()?, generation.parse().ok()?)
            }
            "leases" => Self::Lease(leased(rest)?),
            "work" | "work-failed" => Self::Work(WorkName::parse(rest.split_once('/')?.1)?.run),
            "workers" => rest.split_once('/').filter(|(_, id)| is_run_id(id)).map(|_| Self::Worker)?,
            "gc" => rest.starts_with(CLOCK).then_some(Self::Clock)?,
            _ => return None,
        };
        what.is_written_as(name).then_some(what)
    }

    /// Whether the engine writes such an object under just this name: something else in our folders is somebody else's.
    fn is_written_as(&self, name: &str) -> bool {
        match self {
            Self::Blob(digest) => name == blob_name(digest),
            Self::Record(key, generation) => name == record_name(key, *generation),
            Self::Rows(base, segment) => name == segment_name(base, segment),
            Self::Checkpoint(base, checkpoint) => name == checkpoint.of(base),
            Self::Replaced(key, generation) => name == format!("{LAYOUT}/replaced/{key}-{generation:08}"),
            Self::Run(run) | Self::Log(run) | Self::Work(run) => is_run_id(run),
            Self::Hint(_) | Self::Lease(_) | Self::Worker | Self::Clock => true,
        }
    }

    /// What it is counted as.
    pub(in crate::store) fn class(&self) -> Class {
        match self {
            Self::Run(_) => Class::Runs,
            Self::Record(..) => Class::Records,
            Self::Blob(_) => Class::Blobs,
            Self::Rows(..) => Class::Rows,
            Self::Log(_) => Class::Logs,
            _ => Class::Other,
        }
    }
}

/// What a lease is on: `<key>.1`, `<base>-<epoch>-<bucket>.1`, or `probe-…`, which is on nothing.
fn leased(name: &str) -> Option<Option<Digest>> {
    if name.starts_with("probe-") {
        return Some(None);
    }
    let (on, number) = name.rsplit_once('.')?;
    number.parse::<u32>().ok()?;
    on.split('-').next()?.parse().ok().map(Some)
}

/// Whether a name is `20260131T235959.123Z-` and a random part.
fn is_run_id(name: &str) -> bool {
    let digits = |range| name.get(range).is_some_and(|part: &str| part.bytes().all(|byte| byte.is_ascii_digit()));
    let random = name.get(15..).and_then(|rest| rest.split_once("Z-"));
    digits(0..8)
        && name.get(8..9) == Some("T")
        && digits(9..15)
        && random.is_some_and(|(_, random)| random.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}

/// An object of the layout.
#[derive(Clone, Debug)]
pub struct Object {
    /// From the layout's version on.
    pub name: String,
    /// What it is.
    pub what: What,
    /// Bytes.
    pub size: u64,
    /// Seconds since 1970, by the server's clock.
    pub modified: f64,
}

impl Object {
    pub(super) fn of(name: String, meta: &Meta) -> Option<Self> {
        Some(Self { what: What::of(&name)?, name, size: meta.size, modified: meta.modified })
    }

    /// What tells this object from one that was written later under its name.
    pub(super) fn changed(&self) -> i64 {
        (self.modified * 1e3).round() as i64
    }
}

/// The objects of some folders of the layout. The blobs' folder, which is by far the largest, is listed in 256 parts.
pub(in crate::store) async fn list(tier: &Tier, folders: &[&str]) -> Result<Vec<Object>, StoreError> {
    let mut prefixes = Vec::new();
    for folder in folders {
        match *folder {
            "blobs" => prefixes.extend((0..=255u8).map(|part| format!("{LAYOUT}/blobs/{part:02x}"))),
            folder => prefixes.push(format!("{LAYOUT}/{folder}")),
        }
    }
    let listings = prefixes.into_iter().map(|prefix| async move {
        let found = tier.list(&prefix).await?.into_iter();
        let objects = found.filter_map(|meta| Object::of(format!("{prefix}/{}", meta.name), &meta));
        Ok::<Vec<Object>, StoreError>(objects.collect())
    });
    let listings = stream::iter(listings).buffered(CONCURRENT).try_collect::<Vec<_>>().await?;
    Ok(listings.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "20260131T235959.123Z-abcdef";
    const DIGEST: &str = "ab00000000000000000000000000000000000000000000000000000000000000";

    #[test]
    fn classes_are_shown_as_json_has_them() {
        for class in [Class::Runs, Class::Records, Class::Blobs, Class::Rows, Class::Logs, Class::Other] {
            assert_eq!(serde_json::json!(class), class.to_string());
        }
    }

    #[test]
    fn names_say_what_objects_are() {
        let digest: Digest = DIGEST.parse().unwrap();
        let segment = SegmentName { epoch: 2, digest };
        for (name, what) in [
            (format!("v1/blobs/ab/{DIGEST}"), What::Blob(digest)),
            (format!("v1/records/{DIGEST}/00000012"), What::Record(digest, 12)),
            (format!("v1/rows/{DIGEST}/00000002-{DIGEST}.parquet"), What::Rows(digest, segment)),
            ("v1/runs/20260131T235959.123Z-abcdef".into(), What::Run("20260131T235959.123Z-abcdef".into())),
            ("v1/runs/20260131T235959Z-abcdef".into(), What::Run("20260131T235959Z-abcdef".into())),
            ("v1/logs/20260131T235959.123Z-abcdef/a[b=1].log".into(), What::Log("20260131T235959.123Z-abcdef".into())),
            (format!("v1/hints/a/b/{DIGEST}"), What::Hint("a/b".into())),
            (format!("v1/replaced/{DIGEST}-00000002"), What::Replaced(digest, 2)),
            (format!("v1/leases/{DIGEST}.1"), What::Lease(Some(digest))),
            (format!("v1/leases/{DIGEST}-0-63.12"), What::Lease(Some(digest))),
            ("v1/leases/probe-x".into(), What::Lease(None)),
            ("v1/gc/clock-x".into(), What::Clock),
            (format!("v1/work/gpu/{DIGEST}-{RUN}-1"), What::Work(RUN.into())),
            (format!("v1/work-failed/gpu/{DIGEST}-{RUN}-12"), What::Work(RUN.into())),
            (format!("v1/workers/gpu/{RUN}"), What::Worker),
        ] {
            assert_eq!(What::of(&name), Some(what), "{name}");
        }
        for name in [
            format!("v1/blobs/cd/{DIGEST}"),
            format!("v1/blobs/ab/x/{DIGEST}"),
            format!("v1/records/{DIGEST}/12"),
            format!("v1/records/{DIGEST}/+0000012"),
            format!("v1/rows/{DIGEST}/2-{DIGEST}.parquet"),
            format!("v1/rows/{DIGEST}/00000002-{DIGEST}"),
            format!("v1/replaced/{DIGEST}-2"),
            format!("v1/leases/{DIGEST}"),
            format!("v2/blobs/ab/{DIGEST}"),
            "v1/runs/a".into(),
            "v1/runs/20260131T235959.123Z-abc/x".into(),
            "v1/logs/20260131T235959.123Z-abcdef".into(),
            "v1/tags/a/b".into(),
            "v1/pins/20260131T235959.123Z-abcdef".into(),
            format!("v1/work/{DIGEST}-{RUN}-1"),
            format!("v1/work/gpu/{DIGEST}-{RUN}"),
            format!("v1/work/gpu/{DIGEST}-a-1"),
            "v1/workers/README".into(),
            "v1/workers/gpu/README".into(),
            "v1/gc/deleted-x".into(),
            "v1/gc/condemned-x".into(),
        ] {
            assert_eq!(What::of(&name), None, "{name}");
        }
    }
}
