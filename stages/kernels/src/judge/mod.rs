//! Verdicts for training: a long-lived evaluator that is asked many questions by many threads, some of them twice.
//!
//! - **A verdict is journalled before it is used**, and a question that the journal answers is never put again: a run that
//!   was killed goes on with the rewards that it had.
//! - **Equal questions are one.** The question is a task with its settings, a source, and whether to take times; asked by
//!   several threads at once, it is put once, and all of them wait for it.
//! - **A null reward is not 0.** A candidate that nothing can be said of has none, and whoever asked must drop it.
//! - **Tasks are admitted** ([`Judge::admit`]) before candidates are: what can't be described, what a constant would answer, and, with
//!   `screen`, what passes without the work is refused, with the reason.
//! - An error of the machine answers those who wait for it and is not remembered.
//!
//! Reference and compiled baselines of a task are the evaluator's own, which keeps them; see `evaluator`.

mod journal;

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::baseline::Baseline;
use crate::candidate::{Candidate, Format, without_byte_order_mark};
use crate::evaluator::{Evaluator, Profiled, Settings, Wanted, secret};
use crate::fault::EvaluatorError;
use crate::header;
use crate::judgement::TaskError;
use crate::reference::{Answered, Policy, Protocol, Task};
use crate::reward::Scheme;
use crate::verdict::{Outcome, Verdict};

use self::journal::Journal;

/// What a judge asks; the evaluator, or a stand-in for tests.
pub trait Bench: Sync {
    /// The contract with candidates.
    fn describe(&self, task: &Task) -> Answered<Contract>;
    /// Answers that would pass without the work; none for a task that is sound.
    fn screen(&self, task: &Task) -> Answered<Vec<String>>;
    /// A verdict.
    fn evaluate(&self, task: &Task, candidate: &Candidate, settings: &Settings) -> Result<Verdict, EvaluatorError>;
    /// How many questions it is worth asking at once.
    fn width(&self) -> usize;
    /// An error once there is no device left.
    fn is_in_service(&self) -> Result<(), EvaluatorError>;
}

impl Bench for Evaluator {
    fn describe(&self, task: &Task) -> Answered<Contract> {
        let described = match Evaluator::describe(self, task)? {
            Ok(described) => described,
            Err(error) => return Ok(Err(error)),
        };
        Ok(Evaluator::steps(self, task)?.map(|steps| Contract {
            header: header::contract(&described.spec),
            parameters: header::parameter_list(&described.spec),
            steps: header::steps(&described.spec, &steps),
        }))
    }

    fn screen(&self, task: &Task) -> Answered<Vec<String>> {
        let wanted = Wanted { task, names: &[], trials: 0, seed: secret()?, screen: true, kernel_times: false };
        let screened = self.profile(&wanted)?;
        let passes =
            |profiled: Profiled| profiled.degenerate().unwrap_or_default().into_iter().map(str::to_owned).collect();
        Ok(screened.map(passes))
    }

    fn evaluate(&self, task: &Task, candidate: &Candidate, settings: &Settings) -> Result<Verdict, EvaluatorError> {
        Evaluator::evaluate(self, task, candidate, secret()?, settings)
    }

    fn width(&self) -> usize {
        Evaluator::width(self)
    }

    fn is_in_service(&self) -> Result<(), EvaluatorError> {
        Evaluator::is_in_service(self)
    }
}

/// How a judge judges.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Which answers count as right.
    pub policy: Policy,
    /// The setting of the model.
    pub protocol: Protocol,
    /// Values for constants of the tasks.
    pub set: Map<String, Value>,
    /// Of every verdict; the baselines are those of a question with times.
    pub settings: Settings,
    /// Whether to refuse tasks that answers without the work pass.
    pub screen: bool,
}

impl Rules {
    /// `strict`, the milestones, five inputs, times beside eager and torch.compile where they are asked for.
    pub fn strict() -> Self {
        Self {
            policy: Policy::Strict,
            protocol: Protocol::CudaAgent,
            set: Map::new(),
            settings: Settings {
                inputs: 5,
                limit: std::time::Duration::from_secs(5),
                baselines: vec![Baseline::Eager, Baseline::Compile],
                max_trials: 100,
                sanitizer: false,
                reward: Scheme::Milestone,
            },
            screen: true,
        }
    }
}

/// What a candidate is told of an admitted task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contract {
    /// The part of `task.h` that is the task's own: sizes, constants, parameters.
    pub header: String,
    /// `const float* x, float* out`.
    pub parameters: String,
    /// What the forward computes, a line for each elementary step (`python/steps.py`); empty where it has no such form.
    #[serde(default)]
    pub steps: String,
}

/// A task that may be worked with, or why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Admission {
    /// It may.
    Admitted(Contract),
    /// It can't be run, or teaches nothing.
    Refused(String),
}

