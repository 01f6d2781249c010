//! How fast the sampler and the trainer are on this machine: `cuda-agent-train bench`. bench/training.py runs both beside
//! their peers.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, Subcommand};
use cuda_agent_kernels::profile::trials::median;
use serde_json::{Value, json};
use tch::{Cuda, Device, Kind};

use crate::TrainError;
use crate::model::{Decoder, Head, LoadOptions, LoraConfig};
use crate::optimizer::{AdamW, Optimizer};
use crate::random;
use crate::sampler::{Options, Request, Sample, SampleKey, Sampler, Settings};
use crate::trainer::forward::{ForwardSettings, Rows, backward, evaluate, micro_batches};
use crate::trainer::trajectory::Trajectory;

/// What is measured.
#[derive(Debug, Subcommand)]
pub enum Section {
    /// Tokens a second of the sampler, and how far its log-probabilities are from a full forward pass.
    Sampler(SamplerArguments),
    /// Tokens a second of training on sequences of one length, and the share of the GPU's peak.
    Trainer(TrainerArguments),
}

/// Of the sampler. Prompts are random tokens; all samples have the same length.
#[derive(Args, Debug)]
pub struct SamplerArguments {
    /// A Hugging Face folder.
    model: PathBuf,
    /// Different prompts.
    #[arg(long, default_value_t = 256)]
    prompts: usize,
    /// Samples of each.
    #[arg(long, default_value_t = 1)]
    samples: usize,
    /// Sequences at a time.
    #[arg(long, default_value_t = 256)]
    slots: usize,
    /// Tokens of a prompt.
    #[arg(long, default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens of a sample.
    #[arg(long, default_value_t = 256)]
    new_tokens: usize,
    /// Timed rounds, after one that is not.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Samples whose log-probabilities are computed again.
    #[arg(long, default_value_t = 16)]
    check: usize,
    /// Torch's operators in place of fused steps.
    #[arg(long)]
    plain: bool,
    /// Whether weights and activations are float32.
    #[arg(long)]
    float32: bool,
}

/// Of the trainer.
#[derive(Args, Debug)]
pub struct TrainerArguments {
    /// A Hugging Face folder.
    model: PathBuf,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 4096)]
    context: usize,
    /// How many of them are a prompt, which is not learned.
    #[arg(long, default_value_t = 0)]
    prompt_tokens: usize,
    /// Sequences that follow one prompt.
    #[arg(long, default_value_t = 1)]
    samples: usize,
    /// Sequences of a step.
    #[arg(long, default_value_t = 8)]
    sequences: usize,
    /// Timed steps, after two that are not.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Tokens of a micro-batch.
    #[arg(long, default_value_t = 16384)]
    micro_batch_tokens: usize,
    /// Rows of logits at a time.
    #[arg(long, default_value_t = 4096)]
    logit_rows: usize,
    /// Compute layers twice to save memory.
    #[arg(long)]
    checkpointing: bool,
    /// Rank of adapters; 0 trains all weights.
    #[arg(long, default_value_t = 0)]
    lora_rank: i64,
    /// What the GPU can do in bfloat16 with float32 sums, in TFLOP/s: 989 for an H100 or H200 of the SXM kind.
    #[arg(long, default_value_t = 989.0)]
    peak_tflops: f64,
}

/// Measures, and prints one line of JSON.
pub fn main(section: &Section) -> Result<(), TrainError> {
    let found = match section {
        Section::Sampler(arguments) => sampler(arguments)?,
        Section::Trainer(arguments) => trainer(arguments)?,
    };
    println!("{found}");
    Ok(())
}

fn load(folder: &Path, is_float32: bool) -> Result<Decoder, TrainError> {
    let kind = if is_float32 || !Cuda::is_available() { Kind::Float } else { Kind::BFloat16 };
    Decoder::load(folder, &LoadOptions { device: Device::cuda_if_available(), kind, head: Head::Language })
}

/// Token ids that follow from `number`, below `vocabulary`.
fn ids(number: u64, count: usize, vocabulary: i64) -> Vec<i64> {
    let key = random::key(&[7, number]);
    let id = |place: usize| i64::from(random::philox(key, [place as u32, 0, 0, 0])[0]) % vocabulary;
    (0..count).map(id).collect()
}

