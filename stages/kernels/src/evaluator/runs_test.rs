//! The clock's runs with a real reference on the CPU device, and candidates that are played here: they read and write the
//! arena as a runner's do.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::LazyLock;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::super::assets;
use super::*;
use crate::fault::FaultKind;
use crate::reference::{ReferenceServer, Task};
use crate::runner::Arguments;

const CODE: &str = "\
import torch
import torch.nn as nn
class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 3
def get_inputs():
    return [torch.randn(32, 64)]
def get_init_inputs():
    return []
";

/// Sets in the arena; the clock's own number is as good.
const SETS: usize = 3;

/// Runs of a candidate without baselines: one to warm up, ten to the first look, one for CUPTI.
const RUNS: usize = 12;

static SERVER: LazyLock<(tempfile::TempDir, ReferenceServer)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let script = assets::unpack(folder.path()).unwrap();
    let beside = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.venv/bin/python"));
    let python = std::env::var_os("CUDA_AGENT_PYTHON").map_or(beside, PathBuf::from);
    let server = ReferenceServer::start(&python, &script, None, false).unwrap();
    (folder, server)
});

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// What a run saw and can do.
struct Turn<'a> {
    number: usize,
    arena: &'a File,
    process: Pid,
    set: usize,
    spans: Vec<[u64; 2]>,
    all: &'a [Vec<[u64; 2]>],
    inputs: Vec<u8>,
    found: Vec<u8>,
}

impl Turn<'_> {
    fn read(&self, [offset, length]: [u64; 2]) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.arena.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    fn answer(inputs: &[u8]) -> Vec<u8> {
        floats(inputs).into_iter().flat_map(|x| (x.max(0.0) * 3.0).to_le_bytes()).collect()
    }

    /// Does its work.
    fn work(&self) {
        self.write(&Self::answer(&self.inputs));
    }

    fn write(&self, bytes: &[u8]) {
        self.arena.write_all_at(bytes, self.spans[1][0]).unwrap();
    }
}

type Seen = (usize, Vec<u8>, Vec<u8>);

/// A candidate: what it does in each run, and what it found there.
struct Played<F> {
    arena: File,
    process: Pid,
    sets: Vec<Vec<[u64; 2]>>,
    seen: Vec<Seen>,
    has_cupti: bool,
    play: F,
}

impl<F: FnMut(&Turn) -> Result<(), Fault>> Timed for Played<F> {
    fn time(&mut self, arguments: &Arguments, _limit: Duration) -> Result<Result<f64, Fault>, EvaluatorError> {
        let spans = arguments.spans();
        let set = self.sets.iter().position(|set| *set == spans).unwrap();
        let mut turn = Turn {
            number: self.seen.len(),
            arena: &self.arena,
            process: self.process,
            set,
            all: &self.sets,
            inputs: Vec::new(),
            found: Vec::new(),
            spans,
        };
        (turn.inputs, turn.found) = (turn.read(turn.spans[0]), turn.read(turn.spans[1]));
        self.seen.push((set, turn.inputs.clone(), turn.found.clone()));
        Ok((self.play)(&turn).map(|()| 0.5))
    }

    fn activity(
        &mut self,
        arguments: &Arguments,
        limit: Duration,
    ) -> Result<Result<Option<f64>, Fault>, EvaluatorError> {
        Ok(self.time(arguments, limit)?.map(|ms| self.has_cupti.then_some(ms)))
    }
}

/// How the clock is set.
#[derive(Clone, Copy)]
struct Set {
    baselines: &'static [Baseline],
    max_trials: u32,
    /// At most so many runs are drawn ahead.
    ahead: u32,
    has_cupti: bool,
    seed: u64,
}

const USUAL: Set = Set { baselines: &[], max_trials: 100, ahead: u32::MAX, has_cupti: true, seed: 7 };

struct Done {
    ended: Step<Measured>,
    seen: Vec<Seen>,
    spent: ClockSeconds,
}

