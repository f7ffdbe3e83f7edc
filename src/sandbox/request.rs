//! What is asked of a sandbox, and what it answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Limits, Tier};
use crate::types::{TestRunner, Workspace};

/// A command to run.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The program, found on the sandbox's PATH, and its arguments. Standard input is empty.
    pub argv: Vec<String>,
    /// Laid into the fresh working directory.
    pub files: Workspace,
    /// Added to the small environment every program gets (PATH, HOME, TMPDIR, LANG, TZ, PYTHONHASHSEED).
    pub environment: BTreeMap<String, String>,
    /// Instead of the limits of the settings.
    pub limits: Option<Limits>,
}

/// Python tests to run: plain functions that take no argument and pass by returning.
#[derive(Clone, Debug, Default)]
pub struct TestRequest {
    /// The code under test, laid into the fresh working directory; modules are importable by relative path.
    pub files: Workspace,
    /// The files of the tests.
    pub test_files: Workspace,
    /// `file.py::test_name`, run in this order in one process. A file is imported once, by its first test.
    pub tests: Vec<String>,
    /// Where the code under test runs; see `linux/separate.py` for what passes between separate processes.
    pub runner: TestRunner,
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

/// One run: how it ended, what it used, what it wrote.
#[derive(Clone, Debug, PartialEq)]
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
    /// The larger of the sampled private memory of all processes and the largest resident set of one.
    pub peak_bytes: u64,
    /// First and last half of `output_bytes`; raw bytes.
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// Bytes written, kept or not.
    pub stdout_total: u64,
    pub stderr_total: u64,
    /// Something was dropped from standard output or error.
    pub truncated: bool,
    pub tier: Tier,
}

impl RunResult {
    pub(super) fn infrastructure(tier: Tier, reason: String) -> RunResult {
        RunResult {
            verdict: RunVerdict::Infrastructure(reason),
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
            tier,
        }
    }

    /// The program ended by itself with exit code 0 and within every limit.
    pub fn succeeded(&self) -> bool {
        self.verdict == RunVerdict::Exited && self.exit_code == Some(0)
    }
}

/// A run of Python tests.
#[derive(Clone, Debug, PartialEq)]
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
