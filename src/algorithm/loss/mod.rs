//! The one policy loss, and the likelihood loss of demonstrations: per-token log-probabilities in, per-token
//! cotangents out. Arithmetic is f64 in token order; only what is handed back is rounded to the type that came in.

mod aggregation;
mod divergence;
mod objective;
mod settings;
mod statistics;

use std::ops::Range;

pub use aggregation::{Aggregation, Denominators};
pub use divergence::{KlEstimator, KlSettings};
pub use settings::{ClipSettings, LossSettings, Objective};
pub use statistics::LossStatistics;

use super::ratio::k3;
use super::real::Real;
use objective::{Bound, term};

/// What the policy loss is a function of. Sequences lie end to end, each whole; where it lies changes nothing.
#[derive(Clone, Copy, Debug)]
pub struct PolicyTokens<'a, R> {
    /// `[sequences + 1]` offsets into the lists below, the first 0, the last their length.
    pub starts: &'a [usize],
    /// `[tokens]` true where the policy sampled the token and it is to be trained on. Nothing else of other tokens is looked at.
    pub trained: &'a [bool],
    /// `[tokens]` of the policy that is trained.
    pub log_probs: &'a [R],
    /// `[tokens]` of the policy before the update: recomputed by the trainer, or the sampler's own (bypass).
    pub old_log_probs: &'a [R],
    /// `[tokens]`
    pub advantages: &'a [R],
    /// `[tokens]` importance weights, constants to the gradient; all 1 when absent. They do not touch KL and entropy.
    pub weights: Option<&'a [R]>,
    /// `[tokens]` of the reference model. Needed if the KL coefficient is not 0.
    pub reference_log_probs: Option<&'a [R]>,
    /// `[tokens]` entropies of the policy, in nats. Needed if the entropy coefficient is not 0.
    pub entropies: Option<&'a [R]>,
}

/// One micro-batch's share of the loss, and how each of its tokens moves it.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyLoss<R = f32> {
    /// All terms, over their denominators: shares of micro-batches add up.
    pub loss: f64,
    /// `[tokens]` d loss / d log_prob.
    pub cotangents: Vec<R>,
    /// `[tokens]` d loss / d entropy, if there is an entropy term.
    pub entropy_cotangents: Option<Vec<R>>,
    pub statistics: LossStatistics,
}

/// The policy loss: per trained token the objective's term times the importance weight, plus the divergence from the
/// reference, minus the entropy, each times its coefficient; summed over denominators of the whole update.
///
/// A token that is not trained changes nothing, whatever its values: it is selected away, not multiplied by 0, which would
/// let NaN through. A trained token with anything not finite contributes nothing either, and is counted.
///
/// # Panics
/// If lists differ in length, or one that a coefficient asks for is absent.
pub fn policy_loss<R: Real>(tokens: &PolicyTokens<R>, settings: &LossSettings, denominators: &Denominators) -> PolicyLoss<R> {
    tokens.check(settings);
    let with_entropy = settings.entropy_coefficient != 0.0;
    let mut result = PolicyLoss {
        loss: 0.0,
        cotangents: vec![R::rounded(0.0); tokens.log_probs.len()],
        entropy_cotangents: with_entropy.then(|| vec![R::rounded(0.0); tokens.log_probs.len()]),
        statistics: LossStatistics::default(),
    };
    for ends in tokens.starts.windows(2) {
        add_sequence(&mut result, tokens, ends[0]..ends[1], settings, denominators);
    }
    result
}

