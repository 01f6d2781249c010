//! Which rows are published: the first of each category that no cap forbids, as many as its share of the count.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use super::caps::{Budget, Cap, Caps, Groups};

/// The categories of CUDA-Agent-Ops-6K with their rows, in the order of the paper's table: the default weights.
pub const PAPER_ROWS: [(&str, f64); 6] = [
    ("torch#1", 204.0),
    ("torch#2", 5026.0),
    ("torch#3", 457.0),
    ("torch#4", 168.0),
    ("torch#5", 74.0),
    ("transformers", 71.0),
];

/// A row to choose from.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its category.
    pub category: String,
    /// What it counts towards.
    pub groups: Groups,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Quota {
    /// Rows in all; `None` takes every row that no cap forbids.
    pub count: Option<usize>,
    /// Category → weight; a category without one is left out, unless every row is taken.
    pub weights: BTreeMap<String, f64>,
    /// Whether the others make up for what a category lacks.
    pub refill: bool,
    /// How often operators may occur.
    pub caps: Caps,
}

/// What was chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Indices of rows, ascending.
    pub rows: Vec<usize>,
    /// Categories that had fewer rows than their quota, or of which nothing is published.
    pub short: Vec<Shortfall>,
    /// Rows that were passed over, by the first cap that they were over.
    pub passed_over: BTreeMap<Cap, usize>,
}

/// A category that could not fill its quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// The category.
    pub category: String,
    /// Rows that its share asks for.
    pub wanted: usize,
    /// Rows that there are.
    pub found: usize,
    /// Rows that were taken.
    pub taken: usize,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { category, wanted, found, taken } = self;
        match (found, taken) {
            (0, _) => write!(f, "{category}: no task passed"),
            (found, 0) => {
                write!(f, "{category}: none of {found} tasks is published, the count is too small for it, or the caps")
            }
            (found, taken) if found > taken && taken < wanted => {
                write!(f, "{category}: its share asked for {wanted} tasks, {found} passed, the caps left {taken}")
            }
            _ => write!(f, "{category}: its share asked for {wanted} tasks, {found} passed"),
        }
    }
}

/// A category's part of the published rows beside its part of the weights, both in percent.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// The category.
    pub category: String,
    /// Rows of it.
    pub rows: usize,
    /// Percent of the rows.
    pub percent: f64,
    /// Percent that its weight asks for.
    pub asked: f64,
}

impl Share {
    /// Percentage points above what was asked for.
    pub fn deviation(&self) -> f64 {
        self.percent - self.asked
    }
}

/// The shares of rows of these categories, for each that has a row or a weight, in the order of the names.
pub fn shares<'a>(categories: impl IntoIterator<Item = &'a str>, weights: &BTreeMap<String, f64>) -> Vec<Share> {
    let mut counts: BTreeMap<&str, usize> =
        weights.iter().filter(|(_, weight)| **weight > 0.0).map(|(name, _)| (name.as_str(), 0)).collect();
    for category in categories {
        *counts.entry(category).or_default() += 1;
    }
    let rows = counts.values().sum::<usize>().max(1) as f64;
    let sum: f64 = weights.values().sum();
    let share = |(category, count): (&str, usize)| Share {
        category: category.to_owned(),
        rows: count,
        percent: 100.0 * count as f64 / rows,
        asked: 100.0 * weights.get(category).copied().unwrap_or(0.0) / sum,
    };
    counts.into_iter().map(share).collect()
}

/// What the weights ask of each category, of `count` rows.
pub fn wanted(count: usize, weights: &BTreeMap<String, f64>) -> BTreeMap<&str, usize> {
    let parts = apportion(count, &weights.values().copied().collect::<Vec<_>>());
    weights.keys().map(String::as_str).zip(parts).collect()
}

