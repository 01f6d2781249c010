//! A step against its formulas, written a second time: token by token over whole trajectories, with nothing packed and
//! nothing cut down to generated tokens. The second time also with the mistakes that trainers are known for: a step that
//! made one of them would have its gradients and not those of the formulas.

use tch::{Device, no_grad};

use super::super::super::forward::numbers;
use super::super::super::tiny_test::gradients;
use super::*;
use crate::model::Packed;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    /// Each token's mask stands at the token after it.
    MaskLate,
    /// Each token's mask stands at the token before it.
    MaskEarly,
    /// The old log-probabilities have a gradient.
    OldNotDetached,
    /// The critic's targets are made of whitened advantages.
    WhitenedBeforeReturns,
    /// Observation tokens have a value and a discount.
    ObservationsSteppedThrough,
    /// The reward stands on the last token, whoever wrote it.
    RewardOnTheLastToken,
}

/// Values for each trajectory, and in it for each of the tokens that count.
type PerToken = Vec<Vec<f64>>;

/// A step's formulas, with at most one mistake in them.
struct Formulas<'a> {
    settings: &'a PpoSettings,
    batch: &'a [Trajectory],
    mistake: Option<Mistake>,
}

impl Formulas<'_> {
    fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    /// The tokens that count.
    fn tokens(&self, trajectory: &Trajectory) -> Vec<usize> {
        let counts = |token: &usize| match self.mistake {
            Some(Mistake::MaskLate) => trajectory.mask[token - 1],
            Some(Mistake::MaskEarly) => trajectory.mask.get(token + 1) == Some(&true),
            _ => trajectory.mask[*token],
        };
        (1..trajectory.ids.len()).filter(counts).collect()
    }

    /// Σ (γλ)^(l − j) δ_l for each token j that counts; `values` has an entry a token of the trajectory.
    fn advantages(&self, trajectory: &Trajectory, values: &[f64], lambda: f64) -> Vec<f64> {
        let counting = self.tokens(trajectory);
        let last = *counting.last().unwrap();
        let rewarded = if self.makes(Mistake::RewardOnTheLastToken) { trajectory.ids.len() - 1 } else { last };
        let steps: Vec<usize> = match self.makes(Mistake::ObservationsSteppedThrough) {
            true => (counting[0]..=last).collect(),
            false => counting.clone(),
        };
        let gamma = self.settings.gamma;
        let error = |place: usize| {
            let next = steps.get(place + 1).map_or(0.0, |token| values[*token]);
            f64::from(steps[place] == rewarded) * trajectory.reward + gamma * next - values[steps[place]]
        };
        let sum = |from: usize| -> f64 {
            (from..steps.len()).map(|place| (gamma * lambda).powi((place - from) as i32) * error(place)).sum()
        };
        (0..steps.len()).filter(|place| counting.contains(&steps[*place])).map(sum).collect()
    }

    /// The gradients of actor and critic at the weights `now`, in a step that began with the weights `before`.
    fn gradients(&self, before: [&Decoder; 2], now: [&Decoder; 2]) -> [Vec<f64>; 2] {
        let [old, values]: [PerToken; 2] = no_grad(|| {
            let said = |read: &dyn Fn(&Trajectory) -> Tensor| -> PerToken {
                self.batch.iter().map(|trajectory| numbers(&read(trajectory))).collect()
            };
            [said(&|trajectory| chosen(before[0], trajectory)), said(&|trajectory| states(before[1], trajectory))]
        });
        let estimate = |lambda: Lambda| -> PerToken {
            let each = self.batch.iter().zip(&values);
            each.map(|(trajectory, values)| {
                self.advantages(trajectory, values, lambda.of(self.tokens(trajectory).len()))
            })
            .collect()
        };
        let advantages = whitened(&estimate(self.settings.lambda_policy));
        let mut errors = estimate(self.settings.lambda_critic);
        if self.makes(Mistake::WhitenedBeforeReturns) {
            errors = whitened(&errors);
        }
        let PolicyLoss { clip_low, clip_high, dual_clip } = self.settings.policy_loss;
        for (index, trajectory) in self.batch.iter().enumerate() {
            let tokens = self.tokens(trajectory);
            let share = 1.0 / (self.batch.len() * tokens.len()) as f64;
            let (new, new_values) = (chosen(now[0], trajectory), states(now[1], trajectory));
            let (mut loss, mut critic_loss) = (Tensor::from(0.0f32), Tensor::from(0.0f32));
            for (place, token) in tokens.into_iter().enumerate() {
                let (advantage, old) = (advantages[index][place], old[index][token]);
                let new = new.get(token as i64);
                let mut log_ratio = &new - old;
                if self.makes(Mistake::OldNotDetached) {
                    log_ratio = log_ratio - &new + new.detach();
                }
                let ratio = log_ratio.exp();
                let worse =
                    (&ratio * -advantage).max_other(&(ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * -advantage));
                let worse = if advantage < 0.0 { worse.clamp_max(-advantage * dual_clip) } else { worse };
                let correction = (old - trajectory.log_probs[token]).exp().min(2.0);
                loss += worse * (share * correction);

                let (value, target) = (values[index][token], values[index][token] + errors[index][place]);
                let new = new_values.get(token as i64);
                let clip = self.settings.value_clip;
                let bounded = (&new - value).clamp(-clip, clip) + value;
                critic_loss += (new - target).square().max_other(&(bounded - target).square()) * (0.5 * share);
            }
            loss.backward();
            critic_loss.backward();
        }
        now.map(gradients)
    }
}

