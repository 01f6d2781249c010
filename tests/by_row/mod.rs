//! By-row stages with fake programs: each row is done once.

mod programs;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use cuda_agent_engine::artifact::{json, table};
use cuda_agent_engine::event::{RunEvent, RunOutcome};
use cuda_agent_engine::execute::launch::Exit;
use cuda_agent_engine::host::Host;
use cuda_agent_engine::store::RowCounts;
use serde_json::{Map, Value};

use crate::support::{Answer, Lab, row_program, square, write_ids};

const ROWS: &str = "stages: { r: { uses: lab/rows, inputs: { rows: { path: ids.parquet } } } }";

/// Notes which ids a program was asked for.
#[derive(Clone, Default)]
struct Asked(Arc<Mutex<Vec<i64>>>);

impl Asked {
    fn program(&self, lab: &Lab, work: impl Fn(&Map<String, Value>) -> Answer + Send + Sync + 'static) {
        let asked = self.clone();
        lab.launcher.on(
            "lab/rows",
            row_program(move |columns| {
                asked.0.lock().unwrap().push(columns["id"].as_i64().unwrap());
                work(columns)
            }),
        );
    }

    fn take(&self) -> Vec<i64> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

fn ids(lab: &Lab, ids: &[i64], other: &str) {
    write_ids(&lab.folder.path().join("ids.parquet"), ids, other);
}

async fn counts(lab: &mut Lab) -> (RowCounts, Vec<Map<String, Value>>) {
    let (report, _) = lab.run(ROWS).await;
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    let manifest = lab.store.run(&report.run).await.unwrap().unwrap();
    let (_, record) = lab.store.record(&manifest.stages["r"].key.unwrap()).await.unwrap().unwrap();
    let path = lab.folder.path().join("out.parquet");
    assert!(lab.store.fetch_blob(&record.outputs["rows"].blob, &path).await.unwrap());
    let (_, batches) = table::read(&path).unwrap();
    (record.rows.unwrap(), batches.iter().flat_map(json::rows).collect())
}

#[tokio::test]
async fn order_duplicates_and_other_columns_execute_nothing() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, square);
    let first: Vec<i64> = (0..1000).collect();
    ids(&lab, &first, "x");
    let (rows, table) = counts(&mut lab).await;
    assert_eq!((rows.executed, rows.total, table.len()), (1000, 1000, 1000));
    assert_eq!(asked.take().len(), 1000);

    let mut shuffled: Vec<i64> = first.iter().map(|id| (id * 617) % 1000).collect();
    shuffled.extend(&first[..10]);
    ids(&lab, &shuffled, "y");
    let (rows, table) = counts(&mut lab).await;
    assert_eq!((rows.executed, rows.reused, rows.total), (0, 1000, 1010));
    assert_eq!(asked.take(), [0i64; 0]);
    for (id, row) in shuffled.iter().zip(&table) {
        assert_eq!((row["id"].as_i64(), row["square"].as_i64()), (Some(*id), Some(id * id)), "input order");
        assert_eq!(row["other"], "y", "the other columns are joined back");
    }

    ids(&lab, &shuffled, "z");
    let (rows, table) = counts(&mut lab).await;
    assert!(rows.executed == 0 && table.iter().all(|row| row["other"] == "z"), "they count for the stage's key");

    let more: Vec<i64> = (0..1010).collect();
    ids(&lab, &more, "x");
    let (rows, _) = counts(&mut lab).await;
    assert_eq!(rows.executed, 10);
    assert_eq!(asked.take().into_iter().collect::<BTreeSet<_>>(), (1000..1010).collect());
    let told = lab.events.iter().find_map(|event| match event {
        RunEvent::StageStarted { rows, .. } => *rows,
        _ => None,
    });
    assert_eq!(told, Some(RowCounts { total: 1010, executed: 10, reused: 1000, ..RowCounts::default() }));
}