impl Done {
    /// The number of the first wrong run, from 0.
    fn wrong(&self) -> Option<u32> {
        match &self.ended {
            Ok(_) => None,
            Err(Stop::Early(Ended::Wrong(failure))) => {
                assert!(failure.timed);
                Some(failure.input - 1)
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    fn measured(&self) -> &Measured {
        self.ended.as_ref().unwrap()
    }
}

fn play(set: Set, play: impl FnMut(&Turn) -> Result<(), Fault>) -> Done {
    let task = json!({ "code": CODE, "name": "task.py", "set": {}, "protocol": "cuda-agent", "policy": "strict" });
    let task: Task = serde_json::from_value(task).unwrap();
    let mut reference = SERVER.1.connect(crate::reference::Purpose::Times).unwrap();
    let layout = reference.begin(&task, set.seed, 100, SETS as u32).unwrap().unwrap();
    reference.draw(0, FIRST_TRIAL, 0, false).unwrap().unwrap();
    let path = layout.arena.path.clone().unwrap();
    let process = path.iter().nth(2).unwrap().to_str().unwrap().parse().unwrap();
    let arena = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let sets = layout.sets.iter().map(Arguments::spans).collect();
    let mut candidate =
        Played { arena, process: Pid::from_raw(process), sets, seen: Vec::new(), has_cupti: set.has_cupti, play };
    let names = set.baselines.to_vec();
    let limits = (Duration::from_secs(60), set.max_trials);
    let mut runs = Runs::new((&mut reference, &mut candidate), layout, names, limits, set.seed);
    runs.draw_ahead(None).unwrap();
    runs.drawn_ahead = runs.drawn_ahead.min(set.ahead);
    let gate = Gate::new(1, None);
    let alone = gate.alone();
    let measured = runs.measure();
    drop(alone);
    let ended = runs.judged(Some(&gate), measured);
    let spent = runs.spent;
    Done { ended, seen: candidate.seen, spent }
}

fn honest(turn: &Turn) -> Result<(), Fault> {
    turn.work();
    Ok(())
}

fn fault() -> Fault {
    Fault { kind: FaultKind::Crash, message: "it fell over".into(), line: None }
}

#[test]
fn every_run_has_new_inputs_poison_and_the_next_place_whenever_it_was_drawn() {
    for ahead in [u32::MAX, 5, 0] {
        let done = play(Set { ahead, ..USUAL }, honest);
        let measured = done.measured();
        assert_eq!((measured.trials.count(), measured.kernel_ms), (10, Some(0.5)));
        assert_eq!(done.seen.len(), RUNS);
        for (number, (set, inputs, found)) in done.seen.iter().enumerate() {
            assert_eq!(*set, number % SETS);
            let poison = [0xff, 0x5a][number % 2];
            assert!(found.iter().all(|byte| *byte == poison), "run {number} finds {:?}", &found[..8]);
            assert!(done.seen[..number].iter().all(|(_, earlier, _)| earlier != inputs), "run {number}");
        }
        assert_eq!(done.spent.draw > 0.0, ahead < RUNS as u32);
        assert_eq!(done.spent.judge > 0.0, ahead < RUNS as u32);
        assert!(done.spent.run > 0.0 && done.spent.kernels > 0.0 && done.spent.fill >= 0.0);
    }
}

#[test]
fn inputs_follow_from_the_seed_however_they_are_drawn() {
    let [all, some, none] = [u32::MAX, 5, 0].map(|ahead| play(Set { ahead, ..USUAL }, honest).seen);
    assert!(all == some && some == none);
    assert_ne!(all, play(Set { seed: 8, ..USUAL }, honest).seen);
}

#[test]
fn the_first_wrong_run_is_found_whichever_it_is() {
    for ahead in [u32::MAX, 5] {
        for number in [0, 1, 4, 5, 10, 11] {
            let done = play(Set { ahead, ..USUAL }, |turn| {
                turn.work();
                if turn.number >= number {
                    turn.write(&100_f32.to_le_bytes());
                }
                Ok(())
            });
            assert_eq!(done.wrong(), Some(number as u32), "{ahead} ahead");
        }
    }
}

#[test]
fn the_run_for_cupti_is_judged_where_there_is_no_cupti_too() {
    for ahead in [u32::MAX, 5] {
        let set = Set { ahead, has_cupti: false, ..USUAL };
        assert_eq!(play(set, honest).measured().kernel_ms, None);
        let done = play(set, |turn| {
            if turn.number < 11 {
                turn.work();
            }
            Ok(())
        });
        assert_eq!((done.wrong(), done.seen.len()), (Some(11), RUNS));
    }
}

#[test]
fn a_run_that_leaves_its_work_to_a_later_one_is_wrong() {
    for ahead in [u32::MAX, 5] {
        let mut left: Option<(usize, Vec<u8>)> = None;
        let done = play(Set { ahead, ..USUAL }, |turn| {
            match (turn.number, left.take()) {
                (2, _) => left = Some((turn.set, turn.inputs.clone())),
                (_, Some((set, inputs))) => {
                    turn.work();
                    turn.arena.write_all_at(&Turn::answer(&inputs), turn.all[set][1][0]).unwrap();
                }
                _ => turn.work(),
            }
            Ok(())
        });
        assert_eq!(done.wrong(), Some(2));
    }
}

#[test]
fn a_run_that_does_the_work_of_the_next_in_advance_is_of_no_use() {
    for ahead in [u32::MAX, 5] {
        let done = play(Set { ahead, ..USUAL }, |turn| {
            if turn.number < 4 {
                turn.work();
            }
            // Whatever lies in the other places is answered, and nothing is done in the run itself.
            for set in turn.all.iter().filter(|set| **set != turn.spans) {
                turn.arena.write_all_at(&Turn::answer(&turn.read(set[0])), set[1][0]).unwrap();
            }
            Ok(())
        });
        assert_eq!(done.wrong(), Some(4));
    }
}

#[test]
fn an_answer_that_is_right_for_the_run_before_is_wrong() {
    let mut last = Vec::new();
    let done = play(USUAL, |turn| {
        turn.work();
        if turn.number == 7 {
            turn.write(&last);
        }
        last = Turn::answer(&turn.inputs);
        Ok(())
    });
    assert_eq!(done.wrong(), Some(7));
}

#[test]
fn a_changed_input_and_a_byte_beside_an_output_are_found_in_what_was_kept() {
    for (tensor, is_before) in [(0, false), (1, true)] {
        let done = play(USUAL, |turn| {
            turn.work();
            let place = turn.spans[tensor][0];
            if turn.number == 6 {
                turn.arena.write_all_at(&[1, 2, 3], if is_before { place - 3 } else { place }).unwrap();
            }
            Ok(())
        });
        assert_eq!(done.wrong(), Some(6));
        let Err(Stop::Early(Ended::Wrong(failure))) = done.ended else { unreachable!() };
        assert_eq!(failure.judgement.inputs_changed.len(), usize::from(!is_before));
        assert_eq!(failure.judgement.red_zones.is_empty(), !is_before);
    }
}

#[test]
fn a_wrong_result_counts_before_a_fault_that_came_later() {
    for (wrong, expected) in [(Some(3), Some(3)), (Some(7), None), (None, None)] {
        let done = play(USUAL, |turn| {
            if Some(turn.number) != wrong {
                turn.work();
            }
            if turn.number == 7 { Err(fault()) } else { Ok(()) }
        });
        match expected {
            Some(number) => assert_eq!(done.wrong(), Some(number)),
            None => assert!(matches!(done.ended, Err(Stop::Early(Ended::Fault(_))))),
        }
    }
}

#[test]
fn a_reference_that_dies_between_two_runs_is_an_error_and_no_verdict() {
    let done = play(USUAL, |turn| {
        turn.work();
        if turn.number == 4 {
            kill(turn.process, Signal::SIGKILL).unwrap();
        }
        Ok(())
    });
    assert_eq!(done.seen.len(), 5);
    assert!(done.ended.is_err());
}

#[test]
fn baselines_take_part_in_each_trial_and_more_trials_are_drawn_in_between() {
    // Eager's wall time varies by more than can be known in so few trials, or doesn't: both ends are right.
    for baselines in [&[Baseline::Eager][..], &[Baseline::Eager, Baseline::Eager]] {
        let done = play(Set { baselines, max_trials: 22, ..USUAL }, honest);
        let trials = done.measured().trials.count();
        assert!([10, 15, 22].contains(&trials));
        assert!((0..baselines.len()).all(|index| done.measured().trials.speedup(index).is_some()));
        assert_eq!(done.seen.len(), trials + 2);
        assert_eq!((done.spent.draw > 0.0, done.spent.baselines > 0.0), (trials > 10, true));
    }
}
