use std::collections::BTreeMap;

use super::super::tiny_test::{FORWARD, decoder, difference, sample, values};
use super::*;
use crate::checkpoint::read_tensors;
use crate::model::Head;

mod formulas;
mod processes;

fn settings() -> PpoSettings {
    PpoSettings {
        forward: FORWARD,
        policy_loss: PolicyLoss { clip_low: 0.2, clip_high: 0.28, dual_clip: 3.0 },
        aggregation: Aggregation::SeqMeanTokenMean,
        width: 8,
        gamma: 1.0,
        lambda_policy: Lambda::Fixed(1.0),
        lambda_critic: Lambda::Fixed(1.0),
        group_baseline: None,
        whiten: true,
        drop_equal_groups: false,
        drop_truncated: false,
        value_clip: 0.0,
        correction: Correction::Token { cap: 2.0 },
        kl_estimate: KlEstimate::K3,
        kl_place: KlPlace::Loss,
        entropy: 0.0,
        actor_rate: 1e-2,
        critic_rate: 1e-2,
        warmup_steps: 0,
        critic_only_steps: 0,
        mini_batch: 0,
        epochs: 1,
        adamw: AdamW { weight_decay: 0.0, ..AdamW::default() },
        seed: 7,
    }
}

fn ppo(settings: PpoSettings, actor: Decoder) -> Ppo {
    let vocabulary = actor.config().vocabulary;
    let critic = settings.group_baseline.is_none().then(|| decoder(vocabulary, Head::Value, 11));
    let rate = AdaptiveRate { factor: 1.0, target: 0.0 };
    Ppo::new(settings, actor, critic, None, KlCoefficient::Fixed(0.0), rate).unwrap()
}

/// The gradient of a run's first update, by parameter; `part` is `actor` or `critic`.
fn first_gradient(run: &Ppo, part: &str) -> BTreeMap<String, Vec<f64>> {
    let folder = tempfile::tempdir().unwrap();
    run.save(folder.path()).unwrap();
    let (tensors, about) = read_tensors(&folder.path().join(format!("{part}.safetensors"))).unwrap();
    let layout: Vec<(String, i64)> = serde_json::from_str(&about["layout"]).unwrap();
    let mut start = 0;
    let gradient = |(name, length)| {
        // After one step the first moment is a tenth of the gradient.
        let own = tensors["first"].narrow(0, start, length) * 10.0;
        start += length;
        (name, super::super::forward::numbers(&own))
    };
    layout.into_iter().map(gradient).collect()
}

/// With a uniform policy and one sample of each action, the gradient of the logits of action k is −A_k / n: the policy
/// gradient of a bandit, in closed form.
#[test]
fn the_first_gradient_of_a_bandit_is_the_policy_gradient() {
    let actor = decoder(5, Head::Language, 3);
    tch::no_grad(|| {
        let head = actor.parameters().iter().find(|parameter| parameter.name == "lm_head.weight").unwrap();
        let _ = head.tensor.shallow_clone().zero_();
    });
    let hidden = tch::no_grad(|| actor.hidden(&crate::model::Packed::new(&[&[2]], tch::Device::Cpu)).get(0));
    let rewards = [3.0, -1.0, 1.0, 2.0, 0.0];
    let arm = |(action, reward): (usize, f64)| Trajectory {
        task: "bandit".into(),
        ids: vec![2, action as i64],
        mask: vec![false, true],
        log_probs: vec![0.0, -5f64.ln()],
        reward,
        ..Trajectory::default()
    };
    let batch: Vec<Trajectory> = rewards.into_iter().enumerate().map(arm).collect();
    let adamw = AdamW { max_grad_norm: 0.0, weight_decay: 0.0, ..AdamW::default() };
    let baseline = Some(GroupBaseline::MeanOnly);
    let mut run = ppo(PpoSettings { group_baseline: baseline, whiten: false, adamw, ..settings() }, actor);
    run.update(&batch).unwrap();

    let found = &first_gradient(&run, "actor")["lm_head.weight"];
    let hidden = super::super::forward::numbers(&hidden);
    let expected: Vec<f64> =
        rewards.iter().flat_map(|reward| hidden.iter().map(move |h| -(reward - 1.0) / 5.0 * h)).collect();
    assert!(difference(&expected, found) < 1e-5, "{}", difference(&expected, found));
}

/// Prompts of three tokens; right is to say the middle one and stop.
fn copy_task(run: &mut Ppo, steps: u64) -> f64 {
    let mut reward = 0.0;
    for step in 0..steps {
        let prompts: Vec<Vec<i64>> = (0..48).map(|index| vec![5, 1 + (index / 8 + step as i64) % 4, 5]).collect();
        let mut batch = sample(run.actor(), &prompts, 3, step);
        for trajectory in &mut batch {
            let answer = &trajectory.ids[3..];
            let right =
                [f64::from(answer.first() == Some(&trajectory.ids[1])), f64::from(answer.len() == 2 && answer[1] == 0)];
            trajectory.reward = 0.5 * right[0] + 0.5 * right[0] * right[1];
        }
        reward = run.update(&batch).unwrap()["critic/score/mean"];
    }
    reward
}

