//! Embeds the kinds' manifests, the Python programs, and each kind's identity.

#[path = "src/lock.rs"]
mod lock;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let ops = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("kinds.rs");
    match generate(&ops) {
        Ok(text) => fs::write(out, text).expect("OUT_DIR can be written"),
        Err(message) => println!("cargo::error={message}"),
    }
}

fn generate(ops: &Path) -> Result<String, String> {
    watch(ops);
    let lock = lock::read_lock(ops)?;
    let kinds = lock::read_kinds(ops)?;
    let mut text = String::from("/// The kinds' folders as they were when this crate was built.\n");
    text.push_str("pub(crate) static EMBEDDED: &[Embedded] = &[\n");
    for kind in &kinds {
        write_kind(&mut text, kind, kind.is_locked(&lock)).expect("strings take any text");
    }
    text.push_str("];\n");
    Ok(text)
}

fn write_kind(text: &mut String, kind: &lock::Kind, locked: bool) -> std::fmt::Result {
    let path = format!("stages/ops/{}", kind.folder);
    let manifest = format!("{path}/stage.yaml");
    writeln!(text, "Embedded {{ name: {:?}, folder: {:?}, path: {path:?},", kind.name, kind.folder)?;
    writeln!(text, "    version: {:?}, locked: {locked},", kind.version)?;
    writeln!(text, "    manifest: include_str!({:?}),", kind.files[&manifest])?;
    writeln!(text, "    files: &[")?;
    for (name, path) in kind.files.iter().filter(|_| !kind.rust) {
        writeln!(text, "        ({name:?}, include_bytes!({path:?})),")?;
    }
    writeln!(text, "    ], sources: &[")?;
    for (name, digest) in &kind.sources {
        writeln!(text, "        ({name:?}, {digest:?}),")?;
    }
    writeln!(text, "    ] }},")
}

/// Cargo looks at folders with everything below them, so files that are added or removed count too.
fn watch(ops: &Path) {
    let root = lock::clean(&ops.join("../.."));
    for path in [ops.to_owned(), root.join("stages/protocol"), root.join("Cargo.lock")] {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}
