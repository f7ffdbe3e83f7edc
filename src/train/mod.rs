//! One training step and what surrounds it.
//!
//! ```text
//! batch.rs      samples -> micro-batches (sorted by length, packed end to end)
//! step.rs       micro-batches -> forward -> loss -> backward -> optimizer: the whole step, readable in one piece
//! optimizer.rs  AdamW over the model's tensors
//! checkpoint.rs what survives kill -9
//! metrics.rs    one JSON object per step
//! ```

mod batch;
mod checkpoint;
mod files;
mod metrics;
pub mod optimizer;
mod step;

pub use batch::micro_batches;
pub use checkpoint::{CheckpointError, CheckpointSettings, Checkpoints};
pub use files::{FileError, write_atomically};
pub use metrics::MetricsLog;
pub use step::{PolicySettings, StepMetrics, StepSettings, Trainer};
