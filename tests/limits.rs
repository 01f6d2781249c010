//! Hangs, crashes and limits: what a program, a terminal, a disk or a stranger with write access to the store can do.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::programs::eventually;
use crate::support::{Sandbox, write_ids};

const ONE: &str = "name: p\nstages:\n  a: { uses: run, run: 'echo 1 > outputs/out', outputs: { out: tree } }\n";

fn one() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("p.yaml", ONE);
    sandbox
}

fn full() -> Stdio {
    std::fs::File::options().write(true).open("/dev/full").unwrap().into()
}

/// A pipe that nobody reads.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn a_run_goes_on_whether_or_not_anybody_reads_what_it_prints() {
    for (stdout, stderr, status) in [
        (full(), Stdio::piped(), 3),
        (closed(), Stdio::piped(), 0),
        (Stdio::null(), full(), 0),
        (Stdio::null(), closed(), 0),
        (closed(), closed(), 0),
    ] {
        let sandbox = one();
        let output = sandbox.command(&["run", "p.yaml", "--json"]).stdout(stdout).stderr(stderr).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{told}");
        if status == 3 {
            assert!(told.contains("error: standard output: No space left on device"), "{told}");
        }
        assert!(sandbox.good(&["plan", "p.yaml"]).contains("1 up to date"), "what was asked for is done");
    }
}

#[test]
fn a_lost_terminal_ends_a_run_as_an_interrupt_does() {
    if ignores_hangups() {
        eprintln!("skipped: under nohup the engine goes on, as the next test says");
        return;
    }
    let sandbox = Sandbox::new();
    sandbox.write(
        "p.yaml",
        "name: p\nstages:\n  slow: { uses: run, run: 'touch outputs/began; sleep 600', outputs: { out: tree } }\n",
    );
    let mut engine = sandbox.command(&["run", "p.yaml"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(engine.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(told.any(|line| line.contains("slow: started")));
    kill(Pid::from_raw(engine.id() as i32), Signal::SIGHUP).unwrap();
    // The rest is read, so that the engine never waits for us.
    let rest: Vec<String> = told.collect();
    assert_eq!(engine.wait().unwrap().code(), Some(130), "{rest:?}");
    assert!(sandbox.good(&["runs"]).contains("interrupted"));
}

/// Whether these tests run under `nohup`, which their children inherit.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}

/// `nohup` says that a lost terminal is no reason to end.
#[test]
fn under_nohup_a_lost_terminal_changes_nothing() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "p.yaml",
        "name: p\nstages:\n  slow: { uses: run, run: 'sleep 0.3; echo 1 > outputs/out', outputs: { out: tree } }\n",
    );
    let binary = env!("CARGO_BIN_EXE_cuda-agent");
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" run p.yaml", binary]).current_dir(sandbox.folder.path());
    let mut engine = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(engine.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(told.any(|line| line.contains("slow: started")));
    kill(Pid::from_raw(engine.id() as i32), Signal::SIGHUP).unwrap();
    let rest: Vec<String> = told.collect();
    assert!(engine.wait().unwrap().success(), "{rest:?}");
}

/// Whether a process has a file open, or has written it.
fn has_open(process: u32, name: &str) -> bool {
    let items = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().filter_map(Result::ok);
    items.filter_map(|item| std::fs::read_link(item.path()).ok()).any(|path| path.ends_with(name))
}

/// Holes cost no disk, and take as long to read as anything else.
fn large(sandbox: &Sandbox, name: &str, bytes: u64) {
    std::fs::File::create(sandbox.path(name)).unwrap().set_len(bytes).unwrap();
}