/// Chooses among the candidates.
///
/// Caps are shares of what is published, and so are the categories' parts. So where fewer rows come out than they were
/// reckoned for, the choice is made again for that many.
pub fn select(candidates: &[Candidate], quota: &Quota) -> Selection {
    let mut published = quota.count.unwrap_or(usize::MAX).min(candidates.len());
    loop {
        let budget = Budget::new(&quota.caps, published);
        let selection = match quota.count {
            Some(count) => by_share(candidates, count, published, quota, budget),
            None => all(candidates, quota, budget),
        };
        if selection.rows.len() >= published {
            return selection;
        }
        published = selection.rows.len();
    }
}

/// Every row that no cap forbids.
fn all<'c>(candidates: &'c [Candidate], quota: &Quota, mut budget: Budget<'c>) -> Selection {
    let rows: Vec<usize> = (0..candidates.len()).filter(|row| budget.take(&candidates[*row].groups)).collect();
    let absent = |name: &&String| !rows.iter().any(|row| candidates[*row].category == **name);
    let names = quota.weights.iter().filter(|(_, weight)| **weight > 0.0).map(|(name, _)| name);
    let short = names.filter(absent).map(|name| {
        let found = candidates.iter().filter(|candidate| candidate.category == *name).count();
        Shortfall { category: name.clone(), wanted: 1, found, taken: 0 }
    });
    Selection { short: short.collect(), passed_over: budget.passed_over(), rows }
}

/// A category while rows are chosen.
struct Lane<'a> {
    name: &'a str,
    weight: f64,
    wanted: usize,
    found: usize,
    left: VecDeque<usize>,
    rows: Vec<usize>,
}

impl Lane<'_> {
    /// Takes the next row that no cap forbids, if there is one.
    fn take<'c>(&mut self, candidates: &'c [Candidate], budget: &mut Budget<'c>) {
        while let Some(row) = self.left.pop_front() {
            if budget.take(&candidates[row].groups) {
                self.rows.push(row);
                return;
            }
        }
    }
}

/// Fills each category up to its part of `target` rows, and, where it is asked for, all together up to the target. What
/// is short is told against the count that was asked for.
fn by_share<'c>(
    candidates: &'c [Candidate],
    count: usize,
    target: usize,
    quota: &Quota,
    mut budget: Budget<'c>,
) -> Selection {
    let mut lanes = lanes(candidates, count, quota);
    let found: Vec<usize> = lanes.iter().map(|lane| lane.found).collect();
    let weights: Vec<f64> = lanes.iter().map(|lane| lane.weight).collect();
    // Without others that fill gaps, a smaller target would make the gaps wider, not the shares better.
    let parts = match quota.refill {
        true => parts(target, &weights, &found),
        false => lanes.iter().map(|lane| lane.wanted).collect(),
    };
    // The smallest come first: a cap that the largest has used up would leave nothing for them, and they use up little.
    let mut order: Vec<usize> = (0..lanes.len()).collect();
    order.sort_by_key(|lane| parts[*lane]);
    for index in order {
        let lane = &mut lanes[index];
        while lane.rows.len() < parts[index] && !lane.left.is_empty() {
            lane.take(candidates, &mut budget);
        }
    }
    if quota.refill {
        refill(candidates, target, &mut lanes, &mut budget);
    }
    // Every category is meant to have a row, even where its share alone would give it none.
    let is_short = |lane: &&Lane| lane.rows.len() < lane.wanted || lane.rows.is_empty();
    let short = lanes.iter().filter(is_short).map(|lane| Shortfall {
        category: lane.name.to_owned(),
        wanted: lane.wanted.max(1),
        found: lane.found,
        taken: lane.rows.len(),
    });
    let short = short.collect();
    let mut rows: Vec<usize> = lanes.into_iter().flat_map(|lane| lane.rows).collect();
    rows.sort_unstable();
    Selection { rows, short, passed_over: budget.passed_over() }
}

