//! A document beside the table of what it may hold: every mistake of structure at once, and the rest of it to go on with.

use std::collections::HashSet;
use std::sync::Arc;

use cuda_agent_protocol::ColumnType;
use cuda_agent_protocol::manifest::bytes;
use serde_json::Value;

use super::deserialize;
use super::document::{Broken, Document, Place, Spot, Step};
use super::error::{Problem, did_you_mean, list, nearest};
use super::shape::{Field, Presence, Record, Shape};
use super::tree::{Content, Entries, Entry, Meaning, Node, Scalar, SyntaxError};

/// A document, checked.
pub(crate) struct Checked {
    /// What is right of it: the document's own root where all is, else a tree without the broken parts.
    pub root: Arc<Node>,
    pub problems: Vec<Problem>,
    /// The parts that were left out.
    pub broken: Broken,
}

/// What stands for a required field that is missing or broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Absent {
    Nothing,
    /// Something harmless of its shape, so that a type without optional fields can be read and the rest of it checked.
    StandIn,
}

/// Checks document number `index`, which must be a `record`.
pub(crate) fn check(document: &Document, index: usize, record: &'static Record, absent: Absent) -> Checked {
    let root = Spot::Root(index);
    let mut checker = Checker::new(absent);
    let right = match document.tree() {
        Ok(node) => checker.record(record, node, &root),
        Err(error) => {
            checker.problems.push(syntax_problem(document, error, &root));
            None
        }
    };
    let right = right.unwrap_or_else(|| {
        checker.broken.add(root.place());
        checker.stand_in(record)
    });
    Checked { root: right, problems: checker.problems, broken: checker.broken }
}

/// A value that stands for itself, as on the command line; or the first thing that is wrong with it.
pub(crate) fn value(text: &str) -> Result<Value, Box<Problem>> {
    let document = Document::new("", text);
    let root = Spot::Root(0);
    let node = document.tree().map_err(|error| syntax_problem(&document, error, &root))?;
    if node.is_null() && node.span.is_empty() {
        return Err(Box::new(Problem::new(root.place(), "no value is written")));
    }
    let mut checker = Checker::new(Absent::Nothing);
    let right = checker.node(&ANYTHING, node, &root);
    match (right, checker.problems.into_iter().next()) {
        (Some(node), None) => deserialize::read(&node).map_err(|mistake| Box::new(mistake.problem(0))),
        (_, problem) => Err(Box::new(problem.unwrap_or_else(|| Problem::new(root.place(), "it can't be read")))),
    }
}

fn syntax_problem(document: &Document, error: &SyntaxError, root: &Spot) -> Problem {
    let problem = Problem::new(root.place(), format!("YAML syntax: {}", error.message));
    problem.maybe_hint(syntax_hint(&document.text, error.at)).at(marked(document, error.at))
}

/// The character at a byte, so that there is something to put a caret under.
fn marked(document: &Document, at: usize) -> std::ops::Range<usize> {
    let length = document.text[at..].chars().next().filter(|c| *c != '\n').map_or(0, char::len_utf8);
    at..at + length
}

fn syntax_hint(text: &str, at: usize) -> Option<String> {
    let start = text[..at].rfind('\n').map_or(0, |at| at + 1);
    let line = text[start..].lines().next().unwrap_or_default();
    if line.trim_start_matches(' ').starts_with('\t') {
        return Some("indent with spaces; YAML allows no tabs there".to_owned());
    }
    if line.matches(": ").count() > 1 && !line.contains('{') {
        return Some("put text that holds `: ` in quotes".to_owned());
    }
    let before = &text[..at];
    for (open, close) in [('{', '}'), ('[', ']')] {
        if before.matches(open).count() > before.matches(close).count() {
            return Some(format!("a `{open}` before this has no `{close}`"));
        }
    }
    None
}

struct Checker {
    absent: Absent,
    problems: Vec<Problem>,
    broken: Broken,
}

impl Checker {
    fn new(absent: Absent) -> Self {
        Self { absent, problems: Vec::new(), broken: Broken::default() }
    }

