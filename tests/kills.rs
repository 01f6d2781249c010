//! kill -9 of the engine at random instants: later runs complete, with the digests of an undisturbed run.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use crate::support::{Random, Sandbox};

/// Trees, tables and rows; a few tens of milliseconds of work each, so that kills hit every phase.
const PIPELINE: &str = "name: p
stages:
  source: { uses: run, run: 'i=0; while [ $i -lt 40 ]; do echo {\\\"id\\\": $i}; i=$((i+1)); done > outputs/rows.jsonl', outputs: { rows: { type: table, columns: { id: int64 } } } }
  squares: { uses: my/square, inputs: { rows: source.rows } }
  folder: { uses: run, run: 'mkdir outputs/out; head -c 300000 /dev/zero > outputs/out/big; for i in 1 2 3; do echo $i > outputs/out/$i; done', outputs: { out: tree } }
  joined: { uses: run, inputs: { t: squares.rows, f: folder.out }, run: 'sleep 0.05; cat inputs/f/1 inputs/f/2 > outputs/out; wc -c < inputs/t.parquet >/dev/null', outputs: { out: tree } }
";

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("cuda-agent.yaml", "stages: [kinds]\n").write_squares("sleep 0.01").write("p.yaml", PIPELINE);
    sandbox
}

fn digests(sandbox: &Sandbox) -> BTreeMap<String, String> {
    let stages = ["source", "squares", "folder", "joined"];
    let digest = |stage: &str| {
        let shown: Value = serde_json::from_str(&sandbox.good(&["show", stage, "--json"])).unwrap();
        let outputs = shown.as_object().unwrap().values().map(|output| output["digest"].to_string());
        outputs.collect::<Vec<_>>().join(",")
    };
    stages.iter().map(|stage| ((*stage).to_owned(), digest(stage))).collect()
}

#[test]
fn fifty_kills_change_nothing() {
    let undisturbed = sandbox();
    undisturbed.good(&["run", "p.yaml"]);
    let expected = digests(&undisturbed);
    let seed = std::env::var("CUDA_AGENT_KILL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20_260_228);
    println!("seed {seed}; set CUDA_AGENT_KILL_SEED for another");
    let mut random = Random(seed);
    let mut kills = 0;
    while kills < 50 {
        let sandbox = sandbox();
        // Several kills of one project, one after another, then a run to the end.
        for _ in 0..5 {
            let mut engine = sandbox.command(&["run", "p.yaml"]).stderr(std::process::Stdio::null()).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(random.below(500)));
            let over = engine.try_wait().unwrap().is_some();
            engine.kill().unwrap();
            engine.wait().unwrap();
            kills += u32::from(!over);
        }
        sandbox.good(&["run", "p.yaml"]);
        assert_eq!(digests(&sandbox), expected);
        assert_eq!(sandbox.executed(&["p.yaml"]), [""; 0]);
    }
}
