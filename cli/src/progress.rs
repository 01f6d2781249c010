//! What a run shows while it goes on: bars on a terminal, lines elsewhere, JSON lines on demand.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use cuda_agent_engine::event::{RunEvent, RunOutcome, StageOutcome, Subscriber};
use cuda_agent_engine::execute::{seconds, seconds_of};
use cuda_agent_engine::key::MissReason;
use cuda_agent_engine::store::RowCounts;
use indicatif::{MultiProgress, ProgressBar, ProgressState, ProgressStyle};

/// One JSON object a line on standard output.
pub struct JsonLines;

impl Subscriber for JsonLines {
    fn notice(&mut self, event: &RunEvent) {
        super::print(&format!("{}\n", serde_json::to_string(event).expect("events are plain data")));
    }
}

/// Plain lines on standard error.
pub struct Lines {
    last: HashMap<String, Instant>,
    /// When a stage was first heard of, and how much of it was done then.
    first: HashMap<String, (Instant, u64)>,
}

/// How often a stage's progress is worth a line.
const EVERY: Duration = Duration::from_secs(10);

impl Lines {
    /// No line yet.
    pub fn new() -> Self {
        Self { last: HashMap::new(), first: HashMap::new() }
    }
}

/// How fast it goes and how long it will take, from what has been done in a time; nothing before anything is done.
fn pace(done: u64, total: Option<u64>, took: Duration) -> String {
    let per_second = done as f64 / took.as_secs_f64().max(1e-3);
    let rate = rate(per_second);
    match total {
        _ if rate.is_empty() => String::new(),
        Some(left) => format!(", {rate}, {} left", seconds_of(left as f64 / per_second)),
        None => format!(", {rate}"),
    }
}

impl Subscriber for Lines {
    fn notice(&mut self, event: &RunEvent) {
        let mut suffix = String::new();
        if let RunEvent::StageProgress { stage, done, total, .. } = event {
            let now = Instant::now();
            let (began, before) = *self.first.entry(stage.clone()).or_insert((now, *done));
            let left = total.map(|total| total.saturating_sub(*done));
            suffix = pace(done.saturating_sub(before), left, now.duration_since(began));
            let last = self.last.entry(stage.clone()).or_insert(now);
            if now.duration_since(*last) < EVERY {
                return;
            }
            *last = now;
        }
        if let RunEvent::StageStarted { stage, .. } = event {
            self.last.insert(stage.clone(), Instant::now());
            self.first.insert(stage.clone(), (Instant::now(), 0));
        }
        if let Some(line) = line(event) {
            super::note(&format!("{line}{suffix}"));
        }
    }
}

/// An event in words; several lines where a stage failed. `None` for what is not worth one.
pub fn line(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::RunStarted { run, pipeline, stages, store } => {
            format!("run {run}: {pipeline}, {stages} stages, store {store}")
        }
        RunEvent::StageStarted { stage, attempt, reasons, rows } => {
            let again = if *attempt > 1 { format!(" (attempt {attempt})") } else { String::new() };
            format!("{stage}: started{again}{}: {}", rows.map(|rows| todo(&rows)).unwrap_or_default(), because(reasons))
        }
        RunEvent::StageProgress { stage, done, total, unit } => {
            let total = total.map(|total| format!(" of {total}")).unwrap_or_default();
            format!("{stage}: {done}{total} {unit}")
        }
        RunEvent::Message { stage, level, message } if level != "debug" => match level.as_str() {
            "info" => format!("{stage}: {}", printable(message)),
            level => format!("{stage}: {level}: {}", printable(message)),
        },
        RunEvent::StageRetry { stage, message, wait_s } => {
            format!("{stage}: {message}; trying again in {}", seconds_of(*wait_s))
        }
        RunEvent::StageFinished { stage, outcome, duration_s, rows } => match outcome {
            StageOutcome::Done => {
                let took = seconds_of(*duration_s);
                format!("{stage}: done in {took}{}", rows.map(|rows| counted(&rows)).unwrap_or_default())
            }
            StageOutcome::Failed { message, hint, log_tail, folder } => {
                failed(stage, message, hint.as_deref(), log_tail, folder.as_deref())
            }
            StageOutcome::Skipped { because } => format!("{stage}: skipped, {because} failed"),
            StageOutcome::Cancelled => format!("{stage}: stopped"),
        },
        RunEvent::RunFinished { outcome, duration_s, hits, executed, failed, skipped } => {
            summary(*outcome, *duration_s, *hits, *executed, *failed, *skipped)
        }
        RunEvent::StageHit { stage, rows: Some(rows) } if rows.rejected > 0 => {
            let RowCounts { rejected, total, .. } = rows;
            format!(
                "{stage}: up to date; {rejected} of {total} rows are rejected (cuda-agent show '{stage}' --rejected)"
            )
        }
        RunEvent::StageHit { .. } | RunEvent::Metric { .. } | RunEvent::Message { .. } => return None,
    })
}

