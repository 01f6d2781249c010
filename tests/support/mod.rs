//! A made-up machine on which engine tests run: fake programs that tell which stages ran, and the real binary.

pub mod azure;
pub mod kernels;
pub mod module_graph;
pub mod proxy;
pub mod s3;
pub mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, Once};

use cuda_agent_engine::Folders;
use cuda_agent_engine::catalog::{Catalog, Kind, ProgramFiles};
use cuda_agent_engine::event::{RunEvent, Subscriber};
use cuda_agent_engine::execute::launch::{Channels, Exit, Launch, Launcher};
use cuda_agent_engine::execute::secrets::Secrets;
use cuda_agent_engine::execute::{Engine, Report};
use cuda_agent_engine::host::Host;
use cuda_agent_engine::key::ProgramIdentity;
use cuda_agent_engine::plan::graph::Graph;
use cuda_agent_engine::plan::{Planner, Verdict};
use cuda_agent_engine::spec::{self, Pipeline};
use cuda_agent_engine::store::Store;
use cuda_agent_protocol::manifest::PerDevice;
use cuda_agent_protocol::{Event, Request, RowResult, RowStatus};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Map, Value, json};

/// The folder that holds the workspace. These tests belong to the package of the binary, which lies one folder below.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("`app` lies in the repository")
}

/// Python's bytecode is made once for all tests, those in Python too: torch's takes longer than most of them.
pub fn share_bytecode(command: &mut Command) {
    static BEGIN: Once = Once::new();
    let of_these = || Path::new(env!("CARGO_TARGET_TMPDIR")).join("pycache");
    let folder = std::env::var_os("PYTHONPYCACHEPREFIX").map_or_else(of_these, PathBuf::from);
    // That of programs which earlier tests wrote to folders of their own is of no use.
    BEGIN.call_once(|| drop(std::fs::remove_dir_all(folder.join(std::env::temp_dir().strip_prefix("/").unwrap()))));
    command.env("PYTHONPYCACHEPREFIX", folder);
    command.env_remove("PYTHONDONTWRITEBYTECODE");
}

/// What a fake program does: it gets its folder, its request, and the engine's end.
pub type Behaviour = Arc<dyn Fn(PathBuf, Request, Channels) -> BoxFuture<'static, Exit> + Send + Sync>;

/// Programs that exist only here.
#[derive(Clone, Default)]
pub struct FakeLauncher {
    behaviours: Arc<Mutex<BTreeMap<String, Behaviour>>>,
    launched: Arc<Mutex<Vec<String>>>,
}

impl FakeLauncher {
    /// What the programs of a stage kind do.
    pub fn on(&self, kind: &str, behaviour: Behaviour) {
        self.behaviours.lock().unwrap().insert(kind.to_owned(), behaviour);
    }

    /// What the programs of a stage kind do by now.
    pub fn behaviour(&self, kind: &str) -> Behaviour {
        self.behaviours.lock().unwrap()[kind].clone()
    }

    /// Stages that were launched since the last call, in order.
    pub fn launched(&self) -> Vec<String> {
        std::mem::take(&mut self.launched.lock().unwrap())
    }
}

impl Launcher for FakeLauncher {
    fn launch(&self, launch: Launch, channels: Channels) -> BoxFuture<'static, Exit> {
        self.launched.lock().unwrap().push(launch.stage.clone());
        let request: Request =
            serde_json::from_slice(&std::fs::read(launch.folder.join("request.json")).unwrap()).unwrap();
        let behaviour = self.behaviours.lock().unwrap().get(&request.kind).cloned();
        let behaviour = behaviour.unwrap_or_else(|| panic!("no behaviour for {}", request.kind));
        behaviour(launch.folder, request, channels)
    }
}

/// A program that writes a text made of its parameters and inputs to each tree output.
pub fn echo() -> Behaviour {
    Arc::new(|folder, request, _channels| {
        async move {
            let mut text = format!("{}\n", serde_json::to_string(&request.params).unwrap());
            for port in request.inputs.keys() {
                let path = folder.join("inputs").join(port);
                text.push_str(&format!("{port}: {}", std::fs::read_to_string(path).unwrap_or_default()));
            }
            for output in request.outputs.values() {
                std::fs::write(folder.join(&output.path), &text).unwrap();
            }
            Exit::Success
        }
        .boxed()
    })
}

