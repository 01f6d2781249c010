//! A step of decoding on a GPU in one launch: kernels of our own between cuBLAS's matrix products, recorded as a CUDA graph
//! for each size of batch.
//!
//! The same step by torch's operators is some forty launches a layer, each of which costs the host more than it costs the
//! GPU. Here it is nine. Prompts are computed by the same kernels, with torch's attention. `decode.cu` rounds to bfloat16 where torch's operators do, so that what is sampled is what the trainer
//! computes, up to the order of additions.
//!
//! Steps go to a stream of their own, which the driver does not order with the default one, where torch computes: a trainer in
//! another thread may compute there while a step is recorded, or done. The host waits for each step, so torch comes after it; a step
//! waits for torch where the cache or the weights have changed since the last one. Prompts are computed on torch's stream.

mod kernels;
mod prefill;
mod products;

use std::collections::BTreeMap;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, result, sys};
use tch::{Device, Kind, Tensor};

use self::kernels::Kernels;
use self::products::Products;
use crate::TrainError;
use crate::model::{Config, Decoder, StepWeights};
use crate::sampler::SampleKey;
use crate::sampler::cache::Cache;

/// What a row of the batch is computed from, and drawn by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// The last token.
    pub token: i64,
    /// Its position, where its keys and values go.
    pub position: i64,
    /// 0 takes the most likely token.
    pub temperature: f64,
    /// Of the request's random numbers.
    pub key: SampleKey,
    /// How many tokens were drawn before.
    pub count: usize,
}

/// Batches are filled up to one of these sizes, so that there are few graphs.
const SIZES: [usize; 12] = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256];

/// Blocks of attention that keep a GPU of 132 multiprocessors busy; where there are fewer rows, keys are divided.
const ENOUGH_BLOCKS: usize = 264;

/// The most parts that a row's keys are divided into.
const MOST_SPLITS: usize = 16;

/// What of a row goes to the GPU at each step, in 32-bit words: token, position, temperature, key (two), count.
const INPUT_WORDS: usize = 6;

/// Decoding steps of one model over one cache.
pub(super) struct Fused {
    context: Arc<CudaContext>,
    /// Where steps are computed, and where torch computes, with cuBLAS for each.
    stream: Arc<CudaStream>,
    torch: Arc<CudaStream>,
    products: Products,
    torch_products: Products,
    /// What torch has been given so far.
    given: CudaEvent,
    kernels: Kernels,
    weights: StepWeights,
    config: Config,
    /// Sizes of batches, and with what each is computed.
    graphs: BTreeMap<usize, CudaGraph>,
    buffers: Buffers,
    rows: usize,
}

/// Room for a step of the widest batch, in torch's memory.
struct Buffers {
    /// `[INPUT_WORDS, rows]`, of 32 bits: columns after one another, the keys' two words as a pair.
    inputs: Tensor,
    /// Tokens, then log-probabilities: `[2, rows]`, of 32 bits.
    outputs: Tensor,
    hidden: Tensor,
    normed: Tensor,
    projected: Tensor,
    queries: Tensor,
    attended: Tensor,
    parts: Tensor,
    delta: Tensor,
    both: Tensor,
    inner: Tensor,
    logits: Tensor,
}

impl Buffers {
    fn new(config: &Config, rows: i64, device: Device) -> Self {
        let make = |width: i64, kind: Kind| Tensor::zeros([rows, width], (kind, device));
        let half = |width: i64| make(width, Kind::BFloat16);
        let parts = config.heads * MOST_SPLITS as i64 * (config.head_width + 2);
        Self {
            inputs: make(INPUT_WORDS as i64, Kind::Int),
            outputs: make(2, Kind::Int),
            hidden: half(config.hidden),
            normed: half(config.hidden),
            projected: half(config.query_width() + 2 * config.key_value_width()),
            queries: half(config.query_width()),
            attended: half(config.query_width()),
            parts: make(parts, Kind::Float),
            delta: half(config.hidden),
            both: half(2 * config.intermediate),
            inner: half(config.intermediate),
            logits: half(config.vocabulary),
        }
    }
}

/// Why a model's steps can't be fused, if they can't.
fn unsupported(config: &Config, kind: Kind, device: Device) -> Option<String> {
    let shared_by = config.heads / config.key_value_heads;
    match (device, kind) {
        (Device::Cuda(_), Kind::BFloat16) => {}
        (Device::Cuda(_), _) => return Some("the model computes in float32".into()),
        _ => return Some("there is no GPU".into()),
    }
    if ![64, 128].contains(&config.head_width) {
        return Some(format!("heads of {}: 64 or 128", config.head_width));
    }
    if shared_by > 8 {
        return Some(format!("{shared_by} query heads share keys: at most 8"));
    }
    let odd =
        [("hidden_size", config.hidden), ("intermediate_size", config.intermediate), ("vocab_size", config.vocabulary)]
            .into_iter()
            .find(|(_, size)| size % 8 != 0);
    odd.map(|(name, size)| format!("{name} {size} is no multiple of 8"))
}

