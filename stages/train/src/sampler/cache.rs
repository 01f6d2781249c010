//! Keys and values of the sequences in the batch.

use tch::{Device, Kind, Tensor};

use crate::model::{Config, Decoder};

/// For each layer two tensors `[slots, capacity, key_value_heads, width]`. Slots in use are the first ones: a batch is a
/// view, without a copy.
pub(super) struct Cache {
    layers: Vec<(Tensor, Tensor)>,
    /// Tokens of one slot.
    pub capacity: i64,
}

impl Cache {
    /// An empty cache. Its memory: `2 · layers · slots · capacity · key_value_heads · width` elements.
    pub fn new(decoder: &Decoder, slots: usize, capacity: i64) -> Self {
        let (config, options) = (decoder.config(), decoder.options());
        let make = || Self::zeros(config, slots as i64, capacity, options.kind, options.device);
        Self { layers: (0..decoder.layers()).map(|_| (make(), make())).collect(), capacity }
    }

    fn zeros(config: &Config, slots: i64, capacity: i64, kind: Kind, device: Device) -> Tensor {
        Tensor::zeros([slots, capacity, config.key_value_heads, config.head_width], (kind, device))
    }

    /// Stores keys and values `[n, key_value_heads, width]` at `places` (`[n]`, slot · capacity + position).
    pub fn write(&self, layer: usize, places: &Tensor, keys: &Tensor, values: &Tensor) {
        let (cached_keys, cached_values) = &self.layers[layer];
        for (cached, new) in [(cached_keys, keys), (cached_values, values)] {
            let _same = cached.flatten(0, 1).index_copy_(0, places, new);
        }
    }

    /// Copies the first `length` tokens of a slot to another.
    pub fn copy(&self, from: usize, to: usize, length: i64) {
        for (keys, values) in &self.layers {
            for cached in [keys, values] {
                let source = cached.get(from as i64).narrow(0, 0, length);
                cached.get(to as i64).narrow(0, 0, length).copy_(&source);
            }
        }
    }

    /// Attention of one query a slot, `[n, heads, width]`, over what the first n slots hold; `visible` is
    /// `[n, 1, 1, longest]`, true for tokens of the slot. Returns `[n, heads · width]`.
    pub fn attend(&self, layer: usize, queries: &Tensor, visible: &Tensor) -> Tensor {
        let (keys, values) = &self.layers[layer];
        let (count, heads, width) = queries.size3().expect("queries have three dimensions");
        let (longest, groups) = (visible.size()[3], keys.size()[2]);
        let view = |cached: &Tensor| cached.narrow(0, 0, count).narrow(1, 0, longest).transpose(1, 2);
        // The queries that share keys become rows of one product, so that keys are read once.
        let grouped = queries.reshape([count, groups, heads / groups, width]);
        let attended = Tensor::scaled_dot_product_attention(
            &grouped,
            &view(keys),
            &view(values),
            Some(visible),
            0.0,
            false,
            None,
            false,
        );
        attended.reshape([count, heads * width])
    }
}
