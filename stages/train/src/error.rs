//! Errors of the training program, as reported.

use std::path::Path;

/// Why something could not be done, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TrainError {
    /// What is wrong, with the place where there is one.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl TrainError {
    /// An error without a hint.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }

    /// Adds what to do about it.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// An error of a file, for `map_err`.
    pub fn file<E: std::fmt::Display>(path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.display().to_string();
        move |error| Self::new(format!("{path}: {error}"))
    }
}

impl From<tch::TchError> for TrainError {
    /// libtorch appends its C++ stack to its messages; the first line says what was wrong.
    fn from(error: tch::TchError) -> Self {
        let text = error.to_string();
        Self::new(format!("torch: {}", text.lines().next().unwrap_or_default()))
    }
}
