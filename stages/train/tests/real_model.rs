//! A real model, imported from GGUF, beside transformers and the package `gguf`. By hand, since it takes minutes and a
//! file that is not in the repository (Qwen2.5-Coder-0.5B-Instruct, `Q4_K_M`):
//!
//! ```text
//! CUDA_AGENT_GGUF=FILE.gguf CUDA_AGENT_MODEL=FOLDER \
//!     cargo test -p cuda-agent-train --features torch --test real_model -- --ignored --nocapture --test-threads 1
//! ```
//!
//! `FOLDER` gets the imported model and may exist from before. For the blocks the interpreter in `CUDA_AGENT_GGUF_PYTHON`
//! needs `gguf`, `torch`, `transformers` and `safetensors`.
#![cfg(feature = "torch")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use cuda_agent_train::model::gguf::{Gguf, import};
use cuda_agent_train::model::{Checkpoint, Decoder, Head, LoadOptions, Packed};
use cuda_agent_train::sampler::{Options, Request, SampleKey, Sampler, Settings};
use cuda_agent_train::text::Tokenizer;
use tch::{Device, Kind, Tensor};

fn variable(name: &str) -> PathBuf {
    std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set")).into()
}

/// The imported model, which is made where it isn't there.
fn model() -> PathBuf {
    let folder = variable("CUDA_AGENT_MODEL");
    if !folder.join("model.safetensors").exists() {
        let begin = Instant::now();
        let imported = import(&variable("CUDA_AGENT_GGUF"), &folder).unwrap();
        println!("{imported:?} in {:.1} s", begin.elapsed().as_secs_f64());
    }
    folder
}

/// Where the script wrote its tensors. `CUDA_AGENT_REFERENCE`, a folder, keeps them for the next time.
fn reference(python: &Path, mode: &str, source: &Path) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let kept = std::env::var_os("CUDA_AGENT_REFERENCE").map(PathBuf::from);
    let out = kept.unwrap_or_else(|| folder.path().to_owned()).join(format!("{mode}.safetensors"));
    if out.exists() {
        return (folder, out);
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/reference.py");
    let status = Command::new(python).arg(script).arg(mode).arg(source).arg(&out).status().unwrap();
    assert!(status.success());
    (folder, out)
}

/// Every tensor of a file, as f32.
fn tensors(file: &Path) -> Vec<(String, Tensor)> {
    let bytes = std::fs::read(file).unwrap();
    let checkpoint = Checkpoint::open_files(&[file.to_owned()]).unwrap();
    let load = |(name, view): (String, safetensors::tensor::TensorView)| {
        let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
        (name.clone(), checkpoint.tensor(&name, &shape, Kind::Float, Device::Cpu).unwrap())
    };
    safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(load).collect()
}

fn ids(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.to_kind(Kind::Int64)).unwrap()
}

#[test]
#[ignore = "needs a model and minutes"]
fn blocks_are_read_as_the_gguf_package_reads_them() {
    let file = variable("CUDA_AGENT_GGUF");
    let gguf = Gguf::open(&file).unwrap();
    let (_folder, out) = reference(&variable("CUDA_AGENT_GGUF_PYTHON"), "blocks", &file);
    let expected = tensors(&out);
    assert!(expected.len() >= 6);
    for (name, expected) in expected {
        let tensor = name.split_once('/').unwrap().1;
        // A vector is one row to the script.
        let rows = if gguf.shape(tensor).unwrap().len() == 1 { usize::MAX } else { 256 };
        let own = gguf.rows(tensor, rows).unwrap();
        let expected = Vec::<f32>::try_from(expected).unwrap();
        assert_eq!(own.len(), expected.len(), "{name}");
        let same = own.iter().zip(&expected).all(|(one, other)| one.to_bits() == other.to_bits() || one == other);
        assert!(same, "{name} differs");
        println!("{name}: {} equal numbers", own.len());
    }
}

#[test]
#[ignore = "needs a model and minutes"]
fn logits_and_greedy_tokens_are_those_of_transformers() {
    let folder = model();
    let python = variable("VIRTUAL_ENV").join("bin/python");
    let (_folder, out) = reference(&python, "real", &folder);
    let expected: std::collections::BTreeMap<_, _> = tensors(&out).into_iter().collect();
    let options = LoadOptions { device: Device::Cpu, kind: Kind::Float, head: Head::Language };
    let begin = Instant::now();
    let decoder = Decoder::load(&folder, &options).unwrap();
    println!("loaded in {:.1} s", begin.elapsed().as_secs_f64());
    let tokenizer = Tokenizer::load(&folder).unwrap();

    let texts: Vec<Vec<i64>> = (0..3).map(|number| ids(&expected[&format!("ids.{number}")])).collect();
    let packed = Packed::new(&texts.iter().map(Vec::as_slice).collect::<Vec<_>>(), Device::Cpu);
    let logits = tch::no_grad(|| decoder.head(&decoder.hidden(&packed)));
    let theirs: Vec<&Tensor> = (0..3).map(|number| &expected[&format!("logits.{number}")]).collect();
    let largest = (logits - Tensor::cat(&theirs, 0)).abs().max().double_value(&[]);
    println!("largest difference of a logit: {largest:.2e}");
    assert!(largest <= 1e-3);

    let prompt = ids(&expected["prompt"]);
    let message = serde_json::json!({"role": "user",
        "content": "Write a CUDA kernel that computes a row-wise softmax in float32."});
    let rendered = tokenizer.render(&[message], true, &serde_json::Map::new()).unwrap();
    assert_eq!(tokenizer.encode_rendered(&rendered), prompt);
    let sampler = Sampler::new(decoder, Some(tokenizer), Options { slots: 2, capacity: 512, is_plain: false });
    let settings = Settings { temperature: 0.0, max_tokens: 256, ..Settings::default() };
    let begin = Instant::now();
    let sample = sampler.submit(Request { prompt: prompt.clone(), key: SampleKey(0), settings }).wait().unwrap();
    println!("256 tokens in {:.1} s:\n{}", begin.elapsed().as_secs_f64(), sample.text);
    assert_eq!(sample.tokens, ids(&expected["greedy"]));

    // Sampled at temperature 1: the log-probabilities are those of a full forward pass.
    let settings = Settings { max_tokens: 64, ..Settings::default() };
    let handles: Vec<_> = (0..2)
        .map(|key| sampler.submit(Request { prompt: prompt.clone(), key: SampleKey(key), settings: settings.clone() }))
        .collect();
    let samples: Vec<_> = handles.into_iter().map(|handle| handle.wait().unwrap()).collect();
    drop(sampler);
    let decoder = Decoder::load(&folder, &options).unwrap();
    let mut largest = 0.0f64;
    for sample in samples {
        let all = [prompt.as_slice(), &sample.tokens].concat();
        let again = tch::no_grad(|| {
            let hidden = decoder.hidden(&Packed::new(&[&all], Device::Cpu));
            let rows = hidden.narrow(0, prompt.len() as i64 - 1, sample.tokens.len() as i64);
            decoder.head(&rows).log_softmax(-1, None)
        });
        let again = again.gather(-1, &Tensor::from_slice(&sample.tokens).unsqueeze(1), false).flatten(0, -1);
        let own = Tensor::from_slice(&sample.log_probabilities);
        largest = largest.max((own - again).abs().max().double_value(&[]));
    }
    println!("largest difference of a log-probability: {largest:.2e}");
    assert!(largest <= 1e-3);
}
