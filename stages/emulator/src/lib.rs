//! CUDA on the CPU: a candidate's source is compiled for the host, together with a small CUDA of our own, and says right or
//! wrong. It is never timed.
//!
//! The scope is frozen. It is what a kernel on plain tensors needs, as the headers in `cpu/include` have it:
//!
//! | part | what there is |
//! |---|---|
//! | qualifiers | `__global__`, `__device__`, `__host__`, `__constant__`, `__managed__`, `__shared__` (static and dynamic), `__launch_bounds__`, `__align__` and the inlining ones; `__restrict__` is the compiler's |
//! | threads | `threadIdx`, `blockIdx`, `blockDim`, `gridDim`, `warpSize`; `__syncthreads` and its relatives, `__syncwarp`, shuffles, votes, matches, warp reductions, fences, `clock64` |
//! | atomics | those of global and shared memory, also with `_block` and `_system` |
//! | types | vector types, `__half`, `__nv_bfloat16`, their pairs and conversions |
//! | functions | CUDA's mathematical functions and fast intrinsics (which are exact here), `printf`, `assert` |
//! | host code | launches with `<<<…>>>`, copies, fills, attributes and properties of the device (an H100's), errors |
//!
//! What it does not know is answered with [`Unsupported`](cuda_agent_sandbox::diagnostic::CompileFailure::Unsupported) at
//! its line, and never guessed: inline PTX, tensor cores, asynchronous copies, cooperative groups, textures, CUB, Thrust,
//! CUTLASS, kernels that launch kernels, and every other name that looks like a part of CUDA. The test
//! `what_this_device_lacks_is_unsupported` in `host_test.rs` holds that. New features of CUDA are not added: a wrong verdict
//! costs more than a missing one, and a GPU gives all of them.
//!
//! [`HostToolchain::build`] makes two [`Programs`] of a source, one with AddressSanitizer and one with the race detector
//! ([`host`], [`rewrite`]); [`CpuRunner`] runs one of them behind the walls of the sandbox, on a block of memory that it
//! shares with its caller ([`runner`]).

pub mod host;
mod host_messages;
mod own_name;
pub mod rewrite;
pub mod runner;

pub use host::{HostToolchain, Programs};
pub use runner::{CpuLimits, CpuRunner, RunReport, Span};

/// What the candidate's file is called in the compiler's messages and in debug information.
pub const SOURCE_NAME: &str = "candidate.cu";
