//! What stands in for the sandbox where there is no Linux kernel: it refuses to start, and says so.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use super::{Change, Request, RunResult, SandboxError, SessionRequest, Settings, TestRequest, TestRun, Tier};

/// Has no values: a sandbox never starts here.
pub enum Engine {}

impl Engine {
    pub fn start(_settings: &Settings) -> Result<Engine, SandboxError> {
        Err(SandboxError::Unsupported)
    }
    pub fn parallel(&self) -> usize {
        match *self {}
    }
    pub fn tier(&self) -> Tier {
        match *self {}
    }
    pub fn guarantees(&self) -> Vec<(String, String)> {
        match *self {}
    }
    pub fn python(&self) -> Result<(PathBuf, String), SandboxError> {
        match *self {}
    }
    pub fn run(&self, _request: &Request) -> RunResult {
        match *self {}
    }
    pub fn run_python_tests(&self, _request: &TestRequest) -> TestRun {
        match *self {}
    }
    pub fn session(engine: &Arc<Engine>, _request: &SessionRequest) -> Result<Session, SandboxError> {
        match **engine {}
    }
}

/// Has no values either.
pub enum Session {}

impl Session {
    pub fn tier(&self) -> Tier {
        match *self {}
    }
    pub fn run(&mut self, _request: &Request) -> RunResult {
        match *self {}
    }
    pub fn read_changes(&mut self, _max_bytes: u64) -> Result<Vec<Change>, String> {
        match *self {}
    }
}

pub fn helper_main() -> ExitCode {
    ExitCode::from(2)
}
