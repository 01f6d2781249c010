//! The fields of one stage (or cell), all but its inputs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};
use std::sync::Arc;
use std::time::Duration;

use cuda_agent_protocol::Manifest;
use cuda_agent_protocol::manifest::{OutputColumn, OutputPort, Resources, bytes, describe};
use serde_json::Value;

use super::Resolver;
use super::substitute::{Scope, expressions, scalar_text, whole_expression};
use crate::spec::document::Spot;
use crate::spec::error::{Problem, did_you_mean, list};
use crate::spec::raw::{self, Entries};
use crate::spec::tree::Scalar;
use crate::spec::types::{Command, Retry};
use crate::spec::units::{duration, is_name, is_variable};

/// The cell that is being read: what `${…}` means in it, and where errors go.
pub(super) struct Reader<'a> {
    pub scope: Scope<'a>,
    pub stage: &'a str,
    pub spot: Spot<'a>,
    pub problems: &'a mut Vec<Problem>,
}

impl Reader<'_> {
    fn report(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    fn texts(&mut self, field: &str, texts: Vec<String>) -> Vec<String> {
        let list_spot = self.spot.key(field);
        let read = |(index, text)| self.scope.text(text, &list_spot.index(index), self.problems);
        texts.into_iter().enumerate().filter_map(read).collect()
    }

    fn value(&mut self, field: &Option<Value>, spot: &Spot) -> Option<Value> {
        let value = field.as_ref()?;
        self.scope.value(value.clone(), spot, self.problems)
    }

    /// A number of things that fits 32 bits.
    fn whole(&mut self, field: &Option<Value>, spot: &Spot, name: &str, least: u64) -> Option<u32> {
        let value = self.value(field, spot)?;
        match value.as_u64().filter(|number| *number >= least).map(u32::try_from) {
            Some(Ok(number)) => Some(number),
            _ => {
                let wanted =
                    if least == 0 { "a whole number".to_owned() } else { format!("a whole number from {least}") };
                self.report(Problem::new(spot.place(), format!("`{name}` must be {wanted}, not {}", describe(&value))));
                None
            }
        }
    }

    /// A number of cores, or `all`.
    fn cores(&mut self, field: &Option<Value>, spot: &Spot) -> Option<u32> {
        let value = self.value(field, spot)?;
        // Of a parameter that is `all` by default `-p` makes text of a number.
        let number = value.as_u64().or_else(|| value.as_str().and_then(|text| text.parse().ok()));
        match number.filter(|number| *number >= 1).map(u32::try_from) {
            Some(Ok(number)) => Some(number),
            _ if value == "all" => Some(Resources::ALL_CORES),
            _ => {
                let message = format!("`cpu` must be a whole number from 1, or `all`, not {}", describe(&value));
                self.report(Problem::new(spot.place(), message));
                None
            }
        }
    }

    fn duration(&mut self, field: &Option<Value>, spot: &Spot, name: &str) -> Option<Duration> {
        let value = self.value(field, spot)?;
        let read = value.as_str().and_then(duration);
        if read.is_none() {
            let problem = Problem::new(spot.place(), format!("`{name}` must be a duration, not {}", describe(&value)));
            let hint = match &value {
                Value::Number(number) => format!("give the unit: `{number}s`, `{number}m` or `{number}h`"),
                _ => "durations look like `30s`, `2h` or `1h30m`; units are ms, s, m, h and d, and 100 years are the most".to_owned(),
            };
            self.report(problem.hint(hint));
        }
        read
    }

    fn memory(&mut self, field: &Option<Value>, spot: &Spot) -> Option<u64> {
        let value = self.value(field, spot)?;
        let read = value.as_u64().or_else(|| value.as_str().and_then(bytes::parse));
        if read.is_none() {
            let problem = Problem::new(spot.place(), format!("`memory` must be a size, not {}", describe(&value)));
            self.report(problem.hint("sizes look like `4GiB`; units are KB, MB, GB, TB, KiB, MiB, GiB and TiB"));
        }
        read
    }

    pub fn resources(&mut self, raw: &Option<raw::Resources>, base: Resources) -> Resources {
        let Some(raw) = raw else { return base };
        let parent = self.spot;
        let spot = parent.key("resources");
        Resources {
            cpu: self.cores(&raw.cpu, &spot.key("cpu")).unwrap_or(base.cpu),
            memory: self.memory(&raw.memory, &spot.key("memory")).unwrap_or(base.memory),
            gpu: self.whole(&raw.gpu, &spot.key("gpu"), "gpu", 0).unwrap_or(base.gpu),
        }
    }

    /// The name of an executor; it must be one of the project's.
    pub fn executor(&mut self, resolver: &Resolver, raw: Option<String>) -> Option<String> {
        let parent = self.spot;
        let spot = parent.key("executor");
        let name = self.scope.text(raw?, &spot, self.problems)?;
        let known = resolver.catalog.executors();
        if !known.contains(&name) {
            let names = || known.iter().map(String::as_str);
            let hint = did_you_mean(&name, names()).unwrap_or_else(|| match known.len() {
                0 | 1 => "`executors:` of cuda-agent.yaml declares them; `local` is this machine".to_owned(),
                _ => format!("executors of the project: {}", list(names())),
            });
            self.report(Problem::new(spot.place(), format!("unknown executor `{name}`")).hint(hint));
        }
        Some(name)
    }

    pub fn retry(&mut self, raw: Option<raw::Retry>) -> Retry {
        let parent = self.spot;
        let spot = parent.key("retry");
        let usual = Retry::default();
        match raw {
            None => usual,
            Some(raw::Retry::Attempts(attempts)) => {
                Retry { attempts: self.whole(&Some(attempts), &spot, "retry", 0).unwrap_or(0), ..usual }
            }
            Some(raw::Retry::Full(fields)) => Retry {
                attempts: self.whole(&fields.attempts, &spot.key("attempts"), "attempts", 0).unwrap_or(1),
                backoff: self.duration(&fields.backoff, &spot.key("backoff"), "backoff").unwrap_or(usual.backoff),
                max_backoff: self
                    .duration(&fields.max_backoff, &spot.key("max_backoff"), "max_backoff")
                    .unwrap_or(usual.max_backoff),
            },
        }
    }

    pub fn timeout(&mut self, raw: &Option<Value>) -> Option<Duration> {
        let parent = self.spot;
        let spot = parent.key("timeout");
        let read = self.duration(raw, &spot, "timeout")?;
        if read.is_zero() {
            self.report(Problem::new(spot.place(), "`timeout` must be longer than nothing"));
        }
        Some(read)
    }

    /// A number of rows, which only stages of by-row kinds have.
    pub fn count_of_rows(&mut self, raw: &Option<Value>, name: &str, kind: Option<&Manifest>) -> Option<u64> {
        let parent = self.spot;
        let spot = parent.key(name);
        if let (Some(_), Some(kind)) = (raw, kind.filter(|kind| kind.by_row.is_none())) {
            let message = format!("`{name}` is for by-row kinds, and `{}` is none", kind.name);
            self.report(Problem::new(spot.place().name(), message).hint("remove it"));
        }
        self.whole(raw, &spot, name, 0).map(u64::from)
    }

    pub fn tags(&mut self, raw: Option<Vec<String>>) -> Vec<String> {
        raw.map(|tags| self.texts("tags", tags)).unwrap_or_default()
    }

    pub fn env(&mut self, raw: Option<Entries<String>>) -> BTreeMap<String, String> {
        let parent = self.spot;
        let spot = parent.key("env");
        let mut env = BTreeMap::new();
        for (name, text) in raw.unwrap_or_default().0 {
            let spot = spot.key(&name);
            if !is_variable(&name) {
                self.report(Problem::new(
                    spot.place().name(),
                    format!("`{name}` can't be the name of an environment variable"),
                ));
            } else if name.starts_with("CUDA_AGENT_") {
                let problem = Problem::new(spot.place().name(), format!("`{name}` is the engine's own variable"));
                self.report(problem.hint("choose a name that doesn't begin with `CUDA_AGENT_`"));
            }
            if let Some(text) = self.scope.text(text, &spot, self.problems) {
                env.insert(name, text);
            }
        }
        env
    }

    /// Names of secrets; each must be one of the pipeline's.
    pub fn secrets(&mut self, resolver: &Resolver, raw: Option<Vec<String>>) -> Vec<String> {
        let names = raw.map(|names| self.texts("secrets", names)).unwrap_or_default();
        let parent = self.spot;
        let spot = parent.key("secrets");
        for (index, name) in names.iter().enumerate() {
            if !resolver.secrets.contains_key(name) && !resolver.hides("secrets", name) {
                let known = || resolver.secrets.keys().map(String::as_str);
                let hint = did_you_mean(name, known()).unwrap_or_else(|| match resolver.secrets.is_empty() {
                    false => format!("secrets of the pipeline: {}", list(known())),
                    true => format!("add `secrets: {{ {name}: {{ env: {name} }} }}` to the pipeline"),
                });
                self.report(Problem::new(spot.index(index).place(), format!("unknown secret `{name}`")).hint(hint));
            }
        }
        names
    }

    pub fn command(&mut self, raw: Option<raw::Run>) -> Option<Command> {
        let parent = self.spot;
        let spot = parent.key("run");
        let command = match raw? {
            raw::Run::Shell(text) => Command::Shell(self.scope.text(text, &spot, self.problems)?),
            raw::Run::Words(words) => {
                let read = |(index, word)| self.scope.text(word, &spot.index(index), self.problems);
                Command::Words(words.into_iter().enumerate().map(read).collect::<Option<Vec<String>>>()?)
            }
        };
        let is_empty = match &command {
            Command::Shell(text) => text.trim().is_empty(),
            Command::Words(words) => words.first().is_none_or(String::is_empty),
        };
        if is_empty {
            self.report(Problem::new(spot.place(), "`run` is empty"));
        }
        Some(command)
    }

    /// The manifest that stands for the kind of a `uses: run` stage; its inputs follow once producers are known.
    pub fn run_manifest(
        &mut self,
        outputs: Option<Entries<raw::Output>>,
        files: Option<Vec<String>>,
        resources: Resources,
    ) -> Manifest {
        Manifest {
            name: "run".to_owned(),
            version: "1.0.0".to_owned(),
            outputs: self.run_outputs(outputs),
            resources,
            sources: self.files(files),
            ..Manifest::default()
        }
    }

    fn run_outputs(&mut self, outputs: Option<Entries<raw::Output>>) -> BTreeMap<String, OutputPort> {
        let parent = self.spot;
        let spot = parent.key("outputs");
        let mut ports = BTreeMap::new();
        for (name, output) in outputs.unwrap_or_default().0 {
            let spot = spot.key(&name);
            if !is_name(&name) {
                self.report(
                    Problem::new(spot.place().name(), format!("`{name}` can't be the name of an output"))
                        .hint(super::NAME_HINT),
                );
            }
            let output = output.fields();
            // It is missing or broken, which is reported.
            let Some(port_type) = output.port_type else { continue };
            let columns = output.columns.unwrap_or_default().0;
            if !port_type.is_table() && !columns.is_empty() {
                let message = format!("output `{name}` is a {port_type}, which has no columns");
                self.report(Problem::new(spot.key("columns").place().name(), message));
            }
            let column = |(name, column_type)| OutputColumn { name, column_type, measured: false, doc: String::new() };
            let columns = columns.into_iter().map(column).collect();
            ports.insert(name, OutputPort { port_type, columns, doc: String::new() });
        }
        ports
    }

    fn files(&mut self, raw: Option<Vec<String>>) -> Vec<String> {
        let files = raw.map(|files| self.texts("files", files)).unwrap_or_default();
        let parent = self.spot;
        let spot = parent.key("files");
        for (index, file) in files.iter().enumerate() {
            let inside =
                Path::new(file).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
            if file.is_empty() || !inside {
                let message = format!("`{file}` must lie in the pipeline's folder");
                let problem = Problem::new(spot.index(index).place(), message);
                self.report(problem.hint("files are copied beside the command under the same relative path"));
            }
        }
        files
    }

    /// Fields that mean nothing for this kind of stage.
    pub fn refuse_misplaced(&mut self, stage: &raw::Stage) {
        let Some(uses) = &stage.uses else { return };
        let misplaced: Vec<(&str, String, String)> = if uses == "run" {
            let hint = "use `${params.NAME}` in `run`, or `env`".to_owned();
            let with = stage.with.iter().map(|_| ("with", "`uses: run` takes no parameters".to_owned(), hint.clone()));
            let by_row = [
                ("allow_failed_rows", stage.allow_failed_rows.is_some()),
                ("max_rejected", stage.max_rejected.is_some()),
            ];
            let by_row = by_row.into_iter().filter(|(_, present)| *present);
            let by_row =
                by_row.map(|(field, _)| (field, format!("`{field}` is for by-row kinds"), "remove it".to_owned()));
            with.chain(by_row).collect()
        } else {
            [("run", stage.run.is_some()), ("outputs", stage.outputs.is_some()), ("files", stage.files.is_some())]
                .into_iter()
                .filter(|(_, present)| *present)
                .map(|(field, _)| {
                    let hint = format!("remove it, or write `uses: run` instead of `uses: {uses}`");
                    (field, format!("`{field}` belongs to `uses: run`"), hint)
                })
                .collect()
        };
        for (field, message, hint) in misplaced {
            let place = self.spot.key(field).place().name();
            self.report(Problem::new(place, message).hint(hint));
        }
    }

    /// Whether the stage takes part.
    pub fn when(&mut self, raw: &Option<Value>) -> bool {
        let Some(value) = raw else { return true };
        let parent = self.spot;
        let spot = parent.key("when");
        let comparison = value.as_str().and_then(|text| {
            let split =
                |operator: &'static str, equal| text.split_once(operator).map(|(left, right)| (left, right, equal));
            split("==", true).or_else(|| split("!=", false))
        });
        let outcome = match comparison {
            Some((left, right, equal)) => self.compare(left.trim(), right.trim(), &spot).map(|same| same == equal),
            None => match self.scope.value(value.clone(), &spot, self.problems) {
                None => None,
                Some(Value::Bool(outcome)) => Some(outcome),
                Some(other) => {
                    let problem =
                        Problem::new(spot.place(), format!("`when` must be true or false, not {}", describe(&other)));
                    self.report(problem.hint("write `${params.x}` for a boolean parameter, or `${params.x} == value`"));
                    None
                }
            },
        };
        outcome.unwrap_or(true)
    }

    fn compare(&mut self, left: &str, right: &str, spot: &Spot) -> Option<bool> {
        if whole_expression(left).is_none() {
            let problem =
                Problem::new(spot.place(), format!("the left side of a comparison must be one `${{…}}`, not `{left}`"));
            self.report(problem.hint("write `${params.x} == value`"));
            return None;
        }
        let value = self.scope.value(Value::from(left), spot, self.problems)?;
        let other = match whole_expression(right) {
            Some(_) => self.scope.value(Value::from(right), spot, self.problems)?,
            None => literal(right, value.is_string()),
        };
        let same_type = std::mem::discriminant(&value) == std::mem::discriminant(&other);
        if !same_type && !value.is_null() && !other.is_null() {
            let message = format!("`{left}` is {}, which never equals {}", describe(&value), describe(&other));
            self.report(Problem::new(spot.place(), message));
            return None;
        }
        Some(match (value.as_f64(), other.as_f64()) {
            (Some(value), Some(other)) => value == other,
            _ => value == other,
        })
    }

    /// The parameters of a kind: what the stage gives, else the command line's, else defaults.
    pub fn params(
        &mut self,
        resolver: &Resolver,
        raw: Option<Entries<Value>>,
        kind: &Manifest,
    ) -> BTreeMap<String, Value> {
        let parent = self.spot;
        let spot = parent.key("with");
        let mut params = BTreeMap::new();
        let mut given: Vec<String> = Vec::new();
        for (name, value) in raw.unwrap_or_default().0 {
            let spot = spot.key(&name);
            let Some(param) = kind.params.get(&name) else {
                let hint = did_you_mean(&name, kind.params.keys().map(String::as_str)).unwrap_or_else(|| {
                    format!("parameters of `{}`: {}", kind.name, list(kind.params.keys().map(String::as_str)))
                });
                self.report(
                    Problem::new(spot.place().name(), format!("unknown parameter `{name}` of `{}`", kind.name))
                        .hint(hint),
                );
                continue;
            };
            given.push(name.clone());
            if resolver.overridden(self.stage, &name) {
                continue;
            }
            let Some(value) = self.scope.value(value, &spot, self.problems) else { continue };
            match param.refuse(&value) {
                Some(reason) => {
                    self.report(
                        Problem::new(spot.place(), format!("parameter `{name}`: {reason}"))
                            .maybe_hint(doc_hint(&name, &param.doc)),
                    );
                }
                None => drop(params.insert(name, value)),
            }
        }
        self.overrides(resolver, kind, &mut params, &mut given);
        for (name, param) in kind.params.iter().filter(|(name, _)| !given.contains(name)) {
            match &param.default {
                Some(default) => drop(params.insert(name.clone(), default.clone())),
                None => {
                    let message = format!("stage `{}` needs parameter `{name}` of `{}`", self.stage, kind.name);
                    let problem = Problem::new(self.spot.place().name(), message).missing(["with", name]);
                    let hint = doc_hint(name, &param.doc).unwrap_or_else(|| format!("add `with: {{ {name}: … }}`"));
                    self.report(problem.hint(hint));
                }
            }
        }
        params
    }

    fn overrides(
        &mut self,
        resolver: &Resolver,
        kind: &Manifest,
        params: &mut BTreeMap<String, Value>,
        given: &mut Vec<String>,
    ) {
        for over in resolver.overrides_of(self.stage) {
            let Some(param) = kind.params.get(&over.name) else { continue };
            given.push(over.name.clone());
            match over.value(param.param_type == cuda_agent_protocol::manifest::ParamType::String) {
                Err(problem) => self.report(*problem),
                Ok(value) => match param.refuse(&value) {
                    Some(reason) => self.report(over.value_problem(format!("parameter `{}`: {reason}", over.name))),
                    None => drop(params.insert(over.name.clone(), value)),
                },
            }
        }
    }

    /// The kind of the stage out of the catalog.
    pub fn kind(&mut self, resolver: &Resolver, uses: &str) -> Option<Arc<Manifest>> {
        let kind = resolver.catalog.get(uses);
        if kind.is_none() {
            let names = resolver.catalog.names();
            let names = || names.iter().map(String::as_str).chain(["run"]);
            let hint = did_you_mean(uses, names()).unwrap_or_else(|| format!("stage kinds: {}", list(names())));
            let place = self.spot.key("uses").place();
            self.report(Problem::new(place, format!("unknown stage kind `{uses}`")).hint(hint));
        }
        kind
    }
}

