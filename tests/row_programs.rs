//! By-row programs that die, take long or answer much: what the engine makes of it, with fake programs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cuda_agent_engine::execute::Report;
use cuda_agent_engine::execute::launch::Exit;
use cuda_agent_engine::host::Host;
use cuda_agent_engine::store::{RowCounts, Store};
use cuda_agent_protocol::{Event, RowResult, RowStatus};
use futures::FutureExt;
use serde_json::{Value, json};

use crate::support::{Answer, Lab, row_program, square, write_ids};

const ROWS: &str = "stages: { r: { uses: lab/rows, inputs: { rows: { path: ids.parquet } } } }";

fn lab(cpus: u32, rows: i64) -> Lab {
    let mut lab = Lab::new();
    lab.host = Host::fake(cpus, "a made-up CPU");
    write_ids(&lab.folder.path().join("ids.parquet"), &(0..rows).collect::<Vec<_>>(), "x");
    lab
}

async fn counts(lab: &Lab, report: &Report) -> RowCounts {
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    let manifest = lab.store.run(&report.run).await.unwrap().unwrap();
    let (_, record) = lab.store.record(&manifest.stages["r"].key.unwrap()).await.unwrap().unwrap();
    record.rows.unwrap()
}

/// Longer than anything takes that is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until something was counted so often, while the engine goes on.
async fn reaches(count: Arc<AtomicU32>, least: u32) {
    let begun = Instant::now();
    while count.load(Ordering::SeqCst) < least {
        assert!(begun.elapsed() < PATIENCE, "{count:?} in place of {least}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether answers to rows are in a store.
async fn has_answers(store: Store) -> bool {
    !store.local().list("v1/rows").await.unwrap_or_default().is_empty()
}

fn done(row: String, output: Value) -> Result<Event, String> {
    let outputs = BTreeMap::from([("rows".into(), vec![output.as_object().unwrap().clone()])]);
    Ok(Event::Row(RowResult { row, status: RowStatus::Done, reason: None, detail: None, outputs }))
}

#[tokio::test]
async fn much_is_published_at_once_and_little_later() {
    let mut lab = lab(1, 4);
    let (asked, store) = (Arc::new(AtomicU32::new(0)), lab.store.clone());
    let counted = asked.clone();
    lab.launcher.on(
        "lab/texts",
        Arc::new(move |_, _, mut channels| {
            let (asked, store) = (counted.clone(), store.clone());
            async move {
                while let Some(row) = channels.rows.as_mut().unwrap().recv().await {
                    let mut text = "x".to_owned();
                    match asked.fetch_add(1, Ordering::SeqCst) {
                        // The clock is looked at several times meanwhile: neither the row nor the stage has taken too long.
                        1 => {
                            tokio::select! {
                                () = tokio::time::sleep(Duration::from_secs(1)) => (),
                                _ = channels.stop.changed() => return Exit::Signal(9),
                            }
                            assert!(!has_answers(store.clone()).await, "one short answer waits for others");
                            text = text.repeat(5 << 20);
                        }
                        2 => {
                            let begun = Instant::now();
                            while !has_answers(store.clone()).await {
                                assert!(begun.elapsed() < PATIENCE, "five MiB of answers are kept back");
                                tokio::time::sleep(Duration::from_millis(10)).await;
                            }
                        }
                        _ => {}
                    }
                    let _ = channels.events.send(done(row.row, json!({ "text": text }))).await;
                }
                Exit::Success
            }
            .boxed()
        }),
    );
    let text = ROWS.replace("lab/rows", "lab/texts").replace("inputs:", "timeout: 1h, inputs:");
    let (report, _) = lab.run(&text).await;
    let rows = counts(&lab, &report).await;
    assert_eq!((rows.executed, rows.rejected, asked.load(Ordering::SeqCst)), (4, 0, 4));
}

/// While a program may still do its row, it is too early to say that none was ever done.
#[tokio::test]
async fn a_row_is_judged_when_no_other_is_under_way() {
    let mut lab = lab(2, 2);
    let deaths = Arc::new(AtomicU32::new(0));
    let counted = deaths.clone();
    lab.launcher.on(
        "lab/rows",
        Arc::new(move |_, _, mut channels| {
            let deaths = counted.clone();
            async move {
                while let Some(row) = channels.rows.as_mut().unwrap().recv().await {
                    if row.columns["id"] == 1 {
                        deaths.fetch_add(1, Ordering::SeqCst);
                        return Exit::Signal(9);
                    }
                    // The engine has heard of the second death by then.
                    reaches(deaths.clone(), 2).await;
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    let _ = channels.events.send(done(row.row, json!({ "square": 0 }))).await;
                }
                Exit::Success
            }
            .boxed()
        }),
    );
    let (report, _) = lab.run(ROWS).await;
    let rows = counts(&lab, &report).await;
    assert_eq!((rows.executed, rows.rejected, deaths.load(Ordering::SeqCst)), (2, 1, 2));
}

/// Three deaths, and one for each program beside, may be the rows' doing; one more is an outage.
#[tokio::test]
async fn so_many_programs_die_before_it_is_an_outage() {
    for (cpus, programs) in [(1, 4), (2, 6)] {
        let mut lab = lab(cpus, 20);
        let started = Arc::new(AtomicU32::new(0));
        let counted = started.clone();
        lab.launcher.on(
            "lab/rows",
            Arc::new(move |_, _, mut channels| {
                let started = counted.clone();
                async move {
                    channels.rows.as_mut().unwrap().recv().await;
                    started.fetch_add(1, Ordering::SeqCst);
                    // All that may run side by side do when the first one dies.
                    reaches(started, cpus).await;
                    Exit::Signal(9)
                }
                .boxed()
            }),
        );
        let (report, _) = lab.run(ROWS).await;
        let message = &report.failed["r"].message;
        let expected = format!("{} programs died one after another: killed by SIGKILL", 3 + cpus);
        assert!(message.starts_with(&expected) && message.contains("(the last one had row "), "{message}");
        assert_eq!(started.load(Ordering::SeqCst), programs, "{message}");
    }
}

#[tokio::test]
async fn several_rows_that_kill_one_after_another_are_rejected() {
    let mut lab = lab(1, 10);
    lab.launcher.on(
        "lab/rows",
        row_program(|columns| if columns["id"].as_i64() >= Some(6) { Answer::Die } else { square(columns) }),
    );
    write_ids(&lab.folder.path().join("ids.parquet"), &[0, 1], "x");
    lab.run(ROWS).await;
    write_ids(&lab.folder.path().join("ids.parquet"), &(0..10).collect::<Vec<_>>(), "x");
    let (report, _) = lab.run(ROWS).await;
    let rows = counts(&lab, &report).await;
    assert_eq!((rows.executed, rows.rejected), (8, 4), "each program that died had a row, and one row was done before");
}

#[tokio::test]
async fn a_program_that_dies_after_its_last_answer_costs_nothing() {
    let mut lab = lab(1, 1);
    let inner = row_program(square);
    lab.launcher.on(
        "lab/rows",
        Arc::new(move |folder, request, channels| inner(folder, request, channels).map(|_| Exit::Code(1)).boxed()),
    );
    let (report, launched) = lab.run(ROWS).await;
    assert_eq!((counts(&lab, &report).await.executed, launched), (1, vec!["r".to_owned()]));
}