    /// The node without what is wrong below it, which is the same node where nothing is; `None` where it is wrong itself.
    fn node(&mut self, shape: &Shape, node: &Arc<Node>, spot: &Spot) -> Option<Arc<Node>> {
        let target = node.target();
        if let Some(tag) = target.tag.as_ref().filter(|_| !matches!(shape, Shape::Written)) {
            return self.refuse(spot, format!("tags such as `{tag}` have no meaning here"));
        }
        match (shape, &target.content) {
            (Shape::Either(shapes), content) => self.either(shape, shapes, content, node, spot),
            (Shape::List(item), Content::List(items)) => Some(self.list(item, items, node, spot)),
            (Shape::Any(_), Content::List(items)) => Some(self.list(&ANYTHING, items, node, spot)),
            (Shape::Map(item), Content::Map(entries)) => Some(self.map(item, entries, node, spot)),
            (Shape::Any(_), Content::Map(entries)) => Some(self.map(&ANYTHING, entries, node, spot)),
            (Shape::Record(record), _) => self.record(record, node, spot),
            (Shape::Any(_), Content::Scalar(Scalar { text, meaning: Meaning::Unfit })) => {
                self.refuse(spot, format!("{text} is no finite number of 64 bits"))
            }
            (Shape::Any(_), _) => Some(Arc::clone(node)),
            (_, Content::Scalar(scalar)) => match fits(shape, scalar) {
                Ok(()) => Some(Arc::clone(node)),
                Err(hint) => self.wrong(shape, node, spot, hint),
            },
            _ => self.wrong(shape, node, spot, None),
        }
    }

    fn either(
        &mut self,
        whole: &Shape,
        shapes: &[Shape],
        content: &Content,
        node: &Arc<Node>,
        spot: &Spot,
    ) -> Option<Arc<Node>> {
        let fitting = shapes.iter().find(|shape| match shape {
            Shape::List(_) => matches!(content, Content::List(_)),
            Shape::Map(_) | Shape::Record(_) => matches!(content, Content::Map(_)),
            _ => matches!(content, Content::Scalar(_)),
        });
        match fitting {
            Some(Shape::Text) if !matches!(content, Content::Scalar(scalar) if scalar.is_text()) => {
                self.wrong(whole, node, spot, None)
            }
            Some(shape) => self.node(shape, node, spot),
            None => self.wrong(whole, node, spot, None),
        }
    }

    fn list(&mut self, item: &Shape, items: &[Arc<Node>], node: &Arc<Node>, spot: &Spot) -> Arc<Node> {
        let mut right = Right::of(items);
        for (index, node) in items.iter().enumerate() {
            let checked = self.node(item, node, &spot.index(index));
            let is_same = checked.as_ref().is_some_and(|checked| Arc::ptr_eq(checked, node));
            right.next(is_same, checked);
        }
        right.changed.map_or_else(|| Arc::clone(node), |items| node.target().with_items(items))
    }

    fn map(&mut self, item: &Shape, entries: &Entries, node: &Arc<Node>, spot: &Spot) -> Arc<Node> {
        let mut right = Right::of(&entries.list);
        let mut seen = Seen::new(&entries.list);
        for entry in &entries.list {
            let value = self.new_key(&mut seen, entry, spot).and_then(|key| {
                let value = self.node(item, &entry.value, &spot.key(key));
                // A stage that is no mapping still exists for those that name it.
                value.or_else(|| match item {
                    Shape::Record(record) => Some(self.stand_in(record)),
                    _ => None,
                })
            });
            right.next_entry(entry, value);
        }
        right.changed.map_or_else(|| Arc::clone(node), |entries| node.target().with_entries(entries))
    }

