//! Advantages and returns of trajectories.

use super::statistics::{masked_mean, masked_variance};

/// Advantages and returns of one trajectory, an entry a token. Where the mask is 0 they are 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// How much better an action was than the critic expected.
    pub advantages: Vec<f64>,
    /// What the critic is trained towards: value + advantage (the paper's V_targ), before any whitening.
    pub returns: Vec<f64>,
}

/// Generalised advantage estimation (Schulman 2016) over the tokens that the policy generated.
///
/// Observation tokens are *skipped*, as in verl: the value after a generated token is that of the next generated one,
/// however many tokens a tool printed in between. OpenRLHF, slime and TRL step through them, which discounts an action
/// by the length of what it provoked. Beyond the last token the value is 0, also where the trajectory was truncated.
///
/// `rewards`, `values` and `mask` have an entry a token. A reward on a token with mask 0 would be lost without a trace:
/// it is an error of the caller, and panics.
pub fn gae(rewards: &[f64], values: &[f64], mask: &[bool], gamma: f64, lambda: f64) -> Estimate {
    assert!(rewards.len() == values.len() && values.len() == mask.len(), "an entry a token");
    let stray = rewards.iter().zip(mask).position(|(reward, counts)| *reward != 0.0 && !counts);
    assert_eq!(stray, None, "a reward on a token that the policy did not generate would be lost");
    let (mut next_value, mut advantage) = (0.0, 0.0);
    let mut estimate = Estimate { advantages: vec![0.0; mask.len()], returns: vec![0.0; mask.len()] };
    for token in (0..mask.len()).rev().filter(|token| mask[*token]) {
        let error = rewards[token] + gamma * next_value - values[token];
        advantage = error + gamma * lambda * advantage;
        next_value = values[token];
        estimate.advantages[token] = advantage;
        estimate.returns[token] = advantage + values[token];
    }
    estimate
}

/// VAPO's λ for a trajectory of `tokens` generated tokens: 1 − 1/(α·tokens), at least 0. The longer it is, the less of
/// a reward at its end is lost on the way to its beginning.
pub fn lambda_by_length(alpha: f64, tokens: usize) -> f64 {
    (1.0 - 1.0 / (alpha * tokens.max(1) as f64)).max(0.0)
}

/// Shifts and scales all advantages of a batch to mean 0 and variance 1 (with Bessel's correction), by those where the
/// mask holds; the others stay 0. `advantages` and `masks` have an entry a trajectory.
pub fn whiten(advantages: &mut [Vec<f64>], masks: &[Vec<bool>]) {
    let (values, mask) = (advantages.concat(), masks.concat());
    let (mean, scale) = (masked_mean(&values, &mask), 1.0 / (masked_variance(&values, &mask) + 1e-8).sqrt());
    for (advantages, mask) in advantages.iter_mut().zip(masks) {
        for (advantage, counts) in advantages.iter_mut().zip(mask) {
            *advantage = if *counts { (*advantage - mean) * scale } else { 0.0 };
        }
    }
}

/// How rewards of several samples of one prompt become advantages, without a critic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupBaseline {
    /// GRPO (Shao 2024): (R − mean) / (deviation + 1e-6), the deviation with Bessel's correction.
    Grpo,
    /// Dr. GRPO (Liu 2025): R − mean, so that easy and hard prompts are not blown up.
    MeanOnly,
    /// Leave one out (Ahmadian 2024): R − mean of the others.
    LeaveOneOut,
}

