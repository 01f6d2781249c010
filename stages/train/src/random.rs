//! Random numbers that depend on a key and a counter and on nothing else: Philox 4×32 with ten rounds.
//!
//! Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the generator of cuRAND and of
//! torch on a GPU. There is no state to store or to share: the number at a counter is the same in any order, on any
//! thread and in any batch.

/// One block: four independent 32-bit numbers of `counter` under `key`.
pub fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let (mut key, mut block) = (key, counter);
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let first = u64::from(MULTIPLIERS[0]) * u64::from(block[0]);
        let second = u64::from(MULTIPLIERS[1]) * u64::from(block[2]);
        block = [
            (second >> 32) as u32 ^ block[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ block[3] ^ key[1],
            first as u32,
        ];
    }
    block
}

/// One 64-bit number out of another, all of its bits mixed (SplitMix64's finaliser). Equal in, equal out.
pub fn mix(value: u64) -> u64 {
    let mut bits = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// A key out of several parts, in order.
pub fn key(parts: &[u64]) -> [u32; 2] {
    let mixed = parts.iter().fold(0, |bits, part| mix(bits ^ mix(*part)));
    [mixed as u32, (mixed >> 32) as u32]
}

/// A number in (0, 1), never 0 and never 1: 53 bits and a half, so that its logarithm is finite.
pub fn open_unit(high: u32, low: u32) -> f64 {
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    (bits as f64 + 0.5) / (1u64 << 53) as f64
}

/// `count` numbers of N(0, deviation²), by Box and Muller.
pub fn normal(key: [u32; 2], count: usize, deviation: f64) -> Vec<f32> {
    let mut numbers = Vec::with_capacity(count + 1);
    let mut block = 0u64;
    while numbers.len() < count {
        let [a, b, c, d] = philox(key, [block as u32, (block >> 32) as u32, 0, 0]);
        let radius = deviation * (-2.0 * open_unit(a, b).ln()).sqrt();
        let (sine, cosine) = (std::f64::consts::TAU * open_unit(c, d)).sin_cos();
        numbers.push((radius * cosine) as f32);
        numbers.push((radius * sine) as f32);
        block += 1;
    }
    numbers.truncate(count);
    numbers
}

/// `count` numbers spread evenly over (low, high).
pub fn uniform(key: [u32; 2], count: usize, low: f64, high: f64) -> Vec<f32> {
    let number = |high_bits, low_bits| (low + (high - low) * open_unit(high_bits, low_bits)) as f32;
    (0..count.div_ceil(2) as u64)
        .flat_map(|block| {
            let [a, b, c, d] = philox(key, [block as u32, (block >> 32) as u32, 0, 0]);
            [number(a, b), number(c, d)]
        })
        .take(count)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' library Random123 (`kat_vectors`, philox4x32, 10 rounds).
    #[test]
    fn philox_gives_the_numbers_of_its_authors() {
        assert_eq!(philox([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 2], [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox([0xa409_3822, 0x299f_31d0], counter), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn normal_numbers_have_the_moments_of_a_normal_distribution() {
        let numbers = normal(key(&[7]), 100_001, 2.0);
        let mean = numbers.iter().map(|&number| f64::from(number)).sum::<f64>() / numbers.len() as f64;
        let moment = |power: i32| {
            numbers.iter().map(|&number| ((f64::from(number) - mean) / 2.0).powi(power)).sum::<f64>()
                / numbers.len() as f64
        };
        assert_eq!(numbers.len(), 100_001);
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((moment(2) - 1.0).abs() < 0.02 && (moment(4) - 3.0).abs() < 0.15, "{} {}", moment(2), moment(4));
        assert_ne!(numbers[..4], normal(key(&[8]), 4, 2.0));
    }
}
