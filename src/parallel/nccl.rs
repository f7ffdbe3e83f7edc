//! Collectives over the buffers of CUDA devices, by NCCL.
//!
//! **Groups.** Each group of ranks has a communicator with an id of its own, made by its first rank and sent to the others over the
//! host. `ncclCommSplit` would save one meeting at the start, and tie the life of one group's communicator to another's.
//!
//! **Beside a computation.** The communicator has a stream. It waits for what the device was asked before; the calls are enqueued,
//! then the computation; then the device's stream waits for the communicator's. The host waits for neither. Calls that are made
//! together are enqueued as one NCCL group, for the tensors of a unit are many and some are small: one launch instead of ten. A
//! group's calls are in no order, so a call on a buffer that the group already has begins the next group.
//!
//! **Bits.** NCCL sums along rings or trees, not in rank order, and rounds sums of bf16 at every step: on real GPUs the same numbers
//! give the same bits only with the same ranks in the same places, the same NCCL and the same choice of algorithm (`NCCL_ALGO`,
//! `NCCL_PROTO`). Forward passes do not depend on it, for they only gather. The emulated NCCL sums in f32 and in rank order, as
//! [`host_links`](super::World::over_hosts) do.
//!
//! **Failure.** NCCL cannot tell a rank that is lost from one that is late: its kernels wait. So what happens is found out on the host,
//! by a thread beside each communicator (the host's own thread may be waiting for the device, where it can look at nothing):
//!
//! - twice a second all of these threads of a group meet and tell how many groups of calls their rank has asked for. A rank that has
//!   left while another asked for more is named, and so is the one behind all others once they have waited `stall_seconds`;
//! - when the run stops, here or on the host, the thread aborts the communicator: what waits on the device ends, with numbers that mean
//!   nothing, and every later call returns the error that the host found;
//! - an error that NCCL itself reports (a broken connection) is mostly another's: the host has some seconds to name the rank that
//!   is lost, before this rank stops the run with what NCCL said.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::links::Links;
use super::ranks::Ranks;
use crate::collectives::{CollectiveError, Count, Failure, Liveness, Operation, Recorder, Traffic};
use crate::device::CudaDevice;
use crate::device::cuda::{
    Buffer, Communicator, CommunicatorError, DeviceError, Moment, Request, SharedCall, new_communicator_id,
};

/// How often the threads of a group meet.
const MEETING: Duration = Duration::from_millis(500);
/// How long NCCL may take to end.
const ENDING: Duration = Duration::from_secs(9);
/// How long a rank that drops its links waits for the others to do the same: longer than NCCL may take to end.
const LEAVING: Duration = Duration::from_secs(20);
/// The longest pause between two looks at a call that is in progress.
const LOOK: Duration = Duration::from_millis(1);

/// A group of ranks whose devices exchange buffers by NCCL.
pub struct NcclLinks {
    watched: Arc<Watched>,
    watcher: Option<JoinHandle<()>>,
}

impl NcclLinks {
    /// Links between all of `ranks`, who make no other calls of this group from now on; each has a device of its own. A rank that has
    /// left for `stall_seconds` what all others wait for is taken for hung. The links of all ranks are dropped together, once all know
    /// how the run ended: a rank that drops its links while others keep theirs stops the run.
    ///
    /// # Errors
    /// No NCCL here, or one that refuses: the run stops with one line that says so. A rank that is lost.
    pub fn new(device: &CudaDevice, ranks: Ranks, liveness: &Liveness) -> Result<NcclLinks, CollectiveError> {
        let refused = |problem: DeviceError| {
            ranks.abort(&problem.to_string());
            ranks.error(ranks.rank(), Failure::Aborted, problem.to_string())
        };
        let own = if ranks.first() { Some(new_communicator_id().map_err(refused)?) } else { None };
        let id: Vec<u8> = ranks.broadcast(own.as_ref())?;
        let communicator = Communicator::begin(device, &id, ranks.rank(), ranks.ranks()).map_err(refused)?;
        let verdict = Arc::new(Verdict::default());
        let told = verdict.clone();
        ranks.on_failure(move |error| told.give(error.clone()));
        let watched = Watched {
            communicator,
            verdict,
            ranks,
            stall: liveness.stall(),
            patience: liveness.ending(),
            recorder: Recorder::default(),
            progress: Mutex::default(),
        };
        watched.settle()?;
        let watched = Arc::new(watched);
        let watching = watched.clone();
        let watcher = std::thread::Builder::new().name("nccl".into()).spawn(move || watching.watch());
        let watcher = watcher.map_err(|problem| watched.stop(&format!("no thread to watch NCCL with: {problem}")))?;
        Ok(NcclLinks { watched, watcher: Some(watcher) })
    }

