//! GGUF, llama.cpp's file: read by mapping, and made a Hugging Face folder in bf16.
//!
//! The result of an import is a bf16 model whose weights went through the file's quantisation: a run that begins with it
//! begins with those weights, not with the ones that were published in bf16.

mod import;
mod quants;
mod reader;

pub use self::import::{Imported, import};
pub use self::reader::{Gguf, Value};
