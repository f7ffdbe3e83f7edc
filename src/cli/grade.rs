//! `learner grade`: runs the hidden tests of a task over an answer given as a patch.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::tasks::{find, visible};
use super::{CliError, print_json, print_text};
use crate::grader::{self, Graded, Grader};
use crate::sandbox::{Sandbox, SandboxError, Settings, Tier};
use crate::task::read_tasks;
use crate::types::{Task, Verdict};

/// Grade an answer: exit code 0 if it passed, 1 if it failed, 4 if something of ours broke and nothing is known of it.
#[derive(Args, Clone, Debug)]
pub struct GradeArguments {
    /// The task file.
    #[arg(long, value_name = "FILE")]
    pub tasks: PathBuf,
    /// The task.
    #[arg(long)]
    pub id: String,
    /// The answer: a unified diff, as `git diff` makes it, against the task's repository.
    #[arg(long, value_name = "FILE")]
    pub patch: PathBuf,
    /// Use exactly this tier of the sandbox, `a` or `b`; default: the strongest that works.
    #[arg(long, value_parser = super::sandbox::parse_tier)]
    pub tier: Option<Tier>,
}

/// # Errors
/// [`CliError::Refused`] when there is no such task, patch or sandbox, [`CliError::Failed`] for a failed answer and
/// [`CliError::Infrastructure`] for a fault of ours.
pub fn run(arguments: &GradeArguments, json: bool) -> Result<(), CliError> {
    let tasks = read_tasks(&arguments.tasks)?;
    let task = find(&tasks, &arguments.tasks, &arguments.id)?;
    let shown = arguments.patch.display();
    let bytes = std::fs::read(&arguments.patch).map_err(|error| CliError::Refused(format!("{shown}: cannot read: {error}")))?;
    let grader = Grader::new(start(arguments.tier)?, grader::Settings { output_bytes: 16 << 10, ..Default::default() });
    let graded = match String::from_utf8(bytes) {
        Ok(patch) => grader.grade_patch(task, &patch),
        // Bytes that are no text are a property of the answer, not of the command.
        Err(_) => grader.refuse(task, "the patch is not UTF-8 text"),
    };
    if json {
        print_json(&to_json(task, &graded))?;
    } else {
        print_text(&visible(&readable(task, &graded)))?;
    }
    match &graded.verdict {
        Verdict::Passed => Ok(()),
        Verdict::Failed(reason) => Err(CliError::Failed(format!("{}: failed: {reason}", task.id))),
        Verdict::Infrastructure(reason) => Err(CliError::Infrastructure(format!("{}: not graded: {reason}", task.id))),
    }
}

/// A sandbox with the usual settings.
pub fn start(tier: Option<Tier>) -> Result<Sandbox, CliError> {
    Sandbox::start(&Settings { tier, ..Settings::default() }).map_err(|error| match error {
        SandboxError::Broken(_) => CliError::Failed(error.to_string()),
        _ => CliError::Refused(error.to_string()),
    })
}

fn to_json(task: &Task, graded: &Graded) -> Value {
    let (verdict, reason) = words(&graded.verdict);
    let missing: Vec<&String> = named(task).filter(|test| !graded.report.tests.contains_key(*test)).collect();
    json!({"id": task.id, "verdict": verdict, "reason": reason, "tests_run": graded.report.tests.len(), "without_evidence": missing,
           "report": graded.report})
}

fn readable(task: &Task, graded: &Graded) -> String {
    let report = &graded.report;
    let mut page = String::new();
    if let Some(reason) = &report.refused {
        let _ = writeln!(page, "refused without a run: {reason}");
    } else {
        for test in named(task) {
            let outcome = match report.tests.get(test) {
                Some(true) => "passed",
                Some(false) => "failed",
                None => "failed (not seen to end)",
            };
            let _ = writeln!(page, "{outcome:8} {test}");
        }
        for path in &report.overwritten {
            let _ = writeln!(page, "the answer's {path} is a test file: the task's own was used");
        }
        if !report.output.trim().is_empty() {
            let _ = write!(page, "output:\n{}\n", report.output.trim_end());
        }
        let runner = if report.runner.is_separate() { "a process of its own" } else { "the process of the tests" };
        let tier = report.tier.map(|tier| format!("tier {tier}, ")).unwrap_or_default();
        let _ = writeln!(
            page,
            "{tier}code in {runner}, {:.3} s wall, {:.3} s CPU, {} tests run",
            report.wall_seconds,
            report.cpu_seconds,
            report.tests.len()
        );
    }
    let (verdict, _) = words(&graded.verdict);
    let _ = writeln!(page, "{}: {verdict}", task.id);
    page
}

fn named(task: &Task) -> impl Iterator<Item = &String> {
    task.fail_to_pass.iter().chain(&task.pass_to_pass)
}

fn words(verdict: &Verdict) -> (&'static str, Option<&str>) {
    match verdict {
        Verdict::Passed => ("passed", None),
        Verdict::Failed(reason) => ("failed", Some(reason)),
        Verdict::Infrastructure(reason) => ("infrastructure", Some(reason)),
    }
}