/// A verdict, as far as training needs it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Judged {
    /// How it ended.
    pub outcome: Outcome,
    /// Why, in one line.
    pub message: String,
    /// The verdict as a person reads it, without its reward: what a repair is asked with.
    pub report: String,
    /// What it is worth; null where nothing is said of the candidate.
    pub reward: Option<f64>,
    /// How many times faster than eager.
    pub speedup_eager: Option<f64>,
    /// How many times faster than torch.compile.
    pub speedup_compile: Option<f64>,
    /// Seconds that the verdict took, waiting included.
    pub seconds: f64,
}

impl Judged {
    /// Whether every check passed.
    pub fn is_correct(&self) -> bool {
        self.outcome == Outcome::Correct
    }
}

impl From<&Verdict> for Judged {
    fn from(verdict: &Verdict) -> Self {
        let performance = verdict.performance.as_ref();
        let speedup =
            |baseline| performance.and_then(|it| it.baselines.get(&baseline)).map(|compared| compared.speedup);
        let without = Verdict { reward: None, ..verdict.clone() };
        Self {
            outcome: verdict.outcome,
            message: verdict.message.clone(),
            report: without.to_string().trim_end().to_owned(),
            reward: verdict.reward,
            speedup_eager: speedup(Baseline::Eager),
            speedup_compile: speedup(Baseline::Compile),
            seconds: 0.0,
        }
    }
}

/// A line of the journal.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    Verdict { question: String, judged: Judged },
    Task { question: String, admission: Admission },
}

/// A journal, and what it knows.
pub(crate) struct Opened {
    journal: Journal,
    verdicts: Once<Judged>,
    tasks: Once<Admission>,
}

/// Opens the journal at `path`; [`io::ErrorKind::WouldBlock`] where another process has it.
pub(crate) fn journal_at(path: &Path) -> io::Result<Opened> {
    let (verdicts, tasks) = (Once::default(), Once::default());
    let journal = Journal::open(path, |line| match line {
        Line::Verdict { question, judged } => verdicts.know(question, judged),
        Line::Task { question, admission } => tasks.know(question, admission),
    })?;
    Ok(Opened { journal, verdicts, tasks })
}

/// A judge. Threads share it.
pub struct Judge<B = Evaluator> {
    bench: B,
    rules: Rules,
    journal: Journal,
    verdicts: Once<Judged>,
    tasks: Once<Admission>,
}

impl<B: Bench> Judge<B> {
    /// A judge whose journal is at `path`. What is there already is known; it must come from the same kind of device.
    pub fn new(bench: B, rules: Rules, path: &Path) -> io::Result<Self> {
        Ok(Self::over(bench, rules, journal_at(path)?))
    }

    pub(crate) fn over(bench: B, rules: Rules, opened: Opened) -> Self {
        let Opened { journal, verdicts, tasks } = opened;
        Self { bench, rules, journal, verdicts, tasks }
    }

    /// The task that a code is under this judge's rules.
    pub fn task(&self, code: &str) -> Task {
        let Rules { policy, protocol, set, .. } = &self.rules;
        let code = without_byte_order_mark(code);
        Task { code, name: "the task".into(), set: set.clone(), protocol: *protocol, policy: *policy }
    }

    /// How many questions it is worth asking at once.
    pub fn width(&self) -> usize {
        self.bench.width()
    }

    /// An error once there is no device left: all questions will fail.
    pub fn is_in_service(&self) -> Result<(), EvaluatorError> {
        self.bench.is_in_service()
    }

    /// Whether a task may be worked with.
    pub fn admit(&self, task: &Task) -> Result<Admission, EvaluatorError> {
        let question = digest(&serde_json::json!(["admit", task.digest(), self.rules.screen]));
        self.tasks.answer(&question, || {
            let admission = self.examine(task)?;
            self.keep(&Line::Task { question: question.clone(), admission: admission.clone() })?;
            Ok(admission)
        })
    }

    fn examine(&self, task: &Task) -> Result<Admission, EvaluatorError> {
        let contract = match self.bench.describe(task)? {
            Ok(contract) => contract,
            Err(error) => return refused(error),
        };
        if !self.rules.screen {
            return Ok(Admission::Admitted(contract));
        }
        match self.bench.screen(task)? {
            Ok(passes) if passes.is_empty() => Ok(Admission::Admitted(contract)),
            Ok(passes) => Ok(Admission::Refused(format!("degenerate: it lets pass {}", passes.join(", ")))),
            Err(error) => refused(error),
        }
    }

