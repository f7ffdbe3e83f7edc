//! temporary
use super::CliError;
#[derive(clap::Args)]
pub struct TasksArguments {}
pub fn run(_: &TasksArguments, _json: bool) -> Result<(), CliError> { Ok(()) }
