//! Dealing shares of work to ranks while they work.
//!
//! ```text
//! main thread    report: free places, attempts ended, stop asked   <-- news: shares dealt, totals, the end
//! beside it      rounds: gather all reports, and deal from them by the same rule on every rank
//! ```
//!
//! A share is a group of attempts that stays together. It is dealt when a rank has free places, to the one with the most of them: what
//! fits is under way at once, since an engine is fastest when full, and what does not goes to whoever has room first. So a
//! slow rank gets less, and nobody's sandboxes wait for it. Who samples changes no bit of what is sampled.
//!
//! A rank reports between two passes of its engine, and a round waits for one report of everybody. So a rank that hangs is
//! waited for, as in any other call of all ranks, and found as there.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::RolloutError;
use crate::parallel::Ranks;

/// Attempts so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    pub ended: u64,
    pub passed: u64,
}

impl Tally {
    pub fn add(&mut self, other: Tally) {
        self.ended += other.ended;
        self.passed += other.passed;
    }

    pub fn pass_rate(self) -> f64 {
        self.passed as f64 / self.ended.max(1) as f64
    }
}

/// What a rank tells the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    /// Shares it has heard of so far: until that is all that were dealt to it, its `places` are old.
    pub shares: usize,
    /// Attempts that it could begin now.
    pub places: usize,
    pub tally: Tally,
    /// It was asked to stop.
    pub stop: bool,
    /// Why it cannot go on.
    pub failure: Option<String>,
}

/// What a rank hears.
#[derive(Debug)]
pub(super) enum News {
    /// These shares are its own now.
    Dealt(Vec<usize>),
    /// Of all other ranks.
    Others(Tally),
    /// Every attempt of every rank has ended, or why none goes on.
    Over(Result<(), RolloutError>),
}

/// Where a rank leaves its reports.
pub(super) struct Desk<'a> {
    ranks: &'a Ranks,
    hear: &'a (dyn Fn(News) + Sync),
    state: Mutex<DeskState<'a>>,
    reported: Condvar,
}

struct DeskState<'a> {
    report: Report,
    /// Made since the last round.
    fresh: bool,
    rounds: Rounds<'a>,
}

/// Runs `work`, which reports to the desk it is given until it has heard that all is over. `sizes` are the attempts of each
/// share. `hear` is told the news, on this thread or another.
///
/// # Errors
/// That of `work`; if any rank is asked to stop or fails, all get an error.
pub(super) fn deal_out<A>(
    ranks: &Ranks,
    sizes: &[usize],
    hear: &(dyn Fn(News) + Sync),
    work: impl FnOnce(&Desk) -> Result<A, RolloutError>,
) -> Result<A, RolloutError> {
    let state = DeskState { report: Report::default(), fresh: false, rounds: Rounds::new(sizes, ranks.ranks()) };
    let desk = Desk { ranks, hear, state: Mutex::new(state), reported: Condvar::new() };
    std::thread::scope(|scope| {
        if !desk.alone() {
            scope.spawn(|| desk.hold_rounds());
        }
        // The rounds would go on for ever without this thread.
        let _panic = OnPanic(|| desk.fail("its thread panicked".into()));
        let result = work(&desk);
        if let Err(error) = &result {
            desk.fail(error.to_string());
        }
        result
    })
}

/// Calls what it holds if the thread that it lives on panics.
pub(super) struct OnPanic<F: Fn()>(pub F);

impl<F: Fn()> Drop for OnPanic<F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            (self.0)();
        }
    }
}

impl<'a> Desk<'a> {
    /// Replaces the report. On one rank, a round is held at once.
    pub fn report(&self, report: Report) {
        let mut state = self.lock();
        state.report = report;
        state.fresh = true;
        if self.alone() {
            let reports = [state.report.clone()];
            state.rounds.hold(&reports, 0, self.hear);
        }
        self.reported.notify_all();
    }

    fn fail(&self, reason: String) {
        let mut state = self.lock();
        state.report.failure = Some(reason);
        state.fresh = true;
        self.reported.notify_all();
    }

    fn alone(&self) -> bool {
        self.ranks.ranks() == 1
    }

