//! What rejection fine-tuning learns from: attempts of a script or of the policy itself, made once for a stage and kept in a file.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::rft::Collect;
use super::state::Attempts;
use super::{Run, RunError, builtin_engine, first_fault, rollout, show, stream, surroundings};
use crate::agent::{self, Demonstrations, Rollout, Surroundings, Work};
use crate::device::Device;
use crate::train::{FileError, write_atomically};
use crate::types::{Episode, Key, Purpose, Task, Verdict};

/// What the attempts came to; also a line of `metrics.jsonl`.
#[derive(Serialize, Deserialize)]
struct Found {
    kind: String,
    collect: Collect,
    /// Attempts made.
    candidates: usize,
    passed: usize,
    kept: usize,
    /// Of those kept: turns that are not learned from because they were refused.
    turns_masked: usize,
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

/// The first line of the file.
#[derive(Serialize, Deserialize)]
struct Heading {
    found: Found,
    /// Training steps of the run before the attempts: of these weights they are.
    steps: usize,
    /// Of the policy, by task.
    attempts: BTreeMap<String, Attempts>,
}

impl<'r, D: Device> Run<'r, D> {
    /// The attempts that are learned from: made now, or read back if an earlier start of this run already did.
    pub(super) fn collected(&mut self) -> Result<Vec<Episode>, RunError> {
        let (ranks, stage) = (self.context.ranks, self.stage()?);
        let path = self.episodes_folder()?.join(format!("{}-kept.jsonl", stage.name));
        let file_error = |error| FileError::new(&path, error);
        let found = ranks.first().then(|| path.try_exists()).transpose().map_err(file_error)?;
        let first_step = self.learner.state.step == 0;
        let stored = if ranks.broadcast(found.as_ref())? {
            // All ranks share the folder: what may be gigabytes need not travel between them.
            std::fs::read_to_string(&path).map_err(file_error)?
        } else if stage.settings.rft.collect == Collect::Policy && !first_step {
            let reason = "is gone, and the policy that made it has been trained since; put it back, or start another run";
            return Err(RunError::Failed(format!("{} {reason}", path.display())));
        } else {
            let stored = self.collect()?;
            if ranks.first() {
                write_atomically(&path, stored.as_bytes())?;
            }
            stored
        };
        let broken = |reason: String| {
            RunError::Failed(format!("{}: {reason}; remove the file and resume to make it again", path.display()))
        };
        let mut lines = stored.lines();
        let heading: Heading =
            serde_json::from_str(lines.next().unwrap_or_default()).map_err(|error| broken(error.to_string()))?;
        let kept: Vec<Episode> =
            lines.map(serde_json::from_str).collect::<Result<_, _>>().map_err(|error| broken(error.to_string()))?;
        let (found, begun) = (heading.found, self.learner.state.steps() - self.learner.state.step);
        if kept.len() != found.kept {
            return Err(broken(format!("{} episodes, expected {}", kept.len(), found.kept)));
        }
        if heading.steps != begun {
            return Err(broken(format!("made after {} training steps, the stage began after {begun}", heading.steps)));
        }
        if first_step {
            self.learner.state.count_attempts(&stage.name, heading.attempts);
            self.note(&found)?;
        }
        if kept.is_empty() {
            let Found { candidates, first_failure, .. } = &found;
            let reason = match found.collect {
                Collect::Script => format!("none of {candidates} demonstrations passed: {first_failure}"),
                Collect::Policy => format!(
                    "none of the policy's {candidates} attempts passed ({first_failure}): there is nothing to imitate; show it how with \
                     rft.demonstration, raise rft.attempts_per_task, or begin with rft.collect = \"script\""
                ),
            };
            return Err(RunError::Failed(format!("{}: {reason}", stage.title())));
        }
        Ok(kept)
    }

    fn note(&mut self, found: &Found) -> Result<(), RunError> {
        let state = &mut self.learner.state;
        state.verdicts_executed += found.verdicts_executed;
        state.verdicts_remembered += found.verdicts_remembered;
        state.wall_limit_hits += found.wall_limit_hits;
        state.episodes_lost += found.lost;
        state.add_seconds(&found.kind, found.seconds);
        self.write_metrics(found)?;
        let Found { passed, kept, candidates, turns_masked, ran_tests, edits_mean, .. } = found;
        let what = match found.collect {
            Collect::Script => "demonstrations",
            Collect::Policy => "attempts of the policy",
        };
        self.context.progress.line(&format!(
            "{what}: {passed} of {candidates} passed, {kept} kept  run tests {ran_tests:.2}  edits {edits_mean:.2}  \
             turns not learned from {turns_masked}"
        ));
        Ok(())
    }

