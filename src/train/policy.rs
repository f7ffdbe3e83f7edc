//! What is trained: a whole model on one rank, or its shards on many.

use std::path::Path;

use crate::collectives::CollectiveError;
use crate::device::{Cotangents, Device, Scores};
use crate::model::{
    Gradients, Layout, Model, ModelConfig, ModelError, NoExchange, PassSettings, Piece, RopeSettings, TrainingPass,
};
use crate::parallel::{ShardedModel, World};
use crate::types::Batch;

/// Parameters and their gradients, wherever they lie. What differs between one rank and many is decided here and nowhere else.
///
/// All ranks make the same calls. Passes that lose a rank unwind with a [`CollectiveError`].
pub enum Policy<D: Device> {
    /// On one rank.
    Whole { model: Model<D>, gradients: Gradients<D> },
    /// On many.
    Sharded {
        model: Box<ShardedModel<D>>,
        /// What the built-in engine samples from: made when first asked for.
        replica: Option<Model<D>>,
        /// The weights have changed since the replica was made or refreshed.
        stale: bool,
    },
}

impl<D: Device> Policy<D> {
    pub fn whole(model: Model<D>) -> Policy<D> {
        Policy::Whole { gradients: model.new_gradients(), model }
    }

    pub fn sharded(model: ShardedModel<D>) -> Policy<D> {
        Policy::Sharded { model: Box::new(model), replica: None, stale: false }
    }

    pub fn config(&self) -> &ModelConfig {
        match self {
            Policy::Whole { model, .. } => model.config(),
            Policy::Sharded { model, .. } => model.config(),
        }
    }

    /// Scales rotary embeddings so from now on, where the policy is trained and where it samples. Returns whether that changes anything.
    ///
    /// # Errors
    /// Names the first setting that makes no sense.
    pub fn set_rope(&mut self, rope: &RopeSettings) -> Result<bool, String> {
        match self {
            Policy::Whole { model, .. } => model.set_rope(rope),
            Policy::Sharded { model, replica, .. } => {
                if let Some(replica) = replica {
                    replica.set_rope(rope)?;
                }
                model.set_rope(rope)
            }
        }
    }

    pub fn device(&self) -> &D {
        match self {
            Policy::Whole { model, .. } => model.device(),
            Policy::Sharded { model, .. } => model.device(),
        }
    }

    pub(crate) fn layout(&self) -> &Layout {
        match self {
            Policy::Whole { model, .. } => model.layout(),
            Policy::Sharded { model, .. } => model.layout(),
        }
    }

    pub fn parameter_count(&self) -> usize {
        self.layout().parameter_count()
    }

    /// A model to sample from, with the weights of this moment: on many ranks a copy, gathered only if they have changed.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn sampler(&mut self) -> Result<&Model<D>, CollectiveError> {
        match self {
            Policy::Whole { model, .. } => Ok(model),
            Policy::Sharded { model, replica, stale } => {
                let current = match replica.take() {
                    None => model.replica()?,
                    Some(mut replica) => {
                        if *stale {
                            model.refresh(&mut replica)?;
                        }
                        replica
                    }
                };
                *stale = false;
                Ok(replica.insert(current))
            }
        }
    }

    /// Log-probability and entropy at each of the batch's scored rows: on every rank of its replica.
    pub fn score(&mut self, batch: &Batch, temperature: f32) -> Scores {
        match self {
            Policy::Whole { model, .. } => model.score(batch, temperature),
            Policy::Sharded { model, .. } => model.score(batch, temperature),
        }
    }

    /// Scores a batch, asks for the loss's cotangents with respect to these scores, and adds the gradients of all weights.
    pub fn forward_backward(
        &mut self,
        batch: &Batch,
        settings: PassSettings,
        cotangents: impl FnOnce(&Scores) -> Cotangents,
    ) -> Scores {
        match self {
            Policy::Whole { model, gradients } => {
                let (mut source, pass) = (model.whole(Some(gradients)), TrainingPass::whole(batch));
                model.network().forward_backward(&mut source, &mut NoExchange, &pass, settings, cotangents)
            }
            Policy::Sharded { model, .. } => model.forward_backward(batch, settings, cotangents),
        }
    }

    pub fn clear_gradients(&mut self) {
        match self {
            Policy::Whole { gradients, .. } => gradients.clear(),
            Policy::Sharded { model, .. } => model.clear_gradients(),
        }
    }

    /// What this rank's optimizer changes: one piece of each stored tensor, in stored order. [`Policy::after_step`] follows.
    pub fn pieces(&mut self) -> Vec<Piece<'_, D>> {
        match self {
            Policy::Whole { model, gradients } => model.pieces(gradients).collect(),
            Policy::Sharded { model, .. } => model.pieces().collect(),
        }
    }

    /// Brings what depends on the weights up to date with them.
    pub fn after_step(&mut self) {
        match self {
            Policy::Whole { .. } => {}
            Policy::Sharded { model, stale, .. } => {
                model.after_step();
                *stale = true;
            }
        }
    }

    /// Gives every tensor for which `wanted(name)` holds on this rank to `accept(name, shape, values)`, in an order of its own.
    ///
    /// # Errors
    /// A rank is lost.
    pub fn gather_tensors(
        &mut self,
        wanted: impl Fn(&str) -> bool,
        mut accept: impl FnMut(&str, &[usize], Vec<f32>),
    ) -> Result<(), CollectiveError> {
        match self {
            Policy::Whole { model, .. } => {
                model
                    .tensors()
                    .filter(|(name, _, _)| wanted(name))
                    .for_each(|(name, shape, values)| accept(&name, &shape, values));
                Ok(())
            }
            Policy::Sharded { model, .. } => model.gather_tensors(wanted, accept),
        }
    }
}

/// Weights that stand still: the reference of a divergence term. It lies as the policy does, whole or in shards.
pub enum Frozen<D: Device> {
    Whole(Box<Model<D>>),
    Sharded(Box<ShardedModel<D>>),
}

impl<D: Device> Frozen<D> {
    /// Loads a Hugging Face directory.
    ///
    /// # Errors
    /// As [`Model::load`]. Other ranks may have been luckier: they have to be asked before the next call.
    pub fn load(device: D, directory: &Path, world: &World<D>) -> Result<Frozen<D>, ModelError> {
        Ok(match world.ranks.ranks() {
            1 => Frozen::Whole(Box::new(Model::load(device, directory)?)),
            _ => Frozen::Sharded(Box::new(ShardedModel::load(device, directory, world)?)),
        })
    }

    /// As [`Policy::score`].
    pub fn score(&mut self, batch: &Batch, temperature: f32) -> Scores {
        match self {
            Frozen::Whole(model) => model.score(batch, temperature),
            Frozen::Sharded(model) => model.score(batch, temperature),
        }
    }
}
