//! `export` and `tag`, and finding what `STAGE.output` or `NAME@TAG` means.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use clap::Args;
use cuda_agent_engine::artifact::Artifact;
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::execute::attempt;
use cuda_agent_engine::name::{TAG_PARTS, is_tag_part};
use cuda_agent_engine::plan::graph::Graph;
use cuda_agent_engine::plan::inputs::Input;
use cuda_agent_engine::plan::{StagePlan, Verdict};
use cuda_agent_engine::schedule;
use cuda_agent_engine::spec::Pipeline;
use cuda_agent_engine::store::{Record, Store, Tag};
use serde_json::json;

use crate::plan::plans;
use crate::project::Project;
use crate::runs::newest_key;
use crate::{CliError, Exit, print, print_json};

/// Options of `export`.
#[derive(Args)]
pub struct ExportOptions {
    /// `STAGE`, `STAGE.output` or `NAME@TAG`
    what: String,
    /// The folder to make
    folder: PathBuf,
    /// Write into a folder that is there already
    #[arg(long)]
    force: bool,
}

/// Options of `tag`.
#[derive(Args)]
pub struct TagOptions {
    /// `STAGE.output`
    what: String,
    /// `NAME@TAG`
    name: String,
}

/// Something in the store: its record and the outputs that are meant.
pub struct Found {
    /// The record's key.
    pub key: Digest,
    /// The key under which it was made, where it was accepted under this one.
    pub accepted_from: Option<Digest>,
    /// By port.
    pub outputs: BTreeMap<String, Box<Artifact>>,
}

/// `NAME@TAG`, where a text is one.
pub fn split_tag(text: &str) -> Option<(&str, &str)> {
    text.split_once('@').filter(|(name, tag)| is_tag_part(name) && is_tag_part(tag))
}

/// Finds `STAGE`, `STAGE.output` or `NAME@TAG` in the store.
pub async fn find(project: &Project, store: &Store, what: &str) -> Result<Found, CliError> {
    if let Some((name, tag)) = split_tag(what) {
        let Some(target) = store.tag(name, tag).await? else { return Err(no_tag(store, what).await) };
        return outputs_of(store, &target.key, Some(&target.output), what).await;
    }
    // Names of cells may have dots in their brackets.
    let dot = what.rfind('.').filter(|dot| !what[*dot..].contains(']'));
    let (stage, output) = dot.map_or((what, None), |dot| (&what[..dot], Some(&what[dot + 1..])));
    let pipeline = match project.default_pipeline() {
        Ok(file) => Some(project.pipeline(&file)?),
        Err(_) => None,
    };
    if let Some(pipeline) = &pipeline
        && !project.common.params.is_empty()
    {
        let key = planned_key(project, pipeline, stage).await?;
        return outputs_of(store, &key, output, what).await;
    }
    let name = pipeline.as_ref().map(|pipeline| pipeline.name.as_str());
    match newest_key(store, name, stage).await? {
        Some(key) => outputs_of(store, &key, output, what).await,
        None => Err(not_made(pipeline.as_ref(), stage)),
    }
}

/// Why there is nothing of a tag, with what is tagged instead.
async fn no_tag(store: &Store, what: &str) -> CliError {
    const SHOWN: usize = 8;
    let error = CliError::usage(format!("nothing is tagged {what} in {}", store.url()));
    let tags = store.tags().await.unwrap_or_default();
    match cuda_agent_engine::spec::suggest(what, tags.iter().map(String::as_str)) {
        Some(near) => error.with_hint(format!("did you mean `{near}`?")),
        None if tags.is_empty() => error.with_hint(format!("`cuda-agent tag STAGE.output {what}` tags an output")),
        None => {
            let more = if tags.len() > SHOWN { ", …" } else { "" };
            error.with_hint(format!("what is tagged: {}{more}", tags[..tags.len().min(SHOWN)].join(", ")))
        }
    }
}

