//! Qwen2/Qwen3: configuration, weights, forward and hand-written backward.
//!
//! `config` and `weights` read a Hugging Face directory, `parameters` says what is stored where. `network` has the passes and is written
//! as if for one device: `exchange` is what it asks of other ranks, `whole` and [`NoExchange`] the answers where there are none.
//! `forward` is the one pass that scoring, training and sampling share, `attention` where its rows find keys, `backward` undoes it layer
//! by layer, `generate` extends sequences over their caches, `workspace` and `rotary` are the memory of it all, `rope` scales the angles
//! for long sequences.
//!
//! A token's log-probability depends on its own prefix alone, bit for bit: [`Model::score`] over a packed batch and
//! [`Model::extend`] with [`Model::sample`] in any chunking give the same numbers (DESIGN, rule 3).

mod attention;
mod backward;
mod config;
mod error;
mod exchange;
mod flops;
mod forward;
mod generate;
mod initial;
mod network;
mod parameters;
mod rope;
mod rotary;
mod shapes;
mod weights;
mod whole;
mod workspace;

use std::path::Path;
use std::sync::Arc;

pub use crate::device::{Cotangents, Scores};
pub use config::{Family, ModelConfig};
pub use error::ModelError;
pub use exchange::{NoExchange, ParameterSource, SequenceExchange, TrainingPass, Unit, UnitGradients, UnitTensors};
pub use flops::StepFlops;
pub use generate::{Extension, Hidden, KeyValueCache};
pub use network::{Network, PassSettings};
pub use parameters::{Gradients, Kind, Piece};
pub use rope::{RopeSettings, RopeType, Yarn};
pub use shapes::shape_names;
pub use whole::Whole;

use crate::device::{AttentionPlan, Device, KEYS_PER_BLOCK, Role};
use crate::types::{Batch, write_atomically};
pub(crate) use attention::{exchanged_query_numbers, query_buffer_numbers};
pub(crate) use initial::initial_values;
pub(crate) use parameters::{Entry, Layout, Parameter, Part};
pub(crate) use rotary::rotary_table_bytes;
pub(crate) use weights::read as read_weights;
pub(crate) use workspace::{ROW_GRAIN, bytes_per_scored_row, bytes_per_token};

