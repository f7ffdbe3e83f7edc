//! The forward pass, the same for scoring, training and sampling, and the memory it works in.

use std::sync::{Arc, Mutex};

use super::config::ModelConfig;
use super::generate::KeyValueCache;
use super::parameters::LayerIndices;
use super::{Batch, Model};
use crate::device::{Device, Rotation, Span};

/// What the backward needs of one layer. `T` tokens, `h` hidden, `p` projected width, `a` query width, `m` intermediate.
pub(super) struct LayerActivations<D: Device> {
    pub input: D::Buffer,             // [T, h] residual stream before the layer
    pub projected: Option<D::Buffer>, // [T, p] before the query/key norms, where there are such
    pub rotated: D::Buffer,           // [T, p]
    pub attended: D::Buffer,          // [T, a]
    pub log_sum_exp: D::Buffer,       // [T, query heads]
    pub middle: D::Buffer,            // [T, h] residual stream between attention and MLP
    pub gate_up: D::Buffer,           // [T, 2 m]
}

/// Floats per token that [`LayerActivations`] keeps in one layer.
pub(super) fn floats_per_token_and_layer(config: &ModelConfig) -> usize {
    let heads = config.heads();
    let projections = if config.query_key_norms() { 2 } else { 1 };
    2 * config.hidden + projections * heads.projected_width() + heads.query_width() + heads.query_heads + 2 * config.intermediate
}

/// Floats per token of the memory shared by all layers, forward and backward.
pub(super) fn floats_per_token(config: &ModelConfig) -> usize {
    let heads = config.heads();
    8 * config.hidden + 2 * heads.projected_width() + heads.query_width() + 2 * config.intermediate
}

/// Memory that passes reuse: it grows to the largest batch seen. Names as in [`LayerActivations`], `S` scored rows.
pub(super) struct Workspace<D: Device> {
    tokens: usize,
    scored_rows: usize,
    /// One set per layer after a training pass; a pass that keeps nothing uses only the first.
    pub layers: Vec<LayerActivations<D>>,
    pub shared: Shared<D>,
    pub scored: Scored<D>,
    /// `[sequences]` keys and values of the layer at hand, where a pass has no caches of its own.
    pub caches: Vec<D::KeyValues>,
}

/// Buffers that every layer uses in turn.
pub(super) struct Shared<D: Device> {
    pub stream: D::Buffer,     // [T, h] residual stream
    pub normed: D::Buffer,     // [T, h]
    pub projected: D::Buffer,  // [T, p]
    pub activated: D::Buffer,  // [T, m]
    pub dstream: D::Buffer,    // [T, h]
    pub dnormed: D::Buffer,    // [T, h]
    pub dprojected: D::Buffer, // [T, p]
    pub dattended: D::Buffer,  // [T, a]
    pub dactivated: D::Buffer, // [T, m]
}

/// Buffers over the rows that the head reads.
pub(super) struct Scored<D: Device> {
    pub stream: D::Buffer,  // [S, h] residual stream
    pub normed: D::Buffer,  // [S, h] its final norm
    pub dstream: D::Buffer, // [S, h]
    pub dnormed: D::Buffer, // [S, h]
}

impl<D: Device> LayerActivations<D> {
    fn new(device: &D, config: &ModelConfig, tokens: usize) -> Self {
        let heads = config.heads();
        LayerActivations {
            input: device.zeros(tokens * config.hidden),
            projected: config.query_key_norms().then(|| device.zeros(tokens * heads.projected_width())),
            rotated: device.zeros(tokens * heads.projected_width()),
            attended: device.zeros(tokens * heads.query_width()),
            log_sum_exp: device.zeros(tokens * heads.query_heads),
            middle: device.zeros(tokens * config.hidden),
            gate_up: device.zeros(tokens * 2 * config.intermediate),
        }
    }
}

impl<D: Device> Shared<D> {
    fn new(device: &D, config: &ModelConfig, tokens: usize) -> Self {
        let heads = config.heads();
        let buffer = |width: usize| device.zeros(tokens * width);
        Shared {
            stream: buffer(config.hidden),
            normed: buffer(config.hidden),
            projected: buffer(heads.projected_width()),
            activated: buffer(config.intermediate),
            dstream: buffer(config.hidden),
            dnormed: buffer(config.hidden),
            dprojected: buffer(heads.projected_width()),
            dattended: buffer(heads.query_width()),
            dactivated: buffer(config.intermediate),
        }
    }
}

impl<D: Device> Scored<D> {
    fn new(device: &D, config: &ModelConfig, rows: usize) -> Self {
        let buffer = || device.zeros(rows * config.hidden);
        Scored { stream: buffer(), normed: buffer(), dstream: buffer(), dnormed: buffer() }
    }
}

