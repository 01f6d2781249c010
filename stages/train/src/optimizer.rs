//! AdamW with float32 master weights, whose whole state can be saved.
//!
//! All trained parameters lie one after another in flat float32 tensors: the master weights, two moments, and the
//! gradient. So a step is a dozen operations whatever the number of parameters, gradients of many micro-batches add up
//! in float32 although the model computes in bfloat16, several GPUs reduce one buffer, and a checkpoint is three tensors.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor, no_grad};

use crate::TrainError;
use crate::checkpoint::{read_tensors, write_tensors};
use crate::model::Parameter;
use crate::random::mix;

/// Settings that stay the same throughout a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Of the parameters that decay (matrices), times the learning rate, a step.
    pub weight_decay: f64,
    /// The gradient is scaled down to this norm where it is longer; 0 never.
    pub max_grad_norm: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, max_grad_norm: 1.0 }
    }
}

/// A parameter's place in the flat tensors.
struct Slot {
    name: String,
    tensor: Tensor,
    start: i64,
    length: i64,
}

/// The optimizer of one model.
pub struct Optimizer {
    settings: AdamW,
    slots: Vec<Slot>,
    /// The first so many elements decay.
    decaying: i64,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    steps: i64,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The norm of the gradient before it was scaled.
    pub grad_norm: f64,
    /// False where the gradient was not finite: nothing was changed.
    pub applied: bool,
}

impl Optimizer {
    /// For the trainable ones of `parameters`, which are tied to it: each step writes into them.
    pub fn new(parameters: &[Parameter], settings: AdamW) -> Self {
        let mut trained: Vec<&Parameter> = parameters.iter().filter(|parameter| parameter.trainable).collect();
        trained.sort_by_key(|parameter| !parameter.decays);
        let (mut slots, mut start, mut decaying) = (Vec::new(), 0, 0);
        for parameter in &trained {
            let length = parameter.tensor.numel() as i64;
            let (name, tensor) = (parameter.name.clone(), parameter.tensor.shallow_clone());
            slots.push(Slot { name, tensor, start, length });
            start += length;
            decaying = if parameter.decays { start } else { decaying };
        }
        let device = trained.first().map_or(Device::Cpu, |parameter| parameter.tensor.device());
        let zeros = || Tensor::zeros([start], (Kind::Float, device));
        let (master, first, second, gradient) = (zeros(), zeros(), zeros(), zeros());
        no_grad(|| {
            for slot in &slots {
                master.narrow(0, slot.start, slot.length).copy_(&slot.tensor.detach().flatten(0, -1));
            }
        });
        Self { settings, slots, decaying, master, first, second, gradient, steps: 0 }
    }

    /// Number of trained values.
    pub fn size(&self) -> i64 {
        self.master.numel() as i64
    }

    /// Steps that were applied.
    pub fn steps(&self) -> i64 {
        self.steps
    }

    /// The gradient that has been added up, for reducing it over GPUs: float32, [`Self::size`] values.
    pub fn gradient(&self) -> &Tensor {
        &self.gradient
    }

    /// A number that follows from every bit of weights and moments: processes that train together compare it. Computed where
    /// the state is, it is no digest against intent.
    pub fn fingerprint(&self) -> u64 {
        const CHUNK: i64 = 16 << 20;
        let of = |tensor: &Tensor, start: i64| {
            let length = CHUNK.min(self.size() - start);
            let bits = tensor.narrow(0, start, length).view_dtype(Kind::Int).to_kind(Kind::Int64);
            // Odd factors by place, so that values that are exchanged don't go unnoticed. Sums are modulo 2⁶⁴.
            let factors = Tensor::arange(length, (Kind::Int64, tensor.device())) * 2 + 1;
            i64::try_from((bits * factors).sum(Kind::Int64)).expect("a number") as u64
        };
        let starts = (0..self.size()).step_by(CHUNK as usize);
        let all = starts.flat_map(|start| [&self.master, &self.first, &self.second].map(|tensor| of(tensor, start)));
        no_grad(|| all.fold(self.steps as u64, |seen, number| mix(seen ^ number)))
    }

    /// Adds the parameters' gradients to the flat one and clears them. After each micro-batch.
    pub fn accumulate(&mut self) {
        no_grad(|| {
            for slot in &mut self.slots {
                let mut gradient = slot.tensor.grad();
                if gradient.defined() {
                    let mut sum = self.gradient.narrow(0, slot.start, slot.length);
                    let _ = sum.g_add_(&gradient.detach().flatten(0, -1).to_kind(Kind::Float));
                    let _ = gradient.zero_();
                }
            }
        });
    }

