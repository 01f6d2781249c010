//! From a GGUF file to a Hugging Face folder: weights in bf16, configuration, tokenizer, generation's settings.

use std::fs;
use std::path::Path;

use half::bf16;
use serde_json::{Map, Value as Json, json};

use crate::TrainError;
use crate::model::config::Config;
use crate::model::gguf::reader::{Gguf, Value};
use crate::model::weights::{LazyTensor, write_lazily};

/// llama.cpp's numbers of token types.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// How tokenizers of Qwen2 and Qwen3 split text before merging; llama.cpp names it `qwen2`.
const QWEN2_SPLIT: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/// What an import made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Number of tensors written.
    pub tensors: usize,
    /// Number of weights.
    pub parameters: usize,
    /// Whether the head is the embedding.
    pub tied: bool,
}

/// Imports a Qwen2 or Qwen3 model. Where the file holds a tied model's table twice, as embedding and as head, it is taken
/// from the head (`output.weight`), which is quantised less.
pub fn import(file: &Path, folder: &Path) -> Result<Imported, TrainError> {
    let gguf = Gguf::open(file)?;
    let architecture = gguf.text("general.architecture")?;
    if !["qwen2", "qwen3"].contains(&architecture) {
        let message = format!("general.architecture: \"{architecture}\" is not supported, only qwen2 and qwen3");
        return Err(gguf.error(message));
    }
    let tied = is_tied(&gguf)?;
    let config = configuration(&gguf, tied)?;
    let tensors = tensors(&gguf, &config, tied)?;
    fs::create_dir_all(folder).map_err(TrainError::file(folder))?;
    write_json(folder, "config.json", &config)?;
    write_json(folder, "generation_config.json", &generation(&gguf)?)?;
    let vocabulary = Vocabulary::read(&gguf)?;
    write_json(folder, "tokenizer.json", &vocabulary.tokenizer(&gguf)?)?;
    write_json(folder, "tokenizer_config.json", &vocabulary.tokenizer_config(&gguf)?)?;
    let parameters = tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
    let count = tensors.len();
    write_lazily(folder, tensors)?;
    Ok(Imported { tensors: count, parameters, tied })
}

fn write_json(folder: &Path, name: &str, json: &Json) -> Result<(), TrainError> {
    let path = folder.join(name);
    let text = serde_json::to_string_pretty(json).expect("JSON has no error");
    fs::write(&path, text + "\n").map_err(TrainError::file(&path))
}

/// Whether embedding and head are one table. Files of tied models have no head, or the same table quantised otherwise:
/// then rows point the same way, while those of two trained tables don't.
fn is_tied(gguf: &Gguf) -> Result<bool, TrainError> {
    if gguf.shape("output.weight").is_none() {
        return Ok(true);
    }
    let (one, other) = (gguf.rows("token_embd.weight", 256)?, gguf.rows("output.weight", 256)?);
    let dot = |one: &[f32], other: &[f32]| -> f64 {
        one.iter().zip(other).map(|(one, other)| f64::from(*one) * f64::from(*other)).sum()
    };
    let cosine = dot(&one, &other) / (dot(&one, &one) * dot(&other, &other)).sqrt();
    Ok(cosine > 0.9)
}

fn configuration(gguf: &Gguf, tied: bool) -> Result<Json, TrainError> {
    let architecture = gguf.text("general.architecture")?;
    let key = |name: &str| format!("{architecture}.{name}");
    let whole = |name: &str| gguf.whole(&key(name));
    if let Some(Value::Text(kind)) =
        gguf.get(&key("rope.scaling.type")).filter(|kind| **kind != Value::Text("none".into()))
    {
        return Err(gguf.error(format!("{}: \"{kind}\" is not supported", key("rope.scaling.type"))));
    }
    let vocabulary = gguf.shape("token_embd.weight").ok_or_else(|| gguf.error("no tensor token_embd.weight"))?[0];
    let class = if architecture == "qwen3" { "Qwen3ForCausalLM" } else { "Qwen2ForCausalLM" };
    let mut config = json!({
        "architectures": [class],
        "attention_dropout": 0.0,
        "bos_token_id": gguf.whole("tokenizer.ggml.bos_token_id").ok(),
        "eos_token_id": gguf.whole("tokenizer.ggml.eos_token_id")?,
        "hidden_act": "silu",
        "hidden_size": whole("embedding_length")?,
        "initializer_range": 0.02,
        "intermediate_size": whole("feed_forward_length")?,
        "max_position_embeddings": whole("context_length")?,
        "model_type": architecture,
        "num_attention_heads": whole("attention.head_count")?,
        "num_hidden_layers": whole("block_count")?,
        "num_key_value_heads": whole("attention.head_count_kv")?,
        "rms_norm_eps": gguf.number(&key("attention.layer_norm_rms_epsilon"))?,
        "rope_theta": gguf.number(&key("rope.freq_base"))?,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "use_sliding_window": false,
        "vocab_size": vocabulary,
    });
    if let Ok(width) = whole("attention.key_length") {
        config["head_dim"] = json!(width);
    }
    Ok(config)
}

