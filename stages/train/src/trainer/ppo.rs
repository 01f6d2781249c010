//! One step of PPO over a batch of trajectories, in the order of the paper's Eq. 2 and §3.3; with a baseline of groups in
//! place of the critic it is GRPO or one of its kin.
//!
//! Departures from the paper are settings, and the defaults are the paper's: global batch = one mini-batch, one epoch,
//! clip 0.2 / 0.28, γ 1, λ 0.95 for both, per-trajectory mean over tokens, actor 3e-6, critic 6e-6. The paper does not
//! state a KL coefficient (0 here), an entropy bonus (0), whitening (on, as verl), nor a gradient norm (1).

mod account;

use std::path::Path;
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use self::account::{Updates, report, scalar};
use super::division::{evaluate_among, evaluate_values_among, own};
use super::forward::{ForwardSettings, Rows, backward, device, log_probs, micro_batches, side_by_side};
use super::trajectory::Trajectory;
use super::{Metrics, shuffled};
use crate::TrainError;
use crate::algorithm::advantage::{GroupBaseline, gae, lambda_by_length, of_group, whiten};
use crate::algorithm::control::{AdaptiveRate, KlCoefficient, KlEstimate, kl};
use crate::algorithm::correction::{Correction, weights};
use crate::algorithm::loss::{Aggregation, PolicyLoss, value_terms};
use crate::checkpoint::write_file;
use crate::group::Group;
use crate::model::Decoder;
use crate::optimizer::{AdamW, Optimizer};
use crate::random::mix;

/// λ of generalised advantage estimation.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Lambda {
    /// The same for every trajectory.
    Fixed(f64),
    /// 1 − 1/(α·T) for T generated tokens (VAPO).
    ByLength(f64),
}

impl Lambda {
    /// For a trajectory of `tokens` generated tokens.
    pub fn of(self, tokens: usize) -> f64 {
        match self {
            Self::Fixed(lambda) => lambda,
            Self::ByLength(alpha) => lambda_by_length(alpha, tokens),
        }
    }
}

/// Where the KL penalty acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KlPlace {
    /// It is taken from each token's reward.
    Reward,
    /// It is added to the loss.
    Loss,
}

/// The settings of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct PpoSettings {
    /// How decoders are run.
    pub forward: ForwardSettings,
    /// The clipped loss.
    pub policy_loss: PolicyLoss,
    /// How tokens are averaged.
    pub aggregation: Aggregation,
    /// The largest number of tokens of an answer, for [`Aggregation::SeqMeanTokenSumNorm`].
    pub width: usize,
    /// γ.
    pub gamma: f64,
    /// λ of the actor's advantages.
    pub lambda_policy: Lambda,
    /// λ of the critic's targets.
    pub lambda_critic: Lambda,
    /// Instead of the critic; `None` is PPO.
    pub group_baseline: Option<GroupBaseline>,
    /// Whether advantages get mean 0 and variance 1 over the batch.
    pub whiten: bool,
    /// Whether trajectories of a task whose samples all got the same reward are left out of the actor's loss.
    pub drop_equal_groups: bool,
    /// Whether truncated trajectories are left out of the actor's loss.
    pub drop_truncated: bool,
    /// ε of the value loss; 0 does not clip.
    pub value_clip: f64,
    /// Against sampler and trainer being apart.
    pub correction: Correction,
    /// What is taken for the divergence from the reference.
    pub kl_estimate: KlEstimate,
    /// Where it acts.
    pub kl_place: KlPlace,
    /// Weight of the entropy in the actor's loss.
    pub entropy: f64,
    /// Learning rate of the actor.
    pub actor_rate: f64,
    /// Learning rate of the critic.
    pub critic_rate: f64,
    /// Steps over which both rise from 0.
    pub warmup_steps: u64,
    /// First steps in which the critic alone learns.
    pub critic_only_steps: u64,
    /// Trajectories of an update; 0 takes the whole batch.
    pub mini_batch: usize,
    /// Passes over the batch.
    pub epochs: usize,
    /// The optimizers.
    pub adamw: AdamW,
    /// Of the order of mini-batches.
    pub seed: u64,
}

/// What changes from step to step beside weights and optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Controls {
    step: u64,
    kl: KlCoefficient,
    rate: AdaptiveRate,
}

