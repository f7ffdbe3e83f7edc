//! Advantages of the attempts of one group, from their rewards alone. Nothing here has a gradient.

use serde::{Deserialize, Serialize};

use super::settings::{Problems, SettingErrors};

/// Rewards of a group that lie within this of each other count as equal. Deciding by the spread rather than by a
/// standard deviation of 0 keeps rounding of, say, three times 0.1 from being blown up into a direction.
pub const EQUAL_WITHIN: f64 = 1e-6;

/// How rewards become advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// The reward minus the mean of the others. The same as RLOO (DeepSWE).
    #[default]
    LeaveOneOut,
    /// The reward minus the mean of all (Dr. GRPO).
    DrGrpo,
    /// The reward minus the mean of all, over the standard deviation (GRPO, DAPO, Nebius).
    Grpo,
}

/// What a lone attempt gets, which has nothing to compare with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Singleton {
    /// Nothing: an advantage of 0.
    #[default]
    Zero,
    /// Its raw reward, as if the baseline were 0 and the deviation 1. What verl does. Only seen where groups are not filtered
    /// (`groups = "off"`): the filters drop a group of one.
    Reward,
}

/// The estimator and its rules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdvantageSettings {
    pub estimator: Estimator,
    /// Of `grpo`: the deviation divides squares by attempts minus this. 1 (sample; verl, TRL) or 0 (population; rllm).
    pub ddof: u8,
    /// Of `grpo`: added to the standard deviation.
    pub epsilon: f64,
    /// What a lone attempt gets.
    pub singleton: Singleton,
}

impl Default for AdvantageSettings {
    fn default() -> AdvantageSettings {
        AdvantageSettings { estimator: Estimator::LeaveOneOut, ddof: 1, epsilon: 1e-6, singleton: Singleton::Zero }
    }
}

impl AdvantageSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        problems.unless(self.ddof <= 1, "ddof", self.ddof, "give 0 or 1");
        let epsilon = self.epsilon;
        problems.unless(epsilon >= 0.0 && epsilon.is_finite(), "epsilon", epsilon, "give a finite number of at least 0");
        problems.finish()
    }
}

/// Whether the rewards of a group differ, so that comparing its attempts says anything. Rewards must be finite: a
/// group with one that is not has no signal.
pub fn has_signal(rewards: &[f64]) -> bool {
    let lowest = rewards.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    rewards.iter().all(|reward| reward.is_finite()) && highest - lowest > EQUAL_WITHIN
}

/// Advantages of one group: by the estimator where rewards differ, exactly 0 where they do not, and for a lone attempt
/// what `settings.singleton` says.
///
/// `rewards`: `[attempts]` of one group. Returns `[attempts]`.
pub fn advantages(rewards: &[f64], settings: &AdvantageSettings) -> Vec<f64> {
    if let ([reward], Singleton::Reward) = (rewards, settings.singleton)
        && reward.is_finite()
    {
        let deviation = if settings.estimator == Estimator::Grpo { 1.0 + settings.epsilon } else { 1.0 };
        return vec![reward / deviation];
    }
    match settings.estimator {
        Estimator::LeaveOneOut => leave_one_out(rewards),
        Estimator::DrGrpo => centred(rewards),
        Estimator::Grpo => standardised(rewards, settings.ddof, settings.epsilon),
    }
}

/// Leave-one-out advantages: each reward minus the mean of the others, `A_i = R_i - (S - R_i) / (n - 1)`. Written as
/// `n / (n - 1) (R_i - S / n)` it is RLOO.
///
/// The baseline of an attempt does not contain the attempt, so the gradient estimate is unbiased (Kool, van Hoof,
/// Welling 2019; Ahmadian et al. 2024). A group of one, or one whose rewards are all equal, gives exactly 0.
///
/// `rewards`: `[attempts]` of one group. Returns `[attempts]`.
pub fn leave_one_out(rewards: &[f64]) -> Vec<f64> {
    if !has_signal(rewards) {
        return vec![0.0; rewards.len()];
    }
    let sum: f64 = rewards.iter().sum();
    let others = (rewards.len() - 1) as f64;
    rewards.iter().map(|reward| reward - (sum - reward) / others).collect()
}

/// Advantages of Dr. GRPO: each reward minus the mean of all (Liu et al. 2025, arXiv 2503.20783). Without signal exactly 0.
///
/// `rewards`: `[attempts]` of one group. Returns `[attempts]`.
pub fn centred(rewards: &[f64]) -> Vec<f64> {
    if !has_signal(rewards) {
        return vec![0.0; rewards.len()];
    }
    let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
    rewards.iter().map(|reward| reward - mean).collect()
}

