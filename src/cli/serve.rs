//! `learner sandbox serve`: offers this machine's sandboxes to learners elsewhere.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::CliError;
use super::sandbox::parse_tier;
use super::signals::StopSignal;
use crate::sandbox::{SandboxError, ServeSettings, Server, Settings, TOKEN_VARIABLE, Tier, token};

#[derive(clap::Args, Clone, Debug)]
pub struct ServeArguments {
    /// Address and port; 0.0.0.0:PORT for all of this machine's addresses. What is sent is not encrypted
    #[arg(long, default_value = "127.0.0.1:7531", value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// File of the secret that clients must have (default: in the variable LEARNER_SANDBOX_TOKEN)
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Directory below which clients may name trees for their runs; may be given more than once
    #[arg(long = "trees", value_name = "DIR")]
    pub trees: Vec<PathBuf>,
    /// Use exactly this tier: `a` or `b`; default: the strongest that works
    #[arg(long, value_parser = parse_tier)]
    pub tier: Option<Tier>,
    /// Runs at the same time; 0: three for two cores
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    pub parallel: usize,
    /// Memory of all runs at the same time together; 0: three quarters of what is available
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub memory_bytes: u64,
    /// Where a tree cannot be overlaid, give each run a copy
    #[arg(long)]
    pub copy_trees: bool,
    /// The Python to run tests with
    #[arg(long, value_name = "FILE")]
    pub python: Option<PathBuf>,
}

/// Serves until SIGTERM or Ctrl-C, then ends once the runs under way have ended.
///
/// # Errors
/// [`CliError::Refused`] without a token, without a sandbox on this machine, or when the port cannot be had.
pub fn run(arguments: &ServeArguments) -> Result<(), CliError> {
    let refused = |error: SandboxError| CliError::Refused(error.to_string());
    let settings = ServeSettings {
        sandbox: Settings {
            tier: arguments.tier,
            parallel: arguments.parallel,
            memory_bytes: arguments.memory_bytes,
            copy_trees: arguments.copy_trees,
            python: arguments.python.clone(),
            ..Settings::default()
        },
        token: token(arguments.token_file.as_deref()).map_err(|error| match error {
            SandboxError::Settings { found, remedy, .. } => {
                CliError::Refused(format!("no token (--token-file or {TOKEN_VARIABLE}): {found}; {remedy}"))
            }
            error => refused(error),
        })?,
        trees: arguments.trees.clone(),
    };
    let stop = StopSignal::listen()?;
    let server = Server::open(arguments.listen, &settings).map_err(refused)?;
    let address = server.address().map_err(|error| CliError::Failed(error.to_string()))?;
    let python = server.sandbox().python().map_or_else(|error| error.to_string(), |(_, version)| version);
    eprintln!(
        "runner: listening on {address}, tier {}, {} runs at the same time, Python {python}",
        server.sandbox().tier(),
        server.sandbox().parallel()
    );
    server.serve(&|| stop.raised(), &|line| eprintln!("runner: {line}"));
    eprintln!("runner: stopped, nothing is under way");
    Ok(())
}
