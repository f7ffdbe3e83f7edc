//! Many commands over one tree.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use super::launch::{Command, Start};
use super::pool::Number;
use super::workdir::WorkDirectory;
use super::{Engine, changes, check, supervise};
use crate::sandbox::{Change, Limits, Request, RunResult, SandboxError, SessionRequest, Snapshot, Tier, TreeSource};
use crate::types::Workspace;

pub struct Session {
    engine: Arc<Engine>,
    limits: Limits,
    tree: Option<Snapshot>,
    files: Files,
    number: Number,
}

/// Where the tree is.
enum Files {
    /// Tier A: with the session's keeper, which ends when its socket closes.
    Kept { control: OwnedFd, changes: OwnedFd, source: TreeSource },
    /// Tier B: on the machine.
    Directory(WorkDirectory),
}

impl Engine {
    pub fn session(engine: &Arc<Engine>, request: &SessionRequest) -> Result<Session, SandboxError> {
        let limits = request.limits.clone().unwrap_or_else(|| engine.limits.clone());
        limits.check()?;
        check(&request.files, &limits).map_err(SandboxError::Broken)?;
        let number = engine.number().map_err(SandboxError::Broken)?;
        let tree = request.tree.clone();
        let starting = engine.starts.enter(0).map_err(SandboxError::Broken)?;
        let start = Start {
            tier: engine.tier,
            since: Instant::now(),
            number: number.value,
            limits: &limits,
            files: &request.files,
            tree: tree.as_ref(),
        };
        let files = match engine.tier {
            Tier::A => {
                let (control, changes, source) = engine.launcher.session(&start).map_err(SandboxError::Broken)?;
                Files::Kept { control, changes, source }
            }
            Tier::B => {
                let directory = engine.launcher.directory(&start).map_err(SandboxError::Broken)?;
                Files::Directory(directory.ok_or_else(|| SandboxError::Broken("no directory for a session".to_string()))?)
            }
        };
        drop(starting);
        let mut session = Session { engine: Arc::clone(engine), limits, tree, files, number };
        if engine.tier == Tier::B && !request.files.is_empty() {
            session.lay(&request.files)?;
        }
        Ok(session)
    }
}

impl Session {
    pub fn tier(&self) -> Tier {
        self.engine.tier
    }

    pub fn run(&mut self, request: &Request) -> RunResult {
        let broken = |reason| RunResult::infrastructure(self.engine.tier, reason);
        let mut limits = request.limits.clone().unwrap_or_else(|| self.limits.clone());
        limits.workspace_bytes = self.limits.workspace_bytes;
        if request.tree.is_some() {
            return broken("a command of a session has the session's tree, not one of its own".to_string());
        }
        if let Err(reason) = check(&request.files, &limits) {
            return broken(reason);
        }
        let queued = Instant::now();
        let admitted = self.engine.pool.enter(limits.memory_bytes).and_then(|place| Ok((place, self.engine.starts.enter(0)?)));
        let (_place, starting) = match admitted {
            Ok(admitted) => admitted,
            Err(reason) => return broken(reason),
        };
        let queue_seconds = queued.elapsed().as_secs_f64();
        let start = Start {
            tier: self.engine.tier,
            since: Instant::now(),
            number: self.number.value,
            limits: &limits,
            files: &request.files,
            tree: self.tree.as_ref(),
        };
        let command = Command { argv: &request.argv, environment: &request.environment, stdin: None, evidence: false };
        let launched = match &self.files {
            Files::Kept { control, source, .. } => {
                self.engine.launcher.in_session(&start, command, control).map(|mut launched| {
                    launched.tree_source = *source;
                    launched
                })
            }
            Files::Directory(directory) => self.engine.launcher.cold_in(&start, command, Some(directory)),
        };
        match launched {
            Ok(launched) => {
                RunResult { queue_seconds, ..supervise::supervise(launched, &limits, self.engine.tier, Some(starting)).0 }
            }
            Err(reason) => broken(reason),
        }
    }

    pub fn read_changes(&mut self, max_bytes: u64) -> Result<Vec<Change>, String> {
        let tree = self.tree.as_ref().map(Snapshot::path);
        match &self.files {
            Files::Kept { changes, source: TreeSource::Overlay, .. } => changes::of_overlay(changes, tree, max_bytes),
            Files::Kept { changes, .. } => changes::of_copy(changes, tree, max_bytes),
            Files::Directory(directory) => {
                let work = changes::open_directory(&directory.path().join("work"))?;
                changes::of_copy(&work, tree, max_bytes)
            }
        }
    }

    /// Tier B: a command that does nothing lays the session's files, with the rights of a run and not with ours.
    fn lay(&mut self, files: &Workspace) -> Result<(), SandboxError> {
        let argv = ["true".to_string()].to_vec();
        let result = self.run(&Request { argv, files: files.clone(), ..Request::default() });
        if result.succeeded() {
            Ok(())
        } else {
            Err(SandboxError::Broken(format!("files of a session: {}", super::why(&result))))
        }
    }
}
