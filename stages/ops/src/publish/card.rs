//! The dataset card: a README.md with the front matter that the Hugging Face Hub and `datasets` read.
//!
//! Every figure is counted from the rows that are published or quoted from the filters' report; what was not recorded is
//! said not to be known rather than guessed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use arrow::array::{Array, AsArray, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Float64Type, Int64Type};
use serde_json::Value;

use super::columns::explanations;
use super::diversity;
use super::funnel::Report;
use super::grouped;
use super::left_out::LeftOut;
use super::select::{PAPER_ROWS, Quota, Selection, shares};
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
    /// What was asked for.
    pub quota: &'a Quota,
    /// What was chosen.
    pub selection: &'a Selection,
    /// What the filters said.
    pub report: Option<&'a Report>,
    /// What ops/synthesize could not make.
    pub left_out: Option<&'a LeftOut>,
}

/// The category of the classes that are copied from a library.
pub const TRANSFORMERS: &str = "transformers";

impl Card<'_> {
    /// The whole file.
    pub fn text(&self) -> String {
        let sections = [
            self.front_matter(),
            self.introduction(),
            self.categories(),
            diversity::section(self.samples, self.quota, self.selection),
            self.columns(),
            self.filters(),
            self.left_out.map(LeftOut::section).unwrap_or_default(),
            self.circumstances(),
            self.origin(),
            self.licences(),
            self.limits(),
        ];
        sections.into_iter().filter(|section| !section.is_empty()).collect::<Vec<_>>().join("\n")
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
        let rows = self.samples.num_rows();
        let paper: BTreeMap<String, f64> = PAPER_ROWS.map(|(category, rows)| (category.to_owned(), rows)).into();
        let mut text = format!("## Categories\n\n{rows} of {} tasks that passed are published.\n\n", self.considered);
        text +=
            "| `data_source` | rows | share | share in the paper | difference in points |\n|---|---:|---:|---:|---:|\n";
        let shares = shares(strings(self.samples, "data_source").iter().flatten(), &paper);
        for share in &shares {
            let (asked, deviation) = match paper.contains_key(&share.category) {
                true => (format!("{:.2} %", share.asked), format!("{:+.2}", share.deviation())),
                false => ("–".to_owned(), "–".to_owned()),
            };
            let name = cell(&share.category);
            let _ = writeln!(text, "| {name} | {} | {:.2} % | {asked} | {deviation} |", share.rows, share.percent);
        }
        let furthest = shares.iter().max_by(|a, b| a.deviation().abs().total_cmp(&b.deviation().abs()));
        if let Some(furthest) = furthest.filter(|_| rows > 0) {
            let (by, name) = (furthest.deviation().abs(), cell(&furthest.category));
            let _ = write!(text, "\nFurthest from the paper's share is {name}, by {by:.2} percentage points.\n");
        }
        for shortfall in &self.selection.short {
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
            return "## Filters\n\nNo filter report was given to this dataset, so what was checked is not known.\n"
                .to_owned();
        };
        [report.filters(), report.defects(), report.decontamination()].join("\n")
    }

    fn circumstances(&self) -> String {
        let constants = constants(self.measurements);
        let mixed: Vec<String> = ["device", "torch"].iter().filter_map(|name| self.mixture(name)).collect();
        if constants.is_empty() && mixed.is_empty() {
            return "## Measured on\n\nHardware and versions were not recorded.\n".to_owned();
        }
        let mut text = "## Measured on\n".to_owned();
        if !constants.is_empty() {
            text += "\nThe same for every row:\n\n| | |\n|---|---|\n";
        }
        for (name, value) in constants {
            let _ = writeln!(text, "| `{name}` | {} |", cell(&value));
        }
        for line in mixed {
            let _ = write!(text, "\n{line}\n");
        }
        text
    }

    /// The values of a text column that has several, with their counts.
    fn mixture(&self, name: &str) -> Option<String> {
        let column = self.measurements.column_by_name(name)?.as_string_opt::<i32>()?;
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for value in column {
            *counts.entry(value.unwrap_or("not recorded")).or_default() += 1;
        }
        let list: Vec<String> =
            counts.iter().map(|(value, rows)| format!("{} ({} rows)", cell(value), grouped(*rows as u64))).collect();
        (counts.len() > 1).then(|| format!("`{name}` differs: {}.", list.join(", ")))
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
pub fn cell(text: &str) -> String {
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

/// A column of the samples.
pub fn strings<'a>(batch: &'a RecordBatch, name: &str) -> &'a StringArray {
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
