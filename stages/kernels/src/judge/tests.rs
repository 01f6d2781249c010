use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use super::*;
use crate::judgement::TaskErrorKind;

/// Counts what it is asked. What it answers follows from the candidate's text.
#[derive(Default)]
struct Counting {
    asked: AtomicUsize,
    timed: AtomicUsize,
    described: AtomicUsize,
}

fn error_of(message: &str, kind: TaskErrorKind) -> TaskError {
    TaskError { kind, message: message.into(), hint: None, line: None }
}

impl Bench for Counting {
    fn describe(&self, task: &Task) -> Answered<Contract> {
        self.described.fetch_add(1, Ordering::SeqCst);
        Ok(match task.code.as_str() {
            "broken" => Err(TaskError { line: Some(3), ..error_of("no class Model", TaskErrorKind::Task) }),
            "large" => Err(error_of("it takes 90 GiB", TaskErrorKind::Memory)),
            _ => Ok(Contract { header: "h".into(), parameters: "p".into(), steps: String::new() }),
        })
    }

    fn screen(&self, task: &Task) -> Answered<Vec<String>> {
        Ok(Ok(if task.code == "degenerate" { vec!["zeros".into(), "mean".into()] } else { Vec::new() }))
    }

    fn evaluate(&self, task: &Task, candidate: &Candidate, settings: &Settings) -> Result<Verdict, EvaluatorError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.timed.fetch_add(usize::from(!settings.baselines.is_empty()), Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(20));
        let (outcome, reward) = match candidate.source.as_str() {
            "down" => return Err(EvaluatorError::new("the card is lost")),
            "panic" => panic!("a bench that breaks"),
            "right" => ("correct", json!(1.0)),
            "exotic" => ("unsupported", json!(null)),
            _ => ("wrong", json!(-1.0)),
        };
        let verdict = json!({
            "schema": 1, "outcome": outcome, "message": "why", "task": task.digest(), "candidate": candidate.digest(),
            "format": "kernel", "device": null, "policy": "strict", "protocol": "cuda-agent", "inputs": 5, "seed": "2a",
            "reward": reward, "seconds": { "compile": 0.0, "verify": 0.0, "profile": 0.0 },
        });
        Ok(serde_json::from_value(verdict).expect("it has every field"))
    }

    fn width(&self) -> usize {
        4
    }

    fn is_in_service(&self) -> Result<(), EvaluatorError> {
        Ok(())
    }
}

struct Court {
    folder: tempfile::TempDir,
}

impl Court {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("verdicts.jsonl")
    }

    fn open(&self) -> Judge<Counting> {
        Judge::new(Counting::default(), Rules::strict(), &self.path()).unwrap()
    }
}

fn asked(judge: &Judge<Counting>) -> usize {
    judge.bench.asked.load(Ordering::SeqCst)
}

