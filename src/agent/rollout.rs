//! Many episodes at once: the engine samples turns on this thread while sandbox workers run tests beside it.
//!
//! ```text
//!            +--> observation at once (view, edit) ---------------------+
//! sampled turn --> run the visible tests / grade, on a worker thread --> next turn, or the episode's end
//! ```
//!
//! Which episode waits for what depends on timing; what each episode contains does not: its random numbers are keyed by
//! its place, its log-probabilities depend on its own prefix alone, and episodes are returned in index order.

use std::collections::HashMap;
use std::sync::{Mutex, mpsc};
use std::time::Instant;

use super::attempt::{Attempt, Next, Surroundings};
use crate::engine::{Engine, EngineError, Finish, SampleKey, SampledTurn, SequenceId};
use crate::grader::{Graded, Grader, VisibleRun};
use crate::types::{Ending, Episode, Task, Verdict, Workspace};

/// What a rollout samples: `samples` attempts at each task.
pub struct Work<'a> {
    pub tasks: &'a [&'a Task],
    pub samples: usize,
    pub seed: u64,
    /// Separates the random streams of training and of each evaluation.
    pub stream: u64,
    pub step: u64,
    /// Number of the weights that sample: optimizer steps taken.
    pub version: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("the threads that run tests have ended; this is a fault of the program")]
    WorkersGone,
    /// The caller's `stop` said so; nothing of the rollout is kept.
    #[error("stopped while episodes were running")]
    Stopped,
}

/// Runs episodes.
pub struct Rollout<'a> {
    pub surroundings: Surroundings<'a>,
    pub grader: &'a Grader,
    /// Sequences open at once.
    pub concurrent: usize,
    /// Threads that run tests and grade.
    pub workers: usize,
}

enum Job {
    RunTests(usize, Workspace),
    Grade(usize, Workspace),
}

enum Outcome {
    Tests(usize, VisibleRun),
    Graded(usize, Graded),
}

impl Rollout<'_> {
    /// Runs every attempt to its end and returns them ordered by task, then sample.
    ///
    /// `on_episode` is told of each attempt as it ends, in no particular order. `stop` is asked between engine passes.
    ///
    /// # Errors
    /// When the engine fails or `stop` says so. A sandbox that fails is no error: the episode ends as
    /// [`Ending::Infrastructure`].
    pub fn collect(
        &self,
        engine: &mut dyn Engine,
        work: &Work,
        on_episode: &mut dyn FnMut(&Episode),
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<Episode>, RolloutError> {
        let (jobs, job_queue) = mpsc::channel::<Job>();
        let (outcomes, outcome_queue) = mpsc::channel::<Outcome>();
        let job_queue = Mutex::new(job_queue);
        std::thread::scope(|scope| {
            for _ in 0..self.workers.max(1) {
                let (outcomes, job_queue) = (outcomes.clone(), &job_queue);
                scope.spawn(move || self.serve(work, job_queue, &outcomes));
            }
            // Only workers send from here on: if they are all gone, waiting for them ends.
            drop(outcomes);
            let mut driver = Driver::new(self, work, jobs);
            while !driver.finished() {
                if stop() {
                    return Err(RolloutError::Stopped);
                }
                driver.open_episodes(engine, on_episode);
                while let Ok(outcome) = outcome_queue.try_recv() {
                    driver.receive(engine, outcome, on_episode);
                }
                if engine.busy() {
                    for turn in engine.advance()? {
                        driver.take_turn(engine, turn, on_episode);
                    }
                } else if driver.waiting > 0 {
                    let outcome = outcome_queue.recv().map_err(|_| RolloutError::WorkersGone)?;
                    driver.receive(engine, outcome, on_episode);
                }
            }
            Ok(driver.episodes.into_iter().flatten().collect())
        })
    }

    /// A worker: takes jobs until there will be no more.
    fn serve(&self, work: &Work, queue: &Mutex<mpsc::Receiver<Job>>, outcomes: &mpsc::Sender<Outcome>) {
        loop {
            let job = match queue.lock() {
                Ok(queue) => queue.recv(),
                Err(_) => return,
            };
            let task = |index: usize| work.tasks[index / work.samples];
            let outcome = match job {
                Ok(Job::RunTests(index, files)) => Outcome::Tests(index, self.grader.run_visible(task(index), &files)),
                Ok(Job::Grade(index, files)) => Outcome::Graded(index, self.grader.grade(task(index), &files)),
                Err(_) => return,
            };
            if outcomes.send(outcome).is_err() {
                return;
            }
        }
    }
}

/// The state of a rollout between engine passes.
struct Driver<'r, 'a> {
    rollout: &'r Rollout<'a>,
    work: &'r Work<'r>,
    jobs: mpsc::Sender<Job>,
    /// Index of the next attempt to open; attempt `i` is sample `i % samples` of task `i / samples`.
    next: usize,
    running: HashMap<usize, Running<'r>>,
    by_sequence: HashMap<SequenceId, usize>,
    episodes: Vec<Option<Episode>>,
    done: usize,
    /// Jobs given to workers and not yet answered.
    waiting: usize,
}

struct Running<'a> {
    attempt: Attempt<'a>,
    sequence: SequenceId,
    started: Instant,
}