/// A run of PPO between two steps.
pub struct Ppo {
    settings: PpoSettings,
    actor: Decoder,
    critic: Option<Decoder>,
    reference: Option<Decoder>,
    actor_optimizer: Optimizer,
    critic_optimizer: Option<Optimizer>,
    controls: Controls,
    group: Rc<Group>,
}

/// A batch with what is constant during a step. Entries of inner vectors are generated tokens.
struct Prepared<'a> {
    trajectories: Vec<&'a Trajectory>,
    old: Vec<Vec<f64>>,
    reference: Option<Vec<Vec<f64>>>,
    values: Option<Vec<Vec<f64>>>,
    advantages: Vec<Vec<f64>>,
    returns: Vec<Vec<f64>>,
    weights: Vec<Vec<f64>>,
    /// Whether a trajectory counts in the actor's loss.
    counts: Vec<bool>,
}

impl Ppo {
    /// A run at its beginning. `critic` is needed without a group baseline; `reference` where KL counts.
    pub fn new(
        settings: PpoSettings,
        actor: Decoder,
        critic: Option<Decoder>,
        reference: Option<Decoder>,
        kl: KlCoefficient,
        rate: AdaptiveRate,
    ) -> Result<Self, TrainError> {
        if critic.is_none() == settings.group_baseline.is_none() {
            return Err(TrainError::new("PPO needs a critic, and a baseline of groups has none"));
        }
        if kl.beta() > 0.0 && reference.is_none() {
            return Err(TrainError::new("a KL penalty needs a reference model"));
        }
        let actor_optimizer = Optimizer::new(actor.parameters(), settings.adamw);
        let critic_optimizer = critic.as_ref().map(|critic| Optimizer::new(critic.parameters(), settings.adamw));
        let controls = Controls { step: 0, kl, rate };
        let group = Rc::new(Group::alone());
        Ok(Self { settings, actor, critic, reference, actor_optimizer, critic_optimizer, controls, group })
    }

    /// The same as one process of a group, all of which are given the same batches.
    pub fn within(self, group: Rc<Group>) -> Self {
        Self { group, ..self }
    }

    /// The policy.
    pub fn actor(&self) -> &Decoder {
        &self.actor
    }

    /// The critic, where there is one.
    pub fn critic(&self) -> Option<&Decoder> {
        self.critic.as_ref()
    }

    /// Steps that were made.
    pub fn step(&self) -> u64 {
        self.controls.step
    }

    /// A number that follows from all weights and moments.
    pub fn fingerprint(&self) -> u64 {
        let critic = self.critic_optimizer.as_ref().map_or(0, Optimizer::fingerprint);
        mix(self.actor_optimizer.fingerprint()) ^ critic
    }

    /// Writes all that the next step depends on into a folder.
    pub fn save(&self, folder: &Path) -> Result<(), TrainError> {
        let controls = serde_json::to_vec_pretty(&self.controls).expect("plain data");
        write_file(&folder.join("controls.json"), &controls)?;
        self.actor_optimizer.save(&folder.join("actor.safetensors"))?;
        self.critic_optimizer.iter().try_for_each(|optimizer| optimizer.save(&folder.join("critic.safetensors")))
    }

    /// Goes on from what [`Self::save`] wrote.
    pub fn load(&mut self, folder: &Path) -> Result<(), TrainError> {
        let path = folder.join("controls.json");
        let text = std::fs::read(&path).map_err(TrainError::file(&path))?;
        self.controls = serde_json::from_slice(&text).map_err(TrainError::file(&path))?;
        self.actor_optimizer.load(&folder.join("actor.safetensors"))?;
        let path = folder.join("critic.safetensors");
        self.critic_optimizer.iter_mut().try_for_each(|optimizer| optimizer.load(&path))
    }

