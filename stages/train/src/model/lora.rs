//! Low-rank adapters (LoRA, arXiv 2106.09685), in a form whose forward pass is that of the merged weight, bit by bit.
//!
//! The usual form adds s·B(A·x) to W·x, and in bf16 that is not what the merged weight W' = W + s·BA gives: sampler and
//! trainer would differ. Here both multiply by the rounded W', and the trainer adds a product that is zero and has the
//! gradients of A and B; W'·x has that of x. With u = A·detach(x) it is s·[u − detach(u), detach(u)] times
//! [detach(B), B − detach(B)]: one product of twice the rank that is added in place, so that no further tensor of the
//! output's size is made.

use std::cell::RefCell;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::random;

/// Which adapters a model gets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// Rows of A, columns of B.
    pub rank: i64,
    /// The product is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Last parts of the names of the projections that get one.
    pub targets: Vec<String>,
}

/// The projections that can have an adapter.
pub const TARGETS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

impl LoraConfig {
    /// Adapters of this rank on all projections, `alpha` twice the rank.
    pub fn all(rank: i64) -> Self {
        Self { rank, alpha: 2.0 * rank as f64, targets: TARGETS.map(str::to_owned).into() }
    }
}

impl LoraConfig {
    /// The same with its targets in order: two that adapt the same projections are equal.
    pub(super) fn sorted(&self) -> Self {
        let mut sorted = self.clone();
        sorted.targets.sort_unstable();
        sorted
    }
}

/// A linear layer, `y = x·Wᵀ + b`, with or without an adapter.
pub struct Linear {
    /// `[out, in]`, in the compute type.
    pub(super) weight: Tensor,
    /// `[out]`.
    pub(super) bias: Option<Tensor>,
    adapter: Option<Adapter>,
}

struct Adapter {
    /// `[rank, in]`, f32.
    a: Tensor,
    /// `[out, rank]`, f32.
    b: Tensor,
    scale: f64,
    merged: RefCell<Option<Merged>>,
}

/// W' as it was when the three tensors had these versions; torch counts a version at each change in place.
struct Merged {
    versions: [i64; 3],
    weight: Tensor,
}

impl Linear {
    pub(super) fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias, adapter: None }
    }

    /// Adds an adapter that changes nothing yet, and returns its A (uniform, as PEFT draws it) and B (zero).
    pub(super) fn adapt(&mut self, rank: i64, scale: f64, key: [u32; 2]) -> (Tensor, Tensor) {
        let (out, width) = self.weight.size2().expect("a weight is a matrix");
        let device = self.weight.device();
        let bound = 1.0 / (width as f64).sqrt();
        let drawn = random::uniform(key, (rank * width) as usize, -bound, bound);
        let a = Tensor::from_slice(&drawn).reshape([rank, width]).to_device(device).set_requires_grad(true);
        let b = Tensor::zeros([out, rank], (Kind::Float, device)).set_requires_grad(true);
        let handles = (a.shallow_clone(), b.shallow_clone());
        self.adapter = Some(Adapter { a, b, scale, merged: RefCell::new(None) });
        handles
    }

    /// The weight that inference multiplies by: W, or W' where there is an adapter.
    pub fn effective(&self) -> Tensor {
        match &self.adapter {
            None => self.weight.shallow_clone(),
            Some(adapter) => adapter.merged(&self.weight),
        }
    }

    /// `[n, in]` to `[n, out]`.
    pub fn forward(&self, input: &Tensor) -> Tensor {
        let Some(adapter) = &self.adapter else {
            return input.linear(&self.weight, self.bias.as_ref());
        };
        let mut output = input.linear(&adapter.merged(&self.weight), self.bias.as_ref());
        match adapter.gradient_path(input) {
            Some((rows, columns)) => output.addmm_(&rows, &columns),
            None => output,
        }
    }
}

impl Adapter {
    /// W' = W + s·BA, rounded once to the weight's type. Made anew when one of the three was changed in place.
    fn merged(&self, weight: &Tensor) -> Tensor {
        let versions = [weight, &self.a, &self.b].map(Tensor::internal_version);
        let mut cached = self.merged.borrow_mut();
        if cached.as_ref().is_none_or(|merged| merged.versions != versions) {
            let weight = tch::no_grad(|| {
                let product = self.b.matmul(&self.a) * self.scale;
                (weight.to_kind(Kind::Float) + product).to_kind(weight.kind())
            });
            *cached = Some(Merged { versions, weight });
        }
        cached.as_ref().expect("it was just made").weight.shallow_clone()
    }

    /// The factors `[n, 2 · rank]` and `[2 · rank, out]` of the product that is zero, in the input's type; or nothing where no
    /// gradient is wanted.
    fn gradient_path(&self, input: &Tensor) -> Option<(Tensor, Tensor)> {
        // A view of a leaf needs a gradient unless gradients are off: tch has no other way to ask.
        if !self.a.narrow(0, 0, 1).requires_grad() {
            return None;
        }
        let (a, b) = (self.a.to_kind(input.kind()), self.b.to_kind(input.kind()) * self.scale);
        let rows = input.detach().linear::<Tensor>(&a, None);
        let (known, fixed) = (rows.detach(), b.detach());
        let rows = Tensor::cat(&[rows - &known, known], -1);
        let columns = Tensor::cat(&[&fixed, &(&b - &fixed)], 1);
        Some((rows, columns.transpose(0, 1)))
    }
}
