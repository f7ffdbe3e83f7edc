//! How far the sampler's log-probabilities are from those the trainer computes for the same tokens and weights.

use serde::{Deserialize, Serialize};

use super::ratio::k3;
use crate::types::exact;

/// Sums and extremes over tokens. All figures of difference are exactly 0 when both sides are equal bit for bit.
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
    /// Over tokens where both are finite: of the sampler and of the trainer.
    sampled: Moments,
    recomputed: Moments,
    finite: u64,
    #[serde(with = "exact")]
    product_sum: f64,
}

/// Sums of log-probabilities `l`, of probabilities `p` and of their squares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Moments {
    #[serde(with = "exact")]
    log_prob: f64,
    #[serde(with = "exact")]
    probability: f64,
    #[serde(with = "exact")]
    square: f64,
}

impl Moments {
    fn note(&mut self, log_prob: f64) -> f64 {
        let probability = log_prob.exp();
        self.add(&Moments { log_prob, probability, square: probability * probability });
        probability
    }

    fn add(&mut self, other: &Moments) {
        self.log_prob += other.log_prob;
        self.probability += other.probability;
        self.square += other.square;
    }
}

impl Mismatch {
    /// Compares `sampled` with `recomputed`, both `[tokens]`.
    pub fn measure(sampled: &[f32], recomputed: &[f32]) -> Mismatch {
        assert_eq!(sampled.len(), recomputed.len(), "one recomputed log-probability per sampled one");
        let mut mismatch = Mismatch { tokens: sampled.len() as u64, ..Mismatch::default() };
        for (sampled, recomputed) in sampled.iter().zip(recomputed) {
            if sampled.is_finite() && recomputed.is_finite() {
                mismatch.finite += 1;
                let probability = mismatch.sampled.note(f64::from(*sampled));
                mismatch.product_sum += probability * mismatch.recomputed.note(f64::from(*recomputed));
            }
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
            mismatch.k3_sum += k3(difference);
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
        self.sampled.add(&other.sampled);
        self.recomputed.add(&other.recomputed);
        self.finite += other.finite;
        self.product_sum += other.product_sum;
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

    /// Perplexity of the sampler over the tokens, the exponential of the mean negative log-probability; 1 without tokens.
    pub fn sampled_perplexity(&self) -> f64 {
        (-self.sampled.log_prob / self.finite.max(1) as f64).exp()
    }

    /// Perplexity of the trainer over the same tokens.
    pub fn recomputed_perplexity(&self) -> f64 {
        (-self.recomputed.log_prob / self.finite.max(1) as f64).exp()
    }

    /// Pearson's correlation of the two probabilities of each token; 1 where all are equal bit for bit. `None` if one side
    /// does not vary. MiniMax-M1 saw 0.987 rise to 0.997 when its head computed in f32.
    pub fn correlation(&self) -> Option<f64> {
        if self.differing == 0 {
            return Some(1.0);
        }
        let tokens = self.finite as f64;
        let covariance = |product: f64, one: f64, other: f64| product / tokens - (one / tokens) * (other / tokens);
        let (sampled, recomputed) = (&self.sampled, &self.recomputed);
        let variance = |side: &Moments| covariance(side.square, side.probability, side.probability);
        // A variance is a difference of sums: what rounding leaves of one that is 0 does not count.
        let varies = |side: &Moments| variance(side) > 1e-12 * (side.square / tokens);
        let together = covariance(self.product_sum, sampled.probability, recomputed.probability);
        let correlation = || (together / (variance(sampled) * variance(recomputed)).sqrt()).clamp(-1.0, 1.0);
        (varies(sampled) && varies(recomputed)).then(correlation)
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
        assert_eq!((mismatch.tokens, mismatch.differing, mismatch.max_absolute), (5, 0, 0.0));
        assert_eq!(mismatch.sampled_perplexity(), mismatch.recomputed_perplexity());
        assert_eq!(mismatch.correlation(), Some(1.0));
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

    #[test]
    fn perplexities_and_correlation() {
        let (sampled, recomputed) = ([-1.0f32, -2.0, -0.5, f32::NEG_INFINITY], [-1.5f32, -1.75, -0.25, -3.0]);
        let mut mismatch = Mismatch::measure(&sampled[..2], &recomputed[..2]);
        mismatch.merge(&Mismatch::measure(&sampled[2..], &recomputed[2..]));
        assert!((mismatch.sampled_perplexity() - (3.5f64 / 3.0).exp()).abs() < 1e-12, "what is not finite stays out");
        assert!((mismatch.recomputed_perplexity() - (3.5f64 / 3.0).exp()).abs() < 1e-12);
        let [p, q] = [sampled, recomputed].map(|list| [0, 1, 2].map(|token| f64::from(list[token]).exp()));
        let mean = |list: [f64; 3]| list.iter().sum::<f64>() / 3.0;
        let centred = |list: [f64; 3]| list.map(|value| value - mean(list));
        let dot = |one: [f64; 3], other: [f64; 3]| one.iter().zip(other).map(|(one, other)| one * other).sum::<f64>();
        let (p, q) = (centred(p), centred(q));
        let expected = dot(p, q) / (dot(p, p) * dot(q, q)).sqrt();
        assert!((mismatch.correlation().unwrap() - expected).abs() < 1e-9);
        assert_eq!(Mismatch::measure(&[-1.0], &[-1.1]).correlation(), None, "one token does not vary");
        assert_eq!(Mismatch::measure(&[-2.3; 5], &[-2.82; 5]).correlation(), None, "nor do five alike, whatever rounding leaves");
        assert_eq!(Mismatch::default().sampled_perplexity(), 1.0);
    }
}
