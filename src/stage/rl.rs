//! Reinforcement learning: groups of attempts at fresh tasks, rewards from really running the hidden tests, leave-one-out
//! advantages, one clipped token-level policy loss, no KL.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{Attempts, Run, RunError, Settings, builtin_engine, first_fault, rollout, show, stream};
use crate::agent::Work;
use crate::algorithm::{
    ClipSettings, Decay, Mismatch, Problems, ScheduleSettings, SettingErrors, has_signal, learning_rate, leave_one_out,
};
use crate::device::Device;
use crate::evaluate::count_endings;
use crate::train::optimizer::AdamWSettings;
use crate::train::{PolicySettings, StepMetrics};
use crate::types::{Episode, Group, Key, Purpose, Sample, Task};

/// Settings of the stage. The defaults are the quick start's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RlSettings {
    /// Rollouts, each followed by training on it. 0 skips the stage.
    pub steps: usize,
    /// Fresh tasks of a step.
    pub tasks_per_step: usize,
    /// Attempts at each task.
    pub group_size: usize,
    /// Optimizer steps on each rollout. With 1 every ratio is 1 and the clip does nothing.
    pub updates_per_rollout: usize,
    pub clip: ClipSettings,
    pub schedule: ScheduleSettings,
    pub optimizer: AdamWSettings,
}