    /// One step on trajectories that the policy has just sampled.
    pub fn update(&mut self, batch: &[Trajectory]) -> Result<Metrics, TrainError> {
        batch.iter().try_for_each(Trajectory::check)?;
        if batch.is_empty() {
            return Err(TrainError::new("a step without trajectories"));
        }
        let mut metrics = Metrics::new();
        let prepared = self.prepare(batch, &mut metrics)?;
        let size = if self.settings.mini_batch == 0 { batch.len() } else { self.settings.mini_batch };
        let mut updates = Updates::default();
        for epoch in 0..self.settings.epochs.max(1) as u64 {
            let order = if size >= batch.len() {
                (0..batch.len()).collect()
            } else {
                shuffled(batch.len(), self.settings.seed, (self.controls.step << 8) + epoch)
            };
            for mini_batch in order.chunks(size) {
                let mut mini_batch = mini_batch.to_vec();
                side_by_side(&mut mini_batch, |index| prepared.trajectories[index]);
                self.update_critic(&prepared, &mini_batch, &mut updates)?;
                if self.controls.step >= self.settings.critic_only_steps {
                    self.update_actor(&prepared, &mini_batch, &mut updates)?;
                }
            }
        }
        updates.put_together(&self.group)?;
        updates.report(&mut metrics);
        if let Some(kl) = metrics.get("actor/kl_to_reference") {
            self.controls.kl.update(*kl, batch.len());
        }
        self.controls.rate.update(updates.actor_kl.mean().abs());
        self.controls.step += 1;
        metrics.insert("actor/kl_coefficient".into(), self.controls.kl.beta());
        metrics.insert("actor/lr".into(), self.rate(self.settings.actor_rate));
        Ok(metrics)
    }

    /// The learning rate of this step.
    fn rate(&self, configured: f64) -> f64 {
        let warmup = (self.controls.step + 1) as f64 / self.settings.warmup_steps.max(1) as f64;
        configured * warmup.min(1.0) * self.controls.rate.factor
    }

