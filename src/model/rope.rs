//! Rotary embeddings scaled for sequences longer than the model was trained on: YaRN (Peng et al. 2023), as Transformers has it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::config::ModelConfig;
use crate::algorithm::{Problems, SettingErrors};

/// `rope_scaling` or `rope_parameters` of a config.json, or `model.rope` of a run file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RopeSettings {
    /// `default` (not scaled) or `yarn`.
    pub rope_type: RopeType,
    /// Times the original length that sequences may have.
    pub factor: f64,
    /// Tokens of the sequences that the model was trained on; what it is made for without scaling if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub original_max_position_embeddings: Option<usize>,
    /// Dimensions that turn at least this often within the original length keep their frequency.
    pub beta_fast: f64,
    /// Those that turn at most this often are stretched by `factor`; between the two a ramp.
    pub beta_slow: f64,
    /// Of queries and of keys; `0.1 ln(factor) + 1` if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_factor: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeType {
    #[default]
    Default,
    Yarn,
}

impl Default for RopeSettings {
    fn default() -> Self {
        RopeSettings {
            rope_type: RopeType::Default,
            factor: 1.0,
            original_max_position_embeddings: None,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
        }
    }
}

impl fmt::Display for RopeSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rope_type {
            RopeType::Default => write!(formatter, "not scaled"),
            RopeType::Yarn => write!(formatter, "YaRN of factor {}", self.factor),
        }
    }
}

impl RopeSettings {
    /// The longest sequence that a model is fit for with this scaling, in tokens, where it says what it scales.
    pub fn length(&self) -> Option<usize> {
        let original = self.original_max_position_embeddings?;
        Some(if self.rope_type == RopeType::Yarn { (self.factor * original as f64) as usize } else { original })
    }

    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let above_zero = |value: f64| value > 0.0 && value.is_finite();
        match self.rope_type {
            RopeType::Yarn => {
                let possible = self.factor >= 1.0 && self.factor.is_finite();
                problems.unless(possible, "factor", self.factor, "give a finite number of at least 1");
            }
            RopeType::Default => {
                problems.unless(self.factor == 1.0, "factor", self.factor, "leave it out, or set rope_type = \"yarn\"");
            }
        }
        let empty = self.original_max_position_embeddings == Some(0);
        problems.unless(!empty, "original_max_position_embeddings", 0, "give at least 1");
        let (fast, slow) = (self.beta_fast, self.beta_slow);
        problems.unless(above_zero(fast), "beta_fast", fast, "give a number above 0");
        problems.unless(above_zero(slow), "beta_slow", slow, "give a number above 0");
        if above_zero(fast) && above_zero(slow) {
            problems.unless(slow <= fast, "beta_slow", slow, &format!("give at most beta_fast = {fast}"));
        }
        if let Some(factor) = self.attention_factor {
            problems.unless(above_zero(factor), "attention_factor", factor, "give a number above 0, or leave it out");
        }
        problems.finish()
    }
}

/// YaRN over a model of a known length.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    /// Tokens.
    pub original_length: usize,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub attention_factor: Option<f64>,
}

impl Yarn {
    /// The longest sequence, in tokens.
    pub fn length(&self) -> usize {
        (self.factor * self.original_length as f64) as usize
    }

    /// What cosines and sines are multiplied by, so that scores of attention grow by its square (Peng et al. 2023, equation 22).
    pub fn attention_scale(&self) -> f64 {
        self.attention_factor.unwrap_or(0.1 * self.factor.ln() + 1.0)
    }

    /// The pairs of dimensions between which frequencies go over from as they were to divided by `factor`: those that turn
    /// `beta_fast` and `beta_slow` times within the original length, `d ln(L / (2 pi r)) / (2 ln theta)`, rounded outward.
    pub fn ramp(&self, theta: f64, head_dim: usize) -> (f64, f64) {
        let place = |turns: f64| {
            let ratio = self.original_length as f64 / (turns * 2.0 * std::f64::consts::PI);
            head_dim as f64 * ratio.ln() / (2.0 * theta.ln())
        };
        (place(self.beta_fast).floor().max(0.0), place(self.beta_slow).ceil().min(head_dim as f64 - 1.0))
    }
}

/// `[head_dim / 2]` radians per position of each pair of dimensions, in f32 as Transformers computes them.
pub(super) fn frequencies(config: &ModelConfig) -> Vec<f32> {
    let power = |pair: usize| (config.rope_theta as f32).powf((2 * pair) as f32 / config.head_dim as f32);
    let pairs = 0..config.head_dim / 2;
    let Some(yarn) = &config.yarn else { return pairs.map(|pair| 1.0 / power(pair)).collect() };
    let (low, high) = yarn.ramp(config.rope_theta, config.head_dim);
    // Kept apart, or a ramp without length would divide by 0.
    let high = if low == high { high + 0.001 } else { high };
    pairs
        .map(|pair| {
            let stretched = (((pair as f64 - low) / (high - low)) as f32).clamp(0.0, 1.0);
            let kept = 1.0 - stretched;
            let (plain, divided) = (1.0 / power(pair), 1.0 / (yarn.factor as f32 * power(pair)));
            divided * (1.0 - kept) + plain * kept
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ramp_of_qwen_at_four_times_its_length() {
        let yarn = Yarn { factor: 4.0, original_length: 32_768, beta_fast: 32.0, beta_slow: 1.0, attention_factor: None };
        assert_eq!(yarn.ramp(1e6, 128), (23.0, 40.0));
        assert!((yarn.attention_scale() - 1.138_629).abs() < 1e-6);
        assert_eq!(yarn.length(), 131_072);
        assert_eq!(Yarn { factor: 1.0, ..yarn }.attention_scale(), 1.0);
    }

    #[test]
    fn impossible_settings_are_refused_by_name() {
        let yarn = RopeSettings { rope_type: RopeType::Yarn, factor: 4.0, ..RopeSettings::default() };
        assert_eq!(yarn.check(), Ok(()));
        let refused = |settings: RopeSettings, name: &str| {
            let problem = settings.check().expect_err(name).to_string();
            assert!(problem.contains(name) && !problem.contains('\n'), "{problem}");
        };
        for factor in [0.5, f64::NAN, f64::INFINITY] {
            refused(RopeSettings { factor, ..yarn.clone() }, "factor");
        }
        refused(RopeSettings { beta_fast: 0.0, ..yarn.clone() }, "beta_fast");
        refused(RopeSettings { beta_slow: 64.0, ..yarn.clone() }, "beta_slow");
        refused(RopeSettings { attention_factor: Some(-1.0), ..yarn.clone() }, "attention_factor");
        refused(RopeSettings { original_max_position_embeddings: Some(0), ..yarn }, "original_max_position_embeddings");
    }
}
