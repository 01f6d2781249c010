//! Reading the tasks, and writing tables whose bytes depend on their content alone.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray, UInt64Array};
use arrow::compute::{cast, concat_batches, take_record_batch};
use arrow::datatypes::{DataType, Field, Schema};
use cuda_agent_protocol::ProgramError;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::arrow::arrow_writer::ArrowWriterOptions;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::caps::groups;
use super::select::Candidate;

/// The released set's columns, in its order.
pub const RELEASED: [&str; 3] = ["ops", "data_source", "code"];

/// The column that names a task, where a table has one.
pub const TASK_ID: &str = "task_id";

/// The tasks to choose from.
pub struct Tasks {
    batch: RecordBatch,
    released: [StringArray; 3],
}

impl Tasks {
    /// Reads a Parquet file and checks the columns that will be published.
    pub fn read(path: &Path) -> Result<Self, ProgramError> {
        Self::new(read_batch(path)?)
    }

    /// Takes rows that are in memory.
    pub fn new(batch: RecordBatch) -> Result<Self, ProgramError> {
        let released = [ops(&batch)?, text(&batch, "data_source")?, text(&batch, "code")?];
        Ok(Self { batch, released })
    }

    /// The category of each row, and what it counts towards.
    pub fn candidates(&self) -> Vec<Candidate> {
        let operators = self.operators();
        let rows = self.released[1].iter().zip(operators);
        rows.map(|(category, operators)| Candidate {
            category: category.unwrap_or_default().to_owned(),
            groups: groups(&operators),
        })
        .collect()
    }

    /// The operators of each row.
    fn operators(&self) -> Vec<Vec<String>> {
        let rows = self.released[0].iter();
        rows.map(|ops| serde_json::from_str(ops.unwrap_or_default()).expect("checked when it was read")).collect()
    }

    /// These rows, with the released columns alone.
    pub fn samples(&self, rows: &[usize]) -> Result<RecordBatch, ProgramError> {
        let fields = RELEASED.map(|name| Field::new(name, DataType::Utf8, false));
        let columns = self.released.iter().map(|column| Arc::new(column.clone()) as ArrayRef).collect();
        self.pick(RecordBatch::try_new(Arc::new(Schema::new(fields.to_vec())), columns), rows)
    }

    /// These rows, with the task's name, its category, and every column that is not released.
    pub fn measurements(&self, rows: &[usize]) -> Result<RecordBatch, ProgramError> {
        let schema = self.batch.schema();
        let mut names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        names.retain(|name| !RELEASED.contains(name) && *name != TASK_ID);
        names.insert(0, "data_source");
        if schema.column_with_name(TASK_ID).is_some() {
            names.insert(0, TASK_ID);
        }
        let indices: Result<Vec<usize>, _> = names.iter().map(|name| schema.index_of(name)).collect();
        self.pick(indices.and_then(|indices| self.batch.project(&indices)), rows)
    }

    fn pick(
        &self,
        batch: Result<RecordBatch, arrow::error::ArrowError>,
        rows: &[usize],
    ) -> Result<RecordBatch, ProgramError> {
        let indices: UInt64Array = rows.iter().map(|row| *row as u64).collect();
        batch
            .and_then(|batch| take_record_batch(&batch, &indices))
            .map_err(|error| ProgramError::input(format!("tasks: {error}")))
    }
}

/// The whole of a Parquet file.
pub fn read_batch(path: &Path) -> Result<RecordBatch, ProgramError> {
    let complain = |error: &dyn std::fmt::Display| ProgramError::input(format!("{}: {error}", path.display()));
    let file = File::open(path).map_err(|error| complain(&error))?;
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| complain(&error))?;
    let schema = builder.schema().clone();
    let reader = builder.build().map_err(|error| complain(&error))?;
    let batches = reader.collect::<Result<Vec<_>, _>>().map_err(|error| complain(&error))?;
    concat_batches(&schema, &batches).map_err(|error| complain(&error))
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, ProgramError> {
    batch.column_by_name(name).ok_or_else(|| {
        let schema = batch.schema();
        let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
        ProgramError::input(format!("the tasks have no column `{name}`"))
            .with_hint(format!("ops, data_source and code are needed; there are: {}", names.join(", ")))
    })
}

fn text(batch: &RecordBatch, name: &str) -> Result<StringArray, ProgramError> {
    let column = column(batch, name)?;
    let is_text = match column.data_type() {
        DataType::Dictionary(_, value) => value.is_string(),
        other => other.is_string(),
    };
    if !is_text {
        return Err(ProgramError::input(format!("the column `{name}` must be text, it is {}", column.data_type())));
    }
    let column = cast(column, &DataType::Utf8).map_err(|error| ProgramError::input(format!("`{name}`: {error}")))?;
    match (0..column.len()).find(|row| column.is_null(*row)) {
        Some(row) => Err(ProgramError::input(format!("the column `{name}` is empty in row {row}"))),
        None => Ok(column.as_string::<i32>().clone()),
    }
}

/// The operators as the released set writes them: JSON text. Lists of text are serialised.
fn ops(batch: &RecordBatch) -> Result<StringArray, ProgramError> {
    let column = column(batch, "ops")?;
    if let DataType::List(_) = column.data_type() {
        let lists = column.as_list::<i32>();
        let rows = lists.iter().map(|list| {
            let names = list.map(|list| cast(&list, &DataType::Utf8)).transpose().ok().flatten();
            let names = names.ok_or_else(|| ProgramError::input("the column `ops` must hold lists of text"))?;
            Ok(serde_json::to_string(&names.as_string::<i32>().iter().collect::<Vec<_>>()).expect("text is JSON"))
        });
        return rows.collect::<Result<Vec<String>, ProgramError>>().map(StringArray::from);
    }
    let texts = text(batch, "ops")?;
    for (row, value) in texts.iter().enumerate() {
        if serde_json::from_str::<Vec<String>>(value.unwrap_or_default()).is_err() {
            return Err(ProgramError::input(format!("`ops` in row {row} is not a JSON list of names: {value:?}")));
        }
    }
    Ok(texts)
}

/// A Parquet file of the batch. Neither the writer's version nor the time is in it, so that equal rows make equal
/// bytes.
pub fn parquet(batch: &RecordBatch) -> Result<Vec<u8>, ProgramError> {
    let level = ZstdLevel::try_new(3).expect("3 is a level of zstd");
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(level))
        .set_created_by("cuda-agent ops/publish".to_owned())
        .build();
    let options = ArrowWriterOptions::new().with_properties(properties).with_skip_arrow_metadata(true);
    let mut bytes = Vec::new();
    let written = ArrowWriter::try_new_with_options(&mut bytes, batch.schema(), options)
        .and_then(|mut writer| writer.write(batch).and_then(|()| writer.close()));
    written.map_err(|error| ProgramError::input(format!("tasks: {error}")))?;
    Ok(bytes)
}

/// Writes a file, and the folders above it.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), ProgramError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(path, bytes))
        .map_err(|error| ProgramError::environment(format!("{}: {error}", path.display())))
}
