//! `ops/publish`: chosen tasks as a Hugging Face dataset folder.
//!
//! The folder has `data/` with exactly the released set's columns, `measurements/` with everything else that is
//! known of the same rows, and the card. The same rows are also written as verl's trainers read them. All of it is a
//! function of the inputs and the parameters.

mod caps;
mod card;
mod columns;
mod diversity;
mod funnel;
mod left_out;
mod select;
mod table;
mod verl;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cuda_agent_protocol::request::InputRequest;
use cuda_agent_protocol::{Event, Program, ProgramError};
use serde::Deserialize;
use serde_json::{Map, Value};

use caps::{Cap, Caps};
use card::Card;
use funnel::Report;
use left_out::LeftOut;
use select::{Candidate, PAPER_ROWS, Quota, Selection, Shortfall};
use table::Tasks;

const VERL_FILE: &str = "train.parquet";
const SAMPLES_FILE: &str = "data/train-00000-of-00001.parquet";
const MEASUREMENTS_FILE: &str = "measurements/train-00000-of-00001.parquet";

/// Runs the program in the current folder; the result is its exit status.
pub fn main() -> u8 {
    Program::main(run)
}

/// The kind's parameters.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    count: usize,
    shares: BTreeMap<String, Value>,
    refill: bool,
    min_count: usize,
    max_operator_share: f64,
    max_wide_share: f64,
    max_bilinear_share: f64,
    max_pair_share: f64,
    title: String,
    licence: String,
}

impl Params {
    fn read(params: &Map<String, Value>) -> Result<Self, ProgramError> {
        serde_json::from_value(Value::Object(params.clone())).map_err(|error| wrong_params(error.to_string()))
    }

    fn quota(&self) -> Result<Quota, ProgramError> {
        let mut weights = BTreeMap::new();
        for (category, weight) in &self.shares {
            let weight = weight.as_f64().filter(|weight| weight.is_finite() && *weight >= 0.0);
            let complaint = || wrong_params(format!("shares: the weight of `{category}` must be a number, 0 or more"));
            weights.insert(category.clone(), weight.ok_or_else(complaint)?);
        }
        if weights.is_empty() {
            weights.extend(PAPER_ROWS.map(|(category, rows)| (category.to_owned(), rows)));
        }
        if weights.values().all(|weight| *weight == 0.0) {
            return Err(wrong_params("shares: at least one weight must be more than 0"));
        }
        let count = (self.count > 0).then_some(self.count);
        Ok(Quota { count, weights, refill: self.refill, caps: self.caps()? })
    }

    fn caps(&self) -> Result<Caps, ProgramError> {
        let shares = [
            ("max_operator_share", self.max_operator_share),
            ("max_wide_share", self.max_wide_share),
            ("max_bilinear_share", self.max_bilinear_share),
            ("max_pair_share", self.max_pair_share),
        ];
        match shares.iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
            Some((name, share)) => Err(wrong_params(format!("{name}: a share is between 0 and 1, not {share}"))),
            None => Ok(Caps {
                operator: self.max_operator_share,
                wide: self.max_wide_share,
                bilinear: self.max_bilinear_share,
                pair: self.max_pair_share,
            }),
        }
    }
}

fn wrong_params(message: impl Into<String>) -> ProgramError {
    ProgramError { kind: "params".to_owned(), message: message.into(), hint: None }
}

