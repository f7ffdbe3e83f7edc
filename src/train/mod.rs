//! One training step: batches, optimizer, schedule, checkpoint, metrics.
