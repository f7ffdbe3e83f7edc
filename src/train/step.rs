//! One optimizer step, from samples to weights.
//!
//! ```text
//! samples -> micro-batches -> model.forward -> algorithm.loss -> model.backward -> (sum) -> clip -> AdamW
//! ```
//!
//! Every normaliser is a count over the whole step, so neither the micro-batches nor their order change the result but
//! for the grouping of float sums.

use serde::{Deserialize, Serialize};

use super::batch::{micro_batches, per_token};
use super::optimizer::{AdamW, AdamWSettings};
use crate::algorithm::{ClipSettings, LossStatistics, Mismatch, PolicyLoss, clipped_policy_loss, negative_log_likelihood};
use crate::device::Device;
use crate::model::{Cotangents, Gradients, Model, Scores};
use crate::types::Sample;

/// What both kinds of step need.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StepSettings {
    /// Tokens of one forward and backward pass at most: bounds the memory of activations.
    pub micro_batch_tokens: usize,
    /// Gradients with a larger norm are scaled down to it.
    pub max_gradient_norm: f32,
}

impl Default for StepSettings {
    fn default() -> Self {
        StepSettings { micro_batch_tokens: 2048, max_gradient_norm: 1.0 }
    }
}

impl StepSettings {
    /// # Errors
    /// Names the first setting that makes no sense.
    pub fn check(&self) -> Result<(), String> {
        if self.micro_batch_tokens == 0 {
            return Err("step.micro_batch_tokens = 0: must be at least 1".into());
        }
        if self.max_gradient_norm.is_nan() || self.max_gradient_norm <= 0.0 {
            return Err(format!("step.max_gradient_norm = {}: must be above 0", self.max_gradient_norm));
        }
        Ok(())
    }
}

/// What a step did.
#[derive(Clone, Debug, Default)]
pub struct StepMetrics {
    /// Mean over trained tokens.
    pub loss: f64,
    /// Mean entropy of the trained tokens' distributions, in nats.
    pub entropy: f64,
    /// Before clipping. 0 when nothing was trained.
    pub gradient_norm: f64,
    pub tokens_trained: usize,
    /// Tokens that went through the model, trained or not.
    pub tokens: usize,
    /// Clip counts and ratio extremes of the policy loss.
    pub statistics: LossStatistics,
    /// Sampled against recomputed log-probabilities.
    pub mismatch: Mismatch,
    /// The weights were left alone: nothing to train on, or a gradient that is not a finite number.
    pub skipped: bool,
}

impl StepMetrics {
    /// Adds one of `updates` steps made on the same rollout: counts add up, the rest is averaged.
    pub fn add(&mut self, other: &StepMetrics, updates: usize) {
        self.loss += other.loss / updates as f64;
        self.entropy += other.entropy / updates as f64;
        self.gradient_norm += other.gradient_norm / updates as f64;
        self.tokens_trained += other.tokens_trained;
        self.tokens += other.tokens;
        self.statistics.merge(&other.statistics);
        self.mismatch.merge(&other.mismatch);
        self.skipped &= other.skipped;
    }
}

/// What training changes: the weights, the optimizer's moments, and room for gradients.
pub struct Trainer<D: Device> {
    pub model: Model<D>,
    pub optimizer: AdamW<D>,
    gradients: Gradients<D>,
}

/// What a policy step needs beside samples.
#[derive(Clone, Debug)]
pub struct PolicySettings<'a> {
    /// Temperature at which the samples were drawn.
    pub temperature: f32,
    pub clip: &'a ClipSettings,
}

impl<D: Device> Trainer<D> {
    pub fn new(model: Model<D>, optimizer: AdamWSettings) -> Trainer<D> {
        Trainer { optimizer: AdamW::new(&model, optimizer), gradients: model.new_gradients(), model }
    }

    /// Starts a stage: no moments, no steps taken.
    pub fn reset_optimizer(&mut self, optimizer: AdamWSettings) {
        self.optimizer = AdamW::new(&self.model, optimizer);
    }

