//! The least time that a device allows for a task's work: the roofline model (Williams, Waterman and Patterson 2009).
//!
//! Work takes at least its bytes over the bandwidth and its operations over the arithmetic rate, and the longer of the
//! two **binds**. What a task's spec counts are its own operations, so this is a bound on doing the same arithmetic:
//! a better algorithm (Winograd, a closed form) can beat it, and so can float32 matrix products that are put together
//! from several TF32 ones. A share above 1 is therefore a reason to look, not a proof of fraud. It can also exceed 1 a
//! little where outputs are small enough to stay in the cache.
//!
//! Elementwise operations never reach the rate of matrix units that is used here; that makes the bound less tight, no
//! less true.

use serde::{Deserialize, Serialize};

use crate::reference::Policy;
use crate::task::{DataType, TaskSpec};

/// Which arithmetic a device is measured by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arithmetic {
    /// float64, on matrix units where there are any.
    Float64,
    /// float32 as it is.
    Float32,
    /// float32 with the products' factors rounded to 10 bits.
    Tf32,
    /// float16 or bfloat16, added up in float32.
    Half,
    /// int8, added up in int32.
    Int8,
}

impl Arithmetic {
    /// That of a type. Integers other than 8 bits wide are taken to be as fast as float32.
    pub fn of(dtype: DataType) -> Self {
        match dtype {
            DataType::Float64 => Self::Float64,
            DataType::Float32 | DataType::Int16 | DataType::Int32 | DataType::Int64 => Self::Float32,
            DataType::Float16 | DataType::Bfloat16 => Self::Half,
            DataType::Bool | DataType::Uint8 | DataType::Int8 => Self::Int8,
        }
    }

    /// What float32 may be replaced by under a policy that allows it (`Tf32`, or `Half` where nearly anything passes);
    /// other types stay as they are.
    pub fn relaxed_to(self, allowed: Self) -> Self {
        if self == Self::Float32 { allowed } else { self }
    }
}

/// What a device can do at most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes a second between its memory and the chip.
    pub bytes_per_second: f64,
    /// Operations a second.
    pub float64: f64,
    /// Likewise.
    pub float32: f64,
    /// Likewise; that of float32 where a device has no TF32.
    pub tf32: f64,
    /// Likewise.
    pub half: f64,
    /// Likewise.
    pub int8: f64,
}

/// Rates in 10⁹ bytes and 10¹² operations a second, by the name that the driver reports: bandwidth, then float64,
/// float32, tf32, half, int8. From NVIDIA's data sheets ("NVIDIA H200 Tensor Core GPU", "H100 Tensor Core GPU", "A100
/// Tensor Core GPU", "HGX B200", "L40S", "L4", "A10", "V100") and, for the H20, which has no public one, its vendors'.
/// Sheets since Ampere give matrix rates with sparsity; these are the dense ones, half of them. float64 is the matrix
/// units' where there are any.
const KNOWN: &[(&str, [f64; 6])] = &[
    ("NVIDIA B200", [8000.0, 37.0, 75.0, 1100.0, 2250.0, 4500.0]),
    ("NVIDIA H200", [4800.0, 67.0, 67.0, 494.7, 989.4, 1978.9]),
    ("NVIDIA H200 NVL", [4800.0, 60.0, 60.0, 417.5, 835.5, 1670.5]),
    ("NVIDIA H100 80GB HBM3", [3350.0, 67.0, 67.0, 494.7, 989.4, 1978.9]),
    ("NVIDIA H100 NVL", [3900.0, 60.0, 60.0, 417.5, 835.5, 1670.5]),
    ("NVIDIA H100 PCIe", [2000.0, 51.0, 51.0, 378.0, 756.0, 1513.0]),
    ("NVIDIA H20", [4000.0, 1.0, 44.0, 74.0, 148.0, 296.0]),
    ("NVIDIA A100-SXM4-80GB", [2039.0, 19.5, 19.5, 156.0, 312.0, 624.0]),
    ("NVIDIA A100-SXM4-40GB", [1555.0, 19.5, 19.5, 156.0, 312.0, 624.0]),
    ("NVIDIA A100 80GB PCIe", [1935.0, 19.5, 19.5, 156.0, 312.0, 624.0]),
    ("NVIDIA A100-PCIE-40GB", [1555.0, 19.5, 19.5, 156.0, 312.0, 624.0]),
    ("NVIDIA L40S", [864.0, 1.4, 91.6, 183.0, 362.0, 733.0]),
    ("NVIDIA L4", [300.0, 0.5, 30.3, 60.0, 121.0, 242.0]),
    ("NVIDIA A10", [600.0, 0.5, 31.2, 62.5, 125.0, 250.0]),
    ("Tesla V100-SXM2-32GB", [900.0, 7.8, 15.7, 15.7, 125.0, 62.8]),
    ("Tesla V100-SXM2-16GB", [900.0, 7.8, 15.7, 15.7, 125.0, 62.8]),
];

