//! The arrows of ARCHITECTURE.md, held by a test.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::support::{module_graph, repository};

fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for item in std::fs::read_dir(folder).unwrap() {
        let path = item.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push((path.clone(), std::fs::read_to_string(&path).unwrap()));
        }
    }
    found
}

/// Files below `folder` that contain one of `words`, outside comments and modules of tests.
fn mentions(folder: &str, words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in sources(&repository().join(folder)) {
        if path.file_name().is_some_and(|name| name == "tests.rs") {
            continue;
        }
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for (word, line) in code.flat_map(|line| words.iter().map(move |word| (word, line))) {
            if line.contains(word) {
                found.push(format!("{}: {}", path.strip_prefix(repository()).unwrap().display(), line.trim()));
            }
        }
    }
    found
}

/// The packages of this workspace, and which of the others each one may name. Cargo holds these arrows: a crate that is no
/// dependency cannot be named. The test is for the manifests, so that an arrow is drawn here before it is made.
const ARROWS: [(&str, &[&str]); 11] = [
    ("cuda-agent-protocol", &[]),
    ("cuda-agent-engine", &["protocol"]),
    ("cuda-agent-cli", &["engine", "protocol"]),
    ("cuda-agent-builtin", &[]),
    ("cuda-agent-ops", &["builtin", "protocol"]),
    ("cuda-agent-sandbox", &[]),
    ("cuda-agent-emulator", &["sandbox"]),
    ("cuda-agent-kernels", &["builtin", "emulator", "protocol", "sandbox"]),
    ("cuda-agent-agent", &["builtin", "kernels", "protocol"]),
    ("cuda-agent-train", &["agent", "builtin", "kernels", "protocol"]),
    ("cuda-agent", &["agent", "builtin", "cli", "engine", "kernels", "ops", "protocol", "sandbox", "train"]),
];

#[derive(serde::Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(serde::Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(serde::Deserialize)]
struct Dependency {
    name: String,
    /// Set for a package of this workspace.
    path: Option<PathBuf>,
}

/// The engine knows no stage, no stage knows the engine, and the binary alone links both.
#[test]
fn packages_look_one_way() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = std::process::Command::new(cargo);
    command.args(["metadata", "--no-deps", "--offline", "--format-version=1"]).current_dir(repository());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Metadata = serde_json::from_slice(&output.stdout).unwrap();
    let found: BTreeMap<String, BTreeSet<String>> = metadata.packages.into_iter().map(arrows_of).collect();
    let full_name = |name: &&str| format!("cuda-agent-{name}");
    let drawn = ARROWS.map(|(package, others)| (package.to_owned(), others.iter().map(full_name).collect()));
    assert_eq!(
        found,
        BTreeMap::from(drawn),
        "left what the manifests say, right what is drawn in tests/architecture.rs"
    );
}

/// Which packages of this workspace a package depends on, in its tests and its build script too.
fn arrows_of(package: Package) -> (String, BTreeSet<String>) {
    let own = package.dependencies.into_iter().filter(|dependency| dependency.path.is_some());
    (package.name, own.map(|dependency| dependency.name).collect())
}

/// serde_yaml is unmaintained (and sound): nothing but `spec` may come to lean on it.
#[test]
fn serde_yaml_stays_behind_spec() {
    let mut found = mentions("src", &["serde_yaml"]);
    found.retain(|place| !place.starts_with("src/spec/"));
    assert!(found.is_empty(), "{found:#?}");
}

/// When a remote tier is asked is the store's business: nobody else holds one.
#[test]
fn the_remote_tier_stays_behind_the_store() {
    let mut found = mentions("src", &[".remote()"]);
    found.retain(|place| !place.starts_with("src/store/"));
    found.extend(mentions("cli", &[".remote()"]));
    assert!(found.is_empty(), "{found:#?}");
}

/// Data flows one way: what decides does not reach for what does.
#[test]
fn modules_look_one_way() {
    let arrows: [(&str, &[&str]); 6] = [
        ("src/spec", &["crate::plan", "crate::execute", "crate::store", "std::fs"]),
        ("src/key", &["crate::plan", "crate::execute", "crate::store", "std::fs"]),
        ("src/artifact", &["crate::plan", "crate::execute", "crate::store"]),
        ("src/store", &["crate::plan", "crate::execute", "crate::spec"]),
        ("src/rows", &["crate::plan", "crate::execute", "crate::spec"]),
        ("src/plan", &["crate::execute", "crate::schedule"]),
    ];
    for (module, forbidden) in arrows {
        let found = mentions(module, forbidden);
        assert!(found.is_empty(), "{module} must not use {forbidden:?}: {found:#?}");
    }
    let schedule = std::fs::read_to_string(repository().join("src/schedule.rs")).unwrap();
    for word in ["tokio", "std::fs", "async ", "crate::"] {
        assert!(!schedule.contains(word), "the scheduler is pure, so it has no `{word}`");
    }
}

/// Where modules still name each other in a circle: the folder, and which of them. Only ever shorten this list.
const CIRCLES: [(&str, &[&str]); 5] = [
    ("stages/kernels/src", &["compile", "program", "reference", "runner"]),
    ("stages/sandbox/src/child/walls", &["entry", "namespaces"]),
    ("stages/kernels/src/compile", &["headers", "toolkit"]),
    ("stages/kernels/src/runner/gpu", &["poison", "replay", "server"]),
    ("stages/ops/src/publish", &["card", "diversity", "funnel", "left_out"]),
];

/// In each folder of each crate, no file or folder names one that names it. `make graph` prints what this compares.
#[test]
fn modules_have_no_circles() {
    let mut found = BTreeMap::new();
    for sources in folders_of_sources() {
        println!("\n{sources}");
        for (folder, arrows) in module_graph::of(&repository().join(&sources)) {
            let place = Path::new(&sources).join(folder).display().to_string();
            let place = place.trim_end_matches('/').to_owned();
            arrows.iter().for_each(|(module, others)| println!("{}", arrows_text(&sources, &place, module, others)));
            found.extend(Some((place, module_graph::circles(&arrows))).filter(|(_, circle)| !circle.is_empty()));
        }
    }
    let known = |modules: &[&str]| modules.iter().map(|module| (*module).to_owned()).collect::<BTreeSet<_>>();
    let known = CIRCLES.map(|(place, modules)| (place.to_owned(), known(modules)));
    assert_eq!(found, BTreeMap::from(known), "left the circles that there are, right those in tests/architecture.rs");
}

fn arrows_text(sources: &str, place: &str, module: &str, others: &BTreeSet<String>) -> String {
    let folder = place.strip_prefix(sources).unwrap_or_default().trim_start_matches('/');
    let name = Path::new(folder).join(module);
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    format!("  {:<28} → {}", name.display(), others.join(", "))
}

/// The `src` of every crate, below the repository.
fn folders_of_sources() -> Vec<String> {
    let stages = std::fs::read_dir(repository().join("stages")).unwrap().map(|item| item.unwrap().path());
    let mut folders: Vec<String> = stages
        .filter(|path| path.join("Cargo.toml").is_file())
        .map(|path| format!("stages/{}/src", path.file_name().unwrap().to_string_lossy()))
        .collect();
    folders.sort();
    ["src", "cli/src", "app/src"].map(str::to_owned).into_iter().chain(folders).collect()
}
