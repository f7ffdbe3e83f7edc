//! What is done about a sampler whose probabilities are not quite the trainer's: importance weights, and rejection of what
//! lies too far off.
//!
//! Three policies are in play: the sampler `mu`, the trainer's recomputation `pi_old` before the update, and `pi` now.
//! Decoupled, `pi / pi_old` is clipped and `pi_old / mu` is the weight. In bypass, `pi_old` is taken to be `mu`, nothing is
//! recomputed, and the clipped ratio already is the weight; REINFORCE, which has no ratio, takes `pi / mu` there.

mod settings;
mod statistics;

use std::ops::Range;

pub use settings::{Beyond, CorrectionSettings, Level, OldPolicy, Over, RejectionSettings, Statistic, WeightSettings};
pub use statistics::WeightStatistics;

use super::ratio::{LOG_RATIO_LIMIT, k3, ratio};
use super::real::Real;

/// What weights and rejections are a function of. Sequences lie end to end, each whole.
#[derive(Clone, Copy, Debug)]
pub struct SampledTokens<'a, R> {
    /// `[sequences + 1]` offsets into the lists below, the first 0, the last their length.
    pub starts: &'a [usize],
    /// `[tokens]` as in [`super::PolicyTokens`]. Nothing else of other tokens is looked at.
    pub trained: &'a [bool],
    /// `[tokens]` of the trainer: `pi_old` (decoupled) or `pi` (REINFORCE in bypass).
    pub log_probs: &'a [R],
    /// `[tokens]` of the sampler.
    pub sampled_log_probs: &'a [R],
}

impl<R: Real> SampledTokens<'_, R> {
    fn sequences(&self) -> impl Iterator<Item = Range<usize>> {
        let tokens = self.log_probs.len();
        assert_eq!(self.starts.last().copied().unwrap_or(0), tokens, "sequences cover all tokens");
        assert_eq!([self.trained.len(), self.sampled_log_probs.len()], [tokens; 2], "one mark and one sampled one per token");
        self.starts.windows(2).map(|ends| ends[0]..ends[1])
    }

    fn trained(&self, range: Range<usize>) -> impl Iterator<Item = usize> {
        range.filter(|&token| self.trained[token])
    }

    fn log_ratio(&self, token: usize) -> f64 {
        let (log_prob, sampled): (f64, f64) = (self.log_probs[token].into(), self.sampled_log_probs[token].into());
        log_prob - sampled
    }
}

/// Importance weights within bounds, before normalisation, with what is to be known of them.
///
/// A token that is not trained has weight 0, and so has one whose log-ratio is not finite, which also stays out of its
/// sequence's ratio. Returns `[tokens]` weights.
pub fn importance_weights<R: Real>(tokens: &SampledTokens<R>, settings: &WeightSettings) -> (Vec<R>, WeightStatistics) {
    let mut weights = vec![R::rounded(0.0); tokens.log_probs.len()];
    let mut statistics = WeightStatistics::default();
    for range in tokens.sequences() {
        let finite: Vec<usize> = tokens.trained(range.clone()).filter(|&token| tokens.log_ratio(token).is_finite()).collect();
        statistics.not_finite += (tokens.trained(range).count() - finite.len()) as u64;
        let sum = || finite.iter().map(|&token| tokens.log_ratio(token)).sum::<f64>();
        let of_sequence = match settings.level {
            Level::Token => None,
            Level::Sequence => Some(ratio(sum())),
            Level::Geometric => Some(ratio(sum() / finite.len().max(1) as f64)),
        };
        if let (Some(raw), false) = (of_sequence, finite.is_empty()) {
            statistics.note(raw, within_bounds(raw, settings), settings);
        }
        for token in finite {
            let raw = of_sequence.unwrap_or_else(|| ratio(tokens.log_ratio(token)));
            let weight = within_bounds(raw, settings);
            if of_sequence.is_none() {
                statistics.note(raw, weight, settings);
            }
            weights[token] = R::rounded(weight);
        }
    }
    (weights, statistics)
}

