//! Inputs: references to other stages' outputs, their types and columns.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_agent_protocol::PortType;
use cuda_agent_protocol::manifest::{InputPort, OutputPort};
use serde_json::Value;

use super::matrix::value_in_name;
use super::stage::matches;
use super::substitute::{Scope, scalar_text};
use super::{Base, Cell, NAME_HINT, Resolver};
use crate::name::is_tag_part;
use crate::spec::document::{Place, Spot};
use crate::spec::error::{Problem, did_you_mean, list, nearest};
use crate::spec::raw::{External, Input, Text, Wire};
use crate::spec::types::{Source, Stage};
use crate::spec::units::is_name;

/// Where a wire comes from, before it is checked against its port.
struct Found {
    source: Source,
    port_type: PortType,
    /// Which item of a YAML list it was written as.
    item: Option<usize>,
}

/// What an input port gets.
struct Sources {
    found: Vec<Found>,
    /// Whether it is written as several: a list, or `[*]`.
    several: bool,
    /// Whether all of it could be resolved.
    complete: bool,
}

impl Resolver<'_> {
    /// Makes the wires of all cells.
    pub(super) fn connect(&mut self) {
        let mut problems = std::mem::take(&mut self.problems);
        for base in 0..self.bases.len() {
            let range = self.bases[base].cells.clone();
            let inputs = std::mem::take(&mut self.bases[base].inputs);
            let mut inputs = Some(inputs.0);
            for cell in range.clone() {
                let mine = if cell + 1 == range.end { inputs.take() } else { inputs.clone() };
                self.connect_cell(cell, mine.unwrap_or_default(), &mut problems);
            }
        }
        self.problems = problems;
    }

    fn connect_cell(&mut self, index: usize, inputs: Vec<(String, Input)>, problems: &mut Vec<Problem>) {
        let cell = &self.cells[index];
        let base = &self.bases[cell.base];
        let root = Spot::Root(base.document);
        let stages = root.key("stages");
        let stage_spot = stages.key(&base.name);
        let spot = stage_spot.key("inputs");
        let wiring = Wiring { resolver: self, cell, base, stage_spot: &stage_spot };
        let mut wired = BTreeMap::new();
        let mut ports = BTreeMap::new();
        let given: Vec<String> = match cell.is_run || base.unknown {
            true => Vec::new(),
            false => inputs.iter().map(|(port, _)| port.clone()).collect(),
        };
        for (port, input) in inputs {
            let Some((sources, input_port)) = wiring.port(&port, input, &spot.key(&port), problems) else { continue };
            if cell.is_run {
                ports.insert(port.clone(), input_port);
            }
            if !sources.is_empty() {
                wired.insert(port, sources);
            }
        }
        if !cell.is_run && !base.unknown {
            wiring.missing(&given, problems);
        }
        let cell = &mut self.cells[index];
        cell.stage.inputs = wired;
        if cell.is_run && !ports.is_empty() {
            Arc::make_mut(&mut cell.stage.kind).inputs = ports;
        }
    }
}

/// The wiring of one cell.
struct Wiring<'a> {
    resolver: &'a Resolver<'a>,
    cell: &'a Cell,
    base: &'a Base,
    stage_spot: &'a Spot<'a>,
}

