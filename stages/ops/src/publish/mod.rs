//! `ops/publish`: chosen tasks as a Hugging Face dataset folder.
//!
//! The folder has `data/` with exactly the released set's columns, `measurements/` with everything else that is
//! known of the same rows, and the card. All of it is a function of the inputs and the parameters.

mod card;
mod columns;
mod select;
mod table;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cuda_agent_protocol::request::InputRequest;
use cuda_agent_protocol::{Event, Program, ProgramError};
use serde::Deserialize;
use serde_json::{Map, Value};

use card::{Card, Report};
use select::{PAPER_ROWS, Quota, Selection};
use table::Tasks;

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
        Ok(Quota { count: (self.count > 0).then_some(self.count), weights, refill: self.refill })
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

    let categories = tasks.categories();
    let selection = select::select(&categories, &quota);
    for shortfall in &selection.short {
        let message = warning(shortfall, params.refill);
        program.send(&Event::Log { level: "warning".to_owned(), message });
    }
    require(&params, &selection, categories.len())?;

    let samples = tasks.samples(&selection.rows)?;
    let measurements = tasks.measurements(&selection.rows)?;
    let (samples_bytes, measurements_bytes) = (table::parquet(&samples)?, table::parquet(&measurements)?);
    let card = Card {
        title: &params.title,
        licence: &params.licence,
        samples: &samples,
        measurements: &measurements,
        download_size: samples_bytes.len(),
        considered: categories.len(),
        short: &selection.short,
        report: report.as_ref(),
    };
    let dataset = output(program, "dataset")?;
    table::write(&dataset.join("README.md"), card.text().as_bytes())?;
    table::write(&dataset.join(SAMPLES_FILE), &samples_bytes)?;
    table::write(&dataset.join(MEASUREMENTS_FILE), &measurements_bytes)?;
    table::write(&output(program, "samples")?, &samples_bytes)?;
    table::write(&output(program, "measurements")?, &measurements_bytes)?;
    let done = selection.rows.len() as u64;
    program.send(&Event::Progress { done, total: Some(done), unit: "tasks".to_owned() });
    Ok(())
}

fn warning(shortfall: &select::Shortfall, refill: bool) -> String {
    let consequence = match (shortfall.taken, refill) {
        (0, _) => "the dataset has none of it",
        (_, true) => "other categories fill the gap",
        (_, false) => "the dataset is smaller for it",
    };
    format!("{shortfall}; {consequence}")
}

fn require(params: &Params, selection: &Selection, considered: usize) -> Result<(), ProgramError> {
    let (chosen, least) = (selection.rows.len(), params.min_count);
    if chosen >= least {
        return Ok(());
    }
    let message = format!("{chosen} of {considered} tasks can be published, min_count asks for {least}");
    let hint = "make more tasks (ops/synthesize count), look at what ops/filter rejected, or lower min_count";
    Err(ProgramError::input(message).with_hint(hint))
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

    fn card(title: &str, count: usize, report: Option<&Report>) -> String {
        let tasks = Tasks::new(measured(10)).unwrap();
        let weights = PAPER_ROWS.map(|(name, rows)| (name.to_owned(), rows)).into();
        let selection = select::select(&tasks.categories(), &Quota { count: Some(count), weights, refill: true });
        let samples = tasks.samples(&selection.rows).unwrap();
        let measurements = tasks.measurements(&selection.rows).unwrap();
        Card {
            title,
            licence: "cc-by-4.0",
            samples: &samples,
            measurements: &measurements,
            download_size: 1234,
            considered: 60,
            short: &selection.short,
            report,
        }
        .text()
    }

    fn params(text: &str) -> Params {
        let mut values = json!({
            "count": 0, "shares": {}, "refill": true, "min_count": 1, "title": "t", "licence": "mit"
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
            short: &[],
            report: None,
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
            "rules": [{"name": "contaminated", "reason": "", "applied": true, "rejected": 0}],
        });
        let card = |report: &Value| card("Ops", 6, Some(&serde_json::from_value(report.clone()).unwrap()));
        assert!(card(&report).contains("Not decontaminated"));
        report["references"] = json!(250);
        assert!(!card(&report).contains("Not decontaminated"));
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
    fn too_few_tasks_fail_with_what_to_do() {
        let selection = Selection { rows: vec![0], short: Vec::new() };
        let error = require(&params(r#"{"min_count": 48}"#), &selection, 3).unwrap_err();
        assert_eq!(error.message, "1 of 3 tasks can be published, min_count asks for 48");
        assert!(error.hint.is_some());
        assert!(require(&params(r#"{"min_count": 1}"#), &selection, 3).is_ok());
    }
}
