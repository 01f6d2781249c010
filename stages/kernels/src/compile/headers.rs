//! CUDA's own headers: which folders have them, and what is missing of them on this machine.
//!
//! Wheels and toolkits may have them in part: without `crt/` nothing of tensor cores compiles, without CCCL no CUB. The
//! folder with the most parts comes first; others follow for the parts that it lacks. A part that no folder has is the
//! machine's fault, never the candidate's.

use std::path::{Path, PathBuf};

use crate::fault::EvaluatorError;

/// The major version of CUDA that the compilers have.
const MAJOR: u32 = 13;

/// What may be missing as one: its name, what its headers' names begin with, and files that are there if it is.
struct Part {
    name: &'static str,
    prefixes: &'static [&'static str],
    files: &'static [&'static str],
}

const PARTS: [Part; 8] = [
    Part {
        name: "half types",
        prefixes: &["cuda_fp16", "cuda_bf16"],
        files: &["cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h"],
    },
    Part {
        name: "runtime headers",
        prefixes: &["cuda_runtime", "device_", "vector_"],
        files: &["cuda_runtime.h", "crt/host_config.h"],
    },
    Part {
        name: "headers of tensor cores",
        prefixes: &["mma.h", "crt/"],
        files: &["mma.h", "crt/mma.h", "crt/mma.hpp"],
    },
    Part {
        name: "cooperative groups",
        prefixes: &["cooperative_groups"],
        files: &["cooperative_groups.h", "cooperative_groups/details/info.h"],
    },
    Part { name: "CUB", prefixes: &["cub/"], files: &["cub/cub.cuh", "cub/version.cuh"] },
    Part { name: "Thrust", prefixes: &["thrust/"], files: &["thrust/version.h"] },
    Part { name: "libcu++", prefixes: &["cuda/", "nv/"], files: &["cuda/std/type_traits", "nv/target"] },
    Part { name: "asynchronous copies", prefixes: &["cuda_pipeline", "cuda_awbarrier"], files: &["cuda_pipeline.h"] },
];

/// The folders, each with its `cccl` after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    folders: Vec<PathBuf>,
}

/// Where an `include` folder has headers.
fn with_cccl(include: &Path) -> impl Iterator<Item = PathBuf> {
    [include.to_path_buf(), include.join("cccl")].into_iter().filter(|folder| folder.is_dir())
}

impl Part {
    fn is_in(&self, folders: &[PathBuf]) -> bool {
        self.files.iter().all(|file| folders.iter().any(|folder| folder.join(file).exists()))
    }
}

fn lacking(folders: &[PathBuf]) -> usize {
    PARTS.iter().filter(|part| !part.is_in(folders)).count()
}

/// What `cuda.h` says; `None` where it says nothing.
fn major(include: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(include.join("cuda.h")).ok()?;
    let version = text.lines().find_map(|line| line.strip_prefix("#define CUDA_VERSION "))?;
    version.trim().parse::<u32>().ok().map(|version| version / 1000)
}

impl Headers {
    /// From toolkits, best first; those of another major version count as none.
    pub fn among(roots: &[PathBuf]) -> Self {
        let fits = |include: &PathBuf| include.is_dir() && major(include).is_none_or(|major| major == MAJOR);
        let mut left: Vec<PathBuf> = roots.iter().map(|root| root.join("include")).filter(fits).collect();
        let mut folders: Vec<PathBuf> = Vec::new();
        loop {
            let with = |include: &Path| folders.iter().cloned().chain(with_cccl(include)).collect::<Vec<_>>();
            // The first of those that leave the least to be missed.
            let best = left.iter().enumerate().min_by_key(|(_, include)| lacking(&with(include)));
            let Some((at, include)) = best else { break };
            let joined = with(include);
            if lacking(&joined) >= lacking(&folders) {
                break;
            }
            folders = joined;
            left.remove(at);
        }
        Self { folders }
    }

    /// To be searched in this order.
    pub fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// Where a header is.
    pub fn find(&self, header: &str) -> Option<PathBuf> {
        self.folders.iter().map(|folder| folder.join(header)).find(|path| path.is_file())
    }

    /// All that is looked at to tell two sets apart.
    pub fn telling(&self) -> impl Iterator<Item = (&'static str, Option<PathBuf>)> {
        let files = PARTS.iter().flat_map(|part| part.files).chain(&["cuda.h"]);
        files.map(|file| (*file, self.find(file)))
    }

    /// The fault of the machine that a compiler's log tells of: a header is missing, and with it all of its part. What a
    /// candidate makes a compiler say counts only where that is so.
    pub fn missing_in(&self, log: &str) -> Option<EvaluatorError> {
        log.lines().filter_map(unopened).find_map(|header| {
            let part = PARTS.iter().find(|part| part.prefixes.iter().any(|prefix| header.starts_with(prefix)))?;
            (!part.is_in(&self.folders)).then(|| self.missing(part, header))
        })
    }

