//! The decoder: its weights, its forward pass.

use std::path::Path;

use tch::{Device, Kind, Tensor};

use crate::TrainError;
use crate::model::attention::{self, Rotary};
use crate::model::config::Config;
use crate::model::exact;
use crate::model::lora::{Linear, LoraConfig};
use crate::model::packed::Packed;
use crate::model::weights::Checkpoint;
use crate::random;

/// What a decoder ends in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Logits of the next token.
    Language,
    /// One number a token: the value of the state after it. transformers' token classification with one label.
    Value,
}

/// How to load a model.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Where its weights go and its forward pass runs.
    pub device: Device,
    /// Type of weights and activations: [`Kind::Float`] or [`Kind::BFloat16`]. A value head, adapters, logits and values
    /// are f32 always.
    pub kind: Kind,
    /// What it ends in. A language model's folder can be loaded with a value head, which then is zero.
    pub head: Head,
}

/// A tensor of a model, for optimizers and checkpoints.
pub struct Parameter {
    /// Hugging Face's name; of an adapter PEFT's.
    pub name: String,
    /// The tensor of the model itself: a change in place changes the model.
    pub tensor: Tensor,
    /// Whether it gets gradients; false for what adapters leave as it is.
    pub trainable: bool,
    /// Whether weight decay applies: to matrices, not to biases and norms.
    pub decays: bool,
}

/// One block's weights.
struct Block {
    input_norm: Tensor,
    query: Linear,
    key: Linear,
    value: Linear,
    /// Norms of each head's queries and keys (Qwen3).
    head_norms: Option<(Tensor, Tensor)>,
    output: Linear,
    feed_forward_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// A decoder with its weights.
pub struct Decoder {
    pub(super) config: Config,
    pub(super) options: LoadOptions,
    embedding: Tensor,
    blocks: Vec<Block>,
    final_norm: Tensor,
    /// Of the head: `[vocab, hidden]` and none, the embedding itself where it is tied; or `[1, hidden]` and `[1]`.
    head: (Tensor, Option<Tensor>),
    rotary: Rotary,
    pub(super) parameters: Vec<Parameter>,
    pub(super) lora: Option<LoraConfig>,
    is_exact: bool,
}

/// What a weight is where it isn't loaded.
#[derive(Clone, Copy, PartialEq)]
enum Initial {
    Normal,
    One,
    Zero,
}

/// Makes a model's tensors one by one, and lists them.
struct Builder<'a> {
    options: &'a LoadOptions,
    #[expect(clippy::type_complexity, reason = "one closure, named by its field")]
    source: &'a mut dyn FnMut(&str, &[i64], Kind, Initial) -> Result<Tensor, TrainError>,
    parameters: Vec<Parameter>,
}

