//! A declarative pipeline engine: YAML → spec → plan → key → schedule and execute → program → artifact → store.
//!
//! `ARCHITECTURE.md` has the map, the formats and the invariants. This crate knows no kernel and no model; stage kinds
//! come to it as a [`catalog::Catalog`].

pub mod artifact;
pub mod catalog;
pub mod digest;
pub mod event;
pub mod execute;
pub mod host;
pub mod interpreter;
pub mod key;
pub mod name;
pub mod plan;
pub mod rows;
pub mod schedule;
pub mod spec;
pub mod store;
pub mod worker;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Folders of this machine that hold what is not shared.
#[derive(Clone, Debug)]
pub struct Folders {
    /// Attempts that run, by run and stage.
    pub work: PathBuf,
    /// Checkpoints and row journals, by key.
    pub state: PathBuf,
    /// What can be deleted at any time.
    pub cache: PathBuf,
}

impl Folders {
    /// The folders below `.cuda-agent`.
    pub fn below(root: &Path) -> std::io::Result<Self> {
        std::fs::create_dir_all(root)?;
        let root = root.canonicalize()?;
        Ok(Self { work: root.join("work"), state: root.join("state"), cache: root.join("cache") })
    }
}

/// Runs what blocks on another thread, where there is a runtime whose own must go on; otherwise here.
pub async fn off_loop<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return work() };
    match runtime.spawn_blocking(work).await {
        Ok(done) => done,
        // Nobody cancels such a task.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Text that nobody else has: the time, this process, and a counter, digested.
pub fn nonce() -> String {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // Each RandomState is seeded by the system.
    let random = RandomState::new().build_hasher().finish();
    let text = format!("{} {} {random}", now(), std::process::id());
    digest::Digest::of_bytes(text.as_bytes()).to_string()[..32].to_owned()
}

/// The id of a new run: the time to the millisecond, so that ids sort, and a random part.
pub fn run_id() -> String {
    id_at(now())
}

/// An id that sorts by this time, in seconds since 1970.
pub fn id_at(seconds: f64) -> String {
    let milliseconds = (seconds * 1e3) as u64;
    let second = timestamp(milliseconds / 1000);
    format!("{}.{:03}Z-{}", second.trim_end_matches('Z'), milliseconds % 1000, &nonce()[..6])
}

/// A time in UTC as `20260131T235959Z`.
pub fn timestamp(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| chrono::DateTime::from_timestamp(seconds, 0));
    time.unwrap_or(chrono::DateTime::<chrono::Utc>::MAX_UTC).format("%Y%m%dT%H%M%SZ").to_string()
}

#[cfg(test)]
mod tests {
    #[test]
    fn timestamps_are_utc() {
        assert_eq!(super::timestamp(0), "19700101T000000Z");
        assert_eq!(super::timestamp(951_782_399), "20000228T235959Z");
        assert_eq!(super::timestamp(1_790_000_000), "20260921T141320Z");
        assert!(super::timestamp(u64::MAX).ends_with("1231T235959Z"), "a clock that is wrong ends no run");
    }

    #[test]
    fn nonces_differ() {
        assert_ne!(super::nonce(), super::nonce());
    }
}
