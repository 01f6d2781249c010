//! How values look in the output of more than one command.

use serde_json::Value;

/// A time, in seconds since 1970, as `2026-01-31 23:59 UTC`.
pub fn when(seconds: f64) -> String {
    let text = cuda_agent_engine::timestamp(seconds.max(0.0) as u64);
    format!("{}-{}-{} {}:{} UTC", &text[..4], &text[4..6], &text[6..8], &text[9..11], &text[11..13])
}

/// A value in one line, unless it is wanted whole.
pub fn cell_text(cell: &Value, full: bool) -> String {
    let text = match cell {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    if full {
        return text.replace('\n', "\n                               ");
    }
    let line = text.replace('\n', "⏎");
    if line.chars().count() <= 70 { line } else { line.chars().take(69).chain("…".chars()).collect() }
}
