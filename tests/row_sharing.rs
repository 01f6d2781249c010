//! Engines that share the rows of a stage, as processes over a folder and over an S3 server: each row is done once.
//!
//! `make rows` runs every combination at length, with 2,560 rows.

use std::path::Path;

use crate::support::s3::S3Server;
use crate::support::{Sandbox, write_ids};

/// Says in a file what it does, which is the only count that nobody can get wrong.
const PROGRAM: &str = r#"
import json, os, sys, time
events = os.fdopen(int(os.environ["CUDA_AGENT_EVENTS_FD"]), "w", buffering=1)
done = os.open("DONE", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for line in sys.stdin:
    row = json.loads(line)
    number = row["columns"]["id"]
    os.write(done, b"%d\n" % number)
    time.sleep(0.002)
    made = {"rows": [{"square": number * number}]}
    events.write(json.dumps({"event": "row", "row": row["row"], "status": "done", "outputs": made}) + "\n")
"#;

const PIPELINE: &str = "name: sharing\nstages: { r: { uses: my/rows, inputs: { rows: { path: ids.parquet } } } }\n";

/// How a stage is shared.
#[derive(Clone, Copy, Debug)]
struct Sharing {
    engines: usize,
    window: u32,
    remote: bool,
    rows: i64,
}

impl Sharing {
    /// Runs the engines at once; how many rows were executed, after looking that each was.
    fn executions(self) -> usize {
        let folder = tempfile::tempdir().unwrap();
        let done = folder.path().join("done");
        let bucket = self.remote.then(|| S3Server::seaweed().bucket());
        let machine = || {
            let mut sandbox = Sandbox::new();
            let store = bucket.as_ref().map(|bucket| format!("store: {}/team\n", bucket.url)).unwrap_or_default();
            sandbox.variables = bucket.as_ref().map(|bucket| bucket.env.clone()).unwrap_or_default();
            sandbox.write("cuda-agent.yaml", &format!("{store}stages: [kinds]\n"));
            self.prepare(&sandbox, &done);
            sandbox
        };
        // Over a folder they share all of it; over S3, each is a machine.
        let machines: Vec<Sandbox> = (0..if self.remote { self.engines } else { 1 }).map(|_| machine()).collect();
        std::thread::scope(|scope| {
            for engine in 0..self.engines {
                let machine = &machines[engine % machines.len()];
                scope.spawn(move || machine.good(&["run", "p.yaml"]));
            }
        });
        let text = std::fs::read_to_string(&done).unwrap();
        let mut ids: Vec<i64> = text.lines().map(|line| line.parse().unwrap()).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids, (0..self.rows).collect::<Vec<_>>());
        count
    }

    fn prepare(self, sandbox: &Sandbox, done: &Path) {
        let manifest = format!(
            "name: my/rows\nversion: 1.0.0\nsummary: Squares.\ninputs: {{ rows: {{ type: table, columns: {{ id: int64 }} }} }}\n\
             outputs: {{ rows: {{ type: table, columns: [ {{ name: square, type: int64 }} ] }} }}\n\
             by_row: {{ port: rows, workers: 2, window: {} }}\nrun: [python, rows.py]\nsources: [rows.py]\n",
            self.window
        );
        sandbox.write("kinds/rows/stage.yaml", &manifest);
        sandbox.write("kinds/rows/rows.py", &PROGRAM.replace("DONE", &done.display().to_string()));
        sandbox.write("p.yaml", PIPELINE);
        write_ids(&sandbox.path("ids.parquet"), &(0..self.rows).collect::<Vec<_>>(), "x");
    }
}

#[test]
fn engines_that_share_a_folder_do_each_row_once() {
    assert_eq!(Sharing { engines: 4, window: 2, remote: false, rows: 320 }.executions(), 320);
}

#[test]
fn engines_that_share_a_server_do_each_row_once() {
    assert_eq!(Sharing { engines: 3, window: 64, remote: true, rows: 320 }.executions(), 320);
}

/// The bar: `CUDA_AGENT_ROW_SHARING` times each combination.
#[test]
fn each_row_is_done_once_at_length() {
    let Some(times) = std::env::var("CUDA_AGENT_ROW_SHARING").ok().and_then(|times| times.parse::<usize>().ok()) else {
        return;
    };
    const ROWS: i64 = 2560;
    let mut wrong = Vec::new();
    for (remote, window, engines) in
        [false, true].iter().flat_map(|remote| [2, 64].iter().flat_map(move |w| [2, 4, 12].map(|e| (*remote, *w, e))))
    {
        let sharing = Sharing { engines, window, remote, rows: ROWS };
        let started = std::time::Instant::now();
        let counts: Vec<usize> = (0..times).map(|_| sharing.executions()).collect();
        let exact = counts.iter().filter(|count| **count == ROWS as usize).count();
        let most = counts.iter().max().copied().unwrap_or_default();
        let took = started.elapsed().as_secs_f64() / times as f64;
        let place = if remote { "S3" } else { "folder" };
        println!(
            "{place:<6}  window {window:>2}  {engines:>2} engines: {exact} of {times} exact, most {most}, {took:.1} s each"
        );
        if exact < times {
            wrong.push((sharing, counts));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}