impl Default for RlSettings {
    fn default() -> Self {
        RlSettings {
            steps: 56,
            tasks_per_step: 24,
            group_size: 8,
            updates_per_rollout: 1,
            clip: ClipSettings::default(),
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
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        problems.unless(self.tasks_per_step > 0, "tasks_per_step", self.tasks_per_step, "give at least 1");
        let remedy = "give at least 2, a lone attempt has nothing to compare with";
        problems.unless(self.group_size > 1, "group_size", self.group_size, remedy);
        problems.unless(self.updates_per_rollout > 0, "updates_per_rollout", self.updates_per_rollout, "give at least 1");
        problems.within("clip", self.clip.check());
        problems.within("schedule", self.schedule.check());
        problems.finish()
    }
}

/// A line of `metrics.jsonl`.
#[derive(Serialize)]
struct Line {
    kind: &'static str,
    step: usize,
    loss: f64,
    learning_rate: f64,
    gradient_norm: f64,
    entropy: f64,
    clip_fraction: f64,
    /// Largest difference between sampled and recomputed log-probabilities.
    mismatch: f64,
    mismatch_share: f64,
    reward_mean: f64,
    pass_rate: f64,
    pass_any: f64,
    groups_used: usize,
    groups_all_passed: usize,
    groups_none_passed: usize,
    dropped: u32,
    tokens_sampled: usize,
    tokens_trained: usize,
    turns_mean: f64,
    episode_tokens_mean: f64,
    ran_tests: f64,
    edited_after_failure: f64,
    endings: BTreeMap<String, usize>,
    verdicts_executed: u64,
    verdicts_remembered: u64,
    skipped: bool,
    seconds: BTreeMap<&'static str, f64>,
}

impl<D: Device> Run<'_, D> {
    /// The whole stage, from wherever it was left.
    pub(super) fn reinforce(&mut self) -> Result<(), RunError> {
        let settings = &self.context.settings.rl;
        let (total, every) = (settings.steps, self.context.settings.evaluate.every);
        let name = &self.stage()?.name;
        let before = self.learner.state.step;
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
            let speed = line.tokens_sampled as f64 / line.seconds["rollout"].max(1e-9);
            phase.advance(1, &format!("pass {:.3}, {speed:.0} sampled tokens/s", line.pass_rate));
            self.context.progress.line(&format!(
                "step {}/{total}  reward {:.3}  pass@{} {:.2}  groups used {}/{}  runs tests {:.2}  entropy {:.3}  \
                 gradient norm {:.2}  mismatch {}  {:.1} s",
                step + 1,
                line.reward_mean,
                settings.group_size,
                line.pass_any,
                line.groups_used,
                settings.tasks_per_step,
                line.ran_tests,
                line.entropy,
                line.gradient_norm,
                line.mismatch,
                line.seconds["rollout"] + line.seconds["train"],
            ));
            self.write_metrics(&line)?;
        }
        phase.finish("");
        Ok(())
    }

    /// One step: tasks -> episodes -> groups -> advantages -> update.
    fn reinforce_once(&mut self, step: usize, total: usize) -> Result<Line, RunError> {
        let settings = &self.context.settings.rl;
        let started = Instant::now();
        self.context.grader.forget();
        let tasks = draw_tasks(&self.pool, self.context.settings, step);
        let episodes = self.roll_out(&tasks, step)?;
        let rollout_seconds = started.elapsed().as_secs_f64();

        let groups = gather(&episodes, settings.group_size);
        let dropped: u32 = groups.iter().map(|group| group.dropped).sum();
        if groups.iter().all(|group| group.episodes.is_empty()) {
            return Err(RunError::Failed(format!("step {}: every episode was lost: {}", step + 1, first_fault(&episodes))));
        }
        if dropped > 0 {
            let reason = first_fault(&episodes);
            self.context.progress.warn(&format!("step {}: {dropped} episodes lost to infrastructure faults: {reason}", step + 1));
        }
        let samples = training_samples(&groups);

        let started = Instant::now();
        let rate = learning_rate(step as u64, total as u64, &settings.schedule);
        let mut metrics = self.update(&samples, rate as f32)?;
        if samples.is_empty() {
            // Nothing to learn from, but sampling and training can still be compared.
            let shown: Vec<Sample> = groups
                .iter()
                .find(|group| !group.episodes.is_empty())
                .into_iter()
                .flat_map(|group| &group.episodes)
                .map(|episode| Sample::of(&episode.transcript, 0.0))
                .collect();
            let (temperature, step) = (self.context.settings.engine.temperature, &self.context.settings.step);
            metrics.mismatch = mismatch_of(&shown, &self.learner.trainer.recompute_log_probs(&shown, temperature, step)?);
        }
        let train_seconds = started.elapsed().as_secs_f64();

        if metrics.skipped && metrics.tokens_trained > 0 {
            let message = format!("step {}: the gradient is not a finite number, the weights were left alone", step + 1);
            self.context.progress.warn(&message);
        }
        if metrics.statistics.not_finite > 0 {
            let count = metrics.statistics.not_finite;
            self.context.progress.warn(&format!("step {}: {count} log-probabilities are not finite numbers", step + 1));
        }

        let (stage, counts) = (self.stage()?, self.verdict_counts()?);
        let state = &mut self.learner.state;
        state.count_verdicts(counts);
        state.count_faults(&episodes);
        state.mismatch_max = state.mismatch_max.max(metrics.mismatch.max_absolute);
        state.add_seconds("rl_rollout", rollout_seconds);
        state.add_seconds("rl_train", train_seconds);
        state.count_attempts(&stage.name, Attempts::count(&episodes));
        self.keep_episodes(&format!("{}-{:05}", stage.name, step + 1), &episodes)?;

        let valid: Vec<&Episode> = groups.iter().flat_map(|group| &group.episodes).collect();
        let mean = |value: &dyn Fn(&Episode) -> f64| valid.iter().map(|episode| value(episode)).sum::<f64>() / valid.len() as f64;
        let pass_rate = mean(&|episode| episode.verdict.passed() as u8 as f64);
        let count_groups = |test: &dyn Fn(&[f64]) -> bool| {
            groups.iter().map(Group::outcomes).filter(|outcomes| !outcomes.is_empty() && test(outcomes)).count()
        };
        let solved = count_groups(&|outcomes| outcomes.contains(&1.0));
        Ok(Line {
            kind: "rl",
            step: step + 1,
            loss: metrics.loss,
            learning_rate: rate,
            gradient_norm: metrics.gradient_norm,
            entropy: metrics.entropy,
            clip_fraction: metrics.statistics.clip_fraction(),
            mismatch: metrics.mismatch.max_absolute,
            mismatch_share: metrics.mismatch.differing_share(),
            reward_mean: pass_rate,
            pass_rate,
            pass_any: solved as f64 / count_groups(&|_| true) as f64,
            groups_used: count_groups(&has_signal),
            groups_all_passed: count_groups(&|outcomes| !outcomes.contains(&0.0)),
            groups_none_passed: count_groups(&|outcomes| !outcomes.contains(&1.0)),
            dropped,
            tokens_sampled: episodes.iter().map(|episode| episode.transcript.sampled_count()).sum(),
            tokens_trained: metrics.tokens_trained,
            turns_mean: mean(&|episode| episode.counts.turns as f64),
            episode_tokens_mean: mean(&|episode| episode.transcript.ids.len() as f64),
            ran_tests: mean(&|episode| (episode.counts.runs > 0) as u8 as f64),
            edited_after_failure: mean(&|episode| episode.counts.edited_after_failure as u8 as f64),
            endings: count_endings(&episodes),
            verdicts_executed: counts.executed,
            verdicts_remembered: counts.remembered,
            skipped: metrics.skipped,
            seconds: BTreeMap::from([("rollout", rollout_seconds), ("train", train_seconds)]),
        })
    }

    /// The episodes of a step. A request to stop ends it, for it may take longer than whoever asks will wait: nothing of it is kept,
    /// and what is sampled again on resume is the same.
    fn roll_out(&mut self, tasks: &[&Task], step: usize) -> Result<Vec<Episode>, RunError> {
        let settings = &self.context.settings;
        let total = tasks.len() * settings.rl.group_size;
        let phase = self.context.progress.phase(&format!("rollout {}", step + 1), Some(total as u64));
        let work = Work {
            tasks,
            samples: settings.rl.group_size,
            seed: settings.seed,
            stream: stream::TRAINING,
            step: step as u64,
            version: self.learner.state.version(),
        };
        let mut engine = builtin_engine(self.context, self.learner.trainer.sampler()?);
        Ok(rollout(self.context).collect(&mut engine, &work, &mut show(&*phase, "pass"), self.context.stop)?)
    }

    /// Trains on the samples of one rollout.
    fn update(&mut self, samples: &[Sample], rate: f32) -> Result<StepMetrics, RunError> {
        let context = self.context;
        let (rl, step) = (&context.settings.rl, &context.settings.step);
        let temperature = context.settings.engine.temperature;
        let policy = PolicySettings { temperature, clip: &rl.clip };
        let trainer = &mut self.learner.trainer;
        if rl.updates_per_rollout == 1 {
            return Ok(trainer.policy_step(samples, None, &policy, rate, step)?);
        }
        let old = trainer.recompute_log_probs(samples, temperature, step)?;
        let mismatch = mismatch_of(samples, &old);
        let mut total = StepMetrics { skipped: true, ..StepMetrics::default() };
        for update in 0..rl.updates_per_rollout {
            let part = |index: usize| index % rl.updates_per_rollout == update;
            let samples: Vec<Sample> =
                samples.iter().enumerate().filter(|(index, _)| part(*index)).map(|(_, sample)| sample.clone()).collect();
            let old: Vec<Vec<f32>> =
                old.iter().enumerate().filter(|(index, _)| part(*index)).map(|(_, old)| old.clone()).collect();
            let metrics = trainer.policy_step(&samples, Some(&old), &policy, rate, step)?;
            total.add(&metrics, rl.updates_per_rollout);
        }
        Ok(StepMetrics { mismatch, ..total })
    }
}

