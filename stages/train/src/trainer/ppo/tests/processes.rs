//! Several processes come to what one comes to.

use super::*;
use crate::group::tests::together;

/// The largest difference between processes and one process, relative to the largest value: of weights and of metrics.
const TOLERANCE: f64 = 1e-5;

struct End {
    actor: Vec<f64>,
    critic: Vec<f64>,
    metrics: Vec<Metrics>,
    fingerprint: u64,
}

/// Four steps on episodes of different lengths, in mini-batches that no number of processes divides.
fn train(settings: &PpoSettings, group: Group) -> End {
    let grouped = settings.group_baseline.is_some();
    let critic = (!grouped).then(|| decoder(6, Head::Value, 11));
    let kl = KlCoefficient::Adaptive { beta: 0.1, target: 0.01, horizon: 50.0 };
    let rate = AdaptiveRate { factor: 1.0, target: 1e-4 };
    let (actor, reference) = (decoder(6, Head::Language, 1), Some(decoder(6, Head::Language, 2)));
    let run = Ppo::new(settings.clone(), actor, critic, reference, kl, rate).unwrap();
    let mut run = run.within(Rc::new(group));
    // Sampled once, from weights that all have: what a sampler's rounding would do to a token is not the question here.
    let teacher = decoder(6, Head::Language, 1);
    let metrics = (0..4).map(|step| {
        let mut batch = rewarded(&teacher, step);
        batch[1].ids.extend([2; 9]);
        batch[1].mask.extend([true; 9]);
        batch[1].log_probs.extend([-2.0; 9]);
        run.update(&batch).unwrap()
    });
    let metrics = metrics.collect();
    End {
        actor: double(values(run.actor())),
        critic: run.critic().map(|critic| double(values(critic))).unwrap_or_default(),
        metrics,
        fingerprint: run.fingerprint(),
    }
}

/// A rate so high that Adam's sign of tiny gradients would show; ε keeps it a function of their size.
fn moving() -> PpoSettings {
    PpoSettings { adamw: AdamW { epsilon: 1e-3, ..settings().adamw }, mini_batch: 5, epochs: 2, ..settings() }
}

fn differ(one: &End, other: &End) -> f64 {
    let mut most = difference(&one.actor, &other.actor);
    if !one.critic.is_empty() {
        most = most.max(difference(&one.critic, &other.critic));
    }
    for (metrics, others) in one.metrics.iter().zip(&other.metrics) {
        assert_eq!(metrics.keys().collect::<Vec<_>>(), others.keys().collect::<Vec<_>>());
        for (name, value) in metrics {
            most = most.max((value - others[name]).abs() / value.abs().max(1.0));
        }
    }
    most
}

#[test]
fn two_and_three_processes_come_to_what_one_comes_to() {
    let token_mean = PpoSettings { aggregation: Aggregation::TokenMean, entropy: 0.02, ..moving() };
    let grpo = Some(GroupBaseline::MeanOnly);
    let groups = PpoSettings { group_baseline: grpo, drop_equal_groups: true, mini_batch: 0, ..moving() };
    let in_reward = PpoSettings { kl_place: KlPlace::Reward, value_clip: 0.2, mini_batch: 1, ..moving() };
    for settings in [moving(), token_mean, groups, in_reward] {
        let alone = train(&settings, Group::alone());
        let before = double(values(&decoder(6, Head::Language, 1)));
        assert!(difference(&before, &alone.actor) > 1e-3, "it learns something");
        for size in [2, 3] {
            let ends = together(size, |group| train(&settings, group));
            for end in &ends {
                assert!(differ(&alone, end) < TOLERANCE, "{size} processes: {:e}", differ(&alone, end));
                // And not by a bit from each other.
                assert_eq!((&end.actor, &end.critic), (&ends[0].actor, &ends[0].critic));
                assert_eq!((&end.metrics, end.fingerprint), (&ends[0].metrics, ends[0].fingerprint));
            }
        }
    }
}
