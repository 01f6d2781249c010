//! Workers that take stages from a shared store, as processes: a machine is a folder, all that it shares is the store. The
//! leader has no GPU; its GPU stages are made by workers whose GPUs a made-up `nvidia-smi` reports.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::s3::{Bucket, S3Server};
use crate::support::{Sandbox, write_ids};

const MANIFEST: &str = "name: my/gpu\nversion: 1.0.0\nsummary: Measures on a GPU.\ninputs: { text: { type: tree } }\n\
    outputs: { out: { type: tree } }\ndeterminism: measured\nresources: { gpu: 1 }\nrun: [sh, gpu.sh]\nsources: [gpu.sh]\n";

/// Says in a file that it was started, which is the only count that nobody can get wrong.
const PROGRAM: &str = "echo \"$CUDA_VISIBLE_DEVICES\" >> DONE\necho 'a GPU stage speaks'\nBEFORE\n\
    [ -n \"$CUDA_VISIBLE_DEVICES\" ] || exit 9\ncat inputs/text > outputs/out\necho \"$CUDA_VISIBLE_DEVICES\" >> outputs/out\n";

const PIPELINE: &str = "name: gpu
stages:
  start: { uses: run, inputs: { seed: { path: seed.txt } }, run: 'cat inputs/seed > outputs/out', outputs: { out: tree } }
  measured: { uses: my/gpu, inputs: { text: start.out }, executor: gpu }
  end: { uses: run, inputs: { a: measured.out }, run: 'wc -l < inputs/a > outputs/out', outputs: { out: tree } }
";

/// Everything that the machines of a test share.
struct Site {
    folder: tempfile::TempDir,
    bucket: Option<Bucket>,
    /// What the program does before it ends.
    before: String,
    /// What is declared of the executor besides.
    declared: &'static str,
}

impl Site {
    fn new(remote: bool) -> Self {
        let bucket = remote.then(|| S3Server::seaweed().bucket());
        Self { folder: tempfile::tempdir().unwrap(), bucket, before: ":".into(), declared: "" }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn store(&self) -> String {
        match &self.bucket {
            Some(bucket) => format!("{}/team", bucket.url),
            None => format!("file://{}", self.path("store").display()),
        }
    }

    /// Names of objects below a folder of the store.
    fn objects(&self, folder: &str) -> Vec<String> {
        fn below(folder: &Path) -> Vec<String> {
            let Ok(items) = std::fs::read_dir(folder) else { return Vec::new() };
            let items = items.map(|item| item.unwrap().path());
            items.flat_map(|path| if path.is_dir() { below(&path) } else { vec![path.display().to_string()] }).collect()
        }
        match &self.bucket {
            Some(bucket) => bucket.list(&format!("team/v1/{folder}")),
            None => below(&self.path("store/v1").join(folder)),
        }
    }

    /// A machine with GPUs of a model, or with none.
    fn machine(&self, gpus: &[&str]) -> Sandbox {
        let mut sandbox = Sandbox::new();
        sandbox.variables = self.bucket.as_ref().map(|bucket| bucket.env.clone()).unwrap_or_default();
        let listing: Vec<String> = (1..)
            .zip(gpus)
            .map(|(number, model)| format!("GPU-{number:08}-0000-0000-0000-000000000000, {model}"))
            .map(|gpu| if gpu.contains("580.") { gpu } else { format!("{gpu}, 580.65.06") })
            .collect();
        sandbox.write("nvidia-smi", &format!("#!/bin/sh\ncat <<'END'\n{}\nEND\n", listing.join("\n")));
        let tool = sandbox.path("nvidia-smi");
        // Another process changes its mode: this one had it open for writing, and another test may be starting a child.
        assert!(std::process::Command::new("chmod").arg("755").arg(&tool).status().unwrap().success());
        sandbox.variables.push(("CUDA_AGENT_NVIDIA_SMI".into(), tool.display().to_string()));
        let executor = format!(
            "  gpu:\n    kind: workers\n    device: {{ gpu: NVIDIA H200, driver: 580.65.06 }}\n{}",
            self.declared
        );
        let project = format!("store: {}\nstages: [kinds]\nexecutors:\n{executor}", self.store());
        sandbox.write("cuda-agent.yaml", &project);
        sandbox.write("kinds/gpu/stage.yaml", MANIFEST);
        let done = self.path("done").display().to_string();
        sandbox.write("kinds/gpu/gpu.sh", &PROGRAM.replace("DONE", &done).replace("BEFORE", &self.before));
        sandbox.write("p.yaml", PIPELINE).write("seed.txt", "seed\n");
        sandbox
    }

    fn leader(&self) -> Sandbox {
        self.machine(&[])
    }

    fn gpu_machine(&self) -> Sandbox {
        self.machine(&["NVIDIA H200"])
    }

    /// How often the GPU program was started.
    fn started(&self) -> usize {
        std::fs::read_to_string(self.path("done")).unwrap_or_default().lines().count()
    }
}

/// A process, with what it says in files; it ends with the test.
struct Process {
    child: Child,
    output: tempfile::NamedTempFile,
    errors: tempfile::NamedTempFile,
}

impl Process {
    fn start(sandbox: &Sandbox, arguments: &[&str]) -> Self {
        let [output, errors] = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
        let mut command = sandbox.command(arguments);
        let command = command.stdout(output.reopen().unwrap()).stderr(errors.reopen().unwrap());
        Self { child: command.spawn().unwrap(), output, errors }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.errors.path()).unwrap()
    }

