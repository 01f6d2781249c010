//! Garbage collection of the tier that counts.
//!
//! Roots are tags, pins, leases, and the runs that a policy keeps. Whatever stays keeps what it names, so no sweep leaves a
//! record without its blobs. Of the rest only what is older than the grace period is garbage, and it goes in two steps: one
//! gc condemns it, and a later one marks again and deletes what was condemned and is still unreachable and unchanged. All
//! ages are by the server's clock. Names that are not of the layout are never touched.
//!
//! A sweep can be killed anywhere and repeated: runs go first, so that none names what is gone, then records, so that
//! nobody finds one whose blobs are gone, and then the blobs, each folder listed once more right before.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::lease::Holder;
use super::tier::{Meta, Tier};
use super::{
    CONCURRENT, Checkpoint, CheckpointName, DELETED, Doubt, LAYOUT, Record, RunManifest, SegmentName, StoreError,
    blob_name, record_name, segment_name,
};
use crate::artifact::{Artifact, tree};
use crate::digest::Digest;

/// How the names of lists of what is condemned start, below `v1/gc`.
const CONDEMNED: &str = "condemned-";
/// How the names of objects that ask a server for the time start, below `v1/gc`.
const CLOCK: &str = "clock-";
/// A run whose manifest was renewed within so many seconds goes on.
const LIVE: f64 = 600.0;
/// Leases last so many seconds at least, and longer while their holder lives.
const LEASE: f64 = 86_400.0;
/// So many reports of deletions stay.
const REPORTS: usize = 3;
/// Folders of blobs that are emptied at the same time.
const FOLDERS: usize = 16;
/// The only schema of records and manifests that is known here.
const SCHEMA: u64 = 1;

/// What stays, besides what is tagged, pinned or going on.
#[derive(Clone, Debug)]
pub struct Policy {
    /// So many of the newest runs of each pipeline, and the last one that ended well.
    pub keep_last: usize,
    /// All runs that are younger.
    pub older_than: Option<Duration>,
    /// Objects that are younger are never garbage.
    pub grace: Duration,
    /// Nobody else uses the store: garbage goes at once, whatever its age.
    pub now_alone: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self { keep_last: 10, older_than: None, grace: super::grace(), now_alone: false }
    }
}

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
    /// Hints, leases, announcements.
    Other,
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
            Self::Run(run) | Self::Log(run) => is_run_id(run),
            Self::Hint(_) | Self::Lease(_) | Self::Clock => true,
        }
    }

    /// What it is counted as.
    pub(super) fn class(&self) -> Class {
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
    fn of(name: String, meta: &Meta) -> Option<Self> {
        Some(Self { what: What::of(&name)?, name, size: meta.size, modified: meta.modified })
    }

    /// What tells this object from one that was written later under its name.
    fn changed(&self) -> i64 {
        (self.modified * 1e3).round() as i64
    }
}

