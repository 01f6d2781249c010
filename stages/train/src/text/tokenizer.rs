//! A model's tokenizer, with its chat template and the ids that end a text.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use crate::TrainError;
use crate::text::chat::ChatTemplate;

/// The tokenizer of a model's folder.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    chat: Option<ChatTemplate>,
    ends: Vec<i64>,
}

impl Tokenizer {
    /// Loads `tokenizer.json`, the chat template (`chat_template.jinja`, or in `tokenizer_config.json`) and the ids that end
    /// a text (`generation_config.json`, else `config.json`).
    pub fn load(folder: &Path) -> Result<Self, TrainError> {
        let path = folder.join("tokenizer.json");
        let bytes = fs::read(&path).map_err(TrainError::file(&path))?;
        let inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(TrainError::file(&path))?;
        let settings = read_object(&folder.join("tokenizer_config.json"))?;
        let chat = match template_source(folder, &settings)? {
            Some(source) => Some(ChatTemplate::new(&source, special_tokens(&settings))?),
            None => None,
        };
        let mut ends = end_ids(&read_object(&folder.join("generation_config.json"))?);
        if ends.is_empty() {
            ends = end_ids(&read_object(&folder.join("config.json"))?);
        }
        Ok(Self { inner, chat, ends })
    }

    /// Ids that end a text.
    pub fn ends(&self) -> &[i64] {
        &self.ends
    }

    /// Ids of a text, with what the tokenizer puts before and after it (Llama's begin of text).
    pub fn encode(&self, text: &str) -> Vec<i64> {
        self.encode_with(text, true)
    }

    /// Ids of a text that has its special tokens written out, as chat templates do.
    pub fn encode_rendered(&self, text: &str) -> Vec<i64> {
        self.encode_with(text, false)
    }

    fn encode_with(&self, text: &str, add_special: bool) -> Vec<i64> {
        let encoding =
            self.inner.encode_fast(text, add_special).expect("a tokenizer without truncation takes any text");
        encoding.get_ids().iter().map(|&id| i64::from(id)).collect()
    }

    /// The text of ids, special tokens included; bytes that are no UTF-8 are U+FFFD. Ids beyond the vocabulary are left out.
    pub fn decode(&self, ids: &[i64]) -> String {
        self.decode_with(ids, false)
    }

    /// The text of ids without special tokens.
    pub fn decode_plain(&self, ids: &[i64]) -> String {
        self.decode_with(ids, true)
    }

    fn decode_with(&self, ids: &[i64], skip_special: bool) -> String {
        let ids: Vec<u32> = ids.iter().filter_map(|&id| u32::try_from(id).ok()).collect();
        self.inner.decode(&ids, skip_special).expect("a decoder takes any ids")
    }

    /// The id of one token's text.
    pub fn id_of(&self, token: &str) -> Option<i64> {
        self.inner.token_to_id(token).map(i64::from)
    }

    /// The text of a conversation by the model's chat template; see [`ChatTemplate::render`].
    pub fn render(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        settings: &Map<String, Value>,
    ) -> Result<String, TrainError> {
        let chat = self.chat.as_ref().ok_or_else(|| TrainError::new("the model has no chat template"))?;
        chat.render(messages, add_generation_prompt, settings)
    }
}

/// A JSON object, or an empty one where there is no such file.
fn read_object(path: &Path) -> Result<Map<String, Value>, TrainError> {
    if !path.exists() {
        return Ok(Map::new());
    }
    let bytes = fs::read(path).map_err(TrainError::file(path))?;
    serde_json::from_slice(&bytes).map_err(TrainError::file(path))
}

/// The file wins over the field, as in transformers; of several templates the one named `default`.
fn template_source(folder: &Path, settings: &Map<String, Value>) -> Result<Option<String>, TrainError> {
    let path = folder.join("chat_template.jinja");
    if path.exists() {
        return fs::read_to_string(&path).map(Some).map_err(TrainError::file(&path));
    }
    Ok(match settings.get("chat_template") {
        Some(Value::String(source)) => Some(source.clone()),
        Some(Value::Array(named)) => {
            let default = named.iter().find(|template| template["name"] == "default");
            default.and_then(|template| template["template"].as_str()).map(str::to_owned)
        }
        _ => None,
    })
}

/// `bos_token` and its like: a text, or an object with `content`.
fn special_tokens(settings: &Map<String, Value>) -> Map<String, Value> {
    let names = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    let text = |name: &str| {
        let value = settings.get(name)?;
        let text = value.as_str().or_else(|| value["content"].as_str())?;
        Some((name.to_owned(), Value::from(text)))
    };
    names.into_iter().filter_map(text).collect()
}

/// `eos_token_id`: one id or several.
fn end_ids(settings: &Map<String, Value>) -> Vec<i64> {
    match settings.get("eos_token_id") {
        Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_i64).collect(),
        Some(id) => id.as_i64().into_iter().collect(),
        None => Vec::new(),
    }
}
