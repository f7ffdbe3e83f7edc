//! Calls that all ranks of a world make together, and how the ranks find each other.
//!
//! ```text
//! launch       flags and the variables of Slurm, OpenMPI, torchrun, Kubernetes -> who am I, where is the coordinator
//! rendezvous   ranks that know a token meet at the coordinator's port          -> TcpCollectives
//! local        threads of one process                                         -> LocalCollectives
//! host         every collective over values in memory, written once over what a transport can do: exchange bytes
//! health       who waits for whom, and the verdict that stops every rank with the same line
//! ```
//!
//! `cli` launches and joins ranks here; those that have met speak through `parallel::Ranks` and `parallel::Links`.
//!
//! **Bits.** A reduction combines the values of the ranks in rank order, whatever arrives first, so results depend on neither
//! timing nor transport: they are those of a plain loop over the ranks. All ranks get the same bits.
//!
//! **Order.** All ranks of a group make the same calls in the same order. A rank that meets another call than its own stops the
//! world with one line ([`Failure::Mismatch`]). Calls of different groups may run at the same time, from different threads;
//! those of one group follow each other.
//!
//! **Failure.** Once a rank is lost, every call that waits and every later one, of all groups, returns the same
//! [`CollectiveError`]; what was being received is then undefined. A world ends together: let a [`barrier`](Collectives::barrier)
//! be its last call, for a rank that has left cannot be waited for.
//!
//! **Devices.** Values are slices in the host's memory. What lies on devices travels through `parallel::Links`, over these
//! collectives or over NCCL, whose ranks meet here and are watched from here all the same.

mod control;
mod element;
mod error;
mod greeting;
mod health;
mod host;
pub mod launch;
mod listener;
mod local;
mod nodelist;
mod rendezvous;
mod tcp;
mod traffic;

pub use element::{Element, Number};
pub use error::{CollectiveError, Failure};
pub use health::{Liveness, Told};
pub use host::{HostCollectives, Transport};
pub use local::{LocalCollectives, local_world};
pub use rendezvous::{PROTOCOL, Rendezvous, RendezvousError, host_name, join};
pub use tcp::TcpCollectives;
pub(crate) use traffic::Recorder;
pub use traffic::{Count, Operation, Traffic};

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    Max,
}

/// One rank's place in a group of ranks. See the module for what holds of all calls.
///
/// `lengths` counts elements by rank, and is the same on all ranks; [`split_evenly`] makes it for a tensor that is cut into shards.
/// Ranks are those of this group. Every method returns once the values handed to it may be read or used again.
pub trait Collectives: Send + Sync + Sized {
    /// Values that are read: `&[T]` in memory.
    type Values<'a, T: Element>;
    /// Values that are written, or replaced.
    type ValuesMut<'a, T: Element>;

    /// Of this group, from 0.
    fn rank(&self) -> usize;
    /// Ranks of this group.
    fn world_size(&self) -> usize;

    /// `part` is `[lengths[rank]]`; `all`, `[sum of lengths]`, becomes the parts of all ranks in rank order.
    fn all_gather<T: Element>(
        &self,
        part: Self::Values<'_, T>,
        all: Self::ValuesMut<'_, T>,
        lengths: &[usize],
    ) -> Result<(), CollectiveError>;

    /// `all` is `[sum of lengths]`; `part`, `[lengths[rank]]`, becomes this rank's part of the reduction over the ranks.
    fn reduce_scatter<T: Number>(
        &self,
        all: Self::Values<'_, T>,
        part: Self::ValuesMut<'_, T>,
        lengths: &[usize],
        reduction: Reduction,
    ) -> Result<(), CollectiveError>;

    /// `values`, of one length on all ranks, become their reduction over the ranks.
    fn all_reduce<T: Number>(&self, values: Self::ValuesMut<'_, T>, reduction: Reduction) -> Result<(), CollectiveError>;

    /// `values`, of one length on all ranks, become those of `root`.
    fn broadcast<T: Element>(&self, values: Self::ValuesMut<'_, T>, root: usize) -> Result<(), CollectiveError>;

    /// Meets a [`receive`](Collectives::receive) or [`exchange`](Collectives::exchange) of rank `to`. Two ranks that first send to
    /// each other and then receive may wait for ever: that is one exchange.
    fn send<T: Element>(&self, values: Self::Values<'_, T>, to: usize) -> Result<(), CollectiveError>;

    fn receive<T: Element>(&self, values: Self::ValuesMut<'_, T>, from: usize) -> Result<(), CollectiveError>;

    /// Sends to and receives from several ranks at once. Between two ranks, messages meet in the order in which they are listed.
    fn exchange<T: Element>(
        &self,
        sends: &[(usize, Self::Values<'_, T>)],
        receives: &mut [(usize, Self::ValuesMut<'_, T>)],
    ) -> Result<(), CollectiveError>;

    /// Returns once all ranks have called it.
    fn barrier(&self) -> Result<(), CollectiveError>;

    /// Stops the whole world: every call of every rank that waits, and every later one, returns an error that names this rank.
    fn abort(&self, reason: &str);

    /// All ranks of this group call it; those that name the same `group` form one, in the order of their ranks here. A
    /// context-parallel and a data-parallel group are two splits of one world.
    fn split(&self, group: usize) -> Result<Self, CollectiveError>;

    /// Runs `communicate`, which calls the collectives it is given, beside `compute`, and waits for both. Of the calls, only the
    /// time after `compute` has ended counts as exposed. `compute` must make no call of this group.
    fn overlapped<A: Send, B>(&self, communicate: impl FnOnce(&Self) -> A + Send, compute: impl FnOnce() -> B) -> (A, B);

    /// What this rank has handed to the calls of this group so far; groups split off count for themselves.
    fn traffic(&self) -> Traffic;
}

/// Elements by rank when `length` of them are cut into consecutive parts that differ by at most one, the longer ones first.
pub fn split_evenly(length: usize, ranks: usize) -> Vec<usize> {
    (0..ranks).map(|rank| length / ranks + usize::from(rank < length % ranks)).collect()
}

#[cfg(test)]
mod tests {
    use super::split_evenly;

    #[test]
    fn even_parts_cover_the_whole() {
        assert_eq!(split_evenly(10, 4), [3, 3, 2, 2]);
        assert_eq!(split_evenly(2, 3), [1, 1, 0]);
        assert_eq!(split_evenly(0, 2), [0, 0]);
        assert_eq!(split_evenly(6, 3), [2, 2, 2]);
    }
}
