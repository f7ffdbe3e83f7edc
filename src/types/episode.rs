//! What an agent did with a task, as tokens, and how it ended.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::exact;

/// Token ids of one episode with what training needs to know of each. The first four lists have the same length.
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
    /// Places of the sampled turns that were refused because they were no valid call, in order.
    #[serde(default)]
    pub refused: Vec<Range<usize>>,
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

    /// Notes that the turn which ends the transcript was refused.
    pub fn refuse_turn(&mut self) {
        let start = self.sampled.iter().rposition(|&sampled| !sampled).map_or(0, |last| last + 1);
        self.refused.push(start..self.ids.len());
    }

    /// Puts other tokens in the place of those before the first sampled one, as if the policy had been told something else.
    pub fn replace_opening(&mut self, opening: &[u32]) {
        let old = self.sampled.iter().position(|&sampled| sampled).unwrap_or(self.ids.len());
        self.ids.splice(..old, opening.iter().copied());
        self.sampled.splice(..old, opening.iter().map(|_| false));
        self.log_probs.splice(..old, opening.iter().map(|_| 0.0));
        self.versions.splice(..old, opening.iter().map(|_| 0));
        for turn in &mut self.refused {
            *turn = turn.start - old + opening.len()..turn.end - old + opening.len();
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_turns_keep_their_place_when_the_opening_is_replaced() {
        let mut transcript = Transcript::default();
        transcript.push_environment(&[1, 2, 3]);
        transcript.push_sampled(&[10, 11], &[-0.1, -0.2], 5);
        transcript.refuse_turn();
        transcript.push_environment(&[4]);
        transcript.push_sampled(&[12], &[-0.3], 5);
        for opening in [&[7u32][..], &[1, 2, 3, 8, 9], &[]] {
            transcript.replace_opening(opening);
            assert_eq!(transcript.ids, [opening, &[10, 11, 4, 12]].concat());
            let turn = transcript.refused[0].clone();
            assert_eq!((&transcript.ids[turn.clone()], transcript.refused.len()), (&[10, 11][..], 1));
            assert!(transcript.sampled[turn].iter().all(|&sampled| sampled));
            assert_eq!((transcript.sampled_count(), transcript.log_probs.len()), (3, transcript.ids.len()));
            assert_eq!(transcript.versions.iter().filter(|&&version| version == 5).count(), 3);
        }
    }
}