#[tokio::test]
async fn rows_go_to_several_programs() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, square);
    ids(&lab, &(0..100).collect::<Vec<_>>(), "x");
    let pipeline_cpus = lab.host.cpus as usize;
    let (report, _) = lab.run(ROWS).await;
    assert!(report.failed.is_empty());
    let _ = pipeline_cpus;
    assert_eq!(asked.take().into_iter().collect::<BTreeSet<_>>().len(), 100, "each row once");
}

#[tokio::test]
async fn rows_of_one_device_are_never_taken_for_anothers() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, square);
    ids(&lab, &[1, 2, 3], "x");
    counts(&mut lab).await;
    asked.take();
    lab.host = Host::fake(4, "another CPU");
    let plan = lab.plan(ROWS).await;
    assert_eq!(plan, "r: miss (device a made-up CPU → another CPU)");
    let (rows, _) = counts(&mut lab).await;
    assert_eq!((rows.executed, rows.reused), (3, 0));
}

#[tokio::test]
async fn a_row_that_fails_from_outside_is_not_remembered() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |columns| if columns["id"] == 7 { Answer::Failed } else { square(columns) });
    ids(&lab, &(0..10).collect::<Vec<_>>(), "x");
    let (report, _) = lab.run(ROWS).await;
    let message = &report.failed["r"].message;
    assert_eq!(message, "1 rows failed from outside causes (row 7 (id=7): rate-limit)");
    asked.take();
    asked.program(&lab, square);
    let (rows, _) = counts(&mut lab).await;
    assert_eq!((rows.executed, rows.reused, asked.take()), (1, 9, vec![7]));
}

#[tokio::test]
async fn allowed_failures_pass_without_their_rows() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |columns| if columns["id"] == 7 { Answer::Failed } else { square(columns) });
    ids(&lab, &(0..10).collect::<Vec<_>>(), "x");
    let text = ROWS.replace("inputs:", "allow_failed_rows: 1, inputs:");
    let (report, _) = lab.run(&text).await;
    assert!(report.failed.is_empty());
    assert_eq!(report.outputs["r"]["rows"].rows, Some(9));
}

#[tokio::test]
async fn a_row_that_kills_its_program_twice_is_rejected_and_costs_one_row() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |columns| if columns["id"] == 3 { Answer::Die } else { square(columns) });
    ids(&lab, &(0..10).collect::<Vec<_>>(), "x");
    let (rows, table) = counts(&mut lab).await;
    assert_eq!((rows.executed, rows.rejected, table.len()), (10, 1, 9));
    assert_eq!(asked.take().iter().filter(|id| **id == 3).count(), 2, "once more, alone");
    let told =
        |event: &RunEvent| matches!(event, RunEvent::Message { message, .. } if message.contains("is rejected: crash"));
    assert!(lab.events.iter().any(told), "{:?}", lab.events);
    ids(&lab, &(0..11).collect::<Vec<_>>(), "x");
    counts(&mut lab).await;
    assert_eq!(asked.take(), [10], "what is rejected stays rejected");
}

#[tokio::test]
async fn a_crash_that_does_not_repeat_rejects_nothing() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    let deaths = Arc::new(AtomicU32::new(0));
    asked.program(&lab, move |columns| {
        if columns["id"] == 3 && deaths.fetch_add(1, Ordering::SeqCst) == 0 { Answer::Die } else { square(columns) }
    });
    ids(&lab, &(0..10).collect::<Vec<_>>(), "x");
    let (rows, table) = counts(&mut lab).await;
    assert_eq!((rows.rejected, table.len()), (0, 10));
}

#[tokio::test]
async fn a_program_that_always_dies_fails_the_stage_and_rejects_no_row() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    let dead = Arc::new(|_, _, _| futures::FutureExt::boxed(async { Exit::Code(127) }));
    lab.launcher.on("lab/rows", dead);
    ids(&lab, &(0..10).collect::<Vec<_>>(), "x");
    let (report, _) = lab.run(ROWS).await;
    assert!(report.failed["r"].message.contains("could not be started"), "{:?}", report.failed);
    asked.program(&lab, square);
    assert_eq!(counts(&mut lab).await.0.executed, 10);
}