/// The objects of some folders of the layout. The blobs' folder, which is by far the largest, is listed in 256 parts.
pub(super) async fn list(tier: &Tier, folders: &[&str]) -> Result<Vec<Object>, StoreError> {
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

/// What time it is for the server: that of an object which was written just now.
pub async fn clock(tier: &Tier) -> Result<f64, StoreError> {
    let name = format!("{LAYOUT}/gc/{CLOCK}{}", crate::nonce());
    tier.overwrite(&name, &b"{}"[..]).await?;
    let seen = tier.head(&name).await;
    tier.delete(&name).await?;
    let gone = || tier.error("look at", &name, "it was written and is not there");
    seen?.map(|meta| meta.modified).ok_or_else(gone)
}

/// Tells everybody that objects are deleted: they drop what they know of the store. They look at the last of these names,
/// so each comes after those that are there, whatever the clock says; its time is the server's.
pub(super) async fn announce(tier: &Tier, now: f64, body: String) -> Result<String, StoreError> {
    let listed = tier.list(&format!("{LAYOUT}/gc")).await?;
    let last = listed.into_iter().map(|meta| meta.name).rfind(|name| name.starts_with(DELETED));
    let name = format!("{DELETED}{}", crate::id_at(now));
    let name = last.filter(|last| *last >= name).map_or(name, |last| format!("{last}z"));
    tier.overwrite(&format!("{LAYOUT}/gc/{name}"), body).await?;
    Ok(name)
}

/// Reads JSON; `None` where it is damaged. What a newer version wrote may name things that this one would not keep.
pub(super) fn parse<T: DeserializeOwned>(tier: &Tier, name: &str, bytes: &[u8]) -> Result<Option<T>, StoreError> {
    #[derive(Deserialize)]
    struct Head {
        schema: u64,
    }
    if serde_json::from_slice::<Head>(bytes).is_ok_and(|head| head.schema > SCHEMA) {
        let error = tier.error("read", name, "a newer version of cuda-agent wrote it");
        return Err(StoreError { hint: Some("use that version here; this one has changed nothing".into()), ..error });
    }
    Ok(serde_json::from_slice(bytes).ok())
}

/// A run, as far as it matters here.
#[derive(Clone, Debug)]
struct Run {
    id: String,
    modified: f64,
    /// `None` where its manifest is damaged.
    manifest: Option<Summary>,
}

#[derive(Clone, Debug)]
struct Summary {
    pipeline: String,
    ended: bool,
    done: bool,
    keys: Vec<Digest>,
    bases: Vec<Digest>,
}

impl From<RunManifest> for Summary {
    fn from(run: RunManifest) -> Self {
        Self {
            ended: run.ended_at.is_some(),
            done: run.outcome == "done",
            keys: run.stages.values().filter_map(|entry| entry.key).collect(),
            bases: run.stages.values().filter_map(|entry| entry.base).collect(),
            pipeline: run.pipeline,
        }
    }
}

impl Run {
    fn is_live(&self, now: f64) -> bool {
        now - self.modified < LIVE && self.manifest.as_ref().is_some_and(|run| !run.ended)
    }
}

/// Runs that stay for their own sake: the newest of each pipeline and the last that ended well, young ones where the policy
/// says so, and those that go on. Newer is what was written later by the server's clock.
fn retained<'r>(runs: &'r [Run], policy: &Policy, now: f64) -> HashSet<&'r str> {
    let readable = runs.iter().filter_map(|run| Some((run, run.manifest.as_ref()?)));
    let mut by_pipeline: BTreeMap<&str, Vec<(&Run, &Summary)>> = BTreeMap::new();
    readable
        .clone()
        .for_each(|(run, manifest)| by_pipeline.entry(&manifest.pipeline).or_default().push((run, manifest)));
    let mut retained = HashSet::new();
    for runs in by_pipeline.values_mut() {
        runs.sort_by(|(a, _), (b, _)| b.modified.total_cmp(&a.modified).then_with(|| b.id.cmp(&a.id)));
        retained.extend(runs.iter().take(policy.keep_last).map(|(run, _)| run.id.as_str()));
        retained.extend(runs.iter().find(|(_, manifest)| manifest.done).map(|(run, _)| run.id.as_str()));
    }
    // An age of nothing keeps nothing, not even what was written just now by a clock of whole seconds.
    let least = policy.older_than.filter(|age| !age.is_zero());
    let is_young = |run: &Run| least.is_some_and(|age| now - run.modified <= age.as_secs_f64());
    retained.extend(readable.filter(|(run, _)| is_young(run) || run.is_live(now)).map(|(run, _)| run.id.as_str()));
    retained
}

/// Where marking begins.
#[derive(Clone, Debug, Default)]
struct Roots {
    runs: Vec<Run>,
    tagged: Vec<Digest>,
    pinned: BTreeSet<String>,
}

impl Roots {
    /// Reads the roots. Manifests of runs that had ended in `before` are not read again.
    async fn read(tier: &Tier, before: &Self) -> Result<Self, StoreError> {
        let known: HashMap<&str, &Run> = before.runs.iter().map(|run| (run.id.as_str(), run)).collect();
        let (runs, tags, pins) = (format!("{LAYOUT}/runs"), format!("{LAYOUT}/tags"), format!("{LAYOUT}/pins"));
        let (listed, tags, pins) = futures::try_join!(tier.list(&runs), tier.list(&tags), tier.list(&pins))?;
        let reading = listed.into_iter().map(|meta| {
            let is_same =
                |run: &&&Run| run.modified == meta.modified && run.manifest.as_ref().is_some_and(|run| run.ended);
            let known = known.get(meta.name.as_str()).filter(is_same);
            async move {
                match known {
                    Some(run) => Ok(Some((*run).clone())),
                    None => read_run(tier, meta).await,
                }
            }
        });
        let runs = stream::iter(reading).buffered(CONCURRENT).try_collect::<Vec<Option<Run>>>().await?;
        let tagged = tags.into_iter().map(|meta| read_tag(tier, meta.name));
        let tagged = stream::iter(tagged).buffered(CONCURRENT).try_collect::<Vec<Option<Digest>>>().await?;
        Ok(Self {
            runs: runs.into_iter().flatten().collect(),
            tagged: tagged.into_iter().flatten().collect(),
            pinned: pins.into_iter().map(|meta| meta.name).collect(),
        })
    }
}