/// Adds the tokens `range`, one sequence.
fn add_sequence<R: Real>(
    result: &mut PolicyLoss<R>,
    tokens: &PolicyTokens<R>,
    range: Range<usize>,
    settings: &LossSettings,
    denominators: &Denominators,
) {
    let trained = range.clone().filter(|&token| tokens.trained[token]).count();
    let denominator = settings.aggregation.denominator(trained, settings.constant, denominators);
    let of_sequence = (settings.objective == Objective::Gspo).then(|| tokens.mean_log_ratio(range.clone(), settings));
    let statistics = &mut result.statistics;
    let mut total = 0.0;
    for token in range.filter(|&token| tokens.trained[token]) {
        let Some(values) = tokens.finite(token, settings) else {
            statistics.not_finite += 1;
            continue;
        };
        let log_ratio = of_sequence.unwrap_or(values.log_ratio);
        let term = term(settings.objective, &settings.clip, values.advantage, values.log_prob, log_ratio);
        let (mut loss, mut slope) = (values.weight * term.loss, values.weight * term.slope);
        if let Some(difference) = values.reference_difference {
            let (divergence, divergence_slope) = settings.kl.estimate(difference);
            loss += settings.kl.coefficient * divergence;
            slope += settings.kl.coefficient * divergence_slope;
            statistics.reference_kl_sum += divergence;
        }
        if let Some(cotangents) = &mut result.entropy_cotangents {
            loss -= settings.entropy_coefficient * values.entropy;
            cotangents[token] = R::rounded(-settings.entropy_coefficient / denominator);
        }
        total += loss;
        result.cotangents[token] = R::rounded(slope / denominator);
        statistics.tokens += 1;
        statistics.clipped += u64::from(matches!(term.bound, Bound::Low | Bound::High));
        statistics.clipped_high += u64::from(term.bound == Bound::High);
        statistics.dual_clipped += u64::from(term.bound == Bound::Dual);
        statistics.ratio_min = statistics.ratio_min.min(term.ratio);
        statistics.ratio_max = statistics.ratio_max.max(term.ratio);
        statistics.kl_sum -= values.log_ratio;
        statistics.k3_sum += k3(values.log_ratio);
    }
    result.loss += total / denominator;
}

/// What is known of one trained token, everything finite.
struct TokenValues {
    log_prob: f64,
    log_ratio: f64,
    advantage: f64,
    weight: f64,
    /// `log_prob - reference_log_prob`, if the loss has a KL term.
    reference_difference: Option<f64>,
    /// 0 if the loss has no entropy term.
    entropy: f64,
}

impl<R: Real> PolicyTokens<'_, R> {
    fn check(&self, settings: &LossSettings) {
        let tokens = self.log_probs.len();
        assert_eq!(self.starts.last().copied().unwrap_or(0), tokens, "sequences cover all tokens");
        assert_eq!(self.trained.len(), tokens, "one mark per token");
        assert_eq!(self.old_log_probs.len(), tokens, "one old log-probability per token");
        assert_eq!(self.advantages.len(), tokens, "one advantage per token");
        for list in [self.weights, self.reference_log_probs, self.entropies].into_iter().flatten() {
            assert_eq!(list.len(), tokens, "one weight, reference log-probability and entropy per token");
        }
        assert!(settings.kl.coefficient == 0.0 || self.reference_log_probs.is_some(), "a KL term needs a reference");
        assert!(settings.entropy_coefficient == 0.0 || self.entropies.is_some(), "an entropy term needs entropies");
    }

    /// The values of a token that `settings` use; `None` if one is not finite.
    fn finite(&self, token: usize, settings: &LossSettings) -> Option<TokenValues> {
        let log_prob: f64 = self.log_probs[token].into();
        let old_log_prob: f64 = self.old_log_probs[token].into();
        let reference = self.reference_log_probs.filter(|_| settings.kl.coefficient != 0.0);
        let entropies = self.entropies.filter(|_| settings.entropy_coefficient != 0.0);
        let values = TokenValues {
            log_prob,
            log_ratio: log_prob - old_log_prob,
            advantage: self.advantages[token].into(),
            weight: self.weights.map_or(1.0, |weights| weights[token].into()),
            reference_difference: reference.map(|reference| log_prob - reference[token].into()),
            entropy: entropies.map_or(0.0, |entropies| entropies[token].into()),
        };
        let all = [values.log_ratio, values.advantage, values.weight, values.reference_difference.unwrap_or(0.0), values.entropy];
        all.iter().all(|value| value.is_finite()).then_some(values)
    }

    /// The mean log-ratio over the trained tokens of a sequence: the logarithm of GSPO's ratio.
    fn mean_log_ratio(&self, range: Range<usize>, settings: &LossSettings) -> f64 {
        let (mut sum, mut count) = (0.0, 0usize);
        for token in range.filter(|&token| self.trained[token]) {
            if let Some(values) = self.finite(token, settings) {
                sum += values.log_ratio;
                count += 1;
            }
        }
        sum / count.max(1) as f64
    }
}

