//! How much faster a candidate is, from trials taken side by side, and when there are enough of them.
//!
//! A **trial** times the candidate and each baseline once, close together and in random order, so that what drifts
//! slowly (clocks, heat) is in both and cancels in their ratio. What is estimated is the centre of `ln(baseline /
//! candidate)`; the logarithm makes "twice as fast" and "twice as slow" mirror images, and errors of times are in
//! proportion to the times anyway.
//!
//! The centre is the **20 % trimmed mean, with the interval of Tukey and McLaughlin (1963)** and Student's t on the
//! trials that are left, as Yuen (1974) uses it for two samples and Wilcox (*Introduction to Robust Estimation and
//! Hypothesis Testing*) recommends it. Weighed against:
//! - the mean: one trial with an interrupt in it moves it by more than the 5 % that a reward hangs on;
//! - the median with its order statistics (exact whatever the noise): it needs half as many trials again for the same
//!   width, and of ten trials only the extremes are wide enough apart for repeated looks;
//! - the median with a bootstrap: its interval is too short where there are few trials, and needs random numbers.
//!
//! Trimming stands up to a fifth of the trials being wild on either side. The tests have one time in twenty wild.
//!
//! **Looking repeatedly.** [`Trials::decide`] looks after 10, 15, 22, 33, 50, 75 and 100 trials, and whoever stops at
//! the first good moment is fooled more often than the level says. So every interval here is a *repeated* one (Jennison
//! and Turnbull 1989): all the seven hold together with 95 %. Each has the same nominal level, after Pocock (1977): 2.6
//! standard errors instead of 1.96. A level that saves up for late looks (O'Brien and Fleming) would give away what
//! matters here, to stop early. The price is an interval a third wider than that of one look. Whether it is exact enough
//! is asked of the interval of one look, since nothing that is claimed hangs on that.
//!
//! Not covered: what is wrong in each trial alike, such as a baseline that was never warm.

/// After so many trials a look is taken.
const LOOKS: [usize; 7] = [10, 15, 22, 33, 50, 75, 100];

/// No plan takes more trials: the level below is for these looks.
pub const MAX_TRIALS: usize = 100;

/// Fewer trials give no interval: trimmed, they would leave two.
pub const MIN_TRIALS: usize = 5;

/// The normal deviate of each look, with which all of [`LOOKS`] hold together with 95 % (two-sided). For a normal mean
/// it is 2.53 (two million simulated paths; Pocock's table, for evenly spaced looks, has 2.485). A trimmed mean of few
/// trials follows Student's t only nearly: of 20,000 simulated candidates that are as fast as their baseline, 94.7 % were
/// covered with 2.53, and 95.5 % with 2.6.
const DEVIATE: f64 = 2.6;

/// The same of a single look.
const SINGLE_DEVIATE: f64 = 1.96;

/// The share that is cut off at either end.
const TRIM: f64 = 0.2;

/// What CUDA promises of its events: differences of times are good to about half a microsecond.
pub const EVENT_STEP_MS: f64 = 0.0005;

/// An estimate with what it could as well be.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Interval {
    /// The best guess.
    pub estimate: f64,
    /// The lower end at 95 %.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

impl Interval {
    /// Whether the whole interval lies on one side of `threshold`.
    pub fn clears(&self, threshold: f64) -> bool {
        self.low > threshold || self.high < threshold
    }
}

/// What trials are taken for.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Ratios that something depends on: each interval must lie on one side of them.
    pub thresholds: Vec<f64>,
    /// How exact ratios must be: the largest half width, as a share, of the 95 % interval of a single look.
    pub half_width: f64,
    /// At most so many trials; more than [`MAX_TRIALS`] are not taken either.
    pub max_trials: usize,
}

impl Default for Plan {
    fn default() -> Self {
        Self { thresholds: vec![1.0, 1.0 / 0.95], half_width: 0.01, max_trials: MAX_TRIALS }
    }
}

impl Plan {
    /// After how many trials to look next, when `done` are done; `None` when no more are to be taken.
    pub fn next_look(&self, done: usize) -> Option<usize> {
        let last = self.max_trials.min(MAX_TRIALS);
        let next = LOOKS.into_iter().find(|look| *look > done).map(|look| look.min(last));
        next.filter(|look| *look > done)
    }

    fn is_look(&self, done: usize) -> bool {
        LOOKS.contains(&done) || done >= self.max_trials.min(MAX_TRIALS)
    }
}