    /// The verdict on a `kernel` candidate. With `timing` a correct one is timed. `seconds` is this call's.
    pub fn ask(&self, task: &Task, source: &str, timing: bool) -> Result<Judged, EvaluatorError> {
        let started = Instant::now();
        let source = without_byte_order_mark(source);
        let candidate = Candidate { format: Format::Kernel, source, name: "candidate.cu".into() };
        let settings = self.settings(timing);
        let question = digest(&question_of(task, &candidate, &settings));
        let judged = self.verdicts.answer(&question, || {
            let verdict = self.bench.evaluate(task, &candidate, &settings)?;
            // Another day, or another card, may have more.
            if let Some(error) = verdict.task_error.as_ref().filter(|error| error.is_memory()) {
                return Err(EvaluatorError::new(error.message.clone()));
            }
            let judged = Judged { seconds: started.elapsed().as_secs_f64(), ..Judged::from(&verdict) };
            self.keep(&Line::Verdict { question: question.clone(), judged: judged.clone() })?;
            Ok(judged)
        })?;
        Ok(Judged { seconds: started.elapsed().as_secs_f64(), ..judged })
    }

    fn settings(&self, timing: bool) -> Settings {
        let settings = self.rules.settings.clone();
        if timing { settings } else { Settings { baselines: Vec::new(), ..settings } }
    }

    fn keep(&self, line: &Line) -> Result<(), EvaluatorError> {
        let failed = |error| EvaluatorError::new(format!("the journal of verdicts can't be written: {error}"));
        self.journal.append(line).map_err(failed)
    }
}

fn refused(error: TaskError) -> Result<Admission, EvaluatorError> {
    if error.is_memory() {
        return Err(EvaluatorError::new(error.message));
    }
    let line = error.line.map(|line| format!("line {line}: ")).unwrap_or_default();
    Ok(Admission::Refused(format!("{line}{}", error.message)))
}

/// Everything that a verdict depends on, but the device.
fn question_of(task: &Task, candidate: &Candidate, settings: &Settings) -> Value {
    let Settings { inputs, limit, baselines, max_trials, sanitizer, reward } = settings;
    let max_trials = if baselines.is_empty() { 0 } else { *max_trials };
    serde_json::json!([
        task.digest(),
        candidate.digest(),
        inputs,
        limit.as_secs_f64(),
        baselines,
        max_trials,
        sanitizer,
        format!("{reward:?}"),
    ])
}

fn digest(identity: &Value) -> String {
    let digest = blake3::derive_key("cuda-agent judge question v1", identity.to_string().as_bytes());
    blake3::Hash::from_bytes(digest).to_hex().to_string()
}

/// Answers that are found once, whoever asks and however many ask at the same time.
struct Once<T> {
    known: Mutex<HashMap<String, T>>,
    underway: Mutex<HashMap<String, Arc<Underway<T>>>>,
}

/// An answer that somebody is finding.
struct Underway<T> {
    answer: Mutex<Option<Result<T, EvaluatorError>>>,
    found: Condvar,
}

impl<T> Default for Once<T> {
    fn default() -> Self {
        Self { known: Mutex::default(), underway: Mutex::default() }
    }
}

impl<T: Clone> Once<T> {
    fn know(&self, question: String, answer: T) {
        self.known.lock().expect("no panics while it is held").insert(question, answer);
    }

    fn look_up(&self, question: &str) -> Option<T> {
        self.known.lock().expect("no panics while it is held").get(question).cloned()
    }

    fn answer(&self, question: &str, find: impl FnOnce() -> Result<T, EvaluatorError>) -> Result<T, EvaluatorError> {
        let (entry, is_mine) = {
            let mut underway = self.underway.lock().expect("no panics while it is held");
            // Looked up with the lock held: an answer leaves `underway` only once it is known.
            if let Some(known) = self.look_up(question) {
                return Ok(known);
            }
            match underway.get(question) {
                Some(entry) => (entry.clone(), false),
                None => {
                    let entry = Arc::new(Underway { answer: Mutex::new(None), found: Condvar::new() });
                    underway.insert(question.to_owned(), entry.clone());
                    (entry, true)
                }
            }
        };
        if !is_mine {
            let answer = entry.answer.lock().expect("no panics while it is held");
            let answer = entry.found.wait_while(answer, |answer| answer.is_none()).expect("no panics while it is held");
            return answer.clone().expect("it was waited for");
        }
        let mut leaving = Leaving { once: self, entry: &entry, question, answer: None };
        let answer = find();
        leaving.answer = Some(answer.clone());
        answer
    }
}

/// Tells those who wait, also when whoever was finding the answer panicked.
struct Leaving<'a, T: Clone> {
    once: &'a Once<T>,
    entry: &'a Underway<T>,
    question: &'a str,
    answer: Option<Result<T, EvaluatorError>>,
}

impl<T: Clone> Drop for Leaving<'_, T> {
    fn drop(&mut self) {
        let answer = self.answer.take().unwrap_or_else(|| Err(EvaluatorError::new("another thread broke off")));
        if let Ok(answer) = &answer {
            self.once.know(self.question.to_owned(), answer.clone());
        }
        self.once.underway.lock().expect("no panics while it is held").remove(self.question);
        *self.entry.answer.lock().expect("no panics while it is held") = Some(answer);
        self.entry.found.notify_all();
    }
}

#[cfg(test)]
mod tests;
