//! What one rank holds while it trains, by purpose.
//!
//! Nothing is given back between the phases of a step: the passes' memory is kept for the next one, so the total is the sum.

use super::context::ContextPlan;
use super::context_exchange::{head_groups, score_share};
use super::mesh::Mesh;
use super::sharding::ShardedSizes;
use crate::device::AttentionPlan;
use crate::device::cuda::{PagedKeyValues, head_workspace_bytes};
use crate::model::{ModelConfig, ROW_GRAIN, bytes_per_scored_row, bytes_per_token, query_buffer_numbers, rotary_table_bytes};

/// Bytes of one number of the activations, weights and keys that a GPU computes with.
pub(super) const BF16: usize = 2;

/// Bytes of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// Its shard of the matrices in bf16, from which they are gathered; on one rank those that products read.
    pub weights: u64,
    /// Its shard of the weights that the optimizer changes, in f32.
    pub master: u64,
    /// Its shard of AdamW's two moments, in f32.
    pub moments: u64,
    /// Its shard of the gradients, in f32, summed over micro-batches.
    pub gradients: u64,
    /// Two gathered layers, the one that computes and the one ahead, and the embedding or the head.
    pub gathered_weights: u64,
    /// Whole gradients of the same in f32: of the tensors that compute and of those being scattered.
    pub whole_gradients: u64,
    /// The input of every layer, and everything of the one that computes; of all layers where none is computed again.
    pub activations: u64,
    /// A chunk of logits and their gradients.
    pub head_workspace: u64,
    /// The rotary table, and the context group's scores.
    pub other_workspace: u64,
    /// Of one layer, in blocks: those of all ranks where documents are split.
    pub keys_values: u64,
    /// In the backward, of the one or two groups of heads that compute and travel: of all ranks' tokens in split documents.
    pub queries: u64,
    /// The built-in engine's whole model.
    pub engine_weights: u64,
    /// The built-in engine's pages of keys and values, all layers.
    pub engine_caches: u64,
}

impl RankMemory {
    /// What each of a replica's context ranks holds, `[context]`, all tokens being scored and layers computed again in the backward or
    /// not, with a built-in engine of `engine_sequences` sequences of `engine_tokens` tokens; 0 where rollouts happen elsewhere.
    pub fn of_ranks(
        config: &ModelConfig,
        mesh: &Mesh,
        plan: &ContextPlan,
        recompute: bool,
        engine_sequences: usize,
        engine_tokens: usize,
    ) -> Vec<RankMemory> {
        let sizes = ShardedSizes::new(config, mesh.world(), BF16);
        let heads = config.heads();
        // One rank computes with what it stores, and adds gradients in place.
        let if_sharded = |bytes: u64| if mesh.world() > 1 { bytes } else { 0 };
        let engine_pages = PagedKeyValues::bytes_of(heads, engine_tokens) * config.layers;
        let alike = RankMemory {
            weights: sizes.weights_shard(),
            master: sizes.master_shard(),
            moments: 2 * sizes.master_shard(),
            gradients: sizes.master_shard(),
            gathered_weights: if_sharded(sizes.gathered()),
            whole_gradients: if_sharded(sizes.whole_gradients()),
            // On one rank the engine samples from the model that is trained.
            engine_weights: if engine_sequences > 0 { if_sharded(sizes.whole_weights()) } else { 0 },
            engine_caches: (engine_sequences * engine_pages) as u64,
            ..RankMemory::default()
        };
        let activations = bytes_per_token(config, recompute, BF16) + bytes_per_scored_row(config, BF16);
        let groups = head_groups(config, plan.ranks());
        let scores = if plan.ranks() > 1 { plan.ranks() * score_share(plan.most_tokens()) * size_of::<f32>() } else { 0 };
        let of_rank = |rank: usize| {
            let tokens = plan.tokens(rank);
            let longest = plan.slices(rank).iter().map(|slice| slice.first + slice.length).max().unwrap_or(0);
            let keys_values = plan.key_blocks(rank) * AttentionPlan::block_numbers(heads.key_value_heads, heads.head_dim);
            let queries = plan.ranks() * plan.shared_rows() * query_buffer_numbers(heads, groups);
            RankMemory {
                // What is kept from pass to pass is rounded up; what is there for one operation is as long as its rows.
                activations: (activations * tokens.next_multiple_of(ROW_GRAIN)) as u64,
                head_workspace: head_workspace_bytes(config.vocabulary, tokens) as u64,
                other_workspace: (rotary_table_bytes(config, longest) + scores) as u64,
                keys_values: (keys_values * BF16) as u64,
                queries: (queries * BF16) as u64,
                ..alike
            }
        };
        (0..plan.ranks()).map(of_rank).collect()
    }

