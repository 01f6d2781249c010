//! A verdict in the making.

use super::clock::Clocked;
use super::runs::Ended;
use super::verify::{self, Checked};
use crate::backend::Sanitized;
use crate::baseline::Baseline;
use crate::candidate::Candidate;
use crate::compile::{CompileFailure, Diagnostic};
use crate::fault::Fault;
use crate::judgement::TaskError;
use crate::profile::trials::Interval;
use crate::reference::Task;
use crate::reward::{Cost, Judgement, Scheme, reward};
use crate::verdict::{Failure, Outcome, SCHEMA, Seconds, Verdict};

/// A verdict that steps add to, one after another.
pub struct Draft {
    /// So far.
    pub verdict: Verdict,
}

impl Draft {
    /// Nothing is known but what is judged.
    pub fn new(task: &Task, candidate: &Candidate, seed: u64) -> Self {
        Self {
            verdict: Verdict {
                schema: SCHEMA,
                outcome: Outcome::Correct,
                message: String::new(),
                task: task.digest(),
                candidate: candidate.digest(),
                format: candidate.format,
                device: None,
                policy: task.policy,
                protocol: task.protocol,
                inputs: 0,
                seed: format!("{seed:016x}"),
                compiled: None,
                diagnostics: Vec::new(),
                fault: None,
                failure: None,
                accuracy: Vec::new(),
                task_error: None,
                sanitizer: None,
                performance: None,
                reward: None,
                seconds: Seconds::default(),
            },
        }
    }

    /// Adds what it is worth.
    pub fn finish(mut self, scheme: &Scheme, cost: &Cost) -> Verdict {
        let side = |baseline: Baseline| {
            let compared = self.verdict.performance.as_ref()?.baselines.get(&baseline)?;
            Some(Interval { estimate: compared.speedup, low: compared.low, high: compared.high })
        };
        let judgement = match self.verdict.outcome {
            Outcome::Correct => Judgement::Correct { eager: side(Baseline::Eager), compile: side(Baseline::Compile) },
            outcome if outcome.is_verdict() => Judgement::Incorrect,
            _ => Judgement::Unjudged,
        };
        self.verdict.reward = reward(scheme, &judgement, cost);
        self.verdict
    }

    /// The task could not be worked with.
    pub fn task_error(mut self, error: TaskError) -> Verdict {
        self.set_task_error(error);
        self.verdict
    }

    fn set_task_error(&mut self, error: TaskError) {
        self.verdict.outcome = Outcome::TaskError;
        self.verdict.message = match error.line {
            Some(line) => format!("the task, line {line}: {}", error.message),
            None => error.message.clone(),
        };
        self.verdict.task_error = Some(error);
    }

    /// It is no program, or none that can be recorded.
    pub fn not_compiled(mut self, failure: CompileFailure) -> Self {
        let (outcome, diagnostics, message) = match failure {
            CompileFailure::Source(diagnostics) => {
                let first = diagnostics.first().map(in_one_line).unwrap_or_default();
                (Outcome::CompileError, diagnostics, first)
            }
            CompileFailure::Unsupported(diagnostic) => {
                let message = in_one_line(&diagnostic);
                (Outcome::Unsupported, vec![diagnostic], message)
            }
            CompileFailure::Limit(message) => (Outcome::CompileError, Vec::new(), message),
            CompileFailure::Fault(fault) => {
                self.set_fault(fault);
                return self;
            }
        };
        (self.verdict.outcome, self.verdict.diagnostics, self.verdict.message) = (outcome, diagnostics, message);
        self
    }

    /// Takes in what checking found; whether it is right so far.
    pub fn checked(&mut self, checked: Checked, inputs: u32) -> bool {
        match checked {
            Checked::Right(accuracy) => {
                self.verdict.message = "every check passed".into();
                self.verdict.inputs = inputs;
                self.verdict.accuracy = accuracy;
                return true;
            }
            Checked::Fault(fault, input) => {
                self.verdict.inputs = input;
                self.set_fault(fault);
            }
            Checked::Wrong(failure) => {
                self.verdict.inputs = failure.input;
                self.set_failure(failure);
            }
            Checked::CutShort => unreachable!("it was checked again with nobody else"),
            Checked::Task(error) => self.set_task_error(error),
        }
        false
    }

