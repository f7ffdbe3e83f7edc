//! How sampler and trainer are reconciled, and what goes together.

use serde::{Deserialize, Serialize};

use super::super::settings::{Problems, SettingErrors};

/// Whose log-probabilities stand for the policy before the update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldPolicy {
    /// The trainer's own, recomputed (decoupled).
    #[default]
    Recomputed,
    /// The sampler's, as they came with the tokens (bypass).
    Sampler,
}

/// What is done about the mismatch. The default is nothing: the built-in engine has none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CorrectionSettings {
    pub old_policy: OldPolicy,
    /// The importance weight. Off when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<WeightSettings>,
    /// Tokens are left out unless they pass all of these.
    pub rejections: Vec<RejectionSettings>,
}

impl CorrectionSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        if let Some(weight) = &self.weight {
            problems.within("weight", weight.check());
        }
        for (index, rejection) in self.rejections.iter().enumerate() {
            problems.within(&format!("rejections[{index}]"), rejection.check());
        }
        problems.finish()
    }
}

/// Over what a ratio is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Each token's own: biased, with little variance.
    #[default]
    Token,
    /// The product over the sequence: unbiased, but it leaves every bound on long sequences (1.1 per token is 13,780 over
    /// 100).
    Sequence,
    /// The geometric mean over the sequence, which does not grow with length.
    Geometric,
}

/// What becomes of a ratio beyond its bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Beyond {
    /// It is held at the bound (truncated importance sampling).
    #[default]
    Truncate,
    /// The weight is 0; the token still counts in denominators (masked importance sampling, IcePop).
    Mask,
}

/// The importance weight of tokens: a ratio of the trainer's over the sampler's probability, within bounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WeightSettings {
    pub level: Level,
    pub beyond: Beyond,
    /// Smallest ratio; 0 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lower: Option<f64>,
    /// Largest ratio. Usual: 1.5 to 5 for tokens, 2 to 10 for sequences.
    pub upper: f64,
    /// Divide weights by their mean over the whole rollout.
    pub normalise: bool,
}

impl Default for WeightSettings {
    /// Truncated at 2 per token, the default of verl, skyrl and rllm.
    fn default() -> WeightSettings {
        WeightSettings { level: Level::Token, beyond: Beyond::Truncate, lower: None, upper: 2.0, normalise: false }
    }
}

impl WeightSettings {
    /// Each token's ratio as it is: what is measured where no weight is applied.
    pub const UNBOUNDED: WeightSettings =
        WeightSettings { level: Level::Token, beyond: Beyond::Truncate, lower: None, upper: f64::INFINITY, normalise: false };

    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        problems.unless(self.upper > 0.0, "upper", self.upper, "give a number above 0");
        if let Some(lower) = self.lower {
            problems.unless(lower > 0.0, "lower", lower, "give a number above 0, or leave it out");
            problems.unless(lower <= self.upper, "lower", lower, &format!("give at most upper = {}", self.upper));
        }
        problems.finish()
    }
}

/// A measure of how far a token is off, from `rho`, the trainer's over the sampler's probability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Statistic {
    /// `ln rho`; its bounds are given as ratios.
    K1,
    /// `(ln rho)^2 / 2`.
    K2,
    /// `rho - 1 - ln rho`.
    K3,
}

/// Over what it is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Over {
    /// Each token on its own: what lies outside is left out.
    Token,
    /// These three judge whole sequences.
    SequenceSum,
    SequenceMean,
    SequenceMax,
}

/// A condition that tokens must meet to be trained on. The mean of `k1` is the geometric level: usual bounds 0.999 to
/// 1.001; of `k3`, at most 0.001 to 0.01.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RejectionSettings {
    pub statistic: Statistic,
    pub over: Over,
    /// Of `k1` alone: the smallest ratio; `1 / upper` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lower: Option<f64>,
    /// The largest ratio (`k1`) or the largest value.
    pub upper: f64,
}

impl RejectionSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let upper = self.upper;
        problems.unless(upper > 0.0, "upper", upper, "give a number above 0");
        if self.statistic == Statistic::K1 {
            let has_sign = self.over != Over::SequenceMax;
            problems.unless(has_sign, "over", "sequence_max", "k1 has a sign and no largest deviation: take k2 or k3");
            let lower = self.lower.unwrap_or(1.0 / upper);
            let remedy = "give lower above 0 and at most upper; alone, upper must be at least 1";
            problems.unless(lower > 0.0 && lower <= upper, "lower", lower, remedy);
        } else if let Some(lower) = self.lower {
            problems.unless(false, "lower", lower, "leave it out: only k1 has a lower bound");
        }
        problems.finish()
    }

    pub(super) fn accepts(&self, value: f64) -> bool {
        match self.statistic {
            Statistic::K1 => {
                let lower = self.lower.unwrap_or(1.0 / self.upper);
                lower.ln() <= value && value <= self.upper.ln()
            }
            Statistic::K2 | Statistic::K3 => value <= self.upper,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_checked() {
        assert_eq!(CorrectionSettings::default().check(), Ok(()));
        let wrong = CorrectionSettings {
            weight: Some(WeightSettings { lower: Some(3.0), ..WeightSettings::default() }),
            rejections: vec![
                RejectionSettings { statistic: Statistic::K1, over: Over::SequenceMax, lower: None, upper: 0.5 },
                RejectionSettings { statistic: Statistic::K3, over: Over::Token, lower: Some(0.1), upper: 1.0 },
            ],
            ..CorrectionSettings::default()
        };
        let errors = wrong.check().unwrap_err();
        let fields: Vec<&str> = errors.0.iter().map(|error| error.field.as_str()).collect();
        assert_eq!(fields, ["weight.lower", "rejections[0].over", "rejections[0].lower", "rejections[1].lower"]);
        let zero = WeightSettings { lower: Some(0.0), upper: f64::NAN, ..WeightSettings::default() };
        assert!(zero.check().unwrap_err().0.len() >= 2);
    }
}
