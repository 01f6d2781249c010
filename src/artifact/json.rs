//! Between Arrow rows and JSON: what by-row programs read, and what programs write as JSON lines.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Float64Type, Int64Type, Schema, UInt64Type};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use cuda_agent_protocol::ColumnType;
use serde_json::{Map, Value};

use super::column::{arrow_type, canonical};
use super::decode;
pub use super::decode::Misfit;

/// One value of a canonical array (see [`canonical`]) as JSON: binary as hexadecimal, a non-finite float as null.
pub fn value_at(array: &ArrayRef, index: usize) -> Value {
    if array.is_null(index) {
        return Value::Null;
    }
    match array.data_type() {
        DataType::Boolean => array.as_boolean().value(index).into(),
        DataType::Int64 => array.as_primitive::<Int64Type>().value(index).into(),
        DataType::UInt64 => array.as_primitive::<UInt64Type>().value(index).into(),
        DataType::Float64 => array.as_primitive::<Float64Type>().value(index).into(),
        DataType::LargeUtf8 => array.as_string::<i64>().value(index).into(),
        DataType::LargeBinary => {
            array.as_binary::<i64>().value(index).iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
        }
        DataType::LargeList(_) => {
            let items = array.as_list::<i64>().value(index);
            (0..items.len()).map(|item| value_at(&items, item)).collect()
        }
        DataType::Struct(fields) => {
            let columns = array.as_struct().columns();
            Value::Object(
                fields
                    .iter()
                    .zip(columns)
                    .map(|(field, column)| (field.name().clone(), value_at(column, index)))
                    .collect(),
            )
        }
        _ => text_of(array, index).into(),
    }
}

/// Dates, times and decimals as text. What has no text of its own is told by its number, never left out.
fn text_of(array: &ArrayRef, index: usize) -> String {
    if let Some(text) = formatted(array, index) {
        return text;
    }
    let integer = match cast(&array.slice(index, 1), &DataType::Int64) {
        Ok(integer) => integer,
        Err(error) => return error.to_string(),
    };
    // Names of time zones are not known here, but the value itself counts from 1970 in UTC.
    if let DataType::Timestamp(unit, Some(_)) = array.data_type()
        && let Ok(plain) = cast(&integer, &DataType::Timestamp(*unit, None))
        && let Some(text) = formatted(&plain, 0)
    {
        return format!("{text}Z");
    }
    integer.as_primitive::<Int64Type>().value(0).to_string()
}

/// The text of a value, unless it has none (a time beyond the calendar, a zone that is not known).
fn formatted(array: &ArrayRef, index: usize) -> Option<String> {
    let strict = FormatOptions::new().with_display_error(false);
    ArrayFormatter::try_new(array, &strict).ok()?.value(index).try_to_string().ok()
}

/// Rows of a batch as JSON objects.
pub fn rows(batch: &RecordBatch) -> Vec<Map<String, Value>> {
    let schema = batch.schema();
    let columns: Vec<(&str, ArrayRef)> = schema
        .fields()
        .iter()
        .zip(batch.columns())
        .map(|(field, column)| (field.name().as_str(), canonical(column).unwrap_or_else(|_| column.clone())))
        .collect();
    (0..batch.num_rows())
        .map(|row| columns.iter().map(|(name, column)| ((*name).to_owned(), value_at(column, row))).collect())
        .collect()
}

/// Reads one JSON object. An integer of more than 64 bits is refused: the reader would take the nearest float for it.
pub fn object(text: &str) -> Result<Map<String, Value>, String> {
    if let Some(integer) = long_integer(text) {
        return Err(format!("{integer} is an integer of more than 64 bits; write it as text"));
    }
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// An integer in JSON that neither `i64` nor `u64` holds.
pub fn long_integer(text: &str) -> Option<&str> {
    const SAFE_DIGITS: usize = 18;
    let bytes = text.as_bytes();
    let is_number = |byte: &u8| byte.is_ascii_digit() || b"+-.eE".contains(byte);
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'"' {
            at += 1;
            while at < bytes.len() && bytes[at] != b'"' {
                at += if bytes[at] == b'\\' { 2 } else { 1 };
            }
        } else if bytes[at] == b'-' || bytes[at].is_ascii_digit() {
            let length = bytes[at..].iter().take_while(|byte| is_number(byte)).count();
            let number = text.get(at..at + length)?;
            let is_integer = number.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit());
            if is_integer && length > SAFE_DIGITS && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
                return Some(number);
            }
            at += length;
            continue;
        }
        at += 1;
    }
    None
}

