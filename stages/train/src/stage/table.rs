//! Columns of a table of tasks.

use std::fs::File;
use std::path::Path;

use arrow::array::{Array, Float64Array, StringArray};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use cuda_agent_protocol::ProgramError;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// What a row holds of the columns that were asked for.
pub struct Values {
    /// Of the text columns, in the order asked for.
    pub texts: Vec<String>,
    /// Of the numeric column; 0 where none was asked for.
    pub number: f64,
}

/// Reads text columns, and a numeric one unless its name is empty.
pub fn read(path: &Path, texts: &[&str], number: &str) -> Result<Vec<Values>, ProgramError> {
    let complain = |error: &dyn std::fmt::Display| ProgramError::input(format!("{}: {error}", path.display()));
    let file = File::open(path).map_err(|error| complain(&error))?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).and_then(|builder| builder.build());
    let mut rows = Vec::new();
    for batch in reader.map_err(|error| complain(&error))? {
        let batch = batch.map_err(|error| complain(&error))?;
        let column = |name: &str, kind: &DataType| {
            let missing = || ProgramError::input(format!("the table of tasks has no column `{name}`"));
            let column = batch.column_by_name(name).ok_or_else(missing)?;
            cast(column, kind).map_err(|error| ProgramError::input(format!("column `{name}`: {error}")))
        };
        let texts = texts.iter().map(|name| column(name, &DataType::Utf8)).collect::<Result<Vec<_>, _>>()?;
        let numbers = if number.is_empty() { None } else { Some(column(number, &DataType::Float64)?) };
        for row in 0..batch.num_rows() {
            let text = |column: &arrow::array::ArrayRef| {
                let column = column.as_any().downcast_ref::<StringArray>().expect("it was cast");
                column.is_valid(row).then(|| column.value(row).to_owned())
            };
            let number = numbers.as_ref().map(|column| {
                let column = column.as_any().downcast_ref::<Float64Array>().expect("it was cast");
                // What has no number is taken for the hardest.
                if column.is_valid(row) { column.value(row) } else { f64::INFINITY }
            });
            let texts: Option<Vec<String>> = texts.iter().map(text).collect();
            let texts = texts
                .ok_or_else(|| ProgramError::input(format!("row {} of the tasks has an empty cell", rows.len())))?;
            rows.push(Values { texts, number: number.unwrap_or(0.0) });
        }
    }
    Ok(rows)
}
