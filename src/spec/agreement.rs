//! Property tests: serde_yaml and the span-preserving tree read the same, and no text makes either panic.

use std::path::Path;

use proptest::prelude::*;

use super::document::Document;
use super::tests::{Kinds, parse};
use super::*;

/// A document in one of the ways in which YAML can be written.
#[derive(Clone, Debug)]
enum Yaml {
    /// Text that stands on one line as it is.
    Inline(String),
    /// `|` or `>`, with the lines that follow.
    Lines(&'static str, Vec<String>),
    FlowList(Vec<Yaml>),
    List(Vec<Yaml>),
    FlowMap(Vec<(String, Yaml)>),
    Map(Vec<(String, Yaml)>),
    /// Something that an alias can stand for.
    Anchored(Box<Yaml>),
    /// An alias of the nearest anchor before it, or null where there is none.
    Alias,
}

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
    "-",
    "- a",
    "?",
];

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => "[a-z]{1,3}",
        1 => prop::sample::select(vec!["1", "1.5", "~", "true", "\"quoted key\"", "'k'", "007", "ü", "0x1"]).prop_map(str::to_owned),
    ]
}

fn flow_scalar() -> impl Strategy<Value = Yaml> {
    prop_oneof![
        3 => prop::sample::select(SCALARS).prop_map(|text| match text {
            // These begin a structure rather than a scalar.
            "-" | "- a" | "?" => Yaml::Inline(format!("'{text}'")),
            text => Yaml::Inline(text.to_owned()),
        }),
        1 => "[a-z][a-z0-9 ]{0,6}[a-z]".prop_map(Yaml::Inline),
        1 => "[0-9.eE+x_-]{1,6}[0-9]".prop_map(Yaml::Inline),
        1 => Just(Yaml::Alias),
    ]
}

fn flow() -> impl Strategy<Value = Yaml> {
    flow_scalar().prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Yaml::FlowList),
            prop::collection::vec((key(), inner.clone()), 0..4).prop_map(Yaml::FlowMap),
            inner.prop_map(|yaml| Yaml::Anchored(Box::new(yaml))),
        ]
    })
}

fn yaml() -> impl Strategy<Value = Yaml> {
    let lines = prop::collection::vec("[a-z:#\"'é-]{0,3} ?[a-z]{0,4}", 1..4);
    let styles = prop::sample::select(vec!["|", ">", "|-", ">-", "|+", ">+"]);
    let leaf = prop_oneof![4 => flow(), 1 => (styles, lines).prop_map(|(style, lines)| Yaml::Lines(style, lines))];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..4).prop_map(Yaml::List),
            prop::collection::vec((key(), inner), 1..4).prop_map(Yaml::Map),
        ]
    })
}

/// Writes YAML text, and numbers the anchors.
#[derive(Default)]
struct Writer {
    text: String,
    anchors: usize,
    /// Inside how many anchored nodes the writer is, for which no alias may stand yet.
    open: usize,
}

impl Writer {
    /// Writes a value behind a key or a dash, with the line end.
    fn block(&mut self, yaml: &Yaml, indent: usize) {
        match yaml {
            Yaml::List(items) => {
                self.text.push('\n');
                for item in items {
                    self.text.push_str(&format!("{:indent$}-", ""));
                    self.block(item, indent + 2);
                }
            }
            Yaml::Map(entries) => {
                self.text.push('\n');
                for (key, value) in entries {
                    self.text.push_str(&format!("{:indent$}{key}:", ""));
                    self.block(value, indent + 2);
                }
            }
            Yaml::Lines(style, lines) => {
                // The first line tells the indentation, so it must not begin with a space.
                self.text.push_str(&format!(" {style}\n{:indent$}x\n", ""));
                lines.iter().for_each(|line| self.text.push_str(&format!("{:indent$}{line}\n", "")));
            }
            flow => {
                self.text.push(' ');
                self.flow(flow);
                self.text.push('\n');
            }
        }
    }

