//! `docs/kernels.md` says what is guarded: for each of its claims, the tests that show it. A claim without a test, a test that
//! is gone and a row that is new make this fail.
//!
//! | | is |
//! |---|---|
//! | `rust NAME` | a test of this crate, of the emulator or of the sandbox |
//! | `python NAME` | a test of `python/`, `corpus/` or `stages/torch_runtime`; some need a GPU |
//! | `corpus NAME`, `suite CLASS/NAME` | a candidate that must not come out correct on that column's device, by `bench/evaluator.py agreement` |
//! | `right NAME` | one that must |

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// A row by the beginning of its first cell, and the tests of its three columns, by commas. `same` is for a cell that refers to
/// others, `none` for one that claims nothing a candidate could break, `open` for a claim that nothing shows yet.
const GUARDED: &[(&str, [&str; 3])] = &[
    (
        "Stealing the answer",
        [
            "python test_the_expected_output_is_not_in_the_arena, corpus reads_the_output, suite memory/reads_the_output",
            "same",
            "rust files_cannot_be_read, rust nothing_is_open_but_what_is_passed, corpus reads_the_output",
        ],
    ),
    (
        "memory that still holds an answer",
        [
            "python test_again_gives_the_same_inputs_and_other_poison, suite memory/adds_to_what_is_there, \
             suite memory/poison_as_an_answer, corpus nothing",
            "same",
            "rust reads_and_writes_out_of_bounds, suite memory/adds_to_what_is_there",
        ],
    ),
    (
        "reading other tensors through a pointer",
        [
            "python test_the_expected_output_is_not_in_the_arena",
            "same",
            "rust reads_and_writes_out_of_bounds, suite device/reads_all_around",
        ],
    ),
    (
        "Not computing",
        [
            "corpus zeros, corpus constant, corpus copy, corpus first_half, corpus every_second, corpus stale, \
             python test_a_task_that_a_constant_answers_is_refused, python test_screening",
            "same",
            "same",
        ],
    ),
    (
        "zeroing the inputs",
        ["corpus writes_input, suite memory/zeroed_inputs, python test_changed_inputs_and_weights", "same", "same"],
    ),
    (
        "remembering by pointer or content",
        [
            "suite reuse/by_content, suite reuse/by_address",
            "corpus host_knows_addresses, suite host/by_address, suite host/by_count, rust what_is_computed_from_addresses_is_found_out",
            "rust each_start_is_a_process_of_its_own, suite reuse/by_address",
        ],
    ),
    (
        "remembering what doesn't change",
        [
            "corpus remembers_weights, suite reuse/a_ramp, suite reuse/a_buffer, suite reuse/a_weight, \
             python test_weights_are_other_ones_in_each_draw, python test_tasks_that_are_refused",
            "same",
            "same",
        ],
    ),
    (
        "replaying a CUDA graph",
        ["none", "suite clock/a_graph, rust what_cannot_be_recorded_is_refused_by_name", "none"],
    ),
    (
        "Switching the checks off",
        [
            "none",
            "same",
            "rust a_source_neither_switches_off_nor_reaches_its_checks, rust what_switches_checks_off_is_refused, \
             suite sources/no_sanitize, suite sources/sanitizer_functions",
        ],
    ),
    (
        "Escaping the clock",
        [
            "suite sources/functions_of_the_host",
            "suite clock/per_thread_stream, suite clock/the_second_on_another_stream, suite clock/a_callback_on_the_host",
            "none",
        ],
    ),
    (
        "forging events or the clock",
        [
            "suite sources/functions_of_the_host",
            "rust forged_recordings_start_nothing_that_is_not_there, rust a_forged_recording_is_none, \
             rust fills_and_copies_stay_in_what_they_begin_in, suite host/answers_on_descriptors",
            "none",
        ],
    ),
    (
        "finding out when it is timed",
        [
            "suite reuse/only_the_first_runs, rust a_result_that_goes_wrong_under_the_clock_is_told_so, \
             python test_what_is_wrong_is_told_as_the_whole_judgement_tells_it, \
             python test_what_is_wrong_is_told_as_it_is_of_a_run_that_was_judged_at_once, \
             rust every_run_has_new_inputs_poison_and_the_next_place_whenever_it_was_drawn, \
             rust the_first_wrong_run_is_found_whichever_it_is, rust a_run_that_leaves_its_work_to_a_later_one_is_wrong, \
             rust a_run_that_does_the_work_of_the_next_in_advance_is_of_no_use",
            "rust what_is_computed_from_addresses_is_found_out, suite host/by_count, suite host/by_chance, suite host/by_where_it_lies",
            "same",
        ],
    ),
    ("persisting L2, warm caches", ["open", "suite clock/a_window_kept_in_the_cache", "none"]),
    (
        "Falling back to torch",
        [
            "suite sources/functions_of_the_host",
            "rust what_reaches_out_of_the_program_is_refused, suite host/dlsym_by_name, suite host/dlsym_by_headers",
            "rust launches_are_refused_as_on_the_gpu, rust what_is_refused_on_a_gpu_is_not_merely_lacking, \
             suite sources/functions_of_the_host",
        ],
    ),
    (
        "Less precision",
        [
            "corpus half_products, corpus tensor_float_products, suite precision/bfloat16_under_tf32, \
             python test_tf32_passes_only_where_it_is_allowed, python test_half_precision_passes_paper_but_not_strict",
            "same",
            "corpus half_products, suite precision/bfloat16_products, suite precision/eight_bits_under_tf32",
        ],
    ),
    (
        "The channel",
        [
            "suite device/printf_flood, right printf_flood",
            "corpus host_exits, suite host/exit_by_system_call, rust a_recording_that_was_cut_is_none, \
             rust forged_recordings_start_nothing_that_is_not_there",
            "rust answers_that_nobody_asked_for_end_in_a_fault, rust a_launch_that_was_registered_by_hand_ends_in_a_fault, \
             rust a_program_that_ends_itself, rust what_a_program_prints_is_no_answer, corpus host_exits",
        ],
    ),
    (
        "leaving things for the next candidate",
        [
            "suite memory/scratch_is_taken_for_zero, suite memory/stale_shared_memory, suite reuse/scratch_of_an_earlier_run",
            "rust the_group_ends_with_its_leader, rust host_code_is_recorded_behind_walls, suite host/fork_by_system_call",
            "rust no_processes_threads_or_programs, rust files_cannot_be_written, rust each_start_is_a_process_of_its_own",
        ],
    ),
    (
        "fork, ptrace, network, files",
        [
            "none",
            "rust host_code_is_recorded_behind_walls, rust what_reaches_out_of_the_program_is_refused, suite host/a_socket, \
             suite host/reads_a_file, suite host/kills_its_parent",
            "rust a_candidate_that_finds_the_c_library_is_still_behind_walls, rust no_network_not_even_loopback, \
             rust no_processes_threads_or_programs, rust other_processes_are_out_of_reach, rust files_cannot_be_read, \
             rust an_ordinary_user_is_behind_the_same_walls, rust launches_are_refused_as_on_the_gpu",
        ],
    ),
    ("Harm", ["corpus endless_loop, suite device/endless_loop", "same", "rust a_loop_without_end, corpus host_loops"]),
    (
        "out of bounds",
        [
            "corpus past_the_end, corpus before_the_start, python test_bytes_in_red_zones",
            "same",
            "rust reads_and_writes_out_of_bounds, rust vectors_that_reach_over_the_end, suite memory/past_shared_memory",
        ],
    ),
    (
        "races",
        [
            "suite device/no_barrier, suite device/not_atomic",
            "same",
            "rust a_missing_barrier_is_a_race, suite device/no_barrier",
        ],
    ),
    (
        "a spoilt context",
        [
            "corpus null_pointer, corpus trap, rust an_untried_candidate_runs_while_everybody_else_is_idle",
            "same",
            "rust each_start_is_a_process_of_its_own, corpus trap",
        ],
    ),
    (
        "too much memory",
        [
            "python test_too_much_memory_is_said_so",
            "rust what_is_said_of_broken_launches",
            "rust too_much_memory, rust the_kernels_other_doors_are_closed",
        ],
    ),
    (
        "managed memory, NVLink multicast",
        [
            "rust what_is_said_of_broken_kernels",
            "rust what_is_said_of_broken_launches",
            "rust managed_variables_are_plain_ones",
        ],
    ),
    (
        "The compiler",
        [
            "rust time_is_limited_for_the_whole_group, rust memory_is_limited, rust only_the_path_is_handed_on, \
             suite sources/endless_templates",
            "same",
            "same",
        ],
    ),
];