/// A network with whole parameters on one device.
pub struct Model<D: Device> {
    network: Network<D>,
    parameters: Vec<Parameter<D>>,
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
        let config = ModelConfig::load_for(&device, directory)?;
        let mut model = Model::zeroed(device, config);
        let Model { network, parameters } = &mut model;
        let device = network.device();
        weights::read(directory, network.layout(), |index, part, values| {
            device.write(&mut parameters[index].values, part.offset, &values);
        })?;
        model.pack_all();
        Ok(model)
    }

    /// Fresh weights, a function of `seed`: see [`initial_values`].
    ///
    /// The device must be able to run it: see [`ModelConfig::check_on`].
    pub fn initialise(device: D, config: ModelConfig, seed: u64) -> Self {
        let mut model = Model::zeroed(device, config);
        let Model { network, parameters } = &mut model;
        for (index, parameter) in parameters.iter_mut().enumerate() {
            let values = initial_values(network.config(), network.layout(), index, 0..parameter.entry.length(), seed);
            parameter.values = network.device().upload(Role::Weights, &values);
        }
        model.pack_all();
        model
    }

    /// A model whose tensors other ranks send, with room for `room(elements)` numbers where one of so many arrives.
    pub(crate) fn receivable(device: D, config: ModelConfig, room: impl Fn(usize) -> usize) -> Self {
        let network = Network::new(device, config);
        let receivable = |entry: &Entry| Parameter::receivable(network.device(), entry, room(entry.length()));
        let parameters = network.layout().entries.iter().map(receivable).collect();
        Model { network, parameters }
    }

    pub(crate) fn parameters_mut(&mut self) -> &mut [Parameter<D>] {
        &mut self.parameters
    }

    fn zeroed(device: D, config: ModelConfig) -> Self {
        let network = Network::new(device, config);
        let (device, entries) = (network.device(), &network.layout().entries);
        let parameters = entries
            .iter()
            .map(|entry| Parameter { entry: entry.clone(), values: device.zeros(Role::Weights, entry.length()), packed: None })
            .collect();
        Model { network, parameters }
    }

    fn pack_all(&mut self) {
        for index in 0..self.parameters.len() {
            self.repack(index);
        }
    }

    /// Brings the packed copy of a stored tensor up to date with its values.
    pub(crate) fn repack(&mut self, index: usize) {
        let Model { network, parameters } = self;
        let (device, layout, parameter) = (network.device(), network.layout(), &mut parameters[index]);
        if !layout.is_multiplied(index) {
            return;
        }
        match &mut parameter.packed {
            Some(packed) => device.repack(&parameter.values, packed),
            None => {
                let (outputs, inputs) = (parameter.entry.outputs, parameter.entry.inputs);
                parameter.packed = Some(device.pack(&parameter.values, outputs, inputs));
            }
        }
    }

    pub fn network(&self) -> &Network<D> {
        &self.network
    }

    pub fn config(&self) -> &ModelConfig {
        self.network.config()
    }

    /// See [`Network::set_rope`].
    pub fn set_rope(&mut self, rope: &RopeSettings) -> Result<bool, String> {
        self.network.set_rope(rope)
    }

    pub fn device(&self) -> &D {
        self.network.device()
    }

    pub fn parameter_count(&self) -> usize {
        self.layout().parameter_count()
    }

    /// Bytes by purpose; those of training count whether or not the model is being trained, and where its layers are run again in the
    /// backward if `recompute`.
    pub fn memory_by_purpose(&self, recompute: bool) -> Memory {
        let float = size_of::<f32>();
        let weights = self.parameter_count() * float;
        let packed = self.parameters.iter().filter_map(|parameter| parameter.packed.as_ref());
        let heads = self.config().heads();
        let activation_bytes = self.device().activation_bytes();
        let block = AttentionPlan::block_numbers(heads.key_value_heads, heads.head_dim);
        Memory {
            weights,
            packed: packed.map(|packed| self.device().packed_bytes(packed)).sum(),
            gradients: weights,
            optimizer: 2 * weights,
            activations_per_token: bytes_per_token(self.config(), recompute, activation_bytes)
                + bytes_per_scored_row(self.config(), activation_bytes)
                + block / KEYS_PER_BLOCK * activation_bytes,
            key_values_per_token: 2 * heads.key_value_width() * self.config().layers * activation_bytes,
        }
    }

    /// Every tensor under its Hugging Face name: `(name, shape, values)`, in stored order.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>, Vec<f32>)> {
        self.layout().parts().map(|(index, part)| {
            let values = self.device().read(&self.parameters[index].values, part.offset, part.length());
            (part.name.clone(), part.shape.clone(), values)
        })
    }

    /// Replaces the values of one tensor.
    ///
    /// # Errors
    /// No such tensor, or another number of values.
    pub fn set_tensor(&mut self, name: &str, values: &[f32]) -> Result<(), ModelError> {
        let problem = |problem: String| ModelError::Tensor { name: name.to_string(), problem };
        let (index, part) = self.network.layout().find(name).ok_or_else(|| problem("not part of this model".to_string()))?;
        if values.len() != part.length() {
            return Err(problem(format!("{} values for shape {:?}", values.len(), part.shape)));
        }
        self.network.device().write(&mut self.parameters[index].values, part.offset, values);
        self.repack(index);
        Ok(())
    }

    /// Writes `config.json` and `model.safetensors` (f32) in the Hugging Face layout, each whole or not at all.
    ///
    /// # Errors
    /// The directory cannot be made, or a file not written: one line with its name.
    pub fn save(&self, directory: &Path) -> Result<(), ModelError> {
        std::fs::create_dir_all(directory).map_err(|source| ModelError::io(directory, source))?;
        weights::write(directory, self.layout(), |index, part| {
            self.device().read(&self.parameters[index].values, part.offset, part.length())
        })?;
        let config = directory.join("config.json");
        write_atomically(&config, self.config().to_json().as_bytes()).map_err(|source| ModelError::io(&config, source))
    }

    /// Zeroed gradients of this model's shape.
    pub fn new_gradients(&self) -> Gradients<D> {
        Gradients::new(self.network.device(), self.network.layout())
    }

    /// What the passes of [`Model::network`] read, and where they add gradients; `None` for a pass without a backward.
    pub fn whole<'a>(&'a self, gradients: Option<&'a mut Gradients<D>>) -> Whole<'a, D> {
        Whole::new(self.network.layout(), &self.parameters, gradients)
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
        self.network.layout()
    }

    /// Log-probability and entropy at each of `batch.scored_rows`, at `temperature` (0 is read as 1).
    ///
    /// Panics if an id is not below the vocabulary, or a sequence's rows are not as [`Batch`] says.
    pub fn score(&self, batch: &Batch, temperature: f32) -> Scores {
        self.network.score(&mut self.whole(None), &mut NoExchange, &TrainingPass::whole(batch), temperature)
    }

    /// Scores a batch, asks for the loss's cotangents with respect to these scores, and adds the gradients of all weights.
    pub fn forward_backward(
        &self,
        gradients: &mut Gradients<D>,
        batch: &Batch,
        temperature: f32,
        cotangents: impl FnOnce(&Scores) -> Cotangents,
    ) -> Scores {
        let settings = PassSettings { temperature, recompute: false };
        let pass = TrainingPass::whole(batch);
        self.network.forward_backward(&mut self.whole(Some(gradients)), &mut NoExchange, &pass, settings, cotangents)
    }

    /// `[scored_rows, vocabulary]` raw logits, all at once: for comparing tiny models with others, never in a training path.
    #[doc(hidden)]
    pub fn logits(&self, batch: &Batch) -> Vec<f32> {
        self.network.logits(&mut self.whole(None), &TrainingPass::whole(batch))
    }
}
