//! Which rows are published: the first of each category, as many as its share of the count.

use std::collections::BTreeMap;
use std::fmt;

/// The categories of CUDA-Agent-Ops-6K with their rows, in the order of the paper's table: the default weights.
pub const PAPER_ROWS: [(&str, f64); 6] = [
    ("torch#1", 204.0),
    ("torch#2", 5026.0),
    ("torch#3", 457.0),
    ("torch#4", 168.0),
    ("torch#5", 74.0),
    ("transformers", 71.0),
];

/// What is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Quota {
    /// Rows in all; `None` takes every row.
    pub count: Option<usize>,
    /// Category → weight; a category without one is left out, unless every row is taken.
    pub weights: BTreeMap<String, f64>,
    /// Whether the others make up for what a category lacks.
    pub refill: bool,
}

/// What was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Indices of rows, ascending.
    pub rows: Vec<usize>,
    /// Categories that had fewer rows than their quota, or of which nothing is published.
    pub short: Vec<Shortfall>,
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
            (found, 0) => write!(f, "{category}: none of {found} tasks is published, the count is too small for it"),
            _ => write!(f, "{category}: its share asked for {wanted} tasks, {found} passed"),
        }
    }
}

/// Chooses among rows of these categories.
pub fn select(categories: &[String], quota: &Quota) -> Selection {
    let names: Vec<&String> = quota.weights.iter().filter(|(_, weight)| **weight > 0.0).map(|(name, _)| name).collect();
    let weights: Vec<f64> = names.iter().map(|name| quota.weights[*name]).collect();
    let found: Vec<usize> =
        names.iter().map(|name| categories.iter().filter(|category| category == name).count()).collect();
    let Some(count) = quota.count else {
        let absent = names.iter().zip(&found).filter(|(_, found)| **found == 0);
        let short = absent.map(|(name, _)| Shortfall { category: name.to_string(), wanted: 1, found: 0, taken: 0 });
        return Selection { rows: (0..categories.len()).collect(), short: short.collect() };
    };

    let wanted = at_least_one(apportion(count, &weights), &weights, &found);
    let mut taken: Vec<usize> = wanted.iter().zip(&found).map(|(wanted, found)| *wanted.min(found)).collect();
    if quota.refill {
        refill(&mut taken, count, &weights, &found);
    }
    let mut short = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let (wanted, found, taken) = (wanted[index], found[index], taken[index]);
        // Every category is meant to have a row, even where its share alone would give it none.
        if found < wanted || taken == 0 {
            short.push(Shortfall { category: name.to_string(), wanted: wanted.max(1), found, taken });
        }
    }

    let mut left: BTreeMap<&str, usize> = names.iter().map(|name| name.as_str()).zip(taken).collect();
    let rows = categories.iter().enumerate().filter(|(_, category)| take_one(&mut left, category));
    Selection { rows: rows.map(|(index, _)| index).collect(), short }
}

fn take_one(left: &mut BTreeMap<&str, usize>, category: &str) -> bool {
    match left.get_mut(category) {
        Some(left) if *left > 0 => {
            *left -= 1;
            true
        }
        _ => false,
    }
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

/// Hands what is missing to the categories that have rows to spare, by weight, until one or the other is used up.
fn refill(taken: &mut [usize], count: usize, weights: &[f64], found: &[usize]) {
    loop {
        let missing = count.saturating_sub(taken.iter().sum());
        let spare: Vec<usize> = (0..taken.len()).filter(|index| taken[*index] < found[*index]).collect();
        if missing == 0 || spare.is_empty() {
            return;
        }
        let parts = apportion(missing, &spare.iter().map(|index| weights[*index]).collect::<Vec<_>>());
        for (index, part) in spare.into_iter().zip(parts) {
            taken[index] += part.min(found[index] - taken[index]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rows(counts: &[(&str, usize)]) -> Vec<String> {
        counts.iter().flat_map(|(name, count)| vec![name.to_string(); *count]).collect()
    }

    fn paper(count: usize) -> Quota {
        let weights = PAPER_ROWS.iter().map(|(name, rows)| (name.to_string(), *rows)).collect();
        Quota { count: Some(count), weights, refill: true }
    }

    fn tally(categories: &[String], selection: &Selection) -> BTreeMap<String, usize> {
        let mut tally = BTreeMap::new();
        for row in &selection.rows {
            *tally.entry(categories[*row].clone()).or_default() += 1;
        }
        tally
    }

    #[test]
    fn the_papers_table_comes_out_of_its_shares() {
        let percent = [3.40, 83.77, 7.62, 2.80, 1.23, 1.18];
        assert_eq!(apportion(6000, &percent), [204, 5026, 457, 168, 74, 71]);
    }

    #[test]
    fn every_category_that_exists_gets_one() {
        let categories = rows(&PAPER_ROWS.map(|(name, _)| (name, 50)));
        let selection = select(&categories, &paper(48));
        let tally = tally(&categories, &selection);
        assert_eq!(tally.values().copied().collect::<Vec<_>>(), [2, 39, 4, 1, 1, 1]);
        assert!(selection.short.is_empty());
    }

    #[test]
    fn too_small_a_count_keeps_the_heaviest() {
        let categories = rows(&PAPER_ROWS.map(|(name, _)| (name, 5)));
        let tally = tally(&categories, &select(&categories, &paper(3)));
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
        let categories = rows(&[("torch#1", 10), ("torch#2", 30), ("torch#3", 1), ("transformers", 3)]);
        let mut quota = paper(40);
        let selection = select(&categories, &quota);
        assert_eq!(selection.rows.len(), 40);
        assert_eq!(selection.short[1], Shortfall { category: "torch#3".into(), wanted: 3, found: 1, taken: 1 });
        quota.refill = false;
        assert!(select(&categories, &quota).rows.len() < 40);
    }

    #[test]
    fn unweighted_categories_are_left_out_and_first_rows_win() {
        let categories: Vec<String> = ["b", "a", "b", "c", "a", "b"].map(str::to_owned).into();
        let weights = BTreeMap::from([("a".to_owned(), 1.0), ("b".to_owned(), 1.0), ("c".to_owned(), 0.0)]);
        let selection = select(&categories, &Quota { count: Some(3), weights, refill: true });
        assert_eq!(selection.rows, [0, 1, 4]);
    }

    proptest! {
        #[test]
        fn the_count_is_reached_where_rows_allow(
            found in prop::collection::vec(0usize..40, 6), count in 1usize..120,
        ) {
            let counts: Vec<(&str, usize)> = PAPER_ROWS.iter().map(|(name, _)| *name).zip(found.clone()).collect();
            let categories = rows(&counts);
            let selection = select(&categories, &paper(count));
            prop_assert_eq!(selection.rows.len(), count.min(categories.len()));
            prop_assert!(selection.rows.is_sorted());
            let tally = tally(&categories, &selection);
            let present = found.iter().filter(|found| **found > 0).count();
            if count >= 6 {
                prop_assert_eq!(tally.len(), present);
            }
        }
    }
}
