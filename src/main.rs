//! The `learner` program: dispatches to its subcommands.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use learner::cli;

#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    /// Print one JSON object on standard output, and nothing else there.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a command in the sandbox.
    Sandbox(cli::sandbox::SandboxArguments),
    /// Make, show and check task files.
    Tasks(cli::tasks::TasksArguments),
}

fn main() -> ExitCode {
    if let Some(code) = learner::sandbox::helper_if_asked() {
        return code;
    }
    let arguments = Arguments::parse();
    let outcome = match &arguments.command {
        Command::Sandbox(sandbox) => cli::sandbox::run(sandbox, arguments.json),
        Command::Tasks(tasks) => cli::tasks::run(tasks, arguments.json),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(error.exit_code())
        }
    }
}
