//! A pipeline file as it is written, before anything is resolved.
//!
//! Numbers that may also be `${…}` are kept as values of any type, and are checked once substituted. Where there are
//! several ways of writing a thing, its enum has a variant for each ([`super::deserialize`]).

use std::fmt;
use std::marker::PhantomData;

use cuda_agent_protocol::{ColumnType, PortType};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

/// A pipeline file, or one that it includes.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Pipeline {
    pub name: Option<String>,
    pub params: Option<Entries<Value>>,
    pub secrets: Option<Entries<Secret>>,
    pub include: Option<Vec<String>>,
    /// Boxed, since a stage has many fields and is handed on more than once.
    pub stages: Option<Entries<Box<Stage>>>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Secret {
    pub env: Option<String>,
    pub file: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Stage {
    pub uses: Option<String>,
    pub inputs: Option<Entries<Input>>,
    pub with: Option<Entries<Value>>,
    pub matrix: Option<Entries<Value>>,
    pub tags: Option<Vec<String>>,
    pub when: Option<Value>,
    pub resources: Option<Resources>,
    pub executor: Option<String>,
    pub retry: Option<Retry>,
    pub timeout: Option<Value>,
    pub env: Option<Entries<String>>,
    pub secrets: Option<Vec<String>>,
    pub allow_failed_rows: Option<Value>,
    pub max_rejected: Option<Value>,
    pub run: Option<Run>,
    pub outputs: Option<Entries<Output>>,
    pub files: Option<Vec<String>>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Resources {
    pub cpu: Option<Value>,
    pub memory: Option<Value>,
    pub gpu: Option<Value>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) enum Retry {
    #[serde(rename = "a scalar")]
    Attempts(Value),
    #[serde(rename = "a mapping")]
    Full(RetryFields),
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RetryFields {
    pub attempts: Option<Value>,
    pub backoff: Option<Value>,
    pub max_backoff: Option<Value>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) enum Run {
    #[serde(rename = "a scalar")]
    Shell(String),
    #[serde(rename = "a list")]
    Words(Vec<String>),
}

/// The value of an input port.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) enum Input {
    #[serde(rename = "a scalar")]
    Output(String),
    #[serde(rename = "a list")]
    List(Vec<Wire>),
    #[serde(rename = "a mapping")]
    External(External),
}

/// An item of a list of inputs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) enum Wire {
    #[serde(rename = "a scalar")]
    Output(String),
    #[serde(rename = "a mapping")]
    External(External),
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct External {
    pub path: Option<String>,
    pub url: Option<String>,
    pub digest: Option<String>,
    pub artifact: Option<String>,
}

/// An output port of a command.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) enum Output {
    #[serde(rename = "a scalar")]
    Type(PortType),
    #[serde(rename = "a mapping")]
    Full(OutputFields),
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct OutputFields {
    /// `None` where it couldn't be read.
    #[serde(rename = "type")]
    pub port_type: Option<PortType>,
    pub columns: Option<Entries<ColumnType>>,
}

impl Output {
    pub fn fields(self) -> OutputFields {
        match self {
            Self::Type(port_type) => OutputFields { port_type: Some(port_type), columns: None },
            Self::Full(fields) => fields,
        }
    }
}

/// A mapping with names of the author's choice, in the order of the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entries<T>(pub Vec<(String, T)>);

impl<T> Default for Entries<T> {
    fn default() -> Self {
        Self(Vec::new())
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
                let mut entries = Vec::with_capacity(access.size_hint().unwrap_or(0));
                while let Some(entry) = access.next_entry::<String, T>()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(EntriesVisitor(PhantomData))
    }
}
