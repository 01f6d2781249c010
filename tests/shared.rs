//! Several machines and one bucket, on a real S3 server. A machine is a folder: all that it shares with the others is the bucket.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::Sandbox;
use crate::support::azure::Azurite;
use crate::support::proxy::{Faults, Proxy};
use crate::support::s3::{Bucket, S3Server};

const CHAIN: &str = "name: p
stages:
  a: { uses: run, run: 'echo 1 > outputs/out', outputs: { out: tree } }
  b: { uses: run, inputs: { a: a.out }, run: 'mkdir outputs/out; cat inputs/a inputs/a > outputs/out/twice; head -c 200000 /dev/zero > outputs/out/big', outputs: { out: tree } }
  c: { uses: run, inputs: { b: b.out }, run: 'wc -c < inputs/b/big > outputs/out', outputs: { out: tree } }
";

/// A machine that shares `store`.
pub fn machine_at(bucket: &Bucket, store: &str) -> Sandbox {
    let mut sandbox = Sandbox::new();
    sandbox.variables = bucket.env.clone();
    sandbox.write("cuda-agent.yaml", &format!("store: {store}\nstages: [kinds]\n"));
    sandbox.write_squares(":").write("p.yaml", CHAIN);
    sandbox
}

/// A machine that shares a folder of a bucket.
pub fn machine(bucket: &Bucket) -> Sandbox {
    machine_at(bucket, &format!("{}/team", bucket.url))
}

/// Logical digests of what the stages made.
pub fn digests(sandbox: &Sandbox, stages: &[&str]) -> BTreeMap<String, String> {
    let digest = |stage: &str| {
        let shown: Value = serde_json::from_str(&sandbox.good(&["show", stage, "--json"])).unwrap();
        let outputs = shown.as_object().unwrap().values().map(|output| output["digest"].to_string());
        outputs.collect::<Vec<_>>().join(",")
    };
    stages.iter().map(|stage| ((*stage).to_owned(), digest(stage))).collect()
}

fn rows(count: usize) -> String {
    format!(
        "name: rows
stages:
  source: {{ uses: run, run: 'i=0; while [ $i -lt {count} ]; do echo \"{{\\\"id\\\": $i}}\"; i=$((i+1)); done > outputs/rows.jsonl', outputs: {{ rows: {{ type: table, columns: {{ id: int64 }} }} }} }}
  squares: {{ uses: my/square, inputs: {{ rows: source.rows }} }}
"
    )
}

/// What a run said of the rows of its stage.
fn row_counts(sandbox: &Sandbox, stage: &str) -> (u64, u64) {
    let text = sandbox.good(&["run", "rows.yaml", "--json"]);
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut finished = events.filter(|event| event["event"] == "stage_finished" && event["stage"] == stage);
    let rows = finished.next().expect("the stage ran")["rows"].clone();
    (rows["executed"].as_u64().unwrap(), rows["reused"].as_u64().unwrap())
}

#[test]
fn a_second_machine_executes_nothing_and_brings_only_what_it_needs() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    assert_eq!(one.executed(&["p.yaml"]), ["a", "b", "c"]);
    assert_eq!(two.executed(&["p.yaml"]), [""; 0]);
    assert!(!two.path(".cuda-agent/v1/blobs").exists(), "nothing asked for what is in them");
    two.good(&["export", "c", "made"]);
    assert_eq!(std::fs::read_to_string(two.path("made/out")).unwrap().trim(), "200000");
    assert_eq!(digests(&one, &["a", "b", "c"]), digests(&two, &["a", "b", "c"]));
    // A stage after it needs the tree: it comes whole.
    two.write("p.yaml", &CHAIN.replace("wc -c < inputs/b/big", "cat inputs/b/twice"));
    assert_eq!(two.executed(&["p.yaml"]), ["c"]);
    two.good(&["export", "c", "again"]);
    assert_eq!(std::fs::read_to_string(two.path("again/out")).unwrap(), "1\n1\n");
}

#[test]
fn a_second_machine_pulls_a_thousand_rows_and_executes_ten() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    one.write("rows.yaml", &rows(1000));
    assert_eq!(row_counts(&one, "squares"), (1000, 0));
    two.write("rows.yaml", &rows(1010));
    assert_eq!(row_counts(&two, "squares"), (10, 1000));
    let table: Value = serde_json::from_str(&two.good(&["show", "squares.rows", "--json"])).unwrap();
    assert_eq!(table["rows"]["rows"], 1010);
}