    fn alone(&self, call: SharedCall, buffer: &mut Buffer, share: usize) -> Result<(), CollectiveError> {
        self.overlapped(
            &mut |links| match call {
                SharedCall::AllGather => links.all_gather(buffer, share),
                SharedCall::ReduceScatter => links.reduce_scatter(buffer, share),
            },
            &mut || {},
        )
    }
}

impl Links<CudaDevice> for NcclLinks {
    fn rank(&self) -> usize {
        self.watched.communicator.rank()
    }

    fn ranks(&self) -> usize {
        self.watched.communicator.ranks()
    }

    fn all_gather(&self, buffer: &mut Buffer, share: usize) -> Result<(), CollectiveError> {
        self.alone(SharedCall::AllGather, buffer, share)
    }

    fn reduce_scatter(&self, buffer: &mut Buffer, share: usize) -> Result<(), CollectiveError> {
        self.alone(SharedCall::ReduceScatter, buffer, share)
    }

    fn overlapped(
        &self,
        communicate: &mut (dyn FnMut(&dyn Links<CudaDevice>) -> Result<(), CollectiveError> + Send),
        compute: &mut dyn FnMut(),
    ) -> Result<(), CollectiveError> {
        let watched = &*self.watched;
        watched.verdict.check()?;
        watched.communicator.follow();
        let beside = Beside { watched, waiting: Mutex::default() };
        let led = Led(watched);
        communicate(&beside)?;
        beside.flush()?;
        compute();
        led.close();
        watched.verdict.check()
    }

    fn traffic(&self) -> Traffic {
        while !self.watched.harvest() && self.watched.verdict.check().is_ok() {
            std::thread::sleep(LOOK);
        }
        self.watched.recorder.traffic()
    }
}

impl Drop for NcclLinks {
    fn drop(&mut self) {
        let watched = &self.watched;
        if std::thread::panicking() {
            watched.ranks.abort("its thread panicked");
        }
        watched.verdict.leave();
        if let Some(watcher) = self.watcher.take() {
            // It ends when all ranks leave, or with the run.
            let deadline = Instant::now() + LEAVING;
            while !watcher.is_finished() && Instant::now() < deadline {
                std::thread::sleep(LOOK);
            }
            if !watcher.is_finished() {
                watched.stop("it has left, and the other ranks have not");
            }
            // A panic of its own has nobody left to hear of it.
            let _ = watcher.join();
        }
    }
}

/// Makes the device's stream wait for the communicator's, also if a closure fails or panics: buffers are given back in the order of
/// the device's stream, which then is behind whatever still uses them.
struct Led<'a>(&'a Watched);

impl Led<'_> {
    /// Notes that the computation has ended here.
    fn close(self) {
        let computed = Arc::new(self.0.communicator.moment_of_device());
        for group in &mut self.0.progress().groups {
            group.computed.get_or_insert_with(|| computed.clone());
        }
        self.0.communicator.lead();
        std::mem::forget(self);
    }
}

impl Drop for Led<'_> {
    fn drop(&mut self) {
        self.0.communicator.lead_if_possible();
    }
}

/// What is given to calls that run beside a computation.
struct Beside<'a> {
    watched: &'a Watched,
    /// Not yet asked for: the group that NCCL will be given.
    waiting: Mutex<Vec<Request>>,
}