/// The advantages of the samples of one prompt, from their rewards. A group of one has no baseline: its advantage is 0.
pub fn of_group(rewards: &[f64], baseline: GroupBaseline) -> Vec<f64> {
    let count = rewards.len() as f64;
    if rewards.len() < 2 {
        return vec![0.0; rewards.len()];
    }
    let mean = rewards.iter().sum::<f64>() / count;
    let deviation = (rewards.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (count - 1.0)).sqrt();
    let advantage = |reward: &f64| match baseline {
        GroupBaseline::Grpo => (reward - mean) / (deviation + 1e-6),
        GroupBaseline::MeanOnly => reward - mean,
        GroupBaseline::LeaveOneOut => (reward - mean) * count / (count - 1.0),
    };
    rewards.iter().map(advantage).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, as a sum over the later errors: an implementation apart from the recursion.
    fn by_definition(rewards: &[f64], values: &[f64], gamma: f64, lambda: f64) -> Vec<f64> {
        let value = |token: usize| values.get(token).copied().unwrap_or(0.0);
        let error = |token: usize| rewards[token] + gamma * value(token + 1) - value(token);
        let sum =
            |from: usize| (from..rewards.len()).map(|t| (gamma * lambda).powi((t - from) as i32) * error(t)).sum();
        (0..rewards.len()).map(sum).collect()
    }

    proptest! {
        #[test]
        fn observation_tokens_change_nothing(
            tokens in prop::collection::vec((-1.0..1.0f64, -2.0..2.0f64, 0usize..4), 1..30),
            gamma in 0.5..1.0f64, lambda in 0.0..1.0f64,
        ) {
            let (rewards, values): (Vec<f64>, Vec<f64>) = tokens.iter().map(|(r, v, _)| (*r, *v)).unzip();
            let expected = by_definition(&rewards, &values, gamma, lambda);
            let (mut longer_rewards, mut longer_values, mut mask) = (vec![], vec![], vec![]);
            for (reward, value, observations) in &tokens {
                longer_rewards.push(*reward);
                longer_values.push(*value);
                mask.push(true);
                for noise in 0..*observations {
                    longer_rewards.push(0.0);
                    longer_values.push(99.0 - noise as f64);
                    mask.push(false);
                }
            }
            let estimate = gae(&longer_rewards, &longer_values, &mask, gamma, lambda);
            let kept: Vec<f64> = estimate.advantages.iter().zip(&mask).filter(|(_, m)| **m).map(|(a, _)| *a).collect();
            for ((kept, expected), value) in kept.iter().zip(&expected).zip(&values) {
                prop_assert!((kept - expected).abs() < 1e-9);
                prop_assert!(estimate.returns.iter().any(|r| (r - (expected + value)).abs() < 1e-9));
            }
        }

        #[test]
        fn with_lambda_one_and_no_discount_every_return_is_the_reward_to_come(
            rewards in prop::collection::vec(-3.0..3.0f64, 1..40), value in -5.0..5.0f64,
        ) {
            let estimate = gae(&rewards, &vec![value; rewards.len()], &vec![true; rewards.len()], 1.0, 1.0);
            for (token, found) in estimate.returns.iter().enumerate() {
                prop_assert!((found - rewards[token..].iter().sum::<f64>()).abs() < 1e-9);
            }
        }
    }

    #[test]
    #[should_panic(expected = "a reward on a token that the policy did not generate")]
    fn a_reward_outside_the_mask_is_refused() {
        gae(&[0.0, 1.0], &[0.0, 0.0], &[true, false], 1.0, 0.95);
    }

    #[test]
    fn lambda_by_length_is_vapos() {
        let expected = [(21, 0.047619), (100, 0.8), (1000, 0.98), (8192, 0.997559), (131_072, 0.999847)];
        for (tokens, lambda) in expected {
            assert!((lambda_by_length(0.05, tokens) - lambda).abs() < 1e-6, "{tokens}");
        }
        assert_eq!(lambda_by_length(0.05, 1), 0.0);
    }

    #[test]
    fn whitened_advantages_have_mean_0_and_variance_1_where_they_count() {
        let mut advantages = vec![vec![1.0, 50.0, 3.0], vec![-4.0, 2.0]];
        let masks = vec![vec![true, false, true], vec![true, true]];
        whiten(&mut advantages, &masks);
        let (values, mask) = (advantages.concat(), masks.concat());
        assert!(masked_mean(&values, &mask).abs() < 1e-9);
        assert!((masked_variance(&values, &mask) - 1.0).abs() < 1e-7);
        assert_eq!(advantages[0][1], 0.0);
    }

    #[test]
    fn a_group_without_variance_says_nothing() {
        for baseline in [GroupBaseline::Grpo, GroupBaseline::MeanOnly, GroupBaseline::LeaveOneOut] {
            assert!(of_group(&[3.0; 8], baseline).iter().all(|advantage| advantage.abs() < 1e-9));
            assert_eq!(of_group(&[3.0], baseline), [0.0]);
        }
        assert_eq!(of_group(&[1.0, -1.0], GroupBaseline::LeaveOneOut), [2.0, -2.0]);
        let grpo = of_group(&[1.0, -1.0], GroupBaseline::Grpo);
        assert!((grpo[0] - 0.5f64.sqrt()).abs() < 1e-5 && (grpo[1] + 0.5f64.sqrt()).abs() < 1e-5);
    }
}