    /// One step with the gradient that has been added up, which is cleared.
    pub fn step(&mut self, learning_rate: f64) -> Step {
        no_grad(|| {
            let grad_norm = f64::try_from(self.gradient.norm()).unwrap_or(f64::NAN);
            let applied = grad_norm.is_finite();
            if applied {
                let most = self.settings.max_grad_norm;
                if most > 0.0 && grad_norm > most {
                    // As torch's clip_grad_norm_.
                    let _ = self.gradient.g_mul_scalar_(most / (grad_norm + 1e-6));
                }
                self.apply(learning_rate);
            }
            let _ = self.gradient.zero_();
            Step { grad_norm, applied }
        })
    }

    /// In the order of torch's AdamW, so that the two agree to the last bits of float32.
    fn apply(&mut self, learning_rate: f64) {
        self.steps += 1;
        let AdamW { beta1, beta2, epsilon, weight_decay, .. } = self.settings;
        let (correction1, correction2) = (1.0 - beta1.powi(self.steps as i32), 1.0 - beta2.powi(self.steps as i32));
        let _ = self.master.narrow(0, 0, self.decaying).g_mul_scalar_(1.0 - learning_rate * weight_decay);
        let _ = self.first.lerp_(&self.gradient, 1.0 - beta1);
        let _ = self.second.g_mul_scalar_(beta2);
        let _ = self.second.g_add_(&(self.gradient.square() * (1.0 - beta2)));
        let denominator = self.second.sqrt() / correction2.sqrt() + epsilon;
        let _ = self.master.g_sub_(&(&self.first / denominator * (learning_rate / correction1)));
        self.write_back();
    }

    fn write_back(&mut self) {
        for slot in &mut self.slots {
            let weights = self.master.narrow(0, slot.start, slot.length).view_as(&slot.tensor);
            slot.tensor.copy_(&weights);
        }
    }

    /// Writes master weights, moments, and which parameter lies where.
    pub fn save(&self, path: &Path) -> Result<(), TrainError> {
        let tensors = [("master", &self.master), ("first", &self.first), ("second", &self.second)];
        let layout: Vec<(&str, i64)> = self.slots.iter().map(|slot| (slot.name.as_str(), slot.length)).collect();
        let layout = serde_json::to_string(&layout).expect("plain data");
        let about = [("layout".to_owned(), layout), ("steps".to_owned(), self.steps.to_string())];
        write_tensors(path, &tensors, BTreeMap::from(about))
    }

