//! The memory that passes work in: what layers keep for the backward, what they share, and the blocks of keys.

use super::config::ModelConfig;
use crate::device::{Device, Role};

/// What the backward needs of one layer. `T` tokens, `h` hidden, `p` projected width, `a` query width, `m` intermediate.
pub(super) struct LayerActivations<D: Device> {
    pub projected: Option<D::Buffer>, // [T, p] before the query/key norms, where there are such
    pub rotated: D::Buffer,           // [T, p]
    pub attended: D::Buffer,          // [T, a]
    pub log_sum_exp: D::Buffer,       // [T, query heads], statistics
    pub gate_up: D::Buffer,           // [T, 2 m]
}

/// What a forward pass leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// Nothing: there is no backward.
    Nothing,
    /// The residual stream before each layer: the backward runs each layer again.
    Streams,
    /// All that the backward needs.
    Everything,
}

impl Keep {
    pub fn for_backward(recompute: bool) -> Keep {
        if recompute { Keep::Streams } else { Keep::Everything }
    }

    /// Buffers of the residual stream. Half layer `2 i` is the attention of layer `i`, `2 i + 1` its MLP.
    fn streams(self, layers: usize) -> usize {
        match self {
            Keep::Nothing => 2,
            Keep::Streams => layers + 1,
            Keep::Everything => 2 * layers,
        }
    }

    /// Which of them holds the stream before a half layer.
    pub fn stream(self, half_layer: usize) -> usize {
        match self {
            Keep::Nothing => half_layer % 2,
            Keep::Streams if half_layer % 2 == 1 => 0,
            Keep::Streams => half_layer / 2 + 1,
            Keep::Everything => half_layer,
        }
    }

    /// Sets of [`LayerActivations`].
    fn activations(self, layers: usize) -> usize {
        if self == Keep::Everything { layers } else { 1 }
    }

    /// Which of them a layer works in.
    pub fn activation(self, layer: usize) -> usize {
        if self == Keep::Everything { layer } else { 0 }
    }
}

/// Rows of a pass are rounded up to this, so that its memory rarely grows.
pub(crate) const ROW_GRAIN: usize = 64;

/// Bytes per token of a training pass but for the head's: what layers keep, and what they share, forward and backward.
pub(crate) fn bytes_per_token(config: &ModelConfig, recompute: bool, activation_bytes: usize) -> usize {
    let (heads, keep) = (config.heads(), Keep::for_backward(recompute));
    let projections = if config.query_key_norms() { 2 } else { 1 };
    let layer = projections * heads.projected_width() + heads.query_width() + 2 * config.intermediate;
    let statistic = heads.query_heads * size_of::<f32>();
    let layer = layer * activation_bytes + statistic;
    let shared = 4 * config.hidden + 2 * heads.projected_width() + heads.query_width() + 2 * config.intermediate;
    let streams = keep.streams(config.layers) * config.hidden;
    keep.activations(config.layers) * layer + (shared + streams) * activation_bytes + statistic
}

/// Bytes of the head's buffers per scored row.
pub(crate) fn bytes_per_scored_row(config: &ModelConfig, activation_bytes: usize) -> usize {
    6 * config.hidden * activation_bytes
}

/// Memory that passes reuse: it grows to the largest batch seen. Names as in [`LayerActivations`], `S` scored rows.
pub(super) struct Workspace<D: Device> {
    tokens: usize,
    scored_rows: usize,
    /// `[T, h]` the residual stream before half layers, at [`Keep::stream`].
    pub streams: Vec<D::Buffer>,
    /// At [`Keep::activation`].
    pub layers: Vec<LayerActivations<D>>,
    pub shared: Shared<D>,
    pub scored: Scored<D>,
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
    pub delta: D::Buffer,      // [T, query heads], statistics
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
            delta: device.zeros(Role::Statistics, tokens * heads.query_heads),
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
        }
    }

    /// Makes room for a pass. What must grow is dropped first, so that old and new never exist together.
    pub fn reserve(&mut self, device: &D, config: &ModelConfig, keep: Keep, tokens: usize, scored_rows: usize) {
        if tokens > self.tokens {
            self.streams.clear();
            self.layers.clear();
            self.shared = Shared::new(device, config, 0);
            self.tokens = tokens.next_multiple_of(ROW_GRAIN);
            self.shared = Shared::new(device, config, self.tokens);
        }
        while self.streams.len() < keep.streams(config.layers) {
            self.streams.push(device.zeros(Role::Activations, self.tokens * config.hidden));
        }
        while self.layers.len() < keep.activations(config.layers) {
            self.layers.push(LayerActivations::new(device, config, self.tokens));
        }
        if scored_rows > self.scored_rows {
            self.scored = Scored::new(device, config, 0);
            self.scored_rows = scored_rows.next_multiple_of(ROW_GRAIN);
            self.scored = Scored::new(device, config, self.scored_rows);
        }
    }
}
