//! `cuda-agent doctor`: whether this machine and the store have what pipelines need.

use std::path::{Path, PathBuf};
use std::process::Command;

use cuda_agent_engine::execute::supervise;
use cuda_agent_engine::schedule;
use cuda_agent_engine::store::share::Probe;
use serde_json::json;

use crate::project::Project;
use crate::{CliError, Exit, Finding, Machine, print, print_json};

struct Check {
    name: &'static str,
    state: State,
    message: String,
    hint: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Good,
    Missing,
    Bad,
}

impl Check {
    fn new(name: &'static str, state: State, message: impl Into<String>) -> Self {
        Self { name, state, message: message.into(), hint: None }
    }

    fn hint(mut self, hint: &str) -> Self {
        self.hint = Some(hint.to_owned());
        self
    }
}

/// Checks everything and says what each finding is for. Only what every pipeline needs makes the command fail.
pub async fn doctor(project: &Project, of_stages: fn(&Machine) -> Vec<Finding>) -> Result<Exit, CliError> {
    let host = project.host();
    let mut checks = vec![Check::new(
        "machine",
        State::Good,
        format!("{} cores, {} of memory, {}", host.cpus, schedule::bytes(host.memory), host.cpu_model),
    )];
    checks.push(match host.gpus.as_slice() {
        [] => Check::new("gpu", State::Missing, "none: everything but GPU timing works"),
        gpus => {
            let message = format!("{} × {}, driver {}", gpus.len(), gpus[0].model, gpus[0].driver);
            let others = match host.ignored_gpus {
                0 => String::new(),
                count => {
                    format!("; {count} of other models are not used (CUDA_VISIBLE_DEVICES can choose them instead)")
                }
            };
            Check::new("gpu", State::Good, message + &others)
        }
    });
    let toolkits = toolkits(&host.python);
    checks.extend([nvcc(&toolkits), nvrtc(&toolkits)]);
    let found = of_stages(&project.machine()).into_iter();
    checks.extend(found.map(|found| {
        let state = if found.is_good { State::Good } else { State::Missing };
        Check { name: found.name, state, message: found.message, hint: found.hint }
    }));
    checks.push(sanitizer());
    checks.push(compiler());
    checks.extend(python(&host.python, torch_needed(project).as_deref()));
    checks.push(namespaces());
    checks.extend(store(project).await);
    let bad = checks.iter().any(|check| check.state == State::Bad);
    if project.common.json {
        let word = |state| match state {
            State::Good => "good",
            State::Missing => "missing",
            State::Bad => "bad",
        };
        let values: Vec<_> = checks
            .iter()
            .map(|c| json!({ "check": c.name, "state": word(c.state), "message": c.message, "hint": c.hint }))
            .collect();
        print_json(&values);
    } else {
        for check in &checks {
            let mark = match check.state {
                State::Good => "✓",
                State::Missing => "–",
                State::Bad => "✗",
            };
            print(&format!("{mark} {:<12} {}\n", check.name, check.message));
            if let Some(hint) = &check.hint {
                print(&format!("  {:<12} {hint}\n", ""));
            }
        }
    }
    Ok(if bad { Exit::Environment } else { Exit::Done })
}

fn first_line(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}

fn nvcc(toolkits: &[PathBuf]) -> Check {
    let nvcc = existing(toolkits, &["bin/nvcc"]).unwrap_or_else(|| "nvcc".into());
    let output = Command::new(&nvcc).arg("--version").output().ok();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    match text.lines().find(|line| line.contains("release")) {
        Some(line) => Check::new("nvcc", State::Good, format!("{} ({})", line.trim(), nvcc.display())),
        None => Check::new("nvcc", State::Missing, "none: `launch` candidates can't be compiled for a GPU").hint(CUDA),
    }
}

fn nvrtc(toolkits: &[PathBuf]) -> Check {
    let names = ["lib/libnvrtc.so.13", "lib64/libnvrtc.so.13", "targets/x86_64-linux/lib/libnvrtc.so.13"];
    match existing(toolkits, &names) {
        Some(path) => Check::new("nvrtc", State::Good, path.display().to_string()),
        None => Check::new("nvrtc", State::Missing, "none: `kernel` candidates can't be compiled for a GPU").hint(CUDA),
    }
}

const CUDA: &str =
    "`make venv` installs CUDA 13's compilers as wheels; CUDA_AGENT_CUDA can name a toolkit of CUDA 13 instead";

/// Where CUDA's compilers may be, best first: what is named, the interpreter's wheels, the system's.
fn toolkits(python: &Path) -> Vec<PathBuf> {
    const WHEELS: &str = "import nvidia; print(next(iter(nvidia.__path__)))";
    let wheels = first_line(Command::new(python).args(["-c", WHEELS])).map(|folder| Path::new(&folder).join("cu13"));
    let named = |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let system = Some(PathBuf::from("/usr/local/cuda"));
    [named("CUDA_AGENT_CUDA"), wheels, named("CUDA_HOME"), system].into_iter().flatten().collect()
}

