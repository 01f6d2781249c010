//! A pipeline file as it is written: what serde reads, before anything is resolved.
//!
//! Numbers that may also be `${…}` are kept as values of any type, and are checked once substituted.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

use cuda_agent_protocol::{ColumnType, PortType};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// A pipeline file, or one that it includes.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Pipeline {
    pub name: Option<Text>,
    pub params: Option<Entries<Free>>,
    pub secrets: Option<Entries<Secret>>,
    pub include: Option<Vec<Text>>,
    /// Boxed, since a stage has many fields and is handed on more than once.
    pub stages: Option<Entries<Box<Stage>>>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Secret {
    pub env: Option<Text>,
    pub file: Option<Text>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Stage {
    pub uses: Option<Text>,
    pub inputs: Option<Entries<Input>>,
    pub with: Option<Entries<Free>>,
    pub matrix: Option<Entries<Free>>,
    pub tags: Option<Vec<Text>>,
    pub when: Option<Free>,
    pub resources: Option<Resources>,
    pub retry: Option<Retry>,
    pub timeout: Option<Free>,
    pub env: Option<Entries<String>>,
    pub secrets: Option<Vec<Text>>,
    pub allow_failed_rows: Option<Free>,
    pub max_rejected: Option<Free>,
    pub run: Option<Run>,
    pub outputs: Option<Entries<Output>>,
    pub files: Option<Vec<Text>>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Resources {
    pub cpu: Option<Free>,
    pub memory: Option<Free>,
    pub gpu: Option<Free>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Retry {
    Attempts(Free),
    Full(RetryFields),
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RetryFields {
    pub attempts: Option<Free>,
    pub backoff: Option<Free>,
    pub max_backoff: Option<Free>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Run {
    Shell(String),
    Words(Vec<String>),
}

/// The value of an input port.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Input {
    One(Wire),
    List(Vec<Wire>),
}

/// One thing that an input port gets.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Wire {
    Output(String),
    External(External),
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct External {
    pub path: Option<Text>,
    pub url: Option<Text>,
    pub digest: Option<Text>,
    pub artifact: Option<Text>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Output {
    /// `None` where it is missing, which is a mistake.
    pub port_type: Option<PortType>,
    pub columns: Vec<(String, ColumnType)>,
}

/// Text that is really text: serde_yaml would take `1` for a `String` too.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Text(pub String);

/// Any value that JSON can hold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Free(pub Value);

/// A mapping with names of the author's choice, in the order of the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entries<T>(pub Vec<(String, T)>);

impl<T> Default for Entries<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl Visitor<'_> for TextVisitor {
            type Value = Text;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("text")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Text, E> {
                Ok(Text(text.to_owned()))
            }
            fn visit_string<E: Error>(self, text: String) -> Result<Text, E> {
                Ok(Text(text))
            }
        }
        deserializer.deserialize_any(TextVisitor)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for EntriesVisitor<T> {
            type Value = Entries<T>;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a mapping")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Entries<T>, A::Error> {
                let mut entries = Vec::with_capacity(access.size_hint().unwrap_or(0).min(1024));
                while let Some(entry) = access.next_entry::<String, T>()? {
                    entries.push(entry);
                }
                match repeated(entries.iter().map(|(name, _)| name.as_str())) {
                    Some(name) => Err(A::Error::custom(format_args!("duplicate key `{name}`"))),
                    None => Ok(Entries(entries)),
                }
            }
        }
        deserializer.deserialize_any(EntriesVisitor(PhantomData))
    }
}

/// A name that comes twice.
fn repeated<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Option<&'a str> {
    // Most mappings have a handful of entries, for which a set costs more than it saves.
    if names.clone().nth(8).is_none() {
        return names
            .clone()
            .enumerate()
            .find(|(index, name)| names.clone().take(*index).any(|other| other == *name))
            .map(|(_, name)| name);
    }
    let mut seen = HashSet::new();
    names.into_iter().find(|name| !seen.insert(*name))
}

impl<'de> Deserialize<'de> for Free {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FreeVisitor)
    }
}

struct FreeVisitor;

