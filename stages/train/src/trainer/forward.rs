//! Packed micro-batches through a decoder, forwards and backwards.
//!
//! Two things cost memory: what each layer keeps for its gradient, and the logits, of which 32,768 tokens have 20 GB. Layers
//! are computed without keeping anything and once more, one at a time, on the way back (*checkpointing*); the head sees
//! the hidden states of generated tokens alone, a *chunk* at a time, and each chunk's gradient is taken at once. Neither
//! changes a number beyond the order of additions.
//!
//! What trajectories begin with alike, the instructions and a task's prompt, is nine tenths of their tokens, and is computed
//! once a micro-batch ([`Packed::sharing`]), if they come next to each other: see [`side_by_side`].

use std::ops::Range;

use tch::{Device, Kind, Tensor, no_grad};

use super::trajectory::Trajectory;
use crate::model::{Decoder, Packed, common};

/// How a decoder is run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForwardSettings {
    /// Most tokens of a micro-batch, those counted once that trajectories have in common; a longer trajectory is one of its
    /// own.
    pub micro_batch_tokens: usize,
    /// Rows of logits at a time.
    pub chunk: usize,
    /// Whether layers are computed twice to save memory.
    pub checkpointing: bool,
    /// What logits are divided by: the temperature that the trajectories were sampled at.
    pub temperature: f64,
}

/// A micro-batch, with where its generated tokens are predicted.
pub struct Rows {
    batch: Packed,
    /// Positions in the batch whose hidden state predicts a generated token.
    positions: Tensor,
    /// These tokens.
    targets: Tensor,
    /// How many.
    pub count: usize,
}

impl Rows {
    /// Packs trajectories one after another; rows are in their order.
    pub fn new(trajectories: &[&Trajectory], device: Device) -> Self {
        let sequences: Vec<&[i64]> = trajectories.iter().map(|trajectory| trajectory.ids.as_slice()).collect();
        let batch = Packed::sharing(&sequences, device);
        let (mut positions, mut targets) = (Vec::new(), Vec::new());
        for (index, trajectory) in trajectories.iter().enumerate() {
            for token in (1..trajectory.ids.len()).filter(|token| trajectory.mask[*token]) {
                positions.push(batch.row(index, token - 1));
                targets.push(trajectory.ids[token]);
            }
        }
        let to_device = |values: &[i64]| Tensor::from_slice(values).to_device(device);
        Self { count: targets.len(), batch, positions: to_device(&positions), targets: to_device(&targets) }
    }

    /// The generated tokens of some of the rows.
    fn targets(&self, rows: &Range<usize>) -> Tensor {
        self.targets.narrow(0, rows.start as i64, rows.len() as i64)
    }
}

/// Divides `trajectories` into micro-batches of at most `most` tokens, in order. What one has in common with the one before
/// it counts once; but attention sees every token, of which there are at most [`ATTENDED`] times as many.
pub fn micro_batches(trajectories: &[&Trajectory], most: usize) -> Vec<Range<usize>> {
    let attended = most.saturating_mul(ATTENDED);
    fill(&sizes(trajectories), |size| size.tokens <= most && size.attended <= attended)
}

/// A trajectory's tokens, or those of several.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// What one has in common with the one before it counted once.
    pub tokens: usize,
    /// All of them.
    pub attended: usize,
}

/// The size of each trajectory beside the one before it.
pub(super) fn sizes(trajectories: &[&Trajectory]) -> Vec<Size> {
    let before = std::iter::once([].as_slice()).chain(trajectories.iter().map(|trajectory| trajectory.ids.as_slice()));
    let size = |(trajectory, before): (&&Trajectory, &[i64])| {
        let (shared, attended) = (common(before, &trajectory.ids), trajectory.ids.len());
        Size { tokens: attended - shared, attended }
    };
    trajectories.iter().zip(before).map(size).collect()
}

