//! An episode as people read it.

use std::fmt::Write as _;

use serde_json::{Map, Value};

/// Lines of a turn's text that are shown where not all of it is wanted, from its beginning and from its end.
const LINES: (usize, usize) = (12, 6);

/// A row of a table of trajectories as text; with `full` every line of each turn.
pub fn episode(row: &Map<String, Value>, full: bool) -> String {
    let mut text = heading(row);
    for turn in row.get("turns").and_then(Value::as_array).into_iter().flatten() {
        write_turn(&mut text, turn, full).expect("strings take any text");
    }
    text
}

fn word<'a>(row: &'a Map<String, Value>, name: &str) -> &'a str {
    row.get(name).and_then(Value::as_str).unwrap_or("?")
}

fn heading(row: &Map<String, Value>) -> String {
    let number = |name: &str| row.get(name).and_then(Value::as_f64);
    let task: String = word(row, "task_digest").chars().take(8).collect();
    let mut text = format!("sample {} of task {task}, {}", number("sample").unwrap_or(0.0), word(row, "form"));
    let _ = write!(text, ", by {}", word(row, "policy_model"));
    match number("reward") {
        Some(reward) => drop(write!(text, ": reward {reward}")),
        None => text.push_str(": no reward"),
    }
    let reason = word(row, "finish_reason");
    if reason != "complete" {
        let _ = write!(text, " ({reason})");
    }
    text.push('\n');
    let generated = row.get("mask").and_then(Value::as_array);
    if let Some(mask) = generated {
        let written = mask.iter().filter(|generated| **generated == Value::Bool(true)).count();
        let _ = write!(text, "  {} tokens, {written} of them written", mask.len());
        let log_probs = row.get("log_probs").and_then(Value::as_array);
        let sum: f64 = log_probs.into_iter().flatten().filter_map(Value::as_f64).sum();
        if written > 0 {
            let _ = write!(text, ", mean log-probability {:.3}", sum / written as f64);
        }
        text.push('\n');
    }
    if let (Some(sampling), Some(judging)) = (number("sampling_s"), number("judging_s")) {
        let _ = writeln!(text, "  sampling {sampling:.1} s, judging {judging:.1} s");
    }
    text
}

fn write_turn(out: &mut String, turn: &Value, full: bool) -> std::fmt::Result {
    let tool = turn["tool"].as_str();
    let place = match (turn["start"].as_u64(), turn["end"].as_u64()) {
        (Some(start), Some(end)) => format!(" [{start}, {end})"),
        _ => String::new(),
    };
    match tool {
        Some(tool) => writeln!(out, "  ── {tool}({}){place}", turn["arguments"].as_str().unwrap_or_default())?,
        None => writeln!(out, "  ── {}{place}", turn["role"].as_str().unwrap_or("?"))?,
    }
    write_lines(out, turn["text"].as_str().unwrap_or_default(), full)?;
    let Some(outcome) = turn["outcome"].as_str() else { return Ok(()) };
    write!(out, "  => {}", outcome.replace('_', " "))?;
    if let Some(message) = turn["message"].as_str() {
        write!(out, ": {}", message.lines().next().unwrap_or_default())?;
    }
    match turn["reward"].as_f64() {
        Some(reward) => write!(out, "; reward {reward}")?,
        None => write!(out, "; no reward")?,
    }
    for (name, column) in [("eager", "speedup_eager"), ("torch.compile", "speedup_compile")] {
        if let Some(speedup) = turn[column].as_f64() {
            write!(out, "; {speedup:.2} × {name}")?;
        }
    }
    writeln!(out)
}

fn write_lines(out: &mut String, text: &str, full: bool) -> std::fmt::Result {
    let lines: Vec<&str> = text.lines().collect();
    let (first, last) = LINES;
    if full || lines.len() <= first + last + 1 {
        return lines.iter().try_for_each(|line| writeln!(out, "     {line}"));
    }
    lines[..first].iter().try_for_each(|line| writeln!(out, "     {line}"))?;
    writeln!(out, "     … {} lines, which --full shows", lines.len() - first - last)?;
    lines[lines.len() - last..].iter().try_for_each(|line| writeln!(out, "     {line}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Role;
    use crate::trajectory::{Turn, tests::example};

    #[test]
    fn an_episode_reads_from_above() {
        let mut trajectory = example();
        let long: Vec<String> = (1..=30).map(|line| format!("line {line}")).collect();
        trajectory.turns[0].text = long.join("\n");
        trajectory.turns[3].speedup_compile = Some(0.75);
        trajectory.turns.push(Turn {
            start: Some(8),
            end: Some(8),
            tool: Some("Bash".into()),
            arguments: Some("{\"command\":\"ls\"}".into()),
            ..Turn::new(Role::Tool, "model.py")
        });
        let row = trajectory.to_row().unwrap();
        insta::assert_snapshot!(episode(&row, false));
        assert!(episode(&row, true).contains("line 20\n"));
    }

    #[test]
    fn what_was_dropped_says_so() {
        let mut trajectory = example();
        trajectory.tokens = None;
        (trajectory.reward, trajectory.reward_at) = (None, None);
        trajectory.finish_reason = crate::trajectory::Ending::Aborted;
        trajectory.turns.iter_mut().for_each(|turn| (turn.start, turn.end) = (None, None));
        let text = episode(&trajectory.to_row().unwrap(), false);
        assert!(text.starts_with("sample 3 of task abcdef01, repair, by m: no reward (aborted)\n"), "{text}");
    }
}
