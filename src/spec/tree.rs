//! YAML as a tree that knows where everything stands in the text.
//!
//! serde_yaml stops at the first mistake and forgets positions of values, so this second reading is made once a
//! file is known to be wrong, or when somebody asks where a stage is written. Scalars get their types by the
//! rules of serde_yaml; a property test holds the two together.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use saphyr_parser::{Event, Parser, ScalarStyle, Span, Tag};
use serde_json::{Number, Value};

/// How deep lists and mappings may nest, which is serde_yaml's own limit.
const DEEPEST: usize = 128;
/// How many nodes aliases may stand for, besides what the text itself has room for: aliases of aliases can stand for more
/// than any memory holds.
const MOST_REPEATED: usize = 1_000_000;

/// A piece of YAML and the bytes of the text that it covers.
#[derive(Debug)]
pub(crate) struct Node {
    pub span: Range<usize>,
    pub content: Content,
    /// A tag such as `!thing`; those of YAML itself are applied and dropped.
    pub tag: Option<String>,
    /// What it is once aliases are replaced by what they stand for.
    size: Size,
}

/// How much a node is with all below it.
#[derive(Clone, Copy, Debug)]
struct Size {
    nodes: usize,
    levels: usize,
}

impl Size {
    const ONE: Self = Self { nodes: 1, levels: 0 };

    fn around(items: &[Arc<Node>]) -> Self {
        let nodes = items.iter().fold(1, |sum: usize, item| sum.saturating_add(item.size.nodes));
        Self { nodes, levels: 1 + items.iter().map(|item| item.size.levels).max().unwrap_or(0) }
    }
}

#[derive(Debug)]
pub(crate) enum Content {
    Scalar(Scalar),
    List(Vec<Arc<Node>>),
    Map(Entries),
    /// `*anchor`, with what the anchor stands for.
    Alias(Arc<Node>),
}

#[derive(Debug)]
pub(crate) struct Scalar {
    /// As written, without quotes and escapes.
    pub text: String,
    /// `None` where it is a number that no JSON can hold.
    pub value: Option<Value>,
}

/// The entries of a mapping in the order of the text.
#[derive(Debug)]
pub(crate) struct Entries {
    pub list: Vec<Entry>,
    /// Where each key comes first, made for the first search.
    first: OnceLock<HashMap<String, usize>>,
}

impl Entries {
    /// The first entry of that key.
    pub fn get(&self, key: &str) -> Option<&Entry> {
        let first = self.first.get_or_init(|| {
            let mut first = HashMap::with_capacity(self.list.len());
            for (index, entry) in self.list.iter().enumerate() {
                if let Some(key) = &entry.key {
                    first.entry(key.clone()).or_insert(index);
                }
            }
            first
        });
        first.get(key).map(|index| &self.list[*index])
    }
}

#[derive(Debug)]
pub(crate) struct Entry {
    /// `None` where the key is a list or a mapping.
    pub key: Option<String>,
    pub key_span: Range<usize>,
    pub value: Arc<Node>,
}

/// Why the text is no YAML, and at which byte.
#[derive(Debug)]
pub(crate) struct SyntaxError {
    pub at: usize,
    pub message: String,
}

impl Node {
    /// The node itself, or what an alias stands for.
    pub fn target(&self) -> &Node {
        match &self.content {
            Content::Alias(target) => target.target(),
            _ => self,
        }
    }

    /// Whether nothing is written here, or `~` or `null`.
    pub fn is_null(&self) -> bool {
        matches!(&self.target().content, Content::Scalar(Scalar { value: Some(Value::Null), .. }))
    }

    /// What it is, for messages.
    pub fn describe(&self) -> String {
        match &self.target().content {
            Content::Scalar(Scalar { value: Some(value), .. }) => cuda_agent_protocol::manifest::describe(value),
            Content::Scalar(scalar) => format!("the number {}", scalar.text),
            Content::List(_) => "a list".to_owned(),
            Content::Map(_) | Content::Alias(_) => "a mapping".to_owned(),
        }
    }
}

/// Reads one document.
pub(crate) fn parse(text: &str) -> Result<Arc<Node>, SyntaxError> {
    let offsets = Offsets::new(text);
    let mut builder = Builder { offsets: &offsets, text, stack: Vec::new(), anchors: HashMap::new(), root: None };
    let mut documents = 0;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| SyntaxError {
            at: offsets.byte(error.marker().index()),
            message: error.info().to_owned(),
        })?;
        if let Event::DocumentStart(_) = event {
            documents += 1;
        }
        if documents > 1 {
            let message = "a second document starts here; only one is read".to_owned();
            return Err(SyntaxError { at: offsets.byte(span.start.index()), message });
        }
        builder.event(event, span)?;
    }
    let empty =
        || Node { span: 0..0, content: Content::Scalar(scalar(String::new(), true, None)), tag: None, size: Size::ONE };
    Ok(builder.root.unwrap_or_else(|| Arc::new(empty())))
}

