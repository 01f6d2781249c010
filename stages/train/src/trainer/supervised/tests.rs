use super::super::division::divide;
use super::super::forward::{evaluate_values, numbers};
use super::super::tiny_test::{FORWARD, decoder, difference, sample, values};
use super::*;
use crate::checkpoint::read_tensors;
use crate::group::tests::together;
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

/// The largest difference between processes and one process, relative to the largest value.
const TOLERANCE: f64 = 1e-5;

/// Answers of different lengths to prompts of different lengths, with rewards.
fn uneven() -> Vec<Trajectory> {
    let prompts: Vec<Vec<i64>> = (0..13).map(|index| vec![1 + index % 3; 2 + (index % 3) as usize * 4]).collect();
    let mut all = sample(&decoder(6, Head::Language, 9), &prompts, 12, 1);
    all.iter_mut().enumerate().for_each(|(index, trajectory)| trajectory.reward = (index as f64).sin());
    all
}

/// Weights, metrics of each update, and the fingerprint, after two passes over uneven trajectories.
fn train(objective: Objective, group: Group) -> (Vec<f64>, Vec<Metrics>, u64) {
    // ε keeps Adam's step a function of the gradient's size.
    let adamw = AdamW { epsilon: 1e-3, weight_decay: 0.0, ..AdamW::default() };
    let settings = SupervisedSettings { batch: 7, epochs: 2, adamw, ..settings(objective) };
    let head = if objective == Objective::Likelihood { Head::Language } else { Head::Value };
    let mut run = Supervised::new(settings, decoder(6, head, 1), uneven()).unwrap().within(Rc::new(group));
    let metrics = (0..run.steps()).map(|_| run.update().unwrap()).collect();
    (values(run.model()).into_iter().map(f64::from).collect(), metrics, run.fingerprint())
}

#[test]
fn two_and_three_processes_come_to_what_one_comes_to() {
    let value = Objective::Value { gamma: 1.0, lambda: Lambda::Fixed(0.95), clip: 0.5 };
    for objective in [Objective::Likelihood, value] {
        let (weights, metrics, _) = train(objective, Group::alone());
        for size in [2, 3] {
            let ends = together(size, |group| train(objective, group));
            for end in &ends {
                assert_eq!(end, &ends[0], "not by a bit from each other");
                assert!(difference(&weights, &end.0) < TOLERANCE, "{:e}", difference(&weights, &end.0));
                for (one, other) in metrics.iter().zip(&end.1) {
                    for (name, value) in one {
                        let apart = (value - other[name]).abs() / value.abs().max(1.0);
                        assert!(apart < TOLERANCE, "{name}: {value} {}", other[name]);
                    }
                }
            }
        }
    }
}

/// The usual mistake of data parallelism: each process takes the mean over its own tokens, and the mean of these is taken.
/// It is further from one process than the tolerance, by far.
#[test]
fn weights_normalised_by_each_process_would_be_noticed() {
    let gradient = |trajectories: Vec<Trajectory>, group: Group| {
        // The first moment of one update is a tenth of its gradient.
        let adamw = AdamW { max_grad_norm: 0.0, ..AdamW::default() };
        let settings = SupervisedSettings { adamw, ..settings(Objective::Likelihood) };
        let run = Supervised::new(settings, decoder(6, Head::Language, 1), trajectories).unwrap();
        let mut run = run.within(Rc::new(group));
        run.update().unwrap();
        let folder = tempfile::tempdir().unwrap();
        run.save(folder.path()).unwrap();
        numbers(&(&read_tensors(&folder.path().join("model.safetensors")).unwrap().0["first"] * 10.0))
    };
    let one = gradient(uneven(), Group::alone());
    let two = together(2, |group| gradient(uneven(), group)).swap_remove(1);
    assert!(difference(&one, &two) < TOLERANCE, "{:e}", difference(&one, &two));

    let all = uneven();
    let mut order: Vec<usize> = (0..all.len()).collect();
    side_by_side(&mut order, |index| &all[index]);
    let sorted: Vec<&Trajectory> = order.iter().map(|index| &all[*index]).collect();
    let part = |range: std::ops::Range<usize>| sorted[range].iter().map(|one| (*one).clone()).collect();
    let own: Vec<_> = divide(&sorted, 2).into_iter().map(|range| gradient(part(range), Group::alone())).collect();
    let mistaken: Vec<f64> = own[0].iter().zip(&own[1]).map(|(one, other)| (one + other) / 2.0).collect();
    assert!(difference(&one, &mistaken) > 1000.0 * TOLERANCE, "{:e}", difference(&one, &mistaken));
}
