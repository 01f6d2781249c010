//! What must hold of samples: their tokens depend on the request alone, their log-probabilities are those of the model.

use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::*;
use crate::model::{Config, Decoder, Head, LoadOptions, Packed};
use crate::text::{Tokenizer, tiny};

const OPTIONS: LoadOptions = LoadOptions { device: Device::Cpu, kind: Kind::Float, head: Head::Language };

/// A model whose distributions are neither flat nor sharp.
pub(crate) fn decoder(seed: i64) -> Decoder {
    let config = Config::from_json(&json!({
        "model_type": "qwen3", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "initializer_range": 0.3, "tie_word_embeddings": true,
    }));
    Decoder::random(&config.unwrap(), seed, &OPTIONS)
}

fn sampler(slots: usize) -> Sampler {
    Sampler::new(decoder(1), None, Options { slots, capacity: 96, is_plain: false })
}

fn request(number: u64, settings: &Settings) -> Request {
    let prompt = (0..1 + number as i64 % 7).map(|place| (place * 5 + number as i64 % 3) % 61).collect();
    Request { prompt, key: SampleKey::of(&[9, number]), settings: settings.clone() }
}

/// Log-probabilities of a sample's tokens by one forward pass over all of them, at its temperature.
fn recomputed(decoder: &Decoder, request: &Request, sample: &Sample) -> Tensor {
    let all = [request.prompt.as_slice(), &sample.tokens].concat();
    let hidden = decoder.hidden(&Packed::new(&[&all], Device::Cpu));
    let first = request.prompt.len() as i64 - 1;
    let rows = hidden.narrow(0, first, sample.tokens.len() as i64);
    let logits = decoder.head(&rows) / request.settings.temperature;
    logits.log_softmax(-1, None).gather(-1, &Tensor::from_slice(&sample.tokens).unsqueeze(1), false).flatten(0, -1)
}

/// A request gets the same tokens alone, among others, in any order, and when it joins while others are under way.
#[test]
fn tokens_depend_on_the_request_alone() {
    let settings = |number: u64| Settings {
        max_tokens: 5 + (number as usize * 7) % 40,
        temperature: [1.0, 0.7, 0.0][number as usize % 3],
        top_p: if number % 4 == 1 { 0.8 } else { 1.0 },
        top_k: if number % 5 == 2 { 9 } else { 0 },
        ends: vec![3],
        ..Settings::default()
    };
    let requests: Vec<Request> = (0..24).map(|number| request(number, &settings(number))).collect();
    let alone = sampler(1);
    let expected: Vec<Sample> = requests.iter().map(|request| alone.submit(request.clone()).wait().unwrap()).collect();
    let lengths: std::collections::HashSet<usize> = expected.iter().map(|sample| sample.tokens.len()).collect();
    assert!(lengths.len() > 5, "sequences leave at different steps");
    assert!(
        expected.iter().any(|one| one.finish == Finish::End) && expected.iter().any(|one| one.finish == Finish::Length)
    );
    for slots in [2, 5, 24] {
        let sampler = sampler(slots);
        for reversed in [false, true] {
            let mut order: Vec<usize> = (0..requests.len()).collect();
            if reversed {
                order.reverse();
            }
            let handles: Vec<_> = order.iter().map(|&number| sampler.submit(requests[number].clone())).collect();
            for (number, handle) in order.into_iter().zip(handles) {
                let sample = handle.wait().unwrap();
                assert_eq!((&sample.tokens, sample.finish), (&expected[number].tokens, expected[number].finish));
                for (one, other) in sample.log_probabilities.iter().zip(&expected[number].log_probabilities) {
                    assert!((one - other).abs() < 1e-4);
                }
            }
        }
        assert!(sampler.statistics().unwrap().widest > 1);
    }
}

#[test]
fn log_probabilities_are_those_of_a_full_forward_pass() {
    let (decoder, sampler) = (decoder(1), sampler(8));
    let mut largest = 0.0f64;
    for (temperature, top_p) in [(1.0, 1.0), (0.6, 1.0), (1.7, 0.7)] {
        let settings = Settings { temperature, top_p, max_tokens: 60, ..Settings::default() };
        let requests: Vec<Request> = (0..16).map(|number| request(number, &settings)).collect();
        let handles: Vec<_> = requests.iter().map(|request| sampler.submit(request.clone())).collect();
        for (request, handle) in requests.iter().zip(handles) {
            let sample = handle.wait().unwrap();
            let again = tch::no_grad(|| recomputed(&decoder, request, &sample));
            let own = Tensor::from_slice(&sample.log_probabilities);
            largest = largest.max((own - again).abs().max().double_value(&[]));
        }
    }
    println!("largest difference of a log-probability: {largest:.2e}");
    assert!(largest <= 1e-4, "{largest:e}");
}