/// Whether to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// More trials are needed, or it is not yet time to look.
    Continue,
    /// All is clear, or there have been as many as there may be.
    Enough,
}

/// Times of a candidate and of its baselines.
#[derive(Clone, Debug)]
pub struct Trials {
    candidate: Vec<f64>,
    baselines: Vec<Vec<f64>>,
    step_ms: f64,
}

impl Trials {
    /// No trials yet, of a candidate beside so many baselines. A clock whose readings are multiples of `step_ms` can
    /// give ten times the same one, which is no proof of exactness: no interval is narrower than that step allows.
    pub fn new(baselines: usize, step_ms: f64) -> Self {
        Self { candidate: Vec::new(), baselines: vec![Vec::new(); baselines], step_ms }
    }

    /// Adds a trial. Returns false, and adds nothing, unless there is one time for each baseline and all are positive
    /// numbers: a time of nothing is a broken clock.
    #[must_use]
    pub fn push(&mut self, candidate_ms: f64, baselines_ms: &[f64]) -> bool {
        let mut times = baselines_ms.iter().chain([&candidate_ms]);
        if baselines_ms.len() != self.baselines.len() || !times.all(|time| time.is_finite() && *time > 0.0) {
            return false;
        }
        self.candidate.push(candidate_ms);
        for (baseline, time) in self.baselines.iter_mut().zip(baselines_ms) {
            baseline.push(*time);
        }
        true
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.candidate.len()
    }

    /// The candidate's median time; `None` without trials.
    pub fn candidate_ms(&self) -> Option<f64> {
        median(&self.candidate)
    }

    /// A baseline's median time.
    pub fn baseline_ms(&self, baseline: usize) -> Option<f64> {
        median(&self.baselines[baseline])
    }

    /// How many times faster the candidate is than a baseline; `None` under [`MIN_TRIALS`].
    pub fn speedup(&self, baseline: usize) -> Option<Interval> {
        let centre = self.centre(baseline)?;
        let (value, half) = (centre.value, centre.half_width(DEVIATE).max(self.steps(baseline)?));
        Some(Interval { estimate: value.exp(), low: (value - half).exp(), high: (value + half).exp() })
    }

    fn centre(&self, baseline: usize) -> Option<Centre> {
        let pairs = self.baselines[baseline].iter().zip(&self.candidate);
        Centre::of(pairs.map(|(baseline, candidate)| (baseline / candidate).ln()).collect())
    }

    /// How far half a step of the clock on either side moves the logarithm of their ratio.
    fn steps(&self, baseline: usize) -> Option<f64> {
        Some(self.step(self.candidate_ms()?) + self.step(self.baseline_ms(baseline)?))
    }

    /// How far half a step of the clock moves the logarithm of a time.
    fn step(&self, time_ms: f64) -> f64 {
        (self.step_ms / (2.0 * time_ms)).ln_1p()
    }

    /// Whether to take more trials. Between the planned looks it is always to go on.
    pub fn decide(&self, plan: &Plan) -> Decision {
        if !plan.is_look(self.count()) {
            return Decision::Continue;
        }
        let settled = (0..self.baselines.len()).all(|baseline| self.is_settled(baseline, plan));
        if settled || plan.next_look(self.count()).is_none() { Decision::Enough } else { Decision::Continue }
    }

    fn is_settled(&self, baseline: usize, plan: &Plan) -> bool {
        let (Some(centre), Some(ratio)) = (self.centre(baseline), self.speedup(baseline)) else { return false };
        // The clock's step is left out: more trials don't make it finer.
        let is_exact = centre.half_width(SINGLE_DEVIATE) < plan.half_width;
        // Where the ratio is within a step of a threshold, and known that well, more trials can't clear it either.
        let (steps, half) = (self.steps(baseline).unwrap_or_default(), centre.half_width(DEVIATE));
        let is_final = |threshold: f64| (centre.value - threshold.ln()).abs() + half < steps;
        is_exact && plan.thresholds.iter().all(|threshold| ratio.clears(*threshold) || is_final(*threshold))
    }
}

/// The middle one, or the mean of the middle two.
pub fn median(times: &[f64]) -> Option<f64> {
    let sorted = sorted(times.to_vec());
    let (lower, upper) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some(f64::midpoint(*lower, *upper))
}