    fn missing(&self, part: &Part, header: &str) -> EvaluatorError {
        let looked: Vec<_> = self.folders.iter().map(|folder| folder.display().to_string()).collect();
        // A library's name is singular, a kind of headers plural.
        let verb = if part.name.starts_with(char::is_lowercase) { "are" } else { "is" };
        let looked = looked.join(", ");
        let message = format!("CUDA's {} {verb} incomplete on this machine: {header} is missing ({looked})", part.name);
        EvaluatorError::new(message).with_hint(super::toolkit::HINT)
    }
}

/// The header that a line says can't be opened, in the words of NVRTC and of g++.
fn unopened(line: &str) -> Option<&str> {
    let edg = ["cannot open source file \"", "could not open source file \""];
    if let Some(rest) = edg.iter().find_map(|words| line.split_once(words)) {
        return rest.1.split('"').next();
    }
    let (_, rest) = line.split_once("fatal error: ")?;
    rest.split_once(": No such file or directory").map(|(header, _)| header)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(folder: &Path, name: &str, files: &[&str]) -> PathBuf {
        for file in files {
            let path = folder.join(name).join("include").join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        folder.join(name)
    }

    /// Every file, CCCL's in its folder.
    fn all() -> Vec<String> {
        let cccl = |file: &&str| ["cub/", "thrust/", "cuda/", "nv/"].iter().any(|prefix| file.starts_with(prefix));
        let placed = |file: &&str| if cccl(file) { format!("cccl/{file}") } else { (*file).to_owned() };
        PARTS.iter().flat_map(|part| part.files).map(placed).collect()
    }

    const FEW: [&str; 6] =
        ["cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_runtime.h", "mma.h", "cooperative_groups.h"];

    #[test]
    fn the_most_complete_folder_comes_first_and_alone() {
        let folder = tempfile::tempdir().unwrap();
        let all = all();
        let wheels = root(folder.path(), "wheels", &FEW);
        let system = root(folder.path(), "system", &all.iter().map(String::as_str).collect::<Vec<_>>());
        let headers = Headers::among(&[wheels.clone(), system.clone()]);
        assert_eq!(headers.folders(), [system.join("include"), system.join("include/cccl")]);
        assert_eq!(headers.missing_in("x.cu(1): error: cannot open source file \"mma.h\""), None);
        let same = Headers::among(&[system.clone(), wheels]);
        assert_eq!(same, headers, "the order decides only among equals");
    }

    #[test]
    fn folders_are_joined_where_none_has_all() {
        let folder = tempfile::tempdir().unwrap();
        let wheels = root(folder.path(), "wheels", &FEW);
        let crt = root(folder.path(), "crt", &["crt/mma.h", "crt/mma.hpp", "crt/host_config.h"]);
        let nothing_new = root(folder.path(), "same", &["cuda_fp16.h", "crt/mma.h"]);
        let headers = Headers::among(&[crt.clone(), nothing_new, wheels.clone()]);
        assert_eq!(headers.folders(), [wheels.join("include"), crt.join("include")]);
        assert_eq!(headers.find("crt/mma.h").unwrap(), crt.join("include/crt/mma.h"));
    }

    #[test]
    fn headers_of_another_version_count_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let old = root(folder.path(), "old", &FEW);
        std::fs::write(old.join("include/cuda.h"), "#define CUDA_VERSION 12080\n").unwrap();
        assert_eq!(Headers::among(&[old]).folders(), [] as [PathBuf; 0]);
    }

    #[test]
    fn a_missing_part_is_the_machines_fault_and_a_missing_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let headers = Headers::among(&[root(folder.path(), "wheels", &FEW)]);
        let said = |log: &str| headers.missing_in(log).map(|error| error.message);
        let edg = "/w/include/mma.h(55): catastrophic error: cannot open source file \"crt/mma.h\"\n";
        assert!(
            said(edg).unwrap().starts_with("CUDA's headers of tensor cores are incomplete on this machine: crt/mma.h")
        );
        let gcc = "x.cu:2:10: fatal error: cub/cub.cuh: No such file or directory\n";
        assert!(said(gcc).unwrap().starts_with("CUDA's CUB is incomplete on this machine: cub/cub.cuh is missing"));
        assert!(headers.missing_in(gcc).unwrap().hint.unwrap().contains("CUDA_AGENT_CUDA"));
        assert_eq!(said("x.cu(1): catastrophic error: cannot open source file \"cuda_fp16_more.h\""), None);
        assert_eq!(said("x.cu(1): catastrophic error: cannot open source file \"mine.h\""), None);
    }
}
