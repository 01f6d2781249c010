//! Sequences of different lengths in one row, without padding.

use tch::{Device, Tensor};

/// A batch of sequences, one after another.
pub struct Packed {
    /// The tokens of all sequences: `[T]`, i64.
    pub tokens: Tensor,
    /// Each token's position in its own sequence: `[T]`, i64.
    pub positions: Tensor,
    /// Where sequences begin and end, from 0 to T: as long as there are sequences, and one more.
    pub bounds: Vec<i64>,
}

impl Packed {
    /// Packs sequences in their order. Empty ones stay: they have equal bounds.
    pub fn new(sequences: &[&[i64]], device: Device) -> Self {
        let tokens = sequences.concat();
        let positions: Vec<i64> = sequences.iter().flat_map(|sequence| 0..sequence.len() as i64).collect();
        let bounds = std::iter::once(0)
            .chain(sequences.iter().scan(0, |end, sequence| {
                *end += sequence.len() as i64;
                Some(*end)
            }))
            .collect();
        Self {
            tokens: Tensor::from_slice(&tokens).to_device(device),
            positions: Tensor::from_slice(&positions).to_device(device),
            bounds,
        }
    }

    /// Length of each sequence, in order.
    pub fn lengths(&self) -> Vec<i64> {
        self.bounds.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Number of tokens of the longest sequence, 0 where there is none.
    pub fn longest(&self) -> i64 {
        self.lengths().into_iter().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_begin_anew_in_each_sequence() {
        let packed = Packed::new(&[&[5, 6, 7], &[], &[8]], Device::Cpu);
        assert_eq!(Vec::<i64>::try_from(&packed.tokens).unwrap(), [5, 6, 7, 8]);
        assert_eq!(Vec::<i64>::try_from(&packed.positions).unwrap(), [0, 1, 2, 0]);
        assert_eq!((packed.bounds.as_slice(), packed.longest()), ([0, 3, 3, 4].as_slice(), 3));
    }
}
