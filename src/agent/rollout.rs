//! Many episodes at once: the engine samples turns on this thread while sandbox workers run tests beside it.
//!
//! ```text
//!            +--> observation at once (view, edit) ---------------------+
//! sampled turn --> run the visible tests / grade, on a worker thread --> next turn, or the episode's end
//! ```
//!
//! Which episode waits for what depends on timing, and on many ranks (`dealing`) also who samples it; what it contains does
//! not: its random numbers are keyed by its place, its log-probabilities depend on its own prefix alone, and episodes are
//! returned in index order.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use super::attempt::{Attempt, Next, Surroundings};
use super::dealing::{Desk, News, OnPanic, Report, Tally, deal_out, gather_in_order};
use crate::collectives::CollectiveError;
use crate::engine::{Engine, EngineError, Finish, SampleKey, SampledTurn, SequenceId};
use crate::grader::{Graded, Grader, VisibleRun};
use crate::parallel::Ranks;
use crate::types::{Ending, Episode, Task, Verdict, Workspace};

/// What a rollout samples: `samples` attempts at each task.
pub struct Work<'a> {
    pub tasks: &'a [&'a Task],
    pub samples: usize,
    /// Number of the first task within its step, where a step samples several times.
    pub first_task: usize,
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
    #[error("a thread that runs tests has ended; this is a fault of the program")]
    WorkerGone,
    /// The caller's `stop` said so, on this rank or another; nothing of the rollout is kept.
    #[error("stopped while episodes were running")]
    Stopped,
    /// A task that no script can demonstrate.
    #[error("{0}")]
    NotDemonstrable(String),
    #[error("rank {rank}: {reason}")]
    Elsewhere { rank: usize, reason: String },
    #[error(transparent)]
    Ranks(#[from] CollectiveError),
}

/// Runs episodes.
pub struct Rollout<'a> {
    pub surroundings: Surroundings<'a>,
    pub grader: &'a Grader,
    /// Those that share the work. All of them run it, each with an engine of its own and the sandbox of its node.
    pub ranks: &'a Ranks,
    /// Sequences open at once on this rank.
    pub concurrent: usize,
    /// Threads of this rank that run tests and grade.
    pub workers: usize,
}

enum Job {
    RunTests(usize, Workspace),
    Grade(usize, Workspace),
}

enum Event {
    Tests(usize, VisibleRun),
    Graded(usize, Graded),
    Dealing(News),
    WorkerGone,
}

/// How long the driver waits for news before it reports again.
pub(super) const BEAT: Duration = Duration::from_millis(20);

impl Rollout<'_> {
    /// Runs every attempt to its end and returns them ordered by task, then sample: on every rank those of all ranks.
    ///
    /// `on_progress` is told how many have ended, of all ranks as far as is known. `stop` is asked between engine passes.
    ///
    /// # Errors
    /// When an engine fails or `stop` says so, on any rank. A sandbox that fails is no error: the episode ends as
    /// [`Ending::Infrastructure`].
    pub fn collect(
        &self,
        engine: &mut dyn Engine,
        work: &Work,
        on_progress: &mut dyn FnMut(Tally),
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<Episode>, RolloutError> {
        let shares = shares(work);
        let sizes: Vec<usize> = shares.iter().map(Vec::len).collect();
        let (jobs, job_queue) = mpsc::channel::<Job>();
        let (events, inbox) = mpsc::channel::<Event>();
        let job_queue = Mutex::new(job_queue);
        let own = std::thread::scope(|scope| {
            for _ in 0..self.workers.max(1) {
                let (events, job_queue) = (events.clone(), &job_queue);
                scope.spawn(move || self.serve(work, job_queue, &events));
            }
            let hear = |news| {
                // Whoever does not listen any more has failed, and says so by itself.
                let _ = events.send(Event::Dealing(news));
            };
            deal_out(self.ranks, &sizes, &hear, |desk| {
                let mut driver = Driver::new(self, work, &shares, jobs, on_progress);
                driver.run(engine, desk, &inbox, stop)?;
                Ok(driver.episodes)
            })
        })?;
        gather_in_order(self.ranks, own)
    }

    /// A worker: takes jobs until there will be no more.
    fn serve(&self, work: &Work, queue: &Mutex<mpsc::Receiver<Job>>, events: &mpsc::Sender<Event>) {
        // It takes its job with it: the driver must not wait for that.
        let _panic = OnPanic(|| drop(events.send(Event::WorkerGone)));
        loop {
            let job = match queue.lock() {
                Ok(queue) => queue.recv(),
                Err(_) => return,
            };
            let task = |index: usize| work.tasks[index / work.samples];
            let event = match job {
                Ok(Job::RunTests(index, files)) => Event::Tests(index, self.grader.run_visible(task(index), &files)),
                Ok(Job::Grade(index, files)) => Event::Graded(index, self.grader.grade(task(index), &files)),
                Err(_) => return,
            };
            if events.send(event).is_err() {
                return;
            }
        }
    }
}

