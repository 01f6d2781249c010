//! The container GGUF, version 3 (and 2, which is laid out alike): metadata, and where tensors are.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::TrainError;
use crate::model::gguf::quants::Layout;
use crate::model::weights::map_file;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any whole number.
    Whole(i64),
    /// f32 or f64. Of an f32, the shortest decimal number that means it.
    Number(f64),
    /// A bool.
    Flag(bool),
    /// UTF-8.
    Text(String),
    /// Values of one type.
    List(Vec<Value>),
}

/// A tensor's place in the file.
#[derive(Clone, Debug)]
struct Place {
    /// Slowest dimension first, as torch has it.
    shape: Vec<i64>,
    layout: Layout,
    start: usize,
    end: usize,
}

/// An open GGUF file, mapped: tensors that are not read cost nothing.
pub struct Gguf {
    path: PathBuf,
    bytes: Mmap,
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Place>,
}

/// Reads little-endian values one after another; every read is checked against the end of the file.
struct Cursor<'a> {
    bytes: &'a [u8],
    place: usize,
}

impl Cursor<'_> {
    fn take(&mut self, length: usize) -> Result<&[u8], TrainError> {
        let end = self.place.checked_add(length).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| TrainError::new(format!("the file ends within its header, at {}", self.place)))?;
        let taken = &self.bytes[self.place..end];
        self.place = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], TrainError> {
        Ok(self.take(N)?.try_into().expect("as many were taken"))
    }

    fn u32(&mut self) -> Result<u32, TrainError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, TrainError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count of things that take at least a byte each: no more than bytes are left.
    fn count(&mut self) -> Result<usize, TrainError> {
        let count = self.u64()?;
        let left = (self.bytes.len() - self.place) as u64;
        if count > left {
            return Err(TrainError::new(format!("a count of {count} where {left} bytes are left")));
        }
        Ok(count as usize)
    }

    fn text(&mut self) -> Result<String, TrainError> {
        let length = self.count()?;
        let bytes = self.take(length)?.to_vec();
        String::from_utf8(bytes).map_err(|_| TrainError::new("a text is not UTF-8"))
    }

    fn value(&mut self, kind: u32) -> Result<Value, TrainError> {
        Ok(match kind {
            0 => Value::Whole(i64::from(u8::from_le_bytes(self.array()?))),
            1 => Value::Whole(i64::from(i8::from_le_bytes(self.array()?))),
            2 => Value::Whole(i64::from(u16::from_le_bytes(self.array()?))),
            3 => Value::Whole(i64::from(i16::from_le_bytes(self.array()?))),
            4 => Value::Whole(i64::from(self.u32()?)),
            5 => Value::Whole(i64::from(i32::from_le_bytes(self.array()?))),
            6 => Value::Number(shortest(f32::from_le_bytes(self.array()?))),
            7 => Value::Flag(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.text()?),
            9 => {
                let inner = self.u32()?;
                if inner == 9 {
                    return Err(TrainError::new("lists in lists are not supported"));
                }
                let count = self.count()?;
                Value::List((0..count).map(|_| self.value(inner)).collect::<Result<_, _>>()?)
            }
            10 => Value::Whole(i64::try_from(self.u64()?).map_err(|_| TrainError::new("a number above 2⁶³"))?),
            11 => Value::Whole(i64::from_le_bytes(self.array()?)),
            12 => Value::Number(f64::from_le_bytes(self.array()?)),
            other => return Err(TrainError::new(format!("a value of the unknown type {other}"))),
        })
    }
}

