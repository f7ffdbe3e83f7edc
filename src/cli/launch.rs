//! The flags of a run on many nodes, and how their ranks meet: from a command line and variables to [`Ranks`].

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use serde::Serialize;

use super::{CliError, open_files};
use crate::collectives::launch::{Flags, Found, Launch, describe};
use crate::collectives::{Rendezvous, RendezvousError, host_name, join};
use crate::config::RunFile;
use crate::device::{CudaDevice, DeviceChoice};
use crate::model::ModelConfig;
use crate::parallel::{GpuSpecification, Mesh, Ranks, Workload, candidates};
use crate::stage::Settings;
use crate::wire::Token;

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
        let settings = &run_file.parallel;
        if !arguments.any_given() && !variables.contains_key("LEARNER_NODES") {
            return match settings.context {
                0 | 1 => Ok(None),
                degree => Err(CliError::Refused(format!(
                    "parallel.context = {degree}: there is one rank; give --gpus-per-node or --nodes to have several"
                ))),
            };
        }
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
        open_files::make_room(&self.mesh, self.devices)?;
        let run_id = self.launch.run_id.as_ref().map_or(run, |found| &found.value);
        let given_up = Arc::<OnceLock<String>>::default();
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
                given_up: given_up.clone(),
            }
        };
        std::thread::scope(|scope| {
            let joining: Vec<_> = (0..self.devices)
                .map(|device| {
                    let rendezvous = rendezvous(device);
                    scope.spawn(move || {
                        let joined = join(&rendezvous).map(Ranks::tcp);
                        // The first problem of this node's ranks stays.
                        joined.inspect_err(|problem| drop(rendezvous.given_up.set(problem.to_string())))
                    })
                })
                .collect();
            let joined = joining.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            together(joined.map(|joined| joined.map_err(no_world)).collect())
        })
    }
}

/// All places, or why there is no world: what is wrong on this node, else the loss of a rank, before what comes of either.
fn together(joined: Vec<Result<Ranks, CliError>>) -> Result<Vec<Ranks>, CliError> {
    let (places, mut problems): (Vec<_>, Vec<_>) = joined.into_iter().partition(Result::is_ok);
    problems.sort_by_key(|problem| match problem {
        Err(CliError::Refused(_)) => 0,
        Err(CliError::Lost(_)) => 1,
        _ => 2,
    });
    problems.into_iter().chain(places).collect()
}

/// What has not begun can be begun again once the others are there. Who was there and is lost may come back: the run starts again.
fn no_world(error: RendezvousError) -> CliError {
    match error {
        RendezvousError::Settings(_)
        | RendezvousError::Port { .. }
        | RendezvousError::NotACoordinator { .. }
        | RendezvousError::Token { .. }
        | RendezvousError::Refused { .. } => CliError::refused(error),
        RendezvousError::Missing(_) | RendezvousError::Unreachable { .. } | RendezvousError::GivenUp(_) => {
            CliError::Interrupted(error.to_string())
        }
        RendezvousError::Lost { .. } => CliError::Lost(error.to_string()),
        RendezvousError::Collective(error) => error.into(),
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
        // The stage that needs most.
        let stages = run_file.stages().ok()?;
        let most = |of: &dyn Fn(&Settings) -> usize| stages.iter().map(|stage| of(&stage.settings)).max().unwrap_or(1);
        let workload = Workload {
            context: most(&|settings| settings.agent.max_tokens),
            sequences: most(&|settings| settings.rl.tasks_per_step * settings.rl.group_size),
            engine_sequences: most(&|settings| settings.engine.max_sequences),
            recompute: stages.iter().all(|stage| stage.settings.step.recompute),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::{CollectiveError, Failure};

    #[test]
    fn a_loss_while_ranks_meet_can_be_restarted_and_a_rank_that_stays_away_cannot() {
        let gone = CollectiveError { rank: 3, host: "n3".into(), failure: Failure::Gone, reason: "its process ended".into() };
        let lost = RendezvousError::Lost { coordinator: "n0:29600".into(), problem: "it closed the connection".into() };
        assert!(matches!(no_world(gone.into()), CliError::Lost(_)));
        assert!(matches!(no_world(lost), CliError::Lost(_)));
        assert!(matches!(no_world(RendezvousError::Missing("rank 3".into())), CliError::Interrupted(_)));
    }

    #[test]
    fn what_is_wrong_on_this_node_is_told_before_what_comes_of_it() {
        let told = |problems: [CliError; 3]| together(problems.map(Err).into()).err().expect("a problem").to_string();
        let [given_up, lost, refused] = [
            || CliError::Interrupted("rank 1 cannot come".into()),
            || CliError::Lost("rank 0 is gone".into()),
            || CliError::Refused("port 29601 is taken".into()),
        ];
        assert_eq!(told([given_up(), lost(), refused()]), "port 29601 is taken");
        assert_eq!(told([given_up(), lost(), given_up()]), "rank 0 is gone");
        assert!(together(Ranks::local(2, 60.0).into_iter().map(Ok).collect()).is_ok_and(|places| places.len() == 2));
    }
}
