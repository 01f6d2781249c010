//! Garbage collection of the tier that counts.
//!
//! Roots are tags, pins, leases, and the runs that a policy keeps. Whatever stays keeps what it names, so no sweep leaves a
//! record without its blobs. Of the rest only what is older than the grace period is garbage, and it goes in two steps: one
//! gc condemns it, and a later one marks again and deletes what was condemned and is still unreachable and unchanged. All
//! ages are by the server's clock. Names that are not of the layout are never touched.
//!
//! A sweep can be killed anywhere and repeated: runs go first, so that none names what is gone, then records, so that
//! nobody finds one whose blobs are gone, and then the blobs, each folder listed once more right before.

mod collector;
mod mark;
mod object;
mod roots;

use std::collections::HashMap;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::tier::Tier;
use super::{DELETED, LAYOUT, StoreError};
use collector::Collector;
pub use mark::Garbage;
pub(super) use mark::Named;
pub(super) use object::list;
pub use object::{Class, Object, Sum, What};

/// How the names of lists of what is condemned start, below `v1/gc`.
const CONDEMNED: &str = "condemned-";
/// How the names of objects that ask a server for the time start, below `v1/gc`.
const CLOCK: &str = "clock-";
/// Minimum duration of a lease in seconds; it lasts longer while its holder lives.
const LEASE: f64 = 86_400.0;
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
