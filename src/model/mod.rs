//! Qwen2/Qwen3: configuration, weights, forward and hand-written backward.
//!
//! `config` and `weights` read a Hugging Face directory, `parameters` says what is stored where, `forward` is the one pass
//! that scoring, training and sampling share, `backward` undoes it layer by layer, `generate` extends sequences over their caches.
//!
//! A token's log-probability depends on its own prefix alone, bit for bit: [`Model::score`] over a packed batch and
//! [`Model::extend`] with [`Model::sample`] in any chunking give the same numbers (DESIGN, rule 3).

mod backward;
mod config;
mod error;
mod exchange;
mod flops;
mod forward;
mod generate;
mod parameters;
mod shapes;
mod weights;

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

pub use crate::device::{Cotangents, Scores};
pub use config::{Family, ModelConfig};
pub use error::ModelError;
pub use exchange::{KeyValueExchange, NoExchange, ParameterSource, TrainingPass, Unit, UnitGradients, UnitTensors};
pub use flops::StepFlops;
pub use generate::{Extension, Hidden, KeyValueCache};
pub use parameters::{Gradients, Kind, Piece};
pub use shapes::shape_names;

use crate::device::{Device, Role};
use crate::types::{Batch, Key, Purpose};
use forward::{RotaryTable, Workspace};
pub(crate) use forward::{bytes_per_token, bytes_per_token_and_layer, rotary_table_bytes};
pub(crate) use parameters::{Entry, Layout, Parameter, Part};

/// A model on a device, with the memory its passes work in. Passes of one model run one at a time.
pub struct Model<D: Device> {
    device: D,
    config: ModelConfig,
    layout: Arc<Layout>,
    parameters: Vec<Parameter<D>>,
    rotary: RotaryTable<D>,
    workspace: Mutex<Workspace<D>>,
}

/// Bytes a model takes, by purpose, so that a header can say so before anything starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub weights: usize,
    /// The copy of the matrices that the forward product reads.
    pub packed: usize,
    /// If trained.
    pub gradients: usize,
    /// If trained: the two moments of AdamW.
    pub optimizer: usize,
    /// If trained: what the backward needs, for each token of a micro-batch.
    pub activations_per_token: usize,
    /// For each token of each sequence being sampled.
    pub key_values_per_token: usize,
}

impl<D: Device> Model<D> {
    /// Loads a Hugging Face directory: `config.json` with `model.safetensors`, single or sharded.
    ///
    /// # Errors
    /// One line naming the file, and the field or tensor, for whatever cannot be read or run.
    pub fn load(device: D, directory: &Path) -> Result<Self, ModelError> {
        let config = ModelConfig::load(directory)?;
        let path = directory.join("config.json");
        config.check_on(&device).map_err(|problem| ModelError::Config { path, problem })?;
        let mut model = Model::zeroed(device, config);
        let (device, parameters) = (&model.device, &mut model.parameters);
        weights::read(directory, &model.layout, |index, part, values| {
            device.write(&mut parameters[index].values, part.offset, &values);
        })?;
        model.pack_all();
        Ok(model)
    }

    /// Fresh weights, a function of `seed`: embeddings normal with deviation 0.02, matrices `1 / sqrt(fan_in)`, the two output
    /// projections of a layer divided by `sqrt(2 layers)` (Radford et al. 2019), norms 1, biases 0.
    ///
    /// The device must be able to run it: see [`ModelConfig::check_on`].
    pub fn initialise(device: D, config: ModelConfig, seed: u64) -> Self {
        let mut model = Model::zeroed(device, config);
        let residual = 1.0 / (2.0 * model.config.layers as f64).sqrt();
        for (index, parameter) in model.parameters.iter_mut().enumerate() {
            let fan_in = 1.0 / (parameter.entry.inputs as f64).sqrt();
            let deviation = match parameter.entry.kind {
                Kind::Embedding => 0.02,
                Kind::Matrix => fan_in,
                Kind::ResidualMatrix => fan_in * residual,
                Kind::Norm | Kind::Bias => 0.0,
            };
            let mean = if parameter.entry.kind == Kind::Norm { 1.0 } else { 0.0 };
            let mut key = Key::new(Purpose::Weights, &[seed, index as u64]);
            let values: Vec<f32> = (0..parameter.entry.length())
                .map(|_| if deviation > 0.0 { (deviation * key.normal()) as f32 } else { mean })
                .collect();
            parameter.values = model.device.upload(Role::Weights, &values);
        }
        model.pack_all();
        model
    }

    fn zeroed(device: D, config: ModelConfig) -> Self {
        let layout = Arc::new(Layout::new(&config));
        let parameters = layout
            .entries
            .iter()
            .map(|entry| Parameter { entry: entry.clone(), values: device.zeros(Role::Weights, entry.length()), packed: None })
            .collect();
        let rotary = RotaryTable::new(&device, &config);
        let workspace = Mutex::new(Workspace::new(&device, &config));
        Model { device, config, layout, parameters, rotary, workspace }
    }

    fn pack_all(&mut self) {
        for index in 0..self.parameters.len() {
            self.repack(index);
        }
    }

