//! What a program tells the engine while it works: one JSON object a line.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// How far a program that is not by-row has come.
    Progress {
        /// Units done.
        done: u64,
        /// Units in all.
        total: Option<u64>,
        /// What a unit is (`tasks`, `steps`).
        #[serde(default)]
        unit: String,
    },
    /// A figure to keep with the record.
    Metric {
        /// Its name; `group/name`.
        name: String,
        /// The step it belongs to, where there are steps.
        #[serde(default)]
        step: Option<u64>,
        /// Its value.
        value: f64,
    },
    /// A message for people.
    Log {
        /// `debug`, `info`, `warning` or `error`.
        level: String,
        /// What to say.
        message: String,
    },
    /// A checkpoint is whole: a folder in the state folder that is not written to any more. The engine shares it through the
    /// store, so that another machine can go on from it.
    Checkpoint {
        /// Relative to the state folder.
        path: String,
        /// How far it goes, in the unit of the parameter that `continues` where there is one.
        order: u64,
    },
    /// The answer to a row.
    Row(RowResult),
}

/// What became of one row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowResult {
    /// The digest that came with the row.
    pub row: String,
    /// How it ended.
    pub status: RowStatus,
    /// A word for it, where it did not end well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// More about the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Rows for each output port; a port that is left out gets none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub outputs: BTreeMap<String, Vec<Map<String, Value>>>,
}

/// How a row ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowStatus {
    /// Kept.
    Done,
    /// Kept: the row itself is at fault, another try would end the same.
    Rejected,
    /// Not kept: the cause lies outside the row (a lost GPU, a rate limit).
    Failed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_event_is_flat() {
        let line = r#"{"event":"row","row":"ab","status":"done","outputs":{"rows":[{"x":1}]}}"#;
        let Event::Row(row) = serde_json::from_str(line).unwrap() else { panic!("not a row") };
        assert_eq!(row.outputs["rows"][0]["x"], 1);
        assert_eq!(serde_json::to_string(&Event::Row(row)).unwrap(), line);
    }

    #[test]
    fn an_unknown_status_is_refused() {
        assert!(serde_json::from_str::<Event>(r#"{"event":"row","row":"a","status":"ok"}"#).is_err());
    }
}
