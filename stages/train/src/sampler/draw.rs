//! From logits to tokens. The place for one fused kernel.

use tch::{Device, Kind, Tensor};

use crate::random;
use crate::sampler::{SampleKey, Settings};

/// What one row of a batch is drawn by.
pub(super) struct Row<'a> {
    pub settings: &'a Settings,
    /// In (0, 1).
    pub uniform: f64,
}

/// The random number of a request's `position`-th new token.
pub(super) fn uniform(key: &SampleKey, position: usize) -> f64 {
    let key = [key.0 as u32, (key.0 >> 32) as u32];
    let [high, low, ..] = random::philox(key, [position as u32, 0, 0, 0]);
    random::open_unit(high, low)
}

/// Draws a token of each row of logits `[n, vocab]` (f32), and gives its log-probability at the row's temperature, before
/// `top_k` and `top_p`.
///
/// A token is the first whose cumulative probability, in the order of ids, exceeds the row's random number.
pub(super) fn draw(logits: &Tensor, rows: &[Row]) -> (Vec<i64>, Vec<f32>) {
    let device = logits.device();
    let column = |value: fn(&Row) -> f64| {
        let values: Vec<f64> = rows.iter().map(value).collect();
        Tensor::from_slice(&values).unsqueeze(1).to_device(device)
    };
    let temperatures = column(|row| if row.settings.temperature == 0.0 { 1.0 } else { row.settings.temperature });
    let scaled = logits / temperatures.to_kind(Kind::Float);
    let log_probabilities = scaled.log_softmax(-1, None);
    let weights = match rows.iter().any(|row| truncates(row.settings)) {
        true => truncated(&scaled, rows).softmax(-1, Kind::Double),
        false => log_probabilities.to_kind(Kind::Double).exp(),
    };
    let cumulative = weights.cumsum(-1, None);
    let targets = column(|row| row.uniform) * cumulative.slice(1, -1, None, 1);
    let drawn = cumulative.le_tensor(&targets).sum_dim_intlist(-1, true, Kind::Int64);
    let greedy: Vec<bool> = rows.iter().map(|row| row.settings.temperature == 0.0).collect();
    let greedy = Tensor::from_slice(&greedy).unsqueeze(1).to_device(device);
    let tokens = logits.argmax(-1, true).where_self(&greedy, &drawn);
    let chosen = log_probabilities.gather(-1, &tokens, false);
    let on_host = |tensor: Tensor| tensor.flatten(0, -1).to_device(Device::Cpu);
    let tokens = Vec::<i64>::try_from(on_host(tokens)).expect("ids are i64");
    (tokens, Vec::<f32>::try_from(on_host(chosen)).expect("logits are f32"))
}

pub(super) fn truncates(settings: &Settings) -> bool {
    settings.temperature != 0.0 && (settings.top_k > 0 || settings.top_p < 1.0)
}