/// The median with the interval between the two order statistics that enclose it with at least 95 %, whatever the
/// noise: of one side alone, at one look. Under six values no two do, and it is `None`.
pub fn median_interval(times: &[f64]) -> Option<Interval> {
    let sorted = sorted(times.to_vec());
    let outside = lower_tail(sorted.len(), 0.025)?;
    let (low, high) = (sorted[outside], sorted[sorted.len() - 1 - outside]);
    Some(Interval { estimate: median(&sorted)?, low, high })
}

/// The largest `k` for which `k` heads or fewer, of `n` throws of a coin, have a probability of at most `level`.
fn lower_tail(n: usize, level: f64) -> Option<usize> {
    let mut term = 0.5_f64.powi(i32::try_from(n).ok()?);
    let mut total = 0.0;
    let mut fits = None;
    for k in 0..n {
        total += term;
        if total > level {
            break;
        }
        fits = Some(k);
        term *= (n - k) as f64 / (k + 1) as f64;
    }
    fits
}

/// A trimmed mean.
struct Centre {
    value: f64,
    /// The standard error.
    error: f64,
    degrees: usize,
}

impl Centre {
    fn of(values: Vec<f64>) -> Option<Self> {
        let n = values.len();
        if n < MIN_TRIALS {
            return None;
        }
        let mut values = sorted(values);
        let cut = (TRIM * n as f64).floor() as usize;
        let value = mean(&values[cut..n - cut]);
        // Winsorized: what is cut off counts as the nearest one that is left.
        let (low, high) = (values[cut], values[n - 1 - cut]);
        values.iter_mut().for_each(|value| *value = value.clamp(low, high));
        let error = deviation(&values) / ((1.0 - 2.0 * TRIM) * (n as f64).sqrt());
        Some(Self { value, error, degrees: n - 2 * cut - 1 })
    }

    fn half_width(&self, deviate: f64) -> f64 {
        student(deviate, self.degrees) * self.error
    }
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}

