//! How fast is it? Trials of candidate and baselines in random order, alone on the card, each on new inputs at another
//! address, with cold caches, and with the timed result checked again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::lane::{Lane, Runner};
use super::random::Choices;
use super::verify::is_right;
use crate::compile::Built;
use crate::fault::{EvaluatorError, Fault};
use crate::gate::{Gate, Shared};
use crate::profile::roofline::of_task;
use crate::profile::trials::{Decision, EVENT_STEP_MS, Plan, Trials, median};
use crate::reference::{Described, Layout, Task, TaskError};
use crate::reward::FASTER;
use crate::runner::gpu::GpuRunner;
use crate::verdict::{self, Compared, Failure, Performance};

/// Sets of arguments at different addresses, so that nothing can be remembered by pointer.
pub const SETS: u32 = 4;

/// Trials that are not counted.
pub const WARM_UP: u32 = 1;

/// Trials of the clock draw inputs that the checks never saw.
pub const FIRST_TRIAL: u32 = 1 << 20;

/// Trials go on until a speed-up is known this well, as a share, and until it is clear on which side of the milestone
/// it lies.
const HALF_WIDTH: f64 = 0.02;

/// Runs that CUPTI looks at; only one where that finds nothing remarkable.
const LOOKS: usize = 3;

/// What the clock of the kernels is called among what is missing.
const KERNEL_CLOCK: &str = "kernel_ms";

/// What two clocks may differ by on the same work, as a share. Kernels that CUPTI watches were up to 5 % slower on an H200
/// than between two events.
const CLOCKS_DIFFER: f64 = 0.1;

/// How timing ended.
pub enum Timed {
    /// With times.
    Done(Performance),
    /// A run ended badly.
    Fault(Fault),
    /// A timed result was wrong.
    Wrong(Failure),
    /// The task cannot be timed.
    Task(TaskError),
}

/// What is timed.
pub struct Timing<'a> {
    /// The task.
    pub task: &'a Task,
    /// What it moves and computes.
    pub described: &'a Described,
    /// The candidate.
    pub built: &'a Built,
    /// Draws the inputs.
    pub seed: u64,
    /// `eager`, `compile`, `autotune`.
    pub baselines: &'a [String],
    /// At most so many trials.
    pub max_trials: u32,
    /// Of one run.
    pub limit: Duration,
}

/// A step that may end the timing early.
type Step<T> = Result<Result<T, Timed>, EvaluatorError>;

macro_rules! proceed {
    ($step:expr) => {
        match $step? {
            Ok(value) => value,
            Err(ended) => return Ok(Err(ended.into())),
        }
    };
}

