//! The stages of a pipeline as a graph: order, ancestors, selection, pictures.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

use petgraph::Direction;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;

use crate::spec::{self, Pipeline, Source};

/// What flows along an edge.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Wire {
    /// Port of the stage that makes it.
    pub output: String,
    /// Port of the stage that takes it.
    pub input: String,
}

/// Stages, by their index in [`Pipeline::stages`], and wires from producers to consumers.
#[derive(Clone, Debug)]
pub struct Graph {
    graph: DiGraph<usize, Wire>,
    order: Vec<usize>,
}

/// Why a pattern selects nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no stage matches `{pattern}`{}", hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default())]
pub struct SelectError {
    /// As it was given.
    pub pattern: String,
    /// What may have been meant.
    pub hint: Option<String>,
}

impl Graph {
    /// The graph of a pipeline, whose wires are valid and without cycles.
    pub fn new(pipeline: &Pipeline) -> Self {
        let count = pipeline.stages.len();
        let mut graph = DiGraph::with_capacity(count, count);
        for index in 0..count {
            graph.add_node(index);
        }
        for (index, stage) in pipeline.stages.iter().enumerate() {
            for (input, sources) in &stage.inputs {
                for source in sources {
                    if let Source::Stage { stage, output } = source {
                        let wire = Wire { output: output.clone(), input: input.clone() };
                        graph.add_edge(NodeIndex::new(*stage), NodeIndex::new(index), wire);
                    }
                }
            }
        }
        let order = topological(&graph);
        Self { graph, order }
    }

    /// All stages, producers first; among those that are ready, the order of the file counts.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// The stages that a stage takes something from, each once, in the order of the file.
    pub fn producers(&self, stage: usize) -> BTreeSet<usize> {
        self.neighbours(stage, Direction::Incoming)
    }

    /// The stages that take something from a stage, each once, in the order of the file.
    pub fn consumers(&self, stage: usize) -> BTreeSet<usize> {
        self.neighbours(stage, Direction::Outgoing)
    }

    /// The wires that end at a stage, with their producers.
    pub fn wires_into(&self, stage: usize) -> impl Iterator<Item = (usize, &Wire)> {
        self.graph
            .edges_directed(NodeIndex::new(stage), Direction::Incoming)
            .map(|edge| (edge.source().index(), edge.weight()))
    }

    /// For each stage, whether one of `stages` needs it, directly or not; `stages` themselves count.
    pub fn ancestors(&self, stages: impl IntoIterator<Item = usize>) -> Vec<bool> {
        self.reach(stages, Direction::Incoming)
    }

    /// For each stage, whether it needs one of `stages`, directly or not; `stages` themselves count.
    pub fn descendants(&self, stages: impl IntoIterator<Item = usize>) -> Vec<bool> {
        self.reach(stages, Direction::Outgoing)
    }

    fn neighbours(&self, stage: usize, direction: Direction) -> BTreeSet<usize> {
        self.graph.neighbors_directed(NodeIndex::new(stage), direction).map(NodeIndex::index).collect()
    }

    fn reach(&self, stages: impl IntoIterator<Item = usize>, direction: Direction) -> Vec<bool> {
        let mut reached = vec![false; self.graph.node_count()];
        let mut waiting: Vec<usize> = stages.into_iter().collect();
        waiting.iter().for_each(|stage| reached[*stage] = true);
        while let Some(stage) = waiting.pop() {
            for next in self.graph.neighbors_directed(NodeIndex::new(stage), direction).map(NodeIndex::index) {
                if !std::mem::replace(&mut reached[next], true) {
                    waiting.push(next);
                }
            }
        }
        reached
    }

    /// For each stage, whether the patterns select it; without patterns all are.
    ///
    /// A pattern is the name of a stage, of one cell (`train[lr=0.1]`), of a stage with a matrix (all its cells) or
    /// `tag:NAME`. What is selected brings all that it needs, so `+name` says no more than `name`. `name+` adds
    /// everything that needs it, and what that needs.
    pub fn select(&self, pipeline: &Pipeline, patterns: &[String]) -> Result<Vec<bool>, SelectError> {
        if patterns.is_empty() {
            return Ok(vec![true; pipeline.stages.len()]);
        }
        let mut wanted = BTreeSet::new();
        for pattern in patterns {
            let (name, with_descendants) = match pattern.strip_suffix('+') {
                Some(name) => (name, true),
                None => (pattern.as_str(), false),
            };
            let matched = matching(pipeline, name.strip_prefix('+').unwrap_or(name));
            if matched.is_empty() {
                return Err(SelectError { pattern: pattern.clone(), hint: hint(pipeline, name) });
            }
            if with_descendants {
                let reached = self.descendants(matched);
                wanted.extend(reached.iter().enumerate().filter(|(_, reached)| **reached).map(|(stage, _)| stage));
            } else {
                wanted.extend(matched);
            }
        }
        Ok(self.ancestors(wanted))
    }

