//! What planning decides by itself: levels of stages, what the machine lacks, hints, and what earlier runs tell.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use cuda_agent_protocol::Manifest;
use serde_json::json;

use super::hits::Levels;
use super::*;
use crate::artifact::tree;
use crate::spec;
use crate::store::record::StageEntry;
use crate::store::{Again, RunManifest, RunState};

thread_local! {
    /// How often this thread has asked which stages feed one.
    pub static WIRES_READ: Cell<usize> = const { Cell::new(0) };
}

struct NoKinds;
impl spec::Catalog for NoKinds {
    fn get(&self, _: &str) -> Option<Arc<Manifest>> {
        None
    }
    fn names(&self) -> Vec<String> {
        Vec::new()
    }
}

fn parse(text: &str) -> Pipeline {
    let none = |_: &Path| Err(std::io::ErrorKind::NotFound.into());
    let text = format!("name: p\n{text}");
    spec::parse_pipeline(&text, Path::new("x.yaml"), Path::new("/data"), &NoKinds, &[], &none).unwrap()
}

#[test]
fn a_stage_is_looked_up_when_all_that_feed_it_are_found() {
    let pipeline = parse(
        "
stages:
  last: { uses: run, run: x, inputs: { l: left.out, r: right.out }, outputs: { out: tree } }
  right: { uses: run, run: x, inputs: { a: top.out, b: top.out }, outputs: { out: tree } }
  left: { uses: run, run: x, inputs: { a: top.out }, outputs: { out: tree } }
  top: { uses: run, run: x, inputs: { data: { path: data } }, outputs: { out: tree } }
",
    );
    assert_eq!(producers(&pipeline.stages[0]), [2, 1]);
    assert_eq!(producers(&pipeline.stages[3]), [0; 0]);
    let order = [3, 1, 2, 0];
    let mut levels = Levels::new(&pipeline, &order);
    assert_eq!(levels.first(&order), [3]);
    assert_eq!(levels.after([3].into_iter()), [1, 2]);
    assert_eq!(levels.after([1].into_iter()), [0; 0], "the other half is missing");
    assert_eq!(levels.after([2].into_iter()), [0]);
}

/// A chain has as many levels as stages, so whatever a level costs beyond its own stages makes a no-op run quadratic.
/// A store with an empty tree, which is what stages in it have made.
async fn with_empty_tree(folder: &std::path::Path) -> (Store, Artifact) {
    let store = Store::open_folder(folder).unwrap();
    let empty = tree::to_blob(&[]);
    let blob = Digest::of_bytes(&empty);
    store.put_blob(&blob, empty.into(), Again::No).await.unwrap();
    let digest = tree::digest(&[]);
    let port_type = cuda_agent_protocol::PortType::Tree;
    (store, Artifact { port_type, digest, size: 0, blob, parts: Vec::new(), rows: None, columns: Vec::new() })
}

#[tokio::test]
async fn each_wire_of_a_chain_is_followed_once() {
    const LENGTH: usize = 300;
    let stage = |number: usize| match number {
        0 => "  s0: { uses: run, run: x, outputs: { out: tree } }\n".to_owned(),
        _ => format!(
            "  s{number}: {{ uses: run, run: x, inputs: {{ i: s{}.out }}, outputs: {{ out: tree }} }}\n",
            number - 1
        ),
    };
    let pipeline = parse(&format!("stages:\n{}", (0..LENGTH).map(stage).collect::<String>()));
    let folder = tempfile::tempdir().unwrap();
    let (store, made) = with_empty_tree(&folder.path().join("store")).await;
    let folders = Folders::below(&folder.path().join("local")).unwrap();
    let (catalog, host, refresh) = (Catalog::default(), Host::fake(4, "a made-up CPU"), BTreeSet::new());
    let planner = Planner::new(&pipeline, &catalog, &store, &host, &folders, &refresh);
    let outputs = Outputs::from([("out".to_owned(), Box::new(made))]);
    for index in 0..LENGTH {
        let resolved = planner.stage(index, |_| Some(&outputs)).await.unwrap().resolved.unwrap();
        store.commit(record(resolved, outputs.clone()), 0).await.unwrap();
    }
    let order: Vec<usize> = (0..LENGTH).collect();
    WIRES_READ.set(0);
    let found: HashMap<usize, Found> = planner.hits(&order, &[true; LENGTH], &|| false).await.unwrap();
    assert_eq!((found.len(), WIRES_READ.get()), (LENGTH, LENGTH));
}

