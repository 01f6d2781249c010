//! Putting a by-row stage's tables together: input order, duplicates fanned out, the input's columns joined back.
//!
//! Tables are written in chunks of bounded size: what all rows hold together may be more than an array can.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StructArray, UInt64Array};
use arrow::compute::{interleave, take};
use arrow::datatypes::{DataType, Fields, Schema};

use super::index::{Place, RowError, RowIndex};
use super::segment::{self, RowOutcome, SegmentSchema};
use crate::artifact::{ArtifactError, table};
use crate::digest::Digest;
use crate::store::Store;

/// How many bytes of values a chunk of a table has, but for a single row that has more.
const CHUNK: usize = 64 << 20;

/// Results of the rows that a stage needs, each once.
pub struct Results {
    /// Whether the index named a place where the row is not: it was made for other segments, or is damaged.
    pub misled: bool,
    parts: Vec<RecordBatch>,
    /// Part, and row of it.
    at: HashMap<Digest, (usize, usize)>,
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
        let mut wanted: HashMap<u32, Vec<(usize, Digest)>> = HashMap::new();
        let mut seen = HashSet::new();
        for row in rows.iter().filter(|row| seen.insert(**row)) {
            if let Some(Place { segment, row: place }) = index.find(row) {
                wanted.entry(segment).or_default().push((place as usize, *row));
            }
        }
        let mut results = Self { misled: false, parts: Vec::new(), at: HashMap::new() };
        let mut segments: Vec<_> = wanted.into_iter().collect();
        segments.sort_unstable_by_key(|(segment, _)| *segment);
        for (segment, mut places) in segments {
            let Some(bytes) = store.segment(base, &index.segments[segment as usize]).await? else { continue };
            places.sort_unstable();
            results.add(&segment::decode(bytes)?, &places, schema)?;
        }
        Ok(results)
    }

    /// Takes rows out of a segment; `places` are in order.
    fn add(
        &mut self,
        segment: &[RecordBatch],
        places: &[(usize, Digest)],
        schema: &SegmentSchema,
    ) -> Result<(), ArtifactError> {
        let (mut first, mut places) = (0, places);
        for batch in segment {
            let end = first + batch.num_rows();
            let (here, later) = places.split_at(places.partition_point(|(place, _)| *place < end));
            let here = here.iter().map(|(place, digest)| (place - first, *digest));
            let (here, wrong): (Vec<_>, Vec<_>) = here.partition(|place| is_at(batch, place));
            self.misled |= !wrong.is_empty();
            let rows: UInt64Array = here.iter().map(|(place, _)| *place as u64).collect();
            let part = self.parts.len();
            self.parts.push(take_rows(batch, &rows)?.with_schema(schema.schema.clone()).map_err(contract)?);
            self.at.extend(here.iter().enumerate().map(|(row, (_, digest))| (*digest, (part, row))));
            (first, places) = (end, later);
        }
        self.misled |= !places.is_empty();
        Ok(())
    }

    /// Rows that have no result.
    pub fn missing<'a>(&self, rows: &'a [Digest]) -> Vec<&'a Digest> {
        rows.iter().filter(|row| !self.at.contains_key(row)).collect()
    }

    /// The rejected rows: digest, and why in words.
    pub fn rejections(&self) -> Vec<(Digest, String)> {
        self.parts.iter().flat_map(rejections_of).collect()
    }

    /// Writes the table of each output port to `outputs/PORT.parquet` below a folder. `input` is the table with these rows.
    pub fn write(
        &self,
        input: &Path,
        rows: &[Digest],
        schema: &SegmentSchema,
        folder: &Path,
    ) -> Result<(), ArtifactError> {
        let outputs = folder.join("outputs");
        std::fs::create_dir_all(&outputs).map_err(ArtifactError::io(&outputs))?;
        for (number, (port, fields)) in schema.ports.iter().enumerate() {
            let path = outputs.join(format!("{port}.parquet"));
            self.write_port(table::reader(input)?, rows, number, fields, &path, CHUNK)?;
        }
        Ok(())
    }

    fn write_port(
        &self,
        input: table::Batches,
        rows: &[Digest],
        number: usize,
        fields: &Fields,
        path: &Path,
        limit: usize,
    ) -> Result<(), ArtifactError> {
        let own = input.schema();
        let names = own.fields().iter().map(|field| Arc::new(field.as_ref().clone().with_nullable(true)));
        let joined = Arc::new(Schema::new(names.chain(fields.iter().cloned()).collect::<Vec<_>>()));
        let answers: Vec<_> = self.parts.iter().map(|part| segment::port_items(part.column(4 + number))).collect();
        let mut writer = table::Writer::create(path, &joined)?;
        let mut position = 0;
        for batch in input {
            let batch = batch?;
            let mut chunk = Chunk { schema: &joined, input: &batch, answers: &answers, left: vec![], right: vec![] };
            let mut size = 0;
            for row in 0..batch.num_rows() {
                let digest = rows.get(position + row);
                let Some((part, at)) = digest.and_then(|digest| self.at.get(digest)).copied() else { continue };
                let (start, length) = answers[part].0[at];
                for item in start..start + length {
                    let own = batch.columns().iter().map(|column| value_bytes(column, row)).sum::<usize>();
                    size += own + answers[part].1.columns().iter().map(|c| value_bytes(c, item)).sum::<usize>();
                    if size > limit && !chunk.left.is_empty() {
                        writer.write(&chunk.take()?)?;
                        size = 0;
                    }
                    chunk.left.push(row as u64);
                    chunk.right.push((part, item));
                }
            }
            position += batch.num_rows();
            if !chunk.left.is_empty() {
                writer.write(&chunk.take()?)?;
            }
        }
        writer.close()
    }
}