    /// The graph in the language of Graphviz.
    pub fn to_dot(&self, pipeline: &Pipeline) -> String {
        let mut text = "digraph pipeline {\n  rankdir=LR;\n  node [shape=box, style=rounded, fontname=\"sans-serif\"];\n  edge [fontname=\"sans-serif\", fontsize=10];\n".to_owned();
        for (index, stage) in pipeline.stages.iter().enumerate() {
            let label = format!("{}\\n{}", dot_text(&stage.name), dot_text(&stage.kind.name));
            let _ = writeln!(text, "  s{index} [label=\"{label}\"];");
        }
        for (index, source, shown) in outside(pipeline) {
            let _ = writeln!(text, "  {source} [label=\"{}\", shape=note, style=\"\"];", dot_text(&shown.text));
            let _ = writeln!(text, "  {source} -> s{index} [label=\"{}\"];", dot_text(&shown.input));
        }
        for (from, to, label) in self.arrows() {
            let _ = writeln!(text, "  s{from} -> s{to} [label=\"{}\"];", dot_text(&label));
        }
        text.push_str("}\n");
        text
    }

    /// The graph in the language of Mermaid.
    pub fn to_mermaid(&self, pipeline: &Pipeline) -> String {
        let mut text = "flowchart LR\n".to_owned();
        for (index, stage) in pipeline.stages.iter().enumerate() {
            let _ = writeln!(
                text,
                "  s{index}[\"{}<br/><small>{}</small>\"]",
                mermaid_text(&stage.name),
                mermaid_text(&stage.kind.name)
            );
        }
        for (index, source, shown) in outside(pipeline) {
            let _ = writeln!(
                text,
                "  {source}[/\"{}\"/] -->|\"{}\"| s{index}",
                mermaid_text(&shown.text),
                mermaid_text(&shown.input)
            );
        }
        for (from, to, label) in self.arrows() {
            let _ = writeln!(text, "  s{from} -->|\"{}\"| s{to}", mermaid_text(&label));
        }
        text
    }

    /// One arrow for all wires between two stages, with what they carry.
    fn arrows(&self) -> Vec<(usize, usize, String)> {
        let mut arrows = Vec::new();
        for to in 0..self.graph.node_count() {
            let mut wires: Vec<(usize, &Wire)> = self.wires_into(to).collect();
            wires.sort();
            wires.dedup();
            for group in wires.chunk_by(|one, other| one.0 == other.0) {
                let labels: Vec<String> = group.iter().map(|(_, wire)| wire.label()).collect();
                arrows.push((group[0].0, to, labels.join(", ")));
            }
        }
        arrows
    }
}

impl Wire {
    /// One word where both ports have the same name.
    fn label(&self) -> String {
        if self.output == self.input { self.output.clone() } else { format!("{} → {}", self.output, self.input) }
    }
}

/// Kahn's algorithm; the earliest stage of the file that is ready comes next.
fn topological(graph: &DiGraph<usize, Wire>) -> Vec<usize> {
    let mut missing: Vec<usize> =
        graph.node_indices().map(|node| graph.edges_directed(node, Direction::Incoming).count()).collect();
    let mut ready: BTreeSet<usize> = (0..missing.len()).filter(|stage| missing[*stage] == 0).collect();
    let mut order = Vec::with_capacity(missing.len());
    while let Some(stage) = ready.pop_first() {
        order.push(stage);
        for consumer in graph.neighbors(NodeIndex::new(stage)).map(NodeIndex::index) {
            missing[consumer] -= 1;
            if missing[consumer] == 0 {
                ready.insert(consumer);
            }
        }
    }
    order
}

fn matching(pipeline: &Pipeline, name: &str) -> Vec<usize> {
    let fits = |stage: &spec::Stage| match name.strip_prefix("tag:") {
        Some(tag) => stage.tags.iter().any(|other| other == tag),
        None => stage.name == name || stage.base == name,
    };
    pipeline.stages.iter().enumerate().filter(|(_, stage)| fits(stage)).map(|(index, _)| index).collect()
}

