//! Rejection fine-tuning: collect attempts (scripted, imperfect demonstrations, or the policy's own), keep those whose answer passes the
//! hidden tests, learn to imitate them, wrong first guesses included.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{Run, RunError};
use crate::agent::MOST_EPISODES;
use crate::algorithm::{Decay, MOST_COUNTED, Problems, ScheduleSettings, SettingErrors, learning_rate};
use crate::device::Device;
use crate::train::optimizer::AdamWSettings;
use crate::types::{Episode, Key, Purpose, Sample};

/// Who makes the attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collect {
    /// A script that knows the answers and guesses badly on purpose.
    #[default]
    Script,
    /// The policy as it enters the stage.
    Policy,
}

/// Settings of the stage. The defaults are the quick start's (`docs/training-step.md` says where they come from).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RftSettings {
    /// Who makes the attempts that are learned from, if they pass: `script` or `policy`.
    pub collect: Collect,
    /// Scripted episodes that are run. 0 skips a stage that collects from the script.
    pub candidates: usize,
    /// Tasks that the policy attempts, drawn from the training tasks; 0 for all of them.
    pub tasks: usize,
    /// Its attempts at each.
    pub attempts_per_task: usize,
    /// Attempts that pass which are kept of each task, the first ones; 0 for all.
    pub keep_per_task: usize,
    /// Text after `agent.system_prompt` while the policy attempts, such as a worked example; what is learned from does not have it.
    /// It counts in `agent.max_tokens`.
    pub demonstration: String,
    /// Also learn to imitate turns that were refused as no valid call; they stay in context in any case.
    pub train_on_bad_turns: bool,
    /// Passes over what was kept.
    pub passes: usize,
    /// Optimizer steps, instead of `passes`; 0 lets `passes` decide.
    pub steps: usize,
    /// Sequences of one optimizer step.
    pub batch_sequences: usize,
    pub schedule: ScheduleSettings,
    pub optimizer: AdamWSettings,
}

impl Default for RftSettings {
    fn default() -> Self {
        RftSettings {
            collect: Collect::Script,
            candidates: 5500,
            tasks: 0,
            attempts_per_task: 10,
            keep_per_task: 0,
            demonstration: String::new(),
            train_on_bad_turns: false,
            passes: 3,
            steps: 0,
            batch_sequences: 8,
            schedule: ScheduleSettings {
                peak: 3e-3,
                warmup_share: 0.05,
                decay: Decay::Cosine,
                floor_share: 0.1,
                ..ScheduleSettings::default()
            },
            optimizer: AdamWSettings { weight_decay: 0.1, ..AdamWSettings::default() },
        }
    }
}

impl RftSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        problems.unless(self.batch_sequences > 0, "batch_sequences", self.batch_sequences, "give at least 1");
        problems.unless(self.attempts_per_task > 0, "attempts_per_task", self.attempts_per_task, "give at least 1");
        for (name, episodes) in [("candidates", self.candidates), ("attempts_per_task", self.attempts_per_task)] {
            problems.at_most(name, episodes, MOST_EPISODES);
        }
        problems.at_most("passes", self.passes, MOST_COUNTED);
        problems.at_most("steps", self.steps, MOST_COUNTED);
        problems.within("schedule", self.schedule.check());
        problems.within("optimizer", self.optimizer.check());
        problems.finish()
    }

    /// Attempts that are made with a pool of so many tasks.
    pub fn attempts(&self, tasks: usize) -> usize {
        match self.collect {
            Collect::Script => self.candidates,
            Collect::Policy if self.tasks > 0 => tasks.min(self.tasks) * self.attempts_per_task,
            Collect::Policy => tasks * self.attempts_per_task,
        }
    }

    /// The stage does nothing.
    pub fn skipped(&self) -> bool {
        self.collect == Collect::Script && self.candidates == 0
    }
}