    fn flow(&mut self, yaml: &Yaml) {
        match yaml {
            Yaml::Inline(text) => self.text.push_str(text),
            Yaml::FlowList(items) => {
                self.text.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.text.push_str(if index > 0 { ", " } else { "" });
                    self.flow(item);
                }
                self.text.push(']');
            }
            Yaml::FlowMap(entries) => {
                self.text.push_str("{ ");
                for (index, (key, value)) in entries.iter().enumerate() {
                    self.text.push_str(&format!("{}{key}: ", if index > 0 { ", " } else { "" }));
                    self.flow(value);
                }
                self.text.push_str(" }");
            }
            Yaml::Anchored(inner) if self.open == 0 && !matches!(**inner, Yaml::Anchored(_) | Yaml::Alias) => {
                self.anchors += 1;
                self.text.push_str(&format!("&a{} ", self.anchors));
                self.open += 1;
                self.flow(inner);
                self.open -= 1;
            }
            Yaml::Anchored(inner) => self.flow(inner),
            Yaml::Alias if self.anchors > 0 && self.open == 0 => self.text.push_str(&format!("*a{} ", self.anchors)),
            _ => self.text.push('~'),
        }
    }
}

/// Both readings of an included file, each `None` where it refuses the text.
fn read_both(text: &str) -> (Option<raw::Pipeline>, Option<raw::Pipeline>) {
    let fast =
        serde_yaml::from_str::<raw::Pipeline>(text).ok().filter(|raw| raw.name.is_none() && outputs_are_typed(raw));
    let document = Document::new("x.yaml", text);
    let reading = shape::read(&document, 0, &shape::INCLUDED);
    let careful = reading.problems.is_empty().then(|| serde_json::from_value(reading.value).unwrap());
    (fast, careful)
}

/// The tree misses the `type` of an output at once, the other reading leaves that to the resolver.
fn outputs_are_typed(raw: &raw::Pipeline) -> bool {
    let stages = raw.stages.iter().flat_map(|stages| &stages.0);
    let mut outputs = stages.flat_map(|(_, stage)| &stage.outputs).flat_map(|outputs| &outputs.0);
    outputs.all(|(_, output)| output.port_type.is_some())
}

/// A stage whose fields hold whatever comes.
fn stage() -> impl Strategy<Value = Vec<(String, Yaml)>> {
    let names: Vec<&str> = shape::STAGE.fields.iter().map(|field| field.name).filter(|name| *name != "uses").collect();
    let text = "[a-z]{1,4}(\\.[a-z]{1,4})?".prop_map(Yaml::Inline);
    let port_type = prop::sample::select(vec![
        "tree",
        "table",
        "{ type: table, columns: { a: int64 } }",
        "{ type: tree, columns: }",
    ])
    .prop_map(|text| Yaml::Inline(text.to_owned()));
    let external = prop::sample::select(vec![
        "{ path: a/b }",
        "{ url: 'x://y', digest: abc }",
        "{ artifact: a@b }",
        "{ path: 1 }",
    ])
    .prop_map(|text| Yaml::Inline(text.to_owned()));
    let simple = prop_oneof![text, port_type, external, flow_scalar()];
    let fitting = prop_oneof![
        simple.clone(),
        prop::collection::vec(simple.clone(), 0..3).prop_map(Yaml::FlowList),
        prop::collection::vec((key(), simple), 0..3).prop_map(Yaml::FlowMap),
        yaml(),
    ];
    prop::collection::vec((prop::sample::select(names).prop_map(str::to_owned), fitting), 0..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn both_readings_of_any_value_agree(yaml in yaml()) {
        let mut writer = Writer::default();
        writer.text.push_str("params:\n  v:");
        writer.block(&yaml, 4);
        let (fast, careful) = read_both(&writer.text);
        prop_assert_eq!(fast, careful, "{}", writer.text);
    }

    #[test]
    fn both_readings_of_a_stage_agree(fields in stage()) {
        let mut writer = Writer::default();
        writer.text.push_str("stages:\n  s:\n    uses: k\n");
        for (name, yaml) in &fields {
            writer.text.push_str(&format!("    {name}:"));
            writer.block(yaml, 6);
        }
        let (fast, careful) = read_both(&writer.text);
        prop_assert_eq!(fast, careful, "{}", writer.text);
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
            let disagreed = errors.errors.iter().any(|error| error.message.starts_with("the file can't be read"));
            prop_assert!(!disagreed, "{}", text);
        }
    }
}
