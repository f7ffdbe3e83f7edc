//! Buffers and the list of operations; each device implements every operation, forward and backward.

mod choice;
pub mod cpu;
mod ops;
mod peaks;
mod traced;

pub use choice::DeviceChoice;
pub use cpu::CpuDevice;
pub use ops::{
    AdamWStep, Cotangents, Device, Heads, LinearWeights, MemoryUse, Role, Rotation, RotationGradients, Scores, Span,
    inverse_temperature,
};
pub use peaks::Peaks;
pub use traced::{OperationSpan, Ranges, Traced};
