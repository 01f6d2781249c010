use super::super::tiny_test::{FORWARD, decoder, sample, values};
use super::*;
use crate::model::Head;
use crate::random;

fn settings(objective: Objective) -> SupervisedSettings {
    SupervisedSettings {
        objective,
        forward: FORWARD,
        aggregation: Aggregation::TokenMean,
        batch: 32,
        epochs: 12,
        rate: 1e-2,
        warmup_steps: 2,
        final_rate: 0.1,
        adamw: AdamW { weight_decay: 0.0, ..AdamW::default() },
        seed: 3,
    }
}

/// Four fair coins after a prompt; the reward is the number of heads.
fn coins(count: u64) -> Vec<Trajectory> {
    let one = |sample: u64| {
        let coins: Vec<i64> = (0..4).map(|toss| 1 + (random::mix(sample * 4 + toss) % 2) as i64).collect();
        let reward = coins.iter().filter(|coin| **coin == 2).count() as f64;
        let ids = [vec![3], coins].concat();
        let (mask, log_probs) = (vec![false, true, true, true, true], vec![0.0; 5]);
        Trajectory { task: "coins".into(), sample, ids, mask, log_probs, reward, ..Trajectory::default() }
    };
    (0..count).map(one).collect()
}

/// Its value is known: the heads so far and half of the tosses to come.
#[test]
fn a_critic_learns_the_value_of_a_chain() {
    let objective = Objective::Value { gamma: 1.0, lambda: Lambda::Fixed(1.0), clip: 0.0 };
    let mut run = Supervised::new(settings(objective), decoder(4, Head::Value, 1), coins(256)).unwrap();
    while run.step() < run.steps() {
        run.update().unwrap();
    }
    let held_out = coins(400).split_off(300);
    let all: Vec<&Trajectory> = held_out.iter().collect();
    let said = evaluate_values(run.model(), &all, &FORWARD).concat();
    let value = |trajectory: &Trajectory, toss: usize| {
        let heads = trajectory.ids[1..=toss].iter().filter(|coin| **coin == 2).count();
        heads as f64 + (4 - toss) as f64 / 2.0
    };
    let known: Vec<f64> =
        held_out.iter().flat_map(|trajectory| (0..4).map(move |toss| value(trajectory, toss))).collect();
    let explained = explained_variance(&said, &known, &vec![true; said.len()]);
    assert!(explained > 0.95, "{explained}");
}

#[test]
fn what_was_shown_becomes_likely() {
    let shown = sample(&decoder(6, Head::Language, 9), &vec![vec![1, 2]; 64], 6, 1);
    let mut run =
        Supervised::new(settings(Objective::Likelihood), decoder(6, Head::Language, 1), shown.clone()).unwrap();
    let before = run.log_likelihood(&shown);
    let mut metrics = Metrics::new();
    while run.step() < run.steps() {
        metrics = run.update().unwrap();
    }
    let teacher =
        shown.iter().flat_map(|trajectory| trajectory.at_generated(&trajectory.log_probs)).collect::<Vec<_>>();
    let teacher = teacher.iter().sum::<f64>() / teacher.len() as f64;
    let after = run.log_likelihood(&shown);
    assert!(after > before + 0.3 && after > teacher - 0.05, "{before} {after} {teacher}");
    assert_eq!(metrics["epoch"], 11.0);
    assert!(metrics["lr"] < 2e-3, "the cosine has come down: {}", metrics["lr"]);
}

#[test]
fn a_run_that_is_loaded_goes_on_with_the_same_bits() {
    let objective = Objective::Value { gamma: 1.0, lambda: Lambda::Fixed(0.95), clip: 0.5 };
    let start = || {
        let settings = SupervisedSettings { batch: 10, epochs: 2, ..settings(objective) };
        Supervised::new(settings, decoder(4, Head::Value, 1), coins(25)).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let mut whole = start();
    assert_eq!(whole.steps(), 6);
    for step in 0..6 {
        if step == 4 {
            whole.save(folder.path()).unwrap();
        }
        whole.update().unwrap();
    }
    let mut resumed = start();
    resumed.load(folder.path()).unwrap();
    while resumed.step() < resumed.steps() {
        resumed.update().unwrap();
    }
    assert_eq!(values(whole.model()), values(resumed.model()));
}

#[test]
fn nothing_to_train_on_is_an_error() {
    let refused = Supervised::new(settings(Objective::Likelihood), decoder(4, Head::Language, 1), Vec::new());
    assert!(refused.err().unwrap().message.contains("no trajectory is left"));
}
