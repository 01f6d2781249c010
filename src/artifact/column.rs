//! The logical bytes of table values, and the digests of columns, tables and rows over them.
//!
//! Physical layout never shows: every array is first cast to one canonical layout of its logical type (`int32` to
//! `int64`, dictionaries and views to plain values), so chunking, encodings and writer versions change no digest.
//! No cast loses a bit: two columns that differ in a value must never share a digest. Where a wider layout would not
//! hold every value (`uint64`, the units of times) the type keeps a name and a layout of its own.

use arrow::array::{Array, ArrayRef, AsArray, StructArray};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{
    DataType, Decimal128Type, DurationMicrosecondType, DurationMillisecondType, DurationNanosecondType,
    DurationSecondType, Field, Fields, Float64Type, Int64Type, TimeUnit, UInt64Type,
};
use cuda_agent_protocol::ColumnType;

use crate::digest::{Digest, context};

/// A type that has no place in tables here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "columns of type {0} are not supported (bool, integers, floats, text, binary, dates, times, decimal128, lists and structs are)"
)]
pub struct UnsupportedType(pub String);

/// The name of a type in digests and records.
pub fn type_name(data_type: &DataType) -> Result<String, UnsupportedType> {
    use DataType as T;
    Ok(match data_type {
        T::Null => "null".into(),
        T::Boolean => "bool".into(),
        T::Int8 | T::Int16 | T::Int32 | T::Int64 | T::UInt8 | T::UInt16 | T::UInt32 => "int64".into(),
        T::UInt64 => "uint64".into(),
        T::Float16 | T::Float32 | T::Float64 => "float64".into(),
        T::Utf8 | T::LargeUtf8 | T::Utf8View => "utf8".into(),
        T::Binary | T::LargeBinary | T::BinaryView | T::FixedSizeBinary(_) => "binary".into(),
        T::Dictionary(_, value) => type_name(value)?,
        T::List(item) | T::LargeList(item) | T::FixedSizeList(item, _) | T::ListView(item) => {
            format!("list<{}>", type_name(item.data_type())?)
        }
        T::Struct(fields) => {
            let fields: Result<Vec<String>, _> =
                fields.iter().map(|field| Ok(format!("{}:{}", field.name(), type_name(field.data_type())?))).collect();
            format!("struct<{}>", fields?.join(","))
        }
        T::Date32 => "date".into(),
        T::Date64 => "date64".into(),
        T::Timestamp(unit, Some(zone)) => format!("timestamp[{},{zone}]", unit_name(*unit)),
        T::Timestamp(unit, None) => format!("timestamp[{}]", unit_name(*unit)),
        T::Time32(unit) | T::Time64(unit) => format!("time[{}]", unit_name(*unit)),
        T::Duration(unit) => format!("duration[{}]", unit_name(*unit)),
        T::Decimal128(precision, scale) => format!("decimal128({precision},{scale})"),
        other => return Err(UnsupportedType(other.to_string())),
    })
}

fn unit_name(unit: TimeUnit) -> &'static str {
    match unit {
        TimeUnit::Second => "s",
        TimeUnit::Millisecond => "ms",
        TimeUnit::Microsecond => "us",
        TimeUnit::Nanosecond => "ns",
    }
}

/// The one layout in which values of a logical type are encoded.
fn canonical_type(data_type: &DataType) -> Result<DataType, UnsupportedType> {
    use DataType as T;
    let renamed = |field: &Field| -> Result<Field, UnsupportedType> {
        Ok(Field::new(field.name(), canonical_type(field.data_type())?, true))
    };
    Ok(match data_type {
        T::Null => T::Null,
        T::Boolean => T::Boolean,
        T::Float16 | T::Float32 | T::Float64 => T::Float64,
        T::Utf8 | T::LargeUtf8 | T::Utf8View => T::LargeUtf8,
        T::Binary | T::LargeBinary | T::BinaryView | T::FixedSizeBinary(_) => T::LargeBinary,
        T::Dictionary(_, value) => canonical_type(value)?,
        T::List(item) | T::LargeList(item) | T::FixedSizeList(item, _) | T::ListView(item) => {
            T::LargeList(Field::new("item", canonical_type(item.data_type())?, true).into())
        }
        T::Struct(fields) => {
            let fields: Result<Vec<Field>, _> = fields.iter().map(|field| renamed(field)).collect();
            T::Struct(Fields::from(fields?))
        }
        T::Date32 | T::Date64 | T::Timestamp(..) | T::Time32(_) | T::Time64(_) | T::Duration(_) | T::UInt64 => {
            data_type.clone()
        }
        T::Decimal128(precision, scale) => T::Decimal128(*precision, *scale),
        T::Int8 | T::Int16 | T::Int32 | T::Int64 | T::UInt8 | T::UInt16 | T::UInt32 => T::Int64,
        other => return Err(UnsupportedType(other.to_string())),
    })
}