impl Wiring<'_> {
    /// The sources of one port, and the port itself (made up for `uses: run`); `None` where something is wrong.
    fn port(
        &self,
        port: &str,
        input: Input,
        spot: &Spot,
        problems: &mut Vec<Problem>,
    ) -> Option<(Vec<Source>, InputPort)> {
        let declared = self.cell.stage.kind.inputs.get(port);
        if self.cell.is_run {
            if !is_name(port) {
                let problem = Problem::new(spot.place().name(), format!("`{port}` can't be the name of an input"));
                problems.push(problem.hint(NAME_HINT));
            }
        } else if declared.is_none() && !self.base.unknown {
            problems.push(self.unknown_port(port, spot));
            return None;
        }
        let optional = declared.is_some_and(|declared| declared.optional);
        let sources = self.sources(input, spot, optional, problems);
        let input_port = match declared {
            Some(declared) => declared.clone(),
            None => self.made_up(&sources, port, spot, problems)?,
        };
        if declared.is_some() {
            let before = problems.len();
            for found in &sources.found {
                self.check_types(port, found, &input_port, spot, problems);
            }
            if problems.len() == before {
                self.check_count(port, &sources, &input_port, spot, problems);
            }
        }
        Some((sources.found.into_iter().map(|found| found.source).collect(), input_port))
    }

    fn unknown_port(&self, port: &str, spot: &Spot) -> Problem {
        let kind = &self.cell.stage.kind;
        let names = || kind.inputs.keys().map(String::as_str);
        let hint = did_you_mean(port, names()).unwrap_or_else(|| match kind.inputs.is_empty() {
            true => format!("`{}` takes no inputs", kind.name),
            false => format!("inputs of `{}`: {}", kind.name, list(names())),
        });
        Problem::new(spot.place().name(), format!("unknown input `{port}` of `{}`", kind.name)).hint(hint)
    }

    fn check_count(&self, port: &str, sources: &Sources, input: &InputPort, spot: &Spot, problems: &mut Vec<Problem>) {
        if sources.several && !input.list && sources.complete {
            let message = format!("input `{port}` of `{}` takes one output, not several", self.cell.stage.kind.name);
            let hint = sources.found.iter().find_map(|found| match &found.source {
                Source::Stage { stage, output } => {
                    Some(format!("name one of them, as in `{}.{output}`", self.resolver.cells[*stage].stage.name))
                }
                _ => None,
            });
            problems.push(Problem::new(spot.place(), message).maybe_hint(hint));
        } else if sources.several && sources.found.is_empty() && !input.optional && sources.complete {
            problems.push(Problem::new(spot.place(), format!("input `{port}` has no source")));
        }
    }

    fn check_types(&self, port: &str, found: &Found, input: &InputPort, spot: &Spot, problems: &mut Vec<Problem>) {
        let Source::Stage { stage, output } = &found.source else { return };
        let port_type = found.port_type;
        let producer = &self.resolver.cells[*stage].stage;
        let place = || found.item.iter().fold(spot.place(), |place, item| place.index(*item));
        if !port_type.feeds(input.port_type) {
            let message = format!(
                "input `{port}` of `{}` takes `{}`, but `{}.{output}` is `{port_type}`",
                self.cell.stage.kind.name, input.port_type, producer.base
            );
            let fitting = producer.kind.outputs.iter().find(|(_, other)| other.port_type.feeds(input.port_type));
            let hint = fitting.map(|(name, other)| format!("`{}.{name}` is `{}`", producer.base, other.port_type));
            problems.push(Problem::new(place(), message).maybe_hint(hint));
            return;
        }
        if let Some(output_port) = producer.kind.outputs.get(output) {
            check_columns(port, input, &format!("{}.{output}", producer.base), output_port, &place(), problems);
        }
    }

    /// Required ports of the kind that have no source.
    fn missing(&self, given: &[String], problems: &mut Vec<Problem>) {
        let kind = &self.cell.stage.kind;
        for (port, input) in kind.inputs.iter().filter(|(port, input)| !input.optional && !given.contains(port)) {
            // A misspelt port is one mistake, not two.
            let strangers = given.iter().filter(|name| !kind.inputs.contains_key(*name));
            let misspelt = strangers.filter_map(|name| nearest(name, kind.inputs.keys().map(String::as_str)));
            if !misspelt.into_iter().any(|name| name == port) {
                let message = format!("stage `{}` needs input `{port}` of `{}`", self.base.name, kind.name);
                let doc = if input.doc.is_empty() { String::new() } else { format!(": {}", input.doc) };
                let candidates = self.candidates(input);
                let example = candidates.first().map_or_else(|| "…".to_owned(), Clone::clone);
                let problem = Problem::new(self.stage_spot.place().name(), message).missing(["inputs", port]);
                problems.push(
                    problem.hint(format!("add `inputs: {{ {port}: {example} }}`; it takes `{}`{doc}", input.port_type)),
                );
            }
        }
    }

    /// Outputs of earlier stages that would fit a port.
    fn candidates(&self, input: &InputPort) -> Vec<String> {
        let earlier = self.resolver.bases.iter().take_while(|base| base.name != self.base.name);
        let cells =
            earlier.filter_map(|base| self.resolver.cells.get(base.cells.start).filter(|_| base.axes.is_none()));
        let fitting = cells.flat_map(|cell| {
            let same = cell.stage.kind.outputs.iter().filter(|(_, output)| output.port_type == input.port_type);
            same.map(|(name, _)| format!("{}.{name}", cell.stage.base))
        });
        fitting.collect()
    }

    /// The port of a `uses: run` stage, typed by what is wired to it.
    fn made_up(&self, sources: &Sources, port: &str, spot: &Spot, problems: &mut Vec<Problem>) -> Option<InputPort> {
        if sources.found.is_empty() && sources.complete {
            problems.push(Problem::new(spot.place(), format!("input `{port}` has no source")));
            return None;
        }
        let types: Vec<PortType> = sources.found.iter().map(|found| found.port_type).collect();
        let first = *types.first().unwrap_or(&PortType::Tree);
        let port_type = if types.iter().all(|other| *other == first) {
            first
        } else if types.iter().all(|other| other.is_table()) {
            PortType::Table
        } else if !types.iter().any(|other| other.is_table()) {
            PortType::Tree
        } else {
            problems.push(
                Problem::new(spot.place(), format!("input `{port}` mixes tables and trees"))
                    .hint("give them an input each"),
            );
            return None;
        };
        Some(InputPort {
            port_type,
            columns: BTreeMap::new(),
            optional: false,
            list: sources.several,
            doc: String::new(),
        })
    }

    fn sources(&self, input: Input, spot: &Spot, optional: bool, problems: &mut Vec<Problem>) -> Sources {
        let mut sources = Sources { found: Vec::new(), several: false, complete: true };
        match input {
            Input::One(wire) => self.wire(wire, spot, optional, &mut sources, problems),
            Input::List(wires) => {
                sources.several = true;
                for (index, wire) in wires.into_iter().enumerate() {
                    let before = sources.found.len();
                    self.wire(wire, &spot.index(index), optional, &mut sources, problems);
                    sources.found[before..].iter_mut().for_each(|found| found.item = Some(index));
                }
            }
        }
        sources
    }

    fn wire(&self, wire: Wire, spot: &Spot, optional: bool, sources: &mut Sources, problems: &mut Vec<Problem>) {
        let matrix = &self.cell.stage.matrix;
        let scope = Scope {
            params: &self.resolver.params,
            broken_params: &self.resolver.broken_params,
            matrix: (!matrix.is_empty()).then_some(matrix),
        };
        let complete = match wire {
            Wire::External(external) => self.external(external, &scope, spot, sources, problems),
            Wire::Output(text) => match scope.text(text, spot, problems) {
                Some(text) => self.reference(&text, spot, optional, sources, problems),
                None => None,
            },
        };
        sources.complete &= complete.is_some();
    }

    /// `{path}`, `{url, digest}` or `{artifact}`; `None` where it is wrong.
    fn external(
        &self,
        external: External,
        scope: &Scope,
        spot: &Spot,
        sources: &mut Sources,
        problems: &mut Vec<Problem>,
    ) -> Option<()> {
        let mut field = |name: &str, text: Option<Text>| match text {
            None => Some(None),
            Some(Text(text)) => scope.text(text, &spot.key(name), problems).map(Some),
        };
        let fields = (
            field("path", external.path),
            field("url", external.url),
            field("digest", external.digest),
            field("artifact", external.artifact),
        );
        let (Some(path), Some(url), Some(digest), Some(artifact)) = fields else { return None };
        let source = match (path, url, digest, artifact) {
            (Some(path), None, None, None) if !path.is_empty() => Ok(Source::Path(self.resolver.folder.join(path))),
            (None, Some(url), digest, None) => url_source(url, digest, spot),
            (None, None, None, Some(artifact)) => artifact_source(&artifact, spot),
            _ => Err(wrong_external(spot)),
        };
        match source {
            Ok(source) => {
                let port_type = external_type(&source);
                sources.found.push(Found { source, port_type, item: None });
                Some(())
            }
            Err(problem) => {
                // A field of it that can't be read is told already.
                let place = spot.place();
                if !self.resolver.broken.is_inside(&place) {
                    problems.push(*problem);
                }
                None
            }
        }
    }

    /// `stage.output`, `stage[*].output` or `stage[axis=value].output`; `None` where it is wrong.
    fn reference(
        &self,
        text: &str,
        spot: &Spot,
        optional: bool,
        sources: &mut Sources,
        problems: &mut Vec<Problem>,
    ) -> Option<()> {
        let Some(reference) = Reference::parse(text) else {
            let problem = Problem::new(spot.place(), format!("`{text}` is no `stage.output`"));
            problems.push(problem.hint(self.reference_hint(text)));
            return None;
        };
        let Some(&producer) = self.resolver.index.get(reference.stage) else {
            problems.extend(self.unknown_stage(&reference, spot));
            return None;
        };
        let producer = &self.resolver.bases[producer];
        if producer.cells.is_empty() {
            return None;
        }
        let cells = match self.cells_of(producer, &reference) {
            Ok(cells) => cells,
            Err((message, hint)) => {
                problems.push(Problem::new(spot.place(), message).hint(hint));
                return None;
            }
        };
        sources.several |= reference.cell == Some("*");
        let on: Vec<usize> = cells.iter().copied().filter(|cell| self.resolver.cells[*cell].on).collect();
        if on.is_empty() && self.cell.on {
            if !optional {
                problems.push(self.left_out(&reference, spot));
                return None;
            }
            return Some(());
        }
        // A stage that is left out itself is checked against all cells, so that turning it on brings no surprise.
        for cell in if on.is_empty() { cells } else { on } {
            sources.found.push(self.output(cell, &reference, producer, spot, problems)?);
        }
        Some(())
    }

    fn output(
        &self,
        cell: usize,
        reference: &Reference,
        producer: &Base,
        spot: &Spot,
        problems: &mut Vec<Problem>,
    ) -> Option<Found> {
        let kind = &self.resolver.cells[cell].stage.kind;
        if let Some(output) = kind.outputs.get(reference.output) {
            let source = Source::Stage { stage: cell, output: reference.output.to_owned() };
            return Some(Found { source, port_type: output.port_type, item: None });
        }
        let stage = Place::root(producer.document).key("stages").key(&producer.name);
        if !producer.unknown && !self.resolver.is_broken(&stage.key("outputs").key(reference.output)) {
            let names = || kind.outputs.keys().map(String::as_str);
            let hint = did_you_mean(reference.output, names()).unwrap_or_else(|| match kind.outputs.is_empty() {
                true => format!("`{}` declares no outputs", producer.name),
                false => format!("outputs of `{}`: {}", producer.name, list(names())),
            });
            let message = format!("stage `{}` has no output `{}`", producer.name, reference.output);
            problems.push(Problem::new(spot.place(), message).hint(hint));
        }
        None
    }

    /// A text that isn't a reference: probably a path, or a stage without its output.
    fn reference_hint(&self, text: &str) -> String {
        if let Some(base) = self.resolver.index.get(text).map(|index| &self.resolver.bases[*index]) {
            let outputs = self.resolver.cells.get(base.cells.start).map(|cell| &cell.stage.kind.outputs);
            if let Some(first) = outputs.and_then(|outputs| outputs.keys().next()) {
                return format!("name the output, as in `{text}.{first}`");
            }
        }
        if text.contains('/') {
            return format!("for a file or folder write `{{ path: {text} }}`");
        }
        "inputs look like `stage.output`, `stage[*].output` or `{ path: FILE }`".to_owned()
    }

    fn unknown_stage(&self, reference: &Reference, spot: &Spot) -> Option<Problem> {
        if self.resolver.hides("stages", reference.stage) {
            return None;
        }
        let names = || self.resolver.bases.iter().map(|base| base.name.as_str());
        let hint = did_you_mean(reference.stage, names()).unwrap_or_else(|| match reference.stage.contains('/') {
            true => "for a file or folder write `{ path: … }`".to_owned(),
            false => format!("stages: {}", list(names())),
        });
        Some(
            Problem::new(spot.place().part(reference.stage), format!("unknown stage `{}`", reference.stage)).hint(hint),
        )
    }

    fn cells_of(&self, producer: &Base, reference: &Reference) -> Result<Vec<usize>, (String, String)> {
        let all = || producer.cells.clone().collect::<Vec<usize>>();
        let (name, output) = (&producer.name, reference.output);
        match (reference.cell, &producer.axes) {
            (None, None) => Ok(all()),
            (Some(_), None) => {
                let message = format!("stage `{name}` has no `matrix`");
                Err((message, format!("write `{name}.{output}`")))
            }
            (Some("*"), Some(_)) => Ok(all()),
            (None, Some(_)) => {
                let example = &self.resolver.cells[producer.cells.start].stage.name;
                let message =
                    format!("stage `{name}` has a `matrix`, so `{name}.{output}` is {} outputs", producer.cells.len());
                Err((message, format!("take all with `{name}[*].{output}`, or one with `{example}.{output}`")))
            }
            (Some(cell), Some(_)) => {
                let found = self.named_cells(producer, cell);
                if found.len() > 1 {
                    let example = &self.resolver.cells[found[0]].stage.name;
                    let hint = format!("write values as in the cells' names: `{example}.{output}`");
                    return Err((format!("`{cell}` fits {} cells of stage `{name}`", found.len()), hint));
                }
                if found.is_empty() {
                    let names: Vec<&str> =
                        producer.cells.clone().map(|index| self.resolver.cells[index].stage.name.as_str()).collect();
                    let wanted = format!("{name}[{cell}]");
                    let hint = did_you_mean(&wanted, names.iter().copied())
                        .unwrap_or_else(|| format!("cells: {}", list(names.iter().copied())));
                    return Err((format!("stage `{name}` has no cell `{cell}`"), hint));
                }
                Ok(found)
            }
        }
    }

    /// The cells that `lr=0.1,size=small` names: all axes, in any order, with values as in the cells' names, else as they
    /// are, since that is how `${matrix.x}` puts them in.
    fn named_cells(&self, producer: &Base, written: &str) -> Vec<usize> {
        let fitting = |fits: &dyn Fn(&Stage) -> bool| -> Vec<usize> {
            producer.cells.clone().filter(|index| fits(&self.resolver.cells[*index].stage)).collect()
        };
        let named = fitting(&|stage| has_values(stage, written, |value, text| value_in_name(value) == text));
        if !named.is_empty() {
            return named;
        }
        let valued = fitting(&|stage| has_values(stage, written, matches));
        if !valued.is_empty() {
            return valued;
        }
        let axes = producer.axes.as_deref().unwrap_or_default();
        let plain = |stage: &Stage| {
            let part = |axis: &String| format!("{axis}={}", scalar_text(&stage.matrix[axis]).unwrap_or_default());
            axes.iter().map(part).collect::<Vec<String>>().join(",")
        };
        fitting(&|stage| plain(stage) == written)
    }

    fn left_out(&self, reference: &Reference, spot: &Spot) -> Problem {
        let message =
            format!("stage `{}` is left out by its `when`, but `{}` takes its output", reference.stage, self.base.name);
        Problem::new(spot.place(), message)
            .hint(format!("give `{}` the same `when`, or take another input", self.base.name))
    }
}

