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
/// One call a sequence, each of which reads nothing of another: a fused kernel for sequences of different lengths can
/// take its place, and need not agree in the last bits.
pub(crate) fn packed(queries: &Tensor, keys: &Tensor, values: &Tensor, lengths: &[i64]) -> Tensor {
    let split = |heads: &Tensor| heads.split_with_sizes(lengths, 0);
    let parts: Vec<Tensor> = split(queries)
        .iter()
        .zip(split(keys))
        .zip(split(values))
        .filter(|((queries, _), _)| queries.numel() > 0)
        .map(|((queries, keys), values)| attend(queries, &keys, &values, true))
        .collect();
    Tensor::cat(&parts, 0)
}

/// Attention of queries `[n, heads, width]` over keys and values `[m, key_value_heads, width]`: `[n, heads · width]`.
/// Causal: query i sees keys 0 to i, so n = m; else every query sees every key.
fn attend(queries: &Tensor, keys: &Tensor, values: &Tensor, causal: bool) -> Tensor {
    let first_heads = |heads: &Tensor| heads.transpose(0, 1).unsqueeze(0);
    let grouped = queries.size()[1] != keys.size()[1];
    let output = Tensor::scaled_dot_product_attention::<Tensor>(
        &first_heads(queries),
        &first_heads(keys),
        &first_heads(values),
        None,
        0.0,
        causal,
        None,
        grouped,
    );
    output.squeeze_dim(0).transpose(0, 1).flatten(1, 2)
}
