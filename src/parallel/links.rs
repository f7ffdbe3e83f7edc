//! Collectives over a device's buffers: what sharded tensors and shared documents travel through.

use crate::collectives::{CollectiveError, Traffic};
use crate::device::Device;

/// A group of ranks that exchange buffers of one kind of device. All of them make the same calls in the same order.
///
/// Buffers are laid out by rank: `share` numbers of rank 0, then of rank 1, and so on; they may be longer.
pub trait Links<D: Device>: Send + Sync {
    /// Of this group, from 0.
    fn rank(&self) -> usize;
    /// Of this group.
    fn ranks(&self) -> usize;

    /// This rank's share is filled: fills those of all others.
    fn all_gather(&self, buffer: &mut D::Buffer, share: usize) -> Result<(), CollectiveError>;

    /// This rank's share becomes the sum over all ranks, in f32 and in rank order; what is left in the others is undefined.
    fn reduce_scatter(&self, buffer: &mut D::Buffer, share: usize) -> Result<(), CollectiveError>;

    /// Runs `communicate`, which calls what it is given, beside `compute`, and waits for both. `compute` makes no call of this group.
    ///
    /// A call within `communicate` may return before its buffer has been read or filled: such a buffer must outlive `overlapped`, and
    /// nobody looks at it until then.
    fn overlapped(
        &self,
        communicate: &mut (dyn FnMut(&dyn Links<D>) -> Result<(), CollectiveError> + Send),
        compute: &mut dyn FnMut(),
    ) -> Result<(), CollectiveError>;

    /// What this rank has handed to the calls so far.
    fn traffic(&self) -> Traffic;
}
