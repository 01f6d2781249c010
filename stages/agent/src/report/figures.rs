//! From episodes to figures: for each policy, way of sampling, group and subset of tasks.
//!
//! - **pass@k**: the unbiased estimate for each task, and its mean over tasks. Of greedy episodes there is pass@1 alone.
//! - **faster_than_eager**, **faster_than_compile** (arXiv 2602.24286, §5): the share of all episodes that are correct
//!   and faster than the baseline, by any margin. A correct episode whose time is not known counts as not faster; where no
//!   correct one has a time, there is no figure.
//! - **speedup_eager**, **speedup_compile**: geometric mean over correct episodes, first within a task, then over tasks.
//!   The paper has one solution for each problem, so both are its means there.
//!
//! Tasks weigh alike, so the group `all` weighs groups by their number of tasks, as the paper's overall figures do. Episodes
//! without a verdict are in no figure. Nothing depends on the order of rows: tasks are ordered by digest.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::episodes::{Episode, Episodes, Facts, Standing, sampling};
use super::statistics::{Estimate, mean, pass_at};

/// The word for every task, among groups and among subsets.
pub const ALL: &str = "all";

/// How figures are computed.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The k of pass@k, ascending.
    pub k: Vec<usize>,
    /// Resamples of an interval.
    pub resamples: usize,
    /// Of the resampling.
    pub seed: u64,
    /// Names of the subsets, in the order of [`Facts::subsets`].
    pub subsets: Vec<String>,
    /// The least headroom of the subset of that name; `None` where headroom is not known.
    pub headroom: Option<f64>,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    /// pass@k.
    Pass(usize),
    /// Correct and faster than eager.
    FasterThanEager,
    /// Correct and faster than torch.compile.
    FasterThanCompile,
    /// How many times faster than eager.
    SpeedupEager,
    /// How many times faster than torch.compile.
    SpeedupCompile,
}

impl Metric {
    /// Its name in tables.
    pub fn word(self) -> String {
        match self {
            Self::Pass(k) => format!("pass@{k}"),
            Self::FasterThanEager => "faster_than_eager".to_owned(),
            Self::FasterThanCompile => "faster_than_compile".to_owned(),
            Self::SpeedupEager => "speedup_eager".to_owned(),
            Self::SpeedupCompile => "speedup_compile".to_owned(),
        }
    }

    /// Whether it is a geometric mean: values are logarithms until the end.
    pub fn is_speedup(self) -> bool {
        matches!(self, Self::SpeedupEager | Self::SpeedupCompile)
    }
}

/// Where a figure belongs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Sampled before greedy.
    pub greedy: bool,
    /// The group.
    pub group: String,
    /// The subset.
    pub subset: String,
    /// The metric.
    pub metric: Metric,
}

/// A figure of a policy, or the difference of two.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// The policy.
    pub policy: String,
    /// Which figure.
    pub place: Place,
    /// Its value.
    pub estimate: Estimate,
    /// Episodes of its tasks that have a verdict; of both policies for a difference.
    pub episodes: usize,
}

/// How many episodes ended in one way.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The policy.
    pub policy: String,
    /// Whether at temperature 0.
    pub greedy: bool,
    /// The group.
    pub group: String,
    /// The evaluator's word.
    pub word: String,
    /// Whether it is a verdict.
    pub counted: bool,
    /// How many.
    pub episodes: usize,
    /// Of all of the policy's episodes in the group.
    pub share: f64,
}

/// All that is reported.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// In the order in which the tables name them.
    pub policies: Vec<String>,
    /// Those with a task, in order, `all` first.
    pub groups: Vec<String>,
    /// By policy, then by place.
    pub figures: Vec<Figure>,
    /// Of each policy but the first against it.
    pub differences: Vec<Figure>,
    /// By policy, sampling and group, the most frequent first.
    pub outcomes: Vec<Outcome>,
}

/// Episodes of one task by one policy in one way of sampling, as far as they have a verdict.
type Sample<'a> = Vec<&'a Episode>;

/// For each policy and way of sampling its tasks by digest.
type Samples<'a> = BTreeMap<(&'a str, bool), BTreeMap<&'a str, Sample<'a>>>;

