//! nvcc's steps without what they do again for each source: nearly all of their time goes to CUDA's own headers, which
//! every source begins with.
//!
//! What those headers come to is made once and kept: their text for host and device, the macros that they leave, and, for
//! g++, what cudafe++ writes for them, as a precompiled header. cudafe++ and cicc can keep nothing: each has read that text
//! in a process that forks for every source (`prepared/goes_on.c`). The steps and their options are those that nvcc itself
//! says it would run; where they don't have the shape known here, or where a probe doesn't come out byte for byte as by
//! nvcc, there is nothing prepared, and nvcc is run.
//!
//! What is said of a source with errors never comes from here: nvcc compiles it again.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Mutex;

use object::{Object, ObjectSection};

use super::process::{self, Ended, Limits};
use crate::child::process::{Ended as Gone, Process};
use crate::fault::EvaluatorError;
use crate::kept;

const GOES_ON: &str = include_str!("../../prepared/goes_on.c");

/// nvcc's steps as it names them; `SOURCE` is `candidate.cu`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Steps {
    variables: Vec<(String, String)>,
    host_text: String,
    cudafe: String,
    device_text: String,
    cicc: String,
    machine_code: [String; 2],
    object: String,
}

const HOST_TEXT: &str = "kept/candidate.cpp4.ii";
const DEVICE_TEXT: &str = "kept/candidate.cpp1.ii";
const HOST_CODE: &str = "kept/candidate.cudafe1.cpp";
/// The part of it that is the source's own.
const REST: &str = "kept/candidate.rest.cpp";
const RUNTIME: &str = " -include \"cuda_runtime.h\" ";
const TASK: &str = " -include \"task.h\" ";
const SOURCE: &str = "\"candidate.cu\"";

impl Steps {
    /// From what `nvcc --dryrun` prints; `None` where the steps are others.
    fn read(said: &str) -> Option<Self> {
        const KEPT: [&str; 3] = ["CICC_PATH", "NVVMIR_LIBRARY_DIR", "LD_LIBRARY_PATH"];
        let lines: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("#$ ")).map(str::trim).collect();
        let assigned = |line: &&str| {
            let (name, value) = line.split_once('=')?;
            let is_name = name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
            is_name.then(|| (name.to_owned(), value.trim().to_owned()))
        };
        let mut variables: Vec<_> = lines.iter().filter_map(assigned).collect();
        let path = variables.iter().find(|(name, _)| name == "PATH")?.clone();
        variables.retain(|(name, _)| KEPT.contains(&name.as_str()));
        variables.push(path);
        let commands: Vec<&str> = lines.into_iter().filter(|line| assigned(line).is_none()).collect();
        let [host_text, cudafe, device_text, cicc, ptxas, fatbinary, object] = commands.as_slice() else { return None };
        let preprocesses = |line: &str, to: &str| {
            let begins = line.starts_with("gcc ") && line.contains(" -E ") && line.contains(RUNTIME);
            begins && line.contains(TASK) && line.ends_with(&format!("{SOURCE} -o \"{to}\""))
        };
        let fits = preprocesses(host_text, HOST_TEXT)
            && cudafe.starts_with("cudafe++ ")
            && cudafe.contains(&format!("--gen_c_file_name \"{HOST_CODE}\""))
            && cudafe.ends_with(&format!("\"{HOST_TEXT}\""))
            && preprocesses(device_text, DEVICE_TEXT)
            && cicc.starts_with("\"$CICC_PATH/cicc\" ")
            && cicc.contains(&format!(" \"{DEVICE_TEXT}\" "))
            && ptxas.starts_with("ptxas ")
            && fatbinary.starts_with("fatbinary ")
            && object.starts_with("gcc ")
            && object.contains(" -c -x c++ ")
            && object.ends_with(&format!("\"{HOST_CODE}\" -o \"candidate.o\""));
        fits.then(|| Self {
            variables,
            host_text: (*host_text).to_owned(),
            cudafe: (*cudafe).to_owned(),
            device_text: (*device_text).to_owned(),
            cicc: (*cicc).to_owned(),
            machine_code: [(*ptxas).to_owned(), (*fatbinary).to_owned()],
            object: (*object).to_owned(),
        })
    }

    fn shell(&self, script: &str, limits: &Limits) -> Command {
        let mut command = process::limited(Path::new("/bin/sh"), limits);
        command.envs(self.variables.iter().cloned()).args(["-c", script]);
        command
    }

    /// A part of nvcc that goes on from `text` for each source.
    fn start(&self, step: &str, text: &str, folder: &Path, limits: &Limits) -> std::io::Result<Process> {
        let mut command = self.shell(&format!("exec {step}"), limits);
        command.current_dir(folder).env("LD_PRELOAD", folder.join(LIBRARY)).env("GOES_ON", text);
        Process::start(&mut command)
    }
}