async fn read_run(tier: &Tier, meta: Meta) -> Result<Option<Run>, StoreError> {
    let name = format!("{LAYOUT}/runs/{}", meta.name);
    let Some(bytes) = tier.read(&name).await? else { return Ok(None) };
    let manifest = parse::<RunManifest>(tier, &name, &bytes)?.map(Summary::from);
    Ok(Some(Run { id: meta.name, modified: meta.modified, manifest }))
}

/// A tag that cannot be read stops everything: somebody wanted to keep something, and nobody knows what.
async fn read_tag(tier: &Tier, name: String) -> Result<Option<Digest>, StoreError> {
    let name = format!("{LAYOUT}/tags/{name}");
    let Some(bytes) = tier.read(&name).await? else { return Ok(None) };
    match serde_json::from_slice::<super::Tag>(&bytes) {
        Ok(tag) => Ok(Some(tag.key)),
        Err(error) => Err(StoreError {
            hint: Some("nothing was deleted; tag it again, or remove this object".into()),
            ..tier.error("read", &name, error)
        }),
    }
}

/// What a record names.
#[derive(Clone, Debug, Default)]
pub(super) struct Named {
    /// Blobs, each once.
    pub blobs: Vec<Digest>,
    /// What row results are filed under.
    base: Option<Digest>,
    /// What should have told more, and is damaged.
    unreadable: Vec<String>,
}

impl Named {
    /// Reads a record, and the lists of trees that it does not hold itself; or a checkpoint.
    async fn read(tier: &Tier, object: &Object) -> Result<Self, StoreError> {
        if let What::Checkpoint(base, name) = &object.what {
            // A damaged one is of no use to anybody.
            let found = Checkpoint::read(tier, base, name).await?;
            let blobs = found.map(|found| found.files.into_iter().map(|file| file.blob).collect());
            return Ok(Self { blobs: blobs.unwrap_or_default(), ..Self::default() });
        }
        let mut doubt = Doubt::default();
        loop {
            let Some(bytes) = tier.read(&object.name).await? else { return Ok(Self::default()) };
            let record = parse::<Record>(tier, &object.name, &bytes)?;
            if let Some(record) = record.filter(|_| Record::is_whole(&bytes)) {
                return Self::of(tier, &record).await;
            }
            if doubt.is_damaged(tier, &object.name, Digest::of_bytes(&bytes))? {
                return Ok(Self { unreadable: vec![object.name.clone()], ..Self::default() });
            }
        }
    }

    /// What a record names, with what its trees' lists name.
    pub(super) async fn of(tier: &Tier, record: &Record) -> Result<Self, StoreError> {
        let mut named = Self { base: record.base, ..Self::default() };
        for artifact in record.outputs.values() {
            named.blobs.push(artifact.blob);
            named.blobs.extend(&artifact.parts);
            if artifact.rows.is_none() && artifact.parts.is_empty() {
                named.read_tree(tier, artifact).await?;
            }
        }
        named.blobs.sort_unstable();
        named.blobs.dedup();
        Ok(named)
    }

    async fn read_tree(&mut self, tier: &Tier, artifact: &Artifact) -> Result<(), StoreError> {
        let name = blob_name(&artifact.blob);
        // What is wrong once could be the wire.
        for _ in 0..2 {
            let Some(bytes) = tier.read(&name).await? else { return Ok(()) };
            if Digest::of_bytes(&bytes) == artifact.blob
                && let Ok(entries) = tree::from_blob(&bytes)
            {
                self.blobs.extend(entries.iter().map(|entry| entry.blob));
                return Ok(());
            }
        }
        self.unreadable.push(name);
        Ok(())
    }
}

/// What is garbage, and what is not.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Garbage {
    /// What goes.
    pub going: BTreeMap<Class, Sum>,
    /// What stays.
    pub staying: BTreeMap<Class, Sum>,
    /// Of what stays, what would go if it were older than the grace period.
    pub young: Sum,
    /// Runs that go.
    pub runs: Vec<String>,
    /// Runs that go on.
    pub live: Vec<String>,
    /// What is damaged, and therefore keeps nothing.
    pub unreadable: Vec<String>,
    #[serde(skip)]
    objects: Vec<Object>,
}

impl Garbage {
    /// Whether there is nothing to delete.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// All that goes.
    pub fn total(&self) -> Sum {
        let sums = self.going.values();
        sums.fold(Sum::default(), |a, b| Sum { objects: a.objects + b.objects, bytes: a.bytes + b.bytes })
    }