impl<D: Device> Run<'_, D> {
    /// The whole stage, from wherever it was left.
    pub(super) fn fine_tune(&mut self) -> Result<(), RunError> {
        let settings = &self.context.settings.rft;
        if settings.skipped() {
            return Ok(());
        }
        let kept = self.collected()?;
        let per_pass = kept.len().div_ceil(settings.batch_sequences);
        let total = if settings.steps > 0 { settings.steps } else { settings.passes.saturating_mul(per_pass) };
        let started = Instant::now();
        let before = self.learner.state.step;
        let phase = self.context.progress.phase("fine-tune", Some((total - before.min(total)) as u64));
        let mut tokens = 0;
        for step in before..total {
            if step > before && step % self.context.settings.checkpoint.every_rft_steps == 0 {
                self.save()?;
            }
            if let Err(error) = self.pause() {
                self.learner.state.add_seconds("rft_train", started.elapsed().as_secs_f64());
                return Err(error);
            }
            let batch = self.batch(&kept, step, per_pass);
            let rate = learning_rate(step as u64, total as u64, &settings.schedule);
            let learner = &mut *self.learner;
            let metrics = learner.trainer.imitation_step(&batch, rate as f32, &self.context.settings.step)?;
            learner.state.step += 1;
            learner.state.rft_steps += 1;
            tokens += metrics.tokens;
            #[derive(Serialize)]
            struct Line {
                kind: &'static str,
                step: usize,
                loss: f64,
                learning_rate: f64,
                gradient_norm: f64,
                entropy: f64,
                tokens_trained: usize,
                skipped: bool,
            }
            if metrics.skipped {
                let message =
                    format!("fine-tune step {}: the gradient is not a finite number, the weights were left alone", step + 1);
                self.context.progress.warn(&message);
            }
            self.write_metrics(&Line {
                kind: "rft",
                step: step + 1,
                loss: metrics.loss,
                learning_rate: rate,
                gradient_norm: metrics.gradient_norm,
                entropy: metrics.entropy,
                tokens_trained: metrics.tokens_trained,
                skipped: metrics.skipped,
            })?;
            let speed = tokens as f64 / started.elapsed().as_secs_f64();
            phase.advance(1, &format!("loss {:.3}, {speed:.0} tokens/s", metrics.loss));
            if (step + 1) % (total / 8).max(1) == 0 {
                self.context.progress.line(&format!(
                    "fine-tune step {}/{total}  loss {:.3}  gradient norm {:.2}  learning rate {rate:.1e}  {speed:.0} tokens/s",
                    step + 1,
                    metrics.loss,
                    metrics.gradient_norm,
                ));
            }
        }
        phase.finish("");
        self.learner.state.add_seconds("rft_train", started.elapsed().as_secs_f64());
        Ok(())
    }

    /// Sequences of a step: every pass goes through what was kept in an order of its own.
    fn batch(&self, kept: &[Episode], step: usize, per_pass: usize) -> Vec<Sample> {
        let (pass, place) = (step / per_pass, step % per_pass);
        let mut order: Vec<usize> = (0..kept.len()).collect();
        Key::new(Purpose::ShuffleDemonstrations, &[self.context.settings.seed, pass as u64]).shuffle(&mut order);
        let size = self.context.settings.rft.batch_sequences;
        let places = place * size..kept.len().min((place + 1) * size);
        order[places].iter().map(|&index| imitated(&kept[index], self.context.settings.rft.train_on_bad_turns)).collect()
    }
}

/// An episode to imitate: what the agent sampled, but for turns that were refused, which only stay in context.
fn imitated(episode: &Episode, train_on_bad_turns: bool) -> Sample {
    let mut sample = Sample::of(&episode.transcript, 1.0);
    if !train_on_bad_turns {
        episode.transcript.refused.iter().for_each(|turn| sample.trained[turn.clone()].fill(false));
    }
    sample
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Ending, EpisodeCounts, Transcript, Verdict};

    #[test]
    fn a_refused_turn_stays_in_context_and_is_not_learned_from() {
        let mut transcript = Transcript::default();
        transcript.push_environment(&[1, 2]);
        transcript.push_sampled(&[10, 11], &[0.0; 2], 0);
        transcript.refuse_turn();
        transcript.push_environment(&[3]);
        transcript.push_sampled(&[12, 13], &[0.0; 2], 0);
        transcript.push_environment(&[4]);
        let (counts, verdict) = (EpisodeCounts::default(), Verdict::Passed);
        let ending = Ending::Submitted;
        let episode = Episode { task_id: "t".into(), task_index: 0, sample_index: 0, transcript, ending, verdict, counts };
        let (masked, whole) = (imitated(&episode, false), imitated(&episode, true));
        assert_eq!((&masked.ids, &masked.ids[..]), (&whole.ids, &[1, 2, 10, 11, 3, 12, 13][..]));
        assert_eq!(masked.trained, [false, false, false, false, false, true, true]);
        assert_eq!(whole.trained, [false, false, true, true, false, true, true]);
    }
}