/// The attempts of a rollout, in shares that stay on one rank: those at one task, so that groups are whole and what a grader
/// remembers of a task, and counts, does not depend on who got it. Attempt `i` is sample `i % samples` of task `i / samples`.
fn shares(work: &Work) -> Vec<Vec<usize>> {
    let mut shares: Vec<Vec<usize>> = Vec::new();
    let mut of_task: HashMap<&str, usize> = HashMap::new();
    for (place, task) in work.tasks.iter().enumerate() {
        let share = *of_task.entry(&task.id).or_insert_with(|| {
            shares.push(Vec::new());
            shares.len() - 1
        });
        shares[share].extend(place * work.samples..(place + 1) * work.samples);
    }
    shares
}

/// The state of a rollout between engine passes.
struct Driver<'r, 'a> {
    rollout: &'r Rollout<'a>,
    work: &'r Work<'r>,
    shares: &'r [Vec<usize>],
    jobs: mpsc::Sender<Job>,
    on_progress: &'r mut dyn FnMut(Tally),
    /// Shares dealt to this rank so far.
    dealt: usize,
    /// Attempts dealt and not yet opened.
    unopened: VecDeque<usize>,
    running: HashMap<usize, Running<'r>>,
    by_sequence: HashMap<SequenceId, usize>,
    episodes: Vec<(usize, Episode)>,
    /// Of this rank, and of all others.
    tally: Tally,
    others: Tally,
    /// How the rollout ended.
    over: Option<Result<(), RolloutError>>,
}

struct Running<'a> {
    attempt: Attempt<'a>,
    sequence: SequenceId,
    started: Instant,
}

