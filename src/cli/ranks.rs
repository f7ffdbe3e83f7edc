//! The ranks of this process at work: a thread each, which stop together.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::CliError;
use crate::collectives::{CollectiveError, Failure};
use crate::device::cuda::DeviceFailure;
use crate::parallel::Ranks;

/// How the work of a rank ends when it does not end well.
#[derive(Debug)]
pub enum RankError {
    /// All ranks have come to this together.
    Agreed(CliError),
    /// Of this rank alone: the others are told.
    Own(CliError),
    /// The run has stopped; the others know.
    Stopped(CollectiveError),
}

impl From<CliError> for RankError {
    fn from(error: CliError) -> RankError {
        RankError::Own(error)
    }
}

impl From<CollectiveError> for RankError {
    fn from(error: CollectiveError) -> RankError {
        RankError::Stopped(error)
    }
}

/// For a run of one rank, and for what is told at the end.
impl From<RankError> for CliError {
    fn from(error: RankError) -> CliError {
        match error {
            RankError::Agreed(error) | RankError::Own(error) => error,
            RankError::Stopped(error) => error.into(),
        }
    }
}

/// What a stopped run means for whoever started it.
impl From<CollectiveError> for CliError {
    fn from(error: CollectiveError) -> CliError {
        match error.failure {
            Failure::Gone | Failure::Stalled => {
                CliError::Lost(format!("{error}. To go on, on these nodes or fewer: the same command with --resume"))
            }
            // Another try would come to the same.
            Failure::Aborted | Failure::Mismatch | Failure::Misuse => CliError::Failed(error.to_string()),
        }
    }
}

enum Event {
    Ended(Result<(), RankError>),
    /// The run has stopped, whatever the ranks of this process are at.
    Stopped(CollectiveError),
}

/// How long ranks that are at work have to hear that the run has stopped. With the time in which a lost rank is noticed (a heartbeat
/// more than `parallel.dead_after_seconds`) this is the time in which all others end: below 10 s by default.
const HEARING: Duration = Duration::from_secs(1);

/// What outlives a rank's work: dropped once the others know how it ended. Links must be, for their end is a call of all ranks.
#[derive(Default)]
pub struct Kept(Option<Box<dyn Any>>);

impl Kept {
    pub fn keep(&mut self, what: impl Any) {
        self.0 = Some(Box::new(what));
    }
}

/// Runs `work` for each of this process's places, which it is given with their number here, and with room for what it keeps. Returns
/// once all have ended.
///
/// # Errors
/// Why the run has stopped: the same on all ranks. If one is at work that cannot be interrupted when that happens, the process says so
/// and ends here: nothing is lost, for a checkpoint is whole at any moment.
pub fn run(places: Vec<Ranks>, work: impl Fn(usize, &Ranks, &mut Kept) -> Result<(), RankError> + Sync) -> Result<(), CliError> {
    let (events, inbox) = mpsc::channel();
    let (count, work) = (places.len(), &work);
    std::thread::scope(|scope| {
        for (index, ranks) in places.into_iter().enumerate() {
            let stopped = events.clone();
            ranks.on_failure(move |error| {
                // If nobody listens all ranks of this process have ended.
                let _ = stopped.send(Event::Stopped(error.clone()));
            });
            let ended = events.clone();
            let at_work = move || {
                let mut kept = Kept::default();
                let result = work_together(&ranks, || work(index, &ranks, &mut kept));
                drop(kept);
                let _ = ended.send(Event::Ended(result));
            };
            let thread = std::thread::Builder::new().name(format!("rank {index} of this node"));
            thread.spawn_scoped(scope, at_work).map_err(|error| CliError::Failed(format!("a thread for a rank: {error}")))?;
        }
        wait(&inbox, count)
    })
}

/// Runs a rank's work and lets the others know how it ended.
fn work_together(ranks: &Ranks, work: impl FnOnce() -> Result<(), RankError>) -> Result<(), RankError> {
    let result = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result,
        Err(payload) => Err(unwound(payload)),
    };
    match result {
        // A world ends together.
        Ok(()) => Ok(ranks.barrier()?),
        Err(RankError::Agreed(error)) => {
            ranks.barrier()?;
            Err(RankError::Agreed(error))
        }
        Err(RankError::Own(error)) => {
            // What fails after the run has stopped mostly fails for that reason.
            if let Some(verdict) = ranks.verdict() {
                return Err(RankError::Stopped(verdict));
            }
            ranks.abort(&error.to_string());
            Err(RankError::Own(error))
        }
        stopped => stopped,
    }
}

