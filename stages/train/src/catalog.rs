//! The list of this crate's stage kinds; `cuda_agent_builtin` has the machinery.

use cuda_agent_builtin::{Builtin, Embedded, Group, OnDevice, PerDevice};

use crate::launch::become_stage;

/// The kinds: a folder of this crate, and what starts its program. To add a kind, make its folder, add a line here and one
/// in `stage/mod.rs`.
const TRAIN: Group = Group {
    name: "train",
    programs: &[
        ("critic-pretrain", Some(|| become_stage("train/critic-pretrain"))),
        ("import-gguf", Some(|| become_stage("train/import-gguf"))),
        ("new-model", Some(|| become_stage("train/new-model"))),
        ("ppo", Some(|| become_stage("train/ppo"))),
        ("ppo-warmup", Some(|| become_stage("train/ppo-warmup"))),
        ("rft", Some(|| become_stage("train/rft"))),
    ],
    embedded: EMBEDDED,
};

include!(concat!(env!("OUT_DIR"), "/kinds.rs"));

/// Every built-in kind of this crate.
pub fn builtin() -> Vec<Builtin> {
    TRAIN.builtin()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn lock_is_current() {
        let problems = TRAIN.problems(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }
}
