//! What a call of a collective can come to: which rank is to blame and why.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a world stopped, or why one call was refused. All ranks of a world get the same one, but for [`Failure::Misuse`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("rank {rank} (host {host}) {failure}: {reason}")]
pub struct CollectiveError {
    /// The rank in the world, also for a call of a smaller group.
    pub rank: usize,
    pub host: String,
    pub failure: Failure,
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// Its process has ended, or nothing of it comes through.
    Gone,
    /// It is alive, but others have waited for it longer than is bearable.
    Stalled,
    /// It told the others to stop.
    Aborted,
    /// It called something else than the rank that it met.
    Mismatch,
    /// The arguments of this call contradict each other. Nothing was sent: the world goes on.
    Misuse,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Failure::Gone => "is gone",
            Failure::Stalled => "hangs",
            Failure::Aborted => "stopped the job",
            Failure::Mismatch => "is at another call",
            Failure::Misuse => "was given wrong arguments",
        })
    }
}
