//! A model of by-row execution: engines at random, on several machines and one store, with random rows, windows, kills,
//! refreshes, rows that fail, programs that die, and two stages with one base key.
//!
//! What must hold: a row is done once, unless the engine that did it died before it had kept the answer (or on another
//! machine, whose journal nobody here sees), or a refresh asked for it, which does it once, too; each table has the answer to
//! each of its rows; and in the end nothing is left to do.
//!
//! `make rows` runs it at length.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use cuda_agent_engine::Folders;
use cuda_agent_engine::artifact::{json, table};
use cuda_agent_engine::catalog::Catalog;
use cuda_agent_engine::event::{RunEvent, Subscriber};
use cuda_agent_engine::execute::launch::{Channels, Exit, Launch, Launcher};
use cuda_agent_engine::execute::{Engine, Report};
use cuda_agent_engine::host::Host;
use cuda_agent_engine::key::ProgramIdentity;
use cuda_agent_engine::plan::graph::Graph;
use cuda_agent_engine::spec;
use cuda_agent_engine::store::Store;
use cuda_agent_protocol::{Event, Request, RowResult, RowStatus};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use crate::support::{Random, write_ids};

const MACHINES: usize = 2;
const KIND: &str = "name: lab/rows\nversion: 1.0.0\nsummary: Works on rows.\n\
    inputs: { rows: { type: table, columns: { id: int64 } } }\n\
    outputs: { rows: { type: table, columns: [ { name: square, type: int64 } ] } }\n\
    by_row: { port: rows, window: WINDOW }\nrun: [x]\n";

/// What one engine does.
#[derive(Clone, Debug)]
struct Plan {
    machine: usize,
    window: usize,
    cores: u32,
    refresh: bool,
    /// It is killed when its programs have answered so many rows.
    killed_after: Option<usize>,
}

/// What happens in a case.
#[derive(Debug)]
struct Case {
    tables: Vec<Vec<i64>>,
    /// So many rows fail once from outside causes, in the first engines and in the refresh.
    failing: [usize; 2],
    /// Whether a program dies once, of its `n`th row.
    dies_at: Option<usize>,
    first: Vec<Plan>,
    refresh: Plan,
}

impl Case {
    fn new(random: &mut Random) -> Self {
        let rows = 20 + random.below(140) as i64;
        let table = |random: &mut Random| {
            let count = rows + random.below(20) as i64;
            (0..count).map(|_| random.below(rows as u64) as i64).collect::<Vec<_>>()
        };
        let tables = (0..=random.below(2)).map(|_| table(random)).collect();
        let plan = |random: &mut Random| Plan {
            machine: random.below(MACHINES as u64) as usize,
            window: [1, 2, 7, 64][random.below(4) as usize],
            cores: 1 + random.below(4) as u32,
            refresh: random.below(6) == 0,
            killed_after: (random.below(3) == 0).then(|| 1 + random.below(40) as usize),
        };
        let first = (0..=random.below(4)).map(|_| plan(random)).collect();
        let refresh = Plan { refresh: true, killed_after: None, ..plan(random) };
        let failing = [random.below(3) as usize, random.below(3) as usize];
        Self { tables, failing, dies_at: (random.below(3) == 0).then(|| 1 + random.below(30) as usize), first, refresh }
    }
}

/// A row that is at fault itself.
fn is_rejected(id: i64) -> bool {
    id % 17 == 3
}

/// An answer that a program gave.
#[derive(Clone, Debug)]
struct Answered {
    engine: usize,
    program: usize,
    /// The engine has taken it: it is in the journal.
    kept: bool,
}

#[derive(Default)]
struct Seen {
    answers: BTreeMap<i64, Vec<Answered>>,
    engines: Vec<Plan>,
    dead: BTreeSet<usize>,
    kills: BTreeMap<usize, oneshot::Sender<()>>,
    given: BTreeMap<usize, usize>,
    programs: usize,
    asked: usize,
    failing: usize,
    dies_at: Option<usize>,
    wrong: Vec<String>,
}