/// The layout in which programs get values of a logical type: the canonical one, but with the 32-bit offsets that
/// readers expect.
pub fn plain_type(data_type: &DataType) -> Result<DataType, UnsupportedType> {
    fn plain(canonical: DataType) -> DataType {
        let renamed = |field: &Field| Field::new(field.name(), plain(field.data_type().clone()), true);
        match canonical {
            DataType::LargeUtf8 => DataType::Utf8,
            DataType::LargeBinary => DataType::Binary,
            DataType::LargeList(item) => DataType::List(renamed(&item).into()),
            DataType::Struct(fields) => DataType::Struct(fields.iter().map(|field| renamed(field)).collect()),
            other => other,
        }
    }
    Ok(plain(canonical_type(data_type)?))
}

/// The Arrow type that a declared column is stored as.
pub fn arrow_type(column: &ColumnType) -> DataType {
    match column {
        ColumnType::Bool => DataType::Boolean,
        ColumnType::Int64 => DataType::Int64,
        ColumnType::Float64 => DataType::Float64,
        ColumnType::Utf8 => DataType::Utf8,
        ColumnType::Binary => DataType::Binary,
        ColumnType::List(item) => DataType::List(Field::new("item", arrow_type(item), true).into()),
        ColumnType::Struct(fields) => {
            DataType::Struct(fields.iter().map(|(name, column)| Field::new(name, arrow_type(column), true)).collect())
        }
    }
}

/// An array in the canonical layout of its type.
pub fn canonical(array: &ArrayRef) -> Result<ArrayRef, UnsupportedType> {
    let target = canonical_type(array.data_type())?;
    if *array.data_type() == target {
        return Ok(array.clone());
    }
    // A "safe" cast would make a null of what does not fit.
    let exact = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(array, &target, &exact)
        .map_err(|error| UnsupportedType(format!("{} ({error})", array.data_type())))
}

/// Appends the encoding of one value of a canonical array.
pub fn encode(array: &ArrayRef, index: usize, out: &mut Vec<u8>) {
    if array.is_null(index) || *array.data_type() == DataType::Null {
        out.push(0);
        return;
    }
    out.push(1);
    match array.data_type() {
        DataType::Boolean => out.push(u8::from(array.as_boolean().value(index))),
        DataType::Int64 => out.extend(array.as_primitive::<Int64Type>().value(index).to_le_bytes()),
        DataType::Float64 => {
            let value = array.as_primitive::<Float64Type>().value(index);
            let bits = if value.is_nan() { f64::NAN.to_bits() & !(1 << 63) } else { value.to_bits() };
            out.extend(bits.to_le_bytes());
        }
        DataType::LargeUtf8 => bytes(array.as_string::<i64>().value(index).as_bytes(), out),
        DataType::LargeBinary => bytes(array.as_binary::<i64>().value(index), out),
        DataType::LargeList(_) => {
            let items = array.as_list::<i64>().value(index);
            out.extend((items.len() as u64).to_le_bytes());
            (0..items.len()).for_each(|item| encode(&items, item, out));
        }
        DataType::Struct(_) => {
            let fields: &StructArray = array.as_struct();
            fields.columns().iter().for_each(|field| encode(field, index, out));
        }
        DataType::Decimal128(..) => out.extend(array.as_primitive::<Decimal128Type>().value(index).to_le_bytes()),
        DataType::UInt64 => out.extend(array.as_primitive::<UInt64Type>().value(index).to_le_bytes()),
        // Dates, times and durations are integers under a name of their own.
        _ => out.extend(temporal(array, index).to_le_bytes()),
    }
}

