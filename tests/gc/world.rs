//! Made-up stores: whatever is in one, what is reachable stays and the rest goes.

use super::*;

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
