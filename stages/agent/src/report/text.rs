//! The report as Markdown that reads as plain text too: `README.md`, which `cuda-agent show` prints.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::episodes::sampling;
use super::figures::{ALL, Figure, Figures, Metric, Place, Settings};
use super::statistics::Estimate;

/// The whole file.
pub fn markdown(title: &str, figures: &Figures, settings: &Settings) -> String {
    let mut text = format!("# {title}\n\n{}\n", about(figures, settings));
    for greedy in [false, true] {
        for group in &figures.groups {
            let places: Vec<&Place> =
                figures.places().into_iter().filter(|place| place.greedy == greedy && place.group == *group).collect();
            if places.is_empty() {
                continue;
            }
            let _ = write!(text, "\n## {}, {}\n\n{}", name_of(group), sampling(greedy), table(figures, &places));
        }
    }
    let _ = write!(text, "\n## Outcomes\n\n{}", outcomes(figures));
    text
}

/// What the figures are, in a paragraph.
pub fn about(figures: &Figures, settings: &Settings) -> String {
    let mut text = format!(
        "Policies: {}. A figure is a mean over tasks, each of which weighs alike; in brackets its 95 % interval by \
         bootstrap over tasks ({} resamples, seed {}).",
        figures.policies.join(", "),
        settings.resamples,
        settings.seed
    );
    if figures.policies.len() > 1 {
        let _ = write!(
            text,
            " Differences are against {}, task by task, in percentage points; of speed-ups they are quotients.",
            figures.policies[0]
        );
    }
    if let Some(headroom) = settings.headroom {
        let _ = write!(
            text,
            " The subset headroom: tasks for which torch.compile takes at least {headroom} times the least that the device \
             allows."
        );
    }
    let without: usize = at_all(figures).filter(|outcome| !outcome.counted).map(|outcome| outcome.episodes).sum();
    if without > 0 {
        let _ = write!(text, " {without} episodes have no verdict and are in no figure but the outcomes.");
    }
    text
}

fn at_all(figures: &Figures) -> impl Iterator<Item = &super::figures::Outcome> {
    figures.outcomes.iter().filter(|outcome| outcome.group == ALL)
}

/// A group's or subset's name for people.
pub fn name_of(group: &str) -> String {
    if group == ALL { "all tasks".to_owned() } else { group.replace('_', " ") }
}

/// A metric's name for people.
pub fn metric_of(metric: Metric) -> String {
    match metric {
        Metric::Pass(k) => format!("pass@{k}"),
        Metric::FasterThanEager => "correct and faster than eager".to_owned(),
        Metric::FasterThanCompile => "correct and faster than compile".to_owned(),
        Metric::SpeedupEager => "speed-up over eager, of correct ones".to_owned(),
        Metric::SpeedupCompile => "speed-up over compile, of correct ones".to_owned(),
    }
}

/// A figure in a cell.
pub fn cell(figure: &Figure) -> String {
    let Estimate { value, low, high, .. } = figure.estimate;
    match figure.place.metric.is_speedup() {
        true => format!("{value:.2} × [{low:.2}, {high:.2}]"),
        false => format!("{:.1} % [{:.1}, {:.1}]", 100.0 * value, 100.0 * low, 100.0 * high),
    }
}

/// A difference in a cell.
pub fn difference(figure: &Figure) -> String {
    let Estimate { value, low, high, .. } = figure.estimate;
    match figure.place.metric.is_speedup() {
        true => format!("{value:.2} × [{low:.2}, {high:.2}]"),
        false => format!("{:+.1} [{:+.1}, {:+.1}]", 100.0 * value, 100.0 * low, 100.0 * high),
    }
}

/// One row for each subset and metric, one column for each policy and each difference.
fn table(figures: &Figures, places: &[&Place]) -> String {
    let others = &figures.policies[1..];
    let mut header = vec!["subset".to_owned(), "figure".to_owned(), "tasks".to_owned()];
    header.extend(figures.policies.iter().cloned());
    header.extend(others.iter().map(|policy| format!("{policy} against {}", figures.policies[0])));
    let subsets: BTreeSet<&String> = places.iter().map(|place| &place.subset).collect();
    let mut rows = vec![header];
    // All of them first, then by name.
    let ordered = subsets.iter().filter(|name| **name == ALL).chain(subsets.iter().filter(|name| **name != ALL));
    for subset in ordered {
        for place in places.iter().filter(|place| place.subset == **subset) {
            let of = |policy: &String| figures.at(policy, place);
            let tasks: BTreeSet<usize> = figures.policies.iter().filter_map(of).map(|it| it.estimate.tasks).collect();
            let tasks: Vec<String> = tasks.iter().map(usize::to_string).collect();
            let mut row = vec![subset.to_string(), metric_of(place.metric), tasks.join(" to ")];
            row.extend(figures.policies.iter().map(|policy| of(policy).map_or_else(|| "–".to_owned(), cell)));
            let against =
                |policy: &String| figures.difference_at(policy, place).map_or_else(|| "–".to_owned(), difference);
            row.extend(others.iter().map(against));
            rows.push(row);
        }
    }
    aligned(&rows)
}

fn outcomes(figures: &Figures) -> String {
    let words: BTreeSet<&str> = at_all(figures).map(|outcome| outcome.word.as_str()).collect();
    let mut ways: Vec<(String, bool)> = Vec::new();
    for outcome in at_all(figures) {
        let way = (outcome.policy.clone(), outcome.greedy);
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    let mut header = vec!["outcome".to_owned()];
    header.extend(ways.iter().map(|(policy, greedy)| format!("{policy}, {}", sampling(*greedy))));
    let mut rows = vec![header];
    for word in words {
        let cell = |(policy, greedy): &(String, bool)| {
            let found = at_all(figures).find(|it| it.policy == *policy && it.greedy == *greedy && it.word == word);
            found.map_or_else(|| "0".to_owned(), |it| format!("{} ({:.1} %)", it.episodes, 100.0 * it.share))
        };
        let mut row = vec![word.replace('_', " ")];
        row.extend(ways.iter().map(cell));
        rows.push(row);
    }
    aligned(&rows)
}

/// A table whose columns line up, the first row its header.
fn aligned(rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!(" {cell:<width$} "));
        format!("|{}|\n", cells.collect::<Vec<_>>().join("|"))
    };
    let rule: Vec<String> = widths.iter().map(|width| "-".repeat(width + 2)).collect();
    let mut text = line(&rows[0]);
    let _ = writeln!(text, "|{}|", rule.join("|"));
    rows[1..].iter().for_each(|row| text.push_str(&line(row)));
    text
}
