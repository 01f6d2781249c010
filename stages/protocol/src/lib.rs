//! What the engine and a stage's program say to each other.
//!
//! The contract is *execute this request*: the engine writes a [`Request`], starts the program that the stage
//! kind's [`Manifest`] names, reads [`Event`]s from a descriptor of its own and, where the program fails, a
//! [`ProgramError`]. `ARCHITECTURE.md` has the formats; `stages/protocol/python/cuda_agent_stage.py` is the twin
//! of this crate for programs written in Python.

pub mod event;
pub mod manifest;
pub mod program;
pub mod request;
pub mod types;

pub use event::{Event, RowResult, RowStatus};
pub use manifest::Manifest;
pub use program::{Program, ProgramError};
pub use request::{ByRowRequest, Device, InputRequest, OutputRequest, Request, ResourceGrant, RowInput};
pub use types::{ColumnType, PortType};

/// The version of the protocol that this crate speaks; a program refuses a request of another one.
pub const PROTOCOL_VERSION: u32 = 1;

/// The file name of the Python twin, and its text, so that the engine can put it beside a Python program.
pub const PYTHON_TWIN: (&str, &str) = ("cuda_agent_stage.py", include_str!("../python/cuda_agent_stage.py"));
