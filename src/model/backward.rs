//! The backward pass, layer by layer from the head down, written out by hand. `dx` is the derivative of the loss by `x`.
//!
//! Cheap activations (norms, SwiGLU) are computed again rather than kept.

use super::forward::{LayerActivations, Pass, Shared, Workspace};
use super::parameters::LayerIndices;
use super::{Batch, Gradients, Model};
use crate::device::{Cotangents, Device, RotationGradients};

impl<D: Device> Model<D> {
    /// Adds the gradients of every weight, after a forward of the same batch that kept its activations in `workspace`.
    pub(super) fn backward_batch(
        &self,
        workspace: &mut Workspace<D>,
        batch: &Batch,
        temperature: f32,
        cotangents: &Cotangents,
        gradients: &mut Gradients<D>,
    ) {
        let pass = Pass::of_batch(batch);
        self.backward_head(workspace, batch, temperature, cotangents, gradients);
        let table = self.rotary_table(&pass);
        let Workspace { streams, layers, shared, .. } = workspace;
        let layers = self.layout.layers.iter().zip(layers).zip(streams.chunks_exact(2));
        for ((names, activations), streams) in layers.rev() {
            self.backward_mlp(names, &pass, shared, activations, &streams[1], gradients);
            self.backward_attention(names, &pass, &table, shared, activations, &streams[0], gradients);
        }
        let table_gradient = &mut gradients.buffers[self.layout.embedding];
        self.device.embed_backward(&shared.dstream, &pass.ids, self.config.hidden, table_gradient);
    }

    /// From the scores' cotangents to `dstream`, which is 0 in rows that are not scored.
    fn backward_head(
        &self,
        workspace: &mut Workspace<D>,
        batch: &Batch,
        temperature: f32,
        cotangents: &Cotangents,
        gradients: &mut Gradients<D>,
    ) {
        let (device, config) = (&self.device, &self.config);
        let (hidden, scored_rows) = (config.hidden, batch.scored_rows.len());
        let Workspace { shared, scored, .. } = workspace;
        let head = self.parameters[self.layout.head].linear();
        let dhead = &mut gradients.buffers[self.layout.head];
        device.head_backward(&scored.normed, head, &batch.targets(), temperature, cotangents, &mut scored.dnormed, dhead);
        device.clear(&mut scored.dstream, scored_rows * hidden);
        device.rms_norm_backward(
            &scored.dnormed,
            &scored.stream,
            &self.parameters[self.layout.final_norm].values,
            config.norm_epsilon,
            scored_rows,
            hidden,
            &mut scored.dstream,
            &mut gradients.buffers[self.layout.final_norm],
        );
        device.clear(&mut shared.dstream, batch.ids.len() * hidden);
        device.scatter_rows(&scored.dstream, &batch.scored_rows, hidden, &mut shared.dstream);
    }

    /// From `stream`, the residual stream before the MLP. `dstream` passes its residual connection unchanged and gains what comes
    /// through the MLP.
    #[allow(clippy::too_many_arguments)]
    fn backward_mlp(
        &self,
        names: &LayerIndices,
        pass: &Pass,
        shared: &mut Shared<D>,
        activations: &mut LayerActivations<D>,
        stream: &D::Buffer,
        gradients: &mut Gradients<D>,
    ) {
        let (device, config, rows) = (&self.device, &self.config, pass.ids.len());
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let parameters = &self.parameters;
        let gradients = &mut gradients.buffers;

        device.linear_input_gradient(&shared.dstream, parameters[names.down].linear(), &mut shared.dactivated, rows);
        // gate_up becomes its own gradient: the activations of a layer are used once.
        device.swiglu_backward(&shared.dactivated, &mut activations.gate_up, rows, intermediate, &mut shared.activated);
        let dgate_up = &activations.gate_up;
        let (down, gate_up) = (&mut gradients[names.down], names.gate_up);
        device.linear_weight_gradient(&shared.dstream, &shared.activated, down, rows, hidden, intermediate);
        device.linear_input_gradient(dgate_up, parameters[gate_up].linear(), &mut shared.dnormed, rows);
        let norm = &parameters[names.mlp_norm].values;
        device.rms_norm(stream, norm, config.norm_epsilon, rows, hidden, &mut shared.normed);
        device.linear_weight_gradient(dgate_up, &shared.normed, &mut gradients[gate_up], rows, 2 * intermediate, hidden);
        device.rms_norm_backward(
            &shared.dnormed,
            stream,
            norm,
            config.norm_epsilon,
            rows,
            hidden,
            &mut shared.dstream,
            &mut gradients[names.mlp_norm],
        );
    }

    /// The same for attention.
    #[allow(clippy::too_many_arguments)]
    fn backward_attention(
        &self,
        names: &LayerIndices,
        pass: &Pass,
        table: &D::Buffer,
        shared: &mut Shared<D>,
        activations: &LayerActivations<D>,
        stream: &D::Buffer,
        gradients: &mut Gradients<D>,
    ) {
        let (device, config, rows) = (&self.device, &self.config, pass.ids.len());
        let (hidden, heads) = (config.hidden, config.heads());
        let parameters = &self.parameters;
        let gradients = &mut gradients.buffers;

        device.linear_input_gradient(&shared.dstream, parameters[names.output].linear(), &mut shared.dattended, rows);
        let output = &mut gradients[names.output];
        device.linear_weight_gradient(&shared.dstream, &activations.attended, output, rows, hidden, heads.query_width());
        device.attention_backward(
            &shared.dattended,
            &activations.rotated,
            &activations.attended,
            &activations.log_sum_exp,
            heads,
            &pass.spans,
            &mut shared.dprojected,
        );
        let projected = activations.projected.as_ref().unwrap_or(&shared.projected);
        let rotation = self.rotation(names, table, &pass.positions);
        device.rotate_backward(projected, &rotation, &mut shared.dprojected, rotation_gradients(names, gradients));
        device.linear_input_gradient(&shared.dprojected, parameters[names.projection].linear(), &mut shared.dnormed, rows);
        let norm = &parameters[names.input_norm].values;
        device.rms_norm(stream, norm, config.norm_epsilon, rows, hidden, &mut shared.normed);
        let projection = &mut gradients[names.projection];
        device.linear_weight_gradient(&shared.dprojected, &shared.normed, projection, rows, heads.projected_width(), hidden);
        device.rms_norm_backward(
            &shared.dnormed,
            stream,
            norm,
            config.norm_epsilon,
            rows,
            hidden,
            &mut shared.dstream,
            &mut gradients[names.input_norm],
        );
    }
}

/// The gradients that the rotation adds to: bias and norms stand next to one another in stored order (see `Layout`).
fn rotation_gradients<'a, D: Device>(names: &LayerIndices, gradients: &'a mut [D::Buffer]) -> RotationGradients<'a, D> {
    let mut bias = None;
    let mut query = None;
    let mut key = None;
    for (index, gradient) in gradients.iter_mut().enumerate() {
        if names.projection_bias == Some(index) {
            bias = Some(gradient);
        } else if names.query_key_norms.is_some_and(|(query, _)| query == index) {
            query = Some(gradient);
        } else if names.query_key_norms.is_some_and(|(_, key)| key == index) {
            key = Some(gradient);
        }
    }
    RotationGradients { bias, query_key_norms: query.zip(key) }
}
