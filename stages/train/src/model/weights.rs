//! Safetensors: reading tensors out of mapped files, writing them shard by shard.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Metadata, SafeTensors, View};
use safetensors::{Dtype, serialize_to_file};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::TrainError;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// How many bytes of tensors one file holds at most, unless one tensor alone is larger. A shard whose weights didn't
/// change is stored once, so shards are not too large.
const SHARD_BYTES: usize = 1 << 30;

/// The tensors of one or several safetensors files. Files are mapped: of a tensor that is never taken nothing is read,
/// and what is read belongs to the page cache. A file must not be changed while it is open here.
pub struct Checkpoint {
    files: Vec<MappedFile>,
    places: BTreeMap<String, usize>,
}

struct MappedFile {
    path: PathBuf,
    bytes: Mmap,
    metadata: Metadata,
    /// Where tensors begin: offsets count from here.
    start: usize,
}

impl Checkpoint {
    /// Opens a model's folder: `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    pub fn open(folder: &Path) -> Result<Self, TrainError> {
        let index = folder.join(INDEX);
        if !index.exists() {
            return Self::open_files(&[folder.join(SINGLE)]);
        }
        let text = fs::read_to_string(&index).map_err(TrainError::file(&index))?;
        let json: serde_json::Value = serde_json::from_str(&text).map_err(TrainError::file(&index))?;
        let map = json["weight_map"]
            .as_object()
            .ok_or_else(|| TrainError::new(format!("{}: weight_map is missing", index.display())))?;
        let mut names = Vec::new();
        for (tensor, file) in map {
            let file = file.as_str().filter(|file| !file.contains('/')).ok_or_else(|| {
                TrainError::new(format!("{}: {tensor}: expected the name of a file, found {file}", index.display()))
            })?;
            names.push(file);
        }
        names.sort_unstable();
        names.dedup();
        let paths: Vec<_> = names.into_iter().map(|name| folder.join(name)).collect();
        let checkpoint = Self::open_files(&paths)?;
        for (tensor, file) in map {
            let found = checkpoint.places.get(tensor).map(|&place| &checkpoint.files[place].path);
            if found != file.as_str().map(|file| folder.join(file)).as_ref() {
                return Err(TrainError::new(format!("{}: {tensor} is not in {file}", index.display())));
            }
        }
        Ok(checkpoint)
    }

    /// Opens files whose tensors have different names.
    pub fn open_files(paths: &[PathBuf]) -> Result<Self, TrainError> {
        let mut checkpoint = Self { files: Vec::new(), places: BTreeMap::new() };
        for path in paths {
            let bytes = map_file(path)?;
            let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(TrainError::file(path))?;
            for name in metadata.offset_keys() {
                if checkpoint.places.insert(name.clone(), checkpoint.files.len()).is_some() {
                    return Err(TrainError::new(format!("{}: {name} is in another file too", path.display())));
                }
            }
            checkpoint.files.push(MappedFile { path: path.clone(), start: header + 8, bytes, metadata });
        }
        Ok(checkpoint)
    }

    /// Names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// The file a tensor is in, for messages.
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        self.places.get(name).map(|&place| self.files[place].path.as_path())
    }

    /// Copies a tensor to a device as `kind`. It must be there, with this shape, as bf16, f16 or f32.
    pub fn tensor(&self, name: &str, shape: &[i64], kind: Kind, device: Device) -> Result<Tensor, TrainError> {
        let Some(&place) = self.places.get(name) else {
            let files: Vec<_> = self.files.iter().map(|file| file.path.display().to_string()).collect();
            return Err(TrainError::new(format!("{}: no tensor {name}", files.join(", "))));
        };
        let file = &self.files[place];
        let wrong = |what: String| TrainError::new(format!("{}: {name}: {what}", file.path.display()));
        let info = file.metadata.info(name).ok_or_else(|| wrong("not in the header".into()))?;
        let found: Vec<i64> = info.shape.iter().map(|&size| size as i64).collect();
        if found != shape {
            return Err(wrong(format!("shape {found:?}, the configuration says {shape:?}")));
        }
        let stored = match info.dtype {
            Dtype::BF16 => Kind::BFloat16,
            Dtype::F16 => Kind::Half,
            Dtype::F32 => Kind::Float,
            other => return Err(wrong(format!("type {other:?} is not supported, only BF16, F16 and F32"))),
        };
        let (begin, end) = info.data_offsets;
        let bytes = file
            .bytes
            .get(file.start + begin..file.start + end)
            .ok_or_else(|| wrong(format!("the file ends before its byte {end}")))?;
        Ok(Tensor::f_from_data_size(bytes, shape, stored)?.to_device(device).to_kind(kind))
    }
}

/// Maps a file for reading.
#[expect(unsafe_code, reason = "a model's files are artifacts: nothing writes to them while they are read")]
pub(crate) fn map_file(path: &Path) -> Result<Mmap, TrainError> {
    let file = File::open(path).map_err(TrainError::file(path))?;
    unsafe { Mmap::map(&file) }.map_err(TrainError::file(path))
}

/// A tensor that is made when it is written, so that a model never is in memory as a whole. Of type bf16.
pub(super) struct LazyTensor<'a> {
    pub name: String,
    pub shape: Vec<usize>,
    /// Its elements in row-major order, little-endian.
    pub bytes: Box<dyn Fn() -> Vec<u8> + 'a>,
}

/// A tensor as safetensors writes it: brought to the CPU, or made, when its turn comes.
struct Written<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Box<dyn Fn() -> Vec<u8> + 'a>,
}