#[tokio::test]
async fn what_was_done_before_an_abort_is_kept() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    let answered = Arc::new(std::sync::Mutex::new(BTreeSet::new()));
    let kept = answered.clone();
    asked.program(&lab, move |columns| {
        let mut kept = kept.lock().unwrap();
        if kept.len() == 5 {
            return Answer::Hang;
        }
        kept.insert(columns["id"].as_i64().unwrap());
        square(columns)
    });
    ids(&lab, &(0..10).collect::<Vec<_>>(), "x");
    // Dropped in the middle, as a killed engine is: only the journal is left.
    let run = lab.run(ROWS);
    assert!(tokio::time::timeout(std::time::Duration::from_secs(3), run).await.is_err());
    // A killed engine's leases die with its process, which here is this one.
    lab.drop_leases().await;
    asked.take();
    asked.program(&lab, square);
    let (rows, _) = counts(&mut lab).await;
    assert_eq!((rows.executed, rows.reused), (5, 5), "the finished half is kept");
    let answered = answered.lock().unwrap().clone();
    assert_eq!(
        asked.take().into_iter().collect::<BTreeSet<_>>(),
        (0..10).filter(|id| !answered.contains(id)).collect()
    );
}

/// An engine dies beside another one of its machine, which has long begun: its answers are in its journal alone.
#[tokio::test]
async fn what_an_engine_had_done_that_dies_beside_another_is_not_done_again() {
    const KEPT: usize = 10;
    let (mut lab, asked) = (Lab::new(), Asked::default());
    // One program, so that the first engine claims few rows before it has an answer.
    lab.host = Host::fake(1, "a made-up CPU");
    ids(&lab, &(0..60).collect::<Vec<_>>(), "x");
    asked.program(&lab, square);
    let (begun, go_on) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (inner, told, waited) = (lab.launcher.behaviour("lab/rows"), begun.clone(), go_on.clone());
    lab.launcher.on(
        "lab/rows",
        Arc::new(move |folder, request, channels| {
            let (program, told, waited) = (inner(folder, request, channels), told.clone(), waited.clone());
            futures::FutureExt::boxed(async move {
                told.notify_one();
                waited.notified().await;
                program.await
            })
        }),
    );
    let (mut other, done, hangs) = (lab.beside(), Asked::default(), Arc::new(tokio::sync::Notify::new()));
    let (counted, told) = (AtomicU32::new(0), hangs.clone());
    done.program(&other, move |columns| {
        if counted.fetch_add(1, Ordering::SeqCst) < KEPT as u32 {
            return square(columns);
        }
        told.notify_one();
        Answer::Hang
    });
    let watched = lab.beside();
    let mut first = std::pin::pin!(lab.run(ROWS));
    tokio::select! {
        _ = &mut first => panic!("its program waits"),
        () = begun.notified() => (),
    }
    let living = watched.runs().await;
    tokio::select! {
        _ = other.run(ROWS) => panic!("its program hangs"),
        () = hangs.notified() => (),
    }
    // What it had going was dropped with it; its tasks end when they would be next.
    tokio::task::yield_now().await;
    assert_eq!((living.len(), watched.mark_runs_dead(&living).await.len()), (1, 1));
    go_on.notify_waiters();
    let (report, _) = first.await;
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    assert_eq!(report.outputs["r"]["rows"].rows, Some(60));
    let done = done.take();
    let mut asked = asked.take();
    asked.sort_unstable();
    assert_eq!(done.len(), KEPT + 1);
    assert_eq!(asked, (0..60).filter(|id| !done[..KEPT].contains(id)).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_row_may_make_none_or_many() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |columns| {
        let id = columns["id"].as_i64().unwrap();
        Answer::Many((0..id).map(|n| serde_json::json!({ "square": n })).collect())
    });
    ids(&lab, &[0, 1, 2, 2], "x");
    let (_, table) = counts(&mut lab).await;
    let pairs: Vec<_> =
        table.iter().map(|row| (row["id"].as_i64().unwrap(), row["square"].as_i64().unwrap())).collect();
    assert_eq!(pairs, [(1, 0), (2, 0), (2, 1), (2, 0), (2, 1)]);
}