/// A program that fails, after printing something.
pub fn failing(printed: &'static str) -> Behaviour {
    Arc::new(move |_, _, channels| {
        channels.log.lock().unwrap().write(printed.as_bytes());
        async { Exit::Code(3) }.boxed()
    })
}

/// A by-row program: `work` makes the answer, or says how the program ends.
pub fn row_program(work: impl Fn(&Map<String, Value>) -> Answer + Send + Sync + 'static) -> Behaviour {
    let work = Arc::new(work);
    Arc::new(move |_, _, channels| {
        let work = work.clone();
        async move {
            let mut rows = channels.rows.expect("a by-row program gets rows");
            while let Some(row) = rows.recv().await {
                // As a real program, it takes no answer back from the engine before the next row.
                tokio::task::yield_now().await;
                let mut result = RowResult {
                    row: row.row,
                    status: RowStatus::Done,
                    reason: None,
                    detail: None,
                    outputs: BTreeMap::new(),
                };
                match work(&row.columns) {
                    Answer::Done(value) => {
                        let value = value.as_object().unwrap().clone();
                        result.outputs.insert("rows".into(), vec![value]);
                    }
                    Answer::Many(values) => {
                        let values = values.iter().map(|value| value.as_object().unwrap().clone()).collect();
                        result.outputs.insert("rows".into(), values);
                    }
                    Answer::Failed => {
                        result.status = RowStatus::Failed;
                        result.reason = Some("rate-limit".into());
                    }
                    Answer::Rejected => {
                        result.status = RowStatus::Rejected;
                        result.reason = Some("too-long".into());
                    }
                    Answer::Die => return Exit::Signal(9),
                    Answer::Hang => std::future::pending().await,
                }
                let _ = channels.events.send(Ok(Event::Row(result))).await;
            }
            Exit::Success
        }
        .boxed()
    })
}

/// What a by-row program makes of a row.
pub enum Answer {
    /// One output row.
    Done(Value),
    /// Any number of them.
    Many(Vec<Value>),
    /// An outside cause.
    Failed,
    /// The row is at fault.
    Rejected,
    /// The program dies.
    Die,
    /// The program never answers, until it is dropped.
    Hang,
}

/// A project with made-up stage kinds, a store in memory, and fake programs.
pub struct Lab {
    pub folder: Arc<tempfile::TempDir>,
    pub store: Store,
    pub catalog: Catalog,
    pub launcher: FakeLauncher,
    pub host: Host,
    pub secrets: Secrets,
    pub refresh: Vec<String>,
    pub events: Vec<RunEvent>,
    /// Interrupts the run that is going on.
    pub interrupt: Arc<Mutex<Option<tokio::sync::mpsc::UnboundedSender<()>>>>,
}

const KINDS: [(&str, &str); 8] = [
    (
        "lab/make",
        "name: lab/make\nversion: 1.0.0\nsummary: Makes a text.\noutputs: { out: { type: tree } }\n\
         params: { text: { type: string, default: hello }, seed: { type: integer, default: 0 } }\nrun: [x]\n",
    ),
    (
        "lab/join",
        "name: lab/join\nversion: 1.0.0\nsummary: Joins texts.\ninputs: { a: { type: tree }, b: { type: tree, optional: true } }\n\
         outputs: { out: { type: tree } }\nrun: [x]\n",
    ),
    (
        "lab/many",
        "name: lab/many\nversion: 1.0.0\nsummary: Joins many.\ninputs: { all: { type: tree, list: true } }\n\
         outputs: { out: { type: tree } }\nrun: [x]\n",
    ),
    (
        "lab/columns",
        "name: lab/columns\nversion: 1.0.0\nsummary: Reads one column.\n\
         inputs: { rows: { type: table, columns: { id: int64 } } }\noutputs: { out: { type: tree } }\nrun: [x]\n",
    ),
    (
        "lab/rows",
        "name: lab/rows\nversion: 1.0.0\nsummary: Works on rows.\n\
         inputs: { rows: { type: table, columns: { id: int64 } } }\n\
         outputs: { rows: { type: table, columns: [ { name: square, type: int64 } ] } }\n\
         params: { seed: { type: integer, default: 0 } }\n\
         determinism: measured\nby_row: { port: rows, window: 1 }\nrun: [x]\n",
    ),
    (
        "lab/idle",
        "name: lab/idle\nversion: 1.0.0\nsummary: Waits for others.\n\
         inputs: { rows: { type: table, columns: { id: int64 } } }\n\
         outputs: { rows: { type: table, columns: [ { name: square, type: int64 } ] } }\n\
         resources: { cpu: 0 }\nby_row: { port: rows }\nrun: [x]\n",
    ),
    (
        "lab/limited",
        "name: lab/limited\nversion: 1.0.0\nsummary: Works on rows for so long.\n\
         inputs: { rows: { type: table, columns: { id: int64 } } }\n\
         outputs: { rows: { type: table, columns: [ { name: square, type: int64 } ] } }\n\
         by_row: { port: rows, window: 4, row_timeout_s: 0.4 }\nrun: [x]\n",
    ),
    (
        "lab/texts",
        "name: lab/texts\nversion: 1.0.0\nsummary: Makes a text for each row.\n\
         inputs: { rows: { type: table, columns: { id: int64 } } }\n\
         outputs: { rows: { type: table, columns: [ { name: text, type: utf8 } ] } }\n\
         by_row: { port: rows, row_timeout_s: 3600 }\nrun: [x]\n",
    ),
];

