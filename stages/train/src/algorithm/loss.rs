//! What is minimised, a number a token, and how tokens are averaged.
//!
//! Losses take and return tensors with an entry for each *generated* token, of all trajectories of a micro-batch one after
//! another. They are not averaged here: [`Aggregation::weights`] gives each token its weight in the whole batch, so that
//! the sum of weighted losses, and with it the gradient, doesn't depend on how the batch is cut into micro-batches or
//! spread over GPUs.

use tch::{Kind, Tensor};

/// The log-ratio of a token is clamped to this before it is exponentiated.
const MAX_LOG_RATIO: f64 = 20.0;

/// PPO's policy loss (Schulman 2017), clipped apart below and above (DAPO), and from above for what turned out badly
/// (dual clip, Ye 2020).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyLoss {
    /// ε below: the ratio counts down to 1 − this. The paper's 0.2.
    pub clip_low: f64,
    /// ε above: the ratio counts up to 1 + this. The paper's 0.28.
    pub clip_high: f64,
    /// c: for a negative advantage the loss is at most −A·c. 0 leaves it out.
    pub dual_clip: f64,
}

/// The policy loss of each token, and what became of it.
#[derive(Debug)]
pub struct PolicyTerms {
    /// To be minimised; differentiable in the new log-probabilities.
    pub loss: Tensor,
    /// 1 where the ratio was clipped.
    pub clipped: Tensor,
    /// 1 where dual clip took over.
    pub clipped_lower: Tensor,
    /// old − new: the k1 estimate of the divergence of the old policy from the new one.
    pub kl: Tensor,
}

impl PolicyLoss {
    /// `new` needs a gradient; `old` and `advantages` are constants of the same shape.
    pub fn terms(&self, new: &Tensor, old: &Tensor, advantages: &Tensor) -> PolicyTerms {
        assert!(!old.requires_grad() && !advantages.requires_grad(), "old log-probabilities are constants");
        let log_ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO);
        let ratio = log_ratio.exp();
        let free = -advantages * &ratio;
        let bounded = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high);
        let clipped = bounded.gt_tensor(&free);
        let worse = free.max_other(&bounded);
        let negative = advantages.lt(0.0);
        let (loss, clipped_lower) = match self.dual_clip {
            0.0 => (worse, negative.zeros_like()),
            dual_clip => {
                let most = -advantages * dual_clip;
                (worse.min_other(&most).where_self(&negative, &worse), worse.gt_tensor(&most).logical_and(&negative))
            }
        };
        let (clipped, clipped_lower) = (clipped.to_kind(Kind::Float), clipped_lower.to_kind(Kind::Float));
        PolicyTerms { loss, clipped, clipped_lower, kl: (-log_ratio).detach() }
    }
}

/// The critic's loss of each token, ½·max((V − R)², (clamp(V, V_old ± clip) − R)²), and 1 where the clipped one was the
/// larger. What lies within the bounds is itself, to the bit: as V_old + (V − V_old) it would be counted as clipped by its
/// rounding. A `clip` of 0 leaves the second term out. `new` needs a gradient.
pub fn value_terms(new: &Tensor, old: &Tensor, returns: &Tensor, clip: f64) -> (Tensor, Tensor) {
    let free = (new - returns).square();
    if clip == 0.0 {
        return (&free * 0.5, free.zeros_like().detach());
    }
    let near = new.clamp_tensor(Some(old - clip), Some(old + clip));
    let bounded = (near - returns).square();
    let clipped = bounded.gt_tensor(&free).to_kind(Kind::Float);
    (free.max_other(&bounded) * 0.5, clipped)
}

/// How the tokens of a batch are averaged into one loss. T is a trajectory's number of generated tokens, N the number of
/// trajectories that have any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregation {
    /// 1/ΣT: each token of the batch counts the same.
    TokenMean,
    /// 1/N: long trajectories count more.
    SeqMeanTokenSum,
    /// 1/(T·N): each trajectory counts the same. The paper's.
    SeqMeanTokenMean,
    /// 1/(N·`width`): as Dr. GRPO, with a constant in place of T.
    SeqMeanTokenSumNorm,
}

