//! Stages that have to be executed, from the lookup that said so to their end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cuda_agent_protocol::ResourceGrant;
use tokio::sync::mpsc;

use crate::digest::Digest;
use crate::execute::log::Log;
use crate::execute::stage_id::StageId;
use crate::key::MissReason;
use crate::plan::Resolved;

/// A key, and for by-row stages the base key.
pub type Keys = (Digest, Option<Digest>);

/// A stage that has to be executed.
pub struct Active {
    /// Its key and inputs.
    pub resolved: Resolved,
    /// Why it is executed.
    pub reasons: Vec<MissReason>,
    /// The generation of an unusable record.
    pub generation: u32,
    /// How many attempts were started.
    pub attempt: u32,
    /// When the last of them was, or when the stage was looked up.
    pub started: Instant,
    /// Takes what further programs of the running attempt may use.
    pub widen: Option<mpsc::UnboundedSender<ResourceGrant>>,
    /// What its programs printed.
    pub log: Option<Arc<Mutex<Log>>>,
}

impl Active {
    /// One that no attempt was started at.
    pub fn new(resolved: Resolved, reasons: Vec<MissReason>, generation: u32) -> Self {
        Self { resolved, reasons, generation, attempt: 0, started: Instant::now(), widen: None, log: None }
    }

    /// What its result is filed under.
    pub fn keys(&self) -> Keys {
        (self.resolved.key, self.resolved.base)
    }
}

/// What is being made by which stage, and which stages wait for it because they would make the same.
#[derive(Default)]
pub struct InFlight {
    makers: HashMap<Digest, StageId>,
    keys: HashMap<StageId, Digest>,
    parked: HashMap<StageId, Vec<StageId>>,
}

impl InFlight {
    /// The stage that makes the result of this key.
    pub fn maker(&self, key: &Digest) -> Option<StageId> {
        self.makers.get(key).copied()
    }

    /// A stage begins to make a result.
    pub fn add(&mut self, key: Digest, stage: StageId) {
        self.makers.insert(key, stage);
        self.keys.insert(stage, key);
    }

    /// A stage makes nothing any more.
    pub fn remove(&mut self, stage: StageId) {
        if let Some(key) = self.keys.remove(&stage) {
            self.makers.remove(&key);
        }
    }

    /// A stage waits for what another one makes.
    pub fn park(&mut self, stage: StageId, maker: StageId) {
        self.parked.entry(maker).or_default().push(stage);
    }

    /// Those that waited for a stage.
    pub fn release(&mut self, maker: StageId) -> Vec<StageId> {
        self.parked.remove(&maker).unwrap_or_default()
    }
}
