//! Requests of OpenAI's API, as far as they are served: what would change the answer and isn't served is an error.

use serde_json::{Map, Value, json};

use crate::sampler::{SampleKey, Sampler, Settings};
use crate::text::Tokenizer;

/// Why a request isn't served: an HTTP status and a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub status: u16,
    pub message: String,
}

impl Refusal {
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

impl From<crate::TrainError> for Refusal {
    /// The model's errors are the request's.
    fn from(error: crate::TrainError) -> Self {
        Self::new(400, error.message)
    }
}

/// Which of the two interfaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interface {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

/// A request that can be served.
#[derive(Debug)]
pub(super) struct Call {
    pub interface: Interface,
    /// Ids of each prompt; of a chat there is one.
    pub prompts: Vec<Vec<i64>>,
    /// Samples of each prompt.
    pub count: usize,
    /// For each prompt its settings: they differ in how many tokens there is room for.
    pub settings: Vec<Settings>,
    seed: Option<u64>,
    /// Whether to give log-probabilities.
    pub log_probabilities: bool,
    /// Whether to give ids.
    pub ids: bool,
    /// Whether to answer in pieces.
    pub stream: bool,
    /// Whether the last piece says how many tokens there were.
    pub stream_usage: bool,
}

/// Prompts and samples of one request, at most: no client means more.
const MOST: usize = 4096;

/// Fields of a request, with errors that name them. `null` is as good as nothing.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Refusal> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| Refusal::new(400, format!("{name}: expected {expected}")))
    }

    fn number(&self, name: &str, default: f64) -> Result<f64, Refusal> {
        Ok(self.read(name, "a number", Value::as_f64)?.unwrap_or(default))
    }

    fn whole(&self, name: &str) -> Result<Option<usize>, Refusal> {
        self.read(name, "a whole number that is not negative", |value| value.as_u64()?.try_into().ok())
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, Refusal> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// Fails where a field says something else than what is done anyway.
    fn neutral(&self, name: &str, neutral: &[Value]) -> Result<(), Refusal> {
        match self.get(name) {
            Some(value) if !neutral.contains(value) => {
                Err(Refusal::new(400, format!("{name}: {value} is not supported")))
            }
            _ => Ok(()),
        }
    }
}

impl Call {
    /// Reads a request's body.
    pub fn read(
        interface: Interface,
        body: &[u8],
        model: &str,
        sampler: &Sampler,
        tokenizer: &Tokenizer,
    ) -> Result<Self, Refusal> {
        let body: Value =
            serde_json::from_slice(body).map_err(|error| Refusal::new(400, format!("not JSON: {error}")))?;
        let fields = Fields(body.as_object().ok_or_else(|| Refusal::new(400, "expected an object"))?);
        if let Some(asked) = fields.read("model", "a text", Value::as_str)?.filter(|asked| *asked != model) {
            return Err(Refusal::new(404, format!("the model `{asked}` is not served, only `{model}`")));
        }
        refuse_unserved(&fields)?;
        let prompts = match interface {
            Interface::Completions => prompts(&fields, tokenizer)?,
            Interface::Chat => vec![chat_prompt(&fields, tokenizer)?],
        };
        let count = fields.whole("n")?.unwrap_or(1).max(1);
        if prompts.len().saturating_mul(count) > MOST {
            return Err(Refusal::new(400, format!("n: at most {MOST} samples a request")));
        }
        let stream = fields.flag("stream", false)?;
        let log_probabilities = log_probabilities(interface, &fields)?;
        if stream && log_probabilities {
            return Err(Refusal::new(400, "logprobs: not together with stream"));
        }
        let settings = prompts.iter().map(|prompt| settings(interface, &fields, sampler, tokenizer, prompt.len()));
        let usage = fields.get("stream_options").and_then(|options| options["include_usage"].as_bool());
        Ok(Self {
            interface,
            settings: settings.collect::<Result<_, _>>()?,
            prompts,
            count,
            seed: fields.read("seed", "a whole number", Value::as_i64)?.map(|seed| seed as u64),
            log_probabilities,
            ids: fields.flag("return_token_ids", false)?,
            stream,
            stream_usage: usage.unwrap_or(false),
        })
    }

    /// The key of the `index`-th choice. Without a seed no two requests have the same: `unique` differs.
    pub fn key(&self, index: usize, unique: u64) -> SampleKey {
        match self.seed {
            Some(seed) => SampleKey::of(&[1, seed, index as u64]),
            None => SampleKey::of(&[2, unique, index as u64]),
        }
    }
}

fn refuse_unserved(fields: &Fields) -> Result<(), Refusal> {
    let zero = [json!(0), json!(0.0)];
    for name in ["frequency_penalty", "presence_penalty", "min_p", "min_tokens", "top_logprobs", "prompt_logprobs"] {
        fields.neutral(name, &zero)?;
    }
    fields.neutral("repetition_penalty", &[json!(1), json!(1.0)])?;
    fields.neutral("best_of", &[json!(1)])?;
    fields.neutral("echo", &[json!(false)])?;
    fields.neutral("suffix", &[json!("")])?;
    fields.neutral("logit_bias", &[json!({})])?;
    fields.neutral("response_format", &[json!({"type": "text"})])?;
    fields.neutral("tool_choice", &[json!("auto"), json!("none")])
}

