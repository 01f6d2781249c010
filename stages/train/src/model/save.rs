//! Writing a model as a folder that transformers and vLLM load.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::TrainError;
use crate::model::decoder::Decoder;
use crate::model::weights;

impl Decoder {
    /// Writes a Hugging Face folder: weights in the compute type with adapters merged, and `config.json`. Everything else
    /// that `origin`, the folder the model came from, holds beside its weights (tokenizer, chat template, generation's
    /// settings) is copied unchanged; so is `config.json` where it says the same.
    pub fn save(&self, folder: &Path, origin: Option<&Path>) -> Result<(), TrainError> {
        fs::create_dir_all(folder).map_err(TrainError::file(folder))?;
        if let Some(origin) = origin {
            copy_beside_weights(origin, folder)?;
        }
        self.write_config(folder, origin)?;
        weights::write_model(folder, self.weights())
    }

    fn write_config(&self, folder: &Path, origin: Option<&Path>) -> Result<(), TrainError> {
        let json = self.config.to_json(self.options.head, self.options.kind);
        let path = folder.join("config.json");
        if let Some(origin) = origin.map(|origin| origin.join("config.json")) {
            let text = fs::read(&origin).map_err(TrainError::file(&origin))?;
            if serde_json::from_slice::<Value>(&text).is_ok_and(|found| found == json) {
                return fs::write(&path, text).map_err(TrainError::file(&path));
            }
        }
        let text = serde_json::to_string_pretty(&json).expect("JSON has no error");
        fs::write(&path, text + "\n").map_err(TrainError::file(&path))
    }
}

/// Copies a model's files but for its weights, its configuration and adapters. Folders stay behind.
fn copy_beside_weights(origin: &Path, folder: &Path) -> Result<(), TrainError> {
    for entry in fs::read_dir(origin).map_err(TrainError::file(origin))? {
        let path = entry.map_err(TrainError::file(origin))?.path();
        let Some(name) = path.file_name().and_then(OsStr::to_str) else { continue };
        let weights =
            [".safetensors", ".safetensors.index.json", ".bin", ".gguf"].iter().any(|end| name.ends_with(end));
        let rewritten = ["config.json", "adapter_config.json"].contains(&name);
        if path.is_file() && !weights && !rewritten {
            fs::copy(&path, folder.join(name)).map_err(TrainError::file(&path))?;
        }
    }
    Ok(())
}
