//! The published rows as prompts, in the Parquet format that verl's trainers read.
//!
//! Its columns and their meaning are verl's: `data_source` names the reward function and groups metrics, `prompt` is a
//! chat, `reward_model.ground_truth` is what the reward function needs beside the answer: here the task's code, which
//! the evaluator of kernels takes as it is.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, Int64Array, ListArray, ListBuilder, RecordBatch, StringArray, StringBuilder, StructArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use cuda_agent_protocol::ProgramError;

use super::card::strings;
use super::table::TASK_ID;

/// What is said to the model; `{{code}}` is the task's file.
const PROMPT: &str = include_str!("../../publish/prompt.md");
const PLACE_OF_THE_CODE: &str = "{{code}}";

/// The rows of `samples`, with their names from `measurements` where it has them.
pub fn rows(samples: &RecordBatch, measurements: &RecordBatch) -> Result<RecordBatch, ProgramError> {
    let code = strings(samples, "code");
    let categories: ArrayRef = Arc::new(strings(samples, "data_source").clone());
    let same = |text: &str| -> ArrayRef { Arc::new(StringArray::from(vec![text; code.len()])) };
    let reward_model = structs([("ground_truth", Arc::new(code.clone()) as ArrayRef), ("style", same("rule"))]);
    let mut extra = vec![
        ("category", categories.clone()),
        ("index", Arc::new(Int64Array::from_iter_values(0..code.len() as i64)) as ArrayRef),
        ("ops", operators(samples)),
        ("split", same("train")),
    ];
    if let Some(names) = measurements.column_by_name(TASK_ID) {
        extra.push((TASK_ID, names.clone()));
    }
    let columns = [
        ("data_source", categories),
        ("prompt", chats(code)),
        ("ability", same("cuda")),
        ("reward_model", reward_model),
        ("extra_info", structs(extra)),
    ];
    RecordBatch::try_from_iter(columns).map_err(|error| ProgramError::input(format!("tasks: {error}")))
}

/// One message of the user a row.
fn chats(code: &StringArray) -> ArrayRef {
    let contents: StringArray = code.iter().map(|code| Some(prompt(code.unwrap_or_default()))).collect();
    let roles: StringArray = code.iter().map(|_| Some("user")).collect();
    let messages = structs([("content", Arc::new(contents) as ArrayRef), ("role", Arc::new(roles))]);
    let item = Arc::new(Field::new("item", messages.data_type().clone(), true));
    Arc::new(ListArray::new(item, OffsetBuffer::from_repeated_length(1, code.len()), messages, None))
}

fn prompt(code: &str) -> String {
    PROMPT.trim_end().replace(PLACE_OF_THE_CODE, code.trim_end())
}

fn operators(samples: &RecordBatch) -> ArrayRef {
    let mut lists = ListBuilder::new(StringBuilder::new());
    for ops in strings(samples, "ops") {
        let names: Vec<String> = serde_json::from_str(ops.unwrap_or_default()).unwrap_or_default();
        lists.append_value(names.into_iter().map(Some));
    }
    Arc::new(lists.finish())
}

fn structs<'a>(columns: impl IntoIterator<Item = (&'a str, ArrayRef)>) -> ArrayRef {
    let columns = columns.into_iter().map(|(name, column)| {
        let data_type: DataType = column.data_type().clone();
        (Arc::new(Field::new(name, data_type, true)), column)
    });
    Arc::new(StructArray::from(columns.collect::<Vec<_>>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_shows_the_task_and_an_example_that_the_documentation_runs() {
        let text = prompt("class Model:\n    pass\n");
        assert!(text.contains("```python\nclass Model:\n    pass\n```"), "{text}");
        assert!(!text.contains("{{"), "{text}");
        let example = text.split("```cpp\n").nth(1).unwrap().split("```").next().unwrap();
        let documentation = include_str!("../../../../docs/kernels.md");
        assert!(
            documentation.contains(example),
            "docs/kernels.md, which the tests run, has another example:\n{example}"
        );
    }

    #[test]
    fn a_row_has_the_prompt_and_what_the_reward_needs() {
        let text = |values: [&str; 2]| -> ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
        let samples = RecordBatch::try_from_iter([
            ("ops", text([r#"["nn.ReLU"]"#, r#"["a","b"]"#])),
            ("data_source", text(["torch#1", "torch#2"])),
            ("code", text(["first\n", "second\n"])),
        ])
        .unwrap();
        let measurements = RecordBatch::try_from_iter([("task_id", text(["7-1", "7-2"]))]).unwrap();
        let rows = rows(&samples, &measurements).unwrap();
        let mut writer = arrow::json::ArrayWriter::new(Vec::new());
        writer.write(&rows).unwrap();
        writer.finish().unwrap();
        let json = &serde_json::from_slice::<serde_json::Value>(&writer.into_inner()).unwrap()[1];
        assert_eq!(json["data_source"], "torch#2");
        assert_eq!(json["prompt"][0]["role"], "user");
        assert!(json["prompt"][0]["content"].as_str().unwrap().contains("```python\nsecond\n```"));
        assert_eq!(json["ability"], "cuda");
        assert_eq!(json["reward_model"], serde_json::json!({"style": "rule", "ground_truth": "second\n"}));
        assert_eq!(
            json["extra_info"],
            serde_json::json!({"category": "torch#2", "index": 1, "ops": ["a", "b"], "split": "train", "task_id": "7-2"})
        );
    }
}
