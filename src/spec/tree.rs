//! YAML as a tree of nodes, each with the part of the text that it covers.
//!
//! Every YAML text that the engine reads becomes such a tree: pipelines, manifests, project files, values of the
//! command line. saphyr-parser gives the events and their positions, serde_yaml says what a number is.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use saphyr_parser::{Event, Parser, ScalarStyle, Span, Tag};
use serde_json::{Number, Value};

/// How deep lists and mappings may nest: readers of a tree recurse.
const DEEPEST: usize = 128;
/// How many nodes aliases may stand for, besides what the text itself has room for: aliases of aliases can stand for more
/// than any memory holds.
const MOST_REPEATED: usize = 1_000_000;

/// Number of entries up to which a mapping is searched from its beginning.
const SEARCHED: usize = 24;

/// A piece of YAML and the bytes of the text that it covers.
#[derive(Debug)]
pub(crate) struct Node {
    pub span: Range<usize>,
    pub content: Content,
    /// A tag such as `!thing`; those of YAML itself are applied and dropped.
    pub tag: Option<Box<str>>,
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
    const EMPTY_COLLECTION: Self = Self { nodes: 1, levels: 1 };

    fn with(self, inner: Self) -> Self {
        Self { nodes: self.nodes.saturating_add(inner.nodes), levels: self.levels.max(1 + inner.levels) }
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
    pub meaning: Meaning,
}

/// What a scalar stands for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Meaning {
    Null,
    Boolean(bool),
    Number(Number),
    /// Nothing that JSON can hold: an infinite number, an integer of more than 64 bits, a text that its tag doesn't fit.
    Unfit,
    Text,
}

impl Scalar {
    /// One without quotes and tags.
    pub fn plain(text: &str) -> Self {
        Self { text: text.to_owned(), meaning: plain_meaning(text) }
    }

    pub fn is_text(&self) -> bool {
        self.meaning == Meaning::Text
    }

    /// `None` for what no JSON can hold.
    pub fn value(&self) -> Option<Value> {
        match &self.meaning {
            Meaning::Null => Some(Value::Null),
            Meaning::Boolean(value) => Some(Value::Bool(*value)),
            Meaning::Number(number) => Some(Value::Number(number.clone())),
            Meaning::Unfit => None,
            Meaning::Text => Some(Value::from(self.text.as_str())),
        }
    }
}

/// The entries of a mapping in the order of the text.
#[derive(Debug)]
pub(crate) struct Entries {
    pub list: Vec<Entry>,
    first: OnceLock<Box<FirstOfKeys>>,
}

/// Where each key of a mapping comes first, made for the first search.
#[derive(Debug)]
struct FirstOfKeys(HashMap<String, usize>);

impl Entries {
    fn new(list: Vec<Entry>) -> Self {
        Self { list, first: OnceLock::new() }
    }

    /// The first entry of that key.
    pub fn get(&self, key: &str) -> Option<&Entry> {
        // Most mappings are a stage's few settings: to go through them takes less than an index of copied keys.
        if self.list.len() <= SEARCHED {
            return self.list.iter().find(|entry| entry.key.as_deref() == Some(key));
        }
        let first = self.first.get_or_init(|| {
            let mut first = HashMap::with_capacity(self.list.len());
            for (index, entry) in self.list.iter().enumerate() {
                if let Some(key) = &entry.key {
                    first.entry(key.clone()).or_insert(index);
                }
            }
            Box::new(FirstOfKeys(first))
        });
        first.0.get(key).map(|index| &self.list[*index])
    }
}

