//! What a policy loss tells of the health of training.

use serde::{Deserialize, Serialize};

use crate::types::exact;

/// Sums, counts and extremes over tokens; those of micro-batches and ranks combine with [`LossStatistics::merge`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossStatistics {
    /// Trained tokens, everything finite.
    pub tokens: u64,
    /// Of these, tokens whose ratio the clip held, at either side.
    pub clipped: u64,
    /// Of those, tokens held at the upper side, `1 + epsilon_high`.
    pub clipped_high: u64,
    /// Tokens whose loss the dual clip held.
    pub dual_clipped: u64,
    /// Tokens left out because a log-probability or advantage was not finite. Above 0 something is broken.
    pub not_finite: u64,
    /// Smallest and largest ratio of probabilities, new over old (of GSPO: of sequences); infinite the wrong way round
    /// while `tokens` is 0.
    #[serde(with = "exact")]
    pub ratio_min: f64,
    #[serde(with = "exact")]
    pub ratio_max: f64,
    /// Sum of `old_log_prob - log_prob`.
    #[serde(with = "exact")]
    pub kl_sum: f64,
    /// Sum of k3 of the same.
    #[serde(with = "exact")]
    pub k3_sum: f64,
    /// Sum of the estimate of the divergence from the reference model; 0 without one.
    #[serde(with = "exact")]
    pub reference_kl_sum: f64,
}

impl Default for LossStatistics {
    fn default() -> LossStatistics {
        LossStatistics {
            tokens: 0,
            clipped: 0,
            clipped_high: 0,
            dual_clipped: 0,
            not_finite: 0,
            ratio_min: f64::INFINITY,
            ratio_max: f64::NEG_INFINITY,
            kl_sum: 0.0,
            k3_sum: 0.0,
            reference_kl_sum: 0.0,
        }
    }
}

impl LossStatistics {
    pub fn merge(&mut self, other: &LossStatistics) {
        self.tokens += other.tokens;
        self.clipped += other.clipped;
        self.clipped_high += other.clipped_high;
        self.dual_clipped += other.dual_clipped;
        self.not_finite += other.not_finite;
        self.ratio_min = self.ratio_min.min(other.ratio_min);
        self.ratio_max = self.ratio_max.max(other.ratio_max);
        self.kl_sum += other.kl_sum;
        self.k3_sum += other.k3_sum;
        self.reference_kl_sum += other.reference_kl_sum;
    }

    /// Share of tokens whose ratio the clip held; 0 without tokens.
    pub fn clip_fraction(&self) -> f64 {
        self.per_token(self.clipped as f64)
    }

    /// Share of tokens held at `1 - epsilon_low`.
    pub fn clip_fraction_low(&self) -> f64 {
        self.per_token((self.clipped - self.clipped_high) as f64)
    }

    /// Share of tokens held at `1 + epsilon_high`.
    pub fn clip_fraction_high(&self) -> f64 {
        self.per_token(self.clipped_high as f64)
    }

    /// Share of tokens that the dual clip held.
    pub fn dual_clip_fraction(&self) -> f64 {
        self.per_token(self.dual_clipped as f64)
    }

    /// Schulman's k1 estimate of KL(old || new) per token, in nats; unbiased, may be negative; 0 without tokens.
    pub fn approximate_kl(&self) -> f64 {
        self.per_token(self.kl_sum)
    }

    /// Schulman's k3 estimate of the same: never negative.
    pub fn k3(&self) -> f64 {
        self.per_token(self.k3_sum)
    }

    /// Mean estimate of KL(policy || reference) per token, in nats.
    pub fn reference_kl(&self) -> f64 {
        self.per_token(self.reference_kl_sum)
    }

    fn per_token(&self, sum: f64) -> f64 {
        sum / self.tokens.max(1) as f64
    }
}