    /// Takes in what the tools found; whether it is right so far.
    pub fn sanitized(&mut self, sanitized: Sanitized) -> bool {
        match sanitized {
            Sanitized::Clean(tools) => self.verdict.sanitizer = Some(format!("nothing found by {}", tools.join(", "))),
            Sanitized::NotRun(why) => self.verdict.sanitizer = Some(format!("not run: {why}")),
            Sanitized::Fault(fault) => {
                // The tools see the first input alone.
                self.verdict.inputs = 1;
                self.set_fault(fault);
                return false;
            }
        }
        true
    }

    fn set_fault(&mut self, fault: Fault) {
        self.verdict.outcome = fault.kind.into();
        self.verdict.message = at_line(fault.line, &fault.message);
        self.verdict.fault = Some(fault);
    }

    fn set_failure(&mut self, failure: Failure) {
        self.verdict.outcome = verify::outcome(&failure.judgement);
        self.verdict.message = verify::summary(&failure);
        self.verdict.failure = Some(failure);
    }

    /// Takes in times, or what timing found.
    pub fn timed(&mut self, timed: Clocked) {
        match timed {
            Clocked::Well(performance) => self.verdict.performance = Some(performance),
            Clocked::Ended(Ended::Fault(fault)) => self.set_fault(fault),
            Clocked::Ended(Ended::Wrong(failure)) => self.set_failure(failure),
            Clocked::Ended(Ended::Task(error)) => self.set_task_error(error),
        }
    }
}

fn in_one_line(diagnostic: &Diagnostic) -> String {
    at_line(diagnostic.line, &diagnostic.message)
}

fn at_line(line: Option<u32>, message: &str) -> String {
    line.map_or_else(|| message.to_owned(), |line| format!("line {line}: {message}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_message_is_on_the_output_that_the_outcome_is_named_after() {
        let task = json!({ "code": "", "name": "", "set": {}, "protocol": "cuda-agent", "policy": "strict" });
        let candidate = json!({ "format": "kernel", "source": "", "name": "" });
        let (task, candidate) = (serde_json::from_value(task).unwrap(), serde_json::from_value(candidate).unwrap());
        let output = |name: &str, nonfinite: u64, unwritten: u64| {
            json!({
                "name": name, "pass": false, "reason": "values", "mismatched": 2, "total": 9, "worst": null,
                "nonfinite": nonfinite, "unwritten": unwritten,
            })
        };
        let told = |outputs: Vec<serde_json::Value>| {
            let judgement = json!({ "outputs": outputs, "inputs_changed": [], "red_zones": [] });
            let judgement = serde_json::from_value(judgement).unwrap();
            let mut draft = Draft::new(&task, &candidate, 7);
            draft.checked(Checked::Wrong(Failure { input: 1, timed: false, judgement }), 5);
            (draft.verdict.outcome, draft.verdict.message)
        };
        let (wrong, nonfinite, unwritten) = (output("out0", 0, 0), output("out1", 3, 0), output("out2", 0, 1));
        let all = vec![wrong.clone(), nonfinite.clone(), unwritten];
        let message = "1 of 9 elements of out2 hold what was there before the run".to_owned();
        assert_eq!(told(all), (Outcome::Unwritten, message));
        let message = "3 of 9 elements of out1 are infinite or NaN where the reference is finite".to_owned();
        assert_eq!(told(vec![wrong.clone(), nonfinite]), (Outcome::Nonfinite, message));
        assert_eq!(told(vec![wrong]), (Outcome::Wrong, "2 of 9 elements of out0 are wrong".to_owned()));
    }
}
