//! NVRTC: device code to machine code, inside a compile worker.
//!
//! cudarc's loader tries `libnvrtc.so` first, wherever the system has one. So that it takes the toolkit's, a worker is started
//! with a search path whose `libnvrtc.so` is a link to it ([`search_path`]). `libnvrtc-builtins` is opened before: NVRTC asks
//! the loader for it by name and doesn't look in its own folder.
//!
//! Most of the time of a source with an error goes to what NVRTC declares by itself before any source. A worker has it read
//! once for each set of options, as a precompiled header ([`Prepared`]); logs and machine code stay the same.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::sys;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::diagnostics::SOURCE_NAME;
use super::toolkit;

/// Text that every C header of the usual ones stands for.
const USUAL: &str = "#include \"cuda_agent/usual.h\"\n";

/// Text that every C++ header of the usual ones stands for.
const STANDARD: &str = "#include \"cuda_agent/standard.h\"\n";

const USUAL_HEADERS: [&str; 15] = [
    "assert.h",
    "cuda.h",
    "cuda_runtime.h",
    "cuda_runtime_api.h",
    "device_functions.h",
    "float.h",
    "inttypes.h",
    "limits.h",
    "math.h",
    "stdbool.h",
    "stddef.h",
    "stdint.h",
    "stdio.h",
    "stdlib.h",
    "string.h",
];

const STANDARD_HEADERS: [&str; 14] = [
    "algorithm",
    "cassert",
    "cfloat",
    "cinttypes",
    "climits",
    "cmath",
    "cstddef",
    "cstdint",
    "cstdio",
    "cstdlib",
    "cstring",
    "limits",
    "type_traits",
    "utility",
];

/// Everything that a source can include besides the toolkit's folder: name and text.
pub fn headers(task_header: &str) -> Vec<(String, String)> {
    let owned = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let mut headers = vec![
        owned("task.h", task_header),
        owned("cuda_agent/usual.h", include_str!("../../headers/nvrtc/usual.h")),
        owned("cuda_agent/standard.h", include_str!("../../headers/nvrtc/standard.h")),
    ];
    headers.extend(USUAL_HEADERS.iter().map(|name| owned(name, USUAL)));
    headers.extend(STANDARD_HEADERS.iter().map(|name| owned(name, STANDARD)));
    headers
}

/// The options of every `kernel` candidate, but for the folders of headers. Warnings are of no use to anybody here.
pub fn options(architecture: &str) -> Vec<String> {
    let architecture = format!("--gpu-architecture={architecture}");
    ["--std=c++17", &architecture, "--generate-line-info", "--ptxas-options=-v", "--disable-warnings"]
        .map(str::to_owned)
        .to_vec()
}

/// What NVRTC made of a source.
#[derive(Debug)]
pub enum Outcome {
    /// Machine code, and what ptxas says of it.
    Compiled {
        /// The machine code.
        cubin: Vec<u8>,
        /// The log.
        log: String,
    },
    /// The source is wrong.
    Rejected {
        /// The log.
        log: String,
    },
    /// There was not enough memory.
    OutOfMemory,
    /// NVRTC broke, with this code.
    Broken {
        /// `nvrtcResult`.
        code: i32,
        /// The log.
        log: String,
    },
}

/// The opened library.
#[derive(Debug)]
pub struct Nvrtc {
    _builtins: Library,
    prepared: RefCell<Option<Prepared>>,
}

/// The header that ends what is precompiled. It is empty: what NVRTC declares by itself comes before it.
const FIRST: (&str, &str) = ("cuda_agent/first.h", "\n");

/// What includes it and ends the precompiled part.
const BEGINNING: &str = "#include \"cuda_agent/first.h\"\n#pragma nv_hdrstop\n";

/// What NVRTC read before any source, with some options. It is of use only in the process that made it.
#[derive(Debug)]
struct Prepared {
    options: Vec<String>,
    /// `None` where it could not be made: then sources are compiled without.
    file: Option<File>,
}

const NO_MEMORY: &str = "unable to obtain mapped memory";

/// Nothing of the precompiled header in a log.
const QUIET: &str = "--pch-messages=false";

/// A folder below `cache` for a worker's `LD_LIBRARY_PATH`: in it, the names that cudarc tries are the toolkit's library.
pub fn search_path(cache: &Path, files: &toolkit::Nvrtc) -> std::io::Result<PathBuf> {
    let digest = blake3::hash(files.library.as_os_str().as_encoded_bytes()).to_hex();
    let folder = std::path::absolute(cache)?.join("nvrtc").join(&digest[..16]);
    std::fs::create_dir_all(&folder)?;
    match std::os::unix::fs::symlink(&files.library, folder.join("libnvrtc.so")) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(folder),
    }
}

