//! What must not change a step.

use learner::algorithm::{
    AdvantageSettings, Attempt, Beyond, Denominators, Estimator, FilterSettings, GroupFilter, Level, LossStatistics, Objective,
    Over, RejectionSettings, SampledTokens, Statistic, WeightSettings, accepted, importance_weights, standings,
};
use learner::types::Ending;
use proptest::prelude::*;

use crate::support::{ADVANTAGES, LOG_PROBS, OLD_LOG_PROBS, Token, Tokens, WEIGHTS, all_losses, assert_close, sequences};

const WILD: [f64; 6] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::NAN, f64::INFINITY];

fn wild_token(shift: usize) -> Token {
    let mut values = WILD;
    values.rotate_left(shift % 6);
    (false, values)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn micro_batches_and_ranks_add_up(sequences in sequences(), cut in 0..8usize) {
        let (first, second) = sequences.split_at(cut.min(sequences.len()));
        let (whole, first, second) = (Tokens::of(&sequences), Tokens::of(first), Tokens::of(second));
        let mut denominators = first.denominators();
        denominators.add(&second.denominators());
        prop_assert_eq!(denominators, whole.denominators());
        for settings in all_losses() {
            let result = whole.loss::<f64>(&settings, &denominators);
            let parts = [first.loss::<f64>(&settings, &denominators), second.loss::<f64>(&settings, &denominators)];
            assert_close(parts[0].loss + parts[1].loss, result.loss, 1e-12, &settings);
            prop_assert_eq!([&parts[0].cotangents[..], &parts[1].cotangents].concat(), result.cotangents);
            let mut merged = parts[0].statistics.clone();
            merged.merge(&parts[1].statistics);
            assert_close(merged.k3(), result.statistics.k3(), 1e-12, &settings);
            assert_close(merged.approximate_kl(), result.statistics.approximate_kl(), 1e-12, &settings);
            assert_close(merged.reference_kl(), result.statistics.reference_kl(), 1e-12, &settings);
            let counts = |of: &LossStatistics| (of.tokens, of.clipped, of.clipped_high, of.dual_clipped, of.ratio_min, of.ratio_max);
            prop_assert_eq!(counts(&merged), counts(&result.statistics));
        }
    }

    #[test]
    fn packing_order_does_not_matter(sequences in sequences(), rotation in 0..8usize) {
        let mut turned = sequences.clone();
        turned.rotate_left(rotation % sequences.len());
        let moved_tokens: usize = sequences[..rotation % sequences.len()].iter().map(Vec::len).sum();
        let (tokens, turned) = (Tokens::of(&sequences), Tokens::of(&turned));
        for settings in all_losses() {
            let mut expected = tokens.loss::<f64>(&settings, &tokens.denominators());
            let found = turned.loss::<f64>(&settings, &turned.denominators());
            assert_close(found.loss, expected.loss, 1e-12, &settings);
            expected.cotangents.rotate_left(moved_tokens);
            prop_assert_eq!(found.cotangents, expected.cotangents);
        }
    }

    #[test]
    fn masked_tokens_and_padding_change_nothing(sequences in sequences(), places in prop::collection::vec((0..8usize, 0..12usize), 1..6)) {
        let mut padded = sequences.clone();
        for (shift, (sequence, place)) in places.into_iter().enumerate() {
            let sequence = sequence % padded.len();
            let place = place % (padded[sequence].len() + 1);
            padded[sequence].insert(place, wild_token(shift));
        }
        padded.push(vec![wild_token(1); 3]);
        let (tokens, padded) = (Tokens::of(&sequences), Tokens::of(&padded));
        prop_assert_eq!(tokens.denominators(), padded.denominators());
        for settings in all_losses() {
            let expected = tokens.loss::<f64>(&settings, &tokens.denominators());
            let found = padded.loss::<f64>(&settings, &padded.denominators());
            prop_assert_eq!((found.loss, &found.statistics), (expected.loss, &expected.statistics));
            let trained = |tokens: &Tokens, cotangents: &[f64]| -> Vec<f64> {
                (0..cotangents.len()).filter(|&token| tokens.trained[token]).map(|token| cotangents[token]).collect()
            };
            prop_assert_eq!(trained(&padded, &found.cotangents), trained(&tokens, &expected.cotangents));
            prop_assert!((0..padded.trained.len()).all(|token| padded.trained[token] || found.cotangents[token] == 0.0));
        }
        let weigh = |tokens: &Tokens, level| {
            let settings = WeightSettings { level, beyond: Beyond::Mask, lower: Some(0.5), ..WeightSettings::default() };
            importance_weights(&sampled(tokens), &settings)
        };
        for level in [Level::Token, Level::Sequence, Level::Geometric] {
            prop_assert_eq!(weigh(&padded, level).1, weigh(&tokens, level).1);
        }
        for over in [Over::Token, Over::SequenceSum, Over::SequenceMean, Over::SequenceMax] {
            let rejections = [RejectionSettings { statistic: Statistic::K3, over, lower: None, upper: 0.1 }];
            let count = |tokens: &Tokens| accepted(&sampled(tokens), &rejections).into_iter().filter(|&kept| kept).count();
            prop_assert_eq!(count(&padded), count(&tokens));
        }
    }

    #[test]
    fn f32_agrees_with_f64(sequences in sequences()) {
        let tokens = Tokens::of(&sequences);
        for settings in all_losses() {
            let exact = tokens.loss::<f64>(&settings, &tokens.denominators());
            let single = tokens.loss::<f32>(&settings, &tokens.denominators());
            assert_close(single.loss, exact.loss, 1e-6, &settings);
            for (found, expected) in single.cotangents.iter().zip(&exact.cotangents) {
                assert_close(f64::from(*found), *expected, 1e-6, &settings);
            }
        }
    }

    #[test]
    fn order_of_groups_does_not_matter(sequences in sequences(), outcomes in prop::collection::vec(any::<bool>(), 8), rotation in 1..4usize) {
        // Groups of two attempts; the whole way from rewards to the loss.
        let mut groups: Vec<Vec<(Vec<Token>, bool)>> =
            sequences.into_iter().zip(outcomes).collect::<Vec<_>>().chunks(2).map(<[_]>::to_vec).collect();
        let estimator = AdvantageSettings { estimator: Estimator::Grpo, ..AdvantageSettings::default() };
        let filters = FilterSettings { groups: GroupFilter::Off, ..FilterSettings::default() };
        let loss = |groups: &[Vec<(Vec<Token>, bool)>]| {
            let mut packed = Vec::new();
            for group in groups {
                let attempts: Vec<Attempt> = group
                    .iter()
                    .map(|(_, passed)| Attempt { ending: Ending::Submitted, passed: Some(*passed), reward: f64::from(u8::from(*passed)) })
                    .collect();
                for ((tokens, _), standing) in group.iter().zip(standings(&attempts, &filters, &estimator)) {
                    let mut tokens = tokens.clone();
                    for (_, values) in &mut tokens {
                        values[ADVANTAGES] = standing.advantage().unwrap_or(f64::NAN);
                    }
                    packed.push(tokens);
                }
            }
            let tokens = Tokens::of(&packed);
            tokens.loss::<f64>(&all_losses()[1], &tokens.denominators()).loss
        };
        let expected = loss(&groups);
        let count = groups.len();
        groups.rotate_left(rotation % count);
        assert_close(loss(&groups), expected, 1e-12, &rotation);
    }
}