fn hint(pipeline: &Pipeline, name: &str) -> Option<String> {
    let name = name.strip_prefix('+').unwrap_or(name);
    let names: BTreeSet<String> = pipeline
        .stages
        .iter()
        .flat_map(|stage| {
            let tags = stage.tags.iter().map(|tag| format!("tag:{tag}"));
            [stage.name.clone(), stage.base.clone()].into_iter().chain(tags)
        })
        .collect();
    if let Some(near) = spec::suggest(name, names.iter().map(String::as_str)) {
        return Some(format!("did you mean `{near}`?"));
    }
    let is_tag = name.starts_with("tag:");
    let shown: Vec<String> = names
        .iter()
        .filter(|other| other.starts_with("tag:") == is_tag)
        .take(8)
        .map(|other| format!("`{other}`"))
        .collect();
    match shown.is_empty() {
        true => Some("no stage has a tag".to_owned()),
        false => Some(format!("there are {}", shown.join(", "))),
    }
}

/// What a picture shows of an input from outside.
struct Outside {
    text: String,
    input: String,
}

/// Inputs from outside, each place shown once: consumer, name of the node, what to show.
fn outside(pipeline: &Pipeline) -> Vec<(usize, String, Outside)> {
    let mut nodes: HashMap<String, usize> = HashMap::new();
    let mut shown = Vec::new();
    for (index, stage) in pipeline.stages.iter().enumerate() {
        for (input, source) in
            stage.inputs.iter().flat_map(|(input, sources)| sources.iter().map(move |source| (input, source)))
        {
            let text = match source {
                Source::Stage { .. } => continue,
                Source::Path(path) => path.strip_prefix(&pipeline.folder).unwrap_or(path).display().to_string(),
                Source::Url { url, .. } => url.clone(),
                Source::Artifact { name, tag } => format!("{name}@{tag}"),
                Source::Stored(artifact) => format!("artifact {}", artifact.digest.short()),
            };
            let next = nodes.len();
            let node = *nodes.entry(text.clone()).or_insert(next);
            shown.push((index, format!("x{node}"), Outside { text, input: input.clone() }));
        }
    }
    shown
}