#[test]
fn equal_questions_at_the_same_time_are_put_once() {
    let (court, start) = (Court::new(), Barrier::new(16));
    let judge = court.open();
    let judged: Vec<Judged> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|thread| {
                let (judge, start) = (&judge, &start);
                scope.spawn(move || {
                    start.wait();
                    judge.ask(&judge.task("t"), if thread % 2 == 0 { "right" } else { "wrong" }, false).unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(asked(&judge), 2);
    assert_eq!(judged.iter().filter(|judged| judged.reward == Some(1.0)).count(), 8);
    assert!(judge.verdicts.underway.lock().unwrap().is_empty());
}

#[test]
fn a_question_that_was_answered_is_never_put_again() {
    let court = Court::new();
    let judge = court.open();
    let first = judge.ask(&judge.task("t"), "right", false).unwrap();
    drop(judge);
    let judge = court.open();
    let again = judge.ask(&judge.task("t"), "\u{feff}right", false).unwrap();
    assert_eq!((again.outcome, again.reward, again.report), (first.outcome, first.reward, first.report));
    assert_eq!(asked(&judge), 0, "the journal has it");
    judge.ask(&judge.task("other"), "right", false).unwrap();
    assert_eq!(asked(&judge), 1);
}

#[test]
fn a_verdict_is_on_the_disk_before_it_is_used() {
    let court = Court::new();
    let judge = court.open();
    judge.ask(&judge.task("t"), "right", false).unwrap();
    // The judge lives on: nothing is written because it ends.
    let text = std::fs::read_to_string(court.path()).unwrap();
    assert!(text.ends_with('\n') && text.contains("\"correct\""), "{text}");
}

#[test]
fn times_are_taken_only_where_they_are_asked_for_and_make_another_question() {
    let court = Court::new();
    let judge = court.open();
    for timing in [false, true, false, true] {
        judge.ask(&judge.task("t"), "right", timing).unwrap();
    }
    assert_eq!((asked(&judge), judge.bench.timed.load(Ordering::SeqCst)), (2, 1));
}

#[test]
fn other_rules_are_other_questions() {
    let court = Court::new();
    let judge = court.open();
    judge.ask(&judge.task("t"), "right", true).unwrap();
    let more = Settings { inputs: 6, ..judge.rules.settings.clone() };
    let scheme = Settings { reward: Scheme::Continuous, ..judge.rules.settings.clone() };
    let task = judge.task("t");
    let tf32 = Task { policy: Policy::Tf32, ..task.clone() };
    drop(judge);
    for (settings, task) in [(more, &task), (scheme, &task), (Rules::strict().settings, &tf32)] {
        let rules = Rules { settings, ..Rules::strict() };
        let judge = Judge::new(Counting::default(), rules, &court.path()).unwrap();
        judge.ask(task, "right", true).unwrap();
        assert_eq!(asked(&judge), 1);
    }
}

#[test]
fn no_reward_stays_no_reward() {
    let court = Court::new();
    for _ in 0..2 {
        let judge = court.open();
        let judged = judge.ask(&judge.task("t"), "exotic", false).unwrap();
        assert_eq!((judged.outcome, judged.reward), (Outcome::Unsupported, None));
    }
}

#[test]
fn a_report_tells_why_and_no_reward() {
    let court = Court::new();
    let judge = court.open();
    assert_eq!(judge.ask(&judge.task("t"), "other", false).unwrap().report, "wrong: why");
}

#[test]
fn an_error_of_the_machine_is_told_and_not_remembered() {
    let court = Court::new();
    let judge = court.open();
    for times in 1..=2 {
        assert_eq!(judge.ask(&judge.task("t"), "down", false).unwrap_err().message, "the card is lost");
        assert_eq!(asked(&judge), times);
    }
    assert_eq!(std::fs::read_to_string(court.path()).unwrap(), "");
}

#[test]
fn a_thread_that_breaks_off_leaves_nobody_waiting() {
    let court = Court::new();
    let judge = court.open();
    let ends: Vec<_> = std::thread::scope(|scope| {
        let ask = || judge.ask(&judge.task("t"), "panic", false).map(drop);
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    assert!(ends.iter().any(Result::is_err), "somebody panicked: {ends:?}");
    assert!(judge.ask(&judge.task("t"), "right", false).is_ok(), "and the judge goes on");
}

#[test]
fn a_task_is_admitted_or_refused_once() {
    let court = Court::new();
    for round in 0..2 {
        let judge = court.open();
        let admit = |code: &str| judge.admit(&judge.task(code)).unwrap();
        assert!(matches!(admit("sound"), Admission::Admitted(contract) if contract.parameters == "p"));
        assert_eq!(admit("broken"), Admission::Refused("line 3: no class Model".into()));
        assert_eq!(admit("degenerate"), Admission::Refused("degenerate: it lets pass zeros, mean".into()));
        assert_eq!(judge.bench.described.load(Ordering::SeqCst), if round == 0 { 3 } else { 0 });
        assert!(judge.admit(&judge.task("large")).is_err(), "another card may have the memory");
    }
}

#[test]
fn without_screening_a_degenerate_task_is_taken() {
    let court = Court::new();
    let rules = Rules { screen: false, ..Rules::strict() };
    let judge = Judge::new(Counting::default(), rules, &court.path()).unwrap();
    assert!(matches!(judge.admit(&judge.task("degenerate")).unwrap(), Admission::Admitted(_)));
}
