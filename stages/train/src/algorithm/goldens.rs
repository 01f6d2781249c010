//! `cuda-agent-train goldens FILE.json`: recomputes numbers that another implementation made.
//!
//! The file holds `cases`, each with `inputs` (matrices of trajectories × tokens) and what came out of them: `gae`,
//! `policy_loss`, `value_loss`, `kl_mean`, `adaptive_kl`. Each part may be missing but the inputs. What is recomputed
//! here is what the trainer calls, cut into the generated tokens as the trainer does it.

use std::fmt::Write as _;

use serde::Deserialize;
use tch::Tensor;

use super::advantage::{gae, whiten};
use super::control::{KlCoefficient, KlEstimate, kl};
use super::loss::{Aggregation, PolicyLoss, value_terms};
use crate::TrainError;

/// The largest relative error that passes.
pub const TOLERANCE: f64 = 1e-5;

type Matrix = Vec<Vec<f64>>;

#[derive(Deserialize)]
struct File {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    inputs: Inputs,
    gae: Option<Gae>,
    #[serde(default)]
    policy_loss: Vec<Policy>,
    #[serde(default)]
    value_loss: Vec<Value>,
    kl_mean: Option<KlMean>,
    adaptive_kl: Option<Adaptive>,
}

#[derive(Deserialize)]
struct Inputs {
    rewards: Matrix,
    values: Matrix,
    mask: Matrix,
    old_logprobs: Matrix,
    new_logprobs: Matrix,
    advantages: Matrix,
    new_values: Matrix,
    gamma: f64,
    lambda: f64,
}

#[derive(Deserialize)]
struct Gae {
    raw_advantages: Matrix,
    whitened_advantages: Matrix,
    returns: Matrix,
}

#[derive(Deserialize)]
struct Policy {
    clip_low: f64,
    clip_high: f64,
    dual_clip_c: f64,
    aggregation: Aggregation,
    loss: f64,
    pg_clipfrac: f64,
    ppo_kl: f64,
    pg_clipfrac_lower: f64,
}

#[derive(Deserialize)]
struct Value {
    clip: f64,
    loss: f64,
    clipfrac: f64,
}

#[derive(Deserialize)]
struct KlMean {
    k1: f64,
    abs: f64,
    k2: f64,
    k3: f64,
}

#[derive(Deserialize)]
struct Adaptive {
    init: f64,
    target: f64,
    horizon: f64,
    n_steps: usize,
    kl: Vec<f64>,
    beta: Vec<f64>,
}

