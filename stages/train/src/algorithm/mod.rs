//! The mathematics of training, apart from any model: numbers in, numbers out.
//!
//! A trajectory is a row of tokens with a *mask*: 1 where the policy generated the token, 0 for the prompt and for what
//! an environment inserted. Everything here is per token, and only tokens with mask 1 count. Formulas are those of verl
//! 0.9.1 unless their documentation says otherwise; [`goldens`] recomputes numbers that verl made.
//!
//! | file | what | source |
//! |---|---|---|
//! | [`advantage`] | GAE over the mask, returns, whitening, λ by length, group baselines | verl `core_algos`; VAPO; GRPO, RLOO |
//! | [`loss`] | clipped policy loss with dual clip, clipped value loss, entropy's share, how tokens are averaged | verl; DAPO's two clips |
//! | [`control`] | KL estimates and penalty, the adaptive KL coefficient, the adaptive learning rate | Schulman 2020; Ziegler 2019 |
//! | [`correction`] | weights against the difference between sampler and trainer | verl `rollout_corr` |
//! | [`statistics`] | masked means, explained variance | verl |

pub mod advantage;
pub mod control;
pub mod correction;
pub mod goldens;
pub mod loss;
pub mod statistics;
