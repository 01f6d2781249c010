//! What the filters report, and what a card says of it: which rules were applied, what they rejected, and which defects
//! of the released set each is against.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use cuda_agent_protocol::ProgramError;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::card::cell;
use super::grouped;

/// What `ops/filter` and the stages after it report: their `funnel.json`, with the fields that a card quotes.
#[derive(Clone, Debug, Deserialize)]
pub struct Report {
    /// Tasks that were measured.
    pub total_in: u64,
    total_kept: u64,
    rules: Vec<Rule>,
    /// Programs that the tasks were compared with.
    #[serde(default)]
    references: u64,
}

/// A rule of a filter.
#[derive(Clone, Debug, Deserialize)]
struct Rule {
    name: String,
    reason: String,
    applied: bool,
    /// Why not, where it was not.
    #[serde(default)]
    not_applied_because: Option<String>,
    #[serde(default)]
    params: Map<String, Value>,
    rejected: u64,
}

/// The rules that compare tasks with a benchmark's, which mean nothing without one.
const DECONTAMINATION: [&str; 3] = ["contaminated", "contaminated_signature", "contaminated_graph"];

/// A kind of defect that audits found in CUDA-Agent-Ops-6K or that a verdict can't stand.
struct Defect {
    name: &'static str,
    /// Rows of the released set that have it, where an audit counted them.
    released: &'static str,
    /// The rules that are against it.
    rules: &'static [&'static str],
}

/// Each with the rules against it.
const DEFECTS: [Defect; 18] = [
    Defect { name: "byte-identical duplicate", released: "352", rules: &["duplicate"] },
    Defect { name: "semantic duplicate", released: "437", rules: &["semantic_duplicate", "graph_duplicate"] },
    Defect { name: "declared operator that the code doesn't use", released: "550", rules: &["declared_operators"] },
    Defect { name: "unused module", released: "143", rules: &["used_modules"] },
    Defect { name: "unused argument of forward", released: "49", rules: &["used_arguments"] },
    Defect { name: "dead computation", released: "45", rules: &["live_computation"] },
    Defect {
        name: "a global where an argument was meant",
        released: "37",
        rules: &["self_contained", "no_literal_sizes"],
    },
    Defect { name: "random forward", released: "10", rules: &["no_randomness"] },
    Defect { name: "insensitive to an argument", released: "70", rules: &["sensitive"] },
    Defect { name: "low activity", released: "37", rules: &["sensitive", "active"] },
    Defect { name: "output not finite", released: "26", rules: &["finite"] },
    Defect {
        name: "fails, or out of memory",
        released: "17",
        rules: &["executes_eager", "executes_compiled", "enough_memory", "enough_time"],
    },
    Defect { name: "fixed inputs", released: "13", rules: &["varied_inputs"] },
    Defect { name: "unstable", released: "6", rules: &["deterministic", "stable"] },
    Defect { name: "independent of its input", released: "2", rules: &["not_constant", "distinguishable"] },
    Defect { name: "train and eval mode differ", released: "444", rules: &["modes_agree"] },
    Defect { name: "like a problem of KernelBench", released: "174 by signature", rules: &DECONTAMINATION },
    Defect { name: "accepts a degenerate answer", released: "–", rules: &["degenerate"] },
];