impl Nvrtc {
    /// Opens both libraries.
    #[expect(unsafe_code, reason = "libraries run code when they are opened")]
    pub fn open(files: &toolkit::Nvrtc) -> Result<Self, String> {
        // SAFETY: NVIDIA's library, whose initialisers ask nothing of the program.
        let builtins = unsafe { Library::open(Some(&files.builtins), RTLD_NOW | RTLD_GLOBAL) };
        let builtins = builtins.map_err(|error| error.to_string())?;
        // SAFETY: as above.
        if !unsafe { sys::is_culib_present() } {
            return Err(format!("{} cannot be opened", files.library.display()));
        }
        Ok(Self { _builtins: builtins, prepared: RefCell::default() })
    }

    /// `13.0`.
    #[expect(unsafe_code, reason = "a call into a C library")]
    pub fn version(&self) -> String {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid.
        let _ = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
        format!("{major}.{minor}")
    }

    /// Compiles one source.
    pub fn compile(&self, source: &str, headers: &[(String, String)], options: &[String]) -> Outcome {
        let mut prepared = self.prepared.borrow_mut();
        if prepared.as_ref().is_none_or(|prepared| prepared.options != options) {
            *prepared = Some(Prepared { options: options.to_vec(), file: self.prepare(options) });
        }
        let Some(file) = prepared.as_ref().and_then(|prepared| prepared.file.as_ref()) else {
            return self.compile_all(source, headers, options);
        };
        let first = (FIRST.0.to_owned(), FIRST.1.to_owned());
        let headers: Vec<_> = headers.iter().cloned().chain([first]).collect();
        let using = [format!("--use-pch=/proc/self/fd/{}", file.as_raw_fd()), QUIET.to_owned()];
        let using: Vec<String> = options.iter().cloned().chain(using).collect();
        let text = format!("{BEGINNING}#line 1 \"{SOURCE_NAME}\"\n{source}");
        match self.compile_all(&text, &headers, &using) {
            // The memory of a compiler with a precompiled header ends in other words, which count as an error in the source.
            Outcome::Rejected { log } if log.contains(NO_MEMORY) => self.compile_all(source, &headers, options),
            outcome => outcome,
        }
    }

    /// The precompiled header of some options, in a file without a name.
    fn prepare(&self, options: &[String]) -> Option<File> {
        let folder = tempfile::tempdir().ok()?;
        let path = folder.path().join("first.pch");
        let making = [format!("--create-pch={}", path.display()), QUIET.to_owned()];
        let options: Vec<String> = options.iter().cloned().chain(making).collect();
        let made = self.compile_all(BEGINNING, &[(FIRST.0.to_owned(), FIRST.1.to_owned())], &options);
        matches!(made, Outcome::Compiled { .. }).then(|| File::open(path).ok()).flatten()
    }

    #[expect(unsafe_code, reason = "calls into a C library")]
    fn compile_all(&self, source: &str, headers: &[(String, String)], options: &[String]) -> Outcome {
        let program = match create(source, headers) {
            Ok(program) => program,
            Err(code) => return Outcome::Broken { code: code as i32, log: String::new() },
        };
        let options = Strings::new(options.iter());
        // SAFETY: the program was made above, and the options outlive the call.
        let code = unsafe { sys::nvrtcCompileProgram(program.0, options.count(), options.pointers()) };
        let log = program.read(sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog);
        let log = CStr::from_bytes_until_nul(&log).map(|log| log.to_string_lossy().into_owned()).unwrap_or_default();
        match code {
            sys::nvrtcResult::NVRTC_SUCCESS => {
                Outcome::Compiled { cubin: program.read(sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN), log }
            }
            sys::nvrtcResult::NVRTC_ERROR_COMPILATION => Outcome::Rejected { log },
            sys::nvrtcResult::NVRTC_ERROR_OUT_OF_MEMORY => Outcome::OutOfMemory,
            code => Outcome::Broken { code: code as i32, log },
        }
    }
}

