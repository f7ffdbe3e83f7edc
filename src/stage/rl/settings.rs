//! The `[rl]` section of a run file: every published choice by composing the settings of [`crate::algorithm`].

use serde::{Deserialize, Serialize};

use crate::agent::{self, MOST_EPISODES};
use crate::algorithm::{
    AdvantageSettings, Decay, DynamicSamplingSettings, FilterSettings, GroupFilter, LossSettings, MOST_COUNTED, Problems,
    RewardSettings, ScheduleSettings, SettingErrors, Singleton,
};
use crate::train::UpdatePlan;
use crate::train::optimizer::AdamWSettings;

/// Settings of the stage. The defaults are the quick start's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RlSettings {
    /// Rollouts, each followed by training on it. 0 skips the stage.
    pub steps: usize,
    /// Fresh tasks of a step; with dynamic sampling, groups of a step.
    pub tasks_per_step: usize,
    /// Attempts at each task.
    pub group_size: usize,
    /// Sequences of one optimizer step, so that a rollout is trained on in several; the last has what is left. 0: all in one, in which
    /// every ratio is 1 and the clip does nothing. Nebius: 128, which makes 2 to 8 optimizer steps of a rollout, as samples without
    /// advantage are dropped.
    pub sequences_per_update: usize,
    /// Times that a rollout is gone through (PPO's epochs).
    pub passes: usize,
    /// 0: a rollout is sampled with the weights that it then trains. 1: with those of one step before, as when the next rollout is
    /// sampled while this one is trained on.
    pub steps_ahead: usize,
    /// Attempts are left out if some of their tokens were sampled with weights more than so many steps older than those they would train.
    pub most_lag: usize,
    /// What an attempt is worth.
    pub reward: RewardSettings,
    /// How rewards of a group become advantages.
    pub advantage: AdvantageSettings,
    /// What is left out of training.
    pub filter: FilterSettings,
    /// Roll out until enough groups tell good from bad (DAPO). Off when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dynamic_sampling: Option<DynamicSamplingSettings>,
    /// What is minimised.
    pub loss: LossSettings,
    pub schedule: ScheduleSettings,
    pub optimizer: AdamWSettings,
}

impl Default for RlSettings {
    fn default() -> Self {
        RlSettings {
            steps: 56,
            tasks_per_step: 24,
            group_size: 8,
            sequences_per_update: 0,
            passes: 1,
            steps_ahead: 0,
            most_lag: 1,
            reward: RewardSettings::default(),
            advantage: AdvantageSettings::default(),
            filter: FilterSettings::default(),
            dynamic_sampling: None,
            loss: LossSettings::default(),
            schedule: ScheduleSettings {
                peak: 7e-4,
                warmup_steps: 3,
                decay: Decay::Linear,
                floor_share: 0.3,
                ..ScheduleSettings::default()
            },
            optimizer: AdamWSettings::default(),
        }
    }
}