/// The parser counts characters, slices count bytes.
struct Offsets {
    /// The byte of each character; empty where the text is ASCII and the two agree.
    bytes: Vec<usize>,
    end: usize,
}

impl Offsets {
    fn new(text: &str) -> Self {
        let bytes = if text.is_ascii() { Vec::new() } else { text.char_indices().map(|(at, _)| at).collect() };
        Self { bytes, end: text.len() }
    }

    fn byte(&self, character: usize) -> usize {
        if self.bytes.is_empty() { character.min(self.end) } else { *self.bytes.get(character).unwrap_or(&self.end) }
    }
}

/// A list or mapping that is still being read.
struct Open {
    start: usize,
    anchor: usize,
    tag: Option<String>,
    items: Vec<Arc<Node>>,
    is_map: bool,
}

struct Builder<'a> {
    offsets: &'a Offsets,
    text: &'a str,
    stack: Vec<Open>,
    anchors: HashMap<usize, Arc<Node>>,
    root: Option<Arc<Node>>,
}

impl Builder<'_> {
    fn event(&mut self, event: Event<'_>, span: Span) -> Result<(), SyntaxError> {
        let range = self.range(span);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let tag = tag.as_deref();
                let content = Content::Scalar(scalar(text.into_owned(), style == ScalarStyle::Plain, tag));
                self.add(Node { span: range, content, tag: foreign(tag), size: Size::ONE }, anchor);
            }
            Event::Alias(anchor) => {
                let Some(target) = self.anchors.get(&anchor) else {
                    let message = "an alias can't stand inside what it stands for".to_owned();
                    return Err(SyntaxError { at: range.start, message });
                };
                let (content, size) = (Content::Alias(Arc::clone(target)), target.size);
                self.add(Node { span: range, content, tag: None, size }, 0);
            }
            Event::SequenceStart(anchor, tag) => self.open(range.start, anchor, foreign(tag.as_deref()), false)?,
            Event::MappingStart(anchor, tag) => self.open(range.start, anchor, foreign(tag.as_deref()), true)?,
            Event::SequenceEnd | Event::MappingEnd => self.close(range.end)?,
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) | Event::DocumentEnd => {}
        }
        Ok(())
    }

    fn range(&self, span: Span) -> Range<usize> {
        let start = self.offsets.byte(span.start.index());
        start..self.offsets.byte(span.end.index()).max(start)
    }

    fn open(&mut self, start: usize, anchor: usize, tag: Option<String>, is_map: bool) -> Result<(), SyntaxError> {
        if self.stack.len() >= DEEPEST {
            return Err(SyntaxError { at: start, message: format!("nested more than {DEEPEST} levels deep") });
        }
        self.stack.push(Open { start, anchor, tag, items: Vec::new(), is_map });
        Ok(())
    }

    fn close(&mut self, end: usize) -> Result<(), SyntaxError> {
        let Some(open) = self.stack.pop() else { return Ok(()) };
        let size = Size::around(&open.items);
        let refuse = |message: String| Err(SyntaxError { at: open.start, message });
        if size.levels > DEEPEST {
            return refuse(format!("nested more than {DEEPEST} levels deep"));
        }
        if size.nodes > MOST_REPEATED + 2 * self.text.len() {
            return refuse("aliases repeat too much".to_owned());
        }
        let end = end.max(open.start);
        let trimmed = open.start + self.text[open.start..end].trim_end().len();
        let content = if open.is_map { Content::Map(entries(open.items)) } else { Content::List(open.items) };
        self.add(Node { span: open.start..trimmed, content, tag: open.tag, size }, open.anchor);
        Ok(())
    }

    fn add(&mut self, node: Node, anchor: usize) {
        let node = Arc::new(node);
        if anchor > 0 {
            self.anchors.insert(anchor, Arc::clone(&node));
        }
        match self.stack.last_mut() {
            Some(open) => open.items.push(node),
            None => self.root = Some(node),
        }
    }
}