fn run(program: &mut Program) -> Result<(), ProgramError> {
    let params = Params::read(&program.request.params)?;
    let quota = params.quota()?;
    let tasks_path = input(program, "tasks")?.ok_or_else(|| ProgramError::input("the input `tasks` is missing"))?;
    let tasks = Tasks::read(&tasks_path)?;
    let report = input(program, "report")?.map(|folder| Report::read(&folder)).transpose()?.flatten();
    let left_out = input(program, "left_out")?.map(|table| LeftOut::read(&table)).transpose()?;

    let candidates = tasks.candidates();
    let selection = select::select(&candidates, &quota);
    for message in warnings(&candidates, &quota, &selection) {
        program.send(&Event::Log { level: "warning".to_owned(), message });
    }
    let made = report.as_ref().map_or(candidates.len(), |report| report.total_in as usize);
    require(params.min_count, &quota, &candidates, &selection, made)?;

    let samples = tasks.samples(&selection.rows)?;
    let measurements = tasks.measurements(&selection.rows)?;
    let (samples_bytes, measurements_bytes) = (table::parquet(&samples)?, table::parquet(&measurements)?);
    let card = Card {
        title: &params.title,
        licence: &params.licence,
        samples: &samples,
        measurements: &measurements,
        download_size: samples_bytes.len(),
        considered: candidates.len(),
        quota: &quota,
        selection: &selection,
        report: report.as_ref(),
        left_out: left_out.as_ref(),
    };
    let dataset = output(program, "dataset")?;
    table::write(&dataset.join("README.md"), card.text().as_bytes())?;
    table::write(&dataset.join(SAMPLES_FILE), &samples_bytes)?;
    table::write(&dataset.join(MEASUREMENTS_FILE), &measurements_bytes)?;
    table::write(&output(program, "samples")?, &samples_bytes)?;
    table::write(&output(program, "measurements")?, &measurements_bytes)?;
    let verl_bytes = table::parquet(&verl::rows(&samples, &measurements)?)?;
    table::write(&output(program, "verl")?.join(VERL_FILE), &verl_bytes)?;
    let done = selection.rows.len() as u64;
    program.send(&Event::Progress { done, total: Some(done), unit: "tasks".to_owned() });
    Ok(())
}

/// What is worth knowing, though it stops nothing.
fn warnings(candidates: &[Candidate], quota: &Quota, selection: &Selection) -> Vec<String> {
    let mut warnings: Vec<String> = selection.short.iter().map(|shortfall| warning(shortfall, quota.refill)).collect();
    if quota.count.is_some() {
        let categories = selection.rows.iter().map(|row| candidates[*row].category.as_str());
        // A share of few rows can't be met better than to a row.
        let allowed = (100.0 / selection.rows.len().max(1) as f64).max(1.0);
        let shares = select::shares(categories, &quota.weights);
        warnings.extend(shares.iter().filter(|share| share.deviation().abs() > allowed).map(|share| {
            format!(
                "{}: {:.2} % of the rows instead of {:.2} %, {:+.2} percentage points",
                share.category,
                share.percent,
                share.asked,
                share.deviation()
            )
        }));
    }
    if !selection.passed_over.is_empty() {
        warnings.push(format!("passed over for caps: {}", passed_over(selection)));
    }
    warnings
}

fn warning(shortfall: &Shortfall, refill: bool) -> String {
    let consequence = match (shortfall.taken, refill) {
        (0, _) => "the dataset has none of it",
        (_, true) => "other categories fill the gap",
        (_, false) => "the dataset is smaller for it",
    };
    format!("{shortfall}; {consequence}")
}

/// `12 for one operator, 3 for one pair of operators`.
fn passed_over(selection: &Selection) -> String {
    let described = |(cap, rows): (&Cap, &usize)| format!("{} for {cap}", grouped(*rows as u64));
    selection.passed_over.iter().map(described).collect::<Vec<_>>().join(", ")
}

/// Fails where too few rows were chosen of `made` tasks, with what is missing and how many more it would take.
fn require(
    least: usize,
    quota: &Quota,
    candidates: &[Candidate],
    selection: &Selection,
    made: usize,
) -> Result<(), ProgramError> {
    let chosen = selection.rows.len();
    if chosen >= least {
        return Ok(());
    }
    let mut message = format!(
        "{} of {} tasks can be published, min_count asks for {}",
        grouped(chosen as u64),
        grouped(made as u64),
        grouped(least as u64)
    );
    let missing = missing(least, quota, candidates, selection);
    if !missing.is_empty() {
        message += &format!("; short: {}", missing.join(", "));
    }
    if !selection.passed_over.is_empty() {
        message += &format!("; passed over for caps: {}", passed_over(selection));
    }
    let more = match tasks_needed(chosen, least, made) {
        Some(needed) => format!(
            "make about {} more tasks, {} in all (count of ops/synthesize)",
            grouped((needed - made) as u64),
            grouped(needed as u64)
        ),
        None => "make more tasks (count of ops/synthesize)".to_owned(),
    };
    let hint = format!("{more}, look at what the filters rejected, or lower min_count");
    Err(ProgramError::input(message).with_hint(hint))
}

