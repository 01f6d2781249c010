//! Reading everything in the tier that counts, and comparing it with the digests that it is filed under.
//!
//! What is damaged is written again from the local tier where that has a good copy; otherwise it is removed, so that it
//! counts as missing and the next run makes it again.

use std::collections::{BTreeMap, HashMap, HashSet};

use futures::stream::{self, StreamExt, TryStreamExt};
use serde::Serialize;

use super::gc::{self, Class, Named, Object, Sum, What};
use super::tier::Tier;
use super::{CONCURRENT, LAYOUT, Record, Store, StoreError, record_name};
use crate::digest::Digest;
use crate::key::{Preimage, canonical};

/// Larger objects are read in pieces of this size.
const PIECE: u64 = 4 << 20;
/// Pieces of one object on their way at the same time.
const PIECES: usize = 4;
/// Large objects that are read at the same time.
const LARGE: usize = 4;

/// How far an audit has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// What was read.
    pub done: Sum,
    /// What is to be read.
    pub total: Sum,
}

/// What became of something that is damaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// Written again from this machine's copy.
    Mended,
    /// Removed.
    Removed,
    /// Nothing: it was only to be found.
    Left,
    /// It could not be read.
    Unreadable(String),
}

/// Something that is not what its name says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damaged {
    /// The object.
    pub name: String,
    /// What became of it.
    pub end: End,
}

/// A record that names blobs which are not there: the next run makes it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Incomplete {
    /// Its key.
    pub key: Digest,
    /// The stage kind.
    pub kind: String,
    /// How many blobs are missing.
    pub missing: usize,
}

/// What an audit found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Audit {
    /// What was read.
    pub checked: BTreeMap<Class, Sum>,
    /// What is not what its name says.
    pub damaged: Vec<Damaged>,
    /// Records that name what is not there.
    pub incomplete: Vec<Incomplete>,
}

impl Audit {
    /// Whether all is well again.
    pub fn is_mended(&self) -> bool {
        self.damaged.iter().all(|damaged| damaged.end == End::Mended)
    }
}

/// What an object turned out to be.
enum State {
    Good,
    Record { kind: String, named: Named },
    Bad,
    Gone,
    Unreadable(String),
}

/// The highest generation of a key, and what it names where it is good.
type Newest = HashMap<Digest, (u32, Option<(String, Named)>)>;

impl Store {
    /// Reads all blobs, row segments and records, and mends or removes what is damaged, unless it is a dry run.
    pub async fn audit(&self, dry_run: bool, progress: &mut dyn FnMut(Progress)) -> Result<Audit, StoreError> {
        let tier = self.truth();
        let objects = gc::list(tier, &["records", "rows", "checkpoints", "blobs"]).await?;
        let (mut audit, mut bad) = (Audit::default(), Vec::new());
        let (mut there, mut newest) = (HashSet::new(), Newest::new());
        let mut told = Progress { done: Sum::default(), total: Sum::default() };
        objects.iter().for_each(|object| told.total.add(object.size));
        let (large, small): (Vec<Object>, Vec<Object>) = objects.into_iter().partition(|object| object.size > PIECE);
        for (objects, width) in [(small, CONCURRENT), (large, LARGE)] {
            let checks =
                objects.into_iter().map(|object| async move { check(tier, &object).await.map(|s| (object, s)) });
            let mut checks = stream::iter(checks).buffer_unordered(width);
            while let Some((object, state)) = checks.try_next().await? {
                told.done.add(object.size);
                progress(told);
                audit.checked.entry(object.what.class()).or_default().add(object.size);
                let record = match state {
                    State::Gone => continue,
                    State::Good => None,
                    State::Record { kind, named } => Some((kind, named)),
                    State::Bad => {
                        bad.push(object.clone());
                        None
                    }
                    State::Unreadable(error) => {
                        let end = End::Unreadable(error);
                        audit.damaged.push(Damaged { name: object.name.clone(), end });
                        None
                    }
                };
                match object.what {
                    What::Blob(blob) => {
                        there.insert(blob);
                    }
                    What::Record(key, generation) => enter(&mut newest, key, generation, record),
                    _ => {}
                }
            }
        }
        let ends = self.mend_all(&bad, dry_run).await?;
        for (object, _) in bad.iter().zip(&ends).filter(|(_, damaged)| damaged.end != End::Mended) {
            if let What::Blob(blob) = object.what {
                there.remove(&blob);
            }
        }
        audit.damaged.extend(ends);
        audit.damaged.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        audit.incomplete = incomplete(&newest, &there);
        Ok(audit)
    }

    async fn mend_all(&self, bad: &[Object], dry_run: bool) -> Result<Vec<Damaged>, StoreError> {
        let mut ends = Vec::new();
        let mut is_announced = false;
        for object in bad {
            let end = if dry_run {
                End::Left
            } else if self.mend(object).await? {
                End::Mended
            } else {
                // Others must not go on trusting that it is there.
                if self.has_remote() && !is_announced {
                    let now = gc::clock(self.truth()).await?;
                    gc::announce(self.truth(), now, String::from("{}")).await?;
                    is_announced = true;
                }
                self.remove_damaged(object).await?;
                End::Removed
            };
            ends.push(Damaged { name: object.name.clone(), end });
        }
        Ok(ends)
    }

