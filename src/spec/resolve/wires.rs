//! Inputs: references to other stages' outputs, their types and columns.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_agent_protocol::PortType;
use cuda_agent_protocol::manifest::{InputPort, OutputPort};

use super::substitute::Scope;
use super::{Base, Cell, NAME_HINT, Resolver};
use crate::spec::document::{Place, Spot};
use crate::spec::error::{Problem, did_you_mean, list, nearest};
use crate::spec::raw::{Input, Wire};
use crate::spec::types::Source;
use crate::spec::units::is_name;

/// Where a wire comes from, before it is checked against its port.
pub(super) struct Found {
    pub source: Source,
    pub port_type: PortType,
    /// Which item of a YAML list it was written as.
    pub item: Option<usize>,
}

/// What an input port gets.
pub(super) struct Sources {
    pub found: Vec<Found>,
    /// Whether it is written as several: a list, or `[*]`.
    pub several: bool,
    /// Whether all of it could be resolved.
    pub complete: bool,
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
pub(super) struct Wiring<'a> {
    pub resolver: &'a Resolver<'a>,
    pub cell: &'a Cell,
    pub base: &'a Base,
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
            Input::Output(text) => self.wire(Wire::Output(text), spot, optional, &mut sources, problems),
            Input::External(external) => self.wire(Wire::External(external), spot, optional, &mut sources, problems),
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
