//! `cuda-agent doctor`: whether this machine and the store have what pipelines need.

use std::path::Path;
use std::process::Command;

use serde_json::json;

use super::project::Project;
use super::{CliError, Exit, print, print_json};
use crate::execute::supervise;
use crate::schedule;
use crate::store::share::Probe;

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
pub async fn doctor(project: &Project) -> Result<Exit, CliError> {
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
    checks.push(nvcc());
    checks.push(compiler());
    checks.extend(python(&host.python));
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

fn nvcc() -> Check {
    let output = Command::new("nvcc").arg("--version").output().ok();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    match text.lines().find(|line| line.contains("release")) {
        Some(line) => Check::new("nvcc", State::Good, line.trim()),
        None => Check::new("nvcc", State::Missing, "not on the PATH; only stages that compile CUDA need it"),
    }
}

fn compiler() -> Check {
    match first_line(Command::new("g++").arg("--version")) {
        Some(line) => Check::new("c++", State::Good, line),
        None => Check::new("c++", State::Bad, "no g++: torch.compile needs a C++ compiler, so ops/measure cannot run")
            .hint("install g++ (Debian: apt-get install g++)"),
    }
}

fn python(python: &Path) -> Vec<Check> {
    let shown = python.display();
    let Some(version) = first_line(Command::new(python).arg("--version")) else {
        return vec![
            Check::new("python", State::Bad, format!("{shown} cannot be started"))
                .hint("`make setup` makes .venv; or name an interpreter with `python:` in cuda-agent.yaml"),
        ];
    };
    let mut checks = vec![Check::new("python", State::Good, format!("{version} ({shown})"))];
    const QUESTION: &str = "import torch, transformers; print(f'torch {torch.__version__}, transformers \
        {transformers.__version__}, CUDA ' + ('works' if torch.cuda.is_available() else 'not available'))";
    checks.push(match first_line(Command::new(python).args(["-c", QUESTION])) {
        Some(line) => Check::new("torch", State::Good, line),
        None => Check::new("torch", State::Bad, format!("torch and transformers cannot be imported by {shown}"))
            .hint("`make setup` installs them from requirements.txt"),
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