/// What is kept of one architecture.
#[derive(Debug)]
pub struct Prepared {
    folder: PathBuf,
    steps: Steps,
    prefix: Vec<u8>,
    limits: Limits,
    /// Those of cudafe++ and cicc that wait for a source.
    waiting: [Mutex<Vec<Process>>; 2],
}

const LIBRARY: &str = "goes_on.so";
const STEPS: &str = "steps";
const PREFIX: &str = "prefix.h";
const MACROS: [&str; 2] = ["host.macros", "device.macros"];
/// Written last: a folder with it is whole.
const WHOLE: &str = "whole";

/// Why nothing could be prepared.
type Cannot = String;

impl Prepared {
    /// What decides, with nvcc and its options, what is made.
    pub fn identity() -> &'static str {
        concat!(include_str!("../../prepared/goes_on.c"), include_str!("prepared.rs"))
    }

    /// What was made before, by whatever process.
    pub fn open(folder: &Path, limits: &Limits) -> Option<Self> {
        folder.join(WHOLE).is_file().then_some(())?;
        let steps = Steps::read(&std::fs::read_to_string(folder.join(STEPS)).ok()?)?;
        let prefix = std::fs::read(folder.join(PREFIX)).ok()?;
        Some(Self { folder: folder.to_owned(), steps, prefix, limits: *limits, waiting: Default::default() })
    }

    /// Makes it. `nvcc` is the driver with all options but for those of a dry run, for a source in the current folder.
    pub fn make(folder: &Path, limits: &Limits, nvcc: impl Fn() -> Command) -> Result<Self, Cannot> {
        let odd = |letter: char| letter.is_whitespace() || "\"'$`\\".contains(letter);
        if folder.to_str().is_none_or(|folder| folder.contains(odd)) {
            return Err("the cache's folder has a name that a shell would take apart".to_owned());
        }
        let broken = |error: std::io::Error| error.to_string();
        let parent = folder.parent().ok_or("the cache has no folder")?;
        std::fs::create_dir_all(parent).map_err(broken)?;
        let made = tempfile::Builder::new().prefix("prepared-").tempdir_in(parent).map_err(broken)?;
        Making { folder: made.path(), limits, nvcc: &nvcc }.all()?;
        let is_whole = |folder: &Path| folder.join(WHOLE).is_file();
        kept::put(folder, made, is_whole).map_err(broken)?;
        Self::open(folder, limits).ok_or_else(|| "what was made can't be read".to_owned())
    }

    /// Makes machine code, intermediate files and the object of a source in a folder, as nvcc would. Where that goes badly,
    /// whatever the reason, the log is of no use.
    pub fn compile(&self, folder: &Path, limits: &Limits) -> Result<Ended, EvaluatorError> {
        let Self { steps, .. } = self;
        let macros = |line: &str, macros: &str| line.replace(RUNTIME, &self.quoted(" -imacros ", macros));
        let texts = [macros(&steps.host_text, MACROS[0]), macros(&steps.device_text, MACROS[1])].join(" && ");
        let ended = process::run(steps.shell(&texts, limits), folder, limits)?;
        if !matches!(ended, Ended::Well(_)) {
            return Ok(ended);
        }
        for (waiting, step, text) in
            [(&self.waiting[0], &steps.cudafe, HOST_TEXT), (&self.waiting[1], &steps.cicc, DEVICE_TEXT)]
        {
            let ended = self.go_on(waiting, step, text, folder, limits)?;
            if !matches!(ended, Ended::Well(_)) {
                return Ok(ended);
            }
        }
        let object = self.own_part(folder).unwrap_or_else(|| steps.object.clone());
        let [ptxas, fatbinary] = &steps.machine_code;
        process::run(steps.shell(&format!("{ptxas} && {fatbinary} && {object}"), limits), folder, limits)
    }

    fn quoted(&self, option: &str, file: &str) -> String {
        format!("{option}\"{}\" ", self.folder.join(file).display())
    }

    /// How g++ is called where the host code begins with what is precompiled: then only the rest is given to it.
    fn own_part(&self, folder: &Path) -> Option<String> {
        let code = std::fs::read(folder.join(HOST_CODE)).ok()?;
        let rest = code.strip_prefix(self.prefix.as_slice())?;
        std::fs::write(folder.join(REST), rest).ok()?;
        let own = format!("{}\"{REST}\" -o", self.quoted("-include ", PREFIX));
        Some(self.steps.object.replace(&format!("\"{HOST_CODE}\" -o"), &own))
    }

    fn go_on(
        &self,
        waiting: &Mutex<Vec<Process>>,
        step: &str,
        text: &str,
        folder: &Path,
        limits: &Limits,
    ) -> Result<Ended, EvaluatorError> {
        let idle = || waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let known = idle().pop();
        let mut process = match known.filter(Process::is_alive) {
            Some(process) => process,
            None => self
                .steps
                .start(step, text, &self.folder, &self.limits)
                .map_err(|error| EvaluatorError::new(format!("cannot run nvcc's parts: {error}")))?,
        };
        let Some(path) = folder.to_str().filter(|path| !path.contains('\n')) else {
            return Ok(Ended::Badly(String::new()));
        };
        let status = match process.ask(path, limits.time) {
            Ok(answer) => answer.parse().map(ExitStatus::from_raw).ok(),
            Err(Gone::Timeout) => return Ok(Ended::Limit(process::took_too_long(limits))),
            Err(Gone::Exited { .. }) => return Ok(Ended::Badly(String::new())),
        };
        idle().push(process);
        let well = status.is_some_and(|status| status.success());
        Ok(if well { Ended::Well(String::new()) } else { Ended::Badly(String::new()) })
    }
}