fn generation(gguf: &Gguf) -> Result<Json, TrainError> {
    let eos = gguf.whole("tokenizer.ggml.eos_token_id")?;
    let pad = gguf.whole("tokenizer.ggml.padding_token_id").ok();
    // Qwen's chat models end with <|im_end|>, and their base with <|endoftext|>, which pads.
    let mut ends = vec![eos];
    ends.extend(pad.filter(|pad| *pad != eos));
    Ok(
        json!({"bos_token_id": gguf.whole("tokenizer.ggml.bos_token_id").ok(), "eos_token_id": ends, "pad_token_id": pad}),
    )
}

/// Hugging Face's name of a tensor.
fn hugging_face_name(name: &str) -> Option<String> {
    match name {
        "token_embd.weight" => return Some("model.embed_tokens.weight".into()),
        "output.weight" => return Some("lm_head.weight".into()),
        "output_norm.weight" => return Some("model.norm.weight".into()),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = part.rsplit_once('.')?;
    let part = match part {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "attn_output" => "self_attn.o_proj",
        "ffn_norm" => "post_attention_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    layer.parse::<u32>().ok()?;
    Some(format!("model.layers.{layer}.{part}.{kind}"))
}

/// Every tensor of the model, read when it is written.
fn tensors<'a>(gguf: &'a Gguf, config: &Json, tied: bool) -> Result<Vec<LazyTensor<'a>>, TrainError> {
    let from_head = tied && gguf.shape("output.weight").is_some();
    let mut tensors = Vec::new();
    for name in gguf.tensors().filter(|name| !(from_head && *name == "token_embd.weight")) {
        let target = match name {
            "output.weight" if from_head => Some("model.embed_tokens.weight".to_owned()),
            _ => hugging_face_name(name),
        };
        let target = target.ok_or_else(|| gguf.error(format!("{name}: a model of this kind has no such tensor")))?;
        let shape = gguf.shape(name).expect("it is in the list").iter().map(|&size| size as usize).collect();
        let bytes = Box::new(move || {
            let numbers = gguf.tensor(name).expect("its place was checked when the file was opened");
            let mut bytes = vec![0; numbers.len() * 2];
            for (number, bytes) in numbers.iter().zip(bytes.chunks_exact_mut(2)) {
                bytes.copy_from_slice(&bf16::from_f32(*number).to_le_bytes());
            }
            bytes
        });
        tensors.push(LazyTensor { name: target, shape, bytes });
    }
    tensors.sort_by(|one, other| order(&one.name).cmp(&order(&other.name)));
    // The configuration must be one that the decoder here reads, before a gigabyte is written.
    Config::from_json(config).map_err(|error| gguf.error(error))?;
    Ok(tensors)
}

/// The order of the forward pass, so that shards hold neighbours.
fn order(name: &str) -> (u32, u32, &str) {
    match name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) => (1, layer.parse().unwrap_or(0), part),
        None if name.starts_with("model.embed_tokens") => (0, 0, name),
        None => (2, 0, name),
    }
}

/// The tokenizer of the metadata.
struct Vocabulary<'a> {
    /// Text and type, by id.
    tokens: Vec<(&'a str, i64)>,
    merges: Vec<&'a str>,
}

