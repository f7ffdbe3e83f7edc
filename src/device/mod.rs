//! Buffers and the list of operations; each device implements every operation, forward and backward.

mod choice;
pub mod cpu;
pub mod cuda;
mod ops;
mod peaks;
mod traced;

pub use choice::{DeviceChoice, GemmLibrary};
pub use cpu::CpuDevice;
pub use cuda::CudaDevice;
pub use ops::{
    AdamWStep, AttendedRows, AttentionPlan, Cotangents, Device, Heads, KEYS_PER_BLOCK, LinearWeights, MemoryUse, ModelSizes,
    QuerySlice, Role, Rotation, RotationGradients, Scores, SharedQueries, Span, inverse_temperature,
};
pub use peaks::Peaks;
pub use traced::{OperationSpan, Ranges, Traced};