    fn prepare<'a>(&self, batch: &'a [Trajectory], metrics: &mut Metrics) -> Result<Prepared<'a>, TrainError> {
        let settings = &self.settings;
        let trajectories: Vec<&Trajectory> = batch.iter().collect();
        let evaluate = |model| evaluate_among(&self.group, model, &trajectories, &settings.forward);
        let said = evaluate(&self.actor)?;
        let reference = self.reference.as_ref().map(evaluate).transpose()?.map(|said| said.values);
        let values = self.critic.as_ref();
        let values = values.map(|critic| evaluate_values_among(&self.group, critic, &trajectories, &settings.forward));
        let values = values.transpose()?;
        let mut prepared = Prepared {
            old: said.values,
            reference,
            values,
            advantages: Vec::new(),
            returns: Vec::new(),
            weights: Vec::new(),
            counts: counts(batch, settings),
            trajectories,
        };
        self.estimate(&mut prepared);
        for (index, trajectory) in prepared.trajectories.iter().enumerate() {
            let (old, sampler) = (&prepared.old[index], trajectory.at_generated(&trajectory.log_probs));
            prepared.weights.push(weights(old, &sampler, &vec![true; old.len()], settings.correction));
        }
        report(&prepared, &said.entropies, metrics);
        Ok(prepared)
    }

    /// Advantages and returns from rewards, the KL penalty and the critic or the group.
    fn estimate(&self, prepared: &mut Prepared) {
        let settings = &self.settings;
        let beta = if settings.kl_place == KlPlace::Reward { self.controls.kl.beta() } else { 0.0 };
        let groups = settings.group_baseline.map(|baseline| group_advantages(&prepared.trajectories, baseline));
        for (index, trajectory) in prepared.trajectories.iter().enumerate() {
            let tokens = trajectory.generated();
            let mut rewards = vec![0.0; tokens];
            if let (Some(reference), true) = (&prepared.reference, beta > 0.0) {
                let difference = |values: &[f64]| Tensor::from_slice(values);
                let penalty =
                    kl(&difference(&prepared.old[index]), &difference(&reference[index]), settings.kl_estimate);
                rewards = super::forward::numbers(&penalty).iter().map(|kl| -beta * kl).collect();
            }
            let all = vec![true; tokens];
            match (&groups, &prepared.values) {
                (Some(groups), _) => {
                    // Each token gets its trajectory's advantage, and what the penalty takes from there on.
                    let mut later = groups[index];
                    let mut advantages: Vec<f64> = rewards
                        .iter()
                        .rev()
                        .map(|reward| {
                            later += reward;
                            later
                        })
                        .collect();
                    advantages.reverse();
                    prepared.advantages.push(advantages);
                }
                (None, Some(values)) => {
                    rewards[tokens - 1] += trajectory.reward;
                    let estimate =
                        |lambda: Lambda| gae(&rewards, &values[index], &all, settings.gamma, lambda.of(tokens));
                    prepared.advantages.push(estimate(settings.lambda_policy).advantages);
                    prepared.returns.push(estimate(settings.lambda_critic).returns);
                }
                (None, None) => unreachable!("a run has a critic or a baseline"),
            }
        }
        if settings.whiten {
            // By those that count alone: the others would shift them.
            let masks: Vec<Vec<bool>> = prepared
                .advantages
                .iter()
                .zip(&prepared.counts)
                .map(|(row, counts)| vec![*counts; row.len()])
                .collect();
            whiten(&mut prepared.advantages, &masks);
        }
    }

    fn update_critic(
        &mut self,
        prepared: &Prepared,
        mini_batch: &[usize],
        updates: &mut Updates,
    ) -> Result<(), TrainError> {
        let rate = self.rate(self.settings.critic_rate) / self.controls.rate.factor;
        let (Some(critic), Some(optimizer)) = (&self.critic, &mut self.critic_optimizer) else { return Ok(()) };
        let Some(old_values) = &prepared.values else { return Ok(()) };
        let settings = &self.settings;
        let share = token_weights(prepared, mini_batch, settings, false);
        let device = device(critic);
        for part in parts(prepared, mini_batch, &share, settings, &self.group) {
            let trajectories: Vec<&Trajectory> = part.iter().map(|(_, index)| prepared.trajectories[*index]).collect();
            let rows = Rows::new(&trajectories, device);
            let old = flat(&part, device, |_, index| old_values[index].clone());
            let returns = flat(&part, device, |_, index| prepared.returns[index].clone());
            let weights = flat(&part, device, |place, _| share[place].clone());
            backward(critic, &rows, &settings.forward, |values, _, chunk| {
                let rows = |tensor: &Tensor| tensor.narrow(0, chunk.start as i64, chunk.len() as i64);
                let (terms, clipped) = value_terms(values, &rows(&old), &rows(&returns), settings.value_clip);
                let loss = (terms * rows(&weights)).sum(Kind::Float);
                updates.critic_loss += scalar(&loss);
                updates.critic_clipped.add(&clipped);
                loss
            });
            optimizer.accumulate();
        }
        self.group.sum(optimizer.gradient())?;
        let step = optimizer.step(rate);
        updates.critic_grad_norm.push(step.grad_norm, step.applied);
        updates.critic_steps += 1;
        Ok(())
    }

    fn update_actor(
        &mut self,
        prepared: &Prepared,
        mini_batch: &[usize],
        updates: &mut Updates,
    ) -> Result<(), TrainError> {
        let rate = self.rate(self.settings.actor_rate);
        let settings = &self.settings;
        let share = token_weights(prepared, mini_batch, settings, true);
        if share.iter().flatten().all(|weight| *weight == 0.0) {
            updates.empty += 1;
            return Ok(());
        }
        let device = device(&self.actor);
        let beta = if settings.kl_place == KlPlace::Loss { self.controls.kl.beta() } else { 0.0 };
        for part in parts(prepared, mini_batch, &share, settings, &self.group) {
            let trajectories: Vec<&Trajectory> = part.iter().map(|(_, index)| prepared.trajectories[*index]).collect();
            let rows = Rows::new(&trajectories, device);
            updates.actor_tokens += trajectories.iter().map(|trajectory| trajectory.ids.len()).sum::<usize>();
            let old = flat(&part, device, |_, index| prepared.old[index].clone());
            let advantages = flat(&part, device, |_, index| prepared.advantages[index].clone());
            let weights = flat(&part, device, |place, _| share[place].clone());
            let reference = prepared.reference.as_ref().filter(|_| beta > 0.0);
            let reference = reference.map(|values| flat(&part, device, |_, index| values[index].clone()));
            backward(&self.actor, &rows, &settings.forward, |logits, targets, chunk| {
                let rows = |tensor: &Tensor| tensor.narrow(0, chunk.start as i64, chunk.len() as i64);
                let (new, entropy) = log_probs(logits, targets, settings.forward.temperature, settings.entropy != 0.0);
                let terms = settings.policy_loss.terms(&new, &rows(&old), &rows(&advantages));
                let weights = rows(&weights);
                let mut loss = (&terms.loss * &weights).sum(Kind::Float);
                updates.actor_loss += scalar(&loss);
                if settings.entropy != 0.0 {
                    loss -= (entropy * &weights).sum(Kind::Float) * settings.entropy;
                }
                if let Some(reference) = &reference {
                    let divergence = kl(&new, &rows(reference), settings.kl_estimate);
                    loss += (divergence * &weights).sum(Kind::Float) * beta;
                }
                updates.actor_kl.add(&terms.kl);
                updates.clipped.add(&terms.clipped);
                updates.clipped_lower.add(&terms.clipped_lower);
                loss
            });
            self.actor_optimizer.accumulate();
        }
        self.group.sum(self.actor_optimizer.gradient())?;
        let step = self.actor_optimizer.step(rate);
        updates.actor_grad_norm.push(step.grad_norm, step.applied);
        updates.actor_steps += 1;
        Ok(())
    }
}