#[expect(unsafe_code, reason = "a call into a C library")]
fn create(source: &str, headers: &[(String, String)]) -> Result<OpenProgram, sys::nvrtcResult> {
    let texts = Strings::new([source, SOURCE_NAME].into_iter());
    let names = Strings::new(headers.iter().map(|(name, _)| name));
    let contents = Strings::new(headers.iter().map(|(_, text)| text));
    let mut handle = std::ptr::null_mut();
    // SAFETY: every string ends with a NUL and outlives the call, and NVRTC copies them.
    let code = unsafe {
        sys::nvrtcCreateProgram(
            &mut handle,
            texts.texts[0].as_ptr(),
            texts.texts[1].as_ptr(),
            names.count(),
            contents.pointers(),
            names.pointers(),
        )
    };
    if code == sys::nvrtcResult::NVRTC_SUCCESS { Ok(OpenProgram(handle)) } else { Err(code) }
}

type Size = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
type Fill = unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;

/// A program that is destroyed when it goes.
struct OpenProgram(sys::nvrtcProgram);

impl OpenProgram {
    #[expect(unsafe_code, reason = "calls into a C library")]
    fn read(&self, size: Size, fill: Fill) -> Vec<u8> {
        let mut length = 0;
        // SAFETY: the buffer has the length that the library itself names; where it fails, that is 0.
        unsafe {
            let _ = size(self.0, &mut length);
            let mut bytes = vec![0_u8; length];
            if length > 0 {
                let _ = fill(self.0, bytes.as_mut_ptr().cast());
            }
            bytes
        }
    }
}

impl Drop for OpenProgram {
    #[expect(unsafe_code, reason = "a call into a C library")]
    fn drop(&mut self) {
        // SAFETY: the handle is a program's, and nothing uses it afterwards.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// Strings as C takes them. A NUL inside one ends it: NVRTC would read no further either.
struct Strings {
    texts: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Strings {
    fn new<T: AsRef<str>>(texts: impl Iterator<Item = T>) -> Self {
        let until_nul = |text: &str| text.split('\0').next().unwrap_or_default().to_owned();
        let texts: Vec<CString> =
            texts.map(|text| CString::new(until_nul(text.as_ref())).unwrap_or_default()).collect();
        let pointers = texts.iter().map(|text| text.as_ptr()).collect();
        Self { texts, pointers }
    }

    fn count(&self) -> c_int {
        c_int::try_from(self.texts.len()).unwrap_or(c_int::MAX)
    }

    fn pointers(&self) -> *const *const c_char {
        self.pointers.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = "#include <cuda_fp16.h>\n__global__ void k(__half* x) { *x = __hadd(*x, x[__LINE__]); }\n";

    /// Beside the clock, which ptxas reads.
    fn timeless(outcome: Outcome) -> (Vec<u8>, String) {
        let (cubin, log) = match outcome {
            Outcome::Compiled { cubin, log } => (cubin, log),
            Outcome::Rejected { log } => (Vec::new(), log),
            broken => panic!("{broken:?}"),
        };
        (cubin, log.lines().filter(|line| !line.contains("Compile time")).collect::<Vec<_>>().join("\n"))
    }

    #[test]
    #[ignore = "needs the toolkit's NVRTC on the loader's path: started by the next one"]
    fn as_both_ways() {
        let toolkit = toolkit::Toolkit::find();
        let nvrtc = Nvrtc::open(toolkit.nvrtc().unwrap()).unwrap();
        let mut options = options("sm_90");
        options.extend(toolkit.headers().unwrap().folders().iter().map(|folder| format!("-I{}", folder.display())));
        let wrong =
            ["#error \\\n x", "namespace {", "#include \"none.h\"", "/*", "#pragma nv_hdrstop\nx\r\ny", "__FILE__ z;"];
        for source in [KERNEL, "#pragma nv_no_pch\n__device__ int a;"].iter().chain(&wrong) {
            let with = timeless(nvrtc.compile(source, &headers("struct Task {};\n"), &options));
            let without = timeless(nvrtc.compile_all(source, &headers("struct Task {};\n"), &options));
            assert_eq!(with, without, "{source}");
        }
        let prepared = nvrtc.prepared.borrow();
        assert!(prepared.as_ref().is_some_and(|prepared| prepared.file.is_some()), "it could not be precompiled");
    }

    #[test]
    fn what_is_precompiled_changes_neither_logs_nor_machine_code() {
        let folder = tempfile::tempdir().unwrap();
        let path = search_path(folder.path(), toolkit::Toolkit::find().nvrtc().unwrap()).unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "compile::nvrtc::tests::as_both_ways", "--ignored"]).env("LD_LIBRARY_PATH", path);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
