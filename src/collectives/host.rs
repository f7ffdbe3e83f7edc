//! Every collective over values in memory, written once over one ability of a [`Transport`]: exchanging bytes.
//!
//! Parts go straight from the rank that has them to the rank that wants them. An all-reduce is a reduce-scatter and an
//! all-gather: each rank reduces one part, in rank order, and everybody gets its bits. With n ranks and b bytes a rank thus sends
//! (n-1)/n b in each half, the least there is.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::element::{from_bytes, to_bytes};
use super::health::{Health, Told};
use super::traffic::Recorder;
use super::{CollectiveError, Collectives, Element, Failure, Number, Operation, Reduction, Traffic, split_evenly};

/// What a message belongs to. Both sides must be at the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    pub operation: Operation,
    /// [`Element::CODE`]
    pub element: u8,
    pub element_name: &'static str,
    pub reduction: Option<Reduction>,
}

impl Label {
    fn new<T: Element>(operation: Operation, reduction: Option<Reduction>) -> Label {
        // The three ways to send and receive meet each other.
        let operation = match operation {
            Operation::Receive | Operation::Exchange => Operation::Send,
            operation => operation,
        };
        Label { operation, element: T::CODE, element_name: T::NAME, reduction }
    }
}

/// Bytes for a rank of the group, this one excluded.
pub struct Outgoing<'a> {
    pub to: usize,
    pub bytes: &'a [u8],
}

/// Room for bytes of a rank of the group, this one excluded.
pub struct Incoming {
    pub from: usize,
    pub bytes: Vec<u8>,
}

/// Carries bytes between the ranks of one group. Its implementations are all here: it is named only to write code over any
/// [`HostCollectives`].
pub trait Transport: Send + Sync + Sized {
    /// By rank of the group, the rank in the world.
    fn ranks(&self) -> &[usize];
    /// In the group.
    fn rank(&self) -> usize;
    #[expect(private_interfaces, reason = "only this room implements the trait")]
    fn health(&self) -> &Health;

