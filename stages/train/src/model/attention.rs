//! Rotary embedding and attention. The one place to put fused kernels for both.

use tch::{Device, Kind, Tensor};

use crate::model::config::{Config, Scaling};

/// Cosines and sines of the rotary embedding for every position: two of `[max_positions, head_width / 2]`.
pub(super) struct Rotary {
    cosines: Tensor,
    sines: Tensor,
}

impl Rotary {
    /// Tables in the compute type, computed in f32 by the operations that transformers uses.
    pub(super) fn new(config: &Config, kind: Kind, device: Device) -> Self {
        let frequencies = frequencies(config).to_device(device);
        let positions = Tensor::arange(config.max_positions, (Kind::Float, device));
        let angles = positions.unsqueeze(1) * frequencies.unsqueeze(0);
        Self { cosines: angles.cos().to_kind(kind), sines: angles.sin().to_kind(kind) }
    }

    /// Cosines and sines.
    pub(super) fn tables(&self) -> (Tensor, Tensor) {
        (self.cosines.shallow_clone(), self.sines.shallow_clone())
    }

    /// Rotates heads `[n, heads, width]` by their positions `[n]`: the first half of a head's width pairs with the second.
    pub(super) fn rotate(&self, heads: &Tensor, positions: &Tensor) -> Tensor {
        let cosines = self.cosines.index_select(0, positions).unsqueeze(1);
        let sines = self.sines.index_select(0, positions).unsqueeze(1);
        let halves = heads.chunk(2, -1);
        let (first, second) = (&halves[0], &halves[1]);
        Tensor::cat(&[first * &cosines - second * &sines, second * &cosines + first * &sines], -1)
    }
}

/// Angle per position of each pair: `[head_width / 2]`, f32.
fn frequencies(config: &Config) -> Tensor {
    let width = config.head_width;
    let exponents = Tensor::arange_start_step(0, width, 2, (Kind::Float, Device::Cpu)) / width as f64;
    let plain = Tensor::pow_scalar(config.rope_theta, &exponents).reciprocal();
    match config.rope_scaling {
        Scaling::None => plain,
        Scaling::Linear { factor } => plain / factor,
        Scaling::Llama3 { factor, low, high, original } => {
            let wavelengths = plain.reciprocal() * std::f64::consts::TAU;
            let divided = &plain / factor;
            let smooth = (wavelengths.reciprocal() * original - low) / (high - low);
            let between: Tensor = (smooth.ones_like() - &smooth) * &divided + &smooth * &plain;
            let is_short = wavelengths.lt(original / high);
            let is_long = wavelengths.gt(original / low);
            divided.where_self(&is_long, &plain.where_self(&is_short, &between))
        }
    }
}

/// Causal attention within each sequence of a packed batch: queries `[T, heads, width]`, keys and values
/// `[T, key_value_heads, width]` to `[T, heads · width]`.
///
/// On a GPU sequences of about one length are one call, filled up to the longest: what is filled up comes after every token that
/// counts, so that none of them sees it. Otherwise it is one call a sequence.
pub(crate) fn packed(queries: &Tensor, keys: &Tensor, values: &Tensor, lengths: &[i64]) -> Tensor {
    let some: Vec<i64> = lengths.iter().copied().filter(|length| *length > 0).collect();
    let heads = [queries, keys, values];
    if queries.device().is_cuda() && some.len() > 1 {
        let (longest, total) = (some.iter().max().copied().unwrap_or(0), some.iter().sum::<i64>());
        let filled = longest * some.len() as i64;
        if filled == total {
            return attend(heads.map(Tensor::shallow_clone), longest);
        }
        if filled * FILLED.1 <= total * FILLED.0 {
            return filled_up(heads, &some);
        }
    }
    by_sequence(heads, &some, attend)
}

/// One call for all sequences, each filled up to the longest.
fn filled_up(heads: [&Tensor; 3], lengths: &[i64]) -> Tensor {
    let longest = lengths.iter().max().copied().unwrap_or(0);
    let filled = longest * lengths.len() as i64;
    let begins = (0..).map(|number| number * longest);
    let places: Vec<i64> = begins.zip(lengths).flat_map(|(begin, length)| begin..begin + length).collect();
    let places = Tensor::from_slice(&places).to_device(heads[0].device());
    let fill = |heads: &Tensor| {
        let (_, count, width) = heads.size3().expect("heads have three dimensions");
        heads.new_zeros([filled, count, width], (heads.kind(), heads.device())).index_copy(0, &places, heads)
    };
    attend(heads.map(fill), longest).index_select(0, &places)
}

/// Lets `attend` see the heads of one sequence after another, with its length, and puts the results together again.
pub(super) fn by_sequence(heads: [&Tensor; 3], lengths: &[i64], attend: impl Fn([Tensor; 3], i64) -> Tensor) -> Tensor {
    let [queries, keys, values] = heads.map(|heads| heads.split_with_sizes(lengths, 0));
    let each = queries.into_iter().zip(keys).zip(values).zip(lengths);
    let parts: Vec<Tensor> =
        each.map(|(((queries, keys), values), length)| attend([queries, keys, values], *length)).collect();
    Tensor::cat(&parts, 0)
}

/// How much longer than the tokens themselves a batch may become by filling up: 3 to 2.
const FILLED: (i64, i64) = (3, 2);

/// Causal attention of sequences that all have this length, one after another: queries `[n · length, heads, width]`, keys and
/// values `[n · length, key_value_heads, width]` to `[n · length, heads · width]`.
fn attend([queries, keys, values]: [Tensor; 3], length: i64) -> Tensor {
    let grouped = queries.size()[1] != keys.size()[1];
    let first_heads = |heads: &Tensor| heads.unflatten(0, [-1, length].as_slice()).transpose(1, 2);
    let output = Tensor::scaled_dot_product_attention::<Tensor>(
        &first_heads(&queries),
        &first_heads(&keys),
        &first_heads(&values),
        None,
        0.0,
        true,
        None,
        grouped,
    );
    output.transpose(1, 2).flatten(0, 1).flatten(1, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_that_are_filled_up_attend_as_each_by_itself() {
        tch::manual_seed(5);
        let lengths = [5, 3, 6, 1];
        let heads = [4, 2, 2].map(|count| Tensor::randn([15, count, 8], (Kind::Float, Device::Cpu)));
        let weights = Tensor::randn([15, 32], (Kind::Float, Device::Cpu));
        let gradients = |run: &dyn Fn([&Tensor; 3]) -> Tensor| {
            let leaves = heads.each_ref().map(|heads| heads.copy().set_requires_grad(true));
            let output = run(leaves.each_ref());
            (&output * &weights).sum(Kind::Float).backward();
            let [queries, keys, values] = leaves.map(|leaf| leaf.grad());
            [output.detach(), queries, keys, values]
        };
        let found = gradients(&|heads| filled_up(heads, &lengths));
        let expected = gradients(&|heads| by_sequence(heads, &lengths, attend));
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.allclose(expected, 1e-5, 1e-6, false), "{found:?} {expected:?}");
        }
    }
}
