//! Parts that published recipes need at full scale and that do not exist here yet. A run file may name them, so that a recipe can be
//! read, compared and scaled down; a run that needs one is refused before anything starts. This file is the whole list.

use serde::{Deserialize, Serialize};

use super::{ConfigError, RunFile};
use crate::agent::Scaffold;

/// The form that tasks come in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskFormat {
    /// Files of `docs/tasks.md`, and the built-in tasks.
    #[default]
    Learner,
    /// Tasks of R2E-Gym, each in a container image of its own.
    R2eGym,
    /// Tasks of SWE-rebench, each in a container image of its own.
    SweRebench,
    /// Questions whose answer is a number.
    Mathematics,
}

/// A key whose value asks for a part that does not exist.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Missing {
    pub key: &'static str,
    pub value: String,
    pub part: &'static str,
}

impl RunFile {
    /// What a run of this would need that does not exist.
    pub fn missing(&self) -> Vec<Missing> {
        let mut missing = Vec::new();
        let mut note = |key, value: String, part: Option<&'static str>| {
            missing.extend(part.map(|part| Missing { key, value, part }));
        };
        let scaffold = match self.agent.scaffold {
            Scaffold::Quickstart => None,
            Scaffold::R2eGym => Some("the R2E-Gym scaffold (file_editor, execute_bash, search, finish)"),
            Scaffold::SweAgent => Some("a scaffold in the style of SWE-agent (open, goto, edit, search_file, submit)"),
            Scaffold::SingleTurn => Some("a scaffold of one answer without tools"),
        };
        note("agent.scaffold", word(&self.agent.scaffold), scaffold);
        let format = match self.tasks.format {
            TaskFormat::Learner => None,
            TaskFormat::R2eGym => Some("tasks of R2E-Gym and SWE-bench in their container images"),
            TaskFormat::SweRebench => Some("tasks of SWE-rebench and SWE-bench in their container images"),
            TaskFormat::Mathematics => Some("tasks whose answer is a number"),
        };
        note("tasks.format", word(&self.tasks.format), format);
        let servers = (self.rollout.nodes > 0)
            .then_some("training on what servers sample (`learner servers` starts, watches and feeds them)");
        note("rollout.nodes", self.rollout.nodes.to_string(), servers);
        missing
    }

    /// # Errors
    /// A line for every part that a run would need and that does not exist.
    pub fn check_runs(&self) -> Result<(), ConfigError> {
        let line = |Missing { key, value, part }| format!("{key} is {value}: needs what does not exist yet, {part}");
        let mut lines: Vec<String> = self.missing().into_iter().map(line).collect();
        match lines.last_mut() {
            None => Ok(()),
            Some(last) => {
                last.push_str("; --scale tiny runs the same stages and settings on a small model, with the quick start's tasks and scaffold");
                Err(ConfigError(lines))
            }
        }
    }
}

/// The word that a run file has for a choice.
fn word(choice: &impl Serialize) -> String {
    toml::Value::try_from(choice).map(|value| value.to_string()).unwrap_or_default()
}
