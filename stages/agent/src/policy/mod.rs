//! A conversation in, a completion out.
//!
//! The conversation is a list of messages. Where the last one is the assistant's, it is a **prefill**: the policy goes on
//! writing it, and its text is not repeated in the completion.

pub mod anthropic;
pub mod child;
#[cfg(test)]
mod conformance_test;
pub mod endpoint;
pub mod http;
pub mod openai;
pub mod sampler;
pub mod scripted;
pub mod served;
mod slots;
pub mod spread;

use serde::{Deserialize, Serialize};

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions.
    System,
    /// The environment, or a person.
    User,
    /// The policy.
    Assistant,
    /// The result of a tool that the policy called.
    Tool,
}

impl Role {
    /// The word that tables and servers use.
    pub fn word(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into() }
    }
}

/// Token ids that stand for the first messages of a conversation, as they were given and sampled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prefix {
    /// The ids: the prompt of the turn before, and what was sampled there.
    pub ids: Vec<u32>,
    /// How many messages they stand for; the last of these is the assistant's, and the ids end where sampling ended, so
    /// the token that ends a turn is there only if it was sampled.
    pub messages: usize,
}

/// How to sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f64,
    /// Least probability mass that tokens are drawn from; 1 is all.
    pub top_p: f64,
    /// Most tokens that are drawn from; absent is all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    /// Most tokens of a completion.
    pub max_tokens: u32,
    /// Sampling ends with the token that completes one of these; the text ends before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
}

/// Where a completion's random numbers come from. A sampler draws the number for position `p` of the completion from
/// this and `p`, never from the slot or the batch that the completion was computed in.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Of the run.
    pub seed: i64,
    /// The task's digest.
    pub task: String,
    /// Which of the episodes with this task.
    pub sample: u32,
    /// Which of the policy's turns, from 0.
    pub turn: u32,
}

impl Key {
    /// 64 bits that stand for the key, where there is room for no more: `H("cuda-agent sampling key v1", seed as i64, sample,
    /// turn as u32 little-endian, task)`, its first 8 bytes.
    pub fn bits(&self) -> u64 {
        let mut hasher = blake3::Hasher::new_derive_key("cuda-agent sampling key v1");
        hasher.update(&self.seed.to_le_bytes());
        hasher.update(&self.sample.to_le_bytes());
        hasher.update(&self.turn.to_le_bytes());
        hasher.update(self.task.as_bytes());
        let digest = hasher.finalize();
        u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("a digest has 32 bytes"))
    }

    /// The seed that servers are sent: 31 bits, which every one of them takes.
    pub fn server_seed(&self) -> u64 {
        self.bits() >> 33
    }
}

/// One call of a policy.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The whole conversation.
    pub messages: &'a [Message],
    /// Ids for the first of these messages, where an earlier turn of this policy gave them.
    pub prefix: Option<&'a Prefix>,
    /// How to sample.
    pub sampling: &'a Sampling,
    /// What to draw with.
    pub key: &'a Key,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// The policy ended its turn, or wrote a stop string.
    Stop,
    /// `max_tokens`, or the model's context.
    Length,
    /// The policy broke off, for a reason that is not in the text.
    Abort,
}

/// What was sampled, by token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tokens {
    /// All ids before the completion; with a prefix it begins with the prefix's.
    pub prompt_ids: Vec<u32>,
    /// The ids that were sampled, the end of the turn among them where that was sampled.
    pub ids: Vec<u32>,
    /// For each of them the natural logarithm of its probability at the sampling temperature, before top-p and top-k.
    pub log_probs: Vec<f64>,
}

/// What a policy answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The text, without the prefill, and without the stop string that ended it.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// By token, where the policy knows.
    pub tokens: Option<Tokens>,
    /// Tokens before the completion, where the policy says.
    pub prompt_tokens: Option<u64>,
    /// Tokens sampled, where the policy says.
    pub completion_tokens: Option<u64>,
    /// From the call to the answer, waiting included.
    pub seconds: f64,
}

/// Who answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// The model's name, by its server's or its folder's account.
    pub model: String,
    /// Digest of the weights, where they are known.
    pub digest: Option<String>,
}

/// A policy. Calls block; threads share it.
pub trait Policy: Sync {
    /// Who answers.
    fn identity(&self) -> Identity;

    /// Answers.
    fn complete(&self, request: &Request) -> Result<Completion, PolicyError>;

    /// How many calls it is worth making at a time.
    fn width(&self) -> usize;
}

/// Why there is no completion.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// No call can work: a refused key, an unknown model, a program that is not there.
    #[error("{message}")]
    Unusable {
        /// `params` where another try is useless, or `environment`.
        kind: &'static str,
        /// What is wrong.
        message: String,
        /// What to do about it.
        hint: Option<String>,
    },
    /// This call did not succeed, for a cause outside it; a later one may.
    #[error("{0}")]
    Failed(String),
    /// The policy answers others, and not this: a conversation that is too long, say.
    #[error("{0}")]
    Refused(String),
}

impl PolicyError {
    /// An error of the machine.
    pub fn environment(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Unusable { kind: "environment", message: message.into(), hint: Some(hint.into()) }
    }

    /// A mistake in the parameters.
    pub fn params(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Unusable { kind: "params", message: message.into(), hint: Some(hint.into()) }
    }
}