impl<'de> Visitor<'de> for FreeVisitor {
    type Value = Free;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<Free, E> {
        Ok(Free(Value::Null))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Free, E> {
        Ok(Free(Value::Bool(value)))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Free, E> {
        Ok(Free(Value::from(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Free, E> {
        Ok(Free(Value::from(value)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Free, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("a number must be finite"))?;
        Ok(Free(Value::Number(number)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Free, E> {
        Ok(Free(Value::from(text)))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Free, E> {
        Ok(Free(Value::String(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Free, A::Error> {
        let mut items = Vec::new();
        while let Some(Free(item)) = access.next_element()? {
            items.push(item);
        }
        Ok(Free(Value::Array(items)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Free, A::Error> {
        let mut map = Map::new();
        while let Some((name, Free(value))) = access.next_entry::<String, Free>()? {
            if map.contains_key(&name) {
                return Err(A::Error::custom(format_args!("duplicate key `{name}`")));
            }
            map.insert(name, value);
        }
        Ok(Free(Value::Object(map)))
    }
}

impl<'de> Deserialize<'de> for Retry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RetryVisitor;
        impl<'de> Visitor<'de> for RetryVisitor {
            type Value = Retry;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a whole number or a mapping")
            }
            fn visit_bool<E: Error>(self, value: bool) -> Result<Retry, E> {
                FreeVisitor.visit_bool(value).map(Retry::Attempts)
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Retry, E> {
                FreeVisitor.visit_u64(value).map(Retry::Attempts)
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<Retry, E> {
                FreeVisitor.visit_i64(value).map(Retry::Attempts)
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<Retry, E> {
                FreeVisitor.visit_f64(value).map(Retry::Attempts)
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Retry, E> {
                FreeVisitor.visit_str(text).map(Retry::Attempts)
            }
            fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Retry, A::Error> {
                RetryFields::deserialize(MapAccessDeserializer::new(access)).map(Retry::Full)
            }
        }
        deserializer.deserialize_any(RetryVisitor)
    }
}

impl<'de> Deserialize<'de> for Run {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RunVisitor;
        impl<'de> Visitor<'de> for RunVisitor {
            type Value = Run;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("text or a list")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Run, E> {
                Ok(Run::Shell(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Run, A::Error> {
                let mut words = Vec::new();
                while let Some(word) = access.next_element::<String>()? {
                    words.push(word);
                }
                Ok(Run::Words(words))
            }
        }
        deserializer.deserialize_any(RunVisitor)
    }
}

impl<'de> Deserialize<'de> for Wire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WireVisitor;
        impl<'de> Visitor<'de> for WireVisitor {
            type Value = Wire;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("`stage.output` or a mapping")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Wire, E> {
                Ok(Wire::Output(text.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Wire, A::Error> {
                External::deserialize(MapAccessDeserializer::new(access)).map(Wire::External)
            }
        }
        deserializer.deserialize_any(WireVisitor)
    }
}

impl<'de> Deserialize<'de> for Input {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InputVisitor;
        impl<'de> Visitor<'de> for InputVisitor {
            type Value = Input;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("`stage.output`, a list or a mapping")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Input, E> {
                Ok(Input::One(Wire::Output(text.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Input, A::Error> {
                let mut wires = Vec::new();
                while let Some(wire) = access.next_element()? {
                    wires.push(wire);
                }
                Ok(Input::List(wires))
            }
            fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Input, A::Error> {
                External::deserialize(MapAccessDeserializer::new(access)).map(Wire::External).map(Input::One)
            }
        }
        deserializer.deserialize_any(InputVisitor)
    }
}

impl<'de> Deserialize<'de> for Output {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Fields {
            #[serde(default)]
            r#type: Option<String>,
            #[serde(default)]
            columns: Option<Entries<ColumnType>>,
        }
        struct OutputVisitor;
        impl<'de> Visitor<'de> for OutputVisitor {
            type Value = Output;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a port type or a mapping")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Output, E> {
                Ok(Output { port_type: Some(port_type(text)?), columns: Vec::new() })
            }
            fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Output, A::Error> {
                let fields = Fields::deserialize(MapAccessDeserializer::new(access))?;
                let columns = fields.columns.unwrap_or_default().0;
                let port_type = fields.r#type.as_deref().map(port_type).transpose()?;
                Ok(Output { port_type, columns })
            }
        }
        deserializer.deserialize_any(OutputVisitor)
    }
}

fn port_type<E: Error>(name: &str) -> Result<PortType, E> {
    let known = PortType::ALL.into_iter().find(|port| port.name() == name);
    known.ok_or_else(|| E::custom(format_args!("`{name}` is not a port type")))
}
