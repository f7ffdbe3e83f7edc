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
    AdamWStep, Cotangents, Device, Heads, KEYS_PER_BLOCK, KeyBlocks, LinearWeights, MemoryUse, ModelSizes, QuerySlice, Role,
    Rotation, RotationGradients, Scores, Span, inverse_temperature,
};
pub use peaks::Peaks;
pub use traced::{OperationSpan, Ranges, Traced};