impl Report {
    /// Reads it out of a report's folder, where it is there.
    pub fn read(folder: &Path) -> Result<Option<Self>, ProgramError> {
        let path = folder.join("funnel.json");
        let complain = |error: &dyn std::fmt::Display| ProgramError::input(format!("{}: {error}", path.display()));
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| complain(&error)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(complain(&error)),
        }
    }

    fn is_applied(&self, rule: &Rule) -> bool {
        rule.applied && (self.references > 0 || !DECONTAMINATION.contains(&rule.name.as_str()))
    }

    /// Whether tasks were compared with a benchmark's.
    pub fn decontaminated(&self) -> bool {
        self.rules.iter().any(|rule| DECONTAMINATION.contains(&rule.name.as_str()) && self.is_applied(rule))
    }

    /// The section on filters.
    pub fn filters(&self) -> String {
        let (applied, others): (Vec<&Rule>, Vec<&Rule>) = self.rules.iter().partition(|rule| self.is_applied(rule));
        let mut text = format!(
            "## Filters\n\n{} of {} measured tasks passed. Each of the others is counted at the first rule that it \
             fails.\n\n| rule | why | limits | rejected |\n|---|---|---|---:|\n",
            self.total_kept, self.total_in
        );
        for Rule { name, reason, params, rejected, .. } in applied {
            let limits: Vec<String> = params.iter().map(|(name, value)| format!("{name} {value}")).collect();
            let _ = writeln!(text, "| {} | {} | {} | {rejected} |", cell(name), cell(reason), cell(&limits.join(", ")));
        }
        if !others.is_empty() {
            let described = |rule: &&Rule| match &rule.not_applied_because {
                Some(reason) => format!("{} ({reason})", rule.name),
                None => rule.name.clone(),
            };
            let names: Vec<String> = others.iter().map(described).collect();
            let _ = write!(text, "\nNot applied: {}.\n", names.join(", "));
        }
        text
    }

    /// The section on the defects of the released set.
    pub fn defects(&self) -> String {
        let rules: BTreeMap<&str, &Rule> =
            self.rules.iter().filter(|rule| self.is_applied(rule)).map(|rule| (rule.name.as_str(), rule)).collect();
        let mut text = "## Known defects of the released set, and where each is checked\n\n\
            Independent audits counted these in the 6,000 rows of CUDA-Agent-Ops-6K. A task with one is not in this set \
            where a rule against it was applied.\n\n\
            | defect | rows there | rules here | rejected by them |\n|---|---:|---|---:|\n"
            .to_owned();
        for Defect { name, released, rules: against } in DEFECTS {
            let applied: Vec<&&Rule> = against.iter().filter_map(|rule| rules.get(rule)).collect();
            let names: Vec<String> = applied.iter().map(|rule| format!("`{}`", cell(&rule.name))).collect();
            let rejected: u64 = applied.iter().map(|rule| rule.rejected).sum();
            let _ = match names.is_empty() {
                true => writeln!(text, "| {name} | {released} | not checked | – |"),
                false => writeln!(text, "| {name} | {released} | {} | {rejected} |", names.join(", ")),
            };
        }
        text
    }

    /// What is to be said on decontamination.
    pub fn decontamination(&self) -> String {
        let rules = self.rules.iter().filter(|rule| DECONTAMINATION.contains(&rule.name.as_str()));
        let applied: Vec<String> = rules
            .filter(|rule| self.is_applied(rule))
            .map(|rule| {
                let limits: Vec<String> = rule.params.iter().map(|(name, value)| format!("{name} {value}")).collect();
                let limits = if limits.is_empty() { String::new() } else { format!(" ({})", limits.join(", ")) };
                format!("- `{}`{}: {} {} rejected.", rule.name, limits, cell(&rule.reason), grouped(rule.rejected))
            })
            .collect();
        if applied.is_empty() {
            return "## Decontamination\n\nNone: no benchmark was given to compare with, so a task may resemble one of \
                    KernelBench.\n"
                .to_owned();
        }
        format!(
            "## Decontamination\n\nEach task was compared with {} reference programs, and left out where it is too \
             much like one:\n\n{}\n",
            grouped(self.references),
            applied.join("\n")
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_rule_against_a_defect_is_one_of_a_filter() {
        let manifests = [include_str!("../../filter/stage.yaml"), include_str!("../../screen/stage.yaml")];
        let choices = |manifest: &'static str| {
            let skip = manifest.split("\n  skip:").nth(1).expect("a filter has the parameter skip");
            let list = skip.split("choices:").nth(1).and_then(|rest| rest.split('[').nth(1)?.split(']').next());
            list.expect("skip has choices").split(',').map(str::trim)
        };
        let names: BTreeSet<&str> = manifests.into_iter().flat_map(choices).collect();
        for Defect { name, rules, .. } in DEFECTS {
            for rule in rules {
                assert!(names.contains(rule), "{name}: there is no rule {rule}");
            }
        }
    }
}