/// A folder in which everything is made and tried.
struct Making<'a> {
    folder: &'a Path,
    limits: &'a Limits,
    nvcc: &'a dyn Fn() -> Command,
}

/// Uses what sources use: a template, shared memory, the library of mathematics, a launch.
const PROBE: &str = "template <int steps> __global__ void probe(const float* x, float* y) {\n\
    __shared__ float kept[64];\n  kept[threadIdx.x] = expf(x[threadIdx.x]);\n  __syncthreads();\n\
    for (int i = 0; i < steps; i++) y[i] = kept[63 - i] + sqrtf(kept[i]);\n}\n\
    extern \"C\" cudaError_t launch(const float* x, float* y, cudaStream_t stream) {\n\
    probe<8><<<1, 64, 0, stream>>>(x, y);\n  return cudaGetLastError();\n}\n";

/// What the probe must come to, by nvcc and by the steps: machine code with the code that it is made from, and of the
/// object, which has its folder's mark, the host's machine code.
const COMPARED: [&str; 3] = ["kept/candidate.ptx", "kept/candidate.fatbin", "candidate.o"];

fn compared(file: &Path) -> Vec<u8> {
    let bytes = std::fs::read(file).unwrap_or_default();
    if file.extension().is_none_or(|extension| extension != "o") {
        return bytes;
    }
    let object = object::File::parse(bytes.as_slice()).ok();
    let code = object.as_ref().and_then(|object| object.section_by_name(".text")?.data().ok());
    code.unwrap_or_default().to_vec()
}

