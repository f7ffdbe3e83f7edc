//! Where tokens come from. An engine samples turns for many sequences that come and go; the agent's episode loop drives
//! it and never learns whether the tokens were sampled in this process or by a server.

mod builtin;
pub mod servers;

use serde::{Deserialize, Serialize};

pub use builtin::BuiltinEngine;

use crate::algorithm::{Problems, SettingErrors};

/// How turns are sampled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Softmax temperature; 0 takes the most probable token.
    pub temperature: f64,
    /// Sequences sampled together; further episodes wait for a free place.
    pub max_sequences: usize,
    /// Rows of one forward pass at most: longer prompts are read in pieces.
    pub max_rows: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { temperature: 1.0, max_sequences: 256, max_rows: 2048 }
    }
}

impl Settings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        let temperature = self.temperature;
        let valid = temperature >= 0.0 && temperature.is_finite();
        problems.unless(valid, "temperature", temperature, "give a finite number of at least 0");
        problems.unless(self.max_sequences > 0, "max_sequences", self.max_sequences, "give at least 1");
        problems.unless(self.max_rows > 0, "max_rows", self.max_rows, "give at least 1");
        problems.finish()
    }
}

/// Names a sequence for its random numbers: the same key samples the same tokens from the same weights, whatever else
/// is sampled beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleKey {
    pub seed: u64,
    /// What the tokens are for: training rollouts and each evaluation draw from streams of their own.
    pub stream: u64,
    pub step: u64,
    pub task: u64,
    pub sample: u64,
}

/// Handle of an open sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub usize);

/// Why a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The stop token was sampled; it is the turn's last token.
    Stop,
    /// The turn's token allowance was used up first.
    Length,
}

/// One sampled turn.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledTurn {
    pub sequence: SequenceId,
    pub ids: Vec<u32>,
    /// `[ids]` natural log-probability of each token under the distribution at the sampling temperature.
    pub log_probs: Vec<f32>,
    pub finish: Finish,
}

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("the model gave a log-probability that is not a number; the weights are broken")]
    NotFinite,
}

/// Samples turns. Calls never block for longer than one advance.
pub trait Engine {
    /// Opens a sequence that starts with no tokens.
    fn open(&mut self, key: SampleKey) -> SequenceId;
    /// Appends `tokens` (at least one) and asks for a turn of at most `turn_tokens` sampled tokens.
    fn request_turn(&mut self, sequence: SequenceId, tokens: &[u32], turn_tokens: usize);
    /// Forgets a sequence, in the middle of a turn or after it.
    fn close(&mut self, sequence: SequenceId);
    /// Some sequence has a turn under way.
    fn busy(&self) -> bool;
    /// Works for a moment and returns the turns that ended, in order of their sequences.
    fn advance(&mut self) -> Result<Vec<SampledTurn>, EngineError>;
}
