//! What the ranks of a world know of each other: who waits for whom, who has left, and the verdict that stops all.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{CollectiveError, Failure, Operation};
use crate::algorithm::{Problems, SettingErrors};

/// How soon a world notices that a rank is lost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Liveness {
    /// A sign of life is sent this often.
    pub heartbeat_seconds: f64,
    /// A rank that has been silent for so long is taken for dead. With one more heartbeat it is the longest that the others go on.
    pub dead_after_seconds: f64,
    /// A rank that is alive but for which others have waited so long, without a byte, is taken for hung.
    pub stall_seconds: f64,
}

impl Default for Liveness {
    fn default() -> Liveness {
        Liveness { heartbeat_seconds: 1.0, dead_after_seconds: 6.0, stall_seconds: 600.0 }
    }
}

/// The longest of [`Liveness`]'s times.
const LONGEST_SECONDS: f64 = 1e7;

impl Liveness {
    /// # Errors
    /// All times that are not positive and finite, and a death sooner than three heartbeats.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let (heartbeat, dead) = (self.heartbeat_seconds, self.dead_after_seconds);
        let possible = |seconds: f64| (0.001..=LONGEST_SECONDS).contains(&seconds);
        let remedy = format!("give seconds from 0.001 to {LONGEST_SECONDS}");
        for (name, seconds) in
            [("heartbeat_seconds", heartbeat), ("dead_after_seconds", dead), ("stall_seconds", self.stall_seconds)]
        {
            problems.unless(possible(seconds), name, seconds, &remedy);
        }
        if possible(heartbeat) && possible(dead) {
            let remedy = format!("give at least three times heartbeat_seconds ({heartbeat})");
            problems.unless(dead >= 3.0 * heartbeat, "dead_after_seconds", dead, &remedy);
        }
        problems.finish()
    }

    pub(super) fn heartbeat(&self) -> Duration {
        Duration::from_secs_f64(self.heartbeat_seconds)
    }
    pub(super) fn dead_after(&self) -> Duration {
        Duration::from_secs_f64(self.dead_after_seconds)
    }
    /// How long after the loss of a rank all others have ended.
    pub(crate) fn ending(&self) -> Duration {
        self.dead_after() + 4 * self.heartbeat()
    }
    pub(crate) fn stall(&self) -> Duration {
        Duration::from_secs_f64(self.stall_seconds)
    }
}

/// One rank waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wait {
    /// Rank in the world.
    pub(super) on: usize,
    pub(super) operation: Operation,
    /// When its last byte came.
    pub(super) since: Instant,
}

/// Runs once, when the world stops.
pub type Told = Box<dyn FnOnce(&CollectiveError) + Send>;

/// Shared by all threads that speak for a rank; of a world of threads, by all ranks.
pub(super) struct Health {
    /// By rank in the world.
    hosts: Vec<String>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    verdict: Option<CollectiveError>,
    /// By rank, each with a number of its own: several calls may wait at once, in different groups.
    waits: Vec<Vec<(u64, Wait)>>,
    next: u64,
    left: Vec<bool>,
    /// To be told of the verdict; none after it.
    to_tell: Vec<Told>,
}

impl Health {
    pub(super) fn new(hosts: Vec<String>) -> Arc<Health> {
        let ranks = hosts.len();
        let state =
            State { verdict: None, waits: vec![Vec::new(); ranks], next: 0, left: vec![false; ranks], to_tell: Vec::new() };
        Arc::new(Health { hosts, state: Mutex::new(state), changed: Condvar::new() })
    }

    pub(super) fn hosts(&self) -> &[String] {
        &self.hosts
    }

    pub(super) fn error(&self, rank: usize, failure: Failure, reason: impl Into<String>) -> CollectiveError {
        CollectiveError { rank, host: self.hosts[rank].clone(), failure, reason: reason.into() }
    }

    /// An error once the world has stopped.
    pub(super) fn check(&self) -> Result<(), CollectiveError> {
        self.lock().verdict.clone().map_or(Ok(()), Err)
    }

    /// Stops the world. The first verdict stays; the one that holds is returned.
    pub(super) fn fail(&self, error: CollectiveError) -> CollectiveError {
        let mut state = self.lock();
        let verdict = state.verdict.get_or_insert(error).clone();
        let to_tell = std::mem::take(&mut state.to_tell);
        drop(state);
        self.changed.notify_all();
        to_tell.into_iter().for_each(|told| told(&verdict));
        verdict
    }

    /// Runs `told` when the world stops, at once if it already has; never while this is locked.
    pub(super) fn on_failure(&self, told: Told) {
        let mut state = self.lock();
        match state.verdict.clone() {
            None => state.to_tell.push(told),
            Some(verdict) => {
                drop(state);
                told(&verdict);
            }
        }
    }

    /// Waits for a verdict, at most so long.
    pub(super) fn wait_for_verdict(&self, at_most: Duration) -> Option<CollectiveError> {
        let waiting = self.changed.wait_timeout_while(self.lock(), at_most, |state| state.verdict.is_none());
        waiting.unwrap_or_else(PoisonError::into_inner).0.verdict.clone()
    }

    pub(super) fn leave(&self, rank: usize) {
        self.lock().left[rank] = true;
        self.changed.notify_all();
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.lock().left[rank]
    }

