//! What comes from outside, damaged at random: nothing panics, overflows the stack, takes memory or time without end, or
//! writes where it must not. `make fuzz` runs each target for longer.
//!
//! A target runs in a process of its own with bounded memory, and notes each case before it is tried: what kills the
//! process is found in that note. Cases are sound examples with pieces cut, doubled, mixed, and replaced by what hurts.

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

/// A way to damage bytes; places are parts of 65,536 of their length.
#[derive(Clone, Debug)]
enum Damage {
    Flip { place: u16, bit: u8 },
    Cut { from: u16, length: u16 },
    Insert { place: u16, what: Vec<u8> },
    Repeat { place: u16, length: u16, times: u16 },
    Copy { from: u16, length: u16, to: u16 },
    Number { place: u16, text: &'static str },
    Truncate { place: u16 },
}

/// What breaks programs that read text.
const HURTFUL: [&str; 36] = [
    "..",
    "../../x",
    "/",
    "\0",
    "\u{202e}",
    "é",
    "\u{feff}",
    "\r\n",
    "\n",
    "\t",
    "  ",
    "{",
    "}",
    "[",
    "]",
    "\"",
    "'",
    ":",
    ": ",
    "- ",
    "&a ",
    "*a",
    "<<: *a\n",
    "!!binary ",
    "|\n",
    "? ",
    "#",
    "@",
    "${params.x}",
    "${",
    "null",
    "true",
    "~",
    "{}",
    "[]",
    "\u{10ffff}",
];
const NUMBERS: [&str; 14] = [
    "0",
    "-1",
    "1e999",
    "-0.0",
    "NaN",
    ".inf",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e300",
    "0x7fffffff",
    "200000000000000d",
    "99999999999999999999999999999999",
];

fn damage() -> impl Strategy<Value = Damage> {
    let hurtful = prop::sample::select(&HURTFUL[..]).prop_map(|text| text.as_bytes().to_vec());
    let short = 0u16..600;
    prop_oneof![
        2 => (any::<u16>(), 0u8..8).prop_map(|(place, bit)| Damage::Flip { place, bit }),
        2 => (any::<u16>(), short.clone()).prop_map(|(from, length)| Damage::Cut { from, length }),
        3 => (any::<u16>(), hurtful).prop_map(|(place, what)| Damage::Insert { place, what }),
        1 => (any::<u16>(), prop::collection::vec(any::<u8>(), 1..9)).prop_map(|(place, what)| Damage::Insert { place, what }),
        1 => (any::<u16>(), 0u16..40, prop_oneof![1u16..4, 1000u16..20000])
            .prop_map(|(place, length, times)| Damage::Repeat { place, length, times }),
        2 => (any::<u16>(), short, any::<u16>()).prop_map(|(from, length, to)| Damage::Copy { from, length, to }),
        2 => (any::<u16>(), prop::sample::select(&NUMBERS[..])).prop_map(|(place, text)| Damage::Number { place, text }),
        1 => any::<u16>().prop_map(|place| Damage::Truncate { place }),
    ]
}

fn damaged(examples: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let example = prop::sample::select(examples);
    (example, prop::collection::vec(damage(), 0..6)).prop_map(|(mut bytes, all)| {
        all.iter().for_each(|damage| damage.apply(&mut bytes));
        bytes.truncate(1 << 20);
        bytes
    })
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        let total = bytes.len();
        let at = |place: u16| total * usize::from(place) / 65_536;
        let span = |from: u16, length: u16| at(from)..(at(from) + usize::from(length)).min(total);
        match self {
            Self::Flip { place, bit } => bytes.get_mut(at(*place)).into_iter().for_each(|byte| *byte ^= 1 << bit),
            Self::Cut { from, length } => drop(bytes.drain(span(*from, *length))),
            Self::Insert { place, what } => drop(bytes.splice(at(*place)..at(*place), what.iter().copied())),
            Self::Repeat { place, length, times } => {
                let what = bytes[span(*place, *length)].repeat(usize::from(*times));
                bytes.splice(at(*place)..at(*place), what);
            }
            Self::Copy { from, length, to } => {
                let what = bytes[span(*from, *length)].to_vec();
                bytes.splice(at(*to)..at(*to), what);
            }
            // The next digits are replaced.
            Self::Number { place, text } => {
                let Some(from) = bytes[at(*place)..].iter().position(u8::is_ascii_digit) else { return };
                let from = at(*place) + from;
                let length = bytes[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                bytes.splice(from..from + length, text.bytes());
            }
            Self::Truncate { place } => bytes.truncate(at(*place)),
        }
    }
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

const ROWS: &str = "name: my/rows\nversion: 1.0.0\nsummary: Rows.\ninputs: { rows: { type: table, columns: { id: int64 } } }\n\
    outputs: { rows: { type: table, columns: [ { name: square, type: int64 }, { name: t, type: 'list<utf8>' } ] } }\n\
    params: { seed: { type: integer, default: 0 }, rate: { type: number, default: 0.5, min: 0 } }\nresources: { cpu: 2, memory: 1GiB }\n\
    by_row: { port: rows, window: 2, row_timeout_s: 5 }\nrun: [python, x.py]\nsources: [x.py]\nenv: [HOME]\n";

const PIPELINE: &str = "name: p\nparams: { x: 5, list: [1, 2.5, a], map: { a: true } }\nsecrets: { token: { env: TOKEN } }\nstages:\n  \
    a: { uses: run, run: 'echo ${params.x} > outputs/out', outputs: { out: tree }, timeout: 5s, retry: { attempts: 2, backoff: 1s } }\n  \
    b: { uses: my/rows, inputs: { rows: { path: t.parquet } }, params: { rate: 0.1 }, tags: [big] }\n  \
    m:\n    uses: run\n    matrix: { i: [1, 2, 3], name: [a, b] }\n    run: [sh, -c, 'echo ${matrix.i}']\n    inputs: { x: a.out }\n    outputs: { o: tree }\n    \
    files: [x.sh]\n    env: { A: b }\n  c: { uses: run, inputs: { all: 'm[*].o', t: { artifact: x@v1 } }, run: true, outputs: { o: { type: table, columns: { n: int64 } } } }\n";

fn pipelines() -> Vec<Vec<u8>> {
    let laughs = "name: p\nparams:\n  a: &a [x, x, x, x, x, x, x, x, x]\n  b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n  c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]\n  \
        d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c]\n  e: &e [*d, *d, *d, *d, *d, *d, *d, *d]\n  f: &f [*e, *e, *e, *e, *e, *e, *e]\n  g: [*f, *f, *f, *f, *f, *f]\nstages: {}\n";
    let chain: String = (1..3000).map(|level| format!("  a{level}: &a{level} [*a{}]\n", level - 1)).collect();
    let chain = format!("name: p\nparams:\n  a0: &a0 [1]\n{chain}stages: {{}}\n");
    let root = repository();
    let files =
        ["quickstart", "ops-llm"].map(|name| std::fs::read(root.join(format!("pipelines/{name}.yaml"))).unwrap());
    [PIPELINE, laughs, &chain].map(|text| text.as_bytes().to_vec()).into_iter().chain(files).collect()
}

fn catalog() -> Catalog {
    let mut catalog = Catalog::default();
    crate::support::add_kind(&mut catalog, ROWS, ProgramIdentity::Version("1".into()));
    catalog
}

fn try_pipeline(folder: &Path, bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let include = |_: &Path| Ok("name: included\nstages: {}\n".to_owned());
    let overrides = [("x".to_owned(), text.chars().take(20).collect())];
    for overrides in [&overrides[..], &[]] {
        match spec::parse_pipeline(&text, Path::new("p.yaml"), folder, &catalog(), overrides, &include) {
            Ok(pipeline) => {
                let graph = Graph::new(&pipeline);
                let _ = graph.select(&pipeline, &["a".to_owned(), "tag:big".to_owned(), "b+".to_owned()]);
                let _ = (graph.to_dot(&pipeline), graph.to_mermaid(&pipeline));
            }
            Err(errors) => {
                let _ = (errors.render(false), serde_json::to_string(&errors).unwrap());
            }
        }
    }
}

fn manifests() -> Vec<Vec<u8>> {
    let root = repository();
    let files = ["ops/measure", "kernels/evaluate"];
    let files = files.map(|name| std::fs::read(root.join(format!("stages/{name}/stage.yaml"))).unwrap());
    std::iter::once(ROWS.as_bytes().to_vec()).chain(files).collect()
}

fn try_manifest(_: &Path, bytes: &[u8]) {
    match spec::parse_manifest(&String::from_utf8_lossy(bytes), Path::new("stage.yaml")) {
        Ok(manifest) => {
            assert!(manifest.inputs.keys().chain(manifest.outputs.keys()).all(|port| is_name(port)));
            let _ = SegmentSchema::new(&manifest);
        }
        Err(errors) => drop(errors.render(false)),
    }
}

// --- What comes out of a store.

fn a_record() -> Record {
    let preimage: Preimage = serde_json::from_value(json!({
        "schema": 1, "kind": "k", "program": { "command": { "command": ["a"], "files": {} } }, "params": { "x": 1.5 },
        "inputs": { "t": { "type": "table", "rows": 2, "columns": { "a": ["utf8", Digest([7; 32])] } } },
    }))
    .unwrap();
    let artifact: Artifact = serde_json::from_value(json!({
        "type": "table", "digest": Digest([1; 32]), "size": 10, "blob": Digest([2; 32]), "rows": 3,
        "columns": [{ "name": "a", "type": "utf8", "digest": Digest([3; 32]) }],
    }))
    .unwrap();
    Record {
        schema: 1,
        key: preimage.key(),
        kind: "k".into(),
        nonce: "n".into(),
        preimage,
        base: Some(Digest([5; 32])),
        outputs: BTreeMap::from([("out".to_owned(), artifact)]),
        created_at: 1.5,
        run: "r".into(),
        accepted_from: None,
        interpreter: None,
        duration_s: 0.5,
        rows: Some(Default::default()),
        metrics: BTreeMap::from([("m".to_owned(), 0.1)]),
    }
}

fn records() -> Vec<Vec<u8>> {
    vec![a_record().to_bytes().to_vec(), serde_json::to_vec(&a_record()).unwrap()]
}

fn try_record(_: &Path, bytes: &[u8]) {
    let _ = Record::is_whole(bytes);
    if let Some(record) = Record::from_bytes(bytes) {
        let _ = record.is_of_its_key();
        // What is read can be written, and read again.
        assert_eq!(Record::from_bytes(&record.to_bytes()), Some(record));
    }
    let store = Store::memory();
    let key = a_record().key;
    now(async {
        store.truth().overwrite(&record_name(&key, 1), bytes.to_vec()).await.unwrap();
        if let Ok(Some((_, record))) = store.record(&key).await {
            assert!(record.outputs.keys().all(|port| is_name(port)) && record.key == key);
            for artifact in record.outputs.values() {
                let _ = store.missing_blob(artifact).await;
            }
        }
    });
}

fn run_manifests() -> Vec<Vec<u8>> {
    let stage = json!({ "key": Digest([1; 32]), "outcome": "done", "message": "m" });
    let manifest = json!({
        "schema": 1, "run": "20260101T000000.000Z-abcdef", "pipeline": "p", "started_at": 1.0, "heartbeat_at": 2.0, "ended_at": null,
        "outcome": "running", "params": { "x": [1, 2.5, "a"] }, "stages": { "a": stage, "m[i=1]": { "outcome": "waiting" } },
    });
    vec![serde_json::to_vec(&manifest).unwrap()]
}

fn try_run_manifest(_: &Path, bytes: &[u8]) {
    let store = Store::memory();
    let id = "20260101T000000.000Z-abcdef";
    now(async {
        store.truth().overwrite(&format!("v1/runs/{id}"), bytes.to_vec()).await.unwrap();
        if let Ok(Some(run)) = store.run(id).await {
            assert_eq!(run.run, id);
            store.put_run(&run).await.unwrap();
            assert_eq!(store.run(id).await.unwrap(), Some(run));
        }
    });
}

fn row_kind() -> Manifest {
    spec::parse_manifest(ROWS, Path::new("stage.yaml")).unwrap()
}

fn a_result(row: u8) -> RowResult {
    let output = json!({ "square": row, "t": ["a", null] }).as_object().unwrap().clone();
    let status = if row == 3 { RowStatus::Rejected } else { RowStatus::Done };
    let outputs = BTreeMap::from([("rows".to_owned(), vec![output; usize::from(row % 3)])]);
    RowResult { row: Digest([row; 32]).to_string(), status, reason: Some("r".into()), detail: None, outputs }
}

fn segments() -> Vec<Vec<u8>> {
    let schema = SegmentSchema::new(&row_kind());
    let of = |rows: &[u8]| {
        let results: Vec<RowResult> = rows.iter().map(|row| a_result(*row)).collect();
        encode(&schema.batch(&results).unwrap()).unwrap().to_vec()
    };
    vec![of(&[1, 2, 3, 4]), of(&[]), of(&(0..200).collect::<Vec<u8>>())]
}

fn try_segment(_: &Path, bytes: &[u8]) {
    use arrow::array::{ArrayRef, Int64Array, RecordBatch};
    let schema = SegmentSchema::new(&row_kind());
    let _ = schema.fits(Bytes::copy_from_slice(bytes));
    let (store, base) = (Store::memory(), Digest([9; 32]));
    let cache = tempfile::tempdir().unwrap();
    let rows: Vec<Digest> = (0..5).map(|row| Digest([row; 32])).collect();
    let ids: ArrayRef = std::sync::Arc::new(Int64Array::from_iter_values(0..5));
    let input = RecordBatch::try_from_iter([("id", ids)]).unwrap();
    let table = cache.path().join("input.parquet");
    cuda_agent_engine::artifact::table::write(&table, &input.schema(), &[input]).unwrap();
    now(async {
        store.put_segment(&base, 0, Bytes::copy_from_slice(bytes)).await.unwrap();
        let Ok(index) = RowIndex::load(&store, &base, &cache.path().join("rows")).await else { return };
        let Ok(results) = Results::load(&store, &base, &index, &rows, &schema).await else { return };
        let _ = results.rejections();
        let _ = results.write(&table, &rows, &schema, cache.path());
    });
}

fn trees() -> Vec<Vec<u8>> {
    let content = [PACKED, b"x"].concat();
    let blob = Digest::of_bytes(&content);
    let entry = |path: &str, offset, size: usize, executable| tree::Entry {
        path: path.into(),
        executable,
        size: size as u64,
        digest: Digest::of_bytes(&content[offset..offset + size]),
        blob,
        offset: offset as u64,
    };
    let many = [entry("a", 0, 4, true), entry("b/c", 4, 3, false), entry("b/d", 7, 1, false)];
    vec![tree::to_blob(&many), tree::to_blob(&[entry("", 0, 8, false)]), tree::to_blob(&[])]
}

const PACKED: &[u8] = b"content";

fn try_tree(folder: &Path, bytes: &[u8]) {
    let Ok(entries) = tree::from_blob(bytes) else { return };
    let blob = Digest::of_bytes(bytes);
    let artifact = Artifact {
        port_type: PortType::Tree,
        digest: tree::digest(&entries),
        size: tree::size(&entries),
        blob,
        parts: Vec::new(),
        rows: None,
        columns: Vec::new(),
    };
    let target = folder.join("deep/er/target");
    let store = Store::memory();
    now(async {
        store.put_blob(&blob, bytes.to_vec().into(), Again::No).await.unwrap();
        let pack = [PACKED, b"x"].concat();
        store.put_blob(&Digest::of_bytes(&pack), pack.into(), Again::No).await.unwrap();
        let _ = attempt::place(&store, &Input::stored(artifact), &target).await;
    });
    only_below(folder, &target);
    let _ = std::fs::remove_dir_all(folder.join("deep"));
}

// --- What programs say.

fn journals() -> Vec<Vec<u8>> {
    let lines = (1..5).map(|row| serde_json::to_string(&a_result(row)).unwrap() + "\n");
    vec![lines.collect::<String>().into_bytes()]
}

fn try_journal(folder: &Path, bytes: &[u8]) {
    let state = folder.join("state");
    drop(Journal::create(&state, "memory://", 3, "run").unwrap());
    let file = std::fs::read_dir(&state).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&file, bytes).unwrap();
    let schema = SegmentSchema::new(&row_kind());
    for orphan in journal::orphans(&state, "memory://") {
        for results in orphan.batches(1000) {
            let sound: Vec<RowResult> = results.into_iter().filter(|result| schema.check(result).is_ok()).collect();
            schema.batch(&sound).and_then(|batch| encode(&batch)).unwrap();
        }
        orphan.remove();
    }
    assert_eq!(std::fs::read_dir(&state).unwrap().count(), 0);
    only_below(folder, &state);
}

fn events() -> Vec<Vec<u8>> {
    let mut row = serde_json::to_value(a_result(2)).unwrap();
    row["event"] = "row".into();
    let all: [Value; 4] = [
        row,
        json!({ "event": "progress", "done": 1, "total": 2, "unit": "rows" }),
        json!({ "event": "metric", "name": "loss", "step": 1, "value": 0.5 }),
        json!({ "event": "log", "level": "info", "message": "m" }),
    ];
    all.iter().map(|event| serde_json::to_vec(event).unwrap()).collect()
}

fn try_event(_: &Path, bytes: &[u8]) {
    let Ok(event) = serde_json::from_slice::<Event>(bytes) else { return };
    if let Event::Row(result) = &event {
        let schema = SegmentSchema::new(&row_kind());
        if schema.check(result).is_ok() {
            encode(&schema.batch(std::slice::from_ref(result)).unwrap()).unwrap();
        }
    }
    let again = serde_json::to_vec(&event).unwrap();
    assert_eq!(serde_json::from_slice::<Event>(&again).unwrap(), event);
}

fn requests() -> Vec<Vec<u8>> {
    let file = json!({ "type": "table", "path": "inputs/t.parquet", "digest": Digest([1; 32]), "rows": 3 });
    let request = json!({
        "protocol": 1, "stage": "a", "kind": "k", "params": { "x": 1.5, "l": [null, true] }, "seed": 7,
        "inputs": { "t": file, "many": [file, file] }, "outputs": { "o": { "type": "tree", "path": "outputs/o", "columns": [["a", "list<utf8>"]] } },
        "by_row": { "port": "t", "columns": ["a"], "window": 2, "total": 3 }, "resources": { "cpu": 1, "memory_bytes": 5, "gpus": [0] },
        "device": null, "deadline_unix_s": 1.5, "state_dir": "/s",
    });
    vec![serde_json::to_vec(&request).unwrap()]
}

fn try_request(_: &Path, bytes: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<Request>(bytes) {
        let again = serde_json::to_vec(&request).unwrap();
        let back: Request = serde_json::from_slice(&again).unwrap();
        assert_eq!(serde_json::to_vec(&back).unwrap(), again);
    }
}

// --- Names.

fn tags() -> Vec<Vec<u8>> {
    ["ops@v1", "..@store-id", "a/../../b@c", "x@../../../y", "a.b-c_d@1.2", "%2e%2e@x", "@", "a@b@c"]
        .map(|tag| tag.into())
        .to_vec()
}

fn try_tag(folder: &Path, bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (name, tag) = text.split_once('@').unwrap_or((&text, &text));
    let place = folder.join("above/store");
    let store = Store::open_folder(&place).unwrap();
    let target = Tag { key: Digest([1; 32]), output: "out".into() };
    now(async {
        let put = store.put_tag(name, tag, &target).await;
        assert_eq!(put.is_ok(), is_tag_part(name) && is_tag_part(tag), "{put:?}");
        match store.tag(name, tag).await {
            Ok(found) => assert_eq!(found, Some(target)),
            Err(error) => assert!(put.is_err(), "{error}"),
        }
        if put.is_ok() {
            only_below(folder, &place.join("v1/tags").join(name).join(tag));
        }
    });
    only_below(folder, &place);
    let _ = std::fs::remove_dir_all(folder.join("above"));
}