    /// What it wrote to its standard output.
    fn printed(&self) -> String {
        std::fs::read_to_string(self.output.path()).unwrap()
    }

    fn wait_to_say(&self, text: &str) {
        until(&format!("{text:?} in {:?}", self.errors.path()), || self.said().contains(text));
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Waits for its end; its exit status and what it said.
    fn end(mut self) -> (i32, String) {
        until("a process that ends", || self.child.try_wait().unwrap().is_some());
        (self.child.wait().unwrap().code().unwrap_or(-1), self.said())
    }

    fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for something that must come.
fn until(what: &str, mut is_there: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_there() {
        assert!(begun.elapsed() < Duration::from_secs(120), "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A leader without a GPU begins, a worker comes late, and the pipeline is finished; afterwards everybody has all of it.
fn a_leader_finishes_with_a_late_worker(remote: bool) {
    let site = Site::new(remote);
    let (leader, machine) = (site.leader(), site.gpu_machine());
    let run = Process::start(&leader, &["run", "p.yaml"]);
    run.wait_to_say("no worker of executor `gpu` takes it yet");
    assert_eq!(site.started(), 0);
    let worker = Process::start(&machine, &["worker", "--idle", "3s"]);
    let (status, said) = run.end();
    assert_eq!(status, 0, "{said}\n{}", worker.said());
    leader.good(&["export", "measured", "made"]);
    let made = std::fs::read_to_string(leader.path("made/out")).unwrap();
    assert_eq!(made, "seed\nGPU-00000001-0000-0000-0000-000000000000\n");
    assert!(leader.good(&["log", "measured"]).contains("a GPU stage speaks"));
    assert!(leader.good(&["status"]).contains(" of gpu: done"), "not the worker's run, which began later");
    // The same keys, whoever asks; and nothing is left of the announcement.
    assert_eq!(leader.executed(&["p.yaml"]), [""; 0]);
    assert_eq!(site.leader().executed(&["p.yaml"]), [""; 0]);
    assert_eq!(site.started(), 1);
    assert_eq!(site.objects("work"), [""; 0]);
    // Only a machine with the device can tell whether it comes out the same.
    let error = leader.bad(2, &["verify", "measured"]);
    assert!(error.contains("`measured` is executed by `gpu`, and this machine has not its device"), "{error}");
    assert!(leader.good(&["verify", "--sample", "100"]).contains("end: same"));
    assert_eq!(site.started(), 1);
    machine.good(&["run", "p.yaml"]);
    assert!(machine.good(&["verify", "measured"]).contains("measured: same"));
    assert_eq!(site.started(), 2);
    let (status, said) = worker.end();
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("measured: done") && said.contains("worker ended: 1 executed, 0 failed"), "{said}");
    assert_eq!(site.objects("workers"), [""; 0], "it takes its report with it");
    assert_eq!(site.objects("leases"), [""; 0]);
}

#[test]
fn a_leader_without_a_gpu_finishes_a_gpu_pipeline_over_a_folder() {
    a_leader_finishes_with_a_late_worker(false);
}

#[test]
fn a_leader_without_a_gpu_finishes_a_gpu_pipeline_over_a_server() {
    a_leader_finishes_with_a_late_worker(true);
}

/// What the leader alone has gets to the worker: files outside the store, and those of a command.
#[test]
fn inputs_and_files_of_the_leaders_machine_reach_a_worker() {
    let site = Site::new(true);
    let (leader, machine) = (site.leader(), site.gpu_machine());
    std::fs::remove_file(machine.path("seed.txt")).unwrap();
    leader.write("helper.sh", "echo helped with $(cat inputs/folder/a inputs/folder/below/b)\n");
    leader.write("data/a", "1").write("data/below/b", "2");
    write_ids(&leader.path("ids.parquet"), &[1, 2, 3], "x");
    let pipeline = "name: files
stages:
  file: { uses: my/gpu, inputs: { text: { path: seed.txt } } }
  command:
    uses: run
    inputs: { folder: { path: data }, ids: { path: ids.parquet } }
    run: 'test -s inputs/ids.parquet; sh helper.sh > outputs/out'
    files: [helper.sh]
    outputs: { out: tree }
";
    leader.write("files.yaml", pipeline);
    let project = std::fs::read_to_string(leader.path("cuda-agent.yaml")).unwrap();
    leader.write("cuda-agent.yaml", &format!("{project}executor: gpu\n"));
    let _worker = Process::start(&machine, &["worker", "gpu"]);
    let (status, said) = Process::start(&leader, &["run", "files.yaml"]).end();
    assert_eq!(status, 0, "{said}");
    leader.good(&["export", "command", "made"]);
    assert_eq!(std::fs::read_to_string(leader.path("made/out")).unwrap(), "helped with 12\n");
}

fn a_killed_worker_is_replaced(remote: bool) {
    let mut site = Site::new(remote);
    site.before = format!("while [ ! -e {} ]; do sleep 0.05; done", site.path("go").display());
    let (leader, one, two) = (site.leader(), site.gpu_machine(), site.gpu_machine());
    let run = Process::start(&leader, &["run", "p.yaml"]);
    let first = Process::start(&one, &["worker"]);
    until("a program", || site.started() == 1);
    // While one has it, the other leaves it alone.
    let second = Process::start(&two, &["worker"]);
    run.wait_to_say("executes it");
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(site.started(), 1, "{}", second.said());
    first.kill();
    until("another program", || site.started() == 2);
    std::fs::write(site.path("go"), "").unwrap();
    let (status, said) = run.end();
    assert_eq!(status, 0, "{said}");
    assert_eq!(site.started(), 2);
    let records = site.objects("records");
    assert_eq!(records.len(), 3, "one for each stage: {records:?}");
    assert_eq!(site.objects("work"), [""; 0]);
}

#[test]
fn a_killed_worker_is_replaced_over_a_folder() {
    a_killed_worker_is_replaced(false);
}

#[test]
fn a_killed_worker_is_replaced_over_a_server() {
    a_killed_worker_is_replaced(true);
}

/// By-row stages are shared by the leases on parts of their rows: two workers do each row once, and where one is killed, no
/// row is lost.
fn workers_share_rows(remote: bool, is_one_killed: bool) {
    const ROWS: i64 = 64;
    let site = Site::new(remote);
    let done = site.path("rows");
    let machine = || {
        let machine = site.gpu_machine();
        machine.write_squares(&format!("echo $id >> {}; sleep 0.05", done.display()));
        machine.write(
            "rows.yaml",
            "name: rows\nstages: { squares: { uses: my/square, inputs: { rows: { path: ids.parquet } }, executor: gpu } }\n",
        );
        write_ids(&machine.path("ids.parquet"), &(0..ROWS).collect::<Vec<_>>(), "x");
        machine
    };
    let (leader, one, two) = (machine(), machine(), machine());
    let lines = || std::fs::read_to_string(&done).unwrap_or_default().lines().count();
    let workers = [Process::start(&one, &["worker"]), Process::start(&two, &["worker"])];
    workers.iter().for_each(|worker| worker.wait_to_say("worker of executor"));
    let run = Process::start(&leader, &["run", "rows.yaml"]);
    let [first, second] = workers;
    if is_one_killed {
        first.wait_to_say("squares (rows, run");
        until("rows", || lines() >= 8);
        first.kill();
    }
    let (status, said) = run.end();
    assert_eq!(status, 0, "{said}\n{}", second.said());
    let shown: serde_json::Value = serde_json::from_str(&leader.good(&["show", "squares.rows", "--json"])).unwrap();
    assert_eq!(shown["rows"]["rows"], ROWS);
    let text = std::fs::read_to_string(&done).unwrap();
    let mut ids: Vec<i64> = text.lines().map(|line| line.parse().unwrap()).collect();
    if !is_one_killed {
        assert_eq!(ids.len(), ROWS as usize, "each row once");
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids, (0..ROWS).collect::<Vec<_>>());
    assert_eq!(leader.executed(&["rows.yaml"]), [""; 0]);
}

#[test]
fn workers_share_rows_over_a_folder() {
    workers_share_rows(false, false);
}

#[test]
fn workers_share_rows_over_a_server() {
    workers_share_rows(true, false);
}

#[test]
fn rows_of_a_killed_worker_are_done_by_another() {
    workers_share_rows(true, true);
}

/// Workers say how far they are in their reports, which the leader passes on. (A worker writes one every 20 seconds, so this one
/// is edited.)
#[test]
fn how_far_a_worker_is_reaches_the_leader() {
    let site = Site::new(false);
    let leader = site.leader();
    let announced = Process::start(&leader, &["run", "p.yaml"]);
    until("an announcement", || !site.objects("work").is_empty());
    announced.kill();
    let name = PathBuf::from(&site.objects("work")[0]);
    let key = name.file_name().unwrap().to_str().unwrap()[..64].to_owned();

    let machine = site.machine(&["NVIDIA L4"]);
    let worker = Process::start(&machine, &["worker"]);
    until("a report", || !site.objects("workers").is_empty());
    // It lives, and writes nothing over the edit.
    worker.signal(Signal::SIGSTOP);
    let path = PathBuf::from(&site.objects("workers")[0]);
    let mut report: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    report["left"] = serde_json::json!({});
    report["progress"] = serde_json::json!({ key: { "done": 7, "total": 64, "unit": "rows" } });
    std::fs::write(&path, report.to_string()).unwrap();

    let run = Process::start(&leader, &["run", "p.yaml", "--json"]);
    let progress = r#""event":"stage_progress","stage":"measured","done":7,"total":64,"unit":"rows""#;
    until("its progress", || run.printed().contains(progress));
    run.kill();
}

/// A worker with other sources or another device would make another result: it says so, and so does the leader.
#[test]
fn a_worker_that_would_make_another_result_leaves_it() {
    let site = Site::new(false);
    let (leader, right) = (site.leader(), site.gpu_machine());
    let (edited, other, none) = (site.gpu_machine(), site.machine(&["NVIDIA L4"]), site.machine(&[]));
    let updated = site.machine(&["NVIDIA H200, 580.95.05"]);
    edited.write("kinds/gpu/gpu.sh", "echo edited > outputs/out\n");
    let left = [&edited, &other, &updated, &none].map(|machine| Process::start(machine, &["worker"]));
    left.iter().for_each(|worker| worker.wait_to_say("worker of executor"));
    let run = Process::start(&leader, &["run", "p.yaml"]);
    left.iter().for_each(|worker| worker.wait_to_say("left to others"));
    let said: Vec<String> = left
        .iter()
        .map(|worker| worker.said().lines().find(|line| line.contains("left to others")).unwrap().to_owned())
        .collect();
    insta::assert_snapshot!("left_by_workers", said.join("\n"));
    assert_eq!(site.started(), 0);
    let listed = leader.good(&["worker", "--list"]);
    assert_eq!(listed.matches("left: ").count(), 4, "{listed}");
    assert!(
        listed.contains("1 × NVIDIA L4 (driver 580.65.06)") && listed.contains(": idle; last heard of"),
        "{listed}"
    );
    // The leader hears of it within its roll call, and goes on waiting.
    run.wait_to_say("leaves it: this machine would make another result");
    let _worker = Process::start(&right, &["worker"]);
    let (status, said) = run.end();
    assert_eq!(status, 0, "{said}");
    assert_eq!(site.started(), 1);
}

#[test]
fn a_stage_that_no_worker_takes_fails_when_its_time_is_up() {
    let mut site = Site::new(false);
    site.declared = "    wait: 1s\n";
    let error = site.leader().bad(1, &["run", "p.yaml"]);
    let error: Vec<&str> = error.lines().filter(|line| line.contains("no worker of executor")).collect();
    assert!(error.iter().any(|line| line.contains("no worker of executor `gpu` takes it")), "{error:?}");
    assert_eq!(site.objects("work"), [""; 0]);
}

/// A failure comes with its log, and another attempt is the leader's to start.
#[test]
fn a_failure_on_a_worker_is_the_leaders() {
    let mut site = Site::new(false);
    site.before = "echo 'the GPU is on fire'; exit 3".into();
    let (leader, machine) = (site.leader(), site.gpu_machine());
    leader.write("p.yaml", &PIPELINE.replace("executor: gpu", "executor: gpu, retry: { attempts: 1, backoff: 10ms }"));
    let worker = Process::start(&machine, &["worker"]);
    let error = leader.bad(1, &["run", "p.yaml"]);
    assert!(error.contains("exit status 3 (on ") && error.contains("the GPU is on fire"), "{error}");
    assert_eq!(site.started(), 2, "{}", worker.said());
    assert!(leader.good(&["log", "measured"]).contains("the GPU is on fire"));
    assert_eq!((site.objects("work"), site.objects("work-failed")), (Vec::new(), Vec::new()));
}

/// A leader that was silent for long has its announcements removed; when it goes on it makes them again.
#[test]
fn what_was_removed_is_announced_again() {
    let site = Site::new(false);
    let leader = site.leader();
    let run = Process::start(&leader, &["run", "p.yaml"]);
    run.wait_to_say("no worker of executor `gpu` takes it yet");
    std::fs::remove_file(&site.objects("work")[0]).unwrap();
    until("the announcement once more", || !site.objects("work").is_empty());
    let machine = site.gpu_machine();
    let _worker = Process::start(&machine, &["worker"]);
    let (status, said) = run.end();
    assert_eq!(status, 0, "{said}");
}

#[test]
fn nobody_works_for_a_leader_that_is_gone() {
    let site = Site::new(false);
    for (signal, left) in [(Signal::SIGINT, 0), (Signal::SIGKILL, 1)] {
        let leader = site.leader();
        let run = Process::start(&leader, &["run", "p.yaml"]);
        until("an announcement", || site.objects("work").len() == 1);
        run.signal(signal);
        let (status, said) = run.end();
        assert_ne!(status, 0, "{said}");
        assert_eq!(site.objects("work").len(), left, "after {signal}");
    }
    let (status, said) = Process::start(&site.gpu_machine(), &["worker", "--idle", "2s"]).end();
    assert_eq!(status, 0, "{said}");
    assert_eq!((site.started(), site.objects("work")), (0, Vec::new()));
}

/// Whoever ends a worker ends what it executes; the leader waits for another one.
#[test]
fn an_interrupted_worker_leaves_its_work_to_others() {
    let mut site = Site::new(false);
    site.before = format!("while [ ! -e {} ]; do sleep 0.05; done", site.path("go").display());
    let (leader, one, two) = (site.leader(), site.gpu_machine(), site.gpu_machine());
    let run = Process::start(&leader, &["run", "p.yaml"]);
    let first = Process::start(&one, &["worker"]);
    until("a program", || site.started() == 1);
    first.signal(Signal::SIGTERM);
    let (status, said) = first.end();
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("worker ended: 0 executed, 0 failed"), "{said}");
    std::fs::write(site.path("go"), "").unwrap();
    let _second = Process::start(&two, &["worker"]);
    let (status, said) = run.end();
    assert_eq!((status, site.started()), (0, 2), "{said}");
}

/// One machine works at as many stages as its GPUs suffice for, and each of them sees its own.
#[test]
fn a_worker_executes_side_by_side_what_fits_it() {
    let mut site = Site::new(false);
    site.before = format!(
        "touch {0}/at-$CUDA_VISIBLE_DEVICES; while [ $(ls {0} | grep -c at-) -lt 2 ]; do sleep 0.05; done",
        site.folder.path().display()
    );
    let (leader, machine) = (site.leader(), site.machine(&["NVIDIA H200", "NVIDIA H200"]));
    let second = "  more: { uses: my/gpu, inputs: { text: { path: seed.txt } }, executor: gpu }\n";
    leader
        .write("seed.txt", "other\n")
        .write("p.yaml", &format!("{PIPELINE}{}", second.replace("path: seed.txt", "path: p.yaml")));
    let _worker = Process::start(&machine, &["worker"]);
    let (status, said) = Process::start(&leader, &["run", "p.yaml"]).end();
    assert_eq!(status, 0, "{said}");
    let text = std::fs::read_to_string(site.path("done")).unwrap();
    let mut gpus: Vec<&str> = text.lines().collect();
    gpus.sort_unstable();
    assert_eq!(gpus.len(), 2);
    assert_ne!(gpus[0], gpus[1], "each has one of its own");
}

/// A record that was made by an engine with the GPU itself is a hit for a leader without it, and the other way round.
#[test]
fn keys_are_those_of_an_engine_that_has_the_device() {
    let site = Site::new(false);
    let (machine, leader) = (site.gpu_machine(), site.leader());
    machine.write("p.yaml", &PIPELINE.replace(", executor: gpu", ""));
    assert_eq!(machine.executed(&["p.yaml"]), ["start", "measured", "end"]);
    assert_eq!(leader.executed(&["p.yaml"]), [""; 0]);
}

#[test]
fn mistakes_are_told_with_a_hint() {
    let mut site = Site::new(false);
    site.declared = "    resources: { gpu: 4 }\n";
    let sandbox = site.leader();
    let mut told = Vec::new();
    let shared = site.folder.path().display().to_string();
    let mut tell = |status: i32, arguments: &[&str]| {
        told.push(sandbox.bad(status, arguments).replace(&shared, "[shared]"));
    };
    sandbox.write("p.yaml", &PIPELINE.replace("executor: gpu", "executor: gup"));
    tell(2, &["plan", "p.yaml"]);
    tell(2, &["worker", "gup"]);
    tell(2, &["worker", "--offline"]);
    tell(2, &["worker", "--idle", "soon"]);
    sandbox.write("p.yaml", &PIPELINE.replace("executor: gpu", "executor: gpu, resources: { gpu: 8 }"));
    tell(1, &["run", "p.yaml"]);
    sandbox.write("kinds/gpu/stage.yaml", &MANIFEST.replace("gpu: 1", "cpu: 1"));
    sandbox.write("p.yaml", PIPELINE);
    tell(1, &["run", "p.yaml"]);
    let projects = [
        "executor: gpu\n",
        "executors: { local: { kind: workers } }\n",
        "executors: { a: { kind: worker }, b: { kind: slurm } }\nexecutor: c\n",
        "executors: { a: { kind: workers, wait: soon, resources: { gpus: 1 } } }\n",
        "executors: { a: { device: { gpu: NVIDIA H200, driver: 1 } } }\n",
        "executors: { a: { kind: workers, device: { gpu: NVIDIA H200 } }, b: { kind: workers, resources: { gpu: 1 } } }\n",
    ];
    for project in projects {
        sandbox.write("cuda-agent.yaml", project);
        told.push(sandbox.bad(2, &["worker"]));
    }
    sandbox.write("cuda-agent.yaml", "stages: [kinds]\n");
    told.push(sandbox.bad(2, &["worker"]));
    insta::assert_snapshot!("executor_mistakes", told.join("\n---\n"));
}