    fn record(&mut self, record: &'static Record, node: &Arc<Node>, spot: &Spot) -> Option<Arc<Node>> {
        let Content::Map(entries) = &node.target().content else {
            self.no_mapping(record, node, spot.place());
            return None;
        };
        let mut right = Right::of(&entries.list);
        let mut seen = Seen::new(&entries.list);
        for entry in &entries.list {
            let value = self.new_key(&mut seen, entry, spot).and_then(|key| {
                let below = spot.key(key);
                match record.fields.iter().find(|field| field.name == key) {
                    None => self.unknown_field(record, key, &entries.list, below.place()),
                    // An empty field is the same as none, also for the deserializer.
                    Some(_) if entry.value.is_null() => Some(Arc::clone(&entry.value)),
                    Some(field) => self.node(&field.shape, &entry.value, &below),
                }
            });
            right.next_entry(entry, value);
        }
        for field in record.fields.iter().filter(|field| field.is_missing(|name| has_value(&entries.list, name))) {
            self.missing_field(record, field, &entries.list, &spot.place());
        }
        let stand_ins = self.stand_ins(record, |name| has_value(right.items(), name));
        if !stand_ins.is_empty() {
            right.changed.get_or_insert_with(|| entries.list.clone()).extend(stand_ins);
        }
        Some(right.changed.map_or_else(|| Arc::clone(node), |entries| node.target().with_entries(entries)))
    }

    fn no_mapping(&mut self, record: &Record, node: &Node, place: Place) {
        let message = match place.steps.last() {
            None if node.is_null() => "the file is empty".to_owned(),
            None => format!("{} must be a mapping, not {}", record.what, node.describe()),
            Some(_) => format!("{} must be a mapping, not {}", subject(&place), node.describe()),
        };
        let hint = format!("{} has: {}", record.what, list(record.fields.iter().map(|field| field.name)));
        self.broken.add(place.clone());
        self.problems.push(Problem::new(place, message).hint(hint));
    }

    /// What stands for a mapping that isn't there.
    fn stand_in(&self, record: &'static Record) -> Arc<Node> {
        Node::empty().with_entries(self.stand_ins(record, |_| false))
    }

    /// What stands for required fields that aren't there.
    fn stand_ins(&self, record: &'static Record, is_there: impl Fn(&str) -> bool) -> Vec<Entry> {
        if self.absent == Absent::Nothing {
            return Vec::new();
        }
        let missing =
            record.fields.iter().filter(|field| field.presence == Presence::Required && !is_there(field.name));
        missing
            .map(|field| Entry { key: Some(field.name.to_owned()), key_span: 0..0, value: self.harmless(field) })
            .collect()
    }

    fn harmless(&self, field: &Field) -> Arc<Node> {
        match &field.shape {
            Shape::List(_) => Node::empty().with_items(Vec::new()),
            Shape::Map(_) => Node::empty().with_entries(Vec::new()),
            Shape::Record(record) => self.stand_in(record),
            Shape::Choice(choices) => Node::text(choices[0]),
            Shape::Column => Node::text("utf8"),
            _ => Node::text(""),
        }
    }

    /// The key of an entry, if it is text and comes for the first time.
    fn new_key<'a>(&mut self, seen: &mut Seen<'a>, entry: &'a Entry, spot: &Spot) -> Option<&'a str> {
        let Some(key) = entry.key.as_deref() else {
            let problem = Problem::new(spot.place(), "a key must be text").at(entry.key_span.clone());
            self.problems.push(problem);
            seen.count += 1;
            return None;
        };
        if seen.is_new(key) {
            return Some(key);
        }
        let place = spot.place();
        let what = if place.steps.is_empty() { "field" } else { one_of(&place) };
        let problem = Problem::new(place, format!("duplicate {what} `{key}`"));
        self.problems.push(problem.hint("rename or remove one of them").at(entry.key_span.clone()));
        None
    }

    fn unknown_field(&mut self, record: &Record, key: &str, entries: &[Entry], place: Place) -> Option<Arc<Node>> {
        let absent = |name: &&str| !entries.iter().any(|entry| entry.key.as_deref() == Some(*name));
        let names = record.fields.iter().map(|field| field.name);
        let hint = match key {
            "<<" => Some("merge keys aren't applied; write the fields out".to_owned()),
            _ => did_you_mean(key, names.clone().filter(absent)),
        };
        let all = format!("{} has: {}", record.what, list(names));
        let problem = Problem::new(place.clone().name(), format!("unknown field `{key}` in {}", record.what));
        self.problems.push(problem.hint(hint.unwrap_or(all)));
        self.broken.add(place);
        None
    }

