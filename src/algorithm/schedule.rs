//! The learning rate as a function of the step.

use serde::{Deserialize, Serialize};

use super::settings::{Problems, SettingErrors};

/// How the rate falls after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    #[default]
    Constant,
    Linear,
    Cosine,
}

/// Warm-up to a peak, then decay towards a floor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleSettings {
    /// The rate after warm-up.
    pub peak: f64,
    /// Steps of linear warm-up; the first step already has `peak / warmup_steps`.
    pub warmup_steps: u64,
    /// Warm-up as a share of all steps, rounded up; the longer of the two holds.
    pub warmup_share: f64,
    pub decay: Decay,
    /// The rate that decay would reach right after the last step, as a share of `peak`.
    pub floor_share: f64,
}

impl Default for ScheduleSettings {
    fn default() -> ScheduleSettings {
        ScheduleSettings { peak: 1e-6, warmup_steps: 0, warmup_share: 0.0, decay: Decay::Constant, floor_share: 0.0 }
    }
}

impl ScheduleSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let peak = self.peak;
        problems.unless(peak >= 0.0 && peak.is_finite(), "peak", peak, "give a finite rate of at least 0");
        let warmup = self.warmup_share;
        problems.unless((0.0..=1.0).contains(&warmup), "warmup_share", warmup, "give a share from 0 to 1");
        let floor = self.floor_share;
        problems.unless((0.0..=1.0).contains(&floor), "floor_share", floor, "give a share from 0 to 1");
        problems.finish()
    }
}

/// The rate of step `step` (the first is 0) of `total`. From `total` on it stays at the floor (or at the peak, if constant).
pub fn learning_rate(step: u64, total: u64, settings: &ScheduleSettings) -> f64 {
    let warmup = settings.warmup_steps.max((settings.warmup_share * total as f64).ceil() as u64);
    if step < warmup {
        return settings.peak * (step + 1) as f64 / warmup as f64;
    }
    let length = total.saturating_sub(warmup).max(1);
    let progress = ((step - warmup) as f64 / length as f64).min(1.0);
    let remaining = match settings.decay {
        Decay::Constant => 1.0,
        Decay::Linear => 1.0 - progress,
        Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
    };
    settings.peak * (settings.floor_share + (1.0 - settings.floor_share) * remaining)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(total: u64, settings: ScheduleSettings) -> Vec<f64> {
        (0..=total + 1).map(|step| learning_rate(step, total, &settings)).collect()
    }

    #[track_caller]
    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!((found - expected).abs() < 1e-12, "step {step}: {found}, not {expected}");
        }
    }

    #[test]
    fn exact_vectors() {
        let settings = ScheduleSettings { peak: 1.0, ..ScheduleSettings::default() };
        assert_close(&rates(3, settings.clone()), &[1.0; 5]);
        let linear = ScheduleSettings { warmup_steps: 2, decay: Decay::Linear, floor_share: 0.2, ..settings.clone() };
        assert_close(&rates(6, linear), &[0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]);
        let cosine = ScheduleSettings { warmup_share: 0.25, decay: Decay::Cosine, floor_share: 0.1, ..settings };
        let half = 0.1 + 0.9 * 0.5;
        let quarter = 0.45 * std::f64::consts::FRAC_1_SQRT_2;
        assert_close(&rates(5, cosine), &[0.5, 1.0, 1.0, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25, 0.1, 0.1]);
        let eight = ScheduleSettings { peak: 1.0, decay: Decay::Cosine, floor_share: 0.1, ..ScheduleSettings::default() };
        assert_close(&rates(4, eight), &[1.0, 0.55 + quarter, half, 0.55 - quarter, 0.1, 0.1]);
    }

    #[test]
    fn warm_up_longer_than_the_run_never_passes_the_peak() {
        let settings = ScheduleSettings { peak: 1.0, warmup_steps: 10, decay: Decay::Linear, ..ScheduleSettings::default() };
        assert_close(&rates(2, settings), &[0.1, 0.2, 0.3, 0.4]);
        assert!(learning_rate(0, 0, &ScheduleSettings::default()).is_finite());
    }

    #[test]
    fn settings_are_checked() {
        assert_eq!(ScheduleSettings::default().check(), Ok(()));
        let wrong = ScheduleSettings { peak: -1.0, floor_share: 2.0, warmup_share: f64::NAN, ..ScheduleSettings::default() };
        let errors = wrong.check().unwrap_err();
        let fields: Vec<&str> = errors.0.iter().map(|error| error.field.as_str()).collect();
        assert_eq!(fields, ["peak", "warmup_share", "floor_share"]);
        assert_eq!(errors.0[0].to_string(), "peak is -1: give a finite rate of at least 0");
    }
}