impl Seen {
    /// Takes notice of an answer, and says what is wrong with it.
    fn answer(&mut self, engine: usize, program: usize, id: i64) {
        if self.dead.contains(&engine) {
            return;
        }
        let own = self.engines[engine].clone();
        for before in self.answers.get(&id).into_iter().flatten() {
            let of = &self.engines[before.engine];
            let is_lost = self.dead.contains(&before.engine) && !(before.kept && of.machine == own.machine);
            let is_again = own.refresh && before.engine != engine;
            if !is_lost && !is_again {
                let (kept, dead) = (before.kept, self.dead.contains(&before.engine));
                self.wrong.push(format!(
                    "row {id}: engine {engine} did it after engine {} (kept {kept}, dead {dead})",
                    before.engine
                ));
            }
        }
        self.answers.entry(id).or_default().push(Answered { engine, program, kept: false });
        let given = self.given.entry(engine).or_default();
        *given += 1;
        if own.killed_after == Some(*given)
            && let Some(kill) = self.kills.remove(&engine)
        {
            self.dead.insert(engine);
            let _ = kill.send(());
        }
    }

    /// A program is fed no more than its window ahead, so its engine has taken the answers before.
    fn keep(&mut self, program: usize, ids: &[i64]) {
        for id in ids {
            let answers = self.answers.get_mut(id).into_iter().flatten();
            answers.filter(|answer| answer.program == program).for_each(|answer| answer.kept = true);
        }
    }
}

#[derive(Clone, Default)]
struct World(Arc<Mutex<Seen>>);

impl World {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap()
    }
}

/// The programs of one engine.
struct Programs {
    world: World,
    engine: usize,
}

impl Launcher for Programs {
    fn launch(&self, launch: Launch, channels: Channels) -> BoxFuture<'static, Exit> {
        let (world, engine) = (self.world.clone(), self.engine);
        async move {
            let request = std::fs::read(launch.folder.join("request.json")).unwrap();
            let request: Request = serde_json::from_slice(&request).unwrap();
            let window = request.by_row.unwrap().window as usize;
            let program = {
                let mut seen = world.seen();
                seen.programs += 1;
                seen.programs
            };
            let mut random = Random(program as u64);
            let (mut rows, mut fed, mut given) = (channels.rows.unwrap(), 0, Vec::new());
            while let Some(row) = rows.recv().await {
                fed += 1;
                world.seen().keep(program, &given[..given.len().min(fed - fed.min(window))]);
                match random.below(4) {
                    0 => tokio::time::sleep(Duration::from_micros(random.below(1500))).await,
                    _ => tokio::task::yield_now().await,
                }
                let id = row.columns["id"].as_i64().unwrap();
                let mut answer = RowResult {
                    row: row.row,
                    status: RowStatus::Done,
                    reason: None,
                    detail: None,
                    outputs: BTreeMap::new(),
                };
                {
                    let mut seen = world.seen();
                    seen.asked += 1;
                    if seen.dies_at == Some(seen.asked) {
                        return Exit::Signal(11);
                    }
                    if seen.failing > 0 && seen.asked % 5 == 0 {
                        seen.failing -= 1;
                        (answer.status, answer.reason) = (RowStatus::Failed, Some("rate-limit".into()));
                    } else {
                        seen.answer(engine, program, id);
                    }
                }
                if answer.status == RowStatus::Done {
                    given.push(id);
                    if is_rejected(id) {
                        (answer.status, answer.reason) = (RowStatus::Rejected, Some("17".into()));
                    } else {
                        let made = serde_json::json!({ "square": id * id }).as_object().unwrap().clone();
                        answer.outputs.insert("rows".into(), vec![made]);
                    }
                } else {
                    // It takes a place among what the engine takes, as an answer that no rule is about.
                    given.push(i64::MAX);
                }
                let _ = channels.events.send(Ok(Event::Row(answer))).await;
            }
            Exit::Success
        }
        .boxed()
    }
}

