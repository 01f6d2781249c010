//! `cuda-agent-train`: the program of the training stages, and what a person can ask of it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use cuda_agent_train::algorithm::goldens::{TOLERANCE, recompute};
use cuda_agent_train::model::gguf;
use cuda_agent_train::sampler::{child, open, server};
use cuda_agent_train::{TrainError, bench};

/// The program of the training stages: it links libtorch, and nothing else of cuda-agent does.
#[derive(Parser)]
#[command(name = "cuda-agent-train", version, about, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the program of a stage kind in this folder; `cuda-agent run` does that.
    #[command(hide = true)]
    Stage {
        /// The kind: `train/ppo`.
        kind: String,
    },
    /// Recompute the numbers of another PPO implementation, and print the largest relative error of each quantity.
    ///
    /// Exit status 1 above 1e-5.
    Goldens {
        /// A JSON file of cases: inputs, gae, policy_loss, value_loss, kl_mean, adaptive_kl.
        file: PathBuf,
    },
    /// Sample from a model for another program: JSON lines on standard input and output.
    #[command(after_help = open::USAGE, override_usage = "cuda-agent-train sample MODEL [--name VALUE]...")]
    Sample {
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Serve a model behind OpenAI's API.
    #[command(after_help = format!("{}\n{}", open::USAGE, server::USAGE), override_usage = "cuda-agent-train serve MODEL [--name VALUE]...")]
    Serve {
        #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure the sampler or the trainer on this machine, and print a line of JSON.
    Bench {
        #[command(subcommand)]
        section: bench::Section,
    },
    /// Make a Hugging Face folder in bf16 of a GGUF file of a Qwen2 or Qwen3 model.
    Import {
        /// The GGUF file.
        file: PathBuf,
        /// The folder to write.
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    // The evaluator's children are this program, started again.
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == cuda_agent_kernels::COMMAND) {
        let word = words.get(1).map(String::as_str).unwrap_or_default();
        return cuda_agent_kernels::child(word).into();
    }
    let outcome = match Arguments::parse().command {
        Command::Stage { kind } => return cuda_agent_train::stage::main(&kind).into(),
        Command::Goldens { file } => goldens(&file),
        Command::Sample { arguments } => child::main(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Serve { arguments } => server::main(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Bench { section } => bench::main(&section).map(|()| ExitCode::SUCCESS),
        Command::Import { file, folder } => import(&file, &folder),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        error.hint.iter().for_each(|hint| eprintln!("hint: {hint}"));
        ExitCode::from(2)
    })
}

fn import(file: &std::path::Path, folder: &std::path::Path) -> Result<ExitCode, TrainError> {
    let imported = gguf::import(file, folder)?;
    let head = if imported.tied { "its head is its embedding" } else { "its head is a table of its own" };
    println!("{} weights in {} tensors, {head}", imported.parameters, imported.tensors);
    println!("they went through the file's quantisation: this is not the model that was published in bf16");
    Ok(ExitCode::SUCCESS)
}

fn goldens(file: &std::path::Path) -> Result<ExitCode, TrainError> {
    let text = std::fs::read_to_string(file).map_err(TrainError::file(file))?;
    let errors =
        recompute(&text).map_err(|error| TrainError { message: format!("{}: {error}", file.display()), ..error })?;
    print!("{}", errors.table());
    let right = errors.largest() <= TOLERANCE;
    let verdict = if right { "within" } else { "above" };
    println!("largest: {:.1e}, {verdict} {TOLERANCE:.0e}", errors.largest());
    Ok(ExitCode::from(u8::from(!right)))
}
