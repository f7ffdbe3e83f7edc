//! AdamW over all tensors of a model, with clipping by the global norm.

use serde::{Deserialize, Serialize};

use crate::device::{AdamWStep, Device, Role};
use crate::model::{Gradients, Model, ModelError};

/// The constants of AdamW.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWSettings {
    pub beta1: f32,
    pub beta2: f32,
    pub epsilon: f32,
    /// On matrices, embeddings among them; not on norms and biases.
    pub weight_decay: f32,
}

impl Default for AdamWSettings {
    fn default() -> Self {
        AdamWSettings { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0 }
    }
}

/// AdamW (Loshchilov and Hutter 2019) in PyTorch's form: decoupled weight decay, bias-corrected moments.
pub struct AdamW<D: Device> {
    settings: AdamWSettings,
    device: D,
    steps: u64,
    /// Running means of gradients and of their squares, per stored tensor.
    first: Vec<D::Buffer>,
    second: Vec<D::Buffer>,
}

impl<D: Device> AdamW<D> {
    pub fn new(model: &Model<D>, settings: AdamWSettings) -> AdamW<D> {
        let device = model.device().clone();
        let zeros = || model.layout().entries.iter().map(|entry| device.zeros(Role::Optimizer, entry.length())).collect();
        AdamW { settings, first: zeros(), second: zeros(), steps: 0, device }
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// One step. Gradients are scaled down so that their global norm is at most `clip_norm`. Returns the norm before clipping;
    /// if it is not finite nothing is changed, and the caller must say so.
    pub fn step(&mut self, model: &mut Model<D>, gradients: &Gradients<D>, learning_rate: f32, clip_norm: f32) -> f64 {
        let norm = gradients.global_norm();
        if !norm.is_finite() {
            return norm;
        }
        self.steps += 1;
        let gradient_scale = if norm > clip_norm as f64 { (clip_norm as f64 / norm) as f32 } else { 1.0 };
        for (index, piece) in model.pieces(gradients).enumerate() {
            let step = AdamWStep {
                learning_rate,
                beta1: self.settings.beta1,
                beta2: self.settings.beta2,
                epsilon: self.settings.epsilon,
                weight_decay: if piece.kind.decays() { self.settings.weight_decay } else { 0.0 },
                step: self.steps,
                gradient_scale,
            };
            let (first, second) = (&mut self.first[index], &mut self.second[index]);
            self.device.adamw(piece.values, piece.packed, piece.gradient, first, second, step);
        }
        norm
    }

    /// Names and shapes of the moments: `first.NAME` and `second.NAME` for every tensor of the model. Their values, with
    /// [`AdamW::steps`], are all that a resumed run needs to go on with the same bits.
    pub fn names(&self, model: &Model<D>) -> Vec<(String, Vec<usize>)> {
        let named = |moment: &str| -> Vec<_> {
            model.layout().parts().map(|(_, part)| (format!("{moment}.{}", part.name), part.shape.clone())).collect()
        };
        [named("first"), named("second")].concat()
    }

    /// The values of the moment with a name of [`AdamW::names`]; empty for any other name.
    pub fn read(&self, model: &Model<D>, name: &str) -> Vec<f32> {
        let (moment, tensor) = name.split_once('.').unwrap_or_default();
        let buffers = if moment == "first" { &self.first } else { &self.second };
        match model.layout().find(tensor) {
            Some((index, part)) => self.device.read(&buffers[index], part.offset, part.length()),
            None => Vec::new(),
        }
    }

    /// Takes up the state of an earlier run: `tensor` gives the values of every name of [`AdamW::names`].
    ///
    /// # Errors
    /// A tensor is missing or has another length.
    pub fn restore(
        &mut self,
        model: &Model<D>,
        steps: u64,
        mut tensor: impl FnMut(&str) -> Option<Vec<f32>>,
    ) -> Result<(), ModelError> {
        for (moment, buffers) in [("first", &mut self.first), ("second", &mut self.second)] {
            for (index, part) in model.layout().parts() {
                let name = format!("{moment}.{}", part.name);
                let values = tensor(&name).filter(|values| values.len() == part.length()).ok_or_else(|| ModelError::Tensor {
                    name: name.clone(),
                    problem: format!("missing from the optimizer's state, or not of shape {:?}", part.shape),
                })?;
                self.device.write(&mut buffers[index], part.offset, &values);
            }
        }
        self.steps = steps;
        Ok(())
    }
}
