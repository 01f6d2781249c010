//! One round of a scenario: a bucket behind a proxy, machines, and what may be asked of them.

use super::*;

/// One round of a scenario: a bucket's folder behind a proxy of its own, and machines.
pub(super) struct World {
    pub(super) bucket: Bucket,
    pub(super) folder: String,
    pub(super) proxy: Proxy,
    pub(super) machines: Vec<Sandbox>,
    /// How much of each machine's ledger is accounted for.
    pub(super) ledgers: Vec<usize>,
    pub(super) random: Random,
    pub(super) tally: Tally,
    /// Something was damaged on purpose, so not everything that is there need be whole.
    pub(super) damaged: bool,
    /// Garbage is collected, so not everything that was finished stays.
    pub(super) collected: bool,
    /// A machine's small disk, where it has one.
    pub(super) disk: Option<Disk>,
}

/// A run of the binary that goes on.
pub(super) struct Running {
    pub(super) machine: usize,
    pub(super) pipeline: String,
    pub(super) child: Child,
    pub(super) started: Instant,
    pub(super) before: Finished,
}

/// How a run ended.
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    pub(super) events: Vec<Value>,
    pub(super) stderr: String,
}

impl Ended {
    pub(super) fn is_good(&self) -> bool {
        self.status.success()
    }

    pub(super) fn executed(&self) -> Vec<String> {
        let finished =
            self.events.iter().filter(|event| event["event"] == "stage_finished" && event["outcome"]["is"] == "done");
        finished.map(|event| event["stage"].as_str().unwrap().to_owned()).collect()
    }
}

impl World {
    pub(super) fn new(random: Random) -> Self {
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

    pub(super) fn add_machine(&mut self) -> usize {
        let store = format!("store: {}/{}\n", self.bucket.url, self.folder);
        let mut variables = self.bucket.at(self.proxy.endpoint()).env;
        variables.push(("CUDA_AGENT_GC_GRACE_S".into(), GRACE.as_secs_f64().to_string()));
        self.machines.push(machine(&store, variables));
        self.ledgers.push(0);
        self.machines.len() - 1
    }

    pub(super) fn root(&self, machine: usize) -> PathBuf {
        match &self.disk {
            Some(disk) if machine == 0 => disk.seen(&self.machines[0].path(".cuda-agent")),
            _ => self.machines[machine].path(".cuda-agent"),
        }
    }

    pub(super) fn command(&self, machine: usize, arguments: &[&str]) -> Command {
        let command = self.machines[machine].command(arguments);
        match &self.disk {
            Some(disk) if machine == 0 => disk.wrap(&command),
            _ => command,
        }
    }

    /// Objects of a kind in the bucket.
    pub(super) fn far_objects(&self, kind: &str) -> Vec<(String, Vec<u8>)> {
        let prefix = format!("{}/v1/{kind}", self.folder);
        let names = self.bucket.list(&prefix);
        let read = |name: String| {
            Some((name.strip_prefix(&prefix)?.trim_start_matches('/').to_owned(), self.bucket.get(&name)?.to_vec()))
        };
        names.into_iter().filter_map(read).collect()
    }

    /// What is finished, as this machine can know: in its own folder and in the bucket.
    pub(super) fn finished(&self, machine: usize) -> Finished {
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

    pub(super) fn start(&mut self, machine: usize, pipeline: &str) -> Running {
        let before = self.finished(machine);
        let output = |name: &str| File::create(self.machines[machine].path(name)).unwrap();
        let mut command = self.command(machine, &["run", "--json", pipeline]);
        let child = command.stdout(output("stdout")).stderr(output("stderr")).stdin(Stdio::null()).spawn().unwrap();
        self.tally.runs += 1;
        Running { machine, pipeline: pipeline.to_owned(), child, started: Instant::now(), before }
    }

    /// Waits for the end of a run, and sees whether it did again what was finished.
    pub(super) fn end(&mut self, mut running: Running) -> Ended {
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

    pub(super) fn said(&self, machine: usize) -> String {
        std::fs::read_to_string(self.machines[machine].path("stdout")).unwrap_or_default()
    }

    pub(super) fn account(&mut self, running: &Running, ended: &Ended) {
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
    pub(super) fn run_troubled(&mut self, machine: usize, pipeline: &str) -> Ended {
        let running = self.start(machine, pipeline);
        self.end_troubled(running)
    }

    pub(super) fn end_troubled(&mut self, running: Running) -> Ended {
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
    pub(super) fn run_well(&mut self, machine: usize, pipeline: &str) -> Vec<String> {
        let running = self.start(machine, pipeline);
        let ended = self.end(running);
        assert!(ended.is_good(), "an undisturbed run: {}\n{:?}\n{}", ended.status, ended.events, ended.stderr);
        ended.executed()
    }

    /// A run that finds everything.
    pub(super) fn run_idle(&mut self, machine: usize) {
        let executed = self.run_well(machine, "p.yaml");
        assert!(executed.is_empty(), "the run after that executes {executed:?} on machine {machine}");
    }

    /// Kills a run at a moment, unless it is over by then.
    pub(super) fn kill(&mut self, mut running: Running, moment: Moment) {
        self.wait_for(&mut running, moment);
        let over = running.child.try_wait().unwrap().is_some();
        running.child.kill().unwrap();
        self.tally.kills += u64::from(!over);
        self.end(running);
    }

    pub(super) fn wait_for(&mut self, running: &mut Running, moment: Moment) {
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

    pub(super) fn moment(&mut self) -> Moment {
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
    pub(super) fn read_something(&mut self, machine: usize) {
        let stage = self.random.one(&STAGES);
        self.export(machine, stage);
    }

    /// A command that only looks; whether it was successful.
    pub(super) fn look(&self, machine: usize, arguments: &[&str]) -> bool {
        let output = self.command(machine, arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(0..=3)), "{arguments:?}: {}: {error}", output.status);
        assert!(output.status.success() || error.contains("error: "), "{arguments:?} failed without a word");
        output.status.success()
    }

    pub(super) fn export(&mut self, machine: usize, stage: &str) -> bool {
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
    pub(super) fn audit(&mut self) {
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
    pub(super) fn calm(&mut self) {
        self.tally.faults += self.proxy.counts().faults.values().sum::<u64>();
        self.proxy.take_counts();
        self.proxy.set(Faults::default());
        self.proxy.deny_writes(false);
        self.proxy.down(false);
    }

    /// After whatever happened: runs complete and then find everything, on the machines that were there and on a new one,
    /// and all that can be read is right.
    pub(super) fn conclude(&mut self) {
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
pub(super) enum Moment {
    /// So long after its start.
    After(Duration),
    /// When so many requests have come that contain this.
    Request(&'static str, usize),
    /// When so many rows have been begun.
    Row(usize),
}
