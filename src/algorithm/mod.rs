//! Pure maths of reinforcement learning: advantages, losses, statistics. No I/O.
//!
//! One function per formula, over plain slices; every normaliser is a global count that the caller passes in, so that
//! results do not depend on how the work was cut into micro-batches.

mod advantages;
mod interval;
mod loss;
mod mismatch;
mod pass_at_k;
mod schedule;

pub use advantages::{has_signal, leave_one_out};
pub use interval::{Interval, mean_interval, paired_difference};
pub use loss::{ClipSettings, LossStatistics, PolicyLoss, clipped_policy_loss, negative_log_likelihood};
pub use mismatch::Mismatch;
pub use pass_at_k::{mean_pass_at_k, pass_at_k};
pub use schedule::{Decay, ScheduleSettings, learning_rate};

/// A setting outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} is {found}: {remedy}")]
pub struct SettingError {
    /// Name of the field within its settings.
    pub field: &'static str,
    pub found: String,
    pub remedy: &'static str,
}

impl SettingError {
    /// Refuses `found` unless `valid`.
    fn unless(valid: bool, field: &'static str, found: impl std::fmt::Display, remedy: &'static str) -> Result<(), SettingError> {
        if valid { Ok(()) } else { Err(SettingError { field, found: found.to_string(), remedy }) }
    }
}