/// A text that cannot move the cursor: a program's control characters are not ours.
fn printable(text: &str) -> String {
    let shown = |c: char| if c.is_control() && c != '\t' { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

fn todo(rows: &RowCounts) -> String {
    format!(", {} rows to do, {} in the store", rows.executed, rows.reused)
}

fn counted(rows: &RowCounts) -> String {
    let mut text = format!(" ({} rows executed, {} reused", rows.executed, rows.reused);
    if rows.rejected > 0 {
        text.push_str(&format!(", {} rejected", rows.rejected));
    }
    if rows.failed > 0 {
        text.push_str(&format!(", {} failed", rows.failed));
    }
    text + ")"
}

/// Reasons in one line.
pub fn because(reasons: &[MissReason]) -> String {
    let reasons: Vec<String> = reasons.iter().map(MissReason::to_string).collect();
    reasons.join("; ")
}

fn failed(stage: &str, message: &str, hint: Option<&str>, log_tail: &[String], folder: Option<&Path>) -> String {
    let mut text = format!("{stage}: failed: {}", printable(message));
    for line in log_tail {
        text.push_str(&format!("\n  | {}", printable(line)));
    }
    if let Some(hint) = hint {
        text.push_str(&format!("\n  hint: {hint}"));
    }
    if !log_tail.is_empty() {
        text.push_str(&format!("\n  the whole log: cuda-agent log {}", quoted(stage)));
    }
    if let Some(folder) = folder {
        text.push_str(&format!("\n  its folder, until the next run: {}", shortest(folder).display()));
    }
    text
}

/// A stage's name as a shell takes it: cells have brackets.
pub fn quoted(stage: &str) -> String {
    let is_plain = stage.chars().all(|c| c.is_ascii_alphanumeric() || "_-.,=/".contains(c));
    if is_plain { stage.to_owned() } else { format!("'{}'", stage.replace('\'', "'\\''")) }
}

/// A path below the current folder without that folder.
fn shortest(path: &Path) -> &Path {
    let here = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(here).unwrap_or(path)
}

fn summary(
    outcome: RunOutcome,
    duration_s: f64,
    hits: usize,
    executed: usize,
    failed: usize,
    skipped: usize,
) -> String {
    let took = seconds_of(duration_s);
    let mut parts = vec![format!("{executed} executed"), format!("{hits} up to date")];
    if failed > 0 {
        parts.push(format!("{failed} failed"));
    }
    if skipped > 0 {
        parts.push(format!("{skipped} skipped"));
    }
    let (ended, next) = match outcome {
        RunOutcome::Done => ("done", ""),
        RunOutcome::Failed => ("failed", ""),
        RunOutcome::Interrupted => ("interrupted", "; what is done is kept, run again to go on"),
    };
    format!("{ended} in {took}: {}{next}", parts.join(", "))
}

/// A rate for people: a whole one, or one a minute where it is slow.
fn rate(per_second: f64) -> String {
    match per_second {
        rate if rate <= 0.0 || !rate.is_finite() => String::new(),
        rate if rate >= 10.0 => format!("{rate:.0}/s"),
        rate if rate >= 1.0 => format!("{rate:.1}/s"),
        rate => format!("{:.0}/min", rate * 60.0),
    }
}

/// A name that fits: the middle goes, since cells of a matrix differ at their ends.
fn shortened(name: &str, width: usize) -> String {
    let letters: Vec<char> = name.chars().collect();
    if letters.len() <= width {
        return name.to_owned();
    }
    let (head, tail) = (width / 2, width - width / 2 - 1);
    letters[..head].iter().chain(&['…']).chain(&letters[letters.len() - tail..]).collect()
}

/// A bar for each stage that runs, and lines above them.
pub struct Bars {
    /// Where lines go above the bars.
    pub all: MultiProgress,
    bars: HashMap<String, ProgressBar>,
    color: bool,
}

impl Bars {
    /// No bar yet.
    pub fn new(color: bool) -> Self {
        Self { all: MultiProgress::new(), bars: HashMap::new(), color }
    }

    fn say(&self, text: &str, code: &str) {
        let line = if self.color && !code.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() };
        let _ = self.all.println(line);
    }

    fn start(&mut self, stage: &str, attempt: u32, reasons: &[MissReason], rows: Option<&RowCounts>) {
        let template = "{spinner} {prefix:<24!} {elapsed:>5} {wide_msg}";
        let style = ProgressStyle::with_template(template).expect("the template is right");
        let bar = self.all.add(ProgressBar::new_spinner().with_style(style).with_prefix(shortened(stage, 24)));
        let again = if attempt > 1 { format!("attempt {attempt} · ") } else { String::new() };
        bar.set_message(match rows {
            Some(rows) => format!("{again}{} rows to do, {} in the store", rows.executed, rows.reused),
            None => format!("{again}{}", because(reasons)),
        });
        bar.enable_steady_tick(Duration::from_millis(120));
        self.bars.insert(stage.to_owned(), bar);
    }

    /// A bar from the start, where it is known how much there is to do.
    fn start_rows(&mut self, stage: &str, rows: &RowCounts) {
        if rows.executed > 0 {
            self.progress(stage, 0, Some(rows.executed), "rows");
        }
    }

    fn progress(&mut self, stage: &str, done: u64, total: Option<u64>, unit: &str) {
        let Some(bar) = self.bars.get(stage) else { return };
        if let Some(total) = total
            && bar.length() != Some(total)
        {
            let template = "{spinner} {prefix:<24!} {elapsed:>5} {wide_bar} {pos}/{len} {msg} {rate:>8} {left}";
            let style = ProgressStyle::with_template(template).expect("the template is right");
            let style = style.with_key("rate", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                let _ = write!(out, "{}", rate(state.per_sec()));
            });
            // Before the first unit is done nobody knows.
            bar.set_style(style.with_key("left", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                if state.pos() > 0 {
                    let _ = write!(out, "eta {}", seconds(state.eta()));
                }
            }));
            bar.set_length(total);
            bar.set_message(unit.to_owned());
        }
        if total.is_none() {
            bar.set_message(format!("{done} {unit}"));
        }
        bar.set_position(done);
    }
}

