//! The clock's runs, one after another: of the candidate and of each baseline, with the card to themselves.
//!
//! Only what must happen while nobody else may use the card happens then: a run's set is filled with inputs and poison just
//! before it, and what it left is copied just after it. Its inputs are drawn before, and its result is judged
//! after, beside others (`python/ahead.py`). Runs for which there was no memory, or which nobody thought would be needed, are drawn and judged
//! between the others. Runs can't be told from each other: each has inputs of its own, poison around its outputs and
//! the next of the sets, and each is judged.

use std::time::{Duration, Instant};

use super::verify::is_right;
use crate::backend::Timed;
use crate::baseline::Baseline;
use crate::fault::{EvaluatorError, Fault};
use crate::gate::{Gate, Shared};
use crate::judgement::{Judgement, TaskError};
use crate::profile::trials::{Decision, EVENT_STEP_MS, Plan, Trials, median};
use crate::random::Choices;
use crate::reference::{DrawAhead, Layout, Reference};
use crate::reward::FASTER;
use crate::verdict::{ClockSeconds, Failure};

/// Trials that are not counted.
pub const WARM_UP: u32 = 1;

/// Trials of the clock draw inputs that the checks never saw.
pub const FIRST_TRIAL: u32 = 1 << 20;

/// Trials go on until a speed-up is known this well, as a share, and until it is clear on which side of the milestone
/// it lies.
const HALF_WIDTH: f64 = 0.02;

/// Runs that CUPTI looks at; only one where that finds nothing remarkable.
const LOOKS: usize = 3;

/// What two clocks may differ by on the same work, as a share. Kernels that CUPTI watches were up to 5 % slower on an H200
/// than between two events.
const CLOCKS_DIFFER: f64 = 0.1;

/// Of so many timed results one is judged as a whole, by the same bounds as in the checks. The others are compared with
/// eager's, which is quicker and forgives twice as much: a candidate cannot know which, so it is exact in all or found out.
const LOOK_CLOSELY: u64 = 8;

/// Draws, or judgements, between two moments at which others' first runs may go ahead: some milliseconds.
const AT_ONCE: usize = 4;

/// Why the runs ended early.
#[derive(Debug)]
pub enum Ended {
    /// A run ended badly.
    Fault(Fault),
    /// A timed result was wrong.
    Wrong(Failure),
    /// The task cannot be timed.
    Task(TaskError),
}

/// Why a step has no result.
#[derive(Debug)]
pub enum Stop {
    /// The runs ended early, which says something of the candidate or of the task.
    Early(Ended),
    /// The machine failed, which says nothing.
    Machine(EvaluatorError),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Early(Ended::Fault(fault))
    }
}

impl From<TaskError> for Stop {
    fn from(error: TaskError) -> Self {
        Self::Early(Ended::Task(error))
    }
}

impl From<EvaluatorError> for Stop {
    fn from(error: EvaluatorError) -> Self {
        Self::Machine(error)
    }
}

/// A step of taking times.
pub type Step<T> = Result<T, Stop>;

/// What the runs gave.
pub struct Measured {
    /// Times of the candidate, and of each baseline beside it.
    pub trials: Trials,
    /// The summed time of the candidate's kernels, copies and fills.
    pub kernel_ms: Option<f64>,
}

/// Runs a candidate beside its baselines.
pub struct Runs<'a, C: ?Sized> {
    reference: &'a mut Reference,
    candidate: &'a mut C,
    layout: Layout,
    baselines: Vec<Baseline>,
    limit: Duration,
    plan: Plan,
    choices: Choices,
    /// A trial whose result is held to the bounds of the checks, whatever chance says of the others.
    surely_closely: u32,
    /// Trials below this were drawn ahead.
    drawn_ahead: u32,
    /// The run whose result lies in a set and was not copied yet.
    in_set: Option<u32>,
    /// Those that were copied and are to be judged.
    kept: Vec<u32>,
    /// What took how long.
    pub spent: ClockSeconds,
}