impl Builder<'_> {
    fn tensor(&mut self, name: String, shape: &[i64], kind: Kind, initial: Initial) -> Result<Tensor, TrainError> {
        let tensor = (self.source)(&name, shape, kind, initial)?.set_requires_grad(true);
        let handle = tensor.shallow_clone();
        self.parameters.push(Parameter { name, tensor: handle, trainable: true, decays: shape.len() > 1 });
        Ok(tensor)
    }

    fn weight(&mut self, name: String, shape: &[i64]) -> Result<Tensor, TrainError> {
        self.tensor(name, shape, self.options.kind, Initial::Normal)
    }

    fn norm(&mut self, name: String, width: i64) -> Result<Tensor, TrainError> {
        self.tensor(format!("{name}.weight"), &[width], self.options.kind, Initial::One)
    }

    fn linear(&mut self, name: String, from: i64, to: i64, bias: bool) -> Result<Linear, TrainError> {
        let weight = self.weight(format!("{name}.weight"), &[to, from])?;
        let bias = match bias {
            true => Some(self.tensor(format!("{name}.bias"), &[to], self.options.kind, Initial::Zero)?),
            false => None,
        };
        Ok(Linear::new(weight, bias))
    }

    fn block(&mut self, config: &Config, index: usize) -> Result<Block, TrainError> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let (hidden, inner) = (config.hidden, config.intermediate);
        let (queries, keys) = (config.query_width(), config.key_value_width());
        let (bias, feed_bias) = (config.query_key_value_bias, config.feed_forward_bias);
        Ok(Block {
            input_norm: self.norm(name("input_layernorm"), hidden)?,
            query: self.linear(name("self_attn.q_proj"), hidden, queries, bias)?,
            key: self.linear(name("self_attn.k_proj"), hidden, keys, bias)?,
            value: self.linear(name("self_attn.v_proj"), hidden, keys, bias)?,
            head_norms: match config.query_key_norm {
                true => Some((
                    self.norm(name("self_attn.q_norm"), config.head_width)?,
                    self.norm(name("self_attn.k_norm"), config.head_width)?,
                )),
                false => None,
            },
            output: self.linear(name("self_attn.o_proj"), queries, hidden, config.output_bias)?,
            feed_forward_norm: self.norm(name("post_attention_layernorm"), hidden)?,
            gate: self.linear(name("mlp.gate_proj"), hidden, inner, feed_bias)?,
            up: self.linear(name("mlp.up_proj"), hidden, inner, feed_bias)?,
            down: self.linear(name("mlp.down_proj"), inner, hidden, feed_bias)?,
        })
    }

    fn decoder(mut self, config: Config) -> Result<Decoder, TrainError> {
        let options = *self.options;
        let vocabulary = [config.vocabulary, config.hidden];
        let embedding = self.weight("model.embed_tokens.weight".into(), &vocabulary)?;
        let blocks = (0..config.layers).map(|index| self.block(&config, index)).collect::<Result<_, _>>()?;
        let final_norm = self.norm("model.norm".into(), config.hidden)?;
        let head = match options.head {
            Head::Language if config.tied => (embedding.shallow_clone(), None),
            Head::Language => (self.weight("lm_head.weight".into(), &vocabulary)?, None),
            Head::Value => (
                self.tensor("score.weight".into(), &[1, config.hidden], Kind::Float, Initial::Zero)?,
                Some(self.tensor("score.bias".into(), &[1], Kind::Float, Initial::Zero)?),
            ),
        };
        let rotary = Rotary::new(&config, options.kind, options.device);
        let parameters = self.parameters;
        Ok(Decoder {
            config,
            options,
            embedding,
            blocks,
            final_norm,
            head,
            rotary,
            parameters,
            lora: None,
            is_exact: false,
        })
    }
}

impl Decoder {
    /// Loads a Hugging Face folder. A language model may be loaded with a value head, which begins at zero. Errors name
    /// the file and the field or tensor; a tensor that the model wouldn't use is an error too.
    pub fn load(folder: &Path, options: &LoadOptions) -> Result<Self, TrainError> {
        let config = Config::read(folder)?;
        let checkpoint = Checkpoint::open(folder)?;
        let mut source = |name: &str, shape: &[i64], kind: Kind, _: Initial| {
            if name.starts_with("score.") && !checkpoint.contains(name) {
                return Ok(Tensor::zeros(shape, (kind, options.device)));
            }
            checkpoint.tensor(name, shape, kind, options.device)
        };
        let builder = Builder { options, source: &mut source, parameters: Vec::new() };
        let decoder = builder.decoder(config)?;
        decoder.refuse_unused(&checkpoint)?;
        Ok(decoder)
    }

    /// Fails where a checkpoint has tensors that this model doesn't: it would compute something else than was trained.
    fn refuse_unused(&self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let other_head = |name: &str| name == "lm_head.weight" || name.starts_with("score.");
        let unused = checkpoint.names().find(|&name| {
            let known = self.parameters.iter().any(|parameter| parameter.name == name);
            !known && !other_head(name) && !name.ends_with("rotary_emb.inv_freq")
        });
        match unused {
            None => Ok(()),
            Some(name) => {
                let file = checkpoint.file_of(name).unwrap_or(Path::new("")).display();
                Err(TrainError::new(format!("{file}: {name}: a model with this config.json has no such tensor")))
            }
        }
    }

    /// A model with new weights: matrices of N(0, initializer_range²), norms 1, biases and a value head 0. They depend on
    /// configuration and seed alone, not on device or threads.
    pub fn random(config: &Config, seed: i64, options: &LoadOptions) -> Self {
        let mut number = 0;
        let mut source = |_: &str, shape: &[i64], kind: Kind, initial: Initial| {
            number += 1;
            let tensor = match initial {
                Initial::Zero => Tensor::zeros(shape, (kind, options.device)),
                Initial::One => Tensor::ones(shape, (kind, options.device)),
                Initial::Normal => {
                    let key = random::key(&[seed as u64, number]);
                    let drawn = random::normal(key, shape.iter().product::<i64>() as usize, config.initializer_range);
                    Tensor::from_slice(&drawn).reshape(shape).to_device(options.device).to_kind(kind)
                }
            };
            Ok(tensor)
        };
        let builder = Builder { options, source: &mut source, parameters: Vec::new() };
        builder.decoder(config.clone()).expect("drawing weights has no error")
    }

