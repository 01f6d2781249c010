//! What goes wrong.

use super::*;

pub(super) type Scenario = fn(&mut World);

/// Played first, and once in five rounds only: it is a minute of waiting.
pub(super) const PATIENT: &str = "a server that goes away for good";

pub(super) const SCENARIOS: [(&str, Scenario); 21] = [
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

pub(super) fn engine_killed(world: &mut World, machines: usize) {
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

pub(super) fn programs_killed(world: &mut World) {
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
pub(super) fn descendants(root: u32) -> Vec<nix::unistd::Pid> {
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

pub(super) fn some_faults(world: &mut World, kinds: &[Fault], percent: (u64, u64)) {
    let probability = world.random.between(percent.0, percent.1 + 1) as f64 / 100.0;
    let seed = world.random.next();
    world.proxy.set(Faults { kinds: kinds.to_vec(), probability, seed, ..Faults::default() });
}

pub(super) fn faults(world: &mut World, kinds: &[Fault]) {
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

pub(super) fn faults_and_kills(world: &mut World) {
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

pub(super) fn away_for_a_while(world: &mut World, switch: fn(&Proxy, bool)) {
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

pub(super) fn gone_for_good(world: &mut World) {
    let mut running = world.start(0, "p.yaml");
    let row = world.random.between(1, 20) as usize;
    world.wait_for(&mut running, Moment::Row(row));
    world.proxy.down(true);
    world.tally.faults += 1;
    world.end_troubled(running);
    world.proxy.down(false);
    world.read_something(0);
}

pub(super) fn disk_full(world: &mut World) {
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
pub(super) fn damaged(random: &mut Random, bytes: &[u8]) -> Option<Vec<u8>> {
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

pub(super) fn damage(world: &mut World, far: bool) {
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

pub(super) fn damage_far(world: &mut World) {
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

pub(super) fn damage_near(world: &mut World) {
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
pub(super) fn clocks(world: &mut World) {
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

pub(super) fn shift_clocks(world: &mut World, machine: usize) {
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

pub(super) fn eight_runners(world: &mut World) {
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
pub(super) fn garbage(world: &mut World) {
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
