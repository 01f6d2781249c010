//! The one layout in which programs get tables.
//!
//! A key says what a table's values are and in which order its columns come, not how they are laid out: `int8` and
//! `int64` with the same values are one artifact. A program would see the difference (`int8` overflows at 128, a pandas
//! index hides a column), so what it gets is always the same: 64-bit integers and floats, plain text, binary and lists,
//! every column nullable, no metadata. A table that is like that already is left alone after a look at its footer; any
//! other is written anew, a few thousand rows at a time.
//!
//! What stays as it was: row groups, encodings and compression, which readers do not show unless they are asked, and the
//! name of a list's items, which types do not count as a difference.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Field, Schema};
use cuda_agent_protocol::ColumnType;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::arrow::{ArrowWriter, ProjectionMask};
use parquet::file::metadata::ParquetMetaData;

use super::ArtifactError;
use super::column::plain_type;
use super::table::{open, writer_properties};

/// So many bytes of values are held at once, as far as rows are alike.
const BATCH_BYTES: u64 = 32 << 20;
/// The most rows that are held at once.
const BATCH_ROWS: u64 = 8192;
/// Bytes from which on a row group is written.
const GROUP_BYTES: usize = 64 << 20;

/// Brings the table at `path` into the layout that programs get, with the `declared` columns alone (all where none are
/// declared), in their order.
pub fn canonicalize(path: &Path, declared: &BTreeMap<String, ColumnType>) -> Result<(), ArtifactError> {
    let builder = open(path)?;
    let schema = builder.schema().clone();
    let is_kept = |field: &Field| declared.is_empty() || declared.contains_key(field.name());
    let kept: Vec<usize> =
        schema.fields().iter().enumerate().filter(|(_, field)| is_kept(field)).map(|(index, _)| index).collect();
    let mut plain = Vec::with_capacity(kept.len());
    for index in &kept {
        let field = schema.field(*index);
        let plain_type = plain_type(field.data_type())
            .map_err(|error| ArtifactError::malformed(path)(format!("column `{}`: {error}", field.name())))?;
        plain.push(Field::new(field.name(), plain_type, true));
    }
    let is_plain = schema.metadata().is_empty() && schema.fields().iter().zip(&plain).all(|(a, b)| is_alike(a, b));
    if kept.len() == schema.fields().len() && is_plain {
        return Ok(());
    }
    rewrite(path, builder, &kept, Arc::new(Schema::new(plain)))
}

/// Whether two fields are one to whoever reads them.
fn is_alike(found: &Field, plain: &Field) -> bool {
    found.name() == plain.name() && is_alike_but_for_name(found, plain)
}

fn is_alike_but_for_name(found: &Field, plain: &Field) -> bool {
    found.is_nullable()
        && found.metadata().is_empty()
        && match (found.data_type(), plain.data_type()) {
            (DataType::List(found), DataType::List(plain)) => is_alike_but_for_name(found, plain),
            (DataType::Struct(found), DataType::Struct(plain)) => {
                found.len() == plain.len() && found.iter().zip(plain).all(|(found, plain)| is_alike(found, plain))
            }
            (found, plain) => found == plain,
        }
}

fn rewrite(
    path: &Path,
    builder: ParquetRecordBatchReaderBuilder<File>,
    kept: &[usize],
    plain: Arc<Schema>,
) -> Result<(), ArtifactError> {
    let partial = path.with_extension("partial");
    let mask = ProjectionMask::roots(builder.parquet_schema(), kept.iter().copied());
    let rows = batch_rows(builder.metadata());
    let reader = builder.with_projection(mask).with_batch_size(rows).build().map_err(ArtifactError::malformed(path))?;
    let file = File::create(&partial).map_err(ArtifactError::io(&partial))?;
    let fail = |error: parquet::errors::ParquetError| ArtifactError::malformed(path)(error);
    let mut writer = ArrowWriter::try_new(file, plain.clone(), Some(writer_properties())).map_err(fail)?;
    for batch in reader {
        let batch = batch.map_err(ArtifactError::malformed(path))?;
        writer.write(&plainly(&batch, &plain).map_err(ArtifactError::malformed(path))?).map_err(fail)?;
        if writer.in_progress_size() > GROUP_BYTES {
            writer.flush().map_err(fail)?;
        }
    }
    writer.close().map_err(fail)?;
    std::fs::rename(&partial, path).map_err(ArtifactError::io(path))
}

/// A batch in other types that hold the same values.
fn plainly(batch: &RecordBatch, plain: &Arc<Schema>) -> Result<RecordBatch, arrow::error::ArrowError> {
    // A "safe" cast would make a null of what does not fit.
    let exact = CastOptions { safe: false, ..CastOptions::default() };
    let columns = batch.columns().iter().zip(plain.fields());
    let columns = columns.map(|(column, field)| cast_with_options(column, field.data_type(), &exact));
    let columns = columns.collect::<Result<Vec<_>, _>>()?;
    // Without columns the number of rows would be lost.
    let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(plain.clone(), columns, &options)
}

