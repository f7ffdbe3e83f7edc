//! `learner config show`: the run file that a command line stands for, every key written out.

use super::train::SettingArguments;
use super::{CliError, OutputArguments, print_json, print_text};

#[derive(clap::Args)]
pub struct ConfigArguments {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(clap::Subcommand)]
enum ConfigCommand {
    /// Print the run file with every key, as TOML (or JSON with --json)
    Show(SettingArguments),
}

pub fn run(arguments: &ConfigArguments, output: &OutputArguments) -> Result<(), CliError> {
    let ConfigCommand::Show(settings) = &arguments.command;
    let run_file = settings.resolve()?;
    if output.json {
        return print_json(&run_file);
    }
    print_text(&run_file.to_toml().map_err(CliError::Failed)?)
}
