//! Programs of a by-row stage: how many there are, what their failures say, and how they are stopped.

use super::*;

#[tokio::test]
async fn programs_that_need_no_core_are_no_more_than_the_cores() {
    let mut lab = Lab::new();
    let (running, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (inner, counted, highest) = (row_program(square), running.clone(), most.clone());
    lab.launcher.on(
        "lab/idle",
        Arc::new(move |folder, request, channels| {
            highest.fetch_max(counted.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let (program, counted) = (inner(folder, request, channels), counted.clone());
            futures::FutureExt::boxed(async move {
                let exit = program.await;
                counted.fetch_sub(1, Ordering::SeqCst);
                exit
            })
        }),
    );
    ids(&lab, &(0..500).collect::<Vec<_>>(), "x");
    let (report, _) = lab.run(&ROWS.replace("lab/rows", "lab/idle")).await;
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    assert_eq!(running.load(Ordering::SeqCst), 0);
    let most = most.load(Ordering::SeqCst);
    assert!((2..=lab.host.cpus).contains(&most), "{most}");
}

#[tokio::test]
async fn failures_name_the_rows_that_a_program_had() {
    let mut lab = Lab::new();
    lab.launcher.on(
        "lab/rows",
        Arc::new(|folder, _, channels| {
            futures::FutureExt::boxed(async move {
                channels.rows.unwrap().recv().await;
                std::fs::write(
                    folder.join("error.json"),
                    r#"{"kind": "internal", "message": "KeyError: 'x'", "hint": null}"#,
                )
                .unwrap();
                Exit::Code(1)
            })
        }),
    );
    ids(&lab, &[5], "x");
    let mut told = Vec::new();
    let (report, _) = lab.run(ROWS).await;
    told.push(report.failed["r"].message.clone());
    lab.launcher.on(
        "lab/rows",
        Arc::new(|_, _, channels| {
            futures::FutureExt::boxed(async move {
                let row = channels.rows.unwrap().recv().await.unwrap().row;
                let result = |row| cuda_agent_protocol::RowResult {
                    row,
                    status: cuda_agent_protocol::RowStatus::Rejected,
                    reason: None,
                    detail: None,
                    outputs: Default::default(),
                };
                for _ in 0..2 {
                    let _ = channels.events.send(Ok(cuda_agent_protocol::Event::Row(result(row.clone())))).await;
                }
                std::future::pending().await
            })
        }),
    );
    let (report, _) = lab.run(ROWS).await;
    told.push(report.failed["r"].message.clone());
    insta::assert_snapshot!(told.join("\n"));
}

#[tokio::test]
async fn more_rejected_rows_than_are_allowed_fail_the_stage() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, |columns| if columns["id"].as_i64() > Some(7) { Answer::Rejected } else { square(columns) });
    ids(&lab, &(0..10).collect::<Vec<_>>(), "x");
    let limited = |most: u32| ROWS.replace("inputs:", &format!("max_rejected: {most}, retry: 3, inputs:"));
    let (report, _) = lab.run(&limited(1)).await;
    let failure = &report.failed["r"];
    insta::assert_snapshot!(format!("{}\nhint: {}", failure.message, failure.hint.as_deref().unwrap()));
    assert_eq!(asked.take().len(), 10, "it is not tried again");
    let (report, _) = lab.run(&limited(2)).await;
    assert_eq!((report.outputs["r"]["rows"].rows, asked.take().len()), (Some(8), 0), "what is done stays done");
    // The limit is not in the key, but holds for results that are there, too.
    assert_eq!(lab.plan(&limited(2)).await, "r: hit");
    assert_eq!(lab.plan(&limited(1)).await, "r: miss (2 of its rows are rejected, more than 1)");
    let (report, _) = lab.run(&limited(1)).await;
    assert!(report.failed.contains_key("r") && asked.take().is_empty());
}

#[tokio::test]
async fn resources_come_back_whatever_a_program_does() {
    let mut lab = Lab::new();
    // The only cores are held by a by-row stage that fails; another stage must still get them.
    lab.host = Host::fake(1, "a made-up CPU");
    let bad = Arc::new(|_, _, _| futures::FutureExt::boxed(async { Exit::Success }));
    lab.launcher.on("lab/rows", bad);
    ids(&lab, &[1, 2], "x");
    let text = "stages:\n  r: { uses: lab/rows, inputs: { rows: { path: ids.parquet } } }\n  \
        late: { uses: lab/make, with: { text: late } }\n  later: { uses: lab/join, inputs: { a: late.out } }\n";
    let run = tokio::time::timeout(std::time::Duration::from_secs(20), lab.run(text));
    let (report, _) = run.await.expect("the run ends");
    assert!(report.failed["r"].message.contains("left 1 rows unanswered"), "{:?}", report.failed);
    assert_eq!(report.executed, ["late", "later"]);
}

