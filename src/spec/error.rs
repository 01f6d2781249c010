//! What is wrong with a file, with place and hint, in the look of rustc.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use serde::Serialize;

use super::document::{Broken, Document, Place};

/// More than this many errors are counted rather than shown.
const SHOWN: usize = 100;

/// One mistake in one file.
#[derive(Clone, Debug, Serialize)]
pub struct SpecError {
    /// The file as it was named to the reader, or `command line`.
    pub file: String,
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// The line on which the marked piece ends.
    pub end_line: usize,
    /// The column behind its last character.
    pub end_column: usize,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
    #[serde(skip)]
    document: Arc<Document>,
    #[serde(skip)]
    span: Range<usize>,
}

impl SpecError {
    pub(crate) fn new(document: &Arc<Document>, span: Range<usize>, message: String, hint: Option<String>) -> Self {
        let span = document.clamp(span);
        let (line, column) = document.position(span.start);
        let (end_line, end_column) = document.position(span.end);
        let file = document.file.clone();
        Self { file, line, column, end_line, end_column, message, hint, document: Arc::clone(document), span }
    }

    /// The error in the look of rustc.
    pub fn render(&self, color: bool) -> String {
        let text = &self.document.text;
        let start = text[..self.span.start].rfind('\n').map_or(0, |at| at + 1);
        let end = text[self.span.end..].find('\n').map_or(text.len(), |at| self.span.end + at);
        let marked = self.span.start - start..self.span.end - start;
        let snippet = Snippet::source(&text[start..end])
            .line_start(self.line)
            .path(self.file.as_str())
            .annotation(AnnotationKind::Primary.span(marked));
        let mut group = Level::ERROR.primary_title(self.message.as_str()).element(snippet);
        if let Some(hint) = &self.hint {
            group = group.element(Level::HELP.message(hint.as_str()));
        }
        let renderer = if color { Renderer::styled() } else { Renderer::plain() };
        renderer.render(&[group])
    }
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: {}", self.file, self.line, self.column, self.message)?;
        self.hint.iter().try_for_each(|hint| write!(f, " ({hint})"))
    }
}

/// Everything that is wrong, in the order of the text; never empty.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub struct SpecErrors {
    /// The mistakes.
    pub errors: Vec<SpecError>,
}

impl SpecErrors {
    /// All errors in the look of rustc, and how many they are.
    pub fn render(&self, color: bool) -> String {
        let mut text: String = self.errors.iter().take(SHOWN).map(|error| error.render(color) + "\n\n").collect();
        let count = self.errors.len();
        if count > SHOWN {
            text.push_str(&format!("{SHOWN} of {count} errors are shown\n"));
        } else if count > 1 {
            text.push_str(&format!("{count} errors\n"));
        } else {
            text.push_str("1 error\n");
        }
        text
    }

    /// Puts problems in place: those that only follow from a broken part are dropped, and each is told once.
    pub(crate) fn new(documents: &[Arc<Document>], problems: Vec<Problem>) -> Self {
        let mut located: Vec<(usize, Range<usize>, Problem)> = Vec::new();
        for problem in problems {
            let document = problem.place.document;
            let span = match &problem.span {
                Some(span) => span.clone(),
                None => documents[document].span(&problem.place),
            };
            located.push((document, span, problem));
        }
        located.sort_by_key(|(document, span, _)| (*document, span.start, span.end));
        let mut errors: Vec<SpecError> = Vec::new();
        let mut seen = std::collections::HashSet::new();
        for (document, span, problem) in located {
            if seen.insert((document, span.clone(), problem.message.clone())) {
                errors.push(SpecError::new(&documents[document], span, problem.message, problem.hint));
            }
        }
        Self { errors }
    }
}

impl fmt::Display for SpecErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for SpecErrors {}

/// A mistake before it is located.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    pub place: Place,
    pub message: String,
    pub hint: Option<String>,
    /// What is missing below `place`: no news where it is there but broken.
    pub missing: Vec<String>,
    /// The bytes, where they are known better than the place tells.
    pub span: Option<Range<usize>>,
}

impl Problem {
    pub fn new(place: Place, message: impl Into<String>) -> Self {
        Self { place, message: message.into(), hint: None, missing: Vec::new(), span: None }
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub fn maybe_hint(mut self, hint: Option<String>) -> Self {
        self.hint = hint.or(self.hint);
        self
    }

    pub fn missing<const N: usize>(mut self, fields: [&str; N]) -> Self {
        self.missing = fields.map(str::to_owned).to_vec();
        self
    }

    pub fn at(mut self, span: Range<usize>) -> Self {
        self.span = Some(span);
        self
    }

    /// Whether a part that is already known to be broken explains this.
    pub fn follows_from(&self, broken: &Broken) -> bool {
        if broken.is_empty() {
            return false;
        }
        let whole = self.missing.iter().fold(self.place.clone(), |place, field| place.key(field));
        broken.covers(&whole)
    }
}

/// `did you mean …?`, where a candidate is near enough to be meant.
pub(crate) fn did_you_mean<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    nearest(word, candidates).map(|best| format!("did you mean `{best}`?"))
}

/// The candidate that was probably meant.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = word.to_lowercase();
    let length = word.chars().count();
    candidates
        .into_iter()
        .map(|candidate| (strsim::osa_distance(&lower, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= (length.max(candidate.chars().count()) / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// `` `a`, `b` and `c` ``, shortened where there are many.
pub(crate) fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    const MOST: usize = 16;
    let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    match names.as_slice() {
        [] => "none".to_owned(),
        [only] => only.clone(),
        many if many.len() > MOST => format!("{} and {} more", many[..MOST].join(", "), many.len() - MOST),
        [rest @ .., last] => format!("{} and {last}", rest.join(", ")),
    }
}
