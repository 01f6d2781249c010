//! What YAML files may hold, as data.
//!
//! The same tables drive the reading of the span-preserving tree, which gathers every mistake of structure, and the
//! JSON Schema for editors.

use std::sync::Arc;

use cuda_agent_protocol::ColumnType;
use cuda_agent_protocol::manifest::bytes;
use serde_json::{Map, Value};

use super::document::{Broken, Document, Place, Step};
use super::error::{Problem, did_you_mean, list};
use super::tree::{Content, Entries, Entry, Node};

/// What may stand at one place of a file.
#[derive(Debug)]
pub(crate) enum Shape {
    /// Text; a number or a boolean isn't taken for it.
    Text,
    /// Any scalar, taken as it is written: `1.10` stays `1.10`.
    Written,
    /// Any value, of which the description tells what it means.
    Any(&'static str),
    Boolean,
    Whole,
    Number,
    /// A number of bytes, or `4GiB`.
    Size,
    /// A column type such as `list<int64>`.
    Column,
    Choice(&'static [&'static str]),
    List(&'static Shape),
    /// Names that the author chooses.
    Map(&'static Shape),
    Record(&'static Record),
    /// By what is written: one shape for scalars, one for lists, one for mappings.
    Either(&'static [Shape]),
}

/// A mapping with a fixed set of fields.
#[derive(Debug)]
pub(crate) struct Record {
    /// With its article, for messages: "a stage".
    pub what: &'static str,
    pub fields: &'static [Field],
}

#[derive(Debug)]
pub(crate) struct Field {
    pub name: &'static str,
    pub shape: Shape,
    pub required: bool,
    pub doc: &'static str,
}

const fn field(name: &'static str, shape: Shape, doc: &'static str) -> Field {
    Field { name, shape, required: false, doc }
}

const fn required(name: &'static str, shape: Shape, doc: &'static str) -> Field {
    Field { name, shape, required: true, doc }
}

const PORT_TYPES: Shape = Shape::Choice(&["tasks", "table", "trajectories", "model", "tree", "report"]);
const COLUMNS: Shape = Shape::Map(&Shape::Column);
const WORDS: Shape = Shape::List(&Shape::Text);
const VALUES: Shape = Shape::Map(&Shape::Any("a value"));

/// `{env: NAME}` or `{file: PATH}`.
static SECRET: Record = Record {
    what: "a secret",
    fields: &[
        field("env", Shape::Text, "The environment variable of the engine that holds it."),
        field("file", Shape::Text, "The file that holds it, relative to the pipeline's folder."),
    ],
};

/// An input from outside of the pipeline.
static EXTERNAL: Record = Record {
    what: "an input from outside",
    fields: &[
        field("path", Shape::Text, "A file or a folder, relative to the pipeline's folder."),
        field("url", Shape::Text, "Where to fetch it; needs `digest`."),
        field("digest", Shape::Text, "BLAKE3 of the bytes behind `url`, 64 hex digits."),
        field("artifact", Shape::Text, "A tagged artifact of the store, `name@tag`."),
    ],
};

static RESOURCES: Record = Record {
    what: "`resources`",
    fields: &[
        field(
            "cpu",
            Shape::Any("a whole number, or `all`"),
            "CPU cores; `all`: the machine's, or a GPU's part of them.",
        ),
        field("memory", Shape::Any("a size such as 4GiB"), "Memory, for scheduling."),
        field("gpu", Shape::Any("a whole number"), "Whole GPUs."),
    ],
};

static RETRY: Record = Record {
    what: "`retry`",
    fields: &[
        field("attempts", Shape::Any("a whole number"), "Tries after the first."),
        field(
            "backoff",
            Shape::Any("a duration such as 1s"),
            "Wait before the second try, doubled for each further one.",
        ),
        field("max_backoff", Shape::Any("a duration such as 1m"), "Longest wait."),
    ],
};

static OUTPUT: Record = Record {
    what: "an output",
    fields: &[
        required("type", PORT_TYPES, "What it makes."),
        field("columns", COLUMNS, "The columns of a table, with their types."),
    ],
};

/// A stage of a pipeline.
pub(crate) static STAGE: Record = Record {
    what: "a stage",
    fields: &[
        required("uses", Shape::Text, "The stage kind, or `run` for a command of your own."),
        field(
            "inputs",
            Shape::Map(&Shape::Either(&[
                Shape::Text,
                Shape::List(&Shape::Either(&[Shape::Text, Shape::Record(&EXTERNAL)])),
                Shape::Record(&EXTERNAL),
            ])),
            "By port: `stage.output`, `stage[*].output`, a list of those, `{path: …}`, `{url: …, digest: …}` or `{artifact: name@tag}`.",
        ),
        field("with", VALUES, "Parameters of the kind."),
        field("matrix", VALUES, "Makes one stage for each combination of the values of its axes."),
        field("tags", WORDS, "For selection with `tag:NAME`."),
        field(
            "when",
            Shape::Any("a boolean, `${params.x}` or `${params.x} == value`"),
            "Leaves the stage out where it is false.",
        ),
        field("resources", Shape::Record(&RESOURCES), "What it needs, instead of what its kind says."),
        field(
            "retry",
            Shape::Either(&[Shape::Any("a whole number"), Shape::Record(&RETRY)]),
            "How often to try again.",
        ),
        field("timeout", Shape::Any("a duration such as 2h"), "Ends the stage after this long."),
        field("env", Shape::Map(&Shape::Written), "Environment variables; they count in the key."),
        field("secrets", WORDS, "Names of the pipeline's secrets that it sees as environment variables."),
        field("allow_failed_rows", Shape::Any("a whole number"), "How many rows may fail without failing the stage."),
        field("max_rejected", Shape::Any("a whole number"), "More rejected rows than this fail the stage."),
        field(
            "run",
            Shape::Either(&[Shape::Text, Shape::List(&Shape::Written)]),
            "For `uses: run`: text for `sh -euc`, or a list of words.",
        ),
        field(
            "outputs",
            Shape::Map(&Shape::Either(&[PORT_TYPES, Shape::Record(&OUTPUT)])),
            "For `uses: run`: its output ports.",
        ),
        field("files", WORDS, "For `uses: run`: files that the command needs, relative to the pipeline's folder."),
    ],
};

const PARAMS_DOC: &str = "Parameters of the pipeline and their defaults, for `${params.NAME}`.";
const SECRETS_DOC: &str = "Where secrets come from: `{env: NAME}` or `{file: PATH}`.";
const INCLUDE_DOC: &str = "Files with more params, secrets and stages, relative to this one.";
const STAGES_DOC: &str = "The stages, by name.";

/// A pipeline file.
pub(crate) static PIPELINE: Record = Record {
    what: "a pipeline",
    fields: &[
        required("name", Shape::Text, "Runs are filed under it."),
        field("params", VALUES, PARAMS_DOC),
        field("secrets", Shape::Map(&Shape::Record(&SECRET)), SECRETS_DOC),
        field("include", WORDS, INCLUDE_DOC),
        required("stages", Shape::Map(&Shape::Record(&STAGE)), STAGES_DOC),
    ],
};

/// A file that a pipeline includes.
pub(crate) static INCLUDED: Record = Record {
    what: "an included file",
    fields: &[
        field("params", VALUES, PARAMS_DOC),
        field("secrets", Shape::Map(&Shape::Record(&SECRET)), SECRETS_DOC),
        field("include", WORDS, INCLUDE_DOC),
        field("stages", Shape::Map(&Shape::Record(&STAGE)), STAGES_DOC),
    ],
};

/// `cuda-agent.yaml`.
pub(crate) static PROJECT: Record = Record {
    what: "a project",
    fields: &[
        field(
            "store",
            Shape::Text,
            "The URL of the store: file:///folder, s3://bucket/folder, gs://bucket/folder, az://container/folder or memory://.",
        ),
        field("endpoint", Shape::Text, "The server of a remote store, where it isn't the cloud's own."),
        field("region", Shape::Text, "The region of a remote store."),
        field("single_writer", Shape::Boolean, "Allows a remote store that can't keep two writers apart."),
        field("read_only", Shape::Boolean, "Writes nothing to a remote store."),
        field("local_max", Shape::Size, "How much of a remote store is kept here, such as 100GB."),
        field("pipeline", Shape::Text, "The pipeline that commands use by default."),
        field("stages", WORDS, "Folders with stage kinds of the project."),
        field("python", Shape::Text, "The Python interpreter that stages run with."),
        field("work", Shape::Text, "The folder for everything local."),
    ],
};

static INPUT_PORT: Record = Record {
    what: "an input port",
    fields: &[
        required("type", PORT_TYPES, "What it takes."),
        field("columns", COLUMNS, "The columns that the program reads; all where there are none."),
        field("optional", Shape::Boolean, "Whether the stage runs without it."),
        field("list", Shape::Boolean, "Whether it takes several outputs."),
        field("doc", Shape::Written, "For people."),
    ],
};

static OUTPUT_COLUMN: Record = Record {
    what: "a column",
    fields: &[
        required("name", Shape::Written, "Its name."),
        required("type", Shape::Column, "Its type."),
        field("measured", Shape::Boolean, "Whether it holds measurements."),
        field("doc", Shape::Written, "For people."),
    ],
};

static OUTPUT_PORT: Record = Record {
    what: "an output port",
    fields: &[
        required("type", PORT_TYPES, "What it makes."),
        field("columns", Shape::List(&Shape::Record(&OUTPUT_COLUMN)), "The columns of a table."),
        field("doc", Shape::Written, "For people."),
    ],
};

static PARAM: Record = Record {
    what: "a parameter",
    fields: &[
        required("type", Shape::Choice(&["integer", "number", "string", "boolean", "list", "map"]), "Its type."),
        field("default", Shape::Any("a value"), "The value where the pipeline gives none."),
        field("min", Shape::Number, "Smallest number allowed."),
        field("max", Shape::Number, "Largest number allowed."),
        field("choices", Shape::List(&Shape::Any("a value")), "Allowed values."),
        field("continues", Shape::Boolean, "Whether raising it goes on from the last checkpoint."),
        field("doc", Shape::Written, "For people."),
    ],
};

static KIND_RESOURCES: Record = Record {
    what: "`resources`",
    fields: &[
        field("cpu", Shape::Whole, "CPU cores."),
        field("memory", Shape::Size, "Memory."),
        field("gpu", Shape::Whole, "Whole GPUs."),
    ],
};

static TOOLCHAIN: Record = Record {
    what: "`toolchain`",
    fields: &[
        field("python", WRITTEN_WORDS, "Python distributions whose versions count."),
        field("python_if_installed", WRITTEN_WORDS, "Others whose versions count where they are installed."),
    ],
};

static BY_ROW: Record = Record {
    what: "`by_row`",
    fields: &[
        required("port", Shape::Written, "The input whose rows are independent."),
        field("window", Shape::Whole, "Rows that one program may have unanswered."),
        field("window_per_core", Shape::Whole, "The same for each core of the program, where that is more."),
        field("workers", Shape::Whole, "Programs side by side; 0: as resources allow."),
        field("row_timeout_s", Shape::Number, "Seconds that one row may take."),
    ],
};

const WRITTEN_WORDS: Shape = Shape::List(&Shape::Written);

/// A stage kind's `stage.yaml`. Texts are [`Shape::Written`], which is how serde reads a `String` from YAML.
pub(crate) static MANIFEST: Record = Record {
    what: "a manifest",
    fields: &[
        required("name", Shape::Written, "`group/name`."),
        required("version", Shape::Written, "Semantic version."),
        required("summary", Shape::Written, "One sentence."),
        field("inputs", Shape::Map(&Shape::Record(&INPUT_PORT)), "Input ports."),
        required("outputs", Shape::Map(&Shape::Record(&OUTPUT_PORT)), "Output ports."),
        field("params", Shape::Map(&Shape::Record(&PARAM)), "Parameters."),
        field("resources", Shape::Record(&KIND_RESOURCES), "What one program needs."),
        field("env", WRITTEN_WORDS, "Environment variables that the program sees and that count in its key."),
        field("toolchain", Shape::Record(&TOOLCHAIN), "Versions that count in the key."),
        field("determinism", Shape::Choice(&["exact", "measured", "sampled"]), "How far two runs of a key agree."),
        field("by_row", Shape::Record(&BY_ROW), "Set where rows are independent."),
        field("checkpoints", Shape::Boolean, "Whether another machine can go on from checkpoints of the same work."),
        required("run", WRITTEN_WORDS, "The command."),
        field("sources", WRITTEN_WORDS, "Files that make up the program."),
    ],
};

impl Shape {
    /// What is expected, for messages.
    pub fn expected(&self) -> String {
        match self {
            Self::Text => "text".to_owned(),
            Self::Written => "text or a number".to_owned(),
            Self::Any(what) => (*what).to_owned(),
            Self::Boolean => "true or false".to_owned(),
            Self::Whole => "a whole number".to_owned(),
            Self::Number => "a number".to_owned(),
            Self::Size => "a size such as 4GiB".to_owned(),
            Self::Column => "a column type such as `utf8`".to_owned(),
            Self::Choice(choices) => format!("one of {}", choices.join(", ")),
            Self::List(_) => "a list".to_owned(),
            Self::Map(_) | Self::Record(_) => "a mapping".to_owned(),
            Self::Either(shapes) => {
                let mut expected: Vec<String> = shapes.iter().map(Shape::expected).collect();
                let last = expected.pop().unwrap_or_default();
                format!("{} or {last}", expected.join(", "))
            }
        }
    }
}

/// A document read by its shape.
pub(crate) struct Reading {
    /// What could be read; broken parts are left out.
    pub value: Value,
    pub problems: Vec<Problem>,
    /// The parts that were left out.
    pub broken: Broken,
}

/// Reads document number `index` as a `record`, and gathers all that is wrong with its structure.
pub(crate) fn read(document: &Document, index: usize, record: &'static Record) -> Reading {
    let root = Place::root(index);
    let mut reader = Reader { problems: Vec::new(), broken: Broken::default() };
    let value = match document.tree() {
        Ok(node) => reader.record(record, node, &root, true),
        Err(error) => {
            let problem = Problem::new(root.clone(), format!("YAML syntax: {}", error.message));
            reader
                .problems
                .push(problem.maybe_hint(syntax_hint(&document.text, error.at)).at(marked(document, error.at)));
            None
        }
    };
    let value = value.unwrap_or_else(|| {
        reader.broken.add(root);
        Value::Object(Map::new())
    });
    Reading { value, problems: reader.problems, broken: reader.broken }
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

struct Reader {
    problems: Vec<Problem>,
    broken: Broken,
}

impl Reader {
    fn node(&mut self, shape: &Shape, node: &Node, place: &Place) -> Option<Value> {
        let target = node.target();
        if let Some(tag) = target.tag.as_ref().filter(|_| !matches!(shape, Shape::Written)) {
            return self.refuse(place, format!("tags such as `{tag}` have no meaning here"));
        }
        match (shape, &target.content) {
            (Shape::Any(_), _) => self.any(target, place),
            (Shape::Either(shapes), content) => self.either(shape, shapes, content, node, place),
            (Shape::List(item), Content::List(items)) => Some(self.list(item, items, place)),
            (Shape::Map(item), Content::Map(entries)) => Some(self.map(item, &entries.list, place)),
            (Shape::Record(record), _) => self.record(record, node, place, false),
            (_, Content::Scalar(scalar)) => match scalar_of(shape, &scalar.text, scalar.value.as_ref()) {
                Ok(value) => Some(value),
                Err(hint) => self.wrong(shape, node, place, hint),
            },
            _ => self.wrong(shape, node, place, None),
        }
    }

    fn either(
        &mut self,
        whole: &Shape,
        shapes: &[Shape],
        content: &Content,
        node: &Node,
        place: &Place,
    ) -> Option<Value> {
        let fitting = shapes.iter().find(|shape| match shape {
            Shape::List(_) => matches!(content, Content::List(_)),
            Shape::Map(_) | Shape::Record(_) => matches!(content, Content::Map(_)),
            _ => matches!(content, Content::Scalar(_)),
        });
        match fitting {
            Some(Shape::Text) if !matches!(content, Content::Scalar(scalar) if scalar.value.as_ref().is_some_and(Value::is_string)) => {
                self.wrong(whole, node, place, None)
            }
            Some(shape) => self.node(shape, node, place),
            None => self.wrong(whole, node, place, None),
        }
    }

    fn list(&mut self, item: &Shape, items: &[Arc<Node>], place: &Place) -> Value {
        let read = |(index, node): (usize, &Arc<Node>)| self.node(item, node, &place.clone().index(index));
        Value::Array(items.iter().enumerate().filter_map(read).collect())
    }

    fn map(&mut self, item: &Shape, entries: &[Entry], place: &Place) -> Value {
        let mut map = Map::new();
        for (key, entry) in self.distinct(entries, place) {
            if let Some(value) = self.node(item, &entry.value, &place.clone().key(key)) {
                map.insert(key.to_owned(), value);
            } else if let Shape::Record(_) = item {
                // A stage that is no mapping still exists for those that name it.
                map.insert(key.to_owned(), Value::Object(Map::new()));
            }
        }
        Value::Object(map)
    }

    fn record(&mut self, record: &'static Record, node: &Node, place: &Place, is_root: bool) -> Option<Value> {
        let Content::Map(Entries { list: entries, .. }) = &node.target().content else {
            let message = match place.steps.last() {
                _ if is_root && node.is_null() => "the file is empty".to_owned(),
                None => format!("{} must be a mapping, not {}", record.what, node.describe()),
                Some(_) => format!("{} must be a mapping, not {}", subject(place), node.describe()),
            };
            let hint = format!("{} has: {}", record.what, list(record.fields.iter().map(|field| field.name)));
            self.broken.add(place.clone());
            self.problems.push(Problem::new(place.clone(), message).hint(hint));
            return None;
        };
        let mut map = Map::new();
        let mut present = Vec::new();
        for (key, entry) in self.distinct(entries, place) {
            let below = place.clone().key(key);
            match record.fields.iter().find(|field| field.name == key) {
                None => self.unknown_field(record, key, entries, below),
                // An empty field is the same as none.
                Some(_) if entry.value.is_null() => {}
                Some(field) => {
                    present.push(field.name);
                    if let Some(value) = self.node(&field.shape, &entry.value, &below) {
                        map.insert(key.to_owned(), value);
                    }
                }
            }
        }
        for field in record.fields.iter().filter(|field| field.required && !present.contains(&field.name)) {
            self.missing_field(record, field, entries, place);
        }
        Some(Value::Object(map))
    }

    /// The entries whose key is new and text.
    fn distinct<'a>(&mut self, entries: &'a [Entry], place: &Place) -> Vec<(&'a str, &'a Entry)> {
        let mut seen: std::collections::HashSet<&str> = std::collections::HashSet::new();
        let mut distinct = Vec::with_capacity(entries.len());
        for entry in entries {
            let Some(key) = entry.key.as_deref() else {
                let problem = Problem::new(place.clone(), "a key must be text").at(entry.key_span.clone());
                self.problems.push(problem);
                continue;
            };
            if seen.insert(key) {
                distinct.push((key, entry));
            } else {
                let what = if place.steps.is_empty() { "field" } else { one_of(place) };
                let problem = Problem::new(place.clone(), format!("duplicate {what} `{key}`"));
                self.problems.push(problem.hint("rename or remove one of them").at(entry.key_span.clone()));
            }
        }
        distinct
    }

    fn unknown_field(&mut self, record: &Record, key: &str, entries: &[Entry], place: Place) {
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
    }

    fn missing_field(&mut self, record: &Record, field: &Field, entries: &[Entry], place: &Place) {
        // A misspelt field is one mistake, not two.
        let names = || record.fields.iter().map(|field| field.name);
        let misspelt = entries
            .iter()
            .filter_map(|entry| entry.key.as_deref())
            .filter(|key| !names().any(|name| name == *key))
            .any(|key| key == "<<" || super::error::nearest(key, [field.name]).is_some());
        self.broken.add(place.clone().key(field.name));
        if !misspelt {
            let problem =
                Problem::new(place.clone().name(), format!("{} needs `{}`", named(place, record), field.name));
            self.problems.push(problem.hint(format!("`{}`: {}", field.name, field.doc)));
        }
    }

    /// A value of any type, without duplicate keys and odd numbers.
    fn any(&mut self, node: &Node, place: &Place) -> Option<Value> {
        match &node.content {
            Content::Scalar(scalar) => match &scalar.value {
                Some(value) => Some(value.clone()),
                None => self.refuse(place, format!("{} is no finite number of 64 bits", scalar.text)),
            },
            Content::List(items) => Some(self.list(&Shape::Any("a value"), items, place)),
            Content::Map(entries) => Some(self.map(&Shape::Any("a value"), &entries.list, place)),
            Content::Alias(target) => self.any(target, place),
        }
    }

    fn wrong(&mut self, shape: &Shape, node: &Node, place: &Place, hint: Option<String>) -> Option<Value> {
        let message = format!("{} must be {}, not {}", subject(place), shape.expected(), node.describe());
        self.broken.add(place.clone());
        let hint = hint.or_else(|| correction(shape, node.target(), place));
        self.problems.push(Problem::new(place.clone(), message).maybe_hint(hint));
        None
    }

    fn refuse(&mut self, place: &Place, message: String) -> Option<Value> {
        self.broken.add(place.clone());
        self.problems.push(Problem::new(place.clone(), message));
        None
    }
}

/// The value of a scalar, or a hint why it doesn't fit.
fn scalar_of(shape: &Shape, text: &str, value: Option<&Value>) -> Result<Value, Option<String>> {
    let is_text = value.is_some_and(Value::is_string);
    match shape {
        Shape::Text if is_text => Ok(Value::from(text)),
        Shape::Text if !text.is_empty() => Err(Some(format!("put it in quotes: \"{text}\""))),
        Shape::Written => Ok(Value::from(text)),
        Shape::Boolean => value.filter(|value| value.is_boolean()).cloned().ok_or_else(|| boolean_hint(text)),
        Shape::Whole => {
            value.filter(|value| value.as_u64().is_some_and(|n| n <= u64::from(u32::MAX))).cloned().ok_or(None)
        }
        Shape::Number => value.filter(|value| value.is_number()).cloned().ok_or(None),
        Shape::Size if value.is_some_and(Value::is_u64) => Ok(value.cloned().unwrap_or_default()),
        Shape::Size => match bytes::parse(text) {
            Some(_) if is_text => Ok(Value::from(text)),
            _ => Err(Some("units are KB, MB, GB, TB, KiB, MiB, GiB and TiB".to_owned())),
        },
        Shape::Column => match text.parse::<ColumnType>() {
            Ok(_) => Ok(Value::from(text)),
            Err(_) => Err(column_hint(text)),
        },
        Shape::Choice(choices) if choices.contains(&text) => Ok(Value::from(text)),
        Shape::Choice(choices) => Err(did_you_mean(text, choices.iter().copied())),
        _ => Err(None),
    }
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
    use super::document::Step;
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
    use super::document::Step;
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
