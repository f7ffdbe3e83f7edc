//! What the ranks of a run say to each other on the host: numbers to be summed, and values of any kind, as JSON.
//!
//! Everything above this room speaks through it, so that one rank, threads and processes are the same to a stage.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::collectives::{
    CollectiveError, Collectives, Failure, LocalCollectives, Reduction, TcpCollectives, Traffic, local_world,
};

/// The most bytes that one rank's value may take as JSON.
const MOST_BYTES: u64 = 1 << 31;
/// In the place of a length: this rank has no value to give.
const NO_VALUE: u64 = u64::MAX;

/// One rank's place among those of a run, or of a part of them. Clones are the same place.
///
/// All ranks make the same calls in the same order; each returns an error once the run has stopped.
#[derive(Clone)]
pub struct Ranks {
    pub(super) host: Host,
}

#[derive(Clone)]
pub(super) enum Host {
    Local(LocalCollectives),
    Tcp(TcpCollectives),
}

/// Evaluates `$call` with the collectives, of whichever kind they are.
macro_rules! over_host {
    ($host:expr, $collectives:ident => $call:expr) => {
        match $host {
            Host::Local($collectives) => $call,
            Host::Tcp($collectives) => $call,
        }
    };
}

impl Ranks {
    /// A run of one rank.
    pub fn one() -> Ranks {
        let [host] =
            <[LocalCollectives; 1]>::try_from(local_world(1, f64::INFINITY)).unwrap_or_else(|_| unreachable!("a world of one"));
        Ranks { host: Host::Local(host) }
    }

    /// `ranks` threads of this process, which each take one place. A rank for which others have waited `stall_seconds` is taken for hung.
    pub fn local(ranks: usize, stall_seconds: f64) -> Vec<Ranks> {
        local_world(ranks, stall_seconds).into_iter().map(|host| Ranks { host: Host::Local(host) }).collect()
    }

    /// Processes that have met.
    pub fn tcp(host: TcpCollectives) -> Ranks {
        Ranks { host: Host::Tcp(host) }
    }

    /// From 0.
    pub fn rank(&self) -> usize {
        over_host!(&self.host, host => host.rank())
    }

    pub fn ranks(&self) -> usize {
        over_host!(&self.host, host => host.world_size())
    }

    /// Whether this is rank 0, which writes what is written once.
    pub fn first(&self) -> bool {
        self.rank() == 0
    }

    /// Names of the hosts by rank.
    pub fn hosts(&self) -> Vec<String> {
        over_host!(&self.host, host => host.hosts())
    }

    /// Each of `numbers` becomes its sum over the ranks, in rank order.
    pub fn sum(&self, numbers: &mut [f64]) -> Result<(), CollectiveError> {
        over_host!(&self.host, host => host.all_reduce(numbers, Reduction::Sum))
    }

    /// Whether it holds on any rank.
    pub fn any(&self, holds: bool) -> Result<bool, CollectiveError> {
        let mut found = [u64::from(holds)];
        over_host!(&self.host, host => host.all_reduce(&mut found, Reduction::Max))?;
        Ok(found[0] > 0)
    }

