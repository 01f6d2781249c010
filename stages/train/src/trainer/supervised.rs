//! Training on trajectories that are given: RFT and value pre-training.
//!
//! RFT (paper §3.3): −E[Σ_t log π(a_t | s_t)] over the trajectories that the [funnel](super::funnel) kept. Value
//! pre-training: V_targ = V(s_t) + Â_t by GAE with the reward at the last token, L = ½ E[(1/T) Σ (V − V_targ)²] over all
//! trajectories, where V in the target is the critic at the beginning of the pass.

use std::path::Path;
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::division::{evaluate_values_among, own};
use super::forward::{ForwardSettings, Rows, backward, device, evaluate, log_probs, micro_batches, side_by_side};
use super::ppo::Lambda;
use super::trajectory::Trajectory;
use super::{Metrics, shuffled};
use crate::TrainError;
use crate::algorithm::advantage::gae;
use crate::algorithm::loss::{Aggregation, value_terms};
use crate::algorithm::statistics::explained_variance;
use crate::checkpoint::write_file;
use crate::group::Group;
use crate::model::Decoder;
use crate::optimizer::{AdamW, Optimizer};

/// What is learned from the trajectories.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Objective {
    /// Their likelihood, by a language model.
    Likelihood,
    /// The value of their states, by a critic.
    Value {
        /// γ.
        gamma: f64,
        /// λ of the targets.
        lambda: Lambda,
        /// ε of the value loss; 0 does not clip.
        clip: f64,
    },
}

/// The settings of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct SupervisedSettings {
    /// What is learned.
    pub objective: Objective,
    /// How the decoder is run.
    pub forward: ForwardSettings,
    /// How tokens are averaged.
    pub aggregation: Aggregation,
    /// Trajectories of an update.
    pub batch: usize,
    /// Passes over all trajectories.
    pub epochs: u64,
    /// The highest learning rate.
    pub rate: f64,
    /// Updates over which it rises from 0.
    pub warmup_steps: u64,
    /// What is left of it at the end of a cosine: 1 keeps it constant.
    pub final_rate: f64,
    /// The optimizer.
    pub adamw: AdamW,
    /// Of the order of trajectories.
    pub seed: u64,
}

/// A run between two updates.
pub struct Supervised {
    settings: SupervisedSettings,
    model: Decoder,
    optimizer: Optimizer,
    trajectories: Vec<Trajectory>,
    progress: Progress,
    group: Rc<Group>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Progress {
    /// Updates that were made.
    step: u64,
    /// Of the current pass, for [`Objective::Value`]: what the critic said at its beginning.
    values: Vec<Vec<f64>>,
}

impl Supervised {
    /// A run at its beginning.
    pub fn new(
        settings: SupervisedSettings,
        model: Decoder,
        trajectories: Vec<Trajectory>,
    ) -> Result<Self, TrainError> {
        trajectories.iter().try_for_each(Trajectory::check)?;
        if trajectories.is_empty() {
            return Err(TrainError::new("no trajectory is left to train on"));
        }
        let optimizer = Optimizer::new(model.parameters(), settings.adamw);
        let (progress, group) = (Progress::default(), Rc::new(Group::alone()));
        Ok(Self { settings, model, optimizer, trajectories, progress, group })
    }

    /// The same as one process of a group, all of which were given the same trajectories.
    pub fn within(self, group: Rc<Group>) -> Self {
        Self { group, ..self }
    }

    /// What is trained.
    pub fn model(&self) -> &Decoder {
        &self.model
    }

    /// Updates that were made.
    pub fn step(&self) -> u64 {
        self.progress.step
    }

    /// Updates of the whole run.
    pub fn steps(&self) -> u64 {
        self.steps_of_a_pass() * self.settings.epochs
    }

    fn steps_of_a_pass(&self) -> u64 {
        self.trajectories.len().div_ceil(self.settings.batch.max(1)) as u64
    }

    /// A number that follows from all weights and moments.
    pub fn fingerprint(&self) -> u64 {
        self.optimizer.fingerprint()
    }

