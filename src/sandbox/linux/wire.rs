//! The words between the supervisor, which lives in the caller's thread, and the process that keeps one run.
//!
//! A frame is a little-endian `u32` length and that many bytes of JSON; descriptors travel with the length. The keeper (a fork
//! of the zygote, or of the warm interpreter) closes its end before the program starts, so no program can speak here.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::io::Errno;
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
/// For descriptors that the kernel does not take at this moment.
const PATIENCE: Duration = Duration::from_secs(20);
/// Plans and orders name some dozen paths.
const LONGEST_MESSAGE: usize = 64 << 10;

/// What the zygote is told first. It answers that it is ready, or the step that failed.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    pub tier: Tier,
    /// Tier A: what the root of all its runs holds.
    pub root: RootPlan,
}

/// A process that the zygote is to fork. The keeper's end of the control socket goes with it; over that it gets its [`Job`].
#[derive(Debug, Serialize, Deserialize)]
pub struct Order {
    pub role: Role,
    /// The program's user and group id as the machine sees them; absent: those of the caller.
    pub host_id: Option<u32>,
    /// Ids of the machine, from `host_id` on, that the process may have: for the warm interpreter those of all its runs.
    pub host_ids: u32,
    /// Tier A: what lies below the working directory.
    pub tree: Option<Tree>,
}

/// A snapshot, as the zygote finds it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tree {
    pub path: PathBuf,
    pub user: u32,
    pub group: u32,
}

/// What a keeper is to do. Descriptors: standard output, standard error, then those announced by the flags.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Job {
    pub argv: Vec<String>,
    pub environment: Vec<(String, String)>,
    /// Laid into the working directory.
    pub files: Workspace,
    pub limits: Limits,
    /// RLIMIT_NPROC, which bounds what the kernel counts for the user id, not the run alone.
    pub process_rlimit: u64,
    /// Tier A: where no overlay can be had, room for a copy of the tree; absent: then the run cannot be.
    pub copy: Option<Size>,
    /// Tier B: the run's directory on the machine, with `work` and `tmp` in it.
    pub directory: Option<PathBuf>,
    /// A descriptor for evidence follows; the program finds it as number 3.
    pub evidence: bool,
    /// A descriptor of a Landlock ruleset follows.
    pub landlock: bool,
    /// So many descriptors follow of files through which a process enters control groups.
    pub cgroups: usize,
}

/// What a tree takes on a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    pub bytes: u64,
    pub entries: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Run one job as a contained program and report.
    Run,
    /// Set up a tree, then run jobs over it as they come, each in processes of its own.
    Session,
    /// Become `argv`, the warm interpreter, which contains the runs it forks.
    Serve,
}

/// What the keeper of a run reports.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The keeper is there. Descriptor: its pidfd.
    Kept,
    /// There can be no overlay of the tree. Descriptor: the working directory, to be filled with a copy and answered by a byte.
    CopyTree,
    /// The zygote is there, or a session's tree is set up. Descriptor of the latter: where its changes are, the overlay's upper directory or the copy.
    Ready,
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

impl SetUpError {
    pub fn report(&self) -> Report {
        Report::SetUp { step: self.step.clone(), errno: self.source.raw_os_error().unwrap_or(0) }
    }
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
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Sends `message` with descriptors over a socket that keeps messages apart.
pub fn send_message(socket: impl AsFd, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    send_descriptors(socket, &serde_json::to_vec(message)?, descriptors)
}

/// Sends a few bytes, in one piece, with descriptors.
pub fn send_descriptors(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors"));
    }
    // The kernel counts descriptors that are on their way for each user: a run that has filled that count is in nobody's way for
    // longer than it lives.
    let patience = Instant::now() + PATIENCE;
    loop {
        match rustix::net::sendmsg(&socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::TOOMANYREFS) if Instant::now() < patience => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Receives what [`send_message`] has sent; `None` when the other side has closed.
pub fn receive_message<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut body = vec![0; LONGEST_MESSAGE];
    let mut descriptors = Vec::new();
    let length = receive_some(&socket, &mut body, &mut descriptors)?;
    if length == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&body[..length])?, descriptors)))
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
        match receive_some(&socket, &mut buffer[filled..], descriptors)? {
            0 => return Ok(false),
            length => filled += length,
        }
    }
    Ok(true)
}

/// Bytes that were there, with their descriptors; 0 when the other side has closed.
fn receive_some(socket: impl AsFd, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(buffer)];
        let length = match rustix::net::recvmsg(&socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => received.bytes,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
        return Ok(length);
    }
}
