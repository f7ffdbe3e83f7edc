//! An answer in, a verdict out: task + sandbox.
//!
//! ```text
//! answer -> may it be an answer at all? -> clean tree: answer first, tests last -> fresh sandbox run -> evidence per test
//! ```
//!
//! Only positive evidence counts: each named test must have been seen to return, in a run that ended by itself with exit code 0.
//! [`Verdict::Infrastructure`] comes from the sandbox's supervisor alone; whatever an answer prints, does or weighs ends in
//! passed or failed.

mod answer;
mod check;
mod memo;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::sandbox::{RunVerdict, Sandbox, TestRequest, TestRun};
use crate::types::{Task, Verdict, Workspace};

pub use check::TaskCheck;
use memo::Memo;

/// The `[grader]` section of a run file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Remember what tests gave for the same files, where the task declares them deterministic.
    pub remember: bool,
    /// The most that is kept of what a test run wrote, in bytes: the last ones.
    pub output_bytes: usize,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { remember: true, output_bytes: 4096 }
    }
}

/// A verdict and how it came about.
#[derive(Clone, Debug, PartialEq)]
pub struct Graded {
    pub verdict: Verdict,
    /// Nothing was run: the same answer had been graded before.
    pub remembered: bool,
    /// The run was stopped by the wall clock, so another time it might end otherwise.
    pub wall_limit_hit: bool,
}

/// What the agent's `run` tool found.
#[derive(Clone, Debug, PartialEq)]
pub struct VisibleRun {
    pub failed: usize,
    pub total: usize,
    /// Something of ours broke; the counts then mean nothing.
    pub infrastructure: Option<String>,
    pub wall_limit_hit: bool,
    /// The end of what the tests wrote to standard error and output, with tracebacks of failed tests.
    pub output: String,
    pub remembered: bool,
}

/// Test runs so far, over grading and the `run` tool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    pub executed: u64,
    pub remembered: u64,
}

type Runner = Box<dyn Fn(&TestRequest) -> TestRun + Send + Sync>;

/// Grades answers; shared by all threads of a run.
pub struct Grader {
    runner: Runner,
    settings: Settings,
    memo: Memo,
}

/// What is kept of a test run.
#[derive(Clone, Debug)]
struct Outcome {
    ended: RunVerdict,
    exit_code: Option<i32>,
    passed: BTreeMap<String, bool>,
    output: String,
}

impl Outcome {
    /// The tests that were not seen to pass. In a run that did not end well by itself, all of them: what was reported before
    /// proves nothing about code that went on to break the rules.
    fn failed<'a>(&self, tests: &'a [String]) -> Vec<&'a String> {
        let sound = self.ended == RunVerdict::Exited && matches!(self.exit_code, Some(0 | 1));
        tests.iter().filter(|test| !sound || self.passed.get(*test) != Some(&true)).collect()
    }

    fn wall_limit_hit(&self) -> bool {
        self.ended == RunVerdict::WallTimeout
    }
}

impl Grader {
    pub fn new(sandbox: Sandbox, settings: Settings) -> Grader {
        Grader::with_runner(move |request| sandbox.run_python_tests(request), settings)
    }

    /// Over anything that runs tests; for trying the grader without a sandbox.
    pub fn with_runner(runner: impl Fn(&TestRequest) -> TestRun + Send + Sync + 'static, settings: Settings) -> Grader {
        Grader { runner: Box::new(runner), settings, memo: Memo::default() }
    }

    /// Runs exactly the hidden tests that `task` names over the answer `workspace` (the files of the task after the agent's edits).
    pub fn grade(&self, task: &Task, workspace: &Workspace) -> Graded {
        if let Err(reason) = answer::check(task, workspace) {
            return Graded { verdict: Verdict::Failed(reason), remembered: false, wall_limit_hit: false };
        }
        let tests: Vec<String> = task.fail_to_pass.iter().chain(&task.pass_to_pass).cloned().collect();
        let (outcome, remembered) = self.run(task, answer::laid_out(task, workspace, &task.hidden_tests), &tests);
        Graded { verdict: verdict(&outcome, &tests), remembered, wall_limit_hit: outcome.wall_limit_hit() }
    }