fn lanes<'a>(candidates: &[Candidate], count: usize, quota: &'a Quota) -> Vec<Lane<'a>> {
    let mut lanes: Vec<Lane> = Vec::new();
    for (name, weight) in quota.weights.iter().filter(|(_, weight)| **weight > 0.0) {
        let of_it = |row: &usize| candidates[*row].category == *name;
        let left: VecDeque<usize> = (0..candidates.len()).filter(of_it).collect();
        lanes.push(Lane { name, weight: *weight, wanted: 0, found: left.len(), left, rows: Vec::new() });
    }
    let weights: Vec<f64> = lanes.iter().map(|lane| lane.weight).collect();
    let found: Vec<usize> = lanes.iter().map(|lane| lane.found).collect();
    for (lane, wanted) in lanes.iter_mut().zip(parts(count, &weights, &found)) {
        lane.wanted = wanted;
    }
    lanes
}

/// Fills up to the count: each row comes from the category that is furthest below its share, or least above it. No
/// other way keeps the largest deviation as small.
fn refill<'c>(candidates: &'c [Candidate], count: usize, lanes: &mut [Lane], budget: &mut Budget<'c>) {
    let sum: f64 = lanes.iter().map(|lane| lane.weight).sum();
    while lanes.iter().map(|lane| lane.rows.len()).sum::<usize>() < count {
        let above = |lane: &Lane| lane.rows.len() as f64 - count as f64 * lane.weight / sum;
        let open = lanes.iter_mut().filter(|lane| !lane.left.is_empty());
        let Some(lane) = open.min_by(|a, b| above(a).total_cmp(&above(b))) else {
            return;
        };
        lane.take(candidates, budget);
    }
}

/// How many of `count` rows each category is to have.
fn parts(count: usize, weights: &[f64], found: &[usize]) -> Vec<usize> {
    at_least_one(apportion(count, weights), weights, found)
}

/// Splits `count` by weight with the largest-remainder rule; of equal remainders the first wins.
fn apportion(count: usize, weights: &[f64]) -> Vec<usize> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|weight| count as f64 * weight / sum).collect();
    let mut parts: Vec<usize> = exact.iter().map(|part| part.floor() as usize).collect();
    let missing = count.saturating_sub(parts.iter().sum());
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()));
    for index in order.into_iter().take(missing) {
        parts[index] += 1;
    }
    parts
}

