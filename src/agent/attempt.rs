//! One attempt at one task, whoever takes the turns: the model ([`super::Rollout`]) or a script ([`super::demonstrate`]).

use super::Settings;
use super::tools::{Call, parse_call};
use super::workbench::{Action, Workbench};
use crate::grader::VisibleRun;
use crate::text::{ChatFormat, Role, Tokenizer, Turn};
use crate::types::{Ending, Episode, EpisodeCounts, Task, Transcript, Verdict};

/// What every attempt needs to know.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    pub tokenizer: &'a Tokenizer,
    pub format: ChatFormat<'a>,
    pub settings: &'a Settings,
}

/// What comes after a turn.
pub enum Next {
    /// The agent reads this text and takes another turn.
    Observe(String),
    RunTests,
    Grade,
    End(Ending),
}

pub struct Attempt<'a> {
    pub task: &'a Task,
    pub transcript: Transcript,
    pub counts: EpisodeCounts,
    bench: Workbench<'a>,
    surroundings: Surroundings<'a>,
    last_run_failed: bool,
}

impl<'a> Attempt<'a> {
    /// An attempt whose transcript holds the opening: the system turn if there is one, the issue, and the head of the
    /// agent's first turn.
    pub fn new(task: &'a Task, surroundings: Surroundings<'a>) -> Attempt<'a> {
        let system = &surroundings.settings.system_prompt;
        let system = (!system.is_empty()).then_some(Turn { role: Role::System, content: system });
        let turns: Vec<Turn> = system.into_iter().chain([Turn { role: Role::User, content: &task.issue }]).collect();
        let opening = surroundings.format.opening(&turns);
        let mut transcript = Transcript::default();
        transcript.push_environment(&opening);
        let bench = Workbench::new(&task.files);
        Attempt { task, transcript, counts: EpisodeCounts::default(), bench, surroundings, last_run_failed: false }
    }

    /// Tokens the next turn may have; 0 when the episode's allowance is used up.
    pub fn turn_tokens(&self) -> usize {
        let settings = self.surroundings.settings;
        settings.max_turn_tokens.min(settings.max_tokens.saturating_sub(self.transcript.ids.len()))
    }

    /// Takes a turn whose tokens are already in the transcript: `text` is the turn without its stop token.
    pub fn turn(&mut self, text: &str) -> Next {
        self.counts.turns += 1;
        let action = match parse_call(text) {
            Ok(call) => {
                let action = self.bench.call(&call);
                if matches!((&call, &action), (Call::Edit { .. }, Action::Observe(_))) {
                    self.counts.edits += 1;
                    self.counts.edited_after_failure |= self.last_run_failed;
                }
                action
            }
            Err(reason) => Action::Refuse(reason),
        };
        let out_of_turns = self.counts.turns as usize >= self.surroundings.settings.max_turns;
        match action {
            Action::Grade => Next::Grade,
            Action::Refuse(_) if self.surroundings.settings.bad_call_ends => Next::End(Ending::BadCall),
            _ if out_of_turns => Next::End(Ending::TurnLimit),
            Action::Observe(text) => Next::Observe(text),
            Action::Refuse(reason) => Next::Observe(format!("error: {reason}")),
            Action::RunTests => Next::RunTests,
        }
    }

    pub fn files(&self) -> crate::types::Workspace {
        self.bench.files()
    }

    /// Notes what the visible tests gave and says it to the agent.
    pub fn tests_ran(&mut self, run: &VisibleRun) -> Next {
        if run.infrastructure.is_some() {
            return Next::End(Ending::Infrastructure);
        }
        self.counts.runs += 1;
        self.counts.wall_limit_hit |= run.wall_limit_hit;
        if run.total == 0 {
            return Next::Observe("there are no visible tests".into());
        }
        self.last_run_failed = run.failed > 0;
        if !self.last_run_failed {
            return Next::Observe("passed".into());
        }
        self.counts.failing_runs += 1;
        let mut text = format!("{} failed", run.failed);
        let output: String = run.output.chars().take(self.surroundings.settings.test_output_characters).collect();
        if !output.trim().is_empty() {
            text.push('\n');
            text.push_str(output.trim_end());
        }
        Next::Observe(text)
    }

    /// Appends an observation and the head of the next turn; returns the tokens appended, which the engine reads next. None,
    /// and nothing appended, when they would leave no room for a turn.
    pub fn observe(&mut self, text: &str) -> Option<Vec<u32>> {
        let tokens = self.surroundings.format.bridge(text);
        if self.transcript.ids.len() + tokens.len() >= self.surroundings.settings.max_tokens {
            return None;
        }
        self.transcript.push_environment(&tokens);
        Some(tokens)
    }

    /// The attempt as an episode.
    pub fn finish(self, task_index: u32, sample_index: u32, ending: Ending, verdict: Verdict) -> Episode {
        Episode {
            task_id: self.task.id.clone(),
            task_index,
            sample_index,
            transcript: self.transcript,
            ending,
            verdict,
            counts: self.counts,
        }
    }
}
