//! What the evaluator says of a candidate, as JSON and for people.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};
use serde_json::Number;

use crate::baseline::Baseline;
use crate::candidate::Format;
use crate::compile::{Diagnostic, KernelResources};
use crate::fault::{Fault, FaultKind};
use crate::judgement::{Defect, Judgement, OutputJudgement, Part, TaskError, Worst};
use crate::profile::roofline::Bound;
use crate::reference::{DeviceInfo, Policy, Protocol};

/// The version of the JSON form.
pub const SCHEMA: u32 = 1;

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Every check passed.
    Correct,
    /// It does not compile.
    CompileError,
    /// Values beyond the tolerance.
    Wrong,
    /// Elements of an output that hold what was there before the run.
    Unwritten,
    /// Infinite or no numbers, where the reference is finite.
    Nonfinite,
    /// It wrote to an input, a parameter or a buffer.
    InputChanged,
    /// It read or wrote beside its tensors.
    OutOfBounds,
    /// Threads used one place with nothing to order them.
    Race,
    /// An access whose address is no multiple of its size.
    Misaligned,
    /// It ended its process, or the GPU gave up.
    Crash,
    /// Threads wait for threads that never come.
    Deadlock,
    /// It did not end within its limit.
    Timeout,
    /// A launch was refused.
    LaunchError,
    /// It cannot be judged on this device; nothing is said of its correctness.
    Unsupported,
    /// The task cannot be worked with; nothing is said of the candidate.
    TaskError,
}

impl Outcome {
    /// The word that JSON and tables use.
    pub fn word(self) -> String {
        serde_json::to_value(self).expect("a word").as_str().expect("a word").to_owned()
    }

    /// Whether anything is said of the candidate.
    pub fn is_verdict(self) -> bool {
        !matches!(self, Self::Unsupported | Self::TaskError)
    }
}

impl From<FaultKind> for Outcome {
    fn from(kind: FaultKind) -> Self {
        match kind {
            FaultKind::Timeout => Self::Timeout,
            FaultKind::Crash => Self::Crash,
            FaultKind::OutOfBounds => Self::OutOfBounds,
            FaultKind::Race => Self::Race,
            FaultKind::Deadlock => Self::Deadlock,
            FaultKind::Misaligned => Self::Misaligned,
            FaultKind::Launch => Self::LaunchError,
            FaultKind::Unsupported => Self::Unsupported,
        }
    }
}

/// A verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// [`SCHEMA`].
    pub schema: u32,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, in one line.
    pub message: String,
    /// Digest of the task with its settings.
    pub task: String,
    /// Digest of the candidate's format and source.
    pub candidate: String,
    /// How the source was read.
    pub format: Format,
    /// Where it was judged.
    pub device: Option<DeviceInfo>,
    /// The yardstick.
    pub policy: Policy,
    /// The setting of the reference model.
    pub protocol: Protocol,
    /// Inputs that were checked, each twice.
    pub inputs: u32,
    /// The seed of the inputs, known only now.
    pub seed: String,
    /// The compiler's report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compiled: Option<Compiled>,
    /// What the compiler says against it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub diagnostics: Vec<Diagnostic>,
    /// Why its run ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
    /// Which results were wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
    /// Errors of a correct candidate, the worst over all inputs, by output.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accuracy: Vec<OutputJudgement>,
    /// Why there is nothing to judge against.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task_error: Option<TaskError>,
    /// What compute-sanitizer said, where it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sanitizer: Option<String>,
    /// How fast it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub performance: Option<Performance>,
    /// What it is worth; `None` where nothing is said of the candidate, or it was not timed.
    pub reward: Option<f64>,
    /// Seconds that the parts of this verdict took.
    pub seconds: Seconds,
}

/// What the compiler made of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compiled {
    /// Its name and version.
    pub compiler: String,
    /// Per kernel; empty for the CPU device.
    pub kernels: Vec<KernelResources>,
    /// Seconds that compiling took, when it was done.
    pub seconds: f64,
}

/// A wrong result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// The input, counted from one.
    pub input: u32,
    /// Whether it was found while the clock ran, in results that had been right before.
    pub timed: bool,
    /// What was found.
    pub judgement: Judgement,
}

