//! `learner servers`: this node's servers as a run would have them, until Ctrl-C. `docs/servers.md` says what it is for.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::run_file::SettingArguments;
use super::signals::StopSignal;
use super::{CliError, OutputArguments, print_json};
use crate::engine::servers::{Loaded, Notice, Place, Servers, ServersError, Weights, own_program};
use crate::report::Reporter;
use crate::types::{Progress, bytes};

#[derive(clap::Args)]
pub struct ServersArguments {
    #[command(flatten)]
    settings: SettingArguments,
    /// Say what is wrong with the settings, or what would be started, and start nothing
    #[arg(long)]
    check: bool,
    /// GPUs of this node
    #[arg(long, default_value_t = 1)]
    gpus_per_node: usize,
    /// Number of this node, for the names of the output files
    #[arg(long, default_value_t = 0)]
    node_rank: usize,
    /// Name or address under which others reach this node; servers listen there
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Load these weights once all servers are ready; may be given several times
    #[arg(long, value_name = "DIR")]
    load: Vec<PathBuf>,
    /// Stop once everything was loaded, instead of at Ctrl-C
    #[arg(long)]
    once: bool,
    /// Run directory; output goes to its folder servers/ [default: runs/NAME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Serialize)]
struct ServersReport {
    /// Of --check: a line for each server. Nothing was started.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    commands: Vec<String>,
    addresses: Vec<String>,
    /// The start, and then what was loaded.
    weights: Vec<WeightsReport>,
}

#[derive(Serialize)]
struct WeightsReport {
    version: String,
    bytes: u64,
    servers: Vec<ServerReport>,
}

#[derive(Serialize)]
struct ServerReport {
    address: String,
    seconds: f64,
    restarted: bool,
    /// The server said that it has this version.
    verified: bool,
}

pub fn run(arguments: &ServersArguments, output: &OutputArguments) -> Result<(), CliError> {
    let run_file = arguments.settings.resolve()?;
    let Some(model) = &run_file.model.directory else {
        return Err(CliError::Refused("model.directory: servers start from a Hugging Face directory; give --model DIR".into()));
    };
    let mut versions = Vec::new();
    for directory in std::iter::once(model).chain(&arguments.load) {
        versions.push(Weights::of(directory, version_of(directory)).map_err(CliError::refused)?);
    }
    let mut versions = versions.into_iter();
    let Some(first) = versions.next() else { return Ok(()) };
    let run_directory = arguments.out.clone().unwrap_or_else(|| Path::new("runs").join(&run_file.run.name));
    let place = Place {
        program: own_program().map_err(CliError::failed)?,
        host: arguments.host.clone(),
        node: arguments.node_rank,
        gpus: arguments.gpus_per_node,
        logs: run_directory.join("servers"),
    };
    let reporter = Arc::new(Reporter::new(output.verbosity(), output.json));
    if arguments.check {
        let commands = Servers::commands(&run_file.rollout, &place, &first).map_err(CliError::refused)?;
        commands.iter().for_each(|command| reporter.line(command));
        return finish(output, ServersReport { commands, addresses: Vec::new(), weights: Vec::new() });
    }

    let stop = StopSignal::listen()?;
    let stopped = || stop.raised();
    let notices = Arc::clone(&reporter);
    let on_notice = Arc::new(move |notice: &Notice| {
        let line = format!("{}  {}", notice.address, notice.text);
        if notice.trouble { notices.warn(&line) } else { notices.line(&line) }
    });
    let mut weights = Vec::new();
    let servers = Servers::start(&run_file.rollout, &place, first.clone(), on_notice).map_err(failure)?;
    weights.push(report(&reporter, &first, servers.ensure_started(&stopped).map_err(failure)?));
    for next in versions {
        weights.push(report(&reporter, &next, servers.load_weights(next.clone(), &stopped).map_err(failure)?));
    }
    let addresses = servers.addresses();
    reporter.line(&format!("serving at {}", addresses.join(", ")));
    while !arguments.once && !stopped() {
        if let Some(error) = servers.given_up() {
            return Err(failure(error));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    reporter.line("stopping");
    servers.stop();
    finish(output, ServersReport { commands: Vec::new(), addresses, weights })
}

fn finish(output: &OutputArguments, report: ServersReport) -> Result<(), CliError> {
    if output.json { print_json(&report) } else { Ok(()) }
}

/// The folder's own name.
fn version_of(directory: &Path) -> String {
    directory.file_name().map_or_else(|| "start".to_string(), |name| name.to_string_lossy().into_owned())
}

fn report(reporter: &Reporter, weights: &Weights, servers: Vec<Loaded>) -> WeightsReport {
    let slowest = servers.iter().map(|loaded| loaded.seconds).fold(0.0, f64::max);
    let restarted = servers.iter().filter(|loaded| loaded.restarted).count();
    let note = if restarted > 0 { format!(", {restarted} restarted for it") } else { String::new() };
    let (count, size) = (servers.len(), bytes(weights.bytes));
    reporter.line(&format!("{} on {count} servers after {slowest:.1} s, {size} each{note}", weights.version));
    let server = |loaded: Loaded| ServerReport {
        address: loaded.address,
        seconds: loaded.seconds,
        restarted: loaded.restarted,
        verified: loaded.verified,
    };
    WeightsReport { version: weights.version.clone(), bytes: weights.bytes, servers: servers.into_iter().map(server).collect() }
}

fn failure(error: ServersError) -> CliError {
    match error {
        ServersError::Settings(_) | ServersError::Directory { .. } => CliError::refused(error),
        // Nothing is lost when servers that only serve are stopped, and they have ended by now.
        ServersError::Stopped => CliError::Failed("stopped before all servers were ready".into()),
        _ => CliError::failed(error),
    }
}