/// Logits with -inf where `top_k` and `top_p` leave a token out.
fn truncated(scaled: &Tensor, rows: &[Row]) -> Tensor {
    let (_, vocabulary) = scaled.size2().expect("logits have two dimensions");
    let device = scaled.device();
    let kept_ranks: Vec<i64> = rows
        .iter()
        .map(|row| match row.settings.top_k {
            k if k > 0 && truncates(row.settings) => (k as i64).min(vocabulary),
            _ => vocabulary,
        })
        .collect();
    let masses: Vec<f64> =
        rows.iter().map(|row| if truncates(row.settings) { row.settings.top_p } else { f64::INFINITY }).collect();
    let (sorted, _) = scaled.sort(-1, true);
    let ranks = Tensor::arange(vocabulary, (Kind::Int64, device)).unsqueeze(0);
    let beyond = ranks.ge_tensor(&Tensor::from_slice(&kept_ranks).unsqueeze(1).to_device(device));
    let sorted = sorted.masked_fill(&beyond, f64::NEG_INFINITY);
    let probabilities = sorted.softmax(-1, Kind::Double);
    let before = probabilities.cumsum(-1, None) - probabilities;
    let outside = before.ge_tensor(&Tensor::from_slice(&masses).unsqueeze(1).to_device(device));
    // The most likely token has nothing before it, so it stays unless top_p is 0: keep it then too.
    let outside = outside.logical_and(&ranks.gt(0)).logical_or(&beyond);
    let border = sorted.masked_fill(&outside, f64::INFINITY).amin(-1, true);
    scaled.masked_fill(&scaled.lt_tensor(&border), f64::NEG_INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits() -> Tensor {
        Tensor::from_slice(&[0.5f32, 0.05, 0.3, 0.15]).log().unsqueeze(0)
    }

    fn draw_one(settings: &Settings, uniform: f64) -> (i64, f64) {
        let (tokens, chosen) = draw(&logits(), &[Row { settings, uniform }]);
        (tokens[0], f64::from(chosen[0]).exp())
    }

    /// Probabilities of all tokens, by drawing at many random numbers.
    fn shares(settings: &Settings) -> [f64; 4] {
        let mut shares = [0.0; 4];
        for step in 0..200 {
            let (token, probability) = draw_one(settings, (f64::from(step) + 0.5) / 200.0);
            shares[token as usize] += 1.0 / 200.0;
            assert!(probability > 0.0);
        }
        shares
    }

    fn near(one: [f64; 4], other: [f64; 4]) -> bool {
        one.iter().zip(other).all(|(one, other)| (one - other).abs() < 0.006)
    }

    #[test]
    fn tokens_have_their_shares() {
        let plain = Settings::default();
        assert!(near(shares(&plain), [0.5, 0.05, 0.3, 0.15]));
        assert!(near(shares(&Settings { top_k: 2, ..plain.clone() }), [0.625, 0.0, 0.375, 0.0]));
        assert!(near(shares(&Settings { top_p: 0.75, ..plain.clone() }), [0.625, 0.0, 0.375, 0.0]));
        assert!(near(shares(&Settings { top_p: 0.81, ..plain.clone() }), [0.5263, 0.0, 0.3158, 0.1579]));
        assert!(near(shares(&Settings { top_p: 0.0, ..plain.clone() }), [1.0, 0.0, 0.0, 0.0]));
        assert!(near(shares(&Settings { temperature: 0.5, ..plain.clone() }), [0.6849, 0.0068, 0.2466, 0.0616]));
        assert!(near(shares(&Settings { temperature: 0.0, top_p: 0.1, ..plain }), [1.0, 0.0, 0.0, 0.0]));
    }

    #[test]
    fn log_probabilities_are_those_before_truncation() {
        let near = |one: f64, other: f64| (one - other).abs() < 1e-6;
        let plain = Settings::default();
        assert!(near(draw_one(&plain, 0.9).1, 0.15));
        assert!(near(draw_one(&Settings { top_k: 2, ..plain.clone() }, 0.9).1, 0.3));
        assert!(near(draw_one(&Settings { temperature: 0.0, ..plain.clone() }, 0.9).1, 0.5));
        assert!(near(draw_one(&Settings { temperature: 0.5, ..plain }, 0.1).1, 0.25 / 0.365));
    }

    #[test]
    fn rows_are_drawn_each_by_its_own_settings() {
        let (plain, greedy) = (Settings::default(), Settings { temperature: 0.0, ..Settings::default() });
        let narrow = Settings { top_k: 1, ..Settings::default() };
        let rows = [&plain, &greedy, &narrow].map(|settings| Row { settings, uniform: 0.9 });
        let (tokens, chosen) = draw(&logits().repeat([3, 1]), &rows);
        assert_eq!(tokens, [3, 0, 0]);
        assert!(
            (chosen[0].exp() - 0.15).abs() < 1e-6
                && (chosen[1].exp() - 0.5).abs() < 1e-6
                && (chosen[2].exp() - 0.5).abs() < 1e-6
        );
    }

    #[test]
    fn random_numbers_depend_on_every_part_of_the_key() {
        let base = SampleKey::of(&[1, 2, 3, 4]);
        let others = [[2, 2, 3, 4], [1, 1, 3, 4], [1, 2, 4, 4], [1, 2, 3, 3]].map(|parts| SampleKey::of(&parts));
        let mut numbers: Vec<f64> = others.iter().map(|key| uniform(key, 0)).collect();
        numbers.extend([uniform(&base, 0), uniform(&base, 1)]);
        assert_eq!(uniform(&base, 1), numbers[5]);
        numbers.sort_unstable_by(f64::total_cmp);
        numbers.dedup();
        assert_eq!(numbers.len(), 6);
    }
}
