//! The one policy loss, and the likelihood loss of demonstrations: per-token log-probabilities in, per-token
//! cotangents out. Arithmetic is f64 in token order; only the cotangents are rounded to f32.

use serde::{Deserialize, Serialize};

use super::SettingError;
use crate::types::exact;

/// Log-ratios are held within this before `exp`, so that no ratio overflows; beyond it the gradient is 0, as the
/// clamp's own derivative is.
const LOG_RATIO_LIMIT: f64 = 20.0;

/// How far one update may move a token's probability before the loss stops asking for more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClipSettings {
    /// The ratio is clipped below at `1 - epsilon_low`.
    pub epsilon_low: f64,
    /// The ratio is clipped above at `1 + epsilon_high`. Above `epsilon_low`, so that rare tokens can become likely (DAPO).
    pub epsilon_high: f64,
    /// With a negative advantage `A`, hold a token's loss at `-A * dual_clip` (above 1). Off when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dual_clip: Option<f64>,
}

impl Default for ClipSettings {
    /// The values of DAPO (Yu et al. 2025), without dual clip.
    fn default() -> ClipSettings {
        ClipSettings { epsilon_low: 0.2, epsilon_high: 0.28, dual_clip: None }
    }
}

impl ClipSettings {
    /// Refuses values that make no sense as a clip.
    pub fn check(&self) -> Result<(), SettingError> {
        let low = self.epsilon_low;
        SettingError::unless((0.0..=1.0).contains(&low), "epsilon_low", low, "give a value from 0 to 1")?;
        let high = self.epsilon_high;
        SettingError::unless(high >= 0.0 && high.is_finite(), "epsilon_high", high, "give a finite value of at least 0")?;
        let dual = self.dual_clip.unwrap_or(f64::INFINITY);
        SettingError::unless(dual > 1.0, "dual_clip", dual, "give a value above 1, or leave it out")
    }
}

/// One batch's share of the loss, and how each of its tokens moves it.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyLoss {
    /// Sum of token losses over the global denominator: shares of micro-batches add up.
    pub loss: f64,
    /// `[tokens]` d loss / d log_prob.
    pub cotangents: Vec<f32>,
    pub statistics: LossStatistics,
}

/// Sums and counts over tokens; those of micro-batches combine with [`LossStatistics::merge`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossStatistics {
    /// Tokens that took part: advantage not 0, everything finite.
    pub tokens: u64,
    /// Of these, tokens whose loss the ratio clip replaced.
    pub clipped: u64,
    /// Of these, tokens whose loss the dual clip replaced.
    pub dual_clipped: u64,
    /// Tokens left out because a log-probability or advantage was not finite. Above 0 something is broken.
    pub not_finite: u64,
    /// Smallest and largest ratio of probabilities, new over old; infinite the wrong way round while `tokens` is 0.
    #[serde(with = "exact")]
    pub ratio_min: f64,
    #[serde(with = "exact")]
    pub ratio_max: f64,
    /// Sum of `old_log_prob - log_prob`.
    #[serde(with = "exact")]
    pub kl_sum: f64,
}

impl Default for LossStatistics {
    fn default() -> LossStatistics {
        LossStatistics {
            tokens: 0,
            clipped: 0,
            dual_clipped: 0,
            not_finite: 0,
            ratio_min: f64::INFINITY,
            ratio_max: f64::NEG_INFINITY,
            kl_sum: 0.0,
        }
    }
}

impl LossStatistics {
    pub fn merge(&mut self, other: &LossStatistics) {
        self.tokens += other.tokens;
        self.clipped += other.clipped;
        self.dual_clipped += other.dual_clipped;
        self.not_finite += other.not_finite;
        self.ratio_min = self.ratio_min.min(other.ratio_min);
        self.ratio_max = self.ratio_max.max(other.ratio_max);
        self.kl_sum += other.kl_sum;
    }

    /// Share of tokens whose loss the ratio clip replaced; 0 without tokens.
    pub fn clip_fraction(&self) -> f64 {
        self.clipped as f64 / self.tokens.max(1) as f64
    }

    /// Schulman's k1 estimate of KL(old || new) per token, in nats; unbiased, may be negative; 0 without tokens.
    pub fn approximate_kl(&self) -> f64 {
        self.kl_sum / self.tokens.max(1) as f64
    }
}

