//! One training step and what surrounds it.
//!
//! ```text
//! batch.rs      samples -> micro-batches (sorted by length, packed end to end)
//! step.rs       micro-batches -> forward -> loss -> backward -> optimizer: the whole step, readable in one piece
//! policy.rs     the model on one rank, its shards on many
//! optimizer.rs  AdamW over a model's tensors, or this rank's pieces of them
//! checkpoint/   what survives kill -9
//! metrics.rs    one JSON object per step
//! ```

mod batch;
mod checkpoint;
mod files;
mod metrics;
pub mod optimizer;
mod policy;
mod step;

pub use batch::{MicroBatch, micro_batches};
pub use checkpoint::{CheckpointError, CheckpointSettings, CheckpointWriter, Checkpoints, Snapshot};
pub use files::{FileError, write_atomically};
pub use metrics::MetricsLog;
pub use policy::Policy;
pub use step::{PolicySettings, StepMetrics, StepSettings, Trainer};