/// Whether each axis of a cell is written with a text that fits its value.
fn has_values(stage: &Stage, written: &str, fits: impl Fn(&Value, &str) -> bool) -> bool {
    let parts: Vec<&str> = written.split(',').collect();
    let fits = |part: &&str| {
        let part = part.split_once('=').map(|(axis, text)| (axis.trim(), text));
        part.and_then(|(axis, text)| Some((stage.matrix.get(axis)?, text)))
            .is_some_and(|(value, text)| fits(value, text) || fits(value, text.trim()))
    };
    parts.len() == stage.matrix.len() && parts.iter().all(fits)
}

fn check_columns(
    port: &str,
    input: &InputPort,
    producer: &str,
    output: &OutputPort,
    place: &Place,
    problems: &mut Vec<Problem>,
) {
    if output.columns.is_empty() {
        return;
    }
    for (name, column_type) in &input.columns {
        let found = output.columns.iter().find(|column| column.name == *name);
        match found {
            None => {
                let names = || output.columns.iter().map(|column| column.name.as_str());
                let message = format!("input `{port}` reads column `{name}`, which `{producer}` doesn't have");
                problems.push(
                    Problem::new(place.clone(), message).hint(format!("columns of `{producer}`: {}", list(names()))),
                );
            }
            Some(column) if column.column_type != *column_type => {
                let message = format!(
                    "input `{port}` reads column `{name}` as {column_type}, but in `{producer}` it is {}",
                    column.column_type
                );
                problems.push(Problem::new(place.clone(), message));
            }
            Some(_) => {}
        }
    }
}

