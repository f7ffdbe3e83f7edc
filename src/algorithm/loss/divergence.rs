//! The optional pull towards a reference model: estimates of KL(policy || reference) from one sampled token each
//! (Schulman 2020, "Approximating KL divergence").

use serde::{Deserialize, Serialize};

use super::super::ratio::{LOG_RATIO_LIMIT, k3};
use super::super::settings::{Problems, SettingErrors};

/// An estimate of the divergence, with `d = log_prob - reference_log_prob`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `d`: unbiased, of either sign. As a loss its expected gradient is 0.
    K1,
    /// `d^2 / 2`: biased, but with the right gradient.
    K2,
    /// `exp(-d) - 1 + d`: unbiased and never negative.
    #[default]
    K3,
}

/// The divergence term of the loss.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KlSettings {
    /// This times the estimate is added to a token's loss. 0: no reference model. Usual where it is on: 0.001.
    pub coefficient: f64,
    pub estimator: KlEstimator,
    /// Keep the estimate's value but take the gradient of k2, whose expectation is that of the divergence (`k3+` in verl).
    pub k2_gradient: bool,
}

impl KlSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let coefficient = self.coefficient;
        let valid = coefficient >= 0.0 && coefficient.is_finite();
        problems.unless(valid, "coefficient", coefficient, "give a finite number of at least 0");
        let vain = coefficient > 0.0 && self.estimator == KlEstimator::K1 && !self.k2_gradient;
        problems.unless(!vain, "estimator", "k1", "as a loss its expected gradient is 0: take k2 or k3, or set k2_gradient");
        problems.finish()
    }

    /// The estimate for one token and its derivative by `log_prob`; `difference` is finite.
    pub(super) fn estimate(&self, difference: f64) -> (f64, f64) {
        let (value, slope) = estimate(self.estimator, difference);
        (value, if self.k2_gradient { difference } else { slope })
    }
}

/// k3 is held at this, as in verl: beyond, its exponential gradient would drown the rest of the batch.
const K3_LIMIT: f64 = 10.0;

/// The estimate for `difference = log_prob - reference_log_prob` and its derivative by `log_prob`.
pub fn estimate(estimator: KlEstimator, difference: f64) -> (f64, f64) {
    match estimator {
        KlEstimator::K1 => (difference, 1.0),
        KlEstimator::K2 => (0.5 * difference * difference, difference),
        KlEstimator::K3 => {
            let value = k3(-difference);
            let held = value > K3_LIMIT || difference.abs() > LOG_RATIO_LIMIT;
            (value.min(K3_LIMIT), if held { 0.0 } else { -(-difference).exp_m1() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_derivatives() {
        for difference in [-2.0, -0.3, 0.0, 0.3, 2.0] {
            let k3 = f64::exp(-difference) - 1.0 + difference;
            let expected =
                [(KlEstimator::K1, difference), (KlEstimator::K2, difference * difference / 2.0), (KlEstimator::K3, k3)];
            for (estimator, expected) in expected {
                let (value, slope) = estimate(estimator, difference);
                assert!((value - expected).abs() < 1e-15, "{estimator:?} of {difference}: {value}");
                let numeric = (estimate(estimator, difference + 1e-6).0 - estimate(estimator, difference - 1e-6).0) / 2e-6;
                assert!((slope - numeric).abs() < 1e-8, "{estimator:?} of {difference}: {slope}, not {numeric}");
            }
        }
    }

    #[test]
    fn k3_is_held_where_it_explodes() {
        assert_eq!(estimate(KlEstimator::K3, -5.0), (10.0, 0.0));
        assert_eq!(estimate(KlEstimator::K3, -1e6), (10.0, 0.0));
        assert_eq!(estimate(KlEstimator::K3, 1e6), (10.0, 0.0));
    }

    #[test]
    fn the_gradient_of_k2_under_the_value_of_k3() {
        let settings = KlSettings { coefficient: 1.0, estimator: KlEstimator::K3, k2_gradient: true };
        assert_eq!(settings.estimate(0.3), (estimate(KlEstimator::K3, 0.3).0, 0.3));
    }

    #[test]
    fn settings_are_checked() {
        assert_eq!(KlSettings::default().check(), Ok(()));
        let wrong = KlSettings { coefficient: -1.0, ..KlSettings::default() };
        assert_eq!(wrong.check().unwrap_err().to_string(), "coefficient is -1: give a finite number of at least 0");
        let vain = KlSettings { coefficient: 0.1, estimator: KlEstimator::K1, k2_gradient: false };
        assert!(vain.check().unwrap_err().to_string().starts_with("estimator is k1: "));
        assert_eq!(KlSettings { k2_gradient: true, ..vain }.check(), Ok(()));
    }
}
