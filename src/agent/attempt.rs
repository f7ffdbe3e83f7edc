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

impl Surroundings<'_> {
    /// Tokens before the agent's first turn: the system turn if there is one, the issue, and the head of that turn.
    pub fn opening(&self, task: &Task) -> Vec<u32> {
        let system = &self.settings.system_prompt;
        let system = (!system.is_empty()).then_some(Turn { role: Role::System, content: system });
        let turns: Vec<Turn> = system.into_iter().chain([Turn { role: Role::User, content: &task.issue }]).collect();
        self.format.opening(&turns)
    }
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
    /// An attempt whose transcript holds the opening.
    pub fn new(task: &'a Task, surroundings: Surroundings<'a>) -> Attempt<'a> {
        let mut transcript = Transcript::default();
        transcript.push_environment(&surroundings.opening(task));
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
        if matches!(action, Action::Refuse(_)) {
            self.transcript.refuse_turn();
        }
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

#[cfg(test)]
mod tests {
    use super::super::tools::{Call, render_call};
    use super::*;
    use crate::task::{builtin, builtin_tokenizer};

    /// What cannot be read as a call, and a call that these files do not allow, are both refused; what is allowed is not.
    #[test]
    fn the_places_of_refused_turns_are_noted() {
        let (pools, tokenizer) = (builtin().unwrap(), builtin_tokenizer().unwrap());
        let settings = Settings { bad_call_ends: false, ..Settings::default() };
        let surroundings =
            Surroundings { tokenizer: &tokenizer, format: ChatFormat::new(&tokenizer).unwrap(), settings: &settings };
        let mut attempt = Attempt::new(&pools.train[0], surroundings);
        let view = render_call(&Call::View { path: None });
        let no_such_line = render_call(&Call::Edit { path: None, line: 999, text: "x".into() });
        let mut refused = Vec::new();
        for (turn, is_refused) in [("hello", true), (view.as_str(), false), (no_such_line.as_str(), true)] {
            let start = attempt.transcript.ids.len();
            let ids = tokenizer.encode_markup(turn);
            attempt.transcript.push_sampled(&ids, &vec![0.0; ids.len()], 0);
            if is_refused {
                refused.push(start..start + ids.len());
            }
            match attempt.turn(turn) {
                Next::Observe(text) => drop(attempt.observe(&text)),
                _ => panic!("{turn}: an answer was expected"),
            }
        }
        assert_eq!(attempt.transcript.refused, refused);
    }
}
