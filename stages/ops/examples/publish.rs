//! Runs the program of `ops/publish` alone, as the engine would: `CUDA_AGENT_REQUEST` names a request. For trying a
//! change of the stage without building the engine.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(cuda_agent_ops::publish::main())
}