    /// Names and bytes, in the order in which they come to be.
    pub fn by_purpose(&self) -> [(&'static str, u64); 13] {
        [
            ("weights", self.weights),
            ("master", self.master),
            ("moments", self.moments),
            ("gradients", self.gradients),
            ("gathered_weights", self.gathered_weights),
            ("whole_gradients", self.whole_gradients),
            ("activations", self.activations),
            ("head_workspace", self.head_workspace),
            ("other_workspace", self.other_workspace),
            ("keys_values", self.keys_values),
            ("queries", self.queries),
            ("engine_weights", self.engine_weights),
            ("engine_caches", self.engine_caches),
        ]
    }

    pub fn total(&self) -> u64 {
        self.by_purpose().iter().map(|(_, bytes)| bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, nodes: usize, per_node: usize, context: usize, tokens: usize, engine: usize) -> RankMemory {
        let config = ModelConfig::named(name).expect("a known shape");
        let mesh = Mesh::new(nodes, per_node, context).expect("a mesh");
        RankMemory::of_ranks(&config, &mesh, &ContextPlan::new(&[tokens], context, 0), true, engine, tokens)[0]
    }

    /// `tiny`: hidden 128, query width 128, projected 256, intermediate 384, 4 heads.
    #[test]
    fn tiny_on_one_rank_by_hand() {
        let memory = of("tiny", 1, 1, 1, 1000, 2);
        assert_eq!(memory.weights, 2 * 449_536);
        assert_eq!((memory.master, memory.moments, memory.gradients), (1_801_216, 3_602_432, 1_801_216));
        assert_eq!((memory.gathered_weights, memory.whole_gradients), (0, 0));
        let layer = 2 * (2 * 128 + 2 * 256 + 128 + 2 * 384) + 4 * 4;
        let shared = 2 * (10 * 128 + 2 * 256 + 128 + 2 * 384) + 4 * 4;
        assert_eq!(memory.activations, 1024 * (2 * 128 + layer + shared));
        assert_eq!(memory.head_workspace, 1000 * 440 * 6 + 12 * 1000);
        assert_eq!(memory.other_workspace, 1024 * 32 * 4);
        // 16 blocks of 64 keys: 2 x 2 heads of 32 in bf16; two sequences of two layers in the engine, which samples from the model that
        // is trained.
        assert_eq!((memory.keys_values, memory.queries), (1024 * 2 * 64 * 2, 0));
        assert_eq!((memory.engine_caches, memory.engine_weights), (4 * memory.keys_values, 0));
        assert_eq!(of("tiny", 1, 2, 1, 1000, 2).engine_weights, 2 * 449_536 + 4 * 768);
    }

    /// Without recomputation `tiny` keeps four half layers' streams and both layers' activations.
    #[test]
    fn tiny_keeps_all_layers_by_hand() {
        let config = ModelConfig::named("tiny").expect("a known shape");
        let mesh = Mesh::new(1, 1, 1).expect("a mesh");
        let plan = ContextPlan::new(&[1000], 1, 0);
        let [kept, again] = [false, true].map(|recompute| RankMemory::of_ranks(&config, &mesh, &plan, recompute, 0, 0)[0]);
        let layer = 2 * (2 * 256 + 128 + 2 * 384) + 4 * 4;
        assert_eq!(kept.activations - again.activations, 1024 * (2 * 128 + layer));
        assert_eq!(kept.total() - again.total(), kept.activations - again.activations);
    }

    /// One rank looks an untied embedding up in f32, and keeps no copy of it that products would read.
    #[test]
    fn one_rank_packs_what_it_multiplies() {
        let untied = ModelConfig { tied_embeddings: false, ..ModelConfig::named("tiny").expect("a known shape") };
        let of = |ranks| {
            let mesh = Mesh::new(1, ranks, 1).expect("a mesh");
            RankMemory::of_ranks(&untied, &mesh, &ContextPlan::new(&[1000], 1, 0), true, 0, 0)[0]
        };
        assert_eq!((of(1).weights, of(1).master), (2 * 449_536, 4 * (450_304 + 440 * 128)));
        assert_eq!(2 * of(2).weights, 2 * (449_536 + 440 * 128));
    }

    /// Six short documents and ranks without tokens: those hold what all hold.
    #[test]
    fn ranks_hold_what_their_tokens_take() {
        let config = ModelConfig::named("tiny").expect("a known shape");
        let mesh = Mesh::new(1, 8, 8).expect("a mesh");
        let ranks = RankMemory::of_ranks(&config, &mesh, &ContextPlan::new(&[65; 6], 8, 0), true, 0, 0);
        assert_eq!((ranks[0].keys_values, ranks[0].queries), (128 * 256, 0), "two blocks");
        assert_eq!((ranks[7].keys_values, ranks[7].activations, ranks[7].head_workspace), (0, 0, 0));
        assert_eq!(ranks[0].moments, ranks[7].moments);
    }

    /// Qwen3-8B, 131,072 tokens over 8 of 128 ranks: 16,384 tokens each.
    #[test]
    fn eight_billion_on_sixteen_nodes_by_hand() {
        const MIB: u64 = 1 << 20;
        let memory = of("qwen3-8b", 16, 8, 8, 131_072, 0);
        // 36 x (2 x 4,096 + 2 x 128) + 4,096 numbers in vectors; 8,190,735,360 in all; every shard but one norm's is whole.
        assert_eq!(memory.weights, 2 * (8_190_735_360 - 308_224) / 128);
        // A norm of 128 over 128 ranks takes 8 a rank instead of 1.
        assert_eq!(memory.master, 4 * (8_190_735_360 / 128 + 72 * 7));
        let (matrices, table) = (192_937_984, 151_936 * 4096);
        assert_eq!(memory.gathered_weights, 2 * (2 * matrices + 4 * 10_240) + 2 * table + 4 * 4096);
        assert_eq!(memory.whole_gradients, 4 * (2 * (matrices + 10_240) + table + 4096 + table / 128));
        // Queries of two of four groups of 8 heads at a time: 8 x (2 x 128 + 4) numbers a token.
        assert_eq!((memory.keys_values, memory.queries), (512 * MIB, 2 * 520 * MIB));
        // Per token: 35 inputs of 8,192 bytes; a layer of 2 x (8,192 + 12,288 + 4,096 + 24,576) + 128; shared 2 x (40,960 + 12,288
        // + 4,096 + 24,576) + 128.
        assert_eq!(memory.activations, 16_384 * (35 * 8192 + 2 * 49_152 + 128 + 2 * 81_920 + 128));
        assert_eq!(memory.head_workspace, 384 * 151_936 * 6 + 16_384 * 12);
        let scores = 8 * 2 * 4 * ContextPlan::new(&[131_072], 8, 0).most_tokens() as u64;
        assert_eq!(memory.other_workspace, 131_072 * 128 * 4 + scores);
        assert_eq!(memory.engine_weights + memory.engine_caches, 0);
    }

    /// Qwen2.5-72B, 131,072 tokens over 16 of 128 ranks: 18 bytes a parameter over all ranks, and the head gathered.
    #[test]
    fn seventy_two_billion_on_sixteen_nodes_by_hand() {
        let memory = of("qwen2.5-72b", 16, 8, 16, 131_072, 0);
        let (parameters, vectors) = (72_706_203_648, 80 * (2 * 8192 + 8192 + 2 * 1024) + 8192);
        assert_eq!(memory.weights, 2 * (parameters - vectors) / 128);
        assert_eq!(memory.master, 4 * parameters / 128);
        let layer = 2 * (8192 * (10_240 + 8192) + 3 * 29_568 * 8192) + 4 * (2 * 8192 + 10_240);
        assert_eq!(memory.gathered_weights, 2 * layer + 2 * 152_064 * 8192 + 4 * 8192);
        // 8 heads of 128 as in Qwen3-8B, gathered over 16 ranks.
        assert_eq!((memory.keys_values, memory.queries), (512 << 20, 2 * (1040 << 20)));
        assert_eq!(memory.activations, 8192 * (79 * 16_384 + 2 * (16_384 + 10_240 + 8192 + 59_136) + 256 + 2 * 169_728 + 256));
    }
}
