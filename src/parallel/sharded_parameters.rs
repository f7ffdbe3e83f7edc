//! Parameters of which every rank holds a part (ZeRO-3, Rajbhandari et al. 2020), gathered when a pass needs them.
//!
//! What is gathered goes to places that are used again and again: those of two layers in turn, so that one arrives while the other
//! computes, and those of the embedding and the head, which are never needed at once and are of one shape. Whole gradients have such
//! places too. What is still in its place is not gathered again.

use std::sync::Arc;

use super::links::Links;
use super::sharding::TensorShards;
use crate::collectives::CollectiveError;
use crate::device::{Device, Role};
use crate::model::{Layout, Parameter, ParameterSource, Piece, Unit, UnitGradients, UnitTensors};

/// One rank's part of every stored tensor.
pub(super) struct ShardedParameters<D: Device> {
    device: D,
    layout: Arc<Layout>,
    links: Arc<dyn Links<D>>,
    shards: Vec<Shard<D>>,
    /// By place.
    gathered: Vec<Gathered<D>>,
    /// By place, whole.
    gradients: Vec<D::Buffer>,
    /// A shard of summed gradients on its way from where it arrived to where it is added.
    arriving: D::Buffer,
    /// Whole gradients that are computed, but not yet on their way.
    behind: Vec<Member>,
}

/// What ranks hold of every stored tensor in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    Values,
    Gradients,
}

/// One rank's part of a stored tensor, each buffer `[shard elements]`, 0 where it is padding.
struct Shard<D: Device> {
    shards: TensorShards,
    master: D::Buffer,
    /// What is sent of a matrix; of a vector the master is.
    travelling: Option<D::Buffer>,
    gradient: D::Buffer,
}

impl<D: Device> Shard<D> {
    fn sent(&self) -> &D::Buffer {
        self.travelling.as_ref().unwrap_or(&self.master)
    }
    fn elements(&self) -> usize {
        self.shards.shard_elements()
    }

    /// Puts this rank's part of a tensor where all parts arrive.
    fn place(&self, device: &D, rank: usize, parameter: &mut Parameter<D>) {
        device.copy_part(self.sent(), 0, parameter.arrival(device), rank * self.elements(), self.elements());
    }
}

/// Where a whole tensor is put.
struct Gathered<D: Device> {
    /// Which stored tensor is there.
    present: Option<usize>,
    parameter: Parameter<D>,
}

/// A stored tensor of a unit, and where it is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Member {
    index: usize,
    place: usize,
}

/// What is needed, and what travels meanwhile.
#[derive(Default)]
struct Turn {
    tensors: Vec<Member>,
    gradients: Vec<Member>,
    /// To be gathered, but for what is there.
    ahead: Vec<Member>,
    /// To be scattered.
    behind: Vec<Member>,
}

/// Layers that have places of their own at once; those of the embedding and the head come after them.
pub(super) const LAYER_SLOTS: usize = 2;

fn members(layout: &Layout, unit: Unit) -> Vec<Member> {
    let of_a_layer = layout.unit(Unit::Layer(0)).len();
    let table = layout.layers.len().min(LAYER_SLOTS) * of_a_layer;
    match unit {
        Unit::Embedding => vec![Member { index: layout.embedding, place: table }],
        Unit::Head => vec![Member { index: layout.head, place: table }, Member { index: layout.final_norm, place: table + 1 }],
        Unit::Layer(layer) => {
            let first = layer % LAYER_SLOTS * of_a_layer;
            layout.unit(unit).into_iter().zip(first..).map(|(index, place)| Member { index, place }).collect()
        }
    }
}

impl<D: Device> ShardedParameters<D> {
    /// Every rank's part of values that are still 0.
    pub fn zeroed(device: D, layout: Arc<Layout>, links: Arc<dyn Links<D>>) -> Self {
        let shard = |elements: usize, is_matrix: bool| {
            let shards = TensorShards::new(elements, links.ranks());
            let zeros = |role| device.zeros(role, shards.shard_elements());
            let travelling = is_matrix.then(|| zeros(Role::Travelling));
            Shard { shards, master: zeros(Role::Weights), travelling, gradient: zeros(Role::Gradients) }
        };
        let shards: Vec<_> = layout.entries.iter().map(|entry| shard(entry.length(), entry.kind.decays())).collect();
        let units = (0..layout.layers.len().min(LAYER_SLOTS)).map(Unit::Layer).chain([Unit::Head]);
        let (mut gathered, mut gradients) = (Vec::new(), Vec::new());
        for Member { index, place } in units.flat_map(|unit| members(&layout, unit)) {
            debug_assert_eq!(place, gathered.len());
            let padded = shards[index].shards.padded_elements();
            let parameter = Parameter::receivable(&device, &layout.entries[index], padded);
            gathered.push(Gathered { present: None, parameter });
            gradients.push(device.zeros(Role::Gradients, padded));
        }
        let largest = shards.iter().map(Shard::elements).max().unwrap_or(0);
        let arriving = device.zeros(Role::Gradients, largest);
        ShardedParameters { device, layout, links, shards, gathered, gradients, arriving, behind: Vec::new() }
    }

