//! What PyTorch itself takes for a task, and whether the task can be cheated.

use serde_json::Value;

use super::card::Beside;
use super::lane::Lane;
use super::memory::Portion;
use super::varied;
use crate::baseline::Baseline;
use crate::gate::{Gate, Shared};
use crate::judgement::TaskError;
use crate::profile::trials::{Interval, median_interval};
use crate::reference::{Answered, Described, Prepared, Reference, Task};

/// Times of one baseline.
#[derive(Clone, Debug)]
pub struct TimedBaseline {
    /// Which one.
    pub name: Baseline,
    /// What warming it up gave.
    pub prepared: Prepared,
    /// Median time of a forward in milliseconds; `None` where it could not be made.
    pub ms: Option<Interval>,
    /// Summed time of the GPU's kernels in milliseconds; `None` on the CPU device.
    pub kernel_ms: Option<f64>,
}

/// What is wanted.
pub struct Wanted<'a> {
    /// The task.
    pub task: &'a Task,
    /// Which to time; empty takes no times.
    pub names: &'a [Baseline],
    /// Forwards of each to time.
    pub trials: u32,
    /// Draws the inputs.
    pub seed: u64,
    /// Whether to look for degenerate answers.
    pub screen: bool,
    /// Whether to add up the times of kernels, which takes a profiler and a GPU.
    pub kernel_times: bool,
}

/// A task as PyTorch sees it.
pub struct Profiled {
    /// What it is.
    pub described: Described,
    /// Facts on degenerate answers, where they were wanted.
    pub screened: Option<Value>,
    /// Times.
    pub baselines: Vec<TimedBaseline>,
}

impl Profiled {
    /// The answers that would pass without the work, where it was screened. Half precision is less work, and what a policy may
    /// allow.
    pub fn degenerate(&self) -> Option<Vec<&str>> {
        let passes = self.screened.as_ref()?["passes"].as_array().map_or(&[][..], Vec::as_slice);
        let passes = passes.iter().filter_map(Value::as_str);
        Some(passes.filter(|answer| !["float16", "bfloat16", "tf32"].contains(answer)).collect())
    }
}

/// Bytes that a task is taken to need until it has been described.
const UNDESCRIBED_BYTES: u64 = 6 << 30;

/// More bytes than any card has, and few enough to be added up.
const ALL_MEMORY: u64 = 1 << 48;

/// Everything of one task in one lane, so that it is loaded once; without `beside` nobody else is on the card.
pub fn profile(lane: &mut Lane, beside: Option<Beside>, wanted: &Wanted) -> Answered<Profiled> {
    let mut answered = in_steps(lane, beside, wanted, None)?;
    if beside.is_some() && answered.as_ref().is_err_and(TaskError::is_memory) {
        // What the first try left behind is not needed.
        let _ = lane.reference()?.forget()?;
        answered = in_steps(lane, beside, wanted, Some(ALL_MEMORY))?;
    }
    // Nobody asks for this task again.
    let _ = lane.reference()?.forget()?;
    Ok(answered)
}

/// `bytes` is what the task is known to need of the memory; without, as much as it seems to.
fn in_steps(lane: &mut Lane, beside: Option<Beside>, wanted: &Wanted, bytes: Option<u64>) -> Answered<Profiled> {
    let gate = beside.map(|beside| beside.gate);
    let shared = || gate.map(Gate::share);
    let reference = lane.reference()?;
    let portion = beside.map(|beside| beside.memory.take(bytes.unwrap_or(UNDESCRIBED_BYTES)));
    let described = {
        let _shared = shared();
        if let Err(error) = reference.limit_memory(None)? {
            return Ok(Err(error));
        }
        reference.describe(wanted.task)?.and_then(varied)
    };
    let described = match described {
        Ok(described) => described,
        Err(error) => return Ok(Err(error)),
    };
    let _portion = match (beside, described.device.memory_bytes) {
        (Some(beside), Some(size)) => {
            beside.memory.set_size(size);
            let portion = portion.map(|portion| portion.exchange(bytes.unwrap_or(described.working_bytes)));
            if let Err(error) = reference.limit_memory(portion.as_ref().map(Portion::limit))? {
                return Ok(Err(error));
            }
            portion
        }
        _ => portion,
    };
    let mut screened = None;
    while wanted.screen && screened.is_none() {
        let _shared = shared();
        match reference.screen_step(wanted.task)? {
            Ok(report) => screened = report,
            Err(error) => return Ok(Err(error)),
        }
    }
    if wanted.names.is_empty() {
        return Ok(Ok(Profiled { described, screened, baselines: Vec::new() }));
    }
    Ok(time(reference, gate, wanted)?.map(|baselines| Profiled { described, screened, baselines }))
}

fn time(reference: &mut Reference, gate: Option<&Gate>, wanted: &Wanted) -> Answered<Vec<TimedBaseline>> {
    let mut baselines = Vec::new();
    {
        let shared = gate.map(Gate::share);
        let _aside = shared.as_ref().map(Shared::step_aside);
        for name in wanted.names {
            match reference.prepare_task(wanted.task, *name)? {
                Ok(prepared) => baselines.push(TimedBaseline { name: *name, prepared, ms: None, kernel_ms: None }),
                Err(error) => return Ok(Err(error)),
            }
        }
    }
    let ready = baselines.iter().filter(|baseline| baseline.prepared.error.is_none());
    let names: Vec<Baseline> = ready.map(|baseline| baseline.name).collect();
    let _alone = gate.map(Gate::alone);
    let times = match reference.times(wanted.task, &names, wanted.trials, wanted.seed)? {
        Ok(times) => times,
        Err(error) => return Ok(Err(error)),
    };
    for baseline in &mut baselines {
        let Some(times) = times.get(&baseline.name) else { continue };
        baseline.ms = median_interval(times);
        if wanted.kernel_times {
            let kernels = reference.kernels(wanted.task, baseline.name)?;
            baseline.kernel_ms = kernels.ok().map(|kernels| kernels.kernel_ms);
        }
    }
    Ok(Ok(baselines))
}
