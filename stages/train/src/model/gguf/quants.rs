//! Blocks of quantised numbers, as llama.cpp's `ggml-quants.c` lays them out, to f32.
//!
//! Products and sums are taken in f32 in the order of the `gguf` package's `dequantize`, so both give the same bits.

use half::f16;

use crate::TrainError;

/// An element type of GGUF: its number there, elements and bytes of a block, and how one is read.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// llama.cpp's name.
    pub name: &'static str,
    number: u32,
    /// Elements of a block.
    pub elements: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Reads one block of `bytes` into `elements` numbers.
    pub read: fn(&[u8], &mut [f32]),
}

/// The types that are read: those in Qwen's `Q4_K_M` files, and the plain ones.
const LAYOUTS: [Layout; 7] = [
    Layout { name: "F32", number: 0, elements: 1, bytes: 4, read: f32_block },
    Layout { name: "F16", number: 1, elements: 1, bytes: 2, read: f16_block },
    Layout { name: "Q5_0", number: 6, elements: 32, bytes: 22, read: q5_0_block },
    Layout { name: "Q8_0", number: 8, elements: 32, bytes: 34, read: q8_0_block },
    Layout { name: "Q4_K", number: 12, elements: 256, bytes: 144, read: q4_k_block },
    Layout { name: "Q6_K", number: 14, elements: 256, bytes: 210, read: q6_k_block },
    Layout { name: "BF16", number: 30, elements: 1, bytes: 2, read: bf16_block },
];

impl Layout {
    /// The layout of GGUF's type number.
    pub fn of(number: u32) -> Result<Self, TrainError> {
        LAYOUTS.into_iter().find(|layout| layout.number == number).ok_or_else(|| {
            let names = LAYOUTS.map(|layout| layout.name).join(", ");
            TrainError::new(format!("elements of type {number} are not supported, only {names}"))
        })
    }

    /// Reads whole blocks on all cores. `output` has room for exactly the elements of `blocks`.
    pub fn dequantize(&self, blocks: &[u8], output: &mut [f32]) {
        assert_eq!(blocks.len() / self.bytes * self.elements, output.len(), "{} blocks", self.name);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        // Large enough that plain types, whose blocks are one number, don't start a thread for each.
        let blocks_each = (blocks.len() / self.bytes).div_ceil(threads).max(4096);
        std::thread::scope(|scope| {
            let outputs = output.chunks_mut(blocks_each * self.elements);
            for (blocks, output) in blocks.chunks(blocks_each * self.bytes).zip(outputs) {
                scope.spawn(move || {
                    for (block, numbers) in blocks.chunks(self.bytes).zip(output.chunks_mut(self.elements)) {
                        (self.read)(block, numbers);
                    }
                });
            }
        });
    }
}

fn half_at(bytes: &[u8], place: usize) -> f32 {
    f16::from_le_bytes([bytes[place], bytes[place + 1]]).to_f32()
}