    /// The names of what goes.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.objects.iter().map(|object| object.name.as_str())
    }
}

/// All that is known of a store: from here on, deciding needs no request.
struct World {
    policy: Policy,
    /// The server's time.
    now: f64,
    objects: Vec<Object>,
    roots: Roots,
    /// The runs that hold old leases, by the lease's name.
    holders: HashMap<String, String>,
    /// Nothing else may go, where there are such lists.
    condemned: Option<HashMap<String, i64>>,
    /// Runs and records that went have gone; the others stay.
    settled: bool,
}

/// What the roots lead to.
struct Reached<'w> {
    runs: HashSet<&'w str>,
    pipelines: HashSet<&'w str>,
    leases: HashSet<&'w str>,
    keys: HashSet<Digest>,
    bases: HashSet<Digest>,
}

impl World {
    fn may_go(&self, object: &Object) -> bool {
        let names_others = matches!(object.what, What::Run(_) | What::Record(..) | What::Checkpoint(..));
        let old = self.policy.now_alone || self.now - object.modified > self.policy.grace.as_secs_f64();
        let condemned = || self.condemned.as_ref().is_none_or(|all| all.get(&object.name) == Some(&object.changed()));
        old && !(self.settled && names_others) && condemned()
    }

    fn reached(&self) -> Reached<'_> {
        let leases = self.staying_leases();
        let mut keys: HashSet<Digest> = self.roots.tagged.iter().copied().collect();
        let mut bases = HashSet::new();
        for object in &self.objects {
            match &object.what {
                // What is leased is being made, and nobody knows whether as a key or as rows.
                What::Lease(Some(on)) if leases.contains(object.name.as_str()) => {
                    keys.insert(*on);
                    bases.insert(*on);
                }
                // Where rows were published not long ago, somebody is at work on others that are older.
                What::Rows(base, _) | What::Checkpoint(base, _) if !self.may_go(object) => {
                    bases.insert(*base);
                }
                _ => {}
            }
        }
        let runs = self.staying_runs();
        let mut pipelines = HashSet::new();
        for run in self.roots.runs.iter().filter(|run| runs.contains(run.id.as_str())) {
            let Some(manifest) = &run.manifest else { continue };
            pipelines.insert(manifest.pipeline.as_str());
            keys.extend(&manifest.keys);
            bases.extend(&manifest.bases);
        }
        Reached { runs, pipelines, leases, keys, bases }
    }

    /// Runs that are kept, that are pinned, or whose manifest cannot go yet, be it because it is damaged.
    fn staying_runs(&self) -> HashSet<&str> {
        let going = self.objects.iter().filter(|object| self.may_go(object));
        let may_go: HashSet<&str> = going
            .filter_map(|object| match &object.what {
                What::Run(id) => Some(id.as_str()),
                _ => None,
            })
            .collect();
        let mut staying = retained(&self.roots.runs, &self.policy, self.now);
        let stays = |run: &Run| {
            let id = run.id.as_str();
            run.manifest.is_none() || self.roots.pinned.contains(id) || !may_go.contains(id)
        };
        staying.extend(self.roots.runs.iter().filter(|run| stays(run)).map(|run| run.id.as_str()));
        staying
    }

    fn staying_leases(&self) -> HashSet<&str> {
        let live: HashSet<&str> =
            self.roots.runs.iter().filter(|run| run.is_live(self.now)).map(|run| run.id.as_str()).collect();
        let stays = |object: &&Object| {
            let is_held = self.holders.get(&object.name).is_some_and(|run| live.contains(run.as_str()));
            let is_young = !self.policy.now_alone && self.now - object.modified < LEASE;
            is_held || is_young || !self.may_go(object)
        };
        let leases = self.objects.iter().filter(|object| matches!(object.what, What::Lease(_)));
        leases.filter(stays).map(|object| object.name.as_str()).collect()
    }

    /// Records that stay: the newest generation of each key that is reached, those that cannot go yet, and all generations
    /// above one that stays, since generations have no holes.
    fn staying_records(&self, reached: &Reached) -> Vec<&Object> {
        let mut by_key: HashMap<Digest, Vec<(u32, &Object)>> = HashMap::new();
        for object in &self.objects {
            if let What::Record(key, generation) = object.what {
                by_key.entry(key).or_default().push((generation, object));
            }
        }
        let mut staying = Vec::new();
        for (key, mut generations) in by_key {
            generations.sort_unstable_by_key(|(generation, _)| *generation);
            let newest = generations.len() - 1;
            let keeps = |index: usize, object| (index == newest && reached.keys.contains(&key)) || !self.may_go(object);
            let first = (0..=newest).find(|index| keeps(*index, generations[*index].1)).unwrap_or(generations.len());
            staying.extend(generations[first..].iter().map(|(_, object)| *object));
        }
        staying
    }

    fn checkpoints(&self) -> impl Iterator<Item = (&Digest, &Object)> {
        self.objects.iter().filter_map(|object| match &object.what {
            What::Checkpoint(base, _) => Some((base, object)),
            _ => None,
        })
    }

    /// What is left when all that stays has been marked.
    fn garbage(&self, reached: &Reached, records: &[&Object], named: &HashMap<String, Named>) -> Garbage {
        let mut bases = reached.bases.clone();
        let (mut blobs, mut keys) = (HashSet::<Digest>::new(), HashSet::new());
        let mut unreadable = Vec::new();
        for object in records {
            if let What::Record(key, _) = object.what {
                keys.insert(key);
            }
            let Some(named) = named.get(&object.name) else { continue };
            blobs.extend(&named.blobs);
            bases.extend(named.base);
            unreadable.extend(named.unreadable.iter().cloned());
        }
        for object in self.checkpoints().filter(|(base, _)| bases.contains(*base)).map(|(_, object)| object) {
            blobs.extend(named.get(&object.name).into_iter().flat_map(|named| &named.blobs));
        }
        let records: HashSet<&str> = records.iter().map(|object| object.name.as_str()).collect();
        let announced = self.newest_announced();
        let is_marked = |object: &Object| match &object.what {
            What::Run(run) | What::Log(run) => reached.runs.contains(run.as_str()),
            What::Record(..) => records.contains(object.name.as_str()),
            What::Blob(blob) => blobs.contains(blob),
            What::Rows(base, _) | What::Checkpoint(base, _) => bases.contains(base),
            What::Hint(pipeline) => reached.pipelines.contains(pipeline.as_str()),
            What::Replaced(key, generation) => keys.contains(key) && announced.get(key) == Some(generation),
            What::Lease(_) => reached.leases.contains(object.name.as_str()),
            What::Clock => false,
        };
        let mut garbage = Garbage::default();
        for object in &self.objects {
            let goes = !is_marked(object) && self.may_go(object);
            let sums = if goes { &mut garbage.going } else { &mut garbage.staying };
            sums.entry(object.what.class()).or_default().add(object.size);
            if goes {
                garbage.objects.push(object.clone());
                if let What::Run(id) = &object.what {
                    garbage.runs.push(id.clone());
                }
            }
        }
        let damaged = self.roots.runs.iter().filter(|run| run.manifest.is_none());
        unreadable.extend(damaged.map(|run| format!("{LAYOUT}/runs/{}", run.id)));
        unreadable.sort_unstable();
        unreadable.dedup();
        garbage.unreadable = unreadable;
        garbage.live = self.live();
        garbage
    }

    fn newest_announced(&self) -> HashMap<Digest, u32> {
        let mut newest: HashMap<Digest, u32> = HashMap::new();
        for object in &self.objects {
            if let What::Replaced(key, generation) = object.what {
                let highest = newest.entry(key).or_default();
                *highest = generation.max(*highest);
            }
        }
        newest
    }

    fn live(&self) -> Vec<String> {
        self.roots.runs.iter().filter(|run| run.is_live(self.now)).map(|run| run.id.clone()).collect()
    }
}

