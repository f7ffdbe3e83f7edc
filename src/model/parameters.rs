//! Parameters as the operations want them, and the names under which files know them.
//!
//! Matrices that read the same input are stored as one (`q`, `k`, `v`; `gate`, `up`), rows after one another, so that one product
//! serves them all; a Hugging Face tensor is then a range of a stored one.

use std::ops::Range;
use std::sync::Arc;

use super::config::ModelConfig;
use super::exchange::Unit;
use crate::device::{Device, LinearWeights, Role};

/// What a stored tensor is, for initialisation and weight decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Embedding,
    Matrix,
    /// Output projection of attention or of the MLP: its result is added to the residual stream.
    ResidualMatrix,
    Norm,
    Bias,
}

impl Kind {
    /// Weight decay applies to matrices, embeddings among them, not to norms and biases.
    pub fn decays(self) -> bool {
        matches!(self, Kind::Embedding | Kind::Matrix | Kind::ResidualMatrix)
    }
}

/// A Hugging Face tensor inside a stored one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    pub shape: Vec<usize>,
    /// First element in the stored tensor.
    pub offset: usize,
}

impl Part {
    pub fn length(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A stored tensor before it has values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub kind: Kind,
    /// Rows and columns; a vector has one row.
    pub outputs: usize,
    pub inputs: usize,
    pub parts: Vec<Part>,
}

impl Entry {
    pub fn length(&self) -> usize {
        self.outputs * self.inputs
    }
}

/// Indices of one layer's stored tensors, consecutive and in file order.
#[derive(Clone, Copy, Debug)]
pub struct LayerIndices {
    pub input_norm: usize,
    /// Queries, keys, values: `[projected_width, hidden]`
    pub projection: usize,
    pub projection_bias: Option<usize>,
    pub query_key_norms: Option<(usize, usize)>,
    /// `[hidden, query_width]`
    pub output: usize,
    pub mlp_norm: usize,
    /// Gate, then up: `[2 intermediate, hidden]`
    pub gate_up: usize,
    /// `[hidden, intermediate]`
    pub down: usize,
}

/// All stored tensors of a configuration, in file order, and where each layer finds its own.
#[derive(Clone, Debug)]
pub struct Layout {
    pub entries: Vec<Entry>,
    pub embedding: usize,
    pub layers: Vec<LayerIndices>,
    pub final_norm: usize,
    /// The embedding again where tied.
    pub head: usize,
}

impl Layout {
    pub fn new(config: &ModelConfig) -> Layout {
        let mut entries = Vec::new();
        let embedding = push(&mut entries, Kind::Embedding, config.hidden, &[("model.embed_tokens.weight", config.vocabulary)]);
        let layers = (0..config.layers).map(|layer| push_layer(&mut entries, config, layer)).collect();
        let final_norm = push_vector(&mut entries, Kind::Norm, &[("model.norm.weight", config.hidden)]);
        let head = if config.tied_embeddings {
            embedding
        } else {
            push(&mut entries, Kind::Embedding, config.hidden, &[("lm_head.weight", config.vocabulary)])
        };
        Layout { entries, embedding, layers, final_norm, head }
    }

    /// Indices of the stored tensors that a pass needs for `unit`, ascending.
    pub fn unit(&self, unit: Unit) -> Vec<usize> {
        match unit {
            Unit::Embedding => vec![self.embedding],
            Unit::Layer(layer) => (self.layers[layer].input_norm..=self.layers[layer].down).collect(),
            Unit::Head => {
                let mut indices = vec![self.final_norm, self.head];
                indices.sort_unstable();
                indices
            }
        }
    }

    /// Whether the embedding is the head's matrix too.
    pub fn is_tied(&self) -> bool {
        self.embedding == self.head
    }

    /// Whether products read a stored tensor: an untied embedding is only looked up.
    pub fn is_multiplied(&self, index: usize) -> bool {
        self.entries[index].kind.decays() && (index != self.embedding || self.is_tied())
    }

    pub fn parameter_count(&self) -> usize {
        self.entries.iter().map(Entry::length).sum()
    }

    /// Every Hugging Face tensor with the index of the stored tensor that holds it.
    pub fn parts(&self) -> impl Iterator<Item = (usize, &Part)> {
        self.entries.iter().enumerate().flat_map(|(index, entry)| entry.parts.iter().map(move |part| (index, part)))
    }

