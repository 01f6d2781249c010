//! Reading `stage.yaml`, the manifest of a stage kind.

use std::path::Path;
use std::sync::Arc;

use cuda_agent_protocol::Manifest;
use cuda_agent_protocol::manifest::{Param, describe};

use super::check::{self, Absent};
use super::document::{Document, Place};
use super::error::{Problem, SpecErrors, did_you_mean, list};
use super::units::{LONGEST, is_name, is_variable};
use super::{deserialize, shape};

/// Reads a manifest; `file` is what errors call it.
pub fn parse_manifest(text: &str, file: &Path) -> Result<Manifest, SpecErrors> {
    let document = Document::new(file.display().to_string(), text);
    let checked = check::check(&document, 0, &shape::MANIFEST, Absent::StandIn);
    let mut problems = checked.problems;
    if document.tree().is_err() {
        return Err(SpecErrors::new(&[document], problems));
    }
    let manifest = match deserialize::read::<Manifest>(&checked.root) {
        Ok(manifest) => manifest,
        Err(mistake) => {
            problems.push(mistake.problem(0));
            return Err(SpecErrors::new(&[document], problems));
        }
    };
    problems.extend(meaning(&manifest).into_iter().filter(|problem| !problem.follows_from(&checked.broken)));
    if problems.is_empty() { Ok(manifest) } else { Err(SpecErrors::new(&[Arc::clone(&document)], problems)) }
}

/// What the types alone don't say.
fn meaning(manifest: &Manifest) -> Vec<Problem> {
    let mut problems = Vec::new();
    let root = Place::root(0);
    if !is_kind_name(&manifest.name) {
        let problem = Problem::new(root.clone().key("name"), format!("`{}` is no `group/name`", manifest.name));
        problems.push(problem.hint("kinds are named like `ops/filter`"));
    }
    if !is_version(&manifest.version) {
        let problem = Problem::new(root.clone().key("version"), format!("`{}` is no version", manifest.version));
        problems.push(problem.hint("versions look like `1.2.0`"));
    }
    if manifest.summary.trim().is_empty() {
        problems.push(
            Problem::new(root.clone().key("summary"), "`summary` is empty")
                .hint("say in one sentence what the kind does"),
        );
    }
    if manifest.run.first().is_none_or(|word| word.trim().is_empty()) {
        let problem = Problem::new(root.clone().key("run"), "`run` is empty");
        problems.push(problem.hint("write the command as words, such as `run: [python, main.py]`"));
    }
    check_ports(manifest, &mut problems);
    for (name, param) in &manifest.params {
        check_param(name, param, root.clone().key("params").key(name), &mut problems);
    }
    for (index, name) in manifest.env.iter().enumerate().filter(|(_, name)| !is_variable(name)) {
        let message = format!("`{name}` can't be the name of an environment variable");
        problems.push(Problem::new(root.clone().key("env").index(index), message));
    }
    check_by_row(manifest, &mut problems);
    check_continued(manifest, &mut problems);
    problems
}

fn is_kind_name(name: &str) -> bool {
    name.split_once('/').is_some_and(|(group, name)| is_name(group) && is_name(name))
}

/// `1.2.3`, perhaps with `-rc.1` behind it.
fn is_version(version: &str) -> bool {
    let (numbers, label) = match version.split_once(['-', '+']) {
        Some((numbers, label)) => (numbers, Some(label)),
        None => (version, None),
    };
    let parts: Vec<&str> = numbers.split('.').collect();
    let is_number = |part: &&str| {
        !part.is_empty()
            && part.bytes().all(|byte| byte.is_ascii_digit())
            && (part.len() == 1 || !part.starts_with('0'))
    };
    let label_fits = |label: &str| {
        !label.is_empty() && label.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+'))
    };
    parts.len() == 3 && parts.iter().all(is_number) && label.is_none_or(label_fits)
}

fn check_ports(manifest: &Manifest, problems: &mut Vec<Problem>) {
    let root = Place::root(0);
    let inputs = manifest.inputs.iter().map(|(name, port)| ("inputs", name, port.port_type, port.columns.is_empty()));
    let outputs =
        manifest.outputs.iter().map(|(name, port)| ("outputs", name, port.port_type, port.columns.is_empty()));
    for (section, name, port_type, without_columns) in inputs.chain(outputs) {
        let place = root.clone().key(section).key(name);
        if !is_name(name) {
            let problem = Problem::new(place.clone().name(), format!("`{name}` can't be the name of a port"));
            problems.push(problem.hint(super::resolve::NAME_HINT));
        }
        if !port_type.is_table() && !without_columns {
            let message = format!("`{name}` is a {port_type}, which has no columns");
            problems.push(
                Problem::new(place.key("columns").name(), message)
                    .hint("tables have: `tasks`, `table`, `trajectories`"),
            );
        }
    }
    for (name, port) in &manifest.outputs {
        let mut seen = std::collections::HashSet::new();
        let place = root.clone().key("outputs").key(name).key("columns");
        for (index, column) in port.columns.iter().enumerate() {
            if !seen.insert(&column.name) {
                let message = format!("output `{name}` has two columns `{}`", column.name);
                problems.push(Problem::new(place.clone().index(index).key("name"), message));
            }
        }
    }
}

