//! The forward pass, the same for scoring, training and sampling, and the memory it works in.

use std::sync::{Arc, Mutex};

use super::config::ModelConfig;
use super::generate::KeyValueCache;
use super::parameters::LayerIndices;
use super::{Batch, Model};
use crate::device::{Device, Role, Rotation, Span};

/// What the backward needs of one layer. `T` tokens, `h` hidden, `p` projected width, `a` query width, `m` intermediate.
pub(super) struct LayerActivations<D: Device> {
    pub projected: Option<D::Buffer>, // [T, p] before the query/key norms, where there are such
    pub rotated: D::Buffer,           // [T, p]
    pub attended: D::Buffer,          // [T, a]
    pub log_sum_exp: D::Buffer,       // [T, query heads], statistics
    pub gate_up: D::Buffer,           // [T, 2 m]
}

/// Bytes per token that a training pass keeps of one layer: [`LayerActivations`] and two states of the residual stream.
pub(crate) fn bytes_per_token_and_layer(config: &ModelConfig, activation_bytes: usize) -> usize {
    let heads = config.heads();
    let projections = if config.query_key_norms() { 2 } else { 1 };
    let activations = 2 * config.hidden + projections * heads.projected_width() + heads.query_width() + 2 * config.intermediate;
    activations * activation_bytes + heads.query_heads * size_of::<f32>()
}

/// Bytes per token of the memory shared by all layers, forward and backward.
pub(crate) fn bytes_per_token(config: &ModelConfig, activation_bytes: usize) -> usize {
    let heads = config.heads();
    let activations = 10 * config.hidden + 2 * heads.projected_width() + heads.query_width() + 2 * config.intermediate;
    activations * activation_bytes
}

/// Memory that passes reuse: it grows to the largest batch seen. Names as in [`LayerActivations`], `S` scored rows.
pub(super) struct Workspace<D: Device> {
    tokens: usize,
    scored_rows: usize,
    /// `[T, h]` the residual stream before each half layer (attention, then MLP). A training pass keeps them all; a pass that
    /// keeps nothing uses two in turn.
    pub streams: Vec<D::Buffer>,
    /// One set per layer after a training pass; a pass that keeps nothing uses only the first.
    pub layers: Vec<LayerActivations<D>>,
    pub shared: Shared<D>,
    pub scored: Scored<D>,
    /// `[sequences]` keys and values of the layer at hand, where a pass has no caches of its own.
    pub caches: Vec<D::KeyValues>,
}

/// Buffers that every layer uses in turn.
pub(super) struct Shared<D: Device> {
    pub branch: D::Buffer,     // [T, h] what a half layer adds to the residual stream
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
    pub before: D::Buffer,  // [S, h] residual stream before the last half layer
    pub branch: D::Buffer,  // [S, h] what that half layer adds
    pub stream: D::Buffer,  // [S, h] residual stream
    pub normed: D::Buffer,  // [S, h] its final norm
    pub dstream: D::Buffer, // [S, h]
    pub dnormed: D::Buffer, // [S, h]
}

impl<D: Device> LayerActivations<D> {
    fn new(device: &D, config: &ModelConfig, tokens: usize) -> Self {
        let heads = config.heads();
        let buffer = |width: usize| device.zeros(Role::Activations, tokens * width);
        LayerActivations {
            projected: config.query_key_norms().then(|| buffer(heads.projected_width())),
            rotated: buffer(heads.projected_width()),
            attended: buffer(heads.query_width()),
            log_sum_exp: device.zeros(Role::Statistics, tokens * heads.query_heads),
            gate_up: buffer(2 * config.intermediate),
        }
    }
}

impl<D: Device> Shared<D> {
    fn new(device: &D, config: &ModelConfig, tokens: usize) -> Self {
        let heads = config.heads();
        let buffer = |width: usize| device.zeros(Role::Activations, tokens * width);
        Shared {
            branch: buffer(config.hidden),
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
        let buffer = || device.zeros(Role::Activations, rows * config.hidden);
        Scored { before: buffer(), branch: buffer(), stream: buffer(), normed: buffer(), dstream: buffer(), dnormed: buffer() }
    }
}

impl<D: Device> Workspace<D> {
    pub fn new(device: &D, config: &ModelConfig) -> Self {
        Workspace {
            tokens: 0,
            scored_rows: 0,
            streams: Vec::new(),
            layers: Vec::new(),
            shared: Shared::new(device, config, 0),
            scored: Scored::new(device, config, 0),
            caches: Vec::new(),
        }
    }