    /// Lets each token be computed by the same operations in the same order whatever is computed beside it ([`super::exact`]):
    /// slower, and the same to the bit in a sampler and in a trainer.
    pub fn exact(self, is_exact: bool) -> Self {
        Self { is_exact, ..self }
    }

    /// Whether it does.
    pub fn is_exact(&self) -> bool {
        self.is_exact
    }

    /// How many keys there is room for in attention over this many.
    pub(crate) fn room_for_keys(&self, count: i64) -> i64 {
        if self.is_exact { exact::keys(count) } else { count }
    }

    /// Its configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// How it was loaded.
    pub fn options(&self) -> &LoadOptions {
        &self.options
    }

    /// Number of blocks.
    pub fn layers(&self) -> usize {
        self.blocks.len()
    }

    /// Every tensor of the model, in the order of the forward pass; adapters at the end.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Embeds tokens: `[n]` to `[n, hidden]`.
    pub fn embed(&self, tokens: &Tensor) -> Tensor {
        Tensor::embedding(&self.embedding, tokens, -1, false, false)
    }

    /// One block on a packed batch: `[T, hidden]` to `[T, hidden]`. Attention is causal and never crosses the bounds.
    ///
    /// # Panics
    /// A sequence is longer than the model has positions.
    pub fn layer(&self, index: usize, hidden: &Tensor, batch: &Packed) -> Tensor {
        let (longest, limit) = (batch.longest(), self.config.max_positions);
        assert!(longest <= limit, "a sequence has {longest} tokens, and the model has {limit} positions");
        let lengths = batch.lengths();
        self.block(index, hidden, &batch.positions, |queries, keys, values| {
            batch.attend([queries, keys, values], |queries, keys, values| {
                self.packed_attention(queries, keys, values, &lengths)
            })
        })
    }

    /// Causal attention within each sequence of a packed batch: queries `[T, heads, width]`, keys and values
    /// `[T, key_value_heads, width]` to `[T, heads · width]`.
    pub(crate) fn packed_attention(&self, queries: &Tensor, keys: &Tensor, values: &Tensor, lengths: &[i64]) -> Tensor {
        let attend = if self.is_exact { exact::packed } else { attention::packed };
        attend(queries, keys, values, lengths)
    }

    /// Computes rows all at once, or by parts of equal size.
    fn rows<const INPUTS: usize, const OUTPUTS: usize>(
        &self,
        inputs: [&Tensor; INPUTS],
        compute: impl Fn([Tensor; INPUTS]) -> [Tensor; OUTPUTS],
    ) -> [Tensor; OUTPUTS] {
        match self.is_exact {
            true => exact::by_rows(inputs, compute),
            false => compute(inputs.map(Tensor::shallow_clone)),
        }
    }

    /// One block: `[n, hidden]` to `[n, hidden]`, each row at its position (`[n]`, i64, below the model's limit).
    /// `attend` gets rotated queries `[n, heads, width]`, rotated keys and values `[n, key_value_heads, width]`, and
    /// returns `[n, heads · width]`.
    pub fn block(
        &self,
        index: usize,
        hidden: &Tensor,
        positions: &Tensor,
        attend: impl FnOnce(Tensor, Tensor, Tensor) -> Tensor,
    ) -> Tensor {
        let block = &self.blocks[index];
        let [queries, keys, values] =
            self.rows([hidden, positions], |[hidden, positions]| self.project(block, &hidden, &positions));
        let attended = attend(queries, keys, values);
        let [hidden] = self.rows([hidden, &attended], |[hidden, attended]| {
            let hidden = hidden + block.output.forward(&attended);
            let normed = self.normalize(&hidden, &block.feed_forward_norm);
            let inner = block.gate.forward(&normed).silu() * block.up.forward(&normed);
            [hidden + block.down.forward(&inner)]
        });
        hidden
    }

