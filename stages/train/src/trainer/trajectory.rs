//! An episode as the trainer sees it.

use crate::TrainError;

/// The tokens of one episode, its prompt and what was inserted included.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Trajectory {
    /// What it was about: trajectories of one task are a group.
    pub task: String,
    /// Which of the task's samples it is.
    pub sample: u64,
    /// Token ids, as they were sampled or inserted: nothing is tokenised again.
    pub ids: Vec<i64>,
    /// Whether the policy generated the token; an entry a token, the first one is false.
    pub mask: Vec<bool>,
    /// Its log-probability as the sampler computed it; an entry a token, 0 where the mask is false.
    pub log_probs: Vec<f64>,
    /// What the episode was worth. It belongs to the last generated token.
    pub reward: f64,
    /// Whether a limit ended it.
    pub truncated: bool,
    /// How often the policy was asked.
    pub turns: u64,
}

impl Trajectory {
    /// An error that says what contradicts what.
    pub fn check(&self) -> Result<(), TrainError> {
        let error = |message: &str| {
            Err(TrainError::new(format!("trajectory {} of task {}: {message}", self.sample, self.task)))
        };
        if self.mask.len() != self.ids.len() || self.log_probs.len() != self.ids.len() {
            return error("token ids, mask and log-probabilities have different lengths");
        }
        if self.mask.first() == Some(&true) {
            return error("its first token is said to be generated, from nothing");
        }
        if !self.mask.contains(&true) {
            return error("the policy generated no token, so its reward would be lost");
        }
        let stray =
            self.log_probs.iter().zip(&self.mask).any(|(log_prob, generated)| {
                !log_prob.is_finite() || *log_prob > 1e-6 || (!generated && *log_prob != 0.0)
            });
        if stray {
            return error("a log-probability is above 0, not finite, or stands at a token that was not generated");
        }
        if !self.reward.is_finite() {
            return error("its reward is not finite");
        }
        Ok(())
    }

    /// Number of tokens that the policy generated.
    pub fn generated(&self) -> usize {
        self.mask.iter().filter(|generated| **generated).count()
    }

    /// The values of `each` at the generated tokens.
    pub fn at_generated<T: Copy>(&self, each: &[T]) -> Vec<T> {
        each.iter().zip(&self.mask).filter(|(_, generated)| **generated).map(|(value, _)| *value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_contradicts_itself_is_refused() {
        let right = Trajectory {
            ids: vec![1, 2, 3],
            mask: vec![false, true, true],
            log_probs: vec![0.0, -1.0, -0.5],
            ..Trajectory::default()
        };
        right.check().unwrap();
        let wrong = [
            Trajectory { mask: vec![false, true], ..right.clone() },
            Trajectory { mask: vec![true, true, true], ..right.clone() },
            Trajectory { mask: vec![false; 3], log_probs: vec![0.0; 3], ..right.clone() },
            Trajectory { mask: vec![false, false, true], ..right.clone() },
            Trajectory { log_probs: vec![0.0, f64::NAN, -0.5], ..right.clone() },
            Trajectory { log_probs: vec![0.0, 0.1, -0.5], ..right.clone() },
            Trajectory { reward: f64::INFINITY, ..right.clone() },
        ];
        for trajectory in wrong {
            assert!(trajectory.check().is_err(), "{trajectory:?}");
        }
    }
}
