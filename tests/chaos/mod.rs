//! Chaos: everything that can go wrong on the way to a shared store, again and again. No matter what, nothing that is read
//! is wrong, nothing that was finished is lost, and the next undisturbed run completes with the digests of an undisturbed
//! one.
//!
//! `CUDA_AGENT_CHAOS` is how often each scenario is played, `CUDA_AGENT_CHAOS_SEED` decides all that is random in it, and
//! `CUDA_AGENT_CHAOS_ONLY` picks scenarios by a part of their names.

mod disk;
mod scenarios;
mod world;

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

use disk::*;
use scenarios::*;
use world::*;

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