/// The log-probability of each token of a trajectory; of the first, from nothing, 0.
fn chosen(decoder: &Decoder, trajectory: &Trajectory) -> Tensor {
    let all = decoder.head(&decoder.hidden(&Packed::new(&[&trajectory.ids], Device::Cpu)));
    let all = all.log_softmax(-1, Kind::Float);
    let each: Vec<Tensor> =
        (1..trajectory.ids.len()).map(|token| all.get(token as i64 - 1).get(trajectory.ids[token])).collect();
    Tensor::cat(&[Tensor::zeros([1], (Kind::Float, Device::Cpu)), Tensor::stack(&each, 0)], 0)
}

/// The value of the state in which each token was chosen; of the first, 0.
fn states(critic: &Decoder, trajectory: &Trajectory) -> Tensor {
    let all = critic.head(&critic.hidden(&Packed::new(&[&trajectory.ids], Device::Cpu)));
    Tensor::cat(&[Tensor::zeros([1], (Kind::Float, Device::Cpu)), all.narrow(0, 0, all.size()[0] - 1)], 0)
}

fn whitened(rows: &[Vec<f64>]) -> PerToken {
    let all = rows.concat();
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    let variance = all.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (all.len() - 1) as f64;
    let scaled = |row: &Vec<f64>| row.iter().map(|value| (value - mean) / (variance + 1e-8).sqrt()).collect();
    rows.iter().map(scaled).collect()
}

/// Moves all parameters a little, so that a policy and the one that it was differ.
fn moved(decoder: Decoder, seed: u32, deviation: f64) -> Decoder {
    for (number, parameter) in decoder.parameters().iter().enumerate() {
        let size = parameter.tensor.size();
        let drawn = crate::random::normal([number as u32, seed], size.iter().product::<i64>() as usize, deviation);
        no_grad(|| {
            let _ = parameter.tensor.shallow_clone().g_add_(&Tensor::from_slice(&drawn).reshape(&size));
        });
    }
    decoder
}

fn actor() -> Decoder {
    decoder(9, Head::Language, 1)
}

/// One whose values differ from token to token; a new one says 0.
fn critic() -> Decoder {
    moved(decoder(9, Head::Value, 11), 5, 0.2)
}

