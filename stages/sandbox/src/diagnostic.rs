//! What compilers and checks say of a source, and why there is nothing to run.

use serde::{Deserialize, Serialize};

use crate::fault::Fault;

/// More than this help nobody.
pub const MOST: usize = 10;

/// A message is cut after this many characters.
pub const LONGEST: usize = 400;

/// What a compiler says of one place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnostic {
    /// In the candidate's source, counted from one; `None` where the compiler names none.
    pub line: Option<u32>,
    /// Likewise.
    pub column: Option<u32>,
    /// One line.
    pub message: String,
}

/// One launch that a `kernel` candidate declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredLaunch {
    /// The kernel's symbol in the module.
    pub symbol: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: u32,
    /// How many parameters the kernel takes: the task's tensors, and perhaps the scratch buffer.
    pub arguments: u32,
}

/// Why there is nothing to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CompileFailure {
    /// The source is wrong.
    Source(Vec<Diagnostic>),
    /// The source needs what the device does not offer (inline PTX on the CPU device, say).
    Unsupported(Diagnostic),
    /// It compiles, but its host code ended badly when what it starts was recorded.
    Fault(Fault),
    /// The compiler took too long, or too much memory.
    Limit(String),
}

/// Without `task.h` nothing that a candidate names is known; that is said first.
pub fn without_header(mut found: Vec<Diagnostic>, source: &str) -> Vec<Diagnostic> {
    if !source.contains("task.h") {
        found.insert(0, Diagnostic { line: Some(1), column: None, message: "task.h is not included".to_owned() });
        found.truncate(MOST);
    }
    found
}

/// At most so much of a message: a type can be a megabyte long.
pub fn cut(message: &str) -> String {
    match message.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &message[..end]),
        None => message.to_owned(),
    }
}
