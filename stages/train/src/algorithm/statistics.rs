//! Means over tokens that count.

/// Added to a count of tokens before it divides, as verl does: 0 tokens have a mean of 0.
const COUNT_EPSILON: f64 = 1e-8;

/// The mean of `values` where `mask` holds; 0 where it holds nowhere.
pub fn masked_mean(values: &[f64], mask: &[bool]) -> f64 {
    let (sum, count) = masked(values, mask).fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / (count + COUNT_EPSILON)
}

/// The variance of `values` where `mask` holds, with Bessel's correction; 0 for fewer than two values.
pub fn masked_variance(values: &[f64], mask: &[bool]) -> f64 {
    let mean = masked_mean(values, mask);
    let (sum, count) =
        masked(values, mask).fold((0.0, 0.0), |(sum, count), value| (sum + (value - mean).powi(2), count + 1.0));
    if count < 2.0 { 0.0 } else { sum / (count - 1.0) }
}

/// How much of the variance of `returns` the critic's `values` explain: 1 is all of it, 0 what a constant would, less
/// than 0 worse than a constant. As verl: `1 − Var(returns − values) / (Var(returns) + 1e-5)`.
pub fn explained_variance(values: &[f64], returns: &[f64], mask: &[bool]) -> f64 {
    let residuals: Vec<f64> = returns.iter().zip(values).map(|(r, v)| r - v).collect();
    1.0 - masked_variance(&residuals, mask) / (masked_variance(returns, mask) + 1e-5)
}

fn masked<'a>(values: &'a [f64], mask: &'a [bool]) -> impl Iterator<Item = f64> + 'a {
    assert_eq!(values.len(), mask.len(), "a mask has one entry a value");
    values.iter().zip(mask).filter(|(_, counts)| **counts).map(|(value, _)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_masked_values_count() {
        let (values, mask) = ([1.0, 100.0, 3.0], [true, false, true]);
        assert!((masked_mean(&values, &mask) - 2.0).abs() < 1e-7);
        assert!((masked_variance(&values, &mask) - 2.0).abs() < 1e-7);
        assert_eq!(masked_mean(&values, &[false; 3]), 0.0);
        assert_eq!(masked_variance(&values, &[false, true, false]), 0.0);
    }

    #[test]
    fn a_critic_that_knows_the_returns_explains_them_and_a_constant_nothing() {
        let (returns, mask) = ([1.0, -2.0, 0.5, 4.0], [true; 4]);
        assert!(explained_variance(&returns, &returns, &mask) > 0.9999);
        assert!(explained_variance(&[7.0; 4], &returns, &mask).abs() < 1e-5);
        let wrong: Vec<f64> = returns.iter().map(|r| -r).collect();
        assert!(explained_variance(&wrong, &returns, &mask) < -2.0);
    }
}
