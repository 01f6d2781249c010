//! Real processes: what the supervisor claims, one test a claim.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::support::Sandbox;

/// Whether any process has this text among its arguments.
pub fn lives(mark: &str) -> bool {
    let items = std::fs::read_dir("/proc").unwrap();
    items.filter_map(Result::ok).any(|item| {
        let state = std::fs::read_to_string(item.path().join("stat")).unwrap_or_default();
        let zombie = state.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'));
        let line = std::fs::read(item.path().join("cmdline")).unwrap_or_default();
        !zombie && String::from_utf8_lossy(&line).replace('\0', " ").contains(mark)
    })
}

/// Waits until a condition holds; tests never sleep for longer than they need.
pub fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}: not within 60 s");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A number of seconds that no other test sleeps for, so that its `sleep` can be found among all processes.
fn mark() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("9{:05}{:02}", std::process::id() % 100_000, NEXT.fetch_add(1, Ordering::Relaxed))
}

fn sandbox(command: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    let stage = format!("uses: run\n    run: {command:?}\n    outputs: {{ out: tree }}\n");
    sandbox.write("p.yaml", &format!("name: p\nstages:\n  a:\n    {stage}"));
    sandbox
}

/// Both ways of the supervisor: with namespaces and without.
fn both_ways(test: impl Fn(&mut Sandbox, &str), command: impl Fn(&str) -> String) {
    for plain in [false, true] {
        let mark = mark();
        let mut sandbox = sandbox(&command(&mark));
        if plain {
            sandbox.variables.push(("CUDA_AGENT_NO_NAMESPACES".into(), "1".into()));
        }
        test(&mut sandbox, &mark);
    }
}

#[test]
fn what_a_program_leaves_behind_dies_with_it() {
    both_ways(
        |sandbox, mark| {
            sandbox.good(&["run", "p.yaml"]);
            assert!(!lives(mark));
        },
        |mark| format!("setsid sleep 1{mark} & sleep {mark} & echo ok > outputs/out"),
    );
}

#[test]
fn a_killed_engine_leaves_no_child_alive() {
    both_ways(
        |sandbox, mark| {
            let mut engine = sandbox.command(&["run", "p.yaml"]).spawn().unwrap();
            eventually("the program starts", || lives(&format!("sleep {mark}")) && lives(&format!("sleep 1{mark}")));
            engine.kill().unwrap();
            engine.wait().unwrap();
            eventually("its processes die", || !lives(mark));
        },
        |mark| format!("(setsid sleep 1{mark} &); sleep {mark}; echo ok > outputs/out"),
    );
}

#[test]
fn ctrl_c_stops_children_and_keeps_what_is_done() {
    both_ways(
        |sandbox, mark| {
            sandbox.write(
                "p.yaml",
                &format!(
                    "name: p\nstages:\n  done: {{ uses: run, run: \"echo 1 > outputs/out\", outputs: {{ out: tree }} }}\n  \
                     slow: {{ uses: run, inputs: {{ x: done.out }}, run: \"sleep {mark}\", outputs: {{ out: tree }} }}\n"
                ),
            );
            let mut engine = sandbox.command(&["run", "p.yaml"]).spawn().unwrap();
            eventually("the program starts", || lives(&format!("sleep {mark}")));
            let engine_id = nix::unistd::Pid::from_raw(engine.id() as i32);
            nix::sys::signal::kill(engine_id, nix::sys::signal::Signal::SIGINT).unwrap();
            assert_eq!(engine.wait().unwrap().code(), Some(130));
            assert!(!lives(&format!("sleep {mark}")));
            let plan = sandbox.good(&["plan", "p.yaml"]);
            assert!(plan.contains("done  hit") && plan.contains("slow  miss"), "{plan}");
            assert!(sandbox.good(&["runs"]).contains("interrupted"));
        },
        |_| "true".to_owned(),
    );
}

#[test]
fn a_program_that_ignores_the_request_is_killed_after_the_grace_period() {
    both_ways(
        |sandbox, mark| {
            let mut engine = sandbox.command(&["run", "p.yaml"]).spawn().unwrap();
            eventually("the program starts", || lives(&format!("sleep {mark}")));
            let engine_id = nix::unistd::Pid::from_raw(engine.id() as i32);
            nix::sys::signal::kill(engine_id, nix::sys::signal::Signal::SIGTERM).unwrap();
            assert_eq!(engine.wait().unwrap().code(), Some(130));
            assert!(!lives(mark));
        },
        |mark| format!("trap '' TERM INT; (trap '' TERM; sleep {mark}); sleep {mark}"),
    );
}