/// How many log-probabilities of samples differ in any bit from those of the trainer's forward pass, without gradients and with
/// them; and how many there are.
fn different_bits(kind: Kind, is_exact: bool, slots: usize) -> [usize; 3] {
    let mut trained = Decoder::random(decoder(1).config(), 1, &LoadOptions { kind, ..OPTIONS }).exact(is_exact);
    trained.add_lora(&crate::model::LoraConfig::all(2), 3);
    tch::no_grad(|| {
        for parameter in trained.parameters().iter().filter(|parameter| parameter.name.contains("lora_B")) {
            let _same = parameter.tensor.shallow_clone().uniform_(-0.1, 0.1);
        }
    });
    let sampler = Sampler::new(trained.merged(), None, Options { slots, capacity: 96, is_plain: false });
    let settings = Settings { max_tokens: 60, ..Settings::default() };
    let requests: Vec<Request> = (0..20).map(|number| request(number, &settings)).collect();
    let handles: Vec<_> = requests.iter().map(|request| sampler.submit(request.clone())).collect();
    let samples: Vec<Sample> = handles.into_iter().map(|handle| handle.wait().unwrap()).collect();
    let all: Vec<Vec<i64>> =
        requests.iter().zip(&samples).map(|(one, of)| [&*one.prompt, &of.tokens].concat()).collect();
    let packed = Packed::sharing(&all.iter().map(Vec::as_slice).collect::<Vec<_>>(), Device::Cpu);
    let forward = || {
        let hidden = trained.hidden(&packed);
        let of_sample = |(index, sample): (usize, &Sample)| {
            let first = requests[index].prompt.len() - 1;
            let rows: Vec<i64> = (0..sample.tokens.len()).map(|token| packed.row(index, first + token)).collect();
            let logits = trained.head(&hidden.index_select(0, &Tensor::from_slice(&rows)));
            let targets = Tensor::from_slice(&sample.tokens);
            let (chosen, _) = crate::trainer::forward::log_probs(&logits, &targets, 1.0, false);
            Vec::<f32>::try_from(chosen.detach()).unwrap()
        };
        samples.iter().enumerate().flat_map(of_sample).collect::<Vec<f32>>()
    };
    let sampled: Vec<f32> = samples.iter().flat_map(|sample| sample.log_probabilities.clone()).collect();
    let differ = |computed: Vec<f32>| {
        sampled.iter().zip(computed).filter(|(one, other)| one.to_bits() != other.to_bits()).count()
    };
    [differ(tch::no_grad(forward)), differ(forward()), sampled.len()]
}

#[test]
fn an_exact_model_gives_sampler_and_trainer_the_same_bits() {
    for kind in [Kind::Float, Kind::BFloat16] {
        for slots in [3, 20] {
            let [without, with, all] = different_bits(kind, true, slots);
            assert_eq!([without, with], [0, 0], "{kind:?} with {slots} slots, of {all}");
        }
        let [without, _, all] = different_bits(kind, false, 3);
        assert!(without > all / 10, "{kind:?}: they would be equal anyway ({without} of {all} differ)");
    }
}

#[test]
fn a_prompt_that_samples_share_is_computed_once_and_shared_later_too() {
    let sampler = sampler(4);
    // Long enough that the first is still under way when the last arrives.
    let settings = Settings { max_tokens: 60, ..Settings::default() };
    let samples = |range: std::ops::Range<u64>| {
        let requests = range.map(|sample| Request {
            prompt: vec![7, 8, 9, 10, 11],
            key: SampleKey::of(&[sample]),
            settings: settings.clone(),
        });
        let handles: Vec<_> = requests.map(|request| sampler.submit(request)).collect();
        handles.into_iter().map(|handle| handle.wait().unwrap().tokens).collect::<Vec<_>>()
    };
    let together = samples(0..4);
    // Requests may reach the thread one by one: a slot that still has the prompt is copied, so it is computed once.
    assert_eq!(sampler.statistics().unwrap().prefilled, 5);
    let alone: Vec<_> = (0..4).flat_map(|sample| samples(sample..sample + 1)).collect();
    assert_eq!(together, alone);
    assert_eq!(sampler.statistics().unwrap().prefilled, 25);
    assert!(together.iter().collect::<std::collections::HashSet<_>>().len() > 1, "samples differ");
}

