//! Tables: Parquet files whose identity is their logical content.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::Schema;
use cuda_agent_protocol::ColumnType;
use cuda_agent_protocol::manifest::OutputColumn;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde_json::{Map, Value};

use super::column::{ColumnHasher, canonical, table_digest, type_name};
use super::{ArtifactError, ColumnInfo, json};
use crate::digest::Digest;

/// What a table is, apart from where it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct TableInfo {
    /// Its logical digest.
    pub digest: Digest,
    /// How many rows.
    pub rows: u64,
    /// Its columns in order.
    pub columns: Vec<ColumnInfo>,
}

/// How the engine writes Parquet. No writer version or time goes in, so equal content gives equal bytes.
pub fn writer_properties() -> WriterProperties {
    WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3).expect("3 is a level")))
        .set_created_by("cuda-agent".to_owned())
        .build()
}

/// How many bytes a batch has at most, by what the file says of its values; a single row may have more.
const BATCH_BYTES: u64 = 64 << 20;
/// How many rows a batch has at most.
const BATCH_ROWS: usize = 8192;
/// Bytes of written rows that are kept in memory before they go to the file as a row group.
const GROUP_BYTES: usize = 256 << 20;

/// A table's rows, batch by batch.
pub struct Batches {
    path: PathBuf,
    file: File,
    metadata: ArrowReaderMetadata,
    size: usize,
    /// Rows that were given out.
    done: usize,
    inner: ParquetRecordBatchReader,
}

/// Opens a Parquet file for reading batch by batch. Where cells are large, a batch has fewer rows: arrays count their bytes in
/// 31 bits, so 8192 cells of a megabyte do not fit into one.
pub fn reader(path: &Path) -> Result<Batches, ArtifactError> {
    let file = open_parquet(path)?;
    let metadata = ArrowReaderMetadata::load(&file, ArrowReaderOptions::default());
    let metadata = metadata.map_err(ArtifactError::malformed(path))?;
    let groups = metadata.metadata().row_groups().iter();
    let widest = groups.map(|group| group.total_byte_size().max(0) / group.num_rows().max(1)).max().unwrap_or(0);
    let size = (BATCH_BYTES / (widest as u64).max(1)).clamp(1, BATCH_ROWS as u64) as usize;
    let inner = rows_from(path, &file, &metadata, size, 0)?;
    Ok(Batches { path: path.to_owned(), file, metadata, size, done: 0, inner })
}

fn rows_from(
    path: &Path,
    file: &File,
    metadata: &ArrowReaderMetadata,
    size: usize,
    done: usize,
) -> Result<ParquetRecordBatchReader, ArtifactError> {
    let file = file.try_clone().map_err(ArtifactError::io(path))?;
    let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata.clone());
    builder.with_batch_size(size).with_offset(done).build().map_err(ArtifactError::malformed(path))
}

impl Batches {
    /// The columns.
    pub fn schema(&self) -> Arc<Schema> {
        self.metadata.schema().clone()
    }
}

impl Iterator for Batches {
    type Item = Result<RecordBatch, ArtifactError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.inner.next()? {
                Ok(batch) => {
                    self.done += batch.num_rows();
                    return Some(Ok(batch));
                }
                // A dictionary hides how large values are that repeat: perhaps fewer of them fit.
                Err(_) if self.size > 1 => {
                    self.size = (self.size / 16).max(1);
                    match rows_from(&self.path, &self.file, &self.metadata, self.size, self.done) {
                        Ok(inner) => self.inner = inner,
                        Err(error) => return Some(Err(error)),
                    }
                }
                Err(error) => return Some(Err(ArtifactError::malformed(&self.path)(error))),
            }
        }
    }
}

/// Opens a Parquet file and reads its footer.
pub(super) fn open(path: &Path) -> Result<ParquetRecordBatchReaderBuilder<File>, ArtifactError> {
    ParquetRecordBatchReaderBuilder::try_new(open_parquet(path)?).map_err(ArtifactError::malformed(path))
}

fn open_parquet(path: &Path) -> Result<File, ArtifactError> {
    let mut file = File::open(path).map_err(ArtifactError::io(path))?;
    if let Some(found) = not_parquet(path, &mut file).map_err(ArtifactError::io(path))? {
        return Err(ArtifactError::NotParquet { path: path.display().to_string(), found });
    }
    Ok(file)
}