#[test]
fn what_was_made_offline_is_shared_by_the_next_run() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two, three) = (machine(&bucket), machine(&bucket), machine(&bucket));
    one.good(&["run", "p.yaml"]);
    two.good(&["pull", "--pipeline", "p.yaml"]);
    let nowhere = vec![("AWS_ENDPOINT_URL".to_owned(), "http://127.0.0.1:9".to_owned())];
    let mut away = two;
    let there = std::mem::replace(&mut away.variables, nowhere);
    assert_eq!(away.executed(&["p.yaml", "--offline"]), [""; 0], "pulled");
    away.good(&["export", "b", "tree", "--offline"]);
    away.write("p.yaml", &CHAIN.replace("echo 1", "echo 2"));
    assert_eq!(away.executed(&["p.yaml", "--offline"]), ["a", "b", "c"]);
    away.variables = there;
    assert_eq!(away.executed(&["p.yaml"]), [""; 0]);
    three.write("p.yaml", &CHAIN.replace("echo 1", "echo 2"));
    assert_eq!(three.executed(&["p.yaml"]), [""; 0]);
}

#[test]
fn what_is_tagged_is_for_everybody() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    one.good(&["run", "p.yaml", "--offline"]);
    one.good(&["tag", "b.out", "data@v1"]);
    two.good(&["export", "data@v1", "data"]);
    assert_eq!(std::fs::read_to_string(two.path("data/twice")).unwrap(), "1\n1\n");
    two.write(
        "q.yaml",
        "name: q\nstages: { x: { uses: run, inputs: { d: { artifact: data@v1 } }, run: 'cat inputs/d/twice > outputs/out', outputs: { out: tree } } }\n",
    );
    assert_eq!(two.executed(&["q.yaml"]), ["x"]);
    two.good(&["pull", "data@v1"]);
    let missing = two.bad(2, &["pull", "data@v2"]);
    assert!(missing.contains("nothing is tagged data@v2"), "{missing}");
}

#[test]
fn push_shares_what_was_made_elsewhere() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    one.write("rows.yaml", &rows(50));
    one.good(&["run", "p.yaml", "--offline"]);
    one.good(&["run", "rows.yaml", "--offline"]);
    let said = one.good(&["push", "--pipeline", "p.yaml"]);
    assert!(said.starts_with("3 of 3 results pushed"), "{said}");
    let said = one.good(&["push", "--all"]);
    assert!(said.starts_with("2 of 5 results pushed") && said.contains("3 were there"), "{said}");
    assert_eq!(two.executed(&["p.yaml"]), [""; 0]);
    two.write("rows.yaml", &rows(51));
    assert_eq!(row_counts(&two, "squares"), (1, 50), "single rows were pushed too");
}

#[test]
fn a_server_that_ignores_conditions_is_refused_unless_one_writes() {
    let server = S3Server::rclone();
    let bucket = server.bucket();
    let one = machine(&bucket);
    let refused = one.bad(3, &["run", "p.yaml"]);
    assert!(refused.contains("ignores If-None-Match") && refused.contains("single_writer: true"), "{refused}");
    let doctor = one.output(&["doctor"]);
    assert!(String::from_utf8_lossy(&doctor.stdout).contains("overwrites what create-if-absent should keep"));
    assert!(bucket.list("team").is_empty(), "nothing is left there: {:?}", bucket.list("team"));
    one.write("cuda-agent.yaml", &format!("store: {}/team\nsingle_writer: true\n", bucket.url));
    assert_eq!(one.executed(&["p.yaml"]), ["a", "b", "c"]);
    let two = machine(&bucket);
    two.write("cuda-agent.yaml", &format!("store: {}/team\nsingle_writer: true\n", bucket.url));
    assert_eq!(two.executed(&["p.yaml"]), [""; 0]);
}