impl Making<'_> {
    fn all(&self) -> Result<(), Cannot> {
        std::fs::create_dir(self.folder.join("kept")).map_err(|error| error.to_string())?;
        self.write("candidate.cu", "")?;
        self.write("task.h", "")?;
        self.write("goes_on.c", GOES_ON)?;
        let mut dry = (self.nvcc)();
        dry.arg("--dryrun");
        let said = self.run(dry)?;
        self.write(STEPS, &said)?;
        let steps = Steps::read(&said).ok_or("nvcc has other steps")?;
        self.shell(&steps, &format!("gcc -O1 -w -shared -fPIC goes_on.c -o {LIBRARY} -ldl"))?;
        for (line, text, macros) in
            [(&steps.host_text, HOST_TEXT, MACROS[0]), (&steps.device_text, DEVICE_TEXT, MACROS[1])]
        {
            let without_task = line.replace(TASK, " ");
            let listing = |line: &str| line.replace(&format!(" -o \"{text}\""), " -dM");
            let all = self.shell(&steps, &listing(&without_task))?;
            let before = self.shell(&steps, &listing(&without_task.replace(RUNTIME, " ")))?;
            self.write(macros, &left(&before, &all))?;
            self.shell(&steps, &without_task)?;
        }
        self.prefix(&steps)?;
        self.write(WHOLE, "")?;
        self.probe()
    }

    /// What cudafe++ writes for the headers is what it writes the same for two sources.
    fn prefix(&self, steps: &Steps) -> Result<(), Cannot> {
        let text = self.read(HOST_TEXT)?;
        let mut written = Vec::new();
        for own in ["# 1 \"first.h\"\nint first;\n", "# 72 \"another.h\"\nlong another;\n"] {
            std::fs::write(self.folder.join(HOST_TEXT), [text.as_slice(), own.as_bytes()].concat())
                .map_err(|error| error.to_string())?;
            self.shell(steps, &steps.cudafe)?;
            written.push(self.read(HOST_CODE)?);
        }
        std::fs::write(self.folder.join(HOST_TEXT), text).map_err(|error| error.to_string())?;
        let same = written[0].iter().zip(&written[1]).take_while(|(one, other)| one == other).count();
        let end = written[0][..same].iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        std::fs::write(self.folder.join(PREFIX), &written[0][..end]).map_err(|error| error.to_string())?;
        let object = steps.object.replace(" -c -x c++ ", " -x c++-header ");
        let object =
            object.replace(&format!("\"{HOST_CODE}\" -o \"candidate.o\""), &format!("{PREFIX} -o {PREFIX}.gch"));
        self.shell(steps, &object).map(drop)
    }

    /// A source must come to the same by nvcc and by the steps.
    fn probe(&self) -> Result<(), Cannot> {
        let folder = self.folder.join("probe");
        std::fs::create_dir_all(folder.join("kept")).map_err(|error| error.to_string())?;
        for (name, text) in [("candidate.cu", PROBE), ("task.h", "")] {
            std::fs::write(folder.join(name), text).map_err(|error| error.to_string())?;
        }
        let made = |ended: Result<Ended, EvaluatorError>| match ended {
            Ok(Ended::Well(_)) => Ok(COMPARED.map(|file| compared(&folder.join(file)))),
            other => Err(format!("the probe does not compile: {other:?}")),
        };
        let by_nvcc = made(process::run((self.nvcc)(), &folder, self.limits))?;
        let prepared = Prepared::open(self.folder, self.limits).ok_or("what was made can't be read")?;
        let by_steps = made(prepared.compile(&folder, self.limits))?;
        let _ = std::fs::remove_dir_all(&folder);
        let other = (0..COMPARED.len()).find(|at| by_nvcc[*at].is_empty() || by_nvcc[*at] != by_steps[*at]);
        other.map_or(Ok(()), |at| Err(format!("{} of the probe does not come out as by nvcc", COMPARED[at])))
    }

    fn write(&self, name: &str, text: &str) -> Result<(), Cannot> {
        std::fs::write(self.folder.join(name), text).map_err(|error| format!("{name}: {error}"))
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, Cannot> {
        std::fs::read(self.folder.join(name)).map_err(|error| format!("{name}: {error}"))
    }

    fn shell(&self, steps: &Steps, script: &str) -> Result<String, Cannot> {
        self.run(steps.shell(script, self.limits))
    }

    fn run(&self, command: Command) -> Result<String, Cannot> {
        match process::run(command, self.folder, self.limits) {
            Ok(Ended::Well(said)) => Ok(said),
            Ok(Ended::Badly(said) | Ended::Limit(said)) => Err(said),
            Err(error) => Err(error.message),
        }
    }
}

