//! Parameters given on the command line: `name=value` and `stage.parameter=value`.

use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;

use crate::spec::check;
use crate::spec::document::{Document, Place};
use crate::spec::error::Problem;

/// The document that errors about overrides point into.
pub(super) const COMMAND_LINE: &str = "command line";

/// One `name=value` of the command line.
pub(super) struct Override {
    /// The stage, for `stage.parameter=value`.
    pub stage: Option<String>,
    pub name: String,
    text: String,
    place: Place,
    name_span: Range<usize>,
    value_span: Range<usize>,
}

/// The overrides, and the text that shows them in errors.
pub(super) fn read(overrides: &[(String, String)], document: usize) -> (Arc<Document>, Vec<Override>) {
    let mut shown = String::new();
    let mut read = Vec::new();
    for (name, value) in overrides {
        let start = shown.len() + "-p ".len();
        let equals = start + one_line(name).len();
        shown.push_str(&format!("-p {}={}\n", one_line(name), one_line(value)));
        let (stage, parameter) = match name.split_once('.') {
            Some((stage, parameter)) => (Some(stage.to_owned()), parameter.to_owned()),
            None => (None, name.clone()),
        };
        read.push(Override {
            stage,
            name: parameter,
            text: value.clone(),
            place: Place::root(document),
            name_span: start..equals,
            value_span: equals + 1..shown.len() - 1,
        });
    }
    (Document::new(COMMAND_LINE, shown), read)
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

impl Override {
    /// A problem with the name.
    pub fn name_problem(&self, message: String) -> Problem {
        Problem::new(self.place.clone(), message).at(self.name_span.clone())
    }

    /// A problem with the value.
    pub fn value_problem(&self, message: String) -> Problem {
        Problem::new(self.place.clone(), message).at(self.value_span.clone())
    }

    /// The value, read as YAML. Where text is wanted, whatever isn't quoted is text.
    pub fn value(&self, wants_text: bool) -> Result<Value, Box<Problem>> {
        if self.text.trim().is_empty() && !wants_text {
            let problem = self.name_problem(format!("`{}` has no value", self.name));
            return Err(Box::new(problem.hint(format!("write `-p {}=VALUE`", self.name))));
        }
        match check::value(&self.text) {
            Ok(Value::String(text)) => Ok(Value::String(text)),
            _ if wants_text => Ok(Value::String(self.text.clone())),
            Ok(value) => Ok(value),
            Err(problem) => {
                let message = format!("the value of `{}` can't be read: {}", self.name, problem.message);
                Err(Box::new(self.value_problem(message).maybe_hint(problem.hint)))
            }
        }
    }
}

/// Why `value` can't replace `default`, whose type it must have.
pub(super) fn refuse(default: &Value, value: &Value) -> Option<String> {
    let (fits, wanted) = match default {
        Value::Null => (true, ""),
        Value::Bool(_) => (value.is_boolean(), "a boolean"),
        Value::Number(number) if number.is_f64() => (value.is_number(), "a number"),
        Value::Number(_) => (value.is_i64() || value.is_u64(), "an integer"),
        Value::String(_) => (value.is_string(), "text"),
        Value::Array(_) => (value.is_array(), "a list"),
        Value::Object(_) => (value.is_object(), "a mapping"),
    };
    (!fits).then(|| format!("expected {wanted}, got {}", cuda_agent_protocol::manifest::describe(value)))
}
