//! What an attempt is worth: its outcome, and penalties for length where a recipe has them.

use serde::{Deserialize, Serialize};

use super::settings::{Problems, SettingErrors};
use crate::types::Episode;

/// The reward of an attempt is the weighted sum of what is set here. The defaults are DeepSWE's: 1 for a patch that
/// passes the hidden tests, 0 for any other, nothing for length or format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardSettings {
    /// What an attempt that passes is worth.
    pub passed: f64,
    /// What any other attempt is worth. DAPO has -1.
    pub failed: f64,
    /// Penalty on turns. Off when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_penalty: Option<StepPenaltySettings>,
    /// Penalty on tokens. Off when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlong_penalty: Option<OverlongPenaltySettings>,
}

/// See [`step_penalty`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepPenaltySettings {
    /// `L_thr`: up to here turns cost nothing.
    pub free_turns: u64,
    /// `T_max`: the turn limit, where the penalty is -1.
    pub turn_limit: u64,
    /// The penalty is multiplied by this; 0 switches it off.
    #[serde(default = "one")]
    pub weight: f64,
}

/// See [`overlong_penalty`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverlongPenaltySettings {
    /// `L_max`: from here on the penalty is -1.
    pub token_limit: u64,
    /// `L_cache`: the last tokens below the limit, over which the penalty grows.
    pub buffer_tokens: u64,
    /// The penalty is multiplied by this; 0 switches it off.
    #[serde(default = "one")]
    pub weight: f64,
}

fn one() -> f64 {
    1.0
}

impl Default for RewardSettings {
    fn default() -> RewardSettings {
        RewardSettings { passed: 1.0, failed: 0.0, step_penalty: None, overlong_penalty: None }
    }
}

impl RewardSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let (passed, failed) = (self.passed, self.failed);
        problems.unless(passed.is_finite(), "passed", passed, "give a finite number");
        problems.unless(failed.is_finite(), "failed", failed, "give a finite number");
        if passed.is_finite() && failed.is_finite() {
            problems.unless(passed > failed, "passed", passed, "give more than reward.failed, or nothing is learned");
        }
        if let Some(StepPenaltySettings { free_turns, turn_limit, weight }) = self.step_penalty {
            problems.unless(
                turn_limit > free_turns,
                "step_penalty.turn_limit",
                turn_limit,
                &format!("give more than step_penalty.free_turns = {free_turns}: the penalty grows between the two"),
            );
            problems.unless(weight >= 0.0 && weight.is_finite(), "step_penalty.weight", weight, AT_LEAST_ZERO);
        }
        if let Some(OverlongPenaltySettings { token_limit, buffer_tokens, weight }) = self.overlong_penalty {
            problems.unless(token_limit > 0, "overlong_penalty.token_limit", token_limit, "give at least 1");
            problems.unless(
                buffer_tokens <= token_limit,
                "overlong_penalty.buffer_tokens",
                buffer_tokens,
                &format!("give at most overlong_penalty.token_limit = {token_limit}"),
            );
            problems.unless(weight >= 0.0 && weight.is_finite(), "overlong_penalty.weight", weight, AT_LEAST_ZERO);
        }
        problems.finish()
    }
}

const AT_LEAST_ZERO: &str = "give a finite number of at least 0: the penalty itself is negative";

/// A reward and what it is made of, weights applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reward {
    pub outcome: f64,
    pub step_penalty: f64,
    pub overlong_penalty: f64,
}

impl Reward {
    pub fn total(&self) -> f64 {
        self.outcome + self.step_penalty + self.overlong_penalty
    }

    /// Of an episode. Its response, for a penalty on tokens, goes from the first sampled token to the last.
    pub fn of(episode: &Episode, settings: &RewardSettings) -> Reward {
        let sampled = &episode.transcript.sampled;
        let first = sampled.iter().position(|&sampled| sampled);
        let last = sampled.iter().rposition(|&sampled| sampled);
        let tokens = first.zip(last).map_or(0, |(first, last)| last + 1 - first);
        reward(episode.verdict.passed(), episode.counts.turns.into(), tokens as u64, settings)
    }
}

/// The reward of an attempt that took `turns` actions of the agent and whose response (what the policy sampled and what
/// came between) has `tokens` tokens. There is no reward for an infrastructure fault: it is no attempt.
pub fn reward(passed: bool, turns: u64, tokens: u64, settings: &RewardSettings) -> Reward {
    Reward {
        outcome: if passed { settings.passed } else { settings.failed },
        step_penalty: settings
            .step_penalty
            .as_ref()
            .map_or(0.0, |penalty| penalty.weight * step_penalty(turns, penalty.free_turns, penalty.turn_limit)),
        overlong_penalty: settings
            .overlong_penalty
            .as_ref()
            .map_or(0.0, |penalty| penalty.weight * overlong_penalty(tokens, penalty.token_limit, penalty.buffer_tokens)),
    }
}

