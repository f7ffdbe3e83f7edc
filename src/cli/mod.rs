//! The command line: one file per subcommand, `setup.rs` for what several need.

mod agree;
mod bench;
mod closing;
mod config;
mod device;
mod directory;
mod doctor;
mod evaluate;
mod generate;
pub mod grade;
mod launch;
mod open_files;
mod plan;
mod ranks;
mod recipe;
mod restart;
mod run_file;
pub mod sandbox;
pub mod score;
mod serve;
mod servers;
mod setup;
mod signals;
pub mod tasks;
mod train;

use std::process::ExitCode;

use clap::{ArgAction, Parser, Subcommand};

use crate::report::Verbosity;

/// How a command ends when it does not end well. `main` prints the one line and exits with the code.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The command was run: it failed. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// Bad usage, configuration or input; nothing was started. Exit code 2.
    #[error("{0}")]
    Refused(String),
    /// Stopped by a signal with everything saved; `--resume` continues. Exit code 3.
    #[error("{0}")]
    Interrupted(String),
    /// Stopped because a rank was lost; `--resume` continues. Exit code 3.
    #[error("{0}")]
    Lost(String),
    /// Something of ours broke, so that nothing is known of what was asked. Exit code 4.
    #[error("{0}")]
    Infrastructure(String),
    /// A process that this one had started for its work has ended with this exit code, and has said why.
    #[error("")]
    Ended(u8),
}

impl CliError {
    pub fn exit_code(&self) -> u8 {
        match self {
            CliError::Failed(_) => 1,
            CliError::Refused(_) => 2,
            CliError::Interrupted(_) => 3,
            CliError::Infrastructure(_) => 4,
            CliError::Lost(_) => restart::lost_code(),
            CliError::Ended(code) => *code,
        }
    }

    pub fn failed(error: impl ToString) -> CliError {
        CliError::Failed(error.to_string())
    }

    pub fn refused(error: impl ToString) -> CliError {
        CliError::Refused(error.to_string())
    }
}

/// Trains Qwen2.5/Qwen3 coding agents with reinforcement learning.
///
/// Without a subcommand it trains; without arguments it trains the quick start, in minutes, on this machine's CPU.
#[derive(Parser)]
#[command(name = "learner", version)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    train: train::TrainArguments,
    #[command(flatten)]
    output: OutputArguments,
}

#[derive(clap::Args, Clone, Debug)]
pub struct OutputArguments {
    /// One JSON object on standard output and nothing else there
    #[arg(long, global = true)]
    json: bool,
    /// Show more
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    /// Show warnings and errors only
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
}

impl OutputArguments {
    fn verbosity(&self) -> Verbosity {
        match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (false, 0) => Verbosity::Normal,
            (false, _) => Verbosity::Verbose,
        }
    }
}

#[derive(Subcommand)]
enum Command {
    /// Train a policy (also what happens without a subcommand)
    Train(train::TrainArguments),
    /// Measure a policy on held-out tasks
    Evaluate(evaluate::EvaluateArguments),
    /// Generate text from a model
    Generate(generate::GenerateArguments),
    /// Log-probability and entropy of every given token
    Score(score::ScoreArguments),
    /// Make, show and check task files
    Tasks(tasks::TasksArguments),
    /// Grade an answer that is given as a patch
    Grade(grade::GradeArguments),
    /// Run a command in the sandbox
    Sandbox(sandbox::SandboxArguments),
    /// Measure kernels, the training step alone, or the engine alone
    Bench(bench::BenchArguments),
    /// Memory, bytes on the links and time of a step on many GPUs, before they are bought
    Plan(plan::PlanArguments),
    /// Start, watch, feed and stop the servers that sample for models which do not fit one GPU
    Servers(servers::ServersArguments),
    /// What this machine offers and what is missing
    Doctor(doctor::DoctorArguments),
    /// Work with run files
    Config(config::ConfigArguments),
    /// The recipes that come with the program, and where their settings come from
    Recipe(recipe::RecipeArguments),
}

/// Reads the command line, runs it and turns the outcome into an exit code.
pub fn main() -> ExitCode {
    let line = CommandLine::parse();
    let output = line.output;
    if line.command.is_some() && line.train.any_given() {
        eprintln!("learner: settings stand behind the subcommand: learner SUBCOMMAND --recipe NAME ...");
        return ExitCode::from(2);
    }
    let result = match line.command {
        None => train::run(&line.train, &output),
        Some(Command::Train(arguments)) => train::run(&arguments, &output),
        Some(Command::Evaluate(arguments)) => evaluate::run(&arguments, &output),
        Some(Command::Generate(arguments)) => generate::run(&arguments, &output),
        Some(Command::Score(arguments)) => score::run(&arguments, output.json),
        Some(Command::Tasks(arguments)) => tasks::run(&arguments, output.json),
        Some(Command::Grade(arguments)) => grade::run(&arguments, output.json),
        Some(Command::Sandbox(arguments)) => sandbox::run(&arguments, output.json),
        Some(Command::Bench(arguments)) => bench::run(&arguments, &output),
        Some(Command::Plan(arguments)) => plan::run(&arguments, &output),
        Some(Command::Doctor(arguments)) => doctor::run(&arguments, &output),
        Some(Command::Servers(arguments)) => servers::run(&arguments, &output),
        Some(Command::Config(arguments)) => config::run(&arguments, &output),
        Some(Command::Recipe(arguments)) => recipe::run(&arguments, &output),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(tell(&error)),
    }
}

/// Prints the one line of an error and returns the exit code that goes with it.
fn tell(error: &CliError) -> u8 {
    // An empty message: the command has already said what there is to say.
    let message = error.to_string();
    if !message.is_empty() {
        eprintln!("learner: {message}");
    }
    error.exit_code()
}

/// Prints the one object of a `--json` command.
fn print_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    print_text(&(serde_json::to_string(value).map_err(CliError::failed)? + "\n"))
}

/// Prints to standard output.
fn print_text(text: &str) -> Result<(), CliError> {
    use std::io::Write;
    match std::io::stdout().write_all(text.as_bytes()) {
        // Whoever read it has read enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(|error| CliError::Failed(format!("standard output: {error}"))),
    }
}