/// A gc at work on a tier.
struct Collector<'t> {
    tier: &'t Tier,
    world: World,
    /// By the name of a record that stays.
    named: HashMap<String, Named>,
    deleted: BTreeMap<Class, Sum>,
}

impl<'t> Collector<'t> {
    /// Lists everything, and then reads the roots: what is named while the listing goes on is young.
    async fn survey(
        tier: &'t Tier,
        policy: &Policy,
        now: f64,
        condemned: Option<HashMap<String, i64>>,
    ) -> Result<Self, StoreError> {
        let mut objects =
            list(tier, &["blobs", "rows", "records", "checkpoints", "logs", "hints", "replaced", "leases", "gc"])
                .await?;
        objects.extend(list(tier, &["runs"]).await?);
        let is_old_lease = |object: &&Object| matches!(object.what, What::Lease(_)) && now - object.modified >= LEASE;
        let reading = objects.iter().filter(is_old_lease).map(|object| async move {
            let bytes = tier.read(&object.name).await?.unwrap_or_default();
            let holder = serde_json::from_slice::<Holder>(&bytes).ok();
            Ok::<_, StoreError>(holder.map(|holder| (object.name.clone(), holder.run)))
        });
        let holders = stream::iter(reading).buffered(CONCURRENT).try_collect::<Vec<_>>().await?;
        let roots = Roots::read(tier, &Roots::default()).await?;
        let world = World {
            policy: policy.clone(),
            now,
            objects,
            roots,
            holders: holders.into_iter().flatten().collect(),
            condemned,
            settled: false,
        };
        Ok(Self { tier, world, named: HashMap::new(), deleted: BTreeMap::new() })
    }

