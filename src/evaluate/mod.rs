//! Held-out evaluation: how often a policy solves tasks it was never trained on, how sure we are of that, and how it
//! behaves while it tries.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::agent::{MOST_EPISODES, Rollout, RolloutError, Tally, Work};
use crate::algorithm::{Problems, SettingErrors, mean_interval, mean_pass_at_k};
use crate::engine::Engine;
use crate::types::{Ending, Episode, Key, Purpose, Task};

/// How much is evaluated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Held-out tasks drawn for the run (all of them when there are fewer).
    pub tasks: usize,
    /// Attempts at each task, at temperature 1 unless the engine is set otherwise.
    pub samples: usize,
    /// Besides pass@1 and pass@8: the numbers of attempts k of which pass@k is reported.
    pub k: Vec<usize>,
    /// Tasks whose change was never seen in their skeleton, drawn besides and reported apart.
    pub structure_tasks: usize,
    /// Steps of reinforcement learning between evaluations; 0 for none between.
    pub every: usize,
    /// Attempts at each task in those.
    pub samples_between: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { tasks: 200, samples: 8, k: Vec::new(), structure_tasks: 24, every: 28, samples_between: 2 }
    }
}

impl Settings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        for (name, value) in [("tasks", self.tasks), ("samples", self.samples), ("samples_between", self.samples_between)] {
            problems.unless(value > 0, name, value, "give at least 1");
        }
        for (name, samples) in [("samples", self.samples), ("samples_between", self.samples_between)] {
            let remedy = format!("give less, or fewer tasks: an evaluation may have {MOST_EPISODES} attempts at most");
            problems.unless(self.tasks.saturating_mul(samples) <= MOST_EPISODES, name, samples, &remedy);
        }
        let defined = self.k.iter().all(|&k| (1..=self.samples).contains(&k));
        let remedy = format!("give k from 1 to evaluate.samples = {}: pass@k is defined for no other", self.samples);
        problems.unless(defined, "k", format!("{:?}", self.k), &remedy);
        problems.finish()
    }
}

/// The held-out tasks of a run, drawn once from its seed.
pub struct HeldOut<'a> {
    /// The tasks of the main figure.
    pub main: Vec<&'a Task>,
    /// Tasks with a change never seen in their skeleton.
    pub structure: Vec<&'a Task>,
}

impl<'a> HeldOut<'a> {
    /// Draws the tasks of a run with this seed from a pool.
    pub fn draw(pool: &'a [Task], settings: &Settings, seed: u64) -> HeldOut<'a> {
        let is_structure = |task: &&Task| task.origin.as_ref().is_some_and(|origin| origin.split == "structure");
        let (mut structure, mut main): (Vec<&Task>, Vec<&Task>) = pool.iter().partition(is_structure);
        if main.is_empty() {
            // A pool of nothing else is what there is to report.
            std::mem::swap(&mut main, &mut structure);
        }
        Key::new(Purpose::Evaluation, &[seed, 0]).shuffle(&mut main);
        Key::new(Purpose::Evaluation, &[seed, 1]).shuffle(&mut structure);
        main.truncate(settings.tasks);
        structure.truncate(settings.structure_tasks);
        HeldOut { main, structure }
    }
}

/// What an evaluation found. Shares are over episodes that were not lost to infrastructure faults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean over tasks of the share of attempts that passed.
    pub pass_at_1: f64,
    /// Unbiased estimate that at least one of 8 attempts passes; absent with fewer than 8 samples.
    pub pass_at_8: Option<f64>,
    /// The same for other numbers of attempts, as far as was asked for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pass_at_k: BTreeMap<usize, f64>,
    /// Of `pass_at_1`, tasks being the unit; absent with a single task.
    #[serde(default)]
    pub standard_error: Option<f64>,
    /// 95 % confidence interval of `pass_at_1` over draws of tasks.
    pub ci95: [f64; 2],
    pub tasks: usize,
    pub samples: usize,
    /// Share of episodes that ran the visible tests.
    pub ran_tests: f64,
    /// Share of episodes that edited again after a failing run.
    pub edited_after_failure: f64,
    pub turns_mean: f64,
    #[serde(default)]
    pub turns_max: usize,
    pub episode_tokens_mean: f64,
    #[serde(default)]
    pub episode_tokens_max: usize,
    /// Episodes by ending.
    pub endings: BTreeMap<String, usize>,
    /// Episodes lost to infrastructure faults.
    pub dropped: usize,
    /// The same on tasks whose change was never seen in their skeleton.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub structure: Option<SplitScore>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SplitScore {
    pub pass_at_1: f64,
    pub ci95: [f64; 2],
    pub tasks: usize,
}

/// Where the random numbers of an evaluation come from.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub seed: u64,
    pub stream: u64,
    pub version: u32,
}

