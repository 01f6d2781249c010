//! What the roots lead to, and what is left. Deciding needs no request, but for reading what records name.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Serialize;

use super::object::{Class, Object, Sum, What};
use super::roots::{Roots, Run, retained};
use super::{LEASE, Policy, parse};
use crate::artifact::{Artifact, tree};
use crate::digest::Digest;
use crate::store::tier::Tier;
use crate::store::{Checkpoint, Doubt, LAYOUT, Record, StoreError, blob_name};

/// What a record names.
#[derive(Clone, Debug, Default)]
pub(in crate::store) struct Named {
    /// Blobs, each once.
    pub blobs: Vec<Digest>,
    /// What row results are filed under.
    base: Option<Digest>,
    /// What should have told more, and is damaged.
    unreadable: Vec<String>,
}

impl Named {
    /// Reads a record, and the lists of trees that it does not hold itself; or a checkpoint.
    pub(super) async fn read(tier: &Tier, object: &Object) -> Result<Self, StoreError> {
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
            if doubt.is_damaged(tier.url(), &object.name, Digest::of_bytes(&bytes))? {
                return Ok(Self { unreadable: vec![object.name.clone()], ..Self::default() });
            }
        }
    }

    /// What a record names, with what its trees' lists name.
    pub(in crate::store) async fn of(tier: &Tier, record: &Record) -> Result<Self, StoreError> {
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
    pub(super) objects: Vec<Object>,
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
pub(super) struct World {
    pub policy: Policy,
    /// The server's time.
    pub now: f64,
    pub objects: Vec<Object>,
    pub roots: Roots,
    /// The runs that hold old leases, by the lease's name.
    pub holders: HashMap<String, String>,
    /// Nothing else may go, where there are such lists.
    pub condemned: Option<HashMap<String, i64>>,
    /// Runs and records that went have gone; the others stay.
    pub settled: bool,
}

/// What the roots lead to.
pub(super) struct Reached<'w> {
    pub runs: HashSet<&'w str>,
    pub pipelines: HashSet<&'w str>,
    pub leases: HashSet<&'w str>,
    pub keys: HashSet<Digest>,
    pub bases: HashSet<Digest>,
}

impl World {
    fn may_go(&self, object: &Object) -> bool {
        let names_others = matches!(object.what, What::Run(_) | What::Record(..) | What::Checkpoint(..));
        let old = self.policy.now_alone || self.now - object.modified > self.policy.grace.as_secs_f64();
        let condemned = || self.condemned.as_ref().is_none_or(|all| all.get(&object.name) == Some(&object.changed()));
        old && !(self.settled && names_others) && condemned()
    }

    pub fn reached(&self) -> Reached<'_> {
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
    pub fn staying_records(&self, reached: &Reached) -> Vec<&Object> {
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

    pub fn checkpoints(&self) -> impl Iterator<Item = (&Digest, &Object)> {
        self.objects.iter().filter_map(|object| match &object.what {
            What::Checkpoint(base, _) => Some((base, object)),
            _ => None,
        })
    }

    /// What is left when all that stays has been marked.
    pub fn garbage(&self, reached: &Reached, records: &[&Object], named: &HashMap<String, Named>) -> Garbage {
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
        let (announced, live) = (self.newest_announced(), self.live());
        let is_marked = |object: &Object| match &object.what {
            What::Run(run) | What::Log(run) => reached.runs.contains(run.as_str()),
            What::Record(..) => records.contains(object.name.as_str()),
            What::Blob(blob) => blobs.contains(blob),
            What::Rows(base, _) | What::Checkpoint(base, _) => bases.contains(base),
            What::Hint(pipeline) => reached.pipelines.contains(pipeline.as_str()),
            What::Replaced(key, generation) => keys.contains(key) && announced.get(key) == Some(generation),
            What::Lease(_) => reached.leases.contains(object.name.as_str()),
            What::Work(run) => live.contains(run),
            What::Worker | What::Clock => false,
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
        garbage.live = live;
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

    pub fn live(&self) -> Vec<String> {
        self.roots.runs.iter().filter(|run| run.is_live(self.now)).map(|run| run.id.clone()).collect()
    }
}
