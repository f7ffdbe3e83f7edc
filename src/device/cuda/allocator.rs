//! Device memory by purpose: who holds how much, how much it was at most, and what to say when there is no more.
//!
//! Freed blocks are kept and given out again, best fit first: a training step asks for the same sizes over and over, and asking the
//! driver costs more than most kernels. On an emulated GPU nothing is kept, so that its checkers see each block begin and end.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard};

use super::arguments::Address;
use super::driver::Gpu;
use super::error::raise;
use crate::device::ops::Role;
use crate::types;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Weights,
    Gradients,
    Optimizer,
    Activations,
    /// Kept in f32 beside activations, such as the log-sum-exp of attention.
    Statistics,
    KeysAndValues,
    /// What one operation needs while it runs.
    Workspace,
}

impl Purpose {
    pub const ALL: [Purpose; 7] = [
        Purpose::Weights,
        Purpose::Gradients,
        Purpose::Optimizer,
        Purpose::Activations,
        Purpose::Statistics,
        Purpose::KeysAndValues,
        Purpose::Workspace,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Purpose::Weights => "weights",
            Purpose::Gradients => "gradients",
            Purpose::Optimizer => "optimizer",
            Purpose::Activations => "activations",
            Purpose::Statistics => "statistics",
            Purpose::KeysAndValues => "keys and values",
            Purpose::Workspace => "workspace",
        }
    }
}

impl From<Role> for Purpose {
    fn from(role: Role) -> Purpose {
        match role {
            Role::Weights | Role::Travelling => Purpose::Weights,
            Role::Gradients => Purpose::Gradients,
            Role::Optimizer => Purpose::Optimizer,
            Role::Activations => Purpose::Activations,
            Role::Statistics => Purpose::Statistics,
        }
    }
}

/// One line of the table of allocations, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    pub purpose: Purpose,
    pub in_use: usize,
    /// The most that was in use at once.
    pub peak: usize,
}

struct State {
    /// By place in [`Purpose::ALL`].
    usage: [Allocation; Purpose::ALL.len()],
    /// Addresses of kept blocks by their size.
    kept: BTreeMap<usize, Vec<Address>>,
}

/// Gives out the memory of one device.
pub struct Allocator {
    gpu: Arc<Gpu>,
    state: Mutex<State>,
}

/// A block of device memory, given back when dropped.
pub struct Memory {
    allocator: Arc<Allocator>,
    address: Address,
    bytes: usize,
    purpose: Purpose,
}

/// Blocks are multiples of this: the grain of `cuMemAlloc`, and of large ones so that nearly equal sizes fit one another.
const GRAIN: usize = 512;
const LARGE_GRAIN: usize = 2 << 20;

fn rounded(bytes: usize) -> usize {
    bytes.next_multiple_of(if bytes < LARGE_GRAIN { GRAIN } else { LARGE_GRAIN })
}

impl Allocator {
    pub fn new(gpu: Arc<Gpu>) -> Allocator {
        let usage = Purpose::ALL.map(|purpose| Allocation { purpose, in_use: 0, peak: 0 });
        Allocator { gpu, state: Mutex::new(State { usage, kept: BTreeMap::new() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn keeps(&self) -> bool {
        self.gpu.emulator.is_none()
    }

    /// `bytes` of memory with nothing in it: at least one byte is asked for, so that every block has an address of its own.
    pub fn allocate(self: &Arc<Self>, purpose: Purpose, bytes: usize) -> Memory {
        let wanted = if self.keeps() { rounded(bytes.max(1)) } else { bytes.max(1) };
        let mut state = self.state();
        let (address, bytes) = match take_kept(&mut state.kept, wanted) {
            Some(block) => block,
            None => (self.ask_driver(&mut state, purpose, wanted), wanted),
        };
        let usage = &mut state.usage[purpose as usize];
        usage.in_use += bytes;
        usage.peak = usage.peak.max(usage.in_use);
        Memory { allocator: self.clone(), address, bytes, purpose }
    }

    /// Asks the driver; if it has no more, gives it back everything that is kept and asks once more.
    fn ask_driver(&self, state: &mut State, purpose: Purpose, bytes: usize) -> Address {
        if let Ok(address) = self.gpu.allocate(bytes) {
            return address;
        }
        self.release(state);
        self.gpu.synchronize();
        self.gpu.allocate(bytes).unwrap_or_else(|error| {
            let free = self.gpu.free_memory();
            let total = self.gpu.total_memory;
            raise(format!(
                "{}: no room for {} of {} ({:?}): {} of {} are free; in use: {}; fewer tokens per micro-batch or fewer parallel \
                 sequences need less",
                self.gpu.name,
                types::bytes(bytes as u64),
                purpose.name(),
                error.0,
                types::bytes(free as u64),
                types::bytes(total as u64),
                one_line(&state.usage)
            ))
        })
    }

    fn release(&self, state: &mut State) {
        for address in std::mem::take(&mut state.kept).into_values().flatten() {
            // SAFETY: a kept block comes from the driver, and nobody holds it.
            unsafe { self.gpu.free(address) };
        }
    }

    pub fn table(&self) -> Vec<Allocation> {
        self.state().usage.to_vec()
    }
}

/// The smallest kept block that holds `wanted` bytes and wastes at most an eighth, with its size.
fn take_kept(kept: &mut BTreeMap<usize, Vec<Address>>, wanted: usize) -> Option<(Address, usize)> {
    let (&bytes, addresses) = kept.range_mut(wanted..=wanted + wanted / 8).next()?;
    let address = addresses.pop()?;
    if addresses.is_empty() {
        kept.remove(&bytes);
    }
    Some((address, bytes))
}

impl Memory {
    pub fn address(&self) -> Address {
        self.address
    }
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mut state = self.allocator.state();
        state.usage[self.purpose as usize].in_use -= self.bytes;
        if self.allocator.keeps() {
            state.kept.entry(self.bytes).or_default().push(self.address);
        } else {
            // SAFETY: the block comes from the driver; what was launched with it is ahead of this in the stream.
            unsafe { self.allocator.gpu.free(self.address) };
        }
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        let mut state = self.state();
        self.release(&mut state);
    }
}

/// `weights 1.2 GB, gradients 2.3 GB`: what is in use, leaving out what is not.
fn one_line(usage: &[Allocation]) -> String {
    let mut line = String::new();
    for allocation in usage.iter().filter(|allocation| allocation.in_use > 0) {
        let separator = if line.is_empty() { "" } else { ", " };
        let _ = write!(line, "{separator}{} {}", allocation.purpose.name(), types::bytes(allocation.in_use as u64));
    }
    if line.is_empty() { "nothing".to_string() } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_block_is_given_out_again_when_it_fits_closely() {
        let mut kept = BTreeMap::from([(1024, vec![1, 2]), (1536, vec![3])]);
        assert_eq!(take_kept(&mut kept, 1024), Some((2, 1024)));
        assert_eq!(take_kept(&mut kept, 512), None, "half of it would be wasted");
        assert_eq!(take_kept(&mut kept, 1408), Some((3, 1536)));
        assert_eq!(kept, BTreeMap::from([(1024, vec![1])]));
    }

    #[test]
    fn sizes_are_rounded() {
        assert_eq!([1, 512, 513, (2 << 20) + 1].map(rounded), [512, 512, 1024, 4 << 20]);
    }
}
