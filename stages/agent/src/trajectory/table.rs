//! Trajectories as rows of a table: to JSON, which the engine makes Parquet of, and back from that Parquet.

use std::fs::File;
use std::path::Path;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{ArrowPrimitiveType, Float64Type, Int64Type};
use arrow::error::ArrowError;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::errors::ParquetError;
use parquet::file::reader::ChunkReader;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::{Broken, Tokens, Trajectory, Turn};

/// Why a table of trajectories can't be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file.
    #[error(transparent)]
    File(#[from] std::io::Error),
    /// Its format.
    #[error(transparent)]
    Parquet(#[from] ParquetError),
    /// The same.
    #[error(transparent)]
    Arrow(#[from] ArrowError),
    /// A column that is missing, of another type, or null where it must not be.
    #[error("column `{column}` of row {row}: {problem}")]
    Column {
        /// The column.
        column: &'static str,
        /// The row, from 0.
        row: usize,
        /// What is wrong.
        problem: String,
    },
    /// An invariant.
    #[error("row {row}: {broken}")]
    Broken {
        /// The row, from 0.
        row: usize,
        /// What does not hold.
        broken: Broken,
    },
}

impl Trajectory {
    /// The row of a table, once the invariants hold; `code` is in it unless it is empty.
    pub fn to_row(&self) -> Result<Map<String, Value>, Broken> {
        self.check()?;
        let tokens = self.tokens.as_ref();
        let mut row = json!({
            "task_digest": self.task_digest,
            "sample": self.sample,
            "form": self.form,
            "messages": serde_json::to_string(&self.messages).expect("plain data"),
            "token_ids": tokens.map(|tokens| &tokens.ids),
            "mask": tokens.map(|tokens| &tokens.mask),
            "log_probs": tokens.map(|tokens| &tokens.log_probs),
            "turns": self.turns,
            "reward": self.reward,
            "reward_at": self.reward_at,
            "finish_reason": self.finish_reason,
            "policy_digest": self.policy_digest,
            "policy_model": self.policy_model,
            "prompt_digest": self.prompt_digest,
            "temperature": self.temperature,
            "sampling_s": self.sampling_s,
            "judging_s": self.judging_s,
        });
        let row = row.as_object_mut().expect("it is one");
        if !self.code.is_empty() {
            row.insert("code".into(), json!(self.code));
        }
        Ok(std::mem::take(row))
    }
}

/// Reads a table of trajectories; columns that others added are left alone.
pub fn read(path: &Path) -> Result<Vec<Trajectory>, ReadError> {
    read_bytes(File::open(path)?)
}

/// The same from anything that Parquet can be read from.
pub fn read_bytes(file: impl ChunkReader + 'static) -> Result<Vec<Trajectory>, ReadError> {
    let mut trajectories = Vec::new();
    for batch in ParquetRecordBatchReaderBuilder::try_new(file)?.build()? {
        let batch = batch?;
        let before = trajectories.len();
        for index in 0..batch.num_rows() {
            let row = Row { batch: &batch, index, number: before + index };
            let trajectory = row.trajectory()?;
            trajectory.check().map_err(|broken| ReadError::Broken { row: row.number, broken })?;
            trajectories.push(trajectory);
        }
    }
    Ok(trajectories)
}

/// A row of a batch, and its number in the table.
struct Row<'a> {
    batch: &'a RecordBatch,
    index: usize,
    number: usize,
}

impl Row<'_> {
    fn trajectory(&self) -> Result<Trajectory, ReadError> {
        Ok(Trajectory {
            task_digest: self.text("task_digest")?,
            code: self.optional_text("code")?.unwrap_or_default(),
            sample: self.whole("sample")?,
            form: self.word("form")?,
            messages: serde_json::from_str(&self.text("messages")?)
                .map_err(|error| self.wrong("messages", error.to_string()))?,
            tokens: self.tokens()?,
            turns: self.turns()?,
            reward: self.number::<Float64Type>("reward")?,
            reward_at: self.optional_whole("reward_at")?,
            finish_reason: self.word("finish_reason")?,
            policy_digest: self.optional_text("policy_digest")?,
            policy_model: self.text("policy_model")?,
            prompt_digest: self.text("prompt_digest")?,
            temperature: self.given("temperature", self.number::<Float64Type>("temperature")?)?,
            sampling_s: self.given("sampling_s", self.number::<Float64Type>("sampling_s")?)?,
            judging_s: self.given("judging_s", self.number::<Float64Type>("judging_s")?)?,
        })
    }

    fn tokens(&self) -> Result<Option<Tokens>, ReadError> {
        let (ids, mask, log_probs) = (self.list("token_ids")?, self.list("mask")?, self.list("log_probs")?);
        let (Some(ids), Some(mask), Some(log_probs)) = (&ids, &mask, &log_probs) else {
            let absent = ids.is_none() && mask.is_none() && log_probs.is_none();
            let problem = || self.wrong("token_ids", "it, mask and log_probs must be there together".into());
            return if absent { Ok(None) } else { Err(problem()) };
        };
        let ids = self.items::<Int64Type>("token_ids", ids)?;
        let ids = ids.into_iter().map(|id| {
            u32::try_from(self.given("token_ids", id)?).map_err(|error| self.wrong("token_ids", error.to_string()))
        });
        let mask = mask.as_boolean_opt().ok_or_else(|| self.wrong("mask", "it is no list of booleans".into()))?;
        let mask = mask.iter().map(|generated| self.given("mask", generated));
        Ok(Some(Tokens {
            ids: ids.collect::<Result<_, _>>()?,
            mask: mask.collect::<Result<_, _>>()?,
            log_probs: self.items::<Float64Type>("log_probs", log_probs)?,
        }))
    }

    /// The turns are few and small, so they go through JSON: one list of fields, and unknown ones are refused.
    fn turns(&self) -> Result<Vec<Turn>, ReadError> {
        let turns = self.given("turns", self.list("turns")?)?;
        let turns = turns.as_struct_opt().ok_or_else(|| self.wrong("turns", "it is no list of structs".into()))?;
        let batch = RecordBatch::from(turns.clone());
        let mut writer = arrow::json::ArrayWriter::new(Vec::new());
        writer.write(&batch)?;
        writer.finish()?;
        let text = writer.into_inner();
        if text.is_empty() {
            return Ok(Vec::new());
        }
        serde_json::from_slice(&text).map_err(|error| self.wrong("turns", error.to_string()))
    }

    fn wrong(&self, column: &'static str, problem: String) -> ReadError {
        ReadError::Column { column, row: self.number, problem }
    }

    fn given<T>(&self, column: &'static str, value: Option<T>) -> Result<T, ReadError> {
        value.ok_or_else(|| self.wrong(column, "it is null".into()))
    }

    /// The column, unless this row has null there.
    fn column(&self, name: &'static str) -> Result<Option<&dyn Array>, ReadError> {
        let column = self.batch.column_by_name(name);
        let column = column.ok_or_else(|| self.wrong(name, "there is no such column".into()))?;
        Ok(column.is_valid(self.index).then_some(column.as_ref()))
    }

    fn optional_text(&self, name: &'static str) -> Result<Option<String>, ReadError> {
        if name == "code" && self.batch.column_by_name(name).is_none() {
            return Ok(None);
        }
        let Some(column) = self.column(name)? else { return Ok(None) };
        let column = column.as_string_opt::<i32>().ok_or_else(|| self.wrong(name, "it is no text".into()))?;
        Ok(Some(column.value(self.index).to_owned()))
    }

    fn text(&self, name: &'static str) -> Result<String, ReadError> {
        self.given(name, self.optional_text(name)?)
    }

    fn word<T: DeserializeOwned>(&self, name: &'static str) -> Result<T, ReadError> {
        serde_json::from_value(Value::String(self.text(name)?)).map_err(|error| self.wrong(name, error.to_string()))
    }

    fn number<T: ArrowPrimitiveType>(&self, name: &'static str) -> Result<Option<T::Native>, ReadError> {
        let Some(column) = self.column(name)? else { return Ok(None) };
        let column = column.as_primitive_opt::<T>();
        let column = column.ok_or_else(|| self.wrong(name, format!("it is no {}", T::DATA_TYPE)))?;
        Ok(Some(column.value(self.index)))
    }

    fn optional_whole<T: TryFrom<i64>>(&self, name: &'static str) -> Result<Option<T>, ReadError> {
        let Some(number) = self.number::<Int64Type>(name)? else { return Ok(None) };
        T::try_from(number).map(Some).map_err(|_| self.wrong(name, format!("it is {number}")))
    }

    fn whole<T: TryFrom<i64>>(&self, name: &'static str) -> Result<T, ReadError> {
        self.given(name, self.optional_whole(name)?)
    }

    fn list(&self, name: &'static str) -> Result<Option<arrow::array::ArrayRef>, ReadError> {
        let Some(column) = self.column(name)? else { return Ok(None) };
        let column = column.as_list_opt::<i32>().ok_or_else(|| self.wrong(name, "it is no list".into()))?;
        Ok(Some(column.value(self.index)))
    }

    fn items<T: ArrowPrimitiveType>(
        &self,
        name: &'static str,
        list: &dyn Array,
    ) -> Result<Vec<Option<T::Native>>, ReadError> {
        let items = list.as_primitive_opt::<T>();
        let items = items.ok_or_else(|| self.wrong(name, format!("it is no list of {}", T::DATA_TYPE)))?;
        Ok(items.iter().collect())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use arrow::datatypes::{DataType, Field, Fields, Schema};
    use arrow::json::ReaderBuilder;
    use parquet::arrow::ArrowWriter;

    use super::super::tests::example;
    use super::*;

    fn schema(more: &[Field]) -> Arc<Schema> {
        let list = |item| DataType::List(Arc::new(Field::new("item", item, true)));
        let field = |name: &str, kind: DataType| Field::new(name, kind, true);
        let texts = ["role", "text", "source", "outcome", "message", "tool", "arguments"];
        let mut turn: Vec<Field> = texts.map(|name| field(name, DataType::Utf8)).into();
        turn.extend(["start", "end"].map(|name| field(name, DataType::Int64)));
        turn.extend(["reward", "speedup_eager", "speedup_compile"].map(|name| field(name, DataType::Float64)));
        let texts = [
            "task_digest",
            "code",
            "form",
            "messages",
            "finish_reason",
            "policy_digest",
            "policy_model",
            "prompt_digest",
        ];
        let mut fields: Vec<Field> = texts.map(|name| field(name, DataType::Utf8)).into();
        fields.extend(["sample", "reward_at"].map(|name| field(name, DataType::Int64)));
        fields.extend(["reward", "temperature", "sampling_s", "judging_s"].map(|name| field(name, DataType::Float64)));
        fields.push(field("token_ids", list(DataType::Int64)));
        fields.push(field("mask", list(DataType::Boolean)));
        fields.push(field("log_probs", list(DataType::Float64)));
        fields.push(field("turns", list(DataType::Struct(Fields::from(turn)))));
        fields.extend(more.iter().cloned());
        Arc::new(Schema::new(fields))
    }

    fn parquet(rows: &[Map<String, Value>]) -> bytes::Bytes {
        parquet_with(rows, &[])
    }

    /// A table of rows that have `more` columns.
    pub(crate) fn parquet_with(rows: &[Map<String, Value>], more: &[Field]) -> bytes::Bytes {
        let mut decoder = ReaderBuilder::new(schema(more)).build_decoder().unwrap();
        decoder.serialize(rows).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), schema(more), None).unwrap();
        writer.write(&decoder.flush().unwrap().unwrap()).unwrap();
        writer.into_inner().unwrap().into()
    }

    #[test]
    fn what_was_written_reads_back() {
        let mut chat = example();
        chat.tokens = None;
        chat.reward = None;
        chat.reward_at = None;
        chat.policy_digest = Some("p".into());
        chat.turns.iter_mut().for_each(|turn| (turn.start, turn.end) = (None, None));
        chat.turns[2] = Turn {
            role: crate::policy::Role::Tool,
            tool: Some("Bash".into()),
            arguments: Some("{\"command\": \"ls\"}".into()),
            ..chat.turns[2].clone()
        };
        let written = [example(), chat];
        let rows: Vec<_> = written.iter().map(|trajectory| trajectory.to_row().unwrap()).collect();
        assert_eq!(read_bytes(parquet(&rows)).unwrap(), written);
    }

    #[test]
    fn what_does_not_hold_is_told_with_its_row_when_it_is_read() {
        let row = example().to_row().unwrap();
        let told = |change: fn(&mut Map<String, Value>)| {
            let mut broken = row.clone();
            change(&mut broken);
            read_bytes(parquet(&[row.clone(), broken])).unwrap_err().to_string()
        };
        let moved = told(|row| drop(row.insert("reward_at".into(), json!(5))));
        assert_eq!(
            moved,
            "row 1: the trajectory of sample 3 of task abcdef01: the reward lies on token 5, and the last that the policy \
             wrote is 7"
        );
        let lost = told(|row| drop(row.remove("mask")));
        assert_eq!(lost, "column `token_ids` of row 1: it, mask and log_probs must be there together");
        assert!(told(|row| drop(row.insert("form".into(), json!("double")))).starts_with("column `form` of row 1"));
        assert!(
            told(|row| drop(row.insert("token_ids".into(), json!([-1, 2, 3, 4, 5, 6, 7, 8])))).contains("token_ids")
        );
    }

    #[test]
    fn a_broken_trajectory_is_not_written() {
        let mut broken = example();
        broken.reward_at = Some(0);
        assert!(broken.to_row().is_err());
    }
}
