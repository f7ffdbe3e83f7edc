//! One optimizer step, from samples to weights.
//!
//! ```text
//! samples -> micro-batches -> model.forward -> algorithm.loss -> model.backward -> (sum) -> clip -> AdamW
//! ```
//!
//! Every normaliser is a count over the whole step, so neither the micro-batches nor their order nor the ranks change the
//! result but for the grouping of float sums.
//!
//! All ranks are given all samples. Micro-batches are dealt to replicas; the ranks of a replica share each of its micro-batches.

use std::ops::Range;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::batch::{MicroBatch, micro_batches, per_token};
use super::checkpoint::{CheckpointError, Snapshot};
use super::optimizer::{AdamW, AdamWSettings, MomentPlace, NormLimits, Stepped};
use super::policy::{Frozen, Policy};
use super::policy_batch::PolicyBatch;
use crate::algorithm::{
    Denominators, LossSettings, LossStatistics, Mismatch, PolicyLoss, Problems, SettingErrors, WeightStatistics,
    negative_log_likelihood,
};
use crate::collectives::CollectiveError;
use crate::device::{Cotangents, Device, Scores};
use crate::model::{Model, PassSettings};
use crate::parallel::{World, deal, pairs_per_token};
use crate::types::{Batch, Sample, exact};

/// What both kinds of step need.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StepSettings {
    /// Tokens of one forward and backward pass at most, for each rank that shares it: bounds the memory of activations.
    pub micro_batch_tokens: usize,
    /// Gradients with a larger norm are scaled down to it.
    pub max_gradient_norm: f64,
    /// A step whose gradients have this norm or a larger one before that is not taken. Off when absent; one whose norm is not finite never
    /// is. DeepSWE: 1e5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip_norm: Option<f64>,
    /// Run each layer again before its backward instead of keeping its activations: less memory, a third more work, the same bits.
    pub recompute: bool,
    /// Keep the optimizer's moments in the host's memory and update there: less of the device's memory, slower.
    pub offload_optimizer: bool,
}

impl Default for StepSettings {
    fn default() -> Self {
        StepSettings {
            micro_batch_tokens: 2048,
            max_gradient_norm: 1.0,
            skip_norm: None,
            recompute: false,
            offload_optimizer: false,
        }
    }
}

impl StepSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let mut problems = Problems::default();
        problems.unless(self.micro_batch_tokens > 0, "micro_batch_tokens", self.micro_batch_tokens, "give at least 1");
        let norm = self.max_gradient_norm;
        problems.unless(norm > 0.0, "max_gradient_norm", norm, "give a number above 0");
        if let Some(skip) = self.skip_norm {
            let remedy = format!("give more than step.max_gradient_norm = {norm}, up to which steps are usual, or leave it out");
            problems.unless(skip > norm, "skip_norm", skip, &remedy);
        }
        problems.finish()
    }

    fn moments(&self) -> MomentPlace {
        if self.offload_optimizer { MomentPlace::Host } else { MomentPlace::Device }
    }
}

/// What a step did, on all ranks together.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Mean over trained tokens.
    #[serde(with = "exact")]
    pub loss: f64,
    /// Mean entropy of the trained tokens' distributions, in nats.
    #[serde(with = "exact")]
    pub entropy: f64,
    /// Before clipping. 0 when nothing was trained.
    #[serde(with = "exact")]
    pub gradient_norm: f64,
    pub tokens_trained: usize,
    /// Tokens that went through the model, trained or not.
    pub tokens: usize,
    /// Clip counts and ratio extremes of the policy loss.
    pub statistics: LossStatistics,
    /// Sampled against recomputed log-probabilities.
    pub mismatch: Mismatch,
    /// Importance weights of the trained tokens; raw ratios of the trainer's over the sampler's probability where none are applied.
    pub weights: WeightStatistics,
    /// Tokens that the settings reject as too far from what the sampler says.
    pub rejected: usize,
    /// Optimizer steps, and those of them that left the weights alone.
    pub updates: usize,
    pub updates_skipped: usize,
    /// The weights were left alone: nothing to train on, or gradients that are not finite numbers or too large.
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
        self.weights.merge(&other.weights);
        self.rejected += other.rejected;
        self.updates += other.updates;
        self.updates_skipped += other.updates_skipped;
        self.skipped &= other.skipped;
    }

    /// Adds what another replica found in its micro-batches of the same step.
    fn add_share(&mut self, other: &StepMetrics) {
        self.loss += other.loss;
        self.entropy += other.entropy;
        self.tokens += other.tokens;
        self.statistics.merge(&other.statistics);
        self.mismatch.merge(&other.mismatch);
        self.weights.merge(&other.weights);
        self.rejected += other.rejected;
    }
}

/// What training changes: the weights, the optimizer's moments, and room for gradients. All ranks make the same calls.
pub struct Trainer<D: Device> {
    policy: Policy<D>,
    optimizer: AdamW<D>,
    world: World<D>,
    /// What a KL term pulls towards.
    reference: Option<Frozen<D>>,
}

