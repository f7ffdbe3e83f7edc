//! Every kernel, forward and backward, against the same operation in f64, on each device that is here; the checkers of the
//! emulated GPU against planted faults.
//!
//! `reference` computes each operation in f64 and as a straightforward bf16 implementation would, `accept` says when a result is
//! good enough, `subject` says on which devices and under which schedules a test runs. With `LEARNER_TEST_DEVICE=cuda` the same
//! tests run on a real GPU.

mod accept;
mod attention;
mod blocks;
mod collectives;
mod head;
mod inputs;
mod linear;
mod nccl;
mod optimizer;
mod plan;
mod planted;
mod planted_streams;
mod probes;
mod raw;
mod reference;
mod rows;
mod sharded;
mod subject;
mod train;
