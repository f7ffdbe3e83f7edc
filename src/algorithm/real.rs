//! The two float types that the formulas of this room read and write. Arithmetic is f64 inside in both cases, so there is
//! one copy of each formula: f32 is what the trainer speaks, f64 what exact vectors and finite differences need.

use std::fmt::Debug;

/// f32 or f64.
pub trait Real: Copy + Debug + PartialEq + Into<f64> {
    /// The nearest value of this type.
    fn rounded(value: f64) -> Self;
}

impl Real for f32 {
    fn rounded(value: f64) -> f32 {
        value as f32
    }
}

impl Real for f64 {
    fn rounded(value: f64) -> f64 {
        value
    }
}