impl<'r, 'a: 'r> Driver<'r, 'a> {
    fn new(
        rollout: &'r Rollout<'a>,
        work: &'r Work<'r>,
        shares: &'r [Vec<usize>],
        jobs: mpsc::Sender<Job>,
        on_progress: &'r mut dyn FnMut(Tally),
    ) -> Self {
        Driver {
            rollout,
            work,
            shares,
            jobs,
            on_progress,
            dealt: 0,
            unopened: VecDeque::new(),
            running: HashMap::new(),
            by_sequence: HashMap::new(),
            episodes: Vec::new(),
            tally: Tally::default(),
            others: Tally::default(),
            over: None,
        }
    }

    /// Until the attempts of all ranks have ended.
    fn run(
        &mut self,
        engine: &mut dyn Engine,
        desk: &Desk,
        inbox: &mpsc::Receiver<Event>,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), RolloutError> {
        loop {
            desk.report(self.report(stop()));
            while let Ok(event) = inbox.try_recv() {
                self.receive(engine, event);
            }
            if let Some(over) = self.over.take() {
                return over;
            }
            self.open_episodes(engine);
            if engine.busy() {
                for turn in engine.advance()? {
                    self.take_turn(engine, turn);
                }
            } else if let Ok(event) = inbox.recv_timeout(BEAT) {
                self.receive(engine, event);
            }
        }
    }

    fn report(&self, stop: bool) -> Report {
        let free = self.rollout.concurrent.max(1).saturating_sub(self.running.len());
        Report { shares: self.dealt, places: free.saturating_sub(self.unopened.len()), tally: self.tally, stop, failure: None }
    }

    fn open_episodes(&mut self, engine: &mut dyn Engine) {
        while self.running.len() < self.rollout.concurrent.max(1) {
            let Some(index) = self.unopened.pop_front() else { return };
            let Work { seed, stream, step, samples, first_task, .. } = *self.work;
            let (place, sample) = (index / samples, (index % samples) as u64);
            let sequence = engine.open(SampleKey { seed, stream, step, task: (first_task + place) as u64, sample });
            let attempt = Attempt::new(self.work.tasks[place], self.rollout.surroundings);
            let opening = attempt.transcript.ids.clone();
            self.by_sequence.insert(sequence, index);
            self.running.insert(index, Running { attempt, sequence, started: Instant::now() });
            self.request(engine, index, &opening);
        }
    }

    /// Asks the engine for the next turn, or ends the episode if it has no tokens left.
    fn request(&mut self, engine: &mut dyn Engine, index: usize, tokens: &[u32]) {
        let running = &self.running[&index];
        match running.attempt.turn_tokens() {
            0 => self.end(engine, index, Ending::TokenLimit, not_submitted()),
            allowance => engine.request_turn(running.sequence, tokens, allowance),
        }
    }

    fn take_turn(&mut self, engine: &mut dyn Engine, turn: SampledTurn) {
        let index = self.by_sequence[&turn.sequence];
        let Some(running) = self.running.get_mut(&index) else { return };
        running.attempt.transcript.push_sampled(&turn.ids, &turn.log_probs, self.work.version);
        if turn.finish == Finish::Length {
            return self.end(engine, index, Ending::TokenLimit, not_submitted());
        }
        let text = self.rollout.surroundings.tokenizer.decode(&turn.ids[..turn.ids.len() - 1]);
        let next = running.attempt.turn(&text);
        self.proceed(engine, index, next);
    }

    fn receive(&mut self, engine: &mut dyn Engine, event: Event) {
        match event {
            Event::Tests(index, run) => {
                let Some(running) = self.running.get_mut(&index) else { return };
                let next = running.attempt.tests_ran(&run);
                match (next, run.infrastructure) {
                    (Next::End(ending), Some(reason)) => {
                        self.end(engine, index, ending, Verdict::Infrastructure(reason));
                    }
                    (next, _) => self.proceed(engine, index, next),
                }
            }
            Event::Graded(index, graded) => {
                if let Some(running) = self.running.get_mut(&index) {
                    running.attempt.counts.wall_limit_hit |= graded.wall_limit_hit;
                }
                let ending = if graded.verdict.infrastructure() { Ending::Infrastructure } else { Ending::Submitted };
                self.end(engine, index, ending, graded.verdict);
            }
            Event::Dealing(News::Dealt(shares)) => {
                self.dealt += shares.len();
                self.unopened.extend(shares.into_iter().flat_map(|share| &self.shares[share]));
            }
            Event::Dealing(News::Others(others)) => {
                if others != self.others {
                    self.others = others;
                    self.tell_progress();
                }
            }
            Event::Dealing(News::Over(result)) => self.over = Some(result),
            Event::WorkerGone => self.over = Some(Err(RolloutError::WorkerGone)),
        }
    }

    fn tell_progress(&mut self) {
        let mut all = self.tally;
        all.add(self.others);
        (self.on_progress)(all);
    }

    fn proceed(&mut self, engine: &mut dyn Engine, index: usize, next: Next) {
        let limit = self.rollout.surroundings.settings.episode_seconds;
        let Some(running) = self.running.get_mut(&index) else { return };
        let job = match next {
            Next::End(ending) => return self.end(engine, index, ending, not_submitted()),
            Next::Grade => Job::Grade(index, running.attempt.files()),
            _ if running.started.elapsed().as_secs_f64() > limit => {
                running.attempt.counts.wall_limit_hit = true;
                return self.end(engine, index, Ending::Timeout, not_submitted());
            }
            Next::RunTests => Job::RunTests(index, running.attempt.files()),
            Next::Observe(text) => {
                return match running.attempt.observe(&text) {
                    Some(tokens) => self.request(engine, index, &tokens),
                    None => self.end(engine, index, Ending::TokenLimit, not_submitted()),
                };
            }
        };
        if self.jobs.send(job).is_err() {
            let reason = Verdict::Infrastructure("the sandbox workers are gone".into());
            self.end(engine, index, Ending::Infrastructure, reason);
        }
    }

    fn end(&mut self, engine: &mut dyn Engine, index: usize, ending: Ending, verdict: Verdict) {
        let Some(running) = self.running.remove(&index) else { return };
        engine.close(running.sequence);
        self.by_sequence.remove(&running.sequence);
        let (task, sample) = (self.work.first_task + index / self.work.samples, index % self.work.samples);
        let episode = running.attempt.finish(task as u32, sample as u32, ending, verdict);
        self.tally.add(Tally { ended: 1, passed: episode.verdict.passed() as u64 });
        self.episodes.push((index, episode));
        self.tell_progress();
    }
}

fn not_submitted() -> Verdict {
    Verdict::Failed("not submitted".into())
}
