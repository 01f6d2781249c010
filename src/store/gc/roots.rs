//! Where marking begins: runs, tags and pins.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use futures::stream::{self, StreamExt, TryStreamExt};

use super::{Policy, parse};
use crate::digest::Digest;
use crate::store::tier::{Meta, Tier};
use crate::store::{CONCURRENT, LAYOUT, RunManifest, RunState, StoreError, Tag};

/// Seconds since its last renewal for which a run counts as running.
const LIVE: f64 = 600.0;

/// A run, as far as it matters here.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub id: String,
    pub modified: f64,
    /// `None` where its manifest is damaged.
    pub manifest: Option<Summary>,
}

#[derive(Clone, Debug)]
pub(super) struct Summary {
    pub pipeline: String,
    pub ended: bool,
    pub done: bool,
    pub keys: Vec<Digest>,
    pub bases: Vec<Digest>,
}

impl From<RunManifest> for Summary {
    fn from(run: RunManifest) -> Self {
        Self {
            ended: run.ended_at.is_some(),
            done: run.outcome == RunState::Done,
            keys: run.stages.values().filter_map(|entry| entry.key).collect(),
            bases: run.stages.values().filter_map(|entry| entry.base).collect(),
            pipeline: run.pipeline,
        }
    }
}

impl Run {
    pub fn is_live(&self, now: f64) -> bool {
        now - self.modified < LIVE && self.manifest.as_ref().is_some_and(|run| !run.ended)
    }
}

/// Runs that stay for their own sake: the newest of each pipeline and the last that ended well, young ones where the policy
/// says so, and those that go on. Newer is what was written later by the server's clock.
pub(super) fn retained<'r>(runs: &'r [Run], policy: &Policy, now: f64) -> HashSet<&'r str> {
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
pub(super) struct Roots {
    pub runs: Vec<Run>,
    pub tagged: Vec<Digest>,
    pub pinned: BTreeSet<String>,
}

impl Roots {
    /// Reads the roots. Manifests of runs that had ended in `before` are not read again.
    pub async fn read(tier: &Tier, before: &Self) -> Result<Self, StoreError> {
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
    match serde_json::from_slice::<Tag>(&bytes) {
        Ok(tag) => Ok(Some(tag.key)),
        Err(error) => Err(StoreError {
            hint: Some("nothing was deleted; tag it again, or remove this object".into()),
            ..tier.error("read", &name, error)
        }),
    }
}