/// Episodes of one turn, of two, and of two with an observation at the end. Each turn but the first begins with the token
/// 5, and `observations` come before it.
fn episodes(actor: &Decoder, observations: &[i64]) -> Vec<Trajectory> {
    let prompts = [vec![1, 2], vec![1, 2], vec![3], vec![3], vec![4, 4, 1], vec![4, 4, 1]];
    let mut batch = sample(actor, &prompts, 4, 5);
    for (index, trajectory) in batch.iter_mut().enumerate() {
        let mut append = |ids: &[i64], generated: bool| {
            for (place, id) in ids.iter().enumerate() {
                trajectory.ids.push(*id);
                trajectory.mask.push(generated);
                trajectory.log_probs.push(if generated { -1.4 - 0.3 * place as f64 } else { 0.0 });
            }
        };
        // A mask that is shifted leaves something of the shortest, too.
        append(&[4, 2], true);
        if index % 3 > 0 {
            append(&[observations, &[5]].concat(), false);
            append(&[7, 3, index as i64], true);
        }
        if index % 3 == 2 {
            append(observations, false);
        }
        // The sampler was not quite the policy.
        let sampled = trajectory.mask.iter().zip(&mut trajectory.log_probs).filter(|(generated, _)| **generated);
        sampled.for_each(|(_, log_prob)| *log_prob -= 0.05 * index as f64);
        trajectory.reward = (index as f64 * 1.7).sin() + 0.5;
    }
    batch
}

fn two_turn_settings() -> PpoSettings {
    PpoSettings {
        gamma: 0.95,
        lambda_policy: Lambda::Fixed(0.8),
        lambda_critic: Lambda::Fixed(0.9),
        value_clip: 0.1,
        adamw: AdamW { max_grad_norm: 0.0, weight_decay: 0.0, ..AdamW::default() },
        ..settings()
    }
}

#[test]
fn gradients_are_those_of_the_formulas_and_of_no_known_mistake() {
    let settings = two_turn_settings();
    let batch = episodes(&actor(), &[6, 8, 2]);
    let mut run = ppo(settings.clone(), actor());
    run.critic = Some(critic());
    run.critic_optimizer = run.critic.as_ref().map(|critic| Optimizer::new(critic.parameters(), settings.adamw));
    let prepared = run.prepare(&batch, &mut Metrics::new()).unwrap();
    // As after an update or two: what is old and what is new differ, some by more than the clips.
    let [new_actor, new_critic] = [moved(actor(), 8, 0.05), moved(critic(), 9, 0.05)];
    no_grad(|| {
        for (run, new) in [(&run.actor, &new_actor), (run.critic.as_ref().unwrap(), &new_critic)] {
            for (parameter, new) in run.parameters().iter().zip(new.parameters()) {
                parameter.tensor.shallow_clone().copy_(&new.tensor);
            }
        }
    });
    let (all, mut updates): (Vec<usize>, _) = ((0..batch.len()).collect(), Updates::default());
    run.update_actor(&prepared, &all, &mut updates).unwrap();
    run.update_critic(&prepared, &all, &mut updates).unwrap();
    for clipped in [&updates.clipped, &updates.critic_clipped] {
        assert!((0.1..0.9).contains(&clipped.mean()), "some are clipped: {}", clipped.mean());
    }
    let found = [("actor", &run.actor), ("critic", run.critic.as_ref().unwrap())];
    let found = found.map(|(part, decoder)| -> Vec<f64> {
        let gradient = first_gradient(&run, part);
        decoder.parameters().iter().flat_map(|parameter| gradient[&parameter.name].clone()).collect()
    });
    let errors = |mistake| {
        let formulas = Formulas { settings: &settings, batch: &batch, mistake };
        let expected = formulas.gradients([&actor(), &critic()], [&new_actor, &new_critic]);
        [0, 1].map(|index| difference(&expected[index], &found[index]))
    };
    let right = errors(None);
    assert!(right.iter().all(|error| *error < 1e-5), "{right:?}");
    // Whether actor's and critic's gradients are others then.
    let mistakes = [
        (Mistake::MaskLate, [true, true]),
        (Mistake::MaskEarly, [true, true]),
        (Mistake::OldNotDetached, [true, false]),
        (Mistake::WhitenedBeforeReturns, [false, true]),
        (Mistake::ObservationsSteppedThrough, [true, true]),
        (Mistake::RewardOnTheLastToken, [true, true]),
    ];
    for (mistake, shows) in mistakes {
        let wrong = errors(Some(mistake));
        assert_eq!(wrong.map(|error| error > 1e-2), shows, "{mistake:?}: {wrong:?}");
    }
}