impl RlSettings {
    /// # Errors
    /// All that makes no sense, alone or together.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        problems.unless(self.tasks_per_step > 0, "tasks_per_step", self.tasks_per_step, "give at least 1");
        problems.unless(self.passes > 0, "passes", self.passes, "give at least 1");
        problems.at_most("passes", self.passes, MOST_COUNTED);
        problems.at_most("steps", self.steps, MOST_COUNTED);
        let raw_rewards = self.advantage.singleton == Singleton::Reward && self.filter.groups == GroupFilter::Off;
        let remedy = "give at least 2, a lone attempt has nothing to compare with (1 only with advantage.singleton = \"reward\" \
                      and filter.groups = \"off\")";
        problems.unless(self.group_size > usize::from(!raw_rewards), "group_size", self.group_size, remedy);
        let attempts = |tasks: usize| tasks.saturating_mul(self.group_size);
        let remedy = format!("give less, or fewer tasks: a rollout may have {MOST_EPISODES} attempts at most");
        let batch = self.tasks_per_batch().max(self.tasks_per_step);
        problems.unless(attempts(batch) <= MOST_EPISODES, "group_size", self.group_size, &remedy);
        let (all, update) = (attempts(self.tasks_per_step), self.sequences_per_update);
        let remedy = format!("give at most tasks_per_step x group_size = {all}, or 0 for all in one update");
        problems.unless(update <= all, "sequences_per_update", update, &remedy);
        problems.unless(self.steps_ahead <= 1, "steps_ahead", self.steps_ahead, "give 0 or 1");
        let remedy = format!("give at least steps_ahead = {}, or every attempt is too old to train on", self.steps_ahead);
        problems.unless(self.most_lag >= self.steps_ahead, "most_lag", self.most_lag, &remedy);
        problems.within("reward", self.reward.check());
        problems.within("advantage", self.advantage.check());
        problems.within("filter", self.filter.check());
        if let Some(dynamic_sampling) = &self.dynamic_sampling {
            problems.within("dynamic_sampling", dynamic_sampling.check());
            let chooses = self.filter.groups != GroupFilter::Off;
            let remedy = "leave it out, or set filter.groups: without a filter every group is worth training on";
            problems.unless(chooses, "dynamic_sampling", "set", remedy);
        }
        problems.within("loss", self.loss.check());
        problems.within("schedule", self.schedule.check());
        problems.within("optimizer", self.optimizer.check());
        problems.finish()
    }

    /// What does not go together with the limits of the agent whose attempts are rewarded.
    ///
    /// # Errors
    /// All of it.
    pub fn check_with(&self, agent: &agent::Settings) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        if let Some(penalty) = &self.reward.step_penalty {
            let remedy = format!("give agent.max_turns = {}: the penalty is -1 at the turn limit", agent.max_turns);
            let right = penalty.turn_limit == agent.max_turns as u64;
            problems.unless(right, "reward.step_penalty.turn_limit", penalty.turn_limit, &remedy);
        }
        if let Some(penalty) = &self.reward.overlong_penalty {
            let free = penalty.token_limit.saturating_sub(penalty.buffer_tokens);
            let remedy = format!(
                "an attempt of agent.max_tokens = {} ends before the penalty starts, after {free} tokens of response",
                agent.max_tokens
            );
            let reached = free < agent.max_tokens as u64;
            problems.unless(reached, "reward.overlong_penalty.token_limit", penalty.token_limit, &remedy);
        }
        problems.finish()
    }

    pub(super) fn update_plan(&self) -> UpdatePlan {
        UpdatePlan { sequences_per_update: self.sequences_per_update, passes: self.passes }
    }

    /// Tasks that are rolled out together.
    pub(super) fn tasks_per_batch(&self) -> usize {
        let asked = self.dynamic_sampling.as_ref().map_or(0, |settings| settings.tasks_per_batch);
        if asked == 0 { self.tasks_per_step } else { asked }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{OverlongPenaltySettings, StepPenaltySettings};

    fn fields(checked: Result<(), SettingErrors>) -> Vec<String> {
        checked.err().map_or_else(Vec::new, |errors| errors.0.into_iter().map(|error| error.field).collect())
    }

    #[test]
    fn impossible_settings_are_all_named_at_once() {
        assert_eq!(RlSettings::default().check(), Ok(()));
        let text = r#"
            tasks_per_step = 0
            group_size = 1
            passes = 0
            steps_ahead = 2
            most_lag = 1
            advantage = { ddof = 2 }
            filter = { groups = "off", masked_endings = ["infrastructure"] }
            dynamic_sampling = { most_batches = 0, when_exhausted = "train_on_fewer" }
            [loss]
            objective = "gspo"
            correction = { old_policy = "sampler", weight = {} }
            [reward]
            step_penalty = { free_turns = 40, turn_limit = 40 }
        "#;
        let settings: RlSettings = toml::from_str(text).unwrap();
        assert_eq!(
            fields(settings.check()),
            [
                "tasks_per_step",
                "passes",
                "group_size",
                "steps_ahead",
                "most_lag",
                "reward.step_penalty.turn_limit",
                "advantage.ddof",
                "filter.masked_endings",
                "dynamic_sampling.when_exhausted",
                "dynamic_sampling",
                "loss.aggregation",
                "loss.correction.weight",
            ]
        );
        let lone = "group_size = 1\nadvantage = { singleton = \"reward\" }\nfilter = { groups = \"off\" }";
        assert_eq!(toml::from_str::<RlSettings>(lone).unwrap().check(), Ok(()));
        assert_eq!(fields(RlSettings { steps_ahead: 1, most_lag: 0, ..RlSettings::default() }.check()), ["most_lag"]);
        let too_many = RlSettings { tasks_per_step: usize::MAX, sequences_per_update: usize::MAX, ..RlSettings::default() };
        assert_eq!(fields(too_many.check()), ["group_size"]);
        let updates = |sequences_per_update| fields(RlSettings { sequences_per_update, ..RlSettings::default() }.check());
        assert_eq!((updates(24 * 8), updates(24 * 8 + 1)), (vec![], vec!["sequences_per_update".to_owned()]));
        let optimizer = "optimizer = { beta1 = 1, beta2 = nan, epsilon = 0, weight_decay = inf }";
        assert_eq!(
            fields(toml::from_str::<RlSettings>(optimizer).unwrap().check()),
            ["optimizer.beta1", "optimizer.beta2", "optimizer.epsilon", "optimizer.weight_decay"]
        );
        assert!(toml::from_str::<RlSettings>("clip = {}").is_err(), "it is loss.clip");
    }

    #[test]
    fn penalties_meet_the_limits_of_the_agent() {
        let agent = agent::Settings { max_turns: 40, max_tokens: 1000, ..agent::Settings::default() };
        let settings = |turn_limit, token_limit| {
            let mut settings = RlSettings::default();
            settings.reward.step_penalty = Some(StepPenaltySettings { free_turns: 10, turn_limit, weight: 1.0 });
            settings.reward.overlong_penalty = Some(OverlongPenaltySettings { token_limit, buffer_tokens: 100, weight: 1.0 });
            settings
        };
        assert_eq!(settings(40, 1000).check_with(&agent), Ok(()));
        let wrong = fields(settings(80, 1100).check_with(&agent));
        assert_eq!(wrong, ["reward.step_penalty.turn_limit", "reward.overlong_penalty.token_limit"]);
        assert_eq!(RlSettings::default().check_with(&agent), Ok(()));
    }
}