/// The Arrow schema of declared columns.
pub fn schema<'a>(columns: impl IntoIterator<Item = (&'a str, &'a ColumnType)>) -> Arc<Schema> {
    let fields: Vec<Field> =
        columns.into_iter().map(|(name, column)| Field::new(name, arrow_type(column), true)).collect();
    Arc::new(Schema::new(fields))
}

/// JSON objects as one batch of a schema. An unknown field, or a value that its column does not hold exactly, is an
/// error that names it.
pub fn to_batch(rows: &[Map<String, Value>], schema: &Arc<Schema>) -> Result<RecordBatch, Misfit> {
    let columns = decode::columns(rows.iter(), schema.fields())?;
    let options = RecordBatchOptions::new().with_row_count(Some(rows.len()));
    let batch = RecordBatch::try_new_with_options(schema.clone(), columns, &options);
    batch.map_err(|error| Misfit { row: 0, place: String::new(), problem: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn rows_go_there_and_back() {
        let column = |text: &str| text.parse::<ColumnType>().unwrap();
        let types = [
            ("a", column("int64")),
            ("b", column("list<float64>")),
            ("c", column("struct<x:utf8,y:bool>")),
            ("d", column("binary")),
        ];
        let schema = schema(types.iter().map(|(name, column)| (*name, column)));
        let objects = vec![
            object(json!({"a": 1, "b": [1.5, null], "c": {"x": "é", "y": true}, "d": "00ff"})),
            object(json!({"a": null, "b": [], "c": null, "d": null})),
        ];
        let batch = to_batch(&objects, &schema).unwrap();
        assert_eq!(rows(&batch), objects);
    }

    #[test]
    fn values_without_a_declared_type_are_shown_whole() {
        use arrow::array::{DurationNanosecondArray, TimestampNanosecondArray, TimestampSecondArray, UInt64Array};
        let large: ArrayRef = Arc::new(UInt64Array::from(vec![u64::MAX]));
        assert_eq!(value_at(&large, 0), json!(u64::MAX));
        let time = TimestampNanosecondArray::from(vec![0, 1]);
        let plain: ArrayRef = Arc::new(time.clone());
        assert_eq!(value_at(&plain, 1), json!("1970-01-01T00:00:00.000000001"));
        let zoned: ArrayRef = Arc::new(time.with_timezone("Europe/Berlin"));
        assert_eq!(value_at(&zoned, 1), json!("1970-01-01T00:00:00.000000001Z"));
        let distant: ArrayRef = Arc::new(TimestampSecondArray::from(vec![i64::MAX]));
        assert_eq!(value_at(&distant, 0), json!(i64::MAX.to_string()));
        let long: ArrayRef = Arc::new(DurationNanosecondArray::from(vec![1, 2]));
        assert_ne!(value_at(&long, 0), value_at(&long, 1));
    }

    #[test]
    fn wrong_values_are_named() {
        let schema = schema([("a", &ColumnType::Int64)]);
        assert!(to_batch(&[object(json!({"a": "x"}))], &schema).is_err());
        let message = to_batch(&[object(json!({"b": 1}))], &schema).unwrap_err().to_string();
        assert_eq!(message, "column `b`: it is not declared");
    }

    #[test]
    fn integers_that_json_readers_round_are_refused() {
        assert_eq!(long_integer("{\"a\": 18446744073709551616}"), Some("18446744073709551616"));
        assert_eq!(long_integer("[-9223372036854775809]"), Some("-9223372036854775809"));
        let fine = "{\"18446744073709551616\": \"\\\"99999999999999999999\", \"b\": [18446744073709551615, \
                    -9223372036854775808, 1e30, 123456789012345678901.5, 0.1000000000000000055511151231257827]}";
        assert_eq!(long_integer(fine), None);
        let read = super::object;
        assert!(read("{\"a\": 18446744073709551616}").is_err() && read("{\"a\": 1}").is_ok());
    }

    #[test]
    fn no_rows_make_an_empty_batch() {
        assert_eq!(to_batch(&[], &schema([("a", &ColumnType::Utf8)])).unwrap().num_rows(), 0);
    }
}