/// The tasks of a step: the pool in a shuffled order, a new order each time it has been gone through.
fn draw_tasks<'a>(pool: &[&'a Task], settings: &Settings, step: usize) -> Vec<&'a Task> {
    let count = settings.rl.tasks_per_step;
    let mut drawn = Vec::with_capacity(count);
    let mut shuffled: Option<(usize, Vec<usize>)> = None;
    for place in step * count..(step + 1) * count {
        let (epoch, at) = (place / pool.len(), place % pool.len());
        if shuffled.as_ref().is_none_or(|(of, _)| *of != epoch) {
            let mut order: Vec<usize> = (0..pool.len()).collect();
            Key::new(Purpose::DrawTasks, &[settings.seed, epoch as u64]).shuffle(&mut order);
            shuffled = Some((epoch, order));
        }
        if let Some((_, order)) = &shuffled {
            drawn.push(pool[order[at]]);
        }
    }
    drawn
}

/// Attempts by task, without those lost to infrastructure faults.
fn gather(episodes: &[Episode], group_size: usize) -> Vec<Group> {
    episodes
        .chunks(group_size)
        .map(|attempts| {
            let episodes: Vec<Episode> = attempts.iter().filter(|episode| !episode.verdict.infrastructure()).cloned().collect();
            Group { task_id: attempts[0].task_id.clone(), dropped: (attempts.len() - episodes.len()) as u32, episodes }
        })
        .collect()
}

