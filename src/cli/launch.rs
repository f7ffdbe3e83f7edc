//! The flags of a run on many nodes, and how their ranks meet: from a command line and variables to [`Ranks`].

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use serde::Serialize;

use super::CliError;
use crate::collectives::launch::{Flags, Found, Launch, describe};
use crate::collectives::{Rendezvous, RendezvousError, Token, host_name, join};
use crate::config::RunFile;
use crate::device::{CudaDevice, DeviceChoice};
use crate::model::ModelConfig;
use crate::parallel::{GpuSpecification, Mesh, Ranks, Workload, candidates};

/// Of these flags in `--help`.
pub const HEADING: &str = "Many nodes (docs/many-ranks.md)";

/// Where this process stands among those of a run. The same command is started once on every node.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = HEADING)]
pub struct LaunchArguments {
    /// Nodes of the run: start the same command once on each
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..65536))]
    nodes: Option<usize>,
    /// Which of the nodes this is, from 0 [default: as Slurm, OpenMPI, torchrun or Kubernetes say]
    #[arg(long, value_name = "R")]
    node_rank: Option<usize>,
    /// Where node 0 is reached; its port and those after it, one per rank, must be free [default: as the launcher says]
    #[arg(long, value_name = "HOST:PORT")]
    coordinator: Option<String>,
    /// Devices of each node, a rank on each [default: all GPUs, or one rank on the CPU]
    #[arg(long, value_name = "G", value_parser = RangedU64ValueParser::<usize>::new().range(1..65536))]
    gpus_per_node: Option<usize>,
    /// File with the secret that all nodes share [default: the variable LEARNER_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl LaunchArguments {
    pub fn any_given(&self) -> bool {
        let LaunchArguments { nodes, node_rank, coordinator, gpus_per_node, token_file } = self;
        nodes.is_some() || node_rank.is_some() || coordinator.is_some() || gpus_per_node.is_some() || token_file.is_some()
    }

    /// What flags and variables say. `port` is where the coordinator listens if they do not.
    pub fn describe(&self, port: u16, variables: &BTreeMap<String, String>) -> Result<Launch, CliError> {
        let flags = Flags {
            nodes: self.nodes,
            node_rank: self.node_rank,
            coordinator: self.coordinator.clone(),
            gpus_per_node: self.gpus_per_node,
            port: Some(port),
        };
        let mut launch = describe(&flags, variables).map_err(CliError::refused)?;
        if let Some(path) = &self.token_file {
            let refused = |problem: String| CliError::Refused(format!("--token-file {}: {problem}", path.display()));
            let text = std::fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
            let token = Token::new(&text).map_err(refused)?;
            launch.token = Some(Found { value: token, from: format!("--token-file {}", path.display()) });
        }
        Ok(launch)
    }
}

/// The variables of this process, those that are text.
pub fn variables() -> BTreeMap<String, String> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))).collect()
}

/// This node among those of a run of several ranks.
pub struct Node {
    launch: Launch,
    /// Ranks of each node: a thread with a device of its own.
    pub devices: usize,
    pub mesh: Mesh,
}

impl Node {
    /// None for a run of one rank: nobody asked for more, whatever started this process among others.
    ///
    /// # Errors
    /// One line that names what is missing, or the rule that the ranks break.
    pub fn find(arguments: &LaunchArguments, run_file: &RunFile, choice: DeviceChoice) -> Result<Option<Node>, CliError> {
        let variables = variables();
        if !arguments.any_given() && !variables.contains_key("LEARNER_NODES") {
            return Ok(None);
        }
        let settings = &run_file.parallel;
        let launch = arguments.describe(settings.port, &variables)?;
        let devices = devices(&launch, choice)?;
        let nodes = launch.nodes.value;
        let context = best_context(run_file, choice, (nodes, devices));
        let mesh = settings.mesh(nodes, devices, context).map_err(CliError::Refused)?;
        if mesh.world() == 1 {
            return Ok(None);
        }
        if nodes > 1 && launch.token.is_none() {
            let remedy = "give all of them the same one with --token-file FILE or LEARNER_TOKEN (openssl rand -hex 32 makes one)";
            return Err(CliError::Refused(format!("{nodes} nodes and no token, so that strangers could join: {remedy}")));
        }
        Ok(Some(Node { launch, devices, mesh }))
    }

