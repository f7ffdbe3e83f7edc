//! What a run found: the content of `summary.json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Run, RunError};
use crate::collectives::CollectiveError;
use crate::device::Device;
use crate::evaluate::Evaluation;
use crate::train::Policy;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    pub seed: u64,
    /// By name: `before_rft`, `after_rft`, `rl_step_16`, ..., `after_rl`.
    pub evaluation: BTreeMap<String, Evaluation>,
    pub parameters: usize,
    /// SHA-256 over every tensor's name, shape and f32 bytes, in order of names.
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

/// The hash of a policy's weights, the same on every machine and any number of ranks for the same weights. All ranks make this
/// call.
fn weights_sha256<D: Device>(policy: &Policy<D>) -> Result<String, CollectiveError> {
    let mut parts: Vec<_> = policy.layout().parts().collect();
    parts.sort_by(|(_, left), (_, right)| left.name.cmp(&right.name));
    let mut hash = Sha256::new();
    for (index, part) in parts {
        hash.update(part.name.as_bytes());
        for &extent in &part.shape {
            hash.update((extent as u64).to_le_bytes());
        }
        for value in &policy.tensor(index)?[part.offset..part.offset + part.length()] {
            hash.update(value.to_le_bytes());
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

impl<D: Device> Run<'_, D> {
    pub(super) fn summarise(&mut self) -> Result<Summary, RunError> {
        if let Some(log) = &mut self.log {
            log.commit()?;
        }
        let policy = self.learner.trainer.policy();
        let state = &self.learner.state;
        Ok(Summary {
            seed: self.context.settings.seed,
            evaluation: state.evaluations.clone(),
            parameters: policy.parameter_count(),
            weights_sha256: weights_sha256(policy)?,
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
