//! Where attention of training passes finds keys, values and queries, its own and those that other ranks computed.

use std::ops::Range;

use super::ops::Heads;

/// Keys of one block of [`AttentionPlan`]: what the attention kernels load at once.
pub const KEYS_PER_BLOCK: usize = 64;

/// Consecutive rows of a pass: queries of one document, from position `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuerySlice {
    /// First row in the pass.
    pub row: usize,
    /// Rows, at least one.
    pub length: usize,
    pub document: usize,
    /// Position of the first row in its document, a multiple of [`KEYS_PER_BLOCK`].
    pub first: usize,
}

/// Where attention of a training pass finds the keys and values that its rows attend to and, in the backward, the queries that
/// attend to its keys. What other ranks computed arrives in the same buffers, so that one call sees all keys of a document, or all
/// its queries, in their order, whoever computed them.
///
/// A buffer of blocks for `h` key/value heads is `[blocks, 2 (keys, values), h, KEYS_PER_BLOCK, head_dim]` of
/// [`Role::Activations`](super::Role::Activations).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionPlan {
    /// In ascending order of rows, which they cover.
    pub slices: Vec<QuerySlice>,
    /// `[documents][ceil(keys / KEYS_PER_BLOCK)]` the block of each run of keys; empty for documents without rows here.
    pub tables: Vec<Vec<u32>>,
    /// Blocks of the whole buffer.
    pub blocks: usize,
    /// The first `ranks * shared` blocks are exchanged, `shared` of them filled by each rank, in rank order; 0 on one rank.
    pub shared: usize,
    pub queries: SharedQueries,
}

/// The queries of documents that several ranks share.
///
/// A buffer of them is `[ranks * rows, AttentionPlan::query_numbers]` of [`Role::Activations`](super::Role::Activations): of each row the
/// queries, the gradients of their outputs, then their log-sum-exps and deltas as the bytes of f32. So it is moved as bytes, never as
/// numbers: half of an f32 may look like a bf16 that is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedQueries {
    /// Rows of every rank's part of the buffer, in rank order; 0 where all documents are whole.
    pub rows: usize,
    /// Where this rank's part begins: its rows of shared documents lie there in their order.
    pub own: usize,
    /// All slices of the shared documents that have rows here, whoever has them, ascending by document and position. `row` is the
    /// place in the buffer.
    pub slices: Vec<QuerySlice>,
}

impl AttentionPlan {
    /// Whole documents of these lengths, one after another, that need nothing from other ranks.
    pub fn whole(lengths: &[usize]) -> AttentionPlan {
        let mut plan = AttentionPlan::default();
        let mut row = 0;
        for (document, &length) in lengths.iter().enumerate() {
            if length > 0 {
                plan.slices.push(QuerySlice { row, length, document, first: 0 });
            }
            let end = plan.blocks + length.div_ceil(KEYS_PER_BLOCK);
            plan.tables.push((plan.blocks as u32..end as u32).collect());
            plan.blocks = end;
            row += length;
        }
        plan
    }

    /// Rows of the pass.
    pub fn rows(&self) -> usize {
        self.slices.last().map_or(0, |slice| slice.row + slice.length)
    }

    /// Numbers of one block for so many key/value heads.
    pub fn block_numbers(key_value_heads: usize, head_dim: usize) -> usize {
        2 * key_value_heads * KEYS_PER_BLOCK * head_dim
    }

    /// Numbers of a row of exchanged queries, those of the groups of the key/value heads `range`. A statistic in f32 takes the room of two;
    /// rows start at multiples of 8 numbers, 16 bytes of bf16.
    pub fn query_numbers(heads: Heads, range: &Range<usize>) -> usize {
        let query_heads = range.len() * heads.group();
        2 * query_heads * heads.head_dim + (4 * query_heads).next_multiple_of(8)
    }

    /// All queries of a document that ranks share, ascending; none of one that is whole.
    pub fn queries_of(&self, document: usize) -> &[QuerySlice] {
        let slices = &self.queries.slices;
        let at = |document| slices.partition_point(|slice| slice.document < document);
        &slices[at(document)..at(document + 1)]
    }

    /// The slices here of documents that other ranks share.
    pub fn shared_slices(&self) -> impl Iterator<Item = &QuerySlice> {
        self.slices.iter().filter(|slice| !self.queries_of(slice.document).is_empty())
    }

    /// The slices here of documents that are whole.
    pub fn whole_slices(&self) -> impl Iterator<Item = &QuerySlice> {
        self.slices.iter().filter(|slice| self.queries_of(slice.document).is_empty())
    }

    /// Of each row that this rank contributes to the exchange of queries, in that order: its row in the pass.
    pub fn contributed_rows(&self) -> impl Iterator<Item = usize> {
        self.shared_slices().flat_map(|slice| slice.row..slice.row + slice.length)
    }
}
