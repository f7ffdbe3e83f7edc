//! The agent: it reads an issue, looks at the files, edits, runs the visible tests and submits, one tool call a turn.
//!
//! ```text
//! tools.rs     text of a turn -> Call
//! workbench.rs Call + files -> observation (view, edit) or work for the sandbox (run, submit)
//! attempt.rs   one episode in the making: transcript, counts, what comes after each turn
//! rollout.rs   many episodes at once: engine <-> workbench <-> sandbox workers
//! scripted.rs  imperfect demonstrations: the same episodes with a script in place of the model
//! demonstrations.rs  many of those at once
//! dealing.rs   which rank runs which attempt
//! ```

mod attempt;
mod dealing;
mod demonstrations;
mod rollout;
mod scripted;
mod tools;
mod workbench;

use serde::{Deserialize, Serialize};

pub use attempt::Surroundings;
pub use dealing::Tally;
pub use demonstrations::Demonstrations;
pub use rollout::{Rollout, RolloutError, Work};
pub use scripted::demonstrable;
pub use tools::{Call, parse_call, render_call};
pub use workbench::{Action, Workbench};

use crate::algorithm::{MOST_COUNTED, Problems, SettingErrors};

/// Episodes that one rollout or one evaluation may ask for. No machine has room for more: a run file that asks is mistaken.
pub const MOST_EPISODES: usize = 1 << 24;

/// Tools, how they are called and what the agent is told of their results. Only the quick start's exists so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scaffold {
    /// One call in plain text a turn: view, edit, run the visible tests, submit.
    #[default]
    Quickstart,
    /// R2E-Gym's (DeepSWE).
    R2eGym,
    /// In the style of SWE-agent (Nebius).
    SweAgent,
    /// One answer, no tools (DAPO).
    SingleTurn,
}

/// Limits of one episode and how the agent is told about its tools.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The tools and how they are called.
    pub scaffold: Scaffold,
    /// Turns of the agent at most.
    pub max_turns: usize,
    /// Tokens of a whole episode at most: prompt, turns and observations.
    pub max_tokens: usize,
    /// Tokens of one turn at most.
    pub max_turn_tokens: usize,
    /// Wall-clock backstop for one episode, from its opening to its end. A machine that is merely slow must not reach it.
    pub episode_seconds: f64,
    /// A turn that is no valid call ends the episode; otherwise the agent is told what was wrong and goes on.
    pub bad_call_ends: bool,
    /// Characters of the visible tests' output shown to the agent beside "K failed".
    pub test_output_characters: usize,
    /// System turn before the issue; none when empty.
    pub system_prompt: String,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            scaffold: Scaffold::Quickstart,
            max_turns: 10,
            max_tokens: 512,
            max_turn_tokens: 64,
            episode_seconds: 3600.0,
            bad_call_ends: true,
            test_output_characters: 0,
            system_prompt: String::new(),
        }
    }
}

impl Settings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        for (name, value) in
            [("max_turns", self.max_turns), ("max_tokens", self.max_tokens), ("max_turn_tokens", self.max_turn_tokens)]
        {
            problems.unless(value > 0, name, value, "give at least 1");
            problems.at_most(name, value, MOST_COUNTED);
        }
        let seconds = self.episode_seconds;
        problems.unless(seconds > 0.0 && seconds.is_finite(), "episode_seconds", seconds, "give a finite number above 0");
        problems.finish()
    }
}
