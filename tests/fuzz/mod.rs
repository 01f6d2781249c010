//! What comes from outside, damaged at random: nothing panics, overflows the stack, takes memory or time without end, or
//! writes where it must not. `make fuzz` runs each target for longer.
//!
//! A target runs in a process of its own with bounded memory, and notes each case before it is tried: what kills the
//! process is found in that note. Cases are sound examples with pieces cut, doubled, mixed, and replaced by what hurts.

mod damage;
mod targets;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::repository;
use bytes::Bytes;
use cuda_agent_engine::artifact::{Artifact, tree};
use cuda_agent_engine::catalog::Catalog;
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::execute::attempt;
use cuda_agent_engine::key::{Preimage, ProgramIdentity};
use cuda_agent_engine::name::{is_name, is_tag_part};
use cuda_agent_engine::plan::graph::Graph;
use cuda_agent_engine::plan::inputs::Input;
use cuda_agent_engine::rows::assembly::Results;
use cuda_agent_engine::rows::index::RowIndex;
use cuda_agent_engine::rows::journal::{self, Journal};
use cuda_agent_engine::rows::segment::{SegmentSchema, encode};
use cuda_agent_engine::spec;
use cuda_agent_engine::store::{Again, Record, Store, Tag, record_name};
use cuda_agent_protocol::{Event, Manifest, PortType, Request, RowResult, RowStatus};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use serde_json::{Value, json};

use damage::*;
use targets::*;

/// How long one case may take: whatever is read here is small.
const LONGEST: Duration = Duration::from_secs(10);
/// Memory of a target's process, in KiB of addresses; and what it may really use.
const ADDRESSES: u64 = 4 << 20;
const USED: u64 = 1 << 20;

struct Target {
    name: &'static str,
    examples: fn() -> Vec<Vec<u8>>,
    try_one: fn(&Path, &[u8]),
}

const TARGETS: [Target; 10] = [
    Target { name: "pipeline", examples: pipelines, try_one: try_pipeline },
    Target { name: "manifest", examples: manifests, try_one: try_manifest },
    Target { name: "record", examples: records, try_one: try_record },
    Target { name: "segment", examples: segments, try_one: try_segment },
    Target { name: "journal", examples: journals, try_one: try_journal },
    Target { name: "event", examples: events, try_one: try_event },
    Target { name: "request", examples: requests, try_one: try_request },
    Target { name: "tag", examples: tags, try_one: try_tag },
    Target { name: "tree", examples: trees, try_one: try_tree },
    Target { name: "run_manifest", examples: run_manifests, try_one: try_run_manifest },
];

/// Seconds for each target: one in the test suite, and its share of `FUZZ_SECONDS` at length.
fn seconds() -> f64 {
    let asked = std::env::var("FUZZ_SECONDS").ok().and_then(|text| text.parse::<f64>().ok());
    asked.map_or(1.0, |all| (all / TARGETS.len() as f64).max(1.0))
}

/// Runs a target in a process of its own; what killed it, otherwise.
fn fuzz(name: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let seed = std::env::var("FUZZ_SEED").unwrap_or_else(|_| match std::env::var_os("FUZZ_SECONDS") {
        Some(_) => (cuda_agent_engine::now() as u64).to_string(),
        None => "1".into(),
    });
    let limited = format!("ulimit -v {ADDRESSES}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &limited]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "fuzz::worker", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env("FUZZ_TARGET", name).env("FUZZ_FOLDER", scratch.path()).env("FUZZ_SEED", &seed);
    command.env("FUZZ_EACH", seconds().to_string()).env("RUST_BACKTRACE", "0");
    let output = within(command, Duration::from_secs_f64(seconds() + 60.0));
    let told = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let case = std::fs::read(scratch.path().join("case")).unwrap_or_default();
        let error = String::from_utf8_lossy(&output.stderr);
        let error: Vec<&str> = error.lines().rev().take(30).collect();
        let error: Vec<&str> = error.into_iter().rev().collect();
        panic!(
            "target {name}, FUZZ_SEED={seed}: {}\n{told}\n{}\nthe last case: {}",
            output.status,
            error.join("\n"),
            case.escape_ascii()
        );
    }
    let cases = told.lines().find_map(|line| line.split("cases: ").nth(1)).unwrap_or("0");
    assert!(cases.parse::<u64>().unwrap() > 0, "{told}");
    println!("{name}: {cases} cases");
}

/// Runs a process that may hang.
fn within(mut command: Command, limit: Duration) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > limit {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test] fn $name() { fuzz(stringify!($name)); })*

        #[test]
        fn no_target_is_forgotten() {
            assert_eq!([$(stringify!($name)),*], TARGETS.map(|target| target.name));
        }
    };
}
targets!(pipeline manifest record segment journal event request tag tree run_manifest);

/// The process of a target.
#[test]
#[ignore = "the targets start it"]
fn worker() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let (name, folder) = (variable("FUZZ_TARGET"), PathBuf::from(variable("FUZZ_FOLDER")));
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let (seed, each) = (variable("FUZZ_SEED").parse::<u64>().unwrap(), variable("FUZZ_EACH").parse().unwrap());
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases: 64, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() };
    let mut rng = TestRunner::new_with_rng(config.clone(), TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let examples = (target.examples)();
    examples.iter().for_each(|example| (target.try_one)(&folder, example));
    let strategy = damaged(examples);
    let (begun, cases) = (Instant::now(), Cell::new(0u64));
    while begun.elapsed() < Duration::from_secs_f64(each) {
        // A runner counts its successes, and does no more than it was asked for.
        let mut runner = TestRunner::new_with_rng(config.clone(), rng.new_rng());
        let outcome = runner.run(&strategy, |case| {
            cases.set(cases.get() + 1);
            std::fs::write(folder.join("case"), &case).unwrap();
            let start = Instant::now();
            let ended = catch_unwind(AssertUnwindSafe(|| (target.try_one)(&folder, &case)));
            prop_assert!(ended.is_ok(), "it panics");
            prop_assert!(start.elapsed() < LONGEST, "it takes {:?}", start.elapsed());
            prop_assert!(most_memory() < USED, "it takes {} KiB of memory", most_memory());
            Ok(())
        });
        if let Err(TestError::Fail(reason, case)) = outcome {
            std::fs::write(folder.join("case"), &case).unwrap();
            panic!("{reason}");
        }
    }
    println!("cases: {}", cases.get());
}

/// The most memory that this process has used, in KiB.
fn most_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Where something may have been written besides `allowed`, all of it below a target's folder.
fn only_below(folder: &Path, allowed: &Path) {
    for item in std::fs::read_dir(folder).unwrap() {
        let path = item.unwrap().path();
        let known = path == allowed || path.file_name().is_some_and(|name| name == "case");
        assert!(known || allowed.starts_with(&path), "{} was written", path.display());
        if allowed.starts_with(&path) && path != allowed {
            only_below(&path, allowed);
        }
    }
}

fn now<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

// --- Text that people write.
