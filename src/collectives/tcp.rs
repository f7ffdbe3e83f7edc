//! Ranks that are processes, on one host or several: one connection between any two ranks of a group, none shared by two groups.
//!
//! A call drives all its connections at once from the thread that makes it, so that no order of arrival can lock two ranks up;
//! what is not yet wanted stays in the sender's memory, by TCP's own flow control.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::control::Control;
use super::greeting::{self, Purpose, Reply, Request};
use super::health::{Health, Liveness, Wait};
use super::host::{HostCollectives, Incoming, Label, Outgoing, Transport};
use super::listener::Listener;
use super::local::mismatch;
use super::{CollectiveError, Failure, Operation, Reduction};
use crate::wire::HandshakeError;
use crate::wire::Token;

/// The collectives of one rank of a world of processes, from [`join`](super::join).
pub type TcpCollectives = HostCollectives<Tcp>;

/// What all groups of a rank share. With the last of them the rank says goodbye and closes its port.
pub(super) struct World {
    pub(super) rank: usize,
    pub(super) run_id: String,
    pub(super) token: Token,
    pub(super) liveness: Liveness,
    /// By rank, where its port is.
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) health: Arc<Health>,
    /// Neither in a world of one rank, which opens no port.
    pub(super) network: Option<(Control, Listener)>,
    /// How long a group may take to connect its ranks.
    pub(super) connect_within: Duration,
}

impl World {
    fn stop(&self, error: CollectiveError) -> CollectiveError {
        match &self.network {
            Some((control, _)) => control.stop(error),
            None => self.health.fail(error),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.stop(self.health.error(self.rank, Failure::Aborted, "its thread panicked"));
        }
    }
}

/// One rank's end of a group of processes.
pub struct Tcp {
    world: Arc<World>,
    name: String,
    /// In the world.
    ranks: Vec<usize>,
    rank: usize,
    /// By rank of the group; none to itself.
    links: Vec<Option<TcpStream>>,
}

/// Before each message: what it belongs to and its length.
const HEADER: usize = 16;
const MARK: u8 = 0xc0;
/// The most bytes handed to one connection before the next has its turn.
const TURN: usize = 1 << 20;
/// How often a call that waits looks whether the world has stopped.
const LOOK: Duration = Duration::from_millis(50);

fn header(label: Label, bytes: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    let reduction = match label.reduction {
        None => 0,
        Some(Reduction::Sum) => 1,
        Some(Reduction::Max) => 2,
    };
    header[..4].copy_from_slice(&[MARK, label.operation as u8, label.element, reduction]);
    header[8..].copy_from_slice(&(bytes as u64).to_le_bytes());
    header
}

/// The label and the length in a header that another rank has sent, if it is one.
fn read_header(header: &[u8; HEADER]) -> Option<(Label, usize)> {
    let [MARK, operation, element, reduction, 0, 0, 0, 0, length @ ..] = header else { return None };
    let operation = *Operation::ALL.get(usize::from(*operation))?;
    let element_name = ["u8", "u64", "bf16", "f32", "f64"].get(usize::from(*element).checked_sub(1)?)?;
    let reduction = *[None, Some(Reduction::Sum), Some(Reduction::Max)].get(usize::from(*reduction))?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    Some((Label { operation, element: *element, element_name, reduction }, length))
}

/// A message on its way to or from a rank of the group: its header, then its bytes.
struct Progress {
    peer: usize,
    header: [u8; HEADER],
    done: usize,
    whole: usize,
}

impl Progress {
    fn new(peer: usize, header: [u8; HEADER], bytes: usize) -> Progress {
        Progress { peer, header, done: 0, whole: HEADER + bytes }
    }
    fn is_done(&self) -> bool {
        self.done == self.whole
    }
}

/// The messages that may move now: of each peer the first that is not done.
fn movable(messages: &[Progress]) -> Vec<usize> {
    let first_of_its_peer = |&index: &usize| {
        let earlier = &messages[..index];
        !messages[index].is_done() && earlier.iter().all(|other| other.is_done() || other.peer != messages[index].peer)
    };
    (0..messages.len()).filter(first_of_its_peer).collect()
}

impl Tcp {
    /// Connects the ranks of a new group: each calls those before it and is called by those after it.
    pub(super) fn connect(world: Arc<World>, name: String, ranks: Vec<usize>, rank: usize) -> Result<Tcp, CollectiveError> {
        let deadline = Instant::now() + world.connect_within;
        let mut links = Vec::with_capacity(ranks.len());
        for (index, &peer) in ranks.iter().enumerate() {
            let link = match &world.network {
                Some((_, listener)) if index > rank => Some(world.called_by(listener, &name, peer, deadline)?),
                Some(_) if index < rank => Some(world.call(&name, peer, deadline)?),
                _ => None,
            };
            if let Some(link) = &link {
                let prepared = link.set_nodelay(true).and_then(|()| link.set_nonblocking(true));
                prepared.map_err(|error| world.lost(peer, &format!("cannot prepare its connection: {error}")))?;
            }
            links.push(link);
        }
        Ok(Tcp { world, name, ranks, rank, links })
    }