fn check_param(name: &str, param: &Param, place: Place, problems: &mut Vec<Problem>) {
    if !is_name(name) {
        let problem = Problem::new(place.clone().name(), format!("`{name}` can't be the name of a parameter"));
        problems.push(problem.hint(super::resolve::NAME_HINT));
    }
    if let (Some(min), Some(max)) = (param.min, param.max)
        && min > max
    {
        problems.push(Problem::new(place.clone().key("min"), format!("parameter `{name}`: `min` is above `max`")));
    }
    use cuda_agent_protocol::manifest::ParamType;
    let is_number = matches!(param.param_type, ParamType::Integer | ParamType::Number);
    for (bound, given) in [("min", param.min), ("max", param.max)] {
        if given.is_some() && !is_number {
            let message = format!("parameter `{name}` is a {}, which has no `{bound}`", param.param_type.name());
            problems.push(Problem::new(place.clone().key(bound).name(), message));
        }
    }
    if !matches!(param.param_type, ParamType::List) {
        let strangers = param.choices.iter().enumerate().filter(|(_, choice)| !param.param_type.accepts(choice));
        for (index, choice) in strangers {
            let message = format!("parameter `{name}`: {} is no {}", describe(choice), param.param_type.name());
            problems.push(Problem::new(place.clone().key("choices").index(index), message));
        }
    }
    if let Some(reason) = param.default.as_ref().and_then(|default| param.refuse(default)) {
        problems.push(Problem::new(place.key("default"), format!("default of `{name}`: {reason}")));
    }
}

/// At most one parameter continues: it is a number of something, and checkpoints are of whole stages.
fn check_continued(manifest: &Manifest, problems: &mut Vec<Problem>) {
    use cuda_agent_protocol::manifest::ParamType;
    let mut continued = manifest.params.iter().filter(|(_, param)| param.continues);
    let Some((first, param)) = continued.next() else { return };
    let place = |name: &str| Place::root(0).key("params").key(name).key("continues").name();
    let mut refuse = |name: &str, message: String| problems.push(Problem::new(place(name), message));
    if param.param_type != ParamType::Integer {
        refuse(
            first,
            format!("parameter `{first}` continues, so it must be an integer, not a {}", param.param_type.name()),
        );
    }
    if manifest.by_row.is_some() {
        refuse(first, format!("parameter `{first}` can't continue in a by-row kind: its rows are kept one by one"));
    }
    for (name, _) in continued {
        refuse(
            name,
            format!("parameter `{name}` can't continue beside `{first}`: one number says how far the work goes"),
        );
    }
}

fn check_by_row(manifest: &Manifest, problems: &mut Vec<Problem>) {
    let Some(by_row) = &manifest.by_row else { return };
    if manifest.checkpoints {
        let message = "a by-row kind has no checkpoints: its rows are kept one by one";
        problems.push(Problem::new(Place::root(0).key("checkpoints"), message));
    }
    let place = Place::root(0).key("by_row");
    let port = place.clone().key("port");
    let message = match manifest.inputs.get(&by_row.port) {
        None => {
            let names = || manifest.inputs.keys().map(String::as_str);
            let hint = did_you_mean(&by_row.port, names()).unwrap_or_else(|| format!("inputs: {}", list(names())));
            let message = format!("`by_row.port` names no input: `{}`", by_row.port);
            problems.push(Problem::new(port, message).hint(hint));
            None
        }
        Some(input) if !input.port_type.is_table() => {
            Some(format!("by-row input `{}` must be a table, not a {}", by_row.port, input.port_type))
        }
        Some(input) if input.columns.is_empty() => {
            Some(format!("by-row input `{}` must declare the columns that it reads", by_row.port))
        }
        Some(input) if input.optional || input.list => {
            Some(format!("by-row input `{}` can be neither optional nor a list", by_row.port))
        }
        Some(_) => None,
    };
    if let Some(message) = message {
        // A broken part of that input explains this as well.
        let elsewhere = Problem::new(Place::root(0).key("inputs").key(&by_row.port).name(), message);
        problems.push(elsewhere.missing(["columns"]));
    }
    for (name, output) in
        manifest.outputs.iter().filter(|(_, output)| !output.port_type.is_table() || output.columns.is_empty())
    {
        let what = if output.port_type.is_table() { "declare its columns" } else { "be a table" };
        let message = format!("output `{name}` of a by-row kind must {what}");
        problems.push(Problem::new(Place::root(0).key("outputs").key(name).name(), message).missing(["columns"]));
    }
    if by_row.window == 0 {
        problems.push(Problem::new(place.clone().key("window"), "`window` must be at least 1"));
    }
    if by_row.row_timeout_s.is_some_and(|seconds| seconds.is_nan() || seconds <= 0.0) {
        problems.push(Problem::new(place.clone().key("row_timeout_s"), "`row_timeout_s` must be longer than nothing"));
    }
    if by_row.row_timeout_s.is_some_and(|seconds| seconds > LONGEST.as_secs_f64()) {
        let problem = Problem::new(place.key("row_timeout_s"), "`row_timeout_s` is longer than 100 years");
        problems.push(problem.hint("leave it out for no limit"));
    }
}