    /// Marks from the roots. What was read before is not read again.
    async fn mark(&mut self) -> Result<Garbage, StoreError> {
        let Self { tier, world, named, .. } = self;
        let reached = world.reached();
        let records = world.staying_records(&reached);
        // There are few checkpoints, and which of them stay shows only when the records have been read.
        let naming = records.iter().copied().chain(world.checkpoints().map(|(_, object)| object));
        let unread = naming.filter(|object| !named.contains_key(&object.name));
        let reading = unread.map(|object| {
            let tier = &**tier;
            async move { Ok::<_, StoreError>((object.name.clone(), Named::read(tier, object).await?)) }
        });
        let read = stream::iter(reading).buffer_unordered(CONCURRENT).try_collect::<Vec<_>>().await?;
        named.extend(read);
        Ok(world.garbage(&reached, &records, named))
    }

    /// The same, with what only its age keeps.
    async fn mark_with_young(mut self) -> Result<Garbage, StoreError> {
        let mut garbage = self.mark().await?;
        if !self.world.policy.now_alone {
            self.world.policy.now_alone = true;
            let (all, now) = (self.mark().await?.total(), garbage.total());
            garbage.young =
                Sum { objects: all.objects.saturating_sub(now.objects), bytes: all.bytes.saturating_sub(now.bytes) };
        }
        Ok(garbage)
    }

    /// Looks at the roots once more: a run may have begun to use what was garbage a moment ago.
    async fn look_again(&mut self) -> Result<Garbage, StoreError> {
        self.world.roots = Roots::read(self.tier, &self.world.roots).await?;
        self.mark().await
    }

    /// Deletes what is garbage; says what went.
    async fn delete(mut self) -> Result<Garbage, StoreError> {
        let mut garbage = self.mark().await?;
        if garbage.is_empty() {
            return Ok(garbage);
        }
        // Before anything goes, so that a sweep that is killed is noticed too; and once more at its end, for those who have
        // looked meanwhile.
        let begun = announce(self.tier, self.world.now, report(&BTreeMap::new(), false)).await?;
        garbage = self.look_again().await?;
        let (runs, records) = (garbage.runs.clone(), rounds(&garbage));
        self.remove(of_class(&garbage, |what| matches!(what, What::Run(_) | What::Hint(_)))).await?;
        for round in records {
            self.remove(round).await?;
        }
        self.remove(of_class(&garbage, |what| matches!(what, What::Checkpoint(..)))).await?;
        // A record that came meanwhile keeps its blobs.
        self.world.settled = true;
        self.find_new_records().await?;
        garbage = self.look_again().await?;
        self.remove_files(of_class(&garbage, |what| matches!(what, What::Blob(_) | What::Rows(..)))).await?;
        self.remove(of_class(&garbage, |what| {
            matches!(what, What::Log(_) | What::Replaced(..) | What::Lease(_) | What::Clock)
        }))
        .await?;
        announce(self.tier, self.world.now, report(&self.deleted, true)).await?;
        self.forget_reports(&begun).await?;
        Ok(Garbage { going: self.deleted, runs, objects: Vec::new(), ..garbage })
    }

    async fn find_new_records(&mut self) -> Result<(), StoreError> {
        let known: HashSet<&str> = self.world.objects.iter().map(|object| object.name.as_str()).collect();
        let mut listed = list(self.tier, &["records", "checkpoints"]).await?;
        listed.retain(|object| !known.contains(object.name.as_str()));
        self.world.objects.extend(listed);
        Ok(())
    }

    /// Deletes blobs or segments folder by folder, each listed right before: what was written again stays.
    async fn remove_files(&mut self, objects: Vec<Object>) -> Result<(), StoreError> {
        let mut folders: BTreeMap<String, Vec<Object>> = BTreeMap::new();
        for object in objects {
            let (folder, _) = object.name.rsplit_once('/').expect("objects lie in folders");
            folders.entry(folder.to_owned()).or_default().push(object);
        }
        let tier = self.tier;
        let looks = folders.into_iter().map(|(folder, mut objects)| async move {
            let there = tier.list(&folder).await?;
            let there: HashMap<&str, f64> = there.iter().map(|meta| (meta.name.as_str(), meta.modified)).collect();
            objects.retain(|object| there.get(&object.name[folder.len() + 1..]) == Some(&object.modified));
            remove(tier, &objects).await?;
            Ok::<_, StoreError>(objects)
        });
        let mut looks = stream::iter(looks).buffer_unordered(FOLDERS);
        while let Some(removed) = looks.try_next().await? {
            self.count(&removed);
        }
        Ok(())
    }