impl<'a, C: Timed + ?Sized> Runs<'a, C> {
    /// A candidate that is loaded, and baselines that are prepared, for the task that was begun with this layout.
    pub fn new(
        (reference, candidate): (&'a mut Reference, &'a mut C),
        layout: Layout,
        baselines: Vec<Baseline>,
        (limit, max_trials): (Duration, u32),
        seed: u64,
    ) -> Self {
        Self {
            reference,
            candidate,
            layout,
            baselines,
            limit,
            plan: Plan { thresholds: vec![FASTER], half_width: HALF_WIDTH, max_trials: max_trials as usize },
            choices: Choices(seed),
            surely_closely: WARM_UP + (Choices(!seed).next() % u64::from(max_trials.clamp(1, 4))) as u32,
            drawn_ahead: 0,
            in_set: None,
            kept: Vec::new(),
            spent: ClockSeconds::default(),
        }
    }

    /// Draws the runs up to the first look at the times, and one for CUPTI, as many of them as there is memory for.
    pub fn draw_ahead(&mut self, shared: Option<&Shared>) -> Step<()> {
        let count = WARM_UP + self.plan.next_look(0).unwrap_or_default() as u32 + 1;
        let draws: Vec<DrawAhead> = (0..count).map(|trial| self.choose(trial)).collect();
        for some in draws.chunks(AT_ONCE) {
            shared.into_iter().for_each(Shared::yield_to_first_runs);
            let drawn = match self.reference.draw_ahead(some)? {
                Ok(drawn) => drawn,
                Err(error) if error.is_memory() => 0,
                Err(error) => return Err(error.into()),
            };
            self.drawn_ahead += drawn as u32;
            if drawn < some.len() {
                break;
            }
        }
        Ok(())
    }

    /// All runs; nobody else may be on the card.
    pub fn measure(&mut self) -> Step<Measured> {
        let measured = self.trials_and_kernels();
        if let (Ok(_), Some(trial)) = (&measured, self.in_set.take()) {
            let start = Instant::now();
            self.reference.keep(number(trial))??;
            self.kept.push(trial);
            self.spent.fill += start.elapsed().as_secs_f64();
        }
        measured
    }

    /// What the runs gave, once what was kept is judged, beside others. A result that is wrong came before whatever ended
    /// the runs.
    pub fn judged(&mut self, gate: Option<&Gate>, measured: Step<Measured>) -> Step<Measured> {
        // A task whose process has ended can't judge either.
        let may_judge = match &measured {
            Ok(_) => true,
            Err(Stop::Early(_)) => self.reference.is_usable(),
            Err(Stop::Machine(_)) => false,
        };
        if may_judge {
            self.judge_kept(gate)?;
        }
        measured
    }

    fn judge_kept(&mut self, gate: Option<&Gate>) -> Step<()> {
        let start = Instant::now();
        let shared = gate.map(Gate::share);
        self.spent.wait += start.elapsed().as_secs_f64();
        let start = Instant::now();
        for some in std::mem::take(&mut self.kept).chunks(AT_ONCE) {
            shared.iter().for_each(Shared::yield_to_first_runs);
            let trials: Vec<u32> = some.iter().copied().map(number).collect();
            let judged = self.reference.judge_kept(&trials)??;
            if judged.len() != some.len() {
                return Err(EvaluatorError::new(format!("{} of {} runs were judged", judged.len(), some.len())).into());
            }
            if let Some((trial, judgement)) = some.iter().zip(judged).find(|(_, judgement)| !is_right(judgement)) {
                return Err(wrong(*trial, judgement));
            }
        }
        self.spent.after += start.elapsed().as_secs_f64();
        Ok(())
    }

    fn trials_and_kernels(&mut self) -> Step<Measured> {
        let trials = self.trials()?;
        let inside_ms = trials.candidate_ms().unwrap_or_default();
        let kernel_ms = self.kernel_ms(trials.count() as u32 + WARM_UP, inside_ms)?;
        Ok(Measured { trials, kernel_ms })
    }

    fn trials(&mut self) -> Step<Trials> {
        let mut trials = Trials::new(self.baselines.len(), EVENT_STEP_MS);
        for trial in 0..u32::MAX {
            let (candidate, baselines) = self.trial(trial)?;
            if trial < WARM_UP {
                continue;
            }
            if !trials.push(candidate, &baselines) {
                return Err(
                    EvaluatorError::new(format!("the clock gave {candidate} ms beside {baselines:?} ms")).into()
                );
            }
            if trials.decide(&self.plan) == Decision::Enough {
                break;
            }
        }
        Ok(trials)
    }

