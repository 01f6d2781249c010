//! Why the store could not do something.

use std::error::Error as StdError;
use std::io;

use super::remote;

/// Why the store could not do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("store {url}: {}{message}", self.about())]
pub struct StoreError {
    /// What kind of thing went wrong.
    pub kind: ErrorKind,
    /// The store.
    pub url: String,
    /// `read`, `write`, `list`…
    pub action: &'static str,
    /// What it was about.
    pub name: String,
    /// What the system said.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// The kinds of what can go wrong that somebody can do something about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A disk of this machine, or somebody's share of it, is full.
    DiskFull,
    /// Anything else.
    Other,
}

impl ErrorKind {
    fn of_io(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull,
            _ => Self::Other,
        }
    }

    /// The same for an error that has one of the operating system somewhere below it.
    fn of(error: &(dyn StdError + 'static)) -> Self {
        let mut next = Some(error);
        while let Some(error) = next {
            match error.downcast_ref().map(Self::of_io) {
                None | Some(Self::Other) => next = error.source(),
                Some(kind) => return kind,
            }
        }
        Self::Other
    }
}

impl StoreError {
    fn about(&self) -> String {
        if self.name.is_empty() { String::new() } else { format!("{} {}: ", self.action, self.name) }
    }

    /// An error of no particular kind.
    pub fn new(url: &str, action: &'static str, name: &str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind: ErrorKind::Other, url: url.into(), action, name: name.into(), message, hint: None }
    }

    /// What the operating system said.
    pub fn of_io(url: &str, action: &'static str, name: &str, error: &io::Error) -> Self {
        Self::new(url, action, name, error.to_string()).of_kind(ErrorKind::of_io(error))
    }

    /// What the object-store layer said.
    pub fn of(url: &str, action: &'static str, name: &str, error: &object_store::Error) -> Self {
        if !remote::is_remote(url) {
            return Self::new(url, action, name, error.to_string()).of_kind(ErrorKind::of(error));
        }
        let told = remote::explain(error);
        Self { hint: told.hint, ..Self::new(url, action, name, told.message) }
    }

    /// The same about another file than the object's own.
    pub fn at(self, file: &std::path::Path) -> Self {
        Self { message: format!("{}: {}", file.display(), self.message), ..self }
    }

    fn of_kind(self, kind: ErrorKind) -> Self {
        let hint = match kind {
            ErrorKind::DiskFull => {
                Some("make room on the disk, or lower `local_max:` in cuda-agent.yaml; then run again".to_owned())
            }
            ErrorKind::Other => self.hint,
        };
        Self { kind, hint, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_by_its_kind() {
        for (number, kind) in [(28, ErrorKind::DiskFull), (122, ErrorKind::DiskFull), (13, ErrorKind::Other)] {
            let error = || io::Error::from_raw_os_error(number);
            let own = StoreError::of_io("file:///x", "write", "v1/a", &error());
            assert_eq!((own.kind, own.hint.is_some()), (kind, kind == ErrorKind::DiskFull), "{own}");
            let below = object_store::Error::Generic { store: "LocalFileSystem", source: Box::new(error()) };
            let layer = StoreError::of("file:///x", "write", "v1/a", &below);
            assert_eq!((layer.kind, &layer.hint), (kind, &own.hint), "{layer:?}");
        }
        let said = StoreError::new("file:///x", "write", "v1/a", "No space left, somebody says");
        assert_eq!((said.kind, said.hint), (ErrorKind::Other, None));
    }
}
