//! Where CUDA 13's compilers are: in the wheels of a Python, or in a toolkit of the system.
//!
//! Each piece is taken from the first root that has it (of headers, the most complete set: `headers`), in this order: `$CUDA_AGENT_CUDA`; the wheels of the Python that
//! `$CUDA_AGENT_PYTHON` names, of the nearest `.venv` at or above the current folder, of `python3` on the path; `$CUDA_HOME`;
//! `/usr/local/cuda`; the folder above `nvcc` on the path. A machine may have one piece here and another there. A missing
//! piece is an error only to whoever asks for it: the CPU device needs none.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::headers::Headers;
use crate::fault::EvaluatorError;

/// A part of CUDA's headers: what it is called, how it is included, and a use of it in a kernel of one warp.
pub const PARTS: [(&str, &str, &str); 3] = [
    (
        "mma.h",
        "#include <mma.h>",
        "nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> tile;\n\
         nvcuda::wmma::fill_fragment(tile, 1.0f);\n\
         nvcuda::wmma::store_matrix_sync(out, tile, 16, nvcuda::wmma::mem_row_major);",
    ),
    (
        "cooperative groups",
        "#include <cooperative_groups.h>",
        "auto block = cooperative_groups::this_thread_block();\nblock.sync();\nout[block.thread_rank()] += x[0];",
    ),
    (
        "CUB",
        "#include <cub/warp/warp_reduce.cuh>",
        "__shared__ typename cub::WarpReduce<float>::TempStorage storage;\n\
         out[0] += cub::WarpReduce<float>(storage).Sum(x[threadIdx.x]);",
    ),
];

/// What a user is told to do about a missing piece.
pub const HINT: &str = "`make venv` installs CUDA's compilers as wheels; or name a toolkit of CUDA 13 in CUDA_AGENT_CUDA, \
    or a Python that has the wheels in CUDA_AGENT_PYTHON";

/// The pieces, as far as they were found.
#[derive(Clone, Debug)]
pub struct Toolkit {
    roots: Vec<PathBuf>,
    nvcc: Option<PathBuf>,
    nvrtc: Option<Nvrtc>,
    headers: Headers,
    runtime: Option<PathBuf>,
    cupti: Option<PathBuf>,
}

/// NVRTC's two libraries: the second is opened by the first, which doesn't look in its own folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nvrtc {
    /// `libnvrtc.so.13`.
    pub library: PathBuf,
    /// `libnvrtc-builtins.so.13.0`.
    pub builtins: PathBuf,
}

impl Toolkit {
    /// Looks in every place of this machine.
    pub fn find() -> Self {
        Self::among(roots(&Places::of_this_process()))
    }

    /// The same, with the wheels of this interpreter before those of others.
    pub fn find_beside(python: &Path) -> Self {
        Self::among(roots(&Places { python: Some(python.to_owned()), ..Places::of_this_process() }))
    }

    /// Looks in the given roots, in their order.
    pub fn among(roots: Vec<PathBuf>) -> Self {
        let first = |find: &dyn Fn(&Path) -> Option<PathBuf>| roots.iter().find_map(|root| find(root));
        Self {
            nvcc: first(&|root| existing(root.join("bin/nvcc"))),
            nvrtc: roots.iter().find_map(|root| nvrtc_of(root)),
            headers: Headers::among(&roots),
            runtime: first(&|root| in_libraries(root, "libcudart.so.13")),
            cupti: first(&|root| in_libraries(root, "libcupti.so.13").or_else(|| in_extras(root, "libcupti.so.13"))),
            roots,
        }
    }

    /// The compiler driver for `launch` candidates.
    pub fn nvcc(&self) -> Result<&Path, EvaluatorError> {
        self.nvcc.as_deref().ok_or_else(|| self.missing("nvcc"))
    }

    /// The compiler library for `kernel` candidates.
    pub fn nvrtc(&self) -> Result<&Nvrtc, EvaluatorError> {
        self.nvrtc.as_ref().ok_or_else(|| self.missing("libnvrtc.so.13 with libnvrtc-builtins.so.13.x beside it"))
    }

    /// CUDA's headers.
    pub fn headers(&self) -> Result<&Headers, EvaluatorError> {
        let found = self.headers.find("cuda_fp16.h").map(|_| &self.headers);
        found.ok_or_else(|| self.missing("folder of headers (include/cuda_fp16.h)"))
    }