/// `torch#1 12 of 204` for each category with fewer rows than its share of `least`.
fn missing(least: usize, quota: &Quota, candidates: &[Candidate], selection: &Selection) -> Vec<String> {
    let described = |(category, wanted): (&str, usize)| {
        let chosen = selection.rows.iter().filter(|row| candidates[**row].category == category).count();
        (chosen < wanted).then(|| format!("{category} {} of {}", grouped(chosen as u64), grouped(wanted as u64)))
    };
    select::wanted(least, &quota.weights).into_iter().filter_map(described).collect()
}

/// How many tasks must be made so that `least` can be published, if as many of them can be as of the `made` ones; with a
/// twentieth to spare, and rounded up. Unknown where none could be.
fn tasks_needed(chosen: usize, least: usize, made: usize) -> Option<usize> {
    if chosen == 0 {
        return None;
    }
    let needed = 1.05 * least as f64 / chosen as f64 * made as f64;
    let step = if needed > 1000.0 { 100.0 } else { 10.0 };
    Some(((needed / step).ceil() * step) as usize)
}

/// A number with a comma after each three digits.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn input(program: &Program, port: &str) -> Result<Option<PathBuf>, ProgramError> {
    match program.request.inputs.get(port) {
        None => Ok(None),
        Some(InputRequest::One(file)) => Ok(Some(file.path.clone())),
        Some(InputRequest::List(_)) => Err(ProgramError::input(format!("the input `{port}` takes one artifact"))),
    }
}

