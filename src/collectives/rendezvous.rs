//! How the ranks of a world of processes find each other.
//!
//! Rank 0 is the coordinator: it listens at the coordinator's port, and rank r, on its own host, at that port + r, so that all
//! ports are known beforehand and can be let through a firewall. Every rank calls the coordinator until it answers, proves that it
//! knows the token, and waits. When all are there each gets the table of hosts, they connect to each other, and the world begins
//! with a barrier. If somebody is missing when the wait is over, all who came learn who.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::CollectiveError;
use super::control::Control;
pub use super::greeting::PROTOCOL;
use super::greeting::{self, Caller, Purpose, Reply, Request, read_frame};
use super::health::{Health, Liveness};
use super::host::barrier;
use super::listener::{Listener, Notice};
use super::tcp::{Tcp, TcpCollectives, World, connect};
use crate::wire::{HandshakeError, Token, write_frame};

/// Where and as whom a rank joins a world.
#[derive(Clone)]
pub struct Rendezvous {
    /// `HOST:PORT` of rank 0, as the other ranks reach it.
    pub coordinator: String,
    pub rank: usize,
    pub world_size: usize,
    /// The same on all ranks of a job, and of no other job.
    pub run_id: String,
    pub token: Token,
    /// The name of this host in messages.
    pub host: String,
    /// How long to wait for the other ranks.
    pub wait: Duration,
    pub liveness: Liveness,
    /// Takes a line about each connection that was refused.
    pub notice: Notice,
    /// Why another rank of this process cannot come, once one cannot: then there is nothing to wait for.
    pub given_up: Arc<OnceLock<String>>,
}

impl Rendezvous {
    fn check_given_up(&self) -> Result<(), RendezvousError> {
        self.given_up.get().map_or(Ok(()), |problem| Err(RendezvousError::GivenUp(problem.clone())))
    }
}

/// Why no world came about: one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    #[error("{0}")]
    Settings(String),
    #[error(
        "port {port} of this host cannot be opened for rank {rank} ({source}): if another job has it, give another --coordinator HOST:PORT"
    )]
    Port { rank: usize, port: u16, source: std::io::Error },
    #[error(
        "no coordinator answers at {coordinator} after {seconds:.0} s: {problem}; is rank 0 running, and does its firewall let the port through?"
    )]
    Unreachable { coordinator: String, seconds: f64, problem: String },
    #[error("what listens at {coordinator} is no coordinator: {problem}")]
    NotACoordinator { coordinator: String, problem: String },
    #[error("the coordinator at {coordinator} has another token than rank {rank}: give all ranks the same one")]
    Token { coordinator: String, rank: usize },
    #[error("the coordinator at {coordinator} refuses rank {rank}: {reason}")]
    Refused { coordinator: String, rank: usize, reason: String },
    /// The coordinator's line, on all ranks that came.
    #[error("{0}")]
    Missing(String),
    /// Another rank of this process cannot come.
    #[error("{0}")]
    GivenUp(String),
    #[error("the coordinator at {coordinator} is gone: {problem}")]
    Lost { coordinator: String, problem: String },
    #[error("{0}")]
    Collective(#[from] CollectiveError),
}

/// What the coordinator says to those who have joined, before the world begins.
#[derive(Debug, Serialize, Deserialize)]
enum Message {
    /// Others are still awaited.
    Waiting,
    /// All are there, by rank.
    Table(Vec<Member>),
    GiveUp(String),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Member {
    host: String,
    /// None: the coordinator's own host, under whichever address each rank knows it.
    address: Option<IpAddr>,
}

/// The coordinator says at least this often that it is still there.
const SIGN: Duration = Duration::from_millis(500);
/// A coordinator that has been silent for so long before the world began is gone.
const SILENCE: Duration = Duration::from_secs(20);
/// Between two calls to a coordinator that does not answer.
const AGAIN: Duration = Duration::from_millis(100);

/// Meets the other ranks. A world of one rank opens no port.
pub fn join(settings: &Rendezvous) -> Result<TcpCollectives, RendezvousError> {
    let (host, port) = check(settings)?;
    if settings.world_size == 1 {
        return Ok(TcpCollectives::new(world(settings, vec![], vec![settings.host.clone()], None)?));
    }
    if settings.rank == 0 { coordinate(settings, &host, port) } else { call(settings, port) }
}

/// This host's name, as the system knows it.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok().or_else(|| std::env::var("HOSTNAME").ok());
    name.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).unwrap_or_else(|| "unknown".into())
}

