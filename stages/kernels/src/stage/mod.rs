//! The stage kinds of this crate.

pub mod evaluate;
mod judge;
pub mod profile;

pub use judge::judge;

use std::path::PathBuf;
use std::time::Duration;

use cuda_agent_protocol::{ProgramError, Request};
use serde_json::Value;

use crate::baseline::Baseline;
use crate::evaluator::{Device, Evaluator, Setup, compiles};
use crate::fault::EvaluatorError;
use crate::reference::{Policy, Protocol, Task};
use crate::reward::{Scheme, Weights};

/// The evaluator's error as a program reports it.
pub fn environment(error: EvaluatorError) -> ProgramError {
    ProgramError { hint: error.hint, ..ProgramError::environment(error.message) }
}

/// Starts an evaluator on what the stage was given.
fn evaluator(
    request: &Request,
    step_limit: Duration,
    lanes: usize,
    baselines: &[Baseline],
) -> Result<Evaluator, ProgramError> {
    evaluator_on(request, device(request)?, step_limit, lanes, compiles(baselines))
}

fn evaluator_on(
    request: &Request,
    device: Device,
    step_limit: Duration,
    lanes: usize,
    compiles: bool,
) -> Result<Evaluator, ProgramError> {
    let executable = crate::own_program().map_err(environment)?;
    let python = std::env::var_os("CUDA_AGENT_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from);
    let setup = Setup {
        device,
        executable,
        python,
        cache: request.state_dir.join("kernels"),
        cores: request.resources.cpu.max(1) as usize,
        lanes,
        compiles,
        step_limit,
    };
    Evaluator::new(&setup).map_err(environment)
}

/// The GPUs of the grant, or the CPU device; the parameter must agree.
fn device(request: &Request) -> Result<Device, ProgramError> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let gpus: Vec<String> = visible.split(',').filter(|gpu| !gpu.is_empty()).map(str::to_owned).collect();
    let wanted = text(request, "device");
    let mismatch = |message: &str, hint: &str| {
        Err(ProgramError { kind: "device".into(), message: message.into(), hint: Some(hint.into()) })
    };
    match (wanted, request.resources.gpus.is_empty()) {
        ("cuda", true) => mismatch("device: cuda, but the stage was given no GPU", "give it one: resources: {gpu: 1}"),
        ("cpu", false) => mismatch("device: cpu, but the stage was given a GPU", "take `gpu` out of its resources"),
        (_, true) => Ok(Device::Cpu),
        (_, false) => Ok(Device::Cuda(gpus)),
    }
}

fn parameter<'a>(request: &'a Request, name: &str) -> &'a Value {
    request.params.get(name).unwrap_or(&Value::Null)
}

fn text<'a>(request: &'a Request, name: &str) -> &'a str {
    parameter(request, name).as_str().unwrap_or_default()
}

fn flag(request: &Request, name: &str) -> bool {
    parameter(request, name).as_bool().unwrap_or_default()
}

fn number(request: &Request, name: &str) -> f64 {
    parameter(request, name).as_f64().unwrap_or_default()
}

/// A number of seconds; one that no clock can count is a year.
fn seconds(request: &Request, name: &str) -> Duration {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    Duration::try_from_secs_f64(number(request, name)).map_or(YEAR, |limit| limit.min(YEAR))
}

/// A parameter whose manifest lists the words that the type has.
fn choice<T: serde::de::DeserializeOwned>(request: &Request, name: &str) -> Result<T, ProgramError> {
    let value = parameter(request, name);
    serde_json::from_value(value.clone()).map_err(|error| ProgramError {
        kind: "params".into(),
        message: format!("{name}: {value}: {error}"),
        hint: None,
    })
}

/// The parameter `set`.
fn overrides(request: &Request) -> serde_json::Map<String, Value> {
    parameter(request, "set").as_object().cloned().unwrap_or_default()
}

/// The parameter `reward`, with its weights.
fn reward(request: &Request) -> Result<Scheme, ProgramError> {
    Ok(match text(request, "reward") {
        "milestone" => Scheme::Milestone,
        "continuous" => Scheme::Continuous,
        _ => {
            let weights = Weights {
                registers: number(request, "register_weight"),
                shared_memory: number(request, "shared_memory_weight"),
                code: number(request, "code_weight"),
            };
            Scheme::Weighted(choice(request, "weighted_by")?, weights)
        }
    })
}

/// A task without its code.
fn template(request: &Request) -> Result<Task, ProgramError> {
    let (protocol, policy): (Protocol, Policy) = (choice(request, "protocol")?, choice(request, "policy")?);
    Ok(Task { code: String::new(), name: "the task".into(), set: overrides(request), protocol, policy })
}
