//! Prompts by the kernels of a step of decoding: everything but attention, which is torch's, on torch's stream.

use tch::{Kind, Tensor};

use super::{Fused, error, pointer};
use crate::TrainError;
use crate::model::Packed;

/// Rows of one prefill at most: a grid's second dimension.
const MOST_ROWS: i64 = 65_535;

impl Fused {
    /// Whether [`Self::prefill`] can compute a batch.
    pub fn can_prefill(&self, batch: &Packed) -> bool {
        (1..=MOST_ROWS).contains(&batch.rows())
    }

    /// The hidden states of a batch after the last block, `[T, hidden]`. `embedded` are its embedded tokens, which are
    /// overwritten. `attend` gets a block's number, rotated queries `[T, heads, width]`, rotated keys and values
    /// `[T, key_value_heads, width]`, and returns `[T, heads · width]`; it may keep none of them.
    pub fn prefill(
        &self,
        batch: &Packed,
        embedded: Tensor,
        mut attend: impl FnMut(usize, [Tensor; 3]) -> Tensor,
    ) -> Result<Tensor, TrainError> {
        self.context.bind_to_thread().map_err(error)?;
        let (config, kernels, stream, weights) = (&self.config, &self.kernels, &self.torch, &self.weights);
        let (count, device) = (batch.rows(), embedded.device());
        let rows = u32::try_from(count).map_err(error)?;
        let size = rows as usize;
        let make = |shape: &[i64]| Tensor::empty([&[count], shape].concat(), (Kind::BFloat16, device));
        let (groups, width) = (config.key_value_heads, config.head_width);
        let (hidden, normed, delta) = (embedded, make(&[config.hidden]), make(&[config.hidden]));
        let projected_width = config.query_width() + 2 * config.key_value_width();
        let projected = make(&[projected_width]);
        let (queries, keys, values) = (make(&[config.heads, width]), make(&[groups, width]), make(&[groups, width]));
        let (both, inner) = (make(&[2 * config.intermediate]), make(&[config.intermediate]));
        let positions = batch.positions.to_kind(Kind::Int);
        let tables = [pointer(&weights.cosines), pointer(&weights.sines)];
        let mut added = 0;
        for (index, block) in weights.blocks.iter().enumerate() {
            let bias = block.bias.as_ref().map(|bias| (pointer(bias), pointer(&projected), projected_width));
            let norm = pointer(&block.input_norm);
            kernels.add_norm(stream, rows, [pointer(&hidden), added, norm, pointer(&normed)], bias)?;
            added = pointer(&delta);
            self.torch_products.multiply(size, &normed, &block.projections, &projected, block.bias.is_some())?;
            let norms = block.head_norms.as_ref().map_or([0, 0], |(query, key)| [pointer(query), pointer(key)]);
            let [from, at] = [&projected, &positions].map(pointer);
            let [to_queries, to_keys, to_values] = [&queries, &keys, &values].map(pointer);
            let arguments = [from, at, tables[0], tables[1], norms[0], norms[1], to_queries, to_keys, to_values];
            kernels.rotate(stream, rows, arguments, 0)?;
            let heads = [&queries, &keys, &values].map(Tensor::shallow_clone);
            let attended = attend(index, heads).contiguous();
            self.torch_products.multiply(size, &attended, &block.output, &delta, false)?;
            let norm = pointer(&block.feed_forward_norm);
            kernels.add_norm(stream, rows, [pointer(&hidden), added, norm, pointer(&normed)], None)?;
            self.torch_products.multiply(size, &normed, &block.gate_up, &both, false)?;
            kernels.gated(stream, rows, [pointer(&both), pointer(&inner)])?;
            self.torch_products.multiply(size, &inner, &block.down, &delta, false)?;
        }
        let norm = pointer(&weights.final_norm);
        kernels.add_norm(stream, rows, [pointer(&hidden), added, norm, pointer(&normed)], None)?;
        Ok(hidden)
    }
}