/// With `-p`, the result that these parameters lead to, not the newest one.
async fn planned_key(project: &Project, pipeline: &Pipeline, stage: &str) -> Result<Digest, CliError> {
    let Some(index) = pipeline.stages.iter().position(|candidate| candidate.name == stage) else {
        return Err(not_made(Some(pipeline), stage));
    };
    let graph = Graph::new(pipeline);
    let mut selected = graph.ancestors([index]);
    selected[index] = true;
    let plans = plans(project, pipeline, &graph, &selected, &BTreeSet::new()).await?;
    match &plans[index] {
        Some(StagePlan { resolved: Some(resolved), verdict: Verdict::Hit { .. } }) => Ok(resolved.key),
        _ => Err(CliError::usage(format!("`{stage}` was not made with these parameters"))
            .with_hint("run it with the same `-p`, or leave `-p` out for the newest result")),
    }
}

/// Why there is nothing to show of a stage.
pub fn not_made(pipeline: Option<&Pipeline>, stage: &str) -> CliError {
    let Some(pipeline) = pipeline else {
        return CliError::usage(format!("no run has made `{stage}` yet"))
            .with_hint("name the pipeline with --pipeline");
    };
    let names = || pipeline.stages.iter().map(|stage| stage.name.as_str());
    let cells: Vec<&str> =
        pipeline.stages.iter().filter(|candidate| candidate.base == stage).map(|cell| cell.name.as_str()).collect();
    if names().any(|name| name == stage) {
        return CliError::usage(format!("no run has made `{stage}` yet"))
            .with_hint(format!("`cuda-agent run {stage}` makes it"));
    }
    if !cells.is_empty() {
        return CliError::usage(format!("`{stage}` is a matrix"))
            .with_hint(format!("name a cell: {}", cells.join(", ")));
    }
    let error = CliError::usage(format!("there is no stage `{stage}` in pipeline `{}`", pipeline.name));
    match cuda_agent_engine::spec::suggest(stage, names()) {
        Some(near) => error.with_hint(format!("did you mean `{near}`?")),
        None => error.with_hint(format!("its stages are {}", names().collect::<Vec<_>>().join(", "))),
    }
}

/// A record that is on this machine with all that it names: a shared store need not be asked for it, and may be away.
async fn local_record(store: &Store, key: &Digest) -> Result<Option<Record>, CliError> {
    let local = store.nearby();
    let Some((_, record)) = local.record(key).await? else { return Ok(None) };
    for artifact in record.outputs.values() {
        if local.missing_blob(artifact).await?.is_some() {
            return Ok(None);
        }
    }
    Ok(Some(record))
}

async fn outputs_of(store: &Store, key: &Digest, output: Option<&str>, what: &str) -> Result<Found, CliError> {
    let gone = || CliError::environment(format!("the record of `{what}` is gone from {}", store.url()));
    let record = match local_record(store, key).await? {
        Some(record) => record,
        None => store.record(key).await?.ok_or_else(gone)?.1,
    };
    let accepted_from = record.accepted_from;
    let Some(output) = output else { return Ok(Found { key: *key, accepted_from, outputs: record.outputs }) };
    let Some((port, artifact)) = record.outputs.get_key_value(output) else {
        let names: Vec<&str> = record.outputs.keys().map(String::as_str).collect();
        return Err(CliError::usage(format!("`{what}`: there is no output `{output}`"))
            .with_hint(format!("its outputs are {}", names.join(", "))));
    };
    Ok(Found { key: *key, accepted_from, outputs: BTreeMap::from([(port.clone(), artifact.clone())]) })
}

/// Copies artifacts to a folder.
pub async fn export(project: &Project, options: ExportOptions) -> Result<Exit, CliError> {
    let store = project.existing_store()?;
    let found = find(project, &store, &options.what).await?;
    let folder = &options.folder;
    if folder.is_file() {
        return Err(CliError::usage(format!("{} is a file", folder.display())).with_hint("name a folder to make"));
    }
    let taken = std::fs::read_dir(folder).is_ok_and(|mut items| items.next().is_some());
    if taken && !options.force {
        return Err(CliError::usage(format!("{} is not empty", folder.display()))
            .with_hint("name another folder, or use --force to write into it"));
    }
    let fail = |error: std::io::Error| CliError::environment(format!("{}: {error}", folder.display()));
    // Under another name until it is whole, unless it is added to what is there.
    let in_place = taken || folder.file_name().is_none() || folder.is_symlink();
    let made_in = match in_place {
        true => folder.clone(),
        false => folder.with_file_name(format!(".{}.partial", cuda_agent_engine::nonce())),
    };
    std::fs::create_dir_all(&made_in).map_err(fail)?;
    let key = found.key;
    let mut made = copy_outputs(&store, found, &made_in).await;
    if made.is_err() {
        // The next run looks at it again instead of trusting what is known of it.
        store.distrust(&key).await?;
    }
    if !in_place {
        made = made.and_then(|made| std::fs::rename(&made_in, folder).map(|()| made).map_err(fail));
        let _ = std::fs::remove_dir_all(&made_in);
    }
    let named = |path: &Path| path.strip_prefix(&made_in).map_or(path.to_owned(), |below| folder.join(below));
    let made: Vec<(PathBuf, u64)> = made?.into_iter().map(|(path, size)| (named(&path), size)).collect();
    if project.common.json {
        let files: Vec<_> = made.iter().map(|(path, size)| json!({ "path": path, "size": size })).collect();
        print_json(&files);
    } else {
        for (path, size) in made {
            print(&format!("{} ({})\n", path.display(), schedule::bytes(size)));
        }
    }
    Ok(Exit::Done)
}

