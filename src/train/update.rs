//! What is learned from one rollout: as many optimizer steps as its sequences make, against policies that stand still meanwhile.
//!
//! ```text
//! samples -> old and reference log-probabilities -> rejections, weights -> update, update, ... -> (again, for each pass)
//! ```

use std::ops::Range;

use super::policy_batch::{OldLogProbs, PolicyBatch};
use super::step::{PolicySettings, StepMetrics, StepSettings, Trainer};
use crate::algorithm::OldPolicy;
use crate::collectives::CollectiveError;
use crate::device::Device;
use crate::types::Sample;

/// How a rollout is cut into optimizer steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdatePlan {
    /// Sequences of one optimizer step, in the order of the rollout; the last has what is left. 0: all of them.
    pub sequences_per_update: usize,
    /// Times that the rollout is gone through.
    pub passes: usize,
}

impl UpdatePlan {
    /// The samples of each optimizer step.
    fn updates(&self, samples: usize) -> Vec<Range<usize>> {
        let size = if self.sequences_per_update == 0 { samples.max(1) } else { self.sequences_per_update };
        let pass = (0..samples).step_by(size).map(|start| start..samples.min(start + size));
        std::iter::repeat_n(pass, self.passes).flatten().collect()
    }
}

impl<D: Device> Trainer<D> {
    /// Trains on the samples of one rollout. Every one of them counts as a sequence, also one without a trained token.
    ///
    /// Of the metrics, counts and statistics are those of all updates, the rest are means over updates; the mismatch is that of the weights
    /// before the first one.
    pub fn train_on_rollout(
        &mut self,
        samples: Vec<Sample>,
        policy: &PolicySettings,
        plan: UpdatePlan,
        learning_rate: f32,
        step: &StepSettings,
    ) -> Result<StepMetrics, CollectiveError> {
        let updates = plan.updates(samples.len());
        let mut total = StepMetrics { skipped: true, ..StepMetrics::default() };
        let batch = self.prepare(samples, policy, updates.len(), step, &mut total)?;
        for (place, range) in updates.iter().enumerate() {
            let mut metrics = self.policy_step(&batch, range.clone(), policy, learning_rate, step)?;
            if place > 0 {
                // By now the policy has moved away from the sampler's, which is no fault of either.
                metrics.mismatch = Default::default();
            }
            total.add(&metrics, updates.len());
        }
        Ok(total)
    }

    /// Everything about the samples that does not change while the policy does.
    fn prepare(
        &mut self,
        samples: Vec<Sample>,
        policy: &PolicySettings,
        updates: usize,
        step: &StepSettings,
        metrics: &mut StepMetrics,
    ) -> Result<PolicyBatch, CollectiveError> {
        let correction = &policy.loss.correction;
        let mut batch = PolicyBatch::of(samples);
        // What is rejected, and the mean of the weights, must be known of the whole rollout before its first update.
        let asks_ahead = !correction.rejections.is_empty() || correction.weight.as_ref().is_some_and(|weight| weight.normalise);
        match correction.old_policy {
            OldPolicy::Sampler => batch.old_log_probs = OldLogProbs::Sampled,
            OldPolicy::Recomputed if updates > 1 || asks_ahead => {
                let recomputed = self.recompute_log_probs(&batch.samples, policy.temperature, step)?;
                batch.decouple(recomputed, policy.loss, metrics);
            }
            OldPolicy::Recomputed => {}
        }
        if policy.loss.kl.coefficient != 0.0 {
            batch.reference_log_probs = Some(self.reference_log_probs(&batch.samples, policy.temperature, step)?);
        }
        Ok(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updates_go_through_the_rollout_in_order_as_often_as_asked() {
        let updates = |sequences_per_update, passes, samples| UpdatePlan { sequences_per_update, passes }.updates(samples);
        assert_eq!(updates(0, 2, 5), [0..5, 0..5]);
        assert_eq!(updates(2, 1, 5), [0..2, 2..4, 4..5]);
        assert_eq!(updates(8, 2, 5), [0..5, 0..5]);
        assert!(updates(0, 1, 0).is_empty() && updates(3, 2, 0).is_empty(), "nothing to train on is no update");
    }
}
