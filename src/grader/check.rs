//! Proof of a task: its tests tell the files as found from the mended ones, every time.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{Grader, Outcome, visible_tests};
use crate::sandbox::RunVerdict;
use crate::task::{apply_gold, check_task};
use crate::types::{Task, Workspace};

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
        let mended = match check_task(task).and_then(|()| apply_gold(task).map_err(|error| error.to_string())) {
            Ok(mended) => mended,
            Err(reason) => {
                check.problems.push(reason);
                return check;
            }
        };
        if let Err(reason) = super::answer::check(task, &mended) {
            check.problems.push(format!("the mended files cannot be an answer: {reason}"));
            return check;
        }
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
    fn observe(&self, task: &Task, mended: &Workspace, seen: &mut Seen) -> Result<(), String> {
        let hidden: Vec<String> = task.fail_to_pass.iter().chain(&task.pass_to_pass).cloned().collect();
        let visible = visible_tests(task);
        let runs = [
            (State::Found, &task.files, &task.hidden_tests, &hidden),
            (State::Mended, mended, &task.hidden_tests, &hidden),
            (State::Mended, mended, &task.visible_tests, &visible),
        ];
        for (state, files, tests, names) in runs.into_iter().filter(|(_, _, _, names)| !names.is_empty()) {
            let outcome: Outcome = self.execute(super::answer::laid_out(task, files, tests), names);
            if let RunVerdict::Infrastructure(reason) = &outcome.ended {
                return Err(reason.clone());
            }
            let failed = outcome.failed(names);
            for name in names {
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
