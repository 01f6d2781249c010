//! `train/new-model`: a small model with new weights and a tokenizer of bytes, to try a setup with.

use std::path::Path;

use cuda_agent_protocol::{Program, ProgramError};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tch::{Device, Kind};

use super::{output_path, params};
use crate::TrainError;
use crate::model::{Config, Decoder, Head, LoadOptions};

#[derive(Clone, Debug, Deserialize)]
struct NewModelParams {
    layers: i64,
    hidden: i64,
    heads: i64,
    key_value_heads: i64,
    positions: i64,
    initializer_range: f64,
    seed: i64,
}

/// The token that ends texts, and the two around a turn's role.
const SPECIAL: [&str; 3] = ["<|end|>", "<|turn|>", "<|text|>"];

/// Every message as `<|turn|>role<|text|>content<|end|>`.
const TEMPLATE: &str = "{%- for message in messages %}{{ '<|turn|>' + message['role'] + '<|text|>' + message['content'] + '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|turn|>assistant<|text|>' }}{%- endif %}";

/// Runs the stage.
pub fn main(program: &mut Program) -> Result<(), ProgramError> {
    let request = program.request.clone();
    let NewModelParams { layers, hidden, heads, key_value_heads, positions, initializer_range, seed } =
        params(&request)?;
    let config = json!({
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 256 + SPECIAL.len(),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": true,
        "initializer_range": initializer_range,
        "eos_token_id": 256,
    });
    let config = Config::from_json(&config).map_err(super::input)?;
    let options = LoadOptions { device: Device::Cpu, kind: Kind::Float, head: Head::Language };
    let folder = output_path(&request, "model");
    Decoder::random(&config, seed, &options).save(folder, None)?;
    write_tokenizer(folder)?;
    Ok(())
}

fn write_tokenizer(folder: &Path) -> Result<(), TrainError> {
    let mut vocabulary: Map<String, Value> = Map::new();
    for (id, letter) in letters_of_bytes().into_iter().enumerate() {
        vocabulary.insert(letter.to_string(), json!(id));
    }
    let added = |(number, content): (usize, &&str)| {
        json!({"id": 256 + number, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let added: Vec<Value> = SPECIAL.iter().enumerate().map(added).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": []},
    });
    let settings = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": false,
    });
    let generation = json!({"eos_token_id": 256, "pad_token_id": 256});
    for (name, json) in
        [("tokenizer.json", tokenizer), ("tokenizer_config.json", settings), ("generation_config.json", generation)]
    {
        let path = folder.join(name);
        let text = serde_json::to_string_pretty(&json).expect("plain data") + "\n";
        std::fs::write(&path, text).map_err(TrainError::file(&path))?;
    }
    Ok(())
}

/// The letters by which byte-level tokenizers write the bytes 0 to 255: those that can be printed stand for themselves,
/// the others for letters from 256 on (GPT-2's).
fn letters_of_bytes() -> Vec<char> {
    let mut next = 256;
    let letter = |byte: u32| {
        let stands_for_itself =
            (33..=126).contains(&byte) || (161..=172).contains(&byte) || (174..=255).contains(&byte);
        let code = if stands_for_itself {
            byte
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).expect("below the surrogates")
    };
    (0..256).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Tokenizer;

    #[test]
    fn every_byte_is_a_token_and_conversations_have_their_template() {
        let folder = tempfile::tempdir().unwrap();
        write_tokenizer(folder.path()).unwrap();
        let tokenizer = Tokenizer::load(folder.path()).unwrap();
        let text = "é\n\t\"x\" 🦀 \u{7f}";
        let ids = tokenizer.encode(text);
        assert_eq!(ids.iter().map(|id| *id as u8).collect::<Vec<_>>(), text.as_bytes());
        assert_eq!(tokenizer.decode(&ids), text);
        assert_eq!(tokenizer.ends(), [256]);
    }
}