fn existing(folders: &[PathBuf], names: &[&str]) -> Option<PathBuf> {
    folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name))).find(|path| path.exists())
}

fn sanitizer() -> Check {
    const PLACES: [&str; 3] = [
        "compute-sanitizer",
        "/usr/local/cuda/bin/compute-sanitizer",
        "/usr/local/cuda/compute-sanitizer/compute-sanitizer",
    ];
    match PLACES.into_iter().find(|place| first_line(Command::new(place).arg("--version")).is_some()) {
        Some(place) => Check::new("sanitizer", State::Good, place),
        None => Check::new(
            "sanitizer",
            State::Missing,
            "no compute-sanitizer: `check --sanitizer` has nothing to run; it comes with the CUDA toolkit",
        ),
    }
}

fn compiler() -> Check {
    let Some(line) = first_line(Command::new("g++").arg("--version")) else {
        return Check::new("c++", State::Missing, "no g++: torch.compile and the CPU device of `check` need it")
            .hint("install g++ (Debian: apt-get install g++)");
    };
    // g++ answers with the bare name of what it does not have.
    match first_line(Command::new("g++").arg("-print-file-name=libasan.so")).is_some_and(|path| path.contains('/')) {
        true => Check::new("c++", State::Good, line),
        false => {
            Check::new("c++", State::Missing, format!("{line}, without AddressSanitizer: no CPU device for `check`"))
                .hint("install libasan of this version of g++")
        }
    }
}

/// A stage of the project's pipeline whose kind stands on torch, and its kind.
fn torch_needed(project: &Project) -> Option<String> {
    let pipeline = project.default_pipeline().and_then(|file| project.pipeline(&file)).ok()?;
    let stage = pipeline
        .stages
        .iter()
        .find(|stage| stage.kind.toolchain.python.iter().flatten().any(|package| package == "torch"))?;
    Some(format!("stage `{}` ({})", stage.name, stage.kind.name))
}

/// `torch_user` is who needs torch, if anybody does.
fn python(python: &Path, torch_user: Option<&str>) -> Vec<Check> {
    let shown = python.display();
    let Some(version) = first_line(Command::new(python).arg("--version")) else {
        return vec![
            Check::new("python", State::Bad, format!("{shown} cannot be started"))
                .hint("`make venv` makes .venv; or name an interpreter with `python:` in cuda-agent.yaml"),
        ];
    };
    let mut checks = vec![Check::new("python", State::Good, format!("{version} ({shown})"))];
    const QUESTION: &str = "import torch, transformers; print(f'torch {torch.__version__}, transformers \
        {transformers.__version__}, CUDA ' + ('works' if torch.cuda.is_available() else 'not available'))";
    checks.push(match first_line(Command::new(python).args(["-c", QUESTION])) {
        Some(line) => Check::new("torch", State::Good, line),
        None => {
            let (state, who) = match torch_user {
                Some(stage) => (State::Bad, format!("{stage} needs them")),
                None => (State::Missing, "only `check` and the kinds ops/* and kernels/* need them".to_owned()),
            };
            Check::new("torch", state, format!("torch and transformers cannot be imported by {shown}: {who}"))
                .hint("`make venv` installs them from requirements.txt")
        }
    });
    checks
}

fn namespaces() -> Check {
    let probe = Command::new("/proc/self/exe").args([supervise::COMMAND, "probe"]).status();
    match probe.is_ok_and(|status| status.success()) {
        true => Check::new("processes", State::Good, "programs run in PID namespaces of their own"),
        false => Check::new(
            "processes",
            State::Missing,
            "no PID namespaces here (not root): programs are ended by a subreaper, which is nearly as good",
        ),
    }
}

async fn store(project: &Project) -> Vec<Check> {
    let store = match project.store() {
        Ok(store) => store,
        Err(error) => return vec![Check::new("store", State::Bad, error.message)],
    };
    vec![match store.probe().await {
        Ok(Probe::Keeps) => {
            Check::new("store", State::Good, format!("{}: writes, reads, create-if-absent", store.url()))
        }
        Ok(Probe::Overwrites) => {
            Check::new("store", State::Bad, format!("{}: it overwrites what create-if-absent should keep", store.url()))
                .hint("two writers could both believe they won: see `single_writer:` in docs/share.md")
        }
        Err(error) => {
            let hint = error.hint.clone();
            let check = Check::new("store", State::Bad, error.to_string());
            check.hint(
                &hint.unwrap_or_else(|| "check that the folder can be written to and that the disk is not full".into()),
            )
        }
    }]
}