    fn link(&self, peer: usize) -> Result<&TcpStream, CollectiveError> {
        let missing = || self.world.health.error(self.ranks[peer], Failure::Misuse, "no connection leads to this rank");
        self.links[peer].as_ref().ok_or_else(missing)
    }

    /// Sends on, at most one turn. Whether bytes moved.
    fn write_some(&self, message: &mut Progress, bytes: &[u8]) -> Result<bool, CollectiveError> {
        let mut link = self.link(message.peer)?;
        let rest = match message.done.checked_sub(HEADER) {
            None => &message.header[message.done..],
            Some(done) => &bytes[done..bytes.len().min(done + TURN)],
        };
        self.moved(message.peer, link.write(rest)).inspect(|&count| message.done += count).map(|count| count > 0)
    }

    /// Receives on, at most one turn; a header that is whole must be of what this rank is at.
    fn read_some(&self, message: &mut Progress, bytes: &mut [u8], label: Label) -> Result<bool, CollectiveError> {
        let mut link = self.link(message.peer)?;
        let length = bytes.len();
        let room = match message.done.checked_sub(HEADER) {
            None => &mut message.header[message.done..],
            Some(done) => &mut bytes[done..length.min(done + TURN)],
        };
        let count = self.moved(message.peer, link.read(room))?;
        let in_header = message.done < HEADER;
        message.done += count;
        if in_header && message.done == HEADER {
            let expected = (label, length);
            let found = read_header(&message.header);
            if found != Some(expected) {
                let reason = match found {
                    Some(found) => mismatch(found, self.world.rank, expected),
                    None => format!("what it sends is no message: {:02x?}", message.header),
                };
                let peer = self.ranks[message.peer];
                return Err(self.world.stop(self.world.health.error(peer, Failure::Mismatch, reason)));
            }
        }
        Ok(count > 0)
    }

    /// Bytes moved on a connection that does not block.
    fn moved(&self, peer: usize, result: io::Result<usize>) -> Result<usize, CollectiveError> {
        match result {
            Ok(0) => Err(self.world.lost(self.ranks[peer], "it closed its connection")),
            Ok(count) => Ok(count),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
            Err(error) => Err(self.world.lost(self.ranks[peer], &format!("its connection broke: {error}"))),
        }
    }
}

impl World {
    /// The verdict on a rank whose connection ended. It may have closed it because it heard of another's death before this rank
    /// did: rank 0 has the word, and only if it says nothing is this rank's own finding told.
    fn lost(&self, rank: usize, finding: &str) -> CollectiveError {
        let verdict = self.health.wait_for_verdict(self.liveness.dead_after());
        verdict.unwrap_or_else(|| {
            let reason = format!("{finding} while rank {} needed it", self.rank);
            self.stop(self.health.error(rank, Failure::Gone, reason))
        })
    }

    fn called_by(&self, listener: &Listener, group: &str, peer: usize, deadline: Instant) -> Result<TcpStream, CollectiveError> {
        while Instant::now() < deadline {
            self.health.check()?;
            if let Some(link) = listener.link(group, peer, LOOK) {
                return Ok(link);
            }
        }
        let reason = format!("it has not connected to rank {} for {group} in {:?}", self.rank, self.connect_within);
        Err(self.stop(self.health.error(peer, Failure::Gone, reason)))
    }

    fn call(&self, group: &str, peer: usize, deadline: Instant) -> Result<TcpStream, CollectiveError> {
        let address = self.addresses[peer];
        let purpose = Purpose::Link { group: group.into() };
        let request = Request { run_id: self.run_id.clone(), rank: self.rank, purpose };
        let mut problem = String::from("no time was left");
        while Instant::now() < deadline {
            self.health.check()?;
            let patience = deadline.min(Instant::now() + Duration::from_secs(10));
            let answer = connect(address, patience).map_err(HandshakeError::from).and_then(|stream| {
                let reply = greeting::call(&stream, &self.token, &request, patience)?;
                Ok((stream, reply))
            });
            match answer {
                Ok((stream, Reply::Accepted)) => return Ok(stream),
                Ok((_, Reply::Refused(reason) | Reply::Full(reason))) => {
                    problem = reason;
                    break;
                }
                Err(error) => problem = error.to_string(),
            }
            std::thread::sleep(LOOK);
        }
        let reason = format!("rank {} cannot reach its port at {address}: {problem}", self.rank);
        Err(self.stop(self.health.error(peer, Failure::Gone, reason)))
    }
}

impl Transport for Tcp {
    fn ranks(&self) -> &[usize] {
        &self.ranks
    }
    fn rank(&self) -> usize {
        self.rank
    }
    #[expect(private_interfaces, reason = "only this room implements the trait")]
    fn health(&self) -> &Health {
        &self.world.health
    }
    fn name(&self) -> &str {
        &self.name
    }
    fn stop(&self, error: CollectiveError) {
        self.world.stop(error);
    }

