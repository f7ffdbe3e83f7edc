//! What an agent did with a task, as tokens, and how it ended.

use serde::{Deserialize, Serialize};

use super::exact;

/// Token ids of one episode with what training needs to know of each. All four lists have the same length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Transcript {
    /// `[tokens]` prompt, sampled and environment tokens, in order, never re-tokenised.
    pub ids: Vec<u32>,
    /// `[tokens]` true exactly on tokens the policy sampled.
    pub sampled: Vec<bool>,
    /// `[tokens]` natural log-probability at sampling time; 0 where not sampled. Of a broken model it may be no number, which must
    /// come to all ranks as it does to one.
    #[serde(with = "exact::list")]
    pub log_probs: Vec<f32>,
    /// `[tokens]` number of the weights (optimizer steps taken) that sampled the token; 0 where not sampled.
    pub versions: Vec<u32>,
}

impl Transcript {
    /// Appends tokens that the policy did not choose: prompt, template or observation.
    pub fn push_environment(&mut self, ids: &[u32]) {
        self.ids.extend_from_slice(ids);
        self.sampled.resize(self.ids.len(), false);
        self.log_probs.resize(self.ids.len(), 0.0);
        self.versions.resize(self.ids.len(), 0);
    }

    /// Appends tokens sampled by weights number `version`, with one log-probability each.
    pub fn push_sampled(&mut self, ids: &[u32], log_probs: &[f32], version: u32) {
        assert_eq!(ids.len(), log_probs.len(), "one log-probability per sampled token");
        self.ids.extend_from_slice(ids);
        self.log_probs.extend_from_slice(log_probs);
        self.sampled.resize(self.ids.len(), true);
        self.versions.resize(self.ids.len(), version);
    }

    pub fn sampled_count(&self) -> usize {
        self.sampled.iter().filter(|&&sampled| sampled).count()
    }
}

/// Why an episode stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// The agent called `submit`.
    Submitted,
    /// The agent's turn was no tool call, and the run file ends the episode there.
    BadCall,
    TurnLimit,
    TokenLimit,
    /// The episode's own time was over.
    Timeout,
    /// Something of ours broke; the episode teaches nothing and is dropped from its group.
    Infrastructure,
}

impl Ending {
    pub const ALL: [Ending; 6] =
        [Ending::Submitted, Ending::BadCall, Ending::TurnLimit, Ending::TokenLimit, Ending::Timeout, Ending::Infrastructure];

    pub fn name(self) -> &'static str {
        match self {
            Ending::Submitted => "submitted",
            Ending::BadCall => "bad_call",
            Ending::TurnLimit => "turn_limit",
            Ending::TokenLimit => "token_limit",
            Ending::Timeout => "timeout",
            Ending::Infrastructure => "infrastructure",
        }
    }
}

/// What grading found. Nothing an agent prints can select `Infrastructure`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", content = "reason", rename_all = "snake_case")]
pub enum Verdict {
    Passed,
    /// With a short reason for people: `2 of 8 tests failed`, `not submitted`.
    Failed(String),
    Infrastructure(String),
}

impl Verdict {
    pub fn passed(&self) -> bool {
        matches!(self, Verdict::Passed)
    }
    pub fn infrastructure(&self) -> bool {
        matches!(self, Verdict::Infrastructure(_))
    }
}

/// Behaviour worth watching, counted while the episode runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpisodeCounts {
    pub turns: u32,
    pub edits: u32,
    /// Calls of the `run` tool.
    pub runs: u32,
    /// Runs in which some visible test failed.
    pub failing_runs: u32,
    /// The agent edited again after a failing run.
    pub edited_after_failure: bool,
    /// Some run hit its wall-clock limit: this episode may not reproduce bit for bit.
    pub wall_limit_hit: bool,
}

/// One attempt at one task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    pub task_id: String,
    /// Index of the task within its step (or evaluation), and of the attempt within its group.
    pub task_index: u32,
    pub sample_index: u32,
    pub transcript: Transcript,
    pub ending: Ending,
    pub verdict: Verdict,
    pub counts: EpisodeCounts,
}

/// All attempts at one task by the same policy, infrastructure faults already dropped, in sample order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub task_id: String,
    pub episodes: Vec<Episode>,
    /// Attempts lost to infrastructure faults.
    pub dropped: u32,
}

impl Group {
    /// `[episodes]` 1 where the attempt passed, else 0.
    pub fn outcomes(&self) -> Vec<f64> {
        self.episodes.iter().map(|episode| if episode.verdict.passed() { 1.0 } else { 0.0 }).collect()
    }
}