/// A decoder whose attention has no output, and no gradient: the state of a token depends on that token alone.
fn blind(decoder: Decoder) -> Decoder {
    for parameter in decoder.parameters() {
        if ["v_proj", "o_proj"].iter().any(|part| parameter.name.contains(part)) {
            let _ = no_grad(|| parameter.tensor.shallow_clone().zero_());
        }
    }
    decoder
}

/// Steps on episodes with so many observation tokens: what actor and critic are then, and the metrics of the last step.
fn trained(observations: &[i64], counted: bool, blinded: bool) -> [Vec<f64>; 3] {
    let make = |decoder| if blinded { blind(decoder) } else { decoder };
    // ε, so that Adam's steps depend on how large gradients are and no rounding becomes a step.
    let adamw = AdamW { epsilon: 1e-3, weight_decay: 0.0, ..AdamW::default() };
    let settings = PpoSettings { mini_batch: 4, epochs: 2, entropy: 0.01, adamw, ..two_turn_settings() };
    let mut run = ppo(settings, make(actor()));
    run.critic = Some(make(critic()));
    run.critic_optimizer = run.critic.as_ref().map(|critic| Optimizer::new(critic.parameters(), adamw));
    let mut batch = episodes(&make(actor()), observations);
    if counted {
        for trajectory in &mut batch {
            let first = trajectory.mask.iter().position(|generated| *generated).unwrap();
            trajectory.mask[first..].fill(true);
        }
    }
    let mut metrics = Metrics::new();
    for _ in 0..3 {
        metrics = run.update(&batch).unwrap();
    }
    // They are counted where everything is.
    for name in ["perf/total_num_tokens", "actor/tokens_of_updates"] {
        metrics.remove(name).unwrap();
    }
    [double(values(run.actor())), double(values(run.critic().unwrap())), metrics.into_values().collect()]
}

#[test]
fn observation_tokens_inserted_into_episodes_change_nothing() {
    let apart = |one: &[Vec<f64>; 3], other: &[Vec<f64>; 3]| [0, 1, 2].map(|part| difference(&one[part], &other[part]));
    let without = trained(&[], false, true);
    for observations in [&[6][..], &[8, 2, 6, 8, 2, 6, 8, 0, 1, 3, 3, 3]] {
        let errors = apart(&without, &trained(observations, false, true));
        assert!(errors.iter().all(|error| *error < 1e-5), "{observations:?}: {errors:?}");
    }
    // Neither is so where a decoder reads them, nor where they count as generated, so the above can fail.
    let (reads, read) = (trained(&[], false, false), trained(&[6, 8], false, false));
    assert!(apart(&reads, &read).iter().all(|difference| *difference > 1e-3), "{:?}", apart(&reads, &read));
    let counted = apart(&without, &trained(&[6, 8], true, true));
    assert!(counted.iter().all(|difference| *difference > 1e-3), "{counted:?}");
}

/// Whatever a decoder reads, losses are at what it wrote: in the order of the packed batch, nothing else and nothing less.
#[test]
fn losses_are_at_generated_tokens_alone() {
    let batch = episodes(&actor(), &[6, 8, 2]);
    let trajectories: Vec<&Trajectory> = batch.iter().collect();
    let rows = Rows::new(&trajectories, Device::Cpu);
    let mut seen: Vec<f64> = Vec::new();
    backward(&actor(), &rows, &FORWARD, |logits, targets, _| {
        seen.extend(numbers(targets));
        log_probs(logits, targets, 1.0, false).0.sum(Kind::Float)
    });
    let written = batch.iter().flat_map(|trajectory| trajectory.at_generated(&trajectory.ids));
    assert_eq!(seen, written.map(|id| id as f64).collect::<Vec<_>>());
}