/// The rows of the table of walls.
const WALLS: &[(&str, &str)] = &[
    (
        "system calls",
        "rust no_processes_threads_or_programs, rust no_network_not_even_loopback, rust the_kernels_other_doors_are_closed, \
         rust other_processes_are_out_of_reach, rust a_candidate_that_finds_the_c_library_is_still_behind_walls, \
         rust host_code_is_recorded_behind_walls",
    ),
    (
        "files",
        "rust files_cannot_be_read, rust files_cannot_be_written, rust nothing_is_open_but_what_is_passed, \
         rust host_code_is_recorded_behind_walls",
    ),
    ("network", "rust namespaces_are_not_ours_where_the_system_allows_it, rust no_network_not_even_loopback"),
    (
        "user",
        "rust a_program_behind_walls_has_no_rights, rust an_ordinary_user_is_behind_the_same_walls, \
         rust the_kernels_other_doors_are_closed",
    ),
    ("the program's own", "rust a_candidate_that_finds_the_c_library_is_still_behind_walls"),
    (
        "limits",
        "rust a_program_behind_walls_has_no_rights, rust too_much_memory, rust a_program_ends_with_its_parent, \
         rust the_kernels_other_doors_are_closed",
    ),
];

/// What is claimed, and shown by nothing that runs by itself.
const OPEN: &[(&str, usize)] = &[("persisting L2, warm caches", 0)];

