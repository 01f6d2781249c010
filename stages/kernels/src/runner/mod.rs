//! Running candidates apart from everything else.

pub mod gpu;

/// Where the tensors and the scratch buffer of one run lie: offset and length in the arena, in bytes.
pub type Spans = Vec<[u64; 2]>;

/// The arguments of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arguments {
    /// The task's tensors, in the order of its arguments.
    pub tensors: Spans,
    /// The scratch buffer; its length is 0 where the candidate asked for none.
    pub scratch: [u64; 2],
}

impl Arguments {
    /// The tensors, and the scratch buffer last.
    pub fn spans(&self) -> Spans {
        self.tensors.iter().copied().chain([self.scratch]).collect()
    }
}