/// The coordinator's host and port; refuses what cannot be.
fn check(settings: &Rendezvous) -> Result<(String, u16), RendezvousError> {
    let Rendezvous { coordinator, rank, world_size, liveness, .. } = settings;
    let refused = |problem: String| Err(RendezvousError::Settings(problem));
    if rank >= world_size {
        return refused(format!("rank {rank} of a world of {world_size}: ranks count from 0"));
    }
    if let Err(problems) = liveness.check() {
        return refused(problems.0.first().map(ToString::to_string).unwrap_or_default());
    }
    let parts = coordinator.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    let (host, port) = match parts {
        Some((host, port)) if !host.is_empty() && port > 0 => (host, port),
        _ => return refused(format!("--coordinator {coordinator:?}: give HOST:PORT, for example node-0:29600")),
    };
    if usize::from(port) + world_size - 1 > usize::from(u16::MAX) {
        return refused(format!(
            "--coordinator {coordinator}: rank r listens at port {port} + r, which for {world_size} ranks passes 65535"
        ));
    }
    Ok((host.into(), port))
}

fn open(settings: &Rendezvous, host: &str, port: u16) -> Result<std::net::TcpListener, RendezvousError> {
    let port = port + settings.rank as u16;
    Listener::open(host, port).map_err(|source| RendezvousError::Port { rank: settings.rank, port, source })
}

/// The last step on all ranks: control connections by rank, the table, and all to all.
fn world(
    settings: &Rendezvous,
    addresses: Vec<SocketAddr>,
    hosts: Vec<String>,
    network: Option<(Vec<(usize, TcpStream)>, Listener)>,
) -> Result<Tcp, RendezvousError> {
    let Rendezvous { rank, world_size, liveness, .. } = *settings;
    let health = Health::new(hosts);
    let network = match network {
        Some((connections, listener)) => {
            let control = Control::start(rank, health.clone(), liveness, connections);
            let unable = |error| RendezvousError::Settings(format!("rank {rank} cannot start its heartbeats: {error}"));
            Some((control.map_err(unable)?, listener))
        }
        None => None,
    };
    let (run_id, token) = (settings.run_id.clone(), settings.token.clone());
    let connect_within = settings.wait.max(Duration::from_secs(5));
    let world = World { rank, run_id, token, liveness, addresses, health, network, connect_within };
    let tcp = Tcp::connect(world.into(), "world".into(), (0..world_size).collect(), rank)?;
    barrier(&tcp)?;
    Ok(tcp)
}

/// A rank that has come to the coordinator.
struct Arrival {
    stream: TcpStream,
    member: Member,
}

impl Arrival {
    /// One that waits says nothing: what can be read is the end of its connection.
    fn is_there(&self) -> bool {
        let looked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut [0]));
        let waits = looked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        waits && self.stream.set_nonblocking(false).is_ok()
    }
}