#[test]
fn a_copy_task_is_learned_by_ppo_and_by_grpo() {
    let reward = copy_task(&mut ppo(settings(), decoder(6, Head::Language, 1)), 80);
    assert!(reward >= 0.95, "PPO: {reward}");
    let grpo = PpoSettings { group_baseline: Some(GroupBaseline::Grpo), whiten: false, ..settings() };
    let reward = copy_task(&mut ppo(grpo, decoder(6, Head::Language, 1)), 80);
    assert!(reward >= 0.95, "GRPO: {reward}");
}

/// A bug of the usual kind must make the copy task fail, else it shows nothing.
#[test]
fn a_reward_of_the_wrong_sign_does_not_learn_the_copy_task() {
    let mut run = ppo(PpoSettings { actor_rate: -1e-2, ..settings() }, decoder(6, Head::Language, 1));
    assert!(copy_task(&mut run, 30) < 0.2);
}

/// The mean length after training on a reward over the mean length before.
fn length_ratio(reward: impl Fn(u64, &Trajectory) -> f64) -> f64 {
    // With a large ε Adam's steps are as long as the gradient, so that noise averages out and a drift doesn't.
    let adamw = AdamW { epsilon: 1.0, weight_decay: 0.0, ..AdamW::default() };
    let baseline = Some(GroupBaseline::MeanOnly);
    let mut run = ppo(
        PpoSettings { group_baseline: baseline, actor_rate: 0.015, adamw, ..settings() },
        decoder(4, Head::Language, 6),
    );
    let mut lengths = Vec::new();
    for step in 0..50 {
        let mut batch = sample(run.actor(), &vec![vec![1]; 64], 12, step);
        for (index, trajectory) in batch.iter_mut().enumerate() {
            trajectory.reward = reward(step * 64 + index as u64, trajectory);
        }
        lengths.push(run.update(&batch).unwrap()["response_length/mean"]);
    }
    let mean = |range: std::ops::Range<usize>| lengths[range.clone()].iter().sum::<f64>() / range.len() as f64;
    mean(40..50) / mean(0..10)
}

#[test]
fn a_reward_that_has_nothing_to_do_with_length_drifts_no_length() {
    let drift = length_ratio(|number, _| f64::from(crate::random::mix(number) as u32 % 2));
    assert!((drift - 1.0).abs() < 0.2, "{drift}");
    let wanted = length_ratio(|_, trajectory| trajectory.generated() as f64);
    assert!(wanted > 1.5, "a reward for length does: {wanted}");
}

fn rewarded(actor: &Decoder, step: u64) -> Vec<Trajectory> {
    let prompts: Vec<Vec<i64>> = (0..8).map(|index| vec![1 + index % 3, 2]).collect();
    let mut batch = sample(actor, &prompts, 6, step);
    for (index, trajectory) in batch.iter_mut().enumerate() {
        trajectory.reward = (index as f64 + step as f64).sin();
    }
    batch
}

fn double(values: Vec<f32>) -> Vec<f64> {
    values.into_iter().map(f64::from).collect()
}

#[test]
fn one_micro_batch_of_eight_is_eight_of_one() {
    let updated = |micro_batch_tokens, chunk| {
        let forward = ForwardSettings { micro_batch_tokens, chunk, ..FORWARD };
        // A rate so high that Adam's sign of tiny gradients would show; ε keeps it a function of their size.
        let adamw = AdamW { epsilon: 1e-3, ..settings().adamw };
        let mut run = ppo(PpoSettings { forward, adamw, ..settings() }, decoder(6, Head::Language, 1));
        let batch = rewarded(run.actor(), 0);
        let metrics = run.update(&batch).unwrap();
        (double(values(run.actor())), double(values(run.critic().unwrap())), metrics)
    };
    let (actor, critic, metrics) = updated(1000, 1000);
    let (other_actor, other_critic, other_metrics) = updated(1, 2);
    assert!(difference(&actor, &other_actor) < 1e-5, "{}", difference(&actor, &other_actor));
    assert!(difference(&critic, &other_critic) < 1e-5);
    for (name, value) in metrics {
        assert!((value - other_metrics[&name]).abs() < 1e-5, "{name}: {value} {}", other_metrics[&name]);
    }
}

