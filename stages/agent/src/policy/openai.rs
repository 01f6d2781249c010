//! OpenAI's two formats, which most servers speak.
//!
//! - [`Chat`]: chat completions. Text in, text out; the server renders the conversation.
//! - [`ByTokens`]: completions by token ids. Token ids in, token ids and log-probabilities out, so that what is trained on is
//!   what was sampled. The server must return ids: vLLM does (`return_token_ids`), and llama.cpp (in `logprobs.content`).
//!   The conversation is rendered by the server once, for its first turn; a later turn is appended ([`Server::prompt`]).
//!
//! A prefill needs a server that goes on writing the last message: vLLM does when told so, llama.cpp always, OpenAI's own
//! does not.

use serde_json::{Map, Value, json};

use super::http::Call;
use super::served::{Format, Server};
use super::{Completion, Finish, Message, PolicyError, Request, Role, Tokens};

/// Where OpenAI's own servers are.
pub const OWN_URL: &str = "https://api.openai.com/v1";

/// The headers of a call.
pub fn headers(key: Option<&str>) -> Vec<(&'static str, String)> {
    key.map(|key| ("authorization", format!("Bearer {key}"))).into_iter().collect()
}

/// Chat completions.
pub struct Chat;

fn sampling(request: &Request, model: &str) -> Map<String, Value> {
    let sampling = request.sampling;
    let fields = json!({
        "model": model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": (sampling.top_p < 1.0).then_some(sampling.top_p),
        "top_k": sampling.top_k,
        "stop": (!sampling.stop.is_empty()).then_some(&sampling.stop),
        "seed": request.key.server_seed(),
        "stream": false,
    });
    match fields {
        Value::Object(fields) => fields,
        _ => unreachable!("it was written as one"),
    }
}

fn prefill(messages: &[Message]) -> Option<&str> {
    messages.last().filter(|message| message.role == Role::Assistant).map(|message| message.content.as_str())
}

/// The reason in this crate's words; what a server calls otherwise broke off.
fn finish(reason: &Value) -> Finish {
    match reason.as_str() {
        Some("stop" | "eos") | None => Finish::Stop,
        Some("length") => Finish::Length,
        Some(_) => Finish::Abort,
    }
}

fn usage(answer: &Value) -> (Option<u64>, Option<u64>) {
    let usage = &answer["usage"];
    (usage["prompt_tokens"].as_u64(), usage["completion_tokens"].as_u64())
}

fn sum(counts: (Option<u64>, Option<u64>)) -> Option<u64> {
    Some(counts.0? + counts.1?)
}

impl Format for Chat {
    fn complete(&self, server: &Server, request: &Request) -> Result<Completion, PolicyError> {
        let mut body = sampling(request, &server.settings.model);
        body.insert("messages".into(), json!(request.messages));
        let prefill = prefill(request.messages);
        if prefill.is_some() {
            body.insert("add_generation_prompt".into(), json!(false));
            body.insert("continue_final_message".into(), json!(true));
        }
        let call = Call {
            url: format!("{}/chat/completions", server.client.endpoint().base_url),
            body: &server.settings.over(body),
            max_tokens: request.sampling.max_tokens,
            jitter: request.key.bits(),
        };
        server.client.call(&call, |answer| {
            let choice = answer["choices"].get(0).ok_or("there are no choices")?;
            let message = choice["message"].as_object().ok_or("the choice has no message")?;
            let text = message.get("content").and_then(Value::as_str).unwrap_or_default();
            // Some servers repeat the prefill.
            let text = prefill.and_then(|prefill| text.strip_prefix(prefill)).unwrap_or(text);
            let counts = usage(answer);
            let completion = Completion {
                text: text.to_owned(),
                finish: finish(&choice["finish_reason"]),
                tokens: None,
                prompt_tokens: counts.0,
                completion_tokens: counts.1,
                seconds: 0.0,
            };
            Ok((completion, sum(counts)))
        })
    }
}

/// Completions by token ids.
pub struct ByTokens;

impl Server {
    /// Servers offer what is no part of OpenAI's format beside it.
    fn beside(&self, path: &str) -> String {
        let base = &self.client.endpoint().base_url;
        format!("{}/{path}", base.strip_suffix("/v1").unwrap_or(base))
    }

    fn ask<T>(
        &self,
        path: &str,
        body: Value,
        jitter: u64,
        read: impl Fn(&Value) -> Result<T, String>,
    ) -> Result<T, PolicyError> {
        let call = Call { url: self.beside(path), body: &body, max_tokens: 0, jitter };
        self.client.call(&call, |answer| Ok((read(answer)?, None)))
    }