impl From<Fault> for Timed {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<TaskError> for Timed {
    fn from(error: TaskError) -> Self {
        Self::Task(error)
    }
}

/// Times a candidate in a lane for clocks; without a gate nobody else is on the card.
pub fn time(lane: &mut Lane, gate: Option<&Gate>, timing: &Timing) -> Result<Timed, EvaluatorError> {
    Ok(match measure(lane, gate, timing)? {
        Ok(performance) => Timed::Done(performance),
        Err(ended) => ended,
    })
}

fn measure(lane: &mut Lane, gate: Option<&Gate>, timing: &Timing) -> Step<Performance> {
    let (layout, baselines, missing) = {
        let shared = gate.map(Gate::share);
        proceed!(prepare(lane, shared.as_ref(), timing))
    };
    let mut clock = Clock {
        lane,
        layout,
        baselines,
        limit: timing.limit,
        choices: Choices(timing.seed),
        surely_closely: WARM_UP + (Choices(!timing.seed).next() % u64::from(timing.max_trials.clamp(1, 4))) as u32,
    };
    let _alone = gate.map(Gate::alone);
    let start = Instant::now();
    let trials = proceed!(clock.trials(timing.max_trials));
    let candidate_ms = trials.candidate_ms().unwrap_or_default();
    let kernel_ms = proceed!(clock.kernel_ms(trials.count() as u32 + WARM_UP, candidate_ms));
    let Clock { baselines, .. } = clock;
    let mut missing = missing;
    if kernel_ms.is_none() {
        missing.insert(KERNEL_CLOCK.to_owned(), "CUPTI is not here, or did not see all of the work".to_owned());
    }
    let beside = Beside { kernel_ms, alone_s: start.elapsed().as_secs_f64() };
    Ok(Ok(performance(timing, &trials, &beside, &baselines, missing)))
}

/// What is known besides the trials: another clock, and how long all of it took.
struct Beside {
    kernel_ms: Option<f64>,
    alone_s: f64,
}

impl Beside {
    /// The slower counts. Where a run is nothing but one kernel after another, its kernels' sum is the same figure by
    /// another clock, and only noise can make it the larger: that is not to count.
    fn slowest(&self, inside_ms: f64) -> f64 {
        self.kernel_ms.filter(|kernel_ms| is_clearly_larger(*kernel_ms, inside_ms)).unwrap_or(inside_ms)
    }
}

fn is_clearly_larger(kernel_ms: f64, inside_ms: f64) -> bool {
    kernel_ms > inside_ms * (1.0 + CLOCKS_DIFFER)
}

fn performance(
    timing: &Timing,
    trials: &Trials,
    beside: &Beside,
    baselines: &[String],
    missing: BTreeMap<String, String>,
) -> Performance {
    let inside_ms = trials.candidate_ms().unwrap_or_default();
    let candidate_ms = beside.slowest(inside_ms);
    let scale = inside_ms / candidate_ms;
    let compared = |index: usize| {
        let ratio = trials.speedup(index)?;
        let ms = trials.baseline_ms(index)?;
        Some(Compared { ms, speedup: ratio.estimate * scale, low: ratio.low * scale, high: ratio.high * scale })
    };
    let each = baselines.iter().enumerate().filter_map(|(index, name)| Some((name.clone(), compared(index)?)));
    Performance {
        candidate_ms,
        kernel_ms: beside.kernel_ms,
        baselines: each.collect(),
        missing,
        trials: trials.count() as u32,
        alone_s: beside.alone_s,
        bytes: timing.described.spec.bytes,
        flops: timing.described.spec.flops,
        roofline: roofline(timing, candidate_ms),
    }
}

fn roofline(timing: &Timing, candidate_ms: f64) -> Option<verdict::Roofline> {
    let limit = of_task(&timing.described.spec, timing.task.policy, &timing.described.device.name)?;
    Some(verdict::Roofline { ms: limit.ms, bound: limit.bound, share: limit.share(candidate_ms) })
}

type Prepared = (Layout, Vec<String>, BTreeMap<String, String>);

fn prepare(lane: &mut Lane, shared: Option<&Shared>, timing: &Timing) -> Step<Prepared> {
    let give_way = || shared.into_iter().for_each(Shared::give_way);
    let reference = lane.reference()?;
    let layout = proceed!(reference.begin(timing.task, timing.seed, timing.built.scratch_bytes, SETS));
    let (mut baselines, mut missing) = (Vec::new(), BTreeMap::new());
    // A whole judgement's limits are what the quick ones under the clock go by.
    give_way();
    proceed!(reference.draw(0, FIRST_TRIAL, 0, false));
    for which in timing.baselines {
        give_way();
        // A new one compiles for seconds.
        let _aside = shared.map(Shared::step_aside);
        match proceed!(reference.prepare(which, None)).error {
            None => baselines.push(which.clone()),
            Some(why) => drop(missing.insert(which.clone(), why)),
        }
    }
    give_way();
    proceed!(lane.load(timing.built, &layout.arena, timing.limit));
    Ok(Ok((layout, baselines, missing)))
}

struct Clock<'a> {
    lane: &'a mut Lane,
    layout: Layout,
    baselines: Vec<String>,
    limit: Duration,
    choices: Choices,
    /// A trial whose result is held to the bounds of the checks, whatever chance says of the others.
    surely_closely: u32,
}

