//! Small random models, computed here and by transformers: logits, values, every gradient, and folders in both
//! directions. `python/reference.py` is the other side; it needs the interpreter that torch was built against.
#![cfg(feature = "torch")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use cuda_agent_train::model::{Checkpoint, Decoder, Head, LoadOptions, LoraConfig, Packed, write_file};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

const CASES: [&str; 7] =
    ["qwen2-tied", "qwen2-sharded", "qwen3", "qwen3-biased", "llama3", "llama-biased", "qwen2-value"];

/// Runs the script with the project's interpreter, and returns what it prints.
fn reference(arguments: &[&Path]) -> String {
    let environment = std::env::var_os("VIRTUAL_ENV").expect("VIRTUAL_ENV: the environment that has torch");
    reference_by(&Path::new(&environment).join("bin/python"), arguments)
}

fn reference_by(python: &Path, arguments: &[&Path]) -> String {
    let output = Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/reference.py"))
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Where the cases are; written once for all tests of this program.
fn models() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER
        .get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            reference(&[Path::new("write"), folder.path()]);
            folder
        })
        .path()
}

fn options(case: &str) -> LoadOptions {
    let head = if case.ends_with("value") { Head::Value } else { Head::Language };
    LoadOptions { device: Device::Cpu, kind: Kind::Float, head }
}

fn ids(case: &str) -> Vec<Vec<i64>> {
    serde_json::from_slice(&std::fs::read(models().join(case).join("ids.json")).unwrap()).unwrap()
}

fn packed(sequences: &[Vec<i64>]) -> Packed {
    Packed::new(&sequences.iter().map(Vec::as_slice).collect::<Vec<_>>(), Device::Cpu)
}

fn output(decoder: &Decoder, case: &str) -> Tensor {
    decoder.head(&decoder.hidden(&packed(&ids(case))))
}

/// What transformers computed: `output`, `weights` of the loss, `gradient.NAME`.
fn expected(case: &str) -> BTreeMap<String, Tensor> {
    let file = models().join(case).join("expected.safetensors.out");
    let bytes = std::fs::read(&file).unwrap();
    let header = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let checkpoint = Checkpoint::open_files(&[file]).unwrap();
    let load = |(name, view): (String, safetensors::tensor::TensorView)| {
        let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
        let tensor = checkpoint.tensor(&name, &shape, Kind::Float, Device::Cpu).unwrap();
        (name, tensor)
    };
    header.tensors().into_iter().map(load).collect()
}

fn difference(one: &Tensor, other: &Tensor) -> f64 {
    assert_eq!(one.size(), other.size());
    (one - other).abs().max().double_value(&[])
}

#[test]
fn outputs_and_gradients_are_those_of_transformers() {
    for case in CASES {
        let decoder = Decoder::load(&models().join(case), &options(case)).unwrap();
        let expected = expected(case);
        let own = output(&decoder, case);
        let error = difference(&own, &expected["output"]);
        assert!(error <= 1e-5, "{case}: outputs differ by {error:e}");

        let scored = if own.dim() == 1 { own.shallow_clone() } else { own.log_softmax(-1, None) };
        (scored * &expected["weights"]).sum(None).backward();
        let mut worst = 0.0f64;
        for parameter in decoder.parameters() {
            let theirs = &expected[&format!("gradient.{}", parameter.name)];
            let scale = theirs.abs().max().double_value(&[]).max(1.0);
            let relative = difference(&parameter.tensor.grad(), theirs) / scale;
            assert!(relative <= 1e-5, "{case}: the gradient of {} differs by {relative:e}", parameter.name);
            worst = worst.max(relative);
        }
        let gradients = expected.keys().filter(|name| name.starts_with("gradient.")).count();
        assert_eq!(gradients, decoder.parameters().len(), "{case}");
        println!("{case}: outputs {error:.1e}, gradients {worst:.1e}");
    }
}

/// Saves a model beside what it computes, for `reference.py check`.
fn save(decoder: &Decoder, folder: &Path, case: &str) {
    // The ids are a file beside the weights, so they come along.
    decoder.save(folder, Some(&models().join(case))).unwrap();
    let own = tch::no_grad(|| output(decoder, case));
    write_file(&folder.join("own.safetensors.out"), vec![("output".into(), own)]).unwrap();
}