/// The quantile of Student's t whose tail is that of the normal deviate `z`: the expansion of Cornish and Fisher
/// (Abramowitz and Stegun 26.7.5), good to 1 % from four degrees of freedom on.
fn student(z: f64, degrees: usize) -> f64 {
    let v = degrees as f64;
    let terms = [
        (z.powi(3) + z) / 4.0,
        (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0,
        (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0,
        (79.0 * z.powi(9) + 776.0 * z.powi(7) + 1482.0 * z.powi(5) - 1920.0 * z.powi(3) - 945.0 * z) / 92160.0,
    ];
    terms.iter().rev().fold(0.0, |sum, term| (sum + term) / v) + z
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Numbers that look random and are the same in each run (SplitMix64).
    struct Noise(u64);

    impl Noise {
        fn uniform(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut bits = self.0;
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
        }

        fn normal(&mut self) -> f64 {
            let (radius, angle) = (1.0 - self.uniform(), self.uniform());
            (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
        }

        /// A time that varies by `noise`, and now and then (`wild`) is up to four times as long.
        fn time(&mut self, centre: f64, noise: f64, wild: f64) -> f64 {
            let usual = centre * (noise * self.normal()).exp();
            if self.uniform() < wild { usual * (1.0 + 3.0 * self.uniform()) } else { usual }
        }
    }

    /// Trials of one candidate until there are enough.
    fn run(noise: &mut Noise, ratio: f64, spread: f64, wild: f64, plan: &Plan) -> Trials {
        let mut trials = Trials::new(1, 0.0);
        loop {
            let (candidate, baseline) = (noise.time(1.0, spread, wild), noise.time(ratio, spread, wild));
            assert!(trials.push(candidate, &[baseline]));
            if trials.decide(plan) == Decision::Enough {
                return trials;
            }
        }
    }

    /// How many of so many runs pass `test`, as a share.
    fn share(runs: usize, mut test: impl FnMut(&mut Noise) -> bool) -> f64 {
        let mut noise = Noise(7);
        (0..runs).filter(|_| test(&mut noise)).count() as f64 / runs as f64
    }

    fn covers(noise: &mut Noise, ratio: f64, spread: f64, wild: f64) -> bool {
        let speedup = run(noise, ratio, spread, wild, &Plan::default()).speedup(0).unwrap();
        speedup.low <= ratio && ratio <= speedup.high
    }

    #[test]
    fn trials_end_when_only_a_finer_clock_could_clear_the_threshold() {
        let plan = Plan { thresholds: vec![1.05], half_width: 0.02, max_trials: MAX_TRIALS };
        let take = |step_ms| {
            let (mut trials, mut noise) = (Trials::new(1, step_ms), Noise(3));
            while trials.count() == 0 || trials.decide(&plan) == Decision::Continue {
                assert!(trials.push(noise.time(0.04, 0.005, 0.0), &[noise.time(0.04 * 1.058, 0.005, 0.0)]));
            }
            trials
        };
        // Half a microsecond of forty on either side is 1.2 %; the threshold is 0.8 % away.
        let coarse = take(EVENT_STEP_MS);
        assert!(!coarse.speedup(0).unwrap().clears(1.05) && coarse.count() < MAX_TRIALS, "{}", coarse.count());
        assert!(take(0.0).speedup(0).unwrap().clears(1.05));
    }

    #[test]
    fn the_interval_covers_the_truth_with_outliers_and_repeated_looks() {
        for (ratio, spread) in [(1.0, 0.01), (1.05, 0.03), (1.5, 0.05), (0.3, 0.1)] {
            let covered = share(2000, |noise| covers(noise, ratio, spread, 0.05));
            assert!(covered >= 0.94, "ratio {ratio}, noise {spread}: {covered}");
        }
    }

    #[test]
    fn a_fixed_number_of_trials_is_covered_from_five_on() {
        for count in [5, 7, 10, 20, 40, 100] {
            let covered = share(2000, |noise| {
                let mut trials = Trials::new(1, 0.0);
                while trials.count() < count {
                    assert!(trials.push(noise.time(1.0, 0.03, 0.05), &[noise.time(1.2, 0.03, 0.05)]));
                }
                let speedup = trials.speedup(0).unwrap();
                speedup.low <= 1.2 && 1.2 <= speedup.high
            });
            assert!(covered >= 0.95, "{count} trials: {covered}");
        }
    }

    #[test]
    fn what_is_just_not_fast_enough_rarely_passes() {
        for (ratio, spread) in [(1.05, 0.01), (1.0 / 0.95, 0.01), (1.0 / 0.95, 0.05)] {
            let passed = share(4000, |noise| {
                let trials = run(noise, ratio, spread, 0.05, &Plan::default());
                trials.speedup(0).unwrap().low > 1.0 / 0.95
            });
            assert!(passed <= 0.028, "ratio {ratio}, noise {spread}: {passed}");
        }
    }

    #[test]
    fn what_is_clear_takes_few_trials_and_what_is_not_takes_all() {
        let mean_trials = |ratio: f64, spread: f64| {
            let mut noise = Noise(3);
            let counts = (0..500).map(|_| run(&mut noise, ratio, spread, 0.05, &Plan::default()).count());
            counts.sum::<usize>() as f64 / 500.0
        };
        assert!(mean_trials(1.5, 0.01) < 20.0, "{}", mean_trials(1.5, 0.01));
        assert!(mean_trials(1.5, 0.003) < 11.0, "{}", mean_trials(1.5, 0.003));
        assert!(mean_trials(1.0 / 0.95, 0.01) > 90.0, "{}", mean_trials(1.0 / 0.95, 0.01));
    }

    #[test]
    fn every_baseline_must_be_clear() {
        let mut trials = Trials::new(2, 0.0);
        let mut noise = Noise(1);
        for _ in 0..10 {
            assert!(trials.push(noise.time(1.0, 0.001, 0.0), &[2.0, noise.time(1.0, 0.001, 0.0)]));
        }
        let plan = Plan { thresholds: vec![1.0], ..Plan::default() };
        assert!(trials.speedup(0).unwrap().clears(1.0) && !trials.speedup(1).unwrap().clears(1.0));
        assert_eq!(trials.decide(&plan), Decision::Continue);
    }

    #[test]
    fn looks_are_the_planned_ones_and_the_last_trial_allowed() {
        let looks = |plan: &Plan| {
            let mut looks = vec![];
            while let Some(next) = plan.next_look(looks.last().copied().unwrap_or(0)) {
                looks.push(next);
            }
            looks
        };
        let of = |max_trials| looks(&Plan { max_trials, ..Plan::default() });
        assert_eq!(of(100), LOOKS);
        assert_eq!(of(1000), LOOKS);
        assert_eq!(of(40), [10, 15, 22, 33, 40]);
        assert_eq!(of(7), [7]);
    }

    #[test]
    fn trials_end_at_the_last_one_allowed_and_not_between_looks() {
        let plan = Plan { max_trials: 40, ..Plan::default() };
        let trials = run(&mut Noise(5), 1.0, 0.3, 0.0, &plan);
        assert_eq!(trials.count(), 40);
        let mut steady = Trials::new(1, 0.0);
        for count in 1..=10 {
            assert_eq!(steady.decide(&plan), Decision::Continue, "{count}");
            assert!(steady.push(1.0, &[2.0]));
        }
        assert_eq!(steady.decide(&plan), Decision::Enough);
    }

    #[test]
    fn readings_of_a_coarse_clock_are_not_taken_for_exact() {
        let mut trials = Trials::new(1, EVENT_STEP_MS);
        (0..100).for_each(|_| assert!(trials.push(0.0050, &[0.0055])));
        let speedup = trials.speedup(0).unwrap();
        assert!(speedup.low < 1.0 / 0.95 && speedup.estimate > 1.09, "{speedup:?}");
    }

    #[test]
    fn times_that_are_none_are_refused() {
        let mut trials = Trials::new(1, 0.0);
        for (candidate, baselines) in
            [(0.0, vec![1.0]), (f64::NAN, vec![1.0]), (1.0, vec![-1.0]), (1.0, vec![]), (f64::INFINITY, vec![1.0])]
        {
            assert!(!trials.push(candidate, &baselines), "{candidate} {baselines:?}");
        }
        assert_eq!((trials.count(), trials.candidate_ms(), trials.speedup(0)), (0, None, None));
    }

    #[test]
    fn quantiles_agree_with_the_tables() {
        // The tail of 2.5758 is 0.5 %, that of 1.95996 is 2.5 %.
        for (z, degrees, table) in [
            (2.5758, 5, 4.0321),
            (2.5758, 9, 3.2498),
            (2.5758, 30, 2.7500),
            (1.95996, 4, 2.7764),
            (1.95996, 60, 2.0003),
        ] {
            let found = student(z, degrees);
            assert!((found / table - 1.0).abs() < 0.01, "{z} {degrees}: {found}, in the table {table}");
        }
    }

    #[test]
    fn the_medians_interval_has_the_ranks_of_the_tables() {
        let times: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(median_interval(&times), Some(Interval { estimate: 10.5, low: 6.0, high: 15.0 }));
        assert_eq!(median_interval(&times[..6]), Some(Interval { estimate: 3.5, low: 1.0, high: 6.0 }));
        assert_eq!(median_interval(&times[..5]), None);
        assert_eq!((median(&[]), median(&[3.0, 1.0, 2.0])), (None, Some(2.0)));
    }

    proptest! {
        /// Faster and slower are mirror images, and the unit of time does not matter.
        #[test]
        fn ratios_mirror_and_scale(
            times in prop::collection::vec((0.5..2.0_f64, 0.5..2.0_f64), 5..40),
            unit in 0.01..100.0_f64,
        ) {
            let of = |pairs: &mut dyn Iterator<Item = (f64, f64)>| {
                let mut trials = Trials::new(1, 0.0);
                pairs.for_each(|(candidate, baseline)| assert!(trials.push(candidate, &[baseline])));
                trials.speedup(0).unwrap()
            };
            let there = of(&mut times.iter().copied());
            let back = of(&mut times.iter().map(|(candidate, baseline)| (*baseline, *candidate)));
            let scaled = of(&mut times.iter().map(|(candidate, baseline)| (candidate * unit, baseline * unit)));
            prop_assert!((there.estimate * back.estimate - 1.0).abs() < 1e-9);
            prop_assert!((there.low * back.high - 1.0).abs() < 1e-9);
            prop_assert!((there.low / scaled.low - 1.0).abs() < 1e-9);
            prop_assert!(there.low <= there.estimate && there.estimate <= there.high);
        }

        /// A fifth of the trials may be anything.
        #[test]
        fn wild_trials_stay_without_weight(wild in prop::collection::vec(1e-3..1e3_f64, 4), spread in 0.001..0.02_f64) {
            let mut trials = Trials::new(1, 0.0);
            let mut noise = Noise(11);
            for _ in 0..16 {
                prop_assert!(trials.push(noise.time(1.0, spread, 0.0), &[noise.time(1.5, spread, 0.0)]));
            }
            for time in wild {
                prop_assert!(trials.push(time, &[1.5]));
            }
            let speedup = trials.speedup(0).unwrap();
            prop_assert!((speedup.estimate / 1.5 - 1.0).abs() < 3.0 * spread, "{speedup:?}");
        }
    }
}
