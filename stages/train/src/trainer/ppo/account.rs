//! What a step of PPO reports.

use tch::{Kind, Tensor};

use super::Prepared;
use crate::TrainError;
use crate::algorithm::correction::Mismatch;
use crate::algorithm::statistics::{explained_variance, masked_mean};
use crate::group::Group;
use crate::trainer::Metrics;

/// A loss as a number; NaN where there is none.
pub fn scalar(tensor: &Tensor) -> f64 {
    f64::try_from(tensor.detach()).unwrap_or(f64::NAN)
}

/// A mean over tokens that is added up over micro-batches.
#[derive(Default)]
pub struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    /// Adds a tensor of values.
    pub fn add(&mut self, values: &Tensor) {
        self.sum += scalar(&values.sum(Kind::Float));
        self.count += values.numel() as f64;
    }

    /// 0 without values.
    pub fn mean(&self) -> f64 {
        if self.count == 0.0 { 0.0 } else { self.sum / self.count }
    }
}

/// Norms of the gradients of one step's updates, before they were scaled.
#[derive(Default)]
pub struct GradNorms {
    largest: f64,
    skipped: f64,
}

impl GradNorms {
    /// Adds an update, and whether it was applied.
    pub fn push(&mut self, norm: f64, applied: bool) {
        self.largest = if applied { self.largest.max(norm) } else { self.largest };
        self.skipped += f64::from(!applied);
    }
}

/// What the updates of one step came to.
#[derive(Default)]
pub struct Updates {
    /// Sum over the updates.
    pub actor_loss: f64,
    /// Of the policy from what it was at the beginning of the step.
    pub actor_kl: Mean,
    /// Share of the tokens.
    pub clipped: Mean,
    /// Share of the tokens whose cost the dual clip bounds.
    pub clipped_lower: Mean,
    /// Of the actor.
    pub actor_grad_norm: GradNorms,
    /// Updates of the actor.
    pub actor_steps: u32,
    /// Tokens that went through the actor, prompts included.
    pub actor_tokens: usize,
    /// Sum over the updates.
    pub critic_loss: f64,
    /// Share of the tokens.
    pub critic_clipped: Mean,
    /// Of the critic.
    pub critic_grad_norm: GradNorms,
    /// Updates of the critic.
    pub critic_steps: u32,
    /// Mini-batches in which nothing counts for the actor.
    pub empty: u32,
}

impl Updates {
    /// Adds up what the processes of a group have each seen of the batch. The rest is the same in all of them.
    pub fn put_together(&mut self, group: &Group) -> Result<(), TrainError> {
        let mut tokens = self.actor_tokens as f64;
        let (kl, clipped, lower) = (&mut self.actor_kl, &mut self.clipped, &mut self.clipped_lower);
        let critic = &mut self.critic_clipped;
        let mut numbers = [&mut self.actor_loss, &mut self.critic_loss, &mut tokens]
            .into_iter()
            .chain([kl, clipped, lower, critic].into_iter().flat_map(|mean| [&mut mean.sum, &mut mean.count]))
            .collect::<Vec<_>>();
        let own: Vec<f64> = numbers.iter().map(|number| **number).collect();
        for (number, total) in numbers.iter_mut().zip(group.totals(&own)?) {
            **number = total;
        }
        self.actor_tokens = tokens as usize;
        Ok(())
    }

    /// Adds them to a step's metrics.
    pub fn report(&self, metrics: &mut Metrics) {
        let mut put = |name: &str, value: f64| {
            metrics.insert(name.to_owned(), value);
        };
        if self.actor_steps > 0 {
            put("actor/pg_loss", self.actor_loss / f64::from(self.actor_steps));
            put("actor/ppo_kl", self.actor_kl.mean());
            put("actor/pg_clipfrac", self.clipped.mean());
            put("actor/pg_clipfrac_lower", self.clipped_lower.mean());
            put("actor/grad_norm", self.actor_grad_norm.largest);
        }
        put("actor/updates", f64::from(self.actor_steps));
        put("actor/tokens_of_updates", self.actor_tokens as f64);
        put("actor/updates_without_signal", f64::from(self.empty));
        put("actor/updates_skipped", self.actor_grad_norm.skipped);
        if self.critic_steps > 0 {
            put("critic/vf_loss", self.critic_loss / f64::from(self.critic_steps));
            put("critic/vf_clipfrac", self.critic_clipped.mean());
            put("critic/grad_norm", self.critic_grad_norm.largest);
            put("critic/updates_skipped", self.critic_grad_norm.skipped);
        }
    }
}

/// What is known before the first update.
pub fn report(prepared: &Prepared, entropies: &[Vec<f64>], metrics: &mut Metrics) {
    let trajectories = &prepared.trajectories;
    let all = |rows: &[Vec<f64>]| rows.concat();
    let mean = |values: &[f64]| masked_mean(values, &vec![true; values.len()]);
    let mut put = |name: &str, value: f64| {
        metrics.insert(name.to_owned(), value);
    };
    let mut spread = |name: &str, values: &[f64]| {
        put(&format!("{name}/mean"), mean(values));
        put(&format!("{name}/max"), values.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        put(&format!("{name}/min"), values.iter().copied().fold(f64::INFINITY, f64::min));
    };
    spread("critic/score", &trajectories.iter().map(|trajectory| trajectory.reward).collect::<Vec<_>>());
    spread("critic/advantages", &all(&prepared.advantages));
    if let Some(values) = &prepared.values {
        spread("critic/values", &all(values));
        spread("critic/returns", &all(&prepared.returns));
    }
    let lengths: Vec<f64> = trajectories.iter().map(|trajectory| trajectory.generated() as f64).collect();
    spread("response_length", &lengths);
    let prompts =
        trajectories.iter().map(|trajectory| trajectory.mask.iter().take_while(|generated| !**generated).count());
    spread("prompt_length", &prompts.map(|length| length as f64).collect::<Vec<_>>());
    spread("num_turns", &trajectories.iter().map(|trajectory| trajectory.turns as f64).collect::<Vec<_>>());
    let truncated = trajectories.iter().filter(|trajectory| trajectory.truncated).count();
    put("response_length/clip_ratio", truncated as f64 / trajectories.len() as f64);
    put("actor/entropy", mean(&all(entropies)));
    if let Some(values) = &prepared.values {
        let (values, returns) = (all(values), all(&prepared.returns));
        put("critic/vf_explained_var", explained_variance(&values, &returns, &vec![true; values.len()]));
    }
    let old = all(&prepared.old);
    let sampler: Vec<f64> =
        trajectories.iter().flat_map(|trajectory| trajectory.at_generated(&trajectory.log_probs)).collect();
    let mismatch = Mismatch::of(&old, &sampler);
    put("training/rollout_probs_diff_max", mismatch.max);
    put("training/rollout_probs_diff_mean", mismatch.mean);
    put("training/rollout_probs_diff_std", mismatch.std);
    let weights = all(&prepared.weights);
    put("rollout_corr/weight_mean", mean(&weights));
    put("rollout_corr/left_out", weights.iter().filter(|weight| **weight == 0.0).count() as f64 / weights.len() as f64);
    if let Some(reference) = &prepared.reference {
        let difference: Vec<f64> = old.iter().zip(all(reference)).map(|(old, reference)| old - reference).collect();
        put("actor/kl_to_reference", mean(&difference));
    }
    let left_out = prepared.counts.iter().filter(|counts| !**counts).count();
    put("actor/trajectories_left_out", left_out as f64 / trajectories.len() as f64);
    put("perf/total_num_tokens", trajectories.iter().map(|trajectory| trajectory.ids.len() as f64).sum());
}