fn within_bounds(raw: f64, settings: &WeightSettings) -> f64 {
    let lower = settings.lower.unwrap_or(0.0);
    match settings.beyond {
        Beyond::Truncate => raw.max(lower).min(settings.upper),
        Beyond::Mask if lower <= raw && raw <= settings.upper => raw,
        Beyond::Mask => 0.0,
    }
}

/// What the settings make of a sampler that is not quite the trainer.
#[derive(Clone, Debug, PartialEq)]
pub struct Correction<R> {
    /// `[tokens]` those that are trained: what passes all rejections.
    pub accepted: Vec<bool>,
    /// `[tokens]` not normalised; `None` where no weight is applied.
    pub weights: Option<Vec<R>>,
    /// Of the weights of what is accepted; of raw ratios per token where no weight is applied.
    pub statistics: WeightStatistics,
}

/// Rejects, then weighs what is left.
pub fn correct<R: Real>(tokens: &SampledTokens<R>, settings: &CorrectionSettings) -> Correction<R> {
    let accepted = accepted(tokens, &settings.rejections);
    let kept = SampledTokens { trained: &accepted, ..*tokens };
    let (weights, statistics) = importance_weights(&kept, settings.weight.as_ref().unwrap_or(&WeightSettings::UNBOUNDED));
    Correction { weights: settings.weight.is_some().then_some(weights), accepted, statistics }
}

/// Divides weights by `mean`, that of the whole rollout ([`WeightStatistics::mean`] after merging). Weights that are all
/// 0 stay so.
pub fn normalise<R: Real>(weights: &mut [R], mean: f64) {
    if mean > 1e-8 {
        for weight in weights {
            *weight = R::rounded((*weight).into() / mean);
        }
    }
}

/// Which trained tokens meet all conditions: the `trained` of a loss.
///
/// A token whose log-ratio is not finite is not accepted, nor is the sequence that holds it, where a condition judges
/// sequences. Whether what is rejected still counts in the loss's denominators is up to the caller, who counts before or
/// after. Returns `[tokens]`.
pub fn accepted<R: Real>(tokens: &SampledTokens<R>, rejections: &[RejectionSettings]) -> Vec<bool> {
    let mut accepted = tokens.trained.to_vec();
    for rejection in rejections {
        let statistic = |token: usize| {
            let log_ratio = tokens.log_ratio(token);
            if !log_ratio.is_finite() {
                return f64::NAN; // no condition accepts it, nor what it is summed into
            }
            let log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
            match rejection.statistic {
                Statistic::K1 => log_ratio,
                Statistic::K2 => 0.5 * log_ratio * log_ratio,
                Statistic::K3 => k3(log_ratio),
            }
        };
        for range in tokens.sequences() {
            let trained = || tokens.trained(range.clone());
            let sum = || trained().map(statistic).sum::<f64>();
            let of_sequence = match rejection.over {
                Over::Token => None,
                Over::SequenceSum => Some(sum()),
                Over::SequenceMean => Some(sum() / trained().count().max(1) as f64),
                Over::SequenceMax => Some(trained().map(statistic).fold(0.0, nan_or_larger)),
            };
            for token in trained() {
                accepted[token] &= rejection.accepts(of_sequence.unwrap_or_else(|| statistic(token)));
            }
        }
    }
    accepted
}

