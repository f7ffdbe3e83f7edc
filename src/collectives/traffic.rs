//! What collectives cost: calls, bytes and seconds by kind of operation.

use std::fmt;
use std::ops::AddAssign;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The kinds of calls that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast,
    Send,
    Receive,
    Exchange,
    Barrier,
    Split,
}

impl Operation {
    pub const ALL: [Operation; 9] = [
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::AllReduce,
        Operation::Broadcast,
        Operation::Send,
        Operation::Receive,
        Operation::Exchange,
        Operation::Barrier,
        Operation::Split,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Operation::AllGather => "all_gather",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllReduce => "all_reduce",
            Operation::Broadcast => "broadcast",
            Operation::Send => "send",
            Operation::Receive => "receive",
            Operation::Exchange => "exchange",
            Operation::Barrier => "barrier",
            Operation::Split => "split",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The calls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub calls: u64,
    /// Bytes of the values that this rank handed in to be read: its part of an all-gather, the whole of a reduction, what it
    /// sends; of a broadcast the root's alone. Headers and how often a value crosses a link are not in it.
    pub bytes: u64,
    /// From the call to its return.
    pub time: Duration,
    /// The part of `time` in which this rank had nothing else to do: all of it, but for calls inside
    /// [`overlapped`](super::Collectives::overlapped), where it is the part after the computation had ended.
    pub exposed: Duration,
}

/// What one rank handed to the collectives of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    counts: [Count; Operation::ALL.len()],
}

impl Traffic {
    pub fn of(&self, operation: Operation) -> Count {
        self.counts[operation as usize]
    }

    /// Over all kinds.
    pub fn total(&self) -> Count {
        let mut total = Count::default();
        self.counts.iter().for_each(|count| total += *count);
        total
    }

    /// What has been added since `earlier`, an earlier state of the same traffic.
    pub fn since(&self, earlier: &Traffic) -> Traffic {
        let mut since = *self;
        for (count, earlier) in since.counts.iter_mut().zip(&earlier.counts) {
            count.calls -= earlier.calls;
            count.bytes -= earlier.bytes;
            count.time -= earlier.time;
            count.exposed -= earlier.exposed;
        }
        since
    }
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Count) {
        self.calls += other.calls;
        self.bytes += other.bytes;
        self.time += other.time;
        self.exposed += other.exposed;
    }
}

/// Adds what another group, or another step, has cost.
impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Traffic) {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, other)| *count += other);
    }
}

/// A call as it ran beside a computation.
#[derive(Clone, Copy)]
struct Span {
    operation: Operation,
    start: Instant,
    end: Instant,
}

/// Where calls are noted.
#[derive(Clone, Default)]
pub(crate) struct Recorder {
    traffic: Arc<Mutex<Traffic>>,
    /// Calls whose exposed time is known only once the computation beside them has ended.
    beside: Option<Arc<Mutex<Vec<Span>>>>,
}

impl Recorder {
    pub(crate) fn traffic(&self) -> Traffic {
        *self.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A recorder of the same traffic for calls that run beside a computation.
    pub(super) fn beside(&self) -> Recorder {
        Recorder { traffic: self.traffic.clone(), beside: Some(Arc::default()) }
    }

    pub(super) fn note(&self, operation: Operation, bytes: usize, start: Instant, end: Instant) {
        let time = end.saturating_duration_since(start);
        let exposed = if self.beside.is_some() { Duration::ZERO } else { time };
        self.add(operation, Count { calls: 1, bytes: bytes as u64, time, exposed });
        if let Some(spans) = &self.beside {
            spans.lock().unwrap_or_else(PoisonError::into_inner).push(Span { operation, start, end });
        }
    }

    /// The computation ended at `computed`; all later parts of the calls beside it were exposed.
    pub(super) fn settle(self, computed: Instant) {
        let spans = self.beside.as_ref().map(|spans| std::mem::take(&mut *spans.lock().unwrap_or_else(PoisonError::into_inner)));
        for Span { operation, start, end } in spans.into_iter().flatten() {
            let exposed = end.saturating_duration_since(start.max(computed));
            self.add(operation, Count { exposed, ..Count::default() });
        }
    }

    pub(crate) fn add(&self, operation: Operation, count: Count) {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner).counts[operation as usize] += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_outlasts_the_computation_is_exposed() {
        let recorder = Recorder::default();
        let at = |seconds: u64| Instant::now() + Duration::from_secs(1000 + seconds);
        let start = at(0);
        let after = |seconds: u64| start + Duration::from_secs(seconds);
        recorder.note(Operation::Barrier, 0, after(0), after(2));

        let beside = recorder.beside();
        beside.note(Operation::AllGather, 8, after(0), after(3)); // hidden
        beside.note(Operation::AllGather, 8, after(3), after(7)); // two seconds too long
        beside.note(Operation::AllReduce, 4, after(7), after(10)); // all of it
        beside.settle(after(5));

        let seconds = Duration::from_secs;
        let traffic = recorder.traffic();
        assert_eq!(traffic.of(Operation::Barrier), Count { calls: 1, bytes: 0, time: seconds(2), exposed: seconds(2) });
        assert_eq!(traffic.of(Operation::AllGather), Count { calls: 2, bytes: 16, time: seconds(7), exposed: seconds(2) });
        assert_eq!(traffic.of(Operation::AllReduce), Count { calls: 1, bytes: 4, time: seconds(3), exposed: seconds(3) });
        assert_eq!(traffic.total(), Count { calls: 4, bytes: 20, time: seconds(12), exposed: seconds(7) });

        recorder.note(Operation::Barrier, 0, after(20), after(21));
        let one_more = Count { calls: 1, bytes: 0, time: seconds(1), exposed: seconds(1) };
        assert_eq!(recorder.traffic().since(&traffic).of(Operation::Barrier), one_more);
        assert_eq!(recorder.traffic().since(&traffic).total(), one_more);
    }

    #[test]
    fn each_kind_has_its_own_place() {
        for (index, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, index, "{operation}");
        }
    }
}