impl Lab {
    pub fn new() -> Self {
        let launcher = FakeLauncher::default();
        let mut lab = Self {
            folder: Arc::new(tempfile::tempdir().unwrap()),
            store: Store::memory(),
            catalog: Catalog::default(),
            launcher,
            host: Host::fake(4, "a made-up CPU"),
            secrets: Secrets::default(),
            refresh: Vec::new(),
            events: Vec::new(),
            interrupt: Arc::default(),
        };
        for (name, _) in KINDS {
            lab.launcher.on(name, echo());
        }
        lab.set_version("", "");
        lab
    }

    /// The same project, store and machine, for an engine with programs of its own.
    pub fn beside(&self) -> Self {
        Self {
            folder: self.folder.clone(),
            store: self.store.clone(),
            host: Host::fake(self.host.cpus, "a made-up CPU"),
            ..Self::new()
        }
    }

    /// Loads the kinds anew, one of them in another version, as a new build of the binary would have it.
    pub fn set_version(&mut self, kind: &str, version: &str) {
        self.catalog = Catalog::default();
        for (name, manifest) in KINDS {
            let identity = ProgramIdentity::Version(if name == kind { version } else { "1.0.0" }.to_owned());
            add_kind(&mut self.catalog, manifest, identity);
        }
    }

    pub fn folders(&self) -> Folders {
        Folders::below(&self.folder.path().join("local")).unwrap()
    }

    pub fn pipeline(&self, text: &str) -> Pipeline {
        let text = format!("name: lab\n{text}");
        let folder = self.folder.path();
        spec::parse_pipeline(&text, Path::new("lab.yaml"), folder, &self.catalog, &[], &|path| {
            std::fs::read_to_string(path)
        })
        .unwrap_or_else(|errors| panic!("{}", errors.render(false)))
    }

    fn refreshed(&self, pipeline: &Pipeline) -> BTreeSet<usize> {
        let stages = pipeline.stages.iter().enumerate();
        stages.filter(|(_, stage)| self.refresh.contains(&stage.base)).map(|(index, _)| index).collect()
    }

    /// Removes every lease, as time does with those of the dead.
    pub async fn drop_leases(&self) {
        for lease in self.store.truth().list("v1/leases").await.unwrap() {
            self.store.truth().delete(&format!("v1/leases/{}", lease.name)).await.unwrap();
        }
    }

    /// Ends every run but some, as time does with those of the dead. The runs that were ended.
    pub async fn mark_runs_dead(&self, living: &[String]) -> Vec<String> {
        let mut marked = Vec::new();
        for run in self.runs().await.into_iter().filter(|run| !living.contains(run)) {
            let mut manifest = self.store.run(&run).await.unwrap().unwrap();
            manifest.ended_at = Some(manifest.heartbeat_at);
            self.store.put_run(&manifest).await.unwrap();
            marked.push(run);
        }
        marked
    }

    pub async fn runs(&self) -> Vec<String> {
        self.store.truth().list("v1/runs").await.unwrap().into_iter().map(|run| run.name).collect()
    }

