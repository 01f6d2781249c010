//! Property tests: values come back as they were written, scalars mean what they mean to serde_yaml, every field of the
//! tables has a type that takes it, and no text makes the reader panic.

use std::path::Path;

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::check::{Absent, check, value};
use super::document::Document;
use super::shape::{Record, Shape};
use super::tests::{Kinds, parse};
use super::*;

/// In the ways in which people write them, and in some in which they don't.
const SCALARS: &[&str] = &[
    "~",
    "null",
    "Null",
    "NULL",
    "nUll",
    "true",
    "True",
    "TRUE",
    "false",
    "yes",
    "no",
    "on",
    "off",
    "y",
    "0",
    "-0",
    "+1",
    "12",
    "-7",
    "007",
    "-012",
    "0x1F",
    "0XFF",
    "-0x1f",
    "+0x1f",
    "0x",
    "0o17",
    "0o8",
    "017",
    "0b101",
    "-0b1",
    "1e3",
    "1E-3",
    "1.",
    ".5",
    "-.5",
    "1.10",
    "+1.5",
    "1_000",
    ".inf",
    "-.inf",
    ".nan",
    "+.inf",
    "inf",
    "nan",
    "infinity",
    "e5",
    "1e400",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775808",
    "-9223372036854775809",
    "340282366920938463463374607431768211456",
    "1:30",
    "12:30:45",
    "2001-12-14",
    "a b",
    "a#b",
    "a:b",
    "=",
    "<<",
    "\"\"",
    "''",
    "\"1\"",
    "'1'",
    "\"a\\tb\\u00e9\\n\"",
    "'it''s'",
    "\"~\"",
    "'null'",
    "!!str 12",
    "!!int 12",
    "!!float 1",
    "!!bool true",
    "!!null ~",
    "über",
    "世界",
    "🦀",
    "${params.x}",
    "\"${params.x} $${y}\"",
];

/// What serde_yaml reads; `None` where it refuses the text, or reads what no JSON can hold.
fn by_serde_yaml(text: &str) -> Option<Value> {
    let read: serde_yaml::Value = serde_yaml::from_str(text).ok()?;
    match &read {
        serde_yaml::Value::Number(number) if number.as_f64().is_some_and(|number| !number.is_finite()) => None,
        _ => serde_json::to_value(read).ok(),
    }
}

#[test]
fn scalars_mean_what_they_mean_to_serde_yaml() {
    for text in SCALARS {
        assert_eq!(value(text).ok(), by_serde_yaml(text), "{text}");
    }
}

/// A text with every field of a shape; of alternatives, the one of that number.
fn sample(shape: &Shape, number: usize) -> String {
    let entries = |record: &Record| {
        let fields = record.fields.iter().map(|field| format!("{}: {}", field.name, sample(&field.shape, number)));
        fields.collect::<Vec<String>>().join(", ")
    };
    match shape {
        Shape::Text => "x".to_owned(),
        Shape::Written | Shape::Any(_) | Shape::Whole => "1".to_owned(),
        Shape::Boolean => "true".to_owned(),
        Shape::Number => "1.5".to_owned(),
        Shape::Size => ["4GiB", "4096"][number % 2].to_owned(),
        Shape::Column => "\"list<int64>\"".to_owned(),
        Shape::Choice(choices) => choices[number % choices.len()].to_owned(),
        Shape::List(item) => format!("[{}]", sample(item, number)),
        Shape::Map(item) => format!("{{ x: {} }}", sample(item, number)),
        Shape::Record(record) => format!("{{ {} }}", entries(record)),
        Shape::Either(shapes) => sample(&shapes[number % shapes.len()], number / shapes.len()),
    }
}

fn reads_every_field<T: for<'de> Deserialize<'de>>(record: &'static Record) {
    for number in 0..36 {
        let text = sample(&Shape::Record(record), number);
        let document = Document::new("x.yaml", text);
        let checked = check(&document, 0, record, Absent::Nothing);
        assert!(checked.problems.is_empty(), "{}: {:?}", document.text, checked.problems);
        let read = deserialize::read::<T>(&checked.root);
        assert!(read.is_ok(), "{}: {:?}", document.text, read.err());
    }
}

#[test]
fn every_field_of_the_tables_is_read() {
    reads_every_field::<raw::Pipeline>(&shape::PIPELINE);
    reads_every_field::<raw::Pipeline>(&shape::INCLUDED);
    reads_every_field::<Project>(&shape::PROJECT);
    reads_every_field::<Manifest>(&shape::MANIFEST);
}

fn any_value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_filter("finite", |number| number.is_finite()).prop_map(Value::from),
        "\\PC{0,12}|[a-z:#\"'é\n -]{0,20}|[0-9.eExob_+-]{1,6}".prop_map(Value::from),
        prop::sample::select(SCALARS).prop_map(Value::from),
    ];
    scalar.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("[a-z]{1,3}|[0-9]{1,2}|~|true|ü|a: b", inner), 0..4)
                .prop_map(|entries| Value::Object(entries.into_iter().collect::<Map<String, Value>>())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn what_serde_yaml_writes_is_read(written in any_value()) {
        let text = serde_yaml::to_string(&written).unwrap();
        let read = value(&text).map_err(|problem| TestCaseError::fail(format!("{}: {text}", problem.message)))?;
        prop_assert_eq!(read, written, "{}", text);
    }

    #[test]
    fn any_word_means_what_it_means_to_serde_yaml(text in "[0-9.eE+x_-]{1,8}|[+-]?(0x|0o|0b)?[0-9a-fA-F]{1,40}|[+-]?\\.?(inf|Inf|INF|nan|NaN)") {
        // These begin and end a document.
        prop_assume!(text != "---" && text != "...");
        prop_assert_eq!(value(&text).ok(), by_serde_yaml(&text), "{}", text);
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,60}|[ \\n\\t:{}\\[\\],&*!|>'\"%@`#?a-c0-9-]{0,80}") {
        if let Err(errors) = parse(&text) {
            prop_assert!(!errors.errors.is_empty());
            errors.render(false);
        }
        let _ = parse_manifest(&text, Path::new("stage.yaml")).map_err(|errors| errors.render(true));
        let _ = parse_project(&text, Path::new("cuda-agent.yaml")).map_err(|errors| errors.render(false));
    }

    #[test]
    fn a_damaged_pipeline_is_read_or_explained(damage in prop::collection::vec((any::<prop::sample::Index>(), "[ \\n\\t:{}\\[\\],&*!|>'\"${.a=é-]{0,3}"), 1..4)) {
        let mut text = include_str!("../../tests/fixtures/spec/good/everything.yaml").to_owned();
        for (at, piece) in damage {
            let mut start = at.index(text.len());
            while !text.is_char_boundary(start) {
                start -= 1;
            }
            let end = text[start..].chars().next().map_or(start, |c| start + c.len_utf8());
            text.replace_range(start..end, &piece);
        }
        let none = |_: &Path| Ok("stages: { included: { uses: run, run: x, outputs: { out: tree } } }".to_owned());
        if let Err(errors) = parse_pipeline(&text, Path::new("x.yaml"), Path::new(""), &Kinds::new(), &[], &none) {
            prop_assert!(!errors.errors.is_empty());
            errors.render(false);
        }
    }
}