fn output(program: &Program, port: &str) -> Result<PathBuf, ProgramError> {
    let complaint = || ProgramError::environment(format!("the request has no output `{port}`"));
    program.request.outputs.get(port).map(|output| Path::new(&output.path).to_owned()).ok_or_else(complaint)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Float64Array, Int64Array, ListArray, RecordBatch, StringArray};
    use arrow::datatypes::Float64Type;
    use serde_json::json;

    use super::*;

    /// Six categories, `each` rows of every one, as a measured and filtered table looks.
    fn measured(each: usize) -> RecordBatch {
        let rows: Vec<(usize, &str)> =
            (0..each).flat_map(|_| PAPER_ROWS.iter().map(|(name, _)| *name)).enumerate().collect();
        let text = |make: &dyn Fn(usize, &str) -> String| -> ArrayRef {
            Arc::new(rows.iter().map(|(index, name)| Some(make(*index, name))).collect::<StringArray>())
        };
        RecordBatch::try_from_iter([
            ("task_id", text(&|index, _| format!("task-{index:03}"))),
            (
                "code",
                text(&|index, name| {
                    let header =
                        if name == "transformers" { "# Piece, taken from a.py of transformers 5.1.0.\n" } else { "" };
                    format!("{header}class Model:  # {index}\n    pass\n")
                }),
            ),
            ("ops", text(&|index, _| format!("[\"nn.ReLU\",\"torch.op{index}\"]"))),
            ("data_source", text(&|_, name| name.to_owned())),
            ("eager_ms", Arc::new(rows.iter().map(|(index, _)| 1.0 + *index as f64).collect::<Float64Array>())),
            ("eager_trials", Arc::new(rows.iter().map(|(index, _)| 20 - (*index as i64) % 4).collect::<Int64Array>())),
            ("device", text(&|_, _| "CPU | 2 cores".to_owned())),
            ("torch", text(&|_, _| "2.9.0".to_owned())),
            ("threads", Arc::new(rows.iter().map(|_| 1).collect::<Int64Array>())),
        ])
        .unwrap()
    }

    fn paper(count: Option<usize>) -> Quota {
        let weights = PAPER_ROWS.map(|(name, rows)| (name.to_owned(), rows)).into();
        Quota { count, weights, refill: true, caps: Caps { wide: 0.06, pair: 0.005, ..Caps::default() } }
    }

    fn card(title: &str, count: usize, report: Option<&Report>) -> String {
        let tasks = Tasks::new(measured(10)).unwrap();
        let quota = paper(Some(count));
        let selection = select::select(&tasks.candidates(), &quota);
        let left_out = [("torch#1", "too slow"), ("transformers", "too large"), ("transformers", "too slow")];
        let left_out: LeftOut =
            left_out.map(|(name, reason)| (name.to_owned(), reason.to_owned())).into_iter().collect();
        let samples = tasks.samples(&selection.rows).unwrap();
        let measurements = tasks.measurements(&selection.rows).unwrap();
        Card {
            title,
            licence: "cc-by-4.0",
            samples: &samples,
            measurements: &measurements,
            download_size: 1234,
            considered: 60,
            quota: &quota,
            selection: &selection,
            report,
            left_out: Some(&left_out),
        }
        .text()
    }

    fn params(text: &str) -> Params {
        let mut values = json!({
            "count": 0, "shares": {}, "refill": true, "min_count": 1, "title": "t", "licence": "mit",
            "max_operator_share": 0.03, "max_wide_share": 0.06, "max_bilinear_share": 0.01, "max_pair_share": 0.005,
        });
        let given: Map<String, Value> = serde_json::from_str(text).unwrap();
        values.as_object_mut().unwrap().extend(given);
        Params::read(values.as_object().unwrap()).unwrap()
    }

    #[test]
    fn the_card_says_what_is_in_the_folder() {
        let report: Report = serde_json::from_value(json!({
            "total_in": 80, "total_kept": 60, "in": {"torch#1": 80},
            "rules": [
                {"name": "eager_time", "reason": "Neither too fast nor too slow.", "applied": true,
                 "params": {"min_ms": 1, "max_ms": 100.0}, "rejected": 20, "failing": 21},
                {"name": "modes_agree", "reason": "Modes agree.", "applied": false,
                 "not_applied_because": "left out by the parameter skip", "params": {}, "rejected": 0},
                {"name": "contaminated", "reason": "Unlike a benchmark.", "applied": true, "rejected": 0},
            ],
        }))
        .unwrap();
        let mut settings = insta::Settings::clone_current();
        // Beside the sources, not among them: a snapshot makes no result.
        settings.set_snapshot_path("../../tests/snapshots");
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.bind(|| insta::assert_snapshot!("card", card("Ops: \"small\"", 16, Some(&report))));
    }

    #[test]
    fn code_of_transformers_is_said_to_be_under_its_own_licence() {
        let only_torch = measured(2).slice(0, 5);
        let tasks = Tasks::new(only_torch).unwrap();
        let rows: Vec<usize> = (0..5).collect();
        let (samples, measurements) = (tasks.samples(&rows).unwrap(), tasks.measurements(&rows).unwrap());
        let without = Card {
            title: "t",
            licence: "mit",
            samples: &samples,
            measurements: &measurements,
            download_size: 1,
            considered: 5,
            quota: &paper(None),
            selection: &Selection::default(),
            report: None,
            left_out: None,
        };
        assert!(!without.text().contains("Apache"));
        assert!(card("Ops", 12, None).contains("Apache-2.0"));
    }

    #[test]
    fn a_card_without_a_report_says_so() {
        assert!(card("Ops", 6, None).contains("No filter report was given"));
    }

    #[test]
    fn only_a_comparison_that_was_made_counts_as_decontamination() {
        let mut report = json!({
            "total_in": 1, "total_kept": 1,
            "rules": [{"name": "contaminated", "reason": "Unlike.", "applied": true, "rejected": 7,
                       "params": {"max_similarity": 0.9}}],
        });
        let card = |report: &Value| card("Ops", 6, Some(&serde_json::from_value(report.clone()).unwrap()));
        assert!(card(&report).contains("None: no benchmark was given"));
        report["references"] = json!(250);
        let text = card(&report);
        assert!(text.contains("compared with 250 reference programs"), "{text}");
        assert!(text.contains("- `contaminated` (max_similarity 0.9): Unlike. 7 rejected."), "{text}");
        assert!(!text.contains("no benchmark was given"), "{text}");
    }

    #[test]
    fn a_defect_counts_as_checked_only_where_its_rule_was_applied() {
        let report: Report = serde_json::from_value(json!({
            "total_in": 9, "total_kept": 4,
            "rules": [
                {"name": "finite", "reason": "", "applied": true, "rejected": 3},
                {"name": "not_constant", "reason": "", "applied": true, "rejected": 1},
                {"name": "distinguishable", "reason": "", "applied": true, "rejected": 2},
                {"name": "duplicate", "reason": "", "applied": false, "rejected": 0},
            ],
        }))
        .unwrap();
        let text = report.defects();
        assert!(text.contains("| output not finite | 26 | `finite` | 3 |"), "{text}");
        assert!(text.contains("| independent of its input | 2 | `not_constant`, `distinguishable` | 3 |"), "{text}");
        assert!(text.contains("| byte-identical duplicate | 352 | not checked | – |"), "{text}");
    }

    #[test]
    fn several_devices_are_all_told() {
        let mut batch = measured(1);
        let devices: ArrayRef = Arc::new(StringArray::from(vec!["A", "B", "A", "A", "B", "A"]));
        let index = batch.schema().index_of("device").unwrap();
        let mut columns = batch.columns().to_vec();
        columns[index] = devices;
        batch = RecordBatch::try_new(batch.schema(), columns).unwrap();
        let tasks = Tasks::new(batch).unwrap();
        let rows: Vec<usize> = (0..6).collect();
        let (samples, measurements) = (tasks.samples(&rows).unwrap(), tasks.measurements(&rows).unwrap());
        let (quota, selection) = (paper(None), Selection { rows, ..Selection::default() });
        let text = Card {
            title: "t",
            licence: "mit",
            samples: &samples,
            measurements: &measurements,
            download_size: 1,
            considered: 6,
            quota: &quota,
            selection: &selection,
            report: None,
            left_out: None,
        }
        .text();
        assert!(text.contains("`device` differs: A (4 rows), B (2 rows)."), "{text}");
    }

    #[test]
    fn samples_have_the_released_columns_and_measurements_the_rest() {
        let tasks = Tasks::new(measured(2)).unwrap();
        let names = |batch: &RecordBatch| -> Vec<String> {
            batch.schema().fields().iter().map(|field| field.name().clone()).collect()
        };
        assert_eq!(names(&tasks.samples(&[0, 3]).unwrap()), table::RELEASED);
        let measurements = tasks.measurements(&[0, 3]).unwrap();
        assert_eq!(
            names(&measurements),
            ["task_id", "data_source", "eager_ms", "eager_trials", "device", "torch", "threads"]
        );
        assert_eq!(measurements.column(2).as_ref(), &Float64Array::from(vec![1.0, 4.0]) as &dyn arrow::array::Array);
    }

    #[test]
    fn a_parquet_file_reads_back_and_its_bytes_repeat() {
        let samples = Tasks::new(measured(3)).unwrap().samples(&[0, 1, 2, 17]).unwrap();
        let bytes = table::parquet(&samples).unwrap();
        assert_eq!(bytes, table::parquet(&samples).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b.parquet");
        table::write(&path, &bytes).unwrap();
        let again = Tasks::read(&path).unwrap().samples(&[0, 1, 2, 3]).unwrap();
        assert_eq!(again, samples);
    }

    #[test]
    fn lists_of_operators_become_json() {
        let mut lists = arrow::array::ListBuilder::new(arrow::array::StringBuilder::new());
        lists.append_value([Some("nn.ReLU"), Some("torch.add")]);
        let text: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
        let columns = [("ops", Arc::new(lists.finish()) as ArrayRef), ("data_source", text.clone()), ("code", text)];
        let tasks = Tasks::new(RecordBatch::try_from_iter(columns).unwrap()).unwrap();
        let samples = tasks.samples(&[0]).unwrap();
        let expected: ArrayRef = Arc::new(StringArray::from(vec![r#"["nn.ReLU","torch.add"]"#]));
        assert_eq!(samples.column(0), &expected);
    }

    #[test]
    fn unfit_tables_are_refused_by_name() {
        let refuse = |columns: Vec<(&str, ArrayRef)>| {
            Tasks::new(RecordBatch::try_from_iter(columns).unwrap()).err().expect("refused").message
        };
        let text = |value: Option<&str>| Arc::new(StringArray::from(vec![value])) as ArrayRef;
        let number: ArrayRef = Arc::new(Float64Array::from(vec![1.0]));
        let numbers: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>([Some(vec![Some(1.0)])]));
        assert!(refuse(vec![("ops", text(Some("[]"))), ("code", text(Some("")))]).contains("`data_source`"));
        assert!(refuse(vec![("ops", text(Some("nn.ReLU")))]).contains("JSON list"));
        assert!(refuse(vec![("ops", text(Some("[1]")))]).contains("JSON list"));
        let with_ops = |column: ArrayRef| vec![("ops", text(Some("[]"))), ("data_source", column)];
        assert!(refuse(with_ops(number)).contains("must be text"));
        assert!(refuse(with_ops(text(None))).contains("empty in row 0"));
        assert!(Tasks::new(RecordBatch::try_from_iter([("ops", numbers)]).unwrap()).is_err());
    }

    #[test]
    fn weights_must_be_numbers_and_not_all_zero() {
        assert_eq!(params("{}").quota().unwrap().weights.len(), 6);
        assert_eq!(params("{}").quota().unwrap().count, None);
        let quota = params(r#"{"count": 5, "shares": {"a": 1, "b": 0.5}}"#).quota().unwrap();
        assert_eq!((quota.count, quota.weights["b"]), (Some(5), 0.5));
        for shares in [r#"{"a": -1}"#, r#"{"a": "1"}"#, r#"{"a": 0}"#] {
            let error = params(&format!(r#"{{"shares": {shares}}}"#)).quota().unwrap_err();
            assert!(error.is_permanent() && error.message.contains("weight"), "{error}");
        }
    }

    #[test]
    fn caps_must_be_shares() {
        assert_eq!(params("{}").quota().unwrap().caps.pair, 0.005);
        let error = params(r#"{"max_pair_share": 5}"#).quota().unwrap_err();
        assert!(error.is_permanent() && error.message.contains("max_pair_share"), "{error}");
    }

    #[test]
    fn too_few_tasks_fail_with_what_is_missing_and_how_many_more_it_takes() {
        let tasks = Tasks::new(measured(3)).unwrap();
        let candidates = tasks.candidates();
        let quota = paper(Some(6000));
        let selection = select::select(&candidates, &quota);
        let error = require(6000, &quota, &candidates, &selection, 9000).unwrap_err();
        assert_eq!(
            error.message,
            "18 of 9,000 tasks can be published, min_count asks for 6,000; short: torch#1 3 of 204, torch#2 3 of 5,026, \
             torch#3 3 of 457, torch#4 3 of 168, torch#5 3 of 74, transformers 3 of 71"
        );
        let hint = error.hint.unwrap();
        assert!(hint.starts_with("make about 3,141,000 more tasks, 3,150,000 in all"), "{hint}");
        assert!(require(18, &quota, &candidates, &selection, 9000).is_ok());
        let nothing = require(1, &quota, &[], &Selection::default(), 0).unwrap_err();
        assert!(nothing.hint.unwrap().starts_with("make more tasks (count"));
    }

    #[test]
    fn the_tasks_that_are_yet_to_make_follow_from_those_that_could_be_published() {
        assert_eq!(tasks_needed(4812, 6000, 9000), Some(11_800));
        assert_eq!(tasks_needed(45, 48, 72), Some(90));
        assert_eq!(tasks_needed(0, 48, 72), None);
    }

    #[test]
    fn a_share_that_is_off_by_more_than_a_point_is_told() {
        let tasks = Tasks::new(measured(100)).unwrap();
        let (candidates, quota) = (tasks.candidates(), paper(Some(200)));
        let selection = select::select(&candidates, &quota);
        let warnings = warnings(&candidates, &quota, &selection);
        let told = "torch#2: 50.00 % of the rows instead of 83.77 %, -33.77 percentage points";
        assert!(warnings.iter().any(|warning| warning == told), "{warnings:?}");
        assert!(warnings[0].starts_with("torch#2: its share asked for 168 tasks, 100 passed;"), "{warnings:?}");
    }

    #[test]
    fn numbers_are_grouped_by_three_digits() {
        assert_eq!([0, 999, 1000, 1234567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
