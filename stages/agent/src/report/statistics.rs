//! Estimates over tasks, with intervals.
//!
//! Tasks are what is drawn from a population, episodes are not: the samples of one task resemble each other, so an interval
//! over episodes would be too narrow. Each figure is a mean of one value for each task, and its interval is that of the
//! percentile bootstrap over tasks (Efron and Tibshirani 1993, chapter 13): tasks are drawn with replacement, as many as
//! there are, and the interval holds the middle 95 % of the means. It covers who else could have been drawn as a task, and
//! nothing else: neither another seed of sampling nor another training run. Equal values have an interval without width.

/// A mean over tasks and its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The mean.
    pub value: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Number of tasks.
    pub tasks: usize,
}

impl Estimate {
    /// The same of a quantity whose logarithm this is: a geometric mean.
    pub fn exp(self) -> Self {
        Self { value: self.value.exp(), low: self.low.exp(), high: self.high.exp(), tasks: self.tasks }
    }
}

/// The mean of `values`, one for each task in an order that doesn't depend on the input's; `None` without any.
///
/// Equal `seed`, `resamples` and number of values draw the same places, so two policies with the same tasks are resampled
/// alike.
pub fn mean(values: &[f64], resamples: usize, seed: u64) -> Option<Estimate> {
    let count = values.len();
    if count == 0 {
        return None;
    }
    let mut random = SplitMix(seed);
    let mut means: Vec<f64> =
        (0..resamples).map(|_| (0..count).map(|_| values[random.below(count)]).sum::<f64>() / count as f64).collect();
    means.sort_unstable_by(f64::total_cmp);
    let value = values.iter().sum::<f64>() / count as f64;
    Some(Estimate { value, low: quantile(&means, 0.025), high: quantile(&means, 0.975), tasks: count })
}

/// A quantile of sorted values, by linear interpolation between the two nearest (Hyndman and Fan's type 7).
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let (below, part) = (place.floor() as usize, place.fract());
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * part
}

/// The unbiased estimate of pass@k from `correct` of `episodes` (Chen et al. 2021): the probability that `k` of them,
/// drawn without replacement, hold a correct one. `None` with fewer than `k` episodes.
pub fn pass_at(k: usize, episodes: usize, correct: usize) -> Option<f64> {
    if k == 0 || episodes < k {
        return None;
    }
    let wrong = episodes - correct;
    // Without enough wrong ones every draw has a correct one.
    if wrong < k {
        return Some(1.0);
    }
    let none: f64 = (0..k).map(|drawn| (wrong - drawn) as f64 / (episodes - drawn) as f64).product();
    Some(1.0 - none)
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; its bias is below `bound` in 2⁶⁴.
    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 − C(2, 2)/C(4, 2) = 5/6 and so on, by hand.
    #[test]
    fn pass_at_k_is_that_of_drawing_without_replacement() {
        assert_eq!(pass_at(1, 4, 1), Some(0.25));
        assert!((pass_at(2, 4, 2).unwrap() - 5.0 / 6.0).abs() < 1e-12);
        assert!((pass_at(2, 4, 1).unwrap() - 0.5).abs() < 1e-12);
        assert_eq!(pass_at(4, 4, 1), Some(1.0));
        assert_eq!(pass_at(4, 4, 0), Some(0.0));
        assert_eq!(pass_at(3, 10, 8), Some(1.0));
        assert_eq!((pass_at(5, 4, 4), pass_at(0, 4, 4)), (None, None));
    }

    /// The first numbers of SplitMix64 from seed 1234567, as its authors' code gives them.
    #[test]
    fn random_numbers_are_splitmixs() {
        let mut random = SplitMix(1_234_567);
        let drawn = [random.next(), random.next(), random.next()];
        assert_eq!(drawn, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn quantiles_lie_between_the_nearest_values() {
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.5), 2.0);
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.75), 3.0);
        assert_eq!(quantile(&[5.0], 0.975), 5.0);
    }

    /// The mean of two values, 0 and 1, is 0, ½ or 1 with probabilities ¼, ½ and ¼; one value has no spread.
    #[test]
    fn intervals_of_one_and_two_tasks() {
        let two = mean(&[0.0, 1.0], 1000, 7).unwrap();
        assert_eq!(two, Estimate { value: 0.5, low: 0.0, high: 1.0, tasks: 2 });
        let one = mean(&[0.25], 1000, 7).unwrap();
        assert_eq!(one, Estimate { value: 0.25, low: 0.25, high: 0.25, tasks: 1 });
        assert_eq!(mean(&[], 1000, 7), None);
    }

    /// A resampled number of ones among 30 values of which 26 are ones is binomial: P(X ≤ 21) = 0.0136, P(X ≤ 22) = 0.0387,
    /// P(X ≤ 28) = 0.9233 and P(X ≤ 29) = 0.9863. So the quantiles are 22 and 29.
    #[test]
    fn the_interval_of_a_share_is_the_binomials() {
        let values: Vec<f64> = (0..30).map(|task| f64::from(task < 26)).collect();
        let estimate = mean(&values, 20_000, 1).unwrap();
        assert_eq!((estimate.value, estimate.low, estimate.high), (26.0 / 30.0, 22.0 / 30.0, 29.0 / 30.0));
    }
}
