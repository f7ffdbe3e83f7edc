//! One training step: batches, optimizer, schedule, checkpoint, metrics.

pub mod optimizer;
