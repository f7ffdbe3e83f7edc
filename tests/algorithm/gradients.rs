//! Cotangents are the derivatives of the loss, by finite differences in f64.

use learner::algorithm::{KlEstimator, LossSettings, Objective};
use proptest::prelude::*;

use crate::support::{ENTROPIES, LOG_PROBS, OLD_LOG_PROBS, Tokens, WEIGHTS, all_losses, assert_close, sequences};

const STEP: f64 = 1e-6;

/// The loss with one value of some lists moved.
fn moved(tokens: &Tokens, settings: &LossSettings, lists: &[usize], token: usize, by: f64) -> f64 {
    let mut tokens = tokens.clone();
    for &list in lists {
        tokens.lists[list][token] += by;
    }
    tokens.loss::<f64>(settings, &tokens.denominators()).loss
}

/// The derivative by central difference; `None` at a corner, where the two sides differ.
fn derivative(tokens: &Tokens, settings: &LossSettings, lists: &[usize], token: usize) -> Option<f64> {
    let at = |by| moved(tokens, settings, lists, token, by);
    let (below, here, above) = (at(-STEP), at(0.0), at(STEP));
    let sides = [(here - below) / STEP, (above - here) / STEP];
    ((sides[0] - sides[1]).abs() < 1e-4).then(|| (above - below) / (2.0 * STEP))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn cotangents_are_derivatives(sequences in sequences()) {
        let packed = Tokens::of(&sequences);
        for mut settings in all_losses() {
            let mut tokens = packed.clone();
            if settings.objective == Objective::Gspo {
                // Each token's share of the gradient takes its own weight; the derivative only agrees if all weigh the same.
                tokens.lists[WEIGHTS].fill(0.75);
            }
            for estimator in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3] {
                settings.kl.estimator = estimator;
                let result = tokens.loss::<f64>(&settings, &tokens.denominators());
                // CISPO holds its ratio constant: moving the old log-probability along keeps it.
                let lists: &[usize] =
                    if settings.objective == Objective::Cispo { &[LOG_PROBS, OLD_LOG_PROBS] } else { &[LOG_PROBS] };
                for token in 0..tokens.trained.len() {
                    if let Some(numeric) = derivative(&tokens, &settings, lists, token) {
                        assert_close(result.cotangents[token], numeric, 1e-7, &(&settings, token));
                    }
                    if let Some(cotangents) = &result.entropy_cotangents {
                        let numeric = derivative(&tokens, &settings, &[ENTROPIES], token);
                        assert_close(cotangents[token], numeric.unwrap_or(f64::NAN), 1e-7, &(&settings, token));
                    }
                }
                if settings.kl.coefficient == 0.0 {
                    break;
                }
            }
        }
    }
}