/// The clipped policy loss: per token `max(-A r, -A clip(r, 1 - epsilon_low, 1 + epsilon_high))` with
/// `r = exp(log_prob - old_log_prob)`, summed and divided by `denominator` (PPO, Schulman et al. 2017; asymmetric clip
/// and token-level mean as in DAPO, Yu et al. 2025, eq. 8; dual clip after Ye et al. 2020).
///
/// `log_probs`, `old_log_probs`, `advantages`: `[tokens]`. `denominator`: number of trained tokens in the whole
/// update, over all micro-batches and ranks; below 1 it counts as 1.
///
/// A token with advantage 0 is masked: it changes nothing, whatever its log-probabilities are. A token with anything
/// not finite contributes nothing and is counted. Both are selected away, not multiplied by 0, which would let NaN through.
pub fn clipped_policy_loss(
    log_probs: &[f32],
    old_log_probs: &[f32],
    advantages: &[f32],
    settings: &ClipSettings,
    denominator: f64,
) -> PolicyLoss {
    assert_eq!(log_probs.len(), old_log_probs.len(), "one old log-probability per token");
    assert_eq!(log_probs.len(), advantages.len(), "one advantage per token");
    let denominator = denominator.max(1.0);
    let mut total = 0.0;
    let mut cotangents = vec![0.0; log_probs.len()];
    let mut statistics = LossStatistics::default();
    for (token, cotangent) in cotangents.iter_mut().enumerate() {
        let advantage = f64::from(advantages[token]);
        if advantage == 0.0 {
            continue;
        }
        let log_ratio = f64::from(log_probs[token]) - f64::from(old_log_probs[token]);
        if !(advantage.is_finite() && log_ratio.is_finite()) {
            statistics.not_finite += 1;
            continue;
        }
        let ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp();
        let free = -advantage * ratio;
        let held = -advantage * ratio.clamp(1.0 - settings.epsilon_low, 1.0 + settings.epsilon_high);
        let ceiling = settings.dual_clip.filter(|_| advantage < 0.0).map_or(f64::INFINITY, |dual_clip| -advantage * dual_clip);
        let clipped = held > free;
        let dual_clipped = free.max(held) > ceiling;
        total += free.max(held).min(ceiling);
        if !clipped && !dual_clipped && log_ratio.abs() <= LOG_RATIO_LIMIT {
            *cotangent = (-advantage * ratio / denominator) as f32;
        }
        statistics.tokens += 1;
        statistics.clipped += u64::from(clipped);
        statistics.dual_clipped += u64::from(dual_clipped);
        statistics.ratio_min = statistics.ratio_min.min(ratio);
        statistics.ratio_max = statistics.ratio_max.max(ratio);
        statistics.kl_sum -= log_ratio;
    }
    PolicyLoss { loss: total / denominator, cotangents, statistics }
}

