//! Advantages of the attempts of one group, from their rewards alone.

/// Rewards of a group that lie within this of each other count as equal. Deciding by the spread rather than by a
/// standard deviation of 0 keeps rounding of, say, three times 0.1 from being blown up into a direction.
const EQUAL_WITHIN: f64 = 1e-6;

/// Whether the rewards of a group differ, so that comparing its attempts says anything. Rewards must be finite: a
/// group with one that is not has no signal.
pub fn has_signal(rewards: &[f64]) -> bool {
    let lowest = rewards.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    rewards.iter().all(|reward| reward.is_finite()) && highest - lowest > EQUAL_WITHIN
}

/// Leave-one-out advantages: each reward minus the mean of the others, `A_i = R_i - (S - R_i) / (n - 1)`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn two_of_eight_succeed() {
        let advantages = leave_one_out(&[1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        for (index, advantage) in advantages.iter().enumerate() {
            let expected = if index == 0 || index == 3 { 6.0 / 7.0 } else { -2.0 / 7.0 };
            assert!((advantage - expected).abs() < 1e-15, "attempt {index}: {advantage}");
        }
    }

    #[test]
    fn nothing_to_compare_is_exactly_zero() {
        assert_eq!(leave_one_out(&[]), [0.0; 0]);
        assert_eq!(leave_one_out(&[1.0]), [0.0]);
        assert_eq!(leave_one_out(&[1.0; 8]), [0.0; 8]);
        assert_eq!(leave_one_out(&[0.1 + 0.2, 0.3, 0.3]), [0.0; 3], "equal but for rounding");
        assert_eq!(leave_one_out(&[f64::NAN, 1.0, 0.0]), [0.0; 3]);
        assert!(has_signal(&[0.0, 1.0]) && !has_signal(&[]) && !has_signal(&[0.5, 0.5]));
    }

    proptest! {
        #[test]
        fn advantages_sum_to_zero_and_ignore_a_shift(rewards in prop::collection::vec(-2.0..2.0f64, 2..20), shift in -5.0..5.0f64) {
            let advantages = leave_one_out(&rewards);
            prop_assert!(advantages.iter().sum::<f64>().abs() < 1e-9);
            let shifted: Vec<f64> = rewards.iter().map(|reward| reward + shift).collect();
            for (one, other) in advantages.iter().zip(leave_one_out(&shifted)) {
                prop_assert!((one - other).abs() < 1e-9);
            }
        }

        #[test]
        fn order_of_attempts_does_not_matter(rewards in prop::collection::vec(0..2u8, 2..20), rotation in 0..20usize) {
            let rewards: Vec<f64> = rewards.into_iter().map(f64::from).collect();
            let rotation = rotation % rewards.len();
            let mut rotated = rewards.clone();
            rotated.rotate_left(rotation);
            let mut expected = leave_one_out(&rewards);
            expected.rotate_left(rotation);
            prop_assert_eq!(leave_one_out(&rotated), expected);
        }
    }
}
