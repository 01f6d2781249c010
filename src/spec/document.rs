//! A text that errors point into, and places in it.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::tree::{self, Content, Node, SyntaxError};

/// A file (or the command line), with its tree of nodes once somebody needs it.
#[derive(Debug)]
pub(crate) struct Document {
    pub file: String,
    pub text: String,
    tree: OnceLock<Result<Arc<Node>, SyntaxError>>,
    /// Where each line begins.
    lines: OnceLock<Vec<usize>>,
}

impl Document {
    pub fn new(file: impl Into<String>, text: impl Into<String>) -> Arc<Self> {
        Arc::new(Self { file: file.into(), text: text.into(), tree: OnceLock::new(), lines: OnceLock::new() })
    }

    /// The tree, read at the first call.
    pub fn tree(&self) -> Result<&Arc<Node>, &SyntaxError> {
        self.tree.get_or_init(|| tree::parse(&self.text)).as_ref()
    }

    /// Line and column, both from 1, of a byte; columns count characters.
    pub fn position(&self, byte: usize) -> (usize, usize) {
        let byte = floor(&self.text, byte);
        let line = self.lines().partition_point(|start| *start <= byte);
        (line, self.text[self.lines()[line - 1]..byte].chars().count() + 1)
    }

    fn lines(&self) -> &[usize] {
        self.lines.get_or_init(|| {
            let ends = self.text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
            std::iter::once(0).chain(ends.map(|(at, _)| at + 1)).collect()
        })
    }

    /// A span that lies in the text and doesn't cut a character.
    pub fn clamp(&self, span: Range<usize>) -> Range<usize> {
        let start = floor(&self.text, span.start);
        start..floor(&self.text, span.end).max(start)
    }

    /// The bytes that a place covers; where it can't be found, those of the nearest thing around it.
    pub fn span(&self, place: &Place) -> Range<usize> {
        let span = match self.tree() {
            Ok(root) => find(root, place),
            Err(_) => 0..0,
        };
        let inside = floor(&self.text, span.start)..floor(&self.text, span.end);
        let narrowed = place.needle.as_deref().and_then(|needle| {
            let at = inside.start + self.text.get(inside.clone())?.find(needle)?;
            Some(at..at + needle.len())
        });
        narrowed.unwrap_or_else(|| self.first_line(span))
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
}

/// Parts of documents that couldn't be read.
#[derive(Debug, Default)]
pub(crate) struct Broken(HashSet<(usize, Vec<Step>)>);

impl Broken {
    pub fn add(&mut self, place: Place) {
        self.0.insert((place.document, place.steps));
    }

    pub fn extend(&mut self, other: Broken) {
        self.0.extend(other.0);
    }

    pub fn places(&self) -> impl Iterator<Item = (usize, &[Step])> {
        self.0.iter().map(|(document, steps)| (*document, steps.as_slice()))
    }

    /// Whether a place is broken, or something around it.
    pub fn covers(&self, place: &Place) -> bool {
        let prefix = |length| self.0.contains(&(place.document, place.steps[..length].to_vec()));
        !self.0.is_empty() && (0..=place.steps.len()).any(prefix)
    }

    /// Whether something inside a place is broken.
    pub fn is_inside(&self, place: &Place) -> bool {
        self.places().any(|(document, steps)| document == place.document && steps.starts_with(&place.steps))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a whole file is missing or broken, so that anything might be defined in it.
    pub fn hides_a_file(&self) -> bool {
        self.places().any(|(_, steps)| match steps {
            [] => true,
            [Step::Key(key), ..] => key == "include",
            _ => false,
        })
    }
}

fn find(root: &Node, place: &Place) -> Range<usize> {
    let mut node = root;
    let mut key_span = None;
    let mut found = true;
    for step in &place.steps {
        let next = match (&node.target().content, step) {
            (Content::Map(entries), Step::Key(key)) => entries.get(key).map(|entry| {
                key_span = Some(entry.key_span.clone());
                &entry.value
            }),
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

/// Where a stage is written. It is looked up when it is shown.
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
