//! JSON values as Arrow arrays, each value exactly or not at all.
//!
//! Readers of JSON take 1.5 for 1 where an integer is declared, `"7"` for 7, and the nearest float for an integer that
//! no float is. A result would then be other than what its program wrote, and nobody would be told.

use std::fmt;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryArray, BooleanArray, Float64Array, Int64Array, ListArray, NullArray, StringArray, StructArray,
};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, FieldRef, Fields};
use serde_json::Value;

use super::column::type_name;

/// A value that its column cannot hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Misfit {
    /// The number of the object, from 0.
    pub row: usize,
    /// The column, and where in it: `a`, `a[2].x`.
    pub place: String,
    /// What is wrong with it.
    pub problem: String,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column `{}`: {}", self.place, self.problem)
    }
}

/// A value, and the row and the place that it is told by. Absent is null.
#[derive(Clone, Copy)]
struct Cell<'a> {
    row: usize,
    value: Option<&'a Value>,
}

/// The columns of some objects, each given with the number of its row.
pub fn columns<'a>(
    objects: impl Iterator<Item = &'a serde_json::Map<String, Value>> + Clone,
    fields: &Fields,
) -> Result<Vec<ArrayRef>, Misfit> {
    let rows = || objects.clone().enumerate();
    for (row, object) in rows() {
        refuse_strangers(row, "", object, fields)?;
    }
    let column = |field: &FieldRef| {
        let cells: Vec<Cell> =
            rows().map(|(row, object)| Cell { row, value: present(object.get(field.name())) }).collect();
        array(&cells, field.name(), field.data_type())
    };
    fields.iter().map(column).collect()
}

fn present(value: Option<&Value>) -> Option<&Value> {
    value.filter(|value| !value.is_null())
}

fn refuse_strangers(
    row: usize,
    place: &str,
    object: &serde_json::Map<String, Value>,
    fields: &Fields,
) -> Result<(), Misfit> {
    match object.keys().find(|name| fields.find(name).is_none()) {
        None => Ok(()),
        Some(name) => {
            let place = if place.is_empty() { name.clone() } else { format!("{place}.{name}") };
            Err(Misfit { row, place, problem: "it is not declared".to_owned() })
        }
    }
}

fn array(cells: &[Cell], place: &str, data_type: &DataType) -> Result<ArrayRef, Misfit> {
    Ok(match data_type {
        DataType::Boolean => {
            Arc::new(values(cells, place, data_type, Value::as_bool)?.into_iter().collect::<BooleanArray>())
        }
        DataType::Int64 => {
            Arc::new(values(cells, place, data_type, exact_integer)?.into_iter().collect::<Int64Array>())
        }
        DataType::Float64 => {
            Arc::new(values(cells, place, data_type, exact_float)?.into_iter().collect::<Float64Array>())
        }
        DataType::Utf8 => {
            let texts: Vec<Option<&str>> = values(cells, place, data_type, Value::as_str)?;
            refuse_too_much(place, texts.iter().map(|text| text.map_or(0, str::len)))?;
            Arc::new(StringArray::from(texts))
        }
        DataType::Binary => {
            let bytes: Vec<Option<Vec<u8>>> = values(cells, place, data_type, from_hexadecimal)?;
            refuse_too_much(place, bytes.iter().map(|bytes| bytes.as_ref().map_or(0, Vec::len)))?;
            Arc::new(bytes.iter().map(|bytes| bytes.as_deref()).collect::<BinaryArray>())
        }
        DataType::Null => {
            values(cells, place, data_type, |_| None::<()>)?;
            Arc::new(NullArray::new(cells.len()))
        }
        DataType::List(item) => Arc::new(lists(cells, place, data_type, item)?),
        DataType::Struct(fields) => Arc::new(structs(cells, place, data_type, fields)?),
        other => {
            let problem = format!("{other} cannot be read from JSON");
            return Err(Misfit { row: 0, place: place.to_owned(), problem });
        }
    })
}