    /// Rotated queries `[n, heads, width]`, rotated keys and values `[n, key_value_heads, width]`.
    fn project(&self, block: &Block, hidden: &Tensor, positions: &Tensor) -> [Tensor; 3] {
        let normed = self.normalize(hidden, &block.input_norm);
        let heads = |projected: Tensor| projected.unflatten(-1, [-1, self.config.head_width].as_slice());
        let mut queries = heads(block.query.forward(&normed));
        let mut keys = heads(block.key.forward(&normed));
        let values = heads(block.value.forward(&normed));
        if let Some((query_norm, key_norm)) = &block.head_norms {
            queries = self.normalize(&queries, query_norm);
            keys = self.normalize(&keys, key_norm);
        }
        [self.rotary.rotate(&queries, positions), self.rotary.rotate(&keys, positions), values]
    }

    /// The final norm: `[n, hidden]` to `[n, hidden]`.
    pub fn norm(&self, hidden: &Tensor) -> Tensor {
        let [normed] = self.rows([hidden], |[hidden]| [self.normalize(&hidden, &self.final_norm)]);
        normed
    }

    /// The head on normed rows `[n, hidden]`: logits `[n, vocab]`, or values `[n]`; f32.
    pub fn head(&self, hidden: &Tensor) -> Tensor {
        let (weight, bias) = &self.head;
        let [output] = self.rows([hidden], |[hidden]| match self.options.head {
            Head::Language => [hidden.linear::<Tensor>(weight, None).to_kind(Kind::Float)],
            Head::Value => [hidden.to_kind(Kind::Float).linear(weight, bias.as_ref()).squeeze_dim(-1)],
        });
        output
    }

    /// Embedding, blocks and final norm: `[T, hidden]`, ready for the head.
    pub fn hidden(&self, batch: &Packed) -> Tensor {
        let embedded = self.embed(&batch.tokens);
        let hidden = (0..self.layers()).fold(embedded, |hidden, index| self.layer(index, &hidden, batch));
        self.norm(&hidden)
    }

    /// RMS norm over the last dimension, computed in f32.
    fn normalize(&self, hidden: &Tensor, weight: &Tensor) -> Tensor {
        hidden.rms_norm(weight.size(), Some(weight), self.config.norm_epsilon)
    }

    /// The projections with the names they have in `parameters`, without `.weight`.
    pub(super) fn linears(&mut self) -> impl Iterator<Item = (String, &mut Linear)> {
        self.blocks.iter_mut().enumerate().flat_map(|(index, block)| {
            let attention = [
                ("self_attn.q_proj", &mut block.query),
                ("self_attn.k_proj", &mut block.key),
                ("self_attn.v_proj", &mut block.value),
                ("self_attn.o_proj", &mut block.output),
            ];
            let feed_forward = [
                ("mlp.gate_proj", &mut block.gate),
                ("mlp.up_proj", &mut block.up),
                ("mlp.down_proj", &mut block.down),
            ];
            attention
                .into_iter()
                .chain(feed_forward)
                .map(move |(part, linear)| (format!("model.layers.{index}.{part}"), linear))
        })
    }

    /// The weights that inference uses, by Hugging Face's names: adapters are merged. The tensors are the model's own
    /// where they are not merged.
    pub fn weights(&self) -> Vec<(String, Tensor)> {
        let mut merged = std::collections::HashMap::new();
        if self.lora.is_some() {
            for (index, block) in self.blocks.iter().enumerate() {
                for (part, linear) in block.linears() {
                    merged.insert(format!("model.layers.{index}.{part}.weight"), linear.effective());
                }
            }
        }
        let is_own = |parameter: &&Parameter| !parameter.name.contains(".lora_");
        let weight = |parameter: &Parameter| {
            let tensor = merged.remove(&parameter.name).unwrap_or_else(|| parameter.tensor.shallow_clone());
            (parameter.name.clone(), tensor)
        };
        self.parameters.iter().filter(is_own).map(weight).collect()
    }
}

impl Decoder {
    /// The same model without adapters: they are merged into its weights. Of what is not adapted nothing is copied.
    pub fn merged(&self) -> Self {
        let weights: std::collections::HashMap<_, _> = self.weights().into_iter().collect();
        let mut source = |name: &str, _: &[i64], _: Kind, _: Initial| Ok(weights[name].detach());
        let builder = Builder { options: &self.options, source: &mut source, parameters: Vec::new() };
        builder.decoder(self.config.clone()).expect("every weight is there").exact(self.is_exact)
    }