#[test]
fn an_interrupt_is_heard_while_a_large_input_is_read() {
    let sandbox = Sandbox::new();
    large(&sandbox, "large", 200 << 30);
    let stage = "{ uses: run, inputs: { x: { path: large } }, run: 'true', outputs: { out: tree } }";
    sandbox.write("p.yaml", &format!("name: p\nstages:\n  a: {stage}\n"));
    let mut engine = sandbox.command(&["run", "p.yaml"]).stderr(Stdio::null()).spawn().unwrap();
    eventually("the input is read", || has_open(engine.id(), "large"));
    let asked = Instant::now();
    kill(Pid::from_raw(engine.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(engine.wait().unwrap().code(), Some(130));
    assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
}

#[test]
fn a_stage_runs_on_while_the_input_of_another_is_read() {
    let sandbox = Sandbox::new();
    large(&sandbox, "large", 200 << 30);
    sandbox.write(
        "p.yaml",
        "name: p\nstages:\n  a: { uses: run, inputs: { x: { path: large } }, run: 'true', outputs: { out: tree } }\n  \
         b: { uses: run, run: 'echo 1 > outputs/out', outputs: { out: tree } }\n",
    );
    let mut engine = sandbox.command(&["run", "p.yaml"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(engine.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(told.any(|line| line.contains("b: done")), "it is done although the other is read for a minute");
    assert!(told.any(|line| line.starts_with("inputs: reading ") && line.contains("of 200.0 GiB")));
    engine.kill().unwrap();
    engine.wait().unwrap();
}

/// The most memory that a command held at once, in bytes. Python waits for it, since what `wait4` says of a child counts what
/// its parent held when it started it, and these tests hold much.
fn most_memory(sandbox: &Sandbox, arguments: &[&str]) -> u64 {
    const WAIT: &str = "import resource, subprocess, sys\n\
        subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n\
        print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)\n";
    let binary = env!("CARGO_BIN_EXE_cuda-agent");
    let mut python = std::process::Command::new("python3");
    python.args(["-c", WAIT, binary]).args(arguments).current_dir(sandbox.folder.path());
    let output = python.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

/// Many names of one file cost no disk, and take as long to read as many files.
#[test]
fn a_folder_of_small_files_is_never_held_whole() {
    const FILES: u64 = 4000;
    const SIZE: u64 = 60_000;
    let sandbox = Sandbox::new();
    let stage = "{ uses: run, inputs: { x: { path: data } }, run: 'true', outputs: { out: tree } }";
    sandbox.write("p.yaml", &format!("name: p\nstages:\n  a: {stage}\n")).write("data/0", "small");
    let little = most_memory(&sandbox, &["plan", "p.yaml"]);
    sandbox.write("data/0", &"x".repeat(SIZE as usize));
    for number in 1..FILES {
        std::fs::hard_link(sandbox.path("data/0"), sandbox.path(&format!("data/{number}"))).unwrap();
    }
    let much = most_memory(&sandbox, &["plan", "p.yaml"]);
    assert!(much < little + FILES * SIZE / 4, "{much} bytes in place of {little}");
}

/// Clocks overflow somewhere above a hundred years, and what is no longer than that must never panic.
#[test]
fn the_longest_times_are_no_limit_and_longer_ones_are_refused() {
    let sandbox = Sandbox::new();
    let write = |row_timeout_s: &str, timeout: &str| {
        sandbox.write("cuda-agent.yaml", "stages: [kinds]\n").write_squares(":");
        let manifest = std::fs::read_to_string(sandbox.path("kinds/square/stage.yaml")).unwrap();
        let limited = format!("port: rows, row_timeout_s: {row_timeout_s},");
        sandbox.write("kinds/square/stage.yaml", &manifest.replace("port: rows,", &limited));
        sandbox.write(
            "p.yaml",
            &format!(
                "name: p\nstages:\n  s: {{ uses: my/square, inputs: {{ rows: {{ path: ids.parquet }} }}, timeout: {timeout} }}\n  \
                 a: {{ uses: run, run: 'echo 1 > outputs/out', outputs: {{ out: tree }}, timeout: {timeout} }}\n"
            ),
        );
    };
    write_ids(&sandbox.path("ids.parquet"), &[1, 2], "x");
    write("3162240000", "36600d");
    sandbox.good(&["run", "p.yaml"]);
    write("1e300", "36600d");
    assert!(sandbox.bad(2, &["run", "p.yaml"]).contains("`row_timeout_s` is longer than 100 years"));
    write("3162240000", "200000000000000d");
    assert!(sandbox.bad(2, &["run", "p.yaml"]).contains("200000000000000d"));
}

/// The only record in a store.
fn record(sandbox: &Sandbox) -> std::path::PathBuf {
    let below = |folder: std::path::PathBuf| std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    below(below(sandbox.path(".cuda-agent/v1/records")))
}

/// Changes the only record, as whoever can write to the store can.
fn forge(sandbox: &Sandbox, change: impl Fn(&mut Value)) {
    let file = record(sandbox);
    let mut record: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    change(&mut record);
    // Records without a check are of an older version, and are read.
    record.as_object_mut().unwrap().remove("check");
    std::fs::write(&file, serde_json::to_vec(&record).unwrap()).unwrap();
}

#[test]
fn a_forged_name_of_an_output_leads_nowhere() {
    let sandbox = one();
    sandbox.good(&["run", "p.yaml"]);
    for name in ["../../x", "/tmp/x", "..", "a/b", ""] {
        forge(&sandbox, |record| {
            let output = record["outputs"]["out"].clone();
            record["outputs"] = serde_json::json!({ "out": output, name: output });
        });
        let error = sandbox.bad(3, &["export", "a", "deep/er/here", "--pipeline", "p.yaml"]);
        assert!(error.contains("the record of `a` is gone"), "{error}");
        assert!(!sandbox.path("deep/x").exists() && !sandbox.path("x").exists());
        assert!(sandbox.good(&["plan", "p.yaml"]).contains("a  miss"), "it is made once more");
        sandbox.good(&["run", "p.yaml"]);
        sandbox.good(&["export", "a", "here", "--force"]);
        std::fs::remove_dir_all(sandbox.path(".cuda-agent")).unwrap();
        sandbox.good(&["run", "p.yaml"]);
    }
}

#[test]
fn a_record_under_the_key_of_another_is_no_result() {
    let sandbox = one();
    sandbox.good(&["run", "p.yaml"]);
    forge(&sandbox, |record| record["preimage"]["params"] = serde_json::json!({ "other": 1 }));
    assert!(sandbox.good(&["plan", "p.yaml"]).contains("a  miss"));
    let error = sandbox.bad(3, &["export", "a", "here", "--pipeline", "p.yaml"]);
    assert!(error.contains("the record of `a` is gone"), "{error}");
}

#[test]
fn a_tag_is_a_name_and_no_path() {
    let sandbox = one();
    sandbox.good(&["run", "p.yaml"]);
    for tag in ["..@store-id", "..@x", "x@..", ".@x", "a/b@x", "a@b/c"] {
        let error = sandbox.bad(2, &["tag", "a.out", tag, "--pipeline", "p.yaml"]);
        assert!(error.contains("is not NAME@TAG"), "{error}");
        sandbox.write(
            "q.yaml",
            &ONE.replace("uses: run,", &format!("uses: run, inputs: {{ i: {{ artifact: '{tag}' }} }},")),
        );
        assert!(sandbox.bad(2, &["plan", "q.yaml"]).contains("is no `name@tag`"));
    }
    assert!(!sandbox.path(".cuda-agent/v1/tags").exists() && !sandbox.path(".cuda-agent/v1/x").exists());
}

#[test]
fn what_no_program_can_read_is_told_in_words() {
    let sandbox = Sandbox::new();
    sandbox.write("cuda-agent.yaml", "stages: [kinds]\n").write(
        "kinds/a/stage.yaml",
        "name: my/a\nversion: 1.0.0\nsummary: A.\noutputs: { out: { type: tree } }\nrun: [sh, a.sh]\nsources: [a.sh, gone.py]\n",
    );
    sandbox.write("kinds/a/a.sh", "");
    let mut told = vec![sandbox.bad(2, &["stages"])];
    std::fs::remove_file(sandbox.path("cuda-agent.yaml")).unwrap();
    nix::unistd::mkfifo(&sandbox.path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::os::unix::fs::symlink("gone", sandbox.path("link")).unwrap();
    std::fs::create_dir(sandbox.path("folder")).unwrap();
    std::os::unix::fs::symlink("gone", sandbox.path("folder/link")).unwrap();
    for path in ["fifo", "link", "folder"] {
        let input = format!("uses: run, inputs: {{ i: {{ path: {path} }} }},");
        sandbox.write("p.yaml", &ONE.replace("uses: run,", &input));
        told.push(sandbox.bad(if path == "folder" { 1 } else { 2 }, &["run", "p.yaml"]));
    }
    for command in ["mkdir outputs/out; ln -s gone outputs/out/link", "ln -s gone outputs/out", "mkfifo outputs/out"] {
        sandbox.write("p.yaml", &ONE.replace("echo 1 > outputs/out", command));
        told.push(sandbox.bad(1, &["run", "p.yaml"]));
    }
    sandbox.write("p.yaml", &ONE.replace("uses: run,", "uses: run, files: [gone.sh],"));
    told.push(sandbox.bad(2, &["run", "p.yaml"]));
    sandbox.write("p.yaml", &ONE.replace("name: p\n", "name: p\nparams: { rate: 1.5 }\n"));
    told.push(sandbox.bad(2, &["run", "p.yaml", "-p", "rate="]));
    insta::assert_snapshot!(told.join("\n\n"));
}
