//! Writes `stages.lock`: `make relock`. Refuses changed sources under a version that was not raised, unless
//! `--same-results` vouches that they make the same results.

#[path = "../src/lock.rs"]
mod lock;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(std::env::args().skip(1).any(|word| word == "--same-results")) {
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

fn run(same_results: bool) -> Result<String, String> {
    let ops = Path::new(env!("CARGO_MANIFEST_DIR"));
    let old = lock::read_lock(ops)?;
    let kinds = lock::read_kinds(ops)?;
    let changes: String = kinds.iter().filter_map(|kind| lock::explain(kind, &old)).collect();
    let new = lock::relock(&kinds, &old, same_results).map_err(|refused| {
        format!(
            "sources changed, versions did not:\n{refused}\
             Raise `version:` in the stage.yaml; or, where the results cannot differ: make relock SAME_RESULTS=1"
        )
    })?;
    if new == old {
        return Ok("stages.lock is current\n".to_owned());
    }
    let text = serde_json::to_string_pretty(&new).map_err(|error| error.to_string())? + "\n";
    std::fs::write(ops.join(lock::LOCK_FILE), text).map_err(|error| error.to_string())?;
    Ok(format!("{changes}stages.lock is written\n"))
}
