//! What the folders and files of a run are called.

use std::path::PathBuf;

use crate::Folders;
use crate::digest::Digest;

/// Where in an attempt's folder the program puts its outputs.
pub const OUTPUTS: &str = "outputs";
/// Where in an attempt's folder the program's temporary files go.
pub const TEMPORARY: &str = "tmp";
/// The file in an attempt's folder that says what the program is to do.
pub const REQUEST: &str = "request.json";

/// Where an attempt at a stage works; attempts count from 1.
pub fn attempt_folder(folders: &Folders, run: &str, stage: &str, attempt: u32) -> PathBuf {
    let again = if attempt > 1 { format!("~{attempt}") } else { String::new() };
    folders.work.join(run).join(format!("{}{again}", file_name(stage)))
}

/// Where the log of a stage is while it runs.
pub fn live_log(folders: &Folders, run: &str, stage: &str) -> PathBuf {
    folders.work.join(run).join(format!("{}.log", file_name(stage)))
}

/// A stage's name as a file name: a cell's name may hold anything.
pub fn file_name(stage: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.,=[]".contains(c);
    if stage.chars().all(plain) && stage.len() < 100 {
        return stage.to_owned();
    }
    let kept: String = stage.chars().filter(|c| plain(*c)).take(60).collect();
    format!("{kept}-{}", &Digest::of_bytes(stage.as_bytes()).to_string()[..12])
}