#[tokio::test]
async fn a_misleading_index_is_found_out() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    asked.program(&lab, square);
    ids(&lab, &[1, 2, 3, 4], "x");
    counts(&mut lab).await;
    let index = std::fs::read_dir(lab.folders().cache.join("rows")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&index).unwrap();
    let end = bytes.len();
    let (first, second) = bytes[end - 64..].split_at_mut(32);
    first.swap_with_slice(second);
    std::fs::write(&index, bytes).unwrap();
    ids(&lab, &[4, 3, 2, 1], "x");
    let (rows, table) = counts(&mut lab).await;
    assert_eq!(rows.executed, 0);
    let squares: Vec<_> = table.iter().map(|row| row["square"].as_i64().unwrap()).collect();
    assert_eq!(squares, [16, 9, 4, 1]);
}

/// A by-row program that takes its first rows, does something, and ends when it is asked to, which it notes.
pub(super) fn until_stopped(lab: &Lab, kind: &str, on_row: impl Fn() + Send + Sync + 'static) -> Arc<AtomicU32> {
    let (stopped, on_row) = (Arc::new(AtomicU32::new(0)), Arc::new(on_row));
    let noted = stopped.clone();
    lab.launcher.on(
        kind,
        Arc::new(move |_, _, mut channels| {
            let (stopped, on_row) = (noted.clone(), on_row.clone());
            futures::FutureExt::boxed(async move {
                channels.rows.as_mut().unwrap().recv().await;
                on_row();
                let _ = channels.stop.changed().await;
                stopped.fetch_add(1, Ordering::SeqCst);
                Exit::Signal(15)
            })
        }),
    );
    stopped
}

#[tokio::test]
async fn a_stage_that_takes_too_long_ends_its_programs() {
    let mut lab = Lab::new();
    let stopped = until_stopped(&lab, "lab/rows", || ());
    ids(&lab, &[1, 2], "x");
    let (report, _) = lab.run(&ROWS.replace("inputs:", "timeout: 500ms, inputs:")).await;
    insta::assert_snapshot!(report.failed["r"].message);
    assert!(stopped.load(Ordering::SeqCst) > 0);
}

#[tokio::test]
async fn an_interrupt_reaches_the_programs_of_a_stage() {
    let mut lab = Lab::new();
    let interrupt = lab.interrupt.clone();
    let stopped = until_stopped(&lab, "lab/rows", move || {
        let _ = interrupt.lock().unwrap().as_ref().unwrap().send(());
    });
    ids(&lab, &[1], "x");
    let (report, _) = lab.run(ROWS).await;
    assert_eq!((report.outcome, stopped.load(Ordering::SeqCst)), (RunOutcome::Interrupted, 1));
}

/// Four rows are at the program; three of them only wait behind the one that takes too long.
#[tokio::test]
async fn a_row_that_takes_too_long_twice_is_rejected_and_those_behind_it_are_not() {
    let (mut lab, asked) = (Lab::new(), Asked::default());
    lab.host = Host::fake(1, "a made-up CPU");
    let counted = asked.clone();
    let inner = row_program(move |columns| {
        counted.0.lock().unwrap().push(columns["id"].as_i64().unwrap());
        if columns["id"] == 3 { Answer::Hang } else { square(columns) }
    });
    lab.launcher.on(
        "lab/limited",
        Arc::new(move |folder, request, channels| {
            let mut stop = channels.stop.clone();
            let program = inner(folder, request, channels);
            futures::FutureExt::boxed(async move {
                tokio::select! {
                    exit = program => exit,
                    _ = stop.changed() => Exit::Signal(9),
                }
            })
        }),
    );
    ids(&lab, &(0..8).collect::<Vec<_>>(), "x");
    let (report, _) = lab.run(&ROWS.replace("lab/rows", "lab/limited")).await;
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    assert_eq!(report.outputs["r"]["rows"].rows, Some(7));
    let mut asked = asked.take();
    asked.sort_unstable();
    let told: Vec<&str> = lab.events.iter().filter_map(message).collect();
    assert!(told.iter().any(|told| told.ends_with("(id=3) is rejected: timeout: it took too long, twice")), "{told:?}");
    assert_eq!(asked.iter().filter(|id| **id == 3).count(), 2);
}

#[tokio::test]
async fn a_failure_names_some_of_the_rows_and_counts_the_rest() {
    let mut lab = Lab::new();
    lab.host = Host::fake(1, "a made-up CPU");
    lab.launcher.on("lab/limited", Arc::new(|_, _, _| futures::FutureExt::boxed(async { Exit::Success })));
    ids(&lab, &[1, 2, 3, 4], "x");
    let (report, _) = lab.run(&ROWS.replace("lab/rows", "lab/limited")).await;
    let message = &report.failed["r"].message;
    assert!(message.starts_with("the program ended well, but left 4 rows unanswered: row "), "{message}");
    assert!(message.ends_with(" and 1 more"), "{message}");
}