/// `logprobs`: of completions a number (0, or 1), of chats a flag. Only the sampled token has one.
fn log_probabilities(interface: Interface, fields: &Fields) -> Result<bool, Refusal> {
    match interface {
        Interface::Chat => fields.flag("logprobs", false),
        Interface::Completions => match fields.whole("logprobs")? {
            None => Ok(false),
            Some(0 | 1) => Ok(true),
            Some(_) => Err(Refusal::new(400, "logprobs: at most 1, the sampled token's")),
        },
    }
}

/// A text, ids, or a list of either.
fn prompts(fields: &Fields, tokenizer: &Tokenizer) -> Result<Vec<Vec<i64>>, Refusal> {
    let wrong = || Refusal::new(400, "prompt: expected a text, a list of ids, or a list of these");
    let prompt = fields.get("prompt").ok_or_else(wrong)?;
    let one = |value: &Value| match value {
        Value::String(text) => Some(tokenizer.encode(text)),
        Value::Array(ids) => ids.iter().map(Value::as_i64).collect(),
        _ => None,
    };
    match prompt {
        Value::Array(list) if list.first().is_some_and(|first| !first.is_number()) => {
            list.iter().map(one).collect::<Option<_>>().ok_or_else(wrong)
        }
        single => Ok(vec![one(single).ok_or_else(wrong)?]),
    }
}

fn chat_prompt(fields: &Fields, tokenizer: &Tokenizer) -> Result<Vec<i64>, Refusal> {
    let messages = fields.read("messages", "a list of messages", Value::as_array)?;
    let messages = messages.ok_or_else(|| Refusal::new(400, "messages is missing"))?;
    let messages: Vec<Value> = messages.iter().map(plain_content).collect::<Result<_, _>>()?;
    let mut settings = Map::new();
    if let Some(more) = fields.read("chat_template_kwargs", "an object", Value::as_object)? {
        settings.extend(more.clone());
    }
    if let Some(tools) = fields.get("tools") {
        settings.insert("tools".into(), tools.clone());
    }
    let ends_with_assistant = messages.last().is_some_and(|last| last["role"] == "assistant");
    if fields.flag("continue_final_message", false)? && ends_with_assistant {
        return Ok(tokenizer.prompt(&messages, None, &settings)?);
    }
    let add_generation_prompt = fields.flag("add_generation_prompt", true)?;
    Ok(tokenizer.encode_rendered(&tokenizer.render(&messages, add_generation_prompt, &settings)?))
}

/// A message whose content is one text: parts of type `text` are joined.
fn plain_content(message: &Value) -> Result<Value, Refusal> {
    let Some(parts) = message["content"].as_array() else { return Ok(message.clone()) };
    let text = |part: &Value| part["text"].as_str().filter(|_| part["type"] == "text").map(str::to_owned);
    let joined: Option<String> = parts.iter().map(text).collect();
    let joined = joined.ok_or_else(|| Refusal::new(400, "messages: content has parts that are no text"))?;
    let mut message = message.clone();
    message["content"] = json!(joined);
    Ok(message)
}

fn settings(
    interface: Interface,
    fields: &Fields,
    sampler: &Sampler,
    tokenizer: &Tokenizer,
    prompt: usize,
) -> Result<Settings, Refusal> {
    let capacity = sampler.options().capacity as usize;
    let room = capacity.saturating_sub(prompt);
    if room == 0 {
        return Err(Refusal::new(400, format!("the prompt has {prompt} tokens, and a sequence at most {capacity}")));
    }
    let asked = fields.whole("max_completion_tokens")?.or(fields.whole("max_tokens")?);
    // OpenAI's completions are of 16 tokens, and its chats as long as there is room, unless a request says otherwise.
    let default = if interface == Interface::Completions { 16 } else { room };
    let stop = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(texts)) => texts
            .iter()
            .map(|text| text.as_str().map(str::to_owned))
            .collect::<Option<_>>()
            .ok_or_else(|| Refusal::new(400, "stop: expected a text or a list of texts"))?,
        Some(_) => return Err(Refusal::new(400, "stop: expected a text or a list of texts")),
    };
    let mut ends = if fields.flag("ignore_eos", false)? { Vec::new() } else { tokenizer.ends().to_vec() };
    if let Some(more) = fields.read("stop_token_ids", "a list of ids", Value::as_array)? {
        ends.extend(more.iter().filter_map(Value::as_i64));
    }
    // vLLM's -1 is no limit, too.
    let top_k = fields.read("top_k", "a whole number", Value::as_i64)?.unwrap_or(0).max(0);
    let (temperature, top_p) = (fields.number("temperature", 1.0)?, fields.number("top_p", 1.0)?);
    if temperature < 0.0 || !(0.0..=1.0).contains(&top_p) {
        return Err(Refusal::new(400, "temperature: at least 0; top_p: from 0 to 1"));
    }
    if asked == Some(0) {
        return Err(Refusal::new(400, "max_tokens: at least 1"));
    }
    Ok(Settings {
        temperature,
        top_p,
        top_k: top_k as usize,
        max_tokens: asked.unwrap_or(default).min(room),
        stop,
        ends,
    })
}
