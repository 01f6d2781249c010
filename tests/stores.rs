//! One suite for every kind of store.

use std::collections::BTreeMap;
use std::path::Path;

use cuda_agent_engine::artifact::{Artifact, tree};
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::key::{Preimage, ProgramIdentity};
use cuda_agent_engine::store::tier::Tier;
use cuda_agent_engine::store::{Again, Record, RunManifest, RunState, Store, Tag, blob_name};
use cuda_agent_protocol::PortType;

fn record(text: &str) -> Record {
    let preimage = Preimage {
        schema: 1,
        kind: "k".into(),
        program: ProgramIdentity::Version("1".into()),
        executable: Default::default(),
        params: BTreeMap::new(),
        inputs: BTreeMap::new(),
        outputs: None,
        env: BTreeMap::new(),
        secrets: Vec::new(),
        toolchain: BTreeMap::new(),
        device: None,
        rows_of: None,
    };
    Record {
        schema: 1,
        key: preimage.key(),
        kind: "k".into(),
        nonce: cuda_agent_engine::nonce(),
        preimage,
        base: None,
        outputs: BTreeMap::new(),
        created_at: 0.0,
        run: text.into(),
        accepted_from: None,
        interpreter: None,
        duration_s: 0.0,
        rows: None,
        metrics: BTreeMap::new(),
    }
}

/// Removes an object wherever it is.
async fn delete(store: &Store, name: &str) {
    store.local().delete(name).await.unwrap();
    store.truth().delete(name).await.unwrap();
}

async fn blobs(store: &Store, scratch: &Path) {
    let bytes = b"some bytes".to_vec();
    let digest = Digest::of_bytes(&bytes);
    assert!(!store.has_blob(&digest).await.unwrap());
    assert_eq!(store.get_blob(&digest).await.unwrap(), None);
    store.put_blob(&digest, bytes.clone().into(), Again::No).await.unwrap();
    store.put_blob(&digest, bytes.clone().into(), Again::No).await.unwrap();
    assert_eq!(store.get_blob(&digest).await.unwrap().unwrap(), bytes);
    assert_eq!(store.local().read_range(&blob_name(&digest), 5, 3).await.unwrap(), "byt");
    let file = scratch.join("file");
    std::fs::write(&file, vec![7; 200_000]).unwrap();
    let big = Digest::of_file(&file).unwrap();
    store.put_blob_file(&big, &file, Again::No).await.unwrap();
    let copy = scratch.join("copy");
    assert!(store.fetch_blob(&big, &copy).await.unwrap());
    assert_eq!(Digest::of_file(&copy).unwrap(), big);
    assert!(!store.fetch_blob(&Digest([1; 32]), &copy).await.unwrap());
}

async fn damage(store: &Store, scratch: &Path) {
    let digest = Digest::of_bytes(b"right");
    store.truth().overwrite(&blob_name(&digest), &b"wrong"[..]).await.unwrap();
    assert_eq!(store.get_blob(&digest).await.unwrap(), None, "a damaged blob is a missing one");
    assert!(!store.has_blob(&digest).await.unwrap(), "and is out of the way");
    store.truth().overwrite(&blob_name(&digest), &b"wrong"[..]).await.unwrap();
    assert!(!store.fetch_blob(&digest, &scratch.join("x")).await.unwrap());
    let record = record("a");
    store.truth().overwrite(&format!("v1/records/{}/00000001", record.key), &b"{torn"[..]).await.unwrap();
    assert!(store.record(&record.key).await.unwrap().is_none());
    let commit = store.commit(record.clone(), 0).await.unwrap();
    assert_eq!((commit.generation, commit.ours), (2, true), "a damaged record is passed by");
    assert_eq!(store.record(&record.key).await.unwrap().unwrap().1, record);
}

async fn records(store: &Store) {
    let (first, second) = (record("one"), record("two"));
    let key = first.key;
    assert!(store.record(&key).await.unwrap().is_none());
    let won = store.commit(first.clone(), 0).await.unwrap();
    assert_eq!((won.generation, won.ours), (1, true));
    let lost = store.commit(second.clone(), 0).await.unwrap();
    assert_eq!((lost.generation, lost.ours, lost.record), (1, false, first), "the loser adopts the winner's record");
    let next = store.commit(second.clone(), 1).await.unwrap();
    assert_eq!((next.generation, next.ours), (2, true));
    let (generation, newest) = store.record(&key).await.unwrap().unwrap();
    assert_eq!((generation, newest), (2, second.clone()), "the highest generation counts");
    delete(store, &format!("v1/records/{key}/00000001")).await;
    assert_eq!(store.record(&key).await.unwrap().unwrap().1, second, "also when gc took the first");
    delete(store, &format!("v1/records/{key}/00000002")).await;
    assert!(store.record(&key).await.unwrap().is_none());
}

async fn races(store: &Store) {
    let writers = (0..16).map(|number| {
        let (store, record) = (store.clone(), record(&format!("writer {number}")));
        tokio::spawn(async move { store.commit(record, 0).await.unwrap() })
    });
    let ends: Vec<_> = futures::future::join_all(writers).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(ends.iter().filter(|end| end.ours).count(), 1, "one winner");
    assert!(ends.iter().all(|end| end.record == ends[0].record), "and everybody agrees who");
    delete(store, &format!("v1/records/{}/00000001", ends[0].record.key)).await;
}