/// What a file is that does not begin as Parquet files do; the reader would call it a corrupt one.
fn not_parquet(path: &Path, file: &mut File) -> std::io::Result<Option<String>> {
    if path.is_dir() {
        return Ok(Some("a folder".to_owned()));
    }
    let mut first = Vec::new();
    file.take(12).read_to_end(&mut first)?;
    if first.starts_with(b"PAR1") || first.starts_with(b"PARE") {
        return Ok(None);
    }
    let name = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    Ok(Some(match (name.as_str(), first.as_slice()) {
        (_, []) => "empty".to_owned(),
        (_, [b'A', b'R', b'R', b'O', b'W', b'1', ..]) => "an Arrow file".to_owned(),
        ("csv", _) => "CSV".to_owned(),
        ("tsv", _) => "tab-separated text".to_owned(),
        ("jsonl" | "ndjson" | "json", _) | (_, [b'{', ..]) => "JSON".to_owned(),
        (_, first) => format!("begins with {:?}", String::from_utf8_lossy(first)),
    }))
}

/// Reads a whole table.
pub fn read(path: &Path) -> Result<(Arc<Schema>, Vec<RecordBatch>), ArtifactError> {
    let reader = reader(path)?;
    Ok((reader.schema(), reader.collect::<Result<_, _>>()?))
}

/// Writes a table as it comes.
pub struct Writer {
    path: PathBuf,
    inner: ArrowWriter<File>,
}

impl Writer {
    /// Begins a table at `path`.
    pub fn create(path: &Path, schema: &Arc<Schema>) -> Result<Self, ArtifactError> {
        let file = File::create(path).map_err(ArtifactError::io(path))?;
        let inner = ArrowWriter::try_new(file, schema.clone(), Some(writer_properties()));
        Ok(Self { path: path.to_owned(), inner: inner.map_err(ArtifactError::malformed(path))? })
    }

    /// Adds rows.
    pub fn write(&mut self, batch: &RecordBatch) -> Result<(), ArtifactError> {
        self.inner.write(batch).map_err(ArtifactError::malformed(&self.path))?;
        if self.inner.in_progress_size() > GROUP_BYTES {
            self.inner.flush().map_err(ArtifactError::malformed(&self.path))?;
        }
        Ok(())
    }

    /// Ends the table.
    pub fn close(self) -> Result<(), ArtifactError> {
        self.inner.close().map(|_| ()).map_err(ArtifactError::malformed(&self.path))
    }
}

/// Writes batches of one schema.
pub fn write(path: &Path, schema: &Arc<Schema>, batches: &[RecordBatch]) -> Result<(), ArtifactError> {
    let mut writer = Writer::create(path, schema)?;
    for batch in batches {
        writer.write(batch)?;
    }
    writer.close()
}

/// The logical digest and shape of a Parquet file. Reading every value also proves that the file is whole.
pub fn inspect(path: &Path) -> Result<TableInfo, ArtifactError> {
    let reader = reader(path)?;
    let schema = reader.schema();
    let unsupported = |name: &str| {
        let name = name.to_owned();
        move |error: super::column::UnsupportedType| ArtifactError::Malformed {
            path: path.display().to_string(),
            message: format!("column `{name}`: {error}"),
        }
    };
    let mut names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(ArtifactError::malformed(path)(format!("two columns are named `{}`", pair[0])));
    }
    let mut hashers = Vec::new();
    for field in schema.fields() {
        hashers.push(ColumnHasher::new(field.data_type()).map_err(unsupported(field.name()))?);
    }
    let mut rows = 0;
    for batch in reader {
        let batch = batch?;
        rows += batch.num_rows() as u64;
        for ((hasher, column), field) in hashers.iter_mut().zip(batch.columns()).zip(schema.fields()) {
            hasher.update(column).map_err(unsupported(field.name()))?;
        }
    }
    let mut columns = Vec::new();
    for (hasher, field) in hashers.into_iter().zip(schema.fields()) {
        let column_type = type_name(field.data_type()).map_err(unsupported(field.name()))?;
        columns.push(ColumnInfo { name: field.name().clone(), column_type, digest: hasher.finish(), measured: false });
    }
    let plain: Vec<_> = columns.iter().map(|c| (c.name.clone(), c.column_type.clone(), c.digest)).collect();
    Ok(TableInfo { digest: table_digest(rows, &plain), rows, columns })
}

