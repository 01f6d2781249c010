//! The integration tests, as one binary: linking once is what keeps the suite fast.

mod agent;
mod architecture;
mod by_row;
mod chaos;
mod checkpoints;
mod cli;
mod docs;
mod engine;
mod evaluator;
mod fuzz;
mod gc;
mod keys;
mod kills;
mod limits;
mod messages;
mod programs;
mod rejected;
mod row_programs;
mod row_sharing;
mod rows_model;
mod s3;
mod secrets;
mod share_commands;
mod shared;
mod stores;
mod support;
mod workers;

/// A test file that is not listed above would never run.
#[test]
fn no_test_file_is_forgotten() {
    let listed = include_str!("main.rs");
    for item in std::fs::read_dir(support::repository().join("tests")).unwrap() {
        let name = item.unwrap().file_name().into_string().unwrap();
        let Some(module) = name.strip_suffix(".rs").filter(|module| *module != "main") else { continue };
        assert!(listed.contains(&format!("mod {module};")), "tests/{name} is not listed in tests/main.rs");
    }
}