/// The larger one, or NaN if one is: `f64::max` would forget it.
fn nan_or_larger(one: f64, other: f64) -> f64 {
    if one.is_nan() || other.is_nan() { f64::NAN } else { one.max(other) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRAINED: [bool; 5] = [true, false, true, true, true];
    const STARTS: [usize; 3] = [0, 3, 5];

    /// Ratios 4, (wild), 0.5 | 1, 0.1.
    fn log_ratios() -> [f64; 5] {
        [4f64.ln(), f64::NAN, 0.5f64.ln(), 0.0, 0.1f64.ln()]
    }

    fn tokens<'a>(log_probs: &'a [f64; 5]) -> SampledTokens<'a, f64> {
        SampledTokens { starts: &STARTS, trained: &TRAINED, log_probs, sampled_log_probs: &[0.0; 5] }
    }

    fn weigh(level: Level, beyond: Beyond, lower: Option<f64>) -> (Vec<f64>, WeightStatistics) {
        importance_weights(&tokens(&log_ratios()), &WeightSettings { level, beyond, lower, ..WeightSettings::default() })
    }

    #[track_caller]
    fn assert_close(found: &[f64], expected: &[f64]) {
        let close = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-12);
        assert!(close && found.len() == expected.len(), "{found:?}, not {expected:?}");
    }

    #[test]
    fn levels_and_bounds() {
        use {Beyond::*, Level::*};
        assert_close(&weigh(Token, Truncate, None).0, &[2.0, 0.0, 0.5, 1.0, 0.1]);
        assert_close(&weigh(Token, Truncate, Some(0.4)).0, &[2.0, 0.0, 0.5, 1.0, 0.4]);
        assert_close(&weigh(Token, Mask, None).0, &[0.0, 0.0, 0.5, 1.0, 0.1]);
        assert_close(&weigh(Token, Mask, Some(0.4)).0, &[0.0, 0.0, 0.5, 1.0, 0.0]);
        assert_close(&weigh(Sequence, Truncate, None).0, &[2.0, 0.0, 2.0, 0.1, 0.1]);
        assert_close(&weigh(Sequence, Mask, Some(0.4)).0, &[2.0, 0.0, 2.0, 0.0, 0.0]);
        let (two, tenth) = (2f64.sqrt(), 0.1f64.sqrt());
        assert_close(&weigh(Geometric, Truncate, None).0, &[two, 0.0, two, tenth, tenth]);
        assert_close(&weigh(Geometric, Mask, Some(0.99)).0, &[two, 0.0, two, 0.0, 0.0]);
    }

    #[test]
    fn product_ratios_reject_long_sequences_and_geometric_ones_do_not() {
        for (length, product) in [(10, 2.593_742), (100, 13_780.612)] {
            let log_probs = vec![1.1f64.ln(); length];
            let (starts, zeros, all) = ([0, length], vec![0.0; length], vec![true; length]);
            let tokens = SampledTokens { starts: &starts, trained: &all, log_probs: &log_probs, sampled_log_probs: &zeros };
            let of = |level| importance_weights(&tokens, &WeightSettings { level, upper: 1e9, ..WeightSettings::default() }).0[0];
            assert!((of(Level::Sequence) / product - 1.0).abs() < 1e-6, "{}", of(Level::Sequence));
            assert!((of(Level::Geometric) - 1.1).abs() < 1e-12);
        }
    }

    #[test]
    fn statistics_of_tokens_and_of_sequences() {
        let (weights, statistics) = weigh(Level::Token, Beyond::Truncate, None);
        assert_eq!((statistics.units, statistics.above, statistics.below, statistics.not_finite), (4, 1, 1, 0));
        assert_close(&[statistics.ratio_min, statistics.ratio_max, statistics.ratio_mean()], &[0.1, 4.0, 1.4]);
        assert_close(&[statistics.mean(), statistics.fraction_above(), statistics.fraction_below()], &[0.9, 0.25, 0.25]);
        let applied = [2.0, 0.5, 1.0, 0.1f64];
        let squares = applied.iter().map(|weight| (weight / 0.9).powi(2)).sum::<f64>() / 4.0;
        assert_close(&[statistics.effective_sample_size()], &[1.0 / squares]);

        let mut normalised = weights.clone();
        normalise(&mut normalised, statistics.mean());
        assert_close(&normalised, &[2.0 / 0.9, 0.0, 0.5 / 0.9, 1.0 / 0.9, 0.1 / 0.9]);
        normalise(&mut normalised, 0.0);
        assert_close(&normalised[..1], &[2.0 / 0.9]);

        let (_, of_sequences) = weigh(Level::Sequence, Beyond::Mask, None);
        assert_eq!((of_sequences.units, of_sequences.above, of_sequences.below), (2, 0, 1));
        let mut merged = statistics.clone();
        merged.merge(&WeightStatistics::default());
        assert_eq!(merged, statistics);
        assert_eq!(WeightStatistics::default().effective_sample_size(), 0.0);
        assert_eq!(WeightStatistics::default().mean(), 0.0);
    }

    #[test]
    fn what_is_rejected_is_not_weighed() {
        let log_ratios = log_ratios();
        let sampled = tokens(&log_ratios);
        let nothing = correct(&sampled, &CorrectionSettings::default());
        assert_eq!((nothing.accepted.as_slice(), &nothing.weights), (&TRAINED[..], &None));
        assert_close(&[nothing.statistics.ratio_max, nothing.statistics.ratio_mean()], &[4.0, 1.4]);
        let rejections = vec![RejectionSettings { statistic: Statistic::K1, over: Over::Token, lower: None, upper: 3.0 }];
        let settings =
            CorrectionSettings { weight: Some(WeightSettings::default()), rejections, ..CorrectionSettings::default() };
        let corrected = correct(&sampled, &settings);
        assert_eq!(corrected.accepted, [false, false, true, true, false]);
        assert_close(&corrected.weights.unwrap(), &[0.0, 0.0, 0.5, 1.0, 0.0]);
        assert_eq!((corrected.statistics.units, corrected.statistics.max), (2, 1.0));
    }

    #[test]
    fn broken_and_far_values_do_not_spread() {
        let broken = [f64::NAN, f64::NAN, 0.0, f64::INFINITY, 1e6];
        let (weights, statistics) = importance_weights(&tokens(&broken), &WeightSettings::default());
        assert_eq!(weights, [0.0, 0.0, 1.0, 0.0, 2.0]);
        assert_eq!((statistics.not_finite, statistics.units, statistics.ratio_max), (2, 3 - 1, 20f64.exp()));
        let condition = |over| [RejectionSettings { statistic: Statistic::K3, over, lower: None, upper: 1e3 }];
        assert_eq!(accepted(&tokens(&broken), &condition(Over::Token)), [false, false, true, false, false]);
        for over in [Over::SequenceSum, Over::SequenceMean, Over::SequenceMax] {
            assert_eq!(accepted(&tokens(&broken), &condition(over)), [false; 5], "{over:?}");
        }
        // k3 of the limit that -inf would be held to is 19, and small in a mean.
        let vanished = [f64::NEG_INFINITY, f64::NAN, 0.0, 0.0, 0.0];
        assert_eq!(accepted(&tokens(&vanished), &condition(Over::Token)), [false, false, true, true, true]);
        for over in [Over::SequenceSum, Over::SequenceMean, Over::SequenceMax] {
            assert_eq!(accepted(&tokens(&vanished), &condition(over)), [false, false, false, true, true], "{over:?}");
        }
    }

    #[test]
    fn rejections_judge_tokens_or_sequences_and_all_must_accept() {
        let accept = |rejections: &[RejectionSettings]| accepted(&tokens(&log_ratios()), rejections);
        let condition = |statistic, over, lower, upper| RejectionSettings { statistic, over, lower, upper };
        assert_eq!(accept(&[]), TRAINED);
        let token = condition(Statistic::K1, Over::Token, None, 2.0);
        assert_eq!(accept(std::slice::from_ref(&token)), [false, false, true, true, false]);
        let sum = condition(Statistic::K1, Over::SequenceSum, Some(0.5), 3.0);
        assert_eq!(accept(std::slice::from_ref(&sum)), [true, false, true, false, false]);
        assert_eq!(accept(&[token, sum]), [false, false, true, false, false]);
        let geometric = condition(Statistic::K1, Over::SequenceMean, Some(0.3), 1.2);
        assert_eq!(accept(&[geometric]), [false, false, false, true, true]);
        let largest = condition(Statistic::K2, Over::SequenceMax, None, 1.0);
        assert_eq!(accept(&[largest]), [true, false, true, false, false]);
        let k3 = condition(Statistic::K3, Over::SequenceMean, None, 1.0);
        assert_eq!(accept(&[k3]), [true, false, true, true, true]);
    }
}
