//! Chaos: everything that can go wrong on the way to a shared store, again and again. No matter what, nothing that is read
//! is wrong, nothing that was finished is lost, and the next undisturbed run completes with the digests of an undisturbed
//! one.
//!
//! `CUDA_AGENT_CHAOS` is how often each scenario is played, `CUDA_AGENT_CHAOS_SEED` decides all that is random in it, and
//! `CUDA_AGENT_CHAOS_ONLY` picks scenarios by a part of their names.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::BufRead as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant, SystemTime};

use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::rows::segment;
use cuda_agent_engine::store::Record;
use serde_json::Value;

use crate::support::Sandbox;
use crate::support::proxy::{Fault, Faults, Proxy};
use crate::support::s3::{Bucket, S3Server};

/// A run that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(120);
/// How long gc waits before it deletes.
const GRACE: Duration = Duration::from_secs(2);
/// So many rounds are played at the same time; most of their time is waiting.
const AT_ONCE: usize = 4;
const STAGES: [&str; 5] = ["source", "squares", "folder", "joined", "lines"];

/// Trees, tables and rows, a file that goes up in parts, and time enough in each stage for something to happen in it.
const PIPELINE: &str = "name: p
stages:
  source: { uses: run, run: 'i=0; while [ $i -lt 24 ]; do echo \"{\\\"id\\\": $i}\"; i=$((i+1)); done > outputs/rows.jsonl', outputs: { rows: { type: table, columns: { id: int64 } } } }
  squares: { uses: my/square, inputs: { rows: source.rows } }
  folder: { uses: run, run: 'mkdir outputs/out; seq 1 1300000 > outputs/out/large; head -c 300000 outputs/out/large > outputs/out/big; for i in 1 2 3; do echo $i > outputs/out/$i; done; sleep 0.05', outputs: { out: tree } }
  joined: { uses: run, inputs: { t: squares.rows, f: folder.out }, run: 'sleep 0.05; mkdir outputs/out; cat inputs/f/1 inputs/f/2 > outputs/out/few; tail -c 100000 inputs/f/large > outputs/out/end; wc -c < inputs/t.parquet > /dev/null', outputs: { out: tree } }
  lines: { uses: run, inputs: { all: joined.out }, run: 'sleep 0.02; tail -n 5 inputs/all/end | while read n; do echo \"{\\\"n\\\": $n}\"; done > outputs/rows.jsonl', outputs: { rows: { type: table, columns: { n: int64 } } } }
";

/// A stage more, so that a run that has everything else needs what is in it.
const MORE: &str = "  more: { uses: run, inputs: { t: squares.rows, f: folder.out, l: lines.rows }, run: 'cat inputs/f/* inputs/*.parquet | wc -c > outputs/out', outputs: { out: tree } }
";

/// The same results by other commands, and then other results by the same stages.
fn others() -> [(&'static str, String); 2] {
    let same = PIPELINE.replace("sleep 0.05", "sleep 0.06").replace("sleep 0.02", "sleep 0.03");
    [("same.yaml", same), ("other.yaml", PIPELINE.replace("-lt 24", "-lt 25").replace("1300000", "1200000"))]
}

/// Answers a row after noting in the machine's ledger that it works on it.
const SQUARE: &str = r#"ledger=${CUDA_AGENT_REQUEST%%/.cuda-agent/*}/ledger
while IFS= read -r line; do
  digest=${line#*\"row\":\"}; digest=${digest%%\"*}
  id=${line#*\"id\":}; id=${id%%\}*}
  echo "$digest" >> "$ledger"
  sleep 0.02
  printf '{"event":"row","row":"%s","status":"done","outputs":{"rows":[{"square":%s}]}}\n' "$digest" $((id * id)) >&$CUDA_AGENT_EVENTS_FD
done
"#;

/// A machine: a folder. All that it shares with others is the bucket.
fn machine(store: &str, variables: Vec<(String, String)>) -> Sandbox {
    let mut sandbox = Sandbox::new();
    sandbox.variables = variables;
    sandbox
        .write("cuda-agent.yaml", &format!("{store}stages: [kinds]\n"))
        .write(
            "kinds/square/stage.yaml",
            "name: my/square\nversion: 1.0.0\nsummary: Squares.\ninputs: { rows: { type: table, columns: { id: int64 } } }\n\
             outputs: { rows: { type: table, columns: [ { name: square, type: int64 } ] } }\n\
             by_row: { port: rows, workers: 2 }\nrun: [sh, square.sh]\nsources: [square.sh]\n",
        )
        .write("kinds/square/square.sh", SQUARE)
        .write("p.yaml", PIPELINE)
        .write("q.yaml", &format!("{PIPELINE}{MORE}").replace("name: p", "name: q"));
    others().iter().for_each(|(name, text)| _ = sandbox.write(name, text));
    sandbox
}

/// Files by name, as digests.
type Content = BTreeMap<String, Digest>;

/// What undisturbed runs make.
struct Expected {
    /// Logical digests of a record's outputs, by key.
    records: BTreeMap<Digest, Vec<Digest>>,
    /// By pipeline file and stage.
    keys: BTreeMap<(String, String), Digest>,
    /// By stage, for each pipeline.
    content: BTreeMap<String, Vec<Content>>,
}

static EXPECTED: LazyLock<Expected> = LazyLock::new(|| {
    let sandbox = machine("", Vec::new());
    let (mut keys, mut content) = (BTreeMap::new(), BTreeMap::<String, Vec<Content>>::new());
    for file in ["p.yaml", "q.yaml", "same.yaml", "other.yaml"] {
        sandbox.good(&["run", file]);
        let run: Value = serde_json::from_str(&sandbox.good(&["status", "--json"])).unwrap();
        for (stage, entry) in run["stages"].as_object().unwrap() {
            keys.insert((file.to_owned(), stage.clone()), entry["key"].as_str().unwrap().parse().unwrap());
        }
        for stage in STAGES {
            let made = format!("{file}-{stage}");
            sandbox.good(&["export", stage, &made]);
            content.entry(stage.to_owned()).or_default().push(content_of(&sandbox.path(&made)));
        }
    }
    let records = near_files(&sandbox.path(".cuda-agent"), "records");
    let records: Vec<Record> = records.iter().filter_map(|(_, bytes)| record(bytes)).collect();
    let outputs = |record: &Record| record.outputs.values().map(|artifact| artifact.digest).collect();
    Expected { records: records.iter().map(|record| (record.key, outputs(record))).collect(), keys, content }
});

fn record(bytes: &[u8]) -> Option<Record> {
    Record::from_bytes(bytes)
}

fn content_of(folder: &Path) -> Content {
    let name = |path: &Path| path.strip_prefix(folder).unwrap().display().to_string();
    files(folder).iter().map(|path| (name(path), Digest::of_file(path).unwrap())).collect()
}

/// The files below a folder, also while others come and go.
fn files(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for item in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            match item.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(item.path()),
                _ => found.push(item.path()),
            }
        }
    }
    found.sort();
    found
}

