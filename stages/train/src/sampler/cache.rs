//! Keys and values of the sequences in the batch.

use std::cell::Cell;

use tch::Tensor;

use crate::model::Decoder;

/// One tensor `[layers, 2, slots, capacity, key_value_heads, width]`, keys first. Slots in use are the first ones: a batch is a
/// view, without a copy.
pub(super) struct Cache {
    all: Tensor,
    /// Views of it: keys and values of each layer.
    layers: Vec<(Tensor, Tensor)>,
    /// Tokens of one slot.
    pub capacity: i64,
    /// Whether torch has written something since [`Cache::take_changed`] was last asked.
    changed: Cell<bool>,
}

impl Cache {
    /// An empty cache. Its memory: `2 · layers · slots · capacity · key_value_heads · width` elements.
    pub fn new(decoder: &Decoder, slots: usize, capacity: i64) -> Self {
        let (config, options) = (decoder.config(), decoder.options());
        let layers = decoder.layers() as i64;
        let shape = [layers, 2, slots as i64, capacity, config.key_value_heads, config.head_width];
        let all = Tensor::zeros(shape, (options.kind, options.device));
        let layers = (0..layers).map(|layer| (all.get(layer).get(0), all.get(layer).get(1))).collect();
        Self { all, layers, capacity, changed: Cell::new(true) }
    }

    /// Keys and values of a layer: two of `[slots, capacity, key_value_heads, width]`.
    pub fn layer(&self, layer: usize) -> (&Tensor, &Tensor) {
        let (keys, values) = &self.layers[layer];
        (keys, values)
    }

    /// Notes that torch has written what a step of decoding reads: the cache itself, or weights.
    pub fn change(&self) {
        self.changed.set(true);
    }

    /// Whether torch has written anything since this was last asked.
    pub fn take_changed(&self) -> bool {
        self.changed.replace(false)
    }

    /// Stores keys and values `[n, key_value_heads, width]` at `places` (`[n]`, slot · capacity + position).
    pub fn write(&self, layer: usize, places: &Tensor, keys: &Tensor, values: &Tensor) {
        self.change();
        let (cached_keys, cached_values) = &self.layers[layer];
        for (cached, new) in [(cached_keys, keys), (cached_values, values)] {
            let _same = cached.flatten(0, 1).index_copy_(0, places, new);
        }
    }

    /// Copies the first `length` tokens of a slot to another, in all layers.
    pub fn copy(&self, from: usize, to: usize, length: i64) {
        self.change();
        let tokens = |slot: usize| self.all.select(2, slot as i64).narrow(2, 0, length);
        tokens(to).copy_(&tokens(from));
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
