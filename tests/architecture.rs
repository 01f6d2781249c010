//! The arrows of ARCHITECTURE.md, held by a test.

use std::path::{Path, PathBuf};

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

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files below `folder` that contain one of `words`, outside comments and modules of tests.
fn mentions(folder: &str, words: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in sources(&root().join(folder)) {
        if path.file_name().is_some_and(|name| name == "tests.rs") {
            continue;
        }
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for (word, line) in code.flat_map(|line| words.iter().map(move |word| (word, line))) {
            if line.contains(word) {
                found.push(format!("{}: {}", path.strip_prefix(root()).unwrap().display(), line.trim()));
            }
        }
    }
    found
}

const STAGE_CRATES: [&str; 5] =
    ["cuda_agent_builtin", "cuda_agent_ops", "cuda_agent_kernels", "cuda_agent_agent", "cuda_agent_train"];

/// The engine knows no stage crate; the binary alone links them.
#[test]
fn the_engine_names_no_stage_crate() {
    let mut found = mentions("src", &STAGE_CRATES);
    found.retain(|place| !place.starts_with("src/main.rs"));
    assert!(found.is_empty(), "{found:#?}");
}

/// Stages know the protocol, and no graph.
#[test]
fn stages_do_not_know_the_engine() {
    let found = mentions("stages", &["use cuda_agent::", "cuda_agent::"]);
    assert!(found.is_empty(), "{found:#?}");
}

/// A crate below `stages/` names the ones that are listed beside it, and no other of this workspace.
#[test]
fn stage_crates_look_one_way() {
    let arrows: [(&str, &[&str]); 6] = [
        ("protocol", &[]),
        ("builtin", &[]),
        ("ops", &["builtin", "protocol"]),
        ("kernels", &["builtin", "protocol"]),
        ("agent", &["builtin", "kernels", "protocol"]),
        ("train", &["agent", "builtin", "kernels", "protocol"]),
    ];
    for folder in folders_of_crates() {
        let arrow = arrows.iter().find(|(name, _)| *name == folder);
        let (_, allowed) = arrow.unwrap_or_else(|| panic!("stages/{folder}: no arrow is written down for it"));
        let others = arrows.iter().map(|(name, _)| *name).filter(|name| *name != folder && !allowed.contains(name));
        let forbidden: Vec<String> = others.map(|name| format!("cuda_agent_{name}::")).collect();
        let words: Vec<&str> = forbidden.iter().map(String::as_str).collect();
        let found = mentions(&format!("stages/{folder}"), &words);
        assert!(found.is_empty(), "stages/{folder} may use {allowed:?} only: {found:#?}");
    }
}

fn folders_of_crates() -> Vec<String> {
    let folders = std::fs::read_dir(root().join("stages")).unwrap().map(|item| item.unwrap().path());
    let crates = folders.filter(|path| path.join("Cargo.toml").is_file());
    crates.map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
}

/// serde_yaml is unmaintained (and sound): nothing but `spec` may come to lean on it.
#[test]
fn serde_yaml_stays_behind_spec() {
    let mut found = mentions("src", &["serde_yaml"]);
    found.retain(|place| !place.starts_with("src/spec/"));
    assert!(found.is_empty(), "{found:#?}");
}

/// Data flows one way: what decides does not reach for what does.
#[test]
fn modules_look_one_way() {
    let arrows: [(&str, &[&str]); 7] = [
        ("src/spec", &["crate::plan", "crate::execute", "crate::store", "crate::cli", "std::fs"]),
        ("src/key", &["crate::plan", "crate::execute", "crate::store", "crate::cli", "std::fs"]),
        ("src/artifact", &["crate::plan", "crate::execute", "crate::store", "crate::cli"]),
        ("src/store", &["crate::plan", "crate::execute", "crate::cli", "crate::spec"]),
        ("src/rows", &["crate::plan", "crate::execute", "crate::cli", "crate::spec"]),
        ("src/plan", &["crate::execute", "crate::cli", "crate::schedule"]),
        ("src/execute", &["crate::cli"]),
    ];
    for (module, forbidden) in arrows {
        let found = mentions(module, forbidden);
        assert!(found.is_empty(), "{module} must not use {forbidden:?}: {found:#?}");
    }
    let schedule = std::fs::read_to_string(root().join("src/schedule.rs")).unwrap();
    for word in ["tokio", "std::fs", "async ", "crate::"] {
        assert!(!schedule.contains(word), "the scheduler is pure, so it has no `{word}`");
    }
}
