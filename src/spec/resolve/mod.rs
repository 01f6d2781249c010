//! Raw files become a pipeline: overrides, substitution, matrices, kinds, wires, cycles.
//!
//! Every mistake is gathered with its place, and reading goes on with what is left. What only follows from a
//! mistake is not told: the parts already known to be broken are passed in, and explain the rest.

mod cycle;
mod external;
mod matrix;
mod overrides;
mod reference;
mod stage;
mod substitute;
mod wires;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cuda_agent_protocol::Manifest;
use cuda_agent_protocol::manifest::Resources;
use serde_json::Value;

use self::matrix::Matrix;
use self::overrides::Override;
use self::substitute::Scope;
use super::Catalog;
use super::document::{Broken, Document, Location, Place, Spot, Step};
use super::error::{Problem, did_you_mean, list};
use super::raw::{self, Entries};
use super::types::{Pipeline, SecretSource, Source, Stage};
use super::units::{is_name, is_variable};

/// Stands among broken parameters where all of them may be.
const EVERY: &str = "*";

pub(super) const NAME_HINT: &str = "names are letters, digits, `_` and `-`, and don't begin with a digit or `-`";

/// The files of a pipeline as they were read.
#[derive(Default)]
pub(crate) struct Files {
    /// The pipeline's own, then those that it includes.
    pub documents: Vec<Arc<Document>>,
    pub raws: Vec<raw::Pipeline>,
    /// Parts of them that couldn't be read.
    pub broken: Broken,
}

/// The pipeline, as far as it could be resolved, and what is wrong with it. `documents` gets the command line added.
pub(crate) fn resolve(
    files: Files,
    folder: &Path,
    catalog: &dyn Catalog,
    given: &[(String, String)],
) -> (Pipeline, Vec<Arc<Document>>, Vec<Problem>) {
    let mut documents = files.documents;
    let (command_line, overrides) = overrides::read(given, documents.len());
    documents.push(command_line);
    let mut resolver = Resolver {
        catalog,
        folder,
        documents: &documents,
        broken: &files.broken,
        overrides,
        params: BTreeMap::new(),
        broken_params: Vec::new(),
        secrets: BTreeMap::new(),
        bases: Vec::new(),
        index: HashMap::new(),
        cells: Vec::new(),
        problems: Vec::new(),
    };
    let name = resolver.name(&files.raws);
    let stages = resolver.top_level(files.raws);
    resolver.override_params();
    resolver.bases.reserve(stages.len());
    resolver.index.reserve(stages.len());
    resolver.cells.reserve(stages.len());
    for (document, name, stage) in stages {
        resolver.stage(document, name, stage);
    }
    resolver.check_stage_overrides();
    resolver.connect();
    resolver.find_cycles();
    let mut problems = std::mem::take(&mut resolver.problems);
    problems.retain(|problem| !problem.follows_from(&files.broken));
    let pipeline = resolver.finish(name);
    (pipeline, documents, problems)
}

/// A stage of the file, with its cells.
struct Base {
    name: String,
    document: usize,
    /// Taken by each cell when wires are made.
    inputs: Entries<raw::Input>,
    cells: Range<usize>,
    /// `None` without `matrix:`.
    axes: Option<Vec<String>>,
    /// Whether its kind, its outputs or its matrix couldn't be read, so that nothing is known about them.
    unknown: bool,
}

/// A stage of the pipeline to be.
struct Cell {
    base: usize,
    stage: Stage,
    /// Whether `when:` lets it take part.
    on: bool,
    /// Whether it is a `uses: run` stage, whose ports come from its wires.
    is_run: bool,
}

pub(super) struct Resolver<'a> {
    pub catalog: &'a dyn Catalog,
    folder: &'a Path,
    documents: &'a [Arc<Document>],
    broken: &'a Broken,
    overrides: Vec<Override>,
    params: BTreeMap<String, Value>,
    broken_params: Vec<String>,
    secrets: BTreeMap<String, SecretSource>,
    bases: Vec<Base>,
    index: HashMap<String, usize>,
    cells: Vec<Cell>,
    problems: Vec<Problem>,
}

