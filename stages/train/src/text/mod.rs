//! Text and token ids: tokenizer, chat template, decoding as tokens arrive, stop strings.
//!
//! All of it gives what transformers gives for the same model folder (`tests/text.rs`).

mod chat;
mod decode;
mod json;
mod prompt;
mod stop;
#[cfg(test)]
pub(crate) mod tiny;
mod tokenizer;

pub use self::chat::ChatTemplate;
pub use self::decode::Incremental;
pub use self::prompt::Begin;
pub use self::stop::{Stop, Stopped};
pub use self::tokenizer::Tokenizer;