#[tokio::test]
async fn an_answer_that_does_not_fit_fails_at_once() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |_| Answer::Done(serde_json::json!({ "square": "nine" })));
    ids(&lab, &[3], "x");
    let (report, _) = lab.run(ROWS).await;
    insta::assert_snapshot!(report.failed["r"].message);
}

#[tokio::test]
async fn an_empty_table_makes_an_empty_table() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, square);
    ids(&lab, &[], "x");
    let (rows, table) = counts(&mut lab).await;
    assert_eq!((rows.total, table.len()), (0, 0));
}

#[tokio::test]
async fn an_outage_rejects_nothing() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    // From the start: no row is ever answered.
    asked.program(&lab, |_| Answer::Die);
    ids(&lab, &(0..10).collect::<Vec<_>>(), "x");
    let (report, _) = lab.run(ROWS).await;
    assert!(report.failed["r"].message.contains("died one after another"), "{:?}", report.failed);
    // In the middle: rows that were done before kill programs now.
    asked.program(&lab, square);
    ids(&lab, &[0, 1], "x");
    counts(&mut lab).await;
    asked.program(&lab, |_| Answer::Die);
    ids(&lab, &[0, 1, 2], "x");
    let (report, _) = lab.run(ROWS).await;
    assert!(report.failed["r"].message.contains("rows that they did before"), "{:?}", report.failed);
    asked.take();
    asked.program(&lab, square);
    let (rows, _) = counts(&mut lab).await;
    assert_eq!((rows.executed, rows.rejected, asked.take()), (1, 0, vec![2]), "no row was rejected");
}

#[tokio::test]
async fn a_lone_row_that_kills_is_judged_with_the_help_of_one_that_was_done() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |columns| if columns["id"] == 3 { Answer::Die } else { square(columns) });
    ids(&lab, &[1], "x");
    counts(&mut lab).await;
    ids(&lab, &[1, 3], "x");
    let (rows, _) = counts(&mut lab).await;
    assert_eq!((rows.executed, rows.rejected), (1, 1));
}

#[tokio::test]
async fn refresh_does_every_row_again_and_the_new_results_win() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, square);
    ids(&lab, &[1, 2, 3], "x");
    counts(&mut lab).await;
    for factor in [10, 20] {
        asked.take();
        asked.program(&lab, move |columns| {
            Answer::Done(serde_json::json!({ "square": columns["id"].as_i64().unwrap() * factor }))
        });
        lab.refresh = vec!["r".into()];
        let (rows, table) = counts(&mut lab).await;
        assert_eq!((rows.executed, rows.reused, asked.take().len()), (3, 0, 3));
        let squares: Vec<_> = table.iter().map(|row| row["square"].as_i64().unwrap()).collect();
        assert_eq!(squares, [factor, 2 * factor, 3 * factor]);
    }
    lab.refresh.clear();
    ids(&lab, &[3, 1], "x");
    let (rows, table) = counts(&mut lab).await;
    assert_eq!((rows.executed, table[0]["square"].as_i64()), (0, Some(60)));
}

