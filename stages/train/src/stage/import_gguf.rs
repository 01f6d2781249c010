//! `train/import-gguf`: a model to start from, out of a GGUF file.

use std::path::{Path, PathBuf};

use cuda_agent_protocol::{Event, Program, ProgramError};

use super::{input, output_path, required, say};
use crate::TrainError;
use crate::model::gguf;

/// Runs the stage.
pub fn main(program: &mut Program) -> Result<(), ProgramError> {
    let request = program.request.clone();
    let file = file_of(required(&request, "file")?).map_err(input)?;
    let imported = gguf::import(&file, output_path(&request, "model")).map_err(input)?;
    let head = if imported.tied { "its head is its embedding" } else { "its head is a table of its own" };
    say(program, "info", format!("{} weights in {} tensors, {head}", imported.parameters, imported.tensors));
    program.send(&Event::Metric { name: "import/weights".into(), step: None, value: imported.parameters as f64 });
    Ok(())
}

/// The GGUF file: the path itself, or the one in the folder.
fn file_of(path: &Path) -> Result<PathBuf, TrainError> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let entries = std::fs::read_dir(path).map_err(TrainError::file(path))?;
    let paths = entries.map(|entry| Ok(entry.map_err(TrainError::file(path))?.path()));
    let mut paths = paths.collect::<Result<Vec<_>, TrainError>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    match paths.as_slice() {
        [file] => Ok(file.clone()),
        files => Err(TrainError::new(format!("the input file is a folder with {} GGUF files", files.len()))
            .with_hint("give it one of them: `inputs: { file: { path: model.gguf } }`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_named_or_alone_in_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one.gguf"), folder.path().join("other.gguf"));
        std::fs::write(folder.path().join("README.md"), "").unwrap();
        assert!(file_of(folder.path()).unwrap_err().message.ends_with("with 0 GGUF files"));
        std::fs::write(&one, "").unwrap();
        assert_eq!(file_of(folder.path()).unwrap(), one);
        assert_eq!(file_of(&one).unwrap(), one);
        std::fs::write(&other, "").unwrap();
        assert!(file_of(folder.path()).unwrap_err().message.ends_with("with 2 GGUF files"));
    }
}
