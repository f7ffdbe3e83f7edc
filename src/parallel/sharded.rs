//! A model over the ranks of a world: every rank holds a part of each tensor, and computes a part of each batch.

use std::path::Path;

use super::context::{ContextPlan, pairs_per_token};
use super::context_exchange::{ContextExchange, gather_scores, head_groups, own_cotangents};
use super::context_shard::ContextShard;
use super::sharded_parameters::{Held, ShardedParameters};
use super::sharding::TensorShards;
use super::world::World;
use crate::collectives::CollectiveError;
use crate::device::{Cotangents, Device, Scores};
use crate::model::{
    Layout, Model, ModelConfig, ModelError, Network, PassSettings, Piece, RopeSettings, initial_values, read_weights,
};
use crate::types::Batch;

/// One rank's part of a model. All ranks make the same calls in the same order, each replica with batches of its own; the ranks of a
/// context group give the same batch.
///
/// A pass that loses a rank unwinds with the [`CollectiveError`] as payload.
pub struct ShardedModel<D: Device> {
    network: Network<D>,
    parameters: ShardedParameters<D>,
    world: World<D>,
}

impl<D: Device> ShardedModel<D> {
    /// Loads a Hugging Face directory as [`Model::load`] does; each rank reads all of it and keeps its part.
    ///
    /// # Errors
    /// One line naming the file, and the field or tensor, for whatever cannot be read or run. Other ranks may have been luckier: they
    /// have to be asked before the next call.
    pub fn load(device: D, directory: &Path, world: &World<D>) -> Result<Self, ModelError> {
        let config = ModelConfig::load_for(&device, directory)?;
        let mut model = ShardedModel::zeroed(device, config, world);
        let ShardedModel { network, parameters, .. } = &mut model;
        read_weights(directory, network.layout(), |index, part, values| parameters.write(index, part.offset, &values))?;
        model.after_step();
        Ok(model)
    }

    /// The weights of [`Model::initialise`].
    ///
    /// The device must be able to run it: see [`ModelConfig::check_on`].
    pub fn initialise(device: D, config: ModelConfig, seed: u64, world: &World<D>) -> Self {
        let mut model = ShardedModel::zeroed(device, config, world);
        let ShardedModel { network, parameters, .. } = &mut model;
        for index in 0..network.layout().entries.len() {
            let range = parameters.range(index);
            let values = initial_values(network.config(), network.layout(), index, range.clone(), seed);
            parameters.write(index, range.start, &values);
        }
        model.after_step();
        model
    }

    fn zeroed(device: D, config: ModelConfig, world: &World<D>) -> Self {
        let network = Network::new(device.clone(), config);
        let parameters = ShardedParameters::zeroed(device, network.layout().clone(), world.world.clone());
        ShardedModel { network, parameters, world: world.clone() }
    }

    pub fn config(&self) -> &ModelConfig {
        self.network.config()
    }

    /// As [`Network::set_rope`]; replicas made before keep theirs.
    pub fn set_rope(&mut self, rope: &RopeSettings) -> Result<bool, String> {
        self.network.set_rope(rope)
    }

    pub fn device(&self) -> &D {
        self.network.device()
    }

    /// Of the whole model.
    pub fn parameter_count(&self) -> usize {
        self.layout().parameter_count()
    }

    pub(crate) fn layout(&self) -> &Layout {
        self.network.layout()
    }

    /// Log-probability and entropy at each of `batch.scored_rows`, at `temperature` (0 is read as 1).
    ///
    /// Panics if an id is not below the vocabulary, or a sequence's rows are not as [`Batch`] says.
    pub fn score(&mut self, batch: &Batch, temperature: f32) -> Scores {
        let parts = self.cut(batch);
        let mut exchange = exchange(&self.network, &self.world);
        let own = self.network.score(&mut self.parameters, &mut exchange, &parts.own.pass, temperature);
        parts.gather(&self.network, &self.world, &own)
    }