    /// Where this rank's part of a stored tensor lies in it.
    pub fn range(&self, index: usize) -> std::ops::Range<usize> {
        self.shards[index].shards.range(self.links.rank())
    }

    /// Takes what of `values`, elements of a stored tensor from `offset` on, is in this rank's part.
    pub fn write(&mut self, index: usize, offset: usize, values: &[f32]) {
        let range = self.range(index);
        let (from, to) = (range.start.max(offset), range.end.min(offset + values.len()));
        if from < to {
            self.device.write(&mut self.shards[index].master, from - range.start, &values[from - offset..to - offset]);
        }
    }

    /// Brings what is sent up to date with the values.
    pub fn refresh_travelling(&mut self) {
        for shard in &mut self.shards {
            if let Some(travelling) = &mut shard.travelling {
                self.device.copy(&shard.master, travelling, shard.shards.shard_elements());
            }
        }
    }

    pub fn clear_gradients(&mut self) {
        for shard in &mut self.shards {
            self.device.clear(&mut shard.gradient, shard.shards.shard_elements());
        }
    }

    /// What an optimizer changes, in stored order.
    pub fn pieces(&mut self) -> impl Iterator<Item = Piece<'_, D>> {
        let rank = self.links.rank();
        self.shards.iter_mut().zip(&self.layout.entries).map(move |(shard, entry)| Piece {
            kind: entry.kind,
            range: shard.shards.range(rank),
            values: &mut shard.master,
            packed: None,
            gradient: &shard.gradient,
        })
    }

    /// Fills whole tensors, one for each stored one, from all ranks' parts as they travel.
    pub fn gather_all(&self, parameters: &mut [Parameter<D>]) -> Result<(), CollectiveError> {
        for (shard, parameter) in self.shards.iter().zip(parameters) {
            shard.place(&self.device, self.links.rank(), parameter);
            self.links.all_gather(parameter.arrival(&self.device), shard.elements())?;
            parameter.arrived(&self.device);
        }
        Ok(())
    }

    /// Gathers every stored tensor in turn, in f32, and lends each to `see` with its index: more than its elements, if shards are
    /// padded. Uses the places of whole gradients, so no pass may be under way.
    pub fn for_each_whole(&mut self, held: Held, mut see: impl FnMut(usize, &D::Buffer)) -> Result<(), CollectiveError> {
        let layers = (0..self.layout.layers.len()).map(Unit::Layer);
        let embedding = (!self.layout.is_tied()).then_some(Unit::Embedding);
        for unit in embedding.into_iter().chain(layers).chain([Unit::Head]) {
            for Member { index, place } in members(&self.layout, unit) {
                let (whole, shard) = (&mut self.gradients[place], &self.shards[index]);
                let part = if held == Held::Values { &shard.master } else { &shard.gradient };
                self.device.copy_part(part, 0, whole, self.links.rank() * shard.elements(), shard.elements());
                self.links.all_gather(whole, shard.elements())?;
                see(index, whole);
            }
        }
        Ok(())
    }

    /// Runs `compute` with what `turn` needs, while the rest of it travels.
    ///
    /// Unwinds if a rank is lost.
    fn run(&mut self, turn: &Turn, compute: &mut dyn FnMut(&UnitTensors<'_, D>, &mut UnitGradients<'_, D>)) {
        let at = |members: &[Member], place| members.iter().find(|member| member.place == place).map(|member| member.index);
        let (device, shards, rank) = (&self.device, &self.shards, self.links.rank());
        let (mut tensors, mut arriving) = (Vec::new(), Vec::new());
        for (place, Gathered { present, parameter }) in self.gathered.iter_mut().enumerate() {
            if let Some(index) = at(&turn.tensors, place) {
                tensors.push((index, &*parameter));
            } else if let Some(index) = at(&turn.ahead, place).filter(|index| *present != Some(*index)) {
                *present = Some(index);
                shards[index].place(device, rank, parameter);
                arriving.push((shards[index].elements(), parameter));
            }
        }
        let (mut gradients, mut leaving) = (Vec::new(), Vec::new());
        for (place, buffer) in self.gradients.iter_mut().enumerate() {
            if let Some(index) = at(&turn.gradients, place) {
                gradients.push((index, buffer));
            } else if let Some(index) = at(&turn.behind, place) {
                leaving.push((index, buffer));
            }
        }

        let (tensors, mut gradients) = (UnitTensors::new(tensors), UnitGradients::new(gradients));
        let mut compute = || compute(&tensors, &mut gradients);
        if arriving.is_empty() && leaving.is_empty() {
            return compute();
        }
        let mut communicate = |links: &dyn Links<D>| {
            for (elements, parameter) in &mut arriving {
                links.all_gather(parameter.arrival(device), *elements)?;
            }
            for (index, whole) in &mut leaving {
                links.reduce_scatter(whole, shards[*index].elements())?;
            }
            Ok(())
        };
        or_unwind(self.links.overlapped(&mut communicate, &mut compute));

        arriving.into_iter().for_each(|(_, parameter)| parameter.arrived(device));
        for (index, whole) in leaving {
            let Shard { gradient, shards, .. } = &mut self.shards[index];
            let elements = shards.shard_elements();
            self.device.copy_part(whole, rank * elements, &mut self.arriving, 0, elements);
            self.device.accumulate(&self.arriving, gradient, elements);
        }
    }

    fn members(&self, unit: Unit) -> Vec<Member> {
        members(&self.layout, unit)
    }

    /// Gathers what of a unit is not there.
    fn fetch(&mut self, unit: Unit) {
        let missing = |member: &Member| self.gathered[member.place].present != Some(member.index);
        let ahead = self.members(unit);
        if ahead.iter().any(missing) {
            self.run(&Turn { ahead, ..Turn::default() }, &mut |_, _| {});
        }
    }
}

