//! The stage kind `kernels/evaluate`: candidates in, verdicts out.

use std::collections::BTreeMap;
use std::sync::Mutex;

use cuda_agent_protocol::{Event, Program, ProgramError, Request, RowInput, RowResult, RowStatus};
use serde_json::{Map, Value, json};

use super::{environment, evaluator, flag, number, seconds, template};
use crate::baseline::Baseline;
use crate::candidate::{Candidate, without_byte_order_mark};
use crate::compile::KernelResources;
use crate::evaluator::{Evaluator, Settings, VERDICT_LANES, secret};
use crate::fault::EvaluatorError;
use crate::reference::{STEP_LIMIT, Task};
use crate::verdict::{Compared, Verdict};

/// Runs the stage.
pub fn main() -> u8 {
    Program::main(|program| {
        let request = program.request.clone();
        let (settings, template) = (settings(&request)?, template(&request)?);
        let evaluator = evaluator(&request, STEP_LIMIT, VERDICT_LANES, &settings.baselines)?;
        let (width, told) = (evaluator.width(), Mutex::<BTreeMap<String, usize>>::default());
        program.each_row_at_once(width, |row| {
            let result = answer(&evaluator, &settings, &template, row)?;
            if let Some(outcome) = outcome(&result) {
                *told.lock().expect("no panics while it is held").entry(outcome).or_default() += 1;
            }
            Ok(result)
        })?;
        let told = told.into_inner().expect("no panics while it was held");
        if !told.is_empty() {
            program.send(&summary(&told));
        }
        Ok(())
    })
}

fn outcome(result: &RowResult) -> Option<String> {
    Some(result.outputs.get("verdicts")?.first()?.get("outcome")?.as_str()?.to_owned())
}

/// How many of which outcome; a warning where nothing was judged at all, which is a mistake in most cases.
fn summary(told: &BTreeMap<String, usize>) -> Event {
    let nothing = told.keys().all(|outcome| outcome == "task_error" || outcome == "unsupported");
    let counts: Vec<String> = told.iter().map(|(outcome, count)| format!("{count} {outcome}")).collect();
    let level = if nothing { "warning" } else { "info" };
    Event::Log { level: level.into(), message: format!("verdicts: {}", counts.join(", ")) }
}

/// How candidates are judged, by the stage's parameters.
pub(super) fn settings(request: &Request) -> Result<Settings, ProgramError> {
    let mut baselines = Vec::new();
    if flag(request, "timing") {
        baselines.push(Baseline::Eager);
        baselines.extend(flag(request, "compile").then_some(Baseline::Compile));
    }
    Ok(Settings {
        inputs: number(request, "inputs") as u32,
        limit: seconds(request, "time_limit_s"),
        baselines,
        max_trials: number(request, "max_trials") as u32,
        sanitizer: flag(request, "sanitizer"),
        reward: super::reward(request)?,
    })
}

fn answer(
    evaluator: &Evaluator,
    settings: &Settings,
    template: &Task,
    row: RowInput,
) -> Result<RowResult, ProgramError> {
    Ok(match judge(evaluator, settings, template, &row) {
        Ok(verdict) => finished(row.row, RowStatus::Done, None, None, Some(columns(&verdict))),
        Err(Refused::Row(reason)) => finished(row.row, RowStatus::Rejected, Some("format"), Some(reason), None),
        Err(Refused::Machine(error)) => {
            evaluator.is_in_service().map_err(environment)?;
            finished(row.row, RowStatus::Failed, Some("evaluator"), Some(error.message), None)
        }
    })
}

enum Refused {
    /// The row makes no sense, now or ever.
    Row(String),
    /// The evaluator could not do its work.
    Machine(EvaluatorError),
}

fn judge(evaluator: &Evaluator, settings: &Settings, template: &Task, row: &RowInput) -> Result<Verdict, Refused> {
    let column = |name: &str| row.columns.get(name).and_then(Value::as_str);
    let missing = |name: &str| Refused::Row(format!("the row has no {name}"));
    let format = column("format").ok_or_else(|| missing("format"))?;
    let format = serde_json::from_value(json!(format))
        .map_err(|_| Refused::Row(format!("`{format}` is neither kernel nor launch")))?;
    let source = without_byte_order_mark(column("source").ok_or_else(|| missing("source"))?);
    let code = without_byte_order_mark(column("code").ok_or_else(|| missing("code"))?);
    let task = Task { code, ..template.clone() };
    let candidate = Candidate { format, source, name: "candidate.cu".into() };
    // A row's seed is public, so that alone would let a candidate know its inputs.
    let seed = secret().map_err(Refused::Machine)? ^ row.seed as u64;
    let verdict = evaluator.evaluate(&task, &candidate, seed, settings).map_err(Refused::Machine)?;
    // Another day, or another card, may have more: nothing to remember a row by.
    match &verdict.task_error {
        Some(error) if error.is_memory() => Err(Refused::Machine(EvaluatorError::new(error.message.clone()))),
        _ => Ok(verdict),
    }
}

fn finished(
    row: String,
    status: RowStatus,
    reason: Option<&str>,
    detail: Option<String>,
    verdict: Option<Map<String, Value>>,
) -> RowResult {
    let outputs = verdict.map(|verdict| BTreeMap::from([("verdicts".to_owned(), vec![verdict])])).unwrap_or_default();
    RowResult { row, status, reason: reason.map(str::to_owned), detail, outputs }
}

fn columns(verdict: &Verdict) -> Map<String, Value> {
    let performance = verdict.performance.as_ref();
    let side = |baseline| performance.and_then(|performance| performance.baselines.get(&baseline)).copied();
    let kernels = verdict.compiled.as_ref().map_or(&[][..], |compiled| &compiled.kernels);
    let most = |of: fn(&KernelResources) -> u32| kernels.iter().map(of).max();
    let mut row = json!({
        "outcome": verdict.outcome,
        "correct": verdict.outcome.is_verdict().then(|| verdict.is_correct()),
        "reward": verdict.reward,
        "candidate_ms": performance.map(|performance| performance.candidate_ms),
        "roofline_share": performance.and_then(|performance| performance.roofline.as_ref()).map(|roofline| roofline.share),
        "trials": performance.map(|performance| performance.trials),
        "registers": most(|kernel| kernel.registers),
        "shared_bytes": most(|kernel| kernel.shared_bytes),
        "spill_bytes": most(|kernel| kernel.spill_load_bytes + kernel.spill_store_bytes),
        "compile_s": verdict.compiled.as_ref().map(|compiled| compiled.seconds),
        "message": verdict.message,
        "verdict": serde_json::to_string(verdict).expect("plain data"),
    });
    let row = row.as_object_mut().expect("it is one");
    for (name, compared) in [Baseline::Eager, Baseline::Compile].map(|baseline| (baseline, side(baseline))) {
        let mut put = |column: String, value: fn(Compared) -> f64| row.insert(column, json!(compared.map(value)));
        put(format!("{name}_ms"), |compared| compared.ms);
        put(format!("speedup_{name}"), |compared| compared.speedup);
        put(format!("speedup_{name}_low"), |compared| compared.low);
        put(format!("speedup_{name}_high"), |compared| compared.high);
    }
    row.clone()
}
