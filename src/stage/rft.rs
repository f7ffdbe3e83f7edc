//! Rejection fine-tuning: run scripted, imperfect demonstrations, keep those whose answer passes the hidden tests, learn
//! to imitate them, wrong first guesses included.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{Run, RunError, first_fault, show, surroundings};
use crate::agent::Demonstrations;
use crate::algorithm::{Decay, Problems, ScheduleSettings, SettingErrors, learning_rate};
use crate::device::Device;
use crate::train::optimizer::AdamWSettings;
use crate::train::{FileError, write_atomically};
use crate::types::{Episode, Key, Purpose, Sample, Task, Verdict};

/// Settings of the stage. The defaults are the quick start's (`docs/training-step.md` says where they come from).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RftSettings {
    /// Scripted episodes that are run; those that pass are kept. 0 skips the stage.
    pub candidates: usize,
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
            candidates: 5500,
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
        problems.within("schedule", self.schedule.check());
        problems.finish()
    }
}

impl<D: Device> Run<'_, D> {
    /// The whole stage, from wherever it was left.
    pub(super) fn fine_tune(&mut self) -> Result<(), RunError> {
        let settings = &self.context.settings.rft;
        if settings.candidates == 0 {
            return Ok(());
        }
        let kept = self.demonstrations()?;
        let per_pass = kept.len().div_ceil(settings.batch_sequences);
        let total = if settings.steps > 0 { settings.steps } else { settings.passes * per_pass };
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
                stage: &'static str,
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
                stage: "rft",
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
        order[place * size..kept.len().min((place + 1) * size)]
            .iter()
            .map(|&index| Sample::of(&kept[index].transcript, 1.0))
            .collect()
    }

    /// The demonstrations that passed: run now, or read back if an earlier start of this run already did.
    fn demonstrations(&mut self) -> Result<Vec<Episode>, RunError> {
        let ranks = self.context.ranks;
        let path = self.episodes_folder()?.join("demonstrations.jsonl");
        let file_error = |error| FileError::new(&path, error);
        let found = ranks.first().then(|| path.try_exists()).transpose().map_err(file_error)?;
        let stored = if ranks.broadcast(found.as_ref())? {
            // All ranks share the folder: what may be gigabytes need not travel between them.
            std::fs::read_to_string(&path).map_err(file_error)?
        } else {
            let stored = self.run_demonstrations()?;
            if ranks.first() {
                write_atomically(&path, stored.as_bytes())?;
            }
            stored
        };
        let broken = |reason: String| {
            RunError::Failed(format!("{}: {reason}; remove the file and resume to make it again", path.display()))
        };
        let mut lines = stored.lines();
        let found: Found = serde_json::from_str(lines.next().unwrap_or_default()).map_err(|error| broken(error.to_string()))?;
        let kept: Vec<Episode> =
            lines.map(serde_json::from_str).collect::<Result<_, _>>().map_err(|error| broken(error.to_string()))?;
        if kept.len() != found.kept {
            return Err(broken(format!("{} demonstrations, expected {}", kept.len(), found.kept)));
        }
        if self.learner.state.step == 0 {
            self.note_demonstrations(&found)?;
        }
        if kept.is_empty() {
            let reason = &found.first_failure;
            return Err(RunError::Failed(format!("none of {} demonstrations passed: {reason}", found.candidates)));
        }
        Ok(kept)
    }

    fn note_demonstrations(&mut self, found: &Found) -> Result<(), RunError> {
        self.learner.state.verdicts_executed += found.verdicts_executed;
        self.learner.state.verdicts_remembered += found.verdicts_remembered;
        self.learner.state.wall_limit_hits += found.wall_limit_hits;
        self.learner.state.episodes_lost += found.lost;
        self.learner.state.add_seconds("demonstrations", found.seconds);
        self.write_metrics(found)?;
        let Found { kept, candidates, ran_tests, edits_mean, .. } = found;
        self.context
            .progress
            .line(&format!("demonstrations: {kept} of {candidates} passed  run tests {ran_tests:.2}  edits {edits_mean:.2}"));
        Ok(())
    }

    /// Runs all candidates and returns the file: what was found, then the episodes that passed, one a line.
    fn run_demonstrations(&mut self) -> Result<String, RunError> {
        let started = Instant::now();
        self.context.grader.forget();
        let episodes = self.run_candidates()?;
        let lost = episodes.iter().filter(|episode| episode.verdict.infrastructure()).count();
        if lost > 0 {
            let reason = first_fault(&episodes);
            self.context.progress.warn(&format!("{lost} demonstrations were lost to infrastructure faults: {reason}"));
        }
        let failure = episodes.iter().find_map(|episode| match &episode.verdict {
            Verdict::Passed => None,
            Verdict::Failed(reason) | Verdict::Infrastructure(reason) => Some(reason.clone()),
        });
        let wall_limit_hits = episodes.iter().filter(|episode| episode.counts.wall_limit_hit).count() as u64;
        let candidates = episodes.len();
        let kept: Vec<Episode> = episodes.into_iter().filter(|episode| episode.verdict.passed()).collect();
        let mean = |value: &dyn Fn(&Episode) -> f64| kept.iter().map(value).sum::<f64>() / kept.len().max(1) as f64;
        let counts = self.verdict_counts()?;
        let found = Found {
            stage: "demonstrations".into(),
            candidates,
            kept: kept.len(),
            ran_tests: mean(&|episode| (episode.counts.runs > 0) as u8 as f64),
            edits_mean: mean(&|episode| episode.counts.edits as f64),
            tokens_mean: mean(&|episode| episode.transcript.ids.len() as f64),
            verdicts_executed: counts.executed,
            verdicts_remembered: counts.remembered,
            wall_limit_hits,
            lost: lost as u64,
            first_failure: failure.unwrap_or_default(),
            seconds: started.elapsed().as_secs_f64(),
        };
        let to_line =
            |line: serde_json::Result<String>| line.map_err(|error| RunError::Failed(format!("demonstrations: {error}")));
        let mut text = to_line(serde_json::to_string(&found))?;
        for episode in &kept {
            text.push('\n');
            text.push_str(&to_line(serde_json::to_string(episode))?);
        }
        Ok(text)
    }

    /// Every candidate's episode, in order of candidates. Candidates go through the training tasks in a shuffled order.
    fn run_candidates(&self) -> Result<Vec<Episode>, RunError> {
        let context = self.context;
        let (seed, candidates) = (context.settings.seed, context.settings.rft.candidates);
        let mut tasks: Vec<&Task> = context.train_tasks.iter().collect();
        Key::new(Purpose::Demonstration, &[seed]).shuffle(&mut tasks);
        let demonstrations = Demonstrations {
            surroundings: surroundings(context),
            grader: context.grader,
            ranks: context.ranks,
            workers: context.workers,
            tasks: &tasks,
            candidates,
            seed,
        };
        let phase = context.progress.phase("demonstrate", Some(candidates as u64));
        Ok(demonstrations.collect(&mut show(&*phase, "kept"), context.stop)?)
    }
}

/// What running the demonstrations found; also a line of `metrics.jsonl`.
#[derive(Serialize, Deserialize)]
struct Found {
    stage: String,
    candidates: usize,
    kept: usize,
    ran_tests: f64,
    edits_mean: f64,
    tokens_mean: f64,
    verdicts_executed: u64,
    verdicts_remembered: u64,
    wall_limit_hits: u64,
    lost: u64,
    first_failure: String,
    seconds: f64,
}
