//! Row segments: Parquet files of row results.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, FixedSizeBinaryArray, RecordBatch, StringArray, StructArray, new_null_array,
};
use arrow::datatypes::{DataType, Field, Fields, Schema};
use bytes::Bytes;
use cuda_agent_protocol::{Manifest, RowResult, RowStatus};
use parquet::arrow::ArrowWriter;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Value};

use crate::artifact::column::arrow_type;
use crate::artifact::{ArtifactError, json, table};
use crate::digest::Digest;

/// How a kept row ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOutcome {
    /// With outputs.
    Done,
    /// The row itself is at fault.
    Rejected,
}

/// The columns of a kind's segments.
#[derive(Clone, Debug)]
pub struct SegmentSchema {
    /// Arrow schema of a segment.
    pub schema: Arc<Schema>,
    /// Output ports: name and the struct of its columns.
    pub ports: Vec<(String, Fields)>,
}

const FIXED: usize = 4;

impl SegmentSchema {
    /// From the outputs that a by-row kind declares.
    pub fn new(manifest: &Manifest) -> Self {
        let mut fields = vec![
            Field::new("row", DataType::FixedSizeBinary(32), false),
            Field::new("status", DataType::Utf8, false),
            Field::new("reason", DataType::Utf8, true),
            Field::new("detail", DataType::Utf8, true),
        ];
        let mut ports = Vec::new();
        for (name, port) in &manifest.outputs {
            let columns: Fields =
                port.columns.iter().map(|c| Field::new(&c.name, arrow_type(&c.column_type), true)).collect();
            let item = Field::new("item", DataType::Struct(columns.clone()), true);
            fields.push(Field::new(format!("port:{name}"), DataType::List(item.into()), true));
            ports.push((name.clone(), columns));
        }
        Self { schema: Arc::new(Schema::new(fields)), ports }
    }

    /// Whether a stored segment has these columns.
    pub fn fits(&self, segment: Bytes) -> Result<bool, ArtifactError> {
        let found = ParquetRecordBatchReaderBuilder::try_new(segment)
            .map_err(|error| ArtifactError::Contract(format!("row segment: {error}")))?;
        Ok(self.schema.contains(found.schema()))
    }

    /// Results as one batch, sorted by digest. An answer that does not fit the declared columns is an error.
    pub fn batch(&self, results: &[RowResult]) -> Result<RecordBatch, ArtifactError> {
        let mut sorted: Vec<(Digest, &RowResult)> = results
            .iter()
            .map(|result| {
                Ok((result.row.parse::<Digest>().map_err(|e| ArtifactError::Contract(e.to_string()))?, result))
            })
            .collect::<Result<_, ArtifactError>>()?;
        sorted.sort_by_key(|(digest, _)| *digest);
        let digests: Vec<[u8; 32]> = sorted.iter().map(|(digest, _)| digest.0).collect();
        let text = |value: fn(&RowResult) -> Option<&str>| -> ArrayRef {
            Arc::new(sorted.iter().map(|(_, result)| value(result)).collect::<StringArray>())
        };
        let mut columns: Vec<ArrayRef> = vec![
            if digests.is_empty() {
                new_null_array(&DataType::FixedSizeBinary(32), 0)
            } else {
                Arc::new(FixedSizeBinaryArray::try_from_iter(digests.iter()).expect("all digests have one width"))
            },
            text(|result| Some(if result.status == RowStatus::Done { "done" } else { "rejected" })),
            text(|result| result.reason.as_deref()),
            text(|result| result.detail.as_deref()),
        ];
        columns.extend(self.port_columns(&sorted)?);
        RecordBatch::try_new(self.schema.clone(), columns).map_err(|error| ArtifactError::Contract(error.to_string()))
    }

    fn port_columns(&self, sorted: &[(Digest, &RowResult)]) -> Result<Vec<ArrayRef>, ArtifactError> {
        let lists: Vec<Map<String, Value>> = sorted
            .iter()
            .map(|(_, result)| {
                let port = |name: &String| {
                    let rows = result.outputs.get(name).cloned().unwrap_or_default();
                    (format!("port:{name}"), rows.into_iter().map(Value::Object).collect::<Value>())
                };
                self.ports.iter().map(|(name, _)| port(name)).collect()
            })
            .collect();
        let schema = Arc::new(Schema::new(self.schema.fields()[FIXED..].to_vec()));
        let batch = json::to_batch(&lists, &schema).map_err(|misfit| ArtifactError::Contract(in_answer(&misfit)))?;
        Ok(batch.columns().to_vec())
    }

    /// Checks one answer as it comes, so that a wrong program is told at its first row.
    pub fn check(&self, result: &RowResult) -> Result<(), ArtifactError> {
        if let Some(port) = result.outputs.keys().find(|port| self.ports.iter().all(|(name, _)| name != *port)) {
            return Err(ArtifactError::Contract(format!("there is no output `{port}`")));
        }
        self.batch(std::slice::from_ref(result)).map(|_| ())
    }
}

/// What is wrong with an answer, by output, item and column: `port:rows[0].n` is a place in a segment.
fn in_answer(misfit: &json::Misfit) -> String {
    let place = misfit.place.strip_prefix("port:").unwrap_or(&misfit.place);
    format!("output `{place}`: {}", misfit.problem)
}

/// A segment's bytes.
pub fn encode(batch: &RecordBatch) -> Result<Bytes, ArtifactError> {
    let mut bytes = Vec::new();
    let fail = |error: parquet::errors::ParquetError| ArtifactError::Contract(format!("row segment: {error}"));
    let mut writer =
        ArrowWriter::try_new(&mut bytes, batch.schema(), Some(table::writer_properties())).map_err(fail)?;
    writer.write(batch).map_err(fail)?;
    writer.close().map_err(fail)?;
    Ok(bytes.into())
}

