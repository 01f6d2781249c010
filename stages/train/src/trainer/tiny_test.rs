//! Tiny decoders and a sampler without a cache, for the trainer's own tests.

use serde_json::json;
use tch::{Device, Kind, Tensor, no_grad};

use super::forward::ForwardSettings;
use super::trajectory::Trajectory;
use crate::model::{Config, Decoder, Head, LoadOptions, Packed};
use crate::random;

pub const FORWARD: ForwardSettings =
    ForwardSettings { micro_batch_tokens: 64, chunk: 7, checkpointing: true, temperature: 1.0 };

/// One thread: the tests themselves run side by side, and threads of torch that wait for each other do so by spinning.
pub fn one_thread() {
    tch::set_num_threads(1);
}

/// Two layers, 16 wide; all of it follows from the seed.
pub fn decoder(vocabulary: i64, head: Head, seed: i64) -> Decoder {
    let config = json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": vocabulary, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "initializer_range": 0.2,
    });
    one_thread();
    let config = Config::from_json(&config).unwrap();
    Decoder::random(&config, seed, &LoadOptions { device: Device::Cpu, kind: Kind::Float, head })
}

/// Samples up to `most` tokens after each prompt, ending with token 0; the reward is 0.
pub fn sample(decoder: &Decoder, prompts: &[Vec<i64>], most: usize, seed: u64) -> Vec<Trajectory> {
    let start = |(index, prompt): (usize, &Vec<i64>)| Trajectory {
        task: format!("{prompt:?}"),
        sample: index as u64,
        mask: vec![false; prompt.len()],
        log_probs: vec![0.0; prompt.len()],
        ids: prompt.clone(),
        reward: 0.0,
        truncated: true,
        turns: 1,
    };
    let mut trajectories: Vec<Trajectory> = prompts.iter().enumerate().map(start).collect();
    for position in 0..most {
        let open: Vec<usize> = (0..trajectories.len()).filter(|index| trajectories[*index].truncated).collect();
        if open.is_empty() {
            break;
        }
        let sequences: Vec<&[i64]> = open.iter().map(|index| trajectories[*index].ids.as_slice()).collect();
        let log_probs = no_grad(|| {
            let packed = Packed::new(&sequences, Device::Cpu);
            let last: Vec<i64> = packed.bounds[1..].iter().map(|bound| bound - 1).collect();
            let hidden = decoder.hidden(&packed).index_select(0, &Tensor::from_slice(&last));
            decoder.head(&hidden).log_softmax(-1, Kind::Float)
        });
        for (row, index) in open.into_iter().enumerate() {
            let trajectory = &mut trajectories[index];
            let row = super::forward::numbers(&log_probs.get(row as i64));
            let [high, low, ..] = random::philox(random::key(&[seed, index as u64]), [position as u32, 0, 0, 0]);
            let mut left = random::open_unit(high, low);
            let token = row.iter().position(|log_prob| {
                left -= log_prob.exp();
                left <= 0.0
            });
            let token = token.unwrap_or(row.len() - 1);
            trajectory.ids.push(token as i64);
            trajectory.mask.push(true);
            trajectory.log_probs.push(row[token]);
            trajectory.truncated = token != 0;
        }
    }
    trajectories
}

/// All of a decoder's parameters, one after another.
pub fn values(decoder: &Decoder) -> Vec<f32> {
    let all: Vec<Tensor> =
        decoder.parameters().iter().map(|parameter| parameter.tensor.detach().flatten(0, -1)).collect();
    Vec::try_from(Tensor::cat(&all, 0)).unwrap()
}

/// All of a decoder's gradients, one after another, which are cleared.
pub fn gradients(decoder: &Decoder) -> Vec<f64> {
    let mut all = Vec::new();
    for parameter in decoder.parameters() {
        let mut gradient = parameter.tensor.grad();
        assert!(gradient.defined(), "{} has no gradient", parameter.name);
        all.extend(super::forward::numbers(&gradient));
        let _ = gradient.zero_();
    }
    all
}

/// The largest difference between two vectors, relative to the largest entry.
pub fn difference(one: &[f64], other: &[f64]) -> f64 {
    assert_eq!(one.len(), other.len());
    let largest = one.iter().fold(1e-12f64, |most, value| most.max(value.abs()));
    one.iter().zip(other).fold(0.0f64, |most, (one, other)| most.max((one - other).abs())) / largest
}
