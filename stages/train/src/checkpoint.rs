//! Files of tensors, and folders that are there whole or not at all.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, View};
use tch::{Kind, Tensor};

use crate::TrainError;

/// A tensor on its way into a file: its bytes are copied to the host when they are asked for, one tensor at a time.
struct Outgoing<'a>(&'a Tensor, Dtype, Vec<usize>);

impl View for Outgoing<'_> {
    fn dtype(&self) -> Dtype {
        self.1
    }

    fn shape(&self) -> &[usize] {
        &self.2
    }

    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        let tensor = self.0.detach().to_device(tch::Device::Cpu).contiguous();
        let mut bytes = vec![0; self.data_len()];
        let elements = tensor.numel();
        tensor.copy_data_u8(&mut bytes, elements);
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.2.iter().product::<usize>() * size_of(self.1)
    }
}

fn size_of(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 4,
        Dtype::I64 | Dtype::F64 => 8,
        _ => 2,
    }
}

fn dtype(kind: Kind) -> Dtype {
    match kind {
        Kind::Float => Dtype::F32,
        Kind::BFloat16 => Dtype::BF16,
        Kind::Half => Dtype::F16,
        Kind::Double => Dtype::F64,
        Kind::Int64 => Dtype::I64,
        other => panic!("no file holds tensors of {other:?}"),
    }
}

/// Writes a safetensors file with `about` as its metadata; a file that is there already is replaced in one step.
pub fn write_tensors(
    path: &Path,
    tensors: &[(&str, &Tensor)],
    about: BTreeMap<String, String>,
) -> Result<(), TrainError> {
    let views = tensors.iter().map(|(name, tensor)| {
        let shape = tensor.size().iter().map(|length| *length as usize).collect();
        (*name, Outgoing(tensor, dtype(tensor.kind()), shape))
    });
    let about: HashMap<String, String> = about.into_iter().collect();
    let partial = beside(path, "partial");
    safetensors::serialize_to_file(views, Some(about), &partial).map_err(TrainError::file(path))?;
    sync(&partial)?;
    fs::rename(&partial, path).map_err(TrainError::file(path))
}

/// What a safetensors file holds: tensors by name, and its metadata.
pub type Contents = (HashMap<String, Tensor>, HashMap<String, String>);

/// Reads a file's tensors, onto the CPU, and its metadata.
pub fn read_tensors(path: &Path) -> Result<Contents, TrainError> {
    let bytes = fs::read(path).map_err(TrainError::file(path))?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(TrainError::file(path))?;
    let file = SafeTensors::deserialize(&bytes).map_err(TrainError::file(path))?;
    let mut tensors = HashMap::new();
    for (name, view) in file.tensors() {
        let kind = match view.dtype() {
            Dtype::F32 => Kind::Float,
            Dtype::BF16 => Kind::BFloat16,
            Dtype::F16 => Kind::Half,
            Dtype::F64 => Kind::Double,
            Dtype::I64 => Kind::Int64,
            other => return Err(TrainError::new(format!("{}: {name} is of type {other:?}", path.display()))),
        };
        let shape: Vec<i64> = view.shape().iter().map(|length| *length as i64).collect();
        tensors.insert(name, Tensor::f_from_data_size(view.data(), &shape, kind)?);
    }
    Ok((tensors, header.metadata().clone().unwrap_or_default()))
}

/// Numbered folders of which the newest whole one counts: `step-00000012`. A folder gets its name when everything in it
/// has reached the disk, so whoever is killed while writing one leaves the one before.
pub struct Checkpoints {
    home: PathBuf,
    /// Older ones are removed.
    keep: usize,
}

impl Checkpoints {
    /// In the folder `home`, which is made.
    pub fn open(home: &Path, keep: usize) -> Result<Self, TrainError> {
        fs::create_dir_all(home).map_err(TrainError::file(home))?;
        Ok(Self { home: home.to_owned(), keep: keep.max(1) })
    }

    /// The newest one of at most `steps` steps, with its step: a longer run may have left later ones.
    pub fn newest(&self, steps: u64) -> Result<Option<(u64, PathBuf)>, TrainError> {
        Ok(self.all()?.into_iter().rfind(|(step, _)| *step <= steps))
    }

    /// Where the one of a step lies, if it is there.
    pub fn path(&self, step: u64) -> PathBuf {
        self.home.join(format!("step-{step:08}"))
    }