impl Fused {
    /// Fuses the steps of a model whose keys and values lie in `cache`, for batches of at most `slots`. `Ok(Err(why))` for a
    /// model, or on a device, where that can't be done.
    pub fn new(decoder: &mut Decoder, slots: usize) -> Result<Result<Self, String>, TrainError> {
        let (config, options) = (decoder.config().clone(), *decoder.options());
        if let Some(why) = unsupported(&config, options.kind, options.device) {
            return Ok(Err(why));
        }
        let Device::Cuda(ordinal) = options.device else { unreachable!("it was asked for") };
        let Some(weights) = decoder.step_weights() else {
            return Ok(Err("the model has adapters, or biases outside of attention".into()));
        };
        let context = CudaContext::new(ordinal).map_err(error)?;
        let (stream, torch) = (context.new_stream().map_err(error)?, context.default_stream());
        let kernels = Kernels::new(&context, &config)?;
        let products = Products::new(stream.clone(), options.device)?;
        let torch_products = Products::new(torch.clone(), options.device)?;
        let given = context.new_event(None).map_err(error)?;
        let rows = padded(slots);
        Ok(Ok(Self {
            buffers: Buffers::new(&config, rows as i64, options.device),
            context,
            stream,
            torch,
            products,
            torch_products,
            given,
            kernels,
            weights,
            config,
            graphs: BTreeMap::new(),
            rows,
        }))
    }

    /// Computes the last token of every row and draws the next one: tokens and their log-probabilities at the rows'
    /// temperatures. Row n is slot n of the cache.
    pub fn step(&mut self, rows: &[Row], cache: &Cache) -> Result<(Vec<i64>, Vec<f32>), TrainError> {
        self.compute(rows, cache)?;
        let count = rows.len();
        let mut words = vec![0u32; 2 * self.rows];
        self.read(&mut words)?;
        let tokens = words[..count].iter().map(|&word| i64::from(word)).collect();
        Ok((tokens, words[self.rows..self.rows + count].iter().map(|&word| f32::from_bits(word)).collect()))
    }

    /// The same without the drawing: logits `[rows, vocabulary]`, bfloat16, valid until the next step.
    pub fn logits(&mut self, rows: &[Row], cache: &Cache) -> Result<Tensor, TrainError> {
        self.compute(rows, cache)?;
        self.stream.synchronize().map_err(error)?;
        Ok(self.buffers.logits.narrow(0, 0, rows.len() as i64))
    }

