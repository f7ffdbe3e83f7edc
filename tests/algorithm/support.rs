//! Batches of tokens that own their lists.

use learner::algorithm::{
    Aggregation, ClipSettings, Denominators, LossSettings, Objective, PolicyLoss, PolicyTokens, Real, policy_loss,
};
use proptest::prelude::*;

/// Everything a policy loss may look at, sequences end to end.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    pub starts: Vec<usize>,
    pub trained: Vec<bool>,
    /// Log-probabilities now, before, of the reference; entropies; advantages; weights.
    pub lists: [Vec<f64>; 6],
}

pub const LOG_PROBS: usize = 0;
pub const OLD_LOG_PROBS: usize = 1;
pub const REFERENCE: usize = 2;
pub const ENTROPIES: usize = 3;
pub const ADVANTAGES: usize = 4;
pub const WEIGHTS: usize = 5;

/// One token: whether it is trained, and a value for each list.
pub type Token = (bool, [f64; 6]);

impl Tokens {
    pub fn of(sequences: &[Vec<Token>]) -> Tokens {
        let mut tokens = Tokens { starts: vec![0], ..Tokens::default() };
        for sequence in sequences {
            for (trained, values) in sequence {
                tokens.trained.push(*trained);
                for (list, value) in tokens.lists.iter_mut().zip(values) {
                    list.push(*value);
                }
            }
            tokens.starts.push(tokens.trained.len());
        }
        tokens
    }

    pub fn denominators(&self) -> Denominators {
        Denominators::count(&self.trained, &self.starts)
    }

    /// The loss, computed from lists of `R`.
    pub fn loss<R: Real>(&self, settings: &LossSettings, denominators: &Denominators) -> PolicyLoss<R> {
        let lists: Vec<Vec<R>> = self.lists.iter().map(|list| list.iter().map(|&value| R::rounded(value)).collect()).collect();
        let tokens = PolicyTokens {
            starts: &self.starts,
            trained: &self.trained,
            log_probs: &lists[LOG_PROBS],
            old_log_probs: &lists[OLD_LOG_PROBS],
            advantages: &lists[ADVANTAGES],
            weights: Some(&lists[WEIGHTS]),
            reference_log_probs: Some(&lists[REFERENCE]),
            entropies: Some(&lists[ENTROPIES]),
        };
        policy_loss(&tokens, settings, denominators)
    }
}

/// Sequences as a rollout makes them: one advantage each, observations in between. All values are exact in f32.
pub fn sequences() -> impl Strategy<Value = Vec<Vec<Token>>> {
    let range = |low: f32, high: f32| low..high;
    let token = (any::<bool>(), range(-6.0, -0.01), range(-1.2, 1.2), range(-2.0, 1.5), range(0.0, 3.0), range(0.0, 2.0));
    let sequence = (prop::collection::vec(token, 1..12), range(-2.0, 2.0)).prop_map(|(tokens, advantage)| {
        let values = |(trained, log_prob, drift, distance, entropy, weight): (bool, f32, f32, f32, f32, f32)| {
            let near = |offset: f32| f64::from(log_prob - offset);
            (trained, [near(0.0), near(drift), near(distance), entropy.into(), advantage.into(), weight.into()])
        };
        tokens.into_iter().map(values).collect()
    });
    prop::collection::vec(sequence, 1..8)
}

/// Every objective with every way to aggregate that goes with it, with and without KL and entropy.
pub fn all_losses() -> Vec<LossSettings> {
    let plain = |objective, aggregation: Aggregation| LossSettings {
        objective,
        aggregation,
        clip: ClipSettings { dual_clip: (objective == Objective::Clip).then_some(2.0), ..ClipSettings::default() },
        constant: aggregation.needs_constant().then_some(7.0),
        ..LossSettings::default()
    };
    let aggregations = [
        Aggregation::TokenMean,
        Aggregation::SeqMeanTokenMean,
        Aggregation::SeqMeanTokenSum,
        Aggregation::SeqMeanTokenSumNorm,
        Aggregation::Constant,
    ];
    let mut all = vec![plain(Objective::Gspo, Aggregation::SeqMeanTokenMean)];
    for objective in [Objective::Clip, Objective::Cispo, Objective::Reinforce] {
        all.extend(aggregations.map(|aggregation| plain(objective, aggregation)));
    }
    let more: Vec<LossSettings> = all
        .iter()
        .cloned()
        .map(|mut settings| {
            settings.kl.coefficient = 0.3;
            settings.entropy_coefficient = 0.2;
            settings
        })
        .collect();
    all.extend(more);
    assert!(all.iter().all(|settings| settings.check().is_ok()));
    all
}

/// Within `relative` of each other, or of 1 where they are smaller.
#[track_caller]
pub fn assert_close(found: f64, expected: f64, relative: f64, what: &dyn std::fmt::Debug) {
    let close = (found - expected).abs() <= relative * expected.abs().max(1.0);
    assert!(close, "{what:?}: {found}, not {expected}");
}
