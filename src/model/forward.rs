//! The forward pass, the same for scoring, training and sampling.

use super::Network;
use super::attention::Attention;
use super::config::ModelConfig;
use super::exchange::{ParameterSource, TrainingPass, Unit, UnitTensors};
use super::parameters::LayerIndices;
use super::workspace::{Keep, LayerActivations, Scored, Shared, Workspace};
use crate::device::{Device, LinearWeights, Rotation};

/// The tokens of a pass.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub ids: &'a [u32],
    /// `[tokens]` place of each token in its own sequence
    pub positions: &'a [usize],
    /// Rows that the head reads.
    pub scored: &'a [usize],
}

impl<'a> Rows<'a> {
    pub fn of(pass: &'a TrainingPass) -> Rows<'a> {
        Rows { ids: &pass.ids, positions: &pass.positions, scored: &pass.scored_rows }
    }
}

impl<D: Device> Network<D> {
    /// Runs a pass through the embedding and all layers: what they leave is in `workspace`, the residual stream before the last half layer
    /// and its branch among it.
    pub(super) fn forward(
        &self,
        workspace: &mut Workspace<D>,
        source: &mut dyn ParameterSource<D>,
        attention: &mut dyn Attention<D>,
        rows: Rows<'_>,
        keep: Keep,
    ) {
        let (device, config) = (&self.device, &self.config);
        if let Some(id) = rows.ids.iter().find(|&&id| id as usize >= config.vocabulary) {
            panic!("token id {id} is not below the vocabulary of {}: the caller must check", config.vocabulary);
        }
        workspace.reserve(device, config, keep, rows.ids.len(), rows.scored.len());
        let Workspace { streams, layers, shared, .. } = workspace;
        let table = self.rotary.covering(device, rows.positions);
        source.forward(Unit::Embedding, Some(Unit::Layer(0)), &mut |tensors| {
            let table = tensors.get(self.layout.embedding);
            device.embed(&table.values, table.packed.as_ref(), rows.ids, config.hidden, &mut streams[keep.stream(0)]);
        });
        for index in 0..config.layers {
            let next = if index + 1 < config.layers { Unit::Layer(index + 1) } else { Unit::Head };
            source.forward(Unit::Layer(index), Some(next), &mut |tensors| {
                let layer = Layer::new(self, index, tensors, &table, rows.positions);
                let activations = &mut layers[keep.activation(index)];
                let (attention_half, mlp_half) = (keep.stream(2 * index), keep.stream(2 * index + 1));
                if index == 0 {
                    layer.norm(&streams[attention_half], layer.names.input_norm, &mut shared.normed);
                } else {
                    layer.add_norm(streams, keep.stream(2 * index - 1), attention_half, layer.names.input_norm, shared);
                }
                layer.forward_attention(attention, shared, activations);
                layer.add_norm(streams, attention_half, mlp_half, layer.names.mlp_norm, shared);
                layer.gate_up(shared, activations);
                layer.down(shared, activations);
            });
        }
    }

    /// Adds the last branch to the residual stream of the rows that the head reads, and norms them: `workspace.scored`.
    pub(super) fn norm_scored(
        &self,
        workspace: &mut Workspace<D>,
        tensors: &UnitTensors<'_, D>,
        scored_rows: &[usize],
        keep: Keep,
    ) {
        let (device, hidden) = (&self.device, self.config.hidden);
        let Workspace { streams, shared, scored, .. } = workspace;
        let last = &streams[keep.stream(2 * self.config.layers - 1)];
        device.gather_rows(last, scored_rows, hidden, &mut scored.before);
        device.gather_rows(&shared.branch, scored_rows, hidden, &mut scored.branch);
        let norm = &tensors.get(self.layout.final_norm).values;
        let Scored { before, branch, stream, normed, .. } = scored;
        device.add_rms_norm(before, branch, norm, self.config.norm_epsilon, scored_rows.len(), hidden, stream, normed);
    }
}

/// One layer with its tensors, over the rows of a pass.
pub(super) struct Layer<'a, D: Device> {
    pub device: &'a D,
    pub config: &'a ModelConfig,
    pub names: &'a LayerIndices,
    tensors: &'a UnitTensors<'a, D>,
    index: usize,
    pub rows: usize,
    pub rotation: Rotation<'a, D>,
}