    /// The runtime library that `launch` candidates are linked against. The wheels have it under its full name alone.
    pub fn runtime(&self) -> Result<&Path, EvaluatorError> {
        self.runtime.as_deref().ok_or_else(|| self.missing("libcudart.so.13"))
    }

    /// The library that sees what the GPU does.
    pub fn cupti(&self) -> Option<&Path> {
        self.cupti.as_deref()
    }

    fn missing(&self, piece: &str) -> EvaluatorError {
        let looked: Vec<_> = self.roots.iter().map(|root| root.display().to_string()).collect();
        let looked = if looked.is_empty() { "no toolkit at all".to_owned() } else { looked.join(", ") };
        EvaluatorError::new(format!("CUDA's {piece} was not found (found: {looked})")).with_hint(HINT)
    }
}

/// What the search starts from.
#[derive(Clone, Debug, Default)]
struct Places {
    explicit: Option<PathBuf>,
    python: Option<PathBuf>,
    current: PathBuf,
    cuda_home: Option<PathBuf>,
    system: PathBuf,
    path: Vec<PathBuf>,
}

impl Places {
    fn of_this_process() -> Self {
        let path_of = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Self {
            explicit: path_of("CUDA_AGENT_CUDA"),
            python: path_of("CUDA_AGENT_PYTHON"),
            current: std::env::current_dir().unwrap_or_default(),
            cuda_home: path_of("CUDA_HOME"),
            system: PathBuf::from("/usr/local/cuda"),
            path: std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default(),
        }
    }

    fn pythons(&self) -> Vec<PathBuf> {
        let nearest = self.current.ancestors().find_map(|folder| existing(folder.join(".venv/bin/python")));
        self.python.clone().into_iter().chain(nearest).chain(self.on_path("python3")).collect()
    }

    fn on_path(&self, program: &str) -> Option<PathBuf> {
        self.path.iter().find_map(|folder| existing(folder.join(program)))
    }
}

/// Every folder that looks like a toolkit, best first, each once.
fn roots(places: &Places) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = places.explicit.clone().into_iter().collect();
    roots.extend(places.pythons().iter().flat_map(|python| wheels(python)));
    roots.extend(places.cuda_home.clone());
    roots.push(places.system.clone());
    let nvcc = places.on_path("nvcc").and_then(|nvcc| nvcc.canonicalize().ok());
    roots.extend(nvcc.and_then(|nvcc| Some(nvcc.parent()?.parent()?.to_path_buf())));
    let mut distinct: Vec<PathBuf> = Vec::new();
    for root in roots.into_iter().filter(|root| root.is_dir()) {
        if !distinct.contains(&root) {
            distinct.push(root);
        }
    }
    distinct
}

/// The toolkit in a Python's wheels. A virtual environment is read without starting it; another interpreter is asked.
fn wheels(python: &Path) -> Vec<PathBuf> {
    let beside = python.parent().and_then(Path::parent).map(wheels_in_prefix).unwrap_or_default();
    if beside.is_empty() { wheels_by_asking(python) } else { beside }
}

fn wheels_in_prefix(prefix: &Path) -> Vec<PathBuf> {
    let Ok(folders) = prefix.join("lib").read_dir() else { return Vec::new() };
    let pythons = folders.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
    pythons.filter_map(|entry| existing(entry.path().join("site-packages/nvidia/cu13"))).collect()
}

