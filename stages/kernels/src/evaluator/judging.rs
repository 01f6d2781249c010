//! One verdict: compiled, checked, watched by tools if that was asked, and timed.

use std::time::Instant;

use super::card::{CardAccess, WorkError};
use super::clock::{self, Clocked, Timing};
use super::draft::Draft;
use super::lane::Lane;
use super::runs::{Ended, Stop};
use super::verify::{self, Check, Checked};
use super::{Evaluator, Settings};
use crate::backend::{Sanitized, Watched};
use crate::candidate::Candidate;
use crate::compile::Built;
use crate::fault::EvaluatorError;
use crate::gate::Shared;
use crate::reference::{Described, Task};
use crate::reward::Cost;
use crate::verdict::{Compiled, Seconds, Verdict};

/// What is judged, and how.
pub struct Job<'a> {
    /// With its compiler and what it knows of tasks.
    pub evaluator: &'a Evaluator,
    /// The task.
    pub task: &'a Task,
    /// The candidate.
    pub candidate: &'a Candidate,
    /// Draws the inputs.
    pub seed: u64,
    /// How to judge.
    pub settings: &'a Settings,
}

impl Job<'_> {
    /// The verdict.
    pub fn judge(&self, access: &mut CardAccess) -> Result<Verdict, WorkError> {
        let mut draft = Draft::new(self.task, self.candidate, self.seed);
        let described = match self.evaluator.describe_in(access, self.task)? {
            Ok(described) => described,
            Err(error) => return Ok(draft.task_error(error)),
        };
        draft.verdict.device = Some(described.device.clone());
        let start = Instant::now();
        let compiled = self.evaluator.backend.compile(self.candidate, &described)?;
        draft.verdict.seconds.compile = start.elapsed().as_secs_f64();
        let built = match compiled {
            Ok(built) => built,
            Err(failure) => return Ok(draft.not_compiled(failure).finish(&self.settings.reward, &Cost::default())),
        };
        draft.verdict.compiled = Some(Compiled::from(&built));
        let checked = self.check(access, &built, &mut draft.verdict.seconds)?;
        let mut is_right = draft.checked(checked, self.settings.inputs);
        if is_right && self.settings.sanitizer {
            is_right = draft.sanitized(self.sanitize(access, &built)?);
        }
        if is_right && !self.settings.baselines.is_empty() && self.evaluator.backend.takes_times() {
            let timed = self.time(access, &described, &built, &mut draft.verdict.seconds)?;
            draft.timed(timed);
        }
        Ok(draft.finish(&self.settings.reward, &Cost::of(&built, &self.candidate.source)))
    }

    fn check(&self, access: &mut CardAccess, built: &Built, seconds: &mut Seconds) -> Result<Checked, WorkError> {
        let start = Instant::now();
        let task = self.task.digest();
        let mut checked = access.check(&task, |lane, shared| self.check_in(lane, built, shared));
        if matches!(checked, Ok(Checked::CutShort)) {
            checked = access.check(&task, |lane, shared| {
                let _repeat = shared.map(|shared| self.evaluator.backend.wait_to_repeat(shared));
                self.check_in(lane, built, None)
            });
        }
        let checked = checked?;
        seconds.verify = start.elapsed().as_secs_f64();
        match checked {
            Checked::Task(error) if error.is_worth_another_try() => Err(WorkError::Task(error)),
            checked => Ok(checked),
        }
    }

    fn check_in(&self, lane: &mut Lane, built: &Built, shared: Option<&Shared>) -> Result<Checked, EvaluatorError> {
        let Settings { inputs, limit, .. } = *self.settings;
        let checked = verify::check(lane, &Check { task: self.task, built, seed: self.seed, inputs, limit, shared });
        tidy(lane, checked.is_err());
        checked
    }

    fn sanitize(&self, access: &mut CardAccess, built: &Built) -> Result<Sanitized, EvaluatorError> {
        let sanitizer = match self.evaluator.backend.sanitizer() {
            Ok(sanitizer) => sanitizer,
            Err(why) => return Ok(Sanitized::NotRun(why)),
        };
        let watched = Watched { task: self.task, built, seed: self.seed, limit: self.settings.limit };
        access.check(&self.task.digest(), |lane, shared| {
            let _aside = shared.map(Shared::step_aside);
            let sanitized = lane.watch(&*sanitizer, &watched);
            lane.keep_if(sanitized.is_ok());
            sanitized
        })
    }

    fn time(
        &self,
        access: &mut CardAccess,
        described: &Described,
        built: &Built,
        seconds: &mut Seconds,
    ) -> Result<Clocked, WorkError> {
        let start = Instant::now();
        let Settings { baselines, max_trials, limit, .. } = self.settings;
        let (task, seed) = (self.task, self.seed);
        let timing = Timing { task, described, built, seed, baselines, max_trials: *max_trials, limit: *limit };
        let timed = access.clock(&task.digest(), |lane, gate| {
            let timed = clock::time(lane, gate, &timing);
            tidy(lane, matches!(timed, Err(Stop::Machine(_))));
            timed
        });
        seconds.profile = start.elapsed().as_secs_f64();
        match timed {
            Err(Stop::Machine(error)) => Err(WorkError::Machine(error)),
            Err(Stop::Early(Ended::Task(error))) if error.is_worth_another_try() => Err(WorkError::Task(error)),
            Err(Stop::Early(ended)) => Ok(Clocked::Ended(ended)),
            Ok(performance) => Ok(Clocked::Well(performance)),
        }
    }
}

/// A lane must not carry anything from one candidate to the next.
fn tidy(lane: &mut Lane, lost: bool) {
    lane.keep_if(!lost);
    lane.runner().tidy();
}

impl From<&Built> for Compiled {
    fn from(built: &Built) -> Self {
        Self { compiler: built.compiler.clone(), kernels: built.resources.clone(), seconds: built.seconds }
    }
}
