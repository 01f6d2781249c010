//! How fast is it? Trials of candidate and baselines in random order, alone on the card, each on new inputs at another
//! address, with cold caches, and with the timed result checked again: `runs.rs`. This is what is before and after them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::lane::Lane;
use super::runs::{Ended, FIRST_TRIAL, Measured, Runs, Step, is_clearly_larger};
use crate::baseline::Baseline;
use crate::compile::Built;
use crate::gate::{Gate, Shared};
use crate::profile::roofline::of_task;
use crate::profile::trials::Trials;
use crate::reference::{Described, Layout, Task};
use crate::verdict::{self, ClockSeconds, Compared, Performance};

/// Sets of arguments at different addresses, so that nothing can be remembered by pointer.
pub const SETS: u32 = 4;

/// What the clock of the kernels is called among what is missing.
const KERNEL_CLOCK: &str = "kernel_ms";

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
    /// What to time beside it.
    pub baselines: &'a [Baseline],
    /// At most so many trials.
    pub max_trials: u32,
    /// Of one run.
    pub limit: Duration,
}

/// How timing a candidate ended.
pub enum Clocked {
    /// With times.
    Well(Performance),
    /// Early.
    Ended(Ended),
}

/// Times a candidate in a lane for clocks; without a gate nobody else is on the card.
pub fn time(lane: &mut Lane, gate: Option<&Gate>, timing: &Timing) -> Step<Performance> {
    let start = Instant::now();
    let shared = gate.map(Gate::share);
    let mut spent = ClockSeconds { wait: start.elapsed().as_secs_f64(), ..ClockSeconds::default() };
    let start = Instant::now();
    let (layout, baselines, mut missing) = prepare(lane, shared.as_ref(), timing)?;
    spent.prepare = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let names = baselines.clone();
    let mut runs = Runs::new(lane.sides()?, layout, baselines, (timing.limit, timing.max_trials), timing.seed);
    runs.draw_ahead(shared.as_ref())?;
    spent.ahead = start.elapsed().as_secs_f64();
    drop(shared);
    let start = Instant::now();
    let alone = gate.map(Gate::alone);
    spent.wait += start.elapsed().as_secs_f64();
    runs.spent = spent;
    let start = Instant::now();
    let measured = runs.measure();
    let alone_s = start.elapsed().as_secs_f64();
    drop(alone);
    let Measured { trials, kernel_ms } = runs.judged(gate, measured)?;
    if kernel_ms.is_none() {
        missing.insert(KERNEL_CLOCK.to_owned(), "CUPTI is not here, or did not see all of the work".to_owned());
    }
    let beside = Beside { kernel_ms, alone_s, clock_s: runs.spent };
    Ok(performance(timing, &trials, &beside, &names, missing))
}

/// What is known besides the trials: another clock, and how long all of it took.
struct Beside {
    kernel_ms: Option<f64>,
    alone_s: f64,
    clock_s: ClockSeconds,
}

impl Beside {
    /// The slower counts. Where a run is nothing but one kernel after another, its kernels' sum is the same figure by
    /// another clock, and only noise can make it the larger: that is not to count.
    fn slowest(&self, inside_ms: f64) -> f64 {
        self.kernel_ms.filter(|kernel_ms| is_clearly_larger(*kernel_ms, inside_ms)).unwrap_or(inside_ms)
    }
}

fn performance(
    timing: &Timing,
    trials: &Trials,
    beside: &Beside,
    baselines: &[Baseline],
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
    let each = baselines.iter().enumerate().filter_map(|(index, name)| Some((*name, compared(index)?)));
    Performance {
        candidate_ms,
        kernel_ms: beside.kernel_ms,
        baselines: each.collect(),
        missing,
        trials: trials.count() as u32,
        alone_s: beside.alone_s,
        clock_s: beside.clock_s,
        bytes: timing.described.spec.bytes,
        flops: timing.described.spec.flops,
        roofline: roofline(timing, candidate_ms),
    }
}

fn roofline(timing: &Timing, candidate_ms: f64) -> Option<verdict::Roofline> {
    let limit = of_task(&timing.described.spec, timing.task.policy, &timing.described.device.name)?;
    Some(verdict::Roofline { ms: limit.ms, bound: limit.bound, share: limit.share(candidate_ms) })
}

type Prepared = (Layout, Vec<Baseline>, BTreeMap<String, String>);

fn prepare(lane: &mut Lane, shared: Option<&Shared>, timing: &Timing) -> Step<Prepared> {
    let yield_to_first_runs = || shared.into_iter().for_each(Shared::yield_to_first_runs);
    let reference = lane.reference()?;
    let layout = reference.begin(timing.task, timing.seed, timing.built.scratch_bytes, SETS)??;
    let (mut baselines, mut missing) = (Vec::new(), BTreeMap::new());
    // A whole judgement's limits are what the quick ones under the clock go by.
    yield_to_first_runs();
    reference.draw(0, FIRST_TRIAL, 0, false)??;
    for which in timing.baselines {
        yield_to_first_runs();
        // A new one compiles for seconds.
        let _aside = shared.map(Shared::step_aside);
        match reference.prepare(*which, None)??.error {
            None => baselines.push(*which),
            Some(why) => drop(missing.insert(which.to_string(), why)),
        }
    }
    yield_to_first_runs();
    lane.runner().load(timing.built, &layout.arena, timing.limit)??;
    Ok((layout, baselines, missing))
}