impl Figures {
    /// Computes them.
    pub fn of(episodes: &Episodes, settings: &Settings) -> Self {
        let mut policies: Vec<String> = Vec::new();
        for episode in &episodes.episodes {
            if !policies.contains(&episode.policy) {
                policies.push(episode.policy.clone());
            }
        }
        let groups: BTreeSet<&String> = episodes.tasks.values().filter_map(|facts| facts.group.as_ref()).collect();
        let groups: Vec<String> = [ALL.to_owned()].into_iter().chain(groups.into_iter().cloned()).collect();
        let samples = samples(&episodes.episodes);
        let slices = slices(&groups, &settings.subsets);
        let work = Work { tasks: &episodes.tasks, settings };
        let mut figures = Vec::new();
        let mut differences = Vec::new();
        for (number, policy) in policies.iter().enumerate() {
            for greedy in [false, true] {
                let Some(own) = samples.get(&(policy.as_str(), greedy)) else { continue };
                let first = samples.get(&(policies[0].as_str(), greedy)).filter(|_| number > 0);
                for (group, subset) in &slices {
                    for metric in work.metrics(greedy) {
                        let place = Place { greedy, group: group.clone(), subset: subset.clone(), metric };
                        let values = work.values(own, &place);
                        figures.extend(work.figure(policy, &place, &values));
                        if let Some(first) = first {
                            differences.extend(work.difference(policy, &place, &values, &work.values(first, &place)));
                        }
                    }
                }
            }
        }
        let outcomes = outcomes(episodes, &policies, &groups);
        Self { policies, groups, figures, differences, outcomes }
    }

    /// A policy's figure of a place.
    pub fn at(&self, policy: &str, place: &Place) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.policy == policy && figure.place == *place)
    }

    /// The difference of a place.
    pub fn difference_at(&self, policy: &str, place: &Place) -> Option<&Figure> {
        self.differences.iter().find(|figure| figure.policy == policy && figure.place == *place)
    }

    /// The places of all figures, in order.
    pub fn places(&self) -> BTreeSet<&Place> {
        self.figures.iter().map(|figure| &figure.place).collect()
    }
}

fn samples(episodes: &[Episode]) -> Samples<'_> {
    let mut samples = Samples::new();
    for episode in episodes.iter().filter(|episode| episode.standing != Standing::Unknown) {
        let tasks = samples.entry((&episode.policy, episode.greedy)).or_default();
        tasks.entry(episode.task.as_str()).or_default().push(episode);
    }
    // Sums of floating-point numbers depend on their order, and rows have none.
    let tasks = samples.values_mut().flat_map(|tasks| tasks.values_mut());
    tasks.for_each(|sample| sample.sort_by_key(|episode| episode.sample));
    samples
}

/// Groups, each with every subset of it.
fn slices(groups: &[String], subsets: &[String]) -> Vec<(String, String)> {
    let all = ALL.to_owned();
    let subsets: Vec<&String> = [&all].into_iter().chain(subsets).collect();
    groups.iter().flat_map(|group| subsets.iter().map(move |subset| (group.clone(), (*subset).clone()))).collect()
}

/// A value for each task, by digest, with its episodes.
type Values<'a> = BTreeMap<&'a str, (f64, usize)>;

struct Work<'a> {
    tasks: &'a BTreeMap<String, Facts>,
    settings: &'a Settings,
}

impl Work<'_> {
    fn metrics(&self, greedy: bool) -> Vec<Metric> {
        let pass: &[usize] = if greedy { &[1] } else { &self.settings.k };
        let pass = pass.iter().map(|k| Metric::Pass(*k));
        let others = [Metric::FasterThanEager, Metric::FasterThanCompile, Metric::SpeedupEager, Metric::SpeedupCompile];
        pass.chain(others).collect()
    }

    fn belongs(&self, task: &str, place: &Place) -> bool {
        let Some(facts) = self.tasks.get(task) else { return false };
        let subset = self.settings.subsets.iter().position(|name| *name == place.subset);
        (place.group == ALL || facts.group.as_ref() == Some(&place.group))
            && subset.is_none_or(|subset| facts.subsets[subset])
    }

    /// The values of a policy's tasks; of a speed-up their logarithms.
    fn values<'b>(&self, own: &BTreeMap<&'b str, Sample<'b>>, place: &Place) -> Values<'b> {
        let tasks = own.iter().filter(|(task, _)| self.belongs(task, place));
        let tasks: Vec<(&str, &Sample)> = tasks.map(|(task, sample)| (*task, sample)).collect();
        if !is_known(&tasks, place.metric) {
            return Values::new();
        }
        let value =
            |(task, sample): (&'b str, &Sample)| value(sample, place.metric).map(|value| (task, (value, sample.len())));
        tasks.into_iter().filter_map(value).collect()
    }

    fn figure(&self, policy: &str, place: &Place, values: &Values) -> Option<Figure> {
        let numbers: Vec<f64> = values.values().map(|(value, _)| *value).collect();
        let episodes = values.values().map(|(_, episodes)| episodes).sum();
        self.estimated(policy, place, &numbers, episodes)
    }

    /// Over the tasks that both have a value for: of a task its difference, so that how hard tasks are cancels out.
    fn difference(&self, policy: &str, place: &Place, own: &Values, first: &Values) -> Option<Figure> {
        let both = own.iter().filter_map(|(task, own)| first.get(task).map(|first| (own, first)));
        let (numbers, episodes): (Vec<f64>, Vec<usize>) =
            both.map(|(own, first)| (own.0 - first.0, own.1 + first.1)).unzip();
        self.estimated(policy, place, &numbers, episodes.iter().sum())
    }

    fn estimated(&self, policy: &str, place: &Place, numbers: &[f64], episodes: usize) -> Option<Figure> {
        let estimate = mean(numbers, self.settings.resamples, self.settings.seed)?;
        let estimate = if place.metric.is_speedup() { estimate.exp() } else { estimate };
        Some(Figure { policy: policy.to_owned(), place: place.clone(), estimate, episodes })
    }
}