/// A date, time or duration as the integer that it is in its own unit.
#[expect(clippy::useless_conversion, reason = "the macro makes an arm for each type, and some are i64 already")]
fn temporal(array: &ArrayRef, index: usize) -> i64 {
    arrow::array::downcast_temporal_array!(
        array => i64::from(array.value(index)),
        DataType::Duration(unit) => match unit {
            TimeUnit::Second => array.as_primitive::<DurationSecondType>().value(index),
            TimeUnit::Millisecond => array.as_primitive::<DurationMillisecondType>().value(index),
            TimeUnit::Microsecond => array.as_primitive::<DurationMicrosecondType>().value(index),
            TimeUnit::Nanosecond => array.as_primitive::<DurationNanosecondType>().value(index),
        },
        other => unreachable!("{other} is no canonical type"),
    )
}

fn bytes(value: &[u8], out: &mut Vec<u8>) {
    out.extend((value.len() as u64).to_le_bytes());
    out.extend(value);
}

/// Digests one column, chunk by chunk.
pub struct ColumnHasher {
    hasher: blake3::Hasher,
    buffer: Vec<u8>,
}

impl ColumnHasher {
    /// For a column of this type.
    pub fn new(data_type: &DataType) -> Result<Self, UnsupportedType> {
        let mut hasher = Digest::hasher(context::COLUMN);
        hasher.update(type_name(data_type)?.as_bytes());
        hasher.update(&[0]);
        Ok(Self { hasher, buffer: Vec::with_capacity(1 << 16) })
    }

    /// Adds the values of the next chunk.
    pub fn update(&mut self, array: &ArrayRef) -> Result<(), UnsupportedType> {
        let array = canonical(array)?;
        for index in 0..array.len() {
            encode(&array, index, &mut self.buffer);
            if self.buffer.len() > (1 << 16) - 4096 {
                self.hasher.update(&self.buffer);
                self.buffer.clear();
            }
        }
        Ok(())
    }

    /// The digest.
    pub fn finish(mut self) -> Digest {
        self.hasher.update(&self.buffer);
        Digest::finish(&self.hasher)
    }
}

/// The digest of a table from those of its columns.
pub fn table_digest(rows: u64, columns: &[(String, String, Digest)]) -> Digest {
    let value = serde_json::json!({ "rows": rows, "columns": columns });
    Digest::keyed(context::TABLE, &crate::key::canonical::to_bytes(&value))
}

