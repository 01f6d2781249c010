//! What happens in a run, as one enum; subscribers print it, record it or stream it.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::key::MissReason;
use crate::store::{RowCounts, RunState};

/// Something happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RunEvent {
    /// A run begins.
    RunStarted {
        /// Its id.
        run: String,
        /// The pipeline.
        pipeline: String,
        /// Stages that take part.
        stages: usize,
        /// Where results go.
        store: String,
    },
    /// A stage's result is in the store already.
    StageHit {
        /// The stage.
        stage: String,
        /// For a by-row stage, of when it was made.
        rows: Option<RowCounts>,
    },
    /// A stage starts, for the first time or again.
    StageStarted {
        /// The stage.
        stage: String,
        /// From 1.
        attempt: u32,
        /// Why it runs.
        reasons: Vec<MissReason>,
        /// Rows to do, for a by-row stage.
        rows: Option<RowCounts>,
    },
    /// How far a stage is.
    StageProgress {
        /// The stage.
        stage: String,
        /// Units done.
        done: u64,
        /// Units in all.
        total: Option<u64>,
        /// What a unit is.
        unit: String,
    },
    /// A figure.
    Metric {
        /// The stage.
        stage: String,
        /// Its name.
        name: String,
        /// The step.
        step: Option<u64>,
        /// Its value.
        value: f64,
    },
    /// Something a program, or the engine about it, wants to say.
    Message {
        /// The stage.
        stage: String,
        /// `debug`, `info`, `warning` or `error`.
        level: String,
        /// The text.
        message: String,
    },
    /// A stage will be tried again.
    StageRetry {
        /// The stage.
        stage: String,
        /// What went wrong.
        message: String,
        /// Seconds until then.
        wait_s: f64,
    },
    /// A stage is over.
    StageFinished {
        /// The stage.
        stage: String,
        /// How.
        outcome: StageOutcome,
        /// Seconds.
        duration_s: f64,
        /// For a by-row stage.
        rows: Option<RowCounts>,
    },
    /// The run is over.
    RunFinished {
        /// How.
        outcome: RunOutcome,
        /// Seconds.
        duration_s: f64,
        /// Stages that were in the store.
        hits: usize,
        /// Stages that were executed.
        executed: usize,
        /// Stages that failed.
        failed: usize,
        /// Stages that could not start.
        skipped: usize,
    },
}

/// How a stage ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum StageOutcome {
    /// Its outputs are published.
    Done,
    /// Nothing is published.
    Failed {
        /// In one line.
        message: String,
        /// What to do about it.
        hint: Option<String>,
        /// The end of its log.
        log_tail: Vec<String>,
        /// What it left, until the next run starts a program.
        #[serde(skip_serializing_if = "Option::is_none")]
        folder: Option<PathBuf>,
    },
    /// Something before it failed.
    Skipped {
        /// The stage that did.
        because: String,
    },
    /// The run was interrupted.
    Cancelled,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// Everything selected is there.
    Done,
    /// Something failed.
    Failed,
    /// Ctrl-C.
    Interrupted,
}

impl From<RunOutcome> for RunState {
    fn from(outcome: RunOutcome) -> Self {
        match outcome {
            RunOutcome::Done => Self::Done,
            RunOutcome::Failed => Self::Failed,
            RunOutcome::Interrupted => Self::Interrupted,
        }
    }
}

/// Whoever wants to know.
pub trait Subscriber: Send {
    /// Takes notice.
    fn notice(&mut self, event: &RunEvent);
}

/// Collects events, for tests.
impl Subscriber for Vec<RunEvent> {
    fn notice(&mut self, event: &RunEvent) {
        self.push(event.clone());
    }
}

/// Writes events as JSON lines with their time.
pub struct Recorder<W: Write + Send> {
    out: W,
}

impl Recorder<std::fs::File> {
    /// Records to a file, which is made with the folders above it.
    pub fn create(path: &Path) -> std::io::Result<Self> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        Ok(Self { out: std::fs::File::create(path)? })
    }
}

impl<W: Write + Send> Recorder<W> {
    /// Records to anything.
    pub fn new(out: W) -> Self {
        Self { out }
    }
}

impl<W: Write + Send> Subscriber for Recorder<W> {
    fn notice(&mut self, event: &RunEvent) {
        #[derive(Serialize)]
        struct Timed<'a> {
            at: f64,
            #[serde(flatten)]
            event: &'a RunEvent,
        }
        // Hits are in the run's manifest; ten thousand lines saying so help nobody.
        if matches!(event, RunEvent::StageHit { .. }) {
            return;
        }
        let line = serde_json::to_string(&Timed { at: crate::now(), event }).expect("events are plain data");
        let _ = writeln!(self.out, "{line}");
    }
}