async fn trees(store: &Store, scratch: &Path) {
    let folder = scratch.join("tree");
    std::fs::create_dir_all(folder.join("below")).unwrap();
    std::fs::write(folder.join("a"), "1").unwrap();
    std::fs::write(folder.join("below/b"), vec![3; 100_000]).unwrap();
    let mut scan = tree::Scan::new(&folder).unwrap();
    let pack = scan.next_pack().unwrap().unwrap();
    assert!(scan.next_pack().unwrap().is_none());
    let entries = scan.take_entries();
    let blob = Digest::of_bytes(&tree::to_blob(&entries));
    let artifact = Artifact {
        port_type: PortType::Tree,
        digest: tree::digest(&entries),
        size: tree::size(&entries),
        blob,
        parts: Vec::new(),
        rows: None,
        columns: Vec::new(),
    };
    assert_eq!(store.missing_blob(&artifact).await.unwrap(), Some(blob));
    store.put_blob(&blob, tree::to_blob(&entries).into(), Again::No).await.unwrap();
    assert!(store.missing_blob(&artifact).await.unwrap().is_some());
    store.put_blob(&pack.digest, pack.bytes.into(), Again::No).await.unwrap();
    for (digest, file) in scan.files {
        store.put_blob_file(&digest, &file, Again::No).await.unwrap();
    }
    assert_eq!(store.missing_blob(&artifact).await.unwrap(), None);
    assert_eq!(store.tree_entries(&artifact).await.unwrap().unwrap(), entries);
}

async fn the_rest(store: &Store) {
    let base = Digest([5; 32]);
    assert!(store.segments(&base).await.unwrap().is_empty());
    let segment = store.put_segment(&base, 2, b"segment"[..].into()).await.unwrap();
    assert_eq!(store.segments(&base).await.unwrap(), [segment]);
    assert_eq!(store.segment(&base, &segment).await.unwrap().unwrap(), "segment");
    let run = |id: &str| RunManifest {
        schema: 1,
        run: id.into(),
        pipeline: "p".into(),
        started_at: 0.0,
        heartbeat_at: 0.0,
        ended_at: None,
        outcome: RunState::Running,
        params: BTreeMap::new(),
        stages: BTreeMap::new(),
    };
    store.put_run(&run("20260101T000000Z-aaaaaa")).await.unwrap();
    store.put_run(&run("20260102T000000Z-aaaaaa")).await.unwrap();
    store.put_run(&run("20260101T000000Z-aaaaaa")).await.unwrap();
    assert_eq!(store.runs().await.unwrap(), ["20260102T000000Z-aaaaaa", "20260101T000000Z-aaaaaa"], "newest first");
    assert_eq!(store.run("20260101T000000Z-aaaaaa").await.unwrap().unwrap().pipeline, "p");
    assert!(store.run("nothing").await.unwrap().is_none());
    let tag = Tag { key: Digest([2; 32]), output: "out".into() };
    store.put_tag("name", "v1", &tag).await.unwrap();
    assert_eq!(store.tag("name", "v1").await.unwrap(), Some(tag));
    assert_eq!(store.tag("name", "v2").await.unwrap(), None);
    for name in ["a.log", "c[x=~,y=a%b].log"] {
        store.put_log("run", name, b"printed"[..].into()).await.unwrap();
        assert_eq!(store.log("run", name).await.unwrap().unwrap(), "printed");
    }
    let listed = store.truth().list("v1/logs/run").await.unwrap();
    let listed: Vec<&str> = listed.iter().map(|meta| meta.name.as_str()).collect();
    assert_eq!(listed, ["a.log", "c[x=~,y=a%b].log"], "a listing gives names that find the objects");
}

async fn conforms(store: Store) {
    let scratch = tempfile::tempdir().unwrap();
    blobs(&store, scratch.path()).await;
    records(&store).await;
    races(&store).await;
    damage(&store, scratch.path()).await;
    trees(&store, scratch.path()).await;
    the_rest(&store).await;
}

#[tokio::test]
async fn a_folder_conforms() {
    let folder = tempfile::tempdir().unwrap();
    conforms(Store::open(&format!("file://{}", folder.path().display())).unwrap()).await;
}

#[tokio::test]
async fn memory_conforms() {
    conforms(Store::open("memory://").unwrap()).await;
}

/// The way of all other backends: through the object-store layer alone.
#[tokio::test]
async fn a_folder_without_the_short_cuts_conforms() {
    let folder = tempfile::tempdir().unwrap();
    let backend = object_store::local::LocalFileSystem::new_with_prefix(folder.path()).unwrap();
    conforms(Store::over(std::sync::Arc::new(backend), "test://")).await;
}

/// Two tiers look like one, whatever is where.
#[tokio::test]
async fn two_tiers_conform() {
    let folder = tempfile::tempdir().unwrap();
    let near = Tier::folder_at(&folder.path().join("near")).unwrap();
    conforms(Store::tiered(near, Tier::memory(), &folder.path().join("cache"))).await;
}

#[tokio::test]
async fn unknown_stores_are_refused_by_name() {
    let error = Store::open("ftp://x").err().unwrap().to_string();
    assert!(error.contains("`ftp://` is not a kind of store here"), "{error}");
}