fn coordinate(settings: &Rendezvous, host: &str, port: u16) -> Result<TcpCollectives, RendezvousError> {
    let Rendezvous { world_size, run_id, token, notice, wait, .. } = settings;
    let (joins, callers) = mpsc::channel();
    let listening = open(settings, host, port)?;
    let listener = Listener::start(listening, run_id, token, Ok(joins), notice.clone())
        .map_err(|source| RendezvousError::Port { rank: 0, port, source })?;

    let deadline = Instant::now() + *wait;
    let mut arrivals: Vec<Option<Arrival>> = (0..*world_size).map(|_| None).collect();
    let mut signed = Instant::now();
    while arrivals[1..].iter().any(Option::is_none) {
        let now = Instant::now();
        let given_up = settings.check_given_up().err();
        let too_late = || (now >= deadline).then(|| RendezvousError::Missing(missing(settings, &arrivals)));
        if let Some(error) = given_up.or_else(too_late) {
            for arrival in arrivals.iter().flatten() {
                // One who does not hear it anymore has its own bound.
                let _ = write_frame(&arrival.stream, &Message::GiveUp(error.to_string()));
            }
            return Err(error);
        }
        let next = (signed + SIGN).min(deadline).saturating_duration_since(now);
        if let Ok(caller) = callers.recv_timeout(next) {
            admit(settings, caller, &mut arrivals);
        }
        // Also right before the world begins: who left meanwhile is awaited again.
        if signed.elapsed() >= SIGN || arrivals[1..].iter().all(Option::is_some) {
            signed = Instant::now();
            for (rank, place) in arrivals.iter_mut().enumerate() {
                let there = |arrival: &Arrival| arrival.is_there() && write_frame(&arrival.stream, &Message::Waiting).is_ok();
                if let Some(gone) = place.take_if(|arrival| !there(arrival)) {
                    (settings.notice)(&format!("rank {rank} (host {}) left before all ranks had come", gone.member.host));
                }
            }
        }
    }
    listener.refuse_joins(format!("run {run_id:?} has all its {world_size} ranks already"));

    let own = Member { host: settings.host.clone(), address: None };
    let others = arrivals.iter().flatten().map(|arrival| arrival.member.clone());
    let members: Vec<Member> = std::iter::once(own).chain(others).collect();
    let table = Message::Table(members.clone());
    let mut connections = Vec::new();
    for (rank, arrival) in arrivals.into_iter().enumerate() {
        let Some(Arrival { stream, .. }) = arrival else { continue };
        // A rank that has just gone is noticed, and named, as soon as its connection is watched.
        let _ = write_frame(&stream, &table);
        connections.push((rank, stream));
    }
    let hosts = members.into_iter().map(|member| member.host).collect();
    Ok(TcpCollectives::new(world(settings, vec![], hosts, Some((connections, listener)))?))
}

/// Gives a caller its place, or tells it why it has none.
fn admit(settings: &Rendezvous, caller: Caller, arrivals: &mut [Option<Arrival>]) {
    let rank = caller.request.rank;
    let Purpose::Join { world_size, host } = &caller.request.purpose else { return };
    let refusal = if *world_size != settings.world_size {
        Some(format!(
            "it counts {world_size} ranks, the coordinator {}: start all nodes with the same --nodes and --gpus-per-node",
            settings.world_size
        ))
    } else if rank == 0 || rank >= arrivals.len() {
        Some(format!("rank {rank} is the coordinator itself or outside of 0..{world_size}: look at --node-rank"))
    } else {
        let taken = arrivals[rank].as_ref().filter(|arrival| arrival.is_there());
        taken
            .map(|arrival| format!("rank {rank} is on host {} already: two nodes have the same --node-rank", arrival.member.host))
    };
    if let Some(reason) = refusal {
        (settings.notice)(&format!("rank {rank} on host {host} was refused: {reason}"));
        // If it has gone meanwhile, it needs no reply.
        let _ = caller.reply(&settings.token, &Reply::Refused(reason));
        return;
    }
    let address = caller.stream.peer_addr().map(|address| address.ip().to_canonical()).ok().filter(|ip| !ip.is_loopback());
    let timeout = caller.stream.set_write_timeout(Some(SIGN));
    if timeout.is_ok() && caller.reply(&settings.token, &Reply::Accepted).is_ok() {
        let member = Member { host: host.clone(), address };
        arrivals[rank] = Some(Arrival { stream: caller.stream, member });
    }
}

/// Who is missing, and who came.
fn missing(settings: &Rendezvous, arrivals: &[Option<Arrival>]) -> String {
    let missing: Vec<String> =
        (1..arrivals.len()).filter(|&rank| arrivals[rank].is_none()).map(|rank| rank.to_string()).collect();
    let mut line = format!(
        "of {} ranks, {} did not come to {} within {:.0} s: rank{} {}; came: rank 0 (host {})",
        settings.world_size,
        missing.len(),
        settings.coordinator,
        settings.wait.as_secs_f64(),
        if missing.len() == 1 { "" } else { "s" },
        missing.join(", "),
        settings.host
    );
    for (rank, arrival) in arrivals.iter().enumerate() {
        if let Some(arrival) = arrival {
            // Writing to a string cannot fail.
            let _ = write!(line, ", rank {rank} (host {})", arrival.member.host);
        }
    }
    line
}

