//! Canonical JSON: the one byte form of a value that keys are digested over.
//!
//! Objects are sorted by the bytes of their names, there is no white space, and floats are the shortest text that
//! reads back to the same bits, so that equal values are equal bytes whatever wrote them.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::Value;

/// The canonical bytes of a value.
pub fn to_bytes(value: &Value) -> Vec<u8> {
    serde_json::to_vec(&Canonical(value)).expect("values are always writable to memory")
}

/// A value whose objects are written in canonical order.
struct Canonical<'a>(&'a Value);

impl Serialize for Canonical<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Array(items) => serializer.collect_seq(items.iter().map(Canonical)),
            Value::Object(fields) => {
                let mut sorted: Vec<(&String, &Value)> = fields.iter().collect();
                sorted.sort_unstable_by_key(|(name, _)| name.as_bytes());
                let mut map = serializer.serialize_map(Some(sorted.len()))?;
                for (name, field) in sorted {
                    map.serialize_entry(name, &Canonical(field))?;
                }
                map.end()
            }
            scalar => scalar.serialize(serializer),
        }
    }
}

/// Writes a field in canonical order: for `serialize_with`.
pub fn serialize<S: Serializer>(value: &impl Serialize, serializer: S) -> Result<S::Ok, S::Error> {
    let value = serde_json::to_value(value).map_err(serde::ser::Error::custom)?;
    Canonical(&value).serialize(serializer)
}

/// The same, without a copy, of a value that may be absent.
pub fn optional<S: Serializer>(value: &Option<Value>, serializer: S) -> Result<S::Ok, S::Error> {
    value.as_ref().map(Canonical).serialize(serializer)
}

/// The same of named values.
pub fn map<S: Serializer>(values: &BTreeMap<String, Value>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(values.iter().map(|(name, value)| (name, Canonical(value))))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            prop::num::f64::NORMAL.prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::btree_map(".{0,5}", inner, 0..5)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    pub(crate) fn reversed(value: &Value) -> Value {
        match value {
            Value::Array(items) => items.iter().map(reversed).collect(),
            Value::Object(fields) => {
                Value::Object(fields.iter().rev().map(|(name, field)| (name.clone(), reversed(field))).collect())
            }
            other => other.clone(),
        }
    }

    proptest! {
        #[test]
        fn the_order_of_fields_does_not_show(value in json()) {
            prop_assert_eq!(to_bytes(&reversed(&value)), to_bytes(&value));
        }

        #[test]
        fn it_reads_back_to_the_same_value(value in json()) {
            let bytes = to_bytes(&value);
            let back: Value = serde_json::from_slice(&bytes).unwrap();
            prop_assert_eq!(&back, &value);
            prop_assert_eq!(to_bytes(&back), bytes);
        }

        #[test]
        fn different_values_are_different_bytes(a in json(), b in json()) {
            prop_assert_eq!(a == b, to_bytes(&a) == to_bytes(&b));
        }
    }

    #[test]
    fn integers_and_floats_differ() {
        let value = serde_json::json!({"b": 1, "a": [1.0, null, "é\n"], "": true});
        assert_eq!(to_bytes(&value), "{\"\":true,\"a\":[1.0,null,\"é\\n\"],\"b\":1}".as_bytes());
    }
}