#[test]
fn credentials_show_nowhere() {
    let bucket = S3Server::seaweed().bucket();
    let one = machine(&bucket);
    one.good(&["run", "p.yaml"]);
    let secrets: Vec<&str> =
        bucket.env.iter().filter(|(name, _)| name.contains("KEY")).map(|(_, value)| value.as_str()).collect();
    assert_eq!(secrets.len(), 2);
    let holds =
        |bytes: &[u8]| secrets.iter().any(|secret| bytes.windows(secret.len()).any(|part| part == secret.as_bytes()));
    for name in bucket.list("") {
        assert!(!holds(&bucket.get(&name).unwrap_or_default()), "{name}");
    }
    let mut folders = vec![one.path(".cuda-agent")];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for item in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            if item.path().is_dir() {
                folders.push(item.path());
            } else {
                files += 1;
                assert!(!holds(&std::fs::read(item.path()).unwrap()), "{}", item.path().display());
            }
        }
    }
    assert!(files > 10);
    // Nor does a program see them.
    one.write("p.yaml", "name: p\nstages: { e: { uses: run, run: 'env > outputs/out', outputs: { out: tree } } }\n");
    one.good(&["run", "p.yaml"]);
    one.good(&["export", "e", "made"]);
    assert!(!holds(&std::fs::read(one.path("made/out")).unwrap()));
}