/// Keys and values come one after the other.
fn entries(items: Vec<Arc<Node>>) -> Entries {
    let mut list = Vec::with_capacity(items.len() / 2);
    let mut items = items.into_iter();
    while let (Some(key), Some(value)) = (items.next(), items.next()) {
        let text = match &key.target().content {
            Content::Scalar(scalar) => Some(scalar.text.clone()),
            _ => None,
        };
        list.push(Entry { key: text, key_span: key.span.clone(), value });
    }
    Entries { list, first: OnceLock::new() }
}

/// A tag that YAML itself doesn't define.
fn foreign(tag: Option<&Tag>) -> Option<String> {
    tag.filter(|tag| !tag.is_yaml_core_schema()).map(Tag::to_string)
}

fn scalar(text: String, plain: bool, tag: Option<&Tag>) -> Scalar {
    let core = tag.filter(|tag| tag.is_yaml_core_schema()).map(|tag| tag.suffix.as_str());
    let value = match core {
        Some("null") => is_null(&text).then_some(Value::Null),
        Some("bool") => boolean(&text).map(Value::Bool),
        Some("int") => integer(&text).flatten(),
        Some("float") => float(&text),
        Some(_) => Some(Value::String(text.clone())),
        None if plain => plain_value(&text),
        None => Some(Value::String(text.clone())),
    };
    Scalar { text, value }
}

/// The value of an unquoted scalar; `None` where it is a number that no JSON can hold.
pub(crate) fn plain_value(text: &str) -> Option<Value> {
    if text.is_empty() || is_null(text) {
        return Some(Value::Null);
    }
    if let Some(value) = boolean(text) {
        return Some(Value::Bool(value));
    }
    if let Some(value) = integer(text) {
        return value;
    }
    if !has_leading_zeros(text) && looks_like_float(text) {
        return float(text);
    }
    Some(Value::String(text.to_owned()))
}

fn is_null(text: &str) -> bool {
    matches!(text, "null" | "Null" | "NULL" | "~")
}

fn boolean(text: &str) -> Option<bool> {
    match text {
        "true" | "True" | "TRUE" => Some(true),
        "false" | "False" | "FALSE" => Some(false),
        _ => None,
    }
}

/// `Some(None)` where it is an integer, but one that needs more than 64 bits.
fn integer(text: &str) -> Option<Option<Value>> {
    if let Some(value) = unsigned(text, u64::from_str_radix) {
        return Some(Some(Value::from(value)));
    }
    if let Some(value) = negative(text, i64::from_str_radix) {
        return Some(Some(Value::from(value)));
    }
    let wide = unsigned(text, u128::from_str_radix).is_some() || negative(text, i128::from_str_radix).is_some();
    wide.then_some(None)
}

type FromRadix<T> = fn(&str, u32) -> Result<T, std::num::ParseIntError>;

fn unsigned<T>(text: &str, from_radix: FromRadix<T>) -> Option<T> {
    let digits = text.strip_prefix('+').unwrap_or(text);
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        let Some(rest) = digits.strip_prefix(prefix) else { continue };
        return if rest.starts_with(['+', '-']) { None } else { from_radix(rest, radix).ok() };
    }
    if digits.starts_with(['+', '-']) || has_leading_zeros(text) {
        return None;
    }
    from_radix(digits, 10).ok()
}

fn negative<T>(text: &str, from_radix: FromRadix<T>) -> Option<T> {
    for (prefix, radix) in [("-0x", 16), ("-0o", 8), ("-0b", 2)] {
        if let Some(rest) = text.strip_prefix(prefix) {
            return from_radix(&format!("-{rest}"), radix).ok();
        }
    }
    if has_leading_zeros(text) { None } else { from_radix(text, 10).ok() }
}

/// `007` is text in YAML 1.2.
fn has_leading_zeros(text: &str) -> bool {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    digits.len() > 1 && digits.starts_with('0') && digits.bytes().all(|byte| byte.is_ascii_digit())
}

fn looks_like_float(text: &str) -> bool {
    let unsigned = text.strip_prefix('+').unwrap_or(text);
    if text.starts_with('+') && unsigned.starts_with(['+', '-']) {
        return false;
    }
    let infinite = |text: &str| matches!(text, ".inf" | ".Inf" | ".INF");
    infinite(unsigned)
        || text.strip_prefix('-').is_some_and(infinite)
        || matches!(text, ".nan" | ".NaN" | ".NAN")
        || unsigned.parse::<f64>().is_ok_and(f64::is_finite)
}

/// `None` for what isn't finite, which has no place in JSON.
fn float(text: &str) -> Option<Value> {
    let value: f64 = text.strip_prefix('+').unwrap_or(text).parse().ok()?;
    Number::from_f64(value).map(Value::Number)
}