/// What something from outside is, as far as its name tells.
fn external_type(source: &Source) -> PortType {
    let is_parquet = match source {
        Source::Path(path) => path.extension().is_some_and(|extension| extension == "parquet"),
        Source::Url { url, .. } => url.split(['?', '#']).next().is_some_and(|path| path.ends_with(".parquet")),
        _ => false,
    };
    if is_parquet { PortType::Table } else { PortType::Tree }
}

fn url_source(url: String, digest: Option<String>, spot: &Spot) -> Result<Source, Box<Problem>> {
    const HINT: &str = "it is the BLAKE3 of the bytes: `b3sum FILE` prints it";
    if !url.contains("://") {
        let problem = Problem::new(spot.key("url").place(), format!("`{url}` is no URL"));
        return Err(Box::new(problem.hint("URLs look like `https://…`, `file://…` or `s3://…`")));
    }
    let Some(digest) = digest else {
        let problem = Problem::new(spot.place(), "`url` needs the `digest` of its bytes");
        return Err(Box::new(problem.missing(["digest"]).hint(HINT)));
    };
    if digest.len() != 64 || !digest.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)) {
        let problem = Problem::new(spot.key("digest").place(), "`digest` must be 64 lower-case hex digits");
        return Err(Box::new(problem.hint(HINT)));
    }
    Ok(Source::Url { url, digest })
}