    /// Runs the visible tests over the files as they stand.
    pub fn run_visible(&self, task: &Task, workspace: &Workspace) -> VisibleRun {
        let tests = visible_tests(task);
        let mut seen = VisibleRun {
            failed: tests.len(),
            total: tests.len(),
            infrastructure: None,
            wall_limit_hit: false,
            output: String::new(),
            remembered: false,
        };
        if let Err(reason) = answer::check(task, workspace) {
            seen.output = reason;
            return seen;
        }
        if tests.is_empty() {
            return seen;
        }
        let (outcome, remembered) = self.run(task, answer::laid_out(task, workspace, &task.visible_tests), &tests);
        if let RunVerdict::Infrastructure(reason) = &outcome.ended {
            seen.infrastructure = Some(reason.clone());
        }
        seen.failed = outcome.failed(&tests).len();
        seen.wall_limit_hit = outcome.wall_limit_hit();
        seen.output = match &outcome.ended {
            RunVerdict::Exited => outcome.output.clone(),
            ended => format!("{}\n[stopped: {}]", outcome.output, ended.name()),
        };
        seen.remembered = remembered;
        seen
    }

    /// Forgets what was remembered and counts from 0. Called between steps and evaluations, so that memory stays bounded and
    /// the counts of a step do not depend on where a run was resumed.
    pub fn forget(&self) {
        self.memo.forget();
    }

    /// How many test runs were executed and how many were answered from memory, since last forgotten.
    pub fn counters(&self) -> Counters {
        self.memo.counters()
    }

    /// Seconds that test runs have taken since last forgotten, in all threads together.
    pub fn test_seconds(&self) -> f64 {
        self.memo.seconds()
    }

    /// Runs `tests` over `files`, or remembers what they gave. True if remembered.
    fn run(&self, task: &Task, files: Workspace, tests: &[String]) -> (Outcome, bool) {
        let key = (self.settings.remember && task.deterministic).then(|| fingerprint(&task.id, &files, tests));
        self.memo.get_or_run(key, || self.execute(files, tests))
    }

    fn execute(&self, files: Workspace, tests: &[String]) -> Outcome {
        let run = (self.runner)(&TestRequest { files, tests: tests.to_vec(), limits: None });
        let text = [&run.result.stdout[..], &run.result.stderr].map(String::from_utf8_lossy).concat();
        let output = last_bytes(&text, self.settings.output_bytes).to_string();
        Outcome { ended: run.result.verdict, exit_code: run.result.exit_code, passed: run.outcomes, output }
    }
}

fn verdict(outcome: &Outcome, tests: &[String]) -> Verdict {
    let failed = outcome.failed(tests);
    match &outcome.ended {
        RunVerdict::Infrastructure(reason) => Verdict::Infrastructure(reason.clone()),
        RunVerdict::Exited if failed.is_empty() && outcome.exit_code == Some(0) => Verdict::Passed,
        RunVerdict::Exited if failed.is_empty() => Verdict::Failed("the test run ended with an error".into()),
        RunVerdict::Exited => Verdict::Failed(format!("{} of {} tests failed", failed.len(), tests.len())),
        ended => Verdict::Failed(format!("the test run was stopped: {}", ended.name())),
    }
}

/// `file.py::test_name` of every visible test, by file and position: functions named `test_...` at the left margin.
pub fn visible_tests(task: &Task) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (path, text) in &task.visible_tests {
        for line in text.lines() {
            let function = line.strip_prefix("def ").and_then(|rest| rest.split_once('(')).map(|(name, _)| name.trim());
            if let Some(function) = function.filter(|name| name.starts_with("test_")) {
                let name = format!("{path}::{function}");
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
    }
    names
}

/// SHA-256 over everything that goes into a run, each part preceded by its length so that no two runs look alike.
fn fingerprint(id: &str, files: &Workspace, tests: &[String]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    let mut put = |part: &str| {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    };
    put(id);
    put(&files.len().to_string());
    for (path, text) in files {
        put(path);
        put(text);
    }
    tests.iter().for_each(|test| put(test));
    hasher.finalize().into()
}

/// The end of `text`, at most `limit` bytes of it, cut between characters.
fn last_bytes(text: &str, limit: usize) -> &str {
    let mut start = text.len().saturating_sub(limit);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}