/// How many rows to hold at once: few where they are large.
fn batch_rows(metadata: &ParquetMetaData) -> usize {
    let largest = metadata.row_groups().iter().map(|group| {
        let rows = u64::try_from(group.num_rows()).unwrap_or(0).max(1);
        u64::try_from(group.total_byte_size()).unwrap_or(0).div_ceil(rows)
    });
    let bytes_of_a_row = largest.max().unwrap_or(0).max(1);
    (BATCH_BYTES / bytes_of_a_row).clamp(1, BATCH_ROWS) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::table;
    use arrow::array::{
        Array, ArrayRef, AsArray, DictionaryArray, FixedSizeBinaryArray, Float32Array, Int8Array, Int64Array,
        LargeStringArray, ListArray, StringArray, StringViewArray, StructArray, UInt64Array,
    };
    use arrow::datatypes::{Int32Type, Int64Type};
    use std::collections::HashMap;

    fn written(path: &Path, columns: Vec<(&str, ArrayRef)>) {
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        table::write(path, &batch.schema(), &[batch]).unwrap();
    }

    fn handed_out(path: &Path, declared: &[&str]) -> (Arc<Schema>, RecordBatch) {
        let declared = declared.iter().map(|name| ((*name).to_owned(), ColumnType::Int64)).collect();
        canonicalize(path, &declared).unwrap();
        let (schema, batches) = table::read(path).unwrap();
        (schema.clone(), arrow::compute::concat_batches(&schema, &batches).unwrap())
    }

    #[test]
    fn every_physical_type_becomes_the_one_of_its_logical_type() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        let coded: DictionaryArray<Int32Type> = vec![Some("a"), None].into_iter().collect();
        let bytes = FixedSizeBinaryArray::try_from_iter([[1u8, 2], [3, 4]].iter()).unwrap();
        let inner: ArrayRef = Arc::new(Int8Array::from(vec![Some(1), None]));
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("small", Arc::new(Int8Array::from(vec![100, -100]))),
            ("single", Arc::new(Float32Array::from(vec![0.5, -0.5]))),
            ("large", Arc::new(LargeStringArray::from(vec!["x", "é"]))),
            ("view", Arc::new(StringViewArray::from(vec![Some("x"), None]))),
            ("coded", Arc::new(coded)),
            ("bytes", Arc::new(bytes)),
            ("unsigned", Arc::new(UInt64Array::from(vec![u64::MAX, 0]))),
            ("nested", Arc::new(StructArray::from(vec![(Arc::new(Field::new("i", DataType::Int8, true)), inner)]))),
        ];
        written(&path, columns);
        let before = table::inspect(&path).unwrap();
        let (schema, batch) = handed_out(&path, &[]);
        let types: Vec<String> = schema.fields().iter().map(|f| format!("{}: {}", f.name(), f.data_type())).collect();
        assert_eq!(
            types,
            [
                "small: Int64",
                "single: Float64",
                "large: Utf8",
                "view: Utf8",
                "coded: Utf8",
                "bytes: Binary",
                "unsigned: UInt64",
                "nested: Struct(\"i\": Int64)",
            ]
        );
        assert_eq!(batch.column(0).as_primitive::<Int64Type>().values(), &[100, -100]);
        assert!(batch.column(4).is_null(1));
        assert_eq!(table::inspect(&path).unwrap(), before, "the values are the same ones");
    }

    #[test]
    fn a_table_that_is_plain_already_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        let lists = ListArray::from_iter_primitive::<Int64Type, _, _>([Some(vec![Some(1)]), None]);
        let nullable = Schema::new(vec![
            Field::new("a", DataType::Int64, true),
            Field::new("l", DataType::List(Field::new("element", DataType::Int64, true).into()), true),
        ]);
        let lists = arrow::compute::cast(&lists, nullable.field(1).data_type()).unwrap();
        let columns: Vec<ArrayRef> = vec![Arc::new(Int64Array::from(vec![1, 2])), lists];
        let batch = RecordBatch::try_new(Arc::new(nullable), columns).unwrap();
        table::write(&path, &batch.schema(), &[batch]).unwrap();
        let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&path).unwrap());
        let before = inode();
        handed_out(&path, &[]);
        assert_eq!(inode(), before);
        handed_out(&path, &["a", "l"]);
        assert_eq!(inode(), before);
    }

    #[test]
    fn metadata_and_columns_that_are_not_declared_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        let fields = vec![
            Field::new("z", DataType::Utf8, false),
            Field::new("b", DataType::Int64, false).with_metadata(HashMap::from([("unit".into(), "ms".into())])),
            Field::new("a", DataType::Int64, true),
        ];
        let metadata = HashMap::from([("pandas".to_owned(), "{\"index_columns\": [\"a\"]}".to_owned())]);
        let schema = Arc::new(Schema::new_with_metadata(fields, metadata));
        let columns: Vec<ArrayRef> = vec![
            Arc::new(StringArray::from(vec!["x"; 20_000])),
            Arc::new(Int64Array::from_iter_values(0..20_000)),
            Arc::new(Int64Array::from_iter_values(1..20_001)),
        ];
        let batch = RecordBatch::try_new(schema.clone(), columns).unwrap();
        table::write(&path, &schema, &[batch]).unwrap();
        let (schema, batch) = handed_out(&path, &["a", "b"]);
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        assert_eq!((names, batch.num_rows()), (vec!["b", "a"], 20_000));
        assert!(schema.metadata().is_empty() && schema.fields().iter().all(|f| f.metadata().is_empty()));
        assert!(schema.fields().iter().all(|field| field.is_nullable()));
        assert_eq!(batch.column(1).as_primitive::<Int64Type>().value(19_999), 20_000);
    }

    #[test]
    fn rows_are_held_in_batches_by_their_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        let rows = |length: usize| {
            let text = "x".repeat(length);
            written(&path, vec![("t", Arc::new(StringArray::from_iter_values([&text, &text])))]);
            batch_rows(open(&path).unwrap().metadata())
        };
        assert_eq!(rows(10), 8192);
        let few = rows(8 << 20);
        assert!((1..=8).contains(&few), "{few} rows of 8 MiB");
    }
}