    /// Runs stages of a pipeline; says what came of it and which stages were launched.
    pub async fn run_selected(&mut self, text: &str, patterns: &[&str]) -> (Report, Vec<String>) {
        let pipeline = self.pipeline(text);
        let graph = Graph::new(&pipeline);
        let patterns: Vec<String> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
        let engine = Engine {
            selected: graph.select(&pipeline, &patterns).unwrap(),
            order: graph.order().to_vec(),
            refresh: self.refreshed(&pipeline),
            pipeline: Arc::new(pipeline),
            catalog: &self.catalog,
            store: self.store.clone(),
            host: &self.host,
            folders: self.folders(),
            launcher: Arc::new(self.launcher.clone()),
            secrets: self.secrets.clone(),
            jobs: None,
            sample: None,
            waits: true,
        };
        let (interrupt, interrupts) = tokio::sync::mpsc::unbounded_channel();
        *self.interrupt.lock().unwrap() = Some(interrupt);
        self.events.clear();
        let mut events: Vec<RunEvent> = Vec::new();
        let report = {
            let mut subscribers: [&mut dyn Subscriber; 1] = [&mut events];
            engine.run(&mut subscribers, interrupts).await.unwrap()
        };
        self.events = events;
        let mut launched = self.launcher.launched();
        launched.dedup();
        (report, launched)
    }

    pub async fn run(&mut self, text: &str) -> (Report, Vec<String>) {
        self.run_selected(text, &[]).await
    }

    /// Which stages are launched by a run that succeeds.
    pub async fn launches(&mut self, text: &str) -> Vec<String> {
        let (report, launched) = self.run(text).await;
        assert!(report.failed.is_empty(), "{:?}", report.failed);
        launched
    }

    /// The plan as lines: `stage: verdict (reasons)`.
    pub async fn plan(&self, text: &str) -> String {
        let pipeline = self.pipeline(text);
        let graph = Graph::new(&pipeline);
        let (refresh, folders) = (self.refreshed(&pipeline), self.folders());
        let planner = Planner::new(&pipeline, &self.catalog, &self.store, &self.host, &folders, &refresh);
        let plans = planner.plan(graph.order(), &vec![true; pipeline.stages.len()]).await.unwrap();
        let line = |index: &usize| {
            let verdict = match &plans[*index].as_ref().unwrap().verdict {
                Verdict::Hit { .. } => "hit".to_owned(),
                Verdict::Miss { reasons, .. } => {
                    let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
                    format!("miss ({})", reasons.join("; "))
                }
                Verdict::Pending { waits } => {
                    let waits: Vec<&str> = waits.iter().map(|wait| pipeline.stages[*wait].name.as_str()).collect();
                    format!("pending ({})", waits.join(", "))
                }
            };
            format!("{}: {verdict}", pipeline.stages[*index].name)
        };
        graph.order().iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// The text of a tree output that is one file.
    pub async fn text(&self, report: &Report, stage: &str) -> String {
        let artifact = &report.outputs[stage]["out"];
        let entry = self.store.tree_entries(artifact).await.unwrap().unwrap().remove(0);
        let bytes = self.store.get_blob(&entry.blob).await.unwrap().unwrap();
        let range = entry.offset as usize..(entry.offset + entry.size) as usize;
        String::from_utf8(bytes[range].to_vec()).unwrap()
    }
}

/// A folder with the real binary in it.
pub struct Sandbox {
    pub folder: tempfile::TempDir,
    pub variables: Vec<(String, String)>,
}

impl Sandbox {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), variables: Vec::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> &Self {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        self
    }

