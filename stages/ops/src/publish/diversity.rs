//! The card's section on diversity: which operators the published rows have, and what the caps did.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use arrow::array::RecordBatch;

use super::caps::{Cap, Groups, groups, tally};
use super::card::{TRANSFORMERS, cell, strings};
use super::grouped;
use super::select::{Quota, Selection};

/// How many of the most frequent operators and pairs are listed.
const LISTED: usize = 10;

/// The section.
pub fn section(samples: &RecordBatch, quota: &Quota, selection: &Selection) -> String {
    let rows: Vec<(bool, Groups)> = strings(samples, "ops")
        .iter()
        .zip(strings(samples, "data_source"))
        .map(|(ops, category)| {
            let operators: Vec<String> = serde_json::from_str(ops.unwrap_or_default()).unwrap_or_default();
            (category == Some(TRANSFORMERS), groups(&operators))
        })
        .collect();
    let published = rows.len();
    let (torch, classes) = (distinct(&rows, false), distinct(&rows, true));
    let counts: Vec<(&(Cap, String), usize)> = {
        let mut counts: Vec<_> = tally(rows.iter().map(|(_, groups)| groups)).into_iter().collect();
        counts.sort_by_key(|(group, rows)| (usize::MAX - rows, *group));
        counts
    };
    let pairs = counts.iter().filter(|((cap, _), _)| *cap == Cap::Pair).count();
    let mut text = format!(
        "## Diversity\n\nA module and the functions of its name count as one operator here. {} distinct torch operators, {} distinct transformers classes, {} distinct pairs of operators in \
         one task.\n\n",
        grouped(torch as u64),
        grouped(classes as u64),
        grouped(pairs as u64)
    );
    text += &caps(&counts, published, quota, selection);
    text += &listed("operator", published, counts.iter().filter(|((cap, _), _)| is_operator(*cap)));
    text += &listed("pair in one task", published, counts.iter().filter(|((cap, _), _)| *cap == Cap::Pair));
    text
}

fn is_operator(cap: Cap) -> bool {
    matches!(cap, Cap::Operator | Cap::Wide)
}

fn distinct(rows: &[(bool, Groups)], transformers: bool) -> usize {
    let groups = rows.iter().filter(|(is_class, _)| *is_class == transformers).flat_map(|(_, groups)| groups);
    groups.filter(|(cap, _)| is_operator(*cap)).collect::<BTreeSet<_>>().len()
}

/// A table of the caps. `counts` come largest first.
fn caps(counts: &[(&(Cap, String), usize)], published: usize, quota: &Quota, selection: &Selection) -> String {
    let mut text =
        "| cap on | most of the rows | here | the most there are | passed over for it |\n|---|---:|---:|---|---:|\n"
            .to_owned();
    for (cap, share) in quota.caps.shares() {
        let limit = quota.caps.limit(cap, published);
        let (share, limit) = match limit {
            Some(limit) => (format!("{} %", 100.0 * share), limit.to_string()),
            None => ("no cap".to_owned(), "–".to_owned()),
        };
        let most = counts.iter().find(|((other, _), _)| *other == cap);
        let most = most.map_or("none".to_owned(), |((_, name), rows)| format!("{rows}: {}", cell(name)));
        let passed_over = selection.passed_over.get(&cap).copied().unwrap_or(0);
        let _ = writeln!(text, "| {cap} | {share} | {limit} | {most} | {passed_over} |");
    }
    text
}

fn listed<'a>(title: &str, published: usize, counts: impl Iterator<Item = &'a (&'a (Cap, String), usize)>) -> String {
    let mut text = String::new();
    for ((_, name), rows) in counts.take(LISTED) {
        let share = 100.0 * *rows as f64 / published.max(1) as f64;
        let _ = writeln!(text, "| {} | {rows} | {share:.2} % |", cell(name));
    }
    if text.is_empty() { text } else { format!("\n| {title} | rows | share |\n|---|---:|---:|\n{text}") }
}
