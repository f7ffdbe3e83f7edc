//! Which node of how many this process is, and where the coordinator listens.
//!
//! The same command is started once on every node. What it does not say in flags comes from variables: `LEARNER_*` first, then
//! those of the launcher that started this very process. The innermost goes first, for `torchrun` may run under Slurm, and `mpirun`
//! in a batch script. Nothing is read here but the map that is given.

use std::collections::BTreeMap;

use super::nodelist::first_host;
use crate::wire::Token;

/// Where rank 0 listens if nothing else is said; rank r listens at this port + r.
pub const DEFAULT_PORT: u16 = 29_600;

/// The flags of the command line that say where this process stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// `--nodes`
    pub nodes: Option<usize>,
    /// `--node-rank`
    pub node_rank: Option<usize>,
    /// `--coordinator HOST:PORT`, or HOST alone
    pub coordinator: Option<String>,
    /// `--gpus-per-node`
    pub gpus_per_node: Option<usize>,
    /// `parallel.port` of the run file: the coordinator's port where nothing else names one.
    pub port: Option<u16>,
}

/// Who started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    Torchrun,
    OpenMpi,
    Slurm,
    /// An indexed Job, or one of a JobSet.
    Kubernetes,
    /// `RANK`, `WORLD_SIZE` and `MASTER_ADDR`, as operators for PyTorch set them for each pod.
    PyTorchVariables,
    /// Nobody known: flags and `LEARNER_*` alone.
    None,
}

impl Launcher {
    pub fn name(self) -> &'static str {
        match self {
            Launcher::Torchrun => "torchrun",
            Launcher::OpenMpi => "OpenMPI",
            Launcher::Slurm => "Slurm",
            Launcher::Kubernetes => "Kubernetes",
            Launcher::PyTorchVariables => "PyTorch variables",
            Launcher::None => "none",
        }
    }
}

/// A value and where it was found: a flag, a variable, or a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found<T> {
    pub value: T,
    pub from: String,
}

/// This process among those of all nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    pub launcher: Launcher,
    pub nodes: Found<usize>,
    pub node_rank: Found<usize>,
    /// `HOST:PORT`. None in a world of one node.
    pub coordinator: Option<Found<String>>,
    /// None: as many as the device finds, or one rank on the CPU.
    pub gpus_per_node: Option<Found<usize>>,
    /// What no other job has. None: nothing was found, and the port alone tells jobs apart.
    pub run_id: Option<Found<String>>,
    pub token: Option<Found<Token>>,
}

impl Launch {
    /// Ranks of all nodes.
    pub fn world_size(&self, devices_per_node: usize) -> usize {
        self.nodes.value * devices_per_node
    }

    /// The rank of one of this node's devices: those of a node follow each other.
    pub fn rank(&self, device: usize, devices_per_node: usize) -> usize {
        self.node_rank.value * devices_per_node + device
    }
}

/// What the flags and variables leave open, or where they contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    #[error("{name}={found:?}: {expected}")]
    Unreadable { name: String, found: String, expected: &'static str },
    #[error(
        "{launcher} starts {processes} processes on a node: start one per node ({remedy}); it drives all of the node's devices"
    )]
    ManyPerNode { launcher: &'static str, processes: usize, remedy: &'static str },
    #[error("{nodes} nodes ({from}), but nothing says {what}: {remedy}")]
    Missing { nodes: usize, from: String, what: &'static str, remedy: &'static str },
    #[error("{launcher} says which node this is, but not of how many: give --nodes N or set LEARNER_NODES")]
    NodesUnknown { launcher: &'static str },
    #[error("node rank {rank} ({rank_from}) of {nodes} nodes ({nodes_from}): ranks count from 0")]
    OutOfRange { rank: usize, rank_from: String, nodes: usize, nodes_from: String },
    #[error("LEARNER_TOKEN: {0}")]
    Token(String),
}

