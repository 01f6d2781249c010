//! Tests of whole files: what a good one becomes, and how each mistake is told.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cuda_agent_protocol::manifest::Resources;
use cuda_agent_protocol::{Manifest, PortType};
use serde_json::json;

use super::*;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/spec")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The kinds of `tests/fixtures/spec/kinds`.
pub(super) struct Kinds(BTreeMap<String, Arc<Manifest>>);

impl Kinds {
    pub(super) fn new() -> Self {
        let mut kinds = BTreeMap::new();
        for name in ["crawl", "synthesize", "measure", "filter", "merge"] {
            let path = fixtures().join(format!("kinds/{name}.yaml"));
            let kind = parse_manifest(&read(&path), Path::new("stage.yaml")).unwrap();
            kinds.insert(kind.name.clone(), Arc::new(kind));
        }
        Self(kinds)
    }
}

impl Catalog for Kinds {
    fn get(&self, name: &str) -> Option<Arc<Manifest>> {
        self.0.get(name).cloned()
    }

    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

fn load(path: &Path) -> io::Result<String> {
    std::fs::read_to_string(path).map_err(|error| io::Error::new(error.kind(), error.kind().to_string()))
}

fn parse_file(folder: &str, name: &str, overrides: &[(&str, &str)]) -> Result<Pipeline, SpecErrors> {
    let folder_path = fixtures().join(folder);
    let text = read(&folder_path.join(name));
    let shown = Path::new("pipelines").join(name);
    let overrides: Vec<(String, String)> =
        overrides.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    parse_pipeline(&text, &shown, &folder_path, &Kinds::new(), &overrides, &load)
}

pub(super) fn parse(text: &str) -> Result<Pipeline, SpecErrors> {
    parse_pipeline(text, Path::new("x.yaml"), Path::new("folder"), &Kinds::new(), &[], &load)
}

/// Checks a snapshot whose name doesn't depend on the module.
fn check(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.set_snapshot_path(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/spec/snapshots"));
    settings.bind(|| insta::assert_snapshot!(name, text));
}

#[test]
fn every_mistake_is_told_with_place_and_hint() {
    let mut names: Vec<String> = std::fs::read_dir(fixtures().join("pipelines"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with("included_"))
        .collect();
    names.sort();
    assert!(names.len() > 20);
    for name in names {
        let errors = parse_file("pipelines", &name, &[]).expect_err(&name);
        check(&format!("pipeline_{}", name.trim_end_matches(".yaml")), &errors.render(false));
    }
}

#[test]
fn mistakes_of_manifests_are_told() {
    for name in ["wrong", "by_row", "by_row_limits", "continues"] {
        let text = read(&fixtures().join(format!("manifests/{name}.yaml")));
        let errors = parse_manifest(&text, Path::new("stages/filter/stage.yaml")).unwrap_err();
        check(&format!("manifest_{name}"), &errors.render(false));
    }
}

#[test]
fn projects_are_read() {
    let project = |name: &str| {
        let text = read(&fixtures().join(format!("projects/{name}.yaml")));
        parse_project(&text, Path::new("cuda-agent.yaml"))
    };
    let good = project("good").unwrap();
    assert_eq!(good.store.as_deref(), Some("s3://bucket/folder"));
    assert_eq!(good.endpoint.as_deref(), Some("https://minio.example:9000"));
    assert_eq!(good.region.as_deref(), Some("eu-central-1"));
    assert!(good.single_writer);
    assert_eq!(good.local_max, Some(100_000_000_000));
    assert_eq!(good.stages, [PathBuf::from("stages")]);
    assert_eq!(project("local").unwrap().local_max, Some(1 << 30));
    assert_eq!(parse_project("", Path::new("cuda-agent.yaml")).unwrap(), Project::default());
    for name in ["wrong", "wrong_remote", "wrong_store"] {
        check(&format!("project_{name}"), &project(name).unwrap_err().render(false));
    }
}

#[test]
fn mistakes_on_the_command_line_are_told() {
    let overrides = [
        ("sed", "1"),
        ("tasks", "many"),
        ("seed", "{"),
        ("composed.max_ops", "12"),
        ("composed.cont", "1"),
        ("compsed.count", "1"),
        ("kept.anything", "1"),
    ];
    let errors = parse_file("good", "quickstart.yaml", &overrides).unwrap_err();
    check("command_line", &errors.render(false));
}

#[test]
fn stages_may_all_come_from_included_files() {
    let include = |_: &Path| Ok("stages: { a: { uses: run, run: x } }".to_owned());
    let parse = |text: &str| parse_pipeline(text, Path::new("x.yaml"), Path::new(""), &Kinds::new(), &[], &include);
    assert_eq!(parse("name: x\ninclude: [a.yaml]\n").unwrap().stages.len(), 1);
    let errors = parse("name: x\ninclude: [a.yaml]\nparms: {}\n").unwrap_err().errors;
    let messages: Vec<&str> = errors.iter().map(|error| error.message.as_str()).collect();
    assert_eq!(messages, ["unknown field `parms` in a pipeline"]);
}

#[test]
fn errors_serialise_for_programs() {
    let errors = parse("name: x\nstages:\n  a: { uses: ops/crwal }\n").unwrap_err();
    let error = json!({
        "file": "x.yaml", "line": 3, "column": 14, "end_line": 3, "end_column": 23,
        "message": "unknown stage kind `ops/crwal`", "hint": "did you mean `ops/crawl`?",
    });
    assert_eq!(serde_json::to_value(&errors).unwrap(), json!([error]));
}

#[test]
fn colours_are_only_used_when_asked_for() {
    let errors = parse("name: x\nstages: 3\n").unwrap_err();
    assert!(!errors.render(false).contains('\u{1b}'));
    assert!(errors.render(true).contains('\u{1b}'));
}

#[test]
fn the_quickstart_resolves() {
    let pipeline = parse_file("good", "quickstart.yaml", &[]).unwrap();
    let names: Vec<&str> = pipeline.stages.iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(names, ["seeds", "composed", "measured", "kept"]);
    let composed = &pipeline.stages[1];
    let params = BTreeMap::from([
        ("count".to_owned(), json!(64)),
        ("max_ops".to_owned(), json!(5)),
        ("seed".to_owned(), json!(7)),
        ("share".to_owned(), json!(0.5)),
        ("style".to_owned(), json!("stack")),
    ]);
    assert_eq!(composed.params, params);
    assert_eq!(composed.inputs["operators"], [Source::Stage { stage: 0, output: "operators".to_owned() }]);
    assert_eq!(composed.location.to_string(), "pipelines/quickstart.yaml:5:3");
    let measured = &pipeline.stages[2];
    assert_eq!((measured.resources.cpu, measured.resources.gpu, measured.resources.memory), (4, 1, 4 << 30));
    assert_eq!(measured.timeout, Some(std::time::Duration::from_secs(7200)));
    assert_eq!(measured.retry.attempts, 1);
}

#[test]
fn all_of_a_machines_cores_can_be_asked_for() {
    let text = "name: x\nparams: { cores: all }\nstages:\n  a: { uses: run, run: 'true', outputs: { o: { type: tree } }, resources: { cpu: all } }\n  \
                b: { uses: run, run: 'true', outputs: { o: { type: tree } }, resources: { cpu: \"${params.cores}\", gpu: 1 } }\n";
    let pipeline = parse(text).unwrap();
    assert!(pipeline.stages.iter().all(|stage| stage.resources.cpu == Resources::ALL_CORES));
    assert_eq!(pipeline.stages[1].resources.clone().on(32, 2).cpu, 16);
}

#[test]
fn everything_resolves() {
    let pipeline = parse_file("good", "everything.yaml", &[]).unwrap();
    let by_name = |name: &str| pipeline.stages.iter().find(|stage| stage.name == name).unwrap();
    let index = |name: &str| pipeline.stages.iter().position(|stage| stage.name == name).unwrap();
    let names: Vec<&str> = pipeline.stages.iter().map(|stage| stage.name.as_str()).collect();
    let cells = [
        "compose[count=1,style=stack]",
        "compose[count=1,style=tree]",
        "compose[count=2,style=stack]",
        "compose[count=2,style=tree]",
    ];
    let expected = [&["crawl"], &cells[..], &["all", "some", "fast", "command", "words", "included"]].concat();
    assert_eq!(names, expected);
    assert_eq!(by_name(cells[3]).params["count"], json!(2));
    assert_eq!(by_name(cells[3]).tags, ["compose", "size-2"]);
    let wire = |name: &str, output: &str| Source::Stage { stage: index(name), output: output.to_owned() };
    assert_eq!(by_name("all").inputs["tables"], cells.map(|cell| wire(cell, "tasks")));
    assert_eq!(
        by_name("some").inputs["tables"],
        [wire(cells[1], "tasks"), wire(cells[2], "tasks"), wire("all", "table")]
    );
    assert_eq!(by_name("fast").resources.gpu, 2);
    let command = by_name("command");
    let Some(Command::Shell(text)) = &command.command else { panic!("no shell") };
    assert_eq!(text, "echo hello $HOME ${HOME} > $CUDA_AGENT_OUTPUTS/text\n");
    assert_eq!(command.env["VERSION"], "1.10");
    assert_eq!(command.env["GREETING"], "hello!");
    let port = |name: &str| (command.kind.inputs[name].port_type, command.kind.inputs[name].list);
    assert_eq!(port("all"), (PortType::Table, false));
    assert_eq!(port("page"), (PortType::Table, false));
    assert_eq!(port("folder"), (PortType::Tree, false));
    assert_eq!(port("every"), (PortType::Table, true));
    assert_eq!(command.kind.sources, ["scripts/make.sh"]);
    assert_eq!(command.inputs["folder"], [Source::Path(fixtures().join("good/data/raw"))]);
    assert_eq!(pipeline.secrets["KEY"], SecretSource::File(fixtures().join("good/secrets/key")));
    assert_eq!(by_name("words").command, Some(Command::Words(["cp", "-r", "hello", "7"].map(str::to_owned).to_vec())));
    assert_eq!(by_name("words").inputs["extra"], [wire("included", "out")]);
    assert_eq!(by_name("included").location.to_string(), "pipelines/shared.yaml:3:3");
    let Some(Command::Shell(text)) = &by_name("included").command else { panic!("no shell") };
    assert_eq!(text, "echo hello world > outputs/out");
}

#[test]
fn overrides_replace_parameters() {
    let overrides = [("tasks", "8"), ("composed.style", "tree"), ("composed.seed", "3")];
    let pipeline = parse_file("good", "quickstart.yaml", &overrides).unwrap();
    assert_eq!(pipeline.params["tasks"], json!(8));
    let composed = &pipeline.stages[1];
    assert_eq!(
        (&composed.params["count"], &composed.params["style"], &composed.params["seed"]),
        (&json!(8), &json!("tree"), &json!(3))
    );
}

#[test]
fn cores_that_are_all_by_default_can_be_a_number() {
    let text = "name: x\nparams: { cores: all }\nstages:\n  a: { uses: run, run: 'true', outputs: { o: { type: tree } }, \
                resources: { cpu: \"${params.cores}\" } }\n";
    let parse = |value: &str| {
        let overrides = [("cores".to_owned(), value.to_owned())];
        parse_pipeline(text, Path::new("x.yaml"), Path::new(""), &Kinds::new(), &overrides, &load)
    };
    assert_eq!(parse("32").unwrap().stages[0].resources.cpu, 32);
    assert_eq!(parse("all").unwrap().stages[0].resources.cpu, Resources::ALL_CORES);
    for wrong in ["0", "-1", "some", "1.5"] {
        let message = parse(wrong).unwrap_err().to_string();
        assert!(message.contains("`cpu` must be a whole number from 1, or `all`"), "{message}");
    }
}

#[test]
fn text_parameters_take_any_override_as_text() {
    let text = "name: x\nparams: { a: text }\nstages: { s: { uses: run, run: \"echo ${params.a}\" } }\n";
    for (value, expected) in [("5", "5"), ("1.10", "1.10"), ("'5'", "5"), ("[", "["), ("a=b", "a=b")] {
        let overrides = [("a".to_owned(), value.to_owned())];
        let pipeline =
            parse_pipeline(text, Path::new("x.yaml"), Path::new(""), &Kinds::new(), &overrides, &load).unwrap();
        assert_eq!(pipeline.params["a"], json!(expected), "{value}");
    }
}

#[test]
fn when_leaves_stages_out_and_wires_still_fit() {
    let text = "
name: x
params: { on: true, mode: fast, n: 1 }
stages:
  off: { uses: ops/crawl, when: '${params.mode} != fast' }
  a: { uses: ops/crawl, when: '${params.on}' }
  b: { uses: ops/merge, when: '${params.n} == 1.0', inputs: { tables: a.operators } }
  c:
    uses: run
    run: c
    matrix: { k: [1, 2] }
    when: '${matrix.k} == 2'
    outputs: { t: table }
  d: { uses: ops/merge, inputs: { tables: ['c[*].t', b.table] } }
  e: { uses: ops/synthesize, inputs: { operators: a.operators, taken: late.tasks }, with: { count: 1 } }
  late: { uses: ops/synthesize, when: false, inputs: { operators: a.operators }, with: { count: 1 } }
";
    let pipeline = parse(text).unwrap();
    let names: Vec<&str> = pipeline.stages.iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c[k=2]", "d", "e"]);
    let wire = |stage, output: &str| Source::Stage { stage, output: output.to_owned() };
    assert_eq!(pipeline.stages[3].inputs["tables"], [wire(2, "t"), wire(1, "table")]);
    assert!(!pipeline.stages[4].inputs.contains_key("taken"));
}

#[test]
fn comments_and_the_order_of_keys_change_nothing() {
    let one =
        parse("name: x\nparams: {a: 1, b: 2}\nstages:\n  s: {uses: ops/crawl, tags: [t], env: {A: b}}\n").unwrap();
    let other = parse(
        "# hello\nparams: {b: 2, a: 1}\nstages:\n  s:\n    env: {A: b} # there\n    tags:\n    - t\n    uses: \"ops/crawl\"\nname: x\n",
    )
    .unwrap();
    let without_places = |mut pipeline: Pipeline| {
        pipeline.stages.iter_mut().for_each(|stage| stage.location = Location::unknown());
        format!("{pipeline:?}")
    };
    assert_eq!(without_places(one), without_places(other));
}

#[test]
fn the_schema_of_a_small_catalog() {
    struct Small(Kinds);
    impl Catalog for Small {
        fn get(&self, name: &str) -> Option<Arc<Manifest>> {
            self.0.get(name)
        }
        fn names(&self) -> Vec<String> {
            vec!["ops/synthesize".to_owned()]
        }
    }
    let schema = schema(&Small(Kinds::new()));
    check("schema", &serde_json::to_string_pretty(&schema).unwrap());
}

#[test]
fn many_errors_are_counted() {
    let mut text = "name: x\nstages:\n".to_owned();
    for number in 0..150 {
        text.push_str(&format!("  s{number}: {{ uses: ops/crwal }}\n"));
    }
    let errors = parse(&text).unwrap_err();
    assert_eq!(errors.errors.len(), 150);
    assert!(errors.render(false).ends_with("100 of 150 errors are shown\n"));
}

#[test]
fn positions_count_characters_behind_a_byte_order_mark_too() {
    let errors = parse("\u{feff}name: x\nstages:\n  a: { tags: [ü], uses: ops/crwal }\n").unwrap_err();
    assert_eq!((errors.errors[0].line, errors.errors[0].column), (3, 25), "{errors}");
}

#[test]
fn windows_line_ends_change_nothing() {
    let text = "name: x\r\nstages:\r\n  a:\r\n    uses: ops/crwal\r\n";
    let errors = parse(text).unwrap_err();
    assert_eq!((errors.errors[0].line, errors.errors[0].column, errors.errors[0].end_column), (4, 11, 20));
    assert_eq!(parse(&text.replace("crwal", "crawl")).unwrap().stages.len(), 1);
}

#[test]
fn one_mistake_in_ten_thousand_stages_is_one_error() {
    let mut text = "name: x\nstages:\n".to_owned();
    for number in 0..10_000 {
        text.push_str(&format!("  s{number}: {{ uses: run, run: x, outputs: {{ out: tree }}"));
        if number > 0 {
            text.push_str(&format!(", inputs: {{ before: s{}.out }}", number - 1));
        }
        text.push_str(" }\n");
    }
    assert_eq!(parse(&text).unwrap().stages.len(), 10_000);
    let errors = parse(&text.replace("s5000: { uses: run", "s5000: { use: run")).unwrap_err();
    assert_eq!(errors.errors.len(), 1, "{errors}");
}

#[test]
fn aliases_of_aliases_are_no_bomb() {
    let mut text = "name: x\nparams:\n  a0: &a0 [1, 1]\n".to_owned();
    for level in 1..40 {
        text.push_str(&format!("  a{level}: &a{level} [*a{0}, *a{0}]\n", level - 1));
    }
    text.push_str("stages: { s: { uses: ops/crawl } }\n");
    let errors = parse(&text).unwrap_err();
    assert!(errors.errors.iter().any(|error| error.message.contains("repeat")), "{errors}");
}

/// A long text has room for many aliases, each of which stands for many nodes.
#[test]
fn a_long_list_of_aliases_is_no_bomb() {
    let list = |name: &str, of: &str, times: usize| format!("  {name}: &{name} [{}]\n", vec![of; times].join(", "));
    let levels = [list("a", "x", 9), list("b", "*a", 9), list("c", "*b", 50_000), list("d", "*c", 9)].concat();
    let errors = parse(&format!("name: x\nparams:\n{levels}stages: {{ s: {{ uses: ops/crawl }} }}\n")).unwrap_err();
    assert!(errors.errors.iter().any(|error| error.message.contains("aliases repeat too much")), "{errors}");
}

/// Each list holds the one before: deeper than any stack, though no line nests.
#[test]
fn a_chain_of_aliases_is_as_deep_as_what_it_stands_for() {
    let chain: String = (1..50_000).map(|level| format!("  a{level}: &a{level} [*a{}]\n", level - 1)).collect();
    let text = format!("name: x\nparams:\n  a0: &a0 [1]\n{chain}stages: {{ s: {{ uses: ops/crawl }} }}\n");
    let errors = parse(&text).unwrap_err();
    assert!(errors.errors.iter().any(|error| error.message.contains("nested more than 128 levels")), "{errors}");
}