    /// Scores a batch, asks for the loss's cotangents with respect to these scores, and adds the gradients of all weights: over
    /// all ranks, each rank keeping its part. All ranks of a context group see the scores of the whole batch.
    pub fn forward_backward(
        &mut self,
        batch: &Batch,
        settings: PassSettings,
        cotangents: impl FnOnce(&Scores) -> Cotangents,
    ) -> Scores {
        let parts = self.cut(batch);
        let mut exchange = exchange(&self.network, &self.world);
        let mut scores = Scores::default();
        let (network, world) = (&self.network, &self.world);
        network.forward_backward(&mut self.parameters, &mut exchange, &parts.own.pass, settings, |own| {
            scores = parts.gather(network, world, own);
            own_cotangents(&cotangents(&scores), &parts.own.score_places)
        });
        scores
    }

    /// Every context rank's part of a batch.
    fn cut(&self, batch: &Batch) -> Parts {
        let plan = ContextPlan::of(batch, self.world.context.ranks(), pairs_per_token(self.config()));
        let places = (0..plan.ranks()).map(|rank| plan.score_places(batch, rank)).collect();
        Parts { own: plan.shard(batch, self.world.context.rank()), places, most_tokens: plan.most_tokens() }
    }

    /// What an optimizer changes, in stored order: this rank's part of each tensor. [`ShardedModel::after_step`] follows.
    pub fn pieces(&mut self) -> impl Iterator<Item = Piece<'_, D>> {
        self.parameters.pieces()
    }

    /// Brings what is sent to other ranks up to date with what an optimizer has changed.
    pub fn after_step(&mut self) {
        self.parameters.refresh_travelling();
    }

    pub fn clear_gradients(&mut self) {
        self.parameters.clear_gradients();
    }

    /// The whole model on this rank, to sample from: its weights as precise as products read them, and no others.
    pub fn replica(&self) -> Result<Model<D>, CollectiveError> {
        let ranks = self.world.world.ranks();
        let room = |elements| TensorShards::new(elements, ranks).padded_elements();
        let mut model = Model::receivable(self.device().clone(), self.config().clone(), room);
        self.refresh(&mut model)?;
        Ok(model)
    }

    /// Brings a [`ShardedModel::replica`] up to date, tensor by tensor.
    pub fn refresh(&self, replica: &mut Model<D>) -> Result<(), CollectiveError> {
        self.parameters.gather_all(replica.parameters_mut())
    }

    /// Gathers every tensor in f32, and gives those for which `wanted(name)` holds on this rank to `accept(name, shape, values)`, in
    /// an order of its own. No pass may be under way.
    pub fn gather_tensors(
        &mut self,
        wanted: impl Fn(&str) -> bool,
        accept: impl FnMut(&str, &[usize], Vec<f32>),
    ) -> Result<(), CollectiveError> {
        self.gather(Held::Values, wanted, accept)
    }

    /// The same of the gradients.
    pub fn gather_gradients(
        &mut self,
        wanted: impl Fn(&str) -> bool,
        accept: impl FnMut(&str, &[usize], Vec<f32>),
    ) -> Result<(), CollectiveError> {
        self.gather(Held::Gradients, wanted, accept)
    }

    fn gather(
        &mut self,
        held: Held,
        wanted: impl Fn(&str) -> bool,
        mut accept: impl FnMut(&str, &[usize], Vec<f32>),
    ) -> Result<(), CollectiveError> {
        let (device, layout) = (self.network.device(), self.network.layout());
        self.parameters.for_each_whole(held, |index, whole| {
            for part in layout.entries[index].parts.iter().filter(|part| wanted(&part.name)) {
                accept(&part.name, &part.shape, device.read(whole, part.offset, part.length()));
            }
        })
    }
}

fn exchange<'a, D: Device>(network: &Network<D>, world: &'a World<D>) -> ContextExchange<'a, D> {
    ContextExchange { links: &*world.context, head_groups: head_groups(network.config(), world.context.ranks()) }
}

/// A batch cut over the ranks of a context group.
struct Parts {
    own: ContextShard,
    /// By rank, where the scores of its rows belong.
    places: Vec<Vec<usize>>,
    /// Of the rank that has most.
    most_tokens: usize,
}

impl Parts {
    /// The whole batch's scores.
    fn gather<D: Device>(&self, network: &Network<D>, world: &World<D>, own: &Scores) -> Scores {
        gather_scores(network.device(), &*world.context, own, &self.places, self.most_tokens)
    }
}