/// Fills one range after another as long as what is in it `fits`; each has one trajectory at least.
pub(super) fn fill(sizes: &[Size], fits: impl Fn(Size) -> bool) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut filled = Size { tokens: 0, attended: 0 };
    for (index, size) in sizes.iter().enumerate() {
        let more = Size { tokens: filled.tokens + size.tokens, attended: filled.attended + size.attended };
        match ranges.last_mut().filter(|_| fits(more)) {
            Some(last) => (last.end, filled) = (index + 1, more),
            None => {
                // Nothing is before it there.
                filled = Size { tokens: size.attended, ..*size };
                ranges.push(index..index + 1);
            }
        }
    }
    ranges
}

/// Tokens that a micro-batch's attention may see, in multiples of its most tokens: their queries, keys and values are kept
/// for the gradient, a fraction of what a layer keeps.
const ATTENDED: usize = 3;

/// Brings `chosen`, indices of trajectories, into an order in which those that begin alike are neighbours.
pub fn side_by_side<'a>(chosen: &mut [usize], trajectory: impl Fn(usize) -> &'a Trajectory) {
    chosen.sort_by(|one, other| trajectory(*one).ids.cmp(&trajectory(*other).ids).then(one.cmp(other)));
}

/// Log-probability of each row's token and entropy of its distribution, in nats, float32, from logits [n, vocabulary].
/// The entropy is differentiable only where `entropy_counts`, which costs another tensor of the logits' size.
pub fn log_probs(logits: &Tensor, targets: &Tensor, temperature: f64, entropy_counts: bool) -> (Tensor, Tensor) {
    let scaled = if temperature == 1.0 { logits.shallow_clone() } else { logits / temperature };
    let all = scaled.log_softmax(-1, Kind::Float);
    let chosen = all.gather(-1, &targets.unsqueeze(-1), false).squeeze_dim(-1);
    let entropy = |all: &Tensor| -(all.exp() * all).sum_dim_intlist([-1i64].as_slice(), false, Kind::Float);
    let entropy = if entropy_counts { entropy(&all) } else { no_grad(|| entropy(&all.detach())) };
    (chosen, entropy)
}

/// What a decoder says of the generated tokens of trajectories.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// Of a language model: log-probabilities. Of a critic: values. By trajectory, an entry a generated token.
    pub values: Vec<Vec<f64>>,
    /// Of a language model: entropies. Of a critic: empty.
    pub entropies: Vec<Vec<f64>>,
}

/// Runs a language model over trajectories, without gradients.
pub fn evaluate(decoder: &Decoder, trajectories: &[&Trajectory], settings: &ForwardSettings) -> Said {
    run(decoder, trajectories, settings, |logits, targets| {
        let (chosen, entropy) = log_probs(logits, targets, settings.temperature, false);
        (chosen, Some(entropy))
    })
}

/// Runs a critic over trajectories, without gradients: the value of the state in which each generated token was chosen.
pub fn evaluate_values(critic: &Decoder, trajectories: &[&Trajectory], settings: &ForwardSettings) -> Vec<Vec<f64>> {
    run(critic, trajectories, settings, |values, _| (values.shallow_clone(), None)).values
}

fn run(
    decoder: &Decoder,
    trajectories: &[&Trajectory],
    settings: &ForwardSettings,
    read: impl Fn(&Tensor, &Tensor) -> (Tensor, Option<Tensor>),
) -> Said {
    let mut said = Said::default();
    for range in micro_batches(trajectories, settings.micro_batch_tokens) {
        let batch = &trajectories[range];
        let rows = Rows::new(batch, device(decoder));
        let (mut values, mut entropies) = (Vec::with_capacity(rows.count), Vec::new());
        no_grad(|| {
            let hidden = decoder.norm(&blocks(decoder, &rows.batch)).index_select(0, &rows.positions);
            for chunk in chunks(rows.count, settings.chunk) {
                let part = hidden.narrow(0, chunk.start as i64, chunk.len() as i64);
                let (value, entropy) = read(&decoder.head(&part), &rows.targets(&chunk));
                values.extend(numbers(&value));
                entropies.extend(entropy.iter().flat_map(numbers));
            }
        });
        said.values.extend(by_trajectory(&values, batch));
        if !entropies.is_empty() {
            said.entropies.extend(by_trajectory(&entropies, batch));
        }
    }
    said
}