fn sampler(arguments: &SamplerArguments) -> Result<Value, TrainError> {
    let decoder = load(&arguments.model, arguments.float32)?;
    let vocabulary = decoder.config().vocabulary;
    let capacity = (arguments.prompt_tokens + arguments.new_tokens) as i64;
    let options = Options { slots: arguments.slots, capacity, is_plain: arguments.plain };
    let sampler = Sampler::new(decoder, None, options);
    let requests = |round: u64, max_tokens: usize| -> Vec<Request> {
        let samples = (0..arguments.prompts as u64)
            .flat_map(|prompt| (0..arguments.samples as u64).map(move |sample| (prompt, sample)));
        let request = |(prompt, sample): (u64, u64)| Request {
            prompt: ids(round << 32 | prompt, arguments.prompt_tokens, vocabulary),
            key: SampleKey::of(&[round, prompt, sample]),
            settings: Settings { max_tokens, ..Settings::default() },
        };
        samples.map(request).collect()
    };
    let run = |requests: &[Request]| -> Result<(Vec<Sample>, f64), TrainError> {
        let start = Instant::now();
        let handles: Vec<_> = requests.iter().map(|request| sampler.submit(request.clone())).collect();
        let samples = handles.into_iter().map(|handle| handle.wait()).collect::<Result<Vec<_>, _>>()?;
        Ok((samples, start.elapsed().as_secs_f64()))
    };
    let (mut seconds, mut prefills) = (Vec::new(), Vec::new());
    let mut last = (Vec::new(), Vec::new());
    for round in 0..=arguments.rounds as u64 {
        let (_, prefill) = run(&requests(1000 + round, 1))?;
        let requests = requests(round, arguments.new_tokens);
        let (samples, took) = run(&requests)?;
        if round > 0 {
            seconds.push(took);
            prefills.push(prefill);
        }
        last = (requests, samples);
    }
    let statistics = sampler.statistics()?;
    drop(sampler);
    let (took, prefill) = (middle(&seconds), middle(&prefills));
    let tokens = (arguments.prompts * arguments.samples * arguments.new_tokens) as f64;
    let steps = tokens / arguments.slots.min(arguments.prompts * arguments.samples) as f64;
    Ok(json!({
        "tokens_per_s": tokens / took,
        "seconds": took,
        "prefill_s": prefill,
        "step_ms": (took - prefill) / steps * 1e3,
        "decoded_per_s": tokens / (took - prefill),
        "fused_steps": statistics.fused,
        "steps": statistics.steps,
        "difference": difference(arguments, &last.0, &last.1)?,
    }))
}

/// Sampled log-probabilities beside those of the trainer's forward pass.
fn difference(arguments: &SamplerArguments, requests: &[Request], samples: &[Sample]) -> Result<Value, TrainError> {
    let decoder = load(&arguments.model, arguments.float32)?;
    let trajectory = |(request, sample): (&Request, &Sample)| {
        let prompt = request.prompt.len();
        Trajectory {
            ids: [request.prompt.as_slice(), &sample.tokens].concat(),
            mask: (0..prompt + sample.tokens.len()).map(|place| place >= prompt).collect(),
            ..Trajectory::default()
        }
    };
    let trajectories: Vec<Trajectory> = requests.iter().zip(samples).take(arguments.check).map(trajectory).collect();
    let settings = ForwardSettings { micro_batch_tokens: 8192, chunk: 2048, checkpointing: false, temperature: 1.0 };
    let said = evaluate(&decoder, &trajectories.iter().collect::<Vec<_>>(), &settings);
    let sampled = samples.iter().take(arguments.check).map(|sample| &sample.log_probabilities);
    let pairs: Vec<(f64, f64)> = said
        .values
        .iter()
        .zip(sampled)
        .flat_map(|(said, sampled)| said.iter().copied().zip(sampled.iter().map(|value| f64::from(*value))))
        .collect();
    let summary = |of: fn((f64, f64)) -> f64| {
        let values: Vec<f64> = pairs.iter().map(|pair| of(*pair)).collect();
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        json!({ "mean": mean, "max": values.iter().copied().fold(0.0, f64::max) })
    };
    Ok(json!({
        "tokens": pairs.len(),
        "equal": pairs.iter().filter(|(one, other)| one == other).count(),
        "log_probability": summary(|(one, other)| (one - other).abs()),
        "probability": summary(|(one, other)| (one.exp() - other.exp()).abs()),
    }))
}