    /// Brings the packed copy of a stored tensor up to date with its values.
    pub(crate) fn repack(&mut self, index: usize) {
        let parameter = &mut self.parameters[index];
        // An untied embedding is only looked up, never multiplied by.
        if !parameter.entry.kind.decays() || (index == self.layout.embedding && index != self.layout.head) {
            return;
        }
        match &mut parameter.packed {
            Some(packed) => self.device.repack(&parameter.values, packed),
            None => {
                let (outputs, inputs) = (parameter.entry.outputs, parameter.entry.inputs);
                parameter.packed = Some(self.device.pack(&parameter.values, outputs, inputs));
            }
        }
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    pub fn parameter_count(&self) -> usize {
        self.layout.parameter_count()
    }

    /// Bytes by purpose; those of training count whether or not the model is being trained.
    pub fn memory_by_purpose(&self) -> Memory {
        let float = size_of::<f32>();
        let weights = self.parameter_count() * float;
        let packed = self.parameters.iter().filter_map(|parameter| parameter.packed.as_ref());
        let heads = self.config.heads();
        let activation_bytes = self.device.activation_bytes();
        let kept = bytes_per_token_and_layer(&self.config, activation_bytes) * self.config.layers;
        Memory {
            weights,
            packed: packed.map(|packed| self.device.packed_bytes(packed)).sum(),
            gradients: weights,
            optimizer: 2 * weights,
            activations_per_token: kept + bytes_per_token(&self.config, activation_bytes),
            key_values_per_token: 2 * heads.key_value_width() * self.config.layers * activation_bytes,
        }
    }

    /// Every tensor under its Hugging Face name: `(name, shape, values)`, in stored order.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>, Vec<f32>)> {
        self.layout.parts().map(|(index, part)| {
            let values = self.device.read(&self.parameters[index].values, part.offset, part.length());
            (part.name.clone(), part.shape.clone(), values)
        })
    }

    /// The values of a stored tensor.
    pub(crate) fn stored(&self, index: usize) -> Vec<f32> {
        self.device().read(&self.parameters[index].values, 0, self.layout().entries[index].length())
    }

    /// Replaces the values of one tensor.
    ///
    /// # Errors
    /// No such tensor, or another number of values.
    pub fn set_tensor(&mut self, name: &str, values: &[f32]) -> Result<(), ModelError> {
        let problem = |problem: String| ModelError::Tensor { name: name.to_string(), problem };
        let (index, part) = self.layout.find(name).ok_or_else(|| problem("not part of this model".to_string()))?;
        if values.len() != part.length() {
            return Err(problem(format!("{} values for shape {:?}", values.len(), part.shape)));
        }
        self.device.write(&mut self.parameters[index].values, part.offset, values);
        self.repack(index);
        Ok(())
    }

    /// Writes `config.json` and `model.safetensors` (f32) in the Hugging Face layout, each whole or not at all.
    ///
    /// # Errors
    /// The directory cannot be made, or a file not written: one line with its name.
    pub fn save(&self, directory: &Path) -> Result<(), ModelError> {
        std::fs::create_dir_all(directory).map_err(|source| ModelError::io(directory, source))?;
        weights::write(directory, &self.layout, |index, part| {
            self.device.read(&self.parameters[index].values, part.offset, part.length())
        })?;
        weights::replace(&directory.join("config.json"), |file| file.write_all(self.config.to_json().as_bytes()))
    }

    /// Zeroed gradients of this model's shape.
    pub fn new_gradients(&self) -> Gradients<D> {
        Gradients::new(&self.device, &self.layout)
    }

    /// What an optimizer changes, in stored order.
    pub fn pieces<'a>(&'a mut self, gradients: &'a Gradients<D>) -> impl Iterator<Item = Piece<'a, D>> {
        self.parameters.iter_mut().zip(&gradients.buffers).map(|(parameter, gradient)| Piece {
            kind: parameter.entry.kind,
            range: 0..parameter.entry.length(),
            values: &mut parameter.values,
            packed: parameter.packed.as_mut(),
            gradient,
        })
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    pub(crate) fn parameters_mut(&mut self) -> (&D, &mut [Parameter<D>]) {
        (&self.device, &mut self.parameters)
    }

    fn workspace(&self) -> MutexGuard<'_, Workspace<D>> {
        self.workspace.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Log-probability and entropy at each of `batch.scored_rows`, at `temperature` (0 is read as 1).
    ///
    /// Panics if an id is not below the vocabulary, or a sequence's rows are not as [`Batch`] says.
    pub fn score(&self, batch: &Batch, temperature: f32) -> Scores {
        let mut workspace = self.workspace();
        self.forward_batch(&mut workspace, batch, false);
        self.device.head(&workspace.scored.normed, self.parameters[self.layout.head].linear(), &batch.targets(), temperature)
    }

    /// Scores a batch, asks for the loss's cotangents with respect to these scores, and adds the gradients of all weights.
    pub fn forward_backward(
        &self,
        gradients: &mut Gradients<D>,
        batch: &Batch,
        temperature: f32,
        cotangents: impl FnOnce(&Scores) -> Cotangents,
    ) -> Scores {
        let mut workspace = self.workspace();
        self.forward_batch(&mut workspace, batch, true);
        let head = self.parameters[self.layout.head].linear();
        let scores = self.device.head(&workspace.scored.normed, head, &batch.targets(), temperature);
        let cotangents = cotangents(&scores);
        self.backward_batch(&mut workspace, batch, temperature, &cotangents, gradients);
        scores
    }

    /// `[scored_rows, vocabulary]` raw logits, all at once: for comparing tiny models with others, never in a training path.
    #[doc(hidden)]
    pub fn logits(&self, batch: &Batch) -> Vec<f32> {
        let mut workspace = self.workspace();
        self.forward_batch(&mut workspace, batch, false);
        let (rows, vocabulary) = (batch.scored_rows.len(), self.config.vocabulary);
        let mut logits = self.device.zeros(Role::Activations, rows * vocabulary);
        self.device.linear(&workspace.scored.normed, self.parameters[self.layout.head].linear(), &mut logits, rows);
        self.device.read(&logits, 0, rows * vocabulary)
    }
}
