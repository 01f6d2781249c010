use std::path::PathBuf;

use arrow::datatypes::{DataType, Field};
use proptest::prelude::*;
use serde_json::json;

use super::episodes::{Episode, Facts, Standing};
use super::figures::{Figure, Metric, Place};
use super::*;
use crate::trajectory::tests::example;
use crate::trajectory::{Ending, Trajectory, Turn, parquet_with};

fn settings(k: &[usize]) -> Settings {
    let subsets = vec!["reduces".into(), HEADROOM.into()];
    Settings { k: k.to_vec(), resamples: 500, seed: 3, subsets, headroom: Some(1.1) }
}

fn correct(eager: f64, compile: f64) -> Standing {
    Standing::Correct { eager: Some(eager), compile: Some(compile) }
}

const UNTIMED: Standing = Standing::Correct { eager: None, compile: None };

/// Tasks by name with their group and subsets, and what came of each episode.
fn episodes(tasks: &[(&str, &str, [bool; 2])], samples: &[(&str, bool, &str, &[Standing])]) -> Episodes {
    let mut episodes = Episodes::default();
    for (task, group, subsets) in tasks {
        let facts = Facts { group: Some((*group).to_owned()), subsets: subsets.to_vec() };
        episodes.tasks.insert((*task).to_owned(), facts);
    }
    for (policy, greedy, task, standings) in samples {
        for (sample, standing) in standings.iter().enumerate() {
            let outcome = match standing {
                Standing::Unknown => "aborted",
                Standing::Failed => "wrong",
                Standing::Correct { .. } => "correct",
            };
            episodes.episodes.push(Episode {
                task: (*task).to_owned(),
                policy: (*policy).to_owned(),
                greedy: *greedy,
                sample: sample as u32,
                outcome: outcome.to_owned(),
                standing: *standing,
            });
        }
    }
    episodes
}

/// Two policies on three tasks.
fn two_policies() -> Episodes {
    use Standing::{Failed, Unknown};
    episodes(
        &[("a", "new_shapes", [true, true]), ("b", "new_shapes", [false, false]), ("c", "new_pairs", [true, false])],
        &[
            ("base", false, "a", &[correct(2.0, 0.5), Failed, Failed, Failed]),
            ("base", false, "b", &[correct(1.0, 1.0), correct(4.0, 2.0), Failed, Unknown]),
            ("base", false, "c", &[Failed, Failed, Failed, Failed]),
            ("base", true, "a", &[Failed]),
            ("base", true, "b", &[correct(4.0, 2.0)]),
            ("trained", false, "a", &[correct(2.0, 1.5), correct(8.0, 1.5), correct(1.5, 1.1), Failed]),
            ("trained", false, "b", &[correct(2.0, 2.0), correct(2.0, 2.0), correct(2.0, 2.0), correct(2.0, 2.0)]),
            ("trained", false, "c", &[UNTIMED, Failed, Failed, Failed]),
        ],
    )
}

fn at<'a>(figures: &'a Figures, policy: &str, place: (bool, &str, &str, Metric)) -> Option<&'a Figure> {
    let (greedy, group, subset, metric) = place;
    figures.at(policy, &Place { greedy, group: group.into(), subset: subset.into(), metric })
}

fn value(figures: &Figures, policy: &str, place: (bool, &str, &str, Metric)) -> Option<f64> {
    at(figures, policy, place).map(|figure| (figure.estimate.value * 1e9).round() / 1e9)
}

fn rounded(number: f64) -> Option<f64> {
    Some((number * 1e9).round() / 1e9)
}

