//! Putting a by-row stage's tables together: input order, duplicates fanned out, the input's columns joined back.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, UInt64Array};
use arrow::compute::{concat_batches, take};
use arrow::datatypes::{Field, Schema};

use super::index::{Place, RowError, RowIndex};
use super::segment::{self, RowOutcome, SegmentSchema};
use crate::artifact::ArtifactError;
use crate::digest::Digest;
use crate::store::Store;

/// Results of the rows that a stage needs, each once.
pub struct Results {
    /// Whether the index named a place where the row is not: it was made for other segments, or is damaged.
    pub misled: bool,
    batch: RecordBatch,
    at: HashMap<Digest, u32>,
}

impl Results {
    /// Reads the results of `rows` out of the store. A row without one is left out; see [`Results::missing`].
    pub async fn load(
        store: &Store,
        base: &Digest,
        index: &RowIndex,
        rows: &[Digest],
        schema: &SegmentSchema,
    ) -> Result<Self, RowError> {
        let mut wanted: HashMap<u32, Vec<(u32, Digest)>> = HashMap::new();
        let mut seen = std::collections::HashSet::new();
        for row in rows.iter().filter(|row| seen.insert(**row)) {
            if let Some(Place { segment, row: place }) = index.find(row) {
                wanted.entry(segment).or_default().push((place, *row));
            }
        }
        let empty = RecordBatch::new_empty(schema.schema.clone());
        let mut results = Self { misled: false, batch: empty, at: HashMap::new() };
        let mut parts = Vec::new();
        let mut segments: Vec<_> = wanted.into_iter().collect();
        segments.sort_unstable_by_key(|(segment, _)| *segment);
        let mut count = 0;
        for (segment, places) in segments {
            let Some(bytes) = store.segment(base, &index.segments[segment as usize]).await? else { continue };
            let batches = segment::decode(bytes)?;
            let Some(first) = batches.first() else { continue };
            let whole = concat_batches(&first.schema(), &batches).map_err(contract)?;
            let (places, wrong): (Vec<_>, Vec<_>) = places.into_iter().partition(|place| is_at(&whole, place));
            results.misled |= !wrong.is_empty();
            let rows: UInt64Array = places.iter().map(|(place, _)| u64::from(*place)).collect();
            parts.push(take_rows(&whole, &rows)?.with_schema(schema.schema.clone()).map_err(contract)?);
            for (_, digest) in places {
                results.at.insert(digest, count);
                count += 1;
            }
        }
        results.batch = concat_batches(&schema.schema, &parts).map_err(contract)?;
        Ok(results)
    }

    /// Rows that have no result.
    pub fn missing<'a>(&self, rows: &'a [Digest]) -> Vec<&'a Digest> {
        rows.iter().filter(|row| !self.at.contains_key(row)).collect()
    }

    /// The rejected rows: digest, and why in words.
    pub fn rejections(&self) -> Vec<(Digest, String)> {
        let text = |column: usize, row: usize| {
            let column = self.batch.column(column).as_string::<i32>();
            column.is_valid(row).then(|| column.value(row).to_owned())
        };
        let outcomes = segment::outcomes(&self.batch).into_iter().enumerate();
        let rejected = outcomes.filter(|(_, outcome)| *outcome == RowOutcome::Rejected).map(|(row, _)| row);
        let digest = |row: usize| {
            let digests = self.batch.column(0).as_fixed_size_binary();
            Digest(digests.value(row).try_into().expect("digests have 32 bytes"))
        };
        let why = |row| [text(2, row), text(3, row)].into_iter().flatten().collect::<Vec<_>>().join(": ");
        rejected.map(|row| (digest(row), why(row))).collect()
    }

    /// The table of each output port.
    pub fn assemble(
        &self,
        input: &RecordBatch,
        rows: &[Digest],
        schema: &SegmentSchema,
    ) -> Result<Vec<(String, RecordBatch)>, ArtifactError> {
        let mut tables = Vec::new();
        for (number, (port, fields)) in schema.ports.iter().enumerate() {
            let (ranges, items) = segment::port_items(self.batch.column(4 + number));
            let (mut left, mut right) = (Vec::new(), Vec::new());
            for (position, digest) in rows.iter().enumerate() {
                let Some(at) = self.at.get(digest) else { continue };
                let (start, length) = ranges[*at as usize];
                for item in start..start + length {
                    left.push(position as u64);
                    right.push(item as u64);
                }
            }
            let (left, right) = (UInt64Array::from(left), UInt64Array::from(right));
            let mut columns: Vec<ArrayRef> = Vec::new();
            let mut names: Vec<Arc<Field>> = Vec::new();
            for (field, column) in input.schema().fields().iter().zip(input.columns()) {
                columns.push(take(column, &left, None).map_err(contract)?);
                names.push(Arc::new(field.as_ref().clone().with_nullable(true)));
            }
            for (field, column) in fields.iter().zip(items.columns()) {
                if input.schema().column_with_name(field.name()).is_some() {
                    return Err(ArtifactError::Contract(format!(
                        "output `{port}`: the column `{}` is in the input too, and both would be in the table",
                        field.name()
                    )));
                }
                columns.push(take(column, &right, None).map_err(contract)?);
                names.push(field.clone());
            }
            let table = RecordBatch::try_new(Arc::new(Schema::new(names)), columns).map_err(contract)?;
            tables.push((port.clone(), table));
        }
        Ok(tables)
    }
}

/// Whether a row's digest is where the index says.
fn is_at(segment: &RecordBatch, (place, digest): &(u32, Digest)) -> bool {
    let digests = segment.column(0).as_fixed_size_binary_opt();
    digests.is_some_and(|d| (*place as usize) < d.len() && d.value(*place as usize) == digest.0)
}

fn take_rows(batch: &RecordBatch, rows: &UInt64Array) -> Result<RecordBatch, ArtifactError> {
    let columns: Result<Vec<ArrayRef>, _> = batch.columns().iter().map(|column| take(column, rows, None)).collect();
    RecordBatch::try_new(batch.schema(), columns.map_err(contract)?).map_err(contract)
}

fn contract(error: impl std::fmt::Display) -> ArtifactError {
    ArtifactError::Contract(error.to_string())
}