    /// One round after another, until all is over. The pause between them grows with the ranks, so that the messages a rank
    /// sends in a second stay the same.
    fn hold_rounds(&self) {
        let pause = Duration::from_millis(self.ranks.ranks().max(4) as u64);
        let mut over = false;
        while !over {
            let started = Instant::now();
            let report = self.next_report();
            over = match self.ranks.gather(&report) {
                Ok(reports) => self.lock().rounds.hold(&reports, self.ranks.rank(), self.hear),
                Err(error) => {
                    (self.hear)(News::Over(Err(error.into())));
                    true
                }
            };
            std::thread::sleep(pause.saturating_sub(started.elapsed()));
        }
    }

    fn next_report(&self) -> Report {
        let state = self.reported.wait_while(self.lock(), |state| !state.fresh);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        state.fresh = false;
        state.report.clone()
    }

    fn lock(&self) -> MutexGuard<'_, DeskState<'a>> {
        // Reports are replaced whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What all ranks know after the same rounds.
struct Rounds<'a> {
    sizes: &'a [usize],
    /// The next share to deal.
    next: usize,
    /// By rank, shares dealt to it.
    dealt: Vec<usize>,
}

impl<'a> Rounds<'a> {
    fn new(sizes: &'a [usize], ranks: usize) -> Rounds<'a> {
        Rounds { sizes, next: 0, dealt: vec![0; ranks] }
    }

    /// Draws the consequences of a round and tells `rank` its own. Returns whether all is over.
    fn hold(&mut self, reports: &[Report], rank: usize, hear: &(dyn Fn(News) + Sync)) -> bool {
        let failed = reports.iter().enumerate().find_map(|(rank, report)| Some((rank, report.failure.clone()?)));
        if let Some((rank, reason)) = failed {
            hear(News::Over(Err(RolloutError::Elsewhere { rank, reason })));
            return true;
        }
        if reports.iter().any(|report| report.stop) {
            hear(News::Over(Err(RolloutError::Stopped)));
            return true;
        }
        let mut others = Tally::default();
        reports.iter().enumerate().filter(|(from, _)| *from != rank).for_each(|(_, report)| others.add(report.tally));
        if reports.len() > 1 {
            hear(News::Others(others));
        }
        let own = self.deal(reports).swap_remove(rank);
        if !own.is_empty() {
            hear(News::Dealt(own));
        }
        let over = (others.ended + reports[rank].tally.ended) as usize == self.sizes.iter().sum::<usize>();
        if over {
            hear(News::Over(Ok(())));
        }
        over
    }

    /// By rank, the shares dealt now: one after another to the rank with the most free places, the lowest one of several.
    fn deal(&mut self, reports: &[Report]) -> Vec<Vec<usize>> {
        let current =
            reports.iter().zip(&self.dealt).map(|(report, &dealt)| if report.shares == dealt { report.places } else { 0 });
        let mut places: Vec<usize> = current.collect();
        let mut shares = vec![Vec::new(); reports.len()];
        while self.next < self.sizes.len() {
            let Some((rank, most)) = places.iter_mut().enumerate().rev().max_by_key(|(_, places)| **places) else { break };
            if *most == 0 {
                break;
            }
            *most = most.saturating_sub(self.sizes[self.next]);
            shares[rank].push(self.next);
            self.dealt[rank] += 1;
            self.next += 1;
        }
        shares
    }
}

/// What each rank has made of its shares, with the place of each in the whole: all of it on all ranks, in order.
pub(super) fn gather_in_order<T>(ranks: &Ranks, own: Vec<(usize, T)>) -> Result<Vec<T>, RolloutError>
where
    T: Serialize + serde::de::DeserializeOwned,
{
    let mut all = if ranks.ranks() == 1 { own } else { ranks.gather(&own)?.into_iter().flatten().collect() };
    all.sort_by_key(|(place, _)| *place);
    Ok(all.into_iter().map(|(_, value)| value).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn report(shares: usize, places: usize) -> Report {
        Report { shares, places, ..Report::default() }
    }

    #[test]
    fn what_fits_is_dealt_evenly_and_the_rest_to_whoever_has_room_first() {
        let sizes = [4; 7];
        let mut rounds = Rounds::new(&sizes, 2);
        assert_eq!(rounds.deal(&[report(0, 8), report(0, 8)]), [vec![0, 2], vec![1, 3]]);
        // Rank 0 has not heard of its shares yet: its places are old. Rank 1 has one free, which is enough to ask.
        assert_eq!(rounds.deal(&[report(0, 8), report(2, 1)]), [vec![], vec![4]]);
        assert_eq!(rounds.deal(&[report(2, 0), report(3, 0)]), [vec![], Vec::<usize>::new()]);
        assert_eq!(rounds.deal(&[report(2, 0), report(3, 100)]), [vec![], vec![5, 6]]);
    }

    /// Works through its shares one at a time; a slow rank ends its first only once the others have ended `others_first` attempts.
    fn work_through(
        ranks: &Ranks,
        sizes: &[usize],
        others_first: u64,
        stop_after: Option<u64>,
    ) -> Result<Vec<usize>, RolloutError> {
        let (sender, inbox) = mpsc::channel();
        let hear = move |news| {
            let _ = sender.send(news);
        };
        deal_out(ranks, sizes, &hear, |desk| {
            let mut own = Vec::new();
            let (mut done, mut tally, mut others) = (0, Tally::default(), Tally::default());
            loop {
                let places = usize::from(done == own.len());
                let stop = stop_after.is_some_and(|count| tally.ended >= count);
                desk.report(Report { shares: own.len(), places, tally, stop, failure: None });
                match inbox.recv_timeout(Duration::from_millis(5)) {
                    Ok(News::Dealt(shares)) => own.extend(shares),
                    Ok(News::Others(tally)) => others = tally,
                    Ok(News::Over(result)) => return result.map(|()| own),
                    Err(_) => {}
                }
                if done < own.len() && others.ended >= others_first {
                    tally.ended += sizes[own[done]] as u64;
                    done += 1;
                }
            }
        })
    }

    fn on_threads<T: Send>(count: usize, body: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
        let body = &body;
        std::thread::scope(|scope| {
            let threads: Vec<_> = Ranks::local(count, 60.0).into_iter().map(|ranks| scope.spawn(move || body(ranks))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_share_is_dealt_once_and_a_slow_rank_gets_fewer() {
        let sizes = [3; 40];
        let others_first = |rank| if rank == 1 { 39 * 3 } else { 0 };
        let dealt = on_threads(3, |ranks| work_through(&ranks, &sizes, others_first(ranks.rank()), None).unwrap());
        assert_eq!(dealt[1].len(), 1, "{dealt:?}");
        let mut all = dealt.concat();
        all.sort();
        assert_eq!(all, (0..40).collect::<Vec<_>>());
        assert_eq!(work_through(&Ranks::one(), &sizes, 0, None).unwrap(), (0..40).collect::<Vec<_>>());
        assert_eq!(work_through(&Ranks::one(), &[], 0, None).unwrap(), Vec::<usize>::new());
    }

    #[test]
    fn if_one_rank_is_asked_to_stop_all_stop() {
        let sizes = [1; 1000];
        let stop_after = |rank| (rank == 1).then_some(3);
        for result in on_threads(3, |ranks| work_through(&ranks, &sizes, 0, stop_after(ranks.rank()))) {
            assert!(matches!(result, Err(RolloutError::Stopped)), "{result:?}");
        }
    }

    #[test]
    fn a_rank_that_fails_or_panics_ends_the_others() {
        let results = on_threads(3, |ranks| match ranks.rank() {
            0 => {
                let panics = || deal_out(&ranks, &[1; 9], &|_| (), |_| -> Result<(), RolloutError> { panic!("on purpose") });
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err()
            }
            _ => {
                let result = work_through(&ranks, &[1; 9], 0, None);
                matches!(result, Err(RolloutError::Elsewhere { rank: 0, .. }))
            }
        });
        assert_eq!(results, [true; 3]);
    }

    #[test]
    fn what_is_gathered_comes_back_in_order() {
        let gathered =
            on_threads(2, |ranks| gather_in_order(&ranks, vec![(3 - ranks.rank(), 'a'), (ranks.rank(), 'b')]).unwrap());
        assert_eq!(gathered, [vec!['b', 'b', 'a', 'a'], vec!['b', 'b', 'a', 'a']]);
    }

    /// What a broken model sampled ends a run of several ranks no sooner than a run of one.
    #[test]
    fn a_log_probability_that_is_no_number_reaches_all_ranks() {
        let values = [-0.25, f32::NAN, f32::NEG_INFINITY];
        let gathered = on_threads(2, |ranks| {
            let mut transcript = crate::types::Transcript::default();
            transcript.push_sampled(&[1, 2, 3], &values, 7);
            gather_in_order(&ranks, vec![(ranks.rank(), transcript)]).unwrap()
        });
        for transcript in gathered.iter().flatten() {
            assert_eq!(transcript.log_probs.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), values.map(f32::to_bits));
        }
        assert_eq!(gathered.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
    }
}