/// Names of the pipeline's parameters in a command.
pub(super) fn params_in(command: &raw::Run) -> BTreeSet<String> {
    let texts: Vec<&str> = match command {
        raw::Run::Shell(text) => vec![text],
        raw::Run::Words(words) => words.iter().map(String::as_str).collect(),
    };
    let names = texts.into_iter().flat_map(expressions).filter_map(|expression| expression.strip_prefix("params."));
    names.map(str::to_owned).collect()
}

fn doc_hint(name: &str, doc: &str) -> Option<String> {
    (!doc.is_empty()).then(|| format!("`{name}`: {doc}"))
}

/// The right side of a comparison; with text on the left it is text too, and quotes may stand around it.
fn literal(text: &str, is_text: bool) -> Value {
    let quoted = ['"', '\''].iter().find_map(|quote| text.strip_prefix(*quote)?.strip_suffix(*quote));
    match (quoted, is_text) {
        (Some(inside), _) => Value::from(inside),
        (None, true) => Value::from(text),
        (None, false) => Scalar::plain(text).value().unwrap_or(Value::Null),
    }
}

/// `name=value` of a cell, compared as text or as values.
pub(super) fn matches(value: &Value, written: &str) -> bool {
    let text = scalar_text(value).unwrap_or_default();
    text == written || Scalar::plain(written).value().as_ref() == Some(value)
}
