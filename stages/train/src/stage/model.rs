//! Which model a stage trains, on what device, and what is written of it.

use std::path::Path;

use cuda_agent_protocol::{ProgramError, Request};
use serde::Deserialize;
use tch::{Device, Kind};

use crate::TrainError;
use crate::model::{Decoder, Head, LoadOptions, LoraConfig};
use crate::trainer::forward::ForwardSettings;

/// The parameters that every training kind has.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct ModelParams {
    /// The type of weights and activations.
    precision: Precision,
    /// Rank of the adapters; 0 trains all weights.
    lora_rank: i64,
    /// Most tokens of a micro-batch.
    micro_batch_tokens: usize,
    /// Rows of logits at a time.
    logit_rows: usize,
    /// Whether layers are computed twice.
    checkpointing: bool,
    /// Of all random choices.
    seed: i64,
}

/// A floating-point type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Precision {
    Fp32,
    /// With master weights and sums of gradients in float32.
    Bf16,
}

impl ModelParams {
    /// Loads a language model that is not trained: to sample from, or as a reference.
    pub fn load_frozen(&self, request: &Request, folder: &Path) -> Result<Decoder, ProgramError> {
        let options = LoadOptions { device: device(request)?, kind: self.kind(), head: Head::Language };
        Decoder::load(folder, &options).map_err(super::input)
    }

    fn kind(&self) -> Kind {
        match self.precision {
            Precision::Fp32 => Kind::Float,
            Precision::Bf16 => Kind::BFloat16,
        }
    }

    /// Loads a model for training.
    pub fn load(&self, request: &Request, folder: &Path, head: Head) -> Result<Decoder, ProgramError> {
        let options = LoadOptions { device: device(request)?, kind: self.kind(), head };
        let mut decoder = Decoder::load(folder, &options).map_err(super::input)?;
        if self.lora_rank > 0 {
            decoder.add_lora(&LoraConfig::all(self.lora_rank), self.seed);
        }
        Ok(decoder)
    }

    /// How decoders are run.
    pub fn forward(&self, temperature: f64) -> ForwardSettings {
        let Self { micro_batch_tokens, logit_rows: chunk, checkpointing, .. } = *self;
        ForwardSettings { micro_batch_tokens, chunk, checkpointing, temperature }
    }
}

/// The granted GPU, or the CPU.
fn device(request: &Request) -> Result<Device, ProgramError> {
    if request.resources.gpus.is_empty() {
        // More threads than cores wait for each other by spinning.
        tch::set_num_threads(request.resources.cpu.max(1) as i32);
        return Ok(Device::Cpu);
    }
    if !tch::Cuda::is_available() {
        let error = ProgramError::environment("the stage was given a GPU, and torch finds none");
        let hint = "`cuda-agent doctor` shows what torch and the driver report";
        return Err(ProgramError { kind: "device".into(), ..error.with_hint(hint) });
    }
    Ok(Device::Cuda(0))
}

/// Writes a model into an output folder, with the tokenizer and the other files of the folder that it came from.
pub fn write(decoder: &Decoder, folder: &Path, origin: &Path) -> Result<(), TrainError> {
    std::fs::create_dir_all(folder).map_err(TrainError::file(folder))?;
    decoder.save(folder, Some(origin))
}
