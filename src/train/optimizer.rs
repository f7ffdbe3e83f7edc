//! AdamW over the pieces of a model's tensors that this rank changes, with clipping by the global norm.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::algorithm::{Problems, SettingErrors};
use crate::collectives::CollectiveError;
use crate::device::{AdamWStep, CpuDevice, Device, Role};
use crate::model::Piece;
use crate::parallel::Ranks;

/// The constants of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWSettings {
    /// Of the running mean of gradients.
    pub beta1: f64,
    /// Of the running mean of their squares.
    pub beta2: f64,
    /// Added to the root of the latter.
    pub epsilon: f64,
    /// On matrices, embeddings among them; not on norms and biases.
    pub weight_decay: f64,
}

impl Default for AdamWSettings {
    fn default() -> Self {
        AdamWSettings { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0 }
    }
}

impl AdamWSettings {
    /// # Errors
    /// All that makes no sense.
    pub fn check(&self) -> Result<(), SettingErrors> {
        let AdamWSettings { beta1, beta2, epsilon, weight_decay } = *self;
        let mut problems = Problems::default();
        for (name, beta) in [("beta1", beta1), ("beta2", beta2)] {
            problems.unless((0.0..1.0).contains(&beta), name, beta, "give at least 0 and less than 1");
        }
        // Where a gradient is 0 the root is too.
        problems.unless(epsilon > 0.0 && epsilon.is_finite(), "epsilon", epsilon, "give a finite number above 0");
        let possible = weight_decay >= 0.0 && weight_decay.is_finite();
        problems.unless(possible, "weight_decay", weight_decay, "give a finite number of at least 0");
        problems.finish()
    }
}

/// What is done about large gradients, by their global norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormLimits {
    /// Above this they are scaled down to it.
    pub clip: f32,
    /// From this on the step is not taken.
    pub skip: Option<f32>,
}

impl NormLimits {
    /// No step is too large to be taken.
    pub fn clip_at(clip: f32) -> NormLimits {
        NormLimits { clip, skip: None }
    }
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stepped {
    /// Of the gradients of all ranks, before clipping.
    pub norm: f64,
    /// Weights and moments were left as they were.
    pub skipped: bool,
}

/// Where the moments are and the update is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentPlace {
    Device,
    /// In the host's memory: 8 bytes per parameter less on the device, for gradients and weights that travel there and back.
    Host,
}

/// AdamW (Loshchilov and Hutter 2019) in PyTorch's form: decoupled weight decay, bias-corrected moments.
pub struct AdamW<D: Device> {
    settings: AdamWSettings,
    device: D,
    steps: u64,
    /// Of each piece, the tensor's elements that it holds.
    ranges: Vec<Range<usize>>,
    moments: Moments<D>,
}

enum Moments<D: Device> {
    Device(Vec<Pair<D::Buffer>>),
    Host(CpuDevice, Vec<Pair<Vec<f32>>>),
}

/// Running means of gradients and of their squares, `[piece]`, padded as the piece is.
struct Pair<B> {
    first: B,
    second: B,
}