async fn copy_outputs(store: &Store, found: Found, folder: &Path) -> Result<Vec<(PathBuf, u64)>, CliError> {
    // One tree is the folder itself; several outputs lie beside each other.
    let alone = found.outputs.len() == 1;
    let mut made = Vec::new();
    for (port, artifact) in found.outputs {
        let table = artifact.rows.is_some();
        let target = if alone && !table {
            folder.to_owned()
        } else {
            folder.join(attempt::artifact_name(&port, artifact.port_type))
        };
        let size = artifact.size;
        let target = place(store, &port, *artifact, &target).await?;
        made.push((target, size));
    }
    Ok(made)
}

async fn place(store: &Store, port: &str, artifact: Artifact, target: &Path) -> Result<PathBuf, CliError> {
    let single = artifact.rows.is_none()
        && store.tree_entries(&artifact).await?.is_some_and(|entries| entries.iter().any(|e| e.path.is_empty()));
    // A single file cannot take the place of the folder.
    let target = if single && target.is_dir() { target.join(port) } else { target.to_owned() };
    attempt::place(store, &Input::stored(artifact), &target).await?;
    Ok(target)
}

/// What a tag names, as far as it is still known.
async fn named(store: &Store, tag: &Tag) -> String {
    let Tag { key, output } = tag;
    match store.record(key).await {
        Ok(Some((_, record))) => match record.outputs.get(output) {
            Some(artifact) => {
                format!(
                    "output `{output}` of a {} stage ({}), made by run {}",
                    record.kind,
                    artifact.digest.short(),
                    record.run
                )
            }
            None => format!("output `{output}` of key {}", key.short()),
        },
        _ => format!("output `{output}` of key {}, whose record is gone", key.short()),
    }
}

/// Names an output.
pub async fn tag(project: &Project, options: TagOptions) -> Result<Exit, CliError> {
    let Some((name, tag)) = split_tag(&options.name) else {
        return Err(CliError::usage(format!("`{}` is not NAME@TAG", options.name)).with_hint(TAG_PARTS));
    };
    let store = project.shared_store().await?;
    project.refuse_read_only(&store)?;
    let found = find(project, &store, &options.what).await?;
    let Some((output, artifact)) = found.outputs.iter().next().filter(|_| found.outputs.len() == 1) else {
        let names: Vec<&str> = found.outputs.keys().map(String::as_str).collect();
        return Err(CliError::usage(format!("`{}` has several outputs", options.what))
            .with_hint(format!("name one of {}", names.join(", "))));
    };
    // A name that others can see must not name what they cannot get.
    if let Some((generation, record)) = store.record(&found.key).await? {
        store.offer(record, generation).await?;
        project.require_shared(&store)?;
    }
    let before = store.tag(name, tag).await?;
    let target = Tag { key: found.key, output: output.clone() };
    store.put_tag(name, tag, &target).await?;
    let before = before.filter(|before| *before != target);
    if project.common.json {
        print_json(&json!({
            "tag": options.name, "key": found.key, "output": output, "digest": artifact.digest,
            "before": before.map(|tag| json!({ "key": tag.key, "output": tag.output })),
        }));
    } else {
        print(&format!("{} is now {} ({})\n", options.name, options.what, artifact.digest.short()));
        if let Some(before) = before {
            print(&format!("before, it was {}\n", named(&store, &before).await));
        }
    }
    Ok(Exit::Done)
}