/// The linear step penalty of Nebius (arXiv 2508.03501, eq. 4): 0 below `free_turns` (`L_thr`), then
/// `(L_thr - turns) / (T_max - L_thr)`, which is -1 at `turn_limit` (`T_max`). The turn limit must be above `free_turns`.
pub fn step_penalty(turns: u64, free_turns: u64, turn_limit: u64) -> f64 {
    if turns <= free_turns {
        return 0.0;
    }
    -((turns - free_turns) as f64) / (turn_limit as f64 - free_turns as f64)
}

/// The soft overlong punishment of DAPO (Yu et al. 2025, eq. 13): 0 up to `token_limit - buffer_tokens`, falling to -1 at
/// `token_limit`, -1 beyond.
pub fn overlong_penalty(tokens: u64, token_limit: u64, buffer_tokens: u64) -> f64 {
    let free_tokens = token_limit.saturating_sub(buffer_tokens);
    if tokens <= free_tokens {
        0.0
    } else if tokens <= token_limit {
        -((tokens - free_tokens) as f64) / buffer_tokens as f64
    } else {
        -1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_penalty_vectors() {
        let stage_1 = [(5, 0.0), (10, 0.0), (11, -1.0 / 30.0), (25, -0.5), (39, -29.0 / 30.0), (40, -1.0)];
        for (turns, expected) in stage_1 {
            assert_eq!(step_penalty(turns, 10, 40), expected, "{turns} turns");
        }
        for (turns, expected) in [(10, 0.0), (45, -0.5), (80, -1.0)] {
            assert_eq!(step_penalty(turns, 10, 80), expected, "{turns} turns");
        }
    }

    #[test]
    fn overlong_penalty_vectors() {
        for (tokens, expected) in [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (101, -1.0), (u64::MAX, -1.0)] {
            assert_eq!(overlong_penalty(tokens, 100, 20), expected, "{tokens} tokens");
        }
        assert_eq!([100, 101].map(|tokens| overlong_penalty(tokens, 100, 0)), [0.0, -1.0], "no buffer is a step");
        assert_eq!(overlong_penalty(16_384 + 1_024, 20_480, 4_096), -0.25, "the values of DAPO");
    }

    #[test]
    fn parts_are_weighted_and_added() {
        let settings = RewardSettings {
            passed: 1.0,
            failed: -1.0,
            step_penalty: Some(StepPenaltySettings { free_turns: 10, turn_limit: 40, weight: 2.0 }),
            overlong_penalty: Some(OverlongPenaltySettings { token_limit: 100, buffer_tokens: 20, weight: 0.5 }),
        };
        let found = reward(true, 25, 90, &settings);
        assert_eq!(found, Reward { outcome: 1.0, step_penalty: -1.0, overlong_penalty: -0.25 });
        assert_eq!(found.total(), -0.25);
        assert_eq!(reward(false, 0, 0, &settings).total(), -1.0);
        assert_eq!(reward(true, 1_000, 1_000_000, &RewardSettings::default()).total(), 1.0);
        assert_eq!(reward(false, 1_000, 1_000_000, &RewardSettings::default()).total(), 0.0);
    }

    #[test]
    fn impossible_settings_are_all_named() {
        let settings = RewardSettings {
            passed: 0.0,
            failed: 0.0,
            step_penalty: Some(StepPenaltySettings { free_turns: 40, turn_limit: 40, weight: -1.0 }),
            overlong_penalty: Some(OverlongPenaltySettings { token_limit: 10, buffer_tokens: 11, weight: f64::NAN }),
        };
        let errors = settings.check().unwrap_err();
        let fields: Vec<&str> = errors.0.iter().map(|error| error.field.as_str()).collect();
        assert_eq!(
            fields,
            [
                "passed",
                "step_penalty.turn_limit",
                "step_penalty.weight",
                "overlong_penalty.buffer_tokens",
                "overlong_penalty.weight"
            ]
        );
        let line = errors.0[1].to_string();
        assert_eq!(
            line,
            "step_penalty.turn_limit is 40: give more than step_penalty.free_turns = 40: the penalty grows between the two"
        );
        assert_eq!(RewardSettings::default().check(), Ok(()));
    }
}