/// A correct episode's speed-up over the metric's baseline.
fn speedup(episode: &Episode, metric: Metric) -> Option<f64> {
    let Standing::Correct { eager, compile } = episode.standing else { return None };
    let over_eager = matches!(metric, Metric::FasterThanEager | Metric::SpeedupEager);
    if over_eager { eager } else { compile }
}

fn is_correct(episode: &Episode) -> bool {
    matches!(episode.standing, Standing::Correct { .. })
}

/// Whether the metric can be had: without any time for the correct episodes nothing is known of speed.
fn is_known(tasks: &[(&str, &Sample)], metric: Metric) -> bool {
    let mut correct =
        tasks.iter().flat_map(|(_, sample)| sample.iter()).filter(|episode| is_correct(episode)).peekable();
    match metric {
        Metric::Pass(_) => true,
        _ => correct.peek().is_none() || correct.any(|episode| speedup(episode, metric).is_some()),
    }
}

/// A task's value; of a speed-up its logarithm.
fn value(sample: &Sample, metric: Metric) -> Option<f64> {
    let count = |keep: &dyn Fn(&Episode) -> bool| sample.iter().filter(|episode| keep(episode)).count();
    match metric {
        Metric::Pass(k) => pass_at(k, sample.len(), count(&is_correct)),
        Metric::FasterThanEager | Metric::FasterThanCompile => {
            let faster = count(&|episode| speedup(episode, metric).is_some_and(|speedup| speedup > 1.0));
            Some(faster as f64 / sample.len() as f64)
        }
        Metric::SpeedupEager | Metric::SpeedupCompile => {
            let logs: Vec<f64> = sample.iter().filter_map(|episode| speedup(episode, metric)).map(f64::ln).collect();
            (!logs.is_empty()).then(|| logs.iter().sum::<f64>() / logs.len() as f64)
        }
    }
}

fn outcomes(episodes: &Episodes, policies: &[String], groups: &[String]) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for policy in policies {
        for greedy in [false, true] {
            let own: Vec<&Episode> =
                episodes.episodes.iter().filter(|it| it.policy == *policy && it.greedy == greedy).collect();
            for group in groups {
                let of_group =
                    |episode: &&&Episode| *group == ALL || episodes.tasks[&episode.task].group.as_ref() == Some(group);
                let mut counts: BTreeMap<(&str, bool), usize> = BTreeMap::new();
                for episode in own.iter().filter(of_group) {
                    let counted = episode.standing != Standing::Unknown;
                    *counts.entry((&episode.outcome, counted)).or_default() += 1;
                }
                let all: usize = counts.values().sum();
                let mut counts: Vec<_> = counts.into_iter().collect();
                counts.sort_by_key(|(_, episodes)| std::cmp::Reverse(*episodes));
                outcomes.extend(counts.into_iter().map(|((word, counted), episodes)| Outcome {
                    policy: policy.clone(),
                    greedy,
                    group: group.clone(),
                    word: word.to_owned(),
                    counted,
                    episodes,
                    share: episodes as f64 / all as f64,
                }));
            }
        }
    }
    outcomes
}

impl Figure {
    /// A row of the table `metrics`; with `against` of `differences`.
    pub fn row(&self, against: Option<&str>) -> Value {
        let Place { greedy, group, subset, metric } = &self.place;
        let Estimate { value, low, high, tasks } = self.estimate;
        let mut row = json!({"policy": self.policy, "sampling": sampling(*greedy), "group": group, "subset": subset,
            "metric": metric.word(), "value": value, "low": low, "high": high, "tasks": tasks});
        match against {
            Some(first) => row["against"] = json!(first),
            None => row["episodes"] = json!(self.episodes),
        }
        row
    }
}

impl Outcome {
    /// A row of the table `outcomes`.
    pub fn row(&self) -> Value {
        json!({"policy": self.policy, "sampling": sampling(self.greedy), "group": self.group, "outcome": self.word,
            "counted": self.counted, "episodes": self.episodes, "share": self.share})
    }
}
