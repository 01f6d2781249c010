//! What goes wrong, as people and programs are told it.

use cuda_agent_engine::catalog::CatalogError;
use cuda_agent_engine::execute::{Explanation, Failure};
use cuda_agent_engine::plan::PlanError;
use cuda_agent_engine::plan::graph::SelectError;
use cuda_agent_engine::spec::SpecErrors;
use cuda_agent_engine::store::StoreError;
use cuda_agent_engine::store::remote::RemoteError;
use serde_json::json;

/// Exit statuses; `--help` lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// A stage failed.
    Failed = 1,
    /// Bad usage or pipeline.
    Usage = 2,
    /// Store or machine.
    Environment = 3,
    /// Ctrl-C.
    Interrupted = 130,
}

/// An error of a command.
#[derive(Debug)]
pub struct CliError {
    /// How the process ends.
    pub exit: Exit,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// All errors of a file, placed.
    pub spec: Option<SpecErrors>,
}

impl CliError {
    /// The user's mistake.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, message: message.into(), hint: None, spec: None }
    }

    /// The machine's or the store's.
    pub fn environment(message: impl Into<String>) -> Self {
        Self { exit: Exit::Environment, ..Self::usage(message) }
    }

    /// Adds what to do about it.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Prints the error, and says how to end.
    pub fn report(&self, as_json: bool, color: bool) -> Exit {
        if as_json {
            let mut error = json!({ "message": self.message, "hint": self.hint });
            if let Some(spec) = &self.spec {
                error["errors"] = serde_json::to_value(spec).expect("errors are plain data");
            }
            // On one line, since `run --json` has printed lines before it.
            super::print(&format!("{}\n", json!({ "error": error })));
        } else if let Some(spec) = &self.spec {
            super::note(spec.render(color).trim_end());
            super::note(&self.message);
        } else {
            super::note(&format!("error: {}", self.message));
            if let Some(hint) = &self.hint {
                super::note(&format!("hint: {hint}"));
            }
        }
        self.exit
    }
}

impl From<SpecErrors> for CliError {
    fn from(errors: SpecErrors) -> Self {
        let message = "nothing was changed".to_owned();
        Self { spec: Some(errors), ..Self::usage(message) }
    }
}

impl From<PlanError> for CliError {
    fn from(error: PlanError) -> Self {
        let exit = if error.is_usage() { Exit::Usage } else { Exit::Environment };
        Self { exit, message: error.to_string(), hint: error.hint(), spec: None }
    }
}

impl CliError {
    /// Several problems as one error, each with its hint.
    pub fn all(problems: Vec<PlanError>) -> Option<Self> {
        Self::joined(problems.into_iter().map(Self::from))
    }

    /// Several errors as one, each with its hint; `None` where there are none.
    pub fn joined(mut errors: impl Iterator<Item = Self>) -> Option<Self> {
        let mut first = errors.next()?;
        for error in errors {
            let hint = first.hint.take().map(|hint| format!("\nhint: {hint}")).unwrap_or_default();
            first.message = format!("{}{hint}\nerror: {}", first.message, error.message);
            first.hint = error.hint;
            first.exit = if first.exit == Exit::Usage { Exit::Usage } else { error.exit };
        }
        Some(first)
    }
}

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> Self {
        Self { hint: error.hint.clone(), ..Self::environment(error.to_string()) }
    }
}

impl From<Failure> for CliError {
    fn from(failure: Failure) -> Self {
        let Explanation { message, hint } = failure.explanation();
        Self { hint, ..Self::environment(message) }
    }
}

impl From<RemoteError> for CliError {
    fn from(error: RemoteError) -> Self {
        Self { hint: error.hint, ..Self::environment(error.message) }
    }
}

impl From<SelectError> for CliError {
    fn from(error: SelectError) -> Self {
        let is_path = error.pattern.contains('/') || std::path::Path::new(&error.pattern).exists();
        let told = Self::usage(error.to_string());
        match is_path {
            true => told.with_hint("if this is to name a pipeline file: its name ends in .yaml or .yml"),
            false => told,
        }
    }
}

impl From<CatalogError> for CliError {
    fn from(error: CatalogError) -> Self {
        match error {
            CatalogError::Manifest(errors) => errors.into(),
            other => Self::usage(other.to_string()),
        }
    }
}