fn artifact_source(artifact: &str, spot: &Spot) -> Result<Source, Box<Problem>> {
    match artifact.split_once('@') {
        Some((name, tag)) if is_tag_part(name) && is_tag_part(tag) => {
            Ok(Source::Artifact { name: name.to_owned(), tag: tag.to_owned() })
        }
        _ => {
            let problem = Problem::new(spot.key("artifact").place(), format!("`{artifact}` is no `name@tag`"));
            Err(Box::new(problem.hint("artifacts look like `ops-dataset@v1`")))
        }
    }
}

fn wrong_external(spot: &Spot) -> Box<Problem> {
    let message = "an input from outside is one of `path`, `url` with `digest`, and `artifact`";
    let hint = "write `{ path: FILE }`, `{ url: URL, digest: BLAKE3 }` or `{ artifact: NAME@TAG }`";
    Box::new(Problem::new(spot.place(), message).hint(hint))
}

/// The parts of `stage[cell].output`.
struct Reference<'a> {
    stage: &'a str,
    cell: Option<&'a str>,
    output: &'a str,
}

impl<'a> Reference<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (stage, cell, output) = match text.split_once('[') {
            None => {
                let (stage, output) = text.split_once('.')?;
                (stage, None, output)
            }
            Some((stage, rest)) => {
                let (cell, output) = rest.rsplit_once("].")?;
                (stage, Some(cell), output)
            }
        };
        (is_name(stage) && is_name(output)).then_some(Self { stage, cell, output })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parts(text: &str) -> Option<(&str, Option<&str>, &str)> {
        Reference::parse(text).map(|reference| (reference.stage, reference.cell, reference.output))
    }

    #[test]
    fn references_read() {
        assert_eq!(parts("a.b"), Some(("a", None, "b")));
        assert_eq!(parts("a[*].b"), Some(("a", Some("*"), "b")));
        assert_eq!(parts("train[lr=0.1,s=x].model"), Some(("train", Some("lr=0.1,s=x"), "model")));
        for wrong in ["", "a", "a.", ".b", "a.b.c", "a[", "a[*]", "a[*]b", "a b.c", "../x.y"] {
            assert_eq!(parts(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[a-z.=*,é\\[\\]]{0,20}") {
            let _ = parts(&text);
        }
    }
}
