//! Reasons of misses as they are read: which columns, which files, and how many are named.

use std::collections::BTreeMap;

use serde_json::json;

use super::tests::sample;
use super::*;
use crate::digest::Digest;

/// The reasons between two changes of one pre-image.
fn told(before: impl FnOnce(&mut Preimage), after: impl FnOnce(&mut Preimage)) -> String {
    let (mut old, mut new) = (sample(), sample());
    before(&mut old);
    after(&mut new);
    let reasons = difference(&old, &new, &BTreeMap::new());
    reasons.iter().map(MissReason::to_string).collect::<Vec<_>>().join("; ")
}

/// A table as the key has it, read from what records hold.
fn table(columns: &[(&str, u8)]) -> InputIdentity {
    let columns: serde_json::Map<String, Value> = columns
        .iter()
        .map(|(name, digest)| ((*name).to_owned(), json!(["int64", Digest([*digest; 32]).to_string()])))
        .collect();
    serde_json::from_value(json!({ "type": "table", "rows": 2, "columns": columns })).expect("a table reads back")
}

fn reading(columns: &[(&str, u8)]) -> impl FnOnce(&mut Preimage) {
    let table = table(columns);
    move |preimage| drop(preimage.inputs.insert("rows".into(), table))
}

#[test]
fn a_changed_table_names_its_changed_columns() {
    let same = [("a", 1), ("b", 2)];
    assert_eq!(told(reading(&same), reading(&same)), "");
    assert_eq!(told(reading(&same), reading(&[("a", 1), ("b", 3)])), "input rows changed (columns b)");
    assert_eq!(told(reading(&same), reading(&[("a", 1)])), "input rows changed (columns b)");
    assert_eq!(
        told(reading(&[]), reading(&[("a", 1), ("b", 2), ("c", 3)])),
        "input rows changed (columns a, b, c)",
        "three are all named"
    );
    assert_eq!(
        told(reading(&[]), reading(&[("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5)])),
        "input rows changed (columns a, b, c and 2 more)"
    );
}

#[test]
fn a_new_column_is_no_other_order() {
    let ordered = |names: &[&str]| {
        let columns: Vec<(&str, u8)> = names.iter().map(|name| (*name, 1)).collect();
        let InputIdentity::Table { rows, columns, .. } = table(&columns) else { unreachable!("it is a table") };
        let order = names.iter().map(|name| (*name).to_owned()).collect();
        let input = InputIdentity::Table { rows, columns, order };
        move |preimage: &mut Preimage| drop(preimage.inputs.insert("rows".into(), input))
    };
    assert_eq!(told(ordered(&["a", "b"]), ordered(&["a", "b", "c"])), "input rows changed (columns c)");
    assert_eq!(told(ordered(&["a", "b"]), ordered(&["b", "a"])), "input rows changed (the order of its columns)");
}

#[test]
fn a_changed_file_of_a_command_is_no_changed_command() {
    let command = |text: &str, file: u8| {
        let files = BTreeMap::from([("work.sh".to_owned(), Digest([file; 32]))]);
        let program = ProgramIdentity::Command { command: json!(text), files };
        move |preimage: &mut Preimage| preimage.program = program
    };
    assert_eq!(told(command("sh work.sh", 1), command("sh work.sh", 1)), "");
    assert_eq!(told(command("sh work.sh", 1), command("sh work.sh", 2)), "program changed: work.sh");
    let both = told(command("sh work.sh", 1), command("sh work.sh -v", 2));
    assert!(both.starts_with("its command changed") && both.ends_with("; program changed: work.sh"), "{both}");
}
