//! Many commands over one tree, and what they changed in it.

use serde::{Deserialize, Serialize};

use super::{Limits, Request, RunResult, Snapshot, Tier, linux};
use crate::types::Workspace;

/// What a session is started with.
#[derive(Clone, Debug, Default)]
pub struct SessionRequest {
    /// What the working directory starts from; absent: nothing.
    pub tree: Option<Snapshot>,
    /// Laid on top of the tree. They count as changes.
    pub files: Workspace,
    /// Of each command, and of the session's files together; absent: those of the settings.
    pub limits: Option<Limits>,
}

/// One tree and commands that run over it, one after another. Each has processes, limits and output of its own, and nothing
/// but files outlives it: a daemon ends with the command that started it. Dropping the session removes its tree.
///
/// A session between two commands has no process of a program's and holds no place in the pool.
pub struct Session {
    inner: linux::Session,
}

impl Session {
    pub(super) fn new(inner: linux::Session) -> Session {
        Session { inner }
    }

    pub fn tier(&self) -> Tier {
        self.inner.tier()
    }

    /// Runs a command in the session's tree, with `request.files` laid into it before. Waits for a place first.
    /// `request.limits` may differ from the session's except for `workspace_bytes`, which is the session's in tier A.
    pub fn run(&mut self, request: &Request) -> RunResult {
        self.inner.run(request)
    }

    /// What is changed, added and removed in the working directory against the tree it started from, by name. Contents of at
    /// most `max_bytes` altogether are read; what does not fit is described by its sizes.
    ///
    /// # Errors
    /// One line if the tree cannot be read: a fault of ours, not of what ran in the session.
    pub fn read_changes(&mut self, max_bytes: u64) -> Result<Vec<Change>, String> {
        self.inner.read_changes(max_bytes)
    }
}

/// One name in a session's working directory that is not as in its snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Relative to the working directory. Bytes: a program may choose names that are no text.
    pub name: Vec<u8>,
    pub now: Now,
}

/// What has the name now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Now {
    /// A regular file that is new or may have changed: the snapshot's may have the same contents.
    File { contents: Vec<u8>, executable: bool },
    /// A regular file that was not read: over `max_bytes`, or sparse and apparently so.
    Unread { apparent_bytes: u64, allocated_bytes: u64 },
    /// A symbolic link; it is not followed.
    Link { target: Vec<u8> },
    /// A directory that the snapshot does not have.
    Directory,
    /// A named pipe, a socket, a device, or a name too long or too deep to be opened. It is not opened.
    Other,
    /// A file or link of the snapshot that is gone; a directory that is gone shows as what was in it and itself.
    Removed,
}
