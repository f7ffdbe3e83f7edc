//! Remembered test runs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::{Counters, Outcome};

/// Filled by the first who asks; others who ask meanwhile wait for it. So what is executed and what is remembered depends on
/// the questions alone, not on how many threads ask them at once.
type Entry = Arc<Mutex<Option<Outcome>>>;

#[derive(Default)]
pub struct Memo {
    entries: Mutex<HashMap<[u8; 32], Entry>>,
    executed: AtomicU64,
    remembered: AtomicU64,
    /// That runs took, in all threads together.
    nanoseconds: AtomicU64,
}

impl Memo {
    /// The remembered outcome of `key`, else that of `run`, which is then remembered unless it was a fault of ours or decided by the
    /// wall clock. Without a key, always `run`. True if remembered.
    pub fn get_or_run(&self, key: Option<[u8; 32]>, run: impl FnOnce() -> Outcome) -> (Outcome, bool) {
        let Some(key) = key else {
            return (self.execute(run), false);
        };
        let entry = Arc::clone(self.entries.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default());
        let mut slot = entry.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(outcome) = &*slot {
            self.remembered.fetch_add(1, Ordering::Relaxed);
            return (outcome.clone(), true);
        }
        let outcome = self.execute(run);
        if !outcome.ended.infrastructure() && !outcome.wall_limit_hit() {
            *slot = Some(outcome.clone());
        }
        (outcome, false)
    }

    fn execute(&self, run: impl FnOnce() -> Outcome) -> Outcome {
        self.executed.fetch_add(1, Ordering::Relaxed);
        let started = Instant::now();
        let outcome = run();
        self.nanoseconds.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        outcome
    }

    /// Forgets everything and counts from 0. Runs under way are not waited for.
    pub fn forget(&self) {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.executed.store(0, Ordering::Relaxed);
        self.remembered.store(0, Ordering::Relaxed);
        self.nanoseconds.store(0, Ordering::Relaxed);
    }

    /// Seconds that runs have taken, in all threads together.
    pub fn seconds(&self) -> f64 {
        self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9
    }

    pub fn counters(&self) -> Counters {
        Counters { executed: self.executed.load(Ordering::Relaxed), remembered: self.remembered.load(Ordering::Relaxed) }
    }
}