    fn trial(&mut self, trial: u32) -> Step<(f64, Vec<f64>)> {
        let set = self.fill(trial)?;
        let mut order: Vec<usize> = (0..=self.baselines.len()).collect();
        self.choices.shuffle(&mut order);
        let (mut candidate, mut baselines) = (0.0, vec![0.0; self.baselines.len()]);
        let mut order = order.into_iter().peekable();
        while let Some(side) = order.next() {
            let start = Instant::now();
            let Some(first) = side.checked_sub(1) else {
                candidate = self.candidate.time(&self.layout.sets[set], self.limit)??;
                self.spent.run += start.elapsed().as_secs_f64();
                continue;
            };
            // Baselines that come one after another are one message.
            let mut some = vec![first];
            while let Some(next) = order.next_if(|side| *side > 0) {
                some.push(next - 1);
            }
            let names: Vec<Baseline> = some.iter().map(|index| self.baselines[*index]).collect();
            let times = self.reference.time(&names, set)??;
            some.into_iter().zip(times).for_each(|(index, ms)| baselines[index] = ms);
            self.spent.baselines += start.elapsed().as_secs_f64();
        }
        self.judge(trial, set)?;
        Ok((candidate, baselines))
    }

    /// Which poison a run gets, and whether its result is judged as a whole, which is drawn.
    fn choose(&mut self, trial: u32) -> DrawAhead {
        let closely = self.choices.next().is_multiple_of(LOOK_CLOSELY) || trial == self.surely_closely;
        DrawAhead { trial: number(trial), pattern: (trial % 2) as u8, quick: !closely }
    }

    /// New inputs and poison at the next place. What the last run left at its place is copied first.
    fn fill(&mut self, trial: u32) -> Step<usize> {
        let set = trial as usize % self.layout.sets.len();
        let (before, start) = (self.in_set.take(), Instant::now());
        if trial < self.drawn_ahead {
            self.reference.place(number(trial), set, before.map(number))??;
            self.in_set = Some(trial);
        } else if let Some(before) = before {
            self.reference.keep(number(before))??;
        }
        self.kept.extend(before);
        self.spent.fill += start.elapsed().as_secs_f64();
        if trial >= self.drawn_ahead {
            let (start, draw) = (Instant::now(), self.choose(trial));
            match draw.quick {
                true => self.reference.draw_quickly(set, draw.trial, draw.pattern)??,
                false => self.reference.draw(set, draw.trial, draw.pattern, false)??,
            }
            self.spent.draw += start.elapsed().as_secs_f64();
        }
        Ok(set)
    }

    /// Judges what a run left in its set, unless it will be copied from there.
    fn judge(&mut self, trial: u32, set: usize) -> Step<()> {
        if self.in_set == Some(trial) {
            return Ok(());
        }
        let start = Instant::now();
        let judgement = self.reference.judge(set)??;
        self.spent.judge += start.elapsed().as_secs_f64();
        match is_right(&judgement) {
            true => Ok(()),
            false => Err(wrong(trial, judgement)),
        }
    }

    /// The summed time of the candidate's kernels, copies and fills. These runs are trials like the others to the
    /// candidate: new inputs, poison before, a judgement after.
    fn kernel_ms(&mut self, first_trial: u32, inside_ms: f64) -> Step<Option<f64>> {
        let mut sums = Vec::new();
        for trial in (first_trial..).take(LOOKS) {
            let set = self.fill(trial)?;
            let start = Instant::now();
            let sum = self.candidate.activity(&self.layout.sets[set], self.limit)??;
            self.spent.kernels += start.elapsed().as_secs_f64();
            self.judge(trial, set)?;
            let Some(sum) = sum else { return Ok(None) };
            sums.push(sum);
            if sums.iter().all(|sum| !is_clearly_larger(*sum, inside_ms)) {
                break;
            }
        }
        Ok(median(&sums))
    }
}

/// What a trial is called by the reference.
fn number(trial: u32) -> u32 {
    FIRST_TRIAL + 1 + trial
}

fn wrong(trial: u32, judgement: Judgement) -> Stop {
    Stop::Early(Ended::Wrong(Failure { input: trial + 1, timed: true, judgement }))
}

/// Whether the kernels' sum says more than the time between two events, and not the same by another clock.
pub fn is_clearly_larger(kernel_ms: f64, inside_ms: f64) -> bool {
    kernel_ms > inside_ms * (1.0 + CLOCKS_DIFFER)
}

#[cfg(test)]
#[path = "runs_test.rs"]
mod tests;