/// Times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Performance {
    /// The candidate's median time, in milliseconds.
    pub candidate_ms: f64,
    /// The summed time of its kernels and copies, where CUPTI could look on. Counts where it is clearly the larger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_ms: Option<f64>,
    /// By baseline.
    pub baselines: BTreeMap<Baseline, Compared>,
    /// Baselines that could not be made, and why.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub missing: BTreeMap<String, String>,
    /// Trials that were taken, each with every side in random order.
    pub trials: u32,
    /// Seconds for which nothing else used the card.
    #[serde(default)]
    pub alone_s: f64,
    /// What the clock's time went to.
    #[serde(default)]
    pub clock_s: ClockSeconds,
    /// The fewest bytes that the task moves.
    pub bytes: u64,
    /// The floating-point operations that it takes.
    pub flops: u64,
    /// How far it is from the card's limit, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roofline: Option<Roofline>,
}

/// What the clock's time went to, in seconds of wall time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClockSeconds {
    /// Beside others: laying out, warming baselines up, loading.
    pub prepare: f64,
    /// Beside others: drawing inputs of runs.
    pub ahead: f64,
    /// Waiting for the card: to be beside others, and to have it to itself.
    pub wait: f64,
    /// With the card to itself: filling sets, and copying what runs left there.
    pub fill: f64,
    /// The candidate's timed runs.
    pub run: f64,
    /// The baselines' runs.
    pub baselines: f64,
    /// Drawing inputs of runs that were not drawn ahead.
    pub draw: f64,
    /// Judging these.
    pub judge: f64,
    /// Runs for `kernel_ms`.
    pub kernels: f64,
    /// Beside others again: judging.
    pub after: f64,
}

/// A candidate beside a baseline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// The baseline's median time, in milliseconds.
    pub ms: f64,
    /// Its time over the candidate's, paired trial by trial.
    pub speedup: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// The card's limit for a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Roofline {
    /// No kernel is faster than this, in milliseconds, unless the data lies in caches.
    pub ms: f64,
    /// What limits it.
    pub bound: Bound,
    /// The limit over the candidate's time.
    pub share: f64,
}

/// Where the time of a verdict went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Seconds {
    /// Compiling; near 0 where the result was cached.
    pub compile: f64,
    /// Checking results.
    pub verify: f64,
    /// Taking times, waiting for the card included.
    pub profile: f64,
}

impl Verdict {
    /// Whether the candidate is right.
    pub fn is_correct(&self) -> bool {
        self.outcome == Outcome::Correct
    }
}

impl Display for Verdict {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        let outcome = self.outcome.word().replace('_', " ");
        // The compiler's words stand below; the message is the first of them.
        let message = if self.diagnostics.is_empty() { format!(" {}", self.message) } else { String::new() };
        writeln!(out, "{outcome}:{message}")?;
        self.diagnostics.iter().try_for_each(|diagnostic| write_diagnostic(out, diagnostic))?;
        if let Some(failure) = &self.failure {
            write_failure(out, failure)?;
        }
        // While times are taken there are inputs beyond those that are counted.
        if self.fault.is_some() && self.seconds.profile == 0.0 {
            writeln!(out, "  on input {}", self.inputs)?;
        }
        if let Some(error) = &self.task_error {
            write_task_error(out, error)?;
        }
        self.accuracy.iter().try_for_each(|output| write_accuracy(out, output))?;
        if let Some(sanitizer) = &self.sanitizer {
            writeln!(out, "  sanitizer  {sanitizer}")?;
        }
        if let Some(performance) = &self.performance {
            write_performance(out, performance)?;
        }
        if let Some(compiled) = &self.compiled {
            compiled.kernels.iter().try_for_each(|kernel| write_resources(out, kernel))?;
        }
        if let Some(reward) = self.reward {
            writeln!(out, "  reward     {reward}")?;
        }
        Ok(())
    }
}

fn write_diagnostic(out: &mut Formatter<'_>, diagnostic: &Diagnostic) -> fmt::Result {
    let place = match (diagnostic.line, diagnostic.column) {
        (Some(line), Some(column)) => format!("{line}:{column}: "),
        (Some(line), None) => format!("{line}: "),
        _ => String::new(),
    };
    writeln!(out, "  {place}{}", diagnostic.message)
}

