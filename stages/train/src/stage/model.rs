//! Which model a stage trains, on what device, and what is written of it.

use std::path::Path;

use cuda_agent_protocol::{InputRequest, ProgramError, Request};
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
pub fn device(request: &Request) -> Result<Device, ProgramError> {
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

/// Writes the trained adapters of a policy into the output `adapter`, by themselves and in PEFT's layout; they name the input
/// `model` by its digest, to which they belong. Where all weights were trained there is a note in their place, since an output is
/// there whatever the parameters.
pub fn write_adapter(decoder: &Decoder, request: &Request) -> Result<(), TrainError> {
    let folder = super::output_path(request, "adapter");
    let base = match request.inputs.get("model") {
        Some(InputRequest::One(file)) => file.digest.as_str(),
        _ => return Err(TrainError::new("the stage was given no `model`")),
    };
    if decoder.is_adapted() {
        return decoder.save_adapter(folder, base);
    }
    std::fs::create_dir_all(folder).map_err(TrainError::file(folder))?;
    let path = folder.join("README.md");
    let note = "All weights were trained: there is no adapter. With lora_rank above 0 there is one.\n";
    std::fs::write(&path, note).map_err(TrainError::file(&path))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::Parameter;
    use crate::trainer::tiny_test;

    fn request(folder: &Path) -> Request {
        let request = json!({
            "protocol": 1, "stage": "tuned", "kind": "train/rft", "params": {}, "seed": 0, "by_row": null, "device": null,
            "inputs": {"model": {"type": "model", "path": "nowhere", "digest": "abc"}},
            "outputs": {"adapter": {"type": "tree", "path": folder.join("adapter")}},
            "resources": {"cpu": 1, "memory_bytes": 0, "gpus": []}, "deadline_unix_s": null, "state_dir": folder,
        });
        serde_json::from_value(request).unwrap()
    }

    fn trainable(decoder: &Decoder) -> Vec<&Parameter> {
        let trainable: Vec<&Parameter> = decoder.parameters().iter().filter(|parameter| parameter.trainable).collect();
        assert!(!trainable.is_empty());
        trainable
    }

    /// Base and adapter are the trained model: written, and read over a model with the same base weights.
    #[test]
    fn an_adapter_and_its_base_are_the_trained_model() {
        let folder = tempfile::tempdir().unwrap();
        let mut trained = tiny_test::decoder(11, Head::Language, 3);
        trained.add_lora(&LoraConfig::all(2), 5);
        tch::no_grad(|| {
            for parameter in trainable(&trained) {
                let _changed = parameter.tensor.shallow_clone().fill_(0.25);
            }
        });
        write_adapter(&trained, &request(folder.path())).unwrap();
        let mut loaded = tiny_test::decoder(11, Head::Language, 3);
        let adapter = folder.path().join("adapter");
        assert!(loaded.load_adapter(&adapter, "abd").unwrap_err().message.contains("belongs to the model abc"));
        loaded.load_adapter(&adapter, "abc").unwrap();
        for (one, other) in trainable(&trained).into_iter().zip(trainable(&loaded)) {
            assert_eq!(one.name, other.name);
            assert!(one.tensor.equal(&other.tensor), "{}", one.name);
        }
        assert_eq!(trainable(&loaded).len(), trainable(&trained).len());
    }

    #[test]
    fn without_adapters_there_is_a_note() {
        let folder = tempfile::tempdir().unwrap();
        write_adapter(&tiny_test::decoder(11, Head::Language, 3), &request(folder.path())).unwrap();
        let note = std::fs::read_to_string(folder.path().join("adapter/README.md")).unwrap();
        assert!(note.starts_with("All weights were trained"));
    }
}