    /// The values of all ranks, by rank. They travel as JSON, in which a float that is not finite cannot be read again.
    ///
    /// # Errors
    /// Also if a rank's value has no JSON, more than 2 GiB of it, or JSON that is no `T`: on all ranks, with that rank's name.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>, CollectiveError> {
        let ranks = self.ranks();
        let own = serde_json::to_vec(value).ok();
        let mut lengths = vec![0; ranks];
        over_host!(&self.host, host => host.all_gather(&[length_of(&own)], &mut lengths, &vec![1; ranks]))?;
        let lengths = (0..ranks).map(|rank| self.check_length(rank, lengths[rank])).collect::<Result<Vec<_>, _>>()?;
        let mut all = vec![0u8; lengths.iter().sum()];
        over_host!(&self.host, host => host.all_gather(&own.unwrap_or_default(), &mut all, &lengths))?;
        let mut rest = all.as_slice();
        let mut next = |from: usize| {
            let (bytes, after) = rest.split_at(lengths[from]);
            rest = after;
            self.parse(from, bytes)
        };
        (0..ranks).map(&mut next).collect()
    }

    /// Rank 0's value, on all ranks. Rank 0 gives one, what the others give is not looked at.
    ///
    /// # Errors
    /// As [`Ranks::gather`]; also if rank 0 gives none.
    pub fn broadcast<T: Serialize + DeserializeOwned>(&self, value: Option<&T>) -> Result<T, CollectiveError> {
        let own = value.filter(|_| self.first()).and_then(|value| serde_json::to_vec(value).ok());
        let mut length = [length_of(&own)];
        over_host!(&self.host, host => host.broadcast(&mut length, 0))?;
        let mut bytes = own.unwrap_or_default();
        bytes.resize(self.check_length(0, length[0])?, 0);
        over_host!(&self.host, host => host.broadcast(&mut bytes, 0))?;
        self.parse(0, &bytes)
    }

    /// Returns once all ranks have called it. It is the last call of a run: a rank that has left cannot be waited for.
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        over_host!(&self.host, host => host.barrier())
    }

    /// Those that name the same `group` form one, in the order of their ranks here.
    pub fn split(&self, group: usize) -> Result<Ranks, CollectiveError> {
        Ok(Ranks {
            host: match &self.host {
                Host::Local(host) => Host::Local(host.split(group)?),
                Host::Tcp(host) => Host::Tcp(host.split(group)?),
            },
        })
    }

    /// Why the run has stopped, once this rank knows that it has.
    pub fn verdict(&self) -> Option<CollectiveError> {
        over_host!(&self.host, host => host.verdict())
    }

    /// What this rank has handed to these calls so far; those of a split count for themselves.
    pub fn traffic(&self) -> Traffic {
        over_host!(&self.host, host => host.traffic())
    }

    /// Stops the whole run: every call of every rank returns an error that names this rank and says why.
    pub fn abort(&self, reason: &str) {
        over_host!(&self.host, host => host.abort(reason));
    }

    /// Stops the whole run with an error that blames some rank.
    pub(super) fn stop(&self, error: CollectiveError) {
        over_host!(&self.host, host => host.stop(error));
    }

    /// Runs `told` once, as soon as the run has stopped, on whichever thread learns of it first: what waits outside of these calls can
    /// be woken so. It must not wait for other ranks.
    pub fn on_failure(&self, told: impl FnOnce(&CollectiveError) + Send + 'static) {
        over_host!(&self.host, host => host.on_failure(Box::new(told)));
    }

    /// An error that blames `rank` of this group.
    pub(super) fn error(&self, rank: usize, failure: Failure, reason: impl Into<String>) -> CollectiveError {
        over_host!(&self.host, host => host.error(rank, failure, reason.into()))
    }

    fn check_length(&self, rank: usize, length: u64) -> Result<usize, CollectiveError> {
        let problem = match length {
            NO_VALUE => "it has no value to send".to_string(),
            0..=MOST_BYTES => return Ok(length as usize),
            _ => format!("its value takes {length} bytes, at most {MOST_BYTES} can be sent"),
        };
        Err(self.error(rank, Failure::Misuse, problem))
    }

    /// All ranks parse the same bytes, so they fail together.
    fn parse<T: DeserializeOwned>(&self, from: usize, bytes: &[u8]) -> Result<T, CollectiveError> {
        serde_json::from_slice(bytes)
            .map_err(|problem| self.error(from, Failure::Mismatch, format!("what it sent cannot be read: {problem}")))
    }
}

fn length_of(bytes: &Option<Vec<u8>>) -> u64 {
    bytes.as_ref().map_or(NO_VALUE, |bytes| bytes.len() as u64)
}