/// Where a case happens.
struct Place {
    folder: tempfile::TempDir,
    store: Store,
    world: World,
    tables: Vec<Vec<i64>>,
}

impl Place {
    fn new(case: &Case) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (number, ids) in case.tables.iter().enumerate() {
            write_ids(&folder.path().join(format!("{number}.parquet")), ids, "other");
        }
        Self { folder, store: Store::memory(), world: World::default(), tables: case.tables.clone() }
    }

    fn text(&self) -> String {
        let stage = |number: usize| {
            format!(
                "  r{number}: {{ uses: lab/rows, inputs: {{ rows: {{ path: {number}.parquet }} }}, \
                 retry: {{ attempts: 5, backoff: 1ms }} }}\n"
            )
        };
        format!("name: model\nstages:\n{}", (0..self.tables.len()).map(stage).collect::<String>())
    }

    /// Runs an engine to its end, which may be sudden: then there is no report.
    fn run(&self, plan: &Plan) -> Option<Report> {
        let (kill, killed) = oneshot::channel();
        let engine = {
            let mut seen = self.world.seen();
            seen.engines.push(plan.clone());
            let engine = seen.engines.len() - 1;
            seen.kills.insert(engine, kill);
            engine
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut started = Started::default();
        let report = runtime.block_on(async {
            tokio::select! {
                report = self.execute(plan, engine, &mut started) => Some(report),
                Ok(()) = killed => None,
            }
        });
        // What the engine had going ends with its threads.
        drop(runtime);
        if report.is_none() {
            futures::executor::block_on(self.mark_dead(started.0.as_deref()));
        }
        report
    }

    /// Time passes: others take the run of a killed engine for dead.
    async fn mark_dead(&self, run: Option<&str>) {
        let Some(run) = run else { return };
        if let Some(mut manifest) = self.store.run(run).await.unwrap() {
            manifest.ended_at = Some(manifest.heartbeat_at);
            self.store.put_run(&manifest).await.unwrap();
        }
    }

    async fn execute(&self, plan: &Plan, engine: usize, started: &mut Started) -> Report {
        let mut catalog = Catalog::default();
        let kind = KIND.replace("WINDOW", &plan.window.to_string());
        crate::support::add_kind(&mut catalog, &kind, ProgramIdentity::Version("1.0.0".into()));
        let read = |path: &Path| std::fs::read_to_string(path);
        let parsed = spec::parse_pipeline(&self.text(), Path::new("m.yaml"), self.folder.path(), &catalog, &[], &read);
        let pipeline = parsed.unwrap_or_else(|errors| panic!("{}", errors.render(false)));
        let graph = Graph::new(&pipeline);
        let stages = pipeline.stages.len();
        let host = Host::fake(plan.cores, "a made-up CPU");
        let engine = Engine {
            selected: vec![true; stages],
            order: graph.order().to_vec(),
            refresh: (0..if plan.refresh { stages } else { 0 }).collect(),
            pipeline: Arc::new(pipeline),
            catalog: &catalog,
            store: self.store.clone(),
            host: &host,
            folders: Folders::below(&self.machine(plan)).unwrap(),
            launcher: Arc::new(Programs { world: self.world.clone(), engine }),
            secrets: Default::default(),
            jobs: None,
            sample: None,
            waits: true,
        };
        let (_keep, interrupts) = mpsc::unbounded_channel();
        let mut subscribers: [&mut dyn Subscriber; 1] = [started];
        engine.run(&mut subscribers, interrupts).await.unwrap()
    }

    fn machine(&self, plan: &Plan) -> PathBuf {
        self.folder.path().join(format!("machine-{}", plan.machine))
    }

    fn run_all(&self, plans: &[Plan]) -> Vec<Option<Report>> {
        std::thread::scope(|scope| {
            let runs: Vec<_> = plans.iter().map(|plan| scope.spawn(|| self.run(plan))).collect();
            runs.into_iter().map(|run| run.join().unwrap()).collect()
        })
    }

    /// Every table has the answers to its rows, in order.
    async fn check(&self, report: &Report) {
        assert!(report.failed.is_empty(), "{:?}", report.failed);
        for (number, ids) in self.tables.iter().enumerate() {
            let made = &report.outputs[format!("r{number}").as_str()]["rows"];
            let path = self.folder.path().join(format!("made-{}.parquet", report.run));
            assert!(self.store.fetch_blob(&made.blob, &path).await.unwrap());
            let rows: Vec<_> = table::read(&path).unwrap().1.iter().flat_map(json::rows).collect();
            let found: Vec<_> = rows.iter().map(|row| (row["id"].as_i64(), row["square"].as_i64())).collect();
            let wanted = ids.iter().filter(|id| !is_rejected(**id)).map(|id| (Some(*id), Some(id * id)));
            assert_eq!(found, wanted.collect::<Vec<_>>(), "table {number}");
        }
    }
}