fn call(settings: &Rendezvous, port: u16) -> Result<TcpCollectives, RendezvousError> {
    let Rendezvous { coordinator, rank, run_id, token, world_size, host, notice, .. } = settings;
    let request =
        Request { run_id: run_id.clone(), rank: *rank, purpose: Purpose::Join { world_size: *world_size, host: host.clone() } };
    let own_deadline = Instant::now() + settings.wait;
    let (mut listening, mut problem) = (None, String::from("no time was left"));
    let mut full_since = None;
    let (stream, coordinator_address) = loop {
        settings.check_given_up()?;
        if Instant::now() >= own_deadline {
            let seconds = settings.wait.as_secs_f64();
            return Err(RendezvousError::Unreachable { coordinator: coordinator.clone(), seconds, problem });
        }
        match reach(coordinator, own_deadline) {
            Ok(stream) => {
                let address = stream.peer_addr().map_or(IpAddr::from([127, 0, 0, 1]), |address| address.ip());
                // Before it joins, a rank can be called.
                if listening.is_none() {
                    let listener = open(settings, &address.to_string(), port)?;
                    let nobody = Err(format!("rank {rank} listens here; the coordinator is {coordinator}"));
                    let started = Listener::start(listener, run_id, token, nobody, notice.clone());
                    let port = port + *rank as u16;
                    listening = Some(started.map_err(|source| RendezvousError::Port { rank: *rank, port, source })?);
                }
                match greeting::call(&stream, token, &request, own_deadline.min(Instant::now() + SILENCE)) {
                    Ok(Reply::Accepted) => break (stream, address),
                    // This rank may be back before the coordinator has noticed that the run has to begin again.
                    Ok(Reply::Full(_)) if full_since.get_or_insert_with(Instant::now).elapsed() < settings.liveness.ending() => {}
                    Ok(Reply::Refused(reason) | Reply::Full(reason)) => {
                        return Err(RendezvousError::Refused { coordinator: coordinator.clone(), rank: *rank, reason });
                    }
                    Err(HandshakeError::Token(_)) => {
                        return Err(RendezvousError::Token { coordinator: coordinator.clone(), rank: *rank });
                    }
                    Err(HandshakeError::Io(error)) => problem = error.to_string(),
                    Err(error) => {
                        let problem = error.to_string();
                        return Err(RendezvousError::NotACoordinator { coordinator: coordinator.clone(), problem });
                    }
                }
            }
            Err(error) => problem = error.to_string(),
        }
        std::thread::sleep(AGAIN.min(own_deadline.saturating_duration_since(Instant::now())));
    };
    // The coordinator has its own bound, and says who is missing then.
    let members = loop {
        settings.check_given_up()?;
        match read_frame(&stream, Some(Instant::now() + SILENCE)) {
            Ok(Message::Waiting) => {}
            Ok(Message::Table(members)) if members.len() == *world_size => break members,
            Ok(Message::Table(members)) => {
                let problem = format!("its table has {} ranks, not {world_size}", members.len());
                return Err(RendezvousError::NotACoordinator { coordinator: coordinator.clone(), problem });
            }
            Ok(Message::GiveUp(line)) => return Err(RendezvousError::Missing(line)),
            Err(error) => {
                return Err(RendezvousError::Lost { coordinator: coordinator.clone(), problem: error.to_string() });
            }
        }
    };
    let address =
        |(rank, member): (usize, &Member)| SocketAddr::new(member.address.unwrap_or(coordinator_address), port + rank as u16);
    let addresses = members.iter().enumerate().map(address).collect();
    let hosts = members.into_iter().map(|member| member.host).collect();
    let network = listening.map(|listener| (vec![(0, stream)], listener));
    Ok(TcpCollectives::new(world(settings, addresses, hosts, network)?))
}

/// A connection to the first of the coordinator's addresses that takes one.
fn reach(coordinator: &str, deadline: Instant) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(ErrorKind::NotFound, "its name has no address");
    for address in coordinator.to_socket_addrs()? {
        match connect(address, deadline.min(Instant::now() + Duration::from_secs(5))) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
