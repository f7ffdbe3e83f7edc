//! Scripted, imperfect demonstrations for rejection fine-tuning.
//!
//! The script knows every place of the file that can be wrong and guesses badly on purpose: among the episodes that pass,
//! many hold a wrong first edit mended after a failing test. A policy that learns from them can do the whole task and has
//! much room to get better at it, which is what reinforcement learning then uses.

use super::attempt::{Attempt, Next, Surroundings};
use super::tools::{Call, render_call};
use crate::grader::Grader;
use crate::task::apply_gold;
use crate::types::{Ending, Episode, Key, Purpose, Slot, Task, Verdict, Workspace};

/// Whether a script can demonstrate a task: it has slots, or its gold patch changes one line.
pub fn demonstrable(task: &Task) -> Result<(), String> {
    Places::of(task).map(|_| ())
}

/// How the script behaves. The values are those with which a half-million-parameter policy learned the small family.
mod habit {
    pub const RUN_BEFORE_LOOKING: f64 = 0.10;
    pub const FIRST_EDIT_RIGHT: f64 = 0.15;
    /// A wrong guess hits the buggy place, with a wrong value.
    pub const GUESS_AT_BUGGY_PLACE: f64 = 0.40;
    pub const RUN_AFTER_FIRST_EDIT: f64 = 0.30;
    pub const RUN_AFTER_LATER_EDIT: f64 = 0.80;
    pub const RETRY_AFTER_FAILURE: f64 = 0.80;
    pub const RETRY_RIGHT: f64 = 0.50;
}

/// Runs candidate `index` of a run's demonstrations: a scripted episode on `task`, its tests really run and its answer
/// really graded. Tokens of the script's turns are marked as sampled.
///
/// # Errors
/// When the task offers no one-line edit to demonstrate: it has no slots and its gold patch changes more than one line.
pub fn demonstrate(task: &Task, surroundings: Surroundings, grader: &Grader, seed: u64, index: u32) -> Result<Episode, String> {
    let mut key = Key::new(Purpose::Demonstration, &[seed, index as u64]);
    let places = Places::of(task)?;
    let mut script = Script { attempt: Attempt::new(task, surroundings), surroundings, grader };
    let (ending, verdict) = match script.play(&mut key, &places) {
        Outcome::Submitted => match grader.grade(task, &script.attempt.files()) {
            graded if graded.verdict.infrastructure() => (Ending::Infrastructure, graded.verdict),
            graded => (Ending::Submitted, graded.verdict),
        },
        Outcome::Ended(Ending::Infrastructure) => {
            (Ending::Infrastructure, Verdict::Infrastructure("the visible tests could not be run".into()))
        }
        Outcome::Ended(ending) => (ending, Verdict::Failed("not submitted".into())),
    };
    Ok(script.attempt.finish(index, 0, ending, verdict))
}

/// Where the script may edit. Edits are written `N|text`, or `path:N|text` where the task has several files.
struct Places {
    several_files: bool,
    slots: Vec<Slot>,
    /// The lines as found, in the form of edits: editing to one of them would change nothing.
    found: Vec<String>,
}

impl Places {
    fn of(task: &Task) -> Result<Places, String> {
        let several_files = task.files.len() > 1;
        let numbered = |files: &Workspace| -> Vec<String> {
            let prefix = |path: &str| if several_files { format!("{path}:") } else { String::new() };
            let lines = |(path, text): (&String, &String)| -> Vec<String> {
                text.lines().enumerate().map(|(index, line)| format!("{}{}|{line}", prefix(path), index + 1)).collect()
            };
            files.iter().flat_map(lines).collect()
        };
        let found = numbered(&task.files);
        let slots = match &task.origin {
            Some(origin) if !origin.slots.is_empty() => origin.slots.clone(),
            _ => {
                let right = numbered(&apply_gold(task).map_err(|error| error.to_string())?);
                let different: Vec<&String> = right.iter().filter(|line| !found.contains(line)).collect();
                match different[..] {
                    [line] if found.len() == right.len() => {
                        vec![Slot { buggy: true, right: line.clone(), wrong: Vec::new() }]
                    }
                    _ => return Err(format!("task {}: a script can only demonstrate a change of one line", task.id)),
                }
            }
        };
        Ok(Places { several_files, slots, found })
    }