#[test]
fn exit_statuses_and_signals_are_told_as_they_were() {
    for (command, told) in [
        ("exit 7", "a: failed: exit status 7"),
        ("kill -SEGV $$", "a: failed: killed by SIGSEGV"),
        // A real-time signal, which has no name.
        ("kill -40 $$", "a: failed: killed by signal 40"),
        ("kill -KILL $$", "a: failed: killed by SIGKILL (out of memory?)"),
        ("no-such-command-here", "a: failed: the command could not be started (exit status 127)"),
    ] {
        for plain in [false, true] {
            let mut sandbox = sandbox(command);
            if plain {
                sandbox.variables.push(("CUDA_AGENT_NO_NAMESPACES".into(), "1".into()));
            }
            let error = sandbox.bad(1, &["run", "p.yaml"]);
            assert!(error.contains(told), "{command}: {error}");
        }
    }
}

#[test]
fn the_server_of_supervisors_may_be_killed_meanwhile() {
    let mut sandbox = Sandbox::new();
    // The parent of the program's parent, which is to be seen where there are no namespaces.
    let kill = "read -r _ _ _ server rest < /proc/$PPID/stat; tr '\\0' ' ' < /proc/$server/cmdline > outputs/out; kill -9 $server";
    sandbox.write(
        "p.yaml",
        &format!(
            "name: p\nstages:\n  a: {{ uses: run, run: {kill:?}, outputs: {{ out: tree }} }}\n  \
             b: {{ uses: run, inputs: {{ x: a.out }}, run: \"cp inputs/x outputs/out\", outputs: {{ out: tree }} }}\n"
        ),
    );
    sandbox.variables.push(("CUDA_AGENT_NO_NAMESPACES".into(), "1".into()));
    assert_eq!(sandbox.executed(&["p.yaml"]), ["a", "b"]);
    sandbox.good(&["export", "b.out", "seen"]);
    let seen = std::fs::read_to_string(sandbox.path("seen/out")).unwrap();
    assert!(seen.ends_with("supervise serve "), "{seen}");
}

#[test]
fn a_killed_supervisor_fails_its_stage_alone() {
    // Nothing but the shell itself, which dies with its parent: without namespaces its children would not.
    let mut sandbox = sandbox("kill -9 $PPID; while :; do :; done");
    sandbox.variables.push(("CUDA_AGENT_NO_NAMESPACES".into(), "1".into()));
    let error = sandbox.bad(1, &["run", "p.yaml"]);
    assert!(error.contains("a: failed: killed by SIGKILL"), "{error}");
}

#[test]
fn a_timeout_ends_everything_the_stage_started() {
    let mark = mark();
    let sandbox = sandbox(&format!("setsid sleep 3{mark} & sleep 4{mark}"));
    let text = std::fs::read_to_string(sandbox.path("p.yaml")).unwrap();
    sandbox.write("p.yaml", &text.replace("    outputs:", "    timeout: 500ms\n    outputs:"));
    let error = sandbox.bad(1, &["run", "p.yaml"]);
    assert!(error.contains("a: failed: timed out after [number] s"), "{error}");
    eventually("its processes die", || !lives(&mark));
}

#[test]
fn a_program_sees_only_what_is_declared() {
    let mut sandbox = sandbox("env | cut -d= -f1 | sort > outputs/out");
    sandbox.variables.push(("UNDECLARED".into(), "1".into()));
    let text = std::fs::read_to_string(sandbox.path("p.yaml")).unwrap();
    sandbox.write("p.yaml", &text.replace("    outputs:", "    env: { DECLARED: '1' }\n    outputs:"));
    sandbox.good(&["run", "p.yaml"]);
    sandbox.good(&["export", "a.out", "seen"]);
    let seen = std::fs::read_to_string(sandbox.path("seen/out")).unwrap();
    assert!(seen.contains("\nDECLARED\n") && !seen.contains("UNDECLARED"), "{seen}");
}

#[test]
fn a_command_gets_its_declared_files_and_no_others() {
    let sandbox = sandbox("sh scripts/make.sh > outputs/out; test ! -e other.sh");
    sandbox.write("scripts/make.sh", "echo made").write("other.sh", "");
    let text = std::fs::read_to_string(sandbox.path("p.yaml")).unwrap();
    sandbox.write("p.yaml", &text.replace("    outputs:", "    files: [scripts]\n    outputs:"));
    assert_eq!(sandbox.executed(&["p.yaml"]), ["a"]);
    assert_eq!(sandbox.executed(&["p.yaml"]), [""; 0]);
    sandbox.write("scripts/make.sh", "echo made otherwise");
    let plan = sandbox.good(&["plan", "p.yaml"]);
    assert!(plan.contains("program changed: scripts/make.sh"), "{plan}");
}