/// The likelihood loss of rejection fine-tuning: `-weight * log_prob`, summed and divided by `denominator`. It is
/// REINFORCE with the weight in place of the advantage; every ratio is 1.
///
/// `log_probs`: `[tokens]`. `weights`: `[tokens]`, all 1 when absent; a token with weight 0 is not trained. `denominator`:
/// sum of weights (or number of trained tokens) in the whole update; below 1 it counts as 1.
pub fn negative_log_likelihood<R: Real>(log_probs: &[R], weights: Option<&[R]>, denominator: f64) -> PolicyLoss<R> {
    let ones = vec![R::rounded(1.0); if weights.is_some() { 0 } else { log_probs.len() }];
    let settings = LossSettings { objective: Objective::Reinforce, ..LossSettings::default() };
    token_mean(log_probs, log_probs, weights.unwrap_or(&ones), &settings, denominator)
}

/// [`policy_loss`] over tokens of which only those with an advantage are trained.
fn token_mean<R: Real>(
    log_probs: &[R],
    old_log_probs: &[R],
    advantages: &[R],
    settings: &LossSettings,
    denominator: f64,
) -> PolicyLoss<R> {
    let trained: Vec<bool> = advantages.iter().map(|&advantage| advantage.into() != 0.0).collect();
    let tokens = PolicyTokens {
        starts: &[0, log_probs.len()],
        trained: &trained,
        log_probs,
        old_log_probs,
        advantages,
        weights: None,
        reference_log_probs: None,
        entropies: None,
    };
    policy_loss(&tokens, settings, &Denominators { tokens: denominator, sequences: 1.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The clipped policy loss of DAPO: [`policy_loss`] with its default objective and a mean over tokens, of which those
    /// with an advantage of 0 are not trained.
    fn clipped_policy_loss<R: Real>(
        log_probs: &[R],
        old_log_probs: &[R],
        advantages: &[R],
        clip: &ClipSettings,
        denominator: f64,
    ) -> PolicyLoss<R> {
        let settings = LossSettings { clip: clip.clone(), ..LossSettings::default() };
        token_mean(log_probs, old_log_probs, advantages, &settings, denominator)
    }

    /// Loss and gradient of one token whose probability went from `exp(-5)` to `ratio` times that.
    fn one_token<R: Real>(advantage: f64, ratio: f64, settings: &ClipSettings) -> (f64, f64) {
        let [log_prob, old, advantage] = [-5.0 + ratio.ln(), -5.0, advantage].map(R::rounded);
        let result = clipped_policy_loss(&[log_prob], &[old], &[advantage], settings, 1.0);
        (result.loss, result.cotangents[0].into())
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
            let double = one_token::<f64>(advantage, ratio, settings);
            let single = one_token::<f32>(advantage, ratio, settings);
            for (found, tolerance) in [(double, 4e-15), (single, 1e-6)] {
                assert!((found.0 - loss).abs() < tolerance, "A {advantage} r {ratio}: loss {}, not {loss}", found.0);
                assert!((found.1 - gradient).abs() < tolerance, "A {advantage} r {ratio}: gradient {}, not {gradient}", found.1);
            }
        }
    }

    /// Loss, cotangents and statistics of two sequences of two and one tokens, all trained, under other objectives.
    fn two_sequences(settings: &LossSettings) -> PolicyLoss<f64> {
        let tokens = PolicyTokens {
            starts: &[0, 2, 3],
            trained: &[true; 3],
            log_probs: &[-1.0 + 4f64.ln(), -2.0, -3.0 + 0.5f64.ln()],
            old_log_probs: &[-1.0, -2.0, -3.0],
            advantages: &[1.0, 1.0, -2.0],
            weights: Some(&[0.5, 1.0, 2.0]),
            reference_log_probs: None,
            entropies: None,
        };
        policy_loss(&tokens, settings, &Denominators { tokens: 3.0, sequences: 2.0 })
    }

    #[track_caller]
    fn assert_all_close(found: &[f64], expected: &[f64]) {
        let close = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-14);
        assert!(close && found.len() == expected.len(), "{found:?}, not {expected:?}");
    }

    #[test]
    fn gspo_has_one_ratio_per_sequence() {
        let settings = |epsilon_high| LossSettings {
            objective: Objective::Gspo,
            aggregation: Aggregation::SeqMeanTokenMean,
            clip: ClipSettings { epsilon_low: 0.6, epsilon_high, dual_clip: None },
            ..LossSettings::default()
        };
        // Ratios sqrt(4 x 1) = 2 and 0.5; denominators 2 x 2 and 2 x 1.
        let open = two_sequences(&settings(1.5));
        assert_all_close(&open.cotangents, &[-0.5 * 2.0 / 4.0, -2.0 / 4.0, 2.0 * 2.0 * 0.5 / 2.0]);
        assert_all_close(&[open.loss], &[-0.25 - 0.5 + 1.0]);
        assert_all_close(&[open.statistics.ratio_min, open.statistics.ratio_max], &[0.5, 2.0]);
        let held = two_sequences(&settings(0.5));
        assert_all_close(&held.cotangents, &[0.0, 0.0, 1.0]);
        assert_all_close(&[held.loss], &[(-0.5 * 1.5 - 1.5) / 4.0 + 1.0]);
        assert_eq!((held.statistics.clip_fraction_high(), held.statistics.clip_fraction_low()), (2.0 / 3.0, 0.0));
    }

    #[test]
    fn cispo_and_reinforce_keep_every_gradient() {
        let settings = |objective| LossSettings { objective, ..LossSettings::default() };
        let cispo = two_sequences(&settings(Objective::Cispo));
        assert_all_close(&cispo.cotangents, &[-0.5 * 1.28 / 3.0, -1.0 / 3.0, 2.0 * 2.0 * 0.8 / 3.0]);
        assert_eq!((cispo.statistics.clipped, cispo.statistics.clipped_high), (2, 1));
        let reinforce = two_sequences(&settings(Objective::Reinforce));
        assert_all_close(&reinforce.cotangents, &[-0.5 / 3.0, -1.0 / 3.0, 4.0 / 3.0]);
        let terms = -0.5 * (-1.0 + 4f64.ln()) + 2.0 + 4.0 * (-3.0 + 0.5f64.ln());
        assert_all_close(&[reinforce.loss], &[terms / 3.0]);
    }

    #[test]
    fn gradient_is_the_derivative() {
        let settings = ClipSettings { dual_clip: Some(3.0), ..ClipSettings::default() };
        for advantage in [-1.5, -0.3, 0.3, 1.5] {
            for log_ratio in [-3.0f64, -0.5, -0.1, 0.0, 0.1, 0.2, 0.5, 1.0, 1.5] {
                let loss = |shift: f64| one_token::<f64>(advantage, (log_ratio + shift).exp(), &settings).0;
                let numeric = (loss(1e-6) - loss(-1e-6)) / 2e-6;
                let exact = one_token::<f64>(advantage, log_ratio.exp(), &settings).1;
                assert!((numeric - exact).abs() < 1e-8, "A {advantage}, log-ratio {log_ratio}: {numeric} against {exact}");
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
        let result = clipped_policy_loss::<f32>(&[], &[], &[], &ClipSettings::default(), 0.0);
        assert_eq!((result.loss, result.statistics.clip_fraction()), (0.0, 0.0));
        assert_eq!(negative_log_likelihood::<f32>(&[], None, 0.0).loss, 0.0);
    }

    #[test]
    fn likelihood_weights() {
        let result = negative_log_likelihood(&[-1.0, -3.0, f32::NAN], Some(&[1.0, 0.5, 0.0]), 2.0);
        assert_eq!(result.loss, 1.25);
        assert_eq!(result.cotangents, [-0.5, -0.25, 0.0]);
        assert_eq!((result.statistics.tokens, result.statistics.not_finite), (2, 0));
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
            prop_assert!((merged.k3_sum - whole.statistics.k3_sum).abs() < 1e-9 * (1.0 + merged.k3_sum));
            let counts = |statistics| LossStatistics { kl_sum: 0.0, k3_sum: 0.0, ..statistics };
            prop_assert_eq!(counts(merged), counts(whole.statistics));
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