    /// Notes that `rank` waits, until the guard is dropped.
    pub(super) fn waiting(&self, rank: usize, wait: Wait) -> Waiting<'_> {
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.waits[rank].push((number, wait));
        Waiting { health: self, rank, number }
    }

    /// What another process says of its waiting takes the place of what it said before.
    pub(super) fn told_waiting(&self, rank: usize, wait: Option<Wait>) {
        self.lock().waits[rank] = wait.map(|wait| (0, wait)).into_iter().collect();
    }

    pub(super) fn longest_wait(&self, rank: usize) -> Option<Wait> {
        self.lock().longest_wait(rank)
    }

    /// If a rank has waited for `bound`: the rank at the end of the chain of those who wait for each other.
    pub(super) fn stalled(&self, bound: Duration) -> Option<CollectiveError> {
        let state = self.lock();
        let now = Instant::now();
        let age = |wait: Wait| now.saturating_duration_since(wait.since);
        let (mut at, mut wait) = (0..self.hosts.len())
            .filter_map(|rank| Some((rank, state.longest_wait(rank)?)))
            .min_by_key(|(rank, wait)| (wait.since, *rank))?;
        if age(wait) < bound {
            return None;
        }
        let seconds = age(wait).as_secs_f64();
        let mut chain = vec![at];
        loop {
            // One that began to wait just now was at work until then: things move.
            if age(wait) < bound / 2 {
                return None;
            }
            let Wait { on, operation, .. } = wait;
            if let Some(start) = chain.iter().position(|&rank| rank == on) {
                let circle: Vec<String> = chain[start..].iter().map(|rank| rank.to_string()).collect();
                let reason = format!("ranks {} wait for each other, for {seconds:.1} s ({operation})", circle.join(", "));
                return Some(self.error(on, Failure::Stalled, reason));
            }
            let Some(next) = state.longest_wait(on) else {
                let reason = format!("rank {at} has waited for it in {operation} for {seconds:.1} s");
                return Some(self.error(on, Failure::Stalled, reason));
            };
            (at, wait) = (on, next);
            chain.push(at);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Whole at every moment, also when a thread that held it has panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn longest_wait(&self, rank: usize) -> Option<Wait> {
        self.waits[rank].iter().map(|(_, wait)| *wait).min_by_key(|wait| wait.since)
    }
}

/// As long as it lives, a rank is said to wait.
pub(super) struct Waiting<'a> {
    health: &'a Health,
    rank: usize,
    number: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.health.lock().waits[self.rank].retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(100);

    fn world(waits: &[(usize, usize, u64)]) -> Option<CollectiveError> {
        let health = Health::new((0..5).map(|rank| format!("host-{rank}")).collect());
        for &(rank, on, seconds) in waits {
            let since = Instant::now().checked_sub(Duration::from_secs(seconds))?;
            health.told_waiting(rank, Some(Wait { on, operation: Operation::AllGather, since }));
        }
        health.stalled(BOUND)
    }

    #[test]
    fn the_end_of_the_chain_is_blamed() {
        assert_eq!(world(&[]), None);
        assert_eq!(world(&[(0, 3, 90)]), None);
        let error = world(&[(0, 1, 101), (1, 4, 100), (4, 3, 99), (2, 3, 99)]).expect("a stall");
        assert_eq!((error.rank, error.failure), (3, Failure::Stalled));
        let line = error.to_string();
        assert!(line.starts_with("rank 3 (host host-3) hangs: rank 4 has waited for it in all_gather for 101."), "{line}");
    }

    #[test]
    fn a_circle_is_named_and_a_chain_that_moves_is_left_alone() {
        let error = world(&[(0, 2, 120), (2, 4, 110), (4, 2, 110)]).expect("a circle");
        assert_eq!(error.rank, 2);
        assert!(error.reason.starts_with("ranks 2, 4 wait for each other"), "{error}");
        assert_eq!(world(&[(0, 1, 101), (1, 2, 3)]), None);
    }

    #[test]
    fn the_first_verdict_stays() {
        let health = Health::new(vec!["a".into(), "b".into()]);
        assert_eq!(health.check(), Ok(()));
        let first = health.fail(health.error(1, Failure::Gone, "its connection closed"));
        assert_eq!(health.fail(health.error(0, Failure::Aborted, "disk full")), first);
        assert_eq!(health.check(), Err(first.clone()));
        assert_eq!(first.to_string(), "rank 1 (host b) is gone: its connection closed");
    }

    #[test]
    fn each_is_told_of_the_verdict_once() {
        let health = Health::new(vec!["a".into(), "b".into()]);
        let (sender, told) = std::sync::mpsc::channel();
        let tell = |name: &'static str| {
            let sender = sender.clone();
            Box::new(move |error: &CollectiveError| sender.send((name, error.rank)).expect("a receiver"))
        };
        health.on_failure(tell("before"));
        assert_eq!(told.try_iter().count(), 0);
        health.fail(health.error(1, Failure::Gone, "its connection closed"));
        health.fail(health.error(0, Failure::Aborted, "disk full"));
        health.on_failure(tell("after"));
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [("before", 1), ("after", 1)]);
    }

    #[test]
    fn times_that_cannot_work_are_refused() {
        assert_eq!(Liveness::default().check(), Ok(()));
        for (field, liveness) in [
            ("heartbeat_seconds", Liveness { heartbeat_seconds: 0.0, ..Liveness::default() }),
            ("heartbeat_seconds", Liveness { heartbeat_seconds: f64::NAN, ..Liveness::default() }),
            ("stall_seconds", Liveness { stall_seconds: f64::INFINITY, ..Liveness::default() }),
            ("dead_after_seconds", Liveness { dead_after_seconds: -1.0, ..Liveness::default() }),
            ("dead_after_seconds", Liveness { heartbeat_seconds: 3.0, ..Liveness::default() }),
        ] {
            assert!(liveness.check().is_err_and(|errors| errors.to_string().starts_with(field)), "{liveness:?}");
        }
    }
}