#[test]
fn eight_runners_at_once_make_everything_once() {
    let bucket = S3Server::seaweed().bucket();
    let slow = CHAIN.replace("echo 1", "sleep 1; echo 1").replace("wc -c", "sleep 1; wc -c");
    let machines: Vec<Sandbox> = (0..8).map(|_| machine(&bucket)).collect();
    for machine in &machines {
        machine.write("p.yaml", &slow);
    }
    let executed: Vec<Vec<String>> = std::thread::scope(|scope| {
        let runs: Vec<_> = machines.iter().map(|machine| scope.spawn(|| machine.executed(&["p.yaml"]))).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    let mut all: Vec<String> = executed.into_iter().flatten().collect();
    all.sort();
    assert_eq!(all, ["a", "b", "c"]);
    let first = digests(&machines[0], &["a", "b", "c"]);
    assert!(machines.iter().all(|machine| digests(machine, &["a", "b", "c"]) == first));
    assert!(bucket.list("team/v1/leases").is_empty());
}

#[test]
fn two_runners_share_the_rows_of_a_stage() {
    let bucket = S3Server::seaweed().bucket();
    let machines = [machine(&bucket), machine(&bucket)];
    let slow = |machine: &Sandbox| {
        let script = std::fs::read_to_string(machine.path("kinds/square/square.sh")).unwrap();
        machine.write("kinds/square/square.sh", &script.replace("  printf", "  sleep 0.02\n  printf"));
        machine.write("rows.yaml", &rows(200));
    };
    machines.iter().for_each(slow);
    machines[0].good(&["run", "rows.yaml", "source"]);
    let counts: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let run = |machine| {
            scope.spawn(move || {
                let machine: &Sandbox = machine;
                let text = machine.good(&["run", "rows.yaml", "--json"]);
                let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
                let rows = events
                    .filter(|event| event["event"] == "stage_finished")
                    .find_map(|event| Some((event["rows"]["executed"].as_u64()?, event["rows"]["reused"].as_u64()?)));
                rows.unwrap_or((0, 200))
            })
        };
        let runs: Vec<_> = machines.iter().map(run).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    let segments = bucket.list("team/v1/rows");
    assert!(!segments.is_empty());
    let first = digests(&machines[0], &["squares"]);
    assert_eq!(digests(&machines[1], &["squares"]), first);
    // One of them may find the other's record: then it says nothing of the rows that it did. `row_sharing` counts all.
    assert!(counts.iter().map(|(executed, _)| executed).sum::<u64>() <= 200, "{counts:?}");
}

#[test]
fn running_again_tells_what_can_be_reproduced_and_leaves_no_trace() {
    let bucket = S3Server::seaweed().bucket();
    let one = machine(&bucket);
    one.write("p.yaml", &CHAIN.replace("wc -c < inputs/b/big", "date +%N"));
    one.write("rows.yaml", &rows(200));
    one.good(&["run", "p.yaml"]);
    one.good(&["run", "rows.yaml"]);
    let names = || (bucket.list(""), one.good(&["runs", "--json"]));
    let before = names();
    let good = one.good(&["verify", "--pipeline", "p.yaml", "a", "b"]);
    assert_eq!(good, "a: same\nb: same\n");
    let output = one.output(&["verify", "--pipeline", "p.yaml", "c"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "c: differs\n  out: files changed: (the file itself)\n");
    let rows: Value =
        serde_json::from_str(&one.good(&["verify", "--pipeline", "rows.yaml", "squares", "--json"])).unwrap();
    assert_eq!(rows[0]["verdict"], "same");
    let again = rows[0]["rows_again"].as_u64().unwrap();
    assert!((1..100).contains(&again), "about a tenth of 200 rows: {again}");
    assert_eq!(names(), before);
    assert_eq!(one.executed(&["rows.yaml"]), [""; 0]);
    let none = one.bad(2, &["verify", "--pipeline", "p.yaml", "d"]);
    assert!(none.contains("there is no stage `d`"), "{none}");
}

/// However many stages there are: what is known to be shared is not asked about again.
#[test]
fn a_run_that_finds_everything_makes_a_handful_of_requests() {
    let bucket = S3Server::seaweed().bucket();
    let proxy = Proxy::start(&bucket.endpoint, Faults::default());
    let one = machine(&bucket.at(proxy.endpoint()));
    let stage = |number: usize| {
        format!("  s{number}: {{ uses: run, run: 'echo {number} > outputs/out', outputs: {{ out: tree }} }}\n")
    };
    let wide: String = (0..60).map(stage).collect();
    one.write("p.yaml", &format!("name: wide\nstages:\n{wide}"));
    assert_eq!(one.executed(&["p.yaml"]).len(), 60);
    proxy.take_counts();
    assert_eq!(one.executed(&["p.yaml"]), [""; 0]);
    let counts = proxy.take_counts();
    assert!(counts.total <= 5, "{:#?}", counts.log);
    // A machine that has nothing yet asks for each result, and not for what is in it twice.
    let two = machine(&bucket.at(proxy.endpoint()));
    two.write("p.yaml", &format!("name: wide\nstages:\n{wide}"));
    assert_eq!(two.executed(&["p.yaml"]), [""; 0]);
    let counts = proxy.take_counts();
    assert!(counts.total <= 60 * 4 + 15, "{}", counts.total);
}

/// Ten wide, ten deep, 30 ms away: the hint of the last run lets a cold one fetch everything at once.
#[test]
fn a_cold_run_does_not_wait_for_one_stage_after_another() {
    let bucket = S3Server::seaweed().bucket();
    let proxy = Proxy::start(&bucket.endpoint, Faults::default());
    let one = machine(&bucket);
    let mut text = String::from("name: deep\nstages:\n");
    for level in 0..10 {
        for column in 0..10 {
            let input = match level {
                0 => String::new(),
                _ => format!("inputs: {{ a: s{}_{column}.out }}, ", level - 1),
            };
            text.push_str(&format!(
                "  s{level}_{column}: {{ uses: run, {input}run: 'echo {level} {column} > outputs/out', outputs: {{ out: tree }} }}\n"
            ));
        }
    }
    one.write("p.yaml", &text);
    assert_eq!(one.executed(&["p.yaml"]).len(), 100);
    proxy.set(Faults { latency: Duration::from_millis(30), ..Faults::default() });
    let took = |hint: bool| {
        let two = machine(&bucket.at(proxy.endpoint()));
        two.write("p.yaml", &text);
        if !hint {
            bucket.list("team/v1/hints").iter().for_each(|name| bucket.delete(name));
        }
        let start = Instant::now();
        assert_eq!(two.executed(&["p.yaml"]), [""; 0]);
        start.elapsed().as_secs_f64()
    };
    // Ten levels after one another would be 0.6 s and more; tests may run beside each other, so the bars are wide.
    let (with, without) = (took(true), took(false));
    println!("100 stages, 30 ms away: {with:.2} s with the hint, {without:.2} s without");
    assert!(with < 3.0 && without < 6.0, "{with} s with the hint, {without} s without");
}

#[test]
fn a_bucket_that_was_emptied_is_filled_again() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    one.good(&["run", "p.yaml"]);
    bucket.list("team").iter().for_each(|name| bucket.delete(name));
    assert_eq!(one.executed(&["p.yaml"]), [""; 0], "it has everything itself");
    assert_eq!(two.executed(&["p.yaml"]), [""; 0], "and now everybody has");
    two.good(&["export", "b", "made"]);
}

#[test]
fn what_is_made_offline_again_replaces_nothing_for_others() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    let stamped = CHAIN.replace("echo 1", "date +%N");
    one.write("p.yaml", &stamped).good(&["run", "p.yaml"]);
    let theirs = digests(&one, &["a", "b", "c"]);
    two.write("p.yaml", &stamped);
    assert_eq!(two.executed(&["p.yaml"]), [""; 0], "it knows the results, and has none of them");
    assert_eq!(two.executed(&["p.yaml", "--offline"]), ["a", "b", "c"]);
    let own: Value = serde_json::from_str(&two.good(&["show", "a", "--json", "--offline"])).unwrap();
    assert_ne!(own["out"]["digest"].to_string(), theirs["a"]);
    assert_eq!(two.executed(&["p.yaml"]), [""; 0]);
    assert_eq!(digests(&two, &["a", "b", "c"]), theirs, "the team's result stands");
    assert!(bucket.list("team/v1/replaced").is_empty());
}

#[test]
fn a_store_that_is_only_read_is_not_written_to() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    one.good(&["run", "p.yaml"]);
    let before = bucket.list("");
    two.write("p.yaml", &CHAIN.replace("wc -c", "wc -l"));
    assert_eq!(two.executed(&["p.yaml", "--read-only"]), ["c"]);
    assert_eq!(two.executed(&["p.yaml", "--read-only"]), [""; 0]);
    for wrong in [vec!["push"], vec!["tag", "c.out", "x@1"], vec!["gc", "--delete"], vec!["runs", "--pin", "last"]] {
        let refused = two.bad(2, &[wrong, vec!["--read-only", "--pipeline", "p.yaml"]].concat());
        assert!(refused.contains("read only"), "{refused}");
    }
    assert_eq!(bucket.list(""), before);
    // What it made is shared once it may be.
    assert_eq!(two.executed(&["p.yaml"]), [""; 0]);
    one.write("p.yaml", &CHAIN.replace("wc -c", "wc -l"));
    assert_eq!(one.executed(&["p.yaml"]), [""; 0]);
}

