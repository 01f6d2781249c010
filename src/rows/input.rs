//! The rows of a by-row stage's input: their digests, what programs get of them, and how messages name them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use arrow::array::ArrayRef;
use arrow::datatypes::Schema;
use serde_json::{Map, Value};

use crate::artifact::{ArtifactError, json, table};
use crate::digest::Digest;

/// How many values of a row a message has.
const VALUES: usize = 4;
/// How many characters of each.
const LETTERS: usize = 40;

/// The rows of a table, as far as a by-row program gets them.
pub struct InputRows {
    /// The Parquet file.
    pub path: PathBuf,
    /// All its columns.
    pub schema: Arc<Schema>,
    /// Digest of each row over the columns that the program gets, in order.
    pub digests: Vec<Digest>,
    /// By batch: its first row, and the columns that the program gets, ready for JSON.
    batches: Vec<(usize, Vec<(String, ArrayRef)>)>,
    places: OnceLock<HashMap<Digest, usize>>,
}

impl InputRows {
    /// Reads a table; the program gets the columns of these names.
    pub fn read(path: &Path, names: &[String]) -> Result<Self, ArtifactError> {
        let reader = table::reader(path)?;
        let (schema, mut digests, mut batches) = (reader.schema(), Vec::new(), Vec::new());
        for batch in reader {
            let batch = batch?;
            batches.push((digests.len(), table::columns_of(&batch, names)?));
            digests.extend(table::batch_digests(&batch, names)?);
        }
        Ok(Self { path: path.to_owned(), schema, digests, batches, places: OnceLock::new() })
    }

    /// The values that the program gets.
    pub fn values(&self, row: usize) -> Map<String, Value> {
        let batch = self.batches.partition_point(|(first, _)| *first <= row) - 1;
        let (first, columns) = &self.batches[batch];
        columns.iter().map(|(name, array)| (name.clone(), json::value_at(array, row - first))).collect()
    }

    /// The first row with a digest.
    pub fn position(&self, digest: &Digest) -> Option<usize> {
        let places = self.places.get_or_init(|| {
            let rows = self.digests.iter().enumerate().rev();
            rows.map(|(row, digest)| (*digest, row)).collect()
        });
        places.get(digest).copied()
    }

    /// A row by its number, from 0 as `show` counts, and its values: `row 7 (id=7, text="a b")`.
    pub fn named(&self, row: usize) -> String {
        let values = self.values(row);
        let mut shown: Vec<String> =
            values.iter().take(VALUES).map(|(name, value)| format!("{name}={}", short(value))).collect();
        if values.len() > VALUES {
            shown.push("…".into());
        }
        format!("row {row} ({})", shown.join(", "))
    }

    /// The row with a digest, as messages name it; what has no row here is named by its digest.
    pub fn named_by(&self, digest: &str) -> String {
        let row = digest.parse::<Digest>().ok().and_then(|digest| self.position(&digest));
        row.map_or_else(|| format!("row {digest}"), |row| self.named(row))
    }
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(LETTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::{Int64Array, RecordBatch, StringArray};

    #[test]
    fn rows_are_named_by_number_and_values() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        let numbers = Int64Array::from_iter_values((0..10_000).map(|n| n % 5000));
        let texts = StringArray::from_iter_values((0..10_000).map(|n| "x".repeat(n % 50)));
        let columns = [("n", Arc::new(numbers) as ArrayRef), ("t", Arc::new(texts) as ArrayRef)];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        table::write(&path, &batch.schema(), &[batch]).unwrap();
        let rows = InputRows::read(&path, &["n".into(), "t".into()]).unwrap();
        assert_eq!(rows.named(3), "row 3 (n=3, t=\"xxx\")");
        assert_eq!(rows.named(9049), format!("row 9049 (n=4049, t=\"{}…)", "x".repeat(39)));
        let digest = rows.digests[9049];
        assert_eq!(rows.position(&digest), Some(4049), "the first of two");
        assert!(rows.named_by(&digest.to_string()).starts_with("row 4049 (n=4049, "));
        assert_eq!(rows.named_by("ab"), "row ab");
    }

    /// Each of many rejected rows is looked up, so none may walk the list of all rows.
    #[test]
    fn the_list_of_rows_is_walked_once_however_many_are_looked_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        table::write(&path, &ids(100).schema(), &[ids(100)]).unwrap();
        let mut rows = InputRows::read(&path, &["n".into()]).unwrap();
        let digests = rows.digests.clone();
        assert_eq!(rows.position(&digests[50]), Some(50));
        rows.digests.clear();
        for (row, digest) in digests.iter().enumerate() {
            assert_eq!(rows.position(digest), Some(row), "it was learned in the first walk");
        }
    }

    fn ids(count: i64) -> RecordBatch {
        RecordBatch::try_from_iter([("n", Arc::new(Int64Array::from_iter_values(0..count)) as ArrayRef)]).unwrap()
    }

    #[test]
    fn a_message_has_four_values_of_a_row() {
        let folder = tempfile::tempdir().unwrap();
        let named = |names: &[&str]| {
            let path = folder.path().join("t.parquet");
            let number = |value| Arc::new(Int64Array::from(vec![value])) as ArrayRef;
            let batch = RecordBatch::try_from_iter(names.iter().zip(1..).map(|(name, n)| (*name, number(n)))).unwrap();
            table::write(&path, &batch.schema(), &[batch]).unwrap();
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            InputRows::read(&path, &names).unwrap().named(0)
        };
        assert_eq!(named(&["a", "b", "c", "d"]), "row 0 (a=1, b=2, c=3, d=4)");
        assert_eq!(named(&["a", "b", "c", "d", "e"]), "row 0 (a=1, b=2, c=3, d=4, …)");
    }
}