    async fn remove(&mut self, objects: Vec<Object>) -> Result<(), StoreError> {
        remove(self.tier, &objects).await?;
        let names: HashSet<&str> = objects.iter().map(|object| object.name.as_str()).collect();
        self.world.objects.retain(|object| !names.contains(object.name.as_str()));
        self.count(&objects);
        Ok(())
    }

    fn count(&mut self, objects: &[Object]) {
        for object in objects {
            self.deleted.entry(object.what.class()).or_default().add(object.size);
        }
    }

    async fn forget_reports(&self, begun: &str) -> Result<(), StoreError> {
        let listed = self.tier.list(&format!("{LAYOUT}/gc")).await?;
        let reports: Vec<String> = listed
            .into_iter()
            .map(|meta| meta.name)
            .filter(|name| name.starts_with(DELETED) && name != begun)
            .collect();
        let old = &reports[..reports.len().saturating_sub(REPORTS)];
        let names = old.iter().map(String::as_str).chain([begun]);
        self.tier.delete_all(names.map(|name| format!("{LAYOUT}/gc/{name}")).collect()).await?;
        Ok(())
    }
}

fn report(deleted: &BTreeMap<Class, Sum>, done: bool) -> String {
    serde_json::json!({ "schema": SCHEMA, "done": done, "deleted": deleted }).to_string()
}

fn of_class(garbage: &Garbage, is_wanted: impl Fn(&What) -> bool) -> Vec<Object> {
    garbage.objects.iter().filter(|object| is_wanted(&object.what)).cloned().collect()
}

/// Records in rounds: of each key the lowest generation first, since generations have no holes.
fn rounds(garbage: &Garbage) -> Vec<Vec<Object>> {
    let mut records: Vec<(Digest, u32, &Object)> = garbage
        .objects
        .iter()
        .filter_map(|object| match object.what {
            What::Record(key, generation) => Some((key, generation, object)),
            _ => None,
        })
        .collect();
    records.sort_unstable_by_key(|(key, generation, _)| (*key, *generation));
    let mut rounds: Vec<Vec<Object>> = Vec::new();
    let mut last = (None, 0);
    for (key, _, object) in records {
        last = (Some(key), if last.0 == Some(key) { last.1 + 1 } else { 0 });
        if rounds.len() <= last.1 {
            rounds.push(Vec::new());
        }
        rounds[last.1].push(object.clone());
    }
    rounds
}

async fn remove(tier: &Tier, objects: &[Object]) -> Result<(), StoreError> {
    tier.delete_all(objects.iter().map(|object| object.name.clone()).collect()).await?;
    // In a folder, the folder of one key or run is of no use any more. Those of blobs are few.
    for object in objects.iter().filter(|object| !matches!(object.what, What::Blob(_) | What::Run(_))) {
        if let Some(folder) = tier.local(&object.name).as_deref().and_then(std::path::Path::parent) {
            let _ = std::fs::remove_dir(folder);
        }
    }
    Ok(())
}

/// A list of what is condemned.
#[derive(Debug, Serialize, Deserialize)]
struct Condemned {
    schema: u64,
    /// Names with the times of their last change, in milliseconds since 1970.
    objects: Vec<(String, i64)>,
}

/// The lists that there are, by age.
#[derive(Debug, Default)]
struct Lists {
    /// Older than the grace period.
    ripe: Vec<String>,
    /// The others.
    waiting: Vec<String>,
    /// Seconds until the first of them can be used.
    wait: Option<Duration>,
}

impl Lists {
    async fn find(tier: &Tier, grace: Duration, now: f64) -> Result<Self, StoreError> {
        let mut lists = Self::default();
        let listed = tier.list(&format!("{LAYOUT}/gc")).await?;
        for meta in listed.into_iter().filter(|meta| meta.name.starts_with(CONDEMNED)) {
            let wait = grace.as_secs_f64() - (now - meta.modified);
            let name = format!("{LAYOUT}/gc/{}", meta.name);
            if wait < 0.0 {
                lists.ripe.push(name);
            } else {
                lists.waiting.push(name);
                // One that is dated in the future, by whatever clock, is as if it were of now.
                let wait = Duration::try_from_secs_f64(wait).map_or(grace, |wait| wait.min(grace));
                lists.wait = Some(lists.wait.map_or(wait, |least| least.min(wait)));
            }
        }
        Ok(lists)
    }

