//! The report as one HTML page that needs nothing but itself: each figure with its interval drawn.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::episodes::sampling;
use super::figures::{ALL, Figure, Figures, Outcome, Place, Settings};
use super::text::{about, cell, difference, metric_of, name_of};

/// Colours of policies, in order; later ones begin again.
const COLOURS: usize = 5;

const STYLE: &str = ":root{color-scheme:light dark;--page:#fcfcfb;--card:#fff;--ink:#1b1b19;--soft:#5c5b57;--rule:#e2e1dc;\
--c0:#2a78d6;--c1:#d9662b;--c2:#2f9461;--c3:#8a5bc7;--c4:#a3791b}\
@media (prefers-color-scheme:dark){:root{--page:#161615;--card:#1e1e1c;--ink:#ecebe6;--soft:#a5a39c;--rule:#35342f;\
--c0:#4a90e2;--c1:#e07b43;--c2:#46b37c;--c3:#a67fdc;--c4:#c79a35}}\
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}\
main{max-width:1000px;margin:0 auto;padding:32px 20px 80px}h1{font-size:28px;margin:0 0 8px}h2{font-size:20px;margin:0 0 8px}\
p{max-width:75ch;color:var(--soft)}\
section{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:20px 22px;margin:20px 0;overflow-x:auto}\
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:4px 10px;border-bottom:1px solid var(--rule);\
vertical-align:top;white-space:nowrap}th{font-weight:600;font-size:13px;color:var(--soft)}td.n{font-variant-numeric:tabular-nums}\
svg{display:block}svg .rule{stroke:var(--rule)}svg .half{stroke:var(--rule);stroke-dasharray:2 3}\
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}\
i{display:inline-block;width:10px;height:10px;border-radius:50%;background:currentColor;margin-right:6px}";

/// The whole page.
pub fn html(title: &str, figures: &Figures, settings: &Settings) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\"><title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n\
         <h1>{title}</h1>\n<p>{about}</p>\n",
        title = escaped(title),
        about = escaped(&about(figures, settings)),
    );
    for greedy in [false, true] {
        for group in &figures.groups {
            let places: Vec<&Place> =
                figures.places().into_iter().filter(|place| place.greedy == greedy && place.group == *group).collect();
            page.push_str(&section(figures, group, greedy, &places));
        }
    }
    let _ = write!(page, "<section><h2>Outcomes</h2>\n{}</section>\n", outcomes(figures));
    page.push_str("</main></body></html>\n");
    page
}

fn section(figures: &Figures, group: &str, greedy: bool, places: &[&Place]) -> String {
    if places.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "<section><h2>{}, {}</h2>\n<table><thead><tr><th>subset</th><th>figure</th><th>policy</th><th></th><th>value \
         and interval</th><th>against {}</th><th>tasks</th></tr></thead><tbody>\n",
        escaped(&name_of(group)),
        sampling(greedy),
        escaped(&figures.policies[0])
    );
    let subsets: BTreeSet<(bool, &str)> =
        places.iter().map(|place| (place.subset != ALL, place.subset.as_str())).collect();
    for (_, subset) in subsets {
        for place in places.iter().filter(|place| place.subset == subset) {
            // The interval's ends decide the scale of speed-ups, so all policies of a row have one.
            let all: Vec<&Figure> = figures.policies.iter().filter_map(|policy| figures.at(policy, place)).collect();
            let scale = Scale::of(place, &all);
            for (number, figure) in all.iter().enumerate() {
                let colour = colour(figures, &figure.policy);
                let heading = |text: String| if number == 0 { escaped(&text) } else { String::new() };
                let against = figures.difference_at(&figure.policy, place).map(difference).unwrap_or_default();
                let _ = writeln!(
                    text,
                    "<tr><td>{}</td><td>{}</td><td><i class=\"{colour}\"></i>{}</td><td class=\"{colour}\">{}</td><td \
                     class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
                    heading(subset.to_owned()),
                    heading(metric_of(place.metric)),
                    escaped(&figure.policy),
                    scale.drawn(figure),
                    cell(figure),
                    against,
                    figure.estimate.tasks
                );
            }
        }
    }
    text + "</tbody></table></section>\n"
}

fn colour(figures: &Figures, policy: &str) -> String {
    let place = figures.policies.iter().position(|other| other == policy).unwrap_or(0);
    format!("c{}", place % COLOURS)
}

/// Width and height of a drawn interval, in pixels.
const WIDTH: f64 = 220.0;
const HEIGHT: f64 = 18.0;

/// From values to places: shares from 0 to 1, speed-ups by their logarithm around 1.
enum Scale {
    Share,
    /// The largest logarithm either way.
    Speedup(f64),
}

impl Scale {
    fn of(place: &Place, figures: &[&Figure]) -> Self {
        if !place.metric.is_speedup() {
            return Self::Share;
        }
        let ends = figures.iter().flat_map(|figure| [figure.estimate.low, figure.estimate.high]);
        Self::Speedup(ends.map(|end| end.ln().abs()).fold(2f64.ln(), f64::max))
    }

    fn place(&self, value: f64) -> f64 {
        let share = match self {
            Self::Share => value,
            Self::Speedup(most) => 0.5 + 0.5 * value.ln() / most,
        };
        5.0 + share * (WIDTH - 10.0)
    }

    /// A dot at the value and a line over the interval; the dashed line is a half, or a speed-up of 1.
    fn drawn(&self, figure: &Figure) -> String {
        let (low, high) = (self.place(figure.estimate.low), self.place(figure.estimate.high));
        let (middle, value) = (HEIGHT / 2.0, self.place(figure.estimate.value));
        format!(
            "<svg width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" aria-label=\"{}\"><line class=\"rule\" x1=\"5\" \
             x2=\"{:.1}\" y1=\"{middle}\" y2=\"{middle}\"/><line class=\"half\" x1=\"{half:.1}\" x2=\"{half:.1}\" y1=\"0\" \
             y2=\"{HEIGHT}\"/><line x1=\"{low:.1}\" x2=\"{high:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"currentColor\" \
             stroke-width=\"3\"/><circle cx=\"{value:.1}\" cy=\"{middle}\" r=\"4.5\" fill=\"currentColor\"/></svg>",
            escaped(&cell(figure)),
            WIDTH - 5.0,
            half = WIDTH / 2.0,
        )
    }
}

fn outcomes(figures: &Figures) -> String {
    let mut text =
        "<table><thead><tr><th>group</th><th>policy</th><th>sampling</th><th>outcome</th><th>episodes</th><th>share\
                    </th></tr></thead><tbody>\n"
            .to_owned();
    let mut before: Option<&Outcome> = None;
    for outcome in &figures.outcomes {
        let same = before
            .is_some_and(|it| (&it.policy, it.greedy, &it.group) == (&outcome.policy, outcome.greedy, &outcome.group));
        let heading = |text: String| if same { String::new() } else { escaped(&text) };
        let note = if outcome.counted { "" } else { " (no verdict)" };
        let _ = writeln!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}{note}</td><td class=\"n\">{}</td><td class=\"n\">{:.1} %</td></tr>",
            heading(name_of(&outcome.group)),
            heading(outcome.policy.clone()),
            heading(sampling(outcome.greedy).to_owned()),
            escaped(&outcome.word.replace('_', " ")),
            outcome.episodes,
            100.0 * outcome.share
        );
        before = Some(outcome);
    }
    text + "</tbody></table>\n"
}

/// Text between tags and in attributes.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}