#[derive(Clone, Debug)]
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
        matches!(&self.target().content, Content::Scalar(Scalar { meaning: Meaning::Null, .. }))
    }

    /// What it is, for messages.
    pub fn describe(&self) -> String {
        match &self.target().content {
            Content::Scalar(scalar) => match scalar.value() {
                Some(value) => cuda_agent_protocol::manifest::describe(&value),
                None => format!("the number {}", scalar.text),
            },
            Content::List(_) => "a list".to_owned(),
            Content::Map(_) | Content::Alias(_) => "a mapping".to_owned(),
        }
    }

    /// What it is as a key; `None` for a list or a mapping.
    fn key_text(&self) -> Option<String> {
        match &self.target().content {
            Content::Scalar(scalar) => Some(scalar.text.clone()),
            _ => None,
        }
    }

    /// Text that no file holds.
    pub fn text(text: &str) -> Arc<Self> {
        Arc::new(Self::scalar(0..0, Scalar { text: text.to_owned(), meaning: Meaning::Text }))
    }

    /// Nothing, as in an empty file.
    pub fn empty() -> Self {
        Self::scalar(0..0, Scalar { text: String::new(), meaning: Meaning::Null })
    }

    fn scalar(span: Range<usize>, scalar: Scalar) -> Self {
        Self { span, content: Content::Scalar(scalar), tag: None, size: Size::ONE }
    }

    /// A list in the place of this node.
    pub fn with_items(&self, items: Vec<Arc<Node>>) -> Arc<Self> {
        self.with(Content::List(items))
    }

    /// A mapping in the place of this node.
    pub fn with_entries(&self, entries: Vec<Entry>) -> Arc<Self> {
        self.with(Content::Map(Entries::new(entries)))
    }

    fn with(&self, content: Content) -> Arc<Self> {
        Arc::new(Self { span: self.span.clone(), content, tag: None, size: self.size })
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
    Ok(builder.root.unwrap_or_else(|| Arc::new(Node::empty())))
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
    tag: Option<Box<str>>,
    content: Opened,
    size: Size,
}

enum Opened {
    List(Vec<Arc<Node>>),
    Map {
        entries: Vec<Entry>,
        /// A key whose value comes next, and where it is written.
        key: Option<(Option<String>, Range<usize>)>,
    },
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
                let meaning = meaning(&text, style == ScalarStyle::Plain, tag);
                let scalar = Scalar { text: text.into_owned(), meaning };
                self.add(Node { tag: foreign(tag), ..Node::scalar(range, scalar) }, anchor);
            }
            Event::Alias(anchor) => {
                let Some(target) = self.anchors.get(&anchor) else {
                    let message = "an alias can't stand inside what it stands for".to_owned();
                    return Err(SyntaxError { at: range.start, message });
                };
                let (content, size) = (Content::Alias(Arc::clone(target)), target.size);
                self.add(Node { span: range, content, tag: None, size }, 0);
            }
            Event::SequenceStart(anchor, tag) => {
                self.open(range.start, anchor, foreign(tag.as_deref()), Opened::List(Vec::new()))?;
            }
            Event::MappingStart(anchor, tag) => {
                let content = Opened::Map { entries: Vec::new(), key: None };
                self.open(range.start, anchor, foreign(tag.as_deref()), content)?;
            }
            Event::SequenceEnd | Event::MappingEnd => self.close(range.end)?,
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) | Event::DocumentEnd => {}
        }
        Ok(())
    }

    fn range(&self, span: Span) -> Range<usize> {
        let start = self.offsets.byte(span.start.index());
        start..self.offsets.byte(span.end.index()).max(start)
    }

    fn open(&mut self, start: usize, anchor: usize, tag: Option<Box<str>>, content: Opened) -> Result<(), SyntaxError> {
        if self.stack.len() >= DEEPEST {
            return Err(SyntaxError { at: start, message: format!("nested more than {DEEPEST} levels deep") });
        }
        self.stack.push(Open { start, anchor, tag, content, size: Size::EMPTY_COLLECTION });
        Ok(())
    }

    fn close(&mut self, end: usize) -> Result<(), SyntaxError> {
        let Some(open) = self.stack.pop() else { return Ok(()) };
        let size = open.size;
        let refuse = |message: String| Err(SyntaxError { at: open.start, message });
        if size.levels > DEEPEST {
            return refuse(format!("nested more than {DEEPEST} levels deep"));
        }
        if size.nodes > MOST_REPEATED + 2 * self.text.len() {
            return refuse("aliases repeat too much".to_owned());
        }
        let end = end.max(open.start);
        let trimmed = open.start + self.text[open.start..end].trim_end().len();
        let content = match open.content {
            Opened::List(items) => Content::List(items),
            Opened::Map { entries, .. } => Content::Map(Entries::new(entries)),
        };
        self.add(Node { span: open.start..trimmed, content, tag: open.tag, size }, open.anchor);
        Ok(())
    }

    fn add(&mut self, node: Node, anchor: usize) {
        let Some(open) = self.stack.last_mut() else {
            self.root = Some(Arc::new(node));
            return;
        };
        open.size = open.size.with(node.size);
        if let Opened::Map { key: key @ None, .. } = &mut open.content
            && anchor == 0
        {
            // Most keys need no node of their own.
            let text = match node.content {
                Content::Scalar(scalar) => Some(scalar.text),
                Content::Alias(target) => target.key_text(),
                Content::List(_) | Content::Map(_) => None,
            };
            *key = Some((text, node.span));
            return;
        }
        let node = Arc::new(node);
        if anchor > 0 {
            self.anchors.insert(anchor, Arc::clone(&node));
        }
        match &mut open.content {
            Opened::List(items) => items.push(node),
            Opened::Map { entries, key } => match key.take() {
                None => *key = Some((node.key_text(), node.span.clone())),
                Some((key, key_span)) => entries.push(Entry { key, key_span, value: node }),
            },
        }
    }
}

