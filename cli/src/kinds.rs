//! `stages` and `schema`: what pipelines can be made of.

use clap::Args;
use cuda_agent_engine::schedule;
use cuda_agent_engine::spec;
use cuda_agent_protocol::Manifest;
use serde_json::json;

use crate::project::Project;
use crate::{CliError, Exit, print, print_json};

/// Options of `stages`.
#[derive(Args)]
pub struct Options {
    /// A stage kind to describe
    kind: Option<String>,
}

/// `uses: run` is no manifest's kind: the stage itself says what it takes and makes.
const RUN: &str = "run: a command of the pipeline, with declared inputs and outputs

  report:
    uses: run
    inputs: { tasks: kept.tasks, notes: { path: notes.txt } }
    files: [scripts/report.py]
    run: python3 scripts/report.py inputs/tasks.parquet inputs/notes > outputs/report
    outputs: { report: tree }

fields:
  run       text, given to `sh -euc`, or a list of words
  inputs    each lies at inputs/NAME (a file or folder) or inputs/NAME.parquet (a table)
  outputs   NAME: tree, or NAME: { type: table, columns: { id: int64, … } }; write outputs/NAME, or outputs/NAME.parquet
            or outputs/NAME.jsonl for a table
  files     files and folders beside the pipeline that the command needs; it sees no others, and a change of one reruns it
  env       variables to set; they count in the key
  secrets   names of the pipeline's secrets: each becomes a variable of that name, and shows nowhere

The working directory is a fresh folder; HOME and TMPDIR lie in it.
";

/// Lists stage kinds, or describes one.
pub fn stages(project: &Project, options: Options) -> Result<Exit, CliError> {
    let Some(name) = options.kind else {
        if project.common.json {
            let kinds: Vec<&Manifest> = project.catalog.kinds().map(|kind| kind.manifest.as_ref()).collect();
            print_json(&kinds);
            return Ok(Exit::Done);
        }
        let width = project.catalog.kinds().map(|kind| kind.manifest.name.len()).max().unwrap_or(0);
        let lines = project.catalog.kinds().map(|kind| {
            format!("{:<width$}  {:<8}  {}\n", kind.manifest.name, kind.manifest.version, kind.manifest.summary)
        });
        let mut text: String = lines.collect();
        text.push_str(&format!("{:<width$}  {:<8}  a command of the pipeline: `uses: run`\n", "run", ""));
        text.push_str("\n`cuda-agent stages NAME` describes one.\n");
        print(&text);
        return Ok(Exit::Done);
    };
    if name == "run" {
        print(RUN);
        return Ok(Exit::Done);
    }
    let Some(kind) = project.catalog.kind(&name) else {
        let error = CliError::usage(format!("unknown stage kind `{name}`"));
        let names = project.catalog.kinds().map(|kind| kind.manifest.name.as_str());
        return Err(match spec::suggest(&name, names) {
            Some(near) => error.with_hint(format!("did you mean `{near}`?")),
            None => error.with_hint("`cuda-agent stages` lists them"),
        });
    };
    if project.common.json {
        let identity = match kind.identity.cpu == kind.identity.gpu {
            true => json!(kind.identity.cpu),
            false => json!(kind.identity),
        };
        print_json(&json!({ "manifest": *kind.manifest, "identity": identity, "origin": kind.origin }));
    } else {
        print(&described(&kind.manifest));
    }
    Ok(Exit::Done)
}

fn described(manifest: &Manifest) -> String {
    let mut text = format!("{} {}: {}\n", manifest.name, manifest.version, manifest.summary);
    if !manifest.inputs.is_empty() {
        text.push_str("\ninputs:\n");
    }
    for (name, port) in &manifest.inputs {
        let mut notes = Vec::new();
        notes.extend(port.optional.then_some("optional"));
        notes.extend(port.list.then_some("several"));
        notes.extend(manifest.by_row.as_ref().filter(|by_row| by_row.port == *name).map(|_| "by row"));
        let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join(", ")) };
        text.push_str(&entry(&format!("{name}: {}{notes}", port.port_type), &port.doc, 2));
        for (column, column_type) in &port.columns {
            text.push_str(&format!("      reads {column}: {column_type}\n"));
        }
    }
    text.push_str("\noutputs:\n");
    for (name, port) in &manifest.outputs {
        text.push_str(&entry(&format!("{name}: {}", port.port_type), &port.doc, 2));
        for column in &port.columns {
            let measured = if column.measured { " (measured)" } else { "" };
            text.push_str(&entry(&format!("{}: {}{measured}", column.name, column.column_type), &column.doc, 6));
        }
    }
    if !manifest.params.is_empty() {
        text.push_str("\nparams (under `with:`):\n");
    }
    for (name, param) in &manifest.params {
        let mut facts = vec![param.param_type.name().to_owned()];
        facts.push(param.default.as_ref().map_or_else(|| "required".to_owned(), |value| format!("default {value}")));
        facts.extend(param.min.map(|min| format!("at least {min}")));
        facts.extend(param.max.map(|max| format!("at most {max}")));
        if !param.choices.is_empty() {
            let choices: Vec<String> = param.choices.iter().map(serde_json::Value::to_string).collect();
            facts.push(format!("of {}", choices.join(", ")));
        }
        if param.continues {
            facts.push("continues".to_owned());
        }
        text.push_str(&entry(&format!("{name}: {}", facts.join(", ")), &param.doc, 2));
    }
    let resources = &manifest.resources;
    text.push_str(&format!("\nresources: cpu {}, gpu {}", resources.cpu, resources.gpu));
    if resources.memory > 0 {
        text.push_str(&format!(", memory {}", schedule::bytes(resources.memory)));
    }
    let determinism = serde_json::to_value(manifest.determinism).expect("plain data");
    text.push_str(&format!("\ndeterminism: {}\n", determinism.as_str().unwrap_or_default()));
    if manifest.has_checkpoints() {
        text.push_str("checkpoints: shared\n");
    }
    text
}

fn entry(head: &str, doc: &str, indent: usize) -> String {
    let pad = " ".repeat(indent);
    let doc = doc.split_whitespace().collect::<Vec<_>>().join(" ");
    if doc.is_empty() { format!("{pad}{head}\n") } else { format!("{pad}{head}\n{pad}    {doc}\n") }
}

/// Prints the JSON Schema of pipeline files.
pub fn schema(project: &Project) -> Result<Exit, CliError> {
    print_json(&spec::schema(&project.catalog));
    Ok(Exit::Done)
}
