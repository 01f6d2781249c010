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
            let input = table::reader(input)?;
            let joined = joined(&input.schema(), fields);
            let mut writer = table::Writer::create(&outputs.join(format!("{port}.parquet")), &joined)?;
            self.join(input, rows, number, &joined, CHUNK, |chunk| writer.write(&chunk))?;
            writer.close()?;
        }
        Ok(())
    }

    /// Hands over a port's table, in chunks of at most `limit` bytes of values, but for a single row that has more.
    fn join(
        &self,
        input: impl Iterator<Item = Result<RecordBatch, ArtifactError>>,
        rows: &[Digest],
        number: usize,
        joined: &Arc<Schema>,
        limit: usize,
        mut write: impl FnMut(RecordBatch) -> Result<(), ArtifactError>,
    ) -> Result<(), ArtifactError> {
        let answers: Vec<_> = self.parts.iter().map(|part| segment::port_items(part.column(4 + number))).collect();
        let mut position = 0;
        for batch in input {
            let batch = batch?;
            let mut chunk = Chunk { schema: joined, input: &batch, answers: &answers, left: vec![], right: vec![] };
            let mut size = 0;
            for row in 0..batch.num_rows() {
                let digest = rows.get(position + row);
                let Some((part, at)) = digest.and_then(|digest| self.at.get(digest)).copied() else { continue };
                let (start, length) = answers[part].0[at];
                let own = batch.columns().iter().map(|column| value_bytes(column, row)).sum::<usize>();
                for item in start..start + length {
                    let bytes = own + answers[part].1.columns().iter().map(|c| value_bytes(c, item)).sum::<usize>();
                    if size + bytes > limit && !chunk.left.is_empty() {
                        write(chunk.take()?)?;
                        size = 0;
                    }
                    size += bytes;
                    chunk.left.push(row as u64);
                    chunk.right.push((part, item));
                }
            }
            position += batch.num_rows();
            if !chunk.left.is_empty() {
                write(chunk.take()?)?;
            }
        }
        Ok(())
    }
}

