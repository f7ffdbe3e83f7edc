//! Collectives of threads and of processes: the bits of a plain loop, exact byte counts, and one line for everything that can
//! go wrong, on all ranks.

mod bits;
mod failures;
mod launch;
mod process;
mod strangers;
mod support;
