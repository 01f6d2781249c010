//! Writes the `stages.lock` of every crate with kinds: `make relock`. `--same-results` vouches that changed sources
//! make the same results.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let same_results = std::env::args().skip(1).any(|word| word == "--same-results");
    let stages = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate is a folder below stages/");
    match cuda_agent_builtin::relock(stages, same_results) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
