//! `train/rft` and `train/critic-pretrain`: training on a table of trajectories.

use std::path::Path;
use std::rc::Rc;

use cuda_agent_protocol::{Program, ProgramError};
use serde::Deserialize;
use serde_json::json;

use super::model::{ModelParams, write, write_adapter};
use super::{Run, episodes, input_path, output_path, params, required, say, train};
use crate::TrainError;
use crate::algorithm::loss::Aggregation;
use crate::group::Group;
use crate::model::Head;
use crate::optimizer::AdamW;
use crate::trainer::Metrics;
use crate::trainer::funnel::{FunnelSettings, Passed, funnel};
use crate::trainer::ppo::Lambda;
use crate::trainer::supervised::{Objective, Supervised, SupervisedSettings};

/// What both kinds have.
#[derive(Clone, Copy, Debug, Deserialize)]
struct OptimizerParams {
    learning_rate: f64,
    warmup_steps: u64,
    final_learning_rate: f64,
    weight_decay: f64,
    beta1: f64,
    beta2: f64,
    max_grad_norm: f64,
    batch: usize,
    epochs: u64,
    aggregation: Aggregation,
    checkpoint_every: u64,
    temperature: f64,
    seed: i64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct FunnelParams {
    reward_above: f64,
    max_repeats: usize,
    max_turns: usize,
    per_task: usize,
    drop_truncated: bool,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct ValueParams {
    gamma: f64,
    lambda: f64,
    lambda_alpha: f64,
    value_clip: f64,
}

impl OptimizerParams {
    fn settings(&self, objective: Objective, model: &ModelParams) -> SupervisedSettings {
        SupervisedSettings {
            objective,
            forward: model.forward(self.temperature),
            aggregation: self.aggregation,
            batch: self.batch,
            epochs: self.epochs,
            rate: self.learning_rate,
            warmup_steps: self.warmup_steps,
            final_rate: self.final_learning_rate,
            adamw: AdamW {
                beta1: self.beta1,
                beta2: self.beta2,
                weight_decay: self.weight_decay,
                max_grad_norm: self.max_grad_norm,
                ..AdamW::default()
            },
            seed: self.seed as u64,
        }
    }
}

impl Run for Supervised {
    fn step(&self) -> u64 {
        self.step()
    }

    fn update(&mut self) -> Result<Metrics, TrainError> {
        self.update()
    }

    fn save(&self, folder: &Path) -> Result<(), TrainError> {
        self.save(folder)
    }

    fn load(&mut self, folder: &Path) -> Result<(), TrainError> {
        self.load(folder)
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint()
    }
}

/// Rejection fine-tuning: the likelihood of the trajectories that the funnel keeps.
pub fn rft(program: &mut Program, group: &Rc<Group>) -> Result<(), ProgramError> {
    let request = program.request.clone();
    let (optimizer, model): (OptimizerParams, ModelParams) = (params(&request)?, params(&request)?);
    let FunnelParams { reward_above, max_repeats, max_turns, per_task, drop_truncated } = params(&request)?;
    let read = episodes::read(required(&request, "trajectories")?)?;
    let before = read.episodes.len() + read.without_reward;
    let limits = FunnelSettings { above: reward_above, max_repeats, max_turns, per_task, drop_truncated };
    let (kept, mut account) = funnel(read.episodes, &limits);
    account.insert(0, Passed { filter: "has a reward", before, after: before - read.without_reward });
    say(program, "info", format!("{} of {before} trajectories are kept", kept.len()));
    if group.is_first() {
        let lines = account.iter().map(|passed| json!(passed));
        super::report::write_lines(output_path(&request, "funnel"), lines)?;
    }
    if kept.is_empty() {
        let account: Vec<String> =
            account.iter().map(|passed| format!("{} → {} {}", passed.before, passed.after, passed.filter)).collect();
        return Err(ProgramError::input(format!("no trajectory is left to train on: {}", account.join(", "))));
    }
    let rows = kept.iter().map(|episode| {
        let trajectory = &episode.trajectory;
        json!({"task_digest": trajectory.task, "sample": trajectory.sample, "reward": trajectory.reward,
            "tokens": trajectory.generated()})
    });
    if group.is_first() {
        super::report::write_lines(output_path(&request, "kept"), rows)?;
    }
    let folder = required(&request, "model")?;
    let decoder = model.load(&request, folder, Head::Language)?;
    let trajectories = kept.into_iter().map(|episode| episode.trajectory).collect();
    let settings = optimizer.settings(Objective::Likelihood, &model);
    let run = Supervised::new(settings, decoder, trajectories)?.within(group.clone());
    finish(program, run, &optimizer, ("model", folder), group)
}

/// Value pre-training: the critic alone, on all trajectories.
pub fn critic_pretrain(program: &mut Program, group: &Rc<Group>) -> Result<(), ProgramError> {
    let request = program.request.clone();
    let (optimizer, model): (OptimizerParams, ModelParams) = (params(&request)?, params(&request)?);
    let ValueParams { gamma, lambda, lambda_alpha, value_clip } = params(&request)?;
    let read = episodes::read(required(&request, "trajectories")?)?;
    if read.without_reward > 0 {
        say(program, "info", format!("{} trajectories without a reward are left out", read.without_reward));
    }
    if read.episodes.is_empty() {
        return Err(ProgramError::input("no trajectory has a reward, so there is no value to learn"));
    }
    let folder = match input_path(&request, "critic") {
        Some(critic) => critic,
        None => required(&request, "model")?,
    };
    let critic = model.load(&request, folder, Head::Value)?;
    let trajectories = read.episodes.into_iter().map(|episode| episode.trajectory).collect();
    let lambda = if lambda_alpha > 0.0 { Lambda::ByLength(lambda_alpha) } else { Lambda::Fixed(lambda) };
    let objective = Objective::Value { gamma, lambda, clip: value_clip };
    let settings = optimizer.settings(objective, &model);
    let run = Supervised::new(settings, critic, trajectories)?.within(group.clone());
    finish(program, run, &optimizer, ("critic", folder), group)
}

/// Trains to the end and writes what every kind writes: the model into an output, with the other files of where it came from.
fn finish(
    program: &mut Program,
    mut run: Supervised,
    optimizer: &OptimizerParams,
    (output, origin): (&str, &Path),
    group: &Group,
) -> Result<(), ProgramError> {
    let steps = run.steps();
    let log = train(program, &mut run, steps, optimizer.checkpoint_every, group)?;
    if !group.is_first() {
        return Ok(());
    }
    write(run.model(), output_path(&program.request, output), origin)?;
    if output == "model" {
        write_adapter(run.model(), &program.request)?;
    }
    log.write(&program.request)?;
    Ok(())
}