/// A tag that YAML itself doesn't define.
fn foreign(tag: Option<&Tag>) -> Option<Box<str>> {
    tag.filter(|tag| !tag.is_yaml_core_schema()).map(|tag| tag.to_string().into())
}

fn meaning(text: &str, plain: bool, tag: Option<&Tag>) -> Meaning {
    let core = tag.filter(|tag| tag.is_yaml_core_schema()).map(|tag| tag.suffix.as_str());
    let fits = |meaning: Meaning, fits: bool| if fits { meaning } else { Meaning::Unfit };
    match core {
        Some("null") => fits(Meaning::Null, is_null(text)),
        Some("bool") => boolean(text).map_or(Meaning::Unfit, Meaning::Boolean),
        Some("int") => number(text)
            .filter(|meaning| !matches!(meaning, Meaning::Number(number) if number.is_f64()))
            .unwrap_or(Meaning::Unfit),
        Some("float") => {
            let value: Option<f64> = text.strip_prefix('+').unwrap_or(text).parse().ok();
            value.and_then(Number::from_f64).map_or(Meaning::Unfit, Meaning::Number)
        }
        None if plain => plain_meaning(text),
        _ => Meaning::Text,
    }
}

fn plain_meaning(text: &str) -> Meaning {
    if text.is_empty() || is_null(text) {
        return Meaning::Null;
    }
    boolean(text).map(Meaning::Boolean).or_else(|| number(text)).unwrap_or(Meaning::Text)
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

/// The number that serde_yaml takes an unquoted scalar for; `None` where it takes it for text.
fn number(text: &str) -> Option<Meaning> {
    if !text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.')) {
        return None;
    }
    if let Ok(number) = text.parse::<serde_yaml::Number>() {
        let whole = number.as_u64().map(Number::from).or_else(|| number.as_i64().map(Number::from));
        let read = whole.or_else(|| number.as_f64().and_then(Number::from_f64));
        return Some(read.map_or(Meaning::Unfit, Meaning::Number));
    }
    // It doesn't say whether the text is no number or an integer of too many bits.
    let is_wide = serde_yaml::from_str::<u128>(text).is_ok() || serde_yaml::from_str::<i128>(text).is_ok();
    is_wide.then_some(Meaning::Unfit)
}
