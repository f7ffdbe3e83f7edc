//! Ranks that are threads of one process.
//!
//! A sender waits until its message has been taken, as on a network without buffers: an order of calls that could lock up a
//! cluster locks up here, at the first try, and is named.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::health::{Health, Wait};
use super::host::{HostCollectives, Incoming, Label, Outgoing, Transport};
use super::rendezvous::host_name;
use super::{CollectiveError, Failure};

/// The collectives of one thread of a world of threads.
pub type LocalCollectives = HostCollectives<Local>;

/// The places of a world of threads, by rank; each thread takes one. A rank for which others have waited `stall_seconds` is
/// taken for hung. One that panics while it holds its place stops the world.
pub fn local_world(ranks: usize, stall_seconds: f64) -> Vec<LocalCollectives> {
    let world = Arc::new(World {
        health: Health::new(vec![host_name(); ranks]),
        stall: Duration::try_from_secs_f64(stall_seconds).unwrap_or(Duration::MAX),
        mailboxes: Mutex::default(),
    });
    let place = |rank| {
        let seat = Arc::new(Seat { world: world.clone(), rank });
        HostCollectives::new(Local::new(seat, "world".into(), (0..ranks).collect(), rank))
    };
    (0..ranks).map(place).collect()
}

struct World {
    health: Arc<Health>,
    stall: Duration,
    /// By the name of their group, as long as one of its ranks has it.
    mailboxes: Mutex<BTreeMap<String, Weak<Mailbox>>>,
}

/// A rank in the world. All its groups hold it; with the last of them the rank leaves.
struct Seat {
    world: Arc<World>,
    rank: usize,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let health = &self.world.health;
        if std::thread::panicking() {
            health.fail(health.error(self.rank, Failure::Aborted, "its thread panicked"));
        }
        health.leave(self.rank);
    }
}

/// What the ranks of a group have sent each other.
#[derive(Default)]
struct Mailbox {
    /// By sender and receiver.
    queues: Mutex<BTreeMap<(usize, usize), Queue>>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<(Label, Vec<u8>)>,
    sent: u64,
    taken: u64,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(usize, usize), Queue>> {
        // Queues are whole at every moment.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How often a thread that waits looks whether the world has stopped.
const LOOK: Duration = Duration::from_millis(20);

/// One rank's end of a group of threads.
pub struct Local {
    seat: Arc<Seat>,
    name: String,
    ranks: Vec<usize>,
    rank: usize,
    mailbox: Arc<Mailbox>,
}

impl Local {
    fn new(seat: Arc<Seat>, name: String, ranks: Vec<usize>, rank: usize) -> Local {
        let mut mailboxes = seat.world.mailboxes.lock().unwrap_or_else(PoisonError::into_inner);
        mailboxes.retain(|_, mailbox| mailbox.strong_count() > 0);
        let mailbox = mailboxes.get(&name).and_then(Weak::upgrade).unwrap_or_default();
        mailboxes.insert(name.clone(), Arc::downgrade(&mailbox));
        drop(mailboxes);
        Local { seat, name, ranks, rank, mailbox }
    }

    /// The world's error once it has stopped; else looks whether it should, as this rank waits for `peer`.
    fn look(&self, peer: usize) -> Result<(), CollectiveError> {
        let World { health, stall, .. } = &*self.seat.world;
        health.check()?;
        if health.has_left(self.ranks[peer]) {
            let reason = format!("it has left, and rank {} waits for it", self.seat.rank);
            return Err(health.fail(health.error(self.ranks[peer], Failure::Gone, reason)));
        }
        health.stalled(*stall).map_or(Ok(()), |error| Err(health.fail(error)))
    }
}

impl Transport for Local {
    fn ranks(&self) -> &[usize] {
        &self.ranks
    }
    fn rank(&self) -> usize {
        self.rank
    }
    #[expect(private_interfaces, reason = "only this room implements the trait")]
    fn health(&self) -> &Health {
        &self.seat.world.health
    }
    fn name(&self) -> &str {
        &self.name
    }
    fn stop(&self, error: CollectiveError) {
        self.seat.world.health.fail(error);
    }

    fn exchange(&self, label: Label, outgoing: &[Outgoing<'_>], incoming: &mut [Incoming]) -> Result<(), CollectiveError> {
        let health = &self.seat.world.health;
        let mut queues = self.mailbox.lock();
        // (receiver, how many it must have taken for ours to be among them)
        let mut until_taken = Vec::with_capacity(outgoing.len());
        for Outgoing { to, bytes } in outgoing {
            let queue = queues.entry((self.rank, *to)).or_default();
            queue.messages.push_back((label, bytes.to_vec()));
            queue.sent += 1;
            until_taken.push((*to, queue.sent));
        }
        self.mailbox.changed.notify_all();

        let mut missing: VecDeque<&mut Incoming> = incoming.iter_mut().collect();
        let mut waiting: Option<(usize, _)> = None;
        loop {
            let mut took = false;
            while let Some(message) = missing.front_mut() {
                let queue = queues.entry((message.from, self.rank)).or_default();
                let Some((theirs, bytes)) = queue.messages.pop_front() else { break };
                queue.taken += 1;
                took = true;
                if theirs != label || bytes.len() != message.bytes.len() {
                    let peer = self.ranks[message.from];
                    let reason = mismatch((theirs, bytes.len()), self.seat.rank, (label, message.bytes.len()));
                    return Err(health.fail(health.error(peer, Failure::Mismatch, reason)));
                }
                message.bytes = bytes;
                missing.pop_front();
            }
            if took {
                self.mailbox.changed.notify_all();
                waiting = None;
            }
            let on = missing.front().map(|message| message.from).or_else(|| {
                let taken = |to: usize| queues.get(&(self.rank, to)).map_or(0, |queue| queue.taken);
                until_taken.iter().find(|(to, count)| taken(*to) < *count).map(|(to, _)| *to)
            });
            let Some(on) = on else { return Ok(()) };
            if waiting.as_ref().is_none_or(|(known, _)| *known != on) {
                let wait = Wait { on: self.ranks[on], operation: label.operation, since: Instant::now() };
                waiting = Some((on, health.waiting(self.seat.rank, wait)));
            }
            queues = self.mailbox.changed.wait_timeout(queues, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            let nothing_there = match missing.front() {
                Some(message) => queues.get(&(message.from, self.rank)).is_none_or(|queue| queue.messages.is_empty()),
                None => true,
            };
            let still_untaken = until_taken.iter().any(|(to, count)| *to == on && queues[&(self.rank, *to)].taken < *count);
            if nothing_there && (!missing.is_empty() || still_untaken) {
                self.look(on)?;
            }
        }
    }

    fn subgroup(&self, name: &str, ranks: &[usize]) -> Result<Local, CollectiveError> {
        let rank = ranks.iter().position(|&rank| rank == self.rank).unwrap_or_default();
        let in_world = ranks.iter().map(|&rank| self.ranks[rank]).collect();
        Ok(Local::new(self.seat.clone(), name.into(), in_world, rank))
    }
}

/// What a rank did where `rank` expected something else, each with its bytes.
pub(super) fn mismatch(found: (Label, usize), rank: usize, expected: (Label, usize)) -> String {
    let describe = |(label, bytes): (Label, usize)| {
        let Label { operation, element_name, reduction, .. } = label;
        let reduction = match reduction {
            Some(reduction) => format!(", {reduction:?}").to_lowercase(),
            None => String::new(),
        };
        format!("{operation} ({element_name}{reduction}, {bytes} bytes)")
    };
    format!("{} where rank {rank} is at {}", describe(found), describe(expected))
}
