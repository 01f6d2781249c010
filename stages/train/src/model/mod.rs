//! Decoders: Llama, Qwen2 and Qwen3, from and to Hugging Face's folders.
//!
//! One forward pass serves trainer and sampler ([`Decoder::block`]): they differ in what attention reads, the batch's own
//! keys or a cache.

mod adapter;
mod attention;
mod config;
mod decoder;
mod exact;
pub mod gguf;
mod lora;
mod packed;
mod save;
#[cfg(test)]
mod tests;
mod weights;

pub use self::config::{Config, Family, Scaling};
pub use self::decoder::{Decoder, Head, LoadOptions, Parameter};
pub use self::lora::{LoraConfig, TARGETS};
pub use self::packed::{Packed, common};
pub use self::weights::{Checkpoint, write_file};

pub(crate) use self::decoder::StepWeights;