/// Reads where this process stands from the flags and from `variables`, by name.
pub fn describe(flags: &Flags, variables: &BTreeMap<String, String>) -> Result<Launch, LaunchError> {
    let variables = Variables(variables);
    let launcher = variables.launcher();
    let told = variables.told_by(launcher)?;

    let nodes = flag("--nodes", flags.nodes).or(variables.count("LEARNER_NODES")?).or(told.nodes);
    let nodes = match nodes {
        Some(nodes) => nodes,
        // Else each pod of a job would train alone.
        None if told.node_rank.is_some() => return Err(LaunchError::NodesUnknown { launcher: launcher.name() }),
        None => found(1, "nothing says otherwise"),
    };
    let node_rank = flag("--node-rank", flags.node_rank).or(variables.number("LEARNER_NODE_RANK")?).or(told.node_rank);
    let alone = nodes.value == 1;
    let node_rank = match node_rank {
        // One node on request: whatever started it among others.
        None => missing(alone, &nodes, "which of them this one is", told.rank_remedy)?,
        Some(_) if alone && flags.nodes.is_some() && flags.node_rank.is_none() => found(0, "the only node"),
        Some(rank) => rank,
    };
    if node_rank.value >= nodes.value {
        let (rank, rank_from) = (node_rank.value, node_rank.from);
        return Err(LaunchError::OutOfRange { rank, rank_from, nodes: nodes.value, nodes_from: nodes.from });
    }
    let coordinator = flag("--coordinator", flags.coordinator.clone()).or(variables.text("LEARNER_COORDINATOR"));
    let coordinator = match coordinator.or(told.coordinator).map(|coordinator| with_port(coordinator, flags.port)) {
        _ if alone => None,
        None => missing(false, &nodes, "where rank 0 listens", told.coordinator_remedy).map(|_| None)?,
        coordinator => coordinator,
    };
    // Each of them would take itself for the node; `--nodes 1` says that this one shall.
    if let Some(processes) = told.processes_per_node.filter(|&processes| processes > 1 && flags.nodes != Some(1)) {
        let remedy = told.one_per_node;
        return Err(LaunchError::ManyPerNode { launcher: launcher.name(), processes, remedy });
    }
    let gpus_per_node =
        flag("--gpus-per-node", flags.gpus_per_node).or(variables.count("LEARNER_GPUS_PER_NODE")?).or(told.gpus_per_node);
    let run_id = variables.text("LEARNER_RUN_ID").or(told.run_id);
    let token = match variables.text("LEARNER_TOKEN") {
        Some(token) => Some(Found { value: Token::new(&token.value).map_err(LaunchError::Token)?, from: token.from }),
        None => None,
    };
    Ok(Launch { launcher, nodes, node_rank, coordinator, gpus_per_node, run_id, token })
}

fn found<T>(value: T, from: impl Into<String>) -> Found<T> {
    Found { value, from: from.into() }
}

fn flag<T>(name: &str, value: Option<T>) -> Option<Found<T>> {
    value.map(|value| found(value, name))
}

fn missing(alone: bool, nodes: &Found<usize>, what: &'static str, remedy: &'static str) -> Result<Found<usize>, LaunchError> {
    match alone {
        true => Ok(found(0, "the only node")),
        false => Err(LaunchError::Missing { nodes: nodes.value, from: nodes.from.clone(), what, remedy }),
    }
}

/// Adds the run file's port, or the default, to a host without one.
fn with_port(coordinator: Found<String>, port: Option<u16>) -> Found<String> {
    let Found { value, from } = coordinator;
    let after_address = value.rsplit_once(']').map_or(value.as_str(), |(_, after)| after);
    if after_address.contains(':') {
        return Found { value, from };
    }
    let (port, port_from) = match port {
        Some(port) if port != DEFAULT_PORT => (port, "parallel.port"),
        _ => (DEFAULT_PORT, "default port"),
    };
    Found { value: format!("{value}:{port}"), from: format!("{from}, {port_from}") }
}

