//! Secrets of a pipeline. All are read when a run begins, and one that cannot be read is an error only for the program
//! that needs it: a stage whose result is in the store, or whose rows are all recorded, needs none.

use std::collections::BTreeMap;

use super::failure::Failure;
use crate::spec::{Pipeline, SecretSource, Stage};

/// Values shorter than this would be blanked out of ordinary text.
const SHORTEST: usize = 4;

/// Why a secret has no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("secret `{name}`: {message}")]
pub struct SecretError {
    /// The secret.
    pub name: String,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub hint: String,
}

impl From<SecretError> for Failure {
    fn from(error: SecretError) -> Self {
        Self::permanent(error.to_string()).with_hint(error.hint)
    }
}

/// The secrets of one stage.
#[derive(Clone, Debug, Default)]
pub struct StageSecrets {
    /// Name and value of those that could be read.
    pub values: Vec<(String, String)>,
    /// One that it names and that could not be read: no program of it can start.
    pub missing: Option<SecretError>,
}

/// The secrets of a pipeline, by name: the value, or why there is none.
#[derive(Clone, Debug, Default)]
pub struct Secrets {
    read: BTreeMap<String, Result<String, SecretError>>,
}

impl Secrets {
    /// Reads every secret that a stage of the pipeline names.
    pub fn read(pipeline: &Pipeline) -> Self {
        let is_used = |name: &String| pipeline.stages.iter().any(|stage| stage.secrets.contains(name));
        let used = pipeline.secrets.iter().filter(|(name, _)| is_used(name));
        Self { read: used.map(|(name, source)| (name.clone(), read(name, source))).collect() }
    }

    /// Those that a stage names.
    pub fn of(&self, stage: &Stage) -> StageSecrets {
        let found = stage.secrets.iter().filter_map(|name| Some((name, self.read.get(name)?.as_ref().ok()?)));
        let values = found.map(|(name, value)| (name.clone(), value.clone())).collect();
        StageSecrets { values, missing: self.missing(stage).cloned() }
    }

    /// The first secret that a stage names and that could not be read.
    pub fn missing(&self, stage: &Stage) -> Option<&SecretError> {
        stage.secrets.iter().find_map(|name| self.read.get(name)?.as_ref().err())
    }
}

fn read(name: &str, source: &SecretSource) -> Result<String, SecretError> {
    let error = |message: String, hint: String| SecretError { name: name.to_owned(), message, hint };
    let (value, place) = match source {
        SecretSource::Environment(variable) => {
            let hint = format!("set it (`export {variable}=…`) and run again");
            let told = |failure| match failure {
                std::env::VarError::NotPresent => format!("the environment variable {variable} is not set"),
                std::env::VarError::NotUnicode(_) => format!("the environment variable {variable} is no UTF-8 text"),
            };
            let value = std::env::var(variable).map_err(|failure| error(told(failure), hint))?;
            (value, format!("the environment variable {variable}"))
        }
        SecretSource::File(file) => {
            let hint = "write its value into this file and run again; `secrets:` of the pipeline names the file";
            let text = std::fs::read_to_string(file);
            let text = text.map_err(|failure| error(format!("{}: {failure}", file.display()), hint.to_owned()))?;
            (text.strip_suffix('\n').map(str::to_owned).unwrap_or(text), file.display().to_string())
        }
    };
    if value.len() < SHORTEST {
        let hint = "such a short value would be blanked out of ordinary text in logs; check that it is the right one";
        let message = match value.is_empty() {
            true => format!("{place} is empty"),
            false => format!("{place} is shorter than {SHORTEST} bytes"),
        };
        return Err(error(message, hint.to_owned()));
    }
    Ok(value)
}