/// Reads a segment whole.
pub fn decode(bytes: Bytes) -> Result<Vec<RecordBatch>, ArtifactError> {
    read(bytes, None)
}

/// Reads a segment's digests only.
pub fn digests(bytes: Bytes) -> Result<Vec<Digest>, ArtifactError> {
    let mut digests = Vec::new();
    for batch in read(bytes, Some(0))? {
        let column = batch.column(0).as_fixed_size_binary_opt();
        let column = column.ok_or_else(|| ArtifactError::Contract("row segment: no column of digests".into()))?;
        for row in column.iter().flatten() {
            digests
                .push(Digest(row.try_into().map_err(|_| ArtifactError::Contract("row segment: short digest".into()))?));
        }
    }
    Ok(digests)
}

/// A segment may be anybody's, and the reader panics on some damaged ones.
fn read(bytes: Bytes, leaf: Option<usize>) -> Result<Vec<RecordBatch>, ArtifactError> {
    let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read_sound(bytes, leaf)));
    read.unwrap_or_else(|_| Err(ArtifactError::Contract("row segment: it is damaged".into())))
}

fn read_sound(bytes: Bytes, leaf: Option<usize>) -> Result<Vec<RecordBatch>, ArtifactError> {
    let fail = |error: String| ArtifactError::Contract(format!("row segment: {error}"));
    let mut builder = ParquetRecordBatchReaderBuilder::try_new(bytes).map_err(|error| fail(error.to_string()))?;
    if let Some(leaf) = leaf {
        let mask = ProjectionMask::leaves(builder.parquet_schema(), [leaf]);
        builder = builder.with_projection(mask);
    }
    let reader = builder.with_batch_size(65536).build().map_err(|error| fail(error.to_string()))?;
    reader.collect::<Result<Vec<_>, _>>().map_err(|error| fail(error.to_string()))
}

/// How each row of a batch ended.
pub fn outcomes(batch: &RecordBatch) -> Vec<RowOutcome> {
    let status = batch.column(1).as_string::<i32>();
    status.iter().map(|s| if s == Some("done") { RowOutcome::Done } else { RowOutcome::Rejected }).collect()
}

/// The flat rows of a port in a list column: for each list its range, over the items' columns.
pub fn port_items(column: &ArrayRef) -> (Vec<(usize, usize)>, StructArray) {
    let lists = column.as_list::<i32>();
    let offsets = lists.value_offsets();
    let ranges = (0..lists.len())
        .map(|row| {
            let length = if lists.is_null(row) { 0 } else { offsets[row + 1] - offsets[row] };
            (offsets[row] as usize, length as usize)
        })
        .collect();
    (ranges, lists.values().as_struct().clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn schema(column: &str) -> SegmentSchema {
        let manifest = json!({
            "name": "lab/rows", "version": "1.0.0", "summary": "Works on rows.", "run": ["x"],
            "inputs": { "rows": { "type": "table", "columns": { "id": "int64" } } },
            "outputs": { "rows": { "type": "table", "columns": [{ "name": column, "type": "int64" }] } },
            "by_row": { "port": "rows" },
        });
        SegmentSchema::new(&serde_json::from_value(manifest).expect("a manifest reads back"))
    }

    fn answer(row: u8, status: RowStatus, port: &str, items: &[Value]) -> RowResult {
        let items = items.iter().map(|item| item.as_object().unwrap().clone()).collect();
        let row = Digest([row; 32]).to_string();
        RowResult { row, status, reason: None, detail: None, outputs: [(port.to_owned(), items)].into() }
    }

    #[test]
    fn a_segment_reads_back_in_the_order_of_digests() {
        let schema = schema("n");
        let answers = [
            answer(3, RowStatus::Done, "rows", &[json!({ "n": 30 }), json!({ "n": 31 })]),
            answer(1, RowStatus::Rejected, "rows", &[]),
            answer(2, RowStatus::Done, "rows", &[json!({ "n": 20 })]),
        ];
        let bytes = encode(&schema.batch(&answers).unwrap()).unwrap();
        assert_eq!(digests(bytes.clone()).unwrap(), [1, 2, 3].map(|row| Digest([row; 32])));
        let batches = decode(bytes.clone()).unwrap();
        assert_eq!(outcomes(&batches[0]), [RowOutcome::Rejected, RowOutcome::Done, RowOutcome::Done]);
        let (ranges, items) = port_items(batches[0].column(FIXED));
        assert_eq!(ranges, [(0, 0), (0, 1), (1, 2)]);
        assert_eq!(items.column(0).as_primitive::<arrow::datatypes::Int64Type>().values(), &[20, 30, 31]);
        assert!(schema.fits(bytes.clone()).unwrap());
        assert!(!self::schema("other").fits(bytes).unwrap());
    }

    #[test]
    fn an_answer_that_does_not_fit_is_told_by_output_and_place() {
        let told = |port: &str, items: &[Value]| {
            schema("n").check(&answer(1, RowStatus::Done, port, items)).map_err(|error| error.to_string())
        };
        assert_eq!(told("rows", &[json!({ "n": 1 })]), Ok(()));
        assert_eq!(told("other", &[]).unwrap_err(), "there is no output `other`");
        let wrong = told("rows", &[json!({ "n": 1 }), json!({ "n": "x" })]).unwrap_err();
        assert!(wrong.starts_with("output `rows[1].n`: "), "{wrong}");
    }
}
