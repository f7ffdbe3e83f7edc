//! How far the sampler's log-probabilities are from those the trainer computes for the same tokens and weights.

use serde::{Deserialize, Serialize};

use crate::types::exact;

/// As in the policy loss: keeps `exp` finite.
const LOG_RATIO_LIMIT: f64 = 20.0;

/// Sums and extremes over tokens. All derived figures are exactly 0 when both sides are equal bit for bit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Mismatch {
    pub tokens: u64,
    /// Tokens whose two log-probabilities differ in any bit.
    pub differing: u64,
    /// Largest absolute difference, in nats; infinite where a differing value is not finite.
    #[serde(with = "exact")]
    pub max_absolute: f64,
    #[serde(with = "exact")]
    absolute_sum: f64,
    #[serde(with = "exact")]
    signed_sum: f64,
    #[serde(with = "exact")]
    k3_sum: f64,
}

impl Mismatch {
    /// Compares `sampled` with `recomputed`, both `[tokens]`.
    pub fn measure(sampled: &[f32], recomputed: &[f32]) -> Mismatch {
        assert_eq!(sampled.len(), recomputed.len(), "one recomputed log-probability per sampled one");
        let mut mismatch = Mismatch { tokens: sampled.len() as u64, ..Mismatch::default() };
        for (sampled, recomputed) in sampled.iter().zip(recomputed) {
            if sampled.to_bits() == recomputed.to_bits() {
                continue;
            }
            mismatch.differing += 1;
            let difference = f64::from(*recomputed) - f64::from(*sampled);
            if !difference.is_finite() {
                mismatch.max_absolute = f64::INFINITY;
                continue;
            }
            mismatch.max_absolute = mismatch.max_absolute.max(difference.abs());
            mismatch.absolute_sum += difference.abs();
            mismatch.signed_sum += difference;
            let log_ratio = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
            mismatch.k3_sum += log_ratio.exp_m1() - log_ratio;
        }
        mismatch
    }

    pub fn merge(&mut self, other: &Mismatch) {
        self.tokens += other.tokens;
        self.differing += other.differing;
        self.max_absolute = self.max_absolute.max(other.max_absolute);
        self.absolute_sum += other.absolute_sum;
        self.signed_sum += other.signed_sum;
        self.k3_sum += other.k3_sum;
    }

    /// Mean absolute difference per token, in nats.
    pub fn mean_absolute(&self) -> f64 {
        self.per_token(self.absolute_sum)
    }

    /// Mean of `recomputed - sampled` per token: away from 0, one side is systematically surer.
    pub fn mean(&self) -> f64 {
        self.per_token(self.signed_sum)
    }

    /// Schulman's k3 estimate of KL(sampler || trainer) per token, `r - 1 - ln r` with `r` = recomputed over sampled
    /// probability: never negative, in nats.
    pub fn k3(&self) -> f64 {
        self.per_token(self.k3_sum)
    }

    /// Share of tokens that differ in any bit.
    pub fn differing_share(&self) -> f64 {
        self.per_token(self.differing as f64)
    }

    fn per_token(&self, sum: f64) -> f64 {
        sum / self.tokens.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_bits_are_exactly_zero() {
        let log_probs = [-0.1f32, -3.7, -1e-30, 0.0, f32::NEG_INFINITY];
        let mismatch = Mismatch::measure(&log_probs, &log_probs);
        assert_eq!(mismatch, Mismatch { tokens: 5, ..Mismatch::default() });
        assert_eq!([mismatch.mean(), mismatch.mean_absolute(), mismatch.k3(), mismatch.differing_share()], [0.0; 4]);
        assert_eq!(Mismatch::default().k3(), 0.0);
    }

    #[test]
    fn one_bit_is_seen() {
        let nudged = f32::from_bits((-1.5f32).to_bits() + 1);
        let mismatch = Mismatch::measure(&[-1.5, -2.0], &[nudged, -2.0]);
        assert_eq!((mismatch.differing, mismatch.differing_share()), (1, 0.5));
        assert!(mismatch.max_absolute > 0.0 && mismatch.max_absolute < 2e-7);
    }

    #[test]
    fn known_differences() {
        let mut mismatch = Mismatch::measure(&[-1.0], &[-1.5]);
        mismatch.merge(&Mismatch::measure(&[-2.0, -1.0], &[-1.75, -1.0]));
        assert_eq!((mismatch.tokens, mismatch.differing, mismatch.max_absolute), (3, 2, 0.5));
        assert!((mismatch.mean_absolute() - 0.25).abs() < 1e-12);
        assert!((mismatch.mean() + 0.25 / 3.0).abs() < 1e-12);
        let k3 = ((-0.5f64).exp() - 1.0 + 0.5 + 0.25f64.exp() - 1.0 - 0.25) / 3.0;
        assert!((mismatch.k3() - k3).abs() < 1e-12);
    }

    #[test]
    fn values_that_are_not_finite_cannot_hide() {
        let mismatch = Mismatch::measure(&[-1.0, -1.0], &[f32::NAN, -1.0]);
        assert_eq!((mismatch.max_absolute, mismatch.differing), (f64::INFINITY, 1));
        assert!(mismatch.k3().is_finite());
    }
}
