//! `${params.x}` and `${matrix.x}`: substituted in the strings of a stage, and nothing more.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::spec::document::Spot;
use crate::spec::error::{Problem, list, nearest};

/// What `${…}` may name.
pub(crate) struct Scope<'a> {
    pub params: &'a BTreeMap<String, Value>,
    /// Parameters that exist, but whose definition is broken: naming one is no mistake.
    pub broken_params: &'a [String],
    /// `None` where there is no matrix.
    pub matrix: Option<&'a BTreeMap<String, Value>>,
}

impl Scope<'_> {
    /// A value with all strings in it substituted; `None` where one of them is wrong.
    pub fn value(&self, value: Value, spot: &Spot, problems: &mut Vec<Problem>) -> Option<Value> {
        match value {
            Value::String(text) => self.string(text, spot, problems),
            Value::Array(items) => {
                let read = |(index, item)| self.value(item, &spot.index(index), problems);
                let items: Vec<Option<Value>> = items.into_iter().enumerate().map(read).collect();
                items.into_iter().collect::<Option<Vec<Value>>>().map(Value::Array)
            }
            Value::Object(map) => {
                let mut complete = Some(serde_json::Map::new());
                for (name, item) in map {
                    match (self.value(item, &spot.key(&name), problems), &mut complete) {
                        (Some(item), Some(map)) => drop(map.insert(name, item)),
                        _ => complete = None,
                    }
                }
                complete.map(Value::Object)
            }
            other => Some(other),
        }
    }

    /// A string, which takes the type of `x` where it is exactly one `${x}`.
    fn string(&self, text: String, spot: &Spot, problems: &mut Vec<Problem>) -> Option<Value> {
        match whole_expression(&text) {
            Some(expression) => self.lookup(expression, spot, problems).cloned(),
            None => self.text(text, spot, problems).map(Value::String),
        }
    }

    /// A string that stays one.
    pub fn text(&self, text: String, spot: &Spot, problems: &mut Vec<Problem>) -> Option<String> {
        if !text.contains("${") {
            return Some(text);
        }
        let mut result = String::with_capacity(text.len());
        let mut complete = true;
        let mut rest = text.as_str();
        while let Some(at) = rest.find("${") {
            if rest[..at].ends_with('$') {
                result.push_str(&rest[..at - 1]);
                result.push_str("${");
                rest = &rest[at + 2..];
                continue;
            }
            result.push_str(&rest[..at]);
            let Some(end) = rest[at..].find('}') else {
                let problem = Problem::new(spot.place().part("${"), "`${` without a `}`");
                problems.push(problem.hint("write `$${` for a literal `${`"));
                return None;
            };
            let expression = &rest[at + 2..at + end];
            match self.lookup(expression, spot, problems) {
                Some(value) => complete &= self.push(value, expression, &mut result, spot, problems),
                None => complete = false,
            }
            rest = &rest[at + end + 1..];
        }
        result.push_str(rest);
        complete.then_some(result)
    }

    fn push(
        &self,
        value: &Value,
        expression: &str,
        result: &mut String,
        spot: &Spot,
        problems: &mut Vec<Problem>,
    ) -> bool {
        match scalar_text(value) {
            Some(text) => {
                result.push_str(&text);
                true
            }
            None => {
                let what = cuda_agent_protocol::manifest::describe(value);
                let place = spot.place().part(format!("${{{expression}}}"));
                let message = format!("`${{{expression}}}` is {what}, which can't be put into text");
                problems.push(Problem::new(place, message));
                false
            }
        }
    }

    fn lookup(&self, expression: &str, spot: &Spot, problems: &mut Vec<Problem>) -> Option<&Value> {
        let trimmed = expression.trim();
        let found = match trimmed.split_once('.') {
            Some(("params", name)) => self.params.get(name),
            Some(("matrix", axis)) => self.matrix.and_then(|matrix| matrix.get(axis)),
            _ => None,
        };
        if found.is_some() || self.is_broken(trimmed) {
            return found;
        }
        let place = spot.place().part(format!("${{{expression}}}"));
        problems.push(Problem::new(place, format!("undefined `${{{trimmed}}}`")).hint(self.hint(trimmed)));
        None
    }

    fn is_broken(&self, expression: &str) -> bool {
        let name = expression.strip_prefix("params.");
        name.is_some_and(|name| self.broken_params.iter().any(|broken| broken == name || broken == super::EVERY))
    }

    fn hint(&self, expression: &str) -> String {
        let axes = || self.matrix.into_iter().flat_map(BTreeMap::keys).map(String::as_str);
        let params = || self.params.keys().map(String::as_str);
        match expression.split_once('.') {
            Some(("params", name)) => nearest(name, params())
                .map(|best| format!("did you mean `${{params.{best}}}`?"))
                .unwrap_or_else(|| format!("parameters of the pipeline: {}", list(params()))),
            Some(("matrix", _)) if self.matrix.is_none() => "the stage has no `matrix`".to_owned(),
            Some(("matrix", axis)) => nearest(axis, axes())
                .map(|best| format!("did you mean `${{matrix.{best}}}`?"))
                .unwrap_or_else(|| format!("axes of the stage: {}", list(axes()))),
            _ if self.params.contains_key(expression) => format!("did you mean `${{params.{expression}}}`?"),
            _ if axes().any(|axis| axis == expression) => format!("did you mean `${{matrix.{expression}}}`?"),
            _ => format!(
                "only `${{params.NAME}}` and `${{matrix.AXIS}}` are substituted; write `$${{{expression}}}` for a literal `${{{expression}}}`"
            ),
        }
    }
}