/// Objects of a kind in a near tier. What is being written has `#` in its name, and is no object.
fn near_files(root: &Path, kind: &str) -> Vec<(String, Vec<u8>)> {
    let folder = root.join("v1").join(kind);
    let named =
        files(&folder).into_iter().map(|path| (path.strip_prefix(&folder).unwrap().display().to_string(), path));
    let objects = named.filter(|(name, _)| !name.contains('#'));
    objects.filter_map(|(name, path)| Some((name, std::fs::read(path).ok()?))).collect()
}

/// SplitMix64: everything random comes of the seed that is printed.
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let number = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^ (number >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// One of a few names.
    fn one(&mut self, of: &[&'static str]) -> &'static str {
        of[self.below(of.len() as u64) as usize]
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
}

/// What a scenario came to.
#[derive(Clone, Debug, Default)]
struct Tally {
    rounds: u64,
    runs: u64,
    /// Of the runs, those that ended with an error, as they may while something is wrong.
    refused: u64,
    kills: u64,
    faults: u64,
    /// Finished work that was done again.
    lost: Vec<String>,
    /// What was readable, and not as it should be.
    wrong: Vec<String>,
    skipped: Option<String>,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.rounds += other.rounds;
        self.runs += other.runs;
        self.refused += other.refused;
        self.kills += other.kills;
        self.faults += other.faults;
        self.lost.extend(other.lost);
        self.wrong.extend(other.wrong);
        self.skipped = self.skipped.take().or(other.skipped);
    }
}

/// What is finished and whole, as far as a machine can reach it.
#[derive(Clone, Debug, Default)]
struct Finished {
    /// Keys of records with all their blobs.
    keys: BTreeSet<Digest>,
    /// Rows with an answer.
    rows: BTreeSet<Digest>,
}

/// One round of a scenario: a bucket's folder behind a proxy of its own, and machines.
struct World {
    bucket: Bucket,
    folder: String,
    proxy: Proxy,
    machines: Vec<Sandbox>,
    /// How much of each machine's ledger is accounted for.
    ledgers: Vec<usize>,
    random: Random,
    tally: Tally,
    /// Something was damaged on purpose, so not everything that is there need be whole.
    damaged: bool,
    /// Garbage is collected, so not everything that was finished stays.
    collected: bool,
    /// A machine's small disk, where it has one.
    disk: Option<Disk>,
}

/// A run of the binary that goes on.
struct Running {
    machine: usize,
    pipeline: String,
    child: Child,
    started: Instant,
    before: Finished,
}

/// How a run ended.
struct Ended {
    status: ExitStatus,
    events: Vec<Value>,
    stderr: String,
}

impl Ended {
    fn is_good(&self) -> bool {
        self.status.success()
    }

    fn executed(&self) -> Vec<String> {
        let finished =
            self.events.iter().filter(|event| event["event"] == "stage_finished" && event["outcome"]["is"] == "done");
        finished.map(|event| event["stage"].as_str().unwrap().to_owned()).collect()
    }
}

impl World {
    fn new(random: Random) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        static BUCKET: LazyLock<Bucket> = LazyLock::new(|| S3Server::seaweed().bucket());
        let folder = format!("round-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let proxy = Proxy::start(&BUCKET.endpoint, Faults::default());
        let mut world = Self {
            bucket: BUCKET.clone(),
            folder,
            proxy,
            machines: Vec::new(),
            ledgers: Vec::new(),
            random,
            tally: Tally { rounds: 1, ..Tally::default() },
            damaged: false,
            collected: false,
            disk: None,
        };
        world.add_machine();
        world
    }

    fn add_machine(&mut self) -> usize {
        let store = format!("store: {}/{}\n", self.bucket.url, self.folder);
        let mut variables = self.bucket.at(self.proxy.endpoint()).env;
        variables.push(("CUDA_AGENT_GC_GRACE_S".into(), GRACE.as_secs_f64().to_string()));
        self.machines.push(machine(&store, variables));
        self.ledgers.push(0);
        self.machines.len() - 1
    }

    fn root(&self, machine: usize) -> PathBuf {
        match &self.disk {
            Some(disk) if machine == 0 => disk.seen(&self.machines[0].path(".cuda-agent")),
            _ => self.machines[machine].path(".cuda-agent"),
        }
    }

    fn command(&self, machine: usize, arguments: &[&str]) -> Command {
        let command = self.machines[machine].command(arguments);
        match &self.disk {
            Some(disk) if machine == 0 => disk.wrap(&command),
            _ => command,
        }
    }

    /// Objects of a kind in the bucket.
    fn far_objects(&self, kind: &str) -> Vec<(String, Vec<u8>)> {
        let prefix = format!("{}/v1/{kind}", self.folder);
        let names = self.bucket.list(&prefix);
        let read = |name: String| {
            Some((name.strip_prefix(&prefix)?.trim_start_matches('/').to_owned(), self.bucket.get(&name)?.to_vec()))
        };
        names.into_iter().filter_map(read).collect()
    }

    /// What is finished, as this machine can know: in its own folder and in the bucket.
    fn finished(&self, machine: usize) -> Finished {
        let (root, mut finished) = (self.root(machine), Finished::default());
        let both = |kind: &str| near_files(&root, kind).into_iter().chain(self.far_objects(kind)).collect::<Vec<_>>();
        let whole = |(name, bytes): &(String, Vec<u8>)| {
            let digest = name.rsplit('/').next()?.parse::<Digest>().ok()?;
            (Digest::of_bytes(bytes) == digest).then_some(digest)
        };
        let blobs: BTreeSet<Digest> = both("blobs").iter().filter_map(whole).collect();
        let mut newest: BTreeMap<Digest, (u32, Option<Record>)> = BTreeMap::new();
        for (name, bytes) in both("records") {
            let Some((key, generation)) = name.split_once('/') else { continue };
            let (Ok(key), Ok(generation)) = (key.parse(), generation.parse()) else { continue };
            let entry = newest.entry(key).or_default();
            if generation > entry.0 || (generation == entry.0 && entry.1.is_none()) {
                *entry = (generation, record(&bytes));
            }
        }
        for record in newest.into_values().filter_map(|(_, record)| record) {
            let listed = record.outputs.values().all(|artifact| {
                blobs.contains(&artifact.blob) && artifact.parts.iter().all(|part| blobs.contains(part))
            });
            if listed {
                finished.keys.insert(record.key);
            }
        }
        for (name, bytes) in both("rows") {
            let digest = name.strip_suffix(".parquet").and_then(|name| name.rsplit('-').next()?.parse::<Digest>().ok());
            if digest == Some(Digest::of_bytes(&bytes)) {
                finished.rows.extend(segment::digests(bytes.into()).unwrap());
            }
        }
        for path in files(&root.join("state")) {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            // The last line may be torn.
            let answers = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            finished.rows.extend(answers.filter_map(|answer| answer["row"].as_str()?.parse::<Digest>().ok()));
        }
        finished
    }

    fn start(&mut self, machine: usize, pipeline: &str) -> Running {
        let before = self.finished(machine);
        let output = |name: &str| File::create(self.machines[machine].path(name)).unwrap();
        let mut command = self.command(machine, &["run", "--json", pipeline]);
        let child = command.stdout(output("stdout")).stderr(output("stderr")).stdin(Stdio::null()).spawn().unwrap();
        self.tally.runs += 1;
        Running { machine, pipeline: pipeline.to_owned(), child, started: Instant::now(), before }
    }

    /// Waits for the end of a run, and sees whether it did again what was finished.
    fn end(&mut self, mut running: Running) -> Ended {
        let status = loop {
            if let Some(status) = running.child.try_wait().unwrap() {
                break status;
            }
            if running.started.elapsed() > LIMIT {
                let _ = running.child.kill();
                let stderr = std::fs::read_to_string(self.machines[running.machine].path("stderr")).unwrap_or_default();
                panic!("a run hangs:\n{stderr}\n{}", self.said(running.machine));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let machine = &self.machines[running.machine];
        let stderr = std::fs::read_to_string(machine.path("stderr")).unwrap();
        let events = self.said(running.machine).lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let ended = Ended { status, events, stderr };
        self.account(&running, &ended);
        ended
    }

    fn said(&self, machine: usize) -> String {
        std::fs::read_to_string(self.machines[machine].path("stdout")).unwrap_or_default()
    }

    fn account(&mut self, running: &Running, ended: &Ended) {
        let Running { machine, pipeline, before, .. } = running;
        let ledger = std::fs::read_to_string(self.machines[*machine].path("ledger")).unwrap_or_default();
        let begun = ledger.lines().skip(self.ledgers[*machine]).filter_map(|line| line.parse::<Digest>().ok());
        let again = begun.filter(|row| before.rows.contains(row)).count();
        self.ledgers[*machine] = ledger.lines().count();
        if self.collected {
            return;
        }
        if again > 0 {
            self.tally.lost.push(format!("{again} rows were executed again on machine {machine}"));
        }
        for stage in ended.executed() {
            if before.keys.contains(&EXPECTED.keys[&(pipeline.clone(), stage.clone())]) {
                self.tally.lost.push(format!("{stage} was executed again on machine {machine}: {:?}", ended.events));
            }
        }
    }

    /// A run while something is wrong: it may fail, but with a word about why, and it must end.
    fn run_troubled(&mut self, machine: usize, pipeline: &str) -> Ended {
        let running = self.start(machine, pipeline);
        self.end_troubled(running)
    }

    fn end_troubled(&mut self, running: Running) -> Ended {
        let machine = running.machine;
        let ended = self.end(running);
        if !ended.is_good() {
            self.tally.refused += 1;
            assert!(matches!(ended.status.code(), Some(1 | 3)), "{}: {}", ended.status, ended.stderr);
            let failed = ended.events.iter().any(|event| event["outcome"]["is"] == "failed");
            let said = failed || self.said(machine).contains("{\"error\":{");
            assert!(said, "it failed without a word: {} {}", self.said(machine), ended.stderr);
        }
        ended
    }

    /// A run of which nothing is wrong any more.
    fn run_well(&mut self, machine: usize, pipeline: &str) -> Vec<String> {
        let running = self.start(machine, pipeline);
        let ended = self.end(running);
        assert!(ended.is_good(), "an undisturbed run: {}\n{:?}\n{}", ended.status, ended.events, ended.stderr);
        ended.executed()
    }

    /// A run that finds everything.
    fn run_idle(&mut self, machine: usize) {
        let executed = self.run_well(machine, "p.yaml");
        assert!(executed.is_empty(), "the run after that executes {executed:?} on machine {machine}");
    }

    /// Kills a run at a moment, unless it is over by then.
    fn kill(&mut self, mut running: Running, moment: Moment) {
        self.wait_for(&mut running, moment);
        let over = running.child.try_wait().unwrap().is_some();
        running.child.kill().unwrap();
        self.tally.kills += u64::from(!over);
        self.end(running);
    }

    fn wait_for(&mut self, running: &mut Running, moment: Moment) {
        let ledger = self.machines[running.machine].path("ledger");
        while running.child.try_wait().unwrap().is_none() && running.started.elapsed() < LIMIT {
            let come = match &moment {
                Moment::After(time) => running.started.elapsed() >= *time,
                Moment::Request(part, count) => self.proxy.seen(part) >= *count,
                Moment::Row(count) => {
                    std::fs::read_to_string(&ledger).unwrap_or_default().lines().count()
                        >= self.ledgers[running.machine] + count
                }
            };
            if come {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let more = self.random.below(40);
        std::thread::sleep(Duration::from_millis(more));
    }

    fn moment(&mut self) -> Moment {
        let so_far = |part: &'static str, world: &Self| world.proxy.seen(part);
        let parts =
            ["PUT", "/v1/runs/", "/v1/leases/", "/v1/blobs/", "/v1/rows/", "/v1/records/", "uploadId", "/v1/logs/"];
        let part = self.random.one(&parts);
        match self.random.below(3) {
            0 => Moment::After(Duration::from_millis(self.random.below(900))),
            1 => Moment::Row(self.random.between(1, 20) as usize),
            _ => Moment::Request(part, so_far(part, self) + self.random.between(1, 4) as usize),
        }
    }

    /// What can be read, however much of it there is, is what an undisturbed run makes.
    fn read_something(&mut self, machine: usize) {
        let stage = self.random.one(&STAGES);
        self.export(machine, stage);
    }

    /// A command that only looks; whether it was successful.
    fn look(&self, machine: usize, arguments: &[&str]) -> bool {
        let output = self.command(machine, arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(0..=3)), "{arguments:?}: {}: {error}", output.status);
        assert!(output.status.success() || error.contains("error: "), "{arguments:?} failed without a word");
        output.status.success()
    }

    fn export(&mut self, machine: usize, stage: &str) -> bool {
        let target = self.machines[machine].path("exported");
        let _ = std::fs::remove_dir_all(&target);
        if !self.look(machine, &["export", stage, "exported"]) {
            return false;
        }
        let found = content_of(&target);
        if !EXPECTED.content[stage].contains(&found) {
            self.tally.wrong.push(format!("export {stage} on machine {machine}: {found:?}"));
        }
        true
    }

    /// Looks at everything that lies in the bucket and on the machines.
    fn audit(&mut self) {
        let mut tiers = vec![("the bucket".to_owned(), None)];
        tiers.extend((0..self.machines.len()).map(|machine| (format!("machine {machine}"), Some(self.root(machine)))));
        for (place, root) in tiers {
            let objects = |kind: &str| match &root {
                Some(root) => near_files(root, kind),
                None => self.far_objects(kind),
            };
            let mut wrong = Vec::new();
            let mut blobs = BTreeSet::new();
            for kind in ["blobs", "rows"] {
                for (name, bytes) in objects(kind) {
                    let digest = name.trim_end_matches(".parquet").rsplit(['/', '-']).next().unwrap().parse::<Digest>();
                    if digest == Ok(Digest::of_bytes(&bytes)) {
                        blobs.extend(digest);
                    } else if !self.damaged {
                        wrong.push(format!("{kind}/{name} in {place} has other bytes ({})", bytes.len()));
                    }
                }
            }
            for (name, bytes) in objects("records") {
                let Some(record) = record(&bytes) else {
                    if !self.damaged {
                        wrong.push(format!("records/{name} in {place} is damaged"));
                    }
                    continue;
                };
                let outputs: Vec<Digest> = record.outputs.values().map(|artifact| artifact.digest).collect();
                if EXPECTED.records.get(&record.key) != Some(&outputs) {
                    wrong.push(format!("records/{name} in {place} names {outputs:?}"));
                }
                let blobs_there = record.outputs.values().all(|artifact| {
                    blobs.contains(&artifact.blob) && artifact.parts.iter().all(|part| blobs.contains(part))
                });
                // Near, a record may stand alone: what it names is far.
                if root.is_none() && !self.damaged && !blobs_there {
                    wrong.push(format!("records/{name} in {place} names blobs that are not there"));
                }
            }
            self.tally.wrong.extend(wrong);
        }
    }

    /// Nothing is wrong any more.
    fn calm(&mut self) {
        self.tally.faults += self.proxy.counts().faults.values().sum::<u64>();
        self.proxy.take_counts();
        self.proxy.set(Faults::default());
        self.proxy.deny_writes(false);
        self.proxy.down(false);
    }

    /// After whatever happened: runs complete and then find everything, on the machines that were there and on a new one,
    /// and all that can be read is right.
    fn conclude(&mut self) {
        self.calm();
        for machine in 0..self.machines.len() {
            self.run_well(machine, "p.yaml");
        }
        for machine in 0..self.machines.len() {
            self.run_idle(machine);
        }
        let fresh = self.add_machine();
        let executed = self.run_well(fresh, "p.yaml");
        // What others have of their own, they do not look for in a bucket that was damaged behind their backs.
        assert!(executed.is_empty() || self.damaged, "a new machine executes {executed:?}");
        self.run_idle(fresh);
        let old = self.random.below(fresh as u64) as usize;
        for machine in [old, fresh] {
            for stage in STAGES {
                if !self.export(machine, stage) {
                    assert!(self.damaged, "{stage} cannot be read on machine {machine}");
                    // Now it is known what is missing.
                    self.run_well(machine, "p.yaml");
                    assert!(self.export(machine, stage), "{stage} cannot be read on machine {machine}");
                }
            }
        }
        self.audit();
    }
}

/// When something happens to a run.
enum Moment {
    /// So long after its start.
    After(Duration),
    /// When so many requests have come that contain this.
    Request(&'static str, usize),
    /// When so many rows have been begun.
    Row(usize),
}

/// A small disk for a machine's folder: a file system in memory that a process of its own keeps mounted, seen by nobody
/// else. Where this user may not mount, no file may grow beyond a size instead.
enum Disk {
    Mounted { keeper: Child, folder: PathBuf },
    Limited { megabytes: u64 },
}

impl Disk {
    fn new(folder: &Path, megabytes: u64) -> Self {
        std::fs::create_dir_all(folder).unwrap();
        let script = "mount -t tmpfs -o size=$2m tmpfs \"$1\" && echo mounted && read -r nothing";
        let mut keeper = Command::new("unshare");
        keeper.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
        keeper.arg(folder).arg(megabytes.to_string());
        keeper.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let Ok(mut keeper) = keeper.spawn() else { return Self::Limited { megabytes } };
        let mut line = String::new();
        let read = std::io::BufReader::new(keeper.stdout.as_mut().unwrap()).read_line(&mut line);
        if read.is_ok() && line == "mounted\n" {
            return Self::Mounted { keeper, folder: folder.to_owned() };
        }
        let _ = keeper.wait();
        Self::Limited { megabytes }
    }

    fn resize(&mut self, megabytes: u64) {
        match self {
            Self::Limited { megabytes: limit } => *limit = megabytes,
            Self::Mounted { keeper, folder } => {
                let mut mount = Command::new("nsenter");
                mount.arg(format!("--mount=/proc/{}/ns/mnt", keeper.id()));
                mount.args(["mount", "-o", &format!("remount,size={megabytes}m")]).arg(folder);
                // It does not become smaller than what is on it.
                let _ = mount.stderr(Stdio::null()).status().unwrap();
            }
        }
    }

    /// Where others see what is on it.
    fn seen(&self, path: &Path) -> PathBuf {
        match self {
            Self::Limited { .. } => path.to_owned(),
            Self::Mounted { keeper, .. } => PathBuf::from(format!("/proc/{}/root{}", keeper.id(), path.display())),
        }
    }

    /// The command, on this disk.
    fn wrap(&self, command: &Command) -> Command {
        let (mut wrapped, script) = match self {
            Self::Limited { megabytes } => {
                (Command::new("env"), format!("trap '' XFSZ; ulimit -f {}; exec \"$@\"", megabytes * 1024))
            }
            Self::Mounted { keeper, .. } => {
                let mut enter = Command::new("nsenter");
                enter.arg(format!("--mount=/proc/{}/ns/mnt", keeper.id()));
                (enter, "cd \"$0\" && exec \"$@\"".to_owned())
            }
        };
        let folder = command.get_current_dir().unwrap();
        wrapped.args(["sh", "-c", &script]).arg(folder).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(name, value),
                None => wrapped.env_remove(name),
            };
        }
        wrapped.current_dir(folder);
        wrapped
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Self::Mounted { keeper, .. } = self {
            drop(keeper.stdin.take());
            let _ = keeper.wait();
        }
    }
}

type Scenario = fn(&mut World);

/// Played first, and once in five rounds only: it is a minute of waiting.
const PATIENT: &str = "a server that goes away for good";

const SCENARIOS: [(&str, Scenario); 21] = [
    (PATIENT, gone_for_good),
    ("kill -9 of the engine, one machine", |world| engine_killed(world, 1)),
    ("kill -9 of the engine, two machines in turn", |world| engine_killed(world, 2)),
    ("kill -9 of a stage's program", programs_killed),
    ("500", |world| faults(world, &[Fault::Failed])),
    ("503 after success", |world| faults(world, &[Fault::DoneYetUnavailable])),
    ("409", |world| faults(world, &[Fault::Conflict])),
    ("slow bodies", |world| faults(world, &[Fault::SlowBody])),
    ("truncated bodies", |world| faults(world, &[Fault::ShortBody])),
    ("corrupted bodies", |world| faults(world, &[Fault::CorruptBody])),
    ("resets before the request", |world| faults(world, &[Fault::ResetBefore])),
    ("resets after success", |world| faults(world, &[Fault::ResetAfter])),
    ("all of these, and kill -9", faults_and_kills),
    ("a bucket that turns read-only", |world| away_for_a_while(world, Proxy::deny_writes)),
    ("a server that goes away", |world| away_for_a_while(world, Proxy::down)),
    ("a full disk", disk_full),
    ("damage in the bucket", |world| damage(world, true)),
    ("damage on the machine", |world| damage(world, false)),
    ("clocks that jump", clocks),
    ("eight runners at once, faults, one of them killed", eight_runners),
    ("gc against runs that use what expires", garbage),
];

fn engine_killed(world: &mut World, machines: usize) {
    while world.machines.len() < machines {
        world.add_machine();
    }
    for (number, pipeline) in
        ["p.yaml", "p.yaml", "other.yaml", "other.yaml", "same.yaml", "same.yaml"].iter().enumerate()
    {
        let running = world.start(number % machines, pipeline);
        let moment = world.moment();
        world.kill(running, moment);
        world.read_something(number % machines);
    }
}

fn programs_killed(world: &mut World) {
    for pipeline in ["p.yaml", "p.yaml", "other.yaml", "same.yaml"] {
        let mut running = world.start(0, pipeline);
        let moment = world.moment();
        world.wait_for(&mut running, moment);
        while running.child.try_wait().unwrap().is_none() {
            let programs = descendants(running.child.id());
            if !programs.is_empty() {
                let program = *world.random.pick(&programs);
                let killed = nix::sys::signal::kill(program, nix::sys::signal::Signal::SIGKILL);
                world.tally.kills += u64::from(killed.is_ok());
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        world.end_troubled(running);
        world.read_something(0);
    }
}

/// The processes below a process.
fn descendants(root: u32) -> Vec<nix::unistd::Pid> {
    let mut parents = BTreeMap::new();
    for item in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = item.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(item.path().join("stat")) else { continue };
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse::<u32>().ok());
        parents.extend(parent.map(|parent| (pid, parent)));
    }
    let is_below = |pid: u32| std::iter::successors(parents.get(&pid), |pid| parents.get(pid)).any(|pid| *pid == root);
    parents.keys().filter(|pid| is_below(**pid)).map(|pid| nix::unistd::Pid::from_raw(*pid as i32)).collect()
}

fn some_faults(world: &mut World, kinds: &[Fault], percent: (u64, u64)) {
    let probability = world.random.between(percent.0, percent.1 + 1) as f64 / 100.0;
    let seed = world.random.next();
    world.proxy.set(Faults { kinds: kinds.to_vec(), probability, seed, ..Faults::default() });
}

fn faults(world: &mut World, kinds: &[Fault]) {
    let (other, third) = (world.add_machine(), world.add_machine());
    for (machine, pipeline) in [(0, "p.yaml"), (other, "q.yaml"), (third, "q.yaml"), (0, "q.yaml")] {
        some_faults(world, kinds, (5, 20));
        if machine == third {
            world.look(machine, &["pull", "--pipeline", "q.yaml"]);
        }
        world.run_troubled(machine, pipeline);
        world.read_something(machine);
    }
}

fn faults_and_kills(world: &mut World) {
    let other = world.add_machine();
    for number in 0..5 {
        some_faults(world, &Fault::ALL, (5, 15));
        let machine = if number % 2 == 0 { 0 } else { other };
        let pipeline = world.random.one(&["p.yaml", "q.yaml"]);
        let running = world.start(machine, pipeline);
        let moment = world.moment();
        world.kill(running, moment);
        world.read_something(machine);
    }
}

fn away_for_a_while(world: &mut World, switch: fn(&Proxy, bool)) {
    for _ in 0..3 {
        let mut running = world.start(0, "p.yaml");
        let moment = world.moment();
        world.wait_for(&mut running, moment);
        switch(&world.proxy, true);
        world.tally.faults += 1;
        let (since, time) = (Instant::now(), Duration::from_millis(world.random.between(100, 3000)));
        while since.elapsed() < time && running.child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        switch(&world.proxy, false);
        world.end_troubled(running);
        world.read_something(0);
    }
}

fn gone_for_good(world: &mut World) {
    let mut running = world.start(0, "p.yaml");
    let row = world.random.between(1, 20) as usize;
    world.wait_for(&mut running, Moment::Row(row));
    world.proxy.down(true);
    world.tally.faults += 1;
    world.end_troubled(running);
    world.proxy.down(false);
    world.read_something(0);
}

fn disk_full(world: &mut World) {
    let disk = Disk::new(&world.machines[0].path(".cuda-agent"), world.random.between(1, 12));
    if matches!(disk, Disk::Limited { .. }) {
        world.tally.skipped = Some("no right to mount: single files were limited instead".into());
    }
    world.disk = Some(disk);
    for _ in 0..3 {
        world.run_troubled(0, "p.yaml");
        world.tally.faults += 1;
        world.read_something(0);
        let megabytes = world.random.between(2, 30);
        world.disk.as_mut().unwrap().resize(megabytes);
    }
    world.disk.as_mut().unwrap().resize(300);
}

/// Other bytes, fewer, or none; `None` where the object goes.
fn damaged(random: &mut Random, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = bytes.to_vec();
    match random.below(4) {
        0 => return None,
        1 => bytes.truncate(bytes.len() / 2),
        2 => bytes.clear(),
        _ if bytes.is_empty() => bytes.push(b'x'),
        _ => {
            let place = random.below(bytes.len() as u64) as usize;
            bytes[place] ^= 1 << random.below(8);
        }
    }
    Some(bytes)
}

fn damage(world: &mut World, far: bool) {
    let other = world.add_machine();
    world.run_well(0, "p.yaml");
    world.run_well(other, "p.yaml");
    world.damaged = true;
    for _ in 0..2 {
        for _ in 0..world.random.between(1, 6) {
            match far {
                true => damage_far(world),
                false => damage_near(world),
            }
            world.tally.faults += 1;
        }
        // It may take a run, or a look, to notice.
        let pipelines = *world.random.pick(&[["p.yaml", "q.yaml"], ["q.yaml", "p.yaml"]]);
        for machine in [0, other] {
            world.read_something(machine);
            for pipeline in pipelines {
                world.run_troubled(machine, pipeline);
            }
        }
    }
}

fn damage_far(world: &mut World) {
    let kinds = ["blobs", "records", "rows", "runs", "hints", "leases", "replaced", "logs"];
    let most = if world.random.below(3) == 0 { 8 } else { 3 };
    let kind = world.random.one(&kinds[..most]);
    let names = world.bucket.list(&format!("{}/v1/{kind}", world.folder));
    if names.is_empty() {
        return;
    }
    let name = world.random.pick(&names).clone();
    let bytes = world.bucket.get(&name).unwrap_or_default();
    match damaged(&mut world.random, &bytes) {
        Some(bytes) => world.bucket.put(&name, bytes),
        None => world.bucket.delete(&name),
    }
}

fn damage_near(world: &mut World) {
    let machine = world.random.below(world.machines.len() as u64) as usize;
    let folders = ["v1/blobs", "v1/records", "v1/rows", "cache", "v1", "state", "."];
    let most = if world.random.below(3) == 0 { 7 } else { 4 };
    let folder = world.root(machine).join(world.random.one(&folders[..most]));
    let files = files(&folder);
    if files.is_empty() {
        return;
    }
    let file = world.random.pick(&files).clone();
    match damaged(&mut world.random, &std::fs::read(&file).unwrap()) {
        Some(bytes) => std::fs::write(&file, bytes).unwrap(),
        None => std::fs::remove_file(&file).unwrap(),
    }
}

/// Of the places where clocks count: the times in manifests, those of files, and when an object was last known to be there.
fn clocks(world: &mut World) {
    let other = world.add_machine();
    for machine in [0, other, 0] {
        let running = world.start(machine, "p.yaml");
        let moment = world.moment();
        world.kill(running, moment);
        shift_clocks(world, machine);
        let pipeline = world.random.one(&["p.yaml", "q.yaml"]);
        world.run_troubled(machine, pipeline);
        shift_clocks(world, machine);
        world.read_something(machine);
    }
}

fn shift_clocks(world: &mut World, machine: usize) {
    let times = [1.0, 1e9, 4e9];
    let root = world.root(machine);
    for path in files(&root) {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs_f64(*world.random.pick(&times));
        let _ = File::options().append(true).open(&path).and_then(|file| file.set_modified(time));
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("known-") && !name.ends_with(".gc") {
            let mut bytes = std::fs::read(&path).unwrap();
            for entry in bytes[8..].chunks_exact_mut(20) {
                let time = *world.random.pick(&times) as u32;
                entry[16..].copy_from_slice(&time.to_le_bytes());
            }
            std::fs::write(&path, bytes).unwrap();
        }
    }
    for (name, bytes) in world.far_objects("runs") {
        let mut run: Value = serde_json::from_slice(&bytes).unwrap();
        for field in ["started_at", "heartbeat_at", "ended_at"] {
            if run[field].is_number() {
                run[field] = (*world.random.pick(&times)).into();
            }
        }
        let text = serde_json::to_vec(&run).unwrap();
        if world.root(machine).join("v1/runs").join(&name).exists() {
            std::fs::write(root.join("v1/runs").join(&name), &text).unwrap();
        }
        world.bucket.put(&format!("{}/v1/runs/{name}", world.folder), text);
        world.tally.faults += 1;
    }
}

fn eight_runners(world: &mut World) {
    while world.machines.len() < 8 {
        world.add_machine();
    }
    some_faults(world, &Fault::ALL, (2, 6));
    let mut runs: Vec<Running> = (0..8).map(|machine| world.start(machine, "p.yaml")).collect();
    let killed = runs.swap_remove(world.random.below(8) as usize);
    let moment = world.moment();
    world.kill(killed, moment);
    for running in runs {
        world.end_troubled(running);
    }
    world.read_something(0);
}

/// What one machine made is no longer in the newest run, and is condemned; the other needs it just when it is deleted.
fn garbage(world: &mut World) {
    let collect = ["gc", "--delete", "--keep-last", "1", "--older-than", "0d"];
    let other = world.add_machine();
    world.collected = true;
    world.run_well(other, "p.yaml");
    for _ in 0..2 {
        world.run_well(0, "other.yaml");
        assert!(world.look(0, &collect), "gc notes what is garbage");
        std::thread::sleep(GRACE);
        let machine = if world.random.below(2) == 0 { other } else { world.add_machine() };
        let pipeline = world.random.one(&["p.yaml", "q.yaml", "same.yaml"]);
        let mut running = world.start(machine, pipeline);
        let moment = world.moment();
        world.wait_for(&mut running, moment);
        let mut gc = world.command(0, &collect).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        if world.random.below(3) == 0 {
            let soon = world.random.below(300);
            std::thread::sleep(Duration::from_millis(soon));
            world.tally.kills += u64::from(gc.try_wait().unwrap().is_none());
            gc.kill().unwrap();
        }
        world.tally.faults += 1;
        world.end_troubled(running);
        gc.wait().unwrap();
    }
}

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn nothing_is_lost_or_wrong_in_chaos() {
    let seed = variable("CUDA_AGENT_CHAOS_SEED").unwrap_or(20_261_120);
    let rounds: u64 = variable("CUDA_AGENT_CHAOS").unwrap_or(1);
    let only: String = variable("CUDA_AGENT_CHAOS_ONLY").unwrap_or_default();
    println!("seed {seed}, {rounds} rounds; CUDA_AGENT_CHAOS_SEED and CUDA_AGENT_CHAOS set others");
    let started = Instant::now();
    LazyLock::force(&EXPECTED);
    let chosen: Vec<usize> = (0..SCENARIOS.len()).filter(|index| SCENARIOS[*index].0.contains(&only)).collect();
    let all = (0..rounds).flat_map(|round| chosen.iter().map(move |index| (*index, round)));
    let plays: Vec<(usize, u64)> =
        all.filter(|(index, round)| SCENARIOS[*index].0 != PATIENT || round % 5 == 0).collect();
    let (next, tallies) = (AtomicUsize::new(0), Mutex::new(vec![Tally::default(); SCENARIOS.len()]));
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((index, round)) = plays.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match play(*index, *round, seed) {
                        Ok(tally) => tallies.lock().unwrap()[*index].add(tally),
                        Err(failure) => failures.lock().unwrap().push(failure),
                    }
                }
            });
        }
    });
    println!("{}", table(&tallies.lock().unwrap(), &chosen));
    println!("{rounds} rounds of each scenario with seed {seed} in {:.0} s", started.elapsed().as_secs_f64());
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// One round of a scenario; what went wrong names what repeats it.
fn play(index: usize, round: u64, seed: u64) -> Result<Tally, String> {
    let (name, scenario) = SCENARIOS[index];
    let random = Random(Random(seed ^ Random(index as u64 + 1).next()).next().wrapping_add(round));
    let played = std::panic::catch_unwind(|| {
        let mut world = World::new(random);
        scenario(&mut world);
        world.conclude();
        world.tally
    });
    let problem = match played {
        Ok(tally) if tally.lost.is_empty() && tally.wrong.is_empty() => return Ok(tally),
        Ok(tally) => format!("lost: {:#?}\nwrong: {:#?}", tally.lost, tally.wrong),
        Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "it panicked".into()),
    };
    Err(format!("seed {seed}, scenario `{name}`, round {round}: {problem}"))
}

fn table(tallies: &[Tally], chosen: &[usize]) -> String {
    let mut text = "| scenario | rounds | runs | ended with an error | kills | faults | lost | wrong |\n".to_owned();
    text.push_str("|---|--:|--:|--:|--:|--:|--:|--:|\n");
    let mut all = Tally::default();
    let mut line = |name: &str, tally: &Tally| {
        let Tally { rounds, runs, refused, kills, faults, lost, wrong, .. } = tally;
        let (lost, wrong) = (lost.len(), wrong.len());
        let _ = writeln!(text, "| {name} | {rounds} | {runs} | {refused} | {kills} | {faults} | {lost} | {wrong} |");
    };
    for index in chosen {
        let note = tallies[*index].skipped.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
        line(&format!("{}{note}", SCENARIOS[*index].0), &tallies[*index]);
        all.add(tallies[*index].clone());
    }
    line("**all**", &all);
    text
}