#[test]
fn what_is_gone_from_the_bucket_is_made_again_by_the_next_run() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    one.good(&["run", "p.yaml"]);
    assert_eq!(two.executed(&["p.yaml"]), [""; 0]);
    bucket.list("team/v1/blobs").iter().for_each(|name| bucket.delete(name));
    let lost = two.bad(3, &["export", "c", "made"]);
    assert!(lost.contains("run again"), "{lost}");
    assert_eq!(two.executed(&["p.yaml"]), ["a", "b", "c"]);
    two.good(&["export", "c", "made"]);
    let three = machine(&bucket);
    three.good(&["export", "c", "made", "--pipeline", "p.yaml"]);
    assert_eq!(three.executed(&["p.yaml"]), [""; 0]);
}

#[test]
fn a_refreshed_result_is_everybodys() {
    let bucket = S3Server::seaweed().bucket();
    let (one, two, three) = (machine(&bucket), machine(&bucket), machine(&bucket));
    let stamped = CHAIN.replace("echo 1", "date +%N");
    [&one, &two, &three].iter().for_each(|machine| drop(machine.write("p.yaml", &stamped).good(&["plan", "p.yaml"])));
    one.good(&["run", "p.yaml"]);
    two.good(&["run", "p.yaml"]);
    let old = digests(&one, &["a"]);
    one.good(&["run", "p.yaml", "--refresh", "a"]);
    let new = digests(&one, &["a"]);
    assert_ne!(old, new);
    // One that had the old result, and one that had nothing.
    assert_eq!(two.executed(&["p.yaml"]), [""; 0]);
    assert_eq!(digests(&two, &["a"]), new);
    assert_eq!(digests(&three, &["a"]), new);
}

/// Where npm could install a server for it.
#[test]
fn azure_is_a_store_like_another() {
    let Some(server) = Azurite::start() else {
        println!("skipped: no azurite-blob; `make azurite` installs it where npm is there");
        return;
    };
    let bucket = server.bucket();
    let (one, two) = (machine(&bucket), machine(&bucket));
    assert_eq!(one.executed(&["p.yaml"]), ["a", "b", "c"]);
    assert_eq!(two.executed(&["p.yaml"]), [""; 0]);
    two.good(&["pull", "--pipeline", "p.yaml"]);
    assert_eq!(two.executed(&["p.yaml", "--offline"]), [""; 0]);
}