    /// Makes room for a pass. What must grow is dropped first, so that old and new never exist together.
    fn reserve(&mut self, device: &D, config: &ModelConfig, tokens: usize, scored_rows: usize, layers: usize) {
        if tokens > self.tokens {
            self.streams.clear();
            self.layers.clear();
            self.shared = Shared::new(device, config, 0);
            self.tokens = tokens.next_multiple_of(64);
            self.shared = Shared::new(device, config, self.tokens);
        }
        while self.streams.len() < 2 * layers {
            self.streams.push(device.zeros(Role::Activations, self.tokens * config.hidden));
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

/// Positions of the table that covers `positions`: it doubles when it must grow.
fn rotary_table_rows(positions: usize) -> usize {
    positions.next_power_of_two().max(512)
}

/// Bytes of the cosines and sines of sequences of up to `positions` tokens.
pub(crate) fn rotary_table_bytes(config: &ModelConfig, positions: usize) -> usize {
    rotary_table_rows(positions) * config.head_dim * size_of::<f32>()
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
        RotaryTable {
            head_dim: config.head_dim,
            frequencies,
            table: Mutex::new((0, Arc::new(device.zeros(Role::Statistics, 0)))),
        }
    }

    /// A table of at least `positions` rows.
    fn covering(&self, device: &D, positions: usize) -> Arc<D::Buffer> {
        let mut table = self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if table.0 < positions {
            let rows = rotary_table_rows(positions);
            let mut values = Vec::with_capacity(rows * self.head_dim);
            for position in 0..rows {
                let angles = self.frequencies.iter().map(|frequency| (position as f32 * frequency) as f64);
                values.extend(angles.clone().map(|angle| angle.cos() as f32));
                values.extend(angles.map(|angle| angle.sin() as f32));
            }
            *table = (rows, Arc::new(device.upload(Role::Statistics, &values)));
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
        self.forward(workspace, &Pass::of_batch(batch), Caches::Fresh, keep, &batch.scored_rows);
    }

    /// Runs a pass through all layers and norms `scored_rows` of the residual stream for the head: `workspace.scored.normed`.
    /// With `keep`, every layer leaves what its backward needs.
    pub(super) fn forward(
        &self,
        workspace: &mut Workspace<D>,
        pass: &Pass,
        mut caches: Caches<'_, '_, D>,
        keep: bool,
        scored_rows: &[usize],
    ) {
        let (device, config, rows) = (&self.device, &self.config, pass.ids.len());
        if let Some(id) = pass.ids.iter().find(|&&id| id as usize >= config.vocabulary) {
            panic!("token id {id} is not below the vocabulary of {}: the caller must check", config.vocabulary);
        }
        workspace.reserve(device, config, rows, scored_rows.len(), if keep { config.layers } else { 1 });
        let Workspace { streams, layers, shared, scored, caches: fresh, .. } = workspace;
        while matches!(caches, Caches::Fresh) && fresh.len() < pass.spans.len() {
            fresh.push(device.new_key_values(config.heads()));
        }
        let table = self.rotary_table(pass);
        let (epsilon, hidden) = (config.norm_epsilon, config.hidden);
        let weight = |index: usize| &self.parameters[index].values;
        let place = |half_layer: usize| if keep { half_layer } else { half_layer % 2 };

        device.embed(weight(self.layout.embedding), None, &pass.ids, hidden, &mut streams[0]);
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
            for (half, norm) in [(2 * index, names.input_norm), (2 * index + 1, names.mlp_norm)] {
                // stream += the branch of the half layer before this one, then the norm that opens this one
                match half.checked_sub(1) {
                    None => device.rms_norm(&streams[0], weight(norm), epsilon, rows, hidden, &mut shared.normed),
                    Some(before) => {
                        let (before, here) = two(streams, place(before), place(half));
                        let Shared { branch, normed, .. } = &mut *shared;
                        device.add_rms_norm(before, branch, weight(norm), epsilon, rows, hidden, here, normed);
                    }
                }
                if half % 2 == 0 {
                    self.forward_attention(names, pass, &table, &mut key_values, shared, activations, keep);
                } else {
                    self.forward_mlp(names, rows, shared, activations);
                }
            }
        }
        let last = &streams[place(2 * config.layers - 1)];
        device.gather_rows(last, scored_rows, hidden, &mut scored.before);
        device.gather_rows(&shared.branch, scored_rows, hidden, &mut scored.branch);
        let (norm, count) = (weight(self.layout.final_norm), scored_rows.len());
        let Scored { before, branch, stream, normed, .. } = scored;
        device.add_rms_norm(before, branch, norm, epsilon, count, hidden, stream, normed);
    }

    /// `branch = output(attention(rotate(projection(normed))))`
    #[allow(clippy::too_many_arguments)]
    fn forward_attention(
        &self,
        names: &LayerIndices,
        pass: &Pass,
        table: &D::Buffer,
        key_values: &mut [&mut D::KeyValues],
        shared: &mut Shared<D>,
        activations: &mut LayerActivations<D>,
        keep: bool,
    ) {
        let (device, rows, parameters) = (&self.device, pass.ids.len(), &self.parameters);
        let projected = activations.projected.as_mut().unwrap_or(&mut shared.projected);
        device.linear(&shared.normed, parameters[names.projection].linear(), projected, rows);
        device.rotate(projected, &self.rotation(names, table, &pass.positions), &mut activations.rotated);
        let log_sum_exp = keep.then_some(&mut activations.log_sum_exp);
        let attended = &mut activations.attended;
        device.attention(&activations.rotated, self.config.heads(), &pass.spans, key_values, attended, log_sum_exp);
        device.linear(attended, parameters[names.output].linear(), &mut shared.branch, rows);
    }

    /// `branch = down(swiglu(gate_up(normed)))`
    fn forward_mlp(&self, names: &LayerIndices, rows: usize, shared: &mut Shared<D>, activations: &mut LayerActivations<D>) {
        let (device, parameters) = (&self.device, &self.parameters);
        device.linear(&shared.normed, parameters[names.gate_up].linear(), &mut activations.gate_up, rows);
        device.swiglu(&activations.gate_up, rows, self.config.intermediate, &mut shared.activated);
        device.linear(&shared.activated, parameters[names.down].linear(), &mut shared.branch, rows);
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
}

/// Two different elements, the first to read and the second to write.
fn two<T>(values: &mut [T], read: usize, write: usize) -> (&T, &mut T) {
    let (low, high) = values.split_at_mut(read.max(write));
    if read < write { (&low[read], &mut high[0]) } else { (&high[0], &mut low[write]) }
}