impl<'a, D: Device> Layer<'a, D> {
    pub fn new(
        network: &'a Network<D>,
        index: usize,
        tensors: &'a UnitTensors<'a, D>,
        table: &'a D::Buffer,
        positions: &'a [usize],
    ) -> Self {
        let (config, names) = (&network.config, &network.layout.layers[index]);
        let values = |index: usize| &tensors.get(index).values;
        let rotation = Rotation {
            heads: config.heads(),
            bias: names.projection_bias.map(values),
            query_key_norms: names.query_key_norms.map(|(query, key)| (values(query), values(key))),
            norm_epsilon: config.norm_epsilon,
            table,
            positions,
        };
        Layer { device: &network.device, config, names, tensors, index, rows: positions.len(), rotation }
    }

    pub fn values(&self, index: usize) -> &'a D::Buffer {
        &self.tensors.get(index).values
    }

    pub fn linear(&self, index: usize) -> LinearWeights<'a, D> {
        self.tensors.get(index).linear()
    }

    pub fn norm(&self, stream: &D::Buffer, norm: usize, normed: &mut D::Buffer) {
        self.device.rms_norm(stream, self.values(norm), self.config.norm_epsilon, self.rows, self.config.hidden, normed);
    }

    /// `streams[here] = streams[before] + branch`, and its norm in `normed`
    pub fn add_norm(&self, streams: &mut [D::Buffer], before: usize, here: usize, norm: usize, shared: &mut Shared<D>) {
        let (epsilon, hidden) = (self.config.norm_epsilon, self.config.hidden);
        let (before, here) = two(streams, before, here);
        let Shared { branch, normed, .. } = shared;
        self.device.add_rms_norm(before, branch, self.values(norm), epsilon, self.rows, hidden, here, normed);
    }

    /// `branch = output(attention(rotate(projection(normed))))`
    pub fn forward_attention(
        &self,
        attention: &mut dyn Attention<D>,
        shared: &mut Shared<D>,
        activations: &mut LayerActivations<D>,
    ) {
        let (device, rows) = (self.device, self.rows);
        let LayerActivations { projected, rotated, attended, log_sum_exp, .. } = activations;
        let projected = projected.as_mut().unwrap_or(&mut shared.projected);
        device.linear(&shared.normed, self.linear(self.names.projection), projected, rows);
        device.rotate(projected, &self.rotation, rotated);
        attention.attend(self.index, rotated, attended, log_sum_exp);
        device.linear(attended, self.linear(self.names.output), &mut shared.branch, rows);
    }

    /// The first half of the MLP, `branch = down(swiglu(gate_up(normed)))`.
    pub fn gate_up(&self, shared: &Shared<D>, activations: &mut LayerActivations<D>) {
        self.device.linear(&shared.normed, self.linear(self.names.gate_up), &mut activations.gate_up, self.rows);
    }

    /// The second.
    pub fn down(&self, shared: &mut Shared<D>, activations: &LayerActivations<D>) {
        self.device.swiglu(&activations.gate_up, self.rows, self.config.intermediate, &mut shared.activated);
        self.device.linear(&shared.activated, self.linear(self.names.down), &mut shared.branch, self.rows);
    }
}

/// Two different elements, the first to read and the second to write.
fn two<T>(values: &mut [T], read: usize, write: usize) -> (&T, &mut T) {
    let (low, high) = values.split_at_mut(read.max(write));
    if read < write { (&low[read], &mut high[0]) } else { (&high[0], &mut low[write]) }
}
