//! How long it takes to look up a million row results in a thousand segments: the bar is 2 s with a warm index.
//!
//! `cargo run --release --example row_lookup` makes the segments in a temporary folder, reads them once (cold), and then
//! times the lookup that every later run makes (warm).

use std::collections::BTreeMap;
use std::time::Instant;

use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::rows::{RowIndex, SegmentSchema, segment};
use cuda_agent_engine::spec::parse_manifest;
use cuda_agent_engine::store::Store;
use cuda_agent_protocol::{RowResult, RowStatus};

const SEGMENTS: u32 = 1000;
const ROWS: u32 = 1000;
const REPEATS: usize = 5;
const MANIFEST: &str = "name: bench/rows
version: 1.0.0
summary: Rows.
inputs: { rows: { type: table, columns: { id: int64 } } }
outputs: { rows: { type: table, columns: [ { name: x, type: int64 } ] } }
by_row: { port: rows }
run: [x]
";

fn row(segment: u32, row: u32) -> Digest {
    Digest::of_bytes(&(u64::from(segment) << 32 | u64::from(row)).to_le_bytes())
}

fn main() {
    let folder = std::env::temp_dir().join(format!("row-lookup-{}", std::process::id()));
    let store = Store::open_folder(&folder).expect("a temporary folder can be made");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let base = Digest([1; 32]);
    runtime.block_on(fill(&store, &base));
    let cache = folder.join("index");
    let load = || runtime.block_on(RowIndex::load(&store, &base, &cache)).expect("the index can be read");
    let cold = Instant::now();
    assert_eq!(load().len(), (SEGMENTS * ROWS) as usize);
    let cold = cold.elapsed().as_secs_f64();
    let wanted: Vec<Digest> = (0..SEGMENTS).flat_map(|s| (0..ROWS).map(move |r| row(s, r))).collect();
    let mut warm: Vec<f64> = (0..REPEATS)
        .map(|_| {
            let started = Instant::now();
            let index = load();
            assert!(wanted.iter().all(|row| index.find(row).is_some()));
            started.elapsed().as_secs_f64()
        })
        .collect();
    warm.sort_by(f64::total_cmp);
    let median = warm[REPEATS / 2];
    println!(
        "{} row results in {SEGMENTS} segments looked up: {median:.2} s with a warm index (goal 2 s), {cold:.2} s the first time",
        SEGMENTS * ROWS
    );
    let _ = std::fs::remove_dir_all(&folder);
}

async fn fill(store: &Store, base: &Digest) {
    let manifest = parse_manifest(MANIFEST, std::path::Path::new("bench")).expect("the manifest is right");
    let schema = SegmentSchema::new(&manifest);
    for segment_number in 0..SEGMENTS {
        let result = |number: u32| RowResult {
            row: row(segment_number, number).to_string(),
            status: RowStatus::Done,
            reason: None,
            detail: None,
            outputs: BTreeMap::from([(
                "rows".to_owned(),
                vec![serde_json::Map::from_iter([("x".to_owned(), number.into())])],
            )]),
        };
        let results: Vec<RowResult> = (0..ROWS).map(result).collect();
        let batch = schema.batch(&results).expect("results fit");
        let bytes = segment::encode(&batch).expect("a batch can be written");
        store.put_segment(base, 0, bytes).await.expect("the folder can be written to");
    }
}
