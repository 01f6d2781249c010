//! The binary: the engine's commands, with the stage kinds of this workspace built in.

mod check;
mod doctor;

use cuda_agent_builtin::{Builtin, Entry, Identity};
use cuda_agent_cli::{self as cli, Builtins, RowView, StageCommand};
use cuda_agent_engine::catalog::{Catalog, CatalogError, ProgramFiles};
use cuda_agent_engine::digest::Digest;
use cuda_agent_engine::execute::supervise;
use cuda_agent_engine::key::ProgramIdentity;
use cuda_agent_protocol::PortType;
use cuda_agent_protocol::manifest::PerDevice;

/// A run over ten thousand stages makes millions of small things on several threads, and frees many of them on others: glibc's
/// allocator takes a sixth longer for such a run.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    let arguments: Vec<std::ffi::OsString> = std::env::args_os().collect();
    // Before anything else: supervisors are forked, and must have one thread.
    if arguments.get(1).is_some_and(|word| word == supervise::COMMAND) {
        let words: Vec<String> = arguments[2..].iter().map(|word| word.to_string_lossy().into_owned()).collect();
        std::process::exit(supervise::main(&words));
    }
    // The evaluator's children: they speak on pipes and need nothing of the engine.
    if arguments.get(1).is_some_and(|word| word == cuda_agent_kernels::COMMAND) {
        let word = arguments.get(2).map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
        std::process::exit(cuda_agent_kernels::child(&word).into());
    }
    cli::main(arguments, &Builtins { add, program, commands: COMMANDS, findings: doctor::findings, views: VIEWS })
        .into()
}

/// The stage crates' commands.
const COMMANDS: &[StageCommand] = &[StageCommand { command: check::command, run: check::main }];

/// Tables whose rows read better than column by column.
const VIEWS: &[RowView] = &[RowView { port_type: PortType::Trajectories, text: cuda_agent_agent::show::episode }];

/// The kinds of every stage crate.
fn builtin() -> impl Iterator<Item = Builtin> {
    let agent = cuda_agent_agent::builtin();
    let crates = [cuda_agent_ops::builtin(), cuda_agent_kernels::builtin(), agent, cuda_agent_train::builtin()];
    crates.into_iter().flatten()
}

fn add(catalog: &mut Catalog) -> Result<(), CatalogError> {
    builtin().try_for_each(|kind| add_kind(catalog, kind))
}

fn add_kind(catalog: &mut Catalog, kind: Builtin) -> Result<(), CatalogError> {
    let program = match kind.entry {
        Entry::Rust(_) => ProgramFiles::None,
        Entry::Files { files, folder } => ProgramFiles::Embedded { files, folder: folder.to_owned() },
    };
    let of = |identity| match identity {
        Identity::Version(version) => ProgramIdentity::Version(version),
        Identity::Sources(sources) => {
            let digest = |text: String| text.parse::<Digest>().expect("the build script writes digests");
            ProgramIdentity::Files(sources.into_iter().map(|(path, text)| (path, digest(text))).collect())
        }
    };
    let identity = move || PerDevice { cpu: of(kind.identity.cpu), gpu: of(kind.identity.gpu) };
    catalog.add_builtin(kind.name, kind.manifest, kind.manifest_path, identity, program)
}

fn program(name: &str) -> Option<u8> {
    builtin().find(|kind| kind.name == name).and_then(|kind| match kind.entry {
        Entry::Rust(main) => Some(main()),
        Entry::Files { .. } => None,
    })
}
