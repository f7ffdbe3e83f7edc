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

/// Limits of one episode and how the agent is told about its tools.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
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
    /// Names the first setting that makes no sense.
    pub fn check(&self) -> Result<(), String> {
        for (name, value) in
            [("max_turns", self.max_turns), ("max_tokens", self.max_tokens), ("max_turn_tokens", self.max_turn_tokens)]
        {
            if value == 0 {
                return Err(format!("agent.{name} = 0: must be at least 1"));
            }
        }
        if self.episode_seconds.is_nan() || self.episode_seconds <= 0.0 {
            return Err(format!("agent.episode_seconds = {}: must be above 0", self.episode_seconds));
        }
        Ok(())
    }
}
