//! What a client asks of a runner, and what it answers.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::sandbox::{Change, Limits, Request, RunResult, TestRequest, TestRun, Tier};
use crate::types::Workspace;

/// The client's side of the handshake: that it has the token is all there is to say.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hello;

/// The runner's side of the handshake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    pub tier: Tier,
    /// Runs at the same time; more wait there.
    pub parallel: usize,
    pub guarantees: Vec<(String, String)>,
    /// The interpreter of Python tests and its version, or why there is none.
    pub python: Result<(PathBuf, String), String>,
}

/// A tree travels by its place: the runner has the same directory.
#[derive(Debug, Serialize, Deserialize)]
pub enum Ask {
    Run {
        request: Request,
        tree: Option<PathBuf>,
    },
    Tests {
        request: TestRequest,
        tree: Option<PathBuf>,
    },
    /// From here on the connection is the session's.
    Session {
        tree: Option<PathBuf>,
        files: Workspace,
        limits: Option<Limits>,
    },
    /// A command of the session.
    Command {
        request: Request,
    },
    ReadChanges {
        max_bytes: u64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// It goes on; the answer comes later.
    Working,
    Ran(RunResult),
    Tested(TestRun),
    Opened {
        tier: Tier,
    },
    Changes(Vec<Change>),
    /// What was asked for cannot be had here.
    Refused(String),
}