impl Beside<'_> {
    fn add(&self, call: SharedCall, buffer: &mut Buffer, share: usize) -> Result<(), CollectiveError> {
        self.watched.verdict.check()?;
        let request = Request::new(call, buffer, share, self.ranks());
        if self.waiting().iter().any(|other| other.meets(&request)) {
            self.flush()?;
        }
        self.waiting().push(request);
        Ok(())
    }

    fn flush(&self) -> Result<(), CollectiveError> {
        let requests = std::mem::take(&mut *self.waiting());
        if requests.is_empty() { Ok(()) } else { self.watched.ask(&requests) }
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Request>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Links<CudaDevice> for Beside<'_> {
    fn rank(&self) -> usize {
        self.watched.communicator.rank()
    }

    fn ranks(&self) -> usize {
        self.watched.communicator.ranks()
    }

    fn all_gather(&self, buffer: &mut Buffer, share: usize) -> Result<(), CollectiveError> {
        self.add(SharedCall::AllGather, buffer, share)
    }

    fn reduce_scatter(&self, buffer: &mut Buffer, share: usize) -> Result<(), CollectiveError> {
        self.add(SharedCall::ReduceScatter, buffer, share)
    }

    /// What these calls run beside is already there: `compute` is part of it, and theirs waits for all so far.
    fn overlapped(
        &self,
        communicate: &mut (dyn FnMut(&dyn Links<CudaDevice>) -> Result<(), CollectiveError> + Send),
        compute: &mut dyn FnMut(),
    ) -> Result<(), CollectiveError> {
        communicate(self)?;
        self.flush()?;
        compute();
        Ok(())
    }

    fn traffic(&self) -> Traffic {
        self.watched.recorder.traffic()
    }
}

/// What the thread beside a communicator shares with those that use it.
struct Watched {
    communicator: Communicator,
    verdict: Arc<Verdict>,
    ranks: Ranks,
    stall: Duration,
    /// How long the host has to name a rank that is lost once NCCL has noticed it: as long as all ranks of a run may take to end.
    patience: Duration,
    recorder: Recorder,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    /// Groups of calls asked for so far.
    asked: u64,
    /// Those whose time is not known yet, in order.
    groups: VecDeque<Group>,
}

/// Calls that NCCL was given together.
struct Group {
    /// Each with the bytes that this rank gives.
    calls: Vec<(Operation, u64)>,
    asked: Instant,
    start: Moment,
    end: Moment,
    /// When the computation beside it ended; none while it goes on.
    computed: Option<Arc<Moment>>,
}

/// What each rank tells of a group at a meeting.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Report {
    asked: u64,
    /// How long the first of its unfinished groups of calls has been waiting.
    waiting_seconds: f64,
    leaves: bool,
}

impl Watched {
    /// Asks for calls of one group, and counts them.
    fn ask(&self, requests: &[Request]) -> Result<(), CollectiveError> {
        self.verdict.check()?;
        let ranks = self.communicator.ranks();
        let operation = |call| match call {
            SharedCall::AllGather => Operation::AllGather,
            SharedCall::ReduceScatter => Operation::ReduceScatter,
        };
        let calls: Vec<_> = requests.iter().map(|request| (operation(request.call), request.bytes(ranks) as u64)).collect();
        for &(operation, bytes) in &calls {
            self.recorder.add(operation, Count { calls: 1, bytes, ..Count::default() });
        }
        let (asked, start) = (Instant::now(), self.communicator.moment());
        self.communicator.submit(requests).map_err(|problem| self.wait_for_verdict(&problem))?;
        self.progress().asked += 1;
        self.settle()?;
        let end = self.communicator.moment();
        self.progress().groups.push_back(Group { calls, asked, start, end, computed: None });
        Ok(())
    }