fn write_failure(out: &mut Formatter<'_>, failure: &Failure) -> fmt::Result {
    let when = if failure.timed { ", while it was timed" } else { "" };
    writeln!(out, "  on input {}{when}:", failure.input)?;
    for name in &failure.judgement.inputs_changed {
        writeln!(out, "  {name} was written to; it is read-only")?;
    }
    for zone in &failure.judgement.red_zones {
        writeln!(out, "  written {} bytes {} {}", zone.offset, zone.side, zone.near)?;
    }
    let wrong = failure.judgement.outputs.iter().filter(|output| !output.pass);
    wrong.into_iter().try_for_each(|output| write_wrong(out, output))
}

fn write_wrong(out: &mut Formatter<'_>, output: &OutputJudgement) -> fmt::Result {
    let OutputJudgement { name, mismatched, total, .. } = output;
    if let Some(count @ 1..) = output.unwritten {
        let first = output.first_unwritten.as_ref().filter(|index| !index.is_empty());
        let first = first.map(|index| format!(", the first at {index:?},")).unwrap_or_default();
        writeln!(
            out,
            "  {name}: {count} of {total} elements{first} hold what was there before the run: never written, or added to \
             without being set first"
        )?;
    }
    if output.nonfinite > 0 {
        writeln!(
            out,
            "  {name}: {} of {total} elements are infinite or NaN where the reference is finite",
            output.nonfinite
        )?;
    }
    if output.reason == Some(Defect::Zeros) {
        writeln!(out, "  {name}: all {total} elements are zero, the reference's are not")?;
    }
    // What was never written is beyond the tolerance too, and says nothing more.
    let all_unwritten = output.unwritten.is_some_and(|count| count > 0 && count >= *mismatched);
    if *mismatched > 0 && !all_unwritten {
        writeln!(out, "  {name}: {mismatched} of {total} elements are beyond the tolerance")?;
    }
    if let Some(part) = &output.part {
        write_part(out, name, part)?;
    }
    output.worst.as_ref().map_or(Ok(()), |worst| write_worst(out, name, worst, all_unwritten))
}

/// A small part may be all wrong while the whole is nearly right.
fn write_part(out: &mut Formatter<'_>, name: &str, part: &Part) -> fmt::Result {
    let place = match part.dimension {
        Some(dimension) => format!("at index {} of dimension {dimension}", part.index),
        None => format!("in elements {} to {}", part.index * 1024, part.index * 1024 + 1023),
    };
    let times = part.times.map_or("far more".into(), |times| format!("{times:.3} times as much as"));
    let ending = if part.times.is_some() { "is allowed there" } else { "than is allowed there" };
    writeln!(out, "  {name}: the error {place} is {times} {ending}")
}

fn write_worst(out: &mut Formatter<'_>, name: &str, worst: &Worst, unwritten: bool) -> fmt::Result {
    // A scalar has no index.
    let place = if worst.index.is_empty() { String::new() } else { format!("{:?}", worst.index) };
    write!(out, "  worst at {name}{place}: expected {}, ", element(&worst.expected, &worst.expected_text))?;
    if unwritten {
        return writeln!(out, "got what was there before");
    }
    write!(out, "got {}", element(&worst.got, &worst.got_text))?;
    match (&worst.error, &worst.allowed) {
        (Some(error), _) if !error.is_f64() => writeln!(out, " (off by {error})"),
        (Some(error), Some(allowed)) => writeln!(out, " (off by {}, allowed {})", number(error), number(allowed)),
        _ => writeln!(out),
    }
}

/// An error at a line of the task is told with that line.
fn write_task_error(out: &mut Formatter<'_>, error: &TaskError) -> fmt::Result {
    match (&error.hint, error.line) {
        (Some(text), Some(line)) => writeln!(out, "  {line} | {text}"),
        (Some(hint), None) => writeln!(out, "  hint: {hint}"),
        (None, _) => Ok(()),
    }
}

fn write_accuracy(out: &mut Formatter<'_>, output: &OutputJudgement) -> fmt::Result {
    if let (Some(error), Some(allowed)) = (output.error_rms, output.allowed_rms) {
        let eager = output.reference_error_rms.map(|own| format!(", eager's own {own:.2e}")).unwrap_or_default();
        return writeln!(out, "  {:<10} rms error {error:.2e} of {allowed:.2e} allowed{eager}", output.name);
    }
    match &output.worst {
        Some(Worst { error: Some(error), allowed: Some(allowed), .. }) => {
            let (name, error, allowed) = (&output.name, number(error), number(allowed));
            writeln!(out, "  {name:<10} worst error {error} of {allowed} allowed")
        }
        _ => Ok(()),
    }
}