impl<D: Device> AdamW<D> {
    /// For pieces like these.
    pub fn new<'a>(
        device: &D,
        pieces: impl IntoIterator<Item = Piece<'a, D>>,
        settings: AdamWSettings,
        place: MomentPlace,
    ) -> AdamW<D> {
        let (ranges, lengths): (Vec<_>, Vec<_>) =
            pieces.into_iter().map(|piece| (piece.range, device.length(piece.gradient))).unzip();
        let moments = match place {
            MomentPlace::Device => {
                let zeros = |&length: &usize| device.zeros(Role::Optimizer, length);
                Moments::Device(lengths.iter().map(|length| Pair { first: zeros(length), second: zeros(length) }).collect())
            }
            MomentPlace::Host => {
                let zeros = |&length: &usize| vec![0.0; length];
                let pairs = lengths.iter().map(|length| Pair { first: zeros(length), second: zeros(length) });
                Moments::Host(CpuDevice::new(), pairs.collect())
            }
        };
        AdamW { settings, device: device.clone(), steps: 0, ranges, moments }
    }

    /// No moments, no steps taken, in the memory that is there: at no time are there two optimizers.
    pub(super) fn reset(&mut self, settings: AdamWSettings) {
        (self.settings, self.steps) = (settings, 0);
        match &mut self.moments {
            Moments::Device(pairs) => {
                for moment in pairs.iter_mut().flat_map(|Pair { first, second }| [first, second]) {
                    self.device.clear(moment, self.device.length(moment));
                }
            }
            Moments::Host(_, pairs) => {
                pairs.iter_mut().flat_map(|Pair { first, second }| [first, second]).for_each(|moment| moment.fill(0.0));
            }
        }
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// One step on the pieces of all ranks. Gradients are scaled down so that their global norm is at most `norms.clip`. If the norm
    /// before that is not finite, or `norms.skip` or more, nothing is changed, and the caller must say so.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn step<'a>(
        &mut self,
        pieces: impl IntoIterator<Item = Piece<'a, D>>,
        ranks: &Ranks,
        learning_rate: f32,
        norms: NormLimits,
    ) -> Result<Stepped, CollectiveError> {
        let pieces: Vec<_> = pieces.into_iter().collect();
        let squares: Vec<f64> = pieces.iter().map(|piece| self.device.sum_of_squares(piece.gradient)).collect();
        let mut sum = [squares.iter().sum::<f64>()];
        ranks.sum(&mut sum)?;
        let norm = sum[0].sqrt();
        if !norm.is_finite() || norms.skip.is_some_and(|skip| norm >= skip as f64) {
            return Ok(Stepped { norm, skipped: true });
        }
        self.steps += 1;
        let clip = norms.clip as f64;
        let gradient_scale = if norm > clip { (clip / norm) as f32 } else { 1.0 };
        for (index, piece) in pieces.into_iter().enumerate() {
            let step = AdamWStep {
                learning_rate,
                beta1: self.settings.beta1 as f32,
                beta2: self.settings.beta2 as f32,
                epsilon: self.settings.epsilon as f32,
                weight_decay: if piece.kind.decays() { self.settings.weight_decay as f32 } else { 0.0 },
                step: self.steps,
                gradient_scale,
            };
            self.update(index, piece, step);
        }
        Ok(Stepped { norm, skipped: false })
    }

    fn update(&mut self, index: usize, piece: Piece<'_, D>, step: AdamWStep) {
        let (device, Piece { values, packed, gradient, .. }) = (&self.device, piece);
        match &mut self.moments {
            Moments::Device(pairs) => {
                let Pair { first, second } = &mut pairs[index];
                device.adamw(values, packed, gradient, first, second, step);
            }
            Moments::Host(host, pairs) => {
                let Pair { first, second } = &mut pairs[index];
                let mut updated = device.read(values, 0, first.len());
                host.adamw(&mut updated, None, &device.read(gradient, 0, first.len()), first, second, step);
                device.write(values, 0, &updated);
                if let Some(packed) = packed {
                    device.repack(values, packed);
                }
            }
        }
    }

    /// Of each piece, in order, the tensor's elements that it holds.
    pub(super) fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Both moments of a piece, `[range]` each. With [`AdamW::steps`] they are all that a resumed run needs to go on with the
    /// same bits.
    pub(super) fn read(&self, piece: usize) -> [Vec<f32>; 2] {
        let length = self.ranges[piece].len();
        match &self.moments {
            Moments::Device(pairs) => {
                [&pairs[piece].first, &pairs[piece].second].map(|moment| self.device.read(moment, 0, length))
            }
            Moments::Host(_, pairs) => [&pairs[piece].first, &pairs[piece].second].map(|moment| moment[..length].to_vec()),
        }
    }

    /// Takes up the moments of an earlier run for a piece, `[range]` each.
    pub(super) fn write(&mut self, piece: usize, [first, second]: [Vec<f32>; 2]) {
        match &mut self.moments {
            Moments::Device(pairs) => {
                self.device.write(&mut pairs[piece].first, 0, &first);
                self.device.write(&mut pairs[piece].second, 0, &second);
            }
            Moments::Host(_, pairs) => {
                pairs[piece].first[..first.len()].copy_from_slice(&first);
                pairs[piece].second[..second.len()].copy_from_slice(&second);
            }
        }
    }

    /// Goes on counting where an earlier run was.
    pub(super) fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }
}