fn dot_text(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

fn mermaid_text(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;
    use std::sync::Arc;

    struct NoKinds;
    impl spec::Catalog for NoKinds {
        fn get(&self, _: &str) -> Option<Arc<cuda_agent_protocol::Manifest>> {
            None
        }
        fn names(&self) -> Vec<String> {
            Vec::new()
        }
    }

    fn parse(text: &str) -> Pipeline {
        let none = |_: &Path| Err(std::io::ErrorKind::NotFound.into());
        spec::parse_pipeline(text, Path::new("x.yaml"), Path::new("/data"), &NoKinds, &[], &none).unwrap()
    }

    fn diamond() -> Pipeline {
        parse(
            "
name: diamond
stages:
  last: { uses: run, run: x, inputs: { l: left.out, r: right.out }, outputs: { out: tree } }
  right: { uses: run, run: x, inputs: { out: top.out, again: top.out }, outputs: { out: tree }, tags: [side] }
  left: { uses: run, run: x, inputs: { top: top.out }, outputs: { out: tree }, tags: [side] }
  top: { uses: run, run: x, inputs: { data: { path: 'raw \"data\"' } }, outputs: { out: tree } }
  cells: { uses: run, run: x, matrix: { n: [1, 2] }, inputs: { top: top.out }, outputs: { out: tree } }
  alone: { uses: run, run: x }
",
        )
    }

    fn names<'a>(pipeline: &'a Pipeline, selected: &[bool]) -> Vec<&'a str> {
        let stages = pipeline.stages.iter().zip(selected).filter(|(_, selected)| **selected);
        stages.map(|(stage, _)| stage.name.as_str()).collect()
    }

    fn select(patterns: &[&str]) -> Result<Vec<String>, String> {
        let pipeline = diamond();
        let patterns: Vec<String> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
        let selected = Graph::new(&pipeline).select(&pipeline, &patterns).map_err(|error| error.to_string())?;
        Ok(names(&pipeline, &selected).into_iter().map(str::to_owned).collect())
    }

    #[test]
    fn producers_come_first_and_the_file_decides_among_equals() {
        let pipeline = diamond();
        let graph = Graph::new(&pipeline);
        let order: Vec<&str> = graph.order().iter().map(|stage| pipeline.stages[*stage].name.as_str()).collect();
        assert_eq!(order, ["top", "right", "left", "last", "cells[n=1]", "cells[n=2]", "alone"]);
        assert_eq!(graph.producers(0), BTreeSet::from([1, 2]));
        assert_eq!(graph.consumers(3), BTreeSet::from([1, 2, 4, 5]));
        assert_eq!(graph.wires_into(1).count(), 2);
    }

    #[test]
    fn a_selection_brings_what_it_needs() {
        assert_eq!(select(&[]).unwrap().len(), 7);
        assert_eq!(select(&["left"]).unwrap(), ["left", "top"]);
        assert_eq!(select(&["+left"]).unwrap(), ["left", "top"]);
        assert_eq!(select(&["left+"]).unwrap(), ["last", "right", "left", "top"]);
        assert_eq!(select(&["tag:side"]).unwrap(), ["right", "left", "top"]);
        assert_eq!(select(&["cells"]).unwrap(), ["top", "cells[n=1]", "cells[n=2]"]);
        assert_eq!(select(&["cells[n=2]", "alone"]).unwrap(), ["top", "cells[n=2]", "alone"]);
    }

    #[test]
    fn what_selects_nothing_is_told_with_a_hint() {
        assert_eq!(select(&["lefd"]).unwrap_err(), "no stage matches `lefd` (did you mean `left`?)");
        assert_eq!(select(&["tag:sid"]).unwrap_err(), "no stage matches `tag:sid` (did you mean `tag:side`?)");
        assert_eq!(
            select(&["tag:other-thing"]).unwrap_err(),
            "no stage matches `tag:other-thing` (there are `tag:side`)"
        );
        assert!(select(&["something"]).unwrap_err().contains("there are `alone`, `cells`"));
    }

    #[test]
    fn pictures_show_stages_kinds_and_wires() {
        let pipeline = diamond();
        let graph = Graph::new(&pipeline);
        let dot = graph.to_dot(&pipeline);
        assert!(dot.contains("s3 [label=\"top\\nrun\"];"), "{dot}");
        assert!(dot.contains("s3 -> s1 [label=\"out → again, out\"];"), "{dot}");
        assert!(
            dot.contains("x0 [label=\"raw \\\"data\\\"\", shape=note, style=\"\"];\n  x0 -> s3 [label=\"data\"];"),
            "{dot}"
        );
        let mermaid = graph.to_mermaid(&pipeline);
        assert!(mermaid.contains("  s4[\"cells[n=1]<br/><small>run</small>\"]\n"), "{mermaid}");
        assert!(mermaid.contains("  s2 -->|\"out → l\"| s0\n"), "{mermaid}");
        assert!(mermaid.contains("  x0[/\"raw &quot;data&quot;\"/] -->|\"data\"| s3\n"), "{mermaid}");
    }

    /// Stages that take outputs of any stages before them in a shuffled numbering.
    fn random_pipeline() -> impl Strategy<Value = Pipeline> {
        let count = 1..12usize;
        count
            .prop_flat_map(|count| {
                let wires = prop::collection::vec(prop::collection::vec(any::<prop::sample::Index>(), 0..4), count);
                (Just((0..count).collect::<Vec<usize>>()).prop_shuffle(), wires)
            })
            .prop_map(|(positions, wires)| {
                let mut text = "name: x\nstages:\n".to_owned();
                for (stage, wires) in wires.iter().enumerate() {
                    let before: Vec<usize> =
                        (0..positions.len()).filter(|other| positions[*other] < positions[stage]).collect();
                    let _ = write!(
                        text,
                        "  s{stage}:\n    uses: run\n    run: x\n    outputs: {{ out: tree }}\n    inputs: {{ "
                    );
                    for (port, wire) in wires.iter().enumerate().filter(|_| !before.is_empty()) {
                        let _ = write!(text, "p{port}: s{}.out, ", before[wire.index(before.len())]);
                    }
                    text.push_str("}\n");
                }
                parse(&text)
            })
    }

    proptest! {
        #[test]
        fn order_and_reach_agree(pipeline in random_pipeline()) {
            let graph = Graph::new(&pipeline);
            let mut place = vec![usize::MAX; pipeline.stages.len()];
            graph.order().iter().enumerate().for_each(|(at, stage)| place[*stage] = at);
            prop_assert!(place.iter().all(|place| *place != usize::MAX));
            for stage in 0..pipeline.stages.len() {
                prop_assert!(graph.producers(stage).iter().all(|producer| place[*producer] < place[stage]));
                let ancestors = graph.ancestors([stage]);
                for (other, is_ancestor) in ancestors.iter().enumerate() {
                    prop_assert_eq!(*is_ancestor, graph.descendants([other])[stage]);
                }
            }
        }
    }
}