#[tokio::test]
async fn allowed_failures_are_tried_again_by_each_run() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |columns| if columns["id"] == 7 { Answer::Failed } else { square(columns) });
    ids(&lab, &(0..10).collect::<Vec<_>>(), "x");
    let lenient = ROWS.replace("inputs:", "allow_failed_rows: 1, inputs:");
    let mut records = Vec::new();
    for wanted in [(0..10).collect(), vec![7]] {
        let (report, _) = lab.run(&lenient).await;
        assert_eq!(report.outputs["r"]["rows"].rows, Some(9));
        assert_eq!(asked.take().into_iter().collect::<BTreeSet<_>>(), wanted.into_iter().collect());
        let manifest = lab.store.run(&report.run).await.unwrap().unwrap();
        records.push(lab.store.record(&manifest.stages["r"].key.unwrap()).await.unwrap().unwrap());
    }
    assert_eq!(records[0], records[1], "a try that brings nothing new leaves the record as it is");
    for text in [&lenient, ROWS] {
        assert_eq!(lab.plan(text).await, "r: miss (1 of its rows failed last time)");
    }
    asked.program(&lab, square);
    let (report, _) = lab.run(&lenient).await;
    assert_eq!((report.outputs["r"]["rows"].rows, asked.take()), (Some(10), vec![7]));
    assert_eq!(lab.plan(&lenient).await, "r: hit");
    assert_eq!(lab.plan(ROWS).await, "r: hit");
}

#[tokio::test]
async fn a_try_that_brings_some_of_the_failed_rows_is_a_new_result() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    let lenient = ROWS.replace("inputs:", "allow_failed_rows: 2, inputs:");
    ids(&lab, &(0..10).collect::<Vec<_>>(), "x");
    for (failing, rows) in [(7..9, 8), (8..9, 9)] {
        asked.program(&lab, move |columns| match failing.contains(&columns["id"].as_i64().unwrap()) {
            true => Answer::Failed,
            false => square(columns),
        });
        let (report, _) = lab.run(&lenient).await;
        assert_eq!(report.outputs["r"]["rows"].rows, Some(rows));
    }
}

#[tokio::test]
async fn results_that_vanish_meanwhile_are_made_again() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, square);
    ids(&lab, &[1, 2], "x");
    let (report, _) = lab.run(ROWS).await;
    let manifest = lab.store.run(&report.run).await.unwrap().unwrap();
    let folder = format!("v1/rows/{}", manifest.stages["r"].base.unwrap());
    asked.take();
    let (store, cleared) = (lab.store.clone(), AtomicU32::new(0));
    asked.program(&lab, move |columns| {
        if cleared.fetch_add(1, Ordering::SeqCst) == 0 {
            futures::executor::block_on(async {
                for segment in store.local().list(&folder).await.unwrap() {
                    store.local().delete(&format!("{folder}/{}", segment.name)).await.unwrap();
                }
            });
        }
        square(columns)
    });
    ids(&lab, &[1, 2, 3], "x");
    let (_, table) = counts(&mut lab).await;
    let squares: Vec<_> = table.iter().map(|row| row["square"].as_i64().unwrap()).collect();
    assert_eq!(squares, [1, 4, 9]);
    let mut asked = asked.take();
    assert_eq!(asked.remove(0), 3);
    assert_eq!(asked.into_iter().collect::<BTreeSet<_>>(), [1, 2].into());
}

#[tokio::test]
async fn a_few_rejected_rows_are_named() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |_| Answer::Rejected);
    for (rejected, named, more) in [(3, 3, None), (5, 3, Some("and 2 more: cuda-agent show 'r' --rejected"))] {
        ids(&lab, &(0..rejected).collect::<Vec<_>>(), "x");
        counts(&mut lab).await;
        let messages: Vec<&str> = lab.events.iter().filter_map(message).collect();
        assert_eq!(messages.iter().filter(|text| text.contains(" is rejected: ")).count(), named, "{messages:?}");
        assert_eq!(messages.iter().find(|text| text.starts_with("and ")).copied(), more);
    }
}

#[tokio::test]
async fn of_many_rejected_rows_the_log_has_the_first_thousand() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |_| Answer::Rejected);
    ids(&lab, &(0..1003).collect::<Vec<_>>(), "x");
    let (report, _) = lab.run(ROWS).await;
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    let log = lab.store.log(&report.run, "r.log").await.unwrap().unwrap();
    let log = String::from_utf8(log.to_vec()).unwrap();
    let named: Vec<&str> = log.lines().filter(|line| line.contains(" is rejected: ")).collect();
    assert_eq!(named.len(), 1000);
    assert!(named[999].contains("row 999 (id=999) is rejected: too-long"), "in the order of the table: {}", named[999]);
    let told = lab.events.iter().filter_map(message).find(|told| told.starts_with("and "));
    assert_eq!(told, Some("and 1000 more: cuda-agent show 'r' --rejected"));
}

