//! Finding cycles, each told once, as `a → b → a`.

use std::collections::HashSet;

use super::Resolver;
use crate::spec::document::Place;
use crate::spec::error::Problem;
use crate::spec::types::Source;

#[derive(Clone, Copy, PartialEq)]
enum Mark {
    New,
    Open,
    Done,
}

impl Resolver<'_> {
    /// Walks the graph depth first without recursion; a wire back to an open stage closes a cycle.
    pub(super) fn find_cycles(&mut self) {
        let producers: Vec<Vec<usize>> = (0..self.cells.len()).map(|cell| self.producers(cell)).collect();
        let mut marks = vec![Mark::New; self.cells.len()];
        let mut cycles = Vec::new();
        for start in 0..self.cells.len() {
            if marks[start] != Mark::New {
                continue;
            }
            marks[start] = Mark::Open;
            let mut path = vec![(start, 0)];
            while let Some((cell, next)) = path.last_mut() {
                let Some(&producer) = producers[*cell].get(*next) else {
                    marks[*cell] = Mark::Done;
                    path.pop();
                    continue;
                };
                *next += 1;
                match marks[producer] {
                    Mark::New => {
                        marks[producer] = Mark::Open;
                        path.push((producer, 0));
                    }
                    Mark::Open => {
                        let from = path.iter().position(|(cell, _)| *cell == producer).unwrap_or(0);
                        cycles.push(path[from..].iter().map(|(cell, _)| *cell).collect::<Vec<usize>>());
                    }
                    Mark::Done => {}
                }
            }
        }
        self.report_cycles(cycles);
    }

    fn producers(&self, cell: usize) -> Vec<usize> {
        let sources = self.cells[cell].stage.inputs.values().flatten();
        let producer = |source: &Source| match source {
            Source::Stage { stage, .. } => Some(*stage),
            _ => None,
        };
        sources.filter_map(producer).collect()
    }

    /// A cycle is a list of cells, each taking an output of the next, the last one of the first.
    fn report_cycles(&mut self, cycles: Vec<Vec<usize>>) {
        let mut seen = HashSet::new();
        for mut cycle in cycles {
            // Shown in the direction in which data flows, from the stage that the file names first.
            cycle.reverse();
            let first = cycle.iter().enumerate().min_by_key(|(_, cell)| **cell).map_or(0, |(at, _)| at);
            cycle.rotate_left(first);
            let bases: Vec<usize> = cycle.iter().map(|cell| self.cells[*cell].base).collect();
            if !seen.insert(bases) {
                continue;
            }
            let names: Vec<&str> =
                cycle.iter().chain(cycle.first()).map(|cell| self.cells[*cell].stage.name.as_str()).collect();
            let shown = names.join(" → ");
            let place = self.wire_place(cycle[0], cycle[cycle.len() - 1]);
            let problem = Problem::new(place, format!("cycle: {shown}"));
            let hint = match cycle.len() {
                1 => "a stage can't read its own output",
                _ => "remove one of these inputs",
            };
            self.report(problem.hint(hint));
        }
    }

    /// Where `consumer` names an output of `producer`.
    fn wire_place(&self, consumer: usize, producer: usize) -> Place {
        let stage = &self.cells[consumer].stage;
        let base = &self.bases[self.cells[consumer].base];
        let place = Place::root(base.document).key("stages").key(&base.name);
        let takes = |sources: &[Source]| {
            sources.iter().any(|source| matches!(source, Source::Stage { stage, .. } if *stage == producer))
        };
        match stage.inputs.iter().find(|(_, sources)| takes(sources)) {
            Some((port, _)) => place.key("inputs").key(port),
            None => place.name(),
        }
    }
}
