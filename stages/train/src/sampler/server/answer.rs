//! Answers of OpenAI's API.

use serde_json::{Value, json};

use crate::sampler::server::api::{Call, Interface, Refusal};
use crate::sampler::{Finish, Sample};
use crate::text::Tokenizer;

/// What all answers to one request begin with.
pub(super) struct Head {
    pub model: String,
    /// Distinguishes answers of this server.
    pub number: u64,
    /// Seconds since 1970.
    pub created: u64,
}

fn finish_reason(sample: &Sample) -> &'static str {
    match sample.finish {
        Finish::End | Finish::Stop => "stop",
        Finish::Length => "length",
    }
}

fn usage(call: &Call, completion: usize) -> Value {
    let prompt: usize = call.prompts.iter().map(Vec::len).sum();
    json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
}

fn begin(call: &Call, head: &Head, piece: bool) -> Value {
    let (prefix, object) = match (call.interface, piece) {
        (Interface::Completions, _) => ("cmpl", "text_completion"),
        (Interface::Chat, false) => ("chatcmpl", "chat.completion"),
        (Interface::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
    };
    json!({"id": format!("{prefix}-{}", head.number), "object": object, "created": head.created, "model": head.model})
}

/// The whole answer. Choices are in the order of prompts, those of one prompt together.
pub(super) fn whole(call: &Call, head: &Head, samples: &[Sample], tokenizer: &Tokenizer) -> Value {
    let choices: Vec<Value> =
        samples.iter().enumerate().map(|(index, sample)| choice(call, index, sample, tokenizer)).collect();
    let mut answer = begin(call, head, false);
    answer["choices"] = json!(choices);
    answer["usage"] = usage(call, samples.iter().map(|sample| sample.tokens.len()).sum());
    if call.ids && call.interface == Interface::Chat {
        answer["prompt_token_ids"] = json!(call.prompts[0]);
    }
    answer
}

fn choice(call: &Call, index: usize, sample: &Sample, tokenizer: &Tokenizer) -> Value {
    let mut choice = json!({"index": index, "finish_reason": finish_reason(sample), "logprobs": null});
    match call.interface {
        Interface::Completions => choice["text"] = json!(sample.text),
        Interface::Chat => choice["message"] = json!({"role": "assistant", "content": sample.text}),
    }
    if call.log_probabilities {
        choice["logprobs"] = match call.interface {
            Interface::Completions => completion_log_probabilities(sample, tokenizer),
            Interface::Chat => chat_log_probabilities(sample, tokenizer),
        };
    }
    if call.ids {
        choice["token_ids"] = json!(sample.tokens);
        if call.interface == Interface::Completions {
            choice["prompt_token_ids"] = json!(call.prompts[index / call.count]);
        }
    }
    choice
}

fn completion_log_probabilities(sample: &Sample, tokenizer: &Tokenizer) -> Value {
    let tokens: Vec<String> = sample.tokens.iter().map(|&id| tokenizer.decode(&[id])).collect();
    let offsets: Vec<usize> = tokens
        .iter()
        .scan(0, |end, token| {
            let begin = *end;
            *end += token.chars().count();
            Some(begin)
        })
        .collect();
    json!({"tokens": tokens, "token_logprobs": sample.log_probabilities, "top_logprobs": null, "text_offset": offsets})
}

fn chat_log_probabilities(sample: &Sample, tokenizer: &Tokenizer) -> Value {
    let token = |(&id, log_probability): (&i64, &f32)| {
        let text = tokenizer.decode(&[id]);
        json!({"token": text, "bytes": text.as_bytes(), "logprob": log_probability, "top_logprobs": []})
    };
    let content: Vec<Value> = sample.tokens.iter().zip(&sample.log_probabilities).map(token).collect();
    json!({"content": content})
}

/// A piece of one choice: text, and the sample where it is the last.
pub(super) fn piece(call: &Call, head: &Head, index: usize, text: &str, last: Option<&Sample>) -> Value {
    let mut choice = json!({"index": index, "finish_reason": last.map(finish_reason), "logprobs": null});
    match call.interface {
        Interface::Completions => choice["text"] = json!(text),
        Interface::Chat => choice["delta"] = json!({"role": "assistant", "content": text}),
    }
    if let Some(sample) = last.filter(|_| call.ids) {
        choice["token_ids"] = json!(sample.tokens);
    }
    let mut answer = begin(call, head, true);
    answer["choices"] = json!([choice]);
    answer
}

/// The piece after the last one, for those who asked how many tokens there were.
pub(super) fn usage_piece(call: &Call, head: &Head, completion: usize) -> Value {
    let mut answer = begin(call, head, true);
    answer["choices"] = json!([]);
    answer["usage"] = usage(call, completion);
    answer
}

/// A refusal's body.
pub(super) fn refusal(refusal: &Refusal) -> Value {
    let kind = if refusal.status < 500 { "invalid_request_error" } else { "server_error" };
    json!({"error": {"message": refusal.message, "type": kind, "param": null, "code": refusal.status}})
}
