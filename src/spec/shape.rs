//! What YAML files may hold, as data.
//!
//! The same tables drive the check of a file ([`super::check`]), which gathers every mistake of structure, and the JSON
//! Schema for editors.

/// What may stand at one place of a file.
#[derive(Debug)]
pub(crate) enum Shape {
    /// Text; a number or a boolean isn't taken for it.
    Text,
    /// Any scalar, taken as it is written: `1.10` stays `1.10`.
    Written,
    /// Any value, of which the description tells what it means.
    Any(&'static str),
    Boolean,
    Whole,
    Number,
    /// A number of bytes, or `4GiB`.
    Size,
    /// A column type such as `list<int64>`.
    Column,
    Choice(&'static [&'static str]),
    List(&'static Shape),
    /// Names that the author chooses.
    Map(&'static Shape),
    Record(&'static Record),
    /// By what is written: one shape for scalars, one for lists, one for mappings.
    Either(&'static [Shape]),
}

/// A mapping with a fixed set of fields.
#[derive(Debug)]
pub(crate) struct Record {
    /// With its article, for messages: "a stage".
    pub what: &'static str,
    pub fields: &'static [Field],
}

#[derive(Debug)]
pub(crate) struct Field {
    pub name: &'static str,
    pub shape: Shape,
    pub presence: Presence,
    pub doc: &'static str,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    Optional,
    Required,
    /// Required where another field is absent.
    RequiredUnless(&'static str),
}

impl Field {
    /// Whether a record that has these fields lacks it.
    pub fn is_missing(&self, has: impl Fn(&str) -> bool) -> bool {
        let needed = match self.presence {
            Presence::Optional => false,
            Presence::Required => true,
            Presence::RequiredUnless(other) => !has(other),
        };
        needed && !has(self.name)
    }
}

const fn field(name: &'static str, shape: Shape, doc: &'static str) -> Field {
    Field { name, shape, presence: Presence::Optional, doc }
}

const fn required(name: &'static str, shape: Shape, doc: &'static str) -> Field {
    Field { name, shape, presence: Presence::Required, doc }
}

const PORT_TYPES: Shape = Shape::Choice(&["tasks", "table", "trajectories", "model", "tree", "report"]);
const COLUMNS: Shape = Shape::Map(&Shape::Column);
const WORDS: Shape = Shape::List(&Shape::Text);
const VALUES: Shape = Shape::Map(&Shape::Any("a value"));

/// `{env: NAME}` or `{file: PATH}`.
static SECRET: Record = Record {
    what: "a secret",
    fields: &[
        field("env", Shape::Text, "The environment variable of the engine that holds it."),
        field("file", Shape::Text, "The file that holds it, relative to the pipeline's folder."),
    ],
};

/// An input from outside of the pipeline.
static EXTERNAL: Record = Record {
    what: "an input from outside",
    fields: &[
        field("path", Shape::Text, "A file or a folder, relative to the pipeline's folder."),
        field("url", Shape::Text, "Where to fetch it; needs `digest`."),
        field("digest", Shape::Text, "BLAKE3 of the bytes behind `url`, 64 hex digits."),
        field("artifact", Shape::Text, "A tagged artifact of the store, `name@tag`."),
    ],
};

static RESOURCES: Record = Record {
    what: "`resources`",
    fields: &[
        field(
            "cpu",
            Shape::Any("a whole number, or `all`"),
            "CPU cores; `all`: the machine's, or a GPU's part of them.",
        ),
        field("memory", Shape::Any("a size such as 4GiB"), "Memory, for scheduling."),
        field("gpu", Shape::Any("a whole number"), "Whole GPUs."),
    ],
};

static RETRY: Record = Record {
    what: "`retry`",
    fields: &[
        field("attempts", Shape::Any("a whole number"), "Tries after the first."),
        field(
            "backoff",
            Shape::Any("a duration such as 1s"),
            "Wait before the second try, doubled for each further one.",
        ),
        field("max_backoff", Shape::Any("a duration such as 1m"), "Longest wait."),
    ],
};

static OUTPUT: Record = Record {
    what: "an output",
    fields: &[
        required("type", PORT_TYPES, "What it makes."),
        field("columns", COLUMNS, "The columns of a table, with their types."),
    ],
};

/// A stage of a pipeline.
pub(crate) static STAGE: Record = Record {
    what: "a stage",
    fields: &[
        required("uses", Shape::Text, "The stage kind, or `run` for a command of your own."),
        field(
            "inputs",
            Shape::Map(&Shape::Either(&[
                Shape::Text,
                Shape::List(&Shape::Either(&[Shape::Text, Shape::Record(&EXTERNAL)])),
                Shape::Record(&EXTERNAL),
            ])),
            "By port: `stage.output`, `stage[*].output`, a list of those, `{path: …}`, `{url: …, digest: …}` or `{artifact: name@tag}`.",
        ),
        field("with", VALUES, "Parameters of the kind."),
        field("matrix", VALUES, "Makes one stage for each combination of the values of its axes."),
        field("tags", WORDS, "For selection with `tag:NAME`."),
        field(
            "when",
            Shape::Any("a boolean, `${params.x}` or `${params.x} == value`"),
            "Leaves the stage out where it is false.",
        ),
        field("resources", Shape::Record(&RESOURCES), "What it needs, instead of what its kind says."),
        field("executor", Shape::Text, "Which executor of the project executes it: `local`, or one of `executors:`."),
        field(
            "retry",
            Shape::Either(&[Shape::Any("a whole number"), Shape::Record(&RETRY)]),
            "How often to try again.",
        ),
        field("timeout", Shape::Any("a duration such as 2h"), "Ends the stage after this long."),
        field("env", Shape::Map(&Shape::Written), "Environment variables; they count in the key."),
        field("secrets", WORDS, "Names of the pipeline's secrets that it sees as environment variables."),
        field("allow_failed_rows", Shape::Any("a whole number"), "How many rows may fail without failing the stage."),
        field("max_rejected", Shape::Any("a whole number"), "More rejected rows than this fail the stage."),
        field(
            "run",
            Shape::Either(&[Shape::Text, Shape::List(&Shape::Written)]),
            "For `uses: run`: text for `sh -euc`, or a list of words.",
        ),
        field(
            "outputs",
            Shape::Map(&Shape::Either(&[PORT_TYPES, Shape::Record(&OUTPUT)])),
            "For `uses: run`: its output ports.",
        ),
        field("files", WORDS, "For `uses: run`: files that the command needs, relative to the pipeline's folder."),
    ],
};

const PARAMS_DOC: &str = "Parameters of the pipeline and their defaults, for `${params.NAME}`.";
const SECRETS_DOC: &str = "Where secrets come from: `{env: NAME}` or `{file: PATH}`.";
const INCLUDE_DOC: &str = "Files with more params, secrets and stages, relative to this one.";
const STAGES_DOC: &str = "The stages, by name.";

/// A pipeline file.
pub(crate) static PIPELINE: Record = Record {
    what: "a pipeline",
    fields: &[
        required("name", Shape::Text, "Runs are filed under it."),
        field("params", VALUES, PARAMS_DOC),
        field("secrets", Shape::Map(&Shape::Record(&SECRET)), SECRETS_DOC),
        field("include", WORDS, INCLUDE_DOC),
        Field {
            name: "stages",
            shape: Shape::Map(&Shape::Record(&STAGE)),
            presence: Presence::RequiredUnless("include"),
            doc: STAGES_DOC,
        },
    ],
};

/// A file that a pipeline includes.
pub(crate) static INCLUDED: Record = Record {
    what: "an included file",
    fields: &[
        field("params", VALUES, PARAMS_DOC),
        field("secrets", Shape::Map(&Shape::Record(&SECRET)), SECRETS_DOC),
        field("include", WORDS, INCLUDE_DOC),
        field("stages", Shape::Map(&Shape::Record(&STAGE)), STAGES_DOC),
    ],
};

static DEVICE: Record = Record {
    what: "`device`",
    fields: &[
        field("gpu", Shape::Text, "The GPUs' model, as nvidia-smi names it."),
        field("driver", Shape::Written, "The driver's version."),
        field("cpu", Shape::Text, "The CPU's model; needed for stages that measure on CPUs."),
    ],
};

static EXECUTOR: Record = Record {
    what: "an executor",
    fields: &[
        required("kind", Shape::Text, "`workers`: processes that take stages from the store (`cuda-agent worker`)."),
        field(
            "device",
            Shape::Record(&DEVICE),
            "What its machines have; it counts in the keys of stages that measure.",
        ),
        field("resources", Shape::Record(&KIND_RESOURCES), "What one of its machines has."),
        field(
            "wait",
            Shape::Any("a duration such as 1h"),
            "Fails a stage that no worker has been there for, for so long.",
        ),
    ],
};

/// `cuda-agent.yaml`.
pub(crate) static PROJECT: Record = Record {
    what: "a project",
    fields: &[
        field(
            "store",
            Shape::Text,
            "The URL of the store: file:///folder, s3://bucket/folder, gs://bucket/folder, az://container/folder or memory://.",
        ),
        field("endpoint", Shape::Text, "The server of a remote store, where it isn't the cloud's own."),
        field("region", Shape::Text, "The region of a remote store."),
        field("single_writer", Shape::Boolean, "Allows a remote store that can't keep two writers apart."),
        field("read_only", Shape::Boolean, "Writes nothing to a remote store."),
        field("local_max", Shape::Size, "How much of a remote store is kept here, such as 100GB."),
        field("pipeline", Shape::Text, "The pipeline that commands use by default."),
        field("stages", WORDS, "Folders with stage kinds of the project."),
        field("python", Shape::Text, "The Python interpreter that stages run with."),
        field("work", Shape::Text, "The folder for everything local."),
        field("executors", Shape::Map(&Shape::Record(&EXECUTOR)), "Other machines that execute stages, by name."),
        field("executor", Shape::Text, "The executor of stages that name none; `local` by default."),
    ],
};

static INPUT_PORT: Record = Record {
    what: "an input port",
    fields: &[
        required("type", PORT_TYPES, "What it takes."),
        field("columns", COLUMNS, "The columns that the program reads; all where there are none."),
        field("optional", Shape::Boolean, "Whether the stage runs without it."),
        field("list", Shape::Boolean, "Whether it takes several outputs."),
        field("doc", Shape::Written, "For people."),
    ],
};

static OUTPUT_COLUMN: Record = Record {
    what: "a column",
    fields: &[
        required("name", Shape::Written, "Its name."),
        required("type", Shape::Column, "Its type."),
        field("measured", Shape::Boolean, "Whether it holds measurements."),
        field("doc", Shape::Written, "For people."),
    ],
};

static OUTPUT_PORT: Record = Record {
    what: "an output port",
    fields: &[
        required("type", PORT_TYPES, "What it makes."),
        field("columns", Shape::List(&Shape::Record(&OUTPUT_COLUMN)), "The columns of a table."),
        field("doc", Shape::Written, "For people."),
    ],
};

static PARAM: Record = Record {
    what: "a parameter",
    fields: &[
        required("type", Shape::Choice(&["integer", "number", "string", "boolean", "list", "map"]), "Its type."),
        field("default", Shape::Any("a value"), "The value where the pipeline gives none."),
        field("min", Shape::Number, "Smallest number allowed."),
        field("max", Shape::Number, "Largest number allowed."),
        field("choices", Shape::List(&Shape::Any("a value")), "Allowed values."),
        field("continues", Shape::Boolean, "Whether raising it goes on from the last checkpoint."),
        field("doc", Shape::Written, "For people."),
    ],
};

static KIND_RESOURCES: Record = Record {
    what: "`resources`",
    fields: &[
        field("cpu", Shape::Whole, "CPU cores."),
        field("memory", Shape::Size, "Memory."),
        field("gpu", Shape::Whole, "Whole GPUs."),
    ],
};

static TOOLCHAIN: Record = Record {
    what: "`toolchain`",
    fields: &[
        field("python", WRITTEN_WORDS, "Python distributions whose versions count."),
        field("python_if_installed", WRITTEN_WORDS, "Others whose versions count where they are installed."),
    ],
};

static BY_ROW: Record = Record {
    what: "`by_row`",
    fields: &[
        required("port", Shape::Written, "The input whose rows are independent."),
        field("window", Shape::Whole, "Rows that one program may have unanswered."),
        field("window_per_core", Shape::Whole, "The same for each core of the program, where that is more."),
        field("workers", Shape::Whole, "Programs side by side; 0: as resources allow."),
        field("row_timeout_s", Shape::Number, "Seconds that one row may take."),
    ],
};

const WRITTEN_WORDS: Shape = Shape::List(&Shape::Written);

/// A stage kind's `stage.yaml`. Texts are [`Shape::Written`], which is how serde reads a `String` from YAML.
pub(crate) static MANIFEST: Record = Record {
    what: "a manifest",
    fields: &[
        required("name", Shape::Written, "`group/name`."),
        required("version", Shape::Written, "Semantic version."),
        required("summary", Shape::Written, "One sentence."),
        field("inputs", Shape::Map(&Shape::Record(&INPUT_PORT)), "Input ports."),
        required("outputs", Shape::Map(&Shape::Record(&OUTPUT_PORT)), "Output ports."),
        field("params", Shape::Map(&Shape::Record(&PARAM)), "Parameters."),
        field("resources", Shape::Record(&KIND_RESOURCES), "What one program needs."),
        field("env", WRITTEN_WORDS, "Environment variables that the program sees and that count in its key."),
        field("toolchain", Shape::Record(&TOOLCHAIN), "Versions that count in the key."),
        field("determinism", Shape::Choice(&["exact", "measured", "sampled"]), "How far two runs of a key agree."),
        field("by_row", Shape::Record(&BY_ROW), "Set where rows are independent."),
        field("checkpoints", Shape::Boolean, "Whether another machine can go on from checkpoints of the same work."),
        required("run", WRITTEN_WORDS, "The command."),
        field("sources", WRITTEN_WORDS, "Files that make up the program."),
        field(
            "device_sources",
            Shape::Record(&DEVICE_SOURCES),
            "Files that change results on one kind of device alone.",
        ),
        field("device_versions", Shape::Record(&DEVICE_VERSIONS), "Versions of built-in kinds on a kind of device."),
    ],
};

static DEVICE_SOURCES: Record = Record {
    what: "`device_sources`",
    fields: &[
        field("cpu", WRITTEN_WORDS, "Files that count for stages without GPUs alone."),
        field("gpu", WRITTEN_WORDS, "Files that count for stages with GPUs alone."),
    ],
};

static DEVICE_VERSIONS: Record = Record {
    what: "`device_versions`",
    fields: &[
        field("cpu", Shape::Written, "The version of results without GPUs."),
        field("gpu", Shape::Written, "The version of results on GPUs."),
    ],
};

impl Shape {
    /// What is expected, for messages.
    pub fn expected(&self) -> String {
        match self {
            Self::Text => "text".to_owned(),
            Self::Written => "text or a number".to_owned(),
            Self::Any(what) => (*what).to_owned(),
            Self::Boolean => "true or false".to_owned(),
            Self::Whole => "a whole number".to_owned(),
            Self::Number => "a number".to_owned(),
            Self::Size => "a size such as 4GiB".to_owned(),
            Self::Column => "a column type such as `utf8`".to_owned(),
            Self::Choice(choices) => format!("one of {}", choices.join(", ")),
            Self::List(_) => "a list".to_owned(),
            Self::Map(_) | Self::Record(_) => "a mapping".to_owned(),
            Self::Either(shapes) => {
                let mut expected: Vec<String> = shapes.iter().map(Shape::expected).collect();
                let last = expected.pop().unwrap_or_default();
                format!("{} or {last}", expected.join(", "))
            }
        }
    }
}