    fn missing_field(&mut self, record: &Record, field: &Field, entries: &[Entry], place: &Place) {
        // A misspelt field is one mistake, not two.
        let names = || record.fields.iter().map(|field| field.name);
        let misspelt = entries
            .iter()
            .filter_map(|entry| entry.key.as_deref())
            .filter(|key| !names().any(|name| name == *key))
            .any(|key| key == "<<" || nearest(key, [field.name]).is_some());
        self.broken.add(place.clone().key(field.name));
        if !misspelt {
            let problem =
                Problem::new(place.clone().name(), format!("{} needs `{}`", named(place, record), field.name));
            self.problems.push(problem.hint(format!("`{}`: {}", field.name, field.doc)));
        }
    }

    fn wrong(&mut self, shape: &Shape, node: &Node, spot: &Spot, hint: Option<String>) -> Option<Arc<Node>> {
        let place = spot.place();
        let message = format!("{} must be {}, not {}", subject(&place), shape.expected(), node.describe());
        self.broken.add(place.clone());
        let hint = hint.or_else(|| correction(shape, node.target(), &place));
        self.problems.push(Problem::new(place, message).maybe_hint(hint));
        None
    }

    fn refuse(&mut self, spot: &Spot, message: String) -> Option<Arc<Node>> {
        self.broken.add(spot.place());
        self.problems.push(Problem::new(spot.place(), message));
        None
    }
}

const ANYTHING: Shape = Shape::Any("a value");

fn has_value(entries: &[Entry], name: &str) -> bool {
    entries.iter().any(|entry| entry.key.as_deref() == Some(name) && !entry.value.is_null())
}

/// What is right of a list or mapping: copied only once something is not.
struct Right<'a, T> {
    all: &'a [T],
    /// How many were looked at.
    count: usize,
    changed: Option<Vec<T>>,
}

impl<'a, T: Clone> Right<'a, T> {
    fn of(all: &'a [T]) -> Self {
        Self { all, count: 0, changed: None }
    }

    /// The next one: as it is, or what is left of it.
    fn next(&mut self, is_same: bool, left: Option<T>) {
        if !is_same || self.changed.is_some() {
            self.changed.get_or_insert_with(|| self.all[..self.count].to_vec()).extend(left);
        }
        self.count += 1;
    }

    fn items(&self) -> &[T] {
        self.changed.as_deref().unwrap_or(self.all)
    }
}

impl Right<'_, Entry> {
    fn next_entry(&mut self, entry: &Entry, value: Option<Arc<Node>>) {
        let is_same = value.as_ref().is_some_and(|value| Arc::ptr_eq(value, &entry.value));
        if is_same && self.changed.is_none() {
            self.count += 1;
        } else {
            self.next(false, value.map(|value| Entry { value, ..entry.clone() }));
        }
    }
}

/// The keys of a mapping so far. Most mappings have a handful of entries, for which a set costs more than it saves.
struct Seen<'a> {
    entries: &'a [Entry],
    count: usize,
    many: Option<HashSet<&'a str>>,
}

impl<'a> Seen<'a> {
    fn new(entries: &'a [Entry]) -> Self {
        let many = (entries.len() > 8).then(|| HashSet::with_capacity(entries.len()));
        Self { entries, count: 0, many }
    }

    /// Whether the key of the next entry is none of those before.
    fn is_new(&mut self, key: &'a str) -> bool {
        let before = &self.entries[..self.count];
        self.count += 1;
        match &mut self.many {
            Some(seen) => seen.insert(key),
            None => before.iter().all(|entry| entry.key.as_deref() != Some(key)),
        }
    }
}

/// Whether a scalar fits, or a hint why it doesn't.
fn fits(shape: &Shape, scalar: &Scalar) -> Result<(), Option<String>> {
    let text = scalar.text.as_str();
    let whole = match &scalar.meaning {
        Meaning::Number(number) => number.as_u64(),
        _ => None,
    };
    let fits = match shape {
        Shape::Text if scalar.is_text() => true,
        Shape::Text if !text.is_empty() => return Err(Some(format!("put it in quotes: \"{text}\""))),
        Shape::Written => true,
        Shape::Boolean if matches!(scalar.meaning, Meaning::Boolean(_)) => true,
        Shape::Boolean => return Err(boolean_hint(text)),
        Shape::Whole => whole.is_some_and(|number| number <= u64::from(u32::MAX)),
        Shape::Number => matches!(scalar.meaning, Meaning::Number(_)),
        Shape::Size if whole.is_some() || (scalar.is_text() && bytes::parse(text).is_some()) => true,
        Shape::Size => return Err(Some("units are KB, MB, GB, TB, KiB, MiB, GiB and TiB".to_owned())),
        Shape::Column if text.parse::<ColumnType>().is_ok() => true,
        Shape::Column => return Err(column_hint(text)),
        Shape::Choice(choices) if choices.contains(&text) => true,
        Shape::Choice(choices) => return Err(did_you_mean(text, choices.iter().copied())),
        _ => false,
    };
    if fits { Ok(()) } else { Err(None) }
}

