//! What keeps a policy near where it was: estimates of the KL divergence, their coefficient, the learning rate.

use tch::Tensor;

/// An estimate of KL(π ‖ reference) from the log-probabilities of one sampled token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KlEstimate {
    /// log π − log ref: unbiased, of either sign.
    K1,
    /// |log π − log ref|.
    Abs,
    /// ½ (log π − log ref)²: biased, with the right gradient in expectation.
    K2,
    /// e^d − d − 1 with d = log ref − log π: unbiased and never negative. d is clamped to ±20, the estimate to ±10.
    K3,
}

/// The estimate for each token; `log_probs` and `reference` have one shape.
pub fn kl(log_probs: &Tensor, reference: &Tensor, estimate: KlEstimate) -> Tensor {
    let difference = log_probs - reference;
    match estimate {
        KlEstimate::K1 => difference,
        KlEstimate::Abs => difference.abs(),
        KlEstimate::K2 => difference.square() * 0.5,
        KlEstimate::K3 => {
            let difference = (-difference).clamp(-20.0, 20.0);
            (difference.exp() - difference - 1.0).clamp(-10.0, 10.0)
        }
    }
}

/// The coefficient of a KL penalty.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum KlCoefficient {
    /// The same throughout.
    Fixed(f64),
    /// Ziegler 2019: β grows while the divergence is above `target`, and shrinks below it.
    Adaptive {
        /// The coefficient now.
        beta: f64,
        /// The divergence to keep, in nats a token.
        target: f64,
        /// Samples in which β can change by about a factor of e^0.2.
        horizon: f64,
    },
}

impl KlCoefficient {
    /// The coefficient now.
    pub fn beta(&self) -> f64 {
        match self {
            Self::Fixed(beta) | Self::Adaptive { beta, .. } => *beta,
        }
    }

    /// After `samples` trajectories whose mean divergence was `kl`.
    pub fn update(&mut self, kl: f64, samples: usize) {
        if let Self::Adaptive { beta, target, horizon } = self {
            let error = (kl / *target - 1.0).clamp(-0.2, 0.2);
            *beta *= 1.0 + error * samples as f64 / *horizon;
        }
    }
}

/// The learning rate's factor, by how far an update moved the policy: halved above twice `target`, raised by half below
/// half of it, within a tenth and ten times (Heess 2017, with gentler steps up).
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct AdaptiveRate {
    /// What the configured learning rate is multiplied by.
    pub factor: f64,
    /// The divergence of an update to aim at, in nats a token; 0 never changes the factor.
    pub target: f64,
}

impl AdaptiveRate {
    /// After an update whose mean divergence from the policy before it was `kl`.
    pub fn update(&mut self, kl: f64) {
        if self.target <= 0.0 || !kl.is_finite() {
            return;
        }
        let step = if kl > 2.0 * self.target {
            0.5
        } else if kl < 0.5 * self.target {
            1.5
        } else {
            1.0
        };
        self.factor = (self.factor * step).clamp(0.1, 10.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_policies_have_no_divergence_and_k3_is_never_negative() {
        let one = Tensor::from_slice(&[-1.0f32, -30.0, -0.1]);
        let other = Tensor::from_slice(&[-4.0f32, -1.0, -0.2]);
        for estimate in [KlEstimate::K1, KlEstimate::Abs, KlEstimate::K2, KlEstimate::K3] {
            assert_eq!(f64::try_from(kl(&one, &one, estimate).abs().sum(tch::Kind::Float)).unwrap(), 0.0);
        }
        assert!(f64::try_from(kl(&one, &other, KlEstimate::K3).min()).unwrap() >= 0.0);
        assert_eq!(f64::try_from(kl(&one, &other, KlEstimate::K3).max()).unwrap(), 10.0, "clamped");
    }

    #[test]
    fn a_fixed_coefficient_stays_and_an_adaptive_one_moves_towards_its_target() {
        let mut fixed = KlCoefficient::Fixed(0.1);
        fixed.update(100.0, 256);
        assert_eq!(fixed.beta(), 0.1);
        let mut adaptive = KlCoefficient::Adaptive { beta: 0.2, target: 6.0, horizon: 10_000.0 };
        adaptive.update(3.0, 256);
        assert!((adaptive.beta() - 0.198976).abs() < 1e-12);
    }

    #[test]
    fn the_rate_falls_when_updates_are_too_large_and_stays_within_its_bounds() {
        let mut rate = AdaptiveRate { factor: 1.0, target: 0.01 };
        rate.update(0.1);
        assert_eq!(rate.factor, 0.5);
        (0..20).for_each(|_| rate.update(0.1));
        assert_eq!(rate.factor, 0.1);
        (0..40).for_each(|_| rate.update(0.0));
        assert_eq!(rate.factor, 10.0);
        rate.update(f64::NAN);
        assert_eq!(rate.factor, 10.0);
    }
}