    fn compute(&mut self, rows: &[Row], cache: &Cache) -> Result<(), TrainError> {
        let size = padded(rows.len());
        if cache.take_changed() {
            self.given.record(&self.torch).map_err(error)?;
            self.stream.wait(&self.given).map_err(error)?;
        }
        if !self.graphs.contains_key(&size) {
            // Once without recording: cuBLAS loads its kernels when they are first used.
            self.write(&[])?;
            self.launch(size, cache)?;
            self.stream.synchronize().map_err(error)?;
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            self.stream.begin_capture(mode).map_err(error)?;
            let launched = self.launch(size, cache);
            let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0)).map_err(error);
            launched?;
            let graph = graph?.ok_or_else(|| TrainError::new("a step of decoding was recorded as nothing"))?;
            self.graphs.insert(size, graph);
        }
        self.write(rows)?;
        self.graphs[&size].launch().map_err(error)
    }

    /// Sends what the rows are computed from; all others are empty.
    #[expect(unsafe_code, reason = "a copy into a tensor's memory")]
    fn write(&self, rows: &[Row]) -> Result<(), TrainError> {
        let all = self.rows;
        let mut words = vec![0u32; INPUT_WORDS * all];
        words[all..2 * all].fill(-1i32 as u32);
        for (place, row) in rows.iter().enumerate() {
            words[place] = row.token as u32;
            words[all + place] = row.position as u32;
            words[2 * all + place] = (row.temperature as f32).to_bits();
            words[3 * all + 2 * place] = row.key.0 as u32;
            words[3 * all + 2 * place + 1] = (row.key.0 >> 32) as u32;
            words[5 * all + place] = row.count as u32;
        }
        self.context.bind_to_thread().map_err(error)?;
        // SAFETY: the tensor has as many words. From memory that is not pinned the driver has copied when it returns.
        unsafe { result::memcpy_htod_async(pointer(&self.buffers.inputs), &words, self.stream.cu_stream()) }
            .map_err(error)
    }

    /// Waits for the step, and reads what it drew.
    #[expect(unsafe_code, reason = "a copy from a tensor's memory")]
    fn read(&self, words: &mut [u32]) -> Result<(), TrainError> {
        // SAFETY: the tensor has as many words, and the host waits before it looks at them.
        unsafe { result::memcpy_dtoh_async(words, pointer(&self.buffers.outputs), self.stream.cu_stream()) }
            .map_err(error)?;
        self.stream.synchronize().map_err(error)
    }

    /// A column of the inputs.
    fn input(&self, column: usize) -> u64 {
        pointer(&self.buffers.inputs) + (4 * column * self.rows) as u64
    }

    /// The whole step for a batch of this size.
    fn launch(&self, size: usize, cache: &Cache) -> Result<(), TrainError> {
        let (buffers, config, kernels) = (&self.buffers, &self.config, &self.kernels);
        let (rows, stream) = (size as u32, &self.stream);
        let positions = self.input(1);
        let hidden = pointer(&buffers.hidden);
        let splits = splits(size * config.key_value_heads as usize);
        // Scores are compared as powers of two.
        let scale = std::f32::consts::LOG2_E / (config.head_width as f32).sqrt();
        let projected_width = config.query_width() + 2 * config.key_value_width();
        kernels.embed(stream, rows, [pointer(&self.weights.embedding), self.input(0), positions, hidden])?;
        let mut delta = 0;
        for (index, block) in self.weights.blocks.iter().enumerate() {
            let bias = block.bias.as_ref().map(|bias| (pointer(bias), pointer(&buffers.projected), projected_width));
            kernels.add_norm(
                stream,
                rows,
                [hidden, delta, pointer(&block.input_norm), pointer(&buffers.normed)],
                bias,
            )?;
            delta = pointer(&buffers.delta);
            self.products.multiply(
                size,
                &buffers.normed,
                &block.projections,
                &buffers.projected,
                block.bias.is_some(),
            )?;
            let (keys, values) = cache.layer(index);
            let norms = block.head_norms.as_ref().map_or([0, 0], |(query, key)| [pointer(query), pointer(key)]);
            let [keys, values] = [pointer(keys), pointer(values)];
            let tables = [pointer(&self.weights.cosines), pointer(&self.weights.sines)];
            let queries = pointer(&buffers.queries);
            kernels.rotate(
                stream,
                rows,
                [
                    pointer(&buffers.projected),
                    positions,
                    tables[0],
                    tables[1],
                    norms[0],
                    norms[1],
                    queries,
                    keys,
                    values,
                ],
                cache.capacity as i32,
            )?;
            kernels.attend(
                stream,
                rows,
                [queries, keys, values, positions, pointer(&buffers.attended), pointer(&buffers.parts)],
                (cache.capacity as i32, splits as i32, scale),
            )?;
            self.products.multiply(size, &buffers.attended, &block.output, &buffers.delta, false)?;
            let norm = pointer(&block.feed_forward_norm);
            kernels.add_norm(stream, rows, [hidden, delta, norm, pointer(&buffers.normed)], None)?;
            self.products.multiply(size, &buffers.normed, &block.gate_up, &buffers.both, false)?;
            kernels.gated(stream, rows, [pointer(&buffers.both), pointer(&buffers.inner)])?;
            self.products.multiply(size, &buffers.inner, &block.down, &buffers.delta, false)?;
        }
        let norm = pointer(&self.weights.final_norm);
        kernels.add_norm(stream, rows, [hidden, delta, norm, pointer(&buffers.normed)], None)?;
        self.products.multiply(size, &buffers.normed, &self.weights.head, &buffers.logits, false)?;
        let outputs = pointer(&buffers.outputs);
        let drawn = [outputs, outputs + 4 * self.rows as u64];
        let [temperatures, keys, counts] = [2, 3, 5].map(|column| self.input(column));
        kernels.sample(
            stream,
            rows,
            [pointer(&buffers.logits), positions, temperatures, keys, counts, drawn[0], drawn[1]],
        )
    }
}

/// The size that a batch is filled up to.
fn padded(rows: usize) -> usize {
    SIZES.into_iter().find(|size| *size >= rows).unwrap_or_else(|| rows.next_multiple_of(128))
}

/// How many parts the keys of a row are divided into, where this many blocks come of one part.
fn splits(blocks: usize) -> usize {
    ENOUGH_BLOCKS.div_ceil(blocks).min(MOST_SPLITS)
}

/// Where a tensor begins on the GPU.
fn pointer(tensor: &Tensor) -> u64 {
    tensor.data_ptr() as u64
}

fn error(error: impl std::fmt::Display) -> TrainError {
    TrainError::new(format!("a step of decoding on the GPU: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_filled_up_to_few_sizes() {
        assert_eq!([1, 3, 65, 200, 256, 257, 400].map(padded), [1, 4, 96, 256, 256, 384, 512]);
        assert_eq!([1, 2, 100, 264, 512].map(splits), [16, 16, 3, 1, 1]);
    }
}
