//! The dataset card: a README.md with the front matter that the Hugging Face Hub and `datasets` read.
//!
//! Every figure is counted from the rows that are published or quoted from the report of `ops/filter`; what was not
//! recorded is said not to be known rather than guessed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use arrow::array::{Array, AsArray, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Float64Type, Int64Type};
use cuda_agent_protocol::ProgramError;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::columns::explanations;
use super::select::{PAPER_ROWS, Shortfall};
use super::table::RELEASED;

/// What a card is written from.
pub struct Card<'a> {
    /// Heading.
    pub title: &'a str,
    /// As the Hub abbreviates it.
    pub licence: &'a str,
    /// The released columns.
    pub samples: &'a RecordBatch,
    /// The further columns of the same rows.
    pub measurements: &'a RecordBatch,
    /// Bytes of the samples' Parquet file.
    pub download_size: usize,
    /// Rows that there were to choose from.
    pub considered: usize,
    /// Categories that could not fill their share.
    pub short: &'a [Shortfall],
    /// What ops/filter said.
    pub report: Option<&'a Report>,
}

/// What `ops/filter` reports: its `funnel.json`, with the fields that a card quotes.
#[derive(Clone, Debug, Deserialize)]
pub struct Report {
    total_in: u64,
    total_kept: u64,
    rules: Vec<Rule>,
    /// Programs that the tasks were compared with.
    #[serde(default)]
    references: u64,
}

/// A rule of the filter.
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

/// The rule that compares tasks with a benchmark's, which means nothing without one.
const DECONTAMINATION: &str = "contaminated";

/// The category of the classes that are copied from a library.
const TRANSFORMERS: &str = "transformers";

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
        rule.applied && (rule.name != DECONTAMINATION || self.references > 0)
    }

    fn decontaminated(&self) -> bool {
        self.rules.iter().any(|rule| rule.name == DECONTAMINATION && self.is_applied(rule))
    }
}