fn write_performance(out: &mut Formatter<'_>, performance: &Performance) -> fmt::Result {
    writeln!(out, "  candidate  {}, median of {} trials", milliseconds(performance.candidate_ms), performance.trials)?;
    if let Some(ms) = performance.kernel_ms {
        writeln!(out, "  its kernels and copies, added up {}", milliseconds(ms))?;
    }
    for (name, compared) in &performance.baselines {
        let Compared { ms, speedup, low, high } = compared;
        writeln!(out, "  {name:<10} {}, {speedup:.3} × the candidate's [{low:.3}, {high:.3}]", milliseconds(*ms))?;
    }
    for (name, why) in &performance.missing {
        writeln!(out, "  {name:<10} not there: {why}")?;
    }
    match &performance.roofline {
        Some(Roofline { ms, bound, share }) => {
            let bound = match bound {
                Bound::Memory => "to move its bytes",
                Bound::Arithmetic => "to compute",
            };
            writeln!(
                out,
                "  roofline   {} {bound}: the candidate is at {:.0} % of the card's limit",
                milliseconds(*ms),
                share * 100.0
            )
        }
        None => Ok(()),
    }
}

fn write_resources(out: &mut Formatter<'_>, kernel: &KernelResources) -> fmt::Result {
    let spilled = kernel.spill_store_bytes + kernel.spill_load_bytes;
    let spills = if spilled > 0 { format!(", {spilled} bytes spilled") } else { String::new() };
    let KernelResources { kernel, registers, shared_bytes, .. } = kernel;
    writeln!(out, "  {kernel}: {registers} registers, {shared_bytes} bytes of shared memory{spills}")
}

fn milliseconds(ms: f64) -> String {
    if ms < 1.0 { format!("{:.2} µs", ms * 1e3) } else { format!("{ms:.3} ms") }
}

fn element(value: &Option<Number>, text: &Option<String>) -> String {
    match (text, value) {
        (Some(text), _) => text.clone(),
        (None, Some(value)) => number(value),
        (None, None) => "no finite number".to_owned(),
    }
}

