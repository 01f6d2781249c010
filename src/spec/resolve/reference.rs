//! References to other stages' outputs: `stage.output`, `stage[*].output` and `stage[axis=value].output`.

use serde_json::Value;

use super::Base;
use super::matrix::value_in_name;
use super::stage::matches;
use super::substitute::scalar_text;
use super::wires::{Found, Sources, Wiring};
use crate::spec::document::{Place, Spot};
use crate::spec::error::{Problem, did_you_mean, list};
use crate::spec::types::{Source, Stage};
use crate::spec::units::is_name;

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

impl Wiring<'_> {
    /// `stage.output`, `stage[*].output` or `stage[axis=value].output`; `None` where it is wrong.
    pub(super) fn reference(
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