/// What a rank's work unwound with. A device that failed ends the run with code 1, as it does on one rank: most of what it can say (memory,
/// a wrong launch, a finding of the emulator) comes back at the same step, and a GPU that broke needs somebody to look at it. Nothing is
/// lost: `--resume` goes on, without that node too.
fn unwound(payload: Box<dyn Any + Send>) -> RankError {
    let payload = match payload.downcast::<CollectiveError>() {
        Ok(error) => return RankError::Stopped(*error),
        Err(payload) => payload,
    };
    let message = match payload.downcast::<DeviceFailure>() {
        Ok(failure) => failure.to_string(),
        Err(payload) => {
            let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
            format!("its thread panicked: {}", text.unwrap_or("no reason was given"))
        }
    };
    RankError::Own(CliError::Failed(message))
}

fn wait(inbox: &Receiver<Event>, ranks: usize) -> Result<(), CliError> {
    let (mut ended, mut verdict, mut failed, mut deadline) = (0, None, None, None);
    while ended < ranks {
        let event = match deadline {
            None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(deadline) => inbox.recv_timeout(Instant::saturating_duration_since(&deadline, Instant::now())),
        };
        match event {
            Ok(Event::Ended(result)) => {
                ended += 1;
                match result {
                    Ok(()) => {}
                    Err(RankError::Stopped(error)) => verdict = verdict.or(Some(error)),
                    // What is of this process decides its exit code.
                    Err(RankError::Own(error) | RankError::Agreed(error)) => failed = failed.or(Some(error)),
                }
            }
            Ok(Event::Stopped(error)) => {
                deadline = deadline.or(Some(Instant::now() + HEARING));
                verdict = verdict.or(Some(error));
            }
            Err(_) => {
                let error = reason(verdict, failed).unwrap_or_else(|| CliError::Failed("the ranks have ended".into()));
                std::process::exit(super::tell(&error).into());
            }
        }
    }
    reason(verdict, failed).map_or(Ok(()), Err)
}

