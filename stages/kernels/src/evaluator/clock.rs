//! How fast is it? Trials of candidate and baselines in random order, alone on the card, each on new inputs at another
//! address, with cold caches, and with the timed result checked again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::lane::{Lane, Runner};
use super::random::Choices;
use super::verify::is_right;
use crate::compile::{Artifact, Built};
use crate::fault::{EvaluatorError, Fault, FaultKind};
use crate::gate::{Gate, Shared};
use crate::profile::roofline::of_task;
use crate::profile::trials::{Decision, EVENT_STEP_MS, Plan, Trials, median};
use crate::reference::{Described, Layout, Task, TaskError};
use crate::reward::FASTER;
use crate::runner::Arguments;
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
        watched: Vec::new(),
        is_tainted: matches!(timing.built.artifact, Artifact::Library(_)),
    };
    let _alone = gate.map(Gate::alone);
    let start = Instant::now();
    let trials = proceed!(clock.trials(timing.max_trials));
    let candidate_ms = trials.candidate_ms().unwrap_or_default();
    let outside_ms = match timing.built.artifact {
        Artifact::Library(_) => Some(proceed!(clock.outside(candidate_ms)).max(clock.watched_ms())),
        _ => None,
    };
    let kernel_ms = proceed!(clock.kernel_ms(candidate_ms));
    let Clock { baselines, .. } = clock;
    let beside = Beside { outside_ms, kernel_ms, alone_s: start.elapsed().as_secs_f64() };
    Ok(Ok(performance(timing, &trials, &beside, &baselines, missing)))
}

/// What is known besides the trials: other clocks, and how long all of it took.
struct Beside {
    outside_ms: Option<f64>,
    kernel_ms: Option<f64>,
    alone_s: f64,
}

impl Beside {
    /// The slowest counts. Where a run is nothing but one kernel after another, its kernels' sum is the same figure by
    /// another clock, and only noise can make it the larger: that is not to count.
    fn slowest(&self, inside_ms: f64) -> f64 {
        let kernels = self.kernel_ms.filter(|kernel_ms| is_clearly_larger(*kernel_ms, inside_ms));
        [self.outside_ms, kernels].into_iter().flatten().fold(inside_ms, f64::max)
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
    // The slower counts; what the process says of itself is scaled to what was seen from outside.
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
        outside_ms: beside.outside_ms,
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

fn is_a_time(ms: f64) -> bool {
    ms.is_finite() && ms > 0.0
}

/// Host code that runs beside the events can forge them.
fn no_time(ms: f64) -> Fault {
    let message = format!("its process reported a run of {ms} ms, which the candidate must have made up");
    Fault { kind: FaultKind::Crash, message, line: None }
}

struct Clock<'a> {
    lane: &'a mut Lane,
    layout: Layout,
    baselines: Vec<String>,
    limit: Duration,
    choices: Choices,
    /// A trial whose result is held to the bounds of the checks, whatever chance says of the others.
    surely_closely: u32,
    /// For `launch` candidates: milliseconds by our own watch of each timed call, and of one without a launch beside it.
    watched: Vec<(f64, f64)>,
    is_tainted: bool,
}

/// Of so many timed results one is judged as a whole, by the same bounds as in the checks. The others are compared with
/// eager's, which is quicker and forgives twice as much: a candidate cannot know which, so it is exact in all or found out.
const LOOK_CLOSELY: u64 = 8;

/// What our watch may be off by, in milliseconds: two messages through pipes.
const WATCH_SLACK_MS: f64 = 0.1;

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
            if self.is_tainted && !is_a_time(candidate) {
                return Ok(Err(no_time(candidate).into()));
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
        let set = trial as usize % self.layout.sets.len();
        let (drawn, pattern) = (FIRST_TRIAL + 1 + trial, (trial % 2) as u8);
        match self.choices.next().is_multiple_of(LOOK_CLOSELY) || trial == self.surely_closely {
            true => proceed!(self.lane.reference()?.draw(set, drawn, pattern, false)),
            false => proceed!(self.lane.reference()?.draw_quickly(set, drawn, pattern)),
        }
        let mut order: Vec<usize> = (0..=self.baselines.len()).collect();
        self.choices.shuffle(&mut order);
        let (mut candidate, mut baselines) = (0.0, vec![0.0; self.baselines.len()]);
        for side in order {
            match side.checked_sub(1) {
                None => candidate = proceed!(self.candidate(set)),
                Some(index) => baselines[index] = proceed!(self.lane.reference()?.time(&self.baselines[index], set)),
            }
        }
        let judgement = proceed!(self.lane.reference()?.judge(set));
        match is_right(&judgement) {
            true => Ok(Ok((candidate, baselines))),
            false => Ok(Err(Timed::Wrong(Failure { input: trial + 1, timed: true, judgement }))),
        }
    }

    fn candidate(&mut self, set: usize) -> Result<Result<f64, Fault>, EvaluatorError> {
        let (arguments, limit) = (self.layout.sets[set].clone(), self.limit);
        if !self.is_tainted {
            return self.runner()?.time(&arguments, limit);
        }
        let start = Instant::now();
        proceed!(self.runner()?.time_nothing(limit));
        let nothing = start.elapsed();
        let start = Instant::now();
        let ms = proceed!(self.runner()?.time(&arguments, limit));
        self.watched.push((start.elapsed().as_secs_f64() * 1e3, nothing.as_secs_f64() * 1e3));
        Ok(Ok(ms))
    }

    /// The time of the judged runs by our own watch, less what a call takes anyway: whoever computes on a stream of its own
    /// escapes the events, but not this.
    fn watched_ms(&self) -> f64 {
        let differences: Vec<f64> = self.watched.iter().map(|(with, without)| with - without).collect();
        median(&differences).map_or(0.0, |ms| (ms - WATCH_SLACK_MS).max(0.0))
    }

    /// The candidate's time by a watch that its process cannot touch: the slope between K and 2 K launches in a row.
    fn outside(&mut self, median_ms: f64) -> Result<Result<f64, Fault>, EvaluatorError> {
        let count = (20.0 / median_ms.max(0.001)).clamp(8.0, 2000.0) as u32;
        let mut slopes = Vec::new();
        for round in 0..5 {
            let arguments = self.layout.sets[round % self.layout.sets.len()].clone();
            let once = proceed!(self.watch(&arguments, count));
            let twice = proceed!(self.watch(&arguments, 2 * count));
            slopes.push((twice - once) / f64::from(count));
        }
        slopes.sort_by(f64::total_cmp);
        Ok(Ok(slopes[slopes.len() / 2].max(0.0)))
    }

    /// The summed time of the candidate's kernels and copies: what runs on several streams at once is counted in full.
    fn kernel_ms(&mut self, inside_ms: f64) -> Result<Result<Option<f64>, Fault>, EvaluatorError> {
        let mut sums = Vec::new();
        for look in 0..LOOKS {
            let (arguments, limit) = (self.layout.sets[look % self.layout.sets.len()].clone(), self.limit);
            sums.extend(proceed!(self.runner()?.activity(&arguments, limit)));
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

    fn watch(&mut self, arguments: &Arguments, count: u32) -> Result<Result<f64, Fault>, EvaluatorError> {
        let limit = self.limit.max(Duration::from_secs(30));
        let start = Instant::now();
        Ok(self.runner()?.repeat(arguments, count, limit)?.map(|()| start.elapsed().as_secs_f64() * 1e3))
    }
}
