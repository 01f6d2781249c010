//! Adapters of a decoder: adding them, and PEFT's layout on disk.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::TrainError;
use crate::model::decoder::{Decoder, Head, Parameter};
use crate::model::lora::{LoraConfig, TARGETS};
use crate::model::weights::{self, Checkpoint};
use crate::random;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";

impl Decoder {
    /// Adds adapters to the projections that `lora` names, and freezes everything else but a value head. A is drawn by
    /// `seed`, B is zero: nothing changes until they are trained. Their parameters have PEFT's names.
    ///
    /// # Panics
    /// There are adapters already, or a target or the rank is none.
    pub fn add_lora(&mut self, lora: &LoraConfig, seed: i64) {
        assert!(self.lora.is_none(), "the model has adapters already");
        assert!(lora.rank > 0 && !lora.targets.is_empty(), "adapters of rank {} on {:?}", lora.rank, lora.targets);
        for target in &lora.targets {
            assert!(TARGETS.contains(&target.as_str()), "{target}: no such projection, only {}", TARGETS.join(", "));
        }
        for parameter in &mut self.parameters {
            parameter.trainable = parameter.name.starts_with("score.");
            // The handle shares its autograd state with the tensor that the forward pass uses.
            let _same = parameter.tensor.set_requires_grad(parameter.trainable);
        }
        let scale = lora.alpha / lora.rank as f64;
        let mut added = Vec::new();
        for (number, (name, linear)) in self.linears().enumerate() {
            if lora.targets.iter().any(|target| name.ends_with(target.as_str())) {
                let key = random::key(&[seed as u64, u64::MAX, number as u64]);
                let (a, b) = linear.adapt(lora.rank, scale, key);
                added.push((format!("{PREFIX}{name}.lora_A.weight"), a));
                added.push((format!("{PREFIX}{name}.lora_B.weight"), b));
            }
        }
        let parameter = |(name, tensor)| Parameter { name, tensor, trainable: true, decays: true };
        self.parameters.extend(added.into_iter().map(parameter));
        self.lora = Some(lora.clone());
    }

    /// Whether there are adapters.
    pub fn is_adapted(&self) -> bool {
        self.lora.is_some()
    }

    /// Writes the adapters, and a value head, in PEFT's layout. `base_digest` names the model they belong to.
    pub fn save_adapter(&self, folder: &Path, base_digest: &str) -> Result<(), TrainError> {
        let lora = self.lora.as_ref().ok_or_else(|| TrainError::new("the model has no adapters to save"))?;
        fs::create_dir_all(folder).map_err(TrainError::file(folder))?;
        let is_value = self.options.head == Head::Value;
        let config = json!({
            "peft_type": "LORA",
            "task_type": if is_value { "TOKEN_CLS" } else { "CAUSAL_LM" },
            "base_model_name_or_path": base_digest,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": lora.targets,
            "modules_to_save": if is_value { json!(["score"]) } else { Value::Null },
            "bias": "none",
            "lora_dropout": 0.0,
            "fan_in_fan_out": false,
            "inference_mode": true,
        });
        let path = folder.join(CONFIG);
        let text = serde_json::to_string_pretty(&config).expect("JSON has no error");
        fs::write(&path, text + "\n").map_err(TrainError::file(&path))?;
        weights::write_file(&folder.join(WEIGHTS), self.adapter_tensors())
    }

    /// What an adapter's file holds: trained tensors by PEFT's names.
    fn adapter_tensors(&self) -> Vec<(String, Tensor)> {
        let trained = self.parameters.iter().filter(|parameter| parameter.trainable);
        trained
            .map(|parameter| {
                let name = match parameter.name.strip_prefix(PREFIX) {
                    Some(_) => parameter.name.clone(),
                    None => format!("{PREFIX}{}", parameter.name),
                };
                (name, parameter.tensor.shallow_clone())
            })
            .collect()
    }

    /// Loads adapters that [`Decoder::save_adapter`] or PEFT wrote, adding them first where the model has none. An adapter
    /// of a model with another digest is an error.
    pub fn load_adapter(&mut self, folder: &Path, base_digest: &str) -> Result<(), TrainError> {
        let path = folder.join(CONFIG);
        let text = fs::read_to_string(&path).map_err(TrainError::file(&path))?;
        let config: Value = serde_json::from_str(&text).map_err(TrainError::file(&path))?;
        let wrong = |what: String| TrainError::new(format!("{}: {what}", path.display()));
        let base = config["base_model_name_or_path"].as_str().unwrap_or_default();
        if base != base_digest {
            return Err(wrong(format!("the adapter belongs to the model {base}, and this one is {base_digest}")));
        }
        let lora = lora_config(&config).map_err(wrong)?;
        match &self.lora {
            None => self.add_lora(&lora, 0),
            Some(own) if own.sorted() == lora => {}
            Some(own) => return Err(wrong(format!("the adapter is {lora:?}, the model has {own:?}"))),
        }
        let checkpoint = Checkpoint::open_files(&[folder.join(WEIGHTS)])?;
        let own = self.adapter_tensors();
        if let Some(name) = checkpoint.names().find(|name| own.iter().all(|(known, _)| known != name)) {
            let file = folder.join(WEIGHTS);
            return Err(TrainError::new(format!("{}: {name}: the model has no such tensor", file.display())));
        }
        for (name, mut tensor) in own {
            let loaded = checkpoint.tensor(&name, &tensor.size(), Kind::Float, self.options.device)?;
            tch::no_grad(|| tensor.copy_(&loaded));
        }
        Ok(())
    }
}

/// The part of PEFT's configuration that decides what is computed; what isn't supported is an error that names it.
fn lora_config(config: &Value) -> Result<LoraConfig, String> {
    let unset = |name: &str| match &config[name] {
        Value::Null | Value::Bool(false) => Ok(()),
        Value::Object(map) if map.is_empty() => Ok(()),
        value => Err(format!("{name}: {value} is not supported")),
    };
    for name in ["use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform", "fan_in_fan_out"] {
        unset(name)?;
    }
    if config["peft_type"] != "LORA" || ![json!("none"), Value::Null].contains(&config["bias"]) {
        return Err(format!("peft_type {}, bias {}: only LORA with bias none", config["peft_type"], config["bias"]));
    }
    let rank = config["r"].as_i64().filter(|rank| *rank > 0).ok_or("r: expected a positive whole number")?;
    let alpha = config["lora_alpha"].as_f64().ok_or("lora_alpha: expected a number")?;
    let targets = config["target_modules"].as_array().ok_or("target_modules: expected a list of names")?;
    let known = |target: &Value| target.as_str().filter(|name| TARGETS.contains(name)).map(str::to_owned);
    let mut targets = targets
        .iter()
        .map(|target| known(target).ok_or(format!("target_modules: {target} is not supported")))
        .collect::<Result<Vec<_>, _>>()?;
    // PEFT writes a set, in any order.
    targets.sort_unstable();
    Ok(LoraConfig { rank, alpha, targets })
}
