//! What README.md, docs/pipelines.md, docs/share.md and docs/kernels.md show is true: their files are written, and the
//! commands of the reference and the guides are run.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::support::s3::S3Server;
use crate::support::{Sandbox, repository, share_bytecode};

/// A fenced block of a document.
struct Block {
    language: String,
    text: String,
    line: usize,
}

impl Block {
    /// The path that the first line names as a comment.
    fn name(&self) -> Option<&str> {
        let first = self.text.lines().next()?;
        let name = first.strip_prefix("# ").or(first.strip_prefix("// "))?;
        (name.contains('.') && !name.contains(' ')).then_some(name)
    }

    fn is_pipeline(&self) -> bool {
        let has = |key: &str| self.text.lines().any(|line| line.starts_with(key));
        self.language == "yaml" && has("name:") && has("stages:")
    }

    /// An indented fragment, which goes on with the pipeline before it.
    fn is_fragment(&self) -> bool {
        self.language == "yaml" && self.text.starts_with("  ")
    }
}

fn document(name: &str) -> String {
    std::fs::read_to_string(repository().join(name)).unwrap()
}

fn blocks(text: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut open = false;
    for (index, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), open) {
            (Some(_), true) => open = false,
            (Some(language), false) => {
                open = true;
                blocks.push(Block { language: language.to_owned(), text: String::new(), line: index + 1 });
            }
            (None, true) => {
                let block = blocks.last_mut().unwrap();
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, false) => {}
        }
    }
    assert!(!open, "a block has no end");
    blocks
}

/// Every Python package whose version a built-in kind asks for.
fn built_in_packages() -> BTreeSet<String> {
    let folder = repository().join("stages/ops");
    let manifests = std::fs::read_dir(folder).unwrap().map(|item| item.unwrap().path().join("stage.yaml"));
    let manifests = manifests.filter(|path| path.is_file()).map(|path| {
        let text = std::fs::read_to_string(&path).unwrap();
        cuda_agent_engine::spec::parse_manifest(&text, &path)
            .unwrap_or_else(|errors| panic!("{}", errors.render(false)))
    });
    manifests.flat_map(|manifest| manifest.toolchain.python.unwrap_or_default()).collect()
}

/// A folder with the files that the documents take for granted, and an interpreter that claims to have what the built-in
/// kinds need: planning asks for versions and starts nothing.
fn sandbox(with_packages: bool) -> Sandbox {
    let mut sandbox = Sandbox::new();
    sandbox.write("data/cities.csv", include_str!("fixtures/docs/data/cities.csv"));
    sandbox.write("data/key", "secret_of_file\n");
    sandbox.write("scripts/report.py", include_str!("fixtures/docs/scripts/report.py"));
    if with_packages {
        use std::os::unix::fs::PermissionsExt;
        let packages = json!(built_in_packages().iter().map(|name| (name.as_str(), "1.0.0")).collect::<Vec<_>>());
        let versions = json!(["3.12.0", [], packages]);
        sandbox.write("python", &format!("#!/bin/sh\necho '{versions}'\n"));
        let python = sandbox.path("python");
        std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
        sandbox.variables.push(("CUDA_AGENT_PYTHON".into(), python.display().to_string()));
    }
    sandbox
}

/// Runs a line of a console block; standard error, then standard output.
fn shell(sandbox: &Sandbox, line: &str, place: &str) -> String {
    let binary = Path::new(env!("CARGO_BIN_EXE_cuda-agent"));
    let path = format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("/bin/sh");
    command.args(["-c", line]).current_dir(sandbox.folder.path()).env("PATH", path).env("NO_COLOR", "1");
    share_bytecode(&mut command);
    command.env_remove("CUDA_AGENT_PYTHON").env_remove("VIRTUAL_ENV").envs(sandbox.variables.iter().cloned());
    let output = command.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{place}: `{line}`: {}\n{text}", output.status);
    text
}

