//! What a checkpoint must remember beside weights and optimizer.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::RlProgress;
use crate::evaluate::Evaluation;
use crate::grader::Counters;
use crate::types::{Episode, exact};

/// Where a run is and what it has found so far.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// The stage under way, counted from 0; as many as there are stages once all are done.
    pub stage: usize,
    /// Steps done within it.
    pub step: usize,
    pub rft_steps: usize,
    pub rl_steps: usize,
    /// Of the stage of reinforcement learning, if the run is in it.
    pub rl: RlProgress,
    /// Lines of `metrics.jsonl` that belong to this state.
    pub metrics_lines: usize,
    pub evaluations: BTreeMap<String, Evaluation>,
    /// By name, what each stage that has begun did so far.
    pub stages: BTreeMap<String, StageRecord>,
    /// Ids of tasks that curricula have left out.
    pub left_out: BTreeSet<String>,
    /// SHA-256 of all tasks of the run: a resumed run must see the same.
    pub tasks_sha256: String,
    /// Largest difference seen between sampled and recomputed log-probabilities; infinite if either was.
    #[serde(with = "exact")]
    pub mismatch_max: f64,
    /// Verdicts that came from running tests, and verdicts remembered from an equal run before.
    pub verdicts_executed: u64,
    pub verdicts_remembered: u64,
    /// Episodes in which a wall-clock limit fired: they may not reproduce.
    pub wall_limit_hits: u64,
    /// Episodes lost to infrastructure faults and left out of everything.
    pub episodes_lost: u64,
    /// Wall-clock seconds by phase. With those of the stages the only part that differs between equal runs.
    pub seconds: BTreeMap<String, f64>,
}

/// What one stage did.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageRecord {
    /// Wall-clock time, all starts of the run together.
    pub seconds: f64,
    /// Optimizer steps of fine-tuning, rollouts of reinforcement learning.
    pub steps: usize,
    /// Tasks it could train on.
    pub pool: usize,
    /// Names of its evaluations, in order.
    pub evaluations: Vec<String>,
    /// By id, its attempts at training tasks: all of them, whether or not they were trained on.
    pub attempts: BTreeMap<String, Attempts>,
}

/// Attempts of the policy at one task. Those lost to infrastructure faults say nothing and are not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attempts {
    pub made: u64,
    pub passed: u64,
}

impl Attempts {
    /// By task.
    pub fn count(episodes: &[Episode]) -> BTreeMap<String, Attempts> {
        let mut attempts: BTreeMap<String, Attempts> = BTreeMap::new();
        for episode in episodes.iter().filter(|episode| !episode.verdict.infrastructure()) {
            let of_task = attempts.entry(episode.task_id.clone()).or_default();
            of_task.made += 1;
            of_task.passed += episode.verdict.passed() as u64;
        }
        attempts
    }
}

impl RunState {
    /// A run on the tasks with this hash that has done nothing yet.
    pub fn start(tasks_sha256: String) -> RunState {
        RunState {
            stage: 0,
            step: 0,
            rft_steps: 0,
            rl_steps: 0,
            rl: RlProgress::default(),
            metrics_lines: 0,
            evaluations: BTreeMap::new(),
            stages: BTreeMap::new(),
            left_out: BTreeSet::new(),
            tasks_sha256,
            mismatch_max: 0.0,
            verdicts_executed: 0,
            verdicts_remembered: 0,
            wall_limit_hits: 0,
            episodes_lost: 0,
            seconds: BTreeMap::new(),
        }
    }

    /// Training steps of all stages so far: names the checkpoint.
    pub fn steps(&self) -> usize {
        self.rft_steps + self.rl_steps
    }

    /// Number of the weights, noted beside each sampled token.
    pub fn version(&self) -> u32 {
        self.steps() as u32
    }

    /// What the stage with this name did so far.
    pub fn of_stage(&mut self, name: &str) -> &mut StageRecord {
        self.stages.entry(name.to_owned()).or_default()
    }

    pub fn add_seconds(&mut self, phase: &str, seconds: f64) {
        *self.seconds.entry(phase.to_owned()).or_default() += seconds;
    }

    pub fn count_verdicts(&mut self, counts: Counters) {
        self.verdicts_executed += counts.executed;
        self.verdicts_remembered += counts.remembered;
    }

    /// Counts episodes that may not reproduce, and those lost to infrastructure faults.
    pub fn count_faults(&mut self, episodes: &[Episode]) {
        self.wall_limit_hits += episodes.iter().filter(|episode| episode.counts.wall_limit_hit).count() as u64;
        self.episodes_lost += episodes.iter().filter(|episode| episode.verdict.infrastructure()).count() as u64;
    }

    /// Counts the attempts of a stage at training tasks, for the curricula after it.
    pub fn count_attempts(&mut self, stage: &str, attempts: BTreeMap<String, Attempts>) {
        let counted = &mut self.of_stage(stage).attempts;
        for (task, Attempts { made, passed }) in attempts {
            let of_task = counted.entry(task).or_default();
            of_task.made += made;
            of_task.passed += passed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_with_a_mismatch_beyond_all_bounds_can_be_read_again() {
        for mismatch_max in [0.1, f64::INFINITY, f64::NAN] {
            let state = RunState { mismatch_max, ..RunState::start("these".into()) };
            let read: RunState = serde_json::from_slice(&serde_json::to_vec_pretty(&state).unwrap()).unwrap();
            assert_eq!(read.mismatch_max.to_bits(), mismatch_max.to_bits());
        }
    }
}
