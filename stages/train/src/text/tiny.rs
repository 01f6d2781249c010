//! A tokenizer of bytes with a chat template, for tests: ids 0 to 255 are bytes, then `<|end|>`, `<|start|>`, `<|pad|>`.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

pub(crate) const END: i64 = 256;
pub(crate) const START: i64 = 257;
/// Size of the vocabulary.
pub(crate) const SIZE: i64 = 259;

const TEMPLATE: &str = "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}";

/// Writes the tokenizer's files into a model's folder.
pub(crate) fn write(folder: &Path) {
    let vocabulary: Map<String, Value> = (0..=255u8).map(|byte| (character(byte).to_string(), json!(byte))).collect();
    let added = |id: i64, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [added(END, "<|end|>"), added(START, "<|start|>"), added(START + 1, "<|pad|>")],
        "pre_tokenizer": bytes, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": []},
    });
    let files = [
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", json!({"eos_token": "<|end|>", "chat_template": TEMPLATE})),
        ("generation_config.json", json!({"eos_token_id": [END]})),
    ];
    for (name, json) in files {
        fs::write(folder.join(name), json.to_string()).unwrap();
    }
}

/// The printable character that byte-level vocabularies write a byte as (GPT-2's table).
fn character(byte: u8) -> char {
    let is_own = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_own(byte) {
        return char::from(byte);
    }
    let number = (0..byte).filter(|&before| !is_own(before)).count() as u32;
    char::from_u32(256 + number).expect("there are 68 of them")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{Begin, Tokenizer};

    fn tokenizer() -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path());
        Tokenizer::load(folder.path()).unwrap()
    }

    fn messages(turns: &[(&str, &str)]) -> Vec<Value> {
        turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
    }

    #[test]
    fn bytes_are_ids() {
        let tokenizer = tokenizer();
        let all: Vec<i64> = "a é\u{0}\n".bytes().map(i64::from).collect();
        assert_eq!(tokenizer.encode("a é\u{0}\n"), all);
        assert_eq!(tokenizer.encode("<|end|>x"), [END, i64::from(b'x')]);
        assert_eq!(
            (tokenizer.decode(&[END, 120]), tokenizer.decode_plain(&[END, 120])),
            ("<|end|>x".into(), "x".into())
        );
        assert_eq!(tokenizer.ends(), [END]);
    }

    #[test]
    fn prompts_are_ready_for_the_assistant_or_go_on_from_its_words() {
        let tokenizer = tokenizer();
        let text =
            |turns: &[(&str, &str)]| tokenizer.decode(&tokenizer.prompt(&messages(turns), None, &Map::new()).unwrap());
        assert_eq!(text(&[("user", "hi")]), "<|start|>user\nhi<|end|>\n<|start|>assistant\n");
        assert_eq!(text(&[("user", "hi"), ("assistant", "so ")]), "<|start|>user\nhi<|end|>\n<|start|>assistant\nso ");
    }

    #[test]
    fn ids_are_appended_to_and_never_encoded_again() {
        let tokenizer = tokenizer();
        let conversation = messages(&[("user", "hi"), ("assistant", "a"), ("user", "b")]);
        let prompt = |ids: &[i64], conversation: &[Value]| {
            tokenizer.prompt(conversation, Some(Begin { ids, messages: 2 }), &Map::new())
        };
        let rest = "<|end|>\n<|start|>user\nb<|end|>\n<|start|>assistant\n";
        // Ids that no text encodes to (a bare continuation byte) come through as they are.
        let own = prompt(&[7, 200], &conversation).unwrap();
        assert_eq!((&own[..2], tokenizer.decode(&own[2..])), ([7, 200].as_slice(), rest.to_owned()));
        let ended = prompt(&[7, END], &conversation).unwrap();
        assert_eq!(tokenizer.decode(&ended[1..]), rest, "the token that ends a turn is there once");
        let prefill = [conversation.clone(), messages(&[("assistant", "then ")])].concat();
        assert_eq!(tokenizer.decode(&prompt(&[END], &prefill).unwrap()), format!("{rest}then "));
        assert_eq!(prompt(&[1, 2], &conversation[..2]).unwrap(), [1, 2], "a turn that goes on");
        let error = tokenizer.prompt(&conversation, Some(Begin { ids: &[1], messages: 1 }), &Map::new()).unwrap_err();
        assert_eq!(error.message, "ids for 1 messages, the last of which is not the assistant's");
    }
}