/// The f64 whose decimal form is the shortest that means this f32: 1e-6 and not 9.99999997475243e-7.
fn shortest(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

impl Gguf {
    /// Opens a file and reads its header. Errors name the file.
    pub fn open(path: &Path) -> Result<Self, TrainError> {
        let bytes = map_file(path)?;
        let (metadata, tensors) = header(&bytes).map_err(TrainError::file(path))?;
        Ok(Self { path: path.to_owned(), bytes, metadata, tensors })
    }

    /// An error of this file.
    pub fn error(&self, message: impl std::fmt::Display) -> TrainError {
        TrainError::new(format!("{}: {message}", self.path.display()))
    }

    /// A value of the metadata.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.metadata.get(name)
    }

    /// A whole number; an error names it where it is missing or of another type.
    pub fn whole(&self, name: &str) -> Result<i64, TrainError> {
        match self.get(name) {
            Some(Value::Whole(number)) => Ok(*number),
            other => Err(self.unexpected(name, "a whole number", other)),
        }
    }

    /// A number with a fraction.
    pub fn number(&self, name: &str) -> Result<f64, TrainError> {
        match self.get(name) {
            Some(Value::Number(number)) => Ok(*number),
            other => Err(self.unexpected(name, "a number", other)),
        }
    }

    /// A text.
    pub fn text(&self, name: &str) -> Result<&str, TrainError> {
        match self.get(name) {
            Some(Value::Text(text)) => Ok(text),
            other => Err(self.unexpected(name, "a text", other)),
        }
    }

    /// A list.
    pub fn list(&self, name: &str) -> Result<&[Value], TrainError> {
        match self.get(name) {
            Some(Value::List(list)) => Ok(list),
            other => Err(self.unexpected(name, "a list", other)),
        }
    }

    fn unexpected(&self, name: &str, expected: &str, found: Option<&Value>) -> TrainError {
        match found {
            None => self.error(format!("{name} is missing")),
            Some(value) => {
                let mut text = format!("{value:?}");
                text.truncate(text.char_indices().nth(60).map_or(text.len(), |(place, _)| place));
                self.error(format!("{name}: expected {expected}, found {text}"))
            }
        }
    }

    /// Names of all tensors, in order.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A tensor's shape, slowest dimension first.
    pub fn shape(&self, name: &str) -> Option<&[i64]> {
        self.tensors.get(name).map(|place| place.shape.as_slice())
    }

    /// The first `rows` rows of a tensor (all of them where there are fewer), as f32.
    pub fn rows(&self, name: &str, rows: usize) -> Result<Vec<f32>, TrainError> {
        let place = self.tensors.get(name).ok_or_else(|| self.error(format!("no tensor {name}")))?;
        let rows = rows.min(place.shape[0] as usize);
        let elements = place.shape[1..].iter().product::<i64>() as usize * rows;
        let bytes = elements / place.layout.elements * place.layout.bytes;
        let mut numbers = vec![0.0; elements];
        place.layout.dequantize(&self.bytes[place.start..place.start + bytes], &mut numbers);
        Ok(numbers)
    }

    /// A whole tensor as f32.
    pub fn tensor(&self, name: &str) -> Result<Vec<f32>, TrainError> {
        self.rows(name, usize::MAX)
    }
}

type Header = (BTreeMap<String, Value>, BTreeMap<String, Place>);

fn header(bytes: &[u8]) -> Result<Header, TrainError> {
    let mut cursor = Cursor { bytes, place: 0 };
    if cursor.take(4)? != b"GGUF" {
        return Err(TrainError::new("not a GGUF file"));
    }
    let version = cursor.u32()?;
    if ![2, 3].contains(&version) {
        return Err(TrainError::new(format!("GGUF version {version} is not supported, only 2 and 3")));
    }
    let (tensor_count, value_count) = (cursor.count()?, cursor.count()?);
    let mut metadata = BTreeMap::new();
    for _ in 0..value_count {
        let name = cursor.text()?;
        let kind = cursor.u32()?;
        let value = cursor.value(kind).map_err(|error| TrainError::new(format!("{name}: {error}")))?;
        metadata.insert(name, value);
    }
    let mut found = Vec::new();
    for _ in 0..tensor_count {
        let name = cursor.text()?;
        let place = tensor(&mut cursor).map_err(|error| TrainError::new(format!("{name}: {error}")))?;
        found.push((name, place));
    }
    let alignment = match metadata.get("general.alignment") {
        Some(Value::Whole(number)) if *number > 0 => *number as usize,
        _ => 32,
    };
    let data = cursor.place.next_multiple_of(alignment);
    let mut tensors = BTreeMap::new();
    for (name, mut place) in found {
        let end = place.end.checked_add(data).filter(|end| *end <= bytes.len());
        place.end = end.ok_or_else(|| TrainError::new(format!("{name}: the file ends before its last block")))?;
        place.start += data;
        tensors.insert(name, place);
    }
    Ok((metadata, tensors))
}