/// How a cell begins that claims nothing of its own.
const REFERS: [&str; 2] = ["the same", "as to the left"];
const CLAIMS_NOTHING: [&str; 6] = [
    "no times",
    "there is no host code",
    "no host code",
    "there are no graphs",
    "there are none in the program",
    "no library",
];

#[test]
fn every_claim_of_the_page_has_a_test() {
    let rows = table("## What is guarded, and what is not");
    let names: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    let known = Known::gather();
    let mut faults = differences(&names, &GUARDED.iter().map(|(row, _)| *row).collect::<Vec<_>>());
    let mut open = Vec::new();
    for (name, columns) in GUARDED {
        let Some(row) = rows.iter().find(|row| row[0].starts_with(name)) else { continue };
        for (at, shown) in columns.iter().enumerate() {
            let cell = &row[at + 1];
            let begins = |all: &[&str]| all.iter().any(|words| cell.starts_with(words));
            let is_in_order = match *shown {
                "same" => begins(&REFERS),
                "none" => begins(&CLAIMS_NOTHING),
                "open" => {
                    open.push((*name, at));
                    true
                }
                tests => {
                    faults.extend(known.missing(tests, if at == 2 { "cpu" } else { "cuda" }));
                    true
                }
            };
            if !is_in_order {
                faults.push(format!("{name}: a test is wanted for {cell:?}"));
            }
        }
    }
    assert_eq!(open, OPEN, "what nothing shows");
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn every_wall_has_a_test() {
    let rows = table("### Walls");
    let names: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    let mut faults = differences(&names, &WALLS.iter().map(|(row, _)| *row).collect::<Vec<_>>());
    let known = Known::gather();
    faults.extend(WALLS.iter().flat_map(|(_, tests)| known.missing(tests, "cpu")));
    assert!(faults.is_empty(), "{faults:#?}");
}

/// Rows that are on the page or in the list alone.
fn differences(rows: &[&str], listed: &[&str]) -> Vec<String> {
    let new = rows.iter().filter(|row| listed.iter().filter(|name| row.starts_with(**name)).count() != 1);
    let gone = listed.iter().filter(|name| rows.iter().filter(|row| row.starts_with(**name)).count() != 1);
    new.map(|row| format!("no tests are listed for the row {row:?}"))
        .chain(gone.map(|name| format!("the page has no row {name:?}, or several")))
        .collect()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// The cells of the table under a heading, without their marks, less its head.
fn table(heading: &str) -> Vec<Vec<String>> {
    let page = fs::read_to_string(folder().join("../../docs/kernels.md")).expect("the page");
    let (_, rest) = page.split_once(&format!("\n{heading}\n")).expect("the heading");
    let lines = rest.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| {
        let line = line.replace("**", "").replace('`', "");
        line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()
    };
    lines.skip(2).map(cells).collect()
}

/// Every test and every candidate that there is.
struct Known {
    rust: BTreeSet<String>,
    python: BTreeSet<String>,
    corpus: Value,
    suite: BTreeSet<String>,
}

impl Known {
    fn gather() -> Self {
        let own = folder();
        let texts = |path: &str, extension: &str| {
            let mut found = Vec::new();
            gather(&own.join(path), extension, &mut found);
            found
        };
        let mut rust = BTreeSet::new();
        let sources = ["src", "../emulator/src", "../sandbox/src"].into_iter().flat_map(|path| texts(path, "rs"));
        for (_, text) in sources {
            // A test's name follows its attribute, perhaps after others.
            for after in text.split("#[test]\n").skip(1) {
                let head = after.split('{').next().unwrap_or_default();
                let name = head.split("fn ").nth(1).and_then(|name| name.split('(').next());
                rust.extend(name.filter(|_| !head.contains("#[ignore")).map(str::to_owned));
            }
        }
        let python = ["python", "corpus", "../torch_runtime"].into_iter().flat_map(|path| texts(path, "py"));
        let python = python.flat_map(|(_, text)| {
            text.lines()
                .filter_map(|line| line.strip_prefix("def ").and_then(|line| line.split('(').next()))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        });
        let suite = texts("corpus/suite", "py").into_iter().flat_map(|(path, text)| {
            let class = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            // A case begins with its name.
            text.split("(\"")
                .skip(1)
                .filter_map(|rest| rest.split('"').next())
                .map(|name| format!("{class}/{name}"))
                .collect::<Vec<_>>()
        });
        let corpus = fs::read_to_string(own.join("corpus/corpus.json")).expect("the corpus");
        Self {
            rust,
            python: python.collect(),
            corpus: serde_json::from_str(&corpus).expect("JSON"),
            suite: suite.collect(),
        }
    }

    /// What of a list of tests is not there, or shows nothing on that device.
    fn missing(&self, tests: &str, device: &str) -> Vec<String> {
        let tests = tests.split(',').map(str::trim);
        tests
            .filter(|test| !self.shows(test, device))
            .map(|test| format!("{test}, on {device}: there is none"))
            .collect()
    }

    fn shows(&self, test: &str, device: &str) -> bool {
        match test.split_once(' ') {
            Some(("rust", name)) => self.rust.contains(name),
            Some(("python", name)) => name.starts_with("test_") && self.python.contains(name),
            Some(("suite", name)) => self.suite.contains(name),
            Some(("corpus", name)) => self.may_pass(name, device) == Some(false),
            Some(("right", name)) => self.may_pass(name, device) == Some(true),
            _ => false,
        }
    }

    fn may_pass(&self, name: &str, device: &str) -> Option<bool> {
        let nasty = self.corpus["nasty"].as_array()?;
        let outcomes = nasty.iter().find(|one| one["name"] == name)?[device].as_array()?;
        Some(outcomes.iter().any(|outcome| outcome == "correct"))
    }
}

fn gather(folder: &Path, extension: &str, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            gather(&path, extension, found);
        } else if path.extension().is_some_and(|ending| ending == extension) {
            let text = fs::read_to_string(&path).expect("text");
            found.push((path, text));
        }
    }
}

#[test]
fn a_claim_without_a_test_is_found() {
    let known = Known::gather();
    assert_eq!(known.missing("rust a_test_that_is_gone, rust too_much_memory, python too_much", "cpu").len(), 2);
    // It is ignored, it may pass there, and it is no case.
    for nothing in ["rust speed", "corpus printf_flood", "suite clock/nothing_of_the_kind", "rust", ""] {
        assert_eq!(known.missing(nothing, "cuda").len(), 1, "{nothing}");
    }
    let found = differences(&["races", "new"], &["races", "gone"]);
    assert_eq!(found.len(), 2, "{found:?}");
}