/// What a policy step needs beside samples.
#[derive(Clone, Debug)]
pub struct PolicySettings<'a> {
    /// Temperature at which the samples were drawn.
    pub temperature: f32,
    pub loss: &'a LossSettings,
}

impl<D: Device> Trainer<D> {
    pub fn new(mut policy: Policy<D>, world: World<D>, optimizer: AdamWSettings, step: &StepSettings) -> Trainer<D> {
        let device = policy.device().clone();
        Trainer { optimizer: AdamW::new(&device, policy.pieces(), optimizer, step.moments()), policy, world, reference: None }
    }

    pub fn policy(&self) -> &Policy<D> {
        &self.policy
    }

    pub fn policy_mut(&mut self) -> &mut Policy<D> {
        &mut self.policy
    }

    /// A model to sample from, with the weights of this moment.
    pub fn sampler(&mut self) -> Result<&Model<D>, CollectiveError> {
        self.policy.sampler()
    }

    /// Optimizer steps taken since the stage started.
    pub fn optimizer_steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Starts a stage: no moments, no steps taken.
    pub fn reset_optimizer(&mut self, optimizer: AdamWSettings) {
        self.optimizer.reset(optimizer);
    }

    /// What this rank writes of a checkpoint of this moment.
    pub fn snapshot(&mut self) -> Result<Snapshot, CollectiveError> {
        Snapshot::take(&mut self.policy, &self.optimizer, &self.world.ranks)
    }

    /// Takes up the optimizer's state from a checkpoint that any number of ranks wrote.
    pub fn restore_optimizer(&mut self, checkpoint: &Path) -> Result<(), CheckpointError> {
        super::checkpoint::restore(checkpoint, self.policy.layout(), &mut self.optimizer)
    }

