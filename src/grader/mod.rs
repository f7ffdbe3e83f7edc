//! An answer in, a verdict out: task + sandbox.
//!
//! ```text
//! answer (files or patch) -> may it be an answer at all? -> clean tree and its changes; tests apart, in memory
//!                         -> fresh sandbox run -> evidence per test
//! ```
//!
//! The code under test runs in a process of its own (see `sandbox/linux/separate.py`), so it has no part in what is reported.
//! Tasks that need it in the process of the tests say so; then tests that must fail are mixed in.
//!
//! Only positive evidence counts: each named test must have been seen to return, in a run that ended by itself with exit code 0.
//! [`Verdict::Infrastructure`] comes from the sandbox's supervisor alone; whatever an answer prints, does or weighs ends in
//! passed or failed.

mod answer;
mod audit;
mod canary;
mod check;
mod memo;
mod report;
mod standard;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::sandbox::{RunVerdict, Sandbox, Snapshot, TestRequest, TestRun, Tier};
use crate::types::{Task, TestRunner, Verdict, Workspace};

use answer::Answer;
use canary::Canaries;
pub use check::TaskCheck;
use memo::Memo;
pub use report::Report;

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
    pub report: Report,
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
    /// A test that must fail was not seen to: nothing that was reported counts.
    forged: bool,
    output: String,
    tier: Tier,
    wall_seconds: f64,
    cpu_seconds: f64,
}

/// The files of a run that grades or shows.
struct Examination<'a> {
    task: &'a Task,
    answer: &'a Answer,
    test_files: &'a Workspace,
    tests: &'a [String],
    runner: TestRunner,
    /// Tests that must fail are mixed in.
    guarded: bool,
}

impl Outcome {
    /// The tests that were not seen to pass. In a run that did not end well by itself, all of them: what was reported before
    /// proves nothing about code that went on to break the rules.
    fn failed<'a>(&self, tests: &'a [String]) -> Vec<&'a String> {
        let sound = self.ended == RunVerdict::Exited && matches!(self.exit_code, Some(0 | 1)) && !self.forged;
        tests.iter().filter(|test| !sound || self.passed.get(*test) != Some(&true)).collect()
    }

    fn infrastructure(reason: String) -> Outcome {
        Outcome {
            ended: RunVerdict::Infrastructure(reason),
            exit_code: None,
            passed: BTreeMap::new(),
            forged: false,
            output: String::new(),
            tier: Tier::B,
            wall_seconds: 0.0,
            cpu_seconds: 0.0,
        }
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
        self.grade_answer(task, answer::of_workspace(task, workspace))
    }

    /// The same for an answer that is a unified diff, as git makes it, against the repository and its visible tests.
    pub fn grade_patch(&self, task: &Task, patch: &str) -> Graded {
        self.grade_answer(task, answer::of_patch(task, patch))
    }

    /// The verdict on an answer that cannot even be read.
    pub fn refuse(&self, task: &Task, reason: &str) -> Graded {
        self.grade_answer(task, Err(reason.to_string()))
    }

    fn grade_answer(&self, task: &Task, answer: Result<Answer, String>) -> Graded {
        let answer = match answer {
            Ok(answer) => answer,
            Err(reason) => {
                let report = Report::refused(task, &reason);
                return Graded { verdict: Verdict::Failed(reason), remembered: false, wall_limit_hit: false, report };
            }
        };
        let tests = hidden_tests(task);
        let (outcome, remembered) = self.run(&Examination::hidden(task, &answer, &tests));
        let report = Report::of(task, &answer, &outcome);
        Graded { verdict: verdict(&outcome, &tests), remembered, wall_limit_hit: outcome.wall_limit_hit(), report }
    }

    /// Runs the visible tests over the files as they stand, in one process with the code: nothing is decided by them.
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
        let answer = match answer::of_workspace(task, workspace) {
            Ok(answer) => answer,
            Err(reason) => {
                seen.output = reason;
                return seen;
            }
        };
        if tests.is_empty() {
            return seen;
        }
        let (outcome, remembered) = self.run(&Examination::visible(task, &answer, &tests));
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

    /// Runs an examination, or remembers what it gave. True if remembered.
    fn run(&self, examination: &Examination<'_>) -> (Outcome, bool) {
        let key = (self.settings.remember && examination.task.deterministic).then(|| examination.fingerprint());
        self.memo.get_or_run(key, || self.execute(examination))
    }

    fn execute(&self, examination: &Examination<'_>) -> Outcome {
        let mut request = match examination.request() {
            Ok(request) => request,
            Err(reason) => return Outcome::infrastructure(reason),
        };
        let canaries = examination.guarded.then(|| Canaries::mix_in(&mut request));
        let mut run = (self.runner)(&request);
        let text = [&run.result.stdout[..], &run.result.stderr].map(String::from_utf8_lossy).concat();
        // With tests that must fail no honest run ends with success.
        let failed_as_it_must =
            canaries.is_none_or(|canaries| canaries.have_failed(&mut run.outcomes) && run.result.exit_code == Some(1));
        let exit_code = if examination.guarded && failed_as_it_must { Some(0) } else { run.result.exit_code };
        Outcome {
            ended: run.result.verdict,
            exit_code,
            passed: run.outcomes,
            forged: !failed_as_it_must,
            output: last_bytes(&text, self.settings.output_bytes).to_string(),
            tier: run.result.tier,
            wall_seconds: run.result.wall_seconds,
            cpu_seconds: run.result.cpu_seconds,
        }
    }
}

