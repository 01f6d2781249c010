use tch::no_grad;

use super::super::tiny_test::{FORWARD, decoder, difference, gradients, sample};
use super::*;
use crate::model::Head;

fn batch() -> Vec<Trajectory> {
    // Some begin alike: two answers to one prompt, and prompts that differ at their ends.
    let prompts = [vec![1], vec![2, 3, 4], vec![2, 3, 4], vec![2, 3, 1], vec![3, 3, 3, 3], vec![3, 3, 3, 3], vec![4]];
    let mut trajectories = sample(&decoder(9, Head::Language, 1), &prompts, 9, 5);
    // One turn ended and something was inserted.
    let inserted = &mut trajectories[1];
    inserted.ids.extend([7, 8, 6]);
    inserted.mask.extend([false, false, true]);
    inserted.log_probs.extend([0.0, 0.0, -1.0]);
    trajectories
}

/// A loss with another weight for each token.
fn gradient(decoder: &Decoder, trajectories: &[&Trajectory], settings: &ForwardSettings) -> Vec<f64> {
    let mut seen = 0;
    for range in micro_batches(trajectories, settings.micro_batch_tokens) {
        let rows = Rows::new(&trajectories[range], Device::Cpu);
        let start = seen;
        backward(decoder, &rows, settings, |logits, targets, chunk| {
            let (chosen, entropy) = log_probs(logits, targets, settings.temperature, true);
            let weights: Vec<f32> = chunk.map(|row| ((start + row) as f32 * 0.7).sin()).collect();
            ((chosen + entropy * 0.1) * Tensor::from_slice(&weights)).sum(Kind::Float)
        });
        seen += rows.count;
    }
    gradients(decoder)
}

/// The same without packing, checkpointing or chunks, from the definition.
fn gradient_by_definition(decoder: &Decoder, trajectories: &[&Trajectory]) -> Vec<f64> {
    let mut row = 0;
    for trajectory in trajectories {
        let packed = Packed::new(&[&trajectory.ids], Device::Cpu);
        let all = decoder.head(&decoder.hidden(&packed)).log_softmax(-1, Kind::Float);
        let entropy = -(all.exp() * &all).sum_dim_intlist([-1i64].as_slice(), false, Kind::Float);
        let mut loss = Tensor::from(0.0f32);
        for token in (0..trajectory.ids.len()).filter(|token| trajectory.mask[*token]) {
            let before = token as i64 - 1;
            let chosen = all.get(before).get(trajectory.ids[token]) + entropy.get(before) * 0.1;
            loss += chosen * (row as f64 * 0.7).sin();
            row += 1;
        }
        loss.backward();
    }
    gradients(decoder)
}

#[test]
fn packed_checkpointed_and_chunked_gradients_are_those_of_the_definition() {
    let (decoder, trajectories) = (decoder(9, Head::Language, 2), batch());
    let trajectories: Vec<&Trajectory> = trajectories.iter().collect();
    let expected = gradient_by_definition(&decoder, &trajectories);
    assert!(expected.iter().any(|value| value.abs() > 0.1));
    let sequences: Vec<&[i64]> = trajectories.iter().map(|trajectory| trajectory.ids.as_slice()).collect();
    let rows = Packed::sharing(&sequences, Device::Cpu).tokens.size1().unwrap();
    assert!(rows + 9 <= sequences.concat().len() as i64, "{rows} rows: nothing is shared");
    for checkpointing in [false, true] {
        for (micro_batch_tokens, chunk) in [(1, 1), (20, 3), (1000, 1000)] {
            let settings = ForwardSettings { micro_batch_tokens, chunk, checkpointing, temperature: 1.0 };
            let found = gradient(&decoder, &trajectories, &settings);
            assert!(difference(&expected, &found) < 1e-5, "{settings:?}: {}", difference(&expected, &found));
        }
    }
}

