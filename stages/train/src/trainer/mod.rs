//! From trajectories to new weights.
//!
//! | file | what |
//! |---|---|
//! | [`trajectory`] | an episode as the trainer sees it: token ids, mask, log-probabilities, reward |
//! | [`forward`] | packed micro-batches through a decoder, forwards and backwards, with little memory |
//! | [`division`] | which process of a group computes which part of a batch |
//! | [`ppo`] | one step of PPO or of a baseline without a critic: the paper's agentic and single-turn stages |
//! | [`supervised`] | RFT: the likelihood of trajectories that were kept; value pre-training: the critic alone |
//! | [`funnel`] | RFT's filters, with what each one dropped |
//! | [`alarm`] | when a run has collapsed |
//!
//! A trainer may be one process of a [`Group`](crate::group::Group). Each is given the same trajectories and computes a part of
//! them; gradients, values and sums for metrics are put together before anything depends on them.
//!
//! A trainer samples nothing and judges nothing; it is given trajectories and returns metrics. It draws random numbers
//! only to shuffle, keyed by (seed, step), so that a step done again from its checkpoint does the same.

pub mod alarm;
pub mod division;
pub mod forward;
pub mod funnel;
pub mod ppo;
pub mod supervised;
#[cfg(test)]
pub(crate) mod tiny_test;
pub mod trajectory;

use std::collections::BTreeMap;

use crate::random;

/// Numbers of one step, by the names of verl's dashboards.
pub type Metrics = BTreeMap<String, f64>;

/// A permutation of 0..count that follows from `seed` and `step` alone (Fisher–Yates).
pub fn shuffled(count: usize, seed: u64, step: u64) -> Vec<usize> {
    let key = random::key(&[seed, step]);
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        let [high, low, ..] = random::philox(key, [last as u32, 0, 0, 0]);
        // The bias of the remainder is below 2⁻³² for any batch.
        order.swap(last, ((u64::from(high) << 32 | u64::from(low)) % (last as u64 + 1)) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_follows_from_seed_and_step() {
        let order = shuffled(50, 7, 3);
        assert_eq!(order, shuffled(50, 7, 3));
        assert_ne!(order, shuffled(50, 7, 4));
        assert_ne!(order, shuffled(50, 8, 3));
        let mut sorted = order;
        sorted.sort();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
    }
}