/// Of so many timed results one is judged as a whole, by the same bounds as in the checks. The others are compared with
/// eager's, which is quicker and forgives twice as much: a candidate cannot know which, so it is exact in all or found out.
const LOOK_CLOSELY: u64 = 8;

impl Clock<'_> {
    /// Times of the candidate, and of each baseline beside it.
    fn trials(&mut self, max_trials: u32) -> Step<Trials> {
        let mut trials = Trials::new(self.baselines.len(), EVENT_STEP_MS);
        let plan = Plan { thresholds: vec![FASTER], half_width: HALF_WIDTH, max_trials: max_trials as usize };
        for trial in 0..u32::MAX {
            let (candidate, baselines) = proceed!(self.trial(trial));
            if trial < WARM_UP {
                continue;
            }
            if !trials.push(candidate, &baselines) {
                return Err(EvaluatorError::new(format!("the clock gave {candidate} ms beside {baselines:?} ms")));
            }
            if trials.decide(&plan) == Decision::Enough {
                break;
            }
        }
        Ok(Ok(trials))
    }

    fn trial(&mut self, trial: u32) -> Step<(f64, Vec<f64>)> {
        let set = proceed!(self.draw(trial));
        let mut order: Vec<usize> = (0..=self.baselines.len()).collect();
        self.choices.shuffle(&mut order);
        let (mut candidate, mut baselines) = (0.0, vec![0.0; self.baselines.len()]);
        for side in order {
            match side.checked_sub(1) {
                None => candidate = proceed!(self.candidate(set)),
                Some(index) => baselines[index] = proceed!(self.lane.reference()?.time(&self.baselines[index], set)),
            }
        }
        proceed!(self.judge(trial, set));
        Ok(Ok((candidate, baselines)))
    }

    /// New inputs and poison at the next place; whether the result is judged as a whole is drawn.
    fn draw(&mut self, trial: u32) -> Step<usize> {
        let set = trial as usize % self.layout.sets.len();
        let (drawn, pattern) = (FIRST_TRIAL + 1 + trial, (trial % 2) as u8);
        match self.choices.next().is_multiple_of(LOOK_CLOSELY) || trial == self.surely_closely {
            true => proceed!(self.lane.reference()?.draw(set, drawn, pattern, false)),
            false => proceed!(self.lane.reference()?.draw_quickly(set, drawn, pattern)),
        }
        Ok(Ok(set))
    }

    fn judge(&mut self, trial: u32, set: usize) -> Step<()> {
        let judgement = proceed!(self.lane.reference()?.judge(set));
        match is_right(&judgement) {
            true => Ok(Ok(())),
            false => Ok(Err(Timed::Wrong(Failure { input: trial + 1, timed: true, judgement }))),
        }
    }

    fn candidate(&mut self, set: usize) -> Result<Result<f64, Fault>, EvaluatorError> {
        let (arguments, limit) = (self.layout.sets[set].clone(), self.limit);
        self.runner()?.time(&arguments, limit)
    }

    /// The summed time of the candidate's kernels, copies and fills. These runs are trials like the others to the
    /// candidate: new inputs, poison before, a judgement after.
    fn kernel_ms(&mut self, first_trial: u32, inside_ms: f64) -> Step<Option<f64>> {
        let mut sums = Vec::new();
        for trial in (first_trial..).take(LOOKS) {
            let set = proceed!(self.draw(trial));
            let (arguments, limit) = (self.layout.sets[set].clone(), self.limit);
            let Some(sum) = proceed!(self.runner()?.activity(&arguments, limit)) else { return Ok(Ok(None)) };
            proceed!(self.judge(trial, set));
            sums.push(sum);
            if sums.iter().all(|sum| !is_clearly_larger(*sum, inside_ms)) {
                break;
            }
        }
        Ok(Ok(median(&sums)))
    }

    fn runner(&mut self) -> Result<&mut GpuRunner, EvaluatorError> {
        match self.lane.runner() {
            Runner::Gpu(runner) => Ok(runner),
            Runner::Cpu { .. } => Err(EvaluatorError::new("the CPU device has no clock")),
        }
    }
}
