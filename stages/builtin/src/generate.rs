//! What the build script of a crate with kinds writes: their manifests, the Python programs, each kind's sources.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::device::{DeviceKind, PerDevice};
use crate::lock::{self, Kind, Lock};

/// The whole build script of a crate with kinds: writes `kinds.rs` into `OUT_DIR`, for the crate to include.
pub fn build_script() {
    let folder = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("kinds.rs");
    watch(&folder);
    match generate(&folder) {
        Ok(text) => fs::write(out, text).expect("OUT_DIR can be written"),
        Err(message) => println!("cargo::error={message}"),
    }
}

/// Rust: `EMBEDDED`, the kinds of the crate in `folder`. Where it is included, [`crate::Embedded`], [`crate::OnDevice`] and
/// [`crate::PerDevice`] must be in scope.
pub fn generate(folder: &Path) -> Result<String, String> {
    let lock = lock::read_lock(folder)?;
    let mut text = String::from("/// The kinds' folders as they were when this crate was built.\n");
    text.push_str("static EMBEDDED: &[Embedded] = &[\n");
    for kind in &lock::read_kinds(folder)? {
        write_kind(&mut text, kind, &lock).expect("strings take any text");
    }
    text.push_str("];\n");
    Ok(text)
}

fn write_kind(text: &mut String, kind: &Kind, lock: &Lock) -> std::fmt::Result {
    let manifest = format!("{}/stage.yaml", kind.path);
    writeln!(text, "Embedded {{ name: {:?}, folder: {:?}, path: {:?},", kind.name, kind.folder, kind.path)?;
    writeln!(text, "    rust: {},", kind.rust)?;
    writeln!(text, "    manifest: include_str!({:?}),", kind.files[&manifest])?;
    writeln!(text, "    files: &[")?;
    for (name, path) in kind.files.iter().filter(|_| !kind.rust) {
        writeln!(text, "        ({name:?}, include_bytes!({path:?})),")?;
    }
    let identity = PerDevice::of(|device| on_device(kind, device, lock));
    writeln!(text, "    ], identity: PerDevice {{ cpu: {}, gpu: {} }} }},", identity.cpu, identity.gpu)
}

fn on_device(kind: &Kind, device: DeviceKind, lock: &Lock) -> String {
    let (version, locked) = (kind.current.version_on(device), kind.is_locked_on(device, lock));
    let sources: String = kind
        .current
        .sources_on(device)
        .iter()
        .map(|(name, digest)| format!("\n        ({name:?}, {digest:?}),"))
        .collect();
    format!("OnDevice {{ version: {version:?}, locked: {locked}, sources: &[{sources}\n    ] }}")
}

/// What Python programs of several crates share.
const SHARED: &str = "stages/torch_runtime";

/// Cargo looks at folders with everything below them, so files that are added or removed count too.
fn watch(folder: &Path) {
    let root = lock::workspace(folder);
    for path in [folder.to_owned(), root.join(lock::PROTOCOL), root.join(SHARED), root.join("Cargo.lock")] {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}
