//! Some of many things, for a refresh that executes a part of the rows again.

use crate::digest::Digest;

/// Some of many things, chosen by their digests: the same ones for the same seed, wherever and whenever.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// From 0 to 1.
    pub share: f64,
    /// Another seed chooses others.
    pub seed: u64,
}

impl Sample {
    /// Whether a thing is among them.
    pub fn has(&self, digest: &Digest) -> bool {
        let mixed = Digest::of_bytes(&[&self.seed.to_le_bytes()[..], &digest.0].concat());
        let first = u64::from_le_bytes(*mixed.0.first_chunk().expect("digests have 32 bytes"));
        (first as f64) < self.share * 2f64.powi(64)
    }
}