    /// Writes a remote object again where there is a good local copy.
    async fn mend(&self, object: &Object) -> Result<bool, StoreError> {
        let Some(remote) = self.remote() else { return Ok(false) };
        let Some(meta) = self.local.head(&object.name).await? else { return Ok(false) };
        let copy = Object { size: meta.size, ..object.clone() };
        if !matches!(check(&self.local, &copy).await?, State::Good | State::Record { .. }) {
            return Ok(false);
        }
        match self.local.path_of(&object.name) {
            Some(path) => remote.tier.upload(&object.name, &path, None).await,
            None => {
                let bytes = self.local.read(&object.name).await?.unwrap_or_default();
                remote.tier.overwrite(&object.name, bytes).await.map(|()| true)
            }
        }
    }

    /// Removes what is damaged. A generation goes with those below it, which it replaced: none of them must count again.
    async fn remove_damaged(&self, object: &Object) -> Result<(), StoreError> {
        let mut names = vec![object.name.clone()];
        if let What::Record(key, last) = object.what {
            let listed = self.truth().list(&format!("{LAYOUT}/records/{key}")).await?;
            let mut generations: Vec<u32> = listed.iter().filter_map(|meta| meta.name.parse().ok()).collect();
            generations.sort_unstable();
            generations.retain(|generation| *generation <= last);
            names = generations.into_iter().map(|generation| record_name(&key, generation)).collect();
        }
        for name in names {
            self.local.delete(&name).await?;
            self.truth().delete(&name).await?;
            if let Some(remote) = self.remote() {
                remote.forget(&name);
            }
        }
        Ok(())
    }
}

fn enter(newest: &mut Newest, key: Digest, generation: u32, record: Option<(String, Named)>) {
    let highest = newest.entry(key).or_default();
    if generation > highest.0 {
        *highest = (generation, record);
    }
}

fn incomplete(newest: &Newest, there: &HashSet<Digest>) -> Vec<Incomplete> {
    let good = newest.iter().filter_map(|(key, (_, record))| Some((key, record.as_ref()?)));
    let mut incomplete: Vec<Incomplete> = good
        .map(|(key, (kind, named))| {
            let missing = named.blobs.iter().filter(|blob| !there.contains(blob)).count();
            Incomplete { key: *key, kind: kind.clone(), missing }
        })
        .filter(|record| record.missing > 0)
        .collect();
    incomplete.sort_unstable_by_key(|record| record.key);
    incomplete
}

/// Compares an object with its name. What is wrong once could be the wire; twice, it is damaged.
async fn check(tier: &Tier, object: &Object) -> Result<State, StoreError> {
    for _ in 0..2 {
        let wanted = match &object.what {
            What::Record(key, _) => match read_record(tier, object, key).await? {
                State::Bad => continue,
                state => return Ok(state),
            },
            What::Blob(digest) => digest,
            What::Rows(_, segment) => &segment.digest,
            What::Checkpoint(_, checkpoint) => &checkpoint.digest,
            _ => return Ok(State::Good),
        };
        match digest_of(tier, &object.name, object.size).await {
            Ok(Some(found)) if found == *wanted => return Ok(State::Good),
            Ok(Some(_)) => {}
            Ok(None) => return Ok(State::Gone),
            // A bad block of a disk must not end the audit of the others; a server that is away does.
            Err(error) if tier.folder().is_some() => return Ok(State::Unreadable(error.message)),
            Err(error) => return Err(error),
        }
    }
    Ok(State::Bad)
}

/// A record's key must be the digest of the pre-image as it is written, whatever this version makes of it.
async fn read_record(tier: &Tier, object: &Object, key: &Digest) -> Result<State, StoreError> {
    let Some(bytes) = tier.read(&object.name).await? else { return Ok(State::Gone) };
    let Some(record) = gc::parse::<Record>(tier, &object.name, &bytes)? else { return Ok(State::Bad) };
    let value: serde_json::Value = serde_json::from_slice(&bytes).expect("it was parsed before");
    let digest = Preimage::key_of(&canonical::to_bytes(&value["preimage"]));
    if record.key != *key || digest != *key || !Record::is_whole(&bytes) {
        return Ok(State::Bad);
    }
    let named = Named::of(tier, &record).await?;
    Ok(State::Record { kind: record.kind, named })
}

/// The digest of an object's bytes, of which no more than a few pieces are in memory; `None` where it is gone.
async fn digest_of(tier: &Tier, name: &str, size: u64) -> Result<Option<Digest>, StoreError> {
    if let Some(path) = tier.path_of(name) {
        let read = tokio::task::spawn_blocking(move || Digest::of_file(&path)).await;
        return match read.expect("digesting does not panic") {
            Ok(digest) => Ok(Some(digest)),
            Err(error) if super::files::is_absent(&error) => Ok(None),
            Err(error) => Err(tier.error("read", name, error)),
        };
    }
    if size <= PIECE {
        return Ok(tier.read(name).await?.map(|bytes| Digest::of_bytes(&bytes)));
    }
    let offsets = (0..size.div_ceil(PIECE)).map(|piece| piece * PIECE);
    let mut pieces =
        stream::iter(offsets.map(|offset| tier.read_range(name, offset, PIECE.min(size - offset)))).buffered(PIECES);
    let mut hasher = blake3::Hasher::new();
    while let Some(piece) = pieces.next().await {
        match piece {
            Ok(bytes) => hasher.update(&bytes),
            // It may have been collected meanwhile.
            Err(_) if tier.head(name).await?.is_none() => return Ok(None),
            Err(error) => return Err(error),
        };
    }
    Ok(Some(Digest::finish(&hasher)))
}
