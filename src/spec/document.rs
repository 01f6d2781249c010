//! A text that errors point into, and places in it.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::tree::{self, Content, Node, SyntaxError};

/// A file (or the command line), with its span-preserving tree once somebody needs it.
#[derive(Debug)]
pub(crate) struct Document {
    pub file: String,
    pub text: String,
    tree: OnceLock<Result<Arc<Node>, SyntaxError>>,
}

impl Document {
    pub fn new(file: impl Into<String>, text: impl Into<String>) -> Arc<Self> {
        Arc::new(Self { file: file.into(), text: text.into(), tree: OnceLock::new() })
    }

    /// The tree, read at the first call.
    pub fn tree(&self) -> Result<&Arc<Node>, &SyntaxError> {
        self.tree.get_or_init(|| tree::parse(&self.text)).as_ref()
    }

    /// Line and column, both from 1, of a byte; columns count characters.
    pub fn position(&self, byte: usize) -> (usize, usize) {
        let before = &self.text[..floor(&self.text, byte)];
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        (before.bytes().filter(|byte| *byte == b'\n').count() + 1, before[start..].chars().count() + 1)
    }

    /// The bytes that a place covers; where it can't be found, those of the nearest thing around it.
    pub fn span(&self, place: &Place) -> Range<usize> {
        let span = match self.tree() {
            Ok(root) => find(root, place),
            Err(_) => 0..0,
        };
        let span = self.first_line(span);
        let narrowed = place.needle.as_deref().and_then(|needle| self.text[span.clone()].find(needle));
        match (narrowed, &place.needle) {
            (Some(at), Some(needle)) => span.start + at..span.start + at + needle.len(),
            _ => span,
        }
    }

    /// Carets under several lines say less than carets under the first.
    fn first_line(&self, span: Range<usize>) -> Range<usize> {
        let start = floor(&self.text, span.start);
        let covered = &self.text[start..floor(&self.text, span.end).max(start)];
        let line = covered.split(['\n', '\r']).next().unwrap_or_default();
        start..start + line.trim_end().len()
    }
}

fn floor(text: &str, byte: usize) -> usize {
    let mut byte = byte.min(text.len());
    while !text.is_char_boundary(byte) {
        byte -= 1;
    }
    byte
}

/// One step from a node to one below it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Key(String),
    Index(usize),
}

/// Something in a document, by the path to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// Which of the documents that were read together.
    pub document: usize,
    pub steps: Vec<Step>,
    /// The last key itself rather than its value.
    pub on_key: bool,
    /// The piece of a scalar that matters.
    pub needle: Option<String>,
}

impl Place {
    /// The whole document.
    pub fn root(document: usize) -> Self {
        Self { document, ..Self::default() }
    }

    /// The value of `key`.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.steps.push(Step::Key(key.into()));
        self
    }

    /// An item of a list.
    pub fn index(mut self, index: usize) -> Self {
        self.steps.push(Step::Index(index));
        self
    }

    /// The last key itself.
    pub fn name(mut self) -> Self {
        self.on_key = true;
        self
    }

    /// A piece of the scalar.
    pub fn part(mut self, needle: impl Into<String>) -> Self {
        self.needle = Some(needle.into());
        self
    }

    /// Whether `self` is `other` or lies inside it.
    pub fn is_within(&self, other: &Place) -> bool {
        self.document == other.document && self.steps.starts_with(&other.steps)
    }
}

fn find(root: &Node, place: &Place) -> Range<usize> {
    let mut node = root;
    let mut key_span = None;
    let mut found = true;
    for step in &place.steps {
        let next = match (&node.target().content, step) {
            (Content::Map(entries), Step::Key(key)) => {
                entries.iter().find(|entry| entry.key.as_ref() == Some(key)).map(|entry| {
                    key_span = Some(entry.key_span.clone());
                    &entry.value
                })
            }
            (Content::List(items), Step::Index(index)) => items.get(*index).inspect(|_| key_span = None),
            _ => None,
        };
        match next {
            Some(next) => node = next,
            None => {
                found = false;
                break;
            }
        }
    }
    let nothing_to_show = matches!(&node.content, Content::Map(_)) || node.span.is_empty();
    match key_span {
        Some(span) if place.on_key || !found || nothing_to_show => span,
        _ => node.span.clone(),
    }
}

/// Where a stage is written. Finding it reads the file a second time, so that happens only when it is shown.
#[derive(Clone)]
pub struct Location {
    document: Option<Arc<Document>>,
    stage: Arc<str>,
}

impl Location {
    pub(crate) fn new(document: Arc<Document>, stage: &str) -> Self {
        Self { document: Some(document), stage: stage.into() }
    }

    /// For a stage that no file holds.
    pub fn unknown() -> Self {
        Self { document: None, stage: "".into() }
    }

    /// The file, as it was named to the reader.
    pub fn file(&self) -> Option<&str> {
        self.document.as_deref().map(|document| document.file.as_str())
    }

    /// Line and column of the stage's name, both from 1.
    pub fn position(&self) -> Option<(usize, usize)> {
        let document = self.document.as_deref()?;
        let place = Place::root(0).key("stages").key(&*self.stage).name();
        Some(document.position(document.span(&place).start))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.file(), self.position()) {
            (Some(file), Some((line, column))) => write!(f, "{file}:{line}:{column}"),
            _ => f.write_str("no file"),
        }
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A [`Place`] on its way: made on the stack while everything is fine, and turned into a place for an error.
#[derive(Clone, Copy)]
pub(crate) enum Spot<'a> {
    Root(usize),
    Key(&'a Spot<'a>, &'a str),
    Index(&'a Spot<'a>, usize),
}

impl Spot<'_> {
    pub fn key<'a>(&'a self, key: &'a str) -> Spot<'a> {
        Spot::Key(self, key)
    }

    pub fn index(&self, index: usize) -> Spot<'_> {
        Spot::Index(self, index)
    }

    pub fn place(&self) -> Place {
        match self {
            Spot::Root(document) => Place::root(*document),
            Spot::Key(parent, key) => parent.place().key(*key),
            Spot::Index(parent, index) => parent.place().index(*index),
        }
    }
}
