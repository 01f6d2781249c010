//! Stage kinds that are part of the binary.
//!
//! A crate with such kinds is a folder below `stages/`; each of its folders with a `stage.yaml` is a kind, named
//! `<crate's folder>/<kind's folder>`. Its build script calls [`build_script`], which digests the kinds' sources and
//! embeds manifests and Python programs ([`Embedded`]); its library lists the kinds in a [`Group`]; `stages.lock`
//! beside the kinds holds the sources that each version was given for ([`lock`]), and `make relock` writes it.
//!
//! Absent on purpose: anything that a kind's results could come from. So this crate is no source of any kind. Where the other
//! program of the project is ([`train_program`]) decides none.

mod catalog;
mod device;
mod generate;
pub mod lock;
mod manifest_head;
mod relock;
pub mod train_program;

pub use catalog::{Builtin, Embedded, Entry, Group, Identity, Main, OnDevice};
pub use device::{DeviceKind, PerDevice};
pub use generate::{build_script, generate};
pub use relock::relock;
