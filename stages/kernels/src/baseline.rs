//! How PyTorch runs a task that candidates are timed beside.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

/// A way of PyTorch's to run a task. Ordered by name, as verdicts list them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Baseline {
    /// `torch.compile`, which tries several kernels for each step and takes the fastest.
    Autotune,
    /// `torch.compile`.
    Compile,
    /// As it is written.
    Eager,
}

impl Baseline {
    /// The word in requests, verdicts and columns.
    pub fn word(self) -> &'static str {
        match self {
            Self::Autotune => "autotune",
            Self::Compile => "compile",
            Self::Eager => "eager",
        }
    }

    /// Whether it needs a compiler.
    pub fn compiles(self) -> bool {
        self != Self::Eager
    }
}

impl Display for Baseline {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.pad(self.word())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The reference reads these words, and stored verdicts have them as keys, in this order.
    #[test]
    fn words_are_those_of_the_reference_and_of_stored_verdicts() {
        let all = [Baseline::Eager, Baseline::Compile, Baseline::Autotune];
        let written = serde_json::to_string(&all).unwrap();
        assert_eq!(written, r#"["eager","compile","autotune"]"#);
        assert_eq!(serde_json::from_str::<[Baseline; 3]>(&written).unwrap(), all);
        assert!(all.iter().all(|baseline| serde_json::json!(baseline) == baseline.word()));
        let keys: BTreeMap<Baseline, u8> = all.into_iter().map(|baseline| (baseline, 0)).collect();
        assert_eq!(serde_json::to_string(&keys).unwrap(), r#"{"autotune":0,"compile":0,"eager":0}"#);
    }
}
