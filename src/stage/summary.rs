//! What a run found: the content of `summary.json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Learner, Run, RunError};
use crate::collectives::CollectiveError;
use crate::device::Device;
use crate::evaluate::Evaluation;
use crate::parallel::Ranks;
use crate::train::Policy;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    pub seed: u64,
    /// In the order they ran in.
    pub stages: Vec<StageSummary>,
    /// By name, that of the stage that evaluates, or `STAGE_step_N` between the steps of another: `before_rft`, `rl_step_16`.
    pub evaluation: BTreeMap<String, Evaluation>,
    pub parameters: usize,
    /// SHA-256 over every tensor's name, shape and the SHA-256 of its f32 bytes, in order of names.
    pub weights_sha256: String,
    pub rft_steps: usize,
    pub rl_steps: usize,
    /// Largest difference between sampled and recomputed log-probabilities in the whole run; 0 is what the built-in
    /// engine promises.
    pub mismatch_max: f64,
    /// Verdicts that came from really running tests.
    pub verdicts_executed: u64,
    /// Verdicts of deterministic tests remembered from a run of the same files.
    pub verdicts_remembered: u64,
    /// Episodes in which a wall-clock limit fired: such a run may not reproduce bit for bit.
    pub wall_limit_hits: u64,
    /// Episodes lost to infrastructure faults and left out of everything.
    pub episodes_lost: u64,
    pub sandbox_tier: String,
    /// Wall-clock seconds by phase, all starts of the run together.
    pub seconds: BTreeMap<String, f64>,
}

/// What one stage of the run did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageSummary {
    pub name: String,
    pub kind: String,
    pub steps: usize,
    /// Tasks it could train on.
    pub tasks: usize,
    /// Names of its evaluations, in order.
    pub evaluations: Vec<String>,
    pub seconds: f64,
}

/// The hash of a policy's weights, the same on every machine and any number of ranks for the same weights. All ranks make this
/// call.
fn weights_sha256<D: Device>(policy: &mut Policy<D>, ranks: &Ranks) -> Result<String, CollectiveError> {
    // Tensors come one by one, in no order of names: each is hashed at once and not kept.
    let mut tensors = BTreeMap::new();
    policy.gather_tensors(
        |_| ranks.first(),
        |name, shape, values| {
            let mut hash = Sha256::new();
            values.iter().for_each(|value| hash.update(value.to_le_bytes()));
            tensors.insert(name.to_owned(), (shape.to_vec(), hash.finalize()));
        },
    )?;
    let mut hash = Sha256::new();
    for (name, (shape, values)) in tensors {
        hash.update(name.as_bytes());
        shape.iter().for_each(|&extent| hash.update((extent as u64).to_le_bytes()));
        hash.update(values);
    }
    ranks.broadcast(Some(&hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>()))
}

impl<D: Device> Run<'_, D> {
    pub(super) fn summarise(&mut self) -> Result<Summary, RunError> {
        if let Some(log) = &mut self.log {
            log.commit()?;
        }
        let Learner { trainer, state } = &mut *self.learner;
        let weights_sha256 = weights_sha256(trainer.policy_mut(), self.context.ranks)?;
        let stages = self.context.stages.iter().map(|stage| {
            let record = state.stages.get(&stage.name).cloned().unwrap_or_default();
            StageSummary {
                name: stage.name.clone(),
                kind: stage.kind.name().into(),
                steps: record.steps,
                tasks: record.pool,
                evaluations: record.evaluations,
                seconds: record.seconds,
            }
        });
        Ok(Summary {
            seed: self.context.seed,
            stages: stages.collect(),
            evaluation: state.evaluations.clone(),
            parameters: trainer.policy().parameter_count(),
            weights_sha256,
            rft_steps: state.rft_steps,
            rl_steps: state.rl_steps,
            mismatch_max: state.mismatch_max,
            verdicts_executed: state.verdicts_executed,
            verdicts_remembered: state.verdicts_remembered,
            wall_limit_hits: state.wall_limit_hits,
            episodes_lost: state.episodes_lost,
            sandbox_tier: self.context.sandbox_tier.to_string(),
            seconds: state.seconds.clone(),
        })
    }
}