    /// Takes the weights of a Hugging Face directory as the reference of the KL term, in place of any before.
    ///
    /// # Errors
    /// They cannot be read, on this rank or another.
    pub fn load_reference(&mut self, directory: &Path) -> Result<(), CheckpointError> {
        self.reference = None;
        let loaded = Frozen::load(self.policy.device().clone(), directory, &self.world);
        let reasons = self.world.ranks.gather(&loaded.as_ref().err().map(ToString::to_string))?;
        self.reference = Some(loaded?);
        match reasons.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?))) {
            Some((rank, reason)) => Err(CheckpointError::Elsewhere { rank, reason }),
            None => Ok(()),
        }
    }

    /// Gives the memory of the reference back.
    pub fn drop_reference(&mut self) {
        self.reference = None;
    }

    /// A step of rejection fine-tuning: mean negative log-likelihood of the trained tokens.
    pub fn imitation_step(
        &mut self,
        samples: &[Sample],
        learning_rate: f32,
        settings: &StepSettings,
    ) -> Result<StepMetrics, CollectiveError> {
        self.step(samples, 1.0, learning_rate, settings, |scores, _, denominators, _| {
            negative_log_likelihood(&scores.log_probs, None, denominators.tokens)
        })
    }

    /// A step of reinforcement learning: the policy loss over the samples `update` of a batch, whose counts are the denominators.
    ///
    /// # Panics
    /// If the loss has a KL term and the batch no reference log-probabilities.
    pub fn policy_step(
        &mut self,
        batch: &PolicyBatch,
        update: Range<usize>,
        policy: &PolicySettings,
        learning_rate: f32,
        settings: &StepSettings,
    ) -> Result<StepMetrics, CollectiveError> {
        let (samples, first) = (&batch.samples[update.clone()], update.start);
        self.step(samples, policy.temperature, learning_rate, settings, |scores, members, denominators, metrics| {
            let members: Vec<usize> = members.iter().map(|member| first + member).collect();
            batch.loss(&members, scores, policy.loss, denominators, metrics)
        })
    }

    /// Recomputes the log-probability of every trained token of every sample, `[samples][tokens]`, 0 where not trained.
    pub fn recompute_log_probs(
        &mut self,
        samples: &[Sample],
        temperature: f32,
        settings: &StepSettings,
    ) -> Result<Vec<Vec<f32>>, CollectiveError> {
        self.log_probs(samples, settings, |trainer, batch| trainer.policy.score(batch, temperature))
    }

    /// The same of the reference.
    ///
    /// # Panics
    /// Without one: [`Trainer::load_reference`] comes first.
    pub fn reference_log_probs(
        &mut self,
        samples: &[Sample],
        temperature: f32,
        settings: &StepSettings,
    ) -> Result<Vec<Vec<f32>>, CollectiveError> {
        self.log_probs(samples, settings, |trainer, batch| {
            trainer.reference.as_mut().expect("a KL term needs a reference").score(batch, temperature)
        })
    }

    fn log_probs(
        &mut self,
        samples: &[Sample],
        settings: &StepSettings,
        score: impl Fn(&mut Trainer<D>, &Batch) -> Scores,
    ) -> Result<Vec<Vec<f32>>, CollectiveError> {
        let batches = self.micro_batches(samples, settings);
        let mut own = Vec::new();
        let nothing = MicroBatch::empty();
        for place in self.own_share(&batches) {
            let scores = score(self, &place.map_or(&nothing, |place| &batches[place]).packed);
            // As bits, for JSON has no words for what a broken model may give.
            own.extend(place.map(|place| (place, scores.log_probs.iter().map(|value| value.to_bits()).collect::<Vec<u32>>())));
        }
        let mut log_probs: Vec<Vec<f32>> = samples.iter().map(|sample| vec![0.0; sample.ids.len()]).collect();
        for (place, scored) in self.of_every_replica(own)?.into_iter().flatten() {
            let tokens = per_token(samples, &batches[place].members, |index, token| (index, token));
            for ((index, token), log_prob) in tokens.into_iter().zip(scored) {
                log_probs[index][token] = f32::from_bits(log_prob);
            }
        }
        Ok(log_probs)
    }

    /// The shared step. `loss` turns the scores of a micro-batch, the indices of its samples and the step's denominators into a
    /// loss.
    fn step(
        &mut self,
        samples: &[Sample],
        temperature: f32,
        learning_rate: f32,
        settings: &StepSettings,
        loss: impl Fn(&Scores, &[usize], &Denominators, &mut StepMetrics) -> PolicyLoss,
    ) -> Result<StepMetrics, CollectiveError> {
        let tokens_trained: usize = samples.iter().map(Sample::trained_count).sum();
        let mut metrics = StepMetrics { tokens_trained, updates: 1, updates_skipped: 1, skipped: true, ..StepMetrics::default() };
        if tokens_trained == 0 {
            return Ok(metrics);
        }
        let denominators = Denominators { tokens: tokens_trained as f64, sequences: samples.len() as f64 };
        let batches = self.micro_batches(samples, settings);
        let pass = PassSettings { temperature, recompute: settings.recompute };

        // 1. Gradients of this replica's micro-batches; those of all ranks add up as they go to their owners.
        let (mut own, nothing) = (StepMetrics::default(), MicroBatch::empty());
        self.policy.clear_gradients();
        for place in self.own_share(&batches) {
            let MicroBatch { members, packed } = place.map_or(&nothing, |place| &batches[place]);
            own.tokens += packed.ids.len();
            let scores = self.policy.forward_backward(packed, pass, |scores| {
                let result = loss(scores, members, &denominators, &mut own);
                own.loss += result.loss;
                own.statistics.merge(&result.statistics);
                Cotangents { log_probs: result.cotangents, entropies: result.entropy_cotangents }
            });
            own.entropy += scores.entropies.iter().map(|&entropy| entropy as f64).sum::<f64>() / denominators.tokens;
        }

        // 2. What all replicas found.
        for replica in self.of_every_replica(own)? {
            metrics.add_share(&replica);
        }
        if metrics.statistics.tokens == 0 {
            // All was rejected, or nothing was a finite number: a step on no gradient would still decay weights and moments.
            return Ok(metrics);
        }

        // 3. The update, each rank on its own pieces.
        let Trainer { policy, optimizer, world, .. } = self;
        let norms = NormLimits { clip: settings.max_gradient_norm as f32, skip: settings.skip_norm.map(|norm| norm as f32) };
        let Stepped { norm, skipped } = optimizer.step(policy.pieces(), &world.ranks, learning_rate, norms)?;
        policy.after_step();
        (metrics.gradient_norm, metrics.skipped, metrics.updates_skipped) = (norm, skipped, usize::from(skipped));
        Ok(metrics)
    }

    /// The step's micro-batches, the same on all ranks: each as long as the ranks that share it bear together.
    fn micro_batches(&self, samples: &[Sample], settings: &StepSettings) -> Vec<MicroBatch> {
        micro_batches(samples, settings.micro_batch_tokens * self.world.mesh.context())
    }

    /// Places of the micro-batches that this rank's replica computes, one after another: as many for every replica, `None` where
    /// another one has the last.
    fn own_share(&self, batches: &[MicroBatch]) -> Vec<Option<usize>> {
        let World { ranks, mesh, .. } = &self.world;
        if mesh.data() == 1 {
            return (0..batches.len()).map(Some).collect();
        }
        let packed = batches.iter().map(|batch| &batch.packed);
        deal(packed, mesh.data(), pairs_per_token(self.policy.config())).swap_remove(mesh.coordinates(ranks.rank()).data)
    }

    /// What each replica has, by replica: its ranks have the same, and the first of them tells.
    fn of_every_replica<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<Vec<T>, CollectiveError> {
        let World { ranks, mesh, .. } = &self.world;
        if mesh.world() == 1 {
            return Ok(vec![own]);
        }
        let tells = mesh.coordinates(ranks.rank()).context == 0;
        Ok(ranks.gather(&tells.then_some(own))?.into_iter().flatten().collect())
    }
}
