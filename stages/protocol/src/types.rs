//! The types of ports and of table columns.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What flows between stages. `tasks` and `trajectories` are tables with agreed columns; `model` and `report` are
/// trees with an agreed content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PortType {
    /// A table of reference problems: at least a `code` column of text.
    Tasks,
    /// Any table.
    Table,
    /// A table of episodes.
    Trajectories,
    /// A Hugging Face model directory.
    Model,
    /// A file or a folder.
    Tree,
    /// A folder made to be read by people.
    Report,
}

impl PortType {
    /// Every type, in the order in which they are documented.
    pub const ALL: [PortType; 6] =
        [Self::Tasks, Self::Table, Self::Trajectories, Self::Model, Self::Tree, Self::Report];

    /// The name used in YAML.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tasks => "tasks",
            Self::Table => "table",
            Self::Trajectories => "trajectories",
            Self::Model => "model",
            Self::Tree => "tree",
            Self::Report => "report",
        }
    }

    /// Whether artifacts of this type are tables (the others are trees of files).
    pub fn is_table(self) -> bool {
        matches!(self, Self::Tasks | Self::Table | Self::Trajectories)
    }

    /// Whether an output of this type may be wired to an input of type `input`: the same type, or the general type
    /// of the same family. A `table` may feed a `tasks` port too, since its columns are checked anyway.
    pub fn feeds(self, input: PortType) -> bool {
        self == input
            || (self.is_table() && input == Self::Table)
            || (!self.is_table() && input == Self::Tree)
            || (self == Self::Table && input.is_table())
    }
}

impl fmt::Display for PortType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The type of a table's column. Physical layouts (int32, large text, dictionaries) are not told apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ColumnType {
    /// True or false.
    Bool,
    /// Any integer that fits 64 signed bits.
    Int64,
    /// A double.
    Float64,
    /// Text.
    Utf8,
    /// Bytes; hexadecimal in JSON.
    Binary,
    /// A list of one type.
    List(Box<ColumnType>),
    /// Named fields, in order.
    Struct(Vec<(String, ColumnType)>),
}

impl fmt::Display for ColumnType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool => f.write_str("bool"),
            Self::Int64 => f.write_str("int64"),
            Self::Float64 => f.write_str("float64"),
            Self::Utf8 => f.write_str("utf8"),
            Self::Binary => f.write_str("binary"),
            Self::List(item) => write!(f, "list<{item}>"),
            Self::Struct(fields) => {
                f.write_str("struct<")?;
                for (index, (name, column)) in fields.iter().enumerate() {
                    write!(f, "{}{name}:{column}", if index > 0 { "," } else { "" })?;
                }
                f.write_str(">")
            }
        }
    }
}

/// Why a column type could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a column type (bool, int64, float64, utf8, binary, list<…>, struct<name:type,…>)")]
pub struct ColumnTypeError(pub String);

impl FromStr for ColumnType {
    type Err = ColumnTypeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let compact: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let (column, rest) = parse(&compact).ok_or_else(|| ColumnTypeError(text.to_owned()))?;
        if rest.is_empty() { Ok(column) } else { Err(ColumnTypeError(text.to_owned())) }
    }
}

fn parse(text: &str) -> Option<(ColumnType, &str)> {
    if let Some(rest) = text.strip_prefix("list<") {
        let (item, rest) = parse(rest)?;
        return Some((ColumnType::List(Box::new(item)), rest.strip_prefix('>')?));
    }
    if let Some(mut rest) = text.strip_prefix("struct<") {
        let mut fields = Vec::new();
        loop {
            let (name, after) = rest.split_once(':')?;
            let named = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
            let (column, after) = parse(after)?;
            fields.push((named.then(|| name.to_owned())?, column));
            match after.split_at_checked(1)? {
                (",", after) => rest = after,
                (">", after) => return Some((ColumnType::Struct(fields), after)),
                _ => return None,
            }
        }
    }
    let end = text.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(text.len());
    let column = match &text[..end] {
        "bool" => ColumnType::Bool,
        "int64" => ColumnType::Int64,
        "float64" => ColumnType::Float64,
        "utf8" => ColumnType::Utf8,
        "binary" => ColumnType::Binary,
        _ => return None,
    };
    Some((column, &text[end..]))
}

impl Serialize for ColumnType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ColumnType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn column_type() -> impl Strategy<Value = ColumnType> {
        let leaf = prop_oneof![
            Just(ColumnType::Bool),
            Just(ColumnType::Int64),
            Just(ColumnType::Float64),
            Just(ColumnType::Utf8),
            Just(ColumnType::Binary)
        ];
        leaf.prop_recursive(3, 12, 4, |inner| {
            prop_oneof![
                inner.clone().prop_map(|item| ColumnType::List(Box::new(item))),
                prop::collection::vec(("[a-z_][a-z0-9_]{0,6}", inner), 1..4).prop_map(ColumnType::Struct),
            ]
        })
    }

    proptest! {
        #[test]
        fn a_printed_type_reads_back(column in column_type()) {
            prop_assert_eq!(column.to_string().parse::<ColumnType>().unwrap(), column);
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = text.parse::<ColumnType>();
        }
    }

    #[test]
    fn wrong_types_are_refused() {
        for text in ["", "int", "list<int64", "list<>", "struct<>", "struct<a>", "int64>", "list<int64>x"] {
            assert!(text.parse::<ColumnType>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_general_type_takes_its_family() {
        assert!(PortType::Tasks.feeds(PortType::Table));
        assert!(PortType::Table.feeds(PortType::Tasks));
        assert!(PortType::Model.feeds(PortType::Tree));
        assert!(!PortType::Tree.feeds(PortType::Model));
        assert!(!PortType::Tasks.feeds(PortType::Tree));
    }
}