/// The likelihood loss of rejection fine-tuning: `-weight * log_prob`, summed and divided by `denominator`.
///
/// `log_probs`: `[tokens]`. `weights`: `[tokens]`, all 1 when absent. `denominator`: sum of weights (or number of
/// trained tokens) in the whole update; below 1 it counts as 1. Masking and broken values as in
/// [`clipped_policy_loss`], the weight in place of the advantage; every ratio is 1.
pub fn negative_log_likelihood(log_probs: &[f32], weights: Option<&[f32]>, denominator: f64) -> PolicyLoss {
    if let Some(weights) = weights {
        assert_eq!(log_probs.len(), weights.len(), "one weight per token");
    }
    let denominator = denominator.max(1.0);
    let mut total = 0.0;
    let mut cotangents = vec![0.0; log_probs.len()];
    let mut statistics = LossStatistics::default();
    for (token, cotangent) in cotangents.iter_mut().enumerate() {
        let weight = weights.map_or(1.0, |weights| f64::from(weights[token]));
        if weight == 0.0 {
            continue;
        }
        let log_prob = f64::from(log_probs[token]);
        if !(weight.is_finite() && log_prob.is_finite()) {
            statistics.not_finite += 1;
            continue;
        }
        total -= weight * log_prob;
        *cotangent = (-weight / denominator) as f32;
        statistics.tokens += 1;
        statistics.ratio_min = 1.0;
        statistics.ratio_max = 1.0;
    }
    PolicyLoss { loss: total / denominator, cotangents, statistics }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Loss and gradient of one token whose probability went from `exp(-5)` to `ratio` times that.
    fn one_token(advantage: f32, ratio: f64, settings: &ClipSettings) -> (f64, f32) {
        let result = clipped_policy_loss(&[(-5.0 + ratio.ln()) as f32], &[-5.0], &[advantage], settings, 1.0);
        (result.loss, result.cotangents[0])
    }

    #[test]
    fn published_vectors() {
        let symmetric = ClipSettings { epsilon_low: 0.2, epsilon_high: 0.2, dual_clip: Some(3.0) };
        let dapo = ClipSettings::default();
        // (advantage, ratio, settings, loss, gradient)
        let cases = [
            (-1.0, 0.5, &symmetric, 0.8, 0.0),
            (-1.0, 1.0, &symmetric, 1.0, 1.0),
            (-1.0, 2.0, &symmetric, 2.0, 2.0), // the upper clip never binds against a bad action
            (-1.0, 5.0, &symmetric, 3.0, 0.0), // the dual clip does
            (-1.0, 5.0, &dapo, 5.0, 5.0),
            (1.0, 1.5, &dapo, -1.28, 0.0),
            (1.0, 1.25, &dapo, -1.25, -1.25), // alive where a symmetric clip would be closed
            (1.0, 0.5, &dapo, -0.5, -0.5),
        ];
        for (advantage, ratio, settings, loss, gradient) in cases {
            let (found_loss, found_gradient) = one_token(advantage, ratio, settings);
            assert!((found_loss - loss).abs() < 1e-6, "A {advantage} r {ratio}: loss {found_loss}, not {loss}");
            assert!(
                (found_gradient - gradient).abs() < 1e-6,
                "A {advantage} r {ratio}: gradient {found_gradient}, not {gradient}"
            );
        }
    }

    #[test]
    fn gradient_is_the_derivative() {
        let settings = ClipSettings { dual_clip: Some(3.0), ..ClipSettings::default() };
        for advantage in [-1.5f32, -0.3, 0.3, 1.5] {
            for log_ratio in [-3.0f64, -0.5, -0.1, 0.0, 0.1, 0.2, 0.5, 1.0, 1.5] {
                let loss = |shift: f64| one_token(advantage, (log_ratio + shift).exp(), &settings).0;
                let numeric = (loss(1e-3) - loss(-1e-3)) / 2e-3;
                let exact = f64::from(one_token(advantage, log_ratio.exp(), &settings).1);
                assert!((numeric - exact).abs() < 2e-3, "A {advantage}, log-ratio {log_ratio}: {numeric} against {exact}");
            }
        }
    }

    #[test]
    fn equal_probabilities_give_the_plain_policy_gradient() {
        let result = clipped_policy_loss(&[-1.0, -2.0], &[-1.0, -2.0], &[0.5, -0.25], &ClipSettings::default(), 4.0);
        assert_eq!(result.cotangents, [-0.125, 0.0625]);
        assert_eq!((result.statistics.ratio_min, result.statistics.ratio_max), (1.0, 1.0));
        assert_eq!((result.statistics.clip_fraction(), result.statistics.approximate_kl()), (0.0, 0.0));
    }

    #[test]
    fn far_log_ratios_are_clamped_with_no_gradient() {
        let result = clipped_policy_loss(&[-1.0, -60.0], &[-60.0, -1.0], &[-1.0, 1.0], &ClipSettings::default(), 1.0);
        assert!((result.loss - (20f64.exp() - (-20f64).exp())).abs() < 1e-3);
        assert_eq!(result.cotangents, [0.0, 0.0]);
    }

    #[test]
    fn a_broken_token_is_counted_and_poisons_nothing() {
        let broken = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY];
        for value in broken {
            let result = clipped_policy_loss(&[-1.0, value], &[-1.0, -1.0], &[1.0, 1.0], &ClipSettings::default(), 2.0);
            assert_eq!((result.loss, result.cotangents, result.statistics.not_finite), (-0.5, vec![-0.5, 0.0], 1));
            let result = negative_log_likelihood(&[-1.0, value], None, 2.0);
            assert_eq!((result.loss, result.cotangents, result.statistics.not_finite), (0.5, vec![-0.5, 0.0], 1));
        }
    }

    #[test]
    fn no_tokens_no_loss() {
        let result = clipped_policy_loss(&[], &[], &[], &ClipSettings::default(), 0.0);
        assert_eq!((result.loss, result.statistics.clip_fraction()), (0.0, 0.0));
        assert_eq!(negative_log_likelihood(&[], None, 0.0).loss, 0.0);
    }

    #[test]
    fn likelihood_weights() {
        let result = negative_log_likelihood(&[-1.0, -3.0, f32::NAN], Some(&[1.0, 0.5, 0.0]), 2.0);
        assert_eq!(result.loss, 1.25);
        assert_eq!(result.cotangents, [-0.5, -0.25, 0.0]);
        assert_eq!((result.statistics.tokens, result.statistics.not_finite), (2, 0));
    }

    #[test]
    fn settings_are_checked() {
        assert_eq!(ClipSettings::default().check(), Ok(()));
        let refused = |settings: ClipSettings| settings.check().unwrap_err().to_string();
        let text = refused(ClipSettings { epsilon_low: 1.5, ..ClipSettings::default() });
        assert_eq!(text, "epsilon_low is 1.5: give a value from 0 to 1");
        assert!(refused(ClipSettings { epsilon_high: f64::NAN, ..ClipSettings::default() }).contains("epsilon_high"));
        assert!(refused(ClipSettings { dual_clip: Some(1.0), ..ClipSettings::default() }).contains("dual_clip"));
    }

    /// `(log_prob, old_log_prob, advantage)` of each token.
    fn tokens() -> impl Strategy<Value = Vec<(f32, f32, f32)>> {
        prop::collection::vec((-8.0..0.0f32, -8.0..0.0f32, -2.0..2.0f32), 1..60)
    }

    fn loss_of(tokens: &[(f32, f32, f32)], denominator: f64) -> PolicyLoss {
        let column = |pick: fn(&(f32, f32, f32)) -> f32| tokens.iter().map(pick).collect::<Vec<_>>();
        let settings = ClipSettings { dual_clip: Some(3.0), ..ClipSettings::default() };
        clipped_policy_loss(&column(|token| token.0), &column(|token| token.1), &column(|token| token.2), &settings, denominator)
    }

    proptest! {
        #[test]
        fn micro_batches_add_up(tokens in tokens(), cut in 0..60usize) {
            let denominator = tokens.len() as f64;
            let (first, second) = tokens.split_at(cut.min(tokens.len()));
            let (first, second) = (loss_of(first, denominator), loss_of(second, denominator));
            let whole = loss_of(&tokens, denominator);
            prop_assert!((first.loss + second.loss - whole.loss).abs() < 1e-6 * (1.0 + whole.loss.abs()));
            prop_assert_eq!([first.cotangents, second.cotangents].concat(), whole.cotangents);
            let mut merged = first.statistics;
            merged.merge(&second.statistics);
            prop_assert!((merged.kl_sum - whole.statistics.kl_sum).abs() < 1e-9);
            prop_assert_eq!(LossStatistics { kl_sum: 0.0, ..merged }, LossStatistics { kl_sum: 0.0, ..whole.statistics });
        }

        #[test]
        fn order_of_tokens_does_not_matter(tokens in tokens(), rotation in 0..60usize) {
            let rotation = rotation % tokens.len();
            let mut rotated = tokens.clone();
            rotated.rotate_left(rotation);
            let (mut whole, moved) = (loss_of(&tokens, 10.0), loss_of(&rotated, 10.0));
            prop_assert!((whole.loss - moved.loss).abs() < 1e-6 * (1.0 + whole.loss.abs()));
            whole.cotangents.rotate_left(rotation);
            prop_assert_eq!(whole.cotangents, moved.cotangents);
        }

        #[test]
        fn masked_tokens_change_nothing(tokens in tokens(), place in 0..60usize, wild in prop::sample::select(vec![
            f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 0.0,
        ])) {
            let place = place % (tokens.len() + 1);
            let mut masked = tokens.clone();
            masked.insert(place, (wild, -wild, 0.0));
            let (without, mut with) = (loss_of(&tokens, 10.0), loss_of(&masked, 10.0));
            prop_assert_eq!(with.cotangents.remove(place), 0.0);
            prop_assert_eq!(with, without);
        }

        #[test]
        fn one_outer_denominator_scales_everything(tokens in tokens(), denominator in 1.0..1e6f64) {
            let (unit, scaled) = (loss_of(&tokens, 1.0), loss_of(&tokens, denominator));
            prop_assert!((unit.loss / denominator - scaled.loss).abs() <= 1e-12 * unit.loss.abs());
            for (one, other) in unit.cotangents.iter().zip(&scaled.cotangents) {
                prop_assert!((f64::from(*one) / denominator - f64::from(*other)).abs() <= 1e-6 * f64::from(other.abs()));
            }
        }
    }
}
