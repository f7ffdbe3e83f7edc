//! What is to be known of importance weights.

use serde::{Deserialize, Serialize};

use super::settings::WeightSettings;
use crate::types::exact;

/// What importance weights were. A unit is a token, or a sequence where the level is one of sequences. Micro-batches and
/// ranks combine with [`WeightStatistics::merge`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightStatistics {
    pub units: u64,
    /// Units whose raw ratio is above the upper bound.
    pub above: u64,
    /// Units whose raw ratio is below the lower bound, or below `1 / upper` if there is none.
    pub below: u64,
    /// Trained tokens whose log-ratio is not finite. Above 0 something is broken.
    pub not_finite: u64,
    /// Extremes of raw ratios; infinite the wrong way round while `units` is 0.
    #[serde(with = "exact")]
    pub ratio_min: f64,
    #[serde(with = "exact")]
    pub ratio_max: f64,
    /// Largest weight, bounds applied; 0 while `units` is 0.
    #[serde(with = "exact")]
    pub max: f64,
    #[serde(with = "exact")]
    ratio_sum: f64,
    #[serde(with = "exact")]
    sum: f64,
    #[serde(with = "exact")]
    squares: f64,
}

impl Default for WeightStatistics {
    fn default() -> WeightStatistics {
        WeightStatistics {
            units: 0,
            above: 0,
            below: 0,
            not_finite: 0,
            ratio_min: f64::INFINITY,
            ratio_max: f64::NEG_INFINITY,
            max: 0.0,
            ratio_sum: 0.0,
            sum: 0.0,
            squares: 0.0,
        }
    }
}

impl WeightStatistics {
    pub(super) fn note(&mut self, raw: f64, weight: f64, settings: &WeightSettings) {
        self.units += 1;
        self.above += u64::from(raw > settings.upper);
        self.below += u64::from(raw < settings.lower.unwrap_or(1.0 / settings.upper));
        self.ratio_min = self.ratio_min.min(raw);
        self.ratio_max = self.ratio_max.max(raw);
        self.max = self.max.max(weight);
        self.ratio_sum += raw;
        self.sum += weight;
        self.squares += weight * weight;
    }

    pub fn merge(&mut self, other: &WeightStatistics) {
        self.units += other.units;
        self.above += other.above;
        self.below += other.below;
        self.not_finite += other.not_finite;
        self.ratio_min = self.ratio_min.min(other.ratio_min);
        self.ratio_max = self.ratio_max.max(other.ratio_max);
        self.max = self.max.max(other.max);
        self.ratio_sum += other.ratio_sum;
        self.sum += other.sum;
        self.squares += other.squares;
    }

    /// Mean weight, bounds applied; 0 without units.
    pub fn mean(&self) -> f64 {
        self.per_unit(self.sum)
    }

    /// Mean raw ratio: 1 in expectation if the sampler's probabilities are what they say.
    pub fn ratio_mean(&self) -> f64 {
        self.per_unit(self.ratio_sum)
    }

    pub fn fraction_above(&self) -> f64 {
        self.per_unit(self.above as f64)
    }

    pub fn fraction_below(&self) -> f64 {
        self.per_unit(self.below as f64)
    }

    /// Effective sample size as a share of the units, `1 / mean((w / mean w)^2)`: 1 if all weights are equal, `1 / units`
    /// if one has it all, 0 if all are 0.
    pub fn effective_sample_size(&self) -> f64 {
        if self.squares == 0.0 { 0.0 } else { self.sum * self.sum / (self.squares * self.units as f64) }
    }

    fn per_unit(&self, sum: f64) -> f64 {
        sum / self.units.max(1) as f64
    }
}
