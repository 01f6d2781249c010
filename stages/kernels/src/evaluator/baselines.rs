//! What PyTorch itself takes for a task, and whether the task can be cheated.

use serde_json::Value;

use super::clock::{FIRST_TRIAL, SETS, WARM_UP};
use super::lane::Lane;
use super::random::Choices;
use crate::gate::{Gate, Shared};
use crate::profile::trials::{Interval, median_interval};
use crate::reference::{Answered, Prepared, Task};

/// Times of one baseline.
#[derive(Clone, Debug)]
pub struct Baseline {
    /// `eager`, `compile` or `autotune`.
    pub name: String,
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
    /// `eager`, `compile`, `autotune`.
    pub names: &'a [String],
    /// Forwards of each to time.
    pub trials: u32,
    /// Draws the inputs.
    pub seed: u64,
    /// Whether kernels can be told apart from the rest.
    pub is_gpu: bool,
}

/// Facts on degenerate answers.
pub fn screen(lane: &mut Lane, wanted: &Wanted) -> Answered<Value> {
    let reference = lane.reference()?;
    match reference.begin(wanted.task, wanted.seed, 0, 1)? {
        Ok(_) => reference.screen(),
        Err(error) => Ok(Err(error)),
    }
}

/// Times baselines in a lane for clocks; without a gate nobody else is on the card.
pub fn time(lane: &mut Lane, gate: Option<&Gate>, wanted: &Wanted) -> Answered<Vec<Baseline>> {
    let prepared = {
        let shared = gate.map(Gate::share);
        let _aside = shared.as_ref().map(Shared::step_aside);
        prepare(lane, wanted)?
    };
    let (sets, mut baselines) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return Ok(Err(error)),
    };
    let _alone = gate.map(Gate::alone);
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); baselines.len()];
    let mut choices = Choices(wanted.seed);
    for trial in 0..wanted.trials + WARM_UP {
        let set = trial as usize % sets;
        if let Err(error) = lane.reference()?.draw_quickly(set, FIRST_TRIAL + trial, 0)? {
            return Ok(Err(error));
        }
        let mut order: Vec<usize> =
            (0..baselines.len()).filter(|index| baselines[*index].prepared.error.is_none()).collect();
        choices.shuffle(&mut order);
        for index in order {
            match lane.reference()?.time(&baselines[index].name, set)? {
                Ok(ms) if trial >= WARM_UP => times[index].push(ms),
                Ok(_) => {}
                Err(error) => return Ok(Err(error)),
            }
        }
    }
    for (baseline, times) in baselines.iter_mut().zip(&times) {
        baseline.ms = median_interval(times);
        if wanted.is_gpu && baseline.prepared.error.is_none() {
            baseline.kernel_ms = lane.reference()?.kernels(&baseline.name)?.ok().map(|kernels| kernels.kernel_ms);
        }
    }
    Ok(Ok(baselines))
}

fn prepare(lane: &mut Lane, wanted: &Wanted) -> Answered<(usize, Vec<Baseline>)> {
    let reference = lane.reference()?;
    let sets = match reference.begin(wanted.task, wanted.seed, 0, SETS)? {
        Ok(layout) => layout.sets.len(),
        Err(error) => return Ok(Err(error)),
    };
    let mut baselines = Vec::new();
    for name in wanted.names {
        match reference.prepare(name, None)? {
            Ok(prepared) => baselines.push(Baseline { name: name.clone(), prepared, ms: None, kernel_ms: None }),
            Err(error) => return Ok(Err(error)),
        }
    }
    Ok(Ok((sets, baselines)))
}