/// The same thing as it should have been written, where that is plain.
fn correction(shape: &Shape, node: &Node, place: &Place) -> Option<String> {
    let Content::Scalar(scalar) = &node.content else { return None };
    match shape {
        _ if node.is_null() => None,
        Shape::List(_) if matches!(place.steps.as_slice(), [.., Step::Key(key)] if key == "run") => {
            Some(command_hint(&scalar.text))
        }
        Shape::List(_) => Some(format!("write `[{}]`", scalar.text)),
        Shape::Either([Shape::Text, Shape::List(Shape::Written)]) => {
            Some(format!("put it in quotes: \"{}\"", scalar.text))
        }
        _ => None,
    }
}

/// A kind's command is a list of words, and no shell reads it.
fn command_hint(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=+@%".contains(c);
    let words: Vec<&str> = text.split_whitespace().collect();
    match words.iter().all(|word| word.chars().all(is_plain)) {
        true => format!("write it as words: `run: [{}]`", words.join(", ")),
        false => format!(
            "write it as words, such as `run: [python, main.py]`; for a shell, `run: [sh, -c, {}]`",
            serde_json::Value::from(text)
        ),
    }
}

fn boolean_hint(text: &str) -> Option<String> {
    match text.to_lowercase().as_str() {
        "yes" | "on" | "y" => Some("write `true`".to_owned()),
        "no" | "off" | "n" => Some("write `false`".to_owned()),
        _ => None,
    }
}

fn column_hint(text: &str) -> Option<String> {
    let known = match text.to_lowercase().as_str() {
        "string" | "str" | "text" => Some("utf8"),
        "int" | "integer" | "int32" | "long" => Some("int64"),
        "float" | "double" | "number" | "float32" => Some("float64"),
        "boolean" => Some("bool"),
        "bytes" => Some("binary"),
        _ => None,
    };
    let types = "column types are bool, int64, float64, utf8, binary, list<…> and struct<name:type,…>";
    Some(known.map_or_else(|| types.to_owned(), |known| format!("did you mean `{known}`?")))
}

/// What stands at a place: `` `timeout` ``, or "item 2 of `tags`".
pub(crate) fn subject(place: &Place) -> String {
    match place.steps.as_slice() {
        [.., Step::Key(key)] => format!("`{key}`"),
        [.., Step::Key(key), Step::Index(index)] => format!("item {} of `{key}`", index + 1),
        [.., Step::Index(index)] => format!("item {}", index + 1),
        [] => "the file".to_owned(),
    }
}

/// "stage `train`" for a stage, "a retry" for what has no name.
fn named(place: &Place, record: &Record) -> String {
    match place.steps.as_slice() {
        [.., Step::Key(parent), Step::Key(name)]
            if matches!(parent.as_str(), "stages" | "inputs" | "outputs" | "params" | "secrets") =>
        {
            let noun = record.what.trim_start_matches("an ").trim_start_matches("a ");
            format!("{noun} `{name}`")
        }
        _ => record.what.to_owned(),
    }
}

/// What one entry of the mapping at a place is.
fn one_of(place: &Place) -> &'static str {
    match place.steps.as_slice() {
        [Step::Key(key)] if key == "stages" => "stage",
        [.., Step::Key(key)] => match key.as_str() {
            "params" | "with" => "parameter",
            "inputs" => "input",
            "outputs" => "output",
            "secrets" => "secret",
            "matrix" => "axis",
            "columns" => "column",
            "env" => "variable",
            _ => "key",
        },
        _ => "key",
    }
}
