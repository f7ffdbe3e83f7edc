//! The command line: one file per subcommand.

pub mod sandbox;
pub mod tasks;

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
}

impl CliError {
    pub fn exit_code(&self) -> u8 {
        match self {
            CliError::Failed(_) => 1,
            CliError::Refused(_) => 2,
            CliError::Interrupted(_) => 3,
        }
    }
}