/// Advantages of GRPO: `(R_i - mean) / (std + epsilon)` (Shao et al. 2024; DAPO eq. 9, Nebius eq. 2), the deviation over
/// `n - ddof`. Without signal exactly 0.
///
/// `rewards`: `[attempts]` of one group; `ddof`: 0 or 1. Returns `[attempts]`.
pub fn standardised(rewards: &[f64], ddof: u8, epsilon: f64) -> Vec<f64> {
    let centred = centred(rewards);
    let squares: f64 = centred.iter().map(|advantage| advantage * advantage).sum();
    if squares == 0.0 {
        return centred;
    }
    let deviation = (squares / (rewards.len() as f64 - f64::from(ddof))).sqrt() + epsilon;
    centred.into_iter().map(|advantage| advantage / deviation).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: [Estimator; 3] = [Estimator::LeaveOneOut, Estimator::DrGrpo, Estimator::Grpo];

    fn settings(estimator: Estimator, ddof: u8) -> AdvantageSettings {
        AdvantageSettings { estimator, ddof, ..AdvantageSettings::default() }
    }

    #[test]
    fn two_of_eight_succeed() {
        let rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0];
        // Mean 0.25; squares 2 x 0.75^2 + 6 x 0.25^2 = 1.5.
        let (sample, population) = ((1.5f64 / 7.0).sqrt() + 1e-6, (1.5f64 / 8.0).sqrt() + 1e-6);
        let cases = [
            (settings(Estimator::LeaveOneOut, 1), 6.0 / 7.0, -2.0 / 7.0),
            (settings(Estimator::DrGrpo, 1), 0.75, -0.25),
            (settings(Estimator::Grpo, 1), 0.75 / sample, -0.25 / sample),
            (settings(Estimator::Grpo, 0), 0.75 / population, -0.25 / population),
        ];
        for (settings, success, failure) in &cases {
            for (index, advantage) in advantages(&rewards, settings).into_iter().enumerate() {
                let expected = if index == 0 || index == 3 { *success } else { *failure };
                assert!((advantage - expected).abs() < 1e-15, "{settings:?}, attempt {index}: {advantage}");
            }
        }
        let printed = [(0.857_143, -0.285_714), (0.75, -0.25), (1.620_182, -0.540_061), (1.732_047, -0.577_349)];
        for ((_, success, failure), printed) in cases.iter().zip(printed) {
            assert!((success - printed.0).abs() < 5.1e-7 && (failure - printed.1).abs() < 5.1e-7, "{success} {failure}");
        }
    }

    #[test]
    fn nothing_to_compare_is_exactly_zero() {
        for estimator in ALL {
            let advantages = |rewards: &[f64]| advantages(rewards, &settings(estimator, 1));
            assert_eq!(advantages(&[]), [0.0; 0]);
            assert_eq!(advantages(&[1.0]), [0.0]);
            assert_eq!(advantages(&[1.0; 8]), [0.0; 8]);
            assert_eq!(advantages(&[0.1 + 0.2, 0.3, 0.3]), [0.0; 3], "equal but for rounding");
            assert_eq!(advantages(&[-29.0 / 30.0; 7]), [0.0; 7], "shaped rewards");
            assert_eq!(advantages(&[f64::NAN, 1.0, 0.0]), [0.0; 3]);
        }
        assert!(has_signal(&[0.0, 1.0]) && !has_signal(&[]) && !has_signal(&[0.5, 0.5]));
    }

    #[test]
    fn a_lone_attempt_gets_what_the_settings_say() {
        for (estimator, expected) in ALL.into_iter().zip([0.5, 0.5, 0.5 / (1.0 + 1e-6)]) {
            let raw = AdvantageSettings { singleton: Singleton::Reward, ..settings(estimator, 1) };
            assert_eq!(advantages(&[0.5], &raw), [expected]);
            assert_eq!(advantages(&[f64::INFINITY], &raw), [0.0]);
            assert_eq!(advantages(&[0.5; 2], &raw), [0.0; 2]);
        }
    }

    #[test]
    fn settings_are_checked() {
        assert_eq!(AdvantageSettings::default().check(), Ok(()));
        let wrong = AdvantageSettings { ddof: 2, epsilon: f64::NAN, ..AdvantageSettings::default() };
        assert_eq!(
            wrong.check().unwrap_err().to_string(),
            "ddof is 2: give 0 or 1\nepsilon is NaN: give a finite number of at least 0"
        );
    }

    proptest! {
        #[test]
        fn advantages_sum_to_zero_and_ignore_a_shift(rewards in prop::collection::vec(-2.0..2.0f64, 2..20), shift in -5.0..5.0f64) {
            let shifted: Vec<f64> = rewards.iter().map(|reward| reward + shift).collect();
            for estimator in ALL {
                let found = advantages(&rewards, &settings(estimator, 1));
                prop_assert!(found.iter().sum::<f64>().abs() < 1e-8);
                for (one, other) in found.iter().zip(advantages(&shifted, &settings(estimator, 1))) {
                    prop_assert!((one - other).abs() < 1e-8);
                }
            }
        }

        #[test]
        fn order_of_attempts_does_not_matter(rewards in prop::collection::vec(0..2u8, 2..20), rotation in 0..20usize) {
            let rewards: Vec<f64> = rewards.into_iter().map(f64::from).collect();
            let rotation = rotation % rewards.len();
            let mut rotated = rewards.clone();
            rotated.rotate_left(rotation);
            for estimator in ALL {
                let mut expected = advantages(&rewards, &settings(estimator, 0));
                expected.rotate_left(rotation);
                for (found, expected) in advantages(&rotated, &settings(estimator, 0)).iter().zip(expected) {
                    prop_assert!((found - expected).abs() < 1e-12);
                }
            }
        }

        #[test]
        fn all_estimators_point_the_same_way(rewards in prop::collection::vec(-2.0..2.0f64, 2..20)) {
            let attempts = rewards.len() as f64;
            let centred = centred(&rewards);
            for (one, other) in leave_one_out(&rewards).iter().zip(&centred) {
                prop_assert!((one - attempts / (attempts - 1.0) * other).abs() < 1e-12, "LOO = n / (n - 1) Dr. GRPO");
            }
            let deviation = (centred.iter().map(|a| a * a).sum::<f64>() / (attempts - 1.0)).sqrt();
            for (one, other) in standardised(&rewards, 1, 0.0).iter().zip(&centred) {
                prop_assert!((one * deviation - other).abs() < 1e-12);
            }
        }
    }
}