/// A tensor's description; `start` and `end` count from where data begins.
fn tensor(cursor: &mut Cursor) -> Result<Place, TrainError> {
    let dimensions = cursor.u32()?;
    if !(1..=4).contains(&dimensions) {
        return Err(TrainError::new(format!("{dimensions} dimensions")));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        shape.push(i64::try_from(cursor.u64()?).map_err(|_| TrainError::new("a dimension above 2⁶³"))?);
    }
    let layout = Layout::of(cursor.u32()?)?;
    // Rows are whole blocks: the fastest dimension comes first in the file.
    if !(shape[0] as usize).is_multiple_of(layout.elements) {
        return Err(TrainError::new(format!("rows of {} are no whole {} blocks", shape[0], layout.name)));
    }
    let elements = shape.iter().try_fold(1usize, |product, size| product.checked_mul(usize::try_from(*size).ok()?));
    let bytes = elements.and_then(|elements| (elements / layout.elements).checked_mul(layout.bytes));
    let start = cursor.u64()? as usize;
    let end = bytes.and_then(|bytes| start.checked_add(bytes)).ok_or_else(|| TrainError::new("sizes overflow"))?;
    shape.reverse();
    Ok(Place { shape, layout, start, end })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one text, one f32, and a Q8_0 tensor of two rows of 32.
    fn file() -> Vec<u8> {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend([1u64, 2].map(u64::to_le_bytes).concat());
        bytes.extend([text("name"), 8u32.to_le_bytes().to_vec(), text("Größe")].concat());
        bytes.extend([text("epsilon"), 6u32.to_le_bytes().to_vec(), 1e-6f32.to_le_bytes().to_vec()].concat());
        bytes.extend([text("w"), 2u32.to_le_bytes().to_vec(), [32u64, 2].map(u64::to_le_bytes).concat()].concat());
        bytes.extend([8u32.to_le_bytes().to_vec(), 0u64.to_le_bytes().to_vec()].concat());
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        for row in [1u8, 2] {
            bytes.extend(half::f16::from_f32(1.0).to_le_bytes());
            bytes.extend([row; 32]);
        }
        bytes
    }

    fn open(bytes: &[u8]) -> Result<Gguf, TrainError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, bytes).unwrap();
        Gguf::open(&path)
    }

    #[test]
    fn metadata_and_tensors_are_found() {
        let gguf = open(&file()).unwrap();
        assert_eq!((gguf.text("name").unwrap(), gguf.number("epsilon").unwrap()), ("Größe", 1e-6));
        assert_eq!(gguf.shape("w"), Some([2i64, 32].as_slice()));
        assert_eq!(gguf.tensor("w").unwrap(), [[1.0; 32], [2.0; 32]].concat());
        assert_eq!(gguf.rows("w", 1).unwrap(), [1.0; 32]);
        assert!(
            gguf.whole("name").unwrap_err().message.ends_with("name: expected a whole number, found Text(\"Größe\")")
        );
    }

    /// Every cut of a valid file is an error and never a panic.
    #[test]
    fn cut_files_are_refused() {
        let bytes = file();
        for length in 0..bytes.len() {
            assert!(open(&bytes[..length]).is_err(), "cut at {length}");
        }
        let mut other = bytes.clone();
        other[4] = 1;
        assert!(open(&other).err().unwrap().message.ends_with("GGUF version 1 is not supported, only 2 and 3"));
    }
}