/// Every number by hand. Base on `b` has three verdicts, of which two are correct: the broken-off one counts nowhere.
#[test]
fn figures_are_those_computed_by_hand() {
    let figures = Figures::of(&two_policies(), &settings(&[1, 2, 4]));
    let sampled = |group, subset, metric| (false, group, subset, metric);
    let base = |place| value(&figures, "base", place);
    let trained = |place| value(&figures, "trained", place);

    assert_eq!(base(sampled("all", "all", Metric::Pass(1))), rounded((0.25 + 2.0 / 3.0 + 0.0) / 3.0));
    // 1 − C(3, 2)/C(4, 2) = ½ and 1 − C(1, 2)/C(3, 2) = 1.
    assert_eq!(base(sampled("all", "all", Metric::Pass(2))), rounded((0.5 + 1.0 + 0.0) / 3.0));
    // `b` has three verdicts, too few for pass@4.
    let pass_4 = at(&figures, "base", sampled("all", "all", Metric::Pass(4))).unwrap();
    assert_eq!((pass_4.estimate.value, pass_4.estimate.tasks, pass_4.episodes), (0.5, 2, 8));
    assert_eq!(base(sampled("new_shapes", "all", Metric::Pass(1))), rounded((0.25 + 2.0 / 3.0) / 2.0));
    assert_eq!(base(sampled("all", "reduces", Metric::Pass(1))), rounded((0.25 + 0.0) / 2.0));
    assert_eq!(base(sampled("all", "headroom", Metric::Pass(1))), rounded(0.25));
    assert_eq!(base(sampled("new_pairs", "headroom", Metric::Pass(1))), None);

    // Faster by any margin, and a speed-up of 1 is none.
    assert_eq!(base(sampled("all", "all", Metric::FasterThanEager)), rounded((0.25 + 1.0 / 3.0) / 3.0));
    assert_eq!(base(sampled("all", "all", Metric::FasterThanCompile)), rounded((1.0 / 3.0) / 3.0));
    // First within a task: √(1 · 4) = 2; then over tasks: √(2 · 2).
    assert_eq!(base(sampled("all", "all", Metric::SpeedupEager)), rounded(2.0));
    // √(½ · √(1 · 2)).
    assert_eq!(base(sampled("all", "all", Metric::SpeedupCompile)), rounded((0.5 * 2f64.sqrt()).sqrt()));
    assert_eq!(base((true, "all", "all", Metric::Pass(1))), rounded(0.5));
    assert_eq!(base((true, "all", "all", Metric::Pass(2))), None);

    // A correct answer without a time is not faster; where no correct one has a time, nothing is said of speed.
    assert_eq!(trained(sampled("all", "all", Metric::FasterThanEager)), rounded((0.75 + 1.0 + 0.0) / 3.0));
    assert_eq!(trained(sampled("new_pairs", "all", Metric::FasterThanEager)), None);
    assert_eq!(trained(sampled("new_pairs", "all", Metric::SpeedupEager)), None);
    // Where nothing is correct, nothing is faster.
    assert_eq!(base(sampled("new_pairs", "all", Metric::FasterThanEager)), Some(0.0));

    // a: ¾ − ¼, b: 1 − ⅔, c: ¼ − 0.
    let place = |metric| Place { greedy: false, group: "all".into(), subset: "all".into(), metric };
    let difference = figures.difference_at("trained", &place(Metric::Pass(1))).unwrap();
    assert_eq!(rounded(difference.estimate.value), rounded((0.5 + 1.0 / 3.0 + 0.25) / 3.0));
    assert!(difference.estimate.low >= 0.25 && difference.estimate.high <= 0.5, "{difference:?}");
    // a: 24^⅓ / 2, b: 2 / 2.
    let faster = figures.difference_at("trained", &place(Metric::SpeedupEager)).unwrap();
    assert_eq!(rounded(faster.estimate.value), rounded((24f64.powf(1.0 / 3.0) / 2.0).sqrt()));
    assert_eq!(faster.estimate.tasks, 2);
    assert!(figures.difference_at("trained", &Place { greedy: true, ..place(Metric::Pass(1)) }).is_none());

    let aborted: Vec<_> = figures.outcomes.iter().filter(|it| !it.counted && it.group == "all").collect();
    assert_eq!((aborted.len(), aborted[0].episodes, aborted[0].share), (1, 1, 1.0 / 12.0));
}

#[test]
fn the_report_reads_from_above() {
    let (figures, settings) = (Figures::of(&two_policies(), &settings(&[1, 4])), settings(&[1, 4]));
    insta::assert_snapshot!(text::markdown("Held-out <evaluation>", &figures, &settings));
    insta::assert_snapshot!(page::html("Held-out <evaluation>", &figures, &settings));
}

fn any_standing() -> impl Strategy<Value = Standing> {
    let speed = || proptest::option::weighted(0.8, 0.1f64..10.0);
    prop_oneof![
        1 => Just(Standing::Unknown),
        4 => Just(Standing::Failed),
        5 => (speed(), speed()).prop_map(|(eager, compile)| Standing::Correct { eager, compile }),
    ]
}

