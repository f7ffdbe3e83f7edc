//! The words between the supervisor, which lives in the caller's thread, and the process that keeps one run.
//!
//! A frame is a little-endian `u32` length and that many bytes of JSON; descriptors travel with the length. The keeper (the
//! helper, or the warm interpreter's fork) closes its end before the program starts, so no program can speak here.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::root::RootPlan;
use crate::sandbox::{Limits, Tier};
use crate::types::Workspace;

/// The most descriptors in one frame.
const DESCRIPTORS: usize = 8;
/// A frame longer than this is a mistake, not a message.
const LONGEST: usize = 256 << 20;

/// What the helper is to do. Descriptors: standard output, standard error, then those announced by the flags.
#[derive(Debug, Serialize, Deserialize)]
pub struct Job {
    pub tier: Tier,
    pub role: Role,
    pub argv: Vec<String>,
    pub environment: Vec<(String, String)>,
    /// Laid into the working directory.
    pub files: Workspace,
    /// What the program reads from standard input; absent: nothing.
    pub stdin: Option<String>,
    pub limits: Limits,
    /// RLIMIT_NPROC, which bounds what the kernel counts for the user id, not the run alone.
    pub process_rlimit: u64,
    /// The program's user and group id as the machine sees them; absent: those of the caller.
    pub host_id: Option<u32>,
    /// Ids of the machine that the warm interpreter may give to its runs, from `host_id` on.
    pub host_ids: u32,
    /// Tier A: what the own root holds.
    pub root: RootPlan,
    /// Tier B: the run's directory on the machine, with `work` and `tmp` in it.
    pub directory: Option<PathBuf>,
    /// A descriptor for evidence follows; the program finds it as number 3.
    pub evidence: bool,
    /// A descriptor of a Landlock ruleset follows.
    pub landlock: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Run `argv` as a contained program and report.
    Run,
    /// Become `argv`, the warm interpreter, which contains the runs it forks.
    Serve,
}

/// What the keeper of a run reports.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The program is about to start. Descriptors: the keeper's pidfd, then its /proc if `own_proc`, then perhaps its
    /// writable tree.
    Started {
        own_proc: bool,
        /// What the process that now becomes the program has used for the set-up.
        #[serde(default)]
        cpu_seconds: f64,
    },
    /// The program has ended and nothing of it is left.
    Finished {
        /// As from wait(2).
        status: i32,
        cpu_seconds: f64,
        /// Largest resident set of one process.
        peak_bytes: u64,
        /// The most processes that the keeper saw at once: left when the program had ended, or waiting together to be reaped.
        processes: u64,
        /// The writable tree had no room left.
        disk_full: bool,
    },
    /// The run could not be set up.
    SetUp { step: String, errno: i32 },
}

/// A step of a set-up that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct SetUpError {
    pub step: String,
    pub source: io::Error,
}

/// Names the step of a set-up that failed.
pub trait Step<T> {
    fn step(self, step: impl Into<String>) -> Result<T, SetUpError>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, step: impl Into<String>) -> Result<T, SetUpError> {
        self.map_err(|error| SetUpError { step: step.into(), source: error.into() })
    }
}

/// Sends `message` with descriptors.
pub fn send(socket: impl AsFd, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).map_err(|_| io::Error::other("message too long"))?;
    send_descriptors(&socket, &length.to_le_bytes(), descriptors)?;
    let mut rest = &body[..];
    while !rest.is_empty() {
        match rustix::net::send(&socket, rest, SendFlags::NOSIGNAL) {
            Ok(sent) => rest = &rest[sent..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Sends a few bytes, in one piece, with descriptors.
pub fn send_descriptors(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors"));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one frame; `None` when the other side has closed.
pub fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut length = [0; 4];
    let mut descriptors = Vec::new();
    if !receive_exactly(&socket, &mut length, &mut descriptors)? {
        return Ok(None);
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(io::Error::other("message too long"));
    }
    let mut body = vec![0; length];
    if !receive_exactly(&socket, &mut body, &mut descriptors)? {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&body)?, descriptors)))
}

/// Fills `buffer`; false when the other side closed before it was full.
fn receive_exactly(socket: impl AsFd, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<bool> {
    let mut filled = 0;
    while filled < buffer.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut buffer[filled..])];
        match rustix::net::recvmsg(&socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) if received.bytes == 0 => return Ok(false),
            Ok(received) => filled += received.bytes,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
    }
    Ok(true)
}
