//! `cuda-agent-train`: the program of the training stages.

fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
