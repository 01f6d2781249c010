//! Which modules of a crate name which others, read from its sources.
//!
//! Files and folders are compared with their siblings: in each folder, a file or a folder is one module, which names those
//! that any file in it names, in a `use` or in a path. A folder's own `mod.rs` is no sibling of the files beside it: it
//! lists them, and they may add to its types. Tests do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// For each folder (of modules), which of the modules in it name which others in it.
pub type Graph = BTreeMap<String, Arrows>;
/// Which modules name which others.
pub type Arrows = BTreeMap<String, BTreeSet<String>>;

type Module = Vec<String>;

/// The graph of the crate whose sources lie in `folder`.
pub fn of(folder: &Path) -> Graph {
    let mut sources = BTreeMap::new();
    read(folder, &[], &mut sources);
    let mut graph = Graph::new();
    for (module, text) in &sources {
        for path in paths(text) {
            let named = resolve(module, &path, &sources);
            let shared = module.iter().zip(&named).take_while(|(a, b)| a == b).count();
            if let (Some(from), Some(to)) = (module.get(shared), named.get(shared)) {
                let arrows = graph.entry(module[..shared].join("/")).or_default();
                arrows.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    graph
}

/// The modules of a folder that name each other in a circle, or lie on a way from one circle to another.
pub fn circles(arrows: &Arrows) -> BTreeSet<String> {
    let mut left: BTreeSet<String> = arrows.keys().cloned().collect();
    loop {
        let names_one = |module: &String| arrows[module].iter().any(|other| left.contains(other));
        let is_named = |module: &String| left.iter().any(|other| arrows[other].contains(module));
        let kept: BTreeSet<String> =
            left.iter().filter(|module| names_one(module) && is_named(module)).cloned().collect();
        if kept.len() == left.len() {
            return kept;
        }
        left = kept;
    }
}

fn read(folder: &Path, above: &[String], sources: &mut BTreeMap<Module, String>) {
    for item in std::fs::read_dir(folder).unwrap() {
        let path = item.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let below = [above, std::slice::from_ref(&name)].concat();
        if path.is_dir() {
            read(&path, &below, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") && !is_test(&name) {
            let module = if ["mod", "lib", "main"].contains(&name.as_str()) { above.to_vec() } else { below };
            sources.insert(module, code(&std::fs::read_to_string(&path).unwrap()));
        }
    }
}

fn is_test(name: &str) -> bool {
    name == "tests" || name.ends_with("_test")
}

/// A file without comments and tests.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// The paths that a file names, those of `use` in full.
fn paths(text: &str) -> Vec<String> {
    let uses = text.split('\n').scan(0, |at, line| {
        let start = *at;
        *at += line.len() + 1;
        Some((start, line.trim_start()))
    });
    let mut found = Vec::new();
    for (start, line) in uses {
        let is_use = line.starts_with("use ") || (line.starts_with("pub") && line.contains(" use "));
        if let Some((_, tree)) = text[start..].split_once("use ").filter(|_| is_use) {
            expand(tree.split(';').next().unwrap_or_default(), &mut found);
        }
    }
    for start in ["crate::", "super::"] {
        for (at, _) in text.match_indices(start) {
            let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
            // A `super::super::x` is found by its first word.
            if !text[..at].ends_with(is_path) {
                found.push(text[at..].split(|c| !is_path(c)).next().unwrap_or_default().to_owned());
            }
        }
    }
    found
}

/// `a::{b, c::{d, e}}` is `a::b`, `a::c::d`, `a::c::e`.
fn expand(tree: &str, found: &mut Vec<String>) {
    let Some((head, body)) = tree.split_once('{') else {
        found.push(tree.split(" as ").next().unwrap_or_default().trim().to_owned());
        return;
    };
    let body = body.rsplit_once('}').map_or(body, |(body, _)| body);
    let (mut depth, mut start) = (0, 0);
    for (at, c) in body.char_indices().chain([(body.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = body[start..at].trim();
                if !part.is_empty() {
                    expand(&format!("{}{part}", head.trim()), found);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// The module that a path leads to, as far as it names modules of this crate; the crate itself for others.
fn resolve(module: &[String], path: &str, sources: &BTreeMap<Module, String>) -> Module {
    let mut words: Vec<&str> = path.split("::").map(str::trim).collect();
    let mut named = module.to_vec();
    match words[0] {
        "crate" => named.clear(),
        "super" | "self" => {}
        _ if sources.contains_key(&[module, &[words[0].to_owned()]].concat()) => {}
        _ => return Vec::new(),
    }
    while let Some(("crate" | "self" | "super", rest)) = words.split_first().map(|(first, rest)| (*first, rest)) {
        if words[0] == "super" {
            named.pop();
        }
        words = rest.to_vec();
    }
    for word in words {
        named.push(word.to_owned());
        if !sources.contains_key(&named) {
            named.pop();
            break;
        }
    }
    named
}

#[test]
fn circles_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("lib.rs", "mod a; mod b; mod c; mod d;");
    write("a.rs", "use crate::{b::{self, X},\n    c};\n#[cfg(test)]\nmod tests { use crate::d; }");
    write("b/mod.rs", "mod one;\nmod two;\nuse one::X;\n// crate::d\n");
    write("b/one.rs", "use super::two::Y;");
    write("b/two.rs", "fn f() { super::super::c::g(super::one::X) }");
    write("c.rs", "pub(crate) use crate::d::Z as W;");
    write("d.rs", "");
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let graph = of(folder.path());
    let expected = [("a", set(&["b", "c"])), ("b", set(&["c"])), ("c", set(&["d"]))];
    assert_eq!(graph[""], expected.map(|(from, to)| (from.to_owned(), to)).into());
    assert_eq!((circles(&graph[""]), circles(&graph["b"])), (set(&[]), set(&["one", "two"])));
}