/// Gives each category that has rows a quota of at least one, heaviest first, out of the largest quotas.
fn at_least_one(mut quotas: Vec<usize>, weights: &[f64], found: &[usize]) -> Vec<usize> {
    let mut empty: Vec<usize> = (0..quotas.len()).filter(|index| quotas[*index] == 0 && found[*index] > 0).collect();
    empty.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
    for index in empty {
        let largest = (0..quotas.len()).max_by_key(|index| (quotas[*index], usize::MAX - index));
        let Some(donor) = largest.filter(|donor| quotas[*donor] > 1) else {
            break;
        };
        quotas[donor] -= 1;
        quotas[index] = 1;
    }
    quotas
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::caps::{LEAST_ROWS, groups, tally};
    use super::*;

    /// Rows without operators, so many of each category.
    fn rows(counts: &[(&str, usize)]) -> Vec<Candidate> {
        let categories = counts.iter().flat_map(|(name, count)| vec![*name; *count]);
        categories.map(|category| candidate(category, &[])).collect()
    }

    fn candidate(category: &str, operators: &[&str]) -> Candidate {
        let operators: Vec<String> = operators.iter().map(|operator| operator.to_string()).collect();
        Candidate { category: category.to_owned(), groups: groups(&operators) }
    }

    fn paper(count: usize) -> Quota {
        let weights = PAPER_ROWS.iter().map(|(name, rows)| (name.to_string(), *rows)).collect();
        Quota { count: Some(count), weights, refill: true, caps: Caps::default() }
    }

    fn capped(count: usize) -> Quota {
        Quota { caps: Caps { operator: 0.03, wide: 0.06, bilinear: 0.01, pair: 0.005 }, ..paper(count) }
    }

    fn by_category(candidates: &[Candidate], selection: &Selection) -> BTreeMap<String, usize> {
        let mut tally = BTreeMap::new();
        for row in &selection.rows {
            *tally.entry(candidates[*row].category.clone()).or_default() += 1;
        }
        tally
    }

    fn largest_deviation(candidates: &[Candidate], selection: &Selection, quota: &Quota) -> f64 {
        let categories = selection.rows.iter().map(|row| candidates[*row].category.as_str());
        let shares = shares(categories, &quota.weights);
        shares.iter().map(|share| share.deviation().abs()).fold(0.0, f64::max)
    }

    #[test]
    fn the_papers_table_comes_out_of_its_shares() {
        let percent = [3.40, 83.77, 7.62, 2.80, 1.23, 1.18];
        assert_eq!(apportion(6000, &percent), [204, 5026, 457, 168, 74, 71]);
    }

    #[test]
    fn every_category_that_exists_gets_one() {
        let candidates = rows(&PAPER_ROWS.map(|(name, _)| (name, 50)));
        let selection = select(&candidates, &paper(48));
        let tally = by_category(&candidates, &selection);
        assert_eq!(tally.values().copied().collect::<Vec<_>>(), [2, 39, 4, 1, 1, 1]);
        assert!(selection.short.is_empty());
    }

    #[test]
    fn too_small_a_count_keeps_the_heaviest() {
        let candidates = rows(&PAPER_ROWS.map(|(name, _)| (name, 5)));
        let tally = by_category(&candidates, &select(&candidates, &paper(3)));
        assert_eq!(tally.keys().collect::<Vec<_>>(), ["torch#1", "torch#2", "torch#3"]);
    }

    #[test]
    fn a_category_without_a_published_row_is_always_named() {
        let names = |selection: Selection| -> Vec<String> {
            selection.short.into_iter().map(|shortfall| shortfall.category).collect()
        };
        let without_transformers =
            rows(&PAPER_ROWS.map(|(name, _)| (name, if name == "transformers" { 0 } else { 9 })));
        assert_eq!(names(select(&without_transformers, &paper(12))), ["transformers"]);
        assert_eq!(names(select(&without_transformers, &Quota { count: None, ..paper(1) })), ["transformers"]);
        let all = rows(&PAPER_ROWS.map(|(name, _)| (name, 5)));
        assert_eq!(names(select(&all, &paper(3))), ["torch#4", "torch#5", "transformers"]);
    }

    #[test]
    fn a_shortfall_is_named_and_refilled_only_where_asked() {
        let candidates = rows(&[("torch#1", 10), ("torch#2", 30), ("torch#3", 1), ("transformers", 3)]);
        let mut quota = paper(40);
        let selection = select(&candidates, &quota);
        assert_eq!(selection.rows.len(), 40);
        assert_eq!(selection.short[1], Shortfall { category: "torch#3".into(), wanted: 3, found: 1, taken: 1 });
        quota.refill = false;
        assert!(select(&candidates, &quota).rows.len() < 40);
    }

    #[test]
    fn without_transformers_every_share_of_6000_stays_within_a_point_but_theirs() {
        let candidates = rows(&PAPER_ROWS.map(|(name, rows)| match name {
            "transformers" => (name, 12),
            _ => (name, rows as usize * 2),
        }));
        let quota = paper(6000);
        let selection = select(&candidates, &quota);
        assert_eq!(selection.rows.len(), 6000);
        assert!(largest_deviation(&candidates, &selection, &quota) < 1.0);
        assert_eq!(by_category(&candidates, &selection)["torch#2"], 5026 + 12);
    }

    #[test]
    fn unweighted_categories_are_left_out_and_first_rows_win() {
        let candidates: Vec<Candidate> = ["b", "a", "b", "c", "a", "b"].map(|name| candidate(name, &[])).into();
        let weights = BTreeMap::from([("a".to_owned(), 1.0), ("b".to_owned(), 1.0), ("c".to_owned(), 0.0)]);
        let selection = select(&candidates, &Quota { weights, ..paper(3) });
        assert_eq!(selection.rows, [0, 1, 4]);
    }

    #[test]
    fn a_row_over_a_cap_gives_way_to_the_next_of_its_category() {
        let mut candidates: Vec<Candidate> = (0..LEAST_ROWS + 3).map(|_| candidate("torch#1", &["nn.ReLU"])).collect();
        candidates.extend((0..9).map(|index| candidate("torch#1", &[&format!("torch.op{index}")])));
        let quota = Quota { weights: BTreeMap::from([("torch#1".to_owned(), 1.0)]), ..capped(10) };
        let selection = select(&candidates, &quota);
        assert_eq!(selection.rows, [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]);
        assert_eq!(selection.passed_over, BTreeMap::from([(Cap::Operator, 3)]));
        assert_eq!(selection.short, []);
        let without_caps = select(&candidates, &Quota { caps: Caps::default(), ..quota });
        assert_eq!(without_caps.rows, (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn what_is_rare_gets_its_part_of_a_cap_first() {
        let mut candidates: Vec<Candidate> = (0..50).map(|_| candidate("torch#2", &["nn.ReLU"])).collect();
        candidates.extend((0..20).map(|index| candidate("torch#2", &[&format!("torch.op{index}")])));
        candidates.extend((0..2).map(|_| candidate("torch#5", &["nn.ReLU"])));
        let selection = select(&candidates, &capped(80));
        assert!(selection.rows.contains(&70), "{:?}", selection.rows);
        assert_eq!(selection.rows.len(), 20 + LEAST_ROWS);
    }

    #[test]
    fn a_cap_is_a_share_of_what_is_published_not_of_what_was_asked_for() {
        let mut candidates: Vec<Candidate> = (0..400).map(|_| candidate("torch#2", &["nn.ReLU"])).collect();
        candidates.extend((0..600).map(|index| candidate("torch#2", &[&format!("torch.op{index}")])));
        let selection = select(&candidates, &capped(5000));
        let relu = selection.rows.iter().filter(|row| **row < 400).count();
        assert_eq!((selection.rows.len(), relu), (618, 18));
    }

    /// A row of one of the categories with some of twelve operators.
    fn any_candidate() -> impl Strategy<Value = Candidate> {
        const NAMES: [&str; 6] = ["nn.Linear", "F.conv2d", "nn.Bilinear", "F.bilinear", "nn.ReLU", "torch.add"];
        (0usize..6, prop::collection::vec(0usize..40, 1..4)).prop_map(|(category, operators)| {
            let name = |index: usize| NAMES.get(index).map_or(format!("torch.op{index}"), |name| name.to_string());
            let operators: Vec<String> = operators.into_iter().map(name).collect();
            Candidate { category: PAPER_ROWS[category].0.to_owned(), groups: groups(&operators) }
        })
    }

    proptest! {
        #[test]
        fn the_count_is_reached_where_rows_allow(
            found in prop::collection::vec(0usize..40, 6), count in 1usize..120,
        ) {
            let counts: Vec<(&str, usize)> = PAPER_ROWS.iter().map(|(name, _)| *name).zip(found.clone()).collect();
            let candidates = rows(&counts);
            let selection = select(&candidates, &paper(count));
            prop_assert_eq!(selection.rows.len(), count.min(candidates.len()));
            prop_assert!(selection.rows.is_sorted());
            let tally = by_category(&candidates, &selection);
            let present = found.iter().filter(|found| **found > 0).count();
            if count >= 6 {
                prop_assert_eq!(tally.len(), present);
            }
        }

        #[test]
        fn no_cap_is_exceeded_whatever_there_is(
            candidates in prop::collection::vec(any_candidate(), 0..300), count in 0usize..250, refill: bool,
        ) {
            let quota = Quota { count: (count > 0).then_some(count), refill, ..capped(1) };
            let selection = select(&candidates, &quota);
            for ((cap, name), rows) in tally(selection.rows.iter().map(|row| &candidates[*row].groups)) {
                let limit = quota.caps.limit(*cap, selection.rows.len()).unwrap();
                prop_assert!(rows <= limit, "{}: {} of {}", name, rows, limit);
            }
        }
    }
}
