//! Servers that sample for models which do not fit one device: started, watched, fed with weights and stopped by the learner.
//!
//! ```text
//! settings   the [rollout] section; a command from it for each server
//! watch      one thread a server: start -> ready -> load, and again from the start when it has died
//! process    the learner's side of a server's keeper        keeper   the process between learner and server
//! protocol   health, loading, versions, in the server's own words     http   the client for it
//! weights    a directory and the name of its version
//! ```
//!
//! The trainer on a node that samples on servers calls, in this order:
//!
//! ```text
//! Servers::start(settings, place, weights, notice)   once; returns at once
//! ensure_started                                     before the first rollout
//! load_weights                                       after each optimizer step, with the directory just written
//! addresses                                          for the engine that asks for tokens
//! stop, or drop                                      at the end
//! ```
//!
//! **Versions.** A server counts as ready only with the weights of the last call: one that is restarted starts from the newest
//! directory, which must therefore stay until the next call has returned.
//!
//! **Several nodes.** A `Servers` is about one node's servers. On every node that serves, its process makes the same calls with the
//! directory on a file system that all nodes see, and the addresses are gathered over the ranks.

mod http;
mod keeper;
mod process;
mod protocol;
mod settings;
mod watch;
mod weights;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub use keeper::{keeper_if_asked, own_program};
pub use settings::{ServerKind, Settings};
pub use weights::Weights;

/// How often those who wait for servers ask whether to go on waiting.
const TICK: Duration = Duration::from_millis(100);

/// Where servers run.
#[derive(Clone, Debug)]
pub struct Place {
    /// The learner's program, see [`own_program`]: it keeps every server.
    pub program: PathBuf,
    /// Under which other nodes reach this one; servers listen there and nowhere else.
    pub host: String,
    /// Number of the node in the job.
    pub node: usize,
    pub gpus: usize,
    /// The folder of the servers' output, `NODE-PORT.log` for each; `runs/NAME/servers`.
    pub logs: PathBuf,
}

/// Why servers cannot be had. Each is one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServersError {
    #[error("{0}")]
    Settings(String),
    #[error("{}: {reason}", directory.display())]
    Directory { directory: PathBuf, reason: String },
    #[error("{}: {reason}", path.display())]
    File { path: PathBuf, reason: String },
    /// A server is given up.
    #[error("server {address}: {reason}")]
    GivenUp { address: String, reason: String },
    /// Whoever waited has asked to stop, or the servers were stopped.
    #[error("stopped while waiting for servers")]
    Stopped,
}

/// Something that happened to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// `host:port`.
    pub address: String,
    /// One line.
    pub text: String,
    /// Something went wrong.
    pub trouble: bool,
}

/// Called from the servers' threads.
pub type OnNotice = Arc<dyn Fn(&Notice) + Send + Sync>;

/// How a server came to new weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// `host:port`.
    pub address: String,
    /// From the call to the server being ready again.
    pub seconds: f64,
    pub bytes: u64,
    /// It could not load them in place, and was started again with them.
    pub restarted: bool,
    /// It said that it has this version.
    pub verified: bool,
}

/// The servers of this node.
pub struct Servers {
    board: Arc<Board>,
    addresses: Vec<String>,
    threads: Vec<JoinHandle<()>>,
}

/// What servers' threads and the caller know of each other.
struct Board {
    state: Mutex<BoardState>,
    changed: Condvar,
}

struct BoardState {
    /// What every server should have, and how many times that has changed.
    weights: Weights,
    generation: u64,
    stop: bool,
    servers: Vec<ServerState>,
}

#[derive(Clone, Debug, PartialEq)]
enum ServerState {
    NotReady,
    /// Answers, with the weights of a generation.
    Ready {
        generation: u64,
        loaded: Loaded,
    },
    GivenUp(String),
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, BoardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, BoardState>, at_most: Duration) -> MutexGuard<'a, BoardState> {
        self.changed.wait_timeout(state, at_most).unwrap_or_else(PoisonError::into_inner).0
    }

    fn set(&self, server: usize, state: ServerState) {
        self.lock().servers[server] = state;
        self.changed.notify_all();
    }

    fn stopped(&self) -> bool {
        self.lock().stop
    }
}