/// Stages side by side, looked up by several threads, of which some are no hits for each reason that there is.
#[tokio::test]
async fn what_is_no_hit_one_by_one_is_none_among_many() {
    const LENGTH: usize = 300;
    let stage = |number: usize| format!("  s{number}: {{ uses: run, run: echo {number}, outputs: {{ out: tree }} }}\n");
    let pipeline = parse(&format!("stages:\n{}", (0..LENGTH).map(stage).collect::<String>()));
    let folder = tempfile::tempdir().unwrap();
    let (store, made) = with_empty_tree(&folder.path().join("store")).await;
    let folders = Folders::below(&folder.path().join("local")).unwrap();
    let (catalog, host) = (Catalog::default(), Host::fake(4, "a made-up CPU"));
    let refresh = BTreeSet::from([30]);
    let planner = Planner::new(&pipeline, &catalog, &store, &host, &folders, &refresh);
    let outputs = Outputs::from([("out".to_owned(), Box::new(made.clone()))]);
    for index in 0..LENGTH {
        let resolved = planner.stage(index, |_| None).await.unwrap().resolved.unwrap();
        let mut record = record(resolved, outputs.clone());
        match index {
            70 => record.outputs.get_mut("out").unwrap().blob = Digest::of_bytes(b"nowhere"),
            110 => record.rows = Some(RowCounts { total: 2, failed: 1, ..RowCounts::default() }),
            150 => record.preimage.kind = "another".into(),
            190 => continue,
            _ => record.rows = Some(RowCounts { total: index as u64, ..RowCounts::default() }),
        }
        store.commit(record, 0).await.unwrap();
    }
    let order: Vec<usize> = (0..LENGTH).collect();
    let expected: Vec<usize> = order.iter().copied().filter(|index| ![30, 70, 110, 150, 190].contains(index)).collect();
    let mut selected = [true; LENGTH];
    let found: HashMap<usize, Found> = planner.hits(&order, &selected, &|| false).await.unwrap();
    let plans: HashMap<usize, StagePlan> = planner.hits(&order, &selected, &|| false).await.unwrap();
    for index in 0..LENGTH {
        let plan = planner.stage(index, |_| None).await.unwrap();
        let Verdict::Hit { record, .. } = &plan.verdict else {
            assert!(
                !expected.contains(&index) && !found.contains_key(&index) && !plans.contains_key(&index),
                "{index}"
            );
            continue;
        };
        let (found, planned) = (&found[&index], &plans[&index]);
        assert_eq!((&found.outputs, found.rows, found.key), (&record.outputs, record.rows, record.key));
        assert_eq!((found.rows.unwrap().total, found.is_shared), (index as u64, true));
        assert!(matches!(&planned.verdict, Verdict::Hit { record: other, generation: 1 } if other == record));
    }
    assert_eq!(found.len(), expected.len());
    selected[0] = false;
    let found: HashMap<usize, Found> = planner.hits(&order, &selected, &|| false).await.unwrap();
    assert!(!found.contains_key(&0) && found.len() == expected.len() - 1);
    let halted: HashMap<usize, Found> = planner.hits(&order, &selected, &|| true).await.unwrap();
    assert!(halted.is_empty());
}

fn record(resolved: Resolved, outputs: Outputs) -> Record {
    Record {
        schema: 1,
        key: resolved.key,
        kind: "run".into(),
        nonce: crate::nonce(),
        preimage: resolved.preimage,
        base: None,
        outputs,
        created_at: 0.0,
        run: "run".into(),
        accepted_from: None,
        interpreter: None,
        duration_s: 0.0,
        rows: None,
        metrics: BTreeMap::new(),
    }
}