/// An output column that the input has too would be in the table twice: better said before the first row is done.
pub fn check_columns(input: &Schema, schema: &SegmentSchema) -> Result<(), ArtifactError> {
    for (port, fields) in &schema.ports {
        if let Some(field) = fields.iter().find(|field| input.column_with_name(field.name()).is_some()) {
            return Err(ArtifactError::Contract(format!(
                "output `{port}`: the column `{}` is in the input too, and both would be in the table",
                field.name()
            )));
        }
    }
    Ok(())
}

/// Some rows of a table: each a row of the input beside a row that the program made of it.
struct Chunk<'a> {
    schema: &'a Arc<Schema>,
    input: &'a RecordBatch,
    /// By part: for each of its rows a range, over the items' columns.
    answers: &'a [(Vec<(usize, usize)>, StructArray)],
    left: Vec<u64>,
    right: Vec<(usize, usize)>,
}

impl Chunk<'_> {
    fn take(&mut self) -> Result<RecordBatch, ArtifactError> {
        let left = UInt64Array::from(std::mem::take(&mut self.left));
        let right = std::mem::take(&mut self.right);
        let columns = self.input.columns().iter().map(|column| take(column, &left, None));
        let mut columns: Vec<ArrayRef> = columns.collect::<Result<_, _>>().map_err(contract)?;
        for column in 0..self.schema.fields().len() - columns.len() {
            let parts: Vec<&dyn Array> = self.answers.iter().map(|(_, items)| items.column(column).as_ref()).collect();
            columns.push(interleave(&parts, &right).map_err(contract)?);
        }
        RecordBatch::try_new(self.schema.clone(), columns).map_err(contract)
    }
}

/// About how many bytes a value takes in an array.
fn value_bytes(array: &dyn Array, row: usize) -> usize {
    let items = |values: &ArrayRef, start: usize, end: usize| (start..end).map(|item| value_bytes(values, item)).sum();
    match array.data_type() {
        DataType::Utf8 => array.as_string::<i32>().value_length(row) as usize,
        DataType::LargeUtf8 => array.as_string::<i64>().value_length(row) as usize,
        DataType::Binary => array.as_binary::<i32>().value_length(row) as usize,
        DataType::LargeBinary => array.as_binary::<i64>().value_length(row) as usize,
        DataType::List(_) => {
            let (lists, row) = (array.as_list::<i32>(), row);
            let offsets = lists.value_offsets();
            items(lists.values(), offsets[row] as usize, offsets[row + 1] as usize)
        }
        DataType::LargeList(_) => {
            let lists = array.as_list::<i64>();
            let offsets = lists.value_offsets();
            items(lists.values(), offsets[row] as usize, offsets[row + 1] as usize)
        }
        DataType::Struct(_) => array.as_struct().columns().iter().map(|column| value_bytes(column, row)).sum(),
        // Numbers and times, and what is shared by many rows, as the values of dictionaries and views are.
        _ => 8,
    }
}

fn rejections_of(part: &RecordBatch) -> Vec<(Digest, String)> {
    let digests = part.column(0).as_fixed_size_binary();
    let (reason, detail) = (part.column(2).as_string::<i32>(), part.column(3).as_string::<i32>());
    let why = |row: usize| {
        let texts = [reason, detail].into_iter().filter(|texts| texts.is_valid(row)).map(|texts| texts.value(row));
        texts.collect::<Vec<_>>().join(": ")
    };
    let digest = |row: usize| Digest(digests.value(row).try_into().expect("digests have 32 bytes"));
    let rows = segment::outcomes(part).into_iter().enumerate();
    rows.filter(|(_, outcome)| *outcome == RowOutcome::Rejected).map(|(row, _)| (digest(row), why(row))).collect()
}

/// Whether a row's digest is where the index says.
fn is_at(segment: &RecordBatch, (place, digest): &(usize, Digest)) -> bool {
    let digests = segment.column(0).as_fixed_size_binary_opt();
    digests.is_some_and(|d| *place < d.len() && d.value(*place) == digest.0)
}

fn take_rows(batch: &RecordBatch, rows: &UInt64Array) -> Result<RecordBatch, ArtifactError> {
    let columns: Result<Vec<ArrayRef>, _> = batch.columns().iter().map(|column| take(column, rows, None)).collect();
    RecordBatch::try_new(batch.schema(), columns.map_err(contract)?).map_err(contract)
}

fn contract(error: impl std::fmt::Display) -> ArtifactError {
    ArtifactError::Contract(error.to_string())
}