impl Written<'_> {
    fn size(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

impl View for Written<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        (self.bytes)().into()
    }

    fn data_len(&self) -> usize {
        self.size()
    }
}

fn of_tensor((name, tensor): (String, Tensor)) -> (String, Written<'static>) {
    let dtype = match tensor.kind() {
        Kind::BFloat16 => Dtype::BF16,
        Kind::Half => Dtype::F16,
        Kind::Float => Dtype::F32,
        Kind::Int64 => Dtype::I64,
        other => panic!("{name} is of type {other:?}"),
    };
    let shape = tensor.size().iter().map(|&size| size as usize).collect();
    let tensor = tensor.detach();
    let bytes = Box::new(move || {
        let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
        tensor.to_device(Device::Cpu).contiguous().copy_data_u8(&mut bytes, tensor.numel());
        bytes
    });
    (name, Written { dtype, shape, bytes })
}

/// Writes one safetensors file. Equal tensors make equal bytes.
///
/// # Panics
/// A tensor is of another type than bf16, f16, f32 or i64.
pub fn write_file(path: &Path, tensors: Vec<(String, Tensor)>) -> Result<(), TrainError> {
    write_views(path, tensors.into_iter().map(of_tensor).collect())
}

fn write_views(path: &Path, views: Vec<(String, Written)>) -> Result<(), TrainError> {
    // transformers refuses files that don't say which framework wrote them.
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    serialize_to_file(views, Some(metadata), path).map_err(TrainError::file(path))
}

/// Writes a model's tensors in their order: `model.safetensors`, or shards of at most a GiB and their index.
pub fn write_model(folder: &Path, tensors: Vec<(String, Tensor)>) -> Result<(), TrainError> {
    write_shards(folder, tensors.into_iter().map(of_tensor).collect(), SHARD_BYTES)
}

/// The same with tensors that are made one by one.
pub(super) fn write_lazily(folder: &Path, tensors: Vec<LazyTensor>) -> Result<(), TrainError> {
    let views = tensors.into_iter().map(|LazyTensor { name, shape, bytes }| {
        let written = Written { dtype: Dtype::BF16, shape, bytes };
        (name, written)
    });
    write_shards(folder, views.collect(), SHARD_BYTES)
}

fn write_shards(folder: &Path, tensors: Vec<(String, Written)>, limit: usize) -> Result<(), TrainError> {
    let total: usize = tensors.iter().map(|(_, tensor)| tensor.size()).sum();
    let mut shards: Vec<Vec<(String, Written)>> = vec![Vec::new()];
    let mut filled = 0;
    for (name, tensor) in tensors {
        if filled > 0 && filled + tensor.size() > limit {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += tensor.size();
        shards.last_mut().expect("there is one from the start").push((name, tensor));
    }
    if shards.len() == 1 {
        return write_views(&folder.join(SINGLE), shards.remove(0));
    }
    let count = shards.len();
    let mut map = BTreeMap::new();
    for (number, shard) in shards.into_iter().enumerate() {
        let file = format!("model-{:05}-of-{count:05}.safetensors", number + 1);
        map.extend(shard.iter().map(|(name, _)| (name.clone(), file.clone())));
        write_views(&folder.join(file), shard)?;
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    let path = folder.join(INDEX);
    fs::write(&path, serde_json::to_string_pretty(&index).expect("JSON has no error")).map_err(TrainError::file(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors() -> Vec<(String, Tensor)> {
        let numbers = Tensor::from_slice(&[1.0f32, -2.5, 3.0, 0.1, 7.0, -0.0]);
        vec![
            ("b".into(), numbers.reshape([2, 3])),
            ("a".into(), numbers.to_kind(Kind::BFloat16)),
            ("c.weight".into(), numbers.narrow(0, 1, 2)),
        ]
    }

    #[test]
    fn shards_are_read_back_bit_by_bit() {
        for (limit, files) in [(1 << 30, 1), (20, 2), (1, 3)] {
            let folder = tempfile::tempdir().unwrap();
            write_shards(folder.path(), tensors().into_iter().map(of_tensor).collect(), limit).unwrap();
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            assert_eq!(checkpoint.files.len(), files);
            for (name, tensor) in tensors() {
                let read = checkpoint.tensor(&name, &tensor.size(), tensor.kind(), Device::Cpu).unwrap();
                assert_eq!(read, tensor, "{name}");
            }
        }
    }

    #[test]
    fn errors_name_file_and_tensor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SINGLE);
        let mut all = tensors();
        all.push(("ids".into(), Tensor::from_slice(&[1i64])));
        write_file(&path, all).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let message = |name: &str, shape: &[i64]| {
            let error = checkpoint.tensor(name, shape, Kind::Float, Device::Cpu).unwrap_err();
            error.message.replace(&folder.path().display().to_string(), "FOLDER")
        };
        insta::assert_snapshot!([message("b", &[3, 2]), message("d", &[1]), message("ids", &[1])].join("\n"));
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(Checkpoint::open(folder.path()).is_err(), "a file that was cut off");
    }

    #[test]
    fn an_index_that_names_the_wrong_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        write_shards(folder.path(), tensors().into_iter().map(of_tensor).collect(), 20).unwrap();
        let index = folder.path().join(INDEX);
        let text = fs::read_to_string(&index).unwrap();
        fs::write(&index, text.replace("\"c.weight\"", "\"d.weight\"")).unwrap();
        assert!(Checkpoint::open(folder.path()).err().unwrap().message.contains("d.weight is not in"));
    }
}
