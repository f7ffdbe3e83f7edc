//! What the policy loss is made of, and which parts go together.

use serde::{Deserialize, Serialize};

use super::super::importance::{CorrectionSettings, OldPolicy};
use super::super::settings::{Problems, SettingErrors};
use super::aggregation::Aggregation;
use super::divergence::KlSettings;

/// The term of each token that carries the advantage `A`. `r` is its probability now over that before the update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// `max(-A r, -A clip(r))` (PPO, Schulman et al. 2017; GRPO; DAPO eq. 8).
    #[default]
    Clip,
    /// The same with the geometric mean of the whole sequence's ratios in place of `r` (GSPO, arXiv 2507.18071). Each token's
    /// share of the gradient takes the token's own importance weight, as in verl.
    Gspo,
    /// `-clip(r) A log_prob` with the clipped ratio held constant: no token loses its gradient (CISPO, arXiv 2506.13585).
    Cispo,
    /// `-A log_prob` (REINFORCE), usually with an importance weight.
    Reinforce,
}

impl Objective {
    pub fn name(self) -> &'static str {
        match self {
            Objective::Clip => "clip",
            Objective::Gspo => "gspo",
            Objective::Cispo => "cispo",
            Objective::Reinforce => "reinforce",
        }
    }
}

/// How far one update may move a token's probability before the loss stops asking for more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClipSettings {
    /// The ratio is clipped below at `1 - epsilon_low`. 1 leaves it open below (CISPO as published).
    pub epsilon_low: f64,
    /// The ratio is clipped above at `1 + epsilon_high`. Above `epsilon_low`, so that rare tokens can become likely (DAPO).
    pub epsilon_high: f64,
    /// With a negative advantage `A`, hold a token's loss at `-A * dual_clip` (above 1). Off when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dual_clip: Option<f64>,
}

impl Default for ClipSettings {
    /// The values of DAPO (Yu et al. 2025), without dual clip.
    fn default() -> ClipSettings {
        ClipSettings { epsilon_low: 0.2, epsilon_high: 0.28, dual_clip: None }
    }
}

impl ClipSettings {
    /// # Errors
    /// All that makes no sense as a clip.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let low = self.epsilon_low;
        problems.unless((0.0..=1.0).contains(&low), "epsilon_low", low, "give a value from 0 to 1");
        let high = self.epsilon_high;
        problems.unless(high >= 0.0 && high.is_finite(), "epsilon_high", high, "give a finite value of at least 0");
        let dual = self.dual_clip.unwrap_or(f64::INFINITY);
        problems.unless(dual > 1.0, "dual_clip", dual, "give a value above 1, or leave it out");
        problems.finish()
    }

    /// The ratio within its bounds.
    pub(super) fn hold(&self, ratio: f64) -> f64 {
        ratio.clamp(1.0 - self.epsilon_low, 1.0 + self.epsilon_high)
    }
}

/// The whole policy loss. The defaults are DAPO's: asymmetric clip, mean over tokens, no KL, no entropy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LossSettings {
    pub objective: Objective,
    pub clip: ClipSettings,
    pub aggregation: Aggregation,
    /// `C` of `seq_mean_token_sum_norm` and `constant`. DeepSWE: 32768, its longest response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub constant: Option<f64>,
    /// Divergence from a reference model.
    pub kl: KlSettings,
    /// This times a token's entropy (nats) is taken off its loss. 0: no entropy term.
    pub entropy_coefficient: f64,
    /// What is done about a sampler whose probabilities are not the trainer's.
    pub correction: CorrectionSettings,
}

impl LossSettings {
    /// # Errors
    /// All that makes no sense, alone or together.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        problems.within("clip", self.clip.check());
        problems.within("kl", self.kl.check());
        problems.within("correction", self.correction.check());
        let objective = self.objective.name();
        if let Some(dual) = self.clip.dual_clip {
            let applies = self.objective == Objective::Clip;
            problems.unless(applies, "clip.dual_clip", dual, &format!("leave it out: it is no part of {objective}"));
        }
        let aggregation = self.aggregation.name();
        if self.objective == Objective::Gspo {
            let right = self.aggregation == Aggregation::SeqMeanTokenMean;
            problems.unless(right, "aggregation", aggregation, "gspo has one ratio per sequence: set seq_mean_token_mean");
        }
        match (self.aggregation.needs_constant(), self.constant) {
            (true, None) => problems.unless(false, "constant", "absent", &format!("{aggregation} divides by it: set it")),
            (true, Some(constant)) => {
                let valid = constant > 0.0 && constant.is_finite();
                problems.unless(valid, "constant", constant, "give a finite number above 0");
            }
            (false, Some(constant)) => {
                problems.unless(false, "constant", constant, &format!("leave it out: {aggregation} does not use it"));
            }
            (false, None) => {}
        }
        let entropy = self.entropy_coefficient;
        problems.unless(entropy.is_finite(), "entropy_coefficient", entropy, "give a finite number");
        let bypass = self.correction.old_policy == OldPolicy::Sampler;
        let double = bypass && self.correction.weight.is_some() && self.objective != Objective::Reinforce;
        let remedy = format!(
            "leave it out: with old_policy = \"sampler\" the ratio of {objective} already is the importance weight, which \
             would count twice; only reinforce takes one there"
        );
        problems.unless(!double, "correction.weight", "set", &remedy);
        let normalised = self.correction.weight.as_ref().is_some_and(|weight| weight.normalise);
        let remedy =
            "leave it out: with old_policy = \"sampler\" weights are found in the pass that trains, before their mean is known";
        problems.unless(!(bypass && normalised), "correction.weight.normalise", "true", remedy);
        problems.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::importance::WeightSettings;
    use super::*;

