//! What is asked of a sandbox, and what it answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Limits, Snapshot, Tier};
use crate::types::Workspace;

/// A command to run.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The program, found on the sandbox's PATH, and its arguments. Standard input is empty.
    pub argv: Vec<String>,
    /// What the fresh working directory starts from; absent: nothing. In a session the tree is the session's.
    pub tree: Option<Snapshot>,
    /// Laid on top. They always win: whatever is in the way of one (a link, a directory) is removed.
    pub files: Workspace,
    /// Added to the small environment every program gets (PATH, HOME, TMPDIR, LANG, TZ, PYTHONHASHSEED).
    pub environment: BTreeMap<String, String>,
    /// Instead of the limits of the settings.
    pub limits: Option<Limits>,
}

/// Python tests to run: plain functions that take no argument and pass by returning.
#[derive(Clone, Debug, Default)]
pub struct TestRequest {
    /// What the fresh working directory starts from; absent: nothing.
    pub tree: Option<Snapshot>,
    /// Code and test files, laid on top of the tree; modules are importable by relative path.
    pub files: Workspace,
    /// `file.py::test_name`, run in this order in one process. A file is imported once, by its first test.
    pub tests: Vec<String>,
    /// Instead of the limits of the settings.
    pub limits: Option<Limits>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunVerdict {
    /// By itself, with the exit code of the result.
    Exited,
    /// By a signal of its own, see the result.
    Signaled,
    WallTimeout,
    CpuTimeout,
    MemoryLimit,
    ProcessLimit,
    OutputLimit,
    DiskLimit,
    /// Something of ours broke; the run says nothing about the program.
    Infrastructure(String),
}

impl RunVerdict {
    /// In snake case, as it is reported.
    pub fn name(&self) -> &'static str {
        match self {
            RunVerdict::Exited => "exited",
            RunVerdict::Signaled => "signaled",
            RunVerdict::WallTimeout => "wall_timeout",
            RunVerdict::CpuTimeout => "cpu_timeout",
            RunVerdict::MemoryLimit => "memory_limit",
            RunVerdict::ProcessLimit => "process_limit",
            RunVerdict::OutputLimit => "output_limit",
            RunVerdict::DiskLimit => "disk_limit",
            RunVerdict::Infrastructure(_) => "infrastructure",
        }
    }

    pub fn infrastructure(&self) -> bool {
        matches!(self, RunVerdict::Infrastructure(_))
    }
}

/// What bounds and counts a resource of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accounting {
    /// The kernel, in a control group of the run's own.
    CgroupV2,
    CgroupV1,
    /// The supervisor, which looks every few milliseconds, beside the kernel's limits per process.
    Sampled,
}

/// How the working directory came to hold its tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TreeSource {
    /// There was no tree.
    Empty,
    /// The snapshot lies below, read-only and shared; changes are the run's own.
    Overlay,
    /// A copy of the snapshot.
    Copy,
}

/// What held each guarantee that is not the same for all runs of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mechanisms {
    pub memory: Accounting,
    pub processes: Accounting,
    pub tree: TreeSource,
    /// The run saw a /proc of its own, with its own processes only. Without one, tier A has none and tier B the machine's.
    pub own_procfs: bool,
}

/// Limits that a run met, also where something else gave the verdict: a fork that failed, a write that found no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsHit {
    pub wall: bool,
    pub cpu: bool,
    pub memory: bool,
    pub processes: bool,
    pub output: bool,
    pub disk: bool,
}

impl LimitsHit {
    /// In the words of the verdicts.
    pub fn names(&self) -> Vec<&'static str> {
        let all = [
            (self.wall, RunVerdict::WallTimeout),
            (self.cpu, RunVerdict::CpuTimeout),
            (self.memory, RunVerdict::MemoryLimit),
            (self.processes, RunVerdict::ProcessLimit),
            (self.output, RunVerdict::OutputLimit),
            (self.disk, RunVerdict::DiskLimit),
        ];
        all.into_iter().filter(|(hit, _)| *hit).map(|(_, verdict)| verdict.name()).collect()
    }
}

/// One run: how it ended, what it used, what it wrote.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    pub verdict: RunVerdict,
    /// Present if the program ended by itself, also where a limit gave the verdict.
    pub exit_code: Option<i32>,
    /// Present if a signal ended the program; ours when a limit was reached.
    pub signal: Option<i32>,
    /// From the program's start, without queue and set-up.
    pub wall_seconds: f64,
    /// Of all processes of the run.
    pub cpu_seconds: f64,
    /// The control group's peak; without one, the larger of the sampled private memory of all processes and the largest
    /// resident set of one.
    pub peak_bytes: u64,
    /// First and last half of `output_bytes`; raw bytes.
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// Bytes written, kept or not.
    pub stdout_total: u64,
    pub stderr_total: u64,
    /// Something was dropped from standard output or error.
    pub truncated: bool,
    pub limits_hit: LimitsHit,
    /// Waiting for a place in the pool; counts against no limit.
    pub queue_seconds: f64,
    /// From the place in the pool to the program's start: namespaces, the tree, files.
    pub set_up_seconds: f64,
    pub tier: Tier,
    pub mechanisms: Mechanisms,
}

impl RunResult {
    pub(super) fn infrastructure(tier: Tier, reason: String) -> RunResult {
        RunResult::empty(tier, RunVerdict::Infrastructure(reason))
    }

    /// Of a run that used nothing and wrote nothing.
    pub fn empty(tier: Tier, verdict: RunVerdict) -> RunResult {
        RunResult {
            verdict,
            exit_code: None,
            signal: None,
            wall_seconds: 0.0,
            cpu_seconds: 0.0,
            peak_bytes: 0,
            stdout: Vec::new(),
            stderr: Vec::new(),
            stdout_total: 0,
            stderr_total: 0,
            truncated: false,
            limits_hit: LimitsHit::default(),
            queue_seconds: 0.0,
            set_up_seconds: 0.0,
            tier,
            mechanisms: Mechanisms {
                memory: Accounting::Sampled,
                processes: Accounting::Sampled,
                tree: TreeSource::Empty,
                own_procfs: false,
            },
        }
    }

    /// The program ended by itself with exit code 0 and within every limit.
    pub fn succeeded(&self) -> bool {
        self.verdict == RunVerdict::Exited && self.exit_code == Some(0)
    }
}

/// A run of Python tests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TestRun {
    /// Tracebacks of failed tests are on its standard error.
    pub result: RunResult,
    /// What the runner saw of each test. Only positive evidence counts: a named test that is missing here has failed.
    pub outcomes: BTreeMap<String, bool>,
    /// The run was forked off the warm interpreter.
    pub started_warm: bool,
}

impl TestRun {
    /// Whether the runner saw this test return.
    pub fn passed(&self, test: &str) -> bool {
        self.outcomes.get(test).copied().unwrap_or(false)
    }
}