/// The run's id, as soon as it is known.
#[derive(Default)]
struct Started(Option<String>);

impl Subscriber for Started {
    fn notice(&mut self, event: &RunEvent) {
        if let RunEvent::RunStarted { run, .. } = event {
            self.0 = Some(run.clone());
        }
    }
}

/// Plays a case; what was wrong, and how many answers were given.
fn play(case: &Case) -> (Vec<String>, usize) {
    let place = Place::new(case);
    let arm = |failing, dies_at| {
        let mut seen = place.world.seen();
        (seen.failing, seen.dies_at) = (failing, dies_at);
    };
    let check = |reports: Vec<Option<Report>>| {
        reports.iter().flatten().for_each(|report| futures::executor::block_on(place.check(report)));
    };
    arm(case.failing[0], case.dies_at);
    check(place.run_all(&case.first));
    // What the killed ones left is done by others, on each machine.
    let plain = |machine| Plan { machine, window: 2, cores: 2, refresh: false, killed_after: None };
    let plain: Vec<Plan> = (0..MACHINES).map(plain).collect();
    check(place.run_all(&plain));
    arm(case.failing[1], None);
    check(place.run_all(std::slice::from_ref(&case.refresh)));
    arm(0, None);
    let before = place.world.seen().asked;
    check(place.run_all(&plain));
    let mut seen = place.world.seen();
    let asked = seen.asked - before;
    if asked > 0 {
        seen.wrong.push(format!("{asked} rows were left to do in the end"));
    }
    (std::mem::take(&mut seen.wrong), seen.answers.values().map(Vec::len).sum())
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

#[test]
fn each_row_is_done_once_whatever_engines_do() {
    let (count, seed) = (number("CUDA_AGENT_ROWS").unwrap_or(16), number("CUDA_AGENT_ROWS_SEED").unwrap_or(20_261_122));
    println!("seed {seed}; set CUDA_AGENT_ROWS_SEED for another");
    let cases = Mutex::new((0..count).map(|case| seed + case));
    let wrong = Mutex::new((0, 0, Vec::new()));
    // They wait more than they work.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let Some(seed) = cases.lock().unwrap().next() else { return };
                    let case = Case::new(&mut Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
                    let (found, answers) = play(&case);
                    let mut wrong = wrong.lock().unwrap();
                    wrong.0 += answers;
                    wrong.1 += usize::from(!found.is_empty());
                    if !found.is_empty() {
                        wrong.2.push(format!("seed {seed}: {} wrong, first: {}\n{case:?}", found.len(), found[0]));
                    }
                }
            });
        }
    });
    let (answers, cases, wrong) = wrong.into_inner().unwrap();
    println!("{count} cases, {answers} answers, {cases} cases wrong");
    assert!(wrong.is_empty(), "{cases} of {count} cases:\n{}", wrong.join("\n"));
}