/// The inside of a text that is exactly one `${…}`.
pub(crate) fn whole_expression(text: &str) -> Option<&str> {
    let inside = text.strip_prefix("${")?.strip_suffix('}')?;
    (!inside.contains('}')).then_some(inside)
}

/// What `${…}` names in a text, with duplicates; a doubled dollar is none.
pub(crate) fn expressions(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            let at = rest.find("${")?;
            let is_literal = rest[..at].ends_with('$');
            let inside = &rest[at + 2..];
            if is_literal {
                rest = inside;
                continue;
            }
            let end = inside.find('}')?;
            rest = &inside[end + 1..];
            return Some(inside[..end].trim());
        }
    })
}

/// A scalar as it appears inside a text.
pub(crate) fn scalar_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn substitute(value: Value) -> Result<Value, Vec<String>> {
        let params = BTreeMap::from([
            ("seed".to_owned(), json!(7)),
            ("who".to_owned(), json!("world")),
            ("libs".to_owned(), json!(["a", "b"])),
        ]);
        let matrix = BTreeMap::from([("lr".to_owned(), json!(0.1))]);
        let scope = Scope { params: &params, broken_params: &[], matrix: Some(&matrix) };
        let mut problems = Vec::new();
        match scope.value(value, &Spot::Root(0), &mut problems) {
            Some(value) if problems.is_empty() => Ok(value),
            _ => Err(problems.into_iter().map(|problem| problem.message).collect()),
        }
    }

    #[test]
    fn one_expression_keeps_its_type_and_text_stays_text() {
        assert_eq!(substitute(json!("${params.seed}")), Ok(json!(7)));
        assert_eq!(substitute(json!("${ params.libs }")), Ok(json!(["a", "b"])));
        assert_eq!(substitute(json!("n${params.seed}-${matrix.lr}")), Ok(json!("n7-0.1")));
        assert_eq!(substitute(json!({"a": ["${params.who}"]})), Ok(json!({"a": ["world"]})));
    }

    #[test]
    fn a_doubled_dollar_escapes() {
        assert_eq!(substitute(json!("$${HOME} $HOME ${params.who}")), Ok(json!("${HOME} $HOME world")));
    }

    #[test]
    fn expressions_of_a_text_are_listed() {
        let named: Vec<&str> = expressions("a ${params.x} $${params.no} ${ matrix.y }${params.x} ${").collect();
        assert_eq!(named, ["params.x", "matrix.y", "params.x"]);
    }

    #[test]
    fn every_undefined_name_is_told() {
        let messages =
            substitute(json!(["${params.sed}", "${HOME} ${matrix.x}", "a ${params.libs}", "${"])).unwrap_err();
        assert_eq!(
            messages,
            [
                "undefined `${params.sed}`",
                "undefined `${HOME}`",
                "undefined `${matrix.x}`",
                "`${params.libs}` is a list, which can't be put into text",
                "`${` without a `}`",
            ]
        );
    }

    proptest! {
        #[test]
        fn text_without_expressions_stays_as_it_is(text in "[a-z$ }.]{0,20}") {
            prop_assert_eq!(substitute(json!(text.clone())), Ok(json!(text)));
        }

        #[test]
        fn no_text_panics(text in "[a-z${}. é]{0,30}") {
            let _ = substitute(json!(text));
        }
    }
}
