//! A reference's worker and a candidates' side that share an arena.

use std::sync::Arc;

use super::pool::Ready;
use crate::backend::{Backend, Runner, Sanitized, Sanitizer, Timed, Watched};
use crate::fault::EvaluatorError;
use crate::reference::{Purpose, Reference, ReferenceServer};

/// Where a lane's two sides come from.
pub struct Source {
    /// The trusted side.
    pub server: ReferenceServer,
    /// The candidates' side.
    pub backend: Arc<dyn Backend>,
    /// Which card of the backend.
    pub card: usize,
}

/// One lane. The processes of both sides start when they are first needed and again after a fault.
pub struct Lane {
    // In the order in which they have to go: a worker is reaped by the server.
    runner: Box<dyn Runner>,
    reference: Option<Reference>,
    source: Arc<Source>,
    purpose: Purpose,
}

impl Ready for Lane {
    /// As many tasks as a worker of the reference keeps (`TASKS_KEPT` in reference.py).
    const KEPT: usize = 16;

    fn has_forgotten(&self) -> bool {
        !self.reference.as_ref().is_some_and(Reference::is_usable)
    }
}

impl Lane {
    /// A lane without processes yet.
    pub fn new(source: Arc<Source>, purpose: Purpose) -> Self {
        Self { runner: source.backend.runner(source.card, purpose), reference: None, source, purpose }
    }

    /// The trusted side.
    pub fn reference(&mut self) -> Result<&mut Reference, EvaluatorError> {
        if !self.reference.as_ref().is_some_and(Reference::is_usable) {
            // A runner that maps the lost worker's arena would keep that memory alive.
            self.runner.discard();
            self.reference = Some(self.source.server.connect(self.purpose)?);
        }
        Ok(self.reference.as_mut().expect("it was just made"))
    }

    /// The candidates' side.
    pub fn runner(&mut self) -> &mut dyn Runner {
        &mut *self.runner
    }

    /// Both sides of a lane for clocks, once a candidate was loaded.
    pub fn sides(&mut self) -> Result<(&mut Reference, &mut dyn Timed), EvaluatorError> {
        let reference = self.reference.as_mut().ok_or_else(|| EvaluatorError::new("no candidate was loaded"))?;
        Ok((reference, self.runner.timed()?))
    }

    /// Runs a candidate below a tool, in processes of its own.
    pub fn watch(&mut self, tool: &dyn Sanitizer, watched: &Watched) -> Result<Sanitized, EvaluatorError> {
        let card = self.source.card;
        tool.watch(card, self.reference()?, watched)
    }

    /// Resets it unless what was done in it went well.
    pub fn keep_if(&mut self, is_well: bool) {
        if !is_well {
            self.reset();
        }
    }

    /// Ends both processes, after an error whose cause could be either.
    pub fn reset(&mut self) {
        self.runner.discard();
        self.reference = None;
    }
}