    /// Sends and receives all of it, or returns why the world has stopped. Messages between two ranks keep their order. No call
    /// is made while another one of this group runs.
    fn exchange(&self, label: Label, outgoing: &[Outgoing<'_>], incoming: &mut [Incoming]) -> Result<(), CollectiveError>;

    /// The group of these ranks of this group, in this order, under a name that all of them give and no other group has.
    fn subgroup(&self, name: &str, ranks: &[usize]) -> Result<Self, CollectiveError>;
    fn name(&self) -> &str;

    /// Stops the world with this error, if nothing else has yet.
    fn stop(&self, error: CollectiveError);
}

/// Collectives over slices in memory. Clones are the same place in the group and count together.
pub struct HostCollectives<T: Transport> {
    group: Arc<Group<T>>,
    recorder: Recorder,
}

impl<T: Transport> Clone for HostCollectives<T> {
    fn clone(&self) -> HostCollectives<T> {
        HostCollectives { group: self.group.clone(), recorder: self.recorder.clone() }
    }
}

struct Group<T> {
    transport: T,
    /// Held during a call; counts the splits made.
    splits: Mutex<usize>,
}

impl<T: Transport> HostCollectives<T> {
    pub(super) fn new(transport: T) -> HostCollectives<T> {
        let group = Group { transport, splits: Mutex::new(0) };
        HostCollectives { group: Arc::new(group), recorder: Recorder::default() }
    }

    /// The rank in the world of a rank of this group.
    pub fn rank_in_world(&self, rank: usize) -> usize {
        self.group.transport.ranks()[rank]
    }

    /// The names of the hosts, by rank of this group.
    pub fn hosts(&self) -> Vec<String> {
        let transport = &self.group.transport;
        transport.ranks().iter().map(|&rank| transport.health().hosts()[rank].clone()).collect()
    }

    /// An error that blames a rank of this group.
    pub(crate) fn error(&self, rank: usize, failure: Failure, reason: String) -> CollectiveError {
        self.group.transport.health().error(self.rank_in_world(rank), failure, reason)
    }

    /// Why the world has stopped, once this rank knows that it has.
    pub fn verdict(&self) -> Option<CollectiveError> {
        self.group.transport.health().check().err()
    }

    /// Stops the world with an error that blames some rank.
    pub(crate) fn stop(&self, error: CollectiveError) {
        self.group.transport.stop(error);
    }

    /// Runs `told` once, when the world stops: at once if it already has. The thread that learns of it runs it.
    pub fn on_failure(&self, told: Told) {
        self.group.transport.health().on_failure(told);
    }

    /// Runs one call alone in its group and counts it.
    fn counted<A>(
        &self,
        operation: Operation,
        bytes: usize,
        call: impl FnOnce(&T, &mut usize) -> Result<A, CollectiveError>,
    ) -> Result<A, CollectiveError> {
        let start = Instant::now();
        let mut splits = self.group.splits.lock().unwrap_or_else(PoisonError::into_inner);
        let result = self.group.transport.health().check().and_then(|()| call(&self.group.transport, &mut splits));
        self.recorder.note(operation, bytes, start, Instant::now());
        result
    }

    fn require(&self, operation: Operation, holds: bool, problem: impl FnOnce() -> String) -> Result<(), CollectiveError> {
        if holds {
            return Ok(());
        }
        let transport = &self.group.transport;
        let rank = transport.ranks()[transport.rank()];
        Err(transport.health().error(rank, Failure::Misuse, format!("{operation}: {}", problem())))
    }

    /// Refuses lengths that do not fit the slices of a call.
    fn check_lengths(&self, operation: Operation, lengths: &[usize], part: usize, all: usize) -> Result<(), CollectiveError> {
        let (rank, ranks) = (self.rank(), self.world_size());
        self.require(operation, lengths.len() == ranks, || format!("{} lengths for {ranks} ranks", lengths.len()))?;
        let sum = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
        self.require(operation, sum == Some(all), || format!("lengths {lengths:?} for {all} values of all ranks"))?;
        self.require(operation, lengths[rank] == part, || {
            format!("a part of {part} values at rank {rank}, for which the lengths say {}", lengths[rank])
        })
    }

    fn check_peer(&self, operation: Operation, peer: usize) -> Result<(), CollectiveError> {
        let (rank, ranks) = (self.rank(), self.world_size());
        self.require(operation, peer < ranks && peer != rank, || format!("rank {rank} of {ranks} and rank {peer}"))
    }
}

/// By rank, where its part lies in the whole.
fn places(lengths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let place = |&length: &usize| {
        end += length;
        end - length..end
    };
    lengths.iter().map(place).collect()
}

fn others(transport: &impl Transport) -> impl Iterator<Item = usize> {
    let own = transport.rank();
    (0..transport.ranks().len()).filter(move |&rank| rank != own)
}

fn all_gather<T: Element>(
    transport: &impl Transport,
    label: Label,
    part: &[T],
    all: &mut [T],
    lengths: &[usize],
) -> Result<(), CollectiveError> {
    let places = places(lengths);
    let bytes = to_bytes(part);
    let outgoing: Vec<_> = others(transport).map(|to| Outgoing { to, bytes: &bytes }).collect();
    let room = |from: usize| Incoming { from, bytes: vec![0; lengths[from] * T::BYTES] };
    let mut incoming: Vec<_> = others(transport).map(room).collect();
    transport.exchange(label, &outgoing, &mut incoming)?;
    all[places[transport.rank()].clone()].copy_from_slice(part);
    for Incoming { from, bytes } in &incoming {
        from_bytes(bytes, &mut all[places[*from].clone()]);
    }
    Ok(())
}

fn reduce_scatter<T: Number>(
    transport: &impl Transport,
    label: Label,
    all: &[T],
    part: &mut [T],
    lengths: &[usize],
    reduction: Reduction,
) -> Result<(), CollectiveError> {
    let places = places(lengths);
    let bytes: Vec<_> = others(transport).map(|to| (to, to_bytes(&all[places[to].clone()]))).collect();
    let outgoing: Vec<_> = bytes.iter().map(|(to, bytes)| Outgoing { to: *to, bytes }).collect();
    let room = |from: usize| Incoming { from, bytes: vec![0; part.len() * T::BYTES] };
    let mut incoming: Vec<_> = others(transport).map(room).collect();
    transport.exchange(label, &outgoing, &mut incoming)?;

    // Rank order, whatever came first.
    let own = &all[places[transport.rank()].clone()];
    let mut by_rank: Vec<Option<&[u8]>> = incoming.iter().map(|message| Some(&message.bytes[..])).collect();
    by_rank.insert(transport.rank(), None);
    for (index, value) in part.iter_mut().enumerate() {
        let of_rank = |bytes: &Option<&[u8]>| match bytes {
            Some(bytes) => T::read(&bytes[index * T::BYTES..][..T::BYTES]),
            None => own[index],
        };
        let first = of_rank(&by_rank[0]).widen();
        let reduced = by_rank[1..].iter().fold(first, |so_far, next| T::combine(so_far, of_rank(next), reduction));
        *value = T::narrow(reduced);
    }
    Ok(())
}

impl<X: Transport> Collectives for HostCollectives<X> {
    type Values<'a, T: Element> = &'a [T];
    type ValuesMut<'a, T: Element> = &'a mut [T];

    fn rank(&self) -> usize {
        self.group.transport.rank()
    }

    fn world_size(&self) -> usize {
        self.group.transport.ranks().len()
    }

    fn all_gather<T: Element>(&self, part: &[T], all: &mut [T], lengths: &[usize]) -> Result<(), CollectiveError> {
        let operation = Operation::AllGather;
        self.check_lengths(operation, lengths, part.len(), all.len())?;
        self.counted(operation, size_of_val(part), |transport, _| {
            all_gather(transport, Label::new::<T>(operation, None), part, all, lengths)
        })
    }

    fn reduce_scatter<T: Number>(
        &self,
        all: &[T],
        part: &mut [T],
        lengths: &[usize],
        reduction: Reduction,
    ) -> Result<(), CollectiveError> {
        let operation = Operation::ReduceScatter;
        self.check_lengths(operation, lengths, part.len(), all.len())?;
        self.counted(operation, size_of_val(all), |transport, _| {
            reduce_scatter(transport, Label::new::<T>(operation, Some(reduction)), all, part, lengths, reduction)
        })
    }

    fn all_reduce<T: Number>(&self, values: &mut [T], reduction: Reduction) -> Result<(), CollectiveError> {
        let operation = Operation::AllReduce;
        let lengths = split_evenly(values.len(), self.world_size());
        self.counted(operation, size_of_val(values), |transport, _| {
            let label = Label::new::<T>(operation, Some(reduction));
            let mut part = vec![T::default(); lengths[transport.rank()]];
            reduce_scatter(transport, label, values, &mut part, &lengths, reduction)?;
            all_gather(transport, label, &part, values, &lengths)
        })
    }

    fn broadcast<T: Element>(&self, values: &mut [T], root: usize) -> Result<(), CollectiveError> {
        let operation = Operation::Broadcast;
        let (rank, ranks) = (self.rank(), self.world_size());
        self.require(operation, root < ranks, || format!("root {root} of {ranks} ranks"))?;
        let label = Label::new::<T>(operation, None);
        if rank == root {
            return self.counted(operation, size_of_val(values), |transport, _| {
                let bytes = to_bytes(values);
                let outgoing: Vec<_> = others(transport).map(|to| Outgoing { to, bytes: &bytes }).collect();
                transport.exchange(label, &outgoing, &mut [])
            });
        }
        self.counted(operation, 0, |transport, _| {
            let mut incoming = [Incoming { from: root, bytes: vec![0; size_of_val(values)] }];
            transport.exchange(label, &[], &mut incoming)?;
            from_bytes(&incoming[0].bytes, values);
            Ok(())
        })
    }

    fn send<T: Element>(&self, values: &[T], to: usize) -> Result<(), CollectiveError> {
        self.check_peer(Operation::Send, to)?;
        self.counted(Operation::Send, size_of_val(values), |transport, _| messages(transport, &[(to, values)], &mut []))
    }

    fn receive<T: Element>(&self, values: &mut [T], from: usize) -> Result<(), CollectiveError> {
        self.check_peer(Operation::Receive, from)?;
        self.counted(Operation::Receive, 0, |transport, _| messages(transport, &[], &mut [(from, values)]))
    }

    fn exchange<T: Element>(&self, sends: &[(usize, &[T])], receives: &mut [(usize, &mut [T])]) -> Result<(), CollectiveError> {
        let peers = sends.iter().map(|(to, _)| *to).chain(receives.iter().map(|(from, _)| *from));
        for peer in peers {
            self.check_peer(Operation::Exchange, peer)?;
        }
        let bytes = sends.iter().map(|(_, values)| size_of_val(*values)).sum();
        self.counted(Operation::Exchange, bytes, |transport, _| messages(transport, sends, receives))
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.counted(Operation::Barrier, 0, |transport, _| barrier(transport))
    }

    fn abort(&self, reason: &str) {
        let transport = &self.group.transport;
        let rank = transport.ranks()[transport.rank()];
        transport.stop(transport.health().error(rank, Failure::Aborted, reason));
    }

    fn split(&self, group: usize) -> Result<HostCollectives<X>, CollectiveError> {
        let transport = self.counted(Operation::Split, 0, |transport, splits| {
            let lengths = vec![1; transport.ranks().len()];
            let mut groups = vec![0u64; lengths.len()];
            let label = Label::new::<u64>(Operation::Split, None);
            all_gather(transport, label, &[group as u64], &mut groups, &lengths)?;
            let ranks: Vec<usize> = (0..groups.len()).filter(|&rank| groups[rank] == group as u64).collect();
            *splits += 1;
            transport.subgroup(&format!("{}/{splits}.{group}", transport.name()), &ranks)
        })?;
        Ok(HostCollectives::new(transport))
    }

    fn overlapped<A: Send, B>(&self, communicate: impl FnOnce(&Self) -> A + Send, compute: impl FnOnce() -> B) -> (A, B) {
        let beside = HostCollectives { group: self.group.clone(), recorder: self.recorder.beside() };
        let (communicated, result, computed) = std::thread::scope(|scope| {
            let communication = scope.spawn(|| communicate(&beside));
            // If the computation panics, the others that this communication waits for must hear of it.
            let stop = StopIfPanicking(self);
            let result = compute();
            let computed = Instant::now();
            drop(stop);
            (communication.join(), result, computed)
        });
        beside.recorder.settle(computed);
        match communicated {
            Ok(communicated) => (communicated, result),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    fn traffic(&self) -> Traffic {
        self.recorder.traffic()
    }
}

/// Stops the world when it is dropped by a panic.
struct StopIfPanicking<'a, T: Transport>(&'a HostCollectives<T>);

impl<T: Transport> Drop for StopIfPanicking<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort("its thread panicked");
        }
    }
}

