//! A task: something broken, tests that say so, and a patch that proves it can be mended.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The files of a small repository, by relative path with `/` separators, in path order.
pub type Workspace = BTreeMap<String, String>;

/// One bug-fixing task. The JSONL form is documented in `docs/tasks.md`; `task::read_tasks` checks it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Unique within its file: letters, digits, `-`, `_`, `.`.
    pub id: String,
    /// What the agent is told.
    pub issue: String,
    /// The repository as the agent finds it.
    #[serde(default, skip_serializing_if = "Workspace::is_empty")]
    pub files: Workspace,
    /// A directory that holds the repository, in place of `files`. In a task file relative to that file, here resolved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<PathBuf>,
    /// Test files that the agent's `run` tool runs. Never part of `files`.
    #[serde(default)]
    pub visible_tests: Workspace,
    /// Test files that exist only while an answer is graded.
    pub hidden_tests: Workspace,
    /// Names (`file.py::test_name`) of hidden tests that fail on `files` and must pass on the answer.
    #[serde(rename = "FAIL_TO_PASS")]
    pub fail_to_pass: Vec<String>,
    /// Names of hidden tests that pass on `files` and must still pass on the answer.
    #[serde(rename = "PASS_TO_PASS", default)]
    pub pass_to_pass: Vec<String>,
    /// Unified diff against `files` that makes every named test pass.
    pub gold_patch: String,
    /// The tests give the same verdict for the same files, always. Only then may a verdict be remembered.
    #[serde(default)]
    pub deterministic: bool,
    /// How the hidden tests reach the code.
    #[serde(default, skip_serializing_if = "TestRunner::is_separate")]
    pub runner: TestRunner,
    /// Files that decide how tests run and that an answer may nevertheless change or add, by path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_infrastructure: Vec<String>,
    /// Where a generated task comes from; absent for tasks from elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<TaskOrigin>,
}

/// Where the code under test runs while its tests run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TestRunner {
    /// In a process of its own, which never holds the test files, an expected value or the line for evidence.
    #[default]
    Separate,
    /// In the process of the tests, whose files lie beside it. It can forge evidence, so tests that must fail are mixed in.
    InProcess,
}

impl TestRunner {
    pub fn is_separate(&self) -> bool {
        *self == TestRunner::Separate
    }
}

/// How a generated task was drawn, so that held-out scores can be reported by what was held out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskOrigin {
    /// `bugfix-small` or `bugfix-large`.
    pub family: String,
    /// Name of the function template the task was drawn from.
    pub skeleton: String,
    /// Kind of bug, for example `comparison` or `constant`.
    pub kind: String,
    /// `train`, `names` (bug known, never with these names) or `structure` (change never seen in this skeleton).
    pub split: String,
    /// The issue line does not describe the function.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vague: bool,
    /// One-line edits that a scripted agent chooses from, one entry per place that can be wrong.
    #[serde(default)]
    pub slots: Vec<Slot>,
}

/// A place in the file that can be wrong, with every way to write it as an `N|text` edit of the file as found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slot {
    /// The task's bug sits here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub buggy: bool,
    pub right: String,
    pub wrong: Vec<String>,
}