fn message(event: &RunEvent) -> Option<&str> {
    match event {
        RunEvent::Message { message, .. } => Some(message),
        _ => None,
    }
}

#[tokio::test]
async fn two_stages_with_the_same_rows_do_each_once() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, square);
    let write = |name: &str, ids: std::ops::Range<i64>| {
        write_ids(&lab.folder.path().join(name), &ids.collect::<Vec<_>>(), "x");
    };
    write("a.parquet", 0..100);
    write("b.parquet", 50..150);
    let text = "stages:\n  a: { uses: lab/rows, inputs: { rows: { path: a.parquet } } }\n  \
        b: { uses: lab/rows, inputs: { rows: { path: b.parquet } } }\n";
    let sorted = |mut ids: Vec<i64>| {
        ids.sort_unstable();
        ids
    };
    for refresh in [vec![], vec!["a".to_owned(), "b".to_owned()]] {
        lab.refresh = refresh;
        let (report, _) = lab.run(text).await;
        assert!(report.failed.is_empty(), "{:?}", report.failed);
        assert_eq!(sorted(asked.take()), (0..150).collect::<Vec<_>>(), "refresh: {:?}", lab.refresh);
        assert_eq!(report.outputs["b"]["rows"].rows, Some(100));
    }
}

#[tokio::test]
async fn a_refresh_that_is_tried_again_does_the_rows_that_failed() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, square);
    ids(&lab, &(0..20).collect::<Vec<_>>(), "x");
    counts(&mut lab).await;
    asked.take();
    let failures = AtomicU32::new(2);
    asked.program(&lab, move |columns| {
        let fails = columns["id"] == 7
            && failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
        if fails { Answer::Failed } else { square(columns) }
    });
    lab.refresh = vec!["r".into()];
    let (report, _) = lab.run(&ROWS.replace("inputs:", "retry: { attempts: 3, backoff: 1ms }, inputs:")).await;
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    let mut asked = asked.take();
    asked.sort_unstable();
    let mut wanted: Vec<i64> = (0..20).chain([7, 7]).collect();
    wanted.sort_unstable();
    assert_eq!(asked, wanted);
    let manifest = lab.store.run(&report.run).await.unwrap().unwrap();
    let (_, record) = lab.store.record(&manifest.stages["r"].key.unwrap()).await.unwrap().unwrap();
    let rows = record.rows.unwrap();
    assert_eq!((rows.executed, rows.reused, rows.failed), (20, 0, 0));
}

#[tokio::test]
async fn what_was_rejected_proves_nothing() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |columns| if columns["id"].as_i64() >= Some(3) { Answer::Die } else { square(columns) });
    ids(&lab, &[3, 1], "x");
    assert_eq!(counts(&mut lab).await.0.rejected, 1);
    ids(&lab, &[3, 4, 1], "x");
    let (rows, _) = counts(&mut lab).await;
    assert_eq!((rows.executed, rows.rejected), (1, 2), "1 is the row that shows that programs work");
}

#[tokio::test]
async fn a_column_of_the_input_that_is_made_too_is_found_before_any_row_is_done() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, square);
    let numbers = || Arc::new(arrow::array::Int64Array::from(vec![1, 2])) as arrow::array::ArrayRef;
    let batch = arrow::array::RecordBatch::try_from_iter([("id", numbers()), ("square", numbers())]).unwrap();
    table::write(&lab.folder.path().join("ids.parquet"), &batch.schema(), &[batch]).unwrap();
    let (report, _) = lab.run(ROWS).await;
    let failure = &report.failed["r"];
    insta::assert_snapshot!(format!("{}\nhint: {}", failure.message, failure.hint.as_deref().unwrap()));
    assert_eq!(asked.take(), [0i64; 0]);
}