/// What is told: a failure of this process's own, and else the line that all ranks tell of a run that has stopped.
fn reason(verdict: Option<CollectiveError>, failed: Option<CliError>) -> Option<CliError> {
    match (verdict, failed) {
        // The others' line for it also names the rank.
        (Some(verdict), Some(failed)) if verdict.reason == failed.to_string() => Some(match failed {
            CliError::Refused(_) => CliError::Refused(verdict.to_string()),
            _ => verdict.into(),
        }),
        (_, Some(failed)) => Some(failed),
        (verdict, None) => verdict.map(CliError::from),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn on(ranks: usize, work: impl Fn(usize, &Ranks) -> Result<(), RankError> + Sync) -> Result<(), CliError> {
        run(Ranks::local(ranks, 60.0), |index, ranks, _| work(index, ranks))
    }

    #[test]
    fn all_work_and_end_together() {
        let seen = Mutex::new(Vec::new());
        let result = on(3, |index, ranks| {
            let everybody = ranks.gather(&index)?;
            seen.lock().expect("a list").push((ranks.rank(), everybody));
            Ok(())
        });
        assert!(result.is_ok());
        let mut seen = seen.into_inner().expect("a list");
        seen.sort();
        assert_eq!(seen, [0, 1, 2].map(|rank| (rank, vec![0, 1, 2])));
    }

    #[test]
    fn a_failure_of_one_stops_the_others_with_its_reason() {
        for (fail, words, code) in [
            (
                &(|| Err(CliError::Failed("disk full".into()).into())) as &(dyn Fn() -> Result<(), RankError> + Sync),
                "disk full",
                1,
            ),
            (&|| Err(CliError::Refused("no such file".into()).into()), "no such file", 2),
            (&|| std::panic::resume_unwind(Box::new(String::from("index out of bounds"))), "panicked: index out of bounds", 1),
        ] {
            let error = on(3, |index, ranks| if index == 1 { fail() } else { Ok(ranks.barrier()?) }).expect_err("a failure");
            let line = error.to_string();
            assert!(line.starts_with("rank 1 (host ") && line.contains(") stopped the job: ") && line.ends_with(words), "{line}");
            assert_eq!(error.exit_code(), code);
        }
    }

    #[test]
    fn of_two_failures_at_once_each_process_tells_its_own() {
        let verdict =
            |reason: &str| CollectiveError { rank: 5, host: "b".into(), failure: Failure::Aborted, reason: reason.into() };
        let own = || Some(CliError::Failed("out of memory: lower step.micro_batch_tokens".into()));
        let told = |verdict, failed| reason(verdict, failed).expect("a reason").to_string();
        assert_eq!(told(Some(verdict("disk full")), own()), "out of memory: lower step.micro_batch_tokens");
        assert_eq!(told(Some(verdict("disk full")), None), "rank 5 (host b) stopped the job: disk full");
        let same = Some(verdict("out of memory: lower step.micro_batch_tokens"));
        assert!(told(same, own()).starts_with("rank 5 (host b) stopped the job: out of memory"));
    }

    #[test]
    fn what_fails_after_the_run_has_stopped_is_not_told() {
        let error = on(2, |index, ranks| {
            if index == 1 {
                return Err(CliError::Failed("disk full".into()).into());
            }
            let stopped = ranks.barrier().expect_err("the run has stopped");
            assert!(stopped.to_string().ends_with("disk full"), "{stopped}");
            Err(CliError::Failed("the loss is not a number".into()).into())
        });
        assert!(error.expect_err("a failure").to_string().ends_with("stopped the job: disk full"));
    }

    /// As the links of a device do, it hears how the run stands when it is dropped.
    struct Link(Ranks, mpsc::Sender<Option<CollectiveError>>);

    impl Drop for Link {
        fn drop(&mut self) {
            assert!(!std::thread::panicking(), "dropped while its thread unwinds");
            self.1.send(self.0.verdict()).expect("a test that listens");
        }
    }

    #[test]
    fn what_is_kept_is_dropped_once_the_others_know() {
        for fail in
            [&(|| Err(CliError::Failed("disk full".into()).into())) as &(dyn Fn() -> Result<(), RankError> + Sync), &|| {
                std::panic::resume_unwind(Box::new(DeviceFailure("disk full".into())))
            }]
        {
            let (sender, dropped) = mpsc::channel();
            let sender = Mutex::new(sender);
            let error = run(Ranks::local(3, 60.0), |index, ranks, kept| {
                kept.keep(Link(ranks.clone(), sender.lock().expect("a sender").clone()));
                if index == 1 { fail() } else { Ok(ranks.barrier()?) }
            });
            assert!(error.expect_err("a failure").to_string().ends_with("stopped the job: disk full"));
            let known: Vec<_> = dropped.try_iter().collect();
            assert_eq!(known.len(), 3);
            assert!(
                known.iter().all(|verdict| verdict.as_ref().is_some_and(|verdict| verdict.reason == "disk full")),
                "{known:?}"
            );
        }
    }

    #[test]
    fn what_all_agree_on_is_told_as_it_is() {
        let error = on(2, |_, _| Err(RankError::Agreed(CliError::Interrupted("stopped".into())))).expect_err("an end");
        assert_eq!((error.to_string().as_str(), error.exit_code()), ("stopped", 3));
    }

    #[test]
    fn a_rank_that_is_lost_makes_the_run_resumable() {
        let error = on(2, |index, ranks| {
            if index == 1 {
                let lost = CollectiveError { rank: 1, host: "b".into(), failure: Failure::Gone, reason: "it ended".into() };
                ranks.abort("as if it were gone");
                std::panic::resume_unwind(Box::new(lost))
            }
            Ok(ranks.barrier()?)
        });
        assert!(matches!(error, Err(CliError::Failed(_) | CliError::Lost(_))), "{error:?}");
        let gone = CollectiveError { rank: 7, host: "n7".into(), failure: Failure::Gone, reason: "its process ended".into() };
        let error = CliError::from(gone);
        assert!(error.to_string().starts_with("rank 7 (host n7) is gone: its process ended. To go on"), "{error}");
        assert_eq!(error.exit_code(), 3);
    }
}
