//! What the composing stage could not make, as the card tells it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use arrow::array::{Array, AsArray};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use cuda_agent_protocol::ProgramError;

use super::card::cell;
use super::grouped;
use super::table::read_batch;

/// Counts by reason and category.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut(BTreeMap<String, BTreeMap<String, u64>>);

impl LeftOut {
    /// Reads the table.
    pub fn read(path: &Path) -> Result<Self, ProgramError> {
        let batch = read_batch(path)?;
        let column = |name: &str| {
            let column = batch.column_by_name(name).ok_or_else(|| {
                ProgramError::input(format!("left_out has no column `{name}`"))
                    .with_hint("wire it to the output left_out of ops/synthesize")
            })?;
            cast(column, &DataType::Utf8).map_err(|error| ProgramError::input(format!("left_out: `{name}`: {error}")))
        };
        let (categories, reasons) = (column("data_source")?, column("reason")?);
        let text = |column: &dyn Array, row: usize| match column.is_null(row) {
            true => "not recorded".to_owned(),
            false => column.as_string::<i32>().value(row).to_owned(),
        };
        Ok((0..batch.num_rows()).map(|row| (text(&categories, row), text(&reasons, row))).collect())
    }

    /// The section, which is empty where nothing was left out.
    pub fn section(&self) -> String {
        let categories: BTreeSet<&String> = self.0.values().flat_map(BTreeMap::keys).collect();
        let total: u64 = self.0.values().flat_map(BTreeMap::values).sum();
        if total == 0 {
            return String::new();
        }
        let names: String = categories.iter().map(|category| format!(" {} |", cell(category))).collect();
        let mut text = format!(
            "## What could not be made\n\n{} attempts to compose a task came to nothing; another task was made in the \
             place of each where that was possible.\n\n| reason | attempts |{names}\n|---|---:|{}\n",
            grouped(total),
            "---:|".repeat(categories.len())
        );
        for (reason, counts) in &self.0 {
            let _ = write!(text, "| {} | {} |", cell(reason), counts.values().sum::<u64>());
            for category in &categories {
                let _ = write!(text, " {} |", counts.get(*category).copied().unwrap_or(0));
            }
            text.push('\n');
        }
        text
    }
}

impl FromIterator<(String, String)> for LeftOut {
    fn from_iter<T: IntoIterator<Item = (String, String)>>(rows: T) -> Self {
        let mut counts = Self::default();
        for (category, reason) in rows {
            *counts.0.entry(reason).or_default().entry(category).or_default() += 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_counted_by_reason_and_category() {
        let rows = [("torch#1", "too slow"), ("transformers", "too slow"), ("torch#1", "too | fast")];
        let left_out: LeftOut =
            rows.map(|(category, reason)| (category.to_owned(), reason.to_owned())).into_iter().collect();
        let section = left_out.section();
        assert!(section.contains("3 attempts"), "{section}");
        assert!(section.contains("| reason | attempts | torch#1 | transformers |"), "{section}");
        assert!(section.contains("| too slow | 2 | 1 | 1 |"), "{section}");
        assert!(section.contains("| too \\| fast | 1 | 1 | 0 |"), "{section}");
        assert_eq!(LeftOut::default().section(), "");
    }
}