/// Finds what a program wrote for a table port, `x.parquet` or `x.jsonl`, and makes it Parquet at `parquet`.
pub fn adopt(parquet: &Path, declared: &[OutputColumn]) -> Result<(), ArtifactError> {
    let lines = parquet.with_extension("jsonl");
    for path in [parquet, &lines] {
        // Opening a pipe would wait for ever for somebody to write to it.
        if path.exists() && !path.is_file() {
            return Err(ArtifactError::Contract(format!("{} is not a file", file_name(path))));
        }
    }
    match (parquet.exists(), lines.exists()) {
        (true, true) => Err(ArtifactError::Contract(format!(
            "the program wrote both {} and {}; one of them is the table",
            file_name(parquet),
            file_name(&lines)
        ))),
        (true, false) => Ok(()),
        (false, true) => from_json_lines(&lines, parquet, declared),
        (false, false) => Err(ArtifactError::Contract(format!(
            "the program wrote neither {} nor {}",
            file_name(parquet),
            file_name(&lines)
        ))),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// So many rows, or bytes of text, become one batch.
const LINES: (usize, usize) = (8192, 32 << 20);

fn from_json_lines(lines: &Path, parquet: &Path, declared: &[OutputColumn]) -> Result<(), ArtifactError> {
    let schema = if declared.is_empty() {
        let rows: Vec<Map<String, Value>> =
            json_lines(lines)?.map(|row| Ok::<_, ArtifactError>(row?.1)).collect::<Result<_, _>>()?;
        let values = rows.into_iter().map(|row| Ok(Value::Object(row)));
        let inferred = arrow::json::reader::infer_json_schema_from_iterator(values);
        Arc::new(inferred.map_err(ArtifactError::malformed(lines))?)
    } else {
        json::schema(declared.iter().map(|column| (column.name.as_str(), &column.column_type)))
    };
    let file = File::create(parquet).map_err(ArtifactError::io(parquet))?;
    let mut writer = ArrowWriter::try_new(file, schema.clone(), Some(writer_properties()))
        .map_err(ArtifactError::malformed(parquet))?;
    let mut rows = json_lines(lines)?.peekable();
    while rows.peek().is_some() {
        let (mut numbers, mut objects, mut bytes) = (Vec::new(), Vec::new(), 0);
        while objects.len() < LINES.0
            && bytes < LINES.1
            && let Some(row) = rows.next()
        {
            let (number, object, length) = row?;
            numbers.push(number);
            objects.push(object);
            bytes += length;
        }
        let batch = json::to_batch(&objects, &schema);
        let batch = batch.map_err(|misfit| in_line(lines, numbers[misfit.row], &misfit))?;
        writer.write(&batch).map_err(ArtifactError::malformed(parquet))?;
    }
    writer.close().map_err(ArtifactError::malformed(parquet))?;
    Ok(())
}

/// The number of a line from 1, its object, and the bytes of its text.
type JsonLine = (usize, Map<String, Value>, usize);

/// The objects of a file of JSON lines. Empty lines are passed over.
fn json_lines(path: &Path) -> Result<impl Iterator<Item = Result<JsonLine, ArtifactError>>, ArtifactError> {
    let file = File::open(path).map_err(ArtifactError::io(path))?;
    let read = move |(number, line): (usize, std::io::Result<String>)| {
        let line = match line {
            Err(error) => return Some(Err(ArtifactError::io(path)(error))),
            Ok(line) if line.trim().is_empty() => return None,
            Ok(line) => line,
        };
        let object = json::object(&line).map_err(|message| in_line(path, number, &message));
        Some(object.map(|object| (number, object, line.len())))
    };
    Ok((1..).zip(BufReader::new(file).lines()).filter_map(read))
}

fn in_line(lines: &Path, number: usize, message: &impl std::fmt::Display) -> ArtifactError {
    ArtifactError::Malformed { path: format!("{}:{number}", file_name(lines)), message: message.to_string() }
}

/// Checks a table against declared columns: each must be there with its type, and no other where `closed`.
pub fn check(info: &TableInfo, declared: &[(&str, &ColumnType)], closed: bool) -> Result<(), ArtifactError> {
    let mut wrong = Vec::new();
    for (name, column_type) in declared {
        match info.columns.iter().find(|column| column.name == *name) {
            None => wrong.push(format!("column `{name}` ({column_type}) is missing")),
            // A column of nothing but nulls has no type of its own in some writers.
            Some(found) if found.column_type == "null" || found.column_type == column_type.to_string() => {}
            Some(found) => wrong.push(format!("column `{name}` is {}, declared {column_type}", found.column_type)),
        }
    }
    if closed {
        let stranger = |name: &str| !declared.iter().any(|(declared, _)| *declared == name);
        wrong.extend(
            info.columns.iter().filter(|c| stranger(&c.name)).map(|c| format!("column `{}` is not declared", c.name)),
        );
    }
    if wrong.is_empty() { Ok(()) } else { Err(ArtifactError::Contract(wrong.join("; "))) }
}

/// Digests of the rows of a table over some of its columns.
pub fn row_digests(path: &Path, columns: &[String]) -> Result<Vec<Digest>, ArtifactError> {
    let mut digests = Vec::new();
    for batch in read(path)?.1 {
        digests.extend(batch_digests(&batch, columns)?);
    }
    Ok(digests)
}

/// Digests of the rows of a batch over some of its columns.
pub fn batch_digests(batch: &RecordBatch, columns: &[String]) -> Result<Vec<Digest>, ArtifactError> {
    let named: Result<Vec<(&str, ArrayRef)>, _> =
        columns.iter().map(|name| Ok((name.as_str(), column(batch, name)?.clone()))).collect();
    super::column::row_digests(&named?).map_err(|error| ArtifactError::Contract(error.to_string()))
}

/// Some columns of a batch, each value ready for JSON.
pub fn columns_of(batch: &RecordBatch, names: &[String]) -> Result<Vec<(String, ArrayRef)>, ArtifactError> {
    let ready = |name: &String| {
        let array = canonical(column(batch, name)?);
        let array = array.map_err(|error| ArtifactError::Contract(format!("column `{name}`: {error}")))?;
        Ok((name.clone(), array))
    };
    names.iter().map(ready).collect()
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, ArtifactError> {
    batch.column_by_name(name).ok_or_else(|| ArtifactError::Contract(format!("column `{name}` is missing")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::{Int64Array, StringArray};

    fn batch(rows: std::ops::Range<i64>) -> RecordBatch {
        let texts: Vec<String> = rows.clone().map(|row| format!("text {row}")).collect();
        RecordBatch::try_from_iter([
            ("n", Arc::new(Int64Array::from_iter_values(rows)) as ArrayRef),
            ("t", Arc::new(StringArray::from(texts)) as ArrayRef),
        ])
        .unwrap()
    }

    #[test]
    fn writer_settings_do_not_change_the_identity() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("1.parquet"), folder.path().join("2.parquet"));
        write(&one, &batch(0..1).schema(), &[batch(0..100)]).unwrap();
        let properties = WriterProperties::builder()
            .set_max_row_group_row_count(Some(7))
            .set_dictionary_enabled(false)
            .set_compression(Compression::SNAPPY)
            .build();
        let file = File::create(&two).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch(0..1).schema(), Some(properties)).unwrap();
        writer.write(&batch(0..40)).unwrap();
        writer.write(&batch(40..100)).unwrap();
        writer.close().unwrap();
        assert_ne!(Digest::of_file(&one).unwrap(), Digest::of_file(&two).unwrap());
        assert_eq!(inspect(&one).unwrap(), inspect(&two).unwrap());
        assert_eq!(inspect(&one).unwrap().rows, 100);
    }

    #[test]
    fn batches_are_small_however_large_the_cells_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        // Of different cells the file tells the size; of one that repeats it does not.
        let cells: Vec<String> = (0..100).map(|cell| cell.to_string().repeat(1 << 20)).collect();
        let batch = RecordBatch::try_from_iter([("t", Arc::new(StringArray::from(cells)) as ArrayRef)]).unwrap();
        write(&path, &batch.schema(), std::slice::from_ref(&batch)).unwrap();
        let batches: Vec<RecordBatch> = reader(&path).unwrap().map(Result::unwrap).collect();
        assert!(batches.iter().all(|batch| batch.num_rows() <= 64), "{}", batches[0].num_rows());
        assert_eq!(arrow::compute::concat_batches(&batch.schema(), &batches).unwrap(), batch);
    }

    #[test]
    fn order_and_values_change_the_identity() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        let digest = |batches: &[RecordBatch]| {
            write(&path, &batches[0].schema(), batches).unwrap();
            inspect(&path).unwrap().digest
        };
        let base = digest(&[batch(0..4)]);
        assert_ne!(digest(&[batch(1..5)]), base);
        assert_ne!(digest(&[batch(2..4), batch(0..2)]), base);
        assert_eq!(digest(&[batch(0..2), batch(2..4)]), base);
    }

    fn column(name: &str, text: &str) -> OutputColumn {
        OutputColumn { name: name.into(), column_type: text.parse().unwrap(), measured: false, doc: String::new() }
    }

    #[test]
    fn json_lines_become_parquet() {
        let folder = tempfile::tempdir().unwrap();
        let parquet = folder.path().join("t.parquet");
        std::fs::write(folder.path().join("t.jsonl"), "{\"a\":1,\"b\":\"x\"}\n\n{\"b\":null,\"a\":2}\n").unwrap();
        adopt(&parquet, &[column("a", "int64"), column("b", "utf8")]).unwrap();
        let info = inspect(&parquet).unwrap();
        assert_eq!((info.rows, info.columns[1].column_type.as_str()), (2, "utf8"));
    }

    #[test]
    fn a_wrong_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let parquet = folder.path().join("t.parquet");
        let told = |text: &str| {
            std::fs::write(folder.path().join("t.jsonl"), text).unwrap();
            let _ = std::fs::remove_file(&parquet);
            adopt(&parquet, &[column("a", "int64")]).unwrap_err().to_string()
        };
        assert_eq!(
            told("{\"a\":1}\n\n\n{\"a\":1.5}\n"),
            "t.jsonl:4: column `a`: 1.5 is not a value of type int64, and would have been changed"
        );
        assert!(told("{\"a\":1}\n{\"a\":\n").starts_with("t.jsonl:2: "));
        assert_eq!(told("{\"b\":1}\n"), "t.jsonl:1: column `b`: it is not declared");
        assert!(adopt(&folder.path().join("u.parquet"), &[]).unwrap_err().to_string().contains("neither"));
    }

    #[test]
    fn many_json_lines_are_read_in_parts() {
        let folder = tempfile::tempdir().unwrap();
        let parquet = folder.path().join("t.parquet");
        let text: String = (0..10_000).map(|number| format!("{{\"a\":{number}}}\n")).collect();
        std::fs::write(folder.path().join("t.jsonl"), text).unwrap();
        adopt(&parquet, &[]).unwrap();
        let inferred = inspect(&parquet).unwrap();
        std::fs::remove_file(&parquet).unwrap();
        adopt(&parquet, &[column("a", "int64")]).unwrap();
        assert_eq!((inspect(&parquet).unwrap(), inferred.rows), (inferred, 10_000));
    }

    #[test]
    fn what_is_no_parquet_file_is_said_to_be_none() {
        let folder = tempfile::tempdir().unwrap();
        let said = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let error = inspect(&path).unwrap_err().to_string();
            error.replace(&folder.path().display().to_string(), "FOLDER")
        };
        assert_eq!(said("t.csv", b"a,b\n1,2\n"), "FOLDER/t.csv is not a Parquet file, but CSV");
        assert_eq!(said("t.parquet", b""), "FOLDER/t.parquet is not a Parquet file, but empty");
        assert_eq!(
            said("t.txt", b"a,b\n1,2\n"),
            "FOLDER/t.txt is not a Parquet file, but begins with \"a,b\\n1,2\\n\""
        );
        assert_eq!(
            said("t.feather", b"ARROW1\0\0abcdefg"),
            "FOLDER/t.feather is not a Parquet file, but an Arrow file"
        );
        let error = inspect(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("is not a Parquet file, but a folder"), "{error}");
    }

    #[test]
    fn columns_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        write(&path, &batch(0..1).schema(), &[batch(0..3)]).unwrap();
        let info = inspect(&path).unwrap();
        let (int, text) = (ColumnType::Int64, ColumnType::Utf8);
        check(&info, &[("n", &int), ("t", &text)], true).unwrap();
        check(&info, &[("n", &int)], false).unwrap();
        let told = check(&info, &[("n", &text), ("x", &int)], true).unwrap_err().to_string();
        assert_eq!(
            told,
            "column `n` is int64, declared utf8; column `x` (int64) is missing; column `t` is not declared"
        );
    }
}
