//! pass@k: the chance that at least one of k attempts at a task passes.

/// The unbiased estimate of pass@k from `passed` of `samples` attempts, `1 - C(n - c, k) / C(n, k)`, as the product
/// `1 - prod (1 - k / j)` for `j` in `n - c + 1 ..= n`, which cannot overflow (Chen et al. 2021).
///
/// `None` where it is not defined: `k` of 0, more than the attempts there are, or more passes than attempts.
pub fn pass_at_k(samples: u64, passed: u64, k: u64) -> Option<f64> {
    if k == 0 || k > samples || passed > samples {
        return None;
    }
    if samples - passed < k {
        return Some(1.0);
    }
    let all_fail: f64 = (samples - passed + 1..=samples).map(|j| 1.0 - k as f64 / j as f64).product();
    Some(1.0 - all_fail)
}

/// Mean of pass@k over tasks given as `(samples, passed)`. `None` without tasks, or if it is undefined for one of them.
pub fn mean_pass_at_k(tasks: &[(u64, u64)], k: u64) -> Option<f64> {
    let mut sum = 0.0;
    for &(samples, passed) in tasks {
        sum += pass_at_k(samples, passed, k)?;
    }
    if tasks.is_empty() { None } else { Some(sum / tasks.len() as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_values() {
        let cases = [
            (10, 4, 1, 0.4),
            (10, 4, 5, 0.976_190_476),
            (16, 1, 8, 0.5),
            (16, 3, 4, 0.607_142_857),
            (8, 0, 8, 0.0),
            (8, 1, 8, 1.0),
            (8, 8, 1, 1.0),
        ];
        for (samples, passed, k, expected) in cases {
            let found = pass_at_k(samples, passed, k).unwrap();
            assert!((found - expected).abs() < 1e-9, "({samples}, {passed}, {k}): {found}");
        }
        for (samples, passed, k) in [(4, 2, 5), (4, 5, 1), (4, 2, 0), (0, 0, 1)] {
            assert_eq!(pass_at_k(samples, passed, k), None);
        }
    }

    #[test]
    fn mean_over_tasks() {
        assert_eq!(mean_pass_at_k(&[(4, 1), (4, 3)], 1), Some(0.5));
        assert_eq!(mean_pass_at_k(&[(4, 1), (2, 1)], 4), None);
        assert_eq!(mean_pass_at_k(&[], 1), None);
    }

    /// Every choice of `k` out of `samples` attempts, of which the first `passed` pass.
    fn by_enumeration(samples: u32, passed: u32, k: u32) -> f64 {
        let choices = (0..1u32 << samples).filter(|choice| choice.count_ones() == k);
        let (hits, all) =
            choices.fold((0, 0), |(hits, all), choice| (hits + u32::from(choice & ((1 << passed) - 1) != 0), all + 1));
        f64::from(hits) / f64::from(all)
    }

    proptest! {
        #[test]
        fn equals_enumeration(samples in 1..10u32, passed in 0..10u32, k in 1..10u32) {
            let (passed, k) = (passed.min(samples), k.min(samples));
            let found = pass_at_k(samples.into(), passed.into(), k.into()).unwrap();
            prop_assert!((found - by_enumeration(samples, passed, k)).abs() < 1e-12);
        }
    }
}