impl<D: Device> Workspace<D> {
    pub fn new(device: &D, config: &ModelConfig) -> Self {
        Workspace {
            tokens: 0,
            scored_rows: 0,
            layers: Vec::new(),
            shared: Shared::new(device, config, 0),
            scored: Scored::new(device, config, 0),
            caches: Vec::new(),
        }
    }

    /// Makes room for a pass. What must grow is dropped first, so that old and new never exist together.
    fn reserve(&mut self, device: &D, config: &ModelConfig, tokens: usize, scored_rows: usize, layers: usize) {
        if tokens > self.tokens {
            self.layers.clear();
            self.shared = Shared::new(device, config, 0);
            self.tokens = tokens.next_multiple_of(64);
            self.shared = Shared::new(device, config, self.tokens);
        }
        while self.layers.len() < layers {
            self.layers.push(LayerActivations::new(device, config, self.tokens));
        }
        if scored_rows > self.scored_rows {
            self.scored = Scored::new(device, config, 0);
            self.scored_rows = scored_rows.next_multiple_of(64);
            self.scored = Scored::new(device, config, self.scored_rows);
        }
    }
}

/// Cosines and sines of every position met so far, as Transformers computes them (angles in f32).
pub(super) struct RotaryTable<D: Device> {
    head_dim: usize,
    /// `[head_dim / 2]` radians per position
    frequencies: Vec<f32>,
    /// `[positions, head_dim]`, with the number of positions
    table: Mutex<(usize, Arc<D::Buffer>)>,
}

impl<D: Device> RotaryTable<D> {
    pub fn new(device: &D, config: &ModelConfig) -> Self {
        let frequencies = (0..config.head_dim / 2)
            .map(|pair| 1.0 / (config.rope_theta as f32).powf((2 * pair) as f32 / config.head_dim as f32))
            .collect();
        RotaryTable { head_dim: config.head_dim, frequencies, table: Mutex::new((0, Arc::new(device.zeros(0)))) }
    }

    /// A table of at least `positions` rows; it doubles when it must grow.
    fn covering(&self, device: &D, positions: usize) -> Arc<D::Buffer> {
        let mut table = self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if table.0 < positions {
            let rows = positions.next_power_of_two().max(512);
            let mut values = Vec::with_capacity(rows * self.head_dim);
            for position in 0..rows {
                let angles = self.frequencies.iter().map(|frequency| (position as f32 * frequency) as f64);
                values.extend(angles.clone().map(|angle| angle.cos() as f32));
                values.extend(angles.map(|angle| angle.sin() as f32));
            }
            *table = (rows, Arc::new(device.upload(&values)));
        }
        table.1.clone()
    }
}

/// The new tokens of some sequences, packed end to end.
pub(super) struct Pass {
    pub ids: Vec<u32>,
    /// `[tokens]` place of each token in its own sequence
    pub positions: Vec<usize>,
    pub spans: Vec<Span>,
}

impl Pass {
    /// Packs sequences given as (tokens already seen, new tokens).
    pub fn pack<'a>(sequences: impl Iterator<Item = (usize, &'a [u32])>) -> Pass {
        let mut pass = Pass { ids: Vec::new(), positions: Vec::new(), spans: Vec::new() };
        for (past, ids) in sequences {
            pass.spans.push(Span { start: pass.ids.len(), length: ids.len() });
            pass.ids.extend_from_slice(ids);
            pass.positions.extend(past..past + ids.len());
        }
        pass
    }

    pub fn of_batch(batch: &Batch) -> Pass {
        Pass::pack(batch.starts.windows(2).map(|bounds| (0, &batch.ids[bounds[0]..bounds[1]])))
    }
}

/// Where a pass finds the keys and values of earlier tokens.
pub(super) enum Caches<'a, 'b, D: Device> {
    /// Every sequence starts here; what is computed is forgotten after each layer.
    Fresh,
    Kept(&'a mut [&'b mut KeyValueCache<D>]),
}

impl<D: Device> Model<D> {
    /// Runs whole sequences and leaves what the head reads in `workspace.scored.normed`.
    pub(super) fn forward_batch(&self, workspace: &mut Workspace<D>, batch: &Batch, keep: bool) {
        let pass = Pass::of_batch(batch);
        self.forward(workspace, &pass, Caches::Fresh, keep, batch.scored_rows.len());
        self.final_norm(workspace, &batch.scored_rows);
    }