impl<'a> Vocabulary<'a> {
    fn read(gguf: &'a Gguf) -> Result<Self, TrainError> {
        let (model, split) = (gguf.text("tokenizer.ggml.model")?, gguf.text("tokenizer.ggml.pre")?);
        if (model, split) != ("gpt2", "qwen2") {
            let message =
                format!("tokenizer.ggml.model \"{model}\", tokenizer.ggml.pre \"{split}\": only gpt2 with qwen2");
            return Err(gguf.error(message));
        }
        let texts = |name: &str| -> Result<Vec<&'a str>, TrainError> {
            let text = |value: &'a Value| match value {
                Value::Text(text) => Ok(text.as_str()),
                _ => Err(gguf.error(format!("{name}: expected texts"))),
            };
            gguf.list(name)?.iter().map(text).collect()
        };
        let (tokens, merges) = (texts("tokenizer.ggml.tokens")?, texts("tokenizer.ggml.merges")?);
        let types = gguf.list("tokenizer.ggml.token_type")?;
        if types.len() != tokens.len() {
            return Err(gguf.error("tokenizer.ggml.token_type is not as long as tokenizer.ggml.tokens"));
        }
        let kind = |value: &Value| if let Value::Whole(kind) = value { *kind } else { 0 };
        Ok(Self { tokens: tokens.into_iter().zip(types.iter().map(kind)).collect(), merges })
    }

    /// Tokens that are matched in text before anything else: id, text, whether `skip_special_tokens` leaves them out.
    fn added(&self) -> impl Iterator<Item = (usize, &'a str, bool)> {
        let added = self.tokens.iter().enumerate().filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind));
        added.map(|(id, (text, kind))| (id, *text, *kind == CONTROL))
    }

    /// `tokenizer.json` as Qwen publishes it. Padding of the table (`[PAD…]`, unused) is no token.
    fn tokenizer(&self, gguf: &Gguf) -> Result<Json, TrainError> {
        let normal = self.tokens.iter().enumerate();
        let normal = normal.filter(|(_, (_, kind))| ![CONTROL, USER_DEFINED, UNUSED].contains(kind));
        let vocabulary: Map<String, Json> = normal.map(|(id, (text, _))| ((*text).to_owned(), json!(id))).collect();
        let pairs: Option<Vec<Json>> =
            self.merges.iter().map(|merge| merge.split_once(' ').map(|(left, right)| json!([left, right]))).collect();
        let pairs =
            pairs.ok_or_else(|| gguf.error("tokenizer.ggml.merges: expected two texts with a space between"))?;
        let added: Vec<Json> = self
            .added()
            .map(|(id, content, special)| {
                json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": special})
            })
            .collect();
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let split =
            json!({"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": false});
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes]},
            "post_processor": bytes,
            "decoder": bytes,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocabulary, "merges": pairs,
            },
        }))
    }

    fn tokenizer_config(&self, gguf: &Gguf) -> Result<Json, TrainError> {
        let token = |key: &str| gguf.whole(key).ok().and_then(|id| self.tokens.get(id as usize)).map(|(text, _)| *text);
        let added: Map<String, Json> = self
            .added()
            .map(|(id, content, special)| {
                let token = json!({"content": content, "lstrip": false, "normalized": false, "rstrip": false,
                    "single_word": false, "special": special});
                (id.to_string(), token)
            })
            .collect();
        let special: Vec<&str> = self.added().filter(|(_, _, special)| *special).map(|(_, text, _)| text).collect();
        let architecture = gguf.text("general.architecture")?;
        Ok(json!({
            "add_bos_token": false,
            "add_prefix_space": false,
            "added_tokens_decoder": added,
            "additional_special_tokens": special,
            "bos_token": null,
            "chat_template": gguf.text("tokenizer.chat_template").ok(),
            "clean_up_tokenization_spaces": false,
            "eos_token": token("tokenizer.ggml.eos_token_id"),
            "errors": "replace",
            "model_max_length": gguf.whole(&format!("{architecture}.context_length"))?,
            "pad_token": token("tokenizer.ggml.padding_token_id"),
            "split_special_tokens": false,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": null,
        }))
    }
}