    fn exchange(&self, label: Label, outgoing: &[Outgoing<'_>], incoming: &mut [Incoming]) -> Result<(), CollectiveError> {
        let send = |message: &Outgoing<'_>| Progress::new(message.to, header(label, message.bytes.len()), message.bytes.len());
        let receive = |message: &Incoming| Progress::new(message.from, [0; HEADER], message.bytes.len());
        let mut sending: Vec<Progress> = outgoing.iter().map(send).collect();
        let mut receiving: Vec<Progress> = incoming.iter().map(receive).collect();
        let mut waiting = None;
        let health = &self.world.health;
        loop {
            let mut moved = false;
            let (out, into) = (movable(&sending), movable(&receiving));
            for &index in &out {
                moved |= self.write_some(&mut sending[index], outgoing[index].bytes)?;
            }
            for &index in &into {
                moved |= self.read_some(&mut receiving[index], &mut incoming[index].bytes, label)?;
            }
            if moved {
                waiting = None;
                continue;
            }
            let first = into.first().map(|&index| &receiving[index]).or(out.first().map(|&index| &sending[index]));
            let Some(on) = first.map(|message| self.ranks[message.peer]) else { return Ok(()) };
            health.check()?;
            if waiting.as_ref().is_none_or(|(known, _)| *known != on) {
                let wait = Wait { on, operation: label.operation, since: Instant::now() };
                waiting = Some((on, health.waiting(self.world.rank, wait)));
            }
            let peers = |indices: &[usize], messages: &[Progress]| -> Result<Vec<&TcpStream>, CollectiveError> {
                indices.iter().map(|&index| self.link(messages[index].peer)).collect()
            };
            wait_ready(&peers(&into, &receiving)?, &peers(&out, &sending)?, LOOK);
        }
    }

    fn subgroup(&self, name: &str, ranks: &[usize]) -> Result<Tcp, CollectiveError> {
        let rank = ranks.iter().position(|&rank| rank == self.rank).unwrap_or_default();
        let in_world = ranks.iter().map(|&rank| self.ranks[rank]).collect();
        Tcp::connect(self.world.clone(), name.into(), in_world, rank)
    }
}

/// Opens a connection, at most until `deadline`.
pub(super) fn connect(address: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    let patience = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Waits until one of the connections can be read or written, at most so long. May return for no reason.
#[cfg(unix)]
fn wait_ready(readable: &[&TcpStream], writable: &[&TcpStream], at_most: Duration) {
    use rustix::event::{PollFd, PollFlags};
    let readable = readable.iter().map(|stream| PollFd::new(*stream, PollFlags::IN));
    let writable = writable.iter().map(|stream| PollFd::new(*stream, PollFlags::OUT));
    poll(&mut readable.chain(writable).collect::<Vec<_>>(), at_most);
}

#[cfg(unix)]
pub(super) fn wait_readable(listener: &std::net::TcpListener, at_most: Duration) {
    use rustix::event::{PollFd, PollFlags};
    poll(&mut [PollFd::new(listener, PollFlags::IN)], at_most);
}

#[cfg(unix)]
fn poll(descriptors: &mut [rustix::event::PollFd<'_>], at_most: Duration) {
    let timeout = rustix::event::Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: at_most.subsec_nanos().into() };
    if rustix::event::poll(descriptors, Some(&timeout)).is_err() {
        // Interrupted, or short of memory: the caller tries again.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(not(unix))]
fn wait_ready(_readable: &[&TcpStream], _writable: &[&TcpStream], _at_most: Duration) {
    std::thread::sleep(Duration::from_millis(1));
}

#[cfg(not(unix))]
pub(super) fn wait_readable(_listener: &std::net::TcpListener, _at_most: Duration) {
    std::thread::sleep(Duration::from_millis(1));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::Element;

    #[test]
    fn headers_come_back_and_garbage_does_not() {
        for operation in Operation::ALL {
            for reduction in [None, Some(Reduction::Sum), Some(Reduction::Max)] {
                let label = Label { operation, element: f32::CODE, element_name: f32::NAME, reduction };
                assert_eq!(read_header(&header(label, 12345)), Some((label, 12345)));
            }
        }
        for (code, name) in
            [(u8::CODE, u8::NAME), (u64::CODE, u64::NAME), (half::bf16::CODE, half::bf16::NAME), (f64::CODE, f64::NAME)]
        {
            let label = Label { operation: Operation::Send, element: code, element_name: name, reduction: None };
            assert_eq!(read_header(&header(label, 0)), Some((label, 0)));
        }
        assert_eq!(read_header(b"GET / HTTP/1.1\r\n"), None);
        let mut wrong = header(Label { operation: Operation::Send, element: 1, element_name: "u8", reduction: None }, 1);
        for (place, value) in [(0, 0), (1, 9), (2, 0), (2, 6), (3, 3), (4, 1), (7, 1)] {
            let kept = std::mem::replace(&mut wrong[place], value);
            assert_eq!(read_header(&wrong), None, "byte {place} is {value}");
            wrong[place] = kept;
        }
    }
}
