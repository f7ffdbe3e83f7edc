//! `learner sandbox -- COMMAND`: runs one command as tasks are run, and says how it ended.

use std::collections::BTreeMap;
use std::io::Write;

use clap::Args;

use super::CliError;
use super::serve::{self, ServeArguments};
use crate::sandbox::{Limits, Request, RunResult, RunVerdict, Sandbox, SandboxError, Settings, Tier};

/// Run a command in the sandbox, or offer sandboxes to other machines.
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct SandboxArguments {
    #[command(subcommand)]
    pub serve: Option<SandboxCommand>,
    /// Use exactly this tier: `a` (namespaces) or `b` (Landlock and seccomp); default: the strongest that works.
    #[arg(long, value_parser = parse_tier)]
    pub tier: Option<Tier>,
    /// Seconds from start to end.
    #[arg(long, value_name = "SECONDS")]
    pub wall_seconds: Option<f64>,
    /// Seconds of CPU time over all processes.
    #[arg(long, value_name = "SECONDS")]
    pub cpu_seconds: Option<f64>,
    /// Bytes of resident memory over all processes.
    #[arg(long, value_name = "BYTES")]
    pub memory_bytes: Option<u64>,
    /// Processes and threads at the same time.
    #[arg(long, value_name = "COUNT")]
    pub processes: Option<u64>,
    /// Bytes of the largest file.
    #[arg(long, value_name = "BYTES")]
    pub file_bytes: Option<u64>,
    /// Bytes of all files together.
    #[arg(long, value_name = "BYTES")]
    pub workspace_bytes: Option<u64>,
    /// Bytes kept of standard output and of standard error.
    #[arg(long, value_name = "BYTES")]
    pub output_bytes: Option<u64>,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

#[derive(clap::Subcommand, Clone, Debug)]
pub enum SandboxCommand {
    /// Offer this machine's sandboxes to learners elsewhere (`sandbox.runners` of their run files)
    Serve(ServeArguments),
}

pub(super) fn parse_tier(text: &str) -> Result<Tier, String> {
    match text {
        "a" | "A" => Ok(Tier::A),
        "b" | "B" => Ok(Tier::B),
        _ => Err("expected a or b".to_string()),
    }
}

/// With `json`, prints one object; without, passes the command's output on and says on standard error what ended it, unless
/// it simply exited.
///
/// # Errors
/// [`CliError::Failed`] when the command did not exit with 0, [`CliError::Refused`] when there is no such sandbox here.
pub fn run(arguments: &SandboxArguments, json: bool) -> Result<(), CliError> {
    if let Some(SandboxCommand::Serve(arguments)) = &arguments.serve {
        return serve::run(arguments);
    }
    let settings = Settings { tier: arguments.tier, limits: limits(arguments), ..Settings::default() };
    let sandbox = Sandbox::start(&settings).map_err(|error| match error {
        SandboxError::Broken(_) => CliError::Failed(error.to_string()),
        _ => CliError::Refused(error.to_string()),
    })?;
    let request = Request { argv: arguments.command.clone(), environment: BTreeMap::new(), ..Request::default() };
    let result = sandbox.run(&request);
    print(&result, json).map_err(|error| CliError::Failed(format!("standard output: {error}")))?;
    if result.succeeded() { Ok(()) } else { Err(CliError::Failed(ending(&result))) }
}

fn limits(arguments: &SandboxArguments) -> Limits {
    let usual = Limits::default();
    Limits {
        wall_seconds: arguments.wall_seconds.unwrap_or(usual.wall_seconds),
        cpu_seconds: arguments.cpu_seconds.unwrap_or(usual.cpu_seconds),
        memory_bytes: arguments.memory_bytes.unwrap_or(usual.memory_bytes),
        processes: arguments.processes.unwrap_or(usual.processes),
        file_bytes: arguments.file_bytes.unwrap_or(usual.file_bytes),
        workspace_bytes: arguments.workspace_bytes.unwrap_or(usual.workspace_bytes),
        output_bytes: arguments.output_bytes.unwrap_or(usual.output_bytes),
    }
}

fn print(result: &RunResult, json: bool) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    if json {
        return writeln!(stdout, "{}", to_json(result));
    }
    stdout.write_all(&result.stdout)?;
    stdout.flush()?;
    std::io::stderr().lock().write_all(&result.stderr)
}

/// The result as it is reported. Bytes that are not UTF-8 become U+FFFD.
pub fn to_json(result: &RunResult) -> serde_json::Value {
    let reason = match &result.verdict {
        RunVerdict::Infrastructure(reason) => Some(reason.as_str()),
        _ => None,
    };
    let mut object = serde_json::json!({
        "verdict": result.verdict.name(),
        "exit_code": result.exit_code,
        "signal": result.signal,
        "wall_seconds": result.wall_seconds,
        "cpu_seconds": result.cpu_seconds,
        "peak_bytes": result.peak_bytes,
        "stdout": String::from_utf8_lossy(&result.stdout),
        "stderr": String::from_utf8_lossy(&result.stderr),
        "truncated": result.truncated,
        "limits_hit": result.limits_hit.names(),
        "queue_seconds": result.queue_seconds,
        "set_up_seconds": result.set_up_seconds,
        "tier": result.tier.to_string(),
        "mechanisms": result.mechanisms,
    });
    if let Some(reason) = reason {
        object["reason"] = reason.into();
    }
    object
}

fn ending(result: &RunResult) -> String {
    match (&result.verdict, result.exit_code, result.signal) {
        (RunVerdict::Infrastructure(reason), ..) => format!("sandbox: infrastructure: {reason}"),
        (RunVerdict::Exited, Some(code), _) => format!("sandbox: the command exited with {code}"),
        (RunVerdict::Signaled, _, Some(signal)) => format!("sandbox: the command was ended by signal {signal}"),
        (verdict, ..) => format!("sandbox: the command was ended: {}", verdict.name()),
    }
}
