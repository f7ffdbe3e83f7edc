//! ZeRO-3 (Rajbhandari et al. 2020): how tensors are cut over all ranks, and what each collective of a step moves.
//!
//! ```text
//! start     gather embedding; gather layer 0 meanwhile
//! forward   layer i: gather layer i+1 meanwhile, or the head; keys and values of layer i in head groups
//! head      forward and backward at once; gather the context group's scores
//! backward  layer i: forward once more if it kept nothing, backward; gather layer i-1, scatter the gradients of layer i+1 meanwhile;
//!           keys and values again, and queries
//! end       scatter the gradients of layer 0, then of the embedding
//! ```
//!
//! What is still there is not gathered again: the last two layers in the backward, and a tied embedding for the head, whose
//! gradients then travel with the embedding's.
//!
//! Matrices travel as precisely as products read them (bf16 on a GPU, f32 on the CPU); norms and biases in f32, as their kernels do, so
//! that a sharded forward has the bits of one that is not. Gradients and scores travel in f32.

use super::context::ContextPlan;
use super::context_exchange::{head_groups, score_share};
use super::mesh::{Mesh, Placement};
use super::sharded_parameters::LAYER_SLOTS;
use crate::device::AttentionPlan;
use crate::model::{Layout, ModelConfig, Unit, exchanged_query_numbers};

const F32: u64 = 4;

/// Shards start at multiples of this many elements: 16 bytes of bf16, what a kernel loads at once.
const SHARD_GRAIN: usize = 8;

/// What a step sums over all ranks beside gradients: their squares, one f64. What replicas tell each other for the metrics is JSON over
/// the host, as long as their digits are, and is not planned.
pub const SQUARES_BYTES: u64 = size_of::<f64>() as u64;

/// A tensor of `elements` cut over `ranks`: equal shards, the last ones padded or empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorShards {
    elements: usize,
    ranks: usize,
}

impl TensorShards {
    /// 0 ranks are read as 1.
    pub fn new(elements: usize, ranks: usize) -> TensorShards {
        TensorShards { elements, ranks: ranks.max(1) }
    }

    /// Elements of every rank's shard, padding included. One rank pads nothing.
    pub fn shard_elements(self) -> usize {
        match self.ranks {
            1 => self.elements,
            ranks => self.elements.div_ceil(ranks).next_multiple_of(SHARD_GRAIN),
        }
    }

    /// Elements of the gathered tensor, padding included.
    pub fn padded_elements(self) -> usize {
        self.shard_elements() * self.ranks
    }

    /// The tensor's own elements that `rank` holds, without padding.
    pub fn range(self, rank: usize) -> std::ops::Range<usize> {
        let at = |rank: usize| (rank * self.shard_elements()).min(self.elements);
        at(rank)..at(rank + 1)
    }
}

/// Tensors that are gathered together, as padded elements over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Padded {
    matrices: u64,
    vectors: u64,
}

impl Padded {
    fn of(layout: &Layout, indices: impl IntoIterator<Item = usize>, ranks: usize) -> Padded {
        let mut padded = Padded::default();
        for entry in indices.into_iter().map(|index| &layout.entries[index]) {
            let elements = TensorShards::new(entry.length(), ranks).padded_elements() as u64;
            if entry.kind.decays() { padded.matrices += elements } else { padded.vectors += elements }
        }
        padded
    }

    /// As they travel, matrices in numbers of so many bytes.
    fn gathered_bytes(self, matrix_bytes: u64) -> u64 {
        matrix_bytes * self.matrices + F32 * self.vectors
    }
    fn gradient_bytes(self) -> u64 {
        F32 * (self.matrices + self.vectors)
    }
}

/// A model's tensors cut over ranks, as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardedSizes {
    ranks: u64,
    /// Of one number of a matrix as it travels.
    matrix_bytes: u64,
    layers: usize,
    /// Everything that is stored.
    stored: Padded,
    /// Numbers of the matrices that products read.
    multiplied: u64,
    layer: Padded,
    /// The embedding, or the head's matrix: both are of one shape.
    table: Padded,
    final_norm: Padded,
    tied: bool,
    /// Of one rank's shard of the largest tensor.
    largest_shard: u64,
}