impl Card<'_> {
    /// The whole file.
    pub fn text(&self) -> String {
        let sections = [
            self.front_matter(),
            self.introduction(),
            self.categories(),
            self.columns(),
            self.filters(),
            self.circumstances(),
            self.origin(),
            self.licences(),
            self.limits(),
        ];
        sections.join("\n")
    }

    fn front_matter(&self) -> String {
        let rows = self.samples.num_rows();
        let mut features = String::new();
        for name in RELEASED {
            let _ = write!(features, "  - name: {name}\n    dtype: string\n");
        }
        format!(
            "---\n\
             license: {licence}\n\
             pretty_name: {title}\n\
             task_categories:\n- text-generation\n\
             tags:\n- code\n- cuda\n- pytorch\n\
             size_categories:\n- {size}\n\
             configs:\n\
             - config_name: default\n  default: true\n  data_files:\n  - split: train\n    path: data/train-*.parquet\n\
             - config_name: measurements\n  data_files:\n  - split: train\n    path: measurements/train-*.parquet\n\
             dataset_info:\n\
             - config_name: default\n  features:\n{features}  \
             splits:\n  - name: train\n    num_bytes: {bytes}\n    num_examples: {rows}\n  \
             download_size: {download}\n  dataset_size: {bytes}\n\
             ---\n",
            licence = quoted(self.licence),
            title = quoted(self.title),
            size = size_category(rows),
            bytes = text_bytes(self.samples),
            download = self.download_size,
        )
    }

    fn introduction(&self) -> String {
        let rows = self.samples.num_rows();
        let title = self.title;
        format!(
            "# {title}\n\n\
             {rows} reference problems for writing CUDA kernels: each is a Python file with a PyTorch module to be made \
             faster. The data is synthesised by the recipe of the paper *CUDA Agent: Large-Scale Agentic RL for \
             High-Performance CUDA Kernel Generation* (arXiv 2602.24286): operators crawled from the installed `torch` \
             and `transformers` libraries, up to five torch operators stacked in sequence, transformers classes as they \
             are, each problem executed and filtered. It has the columns of the released set, but none of its rows.\n\n\
             ```python\n\
             from datasets import load_dataset\n\
             tasks = load_dataset(\"path/to/this/folder\", split=\"train\")\n\
             measurements = load_dataset(\"path/to/this/folder\", \"measurements\", split=\"train\")  # the same rows\n\
             ```\n"
        )
    }

    fn categories(&self) -> String {
        let mut counts: BTreeMap<&str, usize> = PAPER_ROWS.iter().map(|(category, _)| (*category, 0)).collect();
        for category in strings(self.samples, "data_source").iter().flatten() {
            *counts.entry(category).or_default() += 1;
        }
        let rows = self.samples.num_rows();
        let mut text = format!("## Categories\n\n{rows} of {} tasks that passed are published.\n\n", self.considered);
        text += "| `data_source` | rows | share | share in the paper |\n|---|---:|---:|---:|\n";
        for (category, count) in counts {
            let paper = PAPER_ROWS.iter().find(|(name, _)| *name == category);
            let paper = paper.map_or("–".to_owned(), |(_, rows)| format!("{:.2} %", rows / 60.0));
            let share = 100.0 * count as f64 / rows.max(1) as f64;
            let _ = writeln!(text, "| {} | {count} | {share:.2} % | {paper} |", cell(category));
        }
        for shortfall in self.short {
            let _ = write!(text, "\n{}.\n", cell(&shortfall.to_string()));
        }
        text
    }

    fn columns(&self) -> String {
        let mut text = "## Columns\n\n\
             | column | content |\n|---|---|\n\
             | `ops` | the operators, a JSON list as text |\n\
             | `data_source` | the category: `torch#N` for N stacked operators, or `transformers` |\n\
             | `code` | a Python file: `class Model(nn.Module)`, `get_inputs()`, `get_init_inputs()` |\n\n\
             The configuration `measurements` has in row i what is known of row i of the default one:\n\n\
             | column | content |\n|---|---|\n"
            .to_owned();
        let explanations = explanations();
        for field in self.measurements.schema().fields() {
            let explanation = explanations.get(field.name()).map_or("–", String::as_str);
            let _ = writeln!(text, "| `{}` | {} |", cell(field.name()), cell(explanation));
        }
        let figures = figures(self.measurements);
        if !figures.is_empty() {
            let _ = write!(text, "\n| time in milliseconds | least | median | most |\n|---|---:|---:|---:|\n{figures}");
            text += &self.timing();
        }
        text
    }

    /// How a time was taken, as far as the rows say.
    fn timing(&self) -> String {
        let (trials, threads) = (self.range("eager_trials"), self.range("threads"));
        let Some(trials) = trials else { return String::new() };
        let on = threads.map_or(String::new(), |threads| {
            format!(", on {threads} CPU thread{}", if threads == "1" { "" } else { "s" })
        });
        format!(
            "\n`eager_ms` and `compiled_ms` are medians over the forwards of a task that were timed: {trials} in eager \
             mode{on}.\n"
        )
    }

    /// The values of a column of whole numbers: `20`, or `3 to 20`.
    fn range(&self, name: &str) -> Option<String> {
        let column = self.measurements.column_by_name(name)?.as_primitive_opt::<Int64Type>()?;
        let (least, most) = (column.iter().flatten().min()?, column.iter().flatten().max()?);
        Some(if least == most { least.to_string() } else { format!("{least} to {most}") })
    }

    fn filters(&self) -> String {
        let Some(report) = self.report else {
            return "## Filters\n\nNo filter report was given to this dataset.\n".to_owned();
        };
        let (applied, others): (Vec<&Rule>, Vec<&Rule>) = report.rules.iter().partition(|rule| report.is_applied(rule));
        let mut text = format!(
            "## Filters\n\n{} of {} measured tasks passed. Each of the others is counted at the first rule that it \
             fails.\n\n| rule | why | limits | rejected |\n|---|---|---|---:|\n",
            report.total_kept, report.total_in
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

    fn circumstances(&self) -> String {
        let constants = constants(self.measurements);
        if constants.is_empty() {
            return "## Measured on\n\nHardware and versions were not recorded.\n".to_owned();
        }
        let mut text = "## Measured on\n\nThe same for every row:\n\n| | |\n|---|---|\n".to_owned();
        for (name, value) in constants {
            let _ = writeln!(text, "| `{name}` | {} |", cell(&value));
        }
        text
    }

    /// What it takes to make the set again.
    fn origin(&self) -> String {
        let mut versions = Vec::new();
        if let Some((_, torch)) = constants(self.measurements).into_iter().find(|(name, _)| name == "torch") {
            versions.push(format!("torch {torch}"));
        }
        versions.extend(self.transformers_versions().into_iter().map(|version| format!("transformers {version}")));
        let with = if versions.is_empty() { String::new() } else { format!(", made with {}", versions.join(" and ")) };
        format!(
            "## Making it again\n\nThe set is the result of a `cuda-agent` pipeline{with}. In the project that made it, \
             `cuda-agent explain STAGE` lists all that counted in it, of this stage and of each one before it: \
             parameters, versions of the stages, packages and the device; `cuda-agent run` with the same makes the \
             same tasks. Measured times vary, and tasks near a limit of a filter with them.\n"
        )
    }

    /// Versions of the library that the headers of its classes name.
    fn transformers_versions(&self) -> BTreeSet<&str> {
        let code = strings(self.samples, "code").iter().flatten();
        let headers = code.flat_map(|code| code.lines().take_while(|line| line.starts_with('#')));
        headers.filter_map(|line| Some(line.rsplit_once(" of transformers ")?.1.trim_end_matches('.'))).collect()
    }

    fn licences(&self) -> String {
        let mut text = format!("## Licence\n\nThe dataset is published under {}.\n", cell(self.licence));
        let categories = strings(self.samples, "data_source");
        let copied = categories.iter().flatten().filter(|category| *category == TRANSFORMERS).count();
        if copied > 0 {
            let _ = write!(
                text,
                "\nThe code of rows with `data_source` {TRANSFORMERS} is not: it is taken from the \
                 transformers library, copyright the HuggingFace team and the authors named there, and stays under the \
                 Apache License, Version 2.0 (Apache-2.0). The header of each names its file and says what was changed.\n"
            );
        }
        text
    }

    fn limits(&self) -> String {
        let decontaminated = self.report.is_some_and(Report::decontaminated);
        let mut text = "## Known limits\n\n\
             - Times belong to the device that they were measured on; on another one a task may leave the time range it was filtered by.\n\
             - The problems are synthetic: they are not the paper's 6,000, whose operator lists, prompts and seeds are \
             not public.\n\
             - Weights are initialised at random by the module's own rules; no pretrained weight is used.\n"
            .to_owned();
        if !decontaminated {
            text += "- Not decontaminated: no benchmark was given to compare with, so a task may resemble one of \
                     KernelBench.\n";
        }
        text
    }
}

/// Text as a YAML scalar. JSON's quoting is YAML's.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let starts_well = text.starts_with(|c: char| c.is_ascii_alphabetic());
    let is_word = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"].contains(&text.to_lowercase().as_str());
    if starts_well && text.chars().all(plain) && !is_word { text.to_owned() } else { Value::from(text).to_string() }
}