/// 4,000 first tokens against the model's probabilities, by χ².
#[test]
fn tokens_are_drawn_from_the_models_distribution() {
    let (decoder, sampler) = (decoder(1), sampler(64));
    let prompt = vec![1, 2, 3];
    let draws = 4000;
    let handles: Vec<_> = (0..draws)
        .map(|sample| {
            let key = SampleKey::of(&[sample]);
            let settings = Settings { max_tokens: 1, ..Settings::default() };
            sampler.submit(Request { prompt: prompt.clone(), key, settings })
        })
        .collect();
    let mut counts = vec![0.0; 61];
    for handle in handles {
        counts[handle.wait().unwrap().tokens[0] as usize] += 1.0;
    }
    let hidden = tch::no_grad(|| decoder.hidden(&Packed::new(&[&prompt], Device::Cpu)));
    let probabilities = tch::no_grad(|| decoder.head(&hidden.narrow(0, 2, 1)).softmax(-1, Kind::Double));
    let probabilities = Vec::<f64>::try_from(probabilities.flatten(0, -1)).unwrap();
    let chi_square: f64 = counts
        .iter()
        .zip(&probabilities)
        .map(|(count, probability)| (count - probability * draws as f64).powi(2) / (probability * draws as f64))
        .sum();
    // 60 degrees of freedom: 99.99 % lie below 109.
    assert!(chi_square < 109.0, "{chi_square}");
}

#[test]
fn greedy_takes_the_most_likely_token() {
    let (decoder, sampler) = (decoder(1), sampler(3));
    let settings = Settings { temperature: 0.0, max_tokens: 30, ..Settings::default() };
    let request = request(4, &settings);
    let sample = sampler.submit(request.clone()).wait().unwrap();
    let mut all = request.prompt.clone();
    for token in &sample.tokens {
        let hidden = tch::no_grad(|| decoder.hidden(&Packed::new(&[&all], Device::Cpu)));
        let logits = decoder.head(&hidden.narrow(0, all.len() as i64 - 1, 1));
        assert_eq!(logits.argmax(-1, false).int64_value(&[0]), *token);
        all.push(*token);
    }
}

#[test]
fn weights_are_swapped_between_steps() {
    let sampler = sampler(2);
    let settings = Settings { temperature: 0.0, max_tokens: 20, ..Settings::default() };
    let before = sampler.submit(request(5, &settings)).wait().unwrap();
    assert_eq!(sampler.update(decoder(2).weights()).unwrap(), 1);
    let after = sampler.submit(request(5, &settings)).wait().unwrap();
    assert_eq!((before.versions, after.versions), ((0, 0), (1, 1)));
    assert_ne!(before.tokens, after.tokens);
    let fresh = Sampler::new(decoder(2), None, Options { slots: 1, capacity: 96, is_plain: false });
    assert_eq!(fresh.submit(request(5, &settings)).wait().unwrap().tokens, after.tokens);
    let wrong = sampler.update(vec![("x".into(), Tensor::zeros([1], (Kind::Float, Device::Cpu)))]).unwrap_err();
    assert!(wrong.message.starts_with("1 tensors for a model that has"), "{wrong}");
}

#[test]
fn requests_that_can_not_be_served_say_why() {
    let sampler = sampler(2);
    let message = |change: fn(&mut Request)| {
        let mut request = request(1, &Settings { max_tokens: 4, ..Settings::default() });
        change(&mut request);
        sampler.submit(request).wait().unwrap_err().message
    };
    insta::assert_snapshot!(
        [
            message(|request| request.prompt.clear()),
            message(|request| request.prompt[0] = 61),
            message(|request| request.settings.max_tokens = 0),
            message(|request| request.settings.max_tokens = 95),
            message(|request| request.settings.temperature = -1.0),
            message(|request| request.settings.stop = vec!["x".into()]),
        ]
        .join("\n")
    );
}