    pub fn find(&self, name: &str) -> Option<(usize, &Part)> {
        self.parts().find(|(_, part)| part.name == name)
    }
}

fn push_layer(entries: &mut Vec<Entry>, config: &ModelConfig, layer: usize) -> LayerIndices {
    let heads = config.heads();
    let (queries, key_values) = (heads.query_width(), heads.key_value_width());
    let name = |suffix: &str| format!("model.layers.{layer}.{suffix}");
    let projections = |suffix: &str| {
        [("q", queries), ("k", key_values), ("v", key_values)]
            .map(|(part, rows)| (name(&format!("self_attn.{part}_proj.{suffix}")), rows))
    };
    let vector = |entries: &mut Vec<Entry>, suffix: &str, length| push_vector(entries, Kind::Norm, &[(name(suffix), length)]);
    LayerIndices {
        input_norm: vector(entries, "input_layernorm.weight", config.hidden),
        projection: push(entries, Kind::Matrix, config.hidden, &projections("weight")),
        projection_bias: config.attention_bias.then(|| push_vector(entries, Kind::Bias, &projections("bias"))),
        query_key_norms: config.query_key_norms().then(|| {
            (
                vector(entries, "self_attn.q_norm.weight", config.head_dim),
                vector(entries, "self_attn.k_norm.weight", config.head_dim),
            )
        }),
        output: push(entries, Kind::ResidualMatrix, queries, &[(name("self_attn.o_proj.weight"), config.hidden)]),
        mlp_norm: vector(entries, "post_attention_layernorm.weight", config.hidden),
        gate_up: push(
            entries,
            Kind::Matrix,
            config.hidden,
            &[(name("mlp.gate_proj.weight"), config.intermediate), (name("mlp.up_proj.weight"), config.intermediate)],
        ),
        down: push(entries, Kind::ResidualMatrix, config.intermediate, &[(name("mlp.down_proj.weight"), config.hidden)]),
    }
}

/// A stored matrix of `inputs` columns, its parts given as (name, rows).
fn push<N: ToString>(entries: &mut Vec<Entry>, kind: Kind, inputs: usize, parts: &[(N, usize)]) -> usize {
    let mut entry = Entry { kind, outputs: 0, inputs, parts: Vec::new() };
    for (name, rows) in parts {
        entry.parts.push(Part { name: name.to_string(), shape: vec![*rows, inputs], offset: entry.outputs * inputs });
        entry.outputs += rows;
    }
    entries.push(entry);
    entries.len() - 1
}

/// A stored vector, its parts given as (name, length).
fn push_vector<N: ToString>(entries: &mut Vec<Entry>, kind: Kind, parts: &[(N, usize)]) -> usize {
    let mut entry = Entry { kind, outputs: 1, inputs: 0, parts: Vec::new() };
    for (name, length) in parts {
        entry.parts.push(Part { name: name.to_string(), shape: vec![*length], offset: entry.inputs });
        entry.inputs += length;
    }
    entries.push(entry);
    entries.len() - 1
}

/// A stored tensor with its values.
pub struct Parameter<D: Device> {
    pub entry: Entry,
    pub values: D::Buffer,
    /// For matrices.
    pub packed: Option<D::Packed>,
}

impl<D: Device> Parameter<D> {
    /// The matrix as linear layers take it. Only matrices are asked for it; a vector would be a mistake of this room.
    pub fn linear(&self) -> LinearWeights<'_, D> {
        let Some(packed) = &self.packed else { unreachable!("{} is not a matrix", self.entry.parts[0].name) };
        LinearWeights { values: &self.values, packed, outputs: self.entry.outputs, inputs: self.entry.inputs }
    }
}

/// Tensors that other ranks send: their parts arrive in one buffer.
impl<D: Device> Parameter<D> {
    /// A matrix as it travels, or a vector in f32, with room for `room` numbers where it arrives.
    pub fn receivable(device: &D, entry: &Entry, room: usize) -> Parameter<D> {
        let (values, packed) = if entry.kind.decays() {
            let (values, packed) = device.receivable(entry.outputs, entry.inputs, room);
            (values, Some(packed))
        } else {
            (device.zeros(Role::Weights, room), None)
        };
        Parameter { entry: entry.clone(), values, packed }
    }

    /// Where it arrives: `[room]`.
    pub fn arrival(&mut self, device: &D) -> &mut D::Buffer {
        match &mut self.packed {
            Some(packed) => device.arrival(&mut self.values, packed),
            None => &mut self.values,
        }
    }

    /// Makes what has arrived what products read.
    pub fn arrived(&mut self, device: &D) {
        if let Some(packed) = &mut self.packed {
            device.arrived(&self.values, packed);
        }
    }
}

/// What an optimizer changes of one stored tensor.
pub struct Piece<'a, D: Device> {
    pub kind: Kind,
    /// The tensor's elements that are here: all of them, or this rank's shard.
    pub range: Range<usize>,
    /// `[range]` in f32; longer where shards are padded.
    pub values: &'a mut D::Buffer,
    /// The copy of a matrix that products read, where it is kept beside the values.
    pub packed: Option<&'a mut D::Packed>,
    /// As long as `values`.
    pub gradient: &'a D::Buffer,
}

/// The gradient of every stored tensor, accumulated over micro-batches.
pub struct Gradients<D: Device> {
    pub(crate) device: D,
    pub(crate) layout: Arc<Layout>,
    pub(crate) buffers: Vec<D::Buffer>,
}

impl<D: Device> Gradients<D> {
    pub(crate) fn new(device: &D, layout: &Arc<Layout>) -> Gradients<D> {
        let buffers = layout.entries.iter().map(|entry| device.zeros(Role::Gradients, entry.length())).collect();
        Gradients { device: device.clone(), layout: layout.clone(), buffers }
    }

    /// Sets every gradient to 0.
    pub fn clear(&mut self) {
        for (buffer, entry) in self.buffers.iter_mut().zip(&self.layout.entries) {
            self.device.clear(buffer, entry.length());
        }
    }

    /// Every gradient under its Hugging Face name, with its shape.
    pub fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>, Vec<f32>)> {
        self.layout.parts().map(|(index, part)| {
            (part.name.clone(), part.shape.clone(), self.device.read(&self.buffers[index], part.offset, part.length()))
        })
    }
}