    /// Takes the state that [`Self::save`] wrote, the parameters' values too. It must be of the same parameters.
    pub fn load(&mut self, path: &Path) -> Result<(), TrainError> {
        let (tensors, about) = read_tensors(path)?;
        let layout: Vec<(&str, i64)> = self.slots.iter().map(|slot| (slot.name.as_str(), slot.length)).collect();
        if about.get("layout") != Some(&serde_json::to_string(&layout).expect("plain data")) {
            let message = format!("{}: the state of an optimizer of other parameters", path.display());
            return Err(TrainError::new(message).with_hint("it belongs to another model or other settings of LoRA"));
        }
        let tensor = |name: &str| {
            let found = tensors.get(name).filter(|tensor| tensor.numel() as i64 == self.size());
            found.ok_or_else(|| TrainError::new(format!("{}: no `{name}` of {} values", path.display(), self.size())))
        };
        let (master, first, second) = (tensor("master")?, tensor("first")?, tensor("second")?);
        self.steps = about.get("steps").and_then(|steps| steps.parse().ok()).unwrap_or_default();
        no_grad(|| {
            self.master.copy_(master);
            self.first.copy_(first);
            self.second.copy_(second);
            self.write_back();
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(name: &str, values: &[f32], shape: &[i64], decays: bool) -> Parameter {
        let tensor = Tensor::from_slice(values).view(shape).set_requires_grad(true);
        Parameter { name: name.into(), tensor, trainable: true, decays }
    }

    fn parameters() -> Vec<Parameter> {
        let frozen = Parameter { trainable: false, ..parameter("frozen", &[9.0], &[1], true) };
        vec![
            parameter("bias", &[0.5, -0.5], &[2], false),
            frozen,
            parameter("weight", &[1.0, -2.0, 3.0, 0.1, 0.2, -0.3], &[3, 2], true),
        ]
    }

    /// A loss whose gradient changes from step to step.
    fn backward(parameters: &[Parameter], step: i64) {
        let (bias, weight) = (&parameters[0].tensor, &parameters[2].tensor);
        let input = Tensor::arange(3, (Kind::Float, Device::Cpu)) * (step as f64 * 0.7).sin();
        let output = (input.unsqueeze(0).matmul(weight).squeeze_dim(0) + bias).tanh();
        (output - 0.3).square().sum(Kind::Float).backward();
    }

    fn values(parameters: &[Parameter]) -> Vec<f32> {
        let all: Vec<Tensor> = parameters.iter().map(|parameter| parameter.tensor.detach().flatten(0, -1)).collect();
        Vec::try_from(Tensor::cat(&all, 0)).unwrap()
    }

    #[test]
    fn a_hundred_steps_are_those_of_torch() {
        let ours = parameters();
        let mut optimizer = Optimizer::new(&ours, AdamW { weight_decay: 0.1, max_grad_norm: 0.0, ..AdamW::default() });
        for step in 0..100 {
            backward(&ours, step);
            optimizer.accumulate();
            assert!(optimizer.step(0.01).applied);
        }
        // The same in torch's words (tests/goldens/adamw_100_steps.py).
        let expected = include_str!("../tests/goldens/adamw_100_steps.json");
        let expected: Vec<f32> = serde_json::from_str(expected).unwrap();
        for (found, expected) in values(&ours).iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }

    #[test]
    fn eight_micro_batches_are_one_batch() {
        let (one, eight) = (parameters(), parameters());
        let (mut first, mut second) =
            (Optimizer::new(&one, AdamW::default()), Optimizer::new(&eight, AdamW::default()));
        for _ in 0..5 {
            for step in 0..8 {
                backward(&one, step);
            }
            first.accumulate();
            for step in 0..8 {
                backward(&eight, step);
                second.accumulate();
            }
            assert_eq!(first.step(0.01), second.step(0.01));
        }
        assert_eq!(values(&one), values(&eight));
    }

    #[test]
    fn a_long_gradient_is_scaled_and_one_that_is_not_finite_changes_nothing() {
        let parameters = parameters();
        let mut optimizer = Optimizer::new(&parameters, AdamW::default());
        let before = values(&parameters);
        (&parameters[0].tensor * f64::NAN).sum(Kind::Float).backward();
        optimizer.accumulate();
        assert!(!optimizer.step(0.1).applied);
        assert_eq!((values(&parameters), optimizer.steps()), (before, 0));
        (&parameters[0].tensor * 1e6).sum(Kind::Float).backward();
        optimizer.accumulate();
        let step = optimizer.step(0.1);
        assert!(step.applied && step.grad_norm > 1e6);
        let first: Vec<f32> = Vec::try_from(&optimizer.first).unwrap();
        let norm = first.iter().map(|value| (value / 0.1).powi(2)).sum::<f32>().sqrt();
        assert!((norm - 1.0).abs() < 1e-4, "{norm}");
    }

    #[test]
    fn a_fingerprint_follows_from_every_bit_and_its_place() {
        let made = || {
            let parameters = parameters();
            let mut optimizer = Optimizer::new(&parameters, AdamW::default());
            backward(&parameters, 1);
            optimizer.accumulate();
            optimizer.step(0.1);
            optimizer
        };
        let own = made().fingerprint();
        assert_eq!(own, made().fingerprint());
        let changed = |change: fn(&mut Optimizer)| {
            let mut other = made();
            no_grad(|| change(&mut other));
            other.fingerprint()
        };
        assert_ne!(own, changed(|other| drop(other.master.view_dtype(Kind::Int).get(3).g_add_scalar_(1))));
        assert_ne!(own, changed(|other| drop(other.second.view_dtype(Kind::Int).get(7).g_add_scalar_(1))));
        assert_ne!(own, changed(|other| other.first = other.first.flip([0])));
        assert_ne!(own, changed(|other| other.steps += 1));
    }

    #[test]
    fn a_saved_optimizer_goes_on_with_the_same_bits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("optimizer.safetensors");
        let whole = parameters();
        let mut undisturbed = Optimizer::new(&whole, AdamW::default());
        let train = |parameters: &[Parameter], optimizer: &mut Optimizer, steps: std::ops::Range<i64>| {
            for step in steps {
                backward(parameters, step);
                optimizer.accumulate();
                optimizer.step(0.02);
            }
        };
        train(&whole, &mut undisturbed, 0..7);
        undisturbed.save(&path).unwrap();
        let resumed = parameters();
        let mut again = Optimizer::new(&resumed, AdamW::default());
        again.load(&path).unwrap();
        train(&whole, &mut undisturbed, 7..15);
        train(&resumed, &mut again, 7..15);
        assert_eq!(values(&whole), values(&resumed));
        let other = [parameter("other", &[1.0], &[1], true)];
        let error = Optimizer::new(&other, AdamW::default()).load(&path).unwrap_err();
        assert!(error.message.contains("an optimizer of other parameters"), "{error}");
    }
}