fn trainer(arguments: &TrainerArguments) -> Result<Value, TrainError> {
    let mut decoder = load(&arguments.model, false)?;
    if arguments.lora_rank > 0 {
        decoder.add_lora(&LoraConfig::all(arguments.lora_rank), 1);
    }
    let config = decoder.config().clone();
    let matrices: i64 = decoder
        .parameters()
        .iter()
        .filter(|parameter| parameter.decays && !parameter.name.contains(".lora_"))
        .filter(|parameter| config.tied || !parameter.name.contains("embed_tokens"))
        .map(|parameter| parameter.tensor.numel() as i64)
        .sum();
    let mut optimizer = Optimizer::new(decoder.parameters(), AdamW::default());
    let settings = ForwardSettings {
        micro_batch_tokens: arguments.micro_batch_tokens,
        chunk: arguments.logit_rows,
        checkpointing: arguments.checkpointing,
        temperature: 1.0,
    };
    let synchronize = || {
        if Cuda::is_available() {
            Cuda::synchronize(0)
        }
    };
    let answer_tokens = arguments.context.checked_sub(arguments.prompt_tokens).filter(|tokens| *tokens > 0);
    let answer_tokens = answer_tokens.ok_or_else(|| TrainError::new("--prompt-tokens leaves nothing of --context"))?;
    let (first, samples) = (arguments.prompt_tokens.max(1), arguments.samples.max(1) as u64);
    let mut seconds = Vec::new();
    let mut loss = 0.0;
    for step in 0..2 + arguments.steps as u64 {
        let trajectories: Vec<Trajectory> = (0..arguments.sequences as u64)
            .map(|sequence| {
                let prompt = ids((step << 32) | (sequence / samples), arguments.prompt_tokens, config.vocabulary);
                let answer = ids(1 << 63 | step << 32 | sequence, answer_tokens, config.vocabulary);
                Trajectory {
                    ids: [prompt, answer].concat(),
                    mask: (0..arguments.context).map(|place| place >= first).collect(),
                    ..Trajectory::default()
                }
            })
            .collect();
        let all: Vec<&Trajectory> = trajectories.iter().collect();
        synchronize();
        let start = Instant::now();
        let count = (arguments.sequences * (arguments.context - first)) as f64;
        let mut sum = tch::Tensor::zeros([], (Kind::Float, Device::cuda_if_available()));
        for range in micro_batches(&all, arguments.micro_batch_tokens) {
            let rows = Rows::new(&all[range], Device::cuda_if_available());
            backward(&decoder, &rows, &settings, |logits, targets, _| {
                let loss =
                    logits.cross_entropy_loss::<tch::Tensor>(targets, None, tch::Reduction::Sum, -100, 0.0) / count;
                sum += loss.detach();
                loss
            });
            optimizer.accumulate();
        }
        optimizer.step(1e-6);
        synchronize();
        if step >= 2 {
            seconds.push(start.elapsed().as_secs_f64());
        }
        loss = f64::try_from(&sum).unwrap_or(f64::NAN);
    }
    let took = middle(&seconds);
    let tokens = (arguments.sequences * arguments.context) as f64;
    // Of each token and weight a multiplication and an addition forwards, twice that backwards; of each pair of tokens, half of
    // which see each other, the same for scores and for values.
    let attention = 6.0 * config.layers as f64 * config.query_width() as f64 * arguments.context as f64;
    let flops = 6.0 * matrices as f64 + attention;
    Ok(json!({
        "tokens_per_s": tokens / took,
        "seconds": took,
        "flops_per_token": flops,
        "mfu": flops * tokens / took / (arguments.peak_tflops * 1e12),
        "loss": loss,
        "trained": optimizer.size(),
    }))
}

/// NaN of nothing, which JSON has as null.
fn middle(values: &[f64]) -> f64 {
    median(values).unwrap_or(f64::NAN)
}