impl ShardedSizes {
    /// Cut over `ranks`; a number of a matrix takes `matrix_bytes` as it travels.
    pub fn new(config: &ModelConfig, ranks: usize, matrix_bytes: usize) -> ShardedSizes {
        let layout = Layout::new(config);
        let numbers = |index: usize| layout.entries[index].length() as u64;
        let shards = |index: usize| TensorShards::new(layout.entries[index].length(), ranks).shard_elements() as u64;
        ShardedSizes {
            ranks: ranks.max(1) as u64,
            matrix_bytes: matrix_bytes as u64,
            layers: config.layers,
            stored: Padded::of(&layout, 0..layout.entries.len(), ranks),
            multiplied: (0..layout.entries.len()).filter(|&index| layout.is_multiplied(index)).map(numbers).sum(),
            layer: Padded::of(&layout, layout.unit(Unit::Layer(0)), ranks),
            table: Padded::of(&layout, [layout.embedding], ranks),
            final_norm: Padded::of(&layout, [layout.final_norm], ranks),
            tied: layout.is_tied(),
            largest_shard: (0..layout.entries.len()).map(shards).max().unwrap_or(0),
        }
    }

    /// Of one rank: the copy of its part of the matrices from which they are gathered; where it is the only one, of those that
    /// products read.
    pub fn weights_shard(&self) -> u64 {
        self.matrix_bytes * if self.ranks == 1 { self.multiplied } else { self.stored.matrices / self.ranks }
    }

    /// Of one rank: what the optimizer changes, in f32. Gradients take as much, the two moments twice.
    pub fn master_shard(&self) -> u64 {
        F32 * (self.stored.matrices + self.stored.vectors) / self.ranks
    }

    /// The whole model as products and norms read it.
    pub fn whole_weights(&self) -> u64 {
        self.stored.gathered_bytes(self.matrix_bytes)
    }

    /// Where tensors are gathered: the layer that computes and the one ahead, the embedding or the head.
    pub fn gathered(&self) -> u64 {
        let layers = self.layers.min(LAYER_SLOTS) as u64;
        layers * self.gathered_bytes(self.layer) + self.gathered_bytes(self.table) + self.gathered_bytes(self.final_norm)
    }

    /// Where whole gradients are summed, of the same tensors, and a shard arrives.
    pub fn whole_gradients(&self) -> u64 {
        let layers = self.layers.min(LAYER_SLOTS) as u64;
        let places = layers * self.layer.gradient_bytes() + self.table.gradient_bytes() + self.final_norm.gradient_bytes();
        places + F32 * self.largest_shard
    }

    fn gathered_bytes(&self, tensors: Padded) -> u64 {
        tensors.gathered_bytes(self.matrix_bytes)
    }
}

/// What a collective is for, which decides its kind and its precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Collective {
    GatherWeights,
    ScatterGradients,
    GatherKeysValues,
    GatherQueries,
    GatherScores,
}

impl Collective {
    pub fn name(self) -> &'static str {
        match self {
            Collective::GatherWeights => "weights_all_gather",
            Collective::ScatterGradients => "gradients_reduce_scatter",
            Collective::GatherKeysValues => "keys_values_all_gather",
            Collective::GatherQueries => "queries_all_gather",
            Collective::GatherScores => "scores_all_gather",
        }
    }

    /// An all-gather; the other is a reduce-scatter.
    pub fn gathers(self) -> bool {
        self != Collective::ScatterGradients
    }

    /// Whose ranks take part.
    pub fn group(self) -> Group {
        match self {
            Collective::GatherWeights | Collective::ScatterGradients => Group::World,
            Collective::GatherKeysValues | Collective::GatherQueries | Collective::GatherScores => Group::Context,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    World,
    Context,
}

impl Group {
    pub fn placement(self, mesh: &Mesh) -> Placement {
        match self {
            Group::World => mesh.world_placement(),
            Group::Context => mesh.context_placement(),
        }
    }
}

/// One collective, or several in head groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    pub collective: Collective,
    /// Of the whole buffer: what every rank has after an all-gather, or hands to a reduce-scatter.
    pub whole_bytes: u64,
}

