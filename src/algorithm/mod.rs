//! Pure maths of reinforcement learning: rewards, advantages, filters, losses, importance weights, statistics. No I/O.
//!
//! One function per formula, over plain slices; every normaliser is a global count that the caller passes in, so that
//! results do not depend on how the work was cut into micro-batches. The way through:
//!
//! ```text
//! attempts -> reward -> standings (filters, advantages) -> policy_loss -> cotangents
//!                    sampled and recomputed log-probabilities -> importance_weights, accepted, Mismatch
//! ```

mod advantages;
mod dynamic_sampling;
mod filters;
mod importance;
mod interval;
mod loss;
mod mismatch;
mod pass_at_k;
mod ratio;
mod real;
mod rewards;
mod schedule;
mod settings;

pub use advantages::{AdvantageSettings, Estimator, Singleton, advantages};
pub use dynamic_sampling::{DynamicSampling, DynamicSamplingSettings, Exhausted, Next, WhenExhausted};
pub use filters::{Attempt, FilterSettings, GroupFilter, GroupOutcome, MaskedAttempts, Standing, group_outcome, standings};
pub use importance::{
    Beyond, Correction, CorrectionSettings, Level, OldPolicy, Over, RejectionSettings, SampledTokens, Statistic, WeightSettings,
    WeightStatistics, accepted, correct, importance_weights, normalise,
};
pub use interval::{Interval, mean_interval, paired_difference};
pub use loss::{
    Aggregation, ClipSettings, Denominators, KlEstimator, KlSettings, LossSettings, LossStatistics, Objective, PolicyLoss,
    PolicyTokens, negative_log_likelihood, policy_loss,
};
pub use mismatch::Mismatch;
pub use pass_at_k::{mean_pass_at_k, pass_at_k};
pub use real::Real;
pub use rewards::{OverlongPenaltySettings, Reward, RewardSettings, StepPenaltySettings, overlong_penalty, reward, step_penalty};
pub use schedule::{Decay, ScheduleSettings, learning_rate};
pub use settings::{MOST_COUNTED, Problems, SettingError, SettingErrors};
