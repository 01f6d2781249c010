//! The engine with fake programs: what runs, what does not, and why.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cuda_agent_engine::event::{RunEvent, StageOutcome};
use cuda_agent_engine::execute::launch::Exit;
use futures::FutureExt;

use crate::support::{Lab, echo, failing};

const CHAIN: &str = "stages:\n  a: { uses: lab/make }\n  b: { uses: lab/join, inputs: { a: a.out } }\n  \
    c: { uses: lab/join, inputs: { a: b.out } }\n  d: { uses: lab/make, with: { text: alone } }\n";

#[tokio::test]
async fn the_second_run_executes_nothing() {
    let mut lab = Lab::new();
    assert_eq!(lab.launches(CHAIN).await, ["a", "d", "b", "c"]);
    assert_eq!(lab.launches(CHAIN).await, [""; 0]);
}

#[tokio::test]
async fn comments_and_the_order_of_fields_rerun_nothing() {
    let mut lab = Lab::new();
    lab.launches("params: { x: 1 }\nstages:\n  a: { uses: lab/make, with: { text: t, seed: 3 } }\n").await;
    let other = "stages:\n  # a comment\n  a:\n    with:\n      seed: 3   # another\n      text: 't'\n    uses: lab/make\nparams: { x: 1 }\n";
    assert_eq!(lab.launches(other).await, [""; 0]);
}

#[tokio::test]
async fn a_renamed_stage_is_a_hit() {
    let mut lab = Lab::new();
    lab.launches("stages: { a: { uses: lab/make } }").await;
    assert_eq!(lab.launches("stages: { z: { uses: lab/make } }").await, [""; 0]);
}