impl Transfer {
    /// What a rank hands to the collective: its shard of an all-gather, all of a reduce-scatter.
    pub fn payload_bytes(self, mesh: &Mesh) -> u64 {
        if self.collective.gathers() { self.shard_bytes(mesh) } else { self.whole_bytes }
    }

    /// One rank's part of the buffer.
    pub fn shard_bytes(self, mesh: &Mesh) -> u64 {
        self.whole_bytes / self.collective.group().placement(mesh).ranks() as u64
    }
}

/// What computes while transfers are under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Start,
    Forward,
    Head,
    Backward,
    End,
}

/// A part of a micro-batch and the transfers that must be done by its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    pub work: Work,
    pub transfers: Vec<Transfer>,
}

/// Bytes of the keys and values of one layer that the ranks of a context group exchange, and of its queries with what their gradients
/// need, in numbers of `number_bytes`.
fn exchanged_bytes(config: &ModelConfig, plan: &ContextPlan, number_bytes: usize) -> (u64, u64) {
    let block = AttentionPlan::block_numbers(config.key_value_heads, config.head_dim);
    let query = exchanged_query_numbers(config.heads(), head_groups(config, plan.ranks()));
    let bytes = |of_rank: usize| (number_bytes * plan.ranks() * of_rank) as u64;
    (bytes(plan.shared_blocks() * block), bytes(plan.shared_rows() * query))
}