/// Text as the cell of a Markdown table.
fn cell(text: &str) -> String {
    text.replace('\\', "\\\\").replace('|', "\\|").replace(['\n', '\r'], " ").replace('<', "&lt;")
}

fn size_category(rows: usize) -> &'static str {
    match rows {
        0..1_000 => "n<1K",
        1_000..10_000 => "1K<n<10K",
        10_000..100_000 => "10K<n<100K",
        _ => "100K<n<1M",
    }
}

fn strings<'a>(batch: &'a RecordBatch, name: &str) -> &'a StringArray {
    batch.column_by_name(name).expect("samples have the released columns").as_string()
}

/// What `datasets` counts: the text, and an offset of four bytes each.
fn text_bytes(samples: &RecordBatch) -> usize {
    let column = |name: &&str| strings(samples, name).iter().flatten().map(|value| value.len() + 4).sum::<usize>();
    RELEASED.iter().map(column).sum()
}

/// Least, median and most of every time in milliseconds: what readers choose tasks by. The other columns are theirs to
/// look at.
fn figures(batch: &RecordBatch) -> String {
    let mut text = String::new();
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        if field.data_type() != &DataType::Float64 || !field.name().ends_with("_ms") {
            continue;
        }
        let mut values: Vec<f64> = column.as_primitive::<Float64Type>().iter().flatten().collect();
        values.retain(|value| value.is_finite());
        values.sort_by(f64::total_cmp);
        if let (Some(least), Some(most)) = (values.first(), values.last()) {
            let median = values[values.len() / 2];
            let _ = writeln!(text, "| `{}` | {} | {} | {} |", field.name(), short(*least), short(median), short(*most));
        }
    }
    text
}

/// Four significant digits.
fn short(value: f64) -> String {
    if value != 0.0 && !(1e-3..1e6).contains(&value.abs()) {
        return format!("{value:.3e}");
    }
    let digits = if value == 0.0 { 0 } else { (3 - value.abs().log10().floor() as i32).max(0) as usize };
    format!("{value:.digits$}")
}

/// Text columns with one value in every row: device, versions, and whatever else was the same throughout.
fn constants(batch: &RecordBatch) -> Vec<(String, String)> {
    let mut constants = Vec::new();
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        if field.data_type() != &DataType::Utf8 || field.name() == "data_source" || column.null_count() > 0 {
            continue;
        }
        let values = column.as_string::<i32>();
        if let Some(Some(first)) = values.iter().next()
            && values.iter().all(|value| value == Some(first))
        {
            constants.push((field.name().clone(), first.to_owned()));
        }
    }
    constants
}