impl Resolver<'_> {
    fn report(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    fn is_broken(&self, place: &Place) -> bool {
        self.broken.covers(place)
    }

    /// Whether a thing that isn't there may be in a part of a file that couldn't be read.
    fn hides(&self, section: &str, name: &str) -> bool {
        let place = |document: usize| Place::root(document).key(section).key(name);
        self.broken.hides_a_file() || (0..self.documents.len()).any(|document| self.is_broken(&place(document)))
    }

    fn name(&mut self, raws: &[raw::Pipeline]) -> String {
        let Some(name) = raws.first().and_then(|raw| raw.name.as_deref()) else {
            // It is missing or broken, which is reported.
            return String::new();
        };
        if !is_name(name) {
            let problem = Problem::new(Place::root(0).key("name"), format!("`{name}` can't be the name of a pipeline"));
            self.report(problem.hint(NAME_HINT));
        }
        if raws[0].stages.as_ref().is_none_or(|stages| stages.0.is_empty()) {
            let problem = Problem::new(Place::root(0), "a pipeline needs `stages`").missing(["stages"]);
            let included = raws.iter().skip(1).any(|raw| raw.stages.is_some());
            if !included {
                self.report(problem.hint("add `stages:` with at least one stage"));
            }
        }
        name.to_owned()
    }

    /// Takes params and secrets of all files; what is left are the stages.
    fn top_level(&mut self, raws: Vec<raw::Pipeline>) -> Vec<(usize, String, Box<raw::Stage>)> {
        let mut stages =
            Vec::with_capacity(raws.iter().filter_map(|raw| raw.stages.as_ref()).map(|all| all.0.len()).sum());
        let mut owners: HashMap<String, Place> = HashMap::new();
        for (document, raw) in raws.into_iter().enumerate() {
            let root = Spot::Root(document);
            for (name, value) in raw.params.unwrap_or_default().0 {
                let place = root.key("params").key(&name).place();
                if self.is_new(&mut owners, "parameter", &name, &place) {
                    self.param(name, value, place);
                }
            }
            for (name, secret) in raw.secrets.unwrap_or_default().0 {
                let place = root.key("secrets").key(&name).place();
                if self.is_new(&mut owners, "secret", &name, &place) {
                    self.secret(name, secret, place);
                }
            }
            stages.extend(raw.stages.unwrap_or_default().0.into_iter().map(|(name, stage)| (document, name, stage)));
        }
        self.note_broken_params();
        stages
    }

    fn is_new(&mut self, owners: &mut HashMap<String, Place>, what: &str, name: &str, place: &Place) -> bool {
        let Some(first) = owners.insert(format!("{what} {name}"), place.clone()) else { return true };
        self.report_second(what, name, place.clone(), &first);
        false
    }

    fn report_second(&mut self, what: &str, name: &str, place: Place, first: &Place) {
        let document = &self.documents[first.document];
        let (line, column) = document.position(document.span(&first.clone().name()).start);
        let problem = Problem::new(place.name(), format!("duplicate {what} `{name}`"));
        self.report(problem.hint(format!("it is also defined at {}:{line}:{column}", document.file)));
    }

    fn param(&mut self, name: String, value: Value, place: Place) {
        if !is_name(&name) {
            let problem = Problem::new(place.clone().name(), format!("`{name}` can't be the name of a parameter"));
            self.report(problem.hint(NAME_HINT));
        }
        if value.as_str().is_some_and(|text| text.contains("${params.") || text.contains("${matrix.")) {
            let problem = Problem::new(place.clone(), format!("parameter `{name}` can't refer to others"));
            self.report(problem.hint("`${…}` is substituted in stages only"));
        }
        self.params.insert(name, value);
    }

    fn secret(&mut self, name: String, secret: raw::Secret, place: Place) {
        if !is_variable(&name) {
            let problem = Problem::new(place.clone().name(), format!("`{name}` can't be the name of a secret"));
            self.report(problem.hint("programs see it as an environment variable: letters, digits and `_`"));
        }
        let problem = match (&secret.env, &secret.file) {
            (Some(variable), None) if !is_variable(variable) => {
                let message = format!("`{variable}` can't be the name of an environment variable");
                Some(Problem::new(place.key("env"), message))
            }
            (Some(_), None) => None,
            (None, Some(file)) if !file.is_empty() => None,
            (Some(_), Some(_)) => {
                let message = format!("secret `{name}` has both `env` and `file`");
                Some(Problem::new(place.name(), message).hint("remove one of them"))
            }
            // A broken field of it is already told.
            (None, _) if self.broken.is_inside(&place) => None,
            (None, _) => {
                let message = format!("secret `{name}` needs `env` or `file`");
                Some(Problem::new(place.name(), message).hint(format!("write `{name}: {{ env: {name} }}`")))
            }
        };
        self.problems.extend(problem);
        // The name exists even where its source is wrong.
        let source = match (secret.env, secret.file) {
            (None, Some(file)) => SecretSource::File(self.folder.join(file)),
            (variable, _) => SecretSource::Environment(variable.unwrap_or_default()),
        };
        self.secrets.insert(name, source);
    }

    /// Parameters that were given but couldn't be read are not undefined.
    fn note_broken_params(&mut self) {
        let name = |(_, steps): (usize, &[Step])| match steps {
            [Step::Key(section), Step::Key(name), ..] if section == "params" => Some(name.clone()),
            [Step::Key(section)] if section == "params" => Some(EVERY.to_owned()),
            _ => None,
        };
        self.broken_params = self.broken.places().filter_map(name).collect();
        if self.broken.hides_a_file() {
            self.broken_params.push(EVERY.to_owned());
        }
    }

    fn override_params(&mut self) {
        let overrides = std::mem::take(&mut self.overrides);
        for over in overrides.iter().filter(|over| over.stage.is_none()) {
            let Some(default) = self.params.get(&over.name) else {
                if !self.broken_params.iter().any(|broken| *broken == over.name || broken == EVERY) {
                    let names = || self.params.keys().map(String::as_str);
                    let hint = did_you_mean(&over.name, names())
                        .unwrap_or_else(|| format!("parameters of the pipeline: {}", list(names())));
                    let problem = over.name_problem(format!("unknown parameter `{}`", over.name)).hint(hint);
                    self.report(problem);
                }
                continue;
            };
            let outcome = over.value(default.is_string()).and_then(|value| match overrides::refuse(default, &value) {
                Some(reason) => {
                    let problem = over.value_problem(format!("parameter `{}`: {reason}", over.name));
                    Err(Box::new(problem.hint(format!("its default is `{default}`"))))
                }
                None => Ok(value),
            });
            match outcome {
                Ok(value) => drop(self.params.insert(over.name.clone(), value)),
                Err(problem) => self.report(*problem),
            }
        }
        self.overrides = overrides;
    }

    fn overrides_of<'s>(&'s self, stage: &'s str) -> impl Iterator<Item = &'s Override> {
        self.overrides.iter().filter(move |over| over.stage.as_deref() == Some(stage))
    }

    fn overridden(&self, stage: &str, parameter: &str) -> bool {
        self.overrides_of(stage).any(|over| over.name == parameter)
    }

    /// `stage.parameter=value` must name a stage and a parameter of its kind.
    fn check_stage_overrides(&mut self) {
        let mut problems = Vec::new();
        for over in &self.overrides {
            let Some(stage) = &over.stage else { continue };
            let Some(base) = self.index.get(stage).map(|index| &self.bases[*index]) else {
                if self.hides("stages", stage) {
                    continue;
                }
                let names = || self.bases.iter().map(|base| base.name.as_str());
                let hint = did_you_mean(stage, names()).unwrap_or_else(|| format!("stages: {}", list(names())));
                problems.push(over.name_problem(format!("unknown stage `{stage}`")).hint(hint));
                continue;
            };
            let Some(cell) = self.cells.get(base.cells.start).filter(|_| !base.unknown) else { continue };
            let kind = &cell.stage.kind;
            if !kind.params.contains_key(&over.name) {
                let names = || kind.params.keys().map(String::as_str);
                let hint = did_you_mean(&over.name, names())
                    .unwrap_or_else(|| format!("parameters of `{}`: {}", kind.name, list(names())));
                let message = format!("unknown parameter `{}` of stage `{stage}`", over.name);
                problems.push(over.name_problem(message).hint(hint));
            }
        }
        self.problems.extend(problems);
    }

    /// Makes the cells of one stage, all but their inputs.
    fn stage(&mut self, document: usize, name: String, mut raw: Box<raw::Stage>) {
        let root = Spot::Root(document);
        let stages = root.key("stages");
        let spot = stages.key(&name);
        if !is_name(&name) {
            let problem = Problem::new(spot.place().name(), format!("`{name}` can't be the name of a stage"));
            self.report(problem.hint(NAME_HINT));
        }
        if let Some(first) = self.index.get(&name).map(|index| &self.bases[*index]) {
            let first = Place::root(first.document).key("stages").key(&name);
            self.report_second("stage", &name, spot.place(), &first);
            return;
        }
        let inputs = raw.inputs.take().unwrap_or_default();
        let has_matrix = raw.matrix.is_some();
        let matrix = self.matrix(raw.matrix.take(), &spot);
        let start = self.cells.len();
        let mut unknown = matrix.is_none() || (!self.broken.is_empty() && self.is_broken(&spot.key("uses").place()));
        if let Some(mut matrix) = matrix {
            let mut cells = std::mem::take(&mut matrix.cells);
            let last = cells.pop();
            for cell in cells {
                unknown |= !self.cell(document, &name, (*raw).clone(), &matrix, cell);
            }
            if let Some(cell) = last {
                unknown |= !self.cell(document, &name, *raw, &matrix, cell);
            }
            self.push_base(document, name, inputs, start, has_matrix.then_some(matrix.axes), unknown);
        } else {
            self.push_base(document, name, inputs, start, Some(Vec::new()), unknown);
        }
    }

    fn push_base(
        &mut self,
        document: usize,
        name: String,
        inputs: Entries<raw::Input>,
        start: usize,
        axes: Option<Vec<String>>,
        unknown: bool,
    ) {
        self.index.insert(name.clone(), self.bases.len());
        let cells = start..self.cells.len();
        self.bases.push(Base { name, document, inputs, cells, axes, unknown });
    }

    /// One cell without axes where there is no matrix; `None` where the matrix is wrong.
    fn matrix(&mut self, raw: Option<Entries<Value>>, spot: &Spot) -> Option<Matrix> {
        let Some(raw) = raw else {
            return Some(Matrix { axes: Vec::new(), cells: vec![BTreeMap::new()] });
        };
        let scope = Scope { params: &self.params, broken_params: &self.broken_params, matrix: None };
        let mut problems = std::mem::take(&mut self.problems);
        let matrix = matrix::expand(raw, &scope, &spot.key("matrix"), &mut problems);
        self.problems = problems;
        matrix
    }

    /// Reads one cell; false where its kind or outputs stay unknown.
    fn cell(
        &mut self,
        document: usize,
        name: &str,
        raw: raw::Stage,
        matrix: &Matrix,
        values: BTreeMap<String, Value>,
    ) -> bool {
        let root = Spot::Root(document);
        let stages = root.key("stages");
        let spot = stages.key(name);
        let mut problems = std::mem::take(&mut self.problems);
        let scope = Scope {
            params: &self.params,
            broken_params: &self.broken_params,
            matrix: (!matrix.axes.is_empty()).then_some(&values),
        };
        let mut reader = stage::Reader { scope, stage: name, spot, problems: &mut problems };
        let read = self.read_cell(&mut reader, raw);
        self.problems = problems;
        let known = read.kind.is_some();
        let label = matrix.label(&values);
        let stage = Stage {
            name: if matrix.axes.is_empty() { name.to_owned() } else { format!("{name}[{label}]") },
            base: name.to_owned(),
            matrix: values,
            kind: read.kind.unwrap_or_else(unknown_kind),
            command: read.command,
            command_params: read.command_params,
            params: read.params,
            inputs: BTreeMap::new(),
            resources: read.resources,
            executor: read.executor,
            retry: read.retry,
            timeout: read.timeout,
            tags: read.tags,
            env: read.env,
            secrets: read.secrets,
            allow_failed_rows: read.allow_failed_rows,
            max_rejected: read.max_rejected,
            location: Location::new(Arc::clone(&self.documents[document]), name),
        };
        self.cells.push(Cell { base: self.bases.len(), stage, on: read.on, is_run: read.is_run });
        known
    }

    fn read_cell(&self, reader: &mut stage::Reader, raw: raw::Stage) -> CellRead {
        let uses = raw.uses.as_deref();
        let is_run = uses == Some("run");
        let catalog_kind = uses.filter(|_| !is_run).and_then(|uses| reader.kind(self, uses));
        if is_run || catalog_kind.is_some() {
            reader.refuse_misplaced(&raw);
        }
        let base = catalog_kind.as_ref().map_or_else(Resources::default, |kind| kind.resources.clone());
        let resources = reader.resources(&raw.resources, base);
        let on = reader.when(&raw.when);
        if is_run && raw.run.is_none() {
            let problem = Problem::new(reader.spot.place().name(), format!("stage `{}` needs `run`", reader.stage));
            reader.problems.push(problem.missing(["run"]).hint("`uses: run` goes with `run: \"command\"`"));
        }
        let params = match &catalog_kind {
            Some(kind) => reader.params(self, raw.with, kind),
            None => BTreeMap::new(),
        };
        let by_row = catalog_kind.as_deref();
        let allow_failed_rows = reader.count_of_rows(&raw.allow_failed_rows, "allow_failed_rows", by_row);
        let max_rejected = reader.count_of_rows(&raw.max_rejected, "max_rejected", by_row);
        let kind = match catalog_kind {
            None if is_run => Some(Arc::new(reader.run_manifest(raw.outputs, raw.files, resources.clone()))),
            other => other,
        };
        CellRead {
            kind,
            is_run,
            on,
            params,
            allow_failed_rows: allow_failed_rows.unwrap_or(0),
            max_rejected,
            resources,
            executor: reader.executor(self, raw.executor),
            command_params: raw.run.as_ref().map(stage::params_in).unwrap_or_default(),
            command: if is_run { reader.command(raw.run) } else { None },
            retry: reader.retry(raw.retry),
            timeout: reader.timeout(&raw.timeout),
            tags: reader.tags(raw.tags),
            env: reader.env(raw.env),
            secrets: reader.secrets(self, raw.secrets),
        }
    }

    /// Leaves out what `when:` excludes, and moves the indices of wires accordingly.
    fn finish(self, name: String) -> Pipeline {
        let mut moved = Vec::with_capacity(self.cells.len());
        let mut next = 0;
        for cell in &self.cells {
            moved.push(next);
            next += usize::from(cell.on);
        }
        let all_on = next == self.cells.len();
        let mut stages: Vec<Stage> = self.cells.into_iter().filter(|cell| cell.on).map(|cell| cell.stage).collect();
        if !all_on {
            for source in stages.iter_mut().flat_map(|stage| stage.inputs.values_mut()).flatten() {
                if let Source::Stage { stage, .. } = source {
                    *stage = moved[*stage];
                }
            }
        }
        let folder: PathBuf = self.folder.to_owned();
        Pipeline { name, params: self.params, secrets: self.secrets, stages, folder }
    }
}

/// What the fields of a cell say.
struct CellRead {
    kind: Option<Arc<Manifest>>,
    is_run: bool,
    on: bool,
    params: BTreeMap<String, Value>,
    allow_failed_rows: u64,
    max_rejected: Option<u64>,
    resources: Resources,
    executor: Option<String>,
    command: Option<super::types::Command>,
    command_params: BTreeSet<String>,
    retry: super::types::Retry,
    timeout: Option<std::time::Duration>,
    tags: Vec<String>,
    env: BTreeMap<String, String>,
    secrets: Vec<String>,
}

/// Stands where a kind couldn't be found; the pipeline is refused, so nobody sees it.
fn unknown_kind() -> Arc<Manifest> {
    Arc::new(Manifest::default())
}
