//! What is trained: a whole model on one rank, or its shards on many.

use crate::collectives::CollectiveError;
use crate::device::{Cotangents, Device, Scores};
use crate::model::{Gradients, Layout, Model, ModelConfig, NoExchange, PassSettings, Piece, TrainingPass};
use crate::types::Batch;

/// Parameters and their gradients, wherever they lie. What differs between one rank and many is decided here and nowhere else.
pub enum Policy<D: Device> {
    Whole { model: Model<D>, gradients: Gradients<D> },
}

impl<D: Device> Policy<D> {
    pub fn whole(model: Model<D>) -> Policy<D> {
        Policy::Whole { gradients: model.new_gradients(), model }
    }

    pub fn config(&self) -> &ModelConfig {
        match self {
            Policy::Whole { model, .. } => model.config(),
        }
    }

    pub fn device(&self) -> &D {
        match self {
            Policy::Whole { model, .. } => model.device(),
        }
    }

    pub(crate) fn layout(&self) -> &Layout {
        match self {
            Policy::Whole { model, .. } => model.layout(),
        }
    }

    pub fn parameter_count(&self) -> usize {
        self.layout().parameter_count()
    }

    /// A model to sample from, with the weights of this moment. All ranks make this call.
    pub fn sampler(&mut self) -> Result<&Model<D>, CollectiveError> {
        match self {
            Policy::Whole { model, .. } => Ok(model),
        }
    }

    /// Log-probability and entropy at each of the batch's scored rows: on every rank of its replica.
    pub(super) fn score(&mut self, batch: &Batch, temperature: f32) -> Scores {
        match self {
            Policy::Whole { model, .. } => model.score(batch, temperature),
        }
    }

    /// Scores a batch, asks for the loss's cotangents with respect to these scores, and adds the gradients of all weights.
    pub(super) fn forward_backward(
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
        }
    }

    pub(super) fn clear_gradients(&mut self) {
        match self {
            Policy::Whole { gradients, .. } => gradients.clear(),
        }
    }

    /// What this rank's optimizer changes: one piece of each stored tensor, in stored order.
    pub(super) fn pieces(&mut self) -> Vec<Piece<'_, D>> {
        match self {
            Policy::Whole { model, gradients } => model.pieces(gradients).collect(),
        }
    }

    /// The values of a stored tensor, all of them. All ranks make this call.
    pub(crate) fn tensor(&self, index: usize) -> Result<Vec<f32>, CollectiveError> {
        match self {
            Policy::Whole { model, .. } => Ok(model.stored(index)),
        }
    }
}