    /// Runs a pass through all layers; the residual stream ends up in `workspace.shared.stream`. With `keep`, every layer leaves
    /// what its backward needs.
    pub(super) fn forward(
        &self,
        workspace: &mut Workspace<D>,
        pass: &Pass,
        mut caches: Caches<'_, '_, D>,
        keep: bool,
        scored_rows: usize,
    ) {
        let (device, config) = (&self.device, &self.config);
        if let Some(id) = pass.ids.iter().find(|&&id| id as usize >= config.vocabulary) {
            panic!("token id {id} is not below the vocabulary of {}: the caller must check", config.vocabulary);
        }
        let layers = if keep { config.layers } else { 1 };
        workspace.reserve(device, config, pass.ids.len(), scored_rows, layers);
        let Workspace { layers, shared, caches: fresh, .. } = workspace;
        while matches!(caches, Caches::Fresh) && fresh.len() < pass.spans.len() {
            fresh.push(device.new_key_values(config.heads()));
        }
        let table = self.rotary_table(pass);
        device.embed(&self.parameters[self.layout.embedding].values, &pass.ids, config.hidden, &mut shared.stream);
        for (index, names) in self.layout.layers.iter().enumerate() {
            let mut key_values: Vec<&mut D::KeyValues> = match &mut caches {
                Caches::Fresh => {
                    let mut fresh: Vec<_> = fresh[..pass.spans.len()].iter_mut().collect();
                    fresh.iter_mut().for_each(|cache| device.clear_key_values(cache));
                    fresh
                }
                Caches::Kept(kept) => kept.iter_mut().map(|cache| &mut cache.layers[index]).collect(),
            };
            let activations = &mut layers[if keep { index } else { 0 }];
            self.forward_layer(names, pass, &table, &mut key_values, shared, activations, keep);
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn forward_layer(
        &self,
        names: &LayerIndices,
        pass: &Pass,
        table: &D::Buffer,
        key_values: &mut [&mut D::KeyValues],
        shared: &mut Shared<D>,
        activations: &mut LayerActivations<D>,
        keep: bool,
    ) {
        let (device, config, rows) = (&self.device, &self.config, pass.ids.len());
        let (hidden, epsilon, heads) = (config.hidden, config.norm_epsilon, config.heads());
        let parameters = &self.parameters;

        // Attention: stream += output(attention(rotate(projection(norm(stream)))))
        device.rms_norm(&shared.stream, &parameters[names.input_norm].values, epsilon, rows, hidden, &mut shared.normed);
        let projected = activations.projected.as_mut().unwrap_or(&mut shared.projected);
        device.linear(&shared.normed, parameters[names.projection].linear(), projected, rows, false);
        device.rotate(projected, &self.rotation(names, table, &pass.positions), &mut activations.rotated);
        let log_sum_exp = keep.then_some(&mut activations.log_sum_exp);
        device.attention(&activations.rotated, heads, &pass.spans, key_values, &mut activations.attended, log_sum_exp);
        if keep {
            device.copy(&shared.stream, &mut activations.input, rows * hidden);
        }
        device.linear(&activations.attended, parameters[names.output].linear(), &mut shared.stream, rows, true);

        // MLP: stream += down(swiglu(gate_up(norm(stream))))
        device.rms_norm(&shared.stream, &parameters[names.mlp_norm].values, epsilon, rows, hidden, &mut shared.normed);
        device.linear(&shared.normed, parameters[names.gate_up].linear(), &mut activations.gate_up, rows, false);
        device.swiglu(&activations.gate_up, rows, config.intermediate, &mut shared.activated);
        if keep {
            device.copy(&shared.stream, &mut activations.middle, rows * hidden);
        }
        device.linear(&shared.activated, parameters[names.down].linear(), &mut shared.stream, rows, true);
    }

    pub(super) fn rotation<'a>(&'a self, names: &LayerIndices, table: &'a D::Buffer, positions: &'a [usize]) -> Rotation<'a, D> {
        let values = |index: usize| &self.parameters[index].values;
        Rotation {
            heads: self.config.heads(),
            bias: names.projection_bias.map(values),
            query_key_norms: names.query_key_norms.map(|(query, key)| (values(query), values(key))),
            norm_epsilon: self.config.norm_epsilon,
            table,
            positions,
        }
    }

    pub(super) fn rotary_table(&self, pass: &Pass) -> Arc<D::Buffer> {
        self.rotary.covering(&self.device, pass.positions.iter().max().map_or(0, |last| last + 1))
    }

    /// Gathers `rows` of the residual stream and norms them: what the head reads.
    pub(super) fn final_norm(&self, workspace: &mut Workspace<D>, rows: &[usize]) {
        let (device, config) = (&self.device, &self.config);
        let Workspace { shared, scored, .. } = workspace;
        device.gather_rows(&shared.stream, rows, config.hidden, &mut scored.stream);
        let weight = &self.parameters[self.layout.final_norm].values;
        device.rms_norm(&scored.stream, weight, config.norm_epsilon, rows.len(), config.hidden, &mut scored.normed);
    }
}
