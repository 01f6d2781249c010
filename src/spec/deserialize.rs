//! Types out of nodes: a `serde::Deserializer` that knows where each value is written.
//!
//! Where several ways of writing a thing are allowed, its type is an enum with a variant for each: they are named `a scalar`,
//! `a list` and `a mapping`, and what is written chooses. Fields of structs that are null are as if they were absent.

use std::fmt;
use std::ops::Range;

use serde::de::value::{BorrowedStrDeserializer, StrDeserializer};
use serde::de::{DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use serde_json::Number;

use super::document::Place;
use super::error::Problem;
use super::tree::{Content, Entry, Meaning, Node, Scalar};

/// What a node holds. All that is wrong with files is found by [`super::check`] first, so a mistake here is one that no
/// table knows of.
pub(crate) fn read<'de, T: Deserialize<'de>>(node: &'de Node) -> Result<T, Mistake> {
    T::deserialize(Reader(node)).map_err(|mistake| mistake.in_node(node))
}

/// Why a node can't be read, and where that is.
#[derive(Debug)]
pub(crate) struct Mistake {
    pub message: String,
    pub span: Option<Range<usize>>,
}

impl Mistake {
    /// The same for reports on document number `document`.
    pub fn problem(self, document: usize) -> Problem {
        let problem = Problem::new(Place::root(document), self.message);
        match self.span {
            Some(span) => problem.at(span),
            None => problem,
        }
    }

    /// Says where it is, unless something inside the node has said so.
    fn in_node(mut self, node: &Node) -> Self {
        self.span.get_or_insert_with(|| node.span.clone());
        self
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Mistake {}

impl Error for Mistake {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self { message: message.to_string(), span: None }
    }
}

struct Reader<'de>(&'de Node);

impl<'de> Deserializer<'de> for Reader<'de> {
    type Error = Mistake;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        match &self.0.target().content {
            Content::Scalar(Scalar { text, meaning }) => match meaning {
                Meaning::Null => visitor.visit_unit(),
                Meaning::Boolean(value) => visitor.visit_bool(*value),
                Meaning::Number(number) => visit_number(number, visitor),
                Meaning::Unfit => Err(Mistake::custom(format_args!("{text} is no finite number of 64 bits"))),
                Meaning::Text => visitor.visit_borrowed_str(text),
            },
            Content::List(items) => visitor.visit_seq(Items(items.iter())),
            Content::Map(entries) => visitor.visit_map(Entries { rest: entries.list.iter(), value: None }),
            Content::Alias(_) => Err(Mistake::custom("an alias of an alias")),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    /// Text is as it is written: `1.10` stays `1.10`.
    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        match &self.0.target().content {
            Content::Scalar(scalar) => visitor.visit_borrowed_str(&scalar.text),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        self.deserialize_str(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Mistake> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Mistake> {
        match &self.0.target().content {
            Content::Map(entries) => visitor.visit_map(Fields(Entries { rest: entries.list.iter(), value: None })),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Mistake> {
        let node = self.0.target();
        let way = match &node.content {
            Content::Scalar(_) | Content::Alias(_) => "a scalar",
            Content::List(_) => "a list",
            Content::Map(_) => "a mapping",
        };
        match &node.content {
            _ if variants.contains(&way) => visitor.visit_enum(Variant { name: way, node }),
            Content::Scalar(scalar) => visitor.visit_enum(StrDeserializer::new(&scalar.text)),
            _ => Err(Mistake::custom(format_args!("expected one of {}, not {way}", variants.join(", ")))),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Mistake> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf unit unit_struct seq tuple tuple_struct map
        identifier
    }
}

fn visit_number<'de, V: Visitor<'de>>(number: &Number, visitor: V) -> Result<V::Value, Mistake> {
    match (number.as_u64(), number.as_i64()) {
        (Some(number), _) => visitor.visit_u64(number),
        (None, Some(number)) => visitor.visit_i64(number),
        (None, None) => visitor.visit_f64(number.as_f64().unwrap_or_default()),
    }
}

struct Items<'de>(std::slice::Iter<'de, std::sync::Arc<Node>>);

impl<'de> SeqAccess<'de> for Items<'de> {
    type Error = Mistake;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Mistake> {
        let Some(node) = self.0.next() else { return Ok(None) };
        seed.deserialize(Reader(node)).map(Some).map_err(|mistake| mistake.in_node(node))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

/// All entries of a mapping.
struct Entries<'de> {
    rest: std::slice::Iter<'de, Entry>,
    value: Option<&'de Node>,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = Mistake;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Mistake> {
        let Some(entry) = self.rest.next() else { return Ok(None) };
        self.value = Some(&entry.value);
        let at_key = |mistake: Mistake| Mistake { span: Some(entry.key_span.clone()), ..mistake };
        let key = entry.key.as_deref().ok_or_else(|| at_key(Mistake::custom("a key must be text")))?;
        seed.deserialize(BorrowedStrDeserializer::new(key)).map(Some).map_err(at_key)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Mistake> {
        let node = self.value.take().ok_or_else(|| Mistake::custom("a value is read before its key"))?;
        seed.deserialize(Reader(node)).map_err(|mistake| mistake.in_node(node))
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }
}

/// The entries of a mapping that aren't null.
struct Fields<'de>(Entries<'de>);

impl<'de> MapAccess<'de> for Fields<'de> {
    type Error = Mistake;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Mistake> {
        while self.0.rest.as_slice().first().is_some_and(|entry| entry.value.is_null()) {
            self.0.rest.next();
        }
        self.0.next_key_seed(seed)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Mistake> {
        self.0.next_value_seed(seed)
    }
}

/// One of several ways of writing a thing.
struct Variant<'de> {
    name: &'static str,
    node: &'de Node,
}

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = Mistake;
    type Variant = Written<'de>;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Written<'de>), Mistake> {
        Ok((seed.deserialize(BorrowedStrDeserializer::<Mistake>::new(self.name))?, Written(self.node)))
    }
}

struct Written<'de>(&'de Node);

impl<'de> VariantAccess<'de> for Written<'de> {
    type Error = Mistake;

    fn unit_variant(self) -> Result<(), Mistake> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Mistake> {
        seed.deserialize(Reader(self.0))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Mistake> {
        Reader(self.0).deserialize_any(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(self, fields: &'static [&'static str], visitor: V) -> Result<V::Value, Mistake> {
        Reader(self.0).deserialize_struct("", fields, visitor)
    }
}