    /// Makes all attempts and returns the file: what was found, then the episodes that are kept, one a line.
    fn collect(&mut self) -> Result<String, RunError> {
        let started = Instant::now();
        self.context.grader.forget();
        let settings = &self.context.settings.rft;
        let (kind, episodes) = match settings.collect {
            Collect::Script => ("demonstrations", self.demonstrate()?),
            Collect::Policy => ("collection", self.attempt()?),
        };
        let lost = episodes.iter().filter(|episode| episode.verdict.infrastructure()).count();
        if lost > 0 {
            let reason = first_fault(&episodes);
            self.context.progress.warn(&format!("{kind}: {lost} episodes were lost to infrastructure faults: {reason}"));
        }
        let failure = episodes.iter().find_map(|episode| match &episode.verdict {
            Verdict::Passed => None,
            Verdict::Failed(reason) | Verdict::Infrastructure(reason) => Some(reason.clone()),
        });
        let attempts = match settings.collect {
            Collect::Script => BTreeMap::new(),
            Collect::Policy => Attempts::count(&episodes),
        };
        let wall_limit_hits = episodes.iter().filter(|episode| episode.counts.wall_limit_hit).count() as u64;
        let candidates = episodes.len();
        let passed: Vec<Episode> = episodes.into_iter().filter(|episode| episode.verdict.passed()).collect();
        let passed_count = passed.len();
        let kept = first_of_each_task(passed, settings.keep_per_task);
        let mean = |value: &dyn Fn(&Episode) -> f64| match kept.len() {
            0 => 0.0,
            count => kept.iter().map(value).sum::<f64>() / count as f64,
        };
        let refused: usize = kept.iter().map(|episode| episode.transcript.refused.len()).sum();
        let counts = self.verdict_counts()?;
        let found = Found {
            kind: kind.into(),
            collect: settings.collect,
            candidates,
            passed: passed_count,
            kept: kept.len(),
            turns_masked: if settings.train_on_bad_turns { 0 } else { refused },
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
        let heading = Heading { found, steps: self.learner.state.steps(), attempts };
        let to_line = |line: serde_json::Result<String>| line.map_err(|error| RunError::Failed(format!("{kind}: {error}")));
        let mut text = to_line(serde_json::to_string(&heading))?;
        for episode in &kept {
            text.push('\n');
            text.push_str(&to_line(serde_json::to_string(episode))?);
        }
        Ok(text)
    }

    /// Every candidate's episode, in order of candidates. Candidates go through the training tasks in a shuffled order.
    fn demonstrate(&self) -> Result<Vec<Episode>, RunError> {
        let context = self.context;
        let (seed, candidates) = (context.settings.seed, context.settings.rft.candidates);
        let tasks = self.shuffled_tasks();
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

    /// The policy's attempts, in order of tasks and samples, as if it had never seen the demonstration.
    fn attempt(&mut self) -> Result<Vec<Episode>, RunError> {
        let context = self.context;
        let settings = &context.settings.rft;
        let mut tasks = self.shuffled_tasks();
        if settings.tasks > 0 {
            tasks.truncate(settings.tasks);
        }
        let with_demonstration = agent::Settings {
            system_prompt: join_prompts(&context.settings.agent.system_prompt, &settings.demonstration),
            ..context.settings.agent.clone()
        };
        let plain = surroundings(context);
        let rollout = Rollout { surroundings: Surroundings { settings: &with_demonstration, ..plain }, ..rollout(context) };
        let work = Work {
            tasks: &tasks,
            samples: settings.attempts_per_task,
            first_task: 0,
            seed: context.settings.seed,
            stream: stream::COLLECTION,
            step: 0,
            version: self.learner.state.version(),
        };
        let phase = context.progress.phase("collect", Some((tasks.len() * settings.attempts_per_task) as u64));
        let mut engine = builtin_engine(context, self.learner.trainer.sampler()?);
        let mut episodes = rollout.collect(&mut engine, &work, &mut show(&*phase, "pass"), context.stop)?;
        if !settings.demonstration.is_empty() {
            for episode in &mut episodes {
                let task = tasks[episode.task_index as usize];
                episode.transcript.replace_opening(&plain.opening(task));
            }
        }
        Ok(episodes)
    }

    fn shuffled_tasks(&self) -> Vec<&'r Task> {
        let mut tasks = self.pool.clone();
        Key::new(Purpose::Demonstration, &[self.context.settings.seed]).shuffle(&mut tasks);
        tasks
    }
}

/// The system prompt with a demonstration after it.
fn join_prompts(prompt: &str, demonstration: &str) -> String {
    let separator = if prompt.is_empty() || demonstration.is_empty() { "" } else { "\n\n" };
    format!("{prompt}{separator}{demonstration}")
}

/// At most `most` episodes of each task, the first ones; all of them if `most` is 0.
fn first_of_each_task(mut episodes: Vec<Episode>, most: usize) -> Vec<Episode> {
    let mut of_task: BTreeMap<String, usize> = BTreeMap::new();
    episodes.retain(|episode| {
        let count = of_task.entry(episode.task_id.clone()).or_default();
        *count += 1;
        most == 0 || *count <= most
    });
    episodes
}