/// A language model that got a value head, which isn't zero any more.
fn with_value_head(case: &str) -> Decoder {
    let value = LoadOptions { head: Head::Value, ..options(case) };
    let decoder = Decoder::load(&models().join(case), &value).unwrap();
    assert_eq!(output(&decoder, case).abs().max().double_value(&[]), 0.0, "the head begins at zero");
    let score = decoder.parameters().iter().find(|parameter| parameter.name == "score.weight").unwrap();
    let drawn = Tensor::linspace(-1.0, 1.0, 32, (Kind::Float, Device::Cpu)).unsqueeze(0);
    tch::no_grad(|| score.tensor.shallow_clone().copy_(&drawn));
    decoder
}

/// A model with adapters that change something.
fn with_adapters(case: &str) -> Decoder {
    let mut decoder = Decoder::load(&models().join(case), &options(case)).unwrap();
    decoder.add_lora(&LoraConfig::all(4), 1);
    let before = tch::no_grad(|| output(&decoder, case));
    assert!(difference(&before, &expected(case)["output"]) <= 1e-5, "B begins at zero");
    for (number, parameter) in decoder.parameters().iter().filter(|one| one.name.contains("lora_B")).enumerate() {
        let size = parameter.tensor.size();
        let steps = size.iter().product();
        let drawn = Tensor::linspace(-0.2, 0.3 + number as f64, steps, (Kind::Float, Device::Cpu)).sin() * 0.1;
        tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&drawn.reshape(size)));
    }
    let after = tch::no_grad(|| output(&decoder, case));
    assert!(difference(&before, &after) > 0.1, "the adapters change something");
    decoder
}

#[test]
fn what_is_saved_loads_in_transformers() {
    let root = tempfile::tempdir().unwrap();
    let plain = |case: &str| Decoder::load(&models().join(case), &options(case)).unwrap();
    let saved = [
        ("qwen2-sharded", "Qwen2ForCausalLM", plain("qwen2-sharded")),
        ("qwen3", "Qwen3ForCausalLM", plain("qwen3")),
        ("llama-biased", "LlamaForCausalLM", plain("llama-biased")),
        ("qwen2-value", "Qwen2ForTokenClassification", plain("qwen2-value")),
        ("qwen2-tied", "Qwen2ForTokenClassification", with_value_head("qwen2-tied")),
        ("qwen2-tied", "Qwen2ForCausalLM", with_adapters("qwen2-tied")),
        ("qwen3-biased", "Qwen3ForCausalLM", with_adapters("qwen3-biased")),
    ];
    let folders: Vec<PathBuf> = (0..saved.len()).map(|number| root.path().join(number.to_string())).collect();
    for ((case, _, decoder), folder) in saved.iter().zip(&folders) {
        save(decoder, folder, case);
        let again = Decoder::load(folder, decoder.options()).unwrap();
        let (own, loaded) = tch::no_grad(|| (output(decoder, case), output(&again, case)));
        assert_eq!(own, loaded, "{case}: equal bit by bit, merged adapters too");
    }
    let arguments: Vec<&Path> = [Path::new("check")].into_iter().chain(folders.iter().map(PathBuf::as_path)).collect();
    let answers = reference(&arguments);
    assert_eq!(answers.lines().count(), saved.len());
    for ((case, class, _), answer) in saved.iter().zip(answers.lines()) {
        let answer: Value = serde_json::from_str(answer).unwrap();
        assert_eq!((answer["class"].as_str(), &answer["problems"]), (Some(*class), &serde_json::json!({})), "{case}");
        let error = answer["difference"].as_f64().unwrap();
        assert!(error <= 1e-5, "{case}: {error:e}");
        println!("{case} as {class}: {error:.1e}");
    }
}

/// What is saved as an adapter is one to PEFT, and computes the same there. By hand:
/// `CUDA_AGENT_PEFT_PYTHON=… cargo test -p cuda-agent-train --features torch --test transformers -- --ignored`
#[test]
#[ignore = "needs an interpreter with peft in CUDA_AGENT_PEFT_PYTHON"]
fn an_adapter_loads_in_peft() {
    let python = std::env::var_os("CUDA_AGENT_PEFT_PYTHON").expect("CUDA_AGENT_PEFT_PYTHON: an interpreter with peft");
    let case = "qwen3-biased";
    let decoder = with_adapters(case);
    let folder = tempfile::tempdir().unwrap();
    decoder.save_adapter(folder.path(), "base").unwrap();
    let own = tch::no_grad(|| output(&decoder, case));
    write_file(&folder.path().join("own.safetensors.out"), vec![("output".into(), own)]).unwrap();
    let answer = reference_by(Path::new(&python), &[Path::new("adapter"), &models().join(case), folder.path()]);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let error = answer["difference"].as_f64().unwrap();
    println!("{case} with PEFT: {error:.1e}");
    assert!(error <= 1e-5, "{error:e}");
}