    /// The ids of a conversation, ready for the assistant to speak, or to go on where it speaks last.
    fn tokenize(&self, messages: &[Message], jitter: u64) -> Result<Vec<u32>, PolicyError> {
        let open = prefill(messages).is_some();
        let body = json!({
            "model": self.settings.model,
            "messages": messages,
            "add_generation_prompt": !open,
            "continue_final_message": open,
            // Where a server knows text only, this is the text that it reads: none, and so no ids.
            "content": "",
        });
        let known = self.ask("tokenize", body, jitter, |answer| ids(&answer["tokens"]))?;
        if !known.is_empty() {
            return Ok(known);
        }
        // llama.cpp: one call makes the text, another the ids.
        let text = self.ask("apply-template", json!({ "messages": messages }), jitter, |answer| {
            answer["prompt"].as_str().map(str::to_owned).ok_or_else(|| "there is no prompt in it".to_owned())
        })?;
        let body = json!({ "content": text, "add_special": true, "parse_special": true });
        self.ask("tokenize", body, jitter, |answer| ids(&answer["tokens"]))
    }

    /// The prompt. After a turn it is what that turn was given and sampled, then what the template puts between the
    /// assistant's last word and the end of the conversation. The template is asked for that with a stand-in for what
    /// the assistant said, so nothing that was sampled is rendered, and a template that edits earlier answers can't.
    fn prompt(&self, request: &Request) -> Result<Vec<u32>, PolicyError> {
        let jitter = request.key.bits();
        let Some(prefix) = request.prefix else { return self.tokenize(request.messages, jitter) };
        let mut messages = request.messages.to_vec();
        let said = messages[..prefix.messages].iter_mut().filter(|message| message.role == Role::Assistant);
        said.for_each(|message| message.content = "Done.".into());
        let before = self.tokenize(&messages[..prefix.messages], jitter)?;
        let whole = self.tokenize(&messages, jitter)?;
        let between = whole.strip_prefix(before.as_slice()).filter(|between| !between.is_empty());
        let Some(mut between) = between else {
            let hint = "the model's chat template changes what came before when a message is added: use `api: openai`, or one \
                        turn";
            return Err(PolicyError::params("a turn can't be appended to a conversation of this model", hint));
        };
        // The token that ends a turn may have been sampled already.
        if prefix.ids.last() == between.first() {
            between = &between[1..];
        }
        Ok([prefix.ids.as_slice(), between].concat())
    }
}

fn ids(value: &Value) -> Result<Vec<u32>, String> {
    let items = value.as_array().map_or(&[][..], Vec::as_slice);
    let id = |item: &Value| item.as_u64().and_then(|id| u32::try_from(id).ok());
    items.iter().map(|item| id(item).ok_or_else(|| format!("{item} is no token id"))).collect()
}

fn log_probs(values: &[Value], of: impl Fn(&Value) -> Option<f64>) -> Result<Vec<f64>, String> {
    // Servers round: what is sure may come out as a little more than certain.
    values
        .iter()
        .map(|value| of(value).map(|value| value.min(0.0)).ok_or_else(|| format!("{value} is no logarithm")))
        .collect()
}

/// What was sampled, in vLLM's words or llama.cpp's.
fn sampled(choice: &Value) -> Result<(Vec<u32>, Vec<f64>), String> {
    if let (Some(_), Some(values)) = (choice["token_ids"].as_array(), choice["logprobs"]["token_logprobs"].as_array()) {
        return Ok((ids(&choice["token_ids"])?, log_probs(values, Value::as_f64)?));
    }
    if let Some(content) = choice["logprobs"]["content"].as_array() {
        let sampled = ids(&content.iter().map(|token| token["id"].clone()).collect())?;
        return Ok((sampled, log_probs(content, |token| token["logprob"].as_f64())?));
    }
    Err("it has no token ids and log-probabilities; `api: openai` needs none".to_owned())
}

impl Format for ByTokens {
    fn complete(&self, server: &Server, request: &Request) -> Result<Completion, PolicyError> {
        let prompt_ids = server.prompt(request)?;
        let mut body = sampling(request, &server.settings.model);
        body.insert("prompt".into(), json!(prompt_ids));
        body.insert("logprobs".into(), json!(1));
        body.insert("return_token_ids".into(), json!(true));
        let call = Call {
            url: format!("{}/completions", server.client.endpoint().base_url),
            body: &server.settings.over(body),
            max_tokens: request.sampling.max_tokens,
            jitter: request.key.bits(),
        };
        server.client.call(&call, |answer| {
            let choice = answer["choices"].get(0).ok_or("there are no choices")?;
            let (ids, log_probs) = sampled(choice)?;
            if ids.len() != log_probs.len() {
                return Err(format!("{} token ids and {} log-probabilities", ids.len(), log_probs.len()));
            }
            let counts = (Some(prompt_ids.len() as u64), Some(ids.len() as u64));
            let completion = Completion {
                text: choice["text"].as_str().unwrap_or_default().to_owned(),
                finish: finish(&choice["finish_reason"]),
                tokens: Some(Tokens { prompt_ids: prompt_ids.clone(), ids, log_probs }),
                prompt_tokens: counts.0,
                completion_tokens: counts.1,
                seconds: 0.0,
            };
            Ok((completion, sum(counts)))
        })
    }
}
