//! Buffers and the list of operations; each device implements every operation, forward and backward.

mod attention_plan;
mod choice;
pub mod cpu;
pub mod cuda;
mod ops;
mod peaks;
mod traced;

pub use attention_plan::{AttentionPlan, KEYS_PER_BLOCK, QuerySlice, SharedQueries};
pub use choice::{DeviceChoice, GemmLibrary};
pub use cpu::CpuDevice;
pub use cuda::CudaDevice;
pub use ops::{
    AdamWStep, AttendedRows, Cotangents, Device, Heads, LinearWeights, MemoryUse, ModelSizes, Role, Rotation, RotationGradients,
    Scores, Span, inverse_temperature,
};
pub use peaks::Peaks;
pub use traced::{OperationSpan, Ranges, Traced};
