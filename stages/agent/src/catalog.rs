//! The list of this crate's stage kinds.

use cuda_agent_builtin::{Builtin, Embedded, Group, OnDevice, PerDevice};

use crate::{report, rollout};

/// The kinds. To add one, make its folder and add a line.
const AGENT: Group = Group {
    name: "agent",
    programs: &[("report", Some(report::main)), ("rollout", Some(rollout::main))],
    embedded: EMBEDDED,
};

include!(concat!(env!("OUT_DIR"), "/kinds.rs"));

/// Every built-in kind of this crate.
pub fn builtin() -> Vec<Builtin> {
    AGENT.builtin()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn lock_is_current() {
        let problems = AGENT.problems(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    /// The evaluator decides what an episode is worth, so its sources are this kind's too.
    #[test]
    fn the_evaluators_sources_are_sources() {
        let own = &AGENT.embedded("rollout").identity;
        for file in [
            "kernels/src/judge/mod.rs",
            "kernels/python/judge.py",
            "emulator/src/host.rs",
            "emulator/cpu/runtime/race.cpp",
            "sandbox/src/guard.rs",
        ] {
            let path = format!("stages/{file}");
            assert!(own.cpu.sources.iter().any(|(source, _)| *source == path), "{path} belongs under `sources:`");
        }
    }
}