/// Integers to their last digit.
fn number(number: &Number) -> String {
    match number.as_f64().filter(|_| number.is_f64()) {
        Some(value) if value == 0.0 || (1e-3..1e6).contains(&value.abs()) => format!("{value:.6}"),
        Some(value) => format!("{value:.3e}"),
        None => number.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A verdict of a GPU, with the parts of `changes`.
    fn verdict(changes: serde_json::Value) -> Verdict {
        let mut verdict = json!({
            "schema": SCHEMA, "outcome": "correct", "message": "every check passed", "task": "", "candidate": "",
            "format": "launch", "device": { "name": "NVIDIA H200", "compute_capability": [9, 0] }, "policy": "strict",
            "protocol": "cuda-agent", "inputs": 5, "seed": "2a", "reward": 2.0,
            "seconds": { "compile": 0.1, "verify": 0.2, "profile": 0.3 },
        });
        verdict.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        serde_json::from_value(verdict).unwrap()
    }

    #[test]
    fn times_are_told_with_their_intervals_and_the_cards_limit() {
        let performance = json!({
            "candidate_ms": 0.0712, "outside_ms": 0.0718, "kernel_ms": 0.0699, "trials": 40, "bytes": 160_000_024, "flops": 20_000_003,
            "baselines": { "eager": { "ms": 0.0921, "speedup": 1.293, "low": 1.281, "high": 1.306 } },
            "missing": { "compile": "Triton is not installed" },
            "roofline": { "ms": 0.0356, "bound": "memory", "share": 0.5 },
        });
        let kernel = json!({
            "kernel": "relu", "registers": 16, "shared_bytes": 1024, "local_bytes": 8, "spill_store_bytes": 8, "spill_load_bytes": 4,
        });
        let compiled = json!({ "compiler": "nvcc 13.0", "kernels": [kernel], "seconds": 1.5 });
        insta::assert_snapshot!(verdict(json!({ "performance": performance, "compiled": compiled })));
    }

    #[test]
    fn a_result_that_goes_wrong_under_the_clock_is_told_so() {
        let worst = json!({ "index": [3, 1], "expected": 1.5, "got": 0.0, "error": 1.5, "allowed": 1e-5 });
        let output = json!({
            "name": "out", "pass": false, "reason": "values", "mismatched": 7, "total": 100, "worst": worst,
            "nonfinite": 0, "unwritten": 3, "first_unwritten": [0, 9],
        });
        let zone = json!({ "near": "out", "side": "after", "offset": 12 });
        let judgement = json!({ "outputs": [output], "inputs_changed": ["x"], "red_zones": [zone] });
        let failure = json!({ "input": 4, "timed": true, "judgement": judgement });
        insta::assert_snapshot!(verdict(
            json!({ "outcome": "out_of_bounds", "message": "why", "failure": failure, "reward": -1.0 })
        ));
    }

    /// The lines on a wrong output that is called `out`.
    fn told_of(changes: serde_json::Value) -> String {
        let mut output = json!({
            "name": "out", "pass": false, "reason": "values", "mismatched": 1, "total": 9, "worst": null, "nonfinite": 0,
            "unwritten": 0,
        });
        output.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let judgement = json!({ "outputs": [output], "inputs_changed": [], "red_zones": [] });
        let failure = json!({ "input": 1, "timed": false, "judgement": judgement });
        let told = verdict(json!({ "failure": failure })).to_string();
        told.lines().filter(|line| line.contains("out")).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn the_worst_element_is_told_by_its_type() {
        let worst = [
            json!({ "index": [7], "expected": 85, "got": 86, "error": 1, "allowed": 0 }),
            json!({
                "index": [0, 1], "expected": i64::MIN, "got": i64::MAX, "error": u64::MAX, "allowed": 0,
            }),
            json!({
                "index": [7], "expected": 1, "expected_text": "true", "got": 0, "got_text": "false", "error": null,
                "allowed": null,
            }),
            json!({
                "index": [7], "expected": 0, "expected_text": "false", "got": 90, "got_text": "the byte 90", "error": null,
                "allowed": null,
            }),
            json!({
                "index": [7], "expected": null, "expected_text": "-inf", "got": null, "got_text": "nan", "error": null,
                "allowed": 1e-5,
            }),
            json!({ "index": [7], "expected": 2.0, "got": null, "got_text": "inf", "error": null, "allowed": 1e-5 }),
            json!({ "index": [], "expected": 2.0, "got": 3.0, "error": 1.0, "allowed": 1e-5 }),
        ];
        let told = worst.map(|worst| told_of(json!({ "worst": worst })).lines().last().unwrap().to_owned());
        insta::assert_snapshot!(told.join("\n"));
    }

    #[test]
    fn a_part_that_is_off_is_told() {
        let told = |part: serde_json::Value| told_of(json!({ "mismatched": 0, "part": part }));
        let row = told(json!({ "dimension": 0, "index": 17, "times": 23.456 }));
        assert_eq!(row, "  out: the error at index 17 of dimension 0 is 23.456 times as much as is allowed there");
        let block = told(json!({ "dimension": null, "index": 2, "times": null }));
        assert_eq!(block, "  out: the error in elements 2048 to 3071 is far more than is allowed there");
    }

    #[test]
    fn numbers_of_the_worst_element_pass_through_unchanged() {
        let text = r#"{"index":[7],"expected":-9223372036854775808,"got":9223372036854775807,"error":18446744073709551615,"allowed":0}"#;
        let worst: Worst = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&worst).unwrap(), text);
    }

    #[test]
    fn a_scalar_that_was_never_set_has_no_place() {
        let worst = json!({ "index": [], "expected": 2.0, "got": 3.0, "error": 1.0, "allowed": 1e-5 });
        let scalar = json!({ "total": 1, "worst": worst, "unwritten": 1, "first_unwritten": [] });
        insta::assert_snapshot!(told_of(scalar));
    }

    #[test]
    fn a_fault_under_the_clock_has_no_input_that_was_counted() {
        let fault = json!({ "kind": "crash", "message": "an illegal instruction", "line": 4 });
        let told = |profile: f64| {
            let seconds = json!({ "compile": 0.1, "verify": 0.2, "profile": profile });
            verdict(json!({ "outcome": "crash", "message": "why", "fault": fault, "seconds": seconds })).to_string()
        };
        assert!(told(0.0).contains("on input 5") && !told(0.3).contains("on input"));
    }
}