    /// Writes all that the next update depends on into a folder.
    pub fn save(&self, folder: &Path) -> Result<(), TrainError> {
        write_file(&folder.join("progress.json"), &serde_json::to_vec(&self.progress).expect("plain data"))?;
        self.optimizer.save(&folder.join("model.safetensors"))
    }

    /// Goes on from what [`Self::save`] wrote.
    pub fn load(&mut self, folder: &Path) -> Result<(), TrainError> {
        let path = folder.join("progress.json");
        let text = std::fs::read(&path).map_err(TrainError::file(&path))?;
        self.progress = serde_json::from_slice(&text).map_err(TrainError::file(&path))?;
        self.optimizer.load(&folder.join("model.safetensors"))
    }

    /// One update.
    pub fn update(&mut self) -> Result<Metrics, TrainError> {
        let (pass, place) = (self.progress.step / self.steps_of_a_pass(), self.progress.step % self.steps_of_a_pass());
        if place == 0 && matches!(self.settings.objective, Objective::Value { .. }) {
            let all: Vec<&Trajectory> = self.trajectories.iter().collect();
            let forward = &self.settings.forward;
            self.progress.values = evaluate_values_among(&self.group, &self.model, &all, forward)?;
        }
        let order = shuffled(self.trajectories.len(), self.settings.seed, pass);
        let mut batch: Vec<usize> =
            order.chunks(self.settings.batch.max(1)).nth(place as usize).expect("a pass has so many").to_vec();
        side_by_side(&mut batch, |index| &self.trajectories[index]);
        let mut metrics = Metrics::from([("epoch".to_owned(), pass as f64)]);
        match self.settings.objective {
            Objective::Likelihood => self.likelihood(&batch, &mut metrics)?,
            Objective::Value { gamma, lambda, clip } => {
                self.value(&batch, gamma, lambda, clip, &mut metrics)?;
            }
        }
        self.group.sum(self.optimizer.gradient())?;
        let rate = self.rate();
        let step = self.optimizer.step(rate);
        metrics.extend([("grad_norm".into(), step.grad_norm), ("lr".into(), rate)]);
        metrics.insert("updates_skipped".into(), f64::from(!step.applied));
        self.progress.step += 1;
        Ok(metrics)
    }