    /// Every whole one, ordered by step.
    pub fn all(&self) -> Result<Vec<(u64, PathBuf)>, TrainError> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.home).map_err(TrainError::file(&self.home))? {
            let path = entry.map_err(TrainError::file(&self.home))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if let Some(step) = name.strip_prefix("step-").and_then(|step| step.parse().ok()) {
                found.push((step, path));
            }
        }
        found.sort();
        Ok(found)
    }

    /// Writes the one of `step` by `fill`, which is given an empty folder; where it lies. Of those before it the oldest are
    /// removed, and those of a longer run stay.
    pub fn write(&self, step: u64, fill: impl FnOnce(&Path) -> Result<(), TrainError>) -> Result<PathBuf, TrainError> {
        let path = self.path(step);
        let partial = self.home.join(format!("partial-{step:08}"));
        remove(&partial)?;
        fs::create_dir_all(&partial).map_err(TrainError::file(&partial))?;
        fill(&partial)?;
        for entry in fs::read_dir(&partial).map_err(TrainError::file(&partial))? {
            let file = entry.map_err(TrainError::file(&partial))?.path();
            if file.is_file() {
                sync(&file)?;
            }
        }
        remove(&path)?;
        fs::rename(&partial, &path).map_err(TrainError::file(&path))?;
        sync(&self.home)?;
        let mut before = self.all()?;
        before.retain(|(other, _)| *other <= step);
        for (_, old) in &before[..before.len().saturating_sub(self.keep)] {
            remove(old)?;
        }
        Ok(path)
    }
}

/// Writes a small file whole or not at all.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let partial = beside(path, "partial");
    let mut file = fs::File::create(&partial).map_err(TrainError::file(path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(TrainError::file(path))?;
    fs::rename(&partial, path).map_err(TrainError::file(path))
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{suffix}"));
    path.with_file_name(name)
}

fn sync(path: &Path) -> Result<(), TrainError> {
    fs::File::open(path).and_then(|file| file.sync_all()).map_err(TrainError::file(path))
}

fn remove(folder: &Path) -> Result<(), TrainError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(TrainError::file(folder)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_come_back_bit_by_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.safetensors");
        let one = Tensor::randn([3, 5], (Kind::Float, tch::Device::Cpu));
        let (half, count) = (one.to_kind(Kind::BFloat16), Tensor::from_slice(&[1i64, -7]));
        let strided = one.transpose(0, 1);
        let about = BTreeMap::from([("step".to_owned(), "12".to_owned())]);
        write_tensors(&path, &[("one", &one), ("half", &half), ("count", &count), ("strided", &strided)], about)
            .unwrap();
        let (read, about) = read_tensors(&path).unwrap();
        assert!(read["one"].equal(&one) && read["half"].equal(&half) && read["count"].equal(&count));
        assert!(read["strided"].equal(&strided));
        assert_eq!(about["step"], "12");
        fs::write(&path, b"short").unwrap();
        assert!(read_tensors(&path).unwrap_err().message.starts_with(&path.display().to_string()));
    }

    #[test]
    fn a_checkpoint_that_was_not_finished_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
        assert_eq!(checkpoints.newest(100).unwrap(), None);
        let fill = |text: &'static str| move |path: &Path| write_file(&path.join("a"), text.as_bytes());
        for step in [1, 2, 10] {
            checkpoints.write(step, fill("whole")).unwrap();
        }
        let broken = checkpoints.write(11, |path| {
            write_file(&path.join("a"), b"part")?;
            Err(TrainError::new("the disk is full"))
        });
        assert!(broken.is_err());
        let steps: Vec<u64> = checkpoints.all().unwrap().into_iter().map(|(step, _)| step).collect();
        assert_eq!(steps, [2, 10], "the newest two");
        checkpoints.write(11, fill("again")).unwrap();
        let (step, path) = checkpoints.newest(100).unwrap().unwrap();
        assert_eq!((step, fs::read(path.join("a")).unwrap().as_slice()), (11, b"again".as_slice()));
        // A shorter run goes on from the last that it may have, and leaves the others alone.
        assert_eq!(checkpoints.newest(10).unwrap().unwrap().0, 10);
        assert_eq!(checkpoints.newest(9).unwrap(), None);
        for step in [3, 4, 5] {
            checkpoints.write(step, fill("short")).unwrap();
        }
        let steps: Vec<u64> = checkpoints.all().unwrap().into_iter().map(|(step, _)| step).collect();
        assert_eq!(steps, [4, 5, 10, 11]);
    }
}