/// Whether a line is as the document shows it: `…` stands for anything, and runs of spaces for one.
fn fits(shown: &str, real: &str) -> bool {
    let squeeze = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (shown, real) = (squeeze(shown), squeeze(real));
    let pieces: Vec<&str> = shown.split('…').collect();
    let [first, middle @ .., last] = pieces.as_slice() else { return shown == real };
    let Some(mut rest) = real.strip_prefix(first) else { return false };
    for piece in middle {
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}

/// The command of a line, and the folder that stands before its `$`.
fn command(line: &str) -> Option<(&str, &str)> {
    let (folder, command) = line.split_once("$ ")?;
    folder.chars().all(|c| c.is_ascii_alphabetic()).then_some((if folder.is_empty() { "." } else { folder }, command))
}

/// Runs the commands of a console block. What it shows must be among the output, in order.
fn console(sandbox: &Sandbox, block: &Block, place: &str) {
    let (mut output, mut exports) = (String::new(), String::new());
    let mut from = 0;
    for line in block.text.lines() {
        if let Some((folder, command)) = command(line) {
            if command.starts_with("export ") {
                exports.push_str(&format!("{command}; "));
                continue;
            }
            (output, from) = (shell(sandbox, &format!("{exports}cd {folder} && {command}"), place), 0);
            continue;
        }
        let found = output.lines().skip(from).position(|real| fits(line, real));
        from += 1 + found.unwrap_or_else(|| panic!("{place}: no line `{line}` (or not in this order) in\n{output}"));
    }
}

#[test]
fn the_reference_is_true() {
    let sandbox = sandbox(false);
    let cities = include_str!("fixtures/docs/data/cities.csv");
    let data = format!("file://{}", sandbox.path("data").display());
    let digest = cuda_agent_engine::digest::Digest::of_bytes(cities.as_bytes()).to_string();
    let text = document("docs/pipelines.md").replace("file:///mnt/data", &data);
    assert!(text.contains(&digest), "the example of `url:` wants the digest {digest}");
    let blocks = blocks(&text);
    for block in &blocks {
        let place = format!("docs/pipelines.md:{}", block.line);
        let name = block.name();
        match block.language.as_str() {
            "console" => {}
            "yaml" | "sh" | "python" => {
                sandbox.write(name.unwrap_or_else(|| panic!("{place}: no name")), &block.text);
            }
            other => panic!("{place}: nobody tests a block of `{other}`"),
        }
    }
    for block in blocks.iter().filter(|block| block.language == "console") {
        console(&sandbox, block, &format!("docs/pipelines.md:{}", block.line));
    }
    let pipelines: Vec<&Block> = blocks.iter().filter(|block| block.is_pipeline()).collect();
    assert!(pipelines.len() >= 12, "blocks are found: {}", pipelines.len());
    for block in pipelines {
        let name = block.name().unwrap();
        let shown = ["run", "plan"].map(|command| text.contains(&format!("cuda-agent {command} {name}")));
        assert!(shown.contains(&true) || name.starts_with("project/"), "no command of the document uses {name}");
        sandbox.good(&["plan", name]);
    }
}

/// The part of the guide that takes place on one machine, and gc; what is between them needs a bucket of a cloud.
#[test]
fn the_guide_to_sharing_is_true() {
    let bucket = S3Server::seaweed().bucket();
    let mut sandbox = sandbox(false);
    sandbox.variables.extend(bucket.env.iter().filter(|(name, _)| name.contains("KEY")).cloned());
    let text = document("docs/share.md").replace("http://127.0.0.1:8333", &bucket.endpoint);
    let text = text.replace("s3://team/", &format!("{}/", bucket.url));
    let line =
        |heading: &str| text.lines().position(|line| line == format!("## {heading}")).expect("the heading is there");
    let (project, real_bucket, cleaning) = (line("A project"), line("A real bucket"), line("Cleaning up"));
    let mut blocks = blocks(&text);
    blocks.retain(|block| (project..real_bucket).contains(&block.line) || block.line > cleaning);
    assert!(blocks.len() >= 10, "blocks are found: {}", blocks.len());
    for block in &blocks {
        let place = format!("docs/share.md:{}", block.line);
        match block.name() {
            Some(name) => {
                sandbox.write(name, &block.text);
            }
            None if block.language == "console" => console(&sandbox, block, &place),
            None => panic!("{place}: no name"),
        }
    }
}

/// An interpreter with torch: the one that is named, or the project's.
fn python_with_torch() -> PathBuf {
    let project = || repository().join(".venv/bin/python");
    std::env::var_os("CUDA_AGENT_PYTHON").map_or_else(project, PathBuf::from)
}

/// What judging a pipeline's kernels reads of the repository.
fn copy_corpus(sandbox: &Sandbox) {
    let root = repository();
    for name in ["pipelines/kernels.yaml", "stages/kernels/corpus/corpus.json"] {
        sandbox.write(name, &document(name));
    }
    for folder in ["tasks", "right", "wrong"] {
        let folder = format!("stages/kernels/corpus/{folder}");
        for file in std::fs::read_dir(root.join(&folder)).unwrap() {
            let name = format!("{folder}/{}", file.unwrap().file_name().to_string_lossy());
            sandbox.write(&name, &document(&name));
        }
    }
}

/// On the CPU device; a block of the language `text` shows what other machines print.
#[test]
fn the_guide_to_kernels_is_true() {
    let mut sandbox = sandbox(false);
    sandbox.variables.push(("CUDA_AGENT_PYTHON".into(), python_with_torch().display().to_string()));
    copy_corpus(&sandbox);
    let mut consoles = 0;
    for block in blocks(&document("docs/kernels.md")) {
        let place = format!("docs/kernels.md:{}", block.line);
        match (block.language.as_str(), block.name()) {
            ("python" | "cpp", Some(name)) => {
                sandbox.write(name, &block.text);
            }
            ("yaml", None) => {
                assert!(document("pipelines/kernels.yaml").contains(&block.text), "{place}: not in the file");
            }
            ("console", None) => {
                console(&sandbox, &block, &place);
                consoles += 1;
            }
            ("text", None) => {}
            (other, name) => panic!("{place}: nobody tests a block of `{other}` called {name:?}"),
        }
    }
    assert!(consoles >= 6, "blocks are found: {consoles}");
}

#[test]
fn the_pipelines_of_the_readme_can_be_planned() {
    let sandbox = sandbox(true);
    let mut whole = String::new();
    let mut planned = 0;
    for block in blocks(&document("README.md")) {
        if block.is_pipeline() {
            whole = block.text;
        } else if block.is_fragment() {
            whole.push_str(&block.text);
        } else {
            continue;
        }
        sandbox.write("readme.yaml", &whole);
        let plan = sandbox.good(&["plan", "readme.yaml"]);
        assert!(plan.contains("seeds") && plan.contains("never run"), "README.md:{}: {plan}", block.line);
        planned += 1;
    }
    assert_eq!(planned, 2, "the pipeline and the stage that is added to it");
}

/// Every pipeline that is shipped, down to its last stage. `base` is the model that some start from: any file or folder will do
/// for a plan.
#[test]
fn the_pipelines_can_be_planned() {
    let mut sandbox = sandbox(false);
    sandbox.variables.push(("CUDA_AGENT_PYTHON".into(), python_with_torch().display().to_string()));
    sandbox.write("base.gguf", "");
    let base = sandbox.path("base.gguf");
    let folder = repository().join("pipelines");
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder).unwrap().map(|item| item.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "yaml"));
    assert!(files.len() >= 9, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let model = format!("base={}", base.display());
        let mut words = vec!["plan", file.to_str().unwrap()];
        if text.contains("\n  base: model") {
            words.extend(["-p", &model]);
        }
        let plan = sandbox.good(&words);
        let counted = plan.lines().any(|line| line.ends_with(" pending, 0 up to date"));
        assert!(counted, "{}: {plan}", file.display());
    }
}

/// The command of the README's own stage, on a report as `ops/filter` writes it.
#[test]
fn the_command_in_the_readme_runs() {
    let sandbox = sandbox(false);
    let fragment = blocks(&document("README.md")).into_iter().find(Block::is_fragment).unwrap().text;
    let funnel = r#"{"in": {}, "kept": {}, "rules": [{"name": "eager_time", "rejected": 3}]}"#;
    sandbox.write("kept/funnel.json", funnel);
    let stage = fragment.replace("kept.report", "{ path: kept }");
    assert_ne!(stage, fragment);
    sandbox.write("readme.yaml", &format!("name: readme\nstages:\n{stage}"));
    sandbox.good(&["run", "readme.yaml"]);
    sandbox.good(&["export", "report", "out"]);
    assert_eq!(std::fs::read_to_string(sandbox.path("out/report")).unwrap(), "- eager_time: 3 rejected\n");
}

#[test]
fn lines_fit_as_they_are_shown() {
    assert!(fits("a  hit", "a hit") && fits("done in … s: 2", "done in 0.1 s: 2") && fits("…", "x"));
    assert!(!fits("done in … s: 2", "done in 0.1 s: 3") && !fits("a", "ab") && !fits("a…b", "a"));
}
