//! What is read, with examples of it, and what must hold of whatever is read.

use super::*;

pub(super) const ROWS: &str = "name: my/rows\nversion: 1.0.0\nsummary: Rows.\ninputs: { rows: { type: table, columns: { id: int64 } } }\n\
    outputs: { rows: { type: table, columns: [ { name: square, type: int64 }, { name: t, type: 'list<utf8>' } ] } }\n\
    params: { seed: { type: integer, default: 0 }, rate: { type: number, default: 0.5, min: 0 } }\nresources: { cpu: 2, memory: 1GiB }\n\
    by_row: { port: rows, window: 2, row_timeout_s: 5 }\nrun: [python, x.py]\nsources: [x.py]\nenv: [HOME]\n";

pub(super) const PIPELINE: &str = "name: p\nparams: { x: 5, list: [1, 2.5, a], map: { a: true } }\nsecrets: { token: { env: TOKEN } }\nstages:\n  \
    a: { uses: run, run: 'echo ${params.x} > outputs/out', outputs: { out: tree }, timeout: 5s, retry: { attempts: 2, backoff: 1s } }\n  \
    b: { uses: my/rows, inputs: { rows: { path: t.parquet } }, params: { rate: 0.1 }, tags: [big] }\n  \
    m:\n    uses: run\n    matrix: { i: [1, 2, 3], name: [a, b] }\n    run: [sh, -c, 'echo ${matrix.i}']\n    inputs: { x: a.out }\n    outputs: { o: tree }\n    \
    files: [x.sh]\n    env: { A: b }\n  c: { uses: run, inputs: { all: 'm[*].o', t: { artifact: x@v1 } }, run: true, outputs: { o: { type: table, columns: { n: int64 } } } }\n";

pub(super) fn pipelines() -> Vec<Vec<u8>> {
    let laughs = "name: p\nparams:\n  a: &a [x, x, x, x, x, x, x, x, x]\n  b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n  c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b]\n  \
        d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c]\n  e: &e [*d, *d, *d, *d, *d, *d, *d, *d]\n  f: &f [*e, *e, *e, *e, *e, *e, *e]\n  g: [*f, *f, *f, *f, *f, *f]\nstages: {}\n";
    let chain: String = (1..3000).map(|level| format!("  a{level}: &a{level} [*a{}]\n", level - 1)).collect();
    let chain = format!("name: p\nparams:\n  a0: &a0 [1]\n{chain}stages: {{}}\n");
    let root = repository();
    let files =
        ["quickstart", "ops-llm"].map(|name| std::fs::read(root.join(format!("pipelines/{name}.yaml"))).unwrap());
    [PIPELINE, laughs, &chain].map(|text| text.as_bytes().to_vec()).into_iter().chain(files).collect()
}

pub(super) fn catalog() -> Catalog {
    let mut catalog = Catalog::default();
    crate::support::add_kind(&mut catalog, ROWS, ProgramIdentity::Version("1".into()));
    catalog
}

pub(super) fn try_pipeline(folder: &Path, bytes: &[u8]) {
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

pub(super) fn manifests() -> Vec<Vec<u8>> {
    let root = repository();
    let files = ["ops/measure", "kernels/evaluate"];
    let files = files.map(|name| std::fs::read(root.join(format!("stages/{name}/stage.yaml"))).unwrap());
    std::iter::once(ROWS.as_bytes().to_vec()).chain(files).collect()
}

pub(super) fn try_manifest(_: &Path, bytes: &[u8]) {
    match spec::parse_manifest(&String::from_utf8_lossy(bytes), Path::new("stage.yaml")) {
        Ok(manifest) => {
            assert!(manifest.inputs.keys().chain(manifest.outputs.keys()).all(|port| is_name(port)));
            let _ = SegmentSchema::new(&manifest);
        }
        Err(errors) => drop(errors.render(false)),
    }
}

// --- What comes out of a store.

pub(super) fn a_record() -> Record {
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
        outputs: BTreeMap::from([("out".to_owned(), Box::new(artifact))]),
        created_at: 1.5,
        run: "r".into(),
        accepted_from: None,
        interpreter: None,
        duration_s: 0.5,
        rows: Some(Default::default()),
        metrics: BTreeMap::from([("m".to_owned(), 0.1)]),
    }
}

