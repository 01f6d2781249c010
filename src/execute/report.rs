//! What a job reports to the loop while it runs.

use std::time::{Duration, Instant};

use cuda_agent_protocol::ResourceGrant;
use tokio::sync::mpsc;

use super::stage_id::StageId;
use crate::event::RunEvent;

/// What jobs send to the loop while they run.
#[derive(Debug)]
pub enum Message {
    /// For subscribers.
    Event(RunEvent),
    /// A program has ended, and what it was given is free.
    GiveBack(ResourceGrant),
    /// Number of further programs that a by-row stage could use.
    Widen(StageId, u32),
}

/// A job's end of the channel to the loop. It limits how many messages and how much progress of one attempt get there.
pub struct Reporter {
    stage: String,
    shown: u32,
    progressed_at: Option<Instant>,
    messages: mpsc::UnboundedSender<Message>,
}

impl Reporter {
    /// For an attempt at the stage of this name.
    pub fn new(stage: String, messages: mpsc::UnboundedSender<Message>) -> Self {
        Self { stage, shown: 0, progressed_at: None, messages }
    }

    /// Sends a message, unless the run was ended under the job.
    pub fn send(&self, message: Message) {
        // The loop outlives its jobs, but for an interrupted run.
        let _ = self.messages.send(message);
    }

    /// Sends an event to subscribers.
    pub fn emit(&self, event: RunEvent) {
        self.send(Message::Event(event));
    }

    /// Shows a text to users, at most 1,000 of one attempt.
    pub fn message(&mut self, level: String, message: String) {
        const MOST: u32 = 1000;
        self.shown += 1;
        let stage = self.stage.clone();
        if self.shown < MOST {
            self.emit(RunEvent::Message { stage, level, message });
        } else if self.shown == MOST {
            let message = "1,000 messages shown; the rest is in the log".into();
            self.emit(RunEvent::Message { stage, level: "warning".into(), message });
        }
    }

    /// Shows progress, ten times a second at most, and its end in any case.
    pub fn progress(&mut self, done: u64, total: Option<u64>, unit: &str) {
        const OFTEN: Duration = Duration::from_millis(100);
        let is_last = total == Some(done);
        if !is_last && self.progressed_at.is_some_and(|last| last.elapsed() < OFTEN) {
            return;
        }
        self.progressed_at = Some(Instant::now());
        let stage = self.stage.clone();
        self.emit(RunEvent::StageProgress { stage, done, total, unit: unit.to_owned() });
    }
}
