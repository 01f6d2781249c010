//! What a stage is made of: its inputs, its program, and the key that these come to.

use std::collections::{BTreeMap, BTreeSet};

use cuda_agent_protocol::Manifest;
use cuda_agent_protocol::manifest::Determinism;
use serde_json::{Value, json};

use super::input_error::InputError;
use super::inputs::{self, Input};
use super::{Outputs, PlanError, Planner, Resolved};
use crate::catalog;
use crate::digest::Digest;
use crate::key::{self, InputIdentity, Preimage, ProgramIdentity};
use crate::spec::{Command, Source, Stage};

impl Planner<'_> {
    pub(super) async fn resolve<'k>(
        &self,
        stage: &Stage,
        known: impl Fn(usize) -> Option<&'k Outputs>,
    ) -> Result<Resolved, PlanError> {
        let mut inputs = BTreeMap::new();
        for (port, sources) in &stage.inputs {
            let port_type = stage.kind.inputs[port].port_type;
            let mut resolved = Vec::with_capacity(sources.len());
            for source in sources {
                let input = match source {
                    Source::Stage { stage: producer, output } => self.made(*producer, output, &known),
                    Source::Path(path) => self.files.input(path, port_type).await,
                    Source::Url { url, digest } => {
                        inputs::download(&self.files, url, digest, port_type, &self.folders.cache).await
                    }
                    Source::Artifact { name, tag } => inputs::tagged(self.store, name, tag).await,
                    Source::Stored(artifact) => Ok(Input::stored((**artifact).clone())),
                };
                let input = input.and_then(|input| self.fits(stage, port, input));
                resolved.push(input.map_err(|error| Self::input_error(stage, port, error))?);
            }
            inputs.insert(port.clone(), resolved);
        }
        Ok(self.identified(stage, inputs)?.0)
    }

    /// The same without waiting for anything, with the bytes of its pre-image; `None` where that is needed, or something is
    /// wrong: whoever has time for it looks again.
    pub(super) fn resolve_at_once<'k>(
        &self,
        stage: &Stage,
        known: impl Fn(usize) -> Option<&'k Outputs>,
    ) -> Option<(Resolved, Vec<u8>)> {
        let mut inputs = BTreeMap::new();
        for (port, sources) in &stage.inputs {
            let port_type = stage.kind.inputs[port].port_type;
            let input = |source: &Source| {
                let input = match source {
                    Source::Stage { stage: producer, output } => self.made(*producer, output, &known),
                    Source::Path(path) => self.files.input_at_once(path, port_type),
                    Source::Stored(artifact) => Ok(Input::stored((**artifact).clone())),
                    Source::Url { .. } | Source::Artifact { .. } => return None,
                };
                input.and_then(|input| self.fits(stage, port, input)).ok()
            };
            inputs.insert(port.clone(), sources.iter().map(input).collect::<Option<Vec<Input>>>()?);
        }
        self.identified(stage, inputs).ok()
    }

    /// An output of a stage that is done.
    fn made<'k>(
        &self,
        producer: usize,
        output: &str,
        known: &impl Fn(usize) -> Option<&'k Outputs>,
    ) -> Result<Input, InputError> {
        let outputs = known(producer).expect("pending stages are not resolved");
        outputs.get(output).map(|made| Input::stored((**made).clone())).ok_or_else(|| {
            let name = &self.pipeline.stages[producer].name;
            let message = format!("the record of `{name}` has no output `{output}`");
            InputError::new(message, format!("run it again with --refresh {name}"))
        })
    }

    /// With the bytes of its pre-image.
    fn identified(
        &self,
        stage: &Stage,
        inputs: BTreeMap<String, Vec<Input>>,
    ) -> Result<(Resolved, Vec<u8>), PlanError> {
        let preimage = self.preimage(stage, &inputs)?;
        let bytes = preimage.to_bytes();
        let (key, base) = (Preimage::key_of(&bytes), base_key(&stage.kind, &preimage));
        Ok((Resolved { key, base, preimage, inputs }, bytes))
    }

    /// Whether a table has the columns that the port reads.
    fn fits(&self, stage: &Stage, port: &str, input: Input) -> Result<Input, InputError> {
        let declared = &stage.kind.inputs[port];
        // A command takes what a tag names, whatever that is: nobody can know before it is looked up.
        let open =
            stage.command.is_some() && matches!(stage.inputs[port][..], [Source::Artifact { .. } | Source::Stored(_)]);
        if !open && declared.port_type.is_table() != input.artifact.rows.is_some() {
            let is = if input.artifact.rows.is_some() { "a table" } else { "a file or folder, not a Parquet table" };
            return Err(format!("expected {}, but this is {is}", declared.port_type).into());
        }
        for (name, column) in &declared.columns {
            match input.artifact.columns.iter().find(|c| c.name == *name) {
                Some(found) if found.column_type == column.to_string() || found.column_type == "null" => {}
                Some(found) => {
                    return Err(format!("column `{name}` is {}, expected {column}", found.column_type).into());
                }
                None => {
                    let has: Vec<&str> = input.artifact.columns.iter().map(|c| c.name.as_str()).collect();
                    let message = format!("column `{name}` ({column}) is missing");
                    return Err(InputError::new(message, format!("it has {}", has.join(", "))));
                }
            }
        }
        Ok(input)
    }

    fn preimage(&self, stage: &Stage, inputs: &BTreeMap<String, Vec<Input>>) -> Result<Preimage, PlanError> {
        let manifest = &stage.kind;
        let identities = inputs.iter().map(|(port, inputs)| {
            let declared = &manifest.inputs[port];
            let by_row = manifest.by_row.as_ref().is_some_and(|by_row| by_row.port == *port);
            let one = |input: &Input| match by_row {
                // The other columns are joined back, so they count for the stage, though not for its rows.
                true => input.artifact.identity([].iter()),
                false => input.artifact.identity(declared.columns.keys().collect::<Vec<_>>().into_iter()),
            };
            let identity = match (declared.list, inputs.as_slice()) {
                (false, [input]) => one(input),
                (_, many) => InputIdentity::List { items: many.iter().map(one).collect() },
            };
            (port.clone(), identity)
        });
        let mut env: BTreeMap<String, Option<String>> =
            manifest.env.iter().map(|name| (name.clone(), std::env::var(name).ok())).collect();
        env.extend(stage.env.iter().map(|(name, value)| (name.clone(), Some(value.clone()))));
        let toolchain =
            self.host.toolchain(manifest).map_err(|error| PlanError::Toolchain { stage: stage.name.clone(), error })?;
        let measured = manifest.determinism == Determinism::Measured;
        let unknown = |executor: String| {
            let (location, stage) = (stage.location.to_string(), stage.name.clone());
            PlanError::Device { location, stage, executor }
        };
        let device = if measured { Some(self.host.device_of(stage).map_err(unknown)?) } else { None };
        let (program, executable) = self.program(stage)?;
        let preimage = Preimage {
            schema: key::SCHEMA,
            kind: manifest.name.clone(),
            program,
            executable,
            params: stage.params.clone(),
            inputs: identities.collect(),
            outputs: stage.command.is_some().then(|| declared_outputs(stage)),
            env,
            secrets: stage.secrets.clone(),
            toolchain,
            device,
            rows_of: None,
        };
        Ok(preimage.versioned())
    }

    /// What runs, and which of its files may be executed.
    pub(super) fn program(&self, stage: &Stage) -> Result<(ProgramIdentity, BTreeSet<String>), PlanError> {
        let Some(command) = &stage.command else {
            let kind = self.catalog.kind(&stage.kind.name).expect("the spec names only known kinds");
            return Ok(kind.program_on(stage.resources.gpu));
        };
        let command = match command {
            Command::Shell(text) => Value::from(text.as_str()),
            Command::Words(words) => json!(words),
        };
        let files =
            self.command_files(stage).and_then(|files| Ok((catalog::digests(&files)?, catalog::executables(&files)?)));
        let (files, executable) = files.map_err(|error| PlanError::Program {
            location: stage.location.to_string(),
            stage: stage.name.clone(),
            error,
        })?;
        Ok((ProgramIdentity::Command { command, files }, executable))
    }
}

/// What row results of a by-row kind are filed under, or checkpoints of a kind that has them: the key without the parameter
/// that continues, all of it where none does.
pub fn base_key(kind: &Manifest, preimage: &Preimage) -> Option<Digest> {
    if kind.by_row.is_none() && !kind.has_checkpoints() {
        return None;
    }
    let mut base = preimage.clone();
    let Some(by_row) = &kind.by_row else {
        kind.continued().map(|name| base.params.remove(name));
        return Some(base.versioned().key());
    };
    let columns = &kind.inputs[&by_row.port].columns;
    let columns = columns.iter().map(|(name, column)| (name.clone(), column.to_string())).collect();
    base.inputs.insert(by_row.port.clone(), InputIdentity::Rows { columns });
    base.rows_of = Some(by_row.port.clone());
    Some(base.versioned().key())
}

fn declared_outputs(stage: &Stage) -> Value {
    let port = |port: &cuda_agent_protocol::manifest::OutputPort| {
        let columns: Vec<Value> = port.columns.iter().map(|c| json!([c.name, c.column_type])).collect();
        json!([port.port_type, columns])
    };
    stage
        .kind
        .outputs
        .iter()
        .map(|(name, output)| (name.clone(), port(output)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}
