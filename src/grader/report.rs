//! What a grading was based on, for the record.

use std::collections::BTreeMap;

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::Outcome;
use super::answer::Answer;
use crate::sandbox::Tier;
use crate::types::{Task, TestRunner};

/// How a verdict came about.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Where the code ran while it was tested.
    pub runner: TestRunner,
    /// Each test of which there is evidence, and whether it passed. A named test that is missing has failed.
    pub tests: BTreeMap<String, bool>,
    /// Test files that the answer had changed; the task's own were laid in their place.
    pub overwritten: Vec<String>,
    /// Why the answer was refused without a run.
    pub refused: Option<String>,
    /// SHA-256 of each file that was laid down: the answer's changes, then the tests.
    pub laid: BTreeMap<String, String>,
    /// What the run was contained by; absent if there was none.
    pub tier: Option<Tier>,
    pub wall_seconds: f64,
    pub cpu_seconds: f64,
    /// The end of what the run wrote, with tracebacks of failed tests.
    pub output: String,
}

impl Report {
    pub fn refused(task: &Task, reason: &str) -> Report {
        Report { runner: task.runner, refused: Some(reason.to_string()), ..Report::default() }
    }

    pub(super) fn of(task: &Task, answer: &Answer, outcome: &Outcome) -> Report {
        let laid = answer.changed.iter().chain(&task.hidden_tests);
        Report {
            runner: task.runner,
            tests: outcome.passed.clone(),
            overwritten: answer.overwritten.clone(),
            refused: None,
            laid: laid.map(|(path, text)| (path.clone(), hex(&Sha256::digest(text)))).collect(),
            tier: Some(outcome.tier),
            wall_seconds: outcome.wall_seconds,
            cpu_seconds: outcome.cpu_seconds,
            output: outcome.output.clone(),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