#[test]
fn log_probabilities_are_those_that_were_sampled_and_none_else() {
    let decoder = decoder(9, Head::Language, 1);
    let trajectories = sample(&decoder, &[vec![1], vec![2, 3], vec![4, 5, 6]], 6, 3);
    let all: Vec<&Trajectory> = trajectories.iter().collect();
    let said = evaluate(&decoder, &all, &FORWARD);
    for (trajectory, values) in trajectories.iter().zip(&said.values) {
        assert!(difference(&trajectory.at_generated(&trajectory.log_probs), values) < 1e-5);
    }
    // A mask that is shifted by one token gives other numbers, so the test above can fail.
    let mut shifted = trajectories.clone();
    for trajectory in &mut shifted {
        trajectory.ids.insert(0, 1);
        trajectory.mask.push(true);
        trajectory.log_probs.push(0.0);
    }
    let shifted: Vec<&Trajectory> = shifted.iter().collect();
    let wrong = evaluate(&decoder, &shifted, &FORWARD);
    assert!(difference(&said.values[0], &wrong.values[0][..said.values[0].len()]) > 1e-2);
}

#[test]
fn a_temperature_divides_the_logits() {
    let decoder = decoder(9, Head::Language, 1);
    let trajectories = batch();
    let all: Vec<&Trajectory> = trajectories.iter().collect();
    let flat = evaluate(&decoder, &all, &ForwardSettings { temperature: 1e6, ..FORWARD });
    assert!(flat.values.concat().iter().all(|value| (value + 9f64.ln()).abs() < 1e-3));
    assert!(flat.entropies.concat().iter().all(|value| (value - 9f64.ln()).abs() < 1e-3));
}

#[test]
fn a_value_is_that_of_the_state_before_the_token() {
    let critic = decoder(9, Head::Value, 4);
    no_grad(|| {
        for parameter in critic.parameters().iter().filter(|parameter| parameter.name.contains("score")) {
            let _ = parameter.tensor.shallow_clone().fill_(0.3);
        }
    });
    let trajectories = batch();
    let all: Vec<&Trajectory> = trajectories.iter().collect();
    let said = evaluate_values(&critic, &all, &FORWARD);
    // What follows a state cannot change its value.
    let mut other = trajectories.clone();
    *other[0].ids.last_mut().unwrap() = 8 - other[0].ids.last().unwrap();
    let other: Vec<&Trajectory> = other.iter().collect();
    let (first, changed) = (&said[0], &evaluate_values(&critic, &other, &FORWARD)[0]);
    assert!(difference(first, changed) < 1e-6);
    assert!(first.iter().any(|value| value.abs() > 1e-3));
}

fn with_ids(ids: impl IntoIterator<Item = Vec<i64>>) -> Vec<Trajectory> {
    ids.into_iter().map(|ids| Trajectory { ids, ..Trajectory::default() }).collect()
}

#[test]
fn micro_batches_hold_what_fits_in_order() {
    let trajectories = with_ids((0..).zip([3, 3, 9, 1, 1]).map(|(first, length)| vec![first; length]));
    let all: Vec<&Trajectory> = trajectories.iter().collect();
    assert_eq!(micro_batches(&all, 6), [0..2, 2..3, 3..5]);
    assert_eq!(micro_batches(&all, 1), [0..1, 1..2, 2..3, 3..4, 4..5]);
    assert_eq!(micro_batches(&[], 6), [] as [Range<usize>; 0]);
}

#[test]
fn what_neighbours_have_in_common_counts_once_up_to_what_attention_sees() {
    let trajectories = with_ids((0..20).map(|last| vec![1, 1, 1, last]));
    let all: Vec<&Trajectory> = trajectories.iter().collect();
    assert_eq!(micro_batches(&all, 8), [0..5, 5..10, 10..15, 15..20]);
    assert_eq!(micro_batches(&all, 10), [0..7, 7..14, 14..20]);
    let equal = with_ids((0..20).map(|_| vec![1, 1, 1, 1]));
    let equal: Vec<&Trajectory> = equal.iter().collect();
    assert_eq!(
        micro_batches(&equal, 8),
        [0..6, 6..12, 12..18, 18..20],
        "24 tokens for attention, though they are 4 rows"
    );
}

#[test]
fn those_that_begin_alike_become_neighbours() {
    let trajectories = with_ids([vec![2, 1], vec![1, 2], vec![2], vec![1, 2], vec![1]]);
    let mut chosen = vec![0, 1, 2, 3, 4];
    side_by_side(&mut chosen, |index| &trajectories[index]);
    assert_eq!(chosen, [4, 1, 3, 2, 0]);
}
