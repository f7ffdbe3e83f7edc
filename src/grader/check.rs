//! Proof of a task: its tests tell the files as found from the mended ones, every time.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::answer::{self, Answer};
use super::{Examination, Grader, hidden_tests, visible_tests};
use crate::sandbox::RunVerdict;
use crate::task::check_task;
use crate::types::Task;

/// What proving a task found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TaskCheck {
    pub id: String,
    /// What is wrong, one line each; empty for a proven task.
    pub problems: Vec<String>,
    /// Tests that gave both results over the same files.
    pub flaky: Vec<String>,
    /// Something of ours broke: nothing is known about the task.
    pub infrastructure: Option<String>,
}

impl TaskCheck {
    /// The task is proven.
    pub fn passed(&self) -> bool {
        self.problems.is_empty() && self.flaky.is_empty() && self.infrastructure.is_none()
    }
}

/// Results of each test so far, by state of the files.
type Seen = BTreeMap<(State, String), BTreeSet<bool>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Found,
    Mended,
}

impl Grader {
    /// Runs every named test over the files as found and over the mended ones, `repeats` times, never from memory: each
    /// FAIL_TO_PASS must fail first and pass then, each PASS_TO_PASS pass twice; the visible tests must pass on the mended files.
    pub fn check(&self, task: &Task, repeats: usize) -> TaskCheck {
        let mut check = TaskCheck { id: task.id.clone(), ..TaskCheck::default() };
        if let Err(reason) = check_task(task) {
            check.problems.push(reason);
            return check;
        }
        let mended = match answer::of_patch(task, &task.gold_patch) {
            Ok(mended) => mended,
            Err(reason) => {
                check.problems.push(format!("the gold patch cannot be an answer: {reason}"));
                return check;
            }
        };
        check.problems.extend(super::audit::audit(task, &mended));
        let mut seen = Seen::new();
        for _ in 0..repeats.max(1) {
            if let Err(reason) = self.observe(task, &mended, &mut seen) {
                check.infrastructure = Some(reason);
                return check;
            }
        }
        judge(task, &seen, &mut check);
        check
    }

    /// One round of runs, added to `seen`; the error is a fault of ours.
    fn observe(&self, task: &Task, mended: &Answer, seen: &mut Seen) -> Result<(), String> {
        let (hidden, visible) = (hidden_tests(task), visible_tests(task));
        let found = Answer::default();
        let runs = [
            (State::Found, Examination::hidden(task, &found, &hidden)),
            (State::Mended, Examination::hidden(task, mended, &hidden)),
            (State::Mended, Examination::visible(task, mended, &visible)),
        ];
        for (state, examination) in runs.into_iter().filter(|(_, examination)| !examination.tests.is_empty()) {
            let outcome = self.execute(&examination);
            if let RunVerdict::Infrastructure(reason) = &outcome.ended {
                return Err(reason.clone());
            }
            let failed = outcome.failed(examination.tests);
            for name in examination.tests {
                seen.entry((state, name.clone())).or_default().insert(!failed.contains(&name));
            }
        }
        Ok(())
    }
}

fn judge(task: &Task, seen: &Seen, check: &mut TaskCheck) {
    let mut flaky = BTreeSet::new();
    for ((state, test), results) in seen {
        if results.len() > 1 {
            flaky.insert(test.clone());
            continue;
        }
        let passes = results.contains(&true);
        match state {
            State::Found if passes && task.fail_to_pass.contains(test) => {
                check.problems.push(format!("FAIL_TO_PASS {test} passes on the files as found"));
            }
            State::Found if !passes && task.pass_to_pass.contains(test) => {
                check.problems.push(format!("PASS_TO_PASS {test} fails on the files as found"));
            }
            State::Mended if !passes => check.problems.push(format!("{test} fails with the gold patch")),
            _ => {}
        }
    }
    check.flaky = flaky.into_iter().collect();
}
