//! The stage kinds that make a CUDA-Agent-Ops dataset: crawl, synthesize, measure, filter, publish.
//!
//! Each kind is a folder with a `stage.yaml`; most programs are Python in that folder, `publish` is Rust in this
//! crate. [`builtin`] is all that the engine knows of them.

mod catalog;
pub mod publish;

pub use catalog::builtin;