impl Subscriber for Bars {
    fn notice(&mut self, event: &RunEvent) {
        match event {
            RunEvent::StageStarted { stage, attempt, reasons, rows } => {
                if let Some(bar) = self.bars.remove(stage) {
                    bar.finish_and_clear();
                }
                self.start(stage, *attempt, reasons, rows.as_ref());
                if let Some(rows) = rows {
                    self.start_rows(stage, rows);
                }
            }
            RunEvent::StageProgress { stage, done, total, unit } => self.progress(stage, *done, *total, unit),
            RunEvent::StageFinished { stage, outcome, .. } => {
                if let Some(bar) = self.bars.remove(stage) {
                    bar.finish_and_clear();
                }
                let code = match outcome {
                    StageOutcome::Done => "32",
                    StageOutcome::Failed { .. } => "31",
                    StageOutcome::Skipped { .. } | StageOutcome::Cancelled => "33",
                };
                self.say(&line(event).unwrap_or_default(), code);
            }
            other => {
                if let Some(line) = line(other) {
                    self.say(&line, if matches!(other, RunEvent::RunFinished { .. }) { "1" } else { "" });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_and_names_are_for_people() {
        assert_eq!([rate(0.0), rate(0.386), rate(2.14), rate(57.3)], ["", "23/min", "2.1/s", "57/s"]);
        assert_eq!(pace(20, Some(60), Duration::from_secs(10)), ", 2.0/s, 30 s left");
        assert_eq!([pace(0, Some(60), Duration::ZERO), pace(50, None, Duration::from_secs(2))], ["", ", 25/s"]);
        assert_eq!(shortened("fan[model=a-very-long-name,lr=0.1]", 24), "fan[model=a-…ame,lr=0.1]");
        assert_eq!(printable("a\u{1b}[2Jb\tc"), "a\\u{1b}[2Jb\tc");
    }
}
