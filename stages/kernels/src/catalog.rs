//! The list of this crate's stage kinds; `cuda_agent_builtin` has the machinery.

use cuda_agent_builtin::{Builtin, Embedded, Group, OnDevice, PerDevice};

use crate::stage::{evaluate, profile};

/// The kinds: a folder of this crate, and its program. To add a kind, make its folder and add a line.
const KERNELS: Group = Group {
    name: "kernels",
    programs: &[("evaluate", Some(evaluate::main)), ("profile", Some(profile::main))],
    embedded: EMBEDDED,
};

include!(concat!(env!("OUT_DIR"), "/kinds.rs"));

/// Every built-in kind of this crate.
pub fn builtin() -> Vec<Builtin> {
    KERNELS.builtin()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use cuda_agent_builtin::{DeviceKind, lock};

    use super::*;

    fn home() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR"))
    }

    #[test]
    fn lock_is_current() {
        let problems = KERNELS.problems(home()).unwrap();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    /// The Rust code embeds files of other folders, so one that is missing under `sources:` would change verdicts
    /// without changing a key.
    #[test]
    fn every_folder_that_programs_are_made_of_is_a_source() {
        const NO_SOURCES: [&str; 4] = ["tests", "corpus", "examples", "benches"];
        let identity = &KERNELS.embedded("evaluate").identity;
        let sources: Vec<_> = identity.cpu.sources.iter().chain(identity.gpu.sources).collect();
        let linked = ["kernels", "emulator", "sandbox"].map(|name| home().join("..").join(name));
        let entries = linked.iter().flat_map(|home| std::fs::read_dir(home).unwrap());
        for path in entries.map(|entry| entry.unwrap().path()) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !path.join("stage.yaml").exists() && !NO_SOURCES.contains(&name.as_str()) {
                let package = path.parent().unwrap().file_name().unwrap().to_string_lossy();
                let prefix = format!("stages/{package}/{name}/");
                let is_source = sources.iter().any(|(source, _)| source.starts_with(&prefix));
                assert!(is_source, "{prefix} belongs under `sources:` of evaluate/stage.yaml, or is no source");
            }
        }
    }

    /// Every kind that asks for verdicts, with the folders' own lists and the lock that is stored.
    #[test]
    fn an_edit_of_the_emulator_misses_no_gpu_row() {
        let stages = home().parent().unwrap();
        let mut judging = 0;
        for home in lock::homes(stages).unwrap() {
            let stored = lock::read_lock(&home).unwrap();
            for mut kind in lock::read_kinds(&home).unwrap() {
                let is_emulator = |path: &str| path.starts_with("stages/emulator/");
                let emulator = kind.current.sources.iter_mut().filter(|(path, _)| is_emulator(path));
                let edited = emulator.map(|(_, digest)| *digest = "edited".to_owned()).count();
                judging += usize::from(edited > 0);
                let is_hit = |device| kind.is_locked_on(device, &stored);
                assert!(is_hit(DeviceKind::Gpu), "{}: an edit of the emulator misses what GPUs gave", kind.name);
                assert_eq!(is_hit(DeviceKind::Cpu), edited == 0, "{}: what the emulator gave", kind.name);
            }
        }
        assert_eq!(judging, 5, "evaluate, profile, rollout, ppo-warmup, ppo");
    }

    /// What compiles, runs and times on a GPU says nothing of a verdict of the CPU device.
    #[test]
    fn what_runs_on_gpus_is_no_source_on_the_cpu() {
        let identity = &KERNELS.embedded("evaluate").identity;
        for path in [
            "src/runner/gpu/server.rs",
            "src/backend/cuda.rs",
            "src/compile/nvrtc.rs",
            "recorder/recorder.cpp",
            "python/ahead.py",
        ] {
            let path = format!("stages/kernels/{path}");
            let has = |on: &OnDevice| on.sources.iter().any(|(source, _)| *source == path);
            assert_eq!([has(&identity.cpu), has(&identity.gpu)], [false, true], "{path}");
        }
    }
}