/// Digests of every row over some columns, given as name and array.
pub fn row_digests(columns: &[(&str, ArrayRef)]) -> Result<Vec<Digest>, UnsupportedType> {
    let mut sorted: Vec<(Vec<u8>, ArrayRef)> = Vec::with_capacity(columns.len());
    let mut order: Vec<&(&str, ArrayRef)> = columns.iter().collect();
    order.sort_unstable_by_key(|(name, _)| *name);
    for (name, array) in order {
        let mut prefix = Vec::new();
        prefix.extend(name.as_bytes());
        prefix.push(0);
        prefix.extend(type_name(array.data_type())?.as_bytes());
        prefix.push(0);
        sorted.push((prefix, canonical(array)?));
    }
    let rows = sorted.first().map_or(0, |(_, array)| array.len());
    let mut buffer = Vec::new();
    let digests = (0..rows).map(|row| {
        buffer.clear();
        for (prefix, array) in &sorted {
            buffer.extend(prefix);
            encode(array, row, &mut buffer);
        }
        Digest::keyed(context::ROW, &buffer)
    });
    Ok(digests.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::{
        Date32Array, Date64Array, Decimal256Array, DictionaryArray, DurationMillisecondArray, DurationNanosecondArray,
        Float32Array, Float64Array, Int32Array, Int64Array, LargeStringArray, ListArray, StringArray, StringViewArray,
        Time32SecondArray, Time64NanosecondArray, TimestampMillisecondArray, TimestampNanosecondArray, UInt32Array,
        UInt64Array,
    };
    use arrow::datatypes::{Int32Type, Int64Type};
    use proptest::prelude::*;
    use std::sync::Arc;

    fn digest(chunks: &[ArrayRef]) -> Digest {
        let mut hasher = ColumnHasher::new(chunks[0].data_type()).unwrap();
        chunks.iter().for_each(|chunk| hasher.update(chunk).unwrap());
        hasher.finish()
    }

    #[test]
    fn layouts_do_not_show() {
        let plain: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None, Some("bb"), Some("a")]));
        let large: ArrayRef = Arc::new(LargeStringArray::from(vec![Some("a"), None, Some("bb"), Some("a")]));
        let view: ArrayRef = Arc::new(StringViewArray::from(vec![Some("a"), None, Some("bb"), Some("a")]));
        let coded: DictionaryArray<Int32Type> = vec![Some("a"), None, Some("bb"), Some("a")].into_iter().collect();
        let expected = digest(std::slice::from_ref(&plain));
        for other in [large, view, Arc::new(coded) as ArrayRef] {
            assert_eq!(digest(&[other]), expected);
        }
        assert_eq!(digest(&[plain.slice(0, 1), plain.slice(1, 3)]), expected);
        let narrow: ArrayRef = Arc::new(Int32Array::from(vec![1, -2]));
        let wide: ArrayRef = Arc::new(Int64Array::from(vec![1, -2]));
        assert_eq!(digest(&[narrow]), digest(std::slice::from_ref(&wide)));
        let single: ArrayRef = Arc::new(Float32Array::from(vec![1.0, -2.0]));
        assert_ne!(digest(&[single]), digest(&[wide]));
    }

    #[test]
    fn null_empty_and_nan_are_told_apart() {
        let texts = |value: Option<&str>| -> Digest { digest(&[Arc::new(StringArray::from(vec![value])) as ArrayRef]) };
        assert_ne!(texts(None), texts(Some("")));
        let floats = |value: f64| digest(&[Arc::new(Float64Array::from(vec![value])) as ArrayRef]);
        assert_eq!(floats(f64::NAN), floats(-f64::NAN));
        assert_ne!(floats(0.0), floats(-0.0));
    }

    #[test]
    fn nested_and_temporal_values_have_digests() {
        let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(vec![
            Some(vec![Some(1), None]),
            None,
            Some(vec![]),
        ]));
        assert_eq!(type_name(lists.data_type()).unwrap(), "list<int64>");
        assert_ne!(digest(&[lists.slice(1, 1)]), digest(&[lists.slice(2, 1)]));
        let times: ArrayRef = Arc::new(TimestampMillisecondArray::from(vec![1, 2]));
        assert_eq!(type_name(times.data_type()).unwrap(), "timestamp[ms]");
        assert_ne!(digest(&[times.slice(0, 1)]), digest(&[times.slice(1, 1)]));
    }

    /// Two values, their type's name, and that the digests of neither columns nor rows are the same.
    fn tells_apart(name: &str, array: ArrayRef) {
        assert_eq!(type_name(array.data_type()).unwrap(), name);
        assert_eq!(array.null_count(), 0);
        assert_ne!(digest(&[array.slice(0, 1)]), digest(&[array.slice(1, 1)]), "{name}");
        let rows = row_digests(&[("x", array.clone())]).unwrap();
        assert_ne!(rows[0], rows[1], "{name}");
        // In lists too, which are cast as a whole.
        let offsets = arrow::buffer::OffsetBuffer::from_lengths([1, 1]);
        let item = Arc::new(Field::new("element", array.data_type().clone(), true));
        let nested: ArrayRef = Arc::new(ListArray::new(item, offsets, array, None));
        let rows = row_digests(&[("x", nested)]).unwrap();
        assert_ne!(rows[0], rows[1], "list<{name}>");
    }

    #[test]
    fn no_bit_of_a_value_is_lost() {
        tells_apart("uint64", Arc::new(UInt64Array::from(vec![u64::MAX, u64::MAX - 1])));
        tells_apart("int64", Arc::new(UInt32Array::from(vec![u32::MAX, u32::MAX - 1])));
        tells_apart("timestamp[ns]", Arc::new(TimestampNanosecondArray::from(vec![1, 2])));
        let zoned = TimestampNanosecondArray::from(vec![1, 2]).with_timezone("UTC");
        tells_apart("timestamp[ns,UTC]", Arc::new(zoned));
        tells_apart("timestamp[ms]", Arc::new(TimestampMillisecondArray::from(vec![i64::MAX, i64::MAX - 1])));
        tells_apart("time[ns]", Arc::new(Time64NanosecondArray::from(vec![1, 2])));
        tells_apart("time[s]", Arc::new(Time32SecondArray::from(vec![1, 2])));
        tells_apart("duration[ns]", Arc::new(DurationNanosecondArray::from(vec![1, 2])));
        tells_apart("duration[ms]", Arc::new(DurationMillisecondArray::from(vec![i64::MAX, i64::MAX - 1])));
        tells_apart("date64", Arc::new(Date64Array::from(vec![1, 2])));
        tells_apart("date", Arc::new(Date32Array::from(vec![1, 2])));
    }

    /// A unit is part of the type: two of one unit are not two of another.
    #[test]
    fn units_tell_types_apart() {
        let milliseconds: ArrayRef = Arc::new(TimestampMillisecondArray::from(vec![2]));
        let nanoseconds: ArrayRef = Arc::new(TimestampNanosecondArray::from(vec![2]));
        assert_ne!(digest(&[milliseconds]), digest(&[nanoseconds]));
    }

    #[test]
    fn the_bytes_of_integers_and_times_stay() {
        let encoded = |array: ArrayRef| {
            let mut bytes = Vec::new();
            encode(&canonical(&array).unwrap(), 0, &mut bytes);
            bytes
        };
        let expected = |value: i64| [&[1][..], &value.to_le_bytes()].concat();
        assert_eq!(encoded(Arc::new(UInt64Array::from(vec![u64::MAX]))), expected(-1));
        assert_eq!(encoded(Arc::new(UInt32Array::from(vec![7]))), expected(7));
        assert_eq!(encoded(Arc::new(Date32Array::from(vec![-7]))), expected(-7));
        assert_eq!(encoded(Arc::new(Date64Array::from(vec![86_400_001]))), expected(86_400_001));
        assert_eq!(encoded(Arc::new(Time32SecondArray::from(vec![7]))), expected(7));
        assert_eq!(encoded(Arc::new(DurationNanosecondArray::from(vec![7]))), expected(7));
    }

    #[test]
    fn other_types_are_refused_by_name() {
        let wide: ArrayRef = Arc::new(Decimal256Array::from(vec![arrow::datatypes::i256::ONE]));
        let message = canonical(&wide).unwrap_err().to_string();
        assert!(message.contains("Decimal256") && message.contains("not supported"), "{message}");
        assert!(type_name(wide.data_type()).is_err());
    }

    /// The bytes of a column are a format.
    #[test]
    fn the_digest_of_a_known_column_stays() {
        let array: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None]));
        let mut expected = blake3::Hasher::new_derive_key("cuda-agent column v1");
        expected.update(b"utf8\0\x01\x01\0\0\0\0\0\0\0a\0");
        assert_eq!(digest(&[array]).0, *expected.finalize().as_bytes());
    }

    proptest! {
        #[test]
        fn row_digests_depend_on_content_alone(values in prop::collection::vec((any::<i64>(), ".{0,4}"), 1..20)) {
            let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(values.iter().map(|v| v.0)));
            let texts: ArrayRef = Arc::new(StringArray::from_iter_values(values.iter().map(|v| v.1.as_str())));
            let digests = row_digests(&[("n", numbers.clone()), ("t", texts.clone())]).unwrap();
            prop_assert_eq!(&row_digests(&[("t", texts), ("n", numbers)]).unwrap(), &digests);
            for (i, a) in values.iter().enumerate() {
                for (j, b) in values.iter().enumerate() {
                    prop_assert_eq!(a == b, digests[i] == digests[j]);
                }
            }
        }
    }
}