fn any_episodes() -> impl Strategy<Value = Episodes> {
    let sample = proptest::collection::vec(any_standing(), 1..5);
    let task = (0..3u8, any::<[bool; 2]>(), proptest::collection::vec((any::<bool>(), any::<bool>(), sample), 1..4));
    proptest::collection::vec(task, 1..12).prop_map(|tasks| {
        let mut made = Episodes::default();
        for (number, (group, subsets, samples)) in tasks.into_iter().enumerate() {
            let name = format!("task {number}");
            let group = (group > 0).then(|| format!("group {group}"));
            made.tasks.insert(name.clone(), Facts { group, subsets: subsets.to_vec() });
            let mut next: std::collections::BTreeMap<(bool, bool), u32> = std::collections::BTreeMap::new();
            for (policy, greedy, standings) in samples {
                for standing in standings {
                    let sample = next.entry((policy, greedy)).or_default();
                    let policy = if policy { "one" } else { "other" }.to_owned();
                    let outcome = format!("{standing:?}").chars().take(7).collect();
                    let task = name.clone();
                    made.episodes.push(Episode { task, policy, greedy, sample: *sample, outcome, standing });
                    *sample += 1;
                }
            }
        }
        made
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn intervals_hold_their_values_and_rows_have_no_order(
        (episodes, order) in any_episodes().prop_flat_map(|episodes| {
            let places: Vec<usize> = (0..episodes.episodes.len()).collect();
            (Just(episodes), Just(places).prop_shuffle())
        })
    ) {
        let figures = Figures::of(&episodes, &settings(&[1, 2]));
        for figure in figures.figures.iter().chain(&figures.differences) {
            let estimate = figure.estimate;
            let slack = 1e-9 * estimate.value.abs().max(1.0);
            prop_assert!(estimate.low <= estimate.value + slack && estimate.value <= estimate.high + slack, "{figure:?}");
            prop_assert!(estimate.tasks > 0 && estimate.tasks <= episodes.tasks.len());
            let is_rate = !figure.place.metric.is_speedup() && figures.figures.contains(figure);
            prop_assert!(!is_rate || (0.0..=1.0).contains(&estimate.low) && (0.0..=1.0).contains(&estimate.high));
        }
        let shares: f64 = figures.outcomes.iter().filter(|it| it.group == ALL).map(|it| it.share).sum();
        let ways: std::collections::BTreeSet<_> = episodes.episodes.iter().map(|it| (&it.policy, it.greedy)).collect();
        prop_assert!((shares - ways.len() as f64).abs() < 1e-9);

        // The first policy is the one that the tables name first, so it is kept in front.
        let mut shuffled = episodes.clone();
        let first = episodes.episodes[0].policy.clone();
        shuffled.episodes = order.iter().map(|place| episodes.episodes[*place].clone()).collect();
        shuffled.episodes.sort_by_key(|episode| episode.policy != first);
        prop_assert_eq!(Figures::of(&shuffled, &settings(&[1, 2])), figures);
    }
}

/// A table with a group, a subset and a headroom.
fn table(folder: &Path, trajectories: &[(Trajectory, &str, Option<f64>)]) -> PathBuf {
    let rows: Vec<_> = trajectories
        .iter()
        .map(|(trajectory, group, headroom)| {
            let mut row = trajectory.to_row().unwrap();
            row.insert("kind_of".into(), json!(group));
            row.insert("room".into(), json!(headroom));
            row.insert("reduces".into(), json!(*group == "b"));
            row
        })
        .collect();
    let field = |name: &str, kind| Field::new(name, kind, true);
    let more =
        [field("kind_of", DataType::Utf8), field("room", DataType::Float64), field("reduces", DataType::Boolean)];
    let path = folder.join("trajectories.parquet");
    fs::write(&path, parquet_with(&rows, &more)).unwrap();
    path
}

fn columns() -> Columns {
    Columns { group: "kind_of".into(), subsets: vec!["reduces".into()], headroom: ("room".into(), 1.1) }
}

#[test]
fn a_table_is_read_with_its_tasks_columns() {
    let folder = tempfile::tempdir().unwrap();
    let good = |turn: &Turn, compile| Turn {
        outcome: Some("correct".into()),
        reward: Some(1.0),
        speedup_eager: Some(2.0),
        speedup_compile: Some(compile),
        ..turn.clone()
    };
    let bad =
        |turn: &Turn| Turn { outcome: Some("wrong".into()), reward: Some(-1.0), speedup_eager: None, ..turn.clone() };
    let plain = Trajectory { policy_digest: Some("0123456789".into()), ..example() };
    let mut spoiled = Trajectory { sample: 0, ..plain.clone() };
    (spoiled.turns[1], spoiled.turns[3]) = (good(&spoiled.turns[1], 1.5), bad(&spoiled.turns[3]));
    let mut faster = Trajectory { sample: 1, ..plain.clone() };
    (faster.turns[1], faster.turns[3]) = (good(&faster.turns[1], 1.5), good(&faster.turns[3], 0.5));
    let mut greedy = Trajectory { task_digest: "c".into(), temperature: 0.0, sample: 0, ..plain.clone() };
    (greedy.reward, greedy.reward_at, greedy.finish_reason) = (None, None, Ending::Aborted);
    let mut unsupported = Trajectory { sample: 2, ..plain };
    (unsupported.reward, unsupported.reward_at) = (None, None);
    for turn in [1, 3] {
        unsupported.turns[turn].outcome = Some("unsupported".into());
        unsupported.turns[turn].reward = None;
    }
    let path = table(
        folder.path(),
        &[(spoiled, "a", Some(1.2)), (faster, "a", Some(1.2)), (greedy, "b", None), (unsupported, "a", Some(1.2))],
    );
    let read = |score| {
        let mut episodes = Episodes::default();
        episodes.read(&path, None, &columns(), score).unwrap();
        episodes.check().unwrap();
        episodes
    };
    let best = read(Score::Best);
    let standings = |episodes: &Episodes| episodes.episodes.iter().map(|it| it.standing).collect::<Vec<_>>();
    let fast = correct(2.0, 1.5);
    assert_eq!(standings(&best), [fast, fast, Standing::Unknown, Standing::Unknown]);
    let last = standings(&read(Score::Last));
    assert_eq!(last, [Standing::Failed, correct(2.0, 0.5), Standing::Unknown, Standing::Unknown]);
    assert_eq!(best.episodes[0].policy, "m 01234567");
    assert_eq!(best.episodes.iter().map(|it| it.greedy).collect::<Vec<_>>(), [false, false, true, false]);
    assert_eq!(best.episodes[2].outcome, "aborted");
    assert_eq!(best.tasks["abcdef0123456789"], Facts { group: Some("a".into()), subsets: vec![false, true] });
    assert_eq!(best.tasks["c"], Facts { group: Some("b".into()), subsets: vec![true, false] });

    // The same table twice under one name would count each episode twice.
    let mut twice = best.clone();
    twice.read(&path, None, &columns(), Score::Best).unwrap();
    assert!(twice.check().unwrap_err().message.contains("has two sampled episodes 0 of task abcdef01"));
    let mut missing = Episodes::default();
    let error = missing.read(&path, None, &Columns { group: "category".into(), ..columns() }, Score::Best).unwrap_err();
    assert!(error.message.ends_with("the trajectories have no column `category`"), "{}", error.message);
}

#[test]
fn a_task_has_one_group() {
    let folder = tempfile::tempdir().unwrap();
    let path = table(folder.path(), &[(example(), "a", None), (Trajectory { sample: 4, ..example() }, "b", None)]);
    let error = Episodes::default().read(&path, None, &columns(), Score::Best).unwrap_err();
    assert!(error.message.contains("task abcdef01 has other values"), "{}", error.message);
}

#[test]
fn parameters_that_make_no_sense_are_refused() {
    let params = || Params {
        names: Vec::new(),
        title: String::new(),
        group: String::new(),
        subsets: Vec::new(),
        headroom_column: "room".into(),
        headroom: 1.1,
        k: vec![4, 1, 4],
        score: Score::Best,
        resamples: 100,
        seed: 0,
    };
    let (_, settings) = params().settings().unwrap();
    assert_eq!((settings.k, settings.subsets), (vec![1, 4], vec![HEADROOM.to_owned()]));
    for wrong in [Params { k: vec![], ..params() }, Params { k: vec![0, 1], ..params() }] {
        assert!(wrong.settings().unwrap_err().message.starts_with("k: expected"));
    }
    let taken = Params { subsets: vec!["headroom".into()], ..params() };
    assert_eq!(taken.settings().unwrap_err().message, "subsets: `headroom` is a name of the report's own");
}
