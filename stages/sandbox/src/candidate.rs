//! An attempt at a task: its format and its source.

use serde::{Deserialize, Serialize};

/// What a candidate's source is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Device code and `TASK_LAUNCH(…)` lines; no candidate code runs on the host.
    Kernel,
    /// Device code and a host function `extern "C" cudaError_t launch(…)`.
    Launch,
}

/// A candidate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// How to read the source.
    pub format: Format,
    /// CUDA C++.
    pub source: String,
    /// What messages call the file.
    pub name: String,
}

impl Candidate {
    /// Digest of what makes it what it is; the name does not.
    pub fn digest(&self) -> String {
        let identity = serde_json::json!([self.format, self.source]).to_string();
        blake3::Hash::from_bytes(blake3::derive_key("cuda-agent candidate v1", identity.as_bytes()))
            .to_hex()
            .to_string()
    }
}

/// A text without the mark that some editors put before it, which compilers take for a stray character.
pub fn without_byte_order_mark(text: &str) -> String {
    text.strip_prefix('\u{feff}').unwrap_or(text).to_owned()
}

impl Format {
    /// The format that a source is written in, where nobody says: only `kernel` declares launches.
    pub fn of(source: &str) -> Self {
        if source.contains("TASK_LAUNCH") { Self::Kernel } else { Self::Launch }
    }
}