    fn rate(&self) -> f64 {
        let settings = &self.settings;
        let (step, steps) = (self.progress.step as f64, self.steps() as f64);
        let warmup = ((step + 1.0) / settings.warmup_steps.max(1) as f64).min(1.0);
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * step / steps).cos());
        settings.rate * warmup * (settings.final_rate + (1.0 - settings.final_rate) * cosine)
    }

    /// Each trajectory's token weights, and this process's micro-batches as ranges of `batch`.
    fn divided(&self, batch: &[usize]) -> (Vec<f64>, Vec<std::ops::Range<usize>>) {
        let trajectories: Vec<&Trajectory> = batch.iter().map(|index| &self.trajectories[*index]).collect();
        let tokens: Vec<usize> = trajectories.iter().map(|trajectory| trajectory.generated()).collect();
        let width = tokens.iter().copied().max().unwrap_or_default();
        let weights = self.settings.aggregation.weights(&tokens, width);
        let own = own(&trajectories, &self.group);
        let ranges = micro_batches(&trajectories[own.clone()], self.settings.forward.micro_batch_tokens);
        (weights, ranges.into_iter().map(|range| own.start + range.start..own.start + range.end).collect())
    }

    fn likelihood(&mut self, batch: &[usize], metrics: &mut Metrics) -> Result<(), TrainError> {
        let (weights, ranges) = self.divided(batch);
        let (mut loss_sum, mut log_prob_sum, mut tokens) = (0.0, 0.0, 0.0);
        for range in ranges {
            let (rows, weights) = self.micro_batch(batch, &weights, range);
            let temperature = self.settings.forward.temperature;
            backward(&self.model, &rows, &self.settings.forward, |logits, targets, chunk| {
                let (chosen, _) = log_probs(logits, targets, temperature, false);
                let loss = -(&chosen * weights.narrow(0, chunk.start as i64, chunk.len() as i64)).sum(Kind::Float);
                loss_sum += f64::try_from(loss.detach()).unwrap_or(f64::NAN);
                log_prob_sum += f64::try_from(chosen.detach().sum(Kind::Float)).unwrap_or(f64::NAN);
                tokens += chunk.len() as f64;
                loss
            });
            self.optimizer.accumulate();
        }
        let totals = self.group.totals(&[loss_sum, log_prob_sum, tokens])?;
        metrics.insert("actor/loss".into(), totals[0]);
        metrics.insert("actor/perplexity".into(), (-totals[1] / totals[2]).exp());
        Ok(())
    }

    fn value(
        &mut self,
        batch: &[usize],
        gamma: f64,
        lambda: Lambda,
        clip: f64,
        metrics: &mut Metrics,
    ) -> Result<(), TrainError> {
        let (weights, ranges) = self.divided(batch);
        let device = device(&self.model);
        let targets: Vec<Vec<f64>> = batch.iter().map(|index| self.targets(*index, gamma, lambda)).collect();
        let (mut loss_sum, mut said) = (0.0, Vec::new());
        for range in ranges {
            let returns = tensor(&targets[range.clone()].concat(), device);
            let old: Vec<f64> = range.clone().flat_map(|place| self.progress.values[batch[place]].clone()).collect();
            let old = tensor(&old, device);
            let (rows, weights) = self.micro_batch(batch, &weights, range);
            backward(&self.model, &rows, &self.settings.forward, |values, _, chunk| {
                let rows = |tensor: &Tensor| tensor.narrow(0, chunk.start as i64, chunk.len() as i64);
                said.extend(super::forward::numbers(values));
                let (terms, _) = value_terms(values, &rows(&old), &rows(&returns), clip);
                let loss = (terms * rows(&weights)).sum(Kind::Float);
                loss_sum += f64::try_from(loss.detach()).unwrap_or(f64::NAN);
                loss
            });
            self.optimizer.accumulate();
        }
        let (said, returns) = (self.group.gather_numbers(&said)?.concat(), targets.concat());
        metrics.insert("critic/vf_loss".into(), self.group.totals(&[loss_sum])?[0]);
        metrics.insert("critic/vf_explained_var".into(), explained_variance(&said, &returns, &vec![true; said.len()]));
        Ok(())
    }

    fn targets(&self, index: usize, gamma: f64, lambda: Lambda) -> Vec<f64> {
        let (trajectory, values) = (&self.trajectories[index], &self.progress.values[index]);
        let mut rewards = vec![0.0; values.len()];
        *rewards.last_mut().expect("a trajectory has a generated token") = trajectory.reward;
        gae(&rewards, values, &vec![true; values.len()], gamma, lambda.of(values.len())).returns
    }

    fn micro_batch(&self, batch: &[usize], weights: &[f64], range: std::ops::Range<usize>) -> (Rows, Tensor) {
        let trajectories: Vec<&Trajectory> =
            batch[range.clone()].iter().map(|index| &self.trajectories[*index]).collect();
        let each = trajectories.iter().zip(&weights[range]);
        let each: Vec<f64> = each.flat_map(|(trajectory, weight)| vec![*weight; trajectory.generated()]).collect();
        let device = device(&self.model);
        (Rows::new(&trajectories, device), tensor(&each, device))
    }

    /// How likely the model finds all trajectories: the mean over tokens, in nats; for a held-out set or the end of a run.
    pub fn log_likelihood(&self, trajectories: &[Trajectory]) -> f64 {
        let all: Vec<&Trajectory> = trajectories.iter().collect();
        let said = evaluate(&self.model, &all, &self.settings.forward).values.concat();
        said.iter().sum::<f64>() / said.len().max(1) as f64
    }
}

fn tensor(values: &[f64], device: tch::Device) -> Tensor {
    Tensor::from_slice(values).to_kind(Kind::Float).to_device(device)
}

#[cfg(test)]
mod tests;