/// The stages of one micro-batch in the order of the module's head; matrices, keys, values and queries travel in numbers of
/// `number_bytes`.
/// Groups of one rank exchange nothing.
pub fn micro_batch_schedule(config: &ModelConfig, mesh: &Mesh, plan: &ContextPlan, number_bytes: usize) -> Vec<Stage> {
    let sizes = ShardedSizes::new(config, mesh.world(), number_bytes);
    let transfer = |collective, whole_bytes| Transfer { collective, whole_bytes };
    let gather = |tensors: Padded| transfer(Collective::GatherWeights, sizes.gathered_bytes(tensors));
    let scatter = |tensors: Padded| transfer(Collective::ScatterGradients, tensors.gradient_bytes());
    let (key_values, queries) = exchanged_bytes(config, plan, number_bytes);
    let key_values = transfer(Collective::GatherKeysValues, key_values);
    let queries = transfer(Collective::GatherQueries, queries);
    let scores = transfer(Collective::GatherScores, F32 * (plan.ranks() * score_share(plan.most_tokens())) as u64);
    let stage = |work: Work, transfers: &[Transfer]| {
        let moves = |transfer: &&Transfer| transfer.whole_bytes > 0 && transfer.collective.group().placement(mesh).ranks() > 1;
        Stage { work, transfers: transfers.iter().filter(moves).copied().collect() }
    };
    let ShardedSizes { layer, table, final_norm, tied, .. } = sizes;
    let of_the_head = if tied { vec![final_norm] } else { vec![table, final_norm] };

    let mut stages = vec![stage(Work::Start, &[gather(table), gather(layer)])];
    for index in 0..config.layers {
        let mut transfers = vec![key_values];
        if index + 1 < config.layers {
            transfers.push(gather(layer));
        } else {
            transfers.extend(of_the_head.iter().map(|&tensors| gather(tensors)));
        }
        stages.push(stage(Work::Forward, &transfers));
    }
    stages.push(stage(Work::Head, &[scores]));
    for index in (0..config.layers).rev() {
        let mut transfers = vec![key_values, queries];
        if index + 1 < config.layers {
            transfers.push(scatter(layer));
        } else {
            transfers.extend(of_the_head.iter().map(|&tensors| scatter(tensors)));
        }
        // Layer index - 1, unless it is still there from the forward.
        if index > 0 && index - 1 + LAYER_SLOTS < config.layers {
            transfers.push(gather(layer));
        }
        stages.push(stage(Work::Backward, &transfers));
    }
    stages.push(stage(Work::End, &[scatter(layer), scatter(table)]));
    stages
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn named(name: &str) -> ModelConfig {
        ModelConfig::named(name).expect("a known shape")
    }

    #[test]
    fn shards_are_equal_and_padded() {
        let shards = TensorShards::new(100, 8);
        assert_eq!((shards.shard_elements(), shards.padded_elements()), (16, 128));
        assert_eq!((shards.range(0), shards.range(6), shards.range(7)), (0..16, 96..100, 100..100));
        assert_eq!(TensorShards::new(100, 1).padded_elements(), 100);
        assert_eq!(TensorShards::new(0, 4).padded_elements(), 0);
    }

    proptest! {
        #[test]
        fn shards_partition_a_tensor(elements in 0usize..100_000, ranks in 1usize..200) {
            let shards = TensorShards::new(elements, ranks);
            let mut next = 0;
            for rank in 0..ranks {
                let range = shards.range(rank);
                prop_assert!(range.start == next && range.len() <= shards.shard_elements());
                next = range.end;
            }
            prop_assert_eq!(next, elements);
        }
    }

    /// `tiny` on one rank: embedding 440 x 128; a layer 196,608 in matrices (see `flops`), norms 2 x 128 and 2 x 32.
    #[test]
    fn tiny_by_hand() {
        let sizes = ShardedSizes::new(&named("tiny"), 1, 2);
        assert_eq!(sizes.table, Padded { matrices: 56_320, vectors: 0 });
        assert_eq!(sizes.layer, Padded { matrices: 196_608, vectors: 320 });
        assert_eq!(sizes.final_norm, Padded { matrices: 0, vectors: 128 });
        assert_eq!(sizes.master_shard(), 4 * 450_304);
        assert_eq!(sizes.weights_shard(), 2 * (450_304 - 2 * 320 - 128));
        assert_eq!(ShardedSizes::new(&named("tiny"), 1, 4).weights_shard(), 2 * sizes.weights_shard());
        // Two layers, the table and the final norm; the largest tensor, gate and up, has 98,304 elements.
        assert_eq!(sizes.gathered(), 2 * (2 * 196_608 + 4 * 320) + 2 * 56_320 + 4 * 128);
        assert_eq!(sizes.whole_gradients(), 4 * (2 * 196_928 + 56_448 + 98_304));
    }

    /// On 7 ranks 196,608 elements in four matrices are padded: 32,768 -> 7 x 4,688, 16,384 -> 7 x 2,344,
    /// 98,304 -> 7 x 14,048, 49,152 -> 7 x 7,024; 128 -> 7 x 24, 32 -> 7 x 8.
    #[test]
    fn padding_by_hand() {
        let sizes = ShardedSizes::new(&named("tiny"), 7, 2);
        assert_eq!(sizes.layer, Padded { matrices: 7 * (4_688 + 2_344 + 14_048 + 7_024), vectors: 7 * (2 * 24 + 2 * 8) });
    }

    fn total(stages: &[Stage], collective: Collective) -> u64 {
        stages.iter().flat_map(|stage| &stage.transfers).filter(|t| t.collective == collective).map(|t| t.whole_bytes).sum()
    }

    /// `tiny` on two ranks that share one sequence of 512: every shard is a multiple of 8, so nothing is padded.
    #[test]
    fn a_micro_batch_of_tiny_by_hand() {
        let (config, mesh) = (named("tiny"), Mesh::new(1, 2, 2).expect("a mesh"));
        let plan = ContextPlan::new(&[512], 2, 0);
        let stages = micro_batch_schedule(&config, &mesh, &plan, 2);
        assert_eq!(stages.len(), 1 + 2 + 1 + 2 + 1);
        // Tied: the head's matrix is still there, and so are both layers in the backward.
        let (embedding, layer, norm) = (2 * 56_320, 2 * 196_608 + 4 * 320, 4 * 128);
        assert_eq!(total(&stages, Collective::GatherWeights), embedding + 2 * layer + norm);
        assert_eq!(total(&stages, Collective::ScatterGradients), 4 * (56_320 + 2 * 196_928 + 128));
        // 512 tokens of 2 x 2 heads of 32, in two layers, forward and backward; queries and their outputs' gradients of 4 heads, in two
        // groups, with 8 bytes of statistics per head: 8 numbers a group.
        assert_eq!(total(&stages, Collective::GatherKeysValues), 2 * 2 * 512 * 128 * 2);
        assert_eq!(total(&stages, Collective::GatherQueries), 2 * 512 * 2 * (2 * 2 * 32 + 8) * 2);
        // Two scores of each of 256 tokens on either rank.
        assert_eq!(total(&stages, Collective::GatherScores), 4 * 2 * 512);
        let gather = stages[1].transfers[1];
        assert_eq!((gather.payload_bytes(&mesh), gather.shard_bytes(&mesh)), (layer / 2, layer / 2));
        let scatter = stages[4].transfers[2];
        assert_eq!(scatter.payload_bytes(&mesh), 4 * 128, "the final norm's gradients, behind the last layer");
    }

    /// Untied, 36 layers on 128 ranks: the embedding, the head, all layers forward, and backward all but the last two.
    #[test]
    fn what_is_still_there_is_not_gathered_again() {
        let (config, mesh) = (named("qwen3-8b"), Mesh::new(16, 8, 8).expect("a mesh"));
        let stages = micro_batch_schedule(&config, &mesh, &ContextPlan::new(&[131_072], 8, 0), 2);
        let (layer, table, norm) = (2 * 192_937_984 + 4 * 10_240, 2 * 622_329_856, 4 * 4096);
        assert_eq!(total(&stages, Collective::GatherWeights), (36 + 34) * layer + 2 * table + norm);
    }

    #[test]
    fn one_rank_moves_nothing() {
        let (config, mesh) = (named("tiny"), Mesh::new(1, 1, 1).expect("a mesh"));
        let stages = micro_batch_schedule(&config, &mesh, &ContextPlan::new(&[512], 1, 0), 2);
        assert!(stages.iter().all(|stage| stage.transfers.is_empty()));
    }

    /// Keys and values of one layer of Qwen3-8B at 131,072 tokens: 2 x 1,024 numbers a token, 512 MiB in bf16; queries 32 x (2 x 128 + 4), 2,080
    /// MiB.
    #[test]
    fn keys_and_values_of_a_long_sequence() {
        let (config, mesh) = (named("qwen3-8b"), Mesh::new(16, 8, 8).expect("a mesh"));
        let stages = micro_batch_schedule(&config, &mesh, &ContextPlan::new(&[131_072], 8, 0), 2);
        assert_eq!(total(&stages[1..2], Collective::GatherKeysValues), 512 << 20);
        assert_eq!(total(&stages, Collective::GatherKeysValues), 2 * 36 * (512 << 20));
        assert_eq!(total(&stages, Collective::GatherQueries), 36 * (2080 << 20));
    }

    /// Short documents on 4 ranks: nothing to exchange but weights and gradients.
    #[test]
    fn whole_documents_exchange_nothing() {
        let (config, mesh) = (named("tiny"), Mesh::new(1, 4, 4).expect("a mesh"));
        let stages = micro_batch_schedule(&config, &mesh, &ContextPlan::new(&[100; 40], 4, 0), 2);
        assert_eq!(total(&stages, Collective::GatherKeysValues), 0);
        assert!(total(&stages, Collective::GatherWeights) > 0);
    }
}