impl<'a> Examination<'a> {
    fn hidden(task: &'a Task, answer: &'a Answer, tests: &'a [String]) -> Examination<'a> {
        let (runner, guarded) = (task.runner, !task.runner.is_separate());
        Examination { task, answer, test_files: &task.hidden_tests, tests, runner, guarded }
    }

    fn visible(task: &'a Task, answer: &'a Answer, tests: &'a [String]) -> Examination<'a> {
        let runner = TestRunner::InProcess;
        Examination { task, answer, test_files: &task.visible_tests, tests, runner, guarded: false }
    }

    /// The clean repository with the answer's changes; the tests apart.
    fn request(&self) -> Result<TestRequest, String> {
        let mut files = self.task.files.clone();
        files.retain(|path, _| !self.answer.removed.contains(path));
        files.extend(self.answer.changed.clone());
        let tree = self.task.repository.as_ref().map(Snapshot::of_directory).transpose().map_err(|error| error.to_string())?;
        let removed = if tree.is_some() { self.answer.removed.clone() } else { Vec::new() };
        let (test_files, tests) = (self.test_files.clone(), self.tests.to_vec());
        Ok(TestRequest { tree, files, removed, test_files, tests, runner: self.runner, ..TestRequest::default() })
    }

    /// SHA-256 over everything that goes into a run, each part preceded by its length so that no two runs look alike. A
    /// repository in a directory stays as it is while it is used, so its place stands for it.
    fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = Sha256::new();
        let mut put = |part: &str| {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        };
        put(&self.task.id);
        put(if self.runner.is_separate() { "separate" } else { "in_process" });
        put(&self.task.repository.as_deref().map_or_else(String::new, |path| path.to_string_lossy().into_owned()));
        for files in [&self.task.files, &self.answer.changed, self.test_files] {
            put(&files.len().to_string());
            for (path, text) in files {
                put(path);
                put(text);
            }
        }
        put(&self.answer.removed.len().to_string());
        self.answer.removed.iter().chain(self.tests).for_each(|name| put(name));
        hasher.finalize().into()
    }
}

/// `file.py::test_name` of every hidden test that decides.
fn hidden_tests(task: &Task) -> Vec<String> {
    task.fail_to_pass.iter().chain(&task.pass_to_pass).cloned().collect()
}

fn verdict(outcome: &Outcome, tests: &[String]) -> Verdict {
    let failed = outcome.failed(tests);
    match &outcome.ended {
        RunVerdict::Infrastructure(reason) => Verdict::Infrastructure(reason.clone()),
        RunVerdict::Exited if outcome.forged => Verdict::Failed("a test that must fail did not: the report is forged".into()),
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

/// The end of `text`, at most `limit` bytes of it, cut between characters.
fn last_bytes(text: &str, limit: usize) -> &str {
    let mut start = text.len().saturating_sub(limit);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}