pub(super) fn records() -> Vec<Vec<u8>> {
    vec![a_record().to_bytes().to_vec(), serde_json::to_vec(&a_record()).unwrap()]
}

pub(super) fn try_record(_: &Path, bytes: &[u8]) {
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

pub(super) fn run_manifests() -> Vec<Vec<u8>> {
    let stage = json!({ "key": Digest([1; 32]), "outcome": "done", "message": "m" });
    let manifest = json!({
        "schema": 1, "run": "20260101T000000.000Z-abcdef", "pipeline": "p", "started_at": 1.0, "heartbeat_at": 2.0, "ended_at": null,
        "outcome": "running", "params": { "x": [1, 2.5, "a"] }, "stages": { "a": stage, "m[i=1]": { "outcome": "waiting" } },
    });
    vec![serde_json::to_vec(&manifest).unwrap()]
}

pub(super) fn try_run_manifest(_: &Path, bytes: &[u8]) {
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

pub(super) fn row_kind() -> Manifest {
    spec::parse_manifest(ROWS, Path::new("stage.yaml")).unwrap()
}

pub(super) fn a_result(row: u8) -> RowResult {
    let output = json!({ "square": row, "t": ["a", null] }).as_object().unwrap().clone();
    let status = if row == 3 { RowStatus::Rejected } else { RowStatus::Done };
    let outputs = BTreeMap::from([("rows".to_owned(), vec![output; usize::from(row % 3)])]);
    RowResult { row: Digest([row; 32]).to_string(), status, reason: Some("r".into()), detail: None, outputs }
}

pub(super) fn segments() -> Vec<Vec<u8>> {
    let schema = SegmentSchema::new(&row_kind());
    let of = |rows: &[u8]| {
        let results: Vec<RowResult> = rows.iter().map(|row| a_result(*row)).collect();
        encode(&schema.batch(&results).unwrap()).unwrap().to_vec()
    };
    vec![of(&[1, 2, 3, 4]), of(&[]), of(&(0..200).collect::<Vec<u8>>())]
}

pub(super) fn try_segment(_: &Path, bytes: &[u8]) {
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

pub(super) fn trees() -> Vec<Vec<u8>> {
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

pub(super) const PACKED: &[u8] = b"content";

pub(super) fn try_tree(folder: &Path, bytes: &[u8]) {
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

pub(super) fn journals() -> Vec<Vec<u8>> {
    let lines = (1..5).map(|row| serde_json::to_string(&a_result(row)).unwrap() + "\n");
    vec![lines.collect::<String>().into_bytes()]
}

pub(super) fn try_journal(folder: &Path, bytes: &[u8]) {
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

pub(super) fn events() -> Vec<Vec<u8>> {
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

pub(super) fn try_event(_: &Path, bytes: &[u8]) {
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

pub(super) fn requests() -> Vec<Vec<u8>> {
    let file = json!({ "type": "table", "path": "inputs/t.parquet", "digest": Digest([1; 32]), "rows": 3 });
    let request = json!({
        "protocol": 1, "stage": "a", "kind": "k", "params": { "x": 1.5, "l": [null, true] }, "seed": 7,
        "inputs": { "t": file, "many": [file, file] }, "outputs": { "o": { "type": "tree", "path": "outputs/o", "columns": [["a", "list<utf8>"]] } },
        "by_row": { "port": "t", "columns": ["a"], "window": 2, "total": 3 }, "resources": { "cpu": 1, "memory_bytes": 5, "gpus": [0] },
        "device": null, "deadline_unix_s": 1.5, "state_dir": "/s",
    });
    vec![serde_json::to_vec(&request).unwrap()]
}

pub(super) fn try_request(_: &Path, bytes: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<Request>(bytes) {
        let again = serde_json::to_vec(&request).unwrap();
        let back: Request = serde_json::from_slice(&again).unwrap();
        assert_eq!(serde_json::to_vec(&back).unwrap(), again);
    }
}

// --- Names.

pub(super) fn tags() -> Vec<Vec<u8>> {
    ["ops@v1", "..@store-id", "a/../../b@c", "x@../../../y", "a.b-c_d@1.2", "%2e%2e@x", "@", "a@b@c"]
        .map(|tag| tag.into())
        .to_vec()
}

pub(super) fn try_tag(folder: &Path, bytes: &[u8]) {
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
