//! The rollout of a step: tasks in a fixed order, batches of attempts until there are enough groups worth training on.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::groups::Group;
use crate::agent::Work;
use crate::algorithm::{DynamicSampling, Next};
use crate::device::Device;
use crate::engine::{Engine, EngineError, SampleKey, SampledTurn, SequenceId};
use crate::grader::Counters;
use crate::stage::{Run, RunError, builtin_engine, rollout, show, stream};
use crate::types::{Episode, Key, Purpose, Task};

/// All attempts of a step, those included that are not trained on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Collected {
    /// Group after group, in the order in which tasks were drawn; faults included.
    pub episodes: Vec<Episode>,
    /// Groups to train on, by their place.
    pub chosen: Vec<usize>,
    /// Groups worth training on that dynamic sampling found beyond those wanted.
    pub surplus: usize,
    /// Batches of attempts, one after another.
    pub batches: usize,
    pub verdicts_executed: u64,
    pub verdicts_remembered: u64,
    /// Wall-clock seconds of it all; of these, of the engine, mean over ranks.
    pub seconds: f64,
    pub engine_seconds: f64,
    /// Seconds that tests ran, over all sandboxes of all ranks.
    pub sandbox_seconds: f64,
}

impl<D: Device> Run<'_, D> {
    /// Rolls out step `step` with the weights of this moment. A request to stop ends it, for it may take longer than whoever asks will
    /// wait: nothing of it is kept, and what is sampled again on resume is the same.
    pub(super) fn roll_out(&mut self, step: usize) -> Result<Collected, RunError> {
        let context = self.context;
        let settings = &context.settings.rl;
        let started = Instant::now();
        context.grader.forget();
        let mut collected = Collected::default();
        let mut sampling =
            settings.dynamic_sampling.as_ref().map(|dynamic| DynamicSampling::new(settings.tasks_per_step, dynamic));
        let (before, per_batch) = (self.learner.state.rl.tasks_drawn, settings.tasks_per_batch());
        loop {
            let first_task = collected.batches * per_batch;
            let tasks = draw_tasks(&self.pool, context.settings.seed, before + first_task, per_batch);
            let (episodes, engine_seconds) = self.sample(&tasks, step, first_task)?;
            collected.episodes.extend(episodes);
            collected.engine_seconds += engine_seconds;
            collected.batches += 1;
            let Some(sampling) = &mut sampling else {
                collected.chosen = (0..per_batch).collect();
                break;
            };
            let places = first_task..first_task + per_batch;
            let attempts = |place: usize| &collected.episodes[place * settings.group_size..(place + 1) * settings.group_size];
            let worth = |place: usize| Group::judge(attempts(place), settings).worth_training();
            match sampling.take(places.map(|place| (place, worth(place)))) {
                Ok(Next::Train { groups, surplus }) => {
                    (collected.chosen, collected.surplus) = (groups, surplus);
                    break;
                }
                Ok(Next::RollOut { missing }) => context
                    .progress
                    .detail(&format!("step {}: {missing} groups are missing, rolling out {per_batch} more", step + 1)),
                Err(exhausted) => return Err(RunError::Failed(format!("step {}: rl.dynamic_sampling: {exhausted}", step + 1))),
            }
        }
        self.learner.state.rl.tasks_drawn += collected.batches * per_batch;
        let Counters { executed, remembered } = self.verdict_counts()?;
        let mut seconds = [collected.engine_seconds, context.grader.test_seconds()];
        context.ranks.sum(&mut seconds)?;
        (collected.verdicts_executed, collected.verdicts_remembered) = (executed, remembered);
        collected.engine_seconds = seconds[0] / context.ranks.ranks() as f64;
        collected.sandbox_seconds = seconds[1];
        collected.seconds = started.elapsed().as_secs_f64();
        Ok(collected)
    }

    /// Attempts at some tasks of a step, of which the first is number `first_task`, and this rank's seconds in the engine.
    fn sample(&mut self, tasks: &[&Task], step: usize, first_task: usize) -> Result<(Vec<Episode>, f64), RunError> {
        let context = self.context;
        let samples = context.settings.rl.group_size;
        let phase = context.progress.phase(&format!("rollout {}", step + 1), Some((tasks.len() * samples) as u64));
        let work = Work {
            tasks,
            samples,
            first_task,
            seed: context.settings.seed,
            stream: stream::TRAINING,
            step: step as u64,
            version: self.learner.state.version(),
        };
        let mut engine = Timed { engine: builtin_engine(context, self.learner.trainer.sampler()?), seconds: 0.0 };
        let episodes = rollout(context).collect(&mut engine, &work, &mut show(&*phase, "pass"), context.stop)?;
        Ok((episodes, engine.seconds))
    }
}

/// Tasks number `from` and on of the run's order: the pool shuffled, a new order each time it has been gone through.
fn draw_tasks<'a>(pool: &[&'a Task], seed: u64, from: usize, count: usize) -> Vec<&'a Task> {
    let mut drawn = Vec::with_capacity(count);
    let mut shuffled: Option<(usize, Vec<usize>)> = None;
    for place in from..from + count {
        let (epoch, at) = (place / pool.len(), place % pool.len());
        if shuffled.as_ref().is_none_or(|(of, _)| *of != epoch) {
            let mut order: Vec<usize> = (0..pool.len()).collect();
            Key::new(Purpose::DrawTasks, &[seed, epoch as u64]).shuffle(&mut order);
            shuffled = Some((epoch, order));
        }
        if let Some((_, order)) = &shuffled {
            drawn.push(pool[order[at]]);
        }
    }
    drawn
}

/// An engine whose work is timed.
struct Timed<E> {
    engine: E,
    seconds: f64,
}

impl<E: Engine> Engine for Timed<E> {
    fn open(&mut self, key: SampleKey) -> SequenceId {
        self.engine.open(key)
    }
    fn request_turn(&mut self, sequence: SequenceId, tokens: &[u32], turn_tokens: usize) {
        self.engine.request_turn(sequence, tokens, turn_tokens);
    }
    fn close(&mut self, sequence: SequenceId) {
        self.engine.close(sequence);
    }
    fn busy(&self) -> bool {
        self.engine.busy()
    }
    fn advance(&mut self) -> Result<Vec<SampledTurn>, EngineError> {
        let started = Instant::now();
        let turns = self.engine.advance();
        self.seconds += started.elapsed().as_secs_f64();
        turns
    }
}