    /// Meets all other ranks; the places of this node's ranks. Ranks of one node need no network.
    ///
    /// `run` names the run among others that may use the same port, where no launcher does.
    pub fn join(&self, run_file: &RunFile, run: &str) -> Result<Vec<Ranks>, CliError> {
        let settings = &run_file.parallel;
        let (Some(coordinator), Some(token)) = (&self.launch.coordinator, &self.launch.token) else {
            return Ok(Ranks::local(self.devices, settings.stall_seconds));
        };
        let run_id = self.launch.run_id.as_ref().map_or(run, |found| &found.value);
        let rendezvous = |device: usize| {
            let rank = self.launch.rank(device, self.devices);
            Rendezvous {
                coordinator: coordinator.value.clone(),
                rank,
                world_size: self.mesh.world(),
                run_id: run_id.to_owned(),
                token: token.value.clone(),
                host: host_name(),
                wait: Duration::from_secs_f64(settings.rendezvous_seconds),
                liveness: settings.liveness(),
                notice: Arc::new(move |line: &str| eprintln!("learner: rank {rank}: {line}")),
            }
        };
        std::thread::scope(|scope| {
            let joining: Vec<_> = (0..self.devices)
                .map(|device| {
                    let rendezvous = rendezvous(device);
                    scope.spawn(move || join(&rendezvous).map(Ranks::tcp))
                })
                .collect();
            let joined = joining.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            joined.collect::<Result<Vec<Ranks>, _>>().map_err(no_world)
        })
    }
}

/// What has not begun can be begun again once the others are there.
fn no_world(error: RendezvousError) -> CliError {
    match error {
        RendezvousError::Settings(_)
        | RendezvousError::Port { .. }
        | RendezvousError::NotACoordinator { .. }
        | RendezvousError::Token { .. }
        | RendezvousError::Refused { .. } => CliError::refused(error),
        RendezvousError::Missing(_)
        | RendezvousError::Unreachable { .. }
        | RendezvousError::Lost { .. }
        | RendezvousError::Collective(_) => CliError::Interrupted(error.to_string()),
    }
}

/// Devices of each node. What a launcher says of a node's GPUs counts for GPUs alone.
fn devices(launch: &Launch, choice: DeviceChoice) -> Result<usize, CliError> {
    let told = launch.gpus_per_node.as_ref();
    let asked = told.filter(|found| matches!(found.from.as_str(), "--gpus-per-node" | "LEARNER_GPUS_PER_NODE"));
    match choice {
        DeviceChoice::Cpu => Ok(asked.map_or(1, |found| found.value)),
        DeviceChoice::Emulated { count } => match asked {
            Some(Found { value, from }) if *value > count => Err(CliError::Refused(format!(
                "{from} {value}: run.device = \"emulated:{count}\" has {count} GPUs; write emulated:{value}"
            ))),
            found => Ok(found.map_or(count, |found| found.value)),
        },
        DeviceChoice::Cuda { ordinal } => match told {
            Some(found) => Ok(found.value),
            None => Ok(CudaDevice::names().map_err(CliError::refused)?.len().saturating_sub(ordinal).max(1)),
        },
    }
}

/// The context-parallel degree that a plan finds best; 1 where it knows neither the device nor the model's shape.
fn best_context(run_file: &RunFile, choice: DeviceChoice, layout: (usize, usize)) -> usize {
    let DeviceChoice::Cuda { ordinal } = choice else { return 1 };
    let known = || {
        let gpu = GpuSpecification::of_device(CudaDevice::names().ok()?.get(ordinal)?)?;
        // A shape that is drawn at random is small.
        let shape = std::fs::read_to_string(run_file.model.directory.as_ref()?.join("config.json")).ok()?;
        let config = ModelConfig::from_json(&shape).ok()?;
        let workload = Workload {
            context: run_file.agent.max_tokens,
            sequences: run_file.rl.tasks_per_step * run_file.rl.group_size,
            engine_sequences: run_file.engine.max_sequences,
            recompute: run_file.step.recompute,
        };
        let found = candidates(&config, layout, &gpu, &gpu.peaks()?, &workload).ok()?;
        found.iter().find(|candidate| candidate.objection.is_none()).map(|candidate| candidate.context)
    };
    known().unwrap_or(1)
}

/// One value of `learner doctor --launch`.
#[derive(Serialize)]
pub struct Told {
    name: &'static str,
    /// None where nothing was found.
    value: Option<String>,
    from: Option<String>,
}

/// What was found of a launch, and where. A token's text is not told.
pub fn told(launch: &Launch) -> Vec<Told> {
    fn told<T>(name: &'static str, found: Option<&Found<T>>, show: impl Fn(&T) -> String) -> Told {
        Told { name, value: found.map(|found| show(&found.value)), from: found.map(|found| found.from.clone()) }
    }
    let launcher = launch.launcher.name();
    vec![
        Told { name: "launcher", value: Some(launcher.into()), from: Some("variables of this process".into()) },
        told("nodes", Some(&launch.nodes), usize::to_string),
        told("node rank", Some(&launch.node_rank), usize::to_string),
        told("coordinator", launch.coordinator.as_ref(), String::clone),
        told("GPUs per node", launch.gpus_per_node.as_ref(), usize::to_string),
        told("run id", launch.run_id.as_ref(), String::clone),
        told("token", launch.token.as_ref(), |_| "given".into()),
    ]
}

impl Told {
    /// For people: the value and where it comes from.
    pub fn row(&self) -> (String, String) {
        let mut value = self.value.clone().unwrap_or_else(|| "not found".into());
        if let Some(from) = &self.from {
            // Writing to a string cannot fail.
            let _ = write!(value, "  ({from})");
        }
        (self.name.into(), value)
    }
}
