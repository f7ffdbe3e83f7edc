//! Reinforcement learning: groups of attempts at fresh tasks, rewards from really running the hidden tests, and a policy loss made
//! of them, all by the settings of `[rl]`.
//!
//! ```text
//! rollout.rs   tasks -> attempts, until enough groups are worth training on
//! groups.rs    attempts -> rewards -> standings -> samples
//! health.rs    what a step tells of itself
//! settings.rs  the section of the run file
//! ```
//!
//! One step ahead, the next rollout is sampled with the weights that a step starts from, before they change: as if both went on at
//! once. Here they follow one another, for the engine reads the very weights that training writes.

mod groups;
mod health;
mod rollout;
mod settings;

use std::time::Instant;

use serde::{Deserialize, Serialize};

pub use rollout::Collected;
pub use settings::RlSettings;

use super::{Attempts, Run, RunError, first_fault, stream};
use crate::algorithm::learning_rate;
use crate::device::Device;
use crate::model::StepFlops;
use crate::train::{PolicySettings, StepMetrics, mismatch_of};
use crate::types::{Episode, Sample};
use groups::Group;
use health::{Line, Training};

/// What a checkpoint must remember of a stage under way.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RlProgress {
    /// Tasks drawn from the run's order so far, whatever became of their attempts.
    pub tasks_drawn: usize,
    /// The rollout of the next step, where it is sampled a step ahead: with weights that are gone by then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ahead: Option<Collected>,
    /// The checkpoint whose weights the stage started from, if the loss pulls towards them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<usize>,
}

