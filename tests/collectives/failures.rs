//! A rank that is lost stops all others with the same line, whatever they wait for.

use std::time::{Duration, Instant};

use learner::collectives::{CollectiveError, Collectives, Failure, Liveness, Reduction, local_world};

use crate::support::{CALM, PATIENCE, in_both, on_ranks, tcp};

/// Short enough for a test, long enough for a machine where a thread may wait seconds for its turn.
const SHORT_STALL: Liveness = Liveness { heartbeat_seconds: 0.2, dead_after_seconds: 30.0, stall_seconds: 3.0 };

/// All ranks but one say the same of it.
#[track_caller]
fn all_blame(results: Vec<Option<CollectiveError>>, rank: usize, failure: Failure) -> String {
    let mut errors: Vec<CollectiveError> = results.into_iter().flatten().collect();
    let first = errors.pop().expect("an error");
    assert!(!errors.is_empty(), "only {first}");
    assert!(errors.iter().all(|error| *error == first), "{first}, but {errors:?}");
    assert_eq!((first.rank, first.failure), (rank, failure), "{first}");
    first.reason
}

#[test]
fn abort_frees_everyone_who_waits() {
    for (name, results) in in_both!(5, |place| {
        let group = place.split(place.rank() / 3).expect("a group");
        if place.rank() == 3 {
            std::thread::sleep(Duration::from_millis(200));
            place.abort("the disk is full");
            place.abort("this comes too late");
        }
        // Some wait in the world, some in a group, one for a message.
        let error = match place.rank() {
            0 | 1 | 3 => place.barrier(),
            2 => group.receive(&mut [0u8], 0),
            _ => group.broadcast(&mut [0u8; 3], 0),
        };
        let error = error.expect_err("the world has stopped");
        assert_eq!(group.barrier().expect_err("for good"), error);
        assert_eq!(place.split(0).err(), Some(error.clone()));
        Some(error)
    }) {
        assert_eq!(all_blame(results, 3, Failure::Aborted), "the disk is full", "{name}");
    }
}

#[test]
fn a_rank_that_hangs_is_named_at_the_end_of_the_chain() {
    let work =
        |rank: usize, waits: &dyn Fn(usize) -> Result<(), CollectiveError>, world: &dyn Fn() -> Result<(), CollectiveError>| {
            // 0 waits for 1, 1 for 2, 2 for 3; 3 is busy with something else until the others have given up.
            let start = Instant::now();
            match rank {
                3 => {
                    while world().is_ok() {
                        assert!(start.elapsed() < PATIENCE, "nobody was stopped");
                        std::thread::sleep(Duration::from_millis(50));
                    }
                    None
                }
                rank => waits(rank + 1).err().inspect(|_| assert!(start.elapsed().as_secs_f64() > 2.9, "too soon")),
            }
        };
    // A rank learns of a stop from any call: here one that is refused, or not, before anything is sent.
    macro_rules! hang {
        ($places:expr) => {
            on_ranks($places, |place| {
                let alone = place.split(place.rank()).expect("a group of one");
                work(place.rank(), &|from| place.receive(&mut [0u8], from), &|| alone.barrier())
            })
        };
    }
    for (name, results) in [("local", hang!(local_world(4, 3.0))), ("tcp", hang!(tcp(4, SHORT_STALL)))] {
        let reason = all_blame(results, 3, Failure::Stalled);
        assert!(reason.starts_with("rank 2 has waited for it in send for "), "{name}: {reason}");
    }
}

#[test]
fn ranks_that_wait_for_each_other_are_named() {
    for (name, results) in [
        ("local", on_ranks(local_world(3, 3.0), |place| place.receive(&mut [0u8], (place.rank() + 1) % 3).err())),
        ("tcp", on_ranks(tcp(3, SHORT_STALL), |place| place.receive(&mut [0u8], (place.rank() + 1) % 3).err())),
    ] {
        let first = results[0].clone().expect("an error");
        assert_eq!(first.failure, Failure::Stalled);
        assert!(first.reason.contains(" wait for each other, for "), "{name}: {first}");
        assert!(results.iter().all(|error| error.as_ref() == Some(&first)));
    }
}

#[test]
fn a_rank_at_another_call_is_named_by_all() {
    for (name, results) in in_both!(3, |place| {
        let mut values = [1.0f32; 6];
        let result = match place.rank() {
            2 => place.all_reduce(&mut values[..3], Reduction::Max),
            _ => place.all_reduce(&mut values[..3], Reduction::Sum),
        };
        result.err().or_else(|| place.barrier().err())
    }) {
        // Whoever looks first: rank 2 blames one of the others, or one of them blames it.
        let first = results[0].clone().expect("an error");
        assert_eq!(first.failure, Failure::Mismatch, "{name}: {first}");
        assert!(results.iter().all(|error| error.as_ref() == Some(&first)), "{name}: {results:?}");
        assert!(
            first.reason.contains("all_reduce (f32, max, 4 bytes)") && first.reason.contains("(f32, sum, 4 bytes)"),
            "{first}"
        );
    }
    for (name, results) in in_both!(2, |place| {
        let mut values = [1.0f32; 6];
        let length = 4 + place.rank();
        place.broadcast(&mut values[..length], 0).err().or_else(|| place.barrier().err())
    }) {
        let reason = all_blame(results, 0, Failure::Mismatch);
        assert_eq!(reason, "broadcast (f32, 16 bytes) where rank 1 is at broadcast (f32, 20 bytes)", "{name}");
    }
}

#[test]
fn a_rank_that_panics_or_leaves_is_named() {
    for panics in [true, false] {
        let expected = if panics { Failure::Aborted } else { Failure::Gone };
        // Rank 1 gives up its place; the others have waited for it or begin to wait later.
        macro_rules! leave {
            ($places:expr) => {
                on_ranks($places, |place| {
                    if place.rank() == 1 {
                        let thread = std::thread::spawn(move || {
                            let _place = place;
                            if panics {
                                std::panic::resume_unwind(Box::new("planted"));
                            }
                        });
                        assert_eq!(thread.join().is_err(), panics);
                        return None;
                    }
                    place.all_reduce(&mut [0.0f32; 100], Reduction::Sum).err()
                })
            };
        }
        let soon = Liveness { heartbeat_seconds: 0.5, dead_after_seconds: 3.0, ..CALM };
        for (name, results) in [("local", leave!(local_world(4, 90.0))), ("tcp", leave!(tcp(4, soon)))] {
            let reason = all_blame(results, 1, expected);
            assert!(!panics || reason == "its thread panicked", "{name}: {reason}");
        }
    }
}
