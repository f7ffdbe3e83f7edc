//! What a pass asks of other ranks: tensors that are stored in shards, and the keys, values and queries of documents that several
//! ranks share. The model is written as if for one device; who implements these traits decides where everything lies.

use super::parameters::Parameter;
use crate::device::{AttentionPlan, Device};
use crate::types::Batch;

/// Tensors that a pass needs at the same time, and that travel together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    Embedding,
    Layer(usize),
    /// The final norm and the head's matrix, which is the embedding again where tied.
    Head,
}

/// The tensors of a unit, whole, by their index in the layout.
pub struct UnitTensors<'a, D: Device> {
    entries: Vec<(usize, &'a Parameter<D>)>,
}

impl<'a, D: Device> UnitTensors<'a, D> {
    pub fn new(entries: Vec<(usize, &'a Parameter<D>)>) -> Self {
        UnitTensors { entries }
    }

    /// Panics if the unit has no such tensor: a mistake of this room.
    pub fn get(&self, index: usize) -> &'a Parameter<D> {
        match self.entries.iter().find(|(entry, _)| *entry == index) {
            Some((_, parameter)) => parameter,
            None => unreachable!("tensor {index} does not belong to this unit"),
        }
    }
}

/// Where the gradients of a unit are added, `[length of the tensor]` each, by index in the layout.
pub struct UnitGradients<'a, D: Device> {
    entries: Vec<(usize, &'a mut D::Buffer)>,
}

impl<'a, D: Device> UnitGradients<'a, D> {
    pub fn new(entries: Vec<(usize, &'a mut D::Buffer)>) -> Self {
        UnitGradients { entries }
    }

    pub fn get(&mut self, index: usize) -> &mut D::Buffer {
        match self.entries.iter_mut().find(|(entry, _)| *entry == index) {
            Some((_, buffer)) => buffer,
            None => unreachable!("tensor {index} does not belong to this unit"),
        }
    }

    /// Several different ones at once, in the order of `indices`; `None` where `indices` has none.
    pub fn get_several<const N: usize>(&mut self, indices: [Option<usize>; N]) -> [Option<&mut D::Buffer>; N] {
        let mut found: [Option<&mut D::Buffer>; N] = std::array::from_fn(|_| None);
        for (entry, buffer) in &mut self.entries {
            if let Some(place) = indices.iter().position(|index| *index == Some(*entry)) {
                found[place] = Some(buffer);
            }
        }
        found
    }
}

/// Gives a pass its tensors, and takes their gradients.
///
/// A pass asks for [`Unit::Embedding`], the layers ascending and [`Unit::Head`], each once; a pass with a backward asks for the head with
/// [`ParameterSource::backward`] only, for its forward too, then for the layers descending and the embedding. Each call runs `compute` once.
///
/// All ranks make the same calls in the same order. A pass has no way to go on without a rank that is lost: an implementation
/// unwinds out of these calls then, as a device does that fails.
pub trait ParameterSource<D: Device> {
    /// Runs `compute` with the tensors of `unit`. `next` is what the pass will ask for after it: it is fetched meanwhile.
    fn forward(&mut self, unit: Unit, next: Option<Unit>, compute: &mut dyn FnMut(&UnitTensors<'_, D>));

    /// The same, with room for gradients, to which `compute` adds. Those of the unit before are sent to their owners meanwhile.
    /// The backward of [`Unit::Embedding`] reads no tensors: an implementation need not fetch them for it.
    fn backward(
        &mut self,
        unit: Unit,
        next: Option<Unit>,
        compute: &mut dyn FnMut(&UnitTensors<'_, D>, &mut UnitGradients<'_, D>),
    );

    /// The last call of a backward pass: returns when all gradients are where they belong.
    fn finish_backward(&mut self);
}

/// Brings keys, values and queries to the ranks that share the documents of a batch.
pub trait SequenceExchange<D: Device> {
    /// That share them, this one included.
    fn ranks(&self) -> usize;

    /// Into how many groups of key/value heads a layer's exchange is cut, so that one travels while another computes. At least 1.
    fn head_groups(&self) -> usize;

    /// `buffer` holds `share` numbers of every rank from its start on, of which this rank's are filled: fills the others. `meanwhile`
    /// runs beside it, once, and touches other buffers. `share` is the same on all ranks, and 0 where all documents are whole.
    fn gather(&mut self, buffer: &mut D::Buffer, share: usize, meanwhile: &mut dyn FnMut());
}

/// Nothing to exchange: every document is whole.
pub struct NoExchange;

impl<D: Device> SequenceExchange<D> for NoExchange {
    fn ranks(&self) -> usize {
        1
    }
    fn head_groups(&self) -> usize {
        1
    }
    fn gather(&mut self, _: &mut D::Buffer, _: usize, meanwhile: &mut dyn FnMut()) {
        meanwhile();
    }
}

/// What one rank computes of a packed batch. There may be nothing: the rank then only takes part in what all ranks do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrainingPass {
    /// `[tokens]`
    pub ids: Vec<u32>,
    /// `[tokens]` position in its document.
    pub positions: Vec<usize>,
    /// Rows whose next token is scored, ascending.
    pub scored_rows: Vec<usize>,
    /// `[scored_rows]` the token that each predicts: taken before the batch was cut, for it may lie on another rank.
    pub targets: Vec<u32>,
    pub attention: AttentionPlan,
}

impl TrainingPass {
    /// All of a batch.
    pub fn whole(batch: &Batch) -> TrainingPass {
        let lengths: Vec<usize> = batch.lengths().collect();
        TrainingPass {
            ids: batch.ids.clone(),
            positions: lengths.iter().flat_map(|&length| 0..length).collect(),
            scored_rows: batch.scored_rows.clone(),
            targets: batch.targets(),
            attention: AttentionPlan::whole(&lengths),
        }
    }
}
