//! Is it right? Fresh inputs, each run with two poison patterns, judged by the reference.

use std::time::Duration;

use super::lane::Lane;
use crate::backend::{Ran, Turn};
use crate::compile::Built;
use crate::fault::{EvaluatorError, Fault, FaultKind};
use crate::gate::Shared;
use crate::judgement::{Defect, Judgement, OutputJudgement, TaskError};
use crate::random::Choices;
use crate::reference::Task;
use crate::verdict::{Failure, Outcome};

/// How checking ended.
pub enum Checked {
    /// Right on every input; the worst errors by output.
    Right(Vec<OutputJudgement>),
    /// A run ended badly, on this input.
    Fault(Fault, u32),
    /// A run was cut short beside others, which says nothing yet.
    CutShort,
    /// A result is wrong.
    Wrong(Failure),
    /// The task cannot be worked with.
    Task(TaskError),
}

/// What is checked.
pub struct Check<'a> {
    /// The task.
    pub task: &'a Task,
    /// The candidate.
    pub built: &'a Built,
    /// Draws the inputs.
    pub seed: u64,
    /// How many inputs.
    pub inputs: u32,
    /// Of one run with nobody beside it.
    pub limit: Duration,
    /// Who else uses the card, if others may.
    pub shared: Option<&'a Shared<'a>>,
}

/// Checks a candidate in a lane.
pub fn check(lane: &mut Lane, check: &Check) -> Result<Checked, EvaluatorError> {
    let yield_to_first_runs = || check.shared.into_iter().for_each(Shared::yield_to_first_runs);
    let layout = match lane.reference()?.begin(check.task, check.seed, check.built.scratch_bytes, 1)? {
        Ok(layout) => layout,
        Err(error) if error.is_memory() && check.built.scratch_bytes > 0 && check.shared.is_none() => {
            let message = format!(
                "{} bytes of scratch memory are more than it can have: {}",
                check.built.scratch_bytes, error.message
            );
            return Ok(Checked::Fault(Fault { kind: FaultKind::Launch, message, line: None }, 0));
        }
        Err(error) => return Ok(Checked::Task(error)),
    };
    yield_to_first_runs();
    if let Err(fault) = lane.runner().load(check.built, &layout.arena, check.limit)? {
        return Ok(Checked::Fault(fault, 1));
    }
    let mut choices = Choices(check.seed);
    let mut accuracy: Vec<OutputJudgement> = Vec::new();
    for trial in 0..check.inputs {
        let mut found = [None, None];
        for pattern in 0..2u8 {
            yield_to_first_runs();
            if let Err(error) = lane.reference()?.draw(0, trial, pattern, pattern == 1)? {
                return Ok(Checked::Task(error));
            }
            yield_to_first_runs();
            let (is_first, order) = (trial == 0 && pattern == 0, choices.next());
            let turn = Turn { pattern, is_first, order, limit: check.limit, shared: check.shared };
            match lane.runner().run(&layout.sets[0], &turn)? {
                Ran::Well => {}
                Ran::Badly(fault) => return Ok(Checked::Fault(fault, trial + 1)),
                Ran::CutShort => return Ok(Checked::CutShort),
            }
            yield_to_first_runs();
            match lane.reference()?.judge(0)? {
                Ok(judgement) => found[usize::from(pattern)] = Some(judgement),
                Err(error) => return Ok(Checked::Task(error)),
            }
        }
        let [Some(first), Some(second)] = found else { unreachable!("both patterns were judged") };
        match decide(first, second) {
            Ok(outputs) => keep_worst(&mut accuracy, outputs),
            Err(judgement) => return Ok(Checked::Wrong(Failure { input: trial + 1, timed: false, judgement })),
        }
    }
    Ok(Checked::Right(accuracy))
}

/// One judgement of two: the second knows what was never written, which explains whatever else is wrong.
fn decide(first: Judgement, second: Judgement) -> Result<Vec<OutputJudgement>, Judgement> {
    let explains = second.outputs.iter().any(|output| output.unwritten.is_some_and(|count| count > 0));
    match (is_right(&first), is_right(&second)) {
        (true, true) => Ok(second.outputs),
        (false, _) if !explains => Err(first),
        _ => Err(second),
    }
}

/// Whether nothing at all speaks against a run.
pub fn is_right(judgement: &Judgement) -> bool {
    judgement.outputs.iter().all(|output| output.pass && output.unwritten.unwrap_or(0) == 0)
        && judgement.inputs_changed.is_empty()
        && judgement.red_zones.is_empty()
}

fn keep_worst(kept: &mut Vec<OutputJudgement>, outputs: Vec<OutputJudgement>) {
    let error = |output: &OutputJudgement| {
        output.error_rms.or(output.worst.as_ref().and_then(|worst| worst.error.as_ref()?.as_f64())).unwrap_or(0.0)
    };
    if kept.is_empty() {
        *kept = outputs;
        return;
    }
    for (kept, new) in kept.iter_mut().zip(outputs) {
        if error(&new) > error(kept) {
            *kept = new;
        }
    }
}

/// The outcome that a wrong result stands for: writes where none belong explain the rest, so they go first.
pub fn outcome(judgement: &Judgement) -> Outcome {
    if !judgement.red_zones.is_empty() {
        return Outcome::OutOfBounds;
    }
    if !judgement.inputs_changed.is_empty() {
        return Outcome::InputChanged;
    }
    let wrong = || judgement.outputs.iter().filter(|output| !output.pass || output.unwritten.unwrap_or(0) > 0);
    if wrong().any(|output| output.unwritten.unwrap_or(0) > 0) {
        return Outcome::Unwritten;
    }
    match wrong().any(|output| output.nonfinite > 0) {
        true => Outcome::Nonfinite,
        false => Outcome::Wrong,
    }
}

/// One line on a wrong result.
pub fn summary(failure: &Failure) -> String {
    let judgement = &failure.judgement;
    if let Some(zone) = judgement.red_zones.first() {
        return format!("it writes {} bytes {} {}", zone.offset, zone.side, zone.near);
    }
    if let Some(name) = judgement.inputs_changed.first() {
        return format!("it writes to {name}, which is read-only");
    }
    // The one that the outcome is named after.
    let rank = |output: &&OutputJudgement| (output.unwritten.unwrap_or(0) == 0, output.nonfinite == 0);
    let wrong = judgement.outputs.iter().filter(|output| !output.pass || output.unwritten.unwrap_or(0) > 0);
    let Some(output) = wrong.min_by_key(rank) else { return "its results are wrong".to_owned() };
    let (name, total) = (&output.name, output.total);
    match output {
        OutputJudgement { unwritten: Some(count @ 1..), .. } => {
            format!("{count} of {total} elements of {name} hold what was there before the run")
        }
        OutputJudgement { nonfinite: count @ 1.., .. } => {
            format!("{count} of {total} elements of {name} are infinite or NaN where the reference is finite")
        }
        OutputJudgement { reason: Some(Defect::Zeros), .. } => format!("{name} is all zeros"),
        OutputJudgement { mismatched: 0, .. } => format!("{name} is less precise than the policy allows"),
        OutputJudgement { mismatched, .. } => format!("{mismatched} of {total} elements of {name} are wrong"),
    }
}