#[test]
fn a_run_that_is_loaded_goes_on_with_the_same_bits() {
    let settings = PpoSettings { mini_batch: 3, epochs: 2, warmup_steps: 3, ..settings() };
    let start = || {
        let (critic, reference) = (decoder(6, Head::Value, 11), decoder(6, Head::Language, 2));
        let kl = KlCoefficient::Adaptive { beta: 0.1, target: 0.01, horizon: 50.0 };
        let rate = AdaptiveRate { factor: 1.0, target: 1e-4 };
        Ppo::new(settings.clone(), decoder(6, Head::Language, 1), Some(critic), Some(reference), kl, rate).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let mut whole = start();
    for step in 0..4 {
        if step == 2 {
            whole.save(folder.path()).unwrap();
        }
        let batch = rewarded(whole.actor(), step);
        whole.update(&batch).unwrap();
    }
    let mut resumed = start();
    resumed.load(folder.path()).unwrap();
    assert_eq!(resumed.step(), 2);
    // Neither is what a run begins with, so it matters that they are loaded.
    assert!(resumed.controls.kl.beta() > 0.1 && resumed.controls.rate.factor != 1.0, "{:?}", resumed.controls);
    for step in 2..4 {
        let batch = rewarded(resumed.actor(), step);
        resumed.update(&batch).unwrap();
    }
    assert_eq!(values(whole.actor()), values(resumed.actor()));
    assert_eq!(values(whole.critic().unwrap()), values(resumed.critic().unwrap()));
    assert_eq!(whole.controls, resumed.controls);
}

#[test]
fn what_does_not_count_changes_neither_the_actor_nor_the_denominator() {
    let run = |extra: bool| {
        let adamw = AdamW { epsilon: 1e-3, ..settings().adamw };
        let grpo = Some(GroupBaseline::MeanOnly);
        let settings =
            PpoSettings { group_baseline: grpo, drop_equal_groups: true, drop_truncated: false, adamw, ..settings() };
        let mut run = ppo(settings, decoder(6, Head::Language, 1));
        let mut batch = rewarded(run.actor(), 0);
        if extra {
            let same = batch[0].clone();
            batch.extend((0..5).map(|sample| Trajectory { task: "equal".into(), sample, reward: 2.0, ..same.clone() }));
        }
        let metrics = run.update(&batch).unwrap();
        (double(values(run.actor())), metrics["actor/trajectories_left_out"], metrics["actor/tokens_of_updates"])
    };
    let ((alone, none, tokens), (beside, left_out, same_tokens)) = (run(false), run(true));
    assert_eq!((none, left_out), (0.0, 5.0 / 13.0));
    assert!(tokens > 0.0);
    assert_eq!(same_tokens, tokens, "what has no weight is not computed");
    assert!(difference(&alone, &beside) < 1e-6, "{}", difference(&alone, &beside));
}

#[test]
fn in_the_first_steps_the_critic_learns_alone() {
    let mut run = ppo(PpoSettings { critic_only_steps: 2, ..settings() }, decoder(6, Head::Language, 1));
    let before = values(run.actor());
    for step in 0..2 {
        let batch = rewarded(run.actor(), step);
        assert_eq!(run.update(&batch).unwrap()["actor/updates"], 0.0);
    }
    assert_eq!(values(run.actor()), before);
    assert_ne!(values(run.critic().unwrap()), values(&decoder(6, Head::Value, 11)));
    let batch = rewarded(run.actor(), 2);
    run.update(&batch).unwrap();
    assert_ne!(values(run.actor()), before);
}

#[test]
fn a_penalty_for_leaving_the_reference_pulls_towards_it() {
    let divergence = |beta: f64, place: KlPlace| {
        let reference = decoder(6, Head::Language, 2);
        // As a reward k1 has the right gradient, and k3 has not.
        let kl_estimate = if place == KlPlace::Reward { KlEstimate::K1 } else { KlEstimate::K3 };
        let settings = PpoSettings { kl_place: place, kl_estimate, correction: Correction::None, ..settings() };
        let (critic, rate) = (decoder(6, Head::Value, 11), AdaptiveRate { factor: 1.0, target: 0.0 });
        let (actor, kl) = (decoder(6, Head::Language, 1), KlCoefficient::Fixed(beta));
        let mut run = Ppo::new(settings, actor, Some(critic), Some(reference), kl, rate).unwrap();
        let mut last = 0.0;
        for step in 0..25 {
            let mut batch = sample(run.actor(), &vec![vec![1, 2]; 32], 6, step);
            batch.iter_mut().for_each(|trajectory| trajectory.reward = 0.0);
            last = run.update(&batch).unwrap()["actor/kl_to_reference"];
        }
        last
    };
    let (free, loss, reward) =
        (divergence(1e-9, KlPlace::Loss), divergence(1.0, KlPlace::Loss), divergence(1.0, KlPlace::Reward));
    assert!(loss < 0.5 * free && reward < 0.7 * free, "{free} {loss} {reward}");
}

#[test]
fn settings_that_lack_something_are_refused() {
    let rate = AdaptiveRate { factor: 1.0, target: 0.0 };
    let refused = |settings, kl| Ppo::new(settings, decoder(6, Head::Language, 1), None, None, kl, rate).err().unwrap();
    assert!(refused(settings(), KlCoefficient::Fixed(0.0)).message.contains("needs a critic"));
    let grpo = PpoSettings { group_baseline: Some(GroupBaseline::Grpo), ..settings() };
    assert!(refused(grpo, KlCoefficient::Fixed(0.1)).message.contains("reference"));
}
