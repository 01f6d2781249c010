//! Anthropic's messages. The system's message has a place of its own, and there is none for a seed. A last message of the
//! assistant is a prefill.

use serde_json::{Map, Value, json};

use super::http::Call;
use super::served::{Format, Server};
use super::{Completion, Finish, PolicyError, Request, Role};

/// Where Anthropic's own servers are.
pub const OWN_URL: &str = "https://api.anthropic.com";

const VERSION: &str = "2023-06-01";

/// The headers of a call.
pub fn headers(key: Option<&str>) -> Vec<(&'static str, String)> {
    let key = key.map(|key| ("x-api-key", key.to_owned()));
    [("anthropic-version", VERSION.to_owned())].into_iter().chain(key).collect()
}

/// Messages.
pub struct Messages;

impl Messages {
    fn url(server: &Server) -> String {
        let base = &server.client.endpoint().base_url;
        format!("{base}{}", if base.ends_with("/v1") { "/messages" } else { "/v1/messages" })
    }

    fn body(server: &Server, request: &Request) -> Value {
        let sampling = request.sampling;
        let is_system = |role: Role| role == Role::System;
        let system: Vec<&str> = request
            .messages
            .iter()
            .filter(|message| is_system(message.role))
            .map(|message| message.content.as_str())
            .collect();
        let messages: Vec<Value> = request
            .messages
            .iter()
            .filter(|message| !is_system(message.role))
            // Results of tools are the environment's words here.
            .map(|message| match message.role {
                Role::Tool => json!({ "role": "user", "content": message.content }),
                role => json!({ "role": role, "content": message.content }),
            })
            .collect();
        let fields = json!({
            "model": server.settings.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": (sampling.top_p < 1.0).then_some(sampling.top_p),
            "top_k": sampling.top_k,
            "stop_sequences": (!sampling.stop.is_empty()).then_some(&sampling.stop),
            "system": (!system.is_empty()).then(|| system.join("\n\n")),
            "messages": messages,
        });
        server.settings.over(fields.as_object().cloned().unwrap_or_else(Map::new))
    }
}

fn read(answer: &Value) -> Result<Completion, String> {
    let blocks = answer["content"].as_array().ok_or("there is no content")?;
    let texts = blocks.iter().filter(|block| block["type"] == "text").filter_map(|block| block["text"].as_str());
    let finish = match answer["stop_reason"].as_str() {
        Some("end_turn" | "stop_sequence") | None => Finish::Stop,
        Some("max_tokens" | "model_context_window_exceeded") => Finish::Length,
        Some(_) => Finish::Abort,
    };
    let usage = &answer["usage"];
    // Cached parts of the prompt are counted apart.
    let cached =
        ["cache_creation_input_tokens", "cache_read_input_tokens"].map(|name| usage[name].as_u64().unwrap_or(0));
    Ok(Completion {
        text: texts.collect(),
        finish,
        tokens: None,
        prompt_tokens: usage["input_tokens"].as_u64().map(|count| count + cached.iter().sum::<u64>()),
        completion_tokens: usage["output_tokens"].as_u64(),
        seconds: 0.0,
    })
}

impl Format for Messages {
    fn complete(&self, server: &Server, request: &Request) -> Result<Completion, PolicyError> {
        let call = Call {
            url: Self::url(server),
            body: &Self::body(server, request),
            max_tokens: request.sampling.max_tokens,
            jitter: request.key.bits(),
        };
        server.client.call(&call, |answer| {
            let completion = read(answer)?;
            let taken =
                completion.prompt_tokens.zip(completion.completion_tokens).map(|(sent, written)| sent + written);
            Ok((completion, taken))
        })
    }
}