/// Which trajectories count in the actor's loss.
fn counts(batch: &[Trajectory], settings: &PpoSettings) -> Vec<bool> {
    let is_equal = |task: &str| {
        let mut rewards = batch.iter().filter(|other| other.task == task).map(|other| other.reward);
        let first = rewards.next();
        rewards.all(|reward| Some(reward) == first)
    };
    let counts = |trajectory: &Trajectory| {
        !(settings.drop_truncated && trajectory.truncated || settings.drop_equal_groups && is_equal(&trajectory.task))
    };
    batch.iter().map(counts).collect()
}

fn group_advantages(trajectories: &[&Trajectory], baseline: GroupBaseline) -> Vec<f64> {
    let mut groups: std::collections::BTreeMap<&str, Vec<usize>> = std::collections::BTreeMap::new();
    for (index, trajectory) in trajectories.iter().enumerate() {
        groups.entry(&trajectory.task).or_default().push(index);
    }
    let mut advantages = vec![0.0; trajectories.len()];
    for members in groups.values() {
        let rewards: Vec<f64> = members.iter().map(|index| trajectories[*index].reward).collect();
        for (index, advantage) in members.iter().zip(of_group(&rewards, baseline)) {
            advantages[*index] = advantage;
        }
    }
    advantages
}

/// Each generated token's weight in the loss of a mini-batch, by place in it. What doesn't count in the actor's loss has
/// weight 0, and is not counted in the denominator either.
fn token_weights(prepared: &Prepared, mini_batch: &[usize], settings: &PpoSettings, actor: bool) -> Vec<Vec<f64>> {
    let corrections = |index: usize| -> Vec<f64> {
        match actor {
            true if !prepared.counts[index] => vec![0.0; prepared.old[index].len()],
            true => prepared.weights[index].clone(),
            false => vec![1.0; prepared.old[index].len()],
        }
    };
    let corrections: Vec<Vec<f64>> = mini_batch.iter().map(|index| corrections(*index)).collect();
    let tokens: Vec<usize> = corrections.iter().map(|row| row.iter().filter(|weight| **weight > 0.0).count()).collect();
    let shares = settings.aggregation.weights(&tokens, settings.width);
    let scaled =
        corrections.into_iter().zip(shares).map(|(row, share)| row.into_iter().map(|weight| weight * share).collect());
    scaled.collect()
}

/// This process's micro-batches of a mini-batch: for each trajectory its place in the mini-batch and its index in the batch. Those without
/// any weight are left out: in groups of equal rewards they can be nine of ten, and computing them changes nothing.
fn parts(
    prepared: &Prepared,
    mini_batch: &[usize],
    share: &[Vec<f64>],
    settings: &PpoSettings,
    group: &Group,
) -> Vec<Vec<(usize, usize)>> {
    let counting: Vec<(usize, usize)> = mini_batch
        .iter()
        .copied()
        .enumerate()
        .filter(|(place, _)| share[*place].iter().any(|weight| *weight != 0.0))
        .collect();
    let trajectories: Vec<&Trajectory> = counting.iter().map(|(_, index)| prepared.trajectories[*index]).collect();
    let own = own(&trajectories, group);
    let ranges = micro_batches(&trajectories[own.clone()], settings.forward.micro_batch_tokens);
    ranges.into_iter().map(|range| counting[own.clone()][range].to_vec()).collect()
}

/// The values of a micro-batch's rows, float32.
fn flat(part: &[(usize, usize)], device: tch::Device, values: impl Fn(usize, usize) -> Vec<f64>) -> Tensor {
    let all: Vec<f64> = part.iter().flat_map(|(place, index)| values(*place, *index)).collect();
    Tensor::from_slice(&all).to_kind(Kind::Float).to_device(device)
}

#[cfg(test)]
mod tests;
