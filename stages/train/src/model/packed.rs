//! Sequences of different lengths in one row, without padding, and what they begin with alike only once.

use tch::{Device, Kind, Tensor};

/// A batch of sequences, one after another.
///
/// Where a sequence begins as the one before it does, the tokens that they have in common are rows of that one: a causal
/// decoder's state there is the same. Answers to one prompt compute it once so, and prompts their instructions.
pub struct Packed {
    /// The tokens: `[T]`, i64.
    pub tokens: Tensor,
    /// Each token's position in its own sequence: `[T]`, i64.
    pub positions: Tensor,
    /// Where sequences would begin and end without anything in common, from 0 on: as long as there are sequences, and one
    /// more.
    pub bounds: Vec<i64>,
    /// The row of each token of each sequence.
    rows: Vec<Vec<i64>>,
    /// Between rows and whole sequences, where these differ.
    whole: Option<Whole>,
}

/// The way from rows to whole sequences and back.
struct Whole {
    /// Row of each token of all sequences: `[bounds.last()]`, i64.
    rows: Tensor,
    /// Where each row is among them, in the sequence that it was first seen in: `[T]`, i64.
    own: Tensor,
}

impl Packed {
    /// Packs sequences in their order, each whole. Empty ones stay: they have equal bounds.
    pub fn new(sequences: &[&[i64]], device: Device) -> Self {
        Self::with(sequences, device, |_, _| 0)
    }

    /// Packs sequences in their order; what one has in common with the one before it is not repeated.
    pub fn sharing(sequences: &[&[i64]], device: Device) -> Self {
        Self::with(sequences, device, common)
    }

    fn with(sequences: &[&[i64]], device: Device, common: impl Fn(&[i64], &[i64]) -> usize) -> Self {
        let (mut tokens, mut positions, mut own) = (Vec::new(), Vec::new(), Vec::new());
        let (mut rows, mut bounds): (Vec<Vec<i64>>, _) = (Vec::with_capacity(sequences.len()), vec![0]);
        let mut before: &[i64] = &[];
        for sequence in sequences {
            let shared = common(before, sequence);
            let start = bounds.last().copied().unwrap_or_default();
            let mut of_this = rows.last().map_or(Vec::new(), |before| before[..shared].to_vec());
            for (position, token) in sequence.iter().enumerate().skip(shared) {
                of_this.push(tokens.len() as i64);
                own.push(start + position as i64);
                tokens.push(*token);
                positions.push(position as i64);
            }
            bounds.push(start + sequence.len() as i64);
            rows.push(of_this);
            before = sequence;
        }
        let to_device = |values: &[i64]| Tensor::from_slice(values).to_device(device);
        let is_shared = bounds.last() != Some(&(tokens.len() as i64));
        let whole = is_shared.then(|| Whole { rows: to_device(&rows.concat()), own: to_device(&own) });
        Self { tokens: to_device(&tokens), positions: to_device(&positions), bounds, rows, whole }
    }

    /// Number of rows, T.
    pub fn rows(&self) -> i64 {
        self.tokens.numel() as i64
    }

    /// The row of a token of a sequence.
    pub fn row(&self, sequence: usize, token: usize) -> i64 {
        self.rows[sequence][token]
    }

    /// Length of each sequence, in order.
    pub fn lengths(&self) -> Vec<i64> {
        self.bounds.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Number of tokens of the longest sequence, 0 where there is none.
    pub fn longest(&self) -> i64 {
        self.lengths().into_iter().max().unwrap_or(0)
    }

    /// Lets whole sequences attend: `attend` gets queries, keys and values `[bounds.last(), heads, width]` of rows
    /// `[T, heads, width]`, and its result `[bounds.last(), n]` comes back as that of the rows.
    ///
    /// Attention itself is computed for every sequence, which costs little beside the projections and needs no mask.
    pub(crate) fn attend(
        &self,
        heads: [Tensor; 3],
        attend: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Tensor,
    ) -> Tensor {
        let [queries, keys, values] = heads;
        let Some(Whole { rows, own }) = &self.whole else { return attend(&queries, &keys, &values) };
        // A row's gradient is a sum over all sequences that begin with it: in float32, since bfloat16 would lose small
        // ones in it. A query counts in one sequence alone.
        let repeated = |heads: &Tensor| heads.to_kind(Kind::Float).index_select(0, rows).to_kind(heads.kind());
        attend(&queries.index_select(0, rows), &repeated(&keys), &repeated(&values)).index_select(0, own)
    }
}

/// How many tokens two sequences begin with alike.
pub fn common(one: &[i64], other: &[i64]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor).unwrap()
    }

    #[test]
    fn positions_begin_anew_in_each_sequence() {
        let packed = Packed::new(&[&[5, 6, 7], &[], &[8], &[8]], Device::Cpu);
        assert_eq!(list(&packed.tokens), [5, 6, 7, 8, 8]);
        assert_eq!(list(&packed.positions), [0, 1, 2, 0, 0]);
        assert_eq!((packed.bounds.as_slice(), packed.longest()), ([0, 3, 3, 4, 5].as_slice(), 3));
        assert!(packed.whole.is_none());
    }

    #[test]
    fn what_a_sequence_shares_with_the_one_before_has_its_rows() {
        let packed = Packed::sharing(&[&[5, 6, 7], &[5, 6, 8, 9], &[5, 6, 8, 9], &[5], &[6, 6]], Device::Cpu);
        assert_eq!(list(&packed.tokens), [5, 6, 7, 8, 9, 6, 6]);
        assert_eq!(list(&packed.positions), [0, 1, 2, 2, 3, 0, 1]);
        assert_eq!(packed.lengths(), [3, 4, 4, 1, 2]);
        assert_eq!((packed.row(1, 1), packed.row(2, 3), packed.row(3, 0), packed.row(4, 0)), (1, 4, 0, 5));
        let whole = packed.whole.as_ref().unwrap();
        assert_eq!(list(&whole.rows), [0, 1, 2, 0, 1, 3, 4, 0, 1, 3, 4, 0, 5, 6]);
        assert_eq!(list(&whole.own), [0, 1, 2, 5, 6, 12, 13]);
        let rows = Tensor::from_slice(&[10.0f32, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]).reshape([7, 1, 1]);
        let heads = || [rows.shallow_clone(), rows.shallow_clone(), rows.shallow_clone()];
        let back = packed.attend(heads(), |queries, _, _| queries.flatten(1, 2));
        assert_eq!(back, rows.flatten(1, 2), "to whole sequences and back");
    }
}