/// The largest relative error of each quantity, in the order of their first appearance.
#[derive(Debug, Default)]
pub struct Errors(Vec<(&'static str, f64, usize)>);

impl Errors {
    /// Compares a number.
    fn compare(&mut self, quantity: &'static str, found: f64, expected: f64) {
        self.compare_at_scale(quantity, found, expected, 1e-9);
    }

    /// |found − expected| / max(|expected|, `scale`).
    fn compare_at_scale(&mut self, quantity: &'static str, found: f64, expected: f64, scale: f64) {
        let error = (found - expected).abs() / expected.abs().max(scale);
        // Not a number must not pass for small.
        let error = if error.is_nan() { f64::INFINITY } else { error };
        match self.0.iter_mut().find(|(name, _, _)| *name == quantity) {
            Some((_, largest, count)) => (*largest, *count) = (largest.max(error), *count + 1),
            None => self.0.push((quantity, error, 1)),
        }
    }

    /// The largest of all; infinite where nothing was compared.
    pub fn largest(&self) -> f64 {
        self.0.iter().map(|(_, error, _)| *error).reduce(f64::max).unwrap_or(f64::INFINITY)
    }

    /// A table: quantity, number of values, largest relative error.
    pub fn table(&self) -> String {
        let mut text = format!("{:<22} {:>6}  largest relative error\n", "quantity", "values");
        for (name, error, count) in &self.0 {
            writeln!(text, "{name:<22} {count:>6}  {error:.1e}").expect("strings take any text");
        }
        text
    }
}

/// Recomputes the text of a file.
pub fn recompute(text: &str) -> Result<Errors, TrainError> {
    let file: File = serde_json::from_str(text)
        .map_err(|error| TrainError::new(format!("{error}")).with_hint("the form of the file is that of verl's goldens: cases of inputs, gae, policy_loss, value_loss, kl_mean, adaptive_kl"))?;
    let mut errors = Errors::default();
    for (index, case) in file.cases.iter().enumerate() {
        let rows = case.inputs.mask.len();
        let inputs = &case.inputs;
        let matrices = [
            &inputs.rewards,
            &inputs.values,
            &inputs.old_logprobs,
            &inputs.new_logprobs,
            &inputs.advantages,
            &inputs.new_values,
        ];
        let fits = |matrix: &&&Matrix| {
            matrix.len() == rows && matrix.iter().zip(&inputs.mask).all(|(row, mask)| row.len() == mask.len())
        };
        if matrices.iter().filter(fits).count() != matrices.len() {
            return Err(TrainError::new(format!("case {index}: the inputs are matrices of different shapes")));
        }
        case.recompute(&mut errors);
    }
    Ok(errors)
}

impl Case {
    fn masks(&self) -> Vec<Vec<bool>> {
        self.inputs.mask.iter().map(|row| row.iter().map(|value| *value > 0.5).collect()).collect()
    }

    /// The values of generated tokens, one after another.
    fn generated(&self, matrix: &Matrix) -> Vec<f64> {
        let masks = self.masks();
        let tokens = matrix.iter().zip(&masks).flat_map(|(row, mask)| row.iter().zip(mask));
        tokens.filter(|(_, counts)| **counts).map(|(value, _)| *value).collect()
    }

    fn tensor(&self, matrix: &Matrix) -> Tensor {
        Tensor::from_slice(&self.generated(matrix)).to_kind(tch::Kind::Float)
    }

    fn recompute(&self, errors: &mut Errors) {
        let (inputs, masks) = (&self.inputs, self.masks());
        let estimates: Vec<_> = (0..masks.len())
            .map(|row| gae(&inputs.rewards[row], &inputs.values[row], &masks[row], inputs.gamma, inputs.lambda))
            .collect();
        let returns: Matrix = estimates.iter().map(|estimate| estimate.returns.clone()).collect();
        let mut advantages: Matrix = estimates.into_iter().map(|estimate| estimate.advantages).collect();
        if let Some(expected) = &self.gae {
            self.compare(errors, "gae/advantages", &advantages, &expected.raw_advantages);
            self.compare(errors, "gae/returns", &returns, &expected.returns);
            whiten(&mut advantages, &masks);
            self.compare(errors, "gae/whitened", &advantages, &expected.whitened_advantages);
        }
        self.policy_losses(errors);
        self.value_losses(errors, &returns);
        if let Some(expected) = &self.kl_mean {
            let (new, old) = (self.tensor(&inputs.new_logprobs), self.tensor(&inputs.old_logprobs));
            let mean = |estimate| f64::try_from(kl(&new, &old, estimate).mean(tch::Kind::Float)).unwrap_or(f64::NAN);
            errors.compare("kl/k1", mean(KlEstimate::K1), expected.k1);
            errors.compare("kl/abs", mean(KlEstimate::Abs), expected.abs);
            errors.compare("kl/k2", mean(KlEstimate::K2), expected.k2);
            errors.compare("kl/k3", mean(KlEstimate::K3), expected.k3);
        }
        if let Some(Adaptive { init, target, horizon, n_steps, kl, beta }) = &self.adaptive_kl {
            let mut coefficient = KlCoefficient::Adaptive { beta: *init, target: *target, horizon: *horizon };
            for (kl, expected) in kl.iter().zip(beta) {
                coefficient.update(*kl, *n_steps);
                errors.compare("adaptive_kl/beta", coefficient.beta(), *expected);
            }
        }
    }

    /// Compares the generated tokens of a matrix. An entry that is small beside the others was left over from larger
    /// numbers, which the file's float32 has rounded: its error is relative to the root mean square of the matrix.
    fn compare(&self, errors: &mut Errors, quantity: &'static str, found: &Matrix, expected: &Matrix) {
        let (found, expected) = (self.generated(found), self.generated(expected));
        let squares: f64 = expected.iter().map(|value| value * value).sum();
        let scale = (squares / expected.len().max(1) as f64).sqrt();
        let pairs = found.into_iter().zip(expected);
        pairs.for_each(|(found, expected)| errors.compare_at_scale(quantity, found, expected, scale));
    }

    /// Each token's weight in the loss, in the order of generated tokens.
    fn weights(&self, aggregation: Aggregation) -> Tensor {
        let tokens: Vec<usize> =
            self.masks().iter().map(|mask| mask.iter().filter(|counts| **counts).count()).collect();
        let width = self.inputs.mask.first().map_or(0, Vec::len);
        let weights = aggregation.weights(&tokens, width);
        let each = weights.iter().zip(&tokens).flat_map(|(weight, tokens)| vec![*weight; *tokens]);
        Tensor::from_slice(&each.collect::<Vec<f64>>()).to_kind(tch::Kind::Float)
    }

    fn policy_losses(&self, errors: &mut Errors) {
        let inputs = &self.inputs;
        let (new, old) = (self.tensor(&inputs.new_logprobs), self.tensor(&inputs.old_logprobs));
        let advantages = self.tensor(&inputs.advantages);
        for expected in &self.policy_loss {
            let (clip_low, clip_high, dual_clip) = (expected.clip_low, expected.clip_high, expected.dual_clip_c);
            let terms = PolicyLoss { clip_low, clip_high, dual_clip }.terms(&new, &old, &advantages);
            let mean = |tensor: &Tensor| f64::try_from(tensor.mean(tch::Kind::Float)).unwrap_or(f64::NAN);
            let loss = (&terms.loss * self.weights(expected.aggregation)).sum(tch::Kind::Float);
            errors.compare("actor/pg_loss", f64::try_from(loss).unwrap_or(f64::NAN), expected.loss);
            errors.compare("actor/pg_clipfrac", mean(&terms.clipped), expected.pg_clipfrac);
            errors.compare("actor/pg_clipfrac_lower", mean(&terms.clipped_lower), expected.pg_clipfrac_lower);
            errors.compare("actor/ppo_kl", mean(&terms.kl), expected.ppo_kl);
        }
    }

    fn value_losses(&self, errors: &mut Errors, returns: &Matrix) {
        let (new, old) = (self.tensor(&self.inputs.new_values), self.tensor(&self.inputs.values));
        let returns = self.tensor(returns);
        for expected in &self.value_loss {
            let (loss, clipped) = value_terms(&new, &old, &returns, expected.clip);
            let loss = (loss * self.weights(Aggregation::TokenMean)).sum(tch::Kind::Float);
            errors.compare("critic/vf_loss", f64::try_from(loss).unwrap_or(f64::NAN), expected.loss);
            let clipped = f64::try_from(clipped.mean(tch::Kind::Float)).unwrap_or(f64::NAN);
            errors.compare("critic/vf_clipfrac", clipped, expected.clipfrac);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made with verl 0.9.1 on torch 2.11, CPU, float32.
    const VERL: &str = include_str!("../../tests/goldens/ppo_verl_0_9_1.json");

    #[test]
    fn verls_numbers_come_out() {
        let errors = recompute(VERL).unwrap();
        assert!(errors.largest() <= TOLERANCE, "{}", errors.table());
        assert_eq!(errors.0.len(), 14, "every quantity was compared:\n{}", errors.table());
    }

    /// The planted bugs of a trainer must not pass: an oracle that lets them through is none.
    #[test]
    fn planted_bugs_are_found() {
        let change = |part: &str, change: &dyn Fn(&mut serde_json::Value)| {
            let mut file: serde_json::Value = serde_json::from_str(VERL).unwrap();
            change(file.pointer_mut(part).unwrap());
            recompute(&file.to_string()).unwrap().largest()
        };
        let lambda = change("/cases/1/inputs/lambda", &|value| *value = 0.9501.into());
        let high = change("/cases/0/policy_loss/4/clip_high", &|value| *value = 0.2.into());
        let aggregation = change("/cases/1/policy_loss/2/aggregation", &|value| *value = "token-mean".into());
        let value = change("/cases/1/value_loss/0/clip", &|value| *value = 0.5.into());
        let shifted = change("/cases/0/inputs/old_logprobs/0", &|row| row.as_array_mut().unwrap().rotate_left(1));
        for (name, error) in [("λ", lambda), ("ε", high), ("mean", aggregation), ("clip", value), ("shift", shifted)]
        {
            assert!(error > TOLERANCE, "{name}: {error}");
        }
    }

    #[test]
    fn a_file_of_another_form_is_refused_with_its_place() {
        let error = recompute("{\"cases\": [{\"inputs\": {}}]}").unwrap_err();
        assert!(error.message.contains("missing field `rewards` at line 1"), "{error}");
        let mut file: serde_json::Value = serde_json::from_str(VERL).unwrap();
        file["cases"][0]["inputs"]["values"][0].as_array_mut().unwrap().pop();
        assert_eq!(
            recompute(&file.to_string()).unwrap_err().message,
            "case 0: the inputs are matrices of different shapes"
        );
        assert_eq!(recompute("{\"cases\": []}").unwrap().largest(), f64::INFINITY);
    }
}