/// What an evaluation draws, and which pass@k it tells.
#[derive(Clone, Copy, Debug)]
pub struct Sampling<'a> {
    /// Attempts at each task.
    pub samples: usize,
    pub k: &'a [usize],
    pub stream: Stream,
}

/// Makes attempts at every held-out task and sums them up: on all ranks of `rollout`, alike.
///
/// # Errors
/// As [`Rollout::collect`]. If every episode was lost to infrastructure faults, `tasks` is 0 and the scores mean nothing.
pub fn evaluate(
    rollout: &Rollout,
    engine: &mut dyn Engine,
    held_out: &HeldOut,
    sampling: Sampling,
    on_progress: &mut dyn FnMut(Tally),
    stop: &dyn Fn() -> bool,
) -> Result<(Evaluation, Vec<Episode>), RolloutError> {
    let tasks: Vec<&Task> = held_out.main.iter().chain(&held_out.structure).copied().collect();
    let Sampling { samples, k, stream: Stream { seed, stream, version } } = sampling;
    let work = Work { tasks: &tasks, samples, first_task: 0, seed, stream, step: 0, version };
    let episodes = rollout.collect(engine, &work, on_progress, stop)?;
    let (main, structure) = episodes.split_at(held_out.main.len() * samples);
    let mut evaluation = summarise(main, samples, k);
    if !structure.is_empty() {
        let Evaluation { pass_at_1, ci95, tasks, .. } = summarise(structure, samples, &[]);
        evaluation.structure = Some(SplitScore { pass_at_1, ci95, tasks });
    }
    Ok((evaluation, episodes))
}

/// `episodes` hold `samples` attempts at each task, task by task. A task all of whose attempts were lost counts in no mean, and one with
/// less than k that were not lost in no pass@k.
fn summarise(episodes: &[Episode], samples: usize, k: &[usize]) -> Evaluation {
    // Attempts that were not lost, and those of them that passed.
    let counts: Vec<(u64, u64)> = episodes
        .chunks(samples.max(1))
        .map(|attempts| {
            let valid = attempts.iter().filter(|episode| !episode.verdict.infrastructure()).count();
            (valid as u64, attempts.iter().filter(|episode| episode.verdict.passed()).count() as u64)
        })
        .collect();
    let rates: Vec<f64> =
        counts.iter().filter(|(valid, _)| *valid > 0).map(|(valid, passed)| *passed as f64 / *valid as f64).collect();
    let pass_at = |k: usize| {
        let enough: Vec<(u64, u64)> = counts.iter().filter(|(valid, _)| *valid >= k as u64).copied().collect();
        mean_pass_at_k(&enough, k as u64)
    };
    let valid: Vec<&Episode> = episodes.iter().filter(|episode| !episode.verdict.infrastructure()).collect();
    let mean = |value: &dyn Fn(&Episode) -> f64| {
        if valid.is_empty() { 0.0 } else { valid.iter().map(|episode| value(episode)).sum::<f64>() / valid.len() as f64 }
    };
    let share = |holds: &dyn Fn(&Episode) -> bool| mean(&|episode| if holds(episode) { 1.0 } else { 0.0 });
    let average = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let most = |value: &dyn Fn(&Episode) -> usize| valid.iter().map(|episode| value(episode)).max().unwrap_or(0);
    // Without tasks nothing is known of the rate but that it is one.
    let interval = mean_interval(&rates).map(|interval| interval.clamped(0.0, 1.0));
    Evaluation {
        pass_at_1: average(&rates),
        pass_at_8: pass_at(8),
        pass_at_k: k.iter().filter_map(|&k| Some((k, pass_at(k)?))).collect(),
        standard_error: interval.map(|interval| interval.standard_error).filter(|error| error.is_finite()),
        ci95: interval.map_or([0.0, 1.0], |interval| [interval.low, interval.high]),
        tasks: rates.len(),
        samples,
        ran_tests: share(&|episode| episode.counts.runs > 0),
        edited_after_failure: share(&|episode| episode.counts.edited_after_failure),
        turns_mean: mean(&|episode| episode.counts.turns as f64),
        turns_max: most(&|episode| episode.counts.turns as usize),
        episode_tokens_mean: mean(&|episode| episode.transcript.ids.len() as f64),
        episode_tokens_max: most(&|episode| episode.transcript.ids.len()),
        endings: count_endings(episodes),
        dropped: episodes.len() - valid.len(),
        structure: None,
    }
}

/// Episodes by ending, every ending named.
pub fn count_endings(episodes: &[Episode]) -> BTreeMap<String, usize> {
    let count = |ending: Ending| episodes.iter().filter(|episode| episode.ending == ending).count();
    Ending::ALL.iter().map(|&ending| (ending.name().to_owned(), count(ending))).collect()
}