/// What a launcher says.
struct Told {
    nodes: Option<Found<usize>>,
    node_rank: Option<Found<usize>>,
    /// What to do where there is none.
    rank_remedy: &'static str,
    coordinator: Option<Found<String>>,
    coordinator_remedy: &'static str,
    processes_per_node: Option<usize>,
    one_per_node: &'static str,
    gpus_per_node: Option<Found<usize>>,
    run_id: Option<Found<String>>,
}

impl Default for Told {
    fn default() -> Told {
        Told {
            nodes: None,
            node_rank: None,
            rank_remedy: "give --node-rank R, from 0, on each node",
            coordinator: None,
            coordinator_remedy: "give --coordinator HOST:PORT, the host of node rank 0",
            processes_per_node: None,
            one_per_node: "",
            gpus_per_node: None,
            run_id: None,
        }
    }
}

struct Variables<'a>(&'a BTreeMap<String, String>);

impl Variables<'_> {
    /// The value of a variable that is set to something.
    fn text(&self, name: &str) -> Option<Found<String>> {
        let value = self.0.get(name)?.trim();
        (!value.is_empty()).then(|| found(value.to_owned(), name))
    }

    fn has(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    fn number(&self, name: &str) -> Result<Option<Found<usize>>, LaunchError> {
        let Some(Found { value, from }) = self.text(name) else { return Ok(None) };
        match value.parse() {
            Ok(number) => Ok(Some(Found { value: number, from })),
            Err(_) => Err(LaunchError::Unreadable { name: from, found: value, expected: "a number is expected" }),
        }
    }

    /// A number that is not 0.
    fn count(&self, name: &str) -> Result<Option<Found<usize>>, LaunchError> {
        match self.number(name)? {
            Some(Found { value: 0, from }) => {
                Err(LaunchError::Unreadable { name: from, found: "0".into(), expected: "at least 1 is expected" })
            }
            count => Ok(count),
        }
    }

    /// The innermost launcher whose variables are there.
    fn launcher(&self) -> Launcher {
        if self.has("TORCHELASTIC_RUN_ID") && self.has("GROUP_RANK") {
            Launcher::Torchrun
        } else if self.has("OMPI_COMM_WORLD_RANK") {
            Launcher::OpenMpi
        } else if self.has("SLURM_JOB_ID") {
            Launcher::Slurm
        } else if self.has("JOB_COMPLETION_INDEX") {
            Launcher::Kubernetes
        } else if self.has("RANK") && self.has("WORLD_SIZE") {
            Launcher::PyTorchVariables
        } else {
            Launcher::None
        }
    }

    fn told_by(&self, launcher: Launcher) -> Result<Told, LaunchError> {
        match launcher {
            Launcher::Torchrun => self.told_by_torchrun(),
            Launcher::OpenMpi => self.told_by_open_mpi(),
            Launcher::Slurm => self.told_by_slurm(),
            Launcher::Kubernetes => self.told_by_kubernetes(),
            Launcher::PyTorchVariables => self.told_by_pytorch_variables(),
            Launcher::None => Ok(Told::default()),
        }
    }

    fn told_by_torchrun(&self) -> Result<Told, LaunchError> {
        Ok(Told {
            nodes: self.count("GROUP_WORLD_SIZE")?,
            node_rank: self.number("GROUP_RANK")?,
            // MASTER_PORT is where torchrun's own store listens: only the host is ours to use.
            coordinator: self.text("MASTER_ADDR"),
            processes_per_node: self.count("LOCAL_WORLD_SIZE")?.map(|processes| processes.value),
            one_per_node: "torchrun --nproc-per-node 1",
            run_id: self.text("TORCHELASTIC_RUN_ID").filter(|run_id| run_id.value != "none"),
            ..Told::default()
        })
    }

    fn told_by_open_mpi(&self) -> Result<Told, LaunchError> {
        let local = self.count("OMPI_COMM_WORLD_LOCAL_SIZE")?.map(|processes| processes.value);
        Ok(Told {
            nodes: self.count("OMPI_COMM_WORLD_SIZE")?,
            node_rank: self.number("OMPI_COMM_WORLD_RANK")?,
            coordinator: self.master()?,
            coordinator_remedy: "OpenMPI names no hosts: give --coordinator HOST:PORT, the host of rank 0, or mpirun -x MASTER_ADDR=HOST",
            processes_per_node: local,
            one_per_node: "mpirun --map-by ppr:1:node",
            run_id: self.text("SLURM_JOB_ID").or(self.text("PBS_JOBID")),
            ..Told::default()
        })
    }

    fn told_by_slurm(&self) -> Result<Told, LaunchError> {
        let told = Told { gpus_per_node: self.slurm_gpus()?, run_id: self.text("SLURM_JOB_ID"), ..Told::default() };
        let Some(nodes) = self.count("SLURM_STEP_NUM_NODES")? else {
            // The batch script itself is one process, however many nodes the job has.
            let nodes = self.count("SLURM_JOB_NUM_NODES")?.or(self.count("SLURM_NNODES")?);
            let rank_remedy = "start it with srun, or give --nodes 1 to use this node alone";
            return Ok(Told { nodes, rank_remedy, ..told });
        };
        let tasks = self.count("SLURM_STEP_NUM_TASKS")?;
        let list = self.text("SLURM_STEP_NODELIST").or(self.text("SLURM_JOB_NODELIST"));
        let coordinator = match list {
            Some(Found { value, from }) => match first_host(&value) {
                Some(host) => Some(found(host, format!("first host of {from}"))),
                None => {
                    return Err(LaunchError::Unreadable { name: from, found: value, expected: "a list of hosts is expected" });
                }
            },
            None => None,
        };
        Ok(Told {
            processes_per_node: tasks.map(|tasks| tasks.value.div_ceil(nodes.value)),
            nodes: Some(nodes),
            // Counts nodes in the order of the list, whose first host is the coordinator's.
            node_rank: self.number("SLURM_NODEID")?,
            coordinator,
            coordinator_remedy: "give --coordinator HOST:PORT, the first host of the job step",
            one_per_node: "srun --ntasks-per-node=1",
            ..told
        })
    }

    /// `8` or `h100:8`.
    fn slurm_gpus(&self) -> Result<Option<Found<usize>>, LaunchError> {
        if let Some(gpus) = self.count("SLURM_GPUS_ON_NODE")? {
            return Ok(Some(gpus));
        }
        let Some(Found { value, from }) = self.text("SLURM_GPUS_PER_NODE") else { return Ok(None) };
        let number = value.rsplit(':').next().and_then(|number| number.parse::<usize>().ok()).filter(|&number| number > 0);
        match number {
            Some(number) => Ok(Some(found(number, from))),
            None => Err(LaunchError::Unreadable { name: from, found: value, expected: "a number of GPUs is expected" }),
        }
    }

    fn told_by_kubernetes(&self) -> Result<Told, LaunchError> {
        Ok(Told {
            // Kubernetes tells a pod its index, but not of how many.
            nodes: self.count("WORLD_SIZE")?,
            node_rank: self.number("JOB_COMPLETION_INDEX")?,
            coordinator: self.master()?,
            coordinator_remedy: "set LEARNER_COORDINATOR to the stable name of pod 0, of a JobSet NAME-JOB-0-0.NAME",
            run_id: self.text("JOBSET_NAME"),
            ..Told::default()
        })
    }

    fn told_by_pytorch_variables(&self) -> Result<Told, LaunchError> {
        Ok(Told {
            nodes: self.count("WORLD_SIZE")?,
            node_rank: self.number("RANK")?,
            coordinator: self.master()?,
            coordinator_remedy: "set MASTER_ADDR to the host of rank 0",
            processes_per_node: self.count("LOCAL_WORLD_SIZE")?.map(|processes| processes.value),
            one_per_node: "one process per pod",
            ..Told::default()
        })
    }

    fn master(&self) -> Result<Option<Found<String>>, LaunchError> {
        let port = self.count("MASTER_PORT")?;
        Ok(self.text("MASTER_ADDR").map(|host| match port {
            Some(port) => found(format!("{}:{}", host.value, port.value), format!("{} and {}", host.from, port.from)),
            None => host,
        }))
    }
}