#[test]
fn what_is_lacking_is_told_once_with_the_stages_that_lack_it() {
    let text: String = (0..22).map(|n| format!("  s{n}: {{ uses: run, run: x }}\n")).collect();
    let pipeline = parse(&format!("stages:\n{text}"));
    let lack = |package: &str| ToolchainError::NoPackage { package: package.into(), python: "python3".into() };
    let told = |met: &[(usize, &str)]| {
        let mut lacks = Lacks::default();
        met.iter().for_each(|(stage, package)| lacks.add(&pipeline.stages[*stage], lack(package)));
        lacks.told().map(|error| error.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(
        told(&[(0, "torch"), (1, "numpy"), (2, "torch")]),
        [
            "stage `s0`, `s2`: the Python package `torch` is not installed for python3",
            "stage `s1`: the Python package `numpy` is not installed for python3",
        ]
    );
    let all: Vec<(usize, &str)> = (0..22).map(|stage| (stage, "torch")).collect();
    assert!(told(&all[..20])[0].starts_with("stage `s0`, ") && told(&all[..20])[0].contains("`s19`: "));
    assert!(told(&all)[0].contains("`s19`, `… 2 more`: "), "{:?}", told(&all));
}

#[test]
fn a_path_may_hold_what_separates_a_message_from_advice() {
    let error = inputs::unusable(std::path::Path::new("/nowhere/a; b")).unwrap();
    assert_eq!(error.message, "/nowhere/a; b does not exist");
    assert_eq!(error.hint.as_deref(), Some("paths start at the pipeline file's folder"));
}

#[test]
fn an_error_of_a_plan_says_what_to_do_and_whose_it_is() {
    let input = |hint: Option<&str>| PlanError::Input {
        location: "x.yaml:1:1".into(),
        stage: "s".into(),
        port: "p".into(),
        error: InputError { message: "wrong".into(), hint: hint.map(str::to_owned) },
    };
    let lack = |error| PlanError::Toolchain { stage: "s".into(), error };
    let no_python = lack(ToolchainError::NoPython { python: "python3".into(), message: "gone".into() });
    let no_package = lack(ToolchainError::NoPackage { package: "torch".into(), python: "python3".into() });
    let away = StoreError { hint: Some("wait".into()), ..StoreError::new("memory://", "read", "x", "away") };
    let program = PlanError::Program {
        location: "x.yaml:1:1".into(),
        stage: "s".into(),
        error: ArtifactError::Contract("wrong".into()),
    };
    assert_eq!((input(Some("mend it")).hint(), input(None).hint()), (Some("mend it".into()), None));
    assert!(no_python.hint().unwrap().starts_with("`make venv` makes .venv; "));
    assert!(no_package.hint().unwrap().contains("`pip install torch`"));
    assert_eq!((PlanError::Store(away.clone()).hint(), program.hint()), (Some("wait".into()), None));
    let usage = [input(None), program, no_python, no_package, PlanError::Store(away)].map(|error| error.is_usage());
    assert_eq!(usage, [true, true, false, false, false]);
}

/// A run of a pipeline with one stage, `s`.
fn run(number: u32, pipeline: &str, key: Digest, outcome: &str) -> RunManifest {
    let entry = StageEntry {
        key: Some(key),
        outcome: serde_json::from_value(outcome.into()).unwrap(),
        ..StageEntry::default()
    };
    RunManifest {
        schema: 1,
        run: format!("run-{number:03}"),
        pipeline: pipeline.into(),
        started_at: 0.0,
        heartbeat_at: 0.0,
        ended_at: Some(1.0),
        outcome: RunState::Done,
        params: BTreeMap::from([("rate".into(), json!(number))]),
        stages: BTreeMap::from([("s".into(), entry)]),
    }
}

async fn history(runs: impl IntoIterator<Item = RunManifest>) -> History {
    let store = Store::memory();
    for run in runs {
        store.put_run(&run).await.unwrap();
    }
    History::load(&store, "p").await.unwrap()
}

#[tokio::test]
async fn the_newest_twenty_runs_of_a_pipeline_are_looked_at() {
    let key = |number: u32| Digest::of_bytes(&number.to_le_bytes());
    let mut runs: Vec<RunManifest> = (0..30).map(|number| run(number, "p", key(number), "done")).collect();
    runs.extend((30..40).map(|number| run(number, "other", key(number), "done")));
    runs.push(run(29, "p", key(29), "failed"));
    let history = history(runs).await;
    let found: Vec<(&str, Digest)> = history.results("s").collect();
    let expected: Vec<(String, Digest)> = (10..29).rev().map(|n| (format!("run-{n:03}"), key(n))).collect();
    assert_eq!(found, expected.iter().map(|(run, key)| (run.as_str(), *key)).collect::<Vec<_>>());
    assert_eq!(history.params("run-012").unwrap()["rate"], json!(12));
    assert_eq!((history.params("run-009"), history.params("run-035")), (None, None));
}

#[tokio::test]
async fn a_hint_stands_in_only_where_no_run_is_known() {
    let hint = || Hint { run: "far".into(), stages: BTreeMap::from([("s".into(), Digest([2; 32]))]) };
    let known = history([run(1, "p", Digest([1; 32]), "done")]).await.or_hint(hint());
    assert_eq!(known.results("s").collect::<Vec<_>>(), [("run-001", Digest([1; 32]))]);
    let unknown = history([]).await.or_hint(hint());
    assert_eq!(unknown.results("s").collect::<Vec<_>>(), [("far", Digest([2; 32]))]);
}

#[tokio::test]
async fn a_stage_without_a_record_has_a_reason() {
    let pipeline = parse("stages: { s: { uses: run, run: x }, other: { uses: run, run: x } }");
    let preimage: Preimage = serde_json::from_value(json!({
        "schema": 1, "kind": "run", "program": { "version": "1" }, "params": {}, "inputs": {},
    }))
    .unwrap();
    let resolved = Resolved { key: preimage.key(), base: None, preimage, inputs: BTreeMap::new() };
    let explained = async |stage: usize, key: Digest, outcome: &str| {
        let (history, stage) = (history([run(1, "p", key, outcome)]).await, &pipeline.stages[stage]);
        let reasons = history.explain(&Store::memory(), stage, &BTreeMap::new(), &resolved, &BTreeMap::new()).await;
        reasons.unwrap().iter().map(MissReason::to_string).collect::<Vec<_>>().join("; ")
    };
    assert_eq!(explained(0, resolved.key, "failed").await, "failed in run run-001");
    assert_eq!(explained(0, resolved.key, "hit").await, "its record is gone from the store");
    assert_eq!(explained(0, resolved.key, "cancelled").await, "never run");
    assert_eq!(explained(0, Digest([1; 32]), "failed").await, "never run", "of another key nothing is known");
    assert_eq!(explained(1, resolved.key, "done").await, "never run");
}