    /// A by-row stage kind `my/square` in sh, which does something before each answer.
    pub fn write_squares(&self, before: &str) -> &Self {
        self.write(
            "kinds/square/stage.yaml",
            "name: my/square\nversion: 1.0.0\nsummary: Squares.\ninputs: { rows: { type: table, columns: { id: int64 } } }\n\
             outputs: { rows: { type: table, columns: [ { name: square, type: int64 } ] } }\n\
             by_row: { port: rows, workers: 2 }\nrun: [sh, square.sh]\nsources: [square.sh]\n",
        );
        let script = r#"while IFS= read -r line; do
  digest=${line#*\"row\":\"}; digest=${digest%%\"*}
  id=${line#*\"id\":}; id=${id%%\}*}
  BEFORE
  printf '{"event":"row","row":"%s","status":"done","outputs":{"rows":[{"square":%s}]}}\n' "$digest" $((id * id)) >&$CUDA_AGENT_EVENTS_FD
done
"#;
        self.write("kinds/square/square.sh", &script.replace("BEFORE", before))
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-agent"));
        command.args(arguments).current_dir(self.folder.path()).env_remove("CUDA_AGENT_PYTHON").env("NO_COLOR", "1");
        share_bytecode(&mut command);
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    pub fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs and expects success; standard output.
    pub fn good(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {}\n{error}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs and expects this exit status; standard error, with what varies replaced.
    pub fn bad(&self, status: i32, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {error}");
        self.stable(&error)
    }

    /// A text without this run's own names, times and digests.
    pub fn stable(&self, text: &str) -> String {
        let folder = self.folder.path().canonicalize().unwrap();
        stable(&text.replace(&folder.display().to_string(), "[folder]"))
    }

    /// How many stages a run executed, by its own word.
    pub fn executed(&self, arguments: &[&str]) -> Vec<String> {
        let mut all = vec!["run", "--json"];
        all.extend(arguments);
        let text = self.good(&all);
        let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let finished = events.filter(|event| event["event"] == "stage_finished");
        finished.map(|event| event["stage"].as_str().unwrap().to_owned()).collect()
    }
}

/// Replaces run ids, digests, durations, dates and times.
pub fn stable(text: &str) -> String {
    let mut out = String::new();
    for (number, line) in text.lines().enumerate() {
        if number > 0 {
            out.push('\n');
        }
        let words: Vec<String> = line.split(' ').map(stable_word).collect();
        out.push_str(&words.join(" "));
    }
    out
}

fn is_run_id(text: &str) -> bool {
    text.len() == 27 && text.as_bytes()[8] == b'T' && text.as_bytes()[20] == b'-'
}

fn stable_word(word: &str) -> String {
    // A path may have a run's id in it.
    if word.contains('/') {
        let part = |part: &str| if is_run_id(part) { "[run]".to_owned() } else { part.to_owned() };
        return word.split('/').map(part).collect::<Vec<_>>().join("/");
    }
    stable_part(word)
}

fn stable_part(word: &str) -> String {
    let core = word.trim_end_matches([':', ',', ')']);
    let rest = &word[core.len()..];
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_run_id(core) {
        return format!("[run]{rest}");
    }
    if (core.len() == 64 || core.len() == 12) && is_hex(core) {
        return format!("[digest]{rest}");
    }
    let is_shaped = |shape: &str| {
        core.len() == shape.len()
            && core.bytes().zip(shape.bytes()).all(|(a, b)| if b == b'0' { a.is_ascii_digit() } else { a == b })
    };
    for (shape, shown) in [("0000-00-00", "[date]"), ("00:00", "[time]")] {
        if is_shaped(shape) {
            return format!("{shown}{rest}");
        }
    }
    if core.parse::<f64>().is_ok() && core.contains('.') {
        return format!("[number]{rest}");
    }
    word.to_owned()
}

/// A table with ids and another column, as a Parquet file.
pub fn write_ids(path: &Path, ids: &[i64], other: &str) {
    use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
    let others = vec![other; ids.len()];
    let batch = RecordBatch::try_from_iter([
        ("id", Arc::new(Int64Array::from(ids.to_vec())) as ArrayRef),
        ("other", Arc::new(StringArray::from(others)) as ArrayRef),
    ])
    .unwrap();
    cuda_agent_engine::artifact::table::write(path, &batch.schema(), &[batch]).unwrap();
}

/// The answer that by-row tests expect.
pub fn square(columns: &Map<String, Value>) -> Answer {
    let id = columns["id"].as_i64().unwrap();
    Answer::Done(json!({ "square": id * id }))
}

/// A linear congruential generator: instants are random, and the same in every run of the test.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Adds a kind that has a manifest and no program.
pub fn add_kind(catalog: &mut Catalog, manifest: &str, identity: ProgramIdentity) {
    let manifest = cuda_agent_engine::spec::parse_manifest(manifest, Path::new("stage.yaml"));
    let manifest = Arc::new(manifest.unwrap_or_else(|errors| panic!("{}", errors.render(false))));
    let (executable, origin) = (Default::default(), manifest.name.clone());
    let identity = PerDevice { cpu: identity.clone(), gpu: identity };
    catalog.add(Kind { manifest, identity, executable, program: ProgramFiles::None, origin }).unwrap();
}
