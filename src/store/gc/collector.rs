//! One gc at work on a tier: it lists, marks, and deletes.

use std::collections::{BTreeMap, HashMap, HashSet};

use futures::stream::{self, StreamExt, TryStreamExt};

use super::mark::{Garbage, Named, World};
use super::object::{Class, Object, Sum, What, list};
use super::roots::Roots;
use super::{LEASE, Policy, SCHEMA, announce};
use crate::digest::Digest;
use crate::store::lease::Holder;
use crate::store::tier::Tier;
use crate::store::{CONCURRENT, DELETED, LAYOUT, StoreError};

/// So many reports of deletions stay.
const REPORTS: usize = 3;
/// Folders of blobs that are emptied at the same time.
const FOLDERS: usize = 16;

/// A gc at work on a tier.
pub(super) struct Collector<'t> {
    tier: &'t Tier,
    pub world: World,
    /// By the name of a record that stays.
    named: HashMap<String, Named>,
    deleted: BTreeMap<Class, Sum>,
}

impl<'t> Collector<'t> {
    /// Lists everything, and then reads the roots: what is named while the listing goes on is young.
    pub async fn survey(
        tier: &'t Tier,
        policy: &Policy,
        now: f64,
        condemned: Option<HashMap<String, i64>>,
    ) -> Result<Self, StoreError> {
        const FOLDERS: [&str; 12] = [
            "blobs",
            "rows",
            "records",
            "checkpoints",
            "logs",
            "hints",
            "replaced",
            "leases",
            "work",
            "work-failed",
            "workers",
            "gc",
        ];
        let mut objects = list(tier, &FOLDERS).await?;
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
    pub async fn mark_with_young(mut self) -> Result<Garbage, StoreError> {
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
    pub async fn delete(mut self) -> Result<Garbage, StoreError> {
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
            use What::{Clock, Lease, Log, Replaced, Work, Worker};
            matches!(what, Log(_) | Replaced(..) | Lease(_) | Work(_) | Worker | Clock)
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
        if let Some(folder) = tier.path_of(&object.name).as_deref().and_then(std::path::Path::parent) {
            let _ = std::fs::remove_dir(folder);
        }
    }
    Ok(())
}