    fn lines(settings: LossSettings) -> Vec<String> {
        settings.check().err().map_or_else(Vec::new, |errors| errors.to_string().lines().map(str::to_string).collect())
    }

    #[test]
    fn clip_settings_are_checked() {
        assert_eq!(ClipSettings::default().check(), Ok(()));
        let wrong = ClipSettings { epsilon_low: 1.5, epsilon_high: f64::NAN, dual_clip: Some(1.0) };
        assert_eq!(
            wrong.check().unwrap_err().to_string(),
            "epsilon_low is 1.5: give a value from 0 to 1\n\
             epsilon_high is NaN: give a finite value of at least 0\n\
             dual_clip is 1: give a value above 1, or leave it out"
        );
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        assert_eq!(lines(LossSettings::default()), [""; 0]);
        let dual_clip = ClipSettings { dual_clip: Some(3.0), ..ClipSettings::default() };
        let gspo = LossSettings { objective: Objective::Gspo, clip: dual_clip, ..LossSettings::default() };
        let found = lines(gspo);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].starts_with("clip.dual_clip is 3: ") && found[1].starts_with("aggregation is token_mean: "),
            "{found:?}"
        );

        let constant = |aggregation, constant| lines(LossSettings { aggregation, constant, ..LossSettings::default() });
        assert_eq!(constant(Aggregation::Constant, Some(4096.0)), [""; 0]);
        assert_eq!(constant(Aggregation::Constant, None), ["constant is absent: constant divides by it: set it"]);
        assert_eq!(constant(Aggregation::Constant, Some(0.0)), ["constant is 0: give a finite number above 0"]);
        assert_eq!(constant(Aggregation::TokenMean, Some(1.0)), ["constant is 1: leave it out: token_mean does not use it"]);
    }

    #[test]
    fn a_weight_on_a_bypass_ratio_would_count_twice() {
        let correction = |old_policy| CorrectionSettings {
            old_policy,
            weight: Some(WeightSettings::default()),
            ..CorrectionSettings::default()
        };
        for objective in [Objective::Clip, Objective::Cispo, Objective::Reinforce] {
            let settings = |old_policy| LossSettings { objective, correction: correction(old_policy), ..LossSettings::default() };
            assert_eq!(lines(settings(OldPolicy::Recomputed)), [""; 0]);
            let refused = objective != Objective::Reinforce;
            let found = lines(settings(OldPolicy::Sampler));
            assert_eq!(found.iter().filter(|line| line.starts_with("correction.weight is set: ")).count(), usize::from(refused));
        }
        let mut reinforce = LossSettings { objective: Objective::Reinforce, ..LossSettings::default() };
        reinforce.correction = correction(OldPolicy::Sampler);
        reinforce.correction.weight = Some(WeightSettings { normalise: true, ..WeightSettings::default() });
        assert!(lines(reinforce)[0].starts_with("correction.weight.normalise is true: "));
    }

    #[test]
    fn the_run_file_speaks_plainly() {
        let text = r#"
            objective = "gspo"
            aggregation = "seq_mean_token_mean"
            entropy_coefficient = 0.001
            clip = { epsilon_low = 3e-4, epsilon_high = 4e-4 }
            kl = { coefficient = 0.001, estimator = "k3" }
            correction = { old_policy = "recomputed", weight = { level = "geometric", beyond = "mask", lower = 0.99, upper = 1.01 } }
        "#;
        let settings: LossSettings = toml::from_str(text).unwrap();
        assert_eq!(settings.check(), Ok(()));
        let written = toml::to_string(&settings).unwrap();
        assert_eq!(toml::from_str::<LossSettings>(&written).unwrap(), settings);
        assert!(toml::from_str::<LossSettings>("epsilon_low = 0.2").is_err());
        assert!(toml::from_str::<LossSettings>("objective = \"ppo\"").is_err());
    }
}