    /// Replaces the model's weights by those of [`Decoder::weights`] of another, in place. Types and devices may differ,
    /// names and shapes may not; nothing is changed where they do.
    pub fn set_weights(&mut self, weights: &[(String, Tensor)]) -> Result<(), TrainError> {
        if self.lora.is_some() {
            return Err(TrainError::new("a model with adapters takes no merged weights"));
        }
        if weights.len() != self.parameters.len() {
            let (found, own) = (weights.len(), self.parameters.len());
            return Err(TrainError::new(format!("{found} tensors for a model that has {own}")));
        }
        for (parameter, (name, tensor)) in self.parameters.iter().zip(weights) {
            if parameter.name != *name || parameter.tensor.size() != tensor.size() {
                let (found, own) = (tensor.size(), parameter.tensor.size());
                return Err(TrainError::new(format!("{name} {found:?} in the place of {} {own:?}", parameter.name)));
            }
        }
        tch::no_grad(|| {
            for (parameter, (_, tensor)) in self.parameters.iter_mut().zip(weights) {
                parameter.tensor.copy_(tensor);
            }
        });
        Ok(())
    }
}

/// What one block's step of decoding reads.
pub(crate) struct StepBlock {
    pub input_norm: Tensor,
    /// Queries, keys and values below each other: `[(heads + 2 · key_value_heads) · width, hidden]`.
    pub projections: Tensor,
    /// Their biases.
    pub bias: Option<Tensor>,
    pub head_norms: Option<(Tensor, Tensor)>,
    pub output: Tensor,
    pub feed_forward_norm: Tensor,
    /// Gate and up below each other: `[2 · intermediate, hidden]`.
    pub gate_up: Tensor,
    pub down: Tensor,
}

/// A model's tensors as a step of decoding reads them. They stay where they are: a change of the model's weights in place
/// changes these.
pub(crate) struct StepWeights {
    pub embedding: Tensor,
    pub blocks: Vec<StepBlock>,
    pub final_norm: Tensor,
    pub head: Tensor,
    /// `[positions, width / 2]`.
    pub cosines: Tensor,
    pub sines: Tensor,
}

impl Decoder {
    /// Puts the weights that one product can read below each other in memory, and gives all of them. Nothing for models with
    /// adapters, a value head, or biases elsewhere than in the three projections.
    pub(crate) fn step_weights(&mut self) -> Option<StepWeights> {
        let has_others = self.config.output_bias || self.config.feed_forward_bias;
        if self.lora.is_some() || self.options.head != Head::Language || has_others {
            return None;
        }
        let blocks = self.blocks.iter_mut().map(|block| StepBlock {
            input_norm: block.input_norm.shallow_clone(),
            projections: below(vec![&mut block.query.weight, &mut block.key.weight, &mut block.value.weight]),
            bias: [&mut block.query.bias, &mut block.key.bias, &mut block.value.bias]
                .map(Option::as_mut)
                .into_iter()
                .collect::<Option<Vec<_>>>()
                .map(below),
            head_norms: block.head_norms.as_ref().map(|(query, key)| (query.shallow_clone(), key.shallow_clone())),
            output: block.output.weight.shallow_clone(),
            feed_forward_norm: block.feed_forward_norm.shallow_clone(),
            gate_up: below(vec![&mut block.gate.weight, &mut block.up.weight]),
            down: block.down.weight.shallow_clone(),
        });
        let blocks = blocks.collect();
        let (cosines, sines) = self.rotary.tables();
        Some(StepWeights {
            embedding: self.embedding.shallow_clone(),
            blocks,
            final_norm: self.final_norm.shallow_clone(),
            head: self.head.0.shallow_clone(),
            cosines,
            sines,
        })
    }
}

/// Copies tensors into one, below each other, and lets each be its part of it.
fn below(tensors: Vec<&mut Tensor>) -> Tensor {
    tch::no_grad(|| {
        let whole = Tensor::cat(&tensors, 0).detach();
        let mut start = 0;
        for tensor in tensors {
            let length = tensor.size()[0];
            tensor.set_data(&whole.narrow(0, start, length));
            start += length;
        }
        whole
    })
}

impl Block {
    fn linears(&self) -> [(&'static str, &Linear); 7] {
        [
            ("self_attn.q_proj", &self.query),
            ("self_attn.k_proj", &self.key),
            ("self_attn.v_proj", &self.value),
            ("self_attn.o_proj", &self.output),
            ("mlp.gate_proj", &self.gate),
            ("mlp.up_proj", &self.up),
            ("mlp.down_proj", &self.down),
        ]
    }
}
