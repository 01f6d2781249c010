//! What must hold of a decoder whatever its weights: packing, causality, adapters, and folders that are wrong.
//! Its numbers are held against transformers in `tests/transformers.rs`.

use std::path::Path;

use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::*;

const OPTIONS: LoadOptions = LoadOptions { device: Device::Cpu, kind: Kind::Float, head: Head::Language };

fn config() -> Config {
    Config::from_json(&json!({
        "model_type": "qwen2", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.3,
        "tie_word_embeddings": true,
    }))
    .unwrap()
}

fn logits(decoder: &Decoder, sequences: &[&[i64]]) -> Tensor {
    decoder.head(&decoder.hidden(&Packed::new(sequences, Device::Cpu)))
}

fn difference(one: &Tensor, other: &Tensor) -> f64 {
    (one - other).abs().max().double_value(&[])
}

/// Fills every B so that adapters change something.
fn disturb(decoder: &Decoder) {
    for (number, parameter) in decoder.parameters().iter().filter(|one| one.name.contains("lora_B")).enumerate() {
        let size = parameter.tensor.size();
        let drawn = crate::random::normal([number as u32, 1], size.iter().product::<i64>() as usize, 0.3);
        tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&Tensor::from_slice(&drawn).reshape(&size)));
    }
}

#[test]
fn packed_is_the_same_as_each_alone_and_nothing_crosses_bounds() {
    let decoder = Decoder::random(&config(), 1, &OPTIONS);
    let (first, second): (&[i64], &[i64]) = (&[3, 1, 4, 1, 5, 9, 2], &[6, 5, 3, 5]);
    let together = logits(&decoder, &[first, &[], second]);
    let alone = Tensor::cat(&[logits(&decoder, &[first]), logits(&decoder, &[second])], 0);
    assert!(difference(&together, &alone) <= 1e-6);
    let other = logits(&decoder, &[&[8, 8, 8, 8, 8, 8, 8], second]);
    assert_eq!(other.narrow(0, 7, 4), together.narrow(0, 7, 4), "the second reads nothing of the first");
    let changed_end = logits(&decoder, &[&[3, 1, 4, 1, 5, 9, 60], second]);
    assert_eq!(changed_end.narrow(0, 0, 6), together.narrow(0, 0, 6), "no token reads a later one");
    assert!(difference(&changed_end.narrow(0, 6, 1), &together.narrow(0, 6, 1)) > 1e-3);
}

#[test]
fn a_seed_makes_the_same_model_again() {
    let [one, same, other] = [1, 1, 2].map(|seed| logits(&Decoder::random(&config(), seed, &OPTIONS), &[&[1, 2, 3]]));
    assert_eq!(one, same);
    assert!(difference(&one, &other) > 1e-2);
}

#[test]
#[should_panic(expected = "a sequence has 33 tokens, and the model has 32 positions")]
fn a_sequence_longer_than_the_model_is_refused() {
    let _refused = logits(&Decoder::random(&config(), 1, &OPTIONS), &[&[1; 33]]);
}