impl<D: Device> Run<'_, D> {
    /// The whole stage, from wherever it was left.
    pub(super) fn reinforce(&mut self) -> Result<(), RunError> {
        let settings = &self.context.settings.rl;
        let (total, every) = (settings.steps, self.context.settings.evaluate.every);
        let name = &self.stage()?.name;
        let before = self.learner.state.step;
        if before < total && settings.loss.kl.coefficient != 0.0 {
            self.hold_reference()?;
        }
        let phase = self.context.progress.phase("reinforce", Some(total.saturating_sub(before) as u64));
        for step in before..total {
            if every > 0 && step > 0 && step % every == 0 {
                let samples = self.context.settings.evaluate.samples_between;
                self.evaluate(&format!("{name}_step_{step}"), stream::EVALUATE_BETWEEN + step as u64, samples)?;
            }
            if step > before && step % self.context.settings.checkpoint.every_rl_steps == 0 {
                self.save()?;
            }
            self.pause()?;
            let line = self.reinforce_once(step, total)?;
            self.learner.state.step += 1;
            self.learner.state.rl_steps += 1;
            let speed = line.speed.sampled_tokens_per_second;
            phase.advance(1, &format!("pass {:.3}, {speed:.0} sampled tokens/s", line.rewards.pass_rate));
            self.context.progress.line(&self.describe(&line, step, total));
            self.write_metrics(&line)?;
        }
        self.learner.trainer.drop_reference();
        phase.finish("");
        Ok(())
    }

    fn describe(&self, line: &Line, step: usize, total: usize) -> String {
        let settings = &self.context.settings.rl;
        format!(
            "step {}/{total}  reward {:.3}  pass@{} {:.2}  groups used {}/{}  runs tests {:.2}  entropy {:.3}  gradient norm {:.2}  \
             mismatch {}  {:.1} s",
            step + 1,
            line.rewards.reward_mean,
            settings.group_size,
            line.rewards.pass_any,
            line.groups.groups_used,
            settings.tasks_per_step,
            line.ran_tests(),
            line.update.entropy,
            line.update.gradient_norm,
            line.sampler.mismatch,
            line.seconds["rollout"] + line.seconds["train"],
        )
    }

    /// Loads the weights that the stage started from. They are those of a checkpoint that is never removed.
    fn hold_reference(&mut self) -> Result<(), RunError> {
        let step = match self.learner.state.rl.reference {
            Some(step) => step,
            None => {
                self.save_now()?;
                self.learner.state.steps()
            }
        };
        let checkpoint = self.checkpoints.hold(step)?;
        self.learner.state.rl.reference = Some(step);
        self.learner.trainer.load_reference(&checkpoint)?;
        self.context.progress.detail(&format!("reference {}", checkpoint.display()));
        Ok(())
    }

    /// The rollout to train on in step `step`. One step ahead, the rollout of the step after it is sampled here too.
    fn next_rollout(&mut self, step: usize, total: usize) -> Result<Collected, RunError> {
        let current = match self.learner.state.rl.ahead.take() {
            Some(collected) => collected,
            None => self.roll_out(step)?,
        };
        if self.context.settings.rl.steps_ahead > 0 && step + 1 < total {
            match self.roll_out(step + 1) {
                Ok(next) => self.learner.state.rl.ahead = Some(next),
                Err(error) => {
                    // Asked to stop: what is saved now still has the rollout of this step.
                    self.learner.state.rl.ahead = Some(current);
                    return Err(error);
                }
            }
        }
        Ok(current)
    }

    /// One step: tasks -> attempts -> groups -> advantages -> updates.
    fn reinforce_once(&mut self, step: usize, total: usize) -> Result<Line, RunError> {
        let context = self.context;
        let settings = &context.settings.rl;
        let collected = self.next_rollout(step, total)?;
        self.warn_of_faults(step, &collected.episodes)?;
        let groups = groups::judge(&collected, settings);
        let version = self.learner.state.version();
        let (samples, too_old) = groups::samples(&groups, &collected.chosen, version, settings);
        let training = self.train(samples, &groups, step, total, too_old)?;
        self.warn_of_skips(step, &training.metrics);

        let stage = self.stage()?;
        let line = Line::of(step, version, &collected, &groups, &training, settings);
        let state = &mut self.learner.state;
        state.verdicts_executed += collected.verdicts_executed;
        state.verdicts_remembered += collected.verdicts_remembered;
        state.count_faults(&collected.episodes);
        if line.sampler.lag == 0 {
            state.mismatch_max = state.mismatch_max.max(line.sampler.mismatch);
        }
        state.add_seconds("rl_rollout", collected.seconds);
        state.add_seconds("rl_train", training.seconds);
        state.count_attempts(&stage.name, Attempts::count(&collected.episodes));
        self.keep_episodes(&format!("{}-{:05}", stage.name, step + 1), &collected.episodes)?;
        Ok(line)
    }

    /// Trains on the samples of one rollout.
    fn train(
        &mut self,
        samples: Vec<Sample>,
        groups: &[Group],
        step: usize,
        total: usize,
        too_old: usize,
    ) -> Result<Training, RunError> {
        let context = self.context;
        let (settings, pass) = (&context.settings.rl, &context.settings.step);
        let started = Instant::now();
        let learning_rate = learning_rate(step as u64, total as u64, &settings.schedule);
        let policy = PolicySettings { temperature: context.settings.engine.temperature as f32, loss: &settings.loss };
        let trainer = &mut self.learner.trainer;
        let plan = settings.update_plan();
        let lengths: Vec<usize> =
            samples.iter().filter(|sample| sample.trained_count() > 0).map(|sample| sample.ids.len()).collect();
        let mut metrics = trainer.train_on_rollout(samples, &policy, plan, learning_rate as f32, pass)?;
        let scored = metrics.tokens_trained / plan.passes;
        let flops = StepFlops::of(trainer.policy().config(), &lengths, scored).total(StepFlops::CAUSAL) * plan.passes as f64;
        if metrics.mismatch.tokens == 0 {
            // Nothing to learn from, but sampling and training can still be compared.
            let shown = groups.iter().map(heard).find(|heard| !heard.is_empty()).unwrap_or_default();
            let recomputed = trainer.recompute_log_probs(&shown, policy.temperature, pass)?;
            metrics.mismatch = mismatch_of(&shown, &recomputed);
        }
        let seconds = started.elapsed().as_secs_f64();
        let peak = trainer.policy().device().peaks().map(|peaks| peaks.tensor_flops * context.ranks.ranks() as f64);
        Ok(Training { metrics, learning_rate, seconds, mfu: peak.map(|peak| flops / seconds / peak), too_old })
    }

    fn warn_of_faults(&self, step: usize, episodes: &[Episode]) -> Result<(), RunError> {
        let lost = episodes.iter().filter(|episode| episode.verdict.infrastructure()).count();
        let reason = first_fault(episodes);
        if lost == episodes.len() {
            return Err(RunError::Failed(format!("step {}: every episode was lost: {reason}", step + 1)));
        }
        if lost > 0 {
            let message = format!("step {}: {lost} episodes lost to infrastructure faults: {reason}", step + 1);
            self.context.progress.warn(&message);
        }
        Ok(())
    }

    fn warn_of_skips(&self, step: usize, metrics: &StepMetrics) {
        let StepMetrics { updates, updates_skipped, tokens_trained, gradient_norm, rejected, .. } = metrics;
        let reason = match (tokens_trained, metrics.statistics.tokens) {
            (0, _) if *rejected == 0 => "no attempt is left to train on",
            (_, 0) if metrics.statistics.not_finite == 0 => "every token is rejected as too far from what the sampler says",
            _ => "a gradient is not a finite number, or its norm is step.skip_norm or more",
        };
        let warn = |message: String| self.context.progress.warn(&format!("step {}: {message}", step + 1));
        if metrics.skipped {
            warn(format!("the weights were left alone: {reason}"));
        } else if *updates_skipped > 0 {
            let share = format!("{updates_skipped} of {updates} optimizer steps were skipped");
            warn(format!("{share}: {reason} (mean norm {gradient_norm:.3e})"));
        }
        if metrics.statistics.not_finite > 0 {
            warn(format!("{} log-probabilities are not finite numbers", metrics.statistics.not_finite));
        }
    }
}

/// The attempts of a group that were not lost, as samples.
fn heard(group: &Group) -> Vec<Sample> {
    let valid = group.episodes.iter().filter(|episode| !episode.verdict.infrastructure());
    valid.map(|episode| Sample::of(&episode.transcript, 0.0)).collect()
}
