//! Everything that holds untrusted code, below both the evaluator and the emulator: they judge what a source does, and this
//! crate says what it may hold, what it may call, and what its processes can reach.
//!
//! - [`child`]: child processes with limits, and the walls around those that run a candidate's machine code.
//! - [`process`]: compilers with limits.
//! - [`guard`], [`audit`]: what a preprocessed source may hold, and what its object may call.
//! - [`tokens`], [`names`], [`diagnostic`]: reading a source, and what compilers say of it.
//! - [`candidate`], [`fault`]: what is judged, and how its run can end badly.
//! - [`kept`], [`random`]: folders that are made once, and names and seeds that a candidate can't know.
//!
//! It knows no task, no device and no verdict.

pub mod audit;
pub mod candidate;
pub mod child;
pub mod diagnostic;
pub mod fault;
pub mod guard;
pub mod kept;
pub mod names;
pub mod process;
pub mod random;
pub mod tokens;