fn wheels_by_asking(python: &Path) -> Vec<PathBuf> {
    let program = "import nvidia; print(*nvidia.__path__, sep='\\n')";
    let answer = Command::new(python).args(["-c", program]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let text = answer.map(|answer| String::from_utf8_lossy(&answer.stdout).into_owned()).unwrap_or_default();
    text.lines().filter_map(|folder| existing(Path::new(folder).join("cu13"))).collect()
}

fn nvrtc_of(root: &Path) -> Option<Nvrtc> {
    let library = in_libraries(root, "libnvrtc.so.13")?;
    let folder = library.parent()?.read_dir().ok()?;
    let mut builtins: Vec<PathBuf> =
        folder.flatten().map(|entry| entry.path()).filter(|path| is_builtins(path)).collect();
    builtins.sort();
    // The plain name, `….so.13.0`, comes before that of a patch release, `….so.13.0.88`: it is the one that NVRTC opens.
    builtins.into_iter().next().map(|builtins| Nvrtc { library, builtins })
}

fn is_builtins(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc-builtins.so.13."))
}

fn in_libraries(root: &Path, name: &str) -> Option<PathBuf> {
    ["lib", "lib64", "targets/x86_64-linux/lib"].iter().find_map(|folder| existing(root.join(folder).join(name)))
}

/// Where older toolkits have CUPTI.
fn in_extras(root: &Path, name: &str) -> Option<PathBuf> {
    existing(root.join("extras/CUPTI/lib64").join(name))
}

fn existing(path: PathBuf) -> Option<PathBuf> {
    path.exists().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(root: &Path, names: &[&str]) {
        for name in names {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
    }

    const WHEELS: &str = "lib/python3.12/site-packages/nvidia/cu13";
    const NVRTC: [&str; 2] = ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0"];

    #[test]
    fn pieces_come_from_different_roots() {
        let folder = tempfile::tempdir().unwrap();
        let system = folder.path().join("cuda");
        touch(
            &system,
            &[
                "bin/nvcc",
                "include/cuda_fp16.h",
                "include/cuda_fp16.hpp",
                "include/cuda_bf16.h",
                "lib64/libcudart.so.13",
            ],
        );
        let venv = folder.path().join("project/.venv");
        touch(&venv, &["bin/python"]);
        touch(&venv.join(WHEELS).join("lib"), &NVRTC);
        let current = folder.path().join("project/deep/inside");
        std::fs::create_dir_all(&current).unwrap();
        let toolkit = Toolkit::among(roots(&Places { current, system: system.clone(), ..Places::default() }));
        assert_eq!(toolkit.nvcc().unwrap(), system.join("bin/nvcc"));
        assert_eq!(toolkit.runtime().unwrap(), system.join("lib64/libcudart.so.13"));
        assert_eq!(toolkit.headers().unwrap().folders(), [system.join("include")]);
        assert_eq!(toolkit.nvrtc().unwrap().library, venv.join(WHEELS).join("lib/libnvrtc.so.13"));
    }

    #[test]
    fn what_is_named_comes_first() {
        let folder = tempfile::tempdir().unwrap();
        let [explicit, python, home] = ["explicit", "python", "home"].map(|name| folder.path().join(name));
        for root in [&explicit, &python.join(WHEELS), &home] {
            touch(root, &["bin/nvcc"]);
        }
        touch(&python, &["bin/python"]);
        let mut places = Places {
            explicit: Some(explicit.clone()),
            python: Some(python.join("bin/python")),
            cuda_home: Some(home.clone()),
            ..Places::default()
        };
        assert_eq!(roots(&places), [explicit, python.join(WHEELS), home.clone()]);
        places.explicit = None;
        places.python = None;
        places.path = vec![home.join("bin")];
        assert_eq!(roots(&places), [home], "the same root twice counts once");
    }

    #[test]
    fn builtins_must_lie_beside_the_library() {
        let folder = tempfile::tempdir().unwrap();
        touch(folder.path(), &["lib64/libnvrtc.so.13"]);
        let error = Toolkit::among(vec![folder.path().to_owned()]).nvrtc().unwrap_err();
        assert!(error.message.contains("libnvrtc-builtins"), "{error}");
        assert!(error.hint.unwrap().contains("make venv"));
    }

    #[test]
    fn an_interpreter_is_asked_where_its_wheels_are_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        touch(folder.path(), &["packages/nvidia/cu13/bin/nvcc"]);
        let python = folder.path().join("python");
        let script = format!("#!/bin/sh\necho {}\n", folder.path().join("packages/nvidia").display());
        std::fs::write(&python, script).unwrap();
        std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        assert_eq!(wheels(&python), [folder.path().join("packages/nvidia/cu13")]);
    }

    #[test]
    fn this_machine_has_every_piece() {
        let toolkit = Toolkit::find();
        for missing in [toolkit.nvcc().err(), toolkit.nvrtc().err(), toolkit.headers().err(), toolkit.runtime().err()] {
            assert_eq!(missing, None);
        }
        assert!(toolkit.cupti().is_some());
    }
}
