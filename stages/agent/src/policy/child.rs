//! A policy in a process of its own, and what is said to it: JSON, one object a line.
//!
//! `cuda-agent-train sample MODEL` holds a model and samples from it. It reads [`ToSampler`] on standard input and writes
//! [`FromSampler`] on standard output:
//!
//! ```text
//! ← {"ready": {"model": "Qwen2.5-Coder-0.5B-Instruct", "width": 256}}
//! → {"request": {"id": 1, "messages": [{"role": "user", "content": "…"}], "sampling": {…}, "key": {…}}}
//! → {"request": {"id": 2, "messages": […], "prefix": {"ids": [151644, …], "messages": 3}, …}}
//! ← {"answer": {"id": 2, "text": "…", "prompt_ids": […], "token_ids": […], "log_probs": […], "finish_reason": "stop"}}
//! ← {"error": {"id": 1, "message": "…"}}
//! ```
//!
//! - The first line is `ready`, or the process ends with a status other than 0. Standard error is the stage's log.
//! - Requests come whenever they come, at most `width` unanswered; answers in any order, one for each. The sampler batches as
//!   it likes: an answer must not depend on its neighbours, but for what rounding leaves.
//! - **`messages` is the whole conversation.** Without `prefix` the prompt is the chat template's rendering of it, ready for the
//!   assistant to speak; where the last message is the assistant's, it goes on from its text, with nothing in between
//!   (a prefill). With `prefix` the prompt is `prefix.ids`, then what the template puts between the end of the
//!   assistant's turn `messages[prefix.messages - 1]` and the end of the conversation: the token that ends a turn unless
//!   `ids` ends with it, and the messages from `prefix.messages` on. `ids` are never decoded and encoded again.
//! - `prompt_ids` are all ids before the first sampled one, `token_ids` what was sampled, the token that ends a turn
//!   among them; `log_probs` is as long. `text` is their text without special tokens, ended before a stop string.
//! - `error` is an answer to one request that can't be met, a conversation longer than the context say. What makes all
//!   of them impossible ends the process.
//! - The end of standard input is the end: requests before it are answered.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Completion, Finish, Key, Message, Prefix, Request, Sampling, Tokens};

/// A line to the sampler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ToSampler {
    /// A completion is wanted.
    Request(SampleRequest),
}

/// What to complete.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleRequest {
    /// Names the answer.
    pub id: u64,
    /// The whole conversation.
    pub messages: Vec<Message>,
    /// Ids in place of its first messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<Prefix>,
    /// How to sample.
    pub sampling: Sampling,
    /// What to draw with.
    pub key: Key,
}

impl SampleRequest {
    /// A request of a policy, under a number.
    pub fn of(request: &Request, id: u64) -> Self {
        Self {
            id,
            messages: request.messages.to_vec(),
            prefix: request.prefix.cloned(),
            sampling: request.sampling.clone(),
            key: request.key.clone(),
        }
    }
}

/// A line from the sampler.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FromSampler {
    /// It can be asked.
    Ready(Ready),
    /// A completion.
    Answer(SampleAnswer),
    /// There is none.
    Error(SampleError),
}

/// What the sampler says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ready {
    /// The model's name.
    pub model: String,
    /// How many requests it is worth having unanswered.
    pub width: usize,
}

/// A completion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleAnswer {
    /// Of the request.
    pub id: u64,
    /// The completion's text.
    pub text: String,
    /// The prompt, as ids.
    pub prompt_ids: Vec<u32>,
    /// What was sampled.
    pub token_ids: Vec<u32>,
    /// Of each sampled token, at the sampling temperature, before top-p and top-k.
    pub log_probs: Vec<f64>,
    /// Why it ended.
    pub finish_reason: Finish,
}

impl SampleAnswer {
    /// As what a policy gives.
    pub fn completion(self, took: Duration) -> Completion {
        Completion {
            text: self.text,
            finish: self.finish_reason,
            prompt_tokens: Some(self.prompt_ids.len() as u64),
            completion_tokens: Some(self.token_ids.len() as u64),
            tokens: Some(Tokens { prompt_ids: self.prompt_ids, ids: self.token_ids, log_probs: self.log_probs }),
            seconds: took.as_secs_f64(),
        }
    }
}

/// Why a request has no completion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SampleError {
    /// Of the request.
    pub id: u64,
    /// What is wrong with it.
    pub message: String,
}