/// Directives that leave the macros `all` where there were those of `before`.
fn left(before: &str, all: &str) -> String {
    let (known, now): (std::collections::HashSet<&str>, std::collections::HashSet<&str>) =
        (before.lines().collect(), all.lines().collect());
    let name = |line: &str| -> Option<String> {
        let rest = line.strip_prefix("#define ")?;
        Some(rest.split(['(', ' ']).next().unwrap_or(rest).to_owned())
    };
    let gone = before.lines().filter(|line| !now.contains(line)).filter_map(name);
    let new = all.lines().filter(|line| !known.contains(line));
    gone.map(|name| format!("#undef {name}\n")).chain(new.map(|line| format!("{line}\n"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What nvcc 13.0 says, shortened.
    const SAID: &str = r##"#$ PATH=/cuda/bin:/usr/bin
#$ _SPACE_=
#$ CICC_PATH=/cuda/nvvm/bin
#$ INCLUDES="-I/cuda/include"
#$ gcc -std=c++17 -E -x c++ -O1 -include "cuda_runtime.h" -include "task.h" -m64 "candidate.cu" -o "kept/candidate.cpp4.ii"
#$ cudafe++ --c++17 --gen_c_file_name "kept/candidate.cudafe1.cpp" "kept/candidate.cpp4.ii"
#$ gcc -D__CUDA_ARCH__=900 -E -x c++ -include "cuda_runtime.h" -include "task.h" -m64 "candidate.cu" -o "kept/candidate.cpp1.ii"
#$ "$CICC_PATH/cicc" --c++17 -arch compute_90  "kept/candidate.cpp1.ii" -o "kept/candidate.ptx"
#$ ptxas -w -arch=sm_90 "kept/candidate.ptx"  -o "kept/candidate.sm_90.cubin"
#$ fatbinary --create="kept/candidate.fatbin" --embedded-fatbin="kept/candidate.fatbin.c"
#$ gcc -std=c++17 -c -x c++  -O1 -m64 "kept/candidate.cudafe1.cpp" -o "candidate.o"
"##;

    #[test]
    fn steps_are_taken_as_nvcc_says_them() {
        let steps = Steps::read(SAID).unwrap();
        let named: Vec<&str> = steps.variables.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(named, ["CICC_PATH", "PATH"]);
        assert!(steps.object.ends_with("-o \"candidate.o\""));
    }

    #[test]
    fn other_steps_are_not_known() {
        let without = |gone: &str| SAID.lines().filter(|line| !line.contains(gone)).collect::<Vec<_>>().join("\n");
        for gone in ["ptxas", "fatbinary", "cudafe++ ", "PATH=/cuda/bin"] {
            assert_eq!(Steps::read(&without(gone)), None, "{gone}");
        }
        assert_eq!(Steps::read(&SAID.replace("cpp4", "cpp2")), None);
        assert_eq!(Steps::read(&SAID.replace("-include \"task.h\"", "")), None);
        assert_eq!(Steps::read(&format!("{SAID}#$ nvlink -o a.out\n")), None);
    }

    #[test]
    fn macros_that_headers_took_back_are_taken_back() {
        let before = "#define A 1\n#define linux 1\n#define F(x) x\n";
        let all = "#define A 1\n#define F(x) (x)\n#define NEW\n";
        let mut lines: Vec<String> = left(before, all).lines().map(str::to_owned).collect();
        lines[..2].sort();
        assert_eq!(lines, ["#undef F", "#undef linux", "#define F(x) (x)", "#define NEW"]);
    }
}
