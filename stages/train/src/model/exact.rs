//! Rows that are the same to the bit whatever is computed beside them.
//!
//! A product of matrices adds up in an order that depends on how many rows it has, so that a sampler, which computes a token
//! at a time, and a trainer, which computes whole sequences, differ in the last bits. Here every product has [`ROWS`] rows,
//! filled up with zeros, and all attention goes through one kernel, whose keys are filled up to a multiple of [`KEYS`] with keys
//! that nobody sees.

use tch::{Kind, Tensor};

use super::attention::by_sequence;

/// Rows of every product: the least that keep a GPU busy.
const ROWS: i64 = 256;

/// Keys are filled up to a multiple of this: attention takes them by blocks of at most as many.
const KEYS: i64 = 512;

/// Lets `compute` see [`ROWS`] rows of its inputs at a time, all of them `[n, …]`, and puts its results together again.
pub(super) fn by_rows<const INPUTS: usize, const OUTPUTS: usize>(
    inputs: [&Tensor; INPUTS],
    compute: impl Fn([Tensor; INPUTS]) -> [Tensor; OUTPUTS],
) -> [Tensor; OUTPUTS] {
    let rows = inputs.first().map_or(0, |input| input.size()[0]);
    let part = |input: &Tensor, start: i64| {
        let length = ROWS.min(rows - start);
        let part = input.narrow(0, start, length);
        if length == ROWS {
            return part;
        }
        let shape = [&[ROWS - length], &input.size()[1..]].concat();
        Tensor::cat(&[part, input.new_zeros(shape, (input.kind(), input.device()))], 0)
    };
    let starts = (0..rows.max(1)).step_by(ROWS as usize);
    let parts: Vec<[Tensor; OUTPUTS]> = starts.map(|start| compute(inputs.map(|input| part(input, start)))).collect();
    std::array::from_fn(|output| {
        let parts: Vec<&Tensor> = parts.iter().map(|parts| &parts[output]).collect();
        Tensor::cat(&parts, 0).narrow(0, 0, rows)
    })
}

/// How many keys there are room for in attention over this many.
pub(super) fn keys(count: i64) -> i64 {
    (count + KEYS - 1) / KEYS * KEYS
}

/// Causal attention within each sequence of a packed batch, as [`super::attention::packed`] has it.
pub(super) fn packed(queries: &Tensor, keys: &Tensor, values: &Tensor, lengths: &[i64]) -> Tensor {
    let some: Vec<i64> = lengths.iter().copied().filter(|length| *length > 0).collect();
    by_sequence([queries, keys, values], &some, |heads, _| sequence(heads))
}

/// Causal attention of one sequence: queries `[n, heads, width]`, keys and values `[n, key_value_heads, width]` to
/// `[n, heads · width]`.
fn sequence([queries, keys, values]: [Tensor; 3]) -> Tensor {
    let (count, groups, width) = keys.size3().expect("keys have three dimensions");
    let shared_by = queries.size()[1] / groups;
    let room = self::keys(count);
    let filled = |heads: &Tensor| {
        let zeros = heads.new_zeros([room - count, groups, width], (heads.kind(), heads.device()));
        Tensor::cat(&[heads, &zeros], 0).transpose(0, 1).unsqueeze(0)
    };
    let attend = |queries: &Tensor, keys: &Tensor, values: &Tensor, visible: &Tensor| {
        Tensor::scaled_dot_product_attention(queries, keys, values, Some(visible), 0.0, false, None, false)
    };
    let places = |count: i64| Tensor::arange(count, (Kind::Int64, keys.device()));
    let sees = |own: Tensor| places(room).unsqueeze(0).le_tensor(&own.unsqueeze(1));
    // Queries that share keys are rows of one product, as in a step of decoding.
    let grouped = queries.reshape([count, groups, shared_by, width]);
    let (keys, values) = (filled(&keys), filled(&values));
    if queries.device().is_cuda() {
        // So are queries of other places: a row of the kernel's tiles does not depend on those beside it.
        let rows = grouped.transpose(0, 1).reshape([1, groups, -1, width]);
        let visible = sees(places(count * shared_by).floor_divide_scalar(shared_by)).unsqueeze(0).unsqueeze(0);
        let attended = attend(&rows, &keys, &values, &visible);
        return attended.reshape([groups, count, shared_by, width]).transpose(0, 1).reshape([count, -1]);
    }
    // On a CPU the size of a tile depends on how many there are: each place is a sequence of its own.
    let each = |heads: &Tensor| heads.expand([count, groups, room, width], false);
    let visible = sees(places(count)).unsqueeze(1).unsqueeze(1);
    attend(&grouped, &each(&keys), &each(&values), &visible).reshape([count, -1])
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    #[test]
    fn parts_are_filled_up_and_put_together() {
        let input = Tensor::arange(600, (Kind::Float, Device::Cpu)).reshape([300, 2]);
        let [doubled, first] = by_rows([&input], |[part]| {
            assert_eq!(part.size(), [ROWS, 2]);
            [&part * 2.0, part.select(1, 0)]
        });
        assert_eq!((doubled, first), (&input * 2.0, input.select(1, 0)));
        assert_eq!([1, 512, 513].map(keys), [512, 512, 1024]);
    }
}
