//! The programs of the training kinds: a request in, model and table artifacts out.
//!
//! All of them are loops of steps with a checkpoint in the stage's state folder: whoever is killed at any instant goes on
//! from the last one, and reaches the same numbers, since a step depends on the checkpoint and the inputs alone. A stage with
//! several GPUs is several processes ([`processes`]), which all run this.

mod environment;
mod episodes;
mod import_gguf;
mod model;
mod new_model;
mod offline;
mod online;
mod policy;
mod processes;
mod report;
mod table;

use std::path::Path;

use cuda_agent_agent::trajectory::Form;
use cuda_agent_protocol::{Event, InputRequest, Program, ProgramError, Request};
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::report::Log;
use crate::TrainError;
use crate::checkpoint::Checkpoints;
use crate::group::Group;
use crate::trainer::Metrics;

/// Runs the program of a kind in the current folder; its exit status.
pub fn main(kind: &str) -> u8 {
    processes::main(kind, &|program, group| match kind {
        "train/rft" => offline::rft(program, group),
        "train/import-gguf" => import_gguf::main(program),
        "train/new-model" => new_model::main(program),
        "train/ppo-warmup" => online::ppo(program, Form::Single, group),
        "train/ppo" => online::ppo(program, Form::Repair, group),
        "train/critic-pretrain" => offline::critic_pretrain(program, group),
        other => Err(ProgramError::environment(format!("`{other}` is no kind of this program"))),
    })
}

impl From<TrainError> for ProgramError {
    fn from(error: TrainError) -> Self {
        Self { kind: "internal".into(), message: error.message, hint: error.hint }
    }
}

/// An error of what the stage was given: another try is useless.
fn input(error: TrainError) -> ProgramError {
    ProgramError { kind: "input".into(), ..error.into() }
}

/// The parameters, all of which the engine has filled in.
fn params<T: DeserializeOwned>(request: &Request) -> Result<T, ProgramError> {
    let params = serde_json::Value::Object(request.params.clone());
    serde_json::from_value(params).map_err(|error| ProgramError {
        kind: "params".into(),
        message: error.to_string(),
        hint: None,
    })
}

/// The one input of a port.
fn input_path<'a>(request: &'a Request, port: &str) -> Option<&'a Path> {
    match request.inputs.get(port) {
        Some(InputRequest::One(file)) => Some(&file.path),
        _ => None,
    }
}

/// The one input of a port that the manifest requires.
fn required<'a>(request: &'a Request, port: &str) -> Result<&'a Path, ProgramError> {
    input_path(request, port).ok_or_else(|| ProgramError::input(format!("the stage was given no `{port}`")))
}

/// Where an output goes; the engine asks for every output of the kind.
fn output_path<'a>(request: &'a Request, port: &str) -> &'a Path {
    &request.outputs[port].path
}

/// Reports something to people.
fn say(program: &mut Program, level: &str, message: impl Into<String>) {
    program.send(&Event::Log { level: level.into(), message: message.into() });
}

/// Where checkpoints lie in the state folder.
const CHECKPOINTS: &str = "checkpoints";

/// A training run, as the loop sees it.
trait Run {
    /// Steps that were made.
    fn step(&self) -> u64;
    /// Makes one.
    fn update(&mut self) -> Result<Metrics, TrainError>;
    /// Writes all that the next step depends on.
    fn save(&self, folder: &Path) -> Result<(), TrainError>;
    /// Goes on from that.
    fn load(&mut self, folder: &Path) -> Result<(), TrainError>;
    /// A number that follows from all weights.
    fn fingerprint(&self) -> u64;
}

/// Makes steps up to `steps`, from the newest checkpoint on, and keeps a log of metrics. Of several processes the first one
/// says which checkpoint, and writes them.
fn train(
    program: &mut Program,
    run: &mut dyn Run,
    steps: u64,
    checkpoint_every: u64,
    group: &Group,
) -> Result<Log, ProgramError> {
    let state = program.request.state_dir.clone();
    let checkpoints = Checkpoints::open(&state.join(CHECKPOINTS), 2)?;
    let mut log = Log::default();
    let newest = group.from_first(&json(&checkpoints.newest(steps)?.map(|(step, _)| step)))?;
    let newest: Option<u64> = serde_json::from_slice(&newest).map_err(|error| TrainError::new(error.to_string()))?;
    if let Some(folder) = newest.map(|step| checkpoints.path(step)) {
        run.load(&folder)?;
        log = Log::load(&folder)?;
        say(program, "info", format!("goes on after step {}", run.step()));
    }
    while run.step() < steps {
        let started = std::time::Instant::now();
        let mut metrics = run.update()?;
        metrics.insert("perf/time_per_step".into(), started.elapsed().as_secs_f64());
        let step = run.step();
        for (name, value) in &metrics {
            program.send(&Event::Metric { name: name.clone(), step: Some(step), value: *value });
        }
        log.push(step, metrics);
        program.send(&Event::Progress { done: step, total: Some(steps), unit: "steps".into() });
        if !(step.is_multiple_of(checkpoint_every.max(1)) || step == steps) {
            continue;
        }
        if group.size() > 1 {
            group.check_equal(&format!("the weights after step {step}"), run.fingerprint())?;
        }
        if group.is_first() {
            let path = checkpoints.write(step, |folder| run.save(folder).and_then(|()| log.save(folder)))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            program.send(&Event::Checkpoint { path: format!("{CHECKPOINTS}/{name}"), order: step });
        }
    }
    Ok(log)
}

/// Plain data as the processes of a group give it to each other.
fn json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data")
}