    /// A step of rejection fine-tuning: mean negative log-likelihood of the trained tokens.
    pub fn imitation_step(&mut self, samples: &[Sample], learning_rate: f32, settings: &StepSettings) -> StepMetrics {
        self.step(samples, 1.0, learning_rate, settings, |scores, _, denominator, _| {
            negative_log_likelihood(&scores.log_probs, None, denominator)
        })
    }

    /// A step of reinforcement learning: the clipped policy loss, token-level, one denominator for the whole step.
    ///
    /// `old_log_probs[i][t]` is the log-probability of token `t` of sample `i` before this rollout's first update. `None`
    /// for that first update itself: the old policy is then the current one, every ratio is 1, and the forward pass of
    /// this very step is the recomputation that `mismatch` compares with what the engine sampled.
    pub fn policy_step(
        &mut self,
        samples: &[Sample],
        old_log_probs: Option<&[Vec<f32>]>,
        policy: &PolicySettings,
        learning_rate: f32,
        settings: &StepSettings,
    ) -> StepMetrics {
        self.step(samples, policy.temperature, learning_rate, settings, |scores, members, denominator, metrics| {
            let advantages = per_token(samples, members, |index, _| samples[index].advantage);
            let old = match old_log_probs {
                Some(old) => per_token(samples, members, |index, token| old[index][token]),
                None => {
                    let sampled = per_token(samples, members, |index, token| samples[index].sampled_log_probs[token]);
                    metrics.mismatch.merge(&Mismatch::measure(&sampled, &scores.log_probs));
                    scores.log_probs.clone()
                }
            };
            clipped_policy_loss(&scores.log_probs, &old, &advantages, policy.clip, denominator)
        })
    }

    /// Recomputes the log-probability of every trained token of every sample, `[samples][tokens]`, 0 where not trained.
    pub fn recompute_log_probs(&self, samples: &[Sample], temperature: f32, settings: &StepSettings) -> Vec<Vec<f32>> {
        let mut log_probs: Vec<Vec<f32>> = samples.iter().map(|sample| vec![0.0; sample.ids.len()]).collect();
        for (members, batch) in micro_batches(samples, settings.micro_batch_tokens) {
            let scores = self.model.score(&batch, temperature);
            let places = per_token(samples, &members, |index, token| (index, token));
            for ((index, token), log_prob) in places.into_iter().zip(scores.log_probs) {
                log_probs[index][token] = log_prob;
            }
        }
        log_probs
    }

    /// The shared step. `loss` turns the scores of a micro-batch, the indices of its samples and the step's denominator
    /// into a loss.
    fn step(
        &mut self,
        samples: &[Sample],
        temperature: f32,
        learning_rate: f32,
        settings: &StepSettings,
        loss: impl Fn(&Scores, &[usize], f64, &mut StepMetrics) -> PolicyLoss,
    ) -> StepMetrics {
        let tokens_trained: usize = samples.iter().map(Sample::trained_count).sum();
        let mut metrics = StepMetrics { tokens_trained, ..StepMetrics::default() };
        if tokens_trained == 0 {
            metrics.skipped = true;
            return metrics;
        }
        let denominator = tokens_trained as f64;
        self.gradients.clear();
        for (members, batch) in micro_batches(samples, settings.micro_batch_tokens) {
            metrics.tokens += batch.ids.len();
            let scores = self.model.forward_backward(&mut self.gradients, &batch, temperature, |scores| {
                let result = loss(scores, &members, denominator, &mut metrics);
                metrics.loss += result.loss;
                metrics.statistics.merge(&result.statistics);
                Cotangents { log_probs: result.cotangents, entropies: None }
            });
            metrics.entropy += scores.entropies.iter().map(|&entropy| entropy as f64).sum::<f64>() / denominator;
        }
        let Trainer { model, optimizer, gradients } = self;
        metrics.gradient_norm = optimizer.step(model, gradients, learning_rate, settings.max_gradient_norm);
        metrics.skipped = !metrics.gradient_norm.is_finite();
        metrics
    }
}