#[test]
fn a_stage_kind_in_a_folder_needs_nothing_recompiled() {
    let sandbox = Sandbox::new();
    sandbox
        .write("cuda-agent.yaml", "stages: [kinds]\n")
        .write(
            "kinds/square/stage.yaml",
            "name: my/square\nversion: 1.0.0\nsummary: Squares.\ninputs: { rows: { type: table, columns: { id: int64 } } }\n\
             outputs: { rows: { type: table, columns: [ { name: square, type: int64 } ] } }\n\
             by_row: { port: rows }\nrun: [python, square.py]\nsources: [square.py, ../helper.py]\n",
        )
        .write("kinds/helper.py", "def square(x):\n    return x * x\n")
        .write(
            "kinds/square/square.py",
            "import cuda_agent_stage as stage\nfrom helper import square\n\ndef work(program):\n    for row in program.rows():\n        \
             program.answer(row, {'rows': [{'square': square(row['columns']['id'])}]})\n\nstage.main(work)\n",
        )
        .write("p.yaml", "name: p\nstages: { s: { uses: my/square, inputs: { rows: { path: ids.parquet } } } }\n");
    crate::support::write_ids(&sandbox.path("ids.parquet"), &[2, 3, 3], "x");
    let events = sandbox.good(&["run", "p.yaml", "--json"]);
    assert!(events.contains(r#""rows":{"total":3,"executed":2,"reused":0"#), "{events}");
    let shown = sandbox.good(&["show", "s.rows", "--json"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let squares: Vec<_> = shown["rows"]["head"].as_array().unwrap().iter().map(|row| row["square"].clone()).collect();
    assert_eq!(squares, [4, 9, 9]);
    sandbox.write("kinds/helper.py", "def square(x):\n    return x ** 2\n");
    let plan = sandbox.good(&["plan", "p.yaml"]);
    assert!(plan.contains("program changed: helper.py"), "{plan}");
}

#[test]
fn an_output_that_is_a_link_takes_nobodys_files() {
    let sandbox = sandbox("ln -s \"$MINE\" outputs/out");
    sandbox.write("mine/weights.bin", &"x".repeat(100_000));
    let text = std::fs::read_to_string(sandbox.path("p.yaml")).unwrap();
    let mine = sandbox.path("mine").display().to_string();
    sandbox.write("p.yaml", &text.replace("    outputs:", &format!("    env: {{ MINE: {mine} }}\n    outputs:")));
    let error = sandbox.bad(1, &["run", "p.yaml"]);
    assert!(error.contains("it is a link to") && error.contains("copy what it points to"), "{error}");
    assert!(sandbox.path("mine/weights.bin").exists());
}

#[test]
fn links_and_second_names_inside_an_output_are_copied() {
    let command = "mkdir outputs/out; head -c 100000 /dev/zero > outputs/out/big; ln -s big outputs/out/link; \
                   ln outputs/out/big tmp/other; ln outputs/out/big outputs/out/twin";
    let sandbox = sandbox(command);
    sandbox.good(&["run", "p.yaml"]);
    sandbox.good(&["export", "a.out", "there"]);
    for name in ["big", "link", "twin"] {
        assert_eq!(std::fs::metadata(sandbox.path("there").join(name)).unwrap().len(), 100_000);
    }
}

#[test]
fn a_pipe_as_a_table_is_refused() {
    let sandbox = sandbox("mkfifo outputs/out.parquet");
    let text = std::fs::read_to_string(sandbox.path("p.yaml")).unwrap();
    sandbox.write("p.yaml", &text.replace("out: tree", "out: { type: table, columns: { n: int64 } }"));
    let error = sandbox.bad(1, &["run", "p.yaml"]);
    assert!(error.contains("output `out`: it is a FIFO (a named pipe)"), "{error}");
}

#[test]
fn a_flood_of_events_does_not_drown_ctrl_c() {
    let sandbox = sandbox(r#"while true; do echo '{"event":"progress","done":1,"total":null,"unit":"x"}' >&3; done"#);
    let mut engine = sandbox.command(&["run", "p.yaml"]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let started = Instant::now();
    let engine_id = nix::unistd::Pid::from_raw(engine.id() as i32);
    nix::sys::signal::kill(engine_id, nix::sys::signal::Signal::SIGINT).unwrap();
    assert_eq!(engine.wait().unwrap().code(), Some(130));
    // One that drowned would never end; on a busy machine a few seconds are not too many.
    assert!(started.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_by_row_program_that_answers_nonsense_fails_at_once() {
    let sandbox = Sandbox::new();
    sandbox
        .write("cuda-agent.yaml", "stages: [kinds]\n")
        .write(
            "kinds/bad/stage.yaml",
            "name: my/bad\nversion: 1.0.0\nsummary: Bad.\ninputs: { rows: { type: table, columns: { id: int64 } } }\n\
             outputs: { rows: { type: table, columns: [ { name: x, type: int64 } ] } }\nby_row: { port: rows }\n\
             run: [sh, bad.sh]\nsources: [bad.sh]\n",
        )
        .write("kinds/bad/bad.sh", "read line; echo not json >&3; sleep 1000\n")
        .write("p.yaml", "name: p\nstages: { s: { uses: my/bad, inputs: { rows: { path: ids.parquet } } } }\n");
    crate::support::write_ids(&sandbox.path("ids.parquet"), &[2, 3], "x");
    let error = sandbox.bad(1, &["run", "p.yaml"]);
    assert!(error.contains("a line of its events is not an event"), "{error}");
}
