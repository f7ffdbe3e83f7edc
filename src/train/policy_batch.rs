//! What a policy step trains on: samples, and what policies that stand still during the update say of their tokens.

use std::ops::Range;

use super::batch::per_token;
use super::step::StepMetrics;
use crate::algorithm::{
    Denominators, LossSettings, Mismatch, PolicyLoss, PolicyTokens, SampledTokens, correct, normalise, policy_loss,
};
use crate::device::Scores;
use crate::types::Sample;

/// Log-probabilities of the policy before the update.
#[derive(Clone, Debug, PartialEq)]
pub enum OldLogProbs {
    /// Those of the very pass that trains, which is then the recomputation: for an update that is the only one of its rollout. Every
    /// ratio is 1.
    ThisPass,
    /// The sampler's, as the samples hold them (bypass).
    Sampled,
    /// `[samples][tokens]` recomputed before the rollout's first update.
    Recomputed(Vec<Vec<f32>>),
}

/// Sequences to train on together. Each counts as one in a mean over sequences, also one without a trained token.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyBatch {
    pub samples: Vec<Sample>,
    pub old_log_probs: OldLogProbs,
    /// `[samples][tokens]` importance weights found before the first update. Where old log-probabilities are not recomputed, those that
    /// the settings ask for are found in the pass that trains.
    pub weights: Option<Vec<Vec<f32>>>,
    /// `[samples][tokens]` of the reference model. Needed if the loss has a KL term.
    pub reference_log_probs: Option<Vec<Vec<f32>>>,
}

impl PolicyBatch {
    /// Samples whose one update is at hand, without a reference.
    pub fn of(samples: Vec<Sample>) -> PolicyBatch {
        PolicyBatch { samples, old_log_probs: OldLogProbs::ThisPass, weights: None, reference_log_probs: None }
    }

    /// The places of all samples.
    pub fn all(&self) -> Range<usize> {
        0..self.samples.len()
    }

    /// Compares the sampler with `recomputed`, `[samples][tokens]`, which from here on are the old log-probabilities. What is rejected is
    /// no longer trained and counts in no mean over tokens.
    pub(super) fn decouple(&mut self, recomputed: Vec<Vec<f32>>, settings: &LossSettings, metrics: &mut StepMetrics) {
        metrics.mismatch.merge(&mismatch_of(&self.samples, &recomputed));
        let mut starts = vec![0];
        starts.extend(self.samples.iter().scan(0, |end, sample| {
            *end += sample.ids.len();
            Some(*end)
        }));
        // The first token of a sequence has no prefix and is never trained.
        let trained =
            self.samples.iter().flat_map(|sample| (0..sample.ids.len()).map(|token| token > 0 && sample.trained[token]));
        let sampled: Vec<f32> = self.samples.iter().flat_map(|sample| sample.sampled_log_probs.iter().copied()).collect();
        let trained: Vec<bool> = trained.collect();
        let tokens =
            SampledTokens { starts: &starts, trained: &trained, log_probs: &recomputed.concat(), sampled_log_probs: &sampled };
        let mut correction = correct(&tokens, &settings.correction);
        let counted = |marks: &[bool]| marks.iter().filter(|&&mark| mark).count();
        metrics.rejected += counted(&trained) - counted(&correction.accepted);
        if let (Some(weights), Some(weight)) = (&mut correction.weights, &settings.correction.weight)
            && weight.normalise
        {
            normalise(weights, correction.statistics.mean());
        }
        metrics.weights.merge(&correction.statistics);
        for (sample, ends) in self.samples.iter_mut().zip(starts.windows(2)) {
            sample.trained.copy_from_slice(&correction.accepted[ends[0]..ends[1]]);
        }
        self.weights =
            correction.weights.map(|weights| starts.windows(2).map(|ends| weights[ends[0]..ends[1]].to_vec()).collect());
        self.old_log_probs = OldLogProbs::Recomputed(recomputed);
    }

    /// The loss of the samples `members`, of whose trained tokens `scores` are.
    pub(super) fn loss(
        &self,
        members: &[usize],
        scores: &Scores,
        settings: &LossSettings,
        denominators: &Denominators,
        metrics: &mut StepMetrics,
    ) -> PolicyLoss {
        let samples = &self.samples;
        let listed = |lists: &Vec<Vec<f32>>| per_token(samples, members, |index, token| lists[index][token]);
        let mut starts = vec![0];
        starts.extend(members.iter().scan(0, |end, &index| {
            *end += samples[index].trained_count();
            Some(*end)
        }));
        let mut trained = vec![true; scores.log_probs.len()];
        let mut weights = self.weights.as_ref().map(listed);
        let old_log_probs = match &self.old_log_probs {
            OldLogProbs::Recomputed(old) => listed(old),
            not_recomputed => {
                let sampled = per_token(samples, members, |index, token| samples[index].sampled_log_probs[token]);
                metrics.mismatch.merge(&Mismatch::measure(&sampled, &scores.log_probs));
                let tokens = SampledTokens {
                    starts: &starts,
                    trained: &trained,
                    log_probs: &scores.log_probs,
                    sampled_log_probs: &sampled,
                };
                let correction = correct(&tokens, &settings.correction);
                metrics.rejected += correction.accepted.iter().filter(|&&accepted| !accepted).count();
                metrics.weights.merge(&correction.statistics);
                (trained, weights) = (correction.accepted, correction.weights);
                if *not_recomputed == OldLogProbs::ThisPass { scores.log_probs.clone() } else { sampled }
            }
        };
        let reference_log_probs = self.reference_log_probs.as_ref().map(listed);
        let tokens = PolicyTokens {
            starts: &starts,
            trained: &trained,
            log_probs: &scores.log_probs,
            old_log_probs: &old_log_probs,
            advantages: &per_token(samples, members, |index, _| samples[index].advantage),
            weights: weights.as_deref(),
            reference_log_probs: reference_log_probs.as_deref(),
            entropies: Some(&scores.entropies),
        };
        policy_loss(&tokens, settings, denominators)
    }
}

/// Sampled against recomputed log-probabilities, `[samples][tokens]`, over the trained tokens.
pub fn mismatch_of(samples: &[Sample], recomputed: &[Vec<f32>]) -> Mismatch {
    let members: Vec<usize> = (0..samples.len()).collect();
    let sampled = per_token(samples, &members, |index, token| samples[index].sampled_log_probs[token]);
    Mismatch::measure(&sampled, &per_token(samples, &members, |index, token| recomputed[index][token]))
}
