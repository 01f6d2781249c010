//! Garbage collection: what is reachable stays, whatever happens and whenever it is interrupted; the rest goes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use cuda_agent_engine::artifact::{Artifact, tree};
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::key::{Preimage, ProgramIdentity};
use cuda_agent_engine::store::audit::End;
use cuda_agent_engine::store::gc::{self, Class, Garbage, Policy, Swept, What};
use cuda_agent_engine::store::tier::Tier;
use cuda_agent_engine::store::{Again, Record, RunManifest, StageEntry, StageState, Store, Tag, blob_name};
use cuda_agent_protocol::PortType;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use proptest::prelude::*;

use crate::support::{Lab, Sandbox};

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

/// A server with a clock of its own, which can be told to break off.
#[derive(Clone, Debug)]
struct Server {
    objects: Arc<InMemory>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// Seconds since 1970, far from anybody else's.
    now: u64,
    times: HashMap<Path, u64>,
    /// In order.
    deleted: Vec<String>,
    /// So many may be deleted before everything breaks off.
    deletions: Option<usize>,
    /// Something to do when a listing of this prefix is asked for, once.
    meanwhile: Option<(&'static str, Meanwhile)>,
    /// Listings of this prefix fail.
    unlistable: Option<&'static str>,
}

struct Meanwhile(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Meanwhile")
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a server")
    }
}

fn broken() -> object_store::Error {
    object_store::Error::Generic { store: "test", source: "it broke off".into() }
}