impl<'r, 'a: 'r> Driver<'r, 'a> {
    fn new(rollout: &'r Rollout<'a>, work: &'r Work<'r>, jobs: mpsc::Sender<Job>) -> Self {
        let total = work.tasks.len() * work.samples;
        Driver {
            rollout,
            work,
            jobs,
            next: 0,
            running: HashMap::new(),
            by_sequence: HashMap::new(),
            episodes: (0..total).map(|_| None).collect(),
            done: 0,
            waiting: 0,
        }
    }

    fn finished(&self) -> bool {
        self.done == self.episodes.len()
    }

    fn open_episodes(&mut self, engine: &mut dyn Engine, on_episode: &mut dyn FnMut(&Episode)) {
        while self.next < self.episodes.len() && self.running.len() < self.rollout.concurrent.max(1) {
            let index = self.next;
            self.next += 1;
            let Work { seed, stream, step, samples, .. } = *self.work;
            let (task, sample) = ((index / samples) as u64, (index % samples) as u64);
            let sequence = engine.open(SampleKey { seed, stream, step, task, sample });
            let attempt = Attempt::new(self.work.tasks[task as usize], self.rollout.surroundings);
            let opening = attempt.transcript.ids.clone();
            self.by_sequence.insert(sequence, index);
            self.running.insert(index, Running { attempt, sequence, started: Instant::now() });
            self.request(engine, index, &opening, on_episode);
        }
    }

    /// Asks the engine for the next turn, or ends the episode if it has no tokens left.
    fn request(&mut self, engine: &mut dyn Engine, index: usize, tokens: &[u32], on_episode: &mut dyn FnMut(&Episode)) {
        let running = &self.running[&index];
        match running.attempt.turn_tokens() {
            0 => self.end(engine, index, Ending::TokenLimit, not_submitted(), on_episode),
            allowance => engine.request_turn(running.sequence, tokens, allowance),
        }
    }

    fn take_turn(&mut self, engine: &mut dyn Engine, turn: SampledTurn, on_episode: &mut dyn FnMut(&Episode)) {
        let index = self.by_sequence[&turn.sequence];
        let Some(running) = self.running.get_mut(&index) else { return };
        running.attempt.transcript.push_sampled(&turn.ids, &turn.log_probs, self.work.version);
        if turn.finish == Finish::Length {
            return self.end(engine, index, Ending::TokenLimit, not_submitted(), on_episode);
        }
        let text = self.rollout.surroundings.tokenizer.decode(&turn.ids[..turn.ids.len() - 1]);
        let next = running.attempt.turn(&text);
        self.proceed(engine, index, next, on_episode);
    }

    fn receive(&mut self, engine: &mut dyn Engine, outcome: Outcome, on_episode: &mut dyn FnMut(&Episode)) {
        self.waiting -= 1;
        match outcome {
            Outcome::Tests(index, run) => {
                let Some(running) = self.running.get_mut(&index) else { return };
                let next = running.attempt.tests_ran(&run);
                match (next, run.infrastructure) {
                    (Next::End(ending), Some(reason)) => {
                        self.end(engine, index, ending, Verdict::Infrastructure(reason), on_episode);
                    }
                    (next, _) => self.proceed(engine, index, next, on_episode),
                }
            }
            Outcome::Graded(index, graded) => {
                if let Some(running) = self.running.get_mut(&index) {
                    running.attempt.counts.wall_limit_hit |= graded.wall_limit_hit;
                }
                let ending = if graded.verdict.infrastructure() { Ending::Infrastructure } else { Ending::Submitted };
                self.end(engine, index, ending, graded.verdict, on_episode);
            }
        }
    }

    fn proceed(&mut self, engine: &mut dyn Engine, index: usize, next: Next, on_episode: &mut dyn FnMut(&Episode)) {
        let limit = self.rollout.surroundings.settings.episode_seconds;
        let Some(running) = self.running.get_mut(&index) else { return };
        let job = match next {
            Next::End(ending) => return self.end(engine, index, ending, not_submitted(), on_episode),
            Next::Grade => Job::Grade(index, running.attempt.files()),
            _ if running.started.elapsed().as_secs_f64() > limit => {
                running.attempt.counts.wall_limit_hit = true;
                return self.end(engine, index, Ending::Timeout, not_submitted(), on_episode);
            }
            Next::RunTests => Job::RunTests(index, running.attempt.files()),
            Next::Observe(text) => {
                return match running.attempt.observe(&text) {
                    Some(tokens) => self.request(engine, index, &tokens, on_episode),
                    None => self.end(engine, index, Ending::TokenLimit, not_submitted(), on_episode),
                };
            }
        };
        self.waiting += 1;
        if self.jobs.send(job).is_err() {
            self.waiting -= 1;
            let reason = Verdict::Infrastructure("the sandbox workers are gone".into());
            self.end(engine, index, Ending::Infrastructure, reason, on_episode);
        }
    }

    fn end(
        &mut self,
        engine: &mut dyn Engine,
        index: usize,
        ending: Ending,
        verdict: Verdict,
        on_episode: &mut dyn FnMut(&Episode),
    ) {
        let Some(running) = self.running.remove(&index) else { return };
        engine.close(running.sequence);
        self.by_sequence.remove(&running.sequence);
        let (task, sample) = (index / self.work.samples, index % self.work.samples);
        let episode = running.attempt.finish(task as u32, sample as u32, ending, verdict);
        on_episode(&episode);
        self.episodes[index] = Some(episode);
        self.done += 1;
    }
}

fn not_submitted() -> Verdict {
    Verdict::Failed("not submitted".into())
}
