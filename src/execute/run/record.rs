//! What a run leaves behind: its manifest in the store, and its work folder on this machine.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use super::active::Keys;
use super::job_end::Upload;
use crate::digest::Digest;
use crate::execute::engine::Engine;
use crate::execute::stage_id::StageId;
use crate::execute::work;
use crate::spec::Pipeline;
use crate::store::{RowCounts, RunManifest, RunState, StageEntry, StageState, Store, StoreError};

/// A run's manifest, as it grows, and its hold on its work folder.
pub struct RunRecord {
    pipeline: Arc<Pipeline>,
    /// What the store gets, with its stages as they were when it was last asked for.
    manifest: RunManifest,
    /// What is noted of each stage of the pipeline.
    entries: Vec<Option<StageEntry>>,
    /// Where each stage comes in the order of the pipeline.
    places: Vec<u32>,
    is_recorded: bool,
    alive: Option<work::Alive>,
    /// Folders of failed attempts, which stay until the next run.
    kept: BTreeSet<String>,
    /// What was reported as not uploaded: once a run is enough.
    pub reported: BTreeSet<Upload>,
}

impl RunRecord {
    /// Of a run that begins now.
    pub fn new(engine: &Engine, run: String) -> Self {
        let now = crate::now();
        let manifest = RunManifest {
            schema: 1,
            run,
            pipeline: engine.pipeline.name.clone(),
            started_at: now,
            heartbeat_at: now,
            ended_at: None,
            outcome: RunState::Running,
            params: engine.pipeline.params.clone(),
            stages: BTreeMap::new(),
        };
        Self {
            pipeline: engine.pipeline.clone(),
            manifest,
            entries: vec![None; engine.pipeline.stages.len()],
            places: places(&engine.order),
            is_recorded: false,
            alive: None,
            kept: BTreeSet::new(),
            reported: BTreeSet::new(),
        }
    }

    /// What is noted of stages, by name.
    pub fn entries(&self) -> impl Iterator<Item = (&String, &StageEntry)> {
        let stages = self.pipeline.stages.iter().zip(&self.entries);
        stages.filter_map(|(stage, entry)| Some((&stage.name, entry.as_ref()?)))
    }

    /// The key of a stage, where that is known.
    pub fn key(&self, id: StageId) -> Option<Digest> {
        self.entries[id.0].as_ref()?.key
    }

    /// Notes how a stage stands, over what was noted of it.
    pub fn set_outcome(&mut self, id: StageId, keys: Option<Keys>, outcome: StageState, message: Option<String>) {
        let (key, base) = (keys.map(|(key, _)| key), keys.and_then(|(_, base)| base));
        let place = Some(self.places[id.0]);
        self.entries[id.0] = Some(StageEntry { key, base, outcome, message, place, ..StageEntry::default() });
    }

    /// Notes how a stage whose outcome was just noted came by its rows.
    pub fn set_rows(&mut self, id: StageId, rows: Option<RowCounts>) {
        if let Some(entry) = &mut self.entries[id.0] {
            entry.rows = rows;
        }
    }

    /// Notes how long a stage whose outcome was just noted took, and how it came by its rows.
    pub fn set_work(&mut self, id: StageId, duration_s: f64, rows: Option<RowCounts>) {
        if let Some(entry) = &mut self.entries[id.0] {
            (entry.duration_s, entry.rows) = (Some((duration_s * 1e3).round() / 1e3), rows);
        }
    }

    /// Keeps the folder of a failed attempt when the run ends.
    pub fn keep_folder(&mut self, folder: &Path) {
        self.kept.extend(folder.file_name().map(|name| name.to_string_lossy().into_owned()));
    }

    /// Whether the store has the manifest.
    pub fn is_recorded(&self) -> bool {
        self.is_recorded
    }

    /// Marks the work folder as alive.
    pub fn claim_folder(&mut self, work: &Path) {
        self.alive = work::claim(work, &self.manifest.run);
    }

    /// The manifest as of now, of a run that goes on.
    pub fn heartbeat(&mut self) -> &RunManifest {
        self.manifest.heartbeat_at = crate::now();
        self.manifest.stages = self.entries().map(|(name, entry)| (name.clone(), entry.clone())).collect();
        self.is_recorded = true;
        &self.manifest
    }

    /// The manifest as it was last asked for.
    pub fn into_manifest(self) -> RunManifest {
        self.manifest
    }

    /// Writes the manifest.
    pub async fn write(&mut self, store: &Store, outcome: RunState) -> Result<(), StoreError> {
        self.manifest.outcome = outcome;
        store.put_run(self.heartbeat()).await
    }

    /// Notes of each selected stage that was not over how it stands, and the time.
    pub fn close(&mut self, selected: &[bool]) {
        for id in (0..selected.len()).filter(|index| selected[*index]).map(StageId) {
            match &mut self.entries[id.0] {
                None => self.set_outcome(id, None, StageState::Waiting, None),
                // It was ended before it could report anything.
                Some(entry) if entry.outcome == StageState::Running => entry.outcome = StageState::Cancelled,
                Some(_) => {}
            }
        }
        self.manifest.ended_at = Some(crate::now());
    }

    /// Removes the work folder, but for the folders of failed attempts.
    pub fn release_folder(&mut self, work: &Path) {
        if let Some(alive) = self.alive.take() {
            work::release(alive, work, &self.manifest.run, &self.kept);
        }
    }
}

/// The place of each stage in an order.
fn places(order: &[usize]) -> Vec<u32> {
    let mut places = vec![0; order.len()];
    (0u32..).zip(order).for_each(|(place, index)| places[*index] = place);
    places
}
