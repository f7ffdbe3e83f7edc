//! Many demonstrations at once, on all ranks: like a rollout, with workers that play scripts in place of an engine.

use std::collections::VecDeque;
use std::sync::{Mutex, mpsc};

use super::RolloutError;
use super::attempt::Surroundings;
use super::dealing::{Desk, News, OnPanic, Report, Tally, deal_out, gather_in_order};
use super::rollout::BEAT;
use super::scripted::demonstrate;
use crate::grader::Grader;
use crate::parallel::Ranks;
use crate::types::{Episode, Task};

/// Scripted episodes that are to be run: candidate `i` is an attempt at task `i % tasks`.
pub struct Demonstrations<'a> {
    pub surroundings: Surroundings<'a>,
    pub grader: &'a Grader,
    /// Those that share the work.
    pub ranks: &'a Ranks,
    /// Threads of this rank that play.
    pub workers: usize,
    pub tasks: &'a [&'a Task],
    pub candidates: usize,
    pub seed: u64,
}

enum Event {
    Played(usize, Result<Episode, String>),
    Dealing(News),
    WorkerGone,
}

/// Candidates that lie ready for each worker, so that it need not wait for a round of dealing.
const READY_PER_WORKER: usize = 4;

impl Demonstrations<'_> {
    /// Plays them all and returns them in order: on every rank those of all ranks.
    ///
    /// # Errors
    /// When a task cannot be demonstrated or `stop` says so, on any rank.
    pub fn collect(&self, on_progress: &mut dyn FnMut(Tally), stop: &dyn Fn() -> bool) -> Result<Vec<Episode>, RolloutError> {
        // All candidates of a task are one share: what the grader remembers of it is then counted alike on any number of ranks.
        let tasks = self.tasks.len().min(self.candidates);
        let shares: Vec<Vec<usize>> =
            (0..tasks).map(|task| (task..self.candidates).step_by(self.tasks.len()).collect()).collect();
        let sizes: Vec<usize> = shares.iter().map(Vec::len).collect();
        let (jobs, job_queue) = mpsc::channel();
        let (events, inbox) = mpsc::channel();
        let job_queue = Mutex::new(job_queue);
        let own = std::thread::scope(|scope| {
            for _ in 0..self.workers.max(1) {
                let (events, job_queue) = (events.clone(), &job_queue);
                scope.spawn(move || self.play(job_queue, &events));
            }
            let hear = |news| {
                // Whoever does not listen any more has failed, and says so by itself.
                let _ = events.send(Event::Dealing(news));
            };
            deal_out(self.ranks, &sizes, &hear, |desk| self.drive(&shares, jobs, &inbox, desk, on_progress, stop))
        })?;
        gather_in_order(self.ranks, own)
    }

    /// A worker: plays candidates until there will be no more.
    fn play(&self, queue: &Mutex<mpsc::Receiver<usize>>, events: &mpsc::Sender<Event>) {
        // It takes its job with it: the driver must not wait for that.
        let _panic = OnPanic(|| drop(events.send(Event::WorkerGone)));
        loop {
            let index = match queue.lock() {
                Ok(queue) => queue.recv(),
                Err(_) => return,
            };
            let Ok(index) = index else { return };
            let task = self.tasks[index % self.tasks.len()];
            let result = demonstrate(task, self.surroundings, self.grader, self.seed, index as u32);
            if events.send(Event::Played(index, result)).is_err() {
                return;
            }
        }
    }

    fn drive(
        &self,
        shares: &[Vec<usize>],
        jobs: mpsc::Sender<usize>,
        inbox: &mpsc::Receiver<Event>,
        desk: &Desk,
        on_progress: &mut dyn FnMut(Tally),
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<(usize, Episode)>, RolloutError> {
        let most = READY_PER_WORKER * self.workers.max(1);
        let (mut dealt, mut waiting, mut given) = (0, VecDeque::new(), 0);
        let (mut episodes, mut tally, mut others) = (Vec::new(), Tally::default(), Tally::default());
        loop {
            let places = most.saturating_sub(given + waiting.len());
            desk.report(Report { shares: dealt, places, tally, stop: stop(), failure: None });
            // Given out only as workers get to it, so that a stop ends soon.
            while given < most
                && let Some(index) = waiting.pop_front()
            {
                jobs.send(index).map_err(|_| RolloutError::WorkerGone)?;
                given += 1;
            }
            let before = (tally, others);
            match inbox.recv_timeout(BEAT) {
                Ok(Event::Played(index, result)) => {
                    let episode = result.map_err(RolloutError::NotDemonstrable)?;
                    tally.add(Tally { ended: 1, passed: episode.verdict.passed() as u64 });
                    episodes.push((index, episode));
                    given -= 1;
                }
                Ok(Event::Dealing(News::Dealt(new))) => {
                    dealt += new.len();
                    waiting.extend(new.into_iter().flat_map(|share| &shares[share]).copied());
                }
                Ok(Event::Dealing(News::Others(theirs))) => others = theirs,
                Ok(Event::Dealing(News::Over(result))) => return result.map(|()| episodes),
                Ok(Event::WorkerGone) => return Err(RolloutError::WorkerGone),
                Err(_) => {}
            }
            if before != (tally, others) {
                let mut all = tally;
                all.add(others);
                on_progress(all);
            }
        }
    }
}
