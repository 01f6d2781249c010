//! `cuda-agent show`: what a stage made.

use arrow::array::RecordBatch;
use clap::Args;
use cuda_agent_engine::artifact::{Artifact, json as rows_json};
use cuda_agent_engine::schedule;
use cuda_agent_engine::store::{Store, blob_name};
use cuda_agent_protocol::PortType;
use serde_json::{Value, json};

use crate::artifacts::find;
use crate::project::Project;
use crate::text::cell_text;
use crate::{CliError, Exit, RowView, print, print_json};

/// The file of a report that `show` prints, for a terminal. A larger one than a packed file is left to other programs.
const README: &str = "README.md";

/// Options of `show`.
#[derive(Args)]
pub struct Options {
    /// `STAGE`, `STAGE.output` or `NAME@TAG`
    what: String,
    /// How many rows of a table to show
    #[arg(long, short = 'n', default_value_t = 5)]
    rows: usize,
    /// Show values whole; of an episode every line
    #[arg(long)]
    full: bool,
    /// Show the rows that a by-row stage leaves out, and why
    #[arg(long)]
    rejected: bool,
}

/// Shows schema, counts and the first rows of tables, the files of trees, and what a report says in words.
pub async fn show(project: &Project, options: Options, views: &[RowView]) -> Result<Exit, CliError> {
    let store = project.existing_store()?;
    if options.rejected {
        return super::rejected::show(project, &store, &options.what, options.rows, options.full).await;
    }
    let found = find(project, &store, &options.what).await?;
    let mut values = serde_json::Map::new();
    let mut text = String::new();
    for (port, artifact) in &found.outputs {
        let described = described(&store, artifact, options.rows).await;
        if described.is_err() {
            // The next run looks at it again instead of trusting what is known of it.
            store.distrust(&found.key).await?;
        }
        let mut value = described?;
        let view = views.iter().find(|view| view.port_type == artifact.port_type);
        text.push_str(&in_words(port, artifact, &value, options.full, view));
        if let Some(key) = found.accepted_from {
            value["accepted_from"] = json!(key);
        }
        values.insert(port.clone(), value);
    }
    if let Some(key) = found.accepted_from {
        text.push_str(&format!("accepted from {}\n", key.short()));
    }
    if project.common.json {
        print_json(&values)
    } else {
        print(&text)
    }
    Ok(Exit::Done)
}

async fn described(store: &Store, artifact: &Artifact, count: usize) -> Result<Value, CliError> {
    let gone = || CliError::environment(format!("blob {} is missing or damaged", artifact.blob)).with_hint("run again");
    let mut value = serde_json::to_value(artifact).expect("artifacts are plain data");
    value["path"] = json!(store.folder().map(|folder| folder.join(blob_name(&artifact.blob))));
    if artifact.rows.is_some() {
        let bytes = store.get_blob(&artifact.blob).await?.ok_or_else(gone)?;
        let head = head(bytes, count).map_err(|error| CliError::environment(error.to_string()))?;
        value["head"] = head.iter().flat_map(rows_json::rows).map(Value::Object).collect();
    } else {
        let entries = store.tree_entries(artifact).await?.ok_or_else(gone)?;
        value["files"] =
            entries.iter().map(|e| json!({ "path": e.path, "size": e.size, "digest": e.digest })).collect();
        if artifact.port_type == PortType::Report
            && let Some(entry) = entries.iter().find(|entry| entry.path == README && entry.is_packed())
        {
            let pack = store.get_pack(&entry.blob).await?.ok_or_else(gone)?;
            let (start, end) = (entry.offset as usize, (entry.offset + entry.size) as usize);
            let bytes = pack.get(start..end).ok_or_else(gone)?;
            value["readme"] = json!(String::from_utf8_lossy(bytes));
        }
    }
    Ok(value)
}

fn head(bytes: bytes::Bytes, count: usize) -> Result<Vec<RecordBatch>, Box<dyn std::error::Error>> {
    let builder = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(bytes)?;
    Ok(builder.with_limit(count).build()?.collect::<Result<_, _>>()?)
}

fn in_words(port: &str, artifact: &Artifact, value: &Value, full: bool, view: Option<&RowView>) -> String {
    let size = schedule::bytes(artifact.size);
    let Some(rows) = artifact.rows else {
        let files = value["files"].as_array().map(Vec::as_slice).unwrap_or_default();
        let mut text =
            format!("{port}: {}, {} files, {size}, {}\n", artifact.port_type, files.len(), artifact.digest.short());
        for file in files.iter().take(40) {
            let size = schedule::bytes(file["size"].as_u64().unwrap_or(0));
            let path = file["path"].as_str().filter(|path| !path.is_empty()).unwrap_or("(the file itself)");
            text.push_str(&format!("  {path:<48} {size}\n"));
        }
        if files.len() > 40 {
            text.push_str(&format!("  and {} more\n", files.len() - 40));
        }
        if let Some(readme) = value["readme"].as_str() {
            text.push_str(&format!("\n{}\n", readme.trim_end()));
        }
        return text;
    };
    let mut text = format!("{port}: {}, {rows} rows, {size}, {}\n", artifact.port_type, artifact.digest.short());
    if let Some(path) = value["path"].as_str() {
        text.push_str(&format!("  {path}\n"));
    }
    for column in &artifact.columns {
        let measured = if column.measured { "  (measured)" } else { "" };
        text.push_str(&format!("  {:<28} {}{measured}\n", column.name, column.column_type));
    }
    for (number, row) in value["head"].as_array().into_iter().flatten().enumerate() {
        text.push_str(&format!("row {number}\n"));
        if let (Some(view), Some(row)) = (view, row.as_object()) {
            text.push_str(&(view.text)(row, full));
            continue;
        }
        for (name, cell) in row.as_object().into_iter().flatten() {
            text.push_str(&format!("  {name:<28} {}\n", cell_text(cell, full)));
        }
    }
    text
}
