//! Sampling: continuous batching over a cache of keys and values.
//!
//! A [`Sampler`] is a thread that owns a decoder. Any number of callers submit requests and wait; sequences join and leave
//! the batch between two steps. Which tokens a request gets depends on the weights, the request and its
//! [`SampleKey`], never on what else is in the batch: each token is drawn by one random number of a counter, and each row
//! of a batch is computed for itself. (Rows of matrix products may differ in their last bits with the size of a batch, so
//! a token changes where its random number lies that close to a border: about one in a million in f32.)
//!
//! | file | holds |
//! |---|---|
//! | `cache.rs` | keys and values of each slot |
//! | `draw.rs` | logits to tokens and their log-probabilities |
//! | `fused/` | a decoding step on a GPU as one CUDA graph |
//! | `engine.rs` | one step: admit, prefill, decode, finish |
//! | `thread.rs` | the thread and its callers' handles |
//! | `open.rs` | from a program's arguments to a sampler |
//! | `child.rs`, `server/` | the same for other programs: JSON lines, an OpenAI-compatible server |

mod cache;
pub mod child;
mod draw;
mod engine;
mod fused;
pub mod open;
pub mod server;
#[cfg(test)]
pub(crate) mod tests;
mod thread;

pub use self::engine::Statistics;
pub use self::thread::{Handle, Options, Sampler};

use crate::random;

/// What a request's random numbers are keyed by: 64 bits that stand for seed, task, sample and turn. Two requests with equal
/// prompts, keys and settings get equal tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleKey(pub u64);

impl SampleKey {
    /// A key out of several numbers, in order.
    pub fn of(parts: &[u64]) -> Self {
        let [low, high] = random::key(parts);
        Self(u64::from(high) << 32 | u64::from(low))
    }
}

/// How to sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Logits are divided by it; 0 takes the most likely token.
    pub temperature: f64,
    /// The smallest set of most likely tokens with at least this probability is sampled from; 1 for all.
    pub top_p: f64,
    /// That many most likely tokens are sampled from; 0 for all. Applied before `top_p`. Tokens as likely as the last one
    /// that is kept stay, in both.
    pub top_k: usize,
    /// New tokens at most; at least 1.
    pub max_tokens: usize,
    /// Texts that end a sample; they are not in its text.
    pub stop: Vec<String>,
    /// Tokens that end a sample; the one that did is in its tokens, and not in its text.
    pub ends: Vec<i64>,
}

impl Default for Settings {
    /// The model's own distribution.
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, max_tokens: 1024, stop: Vec::new(), ends: Vec::new() }
    }
}

/// One sample to draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Ids of the prompt; at least one.
    pub prompt: Vec<i64>,
    /// Of its random numbers.
    pub key: SampleKey,
    /// How to sample.
    pub settings: Settings,
}

/// Why a sample ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A token that ends texts.
    End,
    /// A stop string.
    Stop,
    /// As many tokens as were asked for.
    Length,
}

/// What was sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The new tokens, all of them: those of a stop string and the token that ended it too.
    pub tokens: Vec<i64>,
    /// Of each token its log-probability at the sampling temperature (at temperature 0: at 1), before `top_k` and `top_p`:
    /// what a trainer computes for the token from logits divided by the same temperature. Where all tokens are sampled
    /// from, it is that of the distribution that was sampled from.
    pub log_probabilities: Vec<f32>,
    /// Its text without special tokens, up to a stop string. Empty where the sampler has no tokenizer.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// How often weights had been swapped when the first and the last token were drawn.
    pub versions: (u64, u64),
}
