//! Ids, rendered conversations and decoded text, here and by transformers (`python/chat.py`).
#![cfg(feature = "torch")]

use std::path::Path;
use std::process::Command;

use cuda_agent_train::text::{Incremental, Tokenizer};
use serde_json::Value;

fn transformers(arguments: &[&Path]) {
    let environment = std::env::var_os("VIRTUAL_ENV").expect("VIRTUAL_ENV: the environment that has torch");
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let output = Command::new(Path::new(&environment).join("bin/python"))
        .arg(tests.join("python/chat.py"))
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn ids(value: &Value) -> Vec<i64> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Everything that a tokenizer does, held against what transformers says of the same folder.
fn check(folder: &Path, expected: &Path) {
    let tokenizer = Tokenizer::load(folder).unwrap();
    let expected: Value = serde_json::from_slice(&std::fs::read(expected).unwrap()).unwrap();
    let (chats, texts) = (expected["chats"].as_array().unwrap(), expected["texts"].as_array().unwrap());
    assert_eq!((chats.len(), texts.len()), (10, 17));
    for chat in chats {
        let messages = chat["messages"].as_array().unwrap();
        let settings = chat["settings"].as_object().unwrap();
        let text = tokenizer.render(messages, chat["prompt"] == true, settings).unwrap();
        assert_eq!(text, chat["text"].as_str().unwrap(), "{}", folder.display());
        assert_eq!(tokenizer.encode_rendered(&text), ids(&chat["ids"]), "{text}");
    }
    for case in texts {
        let text = case["text"].as_str().unwrap();
        let own = tokenizer.encode(text);
        assert_eq!(own, ids(&case["ids"]), "{text:?}");
        assert_eq!(tokenizer.decode(&own), case["decoded"].as_str().unwrap());
        assert_eq!(tokenizer.decode_plain(&own), case["plain"].as_str().unwrap());
        for (skip, whole) in [(false, tokenizer.decode(&own)), (true, tokenizer.decode_plain(&own))] {
            let mut decoder = Incremental::new(skip);
            let mut pieces: String = own.iter().map(|&id| decoder.push(&tokenizer, id)).collect();
            pieces.push_str(&decoder.finish(&tokenizer));
            assert_eq!(pieces, whole, "pieces of {text:?}");
        }
    }
}

#[test]
fn small_tokenizers_with_the_features_of_real_templates() {
    let root = tempfile::tempdir().unwrap();
    let templates = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates");
    transformers(&[Path::new("write"), &templates, root.path()]);
    for name in ["qwen2.5", "llama3_like", "qwen3_like"] {
        let folder = root.path().join(name);
        check(&folder, &folder.join("expected.json"));
    }

    // A character of several tokens comes out when it is whole; half of one is a replacement character in the end.
    let tokenizer = Tokenizer::load(&root.path().join("qwen2.5")).unwrap();
    let own = tokenizer.encode_rendered("👩");
    assert!(own.len() > 1, "the small vocabulary has no token for it");
    let mut decoder = Incremental::new(false);
    let pieces: Vec<String> = own.iter().map(|&id| decoder.push(&tokenizer, id)).collect();
    assert!(pieces[..own.len() - 1].iter().all(String::is_empty) && pieces[own.len() - 1] == "👩", "{pieces:?}");
    let mut cut = Incremental::new(false);
    assert_eq!(cut.push(&tokenizer, own[0]), "");
    assert_eq!(cut.finish(&tokenizer), "\u{fffd}");
}

/// The tokenizer and template of a real model. By hand:
/// `CUDA_AGENT_MODEL=FOLDER cargo test -p cuda-agent-train --features torch --test text -- --ignored`
#[test]
#[ignore = "needs a model's folder in CUDA_AGENT_MODEL"]
fn a_real_model() {
    let folder = std::env::var_os("CUDA_AGENT_MODEL").expect("CUDA_AGENT_MODEL: a model's folder");
    let expected = tempfile::tempdir().unwrap().path().with_extension("json");
    transformers(&[Path::new("model"), Path::new(&folder), &expected]);
    check(Path::new(&folder), &expected);
}