impl<D: Device> ParameterSource<D> for ShardedParameters<D> {
    fn forward(&mut self, unit: Unit, next: Option<Unit>, compute: &mut dyn FnMut(&UnitTensors<'_, D>)) {
        if unit == Unit::Embedding {
            // A pass begins: the values may have changed since the last.
            self.gathered.iter_mut().for_each(|gathered| gathered.present = None);
        }
        self.fetch(unit);
        let ahead = next.map_or_else(Vec::new, |next| self.members(next));
        let turn = Turn { tensors: self.members(unit), ahead, ..Turn::default() };
        self.run(&turn, &mut |tensors, _| compute(tensors));
    }

    fn backward(
        &mut self,
        unit: Unit,
        next: Option<Unit>,
        compute: &mut dyn FnMut(&UnitTensors<'_, D>, &mut UnitGradients<'_, D>),
    ) {
        let (gradients, is_embedding) = (self.members(unit), unit == Unit::Embedding);
        if !is_embedding {
            self.fetch(unit);
        }
        if !(is_embedding && self.layout.is_tied()) {
            for Member { index, place } in &gradients {
                self.device.clear(&mut self.gradients[*place], self.shards[*index].shards.padded_elements());
            }
        }
        let tensors = if is_embedding { Vec::new() } else { gradients.clone() };
        let ahead = next.filter(|next| *next != Unit::Embedding).map_or_else(Vec::new, |next| self.members(next));
        let turn = Turn { tensors, gradients, ahead, behind: std::mem::take(&mut self.behind) };
        self.run(&turn, compute);
        self.behind = turn.gradients;
        if unit == Unit::Head && self.layout.is_tied() {
            // It stays until the embedding has added its own.
            self.behind.retain(|member| member.index != self.layout.embedding);
        }
    }

    fn finish_backward(&mut self) {
        let behind = std::mem::take(&mut self.behind);
        self.run(&Turn { behind, ..Turn::default() }, &mut |_, _| {});
    }
}

/// A pass has no way to go on without a rank that is lost.
pub(super) fn or_unwind<T>(result: Result<T, CollectiveError>) -> T {
    result.unwrap_or_else(|error| std::panic::resume_unwind(Box::new(error)))
}