    /// Waits until NCCL has taken the last call: the first of a communicator connects the ranks, which takes all of them.
    fn settle(&self) -> Result<(), CollectiveError> {
        let mut pause = Duration::from_micros(1);
        loop {
            match self.communicator.is_settled() {
                Ok(true) => return Ok(()),
                Ok(false) => {
                    self.verdict.check()?;
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(LOOK);
                }
                Err(problem) => return Err(self.wait_for_verdict(&problem)),
            }
        }
    }

    /// NCCL's error is mostly another rank's: the host may soon know whose, and if not, it is this rank's.
    fn wait_for_verdict(&self, problem: &CommunicatorError) -> CollectiveError {
        self.verdict.wait(self.patience, false).unwrap_or_else(|| self.stop(&problem.to_string()))
    }

    /// Stops the run in this rank's name, unless it has stopped already.
    fn stop(&self, reason: &str) -> CollectiveError {
        self.ranks.abort(reason);
        self.verdict.check().err().unwrap_or_else(|| self.ranks.error(self.ranks.rank(), Failure::Aborted, reason))
    }

    /// Counts the time of groups that are done; whether all of those that can be have been.
    fn harvest(&self) -> bool {
        let mut progress = self.progress();
        while let Some(Group { calls, start, end, computed: Some(computed), .. }) = progress.groups.front() {
            if !(end.is_past() && computed.is_past()) {
                return false;
            }
            let time = start.seconds_to(end).max(0.0);
            let exposed = computed.seconds_to(end).clamp(0.0, time);
            let whole: u64 = calls.iter().map(|(_, bytes)| bytes).sum();
            for &(operation, bytes) in calls {
                let part = if whole == 0 { 1.0 / calls.len() as f64 } else { bytes as f64 / whole as f64 };
                let [time, exposed] = [time, exposed].map(|seconds| Duration::from_secs_f64(seconds * part));
                self.recorder.add(operation, Count { time, exposed, ..Count::default() });
            }
            progress.groups.pop_front();
        }
        true
    }

    /// Until the run stops, or all ranks leave.
    fn watch(&self) {
        loop {
            if self.verdict.wait(MEETING, true).is_some() {
                return self.communicator.abort();
            }
            if let Err(problem) = self.communicator.is_settled() {
                self.wait_for_verdict(&problem);
                continue;
            }
            self.harvest();
            match self.ranks.gather(&self.report()) {
                Ok(reports) if reports.iter().all(|report| report.leaves) => return self.end(),
                Ok(reports) => {
                    if let Some((rank, failure, reason)) = judged(&reports, self.stall) {
                        self.ranks.stop(self.ranks.error(rank, failure, reason));
                    }
                }
                // The verdict that comes with it ends this loop.
                Err(error) => self.verdict.give(error),
            }
        }
    }

    fn report(&self) -> Report {
        let progress = self.progress();
        let waiting_seconds = progress.groups.front().map_or(0.0, |group| group.asked.elapsed().as_secs_f64());
        Report { asked: progress.asked, waiting_seconds, leaves: self.verdict.leaves() }
    }

