//! A model's folder and a few settings to a sampler, for the programs `sample` and `serve`.

use std::path::PathBuf;

use tch::{Cuda, Device, Kind};

use crate::TrainError;
use crate::model::{Decoder, Head, LoadOptions};
use crate::sampler::{Options, Sampler};
use crate::text::Tokenizer;

/// What both programs take.
#[derive(Clone, Debug, PartialEq)]
pub struct Arguments {
    /// A model's folder, or an adapter's.
    pub model: PathBuf,
    /// The model that an adapter belongs to, and its digest.
    pub base: Option<(PathBuf, String)>,
    /// Where to compute.
    pub device: Device,
    /// In what.
    pub kind: Kind,
    /// Sequences at a time, and their tokens.
    pub options: Options,
    /// What is left: names with their values, in order.
    pub others: Vec<(String, String)>,
}

/// Described as users read it.
pub const USAGE: &str = "\
MODEL               a Hugging Face folder with a tokenizer, or an adapter's with --base
--base FOLDER       the model that an adapter belongs to
--base-digest TEXT  its digest, which the adapter must name
--device NAME       cpu, cuda or cuda:N; cuda where there is one
--dtype NAME        bfloat16 or float32; bfloat16 on a GPU, float32 on a CPU
--slots N           sequences at a time (256 on a GPU, 16 on a CPU)
--capacity N        tokens of a sequence at most, prompt and new ones (4096)";

impl Arguments {
    /// Reads `MODEL --name value …`. Names that are not in [`USAGE`] are left in `others`.
    pub fn parse(arguments: &[String]) -> Result<Self, TrainError> {
        let mut model = None;
        let mut named = Vec::new();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.strip_prefix("--") {
                Some(name) => {
                    let value = rest.next().ok_or_else(|| TrainError::new(format!("--{name} needs a value")))?;
                    named.push((name.to_owned(), value.clone()));
                }
                None if model.is_none() => model = Some(PathBuf::from(argument)),
                None => return Err(TrainError::new(format!("{argument}: there is one model"))),
            }
        }
        let model = model.ok_or_else(|| TrainError::new("no model is given"))?;
        let mut take = |name: &str| {
            let place = named.iter().position(|(found, _)| found == name)?;
            Some(named.remove(place).1)
        };
        let base = match (take("base"), take("base-digest")) {
            (Some(folder), Some(digest)) => Some((folder.into(), digest)),
            (None, None) => None,
            _ => return Err(TrainError::new("--base and --base-digest go together")),
        };
        let device = device(take("device").as_deref())?;
        let kind = match take("dtype").as_deref() {
            None if device.is_cuda() => Kind::BFloat16,
            None | Some("float32") => Kind::Float,
            Some("bfloat16") => Kind::BFloat16,
            Some(other) => return Err(TrainError::new(format!("--dtype {other}: bfloat16 or float32"))),
        };
        let slots = whole("slots", take("slots"), if device.is_cuda() { 256 } else { 16 })?;
        let capacity = whole("capacity", take("capacity"), 4096)?;
        let options = Options { slots: slots as usize, capacity, is_plain: false };
        Ok(Self { model, base, device, kind, options, others: named })
    }

    /// Fails where a name was not understood.
    pub fn expect_no_others(&self) -> Result<(), TrainError> {
        match self.others.first() {
            None => Ok(()),
            Some((name, _)) => Err(TrainError::new(format!("--{name}: no such setting"))),
        }
    }

    /// The model's name: that of its folder.
    pub fn name(&self) -> String {
        let folder = std::fs::canonicalize(&self.model).unwrap_or_else(|_| self.model.clone());
        folder.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
    }

    /// Loads the model and starts its sampler; the tokenizer is there twice, since the sampler's thread owns its own.
    pub fn open(&self) -> Result<(Sampler, Tokenizer), TrainError> {
        let options = LoadOptions { device: self.device, kind: self.kind, head: Head::Language };
        let (folder, decoder) = match &self.base {
            None => (self.model.as_path(), Decoder::load(&self.model, &options)?),
            Some((base, digest)) => {
                let mut adapted = Decoder::load(base, &options)?;
                adapted.load_adapter(&self.model, digest)?;
                (base.as_path(), adapted.merged())
            }
        };
        let own = Tokenizer::load(folder)?;
        Ok((Sampler::new(decoder, Some(own), self.options), Tokenizer::load(folder)?))
    }
}

fn device(name: Option<&str>) -> Result<Device, TrainError> {
    match name {
        None => Ok(Device::cuda_if_available()),
        Some("cpu") => Ok(Device::Cpu),
        Some(name) => {
            let number = match name.strip_prefix("cuda") {
                Some("") => Some(0),
                Some(rest) => rest.strip_prefix(':').and_then(|number| number.parse().ok()),
                None => None,
            };
            let number = number.ok_or_else(|| TrainError::new(format!("--device {name}: cpu, cuda or cuda:N")))?;
            let count = Cuda::device_count().max(0) as usize;
            if number >= count {
                return Err(TrainError::new(format!("--device {name}: torch sees {count} GPUs")));
            }
            Ok(Device::Cuda(number))
        }
    }
}

fn whole(name: &str, value: Option<String>, default: i64) -> Result<i64, TrainError> {
    let Some(value) = value else { return Ok(default) };
    let number = value.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| TrainError::new(format!("--{name} {value}: expected a positive whole number")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Arguments, TrainError> {
        Arguments::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn settings_are_read_and_the_rest_is_left() {
        let read = parse("--slots 3 models/tiny --device cpu --port 80 --capacity 100").unwrap();
        assert_eq!((read.options.slots, read.options.capacity, read.kind), (3, 100, Kind::Float));
        assert_eq!((read.name().as_str(), read.others.len()), ("tiny", 1));
        assert!(read.expect_no_others().unwrap_err().message.contains("--port: no such setting"));
        let message = |text| parse(text).unwrap_err().message;
        assert_eq!(message("--slots 3"), "no model is given");
        assert_eq!(message("m --slots none"), "--slots none: expected a positive whole number");
        assert_eq!(message("m --base b"), "--base and --base-digest go together");
        assert_eq!(message("m --device tpu"), "--device tpu: cpu, cuda or cuda:N");
        assert_eq!(message("m n"), "n: there is one model");
        assert_eq!(message("m --dtype"), "--dtype needs a value");
    }
}
