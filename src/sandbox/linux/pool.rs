//! Admission: a run starts when a place for it is free and its memory limit fits beside those of the runs that are under way.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

/// So many runs at once, and so much memory for all their limits together. First come, first admitted: a large run is not
/// overtaken by small ones for ever.
pub struct Pool {
    memory_bytes: u64,
    state: Mutex<State>,
}

struct State {
    places: usize,
    memory_bytes: u64,
    queue: VecDeque<Waiting>,
}

struct Waiting {
    memory_bytes: u64,
    thread: Thread,
    admitted: Arc<AtomicBool>,
}

/// The right to run. Given back when dropped.
pub struct Place<'a> {
    pool: &'a Pool,
    memory_bytes: u64,
}

impl Pool {
    pub fn new(places: usize, memory_bytes: u64) -> Pool {
        Pool { memory_bytes, state: Mutex::new(State { places, memory_bytes, queue: VecDeque::new() }) }
    }

    /// Waits for a place.
    ///
    /// # Errors
    /// One line if the run would not fit into an empty pool either.
    pub fn enter(&self, memory_bytes: u64) -> Result<Place<'_>, String> {
        if memory_bytes > self.memory_bytes {
            return Err(format!(
                "a run may use {memory_bytes} bytes of memory and all runs together {}: lower limits.memory_bytes or raise \
                 sandbox.memory_bytes",
                self.memory_bytes
            ));
        }
        let admitted = Arc::new(AtomicBool::new(false));
        let mut state = self.lock();
        state.queue.push_back(Waiting { memory_bytes, thread: std::thread::current(), admitted: Arc::clone(&admitted) });
        state.admit();
        drop(state);
        while !admitted.load(Ordering::Acquire) {
            std::thread::park();
        }
        Ok(Place { pool: self, memory_bytes })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Numbers and a queue that are whole at every moment, also when a thread that held them has panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Admits from the front of the queue for as long as the first fits.
    fn admit(&mut self) {
        let fits =
            |state: &State| state.places > 0 && state.queue.front().is_some_and(|first| first.memory_bytes <= state.memory_bytes);
        while fits(self)
            && let Some(first) = self.queue.pop_front()
        {
            self.places -= 1;
            self.memory_bytes -= first.memory_bytes;
            first.admitted.store(true, Ordering::Release);
            first.thread.unpark();
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.places += 1;
        state.memory_bytes += self.memory_bytes;
        state.admit();
    }
}

/// Small numbers, the lowest free one first: the run's user id follows from it, and what is kept for an id is kept for few.
pub struct Numbers {
    free: Mutex<BTreeSet<u32>>,
}

/// One number, given back when dropped.
pub struct Number {
    numbers: Arc<Numbers>,
    pub value: u32,
}

impl Numbers {
    pub fn new(count: u32) -> Arc<Numbers> {
        Arc::new(Numbers { free: Mutex::new((0..count).collect()) })
    }

    /// The lowest free number; `None` if all are taken.
    pub fn take(self: &Arc<Numbers>) -> Option<Number> {
        let value = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop_first()?;
        Some(Number { numbers: Arc::clone(self), value })
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        self.numbers.free.lock().unwrap_or_else(PoisonError::into_inner).insert(self.value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits until so many stand in the queue.
    fn queued(pool: &Pool, count: usize) {
        while pool.lock().queue.len() != count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn places_and_memory_are_never_exceeded() {
        let pool = Pool::new(2, 100);
        assert!(pool.enter(101).is_err_and(|line| line.contains("sandbox.memory_bytes")));
        let (first, second) = (pool.enter(10).unwrap(), pool.enter(10).unwrap());
        std::thread::scope(|scope| {
            let third = scope.spawn(|| drop(pool.enter(10).unwrap())); // no place
            queued(&pool, 1);
            drop(first);
            third.join().unwrap();
        });
        std::thread::scope(|scope| {
            let third = scope.spawn(|| drop(pool.enter(91).unwrap())); // no memory
            queued(&pool, 1);
            drop(second);
            third.join().unwrap();
        });
        let state = pool.lock();
        assert_eq!((state.places, state.memory_bytes, state.queue.len()), (2, 100, 0));
    }

    #[test]
    fn first_come_first_admitted() {
        let pool = Pool::new(4, 100);
        let held = pool.enter(50).unwrap();
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for (place, bytes) in [80u64, 30, 90].into_iter().enumerate() {
                let (pool, order) = (&pool, &order);
                scope.spawn(move || {
                    let _place = pool.enter(bytes).unwrap();
                    order.lock().unwrap().push(bytes);
                });
                queued(pool, place + 1); // 30 would fit beside what is held, but 80 was there before
            }
            drop(held);
        });
        assert_eq!(*order.lock().unwrap(), [80, 30, 90]);
    }

    #[test]
    fn numbers_come_back() {
        let numbers = Numbers::new(2);
        let (first, second) = (numbers.take().unwrap(), numbers.take().unwrap());
        assert_eq!((first.value, second.value, numbers.take().map(|number| number.value)), (0, 1, None));
        drop(first);
        assert_eq!(numbers.take().unwrap().value, 0);
    }
}
