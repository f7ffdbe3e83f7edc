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

/// Runs `work` for each of this process's places, which it is given with their number here. Returns once all have ended.
///
/// # Errors
/// Why the run has stopped: the same on all ranks. If one is at work that cannot be interrupted when that happens, the process says so
/// and ends here: nothing is lost, for a checkpoint is whole at any moment.
pub fn run(places: Vec<Ranks>, work: impl Fn(usize, &Ranks) -> Result<(), RankError> + Sync) -> Result<(), CliError> {
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
                let result = work_together(&ranks, || work(index, &ranks));
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

/// What is told: of a run that has stopped the line that all ranks tell, with the exit code of this process's own failure.
fn reason(verdict: Option<CollectiveError>, failed: Option<CliError>) -> Option<CliError> {
    match (verdict, failed) {
        (Some(verdict), Some(CliError::Refused(_))) => Some(CliError::Refused(verdict.to_string())),
        (Some(verdict), _) => Some(verdict.into()),
        (None, failed) => failed,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn on(ranks: usize, work: impl Fn(usize, &Ranks) -> Result<(), RankError> + Sync) -> Result<(), CliError> {
        run(Ranks::local(ranks, 60.0), work)
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