impl Server {
    fn new() -> Self {
        let state = State {
            now: 100 * DAY,
            times: HashMap::new(),
            deleted: Vec::new(),
            deletions: None,
            meanwhile: None,
            unlistable: None,
        };
        Self { objects: Arc::new(InMemory::new()), state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn pass(&self, seconds: u64) {
        self.state().now += seconds;
    }

    /// Writes as if so many seconds ago.
    async fn ago<T>(&self, seconds: u64, write: impl Future<Output = T>) -> T {
        let now = self.state().now;
        self.state().now = now - seconds;
        let done = write.await;
        self.state().now = now;
        done
    }

    fn tier(&self) -> Tier {
        Tier::over(Arc::new(self.clone()), "test://server")
    }

    fn store(&self) -> Store {
        Store::over(Arc::new(self.clone()), "test://server")
    }

    fn stamp(&self, mut meta: ObjectMeta) -> ObjectMeta {
        let time = self.state().times.get(&meta.location).copied().unwrap_or(0);
        meta.last_modified = (SystemTime::UNIX_EPOCH + Duration::from_secs(time)).into();
        meta
    }

    async fn names(&self) -> BTreeSet<String> {
        let all = self.objects.list(None).map_ok(|meta| meta.location.to_string());
        all.try_collect().await.unwrap()
    }

    fn delete_one(&self, path: Path) -> BoxFuture<'static, Result<Path>> {
        let server = self.clone();
        Box::pin(async move {
            {
                let mut state = server.state();
                match &mut state.deletions {
                    Some(0) => return Err(broken()),
                    Some(left) => *left -= 1,
                    None => {}
                }
                state.deleted.push(path.to_string());
            }
            server.objects.delete(&path).await.map(|()| path)
        })
    }
}

impl ObjectStore for Server {
    fn put_opts<'a, 'b, 'f>(
        &'a self,
        location: &'b Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> BoxFuture<'f, Result<PutResult>>
    where
        'a: 'f,
        'b: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            let put = self.objects.put_opts(location, payload, options).await?;
            let mut state = self.state();
            let now = state.now;
            state.times.insert(location.clone(), now);
            Ok(put)
        })
    }

    fn put_multipart_opts<'a, 'b, 'f>(
        &'a self,
        location: &'b Path,
        options: PutMultipartOptions,
    ) -> BoxFuture<'f, Result<Box<dyn MultipartUpload>>>
    where
        'a: 'f,
        'b: 'f,
        Self: 'f,
    {
        Box::pin(async move { self.objects.put_multipart_opts(location, options).await })
    }

    fn get_opts<'a, 'b, 'f>(&'a self, location: &'b Path, options: GetOptions) -> BoxFuture<'f, Result<GetResult>>
    where
        'a: 'f,
        'b: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            let mut found = self.objects.get_opts(location, options).await?;
            found.meta = self.stamp(found.meta);
            Ok(found)
        })
    }

    fn get_ranges<'a, 'b, 'c, 'f>(
        &'a self,
        location: &'b Path,
        ranges: &'c [Range<u64>],
    ) -> BoxFuture<'f, Result<Vec<bytes::Bytes>>>
    where
        'a: 'f,
        'b: 'f,
        'c: 'f,
        Self: 'f,
    {
        Box::pin(async move { self.objects.get_ranges(location, ranges).await })
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let server = self.clone();
        locations
            .then(move |path| {
                let server = server.clone();
                async move { server.delete_one(path?).await }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let is_at = |wanted: &str| prefix.is_some_and(|prefix| prefix.as_ref() == wanted);
        if self.state().unlistable.is_some_and(is_at) {
            return futures::stream::iter([Err(broken())]).boxed();
        }
        let meanwhile = self.state().meanwhile.take_if(|(wanted, _)| is_at(wanted));
        if let Some((_, Meanwhile(act))) = meanwhile {
            act();
        }
        let server = self.clone();
        self.objects.list(prefix).map_ok(move |meta| server.stamp(meta)).boxed()
    }

    fn list_with_delimiter<'a, 'b, 'f>(&'a self, prefix: Option<&'b Path>) -> BoxFuture<'f, Result<ListResult>>
    where
        'a: 'f,
        'b: 'f,
        Self: 'f,
    {
        Box::pin(async move { self.objects.list_with_delimiter(prefix).await })
    }

    fn copy_opts<'a, 'b, 'c, 'f>(
        &'a self,
        from: &'b Path,
        to: &'c Path,
        options: CopyOptions,
    ) -> BoxFuture<'f, Result<()>>
    where
        'a: 'f,
        'b: 'f,
        'c: 'f,
        Self: 'f,
    {
        Box::pin(async move { self.objects.copy_opts(from, to, options).await })
    }
}

fn policy() -> Policy {
    Policy { keep_last: 1, older_than: None, grace: Duration::from_secs(DAY), now_alone: false }
}

fn preimage(number: u32) -> Preimage {
    Preimage {
        schema: 1,
        kind: "k".into(),
        program: ProgramIdentity::Version("1".into()),
        executable: Default::default(),
        params: BTreeMap::from([("number".into(), number.into())]),
        inputs: BTreeMap::new(),
        outputs: None,
        env: BTreeMap::new(),
        secrets: Vec::new(),
        toolchain: BTreeMap::new(),
        device: None,
        rows_of: None,
    }
}

fn content(blob: u32) -> Vec<u8> {
    format!("blob {blob}").into_bytes()
}

/// A tree of such blobs, which are listed in its record or in a list of their own.
fn tree_of(blobs: &[u32], listed: bool) -> (Artifact, Vec<Vec<u8>>) {
    let mut contents: Vec<Vec<u8>> = blobs.iter().map(|blob| content(*blob)).collect();
    let entries: Vec<tree::Entry> = contents
        .iter()
        .enumerate()
        .map(|(index, bytes)| tree::Entry {
            path: format!("{index}"),
            executable: false,
            size: bytes.len() as u64,
            digest: Digest::of_bytes(bytes),
            blob: Digest::of_bytes(bytes),
            offset: 0,
        })
        .collect();
    let list = tree::to_blob(&entries);
    let mut parts: Vec<Digest> = entries.iter().map(|entry| entry.blob).collect();
    parts.sort_unstable();
    parts.dedup();
    let artifact = Artifact {
        port_type: PortType::Tree,
        digest: tree::digest(&entries),
        size: tree::size(&entries),
        blob: Digest::of_bytes(&list),
        parts: if listed { parts } else { Vec::new() },
        rows: None,
        columns: Vec::new(),
    };
    contents.push(list);
    (artifact, contents)
}

fn record(number: u32, artifact: Artifact, base: Option<Digest>) -> Record {
    let preimage = preimage(number);
    Record {
        schema: 1,
        key: preimage.key(),
        kind: "k".into(),
        nonce: cuda_agent_engine::nonce(),
        preimage,
        base,
        outputs: BTreeMap::from([("out".into(), artifact)]),
        created_at: 0.0,
        run: String::new(),
        accepted_from: None,
        interpreter: None,
        duration_s: 0.0,
        rows: None,
        metrics: BTreeMap::new(),
    }
}

/// A writer whose clock is 20 hours behind the server's: what seems written now is 20 hours old, and gc may have condemned it.
#[tokio::test]
async fn how_old_a_blob_is_is_told_by_the_servers_clock() {
    let server = Server::new();
    server.state().now = cuda_agent_engine::now() as u64 + 20 * HOUR;
    let (artifact, contents) = tree_of(&[1], true);
    for bytes in &contents {
        let name = blob_name(&Digest::of_bytes(bytes));
        server.ago(20 * HOUR, server.tier().overwrite(&name, bytes.clone())).await.unwrap();
    }
    let machine = tempfile::tempdir().unwrap();
    let near = Tier::folder_at(&machine.path().join("near")).unwrap();
    let store = Store::tiered(near, server.tier(), &machine.path().join("cache"));
    for bytes in &contents {
        store.put_blob(&Digest::of_bytes(bytes), bytes.clone().into(), Again::No).await.unwrap();
    }
    store.commit(record(1, artifact, None), 0).await.unwrap();
    for bytes in &contents {
        let meta = server.tier().head(&blob_name(&Digest::of_bytes(bytes))).await.unwrap().unwrap();
        assert_eq!(meta.modified as u64, server.state().now, "it was written once more");
    }
}

/// Writes a result as the engine does: a blob that is there is written again unless it is young.
async fn make(server: &Server, number: u32, after: u32, blobs: &[u32], listed: bool, base: Option<Digest>) -> Digest {
    let store = server.store();
    let (artifact, contents) = tree_of(blobs, listed);
    for bytes in contents {
        let digest = Digest::of_bytes(&bytes);
        let there = store.truth().head(&blob_name(&digest)).await.unwrap();
        let now = server.state().now as f64;
        if there.is_none_or(|meta| now - meta.modified >= (DAY / 2) as f64) {
            store.put_blob(&digest, bytes.into(), Again::Yes).await.unwrap();
        }
    }
    store.commit(record(number, artifact, base), after).await.unwrap().record.key
}

/// Ids by a client's clock, which is wrong.
fn run_id(client: u64, number: usize) -> String {
    format!("{}-{number:06}", cuda_agent_engine::id_at(client as f64).split_once('-').unwrap().0)
}

async fn run(store: &Store, id: &str, pipeline: &str, outcome: &str, keys: &[Digest], bases: &[Digest]) {
    let entry = |key: Option<Digest>, base| StageEntry { key, base, outcome: StageState::Hit, ..StageEntry::default() };
    let mut stages = BTreeMap::new();
    stages.extend(keys.iter().enumerate().map(|(at, key)| (format!("s{at}"), entry(Some(*key), None))));
    stages.extend(bases.iter().enumerate().map(|(at, base)| (format!("b{at}"), entry(None, Some(*base)))));
    let manifest = RunManifest {
        schema: 1,
        run: id.into(),
        pipeline: pipeline.into(),
        started_at: 5.0,
        heartbeat_at: 5.0,
        ended_at: (outcome != "running").then_some(5.0),
        outcome: serde_json::from_value(outcome.into()).unwrap(),
        params: BTreeMap::new(),
        stages,
    };
    store.put_run(&manifest).await.unwrap();
}

/// Every result that can be found can be used: its blobs are there, and are what they were.
async fn assert_whole(store: &Store) {
    let listed = store.truth().list("v1/records").await.unwrap();
    let keys = listed.iter().filter_map(|meta| match What::of(&format!("v1/records/{}", meta.name))? {
        What::Record(key, _) => Some(key),
        _ => None,
    });
    let keys: BTreeSet<Digest> = keys.collect();
    for key in keys {
        let (_, record) = store.record(&key).await.unwrap().expect("generations that stay can be found");
        for artifact in record.outputs.values() {
            assert_eq!(store.missing_blob(artifact).await.unwrap(), None, "{key} lost a blob");
            for blob in store.blobs_of(artifact).await.unwrap().unwrap() {
                assert!(store.get_blob(&blob).await.unwrap().is_some(), "{key} lost a blob");
            }
        }
    }
}

async fn condemn(server: &Server, policy: &Policy) -> Garbage {
    match gc::sweep(&server.tier(), policy).await.unwrap() {
        Swept::Condemned(garbage) => garbage,
        other => panic!("{other:?}"),
    }
}

async fn delete(server: &Server, policy: &Policy) -> Garbage {
    match gc::sweep(&server.tier(), policy).await.unwrap() {
        Swept::Deleted(garbage) => garbage,
        other => panic!("{other:?}"),
    }
}

/// An old result of pipeline `p` that a newer run no longer uses, and the one that it uses.
async fn old_and_new(server: &Server) -> (Digest, Digest) {
    let store = server.store();
    let old = server.ago(9 * DAY, make(server, 1, 0, &[1, 2], true, None)).await;
    server.ago(9 * DAY, run(&store, &run_id(DAY, 1), "p", "done", &[old], &[])).await;
    let new = server.ago(8 * DAY, make(server, 2, 0, &[2, 3], false, None)).await;
    server.ago(8 * DAY, run(&store, &run_id(DAY, 2), "p", "done", &[new], &[])).await;
    (old, new)
}

#[tokio::test]
async fn garbage_goes_in_two_steps() {
    let server = Server::new();
    let store = server.store();
    let (old, new) = old_and_new(&server).await;
    let before = server.names().await;
    let plan = gc::plan(&server.tier(), &policy()).await.unwrap();
    assert_eq!(server.names().await, before, "a plan changes nothing");
    assert_eq!((plan.garbage.runs.as_slice(), plan.wait), (&[run_id(DAY, 1)][..], None));
    let sum = |class| (plan.garbage.going[&class].objects, plan.garbage.staying[&class].objects);
    assert_eq!([Class::Runs, Class::Records, Class::Blobs].map(sum), [(1, 1), (1, 1), (2, 3)]);
    assert!(condemn(&server, &policy()).await.names().eq(plan.garbage.names()));
    assert!(server.names().await.is_superset(&before), "the first step deletes nothing");
    server.pass(DAY / 2);
    let Swept::Waiting(wait) = gc::sweep(&server.tier(), &policy()).await.unwrap() else { panic!() };
    assert_eq!(wait, Duration::from_secs(DAY / 2));
    server.pass(DAY / 2 + 1);
    assert_eq!(gc::plan(&server.tier(), &policy()).await.unwrap().wait, Some(Duration::ZERO));
    let gone = delete(&server, &policy()).await;
    assert_eq!((gone.total(), gone.runs), (plan.garbage.total(), vec![run_id(DAY, 1)]));
    assert!(store.record(&old).await.unwrap().is_none() && store.record(&new).await.unwrap().is_some());
    assert_whole(&store).await;
    let left = server.tier().list("v1/gc").await.unwrap();
    assert_eq!(left.len(), 1, "a report is what is left: {left:?}");
    assert!(matches!(gc::sweep(&server.tier(), &policy()).await.unwrap(), Swept::Nothing(_)));
}

#[tokio::test]
async fn runs_go_before_records_and_records_before_blobs() {
    let server = Server::new();
    let (old, _) = old_and_new(&server).await;
    server.ago(5 * DAY, make(&server, 1, 1, &[7], true, None)).await;
    server.ago(4 * DAY, make(&server, 1, 2, &[8], true, None)).await;
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    server.state().deleted.clear();
    delete(&server, &policy()).await;
    let deleted = server.state().deleted.clone();
    let order: Vec<&str> = deleted.iter().filter_map(|name| name.split('/').nth(1)).filter(|f| *f != "gc").collect();
    let sorted = ["runs", "records", "records", "records", "blobs", "blobs", "blobs", "blobs", "blobs", "blobs"];
    assert_eq!(order, sorted);
    let records: Vec<&str> = deleted.iter().map(String::as_str).filter(|name| name.contains("records")).collect();
    assert_eq!(records, [1, 2, 3].map(|n| format!("v1/records/{old}/{n:08}")), "generations have no holes");
}

#[tokio::test]
async fn what_is_used_again_between_the_steps_stays() {
    let server = Server::new();
    let store = server.store();
    let (old, _) = old_and_new(&server).await;
    let third = server.ago(10 * DAY, make(&server, 3, 0, &[4, 5], true, None)).await;
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    // One run finds the old result; another makes one of the old blobs again.
    run(&store, &run_id(7, 9), "p", "running", &[old], &[]).await;
    let other = make(&server, 4, 0, &[5, 6], true, None).await;
    delete(&server, &policy()).await;
    assert!(store.record(&old).await.unwrap().is_some(), "it is in use");
    assert!(store.record(&third).await.unwrap().is_none());
    assert!(store.record(&other).await.unwrap().is_some(), "it is young");
    assert!(!store.has_blob(&Digest::of_bytes(&content(4))).await.unwrap());
    assert!(store.has_blob(&Digest::of_bytes(&content(5))).await.unwrap(), "it was uploaded again");
    assert_whole(&store).await;
}

/// Blobs that were uploaded again stay although no record names them yet, also when that happens while gc is at work.
#[tokio::test]
async fn a_blob_that_is_uploaded_again_in_the_last_moment_stays() {
    let server = Server::new();
    old_and_new(&server).await;
    let blob = Digest::of_bytes(&content(1));
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    let name = blob_name(&blob);
    let prefix: &'static str = name[..11 + 1].trim_end_matches('/').to_owned().leak();
    // The folder is listed for marking, and once more before it is emptied.
    let (again, path, listed) = (server.clone(), Path::from(name.as_str()), Arc::new(Mutex::new(0)));
    fn arm(server: &Server, prefix: &'static str, path: Path, listed: Arc<Mutex<u32>>) {
        let next = server.clone();
        let act = move || {
            *listed.lock().unwrap() += 1;
            if *listed.lock().unwrap() == 1 {
                arm(&next, prefix, path, listed);
            } else {
                let now = next.state().now;
                next.state().times.insert(path, now);
            }
        };
        server.state().meanwhile = Some((prefix, Meanwhile(Box::new(act))));
    }
    arm(&again, prefix, path, listed.clone());
    let gone = delete(&server, &policy()).await;
    assert_eq!((*listed.lock().unwrap(), gone.going[&Class::Blobs].objects), (2, 1));
    assert!(server.store().has_blob(&blob).await.unwrap());
}

#[tokio::test]
async fn a_run_that_begins_while_gc_looks_is_seen() {
    let server = Server::new();
    let store = server.store();
    let (old, _) = old_and_new(&server).await;
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    run(&store, &run_id(7, 9), "q", "running", &[], &[]).await;
    // Tags are read with the runs; the second time right before the deletion, and in the same second by the server's clock.
    let began = server.clone();
    let act = move || {
        let late = began.clone();
        let act = move || {
            futures::executor::block_on(run(&late.store(), &run_id(7, 9), "q", "running", &[old], &[]));
        };
        began.state().meanwhile = Some(("v1/runs", Meanwhile(Box::new(act))));
    };
    server.state().meanwhile = Some(("v1/tags", Meanwhile(Box::new(act))));
    let gone = delete(&server, &policy()).await;
    assert!(store.record(&old).await.unwrap().is_some());
    assert_eq!(gone.going.keys().collect::<Vec<_>>(), [&Class::Runs], "its old run alone");
    assert_whole(&store).await;
}

/// While gc deletes, a result is made of blobs that it was about to delete, and one that it found in use is given up.
#[tokio::test]
async fn what_comes_while_gc_deletes_is_whole() {
    let server = Server::new();
    let store = server.store();
    let (old, _) = old_and_new(&server).await;
    let tagged = server.ago(9 * DAY, make(&server, 3, 0, &[4, 5], true, None)).await;
    let (_, record) = store.record(&old).await.unwrap().unwrap();
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    store.put_tag("name", "v1", &Tag { key: tagged, output: "out".into() }).await.unwrap();
    // The records are listed for marking, and once more when those that are garbage are gone.
    let (at_work, late) = (server.clone(), preimage(50));
    let late = Record { key: late.key(), preimage: late, ..record };
    let key = late.key;
    let act = move || {
        let again = at_work.clone();
        let act = move || {
            futures::executor::block_on(async {
                again.store().commit(late, 0).await.unwrap();
                again.store().truth().delete("v1/tags/name/v1").await.unwrap();
            });
        };
        at_work.state().meanwhile = Some(("v1/records", Meanwhile(Box::new(act))));
    };
    server.state().meanwhile = Some(("v1/records", Meanwhile(Box::new(act))));
    delete(&server, &policy()).await;
    assert!(store.record(&old).await.unwrap().is_none());
    assert!(store.record(&key).await.unwrap().is_some() && store.record(&tagged).await.unwrap().is_some());
    assert_whole(&store).await;
}

#[tokio::test]
async fn generations_that_stay_have_no_holes_below_the_newest() {
    let server = Server::new();
    let store = server.store();
    for after in 0..3 {
        server.ago(9 * DAY, make(&server, 1, after, &[after], true, None)).await;
    }
    let key = preimage(1).key();
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    // Somebody copied a backup over it.
    let first = format!("v1/records/{key}/00000001");
    let bytes = store.truth().read(&first).await.unwrap().unwrap();
    store.truth().overwrite(&first, bytes).await.unwrap();
    delete(&server, &policy()).await;
    assert_eq!(store.record(&key).await.unwrap().unwrap().0, 3, "what was replaced does not come back");
    assert_whole(&store).await;
}

#[tokio::test]
async fn a_damaged_manifest_is_left_to_people() {
    let server = Server::new();
    let (old, _) = old_and_new(&server).await;
    let name = format!("v1/runs/{}", run_id(DAY, 1));
    let log = format!("v1/logs/{}/x.log", run_id(DAY, 1));
    server.ago(9 * DAY, server.tier().overwrite(&name, "{")).await.unwrap();
    server.ago(9 * DAY, server.tier().overwrite(&log, "printed")).await.unwrap();
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    assert_eq!(delete(&server, &policy()).await.unreadable, std::slice::from_ref(&name));
    let left = server.names().await;
    assert!(left.contains(&name) && left.contains(&log));
    assert!(server.store().record(&old).await.unwrap().is_none(), "it keeps nothing");
}

#[tokio::test]
async fn tags_pins_leases_and_announcements() {
    let server = Server::new();
    let store = server.store();
    let mut keys = Vec::new();
    for number in 0..6 {
        let base = (number == 3).then_some(Digest([3; 32]));
        keys.push(server.ago(9 * DAY, make(&server, number, 0, &[number], true, base)).await);
        server
            .ago(9 * DAY, run(&store, &run_id(1, number as usize), "p", "failed", &[keys[number as usize]], &[]))
            .await;
    }
    server.ago(8 * DAY, run(&store, &run_id(0, 99), "p", "failed", &[], &[])).await;
    store.put_tag("name", "v1", &Tag { key: keys[0], output: "out".into() }).await.unwrap();
    gc::pin(&server.tier(), &run_id(1, 1)).await.unwrap();
    let lease = |name: String, holder: &str| {
        let body = format!(r#"{{"run": "{holder}", "host": "h", "process": null}}"#);
        let tier = server.tier();
        async move { tier.overwrite(&format!("v1/leases/{name}"), body).await.unwrap() }
    };
    let live = run_id(1, 77);
    run(&store, &live, "other", "running", &[], &[]).await;
    server.ago(3 * DAY, lease(format!("{}.1", keys[2]), &live)).await;
    server.ago(3 * DAY, lease(format!("{}-0-07.2", Digest([4; 32])), &live)).await;
    server.ago(3 * DAY, lease(format!("{}.1", keys[4]), "nobody")).await;
    server.ago(HOUR, lease(format!("{}.1", keys[5]), "nobody")).await;
    server.ago(3 * DAY, lease("probe-123".into(), "nobody")).await;
    server
        .ago(9 * DAY, async {
            // Rows of a record that is tagged, of a lease, of a base key at work, and of nobody.
            for base in [3, 4, 5, 6] {
                store.put_segment(&Digest([base; 32]), 0, vec![base].into()).await.unwrap();
            }
            for (key, generation) in [(keys[0], 2), (keys[0], 3), (keys[4], 2)] {
                server.tier().overwrite(&format!("v1/replaced/{key}-{generation:08}"), &b"{}"[..]).await.unwrap();
            }
            for pipeline in ["p", "gone"] {
                server.tier().overwrite(&format!("v1/hints/{pipeline}/{}", Digest([9; 32])), &b"{}"[..]).await.unwrap();
            }
        })
        .await;
    store.put_tag("name", "v2", &Tag { key: keys[3], output: "out".into() }).await.unwrap();
    store.put_segment(&Digest([5; 32]), 1, vec![50].into()).await.unwrap();
    let before = server.names().await;
    condemn(&server, &policy()).await;
    server.pass(DAY + HOUR);
    run(&store, &live, "other", "running", &[], &[]).await;
    delete(&server, &policy()).await;
    let after = server.names().await;
    for (number, key) in keys.iter().enumerate() {
        // Tagged; pinned; leased by a run that lives; tagged; by one that does not; by one that may.
        assert_eq!(store.record(key).await.unwrap().is_some(), number != 4, "{number}");
    }
    let gone = |folder: &str| {
        let gone = before.difference(&after).filter(|name| name.starts_with(&format!("v1/{folder}/")));
        gone.map(|name| name.rsplit('/').next().unwrap().to_owned()).collect::<BTreeSet<String>>()
    };
    assert_eq!(gone("leases"), [format!("{}.1", keys[4]), "probe-123".into()].into());
    let segment = format!("00000000-{}.parquet", Digest::of_bytes(&[6]));
    assert_eq!(gone("rows"), [segment].into());
    assert_eq!(gone("replaced"), [format!("{}-00000002", keys[0]), format!("{}-00000002", keys[4])].into());
    assert!(!after.contains(&format!("v1/hints/gone/{}", Digest([9; 32]))));
    assert!(after.contains(&format!("v1/hints/p/{}", Digest([9; 32]))));
    assert_whole(&store).await;
}

const FOREIGN: [&str; 14] = [
    "README",
    "v2/blobs/ab/x",
    "v1/note.txt",
    "v1/blobs/README",
    "v1/blobs/ab/README",
    "v1/blobs/00/1111111111111111111111111111111111111111111111111111111111111111",
    "v1/records/README",
    "v1/records/1111111111111111111111111111111111111111111111111111111111111111/1",
    "v1/rows/x/y.parquet",
    "v1/runs/README",
    "v1/runs/below/README",
    "v1/logs/README/x.log",
    "v1/hints/p/README",
    "v1/leases/README",
];

#[tokio::test]
async fn what_is_not_ours_is_not_touched() {
    let server = Server::new();
    for name in FOREIGN {
        assert!(What::of(name).is_none(), "{name}");
        server.ago(50 * DAY, server.tier().overwrite(name, &b"somebody's"[..])).await.unwrap();
    }
    old_and_new(&server).await;
    let garbage = condemn(&server, &policy()).await;
    assert_eq!(garbage.unreadable, ["v1/runs/README", "v1/runs/below/README"], "it is told of");
    server.pass(2 * DAY);
    delete(&server, &policy()).await;
    let alone = Policy { keep_last: 0, now_alone: true, ..policy() };
    delete(&server, &alone).await;
    let left = server.names().await;
    assert!(FOREIGN.iter().all(|name| left.contains(*name)), "{left:?}");
}

#[tokio::test]
async fn two_projects_share_a_bucket() {
    let server = Server::new();
    // In one folder, runs are kept for each pipeline; in two, one knows nothing of the other.
    let key = server.ago(30 * DAY, make(&server, 9, 0, &[9], true, None)).await;
    server.ago(30 * DAY, run(&server.store(), &run_id(0, 9), "q", "done", &[key], &[])).await;
    let prefixed: Arc<dyn ObjectStore> =
        Arc::new(object_store::prefix::PrefixStore::new(server.clone(), "teams/other"));
    let other = Store::over(prefixed, "test://server/teams/other");
    server.ago(30 * DAY, run(&other, &run_id(0, 1), "p", "done", &[], &[])).await;
    server.ago(29 * DAY, run(&other, &run_id(0, 2), "p", "done", &[], &[])).await;
    let (old, new) = old_and_new(&server).await;
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    delete(&server, &policy()).await;
    let store = server.store();
    let found = [old, new, key].map(|key| futures::executor::block_on(store.record(&key)).unwrap().is_some());
    assert_eq!(found, [false, true, true]);
    assert_eq!(other.runs().await.unwrap().len(), 2);
    assert!(matches!(gc::sweep(other.truth(), &policy()).await.unwrap(), Swept::Condemned(_)));
    assert!(matches!(gc::sweep(store.truth(), &policy()).await.unwrap(), Swept::Nothing(_)));
}

#[tokio::test]
async fn at_once_is_for_somebody_alone() {
    let server = Server::new();
    let store = server.store();
    let (old, _) = old_and_new(&server).await;
    condemn(&server, &policy()).await;
    let young = make(&server, 8, 0, &[8], true, None).await;
    run(&store, &run_id(0, 5), "q", "running", &[], &[]).await;
    let alone = Policy { now_alone: true, ..policy() };
    let Swept::Refused(live) = gc::sweep(&server.tier(), &alone).await.unwrap() else { panic!() };
    assert_eq!(live, [run_id(0, 5)]);
    assert!(store.record(&old).await.unwrap().is_some());
    server.pass(601);
    delete(&server, &alone).await;
    assert!(store.record(&old).await.unwrap().is_none() && store.record(&young).await.unwrap().is_none());
    let left = server.tier().list("v1/gc").await.unwrap();
    assert_eq!(left.len(), 1, "what was condemned is forgotten: {left:?}");
    assert_whole(&store).await;
}

#[tokio::test]
async fn runs_that_are_kept() {
    let server = Server::new();
    let store = server.store();
    // By the server's clock, oldest first; the ids say the opposite.
    for (number, outcome) in ["done", "done", "failed", "running", "failed"].into_iter().enumerate() {
        let id = run_id((9 - number as u64) * DAY, number);
        server.ago((50 - number as u64) * DAY, run(&store, &id, "p", outcome, &[], &[])).await;
    }
    let goes = |policy: Policy| {
        let tier = server.tier();
        async move {
            let mut runs = gc::plan(&tier, &policy).await.unwrap().garbage.runs;
            runs.sort();
            runs.iter().map(|id| id[id.len() - 1..].to_owned()).collect::<String>()
        }
    };
    assert_eq!(goes(Policy { keep_last: 9, ..policy() }).await, "");
    assert_eq!(goes(Policy { keep_last: 1, ..policy() }).await, "320", "and the last that ended well");
    assert_eq!(goes(Policy { keep_last: 2, ..policy() }).await, "20", "one that was killed is one that ended");
    let young = Duration::from_secs(48 * DAY);
    assert_eq!(goes(Policy { keep_last: 0, older_than: Some(young), ..policy() }).await, "0");
    let grace = Duration::from_secs(60 * DAY);
    assert_eq!(goes(Policy { keep_last: 0, grace, ..policy() }).await, "");
    server.ago(599, run(&store, &run_id(0, 5), "p", "running", &[], &[])).await;
    server.ago(601, run(&store, &run_id(0, 6), "p", "running", &[], &[])).await;
    let at_once = Policy { keep_last: 0, grace: Duration::ZERO, ..policy() };
    assert_eq!(goes(at_once).await, "64320", "one that goes on stays, however short the grace period");
}

#[tokio::test]
async fn what_cannot_be_read_stops_everything() {
    let server = Server::new();
    let store = server.store();
    let (_, new) = old_and_new(&server).await;
    condemn(&server, &policy()).await;
    server.pass(2 * DAY);
    let before = server.names().await;
    for prefix in ["v1/runs", "v1/tags", "v1/pins", "v1/records", "v1/blobs/7f", "v1/leases", "v1/gc"] {
        server.state().unlistable = Some(prefix);
        assert!(gc::sweep(&server.tier(), &policy()).await.is_err(), "{prefix}");
    }
    server.state().unlistable = None;
    for (name, text, told) in [
        ("v1/tags/a/b", "{", "tag it again"),
        ("v1/runs/20990101T000000.000Z-abcdef", r#"{"schema": 2, "roots": []}"#, "use that version"),
        (&format!("v1/records/{new}/00000002"), r#"{"schema": 2, "outputs": []}"#, "use that version"),
    ] {
        server.tier().overwrite(name, text).await.unwrap();
        let error = gc::sweep(&server.tier(), &policy()).await.unwrap_err();
        assert!(error.hint.as_ref().unwrap().contains(told), "{error}");
        server.tier().delete(name).await.unwrap();
    }
    assert_eq!(server.names().await, before);
    // What is damaged keeps nothing, and is told of.
    server.tier().overwrite(&format!("v1/records/{new}/00000001"), "{").await.unwrap();
    server.tier().overwrite(&format!("v1/runs/{}", run_id(DAY, 2)), "{").await.unwrap();
    let gone = delete(&server, &policy()).await;
    let names = [format!("v1/records/{new}/00000001"), format!("v1/runs/{}", run_id(DAY, 2))];
    assert_eq!(gone.unreadable, names);
    assert!(store.truth().head(&format!("v1/runs/{}", run_id(DAY, 2))).await.unwrap().is_some());
}

/// Machines drop what they know of the store when something was deleted: those that look before, during and after.
#[tokio::test]
async fn what_is_known_of_the_store_is_dropped() {
    let server = Server::new();
    old_and_new(&server).await;
    let folder = tempfile::tempdir().unwrap();
    // A command of a machine: it notices what happened, once.
    let machine = async |name: &str| {
        let near = Tier::folder_at(&folder.path().join(name)).unwrap();
        let store = Store::tiered(near, server.tier(), &folder.path().join(name).join("cache"));
        store.remote().unwrap().catch_up().await.unwrap();
        store
    };
    let knows = async |name: &str| machine(name).await.remote().unwrap().knows("v1/x");
    let learn = async |name: &str| machine(name).await.remote().unwrap().add_known("v1/x");
    learn("before").await;
    learn("during").await;
    condemn(&server, &policy()).await;
    assert!(knows("before").await, "nothing is deleted yet");
    server.pass(2 * DAY);
    server.state().deletions = Some(4);
    gc::sweep(&server.tier(), &policy()).await.unwrap_err();
    server.state().deletions = None;
    assert!(!knows("before").await && !knows("during").await, "a gc that was killed is noticed");
    learn("during").await;
    delete(&server, &policy()).await;
    assert!(!knows("during").await);
    learn("during").await;
    assert!(knows("during").await, "once is enough");
}

/// A made-up store: what is in it, by numbers.
#[derive(Clone, Debug)]
struct World {
    results: Vec<Made>,
    runs: Vec<Ran>,
    tags: Vec<u32>,
    pins: Vec<usize>,
    segments: Vec<(u8, u64)>,
    orphans: Vec<(u32, u64)>,
    policy: (usize, Option<u64>),
}

/// The generations of a key.
#[derive(Clone, Debug)]
struct Made {
    number: u32,
    base: Option<u8>,
    /// Hours ago, oldest first; blobs; whether they are listed in the record.
    generations: Vec<(u64, Vec<u32>, bool)>,
}

#[derive(Clone, Debug)]
struct Ran {
    pipeline: u8,
    outcome: &'static str,
    hours: u64,
    client: u64,
    keys: Vec<u32>,
    bases: Vec<u8>,
}

const RESULTS: u32 = 8;
const BLOBS: u32 = 12;

fn some<T: Strategy>(item: T, most: usize) -> impl Strategy<Value = Vec<T::Value>> {
    prop::collection::vec(item, 0..most)
}

fn world(hours: Range<u64>) -> impl Strategy<Value = World> {
    let generation = (hours.clone(), prop::collection::vec(0..BLOBS, 1..4), any::<bool>());
    let made = (prop::option::of(0..3u8), prop::collection::vec(generation, 1..4));
    let results = prop::collection::vec(prop::option::weighted(0.8, made), RESULTS as usize).prop_map(|all| {
        let made = all.into_iter().enumerate().filter_map(|(number, made)| Some((number, made?)));
        made.map(|(number, (base, mut generations))| {
            generations.sort_by_key(|(hours, ..)| std::cmp::Reverse(*hours));
            Made { number: number as u32, base, generations }
        })
        .collect::<Vec<Made>>()
    });
    let outcome = prop::sample::select(vec!["done", "done", "failed", "interrupted", "running"]);
    let ran = (0..3u8, outcome, hours.clone(), 0..1000 * DAY, some(0..RESULTS, 4), some(0..3u8, 2)).prop_map(
        |(pipeline, outcome, hours, client, keys, bases)| Ran { pipeline, outcome, hours, client, keys, bases },
    );
    let policy = (0..4usize, prop::option::of(100..900u64));
    let (segments, orphans) = (some((0..3u8, hours.clone()), 5), some((0..BLOBS, hours), 4));
    (results, some(ran, 8), some(0..RESULTS, 2), some(0..8usize, 2), segments, orphans, policy).prop_map(
        |(results, runs, tags, pins, segments, orphans, policy)| World {
            results,
            runs,
            tags,
            pins,
            segments,
            orphans,
            policy,
        },
    )
}

fn base(number: u8) -> Digest {
    Digest([number; 32])
}

impl World {
    fn policy(&self) -> Policy {
        let older_than = self.policy.1.map(|hours| Duration::from_secs(hours * HOUR));
        Policy { keep_last: self.policy.0, older_than, ..policy() }
    }

    fn id(&self, run: usize) -> String {
        run_id(self.runs[run].client, run)
    }

    async fn write(&self, server: &Server) {
        let store = server.store();
        for (blob, hours) in &self.orphans {
            let bytes = content(*blob);
            let digest = Digest::of_bytes(&bytes);
            server.ago(hours * HOUR, store.put_blob(&digest, bytes.into(), Again::Yes)).await.unwrap();
        }
        for made in &self.results {
            for (index, (hours, blobs, listed)) in made.generations.iter().enumerate() {
                let make = make(server, made.number, index as u32, blobs, *listed, made.base.map(base));
                server.ago(hours * HOUR, make).await;
            }
        }
        for (number, run) in self.runs.iter().enumerate() {
            let keys: Vec<Digest> = run.keys.iter().map(|key| preimage(*key).key()).collect();
            let bases: Vec<Digest> = run.bases.iter().map(|number| base(*number)).collect();
            let (id, pipeline) = (self.id(number), format!("p{}", run.pipeline));
            let log = store.put_log(&id, "cell[x=1].log", b"printed"[..].into());
            server.ago(run.hours * HOUR, log).await.unwrap();
            let put = crate::gc::run(&store, &id, &pipeline, run.outcome, &keys, &bases);
            server.ago(run.hours * HOUR, put).await;
        }
        for (number, key) in self.tags.iter().enumerate() {
            let tag = Tag { key: preimage(*key).key(), output: "out".into() };
            store.put_tag("tag", &number.to_string(), &tag).await.unwrap();
        }
        for run in self.pins.iter().filter(|run| **run < self.runs.len()) {
            gc::pin(&server.tier(), &self.id(*run)).await.unwrap();
        }
        for (number, hours) in &self.segments {
            let base = base(*number);
            let put = store.put_segment(&base, 0, hours.to_be_bytes().to_vec().into());
            server.ago(hours * HOUR, put).await.unwrap();
        }
        for name in FOREIGN {
            server.ago(50 * DAY, server.tier().overwrite(name, &b"somebody's"[..])).await.unwrap();
        }
    }

    /// The runs that the policy keeps, looking only at what it says.
    fn kept_runs(&self) -> BTreeSet<usize> {
        let mut kept: BTreeSet<usize> = self.pins.iter().copied().filter(|run| *run < self.runs.len()).collect();
        for pipeline in 0..3 {
            let mut runs: Vec<usize> =
                (0..self.runs.len()).filter(|run| self.runs[*run].pipeline == pipeline).collect();
            runs.sort_by_key(|run| (self.runs[*run].hours, std::cmp::Reverse(self.id(*run))));
            kept.extend(runs.iter().find(|run| self.runs[**run].outcome == "done"));
            kept.extend(runs.iter().take(self.policy.0));
            kept.extend(runs.iter().filter(|run| self.policy.1.is_some_and(|age| self.runs[**run].hours <= age)));
        }
        kept
    }

    /// The names of all that is reachable.
    fn reachable(&self) -> BTreeSet<String> {
        let runs = self.kept_runs();
        let mut keys: BTreeSet<u32> = self.tags.iter().copied().collect();
        let mut bases: BTreeSet<u8> = BTreeSet::new();
        let mut names: BTreeSet<String> = FOREIGN.iter().map(|name| (*name).to_owned()).collect();
        for run in runs {
            keys.extend(&self.runs[run].keys);
            bases.extend(&self.runs[run].bases);
            names.insert(format!("v1/runs/{}", self.id(run)));
            names.insert(format!("v1/logs/{}/cell%5Bx=1%5D.log", self.id(run)));
        }
        for made in self.results.iter().filter(|made| keys.contains(&made.number)) {
            let (_, blobs, listed) = made.generations.last().unwrap();
            bases.extend(made.base);
            let generation = made.generations.len();
            names.insert(format!("v1/records/{}/{generation:08}", preimage(made.number).key()));
            names.extend(tree_of(blobs, *listed).1.iter().map(|bytes| blob_name(&Digest::of_bytes(bytes))));
        }
        for (number, hours) in self.segments.iter().filter(|(number, _)| bases.contains(number)) {
            let digest = Digest::of_bytes(&hours.to_be_bytes());
            names.insert(format!("v1/rows/{}/00000000-{digest}.parquet", base(*number)));
        }
        names.extend((0..self.tags.len()).map(|number| format!("v1/tags/tag/{number}")));
        names.extend(
            self.pins.iter().filter(|run| **run < self.runs.len()).map(|run| format!("v1/pins/{}", self.id(*run))),
        );
        names
    }
}

/// What there is, but for gc's own.
async fn things(server: &Server) -> BTreeSet<String> {
    server.names().await.into_iter().filter(|name| !name.starts_with("v1/gc/")).collect()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

/// Sweeps until nothing is garbage.
async fn sweep_all(server: &Server, policy: &Policy) {
    for _ in 0..10 {
        server.pass(2 * DAY);
        if let Swept::Nothing(_) = gc::sweep(&server.tier(), policy).await.unwrap() {
            return;
        }
    }
    panic!("there is always more garbage");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Two steps after everything has become old, what is reachable is there, and nothing else.
    #[test]
    fn what_is_reachable_stays_and_the_rest_goes(world in world(48..1000)) {
        block_on(async {
            let server = Server::new();
            world.write(&server).await;
            let before = things(&server).await;
            let policy = world.policy();
            let first = gc::sweep(&server.tier(), &policy).await.unwrap();
            assert_eq!(things(&server).await, before, "the first step deletes nothing");
            server.pass(DAY + 1);
            // A day has passed, and with it what counts as young.
            let later = Policy { older_than: policy.older_than.map(|age| age + Duration::from_secs(DAY + 1)), ..policy };
            gc::sweep(&server.tier(), &later).await.unwrap();
            assert_eq!(things(&server).await, world.reachable(), "{first:?}");
            assert_whole(&server.store()).await;
        });
    }

    /// Whatever its age, whoever comes between the steps, and wherever gc is killed: no result that can be found is broken,
    /// and nothing that is kept goes.
    #[test]
    fn a_killed_gc_breaks_nothing_and_goes_on(
        world in world(0..100),
        used in prop::sample::subsequence((0..RESULTS).collect::<Vec<_>>(), 0..3),
        made in some((100..110u32, prop::collection::vec(0..BLOBS, 1..4)), 3),
        kills in prop::collection::vec(0..12usize, 0..6),
    ) {
        block_on(async {
            let server = Server::new();
            world.write(&server).await;
            let (store, policy) = (server.store(), Policy { older_than: None, ..world.policy() });
            gc::sweep(&server.tier(), &policy).await.unwrap();
            server.pass(DAY + 1);
            // A run begins that finds some results and makes others.
            let (id, mut keys) = (run_id(0, 999), Vec::new());
            for number in &used {
                let key = preimage(*number).key();
                if store.record(&key).await.unwrap().is_some() {
                    keys.push(key);
                }
            }
            for (number, blobs) in &made {
                keys.push(make(&server, *number, 0, blobs, true, None).await);
            }
            run(&store, &id, "late", "running", &keys, &[]).await;
            let foreign: Vec<&str> = FOREIGN.to_vec();
            for deletions in kills {
                server.state().deletions = Some(deletions);
                let _ = gc::sweep(&server.tier(), &policy).await;
                server.state().deletions = None;
                assert_whole(&store).await;
                run(&store, &id, "late", "running", &keys, &[]).await;
                for key in &keys {
                    assert!(store.record(key).await.unwrap().is_some(), "it is in use");
                }
            }
            run(&store, &id, "late", "done", &keys, &[]).await;
            sweep_all(&server, &policy).await;
            assert_whole(&store).await;
            let (left, reachable) = (server.names().await, world.reachable_without_ages());
            assert!(reachable.iter().all(|name| left.contains(name)), "{:?}", reachable.difference(&left));
            assert!(foreign.iter().all(|name| left.contains(*name)));
            for key in &keys {
                assert!(store.record(key).await.unwrap().is_some(), "its run is kept");
            }
        });
    }
}

impl World {
    fn reachable_without_ages(&self) -> BTreeSet<String> {
        Self { policy: (self.policy.0, None), ..self.clone() }.reachable()
    }
}

const PIPELINE: &str = "name: demo
params: { word: hello }
stages:
  words: { uses: run, run: 'echo ${params.word} > outputs/out; echo printed', outputs: { out: tree } }
";

/// The times of a folder are the machine's own, so the grace period is short here.
fn sandbox() -> Sandbox {
    let mut sandbox = Sandbox::new();
    sandbox.write("p.yaml", PIPELINE);
    sandbox.variables.push(("CUDA_AGENT_GC_GRACE_S".into(), "0".into()));
    for word in ["one", "two", "three"] {
        sandbox.good(&["run", "p.yaml", "-p", &format!("word={word}")]);
    }
    sandbox
}

/// Records hold times, so their sizes vary.
fn without_sizes(text: &str) -> String {
    let line = |line: &str| {
        let mut words: Vec<&str> = line.split_whitespace().collect();
        words.retain(|word| !matches!(word.trim_end_matches([')', '.']), "B" | "KiB"));
        words.iter().map(|word| if word.starts_with('(') { "(…)" } else { word }).collect::<Vec<_>>().join(" ")
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_command() {
    let sandbox = sandbox();
    let shown = |arguments: &[&str]| without_sizes(&sandbox.stable(&sandbox.good(arguments)));
    insta::assert_snapshot!("gc_plan", shown(&["gc", "--keep-last", "1", "--older-than", "0d"]));
    insta::assert_snapshot!("gc_condemn", shown(&["gc", "--keep-last", "1", "--older-than", "0d", "--delete"]));
    insta::assert_snapshot!("gc_delete", shown(&["gc", "--keep-last", "1", "--older-than", "0d", "--delete"]));
    insta::assert_snapshot!("gc_nothing", shown(&["gc", "--keep-last", "1", "--older-than", "0d", "--delete"]));
    assert!(sandbox.executed(&["p.yaml", "-p", "word=three"]).is_empty(), "what is kept is still a hit");
    assert_eq!(sandbox.executed(&["p.yaml", "-p", "word=one"]), ["words"]);
    assert_eq!(std::fs::read_dir(sandbox.path(".cuda-agent/v1/records")).unwrap().count(), 2, "empty folders go too");
}

#[test]
fn pinned_runs_stay() {
    let sandbox = sandbox();
    let runs: serde_json::Value = serde_json::from_str(&sandbox.good(&["runs", "--json"])).unwrap();
    let first = runs[2]["run"].as_str().unwrap();
    assert_eq!(sandbox.stable(&sandbox.good(&["runs", "--pin", first])), "run [run] is pinned");
    let told = sandbox.good(&["gc", "--json", "--keep-last", "1", "--older-than", "0d", "--delete", "--now"]);
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["outcome"], told["runs"].as_array().unwrap().len()), (&"deleted".into(), 1));
    assert!(sandbox.executed(&["p.yaml", "-p", "word=one"]).is_empty());
    assert_eq!(sandbox.stable(&sandbox.good(&["runs", "--unpin", first])), "run [run] is no longer pinned");
    insta::assert_snapshot!("gc_usage", sandbox.bad(2, &["gc", "--older-than", "1y"]));
    assert!(sandbox.bad(2, &["gc", "--now"]).contains("--delete"));
}

#[test]
fn damage_is_found() {
    let sandbox = sandbox();
    sandbox.good(&["verify", "--digests"]);
    let blobs = || {
        let folders = std::fs::read_dir(sandbox.path(".cuda-agent/v1/blobs")).unwrap();
        let files = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).unwrap());
        files.map(|file| file.unwrap().path()).collect::<Vec<_>>()
    };
    let (mut count, pack) = (0, Digest::of_bytes(b"two\n").to_string());
    for file in blobs() {
        count += 1;
        if file.ends_with(&pack) {
            std::fs::write(file, "too\n").unwrap();
        }
    }
    let output = sandbox.output(&["verify", "--digests", "--dry-run"]);
    assert_eq!((output.status.code(), blobs().len()), (Some(1), count));
    let output = sandbox.output(&["verify", "--digests"]);
    assert_eq!((output.status.code(), blobs().len()), (Some(1), count - 1));
    let text = sandbox.stable(&String::from_utf8(output.stdout).unwrap());
    let text = text.replace(&pack, "[digest]").replace(&pack[..2], "[aa]");
    insta::assert_snapshot!("verify_damaged", text.lines().skip(3).collect::<Vec<_>>().join("\n"));
    assert_eq!(sandbox.executed(&["p.yaml", "-p", "word=two"]), ["words"], "it is made again");
    sandbox.good(&["verify", "--digests"]);
}

/// Damage in the far tier of two is mended from a good near copy, and else removed.
#[tokio::test]
async fn an_audit_mends_the_far_tier() {
    let folder = tempfile::tempdir().unwrap();
    let near = Tier::folder_at(&folder.path().join("near")).unwrap();
    let mut lab = Lab::new();
    lab.store = Store::tiered(near, Tier::memory(), &folder.path().join("cache"));
    let (report, _) = lab.run("stages: { a: { uses: lab/make } }").await;
    let (tier, artifact) = (lab.store.truth().clone(), report.outputs["a"]["out"].clone());
    let names: Vec<String> = {
        let blobs = lab.store.blobs_of(&artifact).await.unwrap().unwrap();
        let records =
            tier.list("v1/records").await.unwrap().into_iter().map(|meta| format!("v1/records/{}", meta.name));
        blobs.iter().map(blob_name).chain(records).collect()
    };
    assert_eq!(names.len(), 3, "a list, a pack, a record");
    let big = vec![7u8; 9 << 20];
    let big_name = blob_name(&Digest::of_bytes(&big));
    tier.overwrite(&big_name, big).await.unwrap();
    let audit = |dry_run: bool| {
        let store = lab.store.clone();
        async move {
            let mut last = None;
            let audit = store.audit(dry_run, &mut |progress| last = Some(progress)).await.unwrap();
            let last = last.unwrap();
            assert_eq!(last.done, last.total);
            audit
        }
    };
    let good = audit(false).await;
    assert!(good.is_mended() && good.damaged.is_empty() && good.incomplete.is_empty(), "{good:?}");
    assert_eq!(good.checked[&Class::Blobs].objects, 3);
    for name in &names {
        tier.overwrite(name, &b"{}"[..]).await.unwrap();
    }
    let ends = |audit: &cuda_agent_engine::store::audit::Audit| {
        audit.damaged.iter().map(|d| d.end.clone()).collect::<Vec<_>>()
    };
    let found = audit(true).await;
    assert_eq!((ends(&found), found.is_mended()), (vec![End::Left; 3], false));
    let mended = audit(false).await;
    assert_eq!((ends(&mended), mended.is_mended()), (vec![End::Mended; 3], true));
    assert!(audit(false).await.damaged.is_empty());
    // A pack that is damaged in both tiers, and a large blob that nobody else has.
    let pack = lab.store.tree_entries(&artifact).await.unwrap().unwrap()[0].blob;
    for tier in [&tier, lab.store.local()] {
        tier.overwrite(&blob_name(&pack), &b"wrong"[..]).await.unwrap();
    }
    tier.overwrite(&big_name, vec![8u8; 9 << 20]).await.unwrap();
    let removed = audit(false).await;
    assert_eq!(ends(&removed), [End::Removed, End::Removed]);
    assert_eq!((removed.incomplete.len(), removed.incomplete[0].missing), (1, 1));
    assert!(tier.head(&big_name).await.unwrap().is_none());
    let reports = tier.list("v1/gc").await.unwrap();
    assert!(reports.len() == 1 && reports[0].name.starts_with("deleted-"), "others hear of it: {reports:?}");
    assert_eq!(lab.launches("stages: { a: { uses: lab/make } }").await, ["a"], "it is made again");
}

/// A damaged generation goes with those that it replaced: none of them must count again.
#[tokio::test]
async fn a_damaged_replacement_does_not_bring_back_what_it_replaced() {
    let server = Server::new();
    let (store, key) = (server.store(), preimage(1).key());
    for after in 0..3 {
        make(&server, 1, after, &[after], true, None).await;
    }
    let name = |generation: u32| format!("v1/records/{key}/{generation:08}");
    let text = store.truth().read(&name(2)).await.unwrap().unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap().replace("\"number\":1", "\"number\":2");
    store.truth().overwrite(&name(2), text).await.unwrap();
    let audit = store.audit(false, &mut |_| {}).await.unwrap();
    assert_eq!((audit.damaged[0].name.as_str(), &audit.damaged[0].end), (name(2).as_str(), &End::Removed));
    assert_eq!(store.record(&key).await.unwrap().unwrap().0, 3);
    store.truth().overwrite(&name(3), &b"{"[..]).await.unwrap();
    store.audit(false, &mut |_| {}).await.unwrap();
    assert!(store.record(&key).await.unwrap().is_none());
}
