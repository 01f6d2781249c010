//! A server with a clock of its own, and what is written to it.

use super::*;

/// A server with a clock of its own, which can be told to break off.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) objects: Arc<InMemory>,
    pub(super) state: Arc<Mutex<State>>,
}

#[derive(Debug)]
pub(super) struct State {
    /// Seconds since 1970, far from anybody else's.
    pub(super) now: u64,
    pub(super) times: HashMap<Path, u64>,
    /// In order.
    pub(super) deleted: Vec<String>,
    /// So many may be deleted before everything breaks off.
    pub(super) deletions: Option<usize>,
    /// Something to do when a listing of this prefix is asked for, once.
    pub(super) meanwhile: Option<(&'static str, Meanwhile)>,
    /// Listings of this prefix fail.
    pub(super) unlistable: Option<&'static str>,
}

pub(super) struct Meanwhile(pub(super) Box<dyn FnOnce() + Send>);

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

pub(super) fn broken() -> object_store::Error {
    object_store::Error::Generic { store: "test", source: "it broke off".into() }
}

impl Server {
    pub(super) fn new() -> Self {
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

    pub(super) fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(super) fn pass(&self, seconds: u64) {
        self.state().now += seconds;
    }

    /// Writes as if so many seconds ago.
    pub(super) async fn ago<T>(&self, seconds: u64, write: impl Future<Output = T>) -> T {
        let now = self.state().now;
        self.state().now = now - seconds;
        let done = write.await;
        self.state().now = now;
        done
    }

    pub(super) fn tier(&self) -> Tier {
        Tier::over(Arc::new(self.clone()), "test://server")
    }

    pub(super) fn store(&self) -> Store {
        Store::over(Arc::new(self.clone()), "test://server")
    }

    pub(super) fn stamp(&self, mut meta: ObjectMeta) -> ObjectMeta {
        let time = self.state().times.get(&meta.location).copied().unwrap_or(0);
        meta.last_modified = (SystemTime::UNIX_EPOCH + Duration::from_secs(time)).into();
        meta
    }

    pub(super) async fn names(&self) -> BTreeSet<String> {
        let all = self.objects.list(None).map_ok(|meta| meta.location.to_string());
        all.try_collect().await.unwrap()
    }

    pub(super) fn delete_one(&self, path: Path) -> BoxFuture<'static, Result<Path>> {
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

pub(super) fn policy() -> Policy {
    Policy { keep_last: 1, older_than: None, grace: Duration::from_secs(DAY), now_alone: false }
}

pub(super) fn preimage(number: u32) -> Preimage {
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

pub(super) fn content(blob: u32) -> Vec<u8> {
    format!("blob {blob}").into_bytes()
}

/// A tree of such blobs, which are listed in its record or in a list of their own.
pub(super) fn tree_of(blobs: &[u32], listed: bool) -> (Artifact, Vec<Vec<u8>>) {
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

pub(super) fn record(number: u32, artifact: Artifact, base: Option<Digest>) -> Record {
    let preimage = preimage(number);
    Record {
        schema: 1,
        key: preimage.key(),
        kind: "k".into(),
        nonce: cuda_agent_engine::nonce(),
        preimage,
        base,
        outputs: BTreeMap::from([("out".into(), Box::new(artifact))]),
        created_at: 0.0,
        run: String::new(),
        accepted_from: None,
        interpreter: None,
        duration_s: 0.0,
        rows: None,
        metrics: BTreeMap::new(),
    }
}

/// Writes a result as the engine does: a blob that is there is written again unless it is young.
pub(super) async fn make(
    server: &Server,
    number: u32,
    after: u32,
    blobs: &[u32],
    listed: bool,
    base: Option<Digest>,
) -> Digest {
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
pub(super) fn run_id(client: u64, number: usize) -> String {
    format!("{}-{number:06}", cuda_agent_engine::id_at(client as f64).split_once('-').unwrap().0)
}

pub(super) async fn run(store: &Store, id: &str, pipeline: &str, outcome: &str, keys: &[Digest], bases: &[Digest]) {
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
pub(super) async fn assert_whole(store: &Store) {
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

pub(super) async fn condemn(server: &Server, policy: &Policy) -> Garbage {
    match gc::sweep(&server.tier(), policy).await.unwrap() {
        Swept::Condemned(garbage) => garbage,
        other => panic!("{other:?}"),
    }
}

pub(super) async fn delete(server: &Server, policy: &Policy) -> Garbage {
    match gc::sweep(&server.tier(), policy).await.unwrap() {
        Swept::Deleted(garbage) => garbage,
        other => panic!("{other:?}"),
    }
}

/// An old result of pipeline `p` that a newer run no longer uses, and the one that it uses.
pub(super) async fn old_and_new(server: &Server) -> (Digest, Digest) {
    let store = server.store();
    let old = server.ago(9 * DAY, make(server, 1, 0, &[1, 2], true, None)).await;
    server.ago(9 * DAY, run(&store, &run_id(DAY, 1), "p", "done", &[old], &[])).await;
    let new = server.ago(8 * DAY, make(server, 2, 0, &[2, 3], false, None)).await;
    server.ago(8 * DAY, run(&store, &run_id(DAY, 2), "p", "done", &[new], &[])).await;
    (old, new)
}
