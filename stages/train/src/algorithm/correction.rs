//! Weights against the difference between the policy that sampled and the policy that is trained.
//!
//! Three policies meet in a step: μ, as the sampler computed it; π_old, the same weights as the trainer computes them;
//! π, the weights that are being changed. PPO's ratio is π/π_old. μ and π_old should be equal and are not, since the two
//! add up in different orders and precisions; that difference is what made the paper's first trial collapse. A token's
//! weight π_old/μ makes up for it, cut off so that rare tokens can't dominate.

/// How the difference is made up for.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Correction {
    /// Not at all.
    None,
    /// Each token is weighted by min(π_old/μ, `cap`).
    Token {
        /// The largest weight.
        cap: f64,
    },
    /// All tokens of a trajectory are weighted by min(Π π_old/μ, `cap`).
    Sequence {
        /// The largest weight.
        cap: f64,
    },
    /// A trajectory counts only while the geometric mean of π_old/μ over its tokens lies in `low` to `high`.
    Geometric {
        /// Below it the trajectory is left out.
        low: f64,
        /// Above it the trajectory is left out.
        high: f64,
    },
}

/// The log-ratio of a token is clamped to this before it is exponentiated.
const MAX_LOG_RATIO: f64 = 20.0;

/// Log-ratios up to this are roundings, which depend on what else was in the sampler's batch, and count as none: so a run
/// on the CPU, where no other difference is, doesn't depend on who asked the sampler first.
const ROUNDING: f64 = 1e-5;

/// A trajectory with a token less likely under π_old than `VETO` times μ is left out: one of them did not compute what
/// the other did.
const VETO: f64 = 1e-4;

/// The weights of a trajectory's tokens. 0 where the mask is 0 and where the token is left out; a token that is left out
/// belongs out of the mask too, so that it is not counted as one with a loss of 0.
pub fn weights(old: &[f64], sampler: &[f64], mask: &[bool], correction: Correction) -> Vec<f64> {
    let ratios: Vec<Option<f64>> = (0..mask.len())
        .map(|token| mask[token].then(|| (old[token] - sampler[token]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)))
        .collect();
    let ratios: Vec<Option<f64>> =
        ratios.into_iter().map(|ratio| ratio.map(|ratio| if ratio.abs() <= ROUNDING { 0.0 } else { ratio })).collect();
    let count = ratios.iter().flatten().count().max(1) as f64;
    let sum: f64 = ratios.iter().flatten().sum();
    let vetoed = correction != Correction::None && ratios.iter().flatten().any(|ratio| ratio.exp() < VETO);
    let weight = |ratio: f64| match correction {
        _ if vetoed => 0.0,
        Correction::None => 1.0,
        Correction::Token { cap } => ratio.exp().min(cap),
        Correction::Sequence { cap } => sum.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().min(cap),
        Correction::Geometric { low, high } => f64::from((low..=high).contains(&(sum / count).exp())),
    };
    ratios.into_iter().map(|ratio| ratio.map_or(0.0, weight)).collect()
}

/// How far sampler and trainer are apart, over all tokens with mask 1: of |e^old − e^sampler|.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mismatch {
    /// The largest.
    pub max: f64,
    /// The mean.
    pub mean: f64,
    /// The standard deviation.
    pub std: f64,
}

impl Mismatch {
    /// Of the log-probabilities of tokens that the policy generated, in the same order.
    pub fn of(old: &[f64], sampler: &[f64]) -> Self {
        let differences: Vec<f64> =
            old.iter().zip(sampler).map(|(old, sampler)| (old.exp() - sampler.exp()).abs()).collect();
        let mask = vec![true; differences.len()];
        Self {
            max: differences.iter().copied().fold(0.0, f64::max),
            mean: super::statistics::masked_mean(&differences, &mask),
            std: super::statistics::masked_variance(&differences, &mask).sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: [f64; 4] = [-1.0, -2.0, -0.5, -1.5];
    const SAMPLER: [f64; 4] = [-1.9, -1.5, -0.5, -1.5];
    const MASK: [bool; 4] = [true, true, false, true];

    fn close(found: &[f64], expected: &[f64]) -> bool {
        found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-4)
    }

    #[test]
    fn token_weights_are_the_ratio_up_to_the_cap() {
        assert!(close(&weights(&OLD, &SAMPLER, &MASK, Correction::Token { cap: 2.0 }), &[2.0, 0.6065, 0.0, 1.0]));
    }

    #[test]
    fn sequence_weights_are_the_product() {
        let expected = 0.4f64.exp();
        let found = weights(&OLD, &SAMPLER, &MASK, Correction::Sequence { cap: 2.0 });
        assert!(close(&found, &[expected, expected, 0.0, expected]));
    }

    #[test]
    fn a_trajectory_outside_the_bounds_or_with_an_impossible_token_is_left_out() {
        let narrow = Correction::Geometric { low: 0.999, high: 1.001 };
        assert_eq!(weights(&OLD, &SAMPLER, &MASK, narrow), [0.0; 4]);
        assert_eq!(weights(&OLD, &OLD, &MASK, narrow), [1.0, 1.0, 0.0, 1.0]);
        let impossible = [-1.0, -12.0, -0.5, -1.5];
        assert_eq!(weights(&impossible, &SAMPLER, &MASK, Correction::Token { cap: 2.0 }), [0.0; 4]);
        assert_eq!(weights(&impossible, &SAMPLER, &MASK, Correction::None), [1.0, 1.0, 0.0, 1.0]);
    }

    #[test]
    fn roundings_are_no_difference() {
        let rounded = OLD.map(|value| value + 3e-6);
        assert_eq!(weights(&OLD, &rounded, &MASK, Correction::Token { cap: 2.0 }), [1.0, 1.0, 0.0, 1.0]);
    }

    #[test]
    fn equal_policies_do_not_differ() {
        assert_eq!(Mismatch::of(&OLD, &OLD), Mismatch::default());
        assert!((Mismatch::of(&[0.0], &[-0.5]).max - (1.0 - (-0.5f64).exp())).abs() < 1e-12);
    }
}