fn f32_block(block: &[u8], numbers: &mut [f32]) {
    numbers[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
}

fn f16_block(block: &[u8], numbers: &mut [f32]) {
    numbers[0] = half_at(block, 0);
}

fn bf16_block(block: &[u8], numbers: &mut [f32]) {
    numbers[0] = half::bf16::from_le_bytes([block[0], block[1]]).to_f32();
}

/// Scale (f16), 32 fifth bits, 16 bytes of four bits: first the low halves, then the high ones. Centred at 16.
fn q5_0_block(block: &[u8], numbers: &mut [f32]) {
    let scale = half_at(block, 0);
    let fifths = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    let fours = &block[6..22];
    for (place, number) in numbers.iter_mut().enumerate() {
        let low = if place < 16 { fours[place] & 15 } else { fours[place - 16] >> 4 };
        let fifth = (fifths >> place & 1) as u8;
        *number = scale * f32::from((low | fifth << 4) as i8 - 16);
    }
}

/// Scale (f16), 32 signed bytes.
fn q8_0_block(block: &[u8], numbers: &mut [f32]) {
    let scale = half_at(block, 0);
    for (byte, number) in block[2..].iter().zip(numbers) {
        *number = f32::from(*byte as i8) * scale;
    }
}

/// Two f16 scales, eight pairs of six-bit scale and minimum in 12 bytes, 256 numbers of four bits in groups of 64: the low
/// halves of 32 bytes, then their high halves.
fn q4_k_block(block: &[u8], numbers: &mut [f32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let (packed, fours) = (&block[4..16], &block[16..144]);
    for (group, numbers) in numbers.chunks_mut(32).enumerate() {
        let (group_scale, group_minimum) = q4_k_scale(packed, group);
        let (factor, offset) = (scale * f32::from(group_scale), minimum * f32::from(group_minimum));
        let bytes = &fours[group / 2 * 32..][..32];
        for (byte, number) in bytes.iter().zip(numbers) {
            let four = if group % 2 == 0 { byte & 15 } else { byte >> 4 };
            *number = factor * f32::from(four) - offset;
        }
    }
}

/// The `group`-th six-bit scale and minimum. Of the last four, the upper two bits are those of the first eight bytes.
fn q4_k_scale(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (packed[group] & 63, packed[group + 4] & 63);
    }
    let scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4;
    let minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
    (scale, minimum)
}

/// 128 bytes of low halves, 64 bytes of upper two bits, 16 signed scales, an f16 scale. Centred at 32.
fn q6_k_block(block: &[u8], numbers: &mut [f32]) {
    let (lows, highs, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = half_at(block, 208);
    for (place, number) in numbers.iter_mut().enumerate() {
        // Each half of 128 numbers: 64 bytes of low halves and 32 of upper bits, of which number n takes bits 2·(n / 32).
        let (half, within) = (place / 128, place % 128);
        let byte = lows[half * 64 + within % 64];
        let low = if within < 64 { byte & 15 } else { byte >> 4 };
        let high = highs[half * 32 + within % 32] >> (within / 32 * 2) & 3;
        let factor = scale * f32::from(scales[place / 16] as i8);
        *number = factor * f32::from((low | high << 4) as i8 - 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, block: &[u8]) -> Vec<f32> {
        let layout = LAYOUTS.into_iter().find(|layout| layout.name == name).unwrap();
        assert_eq!(block.len() % layout.bytes, 0);
        let mut numbers = vec![0.0; block.len() / layout.bytes * layout.elements];
        layout.dequantize(block, &mut numbers);
        numbers
    }

    fn half(number: f32) -> [u8; 2] {
        f16::from_f32(number).to_le_bytes()
    }

    #[test]
    fn plain_types() {
        assert_eq!(read("F32", &[1.5f32.to_le_bytes(), (-2.0f32).to_le_bytes()].concat()), [1.5, -2.0]);
        assert_eq!(read("F16", &half(-0.25)), [-0.25]);
        assert_eq!(read("BF16", &[0x80, 0x3f]), [1.0]);
    }

    #[test]
    fn q8_0_is_signed() {
        let block = [half(0.5).to_vec(), (0..32).map(|place| (place - 16) as u8).collect()].concat();
        let expected: Vec<f32> = (0..32).map(|place| 0.5 * (place as f32 - 16.0)).collect();
        assert_eq!(read("Q8_0", &block), expected);
    }

    #[test]
    fn q5_0_takes_its_fifth_bits_in_order() {
        // Number 0 is 3 | 16 and number 16 is 9; the fifth bit is set of 0 and 31 only.
        let mut fours = [0u8; 16];
        fours[0] = 0x93;
        fours[15] = 0xf0;
        let block = [&half(2.0)[..], &(1u32 | 1 << 31).to_le_bytes(), &fours].concat();
        let numbers = read("Q5_0", &block);
        assert_eq!((numbers[0], numbers[16], numbers[31], numbers[1]), (6.0, -14.0, 30.0, -32.0));
    }

    #[test]
    fn q4_k_joins_the_bits_of_its_scales() {
        let mut packed = [0u8; 12];
        packed[0] = 0b10_000101; // scale 5 of group 0, upper bits of the scale of group 4
        packed[4] = 0b01_000011; // minimum 3 of group 0, upper bits of the minimum of group 4
        packed[8] = 0b1100_0111; // lower bits of group 4: scale 7, minimum 12
        let mut fours = [0u8; 128];
        fours[0] = 0x2f; // number 0 is 15, number 32 is 2
        fours[64] = 0x04; // number 128, the first of group 4, is 4
        let block = [&half(0.5)[..], &half(0.25), &packed, &fours].concat();
        let numbers = read("Q4_K", &block);
        assert_eq!(numbers[0], 0.5 * 5.0 * 15.0 - 0.25 * 3.0);
        assert_eq!(numbers[32], 0.0, "group 1 has the scale 0");
        assert_eq!(numbers[128], 0.5 * f32::from(0b10_0111u8) * 4.0 - 0.25 * f32::from(0b01_1100u8));
    }

    #[test]
    fn q6_k_finds_its_upper_bits() {
        let (mut lows, mut highs, mut scales) = ([0u8; 128], [0u8; 64], [1u8; 16]);
        lows[1] = 0xa7; // low halves of the numbers 1 and 65
        highs[1] = 0b11_10_01_10; // upper bits of the numbers 1, 33, 65, 97
        scales[0] = -3i8 as u8;
        let block = [&lows[..], &highs, &scales, &half(0.5)].concat();
        let numbers = read("Q6_K", &block);
        assert_eq!(numbers[1], -1.5 * (f32::from(7u8 | 2 << 4) - 32.0));
        assert_eq!(numbers[33], 0.5 * (f32::from(1u8 << 4) - 32.0));
        assert_eq!(numbers[65], 0.5 * (f32::from(10u8 | 2 << 4) - 32.0));
        assert_eq!(numbers[97], 0.5 * (f32::from(3u8 << 4) - 32.0));
        assert_eq!(numbers[129], -16.0);
    }

    #[test]
    fn many_blocks_are_read_in_order() {
        let bytes: Vec<u8> = (0..20_000u32).flat_map(|number| (number as f32).to_le_bytes()).collect();
        assert!(read("F32", &bytes).iter().enumerate().all(|(place, number)| *number == place as f32));
    }
}