    async fn read_ripe(&self, tier: &Tier) -> Result<HashMap<String, i64>, StoreError> {
        let mut all = HashMap::new();
        for name in &self.ripe {
            let bytes = tier.read(name).await?.unwrap_or_default();
            // A damaged list condemns nothing.
            let list = parse::<Condemned>(tier, name, &bytes)?;
            all.extend(list.into_iter().flat_map(|list| list.objects));
        }
        Ok(all)
    }
}

/// What gc would do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What would go.
    pub garbage: Garbage,
    /// Until when to wait before what an earlier gc condemned can be deleted; absent where nothing is condemned.
    pub wait: Option<Duration>,
}

/// Finds garbage, and deletes nothing.
pub async fn plan(tier: &Tier, policy: &Policy) -> Result<Plan, StoreError> {
    // Who may only read gets an answer by their own clock: nothing is deleted by it.
    let now = clock(tier).await.unwrap_or_else(|_| crate::now());
    let lists = Lists::find(tier, policy.grace, now).await?;
    let garbage = Collector::survey(tier, policy, now, None).await?.mark_with_young().await?;
    Ok(Plan { garbage, wait: if lists.ripe.is_empty() { lists.wait } else { Some(Duration::ZERO) } })
}

/// What a sweep came to.
#[derive(Clone, Debug)]
pub enum Swept {
    /// Nothing is garbage.
    Nothing(Garbage),
    /// It is noted, and goes when gc is run again after the grace period.
    Condemned(Garbage),
    /// An earlier gc noted what goes, and so long is to be waited yet.
    Waiting(Duration),
    /// It is gone.
    Deleted(Garbage),
    /// These runs go on, so nobody is alone.
    Refused(Vec<String>),
}

/// Deletes what an earlier sweep condemned and is still garbage, or else condemns what is garbage now.
pub async fn sweep(tier: &Tier, policy: &Policy) -> Result<Swept, StoreError> {
    let now = clock(tier).await?;
    let mut lists = Lists::find(tier, policy.grace, now).await?;
    if policy.now_alone {
        let collector = Collector::survey(tier, policy, now, None).await?;
        let live = collector.world.live();
        if !live.is_empty() {
            return Ok(Swept::Refused(live));
        }
        let deleted = collector.delete().await?;
        lists.ripe.append(&mut lists.waiting);
        tier.delete_all(lists.ripe).await?;
        return Ok(Swept::Deleted(deleted));
    }
    if !lists.ripe.is_empty() {
        let condemned = lists.read_ripe(tier).await?;
        let deleted = Collector::survey(tier, policy, now, Some(condemned)).await?.delete().await?;
        tier.delete_all(lists.ripe).await?;
        return Ok(Swept::Deleted(deleted));
    }
    if let Some(wait) = lists.wait {
        return Ok(Swept::Waiting(wait));
    }
    let garbage = Collector::survey(tier, policy, now, None).await?.mark_with_young().await?;
    if garbage.is_empty() {
        return Ok(Swept::Nothing(garbage));
    }
    let list =
        Condemned { schema: SCHEMA, objects: garbage.objects.iter().map(|o| (o.name.clone(), o.changed())).collect() };
    let bytes = serde_json::to_vec(&list).expect("lists are plain data");
    tier.overwrite(&format!("{LAYOUT}/gc/{CONDEMNED}{}", crate::id_at(now)), bytes).await?;
    Ok(Swept::Condemned(garbage))
}

fn pin_name(run: &str) -> String {
    format!("{LAYOUT}/pins/{run}")
}

/// Pins a run: whatever it used or made stays.
pub async fn pin(tier: &Tier, run: &str) -> Result<(), StoreError> {
    tier.overwrite(&pin_name(run), &b"{}"[..]).await
}

/// Takes a pin away.
pub async fn unpin(tier: &Tier, run: &str) -> Result<(), StoreError> {
    tier.delete(&pin_name(run)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "ab00000000000000000000000000000000000000000000000000000000000000";

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
            "v1/gc/deleted-x".into(),
            "v1/gc/condemned-x".into(),
        ] {
            assert_eq!(What::of(&name), None, "{name}");
        }
    }

    #[tokio::test]
    async fn announcements_come_in_order_whatever_the_clock_says() {
        let tier = Tier::memory();
        let mut names = Vec::new();
        for now in [1e9, 1e9, 2e9, 5e8] {
            names.push(announce(&tier, now, String::new()).await.unwrap());
        }
        assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
    }
}
