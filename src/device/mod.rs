//! Buffers and the list of operations; each device implements every operation, forward and backward.

pub mod cpu;
mod ops;

pub use cpu::CpuDevice;
pub use ops::{
    AdamWStep, Cotangents, Device, Heads, LinearWeights, Role, Rotation, RotationGradients, Scores, Span, inverse_temperature,
};
