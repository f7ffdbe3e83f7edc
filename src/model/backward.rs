//! The backward pass, layer by layer from the head down, written out by hand. `dx` is the derivative of the loss by `x`.
//!
//! Cheap activations (norms, SwiGLU) are computed again rather than kept.

use super::Network;
use super::attention::BlockAttention;
use super::exchange::{ParameterSource, TrainingPass, Unit, UnitGradients, UnitTensors};
use super::forward::Layer;
use super::workspace::{Keep, LayerActivations, Shared, Workspace};
use crate::device::{Cotangents, Device, RotationGradients};

impl<D: Device> Network<D> {
    /// Adds the gradients of all weights but the head's, from the `dstream` that [`Network::backward_head`] left.
    pub(super) fn backward(
        &self,
        workspace: &mut Workspace<D>,
        source: &mut dyn ParameterSource<D>,
        attention: &mut BlockAttention<'_, D>,
        pass: &TrainingPass,
        keep: Keep,
    ) {
        let Workspace { streams, layers, shared, .. } = workspace;
        let table = self.rotary.covering(&self.device, &pass.positions);
        for index in (0..self.config.layers).rev() {
            let next = index.checked_sub(1).map_or(Unit::Embedding, Unit::Layer);
            source.backward(Unit::Layer(index), Some(next), &mut |tensors, gradients| {
                let layer = Layer::new(self, index, tensors, &table, &pass.positions);
                let activations = &mut layers[keep.activation(index)];
                let (attention_half, mlp_half) = (keep.stream(2 * index), keep.stream(2 * index + 1));
                if keep == Keep::Streams {
                    layer.norm(&streams[attention_half], layer.names.input_norm, &mut shared.normed);
                    layer.forward_attention(attention, shared, activations);
                    layer.add_norm(streams, attention_half, mlp_half, layer.names.mlp_norm, shared);
                    layer.gate_up(shared, activations);
                } else {
                    attention.fill_again(&activations.rotated);
                }
                layer.backward_mlp(shared, activations, &streams[mlp_half], gradients);
                layer.backward_attention(attention, shared, activations, &streams[attention_half], gradients);
            });
        }
        source.backward(Unit::Embedding, None, &mut |_, gradients| {
            let gradient = gradients.get(self.layout.embedding);
            self.device.embed_backward(&shared.dstream, &pass.ids, self.config.hidden, gradient);
        });
        source.finish_backward();
    }

    /// From the scores' cotangents to `dstream`, which is 0 in rows that are not scored.
    pub(super) fn backward_head(
        &self,
        workspace: &mut Workspace<D>,
        tensors: &UnitTensors<'_, D>,
        gradients: &mut UnitGradients<'_, D>,
        pass: &TrainingPass,
        temperature: f32,
        cotangents: &Cotangents,
    ) {
        let (device, config, layout) = (&self.device, &self.config, &self.layout);
        let (hidden, scored_rows) = (config.hidden, pass.scored_rows.len());
        let Workspace { shared, scored, .. } = workspace;
        let (head, dhead) = (tensors.get(layout.head).linear(), gradients.get(layout.head));
        device.head_backward(&scored.normed, head, &pass.targets, temperature, cotangents, &mut scored.dnormed, dhead);
        device.clear(&mut scored.dstream, scored_rows * hidden);
        device.rms_norm_backward(
            &scored.dnormed,
            &scored.stream,
            &tensors.get(layout.final_norm).values,
            config.norm_epsilon,
            scored_rows,
            hidden,
            &mut scored.dstream,
            gradients.get(layout.final_norm),
        );
        device.clear(&mut shared.dstream, pass.ids.len() * hidden);
        device.scatter_rows(&scored.dstream, &pass.scored_rows, hidden, &mut shared.dstream);
    }
}

impl<D: Device> Layer<'_, D> {
    /// From `stream`, the residual stream before the MLP. `dstream` passes the MLP's residual connection unchanged and gains what comes through the MLP.
    fn backward_mlp(
        &self,
        shared: &mut Shared<D>,
        activations: &mut LayerActivations<D>,
        stream: &D::Buffer,
        gradients: &mut UnitGradients<'_, D>,
    ) {
        let (device, names, rows) = (self.device, self.names, self.rows);
        let (hidden, intermediate) = (self.config.hidden, self.config.intermediate);

        device.linear_input_gradient(&shared.dstream, self.linear(names.down), &mut shared.dactivated, rows);
        // gate_up becomes its own gradient: the activations of a layer are used once.
        device.swiglu_backward(&shared.dactivated, &mut activations.gate_up, rows, intermediate, &mut shared.activated);
        let dgate_up = &activations.gate_up;
        let down = gradients.get(names.down);
        device.linear_weight_gradient(&shared.dstream, &shared.activated, down, rows, hidden, intermediate);
        device.linear_input_gradient(dgate_up, self.linear(names.gate_up), &mut shared.dnormed, rows);
        self.norm(stream, names.mlp_norm, &mut shared.normed);
        let gate_up = gradients.get(names.gate_up);
        device.linear_weight_gradient(dgate_up, &shared.normed, gate_up, rows, 2 * intermediate, hidden);
        self.norm_backward(shared, stream, names.mlp_norm, gradients);
    }

    /// The same for attention.
    fn backward_attention(
        &self,
        attention: &mut BlockAttention<'_, D>,
        shared: &mut Shared<D>,
        activations: &LayerActivations<D>,
        stream: &D::Buffer,
        gradients: &mut UnitGradients<'_, D>,
    ) {
        let (device, names, rows) = (self.device, self.names, self.rows);
        let (hidden, heads) = (self.config.hidden, self.config.heads());
        let LayerActivations { projected, rotated, attended, log_sum_exp, .. } = activations;

        device.linear_input_gradient(&shared.dstream, self.linear(names.output), &mut shared.dattended, rows);
        let output = gradients.get(names.output);
        device.linear_weight_gradient(&shared.dstream, attended, output, rows, hidden, heads.query_width());
        attention.backward(&shared.dattended, rotated, attended, log_sum_exp, &mut shared.delta, &mut shared.dprojected);
        let projected = projected.as_ref().unwrap_or(&shared.projected);
        let (query, key) = names.query_key_norms.unzip();
        let [bias, query, key] = gradients.get_several([names.projection_bias, query, key]);
        let rotation_gradients = RotationGradients { bias, query_key_norms: query.zip(key) };
        device.rotate_backward(projected, &self.rotation, &mut shared.dprojected, rotation_gradients);
        device.linear_input_gradient(&shared.dprojected, self.linear(names.projection), &mut shared.dnormed, rows);
        self.norm(stream, names.input_norm, &mut shared.normed);
        let projection = gradients.get(names.projection);
        device.linear_weight_gradient(&shared.dprojected, &shared.normed, projection, rows, heads.projected_width(), hidden);
        self.norm_backward(shared, stream, names.input_norm, gradients);
    }

    /// From `dnormed`, the gradient of the norm of `stream`, which `dstream` gains.
    fn norm_backward(&self, shared: &mut Shared<D>, stream: &D::Buffer, norm: usize, gradients: &mut UnitGradients<'_, D>) {
        let (epsilon, hidden) = (self.config.norm_epsilon, self.config.hidden);
        let Shared { dnormed, dstream, .. } = shared;
        let dnorm = gradients.get(norm);
        self.device.rms_norm_backward(dnormed, stream, self.values(norm), epsilon, self.rows, hidden, dstream, dnorm);
    }
}