impl Limits {
    /// Those of a GPU, by the name that its driver reports; `None` for one that is not listed. A name must be the whole
    /// one, since models of one family differ by half.
    pub fn of(name: &str) -> Option<Self> {
        let (_, [bandwidth, float64, float32, tf32, half, int8]) = *KNOWN.iter().find(|(known, _)| *known == name)?;
        let rate = |tera: f64| tera * 1e12;
        Some(Self {
            bytes_per_second: bandwidth * 1e9,
            float64: rate(float64),
            float32: rate(float32),
            tf32: rate(tf32),
            half: rate(half),
            int8: rate(int8),
        })
    }

    /// Operations a second in this arithmetic.
    pub fn operations(&self, arithmetic: Arithmetic) -> f64 {
        match arithmetic {
            Arithmetic::Float64 => self.float64,
            Arithmetic::Float32 => self.float32,
            Arithmetic::Tf32 => self.tf32,
            Arithmetic::Half => self.half,
            Arithmetic::Int8 => self.int8,
        }
    }
}

/// Which of a device's limits binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Moving the bytes takes longer.
    Memory,
    /// Computing does.
    Arithmetic,
}

/// The least time for some work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Roofline {
    /// In milliseconds.
    pub ms: f64,
    /// What it comes from.
    pub bound: Bound,
}

impl Roofline {
    /// The least time for so many operations and bytes.
    pub fn new(flops: u64, bytes: u64, arithmetic: Arithmetic, limits: &Limits) -> Self {
        let memory = bytes as f64 / limits.bytes_per_second * 1e3;
        let computing = flops as f64 / limits.operations(arithmetic) * 1e3;
        if computing > memory {
            Self { ms: computing, bound: Bound::Arithmetic }
        } else {
            Self { ms: memory, bound: Bound::Memory }
        }
    }

    /// Its share of a time: 1 is as good as the device allows.
    pub fn share(&self, candidate_ms: f64) -> f64 {
        self.ms / candidate_ms
    }
}

/// The least time of a task on a device, in the fastest arithmetic that its policy lets a candidate use; `None` for a
/// device whose limits are not known.
pub fn of_task(spec: &TaskSpec, policy: Policy, device: &str) -> Option<Roofline> {
    let arithmetic = Arithmetic::of(spec.outputs.first()?.dtype).relaxed_to(match policy {
        Policy::Strict => Arithmetic::Float32,
        Policy::Tf32 => Arithmetic::Tf32,
        Policy::Paper => Arithmetic::Half,
    });
    Some(Roofline::new(spec.flops, spec.bytes, arithmetic, &Limits::of(device)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn h200() -> Limits {
        Limits::of("NVIDIA H200").unwrap()
    }

    #[test]
    fn an_elementwise_task_is_bound_by_memory_and_a_product_by_arithmetic() {
        let relu = Roofline::new(1 << 28, 2 << 30, Arithmetic::Float32, &h200());
        assert_eq!(relu.bound, Bound::Memory);
        assert!((relu.ms - 0.4474).abs() < 1e-3, "{}", relu.ms);
        let product = Roofline::new(2 * 8192_u64.pow(3), 3 * 2 * 8192 * 8192, Arithmetic::Half, &h200());
        assert_eq!(product.bound, Bound::Arithmetic);
        assert!((product.ms - 1.1113).abs() < 1e-3, "{}", product.ms);
        // A product that was measured at 799 TFLOP/s.
        let share = product.share(2.0 * 8192_f64.powi(3) / 799e12 * 1e3);
        assert!((share - 0.8076).abs() < 1e-3, "{share}");
    }

    #[test]
    fn a_gpu_is_known_by_its_whole_name() {
        assert!(Limits::of("NVIDIA H100 PCIe").unwrap().bytes_per_second < h200().bytes_per_second);
        assert_eq!(Limits::of("NVIDIA H100"), None);
        assert_eq!(Limits::of("NVIDIA H200 MIG 1g.18gb"), None);
    }

    #[test]
    fn lower_precision_is_never_slower() {
        for (name, _) in KNOWN {
            let limits = Limits::of(name).unwrap();
            let order = [limits.float64, limits.float32, limits.tf32, limits.half];
            assert!(order.is_sorted(), "{name}: {order:?}");
        }
    }

    #[test]
    fn only_float32_can_be_relaxed() {
        assert_eq!(Arithmetic::of(DataType::Float32).relaxed_to(Arithmetic::Tf32), Arithmetic::Tf32);
        assert_eq!(Arithmetic::of(DataType::Float64).relaxed_to(Arithmetic::Tf32), Arithmetic::Float64);
        assert_eq!(Arithmetic::of(DataType::Bfloat16).relaxed_to(Arithmetic::Tf32), Arithmetic::Half);
    }

    proptest! {
        #[test]
        fn more_work_never_takes_less_time(flops in 0..1_u64 << 50, bytes in 1..1_u64 << 40, more in 0..1_u64 << 40) {
            let least = |flops, bytes| Roofline::new(flops, bytes, Arithmetic::Tf32, &h200()).ms;
            prop_assert!(least(flops + more, bytes) >= least(flops, bytes));
            prop_assert!(least(flops, bytes + more) >= least(flops, bytes));
        }
    }
}