fn sampled(tokens: &Tokens) -> SampledTokens<'_, f64> {
    SampledTokens {
        starts: &tokens.starts,
        trained: &tokens.trained,
        log_probs: &tokens.lists[LOG_PROBS],
        sampled_log_probs: &tokens.lists[OLD_LOG_PROBS],
    }
}

#[test]
fn a_batch_of_which_all_is_masked_gives_nothing() {
    let tokens = Tokens::of(&[vec![wild_token(0), wild_token(3)], vec![], vec![wild_token(4)]]);
    assert_eq!(tokens.denominators(), Denominators::default(), "a step sees by this that it has nothing to do");
    for settings in all_losses() {
        let result = tokens.loss::<f64>(&settings, &tokens.denominators());
        assert_eq!((result.loss, result.cotangents), (0.0, vec![0.0; 3]));
        assert_eq!(result.statistics, LossStatistics::default());
        assert_eq!(result.entropy_cotangents, (settings.entropy_coefficient != 0.0).then(|| vec![0.0; 3]));
    }
    let (weights, statistics) = importance_weights(&sampled(&tokens), &WeightSettings::default());
    assert_eq!((weights, statistics.units, statistics.mean()), (vec![0.0; 3], 0, 0.0));
}

#[test]
fn a_broken_trained_token_is_left_out_and_counted_whatever_the_loss() {
    let token = |advantage: f64| (true, [-1.0, -1.1, -0.9, 0.5, advantage, 1.0]);
    for settings in all_losses() {
        for list in [LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, WEIGHTS] {
            for broken in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let mut tokens = Tokens::of(&[vec![token(1.0), token(1.0)], vec![token(-0.5)]]);
                tokens.lists[list][1] = broken;
                let result = tokens.loss::<f64>(&settings, &tokens.denominators());
                assert_eq!((result.statistics.not_finite, result.statistics.tokens), (1, 2));
                assert!(result.loss.is_finite() && result.cotangents.iter().all(|value| value.is_finite()));
                assert_eq!(result.cotangents[1], 0.0);
            }
        }
    }
    assert!(all_losses().iter().any(|settings| settings.objective == Objective::Gspo));
}