impl Aggregation {
    /// The weight of each token of each trajectory in the whole batch, from the numbers of generated tokens. `width` is the
    /// largest number of tokens that an answer may have.
    pub fn weights(self, tokens: &[usize], width: usize) -> Vec<f64> {
        let all = tokens.iter().sum::<usize>().max(1) as f64;
        let trajectories = tokens.iter().filter(|tokens| **tokens > 0).count().max(1) as f64;
        let weight = |tokens: &usize| match self {
            Self::TokenMean => 1.0 / all,
            Self::SeqMeanTokenSum => 1.0 / trajectories,
            Self::SeqMeanTokenMean => 1.0 / (trajectories * (*tokens).max(1) as f64),
            Self::SeqMeanTokenSumNorm => 1.0 / (trajectories * width.max(1) as f64),
        };
        tokens.iter().map(weight).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOSS: PolicyLoss = PolicyLoss { clip_low: 0.2, clip_high: 0.28, dual_clip: 3.0 };

    fn tensor(values: &[f64]) -> Tensor {
        Tensor::from_slice(values)
    }

    fn values(tensor: &Tensor) -> Vec<f64> {
        Vec::try_from(tensor.to_kind(Kind::Double)).unwrap()
    }

    fn gradient(new: &[f64], old: &[f64], advantages: &[f64]) -> Vec<f64> {
        let new = tensor(new).set_requires_grad(true);
        LOSS.terms(&new, &tensor(old), &tensor(advantages)).loss.sum(Kind::Double).backward();
        values(&new.grad())
    }

    #[test]
    fn at_the_old_policy_the_gradient_is_the_policy_gradient() {
        let (log_probs, advantages) = ([-1.0, -0.2, -3.0], [2.0, -0.5, 0.0]);
        assert_eq!(gradient(&log_probs, &log_probs, &advantages), [-2.0, 0.5, 0.0]);
    }

    #[test]
    fn a_token_that_went_far_enough_has_no_gradient_and_one_that_went_astray_has() {
        // e^0.5 = 1.65 is above 1.28, e^-0.5 = 0.61 below 0.8.
        assert_eq!(gradient(&[0.5, -0.5], &[0.0, 0.0], &[1.0, -1.0]), [0.0, 0.0]);
        assert!(gradient(&[-0.5, 0.5], &[0.0, 0.0], &[1.0, -1.0]).iter().all(|gradient| gradient.abs() > 0.5));
        // Above e^1.1 = 3.004 dual clip ends the pull.
        assert_eq!(gradient(&[1.2], &[0.0], &[-1.0]), [0.0]);
        let free = PolicyLoss { dual_clip: 0.0, ..LOSS };
        assert!(values(&free.terms(&tensor(&[1.2]), &tensor(&[0.0]), &tensor(&[-1.0])).loss)[0] > 3.3);
    }

    #[test]
    #[should_panic(expected = "constants")]
    fn old_log_probabilities_with_a_gradient_are_refused() {
        let new = tensor(&[0.0]).set_requires_grad(true);
        LOSS.terms(&new, &new, &tensor(&[1.0]));
    }

    #[test]
    fn a_value_may_not_move_further_than_the_clip_for_free() {
        let new = tensor(&[2.0, 0.1]).set_requires_grad(true);
        let (loss, clipped) = value_terms(&new, &tensor(&[0.0, 0.0]), &tensor(&[2.0, 1.0]), 0.2);
        assert_eq!(values(&clipped), [1.0, 0.0]);
        assert!((values(&loss)[0] - 0.5 * 1.8f64.powi(2)).abs() < 1e-12);
        loss.sum(Kind::Double).backward();
        assert_eq!(values(&new.grad())[0], 0.0);
        let (loss, _) = value_terms(&tensor(&[2.0]), &tensor(&[0.0]), &tensor(&[2.0]), 0.0);
        assert_eq!(values(&loss), [0.0]);
    }

    #[test]
    fn a_value_within_its_bounds_is_not_counted_as_clipped() {
        let old = Tensor::rand([10_000], (Kind::Float, tch::Device::Cpu));
        let new = &old + (old.rand_like() - 0.5) * 0.3;
        let (loss, clipped) = value_terms(&new, &old, &old.zeros_like(), 0.2);
        assert!(values(&clipped).iter().all(|share| *share == 0.0));
        assert_eq!(loss, new.square() * 0.5);
    }

    proptest! {
        #[test]
        fn weights_add_up_to_what_their_name_says(tokens in prop::collection::vec(0usize..50, 1..20), width in 50usize..100) {
            let total = |aggregation: Aggregation| -> f64 {
                let weights = aggregation.weights(&tokens, width);
                weights.iter().zip(&tokens).map(|(weight, tokens)| weight * *tokens as f64).sum()
            };
            let (all, some) = (tokens.iter().sum::<usize>(), tokens.iter().filter(|tokens| **tokens > 0).count());
            if all > 0 {
                prop_assert!((total(Aggregation::TokenMean) - 1.0).abs() < 1e-9);
                prop_assert!((total(Aggregation::SeqMeanTokenMean) - 1.0).abs() < 1e-9);
                prop_assert!((total(Aggregation::SeqMeanTokenSum) - all as f64 / some as f64).abs() < 1e-9);
                let norm = all as f64 / (some * width) as f64;
                prop_assert!((total(Aggregation::SeqMeanTokenSumNorm) - norm).abs() < 1e-9);
            }
        }
    }
}