/// Sampled against recomputed log-probabilities, `[samples][tokens]`, over the trained tokens.
fn mismatch_of(samples: &[Sample], recomputed: &[Vec<f32>]) -> Mismatch {
    let mut mismatch = Mismatch::default();
    for (sample, recomputed) in samples.iter().zip(recomputed) {
        let trained = |values: &[f32]| -> Vec<f32> {
            values.iter().zip(&sample.trained).filter(|(_, trained)| **trained).map(|(value, _)| *value).collect()
        };
        mismatch.merge(&Mismatch::measure(&trained(&sample.sampled_log_probs), &trained(recomputed)));
    }
    mismatch
}

/// The sequences to train on: every attempt of every group whose outcomes differ.
fn training_samples(groups: &[Group]) -> Vec<Sample> {
    let mut samples = Vec::new();
    for group in groups {
        let outcomes = group.outcomes();
        if !has_signal(&outcomes) {
            continue;
        }
        for (episode, advantage) in group.episodes.iter().zip(leave_one_out(&outcomes)) {
            samples.push(Sample::of(&episode.transcript, advantage as f32));
        }
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Ending, EpisodeCounts, Transcript, Verdict};

    fn episode(task: &str, verdict: Verdict) -> Episode {
        let mut transcript = Transcript::default();
        transcript.push_environment(&[1, 2]);
        transcript.push_sampled(&[3, 4], &[-0.5, -0.25], 0);
        Episode {
            task_id: task.into(),
            task_index: 0,
            sample_index: 0,
            transcript,
            ending: Ending::Submitted,
            verdict,
            counts: EpisodeCounts::default(),
        }
    }

    #[test]
    fn faults_leave_their_group_and_groups_without_signal_are_not_trained() {
        let (pass, fail) = (|| Verdict::Passed, || Verdict::Failed("1 of 8 tests failed".into()));
        let fault = || Verdict::Infrastructure("the sandbox broke".into());
        let episodes = [
            [episode("mixed", pass()), episode("mixed", fail()), episode("mixed", fault())],
            [episode("solved", pass()), episode("solved", pass()), episode("solved", fault())],
            [episode("lost", fault()), episode("lost", fault()), episode("lost", fault())],
        ]
        .concat();
        let groups = gather(&episodes, 3);
        assert_eq!(
            groups.iter().map(|group| (group.episodes.len(), group.dropped)).collect::<Vec<_>>(),
            [(2, 1), (2, 1), (0, 3)]
        );
        let samples = training_samples(&groups);
        assert_eq!(samples.iter().map(|sample| sample.advantage).collect::<Vec<_>>(), [1.0, -1.0]);
        assert_eq!(samples[0].trained, [false, false, true, true]);
        assert_eq!(samples[0].sampled_log_probs, [0.0, 0.0, -0.5, -0.25]);
    }
}