    /// The call that makes an edit; its path is given where there are several files.
    fn call(&self, edit: &str) -> Call {
        let (path, edit) = match edit.split_once(':') {
            Some((path, rest)) if self.several_files => (Some(path.to_owned()), rest),
            _ => (None, edit),
        };
        let (number, text) = edit.split_once('|').unwrap_or(("0", edit));
        Call::Edit { path, line: number.parse().unwrap_or(0), text: text.to_owned() }
    }

    fn right(&self) -> Option<&str> {
        self.slots.iter().find(|slot| slot.buggy).map(|slot| slot.right.as_str())
    }

    /// A wrong edit that was not tried before; none if all were.
    fn guess(&self, key: &mut Key, tried: &[String]) -> Option<String> {
        let fresh = |line: &&String| !tried.contains(line) && !self.found.contains(line);
        let wrong_of_buggy: Vec<&String> =
            self.slots.iter().filter(|slot| slot.buggy).flat_map(|slot| &slot.wrong).filter(fresh).collect();
        if key.chance(habit::GUESS_AT_BUGGY_PLACE) && !wrong_of_buggy.is_empty() {
            return Some((*key.choose(&wrong_of_buggy)).clone());
        }
        let anywhere: Vec<Vec<&String>> = self
            .slots
            .iter()
            .map(|slot| slot.wrong.iter().filter(fresh).collect())
            .filter(|lines: &Vec<&String>| !lines.is_empty())
            .collect();
        if anywhere.is_empty() {
            return None;
        }
        let lines = key.choose(&anywhere);
        Some((*key.choose(lines)).clone())
    }
}

enum Outcome {
    Submitted,
    Ended(Ending),
}

struct Script<'a> {
    attempt: Attempt<'a>,
    surroundings: Surroundings<'a>,
    grader: &'a Grader,
}

impl Script<'_> {
    fn play(&mut self, key: &mut Key, places: &Places) -> Outcome {
        match self.try_play(key, places) {
            Ok(()) => Outcome::Submitted,
            Err(ending) => Outcome::Ended(ending),
        }
    }

    /// Ends well with a call of `submit`.
    fn try_play(&mut self, key: &mut Key, places: &Places) -> Result<(), Ending> {
        if key.chance(habit::RUN_BEFORE_LOOKING) {
            self.act(&Call::Run)?;
        }
        self.act(&Call::View { path: None })?;
        let mut viewed: Vec<Option<String>> = vec![None];
        let mut tried: Vec<String> = Vec::new();
        loop {
            let first = tried.is_empty();
            let right = key.chance(if first { habit::FIRST_EDIT_RIGHT } else { habit::RETRY_RIGHT });
            let untried = |line: &&str| !tried.iter().any(|tried| tried == line);
            let edit = match places.right().filter(untried) {
                Some(line) if right => line.to_owned(),
                line => match places.guess(key, &tried).or(line.map(str::to_owned)) {
                    Some(edit) => edit,
                    None => break,
                },
            };
            let call = places.call(&edit);
            if let Call::Edit { path, .. } = &call
                && !viewed.contains(path)
            {
                self.act(&Call::View { path: path.clone() })?;
                viewed.push(path.clone());
            }
            self.act(&call)?;
            tried.push(edit);
            if !key.chance(if first { habit::RUN_AFTER_FIRST_EDIT } else { habit::RUN_AFTER_LATER_EDIT }) {
                break;
            }
            let failed_before = self.attempt.counts.failing_runs;
            self.act(&Call::Run)?;
            let failed = self.attempt.counts.failing_runs > failed_before;
            if !failed || !key.chance(habit::RETRY_AFTER_FAILURE) {
                break;
            }
        }
        self.act(&Call::Submit)
    }

    /// Takes one turn: the call's tokens, then what it leads to.
    fn act(&mut self, call: &Call) -> Result<(), Ending> {
        let text = render_call(call);
        let mut ids = self.surroundings.tokenizer.encode_markup(&text);
        ids.push(self.surroundings.format.stop_token());
        if ids.len() > self.attempt.turn_tokens() {
            return Err(Ending::TokenLimit);
        }
        self.attempt.transcript.push_sampled(&ids, &vec![0.0; ids.len()], 0);
        let next = match self.attempt.turn(&text) {
            Next::RunTests => {
                let run = self.grader.run_visible(self.attempt.task, &self.attempt.files());
                self.attempt.tests_ran(&run)
            }
            next => next,
        };
        match next {
            Next::Observe(text) => self.attempt.observe(&text).map(|_| ()).ok_or(Ending::TokenLimit),
            Next::Grade | Next::RunTests => Ok(()),
            Next::End(ending) => Err(ending),
        }
    }
}
