//! Confidence intervals of a mean over tasks.
//!
//! Attempts at one task are not independent, so the task is the unit: its attempts are averaged first, and the standard
//! error is that of the mean of the task means. This is the clustered standard error of Miller (2024, "Adding error bars
//! to evals") for clusters of equal weight. Student's quantile, rather than the normal one, keeps it honest for few tasks.

/// A mean over tasks with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub mean: f64,
    pub low: f64,
    pub high: f64,
    /// Of the mean.
    pub standard_error: f64,
    pub tasks: usize,
}

impl Interval {
    /// The part of the interval within `low..=high`, for figures that cannot lie outside, such as a pass rate.
    pub fn clamped(self, low: f64, high: f64) -> Interval {
        Interval { low: self.low.clamp(low, high), high: self.high.clamp(low, high), ..self }
    }
}

/// The mean of `task_means` (`[tasks]`, each the mean over one task's attempts) with its 95 % interval.
///
/// `None` without tasks or with a value that is not finite. One task says nothing about the spread between tasks: its
/// interval is unbounded. If all tasks agree the interval is a point; it is then no statement about rare outcomes.
pub fn mean_interval(task_means: &[f64]) -> Option<Interval> {
    let tasks = task_means.len();
    if tasks == 0 || task_means.iter().any(|value| !value.is_finite()) {
        return None;
    }
    let mean = task_means.iter().sum::<f64>() / tasks as f64;
    if tasks == 1 {
        return Some(Interval { mean, low: f64::NEG_INFINITY, high: f64::INFINITY, standard_error: f64::INFINITY, tasks });
    }
    let squares: f64 = task_means.iter().map(|value| (value - mean).powi(2)).sum();
    let standard_error = (squares / (tasks - 1) as f64 / tasks as f64).sqrt();
    let half = two_sided_quantile_95(tasks - 1) * standard_error;
    Some(Interval { mean, low: mean - half, high: mean + half, standard_error, tasks })
}

/// The mean gain from `before` to `after` on the same tasks (both `[tasks]`, in the same order), with its 95 % interval.
/// Pairing removes the spread between easy and hard tasks, so this interval is narrower than two separate ones.
/// `None` as in [`mean_interval`], or when the lists differ in length.
pub fn paired_difference(before: &[f64], after: &[f64]) -> Option<Interval> {
    if before.len() != after.len() {
        return None;
    }
    let gains: Vec<f64> = before.iter().zip(after).map(|(before, after)| after - before).collect();
    mean_interval(&gains)
}

/// The `t` that Student's distribution with `freedom >= 1` degrees stays within, in absolute value, with probability
/// 0.95: bisection on the distribution's closed form for whole degrees of freedom.
fn two_sided_quantile_95(freedom: usize) -> f64 {
    let (mut low, mut high) = (0.0, std::f64::consts::FRAC_PI_2);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if central_probability(middle, freedom) < 0.95 { low = middle } else { high = middle }
    }
    (0.5 * (low + high)).tan() * (freedom as f64).sqrt()
}

/// `P(|T| <= t)` with `angle = atan(t / sqrt(freedom))` (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
fn central_probability(angle: f64, freedom: usize) -> f64 {
    let (sine, cosine) = angle.sin_cos();
    let odd = freedom % 2 == 1;
    let mut term = if odd { cosine } else { 1.0 };
    let mut series = 0.0;
    for power in (if odd { 1 } else { 0 }..freedom - 1).step_by(2) {
        series += term;
        term *= cosine * cosine * (power + 1) as f64 / (power + 2) as f64;
    }
    if odd { std::f64::consts::FRAC_2_PI * (angle + sine * series) } else { sine * series }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Key, Purpose};

    #[test]
    fn quantiles_of_the_printed_tables() {
        let table =
            [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (10, 2.228), (29, 2.045), (30, 2.042)];
        for (freedom, expected) in table {
            let found = two_sided_quantile_95(freedom);
            assert!((found - expected).abs() < 6e-4, "{freedom} degrees: {found}, not {expected}");
        }
        assert!((two_sided_quantile_95(100_000) - 1.95998).abs() < 1e-4, "close to the normal quantile");
    }

    #[test]
    fn a_worked_example() {
        // Mean 0.5, squares 0.25 + 0 + 0.25 + 0 = 0.5; standard error sqrt(0.5 / 3 / 4); t(3) = 3.18245.
        let interval = mean_interval(&[0.0, 0.5, 1.0, 0.5]).unwrap();
        assert!((interval.standard_error - 0.204_124).abs() < 1e-6);
        assert!((interval.low - (0.5 - 0.649_613)).abs() < 1e-4 && (interval.high - (0.5 + 0.649_613)).abs() < 1e-4);
        let clamped = interval.clamped(0.0, 1.0);
        assert_eq!((clamped.low, clamped.high, clamped.mean), (0.0, 1.0, 0.5));
    }

    #[test]
    fn edge_cases() {
        assert_eq!(mean_interval(&[]), None);
        assert_eq!(mean_interval(&[0.5, f64::NAN]), None);
        let one = mean_interval(&[0.25]).unwrap().clamped(0.0, 1.0);
        assert_eq!((one.mean, one.low, one.high), (0.25, 0.0, 1.0));
        let equal = mean_interval(&[0.5; 10]).unwrap();
        assert_eq!((equal.low, equal.high), (0.5, 0.5));
    }

    #[test]
    fn pairing_narrows_the_interval() {
        let before = [0.0, 0.2, 0.4, 0.6, 0.8];
        let after = [0.1, 0.3, 0.5, 0.7, 0.9];
        let gain = paired_difference(&before, &after).unwrap();
        assert!((gain.mean - 0.1).abs() < 1e-12 && gain.standard_error < 1e-12);
        assert!(mean_interval(&before).unwrap().standard_error > 0.1);
        assert_eq!(paired_difference(&before, &after[..4]), None);
    }

    #[test]
    fn covers_the_truth_as_often_as_it_says() {
        // Tasks differ (chance uniform in 0..1), 8 attempts each: the true mean is 0.5. Treating attempts as independent
        // would cover it in about 70 % of the worlds only.
        let worlds = 2000;
        let mut covered = 0;
        for world in 0..worlds {
            let mut key = Key::new(Purpose::Bootstrap, &[world]);
            let task_means: Vec<f64> = (0..20)
                .map(|_| {
                    let chance = key.uniform();
                    (0..8).filter(|_| key.chance(chance)).count() as f64 / 8.0
                })
                .collect();
            let interval = mean_interval(&task_means).unwrap();
            covered += u32::from(interval.low <= 0.5 && 0.5 <= interval.high);
        }
        let share = f64::from(covered) / worlds as f64;
        assert!((share - 0.95).abs() < 0.02, "covered in {share}");
    }
}
