//! When a run has collapsed: it is stopped with the reason, and the last good checkpoint stays.
//!
//! The paper's first trial went on for steps after its ratios had exploded. What is watched here has a threshold each, and
//! one bad step is no collapse: a threshold must be passed `patience` steps running.

use std::collections::VecDeque;

use super::Metrics;

/// Thresholds; one that is `None` is not watched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AlarmSettings {
    /// Steps running that pass a threshold before the run ends.
    pub patience: usize,
    /// Least mean entropy, in nats a token.
    pub min_entropy: Option<f64>,
    /// Largest mean difference between the sampler's and the trainer's probabilities.
    pub max_mismatch: Option<f64>,
    /// Largest norm of a gradient.
    pub max_grad_norm: Option<f64>,
    /// The mean length falls below this share of what it was `window` steps before, while the reward has risen: answers
    /// that get shorter and better rewarded are likely to have found a way around the task.
    pub length_share: Option<f64>,
    /// Steps to look back.
    pub window: usize,
}

impl Default for AlarmSettings {
    fn default() -> Self {
        Self {
            patience: 3,
            min_entropy: Some(0.01),
            max_mismatch: Some(0.1),
            max_grad_norm: Some(1e3),
            length_share: Some(0.33),
            window: 20,
        }
    }
}

/// Watches the metrics of one run.
#[derive(Clone, Debug)]
pub struct Alarm {
    settings: AlarmSettings,
    /// Of the last steps: mean length and mean reward.
    history: VecDeque<(f64, f64)>,
    /// For how many steps running each threshold has been passed.
    passed: [usize; 4],
}

impl Alarm {
    /// An alarm at the beginning of a run, or of its continuation.
    pub fn new(settings: AlarmSettings) -> Self {
        Self { settings, history: VecDeque::new(), passed: [0; 4] }
    }

    /// Takes the metrics of a step; the reason, where the run has to end.
    pub fn observe(&mut self, metrics: &Metrics) -> Option<String> {
        let of = |name: &str| metrics.get(name).copied();
        let settings = &self.settings;
        let (length, reward) = (of("response_length/mean"), of("critic/score/mean"));
        let then = (self.history.len() >= settings.window).then(|| self.history.front().copied()).flatten();
        let shrunk = length.zip(reward).zip(then).and_then(|((length, reward), (length_then, reward_then))| {
            let share = settings.length_share?;
            (length < share * length_then && reward > reward_then).then(|| {
                format!("answers are {length:.0} tokens long, {length_then:.0} tokens {} steps before, while the reward rose from {reward_then:.2} to {reward:.2}", settings.window)
            })
        });
        // What is not a number passes every threshold.
        let below = |value: f64, least: f64| value.is_nan() || value < least;
        let above = |value: f64, most: f64| value.is_nan() || value > most;
        let entropy = of("actor/entropy").zip(settings.min_entropy).filter(|(value, least)| below(*value, *least));
        let mismatch = of("training/rollout_probs_diff_mean")
            .zip(settings.max_mismatch)
            .filter(|(value, most)| above(*value, *most));
        let norm = of("actor/grad_norm").zip(settings.max_grad_norm).filter(|(value, most)| above(*value, *most));
        let reasons = [
            entropy.map(|(value, least)| format!("the entropy is {value:.4} nats a token, below {least}")),
            mismatch.map(|(value, most)| {
                format!(
                    "the sampler's and the trainer's probabilities differ by {value:.4} on average, more than {most}"
                )
            }),
            norm.map(|(value, most)| format!("the gradient's norm is {value:.1}, above {most}")),
            shrunk,
        ];
        if let (Some(length), Some(reward)) = (length, reward) {
            self.history.push_back((length, reward));
            if self.history.len() > settings.window.max(1) {
                self.history.pop_front();
            }
        }
        let patience = settings.patience.max(1);
        let mut ended = None;
        for (passed, reason) in self.passed.iter_mut().zip(reasons) {
            *passed = if reason.is_some() { *passed + 1 } else { 0 };
            if *passed >= patience {
                ended = ended.or(reason.map(|reason| format!("{reason}, for {patience} steps running")));
            }
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(entropy: f64, mismatch: f64, length: f64, reward: f64) -> Metrics {
        let names = ["actor/entropy", "training/rollout_probs_diff_mean", "response_length/mean", "critic/score/mean"];
        names.iter().map(|name| (*name).to_owned()).zip([entropy, mismatch, length, reward]).collect()
    }

    fn ends(steps: impl IntoIterator<Item = Metrics>) -> Option<(usize, String)> {
        let mut alarm = Alarm::new(AlarmSettings { window: 5, ..AlarmSettings::default() });
        steps.into_iter().enumerate().find_map(|(step, metrics)| Some((step, alarm.observe(&metrics)?)))
    }

    #[test]
    fn a_healthy_run_goes_on() {
        assert_eq!(ends((0..100).map(|step| metrics(0.5, 0.002, 200.0, step as f64 * 0.02))), None);
    }

    #[test]
    fn entropy_that_is_gone_ends_it_after_three_steps_and_not_after_one() {
        let (step, reason) = ends((0..10).map(|_| metrics(0.001, 0.0, 200.0, 1.0))).unwrap();
        assert_eq!((step, reason.as_str()), (2, "the entropy is 0.0010 nats a token, below 0.01, for 3 steps running"));
        assert_eq!(ends((0..10).map(|step| metrics(if step % 3 == 0 { 0.5 } else { 0.001 }, 0.0, 200.0, 1.0))), None);
    }

    #[test]
    fn mismatch_ends_it_and_what_is_not_a_number_does() {
        assert!(ends((0..4).map(|_| metrics(0.5, 0.3, 200.0, 1.0))).unwrap().1.contains("differ by 0.3000"));
        assert!(ends((0..4).map(|_| metrics(0.5, f64::NAN, 200.0, 1.0))).is_some());
    }

    #[test]
    fn shorter_and_better_rewarded_answers_end_it_and_shorter_ones_alone_do_not() {
        let shrinking =
            |gain: f64| (0..12).map(move |step| metrics(0.5, 0.0, 2000.0 / f64::from(1 << step), step as f64 * gain));
        assert!(ends(shrinking(0.1)).unwrap().1.contains("while the reward rose"));
        assert_eq!(ends(shrinking(-0.1)), None);
    }
}