#[tokio::test]
async fn plan_says_why_and_run_does_just_that() {
    let mut lab = Lab::new();
    insta::assert_snapshot!(lab.plan(CHAIN).await, @r"
    a: miss (never run)
    b: pending (a)
    c: pending (b)
    d: miss (never run)
    ");
    lab.launches(CHAIN).await;
    insta::assert_snapshot!(lab.plan(CHAIN).await, @r"
    a: hit
    b: hit
    c: hit
    d: hit
    ");
    let changed = CHAIN.replace("{ text: alone }", "{ text: other }");
    insta::assert_snapshot!(lab.plan(&changed).await, @r#"
    a: hit
    b: hit
    c: hit
    d: miss (param text: "alone" → "other")
    "#);
    assert_eq!(lab.launches(&changed).await, ["d"]);
    lab.set_version("lab/join", "1.1.0");
    insta::assert_snapshot!(lab.plan(&changed).await, @r"
    a: hit
    b: miss (program changed: version 1.0.0 → 1.1.0)
    c: pending (b)
    d: hit
    ");
}

#[tokio::test]
async fn an_unchanged_output_stops_the_reruns_below() {
    let mut lab = Lab::new();
    lab.launches(CHAIN).await;
    lab.set_version("lab/join", "1.1.0");
    // b comes out as before, so c's key differs by its own version only; with b's kind alone changed it would hit.
    let (report, launched) = lab.run(CHAIN).await;
    assert_eq!((launched, report.hits), (vec!["b".to_owned(), "c".to_owned()], 2));
    lab.set_version("lab/make", "2.0.0");
    let mut other = Lab { store: lab.store.clone(), folder: lab.folder, launcher: lab.launcher, ..Lab::new() };
    other.set_version("lab/make", "2.0.0");
    let (report, launched) = other.run(CHAIN).await;
    assert_eq!(launched, ["a", "d"], "their outputs are what they were, so b and c are found");
    assert_eq!(report.hits, 2);
}

#[tokio::test]
async fn refresh_runs_again_and_writes_the_next_generation() {
    let mut lab = Lab::new();
    let (report, _) = lab.run(CHAIN).await;
    lab.refresh = vec!["a".into()];
    insta::assert_snapshot!(lab.plan(CHAIN).await.lines().next().unwrap(), @"a: miss (refresh asked for)");
    let (again, launched) = lab.run(CHAIN).await;
    assert_eq!(launched, ["a"]);
    assert_eq!(report.outputs["a"]["out"].digest, again.outputs["a"]["out"].digest);
}

#[tokio::test]
async fn a_missing_blob_is_a_miss_and_is_made_again() {
    let mut lab = Lab::new();
    let (report, _) = lab.run(CHAIN).await;
    let blob = report.outputs["a"]["out"].parts[0];
    lab.store.local().delete(&cuda_agent_engine::store::blob_name(&blob)).await.unwrap();
    let plan = lab.plan(CHAIN).await;
    assert!(plan.starts_with("a: miss (output `out` is missing from the store or damaged)"), "{plan}");
    assert_eq!(lab.launches(CHAIN).await, ["a"]);
    assert_eq!(lab.launches(CHAIN).await, [""; 0]);
}

#[tokio::test]
async fn a_failure_publishes_nothing_and_what_does_not_depend_on_it_goes_on() {
    let mut lab = Lab::new();
    lab.launcher.on("lab/join", failing("first line\nlast line\n"));
    let (report, launched) = lab.run(CHAIN).await;
    assert_eq!(launched, ["a", "d", "b"]);
    assert_eq!(report.failed["b"].message, "exit status 3");
    assert_eq!(report.executed, ["a", "d"]);
    let ended: Vec<_> = lab
        .events
        .iter()
        .filter_map(|event| match event {
            RunEvent::StageFinished { stage, outcome, .. } => Some((stage.as_str(), outcome)),
            _ => None,
        })
        .collect();
    assert!(ended.iter().any(|(stage, outcome)| *stage == "b"
        && matches!(outcome, StageOutcome::Failed { log_tail, .. } if log_tail == &["first line", "last line"])));
    assert!(ended.contains(&("c", &StageOutcome::Skipped { because: "b".into() })));
    insta::assert_snapshot!(lab.plan(CHAIN).await.replace(&report.run, "[run]"), @r"
    a: hit
    b: miss (failed in run [run])
    c: pending (b)
    d: hit
    ");
    let log = lab.store.log(&report.run, "b.log").await.unwrap().unwrap();
    assert_eq!(log, "first line\nlast line\n");
    lab.launcher.on("lab/join", echo());
    assert_eq!(lab.launches(CHAIN).await, ["b", "c"], "the next run resumes");
}

#[tokio::test]
async fn a_missing_output_is_an_error_with_a_place() {
    let mut lab = Lab::new();
    lab.launcher.on("lab/make", Arc::new(|_, _, _| async { Exit::Success }.boxed()));
    let (report, _) = lab.run("stages: { a: { uses: lab/make } }").await;
    assert_eq!(report.failed["a"].message, "output `out`: the program did not make outputs/out");
}

#[tokio::test(start_paused = true)]
async fn retries_back_off_and_then_give_up_or_pass() {
    let mut lab = Lab::new();
    let tries = Arc::new(AtomicU32::new(0));
    let counted = tries.clone();
    lab.launcher.on(
        "lab/make",
        Arc::new(move |folder, request, channels| {
            if counted.fetch_add(1, Ordering::SeqCst) < 2 {
                return async { Exit::Signal(11) }.boxed();
            }
            echo()(folder, request, channels)
        }),
    );
    let text = "stages: { a: { uses: lab/make, retry: { attempts: 2, backoff: 10s } } }";
    let before = tokio::time::Instant::now();
    let (report, _) = lab.run(text).await;
    assert!(report.failed.is_empty());
    assert_eq!(before.elapsed().as_secs(), 30, "10 s, then twice that");
    assert_eq!(tries.load(Ordering::SeqCst), 3);
    tries.store(0, Ordering::SeqCst);
    let (report, _) = lab.run("stages: { a: { uses: lab/make, with: { text: x }, retry: 1 } }").await;
    assert_eq!(report.failed["a"].message, "killed by SIGSEGV");
}

#[tokio::test]
async fn a_typed_error_of_bad_input_is_not_tried_again() {
    let mut lab = Lab::new();
    lab.launcher.on(
        "lab/make",
        Arc::new(|folder, _, _| {
            let error = r#"{"kind": "params", "message": "no such library", "hint": "try torch"}"#;
            std::fs::write(folder.join("error.json"), error).unwrap();
            async { Exit::Code(1) }.boxed()
        }),
    );
    let (report, launched) = lab.run("stages: { a: { uses: lab/make, retry: 5 } }").await;
    assert_eq!(launched, ["a"]);
    let failure = &report.failed["a"];
    assert_eq!((failure.message.as_str(), failure.hint.as_deref()), ("no such library", Some("try torch")));
}

#[tokio::test(start_paused = true)]
async fn a_timeout_fails_the_stage() {
    let mut lab = Lab::new();
    lab.launcher.on("lab/make", Arc::new(|_, _, _| std::future::pending().boxed()));
    let (report, _) = lab.run("stages: { a: { uses: lab/make, timeout: 90s } }").await;
    assert_eq!(report.failed["a"].message, "timed out after 90 s");
}

/// How many programs of a kind run at once at most.
fn counting(peak: Arc<AtomicU32>) -> crate::support::Behaviour {
    let now = Arc::new(AtomicU32::new(0));
    Arc::new(move |folder, request, channels| {
        let (now, peak) = (now.clone(), peak.clone());
        async move {
            peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_secs(1)).await;
            now.fetch_sub(1, Ordering::SeqCst);
            echo()(folder, request, channels).await
        }
        .boxed()
    })
}

#[tokio::test(start_paused = true)]
async fn independent_stages_run_side_by_side_within_the_pools() {
    let mut lab = Lab::new();
    let stages = |resources: &str| -> String {
        let line = |i: u32| format!("  s{i}: {{ uses: lab/make, with: {{ seed: {i} }}{resources} }}\n");
        format!("stages:\n{}", (0..8).map(line).collect::<String>())
    };
    for (resources, expected) in [("", 4), (", resources: { cpu: 2 }, env: { A: b }", 2)] {
        let peak = Arc::new(AtomicU32::new(0));
        lab.launcher.on("lab/make", counting(peak.clone()));
        assert_eq!(lab.launches(&stages(resources)).await.len(), 8);
        assert_eq!(peak.load(Ordering::SeqCst), expected);
    }
}

#[tokio::test]
async fn what_the_machine_lacks_is_said() {
    let mut lab = Lab::new();
    let (report, launched) = lab.run("stages: { a: { uses: lab/make, resources: { gpu: 2 } } }").await;
    assert_eq!(launched, [""; 0]);
    assert_eq!(report.failed["a"].message, "needs 2 GPUs (there are 0)");
}

#[tokio::test]
async fn matrix_cells_fan_in() {
    let mut lab = Lab::new();
    let text = "stages:\n  a: { uses: lab/make, matrix: { seed: [1, 2, 3] }, with: { seed: '${matrix.seed}' } }\n  \
        all: { uses: lab/many, inputs: { all: 'a[*].out' } }\n";
    let mut launched = lab.launches(text).await;
    launched.sort();
    assert_eq!(launched, ["a[seed=1]", "a[seed=2]", "a[seed=3]", "all"]);
    let more = text.replace("[1, 2, 3]", "[1, 2, 3, 4]");
    assert_eq!(lab.launches(&more).await, ["a[seed=4]", "all"]);
}

#[tokio::test]
async fn two_stages_that_are_the_same_run_once() {
    let mut lab = Lab::new();
    let (report, launched) = lab.run("stages:\n  a: { uses: lab/make }\n  b: { uses: lab/make }\n").await;
    assert_eq!((launched.len(), report.hits), (1, 1));
}

#[tokio::test]
async fn selection_takes_what_is_needed_and_no_more() {
    let mut lab = Lab::new();
    let (_, launched) = lab.run_selected(CHAIN, &["b"]).await;
    assert_eq!(launched, ["a", "b"]);
    let (_, launched) = lab.run_selected(CHAIN, &["a+"]).await;
    assert_eq!(launched, ["c"]);
}

#[tokio::test]
async fn external_files_count_by_content() {
    let mut lab = Lab::new();
    let file = lab.folder.path().join("data.txt");
    std::fs::write(&file, "one").unwrap();
    let text = "stages: { a: { uses: lab/join, inputs: { a: { path: data.txt } } } }";
    let (report, launched) = lab.run(text).await;
    assert_eq!(launched, ["a"]);
    assert!(lab.text(&report, "a").await.contains("a: one"));
    // A touched file is the same file.
    std::fs::write(&file, "one").unwrap();
    assert_eq!(lab.launches(text).await, [""; 0]);
    std::fs::write(&file, "two").unwrap();
    let plan = lab.plan(text).await;
    assert!(plan.starts_with("a: miss (input a changed (from "), "{plan}");
    assert_eq!(lab.launches(text).await, ["a"]);
}

#[tokio::test]
async fn an_input_that_changes_meanwhile_publishes_nothing() {
    let mut lab = Lab::new();
    let file = lab.folder.path().join("data.txt");
    std::fs::write(&file, "one").unwrap();
    let changing = file.clone();
    lab.launcher.on(
        "lab/join",
        Arc::new(move |folder, request, channels| {
            std::fs::write(&changing, "three").unwrap();
            echo()(folder, request, channels)
        }),
    );
    let (report, _) = lab.run("stages: { a: { uses: lab/join, inputs: { a: { path: data.txt } } } }").await;
    assert!(report.failed["a"].message.contains("changed while the stage ran"), "{:?}", report.failed);
}

#[tokio::test]
async fn a_tag_feeds_another_pipeline() {
    let mut lab = Lab::new();
    let (_, _) = lab.run("stages: { a: { uses: lab/make } }").await;
    let manifest = lab.store.run(&lab.store.runs().await.unwrap()[0]).await.unwrap().unwrap();
    let tag = cuda_agent_engine::store::Tag { key: manifest.stages["a"].key.unwrap(), output: "out".into() };
    lab.store.put_tag("texts", "v1", &tag).await.unwrap();
    let text = "stages: { b: { uses: lab/join, inputs: { a: { artifact: texts@v1 } } } }";
    let (report, _) = lab.run(text).await;
    assert!(lab.text(&report, "b").await.contains("hello"));
    let table = "stages: { t: { uses: lab/columns, inputs: { rows: { artifact: texts@v1 } } } }";
    let (report, _) = lab.run(table).await;
    let message = &report.failed["t"].message;
    assert!(message.ends_with("expected table, but this is a file or folder, not a Parquet table"), "{message}");
}

#[tokio::test]
async fn a_damaged_record_is_made_again_once() {
    let mut lab = Lab::new();
    let text = "stages: { a: { uses: lab/make } }";
    let (report, _) = lab.run(text).await;
    lab.refresh = vec!["a".into()];
    lab.run(text).await;
    lab.refresh.clear();
    let key = lab.store.run(&report.run).await.unwrap().unwrap().stages["a"].key.unwrap();
    lab.store.local().overwrite(&format!("v1/records/{key}/00000002"), &b"{torn"[..]).await.unwrap();
    assert_eq!(lab.launches(text).await, ["a"]);
    assert_eq!(lab.launches(text).await, [""; 0]);
}

#[tokio::test]
async fn refresh_replaces_a_damaged_blob_of_the_right_size() {
    let mut lab = Lab::new();
    let text = "stages:\n  a: { uses: lab/make }\n  b: { uses: lab/join, inputs: { a: a.out } }\n";
    let (report, _) = lab.run(text).await;
    let blob = report.outputs["a"]["out"].parts[0];
    let name = cuda_agent_engine::store::blob_name(&blob);
    let size = lab.store.local().size_of(&name).await.unwrap().unwrap() as usize;
    lab.store.local().overwrite(&name, vec![b'x'; size]).await.unwrap();
    lab.refresh = vec!["a".into(), "b".into()];
    let (report, launched) = lab.run(text).await;
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    assert_eq!(launched, ["a", "b"]);
}

/// A hit whose blob turns out to be damaged only when a stage after it is about to read it.
#[tokio::test]
async fn what_is_found_damaged_in_a_run_is_made_again_in_that_run() {
    let mut lab = Lab::new();
    let text = "stages:\n  a: { uses: lab/make }\n  b: { uses: lab/join, inputs: { a: a.out } }\n  c: { uses: lab/join, inputs: { a: a.out, b: b.out } }\n";
    let (report, _) = lab.run(text).await;
    let damage = async |lab: &Lab| {
        let name = cuda_agent_engine::store::blob_name(&report.outputs["a"]["out"].parts[0]);
        let size = lab.store.local().size_of(&name).await.unwrap().unwrap() as usize;
        lab.store.local().overwrite(&name, vec![b'x'; size]).await.unwrap();
    };
    damage(&lab).await;
    lab.set_version("lab/join", "2.0.0");
    let (report, launched) = lab.run(text).await;
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    assert_eq!(launched, ["a", "b", "c"]);
    assert_eq!(report.executed, ["a", "b", "c"]);
    let text_of_c = lab.text(&report, "c").await;
    let (report, _) = lab.run(text).await;
    assert_eq!((report.hits, lab.text(&report, "c").await), (3, text_of_c));
}

#[tokio::test(start_paused = true)]
async fn a_program_that_talks_without_end_cannot_put_off_its_timeout() {
    let mut lab = Lab::new();
    lab.launcher.on(
        "lab/make",
        Arc::new(|_, _, channels| {
            async move {
                let event = cuda_agent_protocol::Event::Progress { done: 1, total: None, unit: "x".into() };
                loop {
                    let _ = channels.events.send(Ok(event.clone())).await;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            .boxed()
        }),
    );
    let (report, _) = lab.run("stages: { a: { uses: lab/make, timeout: 5s } }").await;
    assert_eq!(report.failed["a"].message, "timed out after 5.0 s");
    assert!(lab.events.len() < 100, "progress is passed on only as often as anybody looks");
}

#[tokio::test]
async fn a_port_gets_only_the_columns_that_count() {
    let mut lab = Lab::new();
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let columns = seen.clone();
    lab.launcher.on(
        "lab/columns",
        Arc::new(move |folder, request, channels| {
            let info = cuda_agent_engine::artifact::table::inspect(&folder.join("inputs/rows.parquet")).unwrap();
            columns.lock().unwrap().extend(info.columns.into_iter().map(|column| column.name));
            echo()(folder, request, channels)
        }),
    );
    crate::support::write_ids(&lab.folder.path().join("ids.parquet"), &[1], "x");
    lab.launches("stages: { a: { uses: lab/columns, inputs: { rows: { path: ids.parquet } } } }").await;
    assert_eq!(*seen.lock().unwrap(), ["id"]);
}

/// A web server on this machine that knows one file.
fn web_server(body: &'static str) -> String {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().take(8) {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let count = stream.read(&mut request).unwrap_or(0);
            let found = String::from_utf8_lossy(&request[..count]).starts_with("GET /data/words.txt ");
            let (status, body) = if found { ("200 OK", body) } else { ("404 Not Found", "") };
            let length = body.len();
            let date = "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT";
            let _ = write!(
                stream,
                "HTTP/1.1 {status}\r\n{date}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            );
        }
    });
    format!("http://{address}/data/words.txt")
}

#[tokio::test]
async fn a_download_is_known_by_its_digest() {
    let mut lab = Lab::new();
    let url = web_server("from afar");
    let digest = cuda_agent_engine::digest::Digest::of_bytes(b"from afar");
    let pipeline = |url: &str, digest: &str| {
        format!("stages: {{ a: {{ uses: lab/join, inputs: {{ a: {{ url: '{url}', digest: '{digest}' }} }} }} }}")
    };
    let (report, _) = lab.run(&pipeline(&url, &digest.to_string())).await;
    assert!(lab.text(&report, "a").await.contains("a: from afar"));
    // Once fetched, it is not fetched again: the address may be gone.
    assert_eq!(lab.launches(&pipeline("http://127.0.0.1:1/x", &digest.to_string())).await, [""; 0]);
    let (report, _) = lab.run(&pipeline(&url, &"0".repeat(64))).await;
    assert!(report.failed["a"].message.contains("has the digest"), "{:?}", report.failed);
    let (report, _) = lab.run(&pipeline(&url.replace("words", "nothing"), &"1".repeat(64))).await;
    assert!(report.failed["a"].message.contains("is not there"), "{:?}", report.failed);
}
