//! The stage kind `kernels/profile`: tasks in, their baselines on one device out.

use std::collections::BTreeMap;

use cuda_agent_protocol::{Program, ProgramError, Request, RowInput, RowResult, RowStatus};
use serde_json::{Map, Value, json};

use super::{environment, evaluator, flag, number, seconds, template};
use crate::baseline::Baseline;
use crate::candidate::without_byte_order_mark;
use crate::evaluator::{Evaluator, PROFILE_LANES, Profiled, TimedBaseline, Wanted, secret};
use crate::fault::EvaluatorError;
use crate::profile::roofline;
use crate::reference::{Answered, Task};

/// Runs the stage.
pub fn main() -> u8 {
    Program::main(|program| {
        let request = program.request.clone();
        let (wanted, template) = (Choice::of(&request)?, template(&request)?);
        let evaluator = evaluator(&request, seconds(&request, "time_limit_s"), PROFILE_LANES, &wanted.baselines)?;
        program.each_row_at_once(evaluator.width(), |row| answer(&evaluator, &wanted, &template, &row))
    })
}

/// The least number of trials with an interval: of five, it has a chance of 94 %.
const LEAST_TRIALS: u32 = 6;

struct Choice {
    baselines: Vec<Baseline>,
    trials: u32,
    screen: bool,
    kernel_times: bool,
}

impl Choice {
    fn of(request: &Request) -> Result<Self, ProgramError> {
        let trials = number(request, "trials") as u32;
        if (1..LEAST_TRIALS).contains(&trials) {
            return Err(ProgramError {
                kind: "params".into(),
                message: format!("trials is {trials}: fewer than {LEAST_TRIALS} give no interval at 95 %"),
                hint: Some("`trials: 0` takes no times".into()),
            });
        }
        let others = [Baseline::Compile, Baseline::Autotune].into_iter().filter(|name| flag(request, name.word()));
        let baselines = [Baseline::Eager].into_iter().chain(others).filter(|_| trials > 0);
        Ok(Self {
            baselines: baselines.collect(),
            trials,
            screen: flag(request, "screen"),
            kernel_times: flag(request, "kernel_times"),
        })
    }
}

fn answer(evaluator: &Evaluator, wanted: &Choice, template: &Task, row: &RowInput) -> Result<RowResult, ProgramError> {
    let result = |status, reason: Option<&str>, detail, outputs| RowResult {
        row: row.row.clone(),
        status,
        reason: reason.map(str::to_owned),
        detail,
        outputs,
    };
    let Some(code) = row.columns.get("code").and_then(Value::as_str) else {
        return Ok(result(RowStatus::Rejected, Some("format"), Some("the row has no code".into()), BTreeMap::new()));
    };
    let task = Task { code: without_byte_order_mark(code), ..template.clone() };
    Ok(match profile(evaluator, wanted, &task, row.seed as u64) {
        Ok(baselines) => {
            result(RowStatus::Done, None, None, BTreeMap::from([("baselines".to_owned(), vec![baselines])]))
        }
        Err(error) => {
            evaluator.is_in_service().map_err(environment)?;
            result(RowStatus::Failed, Some("evaluator"), Some(error.message), BTreeMap::new())
        }
    })
}

/// The columns of a task; one that cannot be worked with has only its error.
fn profile(
    evaluator: &Evaluator,
    wanted: &Choice,
    task: &Task,
    seed: u64,
) -> Result<Map<String, Value>, EvaluatorError> {
    Ok(match measure(evaluator, wanted, task, seed)? {
        Ok(columns) => columns,
        // Another day, or another card, may have more: nothing to remember a row by.
        Err(error) if error.is_memory() => return Err(EvaluatorError::new(error.message)),
        Err(error) => {
            let message =
                error.line.map_or_else(|| error.message.clone(), |line| format!("line {line}: {}", error.message));
            object(json!({ "profile_error_kind": error.kind, "profile_error": message }))
        }
    })
}

fn measure(evaluator: &Evaluator, wanted: &Choice, task: &Task, seed: u64) -> Answered<Map<String, Value>> {
    let profiled = evaluator.profile(&Wanted {
        task,
        names: &wanted.baselines,
        trials: wanted.trials,
        seed: seed ^ secret()?,
        screen: wanted.screen,
        kernel_times: wanted.kernel_times,
    })?;
    Ok(profiled.map(|profiled| columns(task, &profiled, wanted.trials)))
}

fn columns(task: &Task, profiled: &Profiled, trials: u32) -> Map<String, Value> {
    let (described, screened) = (&profiled.described, profiled.screened.as_ref());
    let limit = roofline::of_task(&described.spec, task.policy, &described.device.name);
    let mut columns = object(json!({
        "trials": trials,
        "flops": described.spec.flops,
        "bytes": described.spec.bytes,
        "roofline_ms": limit.map(|limit| limit.ms),
        "roofline_limit": limit.map(|limit| limit.bound),
        "degenerate": profiled.degenerate(),
        "screen": screened.map(Value::to_string),
        "profile_device": described.device.name,
    }));
    for baseline in &profiled.baselines {
        columns.extend(times(baseline));
    }
    columns
}

fn times(baseline: &TimedBaseline) -> Map<String, Value> {
    let name = baseline.name;
    let mut columns = object(json!({
        format!("profile_{name}_ms"): baseline.ms.map(|ms| ms.estimate),
        format!("profile_{name}_low_ms"): baseline.ms.map(|ms| ms.low),
        format!("profile_{name}_high_ms"): baseline.ms.map(|ms| ms.high),
        format!("profile_{name}_kernel_ms"): baseline.kernel_ms,
    }));
    if name != Baseline::Eager {
        columns.insert(format!("profile_{name}_s"), json!(baseline.prepared.seconds));
    }
    if let Some(why) = &baseline.prepared.error {
        columns.insert("profile_error".into(), json!(format!("{name}: {why}")));
    }
    columns
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => unreachable!("it was written as one"),
    }
}
