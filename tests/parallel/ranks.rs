//! What ranks say to each other on the host.

use std::sync::mpsc::channel;

use learner::collectives::{CollectiveError, Failure};
use learner::parallel::Ranks;
use serde::ser::Error;
use serde::{Deserialize, Serialize, Serializer};

use crate::support::{local, on_ranks, tcp};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Said {
    name: String,
    numbers: Vec<f64>,
}

fn said(rank: usize) -> Said {
    Said { name: "x".repeat(rank * 1000), numbers: vec![0.1 + rank as f64; rank] }
}

#[test]
fn values_of_any_kind_are_gathered_and_broadcast() {
    for ranks in [local(3), tcp(3), vec![Ranks::one()]] {
        let count = ranks.len();
        on_ranks(ranks, |ranks| {
            let rank = ranks.rank();
            assert_eq!((ranks.ranks(), ranks.first(), ranks.hosts().len()), (count, rank == 0, count));
            assert_eq!(ranks.gather(&said(rank)).expect("all ranks"), (0..count).map(said).collect::<Vec<_>>());
            let own = (rank == 0).then(|| said(7));
            assert_eq!(ranks.broadcast(own.as_ref()).expect("all ranks"), said(7));
            let mut numbers = [1.0, rank as f64];
            ranks.sum(&mut numbers).expect("all ranks");
            assert_eq!(numbers, [count as f64, (0..count).sum::<usize>() as f64]);
            assert!(ranks.any(rank + 1 == count).expect("all ranks"));
            assert!(!ranks.any(false).expect("all ranks"));
            let half = ranks.split(rank / 2).expect("all ranks");
            assert_eq!(half.gather(&rank).expect("all of the half").len(), if rank < 2 { 2.min(count) } else { 1 });
            ranks.barrier().expect("all ranks");
        });
    }
}

/// A value without JSON on rank 1.
struct Mute(bool);

impl Serialize for Mute {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0 { Err(S::Error::custom("mute")) } else { serializer.serialize_unit() }
    }
}

impl<'de> Deserialize<'de> for Mute {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Mute, D::Error> {
        <()>::deserialize(deserializer).map(|()| Mute(false))
    }
}

/// All ranks learn who it is, and can go on.
#[test]
fn a_rank_without_a_value_is_named_everywhere() {
    let errors = on_ranks(local(3), |ranks| {
        let error = ranks.gather(&Mute(ranks.rank() == 1)).err().expect("no value of rank 1");
        // JSON has no number that is not finite.
        let unread = ranks.gather(&if ranks.rank() == 2 { f64::NAN } else { 1.0 }).expect_err("no value of rank 2");
        let nothing = ranks.broadcast::<u32>(None).expect_err("no value of rank 0");
        ranks.barrier().expect("the world goes on");
        [error, unread, nothing]
    });
    for [error, unread, nothing] in errors {
        assert_eq!((error.rank, error.failure), (1, Failure::Misuse));
        assert!(error.to_string().ends_with("it has no value to send"), "{error}");
        assert_eq!((unread.rank, unread.failure), (2, Failure::Mismatch));
        assert!(unread.to_string().contains("what it sent cannot be read"), "{unread}");
        assert_eq!((nothing.rank, nothing.failure), (0, Failure::Misuse));
    }
}

#[test]
fn a_failure_is_told_to_who_asked() {
    for ranks in [local(2), tcp(2)] {
        let errors = on_ranks(ranks, |ranks| {
            let (sender, told) = channel::<CollectiveError>();
            ranks.on_failure(move |error| drop(sender.send(error.clone())));
            if ranks.rank() == 1 {
                ranks.abort("the disk is full");
            }
            let error = told.recv_timeout(crate::support::PATIENCE).expect("to be told");
            assert_eq!(ranks.barrier(), Err(error.clone()));
            error
        });
        for error in errors {
            assert_eq!((error.rank, error.failure), (1, Failure::Aborted));
            assert!(error.to_string().ends_with("the disk is full"), "{error}");
        }
    }
}