    /// All ranks leave: what they asked for is done soon.
    fn end(&self) {
        let deadline = Instant::now() + ENDING;
        if self.communicator.finalize().is_ok() {
            while Instant::now() < deadline {
                match self.communicator.is_settled() {
                    Ok(true) => return self.communicator.destroy(),
                    Ok(false) => std::thread::sleep(LOOK),
                    Err(_) => break,
                }
            }
        }
        self.communicator.abort();
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whom the reports of all ranks convict, and why: all ranks judge alike.
fn judged(reports: &[Report], stall: Duration) -> Option<(usize, Failure, String)> {
    let behind = (0..reports.len()).min_by_key(|&rank| reports[rank].asked)?;
    let ahead = (0..reports.len()).max_by(|&a, &b| {
        let order = reports[a].asked.cmp(&reports[b].asked);
        order.then(reports[a].waiting_seconds.total_cmp(&reports[b].waiting_seconds)).then(b.cmp(&a))
    })?;
    let (made, wanted) = (reports[behind].asked, reports[ahead].asked);
    let left = (0..reports.len()).find(|&rank| reports[rank].leaves && reports[rank].asked < wanted);
    if let Some(left) = left {
        let made = reports[left].asked;
        return Some((
            left,
            Failure::Gone,
            format!("it has left after {made} groups of calls, and rank {ahead} waits for {wanted}"),
        ));
    }
    let waited = reports[ahead].waiting_seconds;
    if waited < stall.as_secs_f64() {
        return None;
    }
    let reason = if made < wanted {
        format!("rank {ahead} has waited for it in NCCL for {waited:.1} s: it has made {made} groups of calls of {wanted}")
    } else {
        format!("all ranks have made {made} groups of calls, and the last has not ended for {waited:.1} s")
    };
    Some((behind, Failure::Stalled, reason))
}

/// Why the run stopped, once it has, and whether this rank leaves.
#[derive(Default)]
struct Verdict {
    state: Mutex<VerdictState>,
    changed: Condvar,
}

#[derive(Default)]
struct VerdictState {
    error: Option<CollectiveError>,
    leaves: bool,
}

impl Verdict {
    /// The first stays.
    fn give(&self, error: CollectiveError) {
        self.locked().error.get_or_insert(error);
        self.changed.notify_all();
    }

    fn check(&self) -> Result<(), CollectiveError> {
        self.locked().error.clone().map_or(Ok(()), Err)
    }

    fn leave(&self) {
        self.locked().leaves = true;
        self.changed.notify_all();
    }

    fn leaves(&self) -> bool {
        self.locked().leaves
    }

    /// Waits for a verdict, at most so long; `or_leaving`: not at all once this rank leaves.
    fn wait(&self, at_most: Duration, or_leaving: bool) -> Option<CollectiveError> {
        let goes_on = |state: &mut VerdictState| state.error.is_none() && !(or_leaving && state.leaves);
        let waited = self.changed.wait_timeout_while(self.locked(), at_most, goes_on);
        waited.unwrap_or_else(PoisonError::into_inner).0.error.clone()
    }

    fn locked(&self) -> MutexGuard<'_, VerdictState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(of: &[(u64, f64, bool)]) -> Vec<Report> {
        of.iter().map(|&(asked, waiting_seconds, leaves)| Report { asked, waiting_seconds, leaves }).collect()
    }

    fn judged_at_100_seconds(of: &[(u64, f64, bool)]) -> Option<(usize, Failure, String)> {
        judged(&reports(of), Duration::from_secs(100))
    }

    #[test]
    fn who_is_late_but_not_too_late_goes_free() {
        assert_eq!(judged_at_100_seconds(&[(5, 99.0, false), (4, 0.0, false)]), None);
        assert_eq!(judged_at_100_seconds(&[(5, 0.0, true), (5, 0.0, false)]), None, "it may leave a moment later");
    }

    #[test]
    fn the_rank_behind_is_named_once_others_have_waited_too_long() {
        let (rank, failure, reason) =
            judged_at_100_seconds(&[(5, 120.0, false), (5, 130.0, false), (3, 0.0, false), (4, 110.0, false)]).expect("a stall");
        assert_eq!((rank, failure), (2, Failure::Stalled));
        assert_eq!(reason, "rank 1 has waited for it in NCCL for 130.0 s: it has made 3 groups of calls of 5");
    }

    #[test]
    fn who_leaves_before_a_call_is_named_at_once() {
        let (rank, failure, reason) =
            judged_at_100_seconds(&[(2, 0.1, false), (1, 0.0, true), (1, 0.0, false)]).expect("a rank that left");
        assert_eq!((rank, failure), (1, Failure::Gone));
        assert_eq!(reason, "it has left after 1 groups of calls, and rank 0 waits for 2");
    }

    #[test]
    fn a_group_that_all_have_asked_for_may_hang_too() {
        let (_, failure, reason) = judged_at_100_seconds(&[(2, 101.0, false), (2, 101.0, false)]).expect("a stall");
        assert_eq!(failure, Failure::Stalled);
        assert_eq!(reason, "all ranks have made 2 groups of calls, and the last has not ended for 101.0 s");
    }
}