impl Servers {
    /// Starts this node's servers with their first weights, one for every `tensor_parallel` GPUs. `on_notice` hears of everything that
    /// happens to them.
    ///
    /// # Errors
    /// [`ServersError::Settings`] for combinations that cannot be, [`ServersError::File`] when there is no place for the output.
    /// Whatever goes wrong with a server itself is told by the calls that wait for it.
    pub fn start(settings: &Settings, place: &Place, weights: Weights, on_notice: OnNotice) -> Result<Servers, ServersError> {
        let plans = watch::plans(settings, place, &std::env::var("CUDA_VISIBLE_DEVICES").ok()).map_err(ServersError::Settings)?;
        let problem = |error: std::io::Error| ServersError::File { path: place.logs.clone(), reason: error.to_string() };
        std::fs::create_dir_all(&place.logs).map_err(problem)?;
        let addresses: Vec<String> = plans.iter().map(|plan| plan.address.clone()).collect();
        let servers = vec![ServerState::NotReady; plans.len()];
        let state = BoardState { weights, generation: 0, stop: false, servers };
        let board = Arc::new(Board { state: Mutex::new(state), changed: Condvar::new() });
        let mut servers = Servers { board, addresses, threads: Vec::new() };
        for (index, plan) in plans.into_iter().enumerate() {
            let watcher = watch::Watcher::new(index, plan, settings, place, &servers.board, &on_notice);
            let builder = std::thread::Builder::new().name(format!("server {index}"));
            // An error leaves through `drop`, which ends those that have started.
            servers.threads.push(builder.spawn(move || watcher.watch()).map_err(problem)?);
        }
        Ok(servers)
    }

    /// The commands that [`Servers::start`] would run, with the environment that it would set, for people.
    ///
    /// # Errors
    /// [`ServersError::Settings`] as in [`Servers::start`].
    pub fn commands(settings: &Settings, place: &Place, weights: &Weights) -> Result<Vec<String>, ServersError> {
        let plans = watch::plans(settings, place, &std::env::var("CUDA_VISIBLE_DEVICES").ok()).map_err(ServersError::Settings)?;
        let line = |plan: &watch::Plan| {
            let job = plan.job(settings, place, weights);
            let environment = job.environment.iter().map(|(name, value)| format!("{name}={value}"));
            environment.chain(job.command).collect::<Vec<_>>().join(" ")
        };
        Ok(plans.iter().map(line).collect())
    }

    /// Waits until all servers answer with the newest weights, however they got them. `give_up` is asked while waiting.
    ///
    /// # Errors
    /// [`ServersError::GivenUp`] for a server that died while it was started for the first time or too often later;
    /// [`ServersError::Stopped`] when `give_up` said so.
    pub fn ensure_started(&self, give_up: &dyn Fn() -> bool) -> Result<Vec<Loaded>, ServersError> {
        let mut state = self.board.lock();
        loop {
            if let Some(error) = self.given_up_in(&state) {
                return Err(error);
            }
            let current = |server: &ServerState| match server {
                ServerState::Ready { generation, loaded } if *generation == state.generation => Some(loaded.clone()),
                _ => None,
            };
            if let Some(loaded) = state.servers.iter().map(current).collect() {
                return Ok(loaded);
            }
            if state.stop {
                return Err(ServersError::Stopped);
            }
            state = self.board.wait(state, TICK);
            drop(state);
            if give_up() {
                return Err(ServersError::Stopped);
            }
            state = self.board.lock();
        }
    }

    /// Gives all servers new weights, at the same time, and waits until each of them is ready with these. One that fails to load
    /// them within `load_seconds` is started again with them.
    ///
    /// # Errors
    /// As [`Servers::ensure_started`].
    pub fn load_weights(&self, weights: Weights, give_up: &dyn Fn() -> bool) -> Result<Vec<Loaded>, ServersError> {
        {
            let mut state = self.board.lock();
            state.weights = weights;
            state.generation += 1;
        }
        self.board.changed.notify_all();
        self.ensure_started(give_up)
    }

    /// `host:port` of those that answer now with the newest weights. A server that is being restarted is missing until it is ready.
    pub fn addresses(&self) -> Vec<String> {
        let state = self.board.lock();
        let current =
            |server: &ServerState| matches!(server, ServerState::Ready { generation, .. } if *generation == state.generation);
        let servers = state.servers.iter().zip(&self.addresses);
        servers.filter(|(server, _)| current(server)).map(|(_, address)| address.clone()).collect()
    }

    /// The reason of the first server that is given up, if one is.
    pub fn given_up(&self) -> Option<ServersError> {
        self.given_up_in(&self.board.lock())
    }

    fn given_up_in(&self, state: &BoardState) -> Option<ServersError> {
        state.servers.iter().zip(&self.addresses).find_map(|(server, address)| match server {
            ServerState::GivenUp(reason) => Some(ServersError::GivenUp { address: address.clone(), reason: reason.clone() }),
            _ => None,
        })
    }

    /// Ends all servers and waits for their end, which takes `stop_seconds` and ten seconds more at most.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.board.lock().stop = true;
        self.board.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that has panicked has dropped its process, which ends the server.
            let _ = thread.join();
        }
    }
}
