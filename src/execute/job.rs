//! A job: one attempt at one stage, and what all jobs of a run share.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cuda_agent_protocol::ResourceGrant;
use tokio::sync::{mpsc, watch};

use super::checkpoint_state::CheckpointState;
use super::failure::{Explanation, Failure};
use super::folders;
use super::launch::{Launcher, Stop};
use super::log::Log;
use super::report::{Message, Reporter};
use super::sample::Sample;
use super::secrets::StageSecrets;
use super::spare::SpareFolders;
use super::stage_id::StageId;
use crate::Folders;
use crate::catalog::Kind;
use crate::digest::Digest;
use crate::event::RunEvent;
use crate::key::MissReason;
use crate::plan::Resolved;
use crate::spec::{Pipeline, Stage};
use crate::store::Store;
use crate::store::lease::{Claimant, Lease};

/// What every job of a run shares.
pub struct Context {
    /// The run's id.
    pub run: String,
    /// The pipeline, resolved.
    pub pipeline: Arc<Pipeline>,
    /// Where results are looked up, and where they are written.
    pub store: Store,
    /// Work, state and cache folders of this machine.
    pub folders: Folders,
    /// What `python` stands for.
    pub python: PathBuf,
    /// What CUDA calls each GPU of the pool.
    pub gpus: Vec<String>,
    /// Starts programs; a fake in tests.
    pub launcher: Arc<dyn Launcher>,
    /// This run, as it asks for leases.
    pub claimant: Claimant,
    /// How many programs a by-row stage may have side by side where its kind does not say.
    pub programs: u32,
    /// Which rows a refresh does again; all where it does not say.
    pub sample: Option<Sample>,
    /// What by-row stages came to in earlier attempts.
    pub passes: Mutex<HashMap<StageId, Pass>>,
    /// What this run's refreshes file their results under, by base key: a refresh does not begin anew with each attempt, nor
    /// with another stage that has the same rows.
    pub refreshes: Mutex<HashMap<Digest, u32>>,
    /// Attempts' folders that can serve another attempt.
    pub spare: SpareFolders,
}

/// What a by-row stage has come to in a run before it is tried again: it failed, or had to wait for others.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// Rows that it did.
    pub executed: u64,
    /// What its programs measured.
    pub metrics: BTreeMap<String, f64>,
}

/// What the scheduler has granted to an attempt, and the channel by which it grants more.
pub struct Grants {
    /// What its first program may use; a by-row stage takes it and gives each program's back itself.
    pub first: Option<ResourceGrant>,
    /// What further programs may use.
    pub further: mpsc::UnboundedReceiver<ResourceGrant>,
    /// Whether other stages wait for what this one's further programs have.
    pub wanted: watch::Receiver<bool>,
}

/// One attempt at one stage.
pub struct Job {
    /// What it shares with the other jobs of the run.
    pub context: Arc<Context>,
    /// Which stage of the pipeline.
    pub id: StageId,
    /// Its kind, but for `run`.
    pub kind: Option<Arc<Kind>>,
    /// Files of a `run` stage.
    pub command_files: Vec<(String, PathBuf)>,
    /// Its key and inputs.
    pub resolved: Resolved,
    /// Why the store has no result that can be used.
    pub reasons: Vec<MissReason>,
    /// The generation of an unusable record.
    pub generation: u32,
    /// Which attempt of this run it is, from 1.
    pub attempt: u32,
    /// What its programs may use.
    pub grants: Grants,
    /// What its programs see and nothing else may show.
    pub secrets: StageSecrets,
    /// What its programs print.
    pub log: Arc<Mutex<Log>>,
    /// Whether to go on.
    pub stop: watch::Receiver<Stop>,
    /// What it has claimed, so that other runs do not make it too.
    pub leases: Vec<Lease>,
    /// Of a stage that has checkpoints.
    pub checkpoints: CheckpointState,
    /// What it reports while it runs.
    pub reporter: Reporter,
}

impl Job {
    /// The stage, as the pipeline describes it.
    pub fn stage(&self) -> &Stage {
        &self.context.pipeline.stages[self.id.0]
    }

    /// The stage's seed: its parameter of that name, 0 where there is none.
    pub fn seed(&self) -> i64 {
        self.stage().params.get("seed").and_then(serde_json::Value::as_i64).unwrap_or(0)
    }

    /// Where this attempt works. Folders are few and flat, since making one costs a third of a millisecond on ext4.
    pub fn attempt_folder(&self) -> PathBuf {
        folders::attempt_folder(&self.context.folders, &self.context.run, &self.stage().name, self.attempt)
    }

    /// Where checkpoints and journals are: by base key where there is one, so that other rows find it too, and so do other
    /// values of a parameter that continues, but for those that run at the same time.
    pub fn state_folder(&self) -> PathBuf {
        let shares = self.stage().kind.by_row.is_some() || self.checkpoints.is_shared();
        let key = self.resolved.base.filter(|_| shares).unwrap_or(self.resolved.key);
        self.context.folders.state.join(key.to_string())
    }

    /// Whether it runs again although the store has its result.
    pub fn is_refresh(&self) -> bool {
        self.reasons.contains(&MissReason::Refresh)
    }

    /// Whether the run goes on: nobody has interrupted it.
    pub fn goes_on(&self) -> bool {
        *self.stop.borrow() == Stop::Go
    }

    /// Values that must show nowhere.
    pub fn secret_values(&self) -> Vec<String> {
        self.secrets.values.iter().map(|(_, value)| value.clone()).collect()
    }

    /// A text without secrets.
    pub fn redact(&self, text: &str) -> String {
        self.log.lock().expect("no panic happens under this lock").redact(text)
    }

    /// A failure whose texts have no secrets.
    pub fn without_secrets(&self, failure: Failure) -> Failure {
        failure.map(|Explanation { message, hint }| Explanation {
            message: self.redact(&message),
            hint: hint.as_deref().map(|hint| self.redact(hint)),
        })
    }

    /// Gives back what it had claimed.
    pub async fn give_back_leases(&mut self) {
        for lease in std::mem::take(&mut self.leases) {
            // One that cannot be given back ends with the run.
            let _ = self.context.store.give_back(lease).await;
        }
    }

    /// Gives back what a program was given.
    pub fn give_back(&self, grant: ResourceGrant) {
        self.reporter.send(Message::GiveBack(grant));
    }

    /// Gives back what no program has taken.
    pub fn give_back_unused_grants(&mut self) {
        if let Some(grant) = self.grants.first.take() {
            self.give_back(grant);
        }
        self.grants.further.close();
        while let Ok(grant) = self.grants.further.try_recv() {
            self.give_back(grant);
        }
    }

    /// Sends an event to subscribers.
    pub fn emit(&self, event: RunEvent) {
        self.reporter.emit(event);
    }

    /// Shows a text to users.
    pub fn message(&mut self, level: &str, message: impl Into<String>) {
        self.reporter.message(level.to_owned(), message.into());
    }

    /// What earlier attempts in this run came to.
    pub fn pass(&self) -> Pass {
        self.update_pass(|pass| pass.clone())
    }

    /// Changes what the attempts of this run came to.
    pub fn update_pass<T>(&self, update: impl FnOnce(&mut Pass) -> T) -> T {
        let mut passes = self.context.passes.lock().expect("no panic happens under this lock");
        update(passes.entry(self.id).or_default())
    }
}