/// The forward pass of adapters is that of the merged weight; their gradients are those of W·x + s·B(A·x).
#[test]
fn adapters_have_the_gradients_of_the_plain_form() {
    let mut linear = super::lora::Linear::new(Tensor::randn([6, 5], (Kind::Float, Device::Cpu)), None);
    let (a, b) = linear.adapt(2, 0.5, [1, 2]);
    tch::no_grad(|| {
        b.shallow_clone().copy_(&Tensor::linspace(-1.0, 1.0, 12, (Kind::Float, Device::Cpu)).reshape([6, 2]))
    });
    let input = Tensor::randn([3, 5], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let coefficients = Tensor::randn([3, 6], (Kind::Float, Device::Cpu));
    let plain = input.linear::<Tensor>(&linear.weight, None) + input.matmul(&a.tr()).matmul(&b.tr()) * 0.5;
    let leaves = [&input, &a, &b];
    let gradients =
        |output: &Tensor| Tensor::run_backward(&[(output * &coefficients).sum(None)], &leaves, false, false);
    let own = linear.forward(&input);
    assert!(difference(&own, &plain) <= 1e-6);
    assert_eq!(own, input.linear::<Tensor>(&linear.effective(), None), "the merged weight's product, bit by bit");
    for (one, other) in gradients(&own).iter().zip(gradients(&plain)) {
        assert!(difference(one, &other) <= 1e-5);
    }
}

#[test]
fn adapters_in_bf16_compute_what_the_merged_weight_does() {
    let options = LoadOptions { kind: Kind::BFloat16, ..OPTIONS };
    let mut decoder = Decoder::random(&config(), 1, &options);
    decoder.add_lora(&LoraConfig::all(4), 3);
    disturb(&decoder);
    let with_gradients = logits(&decoder, &[&[1, 2, 3, 4]]);
    let folder = tempfile::tempdir().unwrap();
    decoder.save(folder.path(), None).unwrap();
    let merged = Decoder::load(folder.path(), &options).unwrap();
    assert_eq!(with_gradients.detach(), tch::no_grad(|| logits(&merged, &[&[1, 2, 3, 4]])));
}

#[test]
fn only_adapters_train_and_a_change_in_place_is_seen() {
    let mut decoder = Decoder::random(&config(), 1, &OPTIONS);
    decoder.add_lora(&LoraConfig { rank: 2, alpha: 4.0, targets: vec!["q_proj".into(), "down_proj".into()] }, 3);
    let trainable: Vec<_> = decoder.parameters().iter().filter(|one| one.trainable).collect();
    assert_eq!(trainable.len(), 2 * 2 * 2);
    assert!(trainable.iter().all(|one| one.tensor.requires_grad() && one.name.contains(".lora_")));
    assert_eq!(trainable[0].name, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
    let before = logits(&decoder, &[&[1, 2, 3]]);
    before.sum(None).backward();
    for parameter in decoder.parameters() {
        assert_eq!(parameter.tensor.grad().defined(), parameter.trainable, "{}", parameter.name);
    }
    disturb(&decoder);
    assert!(difference(&before, &logits(&decoder, &[&[1, 2, 3]])) > 1e-2);
}

#[test]
fn an_adapter_is_read_back_on_its_base_and_on_no_other() {
    for head in [Head::Language, Head::Value] {
        let options = LoadOptions { head, ..OPTIONS };
        let make = || Decoder::random(&config(), 1, &options);
        let mut trained = make();
        trained.add_lora(&LoraConfig::all(2), 3);
        disturb(&trained);
        for parameter in trained.parameters().iter().filter(|one| one.name.starts_with("score")) {
            let _same = tch::no_grad(|| parameter.tensor.shallow_clone().fill_(0.25));
        }
        let folder = tempfile::tempdir().unwrap();
        trained.save_adapter(folder.path(), "digest-of-base").unwrap();
        let mut other = make();
        other.load_adapter(folder.path(), "digest-of-base").unwrap();
        assert_eq!(logits(&other, &[&[1, 2, 3]]), logits(&trained, &[&[1, 2, 3]]), "{head:?}");
        let error = make().load_adapter(folder.path(), "another").unwrap_err();
        assert!(error.message.contains("belongs to the model digest-of-base, and this one is another"), "{error}");
    }
}

#[test]
fn a_folder_that_does_not_fit_is_refused_with_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let decoder = Decoder::random(&config(), 1, &OPTIONS);
    decoder.save(folder.path(), None).unwrap();
    let message = |changes: &[(&str, serde_json::Value)]| {
        let mut json = decoder.config().to_json(Head::Language, Kind::Float);
        changes.iter().for_each(|(name, value)| json[name] = value.clone());
        std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
        let error = Decoder::load(folder.path(), &OPTIONS).err().map(|error| error.message).unwrap_or_default();
        error.replace(&folder.path().display().to_string(), "FOLDER")
    };
    insta::assert_snapshot!(
        [
            message(&[("num_hidden_layers", json!(1))]),
            message(&[("num_hidden_layers", json!(3))]),
            message(&[("intermediate_size", json!(25))]),
            message(&[("tie_word_embeddings", json!(false))]),
            message(&[("model_type", json!("llama"))]),
            message(&[("model_type", json!("qwen3")), ("head_dim", json!(4))]),
        ]
        .join("\n")
    );
    assert_eq!(message(&[]), "");
    assert!(Decoder::load(Path::new("/no/such/folder"), &OPTIONS).is_err());
}