/// The columns of an output table: those of the input, and those that the program makes.
fn joined(input: &Schema, made: &Fields) -> Arc<Schema> {
    let own = input.fields().iter().map(|field| Arc::new(field.as_ref().clone().with_nullable(true)));
    Arc::new(Schema::new(own.chain(made.iter().cloned()).collect::<Vec<_>>()))
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

/// Whether a row's digest is where the index says, which is a place in this segment.
fn is_at(segment: &RecordBatch, (place, digest): &(usize, Digest)) -> bool {
    let digests = segment.column(0).as_fixed_size_binary_opt();
    digests.is_some_and(|digests| digests.value(*place) == digest.0)
}

fn take_rows(batch: &RecordBatch, rows: &UInt64Array) -> Result<RecordBatch, ArtifactError> {
    let columns: Result<Vec<ArrayRef>, _> = batch.columns().iter().map(|column| take(column, rows, None)).collect();
    RecordBatch::try_new(batch.schema(), columns.map_err(contract)?).map_err(contract)
}

fn contract(error: impl std::fmt::Display) -> ArtifactError {
    ArtifactError::Contract(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::RowIndex;
    use arrow::array::{
        BinaryArray, Int64Array, LargeBinaryArray, LargeListArray, LargeStringArray, ListArray, StringArray,
    };
    use arrow::datatypes::{Field, Int64Type};
    use cuda_agent_protocol::{RowResult, RowStatus};
    use serde_json::json;

    fn schema() -> SegmentSchema {
        let manifest = json!({
            "name": "lab/rows", "version": "1.0.0", "summary": "Works on rows.", "run": ["x"],
            "inputs": { "rows": { "type": "table", "columns": { "id": "int64" } } },
            "outputs": {
                "notes": { "type": "table", "columns": [{ "name": "note", "type": "int64" }] },
                "rows": { "type": "table", "columns": [{ "name": "made", "type": "int64" }] },
            },
            "by_row": { "port": "rows" },
        });
        SegmentSchema::new(&serde_json::from_value(manifest).expect("a manifest reads back"))
    }

    fn digest(id: i64) -> Digest {
        Digest::of_bytes(&id.to_le_bytes())
    }

    fn done(id: i64, made: &[i64]) -> RowResult {
        let item = |value: &i64| json!({ "made": value }).as_object().unwrap().clone();
        let note = json!({ "note": made.len() }).as_object().unwrap().clone();
        let outputs = [("rows".to_owned(), made.iter().map(item).collect()), ("notes".to_owned(), vec![note])].into();
        RowResult { row: digest(id).to_string(), status: RowStatus::Done, reason: None, detail: None, outputs }
    }

    fn rejected(id: i64, reason: &str, detail: Option<&str>) -> RowResult {
        let detail = detail.map(str::to_owned);
        let outputs = Default::default();
        RowResult { status: RowStatus::Rejected, reason: Some(reason.into()), detail, outputs, ..done(id, &[]) }
    }

    fn batch(ids: &[i64]) -> RecordBatch {
        RecordBatch::try_from_iter([("id", Arc::new(Int64Array::from(ids.to_vec())) as ArrayRef)]).unwrap()
    }

    /// The results of these rows, from a segment each.
    async fn loaded(segments: &[&[RowResult]], rows: &[Digest]) -> Results {
        let (store, base, schema) = (Store::memory(), Digest([9; 32]), schema());
        for results in segments {
            let bytes = segment::encode(&schema.batch(results).unwrap()).unwrap();
            store.put_segment(&base, 0, bytes).await.unwrap();
        }
        let cache = tempfile::tempdir().unwrap();
        let index = RowIndex::load(&store, &base, &cache.path().join("index")).await.unwrap();
        Results::load(&store, &base, &index, rows, &schema).await.unwrap()
    }

    /// Input batches joined with answers: by chunk, the pairs of both columns.
    fn joined_pairs(results: &Results, batches: &[&[i64]], port: usize, limit: usize) -> Vec<Vec<(i64, i64)>> {
        let rows: Vec<Digest> = batches.concat().into_iter().map(digest).collect();
        let batches: Vec<RecordBatch> = batches.iter().map(|ids| batch(ids)).collect();
        let (schema, input) = (schema(), batches[0].schema());
        let mut chunks = Vec::new();
        let keep = |chunk: RecordBatch| {
            let column = |number: usize| chunk.column(number).as_primitive::<Int64Type>().values().to_vec();
            chunks.push(column(0).into_iter().zip(column(1)).collect());
            Ok(())
        };
        let joined = joined(&input, &schema.ports[port].1);
        results.join(batches.into_iter().map(Ok), &rows, port, &joined, limit, keep).unwrap();
        chunks
    }

    #[tokio::test]
    async fn answers_are_joined_to_their_rows_in_chunks_of_bounded_size() {
        let first = [done(5, &[50]), done(2, &[20, 21]), rejected(4, "too-long", None)];
        let second = [done(1, &[10]), done(3, &[]), done(6, &[60, 61, 62])];
        let input: [&[i64]; 3] = [&[1, 2, 3], &[2, 4, 7], &[5, 6]];
        let rows: Vec<Digest> = input.concat().into_iter().map(digest).collect();
        let results = loaded(&[&first, &second], &rows).await;
        assert!(!results.misled);
        assert_eq!(results.missing(&rows), [&digest(7)]);
        let all = [vec![(1, 10), (2, 20), (2, 21)], vec![(2, 20), (2, 21)], vec![(5, 50), (6, 60), (6, 61), (6, 62)]];
        assert_eq!(joined_pairs(&results, &input, 1, CHUNK), all, "a chunk has rows of one batch");
        // A joined row has two numbers of eight bytes.
        let of_two = joined_pairs(&results, &input, 1, 32);
        assert_eq!(of_two.concat(), all.concat());
        assert_eq!(of_two.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 2, 2, 2]);
        let of_one = joined_pairs(&results, &input, 1, 31);
        assert_eq!(of_one.concat(), all.concat());
        assert_eq!(joined_pairs(&results, &input[..1], 0, CHUNK), [[(1, 1), (2, 2), (3, 0)]], "of the other port");
        assert!(of_one.iter().all(|chunk| chunk.len() == 1), "also where a row alone has more than the limit");
    }

    #[tokio::test]
    async fn a_rejection_says_why() {
        let answers = [rejected(1, "too-long", Some("9 words")), rejected(2, "empty", None), done(3, &[])];
        let mut said = loaded(&[&answers], &[1, 2, 3].map(digest)).await.rejections();
        said.sort_by_key(|(_, why)| why.clone());
        assert_eq!(said, [(digest(2), "empty".to_owned()), (digest(1), "too-long: 9 words".to_owned())]);
    }

    #[test]
    fn what_is_not_where_the_index_says_is_left_out() {
        let schema = schema();
        let parts = [schema.batch(&[done(1, &[10])]).unwrap(), schema.batch(&[done(2, &[20])]).unwrap()];
        let added = |places: &[(usize, Digest)]| {
            let mut results = Results { misled: false, parts: Vec::new(), at: HashMap::new() };
            results.add(&parts, places, &schema).unwrap();
            let found = [1, 2].map(|id| !results.missing(&[digest(id)]).contains(&&digest(id)));
            (results.misled, found)
        };
        assert_eq!(added(&[(0, digest(1)), (1, digest(2))]), (false, [true, true]));
        assert_eq!(added(&[(1, digest(2))]), (false, [false, true]));
        assert_eq!(added(&[(0, digest(2)), (1, digest(2))]), (true, [false, true]), "another row is there");
        assert_eq!(added(&[(0, digest(1)), (1, digest(1))]), (true, [true, false]), "whatever comes before");
        assert_eq!(added(&[(0, digest(1)), (2, digest(2))]), (true, [true, false]), "no row is there");
    }

    #[test]
    fn values_are_as_large_as_their_texts() {
        let texts = StringArray::from(vec!["a", "bcd", "ef"]);
        let bytes = |array: &dyn Array| [0, 1].map(|row| value_bytes(array, row));
        assert_eq!(bytes(&texts), [1, 3]);
        assert_eq!(bytes(&LargeStringArray::from(vec!["a", "bcd"])), [1, 3]);
        assert_eq!(bytes(&BinaryArray::from_vec(vec![b"a", b"bcd"])), [1, 3]);
        assert_eq!(bytes(&LargeBinaryArray::from_vec(vec![b"a", b"bcd"])), [1, 3]);
        assert_eq!(bytes(&Int64Array::from(vec![1, 2])), [8, 8]);
        let (item, items) = (Arc::new(Field::new("item", DataType::Utf8, true)), Arc::new(texts.clone()));
        let lengths = || arrow::buffer::OffsetBuffer::<i32>::from_lengths([1, 2]);
        assert_eq!(bytes(&ListArray::new(item.clone(), lengths(), items.clone(), None)), [1, 5]);
        let lengths = || arrow::buffer::OffsetBuffer::<i64>::from_lengths([1, 2]);
        assert_eq!(bytes(&LargeListArray::new(item.clone(), lengths(), items.clone(), None)), [1, 5]);
        let numbers =
            (Arc::new(Field::new("n", DataType::Int64, true)), Arc::new(Int64Array::from(vec![1, 2, 3])) as _);
        assert_eq!(bytes(&StructArray::from(vec![(item, items as ArrayRef), numbers])), [9, 11]);
    }
}