/// Each cell's value by `read`, which knows no value that the type does not hold.
fn values<'a, T: 'a>(
    cells: &[Cell<'a>],
    place: &str,
    data_type: &DataType,
    read: impl Fn(&'a Value) -> Option<T>,
) -> Result<Vec<Option<T>>, Misfit> {
    let one = |cell: &Cell<'a>| match cell.value {
        None => Ok(None),
        Some(value) => read(value).map(Some).ok_or_else(|| misfit(cell.row, place, value, data_type)),
    };
    cells.iter().map(one).collect()
}

fn misfit(row: usize, place: &str, value: &Value, data_type: &DataType) -> Misfit {
    let wanted = type_name(data_type).unwrap_or_else(|_| data_type.to_string());
    let problem = match (value, data_type) {
        (Value::Number(number), DataType::Int64 | DataType::Float64) => {
            format!("{number} is not a value of type {wanted}, and would have been changed")
        }
        (value, DataType::Binary) if value.is_string() => {
            format!("{} is not binary: an even number of hexadecimal digits", shown(value))
        }
        (value, _) => format!("{} is not a value of type {wanted}", shown(value)),
    };
    Misfit { row, place: place.to_owned(), problem }
}

fn shown(value: &Value) -> String {
    const MOST: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= MOST { text } else { text.chars().take(MOST - 1).chain(['…']).collect() }
}

/// Numbers with a fraction of zero are integers too, up to where floats skip integers.
fn exact_integer(value: &Value) -> Option<i64> {
    const EXACT: f64 = (1u64 << 53) as f64;
    let number = value.as_number()?;
    let whole = |float: &f64| float.fract() == 0.0 && float.abs() < EXACT;
    match number.is_f64() {
        false => number.as_i64(),
        true => number.as_f64().filter(whole).map(|float| float as i64),
    }
}

fn exact_float(value: &Value) -> Option<f64> {
    let number = value.as_number()?;
    let float = number.as_f64()?;
    let integer = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
    integer.is_none_or(|integer| float as i128 == integer).then_some(float)
}

fn from_hexadecimal(value: &Value) -> Option<Vec<u8>> {
    hex::decode(value.as_str()?).ok()
}

/// Arrow counts the bytes of a batch in 31 bits, and panics beyond them.
fn refuse_too_much(place: &str, lengths: impl Iterator<Item = usize>) -> Result<(), Misfit> {
    let mut sum = 0usize;
    for (row, length) in lengths.enumerate() {
        sum += length;
        if i32::try_from(sum).is_err() {
            let problem = "there is more than 2 GiB of it in one batch of rows".to_owned();
            return Err(Misfit { row, place: place.to_owned(), problem });
        }
    }
    Ok(())
}

fn lists(cells: &[Cell], place: &str, data_type: &DataType, item: &FieldRef) -> Result<ListArray, Misfit> {
    let lists: Vec<Option<&Vec<Value>>> = values(cells, place, data_type, Value::as_array)?;
    refuse_too_much(place, lists.iter().map(|list| list.map_or(0, Vec::len)))?;
    let lengths = lists.iter().map(|list| list.map_or(0, Vec::len));
    let mut items: Vec<Cell> = Vec::new();
    // Where an item stands is found out only when something is wrong with it.
    let mut owners: Vec<(usize, usize)> = Vec::new();
    for (cell, list) in cells.iter().zip(&lists) {
        for (number, value) in list.iter().flat_map(|list| list.iter()).enumerate() {
            items.push(Cell { row: owners.len(), value: present(Some(value)) });
            owners.push((cell.row, number));
        }
    }
    let items = array(&items, "", item.data_type()).map_err(|wrong| {
        let (row, number) = owners.get(wrong.row).copied().unwrap_or_default();
        Misfit { row, place: format!("{place}[{number}]{}", wrong.place), ..wrong }
    })?;
    let nulls = NullBuffer::from_iter(lists.iter().map(Option::is_some));
    Ok(ListArray::new(item.clone(), OffsetBuffer::from_lengths(lengths), items, Some(nulls)))
}

fn structs(cells: &[Cell], place: &str, data_type: &DataType, fields: &Fields) -> Result<StructArray, Misfit> {
    let objects: Vec<_> = values(cells, place, data_type, Value::as_object)?;
    for (cell, object) in cells.iter().zip(&objects) {
        object.map_or(Ok(()), |object| refuse_strangers(cell.row, place, object, fields))?;
    }
    let column = |field: &FieldRef| {
        let members = cells.iter().zip(&objects).map(|(cell, object)| Cell {
            row: cell.row,
            value: present(object.and_then(|object| object.get(field.name()))),
        });
        let members: Vec<Cell> = members.collect();
        array(&members, &format!("{place}.{}", field.name()), field.data_type())
    };
    let columns = fields.iter().map(column).collect::<Result<Vec<_>, _>>()?;
    let nulls = NullBuffer::from_iter(objects.iter().map(Option::is_some));
    match columns.is_empty() {
        true => Ok(StructArray::new_empty_fields(objects.len(), Some(nulls))),
        false => Ok(StructArray::new(fields.clone(), columns, Some(nulls))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::column::arrow_type;
    use crate::artifact::json::value_at;
    use arrow::datatypes::Field;
    use proptest::prelude::*;
    use serde_json::json;

    fn read(column_type: &str, values: &[Value]) -> Result<Vec<Value>, String> {
        let data_type = arrow_type(&column_type.parse().unwrap());
        let fields = Fields::from(vec![Field::new("a", data_type, true)]);
        let objects: Vec<_> = values.iter().map(|value| json!({ "a": value }).as_object().unwrap().clone()).collect();
        let columns = columns(objects.iter(), &fields).map_err(|wrong| format!("{}: {wrong}", wrong.row))?;
        let column = crate::artifact::column::canonical(&columns[0]).unwrap();
        Ok((0..values.len()).map(|row| value_at(&column, row)).collect())
    }

    #[test]
    fn a_value_that_its_type_does_not_hold_is_refused() {
        let wrong = [
            ("int64", json!(1.5)),
            ("int64", json!("7")),
            ("int64", json!(true)),
            ("int64", json!(9223372036854775808u64)),
            ("int64", json!(9007199254740993.0)),
            ("int64", json!(1e300)),
            ("float64", json!(9007199254740993u64)),
            ("float64", json!(u64::MAX)),
            ("float64", json!("1.5")),
            ("bool", json!(1)),
            ("bool", json!("true")),
            ("utf8", json!(7)),
            ("binary", json!("abc")),
            ("binary", json!("zz")),
            ("binary", json!(7)),
            ("list<int64>", json!([1, 2.5])),
            ("list<int64>", json!(1)),
            ("struct<x:int64,y:list<struct<z:bool>>>", json!({"x": 1, "y": [{"z": true}, {"z": 0}]})),
            ("struct<x:int64>", json!({"x": 1, "w": 2})),
            ("struct<x:int64>", json!([1])),
        ];
        let told: Vec<String> = wrong
            .iter()
            .map(|(column_type, value)| read(column_type, &[Value::Null, value.clone()]).unwrap_err())
            .collect();
        insta::assert_snapshot!(told.join("\n"));
    }

    #[test]
    fn a_value_that_its_type_holds_is_that_value() {
        let kept = |column_type: &str, value: Value| {
            assert_eq!(read(column_type, std::slice::from_ref(&value)), Ok(vec![value.clone()]))
        };
        kept("int64", json!(i64::MIN));
        kept("float64", json!(0.1));
        kept("float64", json!(-0.0));
        kept("utf8", json!("é\u{0}"));
        kept("binary", json!("00ff"));
        kept("list<list<int64>>", json!([[], null, [1, null]]));
        kept("struct<x:utf8,y:struct<z:bool>>", json!({"x": null, "y": {"z": true}}));
        assert_eq!(read("int64", &[json!(7.0), json!(-0.0)]), Ok(vec![json!(7), json!(0)]));
        assert_eq!(
            read("float64", &[json!(7), json!(u64::MAX - 2047)]),
            Ok(vec![json!(7.0), json!((u64::MAX - 2047) as f64)])
        );
        assert_eq!(read("binary", &[json!("00FF")]), Ok(vec![json!("00ff")]));
    }

    #[test]
    fn what_is_absent_is_null() {
        let fields = Fields::from(vec![Field::new("a", DataType::Int64, true), Field::new("b", DataType::Null, true)]);
        let objects = [json!({}), json!({"a": 1})].map(|object| object.as_object().unwrap().clone());
        let columns = columns(objects.iter(), &fields).unwrap();
        assert_eq!((columns[0].null_count(), columns[1].len()), (1, 2));
        let stranger = json!({"c": 1}).as_object().unwrap().clone();
        let wrong = super::columns([&stranger].into_iter(), &fields).unwrap_err();
        assert_eq!(wrong.to_string(), "column `c`: it is not declared");
    }

    proptest! {
        #[test]
        fn numbers_come_back_as_they_went_or_not_at_all(number in prop_oneof![
            any::<i64>().prop_map(Value::from), any::<u64>().prop_map(Value::from), any::<f64>().prop_map(Value::from),
            (-4i64..4, 0u32..64).prop_map(|(near, bits)| Value::from((1i64 << bits.min(62)).wrapping_add(near))),
        ]) {
            // Integers by all their digits, also those that are floats; anything else is a float.
            let exact = |value: &Value| match (value.as_i64(), value.as_u64(), value.as_f64()) {
                (Some(integer), ..) => (Some(i128::from(integer)), None),
                (_, Some(integer), _) => (Some(i128::from(integer)), None),
                (_, _, Some(float)) if float.fract() == 0.0 && float.abs() < 1e30 => (Some(float as i128), None),
                (_, _, float) => (None, float.map(f64::to_bits)),
            };
            for column_type in ["int64", "float64"] {
                if let Ok(back) = read(column_type, std::slice::from_ref(&number)) {
                    prop_assert_eq!(exact(&number), exact(&back[0]), "{}: {}", number, back[0]);
                }
            }
        }
    }
}