#[test]
fn many_callers_wait_and_some_give_up() {
    let sampler = sampler(4);
    let settings = Settings { max_tokens: 50, ..Settings::default() };
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..12)
            .map(|number| {
                let (sampler, settings) = (&sampler, &settings);
                scope.spawn(move || {
                    let handle = sampler.submit(request(number, settings));
                    (number % 3 > 0).then(|| handle.wait().unwrap().tokens.len())
                })
            })
            .collect();
        for caller in callers {
            assert!(caller.join().unwrap().is_none_or(|length| length == 50));
        }
    });
    let handle = sampler.submit(request(1, &settings));
    drop(sampler);
    match handle.wait() {
        Ok(sample) => assert_eq!(sample.tokens.len(), 50),
        Err(error) => assert_eq!(error.message, "the sampler has ended"),
    }
}

/// A model over bytes with its tokenizer, twice.
pub(crate) fn byte_model() -> (Decoder, Tokenizer, Tokenizer) {
    let config = Config::from_json(&json!({
        "model_type": "qwen2", "vocab_size": tiny::SIZE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "initializer_range": 0.2,
    }));
    let folder = tempfile::tempdir().unwrap();
    tiny::write(folder.path());
    let load = || Tokenizer::load(folder.path()).unwrap();
    (Decoder::random(&config.unwrap(), 4, &OPTIONS), load(), load())
}

/// Lines in, lines out; requests of a conversation that goes on by ids, and one that can't be met.
#[test]
fn a_program_is_answered_line_by_line() {
    let (decoder, own, tokenizer) = byte_model();
    let sampler = Sampler::new(decoder, Some(own), Options { slots: 3, capacity: 100, is_plain: false });
    let key = |turn: u32| json!({"seed": 1, "task": "t", "sample": 0, "turn": turn});
    let sampling = json!({"temperature": 1.0, "top_p": 1.0, "max_tokens": 20});
    let ask = |input: String| {
        let mut output = Vec::new();
        child::serve(&sampler, &tokenizer, "tiny", input.as_bytes(), &mut output).unwrap();
        let lines = String::from_utf8(output).unwrap();
        let mut lines: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.remove(0), json!({"ready": {"model": "tiny", "width": 3}}));
        lines.sort_by_key(|line| line.as_object().unwrap().values().next().unwrap()["id"].as_u64());
        lines
    };
    let request = |id: u64, messages: serde_json::Value, turn: u32| json!({"request": {"id": id, "messages": messages, "sampling": sampling, "key": key(turn)}});
    let user = |text: &str| json!({"role": "user", "content": text});
    let input = [
        request(1, json!([user("hi")]), 0),
        request(2, json!([user(&"x".repeat(200))]), 0),
        request(3, json!([user("hi")]), 0),
    ];
    let lines = ask(input.map(|line| line.to_string() + "\n").concat());
    assert_eq!(lines.len(), 3);
    let answer = &lines[0]["answer"];
    let (tokens, prompt) = (answer["token_ids"].as_array().unwrap(), answer["prompt_ids"].as_array().unwrap());
    assert_eq!(tokens.len(), answer["log_probs"].as_array().unwrap().len());
    assert_eq!(answer["token_ids"], lines[2]["answer"]["token_ids"], "equal keys");
    let message = lines[1]["error"]["message"].as_str().unwrap();
    assert_eq!(message, "the prompt has 219 tokens, and a conversation at most 100");

    let ids = [prompt.as_slice(), tokens].concat();
    let messages = json!([user("hi"), {"role": "assistant", "content": answer["text"]}, user("more")]);
    let mut next = request(4, messages, 1);
    next["request"]["prefix"] = json!({"ids": ids, "messages": 2});
    let lines = ask(next.to_string() + "\n");
    let appended = lines[0]["answer"]["prompt_ids"].as_array().unwrap();
    assert_eq!(appended[..ids.len()], ids);
    assert_ne!(lines[0]["answer"]["token_ids"], answer["token_ids"]);

    let broken = child::serve(&sampler, &tokenizer, "tiny", "{}\n".as_bytes(), Vec::new()).unwrap_err();
    assert!(broken.message.starts_with("standard input: not a request"), "{broken}");
}
