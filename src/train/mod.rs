//! One training step and what surrounds it.
//!
//! ```text
//! batch.rs      samples -> micro-batches (sorted by length, packed end to end)
//! step.rs       micro-batches -> forward -> loss -> backward -> optimizer: the whole step, readable in one piece
//! policy_batch.rs  what a policy step is told of each token beside its scores, and its loss
//! update.rs     one rollout -> several optimizer steps
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
mod policy_batch;
mod step;
mod update;

pub use batch::{MicroBatch, micro_batches};
pub use checkpoint::{CheckpointError, CheckpointSettings, CheckpointWriter, Checkpoints, Snapshot};
pub use files::{FileError, write_atomically};
pub use metrics::MetricsLog;
pub use policy::{Frozen, Policy};
pub use policy_batch::{OldLogProbs, PolicyBatch, mismatch_of};
pub use step::{PolicySettings, StepMetrics, StepSettings, Trainer};
pub use update::UpdatePlan;