fn messages<T: Element>(
    transport: &impl Transport,
    sends: &[(usize, &[T])],
    receives: &mut [(usize, &mut [T])],
) -> Result<(), CollectiveError> {
    let bytes: Vec<_> = sends.iter().map(|(to, values)| (*to, to_bytes(values))).collect();
    let outgoing: Vec<_> = bytes.iter().map(|(to, bytes)| Outgoing { to: *to, bytes }).collect();
    let room = |(from, values): &(usize, &mut [T])| Incoming { from: *from, bytes: vec![0; size_of_val(*values)] };
    let mut incoming: Vec<_> = receives.iter().map(room).collect();
    transport.exchange(Label::new::<T>(Operation::Send, None), &outgoing, &mut incoming)?;
    for ((_, values), message) in receives.iter_mut().zip(&incoming) {
        from_bytes(&message.bytes, values);
    }
    Ok(())
}

/// An empty message from each rank to each other.
pub(super) fn barrier(transport: &impl Transport) -> Result<(), CollectiveError> {
    let outgoing: Vec<_> = others(transport).map(|to| Outgoing { to, bytes: &[] }).collect();
    let mut incoming: Vec<_> = others(transport).map(|from| Incoming { from, bytes: Vec::new() }).collect();
    transport.exchange(Label::new::<u8>(Operation::Barrier, None), &outgoing, &mut incoming)
}