/// Numbers of generated tokens, one after another, by trajectory.
pub fn by_trajectory(values: &[f64], trajectories: &[&Trajectory]) -> Vec<Vec<f64>> {
    let mut rest = values;
    let take = |trajectory: &&Trajectory| {
        let (own, others) = rest.split_at(trajectory.generated());
        rest = others;
        own.to_vec()
    };
    trajectories.iter().map(take).collect()
}

/// A tensor's values, on the host.
pub fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).to_device(Device::Cpu).flatten(0, -1)).expect("a flat tensor")
}

fn chunks(count: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    let size = size.max(1);
    (0..count).step_by(size).map(move |start| start..(start + size).min(count))
}

/// Forwards and backwards over one micro-batch: adds to the gradients of the decoder's parameters.
///
/// `loss` is called for each chunk of rows with the head's output and the rows' targets, and returns the chunk's share
/// of the loss, which is summed over chunks.
pub fn backward(
    decoder: &Decoder,
    rows: &Rows,
    settings: &ForwardSettings,
    mut loss: impl FnMut(&Tensor, &Tensor, Range<usize>) -> Tensor,
) {
    if rows.count == 0 {
        return;
    }
    let trains = decoder.parameters().iter().any(|parameter| parameter.trainable);
    assert!(trains, "a decoder without trainable parameters has no gradient");
    let (inputs, top) = match settings.checkpointing {
        true => {
            let mut inputs = Vec::with_capacity(decoder.layers());
            let top = no_grad(|| {
                let mut hidden = decoder.embed(&rows.batch.tokens);
                for index in 0..decoder.layers() {
                    inputs.push(hidden.shallow_clone());
                    hidden = decoder.layer(index, &hidden, &rows.batch);
                }
                hidden
            });
            (inputs, top.detach().set_requires_grad(true))
        }
        false => (Vec::new(), blocks(decoder, &rows.batch)),
    };
    let selected = decoder.norm(&top).index_select(0, &rows.positions);
    // A leaf of its own, so that each chunk's graph goes when its gradient has been taken.
    let leaf = selected.detach().set_requires_grad(true);
    for chunk in chunks(rows.count, settings.chunk) {
        let part = leaf.narrow(0, chunk.start as i64, chunk.len() as i64);
        loss(&decoder.head(&part), &rows.targets(&chunk), chunk).backward();
    }
    push(&selected, &leaf.grad());
    if !settings.checkpointing {
        return;
    }
    let mut gradient = top.grad();
    for (index, input) in inputs.into_iter().enumerate().rev() {
        let input = input.detach().set_requires_grad(true);
        push(&decoder.layer(index, &input, &rows.batch), &gradient);
        gradient = input.grad();
    }
    let embedded = decoder.embed(&rows.batch.tokens);
    if embedded.requires_grad() {
        push(&embedded, &gradient);
    }
}

/// Where a decoder's weights are.
pub fn device(decoder: &Decoder) -> Device {
    decoder.parameters().first().map_or(Device::Cpu, |parameter| parameter.tensor.device())
}

/// The hidden states after the last layer, before the last norm.
fn blocks(decoder: &Decoder, batch: &Packed) -> Tensor {
    (0..decoder.layers()).fold(decoder.embed(&batch.tokens), |hidden, index| decoder.layer(index, &hidden, batch))
}

/// Backwards from `output` with `gradient` arriving at it. The value of the product is not used, only its derivative,
/// which is `gradient` to the bit.
fn push(output: &Tensor, gradient: &Tensor) {
    (output * gradient).sum(Kind::Float).backward();
}

#[cfg(test)]
mod tests;
